//! The export tables: the undocumented part of the driver's interface, returned by `cuGetExportTable`. In one file: one review reads all
//! that is undocumented.
//!
//! A table is an array of pointers: slot 0 contains its size in bytes, the rest are functions (only the context-local storage has
//! no size slot). Tables are statics and have one address for the life of the process, because runtimes compare and hash it. The
//! supported slots are those that runtimes and libraries were observed to call. Any other slot of a supported table returns
//! `CUDA_ERROR_NOT_SUPPORTED` and writes nothing, and any other table is refused. A slot must never be null, nor return success
//! without doing its work: a caller that gets a false success computes nothing and does not notice.
//!
//! This module owns the tables and the context-local storage. It gets the facts of the driver through [`Hooks`]. All are local to the
//! process, except for the load of a module.

#![expect(
    unsafe_code,
    reason = "the tables are static memory of raw pointers, and runtimes store destructors in them"
)]

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use sluice_cuda_abi::sys::CUresult;

use crate::entry::{ErrorCode, enter};
use crate::handles::{LEGACY_STREAM, PER_THREAD_STREAM};
pub use crate::identity::DeviceIdentity;
use crate::pointers;
use crate::storage::Storage;

/// The functions of the driver that the tables need. Contexts are the program's handles; 0 means none. Errors are raw result
/// codes.
pub trait Hooks: Sync {
    /// Checks that the driver may be used; every slot returns the error otherwise. A forked child is detected here.
    fn ready(&self) -> Result<(), u32> {
        Ok(())
    }
    /// Returns the handle of a device's primary context, without retaining it.
    fn primary_context(&self, device: i32) -> Result<usize, u32>;
    /// Returns the context current to the calling thread.
    fn current_context(&self) -> usize;
    /// Returns the id of a context (not 0), as `cuCtxGetId` does.
    fn context_id(&self, context: usize) -> Result<u64, u32>;
    /// Returns the id of a stream, as `cuStreamGetId` does. The special handles 1 and 2 are streams of the current context.
    fn stream_id(&self, stream: u64) -> Result<u64, u32>;
    /// Loads an image into the current context, as `cuModuleLoadData` does. Returns the module.
    fn load_module(&self, image: pointers::In<u8, u32>) -> Result<usize, u32>;
    /// Returns the functions of a module, in the order of `cuModuleEnumerateFunctions`.
    fn functions(&self, module: usize) -> Result<Vec<usize>, u32>;
    /// Returns the visible devices in ordinal order.
    fn devices(&self) -> &[DeviceIdentity];
    /// Returns the result of `cuDriverGetVersion`.
    fn driver_version(&self) -> u32;
    /// Called for the first request in a process of each refused table, up to a number of tables.
    fn refused(&self, uuid: [u8; 16]);
    /// Called for the first call in a process of each unsupported slot of a supported table.
    fn unsupported(&self, uuid: [u8; 16], slot: usize);
    /// Returns the functions for a management library of the same system; `None` if there are none.
    fn monitor(&self) -> Option<&dyn Monitor> {
        None
    }
}

/// Queries of a management library. They work for all devices, visible to the program or not, with or without a context.
pub trait Monitor {
    /// Returns the number of devices.
    fn devices(&self) -> Result<u32, u32>;
    /// Returns the identity of a device.
    fn device(&self, index: u32) -> Result<MonitoredDevice, u32>;
    /// Returns the bytes of a device's memory, and how many of them are in use.
    fn memory(&self, index: u32) -> Result<(u64, u64), u32>;
    /// Fills in the processes of this system that use a device. Returns their number.
    fn processes(&self, index: u32, into: &mut [MonitoredProcess]) -> Result<u32, u32>;
    /// Returns a device attribute (`CUdevice_attribute`).
    fn attribute(&self, index: u32, attribute: u32) -> Result<i32, u32>;
}

/// A device, for a management library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct MonitoredDevice {
    /// Result of `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
    /// Result of `cuDeviceGetName`, with at least one NUL at the end.
    pub name: [u8; 128],
}

/// A process that uses a device, for a management library.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MonitoredProcess {
    /// Process id in its own system.
    pub process: u32,
    /// Padding.
    pub pad: u32,
    /// Bytes of device memory that it has.
    pub bytes: u64,
}

