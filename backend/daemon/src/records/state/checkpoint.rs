//! The checkpoint: state that must outlive the daemon. It has the fenced VMs with their step and epoch, the quarantined units,
//! the arbiters that hold memory, and the objects that clients have made.
//!
//! A client's object is written before it is made, and before the client gets its response. Protection of a tenant does not
//! wait for a disk: a fence or a quarantine applies in this process from the moment it is noted, and is written as soon as
//! possible. Another thread writes the file, so that a slow disk delays only the callers that wait for it.

use std::{
    cell::{Cell, Ref, RefCell},
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use sluice_api::v1::{FenceStep, FencedBy};
use tokio::{
    sync::{Mutex, Notify, OwnedMutexGuard},
    time::sleep,
};

use super::{
    file::{FoundState, StateFile, off_thread},
    objects::Objects,
};
use sluice_runtime::process::Identity;

use crate::fence::{AdmissionError, Fence};

/// The version of the file's format.
const VERSION: u32 = 2;
/// Limit of VMs and sizes named in one line.
const NAMED: usize = 16;
/// Time until a failed write is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    vms: BTreeMap<u32, Fence>,
    /// Quarantined units, with the reason.
    units: BTreeMap<u32, String>,
    /// Units whose driver does not report the memory of each process.
    #[serde(default)]
    unmeasured: BTreeSet<u32>,
    /// By unit: an arbiter that may still hold the unit's memory.
    arbiters: BTreeMap<u32, Identity>,
    objects: Objects,
    /// True if quotas include the driver share, and a headroom of 0 is none. Earlier versions did not write this, and a
    /// headroom of 0 meant no limit.
    #[serde(default)]
    drivers_in_quotas: bool,
}

impl Content {
    /// Converts the content to its present meaning; returns a text that names the VMs and sizes whose meaning has changed.
    fn with_drivers_in_quotas(&mut self) -> Option<String> {
        if std::mem::replace(&mut self.drivers_in_quotas, true) {
            return None;
        }
        let Objects { vms, sizes, .. } = &self.objects;
        let vms =
            vms.iter().filter(|(_, vm)| vm.share.headroom_bytes == 0).map(|(name, _)| format!("VM {name}"));
        let sizes = sizes
            .iter()
            .filter(|(_, size)| size.share.headroom_bytes == 0)
            .map(|(name, _)| format!("size {name}"));
        let mut changed: Vec<String> = vms.chain(sizes).collect();
        let rest = changed.len().saturating_sub(NAMED);
        changed.truncate(NAMED);
        if rest > 0 {
            changed.push(format!("{rest} more"));
        }
        (!changed.is_empty()).then(|| {
            format!(
                "headroom_bytes = 0 meant no limit for the driver share; it now means none, so that the driver share is part of the quota of {}",
                changed.join(", ")
            )
        })
    }
}

/// A change that applies in this process from the moment it is noted, even if it cannot be written.
#[derive(Debug)]
enum Note {
    /// The step of a VM's fence.
    Vm(u32, Fence),
    /// A VM is fenced, whatever its step: by this authority, for this reason, with these workers.
    Fenced(u32, FencedBy, String, Vec<Identity>),
    /// A unit is quarantined, for this reason.
    Quarantine(u32, String),
    /// True if a unit's driver reports the memory of each process.
    Measured(u32, bool),
    /// The process that holds a unit's memory; `None` if there is none.
    Arbiter(u32, Option<Identity>),
}

impl Note {
    fn apply(&self, content: &mut Content) {
        match self {
            // A note about an earlier epoch does not apply to this one.
            Note::Vm(vm, fence) if content.vms.get(vm).is_some_and(|known| known.epoch > fence.epoch) => {}
            Note::Vm(vm, fence) => {
                let raised = content.vms.get(vm).filter(|known| known.epoch == fence.epoch);
                // A higher authority may have fenced the VM during the step.
                let raised = raised.and_then(|known| fence.raise(known.by, &known.reason));
                content.vms.insert(*vm, raised.unwrap_or_else(|| fence.clone()));
            }
            Note::Fenced(vm, by, reason, workers) => {
                let fence = content.vms.entry(*vm).or_default();
                let fenced = fence.begin(*by, reason, workers.clone());
                if let Some(fenced) = fenced.or_else(|| fence.raise(*by, reason)) {
                    *fence = fenced;
                }
            }
            Note::Quarantine(unit, reason) => {
                content.units.entry(*unit).or_insert_with(|| reason.clone());
            }
            Note::Measured(unit, true) => _ = content.unmeasured.remove(unit),
            Note::Measured(unit, false) => _ = content.unmeasured.insert(*unit),
            Note::Arbiter(unit, Some(arbiter)) => _ = content.arbiters.insert(*unit, *arbiter),
            Note::Arbiter(unit, None) => _ = content.arbiters.remove(unit),
        }
    }
}

