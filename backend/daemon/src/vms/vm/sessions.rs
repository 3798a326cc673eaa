//! Sessions of a VM's device: each gets a worker, is recorded, and is over when the worker has ended.

use super::{DEVICE_UNAVAILABLE, DeviceProcess, DeviceSession, KILLED, Vm};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    time::{Duration, Instant},
};

use sluice_messages::{
    control::{FromDevice, ToDevice, ToLauncher, WorkerSetup},
    inventory::Visible,
};
use sluice_protocol::limits;
use sluice_runtime::process::Identity;
use tokio::{
    task::{JoinSet, spawn_local},
    time::timeout,
};

use crate::{
    handover::{
        launching::{send_arbiters, set_up_worker},
        process::LaunchedProcess,
        running::Started,
    },
    records::unit_event::UnitEvent,
    units::unit::{Borrower, Unit},
};

/// Time that a session waits for a unit that is being scrubbed, before it is refused.
const UNIT: Duration = Duration::from_secs(5);
/// Time limit for the start of a session in total, with some reserve.
const START: Duration = Duration::from_secs(50);

impl Vm {
    /// Ends all its workers; the device and its guest live on, and are notified of each.
    pub(crate) fn end_workers(&self) {
        self.dismiss_warm();
        if let Some(device_process) = self.device_process.borrow().as_ref() {
            for worker in
                device_process.sessions.borrow().values().filter_map(|session| session.worker.as_ref())
            {
                worker.kill();
            }
        }
    }

    /// Ends a worker; false if it does not belong to this VM.
    pub(crate) fn end_worker(&self, process: u32) -> bool {
        let device_process = self.device_process.borrow();
        let Some(device_process) = device_process.as_ref() else { return false };
        let sessions = device_process.sessions.borrow();
        let worker = sessions.values().filter_map(|session| session.worker.as_ref());
        let worker = worker.filter(|worker| worker.number() == process).inspect(|worker| worker.kill());
        worker.count() > 0
    }

    /// The identities of its workers.
    pub(crate) fn workers(&self) -> Vec<Identity> {
        let device_process = self.device_process.borrow();
        let Some(device_process) = device_process.as_ref() else { return Vec::new() };
        let sessions = device_process.sessions.borrow();
        let workers = sessions.values().filter_map(|session| session.worker.as_ref());
        workers.filter(|worker| !worker.is_gone()).map(|worker| worker.identity()).collect()
    }

    /// The numbers of its workers' processes.
    pub(crate) fn worker_numbers(&self) -> Vec<u32> {
        let device_process = self.device_process.borrow();
        let Some(device_process) = device_process.as_ref() else { return Vec::new() };
        let sessions = device_process.sessions.borrow();
        sessions
            .values()
            .filter_map(|session| session.worker.as_ref())
            .map(|worker| worker.number())
            .collect()
    }

    /// Its sessions and their workers.
    pub(crate) fn sessions(&self) -> Vec<(u32, Option<u32>)> {
        let device_process = self.device_process.borrow();
        let Some(device_process) = device_process.as_ref() else { return Vec::new() };
        let sessions = device_process.sessions.borrow();
        let describe =
            |session: &DeviceSession| (session.number, session.worker.as_ref().map(|worker| worker.number()));
        sessions.values().map(describe).collect()
    }

    /// Requests a report from every unit, and waits for the answers for a bounded time.
    pub(crate) async fn ask(&self) {
        for unit in self.units().iter() {
            // If a unit does not answer, its last report stays.
            _ = unit.describe_vm(self.id()).await;
        }
    }

    /// Sessions that should have got a worker or a refusal, each reported once.
    pub(crate) fn lost_sessions(&self) -> Vec<u32> {
        let device_process = self.device_process.borrow();
        let Some(device_process) = device_process.as_ref() else { return Vec::new() };
        let mut sessions = device_process.sessions.borrow_mut();
        let lost = sessions.values_mut().filter_map(|session| {
            let late = session.worker.is_none() && session.since.elapsed() > START;
            (late && !std::mem::replace(&mut session.lost, true)).then_some(session.number)
        });
        lost.collect()
    }

    /// The number of its sessions that have a worker which is not reaped, or may get one even if the VM is fenced now.
    pub(crate) fn sessions_left(&self) -> usize {
        let device_process = self.device_process.borrow();
        device_process.as_ref().map_or(0, |device_process| {
            let sessions = device_process.sessions.borrow();
            sessions.values().filter(|session| session.is_left()).count()
        })
    }

