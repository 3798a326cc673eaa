//! Code shared by the tests: the driver's C interface, a device per test, kernels. In one file: every test file reads all of it.

pub(crate) mod confine;
pub(crate) mod images;
pub(crate) mod peer;

use std::ffi::{CString, c_char, c_void};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

// The entry points are in this crate's object code; naming the crate links them.
use softgpu_cuda as _;

#[allow(non_snake_case, reason = "the names are the driver's")]
pub(crate) mod sys {
    use std::ffi::{c_char, c_void};

    /// `CUipcMemHandle`.
    #[derive(Clone, Copy)]
    #[repr(C)]
    pub(crate) struct IpcHandle(pub(crate) [u64; 8]);

    /// `CUDA_KERNEL_NODE_PARAMS_v2`; the first form ends before `kernel`.
    #[derive(Clone, Copy, Debug)]
    #[repr(C)]
    pub(crate) struct KernelParameters {
        pub(crate) function: u64,
        pub(crate) grid: [u32; 3],
        pub(crate) block: [u32; 3],
        pub(crate) shared: u32,
        pub(crate) parameters: *const *const u64,
        pub(crate) extra: u64,
        pub(crate) kernel: u64,
        pub(crate) context: u64,
    }

    unsafe extern "C" {
        pub(crate) fn cuInit(flags: u32) -> u32;
        pub(crate) fn cuDriverGetVersion(version: *mut i32) -> u32;
        pub(crate) fn cuGetProcAddress_v2(
            name: *const c_char,
            place: *mut *const c_void,
            version: i32,
            flags: u64,
            status: *mut u32,
        ) -> u32;
        pub(crate) fn cuDeviceGetCount(count: *mut i32) -> u32;
        pub(crate) fn cuDeviceGetName(name: *mut c_char, room: i32, device: i32) -> u32;
        pub(crate) fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) -> u32;
        pub(crate) fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, device: i32) -> u32;
        pub(crate) fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> u32;
        pub(crate) fn cuCtxCreate_v2(context: *mut u64, flags: u32, device: i32) -> u32;
        pub(crate) fn cuCtxDestroy_v2(context: u64) -> u32;
        pub(crate) fn cuCtxSetCurrent(context: u64) -> u32;
        pub(crate) fn cuCtxGetCurrent(context: *mut u64) -> u32;
        pub(crate) fn cuCtxSynchronize() -> u32;
        pub(crate) fn cuCtxSetLimit(limit: i32, value: u64) -> u32;
        pub(crate) fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) -> u32;
        pub(crate) fn cuDevicePrimaryCtxRelease_v2(device: i32) -> u32;
        pub(crate) fn cuModuleLoadData(module: *mut u64, image: *const c_void) -> u32;
        pub(crate) fn cuModuleLoadDataEx(
            module: *mut u64,
            image: *const c_void,
            count: u32,
            keys: *const u32,
            values: *mut *mut c_void,
        ) -> u32;
        pub(crate) fn cuLinkCreate_v2(
            count: u32,
            keys: *const u32,
            values: *mut *mut c_void,
            link: *mut u64,
        ) -> u32;
        pub(crate) fn cuLinkAddData_v2(
            link: u64,
            kind: u32,
            data: *const c_void,
            bytes: u64,
            name: *const c_char,
            count: u32,
            keys: *const u32,
            values: *mut *mut c_void,
        ) -> u32;
        pub(crate) fn cuLinkComplete(link: u64, image: *mut *const c_void, bytes: *mut u64) -> u32;
        pub(crate) fn cuLinkDestroy(link: u64) -> u32;
        pub(crate) fn cuModuleUnload(module: u64) -> u32;
        pub(crate) fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) -> u32;
        pub(crate) fn cuModuleEnumerateFunctions(functions: *mut u64, count: u32, module: u64) -> u32;
        pub(crate) fn cuFuncGetAttribute(value: *mut i32, attribute: i32, function: u64) -> u32;
        pub(crate) fn cuFuncSetAttribute(function: u64, attribute: i32, value: i32) -> u32;
        pub(crate) fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
            count: *mut i32,
            function: u64,
            threads: i32,
            shared: u64,
        ) -> u32;
        pub(crate) fn cuModuleGetGlobal_v2(
            address: *mut u64,
            bytes: *mut u64,
            module: u64,
            name: *const c_char,
        ) -> u32;
        pub(crate) fn cuLibraryLoadData(
            library: *mut u64,
            image: *const c_void,
            jit_keys: *const u32,
            jit_values: *const u64,
            jit_count: u32,
            keys: *const u32,
            values: *const u64,
            count: u32,
        ) -> u32;
        pub(crate) fn cuLibraryGetKernel(kernel: *mut u64, library: u64, name: *const c_char) -> u32;
        pub(crate) fn cuKernelGetAttribute(value: *mut i32, number: i32, kernel: u64, device: i32) -> u32;
        pub(crate) fn cuLibraryGetModule(module: *mut u64, library: u64) -> u32;
        pub(crate) fn cuLibraryUnload(library: u64) -> u32;
        pub(crate) fn cuLibraryGetManaged(
            address: *mut u64,
            bytes: *mut u64,
            library: u64,
            name: *const c_char,
        ) -> u32;
        pub(crate) fn cuKernelGetFunction(function: *mut u64, kernel: u64) -> u32;
        pub(crate) fn cuKernelGetParamInfo(
            kernel: u64,
            index: usize,
            offset: *mut usize,
            size: *mut usize,
        ) -> u32;
        pub(crate) fn cuLaunchKernel(
            function: u64,
            gx: u32,
            gy: u32,
            gz: u32,
            bx: u32,
            by: u32,
            bz: u32,
            shared: u32,
            stream: u64,
            parameters: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) -> u32;
        pub(crate) fn cuLaunchCooperativeKernel(
            function: u64,
            gx: u32,
            gy: u32,
            gz: u32,
            bx: u32,
            by: u32,
            bz: u32,
            shared: u32,
            stream: u64,
            parameters: *mut *mut c_void,
        ) -> u32;
        pub(crate) fn cuLaunchHostFunc(
            stream: u64,
            function: extern "C" fn(*mut c_void),
            data: *mut c_void,
        ) -> u32;
        pub(crate) fn cuMemAlloc_v2(address: *mut u64, bytes: u64) -> u32;
        pub(crate) fn cuMemFree_v2(address: u64) -> u32;
        pub(crate) fn cuMemGetInfo_v2(free: *mut u64, total: *mut u64) -> u32;
        pub(crate) fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut u64, address: u64) -> u32;
        pub(crate) fn cuMemHostAlloc(address: *mut *mut c_void, bytes: u64, flags: u32) -> u32;
        pub(crate) fn cuMemFreeHost(address: *mut c_void) -> u32;
        pub(crate) fn cuMemHostRegister_v2(address: *mut c_void, bytes: u64, flags: u32) -> u32;
        pub(crate) fn cuMemHostUnregister(address: *mut c_void) -> u32;
        pub(crate) fn cuPointerGetAttribute(data: *mut c_void, attribute: i32, address: u64) -> u32;
        pub(crate) fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: u64) -> u32;
        pub(crate) fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: u64) -> u32;
        pub(crate) fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: u64) -> u32;
        pub(crate) fn cuMemcpy(to: u64, from: u64, bytes: u64) -> u32;
        pub(crate) fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: u64, stream: u64) -> u32;
        pub(crate) fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: u64, stream: u64) -> u32;
        pub(crate) fn cuMemcpy2D_v2(request: *const [u64; 16]) -> u32;
        pub(crate) fn cuMemsetD8_v2(to: u64, value: u8, count: u64) -> u32;
        pub(crate) fn cuMemsetD8Async(to: u64, value: u8, count: u64, stream: u64) -> u32;
        pub(crate) fn cuMemsetD32_v2(to: u64, value: u32, count: u64) -> u32;
        pub(crate) fn cuMemsetD2D16_v2(to: u64, pitch: u64, value: u16, width: u64, height: u64) -> u32;
        pub(crate) fn cuStreamCreate(stream: *mut u64, flags: u32) -> u32;
        pub(crate) fn cuStreamDestroy_v2(stream: u64) -> u32;
        pub(crate) fn cuStreamQuery(stream: u64) -> u32;
        pub(crate) fn cuStreamSynchronize(stream: u64) -> u32;
        pub(crate) fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) -> u32;
        pub(crate) fn cuEventCreate(event: *mut u64, flags: u32) -> u32;
        pub(crate) fn cuEventDestroy_v2(event: u64) -> u32;
        pub(crate) fn cuEventRecord(event: u64, stream: u64) -> u32;
        pub(crate) fn cuEventQuery(event: u64) -> u32;
        pub(crate) fn cuEventSynchronize(event: u64) -> u32;
        pub(crate) fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: u64, end: u64) -> u32;
        pub(crate) fn cuMemAddressReserve(
            address: *mut u64,
            bytes: u64,
            align: u64,
            hint: u64,
            flags: u64,
        ) -> u32;
        pub(crate) fn cuMemAddressFree(address: u64, bytes: u64) -> u32;
        pub(crate) fn cuMemCreate(
            handle: *mut u64,
            bytes: u64,
            properties: *const [u32; 8],
            flags: u64,
        ) -> u32;
        pub(crate) fn cuMemRelease(handle: u64) -> u32;
        pub(crate) fn cuMemMap(address: u64, bytes: u64, offset: u64, handle: u64, flags: u64) -> u32;
        pub(crate) fn cuMemUnmap(address: u64, bytes: u64) -> u32;
        pub(crate) fn cuMemSetAccess(address: u64, bytes: u64, access: *const [u32; 3], count: usize) -> u32;
        pub(crate) fn cuMemGetAccess(flags: *mut u64, location: *const [u32; 2], address: u64) -> u32;
        pub(crate) fn cuMemGetAllocationPropertiesFromHandle(properties: *mut u32, handle: u64) -> u32;
        pub(crate) fn cuMemRetainAllocationHandle(handle: *mut u64, address: u64) -> u32;
        pub(crate) fn cuMemExportToShareableHandle(
            place: *mut i32,
            handle: u64,
            kind: u32,
            flags: u64,
        ) -> u32;
        pub(crate) fn cuMemImportFromShareableHandle(handle: *mut u64, descriptor: i64, kind: u32) -> u32;
        pub(crate) fn cuMemAllocAsync(address: *mut u64, bytes: u64, stream: u64) -> u32;
        pub(crate) fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: u64, pool: u64, stream: u64) -> u32;
        pub(crate) fn cuMemFreeAsync(address: u64, stream: u64) -> u32;
        pub(crate) fn cuMemPoolCreate(pool: *mut u64, properties: *const [u64; 11]) -> u32;
        pub(crate) fn cuMemPoolDestroy(pool: u64) -> u32;
        pub(crate) fn cuMemPoolTrimTo(pool: u64, keep: u64) -> u32;
        pub(crate) fn cuMemPoolGetAttribute(pool: u64, attribute: i32, value: *mut c_void) -> u32;
        pub(crate) fn cuMemPoolSetAttribute(pool: u64, attribute: i32, value: *const c_void) -> u32;
        pub(crate) fn cuMemPoolSetAccess(pool: u64, access: *const [u32; 3], count: usize) -> u32;
        pub(crate) fn cuMemPoolGetAccess(flags: *mut u32, pool: u64, location: *const [u32; 2]) -> u32;
        pub(crate) fn cuDeviceGetDefaultMemPool(pool: *mut u64, device: i32) -> u32;
        pub(crate) fn cuDeviceGetMemPool(pool: *mut u64, device: i32) -> u32;
        pub(crate) fn cuDeviceSetMemPool(device: i32, pool: u64) -> u32;
        pub(crate) fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: u64) -> u32;
        pub(crate) fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, flags: u32) -> u32;
        pub(crate) fn cuIpcCloseMemHandle(address: u64) -> u32;
        pub(crate) fn cuMemAllocManaged(address: *mut u64, bytes: u64, flags: u32) -> u32;
        pub(crate) fn cuMemAdvise(address: u64, bytes: u64, advice: u32, device: i32) -> u32;
        pub(crate) fn cuMemPrefetchAsync(address: u64, bytes: u64, device: i32, stream: u64) -> u32;
        pub(crate) fn cuMemRangeGetAttribute(
            data: *mut c_void,
            size: usize,
            attribute: i32,
            address: u64,
            bytes: u64,
        ) -> u32;
        pub(crate) fn cuGraphCreate(graph: *mut u64, flags: u32) -> u32;
        pub(crate) fn cuGraphDestroy(graph: u64) -> u32;
        pub(crate) fn cuGraphAddMemAllocNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            parameters: *mut c_void,
        ) -> u32;
        pub(crate) fn cuGraphInstantiateWithFlags(executable: *mut u64, graph: u64, flags: u64) -> u32;
        pub(crate) fn cuGraphInstantiateWithParams(
            executable: *mut u64,
            graph: u64,
            parameters: *mut [u64; 4],
        ) -> u32;
        pub(crate) fn cuGraphInstantiate_v2(
            executable: *mut u64,
            graph: u64,
            node: *mut u64,
            text: *mut c_char,
            room: usize,
        ) -> u32;
        pub(crate) fn cuGraphExecDestroy(executable: u64) -> u32;
        pub(crate) fn cuGraphExecGetFlags(executable: u64, flags: *mut u64) -> u32;
        pub(crate) fn cuGraphLaunch(executable: u64, stream: u64) -> u32;
        pub(crate) fn cuGraphUpload(executable: u64, stream: u64) -> u32;
        pub(crate) fn cuGraphAddKernelNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            parameters: *const KernelParameters,
        ) -> u32;
        pub(crate) fn cuGraphAddKernelNode_v2(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            parameters: *const KernelParameters,
        ) -> u32;
        pub(crate) fn cuGraphAddMemcpyNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            parameters: *const [u64; 25],
            context: u64,
        ) -> u32;
        pub(crate) fn cuGraphAddMemsetNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            parameters: *const [u64; 5],
            context: u64,
        ) -> u32;
        pub(crate) fn cuGraphAddHostNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            parameters: *const [u64; 2],
        ) -> u32;
        pub(crate) fn cuGraphAddChildGraphNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            child: u64,
        ) -> u32;
        pub(crate) fn cuGraphAddEmptyNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
        ) -> u32;
        pub(crate) fn cuGraphAddEventRecordNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            event: u64,
        ) -> u32;
        pub(crate) fn cuGraphAddEventWaitNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            event: u64,
        ) -> u32;
        pub(crate) fn cuGraphAddBatchMemOpNode(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            count: usize,
            parameters: *const [u64; 4],
        ) -> u32;
        pub(crate) fn cuGraphAddNode_v2(
            node: *mut u64,
            graph: u64,
            before: *const u64,
            data: *const [u8; 8],
            count: usize,
            parameters: *mut [u64; 32],
        ) -> u32;
        pub(crate) fn cuGraphConditionalHandleCreate(
            handle: *mut u64,
            graph: u64,
            context: u64,
            value: u32,
            flags: u32,
        ) -> u32;
        pub(crate) fn cuGraphKernelNodeGetParams(node: u64, parameters: *mut KernelParameters) -> u32;
        pub(crate) fn cuGraphKernelNodeGetParams_v2(node: u64, parameters: *mut KernelParameters) -> u32;
        pub(crate) fn cuGraphKernelNodeSetParams_v2(node: u64, parameters: *const KernelParameters) -> u32;
        pub(crate) fn cuGraphMemcpyNodeGetParams(node: u64, parameters: *mut [u64; 25]) -> u32;
        pub(crate) fn cuGraphMemsetNodeGetParams(node: u64, parameters: *mut [u64; 5]) -> u32;
        pub(crate) fn cuGraphNodeGetParams(node: u64, parameters: *mut [u64; 32]) -> u32;
        pub(crate) fn cuGraphNodeSetParams(node: u64, parameters: *mut [u64; 32]) -> u32;
        pub(crate) fn cuGraphKernelNodeSetAttribute(node: u64, id: u32, value: *const [u32; 16]) -> u32;
        pub(crate) fn cuGraphKernelNodeGetAttribute(node: u64, id: u32, value: *mut [u32; 16]) -> u32;
        pub(crate) fn cuGraphKernelNodeCopyAttributes(to: u64, from: u64) -> u32;
        pub(crate) fn cuGraphExecKernelNodeSetParams_v2(
            executable: u64,
            node: u64,
            parameters: *const KernelParameters,
        ) -> u32;
        pub(crate) fn cuGraphExecMemcpyNodeSetParams(
            executable: u64,
            node: u64,
            parameters: *const [u64; 25],
            context: u64,
        ) -> u32;
        pub(crate) fn cuGraphExecMemsetNodeSetParams(
            executable: u64,
            node: u64,
            parameters: *const [u64; 5],
            context: u64,
        ) -> u32;
        pub(crate) fn cuGraphExecHostNodeSetParams(
            executable: u64,
            node: u64,
            parameters: *const [u64; 2],
        ) -> u32;
        pub(crate) fn cuGraphExecChildGraphNodeSetParams(executable: u64, node: u64, child: u64) -> u32;
        pub(crate) fn cuGraphExecEventRecordNodeSetEvent(executable: u64, node: u64, event: u64) -> u32;
        pub(crate) fn cuGraphNodeSetEnabled(executable: u64, node: u64, enabled: u32) -> u32;
        pub(crate) fn cuGraphNodeGetEnabled(executable: u64, node: u64, enabled: *mut u32) -> u32;
        pub(crate) fn cuGraphExecUpdate(executable: u64, graph: u64, node: *mut u64, result: *mut u32)
        -> u32;
        pub(crate) fn cuGraphExecUpdate_v2(executable: u64, graph: u64, result: *mut [u64; 3]) -> u32;
        pub(crate) fn cuGraphClone(clone: *mut u64, original: u64) -> u32;
        pub(crate) fn cuGraphNodeFindInClone(node: *mut u64, original: u64, clone: u64) -> u32;
        pub(crate) fn cuGraphGetNodes(graph: u64, nodes: *mut u64, count: *mut usize) -> u32;
        pub(crate) fn cuGraphGetRootNodes(graph: u64, nodes: *mut u64, count: *mut usize) -> u32;
        pub(crate) fn cuGraphGetEdges_v2(
            graph: u64,
            from: *mut u64,
            to: *mut u64,
            data: *mut [u8; 8],
            count: *mut usize,
        ) -> u32;
        pub(crate) fn cuGraphNodeGetDependencies(node: u64, nodes: *mut u64, count: *mut usize) -> u32;
        pub(crate) fn cuGraphNodeGetDependentNodes(node: u64, nodes: *mut u64, count: *mut usize) -> u32;
        pub(crate) fn cuGraphAddDependencies(
            graph: u64,
            from: *const u64,
            to: *const u64,
            count: usize,
        ) -> u32;
        pub(crate) fn cuGraphAddDependencies_v2(
            graph: u64,
            from: *const u64,
            to: *const u64,
            data: *const [u8; 8],
            count: usize,
        ) -> u32;
        pub(crate) fn cuGraphRemoveDependencies(
            graph: u64,
            from: *const u64,
            to: *const u64,
            count: usize,
        ) -> u32;
        pub(crate) fn cuGraphDestroyNode(node: u64) -> u32;
        pub(crate) fn cuGraphNodeGetType(node: u64, kind: *mut u32) -> u32;
        pub(crate) fn cuGraphChildGraphNodeGetGraph(node: u64, graph: *mut u64) -> u32;
        pub(crate) fn cuGraphGetId(graph: u64, id: *mut u32) -> u32;
        pub(crate) fn cuGraphNodeGetLocalId(node: u64, id: *mut u32) -> u32;
        pub(crate) fn cuGraphNodeGetContainingGraph(node: u64, graph: *mut u64) -> u32;
        pub(crate) fn cuGraphDebugDotPrint(graph: u64, path: *const c_char, flags: u32) -> u32;
        pub(crate) fn cuUserObjectCreate(
            object: *mut u64,
            data: *mut c_void,
            destroy: extern "C" fn(*mut c_void),
            references: u32,
            flags: u32,
        ) -> u32;
        pub(crate) fn cuUserObjectRelease(object: u64, count: u32) -> u32;
        pub(crate) fn cuGraphRetainUserObject(graph: u64, object: u64, count: u32, flags: u32) -> u32;
        pub(crate) fn cuStreamBeginCapture_v2(stream: u64, mode: u32) -> u32;
        pub(crate) fn cuStreamBeginCaptureToGraph(
            stream: u64,
            graph: u64,
            before: *const u64,
            data: *const [u8; 8],
            count: usize,
            mode: u32,
        ) -> u32;
        pub(crate) fn cuStreamEndCapture(stream: u64, graph: *mut u64) -> u32;
        pub(crate) fn cuStreamIsCapturing(stream: u64, status: *mut u32) -> u32;
        pub(crate) fn cuStreamGetCaptureInfo_v2(
            stream: u64,
            status: *mut u32,
            id: *mut u64,
            graph: *mut u64,
            nodes: *mut *const u64,
            count: *mut usize,
        ) -> u32;
        pub(crate) fn cuStreamUpdateCaptureDependencies(
            stream: u64,
            nodes: *const u64,
            count: usize,
            flags: u32,
        ) -> u32;
        pub(crate) fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) -> u32;
        pub(crate) fn cuEventRecordWithFlags(event: u64, stream: u64, flags: u32) -> u32;
        pub(crate) fn cuStreamWaitValue32_v2(stream: u64, at: u64, value: u32, flags: u32) -> u32;
        pub(crate) fn cuStreamWriteValue32_v2(stream: u64, to: u64, value: u32, flags: u32) -> u32;
        pub(crate) fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: u64, stream: u64) -> u32;
        pub(crate) fn cuStreamAddCallback(
            stream: u64,
            function: extern "C" fn(u64, u32, *mut c_void),
            data: *mut c_void,
            flags: u32,
        ) -> u32;
        pub(crate) fn cuMulticastCreate(place: *mut u64, description: *const c_void) -> u32;
        pub(crate) fn cuGetErrorName(error: u32, text: *mut *const c_char) -> u32;
    }
}
pub(crate) use images::*;
pub(crate) use sys::*;

