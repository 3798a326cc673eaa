//! Device attributes: the properties of this device. An attribute never reports an ability that a call refuses,
//! unless `SLUICE_SOFTGPU_HAS` names the ability.

use sluice_cuda_frontend::atomics::{self, Capabilities};
use sluice_cuda_images::Limits;
use softgpu_device::{Has, Lack};

use crate::capability::{MAX_PITCH, SHARED_PER_BLOCK, WARP};
use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;
use crate::launch::{MAX_BLOCK, MAX_GRID, MAX_THREADS};

/// Alignment of the rows of `cuMemAllocPitch`.
pub(crate) const PITCH_ALIGNMENT: u64 = 512;
/// Constant memory of a module.
pub(crate) const CONSTANT_BYTES: u32 = 64 << 10;

/// `cuDeviceGetAttribute`, with the attribute numbers of the header.
pub(crate) fn attribute(gpu: &VisibleGpu, number: i32) -> Result<i32> {
    let model = gpu.identity.model;
    let capability = gpu.capability();
    if let Some(value) = Limits::DATA_CENTRE.attribute(number) {
        return i32::try_from(value).map_err(|_| Error::UNKNOWN);
    }
    let value: u32 = match number {
        1 => MAX_THREADS,
        2..=4 => MAX_BLOCK[index(number - 2)],
        5..=7 => MAX_GRID[index(number - 5)],
        8 => SHARED_PER_BLOCK,
        9 => CONSTANT_BYTES,
        10 => WARP,
        11 => MAX_PITCH,
        12 | 82 => capability.registers_per_multiprocessor,
        13 => model.clock_khz,
        15 => 1, // copies overlap kernels
        16 => gpu.multiprocessors(),
        17 => u32::from(gpu.time_limit.is_some()),
        18 => 0, // not integrated
        19 => 1, // maps host memory
        20 => 0, // compute mode: default
        31 => 1, // concurrent kernels
        32 => u32::from(gpu.ecc),
        33 => gpu.pci_bus(),
        34 | 50 => 0, // PCI device and domain
        35 => 0,      // driver model of another system
        36 => model.memory_clock_khz,
        37 => model.bus_bits,
        38 => model.l2_bytes,
        39 => capability.threads_per_multiprocessor,
        40 => 3, // copy engines
        41 => 1, // unified addresses
        75 => capability.version.0,
        76 => capability.version.1,
        78..=80 => 1, // stream priorities, caches for global and local memory
        81 => capability.shared_per_multiprocessor,
        83 => 1, // managed memory
        // Atomic operations on host memory are the host's own; so host and device may access managed memory at the same time.
        86 | 89 => u32::from(has_host_atomics(gpu)),
        87 => capability.single_to_double,
        90 => 1,        // pre-emption
        91 => 1,        // registered memory has the host's address
        122 | 123 => 1, // streams wait for values in memory and write them, by the functions of version 2
        95 => 1,        // cooperative launches
        97 => capability.shared_per_block_optin,
        88 => u32::from(gpu.has.contains(&Has::PageableMemoryAccess)),
        99 => 1, // registers host memory
        100 => u32::from(gpu.has.contains(&Has::HostPageTables)),
        102 | 103 => 1, // virtual memory, shared by descriptor
        106 => capability.blocks_per_multiprocessor,
        111 => capability.shared_reserved,
        113 => 1,                   // registers read-only host memory
        115 => 1,                   // pools
        119 => 1,                   // shared by descriptor
        125 => 1,                   // events that processes share
        126 => 1,                   // one domain of memory synchronisation
        131 | 134 => return Ok(-1), // no NUMA node
        // All others are unsupported: arrays of sparse memory, peers, graphics and so on. Clusters and tensor maps are, too, at
        // a capability whose hardware has them: the engine executes neither.
        84..=161 => 0,
        _ => return Err(Error::INVALID_VALUE),
    };
    i32::try_from(value).map_err(|_| Error::UNKNOWN)
}

/// True if atomic operations of kernels on host memory are atomic for the host, too.
pub(crate) fn has_host_atomics(gpu: &VisibleGpu) -> bool {
    !gpu.space.lacks(Lack::HostAtomics)
}

/// The capabilities of atomic operations on host memory: those of `atom` and `red`.
pub(crate) fn host_atomics(gpu: &VisibleGpu) -> Capabilities {
    const UNSIGNED: u32 = 2;
    const REDUCTION: u32 = 4;
    const WORD: u32 = 8;
    const LONG: u32 = 16;
    /// Signed and unsigned.
    const BOTH: u32 = 1 | UNSIGNED;
    const INTEGER: u32 = BOTH | REDUCTION | WORD | LONG;
    if !has_host_atomics(gpu) {
        return atomics::NONE;
    }
    let [add, min, max, and, or, xor] = [INTEGER; 6];
    let [increment, decrement] = [UNSIGNED | REDUCTION | WORD; 2];
    let [exchange, swap] = [BOTH | WORD | LONG; 2];
    let [add_float, min_float, max_float] = [REDUCTION | WORD | LONG, 0, 0];
    [add, min, max, increment, decrement, and, or, xor, exchange, swap, add_float, min_float, max_float]
}

fn index(number: i32) -> usize {
    usize::try_from(number).unwrap_or(0)
}
