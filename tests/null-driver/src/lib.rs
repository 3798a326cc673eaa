//! A CUDA driver that does nothing, quickly: the benchmarks' floor, and a driver for the worker's tests. In one file: its entry points are
//! one table.
//!
//! It has the functions that worker and arbiter call. Memory is real (pages of a memory file, never cleared). Copies and fills are
//! executed at once, so round trips can be verified; kernels compute nothing; events are complete at once. Functions exist under
//! any name, with a convention for tests:
//!
//! - a name that ends in `_pN` has N parameters of 8 bytes, one in `_bN` has one of N bytes, any other has none;
//! - `hold_p1` holds its stream back until the 32-bit word that its parameter points to is not 0;
//! - `unmarked_p1` does so, too, and there is no room for the event that is recorded next;
//! - `last_p1` lasts for as many nanoseconds as its parameter says;
//! - `stamp_p1` stores the time of its launch, in nanoseconds of the monotonic clock, where its parameter points to;
//! - `fault` makes its stream fail with `CUDA_ERROR_ILLEGAL_ADDRESS`;
//! - the launch of `refuse_N` is answered with the code N;
//! - a name that begins with `deep` has 1 KiB of local memory for each thread;
//! - a name that begins with `slow` takes a while to be found;
//! - a name that begins with `missing` does not exist.
//!
//! Images have no effect either, apart from special texts: the linker makes an ELF file of any text; for a text with
//! `/* takes N */` the file has N bytes without contents; for a text with `unlinkable` it fails. A text with `unloadable` is
//! refused when it is loaded unlinked. Both failures have a log if there is room for one.
//!
//! Texture and surface references exist under any name that does not begin with `missing`, and have no effect.
//!
//! Variables exist under any name, too: `stack` is at a word of the host, `beyond` at the last byte of all addresses.
//! A stream of priority -4 fails for lack of memory. The first destruction of a green context with 13 multiprocessors fails.
//!
//! A wait for a value of 4 bytes ends when the value is not 0, whatever the comparison.
//!
//! A host function runs on a thread of its own, after the earlier work of its stream.
//!
//! It keeps count of lifetimes and ends the process where the interface forbids a call: in a host function, or on a context, or on a
//! stream, event, module or function of a context, that was destroyed before the call or while it ran. A copy to or from a variable of a
//! context that was destroyed faults.

#![expect(unsafe_code, reason = "a C library: exported functions that write through their callers' pointers")]

mod arrays;
mod faults;
mod graphs;
mod life;
mod memory;
mod tensor_maps;

use core::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use std::sync::{Condvar, LazyLock, Mutex, PoisonError};

use life::{Life, VARIABLE_BYTES, current, make_current};
use memory::{GRANULARITY, memory, memory_bytes};
use sluice_cuda_abi::{
    resources::{DevResource, SmFields, kind},
    sys::CUresult,
};

type Handle = u64;
type Status = c_uint;

const SUCCESS: Status = CUresult::CUDA_SUCCESS as Status;
const INVALID_VALUE: Status = CUresult::CUDA_ERROR_INVALID_VALUE as Status;
const OUT_OF_MEMORY: Status = CUresult::CUDA_ERROR_OUT_OF_MEMORY as Status;
const INVALID_DEVICE: Status = CUresult::CUDA_ERROR_INVALID_DEVICE as Status;
const INVALID_RESOURCE_TYPE: Status = CUresult::CUDA_ERROR_INVALID_RESOURCE_TYPE as Status;
const INVALID_CONTEXT: Status = CUresult::CUDA_ERROR_INVALID_CONTEXT as Status;
const UNSUPPORTED_LIMIT: Status = CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT as Status;
const INVALID_PTX: Status = CUresult::CUDA_ERROR_INVALID_PTX as Status;
const NOT_FOUND: Status = CUresult::CUDA_ERROR_NOT_FOUND as Status;
const NOT_READY: Status = CUresult::CUDA_ERROR_NOT_READY as Status;
const ILLEGAL_ADDRESS: Status = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as Status;

/// Value of [`Held`] after a fault; no address of a word.
const FAULT: u64 = 1;

/// Value of a word for which a stream waits, if the work before it has failed.
const FAILED: u32 = u32::MAX;

/// Bit of a value of [`Held`] whose other bits are a time of [`now`].
const UNTIL: u64 = 1 << 63;

/// A stream or event whose end may be held back: 0, the address of a word that must not be 0, [`FAULT`], or a time after [`UNTIL`].
struct Held(AtomicU64, Life);

impl Held {
    fn state(&self) -> Status {
        match self.0.load(Ordering::Acquire) {
            0 => SUCCESS,
            FAULT => ILLEGAL_ADDRESS,
            time if time & UNTIL != 0 => {
                if now() < time & !UNTIL {
                    NOT_READY
                } else {
                    SUCCESS
                }
            }
            word => {
                // SAFETY: a test passed the address of a live, aligned word in memory that it shares with us.
                let word =
                    unsafe { AtomicU32::from_ptr(core::ptr::with_exposed_provenance_mut(address(word))) };
                match word.load(Ordering::Acquire) {
                    0 => NOT_READY,
                    FAILED => ILLEGAL_ADDRESS,
                    _ => SUCCESS,
                }
            }
        }
    }

    fn copy(&self, from: &Held) {
        self.0.store(from.0.load(Ordering::Acquire), Ordering::Release);
    }

    /// Records the end of a stream's present work: the time of this call if there is none.
    fn record(&self, stream: &Held) {
        let value = match stream.0.load(Ordering::Acquire) {
            value if value == 0 || value & UNTIL != 0 => (value & !UNTIL).max(now()) | UNTIL,
            value => value,
        };
        self.0.store(value, Ordering::Release);
    }

    /// The time of the end, in nanoseconds; `None` if it is not known before.
    fn time(&self) -> Option<u64> {
        let value = self.0.load(Ordering::Acquire);
        (value & UNTIL != 0).then_some(value & !UNTIL)
    }
}

/// Milliseconds between two ends that have come.
fn span(start: &Held, end: &Held) -> f32 {
    match (start.time(), end.time()) {
        #[expect(clippy::cast_precision_loss, reason = "as in the interface")]
        (Some(start), Some(end)) => (i128::from(end) - i128::from(start)) as f32 / 1e6,
        _ => 0.001,
    }
}

