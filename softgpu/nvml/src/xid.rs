//! The Xid errors of a device: lines that tests append to a file.

#![expect(unsafe_code, reason = "inotify")]

use sluice_nvml_abi::{Result, Status, Watch, Xid};
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// The file, read from its end at the time when the watch began.
pub(crate) struct Watched {
    file: File,
    /// Readable when the file has changed.
    changes: OwnedFd,
    /// The part of a line that was read so far.
    rest: Vec<u8>,
}

impl Watched {
    pub(crate) fn open(path: &Path) -> io::Result<Watched> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        file.seek(SeekFrom::End(0))?;
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: no preconditions.
        let changes = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
        if changes < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor with no other owner.
        let changes = unsafe { OwnedFd::from_raw_fd(changes) };
        // SAFETY: the descriptor is open and the path a C string.
        let watch = unsafe { libc::inotify_add_watch(changes.as_raw_fd(), name.as_ptr(), libc::IN_MODIFY) };
        if watch < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Watched { file, changes, rest: Vec::new() })
    }
}

/// Parses a line: the number of an error and, if it happened in an instance, the ids of the GPU instance and compute instance.
fn read(line: &str) -> Xid {
    // The number that NVML reports for an unknown error.
    const UNKNOWN: u64 = 999;
    let mut words = line.split_whitespace();
    let number = words.next().and_then(|word| word.parse().ok()).unwrap_or(UNKNOWN);
    let gpu = words.next().and_then(|word| word.parse().ok());
    let compute = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    Xid { number, instance: gpu.map(|gpu| (gpu, compute)) }
}

impl Watch for Watched {
    fn next(&mut self) -> Result<Option<Xid>> {
        let mut told = [0u8; 4096];
        // Clears the notification before it reads the file, so that a later line notifies again.
        // SAFETY: the buffer has the given length. The content is ignored, and so is an empty result.
        unsafe { libc::read(self.changes.as_raw_fd(), told.as_mut_ptr().cast(), told.len()) };
        self.file.read_to_end(&mut self.rest).map_err(|_| Status::GPU_IS_LOST)?;
        let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
        let line: Vec<u8> = self.rest.drain(..=end).collect();
        Ok(Some(read(&String::from_utf8_lossy(&line))))
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }
}
