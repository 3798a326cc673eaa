// One table of (call, bad argument, code): calls that the driver refuses at once, without further effect.
#include "check.h"
#include <cuda.h>
#include <dlfcn.h>

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .global .align 4 .b8 variable[64];
.visible .entry nothing() { ret; }
.visible .entry store(.param .u64 to, .param .u32 value)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
.visible .entry bounded() .maxntid 64, 1, 1 { ret; }
)";

#define TEXT_OF(name) #name
#define NAME(name) TEXT_OF(name)

static void *library;

static void *entry(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        printf("%s is no symbol of the driver\nFAIL\n", name);
        exit(1);
    }
    return found;
}

// By exported name; cuda.h's macros turn the plain names into the versioned ones.
#define CALL(name, ...) (((decltype(&name))entry(NAME(name)))(__VA_ARGS__))

static void row(const char *call, const char *argument, CUresult code) {
    printf("%-44s %-44s %d\n", call, argument, (int)code);
}
#define ROW(argument, name, ...) row(#name, argument, CALL(name, __VA_ARGS__))

static void must(const char *what, CUresult code) {
    if (code == CUDA_SUCCESS) return;
    printf("%s: %d\nFAIL\n", what, (int)code);
    exit(1);
}
#define MUST(name, ...) must(#name, CALL(name, __VA_ARGS__))

