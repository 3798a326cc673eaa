//! Owners: the processes that use a device. A slot belongs to the open file that holds the lock on its byte, which the kernel
//! releases when the process ends, in whatever way.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::PAGE_BYTES;
use crate::allocations::{Allocation, Held};
use crate::device::Device;
use crate::header::{OWNERS, owner_byte};
use crate::instances::Confinement;
use crate::sys;

/// Which interface an owner uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// It computes, and holds memory.
    Cuda,
    /// It only looks.
    Nvml,
}

/// A process that uses the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Its number, in the PID namespace that it attached from.
    pub pid: u32,
    /// Whether that is the namespace of the process that asks: else the number means nothing to it.
    pub same_namespace: bool,
    /// The interface it uses. A process that uses both is there twice.
    pub client: Client,
    /// The instance it is confined to, if it is.
    pub confinement: Option<Confinement>,
    /// Its living contexts.
    pub contexts: u64,
    /// What it holds.
    pub held: Held,
    /// The time that its kernels have run.
    pub busy_nanoseconds: u64,
    /// Its launches that are over.
    pub launches: u64,
}

/// Whether files may be opened: at start-up yes, later not by every process.
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
    /// The kernel refused.
    #[error("cannot lock an owner slot: {0}")]
    Lock(#[from] io::Error),
    /// It is divided, and nobody can use it as a whole.
    #[error("the device is divided into instances")]
    Divided,
    /// The instance is gone.
    #[error("there is no such instance")]
    Gone,
}

/// This process as an owner of memory of one device. Dropping it, like the death of the process, gives everything back.
pub struct Owner {
    pub(crate) device: Arc<Device>,
    pub(crate) slot: usize,
    /// The instance it is confined to, and the pages it can have.
    pub(crate) confinement: Option<Confinement>,
    pub(crate) pages: Range<u64>,
    /// Allocations that this process holds: an import of one of them yields the same object, since the device knows
    /// one bit per process only.
    pub(crate) held: Mutex<HashMap<(u32, u32), Weak<Allocation>>>,
}

impl Device {
    /// Takes an owner slot, after giving back what dead owners left.
    ///
    /// # Errors
    /// When all slots are in use, the kernel refuses a lock, or the device is divided: then only NVML may have all of it.
    pub fn attach(self: &Arc<Self>, client: Client) -> Result<Arc<Owner>, AttachError> {
        if client == Client::Nvml {
            return self.take_slot(client, None, 0..self.identity().pages);
        }
        self.exclusively(|| {
            if self.is_divided() {
                return Err(AttachError::Divided);
            }
            self.take_slot(client, None, 0..self.identity().pages)
        })?
    }

    /// Takes an owner slot that is confined to an instance: its memory is all there is.
    ///
    /// # Errors
    /// When all slots are in use, the kernel refuses a lock, or there is no such instance.
    pub fn attach_confined(self: &Arc<Self>, confinement: Confinement) -> Result<Arc<Owner>, AttachError> {
        self.exclusively(|| {
            let instances = self.instances();
            let instance = instances.iter().find(|instance| instance.epoch == confinement.epoch);
            let instance = instance.ok_or(AttachError::Gone)?;
            if !instance.compute.iter().any(|compute| compute.id == confinement.compute) {
                return Err(AttachError::Gone);
            }
            self.take_slot(Client::Cuda, Some(confinement), self.instance_pages(instance))
        })?
    }

    fn take_slot(
        self: &Arc<Self>,
        client: Client,
        confinement: Option<Confinement>,
        pages: Range<u64>,
    ) -> Result<Arc<Owner>, AttachError> {
        self.reap(Files::MayOpen);
        let mut own_slots = self.own_slots.lock().unwrap_or_else(PoisonError::into_inner);
        for (slot, words) in self.header.owners().iter().enumerate() {
            // A slot of this very process would not conflict with its own lock.
            if own_slots.contains(&slot) || !sys::try_lock_byte(&self.header_file, owner_byte(slot), true)? {
                continue;
            }
            // Its lock is ours, so a pid in it is that of a dead owner that was not reaped yet.
            if words.pid.load(Acquire) != 0 {
                self.clear_owner(slot);
            }
            words.start_time.store(start_time(std::process::id()).unwrap_or(0), Relaxed);
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
            let device = Arc::clone(self);
            return Ok(Arc::new(Owner { device, slot, confinement, pages, held: Mutex::default() }));
        }
        Err(AttachError::Full)
    }

