//! Usage, for billing: per VM, project and organisation, and for the whole host.
//!
//! Figures only grow, also across restarts: clients receive only figures that are on disk, so that no kill of the daemon takes
//! a reported figure back. The figures of a VM are kept under its identity, which no later VM of the same name has. They
//! outlive the VM; if there are too many of removed VMs, the oldest of the organisation with the most are dropped, and stay in
//! the sums.
//!
//! The same file records the figures of each arbiter that are in the sums already: the next daemon, which adopts the arbiter,
//! bills the arbiter's count since then, once.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
    io,
    path::Path,
    sync::Arc,
    time::Instant,
};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use tokio::sync::Mutex;

use sluice_messages::figures::WorkCounts;
use sluice_runtime::process::Identity;

use crate::records::state::file::{FoundState, StateFile, off_thread};

/// The version of the file's format.
const VERSION: u32 = 1;
/// Limit of removed VMs whose figures are kept.
const GONE: usize = 4096;

/// The usage of a VM, a project, an organisation or the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UsageFigures {
    /// Bytes of device memory lent, times seconds.
    pub(crate) byte_seconds: f64,
    /// Seconds of GPU time.
    pub(crate) gpu_seconds: f64,
    /// Work as reported by its workers: kernels launched, copies and their bytes, calls.
    #[serde(default)]
    pub(crate) launches: u64,
    #[serde(default)]
    pub(crate) copies: u64,
    #[serde(default)]
    pub(crate) copied: u64,
    #[serde(default)]
    pub(crate) calls: u64,
    /// Seconds of its existence.
    pub(crate) seconds: f64,
    /// Sessions that got a worker.
    pub(crate) sessions: u64,
}

/// The identity of a VM, which no other VM ever has: a name and a number may be used again, but not within one second for the
/// same organisation and project.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmIdentity {
    pub(crate) name: String,
    pub(crate) organisation: Option<String>,
    pub(crate) project: Option<String>,
    /// Its number; `None` if it was removed before figures were kept by identity.
    pub(crate) number: Option<u32>,
    /// Creation time, in seconds since 1970.
    pub(crate) created: u64,
}

/// The identity of a project, which no other ever has: its number is not used again.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectIdentity {
    pub(crate) name: String,
    pub(crate) organisation: Option<String>,
    /// Its number; `None` if it was removed before figures were kept by identity.
    pub(crate) number: Option<u32>,
}

/// The usage of a VM since the last sample.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) vm: VmIdentity,
    /// The number of its project.
    pub(crate) project: Option<u32>,
    pub(crate) figures: UsageFigures,
}

/// An arbiter's count for a VM in an epoch, as far as it is in the figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Done {
    /// Nanoseconds of GPU time.
    pub(crate) time: u64,
    pub(crate) work: WorkCounts,
}

/// The arbiter and the epoch of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Counted {
    epoch: u64,
    arbiter: Identity,
    done: Done,
}

/// All figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub(crate) struct UsageBook {
    pub(crate) vms: BTreeMap<VmIdentity, UsageFigures>,
    pub(crate) projects: BTreeMap<ProjectIdentity, UsageFigures>,
    pub(crate) organisations: BTreeMap<String, UsageFigures>,
    pub(crate) host: UsageFigures,
    /// Removed VMs, the oldest first.
    gone: VecDeque<VmIdentity>,
    /// By the numbers of VM and unit: the counts that are in the figures already. `None` if unknown.
    counted: Option<BTreeMap<u32, BTreeMap<u32, Counted>>>,
}

/// The book in the form of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    #[serde(default)]
    lines: Vec<(VmIdentity, UsageFigures)>,
    #[serde(default)]
    project_lines: Vec<(ProjectIdentity, UsageFigures)>,
    organisations: BTreeMap<String, UsageFigures>,
    host: UsageFigures,
    #[serde(default)]
    gone_lines: VecDeque<VmIdentity>,
    #[serde(default)]
    counted: Option<BTreeMap<u32, BTreeMap<u32, Counted>>>,
    /// Earlier versions kept figures by name.
    #[serde(default, skip_serializing)]
    vms: BTreeMap<String, NamedVm>,
    #[serde(default, skip_serializing)]
    projects: BTreeMap<String, UsageFigures>,
    #[serde(default, skip_serializing)]
    gone: VecDeque<String>,
}

