//! One VM: its device and the workers of its sessions.
//!
//! It owns the list of live processes. It must never trust a message of a device: a device may have been taken over by its
//! guest, and can at worst spend its own VM's share of workers. Sessions are counted by processes that run, never by messages.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use sluice_api::{VmSpec, v1::FenceStep};
use sluice_messages::{
    control::{FromDevice, ToDevice, ToLauncher, WorkerSetup},
    inventory::Visible,
    launch::vsock_socket,
};
use sluice_protocol::limits;
use sluice_runtime::{
    process::{Identity, is_gone, kill, signal},
    rate::TokenBucket,
};
use tokio::{
    io::unix::AsyncFd,
    sync::{Notify, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    channel::Channel,
    configuration::Configuration,
    handover::launching::{Launching, Started, set_up_worker},
    handover::watched::{gone, watch},
    records::journal::{Journal, Subject},
    records::notice::{Notice, Notices},
    records::state::{adoption::DeviceRecord, checkpoint::Checkpoint},
    spec,
    units::unit::{Borrower, Terms, Unit},
    vms::context::Context,
    vms::fence::Fence,
};

/// CUDA_ERROR_DEVICE_UNAVAILABLE: what a guest is told when it cannot have a worker.
pub const DEVICE_UNAVAILABLE: u32 = 46;
/// How long a session may wait for its turn to start, beyond which it is refused.
const TURN: Duration = Duration::from_secs(5);
/// How long a session may wait for a unit that is being swept, beyond which it is refused.
const UNIT: Duration = Duration::from_secs(5);
/// How long the start of a session may take in all, with some room.
const START: Duration = Duration::from_secs(30);
/// How long a device may take to end when asked to.
const DEVICE_END: Duration = Duration::from_secs(2);
/// How long killed processes may take to go away; a driver that frees much memory takes its time.
const KILLED: Duration = Duration::from_secs(5);
/// Devices of one VM that may end in a row before it is given up.
const RESTARTS: u32 = 3;
/// Restarts per second in the long run.
const RESTART_RATE: f64 = 0.1;

/// A VM.
#[derive(Debug)]
pub struct Vm {
    spec: Cell<VmSpec>,
    /// What clients know it by.
    subject: Subject,
    journal: Arc<Journal>,
    /// Whether sessions that run may go on but none may begin.
    draining: Cell<bool>,
    phase: watch::Sender<Phase>,
    /// Sessions that got a worker.
    begun: Cell<u64>,
    fences: Cell<Fences>,
    configuration: Rc<Configuration>,
    launching: Rc<Launching>,
    /// Nothing while no unit is found for it: it begins no session.
    units: RefCell<Option<Rc<[Rc<Unit>]>>>,
    /// While it is given another unit, sessions wait.
    moving: watch::Sender<bool>,
    checkpoint: Rc<Checkpoint>,
    notices: Notices,
    /// Told when it is fenced, at each step, and when it is admitted again.
    fenced: Notify,
    starts: RefCell<TokenBucket>,
    complaints: RefCell<TokenBucket>,
    life: RefCell<Option<Rc<Life>>>,
}

/// Fences of a VM since it was made known.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fences {
    /// How many have begun.
    pub(crate) begun: u64,
    /// How long those took that have come to their end.
    pub(crate) took: Duration,
    since: Option<Instant>,
}

impl Fences {
    fn begin(self) -> Self {
        Self { begun: self.begun.saturating_add(1), since: Some(Instant::now()), ..self }
    }

    fn end(self) -> Self {
        // One that a daemon before has begun is not in the figures.
        let took = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        Self { took: self.took.saturating_add(took), since: None, ..self }
    }
}

/// What the socket of a VM's device is kept as.
pub(crate) fn socket_name(vm: u32) -> String {
    format!("device-{vm}")
}

/// Whether a VM has its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It has not had one yet.
    Starting,
    /// It has one, or is getting the next.
    Running,
    /// It has none and gets none.
    Failed(String),
}

