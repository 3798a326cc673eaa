//! Contexts, and the stack of them that each thread has.
//!
//! A [`Context`] is the object that a handle names. Its [`Core`] is its content while it is alive: a primary context loses it
//! when it is released for the last time and gets a new one when it is retained again, under the same handle.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::handles::{Kind, Registry};
use crate::memory::{BlockKind, DeviceHeap, Overhead};
use crate::printed::Printed;
use crate::process;
use crate::schedule::{Key, Order, Scheduler};

/// All contexts of the process.
pub(crate) static CONTEXTS: Registry<Context> = Registry::new(Kind::Context, Error::INVALID_CONTEXT);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Whether a context can still be used. The first fault stays.
#[derive(Debug, Default)]
pub(crate) struct Health {
    code: AtomicU32,
    /// Ends running launches: the context had a fault, or is being destroyed.
    pub(crate) stop: AtomicBool,
}

impl Health {
    /// The fault, as every later call returns it.
    pub(crate) fn check(&self) -> Result {
        match self.code.load(Acquire) {
            0 => Ok(()),
            code => Err(Error(code)),
        }
    }

    /// Whether queued work may still run.
    pub(crate) fn is_sound(&self) -> bool {
        self.code.load(Acquire) == 0 && !self.stop.load(Relaxed)
    }

    /// Notes a fault, which ends everything that runs in the context; one that came before stays.
    pub(crate) fn poison(&self, error: Error) {
        // Nothing to do when it fails: the context has its fault already.
        let _ = self.code.compare_exchange(0, error.0, AcqRel, Acquire);
        self.stop.store(true, Release);
    }
}

/// What kernels may be given, as `cuCtxSetLimit` numbers it.
const LIMITS: usize = 11;
pub(crate) const LIMIT_STACK: usize = 0;
pub(crate) const LIMIT_PRINTF: usize = 1;
pub(crate) const LIMIT_HEAP: usize = 2;
const DEFAULT_LIMITS: [u64; LIMITS] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0, 0, 0, 0];

/// A living context.
pub(crate) struct Core {
    pub(crate) gpu: &'static Gpu,
    /// Unique in the process.
    pub(crate) id: u64,
    /// The handle of its context.
    pub(crate) handle: u64,
    pub(crate) health: Arc<Health>,
    /// The queue of the legacy default stream.
    pub(crate) legacy: Key,
    /// Default streams of threads.
    per_thread: Mutex<HashMap<u64, Key>>,
    /// Queues of streams that are gone, with work that is not.
    ended: Mutex<Vec<Key>>,
    /// Handles that end with the context.
    pub(crate) streams: Mutex<Vec<u64>>,
    pub(crate) events: Mutex<Vec<u64>>,
    pub(crate) modules: Mutex<Vec<u64>>,
    pub(crate) limits: Mutex<[u64; LIMITS]>,
    /// The largest values that limits had: what they take stays taken.
    largest: Mutex<[u64; LIMITS]>,
    printed: Printed,
    /// Memory for `malloc` in kernels, from the first module that calls it on.
    pub(crate) heap: Mutex<Option<DeviceHeap>>,
    /// Device memory that the context takes for itself.
    pub(crate) overhead: Overhead,
    /// Workspaces of cooperative launches that are over.
    pub(crate) workspaces: Mutex<Vec<u64>>,
}

/// See the module.
pub(crate) struct Context {
    pub(crate) gpu: &'static Gpu,
    pub(crate) handle: u64,
    pub(crate) flags: AtomicU32,
    pub(crate) version: u32,
    core: RwLock<Option<Arc<Core>>>,
    /// Retains, of a primary context.
    pub(crate) retained: Mutex<u64>,
}

