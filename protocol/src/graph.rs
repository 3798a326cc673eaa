//! Plans of graphs in arena memory: the form in which a guest describes an executable graph, or a change of one. In one file: writer and
//! reader of one format.
//!
//! A plan is a sequence of nodes, each behind its dependencies. A *change* is the work of one node and the way to it. Both are words and
//! fields as in a record ([`crate::field`]). Objects are ids of the session, addresses are the guest's: the worker looks both up.
//!
//! Decoding allocates nothing: nodes, dependencies and parameters are read where they are, in a private copy. It checks everything that
//! can be checked without knowing the session: kinds, limits, that a dependency leads backwards, and the depth of child graphs.

use crate::{
    field::{
        Bytes, DeviceAddress, ElementSize, Field, FieldError, LaunchAttributes, ParameterBytes, Reader,
        Writer,
    },
    handle::{ConditionalGraph, Context, Event, Function, Id},
    limits,
};

/// Sentinel: no node.
pub const NO_NODE: u32 = u32::MAX;

crate::numbered! {
    /// The kinds of work.
    pub enum NodeKind {
        /// A launch of a kernel.
        Kernel = 1,
        /// A copy.
        Copy = 2,
        /// A fill.
        Fill = 3,
        /// A function of the program.
        Host = 4,
        /// A whole graph.
        Child = 5,
        /// Nothing.
        Empty = 6,
        /// A wait for an event.
        EventWait = 7,
        /// The recording of an event.
        EventRecord = 8,
        /// Values that are written.
        Writes = 9,
        /// Graphs of which a value selects one.
        Conditional = 10,
    }
    /// The way in which the value of a conditional node selects a body.
    pub enum Selection {
        /// The first body if the value is not 0, the second one, if there is one, if it is 0.
        If = 1,
        /// The body again and again as long as the value is not 0.
        While = 2,
        /// The body whose index the value is.
        Switch = 3,
    }
    /// The memory at one end of a copy.
    pub enum Side {
        /// Device memory.
        Device = 1,
        /// Arena memory.
        Arena = 2,
        /// An array.
        Array = 3,
    }
}

/// Declares work that is a sequence of fields.
macro_rules! work {
    ($($(#[$doc:meta])* $name:ident $(<$life:lifetime>)? { $($(#[$note:meta])* $field:ident: $ty:ty,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name$(<$life>)? {
            $($(#[$note])* pub $field: $ty,)+
        }

        work!(field $($life)?; $name { $($field),+ });
    )+};
    (field $life:lifetime; $name:ident { $($field:ident),+ }) => {
        impl<$life> Field<$life> for $name<$life> {
            fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                $(self.$field.put(writer)?;)+
                Ok(())
            }
            fn get(reader: &mut Reader<$life>) -> Result<Self, FieldError> {
                Ok($name { $($field: Field::get(reader)?),+ })
            }
        }
    };
    (field; $name:ident { $($field:ident),+ }) => {
        impl<'a> Field<'a> for $name {
            fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                $(self.$field.put(writer)?;)+
                Ok(())
            }
            fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
                Ok($name { $($field: Field::get(reader)?),+ })
            }
        }
    };
}

