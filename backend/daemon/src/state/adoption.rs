//! Whom the sockets lead to that are kept for the next daemon ([`crate::keeper`]).
//!
//! Written at every change where somebody keeps sockets, and else never. It need not survive the machine: what it is about does
//! not either. What it says is believed only as far as the kernel says the same: a process is known by its number and its start.

use std::{
    cell::{Cell, Ref, RefCell},
    collections::BTreeMap,
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::file::{Found, StateFile};
use crate::process::Identity;

/// The form of the file.
const VERSION: u32 = 1;

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Adoptable {
    pub(crate) launcher: Option<LauncherRecord>,
    /// By VM.
    pub(crate) devices: BTreeMap<u32, DeviceRecord>,
    /// By unit.
    pub(crate) arbiters: BTreeMap<u32, ArbiterRecord>,
}

/// The launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LauncherRecord {
    pub(crate) process: Identity,
    /// Its command line, which says what it may start.
    pub(crate) arguments: Vec<String>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceRecord {
    pub(crate) process: Identity,
    /// By the daemon's own numbers: the device's number, and the worker.
    pub(crate) sessions: BTreeMap<u64, (u32, Identity)>,
}

/// An arbiter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ArbiterRecord {
    pub(crate) process: Identity,
    /// Bytes it lends, once it does.
    pub(crate) lends: Option<u64>,
}

/// The record.
#[derive(Debug)]
pub(crate) struct Adoption {
    file: StateFile,
    /// Whether somebody keeps sockets.
    kept: bool,
    /// What the daemon before has left.
    before: RefCell<Adoptable>,
    now: RefCell<Adoptable>,
    complained: Cell<bool>,
}

impl Adoption {
    /// What the last daemon left in a directory, to be adopted; nothing where that cannot be read.
    pub(crate) fn open(directory: &Path, kept: bool) -> Self {
        let file = StateFile::new(directory.join("processes.json"), VERSION);
        let before = match file.load() {
            Ok(Found::Current(content)) if kept => content,
            // One that is not the last may name sessions that are not, and miss some that are.
            Ok(_) => Adoptable::default(),
            Err(error) => {
                tracing::error!("{error}; nothing is adopted");
                Adoptable::default()
            }
        };
        Self {
            file,
            kept,
            before: RefCell::new(before),
            now: RefCell::new(Adoptable::default()),
            complained: Cell::new(false),
        }
    }

    /// What the daemon before has left.
    pub(crate) fn before(&self) -> Ref<'_, Adoptable> {
        self.before.borrow()
    }

    /// Nothing can be adopted.
    pub(crate) fn give_up(&self) {
        self.before.take();
    }

    /// Takes the device of a VM.
    pub(crate) fn take_device(&self, vm: u32) -> Option<DeviceRecord> {
        self.before.borrow_mut().devices.remove(&vm)
    }

    /// Takes the arbiter of a unit.
    pub(crate) fn take_arbiter(&self, unit: u32) -> Option<ArbiterRecord> {
        self.before.borrow_mut().arbiters.remove(&unit)
    }

    /// Notes a change.
    pub(crate) fn note(&self, change: impl FnOnce(&mut Adoptable)) {
        if !self.kept {
            return;
        }
        let mut now = self.now.borrow_mut();
        change(&mut now);
        // What is not taken yet is still there for the next, should this daemon be killed before it has taken everything.
        let before = self.before.borrow();
        let mut all = now.clone();
        for (vm, device) in &before.devices {
            all.devices.entry(*vm).or_insert_with(|| device.clone());
        }
        for (unit, arbiter) in &before.arbiters {
            all.arbiters.entry(*unit).or_insert_with(|| arbiter.clone());
        }
        if let Err(error) = self.file.store_for_processes(&all)
            && !self.complained.replace(true)
        {
            tracing::error!(
                "{} cannot be written: {error}; a restart ends what runs",
                self.file.path().display()
            );
        }
    }

    /// Everything has ended: there is nothing to adopt.
    pub(crate) fn finish(&self) -> std::io::Result<()> {
        self.file.remove()
    }
}
