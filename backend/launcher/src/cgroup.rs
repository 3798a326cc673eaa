//! A cgroup v2 group for each worker, if the operator has delegated a directory.
//!
//! A process that has left its process group, or has forked in spite of its filter, is still in its cgroup: writing
//! `cgroup.kill` ends all of it. Without a delegated directory a worker is ended by its pidfd alone.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Time limit for killed processes to leave their group.
const DYING: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// Parts of a group's name, before the numbers of the VM and of the worker.
const VM: &str = "vm-";
const WORKER: &str = "-worker-";

/// The delegated directory and its state.
#[derive(Debug)]
pub(crate) struct Cgroups {
    directory: PathBuf,
    /// Groups that still had a dying process at their removal.
    leftover: Vec<PathBuf>,
}

impl Cgroups {
    /// Takes a directory, if groups can be created and killed in it. Groups of an earlier launcher stay unchanged; also returned
    /// is a number beyond theirs.
    pub(crate) fn open(directory: &Path) -> io::Result<(Self, u64)> {
        let probe = directory.join(format!("probe-{}", std::process::id()));
        fs::create_dir(&probe)?;
        let kill = fs::write(probe.join("cgroup.kill"), "1");
        fs::remove_dir(&probe)?;
        kill?;
        let cgroups = Self { directory: directory.to_owned(), leftover: Vec::new() };
        let last = cgroups.left()?.iter().map(|(_, number)| *number).max();
        Ok((cgroups, last.map_or(0, |last| last.saturating_add(1))))
    }

    /// Present groups of workers, with their numbers.
    fn left(&self) -> io::Result<Vec<(PathBuf, u64)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let number = number_of(&entry.file_name().to_string_lossy());
            if let (true, Some(number)) = (entry.file_type()?.is_dir(), number) {
                found.push((entry.path(), number));
            }
        }
        Ok(found)
    }

    /// Ends the groups of an earlier launcher, except those with a process in `living`; these are returned with the process.
    /// `ours` are groups of this launcher.
    pub(crate) fn sweep(
        &mut self,
        ours: &BTreeSet<&Path>,
        living: &BTreeSet<u32>,
    ) -> io::Result<Vec<(u32, PathBuf)>> {
        let mut kept = Vec::new();
        for (group, _) in self.left()? {
            if ours.contains(group.as_path()) {
                continue;
            }
            let members = fs::read_to_string(group.join("cgroup.procs"))?;
            let member = members.split_whitespace().filter_map(|process| process.parse().ok());
            match member.into_iter().find(|process| living.contains(process)) {
                Some(process) => kept.push((process, group)),
                None => self.end(group),
            }
        }
        Ok(kept)
    }

    /// Creates the group of a worker, from the number of its VM and a unique number of the worker.
    pub(crate) fn make_for_worker(&mut self, vm: u32, key: u64) -> io::Result<(PathBuf, fs::File)> {
        self.make(&format!("{VM}{vm}{WORKER}{key}"))
    }

    /// Creates a group and returns its open `cgroup.procs`. A process that writes `0` to this file joins the group: a child does
    /// so before exec, so it and its children are never outside.
    fn make(&mut self, name: &str) -> io::Result<(PathBuf, fs::File)> {
        let group = self.directory.join(name);
        // An existing group may belong to a living worker: it is never joined and never ended here.
        fs::create_dir(&group)?;
        match fs::OpenOptions::new().write(true).open(group.join("cgroup.procs")) {
            Ok(door) => Ok((group, door)),
            Err(error) => {
                self.end(group);
                Err(error)
            }
        }
    }

    /// Kills all processes of a group and removes it.
    pub(crate) fn end(&mut self, group: PathBuf) {
        self.leftover.push(group);
        self.leftover.retain(|group| match fs::remove_dir(group) {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(_) => {
                // Busy: a process is in it. The removal is tried again when the next group ends.
                if let Err(error) = fs::write(group.join("cgroup.kill"), "1") {
                    tracing::warn!(path = %group.display(), %error, "cannot kill the processes of a cgroup");
                }
                true
            }
        });
    }

    /// Removes ended groups that still exist, once the last process in each is gone.
    pub(crate) fn finish(&mut self) {
        for group in self.leftover.drain(..) {
            if let Err(error) = remove_when_empty(&group) {
                tracing::warn!(path = %group.display(), %error, "cannot remove a cgroup");
            }
        }
    }
}

/// The number in the name of a worker's group.
fn number_of(name: &str) -> Option<u64> {
    let (vm, worker) = name.strip_prefix(VM)?.split_once(WORKER)?;
    vm.parse::<u32>().ok()?;
    worker.parse().ok()
}

fn remove_when_empty(group: &Path) -> io::Result<()> {
    let events = fs::File::open(group.join("cgroup.events"))?;
    loop {
        match fs::remove_dir(group) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
            result => return result,
        }
        // A change of `populated` between the attempt and this poll is not lost: the file reports changes since it was opened.
        if poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&DYING))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}
