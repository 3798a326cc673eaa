//! Events: each is a point in a queue, captured when the event is recorded, or a recording in words that processes share.

use std::sync::{Arc, Mutex};

use crate::context::{Core, current_core};
use crate::error::{Error, Result};
use crate::handles::{Kind, Registry};
use crate::lock::lock;
use crate::memory::Name;
use crate::queues::Joint;
use crate::schedule::{Point, QueuedWork, Stamp, scheduler};
use crate::shared_event::SharedWords;
use crate::stream::StreamTarget;

pub(crate) static EVENTS: Registry<Event> = Registry::new(Kind::Event, Error::INVALID_HANDLE);

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

/// An event. It counts as complete until it is recorded.
pub(crate) struct Event {
    core: Arc<Core>,
    flags: u32,
    recorded: Mutex<Recorded>,
}

/// The latest recording.
#[derive(Clone)]
enum Recorded {
    Never,
    Own {
        point: Point,
        stamp: Arc<Stamp>,
    },
    /// Other processes record the event, too.
    Shared(Arc<SharedWords>),
}

impl Recorded {
    fn is_reached(&self) -> bool {
        match self {
            Recorded::Never => true,
            Recorded::Own { stamp, .. } => stamp.nanoseconds().is_some(),
            Recorded::Shared(words) => words.is_reached(words.latest()),
        }
    }
}

/// `cuEventCreate`.
pub(crate) fn create(flags: u32) -> Result<u64> {
    if flags & !(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) != 0 {
        return Err(Error::INVALID_VALUE);
    }
    // An event of several processes must not measure time.
    if flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
        return Err(Error::INVALID_VALUE);
    }
    insert(current_core()?, flags, Recorded::Never)
}

fn insert(core: Arc<Core>, flags: u32, recorded: Recorded) -> Result<u64> {
    let (handle, event) = EVENTS.insert_with(|_| Event { core, flags, recorded: Mutex::new(recorded) })?;
    lock(&event.core.events).push(handle);
    Ok(handle)
}

/// `cuIpcGetEventHandle`: shares an event with other processes, from now on, and returns its name.
pub(crate) fn share(handle: u64) -> Result<Name> {
    let event = EVENTS.get(handle)?;
    if event.flags & INTERPROCESS == 0 {
        return Err(Error::INVALID_HANDLE);
    }
    let mut recorded = lock(&event.recorded);
    if let Recorded::Shared(words) = &*recorded {
        return words.name();
    }
    let words = SharedWords::create(event.core.gpu)?;
    let name = words.name()?;
    if let Recorded::Own { point, .. } = &*recorded {
        let number = words.begin();
        let work = reaching(Arc::clone(&words), number);
        scheduler().submit_apart(vec![*point], work, &event.core.health);
    }
    *recorded = Recorded::Shared(words);
    Ok(name)
}

/// `cuIpcOpenEventHandle`: an event of another process.
pub(crate) fn open_shared(core: Arc<Core>, name: Name) -> Result<u64> {
    let words = SharedWords::open(core.gpu, name)?;
    insert(core, INTERPROCESS | DISABLE_TIMING, Recorded::Shared(words))
}

/// Work that reaches a recording. It is done also in a context that has failed, so that no other process waits for it.
fn reaching(words: Arc<SharedWords>, number: u64) -> QueuedWork {
    QueuedWork::Callback(Box::new(move |_| words.reach(number)))
}

/// Waits until a recording is reached.
fn until(words: &Arc<SharedWords>, number: u64) -> QueuedWork {
    let words = Arc::clone(words);
    QueuedWork::Until(Arc::new(move || Ok(words.is_reached(number))))
}

/// Begins a recording of shared words by work that `submit` queues.
fn record_shared(words: &Arc<SharedWords>, mut submit: impl FnMut(QueuedWork)) {
    let number = words.begin();
    if let Some(before) = SharedWords::before(number)
        && !words.is_reached(before)
    {
        submit(until(words, before));
    }
    submit(reaching(Arc::clone(words), number));
}

/// `cuEventDestroy`: waits for the event continue until its point.
pub(crate) fn destroy(handle: u64) -> Result {
    let event = EVENTS.remove(handle)?;
    lock(&event.core.events).retain(|other| *other != handle);
    Ok(())
}

/// An event of a context.
pub(crate) fn of_context(handle: u64, core: &Core) -> Result<Arc<Event>> {
    let event = EVENTS.get(handle)?;
    if event.core.id == core.id { Ok(event) } else { Err(Error::INVALID_HANDLE) }
}

/// An event that may be recorded in a stream: one of its context.
pub(crate) fn find(handle: u64, target: &StreamTarget) -> Result<Arc<Event>> {
    of_context(handle, &target.core)
}

