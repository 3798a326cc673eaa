//! Private copies of images and inputs of the compiler, and the report of a compilation.

use crate::arenas::HeldRange;
use sluice_cuda_abi::image;
use sluice_driver::{Code, CompilerReport, LogText, code};
use sluice_protocol::jit::{ReportHead, report_bytes};

/// Zeroes behind a copy, in case a text in it is not terminated.
const PADDING: usize = 8;

/// The first word of the compiler's wrapper around fatbins.
const WRAPPER_MAGIC: [u8; 4] = 0x4662_43b1_u32.to_le_bytes();

/// A private copy of an image, checked to be complete: the driver reads as far as the image declares, so the declared size is
/// compared with the copied bytes. A zero word follows the copy, in case the text of a PTX image is not terminated.
pub(super) fn private_copy(from: &HeldRange) -> Result<Vec<u8>, Code> {
    let copy = unchecked_copy(from)?;
    check_extent(&copy)?;
    Ok(copy)
}

/// A private copy of bytes whose length the driver is told, and a zero word.
pub(super) fn unchecked_copy(from: &HeldRange) -> Result<Vec<u8>, Code> {
    let bytes = usize::try_from(from.bytes()).map_err(|_| code::INVALID_VALUE)?;
    let padded = bytes.checked_add(PADDING).ok_or(code::INVALID_VALUE)?;
    let mut copy = Vec::new();
    copy.try_reserve_exact(padded).map_err(|_| code::OUT_OF_MEMORY)?;
    copy.resize(padded, 0);
    from.read(&mut copy[..bytes]);
    // The compiler's wrapper holds pointers, which the driver would dereference in this process.
    if copy.starts_with(&WRAPPER_MAGIC) { Err(code::INVALID_IMAGE) } else { Ok(copy) }
}

/// Checks that an image is not larger than its copy.
pub(super) fn check_extent(copy: &[u8]) -> Result<(), Code> {
    let mut read = |offset: u64, into: &mut [u8]| {
        let part = usize::try_from(offset).ok().and_then(|offset| copy.get(offset..)?.get(..into.len()));
        part.map(|part| into.copy_from_slice(part)).is_some()
    };
    match image::size_of(&mut read, copy.len() as u64) {
        Ok(extent) if extent.bytes <= copy.len() as u64 => Ok(()),
        Ok(_) => Err(code::INVALID_IMAGE),
        Err(error) => Err(error.status() as Code),
    }
}

/// The place for the report of a compilation in arena memory, with room for two logs.
#[derive(Debug)]
pub(super) struct Report {
    place: HeldRange,
    info: usize,
    error: usize,
}

impl Report {
    /// The place is empty if the guest requests no report.
    pub(super) fn new(place: HeldRange, info: u64, error: u64) -> Result<Report, Code> {
        if place.bytes() != 0 && place.bytes() < report_bytes(info, error) {
            return Err(code::INVALID_VALUE);
        }
        let room = |bytes: u64| usize::try_from(bytes).map_err(|_| code::INVALID_VALUE);
        Ok(Report { place, info: room(info)?, error: room(error)? })
    }

    /// Writes numbers and logs.
    pub(super) fn write(&self, report: &CompilerReport<'_>) {
        let CompilerReport { wall_time, threads, info, error } = *report;
        let head = ReportHead { wall_time, threads, info: info.filled, error: error.filled };
        let mut bytes = head.encode().to_vec();
        for (LogText { text, .. }, room) in [(info, self.info), (error, self.error)] {
            let start = bytes.len();
            bytes.extend_from_slice(&text[..text.len().min(room.saturating_sub(1))]);
            bytes.resize(start + room, 0);
        }
        self.place.write(&bytes);
    }
}