static HOOKS: OnceLock<&'static dyn Hooks> = OnceLock::new();
static STORAGE: Storage<Destructor> = Storage::new();

/// Connects the tables to their driver. Until then every supported slot returns `CUDA_ERROR_NOT_INITIALIZED`. Only the first call
/// has an effect, since a process has one driver.
pub fn install(hooks: &'static dyn Hooks) {
    // A later call passes the same driver again, or is a mistake that must not change earlier results.
    let _first = HOOKS.set(hooks).is_ok();
}

/// Returns the table with that id. For `None` the caller returns `CUDA_ERROR_INVALID_VALUE` and writes a null pointer.
pub fn get(uuid: [u8; 16]) -> Option<*const c_void> {
    let table = match uuid {
        CUDART_INTERFACE => CUDART_INTERFACE_TABLE.address(),
        RUNTIME_CALLBACKS => RUNTIME_CALLBACKS_TABLE.address(),
        TOOLS_TLS => TOOLS_TLS_TABLE.address(),
        CONTEXT_STORAGE => CONTEXT_STORAGE_TABLE.address(),
        #[cfg(feature = "cudart-handshake")]
        HANDSHAKE => HANDSHAKE_TABLE.address(),
        CONTEXT_CHECKS => CONTEXT_CHECKS_TABLE.address(),
        TOOLS_CONTEXT => TOOLS_CONTEXT_TABLE.address(),
        CUBLAS => CUBLAS_TABLE.address(),
        CUPTI => CUPTI_TABLE.address(),
        MODULE_FUNCTIONS => MODULE_FUNCTIONS_TABLE.address(),
        MONITOR if HOOKS.get().is_some_and(|hooks| hooks.monitor().is_some()) => MONITOR_TABLE.address(),
        _ => {
            if let Some(hooks) = HOOKS.get()
                && is_first_refusal(uuid)
            {
                hooks.refused(uuid);
            }
            return None;
        }
    };
    Some(table)
}

/// Returns a name for a table, supported or not, for logs.
pub const fn name(uuid: [u8; 16]) -> Option<&'static str> {
    Some(match uuid {
        CUDART_INTERFACE => "CUDART_INTERFACE",
        RUNTIME_CALLBACKS => "runtime callback hooks",
        TOOLS_TLS => "tools thread-local storage",
        CONTEXT_STORAGE => "context-local storage",
        HANDSHAKE => "runtime start-up handshake (cargo feature cudart-handshake)",
        CONTEXT_CHECKS => "context checks",
        TOOLS_CONTEXT => "tools context",
        CUBLAS => "unnamed, used by cuBLASLt",
        CUPTI => "CUPTI",
        MODULE_FUNCTIONS => "functions of modules",
        MONITOR => "Sluice, for a management library",
        RUNTIME_OPTIONAL => "unnamed, optional to the runtime",
        NVRTC_CACHE => "NVRTC cache",
        PROFILER_TOOLS => "profiler tools",
        _ => return None,
    })
}

/// True for a table that is refused and whose callers work without it, so that its refusal is no news.
pub const fn is_optional(uuid: [u8; 16]) -> bool {
    matches!(uuid, RUNTIME_OPTIONAL | NVRTC_CACHE)
}

/// Runs and removes the destructors that runtimes stored for a context. Call it when the context is destroyed, or its device
/// reset, before its handle can be used again; not when the process exits.
pub fn context_destroyed(context: usize) {
    for orphan in STORAGE.take_context(context) {
        if let Some(destructor) = orphan.destructor {
            // SAFETY: the runtime stored this function to be called with exactly these three arguments when the context ends.
            unsafe { destructor(context, orphan.key, orphan.value) };
        }
    }
}

// --- The ids ---------------------------------------------------------------------------------------------------------

