//! The driver's graphs and executables; owned by the module helper. In one file: they are built and changed by the same steps.

use crate::{
    graphs::plan::{ConditionalSerial, ConditionalWork, GraphNode, GraphWork, Nested},
    session::objects::{ContextRef, GuestContext},
};
use sluice_driver::{Code, CopyBox, Driver, EdgeData, Handle, NodeWork, code};
use sluice_protocol::{
    graph::{Dependency, NodeKind, Selection},
    limits,
};
use sluice_runtime::limited;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

/// An executable's number in this process, never used again.
pub(crate) type GraphSerial = u64;

/// The reason for which the driver refuses a graph: its code, and the number of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GraphRefusal {
    pub(crate) code: Code,
    pub(crate) node: Option<u32>,
    /// True if the driver's executable may have a part of the change.
    pub(crate) partly: bool,
}

impl GraphRefusal {
    const fn at(number: u32, code: Code) -> GraphRefusal {
        GraphRefusal { code, node: Some(number), partly: false }
    }

    const fn partly(code: Code, node: Option<u32>) -> GraphRefusal {
        GraphRefusal { code, node, partly: true }
    }
}

impl From<Code> for GraphRefusal {
    fn from(code: Code) -> GraphRefusal {
        GraphRefusal { code, node: None, partly: false }
    }
}

/// The end of the making or of a change of an executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GraphEnd {
    /// It was made, with this handle of the driver.
    Made(Handle),
    NotMade,
    Changed,
    /// The change was refused, and the driver's executable is as it was before.
    Refused,
    /// The change was refused, and the driver's executable may have a part of it.
    Broken,
}

impl GraphEnd {
    pub(crate) fn of_change(changed: Result<(), GraphRefusal>) -> GraphEnd {
        match changed {
            Ok(()) => GraphEnd::Changed,
            Err(GraphRefusal { partly: true, .. }) => GraphEnd::Broken,
            Err(_) => GraphEnd::Refused,
        }
    }
}

/// A node of a driver's graph.
#[derive(Debug)]
struct BuiltNode {
    number: u32,
    kind: NodeKind,
    node: Handle,
    enabled: bool,
    /// The copy of the executable's node, if it has several rows: the driver changes such a copy only with its whole graph.
    copy: Option<Box<CopyBox>>,
    inside: BuiltInside,
}

/// The graphs inside a node.
#[derive(Debug)]
enum BuiltInside {
    Nothing,
    /// The nodes of a child graph, by number.
    Child(Vec<BuiltNode>),
    Conditional(BuiltConditional),
}

/// The inside of a conditional node.
#[derive(Debug)]
struct BuiltConditional {
    handle: u64,
    selection: Selection,
    /// The driver's graphs, with their nodes by number.
    bodies: Vec<(Handle, Vec<BuiltNode>)>,
    /// The edges to the node.
    behind: Vec<(Handle, EdgeData)>,
}

impl BuiltNode {
    /// A node that turns on with its graph, or is off.
    fn new(of: &GraphNode, node: Handle, inside: BuiltInside) -> BuiltNode {
        let copy = match &of.work {
            GraphWork::Copy { copy, .. } if copy.height > 1 || copy.depth > 1 => Some(Box::new(*copy)),
            _ => None,
        };
        BuiltNode { number: of.number, kind: of.work.kind(), node, enabled: of.enabled, copy, inside }
    }

    /// The lists of nodes inside, to change them.
    fn lists_mut(&mut self) -> Vec<&mut [BuiltNode]> {
        match &mut self.inside {
            BuiltInside::Nothing => Vec::new(),
            BuiltInside::Child(nodes) => vec![nodes],
            BuiltInside::Conditional(inside) => {
                inside.bodies.iter_mut().map(|(_, nodes)| &mut **nodes).collect()
            }
        }
    }

    /// The lists of nodes inside.
    fn lists(&self) -> Vec<&[BuiltNode]> {
        match &self.inside {
            BuiltInside::Nothing => Vec::new(),
            BuiltInside::Child(nodes) => vec![nodes],
            BuiltInside::Conditional(inside) => inside.bodies.iter().map(|(_, nodes)| &**nodes).collect(),
        }
    }

