//! The guest's own use of the virtual-memory API: blocks of physical memory, reservations, mappings.
//!
//! A block is charged when it is made and given back when it is released and mapped nowhere. Reservations are addresses of the
//! session's windows and cost nothing.

use super::{Chunk, ChunkSource, Mapper, Memory};
use sluice_driver::{Code, code};
use sluice_messages::custody::UNIT;
use sluice_protocol::{field::AccessFlags, limits};

/// Physical memory.
#[derive(Debug)]
pub(super) struct PhysicalBlock {
    pub(super) chunks: Vec<Chunk>,
    bytes: u64,
    mappings: u32,
    released: bool,
}

/// A mapping of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct MappedBlock {
    block: u64,
    bytes: u64,
    /// The devices that may access it, as bits.
    reached: u64,
}

const _: () = assert!(limits::DEVICES <= u64::BITS);

/// A mapping whose access was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AccessedBlock {
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    /// The device of the memory.
    pub(crate) device: i32,
    /// True if any device may access it.
    pub(crate) may: bool,
}

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    /// Makes a block; returns its number.
    pub(crate) fn create_block(&mut self, device: i32, bytes: u64) -> Result<u64, Code> {
        if bytes == 0 || !bytes.is_multiple_of(UNIT) || self.blocks.len() >= limits::LEASES {
            return Err(if bytes.is_multiple_of(UNIT) && bytes > 0 {
                code::OUT_OF_MEMORY
            } else {
                code::INVALID_VALUE
            });
        }
        let chunks = self.take_chunks(device, bytes);
        self.report_idle();
        Ok(self.add_block(chunks?, bytes))
    }

    pub(super) fn add_block(&mut self, chunks: Vec<Chunk>, bytes: u64) -> u64 {
        let number = self.next_block;
        self.next_block += 1;
        self.blocks.insert(number, PhysicalBlock { chunks, bytes, mappings: 0, released: false });
        number
    }

    /// Records that the guest has closed its last handle of a block.
    pub(crate) fn release_block(&mut self, block: u64) -> Result<(), Code> {
        let found = self.blocks.get_mut(&block).filter(|block| !block.released).ok_or(code::INVALID_VALUE)?;
        found.released = true;
        self.settle_block(block);
        Ok(())
    }

    fn settle_block(&mut self, number: u64) {
        if self.blocks.get(&number).is_some_and(|block| block.released && block.mappings == 0)
            && let Some(block) = self.blocks.remove(&number)
        {
            self.unshare_block(number, &block.chunks);
            block.chunks.into_iter().for_each(|chunk| self.source.give(chunk));
        }
    }

    /// Reserves addresses, at `hint` if the range is free in the windows.
    pub(crate) fn reserve_range(&mut self, bytes: u64, alignment: u64, hint: u64) -> Result<u64, Code> {
        let aligned = alignment == 0 || alignment.is_power_of_two();
        if bytes == 0 || !bytes.is_multiple_of(UNIT) || !aligned {
            return Err(code::INVALID_VALUE);
        }
        if self.reserved.len() >= limits::RESERVATIONS {
            return Err(code::OUT_OF_MEMORY);
        }
        let alignment = alignment.max(UNIT);
        let hinted = hint != 0 && hint.is_multiple_of(alignment) && self.space.take_at(hint, bytes);
        let at = match hinted {
            true => hint,
            false => self.space.take_aligned(bytes, alignment).ok_or(code::OUT_OF_MEMORY)?,
        };
        self.reserved.insert(at, bytes);
        Ok(at)
    }

    /// Frees a whole reservation without mappings.
    pub(crate) fn free_range(&mut self, at: u64, bytes: u64) -> Result<(), Code> {
        if self.reserved.get(&at) != Some(&bytes) || self.mapped.range(at..at + bytes).next().is_some() {
            return Err(code::INVALID_VALUE);
        }
        self.reserved.remove(&at);
        self.space.give(at, bytes);
        Ok(())
    }

    /// Maps the first `bytes` of a block into a reservation.
    pub(crate) fn map_block(&mut self, number: u64, at: u64, bytes: u64) -> Result<(), Code> {
        let end = at.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
        let inside = self.reserved.range(..=at).next_back().is_some_and(|(base, all)| end <= base + all);
        let before = self.mapped.range(..end).next_back();
        let taken = before.is_some_and(|(other, mapped)| other + mapped.bytes > at);
        let whole = bytes > 0 && bytes.is_multiple_of(UNIT) && at.is_multiple_of(UNIT);
        if !inside || taken || !whole {
            return Err(code::INVALID_VALUE);
        }
        let block = self.blocks.get_mut(&number).filter(|block| bytes <= block.bytes && !block.released);
        let block = block.ok_or(code::INVALID_VALUE)?;
        block.mappings += 1;
        // Taken out of the table for the call, since mapping needs the rest of the table, too.
        let chunks = core::mem::take(&mut block.chunks);
        let mapped = self.map_chunks(at, bytes, &chunks);
        if let Some(block) = self.blocks.get_mut(&number) {
            block.chunks = chunks;
            block.mappings -= u32::from(mapped.is_err());
        }
        mapped?;
        self.mapped.insert(at, MappedBlock { block: number, bytes, reached: 0 });
        Ok(())
    }

    /// Whole mappings that exactly fill a range.
    fn whole(&self, at: u64, bytes: u64) -> Result<Vec<(u64, MappedBlock)>, Code> {
        let end = at.checked_add(bytes).filter(|_| bytes > 0).ok_or(code::INVALID_VALUE)?;
        let (mut next, mut found) = (at, Vec::new());
        for (base, mapped) in self.mapped.range(at..end) {
            if *base != next {
                return Err(code::INVALID_VALUE);
            }
            found.push((*base, *mapped));
            next += mapped.bytes;
        }
        if next == end { Ok(found) } else { Err(code::INVALID_VALUE) }
    }

    /// Sets a device's access to whole mappings.
    pub(crate) fn set_access(
        &mut self,
        at: u64,
        bytes: u64,
        device: i32,
        access: AccessFlags,
    ) -> Result<Vec<AccessedBlock>, Code> {
        let whole = self.whole(at, bytes)?;
        self.mapper.allow(at, bytes, device, access as u32)?;
        let bit = 1 << device.cast_unsigned().min(u64::BITS - 1);
        let mut accessed = Vec::with_capacity(whole.len());
        for (at, _) in whole {
            let Some(mapped) = self.mapped.get_mut(&at) else { continue };
            let others = mapped.reached & !bit;
            mapped.reached = if access == AccessFlags::None { others } else { others | bit };
            let chunks = self.blocks.get(&mapped.block).map(|block| &*block.chunks);
            let device = chunks.and_then(|chunks| chunks.first()).map_or(0, |chunk| chunk.device);
            accessed.push(AccessedBlock { at, bytes: mapped.bytes, device, may: mapped.reached != 0 });
        }
        Ok(accessed)
    }

    /// Unmaps whole mappings. A block that cannot be unmapped stays charged.
    pub(crate) fn unmap_range(&mut self, at: u64, bytes: u64) -> Result<(), Code> {
        for (base, mapped) in self.whole(at, bytes)? {
            let Some(block) = self.blocks.get_mut(&mapped.block) else { return Err(code::UNKNOWN) };
            let chunks = core::mem::take(&mut block.chunks);
            let clean = self.unmap_chunks(base, mapped.bytes, &chunks);
            if let Some(block) = self.blocks.get_mut(&mapped.block) {
                block.chunks = chunks;
                block.mappings -= u32::from(clean);
            }
            if !clean {
                return Err(code::UNKNOWN);
            }
            self.mapped.remove(&base);
            self.settle_block(mapped.block);
        }
        Ok(())
    }
}