work! {
    /// A launch of a kernel.
    Kernel<'a> {
        /// The function or kernel.
        function: Id<Function>,
        /// Context of the launch.
        context: Id<Context>,
        /// Blocks of the grid.
        grid: [u32; 3],
        /// Threads of a block.
        block: [u32; 3],
        /// Bytes of dynamic shared memory.
        shared: u32,
        /// Attributes.
        attributes: LaunchAttributes<'a>,
        /// The parameters, in the layout that `module_function` answered.
        parameters: ParameterBytes<'a>,
    }
    /// A copy of `depth` slices of `height` rows of `width` bytes, none of them 0.
    Copy {
        /// Context that makes the copy.
        context: Id<Context>,
        /// The destination.
        to: CopyEnd,
        /// The source.
        from: CopyEnd,
        /// Bytes of a row.
        width: u64,
        /// Rows of a slice.
        height: u64,
        /// Slices.
        depth: u64,
    }
    /// One end of a copy.
    CopyEnd {
        /// The memory.
        side: Side,
        /// Address of the first byte, or the id of an array.
        address: u64,
        /// Bytes between rows; 0 in an array.
        pitch: u64,
        /// Rows between slices; 0 in an array.
        rows: u64,
        /// The first byte of a row of an array, its first row, and its first slice.
        at: [u32; 3],
    }
    /// A fill of `height` rows of `width` elements.
    Fill {
        /// Context that makes the fill.
        context: Id<Context>,
        /// Address of the first element.
        to: DeviceAddress,
        /// Bytes between rows.
        pitch: u64,
        /// Bytes of an element.
        element: ElementSize,
        /// The element's value.
        value: u32,
        /// Elements of a row.
        width: u64,
        /// Rows.
        height: u64,
    }
    /// A function of the program.
    Host {
        /// The number by which the guest finds it when a launch calls it: see [`crate::session::HostCall`].
        token: u32,
    }
    /// Values that are written in their order.
    Writes<'a> {
        /// Context that makes them.
        context: Id<Context>,
        /// The list, see [`Writes::each`].
        list: Bytes<'a, { limits::GRAPH_WRITES * WRITE_BYTES }>,
    }
    /// The part of a conditional node in front of its bodies.
    ConditionalHead {
        /// Context of the handle.
        context: Id<Context>,
        /// The graph in which the handle lives.
        graph: Id<ConditionalGraph>,
        /// The driver's number of the handle.
        handle: u64,
        /// The choice of a body.
        selection: Selection,
        /// The number of bodies.
        count: u32,
    }
    /// A value that is written.
    Write {
        /// Address, aligned to the value's size.
        to: DeviceAddress,
        /// The value.
        value: u64,
        /// 8 bytes instead of 4.
        wide: bool,
    }
}

/// Bytes of a [`Write`].
const WRITE_BYTES: usize = 24;

impl<'a> Writes<'a> {
    /// Appends a value to a list.
    ///
    /// # Errors
    /// [`FieldError::Long`] if the list is full.
    pub fn push(list: &mut Vec<u8>, write: Write) -> Result<(), FieldError> {
        let mut bytes = [0; WRITE_BYTES];
        write.put(&mut Writer::new(&mut bytes))?;
        if list.len() >= limits::GRAPH_WRITES.saturating_mul(WRITE_BYTES) {
            return Err(FieldError::Long);
        }
        list.extend_from_slice(&bytes);
        Ok(())
    }

    /// The values.
    pub fn each(&self) -> impl Iterator<Item = Result<Write, FieldError>> + 'a {
        self.list.0.chunks(WRITE_BYTES).map(|bytes| {
            let mut reader = Reader::new(bytes);
            let write = Write::get(&mut reader)?;
            reader.finish()?;
            Ok(write)
        })
    }
}

/// A conditional node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditional<'a> {
    /// Everything but the bodies.
    pub head: ConditionalHead,
    /// The bodies, each behind its length.
    bodies: &'a [u8],
    depth: u32,
}