/// The table that every runtime requests first.
pub const CUDART_INTERFACE: [u8; 16] = id(0x6bd5fb6c_5bf4_e74a_8987_d93912fd9df9);
/// Buffers for the callbacks of tools.
pub const RUNTIME_CALLBACKS: [u8; 16] = id(0xa094798c_2e74_2e74_93f2_0800200c0a66);
/// The current context, for tools and cuBLASLt.
pub const TOOLS_TLS: [u8; 16] = id(0x42d85a81_23f6_cb47_8298_f6e78a3aecdc);
/// Context-local storage.
pub const CONTEXT_STORAGE: [u8; 16] = id(0xc693336e_1121_df11_a8c3_68f355d89593);
/// The start-up handshake; refused without the feature `cudart-handshake`.
pub const HANDSHAKE: [u8; 16] = id(0xd4082055_bde6_704b_8d34_ba123c66e1f2);
/// Checks that a context may be used.
pub const CONTEXT_CHECKS: [u8; 16] = id(0x263e8860_7cd2_6143_92f6_bbd5006dfa7e);
/// The ids of contexts and streams, for tools, cuBLAS and cuBLASLt.
pub const TOOLS_CONTEXT: [u8; 16] = id(0x21318c60_9714_3248_8ca6_41ff7324c8f2);
/// Without this table cuBLASLt crashes.
pub const CUBLAS: [u8; 16] = id(0x1734dc26_800d_4745_8726_c0f1e7dd8bca);
/// Without this table CUPTI recurses without end.
pub const CUPTI: [u8; 16] = id(0x7cb63f9b_9ca4_8e42_a484_beb66e6aed7f);

/// The functions of a module, for cuFFT, which makes no plan without them.
pub const MODULE_FUNCTIONS: [u8; 16] = id(0x6e163fbe_b958_444d_835c_e182aff1991e);

/// Our own, for the management library that belongs to the driver. Slot 0 is the table's size; every function returns a
/// `CUresult`, and none needs a context:
///
/// | slot | function |
/// |---|---|
/// | 1 | `(uint32_t *devices)` |
/// | 2 | `(uint32_t index, struct { uint8_t uuid[16]; char name[128]; } *)` |
/// | 3 | `(uint32_t index, uint64_t *total, uint64_t *used)` |
/// | 4 | `(uint32_t index, uint32_t *count, struct { uint32_t process, pad; uint64_t bytes; } *)`: room in, processes out |
/// | 5 | `(uint32_t index, uint32_t attribute, int32_t *value)` |
/// | 6 | `(uint32_t *driver_version)` |
pub const MONITOR: [u8; 16] = id(0x736c7569_6365_4d6f_8e69_746f722d7631);

/// Refused: a runtime works without it, but calls into it if it is there.
pub const RUNTIME_OPTIONAL: [u8; 16] = id(0xf8cff951_2146_8b4e_b9e2_fb469e7c0dd9);
/// Refused: NVRTC compiles without it, but reports success without a result if its slots do nothing.
pub const NVRTC_CACHE: [u8; 16] = id(0xda9151d3_3ae6_cc41_a5c0_4f26d533e328);
/// Refused: profilers then run without events of the GPU.
pub const PROFILER_TOOLS: [u8; 16] = id(0x2c8e0ad8_0710_ab4e_90dd_54719fe5f74b);

/// Converts an id to its written form.
const fn number(id: [u8; 16]) -> u128 {
    u128::from_be_bytes(id)
}

/// Converts an id from its written form to bytes.
const fn id(written: u128) -> [u8; 16] {
    written.to_be_bytes()
}

// --- The tables ------------------------------------------------------------------------------------------------------

/// An array of function pointers, with or without a size at the start.
#[repr(transparent)]
struct FunctionTable<const SLOTS: usize>([*const c_void; SLOTS]);

// SAFETY: the pointers are to functions or are plain numbers; tables are never written.
unsafe impl<const SLOTS: usize> Sync for FunctionTable<SLOTS> {}

impl<const SLOTS: usize> FunctionTable<SLOTS> {
    /// Creates a table with its size in slot 0 and the given functions in their slots.
    const fn new<const TABLE: u128>(functions: &[(usize, *const c_void)]) -> Self {
        let mut table = Self::without_size::<TABLE>(functions);
        table.0[0] = ptr::without_provenance(size_of::<Self>());
        table
    }

    const fn without_size<const TABLE: u128>(functions: &[(usize, *const c_void)]) -> Self {
        let unsupported = unsupported_slots::<TABLE>();
        let mut slots = [ptr::null(); SLOTS];
        let mut i = 0;
        while i < SLOTS {
            slots[i] = unsupported[i];
            i += 1;
        }
        let mut i = 0;
        while i < functions.len() {
            slots[functions[i].0] = functions[i].1;
            i += 1;
        }
        Self(slots)
    }

