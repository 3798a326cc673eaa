//! The records of allocations, and the pages of the device.
//!
//! [`owners`](crate::owners) claims, joins and releases records for its process; [`slots`](crate::slots) drops the holds of dead
//! processes. This module owns the states of records and the entries of pages, all in the shared header. It never waits for
//! another process and holds no lock, so any other process can complete the work of one that is killed.
//!
//! A page is *owned* if its entry names a record that is in use with the entry's generation; any other entry is a free page, even
//! if a killed process left a value in it. So one change of its record's state ends an allocation. A page is *backed* once the
//! file system has storage for it, until [`storage`](crate::storage) gives that back.
//!
//! A device that is configured so keeps the pages of a process that ended for a while: no other may have them, nor their records.
//!
//! ```text
//! record.state   generation 32 │ sequence or owner 28 │ state 4
//! page entry     owned 1 │ backed 1 │ lost 1 │ ordinal 17 │ record 16 │ generation 28
//!
//! EMPTY ──claim──► CLAIMING(owner) ──► LIVE(0) ──last holder gone──► CLOSING(n) ──still unheld──► EMPTY
//!                                        ▲                              │
//!                                        └────── a holder is found ─────┘
//! ```
//! The last holder sets CLOSING *before* it looks for holders a second time; an importer sets its bit *before* it looks at the
//! state. So either the holder sees the bit, or the importer sees CLOSING and sets the state back to LIVE.

use std::ops::Range;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};

use crate::PAGE_BYTES;
use crate::config::Booking;
use crate::device::Device;
use crate::header::{HOLDER_WORDS, OWNERS, RECORDS, Record};
use crate::sys::{self, monotonic_nanoseconds};

const EMPTY: u64 = 0;
const CLAIMING: u64 = 1;
const LIVE: u64 = 2;
const CLOSING: u64 = 3;

/// Record flag: descriptors name this allocation, which lives as long as one of them is open.
const EXPORTED: u32 = 1 << 8;
/// Generations of a record; entries have room for no more.
const GENERATIONS: u32 = 1 << 28;
/// Maximum number of pages of one allocation.
pub(crate) const MAX_PAGES: u64 = 1 << 17;

#[derive(Clone, Copy, PartialEq, Eq)]
struct RecordState(u64);

impl RecordState {
    fn new(generation: u32, extra: u64, kind: u64) -> RecordState {
        RecordState(u64::from(generation) << 32 | (extra & 0x0fff_ffff) << 4 | kind)
    }
    fn kind(self) -> u64 {
        self.0 & 15
    }
    fn extra(self) -> u64 {
        self.0 >> 4 & 0x0fff_ffff
    }
    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
    /// A state of the same generation with the next sequence number.
    fn next(self, kind: u64) -> RecordState {
        RecordState::new(self.generation(), self.extra() + 1, kind)
    }
}

/// The owner of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageEntry(pub(crate) u64);

impl PageEntry {
    /// The file system has storage for the page.
    pub(crate) const BACKED: u64 = 1 << 62;
    /// The storage of the page went back to the host, with its content.
    pub(crate) const LOST: u64 = 1 << 61;

    pub(crate) fn new(ordinal: u64, record: u32, generation: u32) -> PageEntry {
        PageEntry(1 << 63 | ordinal << 44 | u64::from(record) << 28 | u64::from(generation))
    }
    /// The entry of a free page; keeps the flags for its storage.
    pub(crate) fn freed(self) -> u64 {
        self.0 & (Self::BACKED | Self::LOST)
    }
    pub(crate) fn is_backed(self) -> bool {
        self.0 & Self::BACKED != 0
    }
    pub(crate) fn is_lost(self) -> bool {
        self.0 & Self::LOST != 0
    }
    fn is_owned(self) -> bool {
        self.0 >> 63 == 1
    }
    fn ordinal(self) -> u64 {
        self.0 >> 44 & (MAX_PAGES - 1)
    }
    fn record(self) -> usize {
        (self.0 >> 28 & 0xffff) as usize
    }
    fn generation(self) -> u32 {
        u32::try_from(self.0 & u64::from(GENERATIONS - 1)).unwrap_or(0)
    }
}

