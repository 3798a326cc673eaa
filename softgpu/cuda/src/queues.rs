//! The queues of a context: those of its default streams, of which each thread may have one, and those of the streams that a
//! program created.
//!
//! Streams open and close their queues here; calls that wait for a context or for a whole device drain them. The scheduler owns
//! the work in a queue; this file owns the list of a context's queues, and knows neither the context nor a stream.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::health::Health;
use crate::lifetime;
use crate::lock::lock;
use crate::schedule::{Key, Order, Point, QueuedWork, scheduler};

/// The queues of one context.
pub(crate) struct Queues {
    health: Arc<Health>,
    /// The queue of the legacy default stream.
    pub(crate) legacy: Key,
    others: Mutex<Others>,
    joined: Joined,
}

/// The state of queues that are recorded and held together.
#[derive(Default)]
pub(crate) struct Joined {
    /// The queue in which events of them all are recorded, once there is one.
    records: OnceLock<Key>,
    /// The points for which all of their work waits, that of later queues included.
    gates: Mutex<Vec<Point>>,
}

/// Queues behind all of which an event can be recorded, and all of which can wait for a point.
pub(crate) trait Joint {
    fn joined(&self) -> &Joined;
    fn health(&self) -> &Arc<Health>;
    fn all(&self) -> Vec<Key>;

    fn records(&self) -> Key {
        let open = || scheduler().open(Order::NonBlocking, 0, Arc::clone(self.health()));
        *self.joined().records.get_or_init(open)
    }

    /// Waits while the queue of [`Joint::submit_behind_all`] is full.
    fn wait_for_room(&self) {
        scheduler().wait_for_room(self.records());
    }

    /// Does work when all that the queues have now is done. The work itself is part of none of their streams.
    fn submit_behind_all(&self, work: QueuedWork) -> Point {
        let scheduler = scheduler();
        let records = self.records();
        let needs = self.all().into_iter().flat_map(|queue| scheduler.tail(queue)).collect();
        scheduler.submit_now(records, needs, work)
    }

    /// Makes all later work of the queues wait for a point.
    fn wait(&self, point: Point) {
        // First for later queues, then for those that there are.
        let mut gates = lock(&self.joined().gates);
        gates.retain(|gate| !scheduler().is_done(*gate));
        gates.push(point);
        drop(gates);
        for queue in self.all() {
            scheduler().submit(queue, vec![point], QueuedWork::Marker);
        }
    }

    /// Makes a new queue wait as the others do.
    fn put_behind_gates(&self, queue: Key) {
        let mut gates = lock(&self.joined().gates);
        gates.retain(|gate| !scheduler().is_done(*gate));
        if !gates.is_empty() {
            scheduler().submit_now(queue, gates.clone(), QueuedWork::Marker);
        }
    }

    /// Waits for all work submitted so far.
    fn drain(&self) {
        let scheduler = scheduler();
        for queue in self.all() {
            for point in scheduler.tail(queue) {
                scheduler.wait(point);
            }
        }
    }

    /// No more events are recorded.
    fn retire_records(&self) {
        if let Some(records) = self.joined().records.get() {
            scheduler().retire(*records);
        }
    }
}

impl Joint for Queues {
    fn joined(&self) -> &Joined {
        &self.joined
    }

    fn health(&self) -> &Arc<Health> {
        &self.health
    }

    fn all(&self) -> Vec<Key> {
        let mut queues = vec![self.legacy];
        let others = lock(&self.others);
        queues.extend(others.threads.values());
        queues.extend(&others.streams);
        queues.extend(&others.ended);
        queues
    }
}

/// Queues of a context that belong together: those of a green context.
pub(crate) struct PartQueues {
    whole: Arc<Queues>,
    joined: Joined,
    /// Queues with streams, and those of destroyed streams that still have work.
    queues: Mutex<(Vec<Key>, Vec<Key>)>,
}

impl PartQueues {
    pub(crate) fn new(whole: Arc<Queues>) -> PartQueues {
        PartQueues { whole, joined: Joined::default(), queues: Mutex::default() }
    }

    /// Opens a queue, which never waits for the legacy stream.
    pub(crate) fn open(&self, priority: i32) -> Key {
        let queue = self.whole.open(Order::NonBlocking, priority);
        lock(&self.queues).0.push(queue);
        self.put_behind_gates(queue);
        queue
    }

