//! Memory pools: handles, settings, and the pool of each device.
//!
//! The host counts the memory of a pool, and identifies a pool by a number: a device's own pool has its ordinal plus one,
//! the others have numbers beyond all devices.

use crate::{
    error::{Error, Result},
    session::Session,
    state::devices::Devices,
};
use core::hash::{BuildHasher, Hasher};
use sluice_protocol::{calls::wire, field::Ordinal, handle, limits};
use std::{
    collections::{BTreeMap, VecDeque, hash_map::RandomState},
    sync::{Mutex, MutexGuard},
};

/// Makes a handle of a number.
const TAG: u64 = (handle::POOL as u64) << 56;

#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryPool {
    pub(crate) handle: u64,
    /// Its number on the host.
    pub(crate) number: u32,
    pub(crate) device: i32,
    /// The device's number on the host.
    pub(crate) ordinal: u32,
    is_default: bool,
    /// Bytes it may have; 0 for no limit of its own.
    pub(crate) most: u64,
    pub(crate) threshold: u64,
    /// The identity by which processes share it, if they may.
    pub(crate) shared: Option<SharedPool>,
    /// True (1) for each way in which freed memory may be used again: behind events, if it is free by chance, by waiting.
    pub(crate) reuse: [u32; 3],
}

/// A pool that processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedPool {
    /// Different, in practice, from that of any other pool.
    pub(crate) identity: u64,
    /// True for a pool of another process, from which nothing is allocated here, and which the host does not know.
    pub(crate) imported: bool,
}

impl SharedPool {
    /// A new identity.
    pub(crate) fn new() -> SharedPool {
        // Each state has keys of its own.
        SharedPool { identity: RandomState::new().build_hasher().finish(), imported: false }
    }
}

impl MemoryPool {
    /// True for a pool of another process.
    pub(crate) fn is_imported(&self) -> bool {
        self.shared.is_some_and(|shared| shared.imported)
    }
}

/// The host's figures of a pool.
pub(crate) type PoolUsage = wire::pool_usage::Reply;

/// The high-water marks that are reset before they are read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reset {
    pub(crate) reserved: bool,
    pub(crate) used: bool,
}

/// The pools of the process.
#[derive(Default)]
pub(crate) struct Pools {
    state: Mutex<PoolsState>,
}

#[derive(Default)]
struct PoolsState {
    pools: BTreeMap<u64, MemoryPool>,
    /// The access of other devices to the memory of a pool: 1 to read, 3 to read and write.
    access: BTreeMap<(u64, i32), u32>,
    /// The pool of `cuMemAllocAsync`, if it is not the device's own.
    current: BTreeMap<i32, u64>,
    /// Numbers in use so far, and numbers of destroyed pools, the oldest in front.
    given: u32,
    ended: VecDeque<u32>,
    /// Makes handles of a reused number differ.
    made: u64,
}

