//! The submit queue: the permit, and the work that waits for it.
//!
//! While the permit is open, its window not full and no work waits, the dispatcher owns the [`Submitter`] and submits at once,
//! without a lock. Otherwise it lends the submitter to the submitter thread; work then queues up and the submitter thread
//! submits it in order, each piece when the permit admits it. Once the queue is empty the submitter goes back to the
//! dispatcher. So the dispatcher waits for no permit, and the order is the same whichever thread submits.

use crate::{
    current::Current,
    helper::{
        Helper,
        jobs::{MemoryJob, ModuleJob},
    },
    memory::memory_source::MemorySource,
    session::{ReplyTo, Session},
    submit::{
        Operation, Payload, Submitter, Work,
        local::{Local, LocalMemory},
        time::{AdmissionWait, Time},
    },
};
use core::time::Duration;
use sluice_driver::{Code, Driver, Handle, LaunchAttribute, code};
use sluice_messages::custody::Growth;
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// An item that must not overtake earlier posted work.
#[derive(Debug)]
pub(crate) enum QueueItem {
    /// Work on a stream, with its payload.
    Work(Work, Box<[LaunchAttribute]>, Box<[u8]>),
    /// Work that may make the driver take memory for itself. Only the submitter thread submits it, because that may wait.
    Growing(Work, Box<[LaunchAttribute]>, Box<[u8]>, Box<[Local]>),
    /// Destroys a stream.
    StreamDestroy(ReplyTo, Handle),
    /// Marks the work of a stream slot: the guest asks for its end.
    Mark(u32),
    /// Destroys an event.
    EventDestroy(ReplyTo, Handle),
    /// A job for the memory helper, announced to it.
    Memory(MemoryJob),
    /// A job for the module helper.
    Module(Box<ModuleJob>),
}

impl QueueItem {
    /// The stream slot of an item of a stream.
    const fn slot(&self) -> Option<u32> {
        match self {
            QueueItem::Work(work, ..) | QueueItem::Growing(work, ..) => Some(work.target.slot),
            QueueItem::Mark(slot) => Some(*slot),
            _ => None,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            QueueItem::Work(_, attributes, parameters) => {
                size_of_val(&**attributes) + parameters.len() + size_of::<QueueItem>()
            }
            QueueItem::Growing(_, attributes, parameters, local) => {
                size_of_val(&**attributes) + parameters.len() + size_of_val(&**local) + size_of::<QueueItem>()
            }
            _ => size_of::<QueueItem>(),
        }
    }
}

/// Limit on queued bytes. At it the dispatcher reads no further, and the guest's ring fills up.
const WAITING_BYTES: usize = 16 << 20;

#[derive(Debug, Default)]
struct Waiting {
    items: VecDeque<QueueItem>,
    bytes: usize,
    /// Here while the submitter thread may use it, and until the dispatcher takes it back.
    submitter: Option<Box<Submitter>>,
    /// The submitter thread holds the submitter.
    submitting: bool,
    /// True if the queue has items of more than one stream.
    mixed: bool,
}

impl Waiting {
    /// The submitter, if no work is queued and the submitter thread neither holds it nor needs it.
    fn hand_back(&mut self) -> Option<Box<Submitter>> {
        let done = self.items.is_empty() && !self.submitting;
        if done { self.submitter.take_if(|submitter| !submitter.is_stuck()) } else { None }
    }
}

/// The queue between dispatcher and driver.
#[derive(Debug)]
pub(crate) struct SubmitQueue {
    time: Arc<Time>,
    waiting: Mutex<Waiting>,
    changed: Condvar,
    pub(crate) local: LocalMemory,
}

impl SubmitQueue {
    pub(crate) fn new(time: Arc<Time>) -> SubmitQueue {
        SubmitQueue {
            time,
            waiting: Mutex::new(Waiting::default()),
            changed: Condvar::new(),
            local: LocalMemory::default(),
        }
    }

