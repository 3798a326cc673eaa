//! A CUDA driver that does nothing, quickly: the benchmarks' floor, and a driver for the worker's tests.
//!
//! It has what worker and arbiter call. Memory is real (pages of a memory file, never cleared) and copies and fills are done on
//! the spot, so round trips can be verified; kernels compute nothing; events are complete at once. Functions exist under
//! any name, with a convention for tests:
//!
//! - a name that ends in `_pN` has N parameters of 8 bytes, any other has none;
//! - `hold_p1` holds its stream back until the 32-bit word that its parameter points to is not 0;
//! - `fault` makes its stream fail with `CUDA_ERROR_ILLEGAL_ADDRESS`;
//! - a name that begins with `missing` does not exist.

#![expect(unsafe_code, reason = "a C library: exported functions that write through their callers' pointers")]

mod memory;

use core::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use memory::{GRANULARITY, memory, memory_bytes};

type Handle = u64;
type Status = c_uint;

const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const NOT_FOUND: Status = 500;
const NOT_READY: Status = 600;
const ILLEGAL_ADDRESS: Status = 700;

/// What [`Held`] holds after a fault; no address of a word.
const FAULT: u64 = 1;

/// Something whose end may be held back: 0, the address of a word that must not be 0, or [`FAULT`].
#[derive(Default)]
struct Held(AtomicU64);

impl Held {
    fn state(&self) -> Status {
        match self.0.load(Ordering::Acquire) {
            0 => SUCCESS,
            FAULT => ILLEGAL_ADDRESS,
            word => {
                // SAFETY: a test passed the address of a live, aligned word in memory that it shares with us.
                let word =
                    unsafe { AtomicU32::from_ptr(core::ptr::with_exposed_provenance_mut(address(word))) };
                if word.load(Ordering::Acquire) == 0 { NOT_READY } else { SUCCESS }
            }
        }
    }

    fn copy(&self, from: &Held) {
        self.0.store(from.0.load(Ordering::Acquire), Ordering::Release);
    }
}

static LEGACY: Held = Held(AtomicU64::new(0));
static NEXT: AtomicU64 = AtomicU64::new(1);

struct Function {
    parameters: usize,
    kind: Kind,
}

enum Kind {
    Nothing,
    Hold,
    Fault,
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

/// Writes a result if the caller wants it.
fn put<T>(into: *mut T, value: T) -> Status {
    if into.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: a pointer that the driver's interface says is valid for a `T`.
    unsafe { into.write(value) };
    SUCCESS
}

fn held(stream: Handle) -> &'static Held {
    if stream <= 2 {
        return &LEGACY;
    }
    // SAFETY: a handle that `give` made of a `Held`, and that the caller has not destroyed.
    unsafe { &*pointer::<Held>(stream) }
}

fn function(handle: Handle) -> &'static Function {
    // SAFETY: a handle that `find` made; functions are never freed.
    unsafe { &*pointer::<Function>(handle) }
}

macro_rules! export {
    ($($name:ident($($p:ident: $ty:ty),*) $body:block)+) => {$(
        // SAFETY: the names are those of the driver's interface, which this library stands in for.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($p: $ty),*) -> Status $body
    )+};
}

