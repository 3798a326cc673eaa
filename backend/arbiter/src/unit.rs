//! The driver's side of the unit: one context, chunks made and mapped, and the stream that scrubs.
//!
//! Every chunk is mapped here for as long as it is in custody, so that scrubbing costs no mapping. The addresses are the
//! arbiter's own; it reads the content of chunks only to check that it is zero.

#![expect(unsafe_code, reason = "names its own mappings that the driver may write")]

use crate::{custody::mix, ids::Class, space::FreeSpace};
use sluice_driver::{Code, DeviceRange, Driver, DriverError, Handle, HostRange, Rows};
use sluice_messages::{
    control::{HostAccess, Verify},
    custody::UNIT,
};
use std::{path::Path, sync::Arc, time::Duration};

/// A chunk's driver handle and mapping. The owner of this value may use the chunk.
#[derive(Debug)]
pub struct Piece {
    handle: Handle,
    address: u64,
    class: Class,
}

impl Piece {
    /// The driver's handle, from which exports are made.
    #[must_use]
    pub const fn handle(&self) -> Handle {
        self.handle
    }

    /// The chunk's size class.
    #[must_use]
    pub const fn class(&self) -> Class {
        self.class
    }

    /// The chunk's size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.class.bytes()
    }
}

/// The result of [`OpenUnit::take_free`].
#[derive(Debug)]
pub struct TakenMemory {
    /// The chunks that were made, also when something failed after them.
    pub pieces: Vec<Piece>,
    /// The driver's error that ended the making, if it failed.
    pub failed: Option<Code>,
}

/// The reason why a unit cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    /// The driver cannot be loaded.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A driver call failed: its name and the code.
    #[error("{0}: CUresult {1}")]
    Call(&'static str, Code),
    /// Chunks would not be multiples of the allocation granularity.
    #[error("the device's allocation granularity {0} does not divide 2 MiB")]
    Granularity(u64),
}

/// Bytes read back at once.
const WINDOW: usize = 4 << 20;
/// Bytes per sample.
const SAMPLE: usize = 1024;
/// Samples of a chunk: one of each sixteenth of it, at the same random place in each, so that one copy reads them all.
const SAMPLES: usize = 16;
/// Bytes of all samples of a chunk.
const SAMPLED: usize = SAMPLE * SAMPLES;

/// An opened unit.
#[derive(Debug)]
pub struct OpenUnit {
    driver: Arc<Driver>,
    device: i32,
    context: Handle,
    stream: Handle,
    space: FreeSpace,
    /// The buffer for samples and windows that are read back.
    window: Vec<u8>,
    /// The state of the generator that chooses the samples.
    random: u64,
    context_bytes: u64,
    host_access: HostAccess,
}

fn failed(call: &'static str) -> impl Fn(Code) -> UnitError {
    move |code| UnitError::Call(call, code)
}

impl OpenUnit {
    /// Loads the driver and opens a device. With an identity, opens that device and no other.
    ///
    /// # Errors
    /// [`UnitError`] if the device cannot be used.
    pub fn open(path: &Path, ordinal: u32, identity: Option<[u8; 16]>) -> Result<OpenUnit, UnitError> {
        const BLOCKING_SYNC: u32 = 4;
        const NON_BLOCKING: u32 = 1;
        let driver = Driver::load(path)?;
        driver.init().map_err(failed("cuInit"))?;
        driver.confirm(identity)?;
        let device = driver.device(ordinal).map_err(failed("cuDeviceGet"))?;
        let host_access = host_access(&driver, device)?;
        let granularity = driver.granularity(device).map_err(failed("cuMemGetAllocationGranularity"))?;
        if granularity == 0 || !UNIT.is_multiple_of(granularity) {
            return Err(UnitError::Granularity(granularity));
        }
        let context = with_memory(|| driver.primary_retain(device, BLOCKING_SYNC))
            .map_err(failed("cuDevicePrimaryCtxRetain"))?;
        driver.set_current(context).map_err(failed("cuCtxSetCurrent"))?;
        let context_bytes = measure_context(&driver, device, context)?;
        let least = driver.cuCtxGetStreamPriorityRange().map_or(0, |(least, _)| least);
        let stream = driver
            .cuStreamCreateWithPriority(NON_BLOCKING, least)
            .map_err(failed("cuStreamCreateWithPriority"))?;
        // Twice the device's memory: chunks of different sizes come and go.
        let (_, total) = driver.memory_info().map_err(failed("cuMemGetInfo"))?;
        let bytes = total.saturating_mul(2).next_multiple_of(Class::ALL[0].bytes());
        let base = driver.address_reserve(0, bytes).map_err(failed("cuMemAddressReserve"))?;
        let window = vec![0; WINDOW];
        // Copies to pinned memory need no staging. Without pinning they work, too.
        if let Err(code) = driver.host_register(window.as_ptr().expose_provenance() as u64, WINDOW as u64) {
            tracing::debug!(code, "cannot pin the window for reading back");
        }
        let mut seed = [0; 8];
        // Without randomness the samples are guessable, but no other process sees them.
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        Ok(OpenUnit {
            driver: Arc::new(driver),
            device,
            context,
            stream,
            space: FreeSpace::new(base, bytes),
            window,
            random: u64::from_le_bytes(seed) | 1,
            context_bytes,
            host_access,
        })
    }

