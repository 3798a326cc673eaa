//! Stream-ordered memory, and pools, which processes share by descriptors.

use super::{
    memory,
    virtual_memory::{ON_DEVICE, PINNED, POSIX_FD, check_export, location_of},
};
use crate::{
    arguments::{Call, In, Out, descriptor},
    error::{Error, Result},
    graphs::{self, GRAPHS},
    process::{self, ProcessState},
    state::{
        memory::{
            blocks::READ_WRITE,
            device_map::RangeOrigin,
            imports::ExportToken,
            pools::{self, MemoryPool, Reset, SharedPool},
        },
        streams::StreamRef,
    },
};
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_frontend::is_open_descriptor;
use sluice_protocol::{
    calls::wire,
    field::{AccessFlags, Ordinal},
};

/// `CUmemPool_attribute`s.
mod attribute {
    pub(super) const REUSE_FIRST: u32 = 1;
    pub(super) const REUSE_LAST: u32 = 3;
    pub(super) const RELEASE_THRESHOLD: u32 = 4;
    pub(super) const RESERVED: u32 = 5;
    pub(super) const RESERVED_HIGH: u32 = 6;
    pub(super) const USED: u32 = 7;
    pub(super) const USED_HIGH: u32 = 8;
    pub(super) const KIND: u32 = 9;
    pub(super) const EXPORT_TYPES: u32 = 10;
    pub(super) const LOCATION_ID: u32 = 11;
    pub(super) const LOCATION_KIND: u32 = 12;
    pub(super) const MAX_BYTES: u32 = 13;
    pub(super) const HARDWARE_DECOMPRESSION: u32 = 14;
}

fn allocate(
    process: &ProcessState,
    place: Out<u64>,
    bytes: usize,
    pool: MemoryPool,
    stream: StreamRef<'_>,
) -> Result {
    let place = place.required()?;
    if process.contexts.device(stream.context)? != pool.device || pool.is_imported() {
        return Err(Error::INVALID_VALUE);
    }
    let bytes = bytes as u64;
    if let Some(address) = graphs::captured_allocation(process, stream, pool.device, bytes)? {
        return place.set(address);
    }
    if pool.most > 0
        && process.pools.usage(&process.session, &pool, Reset::default())?.used.saturating_add(bytes)
            > pool.most
    {
        return Err(Error::OUT_OF_MEMORY);
    }
    let origin = RangeOrigin::Pool(pool.handle);
    place.set(memory::allocate(process, stream.context, pool.number, origin, bytes)?)
}

pub(crate) fn cuMemAllocAsync(call: Call, place: Out<u64>, bytes: usize, stream: u64) -> Result {
    let process = process::get()?;
    place.required()?;
    let stream = process.stream_or_default(call, stream)?;
    let pool = process.pools.current(&process.devices, process.contexts.device(stream.context)?)?;
    allocate(process, place, bytes, pool, stream)
}

pub(crate) fn cuMemAllocFromPoolAsync(
    call: Call,
    place: Out<u64>,
    bytes: usize,
    pool: u64,
    stream: u64,
) -> Result {
    let process = process::get()?;
    place.required()?;
    let stream = process.stream_or_default(call, stream)?;
    allocate(process, place, bytes, process.pools.get(pool)?, stream)
}

pub(crate) fn cuMemFreeAsync(call: Call, address: u64, stream: u64) -> Result {
    let process = process::get()?;
    let stream = process.stream_or_default(call, stream)?;
    if graphs::captured_free(process, stream, address)? || address == 0 {
        return Ok(());
    }
    if let Some(kept) = GRAPHS.free_outside(address)? {
        return graphs::keep_until_reached(process, stream, kept);
    }
    process.device_map.free_ordered(&process.session, stream, address)
}

pub(crate) fn cuMemPoolCreate(_: Call, place: Out<u64>, properties: In<c_void>) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    // { kind, handle types, location { kind, id }, security attributes, bytes at most, usage, RDMA, reserved }
    let bytes = properties.cast::<[u8; 88]>().get()?;
    let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let most = u64::from(half(24)) | u64::from(half(28)) << 32;
    if half(0) != PINNED {
        return Err(Error::INVALID_VALUE);
    }
    let device = location_of(process, half(8), half(12).cast_signed())?;
    if half(4) & !POSIX_FD != 0 || bytes[32..35] != [0; 3] {
        return Err(Error::NOT_SUPPORTED);
    }
    let shared = (half(4) != 0).then(SharedPool::new);
    place.set(process.pools.create(&process.session, &process.devices, device, most, shared)?)
}

pub(crate) fn cuMemPoolExportToShareableHandle(
    _: Call,
    place: Out<c_void>,
    pool: u64,
    kind: c_uint,
    flags: u64,
) -> Result {
    let process = process::get()?;
    check_export(place, kind, flags)?;
    let pool = process.pools.get(pool)?;
    let shared = pool.shared.filter(|shared| !shared.imported).ok_or(Error::INVALID_VALUE)?;
    let token = ExportToken::pool(process.devices.get(pool.device)?.uuid, shared.identity);
    place.set_bytes(&descriptor::hand_out(token.into_file()?).to_ne_bytes())
}

