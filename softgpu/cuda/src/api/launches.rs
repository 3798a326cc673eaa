//! The entry points for launches.

use std::ffi::c_void;

use sluice_cuda_graphs::{KernelWork, Work};

use crate::error::{Error, Result};
use crate::event;
use crate::ffi::In;
use crate::graphs::GRAPHS;
use crate::launch::{self, LaunchRequest};
use crate::stream::{Implicit, target};

/// `CUlaunchConfig`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    pub(super) dynamic_shared: u32,
    stream: u64,
    attributes: In<Attribute>,
    count: u32,
}

/// `CUlaunchAttribute`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Attribute {
    key: u32,
    padding: u32,
    value: [u32; 16],
}

const _: () = assert!(size_of::<Config>() == size_of::<sluice_cuda_abi::sys::CUlaunchConfig>());
const _: () = assert!(size_of::<Attribute>() == size_of::<sluice_cuda_abi::sys::CUlaunchAttribute>());

impl Config {
    fn attributes(&self) -> Result<Vec<Attribute>> {
        self.attributes.list(self.count as usize)
    }

    /// Returns the number of threads per block.
    pub(super) fn threads(&self) -> Result<u32> {
        let product = self.block.iter().try_fold(1u32, |product, size| product.checked_mul(*size));
        product.filter(|threads| *threads > 0).ok_or(Error::INVALID_VALUE)
    }

    /// Checks the cluster size; clusters have one block.
    pub(super) fn check_cluster(&self) -> Result {
        let clusters = self.attributes()?.into_iter().filter(|attribute| attribute.key == launch::CLUSTER);
        clusters.into_iter().try_for_each(|attribute| launch::check_cluster(attribute.first_words()))
    }
}

impl Attribute {
    fn first_words(&self) -> [u32; 3] {
        [self.value[0], self.value[1], self.value[2]]
    }

    fn event(&self) -> Option<u64> {
        let has_event = matches!(self.key, launch::PROGRAMMATIC_EVENT | launch::COMPLETION_EVENT);
        has_event.then(|| u64::from(self.value[0]) | u64::from(self.value[1]) << 32)
    }
}

/// The attribute of a cooperative launch.
const COOPERATIVE: u32 = 2;

/// Launches a kernel, or adds its node to a capture.
pub(super) fn launch(
    implicit: Implicit,
    stream: u64,
    request: &LaunchRequest,
    attributes: &[Attribute],
) -> Result {
    let target = target(stream, implicit)?;
    let events = attributes.iter().filter_map(Attribute::event);
    let events = events.map(|event| event::find_for_launch(event, &target)).collect::<Result<Vec<_>>>()?;
    if !events.is_empty() {
        // No node records events of a launch.
        GRAPHS.refuse(target.facts())?;
    }
    let describe = || {
        let LaunchRequest { function, grid, block, dynamic_shared: shared, cooperative, .. } = *request;
        let parameters = launch::packed_parameters(&target.core, request)?.into();
        let context = target.core.handle;
        let mut kernel =
            KernelWork { function, context, grid, block, shared, parameters, attributes: Vec::new() };
        for attribute in attributes {
            // A node has edges instead of the first two, which only concern the order of launches in a stream.
            if !matches!(attribute.key, 0 | 6) {
                let mut value = [0; 64];
                for (bytes, word) in value.chunks_mut(4).zip(attribute.value) {
                    bytes.copy_from_slice(&word.to_ne_bytes());
                }
                kernel.set_attribute(attribute.key, value);
            }
        }
        if cooperative {
            let mut value = [0; 64];
            value[0] = 1;
            kernel.set_attribute(COOPERATIVE, value);
        }
        Ok(Work::Kernel(kernel))
    };
    if GRAPHS.capture(target.facts(), describe)? {
        return Ok(());
    }
    launch::launch(&target, request)?;
    events.into_iter().for_each(|event| event.record(&target));
    Ok(())
}

fn launch_config(
    implicit: Implicit,
    config: In<Config>,
    function: u64,
    parameters: In<In<u8>>,
    extra: In<In<c_void>>,
) -> Result {
    let config = config.get()?;
    let attributes = config.attributes()?;
    let cooperative = launch::is_cooperative(attributes.iter().map(|it| (it.key, it.first_words())))?;
    let Config { grid, block, dynamic_shared, stream, .. } = config;
    let request = LaunchRequest { function, grid, block, dynamic_shared, parameters, extra, cooperative };
    launch(implicit, stream, &request, &attributes)
}

twins! {
    fn cuLaunchKernel, cuLaunchKernel_ptsz(
        implicit; function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        dynamic_shared: u32, stream: u64, parameters: In<In<u8>>, extra: In<In<c_void>>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let request = LaunchRequest { function, grid, block, dynamic_shared, parameters, extra, cooperative: false };
        launch(implicit, stream, &request, &[])
    }

    fn cuLaunchKernelEx, cuLaunchKernelEx_ptsz(
        implicit; config: In<Config>, function: u64, parameters: In<In<u8>>, extra: In<In<c_void>>,
    ) {
        launch_config(implicit, config, function, parameters, extra)
    }

    fn cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz(
        implicit; function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        dynamic_shared: u32, stream: u64, parameters: In<In<u8>>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let extra = In::missing();
        let request = LaunchRequest { function, grid, block, dynamic_shared, parameters, extra, cooperative: true };
        launch(implicit, stream, &request, &[])
    }
}