    /// The driver, for exports from another thread.
    #[must_use]
    pub fn driver(&self) -> Arc<Driver> {
        Arc::clone(&self.driver)
    }

    /// Makes the unit's context current in this thread.
    ///
    /// # Errors
    /// The driver's error code.
    pub fn enter(&self) -> Result<(), Code> {
        self.driver.set_current(self.context)
    }

    /// Bytes that a context takes for itself, as measured when the unit was opened.
    #[must_use]
    pub const fn context_bytes(&self) -> u64 {
        self.context_bytes
    }

    /// The host memory that kernels on the unit reach.
    #[must_use]
    pub const fn host_access(&self) -> HostAccess {
        self.host_access
    }

    /// Bytes that the driver has free.
    ///
    /// # Errors
    /// The driver's error code.
    pub fn free(&self) -> Result<u64, Code> {
        self.driver.memory_info().map(|(free, _)| free)
    }

    /// Makes a chunk of the driver's memory and maps it.
    ///
    /// # Errors
    /// The driver's error code, out of memory for instance.
    pub fn create(&mut self, class: Class) -> Result<Piece, Code> {
        let bytes = class.bytes();
        let address = self.space.take(bytes).ok_or(sluice_driver::code::OUT_OF_MEMORY)?;
        let made = self.create_at(address, class);
        if made.is_err() {
            self.space.give(address, bytes);
        }
        made
    }

    fn create_at(&self, address: u64, class: Class) -> Result<Piece, Code> {
        let bytes = class.bytes();
        let handle = self.driver.chunk_create(bytes, self.device)?;
        let mapped = self.driver.map(address, bytes, handle).and_then(|()| {
            self.driver.allow(address, bytes, self.device).inspect_err(|_| {
                if let Err(code) = self.driver.unmap(address, bytes) {
                    tracing::error!(code, "cannot unmap a chunk");
                }
            })
        });
        match mapped {
            Ok(()) => Ok(Piece { handle, address, class }),
            Err(failed) => {
                if let Err(code) = self.driver.cuMemRelease(handle) {
                    tracing::error!(code, "cannot release a chunk");
                }
                Err(failed)
            }
        }
    }

    /// Gives a chunk back to the driver. An importer keeps its own mappings.
    ///
    /// # Errors
    /// The driver's error code; the chunk is lost then.
    pub fn release(&mut self, piece: Piece) -> Result<(), Code> {
        let bytes = piece.class.bytes();
        self.driver.unmap(piece.address, bytes)?;
        self.space.give(piece.address, bytes);
        self.driver.cuMemRelease(piece.handle)
    }

    /// Makes chunks of the free memory, leaves `leave` bytes free, and makes no more than `most` bytes.
    ///
    /// # Errors
    /// The driver's error code if it does not report its free memory at the start.
    pub fn take_free(&mut self, leave: u64, most: u64) -> Result<TakenMemory, Code> {
        let found = self.free()?;
        let leave = leave.max(found.saturating_sub(most));
        let mut pieces = Vec::new();
        for class in mix(found.saturating_sub(leave)) {
            if let Ok(piece) = self.create(class) {
                pieces.push(piece);
            }
        }
        // Memory that the driver reports as free need not fit every size: the smallest size takes the rest.
        let least = Class::ALL[Class::ALL.len() - 1];
        let failed = loop {
            match self.free() {
                Ok(free) if free.saturating_sub(leave) >= UNIT => match self.create(least) {
                    Ok(piece) => pieces.push(piece),
                    Err(_) => break None,
                },
                Ok(_) => break None,
                Err(failed) => break Some(failed),
            }
        };
        Ok(TakenMemory { pieces, failed })
    }