/// A run of neighbouring pages of `hbm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First page.
    pub first: u64,
    /// Number of pages.
    pub count: u64,
}

/// The purpose of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Made by the virtual-memory API.
    Chunk,
    /// A process's own heap.
    Heap,
    /// Memory of the driver: contexts, code and variables of modules, stacks of kernels.
    Driver,
}

/// The bits of a record's flags that hold its purpose.
const PURPOSE: u32 = 3;

impl Use {
    fn to_flags(self) -> u32 {
        match self {
            Use::Chunk => 0,
            Use::Heap => 1,
            Use::Driver => 2,
        }
    }
    fn from_flags(flags: u32) -> Use {
        match flags & PURPOSE {
            0 => Use::Chunk,
            1 => Use::Heap,
            _ => Use::Driver,
        }
    }
}

/// Bytes that a process holds, by purpose. An allocation of several processes counts for each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// Made by the virtual-memory API, or imported: held by a handle or mapped.
    pub chunks: u64,
    /// The heap of the process.
    pub heap: u64,
    /// Memory that the driver takes for itself.
    pub driver: u64,
    /// The part of `chunks` that another process made.
    pub imported: u64,
    /// The part of the other chunks that another process holds as well.
    pub lent: u64,
}

impl Held {
    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.chunks + self.heap + self.driver
    }

    /// Returns the bytes that a driver with this booking counts for the process.
    #[must_use]
    pub fn booked(&self, booking: Booking) -> u64 {
        let others = match booking {
            Booking::Owner => self.imported,
            Booking::Importer => self.lent,
            Booking::Both => 0,
            Booking::Nowhere => self.chunks,
        };
        self.total() - others
    }
}

/// An allocation failed.
#[derive(Debug, thiserror::Error)]
pub enum AllocationError {
    /// The device has too few free pages.
    #[error("the device has fewer than {0} free pages")]
    Pages(u64),
    /// The file system has no room for the pages.
    #[error("no storage for device memory: {0}")]
    Storage(std::io::Error),
    /// Every record is in use.
    #[error("the device has {RECORDS} allocations already")]
    Records,
}

impl Device {
    fn record(&self, record: u32) -> &Record {
        &self.header.records()[record as usize]
    }

    /// Records that were ever used.
    fn used_records(&self) -> &[Record] {
        let high = usize::try_from(self.header.identity().high_water.load(Acquire)).unwrap_or(RECORDS);
        &self.header.records()[..high.min(RECORDS)]
    }

    /// Takes an empty record for an owner, which is its first holder.
    pub(crate) fn claim(&self, owner: usize, epoch: u32, pages: u64, purpose: Use) -> Option<(u32, u32)> {
        let water = &self.header.identity().high_water;
        let hint = self.record_hint.load(Relaxed);
        let (before, behind) = self.header.records().split_at(hint.min(RECORDS));
        // Starts at the lowest record that may be empty; records below it, which others gave back, come last.
        let order = behind.iter().zip(hint..).chain(before.iter().zip(0..));
        for (record, index) in order {
            let old = RecordState(record.state.load(Acquire));
            if old.kind() != EMPTY || self.keeps_pages(record) {
                continue;
            }
            water.fetch_max(index as u64 + 1, AcqRel);
            let generation = (old.generation() + 1) % GENERATIONS;
            let claimed = RecordState::new(generation, owner as u64, CLAIMING);
            if record.state.compare_exchange(old.0, claimed.0, SeqCst, Relaxed).is_err() {
                continue;
            }
            record.pages.store(pages, Relaxed);
            record.flags.store(purpose.to_flags(), Relaxed);
            record.instance.store(epoch, Relaxed);
            record.maker.store(maker(owner), Relaxed);
            record.holders[owner / 64].fetch_or(1 << (owner % 64), SeqCst);
            // Only this process may leave CLAIMING while it is alive.
            record.state.store(RecordState::new(generation, 0, LIVE).0, SeqCst);
            self.record_hint.store(index + 1, Relaxed);
            return Some((u32::try_from(index).ok()?, generation));
        }
        None
    }

