//! Contexts, and the stack of them that each thread has.
//!
//! A [`Context`] is the object behind a handle. Its [`Core`] is its content while it is alive: a primary context loses it at the
//! last release and gets a new one, under the same handle, when it is retained again.

use std::cell::RefCell;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;
use crate::green::Green;
use crate::handles::{Kind, Registry};
use crate::health::Health;
use crate::lock::lock;
use crate::memory::{BlockKind, DeviceHeap, Maker, Overhead};
use crate::printed::{self, Printed};
use crate::queues::{Joint, Queues};

/// All contexts of the process.
pub(crate) static CONTEXTS: Registry<Context> = Registry::new(Kind::Context, Error::INVALID_CONTEXT);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Result of `cuCtxGetApiVersion` for green contexts, as for primary ones.
const GREEN_VERSION: u32 = 3020;

/// Number of limits of `cuCtxSetLimit`.
const LIMITS: usize = 11;
pub(crate) const LIMIT_STACK: usize = 0;
pub(crate) const LIMIT_PRINTF: usize = 1;
pub(crate) const LIMIT_HEAP: usize = 2;
const DEFAULT_LIMITS: [u64; LIMITS] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0, 0, 0, 0];

/// A living context.
pub(crate) struct Core {
    pub(crate) gpu: &'static VisibleGpu,
    /// Unique in the process.
    pub(crate) id: u64,
    /// The handle of its context.
    pub(crate) handle: u64,
    pub(crate) health: Arc<Health>,
    pub(crate) queues: Arc<Queues>,
    /// Handles that end with the context.
    pub(crate) streams: Mutex<Vec<u64>>,
    pub(crate) events: Mutex<Vec<u64>>,
    pub(crate) modules: Mutex<Vec<u64>>,
    pub(crate) greens: Mutex<Vec<u64>>,
    pub(crate) limits: Mutex<[u64; LIMITS]>,
    /// The largest values that limits had: memory taken for them stays taken.
    largest: Mutex<[u64; LIMITS]>,
    printed: Printed,
    /// Memory for `malloc` in kernels; taken when the first module that calls it is loaded.
    pub(crate) heap: Mutex<Option<DeviceHeap>>,
    /// Device memory that the context takes for itself.
    pub(crate) overhead: Overhead,
    /// Workspaces of completed cooperative launches.
    pub(crate) workspaces: Mutex<Vec<u64>>,
}

/// The object behind a context handle.
pub(crate) struct Context {
    pub(crate) gpu: &'static VisibleGpu,
    pub(crate) handle: u64,
    pub(crate) flags: AtomicU32,
    pub(crate) version: u32,
    /// True for the primary context of its GPU, which is released instead of destroyed.
    pub(crate) is_primary: bool,
    core: RwLock<Option<Arc<Core>>>,
    /// The green context that this one stands for.
    green: Option<Arc<Green>>,
}

impl Context {
    /// Creates a context with a handle. It is not alive yet.
    pub(crate) fn register(
        gpu: &'static VisibleGpu,
        flags: u32,
        version: u32,
        is_primary: bool,
    ) -> Result<Arc<Context>> {
        let make = |handle| Context {
            gpu,
            handle,
            flags: AtomicU32::new(flags),
            version,
            is_primary,
            core: RwLock::new(None),
            green: None,
        };
        Ok(CONTEXTS.insert_with(make)?.1)
    }

    /// Creates the context that a green context is for calls that take one. It has the core of the primary context.
    pub(crate) fn register_green(core: &Arc<Core>, green: &Arc<Green>) -> Result<Arc<Context>> {
        let make = |handle| Context {
            gpu: core.gpu,
            handle,
            flags: AtomicU32::new(0),
            version: GREEN_VERSION,
            is_primary: false,
            core: RwLock::new(Some(Arc::clone(core))),
            green: Some(Arc::clone(green)),
        };
        Ok(CONTEXTS.insert_with(make)?.1)
    }

    /// The green context that this one stands for.
    pub(crate) fn green(&self) -> Option<Arc<Green>> {
        self.green.clone()
    }

    /// Makes the context alive, if the device has memory for it.
    pub(crate) fn activate(&self) -> Result {
        let health = Arc::new(Health::default());
        let core = Arc::new(Core {
            gpu: self.gpu,
            id: NEXT_ID.fetch_add(1, Relaxed),
            handle: self.handle,
            queues: Arc::new(Queues::new(Arc::clone(&health))),
            health,
            streams: Mutex::default(),
            events: Mutex::default(),
            modules: Mutex::default(),
            greens: Mutex::default(),
            limits: Mutex::new(DEFAULT_LIMITS),
            largest: Mutex::new(DEFAULT_LIMITS),
            printed: Printed::default(),
            heap: Mutex::new(None),
            overhead: Overhead::default(),
            workspaces: Mutex::default(),
        });
        if let Err(error) = core.overhead.begin(self.gpu.space, &self.gpu.rates, core.maker()) {
            core.queues.retire();
            return Err(error);
        }
        self.gpu.space.owner().context_began();
        self.gpu.adopt(Arc::clone(&core.queues));
        *self.core.write().unwrap_or_else(PoisonError::into_inner) = Some(core);
        Ok(())
    }

    /// Returns the core if the context is alive.
    pub(crate) fn core(&self) -> Result<Arc<Core>> {
        let core = self.core.read().unwrap_or_else(PoisonError::into_inner);
        core.clone().ok_or(Error::CONTEXT_IS_DESTROYED)
    }