    const fn address(&'static self) -> *const c_void {
        ptr::from_ref(self).cast()
    }
}

static CUDART_INTERFACE_TABLE: FunctionTable<13> = FunctionTable::new::<{ number(CUDART_INTERFACE) }>(&[
    (2, primary_context as *const c_void),
    (6, load_module as *const c_void),
    (12, runtime_started as *const c_void),
]);
static RUNTIME_CALLBACKS_TABLE: FunctionTable<7> = FunctionTable::new::<{ number(RUNTIME_CALLBACKS) }>(&[
    (2, callback_buffer as *const c_void),
    (6, small_callback_buffer as *const c_void),
]);
static TOOLS_TLS_TABLE: FunctionTable<4> =
    FunctionTable::new::<{ number(TOOLS_TLS) }>(&[(2, current_context as *const c_void)]);
static CONTEXT_STORAGE_TABLE: FunctionTable<4> =
    FunctionTable::without_size::<{ number(CONTEXT_STORAGE) }>(&[
        (0, storage_put as *const c_void),
        (1, storage_delete as *const c_void),
        (2, storage_get as *const c_void),
    ]);
#[cfg(feature = "cudart-handshake")]
static HANDSHAKE_TABLE: FunctionTable<3> =
    FunctionTable::new::<{ number(HANDSHAKE) }>(&[(HANDSHAKE_SLOT, handshake as *const c_void)]);
static CONTEXT_CHECKS_TABLE: FunctionTable<15> = FunctionTable::new::<{ number(CONTEXT_CHECKS) }>(&[
    (2, check_context as *const c_void),
    (3, check_driver as *const c_void),
]);
static TOOLS_CONTEXT_TABLE: FunctionTable<95> = FunctionTable::new::<{ number(TOOLS_CONTEXT) }>(&[
    (4, context_id as *const c_void),
    (39, stream_id as *const c_void),
    (51, stream_object as *const c_void),
]);
static CUBLAS_TABLE: FunctionTable<64> = FunctionTable::new::<{ number(CUBLAS) }>(&[]);
static CUPTI_TABLE: FunctionTable<64> = FunctionTable::new::<{ number(CUPTI) }>(&[]);
static MODULE_FUNCTIONS_TABLE: FunctionTable<64> =
    FunctionTable::new::<{ number(MODULE_FUNCTIONS) }>(&[(7, module_functions as *const c_void)]);
static MONITOR_TABLE: FunctionTable<7> = FunctionTable::new::<{ number(MONITOR) }>(&[
    (1, monitor_devices as *const c_void),
    (2, monitor_device as *const c_void),
    (3, monitor_memory as *const c_void),
    (4, monitor_processes as *const c_void),
    (5, monitor_attribute as *const c_void),
    (6, monitor_version as *const c_void),
]);

// --- The functions ---------------------------------------------------------------------------------------------------

/// A result code other than success.
#[derive(Clone, Copy)]
struct Error(u32);

type Result<T = (), E = Error> = std::result::Result<T, E>;
type Out<T> = pointers::Out<T, Error>;

impl Error {
    const INVALID_CONTEXT: Error = Error(CUresult::CUDA_ERROR_INVALID_CONTEXT as u32);
    const INVALID_HANDLE: Error = Error(CUresult::CUDA_ERROR_INVALID_HANDLE as u32);
    const INVALID_VALUE: Error = Error(CUresult::CUDA_ERROR_INVALID_VALUE as u32);
    const NOT_INITIALIZED: Error = Error(CUresult::CUDA_ERROR_NOT_INITIALIZED as u32);
    const NOT_SUPPORTED: Error = Error(CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
    const UNKNOWN: Error = Error(CUresult::CUDA_ERROR_UNKNOWN as u32);
}

impl ErrorCode for Error {
    const NULL_POINTER: Error = Error::INVALID_VALUE;
    const NO_ROOM: Error = Error::INVALID_VALUE;
    const PANIC: Error = Error::UNKNOWN;

