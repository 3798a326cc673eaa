//! A cgroup v2 group for each worker, where the operator has delegated a directory.
//!
//! A process that has left its process group, or has forked in spite of its filter, is still in its cgroup: writing
//! `cgroup.kill` ends all of it. Without a delegated directory a worker is ended by its pidfd alone.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The delegated directory.
#[derive(Debug)]
pub(crate) struct Cgroups {
    directory: PathBuf,
    /// Groups that still had a dying process when they were to be removed.
    leftover: Vec<PathBuf>,
}

impl Cgroups {
    /// Takes a directory, if groups can be made and killed in it.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        let probe = directory.join(format!("probe-{}", std::process::id()));
        fs::create_dir(&probe)?;
        let kill = fs::write(probe.join("cgroup.kill"), "1");
        fs::remove_dir(&probe)?;
        kill?;
        Ok(Self { directory: directory.to_owned(), leftover: Vec::new() })
    }

    /// Puts a process in a new group.
    pub(crate) fn place(&mut self, vm: u32, pid: u32) -> io::Result<PathBuf> {
        let group = self.directory.join(format!("vm-{vm}-worker-{pid}"));
        match fs::create_dir(&group) {
            // Left by an earlier process of the same id whose launcher was killed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => result?,
        }
        if let Err(error) = fs::write(group.join("cgroup.procs"), pid.to_string()) {
            self.end(group);
            return Err(error);
        }
        Ok(group)
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

    /// Kills and removes all groups that ended and are still there.
    pub(crate) fn finish(&mut self) {
        for group in self.leftover.drain(..) {
            if let Err(error) = fs::remove_dir(&group) {
                tracing::warn!("cgroup {} stays behind: {error}", group.display());
            }
        }
    }
}
