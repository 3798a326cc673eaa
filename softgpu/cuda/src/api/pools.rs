//! Stream-ordered memory, and pools.

use std::ffi::c_void;
use std::sync::Arc;

use sluice_cuda_frontend::is_open_descriptor;

use super::virtual_memory::{Access, MemLocation, ON_DEVICE, PINNED};
use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::gpu::{self, VisibleGpu};
use crate::graphs::{GRAPHS, keep_until_reached};
use crate::memory::{BlockKind, Name, Named, POOLS, POSIX_FD, Pool, Scope, SharedPool, descriptor};
use crate::peers;
use crate::schedule::{QueuedWork, scheduler};
use crate::stream::{Implicit, target};

/// `CUmemPoolProps`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct PoolProperties {
    kind: u32,
    shareable: u32,
    location: MemLocation,
    security: u64,
    max_bytes: u64,
    usage: u16,
    rdma: u8,
    reserved: [u8; 53],
}

const _: () = assert!(size_of::<PoolProperties>() == size_of::<sluice_cuda_abi::sys::CUmemPoolProps>());

/// Attributes of pools, with the numbers of the header.
mod attribute {
    pub(super) const REUSE_FIRST: i32 = 1;
    pub(super) const REUSE_LAST: i32 = 3;
    pub(super) const THRESHOLD: i32 = 4;
    pub(super) const RESERVED: i32 = 5;
    pub(super) const RESERVED_HIGH: i32 = 6;
    pub(super) const USED: i32 = 7;
    pub(super) const USED_HIGH: i32 = 8;
    pub(super) const KIND: i32 = 9;
    pub(super) const SHAREABLE: i32 = 10;
    pub(super) const LOCATION_ID: i32 = 11;
    pub(super) const LOCATION_KIND: i32 = 12;
    pub(super) const MAX_BYTES: i32 = 13;
    pub(super) const DECOMPRESSION: i32 = 14;
}

/// Allocates memory in stream order, from a pool or from the device's current pool.
fn allocate(place: Out<u64>, bytes: u64, pool: Option<u64>, stream: u64, implicit: Implicit) -> Result {
    place.required()?;
    let target = target(stream, implicit)?;
    let pool = match pool {
        Some(handle) => POOLS.get(handle)?,
        None => target.core.gpu.pools.current()?,
    };
    if pool.device() != target.core.gpu.ordinal {
        return Err(Error::INVALID_VALUE);
    }
    if let Some(address) = GRAPHS.capture_allocation(target.facts(), pool.device(), bytes)? {
        return place.set(address);
    }
    place.set(pool.allocate(target.core.maker(), target.queue, bytes)?)
}

fn free(address: u64, stream: u64, implicit: Implicit) -> Result {
    let target = target(stream, implicit)?;
    if GRAPHS.capture_free(target.facts(), address)? {
        return Ok(());
    }
    if address == 0 {
        return Ok(());
    }
    if let Some(kept) = GRAPHS.free_outside(address)? {
        keep_until_reached(&target, kept);
        return Ok(());
    }
    let gpus = gpu::all()?.iter().copied();
    let holder = gpus.into_iter().find(|gpu| gpu.block_at(address).is_some_and(|b| b.start == address));
    let gpu = holder.ok_or(Error::INVALID_VALUE)?;
    let imported = gpu.block_at(address).is_some_and(|block| block.is_of_imported_pool());
    if imported {
        if !gpu.space.close_name(address)? {
            return Ok(());
        }
        let block = gpu.space.withdraw(address, &[BlockKind::Imported])?;
        let end = Box::new(move |_| gpu.space.release(&block));
        scheduler().submit(target.queue, Vec::new(), QueuedWork::Callback(end));
        return Ok(());
    }
    let block = gpu.space.withdraw(address, &[BlockKind::Pool, BlockKind::Device])?;
    let pool = gpu.pools.all().into_iter().find(|pool| pool.handle == block.pool);
    match pool {
        Some(pool) => pool.free_in_order(target.queue, block),
        None => {
            // Not a pool's block, but still freed in stream order.
            let end = Box::new(move |_| gpu.space.release(&block));
            scheduler().submit(target.queue, Vec::new(), QueuedWork::Callback(end));
        }
    }
    Ok(())
}

fn default_pool(place: Out<u64>, device: i32) -> Result {
    place.required()?;
    place.set(gpu::at(device)?.pools.default()?.handle)
}

fn current_pool(place: Out<u64>, device: i32) -> Result {
    place.required()?;
    place.set(gpu::at(device)?.pools.current()?.handle)
}

fn set_pool(device: i32, handle: u64) -> Result {
    let (gpu, pool) = (gpu::at(device)?, POOLS.get(handle)?);
    if pool.device() != gpu.ordinal {
        return Err(Error::INVALID_DEVICE);
    }
    if pool.is_imported() {
        return Err(Error::INVALID_VALUE);
    }
    gpu.pools.set_current(handle);
    Ok(())
}

