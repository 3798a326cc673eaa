//! Names in files, which programs pass to other processes as descriptors.
#![expect(unsafe_code, reason = "reads a descriptor that a program names")]

use std::fs::File;
use std::io::Write as _;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd as _, IntoRawFd as _};
use std::os::unix::fs::FileExt as _;

use crate::error::{Error, Result};

/// A new descriptor, for the program, of a file with a name.
pub(crate) fn of(name: &[u8; 64]) -> Result<i32> {
    // SAFETY: a constant text.
    let number = unsafe { libc::memfd_create(c"softgpu-pool".as_ptr(), libc::MFD_CLOEXEC) };
    if number < 0 {
        return Err(Error::OPERATING_SYSTEM);
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let mut file = unsafe { File::from_raw_fd(number) };
    file.write_all(name).map_err(|_| Error::OPERATING_SYSTEM)?;
    Ok(file.into_raw_fd())
}

/// The name in the file of a program's descriptor.
pub(crate) fn read(number: u64) -> Result<[u8; 64]> {
    let number = i32::try_from(number).map_err(|_| Error::INVALID_VALUE)?;
    if number < 0 {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: by the interface the descriptor is open; it stays the program's.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(number) });
    let mut name = [0; 64];
    file.read_exact_at(&mut name, 0).map_err(|_| Error::INVALID_VALUE)?;
    Ok(name)
}
