//! The targets of handles: a GPU, an instance of one, or a device that a program sees on an instance.
//!
//! A handle is a number that carries its target, so nothing has to be remembered for it. A handle of an instance carries the
//! instance's epoch: it never comes to name another that has taken the place and the number of the first.

use super::driver::{
    ComputeInstance, ComputeProfile, Gpu, GpuInstance, GpuProfile, InstanceId, Mig, Process,
};
use super::layout::{ComputeInstanceHandle, DeviceHandle, GpuInstanceHandle};
use super::session::Session;
use super::status::{Result, Status};

/// ```text
/// epoch 32 │ compute instance 8 │ kind 8 │ one more than the GPU's index 8
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
struct Handle {
    gpu: u8,
    kind: Kind,
    compute: u8,
    epoch: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gpu,
    MigDevice,
    GpuInstance,
    ComputeInstance,
}

const _: () = assert!(usize::BITS == 64);

impl Handle {
    fn write(kind: Kind, index: usize, epoch: u32, compute: u32) -> Result<usize> {
        let gpu = u8::try_from(index + 1).map_err(|_| Status::UNKNOWN)?;
        let compute = u8::try_from(compute).map_err(|_| Status::UNKNOWN)?;
        let [e0, e1, e2, e3] = epoch.to_le_bytes();
        Ok(usize::from_le_bytes([gpu, kind as u8, compute, e0, e1, e2, e3, 0]))
    }

    fn read(handle: usize) -> Option<Handle> {
        let [gpu, kind, compute, e0, e1, e2, e3, 0] = handle.to_le_bytes() else { return None };
        let kinds = [Kind::Gpu, Kind::MigDevice, Kind::GpuInstance, Kind::ComputeInstance];
        let kind = kinds.into_iter().find(|known| *known as u8 == kind)?;
        Some(Handle { gpu, kind, compute, epoch: u32::from_le_bytes([e0, e1, e2, e3]) })
    }
}

/// A GPU, or a device on an instance of it.
pub(super) struct Target<'a> {
    pub(super) index: usize,
    pub(super) gpu: &'a dyn Gpu,
    pub(super) part: Option<Part>,
}

/// A device on an instance.
pub(super) struct Part {
    pub(super) instance: GpuInstance,
    pub(super) profile: GpuProfile,
    pub(super) compute: ComputeInstance,
}

impl Part {
    /// The kind of its compute instance.
    pub(super) fn kind(&self) -> Result<&ComputeProfile> {
        self.profile.compute.iter().find(|kind| kind.index == self.compute.profile).ok_or(Status::UNKNOWN)
    }

    /// What programs call it, behind its GPU's name: `MIG 1c.3g.40gb`, or `MIG 3g.40gb` where it is all of its instance.
    pub(super) fn name(&self) -> Result<String> {
        Ok(format!("MIG {}", compute_name(&self.profile, self.kind()?)))
    }

    pub(super) fn is(&self, instance: Option<InstanceId>) -> bool {
        instance.is_some_and(|id| (id.epoch, id.compute) == (self.instance.epoch, self.compute.id))
    }
}

/// What a kind of compute instance is called.
pub(super) fn compute_name(profile: &GpuProfile, kind: &ComputeProfile) -> String {
    if kind.multiprocessors == profile.multiprocessors {
        profile.name.clone()
    } else {
        format!("{}c.{}", kind.slices, profile.name)
    }
}

impl Target<'_> {
    /// The processes that compute there.
    pub(super) fn processes(&self) -> Result<Vec<Process>> {
        let mut processes = self.gpu.processes()?;
        if let Some(part) = &self.part {
            processes.retain(|process| part.is(process.instance));
        }
        Ok(processes)
    }
}

impl Session {
    /// The GPU of a handle that names one, and its index.
    pub(super) fn gpu(&self, device: DeviceHandle) -> Result<(usize, &dyn Gpu)> {
        let handle = Handle::read(device).filter(|handle| handle.kind == Kind::Gpu && handle.epoch == 0);
        self.gpu_of(handle.ok_or(Status::INVALID_ARGUMENT)?)
    }

    fn gpu_of(&self, handle: Handle) -> Result<(usize, &dyn Gpu)> {
        let index = usize::from(handle.gpu).checked_sub(1).ok_or(Status::INVALID_ARGUMENT)?;
        Ok((index, &**self.opened.gpus.get(index).ok_or(Status::INVALID_ARGUMENT)?))
    }

