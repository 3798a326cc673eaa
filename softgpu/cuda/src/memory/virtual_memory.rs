//! The virtual-memory API: reservations, physical memory, mappings and access.
#![expect(unsafe_code, reason = "borrows descriptors that callers guarantee to be open")]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use softgpu_device::{Allocation, Lack, PAGE_BYTES, Reservation, Use};

use super::Space;
use super::book::{Mapping, Reserved};
use super::pages::{map, unmap};
use crate::error::{Error, Result};
use crate::handles::{Kind, Registry};
use crate::lock::lock;
use crate::log::log;

/// Physical memory that programs hold.
pub(crate) static MEMORY: Registry<MemoryHandle> = Registry::new(Kind::Memory, Error::INVALID_VALUE);

/// The memory behind a `CUmemGenericAllocationHandle`.
pub(crate) struct MemoryHandle {
    pub(crate) allocation: Arc<Allocation>,
    /// Ordinal of its device.
    pub(crate) device: i32,
    /// Handle types for which it may be exported.
    pub(crate) shareable: u32,
    /// Number of retains; the handle ends at 0, and its pages when they are unmapped as well.
    retained: Mutex<u64>,
}

/// The properties of a mapped address.
pub(crate) struct MappingInfo {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Ordinal of the device that has the memory; `access` is the access of that device.
    pub(crate) device: i32,
    pub(crate) access: u32,
    pub(crate) shareable: u32,
    pub(crate) id: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1 << 32);

const fn is_granular(bytes: u64) -> bool {
    bytes > 0 && bytes.is_multiple_of(PAGE_BYTES)
}

