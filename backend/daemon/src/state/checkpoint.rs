//! What must outlive the daemon: which VMs are fenced, how far, in which epoch; which units are quarantined; which arbiters
//! hold memory; and what clients have made.
//!
//! It is written before what it says is done, and before a client is told so.

use std::{
    cell::{Ref, RefCell},
    collections::BTreeMap,
    io,
    path::Path,
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::{
    file::{Found, StateFile},
    objects::Objects,
};
use crate::{
    fence::{Fence, Step},
    process::Identity,
};

/// The form of the file.
const VERSION: u32 = 2;

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    vms: BTreeMap<u32, Fence>,
    /// Quarantined units, and why.
    units: BTreeMap<u32, String>,
    /// By unit: an arbiter that may still hold its memory.
    arbiters: BTreeMap<u32, Identity>,
    objects: Objects,
}

/// The checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    file: StateFile,
    content: RefCell<Content>,
    recovered: Option<String>,
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
        Ok(Self { file, content: RefCell::new(content), recovered })
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
    pub(crate) fn change_objects(&self, change: impl FnOnce(&mut Objects)) -> io::Result<()> {
        self.commit(|content| change(&mut content.objects))
    }

    /// Takes a VM from what clients have made; whoever gets its number is another epoch. Nothing has changed where that
    /// cannot be written.
    pub(crate) fn remove_vm(&self, id: &str, number: u32) -> io::Result<()> {
        self.commit(|content| {
            content.objects.vms.remove(id);
            content.objects.draining.remove(&number);
            let epoch = content.vms.get(&number).map_or(Fence::default().epoch, |fence| fence.epoch);
            content.vms.insert(number, Fence { epoch: epoch.saturating_add(1), ..Fence::default() });
        })
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

    /// Notes where a VM stands. What is noted holds in this process even where it cannot be written.
    pub(crate) fn set_vm(&self, vm: u32, fence: Fence) -> io::Result<()> {
        self.change(|content| _ = content.vms.insert(vm, fence))
    }

    /// Why a unit is quarantined, if it is.
    pub(crate) fn quarantine(&self, unit: u32) -> Option<String> {
        self.content.borrow().units.get(&unit).cloned()
    }

    /// Notes that a unit is quarantined.
    pub(crate) fn set_quarantine(&self, unit: u32, reason: &str) -> io::Result<()> {
        self.change(|content| _ = content.units.insert(unit, reason.to_owned()))
    }

    /// Notes that it is no more; false when it was not. Nothing has changed where that cannot be written.
    pub(crate) fn lift_quarantine(&self, unit: u32) -> io::Result<bool> {
        let mut was = false;
        self.commit(|content| was = content.units.remove(&unit).is_some())?;
        Ok(was)
    }

    /// Notes a VM that is admitted again. Nothing has changed where that cannot be written.
    pub(crate) fn admit_vm(&self, vm: u32, fence: Fence) -> io::Result<()> {
        self.commit(|content| _ = content.vms.insert(vm, fence))
    }

    /// Notes which process holds a unit's memory; `None` for nobody.
    pub(crate) fn set_arbiter(&self, unit: u32, arbiter: Option<Identity>) -> io::Result<()> {
        self.change(|content| match arbiter {
            Some(arbiter) => _ = content.arbiters.insert(unit, arbiter),
            None => _ = content.arbiters.remove(&unit),
        })
    }

    /// Processes that may still hold the memory of units.
    pub(crate) fn arbiters(&self) -> Vec<(u32, Identity)> {
        self.content.borrow().arbiters.iter().map(|(unit, process)| (*unit, *process)).collect()
    }

    /// Everything has ended in order. If nobody is fenced there is nothing to be remembered: no message of any epoch can be
    /// under way any more. Returns whether that is so.
    pub(crate) fn finish(&self) -> io::Result<bool> {
        let content = self.content.borrow();
        let fenced = content.vms.values().any(|fence| fence.step != Step::Active);
        if fenced || !content.units.is_empty() || !content.objects.is_empty() {
            return Ok(false);
        }
        self.file.remove().map(|()| true)
    }

    /// A change that holds in this process even where it cannot be written.
    fn change(&self, change: impl FnOnce(&mut Content)) -> io::Result<()> {
        let mut content = self.content.borrow_mut();
        change(&mut content);
        self.file.store(&*content)
    }

    /// A change that is written or not made.
    fn commit(&self, change: impl FnOnce(&mut Content)) -> io::Result<()> {
        let mut content = self.content.borrow().clone();
        change(&mut content);
        self.file.store(&content)?;
        *self.content.borrow_mut() = content;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_was_noted_is_there_for_the_next() {
        let directory = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
        assert_eq!(checkpoint.admitted(7), Some(1));
        let fenced = Fence::default().begin("a test", vec![Identity::of(1).expect("init")]).expect("active");
        checkpoint.set_vm(7, fenced.clone()).expect("written");
        checkpoint.set_quarantine(2, "Xid 79").expect("written");
        let next = Checkpoint::open(directory.path()).expect("there");
        assert_eq!((next.vm(7), next.admitted(7), next.admitted(8)), (fenced, None, Some(1)));
        assert_eq!(next.quarantine(2).as_deref(), Some("Xid 79"));
        next.finish().expect("kept");
        assert_eq!(Checkpoint::open(directory.path()).expect("there").admitted(7), None);
        assert_eq!(next.lift_quarantine(2).ok(), Some(true));
        assert_eq!(next.lift_quarantine(2).ok(), Some(false));
    }

    #[test]
    fn where_nobody_is_fenced_nothing_is_left() {
        let directory = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
        checkpoint.admit_vm(7, Fence { epoch: 5, ..Fence::default() }).expect("written");
        assert_eq!(Checkpoint::open(directory.path()).expect("there").admitted(7), Some(5));
        checkpoint.finish().expect("removed");
        assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 0);
        checkpoint.finish().expect("nothing to remove");
    }

    #[test]
    fn what_cannot_be_understood_is_not_passed_over() {
        let directory = tempfile::tempdir().expect("a directory");
        for text in ["", "{", "{\"version\":1}", "{\"version\":2,\"vms\":{},\"units\":{},\"arbiters\":{}}"] {
            fs::write(directory.path().join("checkpoint.json"), text).expect("written");
            assert!(Checkpoint::open(directory.path()).is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn a_vm_is_not_admitted_where_that_cannot_be_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let inside = directory.path().join("state");
        fs::create_dir(&inside).expect("a directory");
        let checkpoint = Checkpoint::open(&inside).expect("a new one");
        fs::remove_dir(&inside).expect("removed");
        let fenced = Fence::default().begin("a test", Vec::new()).expect("active");
        assert!(checkpoint.set_vm(7, fenced).is_err());
        assert_eq!(checkpoint.admitted(7), None, "it is fenced all the same");
        assert!(checkpoint.admit_vm(7, Fence::default()).is_err());
        assert_eq!(checkpoint.admitted(7), None);
    }
}
