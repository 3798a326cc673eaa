//! The end of a context: running launches stop, queued work is dropped, memory goes back.
//!
//! The entry points and primary contexts end contexts here. Only this file knows everything that a context holds, and the order
//! of its release. It creates nothing.

use std::sync::atomic::Ordering::Release;

use crate::arrays;
use crate::context::{self, CONTEXTS, Context};
use crate::error::{Error, Result};
use crate::event::EVENTS;
use crate::green::GREENS;
use crate::lock::lock;
use crate::module;
use crate::peers;
use crate::queues::Joint;
use crate::stream::STREAMS;

/// Ends the core of a context, if the context is alive.
pub(crate) fn end(context: &Context) {
    let Some(core) = context.take_core() else { return };
    core.health.stop.store(true, Release);
    core.queues.drain();
    core.flush_printed();
    peers::context_ended(&core);
    sluice_cuda_frontend::tables::context_destroyed(usize::try_from(core.handle).unwrap_or(0));
    // Calls that still hold the core get this error.
    core.health.poison(Error::CONTEXT_IS_DESTROYED);
    for handle in std::mem::take(&mut *lock(&core.events)) {
        let _ = EVENTS.remove(handle);
    }
    for handle in std::mem::take(&mut *lock(&core.streams)) {
        let _ = STREAMS.remove(handle);
    }
    for handle in std::mem::take(&mut *lock(&core.greens)) {
        // Another thread may destroy it at the same time.
        if let Ok(green) = GREENS.get(handle)
            && green.end()
        {
            green.queues.retire_records();
            let _ = CONTEXTS.remove(green.view()).map(|view| view.take_core());
        }
    }
    core.queues.retire();
    for handle in std::mem::take(&mut *lock(&core.modules)) {
        module::forget(handle);
    }
    arrays::context_ended(core.id);
    *lock(&core.heap) = None;
    core.overhead.give_back();
    core.gpu.disown(&core.queues);
    core.gpu.free_all_of(core.id);
    core.gpu.space.owner().context_ended();
}

/// Ends a context made by `cuCtxCreate`.
pub(crate) fn destroy(handle: u64) -> Result {
    let context = CONTEXTS.get(handle)?;
    if context.is_primary || context.green().is_some() {
        return Err(Error::INVALID_CONTEXT);
    }
    CONTEXTS.remove(handle)?;
    end(&context);
    context::pop_if(&context)
}
