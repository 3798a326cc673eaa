//! Managed variables. The driver of the host chooses their addresses and has their contents while work runs; the program has a copy at
//! the same addresses, which is valid while none does. Both take turns, as with managed memory on a device without concurrent access;
//! [`crate::turns`] changes them.

use crate::{error::Result, state::memory::device_map::DeviceMap};
use core::ops::Range;
use std::sync::{
    PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
    atomic::{AtomicBool, Ordering},
};

const PAGE: u64 = 4096;

/// A managed variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ManagedVariable {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Raw id of the context of its module. All contexts have the variables of a library, and any carries their contents.
    pub(crate) context: Option<u64>,
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
}

impl Variables {
    /// The book, if there ever was a variable. A thread that posts work holds it meanwhile, so that the turn does not change.
    pub(crate) fn book(&self) -> Option<RwLockReadGuard<'_, VariableBook>> {
        self.any.load(Ordering::Acquire).then(|| self.book.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The book for a change. It is not waited for in the lock, which would let no other thread post meanwhile, perhaps not the one that
    /// ends a wait in which a thread with the book is.
    pub(crate) fn change(&self) -> RwLockWriteGuard<'_, VariableBook> {
        loop {
            match self.try_change() {
                Some(book) => return book,
                None => std::thread::yield_now(),
            }
        }
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
        if book.variables.iter().any(|known| known.start == added.start) {
            return Ok(());
        }
        device_map.let_access(book.own_pages(&added), true)?;
        book.variables.push(added);
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Takes variables out of the book: no call carries their contents any more. The program can still access them.
    pub(crate) fn take(&self, which: impl Fn(&ManagedVariable) -> bool) -> Vec<ManagedVariable> {
        if self.book().is_none() {
            return Vec::new();
        }
        let mut book = self.change();
        let taken: Vec<_> = book.variables.extract_if(.., |known| which(known)).collect();
        book.with_program -= taken.iter().filter(|taken| !taken.on_device).count();
        taken
    }

    /// Puts back variables that were taken.
    pub(crate) fn put_back(&self, taken: Vec<ManagedVariable>) {
        let mut book = self.change();
        book.with_program += taken.iter().filter(|taken| !taken.on_device).count();
        book.variables.extend(taken);
    }

    /// Ends the program's access to variables that were taken.
    pub(crate) fn close(&self, device_map: &DeviceMap, taken: &[ManagedVariable]) {
        if taken.is_empty() {
            return;
        }
        let book = self.change();
        for gone in taken {
            // After a failure the pages stay accessible, which harms only the program itself.
            let _ = device_map.let_access(book.own_pages(gone), false);
        }
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
        let variable = |start, bytes| ManagedVariable { start, bytes, context: None, on_device: true };
        let variables = vec![variable(0x1000, 8), variable(0x1100, 0x3000)];
        let book = VariableBook { variables, with_program: 0 };
        assert_eq!(book.own_pages(&variable(0x1000, 8)), 0x2000..0x2000);
        assert_eq!(book.own_pages(&variable(0x1100, 0x3000)), 0x2000..0x5000);
        assert_eq!(book.own_pages(&variable(0x4200, 0x1000)), 0x5000..0x6000);
        assert_eq!(book.own_pages(&variable(0x6000, 1)), 0x6000..0x7000);
    }

    fn variables(list: &[ManagedVariable]) -> Variables {
        let variables = Variables { any: AtomicBool::new(true), ..Variables::default() };
        variables.put_back(list.to_vec());
        variables
    }

    // Promise: C128
    #[test]
    fn variables_that_were_taken_count_no_more_until_they_are_put_back() {
        let of = |start, context, on_device| ManagedVariable { start, bytes: 8, context, on_device };
        let list = [of(0x1000, Some(1), false), of(0x2000, None, false), of(0x3000, Some(1), true)];
        let variables = variables(&list);
        let with_program = || variables.book().map(|book| (book.variables.len(), book.with_program));
        assert_eq!(with_program(), Some((3, 2)));
        let taken = variables.take(|variable| variable.context == Some(1));
        assert_eq!(taken, [list[0], list[2]]);
        assert_eq!(with_program(), Some((1, 1)));
        assert!(!variables.hold(0x1000) && variables.hold(0x2007));
        variables.put_back(taken);
        assert_eq!(with_program(), Some((3, 2)));
        assert!(variables.hold(0x1000));
    }

    // Promise: C128
    #[test]
    fn threads_post_while_another_waits_to_change_the_variables() {
        let variables = variables(&[]);
        let (posting, other) = (variables.book(), &variables);
        std::thread::scope(|scope| {
            let change = scope.spawn(|| drop(other.change()));
            for _ in 0..100 {
                // One of these would wait for ever if the thread above waited in the lock.
                drop(scope.spawn(|| drop(other.book())).join());
            }
            assert!(!change.is_finished(), "a thread still posts");
            drop(posting);
            change.join().unwrap();
        });
    }
}
