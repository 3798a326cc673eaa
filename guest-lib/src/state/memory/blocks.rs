//! The program's own use of the virtual-memory API: handles of physical memory, reservations, mappings.
//!
//! The host keeps the memory; this module keeps the data that makes its answers the driver's: the count of each handle, the
//! mappings, the access rights. No thread waits for the device while it holds the lock.

use crate::{
    error::{Error, Result},
    session::Session,
    state::{devices::Devices, memory::device_map::DeviceMap, streams::Streams},
};
use sluice_protocol::{
    calls::wire,
    field::{AccessFlags, Ordinal},
    handle, limits,
};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
};

/// Makes a handle of a number.
const TAG: u64 = (handle::PHYSICAL_MEMORY as u64) << 56;
/// The granularity that programs get: the host's unit.
pub(crate) const GRANULARITY: u64 = limits::UNIT;

/// Physical memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhysicalBlock {
    /// Its number on the host.
    pub(crate) number: u64,
    pub(crate) bytes: u64,
    pub(crate) device: i32,
    /// Handle types to which it may be exported.
    pub(crate) shareable: u32,
    /// Handles that the program holds.
    held: u64,
    mappings: u64,
}

#[derive(Clone, Debug)]
struct BlockMapping {
    bytes: u64,
    handle: u64,
    /// Access by device: 1 to read, 3 to read and write; no entry for none.
    access: BTreeMap<i32, u32>,
    /// True while it is being unmapped.
    ending: bool,
}

/// The access to read and write (`CUmemAccess_flags`).
pub(crate) const READ_WRITE: u32 = 3;

/// The access that a device is to have.
#[derive(Clone, Copy)]
pub(crate) struct BlockAccess {
    pub(crate) device: i32,
    /// The device's number on the host.
    pub(crate) ordinal: u32,
    /// 0 for none, 1 to read, 3 to read and write.
    pub(crate) flags: u32,
}

/// The blocks, reservations and mappings of the process.
#[derive(Default)]
pub(crate) struct Blocks {
    state: Mutex<BlocksState>,
}

#[derive(Default)]
struct BlocksState {
    blocks: BTreeMap<u64, PhysicalBlock>,
    reserved: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, BlockMapping>,
}

impl BlocksState {
    fn mapping_at(&self, address: u64) -> Option<(u64, &BlockMapping)> {
        let (start, mapping) = self.mapped.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some((*start, mapping))
    }

    /// Starts and bytes of whole mappings that exactly fill a range.
    fn whole(&self, start: u64, bytes: u64) -> Result<Vec<(u64, u64)>> {
        let end = start.checked_add(bytes).filter(|_| bytes > 0).ok_or(Error::INVALID_VALUE)?;
        let (mut next, mut found) = (start, Vec::new());
        for (at, mapping) in self.mapped.range(start..end) {
            if *at != next || mapping.ending {
                return Err(Error::INVALID_VALUE);
            }
            found.push((*at, mapping.bytes));
            next += mapping.bytes;
        }
        if next == end { Ok(found) } else { Err(Error::INVALID_VALUE) }
    }
}

