//! The memory file of a process without a VM, which takes the place of guest RAM.
//!
//! Sparse, of a fixed size and sealed, because the device refuses memory that could shrink under it. A range that is freed
//! loses its pages, so every new range reads as zero.

use super::{held::HeldDescriptor, interface::TransportError};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use sluice_shared_memory::ranges::Free;
pub(super) use sluice_shared_memory::ranges::Range;

/// Bytes if `SLUICE_DIRECT_MEMORY` is not set: address space, not memory.
const DEFAULT_BYTES: u64 = 64 << 30;
const PAGE: u64 = 4096;

/// The file and its free ranges.
#[derive(Debug)]
pub(super) struct Ram {
    pub(super) file: HeldDescriptor,
    pub(super) bytes: u64,
    free: Free,
}

impl Ram {
    /// A file whose first `reserved` bytes are not for ranges.
    pub(super) fn new(reserved: u64) -> Result<Ram, TransportError> {
        let system = |what| move |error| TransportError::System { what, error };
        let bytes = configured()?;
        let file = memfd_create(c"sluice-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(system("memfd_create"))?;
        ftruncate(&file, bytes).map_err(system("the length of the memory file"))?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(system("sealing the memory file"))?;
        let file = HeldDescriptor::new(file).map_err(system("the memory file"))?;
        Ok(Ram { file, bytes, free: Free::new(reserved, bytes.saturating_sub(reserved)) })
    }

    pub(super) fn take(&mut self, bytes: u64) -> Result<Range, TransportError> {
        self.free.take(bytes).ok_or(TransportError::Exhausted(bytes))
    }

    /// Empties a range that has no mapping left, and frees it.
    pub(super) fn give(&mut self, range: Range) -> Result<(), TransportError> {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match fallocate(self.file.get()?, punch, range.offset, range.bytes) {
                Ok(()) => break,
                Err(rustix::io::Errno::INTR) => {}
                // A range that cannot be emptied is not used again, since it is not zero.
                Err(error) => return Err(TransportError::System { what: "emptying memory", error }),
            }
        }
        self.free.give(range);
        Ok(())
    }
}

/// The size of the file: `SLUICE_DIRECT_MEMORY`, in bytes or with a suffix K, M, G or T.
fn configured() -> Result<u64, TransportError> {
    match std::env::var("SLUICE_DIRECT_MEMORY") {
        Ok(value) => parse(&value).ok_or(TransportError::Setting {
            name: "SLUICE_DIRECT_MEMORY",
            value,
            expected: "a size from 16M to 1T",
        }),
        Err(_) => Ok(DEFAULT_BYTES),
    }
}

fn parse(value: &str) -> Option<u64> {
    let digits = value.trim_end_matches(['K', 'M', 'G', 'T']);
    let shift = match value.get(digits.len()..)? {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    let bytes = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    (16 << 20..=1 << 40).contains(&bytes).then(|| bytes - bytes % PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_setting_is_parsed_within_its_bounds() {
        assert_eq!(parse("64G"), Some(64 << 30));
        assert_eq!(parse("16777217"), Some(16 << 20));
        for wrong in ["", "G", "1K", "12X", "-1", "1GG", "99999999999999999999", "1T1", "2T"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn freed_range_reads_as_zero() {
        let mut ram = Ram::new(PAGE).unwrap();
        let range = ram.take(2 * PAGE).unwrap();
        rustix::io::pwrite(ram.file.get().unwrap(), &[7; 100], range.offset).unwrap();
        ram.give(range).unwrap();
        assert_eq!(ram.take(2 * PAGE).unwrap(), range);
        let mut bytes = [1; 100];
        rustix::io::pread(ram.file.get().unwrap(), &mut bytes, range.offset).unwrap();
        assert_eq!(bytes, [0; 100]);
    }
}