    /// Handles a message; false if the device breaks the protocol.
    pub(super) fn on_message(
        self: &Rc<Self>,
        device_process: &Rc<DeviceProcess>,
        sessions: &mut JoinSet<()>,
        message: FromDevice,
    ) -> bool {
        match message {
            FromDevice::WorkerWanted { session, user } => {
                if device_process.expects(session) {
                    // A repeated request after a restart of the daemon; the session gets one worker.
                    return true;
                }
                let admitted = device_process.admit(session);
                if admitted.is_none() && self.may_log() {
                    tracing::warn!(
                        vm = self.id(),
                        session,
                        "a session is refused: it exists, or there are too many"
                    );
                }
                // Refusals are answered by tasks too, so their number needs the same bound: while tasks wait for a slow device,
                // no message of it is read.
                if sessions.len() >= limits::SESSIONS.saturating_mul(2) {
                    return self.complain("it requests more sessions than allowed");
                }
                let (vm, device_process) = (Rc::clone(self), Rc::clone(device_process));
                sessions.spawn_local(async move {
                    match admitted {
                        Some(serial) => {
                            vm.session(&device_process, serial, (session, user)).await;
                            vm.session_over(&device_process, serial);
                        }
                        None => vm.refuse(&device_process, session).await,
                    }
                });
                true
            }
            FromDevice::SessionEnded { session } => {
                for worker in device_process.session_ended(session) {
                    spawn_local(Rc::clone(self).see_off(worker));
                }
                true
            }
        }
    }

    /// Removes a session that has ended.
    pub(super) fn session_over(&self, device_process: &DeviceProcess, serial: u64) {
        device_process.sessions.borrow_mut().remove(&serial);
        let vm = self.id();
        self.launching.adoption().note(|all| {
            if let Some(device) = all.devices.get_mut(&vm) {
                device.sessions.remove(&serial);
            }
        });
    }

    /// Records a session for the next daemon.
    fn record_session(&self, serial: u64, session: u32, worker: Identity) {
        let vm = self.id();
        self.launching.adoption().note(|all| {
            if let Some(device) = all.devices.get_mut(&vm) {
                device.sessions.insert(serial, (session, worker));
            }
        });
    }

    /// Serves one session: starts its worker, hands it to the device, and waits for its end.
    pub(super) async fn session(
        &self,
        device_process: &DeviceProcess,
        serial: u64,
        (session, user): (u32, u32),
    ) {
        let epoch = self.checkpoint.admitted(self.id());
        let (worker, socket) = match self.start_worker(device_process, serial, session, epoch).await {
            Ok(Started { process, socket }) => (process, socket),
            Err(reason) => {
                if self.may_log() {
                    tracing::warn!(vm = self.id(), session, reason, "a session gets no worker");
                }
                // It is over already: the device may never read the refusal.
                self.session_over(device_process, serial);
                self.refuse(device_process, session).await;
                return;
            }
        };
        // From here on a fence or the quarantine of a unit ends this worker; if one came during its start, the session is refused.
        let wanted = device_process.run(serial, &worker) && self.sound_units(&self.units()).is_ok();
        let epoch = epoch.filter(|_| wanted && self.checkpoint.admitted(self.id()) == epoch);
        let hand_over = async {
            let Some(epoch) = epoch else { return false };
            tracing::debug!(vm = self.id(), session, process = worker.number(), "the session has a worker");
            self.begun.set(self.begun.get() + 1);
            self.record_session(serial, session, worker.identity());
            let handed = self.hand_over(device_process, (session, user), epoch, &socket, &worker).await;
            if let Err(error) = &handed
                && self.may_log()
            {
                tracing::warn!(vm = self.id(), session, error, "cannot hand over the worker of a session");
            }
            handed.is_ok()
        };
        // A device that does not read its socket keeps no session whose worker has ended.
        let handed = tokio::select! {
            biased;
            handed = hand_over => handed,
            () = worker.gone() => false,
        };
        // From here on the device has the worker's only socket.
        drop(socket);
        self.want_warm();
        let over = async {
            worker.gone().await;
            self.session_over(device_process, serial);
        };
        if handed {
            over.await;
        } else {
            worker.kill();
            tokio::join!(self.refuse(device_process, session), over);
        }
    }

    async fn start_worker(
        &self,
        device_process: &DeviceProcess,
        serial: u64,
        session: u32,
        epoch: Option<u64>,
    ) -> Result<Started, String> {
        let fenced = || epoch.is_none() || self.checkpoint.admitted(self.id()) != epoch;
        if fenced() {
            return Err("the VM is fenced".to_owned());
        }
        let mut over = device_process.over.subscribe();
        tokio::select! {
            turn = self.starts.wait() => turn.map_err(|error| error.to_string())?,
            _ = over.wait_for(|over| *over) => return Err("the device has ended".to_owned()),
        }
        if fenced() {
            return Err("the VM was fenced meanwhile".to_owned());
        }
        if self.draining.get() {
            return Err("the VM is drained".to_owned());
        }
        // From here on this session prevents a move of its VM.
        let mut moving = self.moving.subscribe();
        if !matches!(timeout(UNIT, moving.wait_for(|moving| !*moving)).await, Ok(Ok(_))) {
            return Err("the VM is being moved".to_owned());
        }
        let Some(units) = self.units.borrow().clone() else {
            return Err("the VM has no unit; a PUT of the VM finds one, if there is room".to_owned());
        };
        self.sound_units(&units)?;
        let deadline = Instant::now() + UNIT;
        for unit in self.units().iter() {
            if !unit.ready(deadline.saturating_duration_since(Instant::now())).await {
                return Err(format!("unit {} does not lend memory", unit.number()));
            }
            // A VM may have all memory of an instance; the probe needs some of it for a moment.
            if !unit.place().is_whole() {
                unit.probed().await;
            }
        }
        self.sound_units(&units)?;
        // A fence waits for the sessions that have begun by then, and for no other.
        if fenced() {
            return Err("the VM was fenced meanwhile".to_owned());
        }
        device_process.begin(serial);
        match self.take_warm().await {
            Some(warm) => Ok(warm),
            // A fence ends the worker that was being started.
            None if fenced() => Err("the VM was fenced meanwhile".to_owned()),
            None => self.launch_worker(session).await,
        }
    }

