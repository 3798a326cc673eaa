// Graphs: made by calls and by capture, launched again and again, changed, and used by other streams through events.
#include "graphs.h"
#include <cstring>
#include <vector>

constexpr int N = 4096;

__global__ void add(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += value;
}

__global__ void twice(const int *in, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2 * in[i];
}

__global__ void sum_of(const int *a, const int *b, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

static int *device(int value) {
    std::vector<int> host(N, value);
    int *memory;
    CHECK(cudaMalloc(&memory, N * sizeof(int)));
    CHECK(cudaMemcpy(memory, host.data(), N * sizeof(int), cudaMemcpyHostToDevice));
    return memory;
}

// True if all elements have this value.
static bool all(const int *memory, int value) {
    std::vector<int> host(N);
    CHECK(cudaMemcpy(host.data(), memory, N * sizeof(int), cudaMemcpyDeviceToHost));
    for (int element : host)
        if (element != value) return false;
    return true;
}

static cudaKernelNodeParams kernel(void *function, void **parameters) {
    cudaKernelNodeParams node = {};
    node.func = function;
    node.gridDim = dim3(N / 128);
    node.blockDim = dim3(128);
    node.kernelParams = parameters;
    return node;
}

// Fork and join through events, a fill and a copy in a capture.
static void captured(cudaStream_t stream, cudaStream_t side) {
    int *a = device(1), *b = device(0), *c = device(0);
    cudaEvent_t fork, join;
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(stream, &status));
    expect("a stream captures", status == cudaStreamCaptureStatusActive);
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(side, fork, 0));
    CHECK(cudaMemsetAsync(b, 0, N * sizeof(int), side));
    add<<<N / 128, 128, 0, side>>>(b, N, 5);
    add<<<N / 128, 128, 0, stream>>>(a, N, 3);
    CHECK(cudaEventRecord(join, side));
    CHECK(cudaStreamWaitEvent(stream, join, 0));
    sum_of<<<N / 128, 128, 0, stream>>>(a, b, c, N);
    CHECK(cudaMemcpyAsync(b, c, N * sizeof(int), cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaGetLastError());
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    size_t nodes = 0, edges = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
#if CUDART_VERSION >= 13000
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
#else
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, &edges));
#endif
    printf("captured: %zu nodes, %zu edges\n", nodes, edges);
    expect("captured work does not run", all(a, 1) && all(c, 0));
    cudaGraphExec_t exec = executable(graph);
    CHECK(cudaGraphDestroy(graph));
    launch(exec, stream);
    expect("a captured graph computes", all(a, 4) && all(b, 9) && all(c, 9));
    for (int i = 0; i < 9; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("launches follow one another", all(a, 31) && all(b, 36));
    // In another stream, behind the first.
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphLaunch(exec, side));
    CHECK(cudaDeviceSynchronize());
    expect("launches in two streams follow one another", all(a, 37) && all(c, 42));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaStreamSynchronize(stream));
    expect("an executable that was destroyed completes", all(a, 40));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    for (int *memory : {a, b, c}) CHECK(cudaFree(memory));
}

