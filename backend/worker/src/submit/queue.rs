//! The submit queue: the permit, and the work that waits for it.
//!
//! While the permit is open, its window not full and nothing waits, the dispatcher owns the [`Submitter`] and submits at once,
//! without a lock. Otherwise it lends the submitter to the feeder thread; work then queues up and the feeder submits it in
//! order, each piece when the permit admits it. Once the queue is empty the submitter comes back. So the dispatcher waits for
//! no permit, and the order is the same whichever thread submits.

use crate::{
    helper::{
        Helper,
        jobs::{MemoryJob, ModuleJob},
    },
    memory::provision::Provision,
    session::{ReplyTo, Session},
    submit::{
        Operation, Payload, Submitter, Work,
        completion::Current,
        local::{Local, LocalMemory},
        time::{Patience, Time},
    },
};
use core::time::Duration;
use sluice_driver::{Code, Driver, Handle, LaunchAttribute, code};
use sluice_messages::custody::Growth;
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// What must not overtake work that was posted before it.
#[derive(Debug)]
pub(crate) enum Item {
    /// Work on a stream, with its payload.
    Work(Work, Box<[LaunchAttribute]>, Box<[u8]>),
    /// The same, when it may make the driver take memory for itself. Only the feeder does it, for it may wait.
    Growing(Work, Box<[LaunchAttribute]>, Box<[u8]>, Local),
    /// Destroys a stream.
    StreamDestroy(ReplyTo, Handle),
    /// Destroys an event.
    EventDestroy(ReplyTo, Handle),
    /// A job for the memory helper, announced to it.
    Memory(MemoryJob),
    /// A job for the module helper.
    Module(ModuleJob),
}

impl Item {
    /// The stream slot it is for, if it is work.
    const fn slot(&self) -> Option<u32> {
        match self {
            Item::Work(work, ..) | Item::Growing(work, ..) => Some(work.target.slot),
            _ => None,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Item::Work(_, attributes, parameters) | Item::Growing(_, attributes, parameters, _) => {
                size_of_val(&**attributes) + parameters.len() + size_of::<Item>()
            }
            _ => size_of::<Item>(),
        }
    }
}

/// Bytes that may wait. Beyond it the dispatcher reads no further, and the guest's ring fills up.
const WAITING_BYTES: usize = 16 << 20;

#[derive(Debug, Default)]
struct Waiting {
    items: VecDeque<Item>,
    bytes: usize,
    /// Here while it is the feeder's turn and when it is on its way back.
    submitter: Option<Box<Submitter>>,
    /// The feeder holds the submitter.
    feeding: bool,
    /// Not all of it is of one stream.
    mixed: bool,
}

impl Waiting {
    /// The submitter, if nothing waits for it and the feeder does not hold it or has to.
    fn hand_back(&mut self) -> Option<Box<Submitter>> {
        let done = self.items.is_empty() && !self.feeding;
        if done { self.submitter.take_if(|submitter| !submitter.is_stuck()) } else { None }
    }
}

/// The gate between dispatcher and driver.
#[derive(Debug)]
pub(crate) struct Gate {
    time: Arc<Time>,
    waiting: Mutex<Waiting>,
    changed: Condvar,
    pub(crate) local: LocalMemory,
}

impl Gate {
    pub(crate) fn new(time: Arc<Time>) -> Gate {
        Gate {
            time,
            waiting: Mutex::new(Waiting::default()),
            changed: Condvar::new(),
            local: LocalMemory::default(),
        }
    }

