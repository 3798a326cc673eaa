//! Memory: device memory, pinned host memory, and pointer attributes.

use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    graphs::GRAPHS,
    log,
    process::{self, ProcessState},
    state::memory::device_map::{DeviceMapRange, RangeOrigin},
};
use core::ffi::{c_uint, c_void};
use sluice_protocol::{calls::wire, field::Ordinal};

pub(crate) fn cuMemAlloc_v2(_: Call, address: Out<u64>, bytes: usize) -> Result {
    let process = process::get()?;
    let place = address.required()?;
    let context = process.current()?;
    GRAPHS.potentially_unsafe()?;
    place.set(allocate(process, context.raw, 0, RangeOrigin::Own, bytes as u64)?)
}

/// Allocates device memory from a pool, by its number on the host; 0 is no pool.
pub(super) fn allocate(
    process: &ProcessState,
    context: u64,
    pool: u32,
    origin: RangeOrigin,
    bytes: u64,
) -> Result<u64> {
    process.device_map.allocate(&process.session, context, pool, origin, bytes)
}

/// Rows are aligned to this, as the vendor's driver aligns them for coalesced and texture access.
const PITCH: u64 = 512;

pub(crate) fn cuMemAllocPitch_v2(
    _: Call,
    address: Out<u64>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
    element: c_uint,
) -> Result {
    let process = process::get()?;
    let (place, pitch) = (address.required()?, pitch.required()?);
    let context = process.current()?;
    GRAPHS.potentially_unsafe()?;
    if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let row = (width as u64).checked_next_multiple_of(PITCH).ok_or(Error::OUT_OF_MEMORY)?;
    let bytes = row.checked_mul(height as u64).ok_or(Error::OUT_OF_MEMORY)?;
    place.set(allocate(process, context.raw, 0, RangeOrigin::Own, bytes)?)?;
    pitch.set(usize::try_from(row).map_err(|_| Error::OUT_OF_MEMORY)?)
}

pub(crate) fn cuMemFree_v2(_: Call, address: u64) -> Result {
    let process = process::get()?;
    process.current().map_err(|without| match known(process, address) {
        // The driver looks for the memory first.
        None if address != 0 && without == Error::INVALID_CONTEXT => Error::INVALID_VALUE,
        _ => without,
    })?;
    GRAPHS.potentially_unsafe()?;
    if let Some(aside) = process.managed.forget(address) {
        let unpinned = process.arena.unpin(&process.session, &process.streams, address);
        // Work never uses the memory that was set aside, so it is freed in any case.
        process.device_map.free_unused(&process.session, aside);
        return unpinned;
    }
    if let Some(kept) = GRAPHS.free_outside(address)? {
        process.streams.wait_all(&process.session)?;
        drop(kept);
        return Ok(());
    }
    process.device_map.free(&process.session, &process.streams, address)
}

pub(crate) fn cuMemGetInfo_v2(_: Call, free: Out<usize>, total: Out<usize>) -> Result {
    let process = process::get()?;
    let device = process.devices.get(process.current()?.device)?.ordinal;
    let answer = process.session.sync(0, &wire::device_memory::Args { device: Ordinal(device) })?;
    free.set_if_given(usize::try_from(answer.free).map_err(|_| Error::UNKNOWN)?);
    total.set_if_given(usize::try_from(answer.total).map_err(|_| Error::UNKNOWN)?);
    Ok(())
}

pub(crate) fn cuMemGetAddressRange_v2(_: Call, start: Out<u64>, bytes: Out<usize>, address: u64) -> Result {
    let process = process::get()?;
    process.current()?;
    let (from, length) = match process.device_map.find(address) {
        Some(range) => (range.start, range.bytes),
        None => {
            process.arena.pinned(address, |start, pinned| (start, pinned.bytes)).ok_or(Error::NOT_FOUND)?
        }
    };
    start.set_if_given(from);
    bytes.set_if_given(usize::try_from(length).map_err(|_| Error::UNKNOWN)?);
    Ok(())
}

/// `CU_MEMHOSTALLOC_*` bits that exist: PORTABLE, DEVICEMAP, WRITECOMBINED (which changes nothing here).
const HOST_FLAGS: u32 = 7;
/// `CU_MEMHOSTALLOC_DEVICEMAP`, always set if devices reach host memory.
const DEVICE_MAP: u32 = 2;

