//! Plans and changes in the form in which they cross to the worker, after the driver's checks of each node.

use super::{unsupported, whole};
use crate::{
    arguments::HostTask,
    checks::{self, ArrayCopyShape, ArrayPlace, CopyPlace, CopyShape, FillShape, MemorySide, Strided},
    error::{Error, Result},
    host_memory::HostCopy,
    process::ProcessState,
    state::{
        contexts,
        events::INTERPROCESS,
        functions::LaunchShape,
        host_functions::{NodeTask, NodeToken, Staging},
    },
};
use core::sync::atomic::AtomicBool;
use sluice_cuda_graphs::{
    ConditionalKind, ConditionalWork, Copy3D, CopySide, FillWork, KernelWork, MemoryOperation, Plan, Refusal,
    Work, memory_type,
};
use sluice_protocol::{
    field::{Bytes, DeviceAddress, ElementSize, FieldError, LaunchAttributes},
    graph::{
        Change, Conditional, ConditionalHead, Copy, CopyEnd, Dependency, Fill, Host, Kernel, PlanWriter,
        Selection, Side, WirePlan, WireWork, Write, Writes,
    },
    handle::{ConditionalGraph, Context, Event, Id},
};
use std::{collections::BTreeMap, sync::Arc};

/// Limits of the wire's form.
const fn too_large(error: FieldError) -> Error {
    match error {
        FieldError::Long | FieldError::Range => Error::OUT_OF_MEMORY,
        FieldError::Short | FieldError::Trailing | FieldError::Id => Error::INVALID_VALUE,
    }
}

/// Names functions of nodes, by the ways to them.
pub(super) struct Naming {
    /// `None` if the work is only checked.
    named: Option<NodeTokens>,
    /// The way to the present node.
    path: Vec<u32>,
    /// The graph in which the handles of conditional nodes live.
    conditional: Option<Id<ConditionalGraph>>,
    /// The present node is in a body of a conditional node.
    in_body: bool,
    /// The staging memory that the nodes have already, by the ways to them. A driver may refuse another address of a copy of several rows.
    stagings: BTreeMap<Vec<u32>, Arc<Staging>>,
    /// A node was given the staging memory that it has.
    keeps_staging: bool,
}

/// The functions of an executable's nodes, by the ways to them.
pub(super) type NodeTokens = BTreeMap<Vec<u32>, NodeToken>;

impl Naming {
    /// Names nothing.
    pub(super) const fn none() -> Naming {
        Naming {
            named: None,
            path: Vec::new(),
            conditional: None,
            in_body: false,
            stagings: BTreeMap::new(),
            keeps_staging: false,
        }
    }

    /// Names the functions at and below a path.
    pub(super) fn at(path: &[u32], in_body: bool) -> Naming {
        Naming { named: Some(BTreeMap::new()), path: path.to_vec(), in_body, ..Naming::none() }
    }

    /// Names the functions at and below a path, whose nodes have functions already.
    pub(super) fn again(path: &[u32], in_body: bool, present: &NodeTokens) -> Naming {
        let staging = |(at, token): (&Vec<u32>, &NodeToken)| {
            let staging = token.staging().filter(|_| at.starts_with(path))?;
            Some((at.clone(), Arc::clone(staging)))
        };
        let stagings = present.iter().filter_map(staging).collect();
        Naming { stagings, ..Naming::at(path, in_body) }
    }

    /// Names the functions of a plan whose handles live in a graph.
    pub(super) fn of(conditional: Option<Id<ConditionalGraph>>) -> Naming {
        Naming { conditional, ..Naming::at(&[], false) }
    }

    pub(super) fn named(self) -> NodeTokens {
        self.named.unwrap_or_default()
    }

    /// The work of a node that has this process do something.
    fn host(
        &mut self,
        process: &'static ProcessState,
        task: NodeTask,
        staging: Option<Arc<Staging>>,
    ) -> Result<WireWork<'static>> {
        let Some(named) = &mut self.named else { return Ok(WireWork::Host(Host { token: 0 })) };
        let mut token = process.host_functions.name(&process.session, task)?;
        staging.into_iter().for_each(|staging| token.keep(staging));
        let work = WireWork::Host(Host { token: token.number() });
        named.insert(self.path.clone(), token);
        Ok(work)
    }
}

