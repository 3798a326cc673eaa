//! The executing operations. A thread that removes a mapping changes the table first and then waits here for the operations that
//! may still use the old one; an operation that starts later uses the new table and is not waited for.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::lock::lock;

#[derive(Default)]
struct Tickets {
    next: u64,
    out: BTreeSet<u64>,
}

/// The set of executing operations.
#[derive(Default)]
pub(crate) struct Running {
    tickets: Mutex<Tickets>,
    returned: Condvar,
}

/// Held while an operation uses device memory.
pub(crate) struct Ticket<'a> {
    running: &'a Running,
    number: u64,
}

impl Running {
    /// Registers an operation, before it reads the table.
    pub(crate) fn enter(&self) -> Ticket<'_> {
        let mut tickets = lock(&self.tickets);
        let number = tickets.next;
        tickets.next += 1;
        tickets.out.insert(number);
        Ticket { running: self, number }
    }

    /// True if no operation is executing.
    pub(crate) fn is_idle(&self) -> bool {
        lock(&self.tickets).out.is_empty()
    }

    /// Waits until all operations that are executing now have ended.
    pub(crate) fn wait(&self) {
        let mut tickets = lock(&self.tickets);
        let limit = tickets.next;
        while tickets.out.first().is_some_and(|first| *first < limit) {
            tickets = self.returned.wait(tickets).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        lock(&self.running.tickets).out.remove(&self.number);
        self.running.returned.notify_all();
    }
}