/// The figures that earlier versions kept by the name of a VM, with its owners.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedVm {
    organisation: Option<String>,
    project: Option<String>,
    figures: UsageFigures,
}

impl From<Stored> for UsageBook {
    fn from(stored: Stored) -> Self {
        let Stored { lines, project_lines, organisations, host, gone_lines, counted, .. } = stored;
        let mut book = Self {
            vms: lines.into_iter().collect(),
            projects: project_lines.into_iter().collect(),
            organisations,
            host,
            gone: gone_lines,
            counted,
        };
        let mut named = BTreeMap::new();
        for (name, NamedVm { organisation, project, figures }) in stored.vms {
            let vm = VmIdentity { name: name.clone(), organisation, project, ..VmIdentity::default() };
            named.insert(name, vm.clone());
            book.vms.insert(vm, figures);
        }
        book.gone.extend(stored.gone.into_iter().filter_map(|name| named.remove(&name)));
        for (name, figures) in stored.projects {
            book.projects.insert(ProjectIdentity { name, ..ProjectIdentity::default() }, figures);
        }
        book
    }
}

impl From<UsageBook> for Stored {
    fn from(book: UsageBook) -> Self {
        Self {
            lines: book.vms.into_iter().collect(),
            project_lines: book.projects.into_iter().collect(),
            organisations: book.organisations,
            host: book.host,
            gone_lines: book.gone,
            counted: book.counted,
            vms: BTreeMap::new(),
            projects: BTreeMap::new(),
            gone: VecDeque::new(),
        }
    }
}

/// The figures, and their file.
#[derive(Debug)]
pub(crate) struct UsageRecords {
    file: StateFile,
    now: RefCell<UsageBook>,
    written: RefCell<UsageBook>,
    since: Cell<Instant>,
    /// True if it is unknown which counts of adopted arbiters are in the figures.
    uncounted: bool,
    /// Held during a write.
    writing: Arc<Mutex<()>>,
}

impl UsageFigures {
    fn add(&mut self, other: &Self) {
        self.byte_seconds += other.byte_seconds;
        self.gpu_seconds += other.gpu_seconds;
        self.launches = self.launches.saturating_add(other.launches);
        self.copies = self.copies.saturating_add(other.copies);
        self.copied = self.copied.saturating_add(other.copied);
        self.calls = self.calls.saturating_add(other.calls);
        self.seconds += other.seconds;
        self.sessions = self.sessions.saturating_add(other.sessions);
    }
}

impl Done {
    pub(crate) fn and(self, other: Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    fn since(self, before: Self) -> Self {
        self.combine(before, u64::saturating_sub)
    }

    fn combine(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self { time: with(self.time, other.time), work: self.work.combine(other.work, &with) }
    }
}

impl UsageBook {
    fn add(&mut self, sample: Sample) {
        let Sample { vm, project, figures } = sample;
        self.host.add(&figures);
        if let Some(organisation) = &vm.organisation {
            self.organisations.entry(organisation.clone()).or_default().add(&figures);
        }
        if let Some(name) = &vm.project {
            let organisation = vm.organisation.clone();
            let project = ProjectIdentity { name: name.clone(), organisation, number: project };
            self.projects.entry(project).or_default().add(&figures);
        }
        self.vms.entry(vm).or_default().add(&figures);
    }

    fn retire(&mut self, number: u32) {
        if let Some(counted) = &mut self.counted {
            counted.remove(&number);
        }
        let is_of = |vm: &&VmIdentity| vm.number == Some(number) && !self.gone.contains(vm);
        let gone: Vec<_> = self.vms.keys().filter(is_of).cloned().collect();
        self.gone.extend(gone);
        while self.gone.len() > GONE {
            // An organisation that creates and deletes many VMs displaces its own figures, not those of others.
            let mut lines = BTreeMap::new();
            self.gone.iter().for_each(|vm| *lines.entry(&vm.organisation).or_insert(0) += 1);
            let most = lines.into_iter().max_by_key(|(_, count)| *count).map(|(whose, _)| whose.clone());
            let oldest = self.gone.iter().position(|vm| Some(&vm.organisation) == most.as_ref());
            if let Some(oldest) = oldest.and_then(|oldest| self.gone.remove(oldest)) {
                self.vms.remove(&oldest);
            }
        }
    }

