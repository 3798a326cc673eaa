//! The address windows of the session, which the driver reserves, maps and clears.

#![expect(unsafe_code, reason = "clears memory that has no allocations")]

use super::{Chunk, Mapper};
use crate::session::objects::ContextRef;
use sluice_driver::{Code, DeviceRange, Driver, Handle, Rows, code};
use std::{collections::BTreeMap, sync::Arc};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// The mapper of a session with a driver.
#[derive(Debug)]
pub(crate) struct Windows {
    driver: Arc<Driver>,
    /// True if freed memory is cleared.
    scrub: bool,
    /// For each device a separate stream in one of its contexts: clearing waits for no work of the guest.
    streams: BTreeMap<i32, (ContextRef, Handle)>,
}

impl Windows {
    pub(crate) const fn new(driver: Arc<Driver>) -> Windows {
        Windows { driver, scrub: false, streams: BTreeMap::new() }
    }

    /// Makes every free clear its memory. Call before the first context is made.
    pub(crate) const fn scrub_every_free(&mut self) {
        self.scrub = true;
    }

    /// Records a new context of a device; it is current to this thread.
    pub(crate) fn context_made(&mut self, device: i32, context: ContextRef) -> Result<(), Code> {
        if self.scrub && !self.streams.contains_key(&device) {
            let stream = self.driver.cuStreamCreateWithPriority(NON_BLOCKING, 0)?;
            self.streams.insert(device, (context, stream));
        }
        Ok(())
    }

    /// Removes a context that is being destroyed, with its streams.
    pub(crate) fn context_gone(&mut self, context: ContextRef) {
        self.streams.retain(|_, (of, _)| *of != context);
    }
}

impl Mapper for Windows {
    fn reserve(&mut self, base: u64, bytes: u64) -> Result<(), Code> {
        let got = self.driver.address_reserve(base, bytes)?;
        if got == base {
            return Ok(());
        }
        if let Err(failed) = self.driver.address_free(got, bytes) {
            tracing::warn!(code = failed, "cannot free an address range");
        }
        Err(code::ALREADY_MAPPED)
    }

    fn map(&mut self, at: u64, bytes: u64, chunk: &Chunk) -> Result<(), Code> {
        self.driver.map(at, bytes, chunk.handle)
    }

    fn allow(&mut self, at: u64, bytes: u64, device: i32, access: u32) -> Result<(), Code> {
        self.driver.allow_as(at, bytes, device, access)
    }

    fn unmap(&mut self, at: u64, bytes: u64) -> Result<(), Code> {
        self.driver.unmap(at, bytes)
    }

    fn clears(&self) -> bool {
        self.scrub
    }

    fn clear(&mut self, at: u64, bytes: u64, device: i32) -> Result<(), Code> {
        if !self.scrub {
            return Ok(());
        }
        let (context, stream) = *self.streams.get(&device).ok_or(code::INVALID_CONTEXT)?;
        self.driver.set_current(context.handle)?;
        // SAFETY: device memory of this session without allocations, and it gets none before the stream is synchronised.
        let range = unsafe { DeviceRange::new(at, bytes) };
        self.driver.memset(range, 1, 0, Rows { pitch: bytes, width: bytes, height: 1 }, stream)?;
        self.driver.cuStreamSynchronize(stream)
    }
}