/// Locks whatever happened to other holders: all data here is consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// A context that is not alive yet, with its handle.
    pub(crate) fn register(gpu: &'static Gpu, flags: u32, version: u32) -> Result<Arc<Context>> {
        let make = |handle| Context {
            gpu,
            handle,
            flags: AtomicU32::new(flags),
            version,
            core: RwLock::new(None),
            retained: Mutex::new(0),
        };
        Ok(CONTEXTS.insert_with(make)?.1)
    }

    /// Brings it to life, if the device has memory for it.
    pub(crate) fn activate(&self) -> Result<Arc<Core>> {
        let scheduler = process::scheduler();
        let health = Arc::new(Health::default());
        let core = Arc::new(Core {
            gpu: self.gpu,
            id: NEXT_ID.fetch_add(1, Relaxed),
            handle: self.handle,
            legacy: scheduler.open(Order::Legacy, 0, Arc::clone(&health)),
            health,
            per_thread: Mutex::default(),
            ended: Mutex::default(),
            streams: Mutex::default(),
            events: Mutex::default(),
            modules: Mutex::default(),
            limits: Mutex::new(DEFAULT_LIMITS),
            largest: Mutex::new(DEFAULT_LIMITS),
            printed: Printed::default(),
            heap: Mutex::new(None),
            overhead: Overhead::default(),
            workspaces: Mutex::default(),
        });
        if let Err(error) = core.overhead.begin(&core) {
            scheduler.retire(core.legacy);
            return Err(error);
        }
        self.gpu.space.owner().context_began();
        *self.core.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&core));
        Ok(core)
    }

    /// What it holds, if it is alive.
    pub(crate) fn core(&self) -> Result<Arc<Core>> {
        let core = self.core.read().unwrap_or_else(PoisonError::into_inner);
        core.clone().ok_or(Error::CONTEXT_IS_DESTROYED)
    }

    /// Whether it is alive.
    pub(crate) fn is_active(&self) -> bool {
        self.core.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Ends it: running launches stop, queued work is dropped, memory goes back.
    pub(crate) fn deactivate(&self) {
        let core = self.core.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(core) = core {
            core.end();
        }
    }
}

impl Core {
    /// The queue of the default stream that a call means by stream 0.
    pub(crate) fn default_queue(self: &Arc<Self>, implicit: Implicit) -> Key {
        match implicit {
            Implicit::Legacy => self.legacy,
            Implicit::PerThread => self.thread_queue(),
        }
    }

    /// The queue of the calling thread's own default stream.
    pub(crate) fn thread_queue(self: &Arc<Self>) -> Key {
        let thread = thread_number();
        let mut queues = lock(&self.per_thread);
        *queues.entry(thread).or_insert_with(|| {
            remember_core(self);
            process::scheduler().open(Order::Blocking(self.legacy), 0, Arc::clone(&self.health))
        })
    }

    /// Every queue of the context.
    pub(crate) fn queues(&self) -> Vec<Key> {
        let mut queues = vec![self.legacy];
        queues.extend(lock(&self.per_thread).values());
        for handle in lock(&self.streams).iter() {
            if let Ok(stream) = crate::stream::STREAMS.get(*handle) {
                queues.push(stream.queue);
            }
        }
        queues.extend(lock(&self.ended).iter());
        queues
    }

    /// A stream is gone: its queue ends with its work, which stays the context's until then.
    pub(crate) fn let_go(&self, queue: Key) {
        let scheduler = process::scheduler();
        scheduler.retire(queue);
        let mut ended = lock(&self.ended);
        ended.push(queue);
        ended.retain(|queue| !scheduler.tail(*queue).is_empty());
    }

    /// Waits for everything submitted so far. The fault, if there is one, is for the caller to ask for.
    pub(crate) fn drain(&self, scheduler: &Scheduler) {
        for queue in self.queues() {
            for point in scheduler.tail(queue) {
                scheduler.wait(point);
            }
        }
    }

    /// Waits for everything submitted so far, and says what came of it.
    pub(crate) fn synchronize(&self) -> Result {
        self.drain(process::scheduler());
        self.gpu.trim_pools();
        self.flush_printed();
        self.health.check()
    }

    /// Takes what a kernel printed.
    pub(crate) fn print(&self, stream: process::Stream, text: &[u8]) {
        let room = usize::try_from(lock(&self.limits)[LIMIT_PRINTF]).unwrap_or(usize::MAX);
        self.printed.take(stream, text, room);
    }

    /// Hands what kernels printed to the program's standard output, and reports of assertions to its standard error.
    pub(crate) fn flush_printed(&self) {
        self.printed.flush(process::print);
    }

    /// A limit of `cuCtxGetLimit`.
    pub(crate) fn limit(&self, number: i32) -> Result<u64> {
        let index = usize::try_from(number).map_err(|_| Error::UNSUPPORTED_LIMIT)?;
        lock(&self.limits).get(index).copied().ok_or(Error::UNSUPPORTED_LIMIT)
    }

    /// Sets a limit of `cuCtxSetLimit`; what it takes beyond the largest so far comes out of the device's memory.
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

    /// Takes the heap of kernels, when the first module that calls `malloc` is loaded.
    pub(crate) fn take_heap(&self) -> Result {
        let mut heap = lock(&self.heap);
        if heap.is_none() {
            let bytes = lock(&self.limits)[LIMIT_HEAP];
            *heap = Some(self.new_heap(bytes).map_err(|_| Error::SHARED_OBJECT_INIT_FAILED)?);
        }
        Ok(())
    }