/// A function that a stream calls.
type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Threads of host functions wait here for their streams.
static TURN: Mutex<()> = Mutex::new(());
static RETURNED: Condvar = Condvar::new();

thread_local! {
    /// True on the thread of a host function, where no call of the interface is allowed.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

static LEGACY: Held = Held(AtomicU64::new(0), Life::without_context());
static NEXT: AtomicU64 = AtomicU64::new(1);
/// True if there is no room for the event that is recorded next.
static FULL: AtomicBool = AtomicBool::new(false);

struct Function {
    parameters: usize,
    /// Bytes of each parameter.
    each: usize,
    /// Bytes of local memory of each thread.
    local: c_int,
    kind: Kind,
    /// Its module or library.
    owner: &'static Life,
}

impl Function {
    /// Bytes of all parameters.
    fn bytes(&self) -> usize {
        self.parameters * self.each
    }
}

enum Kind {
    Nothing,
    Hold,
    Unmarked,
    Last,
    Stamp,
    Fault,
    Refuse(Status),
}

/// Number of devices: `SLUICE_NULL_DEVICES`, or one. All have the same memory.
fn device_count() -> c_int {
    static COUNT: LazyLock<c_int> = LazyLock::new(|| {
        let text = std::env::var("SLUICE_NULL_DEVICES").ok();
        text.and_then(|text| text.parse().ok()).unwrap_or(1)
    });
    *COUNT
}

/// Nanoseconds of the monotonic clock, which all processes share.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local value.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

fn next() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn address(value: u64) -> usize {
    usize::try_from(value).unwrap_or(0)
}

fn pointer<T>(value: u64) -> *mut T {
    core::ptr::with_exposed_provenance_mut(address(value))
}

fn give<T>(value: T) -> Handle {
    Box::into_raw(Box::new(value)).expose_provenance() as u64
}

/// Writes a result if the caller passed a pointer for it.
fn put<T>(into: *mut T, value: T) -> Status {
    if into.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: a pointer that is valid for a `T` by the driver's interface.
    unsafe { into.write(value) };
    SUCCESS
}

fn held(stream: Handle) -> &'static Held {
    if stream <= 2 {
        return &LEGACY;
    }
    // SAFETY: a handle that `give` made of a `Held`; none is ever freed.
    unsafe { &*pointer::<Held>(stream) }
}

/// The life of a module or library.
fn module(handle: Handle) -> &'static Life {
    // SAFETY: a handle that `give` made of a `Life`; none is ever freed.
    unsafe { &*pointer::<Life>(handle) }
}

fn function(handle: Handle) -> &'static Function {
    // SAFETY: a handle that `find` made; functions are never freed.
    unsafe { &*pointer::<Function>(handle) }
}

macro_rules! export {
    ($($name:ident($($p:ident: $ty:ty),*) $body:block)+) => {$(
        // SAFETY: the names are those of the driver's interface, which this library replaces.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($p: $ty),*) -> Status {
            if $crate::IN_HOST_FUNCTION.get() {
                $crate::life::forbidden(stringify!($name));
            }
            $body
        }
    )+};
}
use export;

// Start-up and the device.
export! {
    cuInit(_flags: c_uint) { SUCCESS }
    cuDriverGetVersion(version: *mut c_int) { put(version, 13_050) }
    cuDeviceGetCount(count: *mut c_int) { put(count, device_count()) }
    cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        if (0..device_count()).contains(&ordinal) { put(device, ordinal) } else { INVALID_DEVICE }
    }
    cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) {
        let text = c"Null GPU";
        if usize::try_from(length).unwrap_or(0) < text.count_bytes() + 1 {
            return INVALID_VALUE;
        }
        // SAFETY: the caller's buffer has the stated length.
        unsafe { name.copy_from_nonoverlapping(text.as_ptr(), text.count_bytes() + 1) };
        SUCCESS
    }
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) { put(uuid, *b"null-driver-gpu0") }
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { put(bytes, memory_bytes()) }
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, _device: c_int) {
        put(value, match attribute {
            1..=3 => 1024,                 // threads per block, block x, block y
            4 => 64,                           // block z
            5 => i32::MAX,                     // grid x
            6 | 7 => 65_535,                   // grid y, z
            8 => 48 << 10,                     // shared memory per block
            9 => 64 << 10,                     // constant memory
            10 => 32,                          // warp
            11 => i32::MAX,                    // pitch
            12 | 82 => 64 << 10,               // registers per block, per multiprocessor
            13 => 1_410_000,                   // clock
            14 => 512,                         // texture alignment
            16 => 108,                         // multiprocessors
            15 | 31 | 40 | 41 | 78 | 79 | 80 | 91 | 95 | 102 | 103 => 1,
            39 => 2048,                        // threads per multiprocessor
            75 => 8,                           // compute capability
            76 => 0,
            81 => 164 << 10,                   // shared memory per multiprocessor
            97 => 163 << 10,                   // opt-in shared memory
            106 => 32,                         // blocks per multiprocessor
            111 => 1 << 10,                    // reserved shared memory
            _ => 0,
        })
    }
}

// Peers: every device reaches every other.
export! {
    cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) { put(can, c_int::from(device != peer)) }
    cuDeviceGetP2PAttribute(value: *mut c_int, _attribute: c_uint, _device: c_int, _peer: c_int) { put(value, 0) }
    cuCtxEnablePeerAccess(_peer: Handle, _flags: c_uint) {
        let _call = current().call("cuCtxEnablePeerAccess");
        SUCCESS
    }
    cuCtxDisablePeerAccess(_peer: Handle) {
        let _call = current().call("cuCtxDisablePeerAccess");
        SUCCESS
    }
}

