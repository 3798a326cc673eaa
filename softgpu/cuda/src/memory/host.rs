//! Pinned host memory: ordinary memory of the process that the table lists.
#![expect(unsafe_code, reason = "maps and checks host memory")]

use softgpu_device::{anonymous, page_size};

use super::Block;
use crate::error::{Error, Result};

/// Flags of `cuMemHostAlloc` (portable, device map, write combined) or `cuMemHostRegister`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostFlags(pub(crate) u32);

impl HostFlags {
    /// `CU_MEMHOSTREGISTER_READ_ONLY`.
    const READ_ONLY: u32 = 8;

    /// True if the device may write to the registered memory.
    pub(crate) fn may_write(self) -> bool {
        self.0 & HostFlags::READ_ONLY == 0
    }
}

/// Allocates host memory that starts at a page, as the vendor's driver does.
pub(super) fn allocate(bytes: u64) -> Result<u64> {
    let rounded = bytes.checked_next_multiple_of(page_size()).filter(|bytes| *bytes > 0);
    let rounded = usize::try_from(rounded.ok_or(Error::INVALID_VALUE)?).map_err(|_| Error::OUT_OF_MEMORY)?;
    anonymous(rounded).map_err(|_| Error::OUT_OF_MEMORY)
}

/// Gives host memory back to the system.
pub(super) fn release(block: &Block) {
    let rounded = block.bytes.next_multiple_of(page_size());
    let start = std::ptr::with_exposed_provenance_mut(usize::try_from(block.start).unwrap_or(0));
    // SAFETY: the block was made by `allocate` with these bounds, is out of the book, and nothing that runs uses it.
    unsafe { libc::munmap(start, usize::try_from(rounded).unwrap_or(0)) };
}

/// Checks that a whole range is mapped memory of the process.
pub(super) fn check(start: u64, bytes: u64) -> Result {
    let page = page_size();
    let first = start / page * page;
    let Some(length) = (start + bytes - first).checked_next_multiple_of(page) else {
        return Err(Error::INVALID_VALUE);
    };
    let first =
        std::ptr::with_exposed_provenance_mut(usize::try_from(first).map_err(|_| Error::INVALID_VALUE)?);
    let length = usize::try_from(length).map_err(|_| Error::INVALID_VALUE)?;
    // SAFETY: MS_ASYNC only tests whether the range is mapped (ENOMEM if not) and changes nothing.
    let mapped = unsafe { libc::msync(first, length, libc::MS_ASYNC) } == 0;
    if mapped { Ok(()) } else { Err(Error::INVALID_VALUE) }
}
