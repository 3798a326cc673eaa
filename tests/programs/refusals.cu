// One table of (call, bad argument, code): calls that the driver refuses at once, without further effect. A call is named as the
// driver exports it. A test compares the names with those of all served calls. A call that crashes or waits says so in its row.
#include "driver.h"
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <string>
#include <unistd.h>

// Programs may still make calls that cuda.h discourages.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .global .align 4 .b8 variable[64];
.visible .entry nothing() { ret; }
.visible .entry store(.param .u64 to, .param .u32 value)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [value];
    // Launches whose parameters were never set have zeroes.
    setp.eq.u64 %p1, %rd1, 0;
    @%p1 ret;
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
.visible .entry bounded() .maxntid 64, 1, 1 { ret; }
)";

// PTX of a kernel that takes 96 registers: its values are all alive at once.
static std::string of_many_registers() {
    std::string loads, stores;
    for (int i = 0; i < 400; i++) {
        std::string value = "%rd" + std::to_string(i), place = "[%to+" + std::to_string(8 * i) + "]";
        loads += "ld.volatile.global.u64 " + value + ", " + place + ";\n";
        stores += "st.volatile.global.u64 " + place + ", " + value + ";\n";
    }
    return ".version 7.0\n.target sm_80\n.address_size 64\n.visible .global .align 8 .b8 words[3200];\n"
           ".visible .entry large() .maxnreg 96 { .reg .b64 %rd<400>, %to;\nmov.u64 %to, words;\n" +
           loads + stores + "ret; }";
}

static bool passed = true;
static sigjmp_buf before;

// The driver may be unable to end in order.
[[noreturn]] static void leave() {
    int status = verdict(false);
    fflush(stdout);
    _exit(status);
}

static void leave_call(int signal) { siglongjmp(before, signal); }

// Prints the code of a call, which `make` makes of the function. The row begins before the call.
template <typename Make> static void row(const char *call, const char *argument, Make make) {
    printf("%-44s %-44s ", call, argument);
    fflush(stdout);
    void *function = find(call);
    if (!function) {
        printf("no symbol of the driver\n");
        return;
    }
    int signal = sigsetjmp(before, 1);
    if (signal == 0) {
        alarm(10);
        int code = make(function);
        alarm(0);
        printf("%d\n", code);
    } else {
        printf(signal == SIGALRM ? "does not return\n" : "crashes\n");
        passed = false;
        // It may hold a lock that every other call wants.
        if (signal == SIGALRM) leave();
    }
}
#define ROW(argument, name, ...) \
    row(NAME(name), argument, [&](void *function) { return ((decltype(&name))function)(__VA_ARGS__); })
// Calls about graphs and captures, all of whose arguments are 0.
static const char *const GRAPH_CALLS[] = {
    "cuGraphClone",
    "cuGraphNodeFindInClone",
    "cuGraphGetNodes",
    "cuGraphGetRootNodes",
    "cuGraphGetEdges",
    "cuGraphGetEdges_v2",
    "cuGraphNodeGetDependencies",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetDependentNodes",
    "cuGraphNodeGetDependentNodes_v2",
    "cuGraphAddDependencies",
    "cuGraphAddDependencies_v2",
    "cuGraphRemoveDependencies",
    "cuGraphRemoveDependencies_v2",
    "cuGraphDestroyNode",
    "cuGraphNodeGetType",
    "cuGraphNodeGetContainingGraph",
    "cuGraphNodeGetLocalId",
    "cuGraphNodeGetToolsId",
    "cuGraphGetId",
    "cuGraphDebugDotPrint",
    "cuGraphAddKernelNode",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddMemcpyNode",
    "cuGraphAddMemsetNode",
    "cuGraphAddHostNode",
    "cuGraphAddChildGraphNode",
    "cuGraphChildGraphNodeGetGraph",
    "cuGraphAddEmptyNode",
    "cuGraphAddEventRecordNode",
    "cuGraphAddEventWaitNode",
    "cuGraphAddBatchMemOpNode",
    "cuGraphAddNode",
    "cuGraphAddNode_v2",
    "cuGraphAddNode_v3",
    "cuGraphAddMemAllocNode",
    "cuGraphAddMemFreeNode",
    "cuGraphMemAllocNodeGetParams",
    "cuGraphMemFreeNodeGetParams",
    "cuGraphConditionalHandleCreate",
    "cuGraphKernelNodeGetParams",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphKernelNodeSetParams",
    "cuGraphKernelNodeSetParams_v2",
    "cuGraphMemcpyNodeGetParams",
    "cuGraphMemcpyNodeSetParams",
    "cuGraphMemsetNodeGetParams",
    "cuGraphMemsetNodeSetParams",
    "cuGraphHostNodeGetParams",
    "cuGraphHostNodeSetParams",
    "cuGraphEventRecordNodeGetEvent",
    "cuGraphEventRecordNodeSetEvent",
    "cuGraphEventWaitNodeGetEvent",
    "cuGraphEventWaitNodeSetEvent",
    "cuGraphBatchMemOpNodeGetParams",
    "cuGraphBatchMemOpNodeSetParams",
    "cuGraphNodeSetParams",
    "cuGraphNodeSetParams_v2",
    "cuGraphNodeGetParams",
    "cuGraphKernelNodeGetAttribute",
    "cuGraphKernelNodeSetAttribute",
    "cuGraphKernelNodeCopyAttributes",
    "cuGraphInstantiate",
    "cuGraphInstantiate_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecDestroy",
    "cuGraphExecGetFlags",
    "cuGraphExecGetId",
    "cuGraphExecKernelNodeSetParams",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecMemcpyNodeSetParams",
    "cuGraphExecMemsetNodeSetParams",
    "cuGraphExecHostNodeSetParams",
    "cuGraphExecChildGraphNodeSetParams",
    "cuGraphExecEventRecordNodeSetEvent",
    "cuGraphExecEventWaitNodeSetEvent",
    "cuGraphExecBatchMemOpNodeSetParams",
    "cuGraphExecNodeSetParams",
    "cuGraphNodeSetEnabled",
    "cuGraphNodeGetEnabled",
    "cuGraphExecUpdate",
    "cuGraphExecUpdate_v2",
    "cuUserObjectCreate",
    "cuUserObjectRetain",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
    "cuGraphReleaseUserObject",
    "cuGraphInstantiateWithParams",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuStreamGetCaptureInfo",
    "cuStreamBeginCapture",
    "cuStreamBeginCapture_v2",
    "cuStreamBeginCaptureToGraph",
    "cuStreamBeginRecaptureToGraph",
    "cuStreamEndCapture",
    "cuStreamUpdateCaptureDependencies",
    "cuStreamUpdateCaptureDependencies_v2",
};

// Calls about arrays, textures and surfaces, all of whose arguments are 0. Copies have bytes.
static const char *const IMAGE_CALLS[] = {
    "cuArrayCreate_v2",
    "cuArray3DCreate_v2",
    "cuArrayDestroy",
    "cuArrayGetDescriptor_v2",
    "cuArray3DGetDescriptor_v2",
    "cuArrayGetSparseProperties",
    "cuArrayGetMemoryRequirements",
    "cuArrayGetPlane",
    "cuMipmappedArrayCreate",
    "cuMipmappedArrayGetLevel",
    "cuMipmappedArrayDestroy",
    "cuMipmappedArrayGetSparseProperties",
    "cuMipmappedArrayGetMemoryRequirements",
    "cuTexObjectCreate",
    "cuTexObjectDestroy",
    "cuTexObjectGetResourceDesc",
    "cuTexObjectGetTextureDesc",
    "cuTexObjectGetResourceViewDesc",
    "cuSurfObjectCreate",
    "cuSurfObjectDestroy",
    "cuSurfObjectGetResourceDesc",
    "cuModuleGetTexRef",
    "cuModuleGetSurfRef",
    "cuParamSetTexRef",
    "cuTexRefCreate",
    "cuTexRefDestroy",
    "cuTexRefSetArray",
    "cuTexRefSetMipmappedArray",
    "cuTexRefSetAddress_v2",
    "cuTexRefSetAddress2D_v2",
    "cuTexRefSetAddress2D_v3",
    "cuTexRefSetFormat",
    "cuTexRefSetAddressMode",
    "cuTexRefSetFilterMode",
    "cuTexRefSetMipmapFilterMode",
    "cuTexRefSetMipmapLevelBias",
    "cuTexRefSetMipmapLevelClamp",
    "cuTexRefSetMaxAnisotropy",
    "cuTexRefSetBorderColor",
    "cuTexRefSetFlags",
    "cuTexRefGetAddress_v2",
    "cuTexRefGetArray",
    "cuTexRefGetMipmappedArray",
    "cuTexRefGetAddressMode",
    "cuTexRefGetFilterMode",
    "cuTexRefGetFormat",
    "cuTexRefGetMipmapFilterMode",
    "cuTexRefGetMipmapLevelBias",
    "cuTexRefGetMipmapLevelClamp",
    "cuTexRefGetMaxAnisotropy",
    "cuTexRefGetBorderColor",
    "cuTexRefGetFlags",
    "cuSurfRefSetArray",
    "cuSurfRefGetArray",
};

