//! Memory of graphs: the allocations of nodes, and the graphs that own them.
//!
//! An allocation has its memory from the making of its node until its graph and the executable made of it are gone, launches of that are
//! complete, and it was freed; so its address stays, and a launch needs no memory. A launch makes it *live* and a free ends that. The model
//! only counts: the library allocates and frees.

use std::collections::BTreeMap;

use sluice_cuda_abi::sys::CUresult as Code;

use crate::graph::{INVALID, Owner, Result};
use crate::plan::{Plan, Work};

/// The place of an allocation's free node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FreeNode {
    None,
    /// In the graph that owns the allocation.
    Inside,
    /// In another graph.
    Outside,
}

struct GraphAllocation {
    owner: Owner,
    bytes: u64,
    device: i32,
    /// The context with which the memory ends.
    context: u64,
    free_node: FreeNode,
    /// A launch made it, and nothing has freed it since.
    is_live: bool,
}

/// A graph with allocations.
#[derive(Default)]
struct OwnerState {
    is_graph_gone: bool,
    /// There is an executable. It may have ended, with launches that are not complete: then something still holds this.
    is_instantiated: bool,
    /// Live allocations, executables, and streams that have not reached a free.
    holds: u64,
    allocations: Vec<u64>,
}

#[derive(Clone, Copy, Default)]
struct Usage {
    now: u64,
    used_high: u64,
    reserved_high: u64,
}

/// The allocations of all graphs of a process.
pub(crate) struct GraphMemory {
    owners: BTreeMap<Owner, OwnerState>,
    allocations: BTreeMap<u64, GraphAllocation>,
    usage: BTreeMap<i32, Usage>,
}

/// The nodes for memory of an executable.
#[derive(Default)]
pub(crate) struct MemoryNodes {
    /// Allocations that the graph does not free.
    makes: Vec<u64>,
    /// Allocations of other graphs that it frees.
    frees: Vec<u64>,
}

/// The effect of a launch, to be undone if the library refuses it.
#[derive(Default)]
pub(crate) struct LaunchEffect {
    made: Vec<u64>,
    freed: Vec<u64>,
    /// The owners of the freed allocations, which the caller now holds.
    pub(crate) owners: Vec<Owner>,
}