/// One device process, and everything that exists because of it.
#[derive(Debug)]
struct Life {
    process: u32,
    pidfd: AsyncFd<OwnedFd>,
    channel: Channel<FromDevice, ToDevice>,
    /// Whether the device ended or is to end: nothing new is given to it.
    over: Cell<bool>,
    /// By a number of ours: the device may use its number of a session that ended again while the worker is still dying.
    sessions: RefCell<BTreeMap<u64, Session>>,
    next_serial: Cell<u64>,
}

/// One session of a device, from the request until its worker is seen to be gone.
#[derive(Debug)]
struct Session {
    /// The device's number.
    number: u32,
    /// Whether the device said that it ended.
    ended: bool,
    worker: Option<Worker>,
    /// When it was asked for.
    since: Instant,
    /// Whether it was told of that nothing has become of it.
    lost: bool,
}

#[derive(Clone, Debug)]
struct Worker {
    process: u32,
    pidfd: Rc<AsyncFd<OwnedFd>>,
}

/// A VM cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// Its device cannot be started.
    #[error("cannot start the device of VM {vm}: {reason}")]
    Device {
        /// The VM.
        vm: u32,
        /// Why.
        reason: String,
    },
    /// Its device ends again and again.
    #[error("the device of VM {vm} keeps ending")]
    Ending {
        /// The VM.
        vm: u32,
    },
}

impl Vm {
    pub(crate) fn new(
        spec: VmSpec,
        subject: Subject,
        units: Option<Rc<[Rc<Unit>]>>,
        context: &Context,
    ) -> Rc<Self> {
        let Context { configuration, launching, units: _, checkpoint, notices, journal } = context;
        let now = Instant::now();
        let rate = configuration.starts_per_second;
        let vm = Rc::new(Self {
            spec: Cell::new(spec),
            subject,
            journal: Arc::clone(journal),
            draining: Cell::new(false),
            phase: watch::Sender::new(Phase::Starting),
            begun: Cell::new(0),
            fences: Cell::default(),
            configuration: Rc::clone(configuration),
            launching: Rc::clone(launching),
            units: RefCell::new(units),
            moving: watch::Sender::new(false),
            checkpoint: Rc::clone(checkpoint),
            notices: notices.clone(),
            fenced: Notify::new(),
            starts: RefCell::new(TokenBucket::new(f64::from(rate), rate.saturating_mul(2), now)),
            complaints: RefCell::new(TokenBucket::new(0.1, 10, now)),
            life: RefCell::new(None),
        });
        for unit in vm.units().iter() {
            unit.admit(spec.id, vm.terms());
        }
        vm
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.spec.get().id
    }

    /// What clients know it by.
    pub(crate) fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Tells clients of something.
    pub(crate) fn tell(&self, kind: &'static str, detail: impl Into<String>) {
        self.journal.note(kind, Some(self.subject.clone()), detail);
    }

    /// Whether it belongs to a project or organisation.
    pub(crate) fn is_of(&self, ancestor: u32) -> bool {
        let spec = self.spec.get();
        spec.project == ancestor || spec.organisation == ancestor
    }

    /// What it may have.
    pub(crate) fn spec(&self) -> VmSpec {
        self.spec.get()
    }

    /// Says what it may have from now on.
    pub(crate) fn change(&self, spec: VmSpec) {
        self.spec.set(VmSpec { id: self.id(), ..spec });
        for unit in self.units().iter() {
            unit.admit(self.id(), self.terms());
        }
        // How long it waits for its readmission may be another time now.
        self.fenced.notify_waiters();
    }

    /// Whether sessions that run go on but none begins.
    pub(crate) fn draining(&self) -> bool {
        self.draining.get()
    }

    /// Lets no session begin any more, or lets them again.
    pub(crate) fn drain(&self, draining: bool) {
        self.draining.set(draining);
    }

    /// Whether it has its device.
    pub(crate) fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// It is to get its device.
    pub(crate) fn begin(&self) {
        self.phase.send_replace(Phase::Starting);
    }

    /// Waits until it has had its device, or cannot have one.
    pub(crate) async fn started(&self) -> Phase {
        let mut phase = self.phase.subscribe();
        // The sender is ours.
        phase.wait_for(|phase| *phase != Phase::Starting).await.map_or(Phase::Starting, |phase| phase.clone())
    }