// Contexts.
export! {
    cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) { put(context, life::retain_primary()) }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { if life::release_primary() { SUCCESS } else { INVALID_CONTEXT } }
    cuDevicePrimaryCtxSetFlags_v2(_device: c_int, _flags: c_uint) { SUCCESS }
    cuCtxCreate_v2(context: *mut Handle, _flags: c_uint, _device: c_int) {
        let made = life::new_context();
        make_current(made);
        put(context, made)
    }
    cuCtxDestroy_v2(context: Handle) {
        life::end_context(context);
        SUCCESS
    }
    cuCtxSetCurrent(context: Handle) {
        make_current(context);
        let _call = current().call("cuCtxSetCurrent");
        SUCCESS
    }
    cuCtxGetLimit(value: *mut usize, limit: c_uint) {
        let _call = current().call("cuCtxGetLimit");
        match limit {
            0 => put(value, 1024),             // stack
            1 => put(value, 1 << 20),          // printf buffer
            2 => put(value, 8 << 20),          // heap
            _ => UNSUPPORTED_LIMIT,
        }
    }
    cuCtxSetLimit(limit: c_uint, _value: usize) {
        let _call = current().call("cuCtxSetLimit");
        if limit <= 2 { SUCCESS } else { UNSUPPORTED_LIMIT }
    }
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        let _call = current().call("cuCtxGetStreamPriorityRange");
        put(least, 0);
        put(greatest, -5)
    }
}

fn anonymous(at: *mut c_void, bytes: usize, protection: c_int, flags: c_int) -> *mut c_void {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: without MAP_FIXED nothing is replaced; with it the range is one that `cuMemAddressReserve` gave out.
    unsafe { libc::mmap(at, bytes, protection, flags, -1, 0) }
}

const ACCESSIBLE: c_int = libc::PROT_READ | libc::PROT_WRITE;

// Memory. A chunk is a part of the memory file of the process that made it. An export is that file, opened anew, with the
// part in its file position; so no descriptor is kept per chunk.
export! {
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        if faults::plays("info-fails") {
            return ILLEGAL_ADDRESS;
        }
        let used = memory().used;
        if used > 0 && faults::plays("info-fails-once") && !faults::FAILED.swap(true, Ordering::Relaxed) {
            return ILLEGAL_ADDRESS;
        }
        put(free, memory_bytes().saturating_sub(used));
        put(total, memory_bytes())
    }
    cuMemGetAllocationGranularity(bytes: *mut usize, _properties: *const c_void, _option: c_uint) {
        put(bytes, GRANULARITY)
    }
    cuMemCreate(handle: *mut Handle, bytes: usize, _properties: *const c_void, _flags: u64) {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return INVALID_VALUE;
        }
        match memory().create(bytes) {
            Some(made) => put(handle, made),
            None => OUT_OF_MEMORY,
        }
    }
    cuMemRelease(handle: Handle) { if memory().drop_hold(handle) { SUCCESS } else { INVALID_VALUE } }
    cuMemExportToShareableHandle(descriptor: *mut c_int, handle: Handle, _kind: c_uint, _flags: u64) {
        match memory().export(handle) {
            Some(exported) => put(descriptor, exported),
            None => INVALID_VALUE,
        }
    }
    cuMemImportFromShareableHandle(handle: *mut Handle, descriptor: usize, _kind: c_uint) {
        match c_int::try_from(descriptor).ok().and_then(|descriptor| memory().import(descriptor)) {
            Some(imported) => put(handle, imported),
            None => INVALID_VALUE,
        }
    }
    cuMemAddressReserve(at: *mut u64, bytes: usize, _alignment: usize, hint: u64, _flags: u64) {
        let got = anonymous(pointer(hint), bytes, libc::PROT_NONE, 0);
        if got == libc::MAP_FAILED { OUT_OF_MEMORY } else { put(at, got.expose_provenance() as u64) }
    }
    cuMemAddressFree(at: u64, bytes: usize) {
        // SAFETY: a range that `cuMemAddressReserve` gave out.
        if unsafe { libc::munmap(pointer(at), bytes) } == 0 { SUCCESS } else { INVALID_VALUE }
    }
    cuMemMap(at: u64, bytes: usize, _offset: usize, handle: Handle, _flags: u64) {
        if memory().map(at, bytes, handle) { SUCCESS } else { INVALID_VALUE }
    }
    cuMemUnmap(at: u64, bytes: usize) {
        let got = anonymous(pointer(at), bytes, libc::PROT_NONE, libc::MAP_FIXED);
        if got == libc::MAP_FAILED {
            return INVALID_VALUE;
        }
        memory().unmap(at, bytes);
        SUCCESS
    }
    cuMemSetAccess(at: u64, bytes: usize, _description: *const c_void, _count: usize) {
        // SAFETY: a range that was mapped by `cuMemMap`.
        if unsafe { libc::mprotect(pointer(at), bytes, ACCESSIBLE) } == 0 { SUCCESS } else { INVALID_VALUE }
    }
    cuMemHostRegister_v2(_pointer: *mut c_void, _bytes: usize, _flags: c_uint) {
        let _call = current().call("cuMemHostRegister");
        SUCCESS
    }
    cuMemHostUnregister(_pointer: *mut c_void) {
        let _call = current().call("cuMemHostUnregister");
        SUCCESS
    }
    cuPointerGetAttributes(count: c_uint, attributes: *const c_uint, data: *mut *mut c_void, at: u64) {
        // SAFETY: the caller's lists have the stated length.
        let attributes = unsafe { core::slice::from_raw_parts(attributes, count as usize) };
        // SAFETY: as above.
        let places = unsafe { core::slice::from_raw_parts(data, count as usize) };
        for (attribute, place) in attributes.iter().zip(places) {
            let (first, bytes) = (current().variables(), VARIABLE_BYTES);
            // The managed variable follows the other one.
            let managed = at.wrapping_sub(first + bytes as u64) < bytes as u64;
            let known = managed || at.wrapping_sub(first) < bytes as u64;
            let start = if managed { first + bytes as u64 } else { first };
            match attribute {
                // SAFETY: memory type, ordinal and such are 32-bit words, addresses and sizes are 64-bit words, by the interface.
                2 => unsafe { place.cast::<c_uint>().write(if known { 2 } else { 0 }) },
                // SAFETY: as above.
                8 => unsafe { place.cast::<c_uint>().write(managed.into()) },
                // SAFETY: as above.
                1 => unsafe { place.cast::<u64>().write(if known && !managed { life::current_handle() } else { 0 }) },
                // SAFETY: as above.
                11 => unsafe { place.cast::<u64>().write(if known { start } else { 0 }) },
                // SAFETY: as above.
                12 => unsafe { place.cast::<usize>().write(if known { bytes } else { 0 }) },
                _ => return INVALID_VALUE,
            }
        }
        SUCCESS
    }
}