    /// True if the node can stand for one of a plan, but for its order and the nodes inside it. A driver makes one node for a handle, and the
    /// node has the same bodies as long as it exists.
    fn stays(&self, new: &GraphNode) -> bool {
        match (&self.inside, &new.work) {
            (BuiltInside::Conditional(inside), GraphWork::Conditional(work)) => {
                (work.handle, work.selection) == (inside.handle, inside.selection)
                    && work.bodies.len() == inside.bodies.len()
            }
            _ => false,
        }
    }
}

/// A graph of the driver; destroyed when this is dropped.
#[derive(Debug)]
pub(crate) struct Built {
    driver: Arc<Driver>,
    graph: Handle,
    /// By number.
    nodes: Vec<BuiltNode>,
}

impl Drop for Built {
    fn drop(&mut self) {
        if let Err(failed) = self.driver.graph_destroy(self.graph) {
            limited!(warn, code = failed, "cannot destroy a graph");
        }
    }
}

impl Built {
    /// Builds the driver's graph of a plan.
    pub(crate) fn new(driver: &Arc<Driver>, nodes: &[GraphNode]) -> Result<Built, GraphRefusal> {
        let mut built = Built::empty(driver)?;
        built.refill(nodes)?;
        Ok(built)
    }

    /// A graph without nodes.
    pub(crate) fn empty(driver: &Arc<Driver>) -> Result<Built, Code> {
        Ok(Built { driver: Arc::clone(driver), graph: driver.graph_create()?, nodes: Vec::new() })
    }

    /// Removes all nodes but the conditional ones, of which the driver makes no others for their handles.
    fn strip(&mut self) -> Result<(), Code> {
        strip(&self.driver, self.graph, &mut self.nodes)
    }

    /// Replaces the nodes by those of a plan. If the driver refuses one, the graph has a part of the plan.
    pub(crate) fn refill(&mut self, nodes: &[GraphNode]) -> Result<(), GraphRefusal> {
        // A graph inside another begins as a copy of an empty one.
        let mut empty = None;
        fill(&self.driver, self.graph, &mut self.nodes, nodes, &mut empty)
    }

    /// The number of the node of the outermost graph that is, or contains, a node of the driver's.
    fn number(&self, node: Handle) -> Option<u32> {
        fn is_at(known: &BuiltNode, node: Handle) -> bool {
            known.node == node
                || known.lists().iter().any(|list| list.iter().any(|inside| is_at(inside, node)))
        }
        self.nodes.iter().find(|known| is_at(known, node)).map(|known| known.number)
    }

    fn refused(&self, (code, node): (Code, Handle)) -> GraphRefusal {
        GraphRefusal { node: self.number(node), ..GraphRefusal::from(code) }
    }
}

