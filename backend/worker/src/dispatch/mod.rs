//! The dispatcher: it takes records off the ring, in order, and carries each out or hands it on.
//!
//! One thread. It never makes a call that waits for the GPU: work goes to the [`Submitter`], calls that may wait go to a
//! helper. It owns every table of the session and reads them without a lock. A record that is not one of the call table, or
//! that breaks the rules of sequences and credits, ends the session: a shim never writes such a record.

mod calls;
mod launch;
pub(crate) mod spin;

use crate::{
    dispatch::spin::Spin,
    helper::{
        Helper,
        jobs::{MemoryJob, ModuleJob, Question},
        notice::{Notice, Notices},
    },
    memory::{SessionMemory, address::AddressMap, provision::Provision},
    session::{EXIT_MALFORMED, ReplyTo, Session, objects, table::Table},
    submit::{
        Operation, Order, Payload, Submitter, Target, Work,
        completion::{Completion, Current},
        lanes::ContextRef,
        local::Local,
        queue::{Gate, Item, perform},
        time::Time,
    },
};
use sluice_driver::{Code, Driver, code};
use sluice_protocol::{
    calls::{CallError, Dispatched, Outcome, dispatch, wire},
    field::FieldError,
    handle::{Context, Event, Function, Id, Module, Stream},
    limits,
    park::Parking,
    record::{Header, NO_REPLY},
    ring::{Consumer, RingError},
};
use sluice_runtime::limited;
use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

/// How long the feeder may take to let go of the submitter once its work is done, which is no more than being scheduled.
const LETTING_GO: Duration = Duration::from_millis(100);

/// Why the session ends by the guest's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error("header: {0}")]
    Header(FieldError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("reply slot {0} does not exist")]
    Reply(u32),
    #[error("stream slot {slot}: sequence {sequence} after {last}")]
    Sequence { slot: u32, sequence: u64, last: u64 },
    #[error("stream slot {slot}: sequence {sequence} is beyond its credits")]
    Credits { slot: u32, sequence: u64 },
}

/// What a stream slot is bound to.
#[derive(Clone, Copy, Debug)]
enum Binding {
    Free,
    /// To the default stream of a context in the making.
    Reserved,
    Stream(Target),
}

/// A stream slot. The count goes on when another stream takes the slot.
#[derive(Clone, Copy, Debug)]
struct Slot {
    binding: Binding,
    last: u64,
}

/// The caller's context as the last record named it.
#[derive(Clone, Copy, Debug)]
struct Caller {
    raw: u64,
    context: objects::Context,
}

/// A private copy of a record, aligned for the structures a launch points into it.
#[repr(align(64))]
struct Record([u8; limits::RECORD_BYTES]);

/// Whether work was done at once or waits for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Submitted {
    Done,
    Later,
}

/// What the dispatcher shares with the other threads.
pub(crate) struct Shared {
    pub(crate) driver: Arc<Driver>,
    pub(crate) session: Arc<Session>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) completion: Arc<Completion>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) time: Arc<Time>,
    pub(crate) provision: Provision,
    pub(crate) memory: Arc<Mutex<SessionMemory>>,
    pub(crate) helper: Helper,
}

/// The thread's state.
pub(crate) struct Dispatcher {
    shared: Shared,
    cpus: usize,
    /// `None` while the feeder has it.
    submitter: Option<Box<Submitter>>,
    current: Current,
    caller: Option<Caller>,
    greeted: bool,
    /// Devices the session has, known once it has said hello.
    devices: u32,
    violation: Option<Violation>,
    map: AddressMap,
    contexts: Table<Context, objects::Context>,
    streams: Table<Stream, objects::Stream>,
    events: Table<Event, objects::Event>,
    modules: Table<Module, objects::Module>,
    functions: Table<Function, objects::Function>,
    slots: Box<[Slot]>,
}