/// Calls a function of the driver. Its arguments live through the call.
macro_rules! cu {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments have the types of the driver's interface, and live through the call.
        #[allow(unused_unsafe, reason = "arguments may be calls themselves")]
        let code = unsafe { $crate::support::$name($($argument),*) };
        code
    }};
}
pub(crate) use cu;

/// Calls a function of the driver, which must succeed.
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!($crate::support::cu!($name($($argument),*)), 0, stringify!($name))
    };
}
pub(crate) use ok;

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const NO_BINARY: u32 = 209;
pub(crate) const INVALID_IMAGE: u32 = 200;
pub(crate) const INVALID_PTX: u32 = 218;
pub(crate) const SHARED_OBJECT_INIT_FAILED: u32 = 303;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const OUT_OF_RESOURCES: u32 = 701;
pub(crate) const TOO_LARGE: u32 = 720;
pub(crate) const NOT_SUPPORTED: u32 = 801;

pub(crate) const PAGE: u64 = 2 << 20;

/// The variable by which a test passes its device to a process that it starts.
pub(crate) const STATE: &str = "SLUICE_SOFTGPU_STATE";

/// Creates a state directory on the tmpfs, removed when the value is dropped.
pub(crate) fn new_state() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("softgpu-test-").tempdir_in("/dev/shm").unwrap()
}

