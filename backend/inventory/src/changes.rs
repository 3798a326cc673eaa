//! The thread that changes instances.
//!
//! A driver takes its time over that, while it clears memory and restarts engines. So questions are answered by another
//! thread meanwhile: what a dead worker had is waited for, and must not wait for this. One change at a time, in the order
//! in which they were asked for.

use crate::nvml::{Meant, Nvml};
use rustix::fd::OwnedFd;
use sluice_cuda_abi::nvml::{Result as Answered, Status};
use sluice_protocol::control::{FromInventory, ToInventory};
use sluice_shared_memory::socket;
use std::{
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

/// Changes that wait; `sluiced` asks for one at a time per device.
const WAITING: usize = 64;

/// Where changes are asked for.
pub(crate) struct Changes(SyncSender<ToInventory>);

impl Changes {
    /// Starts the thread; what becomes of changes is told on `control`.
    pub(crate) fn start(nvml: &Arc<Nvml>, control: &Arc<OwnedFd>) -> std::io::Result<Changes> {
        let (sender, asked) = sync_channel(WAITING);
        let (nvml, control) = (Arc::clone(nvml), Arc::clone(control));
        thread::Builder::new().name("changes".into()).spawn(move || make(&nvml, &asked, &control))?;
        Ok(Changes(sender))
    }

    /// Asks for a change; false when too many wait.
    pub(crate) fn ask(&self, change: ToInventory) -> bool {
        self.0.try_send(change).is_ok()
    }
}

fn make(nvml: &Nvml, asked: &Receiver<ToInventory>, control: &OwnedFd) {
    while let Ok(change) = asked.recv() {
        let (serial, answered) = answer(nvml, change);
        let message = answered.unwrap_or_else(|Status(error)| FromInventory::Failed { serial, error });
        if let Err(error) = socket::send(control, &message.encode(), &[]) {
            // The one who asked gives up after a while, and finds out by the list of instances.
            tracing::error!("cannot say what became of {change:?}: {error}");
        }
    }
}

fn answer(nvml: &Nvml, change: ToInventory) -> (u64, Answered<FromInventory>) {
    match change {
        ToInventory::Create { serial, unit, profile, start, size } => {
            let made = nvml.create(unit, profile, start, size);
            (serial, made.map(|instance| FromInventory::Instance { serial, instance }))
        }
        ToInventory::Destroy { serial, unit, instance, profile, start, size } => {
            let done = nvml.destroy(unit, &Meant { instance, profile, start, size });
            (serial, done.map(|()| FromInventory::Done { serial }))
        }
        ToInventory::SetMig { serial, unit, on } => {
            (serial, nvml.set_mig(unit, on).map(|()| FromInventory::Done { serial }))
        }
        // Nothing else is handed over.
        _ => (0, Err(Status::INVALID_ARGUMENT)),
    }
}
