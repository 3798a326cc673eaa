// Calls that the driver refuses at once, and errors that are sticky. Prints the code after each call.
// Usage: errors           everything; the fault happens in a child
//        errors fault     a kernel writes to a forbidden address
#include "check.h"
#include <sys/wait.h>
#include <unistd.h>

__global__ void fill(int *to, int value) { to[blockIdx.x * blockDim.x + threadIdx.x] = value; }
__global__ void wild(unsigned long long address) { *(volatile int *)address = 1; }

static int surprises = 0;

static void expect(const char *what, cudaError_t got, cudaError_t expected) {
    bool good = got == expected;
    printf("%-34s %3d %s%s\n", what, (int)got, cudaGetErrorName(got), good ? "" : "   <- unexpected");
    surprises += !good;
}

// A refused launch leaves its error for the next query, once.
static void expect_launch(const char *what, cudaError_t expected) {
    expect(what, cudaGetLastError(), expected);
    surprises += cudaGetLastError() != cudaSuccess;
}

// Runtimes before 12.9 check grid and block themselves and return "invalid configuration"; newer ones pass on the driver's
// error, which is "invalid value".
static void expect_bad_shape(const char *what) {
    cudaError_t got = cudaPeekAtLastError();
    expect_launch(what, got == cudaErrorInvalidConfiguration ? got : cudaErrorInvalidValue);
}

static int fault() {
    int *memory, value = 0;
    CHECK(cudaMalloc(&memory, 256 * sizeof(int)));
    wild<<<1, 1>>>(0x40);
    expect("launch of a wild write", cudaGetLastError(), cudaSuccess);
    expect("synchronise after it", cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    expect("synchronise again", cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    expect("last error", cudaGetLastError(), cudaErrorIllegalAddress);
    expect("copy", cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDeviceToHost), cudaErrorIllegalAddress);
    expect("allocate", cudaMalloc(&memory, 256), cudaErrorIllegalAddress);
    fill<<<1, 256>>>(memory, 1);
    expect("launch", cudaGetLastError(), cudaErrorIllegalAddress);
    fflush(stdout);
    return surprises == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc > 1) return fault();

    int *memory, host[256];
    void *nothing;
    cudaStream_t stream;
    cudaEvent_t event, other;
    expect("device 99", cudaSetDevice(99), cudaErrorInvalidDevice);
    expect("device 0", cudaSetDevice(0), cudaSuccess);
    CHECK(cudaMalloc(&memory, sizeof host));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&event));
    CHECK(cudaEventCreate(&other));
    cudaGetLastError();

    fill<<<0, 32>>>(memory, 1);
    expect_bad_shape("grid of 0");
    fill<<<1, 0>>>(memory, 1);
    expect_bad_shape("block of 0");
    fill<<<1, 2048>>>(memory, 1);
    expect_bad_shape("block of 2048");
    fill<<<1, dim3(1, 1, 65)>>>(memory, 1);
    expect_bad_shape("block 65 deep");
    fill<<<dim3(1, 65536), 1>>>(memory, 1);
    expect_bad_shape("grid 65536 high");
    fill<<<1, 32, 1 << 20>>>(memory, 1);
    expect_launch("1 MiB of shared memory", cudaErrorInvalidValue);
    expect("opt in to 1 MiB of shared memory",
           cudaFuncSetAttribute(fill, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20), cudaErrorInvalidValue);
    expect("an allocation of 1 PiB", cudaMalloc(&nothing, 1ull << 50), cudaErrorMemoryAllocation);
    expect("free of an unallocated address", cudaFree((void *)0x12345600), cudaErrorInvalidValue);
    expect("free nothing", cudaFree(nullptr), cudaSuccess);
    expect("copy of no kind", cudaMemcpy(host, memory, 4, (cudaMemcpyKind)17), cudaErrorInvalidMemcpyDirection);
    expect("copy from nowhere", cudaMemcpy(host, (void *)0x40, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    expect("copy from null", cudaMemcpy(memory, nullptr, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    expect("copy to null", cudaMemcpy(nullptr, memory, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    expect("copy of nothing", cudaMemcpy(host, memory, 0, cudaMemcpyDeviceToHost), cudaSuccess);
    float milliseconds;
    expect("time between unrecorded events", cudaEventElapsedTime(&milliseconds, event, other),
           cudaErrorInvalidResourceHandle);
    CHECK(cudaStreamDestroy(stream));
    cudaGetLastError();

    fill<<<1, 256>>>(memory, 42);
    expect("a launch after all that", cudaGetLastError(), cudaSuccess);
    expect("copy", cudaMemcpy(host, memory, sizeof host, cudaMemcpyDeviceToHost), cudaSuccess);
    for (int value : host) surprises += value != 42;

    puts("in a child:");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "errors", "fault", (char *)nullptr);
        _exit(126);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child) status = -1;
    printf("the child exited with %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    surprises += status != 0;

    fill<<<1, 256>>>(memory, 43);
    expect("the parent computes on", cudaDeviceSynchronize(), cudaSuccess);
    return verdict(surprises == 0);
}
