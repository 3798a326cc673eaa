//! The function that all modules use to take a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, poisoned or not: all data here is consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
