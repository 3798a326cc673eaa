//! The inventory's client in `sluiced`: the inventory is a process that holds the driver's management library, which can hang.
//!
//! Nothing here waits for it without a limit: an inventory that does not answer is killed and started again, and each process
//! that depends on it receives a socket of the new one. Until then its answers are unknown, and nothing here guesses them. That
//! holds for changes above all: a change whose answer did not come may have happened or not, and only the list of instances
//! shows which.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    pin::pin,
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::fd::AsFd as _;
use sluice_messages::{
    control::{FromInventory, ToInventory, ToLauncher},
    inventory::{Instance, NAME_PARTS, Name, Place, Profile, Recovery, Switch},
};
use sluice_runtime::{process::kill, rate::TokenBucket};
use sluice_shared_memory::socket;
use tokio::{
    io::unix::AsyncFd,
    sync::{Notify, oneshot, watch},
    time::{interval, sleep, timeout},
};

use crate::{
    channel::{Channel, SendQueue, send_queue},
    handover::launching::Launching,
    handover::watched::{gone, watch},
    records::notice::{Notice, Notices},
};

/// How long it may take for an answer, unless it has only just been started.
const ANSWER: Duration = Duration::from_secs(2);
/// How often it is asked whether it still answers.
const PULSE: Duration = Duration::from_secs(2);
/// How long a new one may take for its first answer, for a driver is slow to start.
const START: Duration = Duration::from_secs(10);
/// How long a change of instances may take: the driver clears memory, and restarts engines.
const CHANGE: Duration = Duration::from_secs(30);
/// How long switching division into instances may take: the driver resets the device.
const SWITCH: Duration = Duration::from_secs(50);
/// Entries of any list that are asked for.
const ENTRIES: u32 = 256;
/// Restarts at once, and per second in the long run.
const RESTARTS: (u32, f64) = (3, 0.2);

/// The inventory.
#[derive(Debug)]
pub(crate) struct Inventory {
    launching: Rc<Launching>,
    notices: Notices,
    running: RefCell<Option<SendQueue<ToInventory>>>,
    process: Cell<Option<u32>>,
    asked: RefCell<BTreeMap<u64, oneshot::Sender<FromInventory>>>,
    next_serial: Cell<u64>,
    /// Counts the processes there were, and 0 while there is none that has answered.
    generation: watch::Sender<u64>,
    /// Until when it may be silent, because it changes something: a time for each change.
    busy: RefCell<Vec<Instant>>,
    /// Told when it has not answered in time.
    silent: Notify,
}

/// A question has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    /// None came in time, or there is no inventory now.
    #[error("the inventory does not answer")]
    Silent,
    /// The driver refuses, with this code.
    #[error("NVML says {0}")]
    Refused(u32),
    /// The answer is none to this question.
    #[error("the inventory's answer makes no sense")]
    Malformed,
}

impl AskError {
    /// Somebody uses what is to be changed (`NVML_ERROR_IN_USE`).
    pub(crate) const IN_USE: Self = Self::Refused(19);
    /// It becomes so with the next reset of the device (`NVML_ERROR_RESET_REQUIRED`).
    pub(crate) const RESET_REQUIRED: Self = Self::Refused(16);
    /// The device cannot do so (`NVML_ERROR_NOT_SUPPORTED`).
    pub(crate) const NOT_SUPPORTED: Self = Self::Refused(3);
    /// There is no such thing (`NVML_ERROR_NOT_FOUND`).
    pub(crate) const NOT_FOUND: Self = Self::Refused(6);
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    /// Bytes of its memory.
    pub(crate) memory: u64,
    /// 0 where the driver does not say.
    pub(crate) multiprocessors: u32,
    /// The NUMA node it is near, where that is known.
    pub(crate) node: Option<u32>,
    /// Domain, bus and device on the PCI bus.
    pub(crate) pci: (u32, u8, u8),
}

/// How a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Health {
    /// Whether it is divided into instances, now and from its next reset on.
    pub(crate) mig: (Switch, Switch),
    /// Whether its memory corrects errors.
    pub(crate) ecc: Switch,
    /// What the driver wants done about it.
    pub(crate) recovery: Recovery,
    /// Errors of its memory that were not corrected, where they are counted.
    pub(crate) uncorrected: Option<u64>,
    /// Whether memory waits for a reset to be taken out of use.
    pub(crate) repair: bool,
}

/// A kind of instance that a device can be divided into, all as the driver says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) profile: Profile,
    pub(crate) name: String,
    /// Where instances of it can be. A driver may list none while there are as many as there can be.
    pub(crate) places: Vec<Place>,
}

