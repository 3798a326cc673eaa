//! The ends of children and of an earlier launcher's workers, and the resources that come free with them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

use rustix::{
    event::{
        PollFd, PollFlags, Timespec,
        epoll::{self, EventData, EventFlags},
        poll,
    },
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, retry_on_intr},
    process::{WaitId, WaitIdOptions},
};
use sluice_messages::control::LaunchRefusal;
use sluice_runtime::process::{Identity, is_gone, kill};

use super::{Launcher, cgroup::Cgroups, children::Survivor, error::RequestError, role::ChildRole};

/// Time limit for the end of a killed child; a driver that frees much memory is slow.
const KILLED: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// A process of this launcher, or of an earlier one.
#[derive(Debug)]
pub(super) struct FoundProcess {
    pub(super) identity: Identity,
    pub(super) pidfd: OwnedFd,
    /// True for a worker of a VM.
    pub(super) worker: bool,
    /// The open `cgroup.kill` of its cgroup, if it has one.
    pub(super) cgroup_kill: Option<OwnedFd>,
}

impl Launcher {
    /// Finds a process that this launcher started, was told to keep, or finds in its cgroups: those of an earlier launcher are there.
    pub(super) fn find(&self, process: u32) -> Result<FoundProcess, RequestError> {
        let open_kill = |group: &Path| fs::File::create(group.join("cgroup.kill")).map(OwnedFd::from);
        let found = |pidfd: OwnedFd, worker, group: Option<&Path>| {
            let identity = Identity::behind(process, &pidfd).ok_or(LaunchRefusal::NoProcess)?;
            let cgroup_kill = group.map(open_kill).transpose()?;
            Ok(FoundProcess { identity, pidfd, worker, cgroup_kill })
        };
        if let Some(child) = self.children.values().find(|child| child.pid == process) {
            let worker = matches!(child.role, ChildRole::Worker(_));
            return found(child.pidfd.try_clone()?, worker, child.cgroup.as_deref());
        }
        let survivor = self.survivors.values().find(|survivor| survivor.process == process);
        if let Some(Survivor { pidfd, worker: true, cgroup, .. }) = survivor {
            return found(pidfd.try_clone()?, true, cgroup.as_deref());
        }
        let pidfd = Identity::of(process).and_then(Identity::open).ok_or(LaunchRefusal::NoProcess)?;
        let group = self.cgroups.as_ref().and_then(|cgroups| cgroups.group_of(process));
        let (group, worker) = group.ok_or(LaunchRefusal::NoProcess)?;
        found(pidfd, worker, Some(&group))
    }

    /// Kills all processes that this or an earlier launcher has started.
    pub(super) fn end_all(&mut self) -> io::Result<()> {
        self.end_ready();
        self.children.values().for_each(|child| kill(child.pidfd.as_fd()));
        self.cgroups.as_mut().map_or(Ok(()), Cgroups::end_all)
    }

    /// Remembers a worker of an earlier launcher that continues. A launcher that is a service takes only those in its cgroups from its
    /// client, because other processes of the host are not the client's.
    pub(super) fn keep(&mut self, worker: Identity) {
        // A process that has ended meanwhile keeps no resources.
        let Some(pidfd) = worker.open() else { return };
        let grouped = || self.cgroups.as_ref().and_then(|cgroups| cgroups.group_of(worker.process));
        let is_ours = self.service.is_none() || grouped().is_some_and(|(_, is_worker)| is_worker);
        // If it lives, its number belonged to it during the look-up.
        if is_ours && !is_gone(&pidfd) {
            self.kept.insert(worker.process, pidfd);
        }
    }

    /// Handles the end of a child and releases all its resources.
    pub(super) fn reap(&mut self, key: u64) {
        let Some(child) = self.children.get(&key) else { return };
        let status = rustix::process::waitid(
            WaitId::PidFd(child.pidfd.as_fd()),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        );
        match status {
            // A debugger has its status. Another event comes when the debugger leaves it.
            Ok(None) => return,
            Ok(Some(status)) => {
                let (role, pid) = (child.role, child.pid);
                self.finish_log(key);
                match (status.exit_status(), status.terminating_signal()) {
                    (Some(0), _) | (_, Some(libc::SIGKILL | libc::SIGTERM)) => {
                        tracing::debug!(%role, process = pid, "a child has ended");
                    }
                    _ if self.ends.take(Instant::now()).is_err() => self.dropped += 1,
                    (Some(code), _) => {
                        let dropped = std::mem::take(&mut self.dropped);
                        tracing::warn!(%role, process = pid, code, dropped, "a child has ended with an error");
                    }
                    (_, signal) => {
                        let (dropped, signal) = (std::mem::take(&mut self.dropped), signal.unwrap_or(0));
                        tracing::error!(%role, process = pid, signal, dropped, "a child was killed by a signal");
                    }
                }
            }
            Err(error) => tracing::error!(process = child.pid, %error, "cannot wait for a child"),
        }
        if let Some(child) = self.children.remove(&key) {
            self.leave(child.pidfd.as_fd());
            self.give_back(child.uid, child.cgroup);
        }
    }

