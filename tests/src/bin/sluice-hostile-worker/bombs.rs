//! Attacks on the host's resources: each takes as much of one as it gets, and keeps it.

use std::fs::File;
use std::io::{Error, Write as _};

use anyhow::Result;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Memory that is taken at once, in bytes.
const PIECE: usize = 64 << 20;
/// Number of things after which a bomb gives up: far beyond every limit.
const ENOUGH: usize = 1 << 20;

/// Takes memory and writes to each page, until this process is ended; reports every piece.
pub(crate) fn memory(mut tell: impl FnMut(&str, String)) -> Result<()> {
    let mut all = Vec::new();
    while all.len() < ENOUGH {
        let mut piece = vec![0_u8; PIECE];
        piece.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        all.push(std::hint::black_box(piece));
        tell("taken", format!("{} MiB", all.len() * (PIECE >> 20)));
    }
    Ok(())
}

/// Takes memory of files without a name, which no mapping has, until this process is ended; reports every piece.
pub(crate) fn shared_memory(mut tell: impl FnMut(&str, String)) -> Result<()> {
    let mut all = Vec::new();
    while all.len() < ENOUGH {
        let mut file = File::from(memfd_create("bomb", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.write_all(&vec![1_u8; PIECE])?;
        all.push(file);
        tell("taken", format!("{} MiB", all.len() * (PIECE >> 20)));
    }
    Ok(())
}

/// Takes huge pages and writes to each; reports the number at which the kernel refuses another. A filter may end this process.
pub(crate) fn huge_pages(mut tell: impl FnMut(&str, String)) -> Result<()> {
    const PAGE: usize = 2 << 20;
    for count in 0..ENOUGH {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let page = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
            )
        };
        match page {
            // SAFETY: the mapping is new, writable, and has more than a byte.
            Ok(page) => unsafe { page.cast::<u8>().write_volatile(1) },
            Err(error) => {
                tell("held", format!("{count} huge pages: {}", Error::from(error)));
                return Ok(());
            }
        }
    }
    tell("free", format!("{ENOUGH} huge pages"));
    Ok(())
}

/// Starts threads that wait for ever; reports the number at which the kernel refuses another.
pub(crate) fn threads(mut tell: impl FnMut(&str, String)) -> Result<()> {
    for count in 0..ENOUGH {
        let thread = std::thread::Builder::new().stack_size(64 << 10).spawn(|| {
            loop {
                std::thread::park();
            }
        });
        if let Err(error) = thread {
            tell("held", format!("{count} threads: {error}"));
            return Ok(());
        }
    }
    tell("free", format!("{ENOUGH} threads"));
    Ok(())
}

/// Opens descriptors; reports the number at which the kernel refuses another.
pub(crate) fn descriptors(mut tell: impl FnMut(&str, String)) -> Result<()> {
    let mut all = Vec::new();
    while all.len() < ENOUGH {
        match eventfd(0, EventfdFlags::CLOEXEC) {
            Ok(descriptor) => all.push(descriptor),
            Err(error) => {
                drop(all.pop());
                tell("held", format!("{} descriptors: {}", all.len(), Error::from(error)));
                // Kept, while the neighbour computes.
                std::mem::forget(all);
                return Ok(());
            }
        }
    }
    tell("free", format!("{ENOUGH} descriptors"));
    Ok(())
}