fn copy(to: u64, from: u64, bytes: usize) -> Status {
    // SAFETY: the caller vouches for both ranges, as it would to the driver; they may overlap.
    unsafe { core::ptr::copy(pointer::<u8>(from).cast_const(), pointer::<u8>(to), bytes) };
    SUCCESS
}

fn fill<T: Copy>(at: u64, pitch: usize, value: T, width: usize, height: usize) -> Status {
    for row in 0..height {
        let start = pointer::<T>(at + (row * pitch) as u64);
        for column in 0..width {
            // SAFETY: the caller vouches for the rows.
            let element = unsafe { start.add(column) };
            // SAFETY: as above.
            unsafe { element.write_unaligned(value) };
        }
    }
    SUCCESS
}

/// One side of a `CUDA_MEMCPY2D`.
#[repr(C)]
struct Side {
    x: usize,
    y: usize,
    memory: c_uint,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

impl Side {
    fn row(&self, row: usize) -> u64 {
        let base = if self.memory == 1 { self.host } else { self.device };
        base + (self.x + (self.y + row) * self.pitch) as u64
    }
}

#[repr(C)]
struct Copy2D {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

/// One side of a `CUDA_MEMCPY3D`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Side3D {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    memory: c_uint,
    host: u64,
    device: u64,
    array: u64,
    reserved: u64,
    pitch: usize,
    height: usize,
}

impl Side3D {
    fn row(&self, slice: usize, row: usize) -> u64 {
        if self.memory == 3 {
            return arrays::array(self.array).at(self.x, self.y + row, self.z + slice);
        }
        let base = if self.memory == 1 { self.host } else { self.device };
        base + (self.x + ((self.z + slice) * self.height + self.y + row) * self.pitch) as u64
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Copy3D {
    from: Side3D,
    to: Side3D,
    width: usize,
    height: usize,
    depth: usize,
}

impl Copy3D {
    fn run(&self) {
        for (slice, row) in (0..self.depth).flat_map(|slice| (0..self.height).map(move |row| (slice, row))) {
            copy(self.to.row(slice, row), self.from.row(slice, row), self.width);
        }
    }
}

// Copies and fills.
export! {
    cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        let _call = held(stream).1.call("a copy");
        copy(to, from, bytes)
    }
    cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        let _call = held(stream).1.call("a copy");
        copy(to, from, bytes)
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        let _call = held(stream).1.call("a copy");
        copy(to, from, bytes)
    }
    cuMemcpy2DAsync_v2(what: *const Copy2D, stream: Handle) {
        let _call = held(stream).1.call("cuMemcpy2DAsync");
        // SAFETY: the caller passes a `CUDA_MEMCPY2D`.
        let what = unsafe { &*what };
        if what.from.array != 0 || what.to.array != 0 {
            return INVALID_VALUE;
        }
        for row in 0..what.height {
            copy(what.to.row(row), what.from.row(row), what.width);
        }
        SUCCESS
    }
    cuMemcpy3DAsync_v2(what: *const Copy3D, stream: Handle) {
        let _call = held(stream).1.call("cuMemcpy3DAsync");
        // SAFETY: the caller passes a `CUDA_MEMCPY3D`.
        let copy = unsafe { &*what };
        if copy.to.memory == 3 && !arrays::array(copy.to.array).takes_copy() {
            return OUT_OF_MEMORY;
        }
        copy.run();
        SUCCESS
    }
    cuMemsetD8Async(at: u64, value: u8, count: usize, stream: Handle) {
        let _call = held(stream).1.call("a fill");
        fill(at, 0, value, count, 1)
    }
    cuMemsetD16Async(at: u64, value: u16, count: usize, stream: Handle) {
        let _call = held(stream).1.call("a fill");
        fill(at, 0, value, count, 1)
    }
    cuMemsetD32Async(at: u64, value: c_uint, count: usize, stream: Handle) {
        let _call = held(stream).1.call("a fill");
        fill(at, 0, value, count, 1)
    }
    cuStreamWriteValue32_v2(stream: Handle, at: u64, value: c_uint, _flags: c_uint) {
        let _call = held(stream).1.call("a written value");
        fill(at, 0, value, 1, 1)
    }
    cuStreamWriteValue64_v2(stream: Handle, at: u64, value: u64, _flags: c_uint) {
        let _call = held(stream).1.call("a written value");
        fill(at, 0, value, 1, 1)
    }
    cuStreamWaitValue32_v2(stream: Handle, at: u64, _value: c_uint, _comparison: c_uint) {
        let stream = held(stream);
        let _call = stream.1.call("a wait for a value");
        stream.0.store(at, Ordering::Release);
        SUCCESS
    }
    cuStreamWaitValue64_v2(stream: Handle, at: u64, _value: u64, comparison: c_uint) {
        cuStreamWaitValue32_v2(stream, at, 0, comparison)
    }
    cuStreamBatchMemOp_v2(stream: Handle, _count: c_uint, _operations: *const c_void, _flags: c_uint) {
        let _call = held(stream).1.call("cuStreamBatchMemOp");
        SUCCESS
    }
    cuMemsetD2D8Async(at: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Handle) {
        let _call = held(stream).1.call("a fill");
        fill(at, pitch, value, width, height)
    }
    cuMemsetD2D16Async(at: u64, pitch: usize, value: u16, width: usize, height: usize, stream: Handle) {
        let _call = held(stream).1.call("a fill");
        fill(at, pitch, value, width, height)
    }
    cuMemsetD2D32Async(at: u64, pitch: usize, value: c_uint, width: usize, height: usize, stream: Handle) {
        let _call = held(stream).1.call("a fill");
        fill(at, pitch, value, width, height)
    }
}

fn find(into: *mut Handle, owner: &'static Life, name: *const c_char) -> Status {
    let _call = owner.call("the look-up of a function");
    let _current = current().call("the look-up of a function");
    if name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    if name.starts_with(b"missing") {
        return NOT_FOUND;
    }
    if name.starts_with(b"slow") {
        std::thread::sleep(SLOW);
    }
    let suffix = name.iter().rposition(|byte| *byte == b'_').and_then(|at| name.get(at + 1..));
    let number = |letter: &[u8]| -> Option<usize> {
        core::str::from_utf8(suffix?.strip_prefix(letter)?).ok()?.parse().ok()
    };
    let (parameters, each) = match (number(b"p"), number(b"b")) {
        (Some(number), _) => (number, 8),
        (None, Some(bytes)) => (1, bytes),
        (None, None) => (0, 8),
    };
    let kind = match name {
        b"hold_p1" => Kind::Hold,
        b"unmarked_p1" => Kind::Unmarked,
        b"last_p1" => Kind::Last,
        b"stamp_p1" => Kind::Stamp,
        b"fault" => Kind::Fault,
        _ => {
            let code =
                name.strip_prefix(b"refuse_").and_then(|code| core::str::from_utf8(code).ok()?.parse().ok());
            code.map_or(Kind::Nothing, Kind::Refuse)
        }
    };
    let local = if name.starts_with(b"deep") { 1024 } else { 0 };
    put(into, give(Function { parameters, each, local, kind, owner }))
}

/// Time to find a function whose name begins with `slow`.
const SLOW: core::time::Duration = core::time::Duration::from_millis(300);

fn variable(at: *mut u64, bytes: *mut usize, owner: &Life, name: *const c_char) -> Status {
    let _call = owner.call("the look-up of a variable");
    let _current = current().call("the look-up of a variable");
    if name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let found = match name {
        b"stack" => (&raw const name).expose_provenance() as u64,
        b"beyond" => u64::MAX,
        b"managed" => current().variables() + VARIABLE_BYTES as u64,
        _ => current().variables(),
    };
    if found == 0 {
        return OUT_OF_MEMORY;
    }
    put(at, found);
    put(bytes, VARIABLE_BYTES)
}

fn attribute(value: *mut c_int, attribute: c_uint, handle: Handle) -> Status {
    let _call = function(handle).owner.call("a query of a function's attribute");
    match attribute {
        0 => put(value, 1024),
        3 => put(value, function(handle).local),
        4 => put(value, 32),
        5 | 6 => put(value, 80),
        8 => put(value, 48 << 10),
        1..=15 => put(value, 0),
        _ => INVALID_VALUE,
    }
}

fn parameter(handle: Handle, index: usize, offset: *mut usize, bytes: *mut usize) -> Status {
    let function = function(handle);
    if index >= function.parameters {
        return INVALID_VALUE;
    }
    put(offset, index * function.each);
    put(bytes, function.each)
}

/// Launches a function with the parameters of a block.
fn launch(handle: Handle, stream: Handle, parameters: &[u8]) -> Status {
    let function = function(handle);
    let stream = held(stream);
    let _call = (function.owner.call("a launch"), stream.1.call("a launch"), current().call("a launch"));
    match function.kind {
        Kind::Refuse(code) => return code,
        Kind::Nothing => {}
        Kind::Fault => stream.0.store(FAULT, Ordering::Release),
        Kind::Hold | Kind::Unmarked => {
            let Some(word) = parameters.first_chunk() else { return INVALID_VALUE };
            stream.0.store(u64::from_ne_bytes(*word), Ordering::Release);
            FULL.store(matches!(function.kind, Kind::Unmarked), Ordering::Release);
        }
        Kind::Last => {
            let Some(nanoseconds) = parameters.first_chunk() else { return INVALID_VALUE };
            // Kernels of a stream follow each other.
            let begin = now().max(stream.0.load(Ordering::Acquire) & !UNTIL);
            stream.0.store(UNTIL | begin.saturating_add(u64::from_ne_bytes(*nanoseconds)), Ordering::Release);
        }
        Kind::Stamp => {
            let Some(at) = parameters.first_chunk() else { return INVALID_VALUE };
            // SAFETY: the benchmark passed the address of 8 bytes of device memory, which it copies to itself later.
            let word = unsafe { AtomicU64::from_ptr(pointer(u64::from_ne_bytes(*at))) };
            word.store(now(), Ordering::Release);
        }
    }
    SUCCESS
}

fn run(handle: Handle, stream: Handle, extra: *mut *mut c_void) -> Status {
    if extra.is_null() {
        return launch(handle, stream, &[]);
    }
    // SAFETY: `extra` begins with the marker of the buffer, then the buffer's address.
    let [_, buffer] = unsafe { *extra.cast::<[*mut c_void; 2]>() };
    // SAFETY: the buffer holds the function's parameters.
    let parameters = unsafe { core::slice::from_raw_parts(buffer.cast::<u8>(), function(handle).bytes()) };
    launch(handle, stream, parameters)
}

/// The text of an image, up to its NUL; empty for an ELF file or a fatbin.
fn text(image: *const c_void) -> &'static [u8] {
    // SAFETY: an image has bytes, and is a C string if it is neither an ELF file nor a fatbin.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
    if text.starts_with(b"\x7fELF") || text.starts_with(b"\x50\xed\x55\xba") { &[] } else { text }
}

