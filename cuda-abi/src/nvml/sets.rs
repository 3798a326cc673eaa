//! The event sets of a started library.

use super::driver::Watch;
use super::layout::{DeviceHandle, EventSetHandle};
use super::status::{Result, Status};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The sets of a session. A number is never used for another set.
#[derive(Default)]
pub(super) struct Sets(Mutex<Table>);

#[derive(Default)]
struct Table {
    last: EventSetHandle,
    sets: HashMap<EventSetHandle, Arc<Set>>,
}

pub(super) type Set = Mutex<Vec<(DeviceHandle, Box<dyn Watch>)>>;

impl Sets {
    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn create(&self) -> EventSetHandle {
        let mut table = self.table();
        table.last += 1;
        let handle = table.last;
        table.sets.insert(handle, Arc::default());
        handle
    }

    pub(super) fn free(&self, set: EventSetHandle) -> Result {
        self.table().sets.remove(&set).map(drop).ok_or(Status::INVALID_ARGUMENT)
    }

    pub(super) fn get(&self, set: EventSetHandle) -> Result<Arc<Set>> {
        self.table().sets.get(&set).cloned().ok_or(Status::INVALID_ARGUMENT)
    }
}
