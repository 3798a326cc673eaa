//! The inventory's client in `sluiced`: the inventory is a process that loads the driver's management library, which can hang.
//!
//! Nothing here waits for it without a limit: an inventory that does not answer is killed and started again, and each process
//! that depends on it receives a socket of the new one. Until then its answers are unknown, and nothing here guesses them. That
//! applies above all to changes: a change without an answer may or may not have happened, and only the list of instances shows
//! the result.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    pin::pin,
    rc::Rc,
    time::{Duration, Instant},
};

use sluice_messages::{
    control::{FromInventory, ToInventory, ToLauncher},
    inventory::{
        Instance, InstancePlace, InstanceProfile, NAME_PARTS, NamePart, PciAddress, Recovery, Switch,
    },
};
use sluice_runtime::rate::TokenBucket;
use sluice_shared_memory::socket;
use tokio::{
    sync::{Notify, oneshot, watch},
    time::{interval, sleep, timeout},
};

use crate::{
    channel::{Channel, SendQueue, send_queue},
    handover::{launching::Launching, process::KillOnDrop},
    records::unit_event::{UnitEvent, UnitEventSender},
    time_limit::answer_within,
};

/// Time limit for an answer, unless the inventory has just been started. An Xid that comes while a silent one is replaced is lost, so a slow
/// one is not silent.
const ANSWER: Duration = Duration::from_secs(5);
/// Period of the checks that it still answers.
const PULSE: Duration = Duration::from_secs(2);
/// Time limit for the first answer of a new one, because a driver is slow to start.
const START: Duration = Duration::from_secs(10);
/// Time limit for a change of instances: the driver clears memory, and restarts engines.
const CHANGE: Duration = Duration::from_secs(30);
/// Time limit for a switch of the MIG mode: the driver resets the device.
const SWITCH: Duration = Duration::from_secs(50);
/// Limit of entries of any list.
const ENTRIES: u32 = 256;
/// Burst of restarts, and restarts per second in the long run.
const RESTARTS: (u32, f64) = (3, 0.2);

/// The inventory.
#[derive(Debug)]
pub(crate) struct Inventory {
    launching: Rc<Launching>,
    event_sender: UnitEventSender,
    running: RefCell<Option<SendQueue<ToInventory>>>,
    process: Cell<Option<u32>>,
    asked: RefCell<BTreeMap<u64, oneshot::Sender<FromInventory>>>,
    next_serial: Cell<u64>,
    /// Counts the processes so far; 0 while none has answered.
    generation: watch::Sender<u64>,
    /// Until these times it may be silent, because it executes changes: one time per change.
    busy: RefCell<Vec<Instant>>,
    /// Signalled when it has not answered in time.
    silent: Notify,
}

/// A request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    /// No answer came in time, or there is no inventory now.
    #[error("the inventory does not answer")]
    Silent,
    /// The driver refused, with this code.
    #[error("NVML returned error {0}")]
    Refused(u32),
    /// The answer does not fit the request.
    #[error("the inventory's answer is malformed")]
    Malformed,
}

impl AskError {
    /// A process uses the object to be changed (`NVML_ERROR_IN_USE`).
    pub(crate) const IN_USE: Self = Self::Refused(19);
    /// The change takes effect with the next reset of the device (`NVML_ERROR_RESET_REQUIRED`).
    pub(crate) const RESET_REQUIRED: Self = Self::Refused(16);
    /// The device does not support it (`NVML_ERROR_NOT_SUPPORTED`).
    pub(crate) const NOT_SUPPORTED: Self = Self::Refused(3);
    /// There is no such object (`NVML_ERROR_NOT_FOUND`).
    pub(crate) const NOT_FOUND: Self = Self::Refused(6);
}

/// The properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceProperties {
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    /// Bytes of its memory.
    pub(crate) memory: u64,
    /// 0 if the driver does not report it.
    pub(crate) multiprocessors: u32,
    /// The nearest NUMA node, if it is known.
    pub(crate) node: Option<u32>,
    /// Its address on the PCI bus.
    pub(crate) pci: PciAddress,
}

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceHealth {
    /// Its MIG mode, now and from its next reset on.
    pub(crate) mig: (Switch, Switch),
    /// The state of ECC.
    pub(crate) ecc: Switch,
    /// The recovery action that the driver requests.
    pub(crate) recovery: Recovery,
    /// Uncorrected errors of its memory, if they are counted.
    pub(crate) uncorrected: Option<u64>,
    /// True if memory waits for a reset to be taken out of use.
    pub(crate) repair: bool,
}

