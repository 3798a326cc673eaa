// Graphs with memory: allocations and frees as nodes, by calls and by capture, and frees outside of their graph.
#include "check.h"
#include <vector>

constexpr int N = 1 << 16;
constexpr size_t BYTES = N * sizeof(int);

__global__ void set(int *to, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) to[i] = value + i;
}

__global__ void add(const int *from, int *to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) to[i] += from[i];
}

static int wrong = 0;
static void expect(const char *what, bool good) {
    printf("%-64s %s\n", what, good ? "ok" : "WRONG");
    fflush(stdout);
    wrong += !good;
}

static void code(const char *what, cudaError_t error) {
    printf("%-64s %d %s\n", what, (int)error, cudaGetErrorName(error));
    fflush(stdout);
    cudaGetLastError();
}

static bool holds(const int *memory, int factor, int value) {
    std::vector<int> host(N);
    CHECK(cudaMemcpy(host.data(), memory, BYTES, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        if (host[i] != factor * (value + i)) return false;
    return true;
}

static unsigned long long used(cudaGraphMemAttributeType attribute) {
    unsigned long long value = 0;
    CHECK(cudaDeviceGetGraphMemAttribute(0, attribute, &value));
    return value;
}

static cudaMemAllocNodeParams allocation(size_t bytes) {
    cudaMemAllocNodeParams node = {};
    node.poolProps.allocType = cudaMemAllocationTypePinned;
    node.poolProps.location.type = cudaMemLocationTypeDevice;
    node.bytesize = bytes;
    return node;
}

static cudaGraphNode_t kernel(cudaGraph_t graph, cudaGraphNode_t behind, void *function, void **parameters) {
    cudaKernelNodeParams node = {};
    node.func = function;
    node.gridDim = dim3(N / 256);
    node.blockDim = dim3(256);
    node.kernelParams = parameters;
    cudaGraphNode_t made;
    CHECK(cudaGraphAddKernelNode(&made, graph, &behind, 1, &node));
    return made;
}

// A graph that allocates, computes and frees.
static void inside(cudaStream_t stream) {
    int *result, value = 5;
    CHECK(cudaMalloc(&result, BYTES));
    CHECK(cudaMemset(result, 0, BYTES));
    cudaGraph_t graph, copy;
    cudaGraphNode_t made, end;
    cudaMemAllocNodeParams asked = allocation(BYTES);
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemAllocNode(&made, graph, nullptr, 0, &asked));
    int *memory = (int *)asked.dptr;
    expect("a node has an address", memory != nullptr);
    void *set_parameters[] = {&memory, &value};
    cudaGraphNode_t sets = kernel(graph, made, (void *)set, set_parameters);
    void *add_parameters[] = {&memory, &result};
    cudaGraphNode_t adds = kernel(graph, sets, (void *)add, add_parameters);
    CHECK(cudaGraphAddMemFreeNode(&end, graph, &adds, 1, memory));
    cudaMemAllocNodeParams shown = {};
    void *freed = nullptr;
    CHECK(cudaGraphMemAllocNodeGetParams(made, &shown));
    CHECK(cudaGraphMemFreeNodeGetParams(end, &freed));
    expect("nodes show their parameters", shown.dptr == memory && shown.bytesize == BYTES && freed == memory);
    code("a second free of it in its graph", cudaGraphAddMemFreeNode(&end, graph, nullptr, 0, memory));
    code("a free of memory that is none of a graph's", cudaGraphAddMemFreeNode(&end, graph, nullptr, 0, result));
    code("the destruction of a node", cudaGraphDestroyNode(adds));
    code("a copy of the graph", cudaGraphClone(&copy, graph));
    cudaGraphExec_t exec, second;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    code("a second executable", cudaGraphInstantiate(&second, graph, 0));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("it computes at each launch", holds(result, 3, 5));
    code("a free outside of memory that the graph frees", cudaFreeAsync(memory, stream));
    expect("graphs use memory", used(cudaGraphMemAttrUsedMemCurrent) >= BYTES);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamSynchronize(stream));
    expect("an executable that was destroyed completes", holds(result, 4, 5));
    CHECK(cudaFree(result));
}

