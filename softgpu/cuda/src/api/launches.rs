//! The entry points for launches.

use std::ffi::c_void;

use crate::error::{Error, Result};
use crate::event::{self, EVENTS};
use crate::ffi::In;
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
struct Attribute {
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
        self.attributes()?.iter().filter(|attribute| attribute.key == 4).try_for_each(check_cluster)
    }
}

fn check_cluster(attribute: &Attribute) -> Result {
    if attribute.value[..3] == [1, 1, 1] { Ok(()) } else { Err(Error::INVALID_CLUSTER_SIZE) }
}

/// The attributes of a launch that matter here.
#[derive(Default)]
struct LaunchAttributes {
    cooperative: bool,
    /// Events that the launch records.
    events: Vec<u64>,
}

/// Reads the attributes of a launch, or returns an error for an unsupported one.
fn read(attributes: &[Attribute]) -> Result<LaunchAttributes> {
    let mut read = LaunchAttributes::default();
    for attribute in attributes {
        match attribute.key {
            2 => read.cooperative = attribute.value[0] != 0,
            4 => check_cluster(attribute)?,
            // Ignored attributes, and hints that change no result: access policy, cluster scheduling, serialisation (this device
            // always serialises), priority, synchronisation domains, preferred cluster, carve-out, portability and shared-memory
            // mode of clusters that have one block.
            0 | 1 | 5 | 6 | 8 | 9 | 10 | 11 | 14 | 16 | 17 | 18 => {}
            // Events that blocks trigger, or the begin of the last block: at its end the launch has passed both.
            7 | 12 => {
                let event = u64::from(attribute.value[0]) | u64::from(attribute.value[1]) << 32;
                EVENTS.get(event)?;
                read.events.push(event);
            }
            // Updates by the device.
            13 => return Err(Error::NOT_SUPPORTED),
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    Ok(read)
}

fn launch_config(
    implicit: Implicit,
    config: In<Config>,
    function: u64,
    parameters: In<In<u8>>,
    extra: In<In<c_void>>,
) -> Result {
    let config = config.get()?;
    let LaunchAttributes { cooperative, events } = read(&config.attributes()?)?;
    let Config { grid, block, dynamic_shared, stream, .. } = config;
    let request = LaunchRequest { function, grid, block, dynamic_shared, parameters, extra, cooperative };
    let target = target(stream, implicit)?;
    launch::launch(&target, &request)?;
    events.into_iter().try_for_each(|event| event::record(event, &target))
}

twins! {
    fn cuLaunchKernel, cuLaunchKernel_ptsz(
        implicit; function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        dynamic_shared: u32, stream: u64, parameters: In<In<u8>>, extra: In<In<c_void>>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let request = LaunchRequest { function, grid, block, dynamic_shared, parameters, extra, cooperative: false };
        launch::launch(&target(stream, implicit)?, &request)
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
        launch::launch(&target(stream, implicit)?, &request)
    }
}
