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
    control::LaunchRefusal,
    inventory::Visible,
    launch::{device_socket, stream_socket},
};
use sluice_protocol::limits;
use sluice_runtime::{
    child_log::{self, ChildLog},
    process::Identity,
};
use sluice_shared_memory::socket;

use super::spawn::{self, ChildShape, Prepared, Program};
use super::{
    Launcher,
    children::{Child, DeviceSpec},
    ending::end,
    error::RequestError,
    role::ChildRole,
};

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

/// A process that waits for its descriptors, with its resources.
#[derive(Debug)]
pub(super) struct MadeChild {
    pub(super) prepared: Prepared,
    /// The end of its log that is read here.
    log: OwnedFd,
    uid: Option<u32>,
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
    ) -> Result<StartedChild, RequestError> {
        let running = self.children.values().filter(|child| child.role == role).count();
        let (bound, beyond) = match role {
            ChildRole::Worker(_) => (limits::SESSIONS, LaunchRefusal::TooMany),
            ChildRole::Inventory => (INVENTORIES, LaunchRefusal::TooMany),
            ChildRole::Device(_) | ChildRole::Arbiter(_) | ChildRole::Probe(_) => {
                (1, LaunchRefusal::NotReaped)
            }
        };
        if running >= bound {
            return Err(beyond.into());
        }
        if matches!(role, ChildRole::Probe(unit) | ChildRole::Arbiter(unit) if unit >= self.units) {
            return Err(LaunchRefusal::OutOfRange.into());
        }
        let key = self.next_key;
        self.next_key += 1;
        let mut group = None;
        if let Some(cgroups) = &mut self.cgroups {
            let (family, member) = role.cgroup();
            let made = cgroups.make(family, member, key);
            group = Some(made.inspect_err(|error| tracing::error!(%role, %error, "cannot make a cgroup"))?);
        }
        let door = group.as_ref().map(|group| group.procs.as_fd());
        let (made, ours) = match self.execute(role, spec, visible, door) {
            Ok(started) => started,
            Err(error) => {
                self.give_back(None, group.map(|group| group.path));
                return Err(error);
            }
        };
        let MadeChild { prepared: Prepared { pid, pidfd, .. }, log, uid } = made;
        let log = ChildLog::new(log, role.label(pid), role.vm(), Instant::now());
        let (cgroup, kill) = group.map(|group| (group.path, OwnedFd::from(group.kill))).unzip();
        // The number cannot be reused before the launcher waits for the child, even if it has ended already.
        let identity = Identity::of(pid);
        let child = Child { role, pid, pidfd, uid, cgroup, log: Some(log), quiet_until: None };
        // An event for each change only: a child whose status a debugger has stays readable, and cannot be waited for.
        let changes = EventFlags::IN | EventFlags::ET;
        let watched = epoll::add(&self.events, &child.pidfd, EventData::new_u64(key), changes);
        let watched = watched.and_then(|()| self.watch_log(key, &child));
        let known = watched.and(identity.ok_or(Errno::SRCH));
        let known = known.map_err(io::Error::from).and_then(|known| Ok((known, child.pidfd.try_clone()?)));
        let (identity, pidfd) = match known {
            Ok(known) => known,
            Err(error) => {
                if end(child.pid, child.pidfd.as_fd()) {
                    self.give_back(child.uid, child.cgroup);
                }
                return Err(error.into());
            }
        };
        tracing::debug!(%role, process = child.pid, "started a child");
        self.children.insert(key, child);
        Ok(StartedChild { socket: ours, identity, pidfd, cgroup_kill: kill })
    }

    /// A user for a new process, if processes are users of their own. The inventory stays the launcher's user, to which the nodes
    /// belong by which instances are made.
    pub(super) fn take_user(&mut self, role: ChildRole) -> Result<Option<u32>, LaunchRefusal> {
        let Some(users) = &mut self.users else { return Ok(None) };
        let taken = match role {
            ChildRole::Worker(_) | ChildRole::Probe(_) => users.take(),
            ChildRole::Device(_) | ChildRole::Arbiter(_) => users.take_for_serving(),
            ChildRole::Inventory => return Ok(None),
        };
        taken.map(Some).ok_or(LaunchRefusal::NoUser)
    }

    /// Checks that processes of a VM may be started.
    pub(super) fn check_number(&self, vm: u32) -> Result<(), LaunchRefusal> {
        if self.vm_numbers.contains(vm) { Ok(()) } else { Err(LaunchRefusal::OutOfRange) }
    }

    /// The properties of a device that may be started.
    pub(super) fn device_spec(
        &self,
        vm: u32,
        scanouts: u32,
        direct: bool,
        fixed_arena: u64,
    ) -> Result<DeviceSpec, LaunchRefusal> {
        self.check_number(vm)?;
        let scanouts =
            u8::try_from(scanouts).ok().filter(|count| *count <= 1).ok_or(LaunchRefusal::OutOfRange)?;
        let fixed_arena = Some(fixed_arena).filter(|bytes| *bytes > 0);
        if fixed_arena.is_some_and(|bytes| !limits::is_fixed_arena(bytes)) {
            return Err(LaunchRefusal::OutOfRange);
        }
        Ok(DeviceSpec { direct, scanouts, fixed_arena })
    }

    /// Starts the program of a role in this cgroup. Returns the other end of its control socket, too.
    fn execute(
        &mut self,
        role: ChildRole,
        spec: DeviceSpec,
        visible: Visible,
        cgroup: Option<BorrowedFd<'_>>,
    ) -> Result<(MadeChild, OwnedFd), RequestError> {
        let shape = self.shape(role, spec, visible);
        let (ours, theirs) = socket::pair()?;
        let listeners = match role {
            ChildRole::Device(vm) => {
                let paths = [device_socket(&self.socket_dir, vm), stream_socket(&self.socket_dir, vm)];
                paths.iter().map(|path| self.listen(path)).collect::<io::Result<Vec<_>>>()?
            }
            ChildRole::Worker(_) | ChildRole::Arbiter(_) | ChildRole::Probe(_) | ChildRole::Inventory => {
                Vec::new()
            }
        };
        let descriptors: Vec<_> =
            [theirs.as_fd()].into_iter().chain(listeners.iter().map(AsFd::as_fd)).collect();
        if let Some(ready) = self.take_ready(role, &shape) {
            match ready.prepared.run(cgroup, &descriptors) {
                Ok(()) => {
                    self.want_ready(role, shape);
                    return Ok((ready, ours));
                }
                // It has ended since it was made.
                Err(error) => {
                    tracing::debug!(%role, %error, "a process that was made ahead is of no use");
                    self.discard(ready);
                }
            }
        }
        let uid = self.take_user_now(role)?;
        let made = self.make(role, &shape, uid)?;
        match made.prepared.run(cgroup, &descriptors) {
            Ok(()) => {
                self.want_ready(role, shape);
                Ok((made, ours))
            }
            Err(error) => {
                tracing::error!(%role, %error, reason = said(&made.log), "cannot start a child");
                self.discard(made);
                Err(error.into())
            }
        }
    }

    /// A user for a process that starts now. Those of processes that were made ahead come free for it, the oldest first.
    fn take_user_now(&mut self, role: ChildRole) -> Result<Option<u32>, LaunchRefusal> {
        loop {
            match self.take_user(role) {
                Err(_) if self.end_oldest_ready() => {}
                taken => return taken,
            }
        }
    }

    /// Makes a process for a role, which waits for its descriptors. Its user is given back if it cannot be made.
    pub(super) fn make(
        &mut self,
        role: ChildRole,
        shape: &ChildShape,
        uid: Option<u32>,
    ) -> Result<MadeChild, RequestError> {
        let prepared = child_log::pipe().map_err(RequestError::from).and_then(|(log, log_end)| {
            let program = self.program(role).ok_or(LaunchRefusal::OutOfRange)?;
            let prepare = || spawn::prepare(program, shape, uid, log_end);
            let prepared = match role {
                ChildRole::Worker(_) | ChildRole::Probe(_) => self.oom_order.ended_first(prepare),
                ChildRole::Device(_) | ChildRole::Arbiter(_) | ChildRole::Inventory => prepare(),
            };
            Ok((prepared?, log))
        });
        match prepared {
            Ok((prepared, log)) => Ok(MadeChild { prepared, log, uid }),
            Err(error) => {
                tracing::error!(%role, %error, "cannot make a process");
                self.give_back(uid, None);
                Err(error)
            }
        }
    }

    /// Ends a process that has executed no program. The user of one that is left to a debugger stays in use.
    pub(super) fn discard(&mut self, made: MadeChild) {
        let MadeChild { prepared: Prepared { pid, pidfd, .. }, uid, .. } = made;
        if end(pid, pidfd.as_fd()) {
            self.give_back(uid, None);
        }
    }

    /// The program of a role.
    pub(super) fn program(&self, role: ChildRole) -> Option<&Program> {
        match role {
            ChildRole::Device(_) => Some(&self.device),
            // A probe is a worker without a VM.
            ChildRole::Worker(_) | ChildRole::Probe(_) => Some(&self.worker),
            ChildRole::Arbiter(_) => self.arbiter.as_ref(),
            ChildRole::Inventory => self.inventory.as_ref(),
        }
    }

    /// The properties of a process of a role; `spec` is for a device.
    fn shape(&self, role: ChildRole, spec: DeviceSpec, visible: Visible) -> ChildShape {
        match role {
            ChildRole::Device(_) => self.device_shape(spec),
            ChildRole::Probe(_) => ChildShape {
                arguments: vec!["--probe".into()],
                silent: true,
                visible,
                tells_users_apart: false,
            },
            // Output of a guest's kernels is unbounded and goes to the guest, not to the host's log. An arbiter and an inventory run no
            // kernel of a guest.
            ChildRole::Worker(_) | ChildRole::Arbiter(_) | ChildRole::Inventory => {
                ChildShape { silent: true, visible, ..ChildShape::default() }
            }
        }
    }

    fn device_shape(&self, spec: DeviceSpec) -> ChildShape {
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
        ChildShape { arguments, tells_users_apart: spec.direct, ..ChildShape::default() }
    }

    /// Removes the sockets of a VM whose device does not run.
    pub(super) fn remove_sockets(&self, vm: u32) -> Result<(), RequestError> {
        self.check_number(vm)?;
        let is_child = self.children.values().any(|child| child.role == ChildRole::Device(vm));
        if is_child || self.cgroups.as_ref().is_some_and(|cgroups| cgroups.has_device(vm)) {
            return Err(LaunchRefusal::DeviceRuns.into());
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
