//! Device memory that a context takes for itself: a part at its birth, and more when its limits grow.
//!
//! The real driver does so too, by hundreds of MiB; the purpose of most of it is not modelled, only the loss. Shared and local
//! memory of running blocks lies in the part taken at birth. Nothing is cleared: kernels find there the content that any
//! earlier owner left, and the next owner of the pages finds the content that kernels left.

use std::sync::{Arc, Mutex};

use softgpu_device::{Allocation, Owner, PAGE_BYTES, Use};

use super::arena::Arena;
use super::{ALIGNMENT, BlockKind};
use crate::context::{Core, lock};
use crate::error::{Error, Result};
use crate::gpu::THREADS_PER_MULTIPROCESSOR;
use crate::log::log;

/// What a context takes at its birth on a device of full size.
const CONTEXT_BYTES: u64 = 256 << 20;

/// How much a device's contexts take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    /// At birth, exactly.
    context: u64,
    /// What sizes were divided by on this device.
    scale: u64,
    /// Threads that the device can have resident at a time.
    threads: u64,
}

impl Rates {
    /// The rates of a device; `configured` is what a context takes, if somebody chose it.
    pub(crate) fn new(configured: Option<u64>, scale: u64, multiprocessors: u32) -> Rates {
        let scale = scale.max(1);
        let threads = u64::from(multiprocessors) * u64::from(THREADS_PER_MULTIPROCESSOR);
        Rates { context: configured.unwrap_or((CONTEXT_BYTES / scale).max(1)), scale, threads }
    }

    /// What a stack limit takes beyond another.
    pub(crate) fn stacks(&self, before: u64, after: u64) -> u64 {
        after.saturating_sub(before).saturating_mul(self.threads) / self.scale
    }

    /// What a buffer takes beyond another.
    pub(crate) fn buffer(&self, before: u64, after: u64) -> u64 {
        after.saturating_sub(before) / self.scale
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Overhead {
    /// What was taken at birth: its address, and how running blocks have divided it.
    scratch: Mutex<Option<(u64, Arena)>>,
    /// What was taken since.
    pieces: Mutex<Vec<Arc<Allocation>>>,
}

impl Overhead {
    /// Takes what a new context takes.
    pub(crate) fn begin(&self, core: &Core) -> Result {
        let bytes = core.gpu.rates.context;
        if bytes == 0 {
            return Ok(());
        }
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(Error::OUT_OF_MEMORY)?;
        let base = core.gpu.space.allocate(core, bytes, BlockKind::Internal)?;
        *lock(&self.scratch) = Some((base, Arena::new(bytes)));
        Ok(())
    }

    /// Memory for a running block; 0 when there is none.
    pub(crate) fn take_scratch(&self, bytes: u64) -> u64 {
        let mut scratch = lock(&self.scratch);
        let Some((base, arena)) = scratch.as_mut() else { return 0 };
        arena.take(bytes.next_multiple_of(ALIGNMENT)).map_or(0, |offset| *base + offset)
    }

    /// Gives such memory back.
    pub(crate) fn give_scratch(&self, address: u64, bytes: u64) {
        if let Some((base, arena)) = lock(&self.scratch).as_mut() {
            arena.give(address - *base, bytes.next_multiple_of(ALIGNMENT));
        }
    }

    /// Takes more; it goes back only with the context.
    pub(crate) fn take(&self, owner: &Arc<Owner>, bytes: u64) -> Result {
        if bytes == 0 {
            return Ok(());
        }
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(Error::OUT_OF_MEMORY)?;
        let piece = owner.allocate(bytes, Use::Driver).map_err(|error| {
            log!("no memory for the driver itself: {error}");
            Error::OUT_OF_MEMORY
        })?;
        lock(&self.pieces).push(piece);
        Ok(())
    }

    /// Gives everything back. What was taken at birth is a block of the context, and ends with those.
    pub(crate) fn give_back(&self) {
        *lock(&self.scratch) = None;
        lock(&self.pieces).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_take_what_the_resident_threads_need() {
        // An H200: 132 multiprocessors of 2048 threads, 1 KiB more each.
        let rates = Rates::new(None, 1, 132);
        assert_eq!(rates.stacks(1024, 2048), 264 << 20);
        assert_eq!(rates.stacks(1024, 512 << 10), 511 * (264 << 20));
        assert_eq!(rates.stacks(2048, 1024), 0);
        assert_eq!(Rates::new(None, 64, 132).stacks(1024, 2048), (264 << 20) / 64);
        assert_eq!(Rates::new(None, 64, 132).context, 4 << 20);
        assert_eq!(Rates::new(Some(0), 64, 132).context, 0);
        assert_eq!(rates.stacks(0, u64::MAX), u64::MAX);
    }
}
