//! The threads that change instances, one per device.
//!
//! A driver needs time for a change, while it clears memory and restarts engines. So another thread answers questions
//! meanwhile: the arbiters wait for the memory of dead workers, and must not wait for a change. On a device there is one change
//! at a time, in the order of the requests; devices do not wait for each other.

use crate::nvml::{Meant, Nvml};
use sluice_messages::{
    channel::Channel,
    control::{FromInventory, ToInventory},
};
use sluice_nvml_abi::{Result as Answered, Status};
use sluice_protocol::limits;
use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

/// Changes of a device that may wait; `sluiced` requests one at a time.
const WAITING: usize = 64;

/// The entry for requests of changes.
pub(crate) struct Changes {
    nvml: Arc<Nvml>,
    control: Arc<Channel<ToInventory, FromInventory>>,
    /// The threads of devices for which a change was ever requested.
    threads: BTreeMap<u32, SyncSender<ToInventory>>,
}

impl Changes {
    /// The results of changes are sent on `control`.
    pub(crate) fn new(nvml: &Arc<Nvml>, control: &Arc<Channel<ToInventory, FromInventory>>) -> Changes {
        Changes { nvml: Arc::clone(nvml), control: Arc::clone(control), threads: BTreeMap::new() }
    }

    /// Requests a change of a device; false if too many wait.
    pub(crate) fn ask(&mut self, device: u32, change: ToInventory) -> bool {
        if device >= limits::DEVICES {
            return false;
        }
        let thread = match self.threads.entry(device) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(free) => {
                let (sender, asked) = sync_channel(WAITING);
                let (nvml, control) = (Arc::clone(&self.nvml), Arc::clone(&self.control));
                let started = thread::Builder::new()
                    .name(format!("changes {device}"))
                    .spawn(move || make(&nvml, &asked, &control));
                if let Err(error) = started {
                    tracing::error!(gpu = device, %error, "cannot start the thread for changes of a device");
                    return false;
                }
                free.insert(sender)
            }
        };
        thread.try_send(change).is_ok()
    }
}

fn make(nvml: &Nvml, asked: &Receiver<ToInventory>, control: &Channel<ToInventory, FromInventory>) {
    while let Ok(change) = asked.recv() {
        let (serial, answered) = answer(nvml, change);
        let message = answered.unwrap_or_else(|Status(error)| FromInventory::Failed { serial, error });
        if let Err(error) = control.send(&message, &[]) {
            // The requester gives up after a while, and finds the result in the list of instances.
            tracing::error!(?change, %error, "cannot report the result of a change");
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
        // No other message is handed over.
        _ => (0, Err(Status::INVALID_ARGUMENT)),
    }
}
