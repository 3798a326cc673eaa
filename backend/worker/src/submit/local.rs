//! The local memory that the driver has reserved, context by context.
//!
//! A driver keeps local memory for every thread that can be resident, and takes more at the first launch of a function that
//! needs more than any function before. Such a launch needs a grant; see [`crate::submit::queue`].

use crate::session::objects::ContextRef;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The local memory that a launch may make the driver take in one context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Local {
    pub(crate) context: ContextRef,
    pub(crate) device: i32,
    /// Bytes per thread.
    pub(crate) each: u32,
    /// Total bytes.
    pub(crate) bytes: u64,
}

/// Bytes per thread of the largest function that was launched, by context; there are few contexts.
#[derive(Debug, Default)]
pub(crate) struct LocalMemory {
    largest: Mutex<Vec<(ContextRef, u32)>>,
}

impl LocalMemory {
    fn lock(&self) -> MutexGuard<'_, Vec<(ContextRef, u32)>> {
        self.largest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the driver has reserved local memory for a function with `each` bytes per thread.
    pub(crate) fn covers(&self, context: ContextRef, each: u32) -> bool {
        each == 0 || self.lock().iter().any(|(of, largest)| *of == context && each <= *largest)
    }

    /// Records the launch of a function with `each` bytes per thread.
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
    fn local_memory_covers_functions_up_to_the_largest_of_a_context() {
        let local = LocalMemory::default();
        let (one, two) = (ContextRef { handle: 1, serial: 1 }, ContextRef { handle: 1, serial: 2 });
        assert!(local.covers(one, 0), "the function needs none");
        assert!(!local.covers(one, 8));
        local.note(one, 8);
        local.note(one, 4);
        assert!(local.covers(one, 8) && !local.covers(one, 9));
        assert!(!local.covers(two, 1), "another context");
        local.forget(one);
        assert!(!local.covers(one, 1));
    }
}