    /// Assigns figures that were kept by name to the present holders of the names. The rest belong to removed VMs.
    fn settle(&mut self, vms: &[VmIdentity], projects: &[ProjectIdentity]) {
        for vm in vms {
            let named = VmIdentity { number: None, created: 0, ..vm.clone() };
            if let Some(figures) = self.vms.remove(&named) {
                self.gone.retain(|gone| *gone != named);
                self.vms.entry(vm.clone()).or_default().add(&figures);
            }
        }
        for project in projects {
            let named = ProjectIdentity { name: project.name.clone(), ..ProjectIdentity::default() };
            if let Some(figures) = self.projects.remove(&named) {
                self.projects.entry(project.clone()).or_default().add(&figures);
            }
        }
        let left = self.vms.keys().filter(|vm| vm.number.is_none() && !self.gone.contains(vm));
        let left: Vec<_> = left.cloned().collect();
        self.gone.extend(left);
    }
}

impl UsageRecords {
    /// Opens the figures in a directory, to be continued for the existing VMs and projects.
    ///
    /// # Errors
    /// If the file cannot be understood: figures that start again at 0 would be wrong without notice.
    pub(crate) fn open(directory: &Path, vms: &[VmIdentity], projects: &[ProjectIdentity]) -> Result<Self> {
        let file = StateFile::new(directory.join("usage.json"), VERSION);
        let mut book: UsageBook = match file.load()? {
            FoundState::Nothing => UsageBook { counted: Some(BTreeMap::new()), ..UsageBook::default() },
            FoundState::Current(book) => book,
            FoundState::Previous(book, why) => {
                tracing::error!(path = %file.path().display(), error = %why, "the usage cannot be understood; the file before it is used, and some seconds are lost");
                book
            }
        };
        book.settle(vms, projects);
        let uncounted = book.counted.is_none();
        Ok(Self {
            file,
            now: RefCell::new(book.clone()),
            written: RefCell::new(book),
            since: Cell::new(Instant::now()),
            uncounted,
            writing: Arc::default(),
        })
    }

    /// Seconds since the last call.
    pub(crate) fn elapsed(&self) -> f64 {
        self.since.replace(Instant::now()).elapsed().as_secs_f64()
    }

    /// Adds samples.
    pub(crate) fn add(&self, samples: impl IntoIterator<Item = Sample>) {
        let mut now = self.now.borrow_mut();
        samples.into_iter().for_each(|sample| now.add(sample));
    }

    /// Records an arbiter's count for a VM in its epoch. Returns the part that is not in the figures yet; the caller adds it to
    /// them.
    pub(crate) fn count(&self, vm: u32, epoch: u64, unit: u32, arbiter: Arbiter, done: Done) -> Done {
        let mut now = self.now.borrow_mut();
        let units = now.counted.get_or_insert_default().entry(vm).or_default();
        let counted = Counted { epoch, arbiter: arbiter.process, done };
        let before = units.insert(unit, counted);
        match before.filter(|before| (before.epoch, before.arbiter) == (epoch, arbiter.process)) {
            Some(before) => done.since(before.done),
            // The version that wrote the file had billed all of it except for some seconds, without a record.
            None if before.is_none() && arbiter.adopted && self.uncounted => Done::default(),
            None => done,
        }
    }

    /// Moves a VM to the removed ones.
    pub(crate) fn retire(&self, number: u32) {
        self.now.borrow_mut().retire(number);
    }

    /// Writes the added figures, so that clients see them.
    pub(crate) async fn write(&self) -> io::Result<()> {
        // One write at a time: a reported figure is never taken back.
        let turn = Arc::clone(&self.writing).lock_owned().await;
        let now = self.now.borrow().clone();
        if now != *self.written.borrow() {
            let (file, book) = (self.file.clone(), now.clone());
            let store = move || file.store(&book).map(|()| turn);
            let _turn = off_thread(store).await?;
            self.written.replace(now);
        }
        Ok(())
    }

    /// The figures on disk.
    pub(crate) fn book(&self) -> std::cell::Ref<'_, UsageBook> {
        self.written.borrow()
    }

