//! Addresses of the session's windows that nothing is mapped at.

use std::collections::BTreeMap;

/// Free ranges, none adjacent to another.
#[derive(Debug, Default)]
pub(super) struct Space {
    free: BTreeMap<u64, u64>,
}

impl Space {
    pub(super) const fn new() -> Space {
        Space { free: BTreeMap::new() }
    }

    /// Takes `bytes` at the lowest place that has them.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (base, length) = self.free.iter().find(|(_, length)| **length >= bytes).map(|(b, l)| (*b, *l))?;
        self.free.remove(&base);
        if length > bytes {
            self.free.insert(base + bytes, length - bytes);
        }
        Some(base)
    }

    /// Gives a range back; it joins its neighbours.
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