pub(crate) fn cuMemHostAlloc(_: Call, place: Out<*mut c_void>, bytes: usize, flags: c_uint) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    let context = process.current()?;
    if flags & !HOST_FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    GRAPHS.potentially_unsafe()?;
    // If devices do not reach host memory, the flag is no error until the program asks for an address on the device.
    let flags = if process.session.gathers() { flags } else { flags | DEVICE_MAP };
    let address = process.arena.pin(&process.session, context.raw, bytes as u64, flags)?;
    place.set(core::ptr::with_exposed_provenance_mut(usize::try_from(address).map_err(|_| Error::UNKNOWN)?))
}

pub(crate) fn cuMemAllocHost_v2(call: Call, place: Out<*mut c_void>, bytes: usize) -> Result {
    if bytes == 0 {
        // It accepts a length of 0, which `cuMemHostAlloc` refuses, and returns null.
        process::get()?.current()?;
        return place.set(core::ptr::null_mut());
    }
    cuMemHostAlloc(call, place, bytes, 0)
}

pub(crate) fn cuMemFreeHost(_: Call, memory: Out<c_void>) -> Result {
    let process = process::get()?;
    process.current()?;
    // As `cuMemFree`: the runtime passes null on, and documents no error for it.
    if memory.address() == 0 {
        return Ok(());
    }
    if process.managed.at(memory.address()).is_some() {
        return Err(Error::INVALID_VALUE);
    }
    GRAPHS.potentially_unsafe()?;
    process.arena.unpin(&process.session, &process.streams, memory.address())
}

pub(crate) fn cuMemHostGetDevicePointer_v2(
    _: Call,
    device: Out<u64>,
    memory: Out<c_void>,
    flags: c_uint,
) -> Result {
    let process = process::get()?;
    process.current()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let address = process.arena.on_device(memory.address(), 1);
    let mapped = process.arena.pinned(address, |_, pinned| pinned.is_mapped());
    if mapped != Some(true) {
        return Err(Error::INVALID_VALUE);
    }
    device.set(address)
}

pub(crate) fn cuMemHostGetFlags(_: Call, flags: Out<c_uint>, memory: Out<c_void>) -> Result {
    let process = process::get()?;
    let address = process.arena.on_device(memory.address(), 1);
    flags.set(process.arena.pinned(address, |_, pinned| pinned.flags).ok_or(Error::INVALID_VALUE)?)
}

/// `CU_MEMHOSTREGISTER_*` bits that exist.
const REGISTER_FLAGS: u32 = 15;
/// `CU_MEMHOSTREGISTER_IOMEMORY`: the memory is that of a device.
const REGISTER_IO_MEMORY: u32 = 4;
/// `CU_MEMHOSTREGISTER_READ_ONLY`: the device does not write the memory. Attribute 113 reports that this is not supported.
const REGISTER_READ_ONLY: u32 = 8;

pub(crate) fn cuMemHostRegister_v2(_: Call, memory: Out<c_void>, bytes: usize, flags: c_uint) -> Result {
    let process = process::get()?;
    if flags & !REGISTER_FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if flags & REGISTER_IO_MEMORY != 0 {
        log::info(format_args!("cuMemHostRegister: memory of a device cannot be registered"));
        return Err(Error::INVALID_VALUE);
    }
    if flags & REGISTER_READ_ONLY != 0 {
        return Err(Error::NOT_SUPPORTED);
    }
    GRAPHS.potentially_unsafe()?;
    let context = process.current()?;
    let (address, bytes) = (memory.address(), bytes as u64);
    if address == 0 || bytes == 0 || process.device_map.reserves(address) {
        return Err(Error::INVALID_VALUE);
    }
    let last = address.checked_add(bytes - 1).ok_or(Error::INVALID_VALUE)?;
    // Memory of the driver; memory that the program has registered has another address in the arena.
    if [address, last].into_iter().any(|at| process.arena.pinned(at, |_, _| ()).is_some()) {
        return Err(Error::INVALID_VALUE);
    }
    if !process.can_register {
        log::info(format_args!(
            "cuMemHostRegister: this system has no userfaultfd(2), or the device does not reach its memory"
        ));
        return Err(Error::NOT_SUPPORTED);
    }
    process.arena.register(&process.session, context.raw, address, bytes, flags | DEVICE_MAP)
}

