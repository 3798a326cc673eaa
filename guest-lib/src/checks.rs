//! The checks of the driver that need only the state of the process: of copies, fills and written values.
//!
//! The functions of the C API make them before they post work, and [`crate::graphs`] makes them before work becomes a node.

use crate::{
    error::{Error, Result},
    host_memory::HostCopy,
    images::IMAGES,
    process::ProcessState,
    state::{
        contexts::Context,
        devices::attribute as device_attribute,
        memory::{blocks::READ_WRITE, device_map::RangeOrigin},
    },
};
use sluice_cuda_frontend::given;
use sluice_cuda_graphs::{Copy3D, CopySide, MemoryOperation, layout, memory_type};
use sluice_protocol::{
    field::ElementSize,
    handle::{Array, Id},
};

pub(crate) use crate::host_memory::Strided;

/// The kind of memory that a range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemorySide {
    Device,
    Pinned,
    Pageable,
}

pub(crate) fn side(process: &ProcessState, address: u64, bytes: u64) -> Result<MemorySide> {
    match process.device_map.find(address) {
        Some(_) => process.device_map.check(address, bytes).map(|()| MemorySide::Device),
        None if process.arena.is_pinned(address, bytes) => Ok(MemorySide::Pinned),
        // An address that can never be host memory is refused instead of touched.
        None if address == 0 || process.device_map.reserves(address) => Err(Error::INVALID_VALUE),
        None => Ok(MemorySide::Pageable),
    }
}

/// The side of a range that the call declares as host memory.
pub(crate) fn host_side(process: &ProcessState, address: u64, bytes: u64) -> Result<MemorySide> {
    match side(process, address, bytes)? {
        MemorySide::Device => Err(Error::INVALID_VALUE),
        host => Ok(host),
    }
}

/// Checks a side that states an address of a device: the program's own memory is not taken for that.
pub(crate) fn stated(process: &ProcessState, stated: &CopySide) -> Result {
    if stated.kind == memory_type::DEVICE && side(process, stated.device, 1)? == MemorySide::Pageable {
        return Err(Error::INVALID_VALUE);
    }
    Ok(())
}

/// A box of `depth` layers of `height` rows of `width` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyShape {
    pub(crate) to: Strided,
    pub(crate) from: Strided,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
    /// The greatest pitch that a side states or needs; 0 for a flat copy without one.
    pitch: u64,
}

impl CopyShape {
    /// Reads the description of a copy.
    pub(crate) fn of(copy: &Copy3D) -> Result<CopyShape> {
        let Copy3D { ref to, ref from, width, height, depth } = *copy;
        let stated = to.pitch.max(from.pitch);
        let (from, to) = (strided(from, width, height)?, strided(to, width, height)?);
        let pitch = if height > 1 || depth > 1 { to.pitch.max(from.pitch) } else { stated };
        Ok(CopyShape { to, from, width, height, depth, pitch })
    }

    /// The shape with registered memory by its address on the device.
    pub(crate) fn on_device(self, process: &ProcessState) -> Result<CopyShape> {
        if self.is_empty() {
            return Ok(self);
        }
        let on_device = |side: Strided| -> Result<Strided> {
            Ok(Strided { start: process.arena.on_device(side.start, self.span(side)?), ..side })
        };
        Ok(CopyShape { to: on_device(self.to)?, from: on_device(self.from)?, ..self })
    }

    /// True if there is nothing to copy.
    pub(crate) const fn is_empty(&self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Checks the pitches against the bound of a device.
    pub(crate) fn check_pitch(&self, process: &ProcessState, device: i32) -> Result {
        let most = process.devices.get(device)?.bound(device_attribute::MAX_PITCH);
        if self.pitch > u64::from(most) { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    /// The copy that a thread of this process makes, if both sides are its memory.
    pub(crate) const fn on_host(&self) -> HostCopy {
        let CopyShape { to, from, width, height, depth, .. } = *self;
        HostCopy { to, from, width, height, depth }
    }

    /// Bytes from the first to the last byte of a side.
    pub(crate) fn span(&self, side: Strided) -> Result<u64> {
        let layers = (self.depth - 1).checked_mul(side.layer).ok_or(Error::INVALID_VALUE)?;
        layers.checked_add(span(side, self.width, self.height)?).ok_or(Error::INVALID_VALUE)
    }
}

/// Bytes from the first to the last byte of a rectangle.
pub(crate) fn span(side: Strided, width: u64, height: u64) -> Result<u64> {
    (height - 1).checked_mul(side.pitch).and_then(|rows| rows.checked_add(width)).ok_or(Error::INVALID_VALUE)
}

/// An array at one end of a copy, from a byte of a row, a row and a slice on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArrayPlace {
    pub(crate) array: Id<Array>,
    pub(crate) at: [u32; 3],
}

/// One end of a copy with arrays.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyPlace {
    Array(ArrayPlace),
    Memory(Strided),
}

/// A copy of which at least one end is an array.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrayCopyShape {
    pub(crate) to: CopyPlace,
    pub(crate) from: CopyPlace,
    /// Bytes of a row, rows and slices.
    pub(crate) extent: [u64; 3],
}

