//! This process as an owner of memory of a device, and the allocations that it holds.
//!
//! The driver attaches once to each device and takes, opens and drops allocations. This module owns two types that give things
//! back when dropped: [`Owner`] a slot, [`Allocation`] a hold on a record. It changes records and slots through their own
//! functions only.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::PAGE_BYTES;
use crate::device::Device;
use crate::header::RECORDS;
use crate::records::{AllocationError, MAX_PAGES, Run, Use};
use crate::slots::{AttachError, Client, Confinement, Files};
use crate::storage::Idle;

/// This process as an owner of memory of one device. Dropping it gives everything back, and so does the death of the process.
pub struct Owner {
    pub(crate) device: Arc<Device>,
    pub(crate) slot: usize,
    /// Instance that the process is confined to, and the pages it can have.
    confinement: Option<Confinement>,
    pages: Range<u64>,
    /// Allocations that this process holds. An import of one of them returns the same object, since the device knows only one bit
    /// per process.
    held: Mutex<HashMap<(u32, u32), Weak<Allocation>>>,
}

impl Device {
    /// Takes an owner slot, after giving back the memory of dead owners.
    ///
    /// # Errors
    /// All slots are in use, the kernel refuses a lock, or the device is divided: then only NVML may attach to the whole device.
    pub fn attach(self: &Arc<Self>, client: Client) -> Result<Arc<Owner>, AttachError> {
        if client == Client::Nvml {
            return self.own(client, None, 0..self.identity().pages);
        }
        self.exclusively(|| {
            if self.is_divided() {
                return Err(AttachError::Divided);
            }
            self.own(client, None, 0..self.identity().pages)
        })?
    }

    /// Takes an owner slot that is confined to an instance. It sees only the memory of that instance.
    ///
    /// # Errors
    /// All slots are in use, the kernel refuses a lock, or there is no such instance.
    pub fn attach_confined(self: &Arc<Self>, confinement: Confinement) -> Result<Arc<Owner>, AttachError> {
        self.exclusively(|| {
            let instances = self.instances();
            let instance = instances.iter().find(|instance| instance.epoch == confinement.epoch);
            let instance = instance.ok_or(AttachError::Gone)?;
            if !instance.compute.iter().any(|compute| compute.id == confinement.compute) {
                return Err(AttachError::Gone);
            }
            self.own(Client::Cuda, Some(confinement), self.instance_pages(instance))
        })?
    }

    fn own(
        self: &Arc<Self>,
        client: Client,
        confinement: Option<Confinement>,
        pages: Range<u64>,
    ) -> Result<Arc<Owner>, AttachError> {
        let slot = self.take_slot(client, confinement)?;
        if client == Client::Cuda
            && let Some(keep) = self.idle_bytes
        {
            // Processes that were killed gave nothing back. If the file system cannot, the storage stays.
            let _ = self.give_back(slot, keep, Idle::Free);
        }
        let device = Arc::clone(self);
        Ok(Arc::new(Owner { device, slot, confinement, pages, held: Mutex::default() }))
    }
}

impl Owner {
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the bytes that this process could have if all were free.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        (self.pages.end - self.pages.start) * PAGE_BYTES
    }

    /// Returns the bytes that are known to be free for an allocation: see [`Device::collect`].
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.device.free_bytes_in(self.pages.clone())
    }

    /// Counts one launch and its duration.
    pub fn launched(&self, nanoseconds: u64) {
        let words = &self.device.header.owners()[self.slot];
        words.busy_nanoseconds.fetch_add(nanoseconds, Relaxed);
        words.launches.fetch_add(1, Relaxed);
    }

    /// Counts a context that begins.
    pub fn context_began(&self) {
        self.device.header.owners()[self.slot].contexts.fetch_add(1, Relaxed);
    }

    /// Counts a context that ends.
    pub fn context_ended(&self) {
        self.device.header.owners()[self.slot].contexts.fetch_sub(1, Relaxed);
    }

    /// Gives the host the storage of the device's memory, apart from the bytes that it keeps while it is idle, if no other process
    /// computes on it. For a process that ends: its own memory has unknown content from then on.
    pub fn give_back(&self) {
        if let Some(keep) = self.device.idle_bytes {
            // If the file system cannot, the storage stays.
            let _ = self.device.give_back(self.slot, keep, Idle::FreeAndOwn);
        }
    }

    /// Returns the descriptor whose lock proves that this process is alive: a forked child must close it.
    #[must_use]
    pub fn witness(&self) -> i32 {
        self.device.header_file.as_raw_fd()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.device.leave_slot(self.slot);
    }
}