impl<'a> Conditional<'a> {
    /// A node with bodies as [`Conditional::push`] has written them, for a plan in the making.
    #[must_use]
    pub const fn new(head: ConditionalHead, bodies: &'a [u8]) -> Conditional<'a> {
        Conditional { head, bodies, depth: 0 }
    }

    /// Appends a body to a list.
    pub fn push(list: &mut Vec<u8>, plan: &[u8]) {
        list.extend_from_slice(&(plan.len() as u64).to_le_bytes());
        list.extend_from_slice(plan);
    }

    /// Its bodies, in order. Decoding ends with the first error; bytes behind the last body are one.
    pub fn bodies(&self) -> impl Iterator<Item = Result<WirePlan<'a>, FieldError>> + use<'a> {
        let mut reader = Reader::new(self.bodies);
        let (count, depth) = (self.head.count, self.depth.saturating_add(BODY_DEPTH));
        let mut next = Some(0);
        core::iter::from_fn(move || {
            let index = next?;
            if index == count {
                next = None;
                return reader.clone().finish().err().map(Err);
            }
            let body = sized_bytes(&mut reader).and_then(|bytes| WirePlan::at(bytes, depth));
            next = body.is_ok().then(|| index.saturating_add(1));
            Some(body)
        })
    }
}

/// A body is as deep as its part of a path is long: the number of its node, and its index.
const BODY_DEPTH: u32 = 2;

/// The work of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireWork<'a> {
    /// A launch of a kernel.
    Kernel(Kernel<'a>),
    /// A copy.
    Copy(Copy),
    /// A fill.
    Fill(Fill),
    /// A function of the program.
    Host(Host),
    /// A whole graph.
    Child(WirePlan<'a>),
    /// Nothing.
    Empty,
    /// Wait for an event's latest recording outside of the graph.
    EventWait(Id<Event>),
    /// Record an event.
    EventRecord(Id<Event>),
    /// Write values.
    Writes(Writes<'a>),
    /// Graphs of which a value selects one.
    Conditional(Conditional<'a>),
}

impl<'a> WireWork<'a> {
    /// Its kind.
    #[must_use]
    pub const fn kind(&self) -> NodeKind {
        match self {
            WireWork::Kernel(_) => NodeKind::Kernel,
            WireWork::Copy(_) => NodeKind::Copy,
            WireWork::Fill(_) => NodeKind::Fill,
            WireWork::Host(_) => NodeKind::Host,
            WireWork::Child(_) => NodeKind::Child,
            WireWork::Empty => NodeKind::Empty,
            WireWork::EventWait(_) => NodeKind::EventWait,
            WireWork::EventRecord(_) => NodeKind::EventRecord,
            WireWork::Writes(_) => NodeKind::Writes,
            WireWork::Conditional(_) => NodeKind::Conditional,
        }
    }

    fn get(kind: NodeKind, bytes: &'a [u8], depth: u32) -> Result<WireWork<'a>, FieldError> {
        if kind == NodeKind::Child {
            return WirePlan::at(bytes, depth.saturating_add(1)).map(WireWork::Child);
        }
        let mut reader = Reader::new(bytes);
        if kind == NodeKind::Conditional {
            let head = ConditionalHead::get(&mut reader)?;
            return Ok(WireWork::Conditional(Conditional { head, bodies: reader.rest(), depth }));
        }
        let reader_of = &mut reader;
        let work = match kind {
            NodeKind::Kernel => WireWork::Kernel(Field::get(reader_of)?),
            NodeKind::Copy => WireWork::Copy(Field::get(reader_of)?),
            NodeKind::Fill => WireWork::Fill(Field::get(reader_of)?),
            NodeKind::Host => WireWork::Host(Field::get(reader_of)?),
            NodeKind::Empty | NodeKind::Child | NodeKind::Conditional => WireWork::Empty,
            NodeKind::EventWait => WireWork::EventWait(Field::get(reader_of)?),
            NodeKind::EventRecord => WireWork::EventRecord(Field::get(reader_of)?),
            NodeKind::Writes => WireWork::Writes(Field::get(reader_of)?),
        };
        reader.finish()?;
        Ok(work)
    }

    /// More bytes than the fields take.
    fn bound(&self) -> usize {
        const FIXED: usize = 256;
        let inline = match self {
            WireWork::Kernel(work) => work.attributes.0.len().saturating_add(work.parameters.0.len()),
            WireWork::Writes(work) => work.list.0.len(),
            WireWork::Conditional(work) => work.bodies.len(),
            _ => 0,
        };
        inline.saturating_add(FIXED)
    }

    /// Appends the length of the work, and the work.
    fn put(&self, into: &mut Vec<u8>) -> Result<(), FieldError> {
        if let WireWork::Child(plan) = self {
            into.extend_from_slice(&(plan.bytes.len() as u64).to_le_bytes());
            into.extend_from_slice(plan.bytes);
            return Ok(());
        }
        let start = into.len().saturating_add(8);
        into.resize(start.saturating_add(self.bound()), 0);
        let mut writer = Writer::new(into.get_mut(start..).unwrap_or_default());
        match self {
            WireWork::Kernel(work) => work.put(&mut writer)?,
            WireWork::Copy(work) => work.put(&mut writer)?,
            WireWork::Fill(work) => work.put(&mut writer)?,
            WireWork::Host(work) => work.put(&mut writer)?,
            WireWork::Empty | WireWork::Child(_) => {}
            WireWork::EventWait(event) | WireWork::EventRecord(event) => event.put(&mut writer)?,
            WireWork::Writes(work) => work.put(&mut writer)?,
            WireWork::Conditional(work) => {
                work.head.put(&mut writer)?;
                writer.bytes(work.bodies)?;
            }
        }
        let length = writer.length();
        into.truncate(start.saturating_add(length));
        if let Some(head) = into.get_mut(start.saturating_sub(8)..start) {
            head.copy_from_slice(&(length as u64).to_le_bytes());
        }
        Ok(())
    }
}

/// A dependency of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// Index of the earlier node.
    pub node: u32,
    /// `CUgraphEdgeData`: `from_port`, `to_port` and `type`; zeroes for a full dependency.
    pub edge: [u8; 3],
}

impl Dependency {
    fn word(self) -> u64 {
        let [from, to, kind] = self.edge.map(u64::from);
        u64::from(self.node) | from << 32 | to << 40 | kind << 48
    }

    #[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
    const fn of(word: u64) -> Dependency {
        Dependency { node: word as u32, edge: [(word >> 32) as u8, (word >> 40) as u8, (word >> 48) as u8] }
    }

    /// True if the later node waits for the end of all work of the earlier one.
    #[must_use]
    pub const fn is_full(self) -> bool {
        matches!(self.edge, [0, 0, 0])
    }
}

/// A node of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireNode<'a> {
    /// Its number in its graph, which names it in changes and answers.
    pub number: u32,
    /// False for a node that only keeps its place in the order.
    pub enabled: bool,
    dependencies: &'a [u8],
    /// Its work.
    pub work: WireWork<'a>,
}

impl<'a> WireNode<'a> {
    /// Its dependencies: indices of earlier nodes.
    pub fn dependencies(&self) -> impl ExactSizeIterator<Item = Dependency> + 'a {
        self.dependencies
            .chunks_exact(8)
            .map(|word| Dependency::of(word.try_into().map_or(0, u64::from_le_bytes)))
    }
}

/// A checked head, and nodes that are decoded one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WirePlan<'a> {
    bytes: &'a [u8],
    nodes: u32,
    depth: u32,
}

impl<'a> WirePlan<'a> {
    /// Reads the head of a plan.
    ///
    /// # Errors
    /// [`FieldError`] when the bytes begin with no head, or with too many nodes.
    pub fn new(bytes: &'a [u8]) -> Result<WirePlan<'a>, FieldError> {
        WirePlan::at(bytes, 0)
    }

    fn at(bytes: &'a [u8], depth: u32) -> Result<WirePlan<'a>, FieldError> {
        let nodes = u32::get(&mut Reader::new(bytes))?;
        if nodes > limits::GRAPH_NODES || depth > limits::GRAPH_DEPTH {
            return Err(FieldError::Range);
        }
        Ok(WirePlan { bytes, nodes, depth })
    }

    /// The number of its nodes, which it may not have: that is seen when they are decoded.
    #[must_use]
    pub const fn length(&self) -> u32 {
        self.nodes
    }

    /// Its nodes, in order. Decoding ends with the first error; bytes behind the last node are one.
    pub fn nodes(&self) -> impl Iterator<Item = Result<WireNode<'a>, FieldError>> + use<'a> {
        let mut reader = Reader::new(self.bytes.get(8..).unwrap_or_default());
        let (count, depth) = (self.nodes, self.depth);
        let mut next = Some(0);
        core::iter::from_fn(move || {
            let index = next?;
            if index == count {
                next = None;
                return reader.clone().finish().err().map(Err);
            }
            let node = WireNode::get(&mut reader, index, depth);
            next = node.is_ok().then(|| index.saturating_add(1));
            Some(node)
        })
    }
}

impl<'a> WireNode<'a> {
    fn get(reader: &mut Reader<'a>, index: u32, depth: u32) -> Result<WireNode<'a>, FieldError> {
        let (number, kind, enabled) = (u32::get(reader)?, NodeKind::get(reader)?, bool::get(reader)?);
        let count = u32::get(reader)?;
        // Each dependency names another earlier node.
        if count > index {
            return Err(FieldError::Range);
        }
        let length = usize::try_from(count).map_err(|_| FieldError::Range)?.saturating_mul(8);
        let dependencies = reader.bytes(length)?;
        let node = WireNode { number, enabled, dependencies, work: sized(reader, kind, depth)? };
        for (dependency, word) in node.dependencies().zip(dependencies.chunks_exact(8)) {
            if dependency.node >= index || word.last() != Some(&0) {
                return Err(FieldError::Range);
            }
        }
        Ok(node)
    }
}

/// WireWork behind its length.
fn sized<'a>(reader: &mut Reader<'a>, kind: NodeKind, depth: u32) -> Result<WireWork<'a>, FieldError> {
    WireWork::get(kind, sized_bytes(reader)?, depth)
}

/// Whole words behind their length.
fn sized_bytes<'a>(reader: &mut Reader<'a>) -> Result<&'a [u8], FieldError> {
    let length = usize::try_from(reader.word()?).map_err(|_| FieldError::Range)?;
    if !length.is_multiple_of(8) {
        return Err(FieldError::Range);
    }
    reader.bytes(length)
}