/// The bytes of a plan.
pub(super) fn plan(
    process: &'static ProcessState,
    plan: &Plan,
    naming: &mut Naming,
) -> core::result::Result<Vec<u8>, Refusal<Error>> {
    let mut writer = PlanWriter::default();
    for node in &plan.nodes {
        let dependencies = node.dependencies.iter().map(|dependency| {
            let edge = dependency.edge;
            Dependency { node: dependency.node, edge: [edge.from_port, edge.to_port, edge.kind] }
        });
        naming.path.push(node.number);
        let written = with(process, &node.work, node.enabled, naming, |work, is_on| {
            writer.node(node.number, is_on, dependencies, work).map_err(too_large)
        });
        naming.path.pop();
        written.map_err(|error| Refusal { error, node: Some(node.number) })?;
    }
    writer.finish().map_err(|error| whole(too_large(error)))
}

/// The bytes of the changes that replace the work of one node.
pub(super) fn changes(
    process: &'static ProcessState,
    path: &[u32],
    enabled: bool,
    work: &Work,
    naming: &mut Naming,
) -> Result<Vec<Vec<u8>>> {
    let is_copy = matches!(work, Work::Copy { .. });
    let (mut list, by_device) = with(process, work, enabled, naming, |work, is_on| {
        let mut list = vec![Change::encode(path, is_on, work).map_err(too_large)?];
        let mut by_device = 0;
        if let WireWork::Child(staged) = work
            && is_copy
        {
            // A graph inside cannot be turned off; its copy can.
            for node in staged.nodes() {
                let node = node.map_err(too_large)?;
                if matches!(node.work, WireWork::Copy(_)) {
                    by_device = list.len();
                }
                let path = [path, &[node.number]].concat();
                list.push(Change::encode(&path, node.enabled, &node.work).map_err(too_large)?);
            }
        }
        Ok((list, by_device))
    })?;
    if is_copy && naming.keeps_staging {
        // The graph inside stays. The device's copy changes first, since a driver may refuse it.
        list.swap(1, by_device);
        list.remove(0);
    }
    Ok(list)
}

/// Gives `act` checked work in the wire's form, and whether the node is on there.
pub(super) fn with<R>(
    process: &'static ProcessState,
    work: &Work,
    enabled: bool,
    naming: &mut Naming,
    act: impl FnOnce(&WireWork<'_>, bool) -> Result<R>,
) -> Result<R> {
    match work {
        Work::Kernel(kernel) => {
            let attributes: Vec<u8> = kernel
                .attributes
                .iter()
                .flat_map(|attribute| {
                    u64::from(attribute.id).to_le_bytes().into_iter().chain(attribute.value)
                })
                .collect();
            act(&WireWork::Kernel(checked_kernel(process, kernel, &attributes)?), enabled)
        }
        Work::Copy { copy, context } => with_copy(process, copy, *context, enabled, naming, act),
        Work::Fill { fill, context } => act(&WireWork::Fill(checked_fill(process, fill, *context)?), enabled),
        Work::Host(host) => {
            let task = HostTask::of_node(*host).ok_or(Error::INVALID_VALUE)?;
            act(&naming.host(process, NodeTask::Function(task), None)?, enabled)
        }
        Work::Child(inside) => {
            let bytes = plan(process, inside, naming).map_err(|refusal| refusal.error)?;
            act(&WireWork::Child(WirePlan::new(&bytes).map_err(too_large)?), enabled)
        }
        Work::Conditional(inside) => {
            let bodies = bodies(process, inside, naming)?;
            let graph = naming.conditional.ok_or(Error::INVALID_VALUE)?;
            let selection = match inside.kind {
                ConditionalKind::If => Selection::If,
                ConditionalKind::While => Selection::While,
                ConditionalKind::Switch => Selection::Switch,
            };
            let context = context_id(process, inside.context)?;
            let count = u32::try_from(inside.bodies.len()).map_err(|_| Error::OUT_OF_MEMORY)?;
            let head = ConditionalHead { context, graph, handle: inside.handle, selection, count };
            act(&WireWork::Conditional(Conditional::new(head, &bodies)), enabled)
        }
        Work::Empty | Work::Allocation(_) | Work::Free { .. } => act(&WireWork::Empty, enabled),
        Work::EventWait { event } => act(&WireWork::EventWait(event_id(process, *event)?), enabled),
        Work::EventRecord { event } => act(&WireWork::EventRecord(event_id(process, *event)?), enabled),
        Work::MemoryOperations { operations, context } => {
            let list = checked_writes(process, *context, operations)?;
            let context = context_id(process, *context)?;
            act(&WireWork::Writes(Writes { context, list: Bytes(&list) }), enabled)
        }
    }
}

/// The bodies of a conditional node.
fn bodies(process: &'static ProcessState, inside: &ConditionalWork, naming: &mut Naming) -> Result<Vec<u8>> {
    let was_in_body = core::mem::replace(&mut naming.in_body, true);
    let mut list = Vec::new();
    for (index, body) in (0..).zip(&inside.bodies) {
        naming.path.push(index);
        let bytes = plan(process, body, naming);
        naming.path.pop();
        Conditional::push(&mut list, &bytes.map_err(|refusal| refusal.error)?);
    }
    naming.in_body = was_in_body;
    Ok(list)
}

fn context_id(process: &ProcessState, context: u64) -> Result<Id<Context>> {
    Id::from_raw(process.contexts.get(context)?.raw).ok_or(Error::INVALID_CONTEXT)
}

fn checked_kernel<'a>(
    process: &ProcessState,
    kernel: &'a KernelWork,
    attributes: &'a [u8],
) -> Result<Kernel<'a>> {
    let KernelWork { function, context, grid, block, shared, ref parameters, .. } = *kernel;
    let context = process.contexts.get(context)?;
    let function = process.modules.functions.resolve(function)?;
    if !function.is_kernel() && function.context != context.raw {
        return Err(Error::INVALID_HANDLE);
    }
    LaunchShape { grid, block, shared }.check(process.devices.get(context.device)?, &function)?;
    Ok(Kernel {
        function: function.id,
        context: Id::from_raw(context.raw).ok_or(Error::INVALID_CONTEXT)?,
        grid,
        block,
        shared,
        attributes: LaunchAttributes(attributes),
        parameters: Bytes(parameters),
    })
}