    /// Closes the queue of a destroyed stream, as [`Queues::let_go`] does.
    pub(crate) fn let_go(&self, queue: Key) {
        self.whole.let_go(queue);
        let (streams, ended) = &mut *lock(&self.queues);
        streams.retain(|other| *other != queue);
        ended.push(queue);
        ended.retain(|queue| !scheduler().tail(*queue).is_empty());
    }
}

impl Joint for PartQueues {
    fn joined(&self) -> &Joined {
        &self.joined
    }

    fn health(&self) -> &Arc<Health> {
        &self.whole.health
    }

    fn all(&self) -> Vec<Key> {
        let (streams, ended) = &*lock(&self.queues);
        [streams.as_slice(), ended].concat()
    }
}

#[derive(Default)]
struct Others {
    /// Default streams of threads.
    threads: HashMap<u64, Key>,
    /// Queues of streams that the program created.
    streams: Vec<Key>,
    /// Queues of destroyed streams that still have work.
    ended: Vec<Key>,
}

impl Queues {
    /// Creates the queues of a new context; after a fault in `health` their work fails.
    pub(crate) fn new(health: Arc<Health>) -> Queues {
        let legacy = scheduler().open(Order::Legacy, 0, Arc::clone(&health));
        Queues { health, legacy, others: Mutex::default(), joined: Joined::default() }
    }

    /// Returns the queue of the calling thread's own default stream.
    pub(crate) fn of_thread(self: &Arc<Self>) -> Key {
        let thread = thread_number();
        *lock(&self.others).threads.entry(thread).or_insert_with(|| {
            remember(self);
            let queue = scheduler().open(Order::Blocking(self.legacy), 0, Arc::clone(&self.health));
            self.put_behind_gates(queue);
            queue
        })
    }

    /// Opens a queue for a stream that the program creates.
    pub(crate) fn open(&self, order: Order, priority: i32) -> Key {
        let queue = scheduler().open(order, priority, Arc::clone(&self.health));
        lock(&self.others).streams.push(queue);
        self.put_behind_gates(queue);
        queue
    }

    /// Closes the queue of a destroyed stream. It ends with its work, for which the context still waits.
    pub(crate) fn let_go(&self, queue: Key) {
        let scheduler = scheduler();
        scheduler.retire(queue);
        let mut others = lock(&self.others);
        others.streams.retain(|other| *other != queue);
        others.ended.push(queue);
        others.ended.retain(|queue| !scheduler.tail(*queue).is_empty());
    }

    /// The context has ended: its queues get no more work.
    pub(crate) fn retire(&self) {
        let scheduler = scheduler();
        let others = std::mem::take(&mut *lock(&self.others));
        for queue in others.streams.into_iter().chain(others.threads.into_values()) {
            scheduler.retire(queue);
        }
        self.retire_records();
        scheduler.retire(self.legacy);
    }

    /// Closes the queue of a thread that has ended.
    fn end_thread(&self, thread: u64) {
        let queue = lock(&self.others).threads.remove(&thread);
        if let Some(queue) = queue {
            self.let_go(queue);
        }
    }
}

thread_local! {
    /// 0 until its first use. Has no destructor, so it can be read at any time.
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

/// The contexts in which a thread has a default stream. The streams end with the thread.
struct OwnQueues(RefCell<Vec<Weak<Queues>>>);

impl Drop for OwnQueues {
    fn drop(&mut self) {
        if lifetime::check().is_err() {
            return; // A forked child, or the process exits: the parent's state must not be touched.
        }
        for queues in self.0.borrow().iter().filter_map(Weak::upgrade) {
            queues.end_thread(thread_number());
        }
    }
}

fn remember(queues: &Arc<Queues>) {
    // While the thread ends, the queue stays until its context ends.
    let _ = OWN_QUEUES.try_with(|own| own.0.borrow_mut().push(Arc::downgrade(queues)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_of_a_context_that_are_over_take_no_memory() {
        let queues = Queues::new(Arc::default());
        for _ in 0..1000 {
            let point = queues.submit_behind_all(QueuedWork::Marker);
            queues.wait(point);
            scheduler().wait(point);
        }
        assert_eq!(lock(&queues.joined.gates).len(), 1, "the last one");
        queues.retire();
    }
}
