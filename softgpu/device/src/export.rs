//! Exported allocations: a file descriptor that names an allocation and keeps it alive while the descriptor exists, also in
//! flight in a socket.
//!
//! All exports open the same empty file. The position of an open file is the name of the allocation, and its lock on the
//! allocation's byte proves that it exists. Every process sees that lock through its own descriptor of the file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::owners::{Allocation, Owner};
use crate::sys;

/// A descriptor cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The descriptor is not an export of this device.
    #[error("not an exported allocation of this device")]
    Foreign,
    /// The allocation has ended.
    #[error("the allocation is gone")]
    Gone,
}

/// The file position that names an allocation.
fn position((record, generation): (u32, u32)) -> u64 {
    u64::from(generation) << 16 | u64::from(record)
}

/// The allocation that a file position names.
fn name(position: u64) -> Option<(u32, u32)> {
    Some((u32::try_from(position & 0xffff).ok()?, u32::try_from(position >> 16).ok()?))
}

impl Allocation {
    /// Returns a descriptor that names this allocation. Each call opens a file.
    ///
    /// # Errors
    /// The error of opening, positioning or locking the file.
    pub fn export(&self) -> io::Result<OwnedFd> {
        let device = self.device();
        device.mark_exported(self.record);
        // Opened for reading only: a write at its position would move it.
        let file = File::open(&device.exported_path)?;
        sys::set_position(&file, position(self.name()))?;
        // The lock is shared: several exports of one allocation exist at a time.
        if !sys::try_lock_byte(&file, i64::from(self.record), false)? {
            return Err(io::Error::from(io::ErrorKind::WouldBlock));
        }
        Ok(file.into())
    }
}

impl Owner {
    /// Takes a hold on the allocation that a descriptor names. The caller keeps the descriptor. Opens no file.
    ///
    /// # Errors
    /// The descriptor names no allocation, or one that has ended.
    pub fn import(self: &Arc<Self>, descriptor: impl AsFd) -> Result<Arc<Allocation>, ImportError> {
        let descriptor = descriptor.as_fd();
        // Allocations of different devices have equal numbers, so the number is only valid with the device.
        if sys::identity(descriptor).map_err(|_| ImportError::Foreign)? != self.device.exported_identity {
            return Err(ImportError::Foreign);
        }
        let position = sys::position(descriptor).map_err(|_| ImportError::Foreign)?;
        let (record, generation) = name(position).ok_or(ImportError::Foreign)?;
        self.hold(record, generation).ok_or(ImportError::Gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_map_to_distinct_positions_that_file_systems_allow() {
        for allocation in [(0, 0), (0xffff, 1), (7, (1 << 28) - 1)] {
            assert_eq!(name(position(allocation)), Some(allocation));
            assert!(position(allocation) < 1 << 44);
        }
        assert_eq!(name(u64::MAX), None);
    }
}
