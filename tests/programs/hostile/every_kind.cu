// Uses every kind of device memory at once, allocates and frees at random, then takes all remaining memory and waits. Each piece
// holds a value of its own, which is checked before the piece is freed. Every call succeeds or fails for lack of memory.
// Usage: every_kind NUMBER COUNT FOLDER SECONDS     one of COUNT processes, which pass memory on by files in a folder
// Prints `ready` and waits for a file `begin`; prints `refused N` and `odd N ERROR` after SECONDS, then `full ERROR`, waits for
// SIGUSR1, and gives everything back.
#include "driver.h"
#include <csignal>
#include <cstring>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

static const size_t MIB = 1 << 20;
static volatile sig_atomic_t done = 0;
static void finish(int) { done = 1; }

static long refused = 0, odd = 0, wrong = 0;
static int last_odd = 0;

// True if a call has succeeded. A refusal for lack of memory is counted, and any other error counts as odd.
static bool good(CUresult result) {
    if (result == CUDA_SUCCESS) return true;
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        refused++;
    } else {
        odd++;
        last_odd = (int)result;
    }
    return false;
}

__global__ void use_local_memory(int *to) {
    int all[256];
    asm volatile("" ::"l"(all) : "memory");
    if (to) *to = all[threadIdx.x];
}

enum Kind { SMALL, LARGE, POOL, MAPPED, MANAGED, MODULE, CONTEXT, ARRAY, KINDS };

struct Piece {
    Kind kind;
    unsigned char value;
    Mapped mapped;
    CUmodule module = nullptr;
    CUcontext context = nullptr;
    CUarray array = nullptr;
};

static CUdevice device;
static CUcontext primary;
static std::vector<Piece> pieces;
static unsigned char next_value = 0;

static std::string image(size_t bytes) {
    return ".version 7.0\n.target sm_80\n.address_size 64\n.visible .global .align 16 .b8 variable[" + std::to_string(bytes) + "];\n"
           ".visible .entry touch(.param .u64 x)\n{\nret;\n}\n";
}

// An image whose kernel calls malloc: the first one of a context brings its heap.
static const char *ALLOCATING = ".version 7.0\n.target sm_80\n.address_size 64\n"
                                ".extern .func (.param .b64 memory) malloc (.param .b64 bytes);\n"
                                ".visible .entry allocate()\n{\n.param .b64 in;\n.param .b64 out;\n"
                                "st.param.b64 [in], 16;\ncall.uni (out), malloc, (in);\nret;\n}\n";

// Copies between the first and the last row of an array and two rows of the host.
static void ends(const Piece &piece, std::vector<unsigned char> &rows, bool to_array) {
    size_t width = piece.mapped.bytes / 1024;
    for (size_t row : {0, 1023}) {
        CUDA_MEMCPY2D copy = {};
        copy.WidthInBytes = width;
        copy.Height = 1;
        void *host = &rows[row ? width : 0];
        if (to_array) {
            copy.srcMemoryType = CU_MEMORYTYPE_HOST, copy.srcHost = host;
            copy.dstMemoryType = CU_MEMORYTYPE_ARRAY, copy.dstArray = piece.array, copy.dstY = row;
        } else {
            copy.srcMemoryType = CU_MEMORYTYPE_ARRAY, copy.srcArray = piece.array, copy.srcY = row;
            copy.dstMemoryType = CU_MEMORYTYPE_HOST, copy.dstHost = host;
        }
        MUST(cuMemcpy2D, (const CUDA_MEMCPY2D *)&copy);
    }
}

static void mark(const Piece &piece) {
    std::vector<unsigned char> rows(piece.mapped.bytes / 512, piece.value);
    ends(piece, rows, true);
}

static void take(Kind kind, size_t bytes) {
    Piece piece;
    piece.kind = kind;
    piece.value = ++next_value;
    piece.mapped.bytes = bytes;
    CUdeviceptr &address = piece.mapped.address;
    CUresult result = CUDA_SUCCESS;
    switch (kind) {
    case SMALL:
    case LARGE: result = CU(cuMemAlloc, &address, bytes); break;
    case POOL: result = CU(cuMemAllocAsync, &address, bytes, (CUstream)0); break;
    case MAPPED: result = create_mapped(device, bytes, piece.mapped); break;
    case MANAGED: result = CU(cuMemAllocManaged, &address, bytes, (unsigned)CU_MEM_ATTACH_GLOBAL); break;
    case MODULE:
        result = CU(cuModuleLoadData, &piece.module, (const void *)image(bytes).c_str());
        if (result == CUDA_SUCCESS) {
            size_t size = 0;
            MUST(cuModuleGetGlobal, &address, &size, piece.module, (const char *)"variable");
            wrong += size != bytes;
        }
        break;
    case CONTEXT:
        result = CU(cuCtxCreate, &piece.context, (CUctxCreateParams *)nullptr, 0u, device);
        if (result == CUDA_SUCCESS && good(CU(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, bytes))) {
            CUmodule module;
            CUresult loaded = CU(cuModuleLoadData, &module, (const void *)ALLOCATING);
            good(loaded == CUDA_ERROR_SHARED_OBJECT_INIT_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : loaded);
        }
        MUST(cuCtxSetCurrent, primary);
        break;
    case ARRAY: {
        CUDA_ARRAY_DESCRIPTOR shape = {bytes / 1024, 1024, CU_AD_FORMAT_UNSIGNED_INT8, 1};
        result = CU(cuArrayCreate, &piece.array, (const CUDA_ARRAY_DESCRIPTOR *)&shape);
        if (result == CUDA_SUCCESS) mark(piece);
        break;
    }
    case KINDS: break;
    }
    if (!good(result)) return;
    if (address) MUST(cuMemsetD8, address, piece.value, piece.mapped.bytes);
    pieces.push_back(piece);
}

