//! The words of an event that several processes share. They lie in device memory, which every process maps.
//!
//! Each recording has a number, the next one of the event, and a slot: the slot gets the number when the recording is reached. So
//! recordings of several processes may be reached in any order. A process that ends before its recording is reached leaves it
//! unreached, as a driver does.
#![expect(unsafe_code, reason = "words that several processes access")]

use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;
use crate::lock::lock;
use crate::memory::{BlockKind, Maker, Name};

/// Recordings that may be under way at once; another one waits for the oldest.
const SLOTS: u64 = 511;
/// The number of the latest recording, and the slots.
const BYTES: u64 = 8 * (1 + SLOTS);

/// The words, while this process has them mapped.
pub(crate) struct SharedWords {
    gpu: &'static VisibleGpu,
    start: u64,
    kind: BlockKind,
}

impl SharedWords {
    /// Makes words for an event that was never recorded.
    pub(crate) fn create(gpu: &'static VisibleGpu) -> Result<Arc<SharedWords>> {
        release_unused();
        let start = gpu.space.allocate(Maker::default(), BYTES, BlockKind::Internal)?;
        let words = SharedWords { gpu, start, kind: BlockKind::Internal };
        // The memory keeps the content of its last owner.
        (0..=SLOTS).for_each(|index| words.word(index).store(0, Ordering::Release));
        Ok(Arc::new(words))
    }

    /// Maps the words of another process.
    pub(crate) fn open(gpu: &'static VisibleGpu, name: Name) -> Result<Arc<SharedWords>> {
        release_unused();
        let start = gpu.space.open_name(Maker::default(), name)?;
        let words = SharedWords { gpu, start, kind: BlockKind::Imported };
        let bytes = gpu.block_at(start).map_or(0, |block| block.bytes);
        if bytes < BYTES || !start.is_multiple_of(8) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(Arc::new(words))
    }

    /// The name by which another process opens them. Only the process that made them hands it out.
    pub(crate) fn name(&self) -> Result<Name> {
        if self.kind == BlockKind::Imported {
            return Err(Error::INVALID_VALUE);
        }
        let block = self.gpu.block_at(self.start).ok_or(Error::INVALID_VALUE)?;
        self.gpu.space.name_of(self.gpu.identity.uuid, &block)
    }

    fn word(&self, index: u64) -> &AtomicU64 {
        let address = usize::try_from(self.start + 8 * index).unwrap_or(0);
        // SAFETY: `index` is at most `SLOTS`; the block has that many words and stays mapped as long as `self`.
        unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(address)) }
    }

    fn slot(&self, number: u64) -> &AtomicU64 {
        self.word(1 + number % SLOTS)
    }

    /// Begins a recording and returns its number.
    pub(crate) fn begin(&self) -> u64 {
        self.word(0).fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The recording that must be reached before this one may be.
    pub(crate) fn before(number: u64) -> Option<u64> {
        number.checked_sub(SLOTS).filter(|earlier| *earlier > 0)
    }

    /// Records that a recording is reached.
    pub(crate) fn reach(&self, number: u64) {
        self.slot(number).store(number, Ordering::Release);
    }

    /// The latest recording; 0 before the first.
    pub(crate) fn latest(&self) -> u64 {
        self.word(0).load(Ordering::Acquire)
    }

    /// True if a recording, or a later one of its slot, is reached.
    pub(crate) fn is_reached(&self, number: u64) -> bool {
        number == 0 || self.slot(number).load(Ordering::Acquire) >= number
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // It may be the scheduler that drops them, which must not wait for the device.
        lock(&UNUSED).push((self.gpu, self.start, self.kind));
    }
}

/// Words that nothing in this process uses any more.
static UNUSED: Mutex<Vec<(&VisibleGpu, u64, BlockKind)>> = Mutex::new(Vec::new());

/// Gives unused words back to their devices.
fn release_unused() {
    let unused = std::mem::take(&mut *lock(&UNUSED));
    for (gpu, start, kind) in unused {
        // Opened several times, they stay until the last one goes.
        let last = kind == BlockKind::Internal || gpu.space.close_name(start) == Ok(true);
        if last && let Ok(block) = gpu.space.withdraw(start, &[kind]) {
            gpu.space.release(&block);
        }
    }
}
