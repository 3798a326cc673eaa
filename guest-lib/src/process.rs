//! The one session of this process, and the state that depends on it.

#![expect(unsafe_code, reason = "a pointer that is set once, to a leaked object")]

use crate::{
    arguments::Call,
    error::{Error, Result},
    lifetime, log,
    session::Session,
    state::{
        contexts::{Context, Contexts},
        devices::Devices,
        events::Events,
        gates::Gates,
        green::{Green, Resources},
        host_functions::HostFunctions,
        links::Links,
        memory::{
            arena::Arena, blocks::Blocks, device_map::DeviceMap, imports::Imports, managed::Managed,
            pools::Pools, registered, windows,
        },
        modules::{Modules, VariableMemory},
        objects::{ImageObjects, Plain, PlainObjects},
        peers::Peers,
        shared_events::SharedEvents,
        streams::{NON_BLOCKING, StreamRef, Streams},
        thread,
    },
    transport::{self, TransportError},
};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use sluice_cuda_frontend::handles::PER_THREAD_STREAM;
use sluice_protocol::{
    calls::wire,
    field::Take,
    handle::{self, Id},
};
use std::sync::Mutex;

/// The state that the shim keeps for the program.
pub(crate) struct ProcessState {
    /// The connection to the worker: ring, answers, sequences.
    pub(crate) session: Session,
    /// The devices as the program sees them.
    pub(crate) devices: Devices,
    pub(crate) contexts: Contexts,
    /// The resources for green contexts that the program holds.
    pub(crate) resources: Resources,
    pub(crate) streams: Streams,
    pub(crate) events: Events,
    /// Records and waits of whole contexts.
    pub(crate) gates: Gates,
    /// Events that other processes share.
    pub(crate) shared_events: SharedEvents,
    pub(crate) host_functions: HostFunctions,
    /// Objects of the plain kinds.
    pub(crate) objects: PlainObjects,
    /// The worker's arrays and references to images.
    pub(crate) images: ImageObjects,
    /// Modules, libraries and their functions.
    pub(crate) modules: Modules,
    pub(crate) links: Links,
    /// Device addresses in use.
    pub(crate) device_map: DeviceMap,
    /// Host memory shared with the worker.
    pub(crate) arena: Arena,
    /// True if the program's own memory can be shared with the worker.
    pub(crate) can_register: bool,
    /// Managed memory, which is part of the arena, and managed variables.
    pub(crate) managed: Managed,
    pub(crate) pools: Pools,
    /// The program's own physical memory and mappings.
    pub(crate) blocks: Blocks,
    /// Memory of other processes.
    pub(crate) imports: Imports,
    pub(crate) peers: Peers,
    /// Set by `cuInit`.
    initialised: AtomicBool,
}

impl ProcessState {
    /// The calling thread's current context, healthy.
    pub(crate) fn current(&self) -> Result<Context> {
        self.contexts.current(&self.session)
    }

    /// Raw id of the context in which the host looks something up, for calls that need no current context.
    pub(crate) fn look_up_context(&self) -> Result<u64> {
        self.contexts.for_look_up(&self.session, &self.streams, &self.devices)
    }

    /// The stream of a handle as a call got it; 0 and the two special values mean streams of the current context.
    pub(crate) fn stream_or_default(&self, call: Call, handle: u64) -> Result<StreamRef<'_>> {
        if handle > PER_THREAD_STREAM {
            return self.streams.by_id(handle);
        }
        let context = self.current()?;
        if handle == PER_THREAD_STREAM || (handle == 0 && call.per_thread) {
            if context.green != 0 {
                // A green context has no default streams of threads.
                return Err(Error::INVALID_HANDLE);
            }
            let enter = |stream: StreamRef<'_>| self.gates.enter(&self.session, stream);
            self.streams.of_thread(&self.session, context.raw, enter)
        } else {
            self.streams.at(context.legacy)
        }
    }

    /// The stream of this library in a context, for copies at once: no work of the program holds it.
    pub(crate) fn own_stream(&self, context: u64) -> Result<StreamRef<'_>> {
        let create = || {
            let stream = self.streams.create_apart(&self.session, context, NON_BLOCKING, 0)?;
            Ok(stream.id().raw())
        };
        self.streams.by_id(self.shared_events.notes(context, create)?)
    }

    /// The slots and sequences that a synchronisation with a stream waits for.
    pub(crate) fn extent(&self, stream: StreamRef<'_>) -> Result<Vec<(u32, u64)>> {
        Ok(self.streams.extent(self.contexts.get(stream.context)?.legacy, stream))
    }

    /// Waits until the stream has completed its earlier work, before work that the guest does itself.
    pub(crate) fn wait_turn(&self, stream: StreamRef<'_>) -> Result {
        self.streams.wait_turn(&self.session, self.contexts.get(stream.context)?.legacy, stream)
    }

    /// The books of the memory of modules' variables.
    pub(crate) fn variable_memory(&self) -> VariableMemory<'_> {
        VariableMemory { device_map: &self.device_map, managed: &self.managed }
    }

    /// Unloads a module or library when the work that was posted is complete.
    pub(crate) fn unload(&self, context: u64, handle: u64) -> Result {
        self.modules.unload(&self.session, &self.streams, self.variable_memory(), context, handle)
    }

    /// Ends a green context that is out of use: waits for its work, and destroys it on the host. Its streams are detached.
    pub(crate) fn end_green(&self, green: &Green) -> Result {
        let raw = green.id.raw();
        // From now on no stream is made in it.
        self.contexts.greens.remove(green);
        self.streams.detach(&self.session, raw, green.default)?;
        self.session.wait_all(self.streams.posted_of_green(raw))?;
        self.gates.end_green(&self.session, &self.streams, &self.events, raw)?;
        let ids = handle::GreenContext::of(&self.objects);
        let id = ids.take(raw)?;
        let ended = self.session.sync(green.primary, &wire::green_destroy::Args { green: Take(id) });
        ids.release(id);
        self.resources.forget(green.id);
        ended.map(drop)
    }

    /// Ends a context that is out of use: waits for its work, destroys it on the host, and forgets all state of it here.
    pub(crate) fn end_context(&self, id: Id<handle::Context>) -> Result {
        let raw = id.raw();
        for green in self.contexts.greens.of_primary(raw) {
            if green.end() {
                self.end_green(&green)?;
                self.contexts.forget_retain(green.device)?;
            }
        }
        // Before the context cannot carry their contents any more.
        let variables = self.managed.variables.take(|variable| variable.context == Some(raw));
        let streams = self.streams.retire_context(raw);
        self.session.wait_all(self.streams.posted(raw, false))?;
        if self.peers.forget_context(raw) {
            // Work of a peer may use its memory.
            self.streams.wait_all(&self.session)?;
        }
        self.device_map.forget_context(raw);
        Contexts::destroy_on_host(&self.session, id)?;
        self.streams.give_all(raw, streams);
        self.events.forget_context(raw);
        self.gates.forget_context(raw);
        self.shared_events.forget_context(raw);
        self.objects.forget_context(raw);
        self.modules.forget_context(self.variable_memory(), id);
        self.managed.variables.close(&self.device_map, &variables);
        self.arena.forget_context(&self.session, &self.streams, raw);
        self.managed.forget_context(raw);
        Ok(())
    }
}

