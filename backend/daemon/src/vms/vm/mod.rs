//! One VM: its device and the workers of its sessions.
//!
//! The set of VMs serves it, and the registry asks for its state. It owns the list of live processes. It must never trust a message of a device: a device may be controlled by its guest, and
//! can at worst use up its own VM's limit of workers. Sessions are counted by running processes, never by messages.
//!
//! ```text
//!          serve: its device is adopted or started              its device has ended: another is started,
//!  Starting ──────────────────────────────────────▶ Running ◀─┐ if RESTARTS allows
//!   ▲    │                                             │  └────┘
//!   │    │ its device cannot be started                │ its device keeps ending, or the next cannot be started
//!   │    └─────────────────▶ Failed ◀──────────────────┘
//!   │ begin: a client       │
//!   └─ puts the VM again ───┘
//! ```
//! In each state the VM may also be fenced ([`crate::fence`]).

mod device;
mod sessions;
mod turns;
mod warm;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    path::PathBuf,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use sluice_api::v1::FenceStep;
use sluice_messages::{
    control::{FromDevice, ToDevice},
    launch::vsock_socket,
};
use sluice_protocol::limits;
use sluice_runtime::{closer::Closer, rate::TokenBucket};
use tokio::sync::{Notify, watch};

use crate::{
    channel::StrangerChannel,
    configuration::Configuration,
    fence::Fence,
    handover::{launching::Launching, process::LaunchedProcess, running::Started},
    records::journal::{Journal, Subject},
    records::state::checkpoint::Checkpoint,
    records::unit_event::{UnitEvent, UnitEventSender},
    spec::{self, VmSpec},
    units::unit::{Unit, VmTerms},
    vms::context::VmContext,
};
use turns::StartTurns;
use warm::WarmPlace;

/// CUDA_ERROR_DEVICE_UNAVAILABLE: the code for a guest that cannot have a worker.
pub const DEVICE_UNAVAILABLE: u32 = sluice_protocol::session::refusal::DEVICE_UNAVAILABLE;
/// Time limit for the end of killed processes; a driver that frees much memory is slow.
const KILLED: Duration = Duration::from_secs(5);

/// A VM.
#[derive(Debug)]
pub struct Vm {
    spec: Cell<VmSpec>,
    /// The VM's name and owners for clients.
    subject: Subject,
    journal: Arc<Journal>,
    /// Closes descriptors that devices have sent.
    closer: Closer,
    /// True if running sessions continue but none may begin.
    draining: Cell<bool>,
    phase: watch::Sender<VmPhase>,
    /// The number of sessions that got a worker.
    begun: Cell<u64>,
    fences: Cell<Fences>,
    configuration: Rc<Configuration>,
    pub(super) launching: Rc<Launching>,
    /// `None` until a unit is found for it: it begins no session.
    units: RefCell<Option<Rc<[Rc<Unit>]>>>,
    /// True while it is given another unit; sessions wait.
    moving: watch::Sender<bool>,
    checkpoint: Rc<Checkpoint>,
    event_sender: UnitEventSender,
    /// Notified when it is fenced, at each step, and when it is readmitted.
    fenced: Notify,
    starts: StartTurns,
    complaints: RefCell<TokenBucket>,
    device_process: RefCell<Option<Rc<DeviceProcess>>>,
    warm: WarmPlace,
}

/// Fences of a VM since it was registered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fences {
    /// The number of fences that began.
    pub(crate) begun: u64,
    /// Total time of the fences that have ended.
    pub(crate) took: Duration,
    since: Option<Instant>,
}

impl Fences {
    fn begin(self) -> Self {
        Self { begun: self.begun.saturating_add(1), since: Some(Instant::now()), ..self }
    }

    fn end(self) -> Self {
        // A fence that an earlier daemon began is not in the figures.
        let took = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        Self { took: self.took.saturating_add(took), since: None, ..self }
    }
}

/// The state of a VM's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VmPhase {
    /// It has not had a device yet.
    Starting,
    /// It has a device, or is getting the next.
    Running,
    /// It has no device and gets none.
    Failed(String),
}

/// One device process, and the sessions that depend on it.
#[derive(Debug)]
struct DeviceProcess {
    process: Rc<LaunchedProcess>,
    channel: StrangerChannel<FromDevice, ToDevice>,
    /// True if the device ended or is to end: it gets nothing new.
    over: watch::Sender<bool>,
    /// By the daemon's own numbers: the device may reuse its number of a session that ended while the worker is still dying.
    sessions: RefCell<BTreeMap<u64, DeviceSession>>,
    next_serial: Cell<u64>,
}

/// One session of a device, from the request until its worker has ended.
#[derive(Debug)]
struct DeviceSession {
    /// The device's number.
    number: u32,
    /// True if the device has reported its end.
    ended: bool,
    /// True from the request to the launcher for its worker on. Before that it gets none if its VM is fenced.
    starting: bool,
    worker: Option<Rc<LaunchedProcess>>,
    /// The time of its request.
    since: Instant,
    /// True if it was reported that it got no worker.
    lost: bool,
}

