//! A first-fit allocator of addresses for the arbiter's own mappings.

use std::collections::BTreeMap;

/// Free ranges of a reservation.
#[derive(Debug)]
pub(crate) struct FreeSpace {
    /// Length of each free range by its address; adjacent ranges are merged.
    free: BTreeMap<u64, u64>,
}

impl FreeSpace {
    pub(crate) fn new(base: u64, bytes: u64) -> FreeSpace {
        FreeSpace { free: BTreeMap::from([(base, bytes)]) }
    }

    /// Takes the lowest range that is large enough.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (at, have) = self.free.iter().map(|(at, have)| (*at, *have)).find(|(_, have)| *have >= bytes)?;
        self.free.remove(&at);
        if have > bytes {
            self.free.insert(at + bytes, have - bytes);
        }
        Some(at)
    }

    /// Gives a range back and merges it with its neighbours.
    pub(crate) fn give(&mut self, at: u64, bytes: u64) {
        let (mut start, mut length) = (at, bytes);
        if let Some((before, have)) = self.free.range(..at).next_back().map(|(at, have)| (*at, *have))
            && before + have == at
        {
            self.free.remove(&before);
            (start, length) = (before, have + bytes);
        }
        if let Some(behind) = self.free.remove(&(at + bytes)) {
            length += behind;
        }
        self.free.insert(start, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_takes_the_lowest_range_and_merges_returned_ones() {
        let mut space = FreeSpace::new(100, 40);
        let (a, b, c) = (space.take(10), space.take(20), space.take(10));
        assert_eq!((a, b, c), (Some(100), Some(110), Some(130)));
        assert_eq!(space.take(1), None);
        space.give(100, 10);
        space.give(130, 10);
        assert_eq!(space.take(20), None, "two ranges of ten are none of twenty");
        space.give(110, 20);
        assert_eq!(space.free, BTreeMap::from([(100, 40)]));
    }
}
