//! Instances: a device divided into parts of its memory and its processors, as every process that uses it sees it.
//!
//! The state lives in the header, in two copies of which one counts: a process that changes it writes the other and then
//! switches, under a lock that the kernel releases when its holder dies. So a process killed anywhere leaves the old state or
//! the new one. Readers do not need the lock.
//!
//! An instance owns the pages of `hbm` that its memory slices stand for. Like all memory here they are never cleared: a new
//! instance finds the content that the last one there has left. Each GPU instance has an *epoch* that no other ever had, since
//! ids and, if so configured, UUIDs come back as on hardware.

use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use crate::PAGE_BYTES;
use crate::device::Device;
use crate::geometry::{ComputeProfile, Geometry, Profile};
use crate::header::INSTANCE_WORDS;
use crate::owners::{Client, Files};
use crate::sys;

/// Instances of a device, and compute instances of one of those: more than any geometry allows.
const MOST: usize = 16;
/// Words of a compute instance, of a GPU instance, and before the first one.
const COMPUTE_WORDS: usize = 3;
const GPU_WORDS: usize = 2 + MOST * COMPUTE_WORDS;
const HEAD_WORDS: usize = 2;
const _: () = assert!(HEAD_WORDS + MOST * GPU_WORDS <= INSTANCE_WORDS);

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInstance {
    /// Which of all GPU instances that this device ever had.
    pub epoch: u32,
    /// Its number among those of the device: where it lies says which.
    pub id: u32,
    /// The id of its profile.
    pub profile: u32,
    /// Its first memory slice.
    pub start: u32,
    /// The compute instances in it.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance: what a program sees as a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeInstance {
    /// Its number among those of its GPU instance.
    pub id: u32,
    /// The number of its profile.
    pub profile: u32,
    /// Its first compute slice.
    pub start: u32,
    /// Its UUID.
    pub uuid: [u8; 16],
}

/// The instance that an owner is confined to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confinement {
    /// The epoch of the GPU instance.
    pub epoch: u32,
    /// Its number.
    pub gpu: u32,
    /// The number of the compute instance.
    pub compute: u32,
}

impl Confinement {
    /// The word in an owner's slot; 0 stands for the whole device.
    pub(crate) fn word(confinement: Option<Confinement>) -> u64 {
        confinement.map_or(0, |Confinement { epoch, gpu, compute }| {
            u64::from(epoch) << 32 | u64::from(gpu & 0xffff) << 16 | u64::from(compute & 0xffff)
        })
    }

    pub(crate) fn of_word(word: u64) -> Option<Confinement> {
        let [c0, c1, g0, g1, e0, e1, e2, e3] = word.to_le_bytes();
        let epoch = Some(u32::from_le_bytes([e0, e1, e2, e3])).filter(|epoch| *epoch != 0)?;
        let half = |low, high| u32::from(u16::from_le_bytes([low, high]));
        Some(Confinement { epoch, gpu: half(g0, g1), compute: half(c0, c1) })
    }
}

/// Something about instances cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    /// The model has no instances.
    #[error("the model cannot be divided")]
    Indivisible,
    /// The device is not divided now.
    #[error("the device is not divided")]
    Undivided,
    /// There is no such profile, or it cannot be there.
    #[error("no such profile, or no such place for it")]
    Invalid,
    /// No room.
    #[error("no room for another instance of that profile")]
    Full,
    /// Somebody uses it.
    #[error("in use")]
    InUse,
    /// It is gone.
    #[error("there is no such instance")]
    Gone,
    /// The kernel refuses the lock, or random numbers.
    #[error(transparent)]
    Kernel(#[from] io::Error),
}

/// What stands in the header.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct State {
    divided: bool,
    /// The last epoch that was given.
    epoch: u32,
    instances: Vec<GpuInstance>,
}