/// An event that a launch may record: none of several processes.
pub(crate) fn find_for_launch(handle: u64, target: &StreamTarget) -> Result<Arc<Event>> {
    let event = find(handle, target)?;
    if event.is_of_several_processes() { Err(Error::NOT_SUPPORTED) } else { Ok(event) }
}

impl Event {
    /// True for an event that processes may share.
    pub(crate) fn is_of_several_processes(&self) -> bool {
        self.flags & INTERPROCESS != 0
    }

    /// Records the event in a stream.
    pub(crate) fn record(&self, target: &StreamTarget) {
        // A query of the event must not wait, too.
        scheduler().wait_for_room(target.queue);
        // Holds the event's lock, so that the last record in the queue is also the stored one.
        let mut recorded = lock(&self.recorded);
        let submit = |work| scheduler().submit_now(target.queue, Vec::new(), work);
        if let Recorded::Shared(words) = &*recorded {
            return record_shared(words, |work| _ = submit(work));
        }
        let stamp = Arc::new(Stamp::default());
        let point = submit(QueuedWork::Stamp(Arc::clone(&stamp)));
        *recorded = Recorded::Own { point, stamp };
    }

    /// Records the event behind all work that some queues of its context have.
    pub(crate) fn record_behind(&self, queues: &impl Joint) {
        queues.wait_for_room();
        // The lock as for `record`.
        let mut recorded = lock(&self.recorded);
        if let Recorded::Shared(words) = &*recorded {
            return record_shared(words, |work| _ = queues.submit_behind_all(work));
        }
        let stamp = Arc::new(Stamp::default());
        let point = queues.submit_behind_all(QueuedWork::Stamp(Arc::clone(&stamp)));
        *recorded = Recorded::Own { point, stamp };
    }

    /// Makes all later work of some queues wait for the last record before the call.
    pub(crate) fn hold(&self, queues: &impl Joint) {
        let recorded = lock(&self.recorded).clone();
        match recorded {
            recorded if recorded.is_reached() => {}
            Recorded::Never => {}
            Recorded::Own { point, .. } => queues.wait(point),
            Recorded::Shared(words) => {
                let work = until(&words, words.latest());
                queues.wait(scheduler().submit_apart(Vec::new(), work, queues.health()));
            }
        }
    }

    /// Makes a stream wait for the last record before the call.
    pub(crate) fn wait(&self, target: &StreamTarget) {
        let recorded = lock(&self.recorded).clone();
        match recorded {
            recorded if recorded.is_reached() => {}
            Recorded::Never => {}
            Recorded::Own { point, .. } => {
                scheduler().submit(target.queue, vec![point], QueuedWork::Marker);
            }
            Recorded::Shared(words) => {
                let work = until(&words, words.latest());
                scheduler().submit(target.queue, Vec::new(), work);
            }
        }
    }
}

/// `cuEventQuery`.
pub(crate) fn query(handle: u64) -> Result {
    let event = EVENTS.get(handle)?;
    let recorded = lock(&event.recorded).clone();
    let passed = recorded.is_reached();
    // Checked after the stamp: a fault of earlier work is set before the stamp.
    event.core.health.check()?;
    if passed { Ok(()) } else { Err(Error::NOT_READY) }
}

/// `cuEventSynchronize`.
pub(crate) fn synchronize(handle: u64) -> Result {
    let event = EVENTS.get(handle)?;
    let recorded = lock(&event.recorded).clone();
    match recorded {
        Recorded::Never => {}
        Recorded::Own { point, .. } => scheduler().wait(point),
        Recorded::Shared(words) => {
            let work = until(&words, words.latest());
            scheduler().wait(scheduler().submit_apart(Vec::new(), work, &event.core.health));
        }
    }
    event.core.gpu.pools.trim();
    event.core.flush_printed();
    event.core.health.check()
}

/// `cuEventElapsedTime` in milliseconds.
pub(crate) fn elapsed(start: u64, end: u64) -> Result<f32> {
    let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
    if start.core.id != end.core.id || (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(Error::INVALID_HANDLE);
    }
    let times = [&start, &end].map(|event| lock(&event.recorded).clone());
    let [Recorded::Own { stamp: first, .. }, Recorded::Own { stamp: last, .. }] = times else {
        start.core.health.check()?;
        return Err(Error::INVALID_HANDLE);
    };
    let stamps = [first, last].map(|stamp| stamp.nanoseconds());
    start.core.health.check()?;
    let [Some(start), Some(end)] = stamps else { return Err(Error::NOT_READY) };
    let span = i128::from(end) - i128::from(start);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "the interface is a float"
    )]
    Ok((span as f64 / 1e6) as f32)
}
