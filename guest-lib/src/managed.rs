//! Managed memory. It is pinned memory of the arena, which devices reach where it is: nothing ever moves, and advice is
//! only remembered.

use crate::error::{Error, Result};
use core::ops::Range;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard},
};

/// The unit in which advice is remembered.
const PAGE: u64 = 4096;

/// Where memory is wished to: a `CUmemLocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

/// What was said about a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Advice {
    pub(crate) read_mostly: bool,
    pub(crate) preferred: Option<Location>,
    pub(crate) prefetched: Option<Location>,
    pub(crate) accessed_by: BTreeSet<Location>,
}

/// One allocation.
#[derive(Debug)]
struct Allocation {
    bytes: u64,
    context: u64,
    /// Pieces about which something else was said than about what is before them, by their first page.
    said: BTreeMap<u64, Advice>,
}

/// The managed memory of the process.
#[derive(Default)]
pub(crate) struct Managed {
    allocations: Mutex<BTreeMap<u64, Allocation>>,
}

impl Managed {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Allocation>> {
        self.allocations.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn add(&self, start: u64, bytes: u64, context: u64) {
        let said = BTreeMap::from([(0, Advice::default())]);
        self.lock().insert(start, Allocation { bytes, context, said });
    }

    /// Forgets an allocation; `false` when none begins there.
    pub(crate) fn forget(&self, start: u64) -> bool {
        self.lock().remove(&start).is_some()
    }

    /// Forgets what a context has, which is gone.
    pub(crate) fn forget_context(&self, context: u64) {
        self.lock().retain(|_, allocation| allocation.context != context);
    }

    /// The allocation that an address lies in.
    pub(crate) fn at(&self, address: u64) -> Option<(u64, u64)> {
        let allocations = self.lock();
        let (start, allocation) = allocations.range(..=address).next_back()?;
        (address - start < allocation.bytes).then_some((*start, allocation.bytes))
    }

    fn with<R>(
        &self,
        start: u64,
        bytes: u64,
        look: impl FnOnce(&mut Allocation, Range<u64>) -> R,
    ) -> Result<R> {
        let mut allocations = self.lock();
        let (base, allocation) = allocations.range_mut(..=start).next_back().ok_or(Error::INVALID_VALUE)?;
        let from = start - base;
        let end = from.checked_add(bytes).filter(|_| bytes > 0).ok_or(Error::INVALID_VALUE)?;
        if end > allocation.bytes {
            return Err(Error::INVALID_VALUE);
        }
        Ok(look(allocation, from / PAGE..end.div_ceil(PAGE)))
    }

    /// Whether a range is managed memory of one allocation.
    pub(crate) fn check(&self, start: u64, bytes: u64) -> Result {
        self.with(start, bytes, |_, _| ())
    }

    /// Remembers something about a range.
    pub(crate) fn advise(&self, start: u64, bytes: u64, say: impl Fn(&mut Advice)) -> Result {
        self.with(start, bytes, |allocation, pages| {
            for border in [pages.start, pages.end] {
                let before = allocation.said.range(..=border).next_back().map(|(_, said)| said.clone());
                allocation.said.entry(border).or_insert(before.unwrap_or_default());
            }
            allocation.said.range_mut(pages).for_each(|(_, said)| say(said));
            // Pieces that say the same as those before them become one.
            let mut last = None;
            allocation.said.retain(|_, said| {
                let same = last.as_ref() == Some(said);
                last = Some(said.clone());
                !same
            });
        })
    }

    /// What was said about the pieces of a range, in order.
    pub(crate) fn said(&self, start: u64, bytes: u64) -> Result<Vec<Advice>> {
        self.with(start, bytes, |allocation, pages| {
            let first = allocation.said.range(..=pages.start).next_back().map(|(at, _)| *at).unwrap_or(0);
            allocation.said.range(first..pages.end).map(|(_, said)| said.clone()).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_holds_for_the_pages_it_was_given_for() {
        let managed = Managed::default();
        managed.add(0x10_0000, 10 * PAGE, 1);
        managed.advise(0x10_0000 + 2 * PAGE, 3 * PAGE, |said| said.read_mostly = true).unwrap();
        let mostly = |from: u64, pages: u64| {
            let said = managed.said(0x10_0000 + from * PAGE, pages * PAGE).unwrap();
            (said.len(), said.iter().all(|said| said.read_mostly))
        };
        assert_eq!(mostly(2, 3), (1, true));
        assert_eq!(mostly(1, 2), (2, false));
        assert_eq!(mostly(5, 5), (1, false));
        managed.advise(0x10_0000, 10 * PAGE, |said| said.read_mostly = true).unwrap();
        assert_eq!(mostly(0, 10), (1, true), "one piece again");
        assert_eq!(managed.check(0x10_0000, 10 * PAGE + 1), Err(Error::INVALID_VALUE));
        assert_eq!(managed.check(0xf_ffff, 1), Err(Error::INVALID_VALUE));
        assert!(managed.forget(0x10_0000) && !managed.forget(0x10_0000));
    }
}
