//! Structures of the header.

use std::ffi::c_void;

use sluice_cuda_abi::sys;
use sluice_cuda_frontend::{ErrorCode, In};

use crate::plan::{Copy3D, CopySide, FillWork, MemoryOperation};

/// Asserts that a structure has the size of the header's.
macro_rules! same_size {
    ($($own:ty = $header:ident),* $(,)?) => {
        $(const _: () = assert!(size_of::<$own>() == size_of::<sys::$header>());)*
    };
}

same_size! {
    KernelParametersV1<u32> = CUDA_KERNEL_NODE_PARAMS_v1,
    KernelParameters<u32> = CUDA_KERNEL_NODE_PARAMS_v2,
    KernelParameters<u32> = CUDA_KERNEL_NODE_PARAMS_v3,
    RectangleParameters = CUDA_MEMCPY2D,
    CopyParameters = CUDA_MEMCPY3D,
    CopyParameters = CUDA_MEMCPY3D_PEER,
    CopyNodeParameters = CUDA_MEMCPY_NODE_PARAMS,
    FillParameters = CUDA_MEMSET_NODE_PARAMS,
    FillNodeParameters = CUDA_MEMSET_NODE_PARAMS_v2,
    HostParameters = CUDA_HOST_NODE_PARAMS,
    HostNodeParameters = CUDA_HOST_NODE_PARAMS_v2,
    ChildParameters = CUDA_CHILD_GRAPH_NODE_PARAMS,
    ConditionalAnswer = CUDA_CONDITIONAL_NODE_PARAMS,
    EventRecordParameters = CUDA_EVENT_RECORD_NODE_PARAMS,
    BatchParameters<u32> = CUDA_BATCH_MEM_OP_NODE_PARAMS,
    BatchParameters<u32> = CUDA_BATCH_MEM_OP_NODE_PARAMS_v2,
    BatchOperation = CUstreamBatchMemOpParams,
    NodeParameters = CUgraphNodeParams,
    InstantiateParameters = CUDA_GRAPH_INSTANTIATE_PARAMS,
    UpdateResult = CUgraphExecUpdateResultInfo,
    [u8; 8] = CUgraphEdgeData,
    [u8; 64] = CUlaunchAttributeValue,
}