/// Makes a graph of the driver have the nodes of a plan. `built` are its nodes, at any time; they end up by number.
fn fill(
    driver: &Arc<Driver>,
    graph: Handle,
    built: &mut Vec<BuiltNode>,
    nodes: &[GraphNode],
    empty: &mut Option<Built>,
) -> Result<(), GraphRefusal> {
    if !built.is_empty() {
        let new = nodes.iter().filter(|node| matches!(node.work, GraphWork::Conditional(_)));
        let new: HashMap<u32, &GraphNode> = new.map(|node| (node.number, node)).collect();
        clear(driver, graph, built, |node| new.get(&node.number).is_some_and(|new| node.stays(new)))?;
    }
    // Places in `built`: of the nodes that stayed, by number, and of the new conditional nodes.
    let stayed: HashMap<u32, usize> =
        built.iter().zip(0..).map(|(node, place)| (node.number, place)).collect();
    let mut conditional: HashMap<Handle, usize> = HashMap::new();
    // The driver's nodes in the order of the plan.
    let mut handles: Vec<Handle> = Vec::with_capacity(nodes.len());
    let mut edges = Vec::new();
    let mut behind = Vec::new();
    for planned in nodes {
        let GraphNode { number, enabled, dependencies, work } = planned;
        let refused = |code| GraphRefusal::at(*number, code);
        let inner = |failed| GraphRefusal { node: Some(*number), ..failed };
        let earlier = |index: u32| handles.get(index as usize).copied().unwrap_or(0);
        let known = stayed.get(number).and_then(|place| built.get_mut(*place));
        if let (Some(known), GraphWork::Conditional(work)) = (known, work) {
            let node = known.node;
            known.enabled = *enabled;
            if let BuiltInside::Conditional(inside) = &mut known.inside {
                let new: Vec<(Handle, EdgeData)> =
                    dependencies.iter().map(|edge| (earlier(edge.node), data(*edge))).collect();
                let added: Vec<_> = new.iter().map(|(from, data)| (*from, node, *data)).collect();
                if !added.is_empty() {
                    driver.graph_add_edges(graph, &added).map_err(refused)?;
                }
                inside.behind = new;
                for ((graph, built), nodes) in inside.bodies.iter_mut().zip(&work.bodies) {
                    fill(driver, *graph, built, nodes, empty).map_err(inner)?;
                }
            }
            handles.push(node);
            continue;
        }
        behind.clear();
        behind.extend(dependencies.iter().filter(|edge| edge.is_full()).map(|edge| earlier(edge.node)));
        let node = match work.of_driver() {
            Ok(work) => {
                let node = driver.graph_add(graph, &behind, &work).map_err(refused)?;
                built.push(BuiltNode::new(planned, node, BuiltInside::Nothing));
                node
            }
            Err(Nested::Child(nodes)) => {
                let start = match empty {
                    Some(start) => start.graph,
                    None => empty.insert(Built::empty(driver)?).graph,
                };
                let (node, graph) = driver.graph_add_child(graph, &behind, start).map_err(refused)?;
                let mut list = Vec::new();
                let filled = fill(driver, graph, &mut list, nodes, empty);
                built.push(BuiltNode::new(planned, node, BuiltInside::Child(list)));
                filled.map_err(inner)?;
                node
            }
            Err(Nested::Conditional(work)) => {
                let &ConditionalWork { handle, selection, context, ref bodies } = work;
                let size = u32::try_from(bodies.len()).map_err(|_| code::INVALID_VALUE)?;
                let of = (handle, context.handle);
                let added = driver.graph_add_conditional(graph, &behind, of, work.kind(), size);
                let (node, graphs) = added.map_err(refused)?;
                let full = EdgeData { from_port: 0, to_port: 0, kind: 0, reserved: [0; 5] };
                let mut inside = BuiltConditional {
                    handle,
                    selection,
                    bodies: graphs.into_iter().map(|graph| (graph, Vec::new())).collect(),
                    behind: behind.iter().map(|from| (*from, full)).collect(),
                };
                let mut bodies = inside.bodies.iter_mut().zip(bodies);
                let filled =
                    bodies.try_for_each(|((graph, built), nodes)| fill(driver, *graph, built, nodes, empty));
                conditional.insert(node, built.len());
                built.push(BuiltNode::new(planned, node, BuiltInside::Conditional(inside)));
                filled.map_err(inner)?;
                node
            }
        };
        if let GraphWork::Kernel { attributes, .. } = work {
            attributes
                .iter()
                .try_for_each(|attribute| driver.graph_set_attribute(node, attribute))
                .map_err(refused)?;
        }
        let with_data = dependencies.iter().filter(|edge| !edge.is_full());
        edges.extend(with_data.map(|edge| (earlier(edge.node), node, data(*edge))));
        handles.push(node);
    }
    if !edges.is_empty() {
        driver.graph_add_edges(graph, &edges)?;
        for (from, to, data) in edges {
            let later = conditional.get(&to).and_then(|place| built.get_mut(*place));
            if let Some(BuiltNode { inside: BuiltInside::Conditional(inside), .. }) = later {
                inside.behind.push((from, data));
            }
        }
    }
    built.sort_unstable_by_key(|node| node.number);
    Ok(())
}

