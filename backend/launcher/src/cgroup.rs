//! Cgroups of version 2 for the processes of VMs, if the operator has delegated a directory.
//!
//! ```text
//! DIRECTORY          a cgroup without processes, so that the controllers of its children can be enabled
//! ├── daemon         the launcher, and sluiced if it has started the launcher
//! ├── host
//! │   ├── arbiter-K
//! │   └── inventory-K
//! ├── vm-N           the limits of a VM
//! │   ├── device-K   its device
//! │   └── worker-K   one worker
//! └── probes
//!     └── worker-K   one probe
//! ```
//!
//! A process that has left its process group, or has forked in spite of its filter, is still in its cgroup: writing
//! `cgroup.kill` ends all of it, and takes no right to signal its user. Without a delegated directory a process is ended by its pidfd
//! alone, and nothing limits a VM.
//!
//! A limit that the host does not offer is reported once and never keeps a process from starting.
//!
//! **systemd before 254** does not know `DelegateSubgroup=` and starts each launcher in `DIRECTORY` itself, or each `sluiced` that starts
//! its own launcher, which the kernel refuses while controllers are enabled there. So the service disables them after each end of that
//! process. The next launcher, or an old one at the request of the next `sluiced`, moves all into `daemon`, enables the controllers, and
//! writes the limits of groups that continue, because a disabled controller loses its settings.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read as _, Seek as _},
    path::{Path, PathBuf},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sluice_messages::launch::VmLimits;

/// Time limit for killed processes to leave their group.
const DYING: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// The file by which a group enables controllers for the groups in it.
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";
/// The controllers of the limits.
const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "hugetlb"];

/// The group of the processes that serve all VMs.
const DAEMON: &str = "daemon";
/// Parts of the names of groups, before the number of the VM or of the process.
const VM: &str = "vm-";
const PROBES: &str = "probes";
const HOST: &str = "host";
const DEVICE: &str = "device-";
const WORKER: &str = "worker-";
const ARBITER: &str = "arbiter-";
const INVENTORY: &str = "inventory-";
/// A worker's group in earlier versions was `vm-N-worker-K`.
const FLAT_WORKER: &str = "-worker-";

/// Processor time of the processes that serve a VM, or all VMs, relative to the usual 100 of each group beside them: a VM's
/// workers must not delay their device, nor VMs the arbiters.
const SERVING_WEIGHT: u32 = 1000;
/// The variable with the directory whose controllers the service disables after each end of its process.
const RELEASED: &str = "SLUICE_RELEASED_CGROUP";
/// Attempts to move all processes out of the delegated directory, of which some may fork meanwhile.
const MOVES: usize = 100;

/// The processes that share limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// The device and the workers of a VM.
    Vm(u32),
    /// The probes of all units, which run the driver but no code of a guest. They have the limits of one VM.
    Probes,
    /// The processes that serve all VMs.
    Host,
}

/// The kind of process for which a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Member {
    Device,
    /// A worker or a probe.
    Worker,
    Arbiter,
    Inventory,
}

impl Member {
    const ALL: [Self; 4] = [Self::Device, Self::Worker, Self::Arbiter, Self::Inventory];

    /// The part of the name of its group before the number.
    const fn prefix(self) -> &'static str {
        match self {
            Self::Device => DEVICE,
            Self::Worker => WORKER,
            Self::Arbiter => ARBITER,
            Self::Inventory => INVENTORY,
        }
    }
}

/// A new group of one process.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) path: PathBuf,
    /// Its open `cgroup.procs`. A process that writes `0` to this file joins the group: a child does so before exec, so it and
    /// its children are never outside.
    pub(crate) procs: fs::File,
    /// Its open `cgroup.kill`.
    pub(crate) kill: fs::File,
}

/// The delegated directory and its state.
#[derive(Debug)]
pub(crate) struct Cgroups {
    directory: PathBuf,
    limits: VmLimits,
    /// Bytes of memory of each VM; `None` if they depend on the memory of the host, and that is unknown.
    memory: Option<u64>,
    /// Controllers that limit the groups.
    controllers: BTreeSet<&'static str>,
    /// Groups of families that have their limits.
    prepared: BTreeSet<PathBuf>,
    /// Groups that still had a dying process at their removal.
    leftover: Vec<PathBuf>,
    /// Control files that could not be written, and the values, which was reported.
    reported: BTreeSet<String>,
}

