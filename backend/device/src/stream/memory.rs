//! Host memory in place of a guest's: one sealed file, resources as ranges of it, and their attachments.

use crate::link::KeepAlive;
use rustix::{
    fd::AsFd,
    fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create},
    io::{Errno, retry_on_intr},
};
use sluice_protocol::{gpu::PAGE, limits, shared::Shared as _};
use sluice_shared_memory::{
    Mapping, Run,
    mapping::MapError,
    ranges::{Free, Range},
};
use std::{
    collections::BTreeMap,
    fs::File,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// Bytes that all connections of a device may still take.
#[derive(Debug)]
pub(super) struct Budget(AtomicU64);

impl Budget {
    pub(super) fn new(bytes: u64) -> Arc<Budget> {
        Arc::new(Budget(AtomicU64::new(bytes)))
    }

    fn take(&self, bytes: u64) -> bool {
        let less = |left: u64| left.checked_sub(bytes);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn give(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// One connection's part of the budget, until it is dropped.
#[derive(Debug)]
struct BudgetShare {
    budget: Arc<Budget>,
    taken: AtomicU64,
}

impl BudgetShare {
    fn take(&self, bytes: u64) -> bool {
        let taken = self.budget.take(bytes);
        if taken {
            self.taken.fetch_add(bytes, Ordering::Relaxed);
        }
        taken
    }

    fn give(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.give(bytes);
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.budget.give(*self.taken.get_mut());
    }
}

/// The reason why the memory cannot be created.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error(transparent)]
    System(#[from] Errno),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("the memory is not valid guest memory: {0}")]
    Guest(String),
}

/// The memory of one connection.
#[derive(Debug)]
pub(super) struct ConnectionMemory {
    file: Arc<File>,
    mapping: Mapping,
    free: Free,
    /// Attached resources by address: the resource's id and its range of the file.
    attached: BTreeMap<u64, (u32, Range)>,
    share: Arc<BudgetShare>,
}

impl ConnectionMemory {
    pub(super) fn new(budget: &Arc<Budget>) -> Result<ConnectionMemory, MemoryError> {
        let file = memfd_create(c"sluice-stream", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        // Sets the length: the filter permits no ftruncate. Only the last page takes memory.
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), limits::STREAM_BYTES - PAGE, PAGE))?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let run = Run { offset: 0, bytes: limits::STREAM_BYTES };
        let mapping = Mapping::scattered(0, limits::STREAM_BYTES, [(file.as_fd(), run)])?;
        Ok(ConnectionMemory {
            file: Arc::new(File::from(file)),
            mapping,
            free: Free::new(0, limits::STREAM_BYTES),
            attached: BTreeMap::new(),
            share: Arc::new(BudgetShare { budget: Arc::clone(budget), taken: AtomicU64::new(0) }),
        })
    }

    /// Its share of the budget, for workers that may still map it when this is dropped.
    pub(super) fn share(&self) -> KeepAlive {
        Arc::clone(&self.share) as KeepAlive
    }

    /// The memory in the form in which a front-end brings it.
    pub(super) fn as_guest(&self) -> Result<crate::memory::MemorySnapshot, MemoryError> {
        let guest = |error: &dyn core::fmt::Display| MemoryError::Guest(error.to_string());
        let bytes = usize::try_from(limits::STREAM_BYTES).map_err(|error| guest(&error))?;
        let file = FileOffset::from_arc(Arc::clone(&self.file), 0);
        let region = (GuestAddress(0), bytes, Some(file));
        let memory = GuestMemoryMmap::from_ranges_with_files([region]).map_err(|error| guest(&error))?;
        Ok(crate::memory::MemorySnapshot::new(memory))
    }

    /// Maps one resource.
    pub(super) fn map(&self, range: Range) -> Result<Mapping, MapError> {
        let run = Run { offset: range.offset, bytes: range.bytes };
        Mapping::scattered(0, range.bytes, [(self.file.as_fd(), run)])
    }

    /// Memory of zeroes for a resource; `None` beyond the limits.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Range> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE) || bytes > limits::RESOURCE_BYTES {
            return None;
        }
        if !self.share.take(bytes) {
            return None;
        }
        let range = self.free.take(bytes);
        if range.is_none() {
            self.share.give(bytes);
        }
        range
    }

    /// Takes back the memory of a resource that no process maps any more.
    pub(super) fn give(&mut self, range: Range) {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match retry_on_intr(|| fallocate(&self.file, punch, range.offset, range.bytes)) {
            Ok(()) => {
                self.free.give(range);
                self.share.give(range.bytes);
            }
            // The range is not zero, so it is never used again.
            Err(error) => tracing::error!(%error, "cannot empty memory of a stream"),
        }
    }

    /// Attaches a resource at an address; the device has checked that no other one is there.
    pub(super) fn attach(&mut self, address: u64, resource: u32, range: Range) {
        self.attached.insert(address, (resource, range));
    }

    /// Detaches a resource.
    pub(super) fn detach(&mut self, resource: u32) {
        self.attached.retain(|_, (attached, _)| *attached != resource);
    }

    /// The place of an address in the mapping, and the number of contiguous bytes there.
    fn find(&self, address: u64) -> Option<(usize, usize)> {
        let (base, (_, range)) = self.attached.range(..=address).next_back()?;
        let inside = address.checked_sub(*base)?;
        let left = range.bytes.checked_sub(inside).filter(|left| *left > 0)?;
        let at = range.offset.checked_add(inside)?;
        Some((usize::try_from(at).ok()?, usize::try_from(left).ok()?))
    }

    /// Copies bytes to arena memory; `false` if some of the range is not attached.
    #[must_use]
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let (mut address, mut bytes) = (address, bytes);
        while !bytes.is_empty() {
            let Some((at, room)) = self.find(address) else { return false };
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.mapping.words().write(at, now);
            address = address.wrapping_add(now.len() as u64);
            bytes = later;
        }
        true
    }

    /// Copies bytes from arena memory, up to the end of the contiguous range.
    pub(super) fn read(&self, address: u64, into: &mut [u8]) -> usize {
        let (mut address, mut done) = (address, 0usize);
        while let Some(left) = into.get_mut(done..).filter(|left| !left.is_empty()) {
            let Some((at, room)) = self.find(address) else { break };
            let count = left.len().min(room);
            let Some(now) = left.get_mut(..count) else { break };
            self.mapping.words().read(at, now);
            address = address.wrapping_add(count as u64);
            done = done.saturating_add(count);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, reason = "a test")]
    use super::*;

    const BASE: u64 = limits::WINDOW_BOUNDS.start;

    // Promise: V23
    #[test]
    fn access_reaches_only_attached_memory_across_adjacent_resources() {
        let budget = Budget::new(limits::STREAM_BYTES);
        let mut memory = ConnectionMemory::new(&budget).unwrap();
        let (one, two) = (memory.take(2 * PAGE).unwrap(), memory.take(PAGE).unwrap());
        assert!(!memory.write(BASE, &[1]), "nothing is attached");
        memory.attach(BASE, 7, one);
        memory.attach(BASE + 2 * PAGE, 8, two);
        let bytes: Vec<u8> = (0..200).collect();
        assert!(memory.write(BASE + 2 * PAGE - 100, &bytes), "across two resources");
        let mut back = [0; 200];
        assert_eq!(memory.read(BASE + 2 * PAGE - 100, &mut back), 200);
        assert_eq!(back, *bytes);
        assert!(!memory.write(BASE + 3 * PAGE - 1, &[1, 2]), "behind the end");
        assert!(!memory.write(BASE - 1, &[1, 2]), "before the beginning");
        assert!(!memory.write(u64::MAX, &[1, 2]));
        assert_eq!(memory.read(BASE + 3 * PAGE - 50, &mut back), 50);
        memory.detach(7);
        assert!(!memory.write(BASE, &[1]));
        assert_eq!(memory.read(BASE, &mut back), 0);
    }

    // Promise: V23
    #[test]
    fn connections_share_one_budget_and_reused_memory_is_zero() {
        let budget = Budget::new(4 * PAGE);
        let (mut one, mut two) =
            (ConnectionMemory::new(&budget).unwrap(), ConnectionMemory::new(&budget).unwrap());
        for wrong in [0, 1, PAGE + 1, limits::RESOURCE_BYTES + PAGE, u64::MAX, !(PAGE - 1)] {
            assert_eq!(one.take(wrong), None, "{wrong:#x}");
        }
        let range = one.take(3 * PAGE).unwrap();
        assert_eq!(two.take(2 * PAGE), None);
        assert!(two.take(PAGE).is_some());
        one.attach(BASE, 1, range);
        assert!(one.write(BASE, &[9; 100]));
        one.detach(1);
        one.give(range);
        let again = one.take(3 * PAGE).unwrap();
        one.attach(BASE, 2, again);
        let mut bytes = [1; 100];
        assert_eq!(one.read(BASE, &mut bytes), 100);
        assert_eq!(bytes, [0; 100]);
        drop(one);
        assert!(two.take(3 * PAGE).is_some(), "a connection that is over has nothing");
    }
}