    /// All continuing workers of an earlier launcher have been named: they keep their users and groups. Ends all other processes in
    /// groups of workers.
    pub(super) fn sweep(&mut self) {
        let kept = std::mem::take(&mut self.kept);
        let living: BTreeSet<u32> = kept.keys().copied().collect();
        let ours: BTreeSet<&Path> =
            self.children.values().filter_map(|child| child.cgroup.as_deref()).collect();
        let swept = self.cgroups.as_mut().map(|cgroups| cgroups.sweep(&ours, &living)).transpose();
        let mut groups: BTreeMap<u32, PathBuf> = match swept {
            Ok(groups) => groups.unwrap_or_default(),
            Err(error) => {
                tracing::error!(%error, "cannot end the cgroups of an earlier launcher");
                BTreeMap::new()
            }
        };
        for (process, pidfd) in kept {
            let uid = uid_of(process).filter(|uid| self.has_user(*uid));
            let cgroup = groups.remove(&process);
            self.survive(Survivor { process, pidfd, uid, worker: true, cgroup });
        }
        // Devices, arbiters and inventories continue, too. A user is not given to a second process, even if the first one is unknown.
        let own = self.children.values().map(|child| child.pid);
        let own: BTreeSet<u32> = own.chain(self.ready_processes()).collect();
        for process in processes().filter(|process| !living.contains(process) && !own.contains(process)) {
            let taken = self.users.is_some().then(|| uid_of(process)).flatten();
            let uid = taken.filter(|uid| self.has_user(*uid));
            let cgroup = groups.remove(&process);
            if uid.is_none() && cgroup.is_none() {
                continue;
            }
            if let Some(pidfd) = Identity::of(process).and_then(Identity::open) {
                tracing::info!(process, uid, "a process of an earlier launcher continues");
                self.survive(Survivor { process, pidfd, uid, worker: false, cgroup });
            }
        }
        // Their processes have ended meanwhile.
        for group in groups.into_values() {
            self.give_back(None, Some(group));
        }
    }

    /// True if a user id is one for workers.
    fn has_user(&self, uid: u32) -> bool {
        self.users.as_ref().is_some_and(|users| users.has(uid))
    }

    /// Keeps the resources of a process until it ends.
    fn survive(&mut self, survivor: Survivor) {
        if let (Some(users), Some(uid)) = (&mut self.users, survivor.uid) {
            users.claim(uid);
        }
        let key = self.next_key;
        self.next_key += 1;
        match epoll::add(&self.events, &survivor.pidfd, EventData::new_u64(key), EventFlags::IN) {
            Ok(()) => _ = self.survivors.insert(key, survivor),
            // Its user and its group stay in use.
            Err(error) => tracing::error!(%error, "cannot watch a process of an earlier launcher"),
        }
    }

    /// A process of an earlier launcher has ended. Another process reaps it.
    pub(super) fn survivor_ended(&mut self, key: u64) {
        if let Some(survivor) = self.survivors.remove(&key) {
            self.leave(survivor.pidfd.as_fd());
            self.give_back(survivor.uid, survivor.cgroup);
        }
    }

    /// Releases the resources of a child.
    pub(super) fn give_back(&mut self, uid: Option<u32>, cgroup: Option<PathBuf>) {
        if let (Some(users), Some(uid)) = (&mut self.users, uid) {
            users.give_back(uid);
        }
        if let (Some(cgroups), Some(group)) = (&mut self.cgroups, cgroup) {
            cgroups.end(group);
        }
    }
}

impl Drop for Launcher {
    /// Under a supervisor all children are ended; otherwise all continue.
    fn drop(&mut self) {
        self.end_ready();
        if self.device.end_with_launcher {
            for child in self.children.values() {
                kill(child.pidfd.as_fd());
            }
            while let Some((key, _)) = self.children.first_key_value() {
                let key = *key;
                if let Some(child) = self.children.get(&key) {
                    end(child.pid, child.pidfd.as_fd());
                }
                self.finish_log(key);
                let Some(child) = self.children.remove(&key) else { break };
                self.give_back(child.uid, child.cgroup);
            }
        }
        let survivors = std::mem::take(&mut self.survivors);
        for survivor in survivors.into_values().filter(|survivor| is_gone(&survivor.pidfd)) {
            self.give_back(survivor.uid, survivor.cgroup);
        }
        if let Some(cgroups) = &mut self.cgroups {
            cgroups.finish();
        }
    }
}

/// Kills a child and waits until it is gone. A debugger can hold it before its end, or its status after it: such a child is left to the
/// debugger, and `false` returned. A device has the open file, too, and can make it one for which the kernel does not wait.
pub(super) fn end(process: u32, pidfd: BorrowedFd<'_>) -> bool {
    kill(pidfd);
    let gone = || -> Result<bool, Errno> {
        retry_on_intr(|| poll(&mut [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)], Some(&KILLED)))?;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        Ok(rustix::process::waitid(WaitId::PidFd(pidfd), options)?.is_some())
    };
    let is_gone = gone();
    match is_gone {
        Ok(true) => {}
        Ok(false) => tracing::warn!(process, "a killed child is still there; a debugger may hold it"),
        Err(error) => tracing::error!(process, %error, "cannot wait for a child"),
    }
    is_gone == Ok(true)
}

/// Processes of this host, by number.
pub(super) fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").inspect_err(|error| tracing::error!(%error, "cannot read /proc"));
    entries.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The user of a process, not the owner of its directory, which is root for a process that cannot be dumped.
fn uid_of(process: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::{
        fs::{OFlags, fcntl_setfl},
        process::{Pid, PidfdFlags, pidfd_open},
    };

    // Promise: F7
    #[test]
    #[cfg(not(miri))]
    fn child_is_gone_also_if_a_device_lets_the_kernel_not_wait_for_it() {
        for _ in 0..20 {
            let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("a child");
            let number = child.id();
            let pid = Pid::from_child(&child);
            let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("a pidfd");
            // A device has the same open file.
            fcntl_setfl(&pidfd, OFlags::NONBLOCK).expect("set");
            end(number, pidfd.as_fd());
            let again = child.wait().expect_err("it was waited for");
            assert_eq!(again.raw_os_error(), Some(Errno::CHILD.raw_os_error()));
        }
    }
}
