// Graphs with conditional nodes: bodies that run once, again and again, or not at all, as kernels decide.
#include "graphs.h"

// A kernel of the program, before the node or in its body, sets the value.
__global__ void choose(cudaGraphConditionalHandle handle, const unsigned *value) {
    cudaGraphSetConditional(handle, *value);
}

// Counts down, and goes on until 0.
__global__ void count(cudaGraphConditionalHandle handle, unsigned *left, unsigned *rounds) {
    atomicAdd(rounds, 1);
    unsigned now = *left - 1;
    *left = now;
    cudaGraphSetConditional(handle, now != 0);
}

__global__ void add(unsigned *to, unsigned value) { *to += value; }

static unsigned *words; // Of the device: values of handles, and results.

static void set(int word, unsigned value) {
    CHECK(cudaMemcpy(words + word, &value, sizeof(value), cudaMemcpyHostToDevice));
}

static unsigned get(int word) {
    unsigned value;
    CHECK(cudaMemcpy(&value, words + word, sizeof(value), cudaMemcpyDeviceToHost));
    return value;
}

static cudaGraphConditionalHandle handle_of(cudaGraph_t graph, unsigned value, unsigned flags) {
    cudaGraphConditionalHandle handle;
    CHECK(cudaGraphConditionalHandleCreate(&handle, graph, value, flags));
    return handle;
}

static cudaGraphNodeParams conditional(cudaGraphConditionalHandle handle, cudaGraphConditionalNodeType type, unsigned size) {
    cudaGraphNodeParams node = {};
    node.type = cudaGraphNodeTypeConditional;
    node.conditional.handle = handle;
    node.conditional.type = type;
    node.conditional.size = size;
    return node;
}

static cudaError_t add_node(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *before, size_t count,
                            cudaGraphNodeParams *parameters) {
#if CUDART_VERSION >= 13000
    return cudaGraphAddNode(node, graph, before, nullptr, count, parameters);
#else
    return cudaGraphAddNode(node, graph, before, count, parameters);
#endif
}

static cudaGraphNode_t kernel(cudaGraph_t graph, const cudaGraphNode_t *before, void *function, void **arguments) {
    cudaKernelNodeParams parameters = {};
    parameters.func = function;
    parameters.gridDim = parameters.blockDim = dim3(1);
    parameters.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, before, before != nullptr, &parameters));
    return node;
}

// Adds a kernel that adds a value to a word.
static cudaGraphNode_t adds(cudaGraph_t graph, int word, unsigned value) {
    unsigned *to = words + word;
    void *arguments[] = {&to, &value};
    return kernel(graph, nullptr, (void *)add, arguments);
}

static cudaGraphNode_t chooses(cudaGraph_t graph, cudaGraphConditionalHandle handle, int word) {
    const unsigned *from = words + word;
    void *arguments[] = {&handle, &from};
    return kernel(graph, nullptr, (void *)choose, arguments);
}

static void clear() {
    CHECK(cudaMemset(words, 0, 16 * sizeof(unsigned)));
}