fn contains(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|part| part == word)
}

/// N of `/* takes N */`, or 0.
fn stated_bytes(text: &[u8]) -> u64 {
    const WORD: &[u8] = b"/* takes ";
    let at = text.windows(WORD.len()).position(|part| part == WORD);
    let number = at.and_then(|at| text.get(at + WORD.len()..)?.split(|byte| *byte == b' ').next());
    number.and_then(|number| core::str::from_utf8(number).ok()?.parse().ok()).unwrap_or(0)
}

/// A link: its result, and its options, whose values are the caller's.
struct Link {
    image: Vec<u8>,
    ids: Vec<c_uint>,
    values: *mut *mut c_void,
}

fn linked(state: Handle) -> &'static mut Link {
    // SAFETY: a handle that `cuLinkCreate` made; the caller uses one state in one thread at a time.
    unsafe { &mut *pointer::<Link>(state) }
}

/// The ids of a call's options.
fn option_ids(count: c_uint, ids: *const c_uint) -> Vec<c_uint> {
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's list has the stated length.
    unsafe { core::slice::from_raw_parts(ids, count as usize) }.to_vec()
}

/// An ELF file with two sections, the names and one of `bytes` bytes without contents.
fn cubin(bytes: u64) -> Vec<u8> {
    const NAMES: &[u8] = b"\0.shstrtab\0.nv.global\0";
    let mut file = vec![0_u8; 64];
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    let mut field = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    field(16, &2_u16.to_le_bytes()); // executable
    field(18, &190_u16.to_le_bytes()); // CUDA
    field(20, &1_u32.to_le_bytes());
    field(40, &64_u64.to_le_bytes()); // section headers
    field(52, &[64, 0, 56, 0, 0, 0, 64, 0, 3, 0, 1, 0]); // sizes of headers, three sections, the first of which has the names
    let section = |name: u32, kind: u32, offset: u64, bytes: u64| {
        let mut section = [0_u8; 64];
        section[0..4].copy_from_slice(&name.to_le_bytes());
        section[4..8].copy_from_slice(&kind.to_le_bytes());
        section[24..32].copy_from_slice(&offset.to_le_bytes());
        section[32..40].copy_from_slice(&bytes.to_le_bytes());
        section
    };
    let names = 64 * 4;
    file.extend(section(0, 0, 0, 0));
    file.extend(section(1, 3, names, NAMES.len() as u64));
    file.extend(section(11, 8, names, bytes));
    file.extend(NAMES);
    file
}

