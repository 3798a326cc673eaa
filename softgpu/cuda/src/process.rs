//! The driver itself, which lives as long as the process, from `cuInit` on.
//!
//! No part of it is ever torn down. A forked child finds the driver not initialised, in every state of its parent; after the
//! program began to exit every call answers that the driver is gone.
#![expect(unsafe_code, reason = "threads, fork and exit need the C library")]

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32};
use std::sync::{Arc, Mutex, OnceLock};

use sluice_cuda_abi::tables::DeviceIdentity;
use softgpu_device::{AttachError, Client, Config, Device, Reservation};
use softgpu_engine::{LOCAL_WINDOW, Pool, SHARED_WINDOW};

use crate::context::lock;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::log::log;
use crate::memory::{Rates, Space};
use crate::schedule::Scheduler;
use crate::visible;

/// The driver after `cuInit`.
pub(crate) struct Driver {
    gpus: Vec<&'static Gpu>,
    pub(crate) identities: Vec<DeviceIdentity>,
    pub(crate) pool: Pool,
    /// `CUDA_LAUNCH_BLOCKING`: a launch returns when its kernel has ended.
    pub(crate) launches_block: bool,
    /// Address windows of shared and local memory: reserved, never mapped.
    _windows: [Reservation; 2],
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());
static SCHEDULER: OnceLock<Scheduler> = OnceLock::new();
static EXITING: AtomicBool = AtomicBool::new(false);
/// A word that reads 0 in a forked child: the kernel wipes its page.
static PARENT: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// Descriptors whose locks witness that this process lives: a forked child closes its copies.
static WITNESSES: [AtomicI32; visible::MOST] = [const { AtomicI32::new(-1) }; visible::MOST];

/// Where windows of device memory may lie: clear of the engine's windows below, and of the addresses above that
/// Sluice's sessions and the system itself use. One for each GPU, each of this size.
const WINDOWS: std::ops::Range<u64> = 0x7d00_0000_0000..0x7e00_0000_0000;
const WINDOW_BYTES: u64 = 64 << 30;

/// The driver, if it may be used.
pub(crate) fn driver() -> Result<&'static Driver> {
    if EXITING.load(Relaxed) {
        return Err(Error::DEINITIALIZED);
    }
    let driver = DRIVER.get().ok_or(Error::NOT_INITIALIZED)?;
    if is_child() { Err(Error::NOT_INITIALIZED) } else { Ok(driver) }
}

/// Whether the driver may be touched at all: for destructors.
pub(crate) fn is_usable() -> bool {
    driver().is_ok()
}

fn is_child() -> bool {
    let word = PARENT.load(Acquire);
    // SAFETY: once set, the pointer names a page that is never unmapped.
    !word.is_null() && unsafe { &*word }.load(Relaxed) == 0
}

/// The order of work. Exists from `cuInit` on, and whoever has a context has seen `cuInit`.
pub(crate) fn scheduler() -> &'static Scheduler {
    SCHEDULER.get_or_init(Scheduler::new)
}

/// `cuInit`. A failed start may be tried again; a second start does nothing.
pub(crate) fn start(flags: u32) -> Result {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if EXITING.load(Relaxed) {
        return Err(Error::DEINITIALIZED);
    }
    if is_child() {
        return Err(Error::NOT_INITIALIZED);
    }
    let _guard = lock(&STARTING);
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let config = Config::from_environment().map_err(|error| {
        failed(&error);
        Error::UNKNOWN
    })?;
    let windows = [SHARED_WINDOW, LOCAL_WINDOW].map(|window| {
        Reservation::at(window.start, window.end - window.start).map_err(|error| {
            failed(&format_args!("cannot reserve addresses at {:#x}: {error}", window.start));
            Error::OPERATING_SYSTEM
        })
    });
    let [Ok(shared), Ok(local)] = windows else { return Err(Error::OPERATING_SYSTEM) };

    let mut opened = Vec::new();
    for index in 0..config.devices {
        opened.push(Arc::new(Device::open(&config, index).map_err(|error| {
            failed(&error);
            Error::OPERATING_SYSTEM
        })?));
    }
    let visible = visible::chosen(&opened, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
    if visible.is_empty() {
        return Err(Error::NO_DEVICE);
    }
    watch_fork_and_exit()?;

    let threads = match config.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let mut gpus: Vec<&'static Gpu> = Vec::new();
    let mut identities = Vec::new();
    let mut at = WINDOWS.start;
    for (ordinal, face) in visible.into_iter().enumerate() {
        let device = &face.device;
        let owner = match face.confinement {
            Some(confinement) => device.attach_confined(confinement),
            None => device.attach(Client::Cuda),
        };
        let owner = owner.map_err(|error| {
            failed(&error);
            match error {
                // It was there a moment ago.
                AttachError::Divided | AttachError::Gone => Error::NO_DEVICE,
                AttachError::Full | AttachError::Lock(_) => Error::OPERATING_SYSTEM,
            }
        })?;
        WITNESSES[ordinal % WITNESSES.len()].store(owner.witness(), Release);
        let window = reserve_window(&mut at)?;
        let identity = *device.identity();
        let space = Space::new(owner, window, config.memory);
        let ordinal = i32::try_from(ordinal).map_err(|_| Error::UNKNOWN)?;
        let rates = Rates::new(config.context_bytes, identity.scale, face.multiprocessors);
        let uuid = face.uuid;
        let gpu = Gpu::new(ordinal, identity, face, config.ecc, space, rates, threads);
        let gpu: &'static Gpu = Box::leak(Box::new(gpu));
        gpu.prepare()?;
        identities.push(DeviceIdentity {
            uuid,
            pci_domain: 0,
            pci_bus: i32::try_from(gpu.pci_bus()).map_err(|_| Error::UNKNOWN)?,
            pci_device: 0,
        });
        gpus.push(gpu);
    }
    let _ = scheduler();
    let launches_block = std::env::var("CUDA_LAUNCH_BLOCKING").is_ok_and(|value| value == "1");
    let pool = Pool::new(threads);
    let driver = Driver { gpus, identities, pool, launches_block, _windows: [shared, local] };
    // The lock is held, so nobody else has set it.
    let _ = DRIVER.set(driver);
    crate::tables::install();
    Ok(())
}

/// Says why the driver does not start, log or no log: no code can tell a person enough.
fn failed(reason: &dyn std::fmt::Display) {
    crate::log::line(format_args!("cannot start: {reason}"));
}

fn reserve_window(at: &mut u64) -> Result<Reservation> {
    while *at + WINDOW_BYTES <= WINDOWS.end {
        let candidate = *at;
        *at += WINDOW_BYTES;
        if let Ok(window) = Reservation::at(candidate, WINDOW_BYTES) {
            return Ok(window);
        }
    }
    failed(&"no free addresses for device memory");
    Err(Error::OPERATING_SYSTEM)
}

impl Driver {
    /// The visible GPUs.
    pub(crate) fn gpus(&self) -> &[&'static Gpu] {
        &self.gpus
    }

    /// The GPU of an ordinal.
    pub(crate) fn gpu(&self, ordinal: i32) -> Result<&'static Gpu> {
        let index = usize::try_from(ordinal).map_err(|_| Error::INVALID_DEVICE)?;
        self.gpus.get(index).copied().ok_or(Error::INVALID_DEVICE)
    }
}

