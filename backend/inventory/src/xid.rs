//! The thread that waits for errors of devices.

use crate::nvml::{Events, Nvml};
use sluice_cuda_abi::nvml::Status;
use sluice_messages::{
    channel::Channel,
    control::{FromInventory, ToInventory},
};
use std::{sync::Arc, thread, time::Duration};

/// How long one wait lasts; nothing depends on it, for events end it.
const WAIT: Duration = Duration::from_secs(60);
/// How long to leave a library alone that cannot wait.
const PAUSE: Duration = Duration::from_secs(1);

/// Starts telling `sluiced` of errors, if any device reports them.
pub(crate) fn start(
    nvml: &Arc<Nvml>,
    control: &Arc<Channel<ToInventory, FromInventory>>,
) -> std::io::Result<()> {
    let set = match nvml.watch() {
        Ok(Some(set)) => set,
        Ok(None) => {
            tracing::info!("no device reports errors");
            return Ok(());
        }
        Err(Status(code)) => {
            tracing::warn!("errors of devices are not reported: nvmlReturn_t {code}");
            return Ok(());
        }
    };
    let (nvml, control) = (Arc::clone(nvml), Arc::clone(control));
    thread::Builder::new().name("xid".into()).spawn(move || tell(&nvml, set, &control)).map(drop)
}

fn tell(nvml: &Nvml, set: Events, control: &Channel<ToInventory, FromInventory>) {
    let mut failed = None;
    loop {
        match nvml.wait(set, WAIT) {
            Ok(None) => failed = None,
            Ok(Some((unit, xid, instance))) => {
                failed = None;
                tracing::warn!("device {unit} reports Xid {xid}");
                // An event of NVML has no process. `sluiced` knows whose fault it was only where a unit has one worker.
                let message = FromInventory::Xid { unit, xid, process: 0, instance };
                if let Err(error) = control.send(&message, &[]) {
                    tracing::error!("cannot report Xid {xid} of device {unit}: {error}");
                }
            }
            Err(Status(code)) => {
                if failed.replace(code) != Some(code) {
                    tracing::error!("cannot wait for errors of devices: nvmlReturn_t {code}");
                }
                thread::sleep(PAUSE);
            }
        }
    }
}