// Start-up and the device.
export! {
    cuInit(_flags: c_uint) { SUCCESS }
    cuDriverGetVersion(version: *mut c_int) { put(version, 13_050) }
    cuDeviceGetCount(count: *mut c_int) { put(count, 1) }
    cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        if ordinal == 0 { put(device, 0) } else { 101 }
    }
    cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) {
        let text = c"Null GPU";
        if usize::try_from(length).unwrap_or(0) < text.count_bytes() + 1 {
            return INVALID_VALUE;
        }
        // SAFETY: the caller's buffer is as long as it says.
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

// Contexts. There is no current one: nothing here depends on it.
export! {
    cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) { put(context, 0x1000) }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { SUCCESS }
    cuDevicePrimaryCtxSetFlags_v2(_device: c_int, _flags: c_uint) { SUCCESS }
    cuCtxCreate_v2(context: *mut Handle, _flags: c_uint, _device: c_int) { put(context, 0x2000 + next()) }
    cuCtxDestroy_v2(_context: Handle) { SUCCESS }
    cuCtxSetCurrent(_context: Handle) { SUCCESS }
    cuCtxGetLimit(value: *mut usize, limit: c_uint) {
        match limit {
            0 => put(value, 1024),             // stack
            1 => put(value, 1 << 20),          // printf buffer
            2 => put(value, 8 << 20),          // heap
            _ => 215,
        }
    }
    cuCtxSetLimit(limit: c_uint, _value: usize) { if limit <= 2 { SUCCESS } else { 215 } }
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
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
        let used = memory().used;
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
    cuMemHostRegister_v2(_pointer: *mut c_void, _bytes: usize, _flags: c_uint) { SUCCESS }
    cuMemHostUnregister(_pointer: *mut c_void) { SUCCESS }
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

// Copies and fills.
export! {
    cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: Handle) { copy(to, from, bytes) }
    cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, _stream: Handle) { copy(to, from, bytes) }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: Handle) { copy(to, from, bytes) }
    cuMemcpy2DAsync_v2(what: *const Copy2D, _stream: Handle) {
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
    cuMemsetD8Async(at: u64, value: u8, count: usize, _stream: Handle) { fill(at, 0, value, count, 1) }
    cuMemsetD16Async(at: u64, value: u16, count: usize, _stream: Handle) { fill(at, 0, value, count, 1) }
    cuMemsetD32Async(at: u64, value: c_uint, count: usize, _stream: Handle) { fill(at, 0, value, count, 1) }
    cuMemsetD2D8Async(at: u64, pitch: usize, value: u8, width: usize, height: usize, _stream: Handle) {
        fill(at, pitch, value, width, height)
    }
    cuMemsetD2D16Async(at: u64, pitch: usize, value: u16, width: usize, height: usize, _stream: Handle) {
        fill(at, pitch, value, width, height)
    }
    cuMemsetD2D32Async(at: u64, pitch: usize, value: c_uint, width: usize, height: usize, _stream: Handle) {
        fill(at, pitch, value, width, height)
    }
}

fn find(into: *mut Handle, name: *const c_char) -> Status {
    if name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    if name.starts_with(b"missing") {
        return NOT_FOUND;
    }
    let suffix = name.iter().rposition(|byte| *byte == b'_').and_then(|at| name.get(at + 1..));
    let number =
        suffix.and_then(|suffix| core::str::from_utf8(suffix.strip_prefix(b"p")?).ok()?.parse().ok());
    let kind = match name {
        b"hold_p1" => Kind::Hold,
        b"fault" => Kind::Fault,
        _ => Kind::Nothing,
    };
    put(into, give(Function { parameters: number.unwrap_or(0), kind }))
}

static VARIABLE: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

fn variable(at: *mut u64, bytes: *mut usize) -> Status {
    put(at, VARIABLE.as_ptr().expose_provenance() as u64);
    put(bytes, size_of_val(&VARIABLE))
}

fn attribute(value: *mut c_int, attribute: c_uint) -> Status {
    match attribute {
        0 => put(value, 1024),
        4 => put(value, 32),
        5 | 6 => put(value, 80),
        8 => put(value, 48 << 10),
        1..=15 => put(value, 0),
        _ => INVALID_VALUE,
    }
}

fn parameter(handle: Handle, index: usize, offset: *mut usize, bytes: *mut usize) -> Status {
    if index >= function(handle).parameters {
        return INVALID_VALUE;
    }
    put(offset, index * 8);
    put(bytes, 8)
}

fn run(handle: Handle, stream: Handle, extra: *mut *mut c_void) -> Status {
    let function = function(handle);
    let stream = held(stream);
    match function.kind {
        Kind::Nothing => {}
        Kind::Fault => stream.0.store(FAULT, Ordering::Release),
        Kind::Hold => {
            if extra.is_null() {
                return INVALID_VALUE;
            }
            // SAFETY: `extra` begins with the marker of the buffer, then the buffer's address.
            let [_, buffer] = unsafe { *extra.cast::<[*mut c_void; 2]>() };
            // SAFETY: the buffer holds the function's one parameter.
            let word = unsafe { buffer.cast::<u64>().read_unaligned() };
            stream.0.store(word, Ordering::Release);
        }
    }
    SUCCESS
}

