//! The start of children: devices, workers, probes, arbiters and the inventory.

use std::{
    ffi::OsString,
    fs::Permissions,
    io,
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
    path::Path,
    time::Instant,
};

use rustix::{
    event::epoll::{self, EventData, EventFlags},
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::Mode,
    io::Errno,
};
use sluice_messages::{
    inventory::Visible,
    launch::{device_socket, stream_socket},
};
use sluice_protocol::limits;
use sluice_runtime::{
    child_log::{self, ChildLog},
    process::Identity,
};
use sluice_shared_memory::socket;

use super::spawn::{self, Given, Program};
use super::{Child, DeviceSpec, Launcher, ending::end, oom, role::ChildRole};

/// A child that was just started.
#[derive(Debug)]
pub(super) struct StartedChild {
    /// The other end of its control socket.
    pub(super) socket: OwnedFd,
    pub(super) identity: Identity,
    pub(super) pidfd: OwnedFd,
    /// The open `cgroup.kill` of its cgroup, if it has one.
    pub(super) cgroup_kill: Option<OwnedFd>,
}

/// Largest number of inventories: one that hangs in the kernel cannot be killed, and must not keep the next from starting.
const INVENTORIES: usize = 4;

impl Launcher {
    /// Starts a process and adds it to the children; `spec` is for a device.
    pub(super) fn start(
        &mut self,
        role: ChildRole,
        spec: DeviceSpec,
        visible: Visible,
    ) -> io::Result<StartedChild> {
        let running = self.children.values().filter(|child| child.role == role).count();
        let bound = match role {
            ChildRole::Worker(_) => limits::SESSIONS,
            ChildRole::Inventory => INVENTORIES,
            ChildRole::Device(_) | ChildRole::Arbiter(_) | ChildRole::Probe(_) => 1,
        };
        if running >= bound {
            return Err(Errno::AGAIN.into());
        }
        if matches!(role, ChildRole::Probe(unit) | ChildRole::Arbiter(unit) if unit >= self.units) {
            return Err(Errno::INVAL.into());
        }
        let (ours, theirs) = socket::pair()?;
        let (log, log_end) = child_log::pipe()?;
        let key = self.next_key;
        self.next_key += 1;
        let mut group = None;
        if let Some(cgroups) = &mut self.cgroups {
            let (family, member) = role.cgroup();
            let made = cgroups.make(family, member, key);
            group = Some(made.inspect_err(|error| tracing::error!(%role, %error, "cannot make a cgroup"))?);
        }
        let door = group.as_ref().map(|group| group.procs.as_fd());
        let uid = match self.take_user(role) {
            Ok(uid) => uid,
            Err(error) => {
                self.give_back(None, group.map(|group| group.path));
                return Err(error.into());
            }
        };
        let started = match role {
            ChildRole::Device(vm) => self.start_device(vm, spec, uid, theirs, (door, log_end)),
            // A probe is a worker without a VM.
            ChildRole::Worker(_) | ChildRole::Probe(_) => {
                let probe = ["--probe".into()];
                let given = Given {
                    arguments: if matches!(role, ChildRole::Probe(_)) { &probe } else { &[] },
                    // Output of kernels is unbounded and goes to the guest, not to the host's log.
                    silent: true,
                    visible,
                    uid,
                    cgroup: door,
                    descriptors: &[theirs.as_fd()],
                    ..Given::default()
                };
                oom::ended_first(|| spawn::start(&self.reserved, &self.worker, &given, log_end))
            }
            ChildRole::Arbiter(_) => {
                self.start_plain(self.arbiter.as_ref(), visible, uid, theirs, (door, log_end))
            }
            ChildRole::Inventory => {
                self.start_plain(self.inventory.as_ref(), visible, uid, theirs, (door, log_end))
            }
        };
        let started = match started {
            Ok(started) => started,
            Err(error) => {
                tracing::error!(%role, %error, reason = said(&log), "cannot start a child");
                self.give_back(uid, group.map(|group| group.path));
                return Err(error);
            }
        };
        let spawn::Started { pid, pidfd } = started;
        let log = ChildLog::new(log, role.label(pid), role.vm(), Instant::now());
        let (cgroup, kill) = group.map(|group| (group.path, OwnedFd::from(group.kill))).unzip();
        // The number cannot be reused before the launcher waits for the child, even if it has ended already.
        let identity = Identity::of(pid);
        let child = Child { role, pid, pidfd, uid, cgroup, log: Some(log), quiet_until: None };
        let watched = epoll::add(&self.events, &child.pidfd, EventData::new_u64(key), EventFlags::IN);
        let watched = watched.and_then(|()| self.watch_log(key, &child));
        let known = watched.and(identity.ok_or(Errno::SRCH));
        let known = known.map_err(io::Error::from).and_then(|known| Ok((known, child.pidfd.try_clone()?)));
        let (identity, pidfd) = match known {
            Ok(known) => known,
            Err(error) => {
                end(&child);
                self.give_back(child.uid, child.cgroup);
                return Err(error);
            }
        };
        tracing::debug!(%role, process = child.pid, "started a child");
        self.children.insert(key, child);
        Ok(StartedChild { socket: ours, identity, pidfd, cgroup_kill: kill })
    }

