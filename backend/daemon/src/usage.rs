//! What was used, for billing: per VM, project and organisation, and on the whole host.
//!
//! Figures only grow, also across restarts: what clients are told is what has been written down, so that a daemon that is
//! killed takes nothing back that somebody was told. A VM's figures outlive it; when there are too many of VMs that are gone, the
//! oldest are dropped, and stay in the sums.

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    io,
    path::Path,
    sync::Arc,
    time::Instant,
};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use tokio::sync::Mutex;

use crate::state::file::{Found, StateFile, off_thread};

/// The form of the file.
const VERSION: u32 = 1;
/// VMs that are gone and whose figures are kept.
const GONE: usize = 4096;

/// What one had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Figures {
    /// Bytes of device memory lent, times seconds.
    pub(crate) byte_seconds: f64,
    /// Seconds of GPU time.
    pub(crate) gpu_seconds: f64,
    /// What its workers say they have done: kernels launched, copies and their bytes, calls.
    #[serde(default)]
    pub(crate) launches: u64,
    #[serde(default)]
    pub(crate) copies: u64,
    #[serde(default)]
    pub(crate) copied: u64,
    #[serde(default)]
    pub(crate) calls: u64,
    /// Seconds in which it existed.
    pub(crate) seconds: f64,
    /// Sessions that got a worker.
    pub(crate) sessions: u64,
}

/// What one had since the last look.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) vm: String,
    pub(crate) organisation: Option<String>,
    pub(crate) project: Option<String>,
    pub(crate) figures: Figures,
}

/// Everybody's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Book {
    pub(crate) vms: BTreeMap<String, VmFigures>,
    pub(crate) projects: BTreeMap<String, Figures>,
    pub(crate) organisations: BTreeMap<String, Figures>,
    pub(crate) host: Figures,
    /// VMs that are gone, the oldest first.
    gone: VecDeque<String>,
}

/// A VM's, and whose it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmFigures {
    pub(crate) organisation: Option<String>,
    pub(crate) project: Option<String>,
    pub(crate) figures: Figures,
}

/// The figures, and where they are kept.
#[derive(Debug)]
pub(crate) struct Usage {
    file: StateFile,
    now: RefCell<Book>,
    written: RefCell<Book>,
    since: RefCell<Instant>,
    /// Held by who has it written down.
    writing: Arc<Mutex<()>>,
}

impl Figures {
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

impl Book {
    fn add(&mut self, sample: Sample) {
        let Sample { vm, organisation, project, figures } = sample;
        self.host.add(&figures);
        if let Some(organisation) = &organisation {
            self.organisations.entry(organisation.clone()).or_default().add(&figures);
        }
        if let Some(project) = &project {
            self.projects.entry(project.clone()).or_default().add(&figures);
        }
        let entry = self.vms.entry(vm).or_default();
        (entry.organisation, entry.project) = (organisation, project);
        entry.figures.add(&figures);
    }

    fn retire(&mut self, vm: &str) {
        if !self.vms.contains_key(vm) {
            return;
        }
        self.gone.push_back(vm.to_owned());
        while self.gone.len() > GONE {
            if let Some(oldest) = self.gone.pop_front()
                && !self.gone.contains(&oldest)
            {
                self.vms.remove(&oldest);
            }
        }
    }
}

impl Usage {
    /// What was written in a directory, to be continued.
    ///
    /// # Errors
    /// When it cannot be understood: figures that start again at nothing would be wrong in silence.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        let file = StateFile::new(directory.join("usage.json"), VERSION);
        let book: Book = match file.load()? {
            Found::Nothing => Book::default(),
            Found::Current(book) => book,
            Found::Previous(book, why) => {
                tracing::error!(
                    "{} cannot be understood ({why}): some seconds are lost",
                    file.path().display()
                );
                book
            }
        };
        Ok(Self {
            file,
            now: RefCell::new(book.clone()),
            written: RefCell::new(book),
            since: RefCell::new(Instant::now()),
            writing: Arc::default(),
        })
    }

    /// Seconds since this was last asked.
    pub(crate) fn elapsed(&self) -> f64 {
        self.since.replace(Instant::now()).elapsed().as_secs_f64()
    }

    /// Adds what was seen.
    pub(crate) fn add(&self, samples: impl IntoIterator<Item = Sample>) {
        let mut now = self.now.borrow_mut();
        samples.into_iter().for_each(|sample| now.add(sample));
    }

    /// A VM is gone.
    pub(crate) fn retire(&self, vm: &str) {
        self.now.borrow_mut().retire(vm);
    }

    /// A VM of that name is there again.
    pub(crate) fn revive(&self, vm: &str) {
        self.now.borrow_mut().gone.retain(|gone| gone != vm);
    }

    /// Writes down what was added, for clients to see.
    pub(crate) async fn write(&self) -> io::Result<()> {
        // One after the other: what was told is never taken back.
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

    /// What has been written down.
    pub(crate) fn book(&self) -> std::cell::Ref<'_, Book> {
        self.written.borrow()
    }

    /// Takes the file away: nothing has to be remembered.
    pub(crate) async fn forget(&self) -> io::Result<()> {
        let _turn = self.writing.lock().await;
        self.file.remove()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(vm: &str, byte_seconds: f64) -> Sample {
        Sample {
            vm: vm.to_owned(),
            organisation: Some("acme".to_owned()),
            project: None,
            figures: Figures { byte_seconds, sessions: 1, ..Figures::default() },
        }
    }

    // Promise: A6
    #[tokio::test]
    async fn what_was_told_is_never_taken_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let usage = Usage::open(directory.path()).expect("a new one");
        usage.add([sample("a", 5.0), sample("b", 7.0)]);
        assert_eq!(usage.book().host.byte_seconds, 0.0, "not told before it is written");
        usage.write().await.expect("written");
        assert_eq!(usage.book().host.byte_seconds, 12.0);
        usage.add([sample("a", 1.0)]);
        // Killed here.
        let usage = Usage::open(directory.path()).expect("there");
        assert_eq!(usage.book().host.byte_seconds, 12.0);
        assert_eq!(usage.book().organisations["acme"].sessions, 2);
        usage.add([sample("a", 1.0)]);
        usage.retire("a");
        usage.write().await.expect("written");
        assert_eq!(usage.book().vms["a"].figures.byte_seconds, 6.0, "figures outlive their VM");
    }

    // Promise: A6
    #[test]
    fn vms_that_are_gone_are_forgotten_in_the_end_but_not_in_the_sums() {
        let mut book = Book::default();
        for number in 0..GONE + 10 {
            book.add(sample(&format!("vm-{number}"), 1.0));
            book.retire(&format!("vm-{number}"));
        }
        assert_eq!(book.vms.len(), GONE);
        assert!(!book.vms.contains_key("vm-0"));
        assert_eq!(book.host.sessions, u64::try_from(GONE + 10).expect("small"));
    }
}