/// A VM cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// Its device cannot be started.
    #[error("cannot start the device of VM {vm}: {reason}")]
    Device {
        /// The VM.
        vm: u32,
        /// The reason.
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
        context: &VmContext,
    ) -> Rc<Self> {
        let VmContext { configuration, launching, units: _, checkpoint, event_sender, journal, closers } =
            context;
        let now = Instant::now();
        let starts = StartTurns::new(configuration.starts_per_second, configuration.starts_at_once);
        let vm = Rc::new(Self {
            spec: Cell::new(spec),
            subject,
            journal: Arc::clone(journal),
            closer: closers.of(spec.id),
            draining: Cell::new(false),
            phase: watch::Sender::new(VmPhase::Starting),
            begun: Cell::new(0),
            fences: Cell::default(),
            configuration: Rc::clone(configuration),
            launching: Rc::clone(launching),
            units: RefCell::new(units),
            moving: watch::Sender::new(false),
            checkpoint: Rc::clone(checkpoint),
            event_sender: event_sender.clone(),
            fenced: Notify::new(),
            starts,
            complaints: RefCell::new(TokenBucket::new(0.1, 10, now)),
            device_process: RefCell::new(None),
            warm: WarmPlace::default(),
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

    /// The VM's name and owners for clients.
    pub(crate) fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Records an event of the VM for clients.
    pub(crate) fn tell(&self, kind: &'static str, detail: impl Into<String>) {
        self.journal.note(kind, Some(self.subject.clone()), detail);
    }

    /// True if it belongs to a project or organisation.
    pub(crate) fn is_of(&self, ancestor: u32) -> bool {
        let spec = self.spec.get();
        spec.project == ancestor || spec.organisation == ancestor
    }

    /// Its limits.
    pub(crate) fn spec(&self) -> VmSpec {
        self.spec.get()
    }

    /// Changes its limits.
    pub(crate) fn change(&self, spec: VmSpec) {
        self.spec.set(VmSpec { id: self.id(), ..spec });
        for unit in self.units().iter() {
            unit.admit(self.id(), self.terms());
        }
        // The time until its automatic readmission may have changed.
        self.fenced.notify_waiters();
    }

    /// True if running sessions continue but none may begin.
    pub(crate) fn draining(&self) -> bool {
        self.draining.get()
    }

    /// Begins or ends the drain.
    pub(crate) fn drain(&self, draining: bool) {
        self.draining.set(draining);
    }

    /// The state of its device.
    pub(crate) fn phase(&self) -> VmPhase {
        self.phase.borrow().clone()
    }

    /// Marks the VM as waiting for its device.
    pub(crate) fn begin(&self) {
        self.phase.send_replace(VmPhase::Starting);
    }

    /// Waits until it has its device, or cannot have one.
    pub(crate) async fn started(&self) -> VmPhase {
        let mut phase = self.phase.subscribe();
        // `self` has the sender, so it is not dropped.
        phase
            .wait_for(|phase| *phase != VmPhase::Starting)
            .await
            .map_or(VmPhase::Starting, |phase| phase.clone())
    }

    /// The number of its sessions that got a worker since it was registered.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.get()
    }

    /// Its fences since it was registered.
    pub(crate) fn fences(&self) -> Fences {
        self.fences.get()
    }

    /// Counts the start of a fence.
    pub(crate) fn count_fence(&self) {
        self.fences.set(self.fences.get().begin());
    }

    /// Counts the end of a fence.
    pub(crate) fn count_fenced(&self) {
        self.fences.set(self.fences.get().end());
    }

    /// The process of its device, if it runs.
    pub(crate) fn device(&self) -> Option<u32> {
        self.device_process.borrow().as_ref().map(|device_process| device_process.process.number())
    }

    /// The socket of its device.
    pub(crate) fn socket(&self) -> PathBuf {
        self.configuration.device_socket(self.id())
    }

    /// The socket for guests that share no memory, and the path at which their VMM's own socket must be for that.
    pub(crate) fn vsock(&self) -> (PathBuf, PathBuf) {
        let (configuration, id) = (&self.configuration, self.id());
        (configuration.stream_socket(id), vsock_socket(&configuration.runtime_dir, id))
    }

    /// The units that lend to it.
    pub(crate) fn units(&self) -> Rc<[Rc<Unit>]> {
        self.units.borrow().clone().unwrap_or_default()
    }

    /// True if a unit lends to it.
    pub(crate) fn is_on(&self, unit: u32) -> bool {
        self.units().iter().any(|known| known.number() == unit)
    }

    /// True if it uses nothing of its units: it has no session, and is not being fenced.
    pub(crate) fn is_idle(&self) -> bool {
        let device_process = self.device_process.borrow();
        // Before its device has started, the daemon may still adopt one, with sessions.
        let no_session =
            device_process.as_ref().is_some_and(|device_process| device_process.sessions.borrow().is_empty());
        no_session && self.stands().step == FenceStep::Active
    }

    /// Delays new sessions during a change of units; false if the VM is not idle, or is held already.
    pub(crate) fn hold(&self) -> bool {
        self.is_idle() && !self.moving.send_replace(true)
    }

    /// Ends the delay; sessions begin on the present units.
    pub(crate) fn let_go(&self) {
        self.moving.send_replace(false);
    }

    /// Changes its units. Only while it is held, or has none: no worker may be left on the old ones.
    pub(crate) fn put_on(&self, units: Option<Rc<[Rc<Unit>]>>) {
        self.dismiss_warm();
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

    /// The state of its fence.
    pub(crate) fn stands(&self) -> Fence {
        self.checkpoint.vm(self.id())
    }

    pub(crate) fn notify(&self, event: UnitEvent) {
        // The receiver is gone while the daemon ends.
        _ = self.event_sender.send(event);
    }

    /// Its limits in the form for arbiters.
    pub(crate) fn terms(&self) -> VmTerms {
        let (spec, fence) = (self.spec.get(), self.stands());
        VmTerms {
            epoch: fence.epoch,
            fenced: fence.admitted().is_none(),
            limit: spec.memory.0,
            guaranteed: spec.share.guaranteed_bytes,
            headroom: spec.share.headroom_bytes,
            pinned: spec.share.pinned_bytes,
            ancestors: spec::ancestors(&spec),
            shares: spec::shares(&spec),
        }
    }
}

impl DeviceProcess {
    fn new(started: Started, closer: Closer) -> io::Result<Rc<Self>> {
        Ok(Rc::new(Self {
            process: started.process,
            channel: StrangerChannel::new(started.socket, closer)?,
            over: watch::Sender::new(false),
            sessions: RefCell::new(BTreeMap::new()),
            next_serial: Cell::new(0),
        }))
    }

    /// Adds a running session.
    fn adopt(&self, serial: u64, number: u32, worker: Rc<LaunchedProcess>) {
        let session = DeviceSession { worker: Some(worker), ..DeviceSession::new(number) };
        self.sessions.borrow_mut().insert(serial, session);
        self.next_serial.set(self.next_serial.get().max(serial.saturating_add(1)));
    }

    /// Its sessions with a worker.
    fn running(&self) -> Vec<(u64, Rc<LaunchedProcess>)> {
        let sessions = self.sessions.borrow();
        sessions.iter().filter_map(|(serial, session)| Some((*serial, session.worker.clone()?))).collect()
    }

    /// True if a session of that number waits for its worker.
    fn expects(&self, number: u32) -> bool {
        let sessions = self.sessions.borrow();
        sessions
            .values()
            .any(|session| session.number == number && !session.ended && session.worker.is_none())
    }

    /// Adds a session, if there is room and it does not exist. Returns the daemon's own number of it.
    fn admit(&self, number: u32) -> Option<u64> {
        let mut sessions = self.sessions.borrow_mut();
        let exists = |session: &DeviceSession| session.number == number && !session.is_over();
        if sessions.len() >= limits::SESSIONS || sessions.values().any(exists) {
            return None;
        }
        let serial = self.next_serial.get();
        self.next_serial.set(serial + 1);
        sessions.insert(serial, DeviceSession::new(number));
        Some(serial)
    }

    /// Notes that the launcher is asked for the worker of a session.
    fn begin(&self, serial: u64) {
        if let Some(session) = self.sessions.borrow_mut().get_mut(&serial) {
            session.starting = true;
        }
    }

    /// Records the worker of a session; false if the worker is no longer needed.
    fn run(&self, serial: u64, worker: &Rc<LaunchedProcess>) -> bool {
        let mut sessions = self.sessions.borrow_mut();
        let Some(session) = sessions.get_mut(&serial) else { return false };
        session.worker = Some(worker.clone());
        !session.ended && !*self.over.borrow()
    }

    /// Handles the device's report that a session has ended. The session counts until its worker has ended. Returns the workers
    /// of that number, which have been killed.
    fn session_ended(&self, number: u32) -> Vec<Rc<LaunchedProcess>> {
        let mut sessions = self.sessions.borrow_mut();
        let mut ending = Vec::new();
        for session in sessions.values_mut().filter(|session| session.number == number && !session.ended) {
            session.ended = true;
            if let Some(worker) = &session.worker {
                worker.kill();
                ending.push(worker.clone());
            }
        }
        ending
    }
}

impl DeviceSession {
    fn new(number: u32) -> Self {
        Self { number, ended: false, starting: false, worker: None, since: Instant::now(), lost: false }
    }

    /// True if it has a worker that is not reaped, or may get one although its VM is fenced.
    fn is_left(&self) -> bool {
        self.worker.as_ref().map_or(self.starting, |worker| !worker.is_gone())
    }

    /// True if the device may use its number again.
    fn is_over(&self) -> bool {
        self.ended || self.worker.as_ref().is_some_and(|worker| worker.is_gone())
    }
}
