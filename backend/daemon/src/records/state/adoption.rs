//! The processes at the other ends of the sockets that are kept for the next daemon ([`crate::handover::fd_store`]).
//!
//! It is written at every change if a service manager keeps sockets, and otherwise never. It need not survive the machine,
//! since the processes do not either. An entry counts only if the kernel confirms it: a process is identified by its number and
//! its start time.

use std::{
    cell::{Cell, Ref, RefCell},
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use sluice_messages::control;
use sluice_runtime::process::Identity;

use super::file::StateFile;
use crate::configuration::Configuration;

/// The version of the file's format.
const VERSION: u32 = 1;

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Adoptable {
    /// Version of the messages of these processes.
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
    /// Its command line, which defines the processes that it may start.
    pub(crate) arguments: Vec<String>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceRecord {
    pub(crate) process: Identity,
    /// True if programs of this host connect to it.
    #[serde(default)]
    pub(crate) direct: Option<bool>,
    /// The number of its displays.
    #[serde(default)]
    pub(crate) scanouts: Option<u8>,
    /// By the daemon's own numbers: the device's number, and the worker.
    pub(crate) sessions: BTreeMap<u64, (u32, Identity)>,
}

/// A daemon cannot adopt the running processes. No process has been ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReloadError {
    /// The record is of another version, or damaged.
    #[error("{0}. {END}")]
    Record(String),
    /// The processes use another version of the messages.
    #[error(
        "the running processes belong to a sluiced that speaks version {theirs} of Sluice's messages; this one speaks version {}. {END}",
        control::VERSION
    )]
    Version { theirs: u32 },
    /// The processes were started by a launcher that this daemon cannot take over.
    #[error(
        "sluiced itself has started the launcher of the running processes; this one uses the launcher at {}, and may not end them. {END}",
        .0.display()
    )]
    Launcher(PathBuf),
}

/// Advice for the operator.
const END: &str = "No process was ended: go back to the version and configuration before, or stop sluiced, which ends all its processes, and start it";

impl Adoptable {
    fn processes(&self) -> impl Iterator<Item = Identity> {
        let launcher = self.launcher.iter().map(|launcher| launcher.process);
        let devices = self.devices.values().map(|device| device.process);
        launcher.chain(devices).chain(self.arbiters.values().map(|arbiter| arbiter.process))
    }

    /// Checks that a daemon of this version can adopt these processes.
    pub(crate) fn can_be_followed(&self) -> Result<(), ReloadError> {
        let other = self.speaks.filter(|speaks| *speaks != control::VERSION);
        if let Some(theirs) = other
            && self.processes().any(Identity::may_live)
        {
            return Err(ReloadError::Version { theirs });
        }
        Ok(())
    }
}

/// Checks that a daemon with this configuration could adopt the processes of another, which may still run.
///
/// # Errors
/// The reason why it cannot.
pub(crate) fn check(configuration: &Configuration) -> Result<(), ReloadError> {
    Adoption::open(&configuration.runtime_dir, true).can_follow(configuration)
}

/// An arbiter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ArbiterRecord {
    pub(crate) process: Identity,
    /// Bytes that it lends, once it lends.
    pub(crate) lends: Option<u64>,
    /// The host memory that kernels reach, by the number of a [`HostAccess`](sluice_messages::control::HostAccess), once it is known.
    #[serde(default)]
    pub(crate) host_access: Option<u32>,
}

/// The record.
#[derive(Debug)]
pub(crate) struct Adoption {
    file: StateFile,
    /// True if the service manager keeps sockets.
    kept: bool,
    /// The record of the last daemon.
    before: RefCell<Adoptable>,
    now: RefCell<Adoptable>,
    /// The reason why the record of the last daemon is unreadable.
    unreadable: Option<String>,
    complained: Cell<bool>,
}

impl Adoption {
    /// Opens the record of the last daemon in a directory; an empty one if that cannot be read.
    pub(crate) fn open(directory: &Path, kept: bool) -> Self {
        let file = StateFile::new(directory.join("processes.json"), VERSION);
        let (before, unreadable) = match file.peek() {
            Ok(Some(content)) if kept => (content, None),
            Ok(_) => (Adoptable::default(), None),
            // The previous file may name sessions that have ended, and lack some that exist.
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

    /// Checks that a daemon of this version can adopt the recorded processes, and with this configuration may end them.
    pub(crate) fn can_follow(&self, configuration: &Configuration) -> Result<(), ReloadError> {
        if let Some(why) = &self.unreadable {
            return Err(ReloadError::Record(why.clone()));
        }
        let before = self.before.borrow();
        before.can_be_followed()?;
        match &configuration.launcher {
            Some(path) if before.launcher.is_some() && before.processes().any(Identity::may_live) => {
                Err(ReloadError::Launcher(path.clone()))
            }
            _ => Ok(()),
        }
    }

    /// The processes of the last daemon that are not adopted yet.
    pub(crate) fn before(&self) -> Ref<'_, Adoptable> {
        self.before.borrow()
    }

    /// Drops the record: no process can be adopted.
    pub(crate) fn give_up(&self) {
        self.before.take();
    }

    /// True if there is a record of a VM's device that nothing has taken.
    pub(crate) fn has_device(&self, vm: u32) -> bool {
        self.before.borrow().devices.contains_key(&vm)
    }

    /// Takes the record of a VM's device.
    pub(crate) fn take_device(&self, vm: u32) -> Option<DeviceRecord> {
        self.before.borrow_mut().devices.remove(&vm)
    }

    /// Takes the record of a unit's arbiter.
    pub(crate) fn take_arbiter(&self, unit: u32) -> Option<ArbiterRecord> {
        self.before.borrow_mut().arbiters.remove(&unit)
    }

    /// Records a change.
    pub(crate) fn note(&self, change: impl FnOnce(&mut Adoptable)) {
        if !self.kept {
            return;
        }
        let mut now = self.now.borrow_mut();
        change(&mut now);
        // Entries that are not adopted yet stay in the file for the next daemon, in case this one is killed before it has
        // adopted all.
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
            tracing::error!(path = %self.file.path().display(), %error, "cannot write the record of processes; a restart ends them");
        }
    }

    /// Removes the record: every process has ended.
    pub(crate) fn finish(&self) -> std::io::Result<()> {
        self.file.remove()
    }
}