impl ArrayCopyShape {
    /// Reads the description of a copy that is not empty; `None` if no end is an array.
    pub(crate) fn of(copy: &Copy3D) -> Result<Option<ArrayCopyShape>> {
        if copy.to.kind != memory_type::ARRAY && copy.from.kind != memory_type::ARRAY {
            return Ok(None);
        }
        let extent = [copy.width, copy.height, copy.depth];
        let place = |side: &CopySide| {
            if side.kind != memory_type::ARRAY {
                return strided(side, copy.width, copy.height).map(CopyPlace::Memory);
            }
            if side.level != 0 {
                return Err(Error::INVALID_VALUE);
            }
            let of = IMAGES.array(given::<Error>(side.array)?)?;
            let region = of.shape.region([side.x, side.y, side.z], extent);
            let region = region.map_err(|refused| Error(refused as u32))?;
            // It lies in the array, whose extents fit 32 bits.
            let [x, y, z] = region.origin.map(|first| u32::try_from(first).map_err(|_| Error::INVALID_VALUE));
            Ok(CopyPlace::Array(ArrayPlace { array: of.array.single()?, at: [x?, y?, z?] }))
        };
        let (from, to) = (place(&copy.from)?, place(&copy.to)?);
        Ok(Some(ArrayCopyShape { to, from, extent }))
    }

    /// Bytes from the first to the last byte of a side in memory.
    pub(crate) fn span(&self, side: Strided) -> Result<u64> {
        let [width, height, depth] = self.extent;
        let layers = (depth - 1).checked_mul(side.layer).ok_or(Error::INVALID_VALUE)?;
        layers.checked_add(span(side, width, height)?).ok_or(Error::INVALID_VALUE)
    }

    /// Checks the pitch of memory against the bound of a device.
    pub(crate) fn check_pitch(&self, process: &ProcessState, device: i32) -> Result {
        let most = u64::from(process.devices.get(device)?.bound(device_attribute::MAX_PITCH));
        let is_flat = self.extent[1..] == [1, 1];
        let fits = |place: &CopyPlace| match place {
            CopyPlace::Array(_) => true,
            CopyPlace::Memory(side) => side.pitch <= most || is_flat && side.pitch == self.extent[0],
        };
        if fits(&self.to) && fits(&self.from) { Ok(()) } else { Err(Error::INVALID_VALUE) }
    }
}

/// Reads a side. A pitch of 0 means rows without gaps.
fn strided(side: &CopySide, width: u64, height: u64) -> Result<Strided> {
    let CopySide { x, y, z, level, kind, host, device, pitch, height: rows, .. } = *side;
    if level != 0 {
        return Err(Error::NOT_SUPPORTED);
    }
    let base = match kind {
        memory_type::HOST => host,
        memory_type::DEVICE | memory_type::UNIFIED => device,
        memory_type::ARRAY => return Err(Error::NOT_SUPPORTED),
        _ => return Err(Error::INVALID_VALUE),
    };
    let end = x.checked_add(width).ok_or(Error::INVALID_VALUE)?;
    let pitch = if pitch == 0 { width } else { pitch };
    let below = rows != 0 && y.checked_add(height).is_none_or(|end| rows < end);
    let rows = if rows == 0 { height } else { rows };
    if below || pitch < width || (pitch < end && height > 1) {
        return Err(Error::INVALID_VALUE);
    }
    let layer = pitch.checked_mul(rows).ok_or(Error::INVALID_VALUE)?;
    let offset =
        y.checked_mul(pitch).and_then(|rows| rows.checked_add(z.checked_mul(layer)?)?.checked_add(x));
    let start = base.checked_add(offset.ok_or(Error::INVALID_VALUE)?).ok_or(Error::INVALID_VALUE)?;
    Ok(Strided { start, pitch, layer })
}

/// A fill of `height` rows of `width` elements, none of them 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FillShape {
    pub(crate) to: u64,
    pub(crate) pitch: u64,
    pub(crate) element: ElementSize,
    pub(crate) width: u64,
    pub(crate) height: u64,
}

