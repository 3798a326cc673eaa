//! Free addresses of the session's windows, without mappings.

use std::collections::BTreeMap;

/// Free ranges; no two are adjacent.
#[derive(Debug, Default)]
pub(super) struct AddressSpace {
    free: BTreeMap<u64, u64>,
}

impl AddressSpace {
    pub(super) const fn new() -> AddressSpace {
        AddressSpace { free: BTreeMap::new() }
    }

    /// Takes `bytes` at the lowest free address.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        self.take_aligned(bytes, 1)
    }

    /// Takes `bytes` at the lowest free multiple of `alignment`.
    pub(super) fn take_aligned(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        let fits = |(base, length): (&u64, &u64)| {
            let at = base.checked_next_multiple_of(alignment)?;
            (at.checked_add(bytes)? <= base + length).then_some(at)
        };
        let at = self.free.iter().find_map(fits)?;
        self.take_at(at, bytes).then_some(at)
    }

    /// Takes exactly this range, if all of it is free.
    pub(super) fn take_at(&mut self, at: u64, bytes: u64) -> bool {
        let Some((base, length)) = self.free.range(..=at).next_back().map(|(b, l)| (*b, *l)) else {
            return false;
        };
        let (Some(end), last) = (at.checked_add(bytes), base + length) else { return false };
        if end > last {
            return false;
        }
        self.free.remove(&base);
        if at > base {
            self.free.insert(base, at - base);
        }
        if end < last {
            self.free.insert(end, last - end);
        }
        true
    }

    /// Frees a range; it merges with its neighbours.
    pub(super) fn give(&mut self, base: u64, bytes: u64) {
        let (mut base, mut end) = (base, base + bytes);
        if let Some((before, length)) = self.free.range(..base).next_back().map(|(b, l)| (*b, *l))
            && before + length == base
        {
            self.free.remove(&before);
            base = before;
        }
        if let Some(length) = self.free.remove(&end) {
            end += length;
        }
        self.free.insert(base, end - base);
    }

    #[cfg(test)]
    pub(super) fn ranges(&self) -> Vec<(u64, u64)> {
        self.free.iter().map(|(base, length)| (*base, *length)).collect()
    }
}
