//! A chunk source for unit tests and fuzzing: it makes chunks without an arbiter, and has the ledger of the session's memory.

use super::{Chunk, ChunkSource, Lease, MemoryStats};
use core::sync::atomic::{AtomicU64, Ordering};
use sluice_driver::{Code, Driver, code};
use sluice_messages::custody::UNIT;
use sluice_protocol::limits;
use std::sync::Arc;

/// Bytes of the session's chunks per device, and their limit. The memory helper writes it; the dispatcher reads it when no
/// memory job is in progress.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// Limit for all devices together; 0 for none.
    quota: u64,
    devices: [SourceAccount; limits::DEVICES as usize],
}

#[derive(Debug, Default)]
struct SourceAccount {
    total: AtomicU64,
    taken: AtomicU64,
    /// Bytes of `taken` in pools without allocations.
    idle: AtomicU64,
}

impl Ledger {
    pub(crate) fn new(quota: u64) -> Ledger {
        Ledger { quota: quota / UNIT * UNIT, devices: core::array::from_fn(|_| SourceAccount::default()) }
    }

    fn account(&self, device: i32) -> Option<&SourceAccount> {
        self.devices.get(usize::try_from(device).ok()?)
    }

    /// Sets the total memory of a device, for a session without a quota.
    pub(crate) fn set_total(&self, device: i32, bytes: u64) {
        if let Some(account) = self.account(device) {
            account.total.store(bytes, Ordering::Relaxed);
        }
    }

    /// True if a chunk of `bytes` may be taken now.
    fn admits(&self, device: i32, bytes: u64) -> bool {
        let taken = |account: &SourceAccount| account.taken.load(Ordering::Relaxed);
        let (total, taken) = if self.quota > 0 {
            (self.quota, self.devices.iter().map(taken).sum())
        } else {
            self.account(device)
                .map_or((0, 0), |account| (account.total.load(Ordering::Relaxed), taken(account)))
        };
        bytes <= total.saturating_sub(taken)
    }

    fn add(&self, device: i32, bytes: u64) {
        if let Some(account) = self.account(device) {
            account.taken.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    fn remove(&self, device: i32, bytes: u64) {
        if let Some(account) = self.account(device) {
            account.taken.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl MemoryStats for Ledger {
    fn info(&self, device: i32) -> (u64, u64) {
        let Some(account) = self.account(device) else { return (0, 0) };
        let (total, used) = if self.quota > 0 {
            (self.quota, self.devices.iter().map(SourceAccount::used).sum())
        } else {
            (account.total.load(Ordering::Relaxed), account.used())
        };
        (total.saturating_sub(used), total)
    }

    fn is_settled(&self, _device: i32) -> bool {
        true
    }

    fn settle(&self, _device: i32) {}

    fn devices(&self) -> Option<usize> {
        None
    }
}

impl SourceAccount {
    fn used(&self) -> u64 {
        self.taken.load(Ordering::Relaxed).saturating_sub(self.idle.load(Ordering::Relaxed))
    }
}

/// Makes chunks through the virtual-memory API, within the quota.
#[derive(Debug)]
pub(crate) struct OwnChunks {
    driver: Arc<Driver>,
    ledger: Arc<Ledger>,
    /// True for devices whose granularity divides Sluice's unit; the ledger has the total of a device that was checked.
    fits: [Option<bool>; limits::DEVICES as usize],
}

impl OwnChunks {
    pub(crate) fn new(driver: Arc<Driver>, ledger: Arc<Ledger>) -> OwnChunks {
        OwnChunks { driver, ledger, fits: [None; limits::DEVICES as usize] }
    }

    fn check_granularity(&mut self, device: i32) -> Result<(), Code> {
        let slot = usize::try_from(device)
            .ok()
            .and_then(|index| self.fits.get_mut(index))
            .ok_or(code::INVALID_DEVICE)?;
        let fits = match *slot {
            Some(fits) => fits,
            None => {
                let granularity = self.driver.granularity(device)?;
                let fits = granularity > 0 && UNIT.is_multiple_of(granularity);
                if !fits {
                    tracing::error!(
                        device,
                        granularity,
                        "the device's allocation granularity does not divide 2 MiB"
                    );
                }
                *slot.insert(fits)
            }
        };
        if fits { Ok(()) } else { Err(code::NOT_SUPPORTED) }
    }
}

impl ChunkSource for OwnChunks {
    fn take(&mut self, device: i32, bytes: u64) -> Result<Chunk, Code> {
        self.check_granularity(device)?;
        if !self.ledger.admits(device, bytes) {
            return Err(code::OUT_OF_MEMORY);
        }
        let handle = self.driver.chunk_create(bytes, device)?;
        self.ledger.add(device, bytes);
        Ok(Chunk { handle, bytes, device, lease: Lease::Own })
    }

    fn give(&mut self, chunk: Chunk) {
        match self.driver.cuMemRelease(chunk.handle) {
            Ok(()) => self.ledger.remove(chunk.device, chunk.bytes),
            // Not counted as free: the driver may not have released it.
            Err(failed) => tracing::error!(code = failed, "cannot release a chunk"),
        }
    }

    fn idle(&mut self, device: i32, bytes: u64) {
        if let Some(account) = self.ledger.account(device) {
            account.idle.store(bytes, Ordering::Relaxed);
        }
    }

    fn free(&mut self, device: i32) -> u64 {
        self.ledger.info(device).0
    }
}
