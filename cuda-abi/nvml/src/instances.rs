//! The calls for instances (MIG): modes, profiles, GPU instances, compute instances, and the devices that programs see on them.

#![allow(non_snake_case, missing_docs, reason = "the names of nvml.h, which documents them")]
#![expect(clippy::missing_errors_doc, reason = "nvml.h documents the errors")]

use crate::calls::{DISABLED, ENABLED, field};
use crate::driver::{ComputeProfile, Gpu, GpuInstance, GpuProfile};
use crate::layout::{
    COMPUTE_INSTANCE_PROFILE_V2, COMPUTE_INSTANCE_PROFILE_V3, ComputeInstanceHandle, ComputeInstanceInfo,
    ComputeInstanceProfileV1, ComputeInstanceProfileV2, ComputeInstanceProfileV3, DeviceAttributes,
    DeviceHandle, GPU_INSTANCE_PROFILE_V2, GPU_INSTANCE_PROFILE_V3, GpuInstanceHandle, GpuInstanceInfo,
    GpuInstanceProfileV1, GpuInstanceProfileV2, GpuInstanceProfileV3, Placement,
};
use crate::library::Library;
use crate::pointers::Out;
use crate::status::{Result, Status};
use crate::targets::{compute_handle, compute_name, devices, divided, gpu_handle, instance_handle, mig};

/// `NVML_GPU_INSTANCE_PROFILE_COUNT`, `NVML_COMPUTE_INSTANCE_PROFILE_COUNT` and
/// `NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT`.
const GPU_PROFILES: u32 = 17;
const COMPUTE_PROFILES: u32 = 9;
const ENGINE_PROFILES: u32 = 1;

// --- The mode --------------------------------------------------------------------------------------------------------

pub fn nvmlDeviceGetMigMode(
    library: &Library,
    device: DeviceHandle,
    current: Out<u32>,
    pending: Out<u32>,
) -> Result {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    let mode = |divided| if divided { ENABLED } else { DISABLED };
    let mig = mig(gpu)?;
    pending.required()?;
    current.set(mode(mig.is_divided()?))?;
    pending.set(mode(mig.will_be_divided()?))
}

/// Stores the result of the switch in `activated`; the call's own result covers only the arguments.
pub fn nvmlDeviceSetMigMode(
    library: &Library,
    device: DeviceHandle,
    mode: u32,
    activated: Out<u32>,
) -> Result {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    if mode > ENABLED {
        return Err(Status::INVALID_ARGUMENT);
    }
    let activated = activated.required()?;
    activated.set(mig(gpu)?.divide(mode == ENABLED).map_or_else(|Status(code)| code, |()| 0))
}

pub fn nvmlDeviceGetMaxMigDeviceCount(library: &Library, device: DeviceHandle, count: Out<u32>) -> Result {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    count.set(match gpu.mig() {
        Some(mig) if mig.is_divided()? => mig.most(),
        _ => 0,
    })
}

// --- GPU instances ---------------------------------------------------------------------------------------------------

/// Finds a profile by its index.
fn by_index(gpu: &dyn Gpu, index: u32) -> Result<GpuProfile> {
    if index >= GPU_PROFILES {
        return Err(Status::INVALID_ARGUMENT);
    }
    let mut profiles = mig(gpu)?.profiles().into_iter();
    profiles.find(|profile| profile.index == index).ok_or(Status::NOT_SUPPORTED)
}