pub(crate) fn cuMemHostUnregister(_: Call, memory: Out<c_void>) -> Result {
    let process = process::get()?;
    process.current()?;
    GRAPHS.potentially_unsafe()?;
    let address = memory.address();
    if address == 0 || process.arena.pinned(address, |_, _| ()).is_some() {
        return Err(Error::INVALID_VALUE);
    }
    process.arena.unregister(&process.session, &process.streams, address)
}

/// `CUpointer_attribute`s.
mod pointer {
    pub(super) const CONTEXT: u32 = 1;
    pub(super) const MEMORY_TYPE: u32 = 2;
    pub(super) const DEVICE_POINTER: u32 = 3;
    pub(super) const HOST_POINTER: u32 = 4;
    pub(super) const SYNC_MEMOPS: u32 = 6;
    pub(super) const BUFFER_ID: u32 = 7;
    pub(super) const IS_MANAGED: u32 = 8;
    pub(super) const DEVICE_ORDINAL: u32 = 9;
    pub(super) const IS_LEGACY_IPC_CAPABLE: u32 = 10;
    pub(super) const RANGE_START: u32 = 11;
    pub(super) const RANGE_SIZE: u32 = 12;
    pub(super) const MAPPED: u32 = 13;
    pub(super) const ALLOWED_HANDLE_TYPES: u32 = 14;
    pub(super) const IS_GPU_DIRECT_RDMA_CAPABLE: u32 = 15;
    pub(super) const ACCESS_FLAGS: u32 = 16;
    pub(super) const MEMPOOL_HANDLE: u32 = 17;
    pub(super) const MAPPING_SIZE: u32 = 18;
    pub(super) const MAPPING_BASE: u32 = 19;
    pub(super) const MEMORY_BLOCK_ID: u32 = 20;
    pub(super) const IS_DECOMPRESS_CAPABLE: u32 = 21;
    pub(super) const LOCALITY_DOMAIN: u32 = 22;
}

/// The facts about the memory behind a pointer.
struct Known {
    host: bool,
    /// True if devices reach it.
    mapped: bool,
    managed: bool,
    kind: RangeOrigin,
    start: u64,
    /// The address in the program, of host memory.
    in_program: u64,
    bytes: u64,
    identity: u64,
    context: u64,
}

fn known(process: &ProcessState, address: u64) -> Option<Known> {
    let managed = process.managed.at(address).is_some();
    if let Some(range) = process.device_map.find(address) {
        let DeviceMapRange { start, bytes, identity, context, kind } = range;
        return Some(Known {
            host: managed,
            mapped: true,
            managed,
            kind,
            start,
            in_program: if managed { start } else { 0 },
            bytes,
            identity,
            context,
        });
    }
    process.arena.pinned(process.arena.on_device(address, 1), |start, pinned| Known {
        host: true,
        mapped: pinned.is_mapped(),
        managed,
        kind: RangeOrigin::Own,
        start,
        in_program: pinned.in_program(start),
        bytes: pinned.bytes,
        identity: pinned.identity,
        context: pinned.context,
    })
}