pub(crate) fn cuMemPoolImportFromShareableHandle(
    _: Call,
    place: Out<u64>,
    handle: Out<c_void>,
    kind: c_uint,
    flags: u64,
) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if kind != POSIX_FD {
        // Here the parameter is a pointer.
        handle.required()?;
        return Err(Error::NOT_SUPPORTED);
    }
    // The pointer parameter holds the descriptor itself.
    let number = handle.address() & 0xffff_ffff;
    if !is_open_descriptor(number) {
        return Err(Error::UNKNOWN);
    }
    let bytes = descriptor::read::<64>(number)?;
    let (uuid, identity) = ExportToken::from_pool(&bytes)?;
    let mut devices = (0..).zip(process.devices.iter());
    let device = devices.find(|(_, device)| device.uuid == uuid).ok_or(Error::INVALID_VALUE)?.0;
    place.set(process.pools.import(&process.devices, device, identity)?)
}

pub(crate) fn cuMemPoolExportPointer(_: Call, place: Out<c_void>, address: u64) -> Result {
    let process = process::get()?;
    place.cast::<u8>().required()?;
    process.current()?;
    let range = process.device_map.find(address).filter(|range| range.start == address);
    let range = range.ok_or(Error::INVALID_VALUE)?;
    let RangeOrigin::Pool(pool) = range.kind else { return Err(Error::INVALID_VALUE) };
    let pool = process.pools.get(pool)?;
    let shared = pool.shared.filter(|shared| !shared.imported).ok_or(Error::INVALID_VALUE)?;
    let device = process.devices.get(pool.device)?.uuid;
    let token = ExportToken::allocation(&process.session, device, &range)?;
    place.set_bytes(&token.in_pool(shared.identity).to_bytes())
}

pub(crate) fn cuMemPoolImportPointer(_: Call, place: Out<u64>, pool: u64, data: In<c_void>) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    let context = process.current()?;
    let pool = process.pools.get(pool)?;
    let shared = pool.shared.filter(|shared| shared.imported).ok_or(Error::INVALID_VALUE)?;
    let device = process.devices.get(pool.device)?;
    let bytes = data.cast::<[u8; 64]>().get()?;
    let token = ExportToken::from_pool_pointer(device.uuid, shared.identity, &bytes)?;
    if process.pools.is_own(shared.identity) {
        return Err(Error::INVALID_CONTEXT);
    }
    if process.contexts.device(context.raw)? != pool.device {
        return Err(Error::INVALID_VALUE);
    }
    let (offset, bytes) = token.within();
    let call = wire::ipc_open::Args { device: Ordinal(device.ordinal), share: token.share, offset, bytes };
    let opened = process.session.sync(context.raw, &call)?;
    let origin = RangeOrigin::Pool(pool.handle);
    place.set(process.device_map.enter(opened.address, bytes, context.raw, origin)?)
}

pub(crate) fn cuMemPoolDestroy(_: Call, pool: u64) -> Result {
    let process = process::get()?;
    process.pools.destroy(&process.session, pool)
}

pub(crate) fn cuMemPoolTrimTo(_: Call, pool: u64, keep: usize) -> Result {
    let process = process::get()?;
    let pool = process.pools.get(pool)?;
    if pool.is_imported() {
        return Ok(());
    }
    let number = pool.number;
    process.session.sync(0, &wire::pool_trim::Args { pool: number, keep: keep as u64 })?;
    Ok(())
}

pub(crate) fn cuMemPoolSetAttribute(_: Call, pool: u64, attribute: c_uint, value: Out<c_void>) -> Result {
    let process = process::get()?;
    let pool = process.pools.get(pool)?;
    let long = || value.cast::<u64>().get();
    let reset = |marks| process.pools.usage(&process.session, &pool, marks).map(drop);
    match attribute {
        attribute::REUSE_FIRST..=attribute::REUSE_LAST => {
            let on = u32::from(value.cast::<u32>().get()? != 0);
            let index = (attribute - attribute::REUSE_FIRST) as usize;
            process.pools.change(pool.handle, |pool| pool.reuse[index] = on)
        }
        attribute::RELEASE_THRESHOLD => {
            let threshold = long()?;
            process.pools.change(pool.handle, |pool| pool.threshold = threshold)?;
            pools::set_threshold(&process.session, &pool, threshold)
        }
        // A program can only reset the high-water marks.
        attribute::RESERVED_HIGH if long()? == 0 => reset(Reset { reserved: true, used: false }),
        attribute::USED_HIGH if long()? == 0 => reset(Reset { reserved: false, used: true }),
        _ => Err(Error::INVALID_VALUE),
    }
}

