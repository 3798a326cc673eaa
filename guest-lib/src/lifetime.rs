//! The lifetime of the driver in this process: it may be used before the process exits, and never in a forked child of the
//! process that set the driver up.

#![expect(unsafe_code, reason = "a page that the kernel wipes on fork, exit and fork handlers")]

use crate::{
    error::{Error, Result},
    log,
};
use core::{
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering},
};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use sluice_shared_memory::takeover::Fork;

/// A word in a page of its own that reads 1 in the process that wrote it and 0 in a forked child.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
static EXITING: AtomicBool = AtomicBool::new(false);

/// Frees nothing at exit and waits for nothing: the device ends the session when the process is gone. Later calls, from exit
/// handlers of other libraries, get an error.
extern "C" fn exiting() {
    EXITING.store(true, Ordering::Relaxed);
}

thread_local! {
    /// The fork that this thread makes.
    static FORK: Cell<Option<Fork>> = const { Cell::new(None) };
}

extern "C" fn before_fork() {
    FORK.set(Some(Fork::prepare()));
}

extern "C" fn in_parent() {
    if let Some(fork) = FORK.take() {
        fork.parent();
    }
}

extern "C" fn in_child() {
    if let Some(Err(error)) = FORK.take().map(Fork::child) {
        log::warn(format_args!("registered memory stays shared with the parent: {error}"));
    }
}

/// Registers for exit and fork, once, at the first connection. Handlers that other libraries, above all a runtime, registered
/// before run after ours, as with the vendor's driver. `forked` runs in each forked child.
pub(crate) fn watch_exit_and_fork(forked: extern "C" fn()) -> Result {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: the handler only stores a flag, and the library is never unloaded.
    let exit = unsafe { libc::atexit(exiting) };
    // SAFETY: the handlers hold a lock of this library over the fork and replace registered memory of the child; the library is never
    // unloaded.
    let around = unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    // SAFETY: the handler only closes descriptors and stores words, and the library is never unloaded. It runs
    // after the one above, as handlers of children do in the order of their registration.
    let fork = around | unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    if exit == 0 && fork == 0 { Ok(()) } else { Err(Error::OUT_OF_MEMORY) }
}

/// An error if no call may be answered.
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

/// Marks this process, so that its forked children are recognised. No other thread runs this at the same time.
pub(crate) fn mark() -> Result {
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

/// Forgets the mark: a forked child may use the driver anew.
pub(crate) fn unmark() {
    MARK.store(core::ptr::null_mut(), Ordering::Release);
}

/// Maps a page that is zero in a forked child.
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
