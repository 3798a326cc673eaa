//! Access of contexts to the memory of contexts on other devices.

use std::sync::{Mutex, MutexGuard};

/// A context: its raw id and its device.
type Place = (u64, i32);

/// The pairs of contexts of which the first may access the memory of the second. A device has the access for all of its contexts.
#[derive(Default)]
pub(crate) struct Peers {
    pairs: Mutex<Vec<[Place; 2]>>,
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, Vec<[Place; 2]>> {
        self.pairs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records what the host has enabled.
    pub(crate) fn enabled(&self, context: Place, peer: Place) {
        self.lock().push([context, peer]);
    }

    /// Forgets what the host has disabled.
    pub(crate) fn disabled(&self, context: u64, peer: u64) {
        self.lock().retain(|[from, to]| (from.0, to.0) != (context, peer));
    }

    /// True if a context has access to another.
    pub(crate) fn is_enabled(&self, context: u64, peer: u64) -> bool {
        self.lock().iter().any(|[from, to]| (from.0, to.0) == (context, peer))
    }

    /// True if a device has access to the memory of contexts on another.
    pub(crate) fn reaches(&self, device: i32, owner: i32) -> bool {
        self.lock().iter().any(|[from, to]| (from.1, to.1) == (device, owner))
    }

    /// Forgets a context that ends; returns `false` if it had no peers.
    pub(crate) fn forget_context(&self, context: u64) -> bool {
        let mut pairs = self.lock();
        let before = pairs.len();
        pairs.retain(|pair| pair.iter().all(|place| place.0 != context));
        pairs.len() < before
    }
}
