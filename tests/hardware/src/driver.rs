//! The driver for the steps: `sluice-driver`, as worker and arbiter use it, and the few calls that it lacks.
//!
//! A call that the library does not have is told from one that it refuses.

#![expect(unsafe_code, reason = "calls C functions of the driver, and lends it memory of this process")]

use core::ffi::{c_int, c_uint, c_void};
use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use sluice_driver::{DeviceRange, Driver, DriverError, Handle, HostRange, Rows};

use crate::stop::{Answer, Stop, name};
use crate::system::Area;

/// A loaded driver.
pub(crate) struct Cuda {
    driver: Driver,
    library: Library,
}

/// The arguments of `cuTensorMapEncodeTiled` that the steps vary; the others describe a plain matrix of 32-bit words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    /// Number of dimensions, at most five.
    pub(crate) rank: u32,
    /// Address of the tensor.
    pub(crate) address: u64,
    /// Number of the element's type.
    pub(crate) format: u32,
}

/// `CUtensorMap`, aligned as the newest headers demand.
#[repr(C, align(128))]
struct TensorMap([u8; 128]);

/// Host memory for copies, which lives as long as its owner is borrowed and is never Rust memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostSpan<'owner> {
    at: u64,
    bytes: u64,
    owner: core::marker::PhantomData<&'owner ()>,
}

impl<'owner> From<&'owner Area> for HostSpan<'owner> {
    fn from(area: &'owner Area) -> HostSpan<'owner> {
        HostSpan { at: area.address(), bytes: area.bytes(), owner: core::marker::PhantomData }
    }
}

impl HostSpan<'_> {
    fn parts(self) -> (*mut c_void, usize) {
        let number = |figure: u64| usize::try_from(figure).unwrap_or(0);
        (core::ptr::with_exposed_provenance_mut(number(self.at)), number(self.bytes))
    }
}

/// Pinned host memory of the driver.
pub(crate) struct Pinned<'cuda> {
    cuda: &'cuda Cuda,
    at: u64,
    bytes: u64,
}

impl Pinned<'_> {
    /// The memory.
    pub(crate) fn span(&self) -> HostSpan<'_> {
        HostSpan { at: self.at, bytes: self.bytes, owner: core::marker::PhantomData }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        type Entry = unsafe extern "C" fn(*mut c_void) -> c_uint;
        let at = core::ptr::with_exposed_provenance_mut(usize::try_from(self.at).unwrap_or(0));
        // SAFETY: this is the function's signature in the driver's header.
        if let Ok(entry) = unsafe { self.cuda.entry::<Entry>("cuMemFreeHost") } {
            // SAFETY: the driver gave out the address; spans of it cannot outlive this value. A failure only keeps the memory.
            unsafe { entry(at) };
        }
    }
}

