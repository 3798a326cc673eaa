//! Managed memory.

use crate::{
    arguments::{Out, host},
    error::{Error, Result},
    exports::Call,
    managed::{Advice, Location},
    process::{self, Process},
    streams::Stream,
};
use core::ffi::{c_char, c_int, c_uint, c_void};

/// Attach flags: global, host, single.
const ATTACH_GLOBAL: u32 = 1;
const ATTACH_HOST: u32 = 2;
const ATTACH_SINGLE: u32 = 4;
/// `CU_DEVICE_CPU` and `CU_DEVICE_INVALID`.
const CPU: i32 = -1;
const NOWHERE: i32 = -2;
/// `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_LOCATION_TYPE_HOST`.
const ON_DEVICE: u32 = 1;
const HOST: u32 = 2;

pub(crate) fn cuMemAllocManaged(_: Call, place: Out<u64>, bytes: usize, flags: c_uint) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) {
        return Err(Error::INVALID_VALUE);
    }
    let context = process.contexts.current(process)?;
    let start = process.arena.pin(process, context.raw, bytes as u64, 0)?;
    // The arena's memory may have been the program's before; managed memory begins with zeroes.
    host::zero(start, bytes);
    process.managed.add(start, bytes as u64, context.raw);
    place.put(start);
    Ok(())
}

/// A device number of the older calls.
const fn numbered(device: i32) -> Location {
    if device == CPU { Location { kind: HOST, id: 0 } } else { Location { kind: ON_DEVICE, id: device } }
}

/// A location by value: its kind in the low half.
#[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
const fn by_value(word: u64) -> Location {
    Location { kind: word as u32, id: ((word >> 32) as u32).cast_signed() }
}

/// A place that memory can be wished to.
fn checked(process: &Process, place: Location) -> Result<Location> {
    match place.kind {
        ON_DEVICE => process.devices.get(place.id).map(|_| place),
        // The host, one of its nodes, or the nearest: they are all the same here.
        2..=4 => Ok(Location { kind: HOST, id: 0 }),
        _ => Err(Error::INVALID_DEVICE),
    }
}

fn advise(start: u64, bytes: u64, advice: u32, place: Location) -> Result {
    let process = process::get()?;
    process.contexts.current(process)?;
    process.managed.check(start, bytes)?;
    let managed = &process.managed;
    match advice {
        1 | 2 => managed.advise(start, bytes, |said| said.read_mostly = advice == 1),
        3 => {
            let place = checked(process, place)?;
            managed.advise(start, bytes, |said| said.preferred = Some(place))
        }
        4 => managed.advise(start, bytes, |said| said.preferred = None),
        5 => {
            let place = checked(process, place)?;
            managed.advise(start, bytes, |said| {
                said.accessed_by.insert(place);
            })
        }
        6 => {
            let place = checked(process, place)?;
            managed.advise(start, bytes, |said| {
                said.accessed_by.remove(&place);
            })
        }
        _ => Err(Error::INVALID_VALUE),
    }
}

pub(crate) fn cuMemAdvise(_: Call, start: u64, bytes: usize, advice: c_uint, device: c_int) -> Result {
    advise(start, bytes as u64, advice, numbered(device))
}

pub(crate) fn cuMemAdvise_v2(_: Call, start: u64, bytes: usize, advice: c_uint, location: u64) -> Result {
    advise(start, bytes as u64, advice, by_value(location))
}

fn resolve(call: Call, stream: u64) -> Result<(&'static Process, Stream<'static>)> {
    let process = process::get()?;
    process.session.healthy()?;
    Ok((process, process.streams.resolve(process, call, stream)?))
}

/// Nothing moves, so there is nothing to wait for on the stream either.
fn prefetch(call: Call, start: u64, bytes: u64, place: Location, stream: u64) -> Result {
    let (process, _) = resolve(call, stream)?;
    process.managed.check(start, bytes)?;
    let place = checked(process, place)?;
    process.managed.advise(start, bytes, |said| said.prefetched = Some(place))
}

