//! Pages of the device at addresses of this process.
#![expect(unsafe_code, reason = "maps pages at addresses that the book knows")]

use softgpu_device::{Allocation, map_pages, unmap_pages};

use crate::error::{Error, Result};
use crate::log::log;

/// Maps pages at addresses that the book has assigned to the caller.
pub(super) fn map(start: u64, pages: &Allocation, offset: u64, bytes: u64) -> Result {
    // SAFETY: the caller took the range out of the window or found it unmapped in a reservation, under the book's lock.
    unsafe { map_pages(start, pages, offset, bytes) }.map_err(|error| {
        log!("cannot map device memory: {error}");
        Error::OUT_OF_MEMORY
    })
}

/// Unmaps pages from unused addresses.
pub(super) fn unmap(start: u64, bytes: u64) {
    // SAFETY: the range is out of the table, and the operations that used it have ended.
    if let Err(error) = unsafe { unmap_pages(start, bytes) } {
        // The pages stay mapped but are out of the table: nothing can access them, and the addresses are lost.
        log!("cannot unmap device memory: {error}");
    }
}
