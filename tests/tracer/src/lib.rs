//! A CUDA driver library that counts and times the calls to another one, for the hardware kit.
//!
//! A program loads it in place of the driver; it loads the library that `SLUICE_TRACED` names, and passes each call on as it came. At the
//! end of the process it writes the file of `SLUICE_TRACE`: a line of JSON for each function that was called, with the number of calls,
//! their time, the longest one, and the results other than success. Calls through `cuGetExportTable` are not seen.
//!
//! An entry knows neither number nor types of its arguments. It keeps all registers of arguments, notes the time, puts the address of
//! [`leave`]'s caller in the place of the return address, and jumps to the function; so the stack is as the function expects it.
//! A call that ends by `longjmp` or an exception, and not by its return, ends the process. It exists for x86-64 only.

#![cfg(target_arch = "x86_64")]
#![expect(unsafe_code, reason = "a C library whose entries are written in assembly")]

mod calls;

use core::arch::{global_asm, naked_asm};
use core::cell::{Cell, UnsafeCell};
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::time::Instant;

use calls::{DYNAMIC, EXPORTED, Function};
use sluice_cuda_abi::symbols::EXPORTS;

/// Most calls in one another of a thread that are timed. Deeper ones are passed on.
const DEPTH: usize = 64;
/// Bytes between two of the entries for functions that programs look up.
const STRIDE: usize = 16;
const NOT_FOUND: c_uint = 500;

/// A call that has not returned.
#[derive(Clone, Copy)]
struct Open {
    function: usize,
    back: usize,
    begun: Option<Instant>,
}

struct Stack {
    depth: Cell<usize>,
    open: UnsafeCell<[Open; DEPTH]>,
}

thread_local! {
    // Without a destructor, so that it also serves calls at the end of a thread.
    static STACK: Stack = const {
        Stack { depth: Cell::new(0), open: UnsafeCell::new([Open { function: 0, back: 0, begun: None }; DEPTH]) }
    };
}

// An entry for each function that a program looks up: 16 bytes each.
global_asm!(
    ".globl sluice_tracer_dynamic",
    ".hidden sluice_tracer_dynamic",
    ".balign 16",
    "sluice_tracer_dynamic:",
    ".set sluice_tracer_place, {exported}",
    ".rept {dynamic}",
    ".balign 16",
    "movl $sluice_tracer_place, %r11d",
    "jmp sluice_tracer_enter",
    ".set sluice_tracer_place, sluice_tracer_place + 1",
    ".endr",
    dynamic = const DYNAMIC,
    exported = const EXPORTED,
    options(att_syntax),
);

global_asm!(
    ".globl sluice_tracer_enter",
    ".hidden sluice_tracer_enter",
    // Keeps the registers of arguments, asks for the function, and jumps to it.
    "sluice_tracer_enter:",
    "push rbp",
    "mov rbp, rsp",
    "push rax",
    "push rdi",
    "push rsi",
    "push rdx",
    "push rcx",
    "push r8",
    "push r9",
    "push r10",
    "sub rsp, 128",
    "movups [rsp], xmm0",
    "movups [rsp + 16], xmm1",
    "movups [rsp + 32], xmm2",
    "movups [rsp + 48], xmm3",
    "movups [rsp + 64], xmm4",
    "movups [rsp + 80], xmm5",
    "movups [rsp + 96], xmm6",
    "movups [rsp + 112], xmm7",
    "mov edi, r11d",
    // The place of the return address, above the kept rbp.
    "lea rsi, [rbp + 8]",
    "lea rdx, [rip + sluice_tracer_leave]",
    "and rsp, -16",
    "call {enter}",
    "mov r11, rax",
    // The stack pointer before it was aligned: eight registers and 128 bytes below rbp.
    "lea rsp, [rbp - 192]",
    "movups xmm0, [rsp]",
    "movups xmm1, [rsp + 16]",
    "movups xmm2, [rsp + 32]",
    "movups xmm3, [rsp + 48]",
    "movups xmm4, [rsp + 64]",
    "movups xmm5, [rsp + 80]",
    "movups xmm6, [rsp + 96]",
    "movups xmm7, [rsp + 112]",
    "add rsp, 128",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rcx",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "pop rax",
    "pop rbp",
    "jmp r11",
    // A function returns to here, with its result in rax. The caller's address goes to the place above the stack pointer.
    "sluice_tracer_leave:",
    "sub rsp, 8",
    "push rbp",
    "mov rbp, rsp",
    "push rax",
    "push rdx",
    "sub rsp, 32",
    "movups [rsp], xmm0",
    "movups [rsp + 16], xmm1",
    "mov edi, eax",
    "and rsp, -16",
    "call {leave}",
    "mov [rbp + 8], rax",
    "lea rsp, [rbp - 48]",
    "movups xmm0, [rsp]",
    "movups xmm1, [rsp + 16]",
    "add rsp, 32",
    "pop rdx",
    "pop rax",
    "pop rbp",
    "ret",
    enter = sym enter,
    leave = sym leave,
);

