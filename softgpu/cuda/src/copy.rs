//! Copies and fills.
//!
//! A copy is checked twice. At submission it must keep to one allocation: a bad range is an error of the call (1). At execution the
//! mapping may be gone: that is an error of the device (700).
//!
//! Host memory that the device does not know is pageable: the call gathers a pageable source, and a copy to a pageable
//! destination is complete when the call returns.
#![expect(unsafe_code, reason = "copies between addresses that the table lists or the caller guarantees")]

use std::ops::Range;
use std::sync::Arc;

use sluice_cuda_frontend::environment::Environment;
use sluice_cuda_graphs::{CopySide, memory_type};

use crate::arrays::ArrayStorage;
use crate::capability::MAX_PITCH;
use crate::error::{Error, Result};
use crate::gpu::{self, VisibleGpu};
use crate::schedule::{QueuedWork, scheduler};
use crate::stream::StreamTarget;

/// One side of a copy: rows in slices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    pub(crate) start: u64,
    /// Bytes from row to row, and from slice to slice.
    pub(crate) pitch: u64,
    pub(crate) slice: u64,
    pub(crate) place: StatedMemory,
}

/// One side of a copy, and the array in which it lies, if it does.
#[derive(Clone)]
pub(crate) struct CopyEnd {
    pub(crate) side: Side,
    pub(crate) array: Option<Arc<ArrayStorage>>,
}

impl From<Side> for CopyEnd {
    fn from(side: Side) -> CopyEnd {
        CopyEnd { side, array: None }
    }
}

/// The kind of memory that the caller states for an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StatedMemory {
    /// Device memory, or host memory that the device knows.
    Device,
    /// Host memory; the device may know it.
    Host,
    /// Unknown: derived from the address.
    Either,
}

/// The size of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyExtent {
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
}

/// The time at which a copy must be complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// At the return of the call, also between device memory.
    Completed,
    /// At the return of the call.
    Returned,
    /// In stream order, although the call is one of the synchronous ones.
    Started,
    /// In stream order.
    Queued,
}

impl CopyExtent {
    /// True for a copy that has nothing to do.
    pub(crate) fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }
}

impl Side {
    /// Creates a side without rows.
    pub(crate) fn flat(start: u64, place: StatedMemory) -> Side {
        Side { start, pitch: 0, slice: 0, place }
    }

    /// The range from the first to the last byte.
    fn bounds(&self, extent: CopyExtent) -> Result<Range<u64>> {
        let last = extent.depth.saturating_sub(1).checked_mul(self.slice).and_then(|slices| {
            slices
                .checked_add(extent.height.saturating_sub(1).checked_mul(self.pitch)?)?
                .checked_add(extent.width)
        });
        let end = last.and_then(|length| self.start.checked_add(length)).ok_or(Error::INVALID_VALUE)?;
        Ok(self.start..end)
    }

    /// Returns the GPU that knows the range, preferring `gpu`; none for pageable host memory, and an error if the range is
    /// invalid.
    fn holder(
        &self,
        gpu: &'static VisibleGpu,
        extent: CopyExtent,
        write: bool,
    ) -> Result<Option<&'static VisibleGpu>> {
        let bounds = self.bounds(extent)?;
        let gpus = gpu::all()?;
        for candidate in std::iter::once(gpu).chain(gpus.iter().copied()) {
            if candidate.permits(&bounds, write)? {
                return Ok(Some(candidate));
            }
        }
        // An unmapped or partly mapped device address must never be accessed as host memory.
        let device = || gpus.iter().any(|gpu| gpu.space.is_device_range(&bounds));
        if self.place == StatedMemory::Device || bounds.start == 0 || device() {
            return Err(Error::INVALID_VALUE);
        }
        Ok(None)
    }
}