impl Space {
    /// `cuMemAddressReserve`: at the hint if that is free, else anywhere.
    pub(crate) fn reserve(&self, bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
        if !is_granular(bytes) || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(Error::INVALID_VALUE);
        }
        let alignment = alignment.max(PAGE_BYTES);
        let takes_hint = hint != 0 && hint.is_multiple_of(alignment) && !self.lacks(Lack::FixedAddresses);
        let hinted = takes_hint.then(|| Reservation::at(hint, bytes).ok());
        let reservation = match hinted.flatten() {
            Some(reservation) => reservation,
            None => Reservation::anywhere(bytes, alignment).map_err(|_| Error::OUT_OF_MEMORY)?,
        };
        let start = reservation.address();
        lock(&self.book).reserved.insert(start, Reserved { reservation });
        Ok(start)
    }

    /// `cuMemAddressFree`: a whole reservation without mappings.
    pub(crate) fn unreserve(&self, start: u64, bytes: u64) -> Result {
        let mut book = lock(&self.book);
        let known = book.reserved.get(&start).is_some_and(|entry| entry.reservation.bytes() == bytes);
        if !known || book.mappings.range(start..start + bytes).next().is_some() {
            return Err(Error::INVALID_VALUE);
        }
        book.reserved.remove(&start);
        Ok(())
    }

    /// `cuMemCreate`.
    pub(crate) fn create(&self, device: i32, bytes: u64, shareable: u32) -> Result<u64> {
        if !is_granular(bytes) {
            return Err(Error::INVALID_VALUE);
        }
        let allocation = self.owner.allocate(bytes, Use::Chunk).map_err(|error| {
            log!("{error}");
            Error::OUT_OF_MEMORY
        })?;
        self.hold(allocation, device, shareable)
    }

    fn hold(&self, allocation: Arc<Allocation>, device: i32, shareable: u32) -> Result<u64> {
        let handle = MemoryHandle { allocation, device, shareable, retained: Mutex::new(1) };
        Ok(MEMORY.insert_with(|_| handle)?.0)
    }

    /// `cuMemImportFromShareableHandle` of a file descriptor, which the caller keeps.
    pub(crate) fn import(&self, device: i32, descriptor: i32) -> Result<u64> {
        if descriptor < 0 {
            return Err(Error::INVALID_VALUE);
        }
        if self.lacks(Lack::Import) || self.lacks(Lack::ImportInInstances) && self.owner.is_confined() {
            return Err(Error::NOT_SUPPORTED);
        }
        // SAFETY: the API's caller guarantees an open descriptor; it is only used during the call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let allocation = self.owner.import(descriptor).map_err(|error| {
            log!("{error}");
            Error::INVALID_VALUE
        })?;
        self.hold(allocation, device, POSIX_FD)
    }

    /// `cuMemMap` into a reservation.
    pub(crate) fn map(&self, start: u64, bytes: u64, offset: u64, handle: u64) -> Result {
        let memory = MEMORY.get(handle)?;
        let end = start.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
        if !is_granular(bytes) || !start.is_multiple_of(PAGE_BYTES) || !offset.is_multiple_of(PAGE_BYTES) {
            return Err(Error::INVALID_VALUE);
        }
        if offset.checked_add(bytes).is_none_or(|end| end > memory.allocation.bytes()) {
            return Err(Error::INVALID_VALUE);
        }
        let mut book = lock(&self.book);
        let inside = book
            .reserved
            .range(..=start)
            .next_back()
            .is_some_and(|(at, entry)| end <= at + entry.reservation.bytes());
        let taken =
            book.mappings.range(..end).next_back().is_some_and(|(at, other)| at + other.bytes > start);
        if !inside || taken {
            return Err(Error::INVALID_VALUE);
        }
        map(start, &memory.allocation, offset, bytes)?;
        let mapping = Mapping {
            bytes,
            allocation: Arc::clone(&memory.allocation),
            handle,
            device: memory.device,
            shareable: memory.shareable,
            access: BTreeMap::new(),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            ending: false,
        };
        book.mappings.insert(start, mapping);
        Ok(())
    }

    /// `cuMemUnmap`: whole mappings, and nothing else in the range. No GPU can access them afterwards; `all` are the GPUs'
    /// spaces.
    pub(crate) fn unmap(&self, start: u64, bytes: u64, all: &[&Space]) -> Result {
        let starts = {
            let mut book = lock(&self.book);
            let starts = whole_mappings(&book.mappings, start, bytes)?;
            for start in &starts {
                if let Some(mapping) = book.mappings.get_mut(start) {
                    mapping.ending = true;
                }
                for space in all {
                    space.table.remove(*start);
                }
            }
            starts
        };
        for space in all {
            space.running.wait();
        }
        let mut book = lock(&self.book);
        for start in starts {
            if let Some(mapping) = book.mappings.remove(&start) {
                unmap(start, mapping.bytes);
            }
        }
        Ok(())
    }

    /// The ordinals of the devices whose memory the mappings have that exactly fill a range.
    pub(crate) fn devices_in(&self, start: u64, bytes: u64) -> Result<BTreeSet<i32>> {
        let book = lock(&self.book);
        let starts = whole_mappings(&book.mappings, start, bytes)?;
        Ok(starts.iter().filter_map(|start| Some(book.mappings.get(start)?.device)).collect())
    }

    /// `cuMemSetAccess` for the GPU of an ordinal; the book of the range may belong to another GPU's space.
    pub(crate) fn set_access(
        &self,
        start: u64,
        bytes: u64,
        (ordinal, space): (i32, &Space),
        access: u32,
    ) -> Result {
        if !matches!(access, 0 | 1 | 3) {
            return Err(Error::INVALID_VALUE);
        }
        let narrows = {
            let mut book = lock(&self.book);
            let mut narrows = false;
            for start in whole_mappings(&book.mappings, start, bytes)? {
                let Some(mapping) = book.mappings.get_mut(&start) else { continue };
                let before = mapping.access.insert(ordinal, access).unwrap_or(0);
                narrows |= before & !access != 0;
                space.table.remove(start);
                if access != 0 {
                    space.table.insert(start..start + mapping.bytes, true, access == 3);
                }
            }
            narrows
        };
        if narrows {
            space.running.wait();
        }
        Ok(())
    }

    /// Returns the mapping that contains an address.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<MappingInfo> {
        self.with_mapping(address, |start, mapping| MappingInfo {
            start,
            bytes: mapping.bytes,
            device: mapping.device,
            access: mapping.access_of(mapping.device),
            shareable: mapping.shareable,
            id: mapping.id,
        })
    }

    /// Returns the access that a device has to the mapping at an address.
    pub(crate) fn access_at(&self, address: u64, ordinal: i32) -> Option<u32> {
        self.with_mapping(address, |_, mapping| mapping.access_of(ordinal))
    }

    fn with_mapping<T>(&self, address: u64, tell: impl FnOnce(u64, &Mapping) -> T) -> Option<T> {
        let book = lock(&self.book);
        let (start, mapping) = book.mappings.range(..=address).next_back()?;
        (address < start + mapping.bytes).then(|| tell(*start, mapping))
    }

    /// Returns start and size of the reservation that contains an address.
    pub(crate) fn reservation_at(&self, address: u64) -> Option<(u64, u64)> {
        let book = lock(&self.book);
        let (start, entry) = book.reserved.range(..=address).next_back()?;
        (address < start + entry.reservation.bytes()).then(|| (*start, entry.reservation.bytes()))
    }

    /// `cuMemRetainAllocationHandle`: a handle of the memory mapped at an address.
    pub(crate) fn retain_at(&self, address: u64) -> Result<u64> {
        let book = lock(&self.book);
        let (start, mapping) = book.mappings.range(..=address).next_back().ok_or(Error::INVALID_VALUE)?;
        if address >= start + mapping.bytes {
            return Err(Error::INVALID_VALUE);
        }
        // The handle may have been released meanwhile: then the same memory gets a new one.
        if let Ok(memory) = MEMORY.get(mapping.handle) {
            let mut retained = lock(&memory.retained);
            if *retained > 0 {
                *retained += 1;
                return Ok(mapping.handle);
            }
        }
        self.hold(Arc::clone(&mapping.allocation), mapping.device, mapping.shareable)
    }
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const POSIX_FD: u32 = 1;

