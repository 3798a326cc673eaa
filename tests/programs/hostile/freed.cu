// Two processes of a VM take turns: each allocates three quarters of the free memory, and frees it before the other's turn. Then each
// makes a further context, for which the driver needs memory, while the other has just freed all that it could get.
#include "driver.h"
#include <cerrno>
#include <unistd.h>
#include <vector>

static const size_t PIECE = (size_t)4 << 20;

static void fail(const char *call, int code) {
    printf("%s: %d\nFAIL\n", call, code);
    exit(1);
}

static size_t free_bytes() {
    size_t free, total;
    MUST(cuMemGetInfo, &free, &total);
    return free;
}

// Allocates pieces of `bytes` in all, or as many as there are if that is 0, and frees them.
static void use(size_t bytes) {
    std::vector<CUdeviceptr> pieces;
    for (size_t used = 0; !bytes || used + PIECE <= bytes; used += PIECE) {
        CUdeviceptr piece;
        CUresult code = CU(cuMemAlloc, &piece, PIECE);
        if (!bytes && code == CUDA_ERROR_OUT_OF_MEMORY) break;
        if (code != CUDA_SUCCESS) fail("cuMemAlloc", code);
        pieces.push_back(piece);
    }
    for (CUdeviceptr piece : pieces) MUST(cuMemFree, piece);
    // A free is posted. This call returns when the host has counted it.
    free_bytes();
}

static void pass(int to) {
    if (write(to, "x", 1) != 1) fail("write", errno);
}

static void await(int from) {
    char turn;
    if (read(from, &turn, 1) != 1) fail("read", errno);
}

int main() {
    int there[2], back[2];
    if (pipe(there) || pipe(back)) return verdict(false);
    const bool first = fork() != 0;
    const int from = first ? back[0] : there[0], to = first ? there[1] : back[1];
    // A process that fails ends the other's wait.
    close(first ? back[1] : there[1]);
    use_device();
    pass(to);
    await(from);
    const size_t most = free_bytes() / 4 * 3;
    for (int turn = 0; turn < 10; turn++) {
        if (turn % 2 == first) await(from);
        else {
            use(most);
            pass(to);
        }
    }
    for (int turn = 0; turn < 2; turn++) {
        if (turn == first) {
            await(from);
            CUcontext other;
            MUST(cuCtxCreate, &other, nullptr, 0, 0);
            pass(to);
        } else {
            use(0);
            pass(to);
            await(from);
        }
    }
    return first ? verdict(true) : 0;
}
