// Allocations and frees, fills, copies of every shape, and the driver's report of free memory.
#include "check.h"
#include <cstring>
#include <vector>

static int wrong = 0;

static void expect(const char *what, bool good) {
    printf("%-44s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

// Blocks of many sizes, each filled with its own byte; half are freed and made again, and none may overlap another.
static bool blocks_do_not_overlap() {
    struct Block {
        unsigned char *memory;
        size_t size;
        unsigned char fill;
    };
    Random random(6);
    std::vector<Block> blocks(48);
    for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < blocks.size(); i++) {
            if (round > 0 && i % 2 != (size_t)round % 2) continue;
            if (round > 0) CHECK(cudaFree(blocks[i].memory));
            size_t size = 1 + random.below(i % 8 == 0 ? 300000 : 3000);
            blocks[i] = {nullptr, size, (unsigned char)(round * 64 + i)};
            CHECK(cudaMalloc(&blocks[i].memory, size));
            if ((uintptr_t)blocks[i].memory % 256 != 0) return false;
            CHECK(cudaMemset(blocks[i].memory, blocks[i].fill, size));
        }
    bool good = true;
    for (Block &block : blocks) {
        std::vector<unsigned char> back(block.size);
        CHECK(cudaMemcpy(back.data(), block.memory, block.size, cudaMemcpyDeviceToHost));
        for (unsigned char byte : back) good = good && byte == block.fill;
        CHECK(cudaFree(block.memory));
    }
    return good;
}

static bool rectangles_round_trip() {
    const size_t width = 100, height = 37, host_pitch = 128;
    Random random(7);
    std::vector<unsigned char> in(host_pitch * height), out(host_pitch * height, 0xee);
    for (unsigned char &byte : in) byte = (unsigned char)random.next();
    unsigned char *a, *b;
    size_t a_pitch;
    CHECK(cudaMallocPitch(&a, &a_pitch, width, height));
    CHECK(cudaMalloc(&b, 200 * height));
    if (a_pitch < width || a_pitch % 32 != 0) return false;
    CHECK(cudaMemset2D(a, a_pitch, 0x11, width, height));
    CHECK(cudaMemcpy2D(a, a_pitch, in.data(), host_pitch, width - 10, height - 1, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2D(b, 200, a, a_pitch, width, height, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2D(out.data(), host_pitch, b, 200, width, height, cudaMemcpyDeviceToHost));
    bool good = true;
    for (size_t y = 0; y < height; y++)
        for (size_t x = 0; x < host_pitch; x++) {
            unsigned char expected = x >= width ? 0xee : x >= width - 10 || y == height - 1 ? 0x11 : in[y * host_pitch + x];
            good = good && out[y * host_pitch + x] == expected;
        }
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return good;
}

static bool copies_round_trip(size_t size, bool pinned) {
    std::vector<unsigned char> expected(size);
    Random random(size);
    for (unsigned char &byte : expected) byte = (unsigned char)random.next();
    unsigned char *in, *out, *a, *b;
    if (pinned) {
        CHECK(cudaMallocHost(&in, size));
        CHECK(cudaMallocHost(&out, size));
    } else {
        in = (unsigned char *)malloc(size);
        out = (unsigned char *)malloc(size);
    }
    memcpy(in, expected.data(), size);
    memset(out, 0, size);
    CHECK(cudaMalloc(&a, size));
    CHECK(cudaMalloc(&b, size));
    CHECK(cudaMemcpy(a, in, size, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(b, a, size, cudaMemcpyDeviceToDevice));
    // The driver determines the direction.
    CHECK(cudaMemcpy(out, b, size, cudaMemcpyDefault));
    bool good = memcmp(out, expected.data(), size) == 0;
    // From the middle, at odd offsets.
    if (size > 100) {
        memset(out, 0, size);
        CHECK(cudaMemcpy(out + 3, a + 17, size - 50, cudaMemcpyDeviceToHost));
        good = good && memcmp(out + 3, expected.data() + 17, size - 50) == 0 && out[2] == 0 && out[size - 47] == 0;
    }
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    if (pinned) {
        CHECK(cudaFreeHost(in));
        CHECK(cudaFreeHost(out));
    } else {
        free(in);
        free(out);
    }
    return good;
}

int main() {
    double start = now();
    size_t free_before, free_with, free_after, total, total_after;
    CHECK(cudaMemGetInfo(&free_before, &total));
    void *large;
    CHECK(cudaMalloc(&large, 32 << 20));
    CHECK(cudaMemGetInfo(&free_with, &total_after));
    CHECK(cudaFree(large));
    CHECK(cudaMemGetInfo(&free_after, &total_after));
    expect("free memory is not more than all memory", free_before > 0 && free_before <= total);
    expect("an allocation does not add free memory", free_with <= free_before);
    expect("freeing does not take memory away", free_after >= free_with);
    expect("all memory stays the same", total == total_after);

    expect("blocks do not overlap", blocks_do_not_overlap());
    expect("rectangles round trip", rectangles_round_trip());
    for (size_t size : {1u, 64u, 4097u, 65536u, 1000003u}) {
        char text[64];
        snprintf(text, sizeof text, "%zu bytes round trip, pageable", size);
        expect(text, copies_round_trip(size, false));
        snprintf(text, sizeof text, "%zu bytes round trip, pinned", size);
        expect(text, copies_round_trip(size, true));
    }
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);
    return verdict(wrong == 0);
}
