// Several host threads at once, each with its own stream and memory, that end in any order.
#include "check.h"
#include <thread>
#include <vector>

constexpr int THREADS = 6, ROUNDS = 12, N = 1500;

__global__ void step(unsigned *data, int n, unsigned salt) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = data[i] * 1664525u + salt;
}

static void work(int number, uint64_t *sum, int *wrong) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<unsigned> host(N), expected(N);
    Random random(100 + number);
    for (int i = 0; i < N; i++) host[i] = expected[i] = (unsigned)random.next();
    unsigned *device;
    CHECK(cudaMalloc(&device, N * sizeof(unsigned)));
    CHECK(cudaMemcpyAsync(device, host.data(), N * sizeof(unsigned), cudaMemcpyHostToDevice, stream));
    for (int round = 0; round < ROUNDS; round++) {
        step<<<(N + 127) / 128, 128, 0, stream>>>(device, N, round * THREADS + number);
        CHECK(cudaGetLastError());
        if (round % 4 == 0) CHECK(cudaStreamSynchronize(stream));
        for (unsigned &value : expected) value = value * 1664525u + (round * THREADS + number);
    }
    CHECK(cudaMemcpyAsync(host.data(), device, N * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(device));
    CHECK(cudaStreamDestroy(stream));
    for (int i = 0; i < N; i++) *wrong += host[i] != expected[i];
    *sum = checksum(host.data(), N * sizeof(unsigned));
}

int main() {
    double start = now();
    std::vector<std::thread> threads;
    uint64_t sums[THREADS];
    int wrong[THREADS] = {}, all_wrong = 0;
    for (int i = 0; i < THREADS; i++) threads.emplace_back(work, i, &sums[i], &wrong[i]);
    for (std::thread &thread : threads) thread.join();
    for (int i = 0; i < THREADS; i++) {
        printf("thread %d: checksum %016llx, %d wrong\n", i, (unsigned long long)sums[i], wrong[i]);
        all_wrong += wrong[i];
    }
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);
    return verdict(all_wrong == 0);
}