static OWN_STATE: Mutex<Option<tempfile::TempDir>> = Mutex::new(None);

extern "C" fn remove_state() {
    drop(OWN_STATE.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Starts the driver once per test process: on a device of its own, or on the one that its parent passes.
pub(crate) fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os(STATE).is_none() {
            let state = new_state();
            // SAFETY: the first thing that a test does, before anything else reads the environment.
            unsafe { std::env::set_var(STATE, state.path()) };
            // SAFETY: still the first action of the test.
            unsafe { std::env::set_var("SLUICE_SOFTGPU_SCALE", "1024") };
            // SAFETY: still the first action of the test. Each context gets a page for shared and local memory.
            unsafe { std::env::set_var("SLUICE_SOFTGPU_CONTEXT_BYTES", "2097152") };
            *OWN_STATE.lock().unwrap() = Some(state);
            // SAFETY: the handler only drops the value set here.
            unsafe { libc::atexit(remove_state) };
            ok!(cuInit(0));
        } else {
            ok!(cuInit(0));
        }
    });
}

/// A context of the test, current to the calling thread. Tests of one file are serialised, so that they can count memory.
pub(crate) struct Context {
    pub(crate) handle: u64,
    _turn: MutexGuard<'static, ()>,
}

impl Context {
    pub(crate) fn new() -> Context {
        static TURN: Mutex<()> = Mutex::new(());
        init();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut handle = 0;
        ok!(cuCtxCreate_v2(&raw mut handle, 0, 0));
        Context { handle, _turn: turn }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        cu!(cuCtxDestroy_v2(self.handle));
    }
}