const fn data(dependency: Dependency) -> EdgeData {
    let [from_port, to_port, kind] = dependency.edge;
    EdgeData { from_port, to_port, kind, reserved: [0; 5] }
}

/// Removes all nodes of a driver's graph but the conditional ones, and so inside their bodies.
fn strip(driver: &Driver, graph: Handle, built: &mut Vec<BuiltNode>) -> Result<(), Code> {
    clear(driver, graph, built, |node| matches!(node.inside, BuiltInside::Conditional(_)))?;
    for node in built {
        let BuiltInside::Conditional(inside) = &mut node.inside else { continue };
        inside.bodies.iter_mut().try_for_each(|(graph, built)| strip(driver, *graph, built))?;
    }
    Ok(())
}

/// Removes the nodes of a driver's graph that do not stay, and the edges of the others.
fn clear(
    driver: &Driver,
    graph: Handle,
    built: &mut Vec<BuiltNode>,
    stays: impl Fn(&BuiltNode) -> bool,
) -> Result<(), Code> {
    let mut rest = core::mem::take(built).into_iter();
    while let Some(node) = rest.next() {
        if stays(&node) {
            built.push(node);
        } else if let Err(failed) = driver.graph_destroy_node(node.node) {
            built.push(node);
            built.extend(rest);
            return Err(failed);
        }
    }
    let left: HashSet<Handle> = built.iter().map(|node| node.node).collect();
    for BuiltNode { node, inside, .. } in built {
        let BuiltInside::Conditional(inside) = inside else { continue };
        inside.behind.retain(|(from, _)| left.contains(from));
        let edges: Vec<_> = inside.behind.iter().map(|(from, data)| (*from, *node, *data)).collect();
        if !edges.is_empty() {
            driver.graph_remove_edges(graph, &edges)?;
            inside.behind.clear();
        }
    }
    Ok(())
}

/// An executable of the driver; destroyed when this is dropped.
#[derive(Debug)]
pub(crate) struct DriverExecutable {
    owned: OwnedExecutable,
    /// The graph from which it was made: its nodes name those of the executable.
    built: Built,
    /// The graph with handles for conditional nodes from which it was made, if it was made from one.
    made_of: Option<ConditionalSerial>,
    /// True while the driver's executable has the handles of that graph, and all work of its description.
    has_own_handles: bool,
    /// Those of its nodes, at any time: the driver may have a part of a change that it refused.
    contexts: Vec<ContextRef>,
    /// The device and the context of the grant for its memory, and the bytes.
    pub(crate) granted: (i32, Option<ContextRef>, u64),
}

/// The driver's handle of an executable, which is destroyed when this is dropped.
#[derive(Debug)]
struct OwnedExecutable {
    driver: Arc<Driver>,
    handle: Handle,
}

impl Drop for OwnedExecutable {
    fn drop(&mut self) {
        if let Err(failed) = self.driver.cuGraphExecDestroy(self.handle) {
            limited!(warn, code = failed, "cannot destroy an executable graph");
        }
    }
}

impl DriverExecutable {
    /// Makes the executable of a graph.
    pub(crate) fn new(
        built: Built,
        made_of: Option<ConditionalSerial>,
        flags: u32,
        contexts: Vec<ContextRef>,
    ) -> Result<DriverExecutable, (Built, GraphRefusal)> {
        let driver = Arc::clone(&built.driver);
        let handle = match driver.graph_instantiate(built.graph, flags) {
            Ok(handle) => handle,
            Err(failed) => {
                let refused = built.refused(failed);
                return Err((built, refused));
            }
        };
        let owned = OwnedExecutable { driver, handle };
        let (has_own_handles, granted) = (true, (0, None, 0));
        Ok(DriverExecutable { owned, built, made_of, has_own_handles, contexts, granted })
    }

    pub(crate) const fn handle(&self) -> Handle {
        self.owned.handle
    }

