// Graphs: captured streams with a fork and a join, nodes made one by one, changes of executable graphs, and refused captures.
#include "check.h"

#include <atomic>
#include <cstring>
#include <unistd.h>
#include <vector>

constexpr int N = 2048;

__global__ void axpy(int *y, const int *x, int a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] += a * x[i];
}

__global__ void total(const int *in, unsigned long long *out) {
    __shared__ unsigned long long partial;
    if (threadIdx.x == 0) partial = 0;
    __syncthreads();
    unsigned long long sum = 0;
    for (int i = threadIdx.x; i < N; i += blockDim.x) sum += (unsigned long long)in[i];
    atomicAdd(&partial, sum);
    __syncthreads();
    if (threadIdx.x == 0) *out = partial;
}

static cudaStream_t one, two;
static int *x, *y, *z;
static unsigned long long *sums, *results;

// y grows by a * x and z by y; both sums are read.
static cudaGraph_t captured(int a, bool reduces) {
    cudaGraph_t graph;
    cudaEvent_t forked, joined;
    CHECK(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal));
    axpy<<<N / 128, 128, 0, one>>>(y, x, a);
    CHECK(cudaEventRecord(forked, one));
    CHECK(cudaStreamWaitEvent(two, forked, 0));
    total<<<1, 256, 0, one>>>(y, sums);
    axpy<<<N / 128, 128, 0, two>>>(z, y, 1);
    if (reduces) total<<<1, 256, 0, two>>>(z, sums + 1);
    CHECK(cudaEventRecord(joined, two));
    CHECK(cudaStreamWaitEvent(one, joined, 0));
    CHECK(cudaMemcpyAsync(results, sums, 2 * sizeof *results, cudaMemcpyDeviceToHost, one));
    CHECK(cudaGetLastError());
    CHECK(cudaStreamEndCapture(one, &graph));
    CHECK(cudaEventDestroy(forked));
    CHECK(cudaEventDestroy(joined));
    return graph;
}

static size_t count_of(cudaGraph_t graph) {
    size_t count = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    return count;
}

static int replayed() {
    cudaGraph_t graph = captured(1, true);
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    size_t nodes = count_of(graph);
    CHECK(cudaGraphDestroy(graph));
    unsigned long long base = (unsigned long long)N * (N - 1) / 2, first = 0, second = 0;
    int wrong = 0;
    for (int round = 0; round < 100; round++) {
        CHECK(cudaGraphLaunch(executable, one));
        CHECK(cudaStreamSynchronize(one));
        first += base, second += first;
        wrong += results[0] != first || results[1] != second;
    }
    printf("replayed a capture of %zu nodes: %d wrong, sums %llu and %llu\n", nodes, wrong, results[0], results[1]);
    // The same graph with another factor, and one that lacks a node.
    graph = captured(3, true);
    cudaGraphExecUpdateResultInfo info;
    cudaError_t result = cudaGraphExecUpdate(executable, graph, &info);
    printf("update: %d %d\n", (int)result, (int)info.result);
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphLaunch(executable, one));
    CHECK(cudaStreamSynchronize(one));
    first += 3 * base, second += first;
    wrong += results[0] != first || results[1] != second;
    graph = captured(1, false);
    result = cudaGraphExecUpdate(executable, graph, &info);
    printf("update with a node less: %d %d\n", (int)result, (int)info.result);
    cudaGetLastError();
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphExecDestroy(executable));
    return wrong;
}

