// Graphs with copies from and to memory of the program that no device reaches.
#include "graphs.h"
#include <cstring>
#include <vector>

constexpr int N = 4096;

__global__ void add(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += value;
}

static bool all(const std::vector<int> &values, int value) {
    for (int element : values)
        if (element != value) return false;
    return true;
}

// Copies from and to memory of the program, which a launch reads and writes when it comes to them.
static void pageable(cudaStream_t stream) {
    int *device;
    constexpr size_t bytes = N * sizeof(int);
    CHECK(cudaMalloc(&device, 2 * bytes));
    std::vector<int> from(N, 3), to(N, 0), other(N, 40);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemcpyAsync(device, from.data(), bytes, cudaMemcpyHostToDevice, stream));
    add<<<N / 128, 128, 0, stream>>>(device, N, 1);
    CHECK(cudaMemcpyAsync(to.data(), device, bytes, cudaMemcpyDeviceToHost, stream));
    cudaGraphExec_t exec = captured(stream);
    expect("a capture copies nothing", all(to, 0));
    launch(exec, stream);
    expect("a graph copies memory of the program", all(to, 4));
    from.assign(N, 10);
    launch(exec, stream);
    expect("it reads that memory at each launch", all(to, 11));
    CHECK(cudaGraphExecDestroy(exec));

    // By calls, and changed.
    cudaGraph_t graph;
    cudaGraphNode_t up, down, within;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemcpyNode1D(&up, graph, nullptr, 0, device, from.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaGraphAddMemcpyNode1D(&down, graph, &up, 1, to.data(), device, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaGraphAddMemcpyNode1D(&within, graph, &down, 1, other.data(), to.data(), bytes / 2, cudaMemcpyHostToHost));
    exec = executable(graph);
    launch(exec, stream);
    expect("copies by calls", all(to, 10) && other[0] == 10 && other[N / 2 - 1] == 10 && other[N / 2] == 40);
    CHECK(cudaGraphExecMemcpyNodeSetParams1D(exec, up, device, other.data() + N / 2, bytes / 2, cudaMemcpyHostToDevice));
    CHECK(cudaGraphExecMemcpyNodeSetParams1D(exec, within, other.data() + N / 4, to.data(), 8, cudaMemcpyHostToHost));
    launch(exec, stream);
    expect("other memory and other sizes", to[0] == 40 && to[N / 2] == 10 && other[N / 4 + 1] == 40 && other[N / 4 + 2] == 10);
    // A copy that is turned off touches nothing.
    other.assign(N, 77);
    CHECK(cudaGraphNodeSetEnabled(exec, up, 0));
    CHECK(cudaGraphNodeSetEnabled(exec, within, 0));
    launch(exec, stream);
    expect("copies that are turned off", to[0] == 40 && all(other, 77));
    CHECK(cudaGraphNodeSetEnabled(exec, down, 0));
    CHECK(cudaGraphNodeSetEnabled(exec, up, 1));
    to.assign(N, 5);
    launch(exec, stream);
    expect("and turned on again", all(to, 5));
    CHECK(cudaGraphNodeSetEnabled(exec, down, 1));
    launch(exec, stream);
    expect("with the work that they had", to[0] == 77 && to[N / 2] == 10 && all(other, 77));
    cudaGraphExecUpdateResultInfo result;
    CHECK(cudaGraphExecUpdate(exec, graph, &result));
    launch(exec, stream);
    expect("the copies of another graph", all(to, 10) && all(other, 77));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // Rows and slices with gaps.
    constexpr int ROWS = 9, SLICES = 3, WIDTH = 20, PITCH = 32;
    std::vector<char> box(SLICES * ROWS * PITCH), back(SLICES * ROWS * PITCH, '-');
    for (size_t i = 0; i < box.size(); i++) box[i] = (char)('a' + i % 23);
    CHECK(cudaMemset(device, '.', SLICES * ROWS * PITCH));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemcpy2DAsync(device, PITCH, box.data(), PITCH, WIDTH, ROWS, cudaMemcpyHostToDevice, stream));
    cudaMemcpy3DParms slices = {};
    slices.srcPtr = make_cudaPitchedPtr(box.data(), PITCH, PITCH, ROWS);
    slices.dstPtr = make_cudaPitchedPtr(device, PITCH, PITCH, ROWS);
    slices.srcPos = make_cudaPos(4, 1, 1);
    slices.dstPos = make_cudaPos(2, 2, 1);
    slices.extent = make_cudaExtent(11, 5, 2);
    slices.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3DAsync(&slices, stream));
    CHECK(cudaMemcpy2DAsync(back.data(), PITCH, device, PITCH, PITCH - 3, SLICES * ROWS, cudaMemcpyDeviceToHost, stream));
    exec = captured(stream);
    launch(exec, stream);
    unsigned sum = 0;
    for (char byte : back) sum = sum * 31 + (unsigned char)byte;
    printf("rows and slices: %08x\n", sum);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaFree(device));
}