    /// Tests the device: makes a chunk if there is room for one, clears it and reads it back.
    ///
    /// # Errors
    /// The driver's error code, or an error if the chunk is not clear.
    pub fn probe(&mut self) -> Result<(), Code> {
        self.free()?;
        self.wait()?;
        let piece = match self.create(Class::ALL[Class::ALL.len() - 1]) {
            Ok(piece) => piece,
            Err(sluice_driver::code::OUT_OF_MEMORY) => return Ok(()),
            Err(failed) => return Err(failed),
        };
        let cleared = self.clear(&piece).and_then(|()| self.wait()).and_then(|()| self.is_all_zero(&piece));
        let released = self.release(piece);
        match cleared.and_then(|clean| released.map(|()| clean))? {
            true => Ok(()),
            false => Err(sluice_driver::code::UNKNOWN),
        }
    }

    /// Makes chunks of one size, as many as the driver gives.
    pub fn create_many(&mut self, class: Class, count: u64) -> Vec<Piece> {
        (0..count).map_while(|_| self.create(class).ok()).collect()
    }

    /// Makes chunks of these sizes, up to `bytes` in all.
    pub fn create_within(&mut self, classes: &[Class], bytes: u64) -> Vec<Piece> {
        let mut rest = bytes;
        let mut pieces = Vec::with_capacity(classes.len());
        for class in classes {
            if class.bytes() <= rest
                && let Ok(piece) = self.create(*class)
            {
                rest -= class.bytes();
                pieces.push(piece);
            }
        }
        pieces
    }

    /// Clears chunks, without waiting.
    ///
    /// # Errors
    /// The driver's error code.
    pub fn clear(&self, piece: &Piece) -> Result<(), Code> {
        let words = Rows { pitch: 0, width: piece.class.bytes() / 4, height: 1 };
        // SAFETY: the whole range is this piece's mapping, which no other code in this process uses.
        let all = unsafe { DeviceRange::new(piece.address, piece.class.bytes()) };
        self.driver.memset(all, 4, 0, words, self.stream)
    }

    /// Waits for all work that was submitted.
    ///
    /// # Errors
    /// The driver's error code.
    pub fn wait(&self) -> Result<(), Code> {
        self.driver.cuStreamSynchronize(self.stream)
    }

    /// Reads chunks back. Returns for each if all bytes that were read are zero.
    ///
    /// # Errors
    /// The driver's error code.
    pub fn verify(&mut self, pieces: &[Piece], how: Verify) -> Result<Vec<bool>, Code> {
        let mut clean = Vec::with_capacity(pieces.len());
        match how {
            Verify::All => {
                for piece in pieces {
                    clean.push(self.is_all_zero(piece)?);
                }
            }
            Verify::Sampled => {
                // One copy reads as many chunks as the window holds.
                for group in pieces.chunks(WINDOW / SAMPLED) {
                    for (piece, slot) in group.iter().zip((0..WINDOW).step_by(SAMPLED)) {
                        self.sample(piece, slot)?;
                    }
                    self.wait()?;
                    let slots = (0..WINDOW).step_by(SAMPLED).take(group.len());
                    clean.extend(slots.map(|slot| self.is_zero(slot, SAMPLED)));
                }
            }
        }
        Ok(clean)
    }