/// Writes a plan.
#[derive(Debug)]
pub struct PlanWriter {
    bytes: Vec<u8>,
    nodes: u32,
}

impl Default for PlanWriter {
    fn default() -> PlanWriter {
        PlanWriter { bytes: vec![0; 8], nodes: 0 }
    }
}

impl PlanWriter {
    /// Appends a node.
    ///
    /// # Errors
    /// [`FieldError`] when a limit is reached.
    pub fn node(
        &mut self,
        number: u32,
        enabled: bool,
        dependencies: impl ExactSizeIterator<Item = Dependency>,
        work: &WireWork<'_>,
    ) -> Result<(), FieldError> {
        if self.nodes >= limits::GRAPH_NODES {
            return Err(FieldError::Long);
        }
        let words = [u64::from(number), work.kind() as u64, u64::from(enabled), dependencies.len() as u64];
        words.iter().for_each(|word| self.bytes.extend_from_slice(&word.to_le_bytes()));
        dependencies.for_each(|dependency| self.bytes.extend_from_slice(&dependency.word().to_le_bytes()));
        work.put(&mut self.bytes)?;
        self.nodes = self.nodes.saturating_add(1);
        Ok(())
    }

    /// The plan.
    ///
    /// # Errors
    /// [`FieldError::Long`] when it is longer than [`limits::GRAPH_BYTES`].
    pub fn finish(mut self) -> Result<Vec<u8>, FieldError> {
        if let Some(head) = self.bytes.first_chunk_mut() {
            *head = u64::from(self.nodes).to_le_bytes();
        }
        if self.bytes.len() as u64 > limits::GRAPH_BYTES { Err(FieldError::Long) } else { Ok(self.bytes) }
    }
}

