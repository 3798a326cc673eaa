//! Graphs: the checks of nodes, and the execution of plans.
//!
//! An executable graph is a list of steps in the order of its plan. A launch submits them to its stream one by one, so that branches of
//! a graph run one after another. The entry points ask [`GRAPHS`] at every use of a stream whether it is captured.
#![expect(unsafe_code, reason = "calls the host functions of a program")]

use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::sync::{Arc, Mutex};

use sluice_cuda_frontend::environment::Environment;
use sluice_cuda_graphs::{
    ConditionalHandle, ConditionalWork, Copy3D, FillWork, GraphDriver, Graphs, HostWork, Kept, KernelFacts,
    KernelWork, MemoryOperation, Plan, Refusal, Stream, Work,
};

use crate::conditions::{ConditionHandle, ConditionHandles};
use crate::context::{CONTEXTS, Core, current_core};
use crate::copy::{self, CopyExtent, Pattern, PreparedCopy, PreparedFill, Side, StatedMemory};
use crate::error::{Error, Result};
use crate::event::{EVENTS, Event};
use crate::gpu;
use crate::handles::{Kind, kind_of};
use crate::health::Health;
use crate::images;
use crate::launch::{self, PreparedLaunch, Shape};
use crate::lock::lock;
use crate::log::log;
use crate::memory::BlockKind;
use crate::module::{Callable, callable, described};
use crate::schedule::{Point, QueuedWork, scheduler};
use crate::stream::{Implicit, StreamTarget, target};
use crate::threads;

/// The graphs and captures of the process.
pub(crate) static GRAPHS: Graphs<SoftGraphs> = Graphs::new(SoftGraphs);

/// This driver, as graphs know it.
pub(crate) struct SoftGraphs;

/// True if another child graph has another copy of several rows, which NVIDIA's driver refuses in an executable.
fn changes_rows(old: &Work, new: &Work) -> bool {
    let (Work::Child(old), Work::Child(new)) = (old, new) else { return false };
    old.nodes.iter().zip(&new.nodes).any(|(old, new)| match (&old.work, &new.work) {
        (Work::Copy { copy: old, .. }, Work::Copy { copy: new, .. }) => {
            old != new && [old, new].iter().any(|copy| copy.height > 1 || copy.depth > 1)
        }
        (old, new) => changes_rows(old, new),
    })
}

/// Work that may run any number of times.
type Repeatable = Arc<dyn Fn() -> Result + Send + Sync>;

/// The work of a node that passed its checks.
#[derive(Clone)]
enum GraphStep {
    Run(Repeatable),
    Record(Arc<Event>),
    Wait(Arc<Event>),
}

/// An executable graph.
pub(crate) struct Executable {
    present: Mutex<Present>,
    /// The end of the last launch: launches of one executable graph come one after another. It is held while a launch submits its
    /// steps.
    last: Mutex<Option<Point>>,
    kept: Arc<Kept>,
}

/// The present work of an executable graph.
struct Present {
    plan: Plan,
    steps: Arc<[GraphStep]>,
    /// The handles of the graph of which the plan is.
    handles: Vec<Arc<ConditionHandle>>,
}

/// A pointer of the program, passed back to its function.
struct ProgramCall {
    function: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
}

// SAFETY: the pointer is never dereferenced here; the API lets the function run on another thread.
unsafe impl Send for ProgramCall {}
// SAFETY: the same; launches of one executable graph call it one after another.
unsafe impl Sync for ProgramCall {}

impl ProgramCall {
    fn of(host: HostWork) -> Result<ProgramCall> {
        let address = |number: u64| usize::try_from(number).map_err(|_| Error::INVALID_VALUE);
        let function = ptr::with_exposed_provenance::<()>(address(host.function)?);
        if function.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        let data = ptr::with_exposed_provenance_mut(address(host.data)?);
        // SAFETY: not null, and the program guarantees that it is a function of this type.
        let function = unsafe { mem::transmute::<*const (), unsafe extern "C" fn(*mut c_void)>(function) };
        Ok(ProgramCall { function, data })
    }

    fn run(&self) -> Result {
        // SAFETY: the program asked for this call.
        threads::in_host_function(|| unsafe { (self.function)(self.data) });
        Ok(())
    }
}

fn core_of(context: u64) -> Result<Arc<Core>> {
    let core = CONTEXTS.get(context)?.core()?;
    core.health.check()?;
    Ok(core)
}

