//! Guest memory of the session: mapped at the guest's own addresses, pinned for the driver.
//!
//! The control thread maps what the device names; the memory helper pins it. No descriptor outlives its message.

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::fstat,
};
use sluice_driver::{Code, code};
use sluice_protocol::{control::Run, limits, shared::Shared};
use sluice_shared_memory::{
    Mapping,
    mapping::{MapError, Words},
};
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// One attached resource.
#[derive(Debug)]
pub(crate) struct Arena {
    slot: u32,
    base: u64,
    bytes: u64,
    /// `None` only in unit tests of the address map.
    mapping: Option<Mapping>,
}

impl Arena {
    pub(crate) fn new(slot: u32, mapping: Mapping) -> Arena {
        Arena { slot, base: mapping.base(), bytes: mapping.bytes(), mapping: Some(mapping) }
    }

    #[cfg(test)]
    pub(crate) fn for_test(slot: u32, base: u64, bytes: u64) -> Arena {
        Arena { slot, base, bytes, mapping: None }
    }

    pub(crate) const fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) const fn base(&self) -> u64 {
        self.base
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    fn words(&self) -> Option<Words> {
        self.mapping.as_ref().map(Mapping::words)
    }

    pub(crate) fn read(&self, at: usize, into: &mut [u8]) {
        if let Some(words) = self.words() {
            words.read(at, into);
        }
    }

    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        if let Some(words) = self.words() {
            words.write(at, from);
        }
    }
}

/// Which slots are in use and how many bytes they hold; the table in the guest's page is for the guest to read only.
#[derive(Debug, Default)]
pub(crate) struct Attached {
    bytes: Mutex<HashMap<u32, u64>>,
}

impl Attached {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, u64>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all slots, or nothing when `slot` is in use.
    pub(crate) fn total_without(&self, slot: u32) -> Option<u64> {
        let bytes = self.lock();
        (!bytes.contains_key(&slot)).then(|| bytes.values().sum())
    }

    pub(crate) fn insert(&self, slot: u32, bytes: u64) {
        self.lock().insert(slot, bytes);
    }

    pub(crate) fn remove(&self, slot: u32) {
        self.lock().remove(&slot);
    }
}

/// Why guest pages are refused.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Slot, address, size or number of runs is outside what may be.
    #[error("attachment {slot}: {bytes:#x} bytes in {runs} runs at {address:#x} are outside the bounds")]
    Bounds {
        /// Entry of the attach table.
        slot: u32,
        /// Where to map.
        address: u64,
        /// Bytes in all.
        bytes: u64,
        /// Number of runs.
        runs: u32,
    },
    /// A run lies behind the end of its region; an access there would be a SIGBUS.
    #[error("a run of {bytes:#x} bytes at {offset:#x} lies outside its region of {size:#x}")]
    Run {
        /// Offset in the region.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// Bytes of the region.
        size: u64,
    },
    /// The message is not what is due: another slot between the parts of one, a short list of runs.
    #[error("the parts of attachment {0} do not fit together")]
    Parts(u32),
    /// A descriptor cannot be read.
    #[error("cannot read a descriptor: {0}")]
    Descriptor(#[from] rustix::io::Errno),
    /// The pages cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

impl AttachError {
    /// What the guest is told.
    pub(crate) const fn code(&self) -> Code {
        match self {
            AttachError::Bounds { .. } | AttachError::Run { .. } | AttachError::Parts(_) => {
                code::INVALID_VALUE
            }
            AttachError::Map(MapError::Reserve { .. }) => code::ALREADY_MAPPED,
            // Out of mappings, or a piece of a huge page.
            AttachError::Descriptor(_) | AttachError::Map(_) => code::OUT_OF_MEMORY,
        }
    }
}

/// A resource as its messages come in, one per memory region.
#[derive(Debug)]
pub(crate) struct Incoming {
    slot: u32,
    address: u64,
    bytes: u64,
    runs: usize,
    parts: Vec<(OwnedFd, Vec<Run>)>,
}

/// Memory regions one resource may lie in; the vhost-user protocol allows fewer.
const REGIONS: usize = 512;

impl Incoming {
    /// Begins with the first message. `mapped` is what the session has mapped already.
    pub(crate) fn new(slot: u32, address: u64, bytes: u64, mapped: u64) -> Result<Incoming, AttachError> {
        let bounds = limits::WINDOW_BOUNDS;
        let whole = bytes > 0 && bytes.is_multiple_of(4096) && address.is_multiple_of(4096);
        let inside = match slot {
            0 => address == 0 && bytes <= limits::RESOURCE_BYTES,
            _ => address >= bounds.start && address.checked_add(bytes).is_some_and(|end| end <= bounds.end),
        };
        let affordable = mapped.checked_add(bytes).is_some_and(|all| all <= limits::SESSION_BYTES);
        if slot < limits::ATTACHMENTS && whole && inside && affordable && bytes <= limits::RESOURCE_BYTES {
            Ok(Incoming { slot, address, bytes, runs: 0, parts: Vec::new() })
        } else {
            Err(AttachError::Bounds { slot, address, bytes, runs: 0 })
        }
    }

    pub(crate) const fn slot(&self) -> u32 {
        self.slot
    }

    /// Takes one message's list and region.
    pub(crate) fn push(&mut self, runs: u32, list: &OwnedFd, region: OwnedFd) -> Result<(), AttachError> {
        let count = runs as usize;
        self.runs = self.runs.saturating_add(count);
        if count == 0 || self.runs > limits::RESOURCE_RUNS || self.parts.len() >= REGIONS {
            let (slot, address, bytes) = (self.slot, self.address, self.bytes);
            return Err(AttachError::Bounds { slot, address, bytes, runs });
        }
        let runs = read_runs(list.as_fd(), count)?;
        if runs.len() != count {
            return Err(AttachError::Parts(self.slot));
        }
        let size = u64::try_from(fstat(&region)?.st_size).unwrap_or(0);
        for run in &runs {
            if run.offset.checked_add(run.bytes).is_none_or(|end| end > size) {
                return Err(AttachError::Run { offset: run.offset, bytes: run.bytes, size });
            }
        }
        self.parts.push((region, runs));
        Ok(())
    }

    /// Maps the whole at its address; the descriptors are closed.
    pub(crate) fn map(self) -> Result<Mapping, AttachError> {
        let pieces = self.parts.iter().flat_map(|(region, runs)| {
            let region: BorrowedFd<'_> = region.as_fd();
            runs.iter().map(move |run| (region, *run))
        });
        Ok(Mapping::scattered(self.address, self.bytes, pieces)?)
    }
}

fn read_runs(list: BorrowedFd<'_>, count: usize) -> Result<Vec<Run>, AttachError> {
    let mut bytes = vec![0; count * Run::BYTES];
    let mut done = 0;
    while done < bytes.len() {
        let got = rustix::io::pread(list, &mut bytes[done..], done as u64)?;
        if got == 0 {
            break;
        }
        done += got;
    }
    Ok(Run::list(&bytes[..done]).collect())
}