/// The change that a fence has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FenceChange {
    /// The VM was active.
    Begun,
    /// The VM was fenced by a lower authority.
    Raised,
    /// The VM was fenced by as high an authority.
    None,
}

/// The result of the removal of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    /// It is gone.
    Removed,
    /// It is fenced and not clean.
    Unclean,
    /// It is fenced or drained by a higher authority.
    Held,
}

/// A VM cannot be readmitted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadmitError {
    /// Its state does not allow it.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The checkpoint cannot be written.
    #[error("cannot write the checkpoint: {0}")]
    Checkpoint(#[from] io::Error),
}

/// The checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    file: StateFile,
    content: RefCell<Content>,
    /// The number of notes so far.
    noted: Cell<u64>,
    fresh: Notify,
    /// Held during a write of the file, also by the thread that writes: the number of notes in the file.
    writing: Arc<Mutex<u64>>,
    /// Notes that come while a change is written, which applies only after the write.
    meanwhile: RefCell<Option<Vec<Note>>>,
    recovered: Option<String>,
    changed_meaning: Option<String>,
}

impl Checkpoint {
    /// Reads the checkpoint of the last daemon in a directory, if there was one.
    ///
    /// # Errors
    /// If it cannot be read or understood: then it is unknown which VMs are fenced, and no process may be started.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        let file = StateFile::new(directory.join("checkpoint.json"), VERSION);
        let found = file.load().context("without it the fenced VMs are unknown")?;
        let (content, recovered) = match found {
            FoundState::Nothing => (Content::default(), None),
            FoundState::Current(content) => (content, None),
            FoundState::Previous(content, why) => (content, Some(why)),
        };
        if let Some(why) = &recovered {
            tracing::error!(path = %file.path().display(), error = %why, "the checkpoint cannot be understood; the one before it is used, and the last change is lost");
        }
        let mut content = Content { objects: content.objects.scoped(), ..content };
        let changed_meaning = content.with_drivers_in_quotas();
        if let Some(changed) = &changed_meaning {
            tracing::warn!(path = %file.path().display(), changed, "the checkpoint is of an older version");
        }
        let checkpoint = Self {
            file,
            content: RefCell::new(content),
            noted: Cell::default(),
            fresh: Notify::default(),
            writing: Arc::default(),
            meanwhile: RefCell::default(),
            recovered,
            changed_meaning,
        };
        if checkpoint.changed_meaning.is_some() {
            // The next daemon finds it written, and logs no warning.
            checkpoint.is_due();
        }
        Ok(checkpoint)
    }

    /// A text about the entries of the last daemon's file whose meaning has changed, if any.
    pub(crate) fn changed_meaning(&self) -> Option<&str> {
        self.changed_meaning.as_deref()
    }

    /// The error in the last written file, if the one before it had to be used.
    pub(crate) fn recovered(&self) -> Option<&str> {
        self.recovered.as_deref()
    }

    /// The objects that clients have made.
    pub(crate) fn objects(&self) -> Ref<'_, Objects> {
        Ref::map(self.content.borrow(), |content| &content.objects)
    }

    /// Changes the objects of clients. If the change cannot be written, nothing changes.
    pub(crate) async fn change_objects(&self, change: impl FnOnce(&mut Objects)) -> io::Result<()> {
        let change = |content: &mut Content| {
            change(&mut content.objects);
            Ok(())
        };
        self.commit(change).await
    }

    /// Removes a VM from the objects of clients, for an authority; the next VM of its number has another epoch. Nothing changes
    /// if that cannot be written, if the VM is fenced and not clean, or if a higher authority has fenced or drained it.
    pub(crate) async fn remove_vm(&self, id: &str, number: u32, by: FencedBy) -> io::Result<Removal> {
        let remove = |content: &mut Content| {
            let fence = content.vms.get(&number).cloned().unwrap_or_default();
            let is_fenced = fence.step != FenceStep::Active;
            if is_fenced && fence.by > by || by < content.objects.drained_by(number) {
                return Ok(Removal::Held);
            }
            if is_fenced && !fence.clean {
                return Ok(Removal::Unclean);
            }
            content.objects.vms.remove(id);
            content.objects.draining.remove(&number);
            content.objects.tenant_drains.remove(&number);
            let epoch = fence.epoch.saturating_add(1);
            content.vms.insert(number, Fence { epoch, ..Fence::default() });
            Ok(Removal::Removed)
        };
        self.commit(remove).await
    }

    /// The fence of a VM.
    pub(crate) fn vm(&self, vm: u32) -> Fence {
        self.content.borrow().vms.get(&vm).cloned().unwrap_or_default()
    }

    /// The epoch in which a VM may hold resources; `None` while it is fenced.
    pub(crate) fn admitted(&self, vm: u32) -> Option<u64> {
        self.content.borrow().vms.get(&vm).map_or(Some(Fence::default().epoch), Fence::admitted)
    }

    /// Numbers of VMs that no longer exist, each with the last epoch in which it was admitted.
    pub(crate) fn gone(&self, is_known: impl Fn(u32) -> bool) -> Vec<(u32, u64)> {
        let content = self.content.borrow();
        let gone = content.vms.iter().filter(|(vm, fence)| !is_known(**vm) && fence.epoch > 1);
        gone.map(|(vm, fence)| (*vm, fence.epoch - 1)).collect()
    }

    /// Notes that a VM is fenced. A VM that is being readmitted is fenced after that.
    pub(crate) fn fence_vm(
        &self,
        vm: u32,
        by: FencedBy,
        reason: &str,
        workers: Vec<Identity>,
    ) -> FenceChange {
        let before = self.vm(vm);
        let change = if before.step == FenceStep::Active {
            FenceChange::Begun
        } else if before.raise(by, reason).is_some() {
            FenceChange::Raised
        } else {
            FenceChange::None
        };
        if change != FenceChange::None || self.meanwhile.borrow().is_some() {
            self.note(Note::Fenced(vm, by, reason.to_owned(), workers));
        }
        change
    }

    /// Notes the fence of a VM.
    pub(crate) fn set_vm(&self, vm: u32, fence: Fence) {
        self.note(Note::Vm(vm, fence));
    }

    /// Readmits a VM for an authority, in its next epoch. If that cannot be written, nothing changes.
    pub(crate) async fn admit_vm(&self, vm: u32, by: FencedBy) -> Result<Fence, ReadmitError> {
        let admit = |content: &mut Content| {
            let fence = content.vms.get(&vm).cloned().unwrap_or_default().readmit(by)?;
            content.vms.insert(vm, fence.clone());
            Ok(fence)
        };
        self.commit(admit).await
    }

    /// True if a unit's driver reports the memory of each process, as far as an arbiter of the unit has found out.
    fn is_measured(&self, unit: u32) -> bool {
        !self.content.borrow().unmeasured.contains(&unit)
    }

    /// Notes that result; returns false if it was known.
    pub(crate) fn set_measured(&self, unit: u32, measured: bool) -> bool {
        let is_new = self.is_measured(unit) != measured;
        if is_new {
            self.note(Note::Measured(unit, measured));
        }
        is_new
    }

    /// The reason of a unit's quarantine, if it is quarantined.
    pub(crate) fn quarantine(&self, unit: u32) -> Option<String> {
        self.content.borrow().units.get(&unit).cloned()
    }

    /// Notes that a unit is quarantined; returns false if it was.
    pub(crate) fn set_quarantine(&self, unit: u32, reason: &str) -> bool {
        let is_new = !self.content.borrow().units.contains_key(&unit);
        // The end of the quarantine may be in the write that is in progress.
        if is_new || self.meanwhile.borrow().is_some() {
            self.note(Note::Quarantine(unit, reason.to_owned()));
        }
        is_new
    }

    /// Ends a unit's quarantine; returns false if there was none. If that cannot be written, nothing changes.
    pub(crate) async fn lift_quarantine(&self, unit: u32) -> io::Result<bool> {
        self.commit(|content| Ok(content.units.remove(&unit).is_some())).await
    }

    /// Notes the process that holds a unit's memory; `None` for none.
    pub(crate) fn set_arbiter(&self, unit: u32, arbiter: Option<Identity>) {
        self.note(Note::Arbiter(unit, arbiter));
    }

    /// Processes that may still hold the memory of units.
    pub(crate) fn arbiters(&self) -> Vec<(u32, Identity)> {
        self.content.borrow().arbiters.iter().map(|(unit, process)| (*unit, *process)).collect()
    }

    /// Writes the notes as they come, for ever.
    pub(crate) async fn keep(self: Rc<Self>) {
        loop {
            self.fresh.notified().await;
            let mut complained = false;
            while let Err(error) = self.written().await {
                if !std::mem::replace(&mut complained, true) {
                    tracing::error!(%error, "cannot write the checkpoint; trying again");
                }
                sleep(AGAIN).await;
            }
        }
    }

    /// Returns when every note so far is in the file.
    pub(crate) async fn written(&self) -> io::Result<()> {
        let noted = self.noted.get();
        let written = self.turn().await;
        if *written >= noted {
            return Ok(());
        }
        let (noted, content) = (self.noted.get(), self.content.borrow().clone());
        let (mut written, stored) = self.store(written, content).await?;
        stored.map(|()| *written = noted)
    }

    /// Ends the checkpoint after everything has ended in order. If no VM is fenced the file is removed, because no message of
    /// any epoch can be in flight any more. Returns true if it was removed.
    pub(crate) async fn finish(&self) -> io::Result<bool> {
        let turn = self.turn().await;
        let is_needed = {
            let content = self.content.borrow();
            let fenced = content.vms.values().any(|fence| fence.step != FenceStep::Active);
            fenced
                || !content.units.is_empty()
                || !content.unmeasured.is_empty()
                || !content.objects.is_empty()
        };
        if is_needed {
            drop(turn);
            return self.written().await.map(|()| false);
        }
        let file = self.file.clone();
        off_thread(move || file.remove().map(|()| turn)).await.map(|_turn| true)
    }

    /// Applies a note, and queues it to be written.
    fn note(&self, note: Note) {
        note.apply(&mut self.content.borrow_mut());
        if let Some(meanwhile) = &mut *self.meanwhile.borrow_mut() {
            meanwhile.push(note);
        }
        self.is_due();
    }

    /// Requests a write of the file.
    fn is_due(&self) {
        self.noted.set(self.noted.get() + 1);
        self.fresh.notify_one();
    }

    async fn turn(&self) -> OwnedMutexGuard<u64> {
        Arc::clone(&self.writing).lock_owned().await
    }

    /// Makes a change after writing it; if the write fails, nothing changes.
    async fn commit<T, E: From<io::Error>>(
        &self,
        change: impl FnOnce(&mut Content) -> Result<T, E>,
    ) -> Result<T, E> {
        let written = self.turn().await;
        let (noted, mut content) = (self.noted.get(), self.content.borrow().clone());
        let changed = change(&mut content)?;
        self.meanwhile.replace(Some(Vec::new()));
        let stored = self.store(written, content.clone()).await;
        let meanwhile = self.meanwhile.take().unwrap_or_default();
        let (mut written, stored) = stored?;
        if let Err(error) = stored {
            // The file may have the change all the same, or a part of it; a later write must remove it.
            self.is_due();
            return Err(error.into());
        }
        meanwhile.iter().for_each(|note| note.apply(&mut content));
        self.content.replace(content);
        *written = noted;
        Ok(changed)
    }

    /// Writes the file. The lock goes to the thread that writes, and comes back with its result: a write whose caller has gone
    /// overtakes no other.
    async fn store(
        &self,
        turn: OwnedMutexGuard<u64>,
        content: Content,
    ) -> io::Result<(OwnedMutexGuard<u64>, io::Result<()>)> {
        let file = self.file.clone();
        off_thread(move || {
            let stored = file.store(&content);
            Ok((turn, stored))
        })
        .await
    }
}

#[cfg(test)]
mod tests;
