//! Graphs: their nodes, their executables, and launches of those.

use super::{LaunchArguments, Result, input, out, packed, size, streams::without_unwinding};
use crate::{
    Code, DeviceRange, Driver, Handle, HostFunction, HostRange, LaunchAttribute, Rows,
    abi::{
        BoxCopy, ConditionalNode, CopySide3D, EdgeData, FillNode, HostNode, Instantiation, KernelNode,
        OperationsNode, UpdateResult, WriteOperation,
    },
    code,
};
use core::ffi::{c_uint, c_void};

/// The work of a node that has no graph inside.
#[derive(Clone, Debug)]
pub enum NodeWork<'a> {
    /// A launch.
    Kernel {
        /// Its arguments.
        launch: LaunchArguments,
        /// True if the function is a kernel of a library.
        is_kernel: bool,
        /// Context of the launch.
        context: Handle,
        /// Parameters, packed in the layout of the function.
        parameters: &'a [u8],
    },
    /// A copy.
    Copy {
        /// Its arguments.
        copy: CopyBox,
        /// Context that makes the copy.
        context: Handle,
    },
    /// A fill of rows of `width` elements.
    Fill {
        /// The first element and all behind it.
        to: DeviceRange,
        /// Bytes of an element.
        element: u32,
        /// The element's value.
        value: u32,
        /// The rows, with a width in elements.
        rows: Rows,
        /// Context that makes the fill.
        context: Handle,
    },
    /// A function of this process.
    Host(NodeFunction),
    /// Nothing.
    Empty,
    /// A wait for an event.
    EventWait(Handle),
    /// The recording of an event.
    EventRecord(Handle),
    /// Values that are written in their order.
    Writes {
        /// The values.
        list: &'a [WrittenValue],
        /// Context that writes them.
        context: Handle,
    },
}

/// A function that the driver calls on a thread of its own, any number of times: at each launch of an executable with such a node.
/// It gets a number instead of a pointer, since launches go on after their executable was destroyed.
#[derive(Clone, Copy, Debug)]
pub struct NodeFunction {
    function: HostFunction,
    data: u64,
}

/// The content of a [`NodeFunction`]. It must not call the driver.
pub trait NodeCall {
    /// The driver has reached the node with this number.
    fn call(data: u64);
}

impl NodeFunction {
    /// A function that gives `C` a number.
    #[must_use]
    pub fn new<C: NodeCall>(data: u64) -> NodeFunction {
        NodeFunction { function: call_node::<C>, data }
    }

    fn parameters(self) -> HostNode {
        HostNode { function: Some(self.function), data: self.data }
    }
}

unsafe extern "C" fn call_node<C: NodeCall>(data: *mut c_void) {
    without_unwinding(|| C::call(data.addr() as u64));
}

/// A copy of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyBox {
    /// The destination.
    pub to: CopyEnd,
    /// The source.
    pub from: CopyEnd,
    /// Bytes of a row.
    pub width: u64,
    /// Rows of a slice.
    pub height: u64,
    /// Slices.
    pub depth: u64,
}

/// One end of a [`CopyBox`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyEnd {
    /// From the first byte to the last.
    pub memory: CopyMemory,
    /// Bytes between rows.
    pub pitch: u64,
    /// Rows between slices.
    pub rows: u64,
}

/// The memory of a [`CopyEnd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMemory {
    /// Device memory.
    Device(DeviceRange),
    /// Host memory.
    Host(HostRange),
    /// An array, from a byte of a row, a row and a slice on.
    Array(Handle, [u32; 3]),
}

/// A value of 4 or 8 bytes, the length of `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenValue {
    /// Its place.
    pub to: DeviceRange,
    /// The value.
    pub value: u64,
}

impl CopyEnd {
    fn side(self, is_flat: bool) -> Result<CopySide3D> {
        // A flat copy states no pitch: it may be longer than the greatest one.
        let pitch = if is_flat { 0 } else { size(self.pitch)? };
        let rows = size(self.rows)?;
        Ok(match self.memory {
            CopyMemory::Device(range) => CopySide3D::device(range.address(), pitch, rows),
            CopyMemory::Host(range) => CopySide3D::host(range.address(), pitch, rows),
            CopyMemory::Array(array, at) => CopySide3D::array(array, at),
        })
    }
}

