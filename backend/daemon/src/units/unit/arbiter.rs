//! The life of the unit's arbiter: its start or adoption, its state, its watch, and its end.

use std::{
    fs::OpenOptions,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use sluice_messages::control::{ArbiterSetup, FromArbiter, HostAccess, ToArbiter, ToLauncher, codec};
use sluice_runtime::{process::Identity, rate::TokenBucket};
use tokio::{
    sync::watch,
    time::{Instant as Clock, interval, sleep, timeout},
};

use super::{ArbiterReports, Unit, reports::DESCRIBE};
use crate::{
    channel::{Channel, send_queue},
    configuration::Configuration,
    handover::process::KillOnDrop,
    records::state::adoption::ArbiterRecord,
    records::unit_event::UnitEvent,
};

/// Time limit for an answer of an arbiter that lends, before it counts as hung. Drivers have long calls.
pub(super) const HUNG: Duration = Duration::from_secs(20);
/// Time limit for taking and clearing all memory, before the arbiter counts as hung.
const READY: Duration = Duration::from_secs(120);
/// Period of requests for its report.
const PULSE: Duration = Duration::from_millis(500);
/// Time limit for the end of a killed arbiter.
const KILLED: Duration = Duration::from_secs(5);
/// Burst of restarts, and restarts per second in the long run.
const RESTARTS: (u32, f64) = (3, 0.2);

/// Files for the receipts of a unit: as many as fit into one message.
const RECEIPTS: usize = 4;

impl Unit {
    /// Keeps an arbiter running until `stop` is set; with `give_up`, also returns if no arbiter can be kept running.
    pub(crate) async fn serve(
        self: Rc<Self>,
        mut stop: watch::Receiver<bool>,
        give_up: bool,
    ) -> Result<(), UnitError> {
        let mut restarts = TokenBucket::new(RESTARTS.1, RESTARTS.0, Instant::now());
        loop {
            let arbiter = tokio::select! {
                arbiter = self.start() => arbiter,
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            };
            let mut stopped = false;
            match arbiter {
                Ok(arbiter) => {
                    tokio::select! {
                        result = self.run(&arbiter) => {
                            let why = result.unwrap_or_else(|error| error.to_string());
                            tracing::error!(unit = self.number, reason = why, "the arbiter failed; starting another");
                        }
                        _ = stop.wait_for(|stop| *stop) => stopped = true,
                    }
                    self.end(&arbiter, stopped).await;
                }
                Err(error) => tracing::error!(unit = self.number, %error, "cannot start the arbiter"),
            }
            if stopped {
                return Ok(());
            }
            while let Err(wait) = restarts.take(Instant::now()) {
                if give_up {
                    return Err(UnitError { unit: self.number });
                }
                tokio::select! {
                    () = sleep(wait) => {}
                    _ = stop.wait_for(|stop| *stop) => return Ok(()),
                }
            }
        }
    }

    /// Adopts the arbiter of the last daemon, which lends and continues to lend.
    async fn adopt(&self) -> io::Result<Option<Arbiter>> {
        let record = self.launching.adoption().take_arbiter(self.number);
        let socket = self.launching.fd_store().take(&socket_name(self.number));
        let (Some(ArbiterRecord { process, lends: Some(lends), host_access }), Some(socket)) =
            (record, socket)
        else {
            return Ok(None);
        };
        let Some(opened) = self.launching.open(process).await else { return Ok(None) };
        let channel = Channel::new(socket)?;
        tracing::info!(unit = self.number, process = process.process, "adopted the arbiter");
        self.process.set(Some(process));
        if let Some(access) = host_access.and_then(HostAccess::from_number) {
            self.set_host_access(access);
        }
        self.lends.send_replace(Some(lends));
        // The last daemon probed the driver, and a VM may use all memory by now: nothing waits for another probe. A quarantined unit
        // has no such VM.
        self.serves_sessions.send_replace(self.checkpoint.quarantine(self.number).is_none());
        self.record(process, Some(lends));
        self.adopted.set(true);
        Ok(Some(Arbiter { process: KillOnDrop(opened), channel, receipts: None }))
    }

    /// Records the arbiter for the next daemon.
    pub(super) fn record(&self, process: Identity, lends: Option<u64>) {
        let unit = self.number;
        let host_access = self.host_access().map(|access| access as u32);
        let record = ArbiterRecord { process, lends, host_access };
        self.launching.adoption().note(|all| _ = all.arbiters.insert(unit, record));
    }

    pub(super) async fn start(&self) -> io::Result<Arbiter> {
        if let Some(arbiter) = self.adopt().await? {
            return Ok(arbiter);
        }
        let receipts = self.open_receipts()?;
        let started = self
            .launching
            .start(ToLauncher::StartArbiter { unit: self.number, visible: self.place.visible })
            .await
            .map_err(io::Error::other)?;
        let process = started.process.identity();
        tracing::info!(unit = self.number, process = process.process, "started the arbiter");
        self.launching.fd_store().keep(&socket_name(self.number), started.socket.as_fd());
        let channel = Channel::new(started.socket)?;
        let arbiter = Arbiter { process: KillOnDrop(started.process), channel, receipts: Some(receipts) };
        // If this daemon is killed, the next one must adopt or end the arbiter, because it holds the unit's memory.
        self.checkpoint.set_arbiter(self.number, Some(process));
        self.record(process, None);
        self.process.set(Some(process));
        Ok(arbiter)
    }

    /// The files for receipts of scrubs: appended to, never read by the daemon, and never lost with a process.
    fn open_receipts(&self) -> io::Result<Vec<OwnedFd>> {
        let open = |path| OpenOptions::new().append(true).create(true).mode(0o600).open(path);
        receipts(&self.configuration, self.number)
            .into_iter()
            .map(|path| open(path).map(OwnedFd::from))
            .collect()
    }

    /// Sends an arbiter the full state and handles its messages, to its end. Returns the reason of the end.
    async fn run(&self, arbiter: &Arbiter) -> io::Result<String> {
        let adopted = arbiter.receipts.is_none();
        // It takes the unit's memory only when its record is on disk for the next daemon. If the write fails, the task that
        // keeps the checkpoint logs it. That of an adopted arbiter is on disk, and its unit lends already: a session would be
        // refused that asks for memory before the queue is here.
        if !adopted {
            _ = self.checkpoint.written().await;
        }
        let setup = ArbiterSetup {
            unit: self.number,
            driver: self.configuration.driver.clone(),
            device: self.place.ordinal(),
            identity: self.place.visible.uuid(),
            listed: self.place.device,
            instance: self.place.instance,
            verify: self.configuration.verify,
            scrub: self.configuration.scrub,
            reserve: self.configuration.reserve,
            receipts: self.configuration.receipts_size / RECEIPTS as u64,
        };
        let setup = codec::encode(&setup).map_err(io::Error::other)?;
        let (queue, mut queued) = send_queue();
        // An adopted arbiter has its setup.
        if let Some(files) = &arbiter.receipts {
            let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
            arbiter.channel.send_setup(&setup, &files).await?;
        }
        *self.running.borrow_mut() = Some(queue);
        self.tell_inventory();
        for (&ancestor, &bytes) in self.escrows.borrow().iter() {
            self.tell(ToArbiter::Escrow { ancestor, bytes });
        }
        for (&vm, terms) in self.terms.borrow().iter() {
            self.tell_terms(vm, terms);
        }
        if adopted {
            // The last daemon may have been killed before it could send this.
            for (vm, epoch) in self.checkpoint.gone(|vm| self.terms.borrow().contains_key(&vm)) {
                self.tell(ToArbiter::Forget { vm, epoch });
            }
        }
        Ok(tokio::select! {
            result = self.receive(&arbiter.channel) => { result?; "its socket is closed".to_owned() }
            result = queued.send(&arbiter.channel) => { result?; "its socket is closed".to_owned() }
            why = self.watch_pulse() => why,
            () = self.follow_inventory() => unreachable!("an inventory is followed for ever"),
            () = self.probe_driver() => unreachable!("a unit has its sender of figures"),
            () = arbiter.process.0.gone() => "it has ended".to_owned(),
        })
    }

    fn tell_inventory(&self) {
        let client = self.inventory.as_ref().and_then(|inventory| inventory.client());
        match (client, self.running.borrow().as_ref()) {
            (Some(client), Some(queue)) => {
                _ = queue.post(ToArbiter::Inventory {}, vec![client]);
            }
            (None, Some(_)) if self.inventory.is_none() => tracing::warn!(
                unit = self.number,
                "without NVML it is unknown when a worker's memory is free again; a VM's memory stays charged to it"
            ),
            _ => {}
        }
    }

    /// Sends the arbiter a socket of each new inventory.
    async fn follow_inventory(&self) {
        let Some(inventory) = &self.inventory else { return std::future::pending().await };
        let mut generation = inventory.generation();
        loop {
            if generation.changed().await.is_err() {
                return std::future::pending().await;
            }
            self.tell_inventory();
        }
    }

    /// Returns when the arbiter does not become ready, or does not answer.
    pub(super) async fn watch_pulse(&self) -> String {
        if !self.ready(READY).await {
            return "it does not become ready".to_owned();
        }
        let mut pulse = interval(PULSE);
        let mut silent = Duration::ZERO;
        loop {
            pulse.tick().await;
            let asked = Clock::now();
            if self.describe().await.is_some() {
                silent = Duration::ZERO;
                continue;
            }
            // More is time for which this process did not run.
            silent += asked.elapsed().clamp(PULSE, DESCRIBE);
            if silent > HUNG {
                return format!("it has not answered for {HUNG:?}");
            }
        }
    }

    /// Ends an arbiter, in order if possible, and reports that its loans have ended.
    async fn end(&self, arbiter: &Arbiter, orderly: bool) {
        *self.running.borrow_mut() = None;
        self.process.set(None);
        self.adopted.set(false);
        self.lends.send_replace(None);
        self.figures.send_replace(None);
        self.serves_sessions.send_replace(false);
        self.host_access.send_replace(None);
        self.unknown_since.set(Instant::now());
        self.launching.fd_store().forget(&socket_name(self.number));
        arbiter.channel.shut();
        self.launching.adoption().note(|all| _ = all.arbiters.remove(&self.number));
        *self.latest.borrow_mut() = ArbiterReports::default();
        if !orderly {
            // The receiver is gone while the daemon ends.
            _ = self.event_sender.send(UnitEvent::ArbiterEnded { unit: self.number });
        }
        // It has nothing to save.
        arbiter.process.0.kill();
        match timeout(KILLED, arbiter.process.0.gone()).await {
            Ok(()) => self.checkpoint.set_arbiter(self.number, None),
            Err(_) => tracing::error!(unit = self.number, "the arbiter was killed and still exists"),
        }
    }
}

/// A running arbiter.
#[derive(Debug)]
pub(super) struct Arbiter {
    /// Killed with its connection: without one it must not hold the unit's memory.
    process: KillOnDrop,
    channel: Channel<FromArbiter, ToArbiter>,
    /// The files for receipts; `None` for an adopted arbiter, which has them already.
    receipts: Option<Vec<OwnedFd>>,
}

/// The name of an arbiter's socket in the fd store.
pub(crate) fn socket_name(unit: u32) -> String {
    format!("unit-{unit}")
}

/// The files of a unit's receipts of scrubs, which are written in rotation.
fn receipts(configuration: &Configuration, unit: u32) -> [PathBuf; RECEIPTS] {
    std::array::from_fn(|number| {
        let number = if number == 0 { String::new() } else { format!(".{number}") };
        configuration.log_directory.join(format!("scrub-unit-{unit}{number}.log"))
    })
}

/// A unit's arbiter cannot be kept running.
#[derive(Debug, thiserror::Error)]
#[error("the arbiter of unit {unit} keeps ending")]
pub(crate) struct UnitError {
    unit: u32,
}
