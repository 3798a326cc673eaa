//! Device memory and events of other processes.

use sluice_cuda_frontend::given;

use crate::context::current_core;
use crate::error::{Error, Result};
use crate::event;
use crate::ffi::Out;
use crate::gpu::{self, VisibleGpu};
use crate::memory::{BlockKind, Name, Named};
use crate::peers;

/// `CUipcMemHandle`, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct IpcHandle([u8; 64]);

/// The only flag of an open; it is required.
const LAZY_PEER_ACCESS: u32 = 1;

/// The name in a handle, and the device of the object.
fn name(named: Named, handle: IpcHandle) -> Result<(&'static VisibleGpu, Name)> {
    let name = Name::from_bytes(named, &handle.0).ok_or(Error::INVALID_VALUE)?;
    let holder = gpu::all()?.iter().find(|gpu| gpu.identity.uuid == name.device);
    Ok((holder.ok_or(Error::INVALID_VALUE)?, name))
}

fn open(place: Out<u64>, handle: IpcHandle, flags: u32) -> Result {
    place.required()?;
    if flags != LAZY_PEER_ACCESS {
        return Err(Error::INVALID_VALUE);
    }
    let core = current_core()?;
    let (holder, name) = name(Named::Memory, handle)?;
    let is_peer = holder.ordinal != core.gpu.ordinal;
    if is_peer && !peers::reaches(core.gpu, holder) {
        return Err(Error::PEER_ACCESS_UNSUPPORTED);
    }
    let address = holder.space.open_name(core.maker(), name)?;
    if is_peer {
        peers::open(core.gpu, holder);
    }
    place.set(address)
}

calls! {
    fn cuIpcGetMemHandle(place: Out<IpcHandle>, address: u64) {
        place.required()?;
        let core = current_core()?;
        let gpu = core.gpu;
        let block = gpu.block_at(address).filter(|block| block.kind == BlockKind::Device);
        let block = block.ok_or(Error::INVALID_VALUE)?;
        place.set(IpcHandle(gpu.space.name_of(gpu.identity.uuid, &block)?.to_bytes(Named::Memory)))
    }

    fn cuIpcGetEventHandle(place: Out<IpcHandle>, event: u64) {
        // Warp reads the handle also of an event that is refused, and expects zeros.
        place.set(IpcHandle([0; 64]))?;
        given::<Error>(event)?;
        current_core()?;
        place.set(IpcHandle(event::share(event)?.to_bytes(Named::Event)))
    }

    fn cuIpcOpenEventHandle(place: Out<u64>, handle: IpcHandle) {
        place.required()?;
        let core = current_core()?;
        let (holder, name) = name(Named::Event, handle)?;
        if holder.ordinal != core.gpu.ordinal {
            return Err(Error::NOT_SUPPORTED);
        }
        place.set(event::open_shared(core, name)?)
    }

    fn cuIpcOpenMemHandle(place: Out<u64>, handle: IpcHandle, flags: u32) { open(place, handle, flags) }

    fn cuIpcOpenMemHandle_v2(place: Out<u64>, handle: IpcHandle, flags: u32) { open(place, handle, flags) }

    fn cuIpcCloseMemHandle(address: u64) {
        let core = current_core()?;
        let opened = |gpu: &&&VisibleGpu| {
            gpu.block_at(address).is_some_and(|block| !block.is_of_imported_pool())
        };
        let holder = gpu::all()?.iter().find(opened).ok_or(Error::INVALID_VALUE)?;
        if holder.space.close_name(address)? {
            holder.free(address, &[BlockKind::Imported])?;
        }
        core.health.check()
    }
}
