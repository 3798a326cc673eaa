//! Structures the driver takes by pointer, as its header lays them out.
//!
//! They are our own, because the generated types hold enumerations that a guest's number must never become.

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
    /// Pinned memory of a device, which other processes can import by a POSIX descriptor.
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
pub(crate) struct Access {
    location: Location,
    flags: c_uint,
}

impl Access {
    pub(crate) const fn new(device: c_int, flags: c_uint) -> Access {
        Access { location: Location::device(device), flags }
    }
}

/// `CUlaunchAttribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchAttribute {
    /// Which one.
    pub id: c_uint,
    /// Nothing.
    pub pad: c_uint,
    /// Its value.
    pub value: [u64; 8],
}

impl LaunchAttribute {
    /// No attribute, to fill arrays.
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
pub(crate) struct Side {
    x: usize,
    y: usize,
    memory: c_uint,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

impl Side {
    pub(crate) const fn host(address: u64, pitch: usize) -> Side {
        Side { x: 0, y: 0, memory: 1, host: address, device: 0, array: 0, pitch }
    }
    pub(crate) const fn device(address: u64, pitch: usize) -> Side {
        Side { x: 0, y: 0, memory: 2, host: 0, device: address, array: 0, pitch }
    }
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Copy2D {
    pub(crate) from: Side,
    pub(crate) to: Side,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// Rows of memory: where the first begins, how far apart they are, how long and how many they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Bytes from the beginning of one row to that of the next.
    pub pitch: u64,
    /// Bytes of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
}

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
    Access = sys::CUmemAccessDesc;
    LaunchAttribute = sys::CUlaunchAttribute;
    LaunchConfig = sys::CUlaunchConfig;
    Copy2D = sys::CUDA_MEMCPY2D;
}
