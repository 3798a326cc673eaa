// Waits for work that never ends, to see what happens when the host's side of the process is killed: the wait must end with
// an error, and every later call, too. Usage: bereft [killed]     without "killed" there is nobody to end the wait
#include "check.h"
#include <cstring>

__global__ void hold(volatile int *released) {
    while (!*released);
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "killed")) {
        int *released;
        CHECK(cudaMalloc((void **)&released, sizeof(int)));
        CHECK(cudaMemset(released, 0, sizeof(int)));
        hold<<<1, 1>>>(released);
        CHECK(cudaGetLastError());
        printf("waiting\n");
        fflush(stdout);
        cudaError_t waited = cudaDeviceSynchronize();
        printf("the wait ended with an error: %s\n", waited != cudaSuccess ? "yes" : "no");
        void *memory;
        cudaError_t later = cudaMalloc(&memory, 256);
        printf("so does a later call: %s\n", later != cudaSuccess ? "yes" : "no");
        return verdict(waited != cudaSuccess && later != cudaSuccess);
    }
    return verdict(true);
}
