// Arguments that NVIDIA's driver takes, though its header requires others, and the effects of these calls. `refusals` has their codes.
#include "driver.h"
#include <cstring>

// Programs may still make calls that cuda.h discourages.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static bool passed = true;

static void expect(const char *what, bool holds) {
    printf("%-60s %s\n", what, holds ? "yes" : "no");
    passed &= holds;
}

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .global .align 8 .b64 seen[2];
.visible .entry look(.param .u64 first, .param .u32 second)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [first];
    ld.param.u32 %r1, [second];
    cvt.u64.u32 %rd2, %r1;
    or.b64 %rd1, %rd1, %rd2;
    mov.u64 %rd3, seen;
    mov.u32 %r2, %ntid.x;
    cvt.u64.u32 %rd4, %r2;
    st.global.u64 [%rd3], %rd4;
    st.global.u64 [%rd3+8], %rd1;
    ret;
}
)";

__global__ void put(cudaSurfaceObject_t surface) { surf2Dwrite(threadIdx.x + 1.5f, surface, threadIdx.x * 4, 0); }

static unsigned multiprocessors(const CUdevResource &resource) { return resource.sm.smCount; }

int main() {
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    CUcontext context;
    MUST(cuCtxGetCurrent, &context);

    void *place = &place;
    MUST(cuGetProcAddress, "cuNothing", &place, 12000, 0, nullptr);
    expect("an unknown function is null without a place for a status", place == nullptr);
    int supported = 7;
    MUST(cuDeviceGetExecAffinitySupport, &supported, (CUexecAffinityType)9, 0);
    expect("an unknown affinity is not supported", supported == 0);

    void *pinned = &place;
    MUST(cuMemAllocHost, &pinned, 0);
    expect("pinned memory of 0 bytes is null", pinned == nullptr);
    MUST(cuMemFreeHost, pinned);

    // A null context is the current one.
    CUdeviceptr memory;
    char bytes[64], copied[64] = {};
    for (int i = 0; i < 64; i++) bytes[i] = (char)(i + 1);
    MUST(cuMemAlloc, &memory, 128);
    MUST(cuMemcpyHtoD, memory, bytes, 64);
    MUST(cuMemcpyPeer, memory + 64, nullptr, memory, context, 32);
    CUDA_MEMCPY3D_PEER between = {};
    between.srcMemoryType = between.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    between.srcDevice = memory + 32;
    between.dstDevice = memory + 96;
    between.WidthInBytes = 32;
    between.Height = between.Depth = 1;
    between.srcContext = context;
    MUST(cuMemcpy3DPeer, &between);
    MUST(cuMemcpyDtoH, copied, memory + 64, 64);
    expect("copies with a null context", memcmp(copied, bytes, 64) == 0);
    MUST(cuMemFree, memory);

    // Copies to arrays count bytes.
    CUarray array;
    CUDA_ARRAY_DESCRIPTOR shape = {8, 0, CU_AD_FORMAT_FLOAT, 2};
    MUST(cuArrayCreate, &array, &shape);
    MUST(cuMemcpyHtoA, array, 0, bytes, 64);
    MUST(cuMemcpyHtoA, array, 4, bytes + 16, 8);
    MUST(cuMemcpyAtoH, copied, array, 0, 64);
    expect("a copy that begins within an element",
           memcmp(copied, bytes, 4) == 0 && memcmp(copied + 4, bytes + 16, 8) == 0 && memcmp(copied + 12, bytes + 12, 52) == 0);
    MUST(cuArrayDestroy, array);

    // An array that was not made for surfaces.
    CUDA_ARRAY_DESCRIPTOR plane = {8, 2, CU_AD_FORMAT_FLOAT, 1};
    MUST(cuArrayCreate, &array, &plane);
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_ARRAY;
    resource.res.array.hArray = array;
    CUsurfObject surface;
    MUST(cuSurfObjectCreate, &surface, &resource);
    put<<<1, 8>>>(surface);
    CHECK(cudaDeviceSynchronize());
    float row[8] = {};
    MUST(cuMemcpyAtoH, row, array, 0, sizeof row);
    bool stored = true;
    for (int i = 0; i < 8; i++) stored &= row[i] == i + 1.5f;
    expect("a surface over any array", stored);
    MUST(cuSurfObjectDestroy, surface);
    MUST(cuSurfObjectDestroy, surface);
    MUST(cuTexObjectDestroy, 0x77777);
    MUST(cuArrayDestroy, array);

    // A green context without a description has the whole device.
    CUgreenCtx green;
    CUdevResource all = {}, own = {};
    MUST(cuGreenCtxCreate, &green, nullptr, 0, CU_GREEN_CTX_DEFAULT_STREAM);
    MUST(cuDeviceGetDevResource, 0, &all, CU_DEV_RESOURCE_TYPE_SM);
    MUST(cuGreenCtxGetDevResource, green, &own, CU_DEV_RESOURCE_TYPE_SM);
    expect("a green context of the whole device", multiprocessors(own) == multiprocessors(all));
    MUST(cuGreenCtxDestroy, green);

    // A launch of the oldest form that was not set up.
    CUmodule module;
    CUfunction look;
    CUdeviceptr seen;
    size_t size;
    unsigned long long found[2];
    MUST(cuModuleLoadData, &module, PTX);
    MUST(cuModuleGetFunction, &look, module, "look");
    MUST(cuModuleGetGlobal, &seen, &size, module, "seen");
    MUST(cuMemsetD8, seen, 0xff, sizeof found);
    MUST(cuLaunch, look);
    MUST(cuMemcpyDtoH, found, seen, sizeof found);
    expect("a launch without a block has one thread", found[0] == 1);
    expect("parameters that were not set are zeroes", found[1] == 0);
    MUST(cuModuleUnload, module);
    return verdict(passed);
}
