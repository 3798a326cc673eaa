//! The model: graphs, their nodes and edges. In one file: their rules hold together.
//!
//! It has no lock and calls no library. A graph is allowed to have a cycle until it is instantiated, as the header says; a plan has
//! none.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use sluice_cuda_abi::sys::CUresult as Code;

use crate::plan::{ConditionalKind, ConditionalWork, Dependency, EdgeData, Plan, PlanNode, Work};
use sluice_cuda_frontend::handles::{HandleKind, Slab};

/// Results of the model: the codes of the header.
pub(crate) type Result<T = ()> = std::result::Result<T, Code>;

/// For arguments that the header does not allow.
pub(crate) const INVALID: Code = Code::CUDA_ERROR_INVALID_VALUE;

/// `CUgraphDependencyType` of an edge that a kernel releases early.
const PROGRAMMATIC: u8 = 1;
/// The last output port of a kernel.
const LAST_PORT: u8 = 2;

/// A graph with nodes for memory, by its id.
pub(crate) type Owner = u64;

/// An edge from a node.
pub(crate) type Edge = (u64, EdgeData);

/// The work of a node of the model.
#[derive(Debug)]
pub(crate) enum NodeWork {
    /// Every kind but [`Work::Child`] and [`Work::Conditional`].
    Plain(Work),
    /// A graph that the node owns.
    Child(u64),
    /// Graphs that the node owns, of which a value selects one.
    Conditional(Conditional),
}

impl NodeWork {
    /// The graphs that the node owns.
    pub(crate) fn inner(&self) -> &[u64] {
        match self {
            NodeWork::Plain(_) => &[],
            NodeWork::Child(child) => std::slice::from_ref(child),
            NodeWork::Conditional(conditional) => &conditional.bodies,
        }
    }

    /// True if a body of a conditional node may have such a node, as the header lists them.
    fn may_be_in_body(&self, context: u64) -> bool {
        match self {
            NodeWork::Plain(Work::Kernel(kernel)) => kernel.context == context,
            NodeWork::Plain(work) => matches!(work, Work::Empty | Work::Copy { .. } | Work::Fill { .. }),
            NodeWork::Conditional(conditional) => conditional.context == context,
            NodeWork::Child(_) => true,
        }
    }
}

/// A conditional node.
#[derive(Debug)]
pub(crate) struct Conditional {
    pub(crate) handle: u64,
    pub(crate) kind: ConditionalKind,
    pub(crate) context: u64,
    pub(crate) bodies: Vec<u64>,
}

/// A handle of a value for a conditional node.
struct ConditionHandle {
    context: u64,
    /// A node was made with it.
    is_used: bool,
}

/// A node.
pub(crate) struct Node {
    pub(crate) graph: u64,
    /// Its number in its graph, which clones keep.
    pub(crate) number: u32,
    pub(crate) work: NodeWork,
    /// Earlier nodes, in the order in which the edges were added.
    pub(crate) before: Vec<Edge>,
    /// Later nodes.
    pub(crate) after: Vec<u64>,
    /// The node that this one was cloned from, or 0.
    original: u64,
    /// Arrays that queries of parameters returned; they live as long as the node.
    returned: Vec<Box<[u64]>>,
}

impl Node {
    /// Memory for a query of parameters, which lives as long as the node. Queries of one size share it.
    pub(crate) fn room(&mut self, words: usize) -> &mut [u64] {
        let place = match self.returned.iter().position(|array| array.len() == words) {
            Some(place) => place,
            None => {
                self.returned.push(vec![0; words].into());
                self.returned.len() - 1
            }
        };
        &mut self.returned[place]
    }
}

/// A graph.
pub(crate) struct Graph {
    /// Unique in the process.
    pub(crate) id: u32,
    /// In the order of their creation.
    pub(crate) nodes: Vec<u64>,
    next_number: u32,
    /// The node that owns this graph, or 0.
    pub(crate) owner: u64,
    /// The index of the graph among those of its owner.
    body: u32,
    /// Handles for conditional nodes of this graph and those inside it. Only an outermost graph has any.
    conditions: BTreeMap<u64, ConditionHandle>,
    /// The graph that this one was cloned from, or 0.
    original: u64,
    /// True while a capture adds nodes.
    pub(crate) is_capturing: bool,
    /// References to user objects.
    objects: BTreeMap<u64, u32>,
    /// It has, or had, nodes for memory: then no node of it can go, and it has no copy.
    has_memory: bool,
}

