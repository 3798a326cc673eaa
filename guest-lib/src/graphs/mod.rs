//! Graphs: the checks of nodes, and executables on the host.
//!
//! The functions of the C API call [`GRAPHS`] at every use of a stream or an event. Graphs and captures live here, in the program's
//! process (`sluice-cuda-graphs`), and the worker knows of none; an executable crosses as one plan in arena memory, and its launch is
//! one record. This module owns the executables; it knows nothing of the C API's arguments.

mod wire;

use wire::{Naming, NodeTokens};

use crate::{
    arguments::Call,
    error::{Error, Result},
    host_memory, log,
    process::{self, ProcessState},
    state::{
        memory::device_map::RangeOrigin,
        objects::Plain,
        streams::{NON_BLOCKING, StreamRef},
        thread,
    },
    turns,
};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use sluice_cuda_graphs::{
    ConditionalHandle, GraphDriver, Graphs, Kept, KernelFacts, Plan, PlanNode, Refusal, Stream, StreamOrder,
    Work,
};
use sluice_protocol::{
    calls::wire as calls,
    field::{ArenaIn, Mint, Take},
    graph::NO_NODE,
    handle::{self, ConditionalGraph, GraphExecutable, Id},
    limits,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The graphs and captures of the process.
pub(crate) static GRAPHS: Graphs<GuestGraphs> = Graphs::new(GuestGraphs);

/// This library, as graphs know it.
pub(crate) struct GuestGraphs;

/// The facts about a stream that captures need.
pub(crate) fn facts(process: &ProcessState, stream: StreamRef<'_>) -> Result<Stream> {
    let order = match stream.flags() & NON_BLOCKING {
        _ if process.contexts.get(stream.context)?.legacy == stream.slot => StreamOrder::Legacy,
        0 => StreamOrder::Blocking,
        _ => StreamOrder::NonBlocking,
    };
    Ok(Stream { key: stream.id().raw(), context: stream.context, order })
}

/// True if work became a node of a capture, so that it is not posted. Without captures this costs one relaxed load.
#[inline]
pub(crate) fn captured(
    process: &ProcessState,
    stream: StreamRef<'_>,
    work: impl FnOnce() -> Result<Work>,
) -> Result<bool> {
    if GRAPHS.is_capturing() { GRAPHS.capture(facts(process, stream)?, work) } else { Ok(false) }
}

/// Refuses a call that waits for a stream that captures, queries it, or for which graphs have no node.
#[inline]
pub(crate) fn refuse(process: &ProcessState, stream: StreamRef<'_>) -> Result {
    if GRAPHS.is_capturing() { GRAPHS.refuse(facts(process, stream)?) } else { Ok(()) }
}

/// Refuses a synchronous copy or fill that a capture forbids.
#[inline]
pub(crate) fn synchronous(process: &ProcessState, stream: StreamRef<'_>) -> Result {
    if GRAPHS.is_capturing() { GRAPHS.synchronous(facts(process, stream)?) } else { Ok(()) }
}

/// The address of an allocation in the order of a stream, if it became a node of a capture.
pub(crate) fn captured_allocation(
    process: &ProcessState,
    stream: StreamRef<'_>,
    device: i32,
    bytes: u64,
) -> Result<Option<u64>> {
    if GRAPHS.is_capturing() {
        GRAPHS.capture_allocation(facts(process, stream)?, device, bytes)
    } else {
        Ok(None)
    }
}

/// True if the end of an allocation in the order of a stream became a node of a capture.
pub(crate) fn captured_free(process: &ProcessState, stream: StreamRef<'_>, address: u64) -> Result<bool> {
    if GRAPHS.is_capturing() { GRAPHS.capture_free(facts(process, stream)?, address) } else { Ok(false) }
}

/// Drops a value when a stream has completed its work so far.
pub(crate) fn keep_until_reached(process: &ProcessState, stream: StreamRef<'_>, kept: Kept) -> Result {
    let running = process.extent(stream)?.into_iter().collect();
    leave(process, Leftover { running, kept, functions: NodeTokens::new() });
    Ok(())
}

/// Ends a context, and the captures in it.
pub(crate) fn end_context(process: &ProcessState, id: Id<handle::Context>) -> Result {
    // First: another allocation may get an address of its memory at once.
    GRAPHS.memory_ends_with(id.raw());
    process.end_context(id)?;
    GRAPHS.context_destroyed(id.raw());
    Ok(())
}

/// Ends the default streams of threads with their threads.
pub(crate) fn end_streams_of_threads() {
    thread::end_streams_by(|stream| {
        if let Ok(process) = process::get() {
            process.streams.recycle(&process.session, stream);
            GRAPHS.stream_destroyed(stream);
        }
    });
}

/// An executable graph of the worker.
pub(crate) struct GuestExecutable {
    id: Id<GraphExecutable>,
    state: Mutex<ExecutableState>,
    /// Dropped when all launched work is complete.
    kept: Option<Kept>,
}

/// A graph of the worker's driver in which handles for conditional nodes live.
pub(crate) struct GuestConditionalGraph(Id<ConditionalGraph>);

impl Drop for GuestConditionalGraph {
    fn drop(&mut self) {
        // As with an executable.
        let Ok(process) = process::get() else { return };
        let objects = ConditionalGraph::of(&process.objects);
        if objects.take(self.0.raw()).is_ok() {
            let _ = process.session.post(
                0,
                None,
                &calls::conditional_graph_destroy::Args { graph: Take(self.0) },
            );
            objects.release(self.0);
        }
    }
}

#[derive(Default)]
struct ExecutableState {
    /// The events that nodes record, by the way to the node.
    events: BTreeMap<Vec<u32>, u64>,
    /// The ways to the conditional nodes.
    conditional: BTreeSet<Vec<u32>>,
    /// The driver has accepted a launch of the present work: from then on its immediate errors depend on nothing new.
    launched: bool,
    /// The functions of nodes.
    functions: NodeTokens,
    /// The last sequence of a launch in each stream slot; only if objects or functions are kept.
    running: BTreeMap<u32, u64>,
}

impl ExecutableState {
    /// Keeps the functions of earlier work until the launches so far are complete.
    fn retire(&self, process: &ProcessState, functions: NodeTokens) {
        leave(process, Leftover { running: self.running.clone(), kept: Kept::default(), functions });
    }
}

impl GuestExecutable {
    fn lock(&self) -> MutexGuard<'_, ExecutableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for GuestExecutable {
    fn drop(&mut self) {
        // Without a process, after a fork or at its end, the worker's executable is none of ours or ends with the session.
        let Ok(process) = process::get() else { return };
        let objects = GraphExecutable::of(&process.objects);
        if objects.take(self.id.raw()).is_ok() {
            // The session is over if this fails, and the executable with it.
            let _ = process.session.post(0, None, &calls::graph_destroy::Args { graph: self.id });
            objects.release(self.id);
        }
        let kept = self.kept.take().unwrap_or_default();
        let mut state = self.lock();
        let (running, functions) =
            (core::mem::take(&mut state.running), core::mem::take(&mut state.functions));
        drop(state);
        leave(process, Leftover { running, kept, functions });
    }
}

/// Objects and functions of an executable that was destroyed or changed, whose earlier launches may not be complete.
struct Leftover {
    running: BTreeMap<u32, u64>,
    kept: Kept,
    functions: NodeTokens,
}

static LEFTOVERS: Mutex<Vec<Leftover>> = Mutex::new(Vec::new());
/// The number of leftovers, so that calls without any take no lock.
static LEFT: AtomicUsize = AtomicUsize::new(0);

fn leave(process: &ProcessState, leftover: Leftover) {
    if leftover.kept.is_empty() && leftover.functions.is_empty() {
        return;
    }
    let mut leftovers = LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner);
    leftovers.push(leftover);
    LEFT.store(leftovers.len(), Ordering::Release);
    drop(leftovers);
    sweep(process);
}