extern "C" fn at_exit() {
    EXITING.store(true, Release);
}

extern "C" fn in_child() {
    for witness in &WITNESSES {
        let descriptor = witness.swap(-1, Relaxed);
        if descriptor >= 0 {
            // SAFETY: the descriptor is the child's copy; the child never uses the device, whose lock it would keep.
            unsafe { libc::close(descriptor) };
        }
    }
}

fn watch_fork_and_exit() -> Result {
    if !PARENT.load(Acquire).is_null() {
        return Ok(());
    }
    let bytes = 4096;
    let address = softgpu_device::anonymous(bytes).map_err(|_| Error::OUT_OF_MEMORY)?;
    let page = ptr::with_exposed_provenance_mut::<AtomicU32>(usize::try_from(address).unwrap_or(0));
    // SAFETY: the page was just mapped and nobody else knows it.
    if unsafe { libc::madvise(page.cast::<c_void>(), bytes, libc::MADV_WIPEONFORK) } != 0 {
        return Err(Error::OPERATING_SYSTEM);
    }
    // SAFETY: as above; all zeroes are a valid value.
    unsafe { &*page }.store(1, Relaxed);
    PARENT.store(page, Release);
    // SAFETY: both handlers only touch atomics and close descriptors. The library is never unloaded.
    let registered = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    // SAFETY: as above.
    let registered = registered | unsafe { libc::atexit(at_exit) };
    if registered == 0 { Ok(()) } else { Err(Error::OUT_OF_MEMORY) }
}

/// Starts a thread that takes work, with all signals blocked: they are the program's. Plain `pthread_create`, so that a
/// process which has confined itself to few system calls can still start it.
pub(crate) fn start_executor() -> std::io::Result<()> {
    extern "C" fn execute(_: *mut c_void) -> *mut c_void {
        scheduler().execute();
        ptr::null_mut()
    }
    // SAFETY: signal sets are plain data that the calls below fill.
    let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both sets are ours. The new thread inherits the mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    let mut thread = 0;
    // SAFETY: the entry takes no argument and touches statics only.
    let code = unsafe { libc::pthread_create(&raw mut thread, ptr::null(), execute, ptr::null_mut()) };
    // SAFETY: the set was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    if code != 0 {
        return Err(std::io::Error::from_raw_os_error(code));
    }
    // SAFETY: the thread was just created and nobody joins it.
    unsafe { libc::pthread_detach(thread) };
    Ok(())
}

/// A standard stream of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Output,
    Error,
}

/// Writes what kernels printed through the program's own stream, so that it keeps its place among what the program writes.
pub(crate) fn print(stream: Stream, text: &[u8]) {
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
        static stderr: *mut libc::FILE;
    }
    // SAFETY: the C library's streams exist from its start to its end.
    let stream = unsafe {
        match stream {
            Stream::Output => stdout,
            Stream::Error => stderr,
        }
    };
    // SAFETY: pointer and length describe the text. A closed stream is not our concern.
    let written = unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stream) };
    if written != text.len() {
        log!("a kernel's output was cut");
    }
}
