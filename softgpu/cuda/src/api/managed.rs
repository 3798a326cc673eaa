//! Managed memory. It is memory of the host that devices reach where it is, so nothing ever moves.

use std::ffi::c_void;
use std::ops::Range;

use super::virtual_memory::{ON_DEVICE, Place};
use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::gpu::Gpu;
use crate::memory::{Advice, Location};
use crate::process::{self, driver};
use crate::schedule::Work;
use crate::stream::target;

/// Attach flags: global, host.
const ATTACH_GLOBAL: u32 = 1;
const ATTACH_HOST: u32 = 2;
const ATTACH_SINGLE: u32 = 4;
/// `CU_DEVICE_CPU` and `CU_DEVICE_INVALID`.
const CPU: i32 = -1;
const NOWHERE: i32 = -2;
const HOST: u32 = 2;

/// The GPU in whose book a range is managed memory.
fn holder(start: u64, bytes: u64) -> Result<(&'static Gpu, Range<u64>)> {
    let range = start..start.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
    let mut gpus = driver()?.gpus().iter().copied();
    let gpu = gpus.find(|gpu| gpu.space.is_managed(&range)).ok_or(Error::INVALID_VALUE)?;
    Ok((gpu, range))
}

/// A device number of the older calls.
fn numbered(device: i32) -> Place {
    if device == CPU { Place { kind: HOST, id: 0 } } else { Place { kind: ON_DEVICE, id: device } }
}

/// A place that memory can be wished to.
fn checked(place: Place) -> Result<Location> {
    match place.kind {
        ON_DEVICE => {
            driver()?.gpu(place.id)?;
            Ok(Location { kind: ON_DEVICE, id: place.id })
        }
        // The host, one of its nodes, or the nearest: they are all the same here.
        2..=4 => Ok(Location { kind: HOST, id: 0 }),
        _ => Err(Error::INVALID_VALUE),
    }
}

fn advise(start: u64, bytes: u64, advice: u32, place: Place) -> Result {
    current_core()?;
    let (gpu, range) = holder(start, bytes)?;
    let place = || checked(place).map_err(|_| Error::INVALID_DEVICE);
    match advice {
        1 | 2 => gpu.space.advise(range, |said| said.read_mostly = advice == 1),
        3 => {
            let place = place()?;
            gpu.space.advise(range, |said| said.preferred = Some(place))
        }
        4 => gpu.space.advise(range, |said| said.preferred = None),
        5 => {
            let place = place()?;
            gpu.space.advise(range, |said| {
                said.accessed_by.insert(place);
            })
        }
        6 => {
            let place = place()?;
            gpu.space.advise(range, |said| {
                said.accessed_by.remove(&place);
            })
        }
        _ => Err(Error::INVALID_VALUE),
    }
}

fn prefetch(start: u64, bytes: u64, place: Place, stream: u64, implicit: crate::context::Implicit) -> Result {
    let target = target(stream, implicit)?;
    let (gpu, range) = holder(start, bytes)?;
    let place = checked(place).map_err(|_| Error::INVALID_DEVICE)?;
    gpu.space.advise(range, |said| said.prefetched = Some(place))?;
    // Takes its place in the stream, and has nothing to do.
    process::scheduler().submit(target.queue, Vec::new(), Work::Marker);
    Ok(())
}

/// A place as the older attributes have it.
fn device_number(place: Option<Location>) -> i32 {
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

fn range_attribute(data: Out<c_void>, size: usize, attribute: i32, start: u64, bytes: u64) -> Result {
    data.cast::<u8>().required()?;
    let (gpu, range) = holder(start, bytes)?;
    let said = gpu.space.advice(&range)?;
    let preferred = common(&said, |advice| advice.preferred);
    let prefetched = common(&said, |advice| advice.prefetched);
    let word = |value: i32| if size == 4 { data.cast().set(value) } else { Err(Error::INVALID_VALUE) };
    let kind = |place: Option<Location>| place.map_or(0, |place| i32::try_from(place.kind).unwrap_or(0));
    match attribute {
        1 => word(i32::from(said.iter().all(|advice| advice.read_mostly))),
        2 => word(device_number(preferred)),
        3 => {
            if size == 0 || !size.is_multiple_of(4) {
                return Err(Error::INVALID_VALUE);
            }
            let everywhere = said.first().into_iter().flat_map(|first| first.accessed_by.iter());
            let everywhere =
                everywhere.filter(|place| said.iter().all(|one| one.accessed_by.contains(place)));
            let mut devices: Vec<i32> = everywhere.map(|place| device_number(Some(*place))).collect();
            devices.resize(size / 4, NOWHERE);
            for (index, device) in devices.into_iter().enumerate() {
                data.cast().set_at(index, device)?;
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

calls! {
    fn cuMemAllocManaged(place: Out<u64>, bytes: u64, flags: u32) {
        place.required()?;
        if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) {
            return Err(Error::INVALID_VALUE);
        }
        let core = current_core()?;
        let start = core.gpu.space.allocate_managed(&core, bytes, flags)?;
        core.gpu.share_host(start, bytes, true)?;
        place.set(start)
    }

    fn cuMemAdvise(start: u64, bytes: u64, advice: u32, device: i32) {
        advise(start, bytes, advice, numbered(device))
    }

    fn cuMemAdvise_v2(start: u64, bytes: u64, advice: u32, place: Place) { advise(start, bytes, advice, place) }

    fn cuMemRangeGetAttribute(data: Out<c_void>, size: usize, attribute: i32, start: u64, bytes: u64) {
        range_attribute(data, size, attribute, start, bytes)
    }

    fn cuMemRangeGetAttributes(
        places: In<u64>, sizes: In<usize>, attributes: In<i32>, count: usize, start: u64, bytes: u64,
    ) {
        if count == 0 {
            return Err(Error::INVALID_VALUE);
        }
        for index in 0..count {
            let place = Out::from_address(places.at(index)?);
            range_attribute(place, sizes.at(index)?, attributes.at(index)?, start, bytes)?;
        }
        Ok(())
    }
}

twins! {
    fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(implicit; start: u64, bytes: u64, device: i32, stream: u64) {
        prefetch(start, bytes, numbered(device), stream, implicit)
    }

    fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(
        implicit; start: u64, bytes: u64, place: Place, flags: u32, stream: u64,
    ) {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        prefetch(start, bytes, place, stream, implicit)
    }

    fn cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz(
        implicit; stream: u64, start: u64, bytes: u64, flags: u32,
    ) {
        let target = target(stream, implicit)?;
        if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST | ATTACH_SINGLE) {
            return Err(Error::INVALID_VALUE);
        }
        // A length of 0 means the whole block, which is all that can be attached.
        holder(start, bytes.max(1))?;
        process::scheduler().submit(target.queue, Vec::new(), Work::Marker);
        Ok(())
    }
}
