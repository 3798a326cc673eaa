//! The launcher: the one process that forks.
//!
//! It owns the means to start devices, workers, arbiters and the inventory (privilege, paths, user ids, cgroups), all from its
//! own command line, and waits for every process it started. It must never parse anything but fixed-size messages, nor take a
//! path, a user, a VM or a unit from one; a message it does not understand is answered with an error and has no other effect.
//!
//! One thread, one epoll set: the control socket to `sluiced`, a pidfd and a log ([`sluice_runtime::child_log`]) per child, and
//! under a supervisor a lifeline.
//!
//! **When the launcher dies.** Devices and workers must outlive it and `sluiced`, so that both can be restarted under a running
//! VM: children carry no parent-death signal, since that signal fires exactly when re-adoption would be needed. They have other
//! safety nets: a worker ends when its control socket to the device closes. The next launcher receives the list of workers that
//! go on: it reuses neither their users nor their groups, and ends any other process that it finds in its groups. Under a
//! supervisor (`sluice run`, `sluice host`) there is nothing to re-adopt and everything has to be gone with it: there, and only
//! there, children do carry the signal, and the launcher outlives a killed `sluiced` until the supervisor's end closes the
//! lifeline.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs::Permissions,
    io,
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
    path::{Path, PathBuf},
    time::Instant,
};

use rustix::{
    buffer::spare_capacity,
    event::{
        Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
    },
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::Mode,
    io::Errno,
    process::{Resource, Rlimit, WaitId, WaitIdOptions},
    thread::CapabilitySet,
};
use sluice_messages::{
    channel::{Channel, ReceiveError, Received},
    control::{self, FromLauncher, ToLauncher},
    inventory::Visible,
    launch::{NumberRange, SocketMode, Vm, device_socket, stream_socket},
};
use sluice_protocol::limits;
use sluice_runtime::{
    child_log::{self, ChildLog, GuestLimits, Next},
    process::{Identity, kill},
    rate::TokenBucket,
};
use sluice_shared_memory::socket;

use cgroup::Cgroups;
use spawn::{Given, Program, Reserved};

mod cgroup;
mod spawn;

/// Descriptors a device may have: five per session, and memory regions, resources and queues.
const DEVICE_DESCRIPTORS: u64 = 8192;
/// Descriptors an arbiter may have: three per worker of its unit, for as many VMs as one shares out among all their sessions; chunks
/// take none.
const ARBITER_DESCRIPTORS: u64 = 3 * limits::SESSIONS as u64 * 32;
/// Descriptors the inventory may have.
const INVENTORY_DESCRIPTORS: u64 = 1024;
/// Inventories at once: one that hangs in the kernel cannot be killed, and must not keep the next from starting.
const INVENTORIES: usize = 4;
/// Descriptors a worker may have; drivers take a few hundred.
const WORKER_DESCRIPTORS: u64 = 4096;
/// What a device of root may do as such: kill workers, which are other users, and have more descriptors on their way to
/// workers than one user may, who is the same for the devices of all VMs.
const DEVICE_CAPABILITIES: CapabilitySet = CapabilitySet::KILL.union(CapabilitySet::SYS_RESOURCE);
/// What an arbiter of root may do as such: end workers, which are other users.
const ARBITER_CAPABILITIES: CapabilitySet = CapabilitySet::KILL.union(CapabilitySet::SYS_RESOURCE);
/// Ends of children that are told of at once, and per second in the long run: a guest can end its workers at will.
const ENDS: (u32, f64) = (10, 0.2);
/// Variables of the launcher's environment that its children get: names, or beginnings of names ending in `_`.
const ENVIRONMENT: [&str; 6] =
    ["SLUICE_LOG", "SLUICE_SECCOMP", "SLUICE_DEVICE_MODE", "SLUICE_SOFTGPU_", "CUDA_", "RUST_BACKTRACE"];
/// Events taken from the kernel at once.
const EVENTS: usize = 1024;