static void give(size_t at) {
    Piece piece = pieces[at];
    pieces[at] = pieces.back();
    pieces.pop_back();
    CUdeviceptr address = piece.mapped.address;
    if (address) {
        unsigned char ends[2];
        MUST(cuMemcpyDtoH, (void *)&ends[0], address, (size_t)1);
        MUST(cuMemcpyDtoH, (void *)&ends[1], address + piece.mapped.bytes - 1, (size_t)1);
        wrong += ends[0] != piece.value || ends[1] != piece.value;
    }
    switch (piece.kind) {
    case SMALL:
    case LARGE:
    case MANAGED: MUST(cuMemFree, address); break;
    case POOL: MUST(cuMemFreeAsync, address, (CUstream)0); break;
    case MAPPED: destroy_mapped(piece.mapped); break;
    case MODULE: MUST(cuModuleUnload, piece.module); break;
    case CONTEXT: MUST(cuCtxDestroy, piece.context); break;
    case ARRAY: {
        std::vector<unsigned char> rows(piece.mapped.bytes / 512);
        ends(piece, rows, false);
        for (unsigned char byte : rows) wrong += byte != piece.value;
        MUST(cuArrayDestroy, piece.array);
        break;
    }
    case KINDS: break;
    }
}

// A piece that another process opens, written as a file under its number, and pieces of other processes.
static CUdeviceptr exported = 0, opened = 0;

static void pass_on(const std::string &folder, int number) {
    if (!good(CU(cuMemAlloc, &exported, 2 * MIB))) return;
    MUST(cuMemsetD8, exported, (unsigned char)(200 + number), 2 * MIB);
    CUipcMemHandle handle;
    MUST(cuIpcGetMemHandle, &handle, exported);
    std::string path = folder + "/" + std::to_string(number);
    std::ofstream(path + ".new", std::ios::binary).write((const char *)&handle, sizeof handle);
    rename((path + ".new").c_str(), path.c_str());
}

static void open_or_close(const std::string &folder, int other) {
    if (opened) {
        unsigned char byte = 0;
        MUST(cuMemcpyDtoH, (void *)&byte, opened, (size_t)1);
        wrong += byte != 200 + other;
        MUST(cuIpcCloseMemHandle, opened);
        opened = 0;
        return;
    }
    CUipcMemHandle handle;
    std::ifstream file(folder + "/" + std::to_string(other), std::ios::binary);
    if (!file.read((char *)&handle, sizeof handle)) return;
    if (!good(CU(cuIpcOpenMemHandle, &opened, handle, (unsigned)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))) opened = 0;
}

static void step(Random &random, const std::string &folder, int number, int count) {
    const size_t most = 64;
    uint32_t what = random.below(17);
    if (what < 3 || pieces.size() > most) {
        if (!pieces.empty()) give(random.below(pieces.size()));
        return;
    }
    switch (what) {
    case 3:
    case 4: return take(SMALL, 1 + random.below(100000));
    case 5:
    case 6:
    case 7: return take(LARGE, (1 + random.below(8)) * 2 * MIB);
    case 8:
    case 9: return take(POOL, (1 + random.below(2)) * 2 * MIB);
    case 10: return take(MAPPED, 2 * MIB);
    case 11: return take(MANAGED, MIB);
    case 12: return take(MODULE, (1 + random.below(3)) * MIB);
    case 13: return take(CONTEXT, (1 + random.below(8)) * 2 * MIB);
    case 14: return take(ARRAY, (1 + random.below(4)) * 2 * MIB);
    case 15: {
        // Stacks of as many threads as the device runs at once, the heap of kernels, and the printf buffer.
        const CUlimit limits[] = {CU_LIMIT_STACK_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE};
        uint32_t which = random.below(3);
        good(CU(cuCtxSetLimit, limits[which], (size_t)(which ? 8 * MIB : 1024) << random.below(3)));
        use_local_memory<<<1, 32>>>(nullptr);
        good((CUresult)cudaGetLastError());
        good(CU(cuCtxSynchronize));
        return;
    }
    default:
        if (count > 1) open_or_close(folder, (number + 1) % count);
    }
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    int number = atoi(argv[1]), count = atoi(argv[2]);
    std::string folder = argv[3];
    signal(SIGUSR1, finish);
    device = use_device();
    MUST(cuCtxGetCurrent, &primary);
    Random random(number);
    pass_on(folder, number);
    printf("ready\n");
    fflush(stdout);
    // All processes have a context before any begins.
    while (access((folder + "/begin").c_str(), F_OK) != 0) usleep(1000);
    double end = now() + atof(argv[4]);
    while (now() < end) step(random, folder, number, count);
    printf("refused %ld\nodd %ld %d\n", refused, odd, last_odd);
    CUresult result;
    for (;;) {
        Piece piece;
        piece.kind = LARGE;
        piece.value = ++next_value;
        piece.mapped.bytes = 2 * MIB;
        result = CU(cuMemAlloc, &piece.mapped.address, piece.mapped.bytes);
        if (result != CUDA_SUCCESS) break;
        MUST(cuMemsetD8, piece.mapped.address, piece.value, piece.mapped.bytes);
        pieces.push_back(piece);
    }
    printf("full %d\n", (int)result);
    fflush(stdout);
    while (!done) usleep(1000);
    while (!pieces.empty()) give(pieces.size() - 1);
    if (opened) open_or_close(folder, (number + 1) % count);
    if (exported) MUST(cuMemFree, exported);
    MUST(cuCtxSynchronize);
    printf("wrong %ld\n", wrong);
    return verdict(wrong == 0);
}
