//! The one session of this process, and whether it may be used: before set-up, after `fork`, during exit.

#![expect(unsafe_code, reason = "a page that the kernel wipes on fork, exit and fork handlers, signal masks")]

use crate::{
    arena::Arena,
    blocks::Blocks,
    contexts::Contexts,
    devices::Devices,
    error::{Error, Result},
    events::Events,
    functions::Functions,
    log,
    managed::Managed,
    memory::DeviceMap,
    modules::Modules,
    pools::Pools,
    session::Session,
    shared::Imports,
    streams::Streams,
    tables,
    transport::{self, TransportError},
};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::sync::Mutex;

/// Everything the shim knows on behalf of the program.
pub(crate) struct Process {
    /// The ring, the answers, the sequences.
    pub(crate) session: Session,
    /// What the devices are, as the program sees them.
    pub(crate) devices: Devices,
    /// Contexts.
    pub(crate) contexts: Contexts,
    /// Streams.
    pub(crate) streams: Streams,
    /// Events.
    pub(crate) events: Events,
    /// Modules and libraries.
    pub(crate) modules: Modules,
    /// Functions and kernels.
    pub(crate) functions: Functions,
    /// Device addresses in use.
    pub(crate) device_map: DeviceMap,
    /// Host memory shared with the worker.
    pub(crate) arena: Arena,
    /// Managed memory, which is of the arena.
    pub(crate) managed: Managed,
    /// Memory pools.
    pub(crate) pools: Pools,
    /// The program's own physical memory and mappings.
    pub(crate) blocks: Blocks,
    /// Memory of other processes.
    pub(crate) imports: Imports,
    /// Set by `cuInit`.
    initialised: AtomicBool,
}

impl Process {
    /// Waits until everything that was posted so far, to any stream, is complete.
    pub(crate) fn wait_all(&self) -> Result {
        for (slot, posted) in self.streams.all_posted() {
            self.session.wait_complete(slot, posted)?;
        }
        Ok(())
    }
}

/// Set once, to what lives as long as the process.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(core::ptr::null_mut());
/// Serialises set-up; a failed one may be tried again.
static CONNECTING: Mutex<()> = Mutex::new(());
/// A word in a page of its own that reads 1 in the process that wrote it and 0 in a forked child.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
/// Why the latest attempt to connect failed, 0 when none did.
static FAILED: AtomicU32 = AtomicU32::new(0);
static EXITING: AtomicBool = AtomicBool::new(false);

/// Nothing is torn down at exit, and nothing waited for: the device ends the session when the process is gone. From here on
/// calls, which now come from other libraries' exit handlers, are told so.
extern "C" fn exiting() {
    EXITING.store(true, Ordering::Relaxed);
}

/// Registers for exit and fork, once, at the first connection: handlers of libraries that were there before, a runtime's
/// above all, run after ours, as they do with the vendor's driver.
fn watch_exit_and_fork() -> Result {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: the handler only stores a flag, and the library is never unloaded.
    let exit = unsafe { libc::atexit(exiting) };
    // SAFETY: the handler only closes descriptors and stores words, and the library is never unloaded.
    let fork = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    if exit == 0 && fork == 0 { Ok(()) } else { Err(Error::OUT_OF_MEMORY) }
}

/// In a forked child. One whose parent only asked for versions and entry points starts anew, as with the vendor's driver;
/// what the parent knew stays allocated, for the memory it names is not here.
extern "C" fn forked() {
    transport::abandon();
    let initialised = process().is_some_and(|process| process.initialised.load(Ordering::Relaxed));
    // Held by a thread that is not here, if the parent was just connecting: then there is no way to start.
    if !initialised && CONNECTING.try_lock().is_ok() {
        PROCESS.store(core::ptr::null_mut(), Ordering::Release);
        FAILED.store(0, Ordering::Relaxed);
        MARK.store(core::ptr::null_mut(), Ordering::Release);
    }
}

/// The process, once connected.
fn process() -> Option<&'static Process> {
    // SAFETY: null, or leaked before it was stored.
    unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
}

/// Whether calls may be answered at all.
pub(crate) fn usable() -> Result {
    if EXITING.load(Ordering::Relaxed) {
        return Err(Error::DEINITIALIZED);
    }
    let mark = MARK.load(Ordering::Acquire);
    // SAFETY: once set, the pointer names a word of a page that is never unmapped.
    if !mark.is_null() && unsafe { &*mark }.load(Ordering::Relaxed) == 0 {
        return Err(Error::NOT_INITIALIZED);
    }
    Ok(())
}