    /// True if the context is alive.
    pub(crate) fn is_active(&self) -> bool {
        self.core.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Takes the core out; the context is then no longer alive.
    pub(crate) fn take_core(&self) -> Option<Arc<Core>> {
        self.core.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Core {
    /// Returns the two ids by which a block names its context.
    pub(crate) fn maker(&self) -> Maker {
        Maker { core: self.id, context: self.handle }
    }

    /// Waits for all work submitted so far. Returns its error, if any.
    pub(crate) fn synchronize(&self) -> Result {
        self.synchronize_queues(&*self.queues)
    }

    /// The same for some of its queues.
    pub(crate) fn synchronize_queues(&self, queues: &impl Joint) -> Result {
        queues.drain();
        self.gpu.pools.trim();
        self.flush_printed();
        self.health.check()
    }

    /// Stores text that a kernel printed.
    pub(crate) fn print(&self, stream: printed::StandardStream, text: &[u8]) {
        let room = usize::try_from(lock(&self.limits)[LIMIT_PRINTF]).unwrap_or(usize::MAX);
        self.printed.take(stream, text, room);
    }

    /// Writes the text that kernels printed to the program's standard output, and reports of assertions to its standard error.
    pub(crate) fn flush_printed(&self) {
        self.printed.flush(printed::write);
    }

    /// Returns a limit of `cuCtxGetLimit`.
    pub(crate) fn limit(&self, number: i32) -> Result<u64> {
        let index = usize::try_from(number).map_err(|_| Error::UNSUPPORTED_LIMIT)?;
        lock(&self.limits).get(index).copied().ok_or(Error::UNSUPPORTED_LIMIT)
    }

    /// Sets a limit of `cuCtxSetLimit`. Memory beyond that of its largest value so far is taken from the device.
    pub(crate) fn set_limit(&self, index: usize, value: u64) -> Result {
        if index == LIMIT_HEAP {
            return self.set_heap_limit(value);
        }
        let mut limits = lock(&self.limits);
        let mut largest = lock(&self.largest);
        let rates = &self.gpu.rates;
        let more = match index {
            LIMIT_STACK => rates.stacks(largest[index], value),
            LIMIT_PRINTF => rates.buffer(largest[index], value),
            _ => 0,
        };
        self.overhead.take(self.gpu.space.owner(), more)?;
        largest[index] = largest[index].max(value);
        limits[index] = value;
        Ok(())
    }

    /// Allocates the heap of kernels, when the first module that calls `malloc` is loaded.
    pub(crate) fn take_heap(&self) -> Result {
        let mut heap = lock(&self.heap);
        if heap.is_none() {
            let bytes = lock(&self.limits)[LIMIT_HEAP];
            *heap = Some(self.new_heap(bytes).map_err(|_| Error::SHARED_OBJECT_INIT_FAILED)?);
        }
        Ok(())
    }

    fn new_heap(&self, bytes: u64) -> Result<DeviceHeap> {
        let base = self.gpu.space.allocate(self.maker(), bytes.max(1), BlockKind::Internal)?;
        Ok(DeviceHeap::new(base, bytes))
    }

    /// Sets the size of the heap of kernels. An existing heap is replaced, as long as no kernel has used it.
    fn set_heap_limit(&self, bytes: u64) -> Result {
        let unneeded = {
            let mut heap = lock(&self.heap);
            let unneeded = match &*heap {
                Some(taken) if taken.is_used() => return Err(Error::INVALID_VALUE),
                Some(_) => heap.replace(self.new_heap(bytes)?),
                None => None,
            };
            lock(&self.limits)[LIMIT_HEAP] = bytes;
            unneeded
        };
        // No kernel has an address in the old heap. The release waits for running kernels, which may need the lock.
        if let Some(unneeded) = unneeded {
            let space = self.gpu.space;
            space.release(&space.withdraw(unneeded.base(), &[BlockKind::Internal])?);
        }
        Ok(())
    }
}

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// Accesses the calling thread's stack of contexts. It does not exist while the thread ends.
fn with_stack<T>(action: impl FnOnce(&mut Vec<Arc<Context>>) -> T) -> Result<T> {
    STACK.try_with(|stack| action(&mut stack.borrow_mut())).map_err(|_| Error::DEINITIALIZED)
}

/// Returns the context current to this thread.
pub(crate) fn current() -> Result<Option<Arc<Context>>> {
    with_stack(|stack| stack.last().cloned())
}

/// The green context that is current to this thread, if one is.
pub(crate) fn current_green() -> Result<Option<Arc<Green>>> {
    Ok(current()?.and_then(|context| context.green()))
}

/// Returns the core of the current context: for calls that need one and fail after a fault.
pub(crate) fn current_core() -> Result<Arc<Core>> {
    let core =
        with_stack(|stack| stack.last().map(|context| context.core()))?.ok_or(Error::INVALID_CONTEXT)??;
    core.health.check()?;
    Ok(core)
}

/// Pushes a context onto the stack.
pub(crate) fn push(context: Arc<Context>) -> Result {
    with_stack(|stack| stack.push(context))
}

/// Pops the current context from the stack.
pub(crate) fn pop() -> Result<Arc<Context>> {
    with_stack(Vec::pop)?.ok_or(Error::INVALID_CONTEXT)
}

/// Replaces the current context.
pub(crate) fn set_current(context: Option<Arc<Context>>) -> Result {
    with_stack(|stack| {
        stack.pop();
        stack.extend(context);
    })
}

/// Pops an ending context, if it is at the top of the stack.
pub(crate) fn pop_if(context: &Arc<Context>) -> Result {
    with_stack(|stack| {
        if stack.last().is_some_and(|top| Arc::ptr_eq(top, context)) {
            stack.pop();
        }
    })
}