/// Drops the objects of destroyed executables whose work is complete. Called by calls that have waited or queried, too.
pub(crate) fn sweep(process: &ProcessState) {
    if LEFT.load(Ordering::Acquire) == 0 {
        return;
    }
    let mut leftovers = LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner);
    let complete = |left: &mut Leftover| {
        left.running.iter().all(|(slot, sequence)| process.session.is_complete(*slot, *sequence))
    };
    let done: Vec<Leftover> = leftovers.extract_if(.., complete).collect();
    LEFT.store(leftovers.len(), Ordering::Release);
    // Destructors of the program run without the lock.
    drop(leftovers);
    drop(done);
}

/// Adds the events that nodes record.
fn recorded(nodes: &[PlanNode], path: &mut Vec<u32>, events: &mut BTreeMap<Vec<u32>, u64>) {
    for node in nodes {
        path.push(node.number);
        recorded_by(&node.work, path, events);
        path.pop();
    }
}

fn recorded_by(work: &Work, path: &mut Vec<u32>, events: &mut BTreeMap<Vec<u32>, u64>) {
    match work {
        Work::EventRecord { event } => _ = events.insert(path.clone(), *event),
        Work::Child(plan) => recorded(&plan.nodes, path, events),
        // The bodies of a conditional node record no events.
        _ => {}
    }
}

