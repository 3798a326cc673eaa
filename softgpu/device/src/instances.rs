//! Instances: the division of a device into parts of its memory and its processors, shared by all processes that use it.
//!
//! The state is stored in the header, in two copies of which one is valid: a process that changes it writes the other and then
//! switches, under a lock that the kernel releases when its holder dies. So a process killed at any point leaves the old state or
//! the new one. Readers do not need the lock.
//!
//! An instance owns the pages of `hbm` of its memory slices. Like all memory here they are never cleared: a new instance finds
//! the content that the last one left there. Each GPU instance has an *epoch* that is never used again, since ids and, if so
//! configured, UUIDs are used again, as on hardware.

use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use crate::PAGE_BYTES;
use crate::device::Device;
use crate::geometry::{ComputeProfile, Geometry, Profile};
use crate::header::INSTANCE_WORDS;
use crate::slots::{Client, Confinement, Files};
use crate::sys;

/// Maximum number of GPU instances of a device, and of compute instances of a GPU instance: more than any geometry allows.
const MOST: usize = 16;
/// Words of a compute instance, of a GPU instance, and before the first one.
const COMPUTE_WORDS: usize = 3;
const GPU_WORDS: usize = 2 + MOST * COMPUTE_WORDS;
const HEAD_WORDS: usize = 2;
const _: () = assert!(HEAD_WORDS + MOST * GPU_WORDS <= INSTANCE_WORDS);

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInstance {
    /// Number among all GPU instances that this device ever had; never used again.
    pub epoch: u32,
    /// Id within the device; it follows from the position.
    pub id: u32,
    /// Id of its profile.
    pub profile: u32,
    /// First memory slice.
    pub start: u32,
    /// Compute instances in it.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance, which a program sees as a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeInstance {
    /// Id within its GPU instance.
    pub id: u32,
    /// Index of its profile.
    pub profile: u32,
    /// First compute slice.
    pub start: u32,
    /// UUID of the instance.
    pub uuid: [u8; 16],
}

/// A change or query of instances failed.
#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    /// The model has no instances.
    #[error("the model cannot be divided")]
    Indivisible,
    /// The device is not divided.
    #[error("the device is not divided")]
    Undivided,
    /// The profile does not exist, or cannot be at the requested position.
    #[error("the profile does not exist, or cannot be at that position")]
    Invalid,
    /// There is no room.
    #[error("no room for another instance of that profile")]
    Full,
    /// A process uses the instance or device.
    #[error("the device or the instance is in use")]
    InUse,
    /// The instance does not exist.
    #[error("there is no such instance")]
    Gone,
    /// The kernel refused the lock, or random numbers.
    #[error(transparent)]
    Kernel(#[from] io::Error),
}

/// The decoded state of the header.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct InstancesState {
    divided: bool,
    /// Last epoch that was assigned.
    epoch: u32,
    instances: Vec<GpuInstance>,
}

impl InstancesState {
    fn read(words: &[AtomicU64]) -> InstancesState {
        let word = |at: usize| words[at].load(Relaxed);
        let low = |word: u64| (word & 0xffff_ffff) as u32;
        let high = |word: u64| (word >> 32) as u32;
        let mut instances = Vec::new();
        for slot in 0..MOST {
            let at = HEAD_WORDS + slot * GPU_WORDS;
            let epoch = high(word(at));
            if epoch == 0 {
                continue;
            }
            let compute = (0..MOST).filter_map(|slot| {
                let at = at + 2 + slot * COMPUTE_WORDS;
                let [a, b, c, d, ..] = word(at).to_le_bytes();
                let mut uuid = [0; 16];
                uuid[..8].copy_from_slice(&word(at + 1).to_le_bytes());
                uuid[8..].copy_from_slice(&word(at + 2).to_le_bytes());
                (a != 0).then(|| ComputeInstance { id: b.into(), profile: c.into(), start: d.into(), uuid })
            });
            instances.push(GpuInstance {
                epoch,
                id: low(word(at)),
                profile: low(word(at + 1)),
                start: high(word(at + 1)),
                compute: compute.collect(),
            });
        }
        InstancesState { divided: word(0) != 0, epoch: low(word(1)), instances }
    }