pub(crate) fn text(text: &str) -> CString {
    CString::new(text).unwrap()
}

/// Loads a module from PTX, after the common head.
pub(crate) fn module(body: &str) -> u64 {
    let source = ptx(body);
    let mut module = 0;
    ok!(cuModuleLoadData(&raw mut module, source.as_ptr().cast()));
    module
}

pub(crate) fn ptx(body: &str) -> CString {
    text(&format!(".version 8.0\n.target sm_80\n.address_size 64\n{body}"))
}

pub(crate) fn function(module: u64, name: &str) -> u64 {
    let name = text(name);
    let mut function = 0;
    ok!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()));
    function
}

/// Launches with parameters of eight bytes each.
pub(crate) fn launch(function: u64, grid: u32, block: u32, stream: u64, values: &mut [u64]) -> u32 {
    let mut pointers: Vec<*mut c_void> =
        values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
    let none = std::ptr::null_mut();
    cu!(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, pointers.as_mut_ptr(), none))
}

pub(crate) fn allocate(bytes: u64) -> u64 {
    let mut address = 0;
    ok!(cuMemAlloc_v2(&raw mut address, bytes));
    address
}

pub(crate) fn write<T: Copy>(to: u64, values: &[T]) {
    ok!(cuMemcpyHtoD_v2(to, values.as_ptr().cast(), size_of_val(values) as u64));
}

