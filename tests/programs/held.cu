// A stream held up by an event that only another stream can release must hold up no other party: not the stream's own launcher
// beyond the launcher itself, not other streams, not other threads, not those who wait for it. A wait is over when all work
// posted before it is done, independent of work posted after it.
#include "driver.h"
#include <atomic>
#include <thread>
#include <vector>

__global__ void hold(volatile int *released) {
    while (!*released);
}
__global__ void bump(int *counter) { atomicAdd(counter, 1); }
__global__ void triple(unsigned *values, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] *= 3;
}

int main() {
    // A driver queues about 1,000 launches of a stream. It does not promise that others go on while a launch waits for room; Sluice does.
    const int launches = undefined_too() ? 3000 : 900, waiters = 8, n = 100000;
    int *released;
    const int yes = 1;
    CHECK(cudaMalloc((void **)&released, 2 * sizeof(int)));
    int *counter;
    CHECK(cudaMalloc(&counter, sizeof(int)));
    cudaStream_t holding, held, open, releasing;
    CHECK(cudaStreamCreateWithFlags(&releasing, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&holding, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&open, cudaStreamNonBlocking));
    cudaEvent_t release, early;
    CHECK(cudaEventCreate(&release));
    CHECK(cudaEventCreate(&early));
    unsigned *values;
    CHECK(cudaMalloc(&values, n * sizeof(unsigned)));
    // A driver may load a kernel at its first launch, which waits for all streams: each is launched once before any stream is held.
    CHECK(cudaMemset(released, 1, 2 * sizeof(int)));
    hold<<<1, 1>>>(released);
    bump<<<1, 1>>>(counter);
    triple<<<1, 1>>>(values, 0);
    CHECK(cudaMemset(released, 0, 2 * sizeof(int)));
    CHECK(cudaMemset(counter, 0, sizeof(int)));
    CHECK(cudaDeviceSynchronize());

    hold<<<1, 1, 0, holding>>>(released);
    CHECK(cudaEventRecord(release, holding));
    CHECK(cudaStreamWaitEvent(held, release, 0));
    std::atomic<int> filled{0}, woken{0};
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
        for (int i = 0; i < launches; i++) bump<<<1, 1, 0, held>>>(counter);
        CHECK(cudaGetLastError());
        filled = 1;
    });
    for (int i = 0; i < waiters; i++)
        threads.emplace_back([&] {
            CHECK(cudaEventSynchronize(release));
            woken++;
        });

    // Meanwhile all other work goes on.
    std::vector<unsigned> host(n);
    for (int i = 0; i < n; i++) host[i] = i;
    CHECK(cudaMemcpyAsync(values, host.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice, open));
    triple<<<(n + 255) / 256, 256, 0, open>>>(values, n);
    CHECK(cudaMemcpyAsync(host.data(), values, n * sizeof(unsigned), cudaMemcpyDeviceToHost, open));
    CHECK(cudaStreamSynchronize(open));
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += host[i] != 3u * i;
    printf("open stream beside a held one: %d wrong\n", wrong);
    bool still_held = cudaEventQuery(release) == cudaErrorNotReady && woken == 0;
    printf("held stream is still held: %s\n", still_held ? "yes" : "no");

    CHECK(cudaEventRecord(early, open));
    hold<<<1, 1, 0, open>>>(released + 1);
    CHECK(cudaEventSynchronize(early));
    bool later_runs = cudaStreamQuery(open) == cudaErrorNotReady;
    printf("a wait ends before later work does: %s\n", later_runs ? "yes" : "no");

    CHECK(cudaMemcpyAsync(released + 1, &yes, sizeof yes, cudaMemcpyHostToDevice, releasing));
    CHECK(cudaStreamSynchronize(open));
    CHECK(cudaMemcpyAsync(released, &yes, sizeof yes, cudaMemcpyHostToDevice, releasing));
    for (auto &thread : threads) thread.join();
    CHECK(cudaStreamSynchronize(held));
    int count = 0;
    CHECK(cudaMemcpy(&count, counter, sizeof count, cudaMemcpyDeviceToHost));
    printf("released: %d of %d launches ran, %d of %d waiters woke\n", count, launches, (int)woken, waiters);

    // Recordings of the whole context, which the held stream holds as well.
    const int records = undefined_too() ? 400 : 100, rounds = 20;
    CUcontext context;
    CUevent whole;
    MUST(cuCtxGetCurrent, &context);
    MUST(cuEventCreate, &whole, CU_EVENT_DISABLE_TIMING);
    CHECK(cudaMemset(released, 0, sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    hold<<<1, 1, 0, holding>>>(released);
    std::atomic<int> begun{0};
    std::thread recording([&] {
        for (int i = 0; i < records; i++) {
            begun++;
            MUST(cuCtxRecordEvent, context, whole);
        }
    });
    // The thread itself may wait from its second recording on.
    while (begun < 2) std::this_thread::yield();
    for (int i = 0; i < n; i++) host[i] = i;
    for (int i = 0; i < rounds; i++) {
        CHECK(cudaMemcpyAsync(values, host.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice, open));
        triple<<<(n + 255) / 256, 256, 0, open>>>(values, n);
        CHECK(cudaMemcpyAsync(host.data(), values, n * sizeof(unsigned), cudaMemcpyDeviceToHost, open));
        CHECK(cudaStreamSynchronize(open));
    }
    unsigned factor = 1;
    for (int i = 0; i < rounds; i++) factor *= 3;
    for (int i = 0; i < n; i++) wrong += host[i] != factor * i;
    printf("open stream beside recordings of the context: %d wrong\n", wrong);
    bool behind = CALL(cuEventQuery, whole) == CUDA_ERROR_NOT_READY;
    printf("the recordings are behind the held stream: %s\n", behind ? "yes" : "no");
    CHECK(cudaMemcpyAsync(released, &yes, sizeof yes, cudaMemcpyHostToDevice, releasing));
    recording.join();
    MUST(cuEventSynchronize, whole);
    bool over = cudaStreamQuery(holding) == cudaSuccess;
    printf("released: %d recordings, the stream is done: %s\n", (int)begun, over ? "yes" : "no");
    return verdict(wrong == 0 && still_held && later_runs && count == launches && woken == waiters && filled == 1 && behind && over &&
                   begun == records);
}
