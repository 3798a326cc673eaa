//! Device memory that a context takes for itself: a part at its creation, and more when its limits grow.
//!
//! The real driver takes hundreds of MiB in the same way; this models the loss, and not the purpose of most of it. Shared and
//! local memory of running blocks lies in the part taken at creation. Nothing is cleared: kernels find there the content that any
//! earlier owner left, and the next owner of the pages finds the content that kernels left.

use std::sync::{Arc, Mutex};

use softgpu_device::{Allocation, Owner, PAGE_BYTES, Use};

use super::arena::FirstFit;
use super::{ALIGNMENT, BlockKind, Maker, Space};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log;

/// Bytes that a context takes at its creation on a device of full size.
const CONTEXT_BYTES: u64 = 256 << 20;

/// The memory that a device's contexts take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    /// Exact bytes taken at creation.
    context: u64,
    /// Divisor of sizes on this device.
    scale: u64,
    /// Maximum number of resident threads of the device.
    threads: u64,
}

impl Rates {
    /// Creates the rates of a device with room for so many threads; `configured` overrides the bytes that a context takes.
    pub(crate) fn new(configured: Option<u64>, scale: u64, threads: u64) -> Rates {
        let scale = scale.max(1);
        Rates { context: configured.unwrap_or((CONTEXT_BYTES / scale).max(1)), scale, threads }
    }

    /// Memory that the growth of a stack limit takes.
    pub(crate) fn stacks(&self, before: u64, after: u64) -> u64 {
        after.saturating_sub(before).saturating_mul(self.threads) / self.scale
    }

    /// Memory that the growth of a buffer takes.
    pub(crate) fn buffer(&self, before: u64, after: u64) -> u64 {
        after.saturating_sub(before) / self.scale
    }
}

/// The memory of one context.
#[derive(Default)]
pub(crate) struct Overhead {
    /// The memory taken at creation: its address, and its division among running blocks.
    scratch: Mutex<Option<(u64, FirstFit)>>,
    /// The memory taken later.
    pieces: Mutex<Vec<Arc<Allocation>>>,
}

impl Overhead {
    /// Takes the memory of a new context.
    pub(crate) fn begin(&self, space: &Space, rates: &Rates, maker: Maker) -> Result {
        let bytes = rates.context;
        if bytes == 0 {
            return Ok(());
        }
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(Error::OUT_OF_MEMORY)?;
        let base = space.allocate(maker, bytes, BlockKind::Internal)?;
        *lock(&self.scratch) = Some((base, FirstFit::new(bytes)));
        Ok(())
    }

    /// Takes memory for a running block. Returns 0 if there is none.
    pub(crate) fn take_scratch(&self, bytes: u64) -> u64 {
        let mut scratch = lock(&self.scratch);
        let Some((base, arena)) = scratch.as_mut() else { return 0 };
        arena.take(bytes.next_multiple_of(ALIGNMENT)).map_or(0, |offset| *base + offset)
    }

    /// Gives back memory of `take_scratch`.
    pub(crate) fn give_scratch(&self, address: u64, bytes: u64) {
        if let Some((base, arena)) = lock(&self.scratch).as_mut() {
            arena.give(address - *base, bytes.next_multiple_of(ALIGNMENT));
        }
    }

    /// Takes more memory, until the context ends.
    pub(crate) fn take(&self, owner: &Arc<Owner>, bytes: u64) -> Result {
        if bytes == 0 {
            return Ok(());
        }
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(Error::OUT_OF_MEMORY)?;
        let piece = owner.allocate(bytes, Use::Driver).map_err(|error| {
            log!("no device memory for the driver itself: {error}");
            Error::OUT_OF_MEMORY
        })?;
        lock(&self.pieces).push(piece);
        Ok(())
    }

    /// Gives everything back. The memory taken at creation is a block of the context, and is freed with its other blocks.
    pub(crate) fn give_back(&self) {
        *lock(&self.scratch) = None;
        lock(&self.pieces).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stack_limit_takes_memory_for_all_resident_threads() {
        // An H200: 132 multiprocessors of 2048 threads, 1 KiB more each.
        let threads = 132 * 2048;
        let rates = Rates::new(None, 1, threads);
        assert_eq!(rates.stacks(1024, 2048), 264 << 20);
        assert_eq!(rates.stacks(1024, 512 << 10), 511 * (264 << 20));
        assert_eq!(rates.stacks(2048, 1024), 0);
        assert_eq!(Rates::new(None, 64, threads).stacks(1024, 2048), (264 << 20) / 64);
        assert_eq!(Rates::new(None, 64, threads).context, 4 << 20);
        assert_eq!(Rates::new(Some(0), 64, threads).context, 0);
        assert_eq!(rates.stacks(0, u64::MAX), u64::MAX);
    }
}
