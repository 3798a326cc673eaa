//! Structures that the driver takes by pointer, in the layout of its header.
//!
//! They are our own, because the generated types hold enumerations, which a guest's number must never become.

use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_abi::sys;

/// A handle of the driver: a pointer to the driver, a number here.
pub type Handle = u64;
/// A C callback; only null is ever passed.
pub type Callback = unsafe extern "C" fn();
/// A function from block size to dynamic shared bytes; only null is ever passed.
pub type BlockToShared = unsafe extern "C" fn(c_int) -> usize;

/// A function that the driver calls in the order of a stream, with the pointer that it got with it.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);
/// A function that the driver calls with a stream and a status; only null is ever passed.
pub type StreamCallback = unsafe extern "C" fn(Handle, c_uint, *mut c_void);

/// `CUmemLocation`: memory of a device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    pub(crate) const fn device(device: c_int) -> Location {
        Location { kind: 1, id: device }
    }
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const POSIX_FILE_DESCRIPTOR: c_uint = 1;

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AllocationProperties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

impl AllocationProperties {
    /// Pinned memory of a device that other processes can import through a POSIX descriptor.
    pub(crate) const fn device(device: c_int) -> AllocationProperties {
        AllocationProperties {
            kind: 1,
            handle_types: POSIX_FILE_DESCRIPTOR,
            location: Location::device(device),
            win32: core::ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AccessDesc {
    location: Location,
    flags: c_uint,
}

impl AccessDesc {
    pub(crate) const fn new(device: c_int, flags: c_uint) -> AccessDesc {
        AccessDesc { location: Location::device(device), flags }
    }
}

/// `CUlaunchAttribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchAttribute {
    /// Number of the attribute.
    pub id: c_uint,
    /// Padding of the C structure.
    pub pad: c_uint,
    /// Value of the attribute.
    pub value: [u64; 8],
}

impl LaunchAttribute {
    /// No attribute, for filling arrays.
    pub const NONE: LaunchAttribute = LaunchAttribute { id: 0, pad: 0, value: [0; 8] };
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT`.
    pub const PROGRAMMATIC_EVENT: c_uint = 7;
    /// `CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT`.
    pub const LAUNCH_COMPLETION_EVENT: c_uint = 12;

    /// True if the launch records an event.
    #[must_use]
    pub const fn records_event(&self) -> bool {
        matches!(self.id, LaunchAttribute::PROGRAMMATIC_EVENT | LaunchAttribute::LAUNCH_COMPLETION_EVENT)
    }
}

/// `CUlaunchConfig`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared: c_uint,
    pub(crate) stream: Handle,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) attribute_count: c_uint,
}

/// One side of a [`Copy2D`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CopySide {
    x: usize,
    y: usize,
    memory: c_uint,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

impl CopySide {
    pub(crate) const fn host(address: u64, pitch: usize) -> CopySide {
        CopySide { x: 0, y: 0, memory: 1, host: address, device: 0, array: 0, pitch }
    }
    pub(crate) const fn device(address: u64, pitch: usize) -> CopySide {
        CopySide { x: 0, y: 0, memory: 2, host: 0, device: address, array: 0, pitch }
    }
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Copy2D {
    pub(crate) from: CopySide,
    pub(crate) to: CopySide,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// One side of a [`BoxCopy`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CopySide3D {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    memory: c_uint,
    host: u64,
    device: u64,
    array: u64,
    /// Reserved in `CUDA_MEMCPY3D`.
    context: u64,
    pub(crate) pitch: usize,
    height: usize,
}

impl CopySide3D {
    const NONE: CopySide3D = CopySide3D {
        x: 0,
        y: 0,
        z: 0,
        level: 0,
        memory: 0,
        host: 0,
        device: 0,
        array: 0,
        context: 0,
        pitch: 0,
        height: 0,
    };

    pub(crate) const fn host(address: u64, pitch: usize, height: usize) -> CopySide3D {
        CopySide3D { memory: 1, host: address, pitch, height, ..CopySide3D::NONE }
    }
    pub(crate) const fn device(address: u64, pitch: usize, height: usize) -> CopySide3D {
        CopySide3D { memory: 2, device: address, pitch, height, ..CopySide3D::NONE }
    }
    pub(crate) const fn of_context(self, context: Handle) -> CopySide3D {
        CopySide3D { context, ..self }
    }
    pub(crate) const fn array(array: Handle, [x, y, z]: [u32; 3]) -> CopySide3D {
        let (x, y, z) = (x as usize, y as usize, z as usize);
        CopySide3D { memory: 3, array, x, y, z, ..CopySide3D::NONE }
    }
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BoxCopy {
    pub(crate) from: CopySide3D,
    pub(crate) to: CopySide3D,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
}

/// `CUDA_KERNEL_NODE_PARAMS`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct KernelNode {
    pub(crate) function: Handle,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared: c_uint,
    pub(crate) parameters: *mut *mut c_void,
    pub(crate) extra: *mut *mut c_void,
    pub(crate) kernel: Handle,
    pub(crate) context: Handle,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct FillNode {
    pub(crate) to: u64,
    pub(crate) pitch: usize,
    pub(crate) value: c_uint,
    pub(crate) element: c_uint,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`, with a number in place of the pointer that the function gets.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct HostNode {
    pub(crate) function: Option<HostFunction>,
    pub(crate) data: u64,
}

/// `CUstreamBatchMemOpParams` of a write.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct WriteOperation {
    operation: c_uint,
    address: u64,
    value: u64,
    flags: c_uint,
    alias: u64,
    unused: u64,
}

impl WriteOperation {
    pub(crate) const fn new(address: u64, value: u64, wide: bool) -> WriteOperation {
        const WRITE_32: c_uint = 2;
        const WRITE_64: c_uint = 5;
        let operation = if wide { WRITE_64 } else { WRITE_32 };
        WriteOperation { operation, address, value, flags: 0, alias: 0, unused: 0 }
    }
}

/// `CUstreamBatchMemOpParams` of a memory barrier.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BarrierOperation {
    operation: c_uint,
    flags: c_uint,
    unused: [u64; 5],
}

impl BarrierOperation {
    pub(crate) const fn new(kind: u32) -> BarrierOperation {
        const BARRIER: c_uint = 6;
        BarrierOperation { operation: BARRIER, flags: kind, unused: [0; 5] }
    }
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct OperationsNode {
    pub(crate) context: Handle,
    pub(crate) count: c_uint,
    pub(crate) list: *mut c_void,
    pub(crate) flags: c_uint,
}

/// `CUgraphNodeParams` of a conditional node.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ConditionalNode {
    kind: c_uint,
    reserved: [c_uint; 3],
    handle: u64,
    selection: c_uint,
    size: c_uint,
    /// The driver's array of bodies, as long as the node exists.
    pub(crate) bodies: *const Handle,
    context: Handle,
    unused: [u64; 26],
}

impl ConditionalNode {
    pub(crate) const fn new(handle: u64, selection: u32, size: u32, context: Handle) -> ConditionalNode {
        const CONDITIONAL: c_uint = 13;
        let bodies = core::ptr::null();
        let (kind, reserved, unused) = (CONDITIONAL, [0; 3], [0; 26]);
        ConditionalNode { kind, reserved, handle, selection, size, bodies, context, unused }
    }
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Instantiation {
    pub(crate) flags: u64,
    pub(crate) upload_stream: Handle,
    pub(crate) error_node: Handle,
    pub(crate) result: c_uint,
}

/// `CUgraphExecUpdateResultInfo`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct UpdateResult {
    pub(crate) result: c_uint,
    pub(crate) error_node: Handle,
    pub(crate) error_from: Handle,
}

/// `CUgraphEdgeData`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct EdgeData {
    /// The event of the earlier node that releases the later one.
    pub from_port: u8,
    /// The part of the later node that waits.
    pub to_port: u8,
    /// `CUgraphDependencyType`.
    pub kind: u8,
    /// Zeroes.
    pub reserved: [u8; 5],
}