// Copies between memory of the program and an array, by capture and by calls.
static void arrays(cudaStream_t stream) {
    constexpr int WIDE = 24, HIGH = 6, PITCH = 40;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned char>();
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &format, WIDE, HIGH));
    std::vector<unsigned char> from(PITCH * HIGH), to(PITCH * HIGH, 0);
    auto sum = [&] {
        unsigned sum = 0;
        for (unsigned char byte : to) sum = sum * 31 + byte;
        return sum;
    };
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemcpy2DToArrayAsync(array, 0, 0, from.data(), PITCH, WIDE, HIGH, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemcpy2DFromArrayAsync(to.data(), PITCH, array, 2, 1, WIDE - 4, HIGH - 2, cudaMemcpyDeviceToHost, stream));
    cudaGraphExec_t exec = captured(stream);
    for (int round = 1; round < 3; round++) {
        for (size_t i = 0; i < from.size(); i++) from[i] = (unsigned char)(i * round);
        launch(exec, stream);
        printf("an array, round %d: %08x\n", round, sum());
    }
    CHECK(cudaGraphExecDestroy(exec));
    cudaGraph_t graph;
    cudaGraphNode_t node;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemcpy3DParms box = {};
    box.srcArray = array;
    box.srcPos = make_cudaPos(1, 2, 0);
    box.dstPtr = make_cudaPitchedPtr(to.data(), PITCH, PITCH, HIGH);
    box.extent = make_cudaExtent(7, 1, 1);
    box.kind = cudaMemcpyDeviceToHost;
    CHECK(cudaGraphAddMemcpyNode(&node, graph, nullptr, 0, &box));
    exec = executable(graph);
    CHECK(cudaGraphNodeSetEnabled(exec, node, 0));
    to.assign(to.size(), 9);
    launch(exec, stream);
    printf("a copy that is turned off: %08x\n", sum());
    CHECK(cudaGraphNodeSetEnabled(exec, node, 1));
    launch(exec, stream);
    printf("and on: %08x\n", sum());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFreeArray(array));
}

// Copies of several rows, which are turned off and on again: to the device and back, of pageable, pinned and device memory.
static void rows(cudaStream_t stream) {
    constexpr size_t WIDE = 64, HIGH = 4, HERE = 128, THERE = 256;
    unsigned char *device, *pinned, *other;
    CHECK(cudaMalloc(&device, THERE * HIGH));
    CHECK(cudaMalloc(&other, HERE * HIGH));
    CHECK(cudaMallocHost(&pinned, HERE * HIGH));
    std::vector<unsigned char> pageable(HERE * HIGH);
    struct {
        const char *name;
        unsigned char *memory;
        bool is_device;
    } ends[] = {{"pageable", pageable.data(), false}, {"pinned", pinned, false}, {"device", other, true}};
    for (auto &end : ends)
        for (bool up : {true, false}) {
            cudaMemcpy3DParms box = {};
            cudaPitchedPtr here = make_cudaPitchedPtr(end.memory, HERE, WIDE, HIGH), there = make_cudaPitchedPtr(device, THERE, WIDE, HIGH);
            box.srcPtr = up ? here : there;
            box.dstPtr = up ? there : here;
            box.extent = make_cudaExtent(WIDE, HIGH, 1);
            box.kind = end.is_device ? cudaMemcpyDeviceToDevice : up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
            cudaGraph_t graph;
            cudaGraphNode_t node;
            CHECK(cudaGraphCreate(&graph, 0));
            CHECK(cudaGraphAddMemcpyNode(&node, graph, nullptr, 0, &box));
            cudaGraphExec_t exec = executable(graph);
            // The last byte of the last row, of each side.
            auto seen = [&](bool of_device) {
                unsigned char value = 0;
                size_t at = (HIGH - 1) * (of_device ? THERE : HERE) + WIDE - 1;
                CHECK(cudaMemcpy(&value, (of_device ? device : end.memory) + at, 1, cudaMemcpyDefault));
                return (int)value;
            };
            auto begin = [&] {
                CHECK(cudaMemset(device, 1, THERE * HIGH));
                if (end.is_device) CHECK(cudaMemset(end.memory, 7, HERE * HIGH));
                else memset(end.memory, 7, HERE * HIGH);
                CHECK(cudaDeviceSynchronize());
            };
            int values[4];
            for (int i = 0; i < 4; i++) {
                begin();
                if (i) CHECK(cudaGraphNodeSetEnabled(exec, node, i == 1 ? 0 : 1));
                launch(exec, stream);
                values[i] = seen(up);
            }
            int before = up ? 1 : 7, after = up ? 7 : 1;
            printf("%s memory %s the device: ", end.name, up ? "to" : "from");
            expect("rows are copied only while their node is on",
                   values[0] == after && values[1] == before && values[2] == after && values[3] == after);
            CHECK(cudaGraphExecDestroy(exec));
            CHECK(cudaGraphDestroy(graph));
        }
    CHECK(cudaFree(device));
    CHECK(cudaFree(other));
    CHECK(cudaFreeHost(pinned));
}

int main() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    pageable(stream);
    arrays(stream);
    rows(stream);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaDeviceReset());
    return verdict(wrong == 0);
}
