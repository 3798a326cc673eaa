// Memory of the program that it registers: kernels and asynchronous copies reach it while it is registered, the memory beside it in
// the same pages stays usable by other threads, and its bytes are the program's before, meanwhile and after.
#include "check.h"
#include <atomic>
#include <cstring>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

__global__ void add(int *values, int count, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] += value;
}

static int attribute(cudaDeviceAttr which) {
    int value = -1;
    CHECK(cudaDeviceGetAttribute(&value, which, 0));
    return value;
}

static bool is(const char *what, cudaError_t code, cudaError_t expected) {
    (void)cudaGetLastError();
    if (code != expected) printf("%s: %s instead of %s\n", what, cudaGetErrorName(code), cudaGetErrorName(expected));
    return code == expected;
}

int main() {
    const int count = 800000;
    const size_t bytes = count * sizeof(int);
    // Not aligned, so that the first and the last page hold other memory of the program, too.
    std::vector<char> raw(bytes + 200, 7);
    int *values = (int *)(raw.data() + 36);
    if (attribute(cudaDevAttrHostRegisterSupported) == 0) {
        bool good = is("masked", cudaHostRegister(values, bytes, 0), cudaErrorNotSupported);
        printf("registration is masked: %s\n%s\n", good ? "yes" : "IN PART", good ? "PASS" : "FAIL");
        return good ? 0 : 1;
    }
    bool good = true;
    for (int i = 0; i < count; i++) values[i] = i;

    // Kernels reach it by its address on the device, which is the program's only if the device says so.
    CHECK(cudaHostRegister(values, bytes, cudaHostRegisterMapped));
    int *address = nullptr, *device = nullptr;
    CHECK(cudaHostGetDevicePointer(&address, values, 0));
    bool own_address = attribute(cudaDevAttrCanUseHostPointerForRegisteredMem) == 0;
    good = good && (own_address || address == values);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    add<<<(count + 255) / 256, 256, 0, stream>>>(address, count, 5);
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < count; i++) good = good && values[i] == i + 5;
    printf("kernels: %s\n", good ? "right" : "WRONG");

    // Asynchronous copies take the bytes that are there when it is their turn.
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMemsetAsync(device, 0, bytes, stream));
    CHECK(cudaMemcpyAsync(device, values, bytes, cudaMemcpyHostToDevice, stream));
    add<<<(count + 255) / 256, 256, 0, stream>>>(device, count, 1);
    CHECK(cudaMemcpyAsync(values + 10, device + 10, bytes - 40, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaMemcpy2DAsync(values, 20, device, 20, 20, 2, cudaMemcpyDefault, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < count; i++) good = good && values[i] == i + 6;
    printf("copies: %s\n", good ? "right" : "WRONG");

    // A forked child has memory of its own, as ever.
    pid_t child = fork();
    if (child == 0) {
        bool same = values[77] == 83 && raw[bytes + 100] == 7;
        values[77] = 1;
        _exit(same ? 0 : 1);
    }
    int status = -1;
    good = good && waitpid(child, &status, 0) == child && status == 0 && values[77] == 83;
    printf("fork: %s\n", good ? "right" : "WRONG");

    // Names and errors.
    cudaPointerAttributes known;
    CHECK(cudaPointerGetAttributes(&known, values + 3));
    good = good && known.type == cudaMemoryTypeHost && known.hostPointer == values + 3 && known.devicePointer == address + 3;
    good = is("twice", cudaHostRegister(values, bytes, 0), cudaErrorHostMemoryAlreadyRegistered) && good;
    good = is("within", cudaHostRegister(values + 2000, 8, 0), cudaErrorHostMemoryAlreadyRegistered) && good;
    good = is("not its start", cudaHostUnregister(values + 2000), cudaErrorInvalidValue) && good;
    good = is("as allocated memory", cudaFreeHost(values), cudaErrorInvalidValue) && good;
    good = is("not mapped", cudaHostRegister((void *)0x10000, 64, 0), cudaErrorInvalidValue) && good;
    good = is("no bytes", cudaHostRegister(values, 0, 0), cudaErrorInvalidValue) && good;
    CHECK(cudaHostUnregister(values));
    good = is("again", cudaHostUnregister(values), cudaErrorHostMemoryNotRegistered) && good;
    CHECK(cudaPointerGetAttributes(&known, values));
    good = good && known.type == cudaMemoryTypeUnregistered;
    for (int i = 0; i < count; i++) good = good && values[i] == i + 6;
    for (int i = 0; i < 36; i++) good = good && raw[i] == 7;
    for (size_t i = bytes + 36; i < raw.size(); i++) good = good && raw[i] == 7;
    printf("errors and names: %s\n", good ? "right" : "WRONG");

    // Other threads use the allocator and the memory beside it all the time.
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    std::atomic<long> wrong{0};
    volatile char *beside = raw.data() + bytes + 60;
    for (int thread = 0; thread < 2; thread++)
        threads.emplace_back([&, thread] {
            char next = beside[thread];
            while (!stop) {
                std::vector<int> own(50 + next, next);
                if (own[20] != next || beside[thread] != next) wrong++;
                next++;
                beside[thread] = next;
                if (next < 0) beside[thread] = next = 0;
            }
        });
    for (int round = 0; round < 30; round++) {
        // A few pages of the allocator's own region, too.
        std::vector<int> small(3000 + round, round);
        CHECK(cudaHostRegister(values, bytes, 0));
        CHECK(cudaHostRegister(small.data(), small.size() * sizeof(int), 0));
        CHECK(cudaMemcpyAsync(device, small.data(), small.size() * sizeof(int), cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemcpyAsync(values, device, small.size() * sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaHostUnregister(small.data()));
        CHECK(cudaHostUnregister(values));
        good = good && values[0] == round && values[2999 + round] == round && values[400000] == 400006;
    }
    stop = true;
    for (auto &thread : threads) thread.join();
    good = good && wrong == 0;
    printf("threads beside it: %s\n", good ? "right" : "WRONG");
    CHECK(cudaFree(device));
    CHECK(cudaStreamDestroy(stream));
    printf("%s\n", good ? "PASS" : "FAIL");
    return good ? 0 : 1;
}
