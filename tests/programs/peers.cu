// Two devices: peer access, copies between them, graphs over both. On a machine with one device there is nothing to do.
//   fault BEFORE   the program's second form: a kernel accesses memory of the other device before it may (1), or no longer may (0)
//   open INPUT     its third form: opens memory of the second device with the first, by the handles that it reads from a descriptor
#include "driver.h"
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

static bool passed = true;

static void expect(const char *what, bool good) {
    std::printf("%-64s %s\n", what, good ? "right" : "WRONG");
    passed &= good;
}

static void code(const char *what, CUresult result) { std::printf("%-64s %d\n", what, (int)result); }

__device__ int variable[64];

__global__ void add(int *to, const int *from, int count, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i] + value;
}

static const int COUNT = 1000, BYTES = COUNT * 4;

static int *filled(int device, int value, size_t bytes = BYTES) {
    int *memory;
    CHECK(cudaSetDevice(device));
    CHECK(cudaMalloc(&memory, bytes));
    std::vector<int> values(COUNT, value);
    CHECK(cudaMemcpy(memory, values.data(), BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
    return memory;
}

// True if all values of device memory are this one.
static bool holds(const void *memory, int value) {
    std::vector<int> values(COUNT);
    MUST(cuMemcpyDtoH, values.data(), (CUdeviceptr)memory, BYTES);
    for (int found : values)
        if (found != value) return false;
    return true;
}

// A kernel of the first device that changes memory.
static cudaError_t change(void *memory, int value, int count = COUNT) {
    CHECK(cudaSetDevice(0));
    add<<<8, 128>>>((int *)memory, (const int *)memory, count, value);
    CHECK(cudaGetLastError());
    return cudaDeviceSynchronize();
}

static CUcontext contexts[2];

static void begin() {
    for (int device = 0; device < 2; device++) {
        MUST(cuDevicePrimaryCtxRetain, &contexts[device], device);
        CHECK(cudaSetDevice(device));
        CHECK(cudaFree(nullptr));
    }
    CHECK(cudaSetDevice(0));
}

static int fault(bool before) {
    begin();
    int *there = filled(1, 5);
    CHECK(cudaSetDevice(0));
    if (!before) {
        MUST(cuCtxEnablePeerAccess, contexts[1], 0);
        if (change(there, 1) != cudaSuccess) return 2;
        MUST(cuCtxDisablePeerAccess, contexts[1]);
    }
    return change(there, 1) == cudaErrorIllegalAddress ? 0 : 3;
}

static int child(const char *program, const char *argument) {
    std::fflush(stdout);
    pid_t started = fork();
    if (started == 0) {
        execl("/proc/self/exe", program, "fault", argument, (char *)nullptr);
        _exit(127);
    }
    int status = -1;
    waitpid(started, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static CUmemLocation at(int device) { return {CU_MEM_LOCATION_TYPE_DEVICE, device}; }

// Attributes of the two links, and the calls that they describe.
static bool describe() {
    int can[2] = {-1, -1};
    MUST(cuDeviceCanAccessPeer, &can[0], 0, 1);
    MUST(cuDeviceCanAccessPeer, &can[1], 1, 0);
    int self = -1;
    MUST(cuDeviceCanAccessPeer, &self, 0, 0);
    std::printf("access: %d %d, to itself: %d\n", can[0], can[1], self);
    for (int attribute = 1; attribute <= 6; attribute++) {
        int value = -1;
        CUresult result = CALL(cuDeviceGetP2PAttribute, &value, (CUdevice_P2PAttribute)attribute, 0, 1);
        std::printf("attribute %d: %d, value %d\n", attribute, (int)result, attribute == 1 ? 0 : value);
        if (attribute == 2) expect("the attribute and the question agree", value == can[0]);
    }
    unsigned capability = ~0u;
    CUatomicOperation operation = CU_ATOMIC_OPERATION_INTEGER_ADD;
    MUST(cuDeviceGetP2PAtomicCapabilities, &capability, &operation, 1, 0, 1);
    std::printf("atomic operations over the link: %x\n", capability);
    return can[0];
}

// The same with access and without: the driver copies through the host if it has to.
static void copies() {
    int *here = filled(0, 1), *there = filled(1, 2);
    CHECK(cudaSetDevice(0));
    CUstream streams[2];
    for (int device = 0; device < 2; device++) {
        CHECK(cudaSetDevice(device));
        MUST(cuStreamCreate, &streams[device], CU_STREAM_NON_BLOCKING);
    }
    CHECK(cudaSetDevice(0));
    MUST(cuMemcpyPeer, (CUdeviceptr)here, contexts[0], (CUdeviceptr)there, contexts[1], BYTES);
    MUST(cuCtxSynchronize);
    expect("cuMemcpyPeer", holds(here, 2));
    here = filled(0, 3);
    MUST(cuMemcpyPeerAsync, (CUdeviceptr)there, contexts[1], (CUdeviceptr)here, contexts[0], BYTES, streams[0]);
    MUST(cuStreamSynchronize, streams[0]);
    expect("cuMemcpyPeerAsync in a stream of the source's device", holds(there, 3));
    there = filled(1, 4);
    MUST(cuMemcpyPeerAsync, (CUdeviceptr)here, contexts[0], (CUdeviceptr)there, contexts[1], BYTES, streams[1]);
    MUST(cuStreamSynchronize, streams[1]);
    expect("and in one of another device", holds(here, 4));
    CHECK(cudaSetDevice(0));
    MUST(cuMemcpyDtoD, (CUdeviceptr)there, (CUdeviceptr)filled(0, 5), BYTES);
    CHECK(cudaDeviceSynchronize());
    expect("cuMemcpyDtoD by addresses", holds(there, 5));
    MUST(cuMemcpyAsync, (CUdeviceptr)here, (CUdeviceptr)there, BYTES, streams[0]);
    MUST(cuStreamSynchronize, streams[0]);
    expect("cuMemcpyAsync by addresses", holds(here, 5));
    CHECK(cudaMemcpy2D(there, 40, filled(0, 6), 40, 40, BYTES / 40, cudaMemcpyDefault));
    CHECK(cudaDeviceSynchronize());
    expect("rows", holds(there, 6));
    CUDA_MEMCPY3D_PEER box = {};
    box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    box.srcDevice = (CUdeviceptr)filled(1, 7);
    box.dstDevice = (CUdeviceptr)here;
    box.srcContext = contexts[1];
    box.dstContext = contexts[0];
    box.srcPitch = box.dstPitch = box.WidthInBytes = 40;
    box.srcHeight = box.dstHeight = box.Height = 10;
    box.Depth = BYTES / 400;
    CHECK(cudaSetDevice(0));
    MUST(cuMemcpy3DPeer, &box);
    CHECK(cudaDeviceSynchronize());
    expect("cuMemcpy3DPeer", holds(here, 7));
    box.srcDevice = (CUdeviceptr)filled(1, 8);
    MUST(cuMemcpy3DPeerAsync, &box, streams[0]);
    MUST(cuStreamSynchronize, streams[0]);
    expect("cuMemcpy3DPeerAsync", holds(here, 8));
    CHECK(cudaSetDevice(0));
    code("a copy beyond the memory of the other device",
         CALL(cuMemcpyDtoD, (CUdeviceptr)here, (CUdeviceptr)there, (size_t)64 << 20));
    code("a copy with a context that does not exist",
         CALL(cuMemcpyPeer, (CUdeviceptr)here, contexts[0], (CUdeviceptr)there, nullptr, BYTES));
    CHECK(cudaDeviceSynchronize());

    // One device waits for the other.
    CUevent event;
    MUST(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    MUST(cuMemsetD32Async, (CUdeviceptr)here, 9, COUNT, streams[0]);
    MUST(cuEventRecord, event, streams[0]);
    MUST(cuStreamWaitEvent, streams[1], event, 0);
    MUST(cuMemcpyAsync, (CUdeviceptr)there, (CUdeviceptr)here, BYTES, streams[1]);
    MUST(cuStreamSynchronize, streams[1]);
    expect("a stream waits for an event of another device", holds(there, 9));
}

static void graphs() {
    int *here = filled(0, 1), *there = filled(1, 0), *back = filled(0, 0);
    cudaStream_t first, second;
    cudaEvent_t forked, joined;
    CHECK(cudaSetDevice(1));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal));
    add<<<8, 128, 0, first>>>(here, here, COUNT, 1);
    CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, BYTES, first));
    CHECK(cudaEventRecord(forked, first));
    CHECK(cudaStreamWaitEvent(second, forked, 0));
    CHECK(cudaSetDevice(1));
    add<<<8, 128, 0, second>>>(there, there, COUNT, 10);
    CHECK(cudaEventRecord(joined, second));
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamWaitEvent(first, joined, 0));
    CHECK(cudaMemcpyAsync(back, there, BYTES, cudaMemcpyDefault, first));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamEndCapture(first, &graph));
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    std::printf("nodes of a capture over two devices: %zu\n", nodes);
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int launch = 0; launch < 3; launch++) CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    expect("a captured graph over two devices, three times", holds(here, 4) && holds(there, 14) && holds(back, 14));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // A node between devices by a call, changed in the executable.
    int *source = filled(1, 21), *other = filled(1, 22);
    CHECK(cudaSetDevice(0));
    cudaGraphNode_t node;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemcpyNode1D(&node, graph, nullptr, 0, here, source, BYTES, cudaMemcpyDefault));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    expect("a copy node between devices", holds(here, 21));
    CHECK(cudaGraphExecMemcpyNodeSetParams1D(exec, node, here, other, BYTES, cudaMemcpyDefault));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    expect("with another source", holds(here, 22));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

