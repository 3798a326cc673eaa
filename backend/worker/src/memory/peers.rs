//! Access of devices to the memory of others. The driver's own call for it does not cover mappings, of which all memory of a session consists.

use super::{AllocationPlace, Chunk, ChunkSource, Mapper, Memory};
use sluice_driver::{Code, code};
use sluice_protocol::field::AccessFlags;

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    /// Sets the access of a device to the memory of a group and another device, that of now and that of later. After a failure the access
    /// is as before.
    pub(crate) fn set_peer(
        &mut self,
        group: u32,
        owner: i32,
        peer: i32,
        access: AccessFlags,
    ) -> Result<(), Code> {
        if owner == peer {
            return Err(code::INVALID_DEVICE);
        }
        self.group(group, owner)?;
        let before = self.peers.get(&(group, owner)).and_then(|peers| peers.get(&peer)).copied();
        let ranges = self.ranges(group, owner);
        for (done, (at, bytes)) in ranges.iter().enumerate() {
            if let Err(failed) = self.mapper.allow(*at, *bytes, peer, access as u32) {
                let before = before.unwrap_or(AccessFlags::None);
                for (at, bytes) in ranges.iter().take(done) {
                    if let Err(failed) = self.mapper.allow(*at, *bytes, peer, before as u32) {
                        tracing::error!(
                            code = failed,
                            "cannot take back the access of a device to another's memory"
                        );
                    }
                }
                return Err(failed);
            }
        }
        if access == AccessFlags::None {
            if let Some(peers) = self.peers.get_mut(&(group, owner)) {
                peers.remove(&peer);
            }
        } else {
            self.peers.entry((group, owner)).or_default().insert(peer, access);
        }
        Ok(())
    }

    /// Gives the peers of a group access to new memory of it.
    pub(super) fn allow_peers(
        &mut self,
        group: Option<u32>,
        owner: i32,
        at: u64,
        bytes: u64,
    ) -> Result<(), Code> {
        let peers = group.and_then(|group| self.peers.get(&(group, owner)));
        for (peer, access) in peers.into_iter().flatten() {
            self.mapper.allow(at, bytes, *peer, *access as u32)?;
        }
        Ok(())
    }

    /// The mapped memory of a group and device, allocated or not.
    fn ranges(&self, group: u32, device: i32) -> Vec<(u64, u64)> {
        let pools = self.pools.iter().filter(|(_, pool)| pool.group() == group && pool.device() == device);
        let pools = pools.map(|(base, pool)| (*base, pool.bytes()));
        let live = self.live.iter().filter(|(_, allocation)| allocation.group == group);
        let live = live.filter_map(|(at, allocation)| match &allocation.place {
            AllocationPlace::Large { chunks, bytes } if is_of(chunks, device) => Some((*at, *bytes)),
            _ => None,
        });
        pools.chain(live).chain(self.kept.ranges(group, device)).collect()
    }
}

/// True if chunks are of a device.
fn is_of(chunks: &[Chunk], device: i32) -> bool {
    chunks.first().is_some_and(|chunk| chunk.device == device)
}