pub(crate) fn read<T: Copy + Default>(from: u64, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    ok!(cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), from, size_of_val(&values[..]) as u64));
    values
}

pub(crate) fn stream(flags: u32) -> u64 {
    let mut stream = 0;
    ok!(cuStreamCreate(&raw mut stream, flags));
    stream
}

pub(crate) fn event() -> u64 {
    let mut event = 0;
    ok!(cuEventCreate(&raw mut event, 0));
    event
}

/// Returns an attribute of a pointer, in its low bytes.
pub(crate) fn pointer(address: u64, attribute: i32) -> Result<u64, u32> {
    let mut value = 0u64;
    match cu!(cuPointerGetAttribute((&raw mut value).cast(), attribute, address)) {
        0 => Ok(value),
        code => Err(code),
    }
}

/// Returns an attribute of device 0.
pub(crate) fn device_attribute(attribute: i32) -> i32 {
    let mut value = -1;
    ok!(cuDeviceGetAttribute(&raw mut value, attribute, 0));
    value
}

pub(crate) fn free_bytes() -> u64 {
    let (mut free, mut total) = (0, 0);
    ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
    free
}

/// Kernels that most tests use.
pub(crate) const KERNELS: &str = r"
.visible .entry vector_add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 n)
{
    .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %rd<10>; .reg .f32 %f<4>;
    mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r0, %r1, %r2;
    cvt.u64.u32 %rd0, %r3;
    ld.param.u64 %rd1, [n];
    setp.ge.u64 %p, %rd0, %rd1;
    @%p bra END;
    shl.b64 %rd2, %rd0, 2;
    ld.param.u64 %rd3, [a]; add.u64 %rd4, %rd3, %rd2;
    ld.param.u64 %rd5, [b]; add.u64 %rd6, %rd5, %rd2;
    ld.param.u64 %rd7, [c]; add.u64 %rd8, %rd7, %rd2;
    ld.global.f32 %f0, [%rd4];
    ld.global.f32 %f1, [%rd6];
    add.f32 %f2, %f0, %f1;
    st.global.f32 [%rd8], %f2;
END:
    ret;
}
.visible .entry store(.param .u64 to, .param .u64 value)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [to]; ld.param.u64 %rd1, [value];
    st.global.u64 [%rd0], %rd1;
    ret;
}
.visible .entry load(.param .u64 from, .param .u64 to)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [from]; ld.param.u64 %rd1, [to];
    ld.global.u64 %rd2, [%rd0];
    st.global.u64 [%rd1], %rd2;
    ret;
}
.visible .entry increment(.param .u64 at)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [at];
    ld.global.u64 %rd1, [%rd0]; add.u64 %rd1, %rd1, 1; st.global.u64 [%rd0], %rd1;
    ret;
}
.visible .entry spin(.param .u64 flag)
{
    .reg .pred %p; .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [flag];
AGAIN:
    ld.volatile.global.u64 %rd1, [%rd0];
    setp.eq.u64 %p, %rd1, 0;
    @%p bra AGAIN;
    ret;
}
.visible .entry stop() { trap; ret; }
.visible .entry nothing() { ret; }
.visible .entry bounded() .maxntid 64, 1, 1 { ret; }
";

