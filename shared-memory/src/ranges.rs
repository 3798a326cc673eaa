//! The free parts of a memory file.

use std::collections::BTreeMap;

/// A range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Free ranges by offset, never adjacent.
#[derive(Debug)]
pub struct Free(BTreeMap<u64, u64>);

impl Free {
    /// A list with one free range.
    #[must_use]
    pub fn new(offset: u64, bytes: u64) -> Free {
        Free(BTreeMap::from([(offset, bytes)]))
    }

    /// Takes the first range that is long enough.
    pub fn take(&mut self, bytes: u64) -> Option<Range> {
        let (offset, room) =
            self.0.iter().map(|(offset, room)| (*offset, *room)).find(|(_, room)| *room >= bytes)?;
        self.0.remove(&offset);
        if room > bytes {
            self.0.insert(offset + bytes, room - bytes);
        }
        Some(Range { offset, bytes })
    }

    /// Gives back a range that was taken.
    pub fn give(&mut self, range: Range) {
        let Range { mut offset, mut bytes } = range;
        if let Some((before, room)) =
            self.0.range(..offset).next_back().map(|(before, room)| (*before, *room))
            && before + room == offset
        {
            self.0.remove(&before);
            offset = before;
            bytes += room;
        }
        if let Some(room) = self.0.remove(&(offset + bytes)) {
            bytes += room;
        }
        self.0.insert(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn returned_ranges_merge_into_one() {
        let mut free = Free::new(PAGE, 16 * PAGE);
        let ranges: Vec<_> = (0..16).map(|_| free.take(PAGE).unwrap()).collect();
        assert_eq!(free.take(PAGE), None);
        for range in ranges.iter().step_by(2).chain(ranges.iter().skip(1).step_by(2)) {
            free.give(*range);
        }
        assert_eq!(free.0, BTreeMap::from([(PAGE, 16 * PAGE)]));
        assert_eq!(free.take(17 * PAGE), None);
        assert_eq!(free.take(16 * PAGE), Some(Range { offset: PAGE, bytes: 16 * PAGE }));
    }
}