/// Writes the time of a compilation, 1.5 ms, and the log of errors, if the options request them.
fn write_log(ids: &[c_uint], values: *mut *mut c_void, log: &[u8]) {
    const WALL_TIME: c_uint = 2;
    const ERROR_LOG: c_uint = 5;
    const ERROR_LOG_BYTES: c_uint = 6;
    if ids.is_empty() {
        return;
    }
    // SAFETY: the caller's list has the length of that of the ids.
    let values = unsafe { core::slice::from_raw_parts_mut(values, ids.len()) };
    let place = |wanted| ids.iter().position(|id| *id == wanted);
    if let Some(time) = place(WALL_TIME) {
        values[time] = core::ptr::without_provenance_mut(1.5_f32.to_bits() as usize);
    }
    let (Some(buffer), Some(bytes)) = (place(ERROR_LOG), place(ERROR_LOG_BYTES)) else { return };
    let used = values[bytes].addr().min(log.len());
    let buffer = values[buffer].cast::<u8>();
    // SAFETY: the buffer has at least so many bytes.
    unsafe { buffer.copy_from_nonoverlapping(log.as_ptr(), used) };
    values[bytes] = core::ptr::without_provenance_mut(used);
}

/// The start of a `CUlaunchConfig`.
#[repr(C)]
struct Config {
    sizes: [c_uint; 7],
    stream: Handle,
}

// Modules, functions and launches.
export! {
    cuModuleLoadDataEx(module: *mut Handle, image: *const c_void, options: c_uint, ids: *mut c_uint,
        values: *mut *mut c_void) {
        let _call = current().call("cuModuleLoadDataEx");
        if image.is_null() {
            return INVALID_VALUE;
        }
        if contains(text(image), b"unloadable") {
            write_log(&option_ids(options, ids), values, b"the result of the text\0");
            return INVALID_PTX;
        }
        put(module, give(Life::of_current()))
    }
    cuLinkCreate_v2(count: c_uint, ids: *mut c_uint, values: *mut *mut c_void, state: *mut Handle) {
        let _call = current().call("cuLinkCreate");
        let ids = option_ids(count, ids);
        // A fallback strategy, as the vendor's driver.
        if ids.contains(&10) {
            return INVALID_VALUE;
        }
        put(state, give(Link { image: Vec::new(), ids, values }))
    }
    cuLinkAddData_v2(state: Handle, _kind: c_uint, data: *mut c_void, _bytes: usize, _name: *const c_char,
        _count: c_uint, _options: *mut c_uint, _values: *mut *mut c_void) {
        let link = linked(state);
        if contains(text(data), b"unlinkable") {
            write_log(&link.ids, link.values, b"the input is unlinkable\0");
            return INVALID_PTX;
        }
        link.image = cubin(stated_bytes(text(data)));
        SUCCESS
    }
    cuLinkComplete(state: Handle, image: *mut *mut c_void, bytes: *mut usize) {
        let link = linked(state);
        write_log(&link.ids, link.values, b"\0");
        put(bytes, link.image.len());
        put(image, link.image.as_mut_ptr().cast())
    }
    cuLinkDestroy(state: Handle) {
        // SAFETY: a handle that `cuLinkCreate` made, which is not used again.
        drop(unsafe { Box::from_raw(pointer::<Link>(state)) });
        SUCCESS
    }
    cuModuleUnload(handle: Handle) {
        module(handle).end("cuModuleUnload");
        SUCCESS
    }
    cuModuleGetFunction(into: *mut Handle, handle: Handle, name: *const c_char) { find(into, module(handle), name) }
    cuModuleGetGlobal_v2(at: *mut u64, bytes: *mut usize, handle: Handle, name: *const c_char) {
        variable(at, bytes, module(handle), name)
    }
    cuModuleGetFunctionCount(count: *mut c_uint, handle: Handle) {
        let _call = module(handle).call("cuModuleGetFunctionCount");
        put(count, 0)
    }
    cuLibraryLoadData(library: *mut Handle, image: *const c_void, jit: *mut c_uint, jit_values: *mut *mut c_void,
        jit_count: c_uint, _options: *mut c_uint, _values: *mut *mut c_void, _count: c_uint) {
        if image.is_null() {
            return INVALID_VALUE;
        }
        if contains(text(image), b"unloadable") {
            write_log(&option_ids(jit_count, jit), jit_values, b"the result of the text\0");
            return INVALID_PTX;
        }
        put(library, give(Life::without_context()))
    }
    cuLibraryUnload(library: Handle) {
        module(library).end("cuLibraryUnload");
        SUCCESS
    }
    cuLibraryGetKernel(into: *mut Handle, library: Handle, name: *const c_char) { find(into, module(library), name) }
    cuLibraryGetGlobal(at: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char) {
        if text(name.cast()) == b"managed" {
            return NOT_FOUND;
        }
        variable(at, bytes, module(library), name)
    }
    cuLibraryGetManaged(at: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char) {
        variable(at, bytes, module(library), name)
    }
    cuLibraryGetModule(place: *mut Handle, library: Handle) {
        let _call = (module(library).call("cuLibraryGetModule"), current().call("cuLibraryGetModule"));
        put(place, give(Life::of_current()))
    }
    cuLibraryGetKernelCount(count: *mut c_uint, library: Handle) {
        let _call = module(library).call("cuLibraryGetKernelCount");
        put(count, 0)
    }
    cuFuncGetAttribute(value: *mut c_int, id: c_uint, handle: Handle) { attribute(value, id, handle) }
    cuKernelGetAttribute(value: *mut c_int, id: c_uint, handle: Handle, _device: c_int) { attribute(value, id, handle) }
    cuFuncSetAttribute(handle: Handle, _id: c_uint, _value: c_int) {
        let _call = function(handle).owner.call("cuFuncSetAttribute");
        SUCCESS
    }
    cuKernelSetAttribute(_id: c_uint, _value: c_int, kernel: Handle, _device: c_int) {
        let _call = function(kernel).owner.call("cuKernelSetAttribute");
        SUCCESS
    }
    cuFuncGetParamInfo(handle: Handle, index: usize, offset: *mut usize, bytes: *mut usize) {
        parameter(handle, index, offset, bytes)
    }
    cuKernelGetParamInfo(handle: Handle, index: usize, offset: *mut usize, bytes: *mut usize) {
        parameter(handle, index, offset, bytes)
    }
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks: *mut c_int, handle: Handle, _block: c_int,
        _shared: usize, _flags: c_uint) {
        let _call = function(handle).owner.call("a query of an occupancy");
        put(blocks, 2)
    }
    cuLaunchKernel(handle: Handle, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint,
        _shared: c_uint, stream: Handle, _parameters: *mut *mut c_void, extra: *mut *mut c_void) {
        run(handle, stream, extra)
    }
    cuLaunchKernelEx(config: *const Config, handle: Handle, _parameters: *mut *mut c_void, extra: *mut *mut c_void) {
        // SAFETY: the caller passes a `CUlaunchConfig`.
        let config = unsafe { &*config };
        if config.sizes.iter().take(6).any(|size| *size == 0) {
            return INVALID_VALUE;
        }
        run(handle, config.stream, extra)
    }
}

