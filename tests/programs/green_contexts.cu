// Multiprocessors split into groups, and green contexts that compute with them: streams, events, the end of each.
#include "driver.h"
#include <cstring>

static bool passed = true;

static void expect(const char *what, bool holds) {
    printf("%-52s %s\n", what, holds ? "yes" : "no");
    passed &= holds;
}

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry square(.param .u64 to, .param .u32 factor)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [factor];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    mul.lo.u32 %r5, %r2, %r2;
    mul.lo.u32 %r5, %r5, %r1;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r5;
    ret;
}
)";

static const int COUNT = 64 * 64;
static CUfunction square;
static CUdeviceptr numbers;
static unsigned host[COUNT];

// Computes in a stream, and compares.
static bool computes(CUstream stream, unsigned factor) {
    void *parameters[] = {&numbers, &factor};
    MUST(cuMemsetD8Async, numbers, 0xff, COUNT * 4, stream);
    MUST(cuLaunchKernel, square, 64, 1, 1, 64, 1, 1, 0, stream, parameters, nullptr);
    MUST(cuMemcpyDtoHAsync, host, numbers, COUNT * 4, stream);
    MUST(cuStreamSynchronize, stream);
    for (unsigned i = 0; i < COUNT; i++)
        if (host[i] != i * i * factor) return false;
    return true;
}

static unsigned multiprocessors(CUgreenCtx green) {
    CUdevResource own = {};
    MUST(cuGreenCtxGetDevResource, green, &own, CU_DEV_RESOURCE_TYPE_SM);
    return own.sm.smCount;
}

static bool primary_is_active() {
    unsigned flags;
    int active;
    MUST(cuDevicePrimaryCtxGetState, 0, &flags, &active);
    return active;
}

// Groups of different sizes.
static void different_sizes(CUdevResource all, unsigned unit) {
    CUdevResource left = {};
    CU_DEV_SM_RESOURCE_GROUP_PARAMS parameters[2] = {};
    parameters[0].smCount = 2 * unit;
    MUST(cuDevSmResourceSplit, nullptr, 2, &all, nullptr, 0, parameters);
    expect("a count is discovered", parameters[1].smCount && parameters[1].smCount % unit == 0 &&
                                        parameters[0].smCount + parameters[1].smCount <= all.sm.smCount);
    CUdevResource structured[2] = {};
    MUST(cuDevSmResourceSplit, structured, 2, &all, &left, 0, parameters);
    expect("the groups have these counts", structured[0].sm.smCount == parameters[0].smCount &&
                                               structured[1].sm.smCount == parameters[1].smCount);
    parameters[0].smCount = 3;
    expect("an odd count", CALL(cuDevSmResourceSplit, structured, 1, &all, nullptr, 0, parameters) == CUDA_ERROR_INVALID_VALUE);
    parameters[0].smCount = 0;
    parameters[0].reserved[10] = 1;
    expect("a reserved word", CALL(cuDevSmResourceSplit, structured, 1, &all, nullptr, 0, parameters) == CUDA_ERROR_INVALID_VALUE);
}

// Work queues of a green context, and a part of its multiprocessors.
static void with_queues(CUdevResource group) {
    CUdevResource queues = {}, both[2], again[1] = {};
    CUdevResourceDesc wrong;
    unsigned count = 0;
    MUST(cuDeviceGetDevResource, 0, &queues, CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG);
    expect("queues of the device", queues.wqConfig.device == 0 && queues.wqConfig.wqConcurrencyLimit > 0);
    queues.wqConfig.wqConcurrencyLimit = 4;
    queues.wqConfig.sharingScope = CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED;
    both[0] = group;
    both[1] = queues;
    CUgreenCtx balanced;
    MUST(cuDevResourceGenerateDesc, &wrong, both, 2);
    MUST(cuGreenCtxCreate, &balanced, wrong, 0, CU_GREEN_CTX_DEFAULT_STREAM);
    MUST(cuGreenCtxGetDevResource, balanced, &queues, CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG);
    expect("its queues are as it wanted them", queues.wqConfig.wqConcurrencyLimit == 4 &&
                                                   queues.wqConfig.sharingScope == CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED);
    // A green context may be split again.
    CUdevResource part = {};
    MUST(cuGreenCtxGetDevResource, balanced, &part, CU_DEV_RESOURCE_TYPE_SM);
    count = 1;
    MUST(cuDevSmResourceSplitByCount, again, &count, &part, nullptr, 0, 0);
    MUST(cuDevResourceGenerateDesc, &wrong, again, 1);
    MUST(cuGreenCtxDestroy, balanced);
    // A descriptor outlives the context that it comes from.
    MUST(cuGreenCtxCreate, &balanced, wrong, 0, CU_GREEN_CTX_DEFAULT_STREAM);
    expect("a part of a part", multiprocessors(balanced) == again[0].sm.smCount && again[0].sm.smCount < part.sm.smCount);
    MUST(cuGreenCtxDestroy, balanced);
}