    /// How many of its sessions have got a worker since it was made known.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.get()
    }

    /// Its fences since it was made known.
    pub(crate) fn fences(&self) -> Fences {
        self.fences.get()
    }

    /// A fence has begun.
    pub(crate) fn count_fence(&self) {
        self.fences.set(self.fences.get().begin());
    }

    /// It has come to its end.
    pub(crate) fn count_fenced(&self) {
        self.fences.set(self.fences.get().end());
    }

    /// Its device's process, if it runs.
    pub(crate) fn device(&self) -> Option<u32> {
        self.life.borrow().as_ref().map(|life| life.process)
    }

    /// Where its device listens.
    pub(crate) fn socket(&self) -> PathBuf {
        self.configuration.device_socket(self.id())
    }

    /// Where it listens for guests that share no memory, and where their VMM's own socket must be for that.
    pub(crate) fn vsock(&self) -> (PathBuf, PathBuf) {
        let (configuration, id) = (&self.configuration, self.id());
        (configuration.stream_socket(id), vsock_socket(&configuration.runtime_dir, id))
    }

    /// Who lends to it.
    pub(crate) fn units(&self) -> Rc<[Rc<Unit>]> {
        self.units.borrow().clone().unwrap_or_default()
    }

    /// Whether a unit lends to it.
    pub(crate) fn is_on(&self, unit: u32) -> bool {
        self.units().iter().any(|known| known.number() == unit)
    }

    /// Whether nothing of it runs on its units: it has no session, and is not on its way out.
    pub(crate) fn is_idle(&self) -> bool {
        let life = self.life.borrow();
        // Before it has its device it may yet find one, with the sessions of a daemon before.
        let no_session = life.as_ref().is_some_and(|life| life.sessions.borrow().is_empty());
        no_session && self.stands().step == FenceStep::Active
    }

    /// Has sessions wait while it is given another unit; false where it is not idle, or is held already.
    pub(crate) fn hold(&self) -> bool {
        self.is_idle() && !self.moving.send_replace(true)
    }

    /// Lets them go on, on the units it has by now.
    pub(crate) fn let_go(&self) {
        self.moving.send_replace(false);
    }

    /// Gives it other units, or none. Only while it is held, or had none: no worker may be left on those it had.
    pub(crate) fn put_on(&self, units: Option<Rc<[Rc<Unit>]>>) {
        let before = self.units.replace(units).unwrap_or_default();
        for unit in self.units().iter() {
            unit.admit(self.id(), self.terms());
        }
        for unit in before.iter().filter(|unit| !self.is_on(unit.number())) {
            unit.forget(self.id(), self.terms().epoch);
        }
    }

    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    pub(crate) fn fenced(&self) -> &Notify {
        &self.fenced
    }

    /// Where it stands.
    pub(crate) fn stands(&self) -> Fence {
        self.checkpoint.vm(self.id())
    }

    pub(crate) fn notify(&self, notice: Notice) {
        // Heard by nobody while everything ends.
        _ = self.notices.send(notice);
    }

    /// What arbiters are told of it.
    pub(crate) fn terms(&self) -> Terms {
        let (spec, fence) = (self.spec.get(), self.stands());
        Terms {
            epoch: fence.epoch,
            fenced: fence.admitted().is_none(),
            limit: spec.memory.0,
            guaranteed: spec.guaranteed.0,
            headroom: spec.headroom.0,
            pinned: spec.pinned.0,
            ancestors: spec::ancestors(&spec),
            shares: spec::shares(&spec),
        }
    }

    /// Ends all its workers; the device and its guest live on, and are told of each.
    pub(crate) fn end_workers(&self) {
        if let Some(life) = self.life.borrow().as_ref() {
            for worker in life.sessions.borrow().values().filter_map(|session| session.worker.as_ref()) {
                kill(worker.pidfd.as_fd());
            }
        }
    }

    /// Ends a worker; false when it is not one of this VM.
    pub(crate) fn end_worker(&self, process: u32) -> bool {
        let life = self.life.borrow();
        let Some(life) = life.as_ref() else { return false };
        let sessions = life.sessions.borrow();
        let worker = sessions.values().filter_map(|session| session.worker.as_ref());
        let worker =
            worker.filter(|worker| worker.process == process).inspect(|worker| kill(worker.pidfd.as_fd()));
        worker.count() > 0
    }

    /// Its workers.
    pub(crate) fn workers(&self) -> Vec<Identity> {
        let life = self.life.borrow();
        let Some(life) = life.as_ref() else { return Vec::new() };
        let sessions = life.sessions.borrow();
        let workers = sessions.values().filter_map(|session| session.worker.as_ref());
        workers.filter_map(Worker::identity).collect()
    }

    /// The numbers of its workers' processes.
    pub(crate) fn worker_numbers(&self) -> Vec<u32> {
        let life = self.life.borrow();
        let Some(life) = life.as_ref() else { return Vec::new() };
        let sessions = life.sessions.borrow();
        sessions.values().filter_map(|session| session.worker.as_ref()).map(|worker| worker.process).collect()
    }

    /// Its sessions and their workers.
    pub(crate) fn sessions(&self) -> Vec<(u32, Option<u32>)> {
        let life = self.life.borrow();
        let Some(life) = life.as_ref() else { return Vec::new() };
        let sessions = life.sessions.borrow();
        let describe =
            |session: &Session| (session.number, session.worker.as_ref().map(|worker| worker.process));
        sessions.values().map(describe).collect()
    }

    /// Asks every unit what it has, and waits for the answers, not longer than for a moment.
    pub(crate) async fn ask(&self) {
        for unit in self.units().iter() {
            // One that does not answer is as it was.
            _ = unit.describe_vm(self.id()).await;
        }
    }

    /// Its sessions that should have a worker or be no more, each once.
    pub(crate) fn lost_sessions(&self) -> Vec<u32> {
        let life = self.life.borrow();
        let Some(life) = life.as_ref() else { return Vec::new() };
        let mut sessions = life.sessions.borrow_mut();
        let lost = sessions.values_mut().filter_map(|session| {
            let late = session.worker.is_none() && session.since.elapsed() > START;
            (late && !std::mem::replace(&mut session.lost, true)).then_some(session.number)
        });
        lost.collect()
    }

    /// Its sessions that have a worker which is not reaped, or may yet get one.
    pub(crate) fn sessions_left(&self) -> usize {
        let life = self.life.borrow();
        life.as_ref().map_or(0, |life| {
            let sessions = life.sessions.borrow();
            sessions.values().filter(|session| !session.worker.as_ref().is_some_and(Worker::is_gone)).count()
        })
    }

    /// Serves the VM until `stop` says so: starts its device, again should it end, and answers it.
    ///
    /// # Errors
    /// When there can be no device; everything of the VM has ended then.
    pub(crate) async fn serve(self: Rc<Self>, mut stop: watch::Receiver<bool>) -> Result<(), VmError> {
        let vm = self.id();
        let mut restarts = TokenBucket::new(RESTART_RATE, RESTARTS, Instant::now());
        let result = loop {
            let life = match self.start_device().await {
                Ok(life) => life,
                Err(reason) => break Err(VmError::Device { vm, reason }),
            };
            self.phase.send_replace(Phase::Running);
            let mut sessions = JoinSet::new();
            for (serial, worker) in life.running() {
                let (vm, life) = (Rc::clone(&self), Rc::clone(&life));
                sessions.spawn_local(async move {
                    gone(&worker.pidfd).await;
                    vm.session_over(&life, serial);
                });
            }
            let stopped = tokio::select! {
                () = self.converse(&life, &mut sessions) => false,
                _ = stop.wait_for(|stop| *stop) => true,
            };
            self.end(&life, sessions, stopped).await;
            if stopped {
                break Ok(());
            }
            if restarts.take(Instant::now()).is_err() {
                break Err(VmError::Ending { vm });
            }
            tracing::warn!("the device of VM {vm} has ended and is started again");
            self.tell("device-ended", "it is started again, without the sessions it had");
        };
        for socket in [self.configuration.device_socket(vm), self.configuration.stream_socket(vm)] {
            match std::fs::remove_file(socket) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!("a socket of VM {vm} stays behind: {error}");
                }
                _ => {}
            }
        }
        if let Err(error) = &result {
            self.tell("vm-failed", error.to_string());
            self.phase.send_replace(Phase::Failed(error.to_string()));
        }
        result
    }

    /// The device that the daemon before has left, with its sessions.
    async fn adopt_device(&self) -> Option<Rc<Life>> {
        let record = self.launching.adoption().take_device(self.id())?;
        let socket = self.launching.keeper().take(&socket_name(self.id()))?;
        let pidfd = record.process.open()?;
        let process = record.process.process;
        let life = Life::new(Started { process, socket, pidfd })
            .inspect_err(|error| tracing::error!("VM {}: its device cannot be adopted: {error}", self.id()))
            .ok()?;
        for (serial, (number, worker)) in &record.sessions {
            // One that has ended meanwhile has ended.
            let Some(pidfd) = worker.open().and_then(|pidfd| watch(pidfd).ok()) else { continue };
            let worker = Worker { process: worker.process, pidfd: Rc::new(pidfd) };
            life.adopt(*serial, *number, worker);
        }
        let id = self.id();
        self.launching.adoption().note(|all| _ = all.devices.insert(id, record));
        life.channel.send(&ToDevice::Resume {}, &[]).await.ok()?;
        tracing::info!("VM {id}: device adopted: process {process}");
        Some(life)
    }

    async fn start_device(&self) -> Result<Rc<Life>, String> {
        if let Some(life) = self.adopt_device().await {
            *self.life.borrow_mut() = Some(Rc::clone(&life));
            return Ok(life);
        }
        let VmSpec { id: vm, scanouts, direct, .. } = self.spec.get();
        let request = ToLauncher::StartDevice { vm, scanouts: scanouts.into(), direct };
        let started = self.launching.start(request).await.map_err(|error| error.to_string())?;
        tracing::info!("VM {}: device is process {}", self.id(), started.process);
        if let Some(process) = Identity::behind(started.process, &started.pidfd) {
            self.launching.keeper().keep(&socket_name(vm), started.socket.as_fd());
            let record = DeviceRecord {
                process,
                direct: Some(direct),
                scanouts: Some(scanouts),
                sessions: BTreeMap::new(),
            };
            self.launching.adoption().note(|all| _ = all.devices.insert(vm, record));
        }
        let life = Life::new(started).map_err(|error| error.to_string())?;
        *self.life.borrow_mut() = Some(Rc::clone(&life));
        Ok(life)
    }

    /// Answers the device until it ends. A device that breaks the protocol is not listened to any more, but lives: the
    /// sessions it has are its guest's.
    async fn converse(self: &Rc<Self>, life: &Rc<Life>, sessions: &mut JoinSet<()>) {
        let mut listening = true;
        loop {
            tokio::select! {
                message = life.channel.receive(), if listening => {
                    listening = match message {
                        Ok(Some((message, _))) => self.heed(life, sessions, message),
                        Ok(None) => false,
                        Err(error) => self.complain(&error.to_string()),
                    };
                }
                Some(_) = sessions.join_next() => {}
                _ = life.pidfd.readable() => return,
            }
        }
    }

    /// Acts on a message; false when the device does not keep to the protocol.
    fn heed(self: &Rc<Self>, life: &Rc<Life>, sessions: &mut JoinSet<()>, message: FromDevice) -> bool {
        match message {
            FromDevice::WorkerWanted { session, user } => {
                if life.expects(session) {
                    // Asked for again, of a daemon that follows another; it gets one worker.
                    return true;
                }
                let admitted = life.admit(session);
                if admitted.is_none() {
                    self.log_limited(&format!(
                        "session {session} is refused: it exists, or there are too many"
                    ));
                }
                // Refusals are answered by tasks too, so their number needs the same bound: those that wait for a slow
                // device keep it from being read.
                if sessions.len() >= limits::SESSIONS.saturating_mul(2) {
                    return self.complain("it asks for more sessions than there can be");
                }
                let (vm, life) = (Rc::clone(self), Rc::clone(life));
                sessions.spawn_local(async move {
                    match admitted {
                        Some(serial) => {
                            vm.session(&life, serial, (session, user)).await;
                            vm.session_over(&life, serial);
                        }
                        None => vm.refuse(&life, session).await,
                    }
                });
                true
            }
            FromDevice::SessionEnded { session } => {
                for worker in life.session_ended(session) {
                    tokio::task::spawn_local(Rc::clone(self).see_off(worker));
                }
                true
            }
        }
    }

    /// A session has ended.
    fn session_over(&self, life: &Life, serial: u64) {
        life.sessions.borrow_mut().remove(&serial);
        let vm = self.id();
        self.launching.adoption().note(|all| {
            if let Some(device) = all.devices.get_mut(&vm) {
                device.sessions.remove(&serial);
            }
        });
    }

    /// Notes a session for the daemon that follows.
    fn record_session(&self, serial: u64, session: u32, worker: &Worker) {
        let Some(worker) = worker.identity() else { return };
        let vm = self.id();
        self.launching.adoption().note(|all| {
            if let Some(device) = all.devices.get_mut(&vm) {
                device.sessions.insert(serial, (session, worker));
            }
        });
    }

    /// One session: starts its worker, hands it to the device, and sees it end.
    async fn session(&self, life: &Life, serial: u64, (session, user): (u32, u32)) {
        let epoch = self.checkpoint.admitted(self.id());
        let worker = match self.start_worker(session, epoch.is_some()).await {
            Ok(started) => Worker::new(started),
            Err(reason) => Err(reason),
        };
        let (worker, socket) = match worker {
            Ok(worker) => worker,
            Err(reason) => {
                self.log_limited(&format!("session {session} gets no worker: {reason}"));
                self.refuse(life, session).await;
                return;
            }
        };
        // Known from here on to whoever fences the VM; if that was before, it is not for this epoch any more.
        let wanted = life.run(serial, &worker);
        if let Some(epoch) = epoch.filter(|_| wanted && self.checkpoint.admitted(self.id()) == epoch) {
            tracing::debug!("VM {}: session {session} has worker {}", self.id(), worker.process);
            self.begun.set(self.begun.get() + 1);
            self.record_session(serial, session, &worker);
            if let Err(error) = self.hand_over(life, (session, user), epoch, &socket, &worker).await {
                self.log_limited(&format!("cannot hand over the worker of session {session}: {error}"));
                kill(worker.pidfd.as_fd());
                self.refuse(life, session).await;
            }
        } else {
            kill(worker.pidfd.as_fd());
            self.refuse(life, session).await;
        }
        // From here on the worker's only socket is the device's.
        drop(socket);
        gone(&worker.pidfd).await;
    }

    async fn start_worker(&self, session: u32, admitted: bool) -> Result<Started, String> {
        if !admitted {
            return Err("the VM is fenced".to_owned());
        }
        if self.draining.get() {
            return Err("the VM is being drained".to_owned());
        }
        // Behind this, this session keeps its VM where it is.
        let mut moving = self.moving.subscribe();
        if !matches!(timeout(UNIT, moving.wait_for(|moving| !*moving)).await, Ok(Ok(_))) {
            return Err("the VM is being moved".to_owned());
        }
        let Some(units) = self.units.borrow().clone() else {
            return Err("the VM has no unit; a PUT finds one, if there is any".to_owned());
        };
        if let Some(unit) = units.iter().find(|unit| self.checkpoint.quarantine(unit.number()).is_some()) {
            return Err(format!("unit {} is quarantined", unit.number()));
        }
        let deadline = Instant::now() + UNIT;
        for unit in self.units().iter() {
            if !unit.ready(deadline.saturating_duration_since(Instant::now())).await {
                return Err(format!("unit {} does not lend memory", unit.number()));
            }
        }
        let turn = async {
            loop {
                let wait = self.starts.borrow_mut().take(Instant::now());
                match wait {
                    Ok(()) => return,
                    Err(wait) => sleep(wait).await,
                }
            }
        };
        timeout(TURN, turn).await.map_err(|_| "sessions are started too often".to_owned())?;
        let request = ToLauncher::StartWorker { vm: self.id(), session, visible: self.visible() };
        self.launching.start(request).await.map_err(|error| error.to_string())
    }

    /// Waits for a killed worker to go. One that does not hangs in the driver.
    async fn see_off(self: Rc<Self>, worker: Worker) {
        if timeout(KILLED, gone(&worker.pidfd)).await.is_err() {
            self.notify(Notice::Hung { vm: self.id(), process: worker.process });
        }
    }

    /// Tells a worker what it is for and who lends to it, and gives it to the device.
    async fn hand_over(
        &self,
        life: &Life,
        (session, user): (u32, u32),
        epoch: u64,
        socket: &OwnedFd,
        worker: &Worker,
    ) -> Result<(), String> {
        let borrower = Borrower { vm: self.id(), epoch, process: worker.process, session, user };
        let custody = self.introduce(borrower, worker)?;
        let setup = WorkerSetup {
            vm: self.id(),
            session,
            driver: self.configuration.driver.clone(),
            mapped_runs: self.configuration.mapped_runs,
            devices: u32::try_from(custody.len()).unwrap_or(u32::MAX),
            scrub_every_free: self.configuration.scrub_every_free,
            identity: self.visible().uuid(),
        };
        let arbiters = (0..).zip(custody.iter().map(|custody| custody.as_fd()));
        set_up_worker(socket, &setup, arbiters).map_err(|error| error.to_string())?;
        let message = ToDevice::Worker { session };
        let descriptors = [socket.as_fd(), worker.pidfd.get_ref().as_fd()];
        life.channel.send(&message, &descriptors).await.map_err(|error| error.to_string())
    }

    /// Introduces a worker to every arbiter. Returns its custody sockets in the order of devices.
    fn introduce(&self, borrower: Borrower, worker: &Worker) -> Result<Vec<OwnedFd>, String> {
        let introduce = |unit: &Rc<Unit>| match unit.introduce(borrower, worker.pidfd.get_ref()) {
            Ok(Some(custody)) => Ok(custody),
            Ok(None) => Err(format!("unit {} does not lend memory any more", unit.number())),
            Err(error) => Err(error.to_string()),
        };
        self.units().iter().map(introduce).collect()
    }

    /// What its workers' drivers are shown: one unit by its identity; several only where each is a whole device.
    fn visible(&self) -> Visible {
        match &*self.units() {
            [unit] => unit.place().visible,
            _ => Visible::Host,
        }
    }

    async fn refuse(&self, life: &Life, session: u32) {
        let message = ToDevice::NoWorker { session, error: DEVICE_UNAVAILABLE };
        match life.channel.send(&message, &[]).await {
            // The device is gone, and the session with it.
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => self.log_limited(&format!("cannot refuse session {session}: {error}")),
        }
    }

    /// Ends a device, if it still runs, and all its workers; waits until they are gone.
    async fn end(&self, life: &Rc<Life>, mut sessions: JoinSet<()>, running: bool) {
        life.over.set(true);
        let vm = self.id();
        self.launching.keeper().forget(&socket_name(vm));
        self.launching.adoption().note(|all| _ = all.devices.remove(&vm));
        if running {
            signal(life.pidfd.as_fd(), Signal::TERM);
            if timeout(DEVICE_END, life.pidfd.readable()).await.is_err() {
                tracing::warn!("the device of VM {} does not end: it is killed", self.id());
                kill(life.pidfd.as_fd());
            }
        }
        for worker in life.sessions.borrow().values().filter_map(|session| session.worker.as_ref()) {
            kill(worker.pidfd.as_fd());
        }
        let gone = async {
            gone(&life.pidfd).await;
            // Tasks that still start a worker see that the life is over, and kill it.
            while sessions.join_next().await.is_some() {}
        };
        if timeout(KILLED, gone).await.is_err() {
            tracing::error!("processes of VM {} were killed and are still there", self.id());
        }
        *self.life.borrow_mut() = None;
    }

    /// Notes that the device broke the protocol. Returns false: it is not listened to any more.
    fn complain(&self, what: &str) -> bool {
        tracing::error!("the device of VM {} is not listened to any more: {what}", self.id());
        false
    }

    /// Logs what a guest can bring about, as often as is useful.
    fn log_limited(&self, what: &str) {
        if self.complaints.borrow_mut().take(Instant::now()).is_ok() {
            tracing::warn!("VM {}: {what}", self.id());
        }
    }
}