/// Multiprocessors of the device, and the least that a group has.
const MULTIPROCESSORS: u32 = 16;
const LEAST_GROUP: u32 = 4;
/// Multiprocessors of a green context whose first destruction fails.
const STAYS: u32 = 13;

fn multiprocessors(count: u32) -> DevResource {
    let fields = SmFields { count, minimum: LEAST_GROUP, alignment: LEAST_GROUP, ..SmFields::default() };
    DevResource::new(kind::SM, &[], &fields.words())
}

/// A green context, or the descriptor of one.
struct Green {
    multiprocessors: u32,
    life: Life,
    /// The life of the context whose queues it has, if it has those of one.
    queues: Option<&'static Life>,
    /// True if its next destruction fails.
    stays: AtomicBool,
}

impl Green {
    fn new(multiprocessors: u32, life: Life, queues: Option<&'static Life>) -> Green {
        Green { multiprocessors, life, queues, stays: AtomicBool::new(multiprocessors == STAYS) }
    }
}

fn green(handle: Handle) -> &'static Green {
    // SAFETY: a handle that a call of this block made; none is ever freed.
    unsafe { &*pointer::<Green>(handle) }
}

/// The multiprocessors of an array of resources.
fn count_of(resources: *const DevResource, count: u32) -> u32 {
    let read = |index| {
        // SAFETY: the caller passes as many resources.
        unsafe { resources.wrapping_add(index).read() }.multiprocessors().count
    };
    (0..count as usize).map(read).sum()
}

/// The queues of a context.
#[expect(clippy::cast_possible_truncation, reason = "halves of an address")]
fn queues(of: &'static Life) -> DevResource {
    let address = core::ptr::from_ref(of).expose_provenance() as u64;
    DevResource::new(kind::WORKQUEUE, &[address as u32, (address >> 32) as u32], &[])
}

/// The life of the context whose queues are in an array of resources.
fn queues_in(resources: *const DevResource, count: u32) -> Option<&'static Life> {
    // SAFETY: the caller passes as many resources.
    let mut all = (0..count as usize).map(|index| unsafe { resources.wrapping_add(index).read() });
    let [low, high, ..] = all.find(|resource| resource.kind == kind::WORKQUEUE)?.private;
    // SAFETY: a life of which `queues` made the resource; none is ever freed.
    Some(unsafe { &*pointer::<Life>(u64::from(low) | u64::from(high) << 32) })
}

