//! Instances: the possible and the present division of a device, and changes of it.
//!
//! No state is kept and no GPU model is assumed: profiles, places and sizes are the driver's answers each time. A
//! compute instance that is all of its GPU instance is found by its resources, never by its number: the number differs where
//! one slice has more than a slice's multiprocessors.

use super::{Nvml, Plain, call, plain, text, uuid, version};
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstanceProfileInfo_t, nvmlDevice_t,
    nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t,
    nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
};
use sluice_messages::inventory::{
    Engines, Instance, InstancePlace, InstancePlaces, InstanceProfile, PLACES, WHOLE,
};
use sluice_nvml_abi::{Result, Status};
use std::ptr::null_mut;

plain!(
    nvmlComputeInstanceInfo_t,
    nvmlComputeInstanceProfileInfo_t,
    nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_t,
    nvmlGpuInstanceProfileInfo_v2_t,
    nvmlGpuInstanceProfileInfo_v3_t,
);

/// Largest number of queried profiles: drivers have seventeen, and report the end.
const PROFILES: u32 = 64;
/// Largest number of queried compute profiles.
const COMPUTE_PROFILES: u32 = 32;
/// Largest length of a list of instances or places, whatever number the driver reports.
const ROOM: usize = 64;

/// A profile and its name.
type Named = (InstanceProfile, String);

fn count(number: u32) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

/// A profile of any version: the fields have the same names.
macro_rules! named {
    ($info:expr, $capabilities:expr, $name:expr) => {{
        let info = $info;
        let profile = InstanceProfile {
            id: info.id,
            slices: info.sliceCount,
            instances: info.instanceCount,
            multiprocessors: info.multiprocessorCount,
            memory: info.memorySizeMB.saturating_mul(1 << 20),
            capabilities: $capabilities,
            engines: Engines {
                copy: count(info.copyEngineCount),
                decoder: count(info.decoderCount),
                encoder: count(info.encoderCount),
                jpeg: count(info.jpegCount),
                ofa: count(info.ofaCount),
            },
        };
        (profile, $name)
    }};
}

impl Nvml {
    /// The profiles of a device; empty if it cannot be divided.
    pub(crate) fn profiles(&self, index: u32) -> Result<Vec<Named>> {
        self.profiles_of(self.device(index)?)
    }

