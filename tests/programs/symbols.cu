// Variables of the program that live on the device: constant, global, initialised, and an array read through a pointer.
#include "driver.h"
#include <cstring>

__constant__ int coefficients[8];
__constant__ float preset[4] = {0.5f, -1.25f, 3.0f, 1e-3f};
__device__ int counter = 100;
__device__ unsigned table[64];

__global__ void polynomial(const int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int value = 0;
    for (int k = 7; k >= 0; k--) value = value * x[i] + coefficients[k];
    y[i] = value;
    atomicAdd(&counter, 1);
    atomicAdd(&table[i % 64], (unsigned)(preset[i % 4] * 1000 + 2000));
}

int main() {
    const int n = 1000;
    int c[8], x[n], y[n];
    Random random(8);
    for (int &value : c) value = (int)random.below(100) - 50;
    for (int &value : x) value = (int)random.below(10) - 5;
    int *dx, *dy, seen, wrong = 0;
    unsigned device_table[64], expected_table[64] = {};
    CHECK(cudaMalloc(&dx, sizeof x));
    CHECK(cudaMalloc(&dy, sizeof y));
    CHECK(cudaMemcpyToSymbol(coefficients, c, sizeof c));
    CHECK(cudaMemcpy(dx, x, sizeof x, cudaMemcpyHostToDevice));
    polynomial<<<(n + 127) / 128, 128>>>(dx, dy, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(y, dy, sizeof y, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpyFromSymbol(&seen, counter, sizeof seen));
    void *address;
    size_t size;
    CHECK(cudaGetSymbolAddress(&address, table));
    CHECK(cudaGetSymbolSize(&size, table));
    CHECK(cudaMemcpy(device_table, address, sizeof device_table, cudaMemcpyDeviceToHost));

    cudaFunction_t function;
    int named = 0;
    CHECK(cudaGetFuncBySymbol(&function, (const void *)polynomial));
    MUST(cuFuncGetAttribute, &named, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, (CUfunction)function);
    bool constant = named >= (int)(sizeof coefficients + sizeof preset);
    printf("the kernel needs the constant variables that it names: %s\n", constant ? "yes" : "no");

    const float host_preset[4] = {0.5f, -1.25f, 3.0f, 1e-3f};
    for (int i = 0; i < n; i++) {
        int value = 0;
        for (int k = 7; k >= 0; k--) value = value * x[i] + c[k];
        wrong += value != y[i];
        expected_table[i % 64] += (unsigned)(host_preset[i % 4] * 1000 + 2000);
    }
    wrong += memcmp(device_table, expected_table, sizeof device_table) != 0;
    printf("counter %d, table of %zu bytes, checksum %016llx, %d wrong\n", seen, size,
           (unsigned long long)checksum(y, sizeof y), wrong);
    return verdict(wrong == 0 && constant && seen == 100 + n && size == sizeof table);
}