/// A kind of instance into which a device can be divided, as the driver reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InstanceKind {
    pub(crate) profile: InstanceProfile,
    pub(crate) name: String,
    /// Possible positions of its instances. A driver may list none while the limit of instances is reached.
    pub(crate) places: Vec<InstancePlace>,
}

impl Inventory {
    pub(crate) fn new(launching: Rc<Launching>, event_sender: UnitEventSender) -> Rc<Self> {
        Rc::new(Self {
            launching,
            event_sender,
            running: RefCell::new(None),
            process: Cell::new(None),
            asked: RefCell::new(BTreeMap::new()),
            next_serial: Cell::new(1),
            generation: watch::Sender::new(0),
            busy: RefCell::default(),
            silent: Notify::new(),
        })
    }

    /// Its process, if one runs.
    pub(crate) fn process(&self) -> Option<u32> {
        self.process.get()
    }

    /// Changes when another process has taken over.
    pub(crate) fn generation(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// The number of devices; `None` if there is no answer in time.
    pub(crate) async fn units(&self) -> Option<u32> {
        let mut generation = self.generation();
        let started = async { generation.wait_for(|generation| *generation > 0).await.is_ok() };
        if !timeout(START, started).await.unwrap_or(false) {
            return None;
        }
        match self.ask(ANSWER, |serial| ToInventory::Units { serial }).await {
            Some(FromInventory::Units { count, .. }) => Some(count),
            _ => None,
        }
    }

    /// A socket to it for another process.
    pub(crate) fn client(&self) -> Option<OwnedFd> {
        let running = self.running.borrow();
        let queue = running.as_ref()?;
        let (ours, theirs) = socket::pair()
            .inspect_err(|error| tracing::error!(%error, "cannot create a socket for the inventory"))
            .ok()?;
        queue.post(ToInventory::Client {}, vec![theirs]).then_some(ours)
    }

    /// The properties of a device.
    pub(crate) async fn device(&self, device: u32) -> Result<DeviceProperties, AskError> {
        let name = self.name(|serial, part| ToInventory::DeviceName { serial, unit: device, part }).await?;
        match self.question(|serial| ToInventory::Device { serial, unit: device }).await? {
            FromInventory::Device { uuid, memory, multiprocessors, node, pci, .. } => {
                let node = Some(node).filter(|node| *node != u32::MAX);
                Ok(DeviceProperties { uuid, name, memory, multiprocessors, node, pci })
            }
            _ => Err(AskError::Malformed),
        }
    }

    /// The state of a device.
    pub(crate) async fn health(&self, device: u32) -> Result<DeviceHealth, AskError> {
        match self.question(|serial| ToInventory::Health { serial, unit: device }).await? {
            FromInventory::Health { mig, pending, ecc, recovery, uncorrected, repair, .. } => {
                Ok(DeviceHealth {
                    mig: (mig, pending),
                    ecc,
                    recovery,
                    uncorrected: Some(uncorrected).filter(|count| *count != u64::MAX),
                    repair,
                })
            }
            _ => Err(AskError::Malformed),
        }
    }

    /// The kinds of instances of a device; empty if it cannot be divided.
    pub(crate) async fn kinds(&self, device: u32) -> Result<Vec<InstanceKind>, AskError> {
        let mut kinds = Vec::new();
        for index in 0..ENTRIES {
            let request = |serial| ToInventory::Profile { serial, unit: device, index };
            let profile = match self.question(request).await? {
                FromInventory::Profile { profile, .. } => profile,
                FromInventory::Nothing { .. } => return Ok(kinds),
                _ => return Err(AskError::Malformed),
            };
            let id = profile.id;
            let name = self
                .name(|serial, part| ToInventory::ProfileName { serial, unit: device, profile: id, part })
                .await?;
            let request = |serial| ToInventory::Places { serial, unit: device, profile: id };
            let FromInventory::Places { places, .. } = self.question(request).await? else {
                return Err(AskError::Malformed);
            };
            kinds.push(InstanceKind { profile, name, places: places.as_slice().to_vec() });
        }
        Err(AskError::Malformed)
    }

    /// The existing instances, whether Sluice made them or not.
    pub(crate) async fn instances(&self, device: u32) -> Result<Vec<Instance>, AskError> {
        let mut instances = Vec::new();
        for index in 0..ENTRIES {
            match self.question(|serial| ToInventory::Instance { serial, unit: device, index }).await? {
                FromInventory::Instance { instance, .. } => instances.push(instance),
                FromInventory::Nothing { .. } => return Ok(instances),
                _ => return Err(AskError::Malformed),
            }
        }
        Err(AskError::Malformed)
    }

    /// Creates an instance at this position, with one compute instance that fills it.
    pub(crate) async fn create(
        &self,
        device: u32,
        profile: u32,
        place: InstancePlace,
    ) -> Result<Instance, AskError> {
        let (start, size) = (place.start.into(), place.size.into());
        let request = |serial| ToInventory::Create { serial, unit: device, profile, start, size };
        match self.change(CHANGE, request).await? {
            FromInventory::Instance { instance, .. } => Ok(instance),
            _ => Err(AskError::Malformed),
        }
    }

    /// Destroys exactly this instance. Returns [`AskError::NOT_FOUND`] if there is none that matches.
    pub(crate) async fn destroy(&self, device: u32, instance: &Instance) -> Result<(), AskError> {
        let &Instance { gpu: instance, profile, start, size, .. } = instance;
        let request = |serial| ToInventory::Destroy { serial, unit: device, instance, profile, start, size };
        match self.change(CHANGE, request).await? {
            FromInventory::Done { .. } => Ok(()),
            _ => Err(AskError::Malformed),
        }
    }

    /// Switches the MIG mode. The answer `Ok` is not enough: [`Inventory::health`] shows if the mode has changed already, or
    /// changes with the next reset.
    pub(crate) async fn set_mig(&self, device: u32, on: bool) -> Result<(), AskError> {
        match self.change(SWITCH, |serial| ToInventory::SetMig { serial, unit: device, on }).await? {
            FromInventory::Done { .. } => Ok(()),
            _ => Err(AskError::Malformed),
        }
    }

    /// Waits until another process than that of `generation` answers; false if none does in time.
    pub(crate) async fn is_back(&self, generation: u64) -> bool {
        let mut now = self.generation();
        let back = now.wait_for(|now| *now > generation);
        matches!(timeout(START, back).await, Ok(Ok(_)))
    }

    async fn name(&self, request: impl Fn(u64, u32) -> ToInventory) -> Result<String, AskError> {
        let mut parts = Vec::new();
        for part in 0..NAME_PARTS {
            match self.question(|serial| request(serial, part)).await? {
                FromInventory::Name { text, .. } => parts.push(text),
                _ => return Err(AskError::Malformed),
            }
        }
        Ok(NamePart::join(&parts))
    }

    async fn question(&self, request: impl FnOnce(u64) -> ToInventory) -> Result<FromInventory, AskError> {
        // Behind a change that takes long an answer may take long, too.
        let busy =
            self.busy.borrow().iter().max().map(|until| until.saturating_duration_since(Instant::now()));
        self.understand(ANSWER.max(busy.unwrap_or_default()), request).await
    }

    /// Requests a change, during which it may be silent; if it is silent for too long, requests its restart.
    async fn change(
        &self,
        limit: Duration,
        request: impl FnOnce(u64) -> ToInventory,
    ) -> Result<FromInventory, AskError> {
        let until = Instant::now() + limit;
        let asked = self.process.get();
        self.busy.borrow_mut().push(until);
        let answer = self.understand(limit, request).await;
        {
            // Each of several changes has its own time.
            let mut busy = self.busy.borrow_mut();
            if let Some(at) = busy.iter().position(|known| *known == until) {
                busy.swap_remove(at);
            }
        }
        // A process that is gone is silent, too; its successor must not be ended for that.
        if answer == Err(AskError::Silent) && self.process.get() == asked {
            self.silent.notify_one();
        }
        answer
    }

    async fn understand(
        &self,
        limit: Duration,
        request: impl FnOnce(u64) -> ToInventory,
    ) -> Result<FromInventory, AskError> {
        match self.ask(limit, request).await {
            Some(FromInventory::Failed { error, .. }) => Err(AskError::Refused(error)),
            Some(answer) => Ok(answer),
            None => Err(AskError::Silent),
        }
    }

    async fn ask(&self, limit: Duration, request: impl FnOnce(u64) -> ToInventory) -> Option<FromInventory> {
        let serial = self.next_serial.get();
        self.next_serial.set(serial + 1);
        let (sender, answer) = oneshot::channel();
        {
            let running = self.running.borrow();
            let queue = running.as_ref()?;
            self.asked.borrow_mut().insert(serial, sender);
            queue.post(request(serial), Vec::new());
        }
        let answer = answer_within(limit, answer).await;
        self.asked.borrow_mut().remove(&serial);
        answer?.ok()
    }

    /// Keeps an inventory running until `stop` is set.
    pub(crate) async fn serve(self: Rc<Self>, mut stop: watch::Receiver<bool>) {
        let mut restarts = TokenBucket::new(RESTARTS.1, RESTARTS.0, Instant::now());
        let mut served = 0;
        loop {
            let stopped = tokio::select! {
                result = self.life(&mut served) => {
                    match result {
                        Ok(why) => tracing::error!(reason = why, "the inventory is lost; starting another"),
                        Err(error) => tracing::error!(%error, "cannot run the inventory"),
                    }
                    false
                }
                _ = stop.wait_for(|stop| *stop) => true,
            };
            *self.running.borrow_mut() = None;
            self.process.set(None);
            self.busy.borrow_mut().clear();
            self.asked.borrow_mut().clear();
            if stopped {
                return;
            }
            while let Err(wait) = restarts.take(Instant::now()) {
                tokio::select! {
                    () = sleep(wait) => {}
                    _ = stop.wait_for(|stop| *stop) => return,
                }
            }
        }
    }

    /// Runs one process, to its end. Returns the reason of the end.
    async fn life(&self, served: &mut u64) -> io::Result<&'static str> {
        let started = self.launching.start(ToLauncher::StartInventory {}).await.map_err(io::Error::other)?;
        let process = KillOnDrop(started.process);
        let channel = Channel::new(started.socket)?;
        // Two changes may have found the last process silent, at once.
        pin!(self.silent.notified()).enable();
        let (queue, mut queued) = send_queue();
        *self.running.borrow_mut() = Some(queue);
        self.process.set(Some(process.0.number()));
        tracing::info!(process = process.0.number(), "started the inventory");
        Ok(tokio::select! {
            result = self.receive(&channel) => { result?; "has closed its socket" }
            result = queued.send(&channel) => { result?; "has closed its socket" }
            () = self.watch_pulse(served) => "does not answer",
            () = self.silent.notified() => "did not complete a change in time",
            () = process.0.gone() => "has ended",
        })
    }