/// The memory of one side of a copy.
fn memory_of(
    process: &ProcessState,
    shape: &CopyShape,
    side: Strided,
    stated: &CopySide,
) -> Result<MemorySide> {
    match (checks::side(process, side.start, shape.span(side)?)?, stated.kind) {
        (MemorySide::Device, memory_type::HOST) | (MemorySide::Pageable, memory_type::DEVICE) => {
            Err(Error::INVALID_VALUE)
        }
        (memory, _) => Ok(memory),
    }
}

/// Gives `act` a checked copy. A copy from or to memory that devices do not reach becomes a copy by this process, or with memory of a
/// device a graph inside the node: a copy by this process from or to staging memory before or behind one by the device.
fn with_copy<R>(
    process: &'static ProcessState,
    copy: &Copy3D,
    context: u64,
    enabled: bool,
    naming: &mut Naming,
    act: impl FnOnce(&WireWork<'_>, bool) -> Result<R>,
) -> Result<R> {
    let context = process.contexts.get(context)?;
    if copy.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    if let Some(shape) = ArrayCopyShape::of(copy)? {
        if naming.in_body {
            return Err(Error::NOT_SUPPORTED);
        }
        return with_array_copy(process, (copy, &shape), context, enabled, naming, act);
    }
    let shape = CopyShape::of(copy)?.on_device(process)?;
    shape.check_pitch(process, context.device)?;
    let context = Id::from_raw(context.raw).ok_or(Error::INVALID_CONTEXT)?;
    let CopyShape { to, from, width, height, depth, .. } = shape;
    let sides = (memory_of(process, &shape, to, &copy.to)?, memory_of(process, &shape, from, &copy.from)?);
    let of_device = |to: (Side, Strided), from: (Side, Strided)| {
        let end = |(side, Strided { start: address, pitch, layer }): (Side, Strided)| CopyEnd {
            side,
            address,
            pitch,
            rows: layer / pitch,
            at: [0; 3],
        };
        WireWork::Copy(Copy { context, to: end(to), from: end(from), width, height, depth })
    };
    let on_host = |copy: HostCopy| if enabled { NodeTask::Copy(copy) } else { NodeTask::Nothing };
    let reached = |memory: MemorySide| match memory {
        MemorySide::Device => Some(Side::Device),
        MemorySide::Pinned if !process.session.gathers() => Some(Side::Arena),
        MemorySide::Pinned | MemorySide::Pageable => None,
    };
    let is_to_device = match (sides, reached(sides.0), reached(sides.1)) {
        (_, Some(there), Some(here)) => return act(&of_device((there, to), (here, from)), enabled),
        // The device alone makes the copies in a body.
        _ if naming.in_body => return Err(Error::NOT_SUPPORTED),
        ((MemorySide::Device, _), ..) => true,
        ((_, MemorySide::Device), ..) => false,
        // A function cannot be turned off, but it can do nothing.
        _ => return act(&naming.host(process, on_host(shape.on_host()), None)?, true),
    };
    let works = |staging: Strided| {
        let here = (Side::Arena, staging);
        if is_to_device {
            (HostCopy { to: staging, ..shape.on_host() }, of_device((Side::Device, to), here))
        } else {
            (HostCopy { from: staging, ..shape.on_host() }, of_device(here, (Side::Device, from)))
        }
    };
    let staged = StagedCopy { extent: [width, height, depth], is_to_device, enabled };
    with_staging(process, staged, naming, works, act)
}

/// A copy from or to memory of the program that devices do not reach.
struct StagedCopy {
    /// Bytes of a row, rows and slices.
    extent: [u64; 3],
    is_to_device: bool,
    enabled: bool,
}

/// Gives `act` a graph of the copy by this process and the one by the device, which `works` makes for staging memory.
fn with_staging<R>(
    process: &'static ProcessState,
    copy: StagedCopy,
    naming: &mut Naming,
    works: impl FnOnce(Strided) -> (HostCopy, WireWork<'static>),
    act: impl FnOnce(&WireWork<'_>, bool) -> Result<R>,
) -> Result<R> {
    let StagedCopy { extent: [width, height, depth], is_to_device, enabled } = copy;
    if process.session.gathers() {
        return Err(unreached());
    }
    if naming.named.is_none() {
        return act(&WireWork::Empty, enabled);
    }
    let layer = width.checked_mul(height).ok_or(Error::INVALID_VALUE)?;
    let bytes = layer.checked_mul(depth).ok_or(Error::INVALID_VALUE)?;
    naming.path.push(u32::from(!is_to_device));
    let present = naming.stagings.get(&naming.path).filter(|staging| staging.bytes() == bytes);
    naming.path.pop();
    let present = present.map(Arc::clone);
    naming.keeps_staging |= present.is_some();
    let staging = match present {
        Some(staging) => staging,
        None => Arc::new(Staging::new(&process.arena, &process.session, bytes)?),
    };
    // The allocation may have been the first one.
    if process.session.gathers() {
        return Err(unreached());
    }
    let (task, by_device) = works(Strided { start: staging.address(), pitch: width, layer });
    // A function cannot be turned off, but it can do nothing.
    let task = if enabled { NodeTask::Copy(task) } else { NodeTask::Nothing };
    naming.path.push(u32::from(!is_to_device));
    let by_host = naming.host(process, task, Some(staging));
    naming.path.pop();
    let by_host = by_host?;
    let works = if is_to_device {
        [(by_host, true), (by_device, enabled)]
    } else {
        [(by_device, enabled), (by_host, true)]
    };
    let mut writer = PlanWriter::default();
    for (number, (work, is_on)) in (0..).zip(&works) {
        let behind: Option<u32> = (number > 0).then_some(0);
        let behind = behind.map(|node| Dependency { node, edge: [0; 3] });
        writer.node(number, *is_on, behind.into_iter(), work).map_err(too_large)?;
    }
    let bytes = writer.finish().map_err(too_large)?;
    act(&WireWork::Child(WirePlan::new(&bytes).map_err(too_large)?), true)
}

/// The error of a worker that reaches host memory only in calls.
fn unreached() -> Error {
    static SAID: AtomicBool = AtomicBool::new(false);
    unsupported(&SAID, "a copy from or to host memory that devices do not reach")
}

/// The end of a copy whose other end is an array.
enum ArrayCopyEnd {
    /// The device reaches it.
    Reached(CopyEnd),
    /// Memory of the program.
    OfProgram(Strided),
}

/// The end of a copy in memory.
fn memory_end(process: &ProcessState, side: Strided, bytes: u64, stated: &CopySide) -> Result<ArrayCopyEnd> {
    let on_device = Strided { start: process.arena.on_device(side.start, bytes), ..side };
    let side_of_wire = match (checks::side(process, on_device.start, bytes)?, stated.kind) {
        (MemorySide::Device, memory_type::HOST) | (MemorySide::Pageable, memory_type::DEVICE) => {
            return Err(Error::INVALID_VALUE);
        }
        (MemorySide::Device, _) => Side::Device,
        (MemorySide::Pinned, _) if !process.session.gathers() => Side::Arena,
        (MemorySide::Pinned | MemorySide::Pageable, _) => return Ok(ArrayCopyEnd::OfProgram(side)),
    };
    Ok(ArrayCopyEnd::Reached(linear_end(side_of_wire, on_device)))
}

const fn linear_end(side: Side, Strided { start: address, pitch, layer }: Strided) -> CopyEnd {
    CopyEnd { side, address, pitch, rows: layer / pitch, at: [0; 3] }
}

/// Gives `act` a copy of which at least one end is an array.
fn with_array_copy<R>(
    process: &'static ProcessState,
    (copy, shape): (&Copy3D, &ArrayCopyShape),
    context: contexts::Context,
    enabled: bool,
    naming: &mut Naming,
    act: impl FnOnce(&WireWork<'_>, bool) -> Result<R>,
) -> Result<R> {
    shape.check_pitch(process, context.device)?;
    let context = Id::from_raw(context.raw).ok_or(Error::INVALID_CONTEXT)?;
    let end = |place: CopyPlace, stated: &CopySide| match place {
        CopyPlace::Array(ArrayPlace { array, at }) => Ok(ArrayCopyEnd::Reached(CopyEnd {
            side: Side::Array,
            address: array.raw(),
            pitch: 0,
            rows: 0,
            at,
        })),
        CopyPlace::Memory(side) => memory_end(process, side, shape.span(side)?, stated),
    };
    let [width, height, depth] = shape.extent;
    let by_device = |to, from| WireWork::Copy(Copy { context, to, from, width, height, depth });
    let staged = |is_to_device| StagedCopy { extent: shape.extent, is_to_device, enabled };
    let by_host = |to, from| HostCopy { to, from, width, height, depth };
    match (end(shape.to, &copy.to)?, end(shape.from, &copy.from)?) {
        (ArrayCopyEnd::Reached(to), ArrayCopyEnd::Reached(from)) => act(&by_device(to, from), enabled),
        (ArrayCopyEnd::Reached(to), ArrayCopyEnd::OfProgram(from)) => {
            let works = |staging| (by_host(staging, from), by_device(to, linear_end(Side::Arena, staging)));
            with_staging(process, staged(true), naming, works, act)
        }
        (ArrayCopyEnd::OfProgram(to), ArrayCopyEnd::Reached(from)) => {
            let works = |staging| (by_host(to, staging), by_device(linear_end(Side::Arena, staging), from));
            with_staging(process, staged(false), naming, works, act)
        }
        (ArrayCopyEnd::OfProgram(_), ArrayCopyEnd::OfProgram(_)) => Err(Error::INVALID_VALUE),
    }
}

fn checked_fill(process: &ProcessState, fill: &FillWork, context: u64) -> Result<Fill> {
    let id = context_id(process, context)?;
    let FillWork { to, pitch, value, element, width, height } = *fill;
    let element = ElementSize::from_number(element).ok_or(Error::INVALID_VALUE)?;
    if fill.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    let (rows, _) = FillShape { to, pitch, element, width, height }.side(process, context)?;
    Ok(Fill { context: id, to: DeviceAddress(to), pitch: rows.pitch, element, value, width, height })
}

/// An event that the driver of the worker knows as the program does: no event that other processes may share.
fn event_id(process: &ProcessState, event: u64) -> Result<Id<Event>> {
    let event = process.events.resolve(event)?;
    if event.flags() & INTERPROCESS != 0 {
        static SAID: AtomicBool = AtomicBool::new(false);
        return Err(unsupported(&SAID, "an event of several processes"));
    }
    Ok(event.id)
}

fn checked_writes(process: &ProcessState, context: u64, operations: &[MemoryOperation]) -> Result<Vec<u8>> {
    let mut list = Vec::new();
    for operation in operations {
        match *operation {
            MemoryOperation::Write { to, value, wide, flags } => {
                checks::written_value(process, context, (to, wide), flags)?;
                Writes::push(&mut list, Write { to: DeviceAddress(to), value, wide }).map_err(too_large)?;
            }
            MemoryOperation::Wait { .. } => {
                static SAID: AtomicBool = AtomicBool::new(false);
                return Err(unsupported(&SAID, "a wait for a value in memory"));
            }
        }
    }
    Ok(list)
}
