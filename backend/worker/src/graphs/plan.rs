//! Plans whose objects and addresses are resolved.

use crate::session::objects::{ContextRef, GuestContext, GuestImage};
use sluice_driver::{
    CopyBox, DeviceRange, Handle, LaunchArguments, LaunchAttribute, NodeFunction, NodeWork, Rows,
    WrittenValue,
};
use sluice_protocol::{
    graph::{Dependency, NodeKind, Selection},
    handle::{Array, Function, Id, Module},
};
use std::collections::{BTreeSet, HashMap, HashSet};

/// A node, behind its dependencies.
#[derive(Debug)]
pub(crate) struct GraphNode {
    pub(crate) number: u32,
    pub(crate) enabled: bool,
    pub(crate) dependencies: Box<[Dependency]>,
    pub(crate) work: GraphWork,
}

/// The work of a node.
#[derive(Debug)]
pub(crate) enum GraphWork {
    Kernel {
        launch: LaunchArguments,
        is_kernel: bool,
        context: ContextRef,
        parameters: Box<[u8]>,
        attributes: Box<[LaunchAttribute]>,
    },
    Copy {
        copy: CopyBox,
        context: ContextRef,
    },
    Fill {
        to: DeviceRange,
        element: u32,
        value: u32,
        rows: Rows,
        context: ContextRef,
    },
    Host(NodeFunction),
    Child(Vec<GraphNode>),
    Empty,
    EventWait(Handle),
    EventRecord(Handle),
    Writes {
        list: Box<[WrittenValue]>,
        context: ContextRef,
    },
    Conditional(ConditionalWork),
}

/// A conditional node.
#[derive(Debug)]
pub(crate) struct ConditionalWork {
    /// The driver's number of its handle.
    pub(crate) handle: u64,
    pub(crate) selection: Selection,
    pub(crate) context: ContextRef,
    pub(crate) bodies: Vec<Vec<GraphNode>>,
}

impl ConditionalWork {
    /// `CUgraphConditionalNodeType`.
    pub(crate) const fn kind(&self) -> u32 {
        match self.selection {
            Selection::If => 0,
            Selection::While => 1,
            Selection::Switch => 2,
        }
    }

    /// True if a node may have so many bodies.
    pub(crate) const fn takes(selection: Selection, bodies: u32) -> bool {
        match selection {
            Selection::If => matches!(bodies, 1 | 2),
            Selection::While => bodies == 1,
            Selection::Switch => bodies != 0,
        }
    }
}

/// The graphs inside a node.
pub(crate) enum Nested<'a> {
    Child(&'a [GraphNode]),
    Conditional(&'a ConditionalWork),
}

impl GraphWork {
    pub(crate) const fn kind(&self) -> NodeKind {
        match self {
            GraphWork::Kernel { .. } => NodeKind::Kernel,
            GraphWork::Copy { .. } => NodeKind::Copy,
            GraphWork::Fill { .. } => NodeKind::Fill,
            GraphWork::Host(_) => NodeKind::Host,
            GraphWork::Child(_) => NodeKind::Child,
            GraphWork::Empty => NodeKind::Empty,
            GraphWork::EventWait(_) => NodeKind::EventWait,
            GraphWork::EventRecord(_) => NodeKind::EventRecord,
            GraphWork::Writes { .. } => NodeKind::Writes,
            GraphWork::Conditional(_) => NodeKind::Conditional,
        }
    }

    /// The work in the driver's form, or the graphs inside.
    pub(crate) fn of_driver(&self) -> Result<NodeWork<'_>, Nested<'_>> {
        Ok(match self {
            GraphWork::Kernel { launch, is_kernel, context, parameters, attributes: _ } => NodeWork::Kernel {
                launch: *launch,
                is_kernel: *is_kernel,
                context: context.handle,
                parameters,
            },
            GraphWork::Copy { copy, context } => NodeWork::Copy { copy: *copy, context: context.handle },
            GraphWork::Fill { to, element, value, rows, context } => NodeWork::Fill {
                to: *to,
                element: *element,
                value: *value,
                rows: *rows,
                context: context.handle,
            },
            GraphWork::Host(function) => NodeWork::Host(*function),
            GraphWork::Child(nodes) => return Err(Nested::Child(nodes)),
            GraphWork::Conditional(work) => return Err(Nested::Conditional(work)),
            GraphWork::Empty => NodeWork::Empty,
            GraphWork::EventWait(event) => NodeWork::EventWait(*event),
            GraphWork::EventRecord(event) => NodeWork::EventRecord(*event),
            GraphWork::Writes { list, context } => NodeWork::Writes { list, context: context.handle },
        })
    }
}

/// An event of the driver, distinguished from a later one at the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EventKey {
    /// Serial of its context.
    pub(crate) context: u64,
    pub(crate) handle: Handle,
}

/// The number in this process of a graph with handles for conditional nodes, never used again.
pub(crate) type ConditionalSerial = u64;

/// The objects that a plan uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct GraphUses {
    pub(crate) nodes: u32,
    /// Bytes of parameters, attributes and lists, of which the driver makes copies.
    pub(crate) inline_bytes: u64,
    pub(crate) contexts: Vec<GuestContext>,
    /// Functions of kernels, with their modules.
    pub(crate) functions: HashMap<Id<Function>, Id<Module>>,
    /// Arrays of copies.
    pub(crate) arrays: HashSet<Id<Array>>,
    pub(crate) events: BTreeSet<EventKey>,
    /// Libraries, and the contexts in which their kernels are launched.
    pub(crate) places: Vec<(GuestImage, GuestContext)>,
    /// The same, with the serials of the contexts.
    pub(super) placed: HashSet<(GuestImage, u64)>,
    /// Contexts with kernels that need local memory: the most bytes of each thread there.
    pub(crate) local: Vec<(GuestContext, u32)>,
    /// The graph in which the handles of conditional nodes live.
    pub(crate) conditional: Option<ConditionalSerial>,
}

impl GraphUses {
    pub(crate) fn context(&mut self, context: GuestContext) {
        if self.contexts.iter().all(|known| known.context != context.context) {
            self.contexts.push(context);
        }
    }

    pub(crate) fn place(&mut self, image: GuestImage, context: GuestContext) {
        if self.placed.insert((image, context.context.serial)) {
            self.places.push((image, context));
        }
    }

    /// Adds the local memory of each thread of a kernel.
    pub(crate) fn local(&mut self, context: GuestContext, each: u32) {
        match self.local.iter_mut().find(|(known, _)| known.context == context.context) {
            Some((_, most)) => *most = each.max(*most),
            None if each > 0 => self.local.push((context, each)),
            None => {}
        }
    }

    /// Adds what new work uses. The work that it replaces may go on to be counted.
    pub(crate) fn add(&mut self, other: GraphUses) {
        other.contexts.into_iter().for_each(|context| self.context(context));
        self.functions.extend(other.functions);
        self.arrays.extend(other.arrays);
        self.events.extend(other.events);
        other.local.into_iter().for_each(|(context, each)| self.local(context, each));
    }

    /// An estimate of the device memory that the driver takes for an executable.
    pub(crate) fn device_bytes(&self) -> u64 {
        /// A launch descriptor and a place in the queue of a device.
        const EACH_NODE: u64 = 1 << 10;
        u64::from(self.nodes).saturating_mul(EACH_NODE).saturating_add(self.inline_bytes)
    }
}

/// A plan whose objects and addresses are resolved.
#[derive(Debug, Default)]
pub(crate) struct GraphPlan {
    pub(crate) nodes: Vec<GraphNode>,
    pub(crate) uses: GraphUses,
}
