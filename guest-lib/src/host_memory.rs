//! Host memory of the process, by address: the host side of copies.

#![expect(unsafe_code, reason = "addresses that callers of the C API vouch for")]

use crate::error::{Error, Result};

/// Copies host memory.
pub(crate) fn copy(to: u64, from: u64, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: both ranges were given by a caller of a copy function, or are arena memory allocated for it. They may
    // overlap when a program copies within a buffer.
    unsafe { core::ptr::copy(pointer(from).cast_const(), pointer(to), bytes) }
}

/// Reads bytes of the process.
pub(crate) fn read(from: u64, into: &mut [u8]) {
    // SAFETY: as for `copy`; `into` is our own.
    unsafe { core::ptr::copy_nonoverlapping(pointer(from).cast_const(), into.as_mut_ptr(), into.len()) }
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
