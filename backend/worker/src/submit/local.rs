//! The local memory for which the driver has made room, context by context.
//!
//! A driver keeps local memory for every thread that can be resident, and takes more at the first launch of a function that
//! needs more than any before it. Such a launch needs a grant; see [`crate::submit::queue`].

use crate::submit::lanes::ContextRef;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a launch may make the driver take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Local {
    pub(crate) device: i32,
    /// Bytes for each thread.
    pub(crate) each: u32,
    /// Bytes in all.
    pub(crate) bytes: u64,
}

/// Bytes per thread of the largest function that was launched, by context; few contexts.
#[derive(Debug, Default)]
pub(crate) struct LocalMemory {
    largest: Mutex<Vec<(ContextRef, u32)>>,
}

impl LocalMemory {
    fn lock(&self) -> MutexGuard<'_, Vec<(ContextRef, u32)>> {
        self.largest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is room for a function with so many bytes per thread.
    pub(crate) fn covers(&self, context: ContextRef, each: u32) -> bool {
        each == 0 || self.lock().iter().any(|(of, largest)| *of == context && each <= *largest)
    }

    /// A function with so many bytes per thread was launched.
    pub(crate) fn note(&self, context: ContextRef, each: u32) {
        let mut largest = self.lock();
        match largest.iter_mut().find(|(of, _)| *of == context) {
            Some((_, largest)) => *largest = each.max(*largest),
            None => largest.push((context, each)),
        }
    }

    pub(crate) fn forget(&self, context: ContextRef) {
        self.lock().retain(|(of, _)| *of != context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_function_of_a_context_counts() {
        let local = LocalMemory::default();
        let (one, two) = (ContextRef { handle: 1, serial: 1 }, ContextRef { handle: 1, serial: 2 });
        assert!(local.covers(one, 0), "none is needed");
        assert!(!local.covers(one, 8));
        local.note(one, 8);
        local.note(one, 4);
        assert!(local.covers(one, 8) && !local.covers(one, 9));
        assert!(!local.covers(two, 1), "another context");
        local.forget(one);
        assert!(!local.covers(one, 1));
    }
}
