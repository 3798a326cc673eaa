//! The process of a VM's device: adopted or started, served, and ended.

use super::{DeviceProcess, KILLED, Vm, VmError, VmPhase};
use std::{
    collections::BTreeMap,
    os::fd::AsFd as _,
    rc::Rc,
    time::{Duration, Instant},
};

use sluice_messages::control::{ToDevice, ToLauncher};
use sluice_runtime::rate::TokenBucket;
use tokio::{
    sync::watch,
    task::{JoinSet, spawn_local},
    time::{sleep, timeout},
};

use crate::{
    channel::discard_stranger,
    handover::{
        fd_store::device_name,
        running::{LaunchError, Started},
    },
    records::{state::adoption::DeviceRecord, unit_event::UnitEvent},
    spec::VmSpec,
};

/// Devices of one VM that may end in a row before the VM fails.
const RESTARTS: u32 = 3;
/// Restarts per second in the long run.
const RESTART_RATE: f64 = 0.1;
/// Time for which a VM that has lost its device waits for another before it fails, and the time between two tries.
const AWAY: Duration = Duration::from_secs(600);
const AGAIN: Duration = Duration::from_secs(1);

impl Vm {
    /// Serves the VM until `stop` is set: starts its device, restarts it if it ends, and answers it.
    ///
    /// # Errors
    /// If there can be no device; every process of the VM has ended then.
    pub(crate) async fn serve(self: Rc<Self>, mut stop: watch::Receiver<bool>) -> Result<(), VmError> {
        let vm = self.id();
        let mut restarts = TokenBucket::new(RESTART_RATE, RESTARTS, Instant::now());
        let result = loop {
            // The futures of start and end are in boxes: each VM would otherwise always have the size of the largest.
            let device_process = match self.start_device_again(&mut stop).await {
                Ok(Some(device_process)) => device_process,
                Ok(None) => break Ok(()),
                Err(error) => break Err(VmError::Device { vm, reason: error.to_string() }),
            };
            self.phase.send_replace(VmPhase::Running);
            spawn_local(Rc::clone(&self).keep_warm(Rc::clone(&device_process)));
            let mut sessions = JoinSet::new();
            for (serial, worker) in device_process.running() {
                let (vm, device_process) = (Rc::clone(&self), Rc::clone(&device_process));
                sessions.spawn_local(async move {
                    worker.gone().await;
                    vm.session_over(&device_process, serial);
                });
            }
            let stopped = tokio::select! {
                () = self.run(&device_process, &mut sessions) => false,
                _ = stop.wait_for(|stop| *stop) => true,
            };
            Box::pin(self.end(&device_process, sessions, stopped)).await;
            if stopped {
                break Ok(());
            }
            if restarts.take(Instant::now()).is_err() {
                break Err(VmError::Ending { vm });
            }
            tracing::warn!(vm, "the device has ended; starting another");
            self.tell("device-ended", "it is started again, without its sessions");
        };
        if let Err(error) = self.launching.remove_sockets(vm).await {
            tracing::warn!(vm, %error, "cannot remove the sockets of the VM");
        }
        if let Err(error) = &result {
            self.tell("vm-failed", error.to_string());
            self.phase.send_replace(VmPhase::Failed(error.to_string()));
        }
        result
    }

    /// Adopts the device of the last daemon, with its sessions.
    pub(super) async fn adopt_device(&self) -> Option<Rc<DeviceProcess>> {
        let record = self.launching.adoption().take_device(self.id())?;
        let socket = self.launching.fd_store().take(&device_name(self.id()))?;
        let Some(process) = self.launching.open(record.process).await else {
            self.launching.fd_store().forget(&device_name(self.id()));
            discard_stranger(socket, &self.closer);
            return None;
        };
        let number = process.number();
        let device_process = DeviceProcess::new(Started { process, socket }, self.closer.clone())
            .inspect_err(|error| tracing::error!(vm = self.id(), %error, "cannot adopt the device"))
            .ok()?;
        for (serial, (number, worker)) in &record.sessions {
            // A worker that has ended needs no entry.
            let Some(worker) = self.launching.open(*worker).await else { continue };
            device_process.adopt(*serial, *number, worker);
        }
        let id = self.id();
        self.launching.adoption().note(|all| _ = all.devices.insert(id, record));
        device_process.channel.send(&ToDevice::Resume {}, &[]).await.ok()?;
        tracing::info!(vm = id, process = number, "adopted the device");
        Some(device_process)
    }

