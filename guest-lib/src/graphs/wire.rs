//! Plans and changes in the form in which they cross to the worker, after the driver's checks of each node.

use super::{unsupported, whole};
use crate::{
    checks::{self, CopyShape, FillShape, LaunchShape, MemorySide, Strided},
    error::{Error, Result},
    process::ProcessState,
    state::events::INTERPROCESS,
};
use core::sync::atomic::AtomicBool;
use sluice_cuda_graphs::{
    Copy3D, CopySide, FillWork, KernelWork, MemoryOperation, Plan, Refusal, Work, memory_type,
};
use sluice_protocol::{
    field::{Bytes, DeviceAddress, ElementSize, FieldError, LaunchAttributes},
    graph::{
        Change, Copy, CopyEnd, Dependency, Fill, Kernel, PlanWriter, Side, WirePlan, WireWork, Write, Writes,
    },
    handle::{Context, Event, Id},
};

/// Limits of the wire's form.
const fn too_large(error: FieldError) -> Error {
    match error {
        FieldError::Long | FieldError::Range => Error::OUT_OF_MEMORY,
        FieldError::Short | FieldError::Trailing | FieldError::Id => Error::INVALID_VALUE,
    }
}

/// The bytes of a plan.
pub(super) fn plan(process: &ProcessState, plan: &Plan) -> core::result::Result<Vec<u8>, Refusal<Error>> {
    let mut writer = PlanWriter::default();
    for node in &plan.nodes {
        let dependencies = node.dependencies.iter().map(|dependency| {
            let edge = dependency.edge;
            Dependency { node: dependency.node, edge: [edge.from_port, edge.to_port, edge.kind] }
        });
        let written = with(process, &node.work, |work| {
            writer.node(node.number, node.enabled, dependencies, work).map_err(too_large)
        });
        written.map_err(|error| Refusal { error, node: Some(node.number) })?;
    }
    writer.finish().map_err(|error| whole(too_large(error)))
}

/// The bytes of a change.
pub(super) fn change(process: &ProcessState, path: &[u32], enabled: bool, work: &Work) -> Result<Vec<u8>> {
    with(process, work, |work| Change::encode(path, enabled, work).map_err(too_large))
}

/// Gives `act` checked work in the wire's form.
pub(super) fn with<R>(
    process: &ProcessState,
    work: &Work,
    act: impl FnOnce(&WireWork<'_>) -> Result<R>,
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
            act(&WireWork::Kernel(checked_kernel(process, kernel, &attributes)?))
        }
        Work::Copy { copy, context } => act(&WireWork::Copy(checked_copy(process, copy, *context)?)),
        Work::Fill { fill, context } => act(&WireWork::Fill(checked_fill(process, fill, *context)?)),
        Work::Host(_) => {
            static SAID: AtomicBool = AtomicBool::new(false);
            unsupported(&SAID, "a function of the host")
        }
        Work::Child(inside) => {
            let bytes = plan(process, inside).map_err(|refusal| refusal.error)?;
            act(&WireWork::Child(WirePlan::new(&bytes).map_err(too_large)?))
        }
        Work::Empty => act(&WireWork::Empty),
        Work::EventWait { event } => act(&WireWork::EventWait(event_id(process, *event)?)),
        Work::EventRecord { event } => act(&WireWork::EventRecord(event_id(process, *event)?)),
        Work::MemoryOperations { operations, context } => {
            let context = context_id(process, *context)?;
            let list = checked_writes(process, operations)?;
            act(&WireWork::Writes(Writes { context, list: Bytes(&list) }))
        }
    }
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
    LaunchShape { grid, block, shared }.check(process, context, &function)?;
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

fn checked_copy(process: &ProcessState, copy: &Copy3D, context: u64) -> Result<Copy> {
    let context = process.contexts.get(context)?;
    if copy.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    let shape = CopyShape::of(copy)?;
    shape.check_pitch(process, context.device)?;
    let end = |side: Strided, stated: &CopySide| {
        let found = checks::side(process, side.start, shape.span(side)?)?;
        let side_of_wire = match (found, stated.kind) {
            (MemorySide::Device, memory_type::HOST) | (MemorySide::Pageable, memory_type::DEVICE) => {
                return Err(Error::INVALID_VALUE);
            }
            (MemorySide::Device, _) => Side::Device,
            (MemorySide::Pinned, _) if !process.session.gathers() => Side::Arena,
            (MemorySide::Pinned | MemorySide::Pageable, _) => {
                static SAID: AtomicBool = AtomicBool::new(false);
                return unsupported(&SAID, "a copy from or to host memory that devices do not reach");
            }
        };
        let Strided { start: address, pitch, layer } = side;
        Ok(CopyEnd { side: side_of_wire, address, pitch, rows: layer / pitch })
    };
    Ok(Copy {
        context: Id::from_raw(context.raw).ok_or(Error::INVALID_CONTEXT)?,
        to: end(shape.to, &copy.to)?,
        from: end(shape.from, &copy.from)?,
        width: shape.width,
        height: shape.height,
        depth: shape.depth,
    })
}

fn checked_fill(process: &ProcessState, fill: &FillWork, context: u64) -> Result<Fill> {
    let context = context_id(process, context)?;
    let FillWork { to, pitch, value, element, width, height } = *fill;
    let element = ElementSize::from_number(element).ok_or(Error::INVALID_VALUE)?;
    if fill.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    let (rows, _) = FillShape { to, pitch, element, width, height }.side(process)?;
    Ok(Fill { context, to: DeviceAddress(to), pitch: rows.pitch, element, value, width, height })
}

/// An event that the driver of the worker knows as the program does: no event that other processes may share.
fn event_id(process: &ProcessState, event: u64) -> Result<Id<Event>> {
    let event = process.events.resolve(event)?;
    if event.flags() & INTERPROCESS != 0 {
        static SAID: AtomicBool = AtomicBool::new(false);
        return unsupported(&SAID, "an event of several processes");
    }
    Ok(event.id)
}

fn checked_writes(process: &ProcessState, operations: &[MemoryOperation]) -> Result<Vec<u8>> {
    let mut list = Vec::new();
    for operation in operations {
        match *operation {
            MemoryOperation::Write { to, value, wide, flags } => {
                checks::written_value(process, to, wide, flags)?;
                Writes::push(&mut list, Write { to: DeviceAddress(to), value, wide }).map_err(too_large)?;
            }
            MemoryOperation::Wait { .. } => {
                static SAID: AtomicBool = AtomicBool::new(false);
                return unsupported(&SAID, "a wait for a value in memory");
            }
        }
    }
    Ok(list)
}
