//! The operations that the dispatcher does by itself, if the memory helper has no job: they need neither the arbiter nor the
//! driver, and cost no change of threads. Everything else is in [`super::helper`].

use super::{Allocation, AllocationPlace, ChunkSource, LARGE, Mapper, Memory};

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    /// Allocates without the source and the mapper: in a pool chunk that is in use and has room. `None`:
    /// [`Memory::allocate_in`] allocates or returns the reason for a refusal.
    pub(crate) fn allocate_at_hand(&mut self, group: u32, device: i32, bytes: u64) -> Option<u64> {
        if bytes == 0 || bytes >= LARGE || self.group(group, device).is_err() {
            return None;
        }
        let (address, place, was_idle) = self.take_small(group, device, bytes, false)?;
        debug_assert!(was_idle.is_none(), "the pool was idle");
        Some(self.allocated(group, bytes, address, place))
    }

    /// Frees without the source and the mapper: in a pool chunk that stays in use. `false`: [`Memory::free`] frees or returns
    /// the reason for a refusal.
    pub(crate) fn free_at_hand(&mut self, address: u64) -> bool {
        let Some(Allocation { place: AllocationPlace::Small { pool, .. }, .. }) = self.live.get(&address)
        else {
            return false;
        };
        let stays = self.pools.get(pool).is_some_and(|pool| !pool.is_last());
        stays && !self.mapper.clears() && self.free(address).is_ok()
    }
}
