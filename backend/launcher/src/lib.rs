//! The launcher: the one process that forks.
//!
//! It owns the means to start devices, workers, arbiters and the inventory (privilege, paths, user ids, cgroups), all from its
//! own command line, and waits for every process it started. It must never parse anything but fixed-size messages, nor take a
//! path, a user, a VM or a unit from one; an invalid message is answered with an error and has no other effect.
//!
//! One thread, one epoll set: the control socket to `sluiced`, a pidfd and a log ([`sluice_runtime::child_log`]) per child, and
//! under a supervisor a lifeline, or as a service a listening socket.
//!
//! **As a service of its own** it runs as root, and `sluiced` as another user without any privilege. `sluiced` connects, and after a
//! restart connects again; the last connection counts. `sluiced` may be hostile: it starts only the configured processes, and ends and
//! finds only those that were started here or are in the launcher's cgroups.
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
mod children;
mod confinement;
mod ending;
mod error;
mod files;
mod landlock;
mod limits;
mod logs;
mod namespaces;
mod oom;
mod ready;
mod role;
mod root;
mod service;
mod serving;
mod spawn;
mod starting;
mod users;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    thread,
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
    channel::Channel,
    control::{self, FromLauncher, ToLauncher},
    launch::{Fingerprint, NumberRange, SocketMode, VmLimits},
};
use sluice_runtime::{child_log::GuestLimits, rate::TokenBucket};

pub use arguments::Arguments;
use cgroup::Cgroups;
use children::{CONTROL, Child, FIRST_CHILD, LIFELINE, LOG, SERVICE, Survivor};
use confinement::Needs;
pub use error::LauncherError;
use files::DriverFiles;
use limits::{ProgramKind, ResourceLimits};
use oom::OomOrder;
use ready::{ReadyChild, Wanted};
use service::Service;
use spawn::Program;
use users::WorkerUsers;

/// Capabilities of a device or an arbiter that runs as root: to have more descriptors in flight to workers than one user may
/// have, because all of them are the same user. One that is a user of its own has no need of it: its descriptors in flight count
/// for itself. Neither may signal workers that are other users: each ends them by their cgroups.
const SERVING_CAPABILITIES: CapabilitySet = CapabilitySet::SYS_RESOURCE;
/// Reported ends of children, at once and per second in the long run: a guest can end its workers at will.
const ENDS: (u32, f64) = (10, 0.2);
/// Log lines that `sluiced` can cause, at once and per second in the long run.
const COMPLAINTS: (u32, f64) = (10, 0.2);
/// Variables of the launcher's environment that its children get: names, or prefixes ending in `_`.
const ENVIRONMENT: [&str; 6] =
    ["SLUICE_LOG", "SLUICE_SECCOMP", "SLUICE_DEVICE_MODE", "SLUICE_SOFTGPU_", "CUDA_", "RUST_BACKTRACE"];
/// Events taken from the kernel at once.
const EVENTS: usize = 1024;

/// The end of the launcher at which `sluiced` is.
#[derive(Debug)]
pub enum ClientSocket {
    /// A connected socket: `sluiced` has started this process.
    Connected(OwnedFd),
    /// A listening socket: this process is a service of its own.
    Listening(OwnedFd, Fingerprint),
}

/// The state of the launcher.
#[derive(Debug)]
pub struct Launcher {
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
    oom_order: OomOrder,
    guest_limits: GuestLimits,
    /// Children with paused logs, by the time at which reading continues.
    quiet: BTreeSet<(Instant, u64)>,
    events: OwnedFd,
    control: Option<Channel<ToLauncher, FromLauncher>>,
    service: Option<Service>,
    /// True once `sluiced` has named the workers of an earlier launcher that continue.
    swept: bool,
    lifeline: Option<OwnedFd>,
    children: BTreeMap<u64, Child>,
    /// Processes made ahead, the oldest first.
    ready: Vec<ReadyChild>,
    /// The processes to make ahead, one of each kind at most.
    wanted: Vec<Wanted>,
    next_key: u64,
    /// Limits the reported ends of children.
    ends: TokenBucket,
    /// Number of ends that were not reported.
    dropped: u64,
    /// Limits the log lines that `sluiced` can cause.
    complaints: TokenBucket,
}

