//! The errors of a device: lines that tests append to a file.

#![expect(unsafe_code, reason = "inotify")]

use sluice_cuda_abi::nvml::{Result, Status, Watch, Xid};
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// The file from where it ended when the watch began.
pub(crate) struct Watched {
    file: File,
    /// Readable when the file has changed.
    changes: OwnedFd,
    /// What was read and is not a whole line yet.
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
        // SAFETY: a new descriptor that nobody else has.
        let changes = unsafe { OwnedFd::from_raw_fd(changes) };
        // SAFETY: the descriptor is open and the path a C string.
        let watch = unsafe { libc::inotify_add_watch(changes.as_raw_fd(), name.as_ptr(), libc::IN_MODIFY) };
        if watch < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Watched { file, changes, rest: Vec::new() })
    }
}

/// A line: the error, and where it was in an instance the numbers of that and of the compute instance.
fn read(line: &str) -> Xid {
    // What the interface says of an error it does not know.
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
        // Before the file is read, so that what is appended meanwhile is told again.
        // SAFETY: the buffer is as long as is said. What was told is of no interest, nor that nothing was.
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
