// Counts bytes with atomics in shared and global memory; a compare-and-swap loop for an operation without an atomic of its own.
#include "check.h"
#include <cmath>
#include <vector>

__global__ void count(const unsigned char *data, int n, unsigned *bins) {
    __shared__ unsigned local[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[data[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (local[i]) atomicAdd(&bins[i], local[i]);
}

// Product modulo a prime: the order does not matter, and there is no atomicMul.
__global__ void product(const unsigned char *data, int n, unsigned *result) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned seen = *(volatile unsigned *)result, assumed;
    do {
        assumed = seen;
        seen = atomicCAS(result, assumed, (unsigned)((unsigned long long)assumed * (data[i] + 1u) % 998244353u));
    } while (seen != assumed);
}

__global__ void bits(const unsigned char *data, int n, unsigned *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    bool odd = i < n && data[i] & 1;
    unsigned vote = __ballot_sync(0xffffffffu, odd);
    if (threadIdx.x % 32 == 0) atomicAdd(&out[0], __popc(vote));
    if (i < n) atomicOr(&out[1], 1u << (data[i] % 32)), atomicMin(&out[2], data[i] + 7u), atomicXor(&out[3], data[i] * 2654435761u);
}

int main() {
    const int n = 40000, products = 500;
    Random random(5);
    std::vector<unsigned char> data(n);
    for (unsigned char &value : data) value = (unsigned char)(random.below(256) * random.below(256) / 256);
    std::vector<unsigned> expected(256), bins(256);
    for (unsigned char value : data) expected[value]++;
    unsigned long long expected_product = 1;
    for (int i = 0; i < products; i++) expected_product = expected_product * (data[i] + 1u) % 998244353u;
    unsigned expected_bits[4] = {0, 0, ~0u, 0};
    for (unsigned char value : data) {
        expected_bits[0] += value & 1;
        expected_bits[1] |= 1u << (value % 32);
        expected_bits[2] = value + 7u < expected_bits[2] ? value + 7u : expected_bits[2];
        expected_bits[3] ^= value * 2654435761u;
    }

    double start = now();
    unsigned char *ddata;
    unsigned *dbins, *dproduct, *dbits, one = 1, result, got[4], initial[4] = {0, 0, ~0u, 0};
    CHECK(cudaMalloc(&ddata, n));
    CHECK(cudaMalloc(&dbins, 256 * sizeof(unsigned)));
    CHECK(cudaMalloc(&dproduct, sizeof(unsigned)));
    CHECK(cudaMalloc(&dbits, sizeof got));
    CHECK(cudaMemcpy(ddata, data.data(), n, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(dbins, 0, 256 * sizeof(unsigned)));
    CHECK(cudaMemcpy(dproduct, &one, sizeof one, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dbits, initial, sizeof initial, cudaMemcpyHostToDevice));
    count<<<6, 192>>>(ddata, n, dbins);
    product<<<(products + 63) / 64, 64>>>(ddata, products, dproduct);
    bits<<<(n + 255) / 256, 256>>>(ddata, n, dbits);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(bins.data(), dbins, 256 * sizeof(unsigned), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&result, dproduct, sizeof result, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got, dbits, sizeof got, cudaMemcpyDeviceToHost));
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);

    int wrong = 0;
    for (int i = 0; i < 256; i++) wrong += bins[i] != expected[i];
    for (int i = 0; i < 4; i++) wrong += got[i] != expected_bits[i];
    printf("checksum %016llx, product %u, odd %u, %d wrong\n",
           (unsigned long long)checksum(bins.data(), 256 * sizeof(unsigned)), result, got[0], wrong);
    return verdict(wrong == 0 && result == expected_product);
}