// Calls that give access, on devices that have it or not.
static void refused() {
    CHECK(cudaSetDevice(0));
    code("enable", CALL(cuCtxEnablePeerAccess, contexts[1], 0));
    code("disable", CALL(cuCtxDisablePeerAccess, contexts[1]));
}

struct Mapped {
    CUdeviceptr start = 0;
    size_t bytes = 0;

    explicit Mapped(int device) {
        CUmemAllocationProp properties = {};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = at(device);
        MUST(cuMemGetAllocationGranularity, &bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        CUmemGenericAllocationHandle handle;
        MUST(cuMemCreate, &handle, bytes, &properties, 0);
        MUST(cuMemAddressReserve, &start, bytes, 0, 0, 0);
        MUST(cuMemMap, start, bytes, 0, handle, 0);
        MUST(cuMemRelease, handle);
    }
    CUresult allow(int device, CUmemAccess_flags flags) const {
        CUmemAccessDesc access = {at(device), flags};
        return CALL(cuMemSetAccess, start, bytes, &access, 1);
    }
    unsigned long long access(int device) const {
        unsigned long long flags = ~0ull;
        CUmemLocation location = at(device);
        MUST(cuMemGetAccess, &flags, &location, start);
        return flags;
    }
    void end() const {
        MUST(cuMemUnmap, start, bytes);
        MUST(cuMemAddressFree, start, bytes);
    }
};

static CUresult pool_access(CUmemoryPool pool, int device, CUmemAccess_flags flags) {
    CUmemAccessDesc access = {at(device), flags};
    return CALL(cuMemPoolSetAccess, pool, &access, 1);
}

static int access_of(CUmemoryPool pool, int device) {
    CUmemAccess_flags flags = (CUmemAccess_flags)-1;
    CUmemLocation location = at(device);
    MUST(cuMemPoolGetAccess, &flags, pool, &location);
    return (int)flags;
}

static void mappings(bool can) {
    CHECK(cudaSetDevice(0));
    Mapped there(1);
    code("access of its own device to a mapping", there.allow(1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    code("access of the other device", there.allow(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    std::printf("access: %llu %llu\n", there.access(0), there.access(1));
    std::vector<int> values(COUNT, 40);
    MUST(cuMemcpyHtoD, there.start, values.data(), BYTES);
    int *here = filled(0, 0);
    MUST(cuMemcpyDtoD, (CUdeviceptr)here, there.start, BYTES);
    CHECK(cudaDeviceSynchronize());
    expect("a copy from a mapping of the other device", holds(here, 40));
    if (can) {
        expect("a kernel of the other device", change((void *)there.start, 2) == cudaSuccess && holds((void *)there.start, 42));
        code("no access of its own device", there.allow(1, CU_MEM_ACCESS_FLAGS_PROT_NONE));
        std::printf("access: %llu %llu\n", there.access(0), there.access(1));
        expect("the other one keeps it", change((void *)there.start, 1) == cudaSuccess);
        code("access of its own device again", there.allow(1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
        expect("and its bytes", holds((void *)there.start, 43));
        code("no access of the other device", there.allow(0, CU_MEM_ACCESS_FLAGS_PROT_NONE));
        std::printf("access: %llu %llu\n", there.access(0), there.access(1));
    }
    CUmemAccessDesc wrong = {at(77), CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    code("access of no device", CALL(cuMemSetAccess, there.start, there.bytes, &wrong, 1));
    there.end();
}

static void pools(bool can) {
    CHECK(cudaSetDevice(1));
    CUmemoryPool pool, own;
    CUmemPoolProps properties = {};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = at(1);
    MUST(cuMemPoolCreate, &pool, &properties);
    MUST(cuDeviceGetDefaultMemPool, &own, 1);
    std::printf("access to a pool: %d %d\n", access_of(pool, 0), access_of(pool, 1));
    code("access of the other device to a pool", pool_access(pool, 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    code("no access of its own device", pool_access(pool, 1, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    code("access of its own device", pool_access(pool, 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    code("other flags", pool_access(pool, 0, (CUmemAccess_flags)2));
    std::printf("access to a pool: %d %d\n", access_of(pool, 0), access_of(pool, 1));
    if (can) {
        CUdeviceptr before, after;
        MUST(cuMemAllocFromPoolAsync, &before, 3 << 20, own, nullptr);
        MUST(cuMemsetD32, before, 5, COUNT);
        MUST(cuStreamSynchronize, nullptr);
        code("access to a device's own pool", pool_access(own, 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
        expect("memory of before", change((void *)before, 1) == cudaSuccess && holds((void *)before, 6));
        CHECK(cudaSetDevice(1));
        MUST(cuMemAllocAsync, &after, BYTES, nullptr);
        MUST(cuMemsetD32, after, 7, COUNT);
        MUST(cuStreamSynchronize, nullptr);
        expect("memory of later", change((void *)after, 1) == cudaSuccess && holds((void *)after, 8));
        code("access for reading", pool_access(own, 0, CU_MEM_ACCESS_FLAGS_PROT_READ));
        std::printf("access to a pool: %d %d\n", access_of(own, 0), access_of(own, 1));
        code("no access", pool_access(own, 0, CU_MEM_ACCESS_FLAGS_PROT_NONE));
        std::printf("access to a pool: %d %d\n", access_of(own, 0), access_of(own, 1));
        CHECK(cudaSetDevice(1));
        MUST(cuMemFree, before);
        MUST(cuMemFree, after);
    }
    MUST(cuMemPoolDestroy, pool);
}

static void enabled(const char *program) {
    expect("a kernel without access faults", child(program, "1") == 0);
    expect("a kernel that has lost its access faults", child(program, "0") == 0);
    int *small = filled(1, 1), *large = filled(1, 2, 6 << 20), *global = nullptr;
    CHECK(cudaSetDevice(1));
    CHECK(cudaGetSymbolAddress((void **)&global, variable));
    CHECK(cudaMemset(global, 0, sizeof variable));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(0));
    code("a fill without access", CALL(cuMemsetD32, (CUdeviceptr)small, 9, COUNT));
    code("enable with a flag", CALL(cuCtxEnablePeerAccess, contexts[1], 1));
    code("enable for itself", CALL(cuCtxEnablePeerAccess, contexts[0], 0));
    code("enable", CALL(cuCtxEnablePeerAccess, contexts[1], 0));
    code("enable again", CALL(cuCtxEnablePeerAccess, contexts[1], 0));
    expect("memory of before", change(small, 10) == cudaSuccess && holds(small, 11));
    expect("large memory of before", change(large, 10) == cudaSuccess && holds(large, 12));
    expect("a variable", change(global, 3, 64) == cudaSuccess);
    std::vector<int> variables(64);
    CHECK(cudaMemcpy(variables.data(), global, 64 * 4, cudaMemcpyDefault));
    expect("its value", variables[0] == 3 && variables[63] == 3);
    int *later = filled(1, 20), *larger = filled(1, 30, 6 << 20);
    expect("memory of later", change(later, 1) == cudaSuccess && holds(later, 21));
    expect("large memory of later", change(larger, 1) == cudaSuccess && holds(larger, 31));
    code("a fill with access", CALL(cuMemsetD32, (CUdeviceptr)later, 9, COUNT));
    CHECK(cudaDeviceSynchronize());
    expect("its values", holds(later, 9));
    code("a fill beyond the memory", CALL(cuMemsetD32, (CUdeviceptr)later, 9, (size_t)64 << 20));
    CHECK(cudaFree(larger));
    larger = filled(1, 33, 6 << 20);
    expect("memory of later at any address", change(larger, 1) == cudaSuccess && holds(larger, 34));
    copies();

    // Access is given to contexts. A device keeps it as long as one of its contexts has it.
    CUcontext other;
    CUctxCreateParams params = {};
    MUST(cuCtxCreate, &other, &params, 0, 1);
    MUST(cuCtxPopCurrent, nullptr);
    CHECK(cudaSetDevice(0));
    code("enable for a second context", CALL(cuCtxEnablePeerAccess, other, 0));
    code("disable the first", CALL(cuCtxDisablePeerAccess, contexts[1]));
    code("disable the first again", CALL(cuCtxDisablePeerAccess, contexts[1]));
    MUST(cuCtxDestroy, other);
    CHECK(cudaSetDevice(0));
    code("a fill after the end of the second", CALL(cuMemsetD32, (CUdeviceptr)later, 9, COUNT));
    code("disable the second", CALL(cuCtxDisablePeerAccess, other));
    code("enable anew", CALL(cuCtxEnablePeerAccess, contexts[1], 0));
    expect("memory of before", change(small, 1) == cudaSuccess && holds(small, 12));
    code("disable", CALL(cuCtxDisablePeerAccess, contexts[1]));
}

static const size_t SIZES[2] = {BYTES, 6 << 20};

static CUresult open_handle(CUdeviceptr *address, const CUipcMemHandle &handle) {
    return CALL(cuIpcOpenMemHandle, address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

// The process that opens: it has no context on the second device.
static int opener(int input) {
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    for (size_t size : SIZES) {
        CUipcMemHandle handle;
        if (read(input, &handle, sizeof handle) != sizeof handle) return 2;
        CUdeviceptr there = 0, again = 0;
        CUresult opened = open_handle(&there, handle);
        code("memory of another process and device", opened);
        if (opened != CUDA_SUCCESS) continue;
        MUST(cuIpcOpenMemHandle, &again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        expect("a second open has the same address", again == there);
        int device = -1;
        size_t bytes = 0;
        MUST(cuPointerGetAttribute, &device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, there);
        MUST(cuPointerGetAttribute, &bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, there);
        std::printf("device %d, bytes as allocated: %d\n", device, bytes == size);
        expect("a copy from it", holds((void *)there, 5));
        expect("a kernel", change((void *)there, 1) == cudaSuccess && holds((void *)there, 6));
        add<<<8, 128>>>((int *)there + size / 4 - COUNT, (const int *)there, COUNT, 10);
        expect("a kernel at its end", cudaDeviceSynchronize() == cudaSuccess);
        int *here = filled(0, 30);
        MUST(cuMemcpyDtoD, there, (CUdeviceptr)here, 400);
        MUST(cuMemsetD32, there + 400, 31, 100);
        CHECK(cudaDeviceSynchronize());
        MUST(cuIpcCloseMemHandle, again);
        MUST(cuIpcCloseMemHandle, there);
        code("a third close", CALL(cuIpcCloseMemHandle, there));
    }
    return passed ? 0 : 1;
}

static void processes(const char *program, bool can) {
    CHECK(cudaSetDevice(1));
    int ends[2];
    if (pipe(ends) != 0) return expect("a pipe", false);
    std::fflush(stdout);
    pid_t started = fork();
    if (started == 0) {
        close(ends[1]);
        char number[16];
        std::snprintf(number, sizeof number, "%d", ends[0]);
        execl("/proc/self/exe", program, "open", number, (char *)nullptr);
        _exit(127);
    }
    close(ends[0]);
    int *memory[2];
    for (int which = 0; which < 2; which++) {
        memory[which] = filled(1, 5, SIZES[which]);
        CUipcMemHandle handle;
        MUST(cuIpcGetMemHandle, &handle, (CUdeviceptr)memory[which]);
        expect("a handle is sent", write(ends[1], &handle, sizeof handle) == sizeof handle);
    }
    close(ends[1]);
    std::fflush(stdout);
    int status = -1;
    waitpid(started, &status, 0);
    expect("the other process ends", WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (int which = 0; which < 2; which++) {
        std::vector<int> values(SIZES[which] / 4);
        CHECK(cudaMemcpy(values.data(), memory[which], SIZES[which], cudaMemcpyDefault));
        if (can) {
            expect("its copy and its fill", values[0] == 30 && values[99] == 30 && values[100] == 31 && values[199] == 31);
            expect("its kernels", which == 0 ? values[200] == 16 : values[200] == 6 && values.back() == 16);
        } else {
            expect("nothing was written", values[0] == 5 && values[COUNT - 1] == 5);
        }
        CHECK(cudaFree(memory[which]));
    }
    CHECK(cudaSetDevice(0));
}

int main(int argc, char **argv) {
    int count = 0;
    MUST(cuInit, 0);
    MUST(cuDeviceGetCount, &count);
    if (count < 2) {
        std::printf("one device\n");
        return verdict(true);
    }
    if (argc == 3 && std::strcmp(argv[1], "fault") == 0) return fault(argv[2][0] == '1');
    if (argc == 3 && std::strcmp(argv[1], "open") == 0) return opener(std::atoi(argv[2]));
    bool can = describe();
    begin();
    if (can)
        enabled(argv[0]);
    else
        refused();
    copies();
    graphs();
    mappings(can);
    pools(can);
    processes(argv[0], can);
    return verdict(passed);
}