    /// Fails if one of the units is quarantined.
    fn sound_units(&self, units: &[Rc<Unit>]) -> Result<(), String> {
        match units.iter().find(|unit| self.checkpoint.quarantine(unit.number()).is_some()) {
            Some(unit) => Err(format!("unit {} is quarantined", unit.number())),
            None => Ok(()),
        }
    }

    /// True if it has units, and none is quarantined.
    pub(super) fn has_sound_units(&self) -> bool {
        let units = self.units();
        !units.is_empty() && self.sound_units(&units).is_ok()
    }

    /// Starts a worker, which starts its driver; its session is for logs, 0 if it is not known yet.
    pub(super) async fn launch_worker(&self, session: u32) -> Result<Started, String> {
        let visible = self.visible();
        let setup = WorkerSetup {
            vm: self.id(),
            session,
            driver: self.configuration.driver.clone(),
            mapped_runs: self.configuration.mapped_runs,
            driver_queue: self.configuration.driver_queue,
            devices: u32::try_from(self.units().len()).unwrap_or(u32::MAX),
            scrub_every_free: self.configuration.scrub_every_free,
            identity: visible.uuid(),
        };
        let request = ToLauncher::StartWorker { vm: self.id(), session, visible };
        let started = self.launching.start(request).await.map_err(|error| error.to_string())?;
        match set_up_worker(&started.socket, &setup) {
            Ok(()) => Ok(started),
            Err(error) => {
                started.process.kill();
                Err(error.to_string())
            }
        }
    }

    /// Waits for the end of a killed worker. If it does not end, it hangs in the driver.
    pub(super) async fn see_off(self: Rc<Self>, worker: Rc<LaunchedProcess>) {
        if timeout(KILLED, worker.gone()).await.is_err() {
            self.notify(UnitEvent::Hung { vm: self.id(), process: worker.number() });
        }
    }

    /// Sends a worker its custody sockets, and hands it to the device.
    pub(super) async fn hand_over(
        &self,
        device_process: &DeviceProcess,
        (session, user): (u32, u32),
        epoch: u64,
        socket: &OwnedFd,
        worker: &LaunchedProcess,
    ) -> Result<(), String> {
        let borrower = Borrower { vm: self.id(), epoch, session, user };
        let custody = self.introduce(borrower, worker)?;
        let arbiters = (0..).zip(custody.iter().map(|custody| custody.as_fd()));
        send_arbiters(socket, arbiters).map_err(|error| error.to_string())?;
        let message = ToDevice::Worker { session, grouped: worker.cgroup_kill().is_some() };
        let mut descriptors = vec![socket.as_fd(), worker.pidfd().as_fd()];
        descriptors.extend(worker.cgroup_kill().map(AsFd::as_fd));
        device_process.channel.send(&message, &descriptors).await.map_err(|error| error.to_string())
    }

    /// Introduces a worker to every arbiter. Returns the worker's custody sockets in the order of devices.
    fn introduce(&self, borrower: Borrower, worker: &LaunchedProcess) -> Result<Vec<OwnedFd>, String> {
        let introduce = |unit: &Rc<Unit>| match unit.introduce(borrower, worker) {
            Ok(Some(custody)) => Ok(custody),
            Ok(None) => Err(format!("unit {} no longer lends memory", unit.number())),
            Err(error) => Err(error.to_string()),
        };
        self.units().iter().map(introduce).collect()
    }

    /// The devices visible to its workers' drivers: one unit by its identity; several only if each is a whole device.
    pub(super) fn visible(&self) -> Visible {
        match &*self.units() {
            [unit] => unit.place().visible,
            _ => Visible::Host,
        }
    }

    pub(super) async fn refuse(&self, device_process: &DeviceProcess, session: u32) {
        let message = ToDevice::NoWorker { session, error: DEVICE_UNAVAILABLE };
        match device_process.channel.send(&message, &[]).await {
            // The device is gone, and the session with it.
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) if self.may_log() => {
                tracing::warn!(vm = self.id(), session, %error, "cannot refuse a session");
            }
            Err(_) => {}
        }
    }
}
