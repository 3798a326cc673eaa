// Many threads that allocate, capture, launch and free together, each in two streams of its own. Usage: crowd [THREADS], by default 200
#include "check.h"
#include <atomic>
#include <thread>
#include <vector>

constexpr int N = 512, ROUNDS = 3, LAUNCHES = 3;

__global__ void step(unsigned *data, int n, unsigned salt) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = data[i] * 1664525u + salt;
}

static void CUDART_CB count(void *calls) { ++*(std::atomic<int> *)calls; }

static void work(int number, uint64_t *sum, std::atomic<int> *calls) {
    cudaStream_t stream, side;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    cudaEvent_t fork, join;
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    std::vector<unsigned> host(N);
    *sum = 0;
    for (int round = 0; round < ROUNDS; round++) {
        unsigned *data, *scratch;
        CHECK(cudaMalloc(&data, N * sizeof(unsigned)));
        CHECK(cudaMallocAsync(&scratch, N * sizeof(unsigned), stream));
        CHECK(cudaStreamBeginCapture(
            stream, round % 2 ? cudaStreamCaptureModeThreadLocal : cudaStreamCaptureModeRelaxed));
        CHECK(cudaMemsetAsync(data, number & 0x7f, N * sizeof(unsigned), stream));
        CHECK(cudaEventRecord(fork, stream));
        CHECK(cudaStreamWaitEvent(side, fork, 0));
        CHECK(cudaMemsetAsync(scratch, 3, N * sizeof(unsigned), side));
        step<<<(N + 127) / 128, 128, 0, side>>>(scratch, N, round);
        CHECK(cudaEventRecord(join, side));
        step<<<(N + 127) / 128, 128, 0, stream>>>(data, N, number);
        CHECK(cudaLaunchHostFunc(stream, count, calls));
        CHECK(cudaStreamWaitEvent(stream, join, 0));
        step<<<(N + 127) / 128, 128, 0, stream>>>(scratch, N, 7);
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(stream, &graph));
        cudaGraphExec_t made;
        CHECK(cudaGraphInstantiate(&made, graph, 0));
        CHECK(cudaGraphDestroy(graph));
        for (int i = 0; i < LAUNCHES; i++) CHECK(cudaGraphLaunch(made, stream));
        CHECK(cudaMemcpyAsync(host.data(), data, N * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        *sum = *sum * 31 + checksum(host.data(), N * sizeof(unsigned));
        CHECK(cudaMemcpyAsync(host.data(), scratch, N * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaFreeAsync(scratch, stream));
        CHECK(cudaGraphExecDestroy(made));
        CHECK(cudaFree(data));
        CHECK(cudaStreamSynchronize(stream));
        *sum = *sum * 31 + checksum(host.data(), N * sizeof(unsigned));
    }
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaStreamDestroy(side));
    CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
    int count = argc > 1 ? atoi(argv[1]) : 200;
    CHECK(cudaFree(nullptr));
    std::vector<uint64_t> sums(count);
    std::vector<std::atomic<int>> calls(count);
    std::vector<std::thread> threads;
    for (int i = 0; i < count; i++) threads.emplace_back(work, i, &sums[i], &calls[i]);
    for (auto &thread : threads) thread.join();
    bool good = true;
    for (int i = 0; i < count; i++) {
        printf("thread %3d %016llx %d\n", i, (unsigned long long)sums[i], calls[i].load());
        good &= calls[i] == ROUNDS * LAUNCHES;
    }
    CHECK(cudaDeviceSynchronize());
    return verdict(good);
}