    fn write(&self, words: &[AtomicU64]) {
        let mut next = vec![0u64; INSTANCE_WORDS];
        next[0] = u64::from(self.divided);
        next[1] = self.epoch.into();
        for (slot, instance) in self.instances.iter().enumerate().take(MOST) {
            let at = HEAD_WORDS + slot * GPU_WORDS;
            next[at] = u64::from(instance.epoch) << 32 | u64::from(instance.id);
            next[at + 1] = u64::from(instance.start) << 32 | u64::from(instance.profile);
            for (slot, compute) in instance.compute.iter().enumerate().take(MOST) {
                let at = at + 2 + slot * COMPUTE_WORDS;
                let byte = |number: u32| u8::try_from(number).unwrap_or(u8::MAX);
                let facts = [1, byte(compute.id), byte(compute.profile), byte(compute.start), 0, 0, 0, 0];
                next[at] = u64::from_le_bytes(facts);
                for (word, half) in next[at + 1..].iter_mut().zip(compute.uuid.as_chunks::<8>().0) {
                    *word = u64::from_le_bytes(*half);
                }
            }
        }
        for (word, value) in words.iter().zip(next) {
            word.store(value, Relaxed);
        }
    }

    fn get(&mut self, epoch: u32) -> Result<&mut GpuInstance, InstanceError> {
        self.instances.iter_mut().find(|instance| instance.epoch == epoch).ok_or(InstanceError::Gone)
    }

    /// The positions at which an instance of a profile fits now.
    fn room<'a>(&self, geometry: &'a Geometry, profile: &'a Profile) -> Vec<u32> {
        let of = |instance: &GpuInstance| geometry.profile(instance.profile);
        let (mut slices, mut same, mut media) = (0, 0, false);
        for other in self.instances.iter().filter_map(of) {
            slices += other.slices;
            same += u32::from(other.id == profile.id);
            media |= other.media;
        }
        if same >= profile.instances
            || slices + profile.slices > geometry.compute_slices
            || media && profile.media
        {
            return Vec::new();
        }
        let free = |start: &&u32| {
            self.instances.iter().all(|instance| {
                let end = instance.start + of(instance).map_or(0, |other| other.size);
                end <= **start || **start + profile.size <= instance.start
            })
        };
        profile.starts.iter().filter(free).copied().collect()
    }
}

/// The positions at which a compute instance of a profile fits now.
fn compute_room(instance: &GpuInstance, profile: &Profile, kind: &ComputeProfile) -> Vec<u32> {
    let of = |other: &ComputeInstance| profile.compute(other.profile);
    let same = instance.compute.iter().filter(|other| other.profile == kind.index).count();
    let taken: u32 = instance.compute.iter().filter_map(of).map(|other| other.multiprocessors).sum();
    if same >= kind.instances as usize || taken + kind.multiprocessors > profile.multiprocessors {
        return Vec::new();
    }
    let free = |start: &&u32| {
        instance.compute.iter().all(|other| {
            let end = other.start + of(other).map_or(0, |other| other.slices);
            end <= **start || **start + kind.slices <= other.start
        })
    };
    kind.starts.iter().filter(free).copied().collect()
}

/// The requested position, or the first free one if none is requested: drivers choose so too, and seldom choose the best.
fn choose(wish: Option<u32>, possible: &[u32], free: &[u32]) -> Result<u32, InstanceError> {
    match wish {
        Some(start) if !possible.contains(&start) => Err(InstanceError::Invalid),
        Some(start) => free.contains(&start).then_some(start).ok_or(InstanceError::Full),
        None => free.first().copied().ok_or(InstanceError::Full),
    }
}