    /// The graph with handles for conditional nodes from which it was made.
    pub(crate) const fn made_of(&self) -> Option<ConditionalSerial> {
        self.made_of
    }

    /// Destroys the executable, and returns the graph from which it was made.
    pub(crate) fn end(self) -> (Option<ConditionalSerial>, Built) {
        (self.made_of, self.built)
    }

    /// Turns off the nodes that are off from the start.
    pub(crate) fn disable(&self) -> Result<(), GraphRefusal> {
        fn all(executable: &DriverExecutable, nodes: &[BuiltNode]) -> Result<(), GraphRefusal> {
            let OwnedExecutable { driver, handle } = &executable.owned;
            for known in nodes {
                if !known.enabled {
                    let disabled = driver.cuGraphNodeSetEnabled(*handle, known.node, false);
                    disabled.map_err(|code| GraphRefusal::at(known.number, code))?;
                }
                known.lists().into_iter().try_for_each(|list| all(executable, list))?;
            }
            Ok(())
        }
        all(self, &self.built.nodes)
    }

    /// Records the contexts of a change, before the driver may have a part of it.
    pub(crate) fn use_contexts(&mut self, contexts: &[GuestContext]) {
        for GuestContext { context, .. } in contexts {
            if !self.contexts.contains(context) {
                self.contexts.push(*context);
            }
        }
    }

    /// Replaces the work of one node.
    pub(crate) fn set_work(
        &mut self,
        path: &[u32],
        work: &GraphWork,
        enabled: bool,
    ) -> Result<(), GraphRefusal> {
        let changed = self.set_driver_work(path, work, enabled);
        self.has_own_handles &= !changed.is_err_and(|refused| refused.partly);
        changed
    }

    fn set_driver_work(&mut self, path: &[u32], work: &GraphWork, enabled: bool) -> Result<(), GraphRefusal> {
        let partly = |code| GraphRefusal::partly(code, None);
        let OwnedExecutable { driver, handle } = &self.owned;
        let node = find(&mut self.built.nodes, path).ok_or(code::INVALID_VALUE)?;
        if node.kind != work.kind() || node.enabled != enabled && !can_be_disabled(node.kind) {
            return Err(code::INVALID_VALUE.into());
        }
        match work.of_driver() {
            // The driver has it.
            Ok(NodeWork::Copy { copy, .. }) if node.copy.as_deref() == Some(&copy) => {}
            // One call for one node: the driver refuses it as a whole.
            Ok(work) => driver.graph_set_work(*handle, node.node, &work)?,
            Err(Nested::Child(nodes)) => {
                let inside = Built::new(driver, nodes)?;
                driver
                    .cuGraphExecChildGraphNodeSetParams(*handle, node.node, inside.graph)
                    .map_err(partly)?;
                if let BuiltInside::Child(nodes) = &mut node.inside {
                    adopt_copies(nodes, &inside.nodes);
                }
            }
            // The guest changes the nodes of its bodies one by one.
            Err(Nested::Conditional(_)) => return Err(code::NOT_SUPPORTED.into()),
        }
        if node.enabled != enabled {
            driver.cuGraphNodeSetEnabled(*handle, node.node, enabled).map_err(partly)?;
            node.enabled = enabled;
        }
        Ok(())
    }

    /// Replaces the work of all nodes by that of a graph.
    pub(crate) fn update(&mut self, by: &Built) -> Result<(), GraphRefusal> {
        self.has_own_handles = false;
        self.update_by(by)?;
        adopt_copies(&mut self.built.nodes, &by.nodes);
        Ok(())
    }

    fn update_by(&self, by: &Built) -> Result<(), GraphRefusal> {
        let updated = self.owned.driver.graph_update(self.owned.handle, by.graph);
        updated.map_err(|(code, node)| GraphRefusal::partly(code, by.number(node)))
    }