impl Inventory {
    pub(crate) fn new(launching: Rc<Launching>, notices: Notices) -> Rc<Self> {
        Rc::new(Self {
            launching,
            notices,
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

    /// How many devices there are; `None` when it does not say in time.
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

    /// A socket to it, for another process to ask.
    pub(crate) fn client(&self) -> Option<OwnedFd> {
        let running = self.running.borrow();
        let queue = running.as_ref()?;
        let (ours, theirs) = socket::pair()
            .inspect_err(|error| tracing::error!("cannot make a socket for the inventory: {error}"))
            .ok()?;
        queue.post(ToInventory::Client {}, vec![theirs]).then_some(ours)
    }

    /// What a device is.
    pub(crate) async fn device(&self, device: u32) -> Result<Device, AskError> {
        let name = self.name(|serial, part| ToInventory::DeviceName { serial, unit: device, part }).await?;
        match self.question(|serial| ToInventory::Device { serial, unit: device }).await? {
            FromInventory::Device { uuid, memory, multiprocessors, node, pci, .. } => {
                let [_, _, domain @ .., bus, slot] = pci.to_be_bytes();
                let node = Some(node).filter(|node| *node != u32::MAX);
                let pci = (u32::from_be_bytes(domain), bus, slot);
                Ok(Device { uuid, name, memory, multiprocessors, node, pci })
            }
            _ => Err(AskError::Malformed),
        }
    }

    /// How a device is.
    pub(crate) async fn health(&self, device: u32) -> Result<Health, AskError> {
        match self.question(|serial| ToInventory::Health { serial, unit: device }).await? {
            FromInventory::Health { mig, pending, ecc, recovery, uncorrected, repair, .. } => Ok(Health {
                mig: (mig, pending),
                ecc,
                recovery,
                uncorrected: Some(uncorrected).filter(|count| *count != u64::MAX),
                repair,
            }),
            _ => Err(AskError::Malformed),
        }
    }

    /// What a device can be divided into; nothing where it cannot.
    pub(crate) async fn kinds(&self, device: u32) -> Result<Vec<Kind>, AskError> {
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
            kinds.push(Kind { profile, name, places: places.as_slice().to_vec() });
        }
        Err(AskError::Malformed)
    }

    /// The instances there are, whoever made them.
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

    /// Makes an instance in this place, with one compute instance that is all of it.
    pub(crate) async fn create(&self, device: u32, profile: u32, place: Place) -> Result<Instance, AskError> {
        let (start, size) = (place.start.into(), place.size.into());
        let request = |serial| ToInventory::Create { serial, unit: device, profile, start, size };
        match self.change(CHANGE, request).await? {
            FromInventory::Instance { instance, .. } => Ok(instance),
            _ => Err(AskError::Malformed),
        }
    }

    /// Unmakes exactly this instance. Says [`AskError::NOT_FOUND`] when there is none that is so.
    pub(crate) async fn destroy(&self, device: u32, instance: &Instance) -> Result<(), AskError> {
        let &Instance { gpu: instance, profile, start, size, .. } = instance;
        let request = |serial| ToInventory::Destroy { serial, unit: device, instance, profile, start, size };
        match self.change(CHANGE, request).await? {
            FromInventory::Done { .. } => Ok(()),
            _ => Err(AskError::Malformed),
        }
    }

    /// Switches division into instances on or off. That an answer says `Ok` is not enough: [`Inventory::health`] says whether
    /// it has become so already, or does with the next reset.
    pub(crate) async fn set_mig(&self, device: u32, on: bool) -> Result<(), AskError> {
        match self.change(SWITCH, |serial| ToInventory::SetMig { serial, unit: device, on }).await? {
            FromInventory::Done { .. } => Ok(()),
            _ => Err(AskError::Malformed),
        }
    }

    /// Waits until another process than that of `generation` answers; false when none does in time.
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
        Ok(Name::join(&parts))
    }

    async fn question(&self, request: impl FnOnce(u64) -> ToInventory) -> Result<FromInventory, AskError> {
        // Behind a change that takes its time an answer may, too.
        let busy =
            self.busy.borrow().iter().max().map(|until| until.saturating_duration_since(Instant::now()));
        self.understand(ANSWER.max(busy.unwrap_or_default()), request).await
    }

    /// Asks for a change, during which it may be silent, and gives it up when it is for too long.
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
            // Of several changes each has a time of its own.
            let mut busy = self.busy.borrow_mut();
            if let Some(at) = busy.iter().position(|known| *known == until) {
                busy.swap_remove(at);
            }
        }
        // A process that is gone is silent, too; the one that follows it is not to be ended for that.
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
        let answer = timeout(limit, answer).await;
        self.asked.borrow_mut().remove(&serial);
        answer.ok()?.ok()
    }

    /// Keeps an inventory running until `stop` says so.
    pub(crate) async fn serve(self: Rc<Self>, mut stop: watch::Receiver<bool>) {
        let mut restarts = TokenBucket::new(RESTARTS.1, RESTARTS.0, Instant::now());
        let mut served = 0;
        loop {
            let stopped = tokio::select! {
                result = self.life(&mut served) => {
                    match result {
                        Ok(why) => tracing::error!("the inventory {why} and is started again"),
                        Err(error) => tracing::error!("cannot run the inventory: {error}"),
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

    /// One process, to its end. Returns what became of it.
    async fn life(&self, served: &mut u64) -> io::Result<&'static str> {
        let started = self.launching.start(ToLauncher::StartInventory {}).await.map_err(io::Error::other)?;
        let process = Ended(watch(started.pidfd)?);
        let channel = Channel::new(started.socket)?;
        // Two changes may have found the one before silent, at once.
        pin!(self.silent.notified()).enable();
        let (queue, mut queued) = send_queue();
        *self.running.borrow_mut() = Some(queue);
        self.process.set(Some(started.process));
        tracing::info!("the inventory is process {}", started.process);
        Ok(tokio::select! {
            result = self.hear(&channel) => { result?; "has closed its socket" }
            result = queued.send(&channel) => { result?; "has closed its socket" }
            () = self.watch_pulse(served) => "does not answer",
            () = self.silent.notified() => "does not end what it was asked to change",
            () = gone(&process.0) => "has ended",
        })
    }

    async fn hear(&self, channel: &Channel<FromInventory, ToInventory>) -> io::Result<()> {
        while let Some((message, _)) = channel.receive().await? {
            let serial = match message {
                FromInventory::Xid { unit, xid, process, instance } => {
                    // Nobody is there to hear it while everything ends.
                    _ = self.notices.send(Notice::Xid { unit, xid, process, instance });
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
                // The one who asked may have given up.
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

/// A process that does not outlive what it is for.
#[derive(Debug)]
struct Ended(AsyncFd<OwnedFd>);

impl Drop for Ended {
    fn drop(&mut self) {
        kill(self.0.as_fd());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        configuration::{Arguments, Configuration},
        handover::keeper::Keeper,
        records::state::adoption::Adoption,
    };
    use sluice_messages::inventory::{Places, WHOLE};
    use tokio::{task::LocalSet, time::Instant as Clock};

    const LARGE: Profile = Profile { id: 9, slices: 3, ..SMALL };
    const SMALL: Profile = Profile {
        id: 19,
        slices: 1,
        instances: 7,
        multiprocessors: 16,
        memory: 1 << 30,
        capabilities: 0,
        engines: sluice_messages::inventory::Engines { copy: 1, decoder: 1, encoder: 0, jpeg: 1, ofa: 0 },
    };
    const MADE: Instance = Instance { gpu: 7, compute: 0, profile: 19, start: 0, size: 1, uuid: [7; 16] };
    const NAME: &str = "a name so long that it does not fit into a single message of the inventory";

    /// Runs a test with an inventory that answers as it is told, or not at all.
    fn with(
        mut answer: impl FnMut(ToInventory) -> Option<FromInventory> + 'static,
        test: impl AsyncFnOnce(&Inventory),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        let all = LocalSet::new();
        all.block_on(&runtime, async {
            let arguments = Arguments {
                runtime_dir: Some("/nowhere".into()),
                // Any file: nothing is loaded here.
                driver: std::env::current_exe().ok(),
                vms: vec!["1".parse().expect("a VM")],
                libexec: Some("/nowhere".into()),
                ..Arguments::default()
            };
            let configuration = Rc::new(Configuration::load(arguments).expect("a configuration"));
            let (notices, _heard) = tokio::sync::mpsc::unbounded_channel();
            let keeper = Rc::new(Keeper::new().expect("nothing is passed"));
            let adoption = Rc::new(Adoption::open(&configuration.runtime_dir, false));
            let launching = Launching::new(configuration, None, keeper, adoption);
            let inventory = Inventory::new(Rc::new(launching), notices);
            let (ours, theirs) = socket::pair().expect("a socket");
            let (queue, mut queued) = send_queue();
            *inventory.running.borrow_mut() = Some(queue);
            let (own, played) = (Rc::clone(&inventory), Channel::new(theirs).expect("a channel"));
            tokio::task::spawn_local(async move {
                let channel = Channel::new(ours).expect("a channel");
                tokio::select! {
                    result = own.hear(&channel) => result.expect("answers"),
                    result = queued.send(&channel) => result.expect("a socket"),
                }
            });
            tokio::task::spawn_local(async move {
                while let Ok(Some((request, _))) = played.receive().await {
                    if let Some(said) = answer(request) {
                        played.send(&said, &[]).await.expect("heard");
                    }
                }
            });
            test(&inventory).await;
        });
    }

    /// Two profiles and one instance.
    fn usual(request: ToInventory) -> Option<FromInventory> {
        Some(match request {
            ToInventory::Profile { serial, index: 0, .. } => {
                FromInventory::Profile { serial, profile: SMALL }
            }
            ToInventory::Profile { serial, index: 1, .. } => {
                FromInventory::Profile { serial, profile: LARGE }
            }
            ToInventory::ProfileName { serial, part, .. } | ToInventory::DeviceName { serial, part, .. } => {
                FromInventory::Name { serial, text: Name::part(NAME, part) }
            }
            ToInventory::Places { serial, profile: 9, .. } => {
                let places = Places::new(&[Place { start: 0, size: 4 }, Place { start: 4, size: 4 }]);
                FromInventory::Places { serial, places: places.expect("few") }
            }
            ToInventory::Places { serial, .. } => FromInventory::Places { serial, places: Places::default() },
            ToInventory::Instance { serial, index: 0, .. } => {
                FromInventory::Instance { serial, instance: MADE }
            }
            ToInventory::Profile { serial, .. } | ToInventory::Instance { serial, .. } => {
                FromInventory::Nothing { serial }
            }
            ToInventory::Device { serial, .. } => {
                let (uuid, memory, node, pci) = ([1; 16], 1 << 40, u32::MAX, 0x1_0203);
                FromInventory::Device { serial, uuid, memory, multiprocessors: 132, node, pci }
            }
            ToInventory::Create { serial, .. } => FromInventory::Instance { serial, instance: MADE },
            ToInventory::Destroy { serial, instance: 7, .. } => FromInventory::Done { serial },
            ToInventory::Destroy { serial, instance: 8, .. } => FromInventory::Failed { serial, error: 19 },
            ToInventory::Destroy { serial, .. } => FromInventory::Failed { serial, error: 6 },
            ToInventory::Units { serial } => FromInventory::Units { serial, count: 1 },
            other => panic!("{other:?}"),
        })
    }

    // Promise: P44
    #[test]
    fn what_comes_in_pieces_is_put_together() {
        with(usual, async |inventory| {
            let kinds = inventory.kinds(0).await.expect("kinds");
            assert_eq!(kinds.iter().map(|kind| kind.profile).collect::<Vec<_>>(), [SMALL, LARGE]);
            assert_eq!((kinds[0].name.as_str(), kinds[0].places.len(), kinds[1].places.len()), (NAME, 0, 2));
            assert_eq!(inventory.instances(0).await, Ok(vec![MADE]));
            let device = inventory.device(0).await.expect("a device");
            assert_eq!((device.name.as_str(), device.node, device.pci), (NAME, None, (1, 2, 3)));
            let place = Place { start: 0, size: 1 };
            assert_eq!(inventory.create(0, 19, place).await, Ok(MADE));
            assert_eq!(inventory.destroy(0, &MADE).await, Ok(()));
            let used = Instance { gpu: 8, compute: WHOLE, ..MADE };
            assert_eq!(inventory.destroy(0, &used).await, Err(AskError::IN_USE));
            assert_eq!(inventory.destroy(0, &Instance { gpu: 9, ..MADE }).await, Err(AskError::NOT_FOUND));
        });
    }

    // Promise: P44
    #[test]
    fn a_change_that_hangs_is_given_up_and_not_before_its_time() {
        // Not even questions are answered while it changes something.
        let silent = |request| match request {
            ToInventory::Units { .. } | ToInventory::Create { .. } => None,
            other => usual(other),
        };
        with(silent, async |inventory| {
            let start = Clock::now();
            assert_eq!(
                inventory.question(|serial| ToInventory::Units { serial }).await,
                Err(AskError::Silent)
            );
            assert!((ANSWER..CHANGE).contains(&start.elapsed()), "{:?}", start.elapsed());
            let start = Clock::now();
            let place = Place { start: 0, size: 1 };
            let change = inventory.create(0, 19, place);
            let question = async {
                sleep(ANSWER).await;
                assert_eq!(
                    inventory.question(|serial| ToInventory::Units { serial }).await,
                    Err(AskError::Silent)
                );
                start.elapsed()
            };
            let (made, asked) = tokio::join!(change, question);
            assert_eq!(made, Err(AskError::Silent));
            assert!(asked >= CHANGE, "a question is given up after {asked:?}");
            assert!(start.elapsed() >= CHANGE);
            // Whoever runs the process is told, and questions have their own time again.
            timeout(Duration::from_millis(1), inventory.silent.notified()).await.expect("told");
            let start = Clock::now();
            assert_eq!(
                inventory.question(|serial| ToInventory::Units { serial }).await,
                Err(AskError::Silent)
            );
            assert!(start.elapsed() < CHANGE);
        });
    }
}
