// Allocates device memory until it is refused, and prints if that was exactly the free memory that the device reported.
// Usage: quota [MEBIBYTES [hold]]     with the expected quota; without, it takes no memory from programs beside it
// With `hold` it keeps the memory until SIGUSR1.
#include "check.h"
#include <csignal>
#include <unistd.h>
#include <vector>

static volatile sig_atomic_t done = 0;

static void finish(int) { done = 1; }

int main(int argc, char **argv) {
    signal(SIGUSR1, finish);
    const size_t mebibyte = 1 << 20, block = 2 * mebibyte;
    CHECK(cudaFree(0));
    if (argc < 2) return verdict(true);
    size_t free, total;
    CHECK(cudaMemGetInfo(&free, &total));
    bool said = total == strtoull(argv[1], nullptr, 10) * mebibyte;
    printf("%zu MiB in all, %zu MiB free\n", total / mebibyte, free / mebibyte);

    std::vector<void *> blocks;
    cudaError_t refused;
    void *memory;
    while ((refused = cudaMalloc(&memory, block)) == cudaSuccess) {
        CHECK(cudaMemset(memory, (int)blocks.size(), block));
        blocks.push_back(memory);
    }
    size_t taken = blocks.size() * block, left, all;
    CHECK(cudaMemGetInfo(&left, &all));
    printf("taken %zu MiB, then %s\n", taken / mebibyte, cudaGetErrorName(refused));
    cudaGetLastError();
    // Freed memory can be allocated again.
    CHECK(cudaFree(blocks.back()));
    CHECK(cudaMalloc(&blocks.back(), block));
    bool exact = taken == free && left == 0;
    printf("to the byte: %s\n", exact && all == total ? "yes" : "no");
    fflush(stdout);
    while (argc > 2 && !done) usleep(10000);
    return verdict(said && exact && refused == cudaErrorMemoryAllocation);
}