    /// True if an owner holds the allocation of this page, and neither another one nor a descriptor does.
    pub(crate) fn is_held_only_by(&self, entry: PageEntry, owner: usize) -> bool {
        let record = &self.header.records()[entry.record()];
        let state = RecordState(record.state.load(Acquire));
        let alone = record.holders.iter().enumerate().all(|(at, word)| {
            let own = if at == owner / 64 { 1 << (owner % 64) } else { 0 };
            word.load(SeqCst) == own
        });
        let named = || {
            let index = u32::try_from(entry.record()).unwrap_or(u32::MAX);
            record.flags.load(SeqCst) & EXPORTED != 0 && self.is_named(index)
        };
        state.kind() == LIVE && state.generation() == entry.generation() && alone && !named()
    }

    /// True if the page of this entry is free.
    pub(crate) fn is_free(&self, entry: PageEntry) -> bool {
        if !entry.is_owned() {
            return true;
        }
        let state = RecordState(self.header.records()[entry.record()].state.load(Acquire));
        state.generation() != entry.generation()
            || state.kind() == EMPTY && !self.keeps_pages(&self.header.records()[entry.record()])
    }

    /// True if an allocation ended so recently that its pages are not free yet.
    fn keeps_pages(&self, ended: &Record) -> bool {
        let since = || monotonic_nanoseconds().saturating_sub(ended.ended.load(Relaxed));
        self.late_free != 0 && ended.ended.load(Relaxed) != 0 && since() < self.late_free
    }

