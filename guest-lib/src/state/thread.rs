//! The state that the driver keeps per thread of the program: its context stack and its default streams.
//!
//! A thread's own destructors may call the driver until the very end, and those of C++ run in the reverse order of their
//! objects. So the state kept here has no destructor of that kind; a destructor of a `pthread` key empties it, which runs after
//! all of those, and it stays usable even then.

#![expect(unsafe_code, reason = "a destructor of a pthread key")]

use crate::error::{Error, Result};
use core::{ffi::c_void, mem::ManuallyDrop};
use std::{
    cell::{Cell, RefCell},
    sync::OnceLock,
};

struct Thread {
    /// Raw context ids, current last; a pushed 0 means no context.
    contexts: RefCell<Vec<u64>>,
    /// This thread's default streams: raw context id, raw stream id.
    streams: RefCell<Vec<(u64, u64)>>,
}

thread_local! {
    static THREAD: ManuallyDrop<Thread> = ManuallyDrop::new(Thread {
        contexts: RefCell::default(),
        streams: RefCell::default(),
    });
}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function of the program, during which this thread may not call the driver.
pub(crate) fn in_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

/// An error if the calling thread runs a host function.
pub(crate) fn may_call() -> Result {
    if IN_HOST_FUNCTION.get() { Err(Error::NOT_PERMITTED) } else { Ok(()) }
}

/// Destroys a default stream of a thread that ends, by its raw id.
static END_STREAM: OnceLock<fn(u64)> = OnceLock::new();

/// Sets the function that ends default streams; the first call counts, since a process has one driver.
pub(crate) fn end_streams_by(end: fn(u64)) {
    let _first = END_STREAM.set(end).is_ok();
}

/// Runs when the thread ends: its default streams end with it.
extern "C" fn end(_: *mut c_void) {
    let (contexts, streams) = THREAD.with(|thread| (thread.contexts.take(), thread.streams.take()));
    drop(contexts);
    // No panic unwinds into the program; a stream that a bug left behind lives as long as its context.
    let _ = std::panic::catch_unwind(|| {
        if let Some(end) = END_STREAM.get() {
            streams.into_iter().for_each(|(_, stream)| end(stream));
        }
    });
}

/// Makes [`end`] run when this thread ends, if a key is available; otherwise its streams stay until the context is destroyed.
fn end_with_thread() {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the place is ours; the destructor is never unloaded and unwinds nowhere.
        (unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } == 0).then_some(key)
    });
    if let Some(key) = key {
        // Any value but null serves. If memory runs out, the thread's streams stay, too.
        // SAFETY: the key was created above and is never deleted.
        let _ = unsafe { libc::pthread_setspecific(*key, core::ptr::without_provenance(1)) };
    }
}

fn contexts<R>(body: impl FnOnce(&mut Vec<u64>) -> R) -> R {
    THREAD.with(|thread| body(&mut thread.contexts.borrow_mut()))
}

/// The current context's raw id, 0 for none.
pub(crate) fn current_context() -> u64 {
    contexts(|stack| stack.last().copied().unwrap_or(0))
}

/// Replaces the current context; 0 for none.
pub(crate) fn set_current(context: u64) {
    contexts(|stack| {
        stack.pop();
        if context != 0 {
            add(stack, context);
        }
    });
}

pub(crate) fn push(context: u64) {
    contexts(|stack| add(stack, context));
}

fn add(stack: &mut Vec<u64>, context: u64) {
    if stack.capacity() == 0 {
        // The first allocation, to be freed with the thread.
        end_with_thread();
    }
    stack.push(context);
}

/// Pops the current context; `None` when there is none.
pub(crate) fn pop() -> Option<u64> {
    contexts(Vec::pop)
}

/// The raw id of this thread's default stream in a context, if it was created.
pub(crate) fn default_stream(context: u64) -> Option<u64> {
    THREAD.with(|thread| {
        thread.streams.borrow().iter().find(|(of, _)| *of == context).map(|(_, stream)| *stream)
    })
}

/// Remembers this thread's default stream in a context.
pub(crate) fn set_default_stream(context: u64, stream: u64) {
    end_with_thread();
    THREAD.with(|thread| {
        let mut streams = thread.streams.borrow_mut();
        streams.retain(|(of, _)| *of != context);
        streams.push((context, stream));
    });
}
