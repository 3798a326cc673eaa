//! The order of work: queues, the dependencies of each operation, and the threads that execute them. In one file: one lock orders it.
//!
//! Each stream has a queue. An operation runs when it is at the head of its queue and everything it *needs* is done: points
//! (queue, number) that were submitted before it. Needs only refer to earlier submissions, so queues cannot wait for each other
//! in a circle, and no thread is held while an operation waits. Only a running kernel, copy or host function holds a thread.
//! One thread looks after all operations that wait for memory to have a value ([`QueuedWork::Until`]).
//!
//! One lock protects everything; it is never held while an operation runs. Submitting costs the caller that lock and, if no
//! executor is awake, one wake-up.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use softgpu_device::StartDelay;

use crate::error::{Error, Result};
use crate::health::Health;
use crate::log::log;
use crate::threads;

/// Maximum number of executors. One starts when work waits and none is idle. More kernels than this that wait for each other
/// cannot make progress; the real device has a limit of 128 resident grids too.
const MAX_EXECUTORS: usize = 128;

/// Names a queue; a removed queue counts as drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    /// A number that no other queue of the process has or had.
    pub(crate) fn number(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }
}

/// A point in a queue: all operations up to this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) queue: Key,
    pub(crate) number: u64,
}

/// The time at which an event was reached, in nanoseconds; 0 before.
#[derive(Debug, Default)]
pub(crate) struct Stamp(AtomicU64);

impl Stamp {
    /// Returns the time, once the event is reached.
    pub(crate) fn nanoseconds(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Acquire)).filter(|time| *time != 0)
    }
}

/// The work of one operation. An error poisons the context.
pub(crate) type Task = Box<dyn FnOnce() -> Result + Send>;

/// Becomes true some time, or never. An error poisons the context.
pub(crate) type Condition = Arc<dyn Fn() -> Result<bool> + Send + Sync>;

/// The kinds of operations.
pub(crate) enum QueuedWork {
    /// No work: it only waits for its needs.
    Marker,
    /// Records the time.
    Stamp(Arc<Stamp>),
    /// Runs on an executor, but is dropped if the context is poisoned.
    Task(Task),
    /// Runs on an executor in any case, with the context's error as argument.
    Callback(Box<dyn FnOnce(u32) + Send>),
    /// Waits for a condition, unless the context is poisoned. It holds no executor.
    Until(Condition),
}

/// A queue whose head waits for a condition.
#[derive(Clone)]
struct Watch {
    queue: Key,
    condition: Condition,
    health: Arc<Health>,
}

impl Watch {
    /// True if the wait is over: the condition is true, or the context is poisoned.
    fn is_over(&self) -> bool {
        if !self.health.is_sound() {
            return true;
        }
        (self.condition)().unwrap_or_else(|error| {
            self.health.poison(error);
            true
        })
    }
}

struct Operation {
    /// Removed from the end as they are done.
    needs: Vec<Point>,
    work: QueuedWork,
}

/// The order of a queue relative to others of its context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The legacy default stream: waits for all blocking queues of the context, and they wait for it.
    Legacy,
    /// Waits for the legacy queue, and the legacy queue waits for it.
    Blocking(Key),
    /// Independent of the legacy queue.
    NonBlocking,
}

struct Queue {
    generation: u32,
    order: Order,
    priority: i32,
    health: Arc<Health>,
    operations: VecDeque<Operation>,
    posted: u64,
    completed: u64,
    /// An executor runs the head.
    running: bool,
    /// The queue is in `ready`.
    ready: bool,
    /// It is registered as a waiter of another queue.
    blocked: bool,
    /// Queues to advance when `completed` reaches the number.
    waiters: Vec<(u64, Key)>,
    /// For the legacy queue: blocking queues of the same context.
    peers: Vec<Key>,
    /// The lowest number that a sleeping thread waits for.
    wake_at: u64,
    sleepers: Arc<Condvar>,
    /// The queue is removed when it is drained.
    retired: bool,
}

