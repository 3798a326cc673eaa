//! The virtual-memory API: reservations, physical memory, mappings and access.
#![expect(unsafe_code, reason = "maps pages into reservations that the book knows")]

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use softgpu_device::{Allocation, PAGE_BYTES, Reservation, Use, map_pages, unmap_pages};

use super::Space;
use super::space::Reserved;
use crate::context::lock;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::handles::{Kind, Registry};
use crate::log::log;

/// Physical memory that programs hold.
pub(crate) static MEMORY: Registry<MemoryHandle> = Registry::new(Kind::Memory, Error::INVALID_VALUE);

/// What a `CUmemGenericAllocationHandle` names.
pub(crate) struct MemoryHandle {
    pub(crate) allocation: Arc<Allocation>,
    /// The ordinal of its device.
    pub(crate) device: i32,
    /// Ways in which it may be exported.
    pub(crate) shareable: u32,
    /// Retains; the handle ends at 0, its pages when nothing maps them either.
    retained: Mutex<u64>,
}

/// Pages in a reservation.
pub(super) struct Mapping {
    pub(super) bytes: u64,
    allocation: Arc<Allocation>,
    handle: u64,
    device: i32,
    shareable: u32,
    /// By the ordinals of devices: 1 read, 3 read and write; none where it is missing.
    access: BTreeMap<i32, u32>,
    id: u64,
    /// It is being unmapped, and what runs is waited for: nobody may give it access again.
    ending: bool,
}

impl Mapping {
    fn access_of(&self, ordinal: i32) -> u32 {
        self.access.get(&ordinal).copied().unwrap_or(0)
    }
}

/// What is known about a mapped address.
pub(crate) struct MappingInfo {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// The ordinal of the device whose memory it is, and the access that device has.
    pub(crate) device: i32,
    pub(crate) access: u32,
    pub(crate) shareable: u32,
    pub(crate) id: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1 << 32);

/// Maps pages at addresses that the book has given to the caller.
pub(super) fn map(start: u64, pages: &Allocation, offset: u64, bytes: u64) -> Result {
    // SAFETY: the caller took the range out of the window or found it unmapped in a reservation, under the book's lock.
    unsafe { map_pages(start, pages, offset, bytes) }.map_err(|error| {
        log!("cannot map device memory: {error}");
        Error::OUT_OF_MEMORY
    })
}

/// Takes pages away from addresses that nothing uses any more.
pub(super) fn unmap(start: u64, bytes: u64) {
    // SAFETY: the range is out of the table, and what was running has ended.
    if let Err(error) = unsafe { unmap_pages(start, bytes) } {
        // The pages stay mapped and out of the table: nothing can reach them, but the addresses are lost.
        log!("cannot unmap device memory: {error}");
    }
}

const fn is_granular(bytes: u64) -> bool {
    bytes > 0 && bytes.is_multiple_of(PAGE_BYTES)
}

