//! The thread that waits for errors of devices.

use crate::nvml::{EventSet, Nvml};
use sluice_messages::{
    channel::Channel,
    control::{FromInventory, ToInventory},
};
use sluice_nvml_abi::Status;
use std::{sync::Arc, thread, time::Duration};

/// Length of one wait; it is not critical, because events end it.
const WAIT: Duration = Duration::from_secs(60);
/// Pause before the next call of a library that cannot wait.
const PAUSE: Duration = Duration::from_secs(1);

/// Starts to report errors to `sluiced`, if any device reports them.
pub(crate) fn start(
    nvml: &Arc<Nvml>,
    control: &Arc<Channel<ToInventory, FromInventory>>,
) -> std::io::Result<()> {
    let set = match nvml.watch() {
        Ok(Some(set)) => set,
        Ok(None) => {
            tracing::info!("no device supports error events");
            return Ok(());
        }
        Err(Status(code)) => {
            tracing::warn!(code, "cannot watch devices for errors");
            return Ok(());
        }
    };
    let (nvml, control) = (Arc::clone(nvml), Arc::clone(control));
    thread::Builder::new().name("xid".into()).spawn(move || tell(&nvml, set, &control)).map(drop)
}

fn tell(nvml: &Nvml, set: EventSet, control: &Channel<ToInventory, FromInventory>) {
    let mut failed = None;
    loop {
        match nvml.wait(set, WAIT) {
            Ok(None) => failed = None,
            Ok(Some((unit, xid, instance))) => {
                failed = None;
                tracing::warn!(unit, xid, "a device reports an error");
                // An NVML event names no process, so `sluiced` ends no session for it.
                let message = FromInventory::Xid { unit, xid, process: 0, instance };
                if let Err(error) = control.send(&message, &[]) {
                    tracing::error!(unit, xid, %error, "cannot report an error of a device");
                }
            }
            Err(Status(code)) => {
                if failed.replace(code) != Some(code) {
                    tracing::error!(code, "cannot wait for errors of devices");
                }
                thread::sleep(PAUSE);
            }
        }
    }
}
