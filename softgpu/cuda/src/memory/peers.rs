//! Access of other GPUs to the memory of a GPU.
//!
//! A peer's mapping table has the ranges of the memory that it may access, besides its own. A change of the memory changes all tables that
//! have it, so that a range is in a peer's table exactly as long as in the owner's.

use std::ops::Range;

use softgpu_device::Lack;

use super::Space;
use super::book::{Home, Peer, Scope};
use crate::lock::lock;

impl Space {
    /// True if this GPU can take part in peer access. An instance reaches its own memory only.
    pub(crate) fn can_have_peers(&self) -> bool {
        !self.owner.is_confined() && !self.lacks(Lack::PeerAccess)
    }

    fn peers_of(&self, home: Home) -> Vec<Peer> {
        let of = home.scope();
        lock(&self.peers).iter().filter(|peer| peer.scope == of).copied().collect()
    }

    /// Makes device memory accessible.
    pub(super) fn show(&self, home: Home, range: Range<u64>) {
        for peer in self.peers_of(home) {
            peer.table.insert(range.clone(), true, peer.writes);
        }
        self.table.insert(range, true, true);
    }

    /// Makes device memory inaccessible for operations that begin later.
    pub(super) fn hide(&self, home: Home, start: u64) {
        self.table.remove(start);
        for peer in self.peers_of(home) {
            peer.table.remove(start);
        }
    }

    /// Waits for the running operations that may access memory.
    pub(super) fn wait_for_users(&self, home: Home) {
        self.running.wait();
        for peer in self.peers_of(home) {
            peer.running.wait();
        }
    }

    /// True if no running operation can access memory.
    pub(super) fn is_unused(&self, home: Home) -> bool {
        self.running.is_idle() && self.peers_of(home).iter().all(|peer| peer.running.is_idle())
    }

    /// Sets the access of another GPU: 0 none, 1 read, 3 read and write. Operations that run go on with the access that they have.
    pub(crate) fn set_peer(&self, scope: Scope, (ordinal, space): (i32, &'static Space), access: u32) {
        let book = lock(&self.book);
        let mut peers = lock(&self.peers);
        peers.retain(|peer| (peer.scope, peer.ordinal) != (scope, ordinal));
        let writes = access == 3;
        if access != 0 {
            peers.push(Peer { scope, ordinal, table: &space.table, running: &space.running, writes });
        }
        for (start, chunk) in book.chunks.iter().filter(|(_, chunk)| chunk.home.scope() == scope) {
            // One for each block or for the whole chunk, by the device's policy.
            for range in self.table.within(&(*start..start + chunk.bytes)) {
                if access == 0 {
                    space.table.remove(range.start);
                } else {
                    space.table.insert(range, true, writes);
                }
            }
        }
    }

    /// Returns the access of another GPU.
    pub(crate) fn peer_access(&self, scope: Scope, ordinal: i32) -> u32 {
        let peers = lock(&self.peers);
        let found = peers.iter().find(|peer| (peer.scope, peer.ordinal) == (scope, ordinal));
        found.map_or(0, |peer| if peer.writes { 3 } else { 1 })
    }

    /// Returns the ordinals of the GPUs that have access to some memory.
    pub(crate) fn peers(&self) -> Vec<i32> {
        lock(&self.peers).iter().map(|peer| peer.ordinal).collect()
    }

    /// Ends the access to a pool that has ended.
    pub(super) fn forget_pool(&self, pool: u64) {
        lock(&self.peers).retain(|peer| peer.scope != Scope::Pool(pool));
    }
}
