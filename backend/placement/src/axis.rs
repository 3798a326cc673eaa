//! Positions on the axis of memory slices of a GPU.

/// A position on the axis of memory slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlicePlacement {
    /// First slice.
    pub start: u8,
    /// Number of slices.
    pub size: u8,
}

impl SlicePlacement {
    /// The slices as bits. Positions beyond the end of the longest axis are cut off.
    pub const fn mask(self) -> u64 {
        let ones = if self.size >= 64 { u64::MAX } else { (1 << self.size) - 1 };
        if self.start >= 64 { 0 } else { ones << self.start }
    }

    /// True if it lies within an axis of `slices` slices.
    pub(crate) const fn within(self, slices: u8) -> bool {
        self.size > 0 && self.start < slices && self.size <= slices - self.start
    }
}