/// Rows of memory: the distance between their starts, their length and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Bytes from the start of one row to that of the next.
    pub pitch: u64,
    /// Length of a row in bytes.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
}

/// `CUtensorMap`: a descriptor that only device and driver read. Headers of version 12 align it to 64 bytes, later ones to 128.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
pub(crate) struct TensorMap(pub(crate) [u8; 128]);

macro_rules! same_size {
    ($($ours:ty = $theirs:ty;)+) => {
        $(const _: () = assert!(
            size_of::<$ours>() == size_of::<$theirs>() && align_of::<$ours>() == align_of::<$theirs>()
        );)+
    };
}
same_size! {
    Location = sys::CUmemLocation;
    AllocationProperties = sys::CUmemAllocationProp;
    AccessDesc = sys::CUmemAccessDesc;
    LaunchAttribute = sys::CUlaunchAttribute;
    LaunchConfig = sys::CUlaunchConfig;
    Copy2D = sys::CUDA_MEMCPY2D;
    BoxCopy = sys::CUDA_MEMCPY3D;
    BoxCopy = sys::CUDA_MEMCPY3D_PEER;
    KernelNode = sys::CUDA_KERNEL_NODE_PARAMS;
    FillNode = sys::CUDA_MEMSET_NODE_PARAMS;
    WriteOperation = sys::CUstreamBatchMemOpParams;
    BarrierOperation = sys::CUstreamBatchMemOpParams;
    OperationsNode = sys::CUDA_BATCH_MEM_OP_NODE_PARAMS;
    ConditionalNode = sys::CUgraphNodeParams;
    Instantiation = sys::CUDA_GRAPH_INSTANTIATE_PARAMS;
    UpdateResult = sys::CUgraphExecUpdateResultInfo;
    EdgeData = sys::CUgraphEdgeData;
    TensorMap = sys::CUtensorMap;
}
