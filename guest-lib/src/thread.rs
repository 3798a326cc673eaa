//! What the driver keeps per thread of the program: its context stack, its default streams, its number.

use crate::{
    error::{Error, Result},
    process,
};
use core::sync::atomic::{AtomicU32, Ordering};
use std::cell::{Cell, RefCell};

struct Thread {
    number: u32,
    /// Raw context ids, current last; 0 stands for "none" pushed or set.
    contexts: RefCell<Vec<u64>>,
    /// This thread's default streams: raw context id, stream slot.
    streams: RefCell<Vec<(u64, u32)>>,
    capture_mode: Cell<u32>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        // Threads come and go; their streams are kept for the next ones.
        if let Ok(process) = process::get() {
            process.streams.recycle(&self.streams.borrow());
        }
    }
}

thread_local! {
    static THREAD: Thread = {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Thread {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            contexts: RefCell::default(),
            streams: RefCell::default(),
            capture_mode: Cell::new(0),
        }
    };
}

/// A small number that names the calling thread.
pub(crate) fn number() -> u32 {
    THREAD.try_with(|thread| thread.number).unwrap_or(0)
}

fn contexts<R>(body: impl FnOnce(&mut Vec<u64>) -> R) -> Result<R> {
    // After the thread's destructors ran there is nothing to keep a context in.
    THREAD.try_with(|thread| body(&mut thread.contexts.borrow_mut())).map_err(|_| Error::DEINITIALIZED)
}

/// The current context's raw id, 0 for none.
pub(crate) fn current_context() -> u64 {
    contexts(|stack| stack.last().copied().unwrap_or(0)).unwrap_or(0)
}

/// Replaces the current context; 0 for none.
pub(crate) fn set_current(context: u64) -> Result {
    contexts(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    })
}

/// Pushes a context.
pub(crate) fn push(context: u64) -> Result {
    contexts(|stack| stack.push(context))
}

/// Pops the current context; `None` when there is none.
pub(crate) fn pop() -> Result<Option<u64>> {
    contexts(Vec::pop)
}

/// The slot of this thread's default stream in a context, if it has one already.
pub(crate) fn default_stream(context: u64) -> Option<u32> {
    THREAD
        .try_with(|thread| {
            thread.streams.borrow().iter().find(|(of, _)| *of == context).map(|(_, slot)| *slot)
        })
        .ok()
        .flatten()
}

/// Remembers this thread's default stream in a context.
pub(crate) fn set_default_stream(context: u64, slot: u32) {
    // During thread exit there is no later call to remember it for.
    let _ = THREAD.try_with(|thread| {
        let mut streams = thread.streams.borrow_mut();
        streams.retain(|(of, _)| *of != context);
        streams.push((context, slot));
    });
}

/// Swaps the thread's capture mode.
pub(crate) fn exchange_capture_mode(mode: u32) -> u32 {
    THREAD.try_with(|thread| thread.capture_mode.replace(mode)).unwrap_or(0)
}
