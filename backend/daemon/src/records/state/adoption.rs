//! The processes at the other ends of the sockets that are kept for the next daemon ([`crate::handover::keeper`]).
//!
//! It is written at every change if a service manager keeps sockets, and otherwise never. It need not survive the machine,
//! since the processes do not either. An entry counts only if the kernel confirms it: a process is known by its number and its
//! start.

use std::{
    cell::{Cell, Ref, RefCell},
    collections::BTreeMap,
    path::Path,
};

use serde::{Deserialize, Serialize};

use sluice_messages::control;
use sluice_runtime::process::Identity;

use super::file::StateFile;
use crate::configuration::Configuration;

/// The form of the file.
const VERSION: u32 = 1;

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Adoptable {
    /// Version of the messages that these processes speak.
    #[serde(default)]
    pub(crate) speaks: Option<u32>,
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
    /// Whether programs of this host connect to it.
    #[serde(default)]
    pub(crate) direct: Option<bool>,
    /// Its displays.
    #[serde(default)]
    pub(crate) scanouts: Option<u8>,
    /// By the daemon's own numbers: the device's number, and the worker.
    pub(crate) sessions: BTreeMap<u64, (u32, Identity)>,
}

/// A daemon cannot go on with what runs. Nothing has been ended for it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReloadError {
    /// The record is of another version, or damaged.
    #[error("{0}. {END}")]
    Record(String),
    /// Another version of the messages.
    #[error(
        "what runs speaks version {theirs} of Sluice's messages, and this sluiced version {}. {END}",
        control::VERSION
    )]
    Version { theirs: u32 },
    /// A device is of another kind than is configured.
    #[error(
        "the device of VM {vm} runs with direct = {direct}, scanouts = {scanouts}, and the configuration has other values. {END}"
    )]
    Device { vm: u32, direct: bool, scanouts: u8 },
}

/// What can be done about it.
const END: &str = "Nothing was ended: go back to the version and configuration before, or stop sluiced, which ends what runs, and start it";

impl Adoptable {
    fn processes(&self) -> impl Iterator<Item = Identity> {
        let launcher = self.launcher.iter().map(|launcher| launcher.process);
        let devices = self.devices.values().map(|device| device.process);
        launcher.chain(devices).chain(self.arbiters.values().map(|arbiter| arbiter.process))
    }

    /// Whether a daemon of this version, with this configuration, can go on with these processes.
    pub(crate) fn can_be_followed(&self, configuration: &Configuration) -> Result<(), ReloadError> {
        let other = self.speaks.filter(|speaks| *speaks != control::VERSION);
        if let Some(theirs) = other
            && self.processes().any(|process| process.open().is_some())
        {
            return Err(ReloadError::Version { theirs });
        }
        for vm in &configuration.vms {
            let Some(device) = self.devices.get(&vm.id) else { continue };
            let (Some(direct), Some(scanouts)) = (device.direct, device.scanouts) else { continue };
            if (direct, scanouts) != (vm.direct, vm.scanouts) && device.process.open().is_some() {
                return Err(ReloadError::Device { vm: vm.id, direct, scanouts });
            }
        }
        Ok(())
    }
}

/// Whether a daemon with this configuration could go on with what another has left, or runs now.
///
/// # Errors
/// Why it cannot.
pub(crate) fn check(configuration: &Configuration) -> Result<(), ReloadError> {
    Adoption::open(&configuration.runtime_dir, true).can_follow(configuration)
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
    /// Why it cannot be told what the daemon before has left.
    unreadable: Option<String>,
    complained: Cell<bool>,
}

impl Adoption {
    /// What the last daemon left in a directory, to be adopted; nothing where that cannot be read.
    pub(crate) fn open(directory: &Path, kept: bool) -> Self {
        let file = StateFile::new(directory.join("processes.json"), VERSION);
        let (before, unreadable) = match file.peek() {
            Ok(Some(content)) if kept => (content, None),
            Ok(_) => (Adoptable::default(), None),
            // One that is not the last may name sessions that are not, and miss some that are.
            Err(why) => {
                let why = format!("{} cannot be understood: {why}", file.path().display());
                (Adoptable::default(), Some(why))
            }
        };
        Self {
            file,
            kept,
            before: RefCell::new(before),
            now: RefCell::new(Adoptable { speaks: Some(control::VERSION), ..Adoptable::default() }),
            unreadable,
            complained: Cell::new(false),
        }
    }

    /// Whether a daemon with this configuration can go on with it.
    pub(crate) fn can_follow(&self, configuration: &Configuration) -> Result<(), ReloadError> {
        match &self.unreadable {
            Some(why) => Err(ReloadError::Record(why.clone())),
            None => self.before.borrow().can_be_followed(configuration),
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
