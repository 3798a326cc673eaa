//! Attacks on the host's resources: each takes as much of one as it gets, and keeps it.

use std::io::Error;

use anyhow::Result;
use rustix::event::{EventfdFlags, eventfd};

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