    /// What a device handle of either kind names.
    pub(super) fn target(&self, device: DeviceHandle) -> Result<Target<'_>> {
        let handle = Handle::read(device).ok_or(Status::INVALID_ARGUMENT)?;
        if handle.kind != Kind::MigDevice {
            let (index, gpu) = self.gpu(device)?;
            return Ok(Target { index, gpu, part: None });
        }
        let (index, gpu) = self.gpu_of(handle)?;
        let (instance, profile) = find(gpu, handle.epoch)?;
        let compute = compute(&instance, handle.compute.into())?;
        Ok(Target { index, gpu, part: Some(Part { instance, profile, compute }) })
    }

    /// The GPU, the instance and its profile of a handle of a GPU instance.
    pub(super) fn instance(
        &self,
        instance: GpuInstanceHandle,
    ) -> Result<(usize, &dyn Mig, GpuInstance, GpuProfile)> {
        let handle = Handle::read(instance).filter(|handle| handle.kind == Kind::GpuInstance);
        let handle = handle.ok_or(Status::INVALID_ARGUMENT)?;
        let (index, gpu) = self.gpu_of(handle)?;
        let (instance, profile) = find(gpu, handle.epoch)?;
        Ok((index, mig(gpu)?, instance, profile))
    }

    /// The same of a handle of a compute instance, and that one.
    pub(super) fn compute_instance(
        &self,
        instance: ComputeInstanceHandle,
    ) -> Result<(usize, &dyn Mig, Part)> {
        let handle = Handle::read(instance).filter(|handle| handle.kind == Kind::ComputeInstance);
        let handle = handle.ok_or(Status::INVALID_ARGUMENT)?;
        let (index, gpu) = self.gpu_of(handle)?;
        let (instance, profile) = find(gpu, handle.epoch)?;
        let compute = compute(&instance, handle.compute.into())?;
        Ok((index, mig(gpu)?, Part { instance, profile, compute }))
    }
}

/// The instances of a GPU that can be divided.
pub(super) fn mig(gpu: &dyn Gpu) -> Result<&dyn Mig> {
    gpu.mig().ok_or(Status::NOT_SUPPORTED)
}

/// The same of one that is.
pub(super) fn divided(gpu: &dyn Gpu) -> Result<&dyn Mig> {
    let mig = mig(gpu)?;
    if mig.is_divided()? { Ok(mig) } else { Err(Status::NOT_SUPPORTED) }
}

fn find(gpu: &dyn Gpu, epoch: u32) -> Result<(GpuInstance, GpuProfile)> {
    let mig = mig(gpu)?;
    let mut instances = mig.instances()?.into_iter();
    let instance = instances.find(|instance| instance.epoch == epoch).ok_or(Status::INVALID_ARGUMENT)?;
    let mut profiles = mig.profiles().into_iter();
    let profile = profiles.find(|profile| profile.id == instance.profile).ok_or(Status::UNKNOWN)?;
    Ok((instance, profile))
}

fn compute(instance: &GpuInstance, id: u32) -> Result<ComputeInstance> {
    instance.compute.iter().find(|compute| compute.id == id).copied().ok_or(Status::INVALID_ARGUMENT)
}

/// The devices on all instances of a GPU, in the order of their indices.
pub(super) fn devices(index: usize, gpu: &dyn Gpu) -> Result<Vec<(DeviceHandle, ComputeInstance)>> {
    let Some(mig) = gpu.mig() else { return Ok(Vec::new()) };
    let mut instances = mig.instances()?;
    instances.sort_unstable_by_key(|instance| instance.id);
    let mut devices = Vec::new();
    for instance in instances {
        let mut all = instance.compute;
        all.sort_unstable_by_key(|compute| compute.id);
        for compute in all {
            devices.push((Handle::write(Kind::MigDevice, index, instance.epoch, compute.id)?, compute));
        }
    }
    Ok(devices)
}

/// The handle of a GPU.
pub(super) fn gpu_handle(index: usize) -> Result<DeviceHandle> {
    Handle::write(Kind::Gpu, index, 0, 0)
}

/// The handle of a GPU instance.
pub(super) fn instance_handle(index: usize, instance: &GpuInstance) -> Result<GpuInstanceHandle> {
    Handle::write(Kind::GpuInstance, index, instance.epoch, 0)
}

/// The handle of a compute instance.
pub(super) fn compute_handle(index: usize, epoch: u32, id: u32) -> Result<ComputeInstanceHandle> {
    Handle::write(Kind::ComputeInstance, index, epoch, id)
}