    /// Gives back what dead owners held. Cheap when nobody died: one call of the kernel per slot in use.
    pub(crate) fn reap(&self, files: Files) {
        let own_slots = self.own_slots.lock().unwrap_or_else(PoisonError::into_inner);
        for (slot, words) in self.header.owners().iter().enumerate() {
            if words.pid.load(Acquire) == 0 || own_slots.contains(&slot) {
                continue;
            }
            match sys::byte_is_locked(&self.header_file, owner_byte(slot)) {
                Ok(false) => {
                    // Another reaper, or the slot's next owner, may be faster: then it is theirs.
                    if let Ok(true) = sys::try_lock_byte(&self.header_file, owner_byte(slot), true) {
                        self.clear_owner(slot);
                        // Closing the file gives it up too; until then the slot is merely not used.
                        let _ = sys::unlock_byte(&self.header_file, owner_byte(slot));
                    }
                }
                // A forked child may keep its dead parent's lock: the second witness.
                Ok(true) if self.is_dead(slot, files) => self.clear_owner(slot),
                _ => {}
            }
        }
        self.finish_interrupted();
    }

    /// Removes every trace of an owner. May be repeated, and interrupted.
    fn clear_owner(&self, slot: usize) {
        self.drop_holder(slot);
        self.header.owners()[slot].pid.store(0, Release);
    }

    /// Whether the process of a slot is certainly gone; without `/proc`, a reused pid passes for alive.
    fn is_dead(&self, slot: usize, files: Files) -> bool {
        let words = &self.header.owners()[slot];
        let (pid, since) = (words.pid.load(Acquire), words.start_time.load(Relaxed));
        if self.namespace.is_none_or(|own| own != words.namespace.load(Relaxed)) {
            return false;
        }
        let Ok(pid) = u32::try_from(pid) else { return false };
        !sys::process_exists(pid)
            || files == Files::MayOpen && since != 0 && start_time(pid).is_some_and(|now| now != since)
    }

    /// Everybody with a slot, and what each is confined to.
    pub(crate) fn clients(&self) -> impl Iterator<Item = (Client, Option<Confinement>)> {
        let taken = self.header.owners().iter().filter(|words| words.pid.load(Acquire) != 0);
        taken.map(|words| {
            let client = if words.client.load(Relaxed) == 1 { Client::Cuda } else { Client::Nvml };
            (client, Confinement::of_word(words.instance.load(Relaxed)))
        })
    }

    /// The living processes that use the device. Opens files.
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

    /// What processes hold together: an allocation of which several are holders counts once. Imported is what none of them
    /// made.
    #[must_use]
    pub fn held_together(&self, processes: &[u32]) -> Held {
        let is_one = |pid: u64| processes.iter().any(|process| u64::from(*process) == pid);
        let owners = self.header.owners().iter().enumerate();
        let slots: Vec<usize> =
            owners.filter(|(_, words)| is_one(words.pid.load(Acquire))).map(|(slot, _)| slot).collect();
        self.held_by(&slots)
    }
}

impl Owner {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Bytes that it could have if nobody had any.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        (self.pages.end - self.pages.start) * PAGE_BYTES
    }

    /// Bytes that an allocation could have now, as far as is known: see [`Device::collect`].
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.device.free_bytes_in(self.pages.clone())
    }

    /// Accounts for one launch.
    pub fn launched(&self, nanoseconds: u64) {
        let words = &self.device.header.owners()[self.slot];
        words.busy_nanoseconds.fetch_add(nanoseconds, Relaxed);
        words.launches.fetch_add(1, Relaxed);
    }

    /// Accounts for a context that comes to life.
    pub fn context_began(&self) {
        self.device.header.owners()[self.slot].contexts.fetch_add(1, Relaxed);
    }

    /// Accounts for the end of one that began.
    pub fn context_ended(&self) {
        self.device.header.owners()[self.slot].contexts.fetch_sub(1, Relaxed);
    }

    /// The descriptor whose lock says that this process lives: a forked child must close it.
    #[must_use]
    pub fn witness(&self) -> i32 {
        self.device.header_file.as_raw_fd()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut own_slots = self.device.own_slots.lock().unwrap_or_else(PoisonError::into_inner);
        self.device.clear_owner(self.slot);
        own_slots.retain(|slot| *slot != self.slot);
        // Closing the file gives it up too; until then the slot is merely not used.
        let _ = sys::unlock_byte(&self.device.header_file, owner_byte(self.slot));
    }
}

/// Field 22 of `/proc/<pid>/stat`, counted behind the command name, which may contain anything.
fn start_time(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

pub(crate) fn namespace() -> Option<u64> {
    Some(File::open("/proc/self/ns/pid").ok()?.metadata().ok()?.ino())
}