    fn code(self) -> u32 {
        self.0
    }
}

impl From<u32> for Error {
    fn from(code: u32) -> Error {
        Error(code)
    }
}

/// The supported tables.
const TABLES: [[u8; 16]; 11] = [
    CUDART_INTERFACE,
    RUNTIME_CALLBACKS,
    TOOLS_TLS,
    CONTEXT_STORAGE,
    HANDSHAKE,
    CONTEXT_CHECKS,
    TOOLS_CONTEXT,
    CUBLAS,
    CUPTI,
    MODULE_FUNCTIONS,
    MONITOR,
];

/// The slots that were reported, by the position of their table. A forked child could wait for ever for a lock.
static REPORTED: [[AtomicBool; MOST_SLOTS]; TABLES.len()] =
    [const { [const { AtomicBool::new(false) }; MOST_SLOTS] }; TABLES.len()];

/// Refused tables that are reported, at most; no program is known to ask for more than a few.
const MOST_REFUSED: usize = 64;

/// The refused tables that were reported, by a digest that is never 0. No lock, for the same reason.
static REFUSED: [AtomicU64; MOST_REFUSED] = [const { AtomicU64::new(0) }; MOST_REFUSED];

/// True for the first refusal of a table.
fn is_first_refusal(uuid: [u8; 16]) -> bool {
    let (halves, _) = uuid.as_chunks();
    // An odd factor spreads the first half, so that it does not cancel the second.
    let spread =
        |digest: u64, half: &[u8; 8]| digest.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from_be_bytes(*half);
    let digest = halves.iter().fold(0, spread) | 1 << 63;
    for slot in &REFUSED {
        match slot.compare_exchange(0, digest, Relaxed, Relaxed) {
            Ok(_) => return true,
            Err(known) if known == digest => return false,
            Err(_) => {}
        }
    }
    false
}

/// Returns the position of a table in [`TABLES`]; another table does not compile.
const fn position(table: u128) -> usize {
    let mut position = 0;
    while number(TABLES[position]) != table {
        position += 1;
    }
    position
}

/// The function of an unsupported slot. It reads no argument.
extern "C" fn unsupported<const TABLE: u128, const SLOT: usize>() -> u32 {
    let report = || {
        let reported = &REPORTED[const { position(TABLE) }][SLOT];
        if let Some(hooks) = HOOKS.get()
            && !reported.swap(true, Relaxed)
        {
            hooks.unsupported(id(TABLE), SLOT);
        }
        Err(Error::NOT_SUPPORTED)
    };
    enter(report, || ())
}

/// Slots of the longest table.
const MOST_SLOTS: usize = 95;

/// The functions of a table without any supported slot. Each has its own, which knows its table and slot.
const fn unsupported_slots<const TABLE: u128>() -> [*const c_void; MOST_SLOTS] {
    macro_rules! list {
        ($($slot:literal)*) => { [$(unsupported::<TABLE, $slot> as *const c_void),*] };
    }
    list!(
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23
        24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47
        48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71
        72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94
    )
}

/// Runs the body of a slot with the hooks, unless they are missing or the driver must not be used.
fn with_hooks(body: impl FnOnce(&'static dyn Hooks) -> Result) -> u32 {
    let run = || {
        let hooks = HOOKS.get().copied().ok_or(Error::NOT_INITIALIZED)?;
        hooks.ready()?;
        body(hooks)
    };
    // The panic has printed its message, and this module knows no more.
    enter(run, || ())
}

/// Runs the body of a slot of [`MONITOR`].
fn with_monitor(body: impl FnOnce(&dyn Monitor) -> Result) -> u32 {
    with_hooks(|hooks| body(hooks.monitor().ok_or(Error::NOT_SUPPORTED)?))
}

extern "C" fn monitor_devices(devices: Out<u32>) -> u32 {
    with_monitor(|monitor| devices.set(monitor.devices()?))
}

extern "C" fn monitor_device(index: u32, device: Out<MonitoredDevice>) -> u32 {
    with_monitor(|monitor| device.set(monitor.device(index)?))
}

extern "C" fn monitor_memory(index: u32, total: Out<u64>, used: Out<u64>) -> u32 {
    with_monitor(|monitor| {
        let (all, taken) = monitor.memory(index)?;
        total.set(all)?;
        used.set(taken)
    })
}

/// `count` contains the room in `processes`, then the number of processes.
extern "C" fn monitor_processes(index: u32, count: Out<u32>, processes: Out<MonitoredProcess>) -> u32 {
    /// Maximum number of processes of one system on the device.
    const MOST: usize = 1024;
    with_monitor(|monitor| {
        let room = (count.get()? as usize).min(MOST);
        let mut list = vec![MonitoredProcess::default(); if processes.is_given() { room } else { 0 }];
        let found = monitor.processes(index, &mut list)?;
        for (at, process) in list.iter().take(found as usize).enumerate() {
            processes.set_at(at, *process)?;
        }
        count.set(found)
    })
}

extern "C" fn monitor_attribute(index: u32, attribute: u32, value: Out<i32>) -> u32 {
    with_monitor(|monitor| value.set(monitor.attribute(index, attribute)?))
}

extern "C" fn monitor_version(version: Out<u32>) -> u32 {
    with_hooks(|hooks| version.set(hooks.driver_version()))
}

/// Replaces a null handle by the current context.
fn resolve(hooks: &dyn Hooks, context: usize) -> Result<usize> {
    match if context == 0 { hooks.current_context() } else { context } {
        0 => Err(Error::INVALID_CONTEXT),
        context => Ok(context),
    }
}

extern "C" fn primary_context(context: Out<usize>, device: i32) -> u32 {
    with_hooks(|hooks| context.set(hooks.primary_context(device)?))
}

/// A runtime before 12.0 loads the image of its program here. Its other arguments were zero whenever they were observed.
extern "C" fn load_module(
    module: Out<usize>,
    image: pointers::In<u8, Error>,
    third: usize,
    fourth: usize,
    fifth: u32,
) -> u32 {
    with_hooks(|hooks| {
        if (third, fourth, fifth) != (0, 0, 0) {
            return Err(Error::NOT_SUPPORTED);
        }
        let module = module.required()?;
        module.set(hooks.load_module(image.required()?.with_errors())?)
    })
}

/// A shared runtime of 13.2 and later reports its start. This does nothing, but an error would stop the runtime.
extern "C" fn runtime_started() -> u32 {
    with_hooks(|_| Ok(()))
}

/// Memory that stays all zero unless the program writes to it.
struct Zeroes<const WORDS: usize>(UnsafeCell<[usize; WORDS]>);

// SAFETY: this library returns the address and never accesses the contents.
unsafe impl<const WORDS: usize> Sync for Zeroes<WORDS> {}

/// Returns the address of a buffer and its length in words.
fn hand_out<const WORDS: usize>(
    buffer: &'static Zeroes<WORDS>,
    address: Out<*mut c_void>,
    length: Out<usize>,
) -> u32 {
    with_hooks(|_| {
        address.set(buffer.0.get().cast())?;
        length.set(WORDS)
    })
}

extern "C" fn callback_buffer(address: Out<*mut c_void>, length: Out<usize>) -> u32 {
    static BUFFER: Zeroes<1024> = Zeroes(UnsafeCell::new([0; 1024]));
    hand_out(&BUFFER, address, length)
}

extern "C" fn small_callback_buffer(address: Out<*mut c_void>, length: Out<usize>) -> u32 {
    static BUFFER: Zeroes<14> = Zeroes(UnsafeCell::new([0; 14]));
    hand_out(&BUFFER, address, length)
}

extern "C" fn current_context(context: Out<usize>) -> u32 {
    with_hooks(|hooks| context.set(hooks.current_context()))
}

/// Called for a function, behind the pointer that the caller of [`module_functions`] passes.
type FunctionVisitor = unsafe extern "C" fn(data: *mut c_void, function: usize);

/// Passes each function of a module to `visitor`, which must match [`FunctionVisitor`], with `data`. Returns their number, as cuFFT
/// expects: 0 if there are none, or none can be found.
extern "C" fn module_functions(
    _context: usize,
    module: usize,
    visitor: Option<FunctionVisitor>,
    data: *mut c_void,
) -> u32 {
    let mut functions = Vec::new();
    let listed = with_hooks(|hooks| {
        functions = hooks.functions(module)?;
        Ok(())
    });
    let Some(visitor) = visitor.filter(|_| listed == 0) else { return 0 };
    for function in &functions {
        // SAFETY: the caller passes a function of this type, to be called with its pointer and the functions of the module.
        unsafe { visitor(data, *function) };
    }
    u32::try_from(functions.len()).unwrap_or(0)
}

/// Called with the context, the key and the value when the context ends.
type Destructor = unsafe extern "C" fn(context: usize, key: *mut c_void, value: *mut c_void);

/// The destructor must match [`Destructor`]; it is stored and called later.
extern "C" fn storage_put(
    context: usize,
    key: *mut c_void,
    value: *mut c_void,
    destructor: Option<Destructor>,
) -> u32 {
    with_hooks(|hooks| {
        STORAGE.put(resolve(hooks, context)?, key, value, destructor);
        Ok(())
    })
}

extern "C" fn storage_delete(context: usize, key: *mut c_void) -> u32 {
    with_hooks(|hooks| match STORAGE.delete(resolve(hooks, context)?, key) {
        true => Ok(()),
        false => Err(Error::INVALID_HANDLE),
    })
}

extern "C" fn storage_get(value: Out<*mut c_void>, context: usize, key: *mut c_void) -> u32 {
    with_hooks(|hooks| value.set(STORAGE.get(resolve(hooks, context)?, key).ok_or(Error::INVALID_HANDLE)?))
}

/// Slot of the handshake in its table.
#[cfg(feature = "cudart-handshake")]
const HANDSHAKE_SLOT: usize = 1;

#[cfg(feature = "cudart-handshake")]
extern "C" fn handshake(version: u32, unix_seconds: u64, words: Out<[u64; 2]>) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "the handshake covers the low half of the thread id")]
    fn low_half(thread: libc::pthread_t) -> u32 {
        thread as u32
    }
    with_hooks(|hooks| {
        words.set(crate::handshake::answer(&crate::handshake::Question {
            driver_version: hooks.driver_version(),
            version,
            process: std::process::id(),
            // SAFETY: the function has no conditions.
            thread: low_half(unsafe { libc::pthread_self() }),
            interface_table: CUDART_INTERFACE_TABLE.address().addr() as u64,
            handshake_table: HANDSHAKE_TABLE.address().addr() as u64,
            entry: HANDSHAKE_TABLE.0[HANDSHAKE_SLOT].addr() as u64,
            unix_seconds,
            devices: hooks.devices(),
        }))
    })
}