/// A side in linear memory, as the interface describes it.
pub(crate) fn side(side: &CopySide, extent: CopyExtent) -> Result<Side> {
    let (base, place) = match side.kind {
        memory_type::HOST => (side.host, StatedMemory::Host),
        memory_type::DEVICE => (side.device, StatedMemory::Device),
        memory_type::UNIFIED => (side.device, StatedMemory::Either),
        _ => return Err(Error::INVALID_VALUE),
    };
    let row_end = side.x.checked_add(extent.width).ok_or(Error::INVALID_VALUE)?;
    let pitch = if side.pitch == 0 { row_end } else { side.pitch };
    // A flat copy may be longer than the greatest pitch.
    let is_flat = side.pitch == 0 && extent.height == 1 && extent.depth == 1;
    if side.level != 0 || pitch < row_end || !is_flat && pitch > u64::from(MAX_PITCH) {
        return Err(Error::INVALID_VALUE);
    }
    let rows = if side.height == 0 { extent.height } else { side.height };
    if side.height != 0 && side.y.checked_add(extent.height).is_none_or(|end| end > rows) {
        return Err(Error::INVALID_VALUE);
    }
    let slice = pitch.checked_mul(rows).ok_or(Error::INVALID_VALUE)?;
    let start = side.y.checked_mul(pitch).and_then(|rows| base.checked_add(rows)?.checked_add(side.x));
    let start = start.and_then(|start| start.checked_add(side.z.checked_mul(slice)?));
    Ok(Side { start: start.ok_or(Error::INVALID_VALUE)?, pitch, slice, place })
}

/// A copy that passed its checks. It may run more than once.
#[derive(Clone)]
pub(crate) struct PreparedCopy {
    sides: Sides,
    extent: CopyExtent,
    /// The arrays that it needs.
    arrays: [Option<Arc<ArrayStorage>>; 2],
}

/// Checks a copy made by a context of this GPU.
pub(crate) fn prepare(
    gpu: &'static VisibleGpu,
    to: CopyEnd,
    from: CopyEnd,
    extent: CopyExtent,
) -> Result<PreparedCopy> {
    let arrays = [to.array, from.array];
    let (to, from) = (to.side, from.side);
    let to_holder = to.holder(gpu, extent, true)?;
    let from_holder = from.holder(gpu, extent, false)?;
    Ok(PreparedCopy { sides: Sides { to, to_holder, from, from_holder }, extent, arrays })
}

impl PreparedCopy {
    /// True if both ends are linear memory that the device reaches.
    pub(crate) fn is_of_device(&self) -> bool {
        let Sides { to_holder, from_holder, .. } = &self.sides;
        to_holder.is_some() && from_holder.is_some() && self.arrays.iter().all(Option::is_none)
    }

    /// Executes the copy.
    pub(crate) fn run(&self) -> Result {
        run(self.sides, self.extent, &self.arrays)
    }
}

/// Copies in stream order.
pub(crate) fn copy(
    target: &StreamTarget,
    to: CopyEnd,
    from: CopyEnd,
    extent: CopyExtent,
    when: When,
) -> Result {
    if extent.is_empty() {
        return Ok(());
    }
    let prepared = prepare(target.core.gpu, to, from, extent)?;
    let Sides { to, to_holder, from, from_holder } = prepared.sides;
    // The call does not wait for copies between device memory.
    let on_device = |side: &Side, holder: Option<&VisibleGpu>| {
        holder.is_some_and(|gpu| !gpu.block_at(side.start).is_some_and(|block| block.is_host()))
    };
    let between = on_device(&to, to_holder) && on_device(&from, from_holder);
    let scheduler = scheduler();
    let when = if Environment::get().launches_block { When::Completed } else { when };
    if when == When::Completed || when == When::Returned && !between || to_holder.is_none() {
        scheduler.submit_and_wait(target.queue, QueuedWork::Task(Box::new(move || prepared.run())));
        return target.core.health.check();
    }
    if from_holder.is_some() {
        scheduler.submit(target.queue, Vec::new(), QueuedWork::Task(Box::new(move || prepared.run())));
        return Ok(());
    }
    // The program may change its memory after the call, so the source is copied now.
    let total = extent.width.checked_mul(extent.height).and_then(|plane| plane.checked_mul(extent.depth));
    let total = total.and_then(|total| usize::try_from(total).ok()).ok_or(Error::INVALID_VALUE)?;
    let mut staged: Vec<u8> = Vec::new();
    staged.try_reserve_exact(total).map_err(|_| Error::OUT_OF_MEMORY)?;
    let packed = move |start: u64| {
        let slice = extent.width * extent.height;
        Side { start, pitch: extent.width, slice, place: StatedMemory::Host }
    };
    move_rows(packed(staged.as_mut_ptr().expose_provenance() as u64), from, extent);
    // SAFETY: exactly the reserved bytes were written.
    unsafe { staged.set_len(total) };
    let task = Box::new(move || {
        let from = packed(staged.as_ptr().expose_provenance() as u64);
        run(Sides { to, to_holder, from, from_holder: None }, extent, &prepared.arrays)
    });
    scheduler.submit(target.queue, Vec::new(), QueuedWork::Task(task));
    Ok(())
}