    /// The devices' time accounting.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn time(&self) -> &Time {
        &self.time
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an item, together with the submitter if the dispatcher has it. Waits only if too much is queued.
    #[cold]
    pub(crate) fn queue(&self, submitter: &mut Option<Box<Submitter>>, item: QueueItem) {
        let mut waiting = self.lock();
        if let Some(lent) = submitter.take() {
            waiting.submitter = Some(lent);
        }
        while waiting.bytes > WAITING_BYTES {
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        waiting.bytes += item.bytes();
        waiting.mixed |= waiting.items.back().is_some_and(|last| last.slot() != item.slot());
        waiting.items.push_back(item);
        self.changed.notify_all();
    }

    /// Lends the submitter to the submitter thread, which may wait for work without a marker.
    #[cold]
    pub(crate) fn lend(&self, submitter: &mut Option<Box<Submitter>>) {
        self.lock().submitter = submitter.take();
        self.changed.notify_all();
    }

    /// The submitter, if the submitter thread no longer uses it.
    #[cold]
    pub(crate) fn take_back(&self) -> Option<Box<Submitter>> {
        self.lock().hand_back()
    }

    /// As [`SubmitQueue::take_back`], but waits up to `limit` for the submitter thread to finish, because its last work can be
    /// seen to end a moment before it releases the submitter. Does not wait for queued work.
    pub(crate) fn take_back_soon(&self, limit: Duration) -> Option<Box<Submitter>> {
        let waiting = self.lock();
        let just_submitting = |waiting: &mut Waiting| waiting.submitting && waiting.items.is_empty();
        let (mut waiting, _) = self
            .changed
            .wait_timeout_while(waiting, limit, just_submitting)
            .unwrap_or_else(PoisonError::into_inner);
        waiting.hand_back()
    }

    /// The submitter thread.
    pub(crate) fn submit_queued(
        &self,
        driver: &Driver,
        session: &Session,
        helper: &Helper,
        memory_source: &MemorySource,
    ) {
        let (mut current, mut wait) = (Current::default(), AdmissionWait::default());
        let mut waiting = self.lock();
        loop {
            if let Some(mut submitter) = waiting.submitter.take_if(|submitter| submitter.is_stuck()) {
                waiting.submitting = true;
                drop(waiting);
                submitter.settle(&mut current);
                waiting = self.lock();
                waiting.submitting = false;
                waiting.submitter = Some(submitter);
                self.changed.notify_all();
            }
            if waiting.items.is_empty() || waiting.submitter.is_none() {
                waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let mixed = waiting.mixed;
            let Waiting { items, submitter, .. } = &mut *waiting;
            if let Some(QueueItem::Work(work, ..) | QueueItem::Growing(work, ..)) = items.front()
                && let Some(submitter) = submitter
                && !submitter.admits(work)
            {
                let device = work.target.device;
                // The submitter thread waits for the end of the work in flight, and nothing else would mark that work.
                submitter.mark(&mut current);
                submitter.announce();
                drop(waiting);
                let admitted = self.time.wait(device, mixed, &mut wait);
                waiting = self.lock();
                if !admitted {
                    continue;
                }
            }
            wait = AdmissionWait::default();
            let (item, submitter) = (waiting.items.pop_front(), waiting.submitter.take());
            let (Some(item), Some(mut submitter)) = (item, submitter) else { continue };
            waiting.bytes -= item.bytes();
            waiting.submitting = true;
            let last = waiting.items.is_empty();
            if last {
                waiting.mixed = false;
                self.time.rest();
            }
            drop(waiting);
            match item {
                QueueItem::Growing(work, attributes, parameters, local) => {
                    let payload = Payload { attributes: &attributes, parameters: &parameters };
                    let result = self.grow(session, memory_source, &work, &local, |operation| {
                        submitter.submit(&mut current, &Work { operation, ..work }, payload)
                    });
                    session.conclude_work(work.reply, result);
                }
                item => perform(item, &mut submitter, &mut current, driver, session, helper),
            }
            if last {
                submitter.mark(&mut current);
                submitter.announce();
            }
            waiting = self.lock();
            waiting.submitting = false;
            waiting.submitter = Some(submitter);
            self.changed.notify_all();
        }
    }
}

impl SubmitQueue {
    /// Submits work with a grant of each device on which the driver may take local memory. Refused work keeps its place in its
    /// stream.
    fn grow(
        &self,
        session: &Session,
        memory_source: &MemorySource,
        work: &Work,
        local: &[Local],
        mut submit: impl FnMut(Operation) -> Result<(), Code>,
    ) -> Result<(), Code> {
        let mut needed: Vec<Local> =
            local.iter().filter(|local| !self.local.covers(local.context, local.each)).copied().collect();
        // One grant for each device: an arbiter gives a worker few at a time.
        needed.sort_unstable_by_key(|local| local.device);
        let grants = |again: bool| {
            let grant = |of_device: &[Local]| {
                let device = of_device.first().map_or(0, |local| local.device);
                let bytes = of_device.iter().fold(0_u64, |sum, local| sum.saturating_add(local.bytes));
                if again {
                    memory_source.ask_growth(device, Growth::Launch, bytes)
                } else {
                    memory_source.grow(device, Growth::Launch, bytes)
                }
            };
            let of_devices = needed.chunk_by(|one, next| one.device == next.device);
            of_devices.map(|of_device| Ok((grant(of_device)?, of_device))).collect::<Result<Vec<_>, Code>>()
        };
        if needed.is_empty() {
            return submit(work.operation);
        }
        let mut granted = match grants(false) {
            Ok(granted) => granted,
            Err(refused) => {
                session.work_failed(work.reply, refused);
                return submit(Operation::Nothing).and(Err(refused));
            }
        };
        match submit(work.operation) {
            // The memory of the margin may have been taken in a sweep.
            Err(code::OUT_OF_MEMORY) => {
                drop(granted);
                granted = match grants(true) {
                    Ok(granted) => granted,
                    Err(refused) => return submit(Operation::Nothing).and(Err(refused)),
                };
                submit(work.operation)?;
            }
            submitted => submitted?,
        }
        for (grant, of_device) in granted {
            if let Some(grant) = grant {
                grant.taken_in(of_device.iter().map(|local| (local.context, local.bytes)));
            }
            of_device.iter().for_each(|local| self.local.note(local.context, local.each));
        }
        Ok(())
    }
}

/// Executes an item.
pub(crate) fn perform(
    item: QueueItem,
    submitter: &mut Submitter,
    current: &mut Current,
    driver: &Driver,
    session: &Session,
    helper: &Helper,
) {
    match item {
        QueueItem::Work(work, attributes, parameters)
        | QueueItem::Growing(work, attributes, parameters, _) => {
            let payload = Payload { attributes: &attributes, parameters: &parameters };
            let result = submitter.submit(current, &work, payload);
            session.conclude_work(work.reply, result);
        }
        QueueItem::StreamDestroy(to, stream) => {
            submitter.mark(current);
            submitter.settle(current);
            session.conclude(to, driver.stream_destroy(stream));
        }
        QueueItem::Mark(slot) => submitter.mark_stream(current, slot),
        QueueItem::EventDestroy(to, event) => session.conclude(to, driver.event_destroy(event)),
        QueueItem::Memory(job) => helper.announced_memory(job),
        QueueItem::Module(job) => helper.module(*job),
    }
}

/// Keeps `Operation` small: it is copied for every piece of work.
const _: () = assert!(size_of::<Operation>() <= 96);
