//! The storage of device memory on the host: taken with the first owner of a page, and given back while no process computes.
//!
//! A page that gave its storage back is *lost*: its content is gone, but it is memory that was in use, so it must not read as fresh.
//! Its next owner finds [`LOST`] in every byte, and never zeroes that a driver did not write. The mark of a lost page is set before
//! its storage goes and removed after the bytes are written, so a process killed in between leaves a page that the next owner fills
//! again.
//!
//! [`owners`](crate::owners) calls this module when a process takes pages, attaches, or ends. It takes a free page like an owner
//! before it touches its storage, and a page of an allocation only if this process alone holds it.

use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use crate::PAGE_BYTES;
use crate::device::Device;
use crate::records::{AllocationError, PageEntry, Run, Use};
use crate::slots::Files;
use crate::sys;

/// Content of memory whose storage went back to the host.
pub const LOST: u8 = 0xd5;

/// The pages that may give their storage back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Idle {
    /// Free pages.
    Free,
    /// Free pages, and those that only this process holds: it ends.
    FreeAndOwn,
}

impl Device {
    /// Allocates storage for pages of the caller, so that a full file system is an error now and not a signal later. Existing
    /// storage keeps its content.
    pub(crate) fn back(&self, run: Run) -> Result<(), AllocationError> {
        for page in run.first..run.first + run.count {
            let word = &self.header.pages()[usize::try_from(page).unwrap_or(usize::MAX)];
            let entry = PageEntry(word.load(Acquire));
            let at = |page: u64| i64::try_from(page * PAGE_BYTES).unwrap_or(i64::MAX);
            // A process that is killed between the loss of the storage and its mark leaves a lost page that is marked as backed.
            if !entry.is_backed() || entry.is_lost() {
                sys::back(&self.hbm, at(page), at(1)).map_err(AllocationError::Storage)?;
            }
            if entry.is_lost() {
                let length = usize::try_from(PAGE_BYTES).unwrap_or(usize::MAX);
                sys::fill(&self.hbm, at(page), length, LOST).map_err(AllocationError::Storage)?;
            }
            word.fetch_or(PageEntry::BACKED, AcqRel);
            word.fetch_and(!PageEntry::LOST, AcqRel);
        }
        Ok(())
    }

    /// Gives the host the storage of memory beyond `keep` bytes, unless another process computes on the device. `slot` is that of
    /// this process. An error of the file system ends it: the storage then stays.
    pub(crate) fn give_back(&self, slot: usize, keep: u64, idle: Idle) -> io::Result<()> {
        self.reap(Files::Keep);
        if self.others_compute() {
            return Ok(());
        }
        let pages = self.header.pages();
        let is_backed = |word: &&std::sync::atomic::AtomicU64| PageEntry(word.load(Acquire)).is_backed();
        let mut backed = pages.iter().filter(is_backed).count() as u64 * PAGE_BYTES;
        if backed <= keep {
            return Ok(());
        }
        let Some((record, generation)) = self.claim(slot, 0, 0, Use::Driver) else { return Ok(()) };
        let mut given = Ok(());
        // The lowest pages are the first to be taken again.
        for (page, word) in pages.iter().enumerate().rev() {
            if backed <= keep || given.is_err() {
                break;
            }
            let entry = PageEntry(word.load(Acquire));
            if !entry.is_backed() {
                continue;
            }
            let is_free = self.is_free(entry);
            let taken = if is_free {
                PageEntry::new(0, record, generation).0 | entry.freed()
            } else if idle == Idle::FreeAndOwn && self.is_held_only_by(entry, slot) {
                entry.0
            } else {
                continue;
            };
            let lost = taken | PageEntry::LOST;
            if word.compare_exchange(entry.0, lost, AcqRel, Acquire).is_err() {
                continue; // Another process took it.
            }
            let at = |page: u64| i64::try_from(page * PAGE_BYTES).unwrap_or(i64::MAX);
            given = sys::give_back(&self.hbm, at(page as u64), at(1));
            if given.is_ok() {
                word.fetch_and(!PageEntry::BACKED, AcqRel);
                backed -= PAGE_BYTES;
            }
            if is_free {
                // Nothing else changes the entry of this process's page.
                word.store(PageEntry(word.load(Acquire)).freed(), std::sync::atomic::Ordering::Release);
            }
        }
        self.release(record, generation, slot);
        given
    }
}
