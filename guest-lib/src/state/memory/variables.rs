//! Managed variables. The driver of the host chooses their addresses and has their contents while work runs; the program has a copy at
//! the same addresses, which is valid while none does. Both take turns, as with managed memory on a device without concurrent access;
//! [`crate::turns`] changes them.

use crate::{error::Result, state::memory::device_map::DeviceMap};
use core::ops::Range;
use std::sync::{
    Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
    atomic::{AtomicBool, Ordering},
};

const PAGE: u64 = 4096;

/// A managed variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ManagedVariable {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Raw id of a context through which its contents are carried.
    pub(crate) context: u64,
    /// True if its contents are on the device: work may change them.
    pub(crate) on_device: bool,
}

impl ManagedVariable {
    fn pages(&self) -> Range<u64> {
        let end = self.start.saturating_add(self.bytes).next_multiple_of(PAGE);
        self.start - self.start % PAGE..end
    }
}

/// The variables.
#[derive(Default)]
pub(crate) struct VariableBook {
    pub(crate) variables: Vec<ManagedVariable>,
    /// Number of variables whose contents are with the program.
    pub(crate) with_program: usize,
}

impl VariableBook {
    /// The pages of a variable that no other one touches. Variables do not overlap, so only the first and the last can be shared.
    fn own_pages(&self, of: &ManagedVariable) -> Range<u64> {
        let is_shared = |page: u64| {
            let others = self.variables.iter().filter(|other| other.start != of.start);
            others.map(ManagedVariable::pages).any(|pages| pages.contains(&page))
        };
        let mut own = of.pages();
        if is_shared(own.start) {
            own.start += PAGE;
        }
        if own.start < own.end && is_shared(own.end - PAGE) {
            own.end -= PAGE;
        }
        own
    }
}

/// The managed variables of the process.
#[derive(Default)]
pub(crate) struct Variables {
    /// True once there was one: programs without any take no lock.
    any: AtomicBool,
    book: RwLock<VariableBook>,
    /// The context that was retained for a look-up without one.
    retained: Mutex<Option<u64>>,
}

impl Variables {
    /// The book, if there ever was a variable. A thread that posts work holds it meanwhile, so that the turn does not change.
    pub(crate) fn book(&self) -> Option<RwLockReadGuard<'_, VariableBook>> {
        self.any.load(Ordering::Acquire).then(|| self.book.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn retained(&self) -> MutexGuard<'_, Option<u64>> {
        self.retained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The book for a change of turns.
    pub(crate) fn change(&self) -> RwLockWriteGuard<'_, VariableBook> {
        self.book.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, unless a thread has it.
    pub(crate) fn try_change(&self) -> Option<RwLockWriteGuard<'_, VariableBook>> {
        match self.book.try_write() {
            Ok(book) => Some(book),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Records a variable, whose pages the program can access from now on.
    pub(crate) fn add(&self, device_map: &DeviceMap, added: ManagedVariable) -> Result {
        let mut book = self.change();
        if let Some(known) = book.variables.iter_mut().find(|known| known.start == added.start) {
            known.context = added.context;
            return Ok(());
        }
        device_map.let_access(book.own_pages(&added), true)?;
        book.variables.push(added);
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Forgets a variable, which the program cannot access any more.
    pub(crate) fn forget(&self, device_map: &DeviceMap, start: u64) {
        let mut book = self.change();
        let Some(index) = book.variables.iter().position(|known| known.start == start) else { return };
        let gone = book.variables.swap_remove(index);
        book.with_program -= usize::from(!gone.on_device);
        // After a failure the pages stay accessible, which harms only the program itself.
        let _ = device_map.let_access(book.own_pages(&gone), false);
    }

    /// True if an address lies in a variable.
    pub(crate) fn hold(&self, address: u64) -> bool {
        let is_in = |known: &ManagedVariable| known.start <= address && address - known.start < known.bytes;
        self.book().is_some_and(|book| book.variables.iter().any(is_in))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C128
    #[test]
    fn pages_of_a_variable_are_those_that_no_other_touches() {
        let variable = |start, bytes| ManagedVariable { start, bytes, context: 1, on_device: true };
        let variables = vec![variable(0x1000, 8), variable(0x1100, 0x3000)];
        let book = VariableBook { variables, with_program: 0 };
        assert_eq!(book.own_pages(&variable(0x1000, 8)), 0x2000..0x2000);
        assert_eq!(book.own_pages(&variable(0x1100, 0x3000)), 0x2000..0x5000);
        assert_eq!(book.own_pages(&variable(0x4200, 0x1000)), 0x5000..0x6000);
        assert_eq!(book.own_pages(&variable(0x6000, 1)), 0x6000..0x7000);
    }
}
