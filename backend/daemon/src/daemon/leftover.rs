//! Processes of earlier daemons that this one cannot continue with: they are ended at the start.

use std::{rc::Rc, time::Duration};

use sluice_runtime::process::Identity;
use tokio::time::timeout;

use crate::{
    handover::{fd_store, launching::Launching},
    records::state::checkpoint::Checkpoint,
    units::unit,
    vms::set::VmSet,
};

/// Time limit for the arbiters of an earlier daemon to end.
const END: Duration = Duration::from_secs(5);

/// Ends arbiters of a killed daemon: no process can send to them any more, and they hold their units' memory.
pub(super) async fn end_unknown_arbiters(checkpoint: &Checkpoint, launching: &Rc<Launching>) {
    let adoptable = |unit: u32, arbiter: Identity| {
        let record = launching.adoption().before().arbiters.get(&unit).cloned();
        let lends = record.is_some_and(|record| record.process == arbiter && record.lends.is_some());
        lends && launching.fd_store().has(&unit::socket_name(unit))
    };
    for (unit, arbiter) in checkpoint.arbiters() {
        if adoptable(unit, arbiter) {
            continue;
        }
        let Some(opened) = launching.open(arbiter).await else { continue };
        let process = arbiter.process;
        tracing::warn!(unit, process, "killing an arbiter of an earlier sluiced");
        opened.kill();
        if timeout(END, opened.gone()).await.is_err() {
            tracing::error!(unit, process, "an arbiter was killed and still exists");
        }
    }
}

/// Ends the devices of deleted VMs, and the workers of their sessions.
pub(super) async fn end_unknown_devices(launching: &Rc<Launching>, vm_set: &VmSet) {
    let devices: Vec<u32> = launching.adoption().before().devices.keys().copied().collect();
    for vm in devices.into_iter().filter(|vm| vm_set.get(*vm).is_none()) {
        let Some(device) = launching.adoption().take_device(vm) else { continue };
        tracing::warn!(vm, process = device.process.process, "killing the device of a deleted VM");
        let workers = device.sessions.values().map(|(_, worker)| *worker);
        for process in workers.chain([device.process]) {
            if let Some(process) = launching.open(process).await {
                process.kill();
            }
        }
        launching.fd_store().forget(&fd_store::device_name(vm));
    }
}
