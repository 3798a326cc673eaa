//! The inventory as `sluiced` sees it: a process that holds the driver's management library, which can hang.
//!
//! Nothing here waits for it without a limit: an inventory that does not answer is killed and started again, and whoever
//! depends on it is given a socket of the new one. Until then what it would have said is unknown, and nobody guesses.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::fd::AsFd as _;
use sluice_protocol::control::{FromInventory, ToInventory, ToLauncher};
use sluice_shared_memory::socket;
use tokio::{
    io::unix::AsyncFd,
    sync::{oneshot, watch},
    time::{interval, sleep, timeout},
};

use crate::{
    channel::Channel,
    launching::Launching,
    notice::{Notice, Notices},
    outbox::{Outbox, outbox},
    process::{gone, kill},
    rate::TokenBucket,
    watched::watch,
};

/// How long it may take for an answer, unless it has only just been started.
const ANSWER: Duration = Duration::from_secs(2);
/// How often it is asked whether it still answers.
const PULSE: Duration = Duration::from_secs(2);
/// How long a new one may take for its first answer, for a driver is slow to start.
const START: Duration = Duration::from_secs(10);
/// Restarts at once, and per second in the long run.
const RESTARTS: (u32, f64) = (3, 0.2);

/// The inventory.
#[derive(Debug)]
pub(crate) struct Inventory {
    launching: Rc<Launching>,
    notices: Notices,
    running: RefCell<Option<Outbox>>,
    process: Cell<Option<u32>>,
    asked: RefCell<BTreeMap<u64, oneshot::Sender<FromInventory>>>,
    next_serial: Cell<u64>,
    /// Counts the processes there were, and 0 while there is none that has answered.
    generation: watch::Sender<u64>,
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
        let outbox = running.as_ref()?;
        let (ours, theirs) = socket::pair()
            .inspect_err(|error| tracing::error!("cannot make a socket for the inventory: {error}"))
            .ok()?;
        outbox.post(ToInventory::Client {}.encode(), vec![theirs]).then_some(ours)
    }

    async fn ask(&self, limit: Duration, request: impl FnOnce(u64) -> ToInventory) -> Option<FromInventory> {
        let serial = self.next_serial.get();
        self.next_serial.set(serial + 1);
        let (sender, answer) = oneshot::channel();
        {
            let running = self.running.borrow();
            let outbox = running.as_ref()?;
            self.asked.borrow_mut().insert(serial, sender);
            outbox.post(request(serial).encode(), Vec::new());
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
        let (outbox, mut letters) = outbox();
        *self.running.borrow_mut() = Some(outbox);
        self.process.set(Some(started.process));
        tracing::info!("the inventory is process {}", started.process);
        Ok(tokio::select! {
            result = self.hear(&channel) => { result?; "has closed its socket" }
            result = letters.send(&channel) => { result?; "has closed its socket" }
            () = self.watch_pulse(served) => "does not answer",
            () = gone(&process.0) => "has ended",
        })
    }

    async fn hear(&self, channel: &Channel) -> io::Result<()> {
        while let Some((bytes, descriptors)) = channel.receive().await? {
            if !descriptors.is_empty() {
                return Err(io::Error::other("its message has descriptors"));
            }
            let message = FromInventory::decode(&bytes).map_err(io::Error::other)?;
            let serial = match message {
                FromInventory::Xid { unit, xid, process } => {
                    // Nobody is there to hear it while everything ends.
                    _ = self.notices.send(Notice::Xid { unit, xid, process });
                    continue;
                }
                FromInventory::Units { serial, .. }
                | FromInventory::Memory { serial, .. }
                | FromInventory::Process { serial, .. }
                | FromInventory::Failed { serial, .. } => serial,
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
            if self.ask(ANSWER, |serial| ToInventory::Units { serial }).await.is_none() {
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