impl State {
    fn read(words: &[AtomicU64]) -> State {
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
        State { divided: word(0) != 0, epoch: low(word(1)), instances }
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

    /// The places of a profile where an instance would fit now.
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

/// The kinds of compute instances that fit, with where.
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

/// The wanted place, or without a wish the first that is free: legal, and seldom the best, as drivers choose.
fn choose(wish: Option<u32>, possible: &[u32], free: &[u32]) -> Result<u32, InstanceError> {
    match wish {
        Some(start) if !possible.contains(&start) => Err(InstanceError::Invalid),
        Some(start) => free.contains(&start).then_some(start).ok_or(InstanceError::Full),
        None => free.first().copied().ok_or(InstanceError::Full),
    }
}

impl Device {
    /// How the device can be divided; `None` where it cannot.
    #[must_use]
    pub fn geometry(&self) -> Option<&'static Geometry> {
        let model = self.identity().model;
        if model.mig { Geometry::find(model.key) } else { None }
    }

    fn state(&self) -> State {
        let words = self.header.instances();
        loop {
            let valid = words.valid.load(Acquire);
            let state = State::read(&words.copies[usize::from(valid % 2 == 1)]);
            fence(Acquire);
            if words.valid.load(Relaxed) == valid {
                return state;
            }
        }
    }

    /// Changes the state, or leaves it as it is when the change fails.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut State) -> Result<T, InstanceError>,
    ) -> Result<T, InstanceError> {
        self.exclusively(|| {
            let mut state = self.state();
            let result = change(&mut state)?;
            let words = self.header.instances();
            let next = words.valid.load(Relaxed).wrapping_add(1);
            // Whoever reads this copy meanwhile will find that it did not count.
            fence(SeqCst);
            state.write(&words.copies[usize::from(next % 2 == 1)]);
            words.valid.store(next, Release);
            Ok(result)
        })?
    }

    /// Runs something while no other process changes instances or begins to use one.
    pub(crate) fn exclusively<T>(&self, run: impl FnOnce() -> T) -> io::Result<T> {
        let _own = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        sys::lock_file(&self.directory)?;
        let result = run();
        sys::unlock_file(&self.directory)?;
        Ok(result)
    }

    /// Whether the device is divided: then there is nothing to use but instances.
    #[must_use]
    pub fn is_divided(&self) -> bool {
        self.state().divided
    }

    /// Divides the device, or puts it together again. Nobody may use it meanwhile.
    ///
    /// # Errors
    /// [`InstanceError`] when it cannot be divided, or is in use, or has instances.
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

    /// Forgets all instances, as a reset does; it stays divided.
    ///
    /// # Errors
    /// [`InstanceError`] when the device is in use.
    pub fn reset(&self) -> Result<(), InstanceError> {
        self.change(|state| {
            if self.is_used(|_| true) {
                return Err(InstanceError::InUse);
            }
            state.instances.clear();
            Ok(())
        })
    }

    /// Whether somebody computes here. Under the lock: otherwise it may have changed.
    fn is_used(&self, here: impl Fn(Option<Confinement>) -> bool) -> bool {
        self.reap(Files::Keep);
        self.clients().any(|(client, confinement)| client == Client::Cuda && here(confinement))
    }

    /// The instances there are.
    #[must_use]
    pub fn instances(&self) -> Vec<GpuInstance> {
        self.state().instances
    }

    fn known(&self, profile: u32) -> Result<(&'static Geometry, &'static Profile), InstanceError> {
        let geometry = self.geometry().ok_or(InstanceError::Indivisible)?;
        Ok((geometry, geometry.profile(profile).ok_or(InstanceError::Invalid)?))
    }

    /// Where instances of a profile can be, used or not; nothing while there are as many as there can be.
    ///
    /// # Errors
    /// [`InstanceError`] when there is no such profile.
    pub fn places(&self, profile: u32) -> Result<Vec<u32>, InstanceError> {
        let (_, known) = self.known(profile)?;
        let same = self.instances().iter().filter(|instance| instance.profile == profile).count();
        Ok(if same >= known.instances as usize { Vec::new() } else { known.starts.clone() })
    }