impl Cgroups {
    /// Takes a directory, if groups can be created and killed in it, and enables the controllers of its groups. Limits of an earlier
    /// launcher stay unchanged if they are in effect; also returned is a number beyond those of its groups.
    pub(crate) fn open(directory: &Path, limits: VmLimits, memory: Option<u64>) -> io::Result<(Self, u64)> {
        // The root of all cgroups, which contains the processes of the whole host, has no such file.
        fs::metadata(directory.join("cgroup.events")).map_err(|error| {
            io::Error::new(error.kind(), format!("it is no cgroup of version 2 below the root: {error}"))
        })?;
        let probe = directory.join(format!("probe-{}", std::process::id()));
        fs::create_dir(&probe)?;
        let kill = fs::write(probe.join("cgroup.kill"), "1");
        fs::remove_dir(&probe)?;
        kill?;
        let mut cgroups = Self::new(directory, limits, memory);
        let last = cgroups.left()?.iter().map(|left| left.number).max();
        cgroups.settle();
        Ok((cgroups, last.map_or(0, |last| last.saturating_add(1))))
    }

    fn new(directory: &Path, limits: VmLimits, memory: Option<u64>) -> Self {
        Self {
            directory: directory.to_owned(),
            limits,
            memory,
            controllers: BTreeSet::new(),
            prepared: BTreeSet::new(),
            leftover: Vec::new(),
            reported: BTreeSet::new(),
        }
    }

    /// Enables the controllers, at the start of each `sluiced` that this launcher serves. Limits that are in effect stay unchanged.
    pub(crate) fn settle(&mut self) {
        if self.vacate() {
            self.enable();
        }
    }

