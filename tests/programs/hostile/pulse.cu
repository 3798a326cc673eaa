// A neighbour that measures its calls: each line of standard input is a number of milliseconds, for which it computes,
// checks every result, and measures each round of a kernel and a copy.
// Prints `computing` at the start, and for each line `pulse LINE MEDIAN P99 MOST ROUNDS WRONG FAILED`, times in nanoseconds.
#include "../check.h"
#include <algorithm>
#include <vector>

__global__ void step(unsigned *values, int n, unsigned round) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] = values[i] * 1664525u + 1013904223u + round;
}

int main() {
    const int n = 1 << 10;
    std::vector<unsigned> expected(n), got(n);
    for (int i = 0; i < n; i++) expected[i] = i;
    unsigned *values;
    CHECK(cudaMalloc(&values, n * sizeof(unsigned)));
    CHECK(cudaMemcpy(values, expected.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
    printf("computing\n");
    fflush(stdout);
    unsigned round = 0;
    long all_wrong = 0, all_failed = 0;
    int milliseconds;
    for (int line = 0; scanf("%d", &milliseconds) == 1; line++) {
        std::vector<double> took;
        long wrong = 0, failed = 0;
        for (double end = now() + milliseconds * 1e-3; now() < end; round++) {
            double start = now();
            step<<<n / 256, 256>>>(values, n, round);
            failed += cudaGetLastError() != cudaSuccess;
            failed += cudaMemcpy(got.data(), values, n * sizeof(unsigned), cudaMemcpyDeviceToHost) != cudaSuccess;
            took.push_back(now() - start);
            for (int i = 0; i < n; i++) {
                expected[i] = expected[i] * 1664525u + 1013904223u + round;
                wrong += got[i] != expected[i];
            }
        }
        std::sort(took.begin(), took.end());
        auto at = [&](double share) { return took[(size_t)((took.size() - 1) * share)] * 1e9; };
        printf("pulse %d %.0f %.0f %.0f %zu %ld %ld\n", line, at(0.5), at(0.99), at(1), took.size(), wrong, failed);
        fflush(stdout);
        all_wrong += wrong;
        all_failed += failed;
    }
    return verdict(all_wrong == 0 && all_failed == 0);
}