    /// Starts the device. If the VM had one before, this waits for an absent launcher, for the last device that the launcher cannot reap yet,
    /// and for descriptors of devices that are not closed yet, at most for [`AWAY`]; the journal has it.
    /// `None` if `stop` is set meanwhile.
    async fn start_device_again(
        &self,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<Option<Rc<DeviceProcess>>, LaunchError> {
        let (vm, began) = (self.id(), Instant::now());
        let had_one = self.phase() == VmPhase::Running || self.launching.adoption().has_device(vm);
        let mut told = false;
        loop {
            let error = match Box::pin(self.start_device()).await {
                Err(error) if had_one && error.may_pass() && began.elapsed() < AWAY => error,
                started => return started.map(Some),
            };
            if !core::mem::replace(&mut told, true) {
                tracing::warn!(vm, %error, "the VM has no device; trying again");
                self.tell("device-waits", format!("{error}; another try follows each second"));
            }
            tokio::select! {
                () = sleep(AGAIN) => {}
                _ = stop.wait_for(|stop| *stop) => return Ok(None),
            }
        }
    }

    async fn start_device(&self) -> Result<Rc<DeviceProcess>, LaunchError> {
        if let Some(device_process) = self.adopt_device().await {
            *self.device_process.borrow_mut() = Some(Rc::clone(&device_process));
            return Ok(device_process);
        }
        let VmSpec { id: vm, scanouts, direct, fixed_arena, .. } = self.spec.get();
        if self.closer.is_full() {
            return Err(LaunchError::Unclosed);
        }
        let fixed_arena = fixed_arena.unwrap_or(0);
        let request = ToLauncher::StartDevice { vm, scanouts: scanouts.into(), direct, fixed_arena };
        let started = self.launching.start(request).await?;
        tracing::info!(vm, process = started.process.number(), "started the device");
        self.launching.fd_store().keep(&device_name(vm), started.socket.as_fd());
        let record = DeviceRecord {
            process: started.process.identity(),
            direct: Some(direct),
            scanouts: Some(scanouts),
            sessions: BTreeMap::new(),
        };
        self.launching.adoption().note(|all| _ = all.devices.insert(vm, record));
        let device_process = DeviceProcess::new(started, self.closer.clone())?;
        *self.device_process.borrow_mut() = Some(Rc::clone(&device_process));
        Ok(device_process)
    }

    /// Answers the device until it ends. The messages of a device that breaks the protocol are ignored from then on, but it
    /// keeps running, because its guest uses its sessions. A device whose socket takes too much time of this process is killed.
    pub(super) async fn run(self: &Rc<Self>, device_process: &Rc<DeviceProcess>, sessions: &mut JoinSet<()>) {
        let (mut listening, mut crowded) = (true, false);
        loop {
            tokio::select! {
                // No further message is taken of a device whose socket takes too much time.
                biased;
                () = device_process.channel.crowded(), if !crowded => {
                    crowded = true;
                    listening = false;
                    device_process.process.kill();
                    self.notify(UnitEvent::Crowd { vm: self.id() });
                }
                () = device_process.process.gone() => return,
                message = device_process.channel.receive(), if listening => {
                    listening = match message {
                        Ok(Some(message)) => self.on_message(device_process, sessions, message),
                        Ok(None) => false,
                        Err(error) => self.complain(&error.to_string()),
                    };
                    if !listening {
                        device_process.channel.refuse_messages();
                    }
                }
                Some(_) = sessions.join_next() => {}
            }
        }
    }

    /// Ends a device, if it still runs, and all its workers; waits until they are gone.
    pub(super) async fn end(
        &self,
        device_process: &Rc<DeviceProcess>,
        mut sessions: JoinSet<()>,
        running: bool,
    ) {
        device_process.over.send_replace(true);
        self.dismiss_warm();
        let vm = self.id();
        self.launching.fd_store().forget(&device_name(vm));
        self.launching.adoption().note(|all| _ = all.devices.remove(&vm));
        if running {
            // It has nothing to save.
            device_process.process.kill();
        }
        for worker in device_process.sessions.borrow().values().filter_map(|session| session.worker.as_ref())
        {
            worker.kill();
        }
        let gone = async {
            device_process.process.gone().await;
            // Tasks that still start a worker find the flag, and kill the worker.
            while sessions.join_next().await.is_some() {}
        };
        if timeout(KILLED, gone).await.is_err() {
            tracing::error!(vm, "processes of the VM were killed and still exist");
        }
        *self.device_process.borrow_mut() = None;
    }

    /// Logs that the device broke the protocol. Returns false: its messages are ignored from now on.
    pub(super) fn complain(&self, what: &str) -> bool {
        tracing::error!(
            vm = self.id(),
            error = what,
            "the device broke the protocol, and its messages are ignored"
        );
        false
    }

    /// True if an event that a guest can cause may be logged now.
    pub(super) fn may_log(&self) -> bool {
        self.complaints.borrow_mut().take(Instant::now()).is_ok()
    }
}
