// Sum and maximum: shuffles within a warp, shared memory within a block, atomics between blocks.
#include "check.h"
#include <algorithm>
#include <cmath>
#include <vector>

__device__ long long warp_sum(long long value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    return value;
}

__device__ int warp_max(int value) {
    for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

__global__ void reduce(const int *data, int n, unsigned long long *sum, int *maximum) {
    __shared__ long long sums[32];
    __shared__ int maxima[32];
    long long own_sum = 0;
    int own_maximum = INT32_MIN;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        own_sum += data[i];
        own_maximum = max(own_maximum, data[i]);
    }
    own_sum = warp_sum(own_sum);
    own_maximum = warp_max(own_maximum);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) sums[warp] = own_sum, maxima[warp] = own_maximum;
    __syncthreads();
    if (warp == 0) {
        int warps = blockDim.x / 32;
        own_sum = warp_sum(lane < warps ? sums[lane] : 0);
        own_maximum = warp_max(lane < warps ? maxima[lane] : INT32_MIN);
        if (lane == 0) {
            atomicAdd(sum, (unsigned long long)own_sum);
            atomicMax(maximum, own_maximum);
        }
    }
}

// One block, a tree in shared memory whose size is given at launch: the order of additions is fixed.
__global__ void tree(const float *data, int n, float *result) {
    extern __shared__ float partial[];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += data[i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *result = partial[0];
}

int main() {
    const int n = 60000;
    Random random(3);
    std::vector<int> data(n);
    std::vector<float> reals(n);
    for (int &value : data) value = (int)(uint32_t)random.next();
    for (float &value : reals) value = random.real();
    long long expected_sum = 0;
    double expected_real = 0;
    for (int value : data) expected_sum += value;
    for (float value : reals) expected_real += value;
    int expected_maximum = *std::max_element(data.begin(), data.end());

    double start = now();
    int *ddata, *dmaximum, maximum = INT32_MIN;
    float *dreals, *dresult, result;
    unsigned long long *dsum, sum = 0;
    CHECK(cudaMalloc(&ddata, n * sizeof(int)));
    CHECK(cudaMalloc(&dreals, n * sizeof(float)));
    CHECK(cudaMalloc(&dmaximum, sizeof(int)));
    CHECK(cudaMalloc(&dsum, sizeof sum));
    CHECK(cudaMalloc(&dresult, sizeof result));
    CHECK(cudaMemcpy(ddata, data.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dreals, reals.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dmaximum, &maximum, sizeof maximum, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(dsum, 0, sizeof sum));
    reduce<<<8, 256>>>(ddata, n, dsum, dmaximum);
    CHECK(cudaGetLastError());
    tree<<<1, 512, 512 * sizeof(float)>>>(dreals, n, dresult);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&sum, dsum, sizeof sum, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&maximum, dmaximum, sizeof maximum, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&result, dresult, sizeof result, cudaMemcpyDeviceToHost));
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);

    printf("sum %lld, expected %lld\n", (long long)sum, expected_sum);
    printf("maximum %d, expected %d\n", maximum, expected_maximum);
    printf("tree %.9g, expected %.5f\n", result, expected_real);
    return verdict((long long)sum == expected_sum && maximum == expected_maximum &&
                   std::fabs(result - expected_real) < 1e-2);
}
