//! The source of the session's memory: the arbiters of its devices. A worker makes no device memory itself; only a dispatcher
//! without a process, in unit tests and fuzzing, does.

#[cfg(any(test, fuzzing))]
use crate::memory::{Ledger, OwnChunks};
use crate::{
    memory::{
        ChunkSource, MemoryStats,
        custody::{Custody, Grant},
    },
    session::objects::ContextRef,
};
use sluice_driver::Code;
#[cfg(any(test, fuzzing))]
use sluice_driver::Driver;
use sluice_messages::custody::Growth;
#[cfg(any(test, fuzzing))]
use sluice_protocol::limits;
use std::sync::Arc;

/// The source of the session's memory.
#[derive(Clone, Debug)]
pub(crate) enum MemorySource {
    /// Lent by the arbiters, device by device.
    Lent(Arc<Custody>),
    /// Made by this process.
    #[cfg(any(test, fuzzing))]
    Own(Arc<Driver>, Arc<Ledger>),
}

impl MemorySource {
    /// Chunks of the driver, within a quota; 0 means no quota.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn own(driver: &Arc<Driver>, quota: u64) -> Result<MemorySource, Code> {
        let ledger = Ledger::new(quota);
        for ordinal in 0..driver.device_count()?.min(limits::DEVICES) {
            let device = driver.device(ordinal)?;
            ledger.set_total(device, driver.device_memory(device)?);
        }
        Ok(MemorySource::Own(Arc::clone(driver), Arc::new(ledger)))
    }

    pub(crate) fn stats(&self) -> &dyn MemoryStats {
        match self {
            MemorySource::Lent(custody) => &**custody,
            #[cfg(any(test, fuzzing))]
            MemorySource::Own(_, ledger) => &**ledger,
        }
    }

    pub(crate) fn source(&self) -> Box<dyn ChunkSource + Send> {
        match self {
            MemorySource::Lent(custody) => Box::new(Arc::clone(custody)),
            #[cfg(any(test, fuzzing))]
            MemorySource::Own(driver, ledger) => {
                Box::new(OwnChunks::new(Arc::clone(driver), Arc::clone(ledger)))
            }
        }
    }

    /// The links to the arbiters, if there are any.
    pub(crate) const fn custody(&self) -> Option<&Arc<Custody>> {
        match self {
            MemorySource::Lent(custody) => Some(custody),
            #[cfg(any(test, fuzzing))]
            MemorySource::Own(..) => None,
        }
    }

    /// Permission for the driver to take memory for itself, until the returned grant is [taken] or dropped.
    pub(crate) fn grow(&self, device: i32, reason: Growth, bytes: u64) -> Result<Option<Grant<'_>>, Code> {
        self.custody().map(|custody| custody.grow(device, reason, bytes)).transpose()
    }

    /// As [`MemorySource::grow`], but always asks the arbiter: the driver did not find the memory of an earlier grant's margin.
    pub(crate) fn ask_growth(
        &self,
        device: i32,
        reason: Growth,
        bytes: u64,
    ) -> Result<Option<Grant<'_>>, Code> {
        self.custody().map(|custody| custody.ask_growth(device, reason, bytes)).transpose()
    }

    /// Records that the driver has given back the memory of an image or a graph, of a context if it was granted for one.
    pub(crate) fn driver_shrank(&self, device: i32, context: Option<ContextRef>, bytes: u64) {
        if let Some(custody) = self.custody() {
            custody.driver_shrank(device, context, bytes);
        }
    }

    /// Records that the driver has given back a context with everything that it had taken for it.
    pub(crate) fn context_gone(&self, device: i32, context: ContextRef) {
        if let Some(custody) = self.custody() {
            custody.context_gone(device, context);
        }
    }

    /// Counts guest memory that is about to be pinned.
    pub(crate) fn pin(&self, device: i32, bytes: u64) -> Result<(), Code> {
        self.custody().map_or(Ok(()), |custody| custody.pin(device, bytes))
    }

    /// Counts guest memory that is no longer pinned.
    pub(crate) fn unpin(&self, device: i32, bytes: u64) {
        if let Some(custody) = self.custody() {
            custody.unpin(device, bytes);
        }
    }
}

/// Records that the driver has taken the memory of a grant, for a context if it gives the memory back with that, and returns the
/// bytes; 0 without an arbiter.
pub(crate) fn taken(grant: Option<Grant<'_>>, context: Option<ContextRef>) -> u64 {
    grant.map_or(0, |grant| grant.taken(context))
}