/// The device of a location: only pinned memory of a device has pools here.
fn device_of(location: MemLocation, kind: u32) -> Result<i32> {
    if kind != PINNED {
        return Err(Error::NOT_SUPPORTED);
    }
    Ok(location.gpu()?.ordinal)
}

fn get_attribute(pool: &Arc<Pool>, number: i32, value: Out<c_void>) -> Result {
    let numbers = pool.numbers();
    let (words, wide) = (value.cast::<u32>(), value.cast::<u64>());
    match number {
        attribute::REUSE_FIRST..=attribute::REUSE_LAST => {
            let index = usize::try_from(number - attribute::REUSE_FIRST).unwrap_or(0);
            words.set(numbers.reuse[index])
        }
        attribute::THRESHOLD => wide.set(numbers.threshold),
        attribute::RESERVED => wide.set(pool.reserved()),
        attribute::RESERVED_HIGH => wide.set(numbers.reserved_high),
        attribute::USED => wide.set(numbers.used),
        attribute::USED_HIGH => wide.set(numbers.used_high),
        attribute::KIND => words.set(PINNED),
        attribute::SHAREABLE => words.set(if pool.shared.is_some() { POSIX_FD } else { 0 }),
        attribute::DECOMPRESSION => words.set(0),
        attribute::LOCATION_ID => value.cast().set(pool.device()),
        attribute::LOCATION_KIND => words.set(ON_DEVICE),
        attribute::MAX_BYTES => wide.set(pool.max_bytes),
        _ => Err(Error::INVALID_VALUE),
    }
}

fn set_attribute(pool: &Arc<Pool>, number: i32, value: In<c_void>) -> Result {
    let wide = || value.cast::<u64>().get();
    match number {
        attribute::REUSE_FIRST..=attribute::REUSE_LAST => {
            let index = usize::try_from(number - attribute::REUSE_FIRST).unwrap_or(0);
            let on = value.cast::<u32>().get()?;
            pool.change(|numbers| numbers.reuse[index] = u32::from(on != 0));
        }
        attribute::THRESHOLD => pool.set_threshold(wide()?),
        // The high-water marks can only be reset.
        attribute::RESERVED_HIGH | attribute::USED_HIGH if wide()? == 0 => {
            let reserved = pool.reserved();
            pool.change(|numbers| match number {
                attribute::RESERVED_HIGH => numbers.reserved_high = reserved,
                _ => numbers.used_high = numbers.used,
            });
        }
        _ => return Err(Error::INVALID_VALUE),
    }
    Ok(())
}

/// Sets the access of a GPU to a pool: 0 none, 1 read, 3 read and write.
fn set_access(pool: &Pool, gpu: &'static VisibleGpu, access: u32) -> Result {
    if !matches!(access, 0 | 1 | 3) {
        return Err(Error::INVALID_VALUE);
    }
    let owner = gpu::at(pool.device())?;
    // The owning device always has access.
    if gpu.ordinal == owner.ordinal {
        return if access == 3 { Ok(()) } else { Err(Error::INVALID_VALUE) };
    }
    if !peers::reaches(gpu, owner) {
        return Err(Error::INVALID_DEVICE);
    }
    // Memory of another process is accessed by its own device only.
    if pool.is_imported() {
        return Err(Error::NOT_SUPPORTED);
    }
    let scope = Scope::Pool(pool.handle);
    if owner.space.set_peer(scope, (gpu.ordinal, gpu.space), access) {
        gpu.space.running.wait();
        if access == 0 {
            owner.space.forget_peer(scope, gpu.ordinal);
        }
    }
    Ok(())
}