/// Reports that a context may be used: sets the second argument to 0 and leaves the third as it is.
extern "C" fn check_context(_context: usize, state: Out<u32>, _detail: Out<*mut c_void>) -> u32 {
    with_hooks(|_| state.set(0))
}

/// Reports that this driver may be used.
extern "C" fn check_driver() -> u32 {
    with_hooks(|_| Ok(()))
}

extern "C" fn context_id(context: usize, id: Out<u64>) -> u32 {
    with_hooks(|hooks| id.set(hooks.context_id(resolve(hooks, context)?)?))
}

/// Returns the id of a stream that [`stream_object`] returned. cuBLAS keeps a workspace for each id.
extern "C" fn stream_id(context: usize, object: u64, id: Out<u64>) -> u32 {
    with_hooks(|hooks| id.set(stream_in(hooks, context, object)?))
}

/// Returns the object of a stream. Its handle serves, because callers only pass it to [`stream_id`]. With `per_thread`, stream 0 is
/// the calling thread's.
extern "C" fn stream_object(context: usize, stream: u64, object: Out<u64>, per_thread: u32) -> u32 {
    with_hooks(|hooks| {
        let handle = match (stream, per_thread) {
            (0, 0) => LEGACY_STREAM,
            (0, _) => PER_THREAD_STREAM,
            (stream, _) => stream,
        };
        stream_in(hooks, context, handle)?;
        object.set(handle)
    })
}

/// Returns the id of a stream in a context, which must be current if the stream is one of its default streams.
fn stream_in(hooks: &dyn Hooks, context: usize, stream: u64) -> Result<u64> {
    if stream <= PER_THREAD_STREAM && resolve(hooks, context)? != hooks.current_context() {
        return Err(Error::NOT_SUPPORTED);
    }
    Ok(hooks.stream_id(stream)?)
}