/// Command line of the launcher.
#[derive(Debug, clap::Parser)]
#[command(
    name = "sluice-launcher",
    version,
    about = "Starts the processes of Sluice for sluiced. Do not run it by hand.",
    long_about = "Starts the processes of Sluice for sluiced, which is at the other end of the SEQPACKET socket on \
                  standard input. Do not run it by hand."
)]
pub struct Arguments {
    /// Path of the device program
    #[arg(long, value_name = "PATH")]
    pub device: PathBuf,
    /// Path of the worker program
    #[arg(long, value_name = "PATH")]
    pub worker: PathBuf,
    /// Path of the arbiter program
    #[arg(long, value_name = "PATH")]
    pub arbiter: Option<PathBuf>,
    /// Path of the inventory program
    #[arg(long, value_name = "PATH")]
    pub inventory: Option<PathBuf>,
    /// Management library that the inventory loads
    #[arg(long, value_name = "PATH", requires = "inventory")]
    pub nvml: Option<PathBuf>,
    /// Number of units, counted from 0, whose arbiter may be started
    #[arg(long, value_name = "N", default_value_t = 0, requires = "arbiter")]
    pub units: u32,
    /// Directory for the sockets of devices
    #[arg(long, value_name = "DIR")]
    pub socket_dir: PathBuf,
    /// Group of the sockets, if not the launcher's
    #[arg(long, value_name = "GID")]
    pub socket_gid: Option<u32>,
    /// Mode of the sockets
    #[arg(long, value_name = "MODE", default_value_t)]
    pub socket_mode: SocketMode,
    /// Let devices accept memory that their VMM can shrink
    #[arg(long)]
    pub trust_vmm_memory: bool,
    /// VM that may be started; repeatable
    #[arg(long = "vm", value_name = "ID[,direct][,scanouts=0|1]")]
    pub vms: Vec<Vm>,
    /// Numbers of further VMs that may be started
    #[arg(long, value_name = "FIRST:COUNT")]
    pub vm_numbers: Option<NumberRange>,
    /// User ids for workers
    #[arg(long, value_name = "FIRST:COUNT")]
    pub worker_uids: Option<NumberRange>,
    /// Delegated cgroup v2 directory
    #[arg(long, value_name = "DIR")]
    pub cgroup: Option<PathBuf>,
    /// Message version of sluiced; any other than the launcher's own is refused
    #[arg(long, value_name = "N", value_parser = control::version_of_option)]
    pub messages: Option<u32>,
    /// Treat standard output as the lifeline of a supervisor: when it closes, everything ends
    #[arg(long)]
    pub supervised: bool,
}

/// The launcher cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    /// The setup failed.
    #[error("cannot set up the launcher: {0}")]
    SetUp(#[source] io::Error),
    /// The kernel refuses to deliver events.
    #[error("cannot wait for events: {0}")]
    Wait(#[source] Errno),
    /// The socket to `sluiced` is broken.
    #[error("cannot read requests: {0}")]
    Receive(#[source] Errno),
}

const CONTROL: u64 = 0;
const LIFELINE: u64 = 1;
const FIRST_CHILD: u64 = 2;
/// With the key of a child: its log.
const LOG: u64 = 1 << 63;

/// What a child is, and for which VM or unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Device(u32),
    Worker(u32),
    Arbiter(u32),
    Probe(u32),
    Inventory,
}

impl std::fmt::Display for Role {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Role::Device(vm) => write!(formatter, "the device of VM {vm}"),
            Role::Worker(vm) => write!(formatter, "a worker of VM {vm}"),
            Role::Arbiter(unit) => write!(formatter, "the arbiter of unit {unit}"),
            Role::Probe(unit) => write!(formatter, "a probe of unit {unit}"),
            Role::Inventory => formatter.write_str("the inventory"),
        }
    }
}

impl Role {
    /// What lines of its log begin with.
    fn label(self, process: u32) -> String {
        match self {
            Role::Device(vm) => format!("device vm={vm} pid={process}"),
            Role::Worker(vm) => format!("worker vm={vm} pid={process}"),
            Role::Arbiter(unit) => format!("arbiter unit={unit} pid={process}"),
            Role::Probe(unit) => format!("probe unit={unit} pid={process}"),
            Role::Inventory => format!("inventory pid={process}"),
        }
    }

    /// The VM whose guest reaches it.
    fn vm(self) -> Option<u32> {
        match self {
            Role::Device(vm) | Role::Worker(vm) => Some(vm),
            Role::Arbiter(_) | Role::Probe(_) | Role::Inventory => None,
        }
    }
}

#[derive(Debug)]
struct Child {
    role: Role,
    pid: u32,
    pidfd: OwnedFd,
    uid: Option<u32>,
    cgroup: Option<PathBuf>,
    /// None where it has closed its own end.
    log: Option<ChildLog>,
    /// When its log is read again, if not as soon as there is something.
    quiet_until: Option<Instant>,
}

