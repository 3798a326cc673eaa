//! Functions: their attributes and their occupancy of a multiprocessor.

use std::ffi::c_char;
use std::sync::atomic::Ordering::Relaxed;

use sluice_cuda_frontend::given;
use softgpu_device::Capability;
use softgpu_engine::{Kernel, Module};

use super::launches::Config;
use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::module::{self, FunctionSettings};
use crate::occupancy;

/// `cuFuncGetAttribute`, with the attribute numbers of the header.
pub(super) fn attribute(
    module: &Module,
    entry: &Kernel,
    settings: &FunctionSettings,
    number: i32,
    capability: &Capability,
) -> Result<i32> {
    let value = match number {
        0 => entry.max_threads,
        1 => entry.static_shared,
        2 => u32::try_from(module.constant_bytes(entry)).map_err(|_| Error::UNKNOWN)?,
        3 => entry.local_bytes,
        4 => entry.registers,
        5 => entry.target,    // version of the PTX
        6 => capability.sm(), // version of the code
        7 => 0,
        8 => settings.dynamic_shared.load(Relaxed),
        9 => return Ok(settings.carveout.load(Relaxed)),
        10..=17 => 0, // clusters and updates by the device: none
        _ => return Err(Error::INVALID_VALUE),
    };
    i32::try_from(value).map_err(|_| Error::UNKNOWN)
}

/// `cuFuncSetAttribute`.
pub(super) fn set_attribute(
    entry: &Kernel,
    settings: &FunctionSettings,
    number: i32,
    value: i32,
    capability: &Capability,
) -> Result {
    match number {
        8 => {
            let value = u32::try_from(value).map_err(|_| Error::INVALID_VALUE)?;
            if value > capability.shared_per_block_optin.saturating_sub(entry.static_shared) {
                return Err(Error::INVALID_VALUE);
            }
            settings.dynamic_shared.store(value, Relaxed);
            Ok(())
        }
        9 if (-1..=100).contains(&value) => {
            settings.carveout.store(value, Relaxed);
            Ok(())
        }
        // Clusters of more than one block do not exist on this device; hints about them have no effect.
        11..=13 if matches!(value, 0 | 1) => Ok(()),
        14 | 15 => Ok(()),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// `cuFuncGetParamInfo`.
pub(super) fn parameter(entry: &Kernel, index: usize, offset: Out<usize>, size: Out<usize>) -> Result {
    let parameter = entry.params.get(index).ok_or(Error::INVALID_VALUE)?;
    offset.set(parameter.offset as usize)?;
    size.set_if_given(parameter.size as usize);
    Ok(())
}

fn block_size(value: i32) -> Result<u32> {
    u32::try_from(value).ok().filter(|size| *size > 0).ok_or(Error::INVALID_VALUE)
}

fn active_blocks(function: u64, threads: i32, shared: u64) -> Result<i32> {
    current_core()?;
    let callable = module::described(function)?;
    i32::try_from(occupancy::blocks(&callable, block_size(threads)?, shared)).map_err(|_| Error::UNKNOWN)
}

type SharedOf = Option<unsafe extern "C" fn(i32) -> u64>;

fn best_block(
    grid: Out<i32>,
    block: Out<i32>,
    function: u64,
    shared_of: SharedOf,
    shared: u64,
    limit: i32,
) -> Result {
    let core = current_core()?;
    grid.required()?;
    block.required()?;
    let callable = module::described(function)?;
    let limit = u32::try_from(limit).map_err(|_| Error::INVALID_VALUE)?;
    let demand = |threads: u32| match (shared_of, i32::try_from(threads)) {
        // SAFETY: the program's own callback, called as the API defines.
        (Some(function), Ok(threads)) => unsafe { function(threads) },
        _ => shared,
    };
    let (blocks, threads) = occupancy::best_block(&callable, core.gpu.multiprocessors(), limit, &demand);
    grid.set(i32::try_from(blocks).map_err(|_| Error::UNKNOWN)?)?;
    block.set(i32::try_from(threads).map_err(|_| Error::UNKNOWN)?)
}

calls! {
    fn cuFuncGetAttribute(value: Out<i32>, number: i32, function: u64) {
        let callable = module::described(function)?;
        value.set(attribute(callable.parsed(), callable.entry(), callable.settings(), number, callable.capability())?)
    }

    fn cuFuncSetAttribute(function: u64, number: i32, value: i32) {
        let callable = module::described(function)?;
        set_attribute(callable.entry(), callable.settings(), number, value, callable.capability())
    }

    fn cuFuncSetCacheConfig(function: u64, config: u32) {
        module::described(function)?;
        if config > 3 { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncSetSharedMemConfig(function: u64, config: u32) {
        module::described(function)?;
        if config > 2 { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncGetModule(place: Out<u64>, function: u64) {
        // A kernel has no module: the caller must get its function first.
        place.set(module::function_at(given::<Error>(function)?)?.module_handle)
    }

    fn cuFuncGetName(name: Out<*const c_char>, function: u64) {
        let text = match module::kernel(given::<Error>(function)?) {
            Ok(kernel) => kernel.name()?,
            Err(_) => module::function_at(function)?.name()?,
        };
        name.set(text.as_ptr())
    }

    fn cuFuncGetParamInfo(function: u64, index: usize, offset: Out<usize>, size: Out<usize>) {
        parameter(module::described(given::<Error>(function)?)?.entry(), index, offset, size)
    }

    fn cuFuncGetParamCount(function: u64, count: Out<usize>) {
        count.set(module::described(function)?.entry().params.len())
    }

    // Modules are loaded completely, never lazily.
    fn cuFuncIsLoaded(state: Out<u32>, function: u64) { module::described(function)?; state.set(1) }

    fn cuFuncLoad(function: u64) { module::described(function)?; Ok(()) }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(count: Out<i32>, function: u64, threads: i32, shared: u64) {
        count.set(active_blocks(function, threads, shared)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        count: Out<i32>, function: u64, threads: i32, shared: u64, flags: u32,
    ) {
        if flags > 1 {
            return Err(Error::INVALID_VALUE);
        }
        count.set(active_blocks(function, threads, shared)?)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>, block: Out<i32>, function: u64, shared_of: SharedOf, shared: u64, limit: i32,
    ) {
        best_block(grid, block, function, shared_of, shared, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>, block: Out<i32>, function: u64, shared_of: SharedOf, shared: u64, limit: i32, flags: u32,
    ) {
        if flags > 1 {
            return Err(Error::INVALID_VALUE);
        }
        best_block(grid, block, function, shared_of, shared, limit)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<u64>, function: u64, blocks: i32, threads: i32) {
        current_core()?;
        let callable = module::described(function)?;
        let blocks = block_size(blocks)?;
        let shared = occupancy::available_shared(&callable, blocks, block_size(threads)?);
        bytes.set(shared.ok_or(Error::INVALID_VALUE)?)
    }

    fn cuOccupancyMaxActiveClusters(count: Out<i32>, function: u64, config: In<Config>) {
        // A cluster has one block, so there are as many clusters as blocks.
        let core = current_core()?;
        let config = config.get()?;
        config.check_cluster()?;
        let callable = module::described(function)?;
        let threads = config.threads()?;
        let blocks = occupancy::blocks(&callable, threads, u64::from(config.dynamic_shared));
        count.set(i32::try_from(blocks * core.gpu.multiprocessors()).map_err(|_| Error::UNKNOWN)?)
    }

    fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, function: u64, config: In<Config>) {
        current_core()?;
        module::described(function)?;
        config.get()?;
        size.set(1)
    }
}
