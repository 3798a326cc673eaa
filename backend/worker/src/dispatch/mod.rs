//! The dispatcher: it takes records off the ring, in order, and executes each or hands it on. In one file: the state of one thread.
//!
//! One thread. It never makes a call that waits for the GPU, unless the context is broken and the wait is short: work goes to the
//! [`Submitter`], calls that may wait go to a helper. It owns every table of the session and reads them without a lock. A record that
//! is not one of the call table, or that breaks the rules of sequences and credits, ends the session: a shim never writes such a
//! record.

mod attributes;
mod calls;
mod graphs;
mod images;
mod inline;
pub(crate) mod spin;
mod stream;

use crate::{
    current::Current,
    dispatch::spin::{EndWatch, Spin, Watched},
    graphs::records::GraphRecords,
    helper::{
        Helper,
        jobs::{MemoryJob, ModuleJob},
        notice::{Notice, Notices},
    },
    memory::{SessionMemory, address::AddressMap, memory_source::MemorySource},
    session::{
        EXIT_MALFORMED, ReplyTo, Session,
        images::{GuestArray, GuestReference, MipmappedEntry},
        objects,
        plain::PlainObjects,
        table::Table,
    },
    submit::{
        StreamOrder, Submitter, WorkTarget,
        completion::Completion,
        host_calls::HostCalls,
        queue::{QueueItem, SubmitQueue, perform},
        time::Time,
    },
};
use sluice_driver::{Code, Driver, code};
use sluice_protocol::{
    calls::CallError,
    field::FieldError,
    handle::{
        Array, Context, Event, Function, Id, Kind, MipmappedArray, Module, Stream, SurfaceReference,
        TextureReference,
    },
    limits,
    park::Parking,
    record::Header,
    ring::{Consumer, RingError},
    session as page,
};
use sluice_runtime::limited;
use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};

/// Time within which the submitter thread releases the submitter once its work is done: scheduling delay only.
const LETTING_GO: Duration = Duration::from_millis(100);

/// Records without a look at the work in flight after which the completion thread watches it.
const UNWATCHED: u32 = 8;

/// The violation of the protocol by the guest that ends the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error("header: {0}")]
    Header(FieldError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("reply slot {0} is out of range")]
    Reply(u32),
    #[error("stream slot {slot}: sequence {sequence} does not follow {last}")]
    Sequence { slot: u32, sequence: u64, last: u64 },
    #[error("stream slot {slot}: sequence {sequence} is beyond its credits")]
    Credits { slot: u32, sequence: u64 },
}

/// The target of a stream slot.
#[derive(Clone, Copy, Debug)]
enum Binding {
    Free,
    /// Reserved for the default stream of a context in the making.
    Reserved,
    Stream(WorkTarget),
}

/// A stream slot. The count continues when another stream takes the slot.
#[derive(Clone, Copy, Debug)]
struct StreamSlot {
    binding: Binding,
    last: u64,
}

/// The caller's context as in the last record.
#[derive(Clone, Copy, Debug)]
struct CallerContext {
    raw: u64,
    context: objects::GuestContext,
}

/// A private copy of a record, aligned for the structures in it that a launch points to.
#[repr(align(64))]
struct CallRecord([u8; limits::RECORD_BYTES]);

/// The state that the dispatcher shares with the other threads.
pub(crate) struct SharedState {
    pub(crate) driver: Arc<Driver>,
    pub(crate) session: Arc<Session>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) completion: Arc<Completion>,
    pub(crate) submit_queue: Arc<SubmitQueue>,
    pub(crate) host_calls: Arc<HostCalls>,
    pub(crate) time: Arc<Time>,
    pub(crate) memory_source: MemorySource,
    pub(crate) memory: Arc<Mutex<SessionMemory>>,
    pub(crate) helper: Helper,
}