fn by_id(gpu: &dyn Gpu, id: u32) -> Result<GpuProfile> {
    let mut profiles = mig(gpu)?.profiles().into_iter();
    profiles.find(|profile| profile.id == id).ok_or(Status::NOT_SUPPORTED)
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

/// Writes one of the versions whose first field is the version number.
fn versioned_profile(profile: &GpuProfile, info: Out<GpuInstanceProfileV2>) -> Result {
    let GpuProfile { id, slices, instances, multiprocessors, engines, .. } = *profile;
    let (memory_mib, name) = (mib(profile.memory), field(&profile.name));
    match info.cast::<u32>().get()? {
        version @ GPU_INSTANCE_PROFILE_V2 => info.set(GpuInstanceProfileV2 {
            version,
            id,
            peers: 0,
            slices,
            instances,
            multiprocessors,
            engines,
            memory_mib,
            name,
        }),
        version @ GPU_INSTANCE_PROFILE_V3 => info.cast().set(GpuInstanceProfileV3 {
            version,
            id,
            slices,
            instances,
            multiprocessors,
            engines,
            memory_mib,
            name,
            capabilities: 0,
        }),
        _ => Err(Status::ARGUMENT_VERSION_MISMATCH),
    }
}

pub fn nvmlDeviceGetGpuInstanceProfileInfo(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    info: Out<GpuInstanceProfileV1>,
) -> Result {
    let session = library.session()?;
    let profile = by_index(session.gpu(device)?.1, profile)?;
    info.set(GpuInstanceProfileV1 {
        id: profile.id,
        peers: 0,
        slices: profile.slices,
        instances: profile.instances,
        multiprocessors: profile.multiprocessors,
        engines: profile.engines,
        memory_mib: mib(profile.memory),
    })
}

/// Unlike the first form, this one requires a divided GPU.
pub fn nvmlDeviceGetGpuInstanceProfileInfoV(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    info: Out<GpuInstanceProfileV2>,
) -> Result {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    let profile = by_index(gpu, profile)?;
    divided(gpu)?;
    versioned_profile(&profile, info)
}

pub fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    info: Out<GpuInstanceProfileV2>,
) -> Result {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    divided(gpu)?;
    versioned_profile(&by_id(gpu, profile)?, info)
}

/// The caller has room for the maximum number of entries.
pub fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    list: Out<Placement>,
    count: Out<u32>,
) -> Result {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    let size = by_id(gpu, profile)?.size;
    let starts = mig(gpu)?.places(profile)?;
    count.set(u32::try_from(starts.len()).map_err(|_| Status::UNKNOWN)?)?;
    if !list.is_given() {
        return Ok(());
    }
    let mut places = starts.into_iter().enumerate();
    places.try_for_each(|(index, start)| list.set_at(index, Placement { start, size }))
}

pub fn nvmlDeviceGetGpuInstancePossiblePlacements(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    list: Out<Placement>,
    count: Out<u32>,
) -> Result {
    nvmlDeviceGetGpuInstancePossiblePlacements_v2(library, device, profile, list, count)
}

pub fn nvmlDeviceGetGpuInstanceRemainingCapacity(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    count: Out<u32>,
) -> Result {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    by_id(gpu, profile)?;
    count.required()?.set(divided(gpu)?.capacity(profile)?)
}

fn create(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    placement: Option<Placement>,
    instance: Out<GpuInstanceHandle>,
) -> Result {
    let session = library.session()?;
    let (index, gpu) = session.gpu(device)?;
    let instance = instance.required()?;
    let mig = divided(gpu)?;
    let known = by_id(gpu, profile).map_err(|_| Status::INVALID_ARGUMENT)?;
    if placement.is_some_and(|placement| placement.size != known.size) {
        return Err(Status::INVALID_ARGUMENT);
    }
    let made = mig.create(profile, placement.map(|placement| placement.start))?;
    instance.set(instance_handle(index, &made)?)
}

pub fn nvmlDeviceCreateGpuInstance(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    instance: Out<GpuInstanceHandle>,
) -> Result {
    create(library, device, profile, None, instance)
}

pub fn nvmlDeviceCreateGpuInstanceWithPlacement(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    placement: Out<Placement>,
    instance: Out<GpuInstanceHandle>,
) -> Result {
    library.session()?;
    create(library, device, profile, Some(placement.get()?), instance)
}

pub fn nvmlGpuInstanceDestroy(library: &Library, instance: GpuInstanceHandle) -> Result {
    let session = library.session()?;
    let (_, mig, instance, _) = session.instance(instance)?;
    mig.destroy(instance.epoch)
}