// An IF with two bodies: the second one is an ELSE.
static void if_else(cudaStream_t stream) {
    clear();
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle = handle_of(graph, 0, 0);
    cudaGraphNode_t chosen = chooses(graph, handle, 0), node;
    cudaGraphNodeParams parameters = conditional(handle, cudaGraphCondTypeIf, 2);
    CHECK(add_node(&node, graph, &chosen, 1, &parameters));
    adds(parameters.conditional.phGraph_out[0], 1, 1);
    cudaGraphNode_t other = adds(parameters.conditional.phGraph_out[1], 2, 1);
    cudaGraphNodeType type;
    CHECK(cudaGraphNodeGetType(node, &type));
    expect("its type", type == cudaGraphNodeTypeConditional);
    cudaGraphExec_t exec = executable(graph);
    for (unsigned value : {1u, 0u, 7u}) {
        set(0, value);
        launch(exec, stream);
    }
    expect("an IF with an ELSE", get(1) == 2 && get(2) == 1);
    // A kernel of a body gets new parameters.
    unsigned *to = words + 3, ten = 10;
    void *arguments[] = {&to, &ten};
    cudaKernelNodeParams changed = {};
    changed.func = (void *)add;
    changed.gridDim = changed.blockDim = dim3(1);
    changed.kernelParams = arguments;
    CHECK(cudaGraphExecKernelNodeSetParams(exec, other, &changed));
    set(0, 0);
    launch(exec, stream);
    expect("a changed node of a body", get(2) == 1 && get(3) == 10);
    CHECK(cudaGraphExecDestroy(exec));
    exec = executable(graph);
    launch(exec, stream);
    expect("a second executable, after the first", get(2) == 2 && get(3) == 10);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

// A WHILE whose body ends it, with a default that begins it, launched again.
static void loops(cudaStream_t stream) {
    clear();
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle = handle_of(graph, 1, cudaGraphCondAssignDefault);
    cudaGraphNodeParams parameters = conditional(handle, cudaGraphCondTypeWhile, 1);
    cudaGraphNode_t node;
    CHECK(add_node(&node, graph, nullptr, 0, &parameters));
    unsigned *left = words, *rounds = words + 1;
    void *arguments[] = {&handle, &left, &rounds};
    kernel(parameters.conditional.phGraph_out[0], nullptr, (void *)count, arguments);
    cudaGraphExec_t exec = executable(graph);
    CHECK(cudaGraphDestroy(graph));
    for (unsigned times : {100u, 1u, 20u}) {
        set(0, times);
        launch(exec, stream);
        printf("%u rounds in all\n", get(1));
    }
    expect("a WHILE runs as often as its body decides", get(1) == 121);
    CHECK(cudaGraphExecDestroy(exec));
}

// A SWITCH of four bodies, of which one is nested in a capture.
static void switches(cudaStream_t stream) {
    clear();
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle = handle_of(graph, 0, 0);
    cudaGraphNode_t chosen = chooses(graph, handle, 0), node;
    cudaGraphNodeParams parameters = conditional(handle, cudaGraphCondTypeSwitch, 4);
    CHECK(add_node(&node, graph, &chosen, 1, &parameters));
    for (int body = 0; body < 3; body++) adds(parameters.conditional.phGraph_out[body], 1 + body, 1);
    // The last body has a loop, a copy and a fill, and is captured.
    cudaGraph_t last = parameters.conditional.phGraph_out[3];
    CHECK(cudaStreamBeginCaptureToGraph(stream, last, nullptr, nullptr, 0, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemsetAsync(words + 8, 0, sizeof(unsigned), stream));
    CHECK(cudaMemcpyAsync(words + 9, words + 10, sizeof(unsigned), cudaMemcpyDefault, stream));
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t *before;
    size_t length;
#if CUDART_VERSION >= 13000
    CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &before, nullptr, &length));
#else
    CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &before, &length));
#endif
    cudaGraphConditionalHandle inner = handle_of(last, 1, cudaGraphCondAssignDefault);
    cudaGraphNodeParams within = conditional(inner, cudaGraphCondTypeWhile, 1);
    cudaGraphNode_t loop;
    CHECK(add_node(&loop, last, before, length, &within));
    unsigned *left = words + 9, *rounds = words + 8;
    void *arguments[] = {&inner, &left, &rounds};
    kernel(within.conditional.phGraph_out[0], nullptr, (void *)count, arguments);
#if CUDART_VERSION >= 13000
    CHECK(cudaStreamUpdateCaptureDependencies(stream, &loop, nullptr, 1, cudaStreamSetCaptureDependencies));
#else
    CHECK(cudaStreamUpdateCaptureDependencies(stream, &loop, 1, cudaStreamSetCaptureDependencies));
#endif
    add<<<1, 1, 0, stream>>>(words + 4, 1);
    cudaGraph_t ended;
    CHECK(cudaStreamEndCapture(stream, &ended));
    expect("a capture into a body returns the body", ended == last);
    cudaGraphExec_t exec = executable(graph);
    set(10, 5);
    for (unsigned value : {2u, 0u, 3u, 2u, 4u, 3u, 99u}) {
        set(0, value);
        launch(exec, stream);
    }
    expect("a SWITCH", get(1) == 1 && get(2) == 0 && get(3) == 2);
    expect("a body with a loop, a copy and a fill", get(4) == 2 && get(8) == 5 && get(9) == 0);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