    /// Removes the file: no figure has to be kept.
    pub(crate) async fn forget(&self) -> io::Result<()> {
        let _turn = self.writing.lock().await;
        self.file.remove()
    }
}

/// An arbiter that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arbiter {
    pub(crate) process: Identity,
    /// True if an earlier daemon has started it.
    pub(crate) adopted: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(organisation: &str, name: &str, number: u32, created: u64) -> VmIdentity {
        VmIdentity {
            name: name.to_owned(),
            organisation: Some(organisation.to_owned()),
            project: None,
            number: Some(number),
            created,
        }
    }

    fn used(vm: VmIdentity, byte_seconds: f64) -> Sample {
        let figures = UsageFigures { byte_seconds, sessions: 1, ..UsageFigures::default() };
        Sample { vm, project: None, figures }
    }

    fn a() -> VmIdentity {
        of("acme", "a", 1, 10)
    }

    fn open(directory: &Path) -> UsageRecords {
        UsageRecords::open(directory, &[], &[]).expect("it is there, or new")
    }

    fn done(time: u64) -> Done {
        Done { time, work: WorkCounts { launches: time, ..WorkCounts::default() } }
    }

    // Promise: A6
    #[tokio::test]
    async fn reported_figures_are_never_taken_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let usage = open(directory.path());
        usage.add([used(a(), 5.0), used(of("acme", "b", 2, 10), 7.0)]);
        assert_eq!(usage.book().host.byte_seconds, 0.0, "not shown before it is written");
        usage.write().await.expect("written");
        assert_eq!(usage.book().host.byte_seconds, 12.0);
        usage.add([used(a(), 1.0)]);
        // The daemon is killed here.
        let usage = open(directory.path());
        assert_eq!(usage.book().host.byte_seconds, 12.0);
        assert_eq!(usage.book().organisations["acme"].sessions, 2);
        usage.add([used(a(), 1.0)]);
        usage.retire(1);
        usage.write().await.expect("written");
        assert_eq!(usage.book().vms[&a()].byte_seconds, 6.0, "figures outlive their VM");
    }

    // Promise: A6
    #[test]
    fn oldest_removed_vms_are_dropped_and_stay_in_the_sums() {
        let mut book = UsageBook::default();
        book.add(used(of("evil", "first", 0, 0), 1.0));
        book.retire(0);
        let last = u32::try_from(GONE + 10).expect("small");
        for number in 1..last {
            book.add(used(of("acme", &format!("vm-{number}"), number, 1), 1.0));
            book.retire(number);
        }
        assert_eq!((book.vms.len(), book.gone.len()), (GONE, GONE));
        assert!(!book.vms.contains_key(&of("acme", "vm-1", 1, 1)));
        assert!(book.vms.contains_key(&of("acme", "vm-4000", 4000, 1)));
        assert!(
            book.vms.contains_key(&of("evil", "first", 0, 0)),
            "one organisation displaces another's figures"
        );
        assert_eq!(book.host.sessions, u64::from(last));
    }

    // Promise: A50
    #[tokio::test]
    async fn name_reused_by_another_organisation_has_its_own_figures() {
        let directory = tempfile::tempdir().expect("a directory");
        let usage = open(directory.path());
        let (acmes, evils) = (of("acme", "secret-db", 1, 10), of("evil", "secret-db", 2, 20));
        usage.add([used(acmes.clone(), 11.0)]);
        usage.retire(1);
        usage.add([used(evils.clone(), 1.0)]);
        usage.write().await.expect("written");
        let usage = open(directory.path());
        let book = usage.book();
        assert_eq!(book.vms[&acmes].byte_seconds, 11.0);
        assert_eq!(book.vms[&evils].byte_seconds, 1.0);
        // The same name and the same number in the same second.
        usage.add([used(of("other", "7", 7, 30), 1.0)]);
        usage.retire(7);
        usage.add([used(of("evil", "7", 7, 30), 2.0)]);
        assert_eq!(usage.now.borrow().vms.len(), 4);
    }

    // Promise: A50
    #[test]
    fn project_that_is_created_again_has_its_own_figures() {
        let mut book = UsageBook::default();
        for (organisation, number) in [("acme", 101), ("evil", 102), ("acme", 103)] {
            let vm = VmIdentity { project: Some("web".to_owned()), ..of(organisation, "a", number, 1) };
            book.add(Sample { project: Some(number), ..used(vm, f64::from(number)) });
        }
        let figures: Vec<_> =
            book.projects.iter().map(|(project, all)| (project.number, all.byte_seconds)).collect();
        assert_eq!(figures, [(Some(101), 101.0), (Some(103), 103.0), (Some(102), 102.0)]);
    }

    // Promise: A51
    #[tokio::test]
    async fn time_that_an_arbiter_counts_between_two_daemons_is_billed_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let process = |number| Identity { process: number, started: 1 };
        let first = |adopted| Arbiter { process: process(1), adopted };
        let usage = open(directory.path());
        assert_eq!(usage.count(7, 1, 0, first(false), done(100)), done(100));
        usage.add([used(a(), 1.0)]);
        usage.write().await.expect("written");
        assert_eq!(
            usage.count(7, 1, 0, first(false), done(150)),
            done(50),
            "this daemon is killed before the write"
        );
        let usage = open(directory.path());
        assert_eq!(usage.count(7, 1, 0, first(true), done(180)), done(80));
        assert_eq!(usage.count(7, 1, 0, first(true), done(180)), done(0));
        assert_eq!(
            usage.count(8, 1, 0, first(true), done(30)),
            done(30),
            "the VM is new on an adopted arbiter"
        );
        assert_eq!(usage.count(7, 2, 0, first(true), done(500)), done(500), "another epoch counts from 0");
        let second = Arbiter { process: process(2), adopted: false };
        assert_eq!(usage.count(7, 2, 0, second, done(600)), done(600), "another arbiter counts from 0");
        assert_eq!(usage.count(7, 2, 1, second, done(5)), done(5), "each unit has its own count");
        usage.retire(7);
        assert_eq!(usage.now.borrow().counted.as_ref().map(BTreeMap::len), Some(1));
    }

    // Promise: A50
    #[tokio::test]
    async fn figures_that_an_older_version_kept_by_name_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let figures = r#"{"byte_seconds":1.5,"gpu_seconds":2.0,"seconds":3.0,"sessions":4}"#;
        let vm = |organisation: &str| {
            format!(r#"{{"organisation":"{organisation}","project":null,"figures":{figures}}}"#)
        };
        let old = format!(
            r#"{{"vms":{{"a":{},"b":{},"c":{}}},"projects":{{"web":{figures},"old":{figures}}},"organisations":{{"acme":{figures}}},"host":{figures},"gone":["b"]}}"#,
            vm("acme"),
            vm("acme"),
            vm("acme"),
        );
        let old: serde_json::Value = serde_json::from_str(&old).expect("JSON");
        StateFile::new(directory.path().join("usage.json"), VERSION).store(&old).expect("written");
        let web = ProjectIdentity {
            name: "web".to_owned(),
            organisation: Some("acme".to_owned()),
            number: Some(9),
        };
        let vms = [a(), of("evil", "c", 3, 30)];
        let usage =
            UsageRecords::open(directory.path(), &vms, std::slice::from_ref(&web)).expect("it is read");
        let book = usage.book();
        assert_eq!((book.host.sessions, book.organisations["acme"].sessions), (4, 4));
        assert_eq!(book.vms[&a()].sessions, 4, "an existing VM keeps its figures");
        assert_eq!(book.projects[&web].sessions, 4, "an existing project keeps its figures");
        assert_eq!(book.projects.len(), 2);
        assert!(!book.vms.contains_key(&vms[1]), "another organisation's VM of the name gets nothing");
        let nameless = |name: &str| VmIdentity { number: None, created: 0, ..of("acme", name, 0, 0) };
        assert_eq!(book.vms[&nameless("b")].sessions, 4);
        assert_eq!(Vec::from(book.gone.clone()), [nameless("b"), nameless("c")]);
        let adopted = Arbiter { process: Identity { process: 1, started: 1 }, adopted: true };
        assert_eq!(
            usage.count(1, 1, 0, adopted, done(9)),
            done(0),
            "the older version has counted it already"
        );
        assert_eq!(usage.count(1, 1, 0, adopted, done(11)), done(2));
    }
}
