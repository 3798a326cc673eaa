//! Occupancy, the number of blocks that a multiprocessor holds at a time: the arithmetic of compute capability 8.0.

use std::sync::atomic::Ordering::Relaxed;

use crate::capability::{
    BLOCKS_PER_MULTIPROCESSOR, REGISTERS_PER_MULTIPROCESSOR, SHARED_PER_MULTIPROCESSOR, SHARED_RESERVED,
    THREADS_PER_MULTIPROCESSOR, WARP,
};
use crate::module::Callable;

/// Unit in which registers are allocated to warps.
const REGISTER_UNIT: u32 = 256;
/// Unit in which shared memory is allocated to blocks.
const SHARED_UNIT: u32 = 128;
/// Number of register files that warps share.
const PARTITIONS: u32 = 4;

/// Number of blocks that one multiprocessor holds.
pub(crate) fn blocks(callable: &Callable, threads: u32, dynamic_shared: u64) -> u32 {
    let entry = callable.entry();
    let shared = u64::from(entry.static_shared) + dynamic_shared;
    let allowed = u64::from(entry.static_shared + callable.settings().dynamic_shared.load(Relaxed));
    if threads == 0 || threads > entry.max_threads || shared > allowed {
        return 0;
    }
    per_multiprocessor(threads, entry.registers, shared)
}

fn per_multiprocessor(threads: u32, registers: u32, shared: u64) -> u32 {
    let warps = threads.div_ceil(WARP);
    let by_threads = THREADS_PER_MULTIPROCESSOR / WARP / warps;
    let by_registers = match registers.saturating_mul(WARP).checked_next_multiple_of(REGISTER_UNIT) {
        Some(0) => u32::MAX,
        Some(per_warp) => REGISTERS_PER_MULTIPROCESSOR / PARTITIONS / per_warp * PARTITIONS / warps,
        None => 0,
    };
    let shared = (shared + u64::from(SHARED_RESERVED)).next_multiple_of(u64::from(SHARED_UNIT));
    let by_shared = u32::try_from(u64::from(SHARED_PER_MULTIPROCESSOR) / shared).unwrap_or(u32::MAX);
    by_threads.min(by_registers).min(by_shared).min(BLOCKS_PER_MULTIPROCESSOR)
}

/// Dynamic shared memory left for each block if `count` blocks share a multiprocessor.
pub(crate) fn available_shared(callable: &Callable, count: u32, threads: u32) -> Option<u64> {
    if count == 0 || blocks(callable, threads, 0) < count {
        return None;
    }
    let share = SHARED_PER_MULTIPROCESSOR / count / SHARED_UNIT * SHARED_UNIT;
    let left = share.saturating_sub(SHARED_RESERVED + callable.entry().static_shared);
    Some(u64::from(left.min(callable.settings().dynamic_shared.load(Relaxed))))
}

/// The block size with the most resident threads, and the grid that fills the device with it.
pub(crate) fn best_block(
    callable: &Callable,
    multiprocessors: u32,
    limit: u32,
    dynamic_shared: &dyn Fn(u32) -> u64,
) -> (u32, u32) {
    let most = callable.entry().max_threads.min(if limit == 0 { u32::MAX } else { limit });
    let mut best = (0, 0, 0);
    // Descending, so that the largest of equal sizes is kept.
    let mut threads = most;
    while threads > 0 {
        let resident = blocks(callable, threads, dynamic_shared(threads));
        if resident * threads > best.0 {
            best = (resident * threads, threads, resident);
        }
        threads = (threads - 1) / WARP * WARP;
    }
    (best.2 * multiprocessors, best.1)
}

#[cfg(test)]
mod tests {
    use super::per_multiprocessor;

    #[test]
    fn occupancy_matches_published_figures_of_the_capability() {
        // Figures that the vendor's occupancy calculator publishes for 8.0.
        assert_eq!(per_multiprocessor(256, 32, 0), 8);
        assert_eq!(per_multiprocessor(1024, 32, 0), 2);
        assert_eq!(per_multiprocessor(1024, 64, 0), 1);
        assert_eq!(per_multiprocessor(32, 16, 0), 32);
        assert_eq!(per_multiprocessor(128, 128, 0), 4);
        assert_eq!(per_multiprocessor(256, 32, 48 << 10), 3);
        assert_eq!(per_multiprocessor(256, 32, 163 << 10), 1);
        assert_eq!(per_multiprocessor(33, 32, 0), 32);
    }
}
