//! The targets of handles: a GPU, an instance of one, or a device that a program sees on an instance.
//!
//! A handle is a number that encodes its target, so no table is needed. A handle of an instance contains the instance's epoch: it
//! never names another instance that later has the same position and id.

use crate::driver::{
    ComputeInstance, ComputeProfile, Gpu, GpuInstance, GpuProfile, InstanceId, Mig, Process,
};
use crate::layout::{ComputeInstanceHandle, DeviceHandle, GpuInstanceHandle};
use crate::session::LibrarySession;
use crate::status::{Result, Status};

/// ```text
/// epoch 32 │ compute instance 8 │ kind 8 │ one more than the GPU's index 8
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
struct PackedHandle {
    gpu: u8,
    kind: HandleKind,
    compute: u8,
    epoch: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum HandleKind {
    Gpu,
    MigDevice,
    GpuInstance,
    ComputeInstance,
}

const _: () = assert!(usize::BITS == 64);

impl PackedHandle {
    fn write(kind: HandleKind, index: usize, epoch: u32, compute: u32) -> Result<usize> {
        let gpu = u8::try_from(index + 1).map_err(|_| Status::UNKNOWN)?;
        let compute = u8::try_from(compute).map_err(|_| Status::UNKNOWN)?;
        let [e0, e1, e2, e3] = epoch.to_le_bytes();
        Ok(usize::from_le_bytes([gpu, kind as u8, compute, e0, e1, e2, e3, 0]))
    }

    fn read(handle: usize) -> Option<PackedHandle> {
        let [gpu, kind, compute, e0, e1, e2, e3, 0] = handle.to_le_bytes() else { return None };
        let kinds =
            [HandleKind::Gpu, HandleKind::MigDevice, HandleKind::GpuInstance, HandleKind::ComputeInstance];
        let kind = kinds.into_iter().find(|known| *known as u8 == kind)?;
        Some(PackedHandle { gpu, kind, compute, epoch: u32::from_le_bytes([e0, e1, e2, e3]) })
    }
}

/// A GPU, or a device on an instance of it.
pub(crate) struct DeviceTarget<'a> {
    pub(crate) index: usize,
    pub(crate) gpu: &'a dyn Gpu,
    pub(crate) part: Option<InstancePart>,
}

/// The instance behind a device.
pub(crate) struct InstancePart {
    pub(crate) instance: GpuInstance,
    pub(crate) profile: GpuProfile,
    pub(crate) compute: ComputeInstance,
}

impl InstancePart {
    /// Returns the profile of the compute instance.
    pub(crate) fn kind(&self) -> Result<&ComputeProfile> {
        self.profile.compute.iter().find(|kind| kind.index == self.compute.profile).ok_or(Status::UNKNOWN)
    }

    /// Name that follows its GPU's name: `MIG 1c.3g.40gb`, or `MIG 3g.40gb` if it fills its GPU instance.
    pub(crate) fn name(&self) -> Result<String> {
        Ok(format!("MIG {}", compute_name(&self.profile, self.kind()?)))
    }

    pub(crate) fn is(&self, instance: Option<InstanceId>) -> bool {
        instance.is_some_and(|id| (id.epoch, id.compute) == (self.instance.epoch, self.compute.id))
    }
}

/// Name of a compute instance with this profile.
pub(crate) fn compute_name(profile: &GpuProfile, kind: &ComputeProfile) -> String {
    if kind.multiprocessors == profile.multiprocessors {
        profile.name.clone()
    } else {
        format!("{}c.{}", kind.slices, profile.name)
    }
}

impl DeviceTarget<'_> {
    /// Returns the processes that compute on the target.
    pub(crate) fn processes(&self) -> Result<Vec<Process>> {
        let mut processes = self.gpu.processes()?;
        if let Some(part) = &self.part {
            processes.retain(|process| part.is(process.instance));
        }
        Ok(processes)
    }
}

impl LibrarySession {
    /// Returns the GPU of a GPU's handle, with its index.
    pub(crate) fn gpu(&self, device: DeviceHandle) -> Result<(usize, &dyn Gpu)> {
        let handle =
            PackedHandle::read(device).filter(|handle| handle.kind == HandleKind::Gpu && handle.epoch == 0);
        self.gpu_of(handle.ok_or(Status::INVALID_ARGUMENT)?)
    }

