//! The context table: open render nodes of the guest, each with one session at most.

use sluice_protocol::{doorbell::Capset, limits};
use std::collections::HashMap;

/// The state of one context.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceContext {
    /// The context's session.
    pub session: Option<u32>,
}

/// The reason why a context cannot be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContextError {
    /// The id is 0 or taken.
    #[error("context id {0} is not free")]
    Id(u32),
    /// The device does not have this capset.
    #[error("there is no capset {0}")]
    Capset(u32),
    /// The device has the largest number of contexts.
    #[error("the device has more than {} contexts", limits::GPU_CONTEXTS)]
    Many,
}

/// All contexts of a device, by the ids the guest kernel gave them. Ids are reused at once.
#[derive(Debug, Default)]
pub struct Contexts {
    table: HashMap<u32, DeviceContext>,
}

impl Contexts {
    /// Creates a context; a driver without context initialisation sends `capset` 0.
    ///
    /// # Errors
    /// [`ContextError`] if the id or capset is not valid, or there are too many contexts.
    pub fn create(&mut self, id: u32, capset: u32) -> Result<(), ContextError> {
        if id == 0 || self.table.contains_key(&id) {
            return Err(ContextError::Id(id));
        }
        if capset != 0 && capset != Capset::ID {
            return Err(ContextError::Capset(capset));
        }
        if self.table.len() >= limits::GPU_CONTEXTS {
            return Err(ContextError::Many);
        }
        self.table.insert(id, DeviceContext::default());
        Ok(())
    }

    /// The state of a context.
    #[must_use]
    pub fn get(&self, id: u32) -> Option<DeviceContext> {
        self.table.get(&id).copied()
    }

    /// Sets or clears the session of a context.
    pub fn set_session(&mut self, id: u32, session: Option<u32>) {
        if let Some(context) = self.table.get_mut(&id) {
            context.session = session;
        }
    }

    /// Removes a context.
    pub fn destroy(&mut self, id: u32) -> Option<DeviceContext> {
        self.table.remove(&id)
    }

    /// Number of contexts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// True if there are no contexts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Removes all contexts.
    pub fn clear(&mut self) {
        self.table.clear();
    }
}
