//! The view of memory that another party changes at any time.
//!
//! Protocol code never holds a reference into such memory. It loads and stores single words with an ordering, or copies bytes
//! out once and parses the private copy. Implementations: a mapping in the shim and the worker, a model in tests.

use core::sync::atomic::Ordering;

/// Shared memory of one session, addressed by byte offset from its start.
///
/// Offsets are constants of [`crate::session`] or positions masked to the ring, so they are in range for all words of the
/// other party; an implementation may panic on an offset outside its mapping.
pub trait Shared {
    /// Loads the naturally aligned 32-bit word at `at`.
    fn load_u32(&self, at: usize, order: Ordering) -> u32;
    /// Stores the naturally aligned 32-bit word at `at`.
    fn store_u32(&self, at: usize, value: u32, order: Ordering);
    /// Swaps the naturally aligned 32-bit word at `at`, sequentially consistent, and returns the old one.
    fn swap_u32(&self, at: usize, value: u32) -> u32;
    /// Loads the naturally aligned 64-bit word at `at`.
    fn load_u64(&self, at: usize, order: Ordering) -> u64;
    /// Stores the naturally aligned 64-bit word at `at`.
    fn store_u64(&self, at: usize, value: u64, order: Ordering);
    /// Copies bytes out: a private copy, possibly torn by the other party.
    fn read(&self, at: usize, into: &mut [u8]);
    /// Copies bytes in.
    fn write(&self, at: usize, from: &[u8]);
    /// A sequentially consistent fence between this thread and the other party.
    fn fence(&self);
}

impl<T: Shared + ?Sized> Shared for &T {
    fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        (**self).load_u32(at, order)
    }
    fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        (**self).store_u32(at, value, order);
    }
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        (**self).swap_u32(at, value)
    }
    fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        (**self).load_u64(at, order)
    }
    fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        (**self).store_u64(at, value, order);
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        (**self).read(at, into);
    }
    fn write(&self, at: usize, from: &[u8]) {
        (**self).write(at, from);
    }
    fn fence(&self) {
        (**self).fence();
    }
}