// Nodes by calls, with a child graph; changes of single nodes and of whole graphs.
static void described(cudaStream_t stream) {
    int *a = device(0), *b = device(0);
    int n = N, value = 1;
    cudaGraph_t graph, inner, copy;
    cudaGraphNode_t fill, adds, child, last, inside;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphCreate(&inner, 0));
    void *inner_parameters[] = {&a, &n, &value};
    cudaKernelNodeParams inner_node = kernel((void *)add, inner_parameters);
    CHECK(cudaGraphAddKernelNode(&inside, inner, nullptr, 0, &inner_node));
    cudaMemsetParams zeroes = {};
    zeroes.dst = a;
    zeroes.elementSize = 4;
    zeroes.width = N;
    zeroes.height = 1;
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &zeroes));
    int ten = 10;
    void *ten_parameters[] = {&a, &n, &ten};
    cudaKernelNodeParams ten_node = kernel((void *)add, ten_parameters);
    CHECK(cudaGraphAddKernelNode(&adds, graph, &fill, 1, &ten_node));
    CHECK(cudaGraphAddChildGraphNode(&child, graph, &adds, 1, inner));
    void *twice_parameters[] = {&a, &b, &n};
    cudaKernelNodeParams twice_node = kernel((void *)twice, twice_parameters);
    CHECK(cudaGraphAddKernelNode(&last, graph, &child, 1, &twice_node));
    cudaGraphExec_t exec = executable(graph);
    launch(exec, stream);
    expect("nodes and a child graph compute", all(a, 11) && all(b, 22));

    int hundred = 100;
    void *hundred_parameters[] = {&a, &n, &hundred};
    cudaKernelNodeParams hundred_node = kernel((void *)add, hundred_parameters);
    CHECK(cudaGraphExecKernelNodeSetParams(exec, adds, &hundred_node));
    launch(exec, stream);
    expect("new parameters of a kernel", all(a, 101) && all(b, 202));
    zeroes.value = 7;
    CHECK(cudaGraphExecMemsetNodeSetParams(exec, fill, &zeroes));
    launch(exec, stream);
    expect("new parameters of a fill", all(b, 216));
    CHECK(cudaGraphNodeSetEnabled(exec, adds, 0));
    launch(exec, stream);
    expect("a node that is turned off", all(b, 16));
    CHECK(cudaGraphNodeSetEnabled(exec, adds, 1));
    launch(exec, stream);
    expect("and on", all(b, 216));
    value = 1000;
    CHECK(cudaGraphKernelNodeSetParams(inside, &inner_node));
    CHECK(cudaGraphExecChildGraphNodeSetParams(exec, child, inner));
    launch(exec, stream);
    expect("a new child graph", all(b, 2214));

    CHECK(cudaGraphClone(&copy, graph));
    cudaGraphNode_t copied;
    CHECK(cudaGraphNodeFindInClone(&copied, adds, copy));
    hundred = 500;
    CHECK(cudaGraphKernelNodeSetParams(copied, &hundred_node));
    cudaGraphExecUpdateResultInfo info;
    CHECK(cudaGraphExecUpdate(exec, copy, &info));
    launch(exec, stream);
    expect("a whole update", all(a, 501) && all(b, 1002));
    CHECK(cudaGraphDestroyNode(copied));
    cudaError_t refused = cudaGraphExecUpdate(exec, copy, &info);
    printf("update to other nodes: %d %s, result %d\n", (int)refused, cudaGetErrorName(refused), (int)info.result);
    cudaGetLastError();
    launch(exec, stream);
    expect("a refused update changes nothing", all(b, 1002));

    // A thousand nodes in a row.
    cudaGraph_t large;
    CHECK(cudaGraphCreate(&large, 0));
    cudaGraphNode_t before = nullptr;
    int one = 1;
    void *one_parameters[] = {&b, &n, &one};
    cudaKernelNodeParams one_node = kernel((void *)add, one_parameters);
    for (int i = 0; i < 1000; i++) {
        cudaGraphNode_t node;
        CHECK(cudaGraphAddKernelNode(&node, large, &before, i > 0, &one_node));
        before = node;
    }
    cudaGraphExec_t thousand = executable(large);
    double start = now();
    launch(thousand, stream);
    fprintf(stderr, "%.3f ms for 1000 nodes\n", (now() - start) * 1000);
    expect("a thousand nodes", all(b, 2002));
    for (cudaGraphExec_t done : {exec, thousand}) CHECK(cudaGraphExecDestroy(done));
    for (cudaGraph_t done : {graph, inner, copy, large}) CHECK(cudaGraphDestroy(done));
    for (int *memory : {a, b}) CHECK(cudaFree(memory));
}

// Events that nodes record, seen by other streams and by the host.
static void events(cudaStream_t stream, cudaStream_t side) {
    int *a = device(0), *b = device(0);
    int n = N, value = 2;
    cudaEvent_t event, start;
    CHECK(cudaEventCreate(&event));
    CHECK(cudaEventCreate(&start));
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t begin, work, end;
    CHECK(cudaGraphAddEventRecordNode(&begin, graph, nullptr, 0, start));
    void *parameters[] = {&a, &n, &value};
    cudaKernelNodeParams node = kernel((void *)add, parameters);
    CHECK(cudaGraphAddKernelNode(&work, graph, &begin, 1, &node));
    CHECK(cudaGraphAddEventRecordNode(&end, graph, &work, 1, event));
    cudaGraphExec_t exec = executable(graph);
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamWaitEvent(side, event, 0));
    twice<<<N / 128, 128, 0, side>>>(a, b, N);
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(side));
    expect("a stream waits for an event of a graph", all(b, 4));
    CHECK(cudaEventSynchronize(event));
    expect("the event is done", cudaEventQuery(event) == cudaSuccess);
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, start, event));
    expect("its time is known", milliseconds >= 0);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaEventDestroy(start));
    for (int *memory : {a, b}) CHECK(cudaFree(memory));
}