#[derive(Clone, Copy)]
struct Sides {
    to: Side,
    to_holder: Option<&'static VisibleGpu>,
    from: Side,
    from_holder: Option<&'static VisibleGpu>,
}

/// Executes a copy, unless one of its arrays has ended.
fn run(sides: Sides, extent: CopyExtent, arrays: &[Option<Arc<ArrayStorage>>]) -> Result {
    let (to, from) = (sides.to, sides.from);
    let _to_running = sides.to_holder.map(|gpu| gpu.space.running.enter());
    let _from_running = sides.from_holder.map(|gpu| gpu.space.running.enter());
    let reachable = |side: &Side, holder: Option<&VisibleGpu>, write: bool| -> Result<bool> {
        let bounds = side.bounds(extent)?;
        Ok(holder.is_none_or(|gpu| gpu.space.table.spans().covers(&bounds, write)))
    };
    if !arrays.iter().flatten().all(|array| array.exists()) {
        return Err(Error::ILLEGAL_ADDRESS);
    }
    if !reachable(&to, sides.to_holder, true)? || !reachable(&from, sides.from_holder, false)? {
        return Err(Error::ILLEGAL_ADDRESS);
    }
    move_rows(to, from, extent);
    Ok(())
}

/// Moves bytes. Both sides are in the table while a ticket is held, or the caller guarantees that they are valid.
fn move_rows(to: Side, from: Side, extent: CopyExtent) {
    let contiguous = (extent.height == 1 || to.pitch == extent.width && from.pitch == extent.width)
        && (extent.depth == 1 || to.slice == from.slice && to.slice == extent.width * extent.height);
    if contiguous {
        return move_bytes(to.start, from.start, extent.width * extent.height * extent.depth);
    }
    for slice in 0..extent.depth {
        for row in 0..extent.height {
            let offset = |side: &Side| side.start + slice * side.slice + row * side.pitch;
            move_bytes(offset(&to), offset(&from), extent.width);
        }
    }
}

fn move_bytes(to: u64, from: u64, bytes: u64) {
    let (Ok(to), Ok(from), Ok(bytes)) = (usize::try_from(to), usize::try_from(from), usize::try_from(bytes))
    else {
        return;
    };
    let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
    // SAFETY: see `move_rows`; `copy` allows overlap.
    unsafe { std::ptr::copy(std::ptr::with_exposed_provenance::<u8>(from), to, bytes) };
}

/// A pattern of 1, 2, 4 or 8 bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pattern {
    pub(crate) value: u64,
    pub(crate) bytes: u64,
}

/// A fill that passed its checks. It may run more than once.
#[derive(Clone, Copy)]
pub(crate) struct PreparedFill {
    gpu: &'static VisibleGpu,
    to: Side,
    pattern: Pattern,
    /// Elements of a row, and rows.
    extent: CopyExtent,
    /// The extent in bytes.
    rows: CopyExtent,
}

/// Checks a fill made by a context of this GPU.
pub(crate) fn prepare_fill(
    gpu: &'static VisibleGpu,
    to: Side,
    pattern: Pattern,
    extent: CopyExtent,
) -> Result<PreparedFill> {
    let width = extent.width.checked_mul(pattern.bytes).ok_or(Error::INVALID_VALUE)?;
    let rows = CopyExtent { width, ..extent };
    let misaligned = !to.start.is_multiple_of(pattern.bytes)
        || extent.height > 1 && (!to.pitch.is_multiple_of(pattern.bytes) || to.pitch < width);
    if misaligned || !gpu.permits(&to.bounds(rows)?, true)? {
        return Err(Error::INVALID_VALUE);
    }
    Ok(PreparedFill { gpu, to, pattern, extent, rows })
}

impl PreparedFill {
    /// Executes the fill.
    pub(crate) fn run(self) -> Result {
        let PreparedFill { gpu, to, pattern, extent, rows } = self;
        let _running = gpu.space.running.enter();
        if !gpu.space.table.spans().covers(&to.bounds(rows)?, true) {
            return Err(Error::ILLEGAL_ADDRESS);
        }
        for row in 0..rows.height {
            fill_row(to.start + row * to.pitch, pattern, extent.width);
        }
        Ok(())
    }
}

