//! The slots of a device: one for each process that uses it, as an *owner*. A slot belongs to the open file that holds the lock
//! on its byte. The kernel releases that lock however the process ends.
//!
//! [`owners`](crate::owners) takes and leaves slots, and [`instances`](crate::instances) checks whether one is taken. This module
//! decides which owners are alive and has the records drop the holds of dead ones. It never touches pages itself.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::device::Device;
use crate::header::{OWNERS, owner_byte};
use crate::records::Held;
use crate::sys;

/// The interface that an owner uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// CUDA: it computes, and holds memory.
    Cuda,
    /// NVML: it only observes.
    Nvml,
}

/// The instance that an owner is confined to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confinement {
    /// Epoch of the GPU instance.
    pub epoch: u32,
    /// Id of the GPU instance.
    pub gpu: u32,
    /// Id of the compute instance.
    pub compute: u32,
}

impl Confinement {
    /// Encodes the confinement for an owner's slot; 0 means the whole device.
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

/// A process that uses the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Process id, in the PID namespace from which the process attached.
    pub pid: u32,
    /// True if that is the namespace of the calling process; otherwise the id has no meaning here.
    pub same_namespace: bool,
    /// Interface that the process uses. A process that uses both has two entries.
    pub client: Client,
    /// Instance that the process is confined to, if any.
    pub confinement: Option<Confinement>,
    /// Number of living contexts.
    pub contexts: u64,
    /// Memory that the process holds.
    pub held: Held,
    /// Total run time of its kernels.
    pub busy_nanoseconds: u64,
    /// Number of completed launches.
    pub launches: u64,
}

/// The permission to open files: given at start-up; later not every process has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Files {
    MayOpen,
    Keep,
}

/// A process cannot become an owner.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Every slot is taken by a living process.
    #[error("{OWNERS} processes use the device already")]
    Full,
    /// The kernel refused the lock.
    #[error("cannot lock an owner slot: {0}")]
    Lock(#[from] io::Error),
    /// The device is divided, so that only its instances can be used.
    #[error("the device is divided into instances")]
    Divided,
    /// The instance does not exist.
    #[error("there is no such instance")]
    Gone,
}

impl Device {
    /// Takes a slot for this process, after giving back the memory of dead owners.
    pub(crate) fn take_slot(
        &self,
        client: Client,
        confinement: Option<Confinement>,
    ) -> Result<usize, AttachError> {
        self.reap(Files::MayOpen);
        let mut own_slots = self.own_slots.lock().unwrap_or_else(PoisonError::into_inner);
        for (slot, words) in self.header.owners().iter().enumerate() {
            // The lock of this process's own slot would not conflict.
            if own_slots.contains(&slot) || !sys::try_lock_byte(&self.header_file, owner_byte(slot), true)? {
                continue;
            }
            // This process has the lock, so a pid in the slot is that of a dead owner that was not reaped yet.
            if words.pid.load(Acquire) != 0 {
                self.clear_owner(slot);
            }
            words.start_time.store(sys::start_time(std::process::id()).unwrap_or(0), Relaxed);
            words.namespace.store(self.namespace.unwrap_or(0), Relaxed);
            words.client.store(if client == Client::Cuda { 1 } else { 2 }, Relaxed);
            words.instance.store(Confinement::word(confinement), Relaxed);
            words.busy_nanoseconds.store(0, Relaxed);
            words.launches.store(0, Relaxed);
            words.contexts.store(0, Relaxed);
            words.running.store(0, Relaxed);
            words.starved.store(0, Relaxed);
            words.pid.store(u64::from(std::process::id()), Release);
            own_slots.push(slot);
            return Ok(slot);
        }
        Err(AttachError::Full)
    }

    /// Leaves a slot of this process and releases everything that it held.
    pub(crate) fn leave_slot(&self, slot: usize) {
        let mut own_slots = self.own_slots.lock().unwrap_or_else(PoisonError::into_inner);
        self.clear_owner(slot);
        own_slots.retain(|own| *own != slot);
        // Closing the file releases the lock too; until then the slot merely stays unused.
        let _ = sys::unlock_byte(&self.header_file, owner_byte(slot));
    }