    /// Returns the bytes that are known to be free: see [`Device::collect`].
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes_in(0..self.identity().pages)
    }

    pub(crate) fn free_bytes_in(&self, pages: Range<u64>) -> u64 {
        let pages = &self.header.pages()[indices(&pages)];
        let free = pages.iter().filter(|entry| self.is_free(PageEntry(entry.load(Acquire))));
        free.count() as u64 * PAGE_BYTES
    }

    /// Returns the bytes in use.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.total_bytes() - self.free_bytes()
    }

    /// Takes pages: the smallest sufficient run of free pages in a range, else the largest runs.
    pub(crate) fn take_pages(
        &self,
        record: u32,
        generation: u32,
        pages: u64,
        among: &Range<u64>,
    ) -> Result<Vec<Run>, AllocationError> {
        let mut taken: Vec<Run> = Vec::new();
        let mut ordinal = 0;
        while ordinal < pages {
            let wanted = pages - ordinal;
            let Some(run) = self.free_run(wanted, among) else { return Err(AllocationError::Pages(pages)) };
            for page in run.first..run.first + run.count.min(wanted) {
                let entry = &self.header.pages()[usize::try_from(page).unwrap_or(usize::MAX)];
                let old = entry.load(Acquire);
                let new = PageEntry::new(ordinal, record, generation).0 | PageEntry(old).freed();
                if !self.is_free(PageEntry(old)) || entry.compare_exchange(old, new, AcqRel, Relaxed).is_err()
                {
                    break; // Another process took it: search again.
                }
                push(&mut taken, page);
                ordinal += 1;
            }
        }
        Ok(taken)
    }

    fn free_run(&self, wanted: u64, among: &Range<u64>) -> Option<Run> {
        if wanted == 1 {
            return self.free_page(among);
        }
        let mut fitting: Option<Run> = None;
        let mut largest: Option<Run> = None;
        let mut run = Run { first: 0, count: 0 };
        let Range { start, end } = indices(among);
        let entries = &self.header.pages()[..end];
        for page in start..=end {
            if entries.get(page).is_some_and(|entry| self.is_free(PageEntry(entry.load(Acquire)))) {
                if run.count == 0 {
                    run.first = page as u64;
                }
                run.count += 1;
                continue;
            }
            if run.count >= wanted && fitting.is_none_or(|best| run.count < best.count) {
                fitting = Some(run);
            }
            if run.count > 0 && largest.is_none_or(|best| run.count > best.count) {
                largest = Some(run);
            }
            run.count = 0;
        }
        fitting.or(largest)
    }

    /// The lowest free page of a range. Starts at the lowest page that may be free; pages below it, which others gave back, come
    /// last.
    fn free_page(&self, among: &Range<u64>) -> Option<Run> {
        let entries = self.header.pages();
        let Range { start, end } = indices(among);
        let hint = self.page_hint.load(Relaxed).clamp(start, end);
        let free = |range: Range<usize>| {
            range.into_iter().find(|page| self.is_free(PageEntry(entries[*page].load(Acquire))))
        };
        let page = free(hint..end).or_else(|| free(start..hint))?;
        self.page_hint.store(page, Relaxed);
        Some(Run { first: page as u64, count: 1 })
    }

    /// Becomes a holder of a live allocation of an instance and finds its pages.
    pub(crate) fn join(&self, record: u32, generation: u32, owner: usize, epoch: u32) -> Option<Vec<Run>> {
        let words = self.record(record);
        let (word, bit) = (&words.holders[owner / 64], 1 << (owner % 64));
        word.fetch_or(bit, SeqCst);
        loop {
            let state = RecordState(words.state.load(SeqCst));
            let current = state.generation() == generation;
            match state.kind() {
                LIVE if current => break,
                CLOSING if current => {
                    let revived = state.next(LIVE);
                    if words.state.compare_exchange(state.0, revived.0, SeqCst, Relaxed).is_ok() {
                        break;
                    }
                }
                _ => {
                    // The allocation ended first. The bit may have kept its successor in this record alive, so check that one.
                    word.fetch_and(!bit, SeqCst);
                    self.close_if_unheld(record);
                    return None;
                }
            }
        }
        // Only owners in an instance may hold its memory.
        if words.instance.load(Relaxed) != epoch {
            self.release(record, generation, owner);
            return None;
        }
        let mut pages: Vec<(u64, u64)> = Vec::new();
        for (page, entry) in self.header.pages().iter().enumerate() {
            let entry = PageEntry(entry.load(Acquire));
            if entry.is_owned() && entry.record() == record as usize && entry.generation() == generation {
                pages.push((entry.ordinal(), page as u64));
            }
        }
        pages.sort_unstable();
        let mut runs = Vec::new();
        for (_, page) in pages {
            push(&mut runs, page);
        }
        Some(runs)
    }

    /// Releases a hold.
    pub(crate) fn release(&self, record: u32, generation: u32, owner: usize) {
        let words = self.record(record);
        if RecordState(words.state.load(SeqCst)).generation() != generation {
            return;
        }
        words.holders[owner / 64].fetch_and(!(1 << (owner % 64)), SeqCst);
        self.close_if_unheld(record);
    }

    /// Marks the allocation as exported. A holder exported it, so it is live.
    pub(crate) fn mark_exported(&self, record: u32) {
        self.record(record).flags.fetch_or(EXPORTED, SeqCst);
    }

    /// True if an open descriptor names an allocation with this record, or if that is unknown.
    fn is_named(&self, record: u32) -> bool {
        sys::byte_is_locked(&self.exported, i64::from(record)).unwrap_or(true)
    }

    /// Ends an allocation that has no holder and that no descriptor names.
    fn close_if_unheld(&self, record: u32) {
        let words = self.record(record);
        let held = || words.holders.iter().any(|word| word.load(SeqCst) != 0);
        loop {
            let state = RecordState(words.state.load(SeqCst));
            let closing = match state.kind() {
                // A process was killed between the two steps.
                CLOSING => state,
                LIVE if !held() => {
                    let closing = state.next(CLOSING);
                    if words.state.compare_exchange(state.0, closing.0, SeqCst, Relaxed).is_err() {
                        continue;
                    }
                    closing
                }
                _ => return,
            };
            let exported = words.flags.load(SeqCst) & EXPORTED != 0;
            let keep = held() || exported && self.is_named(record);
            let next = if keep {
                closing.next(LIVE)
            } else {
                // The generation stays, so that entries that still name it are known to be stale.
                RecordState::new(closing.generation(), 0, EMPTY)
            };
            if words.state.compare_exchange(closing.0, next.0, SeqCst, Relaxed).is_err() {
                continue;
            }
            if !keep {
                self.sweep(record, closing.generation());
                self.record_hint.fetch_min(record as usize, Relaxed);
                return;
            }
            if !held() {
                return; // Only a descriptor keeps it alive: the next reaper checks again.
            }
        }
    }

    /// Clears the entries of an ended allocation. They are free already; this only prevents a build-up of old generations.
    fn sweep(&self, record: u32, generation: u32) {
        if self.keeps_pages(self.record(record)) {
            return;
        }
        for (page, word) in self.header.pages().iter().enumerate() {
            let entry = PageEntry(word.load(Relaxed));
            if entry.is_owned() && entry.record() == record as usize && entry.generation() == generation {
                // Another process may have taken the page already.
                let _ = word.compare_exchange(entry.0, entry.freed(), AcqRel, Relaxed);
                self.page_hint.fetch_min(page, Relaxed);
            }
        }
    }

    /// Removes every hold of an owner that has ended.
    pub(crate) fn drop_holder(&self, owner: usize) {
        debug_assert!(owner < OWNERS && owner / 64 < HOLDER_WORDS);
        for (index, words) in self.used_records().iter().enumerate() {
            let state = RecordState(words.state.load(SeqCst));
            if state.kind() == CLAIMING && state.extra() == owner as u64 {
                let empty = RecordState::new(state.generation(), 0, EMPTY);
                let _ = words.state.compare_exchange(state.0, empty.0, SeqCst, Relaxed);
            }
            let bit = 1 << (owner % 64);
            // The slot's next owner is not its maker.
            let _ = words.maker.compare_exchange(maker(owner), 0, SeqCst, Relaxed);
            if words.holders[owner / 64].load(SeqCst) & bit != 0 {
                words.ended.store(monotonic_nanoseconds(), SeqCst);
                words.holders[owner / 64].fetch_and(!bit, SeqCst);
            }
            self.close_if_unheld(u32::try_from(index).unwrap_or(u32::MAX));
        }
    }

    /// Ends allocations whose last holder was killed while it ended them, and those that only a descriptor kept.
    pub(crate) fn finish_interrupted(&self) {
        for (index, words) in self.used_records().iter().enumerate() {
            if matches!(RecordState(words.state.load(SeqCst)).kind(), LIVE | CLOSING) {
                self.close_if_unheld(u32::try_from(index).unwrap_or(u32::MAX));
            }
        }
    }

    /// Returns the memory that several owners hold together.
    pub(crate) fn held_by(&self, owners: &[usize]) -> Held {
        let mut held = Held::default();
        for words in self.used_records() {
            let holds = |owner: &usize| words.holders[owner / 64].load(Relaxed) >> (owner % 64) & 1 != 0;
            if !owners.iter().any(holds) {
                continue;
            }
            let bytes = words.pages.load(Relaxed) * PAGE_BYTES;
            match Use::from_flags(words.flags.load(Relaxed)) {
                Use::Chunk => {
                    held.chunks += bytes;
                    let made_by = words.maker.load(Relaxed);
                    let mut others = words.holders.iter().enumerate().flat_map(|(at, word)| {
                        let word = word.load(Relaxed);
                        (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| at * 64 + bit)
                    });
                    if owners.iter().all(|owner| maker(*owner) != made_by) {
                        held.imported += bytes;
                    } else if others.any(|holder| !owners.contains(&holder)) {
                        held.lent += bytes;
                    }
                }
                Use::Heap => held.heap += bytes,
                Use::Driver => held.driver += bytes,
            }
        }
        held
    }
}

/// Converts page numbers to indices.
fn indices(pages: &Range<u64>) -> Range<usize> {
    let index = |page| usize::try_from(page).unwrap_or(usize::MAX);
    index(pages.start)..index(pages.end)
}

/// The number of an owner in the `maker` field of a record.
fn maker(owner: usize) -> u32 {
    u32::try_from(owner).map_or(0, |owner| owner + 1)
}

fn push(runs: &mut Vec<Run>, page: u64) {
    match runs.last_mut() {
        Some(run) if run.first + run.count == page => run.count += 1,
        _ => runs.push(Run { first: page, count: 1 }),
    }
}