calls! {
    fn cuMemPoolCreate(place: Out<u64>, properties: In<PoolProperties>) {
        place.required()?;
        let properties = properties.get()?;
        if properties.kind != PINNED {
            return Err(Error::INVALID_VALUE);
        }
        let gpu = properties.location.gpu()?;
        // Processes share pools by descriptors only.
        if properties.shareable & !POSIX_FD != 0 || properties.usage != 0 || properties.rdma != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
        let shared = (properties.shareable != 0).then(SharedPool::new);
        place.set(Pool::create(&gpu.pools, properties.max_bytes, false, shared)?.handle)
    }

    fn cuMemPoolExportToShareableHandle(place: Out<c_void>, pool: u64, kind: u32, flags: u64) {
        let place = place.cast::<i32>();
        place.required()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if kind != POSIX_FD {
            return Err(Error::NOT_SUPPORTED);
        }
        let pool = POOLS.get(pool)?;
        let shared = pool.shared.filter(|shared| !shared.imported).ok_or(Error::INVALID_VALUE)?;
        let name = Name::of_pool(gpu::at(pool.device())?.identity.uuid, shared.identity);
        place.set(descriptor::of(&name.to_bytes(Named::Pool))?)
    }

    fn cuMemPoolImportFromShareableHandle(place: Out<u64>, handle: u64, kind: u32, flags: u64) {
        place.required()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if kind != POSIX_FD {
            // Here the parameter is a pointer.
            return Err(if handle == 0 { Error::INVALID_VALUE } else { Error::NOT_SUPPORTED });
        }
        // The declared pointer is the descriptor number itself.
        let number = handle & 0xffff_ffff;
        if !is_open_descriptor(number) {
            return Err(Error::UNKNOWN);
        }
        let bytes = descriptor::read(number)?;
        let name = Name::from_bytes(Named::Pool, &bytes).ok_or(Error::INVALID_VALUE)?;
        let known = gpu::all()?.iter().find(|gpu| gpu.identity.uuid == name.device);
        let gpu = known.ok_or(Error::INVALID_VALUE)?;
        let shared = SharedPool { identity: name.pool, imported: true };
        place.set(Pool::create(&gpu.pools, 0, false, Some(shared))?.handle)
    }

    fn cuMemPoolExportPointer(place: Out<[u8; 64]>, address: u64) {
        place.required()?;
        current_core()?;
        let is_start = |gpu: &&&VisibleGpu| gpu.block_at(address).is_some_and(|block| block.start == address);
        let gpu = gpu::all()?.iter().find(is_start).ok_or(Error::INVALID_VALUE)?;
        let block = gpu.block_at(address).filter(|block| block.kind == BlockKind::Pool);
        let block = block.ok_or(Error::INVALID_VALUE)?;
        let pool = gpu.pools.all().into_iter().find(|pool| pool.handle == block.pool);
        let shared = pool.and_then(|pool| pool.shared).ok_or(Error::INVALID_VALUE)?;
        let name = gpu.space.name_of(gpu.identity.uuid, &block)?.in_pool(shared.identity);
        place.set(name.to_bytes(Named::PoolBlock))
    }

    fn cuMemPoolImportPointer(place: Out<u64>, pool: u64, data: In<[u8; 64]>) {
        place.required()?;
        let core = current_core()?;
        let pool = POOLS.get(pool)?;
        let name = Name::from_bytes(Named::PoolBlock, &data.get()?).ok_or(Error::INVALID_VALUE)?;
        let own = SharedPool { identity: name.pool, imported: true };
        let gpu = gpu::at(pool.device())?;
        if pool.shared != Some(own) || name.device != gpu.identity.uuid {
            return Err(Error::INVALID_VALUE);
        }
        place.set(gpu.space.open_in_pool(core.maker(), name, pool.handle)?)
    }

    fn cuMemPoolDestroy(pool: u64) { Pool::destroy(pool) }

    fn cuMemPoolTrimTo(pool: u64, keep: u64) { POOLS.get(pool)?.trim(keep); Ok(()) }

    // Graphs keep only memory that they still need.
    fn cuDeviceGraphMemTrim(device: i32) { gpu::at(device).map(drop) }

    fn cuMemPoolGetAttribute(pool: u64, number: i32, value: Out<c_void>) {
        get_attribute(&POOLS.get(pool)?, number, value)
    }

    fn cuMemPoolSetAttribute(pool: u64, number: i32, value: In<c_void>) {
        set_attribute(&POOLS.get(pool)?, number, value)
    }

    fn cuMemPoolSetAccess(pool: u64, descriptions: In<Access>, count: usize) {
        let pool = POOLS.get(pool)?;
        for description in descriptions.list(count)? {
            set_access(&pool, description.location.gpu()?, description.flags)?;
        }
        Ok(())
    }

    fn cuMemPoolGetAccess(flags: Out<u32>, pool: u64, location: In<MemLocation>) {
        let (pool, gpu) = (POOLS.get(pool)?, location.get()?.gpu()?);
        flags.set(if gpu.ordinal == pool.device() {
            3
        } else {
            gpu::at(pool.device())?.space.peer_access(Scope::Pool(pool.handle), gpu.ordinal)
        })
    }

    fn cuDeviceGetDefaultMemPool(place: Out<u64>, device: i32) { default_pool(place, device) }

    fn cuDeviceGetMemPool(place: Out<u64>, device: i32) { current_pool(place, device) }

    fn cuDeviceSetMemPool(device: i32, pool: u64) { set_pool(device, pool) }

    fn cuMemGetDefaultMemPool(place: Out<u64>, location: In<MemLocation>, kind: u32) {
        place.required()?;
        default_pool(place, device_of(location.get()?, kind)?)
    }

    fn cuMemGetMemPool(place: Out<u64>, location: In<MemLocation>, kind: u32) {
        place.required()?;
        current_pool(place, device_of(location.get()?, kind)?)
    }

    fn cuMemSetMemPool(location: In<MemLocation>, kind: u32, pool: u64) {
        set_pool(device_of(location.get()?, kind)?, pool)
    }
}

twins! {
    fn cuMemAllocAsync, cuMemAllocAsync_ptsz(implicit; place: Out<u64>, bytes: u64, stream: u64) {
        allocate(place, bytes, None, stream, implicit)
    }

    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(
        implicit; place: Out<u64>, bytes: u64, pool: u64, stream: u64,
    ) {
        allocate(place, bytes, Some(pool), stream, implicit)
    }

    fn cuMemFreeAsync, cuMemFreeAsync_ptsz(implicit; address: u64, stream: u64) { free(address, stream, implicit) }
}
