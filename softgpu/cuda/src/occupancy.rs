//! Occupancy, the number of blocks that a multiprocessor holds at a time: the arithmetic of the vendor, with the limits of the capability.

use std::sync::atomic::Ordering::Relaxed;

use sluice_cuda_abi::occupancy::resident_threads;
use softgpu_device::Capability;

use crate::capability::WARP;
use crate::module::Callable;

/// Number of blocks that one multiprocessor holds.
pub(crate) fn blocks(callable: &Callable, threads: u32, dynamic_shared: u64) -> u32 {
    let entry = callable.entry();
    let shared = u64::from(entry.static_shared) + dynamic_shared;
    let allowed = u64::from(entry.static_shared + callable.settings().dynamic_shared.load(Relaxed));
    if threads == 0 || threads > entry.max_threads || shared > allowed {
        return 0;
    }
    per_multiprocessor(callable.capability(), threads, entry.registers, shared)
}

fn per_multiprocessor(of: &Capability, threads: u32, registers: u32, shared: u64) -> u32 {
    let warps = threads.div_ceil(WARP);
    let by_threads = of.threads_per_multiprocessor / WARP / warps;
    let by_registers = resident_threads(of.registers_per_multiprocessor, registers) / WARP / warps;
    let shared = (shared + u64::from(of.shared_reserved)).next_multiple_of(u64::from(of.shared_unit));
    let by_shared = u64::from(of.shared_per_multiprocessor).checked_div(shared).unwrap_or(u64::MAX);
    let by_shared = u32::try_from(by_shared).unwrap_or(u32::MAX);
    by_threads.min(by_registers).min(by_shared).min(of.blocks_per_multiprocessor)
}

/// Dynamic shared memory left for each block if `count` blocks share a multiprocessor.
pub(crate) fn available_shared(callable: &Callable, count: u32, threads: u32) -> Option<u64> {
    if count == 0 || blocks(callable, threads, 0) < count {
        return None;
    }
    let of = callable.capability();
    let share = of.shared_per_multiprocessor / count / of.shared_unit * of.shared_unit;
    let left = share.saturating_sub(of.shared_reserved + callable.entry().static_shared);
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
    use super::{Capability, per_multiprocessor};

    // Promise: S62
    #[test]
    fn occupancy_matches_published_figures_of_each_capability() {
        // Figures that the vendor's occupancy calculator publishes.
        type Figure = (u32, u32, u64, u32);
        let cases: [(&Capability, &[Figure]); 5] = [
            (
                &Capability::V7_5,
                &[(256, 32, 0, 4), (1024, 64, 0, 1), (32, 16, 0, 16), (128, 32, 32 << 10, 2)],
            ),
            (
                &Capability::V8_0,
                &[
                    (256, 32, 0, 8),
                    (1024, 32, 0, 2),
                    (1024, 64, 0, 1),
                    (32, 16, 0, 32),
                    (128, 128, 0, 4),
                    (256, 32, 48 << 10, 3),
                    (256, 32, 163 << 10, 1),
                    (33, 32, 0, 32),
                ],
            ),
            (
                &Capability::V8_6,
                &[(256, 32, 0, 6), (1024, 32, 0, 1), (32, 16, 0, 16), (256, 32, 48 << 10, 2)],
            ),
            (&Capability::V8_9, &[(32, 16, 0, 24), (256, 32, 99 << 10, 1)]),
            (&Capability::V9_0, &[(256, 32, 0, 8), (256, 32, 48 << 10, 4), (256, 32, 227 << 10, 1)]),
        ];
        for (of, figures) in cases {
            for (threads, registers, shared, blocks) in figures {
                assert_eq!(
                    per_multiprocessor(of, *threads, *registers, *shared),
                    *blocks,
                    "{:?}",
                    of.version
                );
            }
        }
    }
}
