// Runs a kernel that never ends, and reports once it runs. Before that it launches the kernel so often, with an end, that the software
// GPU executes it as machine code.
#include "../check.h"
#include <unistd.h>

// Multiplies and adds until it meets a number. Odd numbers stay odd, so it never meets an even one.
__global__ void hang(volatile unsigned *runs, unsigned last) {
    *runs = 1;
    unsigned number = 1, sum = 0;
    do {
        number = number * 5 + 2;
        sum += number ^ number >> 7;
    } while (number != last);
    *runs = sum;
}

int main() {
    volatile unsigned *runs;
    CHECK(cudaMallocHost((void **)&runs, sizeof(unsigned)));
    for (int i = 0; i < 200; i++) hang<<<1, 32>>>(runs, 7);
    CHECK(cudaDeviceSynchronize());
    *runs = 0;
    hang<<<1, 32>>>(runs, 0);
    CHECK(cudaGetLastError());
    while (!*runs) usleep(1000);
    printf("holding\n");
    fflush(stdout);
    cudaDeviceSynchronize();
    for (;;) pause();
}
