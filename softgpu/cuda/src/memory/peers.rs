//! Access of other GPUs to the memory of a GPU.
//!
//! A peer's mapping table has the ranges of the memory that it may access, besides its own. A change of the memory changes all tables that
//! have it, so that a range is in a peer's table exactly as long as in the owner's.

use std::ops::Range;

use softgpu_device::Lack;

use super::book::Home;
use super::{Block, BlockKind, Space};
use crate::lock::lock;

/// Memory whose access is given as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// That of all contexts, without pools.
    Contexts,
    /// That of the pool with this handle.
    Pool(u64),
    /// Memory of other processes.
    Opened,
}

/// A GPU that has access to memory of another.
pub(super) struct Peer {
    scope: Scope,
    ordinal: i32,
    space: &'static Space,
    writes: bool,
}

impl Home {
    /// The owner of a block.
    pub(super) fn of(block: &Block) -> Home {
        match block.kind {
            BlockKind::Pool => Home::Pool(block.pool),
            BlockKind::Imported => Home::Imported,
            BlockKind::Internal => Home::Driver,
            _ => Home::Heap,
        }
    }

    /// The scope of the access to its memory.
    fn scope(self) -> Scope {
        match self {
            Home::Heap | Home::Driver => Scope::Contexts,
            Home::Pool(pool) => Scope::Pool(pool),
            Home::Imported => Scope::Opened,
        }
    }
}

impl Space {
    /// True if this GPU can take part in peer access. An instance reaches its own memory only.
    pub(crate) fn can_have_peers(&self) -> bool {
        !self.owner.is_confined() && !self.lacks(Lack::PeerAccess)
    }

    fn peers_of(&self, home: Home) -> Vec<(&'static Space, bool)> {
        let peers = lock(&self.peers);
        let of = home.scope();
        peers.iter().filter(|peer| peer.scope == of).map(|peer| (peer.space, peer.writes)).collect()
    }

    /// Makes device memory accessible.
    pub(super) fn show(&self, home: Home, range: Range<u64>) {
        for (peer, writes) in self.peers_of(home) {
            peer.table.insert(range.clone(), true, writes);
        }
        self.table.insert(range, true, true);
    }

    /// Makes device memory inaccessible for operations that begin later.
    pub(super) fn hide(&self, home: Home, start: u64) {
        self.table.remove(start);
        for (peer, _) in self.peers_of(home) {
            peer.table.remove(start);
        }
    }

    /// Waits for the running operations that may access memory.
    pub(super) fn wait_for_users(&self, home: Home) {
        self.running.wait();
        for (peer, _) in self.peers_of(home) {
            peer.running.wait();
        }
    }

    /// True if no running operation can access memory.
    pub(super) fn is_unused(&self, home: Home) -> bool {
        self.running.is_idle() && self.peers_of(home).iter().all(|(peer, _)| peer.running.is_idle())
    }

    /// Sets the access of another GPU: 0 none, 1 read, 3 read and write. Operations that run go on with the access that they have.
    pub(crate) fn set_peer(&self, scope: Scope, (ordinal, space): (i32, &'static Space), access: u32) {
        let book = lock(&self.book);
        let mut peers = lock(&self.peers);
        peers.retain(|peer| (peer.scope, peer.ordinal) != (scope, ordinal));
        let writes = access == 3;
        if access != 0 {
            peers.push(Peer { scope, ordinal, space, writes });
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
