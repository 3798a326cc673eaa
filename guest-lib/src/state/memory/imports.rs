//! Memory that several processes of the system share: tokens that name a share, and the shares that are open here.
//!
//! A token holds the share's number, 128 random bits that the arbiter draws. The host opens a share for processes of its VM
//! that name all of them, so a token is a secret of the processes that receive it: a process that never received a token cannot
//! make one.

use crate::{
    error::{Error, Result},
    session::Session,
    state::{
        contexts::Context,
        devices::Devices,
        memory::device_map::{DeviceMap, DeviceMapRange, RangeOrigin},
        streams::Streams,
    },
};
use core::hash::{BuildHasher, Hasher};
use rustix::{
    fd::OwnedFd,
    fs::{MemfdFlags, memfd_create},
};
use sluice_protocol::{
    calls::wire,
    field::{DeviceAddress, Ordinal},
};
use std::{
    collections::{BTreeMap, hash_map::RandomState},
    sync::{Mutex, MutexGuard, OnceLock},
};

const MEMORY: u64 = u64::from_le_bytes(*b"sluicipc");
const POOL: u64 = u64::from_le_bytes(*b"sluicpol");
const POOL_POINTER: u64 = u64::from_le_bytes(*b"sluicptr");
const EVENT: u64 = u64::from_le_bytes(*b"sluicevt");
const BLOCK: u64 = u64::from_le_bytes(*b"sluicblk");

/// The 64 bytes that name an allocation or a block for other processes of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExportToken {
    magic: u64,
    pub(crate) device: [u8; 16],
    /// The process that made it. In the place of it, a pool and its allocations have the pool's identity.
    process: u64,
    pub(crate) share: u128,
    offset: u64,
    bytes: u64,
}

/// A random number that, in practice, no other process has.
fn this_process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        hasher.finish()
    })
}

impl ExportToken {
    /// Makes the token of an allocation of a device.
    pub(crate) fn allocation(
        session: &Session,
        device: [u8; 16],
        range: &DeviceMapRange,
    ) -> Result<ExportToken> {
        let shared =
            session.sync(range.context, &wire::ipc_export::Args { address: DeviceAddress(range.start) })?;
        let (share, offset) = (shared.share, shared.offset);
        Ok(ExportToken { magic: MEMORY, device, process: this_process(), share, offset, bytes: range.bytes })
    }

    /// Makes the token of a pool.
    pub(crate) const fn pool(device: [u8; 16], identity: u64) -> ExportToken {
        ExportToken { magic: POOL, device, process: identity, share: 0, offset: 0, bytes: 0 }
    }

    /// Reads the token of a pool: its device and its identity.
    pub(crate) fn from_pool(bytes: &[u8; 64]) -> Result<([u8; 16], u64)> {
        ExportToken::from_bytes(POOL, bytes).map(|token| (token.device, token.process))
    }

    /// Makes the token of an allocation the one of a pool.
    pub(crate) const fn in_pool(self, identity: u64) -> ExportToken {
        ExportToken { magic: POOL_POINTER, process: identity, ..self }
    }

    /// Reads the token of an allocation of a pool.
    pub(crate) fn from_pool_pointer(
        device: [u8; 16],
        identity: u64,
        bytes: &[u8; 64],
    ) -> Result<ExportToken> {
        let token = ExportToken::from_bytes(POOL_POINTER, bytes)?;
        if (token.device, token.process) == (device, identity) {
            Ok(token)
        } else {
            Err(Error::INVALID_VALUE)
        }
    }

    /// Makes the token of an event: its chunk's share and offset, and its place there.
    pub(crate) fn event(device: [u8; 16], share: u128, offset: u64, place: u64) -> ExportToken {
        ExportToken { magic: EVENT, device, process: this_process(), share, offset, bytes: place }
    }

    /// Reads the token of an event on a device.
    pub(crate) fn from_event(devices: &Devices, device: i32, bytes: &[u8; 64]) -> Result<ExportToken> {
        let token = ExportToken::from_bytes(EVENT, bytes)?;
        if token.owner(devices)? == device { Ok(token) } else { Err(Error::NOT_SUPPORTED) }
    }

    /// The offset in the share, and the length or place.
    pub(crate) const fn within(&self) -> (u64, u64) {
        (self.offset, self.bytes)
    }

    /// The device of a token of another process.
    fn owner(&self, devices: &Devices) -> Result<i32> {
        let owner = devices.iter().position(|device| device.uuid == self.device);
        let owner = owner.and_then(|index| i32::try_from(index).ok()).ok_or(Error::INVALID_VALUE)?;
        if self.process == this_process() { Err(Error::INVALID_CONTEXT) } else { Ok(owner) }
    }

    /// Makes the token of a block.
    pub(crate) fn block(device: [u8; 16], share: u128, bytes: u64) -> ExportToken {
        ExportToken { magic: BLOCK, device, process: this_process(), share, offset: 0, bytes }
    }