/// `cuMemRelease`: the memory itself stays while it is mapped.
pub(crate) fn release(handle: u64) -> Result {
    let memory = MEMORY.get(handle)?;
    let mut retained = lock(&memory.retained);
    if *retained == 0 {
        return Err(Error::INVALID_VALUE);
    }
    *retained -= 1;
    if *retained == 0 {
        MEMORY.remove(handle)?;
    }
    Ok(())
}

/// `cuMemExportToShareableHandle` as a file descriptor, which the caller owns.
pub(crate) fn export(handle: u64) -> Result<i32> {
    let memory = MEMORY.get(handle)?;
    if memory.shareable & POSIX_FD == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let descriptor: OwnedFd = memory.allocation.export().map_err(|error| {
        log!("cannot export device memory: {error}");
        Error::OPERATING_SYSTEM
    })?;
    Ok(descriptor.into_raw_fd())
}

/// The starts of the mappings that exactly fill a range, none of which is being unmapped.
fn whole_mappings(mappings: &BTreeMap<u64, Mapping>, start: u64, bytes: u64) -> Result<Vec<u64>> {
    let end = start.checked_add(bytes).filter(|_| bytes > 0).ok_or(Error::INVALID_VALUE)?;
    let mut starts = Vec::new();
    let mut at = start;
    for (other, mapping) in mappings.range(start..end) {
        if *other != at || mapping.ending {
            return Err(Error::INVALID_VALUE);
        }
        starts.push(at);
        at += mapping.bytes;
    }
    if at == end { Ok(starts) } else { Err(Error::INVALID_VALUE) }
}
