//! The driver's graphs and executables; owned by the module helper.

use crate::{
    graphs::plan::{GraphNode, GraphWork},
    session::objects::{ContextRef, GuestContext},
};
use sluice_driver::{Code, Driver, EdgeData, Handle, code};
use sluice_protocol::graph::NodeKind;
use sluice_runtime::limited;
use std::{collections::BTreeMap, sync::Arc};

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
    /// The nodes of the graph inside, by number.
    inside: Vec<BuiltNode>,
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
        let mut built =
            Built { driver: Arc::clone(driver), graph: driver.graph_create()?, nodes: Vec::new() };
        // A graph inside another begins as a copy of an empty one.
        let mut empty = None;
        built.nodes = fill(driver, built.graph, nodes, &mut empty)?;
        Ok(built)
    }

    /// The number of the node of the outermost graph that is, or contains, a node of the driver's.
    fn number(&self, node: Handle) -> Option<u32> {
        fn is_at(known: &BuiltNode, node: Handle) -> bool {
            known.node == node || known.inside.iter().any(|inside| is_at(inside, node))
        }
        self.nodes.iter().find(|known| is_at(known, node)).map(|known| known.number)
    }

    fn refused(&self, (code, node): (Code, Handle)) -> GraphRefusal {
        GraphRefusal { node: self.number(node), ..GraphRefusal::from(code) }
    }
}

/// Adds nodes to a graph of the driver. They come back by number.
fn fill(
    driver: &Arc<Driver>,
    graph: Handle,
    nodes: &[GraphNode],
    empty: &mut Option<Built>,
) -> Result<Vec<BuiltNode>, GraphRefusal> {
    let mut built = Vec::with_capacity(nodes.len());
    let mut edges = Vec::new();
    let mut behind = Vec::new();
    for GraphNode { number, enabled, dependencies, work } in nodes {
        let refused = |code| GraphRefusal::at(*number, code);
        let earlier = |index: u32| built.get(index as usize).map_or(0, |node: &BuiltNode| node.node);
        behind.clear();
        behind.extend(dependencies.iter().filter(|edge| edge.is_full()).map(|edge| earlier(edge.node)));
        let mut inside = Vec::new();
        let node = match work.of_driver() {
            Ok(work) => driver.graph_add(graph, &behind, &work).map_err(refused)?,
            Err(nodes) => {
                let start = match empty {
                    Some(start) => start.graph,
                    None => {
                        let graph = driver.graph_create()?;
                        empty.insert(Built { driver: Arc::clone(driver), graph, nodes: Vec::new() }).graph
                    }
                };
                let (node, graph) = driver.graph_add_child(graph, &behind, start).map_err(refused)?;
                inside = fill(driver, graph, nodes, empty)
                    .map_err(|failed| GraphRefusal { node: Some(*number), ..failed })?;
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
        edges.extend(with_data.map(|edge| {
            let [from_port, to_port, kind] = edge.edge;
            (earlier(edge.node), node, EdgeData { from_port, to_port, kind, reserved: [0; 5] })
        }));
        built.push(BuiltNode { number: *number, kind: work.kind(), node, enabled: *enabled, inside });
    }
    if !edges.is_empty() {
        driver.graph_add_edges(graph, &edges)?;
    }
    built.sort_unstable_by_key(|node| node.number);
    Ok(built)
}

/// An executable of the driver; destroyed when this is dropped.
#[derive(Debug)]
pub(crate) struct DriverExecutable {
    driver: Arc<Driver>,
    handle: Handle,
    /// The graph from which it was made: its nodes name those of the executable.
    built: Built,
    /// Those of its nodes, at any time: the driver may have a part of a change that it refused.
    contexts: Vec<ContextRef>,
    /// The device and the context of the grant for its memory, and the bytes.
    pub(crate) granted: (i32, Option<ContextRef>, u64),
}

impl Drop for DriverExecutable {
    fn drop(&mut self) {
        if let Err(failed) = self.driver.graph_executable_destroy(self.handle) {
            limited!(warn, code = failed, "cannot destroy an executable graph");
        }
    }
}

impl DriverExecutable {
    /// Makes the executable of a graph.
    pub(crate) fn new(
        built: Built,
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
        Ok(DriverExecutable { driver, handle, built, contexts, granted: (0, None, 0) })
    }

    pub(crate) const fn handle(&self) -> Handle {
        self.handle
    }

    /// Turns off the nodes that are off from the start.
    pub(crate) fn disable(&self) -> Result<(), GraphRefusal> {
        fn all(executable: &DriverExecutable, nodes: &[BuiltNode]) -> Result<(), GraphRefusal> {
            for BuiltNode { number, node, enabled, inside, .. } in nodes {
                if !enabled {
                    let disabled = executable.driver.graph_set_enabled(executable.handle, *node, false);
                    disabled.map_err(|code| GraphRefusal::at(*number, code))?;
                }
                all(executable, inside)?;
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
        let partly = |code| GraphRefusal::partly(code, None);
        let node = find(&mut self.built.nodes, path).ok_or(code::INVALID_VALUE)?;
        if node.kind != work.kind() || node.enabled != enabled && !can_be_disabled(node.kind) {
            return Err(code::INVALID_VALUE.into());
        }
        match work.of_driver() {
            // One call for one node: the driver refuses it as a whole.
            Ok(work) => self.driver.graph_set_work(self.handle, node.node, &work)?,
            Err(nodes) => {
                let inside = Built::new(&self.driver, nodes)?;
                self.driver.graph_set_child(self.handle, node.node, inside.graph).map_err(partly)?;
            }
        }
        if node.enabled != enabled {
            self.driver.graph_set_enabled(self.handle, node.node, enabled).map_err(partly)?;
            node.enabled = enabled;
        }
        Ok(())
    }

    /// Replaces the work of all nodes by that of a graph.
    pub(crate) fn update(&self, by: &Built) -> Result<(), GraphRefusal> {
        let updated = self.driver.graph_update(self.handle, by.graph);
        updated.map_err(|(code, node)| GraphRefusal::partly(code, by.number(node)))
    }
}

/// True if the driver turns nodes of a kind off.
const fn can_be_disabled(kind: NodeKind) -> bool {
    matches!(kind, NodeKind::Kernel | NodeKind::Copy | NodeKind::Fill)
}

fn find<'a>(nodes: &'a mut [BuiltNode], path: &[u32]) -> Option<&'a mut BuiltNode> {
    let (number, rest) = path.split_first()?;
    let index = nodes.binary_search_by_key(number, |node| node.number).ok()?;
    let node = nodes.get_mut(index)?;
    if rest.is_empty() { Some(node) } else { find(&mut node.inside, rest) }
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

    pub(crate) fn get(&self, serial: GraphSerial) -> Option<&DriverExecutable> {
        self.all.get(&serial)
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
