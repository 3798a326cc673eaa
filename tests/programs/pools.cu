// Memory in the order of streams: allocated and freed between kernels, from the device's pool and from one of our own;
// the figures of pools, and the memory that they keep.
#include "check.h"
#include <cstdint>
#include <vector>

static int wrong = 0;

static void expect(const char *what, bool good) {
    printf("%-52s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

__global__ void store(int *to, int value, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = value + i;
}

__global__ void add(int *to, const int *from, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] += from[i];
}

static uint64_t number(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
    uint64_t value = ~0ull;
    CHECK(cudaMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

int main() {
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0));
    expect("the device reports pools", supported == 1);
    cudaMemPool_t common, current;
    CHECK(cudaDeviceGetDefaultMemPool(&common, 0));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    expect("its own pool is the current one", common == current);

    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    const int count = 100000;
    bool good = true;
    for (int round = 0; round < 50; round++) {
        int *sum, *part;
        CHECK(cudaMallocAsync(&sum, count * sizeof(int), stream));
        store<<<(count + 255) / 256, 256, 0, stream>>>(sum, round, count);
        for (int i = 0; i < 3; i++) {
            CHECK(cudaMallocAsync(&part, count * sizeof(int), stream));
            store<<<(count + 255) / 256, 256, 0, stream>>>(part, i, count);
            add<<<(count + 255) / 256, 256, 0, stream>>>(sum, part, count);
            CHECK(cudaFreeAsync(part, stream));
        }
        std::vector<int> back(count);
        CHECK(cudaMemcpyAsync(back.data(), sum, count * sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaFreeAsync(sum, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < count; i++) good = good && back[i] == round + 3 + 4 * i;
    }
    expect("kernels between allocations compute", good);
    expect("nothing is left in use", number(common, cudaMemPoolAttrUsedMemCurrent) == 0);
    expect("the mark shows the maximum", number(common, cudaMemPoolAttrUsedMemHigh) >= 2 * count * sizeof(int));
    uint64_t nothing = 0;
    CHECK(cudaMemPoolSetAttribute(common, cudaMemPoolAttrUsedMemHigh, &nothing));
    expect("and is put back", number(common, cudaMemPoolAttrUsedMemHigh) == 0);

    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, 0};
    cudaMemPool_t own;
    CHECK(cudaMemPoolCreate(&own, &properties));
    uint64_t keep = UINT64_MAX;
    CHECK(cudaMemPoolSetAttribute(own, cudaMemPoolAttrReleaseThreshold, &keep));
    expect("the threshold is as set", number(own, cudaMemPoolAttrReleaseThreshold) == UINT64_MAX);
    char *large, *small;
    CHECK(cudaMallocFromPoolAsync(&large, 8 << 20, own, stream));
    CHECK(cudaMallocFromPoolAsync(&small, 1000, own, stream));
    CHECK(cudaStreamSynchronize(stream));
    // A driver counts in units of its own, and may keep some memory in use; the software GPU does not.
    uint64_t in_use = number(own, cudaMemPoolAttrUsedMemCurrent);
    expect("bytes in use are counted", undefined_too() ? in_use == (8 << 20) + 1024 : in_use >= (8 << 20) + 1000);
    expect("no more is in use than is reserved",
           number(own, cudaMemPoolAttrReservedMemCurrent) >= number(own, cudaMemPoolAttrUsedMemCurrent));
    CHECK(cudaMemsetAsync(large, 1, 8 << 20, stream));
    CHECK(cudaFreeAsync(large, stream));
    CHECK(cudaFree(small));
    CHECK(cudaStreamSynchronize(stream));
    uint64_t left = number(own, cudaMemPoolAttrUsedMemCurrent);
    expect("freed memory is not in use", undefined_too() ? left == 0 : in_use >= left + (8 << 20));
    expect("and is kept", number(own, cudaMemPoolAttrReservedMemCurrent) >= 8 << 20);
    CHECK(cudaMemPoolTrimTo(own, 0));
    expect("until it is given back", number(own, cudaMemPoolAttrReservedMemCurrent) == 0);

    CHECK(cudaDeviceSetMemPool(0, own));
    CHECK(cudaMallocAsync(&small, 10, stream));
    in_use = number(own, cudaMemPoolAttrUsedMemCurrent);
    expect("the current pool is used", undefined_too() ? in_use == 512 : in_use > left);
    expect("freeing the middle of it", cudaFreeAsync(small + 1, stream) == cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK(cudaFreeAsync(small, stream));
    expect("freeing it twice", cudaFreeAsync(small, stream) == cudaErrorInvalidValue);
    cudaGetLastError();
    expect("no bytes", cudaMallocAsync(&small, 0, stream) != cudaErrorMemoryAllocation);
    cudaGetLastError();
    expect("more than there is", cudaMallocAsync(&small, 1ull << 44, stream) == cudaErrorMemoryAllocation);
    cudaGetLastError();
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemPoolDestroy(own));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    expect("without it the device's own is current again", common == current);

    void *plain;
    CHECK(cudaMalloc(&plain, 5000));
    CHECK(cudaFreeAsync(plain, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("memory that is no pool's is freed in order, too", cudaFree(plain) == cudaErrorInvalidValue);
    return verdict(wrong == 0);
}
