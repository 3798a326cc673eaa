// Variables of the environment that users set for the driver: the mode of loading, the choice of images, launches that block. The test
// that sets the variables compares the lines; without them, the program passes with the defaults.
#include "driver.h"
#include <cstring>

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u32 rounds, .param .u64 result)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    ld.param.u32 %r1, [rounds];
    ld.param.u64 %rd1, [result];
    mov.u32 %r2, 1;
again:
    mad.lo.u32 %r2, %r2, 1664525, 1013904223;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra again;
    st.global.u32 [%rd1], %r2;
    ret;
}
)";

// Loads an image, and gives the code.
static int load(const void *image) {
    CUmodule module;
    CUresult code = CALL(cuModuleLoadData, &module, image);
    if (code == CUDA_SUCCESS) MUST(cuModuleUnload, module);
    return (int)code;
}

static bool set(const char *name) {
    const char *value = getenv(name);
    return value && !std::strcmp(value, "1");
}

static void count(void *calls) { ++*(int *)calls; }

// With launches that block, a graph runs its functions and its copies of pageable memory, and is complete then.
static void launch_a_graph(CUstream stream, CUdeviceptr words) {
    int calls = 0, copied = 7, result = 0;
    CUgraph graph;
    CUgraphExec executable;
    MUST(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    MUST(cuLaunchHostFunc, stream, count, &calls);
    MUST(cuMemcpyHtoDAsync, words, &copied, sizeof copied, stream);
    MUST(cuMemcpyDtoHAsync, &result, words, sizeof result, stream);
    MUST(cuStreamEndCapture, stream, &graph);
    MUST(cuGraphInstantiateWithFlags, &executable, graph, 0);
    for (int launch = 0; launch < 2; launch++) MUST(cuGraphLaunch, executable, stream);
    std::printf("after two launches of a graph: %d %d\n", calls, result);
    MUST(cuGraphExecDestroy, executable);
    MUST(cuGraphDestroy, graph);
}

// Waits, writes and recordings return at once also then: this thread is the one that ends the wait.
static void hold(CUcontext context, CUstream stream, CUdeviceptr words) {
    CUstream other;
    CUevent shared, all;
    CUipcEventHandle handle;
    CUstreamBatchMemOpParams barrier = {};
    barrier.memoryBarrier.operation = CU_STREAM_MEM_OP_BARRIER;
    barrier.memoryBarrier.flags = CU_STREAM_MEMORY_BARRIER_TYPE_GPU;
    MUST(cuStreamCreate, &other, CU_STREAM_NON_BLOCKING);
    MUST(cuEventCreate, &shared, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    MUST(cuEventCreate, &all, CU_EVENT_DISABLE_TIMING);
    MUST(cuIpcGetEventHandle, &handle, shared);
    MUST(cuMemsetD8, words, 0, 64);
    MUST(cuCtxSynchronize);
    MUST(cuStreamWaitValue32, stream, words, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuStreamBatchMemOp, stream, 1, &barrier, 0);
    MUST(cuStreamWriteValue32, stream, words + 4, 2, 0);
    MUST(cuEventRecord, shared, stream);
    MUST(cuCtxRecordEvent, context, all);
    std::printf("held: %d %d %d\n", (int)CALL(cuStreamQuery, stream), (int)CALL(cuEventQuery, shared),
                (int)CALL(cuEventQuery, all));
    MUST(cuStreamWriteValue32, other, words, 1, 0);
    MUST(cuEventSynchronize, shared);
    MUST(cuEventSynchronize, all);
    std::printf("free: %d\n", (int)CALL(cuStreamQuery, stream));
    MUST(cuEventDestroy, all);
    MUST(cuEventDestroy, shared);
    MUST(cuStreamDestroy, other);
}

int main() {
    CUdevice device;
    CUcontext context;
    MUST(cuInit, 0);
    MUST(cuDeviceGet, &device, 0);
    MUST(cuCtxCreate, &context, nullptr, 0, device);
    CUmoduleLoadingMode mode;
    MUST(cuModuleGetLoadingMode, &mode);
    std::printf("loading mode: %d\n", (int)mode);

    CUlinkState link;
    void *linked;
    size_t bytes;
    MUST(cuLinkCreate, 0, nullptr, nullptr, &link);
    MUST(cuLinkAddData, link, CU_JIT_INPUT_PTX, (void *)PTX, sizeof PTX, "spin", 0, nullptr, nullptr);
    MUST(cuLinkComplete, link, &linked, &bytes);
    std::printf("PTX: %d\nmachine code: %d\n", load(PTX), load(linked));

    // Whichever may be loaded.
    CUmodule module;
    CUfunction spin;
    CUstream stream;
    CUdeviceptr result;
    MUST(cuModuleLoadData, &module, set("CUDA_DISABLE_PTX_JIT") ? linked : PTX);
    MUST(cuModuleGetFunction, &spin, module, "spin");
    MUST(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    MUST(cuMemAlloc, &result, 1 << 20);
    unsigned rounds = 2000000;
    void *parameters[] = {&rounds, &result};
    MUST(cuLaunchKernel, spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
    // Without the variable the kernel may or may not be complete here.
    CUresult complete = CALL(cuStreamQuery, stream);
    if (set("CUDA_LAUNCH_BLOCKING")) std::printf("complete after the launch: %d\n", (int)complete);
    MUST(cuLaunchKernel, spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
    MUST(cuMemsetD8Async, result, 0, 1 << 20, stream);
    complete = CALL(cuStreamQuery, stream);
    if (set("CUDA_LAUNCH_BLOCKING")) std::printf("complete after the fill: %d\n", (int)complete);
    MUST(cuStreamSynchronize, stream);
    if (set("CUDA_LAUNCH_BLOCKING")) {
        launch_a_graph(stream, result);
        hold(context, stream, result);
    }

    // A fault, last: no call works after it.
    CUdeviceptr nowhere = 64;
    void *wild[] = {&rounds, &nowhere};
    rounds = 1;
    std::printf("launch of a fault: %d\n", (int)CALL(cuLaunchKernel, spin, 1, 1, 1, 1, 1, 1, 0, stream, wild, nullptr));
    std::printf("synchronisation: %d\n", (int)CALL(cuStreamSynchronize, stream));
    return verdict(true);
}
