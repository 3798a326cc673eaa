//! Launches: the checks at the call, and the execution.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use sluice_cuda_abi::occupancy::resident_threads;
use sluice_cuda_frontend::environment::Environment;
use sluice_cuda_frontend::launch_parameters;
use softgpu_engine::{Fault, FaultKind, Launch, Memory, Runtime};

use crate::arrays::{BoundReference, LaunchImages, reference_handle};
use crate::conditions;
use crate::context::Core;
use crate::copy;
use crate::error::{Error, Result};
use crate::ffi::In;
use crate::lock::lock;
use crate::log::log;
use crate::memory::{BlockKind, MappingTable, Spans};
use crate::module::{Callable, callable};
use crate::occupancy;
use crate::printed::StandardStream;
use crate::process;
use crate::schedule::{QueuedWork, scheduler};
use crate::stream::StreamTarget;

/// Maximum dimensions of grids and blocks.
pub(crate) const MAX_GRID: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];
pub(crate) const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
pub(crate) const MAX_THREADS: u32 = 1024;

/// Bytes of the barrier of a cooperative launch.
const WORKSPACE: u64 = 32;

static NEXT_GRID: AtomicU64 = AtomicU64::new(1);

#[derive(Clone, Copy)]
pub(crate) struct LaunchRequest {
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: u32,
    pub(crate) parameters: In<In<u8>>,
    /// Pairs of a key and a pointer.
    pub(crate) extra: In<In<c_void>>,
    pub(crate) cooperative: bool,
}

/// Checks a launch and submits it to its stream.
pub(crate) fn launch(target: &StreamTarget, request: &LaunchRequest) -> Result {
    let callable = callable(request.function, &target.core)?;
    let pack = |callable: &Callable| parameters(callable, request);
    let mut launch = prepare((&target.core, target.multiprocessors()), callable, &request.shape(), pack)?;
    launch.take_workspace()?;
    let task = Box::new(move || launch.run());
    if Environment::get().launches_block {
        scheduler().submit_and_wait(target.queue, QueuedWork::Task(task));
        return target.core.health.check();
    }
    scheduler().submit(target.queue, Vec::new(), QueuedWork::Task(task));
    Ok(())
}

/// The parameters of a launch that becomes a node, packed into one block.
pub(crate) fn packed_parameters(core: &Arc<Core>, request: &LaunchRequest) -> Result<Vec<u8>> {
    parameters(&callable(request.function, core)?, request)
}

/// The size of a launch.
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: u32,
    pub(crate) cooperative: bool,
}

impl LaunchRequest {
    fn shape(&self) -> Shape {
        let LaunchRequest { grid, block, dynamic_shared, cooperative, .. } = *self;
        Shape { grid, block, dynamic_shared, cooperative }
    }
}

/// A launch that passed its checks. It may run more than once, one run after another.
pub(crate) struct PreparedLaunch {
    core: Arc<Core>,
    job: Job,
    cooperative: bool,
}

/// Checks a launch on some multiprocessors, and packs its parameters.
pub(crate) fn prepare(
    (core, multiprocessors): (&Arc<Core>, u32),
    callable: Callable,
    shape: &Shape,
    parameters: impl FnOnce(&Callable) -> Result<Vec<u8>>,
) -> Result<PreparedLaunch> {
    check(&callable, shape)?;
    let Shape { grid, block, dynamic_shared, cooperative } = *shape;
    let threads = block.iter().product::<u32>();
    let residents =
        occupancy::blocks(&callable, threads, u64::from(dynamic_shared)).saturating_mul(multiprocessors);
    if cooperative {
        let blocks: u64 = grid.iter().map(|count| u64::from(*count)).product();
        if blocks > u64::from(residents) {
            return Err(Error::COOPERATIVE_LAUNCH_TOO_LARGE);
        }
    }
    let parameters = parameters(&callable)?;
    let references = callable.module.bound_references();
    let job =
        Job { callable, grid, block, dynamic_shared, parameters, references, workspace: None, residents };
    Ok(PreparedLaunch { core: Arc::clone(core), job, cooperative })
}

impl PreparedLaunch {
    /// Takes the workspace of a cooperative launch, which must happen before it runs.
    pub(crate) fn take_workspace(&mut self) -> Result {
        if self.cooperative && self.job.workspace.is_none() {
            self.job.workspace = Some(take_workspace(&self.core)?);
        }
        Ok(())
    }

    /// Executes the launch.
    pub(crate) fn run(&self) -> Result {
        run(&self.core, &self.job)
    }
}