// Copies from and to pinned memory, where devices reach it.
static void pinned(cudaStream_t stream) {
    int maps = 0;
    CHECK(cudaDeviceGetAttribute(&maps, cudaDevAttrCanMapHostMemory, 0));
    bool good = true;
    if (maps) {
        int *host, *a = device(0);
        CHECK(cudaMallocHost(&host, 2 * N * sizeof(int)));
        for (int i = 0; i < 2 * N; i++) host[i] = i < N ? 6 : 0;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        CHECK(cudaMemcpyAsync(a, host, N * sizeof(int), cudaMemcpyHostToDevice, stream));
        add<<<N / 128, 128, 0, stream>>>(a, N, 1);
        CHECK(cudaMemcpyAsync(host + N, a, N * sizeof(int), cudaMemcpyDeviceToHost, stream));
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(stream, &graph));
        cudaGraphExec_t exec = executable(graph);
        launch(exec, stream);
        for (int i = N; i < 2 * N; i++) good &= host[i] == 7;
        for (int i = 0; i < N; i++) host[i] = 11;
        launch(exec, stream);
        for (int i = N; i < 2 * N; i++) good &= host[i] == 12;
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaFree(a));
        CHECK(cudaFreeHost(host));
    }
    expect("copies from and to pinned memory", good);
}

static void code(const char *what, cudaError_t error) {
    printf("%-64s %d %s\n", what, (int)error, cudaGetErrorName(error));
    cudaGetLastError();
}

// Calls that a capture does not allow.
static void refused(cudaStream_t stream, cudaStream_t side) {
    cudaGraph_t graph = nullptr;
    int *a = device(0);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    code("a query of a stream that captures", cudaStreamQuery(stream));
    code("work after that", cudaMemsetAsync(a, 1, 4, stream));
    code("the end of that capture", cudaStreamEndCapture(stream, &graph));
    expect("it gives no graph", graph == nullptr);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    void *memory;
    code("an allocation", cudaMalloc(&memory, 64));
    code("the end of that capture", cudaStreamEndCapture(stream, &graph));
    cudaEvent_t event;
    CHECK(cudaEventCreate(&event));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaStreamWaitEvent(side, event, 0));
    CHECK(cudaMemsetAsync(a, 1, 4, side));
    code("the end of a capture with a stream that was not joined", cudaStreamEndCapture(stream, &graph));
    code("the end of no capture", cudaStreamEndCapture(stream, &graph));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamSynchronize(side));
    expect("nothing of it ran", all(a, 0));
    CHECK(cudaFree(a));
}

#if CUDART_VERSION >= 13030
// Judges a node whose parameters differ: the program takes all but fills.
static cudaError_t judge(void *count, cudaGraphNode_t, const cudaGraphNodeParams *original, const cudaGraphNodeParams *again,
                         cudaGraphRecaptureStatus status) {
    ++*(int *)count;
    printf("judged: kinds %d and %d, status %d\n", (int)original->type, (int)again->type, (int)status);
    return again->type == cudaGraphNodeTypeMemset ? cudaErrorUnknown : cudaSuccess;
}

// Captures a kernel and a fill, or again, with other values.
static cudaError_t recaptured(cudaStream_t stream, int *a, int *b, int value, int fill) {
    add<<<N / 128, 128, 0, stream>>>(a, N, value);
    cudaError_t launched = cudaGetLastError();
    cudaError_t filled = cudaMemsetAsync(b, fill, N * sizeof(int), stream);
    return launched != cudaSuccess ? launched : filled;
}

static void again(cudaStream_t stream) {
    int *a = device(1), *b = device(0), judged = 0;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(recaptured(stream, a, b, 1, 0));
    cudaGraph_t graph, same;
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec = executable(graph);
    cudaGraphRecaptureCallbackData data = {judge, &judged};
    CHECK(cudaStreamBeginRecaptureToGraph(stream, cudaStreamCaptureModeGlobal, graph, &data));
    CHECK(recaptured(stream, a, b, 10, 0));
    CHECK(cudaStreamEndCapture(stream, &same));
    expect("a recapture asks about the node that differs", judged == 1 && same == graph);
    cudaGraphExecUpdateResultInfo info;
    CHECK(cudaGraphExecUpdate(exec, graph, &info));
    launch(exec, stream);
    expect("and the node has its new parameters", all(a, 11));
    CHECK(cudaStreamBeginRecaptureToGraph(stream, cudaStreamCaptureModeGlobal, graph, &data));
    printf("a refused fill: %d\n", (int)recaptured(stream, a, b, 10, 1));
    printf("the end: %d\n", (int)cudaStreamEndCapture(stream, &same));
    cudaGetLastError();
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    for (int *memory : {a, b}) CHECK(cudaFree(memory));
}
#endif

int main() {
    cudaStream_t stream, side;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    captured(stream, side);
    described(stream);
    events(stream, side);
    pinned(stream);
    refused(stream, side);
#if CUDART_VERSION >= 13030
    int driver = 0;
    CHECK(cudaDriverGetVersion(&driver));
    if (driver >= 13030) again(stream);
    else printf("the driver is too old for recaptures\n");
#endif
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(side));
    CHECK(cudaDeviceReset());
    return verdict(wrong == 0);
}