impl Blocks {
    fn lock(&self) -> MutexGuard<'_, BlocksState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn add(&self, number: u64, bytes: u64, device: i32, shareable: u32) -> u64 {
        let handle = TAG | number;
        let block = PhysicalBlock { number, bytes, device, shareable, held: 1, mappings: 0 };
        self.lock().blocks.insert(handle, block);
        handle
    }

    pub(crate) fn create(
        &self,
        session: &Session,
        devices: &Devices,
        device: i32,
        bytes: u64,
        shareable: u32,
    ) -> Result<u64> {
        let ordinal = devices.get(device)?.ordinal;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Error::INVALID_VALUE);
        }
        let created = session.sync(0, &wire::phys_alloc_create::Args { device: Ordinal(ordinal), bytes })?;
        Ok(self.add(created.allocation, bytes, device, shareable))
    }

    /// A block that the program holds.
    pub(crate) fn get(&self, handle: u64) -> Result<PhysicalBlock> {
        self.lock().blocks.get(&handle).filter(|block| block.held > 0).copied().ok_or(Error::INVALID_VALUE)
    }

    pub(crate) fn release(&self, session: &Session, handle: u64) -> Result {
        let mut state = self.lock();
        let block = state.blocks.get_mut(&handle).filter(|block| block.held > 0);
        let block = block.ok_or(Error::INVALID_VALUE)?;
        block.held -= 1;
        Self::settle(session, &mut state, handle)
    }

    /// Releases on the host a block without handles and mappings.
    fn settle(session: &Session, state: &mut BlocksState, handle: u64) -> Result {
        match state.blocks.get(&handle) {
            Some(PhysicalBlock { held: 0, mappings: 0, number, .. }) => {
                let number = *number;
                state.blocks.remove(&handle);
                let posted = session.post(0, None, &wire::phys_alloc_release::Args { allocation: number });
                posted.map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Adds a handle to the block that is mapped at an address.
    pub(crate) fn retain_at(&self, address: u64) -> Result<u64> {
        let mut state = self.lock();
        let handle = state.mapping_at(address).ok_or(Error::INVALID_VALUE)?.1.handle;
        state.blocks.get_mut(&handle).ok_or(Error::INVALID_VALUE)?.held += 1;
        Ok(handle)
    }

    /// The device whose memory is mapped at an address.
    pub(crate) fn device_at(&self, address: u64) -> Option<i32> {
        let state = self.lock();
        let (_, mapping) = state.mapping_at(address)?;
        state.blocks.get(&mapping.handle).map(|block| block.device)
    }

    /// The handle types to which the block at an address may be exported.
    pub(crate) fn shareable_at(&self, address: u64) -> Option<u64> {
        let state = self.lock();
        let (_, mapping) = state.mapping_at(address)?;
        state.blocks.get(&mapping.handle).map(|block| u64::from(block.shareable))
    }

    pub(crate) fn reserve(
        &self,
        session: &Session,
        device_map: &DeviceMap,
        bytes: u64,
        alignment: u64,
        hint: u64,
    ) -> Result<u64> {
        if bytes == 0
            || !bytes.is_multiple_of(GRANULARITY)
            || !(alignment == 0 || alignment.is_power_of_two())
        {
            return Err(Error::INVALID_VALUE);
        }
        // The host refuses more, for which no window helps.
        if self.lock().reserved.len() >= limits::RESERVATIONS {
            return Err(Error::OUT_OF_MEMORY);
        }
        let start = device_map.reserve(session, bytes, alignment, hint)?;
        self.lock().reserved.insert(start, bytes);
        Ok(start)
    }

    pub(crate) fn unreserve(&self, session: &Session, start: u64, bytes: u64) -> Result {
        let mut state = self.lock();
        let busy = start.checked_add(bytes).is_none_or(|end| state.mapped.range(start..end).next().is_some());
        if state.reserved.get(&start) != Some(&bytes) || busy {
            return Err(Error::INVALID_VALUE);
        }
        session.sync(0, &wire::va_range_free::Args { address: start, bytes })?;
        state.reserved.remove(&start);
        Ok(())
    }

    /// The reservation that an address lies in.
    fn is_reserved(state: &BlocksState, start: u64, end: u64) -> bool {
        state.reserved.range(..=start).next_back().is_some_and(|(base, bytes)| end <= base + bytes)
    }

    pub(crate) fn map(&self, session: &Session, start: u64, bytes: u64, handle: u64) -> Result {
        let end = start.checked_add(bytes).ok_or(Error::INVALID_VALUE)?;
        let mut state = self.lock();
        let block = *state.blocks.get(&handle).filter(|block| block.held > 0).ok_or(Error::INVALID_VALUE)?;
        let whole = bytes > 0 && bytes.is_multiple_of(GRANULARITY) && start.is_multiple_of(GRANULARITY);
        let before = state.mapped.range(..end).next_back();
        let taken = before.is_some_and(|(at, other)| at + other.bytes > start);
        if !whole || bytes > block.bytes || taken || !Self::is_reserved(&state, start, end) {
            return Err(Error::INVALID_VALUE);
        }
        session.sync(0, &wire::phys_alloc_map::Args { allocation: block.number, address: start, bytes })?;
        if let Some(block) = state.blocks.get_mut(&handle) {
            block.mappings += 1;
        }
        state.mapped.insert(start, BlockMapping { bytes, handle, access: BTreeMap::new(), ending: false });
        Ok(())
    }

    /// Unmaps whole mappings when no work uses them.
    pub(crate) fn unmap(
        &self,
        session: &Session,
        streams: &Streams,
        device_map: &DeviceMap,
        start: u64,
        bytes: u64,
    ) -> Result {
        let whole = {
            let mut state = self.lock();
            let whole = state.whole(start, bytes)?;
            for (at, bytes) in &whole {
                if let Some(mapping) = state.mapped.get_mut(at) {
                    mapping.ending = true;
                }
                device_map.reach(*at, *bytes, false);
            }
            whole
        };
        streams.wait_all(session)?;
        let mut state = self.lock();
        session.sync(0, &wire::va_range_unmap::Args { address: start, bytes })?;
        for (at, _) in whole {
            let Some(mapping) = state.mapped.remove(&at) else { continue };
            if let Some(block) = state.blocks.get_mut(&mapping.handle) {
                block.mappings -= 1;
            }
            Self::settle(session, &mut state, mapping.handle)?;
        }
        Ok(())
    }

    /// Sets a device's access to whole mappings.
    pub(crate) fn set_access(
        &self,
        session: &Session,
        streams: &Streams,
        device_map: &DeviceMap,
        start: u64,
        bytes: u64,
        access: BlockAccess,
    ) -> Result {
        let BlockAccess { device, ordinal, flags } = access;
        let access = AccessFlags::from_number(flags).ok_or(Error::INVALID_VALUE)?;
        let narrows = {
            let state = self.lock();
            let whole = state.whole(start, bytes)?;
            let had =
                |at: &u64| state.mapped.get(at).and_then(|mapping| mapping.access.get(&device)).copied();
            whole.iter().any(|(at, _)| had(at).unwrap_or(0) & !flags != 0)
        };
        if narrows {
            streams.wait_all(session)?;
        }
        let mut state = self.lock();
        let whole = state.whole(start, bytes)?;
        session.sync(
            0,
            &wire::va_range_set_access::Args { address: start, bytes, device: Ordinal(ordinal), access },
        )?;
        for (at, bytes) in whole {
            if let Some(mapping) = state.mapped.get_mut(&at) {
                mapping.access.insert(device, flags);
                let reached = mapping.access.values().any(|access| *access != 0);
                device_map.reach(at, bytes, reached);
            }
        }
        Ok(())
    }

    /// The access that a device has to the mapping at an address.
    pub(crate) fn access_at(&self, address: u64, device: i32) -> Result<u32> {
        let state = self.lock();
        let (_, mapping) = state.mapping_at(address).ok_or(Error::INVALID_VALUE)?;
        Ok(mapping.access.get(&device).copied().unwrap_or(0))
    }

    /// Lets other processes of the system open a block; returns the share.
    pub(crate) fn share(&self, session: &Session, handle: u64) -> Result<(PhysicalBlock, u128)> {
        let block = self.get(handle)?;
        let shared = session.sync(0, &wire::phys_alloc_export::Args { allocation: block.number })?;
        Ok((block, shared.share))
    }

    /// Opens a block of another process of the system.
    pub(crate) fn open(
        &self,
        session: &Session,
        devices: &Devices,
        device: i32,
        share: u128,
        shareable: u32,
    ) -> Result<u64> {
        let ordinal = devices.get(device)?.ordinal;
        let opened = session.sync(0, &wire::phys_alloc_import::Args { device: Ordinal(ordinal), share })?;
        Ok(self.add(opened.allocation, opened.bytes, device, shareable))
    }
}
