//! The checkpoint: state that must outlive the daemon. It has the fenced VMs with their step and epoch, the quarantined units,
//! the arbiters that hold memory, and the objects that clients have made.
//!
//! A client's object is written before it is made, and before the client gets its response. Protection of a tenant does not
//! wait for a disk: a fence or a quarantine holds in this process from the moment it is noted, and is written as soon as
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
    file::{Found, StateFile, off_thread},
    objects::Objects,
};
use sluice_runtime::process::Identity;

use crate::vms::fence::{AdmissionError, Fence};

/// The form of the file.
const VERSION: u32 = 2;
/// VMs and sizes that are named in one line.
const NAMED: usize = 16;
/// How long until what could not be written is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    vms: BTreeMap<u32, Fence>,
    /// Quarantined units, and why.
    units: BTreeMap<u32, String>,
    /// Units whose driver does not say how much memory each process has.
    #[serde(default)]
    unmeasured: BTreeSet<u32>,
    /// By unit: an arbiter that may still hold its memory.
    arbiters: BTreeMap<u32, Identity>,
    objects: Objects,
    /// Whether quotas count what drivers take, and a headroom of 0 is none. Versions before it did not write this, and meant no
    /// limit by 0.
    #[serde(default)]
    drivers_in_quotas: bool,
}

impl Content {
    /// Gives the file the meaning that it has now; in words, the VMs and sizes for which that is another than before.
    fn with_drivers_in_quotas(&mut self) -> Option<String> {
        if std::mem::replace(&mut self.drivers_in_quotas, true) {
            return None;
        }
        let Objects { vms, sizes, .. } = &self.objects;
        let vms = vms.iter().filter(|(_, vm)| vm.headroom == 0).map(|(name, _)| format!("VM {name}"));
        let sizes =
            sizes.iter().filter(|(_, size)| size.headroom == 0).map(|(name, _)| format!("size {name}"));
        let mut changed: Vec<String> = vms.chain(sizes).collect();
        let rest = changed.len().saturating_sub(NAMED);
        changed.truncate(NAMED);
        if rest > 0 {
            changed.push(format!("{rest} more"));
        }
        (!changed.is_empty()).then(|| {
            format!(
                "headroom 0 was no limit for what drivers take, and is none from now on: that is part of the quota of {}",
                changed.join(", ")
            )
        })
    }
}

/// What holds in this process from the moment it is noted, even where it cannot be written.
#[derive(Debug)]
enum Note {
    /// Where a VM stands.
    Vm(u32, Fence),
    /// That a VM is fenced, wherever it stands: by which authority, why, and which workers it has.
    Fenced(u32, FencedBy, String, Vec<Identity>),
    /// Why a unit is quarantined.
    Quarantine(u32, String),
    /// Whether a unit's driver says how much memory each process has.
    Measured(u32, bool),
    /// Which process holds a unit's memory; `None` for nobody.
    Arbiter(u32, Option<Identity>),
}

impl Note {
    fn apply(&self, content: &mut Content) {
        match self {
            // What is said of an epoch that is over says nothing of this one.
            Note::Vm(vm, fence) if content.vms.get(vm).is_some_and(|known| known.epoch > fence.epoch) => {}
            Note::Vm(vm, fence) => {
                let raised = content.vms.get(vm).filter(|known| known.epoch == fence.epoch);
                // A higher authority may have come while a step was being taken.
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

/// What a fence has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FenceChange {
    /// The VM was active.
    Begun,
    /// The VM was fenced by a lower authority.
    Raised,
    /// The VM was fenced by as high an authority.
    None,
}

/// What became of the removal of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    /// It is gone.
    Removed,
    /// It is fenced, and something of it is left.
    Unclean,
    /// It is fenced or drained by a higher authority.
    Held,
}

/// A VM cannot be admitted again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadmitError {
    /// For what it is.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// For want of a checkpoint.
    #[error("the checkpoint cannot be written: {0}")]
    Checkpoint(#[from] io::Error),
}

/// The checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    file: StateFile,
    content: RefCell<Content>,
    /// Notes so far.
    noted: Cell<u64>,
    fresh: Notify,
    /// Held by who has the file written, and by the thread that writes it: how many notes are in it.
    writing: Arc<Mutex<u64>>,
    /// While a change is being written, which is made only then: what is noted meanwhile.
    meanwhile: RefCell<Option<Vec<Note>>>,
    recovered: Option<String>,
    changed_meaning: Option<String>,
}

impl Checkpoint {
    /// Reads what the last daemon left in a directory, if there was one.
    ///
    /// # Errors
    /// When it cannot be read or understood: then nobody knows who is fenced, and nothing may be started.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        let file = StateFile::new(directory.join("checkpoint.json"), VERSION);
        let found = file.load().context("without it nobody knows who is fenced")?;
        let (content, recovered) = match found {
            Found::Nothing => (Content::default(), None),
            Found::Current(content) => (content, None),
            Found::Previous(content, why) => (content, Some(why)),
        };
        if let Some(why) = &recovered {
            tracing::error!(
                "{} cannot be understood ({why}): the one before it is taken, and what was changed last is lost",
                file.path().display()
            );
        }
        let mut content = Content { objects: content.objects.scoped(), ..content };
        let changed_meaning = content.with_drivers_in_quotas();
        if let Some(changed) = &changed_meaning {
            tracing::warn!("{} is of an older version: {changed}", file.path().display());
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
            // The next daemon finds it written, and says nothing.
            checkpoint.is_due();
        }
        Ok(checkpoint)
    }

