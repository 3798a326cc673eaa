// Kernels without end, some always under way, and every now and then how many are done.
// Usage: busy ROUNDS DEPTH      rounds of each kernel, kernels under way
#include "../check.h"

__global__ void turn(unsigned *values, unsigned rounds) {
    unsigned value = values[threadIdx.x];
    for (unsigned round = 0; round < rounds; round++) value = value * 1664525u + 1013904223u;
    values[threadIdx.x] = value;
}

int main(int argc, char **argv) {
    const unsigned rounds = argc > 1 ? atoi(argv[1]) : 1000;
    const int depth = argc > 2 ? atoi(argv[2]) : 8;
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
        turn<<<1, 32>>>(values, rounds);
        CHECK(cudaEventRecord(event));
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - last.tv_sec) * 1000 + (now.tv_nsec - last.tv_nsec) / 1000000 >= 50) {
            last = now;
            printf("done %ld\n", done);
            fflush(stdout);
        }
    }
}