// Memory that outlives its graph's launch.
static void outside(cudaStream_t stream) {
    int value = 9;
    cudaGraph_t graph, frees;
    cudaGraphNode_t made, end;
    cudaMemAllocNodeParams asked = allocation(BYTES);
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemAllocNode(&made, graph, nullptr, 0, &asked));
    int *memory = (int *)asked.dptr;
    void *parameters[] = {&memory, &value};
    kernel(graph, made, (void *)set, parameters);
    cudaGraphExec_t exec, freeing;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    code("a free before any launch", cudaFree(memory));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("work behind the graph finds the memory", holds(memory, 1, 9));
    code("a launch before it is freed", cudaGraphLaunch(exec, stream));
    CHECK(cudaFreeAsync(memory, stream));
    code("a second free", cudaFreeAsync(memory, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(memory));
    // Another graph frees it.
    CHECK(cudaGraphCreate(&frees, 0));
    CHECK(cudaGraphAddMemFreeNode(&end, frees, nullptr, 0, memory));
    code("a free in its own graph, too", cudaGraphAddMemFreeNode(&end, graph, nullptr, 0, memory));
    CHECK(cudaGraphInstantiate(&freeing, frees, 0));
    for (int i = 0; i < 3; i++) {
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaGraphLaunch(freeing, stream));
    }
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamSynchronize(stream));
    expect("the memory outlives graph and executable", holds(memory, 1, 9));
    CHECK(cudaGraphLaunch(freeing, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(freeing));
    CHECK(cudaGraphDestroy(frees));
    CHECK(cudaDeviceSynchronize());
    // A driver may count it on, as its executable is gone.
    if (undefined_too()) expect("and ends with its free", used(cudaGraphMemAttrUsedMemCurrent) == 0);

    // Freed by each launch.
    asked = allocation(BYTES);
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemAllocNode(&made, graph, nullptr, 0, &asked));
    memory = (int *)asked.dptr;
    kernel(graph, made, (void *)set, parameters);
    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
    for (int i = 0; i < 5; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("launches that free first follow one another", holds(memory, 1, 9));
    CHECK(cudaFree(memory));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

// Allocations in a captured stream.
static void captured(cudaStream_t stream) {
    int *result, *memory, *kept;
    CHECK(cudaMalloc(&result, BYTES));
    CHECK(cudaMemset(result, 0, BYTES));
    CHECK(cudaStreamSynchronize(0));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMallocAsync(&memory, BYTES, stream));
    CHECK(cudaMallocAsync(&kept, BYTES, stream));
    set<<<N / 256, 256, 0, stream>>>(memory, 2);
    CHECK(cudaMemcpyAsync(kept, memory, BYTES, cudaMemcpyDeviceToDevice, stream));
    add<<<N / 256, 256, 0, stream>>>(memory, result);
    CHECK(cudaFreeAsync(memory, stream));
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    size_t count = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
    for (cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type;
        CHECK(cudaGraphNodeGetType(node, &type));
        printf("node of type %d\n", (int)type);
    }
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("a captured graph allocates", holds(result, 1, 2) && holds(kept, 1, 2));
    cudaStream_t other;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(other, cudaStreamCaptureModeRelaxed));
    code("its launch in a capture", cudaGraphLaunch(exec, other));
    cudaGraph_t nothing;
    code("the end of that capture", cudaStreamEndCapture(other, &nothing));
    CHECK(cudaStreamDestroy(other));
    CHECK(cudaFreeAsync(kept, stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(result));
}

// More than the device has: refused, and nothing sticks.
static void too_much(cudaStream_t stream) {
    cudaGraph_t graph;
    cudaGraphNode_t made;
    cudaMemAllocNodeParams asked = allocation((size_t)1 << 50);
    CHECK(cudaGraphCreate(&graph, 0));
    code("an allocation of more than there is", cudaGraphAddMemAllocNode(&made, graph, nullptr, 0, &asked));
    size_t count = 9;
    CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    expect("it has no node", count == 0);
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaDeviceGraphMemTrim(0));
    CHECK(cudaDeviceSynchronize());
    expect("no memory of graphs is left", used(cudaGraphMemAttrUsedMemCurrent) == 0 && used(cudaGraphMemAttrReservedMemCurrent) == 0);
    expect("the greatest amounts are known", used(cudaGraphMemAttrUsedMemHigh) >= 2 * BYTES);
    unsigned long long zero = 0, one = 1;
    CHECK(cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &zero));
    expect("and forgotten", used(cudaGraphMemAttrUsedMemHigh) == 0);
    code("another value for it", cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &one));
    CHECK(cudaStreamSynchronize(stream));
}

// The device's context ends before the graph and its live memory.
static void reset() {
    cudaGraph_t graph, other;
    cudaGraphNode_t made;
    cudaMemAllocNodeParams asked = allocation(BYTES);
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemAllocNode(&made, graph, nullptr, 0, &asked));
    CHECK(cudaGraphCreate(&other, 0));
    CHECK(cudaDeviceReset());
    std::vector<int *> memory(64);
    for (int *&each : memory) {
        CHECK(cudaMalloc(&each, BYTES));
        set<<<N / 256, 256>>>(each, 3);
    }
    expect("memory of graphs ends with its context", used(cudaGraphMemAttrUsedMemCurrent) == 0);
    cudaGraphDestroy(graph);
    cudaGetLastError();
    int *more;
    CHECK(cudaMalloc(&more, BYTES));
    CHECK(cudaMemset(more, 0, BYTES));
    bool good = true;
    for (int *each : memory) good &= holds(each, 1, 3);
    expect("and takes no memory of others with it", good);
    for (int *each : memory) CHECK(cudaFree(each));
    CHECK(cudaFree(more));
}

int main() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    inside(stream);
    outside(stream);
    captured(stream);
    too_much(stream);
    CHECK(cudaStreamDestroy(stream));
    reset();
    CHECK(cudaDeviceReset());
    return verdict(wrong == 0);
}