pub(crate) fn cuMemPoolGetAttribute(_: Call, pool: u64, attribute: c_uint, value: Out<c_void>) -> Result {
    let process = process::get()?;
    let pool = process.pools.get(pool)?;
    let word = |word: u32| value.set_bytes(&word.to_ne_bytes());
    let long = |long: u64| value.set_bytes(&long.to_ne_bytes());
    let usage = || process.pools.usage(&process.session, &pool, Reset::default());
    match attribute {
        attribute::REUSE_FIRST..=attribute::REUSE_LAST => {
            word(pool.reuse[(attribute - attribute::REUSE_FIRST) as usize])
        }
        attribute::RELEASE_THRESHOLD => long(pool.threshold),
        attribute::RESERVED => long(usage()?.reserved),
        attribute::RESERVED_HIGH => long(usage()?.reserved_high),
        attribute::USED => long(usage()?.used),
        attribute::USED_HIGH => long(usage()?.used_high),
        attribute::KIND => word(PINNED),
        attribute::EXPORT_TYPES => word(if pool.shared.is_some() { POSIX_FD } else { 0 }),
        attribute::HARDWARE_DECOMPRESSION => word(0),
        attribute::LOCATION_ID => word(pool.device.cast_unsigned()),
        attribute::LOCATION_KIND => word(ON_DEVICE),
        attribute::MAX_BYTES => long(pool.most),
        _ => Err(Error::INVALID_VALUE),
    }
}

pub(crate) fn cuMemPoolSetAccess(_: Call, pool: u64, access: In<c_void>, count: usize) -> Result {
    let process = process::get()?;
    let pool = process.pools.get(pool)?;
    super::virtual_memory::each_access(process, access, count, |device, flags| {
        let access = AccessFlags::from_number(flags).ok_or(Error::INVALID_VALUE)?;
        // The device that owns the memory always has access.
        if device == pool.device {
            return if flags == READ_WRITE { Ok(()) } else { Err(Error::INVALID_VALUE) };
        }
        if !super::peers::reaches(process, device, pool.device)? {
            return Err(Error::INVALID_DEVICE);
        }
        // Memory of another process is accessed by its own device only.
        if pool.is_imported() {
            return Err(Error::NOT_SUPPORTED);
        }
        if process.pools.access(pool.handle, device) & !flags != 0 {
            process.streams.wait_all(&process.session)?;
        }
        let peer = Ordinal(process.devices.get(device)?.ordinal);
        let call = wire::pool_access::Args { pool: pool.number, device: Ordinal(pool.ordinal), peer, access };
        process.session.sync(0, &call)?;
        process.pools.set_access(pool.handle, device, flags);
        Ok(())
    })
}

pub(crate) fn cuMemPoolGetAccess(_: Call, flags: Out<c_uint>, pool: u64, location: Out<c_void>) -> Result {
    let process = process::get()?;
    let pool = process.pools.get(pool)?;
    let device = super::virtual_memory::device_of(process, location.cast().get()?)?;
    flags.set(if device == pool.device { READ_WRITE } else { process.pools.access(pool.handle, device) })
}

pub(crate) fn cuDeviceGetDefaultMemPool(_: Call, place: Out<u64>, device: c_int) -> Result {
    let process = process::get()?;
    place.set(process.pools.default_of(&process.devices, device)?.handle)
}

pub(crate) fn cuDeviceGetMemPool(_: Call, place: Out<u64>, device: c_int) -> Result {
    let process = process::get()?;
    place.set(process.pools.current(&process.devices, device)?.handle)
}

pub(crate) fn cuDeviceSetMemPool(_: Call, device: c_int, pool: u64) -> Result {
    let process = process::get()?;
    process.pools.set_current(&process.devices, device, pool)
}

/// The device of a location whose pools a program asks for: only pinned memory of a device has pools.
fn place_of(process: &ProcessState, location: In<c_void>, kind: c_uint) -> Result<c_int> {
    let location = location.cast().get()?;
    if kind != PINNED {
        return Err(Error::NOT_SUPPORTED);
    }
    super::virtual_memory::device_of(process, location)
}

pub(crate) fn cuMemGetDefaultMemPool(_: Call, place: Out<u64>, location: In<c_void>, kind: c_uint) -> Result {
    let process = process::get()?;
    place.required()?;
    let device = place_of(process, location, kind)?;
    place.set(process.pools.default_of(&process.devices, device)?.handle)
}

pub(crate) fn cuMemGetMemPool(_: Call, place: Out<u64>, location: In<c_void>, kind: c_uint) -> Result {
    let process = process::get()?;
    place.required()?;
    let device = place_of(process, location, kind)?;
    place.set(process.pools.current(&process.devices, device)?.handle)
}

pub(crate) fn cuMemSetMemPool(_: Call, location: In<c_void>, kind: c_uint, pool: u64) -> Result {
    let process = process::get()?;
    let device = place_of(process, location, kind)?;
    process.pools.set_current(&process.devices, device, pool)
}