    /// What the last daemon's file means from now on, where it meant something else.
    pub(crate) fn changed_meaning(&self) -> Option<&str> {
        self.changed_meaning.as_deref()
    }

    /// What is wrong with what was last written, if the one before it had to be taken.
    pub(crate) fn recovered(&self) -> Option<&str> {
        self.recovered.as_deref()
    }

    /// What clients have made.
    pub(crate) fn objects(&self) -> Ref<'_, Objects> {
        Ref::map(self.content.borrow(), |content| &content.objects)
    }

    /// Changes what clients have made. Nothing has changed where that cannot be written.
    pub(crate) async fn change_objects(&self, change: impl FnOnce(&mut Objects)) -> io::Result<()> {
        let change = |content: &mut Content| {
            change(&mut content.objects);
            Ok(())
        };
        self.commit(change).await
    }

    /// Takes a VM from what clients have made, for an authority; the next VM of its number has another epoch. Nothing has
    /// changed where that cannot be written, where the VM is fenced and something of it is left, or where a higher authority
    /// has fenced or drained it.
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

    /// Where a VM stands.
    pub(crate) fn vm(&self, vm: u32) -> Fence {
        self.content.borrow().vms.get(&vm).cloned().unwrap_or_default()
    }

    /// The epoch in which a VM may have something.
    pub(crate) fn admitted(&self, vm: u32) -> Option<u64> {
        self.content.borrow().vms.get(&vm).map_or(Some(Fence::default().epoch), Fence::admitted)
    }

    /// Numbers of VMs that are not known any more, each with the last epoch in which it was.
    pub(crate) fn gone(&self, is_known: impl Fn(u32) -> bool) -> Vec<(u32, u64)> {
        let content = self.content.borrow();
        let gone = content.vms.iter().filter(|(vm, fence)| !is_known(**vm) && fence.epoch > 1);
        gone.map(|(vm, fence)| (*vm, fence.epoch - 1)).collect()
    }

    /// Notes that a VM is fenced. One that is being admitted again is fenced when it is.
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

    /// Notes where a VM stands.
    pub(crate) fn set_vm(&self, vm: u32, fence: Fence) {
        self.note(Note::Vm(vm, fence));
    }

    /// Notes a VM that an authority admits again, in its next epoch. Nothing has changed where that cannot be written.
    pub(crate) async fn admit_vm(&self, vm: u32, by: FencedBy) -> Result<Fence, ReadmitError> {
        let admit = |content: &mut Content| {
            let fence = content.vms.get(&vm).cloned().unwrap_or_default().readmit(by)?;
            content.vms.insert(vm, fence.clone());
            Ok(fence)
        };
        self.commit(admit).await
    }

    /// Whether a unit's driver says how much memory each process has, as far as any arbiter of the unit has found out.
    fn is_measured(&self, unit: u32) -> bool {
        !self.content.borrow().unmeasured.contains(&unit)
    }

    /// Notes whether it does; false when that was known.
    pub(crate) fn set_measured(&self, unit: u32, measured: bool) -> bool {
        let is_new = self.is_measured(unit) != measured;
        if is_new {
            self.note(Note::Measured(unit, measured));
        }
        is_new
    }

    /// Why a unit is quarantined, if it is.
    pub(crate) fn quarantine(&self, unit: u32) -> Option<String> {
        self.content.borrow().units.get(&unit).cloned()
    }

    /// Notes that a unit is quarantined; false when it was.
    pub(crate) fn set_quarantine(&self, unit: u32, reason: &str) -> bool {
        let is_new = !self.content.borrow().units.contains_key(&unit);
        // Perhaps that it is lifted is being written just now.
        if is_new || self.meanwhile.borrow().is_some() {
            self.note(Note::Quarantine(unit, reason.to_owned()));
        }
        is_new
    }

    /// Notes that it is no more; false when it was not. Nothing has changed where that cannot be written.
    pub(crate) async fn lift_quarantine(&self, unit: u32) -> io::Result<bool> {
        self.commit(|content| Ok(content.units.remove(&unit).is_some())).await
    }

    /// Notes which process holds a unit's memory; `None` for nobody.
    pub(crate) fn set_arbiter(&self, unit: u32, arbiter: Option<Identity>) {
        self.note(Note::Arbiter(unit, arbiter));
    }

    /// Processes that may still hold the memory of units.
    pub(crate) fn arbiters(&self) -> Vec<(u32, Identity)> {
        self.content.borrow().arbiters.iter().map(|(unit, process)| (*unit, *process)).collect()
    }

    /// Writes down what is noted, for ever.
    pub(crate) async fn keep(self: Rc<Self>) {
        loop {
            self.fresh.notified().await;
            let mut complained = false;
            while let Err(error) = self.written().await {
                if !std::mem::replace(&mut complained, true) {
                    tracing::error!("the checkpoint cannot be written: {error}; it is tried again and again");
                }
                sleep(AGAIN).await;
            }
        }
    }

    /// Returns when everything that was noted until now is in the file.
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

    /// Everything has ended in order. If nobody is fenced there is nothing to be remembered: no message of any epoch can be
    /// under way any more. Returns whether that is so.
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

    /// What holds from now on.
    fn note(&self, note: Note) {
        note.apply(&mut self.content.borrow_mut());
        if let Some(meanwhile) = &mut *self.meanwhile.borrow_mut() {
            meanwhile.push(note);
        }
        self.is_due();
    }

    /// The file is not as it should be.
    fn is_due(&self) {
        self.noted.set(self.noted.get() + 1);
        self.fresh.notify_one();
    }

    async fn turn(&self) -> OwnedMutexGuard<u64> {
        Arc::clone(&self.writing).lock_owned().await
    }

    /// A change that is written and then made, or neither.
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
            // It may be there all the same, in part: what was not made must not come back.
            self.is_due();
            return Err(error.into());
        }
        meanwhile.iter().for_each(|note| note.apply(&mut content));
        self.content.replace(content);
        *written = noted;
        Ok(changed)
    }

    /// Writes the file. Whose turn it is goes with the thread that writes, and comes back from it: a write that nobody waits
    /// for any more overtakes none.
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
mod tests {
    use std::fs;