/// The state of the dispatcher thread.
pub(crate) struct Dispatcher {
    shared: SharedState,
    cpus: usize,
    /// `None` while the submitter thread has it.
    submitter: Option<Box<Submitter>>,
    current: Current,
    caller: Option<CallerContext>,
    greeted: bool,
    /// Pieces of work of one stream that the driver takes.
    room: u64,
    /// Records since this thread last looked at the work in flight.
    unwatched: u32,
    /// The session's devices, known once the guest has sent its hello.
    devices: Vec<i32>,
    violation: Option<Violation>,
    map: AddressMap,
    contexts: Table<Context, objects::GuestContext>,
    streams: Table<Stream, objects::GuestStream>,
    events: Table<Event, objects::GuestEvent>,
    modules: Table<Module, objects::GuestModule>,
    functions: Table<Function, objects::GuestFunction>,
    arrays: Table<Array, GuestArray>,
    mipmapped: Table<MipmappedArray, MipmappedEntry>,
    texture_references: Table<TextureReference, GuestReference>,
    surface_references: Table<SurfaceReference, GuestReference>,
    plain: PlainObjects,
    graphs: GraphRecords,
    slots: Box<[StreamSlot]>,
}

impl Dispatcher {
    pub(crate) fn new(shared: SharedState, submitter: Submitter, cpus: usize) -> Dispatcher {
        Dispatcher {
            shared,
            cpus,
            room: submitter.room(),
            submitter: Some(Box::new(submitter)),
            current: Current::default(),
            caller: None,
            greeted: false,
            unwatched: 0,
            devices: Vec::new(),
            violation: None,
            map: AddressMap::default(),
            contexts: Table::new(),
            streams: Table::new(),
            events: Table::new(),
            modules: Table::new(),
            functions: Table::new(),
            arrays: Table::new(),
            mipmapped: Table::new(),
            texture_references: Table::new(),
            surface_references: Table::new(),
            plain: PlainObjects::default(),
            graphs: GraphRecords::default(),
            slots: vec![StreamSlot { binding: Binding::Free, last: 0 }; limits::STREAMS as usize].into(),
        }
    }

