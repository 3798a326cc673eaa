//! Managed memory. It is pinned memory of the arena, which devices reach in place: the memory never moves, and advice is only
//! stored. As on hardware that does not migrate it, its bytes are taken of the device's memory too: device memory of its size is set
//! aside. Managed variables of modules are memory of the host's driver instead, and [`super::variables`] has their contents.

use super::variables::Variables;
use crate::error::{Error, Result};
use core::ops::Range;
use sluice_cuda_frontend::managed::{Advice, Advised, Saying};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
};

#[derive(Clone, Copy, Debug)]
struct ManagedAllocation {
    bytes: u64,
    /// Raw id of its context; 0 for a variable, which ends with its module.
    context: u64,
    /// Address of the device memory that is set aside for it; `None` for a variable.
    aside: Option<u64>,
}

#[derive(Debug, Default)]
struct ManagedBook {
    allocations: BTreeMap<u64, ManagedAllocation>,
    advised: Advised,
}

impl ManagedBook {
    /// A range that lies in one allocation of managed memory.
    fn range(&self, start: u64, bytes: u64) -> Result<Range<u64>> {
        let (base, allocation) = self.allocations.range(..=start).next_back().ok_or(Error::INVALID_VALUE)?;
        let end = start.checked_add(bytes).filter(|_| bytes > 0).ok_or(Error::INVALID_VALUE)?;
        if end - base > allocation.bytes { Err(Error::INVALID_VALUE) } else { Ok(start..end) }
    }

    fn forget(&mut self, start: u64) -> Option<ManagedAllocation> {
        let allocation = self.allocations.remove(&start)?;
        self.advised.forget(&(start..start + allocation.bytes));
        Some(allocation)
    }
}

/// The managed memory of the process.
#[derive(Default)]
pub(crate) struct Managed {
    book: Mutex<ManagedBook>,
    pub(crate) variables: Variables,
}

impl Managed {
    fn lock(&self) -> MutexGuard<'_, ManagedBook> {
        self.book.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records an allocation, for which device memory at `aside` is set aside.
    pub(crate) fn add(&self, start: u64, bytes: u64, context: u64, aside: u64) {
        self.lock().allocations.insert(start, ManagedAllocation { bytes, context, aside: Some(aside) });
    }

    /// Records a variable.
    pub(crate) fn add_variable(&self, start: u64, bytes: u64) {
        self.lock().allocations.insert(start, ManagedAllocation { bytes, context: 0, aside: None });
    }

    /// Forgets an allocation; returns the address of its device memory, `None` if none begins there.
    pub(crate) fn forget(&self, start: u64) -> Option<u64> {
        let mut book = self.lock();
        let aside = book.allocations.get(&start)?.aside?;
        book.forget(start);
        Some(aside)
    }

    /// Forgets a variable.
    pub(crate) fn forget_variable(&self, start: u64) {
        self.lock().forget(start);
    }

    /// Forgets the memory of a context that is gone.
    pub(crate) fn forget_context(&self, context: u64) {
        let mut book = self.lock();
        let its = book.allocations.iter().filter(|(_, allocation)| allocation.context == context);
        let its: Vec<u64> = its.map(|(start, _)| *start).collect();
        for start in its {
            book.forget(start);
        }
    }

    /// The allocation that an address lies in.
    pub(crate) fn at(&self, address: u64) -> Option<(u64, u64)> {
        let book = self.lock();
        let (start, allocation) = book.allocations.range(..=address).next_back()?;
        (address - start < allocation.bytes).then_some((*start, allocation.bytes))
    }

    /// An error if a range is not managed memory of one allocation.
    pub(crate) fn check(&self, start: u64, bytes: u64) -> Result {
        self.lock().range(start, bytes).map(|_| ())
    }

    /// Stores advice about a range.
    pub(crate) fn advise(&self, start: u64, bytes: u64, saying: Saying) -> Result {
        let mut book = self.lock();
        let range = book.range(start, bytes)?;
        book.advised.say(&range, saying);
        Ok(())
    }

    /// The distinct pieces of advice about parts of a range.
    pub(crate) fn said(&self, start: u64, bytes: u64) -> Result<Vec<Advice>> {
        let book = self.lock();
        let range = book.range(start, bytes)?;
        Ok(book.advised.said(&range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_of_one_allocation_are_refused() {
        let managed = Managed::default();
        managed.add(0x10_0000, 0xa000, 1, 0x70_0000);
        managed.add(0x20_0000, 0xa000, 2, 0x80_0000);
        managed.advise(0x10_0000, 0xa000, Saying::ReadMostly(true)).unwrap();
        assert_eq!(managed.said(0x10_0000, 0xa000).unwrap().len(), 1);
        for (start, bytes) in
            [(0x10_0000, 0xa001), (0xf_ffff, 1), (0x10_0000, 0), (0x10_0000, u64::MAX), (0x10_b000, 1)]
        {
            assert_eq!(managed.check(start, bytes), Err(Error::INVALID_VALUE), "{start:#x} {bytes:#x}");
        }
        assert_eq!((managed.forget(0x10_0000), managed.forget(0x10_0000)), (Some(0x70_0000), None));
        managed.add(0x10_0000, 0xa000, 1, 0x70_0000);
        assert_eq!(
            managed.said(0x10_0000, 0xa000).unwrap(),
            [Advice::default()],
            "nothing is left of the one before"
        );
        managed.add_variable(0x30_0000, 8);
        assert_eq!((managed.forget(0x30_0000), managed.at(0x30_0004)), (None, Some((0x30_0000, 8))));
        managed.forget_variable(0x30_0000);
        assert_eq!(managed.at(0x30_0000), None);
        managed.forget_context(1);
        assert_eq!((managed.at(0x10_0000), managed.at(0x20_0001)), (None, Some((0x20_0000, 0xa000))));
    }
}