#[derive(Default)]
struct State {
    queues: Vec<Option<Queue>>,
    generation: u32,
    ready: VecDeque<Key>,
    /// Entries of `ready` for which no executor has been woken yet.
    fresh: usize,
    /// Executors that sleep and have not been woken.
    idle: usize,
    /// Wake-ups that no executor has consumed yet.
    tokens: usize,
    executors: usize,
    /// Queues whose heads wait for conditions.
    watches: Vec<Watch>,
    /// The thread that looks at the conditions has been started.
    watched: bool,
}

/// The scheduler of the process.
pub(crate) struct Scheduler {
    state: Mutex<State>,
    work: Condvar,
    /// Signalled when `watches` gets an entry.
    watching: Condvar,
    start: Instant,
    /// Operations of one queue that are not done, at which a submission waits.
    depth: u64,
    /// The longest time by which operations start late, and the seed of these times.
    delay: (Duration, u64),
}

static SCHEDULER: OnceLock<Scheduler> = OnceLock::new();

/// Starts the scheduler, whose queues take `depth` operations before a submission waits, and whose operations start late by `delay`.
pub(crate) fn start(depth: u64, delay: StartDelay) {
    let _ = SCHEDULER.set(Scheduler::new(depth, delay));
}

/// Returns the scheduler. It exists from `cuInit` on, and every context is created after that.
pub(crate) fn scheduler() -> &'static Scheduler {
    SCHEDULER.get_or_init(|| Scheduler::new(u64::MAX, StartDelay::default()))
}

extern "C" fn watcher(_: *mut c_void) -> *mut c_void {
    scheduler().watch();
    ptr::null_mut()
}

extern "C" fn executor(_: *mut c_void) -> *mut c_void {
    scheduler().execute();
    ptr::null_mut()
}

impl Scheduler {
    fn new(depth: u64, delay: StartDelay) -> Scheduler {
        Scheduler {
            state: Mutex::default(),
            work: Condvar::new(),
            watching: Condvar::new(),
            start: Instant::now(),
            depth,
            delay: (delay.longest, delay.seed.unwrap_or_else(|| fastrand::u64(..))),
        }
    }