int main() {
    CUcontext primary, current, views[2];
    CUdevResource all = {}, of_context = {}, groups[2] = {}, left = {}, again[1] = {};
    unsigned count = 0;
    int number = 0;
    MUST(cuInit, 0);

    // Resources of the device.
    MUST(cuDeviceGetDevResource, 0, &all, CU_DEV_RESOURCE_TYPE_SM);
    MUST(cuDeviceGetAttribute, &number, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0);
    expect("all multiprocessors of the device", all.type == CU_DEV_RESOURCE_TYPE_SM && all.sm.smCount == (unsigned)number);
    unsigned least = all.sm.minSmPartitionSize, unit = all.sm.smCoscheduledAlignment;
    expect("the granularity is a power of 2", least && unit && !(least & (least - 1)) && !(unit & (unit - 1)));
    expect("no type", CALL(cuDeviceGetDevResource, 0, &left, CU_DEV_RESOURCE_TYPE_INVALID) == CUDA_ERROR_INVALID_RESOURCE_TYPE);

    // Groups of one size.
    MUST(cuDevSmResourceSplitByCount, nullptr, &count, &all, nullptr, 0, 0);
    expect("as many groups as fit", count >= 2 && count <= all.sm.smCount / least);
    count = 2;
    MUST(cuDevSmResourceSplitByCount, groups, &count, &all, &left, 0, least + 1);
    unsigned size = groups[0].sm.smCount;
    expect("two groups and the rest", count == 2 && size > least && size % unit == 0 && groups[1].sm.smCount == size &&
                                          2 * size + left.sm.smCount == all.sm.smCount);
    count = ~0u;
    expect("more than there are", CALL(cuDevSmResourceSplitByCount, nullptr, &count, &all, nullptr, 0, all.sm.smCount + 1) ==
                                      CUDA_ERROR_INVALID_VALUE);
    count = 1;
    expect("a group is not split", CALL(cuDevSmResourceSplitByCount, again, &count, &groups[0], nullptr, 0, least) ==
                                       CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    CUdevResource forged = groups[0];
    forged.type = CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG;
    expect("queues are not split", CALL(cuDevSmResourceSplitByCount, again, &count, &forged, nullptr, 0, 0) ==
                                       CUDA_ERROR_INVALID_RESOURCE_TYPE);
    memset(&forged, 0xff, sizeof forged);
    forged.type = CU_DEV_RESOURCE_TYPE_SM;
    CUdevResourceDesc descriptors[2], wrong;
    expect("a forged resource", CALL(cuDevSmResourceSplitByCount, again, &count, &forged, nullptr, 0, 0) != CUDA_SUCCESS &&
                                    CALL(cuDevResourceGenerateDesc, &wrong, &forged, 1) != CUDA_SUCCESS);

    // Groups of different sizes, queues and detached streams came with CUDA 13.1.
    const bool has_queues = driver_version() >= 13010;
    if (!has_queues) printf("the driver is too old for some of these\n");
    if (has_queues) different_sizes(all, unit);

    // Two green contexts; the primary context lives as long as one of them.
    CUgreenCtx greens[2];
    for (int i = 0; i < 2; i++) {
        MUST(cuDevResourceGenerateDesc, &descriptors[i], &groups[i], 1);
        MUST(cuGreenCtxCreate, &greens[i], descriptors[i], 0, CU_GREEN_CTX_DEFAULT_STREAM);
        MUST(cuCtxFromGreenCtx, &views[i], greens[i]);
    }
    CUdevResource twice[2] = {groups[0], groups[0]};
    if (undefined_too())
        expect("a group twice", CALL(cuDevResourceGenerateDesc, &wrong, twice, 2) == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    expect("the primary context is active", primary_is_active());
    expect("each has its group", multiprocessors(greens[0]) == size && multiprocessors(greens[1]) == size);
    unsigned long long ids[3];
    for (int i = 0; i < 2; i++) MUST(cuGreenCtxGetId, greens[i], &ids[i]);
    expect("each has a number", ids[0] != ids[1]);
    MUST(cuDevicePrimaryCtxRetain, &primary, 0);
    if (undefined_too())
        expect("a green context is no context", CALL(cuCtxSetCurrent, (CUcontext)greens[0]) == CUDA_ERROR_INVALID_CONTEXT);
    MUST(cuCtxSetCurrent, primary);
    MUST(cuCtxGetDevResource, primary, &of_context, CU_DEV_RESOURCE_TYPE_SM);
    expect("the primary context has all", of_context.sm.smCount == all.sm.smCount);
    CUmodule module;
    MUST(cuModuleLoadData, &module, PTX);
    MUST(cuModuleGetFunction, &square, module, "square");
    MUST(cuMemAlloc, &numbers, COUNT * 4);

    // Streams of green contexts, used in the primary context.
    CUstream streams[2], plain, implicit;
    for (int i = 0; i < 2; i++) MUST(cuGreenCtxStreamCreate, &streams[i], greens[i], CU_STREAM_NON_BLOCKING, 0);
    MUST(cuStreamCreate, &plain, CU_STREAM_NON_BLOCKING);
    expect("a blocking stream", CALL(cuGreenCtxStreamCreate, &implicit, greens[0], CU_STREAM_DEFAULT, 0) == CUDA_ERROR_INVALID_VALUE);
    expect("kernels in their streams", computes(streams[0], 3) && computes(streams[1], 5) && computes(plain, 7));
    CUgreenCtx green;
    MUST(cuStreamGetGreenCtx, streams[1], &green);
    expect("the stream has its green context", green == greens[1]);
    MUST(cuStreamGetGreenCtx, plain, &green);
    expect("a plain stream has none", green == nullptr);
    MUST(cuStreamGetCtx, streams[0], &current);
    expect("the stream has the view", current == views[0]);
    if (has_queues) {
        CUdevResource of_stream = {};
        MUST(cuStreamGetDevResource, streams[0], &of_stream, CU_DEV_RESOURCE_TYPE_SM);
        expect("the stream has its group", of_stream.sm.smCount == size);
        expect("no queues of a stream", CALL(cuStreamGetDevResource, streams[0], &of_stream, CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG) ==
                                            CUDA_ERROR_INVALID_RESOURCE_TYPE);
    }

    // A green context that is current: its default stream, memory and streams.
    MUST(cuCtxPushCurrent, views[0]);
    MUST(cuCtxGetCurrent, &current);
    expect("the view is current", current == views[0]);
    MUST(cuGreenCtxGetId, nullptr, &ids[2]);
    expect("the number of the current one", ids[2] == ids[0]);
    expect("its default stream computes", computes(nullptr, 11));
    MUST(cuStreamCreate, &implicit, CU_STREAM_NON_BLOCKING);
    MUST(cuStreamGetGreenCtx, implicit, &green);
    expect("a stream made now is one of it", green == greens[0] && computes(implicit, 13));
    CUdeviceptr memory;
    MUST(cuMemAlloc, &memory, 64);
    MUST(cuMemsetD8, memory, 1, 64);
    MUST(cuCtxSynchronize);
    MUST(cuCtxPopCurrent, &current);
    MUST(cuMemcpyDtoH, host, memory, 64);
    expect("memory belongs to both", host[15] == 0x01010101);

    // Events and waits of one green context leave the other alone.
    CUevent event;
    MUST(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    MUST(cuMemsetD8, memory, 0, 64);
    MUST(cuCtxSynchronize);
    MUST(cuStreamWaitValue32, streams[1], memory, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuGreenCtxRecordEvent, greens[0], event);
    MUST(cuEventSynchronize, event);
    MUST(cuCtxSynchronize_v2, views[0]);
    MUST(cuGreenCtxRecordEvent, greens[1], event);
    bool held = CALL(cuEventQuery, event) == CUDA_ERROR_NOT_READY;
    MUST(cuCtxWaitEvent, views[0], event);
    MUST(cuStreamWriteValue32, streams[0], memory + 4, 7, 0);
    MUST(cuStreamWriteValue32, implicit, memory + 8, 7, 0);
    held &= CALL(cuStreamQuery, streams[0]) == CUDA_ERROR_NOT_READY && CALL(cuStreamQuery, implicit) == CUDA_ERROR_NOT_READY;
    MUST(cuStreamWriteValue32, plain, memory, 1, 0);
    MUST(cuStreamSynchronize, streams[0]);
    MUST(cuStreamSynchronize, implicit);
    MUST(cuMemcpyDtoH, host, memory, 12);
    expect("events hold one and not the other", held && host[1] == 7 && host[2] == 7);

    // Work queues.
    if (has_queues) with_queues(groups[0]);

    // The end: captures are invalid, streams are detached.
    CUgraph graph = nullptr;
    MUST(cuStreamBeginCapture, streams[1], CU_STREAM_CAPTURE_MODE_RELAXED);
    expect("no record in a capture", CALL(cuGreenCtxRecordEvent, greens[1], event) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    expect("the capture is invalid", CALL(cuStreamEndCapture, streams[1], &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    if (!has_queues)
        for (CUstream stream : {streams[0], implicit}) MUST(cuStreamDestroy, stream);
    MUST(cuGreenCtxDestroy, greens[0]);
    if (has_queues) {
        expect("a detached stream", CALL(cuStreamQuery, streams[0]) == CUDA_ERROR_STREAM_DETACHED &&
                                    CALL(cuMemsetD8Async, memory, 0, 64, implicit) == CUDA_ERROR_STREAM_DETACHED);
        MUST(cuStreamDestroy, streams[0]);
        MUST(cuStreamDestroy, implicit);
    }
    if (undefined_too())
        expect("a green context that is gone", CALL(cuGreenCtxStreamCreate, &implicit, greens[0], CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS &&
                                               CALL(cuCtxSetCurrent, views[0]) != CUDA_SUCCESS);
    expect("the other computes on", computes(streams[1], 17));
    MUST(cuStreamDestroy, streams[1]);
    MUST(cuDevicePrimaryCtxRelease, 0);
    expect("a green context retains the primary one", primary_is_active());
    MUST(cuGreenCtxDestroy, greens[1]);
    expect("the last one releases it", !primary_is_active());
    return verdict(passed);
}
