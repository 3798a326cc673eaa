//! The comparison of `cuGraphExecUpdate`: pairs the nodes of two graphs, and finds the first change that is not allowed.
//!
//! Nodes are paired from the last ones backwards, by the order of edges, as the header describes it.

use std::collections::HashMap;

use sluice_cuda_abi::sys::CUgraphExecUpdateResult as Outcome;

use crate::plan::{ConditionalWork, Copy3D, FillWork, KernelWork, MemoryOperation, Plan, PlanNode, Work};

/// `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`.
const COOPERATIVE: u32 = 2;
/// `CU_LAUNCH_ATTRIBUTE_PRIORITY`.
const PRIORITY: u32 = 8;

/// A change that an executable graph cannot take.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) outcome: Outcome,
    /// Path of the node in the new graph; empty if it is no single node.
    pub(crate) node: Vec<u32>,
    /// Path of the earlier node of a changed edge.
    pub(crate) from: Vec<u32>,
}

impl Change {
    fn of(outcome: Outcome, node: &PlanNode) -> Change {
        Change { outcome, node: vec![node.number], from: Vec::new() }
    }
}

/// The numbers of the last nodes: those on which no other depends, by ascending number.
fn last(plan: &Plan) -> Vec<usize> {
    let mut is_last = vec![true; plan.nodes.len()];
    for dependency in plan.nodes.iter().flat_map(|node| &node.dependencies) {
        if let Some(earlier) = is_last.get_mut(dependency.node as usize) {
            *earlier = false;
        }
    }
    let mut last: Vec<usize> = (0..plan.nodes.len()).filter(|index| is_last[*index]).collect();
    last.sort_by_key(|index| plan.nodes[*index].number);
    last
}

/// Returns the old plan with the work of the new one.
pub(crate) fn adopt(old: &Plan, new: &Plan, uses_priority: bool) -> Result<Plan, Change> {
    let changed = Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    let generic = || Change { outcome: changed, node: Vec::new(), from: Vec::new() };
    if old.nodes.len() != new.nodes.len() {
        return Err(generic());
    }
    let (old_last, new_last) = (last(old), last(new));
    if old_last.len() != new_last.len() {
        let extra = new_last.get(old_last.len()).or(new_last.last());
        return Err(extra.map_or_else(generic, |extra| Change::of(changed, &new.nodes[*extra])));
    }
    // Pairs by the new node; the other map finds an old node that is paired already.
    let (mut pairs, mut taken) = (HashMap::new(), HashMap::new());
    let mut pending: Vec<(usize, usize)> = old_last.into_iter().zip(new_last).collect();
    for (before, after) in &pending {
        pairs.insert(*after, *before);
        taken.insert(*before, *after);
    }
    while let Some((before, after)) = pending.pop() {
        let (old_node, new_node) = (&old.nodes[before], &new.nodes[after]);
        if old_node.dependencies.len() != new_node.dependencies.len() {
            return Err(Change::of(changed, new_node));
        }
        for (one, other) in old_node.dependencies.iter().zip(&new_node.dependencies) {
            let pair = (one.node as usize, other.node as usize);
            let is_known = pairs.get(&pair.1) == Some(&pair.0);
            let is_free = !pairs.contains_key(&pair.1) && !taken.contains_key(&pair.0);
            if one.edge != other.edge || !(is_known || is_free) {
                let from = new.nodes.get(pair.1).map(|node| node.number).into_iter().collect();
                return Err(Change { from, ..Change::of(changed, new_node) });
            }
            if is_free {
                pairs.insert(pair.1, pair.0);
                taken.insert(pair.0, pair.1);
                pending.push(pair);
            }
        }
    }
    let mut nodes = old.nodes.clone();
    for (index, node) in nodes.iter_mut().enumerate() {
        let other = taken.get(&index).and_then(|other| new.nodes.get(*other)).ok_or_else(generic)?;
        node.work = change(&node.work, &other.work, uses_priority).map_err(|mut change| {
            change.node.insert(0, other.number);
            if !change.from.is_empty() {
                change.from.insert(0, other.number);
            }
            change
        })?;
    }
    Ok(Plan { nodes })
}