/// `CUDA_KERNEL_NODE_PARAMS_v1`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelParametersV1<E> {
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) parameters: In<In<u8, E>, E>,
    pub(crate) extra: In<In<c_void, E>, E>,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2` and `_v3`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelParameters<E> {
    pub(crate) first: KernelParametersV1<E>,
    pub(crate) kernel: u64,
    pub(crate) context: u64,
}

/// The same, with the address of an array that its node owns.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct KernelAnswer {
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) parameters: u64,
    pub(crate) extra: u64,
    pub(crate) kernel: u64,
    pub(crate) context: u64,
}

const _: () = assert!(size_of::<KernelAnswer>() == size_of::<KernelParameters<u32>>());

/// One side of `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RectangleSideParameters {
    x: u64,
    y: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: u64,
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RectangleParameters {
    from: RectangleSideParameters,
    to: RectangleSideParameters,
    width: u64,
    height: u64,
}

impl From<RectangleSideParameters> for CopySide {
    fn from(side: RectangleSideParameters) -> CopySide {
        let RectangleSideParameters { x, y, kind, host, device, array, pitch } = side;
        CopySide { x, y, kind, host, device, array, pitch, ..CopySide::default() }
    }
}

impl From<RectangleParameters> for Copy3D {
    fn from(copy: RectangleParameters) -> Copy3D {
        let RectangleParameters { from, to, width, height } = copy;
        Copy3D { from: from.into(), to: to.into(), width, height, depth: 1 }
    }
}

/// One side of `CUDA_MEMCPY3D` and of `CUDA_MEMCPY3D_PEER`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CopySideParameters {
    x: u64,
    y: u64,
    z: u64,
    level: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    /// Reserved in `CUDA_MEMCPY3D`.
    context: u64,
    pitch: u64,
    height: u64,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CopyParameters {
    from: CopySideParameters,
    to: CopySideParameters,
    width: u64,
    height: u64,
    depth: u64,
}

impl CopyParameters {
    /// The contexts of destination and source in `CUDA_MEMCPY3D_PEER`. In `CUDA_MEMCPY3D` they are reserved, and must be 0.
    #[must_use]
    pub const fn contexts(&self) -> [u64; 2] {
        [self.to.context, self.from.context]
    }
}

impl From<CopySideParameters> for CopySide {
    fn from(side: CopySideParameters) -> CopySide {
        let CopySideParameters { x, y, z, level, kind, host, device, array, pitch, height, .. } = side;
        CopySide { x, y, z, level, kind, host, device, array, pitch, height }
    }
}

impl From<CopySide> for CopySideParameters {
    fn from(side: CopySide) -> CopySideParameters {
        let CopySide { x, y, z, level, kind, host, device, array, pitch, height } = side;
        CopySideParameters { x, y, z, level, kind, host, device, array, context: 0, pitch, height }
    }
}

impl From<CopyParameters> for Copy3D {
    fn from(copy: CopyParameters) -> Copy3D {
        let CopyParameters { from, to, width, height, depth } = copy;
        Copy3D { from: from.into(), to: to.into(), width, height, depth }
    }
}

impl From<Copy3D> for CopyParameters {
    fn from(copy: Copy3D) -> CopyParameters {
        let Copy3D { from, to, width, height, depth } = copy;
        CopyParameters { from: from.into(), to: to.into(), width, height, depth }
    }
}

/// `CUDA_MEMCPY_NODE_PARAMS`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct CopyNodeParameters {
    pub(crate) flags: i32,
    pub(crate) reserved: i32,
    pub(crate) context: u64,
    pub(crate) copy: CopyParameters,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct FillParameters {
    to: u64,
    pitch: u64,
    value: u32,
    element: u32,
    width: u64,
    height: u64,
}

impl From<FillParameters> for FillWork {
    fn from(fill: FillParameters) -> FillWork {
        let FillParameters { to, pitch, value, element, width, height } = fill;
        FillWork { to, pitch, value, element, width, height }
    }
}

impl From<FillWork> for FillParameters {
    fn from(fill: FillWork) -> FillParameters {
        let FillWork { to, pitch, value, element, width, height } = fill;
        FillParameters { to, pitch, value, element, width, height }
    }
}

/// `CUDA_MEMSET_NODE_PARAMS_v2`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct FillNodeParameters {
    pub(crate) fill: FillParameters,
    pub(crate) context: u64,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct HostParameters {
    pub(crate) function: u64,
    pub(crate) data: u64,
}

/// `CUDA_HOST_NODE_PARAMS_v2`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct HostNodeParameters {
    pub(crate) host: HostParameters,
    pub(crate) sync_mode: u32,
    pub(crate) context: u64,
}

/// `CUDA_CHILD_GRAPH_NODE_PARAMS`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct ChildParameters {
    pub(crate) graph: u64,
    pub(crate) ownership: i32,
}

/// `CUDA_CONDITIONAL_NODE_PARAMS`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct ConditionalAnswer {
    pub(crate) handle: u64,
    pub(crate) kind: u32,
    pub(crate) size: u32,
    pub(crate) graphs: u64,
    pub(crate) context: u64,
}

/// Words of a [`ConditionalAnswer`] in front of the array of graphs.
pub(crate) const CONDITIONAL_GRAPHS: usize = 2;

const _: () = assert!(core::mem::offset_of!(ConditionalAnswer, graphs) == 8 * CONDITIONAL_GRAPHS);

