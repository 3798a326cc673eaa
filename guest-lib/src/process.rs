//! The one session of this process, and the state that depends on it.

#![expect(unsafe_code, reason = "a pointer that is set once, to what lives as long as the process")]

use crate::{
    arguments::Call,
    error::{Error, Result},
    lifetime, log,
    session::Session,
    state::{
        contexts::{Context, Contexts},
        devices::Devices,
        events::Events,
        memory::{
            arena::Arena, blocks::Blocks, device_map::DeviceMap, imports::Imports, managed::Managed,
            pools::Pools,
        },
        modules::Modules,
        streams::{PER_THREAD, Stream, Streams},
        thread,
    },
    transport::{self, TransportError},
};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use sluice_protocol::handle::{self, Id};
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
    /// Modules, libraries and their functions.
    pub(crate) modules: Modules,
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
    /// The calling thread's current context, healthy.
    pub(crate) fn current(&self) -> Result<Context> {
        self.contexts.current(&self.session)
    }

    /// The stream of a handle as a call got it; 0 and the two special values mean streams of the current context.
    pub(crate) fn stream(&self, call: Call, handle: u64) -> Result<Stream<'_>> {
        if handle > PER_THREAD {
            return self.streams.by_id(handle);
        }
        let context = self.current()?;
        if handle == PER_THREAD || (handle == 0 && call.per_thread) {
            self.streams.of_thread(&self.session, context.raw)
        } else {
            self.streams.at(context.legacy)
        }
    }

    /// What a synchronisation with a stream has to see complete.
    pub(crate) fn extent(&self, stream: Stream<'_>) -> Result<Vec<(u32, u64)>> {
        Ok(self.streams.extent(self.contexts.get(stream.context)?.legacy, stream))
    }

    /// Waits until it is a stream's turn, for what is done here instead of on the device.
    pub(crate) fn wait_turn(&self, stream: Stream<'_>) -> Result {
        self.streams.wait_turn(&self.session, self.contexts.get(stream.context)?.legacy, stream)
    }

    /// Ends a context that is out of use: waits for its work, destroys it on the host, and forgets all that it has here.
    pub(crate) fn end_context(&self, id: Id<handle::Context>) -> Result {
        let raw = id.raw();
        let streams = self.streams.retire_context(raw);
        for (stream, sequence) in self.streams.posted(raw, false) {
            self.session.wait_complete(stream, sequence)?;
        }
        self.device_map.forget_context(raw);
        Contexts::destroy_on_host(&self.session, id)?;
        self.streams.give_all(streams);
        self.events.forget_context(raw);
        self.modules.forget_context(&self.device_map, id);
        self.arena.forget_context(raw);
        self.managed.forget_context(raw);
        Ok(())
    }
}

/// Set once, to what lives as long as the process.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(core::ptr::null_mut());
/// Serialises set-up; a failed one may be tried again.
static CONNECTING: Mutex<()> = Mutex::new(());
/// Why the latest attempt to connect failed, 0 when none did.
static FAILED: AtomicU32 = AtomicU32::new(0);

/// In a forked child. One whose parent only asked for versions and entry points starts anew, as with the vendor's driver;
/// what the parent knew stays allocated, for the memory it names is not here.
extern "C" fn forked() {
    transport::abandon();
    let initialised = process().is_some_and(|process| process.initialised.load(Ordering::Relaxed));
    // Held by a thread that is not here, if the parent was just connecting: then there is no way to start.
    if !initialised && CONNECTING.try_lock().is_ok() {
        PROCESS.store(core::ptr::null_mut(), Ordering::Release);
        FAILED.store(0, Ordering::Relaxed);
        lifetime::unmark();
    }
}

/// The process, once connected.
fn process() -> Option<&'static Process> {
    // SAFETY: null, or leaked before it was stored.
    unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
}

/// The process after `cuInit`.
pub(crate) fn get() -> Result<&'static Process> {
    lifetime::usable()?;
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
    lifetime::usable()?;
    if let Some(process) = process() {
        return Ok(process);
    }
    let _guard = CONNECTING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(process) = process() {
        return Ok(process);
    }
    lifetime::watch_exit_and_fork(forked)?;
    // Before there is anything to inherit: another thread may fork while this one waits for a worker.
    lifetime::mark()?;
    match open() {
        Ok(process) => {
            FAILED.store(0, Ordering::Relaxed);
            let process = Box::leak(Box::new(process));
            PROCESS.store(process, Ordering::Release);
            Ok(process)
        }
        Err(error) => {
            // Nothing is inherited after all: a child may try for itself.
            lifetime::unmark();
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
        device_map,
        arena,
        managed: Managed::default(),
        pools: Pools::default(),
        blocks: Blocks::default(),
        imports: Imports::default(),
        initialised: AtomicBool::new(false),
    };
    thread::end_streams_by(recycle);
    Ok(process)
}

/// Ends a default stream of a thread that ends.
fn recycle(stream: u64) {
    if let Ok(process) = get() {
        process.streams.recycle(&process.session, stream);
    }
}