    /// Gives back the memory of dead owners. Costs one system call per used slot if none has died.
    pub(crate) fn reap(&self, files: Files) {
        let own_slots = self.own_slots.lock().unwrap_or_else(PoisonError::into_inner);
        for (slot, words) in self.header.owners().iter().enumerate() {
            if words.pid.load(Acquire) == 0 || own_slots.contains(&slot) {
                continue;
            }
            match sys::byte_is_locked(&self.header_file, owner_byte(slot)) {
                Ok(false) => {
                    // If another reaper or the slot's next owner was faster, the slot belongs to it.
                    if let Ok(true) = sys::try_lock_byte(&self.header_file, owner_byte(slot), true) {
                        self.clear_owner(slot);
                        // Closing the file releases the lock too; until then the slot merely stays unused.
                        let _ = sys::unlock_byte(&self.header_file, owner_byte(slot));
                    }
                }
                // A forked child may keep its dead parent's lock, so the process id is checked as well.
                Ok(true) if self.is_dead(slot, files) => self.clear_owner(slot),
                _ => {}
            }
        }
        self.finish_interrupted();
    }

    /// Gives back the memory of dead processes, so that the figures are those of living ones. Opens no file.
    pub fn collect(&self) {
        self.reap(Files::Keep);
    }

    /// Removes every trace of an owner. May be repeated, and interrupted.
    fn clear_owner(&self, slot: usize) {
        self.drop_holder(slot);
        self.header.owners()[slot].pid.store(0, Release);
    }

    /// True if the process of a slot is certainly dead. Without `/proc`, a reused pid counts as alive.
    fn is_dead(&self, slot: usize, files: Files) -> bool {
        let words = &self.header.owners()[slot];
        let (pid, since) = (words.pid.load(Acquire), words.start_time.load(Relaxed));
        if self.namespace.is_none_or(|own| own != words.namespace.load(Relaxed)) {
            return false;
        }
        let Ok(pid) = u32::try_from(pid) else { return false };
        !sys::process_exists(pid)
            || files == Files::MayOpen && since != 0 && sys::start_time(pid).is_some_and(|now| now != since)
    }

    /// True if another process than this one may compute on the device.
    pub(crate) fn others_compute(&self) -> bool {
        let own_slots = self.own_slots.lock().unwrap_or_else(PoisonError::into_inner);
        let mut owners = self.header.owners().iter().enumerate();
        owners.any(|(slot, words)| {
            words.pid.load(Acquire) != 0 && words.client.load(Relaxed) == 1 && !own_slots.contains(&slot)
        })
    }

    /// The clients in all slots, with their confinement.
    pub(crate) fn clients(&self) -> impl Iterator<Item = (Client, Option<Confinement>)> {
        let taken = self.header.owners().iter().filter(|words| words.pid.load(Acquire) != 0);
        taken.map(|words| {
            let client = if words.client.load(Relaxed) == 1 { Client::Cuda } else { Client::Nvml };
            (client, Confinement::of_word(words.instance.load(Relaxed)))
        })
    }

    /// Returns the living processes that use the device. Opens files.
    #[must_use]
    pub fn processes(&self) -> Vec<Process> {
        self.reap(Files::MayOpen);
        let owners = self.header.owners().iter().enumerate();
        owners
            .filter_map(|(slot, words)| {
                let pid = u32::try_from(words.pid.load(Acquire)).ok().filter(|pid| *pid != 0)?;
                Some(Process {
                    pid,
                    same_namespace: self.namespace == Some(words.namespace.load(Relaxed)),
                    client: if words.client.load(Relaxed) == 1 { Client::Cuda } else { Client::Nvml },
                    confinement: Confinement::of_word(words.instance.load(Relaxed)),
                    contexts: words.contexts.load(Relaxed),
                    held: self.held_by(&[slot]),
                    busy_nanoseconds: words.busy_nanoseconds.load(Relaxed),
                    launches: words.launches.load(Relaxed),
                })
            })
            .collect()
    }

    /// Returns the memory that several processes hold together: an allocation with several holders counts once. `imported` counts
    /// allocations that none of them made.
    #[must_use]
    pub fn held_together(&self, processes: &[u32]) -> Held {
        let is_one = |pid: u64| processes.iter().any(|process| u64::from(*process) == pid);
        let owners = self.header.owners().iter().enumerate();
        let slots: Vec<usize> =
            owners.filter(|(_, words)| is_one(words.pid.load(Acquire))).map(|(slot, _)| slot).collect();
        self.held_by(&slots)
    }
}
