// Computes once, then holds its context and memory until it is killed. For tests that kill programs.
// Usage: hold SECONDS [fork]     fork: with a child that sleeps on after the kill of its parent
#include "check.h"
#include <unistd.h>
#include <vector>

__global__ void fill(unsigned *to, int n, unsigned value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = value + i;
}

int main(int argc, char **argv) {
    int seconds = argc > 1 ? atoi(argv[1]) : 0;
    const int n = 1 << 16;
    unsigned *device;
    std::vector<unsigned> host(n);
    CHECK(cudaMalloc(&device, n * sizeof(unsigned)));
    fill<<<n / 256, 256>>>(device, n, 9);
    CHECK(cudaMemcpy(host.data(), device, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += host[i] != 9u + i;
    if (argc > 2 && fork() == 0) {
        sleep(seconds);
        _exit(0);
    }
    printf("holding, %d wrong\n", wrong);
    fflush(stdout);
    sleep(seconds);
    return verdict(wrong == 0);
}
