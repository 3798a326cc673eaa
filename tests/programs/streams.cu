// Several streams at once, pinned memory, asynchronous copies, events within and between streams.
#include "check.h"

constexpr int STREAMS = 4, N = 4096;

__global__ void scale(const int *in, int *out, int n, int factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] * factor;
}

__global__ void sum_of(const int *a, const int *b, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

int main() {
    double start = now();
    cudaStream_t streams[STREAMS];
    cudaEvent_t ready[STREAMS], begin, end;
    int *in[STREAMS], *out[STREAMS], *host_in, *host_out, *total, *host_total;
    CHECK(cudaMallocHost(&host_in, STREAMS * N * sizeof(int)));
    CHECK(cudaMallocHost(&host_out, STREAMS * N * sizeof(int)));
    CHECK(cudaHostAlloc(&host_total, N * sizeof(int), cudaHostAllocDefault));
    CHECK(cudaMalloc(&total, N * sizeof(int)));
    Random random(4);
    for (int i = 0; i < STREAMS * N; i++) host_in[i] = (int)random.below(100000), host_out[i] = -1;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int s = 0; s < STREAMS; s++) {
        CHECK(s % 2 ? cudaStreamCreate(&streams[s]) : cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking));
        CHECK(cudaEventCreateWithFlags(&ready[s], cudaEventDisableTiming));
        CHECK(cudaMalloc(&in[s], N * sizeof(int)));
        CHECK(cudaMalloc(&out[s], N * sizeof(int)));
    }

    // Each stream by itself: copy in, three kernels in a row, copy out.
    CHECK(cudaEventRecord(begin, streams[0]));
    for (int s = 0; s < STREAMS; s++) {
        CHECK(cudaMemcpyAsync(in[s], host_in + s * N, N * sizeof(int), cudaMemcpyHostToDevice, streams[s]));
        scale<<<N / 128, 128, 0, streams[s]>>>(in[s], out[s], N, 2);
        scale<<<N / 128, 128, 0, streams[s]>>>(out[s], out[s], N, 3);
        scale<<<N / 128, 128, 0, streams[s]>>>(out[s], out[s], N, s + 1);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpyAsync(host_out + s * N, out[s], N * sizeof(int), cudaMemcpyDeviceToHost, streams[s]));
        CHECK(cudaEventRecord(ready[s], streams[s]));
    }
    // Stream 0 gathers the results of the others; it may read each only after its event.
    CHECK(cudaMemsetAsync(total, 0, N * sizeof(int), streams[0]));
    for (int s = 0; s < STREAMS; s++) {
        CHECK(cudaStreamWaitEvent(streams[0], ready[s], 0));
        sum_of<<<N / 128, 128, 0, streams[0]>>>(total, out[s], total, N);
    }
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpyAsync(host_total, total, N * sizeof(int), cudaMemcpyDeviceToHost, streams[0]));
    CHECK(cudaEventRecord(end, streams[0]));
    for (int s = STREAMS - 1; s >= 0; s--) CHECK(cudaEventSynchronize(ready[s]));
    CHECK(cudaStreamSynchronize(streams[0]));

    int wrong = 0, wrong_total = 0;
    for (int s = 0; s < STREAMS; s++)
        for (int i = 0; i < N; i++) wrong += host_out[s * N + i] != host_in[s * N + i] * 6 * (s + 1);
    for (int i = 0; i < N; i++) {
        int expected = 0;
        for (int s = 0; s < STREAMS; s++) expected += host_in[s * N + i] * 6 * (s + 1);
        wrong_total += host_total[i] != expected;
    }
    // All work is done, and all queries must report that.
    int not_done = cudaEventQuery(end) != cudaSuccess;
    for (int s = 0; s < STREAMS; s++) not_done += cudaStreamQuery(streams[s]) != cudaSuccess;
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    fprintf(stderr, "%.3f ms between events\n", milliseconds);

    // The legacy stream waits for ordinary streams and they for it.
    CHECK(cudaMemcpyAsync(in[1], host_in, N * sizeof(int), cudaMemcpyHostToDevice, streams[1]));
    scale<<<N / 128, 128>>>(in[1], out[1], N, 7);
    scale<<<N / 128, 128, 0, streams[3]>>>(out[1], out[3], N, 11);
    CHECK(cudaMemcpyAsync(host_out, out[3], N * sizeof(int), cudaMemcpyDeviceToHost, streams[3]));
    CHECK(cudaDeviceSynchronize());
    int wrong_legacy = 0;
    for (int i = 0; i < N; i++) wrong_legacy += host_out[i] != host_in[i] * 77;

    uint64_t sum = checksum(host_total, N * sizeof(int));
    for (int s = 0; s < STREAMS; s++) {
        CHECK(cudaEventDestroy(ready[s]));
        CHECK(cudaStreamDestroy(streams[s]));
        CHECK(cudaFree(in[s]));
        CHECK(cudaFree(out[s]));
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaFree(total));
    CHECK(cudaFreeHost(host_in));
    CHECK(cudaFreeHost(host_out));
    CHECK(cudaFreeHost(host_total));
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);
    printf("%d streams of %d: %d wrong; gathered: %d wrong; legacy stream: %d wrong; %d not done\n", STREAMS, N, wrong,
           wrong_total, wrong_legacy, not_done);
    printf("checksum %016llx, time between events is %s\n", (unsigned long long)sum,
           milliseconds >= 0 ? "not negative" : "negative");
    return verdict(wrong + wrong_total + wrong_legacy + not_done == 0 && milliseconds >= 0);
}
