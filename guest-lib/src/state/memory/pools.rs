//! Memory pools: handles, settings, and the pool of each device.
//!
//! The host counts the memory of a pool, and knows a pool as a number: a device's own pool has the number behind its ordinal,
//! the others those behind all devices.

use crate::{
    error::{Error, Result},
    session::Session,
    state::devices::Devices,
};
use sluice_protocol::{calls::wire, limits};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard},
};

/// What makes a handle of a number.
const TAG: u64 = 0x58 << 56;

/// One pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pool {
    pub(crate) handle: u64,
    /// Its number on the host's side.
    pub(crate) number: u32,
    pub(crate) device: i32,
    /// The device's number on the host's side.
    pub(crate) ordinal: u32,
    is_default: bool,
    /// Bytes it may have; 0 for no limit of its own.
    pub(crate) most: u64,
    pub(crate) threshold: u64,
    /// Whether freed memory may be used again: behind events, when it happens to be free, by waiting.
    pub(crate) reuse: [u32; 3],
}

/// What the host says about a pool.
pub(crate) type Usage = wire::pool_usage::Reply;

/// The pools of the process.
#[derive(Default)]
pub(crate) struct Pools {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pools: BTreeMap<u64, Pool>,
    /// The pool that `cuMemAllocAsync` takes, where it is not the device's own.
    current: BTreeMap<i32, u64>,
    /// Numbers that were given, and those of pools that ended, the longest ended in front.
    given: u32,
    ended: VecDeque<u32>,
    /// Makes handles of numbers that come again differ.
    made: u64,
}

impl Pools {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn get(&self, handle: u64) -> Result<Pool> {
        self.lock().pools.get(&handle).copied().ok_or(Error::INVALID_VALUE)
    }

    /// A device's own pool.
    pub(crate) fn default_of(&self, devices: &Devices, device: i32) -> Result<Pool> {
        let ordinal = devices.get(device)?.ordinal;
        let handle = TAG | u64::from(ordinal);
        let number = ordinal + 1;
        let new =
            Pool { handle, number, device, ordinal, is_default: true, most: 0, threshold: 0, reuse: [1; 3] };
        Ok(*self.lock().pools.entry(handle).or_insert(new))
    }

    /// The pool that `cuMemAllocAsync` takes on a device.
    pub(crate) fn current(&self, devices: &Devices, device: i32) -> Result<Pool> {
        let default = self.default_of(devices, device)?;
        let state = self.lock();
        let handle = state.current.get(&device).copied().unwrap_or(default.handle);
        Ok(state.pools.get(&handle).copied().unwrap_or(default))
    }

    pub(crate) fn set_current(&self, devices: &Devices, device: i32, handle: u64) -> Result {
        devices.get(device)?;
        if self.get(handle)?.device != device {
            return Err(Error::INVALID_DEVICE);
        }
        self.lock().current.insert(device, handle);
        Ok(())
    }

    pub(crate) fn create(&self, session: &Session, devices: &Devices, device: i32, most: u64) -> Result<u64> {
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
            let pool = Pool {
                handle,
                number,
                device,
                ordinal,
                is_default: false,
                most,
                threshold: 0,
                reuse: [1; 3],
            };
            state.pools.insert(handle, pool);
            pool
        };
        set_threshold(session, &pool, 0)?;
        self.usage(session, &pool, 3)?;
        Ok(pool.handle)
    }

    pub(crate) fn destroy(&self, session: &Session, handle: u64) -> Result {
        let pool = {
            let mut state = self.lock();
            let pool =
                *state.pools.get(&handle).filter(|pool| !pool.is_default).ok_or(Error::INVALID_VALUE)?;
            state.pools.remove(&handle);
            state.current.retain(|_, current| *current != handle);
            pool
        };
        session.post(0, wire::pool_end::CALL, None, |writer| wire::pool_end::put(writer, pool.number))?;
        self.lock().ended.push_back(pool.number);
        Ok(())
    }

    /// Changes a pool's settings.
    pub(crate) fn change(&self, handle: u64, change: impl FnOnce(&mut Pool)) -> Result {
        self.lock().pools.get_mut(&handle).map(change).ok_or(Error::INVALID_VALUE)
    }

    /// What a pool has; see the wire call for `reset`.
    pub(crate) fn usage(&self, session: &Session, pool: &Pool, reset: u32) -> Result<Usage> {
        session.sync(
            0,
            wire::pool_usage::CALL,
            |writer| wire::pool_usage::put(writer, pool.number, pool.ordinal, reset),
            wire::pool_usage::Reply::get,
        )
    }
}

/// Tells the host what a pool may keep.
pub(crate) fn set_threshold(session: &Session, pool: &Pool, bytes: u64) -> Result {
    let posted = session.post_checked(0, wire::pool_threshold::CALL, None, |writer| {
        wire::pool_threshold::put(writer, pool.number, pool.ordinal, bytes)
    });
    posted.map(drop)
}