static int described() {
    cudaGraph_t graph, inner, clone;
    cudaGraphNode_t fill, child, kernel, copy, empty, found;
    cudaGraphExec_t executable;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphCreate(&inner, 0));
    cudaMemsetParams zeroes = {};
    zeroes.dst = y, zeroes.elementSize = 4, zeroes.width = N, zeroes.height = 1;
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &zeroes));
    int factor = 5;
    void *arguments[] = {&y, &x, &factor};
    cudaKernelNodeParams launch = {};
    launch.func = (void *)axpy, launch.gridDim = dim3(N / 128), launch.blockDim = dim3(128), launch.kernelParams = arguments;
    CHECK(cudaGraphAddKernelNode(&kernel, inner, nullptr, 0, &launch));
    CHECK(cudaGraphAddChildGraphNode(&child, graph, &fill, 1, inner));
    CHECK(cudaGraphDestroy(inner));
    void *sum_arguments[] = {&y, &sums};
    launch.func = (void *)total, launch.gridDim = dim3(1), launch.kernelParams = sum_arguments;
    CHECK(cudaGraphAddKernelNode(&kernel, graph, &child, 1, &launch));
    cudaGraphNode_t both[] = {child, kernel};
    CHECK(cudaGraphAddEmptyNode(&empty, graph, both, 2));
    CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, &empty, 1, results, sums, sizeof *results, cudaMemcpyDeviceToHost));
    CHECK(cudaGraphClone(&clone, graph));
    CHECK(cudaGraphNodeFindInClone(&found, copy, clone));
    cudaGraphNodeType type;
    CHECK(cudaGraphNodeGetType(found, &type));
    printf("%zu nodes, %zu in the clone, the last of type %d\n", count_of(graph), count_of(clone), (int)type);
    CHECK(cudaGraphDestroy(clone));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    unsigned long long base = (unsigned long long)N * (N - 1) / 2;
    int wrong = 0;
    for (int round = 0; round < 3; round++) {
        CHECK(cudaGraphLaunch(executable, two));
        CHECK(cudaStreamSynchronize(two));
        wrong += results[0] != 5 * base;
    }
    printf("described: %llu\n", results[0]);
    // One node with other parameters, and one that does nothing.
    sum_arguments[0] = &x;
    CHECK(cudaGraphExecKernelNodeSetParams(executable, kernel, &launch));
    CHECK(cudaGraphLaunch(executable, two));
    CHECK(cudaStreamSynchronize(two));
    printf("changed: %llu\n", results[0]);
    wrong += results[0] != base;
    CHECK(cudaGraphNodeSetEnabled(executable, kernel, 0));
    CHECK(cudaMemset(sums, 0, sizeof *sums));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGraphLaunch(executable, two));
    CHECK(cudaStreamSynchronize(two));
    printf("disabled: %llu\n", results[0]);
    wrong += results[0] != 0;
    CHECK(cudaGraphExecDestroy(executable));
    // A cycle.
    CHECK(cudaGraphAddDependencies(graph, &copy, &fill, nullptr, 1));
    cudaError_t result = cudaGraphInstantiate(&executable, graph, 0);
    printf("cycle: %d\n", (int)result);
    cudaGetLastError();
    CHECK(cudaGraphDestroy(graph));
    return wrong;
}

static void report(const char *text, cudaError_t result) {
    cudaGraph_t graph = nullptr;
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(one, &status));
    cudaError_t end = cudaStreamEndCapture(one, &graph);
    printf("%-32s %d, status %d, end %d%s\n", text, (int)result, (int)status, (int)end, graph ? ", a graph" : "");
    cudaGetLastError();
    if (graph) CHECK(cudaGraphDestroy(graph));
}