/// The start of a `CUlaunchConfig`.
#[repr(C)]
struct Config {
    sizes: [c_uint; 7],
    stream: Handle,
}

// Modules, functions and launches.
export! {
    cuModuleLoadDataEx(module: *mut Handle, image: *const c_void, _options: c_uint, _ids: *mut c_uint,
        _values: *mut *mut c_void) {
        if image.is_null() { INVALID_VALUE } else { put(module, next()) }
    }
    cuModuleUnload(_module: Handle) { SUCCESS }
    cuModuleGetFunction(into: *mut Handle, _module: Handle, name: *const c_char) { find(into, name) }
    cuModuleGetGlobal_v2(at: *mut u64, bytes: *mut usize, _module: Handle, _name: *const c_char) {
        variable(at, bytes)
    }
    cuModuleGetFunctionCount(count: *mut c_uint, _module: Handle) { put(count, 0) }
    cuLibraryLoadData(library: *mut Handle, image: *const c_void, _jit: *mut c_uint, _jit_values: *mut *mut c_void,
        _jit_count: c_uint, _options: *mut c_uint, _values: *mut *mut c_void, _count: c_uint) {
        if image.is_null() { INVALID_VALUE } else { put(library, next()) }
    }
    cuLibraryUnload(_library: Handle) { SUCCESS }
    cuLibraryGetKernel(into: *mut Handle, _library: Handle, name: *const c_char) { find(into, name) }
    cuLibraryGetGlobal(at: *mut u64, bytes: *mut usize, _library: Handle, _name: *const c_char) {
        variable(at, bytes)
    }
    cuLibraryGetModule(module: *mut Handle, _library: Handle) { put(module, next()) }
    cuLibraryGetKernelCount(count: *mut c_uint, _library: Handle) { put(count, 0) }
    cuFuncGetAttribute(value: *mut c_int, id: c_uint, _function: Handle) { attribute(value, id) }
    cuKernelGetAttribute(value: *mut c_int, id: c_uint, _kernel: Handle, _device: c_int) { attribute(value, id) }
    cuFuncSetAttribute(_function: Handle, _id: c_uint, _value: c_int) { SUCCESS }
    cuKernelSetAttribute(_id: c_uint, _value: c_int, _kernel: Handle, _device: c_int) { SUCCESS }
    cuFuncGetParamInfo(handle: Handle, index: usize, offset: *mut usize, bytes: *mut usize) {
        parameter(handle, index, offset, bytes)
    }
    cuKernelGetParamInfo(handle: Handle, index: usize, offset: *mut usize, bytes: *mut usize) {
        parameter(handle, index, offset, bytes)
    }
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks: *mut c_int, _function: Handle, _block: c_int,
        _shared: usize, _flags: c_uint) {
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

// Streams and events.
export! {
    cuStreamCreateWithPriority(stream: *mut Handle, _flags: c_uint, _priority: c_int) {
        put(stream, give(Held::default()))
    }
    // Streams and events are not freed: a marker of a destroyed stream may still be looked at.
    cuStreamDestroy_v2(_stream: Handle) { SUCCESS }
    cuStreamSynchronize(stream: Handle) {
        loop {
            match held(stream).state() {
                NOT_READY => std::thread::yield_now(),
                other => return other,
            }
        }
    }
    cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) {
        let (stream, event) = (held(stream), held(event));
        if event.state() != SUCCESS {
            stream.copy(event);
        }
        SUCCESS
    }
    cuEventCreate(event: *mut Handle, _flags: c_uint) { put(event, give(Held::default())) }
    cuEventDestroy_v2(_event: Handle) { SUCCESS }
    cuEventRecord(event: Handle, stream: Handle) {
        let stream = held(stream);
        let held_by = held(event);
        held_by.copy(stream);
        SUCCESS
    }
    cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: c_uint) { cuEventRecord(event, stream) }
    cuEventQuery(event: Handle) { held(event).state() }
    cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        match (held(start).state(), held(end).state()) {
            (SUCCESS, SUCCESS) => put(milliseconds, 0.001),
            (SUCCESS, failed) | (failed, _) => failed,
        }
    }
}