/// Returns the new work of a node, if an executable graph can take it. An error has an empty path.
pub(crate) fn change(old: &Work, new: &Work, uses_priority: bool) -> Result<Work, Change> {
    match (old, new) {
        (Work::Child(before), Work::Child(after)) => {
            return adopt(before, after, uses_priority).map(Work::Child);
        }
        (Work::Conditional(before), Work::Conditional(after)) => {
            return adopt_bodies(before, after, uses_priority).map(Work::Conditional);
        }
        _ => {}
    }
    match reason(old, new, uses_priority) {
        Some(outcome) => Err(Change { outcome, node: Vec::new(), from: Vec::new() }),
        None => Ok(new.clone()),
    }
}

/// Returns a conditional node with the work of new bodies and their handle.
fn adopt_bodies(
    old: &ConditionalWork,
    new: &ConditionalWork,
    uses_priority: bool,
) -> Result<ConditionalWork, Change> {
    let shape = |work: &ConditionalWork| (work.kind, work.context, work.bodies.len());
    if shape(old) != shape(new) {
        let outcome = Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
        return Err(Change { outcome, node: Vec::new(), from: Vec::new() });
    }
    let mut bodies = Vec::with_capacity(new.bodies.len());
    for (index, (before, after)) in (0..).zip(old.bodies.iter().zip(&new.bodies)) {
        bodies.push(adopt(before, after, uses_priority).map_err(|mut change| {
            for path in [&mut change.node, &mut change.from] {
                if !path.is_empty() {
                    path.insert(0, index);
                }
            }
            change
        })?);
    }
    Ok(ConditionalWork { bodies, ..*new })
}

/// The reason that an executable graph cannot take the new work of a node.
fn reason(old: &Work, new: &Work, uses_priority: bool) -> Option<Outcome> {
    let parameters = |differ: bool| differ.then_some(Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED);
    match (old, new) {
        _ if old.kind() != new.kind() => Some(Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED),
        // The allocations are those of the graph from which the executable was made.
        _ if old.is_of_memory() && old != new => Some(Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED),
        (Work::Kernel(before), Work::Kernel(after)) => {
            // An attribute that was not set is 0.
            let value = |work: &KernelWork, id| work.attribute(id).copied().unwrap_or([0; 64]);
            let differs = |id| value(before, id) != value(after, id);
            if before.context != after.context {
                Some(Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE)
            } else if differs(COOPERATIVE) || uses_priority && differs(PRIORITY) {
                Some(Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED)
            } else {
                None
            }
        }
        (Work::Copy { copy: before, context: old }, Work::Copy { copy: after, context: new }) => {
            let kinds = |copy: &Copy3D| (copy.from.kind, copy.to.kind);
            parameters(old != new || kinds(before) != kinds(after))
        }
        (Work::Fill { fill: before, context: old }, Work::Fill { fill: after, context: new }) => {
            let shape = |fill: &FillWork| (fill.pitch, fill.element, fill.width);
            let is_other = before.height != 1 && shape(before) != shape(after);
            parameters(old != new || before.height != after.height || is_other)
        }
        (
            Work::MemoryOperations { operations: before, context: old },
            Work::MemoryOperations { operations: after, context: new },
        ) => {
            let kinds =
                |list: &[MemoryOperation]| list.iter().map(MemoryOperation::is_write).collect::<Vec<bool>>();
            parameters(old != new || kinds(before) != kinds(after))
        }
        _ => None,
    }
}

/// True if both copies have one row, as an update of a single copy node requires.
pub(crate) fn are_flat(old: &Copy3D, new: &Copy3D) -> bool {
    [old, new].iter().all(|copy| copy.height <= 1 && copy.depth <= 1)
}

#[cfg(test)]
mod tests;