    /// Replaces the work of all nodes by that of a plan with the handles of its own graph. The driver updates an executable from a graph,
    /// too, but the nodes of this one must stay as they are, because they name those of the executable.
    pub(crate) fn update_own(
        &mut self,
        nodes: &[GraphNode],
        changes: &GraphChanges,
    ) -> Result<(), GraphRefusal> {
        // Another handle of the graph: the driver takes one from another graph only.
        if !stays(&self.built.nodes, nodes) {
            return Err(code::NOT_SUPPORTED.into());
        }
        let changed = if self.has_own_handles {
            Some(&changes.changed)
        } else if changes.begins_again {
            self.update_by(&self.built)?;
            forget_copies(&mut self.built.nodes);
            None
        } else {
            return Err(code::NOT_SUPPORTED.into());
        };
        self.has_own_handles = false;
        nodes.iter().try_for_each(|node| {
            let refused = |refused: GraphRefusal| GraphRefusal::partly(refused.code, Some(node.number));
            self.update_at(node, &mut vec![node.number], changed).map_err(refused)
        })?;
        self.has_own_handles = true;
        Ok(())
    }

    fn update_at(
        &mut self,
        node: &GraphNode,
        path: &mut Vec<u32>,
        changed: Option<&BTreeSet<Vec<u32>>>,
    ) -> Result<(), GraphRefusal> {
        match &node.work {
            GraphWork::Child(nodes) => self.update_inside(nodes, path, changed),
            GraphWork::Conditional(work) => (0..).zip(&work.bodies).try_for_each(|(index, nodes)| {
                path.push(index);
                self.update_inside(nodes, path, changed)?;
                path.pop();
                Ok(())
            }),
            work if changed.is_none_or(|changed| changed.contains(path)) => {
                self.set_work(path, work, node.enabled)
            }
            _ => Ok(()),
        }
    }

    fn update_inside(
        &mut self,
        nodes: &[GraphNode],
        path: &mut Vec<u32>,
        changed: Option<&BTreeSet<Vec<u32>>>,
    ) -> Result<(), GraphRefusal> {
        nodes.iter().try_for_each(|node| {
            path.push(node.number);
            self.update_at(node, path, changed)?;
            path.pop();
            Ok(())
        })
    }
}

/// The change of a description by a plan with conditional nodes.
#[derive(Debug, Default)]
pub(crate) struct GraphChanges {
    /// The ways to the nodes whose work is new.
    pub(crate) changed: BTreeSet<Vec<u32>>,
    /// True if everything that the executable ever used exists, so that the driver may give it the work again with which it was made.
    pub(crate) begins_again: bool,
}

/// Records that the nodes of an executable have the copies of another graph of the same shape.
fn adopt_copies(nodes: &mut [BuiltNode], from: &[BuiltNode]) {
    for (node, other) in nodes.iter_mut().zip(from).filter(|(node, other)| node.number == other.number) {
        node.copy.clone_from(&other.copy);
        for (list, other) in node.lists_mut().into_iter().zip(other.lists()) {
            adopt_copies(list, other);
        }
    }
}

/// Records that the copies of an executable's nodes are not known here.
fn forget_copies(nodes: &mut [BuiltNode]) {
    for node in nodes {
        node.copy = None;
        node.lists_mut().into_iter().for_each(forget_copies);
    }
}

/// True if all conditional nodes of a plan can be those of a graph.
fn stays(built: &[BuiltNode], nodes: &[GraphNode]) -> bool {
    nodes.iter().all(|node| {
        let GraphWork::Conditional(work) = &node.work else { return true };
        let place = built.binary_search_by_key(&node.number, |known| known.number);
        let known = place.ok().and_then(|place| built.get(place)).filter(|known| known.stays(node));
        let Some(BuiltNode { inside: BuiltInside::Conditional(inside), .. }) = known else { return false };
        inside.bodies.iter().zip(&work.bodies).all(|((_, built), nodes)| stays(built, nodes))
    })
}

/// True if the driver turns nodes of a kind off.
const fn can_be_disabled(kind: NodeKind) -> bool {
    matches!(kind, NodeKind::Kernel | NodeKind::Copy | NodeKind::Fill)
}

