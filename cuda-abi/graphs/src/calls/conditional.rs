//! Conditional nodes: their handles, and the driver's graphs in which handles live.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use sluice_cuda_abi::sys::CUresult as Code;

use super::{Graphs, Out, Result, failed, invalid};
use crate::driver::{ConditionalHandle, GraphDriver};
use crate::graph::{Conditional, Edge, NodeWork, Owner};
use crate::layout::{CONDITIONAL_GRAPHS, ConditionalAnswer};
use crate::plan::ConditionalKind;

/// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
const ASSIGN_DEFAULT: u32 = 1;
/// More bodies than a program can tell apart usefully: each is a graph of its own.
const MOST_BODIES: u32 = 1 << 12;

/// The driver's side of a graph that has conditional handles.
pub(crate) struct ConditionalGraph<D: GraphDriver> {
    graph: Arc<D::ConditionalGraph>,
    is_instantiated: bool,
}

/// Graphs with conditional handles, by their numbers.
pub(crate) type ConditionalGraphs<D> = BTreeMap<Owner, ConditionalGraph<D>>;

/// The instantiation of a graph with conditional handles, of which each has one at a time.
pub(crate) struct OnlyOne<D: GraphDriver> {
    graphs: &'static Graphs<D>,
    owner: Owner,
}

impl<D: GraphDriver> Drop for OnlyOne<D> {
    fn drop(&mut self) {
        if let Some(known) = self.graphs.conditional_graphs().get_mut(&self.owner) {
            known.is_instantiated = false;
        }
    }
}

impl<D: GraphDriver> Graphs<D> {
    fn conditional_graphs(&self) -> MutexGuard<'_, ConditionalGraphs<D>> {
        self.conditional.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets graphs that are gone. The library may call its worker for their end.
    pub(super) fn conditional_gone(&self, gone: &[Owner]) {
        for owner in gone {
            let ended = self.conditional_graphs().remove(owner);
            drop(ended);
        }
    }

    /// The driver's graph of a graph with conditional handles.
    pub(super) fn conditional_graph(&self, graph: u64) -> Result<Option<Arc<D::ConditionalGraph>>, D> {
        let owner = self.with(|state| Ok(Owner::from(state.model.graph(graph)?.id)))?;
        Ok(self.conditional_graphs().get(&owner).map(|known| Arc::clone(&known.graph)))
    }

    /// Begins the instantiation of a graph, which may have conditional handles.
    pub(super) fn instantiate_only(&'static self, graph: u64) -> Result<Option<OnlyOne<D>>, D> {
        let owner = self.with(|state| Ok(Owner::from(state.model.graph(graph)?.id)))?;
        let mut graphs = self.conditional_graphs();
        let Some(known) = graphs.get_mut(&owner) else { return Ok(None) };
        if std::mem::replace(&mut known.is_instantiated, true) {
            return Err(failed::<D>(Code::CUDA_ERROR_NOT_SUPPORTED));
        }
        Ok(Some(OnlyOne { graphs: self, owner }))
    }

    /// `cuGraphConditionalHandleCreate`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_conditional_handle_create(
        &self,
        place: Out<u64, D>,
        graph: u64,
        context: u64,
        value: u32,
        flags: u32,
    ) -> Result<(), D> {
        place.required()?;
        if flags & !ASSIGN_DEFAULT != 0 {
            return Err(invalid::<D>());
        }
        let (root, owner) = self.with(|state| state.model.conditional_root(graph))?;
        let context = self.context_or_current(context)?;
        let known = self.conditional_graphs().get(&owner).map(|known| Arc::clone(&known.graph));
        let of = match known {
            Some(known) => known,
            None => {
                let made = Arc::new(self.driver.conditional_graph(context)?);
                let mut graphs = self.conditional_graphs();
                // Another thread may have made it meanwhile.
                let entry = graphs.entry(owner);
                let known = entry.or_insert_with(|| ConditionalGraph { graph: made, is_instantiated: false });
                Arc::clone(&known.graph)
            }
        };
        let condition = ConditionalHandle { context, value, is_assigned: flags & ASSIGN_DEFAULT != 0 };
        let created = self.driver.create_handle(&of, condition).and_then(|handle| {
            self.with(|state| state.model.add_handle(root, handle, context))?;
            Ok(handle)
        });
        if created.is_err() && self.with(|state| state.model.graph(root).map(drop)).is_err() {
            // Another thread has destroyed the graph.
            self.conditional_gone(&[owner]);
        }
        place.set(created?)
    }

    /// Adds a conditional node, and stores the array of its bodies in the parameters.
    pub(super) fn add_conditional(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: &[Edge],
        parameters: Out<ConditionalAnswer, D>,
    ) -> Result<(), D> {
        let stated = parameters.get()?;
        let kind = ConditionalKind::of(stated.kind).ok_or_else(invalid::<D>)?;
        let bodies = usize::try_from(stated.size).map_err(|_| invalid::<D>())?;
        if stated.size > MOST_BODIES || !kind.takes(bodies) {
            return Err(invalid::<D>());
        }
        let context = self.context_or_current(stated.context)?;
        let (node, array) = self.with(|state| {
            let of = (stated.handle, kind, context);
            let (node, bodies) = state.model.add_conditional(graph, of, bodies, before)?;
            let room = state.model.node_mut(node)?.room(bodies.len());
            room.copy_from_slice(&bodies);
            Ok((node, room.as_mut_ptr().expose_provenance() as u64))
        })?;
        parameters.cast::<u64>().set_at(CONDITIONAL_GRAPHS, array)?;
        place.set(node)
    }

    /// The parameters of a conditional node, if it is one.
    pub(super) fn conditional_answer(&self, node: u64) -> Result<Option<ConditionalAnswer>, D> {
        self.with(|state| {
            let node = state.model.node_mut(node)?;
            let NodeWork::Conditional(conditional) = &node.work else { return Ok(None) };
            let &Conditional { handle, kind, context, ref bodies } = conditional;
            let bodies = bodies.clone();
            let room = node.room(bodies.len());
            room.copy_from_slice(&bodies);
            let graphs = room.as_mut_ptr().expose_provenance() as u64;
            let size = u32::try_from(bodies.len()).map_err(|_| Code::CUDA_ERROR_UNKNOWN)?;
            Ok(Some(ConditionalAnswer { handle, kind: kind as u32, size, graphs, context }))
        })
    }
}
