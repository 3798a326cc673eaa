//! The functions of the C interface, as methods of [`Graphs`].
//!
//! A library has one [`Graphs`], which owns the graphs and captures of the process, and forwards its exports to it. Methods are named after the C functions. Neither a library's code nor
//! a function of the program is called while a lock is held, except that calls on one executable graph come one after another.

mod conditional;
mod executables;
mod graphs;
mod hooks;
mod memory;
mod nodes;
mod objects;
mod parameters;
mod recapture;
mod streams;

pub use streams::CaptureInfo;

use conditional::{ConditionalGraphs, OnlyOne};
use memory::Instantiated;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use sluice_cuda_abi::sys::CUresult as Code;

use crate::capture::Captures;
use crate::driver::GraphDriver;
use crate::graph::{Edge, Model};
use crate::memory::{GraphMemory, MemoryNodes};
use crate::objects::UserObjects;
use crate::plan::{EdgeData, Plan};
use sluice_cuda_frontend::handles::{HandleKind, Slab};

pub(crate) type In<T, D> = sluice_cuda_frontend::In<T, <D as GraphDriver>::Error>;
pub(crate) type Out<T, D> = sluice_cuda_frontend::Out<T, <D as GraphDriver>::Error>;
pub(crate) type Result<T, D> = std::result::Result<T, <D as GraphDriver>::Error>;

/// All graphs, captures, executable graphs and user objects of a process.
pub struct Graphs<D: GraphDriver> {
    driver: D,
    state: Mutex<GraphState>,
    objects: UserObjects,
    memory: Mutex<GraphMemory>,
    conditional: Mutex<ConditionalGraphs<D>>,
    /// Number of allocations, so that a free without any takes no lock.
    allocations: AtomicUsize,
    executables: RwLock<Slab<Arc<Executable<D>>>>,
    /// Captures that have not ended.
    capturing: AtomicUsize,
    /// Events that were last recorded in a capture.
    captured_events: AtomicUsize,
}

pub(crate) struct GraphState {
    pub(crate) model: Model,
    pub(crate) captures: Captures,
}

/// An executable graph.
struct Executable<D: GraphDriver> {
    id: u32,
    flags: u64,
    /// The graph from which it was made; nodes of it name nodes of the executable graph.
    graph: u64,
    memory: MemoryNodes,
    /// The end of this is that of an instantiation of these.
    _instantiated: Instantiated<D>,
    /// The same for its conditional handles.
    _only: Option<OnlyOne<D>>,
    /// The present work. It is held while the library changes its own copy.
    plan: Mutex<Plan>,
    executable: D::Executable,
}

/// Converts a code of the header to an error of the library.
fn failed<D: GraphDriver>(code: Code) -> D::Error {
    D::Error::from(code as u32)
}

/// `CUDA_ERROR_INVALID_VALUE`.
fn invalid<D: GraphDriver>() -> D::Error {
    failed::<D>(Code::CUDA_ERROR_INVALID_VALUE)
}

impl<D: GraphDriver> Graphs<D> {
    /// Without graphs, for a static variable.
    pub const fn new(driver: D) -> Graphs<D> {
        Graphs {
            driver,
            state: Mutex::new(GraphState { model: Model::new(), captures: Captures::new() }),
            objects: UserObjects::new(),
            memory: Mutex::new(GraphMemory::new()),
            conditional: Mutex::new(ConditionalGraphs::new()),
            allocations: AtomicUsize::new(0),
            executables: RwLock::new(Slab::new(HandleKind::Executable)),
            capturing: AtomicUsize::new(0),
            captured_events: AtomicUsize::new(0),
        }
    }

    /// The library's driver.
    pub const fn driver(&self) -> &D {
        &self.driver
    }

    /// Runs an action on the model, and then everything that must happen without its lock.
    fn with<T>(&self, action: impl FnOnce(&mut GraphState) -> std::result::Result<T, Code>) -> Result<T, D> {
        let (outcome, released, owners_gone, conditional_gone) = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let outcome = action(&mut state);
            for (object, count) in state.model.retained.drain(..) {
                // It fails only if the program released more references than it owned.
                let _ = self.objects.retain(object, count);
            }
            self.capturing.store(state.captures.count(), Ordering::Relaxed);
            self.captured_events.store(state.captures.count_events(), Ordering::Relaxed);
            let model = &mut state.model;
            let conditional_gone = std::mem::take(&mut model.conditional_gone);
            let (released, owners_gone) =
                (std::mem::take(&mut model.released), std::mem::take(&mut model.owners_gone));
            (outcome, released, owners_gone, conditional_gone)
        };
        self.conditional_gone(&conditional_gone);
        for owner in owners_gone {
            self.change_memory(|memory| memory.graph_gone(owner));
        }
        for (object, count) in released {
            // The same.
            let _ = self.objects.release(object, count);
        }
        outcome.map_err(failed::<D>)
    }

    fn executable(&self, handle: u64) -> Result<Arc<Executable<D>>, D> {
        let executables = self.executables.read().unwrap_or_else(PoisonError::into_inner);
        executables.get(handle).cloned().ok_or_else(invalid::<D>)
    }

    /// Reads a list of dependencies. Without data they are full ones.
    fn dependencies(&self, nodes: In<u64, D>, data: In<[u8; 8], D>, count: usize) -> Result<Vec<Edge>, D> {
        let nodes = nodes.list(count)?;
        let edges = edges::<D>(data, count)?;
        Ok(nodes.into_iter().zip(edges).collect())
    }
}

/// Reads edge data. Without a pointer all are those of full dependencies.
fn edges<D: GraphDriver>(data: In<[u8; 8], D>, count: usize) -> Result<Vec<EdgeData>, D> {
    if !data.is_given() {
        return Ok(vec![EdgeData::default(); count]);
    }
    let read = |bytes| EdgeData::read(bytes).ok_or_else(invalid::<D>);
    data.list(count)?.into_iter().map(read).collect()
}

/// Returns a list to the program: its length if there is no array, otherwise as much as fits, and null behind its end.
fn store<D: GraphDriver>(list: &[u64], place: Out<u64, D>, count: Out<usize, D>) -> Result<(), D> {
    if !place.is_given() {
        return count.set(list.len());
    }
    let room = count.get()?;
    for index in 0..room {
        place.set_at(index, list.get(index).copied().unwrap_or(0))?;
    }
    count.set(list.len().min(room))
}

/// Returns edge data beside a list; without an array the data must be that of full dependencies.
fn store_edges<D: GraphDriver>(
    list: &[EdgeData],
    has_list: bool,
    place: Out<[u8; 8], D>,
    room: Out<usize, D>,
) -> Result<(), D> {
    if !has_list {
        return if place.is_given() { Err(invalid::<D>()) } else { Ok(()) };
    }
    let room = room.get()?;
    if !place.is_given() {
        let is_lossy = list.iter().take(room).any(|edge| *edge != EdgeData::default());
        return if is_lossy { Err(failed::<D>(Code::CUDA_ERROR_LOSSY_QUERY)) } else { Ok(()) };
    }
    for index in 0..room {
        place.set_at(index, list.get(index).copied().unwrap_or_default().bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
