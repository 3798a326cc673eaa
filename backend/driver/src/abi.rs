//! Structures that the driver takes by pointer, in the layout of its header.
//!
//! They are our own, because the generated types hold enumerations, which a guest's number must never become.

use crate::Handle;
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_abi::sys;

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
    TensorMap = sys::CUtensorMap;
}