impl Cuda {
    /// `cuMemHostAlloc`.
    pub(crate) fn pin(&self, bytes: u64) -> Answer<Pinned<'_>> {
        type Entry = unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_uint;
        let mut at = core::ptr::null_mut();
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuMemHostAlloc") }?;
        // SAFETY: the driver writes one address to a live variable.
        result(unsafe { entry(&raw mut at, usize::try_from(bytes).unwrap_or(usize::MAX), 0) })
            .map_err(|code| Stop::refused("cuMemHostAlloc", code))?;
        Ok(Pinned { cuda: self, at: at.expose_provenance() as u64, bytes })
    }

    /// `cuMemcpyHtoD_v2`: all of the host memory.
    pub(crate) fn copy_in(&self, to: u64, from: HostSpan<'_>) -> Answer {
        type Entry = unsafe extern "C" fn(u64, *const c_void, usize) -> c_uint;
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuMemcpyHtoD_v2") }?;
        let (at, bytes) = from.parts();
        // SAFETY: the span is live host memory; the driver refuses addresses that are no device memory.
        result(unsafe { entry(to, at, bytes) }).map_err(|code| Stop::refused("cuMemcpyHtoD_v2", code))
    }

    /// `cuMemcpyDtoH_v2`: all of the host memory.
    pub(crate) fn copy_out(&self, to: HostSpan<'_>, from: u64) -> Answer {
        type Entry = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_uint;
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuMemcpyDtoH_v2") }?;
        let (at, bytes) = to.parts();
        // SAFETY: the span is live host memory that nothing borrows as Rust memory; as above for the device.
        result(unsafe { entry(at, from, bytes) }).map_err(|code| Stop::refused("cuMemcpyDtoH_v2", code))
    }

    /// `cuMemFree_v2`.
    pub(crate) fn free(&self, at: u64) -> Answer {
        type Entry = unsafe extern "C" fn(u64) -> c_uint;
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuMemFree_v2") }?;
        // SAFETY: device memory has no Rust references; the driver refuses other addresses.
        result(unsafe { entry(at) }).map_err(|code| Stop::refused("cuMemFree_v2", code))
    }

    /// Loads the library at `path`.
    pub(crate) fn open(path: &Path) -> Answer<Cuda> {
        let failed = |error: &dyn core::fmt::Display| Stop::Refused {
            reason: format!("the driver {} does not load: {error}", path.display()),
            code: None,
        };
        let driver = Driver::load(path).map_err(|error: DriverError| failed(&error))?;
        // SAFETY: the line above loaded the same library; this only counts another reference to it.
        let library =
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| failed(&error))?;
        Ok(Cuda { driver, library })
    }

    /// True if the library has this symbol.
    pub(crate) fn has(&self, symbol: &str) -> bool {
        // SAFETY: the address is compared and never called.
        unsafe { self.library.get::<*const c_void>(symbol.as_bytes()) }.is_ok()
    }

    /// Makes a call, which is named for a refusal.
    pub(crate) fn ask<T>(&self, call: &str, make: impl FnOnce(&Driver) -> Result<T, u32>) -> Answer<T> {
        make(&self.driver)
            .map_err(|code| if self.has(call) { Stop::refused(call, code) } else { Stop::absent(call) })
    }

    /// The result of a call as the name of its code.
    pub(crate) fn code<T>(&self, call: &str, make: impl FnOnce(&Driver) -> Result<T, u32>) -> Answer<String> {
        match make(&self.driver) {
            Ok(_) => Ok(name(0)),
            Err(_) if !self.has(call) => Err(Stop::absent(call)),
            Err(code) => Ok(name(code)),
        }
    }

    /// Copies device memory to `into` and waits for it.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Answer {
        // SAFETY: `into` is borrowed until the stream is synchronised, and the driver writes into no other host memory. An
        // address that is no device memory is refused by the driver.
        let (to, from) = unsafe { ranges(at, into.as_mut_ptr(), into.len()) };
        self.ask("cuMemcpyDtoHAsync_v2", |driver| driver.memcpy_dtoh(to, from, 0))?;
        self.synchronize()
    }

    /// Copies `bytes` to device memory and waits for it.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Answer {
        // SAFETY: as above; the driver only reads the host memory.
        let (from, to) = unsafe { ranges(at, bytes.as_ptr().cast_mut(), bytes.len()) };
        self.ask("cuMemcpyHtoDAsync_v2", |driver| driver.memcpy_htod(to, from, 0))?;
        self.synchronize()
    }

    /// Fills device memory, in whole words, and waits for it.
    pub(crate) fn fill(&self, at: u64, bytes: u64, value: u32) -> Answer {
        // SAFETY: device memory has no Rust references; the driver refuses other addresses.
        let to = unsafe { DeviceRange::new(at, bytes) };
        let rows = Rows { pitch: bytes, width: bytes / 4, height: 1 };
        self.ask("cuMemsetD32Async", |driver| driver.memset(to, 4, value, rows, 0))?;
        self.synchronize()
    }

    /// Waits for the work of the default stream.
    pub(crate) fn synchronize(&self) -> Answer {
        self.ask("cuStreamSynchronize", |driver| driver.cuStreamSynchronize(0))
    }

    /// `cuStreamWriteValue32_v2` with flags.
    pub(crate) fn write_value(
        &self,
        stream: Handle,
        at: u64,
        value: u32,
        flags: u32,
    ) -> Answer<Result<(), u32>> {
        type Entry = unsafe extern "C" fn(Handle, u64, c_uint, c_uint) -> c_uint;
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuStreamWriteValue32_v2") }?;
        // SAFETY: the callers pass device memory that outlives the stream's work; flags are numbers that it checks.
        Ok(result(unsafe { entry(stream, at, value, flags) }))
    }

    /// `cuStreamWaitEvent` with flags.
    pub(crate) fn wait_event(&self, stream: Handle, event: Handle, flags: u32) -> Answer<Result<(), u32>> {
        self.two_handles_and_flags("cuStreamWaitEvent", stream, event, flags)
    }

    /// `cuEventRecordWithFlags`.
    pub(crate) fn record_event(&self, event: Handle, stream: Handle, flags: u32) -> Answer<Result<(), u32>> {
        self.two_handles_and_flags("cuEventRecordWithFlags", event, stream, flags)
    }

    fn two_handles_and_flags(
        &self,
        name: &'static str,
        first: Handle,
        second: Handle,
        flags: u32,
    ) -> Answer<Result<(), u32>> {
        type Entry = unsafe extern "C" fn(Handle, Handle, c_uint) -> c_uint;
        // SAFETY: this is the signature of both callers' functions in the driver's header.
        let entry = unsafe { self.entry::<Entry>(name) }?;
        // SAFETY: the driver made both handles, and they live; flags are numbers that it checks.
        Ok(result(unsafe { entry(first, second, flags) }))
    }

    /// `cuLaunchHostFunc` with a function that does nothing.
    pub(crate) fn launch_host(&self, stream: Handle) -> Answer {
        type Function = unsafe extern "C" fn(*mut c_void);
        type Entry = unsafe extern "C" fn(Handle, Function, *mut c_void) -> c_uint;
        unsafe extern "C" fn nothing(_: *mut c_void) {}
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuLaunchHostFunc") }?;
        // SAFETY: `nothing` reads nothing and lives as long as the program.
        result(unsafe { entry(stream, nothing, core::ptr::null_mut()) })
            .map_err(|code| Stop::refused("cuLaunchHostFunc", code))
    }

    /// The code of `cuTensorMapEncodeTiled`.
    pub(crate) fn tensor_map(&self, tensor: Tensor) -> Answer<String> {
        type Entry = unsafe extern "C" fn(
            *mut TensorMap,
            c_uint,
            c_uint,
            *mut c_void,
            *const u64,
            *const u64,
            *const c_uint,
            *const c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
        ) -> c_uint;
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuTensorMapEncodeTiled") }?;
        let mut map = TensorMap([0; 128]);
        let (dimensions, strides) = ([64_u64; 5], [256_u64, 1 << 14, 1 << 20, 1 << 26, 1 << 32]);
        let (tile, steps) = ([8_u32; 5], [1_u32; 5]);
        let at =
            core::ptr::with_exposed_provenance_mut(usize::try_from(tensor.address).unwrap_or(usize::MAX));
        // SAFETY: the arrays have five elements, the largest number that the driver reads; it does not touch the tensor.
        let code = unsafe {
            entry(
                &raw mut map,
                tensor.format,
                tensor.rank,
                at,
                dimensions.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                0,
                0,
                0,
                0,
            )
        };
        Ok(name(code))
    }

    /// `cuMemAlloc_v2`.
    pub(crate) fn allocate(&self, bytes: usize) -> Answer<u64> {
        type Entry = unsafe extern "C" fn(*mut u64, usize) -> c_uint;
        let mut at = 0;
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuMemAlloc_v2") }?;
        // SAFETY: the driver writes one address to a live variable.
        result(unsafe { entry(&raw mut at, bytes) }).map_err(|code| Stop::refused("cuMemAlloc_v2", code))?;
        Ok(at)
    }

    /// `cuCheckpointProcessGetState` for a process: the state's number.
    pub(crate) fn checkpoint_state(&self, process: i32) -> Answer<c_uint> {
        type Entry = unsafe extern "C" fn(c_int, *mut c_uint) -> c_uint;
        let mut state = 0;
        // SAFETY: this is the function's signature in the driver's header.
        let entry = unsafe { self.entry::<Entry>("cuCheckpointProcessGetState") }?;
        // SAFETY: the driver writes one enumeration to a live variable.
        result(unsafe { entry(process, &raw mut state) })
            .map_err(|code| Stop::refused("cuCheckpointProcessGetState", code))?;
        Ok(state)
    }

    /// Takes an entry point.
    ///
    /// # Safety
    /// `T` is the function's type in the driver's header.
    unsafe fn entry<T: Copy>(&self, symbol: &str) -> Answer<T> {
        // SAFETY: as the caller promises. The library stays loaded as long as `self`.
        unsafe { self.library.get::<T>(symbol.as_bytes()) }
            .map(|entry| *entry)
            .map_err(|_| Stop::absent(symbol))
    }
}

impl core::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Cuda")
    }
}

fn result(code: c_uint) -> Result<(), u32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// The ranges of a copy.
///
/// # Safety
/// The host memory is lent to the driver until the copy is complete.
unsafe fn ranges(at: u64, host: *mut u8, bytes: usize) -> (HostRange, DeviceRange) {
    let bytes = bytes as u64;
    // SAFETY: as the caller promises.
    let host = unsafe { HostRange::new(host.expose_provenance() as u64, bytes) };
    // SAFETY: device memory has no Rust references; the driver refuses other addresses.
    let device = unsafe { DeviceRange::new(at, bytes) };
    (host, device)
}
