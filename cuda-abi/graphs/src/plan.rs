//! The work of nodes, and graphs in the form that a driver instantiates.
//!
//! Handles and addresses are numbers of the library that made them. A plan owns all that it names: parameters are copied when a
//! node is made, as the header requires.

use sluice_cuda_abi::sys::CUgraphNodeType;

/// A graph that is ready to be instantiated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Nodes in an order in which each one stands after its dependencies.
    pub nodes: Vec<PlanNode>,
}

/// A node of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanNode {
    /// Its number in its graph. Clones and executable graphs keep it, so it names a node in an update.
    pub number: u32,
    /// False for a node that `cuGraphNodeSetEnabled` has turned off: it then only keeps its place in the order.
    pub enabled: bool,
    /// Nodes that must be complete before it.
    pub dependencies: Vec<Dependency>,
    /// Its work.
    pub work: Work,
}

/// A dependency of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// Index of the earlier node in [`Plan::nodes`].
    pub node: u32,
    /// The edge between them.
    pub edge: EdgeData,
}

/// `CUgraphEdgeData`; all zero for a full dependency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EdgeData {
    /// The event of the earlier node that releases the later one.
    pub from_port: u8,
    /// The part of the later node that waits.
    pub to_port: u8,
    /// `CUgraphDependencyType`.
    pub kind: u8,
}

impl EdgeData {
    /// The structure of the header.
    #[must_use]
    pub const fn bytes(self) -> [u8; 8] {
        [self.from_port, self.to_port, self.kind, 0, 0, 0, 0, 0]
    }

    /// Reads the structure of the header; `None` if reserved bytes are in use.
    #[must_use]
    pub const fn read(bytes: [u8; 8]) -> Option<EdgeData> {
        match bytes {
            [from_port, to_port, kind, 0, 0, 0, 0, 0] => Some(EdgeData { from_port, to_port, kind }),
            _ => None,
        }
    }
}

/// The work of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// A launch of a kernel.
    Kernel(KernelWork),
    /// A copy.
    Copy {
        /// The parameters.
        copy: Copy3D,
        /// Context that makes the copy.
        context: u64,
    },
    /// A fill.
    Fill {
        /// The parameters.
        fill: FillWork,
        /// Context that makes the fill.
        context: u64,
    },
    /// A function of the program.
    Host(HostWork),
    /// A whole graph.
    Child(Plan),
    /// Graphs of which a value selects one, once or again and again.
    Conditional(ConditionalWork),
    /// Nothing: a join in the order.
    Empty,
    /// Wait for an event's latest recording outside of the graph.
    EventWait {
        /// The event.
        event: u64,
    },
    /// Record an event.
    EventRecord {
        /// The event.
        event: u64,
    },
    /// Writes of values, and waits for values, in their order.
    MemoryOperations {
        /// The operations.
        operations: Vec<MemoryOperation>,
        /// Context that makes them.
        context: u64,
    },
    /// An allocation, whose memory exists already: a library has nothing to do.
    Allocation(AllocationWork),
    /// The end of an allocation: a library has nothing to do.
    Free {
        /// Its address.
        address: u64,
    },
}

impl Plan {
    /// The node of a path: its number, preceded by the numbers of the child nodes around it. Behind the number of a conditional node
    /// stands the index of a body.
    #[must_use]
    pub fn node(&self, path: &[u32]) -> Option<&PlanNode> {
        let (first, rest) = path.split_first()?;
        let node = self.nodes.iter().find(|node| node.number == *first)?;
        match &node.work {
            _ if rest.is_empty() => Some(node),
            Work::Child(child) => child.node(rest),
            Work::Conditional(conditional) => {
                let (body, rest) = rest.split_first()?;
                conditional.bodies.get(*body as usize)?.node(rest)
            }
            _ => None,
        }
    }

