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

/// How long killed processes may take to leave their group.
const DYING: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// What names of groups are made of, before the number of the VM and that of the worker.
const VM: &str = "vm-";
const WORKER: &str = "-worker-";

/// The delegated directory.
#[derive(Debug)]
pub(crate) struct Cgroups {
    directory: PathBuf,
    /// Groups that still had a dying process when they were to be removed.
    leftover: Vec<PathBuf>,
}

impl Cgroups {
    /// Takes a directory, if groups can be made and killed in it. What a launcher before has left is not touched; also returned
    /// is a number beyond those of its groups.
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

    /// Groups of workers that are there, with their numbers.
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

    /// Ends the groups that a launcher before has left, but for those with a process that lives on; these are returned with
    /// it. `ours` are groups of this launcher.
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

    /// The group of a worker, by the number of its VM and one that no other worker has.
    pub(crate) fn make_for_worker(&mut self, vm: u32, key: u64) -> io::Result<(PathBuf, fs::File)> {
        self.make(&format!("{VM}{vm}{WORKER}{key}"))
    }

    /// Makes a group. The process that writes `0` to its `cgroup.procs`, which is returned open, joins it: a child does
    /// so before exec, and so is never outside, nor anything it forks.
    fn make(&mut self, name: &str) -> io::Result<(PathBuf, fs::File)> {
        let group = self.directory.join(name);
        // A group that is there already may be that of a worker which lives on: it is never joined, and never ended here.
        fs::create_dir(&group)?;
        match fs::OpenOptions::new().write(true).open(group.join("cgroup.procs")) {
            Ok(door) => Ok((group, door)),
            Err(error) => {
                self.end(group);
                Err(error)
            }
        }
    }

    /// Kills what is left in a group and removes it.
    pub(crate) fn end(&mut self, group: PathBuf) {
        self.leftover.push(group);
        self.leftover.retain(|group| match fs::remove_dir(group) {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(_) => {
                // Busy: somebody is in it. It is tried again when the next group ends.
                if let Err(error) = fs::write(group.join("cgroup.kill"), "1") {
                    tracing::warn!("cannot kill cgroup {}: {error}", group.display());
                }
                true
            }
        });
    }

    /// Removes the groups that ended and are still there, as soon as the last process in each is gone.
    pub(crate) fn finish(&mut self) {
        for group in self.leftover.drain(..) {
            if let Err(error) = remove_when_empty(&group) {
                tracing::warn!("cgroup {} stays behind: {error}", group.display());
            }
        }
    }
}

/// The number of a worker's group, if it is one.
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
        // A change of `populated` between the attempt and this is not lost: the file counts from when it was opened.
        if poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&DYING))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}