    fn new_heap(&self, bytes: u64) -> Result<DeviceHeap> {
        let base = self.gpu.space.allocate(self, bytes.max(1), BlockKind::Internal)?;
        Ok(DeviceHeap::new(base, bytes))
    }

    /// The size of the heap of kernels. One that was taken is taken anew, as long as no kernel has used it.
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
        // No kernel knows its addresses. Kernels that run are waited for, and may want the lock.
        if let Some(unneeded) = unneeded {
            let space = &self.gpu.space;
            space.release(&space.withdraw(unneeded.base(), &[BlockKind::Internal])?);
        }
        Ok(())
    }

    fn end(&self) {
        self.health.stop.store(true, Release);
        let scheduler = process::scheduler();
        self.drain(scheduler);
        self.flush_printed();
        sluice_cuda_abi::tables::context_destroyed(usize::try_from(self.handle).unwrap_or(0));
        // Calls that still hold the core find it dead.
        self.health.poison(Error::CONTEXT_IS_DESTROYED);
        for handle in std::mem::take(&mut *lock(&self.events)) {
            let _ = crate::event::EVENTS.remove(handle);
        }
        for handle in std::mem::take(&mut *lock(&self.streams)) {
            if let Ok(stream) = crate::stream::STREAMS.remove(handle) {
                scheduler.retire(stream.queue);
            }
        }
        for (_, queue) in lock(&self.per_thread).drain() {
            scheduler.retire(queue);
        }
        scheduler.retire(self.legacy);
        for handle in std::mem::take(&mut *lock(&self.modules)) {
            crate::module::forget(handle);
        }
        *lock(&self.heap) = None;
        self.overhead.give_back();
        self.gpu.free_all_of(self.id);
        self.gpu.space.owner().context_ended();
    }
}

/// Which stream a call means when it says 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Implicit {
    /// The one all threads share.
    Legacy,
    /// The calling thread's own.
    PerThread,
}

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
    /// 0 until it is asked for. Has no destructor: it can be read at any time.
    static THREAD: Cell<u64> = const { Cell::new(0) };
    static OWN_QUEUES: OwnQueues = const { OwnQueues(RefCell::new(Vec::new())) };
}

static NEXT_THREAD: AtomicU64 = AtomicU64::new(1);

fn thread_number() -> u64 {
    THREAD.with(|number| {
        if number.get() == 0 {
            number.set(NEXT_THREAD.fetch_add(1, Relaxed));
        }
        number.get()
    })
}

/// The contexts in which a thread has a default stream, which ends with it.
struct OwnQueues(RefCell<Vec<Weak<Core>>>);

impl Drop for OwnQueues {
    fn drop(&mut self) {
        if !process::is_usable() {
            return; // A forked child, or the process is ending: nothing of the parent's may be touched.
        }
        for core in self.0.borrow().iter().filter_map(Weak::upgrade) {
            if let Some(queue) = lock(&core.per_thread).remove(&thread_number()) {
                core.let_go(queue);
            }
        }
    }
}

fn remember_core(core: &Arc<Core>) {
    // During the end of a thread the queue simply stays until its context ends.
    let _ = OWN_QUEUES.try_with(|queues| queues.0.borrow_mut().push(Arc::downgrade(core)));
}

/// The calling thread's stack of contexts; at the very end of a thread it is gone.
fn with_stack<T>(action: impl FnOnce(&mut Vec<Arc<Context>>) -> T) -> Result<T> {
    STACK.try_with(|stack| action(&mut stack.borrow_mut())).map_err(|_| Error::DEINITIALIZED)
}

/// The context current to this thread.
pub(crate) fn current() -> Result<Option<Arc<Context>>> {
    with_stack(|stack| stack.last().cloned())
}

/// What the current context holds: for calls that need one and fail after a fault.
pub(crate) fn current_core() -> Result<Arc<Core>> {
    let core =
        with_stack(|stack| stack.last().map(|context| context.core()))?.ok_or(Error::INVALID_CONTEXT)??;
    core.health.check()?;
    Ok(core)
}

/// Puts a context on the stack.
pub(crate) fn push(context: Arc<Context>) -> Result {
    with_stack(|stack| stack.push(context))
}

/// Takes the current context from the stack.
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

/// Ends a context made by `cuCtxCreate`.
pub(crate) fn destroy(handle: u64) -> Result {
    let context = CONTEXTS.get(handle)?;
    if Arc::ptr_eq(&context, context.gpu.primary()) {
        return Err(Error::INVALID_CONTEXT);
    }
    CONTEXTS.remove(handle)?;
    context.deactivate();
    with_stack(|stack| {
        if stack.last().is_some_and(|top| Arc::ptr_eq(top, &context)) {
            stack.pop();
        }
    })
}