/// A worker of an earlier launcher that goes on, or another process that has a user for workers.
#[derive(Debug)]
struct Survivor {
    process: u32,
    pidfd: OwnedFd,
    uid: Option<u32>,
    cgroup: Option<PathBuf>,
}

/// The launcher's state.
#[derive(Debug)]
pub struct Launcher {
    reserved: Reserved,
    socket_dir: PathBuf,
    socket_gid: Option<u32>,
    socket_mode: SocketMode,
    trust_vmm_memory: bool,
    vms: Vec<Vm>,
    vm_numbers: Option<NumberRange>,
    units: u32,
    device: Program,
    worker: Program,
    arbiter: Option<Program>,
    inventory: Option<Program>,
    worker_uids: Option<NumberRange>,
    free_uids: Option<BTreeSet<u32>>,
    cgroups: Option<Cgroups>,
    /// Workers of an earlier launcher that were named.
    kept: BTreeMap<u32, OwnedFd>,
    survivors: BTreeMap<u64, Survivor>,
    guest_limits: GuestLimits,
    /// Children whose log is not read for now, by when it is again.
    quiet: BTreeSet<(Instant, u64)>,
    events: OwnedFd,
    control: Option<Channel<ToLauncher, FromLauncher>>,
    lifeline: Option<OwnedFd>,
    children: BTreeMap<u64, Child>,
    next_key: u64,
    /// Ends of children that may be told of.
    ends: TokenBucket,
    /// Ends that were not.
    untold: u64,
}

