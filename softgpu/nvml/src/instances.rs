//! The instances of a device in the terms of NVML.

use crate::{SoftGpu, faults};
use sluice_nvml_abi::{
    ComputeInstance, ComputeProfile, GpuInstance, GpuMemory, GpuProfile, Mig, Result, Status,
};
use softgpu_device::{InstanceError, PAGE_BYTES};

fn status(error: InstanceError) -> Status {
    match error {
        InstanceError::Indivisible | InstanceError::Undivided => Status::NOT_SUPPORTED,
        InstanceError::Invalid => Status::INVALID_ARGUMENT,
        InstanceError::Full => Status::INSUFFICIENT_RESOURCES,
        InstanceError::InUse => Status::IN_USE,
        InstanceError::Gone => Status::NOT_FOUND,
        InstanceError::Kernel(_) => Status::OPERATING_SYSTEM,
    }
}

fn compute(compute: softgpu_device::ComputeInstance) -> ComputeInstance {
    let softgpu_device::ComputeInstance { id, profile, start, uuid } = compute;
    ComputeInstance { id, profile, start, uuid }
}

fn instance(instance: softgpu_device::GpuInstance) -> GpuInstance {
    let softgpu_device::GpuInstance { epoch, id, profile, start, compute: list } = instance;
    GpuInstance { epoch, id, profile, start, compute: list.into_iter().map(compute).collect() }
}

/// The call that switches MIG mode; in a device's directory, the file with the mode after the next reset.
const SWITCH: &str = "nvmlDeviceSetMigMode";
const PENDING: &str = "mig-pending";

impl SoftGpu {
    fn pending(&self) -> Option<bool> {
        std::fs::read_to_string(self.directory().join(PENDING)).ok().map(|mode| mode == "1")
    }

    /// Applies a pending MIG mode, unless the mode change still needs a reset.
    fn apply_pending(&self) -> Result {
        let Some(divided) = self.pending() else { return Ok(()) };
        if faults::before(self.directory(), SWITCH).is_err() {
            return Ok(());
        }
        match self.device().divide(divided) {
            // A device in use cannot be reset.
            Err(InstanceError::InUse) => return Ok(()),
            other => other.map_err(status)?,
        }
        std::fs::remove_file(self.directory().join(PENDING)).map_err(|_| Status::OPERATING_SYSTEM)
    }
}

impl Mig for SoftGpu {
    fn is_divided(&self) -> Result<bool> {
        self.apply_pending()?;
        Ok(self.device().is_divided())
    }

    fn will_be_divided(&self) -> Result<bool> {
        self.apply_pending()?;
        Ok(self.pending().unwrap_or_else(|| self.device().is_divided()))
    }

    fn divide(&self, divided: bool) -> Result {
        match faults::before(self.directory(), SWITCH) {
            Ok(()) => self.device().divide(divided).map_err(status),
            Err(why) if self.device().is_divided() == divided => {
                // The pending change is cancelled.
                _ = std::fs::remove_file(self.directory().join(PENDING));
                if why == Status::RESET_REQUIRED { Ok(()) } else { Err(why) }
            }
            Err(why) => {
                let mode = if divided { "1" } else { "0" };
                std::fs::write(self.directory().join(PENDING), mode).map_err(|_| Status::OPERATING_SYSTEM)?;
                Err(why)
            }
        }
    }

    fn most(&self) -> u32 {
        self.device().geometry().map_or(0, |geometry| geometry.compute_slices)
    }

    fn profiles(&self) -> Vec<GpuProfile> {
        let Some(geometry) = self.device().geometry() else { return Vec::new() };
        let profile = |profile: &softgpu_device::Profile| GpuProfile {
            name: profile.name.clone(),
            id: profile.id,
            index: profile.index,
            slices: profile.slices,
            instances: profile.instances,
            multiprocessors: profile.multiprocessors,
            engines: profile.engines,
            memory: self.device().profile_pages(profile) * PAGE_BYTES,
            size: profile.size,
            compute: profile
                .compute
                .iter()
                .map(|kind| ComputeProfile {
                    index: kind.index,
                    slices: kind.slices,
                    instances: kind.instances,
                    multiprocessors: kind.multiprocessors,
                    starts: kind.starts.clone(),
                })
                .collect(),
        };
        geometry.profiles.iter().map(profile).collect()
    }

    fn places(&self, profile: u32) -> Result<Vec<u32>> {
        self.device().places(profile).map_err(status)
    }

    fn capacity(&self, profile: u32) -> Result<u32> {
        self.device().capacity(profile).map_err(status)
    }

    fn instances(&self) -> Result<Vec<GpuInstance>> {
        Ok(self.device().instances().into_iter().map(instance).collect())
    }

    fn create(&self, profile: u32, start: Option<u32>) -> Result<GpuInstance> {
        faults::before(self.directory(), "nvmlDeviceCreateGpuInstanceWithPlacement")?;
        self.device().create_instance(profile, start).map(instance).map_err(status)
    }

    fn destroy(&self, epoch: u32) -> Result {
        faults::before(self.directory(), "nvmlGpuInstanceDestroy")?;
        self.device().destroy_instance(epoch).map_err(status)
    }

    fn compute_capacity(&self, epoch: u32, profile: u32) -> Result<u32> {
        self.device().compute_capacity(epoch, profile).map_err(status)
    }

    fn create_compute(&self, epoch: u32, profile: u32, start: Option<u32>) -> Result<ComputeInstance> {
        self.device().create_compute(epoch, profile, start).map(compute).map_err(status)
    }

    fn destroy_compute(&self, epoch: u32, id: u32) -> Result {
        self.device().destroy_compute(epoch, id).map_err(status)
    }

    fn memory(&self, epoch: u32) -> Result<GpuMemory> {
        let device = self.device();
        device.collect();
        let instances = device.instances();
        let instance = instances.iter().find(|there| there.epoch == epoch).ok_or(Status::NOT_FOUND)?;
        let (total, used) = device.instance_memory(instance);
        Ok(GpuMemory { total, used })
    }
}