fn recorded_events(plan: &Plan) -> BTreeMap<Vec<u32>, u64> {
    let mut events = BTreeMap::new();
    recorded(&plan.nodes, &mut Vec::new(), &mut events);
    events
}

/// Adds the ways to conditional nodes that are in no body of another.
fn conditional(nodes: &[PlanNode], path: &mut Vec<u32>, found: &mut BTreeSet<Vec<u32>>) {
    for node in nodes {
        path.push(node.number);
        match &node.work {
            Work::Conditional(_) => _ = found.insert(path.clone()),
            Work::Child(plan) => conditional(&plan.nodes, path, found),
            _ => {}
        }
        path.pop();
    }
}

/// Gives `act` a plan in arena memory.
fn sent<R>(
    process: &ProcessState,
    bytes: &[u8],
    act: impl FnOnce(ArenaIn<{ limits::GRAPH_BYTES }>) -> Result<R>,
) -> Result<R> {
    let length = bytes.len() as u64;
    process.arena.with_room(
        &process.session,
        length,
        || Ok(()),
        |address| {
            host_memory::copy(address, bytes.as_ptr().expose_provenance() as u64, bytes.len());
            act(ArenaIn { address, bytes: length })
        },
    )
}

/// The result of a call that answers with a code and a node.
const fn answered(error: u32, node: u32) -> core::result::Result<(), Refusal<Error>> {
    match (error, node) {
        (0, _) => Ok(()),
        (error, NO_NODE) => Err(Refusal { error: Error(error), node: None }),
        (error, node) => Err(Refusal { error: Error(error), node: Some(node) }),
    }
}

const fn whole(error: Error) -> Refusal<Error> {
    Refusal { error, node: None }
}

impl GraphDriver for GuestGraphs {
    type Error = Error;
    type Executable = GuestExecutable;
    type ConditionalGraph = GuestConditionalGraph;

    fn context(&self) -> Result<u64> {
        Ok(process::get()?.current()?.raw)
    }

    fn stream(&self, stream: u64, per_thread: bool) -> Result<Stream> {
        let process = process::get()?;
        facts(process, process.stream_or_default(Call { per_thread }, stream)?)
    }

    fn kernel(&self, function: u64, context: u64) -> Result<KernelFacts> {
        let process = process::get()?;
        let found = process.modules.functions.resolve(function)?;
        let context = match (found.is_kernel(), context) {
            (false, _) => found.context,
            (true, 0) => process.current()?.raw,
            (true, context) => process.contexts.get(context)?.raw,
        };
        let bytes = u16::try_from(found.parameter_bytes()).map_err(|_| Error::INVALID_VALUE)?;
        Ok(KernelFacts {
            context,
            is_kernel: found.is_kernel(),
            parameters: found.parameters.to_vec(),
            bytes,
        })
    }