/// `CUDA_EVENT_RECORD_NODE_PARAMS`; that of a wait has only the event.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct EventRecordParameters {
    pub(crate) event: u64,
    pub(crate) context: u64,
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatchParameters<E> {
    pub(crate) context: u64,
    pub(crate) count: u32,
    pub(crate) operations: In<BatchOperation, E>,
    pub(crate) flags: u32,
}

/// The same, with the address of an array that its node owns.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct BatchAnswer {
    pub(crate) context: u64,
    pub(crate) count: u32,
    pub(crate) operations: u64,
    pub(crate) flags: u32,
}

const _: () = assert!(size_of::<BatchAnswer>() == size_of::<BatchParameters<u32>>());

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AllocationParameters<E> {
    pub(crate) pool: PoolProperties,
    pub(crate) access: In<[u32; 3], E>,
    pub(crate) count: usize,
    pub(crate) bytes: usize,
    pub(crate) address: u64,
}

/// The same, with the address of an array that its node owns.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct AllocationAnswer {
    pub(crate) pool: PoolProperties,
    pub(crate) access: u64,
    pub(crate) count: usize,
    pub(crate) bytes: usize,
    pub(crate) address: u64,
}

const _: () = assert!(size_of::<AllocationAnswer>() == size_of::<AllocationParameters<u32>>());

/// Words of an [`AllocationAnswer`] in front of the address.
pub(crate) const ALLOCATION_ADDRESS: usize = 14;

/// `CUmemPoolProps`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct PoolProperties {
    pub(crate) kind: u32,
    pub(crate) handles: u32,
    pub(crate) place: u32,
    pub(crate) device: i32,
    pub(crate) security: u64,
    pub(crate) most: u64,
    /// The usage, and bytes that are 0.
    pub(crate) rest: [u64; 7],
}

const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());
const _: () = assert!(core::mem::offset_of!(AllocationAnswer, address) == 8 * ALLOCATION_ADDRESS);

/// `CUstreamBatchMemOpParams`: the kind, the address, the value and the flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BatchOperation(pub(crate) [u64; 6]);

const WAIT_32: u32 = 1;
const WRITE_32: u32 = 2;
const WAIT_64: u32 = 4;
const WRITE_64: u32 = 5;
const BARRIER: u32 = 6;
/// The last kind of the header.
const LAST_KIND: u32 = 8;

/// An operation of a stream: `cuStreamBatchMemOp` takes more kinds than a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamOperation {
    /// A wait for a value or the writing of one.
    Value(MemoryOperation),
    /// A memory barrier.
    Barrier {
        /// `CUstreamMemoryBarrier_flags`.
        flags: u32,
    },
}

/// Most operations of a batch, as `cuda.h` states it: fewer than 256.
const MOST_IN_STREAM: u32 = 255;

/// Reads the list of a `cuStreamBatchMemOp`, once: the program may change it meanwhile. `None` refuses it as invalid, an operation that
/// drivers have and this project does not as `unsupported`.
///
/// # Errors
/// [`ErrorCode`] of a null list, `invalid` and `unsupported`.
pub fn stream_operations<E: ErrorCode>(
    list: In<BatchOperation, E>,
    count: u32,
    flags: u32,
    (invalid, unsupported): (E, E),
) -> Result<Vec<StreamOperation>, E> {
    if flags != 0 || count > MOST_IN_STREAM {
        return Err(invalid);
    }
    let mut operations = Vec::new();
    for index in 0..count as usize {
        operations.push(match list.get_at(index)?.stream_operation() {
            Ok(operation) => operation,
            Err(NoOperation::Unknown) => return Err(invalid),
            Err(NoOperation::Unsupported) => return Err(unsupported),
        });
    }
    Ok(operations)
}

/// `CU_STREAM_WAIT_VALUE_NOR`, the last of the comparisons.
pub const WAIT_NOR: u32 = 3;
/// `CU_STREAM_WAIT_VALUE_FLUSH`.
const WAIT_FLUSH: u32 = 1 << 30;

