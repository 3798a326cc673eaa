//! The virtual-memory API, for memory of devices. Host memory behind it is not served, and the attributes report that.

use crate::{
    arguments::{Call, In, Out, descriptor},
    error::{Error, Result},
    process::{self, ProcessState},
    state::memory::{
        blocks::{BlockAccess, GRANULARITY},
        imports::ExportToken,
    },
};
use core::ffi::{c_uint, c_void};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(super) const PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const ON_DEVICE: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const POSIX_FD: u32 = 1;

/// The device of a location.
pub(super) fn location_of(process: &ProcessState, kind: u32, id: i32) -> Result<i32> {
    match kind {
        ON_DEVICE => process.devices.get(id).map(|_| id),
        2..=4 => Err(Error::NOT_SUPPORTED),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// The device of a location as a word: its kind in the low half.
pub(super) fn device_of(process: &ProcessState, location: u64) -> Result<i32> {
    let [kind, id] = halves(location);
    location_of(process, kind, id.cast_signed())
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
const fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// Visits `CUmemAccessDesc`s: device and flags of each.
pub(super) fn each_access(
    process: &ProcessState,
    access: In<c_void>,
    count: usize,
    mut visit: impl FnMut(i32, u32) -> Result,
) -> Result {
    // { location { kind, id }, flags }
    let descriptions = access.cast::<[u32; 3]>();
    for index in 0..count {
        let [kind, id, flags] = descriptions.get_at(index)?;
        visit(location_of(process, kind, id.cast_signed())?, flags)?;
    }
    Ok(())
}

/// The device and the handle types of a `CUmemAllocationProp`: { kind, handle types, location { kind, id }, security attributes,
/// compression, RDMA, usage, reserved }.
fn properties(process: &ProcessState, properties: In<c_void>) -> Result<(i32, u32)> {
    let bytes = properties.cast::<[u8; 32]>().get()?;
    let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if half(0) != PINNED {
        return Err(Error::INVALID_VALUE);
    }
    let device = location_of(process, half(8), half(12).cast_signed())?;
    if half(4) & !POSIX_FD != 0 || bytes[24..28] != [0; 4] {
        return Err(Error::NOT_SUPPORTED);
    }
    Ok((device, half(4)))
}

pub(crate) fn cuMemGetAllocationGranularity(
    _: Call,
    granularity: Out<usize>,
    prop: In<c_void>,
    option: c_uint,
) -> Result {
    let process = process::get()?;
    // Host memory has a granularity, too, though none can be made: NCCL takes an error for the granularity as a sign of a fault, and
    // one for the memory as a reason for another way.
    match properties(process, prop) {
        Err(Error::NOT_SUPPORTED) | Ok(_) => {}
        Err(error) => return Err(error),
    }
    if option > 1 {
        return Err(Error::INVALID_VALUE);
    }
    granularity.set(usize::try_from(GRANULARITY).map_err(|_| Error::UNKNOWN)?)
}

pub(crate) fn cuMemCreate(_: Call, place: Out<u64>, bytes: usize, prop: In<c_void>, flags: u64) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let (device, shareable) = properties(process, prop)?;
    place.set(process.blocks.create(&process.session, &process.devices, device, bytes as u64, shareable)?)
}

pub(crate) fn cuMemRelease(_: Call, handle: u64) -> Result {
    let process = process::get()?;
    process.blocks.release(&process.session, handle)
}

pub(crate) fn cuMemRetainAllocationHandle(_: Call, place: Out<u64>, address: Out<c_void>) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    place.set(process.blocks.retain_at(address.address())?)
}

pub(crate) fn cuMemGetAllocationPropertiesFromHandle(_: Call, prop: Out<c_void>, handle: u64) -> Result {
    let process = process::get()?;
    let block = process.blocks.get(handle)?;
    let mut bytes = [0; 32];
    let words = [PINNED, block.shareable, ON_DEVICE, block.device.cast_unsigned()];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    prop.set_bytes(&bytes)
}

pub(crate) fn cuMemAddressReserve(
    _: Call,
    place: Out<u64>,
    bytes: usize,
    alignment: usize,
    hint: u64,
    flags: u64,
) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    place.set(process.blocks.reserve(
        &process.session,
        &process.device_map,
        bytes as u64,
        alignment as u64,
        hint,
    )?)
}

pub(crate) fn cuMemAddressFree(_: Call, address: u64, bytes: usize) -> Result {
    let process = process::get()?;
    process.blocks.unreserve(&process.session, address, bytes as u64)
}

pub(crate) fn cuMemMap(
    _: Call,
    address: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> Result {
    let process = process::get()?;
    if flags != 0 || offset != 0 {
        return Err(Error::INVALID_VALUE);
    }
    process.blocks.map(&process.session, address, bytes as u64, handle)
}

pub(crate) fn cuMemUnmap(_: Call, address: u64, bytes: usize) -> Result {
    let process = process::get()?;
    process.blocks.unmap(&process.session, &process.streams, &process.device_map, address, bytes as u64)
}

pub(crate) fn cuMemSetAccess(
    _: Call,
    address: u64,
    bytes: usize,
    access: In<c_void>,
    count: usize,
) -> Result {
    let process = process::get()?;
    if count == 0 {
        return Err(Error::INVALID_VALUE);
    }
    each_access(process, access, count, |device, flags| {
        let access = BlockAccess { device, ordinal: process.devices.get(device)?.ordinal, flags };
        let ProcessState { session, streams, device_map, blocks, .. } = process;
        blocks.set_access(session, streams, device_map, address, bytes as u64, access)
    })
}

pub(crate) fn cuMemGetAccess(_: Call, flags: Out<u64>, location: In<c_void>, address: u64) -> Result {
    let process = process::get()?;
    let device = device_of(process, location.cast().get()?)?;
    flags.set(u64::from(process.blocks.access_at(address, device)?))
}

/// Checks what the exports of memory and of pools have in common: a place for the handle, the only kind that is served, and no flags.
pub(super) fn check_export(place: Out<c_void>, kind: c_uint, flags: u64) -> Result {
    place.cast::<u8>().required()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if kind == POSIX_FD { Ok(()) } else { Err(Error::NOT_SUPPORTED) }
}

pub(crate) fn cuMemExportToShareableHandle(
    _: Call,
    place: Out<c_void>,
    handle: u64,
    kind: c_uint,
    flags: u64,
) -> Result {
    let process = process::get()?;
    check_export(place, kind, flags)?;
    if process.blocks.get(handle)?.shareable & POSIX_FD == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let (block, share) = process.blocks.share(&process.session, handle)?;
    let token = ExportToken::block(process.devices.get(block.device)?.uuid, share, block.bytes);
    place.set_bytes(&descriptor::hand_out(token.into_file()?).to_ne_bytes())
}

pub(crate) fn cuMemImportFromShareableHandle(
    _: Call,
    place: Out<u64>,
    handle: Out<c_void>,
    kind: c_uint,
) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    if kind != POSIX_FD {
        return Err(Error::NOT_SUPPORTED);
    }
    // The pointer parameter holds the descriptor itself.
    let token = ExportToken::from_block(&descriptor::read::<64>(handle.address() & 0xffff_ffff)?)?;
    let mut devices = (0..).zip(process.devices.iter());
    let device = devices.find(|(_, device)| device.uuid == token.device).ok_or(Error::INVALID_VALUE)?.0;
    place.set(process.blocks.open(&process.session, &process.devices, device, token.share, POSIX_FD)?)
}