static void refused() {
    cudaEvent_t event, outside;
    void *memory = nullptr;
    CHECK(cudaEventCreate(&event));
    CHECK(cudaEventCreate(&outside));
    CHECK(cudaEventRecord(outside, two));
    CHECK(cudaStreamSynchronize(two));
    auto begin = [](cudaStreamCaptureMode mode) { CHECK(cudaStreamBeginCapture(one, mode)); };
    begin(cudaStreamCaptureModeRelaxed);
    report("nothing", cudaSuccess);
    begin(cudaStreamCaptureModeRelaxed);
    report("synchronise", cudaStreamSynchronize(one));
    begin(cudaStreamCaptureModeRelaxed);
    report("query", cudaStreamQuery(one));
    begin(cudaStreamCaptureModeGlobal);
    report("allocate", cudaMalloc(&memory, 256));
    begin(cudaStreamCaptureModeRelaxed);
    report("allocate, relaxed", cudaMalloc(&memory, 256));
    CHECK(cudaFree(memory));
    begin(cudaStreamCaptureModeRelaxed);
    CHECK(cudaEventRecord(event, one));
    report("query a captured event", cudaEventQuery(event));
    begin(cudaStreamCaptureModeRelaxed);
    report("wait for another event", cudaStreamWaitEvent(one, outside, 0));
    begin(cudaStreamCaptureModeRelaxed);
    CHECK(cudaEventRecord(event, one));
    CHECK(cudaStreamWaitEvent(two, event, 0));
    axpy<<<N / 128, 128, 0, two>>>(y, x, 1);
    report("leave a fork open", cudaGetLastError());
    cudaError_t result = cudaStreamBeginCapture(cudaStreamLegacy, cudaStreamCaptureModeRelaxed);
    printf("capture the legacy stream: %d\n", (int)result);
    cudaGetLastError();
    CHECK(cudaEventDestroy(event));
    CHECK(cudaEventDestroy(outside));
}

// Nodes that copy or fill nothing.
static void empty_nodes() {
    cudaGraph_t graph;
    cudaGraphNode_t copy, fill;
    cudaGraphExec_t executable;
    cudaMemsetParams zeroes = {};
    zeroes.dst = y, zeroes.elementSize = 4, zeroes.width = 0, zeroes.height = 1;
    CHECK(cudaGraphCreate(&graph, 0));
    auto said = [](const char *text, cudaError_t result) {
        printf("%-32s %d\n", text, (int)result);
        cudaGetLastError();
    };
    said("copy of no bytes", cudaGraphAddMemcpyNode1D(&copy, graph, nullptr, 0, y, x, 0, cudaMemcpyDeviceToDevice));
    said("fill of no elements", cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &zeroes));
    zeroes.width = N;
    CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, nullptr, 0, y, x, N, cudaMemcpyDeviceToDevice));
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &zeroes));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    zeroes.width = 0;
    said("copy changed to no bytes",
         cudaGraphExecMemcpyNodeSetParams1D(executable, copy, y, x, 0, cudaMemcpyDeviceToDevice));
    said("fill changed to no elements", cudaGraphExecMemsetNodeSetParams(executable, fill, &zeroes));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
}

// A user object of an executable graph that is destroyed while it runs is destroyed once queries find the work complete.
static int objects() {
    static std::atomic<int> destroyed;
    cudaUserObject_t object;
    CHECK(cudaUserObjectCreate(&object, (void *)&destroyed, [](void *count) { ++*(std::atomic<int> *)count; }, 1,
                               cudaUserObjectNoDestructorSync));
    cudaGraph_t graph = captured(1, true);
    CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 200; round++) CHECK(cudaGraphLaunch(executable, one));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    for (double begin = now(); destroyed == 0 && now() - begin < 60; usleep(1000)) {
        cudaError_t result = cudaStreamQuery(one);
        if (result != cudaErrorNotReady) CHECK(result);
    }
    printf("user object of a destroyed graph: destroyed %d times\n", destroyed.load());
    return destroyed != 1;
}

int main() {
    double start = now();
    CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
    for (int **array : {&x, &y, &z}) CHECK(cudaMalloc(array, N * sizeof(int)));
    CHECK(cudaMalloc(&sums, 2 * sizeof *sums));
    CHECK(cudaMallocHost(&results, 2 * sizeof *results));
    std::vector<int> values(N);
    for (int i = 0; i < N; i++) values[i] = i;
    CHECK(cudaMemcpy(x, values.data(), N * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(y, 0, N * sizeof(int)));
    CHECK(cudaMemset(z, 0, N * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    int wrong = replayed();
    wrong += described();
    refused();
    empty_nodes();
    wrong += objects();
    // The streams go on.
    axpy<<<N / 128, 128, 0, one>>>(y, x, 1);
    CHECK(cudaStreamSynchronize(one));
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);
    return verdict(wrong == 0);
}
