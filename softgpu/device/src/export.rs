//! Exported allocations: a file descriptor that names one, and keeps it alive wherever the descriptor is, also in flight in a
//! socket.
//!
//! Each is an opening of its own of one file, which is empty: its position is the allocation's name, and its lock on the
//! allocation's byte is the witness, which every process sees through its own opening of the file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::allocations::Allocation;
use crate::device::Device;
use crate::owners::Owner;
use crate::sys;

/// The file's name in the directory of its device.
pub(crate) const FILE: &str = "exported";

/// A descriptor cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// It is not an export of this device.
    #[error("not an exported allocation of this device")]
    Foreign,
    /// The allocation has ended.
    #[error("the allocation is gone")]
    Gone,
}

/// The position that names an allocation.
fn position((record, generation): (u32, u32)) -> u64 {
    u64::from(generation) << 16 | u64::from(record)
}

/// The allocation that a position names.
fn name(position: u64) -> Option<(u32, u32)> {
    Some((u32::try_from(position & 0xffff).ok()?, u32::try_from(position >> 16).ok()?))
}

impl Allocation {
    /// A descriptor that names this allocation. Each call opens a file.
    ///
    /// # Errors
    /// What opening, positioning or locking the file answers.
    pub fn export(&self) -> io::Result<OwnedFd> {
        let device = self.device();
        device.mark_exported(self.record);
        // To be read only, so that nothing can be written at its position, which would move it.
        let file = File::open(&device.exported_path)?;
        sys::set_position(&file, position(self.name()))?;
        // A shared lock: several exports of one allocation live side by side.
        if !sys::try_lock_byte(&file, i64::from(self.record), false)? {
            return Err(io::Error::from(io::ErrorKind::WouldBlock));
        }
        Ok(file.into())
    }
}

impl Owner {
    /// Holds the allocation that a descriptor names. The descriptor stays the caller's. Opens nothing.
    ///
    /// # Errors
    /// When it names none, or one that is gone.
    pub fn import(self: &Arc<Self>, descriptor: impl AsFd) -> Result<Arc<Allocation>, ImportError> {
        let descriptor = descriptor.as_fd();
        // Devices number their allocations alike, so the number means nothing without the device.
        if sys::identity(descriptor).map_err(|_| ImportError::Foreign)? != self.device.exported_identity {
            return Err(ImportError::Foreign);
        }
        let position = sys::position(descriptor).map_err(|_| ImportError::Foreign)?;
        let (record, generation) = name(position).ok_or(ImportError::Foreign)?;
        self.hold(record, generation).ok_or(ImportError::Gone)
    }
}

impl Device {
    /// Whether a descriptor somewhere names an allocation with this record. Where that cannot be known, one does.
    pub(crate) fn is_named(&self, record: u32) -> bool {
        sys::byte_is_locked(&self.exported, i64::from(record)).unwrap_or(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_position_of_its_own_within_what_file_systems_allow() {
        for allocation in [(0, 0), (0xffff, 1), (7, (1 << 28) - 1)] {
            assert_eq!(name(position(allocation)), Some(allocation));
            assert!(position(allocation) < 1 << 44);
        }
        assert_eq!(name(u64::MAX), None);
    }
}