impl Launcher {
    /// Sets up: `control` is the socket to `sluiced`, `lifeline` the supervisor's.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(
        arguments: Arguments,
        control: OwnedFd,
        lifeline: Option<OwnedFd>,
    ) -> Result<Self, LauncherError> {
        let set_up = |error: Errno| LauncherError::SetUp(error.into());
        raise_descriptor_limit().map_err(set_up)?;
        let events = epoll::create(CreateFlags::CLOEXEC).map_err(set_up)?;
        epoll::add(&events, &control, EventData::new_u64(CONTROL), EventFlags::IN).map_err(set_up)?;
        if let Some(lifeline) = &lifeline {
            epoll::add(&events, lifeline, EventData::new_u64(LIFELINE), EventFlags::RDHUP).map_err(set_up)?;
        }
        let environment: Vec<_> = std::env::vars_os().filter(|(name, _)| passes(name)).collect();
        let program = |path, descriptors, capabilities| Program {
            path,
            arguments: vec!["--control-fd".into(), spawn::FIRST.to_string().into()],
            environment: environment.clone(),
            descriptors,
            capabilities,
            end_with_launcher: lifeline.is_some(),
        };
        // Those whose first message does not say it.
        let told = |mut program: Program| {
            program.arguments.extend(["--messages".into(), control::VERSION.to_string().into()]);
            program
        };
        let arbiter = |path| program(path, ARBITER_DESCRIPTORS, ARBITER_CAPABILITIES);
        let nvml = arguments.nvml.map(|path| ["--nvml".into(), path.into_os_string()]);
        let inventory = |path| {
            let mut inventory = told(program(path, INVENTORY_DESCRIPTORS, CapabilitySet::empty()));
            inventory.arguments.extend(nvml.into_iter().flatten());
            inventory
        };
        let (cgroups, next_key) = cgroups(arguments.cgroup);
        Ok(Self {
            units: arguments.units,
            arbiter: arguments.arbiter.map(arbiter),
            inventory: arguments.inventory.map(inventory),
            reserved: Reserved::take().map_err(LauncherError::SetUp)?,
            device: told(program(arguments.device, DEVICE_DESCRIPTORS, DEVICE_CAPABILITIES)),
            worker: program(arguments.worker, WORKER_DESCRIPTORS, CapabilitySet::empty()),
            socket_dir: arguments.socket_dir,
            socket_gid: arguments.socket_gid,
            socket_mode: arguments.socket_mode,
            trust_vmm_memory: arguments.trust_vmm_memory,
            vms: arguments.vms,
            vm_numbers: arguments.vm_numbers,
            worker_uids: arguments.worker_uids,
            free_uids: arguments.worker_uids.map(|range| range.numbers().collect()),
            cgroups,
            kept: BTreeMap::new(),
            survivors: BTreeMap::new(),
            guest_limits: GuestLimits::new(Instant::now()),
            quiet: BTreeSet::new(),
            events,
            control: Some(Channel::new(control)),
            lifeline,
            children: BTreeMap::new(),
            next_key: next_key.max(FIRST_CHILD),
            ends: TokenBucket::new(ENDS.1, ENDS.0, Instant::now()),
            untold: 0,
        })
    }

    /// Serves until `sluiced` is gone, and under a supervisor until that is gone too; then ends every child.
    ///
    /// # Errors
    /// When events or requests cannot be read any more.
    pub fn run(mut self) -> Result<(), LauncherError> {
        let mut ready: Vec<Event> = Vec::with_capacity(EVENTS);
        while self.control.is_some() || self.lifeline.is_some() {
            let timeout = self.read_quiet_logs();
            match epoll::wait(&self.events, spare_capacity(&mut ready), timeout.as_ref()) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(LauncherError::Wait(error)),
            }
            // Children first: whoever asks after it saw one end finds its place free.
            let mut asked = false;
            for event in ready.drain(..) {
                match event.data.u64() {
                    CONTROL => asked = true,
                    LIFELINE => self.end_lifeline(),
                    key if key & LOG != 0 => self.read_log(key & !LOG),
                    key if self.survivors.contains_key(&key) => self.survivor_ended(key),
                    key => self.reap(key),
                }
            }
            if asked {
                self.serve()?;
            }
        }
        Ok(())
    }

    /// Answers one request.
    fn serve(&mut self) -> Result<(), LauncherError> {
        let Some(control) = &self.control else { return Ok(()) };
        let request = match control.receive() {
            Ok(Received::Message(request, _)) => Ok(request),
            Ok(Received::Empty) => return Ok(()),
            Ok(Received::Closed) => {
                self.leave(control.as_fd());
                self.control = None;
                return Ok(());
            }
            Err(ReceiveError::Failed(error)) => return Err(LauncherError::Receive(error)),
            Err(error) => Err(error),
        };
        let started = match request {
            Ok(ToLauncher::StartDevice { vm, scanouts, direct }) => self
                .device_spec(vm, scanouts, direct)
                .map_err(io::Error::from)
                .and_then(|spec| self.start(Role::Device(vm), spec, Visible::Host)),
            Ok(ToLauncher::StartWorker { vm, session: _, visible }) => self
                .spec(vm)
                .map_err(io::Error::from)
                .and_then(|spec| self.start(Role::Worker(vm), spec, visible)),
            Ok(ToLauncher::StartArbiter { unit, visible }) => {
                self.start(Role::Arbiter(unit), Vm::default(), visible)
            }
            Ok(ToLauncher::StartProbe { unit, visible }) => {
                self.start(Role::Probe(unit), Vm::default(), visible)
            }
            Ok(ToLauncher::StartInventory {}) => self.start(Role::Inventory, Vm::default(), Visible::Host),
            Ok(ToLauncher::Settle {}) => {
                self.answer(FromLauncher::Settled {});
                return Ok(());
            }
            Ok(ToLauncher::EndWorker { process, started }) => {
                let ended = self.end_worker(Identity { process, started });
                let error = Errno::SRCH.raw_os_error().unsigned_abs();
                self.answer(if ended { FromLauncher::Ended {} } else { FromLauncher::Failed { error } });
                return Ok(());
            }
            Ok(ToLauncher::KeepWorker { process, started }) => {
                // One that has ended meanwhile has nothing to keep.
                if let Some(pidfd) = (Identity { process, started }).open() {
                    self.kept.insert(process, pidfd);
                }
                return Ok(());
            }
            Ok(ToLauncher::Sweep {}) => {
                self.sweep();
                return Ok(());
            }
            Err(error) => {
                tracing::error!("sluiced sent no request: {error}");
                Err(Errno::BADMSG.into())
            }
        };
        let sent = match (&started, &self.control) {
            (Ok((socket, key)), Some(control)) => {
                let child = &self.children[key];
                let answer = FromLauncher::Started { process: child.pid };
                control.send(&answer, &[socket.as_fd(), child.pidfd.as_fd()])
            }
            (Err(error), Some(control)) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO).unsigned_abs();
                control.send(&FromLauncher::Failed { error: errno }, &[])
            }
            (_, None) => return Ok(()),
        };
        if let Err(error) = sent {
            // Nobody has the new process: it would wait for ever on a socket that is about to close.
            tracing::error!("cannot answer sluiced: {error}");
            if let Some(child) = started.ok().and_then(|(_, key)| self.children.get(&key)) {
                kill(child.pidfd.as_fd());
            }
        }
        Ok(())
    }

    /// Answers what needs no descriptors.
    fn answer(&self, answer: FromLauncher) {
        if let Some(control) = &self.control
            && let Err(error) = control.send(&answer, &[])
        {
            tracing::error!("cannot answer sluiced: {error}");
        }
    }

    /// Kills a worker; false where it is none. The launcher knows its workers by what it has started and kept, whatever they
    /// call themselves.
    fn end_worker(&self, worker: Identity) -> bool {
        let children = self.children.values().filter(|child| matches!(child.role, Role::Worker(_)));
        let children = children.map(|child| (child.pid, &child.pidfd));
        let survivors = self.survivors.values().map(|survivor| (survivor.process, &survivor.pidfd));
        let found = children.chain(survivors).find(|(process, pidfd)| {
            *process == worker.process && Identity::behind(*process, pidfd) == Some(worker)
        });
        found.inspect(|(_, pidfd)| kill(pidfd.as_fd())).is_some()
    }

    /// Starts a process and enters it among the children; `spec` is of its VM, if it is of one. Returns the other end of its
    /// control socket, and its key.
    fn start(&mut self, role: Role, spec: Vm, visible: Visible) -> io::Result<(OwnedFd, u64)> {
        let running = self.children.values().filter(|child| child.role == role).count();
        let bound = match role {
            Role::Worker(_) => limits::SESSIONS,
            Role::Inventory => INVENTORIES,
            Role::Device(_) | Role::Arbiter(_) | Role::Probe(_) => 1,
        };
        if running >= bound {
            return Err(Errno::AGAIN.into());
        }
        let (ours, theirs) = socket::pair()?;
        let (log, childs_log) = child_log::pipe()?;
        let key = self.next_key;
        self.next_key += 1;
        let (mut uid, mut cgroup) = (None, None);
        let started = match role {
            Role::Device(_) => self.start_device(spec, theirs, childs_log),
            Role::Probe(unit) if unit >= self.units => Err(Errno::INVAL.into()),
            // A probe is a worker of no VM.
            Role::Worker(_) | Role::Probe(_) => {
                let mut door = None;
                if let Some(cgroups) = &mut self.cgroups {
                    let (group, procs) = cgroups.make_for_worker(role.vm().unwrap_or(0), key)?;
                    (cgroup, door) = (Some(group), Some(procs));
                }
                if let Some(free) = &mut self.free_uids {
                    uid = free.pop_first();
                }
                let probe = ["--probe".into()];
                let given = Given {
                    arguments: if matches!(role, Role::Probe(_)) { &probe } else { &[] },
                    // What kernels print: the user of a program of this host sees it, but what a VM's kernels print is
                    // neither for the host's log nor bounded.
                    silent: !spec.direct,
                    visible,
                    uid,
                    cgroup: door.as_ref().map(AsFd::as_fd),
                    descriptors: &[theirs.as_fd()],
                };
                if self.free_uids.is_some() && uid.is_none() {
                    Err(Errno::AGAIN.into())
                } else {
                    spawn::start(&self.reserved, &self.worker, &given, childs_log)
                }
            }
            Role::Arbiter(unit) => {
                let known = self.arbiter.as_ref().filter(|_| unit < self.units);
                self.start_plain(known.ok_or(Errno::INVAL)?, visible, theirs, childs_log)
            }
            Role::Inventory => {
                let program = self.inventory.as_ref().ok_or(Errno::INVAL)?;
                self.start_plain(program, visible, theirs, childs_log)
            }
        };
        let started = match started {
            Ok(started) => started,
            Err(error) => {
                tracing::error!("cannot start {role}: {error}");
                self.give_back(uid, cgroup);
                return Err(error);
            }
        };
        let spawn::Started { pid, pidfd } = started;
        let log = ChildLog::new(log, role.label(pid), role.vm(), Instant::now());
        let child = Child { role, pid, pidfd, uid, cgroup, log: Some(log), quiet_until: None };
        let watched = epoll::add(&self.events, &child.pidfd, EventData::new_u64(key), EventFlags::IN);
        if let Err(error) = watched.and_then(|()| self.watch_log(key, &child)) {
            end(&child);
            self.give_back(child.uid, child.cgroup);
            return Err(error.into());
        }
        tracing::debug!("started {role}: process {}", child.pid);
        self.children.insert(key, child);
        Ok((ours, key))
    }

    /// What this launcher's own command line says of a VM; of one that is made at run time only that there may be one.
    fn spec(&self, vm: u32) -> Result<Vm, Errno> {
        let known = self.vms.iter().find(|spec| spec.id == vm).copied();
        let made = self.vm_numbers.filter(|numbers| numbers.contains(vm));
        known.or(made.map(|_| Vm { id: vm, ..Vm::default() })).ok_or(Errno::INVAL)
    }

    /// The same for its device, which for a VM that is made at run time is as the request says.
    fn device_spec(&self, vm: u32, scanouts: u32, direct: bool) -> Result<Vm, Errno> {
        let spec = self.spec(vm)?;
        if self.vms.iter().any(|known| known.id == vm) {
            return Ok(spec);
        }
        let scanouts = u8::try_from(scanouts).ok().filter(|count| *count <= 1).ok_or(Errno::INVAL)?;
        Ok(Vm { scanouts, direct, ..spec })
    }

    fn start_device(&self, spec: Vm, control: OwnedFd, log: OwnedFd) -> io::Result<spawn::Started> {
        let listener = self.listen(&device_socket(&self.socket_dir, spec.id))?;
        let streams = self.listen(&stream_socket(&self.socket_dir, spec.id))?;
        let mut arguments: Vec<OsString> = vec!["--fd".into(), (spawn::FIRST + 1).to_string().into()];
        arguments.extend(["--stream-fd".into(), (spawn::FIRST + 2).to_string().into()]);
        arguments.extend(["--scanouts".into(), spec.scanouts.to_string().into()]);
        if spec.direct {
            // Programs seal their memory, each its own.
            arguments.push("--direct".into());
        } else if self.trust_vmm_memory {
            arguments.push("--trust-memory".into());
        }
        let given = Given {
            arguments: &arguments,
            descriptors: &[control.as_fd(), listener.as_fd(), streams.as_fd()],
            ..Given::default()
        };
        spawn::start(&self.reserved, &self.device, &given, log)
    }

    /// Starts a program of the host's own, whose control socket is all it needs. It runs no kernel of a program, so what its
    /// driver prints is for nobody.
    fn start_plain(
        &self,
        program: &Program,
        visible: Visible,
        control: OwnedFd,
        log: OwnedFd,
    ) -> io::Result<spawn::Started> {
        let given = Given { silent: true, visible, descriptors: &[control.as_fd()], ..Given::default() };
        spawn::start(&self.reserved, program, &given, log)
    }

    /// A socket that a device serves. It is bound and listening before the device runs, so a front-end that connects early
    /// waits in the queue, and the device needs no access to the directory.
    fn listen(&self, path: &Path) -> io::Result<OwnedFd> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // The launcher's own until it is the group's: nobody else connects in between.
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
            let group = self.socket_gid.map_or_else(String::new, |gid| format!(" for group {gid}"));
            tracing::error!("cannot listen on {}{group}: {error}", path.display());
        })
    }

    /// A child has ended: nothing of it stays.
    fn reap(&mut self, key: u64) {
        let Some(child) = self.children.get(&key) else { return };
        let status = rustix::process::waitid(
            WaitId::PidFd(child.pidfd.as_fd()),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        );
        match status {
            // Not yet, against what the event said: it will come again.
            Ok(None) => return,
            Ok(Some(status)) => {
                let (role, pid) = (child.role, child.pid);
                self.finish_log(key);
                match (status.exit_status(), status.terminating_signal()) {
                    (Some(0), _) | (_, Some(libc::SIGKILL | libc::SIGTERM)) => {
                        tracing::debug!("{role} has ended: process {pid}");
                    }
                    _ if self.ends.take(Instant::now()).is_err() => self.untold += 1,
                    (Some(code), _) => {
                        let untold = std::mem::take(&mut self.untold);
                        tracing::warn!(untold, "{role} ended with status {code}: process {pid}");
                    }
                    (_, signal) => {
                        let (untold, signal) = (std::mem::take(&mut self.untold), signal.unwrap_or(0));
                        tracing::error!(untold, "{role} was killed by signal {signal}: process {pid}");
                    }
                }
            }
            Err(error) => tracing::error!("cannot wait for process {}: {error}", child.pid),
        }
        if let Some(child) = self.children.remove(&key) {
            self.leave(child.pidfd.as_fd());
            self.give_back(child.uid, child.cgroup);
        }
    }

    /// Has the log of a child read whenever there is something.
    fn watch_log(&self, key: u64, child: &Child) -> Result<(), Errno> {
        let Some(log) = &child.log else { return Ok(()) };
        epoll::add(&self.events, log, EventData::new_u64(key | LOG), EventFlags::IN)
    }

    /// There is something in the log of a child, or it has closed its end.
    fn read_log(&mut self, key: u64) {
        let Some(child) = self.children.get_mut(&key) else { return };
        let Some(log) = &mut child.log else { return };
        let next = log.read(&mut self.guest_limits, Instant::now());
        if matches!(next, Next::Wait | Next::More) {
            return;
        }
        // Closing ours would do, but for a child between fork and exec that has a copy.
        if let Err(error) = epoll::delete(&self.events, &*log) {
            tracing::error!("cannot leave the epoll set: {error}");
        }
        if let Next::At(when) = next {
            child.quiet_until = Some(when);
            self.quiet.insert((when, key));
        } else {
            child.log = None;
        }
    }

    /// Goes on with logs that were not read for a while; returns how long it is until the next.
    fn read_quiet_logs(&mut self) -> Option<Timespec> {
        loop {
            let (when, key) = *self.quiet.first()?;
            let now = Instant::now();
            if when > now {
                // Not a moment too early, or it would be looked at again and again.
                let wait = when.saturating_duration_since(now) + std::time::Duration::from_millis(1);
                return Timespec::try_from(wait).ok();
            }
            self.quiet.pop_first();
            let Some(child) = self.children.get_mut(&key) else { continue };
            child.quiet_until = None;
            let child = &self.children[&key];
            if let Err(error) = self.watch_log(key, child) {
                tracing::error!("the log of {} is lost: {error}", child.role);
            }
        }
    }

    /// A child has ended: passes on what its log still has.
    fn finish_log(&mut self, key: u64) {
        let Some(child) = self.children.get_mut(&key) else { return };
        let (log, quiet_until) = (child.log.take(), child.quiet_until.take());
        let Some(mut log) = log else { return };
        let now = Instant::now();
        log.finish(&mut self.guest_limits, now);
        match quiet_until {
            Some(when) => _ = self.quiet.remove(&(when, key)),
            None => self.leave(log.as_fd()),
        }
        self.guest_limits.forget_full(now);
    }

    /// Every worker of an earlier launcher that goes on has been named: it keeps its user and its group. What else is in groups
    /// of workers ends.
    fn sweep(&mut self) {
        let kept = std::mem::take(&mut self.kept);
        let living: BTreeSet<u32> = kept.keys().copied().collect();
        let ours: BTreeSet<&Path> =
            self.children.values().filter_map(|child| child.cgroup.as_deref()).collect();
        let swept = self.cgroups.as_mut().map(|cgroups| cgroups.sweep(&ours, &living)).transpose();
        let mut groups: BTreeMap<u32, PathBuf> = match swept {
            Ok(groups) => groups.into_iter().flatten().collect(),
            Err(error) => {
                tracing::error!("cannot end what an earlier launcher has left: {error}");
                BTreeMap::new()
            }
        };
        for (process, pidfd) in kept {
            let uid = uid_of(process).filter(|uid| self.takes(*uid));
            self.survive(Survivor { process, pidfd, uid, cgroup: groups.remove(&process) });
        }
        // A user is not given to a second process, even where the first is unknown.
        let own: BTreeSet<u32> = self.children.values().map(|child| child.pid).collect();
        for process in processes().filter(|process| !living.contains(process) && !own.contains(process)) {
            let taken = self.worker_uids.is_some().then(|| uid_of(process)).flatten();
            let Some(uid) = taken.filter(|uid| self.takes(*uid)) else { continue };
            if let Some(pidfd) = Identity::of(process).and_then(Identity::open) {
                tracing::warn!("process {process}, which is unknown, has user {uid}, which is for workers");
                self.survive(Survivor { process, pidfd, uid: Some(uid), cgroup: None });
            }
        }
    }

    /// Whether a user is one for workers.
    fn takes(&self, uid: u32) -> bool {
        self.worker_uids.is_some_and(|range| range.contains(uid))
    }

    /// Keeps what a process has until it ends.
    fn survive(&mut self, survivor: Survivor) {
        if let (Some(free), Some(uid)) = (&mut self.free_uids, survivor.uid) {
            free.remove(&uid);
        }
        let key = self.next_key;
        self.next_key += 1;
        match epoll::add(&self.events, &survivor.pidfd, EventData::new_u64(key), EventFlags::IN) {
            Ok(()) => _ = self.survivors.insert(key, survivor),
            // Its user and its group stay taken.
            Err(error) => tracing::error!("cannot watch a worker of an earlier launcher: {error}"),
        }
    }

    /// A worker of an earlier launcher has ended. It is reaped by another process.
    fn survivor_ended(&mut self, key: u64) {
        if let Some(survivor) = self.survivors.remove(&key) {
            self.leave(survivor.pidfd.as_fd());
            self.give_back(survivor.uid, survivor.cgroup);
        }
    }

    /// Gives back what a child held.
    fn give_back(&mut self, uid: Option<u32>, cgroup: Option<PathBuf>) {
        if let (Some(free), Some(uid)) = (&mut self.free_uids, uid) {
            free.insert(uid);
        }
        if let (Some(cgroups), Some(group)) = (&mut self.cgroups, cgroup) {
            cgroups.end(group);
        }
    }

    /// The supervisor is gone or wants everything to end. While `sluiced` lives it does that, in order; when its socket
    /// closes as well, the loop ends.
    fn end_lifeline(&mut self) {
        if let Some(lifeline) = self.lifeline.take() {
            self.leave(lifeline.as_fd());
        }
    }

    /// Takes a descriptor out of the epoll set. Closing ours would not do: all of them are open elsewhere too.
    fn leave(&self, descriptor: BorrowedFd<'_>) {
        if let Err(error) = epoll::delete(&self.events, descriptor) {
            tracing::error!("cannot leave the epoll set: {error}");
        }
    }
}

