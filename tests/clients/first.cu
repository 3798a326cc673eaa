// The first steps of every runtime: start, properties, memory, symbols, a stream, an event, a launch, and the end. Built with
// static and shared runtimes of many releases, by nvcc and by clang.
#include "../programs/check.h"
#include <cstring>

__constant__ float scale[4];
__device__ int launches = 41;

__global__ void add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i] * scale[i % 4];
    if (i == 0) launches++;
}

int main() {
    const int n = 256;
    const float factors[4] = {1.0f, -2.0f, 0.5f, 4.0f};
    int devices = 0, runtime = 0, driver = 0;
    CHECK(cudaGetDeviceCount(&devices));
    CHECK(cudaRuntimeGetVersion(&runtime));
    CHECK(cudaDriverGetVersion(&driver));
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    printf("runtime %d, driver %d, %d device(s), %s %d.%d, %d multiprocessors, warps of %d\n", runtime, driver, devices,
           properties.name, properties.major, properties.minor, properties.multiProcessorCount, properties.warpSize);
    cudaUUID_t identities[16];
    for (int device = 0; device < devices && device < 16; device++) {
        char address[32];
        CHECK(cudaDeviceGetPCIBusId(address, sizeof address, device));
        CHECK(cudaGetDeviceProperties(&properties, device));
        identities[device] = properties.uuid;
        bool alone = true;
        for (int other = 0; other < device; other++)
            alone &= memcmp(&identities[other], &identities[device], sizeof *identities) != 0;
        printf("device %d at %s, %s\n", device, address, alone ? "alone in its identity" : "the same as another");
    }

    float a[n], b[n], c[n], *da, *db, *dc;
    Random random(1);
    for (float &value : a) value = random.real();
    for (float &value : b) value = random.real();
    CHECK(cudaMalloc((void **)&da, sizeof a));
    CHECK(cudaMalloc((void **)&db, sizeof b));
    CHECK(cudaMalloc((void **)&dc, sizeof c));
    CHECK(cudaMemcpy(da, a, sizeof a, cudaMemcpyHostToDevice));
    cudaStream_t stream;
    cudaEvent_t before, after;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreate(&after));
    CHECK(cudaMemcpyAsync(db, b, sizeof b, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemcpyToSymbolAsync(scale, factors, sizeof factors, 0, cudaMemcpyHostToDevice, stream));
    CHECK(cudaEventRecord(before, stream));
    add<<<2, 128, 0, stream>>>(da, db, dc, n);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(after, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventSynchronize(after));
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, before, after));
    CHECK(cudaMemcpy(c, dc, sizeof c, cudaMemcpyDeviceToHost));
    int seen = 0, wrong = 0;
    CHECK(cudaMemcpyFromSymbol(&seen, launches, sizeof seen));
    for (int i = 0; i < n; i++) wrong += c[i] != a[i] + b[i] * factors[i % 4];

    CHECK(cudaEventDestroy(before));
    CHECK(cudaEventDestroy(after));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(da));
    CHECK(cudaFree(db));
    CHECK(cudaFree(dc));
    printf("launch %d, checksum %016llx, %d wrong\n", seen, (unsigned long long)checksum(c, sizeof c), wrong);
    return verdict(wrong == 0 && seen == 42 && milliseconds >= 0);
}