/// Writes one attribute; the width depends on the attribute.
fn write(
    process: &ProcessState,
    attribute: u32,
    address: u64,
    known: Option<&Known>,
    data: Out<c_void>,
) -> Result {
    let word = |value: u32| data.set_bytes(&value.to_ne_bytes());
    let long = |value: u64| data.set_bytes(&value.to_ne_bytes());
    let flag = |value: bool| data.set_bytes(&[u8::from(value)]);
    let Some(known) = known else {
        // Memory unknown to CUDA: all zero, or "none" where 0 has a meaning.
        return match attribute {
            pointer::DEVICE_ORDINAL => data.set_bytes(&(-2i32).to_ne_bytes()),
            pointer::MEMORY_TYPE | pointer::SYNC_MEMOPS | pointer::IS_MANAGED | pointer::ACCESS_FLAGS => {
                word(0)
            }
            pointer::MAPPED | pointer::IS_LEGACY_IPC_CAPABLE | pointer::IS_GPU_DIRECT_RDMA_CAPABLE => {
                flag(false)
            }
            pointer::IS_DECOMPRESS_CAPABLE => word(0),
            pointer::LOCALITY_DOMAIN => data.set_bytes(&(-1i32).to_ne_bytes()),
            pointer::CONTEXT..=pointer::MEMORY_BLOCK_ID => long(0),
            _ => Err(Error::INVALID_VALUE),
        };
    };
    match attribute {
        // Physical memory belongs to no context.
        pointer::CONTEXT if known.kind == RangeOrigin::Mapped => Err(Error::INVALID_VALUE),
        pointer::CONTEXT => long(known.context),
        // CU_MEMORYTYPE_HOST and CU_MEMORYTYPE_DEVICE.
        pointer::MEMORY_TYPE => word(if known.host && !known.managed { 1 } else { 2 }),
        pointer::DEVICE_POINTER if known.mapped => long(process.arena.on_device(address, 1)),
        pointer::DEVICE_POINTER => Err(Error::INVALID_VALUE),
        pointer::HOST_POINTER if known.host => {
            long(known.in_program + (process.arena.on_device(address, 1) - known.start))
        }
        pointer::HOST_POINTER => Err(Error::INVALID_VALUE),
        pointer::SYNC_MEMOPS => word(1),
        pointer::BUFFER_ID => long(known.identity),
        pointer::IS_MANAGED => word(u32::from(known.managed)),
        pointer::DEVICE_ORDINAL => {
            let device = match known.kind {
                RangeOrigin::Mapped => process.blocks.device_at(known.start).unwrap_or(0),
                RangeOrigin::Imported(device) => device,
                _ => process.contexts.device(known.context).unwrap_or(0),
            };
            word(device.cast_unsigned())
        }
        pointer::IS_LEGACY_IPC_CAPABLE => flag(!known.host && known.kind == RangeOrigin::Own),
        pointer::IS_GPU_DIRECT_RDMA_CAPABLE => flag(false),
        pointer::RANGE_START => long(known.start),
        pointer::RANGE_SIZE => long(known.bytes),
        pointer::MAPPED => flag(known.mapped),
        pointer::ALLOWED_HANDLE_TYPES => long(
            process
                .blocks
                .shareable_at(known.start)
                .filter(|_| known.kind == RangeOrigin::Mapped)
                .unwrap_or(0),
        ),
        pointer::MEMPOOL_HANDLE => long(if let RangeOrigin::Pool(pool) = known.kind { pool } else { 0 }),
        pointer::MAPPING_SIZE if known.mapped => long(known.bytes),
        pointer::MAPPING_BASE if known.mapped => long(known.start),
        pointer::MEMORY_BLOCK_ID if known.mapped => long(known.identity),
        // Attributes of the device report neither decompression nor locality domains.
        pointer::IS_DECOMPRESS_CAPABLE => word(0),
        pointer::LOCALITY_DOMAIN => data.set_bytes(&(-1i32).to_ne_bytes()),
        // CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE, or none.
        pointer::ACCESS_FLAGS => word(if known.mapped { 3 } else { 0 }),
        _ => Err(Error::INVALID_VALUE),
    }
}

pub(crate) fn cuPointerGetAttribute(_: Call, data: Out<c_void>, attribute: c_uint, address: u64) -> Result {
    let process = process::get()?;
    data.cast::<u8>().required()?;
    let known = known(process, address).ok_or(Error::INVALID_VALUE)?;
    write(process, attribute, address, Some(&known), data)
}

pub(crate) fn cuPointerGetAttributes(
    _: Call,
    count: c_uint,
    attributes: Out<c_uint>,
    data: Out<*mut c_void>,
    address: u64,
) -> Result {
    let process = process::get()?;
    if count == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let (known, data) = (known(process, address), data.cast::<Out<c_void>>());
    for index in 0..count as usize {
        let place = data.get_at(index)?;
        match write(process, attributes.get_at(index)?, address, known.as_ref(), place) {
            // No host pointer to device memory, or the reverse: the batch form answers null.
            Err(_)
                if matches!(attributes.get_at(index)?, pointer::HOST_POINTER | pointer::DEVICE_POINTER) =>
            {
                place.set_bytes(&0u64.to_ne_bytes())?
            }
            written => written?,
        }
    }
    Ok(())
}

pub(crate) fn cuPointerSetAttribute(_: Call, value: In<c_void>, attribute: c_uint, address: u64) -> Result {
    let process = process::get()?;
    if value.address() == 0 {
        return Err(Error::INVALID_VALUE);
    }
    known(process, address).ok_or(Error::INVALID_VALUE)?;
    if attribute == pointer::SYNC_MEMOPS {
        // Memory operations on one range are ordered here in any case.
        return Ok(());
    }
    log::info(format_args!("cuPointerSetAttribute: attribute {attribute} cannot be set"));
    Err(Error::INVALID_VALUE)
}