    /// Moves all processes of the delegated directory into the group of the daemon. False, without effect, if systemd started this
    /// process in the directory itself, and its unit does not disable the controllers: systemd would start the next daemon there,
    /// too, which the kernel refuses while they are enabled.
    fn vacate(&self) -> bool {
        let processes = self.directory.join("cgroup.procs");
        let daemon = self.directory.join(DAEMON);
        for _ in 0..MOVES {
            // A process that is not visible from here has the number 0, which would mean this process.
            let found: Vec<u32> =
                members(&self.directory).into_iter().filter(|process| *process != 0).collect();
            if found.is_empty() {
                return true;
            }
            if found.contains(&std::process::id())
                && std::env::var_os("INVOCATION_ID").is_some()
                && std::env::var_os(RELEASED).is_none_or(|released| Path::new(&released) != self.directory)
            {
                tracing::warn!(
                    path = %self.directory.display(),
                    "VMs have no limits: the service needs DelegateSubgroup=daemon, and before systemd 254 also \
                     SLUICE_RELEASED_CGROUP= and ExecStopPost= of the packaged unit, with this path"
                );
                return false;
            }
            match fs::create_dir(&daemon) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    tracing::warn!(path = %daemon.display(), %error, "cannot make a cgroup for the daemon");
                    return false;
                }
                _ => {}
            }
            for process in found {
                // A process that has ended meanwhile is in no group.
                _ = fs::write(daemon.join("cgroup.procs"), process.to_string());
            }
        }
        tracing::warn!(path = %processes.display(), "VMs have no limits: processes stay in the cgroup directory");
        false
    }

    /// Enables the controllers that the host offers, and reports the others once. Groups that had no limits of one get all of theirs.
    fn enable(&mut self) {
        let offered = fs::read_to_string(self.directory.join("cgroup.controllers")).unwrap_or_default();
        let offered: BTreeSet<&str> = offered.split_whitespace().collect();
        let (present, missing): (Vec<&str>, Vec<&str>) =
            CONTROLLERS.iter().partition(|controller| offered.contains(**controller));
        let missing = missing.join(" ");
        if !missing.is_empty() && self.reported.insert(format!("cgroup.controllers {missing}")) {
            tracing::warn!(
                path = %self.directory.display(),
                controllers = missing,
                "the cgroup directory has no such controllers; VMs have no limits of them"
            );
        }
        self.controllers = present.into_iter().collect();
        let before = fs::read_to_string(self.directory.join(SUBTREE_CONTROL)).unwrap_or_default();
        self.controllers = self.write_controllers(&self.directory.clone());
        let before: BTreeSet<&str> = before.split_whitespace().collect();
        self.write_if("cpu", &self.directory.join(DAEMON), "cpu.weight", SERVING_WEIGHT);
        if !self.controllers.is_subset(&before)
            && let Err(error) = self.limit_all()
        {
            tracing::warn!(path = %self.directory.display(), %error, "cannot limit the cgroups that continue");
        }
    }

    /// Writes the limits of all present groups.
    fn limit_all(&mut self) -> io::Result<()> {
        for (family, name) in groups_in(&self.directory)? {
            if let Some(kind) = family_of(&name) {
                self.limit_family(&family, kind)?;
                for (path, name) in groups_in(&family)? {
                    if let Some((member, _)) = member_of(&name) {
                        self.limit_member(&path, member);
                    }
                }
            }
        }
        Ok(())
    }

    /// Lets the groups in `group` have limits. Returns the controllers for which this succeeded.
    fn write_controllers(&mut self, group: &Path) -> BTreeSet<&'static str> {
        let mut enabled = self.controllers.clone();
        let all: Vec<String> = enabled.iter().map(|controller| format!("+{controller}")).collect();
        if !all.is_empty() && fs::write(group.join(SUBTREE_CONTROL), all.join(" ")).is_err() {
            // The kernel takes all or none of them: one that a host cannot enable costs no other.
            enabled.retain(|controller| self.write(group, SUBTREE_CONTROL, &format!("+{controller}")));
        }
        enabled
    }

    /// Writes a limit of a controller, if the host offers it and the group exists.
    fn write_if(&mut self, controller: &str, group: &Path, file: &str, value: impl ToString) {
        if self.controllers.contains(controller) && group.exists() {
            self.write(group, file, &value.to_string());
        }
    }

    fn write(&mut self, group: &Path, file: &str, value: &str) -> bool {
        let written = fs::write(group.join(file), value);
        if let Err(error) = &written
            && self.reported.insert(format!("{file} {value}"))
        {
            tracing::warn!(path = %group.display(), file, value, %error, "cannot write a limit of a cgroup");
        }
        written.is_ok()
    }

    /// Creates the group of a family, if it does not exist, and writes its limits, if this launcher has not.
    fn prepare(&mut self, family: Family) -> io::Result<PathBuf> {
        let group = self.directory.join(match family {
            Family::Vm(vm) => format!("{VM}{vm}"),
            Family::Probes => PROBES.to_owned(),
            Family::Host => HOST.to_owned(),
        });
        let exists = match fs::create_dir(&group) {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => true,
            Err(error) => return Err(error),
        };
        if self.prepared.insert(group.clone()) || !exists {
            self.limit_family(&group, family)?;
        }
        Ok(group)
    }

    /// Writes the limits of a family, and lets the groups in it have limits.
    fn limit_family(&mut self, group: &Path, family: Family) -> io::Result<()> {
        if family == Family::Host {
            self.write_if("cpu", group, "cpu.weight", SERVING_WEIGHT);
            return Ok(());
        }
        let VmLimits { swap, huge_pages, tasks, cpu_weight, .. } = self.limits;
        if let Some(memory) = self.memory {
            self.write_if("memory", group, "memory.max", memory);
        }
        // A host without swap has no such file.
        if group.join("memory.swap.max").exists() {
            self.write_if("memory", group, "memory.swap.max", swap);
        }
        self.write_if("pids", group, "pids.max", tasks);
        self.write_if("cpu", group, "cpu.weight", cpu_weight);
        for file in huge_page_limits(group)? {
            self.write_if("hugetlb", group, &file, huge_pages);
        }
        self.write_controllers(group);
        Ok(())
    }

    /// Writes the limits of one process.
    fn limit_member(&mut self, group: &Path, member: Member) {
        match member {
            Member::Device => self.write_if("cpu", group, "cpu.weight", SERVING_WEIGHT),
            Member::Worker => {
                // A worker is ended as a whole, and others of its VM go on.
                self.write_if("memory", group, "memory.oom.group", 1);
                self.write_if("pids", group, "pids.max", self.limits.worker_tasks);
            }
            Member::Arbiter | Member::Inventory => {}
        }
    }

    /// Creates the group of a process, from a unique number.
    pub(crate) fn make(&mut self, family: Family, member: Member, key: u64) -> io::Result<Group> {
        let parent = self.prepare(family)?;
        let path = parent.join(format!("{}{key}", member.prefix()));
        // An existing group may belong to a living process: it is never joined and never ended here.
        fs::create_dir(&path)?;
        self.limit_member(&path, member);
        let open = |file: &str| fs::File::create(path.join(file));
        match open("cgroup.procs").and_then(|procs| Ok((procs, open("cgroup.kill")?))) {
            Ok((procs, kill)) => Ok(Group { path, procs, kill }),
            Err(error) => {
                self.end(path);
                Err(error)
            }
        }
    }

    /// Present groups of one process each.
    fn left(&self) -> io::Result<Vec<LeftGroup>> {
        let mut found = Vec::new();
        for (path, name) in groups_in(&self.directory)? {
            if let Some(number) = flat_number(&name) {
                found.push(LeftGroup { path, member: Member::Worker, number });
            } else if family_of(&name).is_some() {
                for (path, name) in groups_in(&path)? {
                    if let Some((member, number)) = member_of(&name) {
                        found.push(LeftGroup { path, member, number });
                    }
                }
            }
        }
        Ok(found)
    }

    /// Kills the processes in all groups of one process.
    pub(crate) fn end_all(&mut self) -> io::Result<()> {
        for LeftGroup { path, .. } in self.left()? {
            // One that was removed meanwhile has no process.
            match fs::write(path.join("cgroup.kill"), "1") {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// True if a group of a VM's device has a process.
    pub(crate) fn has_device(&self, vm: u32) -> bool {
        let groups = groups_in(&self.directory.join(format!("{VM}{vm}"))).unwrap_or_default();
        let of_device = |name: &str| member_of(name).is_some_and(|(member, _)| member == Member::Device);
        groups.iter().any(|(path, name)| of_device(name) && !members(path).is_empty())
    }

    /// The group of a process, if it is in one of these, and true for a worker of a VM.
    pub(crate) fn group_of(&self, process: u32) -> Option<(PathBuf, bool)> {
        let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
        let path = Path::new(groups.lines().find_map(|line| line.strip_prefix("0::"))?);
        let (name, family) = (path.file_name()?.to_str()?, path.parent()?.file_name()?.to_str()?);
        let (kind, (member, _)) = (family_of(family)?, member_of(name)?);
        let group = self.directory.join(family).join(name);
        // A process of another directory may be in a group of the same names.
        let is_there = members(&group).contains(&process);
        is_there.then_some((group, matches!((kind, member), (Family::Vm(_), Member::Worker))))
    }

    /// Ends the workers' groups of an earlier launcher, except those with a process in `living`; these are returned by their processes.
    /// Groups of other processes are removed if they are empty, and else returned, too. `ours` are groups of this launcher.
    pub(crate) fn sweep(
        &mut self,
        ours: &BTreeSet<&Path>,
        living: &BTreeSet<u32>,
    ) -> io::Result<BTreeMap<u32, PathBuf>> {
        let mut kept = BTreeMap::new();
        for left in self.left()?.into_iter().filter(|left| !ours.contains(left.path.as_path())) {
            let continues = |process: &u32| left.member != Member::Worker || living.contains(process);
            match members(&left.path).into_iter().find(continues) {
                Some(process) => _ = kept.insert(process, left.path),
                None => self.end(left.path),
            }
        }
        // A launcher may have ended before it made or after it removed the last group of a family.
        for (path, name) in groups_in(&self.directory)? {
            if family_of(&name).is_some() {
                self.remove_family(&path);
            }
        }
        Ok(kept)
    }

    /// Kills all processes of a group and removes it.
    pub(crate) fn end(&mut self, group: PathBuf) {
        self.leftover.push(group);
        for group in std::mem::take(&mut self.leftover) {
            match self.remove(&group) {
                Ok(()) => {}
                Err(_) => {
                    // Busy: a process is in it. The removal is tried again when the next group ends.
                    if let Err(error) = fs::write(group.join("cgroup.kill"), "1") {
                        tracing::warn!(path = %group.display(), %error, "cannot kill the processes of a cgroup");
                    }
                    self.leftover.push(group);
                }
            }
        }
    }

    /// Removes a group without processes, and with the last group of a family that of the family.
    fn remove(&mut self, group: &Path) -> io::Result<()> {
        match fs::remove_dir(group) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if let Some(parent) = group.parent().filter(|parent| *parent != self.directory) {
            self.remove_family(parent);
        }
        Ok(())
    }

    /// Removes the group of a family, if it is empty.
    fn remove_family(&mut self, group: &Path) {
        // Otherwise it has another group, and is removed with that.
        if fs::remove_dir(group).is_ok() {
            self.prepared.remove(group);
        }
    }

    /// Removes ended groups that still exist, once the last process in each is gone.
    pub(crate) fn finish(&mut self) {
        for group in std::mem::take(&mut self.leftover) {
            if let Err(error) = wait_until_empty(&group).and_then(|()| self.remove(&group)) {
                tracing::warn!(path = %group.display(), %error, "cannot remove a cgroup");
            }
        }
    }
}

/// A group of one process.
#[derive(Debug)]
struct LeftGroup {
    path: PathBuf,
    member: Member,
    number: u64,
}

/// Groups in a group, with their names.
fn groups_in(group: &Path) -> io::Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push((entry.path(), entry.file_name().to_string_lossy().into_owned()));
        }
    }
    Ok(found)
}

