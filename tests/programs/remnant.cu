// Leaves a tag in all the device memory it can get and is killed; or searches all the memory it can get for that tag.
// Usage: remnant leave|find     without an argument, it takes no memory from programs beside it
#include "check.h"
#include <csignal>
#include <cstring>
#include <vector>

struct Tag {
    unsigned long long low, high;
};

__device__ const Tag tag = {0x534c554943452121ull, 0x9e3779b97f4a7c15ull};

__global__ void leave(Tag *memory, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        memory[i] = tag;
}

__global__ void find(const Tag *memory, size_t count, unsigned long long *hits, unsigned long long *dirty) {
    unsigned long long found = 0, not_zero = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        found += memory[i].low == tag.low || memory[i].high == tag.high;
        not_zero += (memory[i].low | memory[i].high) != 0;
    }
    if (found) atomicAdd(hits, found);
    if (not_zero) atomicAdd(dirty, not_zero);
}

int main(int argc, char **argv) {
    const bool leaves = argc > 1 && !strcmp(argv[1], "leave");
    if (argc < 2) {
        CHECK(cudaFree(0));
        return verdict(true);
    }
    unsigned long long *counts;
    CHECK(cudaMalloc(&counts, 2 * sizeof *counts));
    CHECK(cudaMemset(counts, 0, 2 * sizeof *counts));
    size_t all = 0;
    // Large pieces first, then the rest in small ones.
    for (size_t size = 64 << 20; size >= 2 << 20; size /= 2) {
        for (void *memory; cudaMalloc(&memory, size) == cudaSuccess; all += size) {
            if (leaves) leave<<<32, 256>>>((Tag *)memory, size / sizeof(Tag));
            else find<<<32, 256>>>((const Tag *)memory, size / sizeof(Tag), &counts[0], &counts[1]);
            CHECK(cudaGetLastError());
        }
        cudaGetLastError();
    }
    unsigned long long found[2];
    CHECK(cudaMemcpy(found, counts, sizeof found, cudaMemcpyDeviceToHost));
    if (leaves) {
        printf("a tag stands in every 16 bytes of %zu MiB\n", all >> 20);
        fflush(stdout);
        raise(SIGKILL);
    }
    printf("%zu MiB read: %llu tags found, %llu of 16 bytes not zero\n", all >> 20, found[0], found[1]);
    return verdict(all > 0 && found[0] == 0);
}