impl Life {
    fn new(started: Started) -> io::Result<Rc<Self>> {
        Ok(Rc::new(Self {
            process: started.process,
            pidfd: watch(started.pidfd)?,
            channel: Channel::new(started.socket)?,
            over: Cell::new(false),
            sessions: RefCell::new(BTreeMap::new()),
            next_serial: Cell::new(0),
        }))
    }

    /// Enters a session that runs.
    fn adopt(&self, serial: u64, number: u32, worker: Worker) {
        let session =
            Session { number, ended: false, worker: Some(worker), since: Instant::now(), lost: false };
        self.sessions.borrow_mut().insert(serial, session);
        self.next_serial.set(self.next_serial.get().max(serial.saturating_add(1)));
    }

    /// Its sessions that have a worker.
    fn running(&self) -> Vec<(u64, Worker)> {
        let sessions = self.sessions.borrow();
        sessions.iter().filter_map(|(serial, session)| Some((*serial, session.worker.clone()?))).collect()
    }

    /// Whether a session of that number is waiting for its worker.
    fn expects(&self, number: u32) -> bool {
        let sessions = self.sessions.borrow();
        sessions
            .values()
            .any(|session| session.number == number && !session.ended && session.worker.is_none())
    }

    /// Enters a session, if there is room and it does not exist. Returns our number of it.
    fn admit(&self, number: u32) -> Option<u64> {
        let mut sessions = self.sessions.borrow_mut();
        let exists = |session: &Session| session.number == number && !session.is_over();
        if sessions.len() >= limits::SESSIONS || sessions.values().any(exists) {
            return None;
        }
        let serial = self.next_serial.get();
        self.next_serial.set(serial + 1);
        sessions.insert(
            serial,
            Session { number, ended: false, worker: None, since: Instant::now(), lost: false },
        );
        Some(serial)
    }