/// New work of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change<'a> {
    path: &'a [u8],
    /// False to turn the node off.
    pub enabled: bool,
    /// The work, of the kind that the node has.
    pub work: WireWork<'a>,
}

impl<'a> Change<'a> {
    /// Reads a change, all of it and nothing more.
    ///
    /// # Errors
    /// [`FieldError`] when the bytes are not a change.
    pub fn new(bytes: &'a [u8]) -> Result<Change<'a>, FieldError> {
        let mut reader = Reader::new(bytes);
        let (length, kind, enabled) =
            (u32::get(&mut reader)?, NodeKind::get(&mut reader)?, bool::get(&mut reader)?);
        let depth =
            length.checked_sub(1).filter(|depth| *depth <= limits::GRAPH_DEPTH).ok_or(FieldError::Range)?;
        let length = usize::try_from(length).map_err(|_| FieldError::Range)?.saturating_mul(8);
        let path = reader.bytes(length)?;
        if path.chunks_exact(8).any(|word| word.get(4..) != Some(&[0; 4])) {
            return Err(FieldError::Range);
        }
        let work = sized(&mut reader, kind, depth)?;
        reader.finish()?;
        Ok(Change { path, enabled, work })
    }

    /// The numbers of the child nodes around the node, outermost first, and then its own. Behind the number of a conditional node stands
    /// the index of a body.
    pub fn path(&self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.path
            .chunks_exact(8)
            .map(|word| word.first_chunk().map_or(NO_NODE, |half| u32::from_le_bytes(*half)))
    }

    /// Writes a change.
    ///
    /// # Errors
    /// [`FieldError`] when a limit is reached.
    pub fn encode(path: &[u32], enabled: bool, work: &WireWork<'_>) -> Result<Vec<u8>, FieldError> {
        let words = [path.len() as u64, work.kind() as u64, u64::from(enabled)];
        let words = words.into_iter().chain(path.iter().map(|number| u64::from(*number)));
        let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        work.put(&mut bytes)?;
        if bytes.len() as u64 > limits::GRAPH_BYTES { Err(FieldError::Long) } else { Ok(bytes) }
    }
}
