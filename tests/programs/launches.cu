// Launches with events and other attributes, attributes of streams, and launches of the oldest form.
#include "driver.h"
#include <cstring>
#include <vector>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 data, .param .u32 count, .param .f32 factor)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [data];
    ld.param.u32 %r1, [count];
    ld.param.f32 %f1, [factor];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    mul.wide.u32 %rd2, %r5, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.f32 %f2, [%rd3];
    mul.f32 %f3, %f2, %f1;
    st.global.f32 [%rd3], %f3;
done:
    ret;
}
)";

static bool right = true;

static void row(const char *what, long long value, long long expected) {
    std::printf("%-52s %lld %s\n", what, value, value == expected ? "right" : "WRONG");
    right &= value == expected;
}

constexpr unsigned COUNT = 1000;

// Elements that are their index times the factor.
static long long scaled(CUdeviceptr data, float factor) {
    std::vector<float> values(COUNT);
    MUST(cuMemcpyDtoH, values.data(), data, COUNT * 4);
    long long hits = 0;
    for (unsigned i = 0; i < COUNT; i++) hits += values[i] == i * factor;
    return hits;
}

int main() {
    CUdevice device;
    CUcontext context;
    CUstream stream, waiting;
    CUmodule module;
    CUfunction scale;
    CUdeviceptr data;
    MUST(cuInit, 0);
    MUST(cuDeviceGet, &device, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, device);
    MUST(cuCtxSetCurrent, context);
    MUST(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    MUST(cuStreamCreate, &waiting, CU_STREAM_NON_BLOCKING);
    MUST(cuModuleLoadData, &module, PTX);
    MUST(cuModuleGetFunction, &scale, module, "scale");
    MUST(cuMemAlloc, &data, COUNT * 4);
    std::vector<float> values(COUNT);
    for (unsigned i = 0; i < COUNT; i++) values[i] = i;
    MUST(cuMemcpyHtoD, data, values.data(), COUNT * 4);
    MUST(cuCtxSynchronize);

    // Events that a launch records.
    CUevent event;
    float factor = 2;
    unsigned count = COUNT;
    void *parameters[] = {&data, &count, &factor};
    for (int kind = 0; kind < 2; kind++) {
        MUST(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
        CUlaunchAttribute attribute = {};
        if (kind == 0) {
            attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT;
            attribute.value.programmaticEvent.event = event;
        } else {
            attribute.id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
            attribute.value.launchCompletionEvent.event = event;
        }
        CUlaunchConfig config = {};
        config.gridDimX = (COUNT + 127) / 128;
        config.gridDimY = config.gridDimZ = 1;
        config.blockDimX = 128;
        config.blockDimY = config.blockDimZ = 1;
        config.hStream = stream;
        config.attrs = &attribute;
        config.numAttrs = 1;
        for (int times = 0; times < 3; times++) MUST(cuLaunchKernelEx, &config, scale, parameters, nullptr);
        MUST(cuStreamWaitEvent, waiting, event, 0);
        MUST(cuStreamSynchronize, waiting);
        MUST(cuEventSynchronize, event);
        row(kind == 0 ? "programmatic event is reached" : "launch completion event is reached", CALL(cuEventQuery, event), 0);
        MUST(cuStreamSynchronize, stream);
        row("elements", scaled(data, kind == 0 ? 8 : 64), COUNT);
        MUST(cuEventDestroy, event);
    }

    // Attributes of streams.
    CUstreamAttrValue value = {}, read = {};
    value.syncPolicy = CU_SYNC_POLICY_BLOCKING_SYNC;
    MUST(cuStreamSetAttribute, stream, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value);
    std::memset(&value, 0, sizeof value);
    value.accessPolicyWindow.base_ptr = (void *)data;
    value.accessPolicyWindow.num_bytes = 1024;
    value.accessPolicyWindow.hitRatio = 0.5f;
    value.accessPolicyWindow.hitProp = CU_ACCESS_PROPERTY_PERSISTING;
    value.accessPolicyWindow.missProp = CU_ACCESS_PROPERTY_STREAMING;
    MUST(cuStreamSetAttribute, stream, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &value);
    std::memset(&value, 0, sizeof value);
    value.memSyncDomain = CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE;
    MUST(cuStreamSetAttribute, stream, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN, &value);
    MUST(cuStreamCopyAttributes, waiting, stream);
    MUST(cuStreamGetAttribute, waiting, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &read);
    row("copied policy", read.syncPolicy, CU_SYNC_POLICY_BLOCKING_SYNC);
    MUST(cuStreamGetAttribute, waiting, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &read);
    row("copied window", read.accessPolicyWindow.base_ptr == (void *)data && read.accessPolicyWindow.num_bytes == 1024, 1);
    MUST(cuStreamGetAttribute, waiting, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN, &read);
    row("copied domain", read.memSyncDomain, CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE);
    MUST(cuStreamGetAttribute, nullptr, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN, &read);
    row("domain of the default stream", read.memSyncDomain, CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT);
    factor = 0.5f;
    MUST(cuLaunchKernel, scale, 8, 1, 1, 128, 1, 1, 0, waiting, parameters, nullptr);
    MUST(cuStreamSynchronize, waiting);
    row("elements after a launch in such a stream", scaled(data, 32), COUNT);

    // The oldest form.
    MUST(cuFuncSetBlockShape, scale, 64, 1, 1);
    MUST(cuFuncSetSharedSize, scale, 256);
    MUST(cuParamSetv, scale, 0, &data, 8);
    MUST(cuParamSeti, scale, 8, COUNT);
    MUST(cuParamSetf, scale, 12, 0.25f);
    MUST(cuParamSetSize, scale, 16);
    MUST(cuLaunchGrid, scale, 16, 1);
    MUST(cuCtxSynchronize);
    row("elements after cuLaunchGrid", scaled(data, 8), COUNT);
    MUST(cuLaunchGridAsync, scale, 16, 1, stream);
    MUST(cuStreamSynchronize, stream);
    row("elements after cuLaunchGridAsync", scaled(data, 2), COUNT);
    // One block.
    MUST(cuParamSeti, scale, 8, 64);
    MUST(cuLaunch, scale);
    MUST(cuCtxSynchronize);
    row("elements after cuLaunch", scaled(data, 2), COUNT - 63);
    return verdict(right);
}
