//! An allocator that divides a range of addresses into blocks. Pure bookkeeping: it never accesses the memory.

use std::collections::BTreeMap;

/// A first-fit allocator that joins free neighbours.
#[derive(Debug)]
pub(crate) struct FirstFit {
    bytes: u64,
    free: BTreeMap<u64, u64>,
}

impl FirstFit {
    /// Creates an empty arena of `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> FirstFit {
        FirstFit { bytes, free: BTreeMap::from([(0, bytes)]) }
    }

    /// Takes a block and returns its offset. Size and offset are multiples of the alignment.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (offset, length) =
            self.free.iter().find(|(_, length)| **length >= bytes).map(|(o, l)| (*o, *l))?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Gives a block back.
    pub(crate) fn give(&mut self, mut offset: u64, mut bytes: u64) {
        if let Some(after) = self.free.remove(&(offset + bytes)) {
            bytes += after;
        }
        if let Some((before, length)) = self.free.range(..offset).next_back().map(|(o, l)| (*o, *l))
            && before + length == offset
        {
            self.free.remove(&before);
            offset = before;
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }

    /// True if no block is taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.free.get(&0) == Some(&self.bytes)
    }
}

/// Memory for `malloc` in kernels, inside a block of device memory. Contents are never cleared.
#[derive(Debug)]
pub(crate) struct DeviceHeap {
    base: u64,
    arena: FirstFit,
    taken: BTreeMap<u64, u64>,
    used: bool,
}

impl DeviceHeap {
    /// Creates a heap in a block of device memory.
    pub(crate) fn new(base: u64, bytes: u64) -> DeviceHeap {
        DeviceHeap { base, arena: FirstFit::new(bytes), taken: BTreeMap::new(), used: false }
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// True if a kernel has ever allocated from it.
    pub(crate) fn is_used(&self) -> bool {
        self.used
    }

    /// Allocates a block with an alignment of 16 bytes. Returns 0 if there is no room.
    pub(crate) fn malloc(&mut self, bytes: u64) -> u64 {
        self.used = true;
        let Some(bytes) = bytes.max(1).checked_next_multiple_of(16) else { return 0 };
        match self.arena.take(bytes) {
            Some(offset) => {
                self.taken.insert(offset, bytes);
                self.base + offset
            }
            None => 0,
        }
    }

    /// Frees a block; an unknown address is ignored.
    pub(crate) fn free(&mut self, address: u64) {
        let Some(offset) = address.checked_sub(self.base) else { return };
        if let Some(bytes) = self.taken.remove(&offset) {
            self.arena.give(offset, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_blocks_join_their_neighbours() {
        let mut arena = FirstFit::new(4096);
        let offsets: Vec<_> = (0..8).map(|_| arena.take(512).unwrap()).collect();
        assert_eq!(offsets, [0, 512, 1024, 1536, 2048, 2560, 3072, 3584]);
        assert_eq!(arena.take(1), None);
        for offset in [512, 3584, 0, 1024, 2560, 1536, 3072] {
            arena.give(offset, 512);
        }
        assert!(!arena.is_empty());
        assert_eq!(arena.take(2048), Some(0));
        arena.give(0, 2048);
        arena.give(2048, 512);
        assert!(arena.is_empty());
        assert_eq!(arena.take(4096), Some(0));
    }

    #[test]
    fn device_heap_ignores_unknown_addresses() {
        let mut heap = DeviceHeap::new(0x1000, 64);
        let first = heap.malloc(10);
        assert_eq!(first, 0x1000);
        assert_eq!(heap.malloc(48), 0x1010);
        assert_eq!(heap.malloc(1), 0);
        assert_eq!(heap.malloc(u64::MAX), 0);
        heap.free(0);
        heap.free(first + 1);
        heap.free(first);
        heap.free(first);
        assert_eq!(heap.malloc(16), first);
    }
}