/// Pages that this process holds. Dropping the last reference gives them back, unless another process holds them too.
pub struct Allocation {
    owner: Arc<Owner>,
    pub(crate) record: u32,
    generation: u32,
    runs: Vec<Run>,
    pages: u64,
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation {}.{} of {} pages", self.record, self.generation, self.pages)
    }
}

impl Allocation {
    /// Returns the pages in order, with neighbours joined.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_BYTES
    }

    /// Returns the name of the allocation, which is unique on its device for all time: for [`Owner::open`] in another process.
    #[must_use]
    pub fn name(&self) -> (u32, u32) {
        (self.record, self.generation)
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        self.owner.device()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut held = self.owner.held.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (self.record, self.generation);
        // An import may have found this object while it was dropped and made another: the bit then belongs to that one.
        if held.get(&key).is_some_and(|other| other.strong_count() > 0) {
            return;
        }
        held.remove(&key);
        self.owner.device.release(self.record, self.generation, self.owner.slot);
    }
}

impl Owner {
    /// Takes pages, contiguous if possible, with the content that the last owner left.
    ///
    /// # Errors
    /// The device, its file system or its table of allocations is full, even after reaping dead owners.
    pub fn allocate(self: &Arc<Self>, bytes: u64, purpose: Use) -> Result<Arc<Allocation>, AllocationError> {
        let pages = bytes.div_ceil(PAGE_BYTES).max(1);
        match self.try_allocate(pages, purpose) {
            Err(AllocationError::Pages(_) | AllocationError::Records) => {
                self.device.reap(Files::Keep);
                self.try_allocate(pages, purpose)
            }
            other => other,
        }
    }

    fn try_allocate(self: &Arc<Self>, pages: u64, purpose: Use) -> Result<Arc<Allocation>, AllocationError> {
        if pages > MAX_PAGES {
            return Err(AllocationError::Pages(pages));
        }
        let device = &self.device;
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let claimed = device.claim(self.slot, self.epoch(), pages, purpose);
        let (record, generation) = claimed.ok_or(AllocationError::Records)?;
        let taken = device.take_pages(record, generation, pages, &self.pages).and_then(|runs| {
            for run in &runs {
                device.back(*run)?;
            }
            Ok(runs)
        });
        match taken {
            Ok(runs) => {
                let allocation =
                    Arc::new(Allocation { owner: Arc::clone(self), record, generation, runs, pages });
                held.insert((record, generation), Arc::downgrade(&allocation));
                Ok(allocation)
            }
            Err(error) => {
                device.release(record, generation, self.slot);
                Err(error)
            }
        }
    }

    /// True if the process is confined to an instance.
    #[must_use]
    pub fn is_confined(&self) -> bool {
        self.confinement.is_some()
    }

    /// Epoch of the instance that the process is confined to; 0 if none.
    fn epoch(&self) -> u32 {
        self.confinement.map_or(0, |confinement| confinement.epoch)
    }

    /// Takes a hold on a living allocation by its name; `None` if there is none.
    #[must_use]
    pub fn open(self: &Arc<Self>, record: u32, generation: u32) -> Option<Arc<Allocation>> {
        self.hold(record, generation)
    }

    /// Takes a hold on an allocation that another process may hold already; `None` if it has ended.
    pub(crate) fn hold(self: &Arc<Self>, record: u32, generation: u32) -> Option<Arc<Allocation>> {
        if record as usize >= RECORDS {
            return None;
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(allocation) = held.get(&(record, generation)).and_then(Weak::upgrade) {
            return Some(allocation);
        }
        let runs = self.device.join(record, generation, self.slot, self.epoch())?;
        let pages = runs.iter().map(|run| run.count).sum();
        let allocation = Arc::new(Allocation { owner: Arc::clone(self), record, generation, runs, pages });
        held.insert((record, generation), Arc::downgrade(&allocation));
        Some(allocation)
    }
}