/// The caller has room for the maximum number of instances of the profile.
pub fn nvmlDeviceGetGpuInstances(
    library: &Library,
    device: DeviceHandle,
    profile: u32,
    list: Out<GpuInstanceHandle>,
    count: Out<u32>,
) -> Result {
    let session = library.session()?;
    let (index, gpu) = session.gpu(device)?;
    let mig = divided(gpu)?;
    by_id(gpu, profile).map_err(|_| Status::INVALID_ARGUMENT)?;
    let (list, count) = (list.required()?, count.required()?);
    let mut found = mig.instances()?;
    found.retain(|instance| instance.profile == profile);
    count.set(u32::try_from(found.len()).map_err(|_| Status::UNKNOWN)?)?;
    let mut found = found.iter().enumerate();
    found.try_for_each(|(place, instance)| list.set_at(place, instance_handle(index, instance)?))
}

pub fn nvmlDeviceGetGpuInstanceById(
    library: &Library,
    device: DeviceHandle,
    id: u32,
    instance: Out<GpuInstanceHandle>,
) -> Result {
    let session = library.session()?;
    let (index, gpu) = session.gpu(device)?;
    let place = instance.required()?;
    let mut instances = divided(gpu)?.instances()?.into_iter();
    let found: GpuInstance = instances.find(|instance| instance.id == id).ok_or(Status::NOT_FOUND)?;
    place.set(instance_handle(index, &found)?)
}

pub fn nvmlGpuInstanceGetInfo(
    library: &Library,
    instance: GpuInstanceHandle,
    info: Out<GpuInstanceInfo>,
) -> Result {
    let session = library.session()?;
    let (index, _, instance, profile) = session.instance(instance)?;
    info.set(GpuInstanceInfo {
        device: gpu_handle(index)?,
        id: instance.id,
        profile: instance.profile,
        placement: Placement { start: instance.start, size: profile.size },
    })
}

// --- Compute instances -----------------------------------------------------------------------------------------------

fn compute_by_index(profile: &GpuProfile, index: u32, engines: u32) -> Result<&ComputeProfile> {
    if index >= COMPUTE_PROFILES || engines >= ENGINE_PROFILES {
        return Err(Status::INVALID_ARGUMENT);
    }
    profile.compute.iter().find(|kind| kind.index == index).ok_or(Status::NOT_SUPPORTED)
}

fn compute_facts(profile: &GpuProfile, kind: &ComputeProfile) -> ComputeInstanceProfileV1 {
    ComputeInstanceProfileV1 {
        id: kind.index,
        slices: kind.slices,
        instances: kind.instances,
        multiprocessors: kind.multiprocessors,
        engines: profile.engines,
    }
}

pub fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
    library: &Library,
    instance: GpuInstanceHandle,
    profile: u32,
    engines: u32,
    info: Out<ComputeInstanceProfileV1>,
) -> Result {
    let session = library.session()?;
    let (_, _, _, of) = session.instance(instance)?;
    info.set(compute_facts(&of, compute_by_index(&of, profile, engines)?))
}

pub fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    library: &Library,
    instance: GpuInstanceHandle,
    profile: u32,
    engines: u32,
    info: Out<ComputeInstanceProfileV2>,
) -> Result {
    let session = library.session()?;
    let (_, _, _, of) = session.instance(instance)?;
    let kind = compute_by_index(&of, profile, engines)?;
    let (facts, name) = (compute_facts(&of, kind), field(&compute_name(&of, kind)));
    match info.cast::<u32>().get()? {
        version @ COMPUTE_INSTANCE_PROFILE_V2 => info.set(ComputeInstanceProfileV2 { version, facts, name }),
        version @ COMPUTE_INSTANCE_PROFILE_V3 => {
            info.cast().set(ComputeInstanceProfileV3 { version, facts, name, capabilities: 0 })
        }
        _ => Err(Status::ARGUMENT_VERSION_MISMATCH),
    }
}

