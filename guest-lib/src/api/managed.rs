//! The managed-memory functions of the C API.

use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    graphs::{self, GRAPHS},
    host_memory, log,
    process::{self, ProcessState},
    state::{devices::attribute, memory::device_map::RangeOrigin, streams::StreamRef},
};
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_frontend::batch::{self, Locations, ManagedRange};
use sluice_cuda_frontend::managed::{self, ATTACH_GLOBAL, ATTACH_HOST, ATTACH_SINGLE, Location, Saying};

pub(crate) fn cuMemAllocManaged(_: Call, place: Out<u64>, bytes: usize, flags: c_uint) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) || bytes == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let context = process.current()?;
    if process.session.gathers() {
        return Err(Error::NOT_SUPPORTED);
    }
    GRAPHS.potentially_unsafe()?;
    let (session, bytes) = (&process.session, bytes as u64);
    let aside = process.device_map.allocate(session, context.raw, 0, RangeOrigin::Internal, bytes)?;
    let start = process
        .arena
        .pin(session, context.raw, bytes, 0)
        .inspect_err(|_| process.device_map.free_unused(session, aside))?;
    // The arena's memory may have been the program's before; managed memory begins with zeroes.
    host_memory::zero(start, usize::try_from(bytes).map_err(|_| Error::OUT_OF_MEMORY)?);
    process.managed.add(start, bytes, context.raw, aside);
    place.set(start)
}

/// An error unless managed variables are served: program and work take turns with their contents.
pub(super) fn variables_are_served(process: &ProcessState) -> Result {
    let concurrent = (0..).zip(process.devices.iter()).any(|(device, _)| concurrent(process, device).is_ok());
    if process.session.gathers() || concurrent {
        log::warn(format_args!(
            "managed variables are not supported in a guest whose devices access managed memory while the program does \
             (CUDA_ERROR_NOT_SUPPORTED)"
        ));
        return Err(Error::NOT_SUPPORTED);
    }
    Ok(())
}

/// A location by value: its kind in the low half.
#[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
const fn by_value(word: u64) -> Location {
    Location { kind: word as u32, id: ((word >> 32) as u32).cast_signed() }
}

/// An error unless a device reaches managed memory while the host does: then no other call moves or prepares the memory for it.
fn concurrent(process: &ProcessState, device: c_int) -> Result {
    match process.devices.get(device)?.attribute(attribute::CONCURRENT_MANAGED_ACCESS)? {
        0 => Err(Error::INVALID_DEVICE),
        _ => Ok(()),
    }
}

fn every_device_is_concurrent(process: &ProcessState) -> Result {
    (0..).zip(process.devices.iter()).try_for_each(|(device, _)| concurrent(process, device))
}

/// A location that advice and prefetches may name.
fn checked(process: &ProcessState, place: Location) -> Result<Location> {
    place.checked(|id| concurrent(process, id), Error::INVALID_DEVICE)
}

fn advise(start: u64, bytes: u64, advice: u32, place: Location) -> Result {
    let process = process::get()?;
    process.current()?;
    process.managed.check(start, bytes)?;
    let saying = Saying::of(advice, || checked(process, place), Error::INVALID_VALUE)?;
    process.managed.advise(start, bytes, saying)
}

pub(crate) fn cuMemAdvise(_: Call, start: u64, bytes: usize, advice: c_uint, device: c_int) -> Result {
    advise(start, bytes as u64, advice, Location::numbered(device))
}

pub(crate) fn cuMemAdvise_v2(_: Call, start: u64, bytes: usize, advice: c_uint, location: u64) -> Result {
    advise(start, bytes as u64, advice, by_value(location))
}

fn resolve(call: Call, stream: u64) -> Result<(&'static ProcessState, StreamRef<'static>)> {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    graphs::refuse(process, stream)?;
    Ok((process, stream))
}

/// Nothing moves, so the stream has nothing to wait for.
fn prefetch(call: Call, start: u64, bytes: u64, place: Location, stream: u64) -> Result {
    let (process, stream) = resolve(call, stream)?;
    process.managed.check(start, bytes)?;
    let place = checked(process, place)?;
    concurrent(process, process.contexts.get(stream.context)?.device)?;
    process.managed.advise(start, bytes, Saying::Prefetched(place))
}

