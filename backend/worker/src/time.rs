//! What the worker does with its devices, as it reports it.
//!
//! Each device has a [`Meter`] with a report page, which its arbiter reads when it wants to know. Each word has one writer at
//! a time, so that counting is a load and a store.

use core::sync::atomic::Ordering;
use sluice_protocol::{custody::report, shared::Shared as _};
use sluice_shared_memory::{Mapping, mapping::Words};

/// One device.
#[derive(Debug)]
pub(crate) struct Meter {
    report: Words,
    /// What the words are of.
    _page: Mapping,
}

impl Meter {
    /// A device whose arbiter reads `report`.
    pub(crate) fn new(report: Mapping) -> Meter {
        Meter { report: report.words(), _page: report }
    }

    fn count(&self, at: usize, more: u64) {
        let sum = self.report.load_u64(at, Ordering::Relaxed).wrapping_add(more);
        self.report.store_u64(at, sum, Ordering::Relaxed);
    }
}

/// All devices of the session; none where nobody lends memory.
#[derive(Debug, Default)]
pub(crate) struct Time {
    devices: Box<[Meter]>,
}

impl Time {
    pub(crate) fn new(devices: Vec<Meter>) -> Time {
        Time { devices: devices.into() }
    }

    /// The meter of a device; sessions have at least one device where they have work.
    fn meter(&self, device: u8) -> Option<&Meter> {
        self.devices.get(usize::from(device))
    }

    /// Counts a call of the guest. By the dispatcher.
    pub(crate) fn call(&self) {
        if let Some(meter) = self.meter(0) {
            meter.count(report::CALLS, 1);
        }
    }

    /// Counts a launch. By who submits.
    pub(crate) fn launch(&self, device: u8) {
        if let Some(meter) = self.meter(device) {
            meter.count(report::LAUNCHES, 1);
        }
    }

    /// Counts a copy. By who submits.
    pub(crate) fn copy(&self, device: u8, bytes: u64) {
        if let Some(meter) = self.meter(device) {
            meter.count(report::COPIES, 1);
            meter.count(report::COPIED, bytes);
        }
    }
}