    fn gpu_of(&self, handle: PackedHandle) -> Result<(usize, &dyn Gpu)> {
        let index = usize::from(handle.gpu).checked_sub(1).ok_or(Status::INVALID_ARGUMENT)?;
        Ok((index, &**self.opened.gpus.get(index).ok_or(Status::INVALID_ARGUMENT)?))
    }

    /// Resolves a device handle of either kind.
    pub(crate) fn target(&self, device: DeviceHandle) -> Result<DeviceTarget<'_>> {
        let handle = PackedHandle::read(device).ok_or(Status::INVALID_ARGUMENT)?;
        if handle.kind != HandleKind::MigDevice {
            let (index, gpu) = self.gpu(device)?;
            return Ok(DeviceTarget { index, gpu, part: None });
        }
        let (index, gpu) = self.gpu_of(handle)?;
        let (instance, profile) = find(gpu, handle.epoch)?;
        let compute = compute(&instance, handle.compute.into())?;
        Ok(DeviceTarget { index, gpu, part: Some(InstancePart { instance, profile, compute }) })
    }

    /// Resolves the handle of a GPU instance to GPU, instance and profile.
    pub(crate) fn instance(
        &self,
        instance: GpuInstanceHandle,
    ) -> Result<(usize, &dyn Mig, GpuInstance, GpuProfile)> {
        let handle = PackedHandle::read(instance).filter(|handle| handle.kind == HandleKind::GpuInstance);
        let handle = handle.ok_or(Status::INVALID_ARGUMENT)?;
        let (index, gpu) = self.gpu_of(handle)?;
        let (instance, profile) = find(gpu, handle.epoch)?;
        Ok((index, mig(gpu)?, instance, profile))
    }

    /// Resolves the handle of a compute instance, also to its GPU instance.
    pub(crate) fn compute_instance(
        &self,
        instance: ComputeInstanceHandle,
    ) -> Result<(usize, &dyn Mig, InstancePart)> {
        let handle = PackedHandle::read(instance).filter(|handle| handle.kind == HandleKind::ComputeInstance);
        let handle = handle.ok_or(Status::INVALID_ARGUMENT)?;
        let (index, gpu) = self.gpu_of(handle)?;
        let (instance, profile) = find(gpu, handle.epoch)?;
        let compute = compute(&instance, handle.compute.into())?;
        Ok((index, mig(gpu)?, InstancePart { instance, profile, compute }))
    }
}

/// Returns the instances of a GPU, or an error if it cannot be divided.
pub(crate) fn mig(gpu: &dyn Gpu) -> Result<&dyn Mig> {
    gpu.mig().ok_or(Status::NOT_SUPPORTED)
}

/// Returns the instances of a GPU, or an error if it is not divided.
pub(crate) fn divided(gpu: &dyn Gpu) -> Result<&dyn Mig> {
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

/// Returns the devices on all instances of a GPU, by index.
pub(crate) fn devices(index: usize, gpu: &dyn Gpu) -> Result<Vec<(DeviceHandle, ComputeInstance)>> {
    let Some(mig) = gpu.mig() else { return Ok(Vec::new()) };
    let mut instances = mig.instances()?;
    instances.sort_unstable_by_key(|instance| instance.id);
    let mut devices = Vec::new();
    for instance in instances {
        let mut all = instance.compute;
        all.sort_unstable_by_key(|compute| compute.id);
        for compute in all {
            devices.push((
                PackedHandle::write(HandleKind::MigDevice, index, instance.epoch, compute.id)?,
                compute,
            ));
        }
    }
    Ok(devices)
}

/// Encodes the handle of a GPU.
pub(crate) fn gpu_handle(index: usize) -> Result<DeviceHandle> {
    PackedHandle::write(HandleKind::Gpu, index, 0, 0)
}

/// Encodes the handle of a GPU instance.
pub(crate) fn instance_handle(index: usize, instance: &GpuInstance) -> Result<GpuInstanceHandle> {
    PackedHandle::write(HandleKind::GpuInstance, index, instance.epoch, 0)
}

/// Encodes the handle of a compute instance.
pub(crate) fn compute_handle(index: usize, epoch: u32, id: u32) -> Result<ComputeInstanceHandle> {
    PackedHandle::write(HandleKind::ComputeInstance, index, epoch, id)
}
