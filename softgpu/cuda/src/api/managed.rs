//! Managed memory. It is host memory that devices access in place, so nothing ever moves.

use std::ffi::c_void;
use std::ops::Range;

use sluice_cuda_frontend::batch::{self, Locations, ManagedRange};
use sluice_cuda_frontend::managed::{self, ATTACH_GLOBAL, ATTACH_HOST, ATTACH_SINGLE, Location, Saying};

use super::virtual_memory::MemLocation;
use crate::attributes::has_host_atomics;
use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::gpu::{self, VisibleGpu};
use crate::graphs::GRAPHS;
use crate::schedule::{QueuedWork, scheduler};
use crate::stream::{Implicit, target};

/// The GPU whose book lists a range as managed memory.
fn holder(start: u64, bytes: u64) -> Result<(&'static VisibleGpu, Range<u64>)> {
    let range = start..start.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
    let mut gpus = gpu::all()?.iter().copied();
    let gpu = gpus.find(|gpu| gpu.space.is_managed(&range)).ok_or(Error::INVALID_VALUE)?;
    Ok((gpu, range))
}

/// An error unless host and devices may access managed memory at the same time: then the driver moves all of it itself.
fn concurrent(gpu: &VisibleGpu) -> Result {
    if has_host_atomics(gpu) { Ok(()) } else { Err(Error::INVALID_DEVICE) }
}

/// Checks a preferred location.
fn checked(place: MemLocation) -> Result<Location> {
    let device = |id| concurrent(gpu::at(id)?);
    let place = Location { kind: place.kind, id: place.id }.checked(device, Error::INVALID_VALUE);
    place.map_err(|_| Error::INVALID_DEVICE)
}

fn numbered(device: i32) -> MemLocation {
    let Location { kind, id } = Location::numbered(device);
    MemLocation { kind, id }
}

fn advise(start: u64, bytes: u64, advice: u32, place: MemLocation) -> Result {
    current_core()?;
    let (gpu, range) = holder(start, bytes)?;
    let saying = Saying::of(advice, || checked(place), Error::INVALID_VALUE)?;
    gpu.space.advise(&range, saying)
}

fn prefetch(start: u64, bytes: u64, place: MemLocation, stream: u64, implicit: Implicit) -> Result {
    let target = target(stream, implicit)?;
    GRAPHS.refuse(target.facts())?;
    let (gpu, range) = holder(start, bytes)?;
    let place = checked(place)?;
    concurrent(gpu)?;
    gpu.space.advise(&range, Saying::Prefetched(place))?;
    // Occupies a position in the stream, but does no work.
    scheduler().submit(target.queue, Vec::new(), QueuedWork::Marker);
    Ok(())
}

/// Prefetches or discards the ranges of a batch. The contents of a range that is discarded need not stay, and do.
fn move_batch(ranges: Result<Vec<ManagedRange>>, stream: u64, implicit: Implicit) -> Result {
    let target = target(stream, implicit)?;
    GRAPHS.refuse(target.facts())?;
    // All are checked before the first is moved.
    let moves = ranges?.into_iter().map(|ManagedRange { start, bytes, to }| {
        let place = |to: Location| checked(MemLocation { kind: to.kind, id: to.id });
        Ok((holder(start, bytes)?, to.map(place).transpose()?))
    });
    let moves = moves.collect::<Result<Vec<_>>>()?;
    gpu::all()?.iter().copied().try_for_each(concurrent)?;
    for ((gpu, range), to) in moves {
        if let Some(place) = to {
            gpu.space.advise(&range, Saying::Prefetched(place))?;
        }
    }
    scheduler().submit(target.queue, Vec::new(), QueuedWork::Marker);
    Ok(())
}

fn range_attribute(data: Out<c_void>, size: usize, attribute: u32, start: u64, bytes: u64) -> Result {
    let words = data.cast::<i32>();
    words.required()?;
    let (gpu, range) = holder(start, bytes)?;
    let said = gpu.space.advice(&range)?;
    managed::range_attribute(&said, attribute, size, Error::INVALID_VALUE, |at, word| words.set_at(at, word))
}