impl CopyBox {
    pub(super) fn parameters(&self) -> Result<BoxCopy> {
        let is_flat = self.height == 1 && self.depth == 1;
        Ok(BoxCopy {
            from: self.from.side(is_flat)?,
            to: self.to.side(is_flat)?,
            width: size(self.width)?,
            height: size(self.height)?,
            depth: size(self.depth)?,
        })
    }
}

fn fill(to: DeviceRange, element: u32, value: u32, rows: Rows) -> Result<FillNode> {
    let (pitch, width, height) = (size(rows.pitch)?, size(rows.width)?, size(rows.height)?);
    Ok(FillNode { to: to.address(), pitch, value, element, width, height })
}

fn operations(list: &[WrittenValue]) -> Vec<WriteOperation> {
    list.iter()
        .map(|write| WriteOperation::new(write.to.address(), write.value, write.to.bytes() == 8))
        .collect()
}

fn operations_node(operations: &mut [WriteOperation], context: Handle) -> Result<OperationsNode> {
    let count = c_uint::try_from(operations.len()).map_err(|_| code::INVALID_VALUE)?;
    Ok(OperationsNode { context, count, list: operations.as_mut_ptr().cast::<c_void>(), flags: 0 })
}

/// Passes the parameters of a kernel node to `call`.
fn with_kernel(
    launch: &LaunchArguments,
    is_kernel: bool,
    context: Handle,
    parameters: &[u8],
    call: impl FnOnce(&KernelNode) -> Result<()>,
) -> Result<()> {
    let mut bytes = parameters.len();
    let mut extra = packed(parameters, &mut bytes);
    let (function, kernel) = if is_kernel { (0, launch.function) } else { (launch.function, 0) };
    call(&KernelNode {
        function,
        grid: launch.grid,
        block: launch.block,
        shared: launch.shared,
        parameters: core::ptr::null_mut(),
        extra: if parameters.is_empty() { core::ptr::null_mut() } else { extra.as_mut_ptr() },
        kernel,
        context,
    })
}

/// Edges as arrays of earlier nodes, of later nodes, and of their data.
fn ends(edges: &[(Handle, Handle, EdgeData)]) -> (Vec<Handle>, Vec<Handle>, Vec<EdgeData>) {
    let from = edges.iter().map(|edge| edge.0).collect();
    let to = edges.iter().map(|edge| edge.1).collect();
    (from, to, edges.iter().map(|edge| edge.2).collect())
}

impl Driver {
    /// `cuGraphCreate`.
    pub fn graph_create(&self) -> Result<Handle> {
        let mut graph = 0;
        call!(self.cuGraphCreate(&raw mut graph, 0))?;
        Ok(graph)
    }

    /// `cuGraphDestroy`.
    pub fn graph_destroy(&self, graph: Handle) -> Result<()> {
        call!(self.cuGraphDestroy(graph))
    }

