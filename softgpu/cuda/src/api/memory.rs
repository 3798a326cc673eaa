//! Device memory and pinned host memory.

use crate::attributes::PITCH_ALIGNMENT;
use crate::capability::MAX_PITCH;
use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::Out;
use crate::gpu;
use crate::graphs::GRAPHS;
use crate::memory::{BlockKind, HostFlags};

/// Flags: portable, device map, write combined.
const HOST_FLAGS: u32 = 7;
/// Flags: portable, device map, memory-mapped I/O, read only.
const REGISTER_FLAGS: u32 = 15;
const IO_MEMORY: u32 = 4;

fn allocate_host(place: Out<u64>, bytes: u64, flags: u32) -> Result {
    place.required()?;
    if flags & !HOST_FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    GRAPHS.potentially_unsafe()?;
    let core = current_core()?;
    let start = core.gpu.space.allocate_host(core.maker(), bytes, HostFlags(flags))?;
    core.gpu.share_host(start, bytes, true)?;
    place.set(start)
}

/// Frees a block on the GPU that has it.
fn free(address: u64, kinds: &[BlockKind], missing: Error) -> Result {
    GRAPHS.potentially_unsafe()?;
    let core = current_core()?;
    let gpus = gpu::all()?.iter();
    let holder = gpus.copied().find(|gpu| gpu.block_at(address).is_some_and(|block| block.start == address));
    let gpu = holder.ok_or(missing)?;
    // Memory of another process's pool is freed like that of an own one; each import counts.
    let imported = gpu.block_at(address).is_some_and(|block| block.is_of_imported_pool());
    if imported && kinds.contains(&BlockKind::Pool) {
        if gpu.space.close_name(address)? {
            gpu.free(address, &[BlockKind::Imported])?;
        }
        return core.health.check();
    }
    gpu.free(address, kinds).map_err(|_| missing)?;
    core.health.check()
}

calls! {
    fn cuMemAlloc_v2(place: Out<u64>, bytes: u64) {
        place.required()?;
        GRAPHS.potentially_unsafe()?;
        let core = current_core()?;
        place.set(core.gpu.space.allocate(core.maker(), bytes, BlockKind::Device)?)
    }

    fn cuMemAllocPitch_v2(place: Out<u64>, pitch: Out<u64>, width: u64, height: u64, element: u32) {
        place.required()?;
        pitch.required()?;
        GRAPHS.potentially_unsafe()?;
        let core = current_core()?;
        if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(PITCH_ALIGNMENT).filter(|row| *row <= u64::from(MAX_PITCH));
        let row = row.ok_or(Error::INVALID_VALUE)?;
        let bytes = row.checked_mul(height).ok_or(Error::OUT_OF_MEMORY)?;
        place.set(core.gpu.space.allocate(core.maker(), bytes, BlockKind::Device)?)?;
        pitch.set(row)
    }

    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            current_core()?;
            return Ok(());
        }
        if let Some(kept) = GRAPHS.free_outside(address)? {
            GRAPHS.potentially_unsafe()?;
            let waited = current_core()?.synchronize();
            drop(kept);
            return waited;
        }
        let is_known = gpu::all()?.iter().any(|gpu| gpu.block_at(address).is_some());
        // NVIDIA's driver looks for the memory before it looks for a context.
        if !is_known && matches!(current_core(), Err(Error::INVALID_CONTEXT)) {
            return Err(Error::INVALID_VALUE);
        }
        let kinds = [BlockKind::Device, BlockKind::Pool, BlockKind::Managed];
        free(address, &kinds, Error::INVALID_VALUE)
    }

    fn cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) {
        let (unused, all) = current_core()?.gpu.space.information();
        free.set_if_given(unused);
        total.set_if_given(all);
        Ok(())
    }

    fn cuMemAllocHost_v2(place: Out<u64>, bytes: u64) {
        if bytes == 0 {
            // NVIDIA's driver accepts a length of 0 here.
            current_core()?;
            return place.set(0);
        }
        allocate_host(place, bytes, 0)
    }

    fn cuMemHostAlloc(place: Out<u64>, bytes: u64, flags: u32) { allocate_host(place, bytes, flags) }

    fn cuMemFreeHost(address: u64) {
        if address == 0 {
            current_core()?;
            return Ok(());
        }
        free(address, &[BlockKind::Host], Error::INVALID_VALUE)
    }

    fn cuMemHostRegister_v2(address: u64, bytes: u64, flags: u32) {
        if flags & !REGISTER_FLAGS != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if flags & IO_MEMORY != 0 {
            // This device does not reach the memory of others.
            return Err(Error::INVALID_VALUE);
        }
        GRAPHS.potentially_unsafe()?;
        let core = current_core()?;
        let range = address..address.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
        for gpu in gpu::all()? {
            if let Some(kind) = gpu.space.kind_within(&range) {
                // This memory belongs to the driver.
                let is_registered = kind == BlockKind::Registered;
                return Err(if is_registered { Error::HOST_MEMORY_ALREADY_REGISTERED } else { Error::INVALID_VALUE });
            }
            if gpu.space.is_device_range(&range) {
                return Err(Error::INVALID_VALUE);
            }
        }
        core.gpu.space.register_host(core.maker(), address, bytes, HostFlags(flags))?;
        core.gpu.share_host(address, bytes, HostFlags(flags).may_write())
    }

    fn cuMemHostUnregister(address: u64) {
        let mut blocks = gpu::all()?.iter().filter_map(|gpu| gpu.block_at(address));
        // Within a registered range, or memory of the driver.
        let is_other = blocks.any(|block| block.kind != BlockKind::Registered || block.start != address);
        if address == 0 || is_other {
            current_core()?;
            return Err(Error::INVALID_VALUE);
        }
        free(address, &[BlockKind::Registered], Error::HOST_MEMORY_NOT_REGISTERED)
    }
}