pub(crate) fn cuMemPrefetchAsync(call: Call, start: u64, bytes: usize, device: c_int, stream: u64) -> Result {
    prefetch(call, start, bytes as u64, Location::numbered(device), stream)
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

/// Prefetches or discards the ranges of a batch. The contents of a range that is discarded need not stay, and do.
fn move_batch(call: Call, ranges: Result<Vec<ManagedRange>>, stream: u64) -> Result {
    let (process, _) = resolve(call, stream)?;
    // All are checked before the first is moved.
    let mut ranges = ranges?;
    for ManagedRange { start, bytes, to } in &mut ranges {
        process.managed.check(*start, *bytes)?;
        *to = to.map(|place| checked(process, place)).transpose()?;
    }
    every_device_is_concurrent(process)?;
    for ManagedRange { start, bytes, to } in ranges {
        if let Some(place) = to {
            process.managed.advise(start, bytes, Saying::Prefetched(place))?;
        }
    }
    Ok(())
}

pub(crate) fn cuMemPrefetchBatchAsync(
    call: Call,
    starts: In<u64>,
    sizes: In<usize>,
    count: usize,
    places: In<c_void>,
    place_starts: In<usize>,
    places_count: usize,
    flags: u64,
    stream: u64,
) -> Result {
    let places = Locations { values: places.cast(), starts: place_starts.cast(), count: places_count };
    let ranges = batch::managed(starts, sizes.cast(), count, Some(places), flags, Error::INVALID_VALUE);
    move_batch(call, ranges, stream)
}

pub(crate) fn cuMemDiscardBatchAsync(
    call: Call,
    starts: In<u64>,
    sizes: In<usize>,
    count: usize,
    flags: u64,
    stream: u64,
) -> Result {
    let ranges = batch::managed(starts, sizes.cast(), count, None, flags, Error::INVALID_VALUE);
    move_batch(call, ranges, stream)
}

pub(crate) fn cuMemDiscardAndPrefetchBatchAsync(
    call: Call,
    starts: In<u64>,
    sizes: In<usize>,
    count: usize,
    places: In<c_void>,
    place_starts: In<usize>,
    places_count: usize,
    flags: u64,
    stream: u64,
) -> Result {
    cuMemPrefetchBatchAsync(call, starts, sizes, count, places, place_starts, places_count, flags, stream)
}

pub(crate) fn cuStreamAttachMemAsync(
    call: Call,
    stream: u64,
    start: u64,
    bytes: usize,
    flags: c_uint,
) -> Result {
    let (process, target) = resolve(call, stream)?;
    // The legacy default stream stands for all streams, not for one.
    let legacy = process.contexts.get(target.context)?.legacy == target.slot;
    if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST | ATTACH_SINGLE) || (flags == ATTACH_SINGLE && legacy) {
        return Err(Error::INVALID_VALUE);
    }
    if flags != ATTACH_GLOBAL && process.managed.variables.hold(start) {
        log::warn(format_args!(
            "a managed variable cannot be attached to a stream or to the host (CUDA_ERROR_NOT_SUPPORTED)"
        ));
        return Err(Error::NOT_SUPPORTED);
    }
    // No part of an allocation is attached; a length of 0 means the whole of it.
    match process.managed.at(start) {
        Some((base, whole)) if bytes == 0 || (start, bytes as u64) == (base, whole) => Ok(()),
        _ => Err(Error::INVALID_VALUE),
    }
}

fn range_attribute(data: Out<c_void>, size: usize, attribute: u32, start: u64, bytes: u64) -> Result {
    let process = process::get()?;
    let words = data.cast::<i32>();
    words.required()?;
    let said = process.managed.said(start, bytes)?;
    managed::range_attribute(&said, attribute, size, Error::INVALID_VALUE, |at, word| words.set_at(at, word))
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
        let place = data.cast::<Out<c_void>>().get_at(index)?;
        range_attribute(place, sizes.get_at(index)?, attributes.get_at(index)?, start, bytes as u64)?;
    }
    Ok(())
}

/// All managed memory is memory of the host.
pub(crate) fn cuMemGetLocationInfo(
    _: Call,
    start: u64,
    bytes: usize,
    summary: usize,
    sampling: usize,
    places: Out<c_void>,
) -> Result {
    let process = process::get()?;
    let places = places.cast::<Location>();
    places.required()?;
    if summary == 0 || summary > bytes || sampling > summary {
        return Err(Error::INVALID_VALUE);
    }
    process.managed.check(start, bytes as u64)?;
    // A device without concurrent access to managed memory does not support this query.
    every_device_is_concurrent(process).map_err(|_| Error::NOT_SUPPORTED)?;
    let host = Location { kind: Location::HOST, id: 0 };
    (0..bytes.div_ceil(summary)).try_for_each(|index| places.set_at(index, host))
}