    /// Adds a node behind others.
    pub fn graph_add(&self, graph: Handle, behind: &[Handle], work: &NodeWork<'_>) -> Result<Handle> {
        let mut node = 0;
        let (place, list, count) = (&raw mut node, behind.as_ptr(), behind.len());
        match work {
            NodeWork::Kernel { launch, is_kernel, context, parameters } => {
                with_kernel(launch, *is_kernel, *context, parameters, |kernel| {
                    call!(self.cuGraphAddKernelNode_v2(place, graph, list, count, input(kernel)))
                })?;
            }
            NodeWork::Copy { copy, context } => {
                let copy = copy.parameters()?;
                call!(self.cuGraphAddMemcpyNode(place, graph, list, count, input(&copy), *context))?;
            }
            NodeWork::Fill { to, element, value, rows, context } => {
                let fill = fill(*to, *element, *value, *rows)?;
                call!(self.cuGraphAddMemsetNode(place, graph, list, count, input(&fill), *context))?;
            }
            NodeWork::Host(function) => {
                let node = function.parameters();
                call!(self.cuGraphAddHostNode(place, graph, list, count, input(&node)))?;
            }
            NodeWork::Empty => call!(self.cuGraphAddEmptyNode(place, graph, list, count))?,
            NodeWork::EventWait(event) => {
                call!(self.cuGraphAddEventWaitNode(place, graph, list, count, *event))?;
            }
            NodeWork::EventRecord(event) => {
                call!(self.cuGraphAddEventRecordNode(place, graph, list, count, *event))?;
            }
            NodeWork::Writes { list: writes, context } => {
                let mut operations = operations(writes);
                let node = operations_node(&mut operations, *context)?;
                call!(self.cuGraphAddBatchMemOpNode(place, graph, list, count, input(&node)))?;
            }
        }
        Ok(node)
    }

    /// Adds a node that is a copy of a graph, and returns the node and the graph inside it, which the node owns.
    pub fn graph_add_child(
        &self,
        graph: Handle,
        behind: &[Handle],
        child: Handle,
    ) -> Result<(Handle, Handle)> {
        let (mut node, mut inside) = (0, 0);
        call!(self.cuGraphAddChildGraphNode(&raw mut node, graph, behind.as_ptr(), behind.len(), child))?;
        call!(self.cuGraphChildGraphNodeGetGraph(node, &raw mut inside))?;
        Ok((node, inside))
    }

    /// `cuGraphConditionalHandleCreate`: a handle of a context, for a conditional node of a graph or of one inside it.
    pub fn graph_create_handle(&self, graph: Handle, context: Handle, value: u32, flags: u32) -> Result<u64> {
        let mut handle = 0;
        call!(self.cuGraphConditionalHandleCreate(&raw mut handle, graph, context, value, flags))?;
        Ok(handle)
    }

    /// Adds a conditional node, and returns the node and its bodies, which the node owns. `selection` is a
    /// `CUgraphConditionalNodeType`.
    pub fn graph_add_conditional(
        &self,
        graph: Handle,
        behind: &[Handle],
        (handle, context): (u64, Handle),
        selection: u32,
        size: u32,
    ) -> Result<(Handle, Vec<Handle>)> {
        let mut node = 0;
        let mut parameters = ConditionalNode::new(handle, selection, size, context);
        let (list, count) = (behind.as_ptr(), behind.len());
        let place = out(&mut parameters);
        call!(self.cuGraphAddNode_v2(&raw mut node, graph, list, core::ptr::null(), count, place))?;
        if parameters.bodies.is_null() {
            return Err(code::UNKNOWN);
        }
        // SAFETY: the driver's array has as many bodies as the node was made with, and exists as long as the node.
        let bodies = unsafe { core::slice::from_raw_parts(parameters.bodies, size as usize) };
        Ok((node, bodies.to_vec()))
    }

    /// `cuGraphDestroyNode`: removes a node with its edges.
    pub fn graph_destroy_node(&self, node: Handle) -> Result<()> {
        call!(self.cuGraphDestroyNode(node))
    }

    /// `cuGraphAddDependencies_v2`: edges between nodes of a graph, with their data.
    pub fn graph_add_edges(&self, graph: Handle, edges: &[(Handle, Handle, EdgeData)]) -> Result<()> {
        let (from, to, data) = ends(edges);
        let data = data.as_ptr().cast::<c_void>();
        call!(self.cuGraphAddDependencies_v2(graph, from.as_ptr(), to.as_ptr(), data, edges.len()))
    }

    /// `cuGraphRemoveDependencies_v2`.
    pub fn graph_remove_edges(&self, graph: Handle, edges: &[(Handle, Handle, EdgeData)]) -> Result<()> {
        let (from, to, data) = ends(edges);
        let data = data.as_ptr().cast::<c_void>();
        call!(self.cuGraphRemoveDependencies_v2(graph, from.as_ptr(), to.as_ptr(), data, edges.len()))
    }