impl Drop for PreparedLaunch {
    fn drop(&mut self) {
        if let Some(workspace) = self.job.workspace.take() {
            lock(&self.core.workspaces).push(workspace);
        }
    }
}

/// Reads attributes of a launch or of a node: their numbers, and the first words of their values. Returns whether the launch is
/// cooperative, or an error for an unsupported attribute.
pub(crate) fn is_cooperative(attributes: impl IntoIterator<Item = (u32, [u32; 3])>) -> Result<bool> {
    let mut cooperative = false;
    for (key, value) in attributes {
        match key {
            2 => cooperative = value[0] != 0,
            CLUSTER => check_cluster(value)?,
            // Ignored attributes, and hints that change no result: access policy, cluster scheduling, serialisation (this device
            // always serialises), priority, synchronisation domains, preferred cluster, carve-out, portability and shared-memory
            // mode of clusters that have one block.
            0 | 1 | 5 | 6 | 8 | 9 | 10 | 11 | 14 | 16 | 17 | 18 => {}
            // Events that blocks trigger, or the begin of the last block: at its end the launch has passed both.
            PROGRAMMATIC_EVENT | COMPLETION_EVENT => {}
            // Updates by the device.
            13 => return Err(Error::NOT_SUPPORTED),
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    Ok(cooperative)
}

/// The attributes with an event that the launch records.
pub(crate) const PROGRAMMATIC_EVENT: u32 = 7;
pub(crate) const COMPLETION_EVENT: u32 = 12;
/// The attribute with the dimensions of a cluster.
pub(crate) const CLUSTER: u32 = 4;

/// Checks the cluster size; clusters have one block.
pub(crate) fn check_cluster(size: [u32; 3]) -> Result {
    if size == [1, 1, 1] { Ok(()) } else { Err(Error::INVALID_CLUSTER_SIZE) }
}

/// Device memory for a cooperative launch. It is used again and released with the context: a release here could wait for other
/// launches.
fn take_workspace(core: &Core) -> Result<u64> {
    match lock(&core.workspaces).pop() {
        Some(workspace) => Ok(workspace),
        None => core.gpu.space.allocate(core.maker(), WORKSPACE, BlockKind::Internal),
    }
}

/// Checks that the driver makes without the device; a failure leaves the context sound.
fn check(callable: &Callable, request: &Shape) -> Result {
    let entry = callable.entry();
    let within = |sizes: &[u32; 3], limits: &[u32; 3]| {
        sizes.iter().zip(limits).all(|(size, limit)| (1..=*limit).contains(size))
    };
    if !within(&request.grid, &MAX_GRID) || !within(&request.block, &MAX_BLOCK) {
        return Err(Error::INVALID_VALUE);
    }
    let threads: u32 = request.block.iter().product();
    if threads > MAX_THREADS {
        return Err(Error::INVALID_VALUE);
    }
    // The device could run that many threads, but this function cannot: it takes too many registers, or is bounded.
    if threads > entry.max_threads {
        let resident = resident_threads(callable.capability().registers_per_multiprocessor, entry.registers);
        return Err(if threads > resident { Error::LAUNCH_OUT_OF_RESOURCES } else { Error::INVALID_VALUE });
    }
    if entry.required_block.is_some_and(|required| required != request.block) {
        return Err(Error::INVALID_VALUE);
    }
    if request.dynamic_shared > callable.settings().dynamic_shared.load(Relaxed) {
        return Err(Error::INVALID_VALUE);
    }
    Ok(())
}

/// Packs the parameters into one block.
fn parameters(callable: &Callable, request: &LaunchRequest) -> Result<Vec<u8>> {
    let entry = callable.entry();
    let size = usize::try_from(entry.param_bytes).map_err(|_| Error::INVALID_VALUE)?;
    if request.extra.is_given() {
        if request.parameters.is_given() {
            return Err(Error::INVALID_VALUE);
        }
        return launch_parameters::block(request.extra, size, Error::INVALID_VALUE);
    }
    let mut block = vec![0; size];
    for (index, parameter) in entry.params.iter().enumerate() {
        let value = request.parameters.get_at(index)?;
        let start = usize::try_from(parameter.offset).map_err(|_| Error::INVALID_VALUE)?;
        let end = start + usize::try_from(parameter.size).map_err(|_| Error::INVALID_VALUE)?;
        let place = block.get_mut(start..end).ok_or(Error::INVALID_VALUE)?;
        value.read(place)?;
    }
    Ok(block)
}

struct Job {
    callable: Callable,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared: u32,
    parameters: Vec<u8>,
    /// The objects of the module's references at the time of the call.
    references: Vec<Option<BoundReference>>,
    workspace: Option<u64>,
    residents: u32,
}

/// Executes a launch on the worker threads.
fn run(core: &Arc<Core>, job: &Job) -> Result {
    let space = core.gpu.space;
    let running = space.running.enter();
    if let Some(workspace) = job.workspace {
        copy::clear(core.gpu, workspace, WORKSPACE)?;
    }
    let memory = Mapped { table: &space.table, spans: RwLock::new(space.table.spans()) };
    let images = LaunchImages { core: core.id, references: &job.references };
    let references: Vec<u64> = (0..job.references.len()).map(reference_handle).collect();
    let runtime = HostCall { core };
    let launch = Launch {
        module: &job.callable.module.linked,
        kernel: job.callable.index,
        grid: job.grid,
        block: job.block,
        dynamic_shared: job.dynamic_shared,
        params: &job.parameters,
        cooperative: job.workspace,
        resident_ctas: job.residents.max(1),
        memory: &memory,
        images: &images,
        references: &references,
        runtime: &runtime,
        stop: &core.health.stop,
        deadline: core.gpu.time_limit.map(|limit| Instant::now() + limit),
        grid_id: NEXT_GRID.fetch_add(1, Relaxed),
    };
    let start = Instant::now();
    let outcome = process::driver()?.pool.run(&launch);
    space.owner().launched(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    drop(running);
    outcome.map_err(|fault| {
        log!("{}: {fault}", job.callable.entry().name);
        code_of(&fault)
    })
}

/// The result code of a fault.
fn code_of(fault: &Fault) -> Error {
    match fault.kind {
        FaultKind::IllegalAddress => Error::ILLEGAL_ADDRESS,
        FaultKind::Misaligned => Error::MISALIGNED_ADDRESS,
        FaultKind::AddressSpace => Error::INVALID_ADDRESS_SPACE,
        FaultKind::InvalidPc => Error::INVALID_PC,
        FaultKind::Assert => Error::ASSERT,
        FaultKind::IllegalInstruction => Error::ILLEGAL_INSTRUCTION,
        FaultKind::Trap | FaultKind::LaunchFailed => Error::LAUNCH_FAILED,
        FaultKind::StackOverflow => Error::HARDWARE_STACK_ERROR,
        FaultKind::Timeout => Error::LAUNCH_TIMEOUT,
        FaultKind::Stopped => Error::CONTEXT_IS_DESTROYED,
    }
}

/// The mapping table for one launch: memory that was mapped at its start stays mapped until it ends, and later mappings are found
/// at their first access.
struct Mapped<'a> {
    table: &'a MappingTable,
    spans: RwLock<Arc<Spans>>,
}

impl Memory for Mapped<'_> {
    fn range(&self, address: u64, write: bool) -> Option<Range<u64>> {
        {
            let spans = self.spans.read().unwrap_or_else(PoisonError::into_inner);
            let found = spans.find(address, write);
            if found.is_some() || !self.table.is_newer_than(&spans) {
                return found;
            }
        }
        let spans = self.table.spans();
        let found = spans.find(address, write);
        *self.spans.write().unwrap_or_else(PoisonError::into_inner) = spans;
        found
    }
}

struct HostCall<'a> {
    core: &'a Arc<Core>,
}

impl Runtime for HostCall<'_> {
    fn take_scratch(&self, bytes: u64) -> u64 {
        self.core.overhead.take_scratch(bytes)
    }

    fn give_scratch(&self, address: u64, bytes: u64) {
        self.core.overhead.give_scratch(address, bytes);
    }

    fn begin_slice(&self) {
        self.core.gpu.share.begin_slice();
    }

    fn yield_now(&self) {
        self.core.gpu.share.yield_now();
    }

    fn end_slice(&self) {
        self.core.gpu.share.end_slice();
    }

    fn print(&self, text: &[u8]) {
        self.core.print(StandardStream::Output, text);
    }

    fn report(&self, text: &[u8]) {
        self.core.print(StandardStream::Error, text);
    }

    fn set_conditional(&self, handle: u64, value: u32) -> bool {
        conditions::set(self.core.handle, handle, value)
    }

    fn malloc(&self, bytes: u64) -> u64 {
        // The load of the kernel's module has allocated the heap.
        lock(&self.core.heap).as_mut().map_or(0, |heap| heap.malloc(bytes))
    }

    fn free(&self, address: u64) {
        if let Some(heap) = lock(&self.core.heap).as_mut() {
            heap.free(address);
        }
    }
}
