//! Estimates of the duration of work, by kind: an average that follows quickly, for as many kinds of work as fit.
//!
//! One thread reads while another writes; a cell is one word, so neither waits. A kind that loses its cell to another is
//! unknown again, and unknown work counts as short.

use crate::Nanos;
use core::sync::atomic::{AtomicU64, Ordering};

/// Number of kinds of work that are known at a time.
const CELLS: usize = 512;

/// A kind of work: a hash, in 32 bits, of the properties that distinguish it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkKind(u32);

impl WorkKind {
    /// A kind from two words that name it, such as a function and 0, or a kind of copy and its size.
    #[must_use]
    pub const fn new(name: u64, detail: u64) -> WorkKind {
        let mixed = (name ^ detail.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The upper half is the better mixed one.
        WorkKind((mixed >> 32) as u32)
    }

    /// The kind with these bits, as of [`WorkKind::bits`].
    #[must_use]
    pub const fn from_bits(bits: u32) -> WorkKind {
        WorkKind(bits)
    }

    /// The bits of the kind, to store it.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }
}

/// The known durations.
#[derive(Debug)]
pub struct Estimates {
    /// Kind in the upper half, nanoseconds in the lower one; 0 for an empty cell.
    cells: Box<[AtomicU64]>,
}

impl Default for Estimates {
    fn default() -> Estimates {
        Estimates { cells: (0..CELLS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Estimates {
    fn cell(&self, kind: WorkKind) -> &AtomicU64 {
        &self.cells[kind.0 as usize % CELLS]
    }

    /// The duration of work of this kind, at most 4.2 s; 0 if unknown.
    #[must_use]
    pub fn of(&self, kind: WorkKind) -> u32 {
        let cell = self.cell(kind).load(Ordering::Relaxed);
        if (cell >> 32) as u32 == kind.0 { low(cell) } else { 0 }
    }

    /// Work of this kind took so long. A shorter time than expected counts half; a longer one counts an eighth, because work
    /// also takes longer if the device does other work in between.
    pub fn learn(&self, kind: WorkKind, took: Nanos) {
        let took = u32::try_from(took).unwrap_or(u32::MAX).max(1);
        let next = match self.of(kind) {
            0 => took,
            known if took < known => known - (known - took).div_ceil(2),
            known => known + (took - known).div_ceil(8),
        };
        self.cell(kind).store(u64::from(kind.0) << 32 | u64::from(next), Ordering::Relaxed);
    }
}

const fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_follows_measured_durations_and_saturates() {
        let estimates = Estimates::default();
        let (one, other) = (WorkKind::new(0x7f00_1000, 0), WorkKind::new(0x7f00_2000, 0));
        assert_eq!(estimates.of(one), 0, "nothing is known");
        estimates.learn(one, 1_000_000);
        assert_eq!(estimates.of(one), 1_000_000, "the first is all there is");
        estimates.learn(one, 9_000_000);
        assert_eq!(estimates.of(one), 2_000_000, "something may have come between");
        for _ in 0..200 {
            estimates.learn(one, 3_000_000);
        }
        assert_eq!(estimates.of(one), 3_000_000);
        estimates.learn(one, 1_000_000);
        assert_eq!(estimates.of(one), 2_000_000);
        assert_eq!(estimates.of(other), 0);
        estimates.learn(other, u64::MAX);
        assert_eq!(estimates.of(other), u32::MAX);
    }

    #[test]
    fn kinds_beyond_the_table_size_replace_others() {
        let estimates = Estimates::default();
        for name in 0..100_000_u64 {
            let kind = WorkKind::new(name * 64, name % 7);
            estimates.learn(kind, name + 1);
            assert_eq!(u64::from(estimates.of(kind)), name + 1, "a kind that lost its cell is a new one");
        }
    }
}
