//! Device memory and events of other processes of the system.

use super::shared_events;
use crate::{
    arguments::{Call, Out},
    error::{Error, Result},
    process,
    state::memory::{device_map::RangeOrigin, imports::ExportToken},
};
use core::ffi::{c_uint, c_void};
use sluice_cuda_frontend::given;
use sluice_protocol::calls::IpcHandle;

/// The only flag that an open may, and must, have.
const LAZY_PEER_ACCESS: u32 = 1;

pub(crate) fn cuIpcGetMemHandle(_: Call, handle: Out<c_void>, address: u64) -> Result {
    let process = process::get()?;
    handle.cast::<u8>().required()?;
    process.current()?;
    let range = process.device_map.find(address).filter(|range| range.kind == RangeOrigin::Own);
    let range = range.ok_or(Error::INVALID_VALUE)?;
    let device = process.devices.get(process.contexts.device(range.context)?)?.uuid;
    handle.set_bytes(&ExportToken::allocation(&process.session, device, &range)?.to_bytes())
}

pub(crate) fn cuIpcOpenMemHandle_v2(_: Call, place: Out<u64>, handle: IpcHandle, flags: c_uint) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    if flags != LAZY_PEER_ACCESS {
        return Err(Error::INVALID_VALUE);
    }
    let context = process.current()?;
    place.set(process.imports.open(
        &process.session,
        &process.devices,
        &process.device_map,
        context,
        &handle.0,
    )?)
}

pub(crate) fn cuIpcOpenMemHandle(call: Call, place: Out<u64>, handle: IpcHandle, flags: c_uint) -> Result {
    cuIpcOpenMemHandle_v2(call, place, handle, flags)
}

pub(crate) fn cuIpcCloseMemHandle(_: Call, address: u64) -> Result {
    let process = process::get()?;
    process.current()?;
    process.imports.close(&process.session, &process.streams, &process.device_map, address)
}

pub(crate) fn cuIpcGetEventHandle(_: Call, handle: Out<c_void>, event: u64) -> Result {
    let process = process::get()?;
    // Warp reads the handle also of an event that is refused, and expects zeros.
    handle.set_bytes(&[0; 64])?;
    let event = given::<Error>(event)?;
    process.current()?;
    let event = process.events.resolve(event)?;
    handle.set_bytes(&shared_events::share(process, &event)?.to_bytes())
}

pub(crate) fn cuIpcOpenEventHandle(_: Call, place: Out<u64>, handle: IpcHandle) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    let context = process.current()?;
    place.set(shared_events::open(process, context, &handle.0)?)
}
