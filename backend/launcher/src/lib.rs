//! The launcher: the one process that forks.
//!
//! It owns the means to start devices, workers, arbiters and the inventory (privilege, paths, user ids, cgroups), all from its
//! own command line, and waits for every process it started. It must never parse anything but fixed-size messages, nor take a
//! path, a user, a VM or a unit from one; an invalid message is answered with an error and has no other effect.
//!
//! One thread, one epoll set: the control socket to `sluiced`, a pidfd and a log ([`sluice_runtime::child_log`]) per child, and
//! under a supervisor a lifeline.
//!
//! **When the launcher dies.** Devices and workers must outlive it and `sluiced`, so that both can be restarted under a running
//! VM: children carry no parent-death signal, since that signal fires exactly when re-adoption would be needed. They have other
//! safety nets: a worker ends when its control socket to the device closes. The next launcher receives the list of workers that
//! continue: it reuses neither their users nor their groups, and ends any other process that it finds in its groups. Under a
//! supervisor (`sluice run`, `sluice host`) there is nothing to re-adopt and everything has to be gone with it: there, and only
//! there, children do carry the signal, and the launcher outlives a killed `sluiced` until the supervisor's end closes the
//! lifeline.

mod arguments;
mod cgroup;
mod confinement;
mod ending;
mod files;
mod landlock;
mod logs;
mod namespaces;
mod oom;
mod role;
mod root;
mod spawn;
mod starting;
mod users;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::PathBuf,
    time::Instant,
};

use rustix::{
    buffer::spare_capacity,
    event::epoll::{self, CreateFlags, Event, EventData, EventFlags},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    process::{Resource, Rlimit},
    thread::CapabilitySet,
};
use sluice_messages::{
    channel::{Channel, ReceiveError, Received},
    control::{self, FromLauncher, ToLauncher},
    inventory::Visible,
    launch::{NumberRange, SocketMode, VmLimits},
};
use sluice_protocol::limits;
use sluice_runtime::{
    child_log::{ChildLog, GuestLimits},
    process::{Identity, kill},
    rate::TokenBucket,
};

pub use arguments::Arguments;
use cgroup::Cgroups;
use confinement::Needs;
use role::ChildRole;
use spawn::{Program, ReservedNumbers};
use users::WorkerUsers;

/// Descriptor limit of a device: six per session, and memory regions, resources and queues.
const DEVICE_DESCRIPTORS: u64 = 8192;
/// Descriptor limit of an arbiter: four per worker of its unit, enough for 32 VMs with all their sessions; chunks
/// take none.
const ARBITER_DESCRIPTORS: u64 = 4 * limits::SESSIONS as u64 * 32;
/// Descriptor limit of the inventory.
const INVENTORY_DESCRIPTORS: u64 = 1024;
/// Descriptor limit of a worker; drivers take a few hundred.
const WORKER_DESCRIPTORS: u64 = 4096;
/// Capabilities of a device or an arbiter that runs as root: to have more descriptors in flight to workers than one user may
/// have, because all of them are the same user. One that is a user of its own has no need of it: its descriptors in flight count
/// for itself. Neither may signal workers that are other users: each ends them by their cgroups.
const SERVING_CAPABILITIES: CapabilitySet = CapabilitySet::SYS_RESOURCE;
/// Reported ends of children, at once and per second in the long run: a guest can end its workers at will.
const ENDS: (u32, f64) = (10, 0.2);
/// Variables of the launcher's environment that its children get: names, or prefixes ending in `_`.
const ENVIRONMENT: [&str; 6] =
    ["SLUICE_LOG", "SLUICE_SECCOMP", "SLUICE_DEVICE_MODE", "SLUICE_SOFTGPU_", "CUDA_", "RUST_BACKTRACE"];
/// Events taken from the kernel at once.
const EVENTS: usize = 1024;

