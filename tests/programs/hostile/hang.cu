// Runs a kernel that never ends, and reports once it runs.
#include "../check.h"
#include <unistd.h>

__global__ void hang(volatile int *runs) {
    *runs = 1;
    for (volatile int forever = 1; forever;) {}
}

int main() {
    volatile int *runs;
    CHECK(cudaMallocHost((void **)&runs, sizeof(int)));
    *runs = 0;
    hang<<<1, 32>>>(runs);
    CHECK(cudaGetLastError());
    while (!*runs) usleep(1000);
    printf("holding\n");
    fflush(stdout);
    cudaDeviceSynchronize();
    for (;;) pause();
}