fn find<'a>(nodes: &'a mut [BuiltNode], path: &[u32]) -> Option<&'a mut BuiltNode> {
    let (number, rest) = path.split_first()?;
    let index = nodes.binary_search_by_key(number, |node| node.number).ok()?;
    let node = nodes.get_mut(index)?;
    if rest.is_empty() {
        return Some(node);
    }
    match &mut node.inside {
        BuiltInside::Nothing => None,
        BuiltInside::Child(nodes) => find(nodes, rest),
        BuiltInside::Conditional(inside) => {
            let (body, rest) = rest.split_first()?;
            find(&mut inside.bodies.get_mut(*body as usize)?.1, rest)
        }
    }
}

/// A graph in which handles for conditional nodes live.
#[derive(Debug)]
struct ConditionalGraph {
    /// The driver's handle.
    graph: Handle,
    /// The graph, unless an executable that was made of it has it.
    built: Option<Built>,
    handles: BTreeMap<u64, ConditionalHandle>,
    /// True if it ends with its executable: the guest has destroyed it, or a context of its handles.
    ended: bool,
}

/// A handle for a conditional node.
#[derive(Debug)]
struct ConditionalHandle {
    context: ContextRef,
    /// The bodies that its node has in the driver, at most.
    bodies: usize,
}

/// All graphs of a session with handles for conditional nodes.
#[derive(Debug, Default)]
pub(crate) struct ConditionalGraphs {
    all: BTreeMap<ConditionalSerial, ConditionalGraph>,
    latest: ConditionalSerial,
    /// Handles of all graphs.
    handles: usize,
    /// Bodies of all nodes of those handles.
    bodies: usize,
}

impl ConditionalGraphs {
    /// Makes a graph.
    pub(crate) fn create(&mut self, driver: &Arc<Driver>) -> Result<ConditionalSerial, Code> {
        let built = Built::empty(driver)?;
        let (graph, built) = (built.graph, Some(built));
        let made = ConditionalGraph { graph, built, handles: BTreeMap::new(), ended: false };
        self.latest += 1;
        self.all.insert(self.latest, made);
        Ok(self.latest)
    }

    /// Creates a handle, and returns its number.
    pub(crate) fn create_handle(
        &mut self,
        driver: &Driver,
        graph: ConditionalSerial,
        context: ContextRef,
        (value, flags): (u32, u32),
    ) -> Result<u64, Code> {
        /// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
        const ASSIGN_DEFAULT: u32 = 1;
        let known = self.all.get_mut(&graph).filter(|known| !known.ended).ok_or(code::INVALID_HANDLE)?;
        if flags & !ASSIGN_DEFAULT != 0 {
            return Err(code::INVALID_VALUE);
        }
        if self.handles >= limits::CONDITIONAL_HANDLES {
            return Err(code::OUT_OF_MEMORY);
        }
        let handle = driver.graph_create_handle(known.graph, context.handle, value, flags)?;
        let before = known.handles.insert(handle, ConditionalHandle { context, bodies: 0 });
        self.handles += usize::from(before.is_none());
        Ok(handle)
    }

    /// Checks the conditional nodes of a plan: the handle of each belongs to the graph and to the node's context, and has one node. Counts
    /// the bodies, which stay in the driver as long as the graph.
    pub(crate) fn check(&mut self, graph: ConditionalSerial, nodes: &[GraphNode]) -> Result<(), Code> {
        let known = self.all.get_mut(&graph).filter(|known| !known.ended).ok_or(code::INVALID_HANDLE)?;
        let mut used = BTreeMap::new();
        check_handles(nodes, &known.handles, &mut used)?;
        let counted = |handle| known.handles.get(handle).map_or(0, |known| known.bodies);
        let more: usize = used.iter().map(|(handle, bodies)| bodies.saturating_sub(counted(handle))).sum();
        if self.bodies.saturating_add(more) > limits::SESSION_CONDITIONAL_BODIES {
            return Err(code::OUT_OF_MEMORY);
        }
        self.bodies += more;
        for (handle, bodies) in used {
            if let Some(known) = known.handles.get_mut(&handle) {
                known.bodies = known.bodies.max(bodies);
            }
        }
        Ok(())
    }

