// Large variables of the program that live on the device: a module needs them beside its code.
#include "check.h"

const size_t count = 16 << 20; // 64 MiB
__device__ unsigned squares[count];
__device__ unsigned char zeroes[5 << 20];

__global__ void square(unsigned *sum) {
    unsigned own = 0;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x * 4096) {
        squares[i] = (unsigned)(i * i);
        own += squares[i] + zeroes[i % sizeof zeroes];
    }
    atomicAdd(sum, own);
}

int main() {
    unsigned *sum, seen, last;
    CHECK(cudaMalloc(&sum, sizeof *sum));
    CHECK(cudaMemset(sum, 0, sizeof *sum));
    square<<<4, 64>>>(sum);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&seen, sum, sizeof seen, cudaMemcpyDeviceToHost));
    unsigned expected = 0;
    const size_t step = (size_t)4 * 64 * 4096;
    for (size_t block = 0; block < count; block += step)
        for (size_t i = block; i < block + 256 && i < count; i++) expected += (unsigned)(i * i);
    const unsigned mark = 0x5a5a1234;
    CHECK(cudaMemcpyToSymbol(squares, &mark, sizeof mark, (count - 1) * sizeof mark));
    CHECK(cudaMemcpyFromSymbol(&last, squares, sizeof last, (count - 1) * sizeof last));
    size_t size;
    CHECK(cudaGetSymbolSize(&size, squares));
    printf("%zu bytes, sum %08x, last %08x\n", size, seen, last);
    return verdict(seen == expected && last == mark && size == sizeof squares);
}