impl FillShape {
    /// The rows and the memory that they are in.
    pub(crate) fn side(&self, process: &ProcessState, context: u64) -> Result<(Strided, MemorySide)> {
        let FillShape { to, pitch, element, width, height } = *self;
        let row = width.checked_mul(element.bytes()).ok_or(Error::INVALID_VALUE)?;
        let side = Strided { start: to, pitch: if height == 1 { row } else { pitch }, layer: 0 };
        let aligned = to.is_multiple_of(element.bytes()) && side.pitch.is_multiple_of(element.bytes());
        if !aligned || side.pitch < row {
            return Err(Error::INVALID_VALUE);
        }
        Ok((side, written(process, context, to, span(side, row, height)?)?))
    }
}

/// The memory of a range that the device of a context writes: its own, a peer's, or pinned.
fn written(process: &ProcessState, context: u64, to: u64, bytes: u64) -> Result<MemorySide> {
    if process.arena.is_pinned(to, bytes) {
        return Ok(MemorySide::Pinned);
    }
    process.device_map.check(to, bytes)?;
    // With one device, it is that device's memory.
    if process.devices.count() > 1 && !may_write(process, process.contexts.device(context)?, to)? {
        return Err(Error::INVALID_VALUE);
    }
    Ok(MemorySide::Device)
}

/// True if a device may write the device memory at an address.
fn may_write(process: &ProcessState, device: i32, address: u64) -> Result<bool> {
    let range = process.device_map.find(address).ok_or(Error::INVALID_VALUE)?;
    if process.managed.at(address).is_some() {
        return Ok(true);
    }
    if range.kind == RangeOrigin::Mapped {
        return Ok(process.blocks.access_at(address, device)? == READ_WRITE);
    }
    let owner = process.contexts.device(range.context)?;
    Ok(owner == device
        || match range.kind {
            RangeOrigin::Pool(pool) => process.pools.access(pool, device) == READ_WRITE,
            RangeOrigin::Own | RangeOrigin::Global => process.peers.reaches(device, owner),
            RangeOrigin::Imported(holder) => holder == device,
            RangeOrigin::Internal | RangeOrigin::Mapped => false,
        })
}

/// The memory of a value that a device writes. Only flag 0 exists: functions of version 2 do not support another order than that of
/// the stream (`CUstreamWriteValue_flags` in cuda.h).
pub(crate) fn written_value(
    process: &ProcessState,
    context: u64,
    (to, wide): (u64, bool),
    flags: u32,
) -> Result<MemorySide> {
    let bytes = if wide { 8 } else { 4 };
    if flags != 0 || !to.is_multiple_of(bytes) {
        return Err(Error::INVALID_VALUE);
    }
    written(process, context, to, bytes)
}

/// The memory of a value for which a stream waits, or which it writes. Managed memory is refused, as cuda.h says; and so is a kind of
/// operation that the device does not have.
pub(crate) fn stream_value(
    process: &ProcessState,
    context: Context,
    operation: &MemoryOperation,
) -> Result<MemorySide> {
    let refusals = (Error::INVALID_VALUE, Error::NOT_SUPPORTED);
    let (address, bytes) = layout::checked_value(operation, refusals)?;
    let device = process.devices.get(context.device)?;
    let has = |attribute| device.bound(attribute) != 0;
    let has_order = match *operation {
        MemoryOperation::Wait { flags: layout::WAIT_NOR, .. } => {
            has(device_attribute::CAN_USE_STREAM_WAIT_VALUE_NOR)
        }
        _ => true,
    };
    if !has_order || (bytes == 8 && !has(device_attribute::CAN_USE_64_BIT_STREAM_MEM_OPS)) {
        return Err(Error::NOT_SUPPORTED);
    }
    if process.managed.at(address).is_some() {
        return Err(Error::INVALID_VALUE);
    }
    written(process, context.raw, address, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_of_a_flat_copy_is_not_a_pitch() {
        let pitch = |pitch: u64, width: u64, height: u64, depth: u64| {
            let side = CopySide { pitch, ..CopySide::flat(memory_type::DEVICE, 1 << 40) };
            CopyShape::of(&Copy3D { from: side, to: side, width, height, depth }).map(|shape| shape.pitch)
        };
        assert_eq!(pitch(0, 1 << 32, 1, 1), Ok(0));
        assert_eq!(pitch(1 << 32, 16, 1, 1), Ok(1 << 32), "a stated pitch counts, also without a second row");
        assert_eq!(pitch(0, 1 << 32, 2, 1), Ok(1 << 32));
        assert_eq!(pitch(0, 1 << 32, 1, 2), Ok(1 << 32));
    }
}
