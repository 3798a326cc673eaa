// The output of kernels appears on the program's own standard output, in order: before the wait for the kernel returns.
#include <cstdio>

#include "check.h"

__global__ void speak(int round)
{
    printf("round %d: thread %d says %s, %.3f, %llu\n", round, threadIdx.x, round % 2 ? "odd" : "even", round / 3.0,
           1234567890123456789ull);
}

__global__ void unfinished(int value)
{
    printf("%d ", value);
}

__global__ void babble(int lines)
{
    for (int line = 0; line < lines; ++line) {
        printf("line %d of many, long enough that the text has to be fetched in several pieces\n", line);
    }
}

int main()
{
    for (int round = 0; round < 3; ++round) {
        printf("before round %d\n", round);
        speak<<<1, 1>>>(round);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        printf("after round %d\n", round);
    }
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    for (int value = 0; value < 5; ++value) {
        unfinished<<<1, 1, 0, stream>>>(value);
        CHECK(cudaStreamSynchronize(stream));
    }
    printf("and the line ends here\n");
    babble<<<1, 1>>>(200);
    int zero = 0, *device = nullptr;
    CHECK(cudaMalloc(&device, sizeof zero));
    // A copy waits for the kernel, too.
    CHECK(cudaMemcpy(device, &zero, sizeof zero, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
    printf("PASS\n");
    return 0;
}