impl Drop for Launcher {
    /// Under a supervisor nothing may stay; else everything does.
    fn drop(&mut self) {
        if self.device.end_with_launcher {
            for child in self.children.values() {
                kill(child.pidfd.as_fd());
            }
            while let Some((key, _)) = self.children.first_key_value() {
                let key = *key;
                self.children.get(&key).into_iter().for_each(end);
                self.finish_log(key);
                let Some(child) = self.children.remove(&key) else { break };
                self.give_back(child.uid, child.cgroup);
            }
        }
        if let Some(cgroups) = &mut self.cgroups {
            cgroups.finish();
        }
    }
}

/// Kills a child and waits until it is gone.
fn end(child: &Child) {
    kill(child.pidfd.as_fd());
    let wait = || rustix::process::waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED);
    if let Err(error) = rustix::io::retry_on_intr(wait) {
        tracing::error!("cannot wait for process {}: {error}", child.pid);
    }
}

/// Whether a variable of the launcher's environment is its children's as well.
fn passes(name: &std::ffi::OsStr) -> bool {
    let name = name.as_encoded_bytes();
    ENVIRONMENT.iter().any(|pass| {
        if pass.ends_with('_') { name.starts_with(pass.as_bytes()) } else { name == pass.as_bytes() }
    })
}

