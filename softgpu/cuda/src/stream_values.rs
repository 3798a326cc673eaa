//! Values in memory for which streams wait, and which they write.
//!
//! A wait looks at its memory from the scheduler's own thread; it holds no executor. The entry points of streams make both; this file
//! knows neither streams nor graphs.
#![expect(unsafe_code, reason = "reads values that other threads and processes write")]

use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use sluice_cuda_graphs::MemoryOperation;
use sluice_cuda_graphs::layout::{WAIT_NOR, checked_value};

use crate::copy::{self, CopyExtent, Pattern, Side, StatedMemory};
use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;
use crate::schedule::{Condition, QueuedWork};

/// Comparisons of `CUstreamWaitValue_flags`; the last is [`WAIT_NOR`].
const GREATER: u32 = 0;
const EQUAL: u32 = 1;
const AND: u32 = 2;

/// Checks an operation of a context of this GPU, and turns it into work.
pub(crate) fn prepare(gpu: &'static VisibleGpu, operation: &MemoryOperation) -> Result<QueuedWork> {
    let (address, bytes) = checked_value(operation, (Error::INVALID_VALUE, Error::NOT_SUPPORTED))?;
    let end = address.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
    let write = operation.is_write();
    let managed = gpu.block_at(address).is_some_and(|block| block.is_managed());
    if managed || !gpu.space.table.spans().covers(&(address..end), write) {
        return Err(Error::INVALID_VALUE);
    }
    match *operation {
        MemoryOperation::Write { to, value, .. } => {
            let extent = CopyExtent { width: 1, height: 1, depth: 1 };
            let side = Side::flat(to, StatedMemory::Device);
            let fill = copy::prepare_fill(gpu, side, Pattern { value, bytes }, extent)?;
            Ok(QueuedWork::Task(Box::new(move || fill.run())))
        }
        MemoryOperation::Wait { at, value, wide, flags } => {
            let condition: Condition =
                Arc::new(move || Ok(compare(read(gpu, at, wide)?, value, wide, flags & WAIT_NOR)));
            Ok(QueuedWork::Until(condition))
        }
    }
}

/// The value at an address, unless its memory is gone.
fn read(gpu: &VisibleGpu, at: u64, wide: bool) -> Result<u64> {
    let _running = gpu.space.running.enter();
    let end = at + if wide { 8 } else { 4 };
    if !gpu.space.table.spans().covers(&(at..end), false) {
        return Err(Error::ILLEGAL_ADDRESS);
    }
    let place = usize::try_from(at).map_err(|_| Error::ILLEGAL_ADDRESS)?;
    Ok(if wide {
        // SAFETY: the table has the range while the ticket is held, and the address was checked to be aligned.
        unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(place)) }.load(Ordering::Acquire)
    } else {
        // SAFETY: the same range.
        unsafe { AtomicU32::from_ptr(with_exposed_provenance_mut(place)) }.load(Ordering::Acquire).into()
    })
}

/// Compares a value in memory with that of a wait.
fn compare(found: u64, value: u64, wide: bool, comparison: u32) -> bool {
    let unused = if wide { 0 } else { u64::MAX << 32 };
    match comparison {
        GREATER => {
            let difference = found.wrapping_sub(value);
            // The sign of a difference of 4 bytes is its bit 31.
            if wide { difference.cast_signed() >= 0 } else { difference & 1 << 31 == 0 }
        }
        EQUAL => found == value,
        AND => found & value != 0,
        _ => !(found | value | unused) != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparison_ignores_wraparound_and_the_upper_half_of_narrow_values() {
        let narrow = |found: u32, value: u32, flags| compare(found.into(), value.into(), false, flags);
        assert!(narrow(5, 5, GREATER) && narrow(6, 5, GREATER) && !narrow(4, 5, GREATER));
        assert!(narrow(2, u32::MAX, GREATER), "the counter has wrapped around");
        assert!(!narrow(u32::MAX, 2, GREATER));
        assert!(compare(0, u64::MAX, true, GREATER) && !compare(u64::MAX, 0, true, GREATER));
        assert!(narrow(5, 5, EQUAL) && !narrow(6, 5, EQUAL));
        assert!(narrow(6, 2, AND) && !narrow(5, 2, AND));
        assert!(narrow(0xf0, 0x0e, WAIT_NOR) && !narrow(0xffff_fff0, 0x0f, WAIT_NOR));
        assert!(compare(0xffff_fff0, 0x0f, true, WAIT_NOR) && !compare(u64::MAX, 0, true, WAIT_NOR));
    }
}