    fn is_all_zero(&mut self, piece: &Piece) -> Result<bool, Code> {
        let bytes = piece.class.bytes();
        for at in (0..bytes).step_by(WINDOW) {
            let part = usize::try_from(bytes - at).map_or(WINDOW, |rest| rest.min(WINDOW));
            let target = self.target(0, part)?;
            // SAFETY: the range is inside this piece's mapping.
            let source = unsafe { DeviceRange::new(piece.address + at, part as u64) };
            self.driver.memcpy_dtoh(target, source, self.stream)?;
            self.wait()?;
            if !self.is_zero(0, part) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn sample(&mut self, piece: &Piece, slot: usize) -> Result<(), Code> {
        let (bytes, width, height) = (piece.class.bytes(), SAMPLE as u64, SAMPLES as u64);
        let pitch = bytes / height;
        let start = self.next_random() % (pitch - width + 1);
        let target = self.target(slot, SAMPLED)?;
        // SAFETY: the rows lie inside this piece's mapping: the last one ends at `start + 15 * pitch + SAMPLE` or before.
        let source = unsafe { DeviceRange::new(piece.address + start, bytes - start) };
        let rows = Rows { pitch, width, height };
        self.driver.memcpy_2d_dtoh((target, width), (source, pitch), rows, self.stream)
    }

    /// A part of the window, for a copy to write.
    fn target(&mut self, slot: usize, bytes: usize) -> Result<HostRange, Code> {
        let target = self.window.get_mut(slot..slot + bytes).ok_or(sluice_driver::code::INVALID_VALUE)?;
        // Bytes that the copy does not write must not look like zeros that it read.
        target.fill(0xff);
        let address = target.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the window lives as long as the unit, and is not read before the stream has completed.
        Ok(unsafe { HostRange::new(address, bytes as u64) })
    }

    fn is_zero(&self, slot: usize, bytes: usize) -> bool {
        let read = self.window.get(slot..slot + bytes);
        read.is_some_and(|read| read.iter().fold(0, |sum, byte| sum | byte) == 0)
    }

    /// A step of xorshift.
    fn next_random(&mut self) -> u64 {
        let mut x = self.random;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random = x;
        x
    }
}

/// The host memory that kernels on a device reach although CUDA was never given it.
fn host_access(driver: &Driver, device: i32) -> Result<HostAccess, UnitError> {
    const PAGEABLE_MEMORY_ACCESS: u32 = 88;
    const PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: u32 = 100;
    let is_set = |attribute| -> Result<bool, UnitError> {
        let value = driver.device_attribute(attribute, device).map_err(failed("cuDeviceGetAttribute"))?;
        Ok(value != 0)
    };
    if is_set(PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)? {
        return Ok(HostAccess::HostPageTables);
    }
    Ok(if is_set(PAGEABLE_MEMORY_ACCESS)? { HostAccess::Pageable } else { HostAccess::None })
}

/// Makes a context. While the driver has no memory for it, tries again, for a bounded time: an earlier arbiter held all memory, and
/// the driver may give it back late.
fn with_memory<T>(make: impl Fn() -> Result<T, Code>) -> Result<T, Code> {
    const APART: Duration = Duration::from_millis(50);
    const TRIES: u32 = 200;
    for _ in 1..TRIES {
        match make() {
            Err(sluice_driver::code::OUT_OF_MEMORY) => std::thread::sleep(APART),
            other => return other,
        }
    }
    make()
}

/// Bytes of a context: the difference that a second one makes, and no less than this process's own context took of an unused
/// device, if that can be measured. Workers of an earlier arbiter may end about now, and their memory would count as this process's
/// own; so if more than a context is in use, this first waits until no more memory becomes free.
fn measure_context(driver: &Driver, device: i32, own: Handle) -> Result<u64, UnitError> {
    const MOST: u64 = 1 << 30;
    let read = || driver.memory_info().map_err(failed("cuMemGetInfo"));
    let second = |free: u64| -> Result<u64, UnitError> {
        let second = with_memory(|| driver.context_create(device, 0)).map_err(failed("cuCtxCreate"))?;
        let after = read()?.0;
        driver.cuCtxDestroy_v2(second).map_err(failed("cuCtxDestroy"))?;
        driver.set_current(own).map_err(failed("cuCtxSetCurrent"))?;
        Ok(free.saturating_sub(after))
    };
    let (mut free, total) = read()?;
    let mut context = second(free)?;
    let most = MOST.min(total / 8);
    if total.saturating_sub(free) > context {
        free = settled_free(|| read().map(|(free, _)| free), total.saturating_sub(most))?;
        // Memory that becomes free between two readings hides the second context.
        context = context.max(second(free)?);
    }
    let used = total.saturating_sub(free);
    // More than that is not this process's own: other processes have memory, so how much of it is the context's is unknown.
    Ok(if used > most { context } else { context.max(used) })
}

/// Free bytes of the device, once no more become free. Memory of an earlier arbiter may come back late: as long as fewer than
/// `expected` bytes are free, this waits longer.
fn settled_free(read: impl Fn() -> Result<u64, UnitError>, expected: u64) -> Result<u64, UnitError> {
    const APART: Duration = Duration::from_millis(10);
    const ALIKE: u32 = 10;
    const READINGS: u32 = 300;
    let (mut last, mut alike) = (read()?, 0);
    for _ in 0..READINGS {
        if alike >= ALIKE && last >= expected {
            break;
        }
        std::thread::sleep(APART);
        let now = read()?;
        alike = if now > last { 0 } else { alike + 1 };
        last = now;
    }
    Ok(last)
}