impl MemoryNodes {
    pub(crate) fn of(plan: &Plan) -> MemoryNodes {
        fn collect(plan: &Plan, made: &mut Vec<u64>, freed: &mut Vec<u64>) {
            for node in &plan.nodes {
                match &node.work {
                    Work::Allocation(allocation) => made.push(allocation.address),
                    Work::Free { address } => freed.push(*address),
                    Work::Child(inside) => collect(inside, made, freed),
                    _ => {}
                }
            }
        }
        let (mut made, mut freed) = (Vec::new(), Vec::new());
        collect(plan, &mut made, &mut freed);
        MemoryNodes {
            makes: made.iter().copied().filter(|address| !freed.contains(address)).collect(),
            frees: freed.into_iter().filter(|address| !made.contains(address)).collect(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.makes.is_empty() && self.frees.is_empty()
    }
}

impl GraphMemory {
    pub(crate) const fn new() -> GraphMemory {
        GraphMemory { owners: BTreeMap::new(), allocations: BTreeMap::new(), usage: BTreeMap::new() }
    }

    /// Number of allocations.
    pub(crate) fn count(&self) -> usize {
        self.allocations.len()
    }

    /// Adds an allocation of a graph, in a context of a device.
    pub(crate) fn add(&mut self, owner: Owner, address: u64, bytes: u64, (device, context): (i32, u64)) {
        let usage = self.usage.entry(device).or_default();
        usage.now += bytes;
        usage.used_high = usage.used_high.max(usage.now);
        usage.reserved_high = usage.reserved_high.max(usage.now);
        self.owners.entry(owner).or_default().allocations.push(address);
        let allocation =
            GraphAllocation { owner, bytes, device, context, free_node: FreeNode::None, is_live: false };
        self.allocations.insert(address, allocation);
    }

    /// Removes an allocation whose node was not made.
    pub(crate) fn withdraw(&mut self, address: u64) {
        if let Some(allocation) = self.allocations.get(&address)
            && let Some(owner) = self.owners.get_mut(&allocation.owner)
        {
            owner.allocations.retain(|known| *known != address);
        }
        self.forget(address);
    }

    fn forget(&mut self, address: u64) {
        if let Some(gone) = self.allocations.remove(&address)
            && let Some(usage) = self.usage.get_mut(&gone.device)
        {
            usage.now = usage.now.saturating_sub(gone.bytes);
        }
    }

    /// Records a free node in a graph, and returns the record before.
    pub(crate) fn add_free_node(&mut self, owner: Owner, address: u64) -> Result<FreeNode> {
        let allocation = self.allocations.get_mut(&address).ok_or(INVALID)?;
        let before = allocation.free_node;
        allocation.free_node = match before {
            FreeNode::None if allocation.owner == owner => FreeNode::Inside,
            FreeNode::None | FreeNode::Outside if allocation.owner != owner => FreeNode::Outside,
            _ => return Err(INVALID),
        };
        Ok(before)
    }

    /// Restores the record of a free node that was not made.
    pub(crate) fn restore_free_node(&mut self, address: u64, before: FreeNode) {
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.free_node = before;
        }
    }

    /// A graph is gone. Returns allocations to be freed, as the other functions do.
    pub(crate) fn graph_gone(&mut self, owner: Owner) -> Vec<u64> {
        if let Some(state) = self.owners.get_mut(&owner) {
            state.is_graph_gone = true;
        }
        self.settle(owner)
    }

    /// A context is about to be destroyed, and the memory of its allocations with it: the library frees none of them.
    pub(crate) fn context_gone(&mut self, context: u64) -> Vec<u64> {
        let of_context = |allocation: &GraphAllocation| allocation.context == context;
        let gone: Vec<(u64, Owner, bool)> = self
            .allocations
            .iter()
            .filter(|(_, allocation)| of_context(allocation))
            .map(|(address, allocation)| (*address, allocation.owner, allocation.is_live))
            .collect();
        for (address, _, _) in &gone {
            self.withdraw(*address);
        }
        let held = gone.into_iter().filter(|(_, _, is_live)| *is_live).map(|(_, owner, _)| owner);
        self.release(&held.collect::<Vec<Owner>>())
    }

    /// The graphs of an executable are instantiated, which holds them.
    pub(crate) fn instantiate(&mut self, owners: &[Owner]) -> Result {
        let is_instantiated =
            |owner: &Owner| self.owners.get(owner).is_some_and(|state| state.is_instantiated);
        if owners.iter().any(is_instantiated) {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        for owner in owners {
            let state = self.owners.entry(*owner).or_default();
            state.is_instantiated = true;
            state.holds += 1;
        }
        Ok(())
    }

    /// The executable is gone; its launches may not be complete.
    pub(crate) fn executable_gone(&mut self, owners: &[Owner]) -> Vec<u64> {
        let mut gone = Vec::new();
        for owner in owners {
            if let Some(state) = self.owners.get_mut(owner) {
                state.is_instantiated = false;
            }
            gone.extend(self.settle(*owner));
        }
        gone
    }

    /// Ends a hold of each owner.
    pub(crate) fn release(&mut self, owners: &[Owner]) -> Vec<u64> {
        let mut gone = Vec::new();
        for owner in owners {
            if let Some(state) = self.owners.get_mut(owner) {
                state.holds = state.holds.saturating_sub(1);
            }
            gone.extend(self.settle(*owner));
        }
        gone
    }

    fn settle(&mut self, owner: Owner) -> Vec<u64> {
        let is_free = |state: &OwnerState| state.is_graph_gone && !state.is_instantiated && state.holds == 0;
        if !self.owners.get(&owner).is_some_and(is_free) {
            return Vec::new();
        }
        let gone = self.owners.remove(&owner).unwrap_or_default().allocations;
        gone.iter().for_each(|address| self.forget(*address));
        gone
    }

    /// An executable is launched.
    pub(crate) fn launch(&mut self, nodes: &MemoryNodes, frees_first: bool) -> Result<LaunchEffect> {
        let is_live = |address: &u64| self.allocations.get(address).is_some_and(|known| known.is_live);
        if !frees_first && nodes.makes.iter().any(is_live) {
            return Err(INVALID);
        }
        let mut effect = LaunchEffect::default();
        for address in &nodes.frees {
            if let Some(owner) = self.end_life(*address) {
                effect.freed.push(*address);
                effect.owners.push(owner);
            }
        }
        for address in &nodes.makes {
            if self.begin_life(*address) {
                effect.made.push(*address);
            }
        }
        Ok(effect)
    }

    /// A launch was refused.
    pub(crate) fn undo(&mut self, effect: LaunchEffect) -> Vec<u64> {
        let made =
            effect.made.into_iter().filter_map(|address| self.end_life(address)).collect::<Vec<Owner>>();
        effect.freed.into_iter().for_each(|address| _ = self.begin_life(address));
        self.release(&[made, effect.owners].concat())
    }

    /// False if it is live already, or gone.
    fn begin_life(&mut self, address: u64) -> bool {
        let Some(allocation) = self.allocations.get_mut(&address).filter(|known| !known.is_live) else {
            return false;
        };
        allocation.is_live = true;
        if let Some(state) = self.owners.get_mut(&allocation.owner) {
            state.holds += 1;
        }
        true
    }

    /// Returns the owner, whose hold the caller now has, if the allocation is live.
    fn end_life(&mut self, address: u64) -> Option<Owner> {
        let allocation = self.allocations.get_mut(&address).filter(|known| known.is_live)?;
        allocation.is_live = false;
        Some(allocation.owner)
    }

    /// The program frees an allocation by a call. `None` if the address is none of a graph's; otherwise the owner, which the caller then holds.
    pub(crate) fn free(&mut self, address: u64) -> Option<Result<Owner>> {
        let allocation = self.allocations.get(&address)?;
        let may = allocation.free_node != FreeNode::Inside;
        Some(if may { self.end_life(address).ok_or(INVALID) } else { Err(INVALID) })
    }

    /// `CUgraphMem_attribute` of a device.
    pub(crate) fn attribute(&self, device: i32, attribute: u32) -> Result<u64> {
        let usage = self.usage.get(&device).copied().unwrap_or_default();
        match attribute {
            USED | RESERVED => Ok(usage.now),
            USED_HIGH => Ok(usage.used_high),
            RESERVED_HIGH => Ok(usage.reserved_high),
            _ => Err(INVALID),
        }
    }

    /// Resets a high-water mark to the present value.
    pub(crate) fn reset(&mut self, device: i32, attribute: u32) -> Result {
        let usage = self.usage.entry(device).or_default();
        match attribute {
            USED_HIGH => usage.used_high = usage.now,
            RESERVED_HIGH => usage.reserved_high = usage.now,
            _ => return Err(INVALID),
        }
        Ok(())
    }
}

const USED: u32 = 0;
const USED_HIGH: u32 = 1;
const RESERVED: u32 = 2;
const RESERVED_HIGH: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [u64; 0] = [];

    fn memory() -> GraphMemory {
        let mut memory = GraphMemory::new();
        memory.add(1, 100, 10, (0, 7));
        memory.add(1, 200, 20, (0, 8));
        memory
    }

    fn nodes(makes: &[u64], frees: &[u64]) -> MemoryNodes {
        MemoryNodes { makes: makes.to_vec(), frees: frees.to_vec() }
    }

    // Promise: C76
    #[test]
    fn memory_is_freed_when_graph_executable_launches_and_live_allocations_are_gone() {
        let mut memory = memory();
        memory.instantiate(&[1]).unwrap();
        assert_eq!(memory.instantiate(&[1]), Err(Code::CUDA_ERROR_NOT_SUPPORTED), "one at a time");
        memory.launch(&nodes(&[100], &[]), false).unwrap();
        assert_eq!(memory.graph_gone(1), NONE);
        assert_eq!(memory.executable_gone(&[1]), NONE);
        assert_eq!(memory.release(&[1]), NONE, "an allocation is live");
        assert_eq!(memory.free(200), Some(Err(INVALID)), "it is not live");
        assert_eq!(memory.free(300), None);
        let owner = memory.free(100).unwrap().unwrap();
        assert_eq!(memory.free(100), Some(Err(INVALID)), "twice");
        assert_eq!(memory.attribute(0, USED), Ok(30));
        assert_eq!(memory.release(&[owner]), [100, 200]);
        assert_eq!((memory.attribute(0, RESERVED), memory.attribute(0, USED_HIGH)), (Ok(0), Ok(30)));
        memory.reset(0, USED_HIGH).unwrap();
        assert_eq!((memory.attribute(0, USED_HIGH), memory.attribute(0, 4)), (Ok(0), Err(INVALID)));
    }

    // Promise: C76
    #[test]
    fn launch_is_refused_while_an_allocation_is_live_unless_it_frees_first() {
        let mut memory = memory();
        memory.instantiate(&[1]).unwrap();
        let all = nodes(&[100, 200], &[]);
        memory.launch(&all, false).unwrap();
        assert!(matches!(memory.launch(&all, false), Err(INVALID)));
        memory.launch(&all, true).unwrap();
        for address in [100, 200] {
            let owner = memory.free(address).unwrap().unwrap();
            assert_eq!(memory.release(&[owner]), NONE);
        }
        let refused = memory.launch(&all, false).unwrap();
        assert_eq!(memory.undo(refused), NONE);
        assert!(memory.launch(&all, false).is_ok(), "the library refused the launch before");
        // Another graph frees them.
        assert_eq!((memory.graph_gone(1), memory.executable_gone(&[1])), (vec![], vec![]));
        assert_eq!(memory.release(&[1]), NONE);
        let effect = memory.launch(&nodes(&[], &[100, 200]), false).unwrap();
        assert_eq!(memory.release(&effect.owners), [100, 200]);
    }

    #[test]
    fn memory_of_a_context_that_is_destroyed_is_not_freed_again() {
        let mut memory = memory();
        memory.instantiate(&[1]).unwrap();
        memory.launch(&nodes(&[100, 200], &[]), false).unwrap();
        assert_eq!(memory.context_gone(7), NONE);
        assert_eq!((memory.count(), memory.free(100)), (1, None), "another allocation may have its address");
        assert_eq!((memory.graph_gone(1), memory.executable_gone(&[1])), (vec![], vec![]));
        let owner = memory.free(200).unwrap().unwrap();
        assert_eq!(memory.release(&[1]), NONE);
        assert_eq!(memory.release(&[owner]), [200]);
    }

    // Promise: C76
    #[test]
    fn allocation_has_free_nodes_in_its_own_graph_or_in_others() {
        let mut memory = memory();
        assert_eq!(memory.add_free_node(1, 300), Err(INVALID));
        assert_eq!(memory.add_free_node(1, 100), Ok(FreeNode::None));
        assert_eq!(memory.add_free_node(1, 100), Err(INVALID), "twice in its graph");
        assert_eq!(memory.add_free_node(2, 100), Err(INVALID), "also in another");
        assert_eq!(memory.free(100), Some(Err(INVALID)), "its graph frees it");
        assert_eq!(memory.add_free_node(2, 200), Ok(FreeNode::None));
        assert_eq!(memory.add_free_node(3, 200), Ok(FreeNode::Outside));
        assert_eq!(memory.add_free_node(1, 200), Err(INVALID), "another graph frees it");
        memory.restore_free_node(100, FreeNode::None);
        assert_eq!(memory.add_free_node(2, 100), Ok(FreeNode::None));
        memory.withdraw(100);
        assert_eq!(memory.graph_gone(1), [200]);
    }
}