static cudaGraph_t described(unsigned value, unsigned amount) {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle = handle_of(graph, value, cudaGraphCondAssignDefault);
    cudaGraphNodeParams parameters = conditional(handle, cudaGraphCondTypeIf, 1);
    cudaGraphNode_t node;
    CHECK(add_node(&node, graph, nullptr, 0, &parameters));
    adds(parameters.conditional.phGraph_out[0], 1, amount);
    return graph;
}

// An executable takes the bodies of another graph, with its handle and its default.
static void updates(cudaStream_t stream) {
    clear();
    cudaGraph_t first = described(1, 1), second = described(1, 100), third = described(0, 10000);
    cudaGraphExec_t exec = executable(first);
    launch(exec, stream);
    cudaGraphExecUpdateResultInfo info;
    CHECK(cudaGraphExecUpdate(exec, second, &info));
    launch(exec, stream);
    expect("an executable takes other bodies", get(1) == 101);
    CHECK(cudaGraphExecUpdate(exec, third, &info));
    launch(exec, stream);
    expect("and another default", get(1) == 101);
    CHECK(cudaGraphExecDestroy(exec));
    for (cudaGraph_t graph : {first, second, third}) CHECK(cudaGraphDestroy(graph));
}

static void code(const char *what, cudaError_t result) {
    printf("%-64s %d\n", what, (int)result);
    cudaGetLastError();
}

// Calls that the header does not allow.
static void refused(cudaStream_t stream) {
    cudaGraph_t graph, other, copy;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphCreate(&other, 0));
    cudaGraphConditionalHandle handle;
    code("an unknown flag", cudaGraphConditionalHandleCreate(&handle, graph, 0, 4));
    handle = handle_of(graph, 1, cudaGraphCondAssignDefault);
    cudaGraphExec_t exec;
    code("a handle without a node", cudaGraphInstantiate(&exec, graph, 0));
    cudaGraphNode_t node;
    cudaGraphNodeParams parameters = conditional(handle, cudaGraphCondTypeWhile, 2);
    code("a WHILE with two bodies", add_node(&node, graph, nullptr, 0, &parameters));
    parameters = conditional(handle, cudaGraphCondTypeIf, 1);
    code("a handle of another graph", add_node(&node, other, nullptr, 0, &parameters));
    CHECK(add_node(&node, graph, nullptr, 0, &parameters));
    cudaGraph_t body = parameters.conditional.phGraph_out[0];
    adds(body, 1, 1);
    parameters = conditional(handle, cudaGraphCondTypeIf, 1);
    code("a handle with a node", add_node(&node, graph, nullptr, 0, &parameters));
    code("a clone", cudaGraphClone(&copy, graph));
    code("a child graph", cudaGraphAddChildGraphNode(&node, other, nullptr, 0, graph));
    code("the end of a body", cudaGraphDestroy(body));
    exec = executable(graph);
    cudaGraphExec_t twin;
    code("a second executable", cudaGraphInstantiate(&twin, graph, 0));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    code("a launch in a capture", cudaGraphLaunch(exec, stream));
    cudaGraph_t captured;
    code("the end of that capture", cudaStreamEndCapture(stream, &captured));
    CHECK(cudaGraphExecDestroy(exec));
    // Work that no body may have.
    static unsigned pageable = 7;
    cudaEvent_t event;
    CHECK(cudaEventCreate(&event));
    CHECK(cudaGraphAddEventRecordNode(&node, body, nullptr, 0, event));
    code("a body that records an event", cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroyNode(node));
    CHECK(cudaGraphAddMemcpyNode1D(&node, body, nullptr, 0, words, &pageable, sizeof(pageable), cudaMemcpyDefault));
    code("a body that copies pageable memory", cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroyNode(node));
    clear();
    exec = executable(graph);
    launch(exec, stream);
    expect("a graph without them", get(1) == 1);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphDestroy(other));
}

int main() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&words, 16 * sizeof(unsigned)));
    if_else(stream);
    loops(stream);
    switches(stream);
    updates(stream);
    refused(stream);
    CHECK(cudaFree(words));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaDeviceReset());
    return verdict(wrong == 0);
}
