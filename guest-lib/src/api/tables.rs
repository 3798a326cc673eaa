//! The shim's functions behind the export tables.

use crate::{arguments::Call, error::Error, lifetime, log, process, state::thread};
use sluice_cuda_frontend::In;
use sluice_cuda_frontend::tables::{self, DeviceIdentity, Hooks, Monitor, MonitoredDevice, MonitoredProcess};
use sluice_protocol::{calls::wire, field::Ordinal};

struct Shim;

static SHIM: Shim = Shim;

/// Connects the export tables to the shim.
pub(crate) fn install() {
    tables::install(&SHIM);
}

impl Hooks for Shim {
    fn ready(&self) -> Result<(), u32> {
        lifetime::usable().map_err(|Error(code)| code)
    }

    fn primary_context(&self, device: i32) -> Result<usize, u32> {
        let primary = process::get().and_then(|process| process.contexts.primary(device));
        primary.map(handle).map_err(|Error(code)| code)
    }

    fn current_context(&self) -> usize {
        handle(thread::current_context())
    }

    fn context_id(&self, context: usize) -> Result<u64, u32> {
        let id = process::get().and_then(|process| process.contexts.unique_id(context as u64));
        id.map_err(|Error(code)| code)
    }

    fn stream_id(&self, stream: u64) -> Result<u64, u32> {
        let legacy = Call { per_thread: false };
        let id = process::get().and_then(|process| Ok(process.stream_or_default(legacy, stream)?.id().raw()));
        id.map_err(|Error(code)| code)
    }

    fn load_module(&self, image: In<u8, u32>) -> Result<usize, u32> {
        super::module::load_plain(image.address()).map(handle).map_err(|Error(code)| code)
    }

    fn functions(&self, module: usize) -> Result<Vec<usize>, u32> {
        let functions = super::module::functions(module as u64).map_err(|Error(code)| code)?;
        Ok(functions.into_iter().map(handle).collect())
    }

    fn devices(&self) -> &[DeviceIdentity] {
        match process::connect() {
            Ok(process) => process.devices.identities(),
            Err(_) => &[],
        }
    }

    fn driver_version(&self) -> u32 {
        process::connect().map_or(0, |process| process.session.driver_version)
    }

    fn monitor(&self) -> Option<&dyn Monitor> {
        Some(self)
    }

    fn refused(&self, uuid: [u8; 16]) {
        let name = tables::name(uuid).unwrap_or("unknown");
        let say = if tables::is_optional(uuid) { log::debug } else { log::info };
        say(format_args!("export table {name} ({:032x}) is refused", u128::from_be_bytes(uuid)));
    }

    fn unsupported(&self, uuid: [u8; 16], slot: usize) {
        let name = tables::name(uuid).unwrap_or("unknown");
        let table = u128::from_be_bytes(uuid);
        log::warn(format_args!("slot {slot} of export table {name} ({table:032x}) is not supported"));
    }
}

impl Monitor for Shim {
    fn devices(&self) -> Result<u32, u32> {
        monitored(|process| Ok(process.session.device_count))
    }

    fn device(&self, index: u32) -> Result<MonitoredDevice, u32> {
        monitored(|process| {
            let device = process.devices.any(index)?;
            let mut name = [0; 128];
            let length = device.name.len().min(name.len() - 1);
            name[..length].copy_from_slice(&device.name[..length]);
            Ok(MonitoredDevice { uuid: device.uuid, name })
        })
    }

    fn memory(&self, index: u32) -> Result<(u64, u64), u32> {
        monitored(|process| {
            let memory = process.session.sync(0, &wire::device_memory::Args { device: Ordinal(index) })?;
            Ok((memory.total, memory.total.saturating_sub(memory.free)))
        })
    }

    fn processes(&self, index: u32, into: &mut [MonitoredProcess]) -> Result<u32, u32> {
        monitored(|process| {
            let mut count = 0;
            loop {
                let reply = process
                    .session
                    .sync(0, &wire::process_info::Args { device: Ordinal(index), index: count })?;
                // The loop ends even if a host reports processes for ever.
                if !reply.found || count >= MOST_PROCESSES {
                    return Ok(count);
                }
                if let Some(entry) = into.get_mut(count as usize) {
                    *entry = MonitoredProcess { process: reply.process, pad: 0, bytes: reply.bytes };
                }
                count += 1;
            }
        })
    }

    fn attribute(&self, index: u32, attribute: u32) -> Result<i32, u32> {
        monitored(|process| process.devices.any(index)?.attribute(attribute))
    }
}

/// More processes than a VM may have sessions.
const MOST_PROCESSES: u32 = 1024;

fn monitored<R>(
    what: impl FnOnce(&'static process::ProcessState) -> crate::error::Result<R>,
) -> Result<R, u32> {
    process::connect().and_then(what).map_err(|Error(code)| code)
}

fn handle(raw: u64) -> usize {
    usize::try_from(raw).unwrap_or(0)
}