impl Device {
    /// Returns the possible divisions of the device; `None` if it cannot be divided.
    #[must_use]
    pub fn geometry(&self) -> Option<&'static Geometry> {
        let model = self.identity().model;
        model.division.and_then(Geometry::find)
    }

    fn state(&self) -> InstancesState {
        let words = self.header.instances();
        loop {
            let valid = words.valid.load(Acquire);
            let state = InstancesState::read(&words.copies[usize::from(valid % 2 == 1)]);
            fence(Acquire);
            if words.valid.load(Relaxed) == valid {
                return state;
            }
        }
    }

    /// Changes the state. If `change` fails, the state stays as it is.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut InstancesState) -> Result<T, InstanceError>,
    ) -> Result<T, InstanceError> {
        self.exclusively(|| {
            let mut state = self.state();
            let result = change(&mut state)?;
            let words = self.header.instances();
            let next = words.valid.load(Relaxed).wrapping_add(1);
            // A process that reads this copy meanwhile finds that it was not valid.
            fence(SeqCst);
            state.write(&words.copies[usize::from(next % 2 == 1)]);
            words.valid.store(next, Release);
            Ok(result)
        })?
    }

    /// Runs a function while no other process changes instances or begins to use one.
    pub(crate) fn exclusively<T>(&self, run: impl FnOnce() -> T) -> io::Result<T> {
        let _own = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        sys::lock_file(&self.directory)?;
        let result = run();
        sys::unlock_file(&self.directory)?;
        Ok(result)
    }

    /// True if the device is divided: programs can then use only its instances.
    #[must_use]
    pub fn is_divided(&self) -> bool {
        self.state().divided
    }

    /// Divides the device, or undoes the division. No process may use the device.
    ///
    /// # Errors
    /// [`InstanceError`] if the device cannot be divided, is in use, or has instances.
    pub fn divide(&self, divided: bool) -> Result<(), InstanceError> {
        self.geometry().ok_or(InstanceError::Indivisible)?;
        self.change(|state| {
            if state.divided != divided && (self.is_used(|_| true) || !state.instances.is_empty()) {
                return Err(InstanceError::InUse);
            }
            state.divided = divided;
            Ok(())
        })
    }

    /// Removes all instances, as a reset does. The device stays divided.
    ///
    /// # Errors
    /// [`InstanceError`] if the device is in use.
    pub fn reset(&self) -> Result<(), InstanceError> {
        self.change(|state| {
            if self.is_used(|_| true) {
                return Err(InstanceError::InUse);
            }
            state.instances.clear();
            Ok(())
        })
    }

    /// True if a process computes here. Callers hold the lock, or the answer may be outdated.
    fn is_used(&self, here: impl Fn(Option<Confinement>) -> bool) -> bool {
        self.reap(Files::Keep);
        self.clients().any(|(client, confinement)| client == Client::Cuda && here(confinement))
    }

    /// Returns all GPU instances.
    #[must_use]
    pub fn instances(&self) -> Vec<GpuInstance> {
        self.state().instances
    }

    fn known(&self, profile: u32) -> Result<(&'static Geometry, &'static Profile), InstanceError> {
        let geometry = self.geometry().ok_or(InstanceError::Indivisible)?;
        Ok((geometry, geometry.profile(profile).ok_or(InstanceError::Invalid)?))
    }

    /// Returns the positions of a profile, used or not; none if the maximum number of instances exists.
    ///
    /// # Errors
    /// [`InstanceError`] if there is no such profile.
    pub fn places(&self, profile: u32) -> Result<Vec<u32>, InstanceError> {
        let (_, known) = self.known(profile)?;
        let same = self.instances().iter().filter(|instance| instance.profile == profile).count();
        Ok(if same >= known.instances as usize { Vec::new() } else { known.starts.clone() })
    }

    /// Returns the number of instances of a profile that still fit.
    ///
    /// # Errors
    /// [`InstanceError`] if the device is not divided, or there is no such profile.
    pub fn capacity(&self, profile: u32) -> Result<u32, InstanceError> {
        let (geometry, known) = self.known(profile)?;
        let mut state = self.state();
        if !state.divided {
            return Err(InstanceError::Undivided);
        }
        let mut count = 0;
        // All have one size, so taking the first position each time leaves the most room.
        while let Some(start) = state.room(geometry, known).first() {
            let (start, epoch) = (*start, u32::MAX);
            state.instances.push(GpuInstance { epoch, id: 0, profile, start, compute: Vec::new() });
            count += 1;
        }
        Ok(count)
    }

    /// Creates an instance, at memory slice `start` if given. It is empty at first.
    ///
    /// # Errors
    /// [`InstanceError`] if the instance cannot be created.
    pub fn create_instance(&self, profile: u32, start: Option<u32>) -> Result<GpuInstance, InstanceError> {
        let (geometry, known) = self.known(profile)?;
        self.change(|state| {
            if !state.divided {
                return Err(InstanceError::Undivided);
            }
            let start = choose(start, &known.starts, &state.room(geometry, known))?;
            state.epoch += 1;
            // The numbering of hardware: the whole, then halves, then quarters.
            let id = geometry.memory_slices / known.size - 1 + start / known.size;
            let instance = GpuInstance { epoch: state.epoch, id, profile, start, compute: Vec::new() };
            state.instances.push(instance.clone());
            Ok(instance)
        })
    }

    /// Destroys an empty instance.
    ///
    /// # Errors
    /// [`InstanceError`] if the instance is in use, or does not exist.
    pub fn destroy_instance(&self, epoch: u32) -> Result<(), InstanceError> {
        self.change(|state| {
            if !state.get(epoch)?.compute.is_empty() {
                return Err(InstanceError::InUse);
            }
            state.instances.retain(|instance| instance.epoch != epoch);
            Ok(())
        })
    }

    /// Returns the number of compute instances of a profile that still fit into a GPU instance.
    ///
    /// # Errors
    /// [`InstanceError`] if there is no such instance or profile.
    pub fn compute_capacity(&self, epoch: u32, kind: u32) -> Result<u32, InstanceError> {
        let mut state = self.state();
        let instance = state.get(epoch)?;
        let (_, profile) = self.known(instance.profile)?;
        let kind = profile.compute(kind).ok_or(InstanceError::Invalid)?;
        let mut count = 0;
        while let Some(start) = compute_room(instance, profile, kind).first() {
            let (start, profile, uuid) = (*start, kind.index, [0; 16]);
            instance.compute.push(ComputeInstance { id: 0, profile, start, uuid });
            count += 1;
        }
        Ok(count)
    }

    /// Creates a compute instance, at compute slice `start` if given.
    ///
    /// # Errors
    /// [`InstanceError`] if the instance cannot be created.
    pub fn create_compute(
        &self,
        epoch: u32,
        kind: u32,
        start: Option<u32>,
    ) -> Result<ComputeInstance, InstanceError> {
        self.change(|state| {
            let instance = state.get(epoch)?;
            let (_, profile) = self.known(instance.profile)?;
            let kind = profile.compute(kind).ok_or(InstanceError::Invalid)?;
            let start = choose(start, &kind.starts, &compute_room(instance, profile, kind))?;
            let taken = |id: &u32| instance.compute.iter().any(|other| other.id == *id);
            let id = (0..).find(|id| !taken(id)).unwrap_or(0);
            let uuid = self.instance_uuid(instance.id, id)?;
            let compute = ComputeInstance { id, profile: kind.index, start, uuid };
            instance.compute.push(compute);
            Ok(compute)
        })
    }

    /// Destroys an unused compute instance.
    ///
    /// # Errors
    /// [`InstanceError`] if the instance is in use, or does not exist.
    pub fn destroy_compute(&self, epoch: u32, id: u32) -> Result<(), InstanceError> {
        self.change(|state| {
            let instance = state.get(epoch)?;
            if !instance.compute.iter().any(|compute| compute.id == id) {
                return Err(InstanceError::Gone);
            }
            let there = Confinement { epoch, gpu: instance.id, compute: id };
            if self.is_used(|confinement| confinement == Some(there)) {
                return Err(InstanceError::InUse);
            }
            instance.compute.retain(|compute| compute.id != id);
            Ok(())
        })
    }

    /// A new UUID at each creation, or one that follows from the ids alone, if so configured: real drivers may do either.
    fn instance_uuid(&self, gpu: u32, compute: u32) -> io::Result<[u8; 16]> {
        let mut uuid = [0; 16];
        if self.same_uuids {
            uuid = self.identity().uuid;
            let [gpu, ..] = (gpu + 1).to_le_bytes();
            let [compute, ..] = (compute + 1).to_le_bytes();
            uuid[9] ^= gpu;
            uuid[10] ^= compute;
        } else {
            sys::random(&mut uuid)?;
        }
        uuid[6] = uuid[6] & 0x0f | 0x50;
        uuid[8] = uuid[8] & 0x3f | 0x80;
        Ok(uuid)
    }

    /// Pages of an instance of a profile: the hardware's, scaled, and at most those of its slices.
    #[must_use]
    pub fn profile_pages(&self, profile: &Profile) -> u64 {
        let identity = self.identity();
        let slices = self.geometry().map_or(1, |geometry| geometry.memory_slices);
        let scaled = profile.memory_mib / 2 / identity.scale;
        scaled.min(identity.pages * u64::from(profile.size) / u64::from(slices)).max(1)
    }

    /// Returns the pages of an instance.
    #[must_use]
    pub fn instance_pages(&self, instance: &GpuInstance) -> Range<u64> {
        let Ok((geometry, profile)) = self.known(instance.profile) else { return 0..0 };
        let first = self.identity().pages * u64::from(instance.start) / u64::from(geometry.memory_slices);
        first..first + self.profile_pages(profile)
    }

    /// Returns the total and used bytes of an instance.
    #[must_use]
    pub fn instance_memory(&self, instance: &GpuInstance) -> (u64, u64) {
        let pages = self.instance_pages(instance);
        let total = (pages.end - pages.start) * PAGE_BYTES;
        (total, total - self.free_bytes_in(pages))
    }
}
