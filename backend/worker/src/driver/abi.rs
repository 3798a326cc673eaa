//! Structures the driver takes by pointer, as its header lays them out.
//!
//! They are our own, because the generated types hold enumerations that a guest's number must never become.

use super::Handle;
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_abi::sys;

/// `CUmemLocation`: memory of a device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    pub(super) const fn device(device: c_int) -> Location {
        Location { kind: 1, id: device }
    }
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AllocationProperties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

impl AllocationProperties {
    /// Pinned memory of a device that no other process can import.
    pub(super) const fn device(device: c_int) -> AllocationProperties {
        AllocationProperties {
            kind: 1,
            handle_types: 0,
            location: Location::device(device),
            win32: core::ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Access {
    location: Location,
    flags: c_uint,
}

impl Access {
    pub(super) const fn read_write(device: c_int) -> Access {
        Access { location: Location::device(device), flags: 3 }
    }
}

/// `CUlaunchAttribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct LaunchAttribute {
    pub(crate) id: c_uint,
    pub(crate) pad: c_uint,
    pub(crate) value: [u64; 8],
}

impl LaunchAttribute {
    pub(crate) const NONE: LaunchAttribute = LaunchAttribute { id: 0, pad: 0, value: [0; 8] };
}

/// `CUlaunchConfig`.
#[derive(Debug)]
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) stream: Handle,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

/// One side of a [`Copy2D`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Side {
    x: usize,
    y: usize,
    memory: c_uint,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

impl Side {
    pub(super) const fn host(address: u64, pitch: usize) -> Side {
        Side { x: 0, y: 0, memory: 1, host: address, device: 0, array: 0, pitch }
    }
    pub(super) const fn device(address: u64, pitch: usize) -> Side {
        Side { x: 0, y: 0, memory: 2, host: 0, device: address, array: 0, pitch }
    }
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Copy2D {
    pub(super) from: Side,
    pub(super) to: Side,
    pub(super) width: usize,
    pub(super) height: usize,
}

/// Rows of memory: where the first begins, how far apart they are, how long and how many they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) pitch: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
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
