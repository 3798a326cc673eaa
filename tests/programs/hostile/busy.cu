// Runs kernels without end, several always in flight, and prints from time to time the number of completed ones.
// Usage: busy ROUNDS DEPTH [NANOSECONDS]      rounds of each kernel, kernels in flight, duration of each kernel
// A kernel with a duration computes until the clock of the device says so, however fast the device is.
#include "../check.h"

__device__ unsigned long long device_clock() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__global__ void turn(unsigned *values, unsigned rounds, unsigned long long nanoseconds) {
    const unsigned long long begun = nanoseconds == 0 ? 0 : device_clock();
    unsigned value = values[threadIdx.x];
    do {
        for (unsigned round = 0; round < rounds; round++) value = value * 1664525u + 1013904223u;
    } while (nanoseconds != 0 && device_clock() - begun < nanoseconds);
    values[threadIdx.x] = value;
}

int main(int argc, char **argv) {
    const unsigned rounds = argc > 1 ? atoi(argv[1]) : 1000;
    const int depth = argc > 2 ? atoi(argv[2]) : 8;
    const unsigned long long nanoseconds = argc > 3 ? atoll(argv[3]) : 0;
    unsigned *values;
    CHECK(cudaMalloc(&values, 32 * sizeof(unsigned)));
    CHECK(cudaMemset(values, 1, 32 * sizeof(unsigned)));
    cudaEvent_t events[64];
    for (int i = 0; i < depth; i++) CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
    timespec last;
    clock_gettime(CLOCK_MONOTONIC, &last);
    for (long done = -depth;; done++) {
        cudaEvent_t event = events[(done + depth) % depth];
        if (done >= 0) CHECK(cudaEventSynchronize(event));
        turn<<<1, 32>>>(values, rounds, nanoseconds);
        CHECK(cudaEventRecord(event));
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - last.tv_sec) * 1000 + (now.tv_nsec - last.tv_nsec) / 1000000 >= 10) {
            last = now;
            printf("done %ld\n", done);
            fflush(stdout);
        }
    }
}
