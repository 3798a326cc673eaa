// Managed memory: one pointer for host and device, the device's memory that it takes, advice and prefetches as the attribute of
// concurrent access says, attachments to streams, and the attributes of such a pointer.
#include "driver.h"
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
    int concurrent = 0, pageable = 0;
    CHECK(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0));
    CHECK(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
    // A device without concurrent access has no calls that move managed memory.
    auto as_reported = [&](cudaError_t code) {
        cudaGetLastError();
        return code == (concurrent ? cudaSuccess : cudaErrorInvalidDevice);
    };
    const int count = 300000;
    int *values;
    // Code takes memory at its first use: before the measurements.
    triple<<<1, 1>>>(nullptr, 0);
    CHECK(cudaDeviceSynchronize());
    size_t free_before, free_now, total;
    CHECK(cudaMemGetInfo(&free_before, &total));
    CHECK(cudaMallocManaged(&values, count * sizeof(int)));
    CHECK(cudaMemGetInfo(&free_now, &total));
    // With concurrent access pages take memory where they are used, and the host's counts, too.
    expect("it takes memory of the device", concurrent || free_before - free_now >= count * sizeof(int));
    int *too_large;
    cudaError_t more = cudaMallocManaged(&too_large, total + 1);
    if (concurrent && more == cudaSuccess && cudaFree(too_large) == cudaSuccess) more = cudaErrorMemoryAllocation;
    expect("more than the device has", more == cudaErrorMemoryAllocation);
    cudaGetLastError();
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
    expect("a device as the preferred location",
           as_reported(cudaMemAdvise(values, count * sizeof(int), cudaMemAdviseSetPreferredLocation, device)));
    CHECK(cudaMemRangeGetAttribute(&preferred, 4, cudaMemRangeAttributePreferredLocation, values, count * sizeof(int)));
    expect("is remembered if it is possible", preferred == (concurrent ? 0 : cudaCpuDeviceId));
    expect("access by a device",
           as_reported(cudaMemAdvise(values, count * sizeof(int), cudaMemAdviseSetAccessedBy, device)));
    int by[2] = {7, 7};
    CHECK(cudaMemRangeGetAttribute(by, sizeof by, cudaMemRangeAttributeAccessedBy, values, count * sizeof(int)));
    expect("is remembered if it is possible", by[0] == (concurrent ? 0 : cudaInvalidDeviceId) && by[1] == cudaInvalidDeviceId);
    CHECK(cudaMemAdvise(values, count * sizeof(int), cudaMemAdviseUnsetReadMostly, device));
    CHECK(cudaMemRangeGetAttribute(&mostly, 4, cudaMemRangeAttributeReadMostly, values, count * sizeof(int)));
    expect("and taken back", mostly == 0);

    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    expect("a prefetch to the device",
           as_reported(cudaMemPrefetchAsync(values, count * sizeof(int), device, 0, stream)));
    triple<<<(count + 255) / 256, 256, 0, stream>>>(values, count);
    expect("a prefetch to the host", as_reported(cudaMemPrefetchAsync(values, count * sizeof(int), host, 0, stream)));
    CHECK(cudaStreamSynchronize(stream));
    expect("prefetches keep their place", values[7] == 3 * (9 * 7 + 3));
    void *halves[2] = {values, values + count / 2};
    size_t sizes[2] = {count / 2 * sizeof(int), count / 2 * sizeof(int)}, starts[2] = {0, 1};
    cudaMemLocation places[2] = {host, device};
    expect("a batch of prefetches", as_reported(cudaMemPrefetchBatchAsync(halves, sizes, 2, places, starts, 2, 0, stream)));
    int last[2] = {7, 7};
    for (int i = 0; i < 2; i++)
        CHECK(cudaMemRangeGetAttribute(&last[i], 4, cudaMemRangeAttributeLastPrefetchLocation, halves[i], 4096));
    expect("is remembered if it is possible", last[0] == (concurrent ? cudaCpuDeviceId : cudaInvalidDeviceId) &&
                                                  last[1] == (concurrent ? 0 : cudaInvalidDeviceId));
    int both[2][2] = {{7, 7}, {7, 7}};
    void *answers[2] = {both[0], both[1]};
    size_t widths[2] = {sizeof(int), sizeof both[1]};
    cudaMemRangeAttribute names[2] = {cudaMemRangeAttributeReadMostly, cudaMemRangeAttributeAccessedBy};
    CHECK(cudaMemRangeGetAttributes(answers, widths, names, 2, values, count * sizeof(int)));
    expect("several attributes at once", both[0][0] == 0 && both[1][0] == by[0] && both[1][1] == by[1]);
    // The form of CUDA 8, which names a device by its number.
    auto old_prefetch = (CUresult (*)(CUdeviceptr, size_t, int, CUstream))entry("cuMemPrefetchAsync");
    CUresult old = old_prefetch((CUdeviceptr)values, 4096, 0, stream);
    expect("a prefetch of the old form", old == (concurrent ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE));
    expect("a batch of discards", as_reported(cudaMemDiscardBatchAsync(halves + 1, sizes, 1, 0, stream)));
    CHECK(cudaStreamSynchronize(stream));
    expect("pageable memory as the attribute says",
           pageable || cudaMemPrefetchAsync(&last, sizeof last, host, 0, stream) == cudaErrorInvalidValue);
    cudaGetLastError();

    CHECK(cudaStreamAttachMemAsync(stream, values));
    CHECK(cudaStreamAttachMemAsync(stream, values, count * sizeof(int), cudaMemAttachHost));
    CHECK(cudaStreamAttachMemAsync(nullptr, values, 0, cudaMemAttachGlobal));
    CHECK(cudaStreamSynchronize(stream));
    expect("a part is not attached",
           cudaStreamAttachMemAsync(stream, values, 4096, cudaMemAttachSingle) == cudaErrorInvalidValue);
    expect("nor more than the allocation",
           cudaStreamAttachMemAsync(stream, values, count * sizeof(int) + 1, cudaMemAttachSingle) == cudaErrorInvalidValue);
    expect("nor anything to the stream of all streams",
           cudaStreamAttachMemAsync(nullptr, values, 0, cudaMemAttachSingle) == cudaErrorInvalidValue);
    cudaGetLastError();

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
    CHECK(cudaMemGetInfo(&free_now, &total));
    // A chunk for small allocations may stay, and memory that the driver needs for pages that move.
    expect("the device's memory is free again", concurrent || free_before - free_now <= 2 << 20);
    return verdict(wrong == 0);
}