    use rustix::{
        fs::{CWD, Mode, OFlags, mkfifoat, open},
        io::read,
    };

    use super::*;
    use crate::records::state::objects::{SizeObject, VmObject};

    #[tokio::test]
    async fn what_was_noted_is_there_for_the_next() {
        let directory = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
        assert_eq!(checkpoint.admitted(7), Some(1));
        let fenced = Fence::default()
            .begin(FencedBy::Policy, "a test", vec![Identity::of(1).expect("init")])
            .expect("active");
        checkpoint.set_vm(7, fenced.clone());
        assert!(checkpoint.set_quarantine(2, "Xid 79"));
        assert!(!checkpoint.set_quarantine(2, "another"));
        checkpoint.written().await.expect("written");
        let next = Checkpoint::open(directory.path()).expect("there");
        assert_eq!((next.vm(7), next.admitted(7), next.admitted(8)), (fenced, None, Some(1)));
        assert_eq!(next.quarantine(2).as_deref(), Some("Xid 79"));
        next.finish().await.expect("kept");
        assert_eq!(Checkpoint::open(directory.path()).expect("there").admitted(7), None);
        assert_eq!(next.lift_quarantine(2).await.ok(), Some(true));
        assert_eq!(next.lift_quarantine(2).await.ok(), Some(false));
    }