    fn profiles_of(&self, device: nvmlDevice_t) -> Result<Vec<Named>> {
        let mut profiles = Vec::new();
        for number in 0..PROFILES {
            match self.profile(device, number) {
                Ok(profile) => profiles.push(profile),
                // The device does not have this profile, or none at all; then every query fails so.
                Err(Status::NOT_SUPPORTED | Status::FUNCTION_NOT_FOUND) => {}
                // The number is behind the last profile.
                Err(Status::INVALID_ARGUMENT) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(profiles)
    }

    /// The profile with this number. Older drivers report it without a name, and newer ones may name it only while the device is divided.
    fn profile(&self, device: nvmlDevice_t, number: u32) -> Result<Named> {
        let mut newest = nvmlGpuInstanceProfileInfo_v3_t {
            version: version::<nvmlGpuInstanceProfileInfo_v3_t>(3),
            ..Plain::blank()
        };
        let place = (&raw mut newest).cast();
        if call!(self.nvmlDeviceGetGpuInstanceProfileInfoV(device, number, place)).is_ok() {
            return Ok(named!(newest, newest.capabilities, text(&newest.name)));
        }
        let mut second = nvmlGpuInstanceProfileInfo_v2_t {
            version: version::<nvmlGpuInstanceProfileInfo_v2_t>(2),
            ..Plain::blank()
        };
        if call!(self.nvmlDeviceGetGpuInstanceProfileInfoV(device, number, &raw mut second)).is_ok() {
            return Ok(named!(second, second.isP2pSupported, text(&second.name)));
        }
        let mut first = nvmlGpuInstanceProfileInfo_t::blank();
        call!(self.nvmlDeviceGetGpuInstanceProfileInfo(device, number, &raw mut first))?;
        Ok(named!(first, first.isP2pSupported, String::new()))
    }

    /// The profile with this id.
    pub(crate) fn profile_of(&self, index: u32, id: u32) -> Result<Named> {
        let mut profiles = self.profiles(index)?.into_iter();
        profiles.find(|(profile, _)| profile.id == id).ok_or(Status::NOT_FOUND)
    }

    /// The possible places of instances of a profile.
    pub(crate) fn places(&self, index: u32, profile: u32) -> Result<InstancePlaces> {
        let device = self.device(index)?;
        let mut list = [nvmlGpuInstancePlacement_t::blank(); ROOM];
        // The caller sets the length; drivers have eight places at most.
        let mut there = 0;
        call!(self.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
            device,
            profile,
            null_mut(),
            &raw mut there
        ))?;
        if there as usize > PLACES {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        call!(self.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
            device,
            profile,
            list.as_mut_ptr(),
            &raw mut there,
        ))?;
        let given = list.get(..there as usize).ok_or(Status::INSUFFICIENT_SIZE)?;
        let place = |given: &nvmlGpuInstancePlacement_t| {
            Some(InstancePlace {
                start: u8::try_from(given.start).ok()?,
                size: u8::try_from(given.size).ok()?,
            })
        };
        let places: Option<Vec<_>> = given.iter().map(place).collect();
        places.and_then(|places| InstancePlaces::new(&places)).ok_or(Status::UNKNOWN)
    }

    /// The number of further instances of a profile that the driver would make.
    pub(crate) fn capacity(&self, index: u32, profile: u32) -> Result<u32> {
        let device = self.device(index)?;
        let mut count = 0;
        call!(self.nvmlDeviceGetGpuInstanceRemainingCapacity(device, profile, &raw mut count))?;
        Ok(count)
    }

    /// The instances of a device, in the order of their places.
    pub(crate) fn instances(&self, index: u32) -> Result<Vec<Instance>> {
        let device = self.device(index)?;
        let mut all = Vec::new();
        for (profile, _) in self.profiles_of(device)? {
            let mut list = vec![null_mut(); ROOM.max(profile.instances as usize)];
            let mut there = 0;
            match call!(self.nvmlDeviceGetGpuInstances(device, profile.id, list.as_mut_ptr(), &raw mut there))
            {
                Ok(()) => {}
                // The device is not divided now.
                Err(Status::NOT_SUPPORTED) => return Ok(Vec::new()),
                Err(error) => return Err(error),
            }
            for instance in list.into_iter().take(there as usize) {
                match self.describe(device, instance) {
                    Ok(instance) => all.push(instance),
                    // Another process has just removed it.
                    Err(Status::INVALID_ARGUMENT | Status::NOT_FOUND) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        all.sort_unstable_by_key(|instance| (instance.start, instance.gpu));
        Ok(all)
    }

    fn describe(&self, device: nvmlDevice_t, instance: nvmlGpuInstance_t) -> Result<Instance> {
        let mut info = nvmlGpuInstanceInfo_t::blank();
        call!(self.nvmlGpuInstanceGetInfo(instance, &raw mut info))?;
        let (compute, uuid) = match self.compute_instances(instance)?[..] {
            [(_, compute)] => (compute, self.uuid_on(device, info.id, compute)?),
            _ => (WHOLE, [0; 16]),
        };
        let (start, size) = (info.placement.start, info.placement.size);
        Ok(Instance { gpu: info.id, compute, profile: info.profileId, start, size, uuid })
    }

    /// The compute profiles of an instance.
    fn compute_profiles(&self, instance: nvmlGpuInstance_t) -> Result<Vec<nvmlComputeInstanceProfileInfo_t>> {
        const SHARED_ENGINES: u32 = 0;
        let mut kinds = Vec::new();
        for number in 0..COMPUTE_PROFILES {
            let mut kind = nvmlComputeInstanceProfileInfo_t::blank();
            match call!(self.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                instance,
                number,
                SHARED_ENGINES,
                &raw mut kind,
            )) {
                Ok(()) => kinds.push(kind),
                Err(Status::NOT_SUPPORTED) => {}
                Err(Status::INVALID_ARGUMENT) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(kinds)
    }

    /// The compute instances of an instance, with their numbers.
    fn compute_instances(&self, instance: nvmlGpuInstance_t) -> Result<Vec<(nvmlComputeInstance_t, u32)>> {
        let mut all = Vec::new();
        for kind in self.compute_profiles(instance)? {
            let mut list = vec![null_mut(); ROOM.max(kind.instanceCount as usize)];
            let mut there = 0;
            call!(self.nvmlGpuInstanceGetComputeInstances(
                instance,
                kind.id,
                list.as_mut_ptr(),
                &raw mut there
            ))?;
            for compute in list.into_iter().take(there as usize) {
                let mut info = nvmlComputeInstanceInfo_t::blank();
                call!(self.nvmlComputeInstanceGetInfo_v2(compute, &raw mut info))?;
                all.push((compute, info.id));
            }
        }
        Ok(all)
    }

    /// The device that programs see on an instance: on one of its compute instances, or on any.
    pub(super) fn on_instance(
        &self,
        device: nvmlDevice_t,
        instance: u32,
        compute: Option<u32>,
    ) -> Result<nvmlDevice_t> {
        let mut most = 0;
        call!(self.nvmlDeviceGetMaxMigDeviceCount(device, &raw mut most))?;
        for index in 0..most {
            let (mut found, mut gpu, mut inner) = (null_mut(), 0, 0);
            match call!(self.nvmlDeviceGetMigDeviceHandleByIndex(device, index, &raw mut found)) {
                Ok(()) => {}
                Err(Status::NOT_FOUND) => continue,
                Err(error) => return Err(error),
            }
            call!(self.nvmlDeviceGetGpuInstanceId(found, &raw mut gpu))?;
            call!(self.nvmlDeviceGetComputeInstanceId(found, &raw mut inner))?;
            if gpu == instance && compute.is_none_or(|compute| compute == inner) {
                return Ok(found);
            }
        }
        Err(Status::NOT_FOUND)
    }

    fn uuid_on(&self, device: nvmlDevice_t, instance: u32, compute: u32) -> Result<[u8; 16]> {
        let seen = self.on_instance(device, instance, Some(compute))?;
        let mut buffer = [0; super::TEXT as usize];
        call!(self.nvmlDeviceGetUUID(seen, buffer.as_mut_ptr(), super::TEXT))?;
        uuid(&text(&buffer))
    }

    /// Makes an instance in a place, and in it a compute instance that is all of it. If the second fails, the first is removed again.
    pub(crate) fn create(&self, index: u32, profile: u32, start: u32, size: u32) -> Result<Instance> {
        let device = self.device(index)?;
        let (known, _) = self.profile_of(index, profile)?;
        let place = nvmlGpuInstancePlacement_t { start, size };
        let mut made = null_mut();
        call!(self.nvmlDeviceCreateGpuInstanceWithPlacement(
            device,
            profile,
            &raw const place,
            &raw mut made
        ))?;
        let complete = self.fill(made, &known).and_then(|()| self.describe(device, made));
        if let Err(Status(code)) = complete {
            tracing::error!(gpu = index, start, code, "cannot complete an instance");
            if let Err(Status(code)) = self.unmake(made) {
                tracing::error!(gpu = index, start, code, "cannot remove the incomplete instance");
            }
        }
        complete
    }

    /// Makes the compute instance that has all resources of the instance.
    fn fill(&self, instance: nvmlGpuInstance_t, profile: &InstanceProfile) -> Result {
        let all = |kind: &nvmlComputeInstanceProfileInfo_t| {
            (kind.sliceCount, kind.multiprocessorCount) == (profile.slices, profile.multiprocessors)
        };
        let kind = self.compute_profiles(instance)?.into_iter().find(all).ok_or(Status::NOT_SUPPORTED)?;
        let mut made = null_mut();
        call!(self.nvmlGpuInstanceCreateComputeInstance(instance, kind.id, &raw mut made))
    }

    /// Removes exactly the described instance: a number is reused once it is free.
    pub(crate) fn destroy(&self, index: u32, meant: &Meant) -> Result {
        let device = self.device(index)?;
        let mut instance = null_mut();
        call!(self.nvmlDeviceGetGpuInstanceById(device, meant.instance, &raw mut instance))?;
        let mut info = nvmlGpuInstanceInfo_t::blank();
        call!(self.nvmlGpuInstanceGetInfo(instance, &raw mut info))?;
        let there = (info.profileId, info.placement.start, info.placement.size);
        if there != (meant.profile, meant.start, meant.size) {
            tracing::error!(gpu = index, instance = meant.instance, found = ?there, expected = ?meant, "the instance differs from the request");
            return Err(Status::NOT_FOUND);
        }
        self.unmake(instance)
    }

    fn unmake(&self, instance: nvmlGpuInstance_t) -> Result {
        for (compute, _) in self.compute_instances(instance)? {
            call!(self.nvmlComputeInstanceDestroy(compute))?;
        }
        call!(self.nvmlGpuInstanceDestroy(instance))
    }

    /// Switches division on or off. Returns the driver's error if this does not take effect at once.
    pub(crate) fn set_mig(&self, index: u32, on: bool) -> Result {
        let device = self.device(index)?;
        let mut activated = 0;
        call!(self.nvmlDeviceSetMigMode(device, u32::from(on), &raw mut activated))?;
        super::status(activated)
    }
}

/// The requester's description of an instance to remove.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meant {
    pub(crate) instance: u32,
    pub(crate) profile: u32,
    pub(crate) start: u32,
    pub(crate) size: u32,
}
