// Managed variables: one address for host and kernels, which take turns. A device with native atomic operations on host memory is not
// asked: a guest has none there.
#include "driver.h"
#include <atomic>
#include <cstring>
#include <thread>

__managed__ int counter = 40;
__managed__ double table[3000] = {0.5, 1.5};
__managed__ int *link;
__device__ int other = 7;

static bool good = true;

static void expect(const char *what, bool holds) {
    printf("%-52s %s\n", what, holds ? "ok" : "WRONG");
    good = good && holds;
}

__global__ void work(int times) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0) counter += times;
    if (i < 3000) table[i] = table[i] * 2 + other;
}

__global__ void follow() { *link += 1000; }

static std::atomic<bool> released{false};

static void hold(void *) {
    while (!released) std::this_thread::yield();
}

static int attribute(CUdevice_attribute which) {
    int value = -1;
    MUST(cuDeviceGetAttribute, &value, which, 0);
    return value;
}

int main() {
    // Not by the runtime, whose first call looks for the variables.
    MUST(cuInit, 0);
    if (!attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) || attribute(CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED)) {
        printf("managed variables are not asked for\nPASS\n");
        return 0;
    }
    expect("the initial values", counter == 40 && table[0] == 0.5 && table[1] == 1.5 && table[2] == 0 && !link);
    for (int i = 0; i < 3000; i++) table[i] = i;
    counter = 1;
    work<<<12, 256>>>(5);
    CHECK(cudaDeviceSynchronize());
    bool same = true;
    for (int i = 0; i < 3000; i++) same = same && table[i] == 2.0 * i + 7;
    expect("kernels see the program's, the program theirs", same && counter == 6);

    // Without a wait between them, the second kernel continues with the values of the first.
    cudaStream_t stream;
    cudaEvent_t event;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&event));
    counter = 100;
    work<<<12, 256, 0, stream>>>(1);
    work<<<12, 256, 0, stream>>>(1);
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaEventSynchronize(event));
    expect("after an event", counter == 102);
    counter++;
    work<<<12, 256, 0, stream>>>(1);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {}
    expect("after a query", counter == 104);
    counter++;
    work<<<12, 256, 0, stream>>>(1);
    int copied = 0;
    CHECK(cudaMemcpyAsync(&copied, &counter, sizeof copied, cudaMemcpyDefault, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("a copy in the order of the stream", copied == 106 && counter == 106);

    // Copies and fills by the address of the variable.
    int *pointer;
    size_t bytes;
    CHECK(cudaGetSymbolAddress((void **)&pointer, counter));
    CHECK(cudaGetSymbolSize(&bytes, table));
    expect("the address and the size", pointer == &counter && bytes == sizeof table);
    copied = 5;
    CHECK(cudaMemcpyToSymbol(counter, &copied, sizeof copied));
    expect("a copy to the symbol", counter == 5);
    counter = 9;
    CHECK(cudaMemcpyFromSymbol(&copied, counter, sizeof copied));
    expect("a copy from the symbol", copied == 9);
    int *device;
    CHECK(cudaMalloc(&device, sizeof(int)));
    CHECK(cudaMemcpy(device, &counter, sizeof(int), cudaMemcpyHostToDevice));
    counter = 0;
    CHECK(cudaMemcpy(&counter, device, sizeof(int), cudaMemcpyDeviceToHost));
    expect("copies with the variable as the host's side", counter == 9);
    CHECK(cudaMemset(table, 0, sizeof table));
    expect("a fill", table[1] == 0 && table[2999] == 0);

    // A pointer in a variable, to another variable.
    link = &counter;
    follow<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    expect("a kernel follows a pointer", counter == 1009);

    // A graph.
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    work<<<12, 256, 0, stream>>>(10);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 3; round++) {
        counter++;
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
    }
    expect("launches of a graph", counter == 1009 + 3 * 11);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));

    // A stream that waits for the program holds up no work of others.
    cudaStream_t apart;
    CHECK(cudaStreamCreateWithFlags(&apart, cudaStreamNonBlocking));
    counter = 7;
    CHECK(cudaLaunchHostFunc(stream, hold, nullptr));
    work<<<12, 256, 0, apart>>>(1);
    CHECK(cudaStreamSynchronize(apart));
    released = true;
    CHECK(cudaStreamSynchronize(stream));
    expect("a launch beside a stream that is held", counter == 8);
    CHECK(cudaStreamDestroy(apart));

    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, &table[10]));
    expect("the pointer is one of managed memory",
           attributes.type == cudaMemoryTypeManaged && attributes.devicePointer == &table[10] &&
               attributes.hostPointer == &table[10]);
    CUdeviceptr start;
    MUST(cuMemGetAddressRange, &start, &bytes, (CUdeviceptr)&table[10]);
    expect("it lies in the variable", start == (CUdeviceptr)table && bytes == sizeof table);
    expect("which is not freed", cudaFree(table) == cudaErrorInvalidValue);
    (void)cudaGetLastError();
    int mostly = 0;
    cudaMemLocation host = {cudaMemLocationTypeHost, 0};
    CHECK(cudaMemAdvise(table, sizeof table, cudaMemAdviseSetReadMostly, host));
    CHECK(cudaMemRangeGetAttribute(&mostly, sizeof mostly, cudaMemRangeAttributeReadMostly, table, sizeof table));
    expect("advice is remembered", mostly == 1);
    CHECK(cudaStreamAttachMemAsync(stream, table, 0, cudaMemAttachGlobal));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(device));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamDestroy(stream));
    printf(good ? "PASS\n" : "FAIL\n");
    return good ? 0 : 1;
}
