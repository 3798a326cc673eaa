// Computes over and over until SIGUSR1, and checks every result: no other process may change one.
// Usage: neighbour [forever]     without argument: a few rounds
#include "check.h"
#include <csignal>
#include <vector>

static volatile sig_atomic_t done = 0;

static void finish(int) { done = 1; }

__global__ void step(unsigned *values, int n, unsigned round) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] = values[i] * 1664525u + 1013904223u + round;
}

int main(int argc, char **) {
    const int n = 1 << 12;
    signal(SIGUSR1, finish);
    std::vector<unsigned> expected(n), got(n);
    for (int i = 0; i < n; i++) expected[i] = i;
    unsigned *values;
    CHECK(cudaMalloc(&values, n * sizeof(unsigned)));
    CHECK(cudaMemcpy(values, expected.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
    long wrong = 0;
    unsigned round = 0;
    for (; argc > 1 ? !done : round < 5; round++) {
        step<<<n / 256, 256>>>(values, n, round);
        CHECK(cudaMemcpy(got.data(), values, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
        for (int i = 0; i < n; i++) {
            expected[i] = expected[i] * 1664525u + 1013904223u + round;
            wrong += got[i] != expected[i];
        }
        if (round == 0) {
            printf("computing\n");
            fflush(stdout);
        }
    }
    fprintf(stderr, "%u rounds\n", round);
    printf("%ld wrong\n", wrong);
    return verdict(wrong == 0);
}
