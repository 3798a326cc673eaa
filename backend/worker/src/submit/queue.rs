//! The submit queue: the permit, and the work that waits for it.
//!
//! While the permit is open, its window not full and no work waits, the dispatcher owns the [`Submitter`] and submits at once,
//! without a lock. Otherwise it lends the submitter to the submitter thread; work then queues up and the submitter thread
//! submits it in order, each piece when the permit admits it. Once the queue is empty the submitter goes back to the
//! dispatcher. So the dispatcher waits for no permit, and the order is the same whichever thread submits.
//!
//! Work whose stream is full in the driver waits here, too, until earlier work of its stream ends. Other work passes it
//! ([`super::order`]).

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
        completion::AwaitsRoom,
        handover::{Choice, HandedOver, Handover, QueuedItem, SubmitStep},
        local::{Local, LocalMemory},
        order::{EventUse, StayingItems, Ties},
        time::{AdmissionWait, Time},
    },
};
use core::time::Duration;
use sluice_driver::{Code, Driver, Handle, LaunchAttribute, code};
use sluice_messages::custody::Growth;
use std::sync::Arc;

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
    /// The work that the item submits, if it does.
    const fn work(&self) -> Option<&Work> {
        match self {
            QueueItem::Work(work, ..) | QueueItem::Growing(work, ..) => Some(work),
            _ => None,
        }
    }

    /// The ties of the item to others.
    fn ties(&self) -> Ties {
        match self {
            QueueItem::Work(work, attributes, _) | QueueItem::Growing(work, attributes, ..) => {
                let records = attributes.iter().any(LaunchAttribute::records_event);
                let events = if records { Some(EventUse::Unknown) } else { work.operation.events() };
                events.map_or(Ties::All, |events| Ties::Work(work.target, events))
            }
            QueueItem::Mark(slot) => Ties::Slot(*slot),
            QueueItem::StreamDestroy(..) | QueueItem::EventDestroy(..) => Ties::End,
            QueueItem::Memory(_) | QueueItem::Module(_) => Ties::All,
        }
    }
}

impl QueuedItem for QueueItem {
    fn slot(&self) -> Option<u32> {
        match self {
            QueueItem::Mark(slot) => Some(*slot),
            item => item.work().map(|work| work.target.slot),
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

impl HandedOver for Box<Submitter> {
    fn is_stuck(&self) -> bool {
        Submitter::is_stuck(self)
    }
}

/// The queue between dispatcher and driver.
#[derive(Debug)]
pub(crate) struct SubmitQueue {
    time: Arc<Time>,
    handover: Handover<Box<Submitter>, QueueItem>,
    pub(crate) local: LocalMemory,
}

impl AwaitsRoom for SubmitQueue {
    fn made_room(&self) {
        self.handover.made_room();
    }
}

/// Has the completion thread watch the markers that only the dispatcher watched, which cannot look without the submitter.
fn leave(submitter: &mut Option<Box<Submitter>>) {
    if let Some(submitter) = submitter {
        submitter.announce();
    }
}

impl SubmitQueue {
    pub(crate) fn new(time: Arc<Time>) -> SubmitQueue {
        SubmitQueue { time, handover: Handover::new(WAITING_BYTES), local: LocalMemory::default() }
    }

    /// The devices' time accounting.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn time(&self) -> &Time {
        &self.time
    }

    /// Queues an item, together with the submitter if the dispatcher has it. Waits only if too much is queued.
    #[cold]
    pub(crate) fn queue(&self, submitter: &mut Option<Box<Submitter>>, item: QueueItem) {
        leave(submitter);
        self.handover.queue(submitter, item);
    }

    /// Lends the submitter to the submitter thread, which may wait for work without a marker.
    #[cold]
    pub(crate) fn lend(&self, submitter: &mut Option<Box<Submitter>>) {
        leave(submitter);
        self.handover.lend(submitter);
    }

    /// The submitter, if the submitter thread no longer uses it.
    #[cold]
    pub(crate) fn take_back(&self) -> Option<Box<Submitter>> {
        self.handover.take_back()
    }

    /// As [`SubmitQueue::take_back`], but waits up to `limit` for the submitter thread to finish, because its last work can be
    /// seen to end a moment before it releases the submitter. Does not wait for queued work.
    pub(crate) fn take_back_soon(&self, limit: Duration) -> Option<Box<Submitter>> {
        self.handover.take_back_soon(limit)
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
        let mut staying = StayingItems::default();
        // The device of which the next piece is submitted although the window is full.
        let mut admitted = None;
        loop {
            let mut device = 0;
            let next = self.handover.next(|submitter, items| {
                let has_room = |item: &&QueueItem| item.work().is_none_or(|work| submitter.has_room(work));
                let Some(at) = staying.first(items, |item| item.ties(), has_room) else {
                    return Choice::Full;
                };
                match items.get(at).and_then(QueueItem::work) {
                    Some(work) if admitted != Some(work.target.device) && !submitter.admits(work) => {
                        device = work.target.device;
                        Choice::Refused
                    }
                    _ => Choice::Perform(at),
                }
            });
            match next {
                SubmitStep::Settle(mut submitter) => {
                    submitter.settle(&mut current);
                    self.handover.give_back(submitter);
                }
                SubmitStep::Refused { mut submitter, mixed } => {
                    // The wait is for the end of the work in flight.
                    submitter.mark_before_wait(&mut current);
                    self.handover.give_back(submitter);
                    admitted = self.time.wait(device, mixed, &mut wait).then_some(device);
                }
                SubmitStep::Full(mut submitter) => {
                    // No permit is needed, and the room comes with the end of the work in flight.
                    self.time.rest();
                    submitter.mark_before_wait(&mut current);
                    if submitter.has_failed() {
                        // The markers have failed, so no end of work is noticed any more. All work has room now.
                        self.handover.give_back(submitter);
                    } else {
                        self.handover.await_room(submitter);
                    }
                }
                SubmitStep::Perform { mut submitter, item, last } => {
                    (wait, admitted) = (AdmissionWait::default(), None);
                    if last {
                        self.time.rest();
                    }
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
                        submitter.mark_before_wait(&mut current);
                    }
                    self.handover.give_back(submitter);
                }
            }
        }
    }

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
            session.conclude(to, driver.cuStreamDestroy_v2(stream));
        }
        QueueItem::Mark(slot) => submitter.mark_stream(current, slot),
        QueueItem::EventDestroy(to, event) => session.conclude(to, driver.cuEventDestroy_v2(event)),
        QueueItem::Memory(job) => helper.announced_memory(job, || submitter.mark_before_wait(current)),
        QueueItem::Module(job) => helper.module(*job, || submitter.mark_before_wait(current)),
    }
}

/// Keeps `Operation` small: it is copied for every piece of work.
const _: () = assert!(size_of::<Operation>() <= 96);