int main() {
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        printf("dlopen: %s\nFAIL\n", dlerror());
        return 1;
    }
    CUdevice device = 0;
    CUcontext context = nullptr, other = nullptr, doomed = nullptr;
    CUstream stream = nullptr, foreign = nullptr, gone = nullptr;
    CUevent event = nullptr, untimed = nullptr, elsewhere = nullptr, dead = nullptr;
    CUmodule module = nullptr;
    CUfunction nothing = nullptr, store = nullptr, bounded = nullptr, found = nullptr;
    CUdeviceptr memory = 0, address = 0;
    CUmemoryPool pool = nullptr;
    char text[64], host[256] = {};
    int number = 0;
    unsigned word = 0;
    size_t bytes = 0;
    float time = 0;
    CUuuid uuid;
    const char *name = nullptr;
    void *pinned = nullptr;

    ROW("before cuInit", cuDeviceGet, &device, 0);
    ROW("before cuInit", cuCtxGetCurrent, &context);
    ROW("flags 1", cuInit, 1);
    MUST(cuInit, 0);
    ROW("null", cuDriverGetVersion, nullptr);

    ROW("device 77", cuDeviceGet, &device, 77);
    ROW("device -1", cuDeviceGet, &device, -1);
    ROW("null", cuDeviceGet, nullptr, 0);
    ROW("null", cuDeviceGetCount, nullptr);
    ROW("device 77", cuDeviceGetName, text, 64, 77);
    ROW("null", cuDeviceGetName, nullptr, 64, 0);
    ROW("attribute 100000", cuDeviceGetAttribute, &number, (CUdevice_attribute)100000, 0);
    ROW("attribute 0", cuDeviceGetAttribute, &number, (CUdevice_attribute)0, 0);
    ROW("device 77", cuDeviceGetAttribute, &number, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 77);
    ROW("null", cuDeviceGetAttribute, nullptr, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0);
    ROW("device 77", cuDeviceTotalMem, &bytes, 77);
    ROW("device 77", cuDeviceGetUuid, &uuid, 77);
    ROW("code 12345", cuGetErrorName, (CUresult)12345, &name);
    ROW("code 12345", cuGetErrorString, (CUresult)12345, &name);

    ROW("without a context", cuMemAlloc, &address, 64);
    ROW("without a context", cuStreamCreate, &stream, 0);
    ROW("without a context", cuEventCreate, &event, 0);
    ROW("without a context", cuCtxSynchronize);
    ROW("without a context", cuModuleLoadData, &module, PTX);
    ROW("without a context", cuMemGetInfo, &bytes, &bytes);
    ROW("without a context", cuFlushGPUDirectRDMAWrites, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
    ROW("device 77", cuDevicePrimaryCtxRetain, &context, 77);
    ROW("device 77", cuDeviceGraphMemTrim, 77);
    ROW("no graphs", cuDeviceGraphMemTrim, 0);
    ROW("never retained", cuDevicePrimaryCtxRelease, 0);
    ROW("flags 0x1000", cuDevicePrimaryCtxSetFlags, 0, 0x1000);
    MUST(cuDevicePrimaryCtxRetain, &context, 0);
    ROW("a primary context", cuCtxDestroy, context);
    ROW("null", cuCtxDestroy, nullptr);
    alignas(64) CUtensorMap map;
    const cuuint64_t dimensions[6] = {64, 64, 1, 1, 1, 1}, strides[5] = {256, 16384, 16384, 16384, 16384};
    const cuuint32_t tile[6] = {16, 16, 1, 1, 1, 1}, steps[6] = {1, 1, 1, 1, 1, 1};
#define TILED(argument, map, rank, at, dimensions, tile)                                                              \
    ROW(argument, cuTensorMapEncodeTiled, map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, rank, (void *)at, dimensions, strides, \
        tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,       \
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    TILED("without a context", &map, 2, 0x700000000000, dimensions, tile);
    MUST(cuCtxSetCurrent, context);
    TILED("good", &map, 2, 0x700000000000, dimensions, tile);
    unsigned long long sum = 0;
    for (cuuint64_t part : map.opaque) sum = sum * 31 + part;
    printf("%-44s %-44s %llx\n", "cuTensorMapEncodeTiled", "checksum of the descriptor", sum);
    TILED("rank 0", &map, 0, 0x700000000000, dimensions, tile);
    TILED("rank 6", &map, 6, 0x700000000000, dimensions, tile);
    TILED("no dimensions", &map, 2, 0x700000000000, nullptr, tile);
    TILED("a misaligned address", &map, 2, 0x700000000008, dimensions, tile);
    TILED("a misaligned descriptor", (CUtensorMap *)((char *)&map + 8), 2, 0x700000000000, dimensions, tile);
    TILED("a tile of 4 bytes", &map, 2, 0x700000000000, dimensions, steps);
    ROW("null", cuCtxGetCurrent, nullptr);
    ROW("null", cuCtxGetDevice, nullptr);
    ROW("limit 77", cuCtxGetLimit, &bytes, (CUlimit)77);
    ROW("null", cuCtxGetLimit, nullptr, CU_LIMIT_STACK_SIZE);
    ROW("limit 77", cuCtxSetLimit, (CUlimit)77, 1);
    ROW("target 9", cuFlushGPUDirectRDMAWrites, (CUflushGPUDirectRDMAWritesTarget)9,
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
    ROW("scope 9", cuFlushGPUDirectRDMAWrites, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
        (CUflushGPUDirectRDMAWritesScope)9);
    MUST(cuFlushGPUDirectRDMAWrites, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
         CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES);
    ROW("config 9", cuCtxSetCacheConfig, (CUfunc_cache)9);

    ROW("0 bytes", cuMemAlloc, &address, 0);
    ROW("null", cuMemAlloc, nullptr, 64);
    ROW("a pebibyte", cuMemAlloc, &address, 1ull << 50);
    ROW("elements of 3 bytes", cuMemAllocPitch, &address, &bytes, 64, 4, 3);
    ROW("width 0", cuMemAllocPitch, &address, &bytes, 0, 4, 4);
    ROW("never allocated", cuMemFree, 0x12345600);
    ROW("0", cuMemFree, 0);
    ROW("0 bytes", cuMemAllocHost, &pinned, 0);
    ROW("flags 0x100", cuMemHostAlloc, &pinned, 64, 0x100);
    ROW("never allocated", cuMemFreeHost, host);
    ROW("flags 9", cuMemAllocManaged, &address, 64, 9);
    // As long as a page of the device, so that its end is the end of the mapping.
    const size_t END = 2 << 20;
    MUST(cuMemAlloc, &memory, END);
    ROW("inside an allocation", cuMemFree, memory + 512);
    ROW("not device memory", cuMemGetAddressRange, &address, &bytes, 0x40);
    ROW("null", cuPointerGetAttribute, nullptr, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory);
    ROW("attribute 1000", cuPointerGetAttribute, &address, (CUpointer_attribute)1000, memory);
    ROW("unknown address", cuPointerGetAttribute, &address, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 0x40);

    ROW("to nowhere", cuMemcpyHtoD, 0x40, host, 16);
    ROW("from null", cuMemcpyHtoD, memory, nullptr, 16);
    ROW("beyond the end", cuMemcpyHtoD, memory + END - 6, host, 16);
    ROW("nothing to nowhere", cuMemcpyHtoD, 0x40, host, 0);
    ROW("from nowhere", cuMemcpyDtoH, host, 0x40, 16);
    ROW("to null", cuMemcpyDtoH, nullptr, memory, 16);
    ROW("beyond the end", cuMemcpyDtoH, host, memory + END - 6, 16);
    ROW("from nowhere", cuMemcpyDtoD, memory, 0x40, 16);
    ROW("beyond the end", cuMemcpyDtoD, memory, memory + END - 6, 16);
    ROW("beyond the end", cuMemsetD8, memory + END - 6, 1, 16);
    ROW("nowhere", cuMemsetD8, 0x40, 1, 16);
    ROW("not aligned", cuMemsetD16, memory + 1, 1, 4);
    ROW("not aligned", cuMemsetD32, memory + 2, 1, 4);
    ROW("not aligned", cuStreamWriteValue32, nullptr, memory + 2, 1, 0);
    ROW("not aligned", cuStreamWriteValue64, nullptr, memory + 4, 1, 0);
    ROW("flag 1", cuStreamWriteValue32, nullptr, memory, 1, 1);
    ROW("nowhere", cuStreamWriteValue32, nullptr, 0x40, 1, 0);
    ROW("beyond the end", cuStreamWriteValue64, nullptr, memory + END, 1, 0);
    ROW("pitch below width", cuMemsetD2D8, memory, 8, 1, 16, 2);
    CUDA_MEMCPY2D rows = {};
    rows.srcMemoryType = CU_MEMORYTYPE_HOST;
    rows.srcHost = host;
    rows.srcPitch = 8;
    rows.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    rows.dstDevice = memory;
    rows.dstPitch = 64;
    rows.WidthInBytes = 16;
    rows.Height = 4;
    ROW("source pitch below width", cuMemcpy2D, &rows);
    rows.srcPitch = 16;
    rows.dstDevice = memory + END - 16;
    ROW("beyond the end", cuMemcpy2D, &rows);
    rows.srcMemoryType = (CUmemorytype)9;
    ROW("memory type 9", cuMemcpy2D, &rows);

    ROW("flags 8", cuStreamCreate, &stream, 8);
    ROW("null", cuStreamCreate, nullptr, 0);
    ROW("flags 0x100", cuEventCreate, &event, 0x100);
    ROW("null", cuEventCreate, nullptr, 0);
    MUST(cuStreamCreate, &stream, 0);
    MUST(cuStreamCreate, &gone, 0);
    MUST(cuStreamDestroy, gone);
    MUST(cuEventCreate, &event, 0);
    MUST(cuEventCreate, &untimed, CU_EVENT_DISABLE_TIMING);
    MUST(cuEventCreate, &dead, 0);
    MUST(cuEventDestroy, dead);
    ROW("the default stream", cuStreamDestroy, nullptr);
    ROW("flags 7", cuStreamWaitEvent, stream, event, 7);
    ROW("flags 7", cuEventRecordWithFlags, event, stream, 7);
    ROW("never recorded", cuEventElapsedTime, &time, event, event);
    MUST(cuEventRecord, untimed, stream);
    MUST(cuEventRecord, event, stream);
    MUST(cuStreamSynchronize, stream);
    ROW("without timing", cuEventElapsedTime, &time, untimed, event);
    ROW("null", cuEventElapsedTime, nullptr, event, event);

    ROW("null", cuModuleLoadData, &module, nullptr);
    ROW("no image", cuModuleLoadData, &module, "this is no image");
    ROW("broken PTX", cuModuleLoadData, &module, ".version 7.0\n.target sm_80\n.address_size 64\n.nonsense\n");
    ROW("no such file", cuModuleLoad, &module, "/nonexistent/image.ptx");
    MUST(cuModuleLoadData, &module, PTX);
    ROW("no such function", cuModuleGetFunction, &found, module, "missing");
    ROW("null name", cuModuleGetFunction, &found, module, nullptr);
    ROW("no such variable", cuModuleGetGlobal, &address, &bytes, module, "missing");
    MUST(cuModuleGetGlobal, &address, &bytes, module, "variable");
    MUST(cuModuleGetFunction, &nothing, module, "nothing");
    MUST(cuModuleGetFunction, &store, module, "store");
    MUST(cuModuleGetFunction, &bounded, module, "bounded");
    ROW("attribute 1000", cuFuncGetAttribute, &number, (CUfunction_attribute)1000, nothing);
    ROW("null", cuFuncGetAttribute, nullptr, CU_FUNC_ATTRIBUTE_NUM_REGS, nothing);
    ROW("a read-only attribute", cuFuncSetAttribute, nothing, CU_FUNC_ATTRIBUTE_NUM_REGS, 1);
    ROW("a mebibyte of shared memory", cuFuncSetAttribute, nothing,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 20);
    ROW("block of 0", cuOccupancyMaxActiveBlocksPerMultiprocessor, &number, nothing, 0, 0);

    // Launches: of a function that was launched before, and of one that was not.
    for (int round = 0; round < 2; round++) {
        ROW("grid of 0", cuLaunchKernel, nothing, 0, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
        ROW("grid 65536 high", cuLaunchKernel, nothing, 1, 65536, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
        ROW("block of 0", cuLaunchKernel, nothing, 1, 1, 1, 0, 1, 1, 0, stream, nullptr, nullptr);
        ROW("block of 2048", cuLaunchKernel, nothing, 1, 1, 1, 2048, 1, 1, 0, stream, nullptr, nullptr);
        ROW("block of 32 by 33", cuLaunchKernel, nothing, 1, 1, 1, 32, 33, 1, 0, stream, nullptr, nullptr);
        ROW("block 65 deep", cuLaunchKernel, nothing, 1, 1, 1, 1, 1, 65, 0, stream, nullptr, nullptr);
        ROW("a mebibyte of shared memory", cuLaunchKernel, nothing, 1, 1, 1, 1, 1, 1, 1 << 20, stream, nullptr, nullptr);
        ROW("without its parameters", cuLaunchKernel, store, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
        ROW("more threads than its bound", cuLaunchKernel, bounded, 1, 1, 1, 65, 1, 1, 0, stream, nullptr, nullptr);
        ROW("more threads than the device's", cuLaunchKernel, bounded, 1, 1, 1, 1025, 1, 1, 0, stream, nullptr, nullptr);
        ROW("more blocks than are resident", cuLaunchCooperativeKernel, nothing, 1 << 20, 1, 1, 32, 1, 1, 0, stream,
            nullptr);
        MUST(cuLaunchKernel, nothing, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
        MUST(cuLaunchKernel, bounded, 1, 1, 1, 64, 1, 1, 0, stream, nullptr, nullptr);
    }

    // Objects of another context.
    MUST(cuCtxCreate, &other, nullptr, 0, 0);
    MUST(cuStreamCreate, &foreign, 0);
    MUST(cuEventCreate, &elsewhere, 0);
    ROW("a function of another context", cuLaunchKernel, nothing, 1, 1, 1, 1, 1, 1, 0, foreign, nullptr, nullptr);
    ROW("a stream of another context", cuEventRecord, elsewhere, stream);
    MUST(cuCtxCreate, &doomed, nullptr, 0, 0);
    MUST(cuCtxDestroy, doomed);
    MUST(cuCtxSetCurrent, context);

    // Pools and mappings.
    ROW("null", cuDeviceGetDefaultMemPool, nullptr, 0);
    ROW("device 77", cuDeviceGetDefaultMemPool, &pool, 77);
    MUST(cuDeviceGetDefaultMemPool, &pool, 0);
    ROW("attribute 1000", cuMemPoolGetAttribute, pool, (CUmemPool_attribute)1000, &bytes);
    ROW("the default pool", cuMemPoolDestroy, pool);
    ROW("0 bytes", cuMemAllocAsync, &address, 0, stream);
    ROW("a pebibyte", cuMemAllocAsync, &address, 1ull << 50, stream);
    ROW("never allocated", cuMemFreeAsync, 0x12345600, stream);
    ROW("not a multiple of the granularity", cuMemAddressReserve, &address, 4097, 0, 0, 0);
    ROW("0 bytes", cuMemAddressReserve, &address, 0, 0, 0, 0);
    ROW("never reserved", cuMemAddressFree, 0x12345600, 2 << 20);
    ROW("never mapped", cuMemUnmap, 0x12345600, 2 << 20);
    ROW("no such handle", cuMemRelease, 0x12345600);

    // Everything works as if none of these calls had been made.
    unsigned value = 42;
    void *parameters[] = {&memory, &value};
    ROW("nothing wrong", cuLaunchKernel, store, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
    ROW("nothing wrong", cuStreamSynchronize, stream);
    ROW("nothing wrong", cuStreamQuery, stream);
    ROW("nothing wrong", cuCtxSynchronize);
    ROW("nothing wrong", cuMemcpyDtoH, &word, memory, sizeof word);
    bool good = word == 42;
    ROW("nothing wrong", cuCtxDestroy, other);
    ROW("nothing wrong", cuModuleUnload, module);
    ROW("nothing wrong", cuMemFree, memory);
    ROW("freed already", cuMemFree, memory);
    ROW("nothing wrong", cuDevicePrimaryCtxRelease, 0);
    return verdict(good);
}