calls! {
    // All managed memory is memory of the host. No other memory has a place to tell.
    fn cuMemGetLocationInfo(start: u64, bytes: u64, summary: u64, sampling: u64, places: Out<MemLocation>) {
        const HOST: u32 = 2;
        places.required()?;
        if summary == 0 || summary > bytes || sampling > summary {
            return Err(Error::INVALID_VALUE);
        }
        let (gpu, _) = holder(start, bytes)?;
        concurrent(gpu).map_err(|_| Error::NOT_SUPPORTED)?;
        let count = usize::try_from(bytes.div_ceil(summary)).map_err(|_| Error::INVALID_VALUE)?;
        (0..count).try_for_each(|index| places.set_at(index, MemLocation { kind: HOST, id: 0 }))
    }

    fn cuMemAllocManaged(place: Out<u64>, bytes: u64, flags: u32) {
        place.required()?;
        if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) {
            return Err(Error::INVALID_VALUE);
        }
        GRAPHS.potentially_unsafe()?;
        let core = current_core()?;
        let start = core.gpu.space.allocate_managed(core.maker(), bytes, flags)?;
        core.gpu.share_host(start, bytes, true)?;
        place.set(start)
    }

    fn cuMemAdvise(start: u64, bytes: u64, advice: u32, device: i32) {
        advise(start, bytes, advice, numbered(device))
    }

    fn cuMemAdvise_v2(start: u64, bytes: u64, advice: u32, place: MemLocation) { advise(start, bytes, advice, place) }

    fn cuMemRangeGetAttribute(data: Out<c_void>, size: usize, attribute: u32, start: u64, bytes: u64) {
        range_attribute(data, size, attribute, start, bytes)
    }

    fn cuMemRangeGetAttributes(
        places: In<Out<c_void>>, sizes: In<usize>, attributes: In<u32>, count: usize, start: u64, bytes: u64,
    ) {
        if count == 0 {
            return Err(Error::INVALID_VALUE);
        }
        for index in 0..count {
            let (place, size) = (places.get_at(index)?, sizes.get_at(index)?);
            range_attribute(place, size, attributes.get_at(index)?, start, bytes)?;
        }
        Ok(())
    }
}

twins! {
    fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(implicit; start: u64, bytes: u64, device: i32, stream: u64) {
        prefetch(start, bytes, numbered(device), stream, implicit)
    }

    fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(
        implicit; start: u64, bytes: u64, place: MemLocation, flags: u32, stream: u64,
    ) {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        prefetch(start, bytes, place, stream, implicit)
    }

    fn cuMemPrefetchBatchAsync, cuMemPrefetchBatchAsync_ptsz(
        implicit; starts: In<u64>, sizes: In<u64>, count: usize, values: In<Location>, place_starts: In<u64>, places: usize,
        flags: u64, stream: u64,
    ) {
        let places = Locations { values, starts: place_starts, count: places };
        let ranges = batch::managed(starts, sizes, count, Some(places), flags, Error::INVALID_VALUE);
        move_batch(ranges, stream, implicit)
    }

    fn cuMemDiscardBatchAsync, cuMemDiscardBatchAsync_ptsz(
        implicit; starts: In<u64>, sizes: In<u64>, count: usize, flags: u64, stream: u64,
    ) {
        move_batch(batch::managed(starts, sizes, count, None, flags, Error::INVALID_VALUE), stream, implicit)
    }

    fn cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardAndPrefetchBatchAsync_ptsz(
        implicit; starts: In<u64>, sizes: In<u64>, count: usize, values: In<Location>, place_starts: In<u64>, places: usize,
        flags: u64, stream: u64,
    ) {
        let places = Locations { values, starts: place_starts, count: places };
        let ranges = batch::managed(starts, sizes, count, Some(places), flags, Error::INVALID_VALUE);
        move_batch(ranges, stream, implicit)
    }

    fn cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz(
        implicit; stream: u64, start: u64, bytes: u64, flags: u32,
    ) {
        let target = target(stream, implicit)?;
        GRAPHS.refuse(target.facts())?;
        // The legacy default stream stands for all streams, not for one.
        let legacy = target.queue == target.core.queues.legacy;
        if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST | ATTACH_SINGLE) || (flags == ATTACH_SINGLE && legacy) {
            return Err(Error::INVALID_VALUE);
        }
        // A length of 0 means the whole block; only whole blocks can be attached.
        let (gpu, _) = holder(start, bytes.max(1))?;
        let block = gpu.block_at(start).ok_or(Error::INVALID_VALUE)?;
        if bytes != 0 && (start, bytes) != (block.start, block.bytes) {
            return Err(Error::INVALID_VALUE);
        }
        scheduler().submit(target.queue, Vec::new(), QueuedWork::Marker);
        Ok(())
    }
}