    /// The time by which an operation starts late. It depends on the place of the stream among all streams and of the operation in it, not
    /// on the time at which threads run.
    fn delay_of(&self, key: Key, number: u64) -> Option<Duration> {
        let (longest, seed) = self.delay;
        if longest.is_zero() {
            return None;
        }
        // Generators with neighbouring seeds begin with similar numbers.
        let mut place = DefaultHasher::new();
        (seed, key.generation, number).hash(&mut place);
        Some(longest.mul_f64(fastrand::Rng::with_seed(place.finish()).f64()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds since the driver started, never 0.
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    /// Opens a queue whose operations fail after a fault in `health`. Lower numbers have priority.
    pub(crate) fn open(&self, order: Order, priority: i32, health: Arc<Health>) -> Key {
        let mut state = self.lock();
        state.generation = state.generation.wrapping_add(1);
        let generation = state.generation;
        let queue = Queue {
            generation,
            order,
            priority,
            health,
            operations: VecDeque::new(),
            posted: 0,
            completed: 0,
            running: false,
            ready: false,
            blocked: false,
            waiters: Vec::new(),
            peers: Vec::new(),
            wake_at: u64::MAX,
            sleepers: Arc::default(),
            retired: false,
        };
        let index = match state.queues.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                state.queues.push(None);
                state.queues.len() - 1
            }
        };
        state.queues[index] = Some(queue);
        let key = Key { index: u32::try_from(index).unwrap_or(u32::MAX), generation };
        if let Order::Blocking(legacy) = order
            && let Some(legacy) = state.get(legacy)
        {
            legacy.peers.push(key);
        }
        key
    }

    /// Runs one operation in a queue of its own, which ends with it.
    pub(crate) fn submit_apart(&self, needs: Vec<Point>, work: QueuedWork, health: &Arc<Health>) -> Point {
        let queue = self.open(Order::NonBlocking, 0, Arc::clone(health));
        let point = self.submit_now(queue, needs, work);
        self.retire(queue);
        point
    }

    /// Changes the priority of a queue, from its next operation on.
    pub(crate) fn set_priority(&self, key: Key, priority: i32) {
        if let Some(queue) = self.lock().get(key) {
            queue.priority = priority;
        }
    }

    /// Lets the queue end when its work is done. No more work may be submitted to it.
    pub(crate) fn retire(&self, key: Key) {
        let mut state = self.lock();
        if let Some(queue) = state.get(key) {
            queue.retired = true;
        }
        state.remove_if_drained(key);
    }

    /// Adds an operation that needs the given points and those that the rules of default streams add. Waits first while the queue is
    /// full, so the caller must hold no lock that an operation takes.
    pub(crate) fn submit(&self, key: Key, needs: Vec<Point>, work: QueuedWork) -> Point {
        self.wait_for_room(key);
        self.submit_now(key, needs, work)
    }

    /// Waits while the queue is full, as a driver makes its caller wait.
    pub(crate) fn wait_for_room(&self, key: Key) {
        let first_free = self.lock().peek(key).and_then(|queue| (queue.posted + 1).checked_sub(self.depth));
        if let Some(number) = first_free {
            self.wait(Point { queue: key, number });
        }
    }

    /// Adds an operation, to a full queue as well.
    pub(crate) fn submit_now(&self, key: Key, needs: Vec<Point>, work: QueuedWork) -> Point {
        let mut state = self.lock();
        let point = state.push(key, needs, work);
        self.advance(&mut state, key);
        self.wake(state);
        point
    }

    /// Adds an operation and waits for it. Runs it on this thread if nothing must run before it.
    pub(crate) fn submit_and_wait(&self, key: Key, work: QueuedWork) {
        let mut state = self.lock();
        let point = state.push(key, Vec::new(), work);
        if state.take_if_next(point) {
            self.execute_head(state, key);
        } else {
            self.advance(&mut state, key);
            self.wake(state);
        }
        self.wait(point);
    }

    /// Returns the points of all work submitted to the queue so far; for the legacy queue, also those that it would wait for.
    pub(crate) fn tail(&self, key: Key) -> Vec<Point> {
        let state = self.lock();
        let mut points = state.order_needs(key);
        if let Some(queue) = state.peek(key) {
            points.push(Point { queue: key, number: queue.posted });
        }
        points.retain(|point| !state.is_done(*point));
        points
    }

    /// True if a point is done.
    pub(crate) fn is_done(&self, point: Point) -> bool {
        self.lock().is_done(point)
    }

    /// Sleeps until a point is done.
    pub(crate) fn wait(&self, point: Point) {
        let mut state = self.lock();
        while !state.is_done(point) {
            let Some(queue) = state.get(point.queue) else { return };
            queue.wake_at = queue.wake_at.min(point.number);
            let sleepers = Arc::clone(&queue.sleepers);
            state = sleepers.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Advances a queue, and those that wait for it, as far as possible without an executor.
    fn advance(&self, state: &mut State, key: Key) {
        let mut pending = vec![key];
        while let Some(key) = pending.pop() {
            while let Some(next) = state.next_need(key) {
                match next {
                    Next::Done => {}
                    Next::Blocked(point) => {
                        if let Some(other) = state.get(point.queue) {
                            other.waiters.push((point.number, key));
                        }
                        if let Some(queue) = state.get(key) {
                            queue.blocked = true;
                        }
                        break;
                    }
                    Next::Stamp(stamp) => {
                        if let Some(stamp) = stamp {
                            stamp.0.store(self.now(), Ordering::Release);
                        }
                        state.complete(key, &mut pending);
                    }
                    Next::Execute => {
                        if let Some(queue) = state.get(key) {
                            queue.ready = true;
                        }
                        state.ready.push_back(key);
                        state.fresh += 1;
                        break;
                    }
                    Next::Watch(condition) => {
                        if let Some(queue) = state.get(key) {
                            queue.blocked = true;
                            let health = Arc::clone(&queue.health);
                            state.watches.push(Watch { queue: key, condition, health });
                        }
                        self.watching.notify_one();
                        break;
                    }
                }
            }
            state.remove_if_drained(key);
        }
    }

    /// Wakes or starts executors for ready queues.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let fresh = std::mem::take(&mut state.fresh);
        let wake = fresh.min(state.idle);
        let missing = (fresh - wake).min(MAX_EXECUTORS - state.executors);
        state.idle -= wake;
        state.tokens += wake;
        state.executors += missing;
        let watcher_missing = !state.watched && !state.watches.is_empty();
        state.watched |= watcher_missing;
        drop(state);
        if watcher_missing && let Err(error) = threads::start(watcher) {
            log!("cannot start a thread: {error}");
            self.lock().watched = false;
        }
        for _ in 0..wake {
            self.work.notify_one();
        }
        for _ in 0..missing {
            if let Err(error) = threads::start(executor) {
                log!("cannot start a thread: {error}");
                self.lock().executors -= 1;
            }
        }
    }

    /// The loop of an executor.
    fn execute(&self) {
        let mut state = self.lock();
        loop {
            match state.take_ready() {
                Some(key) => {
                    self.execute_head(state, key);
                    state = self.lock();
                }
                None => {
                    state.idle += 1;
                    while state.tokens == 0 {
                        state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                    state.tokens -= 1;
                }
            }
        }
    }

    /// The loop of the thread that looks at conditions. None is looked at under the lock.
    fn watch(&self) {
        let mut state = self.lock();
        let mut looks = 0_u32;
        loop {
            if state.watches.is_empty() {
                state = self.watching.wait(state).unwrap_or_else(PoisonError::into_inner);
                looks = 0;
                continue;
            }
            let watches = state.watches.clone();
            drop(state);
            let over: Vec<Key> =
                watches.iter().filter(|watch| watch.is_over()).map(|watch| watch.queue).collect();
            state = self.lock();
            let known = state.watches.len();
            if over.is_empty() {
                // Seldom when a wait is long. A new wait ends the nap.
                looks = looks.saturating_add(1);
                let nap = Duration::from_micros(looks.into()).min(LONGEST_NAP);
                state = self.watching.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0;
                looks = if state.watches.len() == known { looks } else { 0 };
                continue;
            }
            looks = 0;
            let mut pending = Vec::new();
            for key in over {
                state.watches.retain(|watch| watch.queue != key);
                if let Some(queue) = state.get(key) {
                    queue.blocked = false;
                    queue.operations.pop_front();
                    state.complete(key, &mut pending);
                    pending.push(key);
                }
            }
            for key in pending {
                self.advance(&mut state, key);
            }
            self.wake(state);
            state = self.lock();
        }
    }

    /// Executes the head of a queue that was marked as running.
    fn execute_head(&self, mut state: MutexGuard<'_, State>, key: Key) {
        let Some((operation, number, health)) = state.pop_running(key) else { return };
        drop(state);
        if let Some(delay) = self.delay_of(key, number) {
            std::thread::sleep(delay);
        }
        match operation.work {
            // Its condition is looked at elsewhere, so it is never executed.
            QueuedWork::Marker | QueuedWork::Until(_) => {}
            QueuedWork::Stamp(stamp) => stamp.0.store(self.now(), Ordering::Release),
            QueuedWork::Task(task) => {
                if health.is_sound() {
                    // A panic in the driver must not end the program: it becomes an error of its context.
                    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task));
                    match outcome {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => health.poison(error),
                        Err(_) => health.poison(Error::UNKNOWN),
                    }
                }
            }
            QueuedWork::Callback(call) => {
                let code = crate::error::code(health.check());
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(code))).is_err() {
                    health.poison(Error::UNKNOWN);
                }
            }
        }
        let mut state = self.lock();
        let mut pending = Vec::new();
        if let Some(queue) = state.get(key) {
            queue.running = false;
        }
        state.complete(key, &mut pending);
        pending.push(key);
        for key in pending {
            self.advance(&mut state, key);
        }
        self.wake(state);
    }
}