    #[tokio::test]
    async fn where_nobody_is_fenced_nothing_is_left() {
        let directory = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
        checkpoint.set_vm(7, Fence { epoch: 5, ..Fence::default() });
        checkpoint.written().await.expect("written");
        assert_eq!(Checkpoint::open(directory.path()).expect("there").admitted(7), Some(5));
        assert!(checkpoint.finish().await.expect("removed"));
        assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 0);
        assert!(checkpoint.finish().await.expect("nothing to remove"));
    }

    #[test]
    fn what_cannot_be_understood_is_not_passed_over() {
        let directory = tempfile::tempdir().expect("a directory");
        for text in ["", "{", "{\"version\":1}", "{\"version\":2,\"vms\":{},\"units\":{},\"arbiters\":{}}"] {
            fs::write(directory.path().join("checkpoint.json"), text).expect("written");
            assert!(Checkpoint::open(directory.path()).is_err(), "{text:?} was taken");
        }
    }

    // Promise: A47
    #[tokio::test]
    async fn a_state_in_which_headroom_0_was_no_limit_is_told_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let written = |content: &Content| {
            let mut content = serde_json::to_value(content).expect("written");
            content.as_object_mut().expect("an object").remove("drivers_in_quotas").expect("it is new");
            StateFile::new(directory.path().join("checkpoint.json"), VERSION)
                .store(&content)
                .expect("stored");
        };
        let mut old = Content::default();
        written(&old);
        let none = Checkpoint::open(directory.path()).expect("there");
        assert_eq!(none.changed_meaning(), None, "it is about no VM");

        for (name, headroom) in [("acme/web", 0), ("acme/db", 1)] {
            let vm = VmObject { headroom, ..VmObject::default() };
            old.objects.vms.insert(name.to_owned(), vm);
        }
        old.objects.sizes.insert("small".to_owned(), SizeObject::default());
        written(&old);
        let first = Checkpoint::open(directory.path()).expect("there");
        let said = first.changed_meaning().expect("it is old");
        assert!(said.ends_with("part of the quota of VM acme/web, size small"), "{said}");
        first.written().await.expect("written");
        let next = Checkpoint::open(directory.path()).expect("there");
        assert_eq!(next.changed_meaning(), None, "it is said once");
        assert_eq!(next.objects().vms, old.objects.vms);
        let new = tempfile::tempdir().expect("a directory");
        assert_eq!(Checkpoint::open(new.path()).expect("a new one").changed_meaning(), None);
    }

    fn quarantined(epoch: u64) -> Fence {
        Fence { step: FenceStep::Quarantined, epoch, clean: true, ..Fence::default() }
    }

    #[tokio::test]
    async fn a_vm_is_not_admitted_where_that_cannot_be_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let inside = directory.path().join("state");
        fs::create_dir(&inside).expect("a directory");
        let checkpoint = Checkpoint::open(&inside).expect("a new one");
        fs::remove_dir(&inside).expect("removed");
        checkpoint.set_vm(7, quarantined(1));
        assert!(checkpoint.written().await.is_err());
        assert_eq!(checkpoint.admitted(7), None, "it is fenced all the same");
        assert!(checkpoint.admit_vm(7, FencedBy::Operator).await.is_err());
        assert_eq!(checkpoint.admitted(7), None);
        fs::create_dir(&inside).expect("a directory");
        assert_eq!(checkpoint.admit_vm(7, FencedBy::Operator).await.expect("written").epoch, 2);
        assert_eq!(Checkpoint::open(&inside).expect("there").admitted(7), Some(2));
    }

    // Promise: F41
    #[tokio::test]
    async fn what_protects_a_tenant_holds_while_a_disk_does_not_answer_and_is_not_lost() {
        let directory = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
        checkpoint.set_vm(7, quarantined(3));
        checkpoint.set_quarantine(2, "Xid 79");
        checkpoint.written().await.expect("written");

        // Who opens a pipe waits for somebody at its other end.
        let new = directory.path().join("checkpoint.new");
        mkfifoat(CWD, &new, Mode::RWXU).expect("a pipe");
        let answer = async {
            assert_eq!(checkpoint.admitted(7), None, "not admitted before that is written");
            checkpoint.set_vm(8, quarantined(1));
            assert_eq!(checkpoint.admitted(8), None, "fenced at once");
            let pipe = open(&new, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).expect("its other end");
            while !matches!(read(&pipe, &mut [0; 64]), Ok(1..)) {
                sleep(Duration::from_millis(1)).await;
            }
            fs::remove_file(&new).expect("there");
            pipe
        };
        let (admitted, _pipe) = tokio::join!(checkpoint.admit_vm(7, FencedBy::Operator), answer);
        assert!(
            matches!(admitted, Err(ReadmitError::Checkpoint(_))),
            "a pipe cannot be flushed: {admitted:?}"
        );
        assert_eq!(checkpoint.admitted(7), None);

        // What is noted while a change is written stays, whichever of the two is in the file.
        let note = async { checkpoint.set_quarantine(2, "Xid 62") };
        let (lifted, is_new) = tokio::join!(checkpoint.lift_quarantine(2), note);
        assert_eq!((lifted.expect("written"), is_new), (true, false));
        let fence = async { checkpoint.fence_vm(7, FencedBy::Policy, "a test", Vec::new()) };
        let (admitted, change) = tokio::join!(checkpoint.admit_vm(7, FencedBy::Operator), fence);
        assert_eq!((admitted.expect("written").epoch, change), (4, FenceChange::None));
        let fenced = checkpoint.vm(7);
        assert_eq!((fenced.step, fenced.epoch, &*fenced.reason), (FenceStep::Fencing, 4, "a test"));
        checkpoint.set_vm(7, Fence { clean: false, ..quarantined(4) });
        let remove = || checkpoint.remove_vm("seven", 7, FencedBy::Operator);
        assert_eq!(remove().await.expect("written"), Removal::Unclean);
        checkpoint.set_vm(7, quarantined(4));
        assert_eq!(remove().await.expect("written"), Removal::Removed);
        checkpoint.set_vm(7, quarantined(3));
        checkpoint.written().await.expect("written");
        let next = Checkpoint::open(directory.path()).expect("there");
        assert_eq!((next.admitted(7), next.admitted(8)), (Some(5), None), "a number of another epoch");
        assert_eq!(next.quarantine(2).as_deref(), Some("Xid 62"));
    }

    // Promise: A40
    #[tokio::test]
    async fn a_lower_authority_neither_admits_nor_removes_what_a_higher_one_fenced_or_drained() {
        use FencedBy::{Operator, Policy, Tenant};
        let directory = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
        assert_eq!(checkpoint.fence_vm(7, Tenant, "mine", Vec::new()), FenceChange::Begun);
        let quarantine = checkpoint.vm(7);
        assert_eq!(checkpoint.fence_vm(7, Operator, "theirs", Vec::new()), FenceChange::Raised);
        assert_eq!(checkpoint.fence_vm(7, Tenant, "mine", Vec::new()), FenceChange::None);
        // A step that began before the operator came does not take the fence from the operator.
        checkpoint.set_vm(7, Fence { step: FenceStep::Quarantined, clean: true, ..quarantine });
        let fence = checkpoint.vm(7);
        assert_eq!((fence.step, fence.by, &*fence.reason), (FenceStep::Quarantined, Operator, "theirs"));
        checkpoint.written().await.expect("written");
        let next = Checkpoint::open(directory.path()).expect("there");
        assert_eq!(next.vm(7), fence, "the next daemon knows it, too");
        for by in [Tenant, Policy] {
            let admitted = next.admit_vm(7, by).await;
            assert!(matches!(admitted, Err(ReadmitError::Admission(AdmissionError::Held))), "{admitted:?}");
            assert_eq!(next.remove_vm("seven", 7, by).await.expect("written"), Removal::Held);
        }
        assert_eq!(next.admit_vm(7, Operator).await.expect("written").epoch, 2);

        let drain = |objects: &mut Objects| _ = objects.draining.insert(7);
        next.change_objects(drain).await.expect("written");
        assert_eq!(next.remove_vm("seven", 7, Tenant).await.expect("written"), Removal::Held);
        next.change_objects(|objects| _ = objects.tenant_drains.insert(7)).await.expect("written");
        assert_eq!(next.remove_vm("seven", 7, Tenant).await.expect("written"), Removal::Removed);
        assert!(next.objects().draining.is_empty() && next.objects().tenant_drains.is_empty());
    }
}
