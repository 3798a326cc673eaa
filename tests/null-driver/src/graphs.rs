//! Graphs. They belong to no context; their nodes run one after the other when the executable is launched.
//!
//! An executable cannot be made of a graph that launches `refuse_N`: the answer is the code N, and the node. Nor can a node of an
//! executable be changed so; a change of a graph inside stops there, behind the nodes that it has changed. A graph, or an executable,
//! that was destroyed is never freed, so that a call on it is detected; but the next graph has the handle of the latest that was destroyed,
//! as with a driver that frees memory.

use super::{
    Copy3D, Handle, HostFunction, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status, copy, current, fill,
    function, give, held, launch, pointer, put,
};
use crate::{Kind, life::Life};
use core::ffi::{c_uint, c_void};
use std::{
    collections::{BTreeSet, HashMap},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

/// `CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE`.
const UPDATE_FAILURE: Status = 910;

#[derive(Clone)]
enum Work {
    Kernel {
        function: Handle,
        parameters: Vec<u8>,
    },
    Copy(Copy3D),
    Fill {
        to: u64,
        pitch: usize,
        value: c_uint,
        element: c_uint,
        width: usize,
        height: usize,
    },
    Writes(Vec<WriteOperation>),
    Host(HostNode),
    Child(Handle),
    Empty,
    Wait(Handle),
    Record(Handle),
    /// The first body runs once if the value is not 0.
    Conditional {
        value: c_uint,
        bodies: &'static [Handle],
    },
}

impl Work {
    /// True if both are of one kind.
    fn is_like(&self, other: &Work) -> bool {
        core::mem::discriminant(self) == core::mem::discriminant(other)
    }
}

#[derive(Clone)]
struct Node {
    handle: Handle,
    enabled: bool,
    work: Work,
    behind: Vec<Handle>,
}

/// A graph or an executable.
struct Graph {
    life: Life,
    nodes: Mutex<Vec<Node>>,
    /// Handles for conditional nodes, with their values. A handle whose node was made is gone.
    conditions: Mutex<Vec<(u64, c_uint)>>,
    /// The graph for whose nodes the handles are, or 0 for this one.
    root: Handle,
}

impl Graph {
    fn make(nodes: Vec<Node>) -> Handle {
        Graph::inside(0, nodes)
    }

    fn inside(root: Handle, nodes: Vec<Node>) -> Handle {
        let conditions = Mutex::default();
        give(Graph { life: Life::without_context(), nodes: Mutex::new(nodes), conditions, root })
    }

    fn conditions(&self) -> MutexGuard<'_, Vec<(u64, c_uint)>> {
        self.conditions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nodes(&self) -> MutexGuard<'_, Vec<Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The graphs with handles for conditional nodes, and the bodies of those nodes: a node is destroyed without its graph's handle.
static OWNERS: Mutex<BTreeSet<Handle>> = Mutex::new(BTreeSet::new());

fn owners() -> MutexGuard<'static, BTreeSet<Handle>> {
    OWNERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handles of graphs that were destroyed, for later graphs: the latest first.
static FREE: Mutex<Vec<Handle>> = Mutex::new(Vec::new());

fn free() -> MutexGuard<'static, Vec<Handle>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True if the graphs with handles for conditional nodes have all nodes for which there is memory: `SLUICE_NULL_GRAPH_NODES`, or any
/// number.
fn is_full() -> bool {
    static MOST: LazyLock<Option<usize>> =
        LazyLock::new(|| std::env::var("SLUICE_NULL_GRAPH_NODES").ok()?.parse().ok());
    MOST.is_some_and(|most| owners().iter().map(|of| graph(*of).nodes().len()).sum::<usize>() >= most)
}

fn graph(handle: Handle) -> &'static Graph {
    // SAFETY: a handle that `give` made of a `Graph`; none is ever freed.
    unsafe { &*pointer::<Graph>(handle) }
}

/// `CUDA_KERNEL_NODE_PARAMS`.
#[repr(C)]
struct KernelNode {
    function: Handle,
    sizes: [c_uint; 7],
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
    kernel: Handle,
    context: Handle,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
struct FillNode {
    to: u64,
    pitch: usize,
    value: c_uint,
    element: c_uint,
    width: usize,
    height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
struct HostNode {
    function: Option<HostFunction>,
    data: usize,
}

/// `CUstreamBatchMemOpParams` of a write.
#[derive(Clone, Copy)]
#[repr(C)]
struct WriteOperation {
    operation: c_uint,
    address: u64,
    value: u64,
    rest: [u64; 3],
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
struct OperationsNode {
    context: Handle,
    count: c_uint,
    list: *const WriteOperation,
    flags: c_uint,
}

/// `CUgraphNodeParams` of a conditional node.
#[repr(C)]
struct ConditionalNode {
    kind: c_uint,
    reserved: [c_uint; 3],
    condition: u64,
    selection: c_uint,
    size: c_uint,
    bodies: *const Handle,
    context: Handle,
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
struct UpdateResult {
    result: c_uint,
    error_node: Handle,
    error_from: Handle,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
struct Instantiation {
    flags: u64,
    upload_stream: Handle,
    error_node: Handle,
    result: c_uint,
}

fn kernel(parameters: *const KernelNode) -> Option<Work> {
    // SAFETY: the caller passes a `CUDA_KERNEL_NODE_PARAMS`.
    let node = unsafe { &*parameters };
    let handle = if node.function == 0 { node.kernel } else { node.function };
    let _call = function(handle).owner.call("a kernel node");
    if node.sizes.iter().take(6).any(|size| *size == 0) {
        return None;
    }
    let bytes = function(handle).bytes();
    let parameters = if bytes == 0 {
        Vec::new()
    } else {
        // SAFETY: `extra` begins with the marker of the buffer, then the buffer's address.
        let [_, buffer] = unsafe { *node.extra.cast::<[*mut c_void; 2]>() };
        // SAFETY: the buffer holds the function's parameters.
        unsafe { core::slice::from_raw_parts(buffer.cast::<u8>(), bytes) }.to_vec()
    };
    Some(Work::Kernel { function: handle, parameters })
}

fn copy_of(parameters: *const Copy3D) -> Option<Work> {
    // SAFETY: the caller passes a `CUDA_MEMCPY3D`.
    let copy = unsafe { *parameters };
    (copy.width > 0 && copy.height > 0 && copy.depth > 0).then_some(Work::Copy(copy))
}

fn fill_of(parameters: *const FillNode) -> Option<Work> {
    // SAFETY: the caller passes a `CUDA_MEMSET_NODE_PARAMS`.
    let FillNode { to, pitch, value, element, width, height } = *unsafe { &*parameters };
    matches!(element, 1 | 2 | 4).then_some(Work::Fill { to, pitch, value, element, width, height })
}

fn host(parameters: *const HostNode) -> Option<Work> {
    // SAFETY: the caller passes a `CUDA_HOST_NODE_PARAMS`.
    let node = unsafe { *parameters };
    node.function.is_some().then_some(Work::Host(node))
}

fn writes(parameters: *const OperationsNode) -> Option<Work> {
    // SAFETY: the caller passes a `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
    let node = unsafe { &*parameters };
    // SAFETY: the list has the stated length.
    let list = unsafe { core::slice::from_raw_parts(node.list, node.count as usize) };
    list.iter().all(|write| matches!(write.operation, 2 | 5)).then(|| Work::Writes(list.to_vec()))
}

fn event(handle: Handle, work: fn(Handle) -> Work) -> Option<Work> {
    let _call = held(handle).1.call("an event node");
    Some(work(handle))
}

fn add(place: *mut Handle, of: Handle, behind: *const Handle, count: usize, work: Option<Work>) -> Status {
    let graph = graph(of);
    let _call = graph.life.call("the addition of a node");
    let Some(work) = work else { return INVALID_VALUE };
    let behind = if count == 0 {
        Vec::new()
    } else {
        // SAFETY: the caller's list has the stated length.
        unsafe { core::slice::from_raw_parts(behind, count) }.to_vec()
    };
    if is_full() {
        return OUT_OF_MEMORY;
    }
    let mut nodes = graph.nodes();
    // Most nodes follow one of the latest.
    if !behind.iter().all(|earlier| nodes.iter().rev().any(|node| node.handle == *earlier)) {
        return INVALID_VALUE;
    }
    // A node with a graph inside has the handle of that graph.
    let handle = if let Work::Child(inside) = work { inside } else { super::next() };
    nodes.push(Node { handle, enabled: true, work, behind });
    put(place, handle)
}

/// The nodes in an order in which each stands behind those that it waits for, otherwise in their own.
fn sorted(nodes: &[Node]) -> Vec<Node> {
    let (mut sorted, mut seen) = (Vec::with_capacity(nodes.len()), BTreeSet::new());
    let mut rest: Vec<&Node> = nodes.iter().collect();
    // One round is enough for nodes that were added behind others, as most are.
    while !rest.is_empty() {
        let left = rest.len();
        rest.retain(|node| {
            let is_ready = node.behind.iter().all(|earlier| seen.contains(earlier));
            if is_ready {
                seen.insert(node.handle);
                sorted.push((*node).clone());
            }
            !is_ready
        });
        assert!(rest.len() < left, "a graph with a cycle");
    }
    sorted
}

/// The nodes with everything inside them, in the order of their work.
fn flat(nodes: &[Node]) -> Vec<Node> {
    let each = |node: &Node| match node.work {
        Work::Child(inside) => [vec![node.clone()], flat(&graph(inside).nodes())].concat(),
        Work::Conditional { value: 1.., bodies: [body, ..] } => {
            [vec![node.clone()], flat(&graph(*body).nodes())].concat()
        }
        _ => vec![node.clone()],
    };
    sorted(nodes).iter().flat_map(each).collect()
}

/// The first node that an executable cannot have, and the code for it.
fn refusal(nodes: &[Node]) -> Option<(Status, Handle)> {
    nodes.iter().find_map(|node| match node.work {
        Work::Kernel { function: handle, .. } => match function(handle).kind {
            Kind::Refuse(code) => Some((code, node.handle)),
            _ => None,
        },
        _ => None,
    })
}

fn set(executable: Handle, node: Handle, work: Option<Work>) -> Status {
    let executable = graph(executable);
    let _call = executable.life.call("a change of an executable graph");
    let mut nodes = executable.nodes();
    let known = nodes.iter_mut().find(|known| known.handle == node);
    if let Some(Work::Kernel { function: handle, .. }) = work
        && let Kind::Refuse(code) = function(handle).kind
    {
        return code;
    }
    match (known, work) {
        (Some(known), Some(work)) if known.work.is_like(&work) => {
            known.work = work;
            SUCCESS
        }
        _ => INVALID_VALUE,
    }
}

/// Runs one node on a stream.
fn run(node: &Node, stream: Handle) -> Status {
    if !node.enabled {
        return SUCCESS;
    }
    match &node.work {
        Work::Kernel { function, parameters } => return launch(*function, stream, parameters),
        Work::Copy(what) => what.run(),
        Work::Fill { to, pitch, value, element: 1, width, height } => {
            fill(*to, *pitch, value.to_le_bytes()[0], *width, *height);
        }
        Work::Fill { to, pitch, value, element: 2, width, height } => {
            let [low, high, ..] = value.to_le_bytes();
            fill(*to, *pitch, u16::from_le_bytes([low, high]), *width, *height);
        }
        Work::Fill { to, pitch, value, width, height, .. } => _ = fill(*to, *pitch, *value, *width, *height),
        Work::Writes(list) => {
            for write in list {
                let bytes = if write.operation == 5 { 8 } else { 4 };
                copy(write.address, (&raw const write.value).expose_provenance() as u64, bytes);
            }
        }
        Work::Host(HostNode { function, data }) => {
            return super::cuLaunchHostFunc(stream, *function, core::ptr::with_exposed_provenance_mut(*data));
        }
        Work::Wait(event) => return super::cuStreamWaitEvent(stream, *event, 0),
        Work::Record(event) => return super::cuEventRecord(*event, stream),
        Work::Child(_) | Work::Conditional { .. } | Work::Empty => {}
    }
    SUCCESS
}

super::export! {
    cuGraphCreate(place: *mut Handle, flags: c_uint) {
        if flags != 0 {
            return INVALID_VALUE;
        }
        let again = free().pop().inspect(|again| graph(*again).life.begin_again());
        put(place, again.unwrap_or_else(|| Graph::make(Vec::new())))
    }
    cuGraphDestroy(handle: Handle) {
        graph(handle).life.end("cuGraphDestroy");
        owners().remove(&handle);
        graph(handle).nodes().clear();
        graph(handle).conditions().clear();
        free().push(handle);
        SUCCESS
    }
    cuGraphAddKernelNode_v2(place: *mut Handle, of: Handle, behind: *const Handle, count: usize,
        parameters: *const KernelNode) {
        add(place, of, behind, count, kernel(parameters))
    }
    cuGraphAddMemcpyNode(place: *mut Handle, of: Handle, behind: *const Handle, count: usize,
        parameters: *const Copy3D, _context: Handle) {
        add(place, of, behind, count, copy_of(parameters))
    }
    cuGraphAddMemsetNode(place: *mut Handle, of: Handle, behind: *const Handle, count: usize,
        parameters: *const FillNode, _context: Handle) {
        add(place, of, behind, count, fill_of(parameters))
    }
    cuGraphAddBatchMemOpNode(place: *mut Handle, of: Handle, behind: *const Handle, count: usize,
        parameters: *const OperationsNode) {
        add(place, of, behind, count, writes(parameters))
    }
    cuGraphAddHostNode(place: *mut Handle, of: Handle, behind: *const Handle, count: usize,
        parameters: *const HostNode) {
        add(place, of, behind, count, host(parameters))
    }
    cuGraphAddChildGraphNode(place: *mut Handle, of: Handle, behind: *const Handle, count: usize, child: Handle) {
        let _call = graph(child).life.call("cuGraphAddChildGraphNode");
        let inside = Graph::make(graph(child).nodes().clone());
        add(place, of, behind, count, Some(Work::Child(inside)))
    }
    cuGraphAddEmptyNode(place: *mut Handle, of: Handle, behind: *const Handle, count: usize) {
        add(place, of, behind, count, Some(Work::Empty))
    }
    cuGraphAddEventWaitNode(place: *mut Handle, of: Handle, behind: *const Handle, count: usize, handle: Handle) {
        add(place, of, behind, count, event(handle, Work::Wait))
    }
    cuGraphAddEventRecordNode(place: *mut Handle, of: Handle, behind: *const Handle, count: usize, handle: Handle) {
        add(place, of, behind, count, event(handle, Work::Record))
    }
    cuGraphAddDependencies_v2(of: Handle, from: *const Handle, to: *const Handle, _data: *const c_void, count: usize) {
        let _call = graph(of).life.call("cuGraphAddDependencies");
        // SAFETY: the caller's lists have the stated length.
        let from = unsafe { core::slice::from_raw_parts(from, count) };
        // SAFETY: as above.
        let to = unsafe { core::slice::from_raw_parts(to, count) };
        let mut nodes = graph(of).nodes();
        let places: HashMap<Handle, usize> = nodes.iter().zip(0..).map(|(node, place)| (node.handle, place)).collect();
        for (from, to) in from.iter().zip(to) {
            let Some(node) = places.get(to).and_then(|place| nodes.get_mut(*place)) else { return INVALID_VALUE };
            node.behind.push(*from);
        }
        SUCCESS
    }
    cuGraphConditionalHandleCreate(place: *mut u64, of: Handle, _context: Handle, value: c_uint, flags: c_uint) {
        let _calls = (graph(of).life.call("cuGraphConditionalHandleCreate"), current().call("a conditional handle"));
        if flags > 1 {
            return INVALID_VALUE;
        }
        let handle = super::next();
        graph(of).conditions().push((handle, value));
        owners().insert(of);
        put(place, handle)
    }
    cuGraphAddNode_v2(place: *mut Handle, of: Handle, behind: *const Handle, _data: *const c_void, count: usize,
        parameters: *mut ConditionalNode) {
        // SAFETY: the caller passes a `CUgraphNodeParams`, and of conditional nodes only.
        let node = unsafe { &mut *parameters };
        let root = if graph(of).root == 0 { of } else { graph(of).root };
        let mut conditions = graph(root).conditions();
        let Some(known) = conditions.iter().position(|(handle, _)| *handle == node.condition) else {
            return INVALID_VALUE;
        };
        let (_, value) = conditions.remove(known);
        drop(conditions);
        let bodies: Vec<Handle> = (0..node.size).map(|_| Graph::inside(root, Vec::new())).collect();
        owners().extend(&bodies);
        let bodies: &'static [Handle] = bodies.leak();
        node.bodies = bodies.as_ptr();
        add(place, of, behind, count, Some(Work::Conditional { value, bodies }))
    }
    cuGraphDestroyNode(handle: Handle) {
        for of in owners().iter() {
            let mut nodes = graph(*of).nodes();
            if let Some(place) = nodes.iter().position(|node| node.handle == handle) {
                nodes.remove(place);
                nodes.iter_mut().for_each(|node| node.behind.retain(|earlier| *earlier != handle));
                return SUCCESS;
            }
        }
        INVALID_VALUE
    }
    cuGraphRemoveDependencies_v2(of: Handle, from: *const Handle, to: *const Handle, _data: *const c_void,
        count: usize) {
        let _call = graph(of).life.call("cuGraphRemoveDependencies");
        // SAFETY: the caller's lists have the stated length.
        let from = unsafe { core::slice::from_raw_parts(from, count) };
        // SAFETY: as above.
        let to = unsafe { core::slice::from_raw_parts(to, count) };
        let mut nodes = graph(of).nodes();
        for (from, to) in from.iter().zip(to) {
            let Some(node) = nodes.iter_mut().find(|node| node.handle == *to) else { return INVALID_VALUE };
            let Some(place) = node.behind.iter().position(|earlier| earlier == from) else { return INVALID_VALUE };
            node.behind.remove(place);
        }
        SUCCESS
    }
    cuGraphChildGraphNodeGetGraph(node: Handle, place: *mut Handle) { put(place, node) }
    cuGraphKernelNodeSetAttribute(_node: Handle, _attribute: c_uint, _value: *const c_void) { SUCCESS }
    cuGraphInstantiateWithParams(place: *mut Handle, handle: Handle, parameters: *mut Instantiation) {
        let _calls = (graph(handle).life.call("cuGraphInstantiate"), current().call("cuGraphInstantiate"));
        let nodes = flat(&graph(handle).nodes());
        if let Some((code, node)) = refusal(&nodes) {
            // SAFETY: the caller passes a `CUDA_GRAPH_INSTANTIATE_PARAMS`.
            unsafe { (*parameters).error_node = node };
            return code;
        }
        put(place, Graph::make(nodes))
    }
    cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, parameters: *const KernelNode) {
        set(executable, node, kernel(parameters))
    }
    cuGraphExecMemcpyNodeSetParams(executable: Handle, node: Handle, parameters: *const Copy3D, _context: Handle) {
        set(executable, node, copy_of(parameters))
    }
    cuGraphExecMemsetNodeSetParams(executable: Handle, node: Handle, parameters: *const FillNode, _context: Handle) {
        set(executable, node, fill_of(parameters))
    }
    cuGraphExecBatchMemOpNodeSetParams(executable: Handle, node: Handle, parameters: *const OperationsNode) {
        set(executable, node, writes(parameters))
    }
    cuGraphExecHostNodeSetParams(executable: Handle, node: Handle, parameters: *const HostNode) {
        set(executable, node, host(parameters))
    }
    cuGraphExecEventWaitNodeSetEvent(executable: Handle, node: Handle, handle: Handle) {
        set(executable, node, event(handle, Work::Wait))
    }
    cuGraphExecEventRecordNodeSetEvent(executable: Handle, node: Handle, handle: Handle) {
        set(executable, node, event(handle, Work::Record))
    }
    cuGraphExecChildGraphNodeSetParams(executable: Handle, node: Handle, child: Handle) {
        let _calls = (graph(executable).life.call("a change"), graph(child).life.call("a change"));
        let old = flat(&graph(node).nodes());
        let new = flat(&graph(child).nodes());
        for (old, new) in old.iter().zip(new) {
            let changed = set(executable, old.handle, Some(new.work));
            if changed != SUCCESS {
                return changed;
            }
        }
        SUCCESS
    }
    cuGraphExecUpdate_v2(executable: Handle, by: Handle, result: *mut UpdateResult) {
        let _calls = (graph(executable).life.call("cuGraphExecUpdate"), graph(by).life.call("cuGraphExecUpdate"));
        let new = flat(&graph(by).nodes());
        let mut nodes = graph(executable).nodes();
        let refused = nodes.iter().zip(&new).find(|(old, new)| !old.work.is_like(&new.work));
        let refused = refused.map(|(_, new)| new.handle).or(refusal(&new).map(|(_, node)| node));
        if refused.is_some() || nodes.len() != new.len() {
            // SAFETY: the caller passes a `CUgraphExecUpdateResultInfo`.
            unsafe { (*result).error_node = refused.unwrap_or(0) };
            return UPDATE_FAILURE;
        }
        for (old, new) in nodes.iter_mut().zip(new) {
            if !matches!(old.work, Work::Child(_)) {
                old.work = new.work;
            }
        }
        SUCCESS
    }
    cuGraphNodeSetEnabled(executable: Handle, node: Handle, enabled: c_uint) {
        let _call = graph(executable).life.call("cuGraphNodeSetEnabled");
        match graph(executable).nodes().iter_mut().find(|known| known.handle == node) {
            Some(node) if matches!(node.work, Work::Kernel { .. } | Work::Copy(_) | Work::Fill { .. }) => {
                node.enabled = enabled != 0;
            }
            _ => return INVALID_VALUE,
        }
        SUCCESS
    }
    cuGraphLaunch(executable: Handle, stream: Handle) {
        let _calls = (graph(executable).life.call("cuGraphLaunch"), held(stream).1.call("cuGraphLaunch"));
        graph(executable).nodes().iter().map(|node| run(node, stream)).find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
    }
    cuGraphExecDestroy(executable: Handle) {
        graph(executable).life.end("cuGraphExecDestroy");
        SUCCESS
    }
}