fn prepare_kernel(kernel: &KernelWork) -> Result<PreparedLaunch> {
    let core = core_of(kernel.context)?;
    let words = kernel.attributes.iter().map(|attribute| {
        let word = |index: usize| {
            let bytes = attribute.value[4 * index..].first_chunk().copied().unwrap_or_default();
            u32::from_ne_bytes(bytes)
        };
        (attribute.id, [word(0), word(1), word(2)])
    });
    let KernelWork { function, grid, block, shared: dynamic_shared, ref parameters, .. } = *kernel;
    let cooperative = launch::is_cooperative(words)?;
    let shape = Shape { grid, block, dynamic_shared, cooperative };
    launch::prepare((&core, core.gpu.multiprocessors()), callable(function, &core)?, &shape, |_| {
        Ok(parameters.to_vec())
    })
}

fn prepare_copy(copy: &Copy3D, context: u64) -> Result<PreparedCopy> {
    let core = core_of(context)?;
    let extent = CopyExtent { width: copy.width, height: copy.height, depth: copy.depth };
    if copy.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    let (to, from) = (images::side(&copy.to, extent)?, images::side(&copy.from, extent)?);
    copy::prepare(core.gpu, to, from, extent)
}

fn prepare_fill(fill: &FillWork, context: u64) -> Result<PreparedFill> {
    let core = core_of(context)?;
    let FillWork { to, pitch, value, element, width, height } = *fill;
    if !matches!(element, 1 | 2 | 4) || fill.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    let to = Side { start: to, pitch, slice: 0, place: StatedMemory::Device };
    let pattern = Pattern { value: value.into(), bytes: element.into() };
    copy::prepare_fill(core.gpu, to, pattern, CopyExtent { width, height, depth: 1 })
}

fn prepare_operations(operations: &[MemoryOperation], context: u64) -> Result<Vec<PreparedFill>> {
    let core = core_of(context)?;
    let prepare = |operation: &MemoryOperation| match *operation {
        MemoryOperation::Write { flags, .. } if flags != 0 => Err(Error::INVALID_VALUE),
        MemoryOperation::Write { to, value, wide, .. } => {
            let pattern = Pattern { value, bytes: if wide { 8 } else { 4 } };
            let extent = CopyExtent { width: 1, height: 1, depth: 1 };
            copy::prepare_fill(core.gpu, Side::flat(to, StatedMemory::Device), pattern, extent)
        }
        // No stream of this driver waits for a value in memory.
        MemoryOperation::Wait { .. } => Err(Error::NOT_SUPPORTED),
    };
    operations.iter().map(prepare).collect()
}

/// An event of a node. Those that processes share are none.
fn event_of_node(event: u64) -> Result<Arc<Event>> {
    let event = EVENTS.get(event)?;
    if event.is_of_several_processes() { Err(Error::NOT_SUPPORTED) } else { Ok(event) }
}

/// Work that records its fault in the context that does it; the stream's context gets it from the scheduler.
fn run_in(context: u64, run: impl Fn() -> Result + Send + Sync + 'static) -> Result<GraphStep> {
    let health: Arc<Health> = Arc::clone(&core_of(context)?.health);
    Ok(GraphStep::Run(Arc::new(move || run().inspect_err(|error| health.poison(*error)))))
}

/// The steps of a plan in the making.
struct Preparation<'a> {
    steps: Vec<GraphStep>,
    handles: &'a [Arc<ConditionHandle>],
    /// The handles that conditional nodes use.
    used: Vec<Arc<ConditionHandle>>,
    /// The plan is in a body of a conditional node.
    in_body: bool,
}

/// Adds the steps of a plan. An error names the node of the outermost plan.
fn prepare(plan: &Plan, made: &mut Preparation<'_>) -> std::result::Result<(), Refusal<Error>> {
    for node in &plan.nodes {
        let refuse = |error| Refusal { error, node: Some(node.number) };
        if node.enabled {
            prepare_work(&node.work, made).map_err(refuse)?;
        }
    }
    Ok(())
}

/// A conditional node. All work in its bodies runs in one operation of the stream.
fn prepare_conditional(work: &ConditionalWork, made: &mut Preparation<'_>) -> Result<GraphStep> {
    let handle = ConditionHandle::find(made.handles, work.handle)?;
    let mut bodies: Vec<Vec<Repeatable>> = Vec::with_capacity(work.bodies.len());
    for plan in &work.bodies {
        let mut body =
            Preparation { steps: Vec::new(), handles: made.handles, used: Vec::new(), in_body: true };
        prepare(plan, &mut body).map_err(|refusal| refusal.error)?;
        made.used.append(&mut body.used);
        let run = |step| match step {
            GraphStep::Run(run) => Ok(run),
            // The graphs' own rules allow neither in a body.
            GraphStep::Record(_) | GraphStep::Wait(_) => Err(Error::NOT_SUPPORTED),
        };
        bodies.push(body.steps.into_iter().map(run).collect::<Result<_>>()?);
    }
    made.used.push(Arc::clone(&handle));
    let health = Arc::clone(&core_of(work.context)?.health);
    let kind = work.kind;
    run_in(work.context, move || {
        handle.run(kind, &bodies, &health, |body| body.iter().try_for_each(|run| run()))
    })
}