unsafe extern "C" {
    #[link_name = "sluice_tracer_dynamic"]
    static DYNAMIC_ENTRIES: [u8; 0];
}

/// Called by each entry. Returns the address of the function, and makes it return to `sluice_tracer_leave`.
extern "C" fn enter(function: usize, back: *mut usize, leave: usize) -> usize {
    let address = calls::address(function);
    if address == 0 {
        return absent as *const () as usize;
    }
    STACK.with(|stack| {
        let depth = stack.depth.get();
        // SAFETY: only this thread uses the array, and neither `enter` nor `leave` runs inside the other.
        if let Some(open) = unsafe { &mut *stack.open.get() }.get_mut(depth) {
            // SAFETY: the entry passes the place of its own return address.
            let place = unsafe { &mut *back };
            *open = Open { function, back: *place, begun: Some(Instant::now()) };
            stack.depth.set(depth + 1);
            *place = leave;
        }
    });
    address
}

/// Called when a function returns with `result`. Returns the address of the caller.
extern "C" fn leave(result: c_uint) -> usize {
    STACK.with(|stack| {
        let depth = stack.depth.get().saturating_sub(1);
        stack.depth.set(depth);
        // SAFETY: as in `enter`.
        let open = unsafe { &*stack.open.get() }[depth];
        if let Some(begun) = open.begun {
            calls::note(open.function, begun.elapsed(), result);
        }
        open.back
    })
}

/// In the place of a function that the traced library lacks.
extern "C" fn absent() -> c_uint {
    NOT_FOUND
}

/// The traced library.
fn traced() -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        let Some(path) = std::env::var_os("SLUICE_TRACED") else { return 0 };
        let Ok(path) = std::ffi::CString::new(std::os::unix::ffi::OsStringExt::into_vec(path)) else {
            return 0;
        };
        // SAFETY: the path ends with a NUL; the library is a driver, whose constructors are its own.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            eprintln!("sluice-tracer: {} does not load", path.to_string_lossy());
        }
        // SAFETY: the function writes a file and touches nothing of the process that may be gone by then.
        unsafe { libc::atexit(write) };
        library.expose_provenance()
    });
    core::ptr::with_exposed_provenance_mut(library)
}

extern "C" fn write() {
    if let Some(path) = std::env::var_os("SLUICE_TRACE") {
        calls::write(std::path::Path::new(&path));
    }
}

/// Address of a function of the traced library; 0 if it has none of this name.
fn find(name: &CStr) -> usize {
    let library = traced();
    if library.is_null() {
        return 0;
    }
    // SAFETY: the library was loaded, and the name ends with a NUL.
    unsafe { libc::dlsym(library, name.as_ptr()) }.expose_provenance()
}

/// The address of the entry for a function that a program looked up.
fn entry_of(function: Function) -> Option<usize> {
    let place = calls::add(function)?;
    let entries = core::ptr::addr_of!(DYNAMIC_ENTRIES).addr();
    Some(entries + place * STRIDE)
}

/// Replaces the address that a program looked up by that of an entry.
///
/// # Safety
/// `found` is null or the place of an address.
unsafe fn replace(name: *const c_char, found: *mut *mut c_void) {
    if name.is_null() || found.is_null() {
        return;
    }
    // SAFETY: the driver has read the name as a C string.
    let name = unsafe { CStr::from_ptr(name) };
    // SAFETY: as the caller promises.
    let found = unsafe { &mut *found };
    let own = match name.to_bytes() {
        b"cuGetProcAddress" => Some(cuGetProcAddress_v2 as *const () as usize),
        _ if found.is_null() => None,
        _ => entry_of(Function {
            name: name.to_string_lossy().into_owned(),
            address: found.expose_provenance(),
        }),
    };
    if let Some(own) = own {
        *found = core::ptr::with_exposed_provenance_mut(own);
    }
}

/// `cuGetProcAddress` before CUDA 12.
///
/// # Safety
/// As the function of `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_uint {
    type Entry = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_uint;
    let address = find(c"cuGetProcAddress");
    if address == 0 {
        return NOT_FOUND;
    }
    // SAFETY: this is the function's signature in `cuda.h`.
    let entry = unsafe { core::mem::transmute::<usize, Entry>(address) };
    // SAFETY: the arguments are the caller's.
    let result = unsafe { entry(name, found, version, flags) };
    if result == 0 {
        // SAFETY: the driver wrote an address.
        unsafe { replace(name, found) };
    }
    result
}