    pub(crate) fn to_bytes(self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&self.magic.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.device);
        bytes[24..40].copy_from_slice(&self.share.to_le_bytes());
        for (place, word) in bytes[40..].chunks_exact_mut(8).zip([self.process, self.offset, self.bytes]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(magic: u64, bytes: &[u8; 64]) -> Result<ExportToken> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |index: usize| words.get(index).map_or(0, |word| u64::from_le_bytes(*word));
        if word(0) != magic {
            return Err(Error::INVALID_VALUE);
        }
        let (mut device, mut share) = ([0; 16], [0; 16]);
        device.copy_from_slice(&bytes[8..24]);
        share.copy_from_slice(&bytes[24..40]);
        let share = u128::from_le_bytes(share);
        Ok(ExportToken { magic, device, process: word(5), share, offset: word(6), bytes: word(7) })
    }

    /// Reads a block's token.
    pub(crate) fn from_block(bytes: &[u8; 64]) -> Result<ExportToken> {
        ExportToken::from_bytes(BLOCK, bytes)
    }

    /// A file that holds it, to be passed to other processes.
    pub(crate) fn into_file(self) -> Result<OwnedFd> {
        let file = memfd_create("sluice-block", MemfdFlags::CLOEXEC).map_err(|_| Error::OPERATING_SYSTEM)?;
        match rustix::io::write(&file, &self.to_bytes()) {
            Ok(64) => Ok(file),
            _ => Err(Error::OPERATING_SYSTEM),
        }
    }
}

/// An allocation of another process that a device of this one has opened.
struct Import {
    token: ExportToken,
    opener: i32,
    opens: u64,
}

/// The open allocations of other processes, by their addresses here.
#[derive(Default)]
pub(crate) struct Imports {
    open: Mutex<BTreeMap<u64, Import>>,
}

impl Imports {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Import>> {
        self.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Opens another process's allocation in a context; every open on a device returns the same address.
    pub(crate) fn open(
        &self,
        session: &Session,
        devices: &Devices,
        device_map: &DeviceMap,
        context: Context,
        handle: &[u8; 64],
    ) -> Result<u64> {
        let token = ExportToken::from_bytes(MEMORY, handle)?;
        let (owner, opener) = (token.owner(devices)?, context.device);
        let mut open = self.lock();
        let known = open.iter_mut().find(|(_, import)| import.token == token && import.opener == opener);
        if let Some((address, import)) = known {
            import.opens += 1;
            return Ok(*address);
        }
        let ExportToken { share, offset, bytes, .. } = token;
        let device = Ordinal(devices.get(owner)?.ordinal);
        let opened = session.sync(context.raw, &wire::ipc_open::Args { device, share, offset, bytes })?;
        let address = device_map.enter(opened.address, bytes, context.raw, RangeOrigin::Imported(owner))?;
        open.insert(address, Import { token, opener, opens: 1 });
        Ok(address)
    }

    /// Undoes one open; the last close releases the memory.
    pub(crate) fn close(
        &self,
        session: &Session,
        streams: &Streams,
        device_map: &DeviceMap,
        address: u64,
    ) -> Result {
        {
            let mut open = self.lock();
            let import = open.get_mut(&address).ok_or(Error::INVALID_VALUE)?;
            import.opens -= 1;
            if import.opens > 0 {
                return Ok(());
            }
            open.remove(&address);
        }
        device_map.close(session, streams, address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: S20
    #[test]
    fn token_round_trips_and_every_byte_of_it_counts() {
        let token = ExportToken {
            magic: MEMORY,
            device: [7; 16],
            process: 1,
            share: 2 << 64 | 3,
            offset: 4,
            bytes: 5,
        };
        let bytes = token.to_bytes();
        assert_eq!(ExportToken::from_bytes(MEMORY, &bytes), Ok(token));
        assert_eq!(ExportToken::from_block(&bytes), Err(Error::INVALID_VALUE), "of another kind");
        for at in 0..64 {
            let mut changed = bytes;
            changed[at] ^= 1;
            let read = ExportToken::from_bytes(MEMORY, &changed);
            assert_eq!(read.is_err(), at < 8, "byte {at}");
            assert_ne!(read, Ok(token), "byte {at}");
        }
        assert_eq!(ExportToken::from_bytes(MEMORY, &[0; 64]), Err(Error::INVALID_VALUE));
    }

    // Promise: C95
    #[test]
    fn data_of_a_pool_opens_only_with_that_pool() {
        let token = ExportToken { magic: MEMORY, device: [7; 16], process: 1, share: 3, offset: 4, bytes: 5 };
        let data = token.in_pool(9).to_bytes();
        let opened =
            ExportToken::from_pool_pointer([7; 16], 9, &data).map(|token| (token.share, token.within()));
        assert_eq!(opened, Ok((3, (4, 5))));
        assert!(ExportToken::from_pool_pointer([7; 16], 8, &data).is_err(), "of another pool");
        assert!(ExportToken::from_pool_pointer([6; 16], 9, &data).is_err(), "of another device");
        assert!(ExportToken::from_pool_pointer([7; 16], 1, &token.to_bytes()).is_err(), "not of a pool");
        assert!(ExportToken::from_bytes(MEMORY, &data).is_err(), "no handle of memory");
        let pool = ExportToken::pool([7; 16], 9).to_bytes();
        assert_eq!(ExportToken::from_pool(&pool), Ok(([7; 16], 9)));
        assert!(ExportToken::from_pool(&data).is_err());
    }
}
