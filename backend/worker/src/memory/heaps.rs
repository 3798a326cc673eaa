//! The contexts that have a heap for `malloc` in kernels.
//!
//! The module helper records a heap, because the driver allocates it with the first module of a context that calls `malloc`;
//! the memory helper reads the record, because an existing heap takes the size of its limit at once.

use crate::session::objects::ContextRef;
use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
pub(crate) const LIMIT: u32 = 2;

/// Serials of the contexts with a heap.
#[derive(Debug, Default)]
pub(crate) struct Heaps(Mutex<BTreeSet<u64>>);

impl Heaps {
    fn contexts(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has(&self, context: ContextRef) -> bool {
        self.contexts().contains(&context.serial)
    }

    pub(crate) fn taken(&self, context: ContextRef) {
        self.contexts().insert(context.serial);
    }

    pub(crate) fn gone(&self, context: ContextRef) {
        self.contexts().remove(&context.serial);
    }
}
