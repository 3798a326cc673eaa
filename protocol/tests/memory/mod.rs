//! A control resource for tests: plain bytes, and a check that nothing outside a ring position is touched.

use sluice_protocol::{session, shared::Shared};
use std::{cell::RefCell, sync::atomic::Ordering};

pub(crate) struct Memory {
    bytes: RefCell<Vec<u8>>,
    /// Bytes that were read in bulk since this was last set to 0.
    pub(crate) read: RefCell<usize>,
}

impl Memory {
    pub(crate) fn new() -> Memory {
        Memory { bytes: RefCell::new(vec![0; session::BYTES]), read: RefCell::new(0) }
    }

    /// Writes as the other party might: at any offset, any bytes.
    pub(crate) fn forge(&self, at: usize, bytes: &[u8]) {
        self.bytes.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn word<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at.is_multiple_of(N), "a word at {at:#x} is not aligned");
        self.bytes.borrow()[at..at + N].try_into().unwrap()
    }
}

impl Shared for Memory {
    fn load_u32(&self, at: usize, _: Ordering) -> u32 {
        u32::from_le_bytes(self.word(at))
    }
    fn store_u32(&self, at: usize, value: u32, _: Ordering) {
        self.forge(at, &value.to_le_bytes());
    }
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        let old = u32::from_le_bytes(self.word(at));
        self.forge(at, &value.to_le_bytes());
        old
    }
    fn load_u64(&self, at: usize, _: Ordering) -> u64 {
        u64::from_le_bytes(self.word(at))
    }
    fn store_u64(&self, at: usize, value: u64, _: Ordering) {
        self.forge(at, &value.to_le_bytes());
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        *self.read.borrow_mut() += into.len();
        into.copy_from_slice(&self.bytes.borrow()[at..at + into.len()]);
    }
    fn write(&self, at: usize, from: &[u8]) {
        self.forge(at, from);
    }
    fn fence(&self) {}
}