impl Dispatcher {
    pub(crate) fn new(shared: Shared, submitter: Submitter, cpus: usize) -> Dispatcher {
        Dispatcher {
            shared,
            cpus,
            submitter: Some(Box::new(submitter)),
            current: Current::default(),
            caller: None,
            greeted: false,
            devices: 0,
            violation: None,
            map: AddressMap::default(),
            contexts: Table::new(),
            streams: Table::new(),
            events: Table::new(),
            modules: Table::new(),
            functions: Table::new(),
            slots: vec![Slot { binding: Binding::Free, last: 0 }; limits::STREAMS as usize].into(),
        }
    }

    /// The dispatcher thread; ends with the process.
    pub(crate) fn run(mut self) -> ! {
        let session = Arc::clone(&self.shared.session);
        let words = session.words();
        let mut consumer = Consumer::new();
        let mut record = Box::new(Record([0; limits::RECORD_BYTES]));
        let mut answer = Box::new([0; limits::REPLY_BYTES]);
        let mut spin = Spin::new(self.cpus);
        loop {
            match consumer.next(words, &mut record.0) {
                Ok(Some(size)) => {
                    if let Err(violation) = self.record(&record.0[..size], &mut answer) {
                        self.end(&violation);
                    }
                }
                Ok(None) => {
                    // Somebody may sleep for room in the ring, and room alone wakes nobody.
                    session.wake_guest();
                    let busy = self.ring_is_empty();
                    let notices = Arc::clone(&self.shared.notices);
                    let ready = || !consumer.is_empty(words) || notices.any();
                    if !spin.until(busy, ready)
                        && (busy || !spin.nap(ready))
                        && Parking::WORKER.enter(words, ready)
                    {
                        session.await_doorbell();
                        Parking::WORKER.leave(words);
                    }
                    if notices.any() {
                        self.read_notices();
                    }
                }
                Err(error) => self.end(&Violation::Ring(error)),
            }
        }
    }

    fn end(&self, violation: &Violation) -> ! {
        tracing::warn!(%violation, "the guest broke the protocol; the session ends");
        self.shared.session.lose(code::DEVICE_UNAVAILABLE, EXIT_MALFORMED)
    }

    /// One record, from its private copy.
    pub(crate) fn record(
        &mut self,
        record: &[u8],
        answer: &mut [u8; limits::REPLY_BYTES],
    ) -> Result<(), Violation> {
        let (header, fields) = Header::read(record).map_err(Violation::Header)?;
        if header.reply != NO_REPLY && header.reply >= limits::REPLY_SLOTS {
            return Err(Violation::Reply(header.reply));
        }
        // After the record was taken: what it may name was announced before the guest could write it.
        if self.shared.notices.any() {
            self.read_notices();
        }
        self.shared.time.call();
        let to = reply_to(&header);
        if let Some(failed) = self.shared.session.sticky()
            && header.call != wire::console_read::CALL
        {
            self.shared.session.answer(to, failed, &[]);
            return Ok(());
        }
        let dispatched = dispatch(self, &header, fields, answer)?;
        if let Some(violation) = self.violation.take() {
            return Err(violation);
        }
        match dispatched {
            Dispatched::Done(length) => {
                self.shared.session.answer(to, 0, answer.get(..length).unwrap_or_default());
            }
            Dispatched::Failed(failed) => self.shared.session.conclude(to, Err(failed)),
            Dispatched::Later => {}
        }
        Ok(())
    }

    /// Nothing to read: marks and publishes what is done. `true` when work is still under way.
    pub(crate) fn ring_is_empty(&mut self) -> bool {
        let completion = &self.shared.completion;
        let Some(submitter) = &mut self.submitter else { return true };
        submitter.mark(&mut self.current);
        if submitter.is_stuck() {
            self.shared.gate.lend(&mut self.submitter);
            return true;
        }
        if !completion.is_pending() {
            return false;
        }
        completion.pass(&mut self.current);
        let busy = completion.is_pending();
        if busy {
            submitter.tell();
        }
        busy
    }