pub(crate) fn cuMemPrefetchAsync(call: Call, start: u64, bytes: usize, device: c_int, stream: u64) -> Result {
    prefetch(call, start, bytes as u64, numbered(device), stream)
}

pub(crate) fn cuMemPrefetchAsync_v2(
    call: Call,
    start: u64,
    bytes: usize,
    location: u64,
    flags: c_uint,
    stream: u64,
) -> Result {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    prefetch(call, start, bytes as u64, by_value(location), stream)
}

pub(crate) fn cuStreamAttachMemAsync(
    call: Call,
    stream: u64,
    start: u64,
    bytes: usize,
    flags: c_uint,
) -> Result {
    let (process, _) = resolve(call, stream)?;
    if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST | ATTACH_SINGLE) {
        return Err(Error::INVALID_VALUE);
    }
    // A length of 0 means the whole allocation.
    process.managed.check(start, (bytes as u64).max(1))
}

/// A place as the older attributes have it.
const fn device_number(place: Option<Location>) -> i32 {
    match place {
        Some(Location { kind: ON_DEVICE, id }) => id,
        Some(_) => CPU,
        None => NOWHERE,
    }
}

/// One value that all parts of a range have, or none.
fn common<T: PartialEq + Copy>(said: &[Advice], tell: impl Fn(&Advice) -> Option<T>) -> Option<T> {
    let first = tell(said.first()?);
    if said.iter().all(|advice| tell(advice) == first) { first } else { None }
}

fn range_attribute(data: Out<c_void>, size: usize, attribute: u32, start: u64, bytes: u64) -> Result {
    let process = process::get()?;
    data.cast::<u8>().required()?;
    let said = process.managed.said(start, bytes)?;
    let preferred = common(&said, |advice| advice.preferred);
    let prefetched = common(&said, |advice| advice.prefetched);
    let word = |value: i32| match size {
        4 => data.set_bytes(&value.to_ne_bytes()),
        _ => Err(Error::INVALID_VALUE),
    };
    let kind = |place: Option<Location>| place.map_or(0, |place| place.kind.cast_signed());
    match attribute {
        1 => word(i32::from(said.iter().all(|advice| advice.read_mostly))),
        2 => word(device_number(preferred)),
        3 => {
            if size == 0 || !size.is_multiple_of(4) {
                return Err(Error::INVALID_VALUE);
            }
            let first = said.first().map(|first| first.accessed_by.clone()).unwrap_or_default();
            let everywhere =
                first.into_iter().filter(|place| said.iter().all(|one| one.accessed_by.contains(place)));
            let mut devices: Vec<i32> = everywhere.map(|place| device_number(Some(place))).collect();
            devices.resize(size / 4, NOWHERE);
            for (index, device) in devices.into_iter().enumerate() {
                data.cast::<i32>().set_at(index, device)?;
            }
            Ok(())
        }
        4 => word(device_number(prefetched)),
        5 => word(kind(preferred)),
        6 => word(preferred.map_or(0, |place| place.id)),
        7 => word(kind(prefetched)),
        8 => word(prefetched.map_or(0, |place| place.id)),
        _ => Err(Error::INVALID_VALUE),
    }
}

pub(crate) fn cuMemRangeGetAttribute(
    _: Call,
    data: Out<c_void>,
    size: usize,
    attribute: c_uint,
    start: u64,
    bytes: usize,
) -> Result {
    range_attribute(data, size, attribute, start, bytes as u64)
}

pub(crate) fn cuMemRangeGetAttributes(
    _: Call,
    data: Out<*mut c_void>,
    sizes: Out<usize>,
    attributes: Out<c_uint>,
    count: usize,
    start: u64,
    bytes: usize,
) -> Result {
    if count == 0 {
        return Err(Error::INVALID_VALUE);
    }
    for index in 0..count {
        let place = Out::<c_char>::from_address(data.get_at(index)?).cast::<c_void>();
        range_attribute(place, sizes.get_at(index)?, attributes.get_at(index)?, start, bytes as u64)?;
    }
    Ok(())
}
