//! Lifetimes: existing contexts and objects, and the check that a call may use them.
//!
//! A call is checked at its start and at its end, so an object that is destroyed during a call is detected. That costs two loads,
//! so the driver stays the floor of benchmarks.

use super::{ACCESSIBLE, Handle, anonymous, give, pointer};
use core::{
    cell::Cell,
    sync::atomic::{AtomicBool, Ordering},
};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Bytes of the variables of a context.
pub(super) const VARIABLE_BYTES: usize = 64;
/// Bytes of the mapping that holds them.
const PAGE: usize = 4096;

/// The life of a context, or of an object of one. Neither is ever freed.
pub(super) struct Life {
    ended: AtomicBool,
    /// The life of its context, if it has one.
    context: Option<&'static Life>,
    /// For a context: the address of its variables, once one was looked up.
    variables: OnceLock<u64>,
}

thread_local! {
    static CURRENT: Cell<Handle> = const { Cell::new(0) };
}

static NOWHERE: Life = Life::without_context();
/// The primary context, and the number of times it is retained.
static PRIMARY: Mutex<(Handle, usize)> = Mutex::new((0, 0));

/// A call that is under way.
pub(super) struct Call<'a>(&'a Life, &'static str);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.check(self.1, "was destroyed during the call");
    }
}

impl Life {
    /// The life of an object without a context.
    pub(super) const fn without_context() -> Life {
        Life { ended: AtomicBool::new(false), context: None, variables: OnceLock::new() }
    }

    /// The life of an object of the current context.
    pub(super) fn of_current() -> Life {
        Life { context: Some(current()), ..Life::without_context() }
    }

    /// True if the object or its context was destroyed.
    pub(super) fn is_over(&self) -> bool {
        let ended = |life: &Life| life.ended.load(Ordering::Acquire);
        ended(self) || self.context.is_some_and(ended)
    }

    fn check(&self, call: &str, what: &str) {
        if self.is_over() {
            wrong(call, what);
        }
    }

    /// A call on the object, which ends when the result is dropped.
    pub(super) fn call(&self, call: &'static str) -> Call<'_> {
        self.check(call, "was destroyed before the call");
        Call(self, call)
    }

    /// Destroys the object.
    pub(super) fn end(&self, call: &'static str) {
        self.check(call, "was destroyed before the call");
        self.ended.store(true, Ordering::Release);
        if let Some(variables) = self.variables.get() {
            // SAFETY: a mapping of `variables`. From now on each access to it faults: on hardware the memory may belong to any object.
            unsafe { libc::mprotect(pointer(*variables), PAGE, libc::PROT_NONE) };
        }
    }

    /// The object exists again, for another that has its handle.
    pub(super) fn begin_again(&self) {
        self.ended.store(false, Ordering::Release);
    }

    /// The address of the variables of a context; 0 if there is no memory for them.
    pub(super) fn variables(&self) -> u64 {
        *self.variables.get_or_init(|| {
            let page = anonymous(core::ptr::null_mut(), PAGE, ACCESSIBLE, 0);
            if page == libc::MAP_FAILED { 0 } else { page.expose_provenance() as u64 }
        })
    }
}

/// Ends the process: the caller breaks the rules of the interface, and hardware would corrupt memory.
#[cold]
fn wrong(call: &str, what: &str) -> ! {
    eprintln!("null driver: {call}: the object or its context {what}");
    std::process::abort();
}

/// Ends the process: a host function makes a call.
#[cold]
pub(super) fn forbidden(call: &str) -> ! {
    eprintln!("null driver: {call}: a host function must not call the driver");
    std::process::abort();
}

pub(super) fn context(handle: Handle) -> &'static Life {
    if handle == 0 {
        return &NOWHERE;
    }
    // SAFETY: a handle that `new_context` made; none is ever freed.
    unsafe { &*pointer::<Life>(handle) }
}

/// The calling thread's context.
pub(super) fn current() -> &'static Life {
    context(current_handle())
}

pub(super) fn current_handle() -> Handle {
    CURRENT.get()
}

pub(super) fn make_current(handle: Handle) {
    CURRENT.set(handle);
}

pub(super) fn new_context() -> Handle {
    give(Life::without_context())
}

pub(super) fn end_context(handle: Handle) {
    context(handle).end("cuCtxDestroy");
    if current_handle() == handle {
        make_current(0);
    }
}

pub(super) fn retain_primary() -> Handle {
    let mut primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
    if primary.1 == 0 {
        primary.0 = new_context();
    }
    primary.1 += 1;
    primary.0
}

/// `false` if the primary context is not retained.
pub(super) fn release_primary() -> bool {
    let mut primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
    if primary.1 == 0 {
        return false;
    }
    primary.1 -= 1;
    if primary.1 == 0 {
        context(primary.0).end("cuDevicePrimaryCtxRelease");
    }
    true
}