impl Launcher {
    /// Sets up. `lifeline` is the supervisor's socket.
    ///
    /// # Errors
    /// The kernel's error of a call.
    pub fn new(
        arguments: Arguments,
        client: ClientSocket,
        lifeline: Option<OwnedFd>,
    ) -> Result<Self, LauncherError> {
        let set_up = |error: Errno| LauncherError::SetUp(error.into());
        let limits = arguments.limits();
        raise_descriptor_limit().map_err(set_up)?;
        let events = epoll::create(CreateFlags::CLOEXEC).map_err(set_up)?;
        let (control, service) = match client {
            ClientSocket::Connected(control) => (Some(control), None),
            ClientSocket::Listening(listener, configuration) => {
                (None, Some(Service::new(listener, configuration, &arguments.socket_dir)?))
            }
        };
        let watch = |socket: &OwnedFd, key| {
            epoll::add(&events, socket, EventData::new_u64(key), EventFlags::IN).map_err(set_up)
        };
        control.iter().try_for_each(|control| watch(control, CONTROL))?;
        service.iter().try_for_each(|service| watch(service.listener(), SERVICE))?;
        if let Some(lifeline) = &lifeline {
            epoll::add(&events, lifeline, EventData::new_u64(LIFELINE), EventFlags::RDHUP).map_err(set_up)?;
        }
        let inherited: Vec<_> = std::env::vars_os().filter(|(name, _)| passes(name)).collect();
        let memory = cgroup::memory_of_vm(limits);
        let environment = |kind| {
            // Only workers execute kernels: the others have no use for memory with code.
            let interpreted =
                (kind != ProgramKind::Worker).then(|| ("SLUICE_SOFTGPU_JIT".into(), "0".into()));
            inherited.iter().cloned().chain(interpreted).collect()
        };
        let program = |path, kind, capabilities| Program {
            path,
            arguments: vec!["--control-fd".into(), spawn::FIRST.to_string().into()],
            environment: environment(kind),
            limits: ResourceLimits::new(kind, memory, limits.worker_tasks),
            capabilities,
            confinement: None,
            end_with_launcher: lifeline.is_some(),
        };
        // Programs whose first message carries no version.
        let told = |mut program: Program| {
            program.arguments.extend(["--messages".into(), control::VERSION.to_string().into()]);
            program
        };
        let arbiter = |path| program(path, ProgramKind::Arbiter, SERVING_CAPABILITIES);
        let library = arguments.nvml.clone();
        let nvml = arguments.nvml.map(|path| ["--nvml".into(), path.into_os_string()]);
        let inventory = |path| {
            let mut inventory = told(program(path, ProgramKind::Inventory, CapabilitySet::empty()));
            inventory.arguments.extend(nvml.into_iter().flatten());
            inventory
        };
        let needs_cgroups = match (&service, arguments.worker_uids) {
            (Some(_), _) => Some("a launcher that is a service needs"),
            (None, Some(_)) => Some("workers that are users of their own need"),
            (None, None) => None,
        };
        let (cgroups, next_key) = cgroups(arguments.cgroup, limits, memory, needs_cgroups)?;
        let mut worker = program(arguments.worker, ProgramKind::Worker, CapabilitySet::empty());
        let mut device = told(program(arguments.device, ProgramKind::Device, SERVING_CAPABILITIES));
        let mut arbiter = arguments.arbiter.map(arbiter);
        let mut inventory = arguments.inventory.map(inventory);
        if confinement::is_on()
            && let Some(driver) = arguments.driver
        {
            let driver = confinement::driver(driver);
            let uid = arguments.worker_uids.map(|range| range.first);
            let confine =
                |program: &mut Program, driver: Option<&Arc<DriverFiles>>, uid, (users, signals)| {
                    let needs = Needs { capabilities: program.capabilities, users };
                    let confinement = confinement::of(&program.path, driver, uid, needs);
                    program.confinement =
                        confinement.map(|all| if signals { all } else { all.without_signals() });
                };
            // Without cgroups they end workers by signals.
            let signals = cgroups.is_none();
            let driver = driver.as_ref();
            // Each program is tested in namespaces, whose making mostly waits.
            thread::scope(|scope| {
                scope.spawn(|| confine(&mut device, None, uid, (true, signals)));
                if driver.is_some() {
                    scope.spawn(|| confine(&mut worker, driver, uid, (false, false)));
                    if let Some(program) = &mut arbiter {
                        scope.spawn(|| confine(program, driver, uid, (false, signals)));
                    }
                }
                if let (Some(program), Some(library)) = (&mut inventory, library)
                    && let Some(library) = confinement::driver(library)
                {
                    scope.spawn(move || confine(program, Some(&library), None, (false, false)));
                }
            });
        }
        Ok(Self {
            units: arguments.units,
            arbiter,
            inventory,
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
            oom_order: OomOrder::open(),
            guest_limits: GuestLimits::new(Instant::now()),
            quiet: BTreeSet::new(),
            events,
            control: control.map(Channel::new),
            service,
            swept: false,
            lifeline,
            children: BTreeMap::new(),
            ready: Vec::new(),
            wanted: Vec::new(),
            next_key: next_key.max(FIRST_CHILD),
            ends: TokenBucket::new(ENDS.1, ENDS.0, Instant::now()),
            dropped: 0,
            complaints: TokenBucket::new(COMPLAINTS.1, COMPLAINTS.0, Instant::now()),
        })
    }

