//! Stream-ordered memory, and pools.

use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use super::virtual_memory::{Access, ON_DEVICE, PINNED, Place};
use crate::context::Implicit;
use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::memory::{BlockKind, POOLS, Pool};
use crate::process::driver;
use crate::schedule::Work;
use crate::stream::target;

/// `CUmemPoolProps`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct PoolProperties {
    kind: u32,
    shareable: u32,
    location: Place,
    security: u64,
    max_bytes: u64,
    usage: u16,
    rdma: u8,
    reserved: [u8; 53],
}

const _: () = assert!(size_of::<PoolProperties>() == size_of::<sluice_cuda_abi::sys::CUmemPoolProps>());

/// Attributes of pools, as the header numbers them.
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

/// Memory in stream order, of a pool or of the device's current one.
fn allocate(place: Out<u64>, bytes: u64, pool: Option<u64>, stream: u64, implicit: Implicit) -> Result {
    place.required()?;
    let target = target(stream, implicit)?;
    let pool = match pool {
        Some(handle) => POOLS.get(handle)?,
        None => target.core.gpu.pool()?,
    };
    place.set(pool.allocate(&target, bytes)?)
}

fn free(address: u64, stream: u64, implicit: Implicit) -> Result {
    let target = target(stream, implicit)?;
    if address == 0 {
        return Ok(());
    }
    let gpus = driver()?.gpus().iter().copied();
    let holder = gpus.into_iter().find(|gpu| gpu.block_at(address).is_some_and(|b| b.start == address));
    let gpu = holder.ok_or(Error::INVALID_VALUE)?;
    let block = gpu.space.withdraw(address, &[BlockKind::Pool, BlockKind::Device])?;
    let pool = gpu.all_pools().into_iter().find(|pool| pool.handle == block.pool);
    match pool {
        Some(pool) => pool.free_in_order(&target, block),
        None => {
            // Not a pool's, and yet freed when the stream comes there.
            let end = Box::new(move |_| gpu.space.release(&block));
            crate::process::scheduler().submit(target.queue, Vec::new(), Work::Callback(end));
        }
    }
    Ok(())
}

fn default_pool(place: Out<u64>, device: i32) -> Result {
    place.required()?;
    place.set(driver()?.gpu(device)?.default_pool()?.handle)
}

fn current_pool(place: Out<u64>, device: i32) -> Result {
    place.required()?;
    place.set(driver()?.gpu(device)?.pool()?.handle)
}

fn set_pool(device: i32, handle: u64) -> Result {
    let (gpu, pool) = (driver()?.gpu(device)?, POOLS.get(handle)?);
    if pool.gpu.ordinal != gpu.ordinal {
        return Err(Error::INVALID_DEVICE);
    }
    gpu.current_pool.store(handle, Release);
    Ok(())
}

/// Memory of that kind at that place: only pinned memory of a device has pools here.
fn device_of(location: Place, kind: u32) -> Result<i32> {
    if kind != PINNED {
        return Err(Error::NOT_SUPPORTED);
    }
    Ok(location.gpu()?.ordinal)
}

fn get_attribute(pool: &Arc<Pool>, number: i32, value: Out<std::ffi::c_void>) -> Result {
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
        attribute::SHAREABLE | attribute::DECOMPRESSION => words.set(0),
        attribute::LOCATION_ID => value.cast().set(pool.gpu.ordinal),
        attribute::LOCATION_KIND => words.set(ON_DEVICE),
        attribute::MAX_BYTES => wide.set(pool.max_bytes),
        _ => Err(Error::INVALID_VALUE),
    }
}

fn set_attribute(pool: &Arc<Pool>, number: i32, value: In<u8>) -> Result {
    let wide = || In::<u64>::from_address(value.address_of(0)?).get();
    match number {
        attribute::REUSE_FIRST..=attribute::REUSE_LAST => {
            let index = usize::try_from(number - attribute::REUSE_FIRST).unwrap_or(0);
            let on = In::<u32>::from_address(value.address_of(0)?).get()?;
            pool.change(|numbers| numbers.reuse[index] = u32::from(on != 0));
        }
        attribute::THRESHOLD => {
            let threshold = wide()?;
            pool.change(|numbers| numbers.threshold = threshold);
            pool.gpu.loose.store(true, Release);
        }
        // The marks of the highest values can only be put back.
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

calls! {
    fn cuMemPoolCreate(place: Out<u64>, properties: In<PoolProperties>) {
        place.required()?;
        let properties = properties.get()?;
        if properties.kind != PINNED {
            return Err(Error::INVALID_VALUE);
        }
        let gpu = properties.location.gpu()?;
        // The attributes say that pools are not shared between processes.
        if properties.shareable != 0 || properties.usage != 0 || properties.rdma != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
        place.set(Pool::create(gpu, properties.max_bytes, false)?.handle)
    }

    fn cuMemPoolDestroy(pool: u64) { Pool::destroy(pool) }

    fn cuMemPoolTrimTo(pool: u64, keep: u64) { POOLS.get(pool)?.trim(keep); Ok(()) }

    fn cuMemPoolGetAttribute(pool: u64, number: i32, value: Out<std::ffi::c_void>) {
        get_attribute(&POOLS.get(pool)?, number, value)
    }

    fn cuMemPoolSetAttribute(pool: u64, number: i32, value: In<u8>) {
        set_attribute(&POOLS.get(pool)?, number, value)
    }

    fn cuMemPoolSetAccess(pool: u64, descriptions: In<Access>, count: usize) {
        let pool = POOLS.get(pool)?;
        for description in descriptions.list(count)? {
            // The device whose memory it is always has access; others have none to give, for there are no peers.
            if description.location.gpu()?.ordinal != pool.gpu.ordinal {
                return Err(Error::INVALID_DEVICE);
            }
            if description.flags != 3 {
                return Err(Error::INVALID_VALUE);
            }
        }
        Ok(())
    }

    fn cuMemPoolGetAccess(flags: Out<u32>, pool: u64, location: In<Place>) {
        let (pool, gpu) = (POOLS.get(pool)?, location.get()?.gpu()?);
        flags.set(if gpu.ordinal == pool.gpu.ordinal { 3 } else { 0 })
    }

    fn cuDeviceGetDefaultMemPool(place: Out<u64>, device: i32) { default_pool(place, device) }

    fn cuDeviceGetMemPool(place: Out<u64>, device: i32) { current_pool(place, device) }

    fn cuDeviceSetMemPool(device: i32, pool: u64) { set_pool(device, pool) }

    fn cuMemGetDefaultMemPool(place: Out<u64>, location: In<Place>, kind: u32) {
        default_pool(place, device_of(location.get()?, kind)?)
    }

    fn cuMemGetMemPool(place: Out<u64>, location: In<Place>, kind: u32) {
        current_pool(place, device_of(location.get()?, kind)?)
    }

    fn cuMemSetMemPool(location: In<Place>, kind: u32, pool: u64) {
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