/// The process after `cuInit`.
pub(crate) fn get() -> Result<&'static Process> {
    usable()?;
    match process() {
        Some(process) if process.initialised.load(Ordering::Relaxed) => Ok(process),
        _ => Err(Error::NOT_INITIALIZED),
    }
}

/// The process, connected if it was not. What failed once is not tried again by the hundreds of look-ups of a runtime's
/// start; `cuInit` may.
pub(crate) fn connect() -> Result<&'static Process> {
    match FAILED.load(Ordering::Relaxed) {
        0 => connect_anew(),
        code => Err(Error(code)),
    }
}

fn connect_anew() -> Result<&'static Process> {
    usable()?;
    if let Some(process) = process() {
        return Ok(process);
    }
    let _guard = CONNECTING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(process) = process() {
        return Ok(process);
    }
    watch_exit_and_fork()?;
    // Before there is anything to inherit: another thread may fork while this one waits for a worker.
    mark()?;
    match open() {
        Ok(process) => {
            FAILED.store(0, Ordering::Relaxed);
            let process = Box::leak(Box::new(process));
            PROCESS.store(process, Ordering::Release);
            Ok(process)
        }
        Err(error) => {
            // Nothing is inherited after all: a child may try for itself.
            MARK.store(core::ptr::null_mut(), Ordering::Release);
            FAILED.store(error.0, Ordering::Relaxed);
            Err(error)
        }
    }
}

/// `cuInit`.
pub(crate) fn initialise() -> Result {
    let process = connect_anew()?;
    if process.devices.is_empty() {
        return Err(Error::NO_DEVICE);
    }
    process.initialised.store(true, Ordering::Relaxed);
    Ok(())
}

fn open() -> Result<Process> {
    let transport = transport::open().map_err(|error| {
        if matches!(error, TransportError::NoDevice) {
            log::info(format_args!("no Sluice device in this system"));
        } else {
            log::error(format_args!("cannot reach the Sluice device: {error}"));
        }
        match error {
            TransportError::Version(_) => Error::SYSTEM_DRIVER_MISMATCH,
            _ => Error::NO_DEVICE,
        }
    })?;
    let session = Session::open(transport)?;
    let devices = Devices::read(&session)?;
    let arena = Arena::new()?;
    let device_map = DeviceMap::open(&session)?;
    let process = Process {
        contexts: Contexts::new(devices.count()),
        session,
        devices,
        streams: Streams::new(),
        events: Events::new(),
        modules: Modules::new(),
        functions: Functions::new(),
        device_map,
        arena,
        managed: Managed::default(),
        pools: Pools::default(),
        blocks: Blocks::default(),
        imports: Imports::default(),
        initialised: AtomicBool::new(false),
    };
    tables::install();
    Ok(process)
}

/// Makes this process tell itself from its forked children. The caller is alone.
fn mark() -> Result {
    static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
    let word = match PAGE.load(Ordering::Relaxed) {
        page if page.is_null() => mark_page()?,
        page => page,
    };
    PAGE.store(word, Ordering::Relaxed);
    // SAFETY: the page is mapped, writable, aligned, and never unmapped.
    unsafe { &*word }.store(1, Ordering::Relaxed);
    MARK.store(word, Ordering::Release);
    Ok(())
}

/// A page of its own, zero in a forked child.
fn mark_page() -> Result<*mut AtomicU32> {
    let flags = MapFlags::PRIVATE;
    // SAFETY: a fresh anonymous page.
    let page =
        unsafe { mm::mmap_anonymous(core::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, flags) }
            .map_err(|_| Error::OUT_OF_MEMORY)?;
    // SAFETY: advice about the page just made.
    unsafe { mm::madvise(page, 4096, Advice::LinuxWipeOnFork) }.map_err(|_| Error::NOT_SUPPORTED)?;
    Ok(page.cast())
}

/// Starts a thread of the shim: small, and deaf to the program's signals.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    // SAFETY: an all-zero set is a valid value for sigfillset to fill.
    let mut all: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: as above.
    let mut before: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: a set of our own.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both sets are valid; the mask is inherited by the new thread and put back below.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    let started = std::thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(body);
    // SAFETY: the mask as it was.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    started.map(drop)
}
