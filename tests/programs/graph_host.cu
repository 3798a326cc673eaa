// Graphs with functions of the program: launched again and again, changed, in several streams and threads. Usage: graph_host [LAUNCHES]
#include "graphs.h"
#include <atomic>
#include <cstdlib>
#include <thread>
#include <unistd.h>
#include <vector>

__global__ void add(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += value;
}

static void code(const char *what, cudaError_t error) {
    printf("%-64s %d %s\n", what, (int)error, cudaGetErrorName(error));
    fflush(stdout);
    cudaGetLastError();
}

// The values that functions were given, in the order of the calls.
static std::vector<int> called;

static void note(void *value) { called.push_back(*(int *)value); }

static bool were(std::vector<int> values) {
    bool same = called == values;
    called.clear();
    return same;
}

static cudaHostNodeParams function(cudaHostFn_t run, void *data) {
    cudaHostNodeParams node = {};
    node.fn = run;
    node.userData = data;
    return node;
}

static int one = 1, two = 2, three = 3, four = 4;

// Functions between kernels, by capture.
static void in_a_capture(cudaStream_t stream, cudaStream_t side) {
    int *device, result = 0;
    CHECK(cudaMalloc(&device, sizeof(int)));
    CHECK(cudaMemset(device, 0, sizeof(int)));
    cudaEvent_t fork, join;
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaLaunchHostFunc(stream, note, &one));
    add<<<1, 1, 0, stream>>>(device, 1, 5);
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(side, fork, 0));
    CHECK(cudaLaunchHostFunc(side, note, &two));
    CHECK(cudaEventRecord(join, side));
    CHECK(cudaStreamWaitEvent(stream, join, 0));
    add<<<1, 1, 0, stream>>>(device, 1, 7);
    CHECK(cudaLaunchHostFunc(stream, note, &three));
    cudaGraphExec_t exec = captured(stream);
    expect("a function does not run in a capture", were({}));
    launch(exec, stream);
    expect("functions run in the order of edges", were({1, 2, 3}));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphLaunch(exec, side));
    CHECK(cudaDeviceSynchronize());
    expect("they run at each launch, in any stream", were({1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3}));
    CHECK(cudaMemcpy(&result, device, sizeof(int), cudaMemcpyDeviceToHost));
    expect("so do the kernels", result == 60);
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaStreamSynchronize(stream));
    expect("an executable that was destroyed completes", were({1, 2, 3}));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaFree(device));
}

// Functions by calls, in a graph inside another, and changed.
static void by_calls(cudaStream_t stream) {
    cudaGraph_t graph, inner;
    cudaGraphNode_t first, child, last, inside;
    cudaHostNodeParams params = function(note, &one);
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphCreate(&inner, 0));
    CHECK(cudaGraphAddHostNode(&first, graph, nullptr, 0, &params));
    params.userData = &two;
    CHECK(cudaGraphAddHostNode(&inside, inner, nullptr, 0, &params));
    CHECK(cudaGraphAddChildGraphNode(&child, graph, &first, 1, inner));
    params.userData = &three;
    CHECK(cudaGraphAddHostNode(&last, graph, &child, 1, &params));
    cudaGraphNodeType type;
    CHECK(cudaGraphNodeGetType(last, &type));
    cudaHostNodeParams shown = {};
    CHECK(cudaGraphHostNodeGetParams(last, &shown));
    expect("a node shows its function", type == cudaGraphNodeTypeHost && shown.fn == note && shown.userData == &three);
    cudaGraphExec_t exec = executable(graph);
    launch(exec, stream);
    expect("a function in a graph inside runs in its turn", were({1, 2, 3}));

    // Launches in flight keep their functions.
    params.userData = &four;
    for (int i = 0; i < 5; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphExecHostNodeSetParams(exec, last, &params));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("a change applies to later launches",
           were({1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 4}));
    CHECK(cudaGraphHostNodeSetParams(inside, &params));
    CHECK(cudaGraphExecChildGraphNodeSetParams(exec, child, inner));
    launch(exec, stream);
    expect("the graph inside is changed", were({1, 4, 4}));
    CHECK(cudaGraphHostNodeSetParams(first, &params));
    cudaGraphExecUpdateResultInfo result;
    CHECK(cudaGraphExecUpdate(exec, graph, &result));
    launch(exec, stream);
    expect("the whole graph is changed", were({4, 2, 3}));
    params.fn = nullptr;
    code("no function", cudaGraphExecHostNodeSetParams(exec, last, &params));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(inner));
    CHECK(cudaGraphDestroy(graph));
}