impl Pools {
    fn lock(&self) -> MutexGuard<'_, PoolsState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn get(&self, handle: u64) -> Result<MemoryPool> {
        self.lock().pools.get(&handle).copied().ok_or(Error::INVALID_VALUE)
    }

    /// A device's own pool.
    pub(crate) fn default_of(&self, devices: &Devices, device: i32) -> Result<MemoryPool> {
        let ordinal = devices.get(device)?.ordinal;
        let handle = TAG | u64::from(ordinal);
        let number = ordinal + 1;
        let new = MemoryPool {
            handle,
            number,
            device,
            ordinal,
            is_default: true,
            most: 0,
            threshold: 0,
            shared: None,
            reuse: [1; 3],
        };
        Ok(*self.lock().pools.entry(handle).or_insert(new))
    }

    /// The pool of `cuMemAllocAsync` on a device.
    pub(crate) fn current(&self, devices: &Devices, device: i32) -> Result<MemoryPool> {
        let default = self.default_of(devices, device)?;
        let state = self.lock();
        let handle = state.current.get(&device).copied().unwrap_or(default.handle);
        Ok(state.pools.get(&handle).copied().unwrap_or(default))
    }

    pub(crate) fn set_current(&self, devices: &Devices, device: i32, handle: u64) -> Result {
        devices.get(device)?;
        let pool = self.get(handle)?;
        if pool.device != device {
            return Err(Error::INVALID_DEVICE);
        }
        if pool.is_imported() {
            return Err(Error::INVALID_VALUE);
        }
        self.lock().current.insert(device, handle);
        Ok(())
    }

    /// True if a pool of this process has the identity.
    pub(crate) fn is_own(&self, identity: u64) -> bool {
        let own = SharedPool { identity, imported: false };
        self.lock().pools.values().any(|pool| pool.shared == Some(own))
    }

    /// Adds a pool of another process.
    pub(crate) fn import(&self, devices: &Devices, device: i32, identity: u64) -> Result<u64> {
        let ordinal = devices.get(device)?.ordinal;
        let mut state = self.lock();
        state.made += 1;
        // Number 0 is that of no pool of the host.
        let handle = TAG | state.made << 16;
        let pool = MemoryPool {
            handle,
            number: 0,
            device,
            ordinal,
            is_default: false,
            most: 0,
            threshold: 0,
            shared: Some(SharedPool { identity, imported: true }),
            reuse: [1; 3],
        };
        state.pools.insert(handle, pool);
        Ok(handle)
    }

    pub(crate) fn create(
        &self,
        session: &Session,
        devices: &Devices,
        device: i32,
        most: u64,
        shared: Option<SharedPool>,
    ) -> Result<u64> {
        const FIRST: u32 = limits::DEVICES + 1;
        let ordinal = devices.get(device)?.ordinal;
        let pool = {
            let mut state = self.lock();
            let number = if FIRST + state.given < limits::POOLS {
                state.given += 1;
                FIRST + state.given - 1
            } else {
                state.ended.pop_front().ok_or(Error::OUT_OF_MEMORY)?
            };
            state.made += 1;
            let handle = TAG | state.made << 16 | u64::from(number);
            let pool = MemoryPool {
                handle,
                number,
                device,
                ordinal,
                is_default: false,
                most,
                threshold: 0,
                shared,
                reuse: [1; 3],
            };
            state.pools.insert(handle, pool);
            pool
        };
        set_threshold(session, &pool, 0)?;
        self.usage(session, &pool, Reset { reserved: true, used: true })?;
        Ok(pool.handle)
    }

    pub(crate) fn destroy(&self, session: &Session, handle: u64) -> Result {
        let pool = {
            let mut state = self.lock();
            let pool =
                *state.pools.get(&handle).filter(|pool| !pool.is_default).ok_or(Error::INVALID_VALUE)?;
            state.pools.remove(&handle);
            state.current.retain(|_, current| *current != handle);
            state.access.retain(|(of, _), _| *of != handle);
            pool
        };
        if pool.is_imported() {
            return Ok(());
        }
        session.post(0, None, &wire::pool_end::Args { pool: pool.number })?;
        self.lock().ended.push_back(pool.number);
        Ok(())
    }

    /// The access of another device to the memory of a pool; 0 for none.
    pub(crate) fn access(&self, handle: u64, device: i32) -> u32 {
        self.lock().access.get(&(handle, device)).copied().unwrap_or(0)
    }

    /// Records the access that the host has set.
    pub(crate) fn set_access(&self, handle: u64, device: i32, access: u32) {
        self.lock().access.insert((handle, device), access);
    }

    /// Changes a pool's settings.
    pub(crate) fn change(&self, handle: u64, change: impl FnOnce(&mut MemoryPool)) -> Result {
        self.lock().pools.get_mut(&handle).map(change).ok_or(Error::INVALID_VALUE)
    }

    pub(crate) fn usage(&self, session: &Session, pool: &MemoryPool, reset: Reset) -> Result<PoolUsage> {
        if pool.is_imported() {
            return Ok(PoolUsage { reserved: 0, reserved_high: 0, used: 0, used_high: 0 });
        }
        session.sync(
            0,
            &wire::pool_usage::Args {
                pool: pool.number,
                device: Ordinal(pool.ordinal),
                reset_reserved: reset.reserved,
                reset_used: reset.used,
            },
        )
    }
}

/// Sets on the host the bytes that a pool may keep.
pub(crate) fn set_threshold(session: &Session, pool: &MemoryPool, bytes: u64) -> Result {
    if pool.is_imported() {
        return Ok(());
    }
    let posted = session.post_checked(
        0,
        None,
        &wire::pool_threshold::Args { pool: pool.number, device: Ordinal(pool.ordinal), bytes },
    );
    posted.map(drop)
}
