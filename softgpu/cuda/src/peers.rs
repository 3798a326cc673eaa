//! Access of contexts to the memory of other devices' contexts (`cuCtxEnablePeerAccess`).
//!
//! The interface gives access to contexts, a device has it for all of its contexts: a GPU may access the memory of another as long as one
//! pair of contexts is enabled.

use std::sync::Mutex;

use crate::context::Core;
use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;
use crate::lock::lock;
use crate::memory::Scope;

/// A context that may access the memory of another, by the numbers of their cores.
struct Pair {
    from: (u64, &'static VisibleGpu),
    to: (u64, &'static VisibleGpu),
}

static PAIRS: Mutex<Vec<Pair>> = Mutex::new(Vec::new());

/// True if a GPU can access the memory of another.
pub(crate) fn reaches(gpu: &VisibleGpu, other: &VisibleGpu) -> bool {
    gpu.ordinal != other.ordinal && gpu.space.can_have_peers() && other.space.can_have_peers()
}

/// Enables the access of a context to the memory of another.
pub(crate) fn enable(core: &Core, other: &Core) -> Result {
    if !reaches(core.gpu, other.gpu) {
        return Err(Error::PEER_ACCESS_UNSUPPORTED);
    }
    let mut pairs = lock(&PAIRS);
    if pairs.iter().any(|pair| (pair.from.0, pair.to.0) == (core.id, other.id)) {
        return Err(Error::PEER_ACCESS_ALREADY_ENABLED);
    }
    pairs.push(Pair { from: (core.id, core.gpu), to: (other.id, other.gpu) });
    // No operation has more access than this.
    let _ = other.gpu.space.set_peer(Scope::Contexts, (core.gpu.ordinal, core.gpu.space), 3);
    Ok(())
}

/// Gives a GPU access to memory of other processes that this process opens on `holder`, until the process ends. The GPU reaches `holder`.
pub(crate) fn open(gpu: &VisibleGpu, holder: &VisibleGpu) {
    // No operation has more access than this.
    let _ = holder.space.set_peer(Scope::Opened, (gpu.ordinal, gpu.space), 3);
}

/// Disables it.
pub(crate) fn disable(core: &Core, other: &Core) -> Result {
    let is_enabled = end(|pair| (pair.from.0, pair.to.0) == (core.id, other.id));
    if is_enabled { Ok(()) } else { Err(Error::PEER_ACCESS_NOT_ENABLED) }
}

/// Ends the pairs of a context that ends.
pub(crate) fn context_ended(core: &Core) {
    end(|pair| [pair.from.0, pair.to.0].contains(&core.id));
}

/// Ends pairs; returns `false` if there are none.
fn end(ends: impl Fn(&Pair) -> bool) -> bool {
    let mut pairs = lock(&PAIRS);
    let ended: Vec<Pair> = pairs.extract_if(.., |pair| ends(pair)).collect();
    let devices = |pair: &Pair| (pair.from.1.ordinal, pair.to.1.ordinal);
    let mut lost = Vec::new();
    for Pair { from: (_, from), to: (_, to) } in
        ended.iter().filter(|pair| !pairs.iter().any(|other| devices(other) == devices(pair)))
    {
        if to.space.set_peer(Scope::Contexts, (from.ordinal, from.space), 0) {
            lost.push((from, to));
        }
    }
    drop(pairs);
    for (from, to) in lost {
        from.space.running.wait();
        to.space.forget_peer(Scope::Contexts, from.ordinal);
    }
    !ended.is_empty()
}