/// Processes of this host.
fn processes() -> impl Iterator<Item = u32> {
    let entries =
        std::fs::read_dir("/proc").inspect_err(|error| tracing::error!("cannot read /proc: {error}"));
    entries.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The user of a process. The owner of its directory would be root for one that cannot be dumped.
fn uid_of(process: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.parse().ok()
}

/// Says once how workers are ended. Also returns a number beyond those of groups that are there.
fn cgroups(directory: Option<PathBuf>) -> (Option<Cgroups>, u64) {
    let Some(directory) = directory else {
        tracing::info!("no cgroup directory is configured: workers are ended by pidfd only");
        return (None, 0);
    };
    match Cgroups::open(&directory) {
        Ok((cgroups, next)) => {
            tracing::info!("each worker gets a cgroup in {}", directory.display());
            (Some(cgroups), next)
        }
        Err(error) => {
            let directory = directory.display();
            tracing::warn!("cannot use cgroup v2 at {directory} ({error}): workers are ended by pidfd only");
            (None, 0)
        }
    }
}

/// Two descriptors per child: the soft limit of a login shell would be too low for a full host.
fn raise_descriptor_limit() -> Result<(), Errno> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_driver_needs_is_inherited() {
        for name in ["SLUICE_LOG", "SLUICE_SOFTGPU_MEMORY", "CUDA_CACHE_DISABLE"] {
            assert!(passes(name.as_ref()), "{name}");
        }
        for name in [
            "PATH",
            "HOME",
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "SLUICE_LOGS",
            "SLUICE_SOCKET",
            "CUDA",
            "XCUDA_",
        ] {
            assert!(!passes(name.as_ref()), "{name}");
        }
    }
}
