//! The mapping table: the addresses that a kernel or a copy may read and write.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

#[derive(Debug, Clone, Copy)]
struct Entry {
    end: u64,
    read: bool,
    write: bool,
}

/// The table at one moment: sorted, neighbours joined. Read without a lock.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    readable: Vec<Range<u64>>,
    writable: Vec<Range<u64>>,
    version: u64,
}

impl Spans {
    /// Returns the widest accessible range around an address.
    pub(crate) fn find(&self, address: u64, write: bool) -> Option<Range<u64>> {
        let spans = if write { &self.writable } else { &self.readable };
        let after = spans.partition_point(|span| span.start <= address);
        let span = spans.get(after.checked_sub(1)?)?;
        span.contains(&address).then(|| span.clone())
    }

    /// True if all of a range is accessible.
    pub(crate) fn covers(&self, range: &Range<u64>, write: bool) -> bool {
        range.is_empty() || self.find(range.start, write).is_some_and(|span| span.end >= range.end)
    }
}

#[derive(Debug, Default)]
struct Inner {
    entries: BTreeMap<u64, Entry>,
    spans: Option<Arc<Spans>>,
}

/// The mapping table of one GPU.
#[derive(Debug, Default)]
pub(crate) struct MappingTable {
    inner: RwLock<Inner>,
    /// Grows with every change: shows a launch that its copy is outdated.
    version: AtomicU64,
}

impl MappingTable {
    fn change(&self, change: impl FnOnce(&mut BTreeMap<u64, Entry>)) {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut inner.entries);
        inner.spans = None;
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Makes a range accessible; the range must not overlap another one.
    pub(crate) fn insert(&self, range: Range<u64>, read: bool, write: bool) {
        self.change(|entries| {
            entries.insert(range.start, Entry { end: range.end, read, write });
        });
    }

    /// Removes the range that starts at an address.
    pub(crate) fn remove(&self, start: u64) {
        self.change(|entries| {
            entries.remove(&start);
        });
    }

    /// Returns the ranges of entries that begin in a range.
    pub(super) fn within(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.entries.range(range.clone()).map(|(start, entry)| *start..entry.end).collect()
    }

    /// Returns the present table.
    pub(crate) fn spans(&self) -> Arc<Spans> {
        if let Some(spans) = &self.inner.read().unwrap_or_else(PoisonError::into_inner).spans {
            return Arc::clone(spans);
        }
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(spans) = &inner.spans {
            return Arc::clone(spans);
        }
        let joined = |right: fn(&Entry) -> bool| {
            let mut spans: Vec<Range<u64>> = Vec::new();
            for (start, entry) in inner.entries.iter().filter(|(_, entry)| right(entry)) {
                match spans.last_mut() {
                    Some(last) if last.end == *start => last.end = entry.end,
                    _ => spans.push(*start..entry.end),
                }
            }
            spans
        };
        let spans = Arc::new(Spans {
            readable: joined(|entry| entry.read),
            writable: joined(|entry| entry.write),
            version: self.version.load(Ordering::Acquire),
        });
        inner.spans = Some(Arc::clone(&spans));
        spans
    }

    /// True if the table has changed since `spans`.
    pub(crate) fn is_newer_than(&self, spans: &Spans) -> bool {
        self.version.load(Ordering::Acquire) != spans.version
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_join_for_rights_that_both_have() {
        let table = MappingTable::default();
        table.insert(0x1000..0x2000, true, true);
        table.insert(0x2000..0x3000, true, false);
        table.insert(0x3000..0x4000, true, true);
        table.insert(0x5000..0x6000, false, false);
        let spans = table.spans();
        assert_eq!(spans.find(0x2800, false), Some(0x1000..0x4000));
        assert_eq!(spans.find(0x1800, true), Some(0x1000..0x2000));
        assert_eq!(spans.find(0x2000, true), None);
        assert_eq!(spans.find(0x5000, false), None);
        assert!(spans.covers(&(0x1000..0x4000), false));
        assert!(!spans.covers(&(0x1000..0x4001), false));
        assert!(!spans.covers(&(0x1fff..0x2001), true));
        table.remove(0x2000);
        assert!(table.is_newer_than(&spans));
        assert_eq!(table.spans().find(0x1fff, false), Some(0x1000..0x2000));
        assert_eq!(table.spans().find(0x2000, false), None);
    }
}