/// All graphs and nodes of a process.
pub(crate) struct Model {
    graphs: Slab<Graph>,
    nodes: Slab<Node>,
    next_id: u32,
    /// References to user objects that destroyed graphs had. The owner of the model takes them.
    pub(crate) released: Vec<(u64, u32)>,
    /// Graphs with nodes for memory that were destroyed. The owner of the model takes them.
    pub(crate) owners_gone: Vec<Owner>,
    /// Graphs with conditional handles that were destroyed. The owner of the model takes them.
    pub(crate) conditional_gone: Vec<Owner>,
    /// References to user objects that clones need. The owner of the model takes them.
    pub(crate) retained: Vec<(u64, u32)>,
}

/// The reason that a graph has no plan.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoPlan {
    /// This node is in a cycle, or behind one.
    Cycle(u64),
    /// This node is in the body of a conditional node, which must not have such a node.
    InBody(u64),
    /// The graph has a handle that no conditional node uses.
    UnusedHandle,
    /// The model's code.
    Failed(Code),
}

impl Model {
    pub(crate) const fn new() -> Model {
        Model {
            graphs: Slab::new(HandleKind::Graph),
            nodes: Slab::new(HandleKind::Node),
            next_id: 1,
            released: Vec::new(),
            owners_gone: Vec::new(),
            conditional_gone: Vec::new(),
            retained: Vec::new(),
        }
    }