fn prepare_work(work: &Work, made: &mut Preparation<'_>) -> Result {
    let step = match work {
        Work::Kernel(kernel) => {
            let mut launch = prepare_kernel(kernel)?;
            launch.take_workspace()?;
            run_in(kernel.context, move || launch.run())?
        }
        Work::Copy { copy, context } => {
            let copy = prepare_copy(copy, *context)?;
            if made.in_body && !copy.is_of_device() {
                return Err(Error::NOT_SUPPORTED);
            }
            run_in(*context, move || copy.run())?
        }
        Work::Fill { fill, context } => {
            let fill = prepare_fill(fill, *context)?;
            run_in(*context, move || fill.run())?
        }
        Work::MemoryOperations { operations, context } => {
            let writes = prepare_operations(operations, *context)?;
            run_in(*context, move || writes.iter().try_for_each(|write| write.run()))?
        }
        Work::Host(host) => {
            let call = ProgramCall::of(*host)?;
            GraphStep::Run(Arc::new(move || call.run()))
        }
        Work::EventRecord { event } => GraphStep::Record(event_of_node(*event)?),
        Work::EventWait { event } => GraphStep::Wait(event_of_node(*event)?),
        Work::Child(plan) => return prepare(plan, made).map_err(|refusal| refusal.error),
        Work::Conditional(work) => prepare_conditional(work, made)?,
        Work::Empty | Work::Allocation(_) | Work::Free { .. } => return Ok(()),
    };
    made.steps.push(step);
    Ok(())
}

impl Present {
    fn new(plan: Plan, handles: Vec<Arc<ConditionHandle>>) -> std::result::Result<Present, Refusal<Error>> {
        let mut made = Preparation { steps: Vec::new(), handles: &handles, used: Vec::new(), in_body: false };
        prepare(&plan, &mut made)?;
        let Preparation { mut steps, used, .. } = made;
        if !used.is_empty() {
            let reset = move || {
                used.iter().for_each(|handle| handle.reset());
                Ok(())
            };
            steps.insert(0, GraphStep::Run(Arc::new(reset)));
        }
        Ok(Present { plan, steps: steps.into(), handles })
    }
}

fn handles_of(conditional: Option<&ConditionHandles>) -> Vec<Arc<ConditionHandle>> {
    conditional.map(ConditionHandles::all).unwrap_or_default()
}

fn facts(function: &Callable, context: u64, is_kernel: bool) -> Result<KernelFacts> {
    let narrow = |number: u32| u16::try_from(number).map_err(|_| Error::INVALID_VALUE);
    let entry = function.entry();
    let parameters: Result<Vec<(u16, u16)>> = entry
        .params
        .iter()
        .map(|parameter| Ok((narrow(parameter.offset)?, narrow(parameter.size)?)))
        .collect();
    Ok(KernelFacts { context, is_kernel, parameters: parameters?, bytes: narrow(entry.param_bytes)? })
}

/// Drops a value when a stream has completed its work so far.
pub(crate) fn keep_until_reached(target: &StreamTarget, kept: Kept) {
    let end = QueuedWork::Callback(Box::new(move |_| drop(kept)));
    scheduler().submit(target.queue, Vec::new(), end);
}

fn implicit(per_thread: bool) -> Implicit {
    if per_thread { Implicit::PerThread } else { Implicit::Legacy }
}

impl GraphDriver for SoftGraphs {
    type Error = Error;
    type Executable = Executable;
    type ConditionalGraph = ConditionHandles;

    fn context(&self) -> Result<u64> {
        Ok(current_core()?.handle)
    }

    fn stream(&self, stream: u64, per_thread: bool) -> Result<Stream> {
        Ok(target(stream, implicit(per_thread))?.facts())
    }

    fn kernel(&self, function: u64, context: u64) -> Result<KernelFacts> {
        let is_kernel = kind_of(function) == Kind::Kernel as u64;
        if !is_kernel {
            let function = described(function)?;
            return facts(&function, function.module.core.handle, false);
        }
        let core = if context == 0 { current_core()? } else { core_of(context)? };
        facts(&callable(function, &core)?, core.handle, true)
    }