/// Set once, to an object that is never freed.
static PROCESS: AtomicPtr<ProcessState> = AtomicPtr::new(core::ptr::null_mut());
/// Serialises set-up; a failed one may be tried again.
static CONNECTING: Mutex<()> = Mutex::new(());
/// The error of the latest attempt to connect, 0 if it succeeded.
static FAILED: AtomicU32 = AtomicU32::new(0);

/// Runs in a forked child. A child whose parent only asked for versions and entry points starts anew, as with the vendor's driver;
/// the parent's state stays allocated, since the memory that it names is not mapped here.
extern "C" fn forked() {
    transport::abandon();
    let initialised = process().is_some_and(|process| process.initialised.load(Ordering::Relaxed));
    // If the parent was connecting, a thread that is not here holds the lock: then the child cannot start.
    if !initialised && CONNECTING.try_lock().is_ok() {
        PROCESS.store(core::ptr::null_mut(), Ordering::Release);
        FAILED.store(0, Ordering::Relaxed);
        lifetime::unmark();
    }
}

/// The process, once connected.
fn process() -> Option<&'static ProcessState> {
    // SAFETY: null, or leaked before it was stored.
    unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
}

/// The process after `cuInit`, for a thread that does not run a host function.
pub(crate) fn get() -> Result<&'static ProcessState> {
    lifetime::usable()?;
    thread::may_call()?;
    match process() {
        Some(process) if process.initialised.load(Ordering::Relaxed) => Ok(process),
        _ => Err(Error::NOT_INITIALIZED),
    }
}

/// The process, connected if it was not. The hundreds of look-ups of a runtime's start do not repeat a failed attempt; `cuInit`
/// does.
pub(crate) fn connect() -> Result<&'static ProcessState> {
    match FAILED.load(Ordering::Relaxed) {
        0 => connect_anew(),
        code => Err(Error(code)),
    }
}

fn connect_anew() -> Result<&'static ProcessState> {
    lifetime::usable()?;
    if let Some(process) = process() {
        return Ok(process);
    }
    let _guard = CONNECTING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(process) = process() {
        return Ok(process);
    }
    lifetime::watch_exit_and_fork(forked)?;
    // Before the process has anything to inherit: another thread may fork while this one waits for a worker.
    lifetime::mark()?;
    match open() {
        Ok(process) => {
            FAILED.store(0, Ordering::Relaxed);
            let process = Box::leak(Box::new(process));
            PROCESS.store(process, Ordering::Release);
            Ok(process)
        }
        Err(error) => {
            // The attempt left nothing to inherit: a child may connect by itself.
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

fn open() -> Result<ProcessState> {
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
    let (session, fixed_arena) = Session::open(transport, windows::reserve)?;
    let can_register = fixed_arena.is_none() && !session.gathers() && registered::is_possible();
    let devices = Devices::read(&session, can_register)?;
    let arena = Arena::new(fixed_arena)?;
    let device_map = DeviceMap::open(&session)?;
    let process = ProcessState {
        contexts: Contexts::new(devices.count()),
        resources: Resources::default(),
        session,
        devices,
        streams: Streams::new(),
        events: Events::new(),
        gates: Gates::default(),
        shared_events: SharedEvents::default(),
        host_functions: HostFunctions::default(),
        objects: PlainObjects::default(),
        images: ImageObjects::default(),
        modules: Modules::new(),
        links: Links::default(),
        device_map,
        arena,
        managed: Managed::default(),
        pools: Pools::default(),
        blocks: Blocks::default(),
        imports: Imports::default(),
        peers: Peers::default(),
        can_register,
        initialised: AtomicBool::new(false),
    };
    Ok(process)
}