/// The launcher cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    /// The setup failed.
    #[error("cannot set up the launcher: {0}")]
    SetUp(#[source] io::Error),
    /// Workers of other users could not be ended by the processes that serve them.
    #[error(
        "workers can be users of their own only with a delegated cgroup directory, by which they are ended: {0}"
    )]
    Users(String),
    /// The kernel refuses to deliver events.
    #[error("cannot wait for events: {0}")]
    Wait(#[source] Errno),
    /// The socket to `sluiced` failed.
    #[error("cannot read requests: {0}")]
    Receive(#[source] Errno),
}

const CONTROL: u64 = 0;
const LIFELINE: u64 = 1;
const FIRST_CHILD: u64 = 2;
/// Token flag of a child's log, with the child's key.
const LOG: u64 = 1 << 63;

#[derive(Debug)]
struct Child {
    role: ChildRole,
    pid: u32,
    pidfd: OwnedFd,
    uid: Option<u32>,
    cgroup: Option<PathBuf>,
    /// `None` after the child has closed its end.
    log: Option<ChildLog>,
    /// The time at which its log is read again, if it is paused.
    quiet_until: Option<Instant>,
}

/// A worker of an earlier launcher that continues, or another process with a user id for workers.
#[derive(Debug)]
struct Survivor {
    process: u32,
    pidfd: OwnedFd,
    uid: Option<u32>,
    cgroup: Option<PathBuf>,
}

/// The properties of a VM's device.
#[derive(Clone, Copy, Debug, Default)]
struct DeviceSpec {
    /// True if programs of this host connect to the device directly, without a VM.
    direct: bool,
    /// Number of displays of its device, 0 or 1.
    scanouts: u8,
}

/// The state of the launcher.
#[derive(Debug)]
pub struct Launcher {
    reserved: ReservedNumbers,
    socket_dir: PathBuf,
    socket_gid: Option<u32>,
    socket_mode: SocketMode,
    trust_vmm_memory: bool,
    vm_numbers: NumberRange,
    units: u32,
    device: Program,
    worker: Program,
    arbiter: Option<Program>,
    inventory: Option<Program>,
    /// The users for processes, if they run as users of their own.
    users: Option<WorkerUsers>,
    cgroups: Option<Cgroups>,
    /// Workers of an earlier launcher that `sluiced` has named.
    kept: BTreeMap<u32, OwnedFd>,
    survivors: BTreeMap<u64, Survivor>,
    guest_limits: GuestLimits,
    /// Children with paused logs, by the time at which reading continues.
    quiet: BTreeSet<(Instant, u64)>,
    events: OwnedFd,
    control: Option<Channel<ToLauncher, FromLauncher>>,
    lifeline: Option<OwnedFd>,
    children: BTreeMap<u64, Child>,
    next_key: u64,
    /// Limits the reported ends of children.
    ends: TokenBucket,
    /// Number of ends that were not reported.
    dropped: u64,
}

impl Launcher {
    /// Sets up: `control` is the socket to `sluiced`, `lifeline` the supervisor's.
    ///
    /// # Errors
    /// The kernel's error of a call.
    pub fn new(
        arguments: Arguments,
        control: OwnedFd,
        lifeline: Option<OwnedFd>,
    ) -> Result<Self, LauncherError> {
        let set_up = |error: Errno| LauncherError::SetUp(error.into());
        let limits = arguments.limits();
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
            confinement: None,
            end_with_launcher: lifeline.is_some(),
        };
        // Programs whose first message carries no version.
        let told = |mut program: Program| {
            program.arguments.extend(["--messages".into(), control::VERSION.to_string().into()]);
            program
        };
        let arbiter = |path| program(path, ARBITER_DESCRIPTORS, SERVING_CAPABILITIES);
        let library = arguments.nvml.clone();
        let nvml = arguments.nvml.map(|path| ["--nvml".into(), path.into_os_string()]);
        let inventory = |path| {
            let mut inventory = told(program(path, INVENTORY_DESCRIPTORS, CapabilitySet::empty()));
            inventory.arguments.extend(nvml.into_iter().flatten());
            inventory
        };
        let (cgroups, next_key) = cgroups(arguments.cgroup, limits, arguments.worker_uids.is_some())?;
        let mut worker = program(arguments.worker, WORKER_DESCRIPTORS, CapabilitySet::empty());
        let mut device = told(program(arguments.device, DEVICE_DESCRIPTORS, SERVING_CAPABILITIES));
        let mut arbiter = arguments.arbiter.map(arbiter);
        let mut inventory = arguments.inventory.map(inventory);
        if confinement::is_on()
            && let Some(driver) = arguments.driver
        {
            let driver = confinement::driver(driver);
            let uid = arguments.worker_uids.map(|range| range.first);
            let confine = |program: &mut Program, driver, uid, (users, signals)| {
                let needs = Needs { capabilities: program.capabilities, users };
                let confinement = confinement::of(&program.path, driver, uid, needs);
                program.confinement =
                    confinement.map(|all| if signals { all } else { all.without_signals() });
            };
            // Without cgroups they end workers by signals.
            let signals = cgroups.is_none();
            confine(&mut device, None, uid, (true, signals));
            if let Some(driver) = &driver {
                confine(&mut worker, Some(driver), uid, (false, false));
                arbiter.iter_mut().for_each(|program| confine(program, Some(driver), uid, (false, signals)));
            }
            if let (Some(program), Some(library)) = (&mut inventory, library)
                && let Some(library) = confinement::driver(library)
            {
                confine(program, Some(&library), None, (false, false));
            }
        }
        Ok(Self {
            units: arguments.units,
            arbiter,
            inventory,
            reserved: ReservedNumbers::take().map_err(LauncherError::SetUp)?,
            device,
            worker,
            socket_dir: arguments.socket_dir,
            socket_gid: arguments.socket_gid,
            socket_mode: arguments.socket_mode,
            trust_vmm_memory: arguments.trust_vmm_memory,
            vm_numbers: arguments.vm_numbers,
            users: arguments.worker_uids.map(WorkerUsers::new),
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
            dropped: 0,
        })
    }

    /// Serves until `sluiced` is gone, and under a supervisor until that is gone too; then ends every child.
    ///
    /// # Errors
    /// [`LauncherError`] if events or requests cannot be read any more.
    pub fn run(mut self) -> Result<(), LauncherError> {
        let mut ready: Vec<Event> = Vec::with_capacity(EVENTS);
        while self.control.is_some() || self.lifeline.is_some() {
            let timeout = self.read_quiet_logs();
            match epoll::wait(&self.events, spare_capacity(&mut ready), timeout.as_ref()) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(LauncherError::Wait(error)),
            }
            // Children first: a request that follows the end of a child then finds its place free.
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
                .and_then(|spec| self.start(ChildRole::Device(vm), spec, Visible::Host)),
            Ok(ToLauncher::StartWorker { vm, session: _, visible }) => self
                .check_number(vm)
                .map_err(io::Error::from)
                .and_then(|()| self.start(ChildRole::Worker(vm), DeviceSpec::default(), visible)),
            Ok(ToLauncher::StartArbiter { unit, visible }) => {
                self.start(ChildRole::Arbiter(unit), DeviceSpec::default(), visible)
            }
            Ok(ToLauncher::StartProbe { unit, visible }) => {
                self.start(ChildRole::Probe(unit), DeviceSpec::default(), visible)
            }
            Ok(ToLauncher::StartInventory {}) => {
                self.start(ChildRole::Inventory, DeviceSpec::default(), Visible::Host)
            }
            Ok(ToLauncher::Settle {}) => {
                // systemd may have started this `sluiced` in the cgroup directory itself.
                self.cgroups.iter_mut().for_each(Cgroups::settle);
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
                // A process that has ended meanwhile keeps no resources.
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
                tracing::error!(%error, "cannot decode a request of sluiced");
                Err(Errno::BADMSG.into())
            }
        };
        let sent = match (&started, &self.control) {
            (Ok((socket, key, cgroup_kill)), Some(control)) => {
                let child = &self.children[key];
                let answer = FromLauncher::Started { process: child.pid, grouped: cgroup_kill.is_some() };
                let mut descriptors = vec![socket.as_fd(), child.pidfd.as_fd()];
                descriptors.extend(cgroup_kill.as_ref().map(AsFd::as_fd));
                control.send(&answer, &descriptors)
            }
            (Err(error), Some(control)) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO).unsigned_abs();
                control.send(&FromLauncher::Failed { error: errno }, &[])
            }
            (_, None) => return Ok(()),
        };
        if let Err(error) = sent {
            // No process received the new one, which would wait for ever on a socket that is about to close.
            tracing::error!(%error, "cannot answer sluiced");
            if let Some(child) = started.ok().and_then(|(_, key, _)| self.children.get(&key)) {
                kill(child.pidfd.as_fd());
            }
        }
        Ok(())
    }

    /// Sends an answer without descriptors.
    fn answer(&self, answer: FromLauncher) {
        if let Some(control) = &self.control
            && let Err(error) = control.send(&answer, &[])
        {
            tracing::error!(%error, "cannot answer sluiced");
        }
    }

    /// The supervisor is gone or requests the end. While `sluiced` lives it ends everything in order; when its socket
    /// closes as well, the loop ends.
    fn end_lifeline(&mut self) {
        if let Some(lifeline) = self.lifeline.take() {
            self.leave(lifeline.as_fd());
        }
    }

    /// Removes a descriptor from the epoll set. Closing it is not enough, because other processes have the same files open.
    fn leave(&self, descriptor: BorrowedFd<'_>) {
        if let Err(error) = epoll::delete(&self.events, descriptor) {
            tracing::error!(%error, "cannot remove a descriptor from the epoll set");
        }
    }
}