pub fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
    library: &Library,
    instance: GpuInstanceHandle,
    profile: u32,
    count: Out<u32>,
) -> Result {
    let session = library.session()?;
    let (_, mig, instance, of) = session.instance(instance)?;
    compute_by_index(&of, profile, 0).map_err(|_| Status::NOT_SUPPORTED)?;
    count.required()?.set(mig.compute_capacity(instance.epoch, profile)?)
}

pub fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
    library: &Library,
    instance: GpuInstanceHandle,
    profile: u32,
    list: Out<Placement>,
    count: Out<u32>,
) -> Result {
    let session = library.session()?;
    let (_, _, _, of) = session.instance(instance)?;
    let kind = compute_by_index(&of, profile, 0).map_err(|_| Status::NOT_SUPPORTED)?;
    count.set(u32::try_from(kind.starts.len()).map_err(|_| Status::UNKNOWN)?)?;
    if !list.is_given() {
        return Ok(());
    }
    let size = kind.slices;
    let mut places = kind.starts.iter().enumerate();
    places.try_for_each(|(index, start)| list.set_at(index, Placement { start: *start, size }))
}

fn create_compute(
    library: &Library,
    instance: GpuInstanceHandle,
    profile: u32,
    placement: Option<Placement>,
    made: Out<ComputeInstanceHandle>,
) -> Result {
    let session = library.session()?;
    let (index, mig, instance, of) = session.instance(instance)?;
    let made = made.required()?;
    let kind = compute_by_index(&of, profile, 0).map_err(|_| Status::NOT_SUPPORTED)?;
    if placement.is_some_and(|placement| placement.size != kind.slices) {
        return Err(Status::INVALID_ARGUMENT);
    }
    let compute = mig.create_compute(instance.epoch, profile, placement.map(|placement| placement.start))?;
    made.set(compute_handle(index, instance.epoch, compute.id)?)
}

pub fn nvmlGpuInstanceCreateComputeInstance(
    library: &Library,
    instance: GpuInstanceHandle,
    profile: u32,
    made: Out<ComputeInstanceHandle>,
) -> Result {
    create_compute(library, instance, profile, None, made)
}

pub fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
    library: &Library,
    instance: GpuInstanceHandle,
    profile: u32,
    placement: Out<Placement>,
    made: Out<ComputeInstanceHandle>,
) -> Result {
    library.session()?;
    create_compute(library, instance, profile, Some(placement.get()?), made)
}

pub fn nvmlComputeInstanceDestroy(library: &Library, instance: ComputeInstanceHandle) -> Result {
    let session = library.session()?;
    let (_, mig, part) = session.compute_instance(instance)?;
    mig.destroy_compute(part.instance.epoch, part.compute.id)
}

/// The caller has room for the maximum number of instances of the profile.
pub fn nvmlGpuInstanceGetComputeInstances(
    library: &Library,
    instance: GpuInstanceHandle,
    profile: u32,
    list: Out<ComputeInstanceHandle>,
    count: Out<u32>,
) -> Result {
    let session = library.session()?;
    let (index, _, instance, of) = session.instance(instance)?;
    compute_by_index(&of, profile, 0).map_err(|_| Status::NOT_SUPPORTED)?;
    let (list, count) = (list.required()?, count.required()?);
    let mut found = instance.compute.clone();
    found.retain(|compute| compute.profile == profile);
    count.set(u32::try_from(found.len()).map_err(|_| Status::UNKNOWN)?)?;
    let mut found = found.iter().enumerate();
    found.try_for_each(|(place, compute)| {
        list.set_at(place, compute_handle(index, instance.epoch, compute.id)?)
    })
}

pub fn nvmlGpuInstanceGetComputeInstanceById(
    library: &Library,
    instance: GpuInstanceHandle,
    id: u32,
    found: Out<ComputeInstanceHandle>,
) -> Result {
    let session = library.session()?;
    let (index, _, instance, _) = session.instance(instance)?;
    let place = found.required()?;
    let there = instance.compute.iter().any(|compute| compute.id == id);
    if !there {
        return Err(Status::NOT_FOUND);
    }
    place.set(compute_handle(index, instance.epoch, id)?)
}