/// Processes of a group itself.
fn members(group: &Path) -> Vec<u32> {
    let list = fs::read_to_string(group.join("cgroup.procs"))
        .inspect_err(|error| tracing::warn!(path = %group.display(), %error, "cannot read a cgroup"));
    list.unwrap_or_default().split_whitespace().filter_map(|process| process.parse().ok()).collect()
}

/// The family in the name of a group.
fn family_of(name: &str) -> Option<Family> {
    match name {
        PROBES => return Some(Family::Probes),
        HOST => return Some(Family::Host),
        _ => {}
    }
    name.strip_prefix(VM)?.parse().ok().map(Family::Vm)
}

/// The kind and the number in the name of a group in that of a family.
fn member_of(name: &str) -> Option<(Member, u64)> {
    Member::ALL
        .into_iter()
        .find_map(|member| Some((member, name.strip_prefix(member.prefix())?.parse().ok()?)))
}

/// The number in the name of a worker's group in earlier versions.
fn flat_number(name: &str) -> Option<u64> {
    let (vm, worker) = name.strip_prefix(VM)?.split_once(FLAT_WORKER)?;
    vm.parse::<u32>().ok()?;
    worker.parse().ok()
}

/// The limits of a group for huge pages, of each size, and of pages that are reserved.
fn huge_page_limits(group: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(group)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with("hugetlb.") && name.ends_with(".max") {
            found.push(name);
        }
    }
    Ok(found)
}

/// Bytes of memory of a VM; `None`, with a line of log, if they depend on the memory of the host, and that is unknown.
pub(crate) fn memory_of_vm(limits: VmLimits) -> Option<u64> {
    limits.memory.or_else(|| match memory_of_host() {
        Ok(bytes) => Some(bytes / 2),
        Err(error) => {
            tracing::warn!(%error, "the memory of the host is unknown; VMs have no limit of memory");
            None
        }
    })
}

/// Bytes of the host's memory.
fn memory_of_host() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    let kibibytes = total.and_then(|total| total.parse::<u64>().ok());
    kibibytes.map(|total| total << 10).ok_or_else(|| io::Error::other("/proc/meminfo names no total"))
}

/// Waits until a killed group has no process.
fn wait_until_empty(group: &Path) -> io::Result<()> {
    let mut events = match fs::File::open(group.join("cgroup.events")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        events => events?,
    };
    loop {
        let mut text = String::new();
        events.rewind()?;
        events.read_to_string(&mut text)?;
        if text.lines().any(|line| line == "populated 0") {
            return Ok(());
        }
        // A change of `populated` before this poll is not lost: the file reports changes since it was read.
        if poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&DYING))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

#[cfg(test)]
mod tests;