    /// The dispatcher thread; it ends with the process.
    pub(crate) fn run(mut self) -> ! {
        let session = Arc::clone(&self.shared.session);
        let words = session.words();
        let mut consumer = Consumer::new();
        let mut record = Box::new(CallRecord([0; limits::RECORD_BYTES]));
        let mut answer = Box::new([0; limits::REPLY_BYTES]);
        let mut spin = Spin::new(self.cpus);
        loop {
            match consumer.next(words, &mut record.0) {
                Ok(Some(size)) => {
                    self.unwatched = self.unwatched.saturating_add(1);
                    if self.unwatched >= UNWATCHED {
                        self.announce();
                    }
                    if let Err(violation) = self.record(&record.0[..size], &mut answer) {
                        self.end(&violation);
                    }
                }
                Ok(None) => {
                    // The guest may sleep until the ring has room, and nothing but this call wakes it.
                    session.wake_guest();
                    let mut busy = self.mark_due();
                    let notices = Arc::clone(&self.shared.notices);
                    let ready = || !consumer.is_empty(words) || notices.any();
                    let mut follows = false;
                    if busy && self.submitter.is_some() {
                        match spin.watch(ready, || self.watch()) {
                            EndWatch::Ready => follows = true,
                            EndWatch::Over => busy = false,
                            EndWatch::Left => self.announce(),
                        }
                    }
                    follows = follows || spin.until(busy, ready);
                    if !follows {
                        // Nothing follows soon, so all ends are looked for.
                        if self.has_unmarked() {
                            busy = self.mark_all();
                        }
                        if self.submitter.is_some() {
                            page::set_marked(words, consumer.position());
                        }
                        follows = ready();
                    }
                    if !follows && (busy || !spin.nap(ready)) && Parking::WORKER.enter(words, ready) {
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
        tracing::warn!(%violation, "the guest violated the protocol; the session ends");
        self.shared.session.lose(code::DEVICE_UNAVAILABLE, EXIT_MALFORMED)
    }

    /// Marks the work whose end must be seen, and publishes what is complete, when the ring is empty. Returns `true` if marked work is
    /// still in flight.
    pub(crate) fn mark_due(&mut self) -> bool {
        let Some(submitter) = &mut self.submitter else { return true };
        submitter.mark_due(&mut self.current);
        self.look()
    }

    /// The same with all work, which the completion thread then watches.
    pub(crate) fn mark_all(&mut self) -> bool {
        let Some(submitter) = &mut self.submitter else { return true };
        submitter.mark(&mut self.current);
        let busy = self.look();
        self.announce();
        busy
    }

    /// Has the completion thread watch the markers that only this thread watched.
    pub(crate) fn announce(&mut self) {
        if let Some(submitter) = &mut self.submitter {
            submitter.announce();
        }
    }

    /// Publishes what is complete of the work in flight.
    fn watch(&mut self) -> Watched {
        self.unwatched = 0;
        let completion = &self.shared.completion;
        let progress = completion.pass(&mut self.current);
        match (completion.is_pending(), progress) {
            (false, _) => Watched::Over,
            (true, true) => Watched::Ended,
            (true, false) => Watched::Unchanged,
        }
    }

    fn has_unmarked(&self) -> bool {
        self.submitter.as_ref().is_some_and(|submitter| submitter.has_unmarked())
    }

    /// Publishes new markers that are reached already. Returns `true` if marked work is in flight.
    fn look(&mut self) -> bool {
        let Some(submitter) = &mut self.submitter else { return true };
        if submitter.is_stuck() {
            self.shared.submit_queue.lend(&mut self.submitter);
            return true;
        }
        let completion = &self.shared.completion;
        if submitter.has_unannounced() {
            self.unwatched = 0;
            completion.pass(&mut self.current);
        }
        completion.is_pending()
    }

    /// The sequence of the last work posted to a stream slot.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn last_sequence(&self, slot: u32) -> u64 {
        self.slots.get(slot as usize).map_or(0, |slot| slot.last)
    }

    /// The live modules and contexts.
    #[cfg(fuzzing)]
    pub(crate) fn live(&self) -> (Vec<Id<Module>>, Vec<Id<Context>>) {
        (self.modules.live().collect(), self.contexts.live().collect())
    }

    /// Applies the notices of the other threads.
    #[cold]
    fn read_notices(&mut self) {
        for notice in self.shared.notices.take() {
            match notice {
                Notice::Context { id, slot, context: Some(context) } => {
                    self.contexts.fill(id, context);
                    let target = WorkTarget::new(slot, 0, &context, StreamOrder::Default);
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
                    self.memory_job(MemoryJob::FreeAll(vec![address]));
                }
                Notice::Reach { address, bytes, device, may } => {
                    self.map.reach(address, bytes, device, may);
                }
                // The driver has unloaded a module whose context is gone.
                Notice::Module { id, module: Some(module) }
                    if module.context.is_some_and(|context| !self.has(context)) =>
                {
                    self.modules.release(id);
                }
                Notice::Module { id, module: Some(module) } => self.modules.fill(id, module),
                Notice::Module { id, module: None } => self.modules.release(id),
                Notice::Function { id, function: Some((module, function)) } => {
                    self.function_made(id, module, function);
                }
                Notice::Function { id, function: None } => self.functions.release(id),
                Notice::Link { id, link: Some(handle) } => {
                    // A link belongs to no context: the driver keeps it in host memory.
                    self.plain.Link.fill(id, objects::GuestObject { handle, context: None });
                }
                Notice::Link { id, link: None } => self.plain.Link.release(id),
                Notice::GreenContext { id, object } => {
                    // The driver has destroyed one whose context is gone.
                    let object = object.filter(|(_, context)| self.has(*context));
                    let object = object
                        .map(|(handle, context)| objects::GuestObject { handle, context: Some(context) });
                    fill_or_release(&mut self.plain.GreenContext, id, object);
                }
                Notice::ConditionalGraph { id, object } => {
                    // Its serial stands in the place of a handle, which the driver may give to a later graph.
                    let object = object.map(|handle| objects::GuestObject { handle, context: None });
                    fill_or_release(&mut self.plain.ConditionalGraph, id, object);
                }
                Notice::Array { id, object } => self.array_made(id, object),
                Notice::MipmappedArray { id, object } => {
                    let object = object.filter(|whole| self.has(whole.context));
                    let object = object.map(|of| MipmappedEntry { of, levels: HashSet::new(), names: 0 });
                    fill_or_release(&mut self.mipmapped, id, object);
                }
                Notice::TextureReference { id, object } => {
                    let object = object.filter(|reference| self.has_reference(reference));
                    fill_or_release(&mut self.texture_references, id, object);
                }
                Notice::SurfaceReference { id, object } => {
                    let object = object.filter(|reference| self.has_reference(reference));
                    fill_or_release(&mut self.surface_references, id, object);
                }
                Notice::Global { module, context, address, bytes } => {
                    let is_alive = context.is_none_or(|context| self.has(context));
                    if self.modules.get(module).is_some() && is_alive {
                        self.map.global(module, context, address, bytes);
                    }
                }
                Notice::Graph { id, serial, end } => self.graph_ended(id, serial, end),
                Notice::GraphGone { serial } => self.graph_gone(serial),
                Notice::Adopted(arena) => self.map.adopted(arena),
                Notice::DetachWanted { slot } => {
                    if let Some(arena) = self.map.detached(slot) {
                        self.graphs.arena_gone();
                        // After everything that was posted, then after every image that is being copied.
                        self.ordered(QueueItem::Module(Box::new(ModuleJob::Detach { arena })));
                    } else {
                        limited!(warn, slot, "the device detached a slot without an attachment");
                    }
                }
            }
        }
    }

    /// True if a context still exists.
    fn has(&self, context: objects::ContextRef) -> bool {
        self.contexts.any(|known| known.context == context)
    }

    fn function_made(&mut self, id: Id<Function>, module: Id<Module>, function: objects::GuestFunction) {
        match self.modules.get_mut(module) {
            Some(owner) => {
                owner.functions.push(id);
                self.functions.fill(id, function);
            }
            // The function's module was unloaded in the meantime.
            None => self.functions.release(id),
        }
    }

    fn bind(&mut self, slot: u32, binding: Binding) {
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.binding = binding;
        }
    }

    /// The context that a record names.
    fn context(&mut self, header: &Header) -> Result<objects::GuestContext, Code> {
        if let Some(caller) = &self.caller
            && caller.raw == header.context
        {
            return Ok(caller.context);
        }
        let id = Id::<Context>::from_raw(header.context).ok_or(code::INVALID_CONTEXT)?;
        let context = *self.contexts.get(id).ok_or(code::INVALID_CONTEXT)?;
        self.caller = Some(CallerContext { raw: header.context, context });
        Ok(context)
    }

    /// Makes the record's context this thread's current one.
    fn enter(&mut self, header: &Header) -> Result<objects::GuestContext, Code> {
        let context = self.context(header)?;
        self.current.set(&self.shared.driver, context.context)?;
        Ok(context)
    }

    /// Takes the submitter back if no work waits.
    fn regain(&mut self) {
        if self.submitter.is_none() {
            self.submitter = self.shared.submit_queue.take_back();
        }
    }

    /// True if everything that was posted has been submitted, so that work submitted now overtakes nothing.
    pub(crate) fn nothing_waits(&mut self) -> bool {
        self.regain();
        self.submitter.is_some()
    }

    /// Runs an item that must not overtake posted work.
    fn ordered(&mut self, item: QueueItem) {
        if matches!(item, QueueItem::Memory(_)) {
            self.shared.helper.memory_announced();
        }
        self.regain();
        let Dispatcher { shared, current, submitter, .. } = self;
        let SharedState { driver, session, helper, submit_queue, .. } = shared;
        if let (Some(submitter), QueueItem::StreamDestroy(..)) = (&mut *submitter, &item) {
            submitter.mark(current);
        }
        match submitter {
            Some(submitter) if !submitter.is_stuck() => {
                perform(item, submitter, current, driver, session, helper);
            }
            _ => submit_queue.queue(submitter, item),
        }
    }

    /// Sends a job to the memory helper at once.
    fn memory_job(&mut self, job: MemoryJob) {
        let Dispatcher { shared, current, submitter, .. } = self;
        shared.helper.memory_announced();
        shared.helper.announced_memory(job, || mark_before_wait(submitter, current));
    }

    /// Sends a job to the module helper at once.
    fn module_job(&mut self, job: ModuleJob) {
        let Dispatcher { shared, current, submitter, .. } = self;
        shared.helper.module(job, || mark_before_wait(submitter, current));
    }

    /// True if everything posted to the streams of a context is complete.
    fn is_idle(&mut self, context: objects::ContextRef) -> bool {
        let session = &self.shared.session;
        let idle = self.slots.iter().all(|slot| match slot.binding {
            Binding::Stream(target) if target.context == context => {
                slot.last == session.completed(target.slot)
            }
            _ => true,
        });
        if idle && self.submitter.is_none() {
            self.submitter = self.shared.submit_queue.take_back_soon(LETTING_GO);
        }
        // A destroyed stream may have work in flight, too.
        idle && self.submitter.as_ref().is_some_and(|submitter| !submitter.uses(context))
    }

    /// Removes a context and everything in it.
    fn forget(&mut self, context: objects::ContextRef) -> Vec<u64> {
        self.caller = None;
        if let Some(submitter) = &mut self.submitter {
            submitter.forget(context);
        }
        self.shared.submit_queue.local.forget(context);
        for slot in &mut self.slots {
            if matches!(slot.binding, Binding::Stream(target) if target.context == context) {
                slot.binding = Binding::Free;
            }
        }
        self.streams.forget(|stream| stream.context == context);
        self.events.forget(|event| event.context == context);
        self.functions.forget(|function| function.context == Some(context));
        self.plain.forget(context);
        for graph in self.graphs.context_gone(context) {
            self.plain.GraphExecutable.remove(graph);
        }
        self.modules.forget(|module| module.context == Some(context));
        self.arrays.forget(|array| array.context == context);
        self.mipmapped.forget(|array| array.of.context == context);
        self.texture_references.forget(|reference| reference.context == context);
        self.surface_references.forget(|reference| reference.context == context);
        self.map.context_gone(context)
    }
}

/// Marks all work before the dispatcher waits, if it has the submitter.
#[cold]
fn mark_before_wait(submitter: &mut Option<Box<Submitter>>, current: &mut Current) {
    if let Some(submitter) = submitter {
        submitter.mark_before_wait(current);
    }
}

/// Gives a reserved id its object, or frees it.
fn fill_or_release<K: Kind, T>(table: &mut Table<K, T>, id: Id<K>, object: Option<T>) {
    match object {
        Some(object) => table.fill(id, object),
        None => table.release(id),
    }
}

/// The place for the answer to a record.
fn reply_to(header: &Header) -> ReplyTo {
    let context = Id::<Context>::from_raw(header.context).and_then(|id| u32::try_from(id.index()).ok());
    ReplyTo { slot: header.reply, ticket: header.ticket, context: context.unwrap_or(limits::CONTEXTS) }
}

#[cfg(test)]
mod tests;
