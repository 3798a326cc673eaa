// The device's claims about host memory that it reaches by itself, and a check of them: kernels read and write pinned memory, or
// get an error that they cannot; a write of theirs is never lost. With `touch`, a kernel writes there all the same.
#include "check.h"
#include <cstring>

__global__ void fill(int *values, int count, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = value + i;
}

static int attribute(cudaDeviceAttr which) {
    int value = -1;
    CHECK(cudaDeviceGetAttribute(&value, which, 0));
    return value;
}

int main(int argc, char **argv) {
    const int count = 5000;
    bool mapped = attribute(cudaDevAttrCanMapHostMemory) == 1;
    bool unified = attribute(cudaDevAttrUnifiedAddressing) == 1;
    bool managed = attribute(cudaDevAttrManagedMemory) == 1;
    bool good = mapped == unified && mapped == managed;
    if (!mapped) {
        printf("zero-copy is masked: %s\n", good ? "yes" : "IN PART");
        good = good && attribute(cudaDevAttrConcurrentManagedAccess) == 0 && attribute(cudaDevAttrPageableMemoryAccess) == 0 &&
               attribute(cudaDevAttrHostRegisterSupported) == 0 && attribute(cudaDevAttrHostNativeAtomicSupported) == 0;
    }

    // Pinned memory, which a program may overwrite as soon as a copy from it is done.
    int *pinned, *device, *address = nullptr;
    CHECK(cudaHostAlloc(&pinned, count * sizeof(int), cudaHostAllocMapped));
    CHECK(cudaMalloc(&device, count * sizeof(int)));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    for (int round = 0; round < 20; round++) {
        fill<<<(count + 255) / 256, 256, 0, stream>>>(device, count, round);
        CHECK(cudaMemcpyAsync(pinned, device, count * sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaMemsetAsync(device, 0xff, count * sizeof(int), stream));
        CHECK(cudaMemcpyAsync(device, pinned, count * sizeof(int), cudaMemcpyHostToDevice, stream));
        CHECK(cudaStreamSynchronize(stream));
        memset(pinned, 0, count * sizeof(int));
        CHECK(cudaMemcpy(pinned, device, count * sizeof(int), cudaMemcpyDeviceToHost));
        for (int i = 0; i < count; i++) good = good && pinned[i] == round + i;
    }
    printf("copies to and from pinned memory: %s\n", good ? "right" : "WRONG");

    // Its address on the device is the same as on the host, or it has none.
    cudaError_t code = cudaHostGetDevicePointer(&address, pinned, 0);
    (void)cudaGetLastError();
    good = good && (mapped ? code == cudaSuccess && address == pinned : code == cudaErrorInvalidValue);
    cudaPointerAttributes known;
    CHECK(cudaPointerGetAttributes(&known, pinned));
    good = good && known.type == cudaMemoryTypeHost && known.hostPointer == pinned &&
           known.devicePointer == (mapped ? pinned : nullptr);
    int *shared = nullptr;
    code = cudaMallocManaged(&shared, count * sizeof(int));
    (void)cudaGetLastError();
    good = good && code == (managed ? cudaSuccess : cudaErrorNotSupported);

    if (mapped || (argc > 1 && strcmp(argv[1], "touch") == 0)) {
        fill<<<(count + 255) / 256, 256>>>(pinned, count, 77);
        code = cudaDeviceSynchronize();
        bool written = true;
        for (int i = 0; i < count; i++) written = written && pinned[i] == 77 + i;
        if (mapped) good = good && code == cudaSuccess && written;
        else {
            printf("a kernel that writes pinned memory all the same: %s\n", cudaGetErrorName(code));
            good = good && code == cudaErrorIllegalAddress;
            return verdict(good);
        }
    }
    printf("the claims about host memory hold: %s\n", good ? "yes" : "NO");
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
    return verdict(good);
}
