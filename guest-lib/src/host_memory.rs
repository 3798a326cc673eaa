//! Host memory of the process, by address: the host side of copies.

#![expect(unsafe_code, reason = "addresses that callers of the C API guarantee")]

use crate::error::{Error, Result};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) fn copy(to: u64, from: u64, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: both ranges were given by a caller of a copy function, or are arena memory allocated for it. They may
    // overlap when a program copies within a buffer.
    unsafe { core::ptr::copy(pointer(from).cast_const(), pointer(to), bytes) }
}

/// One side of a rectangle or box: the address of its first byte and the strides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strided {
    pub(crate) start: u64,
    pub(crate) pitch: u64,
    /// Bytes from one layer to the next.
    pub(crate) layer: u64,
}

/// A copy of `depth` layers of `height` rows of `width` bytes, whose ranges were checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostCopy {
    pub(crate) to: Strided,
    pub(crate) from: Strided,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
}

impl HostCopy {
    /// Makes the copy.
    pub(crate) fn run(&self) {
        let HostCopy { to, from, width, height, depth } = *self;
        let rows = (0..depth).flat_map(|layer| (0..height).map(move |row| (layer, row)));
        // No sum overflows: the last byte of both sides was computed when they were checked.
        let at = |side: Strided, layer: u64, row: u64| side.start + layer * side.layer + row * side.pitch;
        for (layer, row) in rows {
            copy(at(to, layer, row), at(from, layer, row), usize::try_from(width).unwrap_or(0));
        }
    }
}

/// Stores a value of 8 bytes if `wide`, else of 4, at an address aligned to its size. Other threads may poll the value, so it is
/// stored at once and after everything that this thread has seen.
pub(crate) fn store(to: u64, value: u64, wide: bool) {
    let at = pointer(to);
    if wide {
        // SAFETY: aligned arena memory, allocated for the program; programs access a value that they poll by atomic operations.
        unsafe { AtomicU64::from_ptr(at.cast()) }.store(value, Ordering::Release);
    } else {
        #[expect(clippy::cast_possible_truncation, reason = "a value of 4 bytes is the low half")]
        let low = value as u32;
        // SAFETY: the same memory.
        unsafe { AtomicU32::from_ptr(at.cast()) }.store(low, Ordering::Release);
    }
}

/// Reads bytes of the process.
pub(crate) fn read(from: u64, into: &mut [u8]) {
    // SAFETY: as for `copy`; `into` is a buffer of this library.
    unsafe { core::ptr::copy_nonoverlapping(pointer(from).cast_const(), into.as_mut_ptr(), into.len()) }
}

/// Writes bytes to a place of the program, or to arena memory.
pub(crate) fn write(to: u64, from: &[u8]) {
    // SAFETY: as for `copy`; `from` is a buffer of this library.
    unsafe { core::ptr::copy_nonoverlapping(from.as_ptr(), pointer(to), from.len()) }
}

/// Makes the text at this place of the arena empty.
pub(crate) fn clear(at: u64) {
    // SAFETY: a byte of arena memory allocated by the caller.
    unsafe { pointer(at).write(0) }
}

/// Makes a range of memory the shim owns read as zeroes.
pub(crate) fn zero(at: u64, bytes: usize) {
    // SAFETY: arena memory that the caller has just allocated.
    unsafe { pointer(at).write_bytes(0, bytes) }
}

/// Reads a word of an array of pointers.
pub(crate) fn word(from: u64, index: usize) -> Result<u64> {
    if from == 0 {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the caller of a launch gave an array of more than `index` pointers.
    Ok(unsafe { pointer(from).cast::<u64>().wrapping_add(index).read_unaligned() })
}

fn pointer(address: u64) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}
