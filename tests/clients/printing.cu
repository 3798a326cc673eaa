// A kernel that prints more than any buffer of the standard library holds, and goes on computing.
#include "../programs/check.h"

__global__ void print(int *threads) {
    for (int round = 0; round < 4; round++) printf("thread %d of block %d\n", (int)threadIdx.x, (int)blockIdx.x);
    atomicAdd(threads, 1);
}

int main() {
    int *counter, threads = 0;
    CHECK(cudaMalloc((void **)&counter, sizeof *counter));
    CHECK(cudaMemset(counter, 0, sizeof *counter));
    for (int launch = 0; launch < 2; launch++) {
        print<<<8, 32>>>(counter);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaMemcpy(&threads, counter, sizeof threads, cudaMemcpyDeviceToHost));
    printf("%d threads\n", threads);
    CHECK(cudaDeviceReset());
    return verdict(threads == 512);
}