    /// `cuGraphKernelNodeSetAttribute`.
    pub fn graph_set_attribute(&self, node: Handle, attribute: &LaunchAttribute) -> Result<()> {
        call!(self.cuGraphKernelNodeSetAttribute(node, attribute.id, input(&attribute.value)))
    }

    /// Makes an executable graph.
    ///
    /// # Errors
    /// The driver's code, and the node that is the reason, or 0.
    pub fn graph_instantiate(
        &self,
        graph: Handle,
        flags: u32,
    ) -> core::result::Result<Handle, (Code, Handle)> {
        let mut executable = 0;
        let mut parameters =
            Instantiation { flags: flags.into(), upload_stream: 0, error_node: 0, result: 0 };
        let made = call!(self.cuGraphInstantiateWithParams(&raw mut executable, graph, out(&mut parameters)));
        made.map(|()| executable).map_err(|failed| (failed, parameters.error_node))
    }

    /// Replaces the work of a node in an executable graph. `node` is the node of the graph from which it was made.
    pub fn graph_set_work(&self, executable: Handle, node: Handle, work: &NodeWork<'_>) -> Result<()> {
        match work {
            NodeWork::Kernel { launch, is_kernel, context, parameters } => {
                with_kernel(launch, *is_kernel, *context, parameters, |kernel| {
                    call!(self.cuGraphExecKernelNodeSetParams_v2(executable, node, input(kernel)))
                })
            }
            NodeWork::Copy { copy, context } => {
                let copy = copy.parameters()?;
                call!(self.cuGraphExecMemcpyNodeSetParams(executable, node, input(&copy), *context))
            }
            NodeWork::Fill { to, element, value, rows, context } => {
                let fill = fill(*to, *element, *value, *rows)?;
                call!(self.cuGraphExecMemsetNodeSetParams(executable, node, input(&fill), *context))
            }
            NodeWork::Host(function) => {
                let parameters = function.parameters();
                call!(self.cuGraphExecHostNodeSetParams(executable, node, input(&parameters)))
            }
            NodeWork::Empty => Ok(()),
            NodeWork::EventWait(event) => {
                call!(self.cuGraphExecEventWaitNodeSetEvent(executable, node, *event))
            }
            NodeWork::EventRecord(event) => {
                call!(self.cuGraphExecEventRecordNodeSetEvent(executable, node, *event))
            }
            NodeWork::Writes { list, context } => {
                let mut operations = operations(list);
                let operations = operations_node(&mut operations, *context)?;
                call!(self.cuGraphExecBatchMemOpNodeSetParams(executable, node, input(&operations)))
            }
        }
    }

    /// `cuGraphExecUpdate_v2`: replaces the work of all nodes by that of a graph.
    ///
    /// # Errors
    /// The driver's code, and the node of the graph that is the reason, or 0.
    pub fn graph_update(
        &self,
        executable: Handle,
        graph: Handle,
    ) -> core::result::Result<(), (Code, Handle)> {
        let mut result = UpdateResult { result: 0, error_node: 0, error_from: 0 };
        call!(self.cuGraphExecUpdate_v2(executable, graph, out(&mut result)))
            .map_err(|failed| (failed, result.error_node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_copy_states_no_pitch_and_one_of_rows_does() {
        let pitches = |height: u64, depth: u64| {
            // SAFETY: no driver gets this range.
            let range = unsafe { DeviceRange::new(1 << 40, 1 << 34) };
            let end = CopyEnd { memory: CopyMemory::Device(range), pitch: 1 << 32, rows: height };
            let copy = CopyBox { to: end, from: end, width: 1 << 32, height, depth };
            copy.parameters().map(|copy| [copy.to.pitch, copy.from.pitch])
        };
        assert_eq!(pitches(1, 1), Ok([0; 2]), "a flat copy may be longer than the greatest pitch");
        assert_eq!(pitches(2, 1), Ok([1 << 32; 2]));
        assert_eq!(pitches(1, 2), Ok([1 << 32; 2]));
    }
}