    /// How many more instances of a profile fit now.
    ///
    /// # Errors
    /// [`InstanceError`] when the device is not divided, or there is no such profile.
    pub fn capacity(&self, profile: u32) -> Result<u32, InstanceError> {
        let (geometry, known) = self.known(profile)?;
        let mut state = self.state();
        if !state.divided {
            return Err(InstanceError::Undivided);
        }
        let mut count = 0;
        // All have one size, so taking the first place each time leaves the most.
        while let Some(start) = state.room(geometry, known).first() {
            let (start, epoch) = (*start, u32::MAX);
            state.instances.push(GpuInstance { epoch, id: 0, profile, start, compute: Vec::new() });
            count += 1;
        }
        Ok(count)
    }

    /// Makes an instance, at that first slice if one is given. There is nothing in it yet.
    ///
    /// # Errors
    /// [`InstanceError`] when it cannot be.
    pub fn create_instance(&self, profile: u32, start: Option<u32>) -> Result<GpuInstance, InstanceError> {
        let (geometry, known) = self.known(profile)?;
        self.change(|state| {
            if !state.divided {
                return Err(InstanceError::Undivided);
            }
            let start = choose(start, &known.starts, &state.room(geometry, known))?;
            state.epoch += 1;
            // As hardware numbers them: halves behind the whole, quarters behind halves.
            let id = geometry.memory_slices / known.size - 1 + start / known.size;
            let instance = GpuInstance { epoch: state.epoch, id, profile, start, compute: Vec::new() };
            state.instances.push(instance.clone());
            Ok(instance)
        })
    }

    /// Unmakes an instance in which there is nothing any more.
    ///
    /// # Errors
    /// [`InstanceError`] when it is in use, or not there.
    pub fn destroy_instance(&self, epoch: u32) -> Result<(), InstanceError> {
        self.change(|state| {
            if !state.get(epoch)?.compute.is_empty() {
                return Err(InstanceError::InUse);
            }
            state.instances.retain(|instance| instance.epoch != epoch);
            Ok(())
        })
    }

    /// How many more compute instances of a kind fit into an instance, and where the first would be.
    ///
    /// # Errors
    /// [`InstanceError`] when there is no such instance or kind.
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

    /// Makes a compute instance, at that first compute slice if one is given.
    ///
    /// # Errors
    /// [`InstanceError`] when it cannot be.
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

    /// Unmakes a compute instance that nobody uses.
    ///
    /// # Errors
    /// [`InstanceError`] when it is in use, or not there.
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

    /// New at each creation, or by what it is called alone, if so configured: real drivers may do either.
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

    /// Pages of an instance of a profile: those of the hardware's, scaled, and never more than its slices have.
    #[must_use]
    pub fn profile_pages(&self, profile: &Profile) -> u64 {
        let identity = self.identity();
        let slices = self.geometry().map_or(1, |geometry| geometry.memory_slices);
        let scaled = profile.memory_mib / 2 / identity.scale;
        scaled.min(identity.pages * u64::from(profile.size) / u64::from(slices)).max(1)
    }

    /// The pages of an instance.
    #[must_use]
    pub fn instance_pages(&self, instance: &GpuInstance) -> Range<u64> {
        let Ok((geometry, profile)) = self.known(instance.profile) else { return 0..0 };
        let first = self.identity().pages * u64::from(instance.start) / u64::from(geometry.memory_slices);
        first..first + self.profile_pages(profile)
    }

    /// Total and used bytes of an instance.
    #[must_use]
    pub fn instance_memory(&self, instance: &GpuInstance) -> (u64, u64) {
        let pages = self.instance_pages(instance);
        let total = (pages.end - pages.start) * PAGE_BYTES;
        (total, total - self.free_bytes_in(pages))
    }
}