/// `cuGetProcAddress` of CUDA 12 and newer.
///
/// # Safety
/// As the function of `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_uint,
) -> c_uint {
    type Entry = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_uint) -> c_uint;
    let address = find(c"cuGetProcAddress_v2");
    if address == 0 {
        return NOT_FOUND;
    }
    // SAFETY: this is the function's signature in `cuda.h`.
    let entry = unsafe { core::mem::transmute::<usize, Entry>(address) };
    // SAFETY: the arguments are the caller's.
    let result = unsafe { entry(name, found, version, flags, status) };
    if result == 0 {
        // SAFETY: the driver wrote an address, or null.
        unsafe { replace(name, found) };
    }
    result
}

/// Makes an exported entry for each function: its place in the table of functions goes to `r11`, which no argument uses.
macro_rules! entries {
    ($($place:literal $name:ident;)+) => {$(
        #[doc = "An entry."]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        #[allow(non_snake_case, reason = "the name of cuda.h")]
        pub extern "C" fn $name() {
            naked_asm!("mov r11d, {place}", "jmp sluice_tracer_enter", place = const $place)
        }
    )+};
}
include!(concat!(env!("OUT_DIR"), "/entries.rs"));

const _: () = assert!(EXPORTS.len() == EXPORTED);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    type Many = extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, f64, f32, u8) -> u64;

    extern "C" fn many(
        a: u64,
        b: u64,
        c: u64,
        d: u64,
        e: u64,
        f: u64,
        g: u64,
        h: u64,
        x: f64,
        y: f32,
        z: u8,
    ) -> u64 {
        let words = [a, b, c, d, e, f, g, h, x.to_bits(), y.to_bits().into(), z.into()];
        words.iter().fold(7, |sum: u64, word| sum.wrapping_mul(31).wrapping_add(*word))
    }

    extern "C" fn half(x: f64) -> f64 {
        x / 2.0
    }

    /// The entry of a function, and its place among the figures.
    fn traced(name: &str, address: usize) -> (usize, usize) {
        let function = || Function { name: name.to_owned(), address };
        let (entry, again) = (entry_of(function()).unwrap(), entry_of(function()).unwrap());
        assert_eq!(entry, again, "equal functions have one entry");
        let place = (entry - core::ptr::addr_of!(DYNAMIC_ENTRIES).addr()) / STRIDE;
        (entry, EXPORTED + place)
    }

    #[test]
    fn arguments_and_results_of_every_kind_pass_unchanged() {
        let (entry, place) = traced("many", many as *const () as usize);
        // SAFETY: the entry passes on to a function of this type.
        let own = unsafe { core::mem::transmute::<usize, Many>(entry) };
        for round in 0..1000 {
            let expected = many(round, 2, 3, 4, 5, 6, 7, 8, 9.5, -1.25, 10);
            assert_eq!(own(round, 2, 3, 4, 5, 6, 7, 8, 9.5, -1.25, 10), expected);
        }
        assert_eq!(calls::count(place), 1000);
        let (entry, _) = traced("half", half as *const () as usize);
        // SAFETY: as above.
        let own = unsafe { core::mem::transmute::<usize, extern "C" fn(f64) -> f64>(entry) };
        assert!((own(5.0) - 2.5).abs() < f64::EPSILON);
    }

    static DEEP: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn deep(left: u64) -> u64 {
        if left == 0 {
            return 1;
        }
        // SAFETY: the test stores the entry of this function.
        let own =
            unsafe { core::mem::transmute::<usize, extern "C" fn(u64) -> u64>(DEEP.load(Ordering::Relaxed)) };
        own(left - 1) + 1
    }

    #[test]
    fn calls_in_one_another_return_to_their_callers_also_beyond_the_timed_depth() {
        let (entry, place) = traced("deep", deep as *const () as usize);
        DEEP.store(entry, Ordering::Relaxed);
        // SAFETY: as above.
        let own = unsafe { core::mem::transmute::<usize, extern "C" fn(u64) -> u64>(entry) };
        let depth = 3 * DEPTH as u64;
        assert_eq!(own(depth), depth + 1);
        assert_eq!(calls::count(place), DEPTH as u64);
    }

    #[test]
    fn function_that_the_traced_library_lacks_is_not_found() {
        // No library is traced here.
        // SAFETY: the entry passes on to a function that reads no argument.
        let own =
            unsafe { core::mem::transmute::<usize, extern "C" fn() -> c_uint>(cuInit as *const () as usize) };
        assert_eq!(own(), NOT_FOUND);
    }
}
