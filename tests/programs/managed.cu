// Managed memory: one pointer for host and device, remembered advice, and the attributes of such a pointer.
#include "check.h"
#include <cstring>

static int wrong = 0;

static void expect(const char *what, bool good) {
    printf("%-52s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

__global__ void triple(int *values, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] *= 3;
}

int main() {
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrManagedMemory, 0));
    expect("the device reports managed memory", supported == 1);
    const int count = 300000;
    int *values;
    CHECK(cudaMallocManaged(&values, count * sizeof(int)));
    for (int i = 0; i < count; i++) values[i] = i;
    triple<<<(count + 255) / 256, 256>>>(values, count);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < count; i++) values[i] += 1;
    triple<<<(count + 255) / 256, 256>>>(values, count);
    CHECK(cudaDeviceSynchronize());
    bool good = true;
    for (int i = 0; i < count; i++) good = good && values[i] == 9 * i + 3;
    expect("host and device take turns", good);

    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, values + 10));
    expect("the pointer is one of managed memory", attributes.type == cudaMemoryTypeManaged);
    expect("with one address everywhere",
           attributes.devicePointer == values + 10 && attributes.hostPointer == values + 10);

    cudaMemLocation device = {cudaMemLocationTypeDevice, 0}, host = {cudaMemLocationTypeHost, 0};
    CHECK(cudaMemAdvise(values, count * sizeof(int), cudaMemAdviseSetReadMostly, device));
    CHECK(cudaMemAdvise(values, count * sizeof(int), cudaMemAdviseSetPreferredLocation, host));
    int mostly = 0, preferred = 5;
    CHECK(cudaMemRangeGetAttribute(&mostly, 4, cudaMemRangeAttributeReadMostly, values, count * sizeof(int)));
    CHECK(cudaMemRangeGetAttribute(&preferred, 4, cudaMemRangeAttributePreferredLocation, values, count * sizeof(int)));
    expect("advice is remembered", mostly == 1 && preferred == cudaCpuDeviceId);
    CHECK(cudaMemAdvise(values, count * sizeof(int), cudaMemAdviseUnsetReadMostly, device));
    CHECK(cudaMemRangeGetAttribute(&mostly, 4, cudaMemRangeAttributeReadMostly, values, count * sizeof(int)));
    expect("and taken back", mostly == 0);

    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMemPrefetchAsync(values, count * sizeof(int), device, 0, stream));
    triple<<<(count + 255) / 256, 256, 0, stream>>>(values, count);
    CHECK(cudaMemPrefetchAsync(values, count * sizeof(int), host, 0, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("prefetches keep their place", values[7] == 3 * (9 * 7 + 3));
    void *halves[2] = {values, values + count / 2};
    size_t sizes[2] = {count / 2 * sizeof(int), count / 2 * sizeof(int)}, starts[2] = {0, 1};
    cudaMemLocation places[2] = {host, device};
    CHECK(cudaMemPrefetchBatchAsync(halves, sizes, 2, places, starts, 2, 0, stream));
    int last[2] = {7, 7};
    for (int i = 0; i < 2; i++)
        CHECK(cudaMemRangeGetAttribute(&last[i], 4, cudaMemRangeAttributeLastPrefetchLocation, halves[i], 4096));
    expect("a batch of prefetches", last[0] == cudaCpuDeviceId && last[1] == 0);
    CHECK(cudaMemDiscardBatchAsync(halves + 1, sizes, 1, 0, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamAttachMemAsync(stream, values));
    CHECK(cudaStreamSynchronize(stream));

    int *plain, *other;
    CHECK(cudaMalloc(&plain, count * sizeof(int)));
    CHECK(cudaMemcpy(plain, values, count * sizeof(int), cudaMemcpyDefault));
    CHECK(cudaMallocManaged(&other, count * sizeof(int)));
    CHECK(cudaMemcpy(other, plain, count * sizeof(int), cudaMemcpyDefault));
    expect("copies to and fro", memcmp(values, other, count * sizeof(int)) == 0);
    CHECK(cudaMemset(other, 0, count * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    expect("fills", other[count - 1] == 0);
    expect("advice about other memory", cudaMemAdvise(plain, 64, cudaMemAdviseSetReadMostly, device) == cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK(cudaFree(other));
    expect("freed twice", cudaFree(other) == cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK(cudaFree(values));
    CHECK(cudaFree(plain));
    return verdict(wrong == 0);
}