pub fn nvmlComputeInstanceGetInfo_v2(
    library: &Library,
    instance: ComputeInstanceHandle,
    info: Out<ComputeInstanceInfo>,
) -> Result {
    let session = library.session()?;
    let (index, _, part) = session.compute_instance(instance)?;
    info.set(ComputeInstanceInfo {
        device: gpu_handle(index)?,
        gpu_instance: instance_handle(index, &part.instance)?,
        id: part.compute.id,
        profile: part.compute.profile,
        placement: Placement { start: part.compute.start, size: part.kind()?.slices },
    })
}

/// In the first form the structure ends before the placement.
pub fn nvmlComputeInstanceGetInfo(
    library: &Library,
    instance: ComputeInstanceHandle,
    info: Out<ComputeInstanceInfo>,
) -> Result {
    let session = library.session()?;
    let (index, _, part) = session.compute_instance(instance)?;
    let whole = ComputeInstanceInfo {
        device: gpu_handle(index)?,
        gpu_instance: instance_handle(index, &part.instance)?,
        id: part.compute.id,
        profile: part.compute.profile,
        placement: Placement::default(),
    };
    info.set_first(&whole, core::mem::offset_of!(ComputeInstanceInfo, placement))
}

// --- Devices on instances --------------------------------------------------------------------------------------------

pub fn nvmlDeviceGetMigDeviceHandleByIndex(
    library: &Library,
    device: DeviceHandle,
    index: u32,
    instance: Out<DeviceHandle>,
) -> Result {
    let session = library.session()?;
    let (place, gpu) = session.gpu(device)?;
    let instance = instance.required()?;
    let found = devices(place, gpu)?.get(index as usize).map(|(handle, _)| *handle);
    instance.set(found.ok_or(Status::NOT_FOUND)?)
}

pub fn nvmlDeviceIsMigDeviceHandle(library: &Library, device: DeviceHandle, answer: Out<u32>) -> Result {
    let session = library.session()?;
    answer.required()?.set(u32::from(session.target(device)?.part.is_some()))
}

pub fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    library: &Library,
    device: DeviceHandle,
    parent: Out<DeviceHandle>,
) -> Result {
    let session = library.session()?;
    let target = session.target(device)?;
    target.part.ok_or(Status::INVALID_ARGUMENT)?;
    parent.set(gpu_handle(target.index)?)
}

pub fn nvmlDeviceGetGpuInstanceId(library: &Library, device: DeviceHandle, id: Out<u32>) -> Result {
    let session = library.session()?;
    id.set(session.target(device)?.part.ok_or(Status::NOT_SUPPORTED)?.instance.id)
}

pub fn nvmlDeviceGetComputeInstanceId(library: &Library, device: DeviceHandle, id: Out<u32>) -> Result {
    let session = library.session()?;
    id.set(session.target(device)?.part.ok_or(Status::NOT_SUPPORTED)?.compute.id)
}

pub fn nvmlDeviceGetAttributes_v2(
    library: &Library,
    device: DeviceHandle,
    attributes: Out<DeviceAttributes>,
) -> Result {
    let session = library.session()?;
    let part = session.target(device)?.part.ok_or(Status::NOT_SUPPORTED)?;
    let kind = part.kind()?;
    attributes.set(DeviceAttributes {
        multiprocessors: kind.multiprocessors,
        engines: part.profile.engines,
        gpu_slices: part.profile.slices,
        compute_slices: kind.slices,
        memory_mib: mib(part.profile.memory),
    })
}

pub fn nvmlDeviceGetAttributes(
    library: &Library,
    device: DeviceHandle,
    attributes: Out<DeviceAttributes>,
) -> Result {
    nvmlDeviceGetAttributes_v2(library, device, attributes)
}