    /// Serves until `sluiced` is gone, and under a supervisor until that is gone too; then ends every child. A service serves until a
    /// `sluiced` of another configuration connects.
    ///
    /// # Errors
    /// [`LauncherError`] if events or requests cannot be read any more.
    pub fn run(mut self) -> Result<(), LauncherError> {
        let mut ready: Vec<Event> = Vec::with_capacity(EVENTS);
        while self.control.is_some() || self.lifeline.is_some() || self.serves() {
            let quiet = self.read_quiet_logs();
            let timeout = self.service.as_mut().map_or(quiet, |service| service.live(quiet));
            let timeout = self.until_ready(timeout);
            match epoll::wait(&self.events, spare_capacity(&mut ready), timeout.as_ref()) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(LauncherError::Wait(error)),
            }
            // Children first: a request that follows the end of a child then finds its place free.
            let (mut asked, mut called) = (false, false);
            for event in ready.drain(..) {
                match event.data.u64() {
                    CONTROL => asked = true,
                    LIFELINE => self.end_lifeline(),
                    SERVICE => called = true,
                    key if key & LOG != 0 => self.read_log(key & !LOG),
                    key if self.survivors.contains_key(&key) => self.survivor_ended(key),
                    key => self.reap(key),
                }
            }
            if asked {
                self.serve()?;
            }
            if called {
                self.accept()?;
            }
            // The next request may be there already.
            if !asked {
                self.make_ready();
            }
        }
        Ok(())
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
/// error to have none if there is a `need`.
fn cgroups(
    directory: Option<PathBuf>,
    limits: VmLimits,
    memory: Option<u64>,
    need: Option<&'static str>,
) -> Result<(Option<Cgroups>, u64), LauncherError> {
    let Some(directory) = directory else {
        if let Some(need) = need {
            return Err(LauncherError::NoCgroup { need, reason: "none is configured".to_owned() });
        }
        tracing::info!(
            "no cgroup directory is configured: workers are ended by pidfd, and VMs have no limits"
        );
        return Ok((None, 0));
    };
    let path = directory.display();
    match Cgroups::open(&directory, limits, memory) {
        Ok((cgroups, next)) => {
            tracing::info!(%path, "each VM and each process gets a cgroup in the configured directory");
            Ok((Some(cgroups), next))
        }
        Err(error) => {
            if let Some(need) = need {
                return Err(LauncherError::NoCgroup { need, reason: format!("{path}: {error}") });
            }
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