/// True if children also get this variable of the launcher's environment.
fn passes(name: &std::ffi::OsStr) -> bool {
    let name = name.as_encoded_bytes();
    ENVIRONMENT.iter().any(|pass| {
        if pass.ends_with('_') { name.starts_with(pass.as_bytes()) } else { name == pass.as_bytes() }
    })
}

/// Opens the cgroup directory and logs once how workers are ended. Also returns a number beyond those of existing groups. It is an
/// error to have none if workers are `users` of their own, whom only their cgroups end.
fn cgroups(
    directory: Option<PathBuf>,
    limits: VmLimits,
    users: bool,
) -> Result<(Option<Cgroups>, u64), LauncherError> {
    let Some(directory) = directory else {
        if users {
            return Err(LauncherError::Users("none is configured".to_owned()));
        }
        tracing::info!(
            "no cgroup directory is configured: workers are ended by pidfd, and VMs have no limits"
        );
        return Ok((None, 0));
    };
    let path = directory.display();
    match Cgroups::open(&directory, limits) {
        Ok((cgroups, next)) => {
            tracing::info!(%path, "each VM and each worker gets a cgroup in the configured directory");
            Ok((Some(cgroups), next))
        }
        Err(error) if users => Err(LauncherError::Users(format!("{path}: {error}"))),
        Err(error) => {
            tracing::warn!(
                %path, %error,
                "cannot use the cgroup directory; workers are ended by pidfd, and VMs have no limits"
            );
            Ok((None, 0))
        }
    }
}

/// Two descriptors per child: the soft limit of a login shell would be too low for a full host.
fn raise_descriptor_limit() -> Result<(), Errno> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
}

#[cfg(test)]
mod tests;