    /// Takes a graph that is to have the nodes of a plan, after a check of them.
    pub(crate) fn take(&mut self, graph: ConditionalSerial, nodes: &[GraphNode]) -> Result<Built, Code> {
        self.check(graph, nodes)?;
        // An executable of it exists.
        self.all.get_mut(&graph).and_then(|known| known.built.take()).ok_or(code::NOT_SUPPORTED)
    }

    /// Takes a graph back, without its nodes: those count, and keep their events, with an executable only. It is destroyed if it has ended
    /// meanwhile.
    pub(crate) fn put_back(&mut self, graph: ConditionalSerial, mut built: Built) {
        let Some(known) = self.all.get_mut(&graph) else { return };
        if known.ended {
            self.forget(graph);
        } else if let Err(failed) = built.strip() {
            limited!(warn, code = failed, "cannot remove the nodes of a graph; it is destroyed");
            self.forget(graph);
        } else {
            known.built = Some(built);
        }
    }

    /// Ends a graph, unless it has ended with a context. An executable that was made of it keeps it.
    pub(crate) fn end(&mut self, graph: ConditionalSerial) {
        let Some(known) = self.all.get_mut(&graph) else { return };
        known.ended = true;
        if known.built.is_some() {
            self.forget(graph);
        }
    }

    /// Ends the graphs with handles of a context which is being destroyed.
    pub(crate) fn of_context_gone(&mut self, context: ContextRef) {
        let of_context =
            |graph: &ConditionalGraph| graph.handles.values().any(|handle| handle.context == context);
        let gone: Vec<ConditionalSerial> =
            self.all.iter().filter(|(_, graph)| of_context(graph)).map(|(serial, _)| *serial).collect();
        gone.into_iter().for_each(|graph| self.end(graph));
    }

    /// The driver's graph ends, and with it its handles and the bodies of their nodes.
    fn forget(&mut self, graph: ConditionalSerial) {
        if let Some(gone) = self.all.remove(&graph) {
            self.handles = self.handles.saturating_sub(gone.handles.len());
            let bodies: usize = gone.handles.values().map(|handle| handle.bodies).sum();
            self.bodies = self.bodies.saturating_sub(bodies);
        }
    }
}

/// Adds the handles of a plan to `used`, each with the number of its bodies.
fn check_handles(
    nodes: &[GraphNode],
    known: &BTreeMap<u64, ConditionalHandle>,
    used: &mut BTreeMap<u64, usize>,
) -> Result<(), Code> {
    for node in nodes {
        match &node.work {
            GraphWork::Child(inside) => check_handles(inside, known, used)?,
            GraphWork::Conditional(work) => {
                let is_known = known.get(&work.handle).is_some_and(|known| known.context == work.context);
                if !is_known || used.insert(work.handle, work.bodies.len()).is_some() {
                    return Err(code::INVALID_VALUE);
                }
                work.bodies.iter().try_for_each(|body| check_handles(body, known, used))?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// All executables of a session.
#[derive(Debug, Default)]
pub(crate) struct Executables {
    all: BTreeMap<GraphSerial, DriverExecutable>,
}

impl Executables {
    pub(crate) fn insert(&mut self, serial: GraphSerial, executable: DriverExecutable) {
        self.all.insert(serial, executable);
    }

    pub(crate) fn get_mut(&mut self, serial: GraphSerial) -> Option<&mut DriverExecutable> {
        self.all.get_mut(&serial)
    }

    pub(crate) fn remove(&mut self, serial: GraphSerial) -> Option<DriverExecutable> {
        self.all.remove(&serial)
    }

    /// Removes the executables that use a context which is being destroyed.
    pub(crate) fn of_context(&mut self, context: ContextRef) -> Vec<(GraphSerial, DriverExecutable)> {
        self.all.extract_if(.., |_, executable| executable.contexts.contains(&context)).collect()
    }
}