enum Next {
    /// A need of the head is done and was removed.
    Done,
    Blocked(Point),
    Stamp(Option<Arc<Stamp>>),
    Execute,
    Watch(Condition),
}

/// Longest time between two looks at the conditions.
const LONGEST_NAP: Duration = Duration::from_micros(500);

impl State {
    fn peek(&self, key: Key) -> Option<&Queue> {
        self.queues.get(key.index as usize)?.as_ref().filter(|queue| queue.generation == key.generation)
    }

    fn get(&mut self, key: Key) -> Option<&mut Queue> {
        self.queues.get_mut(key.index as usize)?.as_mut().filter(|queue| queue.generation == key.generation)
    }

    fn is_done(&self, point: Point) -> bool {
        self.peek(point.queue).is_none_or(|queue| queue.completed >= point.number)
    }

    /// Returns the points that the next operation of a queue needs by the rules of default streams.
    fn order_needs(&self, key: Key) -> Vec<Point> {
        let behind = |other: Key| {
            let queue = self.peek(other)?;
            (queue.posted > queue.completed).then_some(Point { queue: other, number: queue.posted })
        };
        match self.peek(key).map(|queue| (queue.order, queue)) {
            Some((Order::Legacy, queue)) => queue.peers.iter().filter_map(|peer| behind(*peer)).collect(),
            Some((Order::Blocking(legacy), _)) => behind(legacy).into_iter().collect(),
            _ => Vec::new(),
        }
    }