// A call that cuda.h does not declare under this name, as an older version; with the types of its parameters.
#define UNDECLARED(argument, name, types, ...) \
    row(#name, argument, [&](void *function) { return ((CUresult(*) types)function)(__VA_ARGS__); })

int main() {
    CUdevice device = 0;
    CUcontext context = nullptr, other = nullptr, doomed = nullptr;
    CUstream stream = nullptr, foreign = nullptr, gone = nullptr;
    CUevent event = nullptr, untimed = nullptr, elsewhere = nullptr, dead = nullptr;
    CUmodule module = nullptr, other_module = nullptr, large_module = nullptr;
    CUlibrary held = nullptr, library = nullptr;
    CUkernel kernel = nullptr, other_kernel = nullptr;
    CUfunction nothing = nullptr, store = nullptr, bounded = nullptr, large = nullptr, found = nullptr;
    CUdeviceptr memory = 0, address = 0;
    CUmemoryPool pool = nullptr, other_pool = nullptr;
    CUmemGenericAllocationHandle block = 0, other_block = 0;
    char text[64], host[256] = {};
    int number = 0;
    unsigned word = 0;
    unsigned long long wide = 0;
    size_t bytes = 0;
    float time = 0;
    CUuuid uuid;
    const char *name = nullptr;
    void *pinned = nullptr, *place = nullptr;
    const void *table = nullptr;

    struct sigaction action = {};
    action.sa_handler = leave_call;
    for (int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGALRM}) sigaction(signal, &action, nullptr);
    ROW("before cuInit", cuDeviceGet, &device, 0);
    ROW("before cuInit", cuCtxGetCurrent, &context);
    ROW("flags 1", cuInit, 1);
    MUST(cuInit, 0);
    ROW("null", cuDriverGetVersion, nullptr);
    // NVIDIA's driver reads the name.
    if (undefined_too()) ROW("null name", cuGetProcAddress, nullptr, &place, 12000, 0, nullptr);
    ROW("null", cuGetProcAddress, "cuInit", nullptr, 12000, 0, nullptr);
    ROW("no such function", cuGetProcAddress, "cuNothing", &place, 12000, 0, nullptr);
    ROW("flags 0x100", cuGetProcAddress, "cuInit", &place, 12000, 0x100, nullptr);
    if (undefined_too()) UNDECLARED("null name", cuGetProcAddress, (const char *, void **, int, cuuint64_t), nullptr, &place, 12000, 0);
    UNDECLARED("no such function", cuGetProcAddress, (const char *, void **, int, cuuint64_t), "cuNothing", &place, 12000, 0);
    memset(&uuid, 0, sizeof uuid);
    ROW("null", cuGetExportTable, nullptr, &uuid);
    ROW("no such table", cuGetExportTable, &table, &uuid);
    ROW("null function", cuLogsRegisterCallback, nullptr, nullptr, nullptr);
    ROW("null", cuLogsUnregisterCallback, nullptr);
    ROW("null", cuLogsCurrent, nullptr, 0);
    ROW("null path", cuLogsDumpToFile, nullptr, nullptr, 0);
    ROW("null", cuLogsDumpToMemory, nullptr, nullptr, nullptr, 0);

    ROW("device 77", cuDeviceGet, &device, 77);
    ROW("device -1", cuDeviceGet, &device, -1);
    ROW("null", cuDeviceGet, nullptr, 0);
    ROW("null", cuDeviceGetCount, nullptr);
    ROW("device 77", cuDeviceGetName, text, 64, 77);
    ROW("null", cuDeviceGetName, nullptr, 64, 0);
    ROW("length 0", cuDeviceGetName, text, 0, 0);
    ROW("attribute 100000", cuDeviceGetAttribute, &number, (CUdevice_attribute)100000, 0);
    ROW("attribute 0", cuDeviceGetAttribute, &number, (CUdevice_attribute)0, 0);
    ROW("device 77", cuDeviceGetAttribute, &number, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 77);
    ROW("null", cuDeviceGetAttribute, nullptr, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0);
    ROW("device 77", cuDeviceTotalMem, &bytes, 77);
    ROW("device 77", cuDeviceGetUuid, &uuid, 77);
    ROW("null", cuDeviceTotalMem, nullptr, 0);
    ROW("null", cuDeviceGetUuid, nullptr, 0);
    UNDECLARED("device 77", cuDeviceGetUuid, (CUuuid *, CUdevice), &uuid, 77);
    UNDECLARED("null", cuDeviceGetUuid, (CUuuid *, CUdevice), nullptr, 0);
    CUdevprop properties;
    ROW("device 77", cuDeviceGetProperties, &properties, 77);
    ROW("null", cuDeviceGetProperties, nullptr, 0);
    ROW("device 77", cuDeviceComputeCapability, &number, &number, 77);
    ROW("null", cuDeviceComputeCapability, nullptr, &number, 0);
    ROW("device 77", cuDeviceGetPCIBusId, text, 64, 77);
    ROW("null", cuDeviceGetPCIBusId, nullptr, 64, 0);
    ROW("length 0", cuDeviceGetPCIBusId, text, 0, 0);
    ROW("no such device", cuDeviceGetByPCIBusId, &number, "fefe:fe:1e.0");
    ROW("no address", cuDeviceGetByPCIBusId, &number, "nonsense");
    ROW("null", cuDeviceGetByPCIBusId, nullptr, "fefe:fe:1e.0");
    ROW("null address", cuDeviceGetByPCIBusId, &number, nullptr);
    CUatomicOperation operation = CU_ATOMIC_OPERATION_INTEGER_ADD, no_operation = (CUatomicOperation)99;
    ROW("device 77", cuDeviceGetHostAtomicCapabilities, &word, &operation, 1, 77);
    ROW("operation 99", cuDeviceGetHostAtomicCapabilities, &word, &no_operation, 1, 0);
    ROW("no operation", cuDeviceGetHostAtomicCapabilities, &word, &operation, 0, 0);
    ROW("null", cuDeviceGetHostAtomicCapabilities, nullptr, &operation, 1, 0);
    ROW("device 77", cuDeviceGetP2PAtomicCapabilities, &word, &operation, 1, 0, 77);
    ROW("one device", cuDeviceGetP2PAtomicCapabilities, &word, &operation, 1, 0, 0);
    ROW("device 77", cuDeviceGetLuid, text, &word, 77);
    ROW("another system", cuDeviceGetLuid, text, &word, 0);
    ROW("device 77", cuDeviceGetGraphMemAttribute, 77, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &wide);
    ROW("attribute 9", cuDeviceGetGraphMemAttribute, 0, (CUgraphMem_attribute)9, &wide);
    ROW("null", cuDeviceGetGraphMemAttribute, 0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, nullptr);
    ROW("a read-only attribute", cuDeviceSetGraphMemAttribute, 0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &wide);
    ROW("null", cuDeviceSetGraphMemAttribute, 0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, nullptr);
    ROW("device 77", cuDeviceCanAccessPeer, &number, 0, 77);
    ROW("null", cuDeviceCanAccessPeer, nullptr, 0, 0);
    ROW("device 77", cuDeviceGetP2PAttribute, &number, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, 0, 77);
    ROW("the same device", cuDeviceGetP2PAttribute, &number, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, 0, 0);
    ROW("device 77", cuDeviceGetExecAffinitySupport, &number, CU_EXEC_AFFINITY_TYPE_SM_COUNT, 77);
    ROW("type 9", cuDeviceGetExecAffinitySupport, &number, (CUexecAffinityType)9, 0);
    ROW("null", cuDeviceGetExecAffinitySupport, nullptr, CU_EXEC_AFFINITY_TYPE_SM_COUNT, 0);
    ROW("device 77", cuDeviceGetTexture1DLinearMaxWidth, &bytes, CU_AD_FORMAT_FLOAT, 1, 77);
    ROW("format 9999", cuDeviceGetTexture1DLinearMaxWidth, &bytes, (CUarray_format)9999, 1, 0);
    ROW("null", cuDeviceGetTexture1DLinearMaxWidth, nullptr, CU_AD_FORMAT_FLOAT, 1, 0);
    ROW("code 12345", cuGetErrorName, (CUresult)12345, &name);
    ROW("code 12345", cuGetErrorString, (CUresult)12345, &name);
    ROW("null", cuGetErrorName, CUDA_SUCCESS, nullptr);
    ROW("null", cuGetErrorString, CUDA_SUCCESS, nullptr);

    ROW("without a context", cuMemAlloc, &address, 64);
    ROW("without a context", cuStreamCreate, &stream, 0);
    ROW("without a context", cuEventCreate, &event, 0);
    ROW("without a context", cuCtxSynchronize);
    ROW("without a context", cuModuleLoadData, &module, PTX);
    ROW("without a context", cuMemGetInfo, &bytes, &bytes);
    ROW("without a context", cuFlushGPUDirectRDMAWrites, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
    UNDECLARED("without a context", cuProfilerStart, (void));
    UNDECLARED("without a context", cuProfilerStop, (void));
    ROW("without a context", cuCtxResetPersistingL2Cache);
    ROW("without a context", cuCtxPopCurrent, &other);
    UNDECLARED("without a context", cuCtxPopCurrent, (CUcontext *), &other);
    ROW("without a context", cuCtxGetDevice, &device);
    ROW("without a context", cuCtxGetFlags, &word);
    ROW("without a context", cuCtxSetFlags, 0);
    ROW("without a context", cuCtxGetApiVersion, nullptr, &word);
    ROW("without a context", cuCtxGetId, nullptr, &wide);
    ROW("without a context", cuCtxGetDevice_v2, &device, nullptr);
    ROW("without a context", cuCtxSynchronize_v2, nullptr);
    CUmemoryPool no_pool;
    CUmemPoolPtrExportData no_data = {};
    int no_file = -1;
    ROW("no pool", cuMemPoolExportToShareableHandle, &no_file, nullptr, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    ROW("flag 1", cuMemPoolExportToShareableHandle, &no_file, nullptr, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1);
    ROW("no file", cuMemPoolImportFromShareableHandle, &no_pool, (void *)(uintptr_t)99999,
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    ROW("fabric", cuMemPoolImportFromShareableHandle, &no_pool, nullptr, CU_MEM_HANDLE_TYPE_FABRIC, 0);
    ROW("null", cuMemPoolExportPointer, nullptr, 0x40);
    ROW("null", cuMemPoolImportPointer, nullptr, nullptr, &no_data);
    CUipcEventHandle no_event = {};
    ROW("null", cuIpcGetEventHandle, nullptr, nullptr);
    ROW("no event", cuIpcGetEventHandle, &no_event, nullptr);
    ROW("zeroes", cuIpcOpenEventHandle, (CUevent *)&other, no_event);
    ROW("flag 1", cuCtxEnablePeerAccess, context, 1);
    ROW("no context", cuCtxEnablePeerAccess, nullptr, 0);
    ROW("no context", cuCtxDisablePeerAccess, nullptr);
    ROW("no context", cuCtxRecordEvent, nullptr, nullptr);
    ROW("no context", cuCtxWaitEvent, nullptr, nullptr);
    CUdevResource sm_resource = {};
    CUdevResourceDesc descriptor = nullptr;
    CUgreenCtx green = nullptr;
    CU_DEV_SM_RESOURCE_GROUP_PARAMS group = {};
    unsigned groups = 1;
    unsigned long long green_id = 0;
    ROW("device 77", cuDeviceGetDevResource, 77, &sm_resource, CU_DEV_RESOURCE_TYPE_SM);
    ROW("null", cuDeviceGetDevResource, 0, nullptr, CU_DEV_RESOURCE_TYPE_SM);
    ROW("type 2", cuDeviceGetDevResource, 0, &sm_resource, (CUdevResourceType)2);
    ROW("existing queues", cuDeviceGetDevResource, 0, &sm_resource, CU_DEV_RESOURCE_TYPE_WORKQUEUE);
    ROW("no context", cuCtxGetDevResource, nullptr, &sm_resource, CU_DEV_RESOURCE_TYPE_SM);
    ROW("no green context", cuGreenCtxGetDevResource, nullptr, &sm_resource, CU_DEV_RESOURCE_TYPE_SM);
    ROW("type 1000", cuStreamGetDevResource, nullptr, &sm_resource, CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG);
    ROW("no resource", cuDevSmResourceSplitByCount, &sm_resource, &groups, &sm_resource, nullptr, 0, 0);
    ROW("no resource", cuDevSmResourceSplit, &sm_resource, 1, &sm_resource, nullptr, 0, &group);
    MUST(cuDeviceGetDevResource, 0, &sm_resource, CU_DEV_RESOURCE_TYPE_SM);
    ROW("null", cuDevSmResourceSplitByCount, nullptr, nullptr, &sm_resource, nullptr, 0, 0);
    ROW("flag 4", cuDevSmResourceSplitByCount, nullptr, &groups, &sm_resource, nullptr, 4, 0);
    ROW("flag 1", cuDevSmResourceSplit, nullptr, 1, &sm_resource, nullptr, 1, &group);
    ROW("no groups", cuDevSmResourceSplit, nullptr, 0, &sm_resource, nullptr, 0, &group);
    ROW("null", cuDevSmResourceSplit, nullptr, 1, &sm_resource, nullptr, 0, nullptr);
    ROW("more groups than multiprocessors", cuDevSmResourceSplit, nullptr, ~0u, &sm_resource, nullptr, 0, &group);
    ROW("null", cuDevResourceGenerateDesc, nullptr, &sm_resource, 1);
    ROW("no resources", cuDevResourceGenerateDesc, &descriptor, &sm_resource, 0);
    sm_resource.type = CU_DEV_RESOURCE_TYPE_INVALID;
    ROW("no resource", cuDevResourceGenerateDesc, &descriptor, &sm_resource, 1);
    ROW("no descriptor", cuGreenCtxCreate, &green, nullptr, 0, CU_GREEN_CTX_DEFAULT_STREAM);
    ROW("device 77", cuGreenCtxCreate, &green, nullptr, 77, CU_GREEN_CTX_DEFAULT_STREAM);
    ROW("no green context", cuGreenCtxDestroy, nullptr);
    ROW("no green context", cuCtxFromGreenCtx, &context, nullptr);
    ROW("no green context", cuGreenCtxStreamCreate, &stream, nullptr, CU_STREAM_NON_BLOCKING, 0);
    ROW("no green context", cuGreenCtxRecordEvent, nullptr, nullptr);
    ROW("no green context", cuGreenCtxWaitEvent, nullptr, nullptr);
    ROW("no green context", cuGreenCtxGetId, nullptr, &green_id);
    ROW("null", cuStreamGetGreenCtx, nullptr, nullptr);
    ROW("without a context", cuCtxGetStreamPriorityRange, &number, &number);
    ROW("without a context", cuCtxGetCacheConfig, (CUfunc_cache *)&number);
    ROW("without a context", cuCtxGetSharedMemConfig, (CUsharedconfig *)&number);
    ROW("without a context", cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 1024);
    ROW("without a context", cuStreamSynchronize, nullptr);
    ROW("without a context", cuStreamQuery, nullptr);
    ROW("without a context", cuMemFree, 0x12345600);
    ROW("without a context", cuMemHostAlloc, &pinned, 64, 0);
    ROW("without a context", cuLibraryGetModule, &module, nullptr);
    ROW("device 77", cuDevicePrimaryCtxRetain, &context, 77);
    ROW("null", cuDevicePrimaryCtxRetain, nullptr, 0);
    ROW("device 77", cuDevicePrimaryCtxRelease, 77);
    UNDECLARED("device 77", cuDevicePrimaryCtxRelease, (CUdevice), 77);
    UNDECLARED("never retained", cuDevicePrimaryCtxRelease, (CUdevice), 0);
    ROW("device 77", cuDevicePrimaryCtxReset, 77);
    UNDECLARED("device 77", cuDevicePrimaryCtxReset, (CUdevice), 77);
    ROW("device 77", cuDevicePrimaryCtxSetFlags, 77, 0);
    UNDECLARED("device 77", cuDevicePrimaryCtxSetFlags, (CUdevice, unsigned), 77, 0);
    UNDECLARED("flags 0x1000", cuDevicePrimaryCtxSetFlags, (CUdevice, unsigned), 0, 0x1000);
    ROW("device 77", cuDevicePrimaryCtxGetState, 77, &word, &number);
    ROW("null flags", cuDevicePrimaryCtxGetState, 0, nullptr, &number);
    ROW("null state", cuDevicePrimaryCtxGetState, 0, &word, nullptr);
    ROW("device 77", cuCtxCreate, &other, nullptr, 0, 77);
    ROW("null", cuCtxCreate, nullptr, nullptr, 0, 0);
    ROW("flags 0x1000", cuCtxCreate, &other, nullptr, 0x1000, 0);
    UNDECLARED("device 77", cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice), &other, 0, 77);
    UNDECLARED("null", cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice), nullptr, 0, 0);
    UNDECLARED("flags 0x1000", cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice), &other, 0x1000, 0);
    UNDECLARED("device 77", cuCtxCreate_v3, (CUcontext *, CUexecAffinityParam *, int, unsigned, CUdevice), &other, nullptr, 0, 0, 77);
    UNDECLARED("null", cuCtxCreate_v3, (CUcontext *, CUexecAffinityParam *, int, unsigned, CUdevice), nullptr, nullptr, 0, 0, 0);
    ROW("device 77", cuDeviceGraphMemTrim, 77);
    ROW("no graphs", cuDeviceGraphMemTrim, 0);
    CUgraph graph;
    ROW("null", cuGraphCreate, nullptr, 0);
    ROW("flags 1", cuGraphCreate, &graph, 1);
    ROW("null graph", cuGraphDestroy, nullptr);
    ROW("empty", cuGraphCreate, &graph, 0);
    ROW("empty", cuGraphDestroy, graph);
    using Zeroes = CUresult (*)(size_t, size_t, size_t, size_t, size_t, size_t, size_t);
    for (const char *call : GRAPH_CALLS) row(call, "zeroes", [](void *function) { return ((Zeroes)function)(0, 0, 0, 0, 0, 0, 0); });
    for (const char *call : IMAGE_CALLS) row(call, "zeroes", [](void *function) { return ((Zeroes)function)(0, 0, 0, 0, 0, 0, 0); });
    ROW("never retained", cuDevicePrimaryCtxRelease, 0);
    ROW("flags 0x1000", cuDevicePrimaryCtxSetFlags, 0, 0x1000);
    MUST(cuDevicePrimaryCtxRetain, &context, 0);
    ROW("a primary context", cuCtxDestroy, context);
    ROW("null", cuCtxDestroy, nullptr);
    UNDECLARED("a primary context", cuCtxDestroy, (CUcontext), context);
    UNDECLARED("null", cuCtxDestroy, (CUcontext), nullptr);
    ROW("null", cuCtxAttach, nullptr, 0);
    ROW("flags 1", cuCtxAttach, &other, 1);
    ROW("null", cuCtxDetach, nullptr);
    ROW("null", cuCtxPushCurrent, nullptr);
    UNDECLARED("null", cuCtxPushCurrent, (CUcontext), nullptr);
    // A misaligned descriptor ends in the second.
    alignas(64) CUtensorMap maps[2];
    CUtensorMap &map = maps[0];
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
    const cuuint64_t image[5] = {64, 32, 32, 8, 1}, image_strides[4] = {256, 8192, 262144, 2097152};
    const int lower[3] = {-1, -1, 0}, upper[3] = {1, 1, 0}, far[3] = {200, 0, 0};
#define COLUMNS(argument, map, rank, lower, channels, pixels)                                                           \
    ROW(argument, cuTensorMapEncodeIm2col, map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, rank, (void *)0x700000000000, image,   \
        image_strides, lower, upper, channels, pixels, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,                            \
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    COLUMNS("good", &map, 4, lower, 32, 64);
    COLUMNS("rank 2", &map, 2, lower, 32, 64);
    COLUMNS("rank 6", &map, 6, lower, 32, 64);
    COLUMNS("null corner", &map, 4, nullptr, 32, 64);
    COLUMNS("a corner out of range", &map, 4, far, 32, 64);
    COLUMNS("channels of 4 bytes", &map, 4, lower, 1, 64);
    COLUMNS("4096 pixels", &map, 4, lower, 32, 4096);
    COLUMNS("a misaligned descriptor", (CUtensorMap *)((char *)&map + 8), 4, lower, 32, 64);
#define WIDE(argument, map, rank, mode)                                                                                 \
    ROW(argument, cuTensorMapEncodeIm2colWide, map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, rank, (void *)0x700000000000,      \
        image, image_strides, -1, 1, 32, 64, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapIm2ColWideMode)mode,     \
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    WIDE("good", &map, 4, 0);
    WIDE("rank 2", &map, 2, 0);
    WIDE("mode 9", &map, 4, 9);
    ROW("good", cuTensorMapReplaceAddress, &map, (void *)0x710000000000);
    ROW("a misaligned address", cuTensorMapReplaceAddress, &map, (void *)0x710000000008);
    ROW("a misaligned descriptor", cuTensorMapReplaceAddress, (CUtensorMap *)((char *)&map + 8), (void *)0x710000000000);
    ROW("null", cuTensorMapReplaceAddress, nullptr, (void *)0x710000000000);
    ROW("null", cuCtxGetCurrent, nullptr);
    ROW("null", cuCtxGetDevice, nullptr);
    ROW("null", cuCtxGetDevice_v2, nullptr, context);
    ROW("null", cuCtxGetFlags, nullptr);
    ROW("flags 0x1000", cuCtxSetFlags, 0x1000);
    ROW("null", cuCtxGetId, context, nullptr);
    ROW("null", cuCtxGetApiVersion, context, nullptr);
    ROW("null", cuCtxGetCacheConfig, nullptr);
    ROW("null", cuCtxGetSharedMemConfig, nullptr);
    ROW("config 9", cuCtxSetSharedMemConfig, (CUsharedconfig)9);
    CUexecAffinityParam affinity;
    ROW("null", cuCtxGetExecAffinity, nullptr, CU_EXEC_AFFINITY_TYPE_SM_COUNT);
    ROW("type 9", cuCtxGetExecAffinity, &affinity, (CUexecAffinityType)9);
    CUstreamCaptureMode mode = (CUstreamCaptureMode)9;
    ROW("null", cuThreadExchangeStreamCaptureMode, nullptr);
    ROW("mode 9", cuThreadExchangeStreamCaptureMode, &mode);
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
    ROW("null", cuMemAllocPitch, nullptr, &bytes, 64, 4, 4);
    ROW("null", cuMemAllocHost, nullptr, 64);
    ROW("null", cuMemHostAlloc, nullptr, 64, 0);
    ROW("null", cuMemFreeHost, nullptr);
    MUST(cuMemHostAlloc, &pinned, 64, 0);
    ROW("not pinned", cuMemHostGetDevicePointer, &address, host, 0);
    ROW("null", cuMemHostGetDevicePointer, nullptr, pinned, 0);
    ROW("flags 1", cuMemHostGetDevicePointer, &address, pinned, 1);
    ROW("not pinned", cuMemHostGetFlags, &word, host);
    ROW("null", cuMemHostGetFlags, nullptr, pinned);
    ROW("pinned", cuMemHostRegister, pinned, 64, 0);
    ROW("pinned", cuMemHostUnregister, pinned);
    MUST(cuMemFreeHost, pinned);
    ROW("never allocated", cuMemFreeHost, host);
    ROW("null", cuMemHostRegister, nullptr, 64, 0);
    ROW("0 bytes", cuMemHostRegister, host, 0, 0);
    ROW("flags 0x100", cuMemHostRegister, host, 64, 0x100);
    ROW("memory of a device's registers", cuMemHostRegister, host, 64, 4);
    ROW("null", cuMemHostUnregister, nullptr);
    ROW("not registered", cuMemHostUnregister, host);
    ROW("flags 9", cuMemAllocManaged, &address, 64, 9);
    // As long as a page of the device, so that its end is the end of the mapping.
    const size_t END = 2 << 20;
    MUST(cuMemAlloc, &memory, END);
    ROW("inside an allocation", cuMemFree, memory + 512);
    ROW("not device memory", cuMemGetAddressRange, &address, &bytes, 0x40);
    ROW("null", cuPointerGetAttribute, nullptr, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory);
    ROW("attribute 1000", cuPointerGetAttribute, &address, (CUpointer_attribute)1000, memory);
    ROW("unknown address", cuPointerGetAttribute, &address, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 0x40);
    CUpointer_attribute known = CU_POINTER_ATTRIBUTE_MEMORY_TYPE, unknown = (CUpointer_attribute)1000;
    void *data[] = {&word};
    ROW("null attributes", cuPointerGetAttributes, 1, nullptr, data, memory);
    ROW("null", cuPointerGetAttributes, 1, &known, nullptr, memory);
    ROW("attribute 1000", cuPointerGetAttributes, 1, &unknown, data, memory);
    ROW("no attributes", cuPointerGetAttributes, 0, &known, data, memory);
    ROW("attribute 1000", cuPointerSetAttribute, &word, (CUpointer_attribute)1000, memory);
    ROW("null", cuPointerSetAttribute, nullptr, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
    ROW("unknown address", cuPointerSetAttribute, &word, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, 0x40);

    CUarray line = nullptr, plane = nullptr, no_array = nullptr;
    CUDA_ARRAY_DESCRIPTOR flat = {16, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1}, square = {8, 8, CU_AD_FORMAT_FLOAT, 2};
    MUST(cuArrayCreate, &line, &flat);
    MUST(cuArrayCreate, &plane, &square);
    ROW("a null array", cuMemcpyAtoA, nullptr, 0, line, 0, 16);
    ROW("beyond the end", cuMemcpyAtoA, line, 8, line, 0, 16);
    ROW("a null array", cuMemcpyAtoD, memory, nullptr, 0, 16);
    ROW("beyond the end", cuMemcpyAtoD, memory, line, 1, 16);
    ROW("to nowhere", cuMemcpyAtoD, 0x40, line, 0, 16);
    ROW("a null array", cuMemcpyAtoH, host, nullptr, 0, 16);
    ROW("an offset that overflows", cuMemcpyAtoH, host, line, ~(size_t)0, 16);
    ROW("a null array", cuMemcpyDtoA, nullptr, 0, memory, 16);
    ROW("from nowhere", cuMemcpyDtoA, line, 0, 0x40, 16);
    ROW("a null array", cuMemcpyHtoA, nullptr, 0, host, 16);
    ROW("beyond the end", cuMemcpyHtoA, line, 8, host, 16);
    ROW("between two elements", cuMemcpyHtoA, plane, 4, host, 8);
    ROW("a null array", cuMemcpyAtoHAsync, host, nullptr, 0, 16, nullptr);
    ROW("beyond the end", cuMemcpyAtoHAsync, host, line, 8, 16, nullptr);
    ROW("a null array", cuMemcpyHtoAAsync, nullptr, 0, host, 16, nullptr);
    ROW("beyond the end", cuMemcpyHtoAAsync, line, 8, host, 16, nullptr);
    auto shaped = [&](const char *argument, size_t width, size_t height, size_t depth, int format, unsigned channels, unsigned flags) {
        CUDA_ARRAY3D_DESCRIPTOR shape = {width, height, depth, (CUarray_format)format, channels, flags};
        ROW(argument, cuArray3DCreate, &no_array, &shape);
    };
    shaped("width 0", 0, 4, 4, 1, 1, 0);
    shaped("a depth without a height", 4, 0, 4, 1, 1, 0);
    shaped("three channels", 4, 4, 0, 1, 3, 0);
    shaped("format 0x7f", 4, 4, 0, 0x7f, 1, 0);
    shaped("a format of planes", 4, 4, 0, 0xb0, 3, 0);
    shaped("flags 0x1000", 4, 4, 0, 1, 1, 0x1000);
    shaped("a sparse array", 4, 4, 0, 1, 1, CUDA_ARRAY3D_SPARSE);
    shaped("five faces of a cube", 4, 4, 5, 1, 1, CUDA_ARRAY3D_CUBEMAP);
    shaped("extents that overflow", ~(size_t)0, ~(size_t)0, ~(size_t)0, 0x20, 4, 0);
    MUST(cuArrayDestroy, plane);
    ROW("an array that was destroyed", cuArrayDestroy, plane);
    CUDA_ARRAY_DESCRIPTOR described;
    ROW("an array that was destroyed", cuArrayGetDescriptor, &described, plane);
    CUDA_RESOURCE_DESC resource = {};
    CUDA_TEXTURE_DESC sampling = {};
    CUtexObject texture = 0;
    CUsurfObject surface = 0;
    resource.resType = CU_RESOURCE_TYPE_ARRAY;
    resource.res.array.hArray = plane;
    ROW("an array that was destroyed", cuTexObjectCreate, &texture, &resource, &sampling, nullptr);
    resource.res.array.hArray = line;
    ROW("an array without surfaces", cuSurfObjectCreate, &surface, &resource);
    resource.flags = 1;
    ROW("flags 1", cuTexObjectCreate, &texture, &resource, &sampling, nullptr);
    resource = {};
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear.devPtr = memory;
    resource.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT8;
    resource.res.linear.numChannels = 1;
    resource.res.linear.sizeInBytes = ~(size_t)0;
    ROW("bytes that overflow", cuTexObjectCreate, &texture, &resource, &sampling, nullptr);
    resource.res.linear.sizeInBytes = 16;
    resource.res.linear.devPtr = 0x200;
    ROW("nowhere", cuTexObjectCreate, &texture, &resource, &sampling, nullptr);
    ROW("an object that never was", cuTexObjectDestroy, 0x77777);
    ROW("an object that never was", cuSurfObjectDestroy, 0x77777);
    ROW("no such reference", cuModuleGetTexRef, (CUtexref *)&place, module, "variable");
    ROW("no such reference", cuModuleGetSurfRef, (CUsurfref *)&place, module, "nothing");
    MUST(cuArrayDestroy, line);
    ROW("to nowhere", cuMemcpyHtoD, 0x40, host, 16);
    ROW("from null", cuMemcpyHtoD, memory, nullptr, 16);
    ROW("beyond the end", cuMemcpyHtoD, memory + END - 6, host, 16);
    ROW("nothing to nowhere", cuMemcpyHtoD, 0x40, host, 0);
    ROW("from nowhere", cuMemcpyDtoH, host, 0x40, 16);
    ROW("to null", cuMemcpyDtoH, nullptr, memory, 16);
    ROW("beyond the end", cuMemcpyDtoH, host, memory + END - 6, 16);
    ROW("from nowhere", cuMemcpyDtoD, memory, 0x40, 16);
    ROW("beyond the end", cuMemcpyDtoD, memory, memory + END - 6, 16);
    ROW("beyond the end", cuMemcpy, memory + END - 6, memory, 16);
    ROW("from beyond the end", cuMemcpy, memory, memory + END - 6, 16);
    ROW("beyond the end", cuMemcpyAsync, memory + END - 6, memory, 16, nullptr);
    ROW("to nowhere", cuMemcpyHtoDAsync, 0x40, host, 16, nullptr);
    ROW("from null", cuMemcpyHtoDAsync, memory, nullptr, 16, nullptr);
    ROW("beyond the end", cuMemcpyHtoDAsync, memory + END - 6, host, 16, nullptr);
    ROW("from nowhere", cuMemcpyDtoHAsync, host, 0x40, 16, nullptr);
    ROW("to null", cuMemcpyDtoHAsync, nullptr, memory, 16, nullptr);
    ROW("from nowhere", cuMemcpyDtoDAsync, memory, 0x40, 16, nullptr);
    ROW("beyond the end", cuMemcpyDtoDAsync, memory, memory + END - 6, 16, nullptr);
    ROW("beyond the end", cuMemsetD8, memory + END - 6, 1, 16);
    ROW("nowhere", cuMemsetD8, 0x40, 1, 16);
    ROW("not aligned", cuMemsetD16, memory + 1, 1, 4);
    ROW("not aligned", cuMemsetD32, memory + 2, 1, 4);
    ROW("beyond the end", cuMemsetD16, memory + END - 6, 1, 16);
    ROW("beyond the end", cuMemsetD32, memory + END - 8, 1, 16);
    ROW("beyond the end", cuMemsetD8Async, memory + END - 6, 1, 16, nullptr);
    ROW("nowhere", cuMemsetD8Async, 0x40, 1, 16, nullptr);
    ROW("not aligned", cuMemsetD16Async, memory + 1, 1, 4, nullptr);
    ROW("beyond the end", cuMemsetD16Async, memory + END - 6, 1, 16, nullptr);
    ROW("not aligned", cuMemsetD32Async, memory + 2, 1, 4, nullptr);
    ROW("beyond the end", cuMemsetD32Async, memory + END - 8, 1, 16, nullptr);
    ROW("not aligned", cuStreamWriteValue32, nullptr, memory + 2, 1, 0);
    ROW("not aligned", cuStreamWriteValue64, nullptr, memory + 4, 1, 0);
    ROW("flag 1", cuStreamWriteValue32, nullptr, memory, 1, 1);
    ROW("nowhere", cuStreamWriteValue32, nullptr, 0x40, 1, 0);
    ROW("beyond the end", cuStreamWriteValue64, nullptr, memory + END, 1, 0);
    CUmemLocation region;
    ROW("regions of 0 bytes", cuMemGetLocationInfo, memory, 64, 0, 0, &region);
    ROW("null", cuMemGetLocationInfo, memory, 64, 64, 0, nullptr);
    ROW("not managed", cuMemGetLocationInfo, memory, 64, 64, 0, &region);
    CUtensorMapAllocClass effective;
    ROW("null", cuTensorMapSetAllocationClass, nullptr, CU_TENSOR_MAP_ALLOC_CLASS_SMALL, &effective);
    ROW("not aligned", cuStreamWaitValue32, nullptr, memory + 2, 1, 0);
    ROW("not aligned", cuStreamWaitValue64, nullptr, memory + 4, 1, 0);
    ROW("flag 4", cuStreamWaitValue32, nullptr, memory, 1, 4);
    ROW("with a flush", cuStreamWaitValue32, nullptr, memory, 0, CU_STREAM_WAIT_VALUE_FLUSH);
    ROW("nowhere", cuStreamWaitValue32, nullptr, 0x40, 1, 0);
    ROW("beyond the end", cuStreamWaitValue64, nullptr, memory + END, 1, 0);
    ROW("no stream", cuStreamWaitValue32, (CUstream)0x1234, memory, 0, 0);
    UNDECLARED("not aligned", cuStreamWaitValue32, (CUstream, CUdeviceptr, cuuint32_t, unsigned), nullptr, memory + 2, 1, 0);
    UNDECLARED("not aligned", cuStreamWaitValue64, (CUstream, CUdeviceptr, cuuint64_t, unsigned), nullptr, memory + 4, 1, 0);
    UNDECLARED("not aligned", cuStreamWriteValue32, (CUstream, CUdeviceptr, cuuint32_t, unsigned), nullptr, memory + 2, 1, 0);
    UNDECLARED("not aligned", cuStreamWriteValue64, (CUstream, CUdeviceptr, cuuint64_t, unsigned), nullptr, memory + 4, 1, 0);
    CUstreamBatchMemOpParams operations[1] = {};
    ROW("null", cuStreamBatchMemOp, nullptr, 1, nullptr, 0);
    ROW("operation 0", cuStreamBatchMemOp, nullptr, 1, operations, 0);
    ROW("256 operations", cuStreamBatchMemOp, nullptr, 256, operations, 0);
    ROW("flag 1", cuStreamBatchMemOp, nullptr, 0, operations, 1);
    operations->operation = CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES;
    ROW("a flush", cuStreamBatchMemOp, nullptr, 1, operations, 0);
    operations->memoryBarrier = {CU_STREAM_MEM_OP_BARRIER, 2};
    ROW("barrier 2", cuStreamBatchMemOp, nullptr, 1, operations, 0);
    UNDECLARED("barrier 2", cuStreamBatchMemOp, (CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned), nullptr, 1, operations, 0);
    ROW("pitch below width", cuMemsetD2D8, memory, 8, 1, 16, 2);
    ROW("beyond the end", cuMemsetD2D8, memory + END - 64, 64, 1, 16, 2);
    ROW("pitch below width", cuMemsetD2D16, memory, 8, 1, 16, 2);
    ROW("not aligned", cuMemsetD2D16, memory + 1, 64, 1, 16, 2);
    ROW("pitch below width", cuMemsetD2D32, memory, 8, 1, 16, 2);
    ROW("not aligned", cuMemsetD2D32, memory + 2, 64, 1, 16, 2);
    ROW("pitch below width", cuMemsetD2D8Async, memory, 8, 1, 16, 2, nullptr);
    ROW("beyond the end", cuMemsetD2D8Async, memory + END - 64, 64, 1, 16, 2, nullptr);
    ROW("pitch below width", cuMemsetD2D16Async, memory, 8, 1, 16, 2, nullptr);
    ROW("not aligned", cuMemsetD2D16Async, memory + 1, 64, 1, 16, 2, nullptr);
    ROW("pitch below width", cuMemsetD2D32Async, memory, 8, 1, 16, 2, nullptr);
    ROW("not aligned", cuMemsetD2D32Async, memory + 2, 64, 1, 16, 2, nullptr);
    CUDA_MEMCPY2D rows = {};
    rows.srcMemoryType = CU_MEMORYTYPE_HOST;
    rows.srcHost = host;
    rows.srcPitch = 8;
    rows.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    rows.dstDevice = memory;
    rows.dstPitch = 64;
    rows.WidthInBytes = 16;
    rows.Height = 4;
    CUDA_MEMCPY3D boxes = {};
    boxes.srcMemoryType = CU_MEMORYTYPE_HOST;
    boxes.srcHost = host;
    boxes.srcPitch = 8;
    boxes.srcHeight = 2;
    boxes.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    boxes.dstDevice = memory;
    boxes.dstPitch = 64;
    boxes.dstHeight = 2;
    boxes.WidthInBytes = 16;
    boxes.Height = 2;
    boxes.Depth = 2;
    // Each of the calls of rows and boxes, with one description.
#define COPIES(argument)                                       \
    do {                                                       \
        ROW(argument, cuMemcpy2D, &rows);                      \
        ROW(argument, cuMemcpy2DUnaligned, &rows);             \
        ROW(argument, cuMemcpy2DAsync, &rows, nullptr);        \
        ROW(argument, cuMemcpy3D, &boxes);                     \
        ROW(argument, cuMemcpy3DAsync, &boxes, nullptr);       \
    } while (0)
    COPIES("source pitch below width");
    rows.srcPitch = boxes.srcPitch = 16;
    rows.dstDevice = boxes.dstDevice = memory + END - 16;
    COPIES("beyond the end");
    rows.dstDevice = boxes.dstDevice = 0x40;
    COPIES("to nowhere");
    rows.srcMemoryType = boxes.srcMemoryType = (CUmemorytype)9;
    COPIES("memory type 9");
    boxes.srcMemoryType = CU_MEMORYTYPE_HOST;
    boxes.dstDevice = memory;
    boxes.srcHeight = 1;
    ROW("source height below height", cuMemcpy3D, &boxes);

    // Copies between contexts, and batches of copies.
    ROW("null context", cuMemcpyPeer, memory, nullptr, memory, context, 16);
    ROW("from nowhere", cuMemcpyPeer, memory, context, 0x40, context, 16);
    ROW("null context", cuMemcpyPeerAsync, memory, context, memory, nullptr, 16, stream);
    ROW("to nowhere", cuMemcpyPeerAsync, 0x40, context, memory, context, 16, stream);
    CUDA_MEMCPY3D_PEER between = {};
    between.srcMemoryType = between.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    between.srcDevice = between.dstDevice = memory;
    between.WidthInBytes = 16;
    between.Height = between.Depth = 1;
    between.srcContext = context;
    ROW("null context", cuMemcpy3DPeer, &between);
    ROW("null context", cuMemcpy3DPeerAsync, &between, stream);
    between.dstContext = context;
    between.dstDevice = 0x40;
    ROW("to nowhere", cuMemcpy3DPeer, &between);
    ROW("to nowhere", cuMemcpy3DPeerAsync, &between, stream);
    ROW("null", cuMemcpy3DPeer, nullptr);
    CUstream apart = nullptr;
    MUST(cuStreamCreate, &apart, CU_STREAM_NON_BLOCKING);
    CUdeviceptr targets[2] = {memory, memory + END - 6}, sources[2] = {memory + 64, memory};
    size_t sizes[2] = {16, 16}, starts[2] = {0, 1}, disordered[2] = {0, 0}, failed = 7;
    CUmemcpyAttributes how[2] = {};
    how[0].srcAccessOrder = how[1].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
#define FLAT CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t
    ROW("the legacy stream", cuMemcpyBatchAsync, targets, sources, sizes, 1, how, starts, 1, nullptr);
    ROW("no copies", cuMemcpyBatchAsync, targets, sources, sizes, 0, how, starts, 1, apart);
    ROW("no attributes", cuMemcpyBatchAsync, targets, sources, sizes, 1, how, starts, 0, apart);
    ROW("more attributes than copies", cuMemcpyBatchAsync, targets, sources, sizes, 1, how, starts, 2, apart);
    ROW("disordered starts", cuMemcpyBatchAsync, targets, sources, sizes, 2, how, disordered, 2, apart);
    ROW("null targets", cuMemcpyBatchAsync, nullptr, sources, sizes, 1, how, starts, 1, apart);
    ROW("null attributes", cuMemcpyBatchAsync, targets, sources, sizes, 1, nullptr, starts, 1, apart);
    ROW("beyond the end", cuMemcpyBatchAsync, targets, sources, sizes, 2, how, starts, 1, apart);
    UNDECLARED("beyond the end", cuMemcpyBatchAsync, (FLAT, size_t *, CUstream), targets, sources, sizes, 2, how, starts, 1, &failed, apart);
    printf("%-44s %-44s %d\n", "cuMemcpyBatchAsync", "number of the failed copy", (int)failed);
    UNDECLARED("no copies", cuMemcpyBatchAsync, (FLAT, size_t *, CUstream), targets, sources, sizes, 0, how, starts, 1, &failed, apart);
    printf("%-44s %-44s %d\n", "cuMemcpyBatchAsync", "number of the failed copy", (int)failed);
    ROW("null attributes", cuMemcpyWithAttributesAsync, memory, memory + 64, 16, nullptr, apart);
    ROW("beyond the end", cuMemcpyWithAttributesAsync, memory + END - 6, memory, 16, how, apart);
    how[0].srcAccessOrder = (CUmemcpySrcAccessOrder)9;
    ROW("order 9", cuMemcpyBatchAsync, targets, sources, sizes, 1, how, starts, 1, apart);
    ROW("order 9", cuMemcpyWithAttributesAsync, memory, memory + 64, 16, how, apart);
    CUDA_MEMCPY3D_BATCH_OP part = {};
    part.src.type = part.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
    part.src.op.ptr.ptr = memory + 64;
    part.dst.op.ptr.ptr = memory;
    part.extent = {16, 1, 1};
#define BOX size_t, CUDA_MEMCPY3D_BATCH_OP *
    ROW("order 0", cuMemcpy3DBatchAsync, 1, &part, 0, apart);
    ROW("order 0", cuMemcpy3DWithAttributesAsync, &part, 0, apart);
    part.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    ROW("no copies", cuMemcpy3DBatchAsync, 0, &part, 0, apart);
    ROW("flags 1", cuMemcpy3DBatchAsync, 1, &part, 1, apart);
    ROW("null", cuMemcpy3DBatchAsync, 1, nullptr, 0, apart);
    ROW("the legacy stream", cuMemcpy3DBatchAsync, 1, &part, 0, nullptr);
    part.src.op.ptr.rowLength = 8;
    ROW("row length below width", cuMemcpy3DBatchAsync, 1, &part, 0, apart);
    part.src.op.ptr.rowLength = 0;
    part.dst.op.ptr.ptr = memory + END - 6;
    UNDECLARED("beyond the end", cuMemcpy3DBatchAsync, (BOX, size_t *, unsigned long long, CUstream), 1, &part, &failed, 0, apart);
    printf("%-44s %-44s %d\n", "cuMemcpy3DBatchAsync", "number of the failed copy", (int)failed);
    ROW("beyond the end", cuMemcpy3DWithAttributesAsync, &part, 0, apart);
    MUST(cuStreamDestroy, apart);

    ROW("flags 8", cuStreamCreate, &stream, 8);
    ROW("null", cuStreamCreate, nullptr, 0);
    ROW("flags 8", cuStreamCreateWithPriority, &stream, 8, 0);
    ROW("null", cuStreamCreateWithPriority, nullptr, 0, 0);
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
    UNDECLARED("the default stream", cuStreamDestroy, (CUstream), nullptr);
    ROW("null", cuStreamGetFlags, stream, nullptr);
    ROW("null", cuStreamGetPriority, stream, nullptr);
    ROW("null", cuStreamGetCtx, stream, nullptr);
    ROW("null", cuStreamGetCtx_v2, stream, nullptr, nullptr);
    ROW("null", cuStreamGetId, stream, nullptr);
    CUstreamAttrValue setting = {};
    ROW("null", cuStreamGetAttribute, stream, CU_STREAM_ATTRIBUTE_PRIORITY, nullptr);
    ROW("attribute 2", cuStreamGetAttribute, stream, (CUstreamAttrID)2, &setting);
    ROW("null", cuStreamSetAttribute, stream, CU_STREAM_ATTRIBUTE_PRIORITY, nullptr);
    ROW("attribute 2", cuStreamSetAttribute, stream, (CUstreamAttrID)2, &setting);
    ROW("policy 0", cuStreamSetAttribute, stream, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &setting);
    setting.memSyncDomain = (CUlaunchMemSyncDomain)9;
    ROW("domain 9", cuStreamSetAttribute, stream, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN, &setting);
    ROW("no such stream", cuStreamCopyAttributes, stream, (CUstream)0x12345670);
    ROW("null", cuStreamGetDevice, stream, nullptr);
    ROW("null", cuStreamIsCapturing, stream, nullptr);
    ROW("null", cuStreamGetCaptureInfo, stream, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
    UNDECLARED("null", cuStreamGetCaptureInfo_v2,
        (CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *), stream, nullptr,
        nullptr, nullptr, nullptr, nullptr);
    ROW("null function", cuLaunchHostFunc, stream, nullptr, nullptr);
    ROW("null function", cuLaunchHostFunc_v2, stream, nullptr, nullptr, 0);
    ROW("mode 2", cuLaunchHostFunc_v2, stream, [](void *) {}, nullptr, 2);
    ROW("null function", cuStreamAddCallback, stream, nullptr, nullptr, 0);
    ROW("flags 1", cuStreamAddCallback, stream, [](CUstream, CUresult, void *) {}, nullptr, 1);
    ROW("null event", cuStreamWaitEvent, stream, nullptr, 0);
    ROW("null", cuEventDestroy, nullptr);
    UNDECLARED("null", cuEventDestroy, (CUevent), nullptr);
    ROW("null", cuEventRecord, nullptr, stream);
    ROW("null", cuEventRecordWithFlags, nullptr, stream, 0);
    ROW("null", cuEventQuery, nullptr);
    ROW("null", cuEventSynchronize, nullptr);
    ROW("flags 7", cuStreamWaitEvent, stream, event, 7);
    ROW("flags 7", cuEventRecordWithFlags, event, stream, 7);
    ROW("never recorded", cuEventElapsedTime, &time, event, event);
    MUST(cuEventRecord, untimed, stream);
    MUST(cuEventRecord, event, stream);
    MUST(cuStreamSynchronize, stream);
    ROW("without timing", cuEventElapsedTime, &time, untimed, event);
    ROW("null", cuEventElapsedTime, nullptr, event, event);
    UNDECLARED("without timing", cuEventElapsedTime, (float *, CUevent, CUevent), &time, untimed, event);
    UNDECLARED("null", cuEventElapsedTime, (float *, CUevent, CUevent), nullptr, event, event);
    ROW("null event", cuEventElapsedTime, &time, nullptr, event);

    ROW("null", cuModuleLoadData, &module, nullptr);
    ROW("no image", cuModuleLoadData, &module, "this is no image");
    ROW("broken PTX", cuModuleLoadData, &module, ".version 7.0\n.target sm_80\n.address_size 64\n.nonsense\n");
    ROW("no such file", cuModuleLoad, &module, "/nonexistent/image.ptx");
    ROW("null", cuModuleLoadData, nullptr, PTX);
    ROW("null", cuModuleLoad, &module, nullptr);
    ROW("null image", cuModuleLoadDataEx, &module, nullptr, 0, nullptr, nullptr);
    ROW("no image", cuModuleLoadDataEx, &module, "this is no image", 0, nullptr, nullptr);
    ROW("null options", cuModuleLoadDataEx, &module, PTX, 1, nullptr, nullptr);
    CUlinkState link = nullptr;
    CUjit_option no_option = (CUjit_option)999, fallback = CU_JIT_FALLBACK_STRATEGY, its_log = CU_JIT_ERROR_LOG_BUFFER;
    char junk[] = "this is no image";
    ROW("option 999", cuModuleLoadDataEx, &module, PTX, 1, &no_option, &place);
    ROW("null", cuLinkCreate, 0, nullptr, nullptr, nullptr);
    ROW("null options", cuLinkCreate, 1, nullptr, nullptr, &link);
    ROW("option 999", cuLinkCreate, 1, &no_option, &place, &link);
    ROW("a fallback strategy", cuLinkCreate, 1, &fallback, &place, &link);
    UNDECLARED("null", cuLinkCreate, (unsigned, CUjit_option *, void **, CUlinkState *), 0, nullptr, nullptr, nullptr);
    ROW("null link", cuLinkAddData, nullptr, CU_JIT_INPUT_PTX, junk, sizeof junk, "name", 0, nullptr, nullptr);
    ROW("null link", cuLinkAddFile, nullptr, CU_JIT_INPUT_PTX, "/nonexistent/image.ptx", 0, nullptr, nullptr);
    ROW("null link", cuLinkComplete, nullptr, &place, &bytes);
    ROW("null link", cuLinkDestroy, nullptr);
    MUST(cuLinkCreate, 0, nullptr, nullptr, &link);
    ROW("null data", cuLinkAddData, link, CU_JIT_INPUT_PTX, nullptr, 16, "name", 0, nullptr, nullptr);
    ROW("no bytes", cuLinkAddData, link, CU_JIT_INPUT_PTX, junk, 0, "name", 0, nullptr, nullptr);
    ROW("kind 99", cuLinkAddData, link, (CUjitInputType)99, junk, sizeof junk, "name", 0, nullptr, nullptr);
    ROW("a log of its own", cuLinkAddData, link, CU_JIT_INPUT_PTX, junk, sizeof junk, "name", 1, &its_log, &place);
    ROW("no image", cuLinkAddData, link, CU_JIT_INPUT_PTX, junk, sizeof junk, "name", 0, nullptr, nullptr);
    ROW("no image", cuLinkAddData, link, CU_JIT_INPUT_CUBIN, junk, sizeof junk, "name", 0, nullptr, nullptr);
    ROW("no image", cuLinkAddData, link, CU_JIT_INPUT_FATBINARY, junk, sizeof junk, "name", 0, nullptr, nullptr);
    ROW("no image", cuLinkAddData, link, CU_JIT_INPUT_OBJECT, junk, sizeof junk, "name", 0, nullptr, nullptr);
    ROW("no image", cuLinkAddData, link, CU_JIT_INPUT_LIBRARY, junk, sizeof junk, "name", 0, nullptr, nullptr);
    UNDECLARED("no bytes", cuLinkAddData,
        (CUlinkState, CUjitInputType, void *, size_t, const char *, unsigned, CUjit_option *, void **), link, CU_JIT_INPUT_PTX, junk, 0,
        "name", 0, nullptr, nullptr);
    ROW("no such file", cuLinkAddFile, link, CU_JIT_INPUT_PTX, "/nonexistent/image.ptx", 0, nullptr, nullptr);
    UNDECLARED("no such file", cuLinkAddFile,
        (CUlinkState, CUjitInputType, const char *, unsigned, CUjit_option *, void **), link, CU_JIT_INPUT_PTX, "/nonexistent/image.ptx",
        0, nullptr, nullptr);
    ROW("null place", cuLinkComplete, link, nullptr, &bytes);
    MUST(cuLinkDestroy, link);
    ROW("a link that was destroyed", cuLinkComplete, link, &place, &bytes);
    ROW("null image", cuModuleLoadFatBinary, &module, nullptr);
    ROW("no image", cuModuleLoadFatBinary, &module, "this is no image");
    ROW("null", cuModuleGetLoadingMode, nullptr);
    ROW("null", cuModuleUnload, nullptr);
    ROW("null module", cuModuleGetFunction, &found, nullptr, "nothing");
    ROW("null module", cuModuleGetFunctionCount, &word, nullptr);
    ROW("null module", cuModuleEnumerateFunctions, &found, 1, nullptr);
    ROW("null module", cuModuleGetGlobal, &address, &bytes, nullptr, "variable");
    MUST(cuModuleLoadData, &module, PTX);
    ROW("no such function", cuModuleGetFunction, &found, module, "missing");
    ROW("null name", cuModuleGetFunction, &found, module, nullptr);
    ROW("no such variable", cuModuleGetGlobal, &address, &bytes, module, "missing");
    ROW("null name", cuModuleGetGlobal, &address, &bytes, module, nullptr);
    ROW("null", cuModuleGetFunction, nullptr, module, "nothing");
    ROW("null", cuModuleGetFunctionCount, nullptr, module);
    ROW("null", cuModuleEnumerateFunctions, nullptr, 1, module);

#define LOAD(argument, into, image) ROW(argument, cuLibraryLoadData, into, image, nullptr, nullptr, 0, nullptr, nullptr, 0)
#define LOAD_FILE(argument, into, file) \
    ROW(argument, cuLibraryLoadFromFile, into, file, nullptr, nullptr, 0, nullptr, nullptr, 0)
    LOAD("null", nullptr, PTX);
    LOAD("null image", &library, nullptr);
    LOAD("no image", &library, "this is no image");
    LOAD_FILE("null", nullptr, "/nonexistent/image.ptx");
    LOAD_FILE("null name", &library, nullptr);
    LOAD_FILE("no such file", &library, "/nonexistent/image.ptx");
    MUST(cuLibraryLoadData, &held, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0);
    MUST(cuLibraryGetKernel, &kernel, held, "store");
    ROW("null", cuLibraryUnload, nullptr);
    ROW("no such kernel", cuLibraryGetKernel, &other_kernel, held, "missing");
    ROW("null", cuLibraryGetKernel, nullptr, held, "store");
    ROW("null name", cuLibraryGetKernel, &other_kernel, held, nullptr);
    ROW("null library", cuLibraryGetKernel, &other_kernel, nullptr, "store");
    ROW("null", cuLibraryGetKernelCount, nullptr, held);
    ROW("null library", cuLibraryGetKernelCount, &word, nullptr);
    ROW("null", cuLibraryEnumerateKernels, nullptr, 1, held);
    ROW("null library", cuLibraryEnumerateKernels, &other_kernel, 1, nullptr);
    ROW("null", cuLibraryGetModule, nullptr, held);
    ROW("null library", cuLibraryGetModule, &other_module, nullptr);
    ROW("no such variable", cuLibraryGetGlobal, &address, &bytes, held, "missing");
    ROW("null library", cuLibraryGetGlobal, &address, &bytes, nullptr, "variable");
    ROW("no managed variable", cuLibraryGetManaged, &address, &bytes, held, "variable");
    ROW("null library", cuLibraryGetManaged, &address, &bytes, nullptr, "variable");
    ROW("null name", cuLibraryGetManaged, &address, &bytes, held, nullptr);
    ROW("no unified function", cuLibraryGetUnifiedFunction, &place, held, "nothing");
    ROW("null library", cuLibraryGetUnifiedFunction, &place, nullptr, "nothing");
    ROW("null", cuKernelGetFunction, nullptr, kernel);
    ROW("null kernel", cuKernelGetFunction, &found, nullptr);
    ROW("null", cuKernelGetLibrary, nullptr, kernel);
    ROW("null kernel", cuKernelGetLibrary, &library, nullptr);
    ROW("null", cuKernelGetAttribute, nullptr, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel, 0);
    ROW("null kernel", cuKernelGetAttribute, &number, CU_FUNC_ATTRIBUTE_NUM_REGS, nullptr, 0);
    ROW("attribute 1000", cuKernelGetAttribute, &number, (CUfunction_attribute)1000, kernel, 0);
    ROW("device 77", cuKernelGetAttribute, &number, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel, 77);
    ROW("a read-only attribute", cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_NUM_REGS, 1, kernel, 0);
    ROW("null kernel", cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1, nullptr, 0);
    ROW("device 77", cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1, kernel, 77);
    ROW("config 9", cuKernelSetCacheConfig, kernel, (CUfunc_cache)9, 0);
    ROW("null kernel", cuKernelSetCacheConfig, nullptr, CU_FUNC_CACHE_PREFER_NONE, 0);
    ROW("device 77", cuKernelSetCacheConfig, kernel, CU_FUNC_CACHE_PREFER_NONE, 77);
    ROW("null", cuKernelGetName, nullptr, kernel);
    ROW("null kernel", cuKernelGetName, &name, nullptr);
    ROW("parameter 77", cuKernelGetParamInfo, kernel, 77, &bytes, &bytes);
    ROW("null kernel", cuKernelGetParamInfo, nullptr, 0, &bytes, &bytes);
    ROW("null", cuKernelGetParamInfo, kernel, 0, nullptr, &bytes);
    ROW("null", cuKernelGetParamCount, kernel, nullptr);
    ROW("null kernel", cuKernelGetParamCount, nullptr, &bytes);
    MUST(cuModuleGetGlobal, &address, &bytes, module, "variable");
    MUST(cuModuleGetFunction, &nothing, module, "nothing");
    MUST(cuModuleGetFunction, &store, module, "store");
    MUST(cuModuleGetFunction, &bounded, module, "bounded");
    MUST(cuModuleLoadData, &large_module, of_many_registers().c_str());
    MUST(cuModuleGetFunction, &large, large_module, "large");
    ROW("attribute 1000", cuFuncGetAttribute, &number, (CUfunction_attribute)1000, nothing);
    ROW("updates by the device", cuFuncGetAttribute, &number, CU_FUNC_ATTRIBUTE_DEVICE_NODE_UPDATE_SUPPORTED, nothing);
    ROW("the mode of shared memory", cuFuncGetAttribute, &number, CU_FUNC_ATTRIBUTE_SHARED_MEMORY_MODE, nothing);
    ROW("null", cuFuncGetAttribute, nullptr, CU_FUNC_ATTRIBUTE_NUM_REGS, nothing);
    ROW("null function", cuFuncGetAttribute, &number, CU_FUNC_ATTRIBUTE_NUM_REGS, nullptr);
    ROW("null function", cuFuncSetAttribute, nullptr, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1);
    ROW("config 9", cuFuncSetCacheConfig, nothing, (CUfunc_cache)9);
    ROW("null function", cuFuncSetCacheConfig, nullptr, CU_FUNC_CACHE_PREFER_NONE);
    ROW("config 9", cuFuncSetSharedMemConfig, nothing, (CUsharedconfig)9);
    ROW("null function", cuFuncSetSharedMemConfig, nullptr, CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE);
    ROW("null", cuFuncGetModule, nullptr, nothing);
    ROW("null function", cuFuncGetModule, &other_module, nullptr);
    ROW("null", cuFuncGetName, nullptr, nothing);
    ROW("null function", cuFuncGetName, &name, nullptr);
    ROW("parameter 77", cuFuncGetParamInfo, store, 77, &bytes, &bytes);
    ROW("null function", cuFuncGetParamInfo, nullptr, 0, &bytes, &bytes);
    ROW("null", cuFuncGetParamInfo, store, 0, nullptr, &bytes);
    ROW("null", cuFuncGetParamCount, store, nullptr);
    ROW("null function", cuFuncGetParamCount, nullptr, &bytes);
    ROW("null", cuFuncIsLoaded, nullptr, nothing);
    ROW("null function", cuFuncIsLoaded, (CUfunctionLoadingState *)&number, nullptr);
    ROW("null function", cuFuncLoad, nullptr);
    ROW("a read-only attribute", cuFuncSetAttribute, nothing, CU_FUNC_ATTRIBUTE_NUM_REGS, 1);
    ROW("updates by the device", cuFuncSetAttribute, nothing, CU_FUNC_ATTRIBUTE_DEVICE_NODE_UPDATE_SUPPORTED, 1);
    ROW("a mebibyte of shared memory", cuFuncSetAttribute, nothing,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 20);
    ROW("block of 0", cuOccupancyMaxActiveBlocksPerMultiprocessor, &number, nothing, 0, 0);
    ROW("null", cuOccupancyMaxActiveBlocksPerMultiprocessor, nullptr, nothing, 32, 0);
    ROW("null function", cuOccupancyMaxActiveBlocksPerMultiprocessor, &number, nullptr, 32, 0);
    ROW("block of 0", cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, &number, nothing, 0, 0, 0);
    ROW("flags 9", cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, &number, nothing, 32, 0, 9);
    ROW("null", cuOccupancyMaxPotentialBlockSize, nullptr, &number, nothing, nullptr, 0, 0);
    ROW("null function", cuOccupancyMaxPotentialBlockSize, &number, &number, nullptr, nullptr, 0, 0);
    ROW("null", cuOccupancyMaxPotentialBlockSizeWithFlags, nullptr, &number, nothing, nullptr, 0, 0, 0);
    ROW("flags 9", cuOccupancyMaxPotentialBlockSizeWithFlags, &number, &number, nothing, nullptr, 0, 0, 9);
    ROW("null", cuOccupancyAvailableDynamicSMemPerBlock, nullptr, nothing, 1, 32);
    ROW("block of 0", cuOccupancyAvailableDynamicSMemPerBlock, &bytes, nothing, 1, 0);
    ROW("no blocks", cuOccupancyAvailableDynamicSMemPerBlock, &bytes, nothing, 0, 32);
    CUlaunchConfig config = {};
    ROW("null configuration", cuOccupancyMaxPotentialClusterSize, &number, nothing, nullptr);
    ROW("null configuration", cuOccupancyMaxActiveClusters, &number, nothing, nullptr);
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
    ROW("null", cuOccupancyMaxPotentialClusterSize, nullptr, nothing, &config);
    ROW("null", cuOccupancyMaxActiveClusters, nullptr, nothing, &config);
    ROW("null function", cuLaunchKernelEx, &config, nullptr, nullptr, nullptr);
    ROW("null configuration", cuLaunchKernelEx, nullptr, nothing, nullptr, nullptr);
    ROW("without its parameters", cuLaunchKernelEx, &config, store, nullptr, nullptr);
    CUlaunchAttribute extra = {};
    config.attrs = &extra;
    config.numAttrs = 1;
    for (int id : {3, 7, 12, 15, 99}) {
        extra.id = (CUlaunchAttributeID)id;
        snprintf(text, sizeof text, "attribute %d of zeroes", id);
        ROW(text, cuLaunchKernelEx, &config, nothing, nullptr, nullptr);
    }
    CUevent common;
    MUST(cuEventCreate, &common, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    extra.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT;
    extra.value.programmaticEvent.event = common;
    ROW("an event of several processes", cuLaunchKernelEx, &config, nothing, nullptr, nullptr);
    extra.id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
    extra.value.launchCompletionEvent.event = common;
    ROW("an event of several processes", cuLaunchKernelEx, &config, nothing, nullptr, nullptr);
    MUST(cuEventDestroy, common);
    config.numAttrs = 0;
    config.gridDimX = 0;
    ROW("grid of 0", cuLaunchKernelEx, &config, nothing, nullptr, nullptr);
    config.gridDimX = 1;
    config.blockDimX = 2048;
    ROW("block of 2048", cuLaunchKernelEx, &config, nothing, nullptr, nullptr);
    ROW("null function", cuLaunchKernel, nullptr, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
    ROW("null function", cuLaunchCooperativeKernel, nullptr, 1, 1, 1, 1, 1, 1, 0, stream, nullptr);

    // Launches of the oldest form.
    ROW("null function", cuFuncSetBlockShape, nullptr, 1, 1, 1);
    ROW("block of 0", cuFuncSetBlockShape, nothing, 0, 1, 1);
    ROW("null function", cuFuncSetSharedSize, nullptr, 0);
    ROW("null function", cuParamSetSize, nullptr, 0);
    ROW("a mebibyte", cuParamSetSize, store, 1 << 20);
    ROW("null function", cuParamSeti, nullptr, 0, 1);
    ROW("offset -1", cuParamSeti, store, -1, 1);
    ROW("null function", cuParamSetf, nullptr, 0, 1);
    ROW("offset -1", cuParamSetf, store, -1, 1);
    ROW("null function", cuParamSetv, nullptr, 0, &wide, 8);
    ROW("null", cuParamSetv, store, 0, nullptr, 8);
    ROW("null function", cuLaunch, nullptr);
    ROW("without a block", cuLaunch, store);
    ROW("null function", cuLaunchGrid, nullptr, 1, 1);
    ROW("grid of 0", cuLaunchGrid, nothing, 0, 1);
    ROW("null function", cuLaunchGridAsync, nullptr, 1, 1, stream);
    MUST(cuFuncSetBlockShape, store, 1, 1, 1);
    ROW("without its parameters", cuLaunchGridAsync, store, 1, 1, stream);

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
        ROW("641 threads of 96 registers", cuLaunchKernel, large, 1, 1, 1, 641, 1, 1, 0, stream, nullptr, nullptr);
        ROW("672 threads of 96 registers", cuLaunchKernel, large, 1, 1, 1, 672, 1, 1, 0, stream, nullptr, nullptr);
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
    ROW("a destroyed context", cuCtxSetCurrent, doomed);
    ROW("a destroyed context", cuCtxPushCurrent, doomed);
    ROW("a destroyed context", cuCtxGetApiVersion, doomed, &word);
    ROW("a destroyed context", cuCtxGetId, doomed, &wide);
    MUST(cuCtxSetCurrent, context);

    // Pools and mappings.
    ROW("null", cuDeviceGetDefaultMemPool, nullptr, 0);
    ROW("device 77", cuDeviceGetDefaultMemPool, &pool, 77);
    MUST(cuDeviceGetDefaultMemPool, &pool, 0);
    ROW("attribute 1000", cuMemPoolGetAttribute, pool, (CUmemPool_attribute)1000, &bytes);
    ROW("the default pool", cuMemPoolDestroy, pool);
    ROW("null", cuMemPoolDestroy, nullptr);
    ROW("null", cuDeviceGetMemPool, nullptr, 0);
    ROW("device 77", cuDeviceGetMemPool, &other_pool, 77);
    ROW("null", cuDeviceSetMemPool, 0, nullptr);
    ROW("device 77", cuDeviceSetMemPool, 77, pool);
    ROW("null", cuMemPoolGetAttribute, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, nullptr);
    ROW("attribute 1000", cuMemPoolSetAttribute, pool, (CUmemPool_attribute)1000, &bytes);
    ROW("null", cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, nullptr);
    ROW("a read-only attribute", cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes);
    ROW("null", cuMemPoolTrimTo, nullptr, 0);
    CUmemLocation at = {};
    at.type = CU_MEM_LOCATION_TYPE_DEVICE;
    at.id = 77;
    CUmemAccessDesc access = {};
    access.location = at;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    ROW("device 77", cuMemPoolSetAccess, pool, &access, 1);
    ROW("null", cuMemPoolSetAccess, pool, nullptr, 1);
    ROW("device 77", cuMemPoolGetAccess, (CUmemAccess_flags *)&number, pool, &at);
    ROW("null", cuMemPoolGetAccess, nullptr, pool, &at);
    ROW("device 77", cuMemGetDefaultMemPool, &other_pool, &at, CU_MEM_ALLOCATION_TYPE_PINNED);
    ROW("null", cuMemGetDefaultMemPool, nullptr, &at, CU_MEM_ALLOCATION_TYPE_PINNED);
    ROW("null location", cuMemGetDefaultMemPool, &other_pool, nullptr, CU_MEM_ALLOCATION_TYPE_PINNED);
    ROW("device 77", cuMemGetMemPool, &other_pool, &at, CU_MEM_ALLOCATION_TYPE_PINNED);
    ROW("null", cuMemGetMemPool, nullptr, &at, CU_MEM_ALLOCATION_TYPE_PINNED);
    ROW("device 77", cuMemSetMemPool, &at, CU_MEM_ALLOCATION_TYPE_PINNED, pool);
    ROW("null location", cuMemSetMemPool, nullptr, CU_MEM_ALLOCATION_TYPE_PINNED, pool);
    CUmemPoolProps props = {};
    ROW("null", cuMemPoolCreate, &other_pool, nullptr);
    ROW("type 0", cuMemPoolCreate, &other_pool, &props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = at;
    ROW("device 77", cuMemPoolCreate, &other_pool, &props);
    ROW("null pool", cuMemAllocFromPoolAsync, &address, 64, nullptr, stream);
    ROW("0 bytes", cuMemAllocFromPoolAsync, &address, 0, pool, stream);
    ROW("null", cuMemAllocFromPoolAsync, nullptr, 64, pool, stream);
    ROW("null", cuMemAllocAsync, nullptr, 64, stream);
    ROW("0 bytes", cuMemAllocAsync, &address, 0, stream);
    ROW("a pebibyte", cuMemAllocAsync, &address, 1ull << 50, stream);
    ROW("never allocated", cuMemFreeAsync, 0x12345600, stream);
    ROW("not a multiple of the granularity", cuMemAddressReserve, &address, 4097, 0, 0, 0);
    ROW("0 bytes", cuMemAddressReserve, &address, 0, 0, 0, 0);
    ROW("never reserved", cuMemAddressFree, 0x12345600, 2 << 20);
    ROW("never mapped", cuMemUnmap, 0x12345600, 2 << 20);
    ROW("no such handle", cuMemRelease, 0x12345600);
    const size_t BLOCK = 2 << 20;
    CUmemAllocationProp kind = {};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemAllocationProp elsewhere_kind = kind, typeless = kind;
    elsewhere_kind.location.id = 77;
    typeless.type = CU_MEM_ALLOCATION_TYPE_INVALID;
    ROW("null", cuMemGetAllocationGranularity, nullptr, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    ROW("null properties", cuMemGetAllocationGranularity, &bytes, nullptr, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    ROW("device 77", cuMemGetAllocationGranularity, &bytes, &elsewhere_kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    ROW("option 9", cuMemGetAllocationGranularity, &bytes, &kind, (CUmemAllocationGranularity_flags)9);
    ROW("null", cuMemCreate, nullptr, BLOCK, &kind, 0);
    ROW("null properties", cuMemCreate, &other_block, BLOCK, nullptr, 0);
    ROW("0 bytes", cuMemCreate, &other_block, 0, &kind, 0);
    ROW("not a multiple of the granularity", cuMemCreate, &other_block, 4097, &kind, 0);
    ROW("device 77", cuMemCreate, &other_block, BLOCK, &elsewhere_kind, 0);
    ROW("type 0", cuMemCreate, &other_block, BLOCK, &typeless, 0);
    ROW("flags 1", cuMemCreate, &other_block, BLOCK, &kind, 1);
    MUST(cuMemCreate, &block, BLOCK, &kind, 0);
    MUST(cuMemAddressReserve, &address, BLOCK, 0, 0, 0);
    ROW("never reserved", cuMemMap, 0x12345600, BLOCK, 0, block, 0);
    ROW("offset 1", cuMemMap, address, BLOCK, 1, block, 0);
    ROW("beyond the reservation", cuMemMap, address, 2 * BLOCK, 0, block, 0);
    ROW("no such handle", cuMemMap, address, BLOCK, 0, 0x12345600, 0);
    ROW("flags 1", cuMemMap, address, BLOCK, 0, block, 1);
    access.location.id = 0;
    ROW("never mapped", cuMemSetAccess, address, BLOCK, &access, 1);
    ROW("null", cuMemSetAccess, address, BLOCK, nullptr, 1);
    ROW("null", cuMemExportToShareableHandle, nullptr, block, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    ROW("no such handle", cuMemExportToShareableHandle, &number, 0x12345600, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    ROW("type 9", cuMemExportToShareableHandle, &number, block, (CUmemAllocationHandleType)9, 0);
    ROW("null", cuMemImportFromShareableHandle, nullptr, (void *)-1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    ROW("descriptor -1", cuMemImportFromShareableHandle, &other_block, (void *)-1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    ROW("type 9", cuMemImportFromShareableHandle, &other_block, (void *)-1, (CUmemAllocationHandleType)9);
    ROW("never mapped", cuMemRetainAllocationHandle, &other_block, (void *)address);
    ROW("null", cuMemRetainAllocationHandle, nullptr, (void *)address);
    ROW("null", cuMemGetAllocationPropertiesFromHandle, nullptr, block);
    ROW("no such handle", cuMemGetAllocationPropertiesFromHandle, &kind, 0x12345600);
    at.id = 0;
    ROW("null", cuMemGetAccess, nullptr, &at, address);
    ROW("null location", cuMemGetAccess, &wide, nullptr, address);
    ROW("never mapped", cuMemGetAccess, &wide, &at, address);
    MUST(cuMemAddressFree, address, BLOCK);
    MUST(cuMemRelease, block);
    ROW("null", cuMemAddressReserve, nullptr, BLOCK, 0, 0, 0);
    ROW("flags 1", cuMemAddressReserve, &address, BLOCK, 0, 0, 1);

    // Memory of other processes, and managed memory.
    CUipcMemHandle handle = {};
    ROW("null", cuIpcGetMemHandle, nullptr, memory);
    ROW("never allocated", cuIpcGetMemHandle, &handle, 0x12345600);
    memset(&handle, 0, sizeof handle);
    ROW("no such handle", cuIpcOpenMemHandle, &address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    ROW("null", cuIpcOpenMemHandle, nullptr, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    ROW("flags 9", cuIpcOpenMemHandle, &address, handle, 9);
    UNDECLARED("no such handle", cuIpcOpenMemHandle, (CUdeviceptr *, CUipcMemHandle, unsigned), &address, handle,
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    UNDECLARED("flags 9", cuIpcOpenMemHandle, (CUdeviceptr *, CUipcMemHandle, unsigned), &address, handle, 9);
    ROW("never opened", cuIpcCloseMemHandle, 0x12345600);
    ROW("null", cuMemAllocManaged, nullptr, 64, CU_MEM_ATTACH_GLOBAL);
    ROW("0 bytes", cuMemAllocManaged, &address, 0, CU_MEM_ATTACH_GLOBAL);
    CUdeviceptr ranges[1] = {memory};
    size_t lengths[1] = {64}, first_place[1] = {0}, second_place[1] = {1};
    CUmemLocation host_place = {};
    host_place.type = CU_MEM_LOCATION_TYPE_HOST;
    ROW("not managed", cuMemPrefetchBatchAsync, ranges, lengths, 1, &host_place, first_place, 1, 0, stream);
    ROW("no ranges", cuMemPrefetchBatchAsync, ranges, lengths, 0, &host_place, first_place, 1, 0, stream);
    ROW("null", cuMemPrefetchBatchAsync, nullptr, lengths, 1, &host_place, first_place, 1, 0, stream);
    ROW("a location from the second range on", cuMemPrefetchBatchAsync, ranges, lengths, 1, &host_place, second_place, 1, 0, stream);
    ROW("not managed", cuMemDiscardBatchAsync, ranges, lengths, 1, 0, stream);
    ROW("flags 1", cuMemDiscardBatchAsync, ranges, lengths, 1, 1, stream);
    ROW("not managed", cuMemDiscardAndPrefetchBatchAsync, ranges, lengths, 1, &host_place, first_place, 1, 0, stream);
    ROW("no locations", cuMemDiscardAndPrefetchBatchAsync, ranges, lengths, 1, &host_place, first_place, 0, 0, stream);
    ROW("not managed", cuMemPrefetchAsync, memory, 64, at, 0, stream);
    ROW("0 bytes", cuMemPrefetchAsync, memory, 0, at, 0, stream);
    UNDECLARED("not managed", cuMemPrefetchAsync, (CUdeviceptr, size_t, CUdevice, CUstream), memory, 64, 0, stream);
    UNDECLARED("device 77", cuMemPrefetchAsync, (CUdeviceptr, size_t, CUdevice, CUstream), memory, 64, 77, stream);
    ROW("not managed", cuMemAdvise, memory, 64, CU_MEM_ADVISE_SET_READ_MOSTLY, at);
    ROW("advice 99", cuMemAdvise, memory, 64, (CUmem_advise)99, at);
    UNDECLARED("not managed", cuMemAdvise, (CUdeviceptr, size_t, CUmem_advise, CUdevice), memory, 64,
        CU_MEM_ADVISE_SET_READ_MOSTLY, 0);
    UNDECLARED("advice 99", cuMemAdvise, (CUdeviceptr, size_t, CUmem_advise, CUdevice), memory, 64, (CUmem_advise)99, 0);
    CUmem_range_attribute mostly = CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY;
    size_t size = 4;
    ROW("not managed", cuMemRangeGetAttribute, &word, 4, mostly, memory, 64);
    ROW("null", cuMemRangeGetAttribute, nullptr, 4, mostly, memory, 64);
    ROW("size 3", cuMemRangeGetAttribute, &word, 3, mostly, memory, 64);
    ROW("attribute 99", cuMemRangeGetAttribute, &word, 4, (CUmem_range_attribute)99, memory, 64);
    ROW("not managed", cuMemRangeGetAttributes, data, &size, &mostly, 1, memory, 64);
    ROW("no attributes", cuMemRangeGetAttributes, data, &size, &mostly, 0, memory, 64);
    ROW("null", cuMemRangeGetAttributes, nullptr, &size, &mostly, 1, memory, 64);
    ROW("not managed", cuStreamAttachMemAsync, stream, memory, 0, CU_MEM_ATTACH_SINGLE);
    ROW("flags 9", cuStreamAttachMemAsync, stream, memory, 0, 9);

    // Everything works as if none of these calls had been made.
    unsigned value = 42;
    void *parameters[] = {&memory, &value};
    ROW("nothing wrong", cuLaunchKernel, store, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
    ROW("nothing wrong", cuStreamSynchronize, stream);
    ROW("nothing wrong", cuStreamQuery, stream);
    ROW("nothing wrong", cuCtxSynchronize);
    ROW("nothing wrong", cuMemcpyDtoH, &word, memory, sizeof word);
    bool good = word == 42;
    ROW("nothing wrong", cuLibraryUnload, held);
    ROW("nothing wrong", cuCtxDestroy, other);
    ROW("nothing wrong", cuModuleUnload, module);
    ROW("nothing wrong", cuMemFree, memory);
    ROW("freed already", cuMemFree, memory);
    ROW("nothing wrong", cuDevicePrimaryCtxRelease, 0);
    if (!passed) leave();
    return verdict(good);
}