static cudaError_t from_a_function = cudaSuccess;

static void calls_the_driver(void *) { from_a_function = cudaDeviceSynchronize(); }

static void wait_for(void *flag) {
    while (!*(std::atomic<int> *)flag) usleep(100);
}

// A function may not call the driver, and holds only its stream.
static void alone(cudaStream_t stream, cudaStream_t side) {
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaLaunchHostFunc(stream, calls_the_driver, nullptr));
    cudaGraphExec_t exec = captured(stream);
    launch(exec, stream);
    code("a call in a function", from_a_function);
    CHECK(cudaGraphExecDestroy(exec));

    std::atomic<int> released(0);
    int *device, result = 0;
    CHECK(cudaMalloc(&device, sizeof(int)));
    CHECK(cudaMemset(device, 0, sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaLaunchHostFunc(stream, wait_for, &released));
    add<<<1, 1, 0, stream>>>(device, 1, 1);
    exec = captured(stream);
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaMemcpyAsync(&result, device, sizeof(int), cudaMemcpyDeviceToHost, side));
    CHECK(cudaStreamSynchronize(side));
    expect("another stream computes meanwhile", result == 0 && cudaStreamQuery(stream) == cudaErrorNotReady);
    released = 1;
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&result, device, sizeof(int), cudaMemcpyDeviceToHost));
    expect("work behind the function comes after it", result == 1);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaFree(device));
}

static void count(void *counter) { ++*(std::atomic<int> *)counter; }

// Resident memory in bytes.
static long resident() {
    FILE *file = fopen("/proc/self/statm", "r");
    long pages = 0;
    if (!file || fscanf(file, "%*d %ld", &pages) != 1) pages = -1;
    if (file) fclose(file);
    return pages * sysconf(_SC_PAGESIZE);
}

// Threads that launch, each in its own stream; and memory that does not grow with launches.
static void often(int launches) {
    std::atomic<int> own[3] = {}, shared(0);
    cudaGraph_t graph;
    cudaGraphNode_t first, second;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaHostNodeParams params = function(count, &shared);
    CHECK(cudaGraphAddHostNode(&first, graph, nullptr, 0, &params));
    CHECK(cudaGraphAddHostNode(&second, graph, &first, 1, &params));
    cudaGraphExec_t all = executable(graph);
    std::vector<std::thread> threads;
    for (std::atomic<int> &counter : own)
        threads.emplace_back([&counter, all] {
            cudaStream_t stream;
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            CHECK(cudaLaunchHostFunc(stream, count, &counter));
            cudaGraphExec_t mine = captured(stream);
            for (int i = 0; i < 100; i++) {
                CHECK(cudaGraphLaunch(mine, stream));
                CHECK(cudaGraphLaunch(all, stream));
            }
            CHECK(cudaStreamSynchronize(stream));
            CHECK(cudaGraphExecDestroy(mine));
            CHECK(cudaStreamDestroy(stream));
        });
    for (std::thread &thread : threads) thread.join();
    expect("launches of several threads run all their functions",
           own[0] == 100 && own[1] == 100 && own[2] == 100 && shared == 600);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    long before = resident();
    for (int i = 0; i < launches; i++) CHECK(cudaGraphLaunch(all, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("launches take no memory", resident() - before < 16 << 20);
    expect("each of them runs its functions", shared == 600 + 2 * launches);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaGraphExecDestroy(all));
    CHECK(cudaGraphDestroy(graph));
}

int main(int count, char **arguments) {
    int launches = count > 1 ? atoi(arguments[1]) : 2000;
    cudaStream_t stream, side;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    in_a_capture(stream, side);
    by_calls(stream);
    alone(stream, side);
    often(launches);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(side));
    CHECK(cudaDeviceReset());
    return verdict(wrong == 0);
}