impl Space {
    /// `cuMemAddressReserve`: at the hint where that is free, else anywhere.
    pub(crate) fn reserve(&self, bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
        if !is_granular(bytes) || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(Error::INVALID_VALUE);
        }
        let alignment = alignment.max(PAGE_BYTES);
        let hinted = (hint != 0 && hint.is_multiple_of(alignment)).then(|| Reservation::at(hint, bytes).ok());
        let reservation = match hinted.flatten() {
            Some(reservation) => reservation,
            None => Reservation::anywhere(bytes, alignment).map_err(|_| Error::OUT_OF_MEMORY)?,
        };
        let start = reservation.address();
        lock(&self.book).reserved.insert(start, Reserved { reservation });
        Ok(start)
    }

    /// `cuMemAddressFree`: a whole reservation with nothing mapped in it.
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

    /// `cuMemImportFromShareableHandle` of a file descriptor, which stays the caller's.
    pub(crate) fn import(&self, device: i32, descriptor: i32) -> Result<u64> {
        if descriptor < 0 {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller of the API says that the descriptor is open; it is only used during the call.
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

    /// `cuMemUnmap`: whole mappings, and nothing else in the range. No GPU reaches them any more.
    pub(crate) fn unmap(&self, start: u64, bytes: u64, gpus: &[&'static Gpu]) -> Result {
        let starts = {
            let mut book = lock(&self.book);
            let starts = whole_mappings(&book.mappings, start, bytes)?;
            for start in &starts {
                if let Some(mapping) = book.mappings.get_mut(start) {
                    mapping.ending = true;
                }
                for gpu in gpus {
                    gpu.space.table.remove(*start);
                }
            }
            starts
        };
        for gpu in gpus {
            gpu.space.running.wait();
        }
        let mut book = lock(&self.book);
        for start in starts {
            if let Some(mapping) = book.mappings.remove(&start) {
                unmap(start, mapping.bytes);
            }
        }
        Ok(())
    }

    /// `cuMemSetAccess` for a GPU, which need not be the one that keeps the book of the range.
    pub(crate) fn set_access(&self, start: u64, bytes: u64, gpu: &Gpu, access: u32) -> Result {
        if !matches!(access, 0 | 1 | 3) {
            return Err(Error::INVALID_VALUE);
        }
        let narrows = {
            let mut book = lock(&self.book);
            let mut narrows = false;
            for start in whole_mappings(&book.mappings, start, bytes)? {
                let Some(mapping) = book.mappings.get_mut(&start) else { continue };
                let before = mapping.access.insert(gpu.ordinal, access).unwrap_or(0);
                narrows |= before & !access != 0;
                gpu.space.table.remove(start);
                if access != 0 {
                    gpu.space.table.insert(start..start + mapping.bytes, true, access == 3);
                }
            }
            narrows
        };
        if narrows {
            gpu.space.running.wait();
        }
        Ok(())
    }

    /// The mapping that an address lies in.
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

    /// The access that a device has to the mapping at an address.
    pub(crate) fn access_at(&self, address: u64, ordinal: i32) -> Option<u32> {
        self.with_mapping(address, |_, mapping| mapping.access_of(ordinal))
    }

    fn with_mapping<T>(&self, address: u64, tell: impl FnOnce(u64, &Mapping) -> T) -> Option<T> {
        let book = lock(&self.book);
        let (start, mapping) = book.mappings.range(..=address).next_back()?;
        (address < start + mapping.bytes).then(|| tell(*start, mapping))
    }

    /// The reservation that an address lies in: start and size.
    pub(crate) fn reservation_at(&self, address: u64) -> Option<(u64, u64)> {
        let book = lock(&self.book);
        let (start, entry) = book.reserved.range(..=address).next_back()?;
        (address < start + entry.reservation.bytes()).then(|| (*start, entry.reservation.bytes()))
    }

    /// `cuMemRetainAllocationHandle`: a handle of what is mapped at an address.
    pub(crate) fn retain_at(&self, address: u64) -> Result<u64> {
        let book = lock(&self.book);
        let (start, mapping) = book.mappings.range(..=address).next_back().ok_or(Error::INVALID_VALUE)?;
        if address >= start + mapping.bytes {
            return Err(Error::INVALID_VALUE);
        }
        // The handle may have been released since: then there is a new one for the same memory.
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

/// `cuMemExportToShareableHandle` as a file descriptor, which is the caller's.
pub(crate) fn export(handle: u64) -> Result<i32> {
    let memory = MEMORY.get(handle)?;
    if memory.shareable & POSIX_FD == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let descriptor: OwnedFd = memory.allocation.export().map_err(|error| {
        log!("cannot export: {error}");
        Error::OPERATING_SYSTEM
    })?;
    Ok(descriptor.into_raw_fd())
}

/// The starts of the mappings that exactly fill a range, none of which is ending.
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
