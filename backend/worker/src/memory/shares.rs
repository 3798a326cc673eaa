//! Memory that several processes of one VM share: shares of chunks, which the arbiter records.

use super::{Allocation, AllocationPlace, Chunk, ChunkSource, Mapper, Memory, READ_WRITE};
use sluice_driver::{Code, code};
use sluice_messages::custody::UNIT;
use sluice_protocol::limits;

/// An allocation in a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedAllocation {
    pub(crate) share: u128,
    /// The offset of the allocation in the share.
    pub(crate) offset: u64,
}

/// The key of a block's share in the table: never an address of memory.
const fn block_key(number: u64) -> u64 {
    1 << 63 | number
}

fn share_all(sharing: &mut impl ChunkSource, chunks: &[Chunk]) -> Result<u128, Code> {
    if chunks.len() > limits::SHARE_CHUNKS {
        return Err(code::NOT_SUPPORTED);
    }
    let mut share = 0;
    for chunk in chunks {
        match sharing.share(share, chunk) {
            Ok(number) => share = number,
            Err(failed) => {
                if share != 0 {
                    sharing.unshare(chunk.device, share);
                }
                return Err(failed);
            }
        }
    }
    Ok(share)
}

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    /// Shares the chunks of the allocation at `address`; also returns their device.
    pub(crate) fn share(&mut self, address: u64) -> Result<(i32, SharedAllocation), Code> {
        let allocation = self.live.get(&address).ok_or(code::INVALID_VALUE)?;
        let (base, chunks) = match &allocation.place {
            AllocationPlace::Small { pool, .. } => {
                let pool_chunk = self.pools.get(pool).ok_or(code::UNKNOWN)?.chunk();
                (*pool, core::slice::from_ref(pool_chunk))
            }
            AllocationPlace::Large { chunks, .. } => (address, &chunks[..]),
            // Memory of another process can be shared by that process only.
            AllocationPlace::Opened { .. } => return Err(code::INVALID_VALUE),
        };
        let device = chunks.first().map_or(0, |chunk| chunk.device);
        let share = match self.shares.get(&base) {
            Some(share) => *share,
            None => {
                let share = share_all(&mut self.source, chunks)?;
                self.shares.insert(base, share);
                share
            }
        };
        Ok((device, SharedAllocation { share, offset: address - base }))
    }

    /// Maps a share of memory of a device, with access for it and for the device that opens it; returns the address of `offset` in it.
    pub(crate) fn open_share(
        &mut self,
        owner: i32,
        opener: i32,
        shared: SharedAllocation,
        bytes: u64,
    ) -> Result<u64, Code> {
        let chunks = self.source.open(owner, shared.share)?;
        let all: u64 = chunks.iter().map(|chunk| chunk.bytes).sum();
        let inside = bytes > 0 && shared.offset.checked_add(bytes).is_some_and(|end| end <= all);
        let mapped = if inside {
            self.map_side_by_side((owner, None), all, &chunks)
        } else {
            Err(code::INVALID_VALUE)
        };
        match mapped {
            Ok(base) => {
                if opener != owner
                    && let Err(failed) = self.mapper.allow(base, all, opener, READ_WRITE)
                {
                    self.give_up(base, all, chunks);
                    return Err(failed);
                }
                let place = AllocationPlace::Opened { base, chunks, bytes: all };
                let address = base + shared.offset;
                self.live.insert(address, Allocation { place, group: 0, counted: 0 });
                Ok(address)
            }
            Err(failed) => {
                chunks.into_iter().for_each(|chunk| self.source.give(chunk));
                Err(failed)
            }
        }
    }

    /// Shares a block; returns its device and the share.
    pub(crate) fn share_block(&mut self, number: u64) -> Result<(i32, u128), Code> {
        let block = self.blocks.get(&number).ok_or(code::INVALID_VALUE)?;
        let device = block.chunks.first().map_or(0, |chunk| chunk.device);
        if let Some(share) = self.shares.get(&block_key(number)) {
            return Ok((device, *share));
        }
        let share = share_all(&mut self.source, &block.chunks)?;
        self.shares.insert(block_key(number), share);
        Ok((device, share))
    }

    /// Makes a block of the chunks of a share; returns its number and its bytes.
    pub(crate) fn open_block(&mut self, device: i32, share: u128) -> Result<(u64, u64), Code> {
        let chunks = self.source.open(device, share)?;
        let bytes = chunks.iter().map(|chunk| chunk.bytes).sum::<u64>();
        debug_assert!(bytes.is_multiple_of(UNIT), "chunks are multiples of the unit");
        Ok((self.add_block(chunks, bytes), bytes))
    }

    /// Ends the share of the memory at `base`, if there is one.
    pub(super) fn unshare(&mut self, base: u64, chunks: &[Chunk]) {
        if let (Some(share), Some(chunk)) = (self.shares.remove(&base), chunks.first()) {
            self.source.unshare(chunk.device, share);
        }
    }

    pub(super) fn unshare_block(&mut self, number: u64, chunks: &[Chunk]) {
        self.unshare(block_key(number), chunks);
    }
}
