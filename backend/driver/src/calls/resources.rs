//! Resources of devices, and green contexts.

use super::{Result, input, out};
use crate::{Driver, Handle, code};
use core::ffi::{c_int, c_void};
use sluice_cuda_abi::resources::{DevResource, GroupParameters, kind};

/// The results of a split: the groups, and the rest.
pub(super) type Parts = (Vec<DevResource>, Option<DevResource>);

fn list<T>(values: &mut [T]) -> *mut c_void {
    values.as_mut_ptr().cast()
}

fn left_over(remainder: DevResource) -> Option<DevResource> {
    (remainder.kind != kind::INVALID).then_some(remainder)
}

impl Driver {
    /// `cuDeviceGetDevResource`.
    pub fn device_resource(&self, device: c_int, kind: u32) -> Result<DevResource> {
        let mut resource = DevResource::INVALID;
        call!(self.cuDeviceGetDevResource(device, out(&mut resource), kind))?;
        Ok(resource)
    }

    /// `cuCtxGetDevResource`.
    pub fn context_resource(&self, context: Handle, kind: u32) -> Result<DevResource> {
        let mut resource = DevResource::INVALID;
        call!(self.cuCtxGetDevResource(context, out(&mut resource), kind))?;
        Ok(resource)
    }

    /// `cuGreenCtxGetDevResource`.
    pub fn green_resource(&self, green: Handle, kind: u32) -> Result<DevResource> {
        let mut resource = DevResource::INVALID;
        call!(self.cuGreenCtxGetDevResource(green, out(&mut resource), kind))?;
        Ok(resource)
    }

    /// `cuDevSmResourceSplitByCount`, with at most `groups` results. The resource is one of this driver.
    pub fn split_by_count(
        &self,
        resource: &DevResource,
        groups: u32,
        minimum: u32,
        flags: u32,
    ) -> Result<Parts> {
        let mut results = vec![DevResource::INVALID; groups.max(1) as usize];
        let (mut remainder, mut count) = (DevResource::INVALID, groups);
        call!(self.cuDevSmResourceSplitByCount(
            list(&mut results),
            &raw mut count,
            input(resource),
            out(&mut remainder),
            flags,
            minimum,
        ))?;
        results.truncate(count as usize);
        Ok((results, left_over(remainder)))
    }

    /// `cuDevSmResourceSplit`. With `discovers` only the counts of the parameters are found, and there are no results.
    pub fn split(
        &self,
        resource: &DevResource,
        parameters: &mut [GroupParameters],
        discovers: bool,
    ) -> Result<Parts> {
        let groups = u32::try_from(parameters.len()).map_err(|_| code::INVALID_VALUE)?;
        let mut results = vec![DevResource::INVALID; if discovers { 0 } else { parameters.len() }];
        let mut remainder = DevResource::INVALID;
        let place = if discovers { core::ptr::null_mut() } else { list(&mut results) };
        call!(self.cuDevSmResourceSplit(
            place,
            groups,
            input(resource),
            out(&mut remainder),
            0,
            list(parameters),
        ))?;
        Ok((results, left_over(remainder)))
    }

    /// `cuDevResourceGenerateDesc`. The resources are of this driver, which keeps the descriptor until the process ends.
    pub fn resource_descriptor(&self, resources: &mut [DevResource]) -> Result<Handle> {
        let count = u32::try_from(resources.len()).map_err(|_| code::INVALID_VALUE)?;
        let mut descriptor = 0;
        call!(self.cuDevResourceGenerateDesc(&raw mut descriptor, list(resources), count))?;
        Ok(descriptor)
    }
}