    /// A user for a new process, if processes are users of their own. The inventory stays the launcher's user, to which the nodes
    /// belong by which instances are made.
    fn take_user(&mut self, role: ChildRole) -> Result<Option<u32>, Errno> {
        let Some(users) = &mut self.users else { return Ok(None) };
        match role {
            ChildRole::Worker(_) | ChildRole::Probe(_) => users.take().ok_or(Errno::AGAIN).map(Some),
            ChildRole::Device(_) | ChildRole::Arbiter(_) => {
                users.take_for_serving().ok_or(Errno::AGAIN).map(Some)
            }
            ChildRole::Inventory => Ok(None),
        }
    }

    /// Checks that processes of a VM may be started.
    pub(super) fn check_number(&self, vm: u32) -> Result<(), Errno> {
        if self.vm_numbers.contains(vm) { Ok(()) } else { Err(Errno::INVAL) }
    }

    /// The properties of a device that may be started.
    pub(super) fn device_spec(
        &self,
        vm: u32,
        scanouts: u32,
        direct: bool,
        fixed_arena: u64,
    ) -> Result<DeviceSpec, Errno> {
        self.check_number(vm)?;
        let scanouts = u8::try_from(scanouts).ok().filter(|count| *count <= 1).ok_or(Errno::INVAL)?;
        let fixed_arena = Some(fixed_arena).filter(|bytes| *bytes > 0);
        if fixed_arena.is_some_and(|bytes| !limits::is_fixed_arena(bytes)) {
            return Err(Errno::INVAL);
        }
        Ok(DeviceSpec { direct, scanouts, fixed_arena })
    }

    fn start_device(
        &self,
        vm: u32,
        spec: DeviceSpec,
        uid: Option<u32>,
        control: OwnedFd,
        (cgroup, log): (Option<BorrowedFd<'_>>, OwnedFd),
    ) -> io::Result<spawn::Started> {
        let listener = self.listen(&device_socket(&self.socket_dir, vm))?;
        let streams = self.listen(&stream_socket(&self.socket_dir, vm))?;
        let mut arguments: Vec<OsString> = vec!["--fd".into(), (spawn::FIRST + 1).to_string().into()];
        arguments.extend(["--stream-fd".into(), (spawn::FIRST + 2).to_string().into()]);
        arguments.extend(["--scanouts".into(), spec.scanouts.to_string().into()]);
        if let Some(bytes) = spec.fixed_arena {
            arguments.extend(["--fixed-arena".into(), bytes.to_string().into()]);
        }
        if spec.direct {
            // Each program seals its own memory.
            arguments.push("--direct".into());
        } else if self.trust_vmm_memory {
            arguments.push("--trust-memory".into());
        }
        let given = Given {
            arguments: &arguments,
            uid,
            tells_users_apart: spec.direct,
            cgroup,
            descriptors: &[control.as_fd(), listener.as_fd(), streams.as_fd()],
            ..Given::default()
        };
        spawn::start(&self.reserved, &self.device, &given, log)
    }

    /// Starts a program of the host's own that needs only its control socket. It runs no kernel of a guest, so its driver's
    /// output is discarded.
    fn start_plain(
        &self,
        program: Option<&Program>,
        visible: Visible,
        uid: Option<u32>,
        control: OwnedFd,
        (cgroup, log): (Option<BorrowedFd<'_>>, OwnedFd),
    ) -> io::Result<spawn::Started> {
        let program = program.ok_or(Errno::INVAL)?;
        let descriptors = &[control.as_fd()];
        let given = Given { silent: true, visible, uid, cgroup, descriptors, ..Given::default() };
        spawn::start(&self.reserved, program, &given, log)
    }

    /// Removes the sockets of a VM whose device does not run.
    pub(super) fn remove_sockets(&self, vm: u32) -> io::Result<()> {
        self.check_number(vm)?;
        let is_child = self.children.values().any(|child| child.role == ChildRole::Device(vm));
        if is_child || self.cgroups.as_ref().is_some_and(|cgroups| cgroups.has_device(vm)) {
            return Err(Errno::BUSY.into());
        }
        for path in [device_socket(&self.socket_dir, vm), stream_socket(&self.socket_dir, vm)] {
            remove(&path)?;
        }
        Ok(())
    }

    /// Creates a socket for a device to serve. It is bound and listening before the device runs, so a front-end that connects early
    /// waits in the queue, and the device needs no access to the directory.
    fn listen(&self, path: &Path) -> io::Result<OwnedFd> {
        remove(path)?;
        // It belongs to the launcher's user until its group is set: no other user connects in between.
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let listener = UnixListener::bind(path);
        rustix::process::umask(before);
        let listener = listener.and_then(|listener| {
            if self.socket_gid.is_some() {
                std::os::unix::fs::lchown(path, None, self.socket_gid)?;
            }
            std::fs::set_permissions(path, Permissions::from_mode(self.socket_mode.0))?;
            Ok(OwnedFd::from(listener))
        });
        listener.inspect_err(|error| {
            tracing::error!(path = %path.display(), gid = self.socket_gid, %error, "cannot listen for front-ends");
        })
    }
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The text that a child that could not be started has left in its log.
fn said(log: &OwnedFd) -> String {
    let mut bytes = [0; 256];
    // Without a text, or if it cannot be read, the error's number says the rest.
    let length = rustix::io::read(log, &mut bytes[..]).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..length]).trim().to_owned()
}
