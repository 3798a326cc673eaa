//! Pages that an arbiter and a worker share: what is granted, for the worker to read, and what the worker reports.

#![expect(unsafe_code, reason = "a futex is named by a reference to its word")]

use crate::tally::Work;
use core::sync::atomic::{AtomicU32, Ordering};
use rustix::{
    fd::{AsFd as _, OwnedFd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::Errno,
    thread::futex,
};
use sluice_protocol::{
    control::Run,
    custody::{page, report},
    shared::Shared as _,
};
use sluice_shared_memory::{
    Mapping,
    mapping::{MapError, Words},
};

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The kernel refuses.
    #[error(transparent)]
    Kernel(#[from] Errno),
    /// It cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

fn shared(name: &str, bytes: usize, seals: SealFlags) -> Result<(Mapping, OwnedFd), PageError> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes as u64)?;
    let run = Run { offset: 0, bytes: bytes as u64 };
    let mapping = Mapping::scattered(0, bytes as u64, [(file.as_fd(), run)])?;
    fcntl_add_seals(&file, seals | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((mapping, file))
}

/// A worker's custody page. The arbiter alone can write it.
#[derive(Debug)]
pub struct Page {
    mapping: Mapping,
}

impl Page {
    /// A page, and the descriptor for its worker: sealed, so that no mapping made by it can be written.
    ///
    /// # Errors
    /// When the kernel has no descriptor or memory for it.
    pub fn new(epoch: u64) -> Result<(Page, OwnedFd), PageError> {
        let (mapping, file) = shared("custody", page::BYTES, SealFlags::FUTURE_WRITE)?;
        let page = Page { mapping };
        let words = page.words();
        words.store_u64(page::EPOCH, epoch, Ordering::Relaxed);
        words.store_u64(page::MAGIC_AT, page::MAGIC, Ordering::Release);
        Ok((page, file))
    }

    fn words(&self) -> Words {
        self.mapping.words()
    }

    /// Writes what the VM has and may.
    pub fn write(&self, limit: u64, used: u64, permit: bool) {
        let words = self.words();
        words.store_u64(page::LIMIT, limit, Ordering::Release);
        words.store_u64(page::USED, used, Ordering::Release);
        let permit = u32::from(permit);
        if words.load_u32(page::PERMIT, Ordering::Relaxed) != permit {
            words.store_u32(page::PERMIT, permit, Ordering::SeqCst);
            self.wake();
        }
    }

    fn wake(&self) {
        let Ok(address) = usize::try_from(self.mapping.base()) else { return };
        let word = core::ptr::with_exposed_provenance_mut(address + page::PERMIT);
        // SAFETY: an aligned word of a mapping that this page owns; as an atomic it may be shared with the worker.
        let word = unsafe { AtomicU32::from_ptr(word) };
        if let Err(error) = futex::wake(word, futex::Flags::empty(), u32::MAX) {
            tracing::error!(%error, "cannot wake who waits for a permit");
        }
    }
}

/// A worker's report page. The worker writes it whenever and whatever it likes.
#[derive(Debug)]
pub struct Report {
    mapping: Mapping,
}

impl Report {
    /// A page, and the descriptor for its worker.
    ///
    /// # Errors
    /// When the kernel has no descriptor or memory for it.
    pub fn new() -> Result<(Report, OwnedFd), PageError> {
        let (mapping, file) = shared("report", report::BYTES, SealFlags::empty())?;
        Ok((Report { mapping }, file))
    }

    /// What it says the worker has done.
    #[must_use]
    pub fn work(&self) -> Work {
        let words = self.mapping.words();
        let count = |at| words.load_u64(at, Ordering::Relaxed);
        Work {
            launches: count(report::LAUNCHES),
            copies: count(report::COPIES),
            copied: count(report::COPIED),
            calls: count(report::CALLS),
        }
    }
}