    async fn receive(&self, channel: &Channel<FromInventory, ToInventory>) -> io::Result<()> {
        while let Some((message, _)) = channel.receive().await? {
            let serial = match message {
                FromInventory::Xid { unit, xid, process, instance } => {
                    // The receiver is gone while the daemon ends.
                    _ = self.event_sender.send(UnitEvent::Xid { unit, xid, process, instance });
                    continue;
                }
                FromInventory::Units { serial, .. }
                | FromInventory::Memory { serial, .. }
                | FromInventory::Process { serial, .. }
                | FromInventory::Failed { serial, .. }
                | FromInventory::Device { serial, .. }
                | FromInventory::Name { serial, .. }
                | FromInventory::Health { serial, .. }
                | FromInventory::Utilization { serial, .. }
                | FromInventory::Profile { serial, .. }
                | FromInventory::Places { serial, .. }
                | FromInventory::Capacity { serial, .. }
                | FromInventory::Instance { serial, .. }
                | FromInventory::Nothing { serial }
                | FromInventory::Done { serial } => serial,
            };
            if let Some(sender) = self.asked.borrow_mut().remove(&serial) {
                // The requester may have given up.
                _ = sender.send(message);
            }
        }
        Ok(())
    }

    /// Returns when an answer did not come in time.
    async fn watch_pulse(&self, served: &mut u64) {
        if self.ask(START, |serial| ToInventory::Units { serial }).await.is_none() {
            return;
        }
        *served += 1;
        self.generation.send_replace(*served);
        let mut pulse = interval(PULSE);
        loop {
            pulse.tick().await;
            if self.question(|serial| ToInventory::Units { serial }).await == Err(AskError::Silent) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