/// Checks a wait or a write in a stream as far as that needs no device, and returns the address and length of the value. Remote
/// writes cannot be flushed, so a wait with that flag is refused as `unsupported`.
///
/// # Errors
/// `invalid` and `unsupported`.
pub fn checked_value<E>(
    operation: &MemoryOperation,
    (invalid, unsupported): (E, E),
) -> Result<(u64, u64), E> {
    let (address, wide, unknown) = match *operation {
        MemoryOperation::Wait { at, wide, flags, .. } => (at, wide, flags & !(WAIT_NOR | WAIT_FLUSH) != 0),
        // Functions of version 2 support no order but that of the stream (`CUstreamWriteValue_flags` in cuda.h).
        MemoryOperation::Write { to, wide, flags, .. } => (to, wide, flags != 0),
    };
    let bytes = if wide { 8 } else { 4 };
    if unknown || !address.is_multiple_of(bytes) {
        return Err(invalid);
    }
    match *operation {
        MemoryOperation::Wait { flags, .. } if flags & WAIT_FLUSH != 0 => Err(unsupported),
        _ => Ok((address, bytes)),
    }
}

/// The reason that an operation has no [`MemoryOperation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoOperation {
    /// The header has no such kind.
    Unknown,
    /// A flush, a barrier or a reduction.
    Unsupported,
}

impl BatchOperation {
    /// Reads an operation.
    ///
    /// # Errors
    /// For kinds that are neither a wait nor a write.
    pub fn operation(self) -> Result<MemoryOperation, NoOperation> {
        let [kind, address, value, flags, ..] = self.0;
        // Lower halves: these fields have 4 bytes.
        let (kind, flags) = (low(kind), low(flags));
        let wide = kind == WAIT_64 || kind == WRITE_64;
        let value = if wide { value } else { u64::from(low(value)) };
        match kind {
            WAIT_32 | WAIT_64 => Ok(MemoryOperation::Wait { at: address, value, wide, flags }),
            WRITE_32 | WRITE_64 => Ok(MemoryOperation::Write { to: address, value, wide, flags }),
            1..=LAST_KIND => Err(NoOperation::Unsupported),
            _ => Err(NoOperation::Unknown),
        }
    }

    /// Reads an operation of a stream, which has barriers besides.
    ///
    /// # Errors
    /// For kinds that are neither a wait nor a write nor a barrier.
    pub fn stream_operation(self) -> Result<StreamOperation, NoOperation> {
        let [first, ..] = self.0;
        // A barrier has two fields of 4 bytes: the kind, and the flags in the upper half of the same word.
        if low(first) == BARRIER {
            return Ok(StreamOperation::Barrier { flags: low(first >> 32) });
        }
        self.operation().map(StreamOperation::Value)
    }

    pub(crate) fn of(operation: &MemoryOperation) -> BatchOperation {
        let (kind, address, value, flags) = match *operation {
            MemoryOperation::Wait { at, value, wide, flags } => {
                (if wide { WAIT_64 } else { WAIT_32 }, at, value, flags)
            }
            MemoryOperation::Write { to, value, wide, flags } => {
                (if wide { WRITE_64 } else { WRITE_32 }, to, value, flags)
            }
        };
        BatchOperation([u64::from(kind), address, value, u64::from(flags), 0, 0])
    }
}

fn low(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0)
}

/// `CUgraphNodeParams`: the kind, and the parameters of that kind.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NodeParameters {
    pub(crate) kind: u32,
    pub(crate) reserved: [u32; 3],
    pub(crate) body: [u64; 29],
    pub(crate) end: u64,
}

/// Words of a [`NodeParameters`] in front of its body.
pub(crate) const BODY: usize = 2;

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct InstantiateParameters {
    pub(crate) flags: u64,
    pub(crate) stream: u64,
    pub(crate) node: u64,
    pub(crate) result: u32,
}

/// `CUgraphExecUpdateResultInfo`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct UpdateResult {
    pub(crate) result: u32,
    pub(crate) node: u64,
    pub(crate) from: u64,
}