    fn push(&mut self, key: Key, mut needs: Vec<Point>, work: QueuedWork) -> Point {
        needs.extend(self.order_needs(key));
        let Some(queue) = self.get(key) else { return Point { queue: key, number: 0 } };
        queue.posted += 1;
        queue.operations.push_back(Operation { needs, work });
        Point { queue: key, number: queue.posted }
    }

    /// If the operation at this point can run at once, marks its queue as running and returns true.
    fn take_if_next(&mut self, point: Point) -> bool {
        let Some(queue) = self.peek(point.queue) else { return false };
        let free = !(queue.running || queue.ready || queue.blocked) && queue.completed + 1 == point.number;
        let met =
            queue.operations.front().is_some_and(|head| head.needs.iter().all(|need| self.is_done(*need)));
        if free
            && met
            && let Some(queue) = self.get(point.queue)
        {
            queue.running = true;
            return true;
        }
        false
    }

    /// Returns the next step for a queue's head; `None` if there is none now.
    fn next_need(&mut self, key: Key) -> Option<Next> {
        let queue = self.peek(key)?;
        if queue.running || queue.ready || queue.blocked {
            return None;
        }
        let head = queue.operations.front()?;
        if let Some(need) = head.needs.last().copied() {
            if !self.is_done(need) {
                return Some(Next::Blocked(need));
            }
            self.get(key)?.operations.front_mut()?.needs.pop();
            return Some(Next::Done);
        }
        Some(match &head.work {
            QueuedWork::Marker => {
                self.get(key)?.operations.pop_front();
                Next::Stamp(None)
            }
            QueuedWork::Stamp(stamp) => {
                let stamp = Arc::clone(stamp);
                self.get(key)?.operations.pop_front();
                Next::Stamp(Some(stamp))
            }
            QueuedWork::Task(_) | QueuedWork::Callback(_) => Next::Execute,
            QueuedWork::Until(condition) => Next::Watch(Arc::clone(condition)),
        })
    }

    /// Counts an operation as done: wakes threads, and collects the queues to advance.
    fn complete(&mut self, key: Key, pending: &mut Vec<Key>) {
        let Some(queue) = self.get(key) else { return };
        queue.completed += 1;
        let completed = queue.completed;
        if completed >= queue.wake_at {
            queue.wake_at = u64::MAX; // Threads that wait for a later number set it again.
            queue.sleepers.notify_all();
        }
        let mut awaited = Vec::new();
        queue.waiters.retain(|(number, waiter)| {
            let keep = *number > completed;
            if !keep {
                awaited.push(*waiter);
            }
            keep
        });
        for waiter in awaited {
            if let Some(other) = self.get(waiter) {
                other.blocked = false;
                pending.push(waiter);
            }
        }
    }

