//! The life of the process: forks, and the beginning of its exit.
//!
//! A forked child finds the driver not initialised, in every state of its parent. Once the program begins to exit, every call
//! returns that the driver is deinitialised. The start of the driver calls [`watch`], and every access to the driver calls
//! [`check`]. The handlers run in a child or at exit: they only touch atomics and descriptors, and at exit they run one more action.
#![expect(unsafe_code, reason = "fork and exit need the C library")]

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32};

use crate::error::{Error, Result};
use crate::visible;

static EXITING: AtomicBool = AtomicBool::new(false);
/// A word that reads 0 in a forked child: the kernel wipes its page.
static PARENT: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// Descriptors whose locks prove that this process lives: a forked child closes its copies.
static WITNESSES: [AtomicI32; visible::MOST] = [const { AtomicI32::new(-1) }; visible::MOST];

/// The last action of the driver, after which no call does anything.
static AT_EXIT: OnceLock<fn()> = OnceLock::new();

/// Checks that this process may use a driver: it is neither a forked child nor exiting.
pub(crate) fn check() -> Result {
    if EXITING.load(Relaxed) {
        return Err(Error::DEINITIALIZED);
    }
    if is_child() { Err(Error::NOT_INITIALIZED) } else { Ok(()) }
}

fn is_child() -> bool {
    let word = PARENT.load(Acquire);
    // SAFETY: once set, the pointer names a page that is never unmapped.
    !word.is_null() && unsafe { &*word }.load(Relaxed) == 0
}

/// Records the descriptor whose lock proves this process on the device of that ordinal.
pub(crate) fn add_witness(ordinal: usize, descriptor: i32) {
    WITNESSES[ordinal % WITNESSES.len()].store(descriptor, Release);
}

/// Registers the handlers for forks and for exit, at the first successful call. The process runs the action when it exits by itself.
pub(crate) fn watch(action: fn()) -> Result {
    AT_EXIT.get_or_init(|| action);
    if !PARENT.load(Acquire).is_null() {
        return Ok(());
    }
    let bytes = 4096;
    let address = softgpu_device::anonymous(bytes).map_err(|_| Error::OUT_OF_MEMORY)?;
    let page = ptr::with_exposed_provenance_mut::<AtomicU32>(usize::try_from(address).unwrap_or(0));
    // SAFETY: the page was just mapped, and no other code has its address.
    if unsafe { libc::madvise(page.cast::<c_void>(), bytes, libc::MADV_WIPEONFORK) } != 0 {
        return Err(Error::OPERATING_SYSTEM);
    }
    // SAFETY: the same page; all zeroes are a valid value.
    unsafe { &*page }.store(1, Relaxed);
    PARENT.store(page, Release);
    // SAFETY: the handler only touches atomics and closes descriptors. The library is never unloaded.
    let registered = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    // SAFETY: the handler may run any code that does not unwind. The library is never unloaded.
    let registered = registered | unsafe { libc::atexit(at_exit) };
    if registered == 0 { Ok(()) } else { Err(Error::OUT_OF_MEMORY) }
}

extern "C" fn at_exit() {
    EXITING.store(true, Release);
    if !is_child() {
        AT_EXIT.get().into_iter().for_each(|action| action());
    }
}

extern "C" fn in_child() {
    for witness in &WITNESSES {
        let descriptor = witness.swap(-1, Relaxed);
        if descriptor >= 0 {
            // SAFETY: the descriptor is the child's copy. The child never uses the device but would keep its lock.
            unsafe { libc::close(descriptor) };
        }
    }
}
