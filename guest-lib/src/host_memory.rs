//! Host memory of the process, by address: the host side of copies.

#![expect(unsafe_code, reason = "addresses that callers of the C API guarantee")]

use crate::error::{Error, Result};
use core::{
    ops::Range,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

pub(crate) fn copy(to: u64, from: u64, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: both ranges were given by a caller of a copy function, or are arena memory allocated for it. They may
    // overlap when a program copies within a buffer.
    unsafe { core::ptr::copy(pointer(from).cast_const(), pointer(to), bytes) }
}

/// Lengths of the copies into staging memory that bypass the caches. For fewer bytes, the wait until the stores have reached memory takes
/// longer than the transfer between two caches. More bytes than a processor's own cache holds have left it when they are read.
const PAST_CACHES: Range<usize> = 16 << 10..1 << 20;
/// Bytes of a line of the caches.
const LINE: usize = 64;

/// Copies bytes of the program into memory that another processor or a device reads next: on a stream, the thread that sends them. The
/// ranges do not overlap.
///
/// A reader that shares no cache with this processor fetches each line out of this processor's own cache, and the next copy takes the
/// line back. Past the caches, copies of some 100 KiB are up to eight times faster then (measured), and about as fast otherwise.
pub(crate) fn stage(to: u64, from: u64, bytes: usize) {
    if !PAST_CACHES.contains(&bytes) {
        return copy(to, from, bytes);
    }
    let head = pointer(to).addr().wrapping_neg() % LINE;
    let lines = (bytes - head) / LINE;
    let rest = head + lines * LINE;
    copy(to, from, head);
    stream_lines(to + head as u64, from + head as u64, lines);
    copy(to + rest as u64, from + rest as u64, bytes - rest);
}

/// Copies lines to the start of a line by stores that leave nothing in the caches. Other processors see them before any later store.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn stream_lines(to: u64, from: u64, lines: usize) {
    use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const PARTS: usize = LINE / size_of::<__m128i>();
    let (to, from) = (pointer(to).cast::<[__m128i; PARTS]>(), pointer(from).cast::<[__m128i; PARTS]>());
    for line in 0..lines {
        let (to, from) = (to.wrapping_add(line).cast::<__m128i>(), from.wrapping_add(line).cast::<__m128i>());
        // All loads of a line come first: the compiler may not move them past the stores.
        let parts: [__m128i; PARTS] = core::array::from_fn(|part| {
            // SAFETY: as for `copy`; the load needs no alignment.
            unsafe { _mm_loadu_si128(from.wrapping_add(part)) }
        });
        for (part, value) in parts.into_iter().enumerate() {
            // SAFETY: as for `copy`; the place is aligned, as the line is, and no other access comes before the fence below.
            unsafe { _mm_stream_si128(to.wrapping_add(part), value) };
        }
    }
    // SAFETY: every x86-64 processor has SSE.
    unsafe { _mm_sfence() };
}

/// Elsewhere the lines go through the caches.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn stream_lines(to: u64, from: u64, lines: usize) {
    copy(to, from, lines * LINE);
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

// Miri copies in the other way.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::{LINE, PAST_CACHES, stage};

    fn address(of: &[u8]) -> u64 {
        of.as_ptr().expose_provenance() as u64
    }

    #[test]
    fn staged_bytes_are_those_of_the_program_at_every_alignment_and_no_other_is_written() {
        let least = PAST_CACHES.start;
        let source: Vec<u8> = (1..=251).cycle().take(least + 4 * LINE).collect();
        for bytes in [0, 1, least - 1, least, least + 1, least + LINE + 7] {
            for (to, from) in (0..LINE).flat_map(|to| [(to, 0), (to, 1), (to, 16), (to, LINE - 1)]) {
                let mut room = vec![0_u8; least + 4 * LINE];
                let base = room.as_mut_ptr().expose_provenance() as u64;
                stage(base + to as u64, address(&source) + from as u64, bytes);
                let (before, rest) = room.split_at(to);
                let (staged, after) = rest.split_at(bytes);
                assert!(before.iter().chain(after).all(|byte| *byte == 0), "{bytes} bytes, {from} to {to}");
                assert!(staged == &source[from..from + bytes], "{bytes} bytes, {from} to {to}");
            }
        }
    }
}