    /// The same, to change it.
    pub fn node_mut(&mut self, path: &[u32]) -> Option<&mut PlanNode> {
        let (first, rest) = path.split_first()?;
        let node = self.nodes.iter_mut().find(|node| node.number == *first)?;
        if rest.is_empty() {
            return Some(node);
        }
        match &mut node.work {
            Work::Child(child) => child.node_mut(rest),
            Work::Conditional(conditional) => {
                let (body, rest) = rest.split_first()?;
                conditional.bodies.get_mut(*body as usize)?.node_mut(rest)
            }
            _ => None,
        }
    }
}

impl Work {
    /// True for an allocation and for the end of one.
    #[must_use]
    pub const fn is_of_memory(&self) -> bool {
        matches!(self, Work::Allocation(_) | Work::Free { .. })
    }

    /// `CUgraphNodeType`.
    #[must_use]
    pub const fn kind(&self) -> CUgraphNodeType {
        match self {
            Work::Kernel(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL,
            Work::Copy { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY,
            Work::Fill { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET,
            Work::Host(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST,
            Work::Child(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH,
            Work::Conditional(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL,
            Work::Empty => CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY,
            Work::EventWait { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            Work::EventRecord { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_EVENT_RECORD,
            Work::MemoryOperations { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
            Work::Allocation(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            Work::Free { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE,
        }
    }
}

/// A conditional node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionalWork {
    /// The handle of its value.
    pub handle: u64,
    /// The way in which the value selects a body.
    pub kind: ConditionalKind,
    /// Context of the handle and of all kernels in the bodies.
    pub context: u64,
    /// The graphs inside.
    pub bodies: Vec<Plan>,
}

/// `CUgraphConditionalNodeType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ConditionalKind {
    /// The first body runs if the value is not 0, the second one, if there is one, if it is 0.
    If = 0,
    /// The body runs again and again as long as the value is not 0.
    While = 1,
    /// The body runs whose index the value is.
    Switch = 2,
}

impl ConditionalKind {
    /// Reads the number of the header.
    #[must_use]
    pub const fn of(number: u32) -> Option<ConditionalKind> {
        match number {
            0 => Some(ConditionalKind::If),
            1 => Some(ConditionalKind::While),
            2 => Some(ConditionalKind::Switch),
            _ => None,
        }
    }

    /// True if a node of this kind may have so many bodies.
    #[must_use]
    pub const fn takes(self, bodies: usize) -> bool {
        match self {
            ConditionalKind::If => matches!(bodies, 1 | 2),
            ConditionalKind::While => bodies == 1,
            ConditionalKind::Switch => bodies != 0,
        }
    }

    /// The body that a value selects.
    #[must_use]
    pub const fn body(self, value: u32) -> usize {
        match (self, value) {
            (ConditionalKind::Switch, value) => value as usize,
            (ConditionalKind::While, 0) => usize::MAX,
            (ConditionalKind::If, 0) => 1,
            (ConditionalKind::If | ConditionalKind::While, _) => 0,
        }
    }
}

/// The parameters of a kernel node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelWork {
    /// `CUfunction` or `CUkernel`.
    pub function: u64,
    /// Context of the launch.
    pub context: u64,
    /// Blocks of the grid.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The parameters, packed by the kernel's layout.
    pub parameters: Box<[u8]>,
    /// Attributes that were set, by ascending id.
    pub attributes: Vec<KernelAttribute>,
}

impl KernelWork {
    /// The value of an attribute that was set.
    #[must_use]
    pub fn attribute(&self, id: u32) -> Option<&[u8; 64]> {
        self.attributes.iter().find(|attribute| attribute.id == id).map(|attribute| &attribute.value)
    }

    /// Sets an attribute.
    pub fn set_attribute(&mut self, id: u32, value: [u8; 64]) {
        match self.attributes.binary_search_by_key(&id, |attribute| attribute.id) {
            Ok(place) => self.attributes[place].value = value,
            Err(place) => self.attributes.insert(place, KernelAttribute { id, value }),
        }
    }
}

/// A `CUlaunchAttribute` of a kernel node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelAttribute {
    /// `CUlaunchAttributeID`.
    pub id: u32,
    /// `CUlaunchAttributeValue`.
    pub value: [u8; 64],
}

/// `CUDA_MEMCPY3D`. A flat copy has a height and a depth of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy3D {
    /// The source.
    pub from: CopySide,
    /// The destination.
    pub to: CopySide,
    /// Bytes of a row.
    pub width: u64,
    /// Rows of a slice.
    pub height: u64,
    /// Slices.
    pub depth: u64,
}

impl Copy3D {
    /// True if no byte is copied. A stream skips such a copy, and no node can have it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }
}

/// One side of a [`Copy3D`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopySide {
    /// First byte of a row.
    pub x: u64,
    /// First row.
    pub y: u64,
    /// First slice.
    pub z: u64,
    /// Level of a mipmap.
    pub level: u64,
    /// `CUmemorytype`: it selects the host address, the device address, the array, or, for unified memory, the device address.
    pub kind: u32,
    /// Address in host memory.
    pub host: u64,
    /// Address in device or unified memory.
    pub device: u64,
    /// `CUarray`.
    pub array: u64,
    /// Bytes between rows; 0 for rows without a gap.
    pub pitch: u64,
    /// Rows between slices; 0 for slices without a gap.
    pub height: u64,
}

impl CopySide {
    /// The side of a flat copy: an address in memory of a [`memory_type`].
    #[must_use]
    pub const fn flat(kind: u32, address: u64) -> Self {
        let (host, device) = if kind == memory_type::HOST { (address, 0) } else { (0, address) };
        Self { x: 0, y: 0, z: 0, level: 0, kind, host, device, array: 0, pitch: 0, height: 0 }
    }
}

/// `CUmemorytype`.
pub mod memory_type {
    /// Host memory.
    pub const HOST: u32 = 1;
    /// Device memory.
    pub const DEVICE: u32 = 2;
    /// An array.
    pub const ARRAY: u32 = 3;
    /// Memory of the kind that its address has.
    pub const UNIFIED: u32 = 4;
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillWork {
    /// Address of the first element.
    pub to: u64,
    /// Bytes between rows; without meaning for one row.
    pub pitch: u64,
    /// The element's value.
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub element: u32,
    /// Elements of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
}

impl FillWork {
    /// True if no element is written. A stream skips such a fill, and no node can have it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.width == 0 || self.height == 0
    }
}

/// `CUDA_HOST_NODE_PARAMS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostWork {
    /// Address of the function.
    pub function: u64,
    /// Its argument.
    pub data: u64,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocationWork {
    /// The device of the memory.
    pub device: i32,
    /// Bytes that the program asked for.
    pub bytes: u64,
    /// The address, as long as the graph or an executable of it exists, or the allocation is not freed.
    pub address: u64,
    /// `CUmemAccessDesc`s: kind of place, device and flags.
    pub access: Box<[[u32; 3]]>,
}

/// A `CUstreamBatchMemOpParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOperation {
    /// Write a value.
    Write {
        /// Address, aligned to the value's size.
        to: u64,
        /// The value.
        value: u64,
        /// 8 bytes instead of 4.
        wide: bool,
        /// `CUstreamWriteValue_flags`.
        flags: u32,
    },
    /// Wait until a comparison with a value is true.
    Wait {
        /// Address, aligned to the value's size.
        at: u64,
        /// The value.
        value: u64,
        /// 8 bytes instead of 4.
        wide: bool,
        /// `CUstreamWaitValue_flags`.
        flags: u32,
    },
}

impl MemoryOperation {
    /// True for a write of a value.
    #[must_use]
    pub const fn is_write(&self) -> bool {
        matches!(self, MemoryOperation::Write { .. })
    }
}