    fn check(&self, work: &Work) -> Result {
        // Only the conversion checks everything that the driver refuses at once.
        wire::with(process::get()?, work, true, &mut Naming::none(), |_, _| Ok(()))
    }

    fn conditional_graph(&self, context: u64) -> Result<GuestConditionalGraph> {
        let process = process::get()?;
        let context = process.contexts.get(context)?.raw;
        let objects = ConditionalGraph::of(&process.objects);
        let id = objects.mint(0)?;
        let call = calls::conditional_graph_create::Args { graph: Mint(id) };
        if let Err(error) = process.session.sync(context, &call) {
            objects.release(id);
            return Err(error);
        }
        objects.made(id);
        Ok(GuestConditionalGraph(id))
    }

    fn create_handle(&self, of: &GuestConditionalGraph, condition: ConditionalHandle) -> Result<u64> {
        let process = process::get()?;
        let context = process.contexts.get(condition.context)?.raw;
        let call = calls::conditional_handle_create::Args {
            graph: of.0,
            value: condition.value,
            flags: condition.is_assigned.into(),
        };
        process.session.sync(context, &call).map(|reply| reply.handle)
    }

    fn instantiate(
        &self,
        plan: &Plan,
        conditional: Option<&GuestConditionalGraph>,
        flags: u64,
        kept: Kept,
    ) -> core::result::Result<GuestExecutable, Refusal<Error>> {
        let process = process::get().map_err(whole)?;
        sweep(process);
        let context = process.current().map_err(whole)?.raw;
        let mut naming = Naming::of(conditional.map(|graph| graph.0));
        let bytes = wire::plan(process, plan, &mut naming)?;
        let flags = u32::try_from(flags).map_err(|_| whole(Error::INVALID_VALUE))?;
        let objects = GraphExecutable::of(&process.objects);
        let id = objects.mint(0).map_err(whole)?;
        let made = sent(process, &bytes, |plan| {
            process.session.sync(context, &calls::graph_instantiate::Args { flags, plan, graph: Mint(id) })
        });
        let made = made.map_err(whole).and_then(|reply| answered(reply.error, reply.node));
        if let Err(refusal) = made {
            objects.release(id);
            return Err(refusal);
        }
        objects.made(id);
        let (events, functions) = (recorded_events(plan), naming.named());
        let mut state = ExecutableState { events, functions, ..ExecutableState::default() };
        self::conditional(&plan.nodes, &mut Vec::new(), &mut state.conditional);
        Ok(GuestExecutable { id, state: Mutex::new(state), kept: Some(kept) })
    }

    fn set_work(&self, executable: &GuestExecutable, path: &[u32], work: &Work, enabled: bool) -> Result {
        let process = process::get()?;
        let mut state = executable.lock();
        let is_conditional =
            |length: usize| path.get(..length).is_some_and(|way| state.conditional.contains(way));
        let mut naming = Naming::again(path, (1..path.len()).any(is_conditional), &state.functions);
        let changes = wire::changes(process, path, enabled, work, &mut naming)?;
        state.launched = false;
        let send = |bytes: &[u8]| {
            sent(process, bytes, |change| {
                process.session.sync(0, &calls::graph_set_work::Args { graph: executable.id, change })
            })
        };
        let Some((first, others)) = changes.split_first() else { return Ok(()) };
        send(first)?;
        // From here on the executable has the new work, whether or not its parts can be turned off or on.
        state.events.retain(|at, _| !at.starts_with(path));
        recorded_by(work, &mut path.to_vec(), &mut state.events);
        let replaced = state.functions.extract_if(.., |at, _| at.starts_with(path)).collect();
        state.functions.append(&mut naming.named());
        state.retire(process, replaced);
        others.iter().try_for_each(|change| send(change).map(drop))
    }

