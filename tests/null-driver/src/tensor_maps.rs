//! Descriptors of tensors without content. The lists of a caller are read as a driver reads them, so that tools detect one that is
//! too short.

use super::{INVALID_VALUE, SUCCESS, Status, current, export, put};
use core::ffi::{c_int, c_uint, c_void};

/// Dimensions of a tensor.
const RANKS: core::ops::RangeInclusive<u32> = 1..=5;
/// The first byte of each descriptor that was made here.
const MARK: u8 = 0x7e;

/// A descriptor, aligned as in the interface.
#[repr(C, align(64))]
pub(super) struct Descriptor([u8; 128]);

/// Reads a list of the caller.
fn read<T: Copy>(list: *const T, count: u32) {
    for at in 0..count as usize {
        // SAFETY: the caller passes that many elements.
        unsafe { list.add(at).read_volatile() };
    }
}

fn encode(into: *mut Descriptor, rank: u32, least: u32, lists: impl FnOnce()) -> Status {
    if !RANKS.contains(&rank) || rank < least {
        return INVALID_VALUE;
    }
    lists();
    put(into, Descriptor([MARK; 128]))
}

// The names and types are the driver's.
export! {
    cuTensorMapEncodeTiled(
        into: *mut Descriptor, _format: c_uint, rank: c_uint, _address: *mut c_void, dimensions: *const u64, strides: *const u64,
        tile: *const c_uint, steps: *const c_uint, _interleave: c_uint, _swizzle: c_uint, _promotion: c_uint, _fill: c_uint
    ) {
        let _call = current().call("cuTensorMapEncodeTiled");
        encode(into, rank, 1, || {
            read(dimensions, rank);
            read(strides, rank - 1);
            read(tile, rank);
            read(steps, rank);
        })
    }
    cuTensorMapEncodeIm2col(
        into: *mut Descriptor, _format: c_uint, rank: c_uint, _address: *mut c_void, dimensions: *const u64, strides: *const u64,
        lower: *const c_int, upper: *const c_int, _channels: c_uint, _pixels: c_uint, steps: *const c_uint, _interleave: c_uint,
        _swizzle: c_uint, _promotion: c_uint, _fill: c_uint
    ) {
        let _call = current().call("cuTensorMapEncodeIm2col");
        encode(into, rank, 3, || {
            read(dimensions, rank);
            read(strides, rank - 1);
            read(lower, rank - 2);
            read(upper, rank - 2);
            read(steps, rank);
        })
    }
    cuTensorMapEncodeIm2colWide(
        into: *mut Descriptor, _format: c_uint, rank: c_uint, _address: *mut c_void, dimensions: *const u64, strides: *const u64,
        _lower: c_int, _upper: c_int, _channels: c_uint, _pixels: c_uint, steps: *const c_uint, _interleave: c_uint, _mode: c_uint,
        _swizzle: c_uint, _promotion: c_uint, _fill: c_uint
    ) {
        let _call = current().call("cuTensorMapEncodeIm2colWide");
        encode(into, rank, 3, || {
            read(dimensions, rank);
            read(strides, rank - 1);
            read(steps, rank);
        })
    }
    cuTensorMapReplaceAddress(into: *mut Descriptor, _address: *mut c_void) {
        let _call = current().call("cuTensorMapReplaceAddress");
        put(into, Descriptor([MARK; 128]))
    }
    cuTensorMapSetAllocationClass(into: *mut Descriptor, class: c_uint, effective: *mut c_uint) {
        let _call = current().call("cuTensorMapSetAllocationClass");
        match put(into, Descriptor([MARK; 128])) {
            SUCCESS => put(effective, class),
            failed => failed,
        }
    }
}
