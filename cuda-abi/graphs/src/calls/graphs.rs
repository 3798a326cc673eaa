//! Graphs, their nodes and their edges.

use std::ffi::c_char;
use std::path::Path;

use sluice_cuda_abi::sys::CUresult as Code;

use super::{Graphs, In, Out, Result, edges, failed, invalid, store, store_edges};
use crate::dot;
use crate::driver::GraphDriver;
use crate::graph::{Edge, Model, NodeWork};
use crate::plan::EdgeData;

type Edges = Vec<(u64, u64, EdgeData)>;

impl<D: GraphDriver> Graphs<D> {
    /// `cuGraphCreate`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_create(&self, place: Out<u64, D>, flags: u32) -> Result<(), D> {
        place.required()?;
        if flags != 0 {
            return Err(invalid::<D>());
        }
        place.set(self.with(|state| state.model.create())?)
    }

    /// `cuGraphDestroy`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_destroy(&self, graph: u64) -> Result<(), D> {
        self.with(|state| state.model.destroy(graph))
    }

    /// `cuGraphClone`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_clone(&self, place: Out<u64, D>, original: u64) -> Result<(), D> {
        place.required()?;
        place.set(self.with(|state| state.model.clone_graph(original))?)
    }

    /// `cuGraphNodeFindInClone`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_find_in_clone(&self, place: Out<u64, D>, original: u64, clone: u64) -> Result<(), D> {
        place.required()?;
        place.set(self.with(|state| state.model.find_in_clone(original, clone))?)
    }

    /// `cuGraphGetNodes`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_get_nodes(&self, graph: u64, nodes: Out<u64, D>, count: Out<usize, D>) -> Result<(), D> {
        count.required()?;
        let list = self.with(|state| Ok(state.model.graph(graph)?.nodes.clone()))?;
        store::<D>(&list, nodes, count)
    }

    /// `cuGraphGetRootNodes`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_get_root_nodes(
        &self,
        graph: u64,
        nodes: Out<u64, D>,
        count: Out<usize, D>,
    ) -> Result<(), D> {
        count.required()?;
        let list = self.with(|state| {
            let is_root = |node: &u64| state.model.node(*node).is_ok_and(|node| node.before.is_empty());
            Ok(state.model.graph(graph)?.nodes.iter().copied().filter(is_root).collect::<Vec<u64>>())
        })?;
        store::<D>(&list, nodes, count)
    }

    /// `cuGraphGetEdges_v2`; the first form has no `data`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_get_edges(
        &self,
        graph: u64,
        from: Out<u64, D>,
        to: Out<u64, D>,
        data: Out<[u8; 8], D>,
        count: Out<usize, D>,
    ) -> Result<(), D> {
        count.required()?;
        if from.is_given() != to.is_given() {
            return Err(invalid::<D>());
        }
        let edges = self.with(|state| all_edges(&state.model, graph))?;
        let ends = |end: fn(&(u64, u64, EdgeData)) -> u64| edges.iter().map(end).collect::<Vec<u64>>();
        let list: Vec<EdgeData> = edges.iter().map(|edge| edge.2).collect();
        store_edges::<D>(&list, from.is_given(), data, count)?;
        if from.is_given() {
            let room = count.get()?;
            store::<D>(&ends(|edge| edge.0), from, count)?;
            // Both arrays have the same room.
            count.set(room)?;
        }
        store::<D>(&ends(|edge| edge.1), to, count)
    }

    /// `cuGraphNodeGetDependencies_v2`; the first form has no `data`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_get_dependencies(
        &self,
        node: u64,
        nodes: Out<u64, D>,
        data: Out<[u8; 8], D>,
        count: Out<usize, D>,
    ) -> Result<(), D> {
        let edges = self.with(|state| Ok(state.model.node(node)?.before.clone()))?;
        self.store_neighbours(&edges, nodes, data, count)
    }

    /// `cuGraphNodeGetDependentNodes_v2`; the first form has no `data`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_get_dependent_nodes(
        &self,
        node: u64,
        nodes: Out<u64, D>,
        data: Out<[u8; 8], D>,
        count: Out<usize, D>,
    ) -> Result<(), D> {
        let edges = self.with(|state| state.model.after(node))?;
        self.store_neighbours(&edges, nodes, data, count)
    }

    fn store_neighbours(
        &self,
        list: &[Edge],
        nodes: Out<u64, D>,
        data: Out<[u8; 8], D>,
        count: Out<usize, D>,
    ) -> Result<(), D> {
        count.required()?;
        let edges: Vec<EdgeData> = list.iter().map(|edge| edge.1).collect();
        store_edges::<D>(&edges, nodes.is_given(), data, count)?;
        store::<D>(&list.iter().map(|edge| edge.0).collect::<Vec<u64>>(), nodes, count)
    }

    /// `cuGraphAddDependencies_v2`; the first form has no `data`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_dependencies(
        &self,
        graph: u64,
        from: In<u64, D>,
        to: In<u64, D>,
        data: In<[u8; 8], D>,
        count: usize,
    ) -> Result<(), D> {
        let edges = self.edges(from, to, data, count)?;
        self.with(|state| state.model.connect(graph, &edges))
    }

    /// `cuGraphRemoveDependencies_v2`; the first form has no `data`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_remove_dependencies(
        &self,
        graph: u64,
        from: In<u64, D>,
        to: In<u64, D>,
        data: In<[u8; 8], D>,
        count: usize,
    ) -> Result<(), D> {
        let edges = self.edges(from, to, data, count)?;
        self.with(|state| state.model.disconnect(graph, &edges))
    }

    fn edges(
        &self,
        from: In<u64, D>,
        to: In<u64, D>,
        data: In<[u8; 8], D>,
        count: usize,
    ) -> Result<Edges, D> {
        let ends = from.list(count)?.into_iter().zip(to.list(count)?);
        Ok(ends.zip(edges::<D>(data, count)?).map(|((from, to), data)| (from, to, data)).collect())
    }

    /// `cuGraphDestroyNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_destroy_node(&self, node: u64) -> Result<(), D> {
        self.with(|state| state.model.destroy_node(node))
    }

    /// `cuGraphNodeGetType`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_get_type(&self, node: u64, kind: Out<u32, D>) -> Result<(), D> {
        kind.required()?;
        kind.set(self.with(|state| Ok(super::nodes::kind(&state.model.node(node)?.work)))?)
    }

    /// `cuGraphNodeGetContainingGraph`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_get_containing_graph(&self, node: u64, graph: Out<u64, D>) -> Result<(), D> {
        graph.required()?;
        graph.set(self.with(|state| Ok(state.model.node(node)?.graph))?)
    }

    /// `cuGraphNodeGetLocalId`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_get_local_id(&self, node: u64, id: Out<u32, D>) -> Result<(), D> {
        id.required()?;
        id.set(self.with(|state| Ok(state.model.node(node)?.number))?)
    }

    /// `cuGraphNodeGetToolsId`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_get_tools_id(&self, node: u64, id: Out<u64, D>) -> Result<(), D> {
        id.required()?;
        id.set(self.with(|state| {
            let node = state.model.node(node)?;
            Ok(u64::from(state.model.graph(node.graph)?.id) << 32 | u64::from(node.number))
        })?)
    }

    /// `cuGraphGetId`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_get_id(&self, graph: u64, id: Out<u32, D>) -> Result<(), D> {
        id.required()?;
        id.set(self.with(|state| Ok(state.model.graph(graph)?.id))?)
    }

    /// `cuGraphDebugDotPrint`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_debug_dot_print(&self, graph: u64, path: In<c_char, D>, flags: u32) -> Result<(), D> {
        use std::os::unix::ffi::OsStrExt;

        let path = path.text();
        let path = Path::new(std::ffi::OsStr::from_bytes(path.get()?));
        let text = self.with(|state| dot::text(&state.model, graph, flags))?;
        std::fs::write(path, text).map_err(|_| failed::<D>(Code::CUDA_ERROR_OPERATING_SYSTEM))
    }

    /// `cuGraphChildGraphNodeGetGraph`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_child_graph_node_get_graph(&self, node: u64, graph: Out<u64, D>) -> Result<(), D> {
        graph.required()?;
        graph.set(self.with(|state| match state.model.node(node)?.work {
            NodeWork::Child(child) => Ok(child),
            NodeWork::Plain(_) | NodeWork::Conditional(_) => Err(Code::CUDA_ERROR_INVALID_VALUE),
        })?)
    }
}

/// All edges, by the node that waits.
fn all_edges(model: &Model, graph: u64) -> std::result::Result<Edges, Code> {
    let mut all = Vec::new();
    for to in &model.graph(graph)?.nodes {
        all.extend(model.node(*to)?.before.iter().map(|(from, data)| (*from, *to, *data)));
    }
    Ok(all)
}