    fn update(
        &self,
        executable: &GuestExecutable,
        plan: &Plan,
        conditional: Option<&GuestConditionalGraph>,
    ) -> core::result::Result<(), Refusal<Error>> {
        let process = process::get().map_err(whole)?;
        let mut naming = Naming::of(conditional.map(|graph| graph.0));
        let bytes = wire::plan(process, plan, &mut naming)?;
        let mut state = executable.lock();
        let reply = sent(process, &bytes, |plan| {
            process.session.sync(0, &calls::graph_update::Args { graph: executable.id, plan })
        });
        let reply = reply.map_err(whole)?;
        answered(reply.error, reply.node)?;
        state.launched = false;
        state.events = recorded_events(plan);
        let replaced = core::mem::replace(&mut state.functions, naming.named());
        state.retire(process, replaced);
        Ok(())
    }

    fn launch(&self, executable: &GuestExecutable, stream: u64, per_thread: bool) -> Result {
        let process = process::get()?;
        process.session.healthy()?;
        let stream = process.stream_or_default(Call { per_thread }, stream)?;
        let (target, call) = (Some(stream.target()), calls::graph_launch::Args { graph: executable.id });
        let mut state = executable.lock();
        let launched = state.launched;
        let turn = turns::of_device(process)?;
        let post = || {
            if launched {
                process.session.post(stream.context, target, &call)
            } else {
                process.session.post_checked(stream.context, target, &call)
            }
        };
        let sequence = match state.functions.len() {
            0 => post()?,
            calls => process.host_functions.launch(calls, || Ok((stream.slot, post()?)))?,
        };
        drop(turn);
        state.launched = true;
        for event in state.events.values() {
            // An event may have been destroyed since: then no call waits for it.
            if let Ok(event) = process.events.resolve(*event) {
                event.recorded_at(stream, sequence);
            }
        }
        if !state.functions.is_empty() || executable.kept.as_ref().is_some_and(|kept| !kept.is_empty()) {
            state.running.insert(stream.slot, sequence);
        }
        drop(state);
        // Not before: the thread of functions calls those of the launch by now, and a launch that fails is in the books.
        process.session.complete_if_blocking(stream.context, stream.target(), sequence)?;
        if process.session.launches_block() { turns::of_program(process) } else { Ok(()) }
    }

    fn upload(&self, _: &GuestExecutable, stream: u64, per_thread: bool) -> Result {
        let process = process::get()?;
        process.session.healthy()?;
        process.stream_or_default(Call { per_thread }, stream).map(drop)
    }

    fn allocate_memory(&self, device: i32, bytes: u64) -> Result<u64> {
        let process = process::get()?;
        let context = process.current()?;
        process.devices.get(device)?;
        // The current context owns the memory.
        if context.device != device {
            return Err(Error::NOT_SUPPORTED);
        }
        process.device_map.allocate(&process.session, context.raw, 0, RangeOrigin::Own, bytes)
    }

    fn free_memory(&self, address: u64) {
        // Without a process the memory ends with the session, or it is the parent's.
        if let Ok(process) = process::get() {
            process.device_map.free_unused(&process.session, address);
        }
    }

    fn keep_until_reached(&self, stream: u64, per_thread: bool, kept: Kept) -> Result {
        let process = process::get()?;
        keep_until_reached(process, process.stream_or_default(Call { per_thread }, stream)?, kept)
    }

    fn refused(&self, feature: &'static str) {
        log::warn(format_args!("graphs: a {feature} is not supported yet (CUDA_ERROR_NOT_SUPPORTED)"));
    }
}

/// Reports once that a kind of work cannot be in a graph yet.
fn unsupported(said: &AtomicBool, work: &'static str) -> Error {
    if !said.swap(true, Ordering::Relaxed) {
        log::warn(format_args!("graphs: {work} is not supported yet (CUDA_ERROR_NOT_SUPPORTED)"));
    }
    Error::NOT_SUPPORTED
}
