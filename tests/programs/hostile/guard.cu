// Allocates all the device memory it can get, fills it with a pattern of its own and checks every word of it over and over, until
// SIGUSR1: no other process may change one. Prints `holding BYTES` when it begins, `foreign COUNT` for patterns of others that it
// found at first, and `lost COUNT` for changed words.
// Usage: guard [MOST [wait]]     maximum number of bytes; wait: prints `ready`, and allocates after the end of standard input
#include "canary.h"
#include <csignal>
#include <unistd.h>
#include <vector>

static volatile sig_atomic_t done = 0;
static void finish(int) { done = 1; }

__device__ inline uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    return z ^ (z >> 27);
}

__global__ void look_for_tags(const uint64_t *words, size_t count, unsigned long long *foreign) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i + 1 < count; i += (size_t)gridDim.x * blockDim.x)
        if (found(words[i], words[i + 1]) >= 0) atomicAdd(foreign, 1ull);
}

__global__ void fill(uint64_t *words, size_t count, uint64_t seed) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) words[i] = mixed(seed + i);
}

__global__ void check(const uint64_t *words, size_t count, uint64_t seed, unsigned long long *lost) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        if (words[i] != mixed(seed + i)) atomicAdd(lost, 1ull);
}

int main(int argc, char **argv) {
    size_t most = argc > 1 ? strtoull(argv[1], nullptr, 10) : ~(size_t)0, bytes = 0;
    signal(SIGUSR1, finish);
    use_device();
    unsigned long long *counters, host[2] = {};
    CHECK(cudaMalloc(&counters, sizeof host));
    CHECK(cudaMemset(counters, 0, sizeof host));
    std::vector<Mapped> all;
    if (argc > 2) {
        printf("ready\n");
        fflush(stdout);
        while (getchar() != EOF) {}
    }
    // The first pieces are large: each chunk of memory that is lent costs about a millisecond.
    for (size_t piece = (size_t)2 << 30; piece >= (size_t)2 << 20; piece /= 4) {
        Mapped mapped;
        while (bytes + piece <= most && CU(cuMemAlloc, &mapped.address, piece) == CUDA_SUCCESS) {
            mapped.bytes = piece;
            look_for_tags<<<64, 256>>>((uint64_t *)mapped.address, piece / 8, counters);
            fill<<<64, 256>>>((uint64_t *)mapped.address, piece / 8, all.size() << 40);
            all.push_back(mapped);
            bytes += piece;
        }
    }
    CHECK(cudaMemcpy(host, counters, sizeof host, cudaMemcpyDeviceToHost));
    printf("foreign %llu\nholding %zu\n", host[0], bytes);
    fflush(stdout);
    long rounds = 0;
    while (!done || rounds == 0) {
        for (size_t i = 0; i < all.size(); i++) check<<<64, 256>>>((uint64_t *)all[i].address, all[i].bytes / 8, i << 40, counters + 1);
        CHECK(cudaMemcpy(host, counters, sizeof host, cudaMemcpyDeviceToHost));
        rounds++;
    }
    printf("lost %llu\n", host[1]);
    return verdict(host[0] == 0 && host[1] == 0);
}