/// Fills rows with a pattern, in stream order.
pub(crate) fn fill(
    target: &StreamTarget,
    to: Side,
    pattern: Pattern,
    extent: CopyExtent,
    when: When,
) -> Result {
    if extent.width == 0 || extent.height == 0 {
        return Ok(());
    }
    let gpu = target.core.gpu;
    let prepared = prepare_fill(gpu, to, pattern, extent)?;
    // A fill of host memory is complete when the call returns; a fill of device memory is not.
    let on_host = gpu.block_at(to.start).is_some_and(|block| block.is_host());
    let task = Box::new(move || prepared.run());
    if on_host && when == When::Returned || Environment::get().launches_block {
        scheduler().submit_and_wait(target.queue, QueuedWork::Task(task));
        return target.core.health.check();
    }
    scheduler().submit(target.queue, Vec::new(), QueuedWork::Task(task));
    Ok(())
}

/// Bytes of a file that the kernel maps around a page that is read, if they are in memory: its default.
const MAPPED_AROUND: usize = 64 << 10;

fn fill_row(start: u64, pattern: Pattern, count: u64) {
    let (Ok(start), Ok(count), Ok(element)) =
        (usize::try_from(start), usize::try_from(count), usize::try_from(pattern.bytes))
    else {
        return;
    };
    let start = std::ptr::with_exposed_provenance_mut::<u8>(start);
    let bytes = pattern.value.to_le_bytes();
    // The first write to a page maps this page alone, which takes ten times as long as to fill it.
    for at in (0..count.saturating_mul(element)).step_by(MAPPED_AROUND) {
        // SAFETY: the caller found the row in the table and holds a ticket.
        let _ = unsafe { start.wrapping_add(at).read_volatile() };
    }
    match pattern.bytes {
        // SAFETY: the caller found the row in the table and holds a ticket; the call checked the alignment.
        1 => unsafe { std::ptr::write_bytes(start, bytes[0], count) },
        2 => {
            // SAFETY: the same row and ticket.
            let row = unsafe { std::slice::from_raw_parts_mut(start.cast::<[u8; 2]>(), count) };
            row.fill([bytes[0], bytes[1]]);
        }
        4 => {
            // SAFETY: the same row and ticket.
            let row = unsafe { std::slice::from_raw_parts_mut(start.cast::<[u8; 4]>(), count) };
            row.fill([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        _ => {
            // SAFETY: the same row and ticket.
            let row = unsafe { std::slice::from_raw_parts_mut(start.cast::<[u8; 8]>(), count) };
            row.fill(bytes);
        }
    }
}

/// Writes bytes to device memory at once: initial values of variables.
pub(crate) fn write_bytes(gpu: &'static VisibleGpu, to: u64, bytes: &[u8]) -> Result {
    let extent = CopyExtent { width: bytes.len() as u64, height: 1, depth: 1 };
    let from = Side::flat(bytes.as_ptr().expose_provenance() as u64, StatedMemory::Host);
    let to = Side::flat(to, StatedMemory::Device);
    run(Sides { to, to_holder: Some(gpu), from, from_holder: None }, extent, &[])
}

/// Clears device memory at once: variables without an initial value, and the driver's own workspaces.
pub(crate) fn clear(gpu: &VisibleGpu, to: u64, bytes: u64) -> Result {
    let _running = gpu.space.running.enter();
    let end = to.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
    if !gpu.space.table.spans().covers(&(to..end), true) {
        return Err(Error::ILLEGAL_ADDRESS);
    }
    fill_row(to, Pattern { value: 0, bytes: 1 }, bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_of_a_flat_copy_is_not_a_pitch() {
        let pitch = |pitch: u64, width: u64, height: u64, depth: u64| {
            let stated =
                CopySide { pitch, kind: memory_type::DEVICE, device: 1 << 40, ..CopySide::default() };
            side(&stated, CopyExtent { width, height, depth }).map(|side| side.pitch)
        };
        assert_eq!(pitch(0, 1 << 32, 1, 1), Ok(1 << 32));
        for (stated, width, height, depth) in [(1 << 32, 16, 1, 1), (0, 1 << 32, 2, 1), (0, 1 << 32, 1, 2)] {
            assert_eq!(pitch(stated, width, height, depth), Err(Error::INVALID_VALUE));
        }
    }
}