    /// The sequence last posted to a stream slot.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn last_sequence(&self, slot: u32) -> u64 {
        self.slots.get(slot as usize).map_or(0, |slot| slot.last)
    }

    /// The modules and contexts there are.
    #[cfg(fuzzing)]
    pub(crate) fn live(&self) -> (Vec<Id<Module>>, Vec<Id<Context>>) {
        (self.modules.live().collect(), self.contexts.live().collect())
    }

    /// Takes in what the other threads made.
    #[cold]
    fn read_notices(&mut self) {
        for notice in self.shared.notices.take() {
            match notice {
                Notice::Context { id, slot, context: Some(context) } => {
                    self.contexts.fill(id, context);
                    let target = Target::new(slot, 0, &context, Order::Default);
                    self.bind(slot, Binding::Stream(target));
                }
                Notice::Context { id, slot, context: None } => {
                    self.contexts.release(id);
                    self.bind(slot, Binding::Free);
                }
                Notice::Allocated { address, bytes, context } if self.has(context) => {
                    self.map.allocated(address, bytes, context);
                }
                Notice::Allocated { address, .. } => {
                    self.shared.helper.memory(MemoryJob::FreeAll(vec![address]));
                }
                Notice::Reach { address, bytes, may } => self.map.reach(address, bytes, may),
                // The driver has unloaded a module whose context is gone.
                Notice::Module { id, module: Some(module) }
                    if module.context.is_some_and(|context| !self.has(context)) =>
                {
                    self.modules.release(id);
                }
                Notice::Module { id, module: Some(module) } => self.modules.fill(id, module),
                Notice::Module { id, module: None } => self.modules.release(id),
                Notice::Function { id, module, function } => self.function_made(id, module, function),
                Notice::Global { module, address, bytes } => {
                    if self.modules.get(module).is_some() {
                        self.map.global(module, address, bytes);
                    }
                }
                Notice::Adopted(arena) => self.map.adopted(arena),
                Notice::DetachWanted { slot } => {
                    if let Some(arena) = self.map.detached(slot) {
                        // Behind everything that was posted, then behind every image that is being copied.
                        let question = Question::Detach { arena };
                        let to = ReplyTo::nowhere(limits::CONTEXTS);
                        self.ordered(Item::Module(ModuleJob { to, context: None, question }));
                    } else {
                        limited!(warn, slot, "nothing is attached there");
                    }
                }
            }
        }
    }

    /// Whether a context has not been destroyed since.
    fn has(&self, context: ContextRef) -> bool {
        self.contexts.any(|known| known.context == context)
    }

    fn function_made(&mut self, id: Id<Function>, module: Id<Module>, function: Option<objects::Function>) {
        match (function, self.modules.get_mut(module)) {
            (Some(function), Some(owner)) => {
                owner.functions.push(id);
                self.functions.fill(id, function);
            }
            // Not found, or its module was unloaded meanwhile.
            _ => self.functions.release(id),
        }
    }

    fn bind(&mut self, slot: u32, binding: Binding) {
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.binding = binding;
        }
    }

    /// The context a record names.
    fn context(&mut self, header: &Header) -> Result<objects::Context, Code> {
        if let Some(caller) = &self.caller
            && caller.raw == header.context
        {
            return Ok(caller.context);
        }
        let id = Id::<Context>::from_raw(header.context).ok_or(code::INVALID_CONTEXT)?;
        let context = *self.contexts.get(id).ok_or(code::INVALID_CONTEXT)?;
        self.caller = Some(Caller { raw: header.context, context });
        Ok(context)
    }

    /// Makes the record's context this thread's current one.
    fn enter(&mut self, header: &Header) -> Result<objects::Context, Code> {
        let context = self.context(header)?;
        self.current.set(&self.shared.driver, context.context)?;
        Ok(context)
    }

    /// Work on the header's stream: checks its sequence and submits it, or queues it. A refused operation still takes its
    /// place in the stream, so that its sequence completes.
    fn work(
        &mut self,
        header: &Header,
        operation: Result<Operation, Code>,
        payload: Payload<'_>,
    ) -> Result<Submitted, Code> {
        self.growing_work(header, operation, payload, None)
    }

    /// The same for work that may make the driver take memory for itself: then it is the feeder's, for it has to wait.
    fn growing_work(
        &mut self,
        header: &Header,
        operation: Result<Operation, Code>,
        payload: Payload<'_>,
        local: Option<Local>,
    ) -> Result<Submitted, Code> {
        let target = self.count(header)?;
        let refused = operation.err();
        let operation = operation.unwrap_or(Operation::Nothing);
        let to = reply_to(header);
        if let Some(failed) = refused {
            self.shared.session.work_failed(to, failed);
        }
        let reply = if refused.is_some() { ReplyTo::nowhere(to.context) } else { to };
        let work = Work { target, sequence: header.sequence, reply, operation };
        let submitted = match (&mut self.submitter, local) {
            (_, Some(local)) => {
                let (attributes, parameters) = (payload.attributes.into(), payload.parameters.into());
                let item = Item::Growing(work, attributes, parameters, local);
                self.shared.gate.queue(&mut self.submitter, item);
                Ok(Submitted::Later)
            }
            (Some(submitter), None) if submitter.admits(&work) => {
                concluded(&work, submitter.submit(&mut self.current, &work, payload))
            }
            _ => self.queue(work, payload),
        };
        match refused {
            Some(failed) if to.is_due() => Err(failed),
            Some(_) => Ok(Submitted::Later),
            None => submitted,
        }
    }

    /// The header's stream, whose count goes up by one.
    fn count(&mut self, header: &Header) -> Result<Target, Code> {
        let slot = self.slots.get_mut(header.stream as usize).ok_or(code::INVALID_HANDLE)?;
        let Binding::Stream(target) = slot.binding else { return Err(code::INVALID_HANDLE) };
        let sequence = header.sequence;
        if sequence != slot.last.wrapping_add(1) {
            self.violation = Some(Violation::Sequence { slot: target.slot, sequence, last: slot.last });
            return Err(code::UNKNOWN);
        }
        if sequence - self.shared.session.completed(target.slot) > limits::STREAM_CREDITS {
            self.violation = Some(Violation::Credits { slot: target.slot, sequence });
            return Err(code::UNKNOWN);
        }
        slot.last = sequence;
        Ok(target)
    }

    /// The stream a header names, if it names one.
    fn target(&self, header: &Header) -> Option<Target> {
        match self.slots.get(header.stream as usize)?.binding {
            Binding::Stream(target) => Some(target),
            Binding::Free | Binding::Reserved => None,
        }
    }

    #[cold]
    fn queue(&mut self, work: Work, payload: Payload<'_>) -> Result<Submitted, Code> {
        self.regain();
        if let Some(submitter) = &mut self.submitter
            && submitter.admits(&work)
        {
            return concluded(&work, submitter.submit(&mut self.current, &work, payload));
        }
        let item = Item::Work(work, payload.attributes.into(), payload.parameters.into());
        self.shared.gate.queue(&mut self.submitter, item);
        Ok(Submitted::Later)
    }

    /// Takes the submitter back when nothing waits any more.
    fn regain(&mut self) {
        if self.submitter.is_none() {
            self.submitter = self.shared.gate.take_back();
        }
    }

    /// Whether everything that was posted has been submitted, so that nothing is overtaken by what is done now.
    pub(crate) fn nothing_waits(&mut self) -> bool {
        self.regain();
        self.submitter.is_some()
    }

    /// Does something that must not overtake posted work.
    fn ordered(&mut self, item: Item) {
        if matches!(item, Item::Memory(_)) {
            self.shared.helper.memory_announced();
        }
        self.regain();
        let Dispatcher { shared, current, submitter, .. } = self;
        let Shared { driver, session, helper, gate, .. } = shared;
        if let (Some(submitter), Item::StreamDestroy(..)) = (&mut *submitter, &item) {
            submitter.mark(current);
        }
        match submitter {
            Some(submitter) if !submitter.is_stuck() => {
                perform(item, submitter, current, driver, session, helper);
            }
            _ => gate.queue(submitter, item),
        }
    }

    /// Allocates in a group for the record's context; `None`: the helper does it and answers.
    fn allocate(&mut self, header: &Header, group: u32, bytes: u64) -> Result<Option<u64>, Code> {
        let objects::Context { context, device, .. } = self.context(header)?;
        let at_hand =
            self.memory_at_hand().and_then(|mut memory| memory.allocate_at_hand(group, device, bytes));
        match at_hand {
            Some(address) => self.map.allocated(address, bytes, context),
            None => self.shared.helper.memory(MemoryJob::Allocate {
                to: reply_to(header),
                context,
                device,
                pool: group,
                bytes,
            }),
        }
        Ok(at_hand)
    }

    /// The session's memory, if nobody is at it and nothing is to be done in it first: what takes no call of the driver is
    /// then done at once, without the way to the helper and back.
    fn memory_at_hand(&self) -> Option<MutexGuard<'_, SessionMemory>> {
        if self.shared.helper.memory_is_idle() { self.shared.memory.try_lock().ok() } else { None }
    }

    /// Whether everything posted to the streams of a context is complete.
    fn is_idle(&mut self, context: ContextRef) -> bool {
        let session = &self.shared.session;
        let idle = self.slots.iter().all(|slot| match slot.binding {
            Binding::Stream(target) if target.context == context => {
                slot.last == session.completed(target.slot)
            }
            _ => true,
        });
        if idle && self.submitter.is_none() {
            self.submitter = self.shared.gate.take_back_soon(LETTING_GO);
        }
        // A stream that was destroyed may have work under way, too.
        idle && self.submitter.as_ref().is_some_and(|submitter| !submitter.uses(context))
    }

    /// Forgets a context and everything in it.
    fn forget(&mut self, context: ContextRef) -> Vec<u64> {
        self.caller = None;
        if let Some(submitter) = &mut self.submitter {
            submitter.forget(context);
        }
        self.shared.gate.local.forget(context);
        for slot in &mut self.slots {
            if matches!(slot.binding, Binding::Stream(target) if target.context == context) {
                slot.binding = Binding::Free;
            }
        }
        self.streams.forget(|stream| stream.context == context);
        self.events.forget(|event| event.context == context);
        self.functions.forget(|function| function.context == Some(context));
        let map = &mut self.map;
        self.modules.forget_with(|id, module| {
            let gone = module.context == Some(context);
            if gone {
                map.module_gone(id);
            }
            gone
        });
        self.map.context_gone(context)
    }
}

/// What became of work that was submitted at once. The failure of a post is kept already, and nothing is left to be said.
fn concluded(work: &Work, result: Result<(), Code>) -> Result<Submitted, Code> {
    match result {
        Ok(()) => Ok(Submitted::Done),
        Err(failed) if work.reply.is_due() => Err(failed),
        Err(_) => Ok(Submitted::Later),
    }
}

/// Where a record's answer goes.
fn reply_to(header: &Header) -> ReplyTo {
    let context = Id::<Context>::from_raw(header.context).and_then(|id| u32::try_from(id.index()).ok());
    ReplyTo { slot: header.reply, ticket: header.ticket, context: context.unwrap_or(limits::CONTEXTS) }
}

/// What [`sluice_protocol::calls::Handler`] methods of stream work return.
fn outcome<R>(submitted: Result<Submitted, Code>, reply: R) -> Outcome<R> {
    match submitted {
        Ok(Submitted::Done) => Outcome::Done(reply),
        Ok(Submitted::Later) => Outcome::Later,
        Err(failed) => Outcome::Failed(failed),
    }
}

#[cfg(test)]
mod tests;
