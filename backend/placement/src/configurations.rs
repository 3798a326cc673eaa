//! The number of sets of instances that could still be added to a GPU: placement minimises the loss of this number.
//!
//! Count a set as the list of its instances from left to right. At each slice, either no instance starts and the count continues
//! at the next slice, or one of the shapes starts and the count continues behind its end. So
//!
//! ```text
//! f(slice, compute) = f(slice + 1, compute) + Σ f(slice + size, compute - c)   over shapes that start here and are free
//! ```
//!
//! counts every set exactly once, in at most slices × compute × shapes additions, for any geometry. No search is involved.
//! For axes as short as real ones the answers for all occupations are computed once and looked up.

use crate::axis::SlicePlacement;

/// Up to this many slices all occupations are tabulated: 1024 rows, computed in about a millisecond.
const TABLE_SLICES: u8 = 10;

/// The slices that an instance occupies. Media variants of a profile have the same shape: they compete for the same slots, and
/// counting them twice would make their slots look twice as valuable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SliceShape {
    pub(crate) placements: Vec<SlicePlacement>,
    pub(crate) compute: u8,
}

/// A table or procedure for N(occupied slices, free compute slices).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Configurations {
    slices: u8,
    compute: u8,
    /// Per slice, size and compute slices of each shape that may start there.
    starts: Vec<Vec<(u8, u8)>>,
    /// One row per occupation; empty for a long axis.
    table: Vec<Vec<u128>>,
}

impl Configurations {
    /// Prepares the counts. `None` if the number of sets overflows.
    pub(crate) fn new(slices: u8, compute: u8, shapes: &[SliceShape]) -> Option<Self> {
        let mut starts = vec![Vec::new(); usize::from(slices)];
        for shape in shapes {
            for placement in &shape.placements {
                starts[usize::from(placement.start)].push((placement.size, shape.compute));
            }
        }
        let mut new = Self { slices, compute, starts, table: Vec::new() };
        // An empty GPU has the most sets: if its count fits, every count does.
        new.row(0)?;
        if slices <= TABLE_SLICES {
            new.table = (0..1_u64 << slices).map(|occupied| new.row(occupied)).collect::<Option<_>>()?;
        }
        Some(new)
    }

    /// Number of sets that can be added, the empty one included.
    pub(crate) fn count(&self, occupied: u64, free_compute: u8) -> u128 {
        let compute = usize::from(free_compute.min(self.compute));
        match usize::try_from(occupied).ok().and_then(|row| self.table.get(row)) {
            Some(row) => row[compute],
            // `new` has checked that no count overflows.
            None => self.row(occupied).map_or(u128::MAX, |row| row[compute]),
        }
    }

    /// The counts for one occupation and every number of free compute slices.
    fn row(&self, occupied: u64) -> Option<Vec<u128>> {
        let (slices, width) = (usize::from(self.slices), usize::from(self.compute) + 1);
        let mut rows = vec![vec![1_u128; width]; slices + 1];
        for slice in (0..slices).rev() {
            let mut row = rows[slice + 1].clone();
            for &(size, compute) in &self.starts[slice] {
                if (SlicePlacement { start: u8::try_from(slice).ok()?, size }).mask() & occupied != 0 {
                    continue;
                }
                let behind = &rows[slice + usize::from(size)];
                for free in usize::from(compute)..width {
                    row[free] = row[free].checked_add(behind[free - usize::from(compute)])?;
                }
            }
            rows[slice] = row;
        }
        Some(rows.swap_remove(0))
    }
}