    /// Takes the ready queue of the highest priority, in the order of arrival, and marks it as running.
    fn take_ready(&mut self) -> Option<Key> {
        let priority = |key: &Key| self.peek(*key).map_or(0, |queue| queue.priority);
        let mut best: Option<(usize, i32)> = None;
        for (place, key) in self.ready.iter().enumerate() {
            let priority = priority(key);
            if best.is_none_or(|(_, other)| priority < other) {
                best = Some((place, priority));
            }
        }
        let key = self.ready.remove(best?.0)?;
        let queue = self.get(key)?;
        queue.ready = false;
        queue.running = true;
        Some(key)
    }

    /// Takes the head of a queue, with its number.
    fn pop_running(&mut self, key: Key) -> Option<(Operation, u64, Arc<Health>)> {
        let queue = self.get(key)?;
        Some((queue.operations.pop_front()?, queue.completed + 1, Arc::clone(&queue.health)))
    }

    fn remove_if_drained(&mut self, key: Key) {
        let Some(queue) = self.peek(key) else { return };
        if !queue.retired || queue.posted > queue.completed {
            return;
        }
        if let Order::Blocking(legacy) = queue.order
            && let Some(legacy) = self.get(legacy)
        {
            legacy.peers.retain(|peer| *peer != key);
        }
        self.queues[key.index as usize] = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn submission_to_a_full_queue_waits_until_its_head_is_done() {
        let scheduler = Scheduler::new(2, StartDelay::default());
        let open = || scheduler.open(Order::NonBlocking, 0, Arc::default());
        let (held, full) = (open(), open());
        // Its first operation comes later.
        let need = Point { queue: held, number: 1 };
        for _ in 0..2 {
            scheduler.submit(full, vec![need], QueuedWork::Marker);
        }
        std::thread::scope(|scope| {
            let (sender, submitted) = mpsc::channel();
            let scheduler = &scheduler;
            scope.spawn(move || sender.send(scheduler.submit(full, Vec::new(), QueuedWork::Marker).number));
            assert!(
                submitted.recv_timeout(Duration::from_millis(100)).is_err(),
                "the third one does not wait"
            );
            scheduler.submit_and_wait(held, QueuedWork::Task(Box::new(|| Ok(()))));
            assert_eq!(submitted.recv_timeout(Duration::from_secs(60)), Ok(3));
        });
    }

    fn late(seed: Option<u64>) -> Scheduler {
        Scheduler::new(u64::MAX, StartDelay { longest: Duration::from_millis(2), seed })
    }

    #[test]
    fn operations_of_two_runs_with_one_seed_start_late_by_the_same_times() {
        let times = |seed| {
            let scheduler = late(seed);
            let open = || scheduler.open(Order::NonBlocking, 0, Arc::default());
            let places =
                [open(), open()].into_iter().flat_map(|key| (1..40).map(move |number| (key, number)));
            places.map(|(key, number)| scheduler.delay_of(key, number)).collect::<Vec<_>>()
        };
        let mut first = times(Some(7));
        assert_eq!(first, times(Some(7)));
        assert_ne!(first, times(Some(8)));
        assert_ne!(times(None), times(None));
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 2 * 39, "each operation has its own");
    }

    #[test]
    fn operations_start_late_by_half_the_longest_delay_on_average() {
        let scheduler = late(None);
        let queue = scheduler.open(Order::NonBlocking, 0, Arc::default());
        let start = Instant::now();
        for _ in 0..64 {
            scheduler.submit_and_wait(queue, QueuedWork::Task(Box::new(|| Ok(()))));
        }
        // The average of the sum is 64 ms, and its standard deviation 5 ms.
        assert!(start.elapsed() > Duration::from_millis(16));
    }
}