    /// The devices' time.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn time(&self) -> &Time {
        &self.time
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an item; the first one takes the submitter along. Waits only for the feeder, when too much is queued.
    #[cold]
    pub(crate) fn queue(&self, submitter: &mut Option<Box<Submitter>>, item: Item) {
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

    /// Lends the submitter to the feeder, which may wait for what has no marker.
    #[cold]
    pub(crate) fn lend(&self, submitter: &mut Option<Box<Submitter>>) {
        self.lock().submitter = submitter.take();
        self.changed.notify_all();
    }

    /// The submitter, if the feeder is done with it.
    #[cold]
    pub(crate) fn take_back(&self) -> Option<Box<Submitter>> {
        self.lock().hand_back()
    }

    /// The same, when the feeder may just be done: its last work can be seen to end a moment before it lets go. Waits no longer
    /// than `limit`, and not at all for what is queued.
    pub(crate) fn take_back_soon(&self, limit: Duration) -> Option<Box<Submitter>> {
        let waiting = self.lock();
        let just_feeding = |waiting: &mut Waiting| waiting.feeding && waiting.items.is_empty();
        let (mut waiting, _) = self
            .changed
            .wait_timeout_while(waiting, limit, just_feeding)
            .unwrap_or_else(PoisonError::into_inner);
        waiting.hand_back()
    }

    /// The feeder thread.
    pub(crate) fn feed(&self, driver: &Driver, session: &Session, helper: &Helper, provision: &Provision) {
        let (mut current, mut patience) = (Current::default(), Patience::default());
        let mut waiting = self.lock();
        loop {
            if let Some(mut submitter) = waiting.submitter.take_if(|submitter| submitter.is_stuck()) {
                waiting.feeding = true;
                drop(waiting);
                submitter.settle(&mut current);
                waiting = self.lock();
                waiting.feeding = false;
                waiting.submitter = Some(submitter);
                self.changed.notify_all();
            }
            if waiting.items.is_empty() || waiting.submitter.is_none() {
                waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let mixed = waiting.mixed;
            let Waiting { items, submitter, .. } = &mut *waiting;
            if let Some(Item::Work(work, ..) | Item::Growing(work, ..)) = items.front()
                && let Some(submitter) = submitter
                && !submitter.admits(work)
            {
                let device = work.target.device;
                // What is under way has to be seen to end: it is waited for, and nothing else would mark it.
                submitter.mark(&mut current);
                submitter.tell();
                drop(waiting);
                let admitted = self.time.wait(device, mixed, &mut patience);
                waiting = self.lock();
                if !admitted {
                    continue;
                }
            }
            patience = Patience::default();
            let (item, submitter) = (waiting.items.pop_front(), waiting.submitter.take());
            let (Some(item), Some(mut submitter)) = (item, submitter) else { continue };
            waiting.bytes -= item.bytes();
            waiting.feeding = true;
            let last = waiting.items.is_empty();
            if last {
                waiting.mixed = false;
                self.time.rest();
            }
            drop(waiting);
            match item {
                Item::Growing(work, attributes, parameters, local) => {
                    let payload = Payload { attributes: &attributes, parameters: &parameters };
                    let result = self.grow(session, provision, &work, local, |operation| {
                        submitter.submit(&mut current, &Work { operation, ..work }, payload)
                    });
                    session.conclude_work(work.reply, result);
                }
                item => perform(item, &mut submitter, &mut current, driver, session, helper),
            }
            if last {
                submitter.mark(&mut current);
                submitter.tell();
            }
            waiting = self.lock();
            waiting.feeding = false;
            waiting.submitter = Some(submitter);
            self.changed.notify_all();
        }
    }
}

impl Gate {
    /// Does work with leave for the driver to take local memory. Work that is refused still takes its place in its stream.
    fn grow(
        &self,
        session: &Session,
        provision: &Provision,
        work: &Work,
        local: Local,
        mut submit: impl FnMut(Operation) -> Result<(), Code>,
    ) -> Result<(), Code> {
        let context = work.target.context;
        if self.local.covers(context, local.each) {
            return submit(work.operation);
        }
        let _grant = match provision.grow(local.device, Growth::Launch, local.bytes) {
            Ok(grant) => grant,
            Err(refused) => {
                session.work_failed(work.reply, refused);
                return submit(Operation::Nothing).and(Err(refused));
            }
        };
        match submit(work.operation) {
            // The margin's memory may have been taken for a sweep.
            Err(code::OUT_OF_MEMORY) => {
                let _grant = match provision.ask_growth(local.device, Growth::Launch, local.bytes) {
                    Ok(grant) => grant,
                    Err(refused) => return submit(Operation::Nothing).and(Err(refused)),
                };
                submit(work.operation)?;
            }
            submitted => submitted?,
        }
        self.local.note(context, local.each);
        Ok(())
    }
}

/// Does what an item says.
pub(crate) fn perform(
    item: Item,
    submitter: &mut Submitter,
    current: &mut Current,
    driver: &Driver,
    session: &Session,
    helper: &Helper,
) {
    match item {
        Item::Work(work, attributes, parameters) | Item::Growing(work, attributes, parameters, _) => {
            let payload = Payload { attributes: &attributes, parameters: &parameters };
            let result = submitter.submit(current, &work, payload);
            session.conclude_work(work.reply, result);
        }
        Item::StreamDestroy(to, stream) => {
            submitter.mark(current);
            submitter.settle(current);
            session.conclude(to, driver.stream_destroy(stream));
        }
        Item::EventDestroy(to, event) => session.conclude(to, driver.event_destroy(event)),
        Item::Memory(job) => helper.announced_memory(job),
        Item::Module(job) => helper.module(job),
    }
}

/// Keeps `Operation` small: it is copied for every piece of work.
const _: () = assert!(size_of::<Operation>() <= 96);