    fn check(&self, work: &Work) -> Result {
        match work {
            Work::Kernel(kernel) => prepare_kernel(kernel).map(drop),
            Work::Copy { copy, context } => prepare_copy(copy, *context).map(drop),
            Work::Fill { fill, context } => prepare_fill(fill, *context).map(drop),
            Work::MemoryOperations { operations, context } => {
                prepare_operations(operations, *context).map(drop)
            }
            Work::Host(host) => ProgramCall::of(*host).map(drop),
            Work::EventRecord { event } | Work::EventWait { event } => event_of_node(*event).map(drop),
            Work::Child(_) | Work::Conditional(_) | Work::Empty | Work::Allocation(_) | Work::Free { .. } => {
                Ok(())
            }
        }
    }

    fn conditional_graph(&self, context: u64) -> Result<ConditionHandles> {
        core_of(context)?;
        Ok(ConditionHandles::default())
    }

    fn create_handle(&self, of: &ConditionHandles, condition: ConditionalHandle) -> Result<u64> {
        core_of(condition.context)?;
        of.create(condition)
    }

    fn instantiate(
        &self,
        plan: &Plan,
        conditional: Option<&ConditionHandles>,
        _flags: u64,
        kept: Kept,
    ) -> std::result::Result<Executable, Refusal<Error>> {
        let present = Present::new(plan.clone(), handles_of(conditional))?;
        Ok(Executable { present: Mutex::new(present), last: Mutex::new(None), kept: Arc::new(kept) })
    }

    fn set_work(&self, executable: &Executable, path: &[u32], work: &Work, enabled: bool) -> Result {
        let mut present = lock(&executable.present);
        let mut plan = present.plan.clone();
        let node = plan.node_mut(path).ok_or(Error::INVALID_VALUE)?;
        if changes_rows(&node.work, work) {
            return Err(Error::GRAPH_EXEC_UPDATE_FAILURE);
        }
        (node.work, node.enabled) = (work.clone(), enabled);
        *present = Present::new(plan, present.handles.clone()).map_err(|refusal| refusal.error)?;
        Ok(())
    }

    fn update(
        &self,
        executable: &Executable,
        plan: &Plan,
        conditional: Option<&ConditionHandles>,
    ) -> std::result::Result<(), Refusal<Error>> {
        let new = Present::new(plan.clone(), handles_of(conditional))?;
        *lock(&executable.present) = new;
        Ok(())
    }

    fn launch(&self, executable: &Executable, stream: u64, per_thread: bool) -> Result {
        let target = target(stream, implicit(per_thread))?;
        let scheduler = scheduler();
        let mut last = lock(&executable.last);
        let steps = Arc::clone(&lock(&executable.present).steps);
        scheduler.submit(target.queue, last.iter().copied().collect(), QueuedWork::Marker);
        for step in &*steps {
            match step {
                GraphStep::Run(run) => {
                    let run = Arc::clone(run);
                    scheduler.submit(target.queue, Vec::new(), QueuedWork::Task(Box::new(move || run())));
                }
                GraphStep::Record(event) => event.record(&target),
                GraphStep::Wait(event) => event.wait(&target),
            }
        }
        let end = if executable.kept.is_empty() {
            QueuedWork::Marker
        } else {
            let kept = Arc::clone(&executable.kept);
            QueuedWork::Callback(Box::new(move |_| drop(kept)))
        };
        let end = scheduler.submit(target.queue, Vec::new(), end);
        *last = Some(end);
        drop(last);
        if Environment::get().launches_block {
            scheduler.wait(end);
            return target.core.health.check();
        }
        Ok(())
    }

    fn upload(&self, _executable: &Executable, stream: u64, per_thread: bool) -> Result {
        target(stream, implicit(per_thread)).map(drop)
    }

    fn allocate_memory(&self, device: i32, bytes: u64) -> Result<u64> {
        let core = current_core()?;
        // The current context owns the memory.
        if core.gpu.ordinal != gpu::at(device)?.ordinal {
            return Err(Error::NOT_SUPPORTED);
        }
        core.gpu.space.allocate(core.maker(), bytes, BlockKind::Device)
    }

    fn free_memory(&self, address: u64) {
        for gpu in gpu::all().unwrap_or_default() {
            if let Ok(block) = gpu.space.withdraw(address, &[BlockKind::Device]) {
                gpu.space.release(&block);
            }
        }
    }

    fn keep_until_reached(&self, stream: u64, per_thread: bool, kept: Kept) -> Result {
        let target = target(stream, implicit(per_thread))?;
        keep_until_reached(&target, kept);
        Ok(())
    }

    fn refused(&self, feature: &'static str) {
        log!("graphs: {feature} is not supported");
    }
}