/// Pinned memory of one word, for kernels that wait for the host.
pub(crate) struct Flag(*mut u64);

// SAFETY: the word is only accessed atomically or through the device.
unsafe impl Send for Flag {}
// SAFETY: the same accesses.
unsafe impl Sync for Flag {}

impl Flag {
    pub(crate) fn new() -> Flag {
        let mut address: *mut c_void = std::ptr::null_mut();
        ok!(cuMemHostAlloc(&raw mut address, 8, 0));
        let flag = Flag(address.cast());
        flag.set(0);
        flag
    }

    pub(crate) fn pointer(&self) -> *const c_void {
        self.0.cast()
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.addr() as u64
    }

    fn word(&self) -> &std::sync::atomic::AtomicU64 {
        // SAFETY: aligned memory that lives until the context ends, after the test has ended.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(self.0) }
    }

    pub(crate) fn set(&self, value: u64) {
        self.word().store(value, std::sync::atomic::Ordering::SeqCst);
    }

    pub(crate) fn get(&self) -> u64 {
        self.word().load(std::sync::atomic::Ordering::SeqCst)
    }
}

/// Runs a test of this file in a process of its own, on a device that both can name.
pub(crate) fn start_child(test: &str, state: &std::path::Path, role: &str) -> Child {
    command(test, state, role).spawn().unwrap()
}

/// Like [`start_child`], without starting the process.
pub(crate) fn command(test: &str, state: &std::path::Path, role: &str) -> Command {
    let program: PathBuf = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command
        .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
        .env(STATE, state)
        .env("SLUICE_SOFTGPU_SCALE", "4096")
        .env("SLUICE_SOFTGPU_CONTEXT_BYTES", "0")
        .env("SOFTGPU_TEST_ROLE", role)
        .stdout(Stdio::piped());
    command
}

pub(crate) fn role() -> String {
    std::env::var("SOFTGPU_TEST_ROLE").unwrap_or_default()
}

/// Sleeps briefly: only for tests that something does *not* happen meanwhile.
pub(crate) fn a_moment() {
    std::thread::sleep(std::time::Duration::from_millis(30));
}

pub(crate) fn error_name(code: u32) -> String {
    let mut name: *const c_char = std::ptr::null();
    if cu!(cuGetErrorName(code, &raw mut name)) != 0 {
        return String::new();
    }
    // SAFETY: the driver's names are C strings that live as long as the process.
    unsafe { std::ffi::CStr::from_ptr(name) }.to_str().unwrap().to_owned()
}