// Green contexts. Groups have any multiprocessors, and launches use all. They are never freed, as streams and events.
export! {
    cuDeviceGetDevResource(_device: c_int, resource: *mut DevResource, kind: c_uint) {
        match kind {
            kind::SM => put(resource, multiprocessors(MULTIPROCESSORS)),
            kind::WORKQUEUE_CONFIG => put(resource, DevResource::new(kind, &[], &[0, 8, 0])),
            _ => INVALID_RESOURCE_TYPE,
        }
    }
    cuCtxGetDevResource(of: Handle, resource: *mut DevResource, kind: c_uint) {
        let life = life::context(of);
        let _call = life.call("cuCtxGetDevResource");
        if kind == kind::WORKQUEUE { put(resource, queues(life)) } else { INVALID_RESOURCE_TYPE }
    }
    cuGreenCtxGetDevResource(of: Handle, resource: *mut DevResource, kind: c_uint) {
        let green = green(of);
        let _call = green.life.call("cuGreenCtxGetDevResource");
        match kind {
            kind::SM => put(resource, multiprocessors(green.multiprocessors)),
            kind::WORKQUEUE => put(resource, queues(&green.life)),
            _ => INVALID_RESOURCE_TYPE,
        }
    }
    cuDevSmResourceSplitByCount(result: *mut DevResource, groups: *mut c_uint, input: *const DevResource,
        remainder: *mut DevResource, _flags: c_uint, minimum: c_uint) {
        let size = minimum.max(LEAST_GROUP);
        let all = count_of(input, 1);
        // SAFETY: the caller's number.
        let most = unsafe { groups.read() };
        let made = most.min(all / size);
        if made == 0 {
            return INVALID_VALUE;
        }
        for index in 0..made as usize {
            // SAFETY: the caller has room for as many results as it asks for.
            unsafe { result.wrapping_add(index).write(multiprocessors(size)) };
        }
        put(remainder, multiprocessors(all - made * size));
        put(groups, made)
    }
    cuDevResourceGenerateDesc(descriptor: *mut Handle, resources: *const DevResource, count: c_uint) {
        let (multiprocessors, queues) = (count_of(resources, count), queues_in(resources, count));
        put(descriptor, give(Green::new(multiprocessors, Life::without_context(), queues)))
    }
    cuGreenCtxCreate(made: *mut Handle, descriptor: Handle, _device: c_int, _flags: c_uint) {
        let &Green { multiprocessors, queues, .. } = green(descriptor);
        let _call = queues.map(|queues| queues.call("cuGreenCtxCreate with its queues"));
        life::retain_primary();
        put(made, give(Green::new(multiprocessors, Life::of_current(), queues)))
    }
    cuGreenCtxDestroy(of: Handle) {
        if green(of).stays.swap(false, Ordering::AcqRel) {
            return INVALID_VALUE;
        }
        green(of).life.end("cuGreenCtxDestroy");
        if life::release_primary() { SUCCESS } else { INVALID_CONTEXT }
    }
    cuGreenCtxStreamCreate(stream: *mut Handle, of: Handle, _flags: c_uint, _priority: c_int) {
        let _call = green(of).life.call("cuGreenCtxStreamCreate");
        put(stream, give(Held(AtomicU64::new(0), Life::of_current())))
    }
}

// Streams and events. They are never freed, so that a call on a destroyed one is detected.
export! {
    cuStreamCreateWithPriority(stream: *mut Handle, _flags: c_uint, priority: c_int) {
        let _call = current().call("cuStreamCreateWithPriority");
        if priority == -4 {
            return OUT_OF_MEMORY;
        }
        put(stream, give(Held(AtomicU64::new(0), Life::of_current())))
    }
    cuStreamDestroy_v2(stream: Handle) {
        held(stream).1.end("cuStreamDestroy");
        SUCCESS
    }
    cuStreamSynchronize(stream: Handle) {
        while faults::plays("sync-blocks") {
            std::thread::sleep(core::time::Duration::from_millis(10));
        }
        if faults::plays("sync-fails") {
            return ILLEGAL_ADDRESS;
        }
        let stream = held(stream);
        let _call = stream.1.call("cuStreamSynchronize");
        loop {
            match stream.state() {
                NOT_READY => std::thread::yield_now(),
                other => return other,
            }
        }
    }
    cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) {
        let (stream, event) = (held(stream), held(event));
        let _call = (stream.1.call("cuStreamWaitEvent"), event.1.call("cuStreamWaitEvent"));
        if event.state() != SUCCESS {
            stream.copy(event);
        }
        SUCCESS
    }
    cuLaunchHostFunc(stream: Handle, function: Option<HostFunction>, data: *mut c_void) {
        let stream = held(stream);
        let _call = stream.1.call("cuLaunchHostFunc");
        let Some(function) = function else { return INVALID_VALUE };
        let earlier = stream.0.load(Ordering::Acquire);
        // The stream, and events that are recorded in it, wait for this word. It is never freed.
        let returned: &AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
        stream.0.store(core::ptr::from_ref(returned).expose_provenance() as u64, Ordering::Release);
        let data = data.expose_provenance();
        std::thread::spawn(move || {
            let earlier = Held(AtomicU64::new(earlier), Life::without_context());
            let mut turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            while earlier.state() == NOT_READY {
                // The end of a host function is notified, that of a kernel is polled.
                let poll = core::time::Duration::from_millis(1);
                turn = RETURNED.wait_timeout(turn, poll).unwrap_or_else(PoisonError::into_inner).0;
            }
            drop(turn);
            if earlier.state() != SUCCESS {
                returned.store(FAILED, Ordering::Release);
                return;
            }
            IN_HOST_FUNCTION.set(true);
            // SAFETY: the caller passed a function for this pointer.
            unsafe { function(core::ptr::with_exposed_provenance_mut(data)) };
            returned.store(1, Ordering::Release);
            RETURNED.notify_all();
        });
        SUCCESS
    }
    cuEventCreate(event: *mut Handle, _flags: c_uint) {
        let _call = current().call("cuEventCreate");
        put(event, give(Held(AtomicU64::new(0), Life::of_current())))
    }
    cuEventDestroy_v2(event: Handle) {
        held(event).1.end("cuEventDestroy");
        SUCCESS
    }
    cuEventRecord(event: Handle, stream: Handle) {
        let (stream, event) = (held(stream), held(event));
        let _call = (stream.1.call("cuEventRecord"), event.1.call("cuEventRecord"));
        // Most events find room: a load costs them less than a swap.
        if FULL.load(Ordering::Relaxed) && FULL.swap(false, Ordering::AcqRel) {
            return OUT_OF_MEMORY;
        }
        event.record(stream);
        SUCCESS
    }
    cuCtxRecordEvent(_context: Handle, event: Handle) { cuEventRecord(event, 0) }
    cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: c_uint) { cuEventRecord(event, stream) }
    cuEventQuery(event: Handle) {
        let event = held(event);
        let _call = event.1.call("cuEventQuery");
        event.state()
    }
    cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        let (start, end) = (held(start), held(end));
        let _call = (start.1.call("cuEventElapsedTime"), end.1.call("cuEventElapsedTime"));
        match (start.state(), end.state()) {
            (SUCCESS, SUCCESS) => put(milliseconds, span(start, end)),
            (SUCCESS, failed) | (failed, _) => failed,
        }
    }
}
