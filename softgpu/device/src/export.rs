//! Exported allocations: a file descriptor that names one, and keeps it alive wherever the descriptor is, also in
//! flight in a socket. The kernel is the witness: the open file holds a lock on a byte of itself.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::allocations::Allocation;
use crate::device::Device;
use crate::owners::{Files, Owner};
use crate::sys;

const MAGIC: u64 = u64::from_le_bytes(*b"sgexport");

/// What the file of an export holds: that it is one, the device's UUID, record and generation of the allocation.
const BYTES: usize = 32;

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

impl Allocation {
    /// A descriptor that names this allocation. Each call opens a file.
    ///
    /// # Errors
    /// What opening, writing or locking the file answers.
    pub fn export(&self) -> io::Result<OwnedFd> {
        let device = self.device();
        device.exporter.store(true, Relaxed);
        device.mark_exported(self.record);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(device.mode)
            .open(device.export_path(self.record, self.generation))?;
        // A shared lock: several exports of one allocation live side by side.
        if !sys::try_lock_byte(&file, 0, false)? {
            return Err(io::Error::from(io::ErrorKind::WouldBlock));
        }
        let mut content = [0; BYTES];
        content[..8].copy_from_slice(&MAGIC.to_le_bytes());
        content[8..24].copy_from_slice(&device.identity().uuid);
        content[24..28].copy_from_slice(&self.record.to_le_bytes());
        content[28..].copy_from_slice(&self.generation.to_le_bytes());
        file.write_all_at(&content, 0)?;
        Ok(file.into())
    }
}

impl Owner {
    /// Holds the allocation that a descriptor names. The descriptor stays the caller's. Opens nothing.
    ///
    /// # Errors
    /// When it names none, or one that is gone.
    pub fn import(self: &Arc<Self>, descriptor: impl AsFd) -> Result<Arc<Allocation>, ImportError> {
        let file: File = descriptor.as_fd().try_clone_to_owned().map_err(|_| ImportError::Foreign)?.into();
        let mut content = [0; BYTES];
        file.read_exact_at(&mut content, 0).map_err(|_| ImportError::Foreign)?;
        let (words, _) = content.as_chunks::<4>();
        let [m0, m1, uuid @ .., record, generation] = words else { return Err(ImportError::Foreign) };
        // Devices number their allocations alike, so the number means nothing without the device.
        if [*m0, *m1].as_flattened() != MAGIC.to_le_bytes()
            || uuid.as_flattened() != self.device.identity().uuid
        {
            return Err(ImportError::Foreign);
        }
        if sys::file_system(&file).map_err(|_| ImportError::Foreign)? != self.device.file_system {
            return Err(ImportError::Foreign);
        }
        self.hold(u32::from_le_bytes(*record), u32::from_le_bytes(*generation)).ok_or(ImportError::Gone)
    }
}

impl Device {
    fn export_path(&self, record: u32, generation: u32) -> PathBuf {
        self.exports.join(format!("{record}.{generation}"))
    }

    /// Removes the file of an export that is open nowhere; false when somebody has it, or when that cannot be known.
    pub(crate) fn forget_export(&self, record: u32, generation: u32, files: Files) -> bool {
        if files == Files::Keep && !self.exporter.load(Relaxed) {
            return false;
        }
        let path = self.export_path(record, generation);
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => match sys::try_lock_byte(&file, 0, true) {
                Ok(true) => std::fs::remove_file(&path).is_ok(),
                _ => false,
            },
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }
}