    /// Returns an id for a graph or an executable graph.
    pub(crate) fn take_id(&mut self) -> u32 {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1).max(1);
        id
    }

    /// Makes a graph without nodes.
    pub(crate) fn create(&mut self) -> Result<u64> {
        let id = self.take_id();
        let graph = Graph {
            id,
            nodes: Vec::new(),
            next_number: 0,
            owner: 0,
            body: 0,
            conditions: BTreeMap::new(),
            original: 0,
            is_capturing: false,
            objects: BTreeMap::new(),
            has_memory: false,
        };
        self.graphs.insert(graph).ok_or(Code::CUDA_ERROR_OUT_OF_MEMORY)
    }

    pub(crate) fn graph(&self, graph: u64) -> Result<&Graph> {
        self.graphs.get(graph).ok_or(INVALID)
    }

    pub(crate) fn graph_mut(&mut self, graph: u64) -> Result<&mut Graph> {
        self.graphs.get_mut(graph).ok_or(INVALID)
    }

    pub(crate) fn node(&self, node: u64) -> Result<&Node> {
        self.nodes.get(node).ok_or(INVALID)
    }

    pub(crate) fn node_mut(&mut self, node: u64) -> Result<&mut Node> {
        self.nodes.get_mut(node).ok_or(INVALID)
    }

    /// The work of a node without a graph inside.
    pub(crate) fn work(&self, node: u64) -> Result<&Work> {
        match &self.node(node)?.work {
            NodeWork::Plain(work) => Ok(work),
            NodeWork::Child(_) | NodeWork::Conditional(_) => Err(INVALID),
        }
    }

    /// Replaces the work of a node; its kind must stay.
    pub(crate) fn set_work(&mut self, node: u64, new: Work) -> Result {
        match &mut self.node_mut(node)?.work {
            NodeWork::Plain(work) if work.kind() == new.kind() => {
                *work = new;
                Ok(())
            }
            _ => Err(INVALID),
        }
    }

    /// Takes the work of a node, which is empty then.
    pub(crate) fn take_work(&mut self, node: u64) -> Result<NodeWork> {
        Ok(std::mem::replace(&mut self.node_mut(node)?.work, NodeWork::Plain(Work::Empty)))
    }

    /// Replaces the work of a node, with the graphs that it owned.
    pub(crate) fn put_work(&mut self, node: u64, work: NodeWork) -> Result {
        for (index, inside) in (0..).zip(work.inner().to_vec()) {
            let inside = self.graph_mut(inside)?;
            (inside.owner, inside.body) = (node, index);
        }
        let old = std::mem::replace(&mut self.node_mut(node)?.work, work);
        old.inner().iter().for_each(|inside| self.remove(*inside));
        Ok(())
    }

    /// Takes the references to user objects of a graph. The owner of the model releases them.
    pub(crate) fn release_objects(&mut self, graph: u64) -> Result {
        let objects = std::mem::take(&mut self.graph_mut(graph)?.objects);
        self.released.extend(objects);
        Ok(())
    }

    /// Adds a node. A child graph must have no owner, and gets this node.
    pub(crate) fn add(&mut self, graph: u64, work: NodeWork, before: &[Edge]) -> Result<u64> {
        self.graph(graph)?;
        self.check_dependencies(graph, before)?;
        let to_kernel = matches!(&work, NodeWork::Plain(Work::Kernel(_)));
        let is_of_memory = matches!(&work, NodeWork::Plain(work) if work.is_of_memory());
        for (from, edge) in before {
            self.check_edge(*from, to_kernel, *edge)?;
        }
        if let NodeWork::Child(child) = &work {
            let owned = self.graph(*child)?;
            if owned.owner != 0 || owned.is_capturing || self.is_within(graph, *child)? {
                return Err(INVALID);
            }
            self.without_conditions(*child)?;
        }
        let inner = work.inner().to_vec();
        let number = self.graph(graph)?.next_number;
        let next_number = number.checked_add(1).ok_or(Code::CUDA_ERROR_OUT_OF_MEMORY)?;
        let node = Node {
            graph,
            number,
            work,
            before: before.to_vec(),
            after: Vec::new(),
            original: 0,
            returned: Vec::new(),
        };
        let node = self.nodes.insert(node).ok_or(Code::CUDA_ERROR_OUT_OF_MEMORY)?;
        let graph = self.graph_mut(graph)?;
        graph.next_number = next_number;
        graph.nodes.push(node);
        graph.has_memory |= is_of_memory;
        for (from, _) in before {
            self.node_mut(*from)?.after.push(node);
        }
        for (index, inside) in (0..).zip(inner) {
            let inside = self.graph_mut(inside)?;
            (inside.owner, inside.body) = (node, index);
        }
        Ok(node)
    }

    /// The outermost graph around a graph that may have conditional nodes, and its number. A child graph must not.
    pub(crate) fn conditional_root(&self, mut graph: u64) -> Result<(u64, Owner)> {
        loop {
            let found = self.graph(graph)?;
            if found.owner == 0 {
                return Ok((graph, Owner::from(found.id)));
            }
            let owner = self.node(found.owner)?;
            if !matches!(owner.work, NodeWork::Conditional(_)) {
                return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
            }
            graph = owner.graph;
        }
    }

    /// Adds a handle to an outermost graph.
    pub(crate) fn add_handle(&mut self, root: u64, handle: u64, context: u64) -> Result {
        let graph = self.graph_mut(root)?;
        graph.conditions.insert(handle, ConditionHandle { context, is_used: false });
        Ok(())
    }

    /// Checks that a handle belongs to the graph and to the context, and that no node uses it.
    pub(crate) fn check_handle(&self, graph: u64, handle: u64, context: u64) -> Result {
        let (root, _) = self.conditional_root(graph)?;
        match self.graph(root)?.conditions.get(&handle) {
            Some(known) if !known.is_used && known.context == context => Ok(()),
            _ => Err(INVALID),
        }
    }

    /// Adds a conditional node with bodies that have no nodes. Returns it with the bodies.
    pub(crate) fn add_conditional(
        &mut self,
        graph: u64,
        (handle, kind, context): (u64, ConditionalKind, u64),
        bodies: usize,
        before: &[Edge],
    ) -> Result<(u64, Vec<u64>)> {
        self.check_handle(graph, handle, context)?;
        let mut made = Vec::new();
        let added = (0..bodies).try_for_each(|_| self.create().map(|body| made.push(body))).and_then(|()| {
            let conditional = Conditional { handle, kind, context, bodies: made.clone() };
            self.add(graph, NodeWork::Conditional(conditional), before)
        });
        let node = match added {
            Ok(node) => node,
            Err(code) => {
                made.into_iter().for_each(|body| self.remove(body));
                return Err(code);
            }
        };
        let (root, _) = self.conditional_root(graph)?;
        if let Some(known) = self.graph_mut(root)?.conditions.get_mut(&handle) {
            known.is_used = true;
        }
        Ok((node, made))
    }

    /// Refuses a graph with conditional nodes, as the header requires for copies and child graphs.
    pub(crate) fn without_conditions(&self, graph: u64) -> Result {
        let found = self.graph(graph)?;
        let is_conditional =
            |node: &u64| self.node(*node).is_ok_and(|node| matches!(node.work, NodeWork::Conditional(_)));
        if !found.conditions.is_empty() || found.nodes.iter().any(is_conditional) {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        Ok(())
    }

    /// True if `graph` is `outer` or in a child graph of it.
    fn is_within(&self, mut graph: u64, outer: u64) -> Result<bool> {
        loop {
            if graph == outer {
                return Ok(true);
            }
            match self.graph(graph)?.owner {
                0 => return Ok(false),
                owner => graph = self.node(owner)?.graph,
            }
        }
    }

    /// Checks that all nodes are different ones of the graph.
    pub(crate) fn check_dependencies(&self, graph: u64, nodes: &[Edge]) -> Result {
        let mut seen = HashSet::with_capacity(nodes.len());
        for (node, _) in nodes {
            if self.node(*node)?.graph != graph || !seen.insert(*node) {
                return Err(INVALID);
            }
        }
        Ok(())
    }

    /// Checks the data of an edge: only a kernel has output ports, and only kernels are released early.
    fn check_edge(&self, from: u64, to_kernel: bool, edge: EdgeData) -> Result {
        let from_kernel = matches!(&self.node(from)?.work, NodeWork::Plain(Work::Kernel(_)));
        let fits = match edge {
            EdgeData { from_port: 0, to_port: 0, kind: 0 } => true,
            EdgeData { from_port, to_port: 0, kind } => {
                from_kernel
                    && from_port <= LAST_PORT
                    && (kind == 0 || kind == PROGRAMMATIC && from_port != 0 && to_kernel)
            }
            _ => false,
        };
        if fits { Ok(()) } else { Err(INVALID) }
    }

    /// Adds edges: all of them or none.
    pub(crate) fn connect(&mut self, graph: u64, edges: &[(u64, u64, EdgeData)]) -> Result {
        self.graph(graph)?;
        let mut new = HashSet::new();
        for (from, to, edge) in edges {
            let to_node = self.node(*to)?;
            if self.node(*from)?.graph != graph || to_node.graph != graph || from == to {
                return Err(INVALID);
            }
            let to_kernel = matches!(&to_node.work, NodeWork::Plain(Work::Kernel(_)));
            self.check_edge(*from, to_kernel, *edge)?;
            if to_node.before.iter().any(|(node, _)| node == from) || !new.insert((*from, *to)) {
                return Err(INVALID);
            }
        }
        for (from, to, edge) in edges {
            self.node_mut(*to)?.before.push((*from, *edge));
            self.node_mut(*from)?.after.push(*to);
        }
        Ok(())
    }

    /// Removes edges: all of them or none.
    pub(crate) fn disconnect(&mut self, graph: u64, edges: &[(u64, u64, EdgeData)]) -> Result {
        self.without_memory(graph)?;
        let mut gone = HashSet::new();
        for (from, to, edge) in edges {
            let to_node = self.node(*to)?;
            let exists = to_node.before.contains(&(*from, *edge));
            if to_node.graph != graph || !exists || !gone.insert((*from, *to)) {
                return Err(INVALID);
            }
        }
        for (from, to, _) in edges {
            self.node_mut(*to)?.before.retain(|(node, _)| node != from);
            self.node_mut(*from)?.after.retain(|node| node != to);
        }
        Ok(())
    }

    /// The edges to later nodes.
    pub(crate) fn after(&self, node: u64) -> Result<Vec<Edge>> {
        let data = |later: u64| {
            let edges = &self.node(later)?.before;
            let edge = edges.iter().find(|(from, _)| *from == node).ok_or(INVALID)?;
            Ok((later, edge.1))
        };
        self.node(node)?.after.iter().map(|later| data(*later)).collect()
    }

    /// Removes a node with its edges, and its child graph.
    pub(crate) fn destroy_node(&mut self, handle: u64) -> Result {
        let graph = self.node(handle)?.graph;
        if self.graph(graph)?.is_capturing {
            return Err(INVALID);
        }
        self.without_memory(graph)?;
        let node = self.nodes.remove(handle).ok_or(INVALID)?;
        for (from, _) in &node.before {
            self.node_mut(*from)?.after.retain(|other| *other != handle);
        }
        for to in &node.after {
            self.node_mut(*to)?.before.retain(|(other, _)| *other != handle);
        }
        self.graph_mut(graph)?.nodes.retain(|other| *other != handle);
        node.work.inner().iter().for_each(|inside| self.remove(*inside));
        Ok(())
    }

    /// Destroys a graph that belongs to the program.
    pub(crate) fn destroy(&mut self, graph: u64) -> Result {
        let found = self.graph(graph)?;
        if found.owner != 0 || found.is_capturing {
            return Err(INVALID);
        }
        self.remove(graph);
        Ok(())
    }

    /// Refuses a graph with nodes for memory, as the header requires for copies and for nodes and edges that go.
    fn without_memory(&self, graph: u64) -> Result {
        if self.graph(graph)?.has_memory { Err(Code::CUDA_ERROR_NOT_SUPPORTED) } else { Ok(()) }
    }

    /// The graphs with nodes for memory among a graph and those inside it.
    pub(crate) fn owners(&self, graph: u64) -> Result<Vec<Owner>> {
        let found = self.graph(graph)?;
        let mut owners: Vec<Owner> = found.has_memory.then_some(Owner::from(found.id)).into_iter().collect();
        for node in &found.nodes {
            for inside in self.node(*node)?.work.inner() {
                owners.extend(self.owners(*inside)?);
            }
        }
        Ok(owners)
    }

    /// Removes a graph with everything in it.
    pub(crate) fn remove(&mut self, graph: u64) {
        let mut pending = vec![graph];
        while let Some(graph) = pending.pop().and_then(|graph| self.graphs.remove(graph)) {
            self.released.extend(graph.objects);
            if graph.has_memory {
                self.owners_gone.push(Owner::from(graph.id));
            }
            if !graph.conditions.is_empty() {
                self.conditional_gone.push(Owner::from(graph.id));
            }
            for node in graph.nodes.into_iter().filter_map(|node| self.nodes.remove(node)) {
                pending.extend_from_slice(node.work.inner());
            }
        }
    }

    /// Copies a graph, with the numbers of its nodes.
    pub(crate) fn clone_graph(&mut self, original: u64) -> Result<u64> {
        let copy = self.create()?;
        let done = self.copy_into(original, copy);
        if done.is_err() {
            self.remove(copy);
        }
        done.map(|()| copy)
    }

    fn copy_into(&mut self, original: u64, copy: u64) -> Result {
        self.without_memory(original)?;
        self.without_conditions(original)?;
        let from = self.graph(original)?;
        let (nodes, next_number, objects) = (from.nodes.clone(), from.next_number, from.objects.clone());
        let mut copies = HashMap::with_capacity(nodes.len());
        for &handle in &nodes {
            let work = match &self.node(handle)?.work {
                NodeWork::Plain(work) => NodeWork::Plain(work.clone()),
                NodeWork::Child(child) => NodeWork::Child(self.clone_graph(*child)?),
                NodeWork::Conditional(_) => return Err(Code::CUDA_ERROR_NOT_SUPPORTED),
            };
            let added = self.add(copy, work, &[])?;
            let number = self.node(handle)?.number;
            let new = self.node_mut(added)?;
            (new.number, new.original) = (number, handle);
            copies.insert(handle, added);
        }
        let there = |node: &u64| copies.get(node).copied().ok_or(INVALID);
        for handle in &nodes {
            let node = self.node(*handle)?;
            let before: Result<Vec<Edge>> =
                node.before.iter().map(|(from, edge)| Ok((there(from)?, *edge))).collect();
            let after: Result<Vec<u64>> = node.after.iter().map(there).collect();
            let new = self.node_mut(there(handle)?)?;
            (new.before, new.after) = (before?, after?);
        }
        self.retained.extend(objects.iter().map(|(object, count)| (*object, *count)));
        let new = self.graph_mut(copy)?;
        (new.next_number, new.original, new.objects) = (next_number, original, objects);
        Ok(())
    }

    /// The copy of a node in a clone of its graph.
    pub(crate) fn find_in_clone(&self, original: u64, clone: u64) -> Result<u64> {
        let graph = self.graph(clone)?;
        if graph.original == 0 || graph.original != self.node(original)?.graph {
            return Err(INVALID);
        }
        let is_copy = |node: &&u64| self.node(**node).is_ok_and(|node| node.original == original);
        graph.nodes.iter().find(is_copy).copied().ok_or(INVALID)
    }

    /// Nodes in an order in which each one stands after its dependencies, otherwise in that of their creation.
    fn sorted(&self, graph: u64) -> std::result::Result<Vec<u64>, NoPlan> {
        let nodes = &self.graph(graph)?.nodes;
        let place: HashMap<u64, usize> =
            nodes.iter().enumerate().map(|(place, node)| (*node, place)).collect();
        let mut missing: Vec<usize> = Vec::with_capacity(nodes.len());
        for node in nodes {
            missing.push(self.node(*node)?.before.len());
        }
        let mut ready: BTreeSet<usize> = (0..nodes.len()).filter(|place| missing[*place] == 0).collect();
        let mut sorted = Vec::with_capacity(nodes.len());
        while let Some(next) = ready.pop_first() {
            sorted.push(nodes[next]);
            for later in &self.node(nodes[next])?.after {
                let Some(later) = place.get(later) else { continue };
                missing[*later] -= 1;
                if missing[*later] == 0 {
                    ready.insert(*later);
                }
            }
        }
        match missing.iter().position(|count| *count > 0) {
            Some(place) => Err(NoPlan::Cycle(nodes[place])),
            None => Ok(sorted),
        }
    }

    /// The graph in the form that a driver instantiates.
    pub(crate) fn plan(&self, graph: u64) -> std::result::Result<Plan, NoPlan> {
        let plan = self.plan_inside(graph, None)?;
        if self.graph(graph)?.conditions.values().any(|handle| !handle.is_used) {
            return Err(NoPlan::UnusedHandle);
        }
        Ok(plan)
    }

    /// The same for a graph that is in a body of a conditional node with this context.
    fn plan_inside(&self, graph: u64, body_of: Option<u64>) -> std::result::Result<Plan, NoPlan> {
        let sorted = self.sorted(graph)?;
        if body_of.is_some() && self.graph(graph)?.is_capturing {
            return Err(INVALID.into());
        }
        let mut place = HashMap::with_capacity(sorted.len());
        let mut nodes = Vec::with_capacity(sorted.len());
        for handle in sorted {
            let node = self.node(handle)?;
            if body_of.is_some_and(|context| !node.work.may_be_in_body(context)) {
                return Err(NoPlan::InBody(handle));
            }
            let work = match &node.work {
                NodeWork::Plain(work) => work.clone(),
                NodeWork::Child(child) => Work::Child(self.plan_inside(*child, body_of)?),
                NodeWork::Conditional(conditional) => {
                    let &Conditional { handle, kind, context, ref bodies } = conditional;
                    let plans = bodies.iter().map(|body| self.plan_inside(*body, Some(context)));
                    let bodies = plans.collect::<std::result::Result<Vec<Plan>, NoPlan>>()?;
                    Work::Conditional(ConditionalWork { handle, kind, context, bodies })
                }
            };
            let dependency = |(from, edge): &Edge| {
                let node = *place.get(from).ok_or(INVALID)?;
                Ok(Dependency { node, edge: *edge })
            };
            let dependencies = node.before.iter().map(dependency).collect::<Result<Vec<_>>>()?;
            let index = u32::try_from(nodes.len()).map_err(|_| Code::CUDA_ERROR_OUT_OF_MEMORY)?;
            nodes.push(PlanNode { number: node.number, enabled: true, dependencies, work });
            place.insert(handle, index);
        }
        Ok(Plan { nodes })
    }

    /// Makes a graph from a plan, with the same numbers.
    pub(crate) fn import(&mut self, plan: &Plan) -> Result<u64> {
        let graph = self.create()?;
        let done = self.import_into(plan, graph);
        if done.is_err() {
            self.remove(graph);
        }
        done.map(|()| graph)
    }

    fn import_into(&mut self, plan: &Plan, graph: u64) -> Result {
        let mut handles: Vec<u64> = Vec::with_capacity(plan.nodes.len());
        let mut next_number = 0;
        for node in &plan.nodes {
            let work = match &node.work {
                Work::Child(child) => NodeWork::Child(self.import(child)?),
                // A child graph must not have any.
                Work::Conditional(_) => return Err(Code::CUDA_ERROR_NOT_SUPPORTED),
                work => NodeWork::Plain(work.clone()),
            };
            let from = |dependency: &Dependency| {
                let index = usize::try_from(dependency.node).ok();
                Ok((*index.and_then(|index| handles.get(index)).ok_or(INVALID)?, dependency.edge))
            };
            let before = node.dependencies.iter().map(from).collect::<Result<Vec<_>>>()?;
            let added = self.add(graph, work, &before)?;
            self.node_mut(added)?.number = node.number;
            next_number = node.number.saturating_add(1).max(next_number);
            handles.push(added);
        }
        self.graph_mut(graph)?.next_number = next_number;
        Ok(())
    }

    /// The outermost graph of a node, and the node's number, preceded by the numbers of the child nodes around it. Behind the number of a
    /// conditional node stands the index of a body.
    pub(crate) fn path(&self, node: u64) -> Result<(u64, Vec<u32>)> {
        let mut path = Vec::new();
        let mut handle = node;
        loop {
            let node = self.node(handle)?;
            path.push(node.number);
            let graph = self.graph(node.graph)?;
            match graph.owner {
                0 => {
                    path.reverse();
                    return Ok((node.graph, path));
                }
                owner => handle = owner,
            }
            if matches!(self.node(handle)?.work, NodeWork::Conditional(_)) {
                path.push(graph.body);
            }
        }
    }

    /// The node of a path, or 0 if there is none.
    pub(crate) fn find(&self, mut graph: u64, path: &[u32]) -> u64 {
        let mut found = 0;
        let mut path = path.iter();
        while let Some(number) = path.next() {
            let Ok(nodes) = self.graph(graph).map(|graph| &graph.nodes) else { return 0 };
            let has_number = |node: &&u64| self.node(**node).is_ok_and(|node| node.number == *number);
            found = nodes.iter().find(has_number).copied().unwrap_or(0);
            graph = match self.node(found).map(|node| &node.work) {
                Ok(NodeWork::Child(child)) => *child,
                Ok(NodeWork::Conditional(conditional)) => {
                    let body = path.next().and_then(|body| usize::try_from(*body).ok());
                    body.and_then(|body| conditional.bodies.get(body)).copied().unwrap_or(0)
                }
                _ => 0,
            };
        }
        found
    }

    /// All nodes from which a path leads to one of these nodes, these included.
    pub(crate) fn ancestors(&self, nodes: impl IntoIterator<Item = u64>) -> HashSet<u64> {
        let mut pending: Vec<u64> = nodes.into_iter().collect();
        let mut found = HashSet::new();
        while let Some(handle) = pending.pop() {
            if let Ok(node) = self.node(handle)
                && found.insert(handle)
            {
                pending.extend(node.before.iter().map(|(from, _)| *from));
            }
        }
        found
    }

    /// Adds references to a user object, which the caller has made.
    pub(crate) fn own_object(&mut self, graph: u64, object: u64, count: u32) -> Result {
        let objects = &mut self.graph_mut(graph)?.objects;
        let owned = objects.get(&object).copied().unwrap_or(0);
        objects.insert(object, owned.checked_add(count).ok_or(INVALID)?);
        Ok(())
    }

    /// Removes references to a user object, which the caller releases.
    pub(crate) fn disown_object(&mut self, graph: u64, object: u64, count: u32) -> Result {
        let objects = &mut self.graph_mut(graph)?.objects;
        let owned = objects.get(&object).copied().ok_or(INVALID)?;
        match owned.checked_sub(count).ok_or(INVALID)? {
            0 => objects.remove(&object),
            left => objects.insert(object, left),
        };
        Ok(())
    }

    /// The references to user objects of a graph and its child graphs.
    pub(crate) fn objects(&self, graph: u64) -> Result<Vec<(u64, u32)>> {
        let (mut all, mut pending) = (Vec::new(), vec![graph]);
        while let Some(graph) = pending.pop() {
            let graph = self.graph(graph)?;
            all.extend(graph.objects.iter().map(|(object, count)| (*object, *count)));
            for node in &graph.nodes {
                pending.extend_from_slice(self.node(*node)?.work.inner());
            }
        }
        Ok(all)
    }

    #[cfg(test)]
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.graphs.iter().count(), self.nodes.iter().count())
    }
}

impl From<Code> for NoPlan {
    fn from(code: Code) -> NoPlan {
        NoPlan::Failed(code)
    }
}

#[cfg(test)]
mod tests;
