//! The event sets of an initialised library.

use crate::driver::Watch;
use crate::layout::{DeviceHandle, EventSetHandle};
use crate::status::{Result, Status};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The sets of a session. The number of a set is never used again.
#[derive(Default)]
pub(crate) struct Sets(Mutex<SetTable>);

#[derive(Default)]
struct SetTable {
    last: EventSetHandle,
    sets: HashMap<EventSetHandle, Arc<Set>>,
}

pub(crate) type Set = Mutex<Vec<(DeviceHandle, Box<dyn Watch>)>>;

impl Sets {
    fn table(&self) -> std::sync::MutexGuard<'_, SetTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn create(&self) -> EventSetHandle {
        let mut table = self.table();
        table.last += 1;
        let handle = table.last;
        table.sets.insert(handle, Arc::default());
        handle
    }

    pub(crate) fn free(&self, set: EventSetHandle) -> Result {
        self.table().sets.remove(&set).map(drop).ok_or(Status::INVALID_ARGUMENT)
    }

    pub(crate) fn get(&self, set: EventSetHandle) -> Result<Arc<Set>> {
        self.table().sets.get(&set).cloned().ok_or(Status::INVALID_ARGUMENT)
    }
}
