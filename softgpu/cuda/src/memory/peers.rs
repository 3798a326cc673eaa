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
            if peer.access != 0 {
                peer.table.insert(range.clone(), true, peer.access == 3);
            }
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
    ///
    /// Returns `true` if that may be more than `access`: the caller then waits for them and, if `access` is 0, calls
    /// [`Space::forget_peer`]. Until then a free waits for them too.
    #[must_use]
    pub(crate) fn set_peer(
        &self,
        scope: Scope,
        (ordinal, space): (i32, &'static Space),
        access: u32,
    ) -> bool {
        let book = lock(&self.book);
        let mut peers = lock(&self.peers);
        let mut before = 0;
        match peers.iter_mut().find(|peer| peer.has_access(scope, ordinal)) {
            Some(peer) => before = core::mem::replace(&mut peer.access, access),
            None if access != 0 => {
                peers.push(Peer { scope, ordinal, table: &space.table, running: &space.running, access });
            }
            None => {}
        }
        for (start, chunk) in book.chunks.iter().filter(|(_, chunk)| chunk.home.scope() == scope) {
            // One for each block or for the whole chunk, by the device's policy.
            for range in self.table.within(&(*start..start + chunk.bytes)) {
                if access == 0 {
                    space.table.remove(range.start);
                } else {
                    space.table.insert(range, true, access == 3);
                }
            }
        }
        before & !access != 0
    }

    /// Forgets a GPU that lost its access, after its operations that had it have ended. Of several losses it forgets one, so that the
    /// GPU is known until the last one's operations have ended.
    pub(crate) fn forget_peer(&self, scope: Scope, ordinal: i32) {
        let mut peers = lock(&self.peers);
        let lost = |peer: &Peer| (peer.scope, peer.ordinal, peer.access) == (scope, ordinal, 0);
        if let Some(at) = peers.iter().position(lost) {
            peers.swap_remove(at);
        }
    }

    /// Returns the access of another GPU.
    pub(crate) fn peer_access(&self, scope: Scope, ordinal: i32) -> u32 {
        let peers = lock(&self.peers);
        peers.iter().find(|peer| peer.has_access(scope, ordinal)).map_or(0, |peer| peer.access)
    }

    /// Returns the ordinals of the GPUs that have access to some memory.
    pub(crate) fn peers(&self) -> Vec<i32> {
        lock(&self.peers).iter().filter(|peer| peer.access != 0).map(|peer| peer.ordinal).collect()
    }

    /// Ends the access to a pool that has ended.
    pub(super) fn forget_pool(&self, pool: u64) {
        lock(&self.peers).retain(|peer| peer.scope != Scope::Pool(pool));
    }
}