    /// Notes the worker of a session. False when it is not wanted any more.
    fn run(&self, serial: u64, worker: &Worker) -> bool {
        let mut sessions = self.sessions.borrow_mut();
        let Some(session) = sessions.get_mut(&serial) else { return false };
        session.worker = Some(worker.clone());
        !session.ended && !self.over.get()
    }

    /// The device says that a session's worker is gone. It is believed when the process is, and until then it counts.
    /// Returns the workers of that number, which have been killed.
    fn session_ended(&self, number: u32) -> Vec<Worker> {
        let mut sessions = self.sessions.borrow_mut();
        let mut ending = Vec::new();
        for session in sessions.values_mut().filter(|session| session.number == number && !session.ended) {
            session.ended = true;
            if let Some(worker) = &session.worker {
                kill(worker.pidfd.as_fd());
                ending.push(worker.clone());
            }
        }
        ending
    }
}

impl Session {
    /// Whether the device may use its number again.
    fn is_over(&self) -> bool {
        self.ended || self.worker.as_ref().is_some_and(Worker::is_gone)
    }
}

impl Worker {
    /// Watches a worker just started; returns its control socket with it.
    fn new(started: Started) -> Result<(Self, OwnedFd), String> {
        let Started { process, socket, pidfd } = started;
        // Should it fail, the worker is known to nobody and ends with its socket, which closes here.
        let pidfd = watch(pidfd).map_err(|error| error.to_string())?;
        Ok((Self { process, pidfd: Rc::new(pidfd) }, socket))
    }

    fn is_gone(&self) -> bool {
        is_gone(self.pidfd.get_ref())
    }

    fn identity(&self) -> Option<Identity> {
        Identity::behind(self.process, self.pidfd.get_ref())
    }
}
