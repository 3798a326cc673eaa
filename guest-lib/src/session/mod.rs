//! The session: calls out through the ring, answers in through the reply slots. In one file: all calls take one path.
//!
//! The tables and the functions of the C API call it. It owns the ring, the reply slots, the resources shared with the worker,
//! and the thread that wakes sleeping callers. It has no objects of the program: contexts, streams and errors are numbers
//! here.

mod console;
mod link;
pub(crate) mod waiting;

use crate::{
    error::{Error, Result},
    log,
    transport::{Transport, TransportResource},
};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use rustix::fd::OwnedFd;
use sluice_cuda_frontend::environment::Environment;
use sluice_protocol::{
    calls::{self, Answered, Posted, Request, wire},
    doorbell::Doorbell,
    field::FieldError,
    handle::{Context, Id},
    limits,
    park::Parking,
    record::{Header, NO_REPLY, NO_STREAM},
    reply,
    ring::Producer,
    session::{self as layout, Attachment, HostCall},
    shared::Shared as _,
};
use sluice_shared_memory::{Reservation, mapping::Words};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use {
    link::SessionLink,
    waiting::{Condition, Waiting},
};

/// The session of this process with its worker.
pub(crate) struct Session {
    link: Arc<SessionLink>,
    waiting: Waiting,
    ring: Mutex<Ring>,
    replies: [AtomicU64; limits::REPLY_SLOTS as usize / 64],
    tickets: Box<[AtomicU32]>,
    attachments: Mutex<Vec<bool>>,
    /// Counts of late errors that were reported, by index.
    reported: Box<[AtomicU32]>,
    /// The sequence up to which the worker publishes the work of a stream slot without being asked again.
    asked: Box<[AtomicU64]>,
    /// Held while text of kernels is fetched and written; `passes_on_text` is set meanwhile.
    text: Mutex<()>,
    passes_on_text: AtomicBool,
    /// Turns every post into a sync, for debugging (`SLUICE_SYNC=1`).
    synchronous: bool,
    /// Posts of work wait for its completion (`CUDA_LAUNCH_BLOCKING=1`).
    launches_block: bool,
    gathers_fixed_arena: bool,
    /// The answer of `cuDriverGetVersion`.
    pub(crate) driver_version: u32,
    /// Number of devices the worker offers.
    pub(crate) device_count: u32,
    /// Pieces of work of one stream that the host's driver takes at a time.
    pub(crate) room: u64,
}

/// The producer and the buffer in which records are built, under one lock.
struct Ring {
    producer: Producer,
    buffer: Box<[u8]>,
}

/// The stream that posted work goes to: its slot, the counter of posted work, and the generation that shows that it exists.
#[derive(Clone, Copy)]
pub(crate) struct PostTarget<'a> {
    pub(crate) slot: u32,
    pub(crate) posted: &'a AtomicU64,
    /// Generation of the stream in the slot.
    pub(crate) live: &'a AtomicU32,
    /// The generation that `live` must have.
    pub(crate) generation: u32,
    /// Pieces of work that may be under way; beyond that the caller waits for the stream.
    pub(crate) credits: u64,
}

/// The access of devices to memory that is shared with the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Devices access it themselves, at the same addresses.
    InPlace,
    /// Only as source and destination of copies, which the worker carries.
    Gathered,
}

/// The only arena of a session whose VM has fixed arenas, at the start of its reservation.
pub(crate) struct FixedArena {
    pub(crate) reservation: Reservation,
    pub(crate) bytes: u64,
    pub(crate) reach: Reach,
}

/// The longest wait for a worker; beyond that the host's control plane is gone.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

impl Session {
    /// Opens the session: shares the control resource, waits for a worker, exchanges versions. If the VM has fixed arenas, it also
    /// shares the session's, at addresses that `reserve` reserves.
    pub(crate) fn open(
        transport: Box<dyn Transport>,
        reserve: impl FnOnce() -> Result<Reservation>,
    ) -> Result<(Session, Option<FixedArena>)> {
        let failed = |what: &str, error: &dyn core::fmt::Display| {
            log::error(format_args!("{what}: {error}"));
            Error::NO_DEVICE
        };
        let control = Reservation::new(0, layout::BYTES as u64)
            .map_err(|error| failed("cannot reserve addresses for the session", &error))?;
        let resource = transport
            .create(&control, control.base(), layout::BYTES as u64)
            .map_err(|error| failed("cannot share memory with the device", &error))?;
        let link = Arc::new(SessionLink::new(control, transport));
        link.words.store_u64(layout::MAGIC_AT, layout::MAGIC, Ordering::Release);
        link.transport
            .submit(Doorbell::Open { resource: resource.id })
            .map_err(|error| failed("cannot open a session", &error))?;
        let mut session = Session {
            waiting: Waiting::new(link.clone()),
            link,
            ring: Mutex::new(Ring {
                producer: Producer::new(),
                buffer: vec![0; limits::RECORD_BYTES].into(),
            }),
            replies: [const { AtomicU64::new(0) }; limits::REPLY_SLOTS as usize / 64],
            tickets: (0..limits::REPLY_SLOTS).map(|_| AtomicU32::new(0)).collect(),
            // Slot 0 is the control resource.
            attachments: Mutex::new((0..limits::ATTACHMENTS).map(|slot| slot == 0).collect()),
            reported: (0..layout::LATE_ERRORS).map(|_| AtomicU32::new(0)).collect(),
            asked: (0..limits::STREAMS).map(|_| AtomicU64::new(0)).collect(),
            text: Mutex::default(),
            passes_on_text: AtomicBool::new(false),
            synchronous: std::env::var_os("SLUICE_SYNC").is_some_and(|value| value == "1"),
            launches_block: Environment::get().launches_block,
            gathers_fixed_arena: false,
            driver_version: 0,
            device_count: 0,
            room: limits::STREAM_CREDITS,
        };
        session.await_worker(Condition::Answered)?;
        let fixed = session.share_fixed_arena(reserve)?;
        session.await_worker(Condition::Open)?;
        let fixed = match fixed {
            Some((reservation, shared)) => {
                let bytes = shared.bytes;
                let (reach, _) = session.await_attachment(&reservation, shared)?;
                session.gathers_fixed_arena = reach == Reach::Gathered;
                Some(FixedArena { reservation, bytes, reach })
            }
            None => None,
        };
        let hello = session
            .sync(0, &wire::session_hello::Args { version: calls::VERSION, process: std::process::id() })?;
        session.driver_version = hello.driver_version.min(sluice_cuda_abi::symbols::CUDA_VERSION);
        session.device_count = hello.devices.min(limits::DEVICES);
        session.room = u64::from(hello.room.max(1));
        Ok((session, fixed))
    }

    /// Shares the fixed arena, if the device has set its size.
    fn share_fixed_arena(
        &self,
        reserve: impl FnOnce() -> Result<Reservation>,
    ) -> Result<Option<(Reservation, SharedArena)>> {
        let bytes = self.words().load_u64(layout::FIXED_ARENA, Ordering::Acquire);
        if bytes == 0 {
            return Ok(None);
        }
        let reservation = reserve()?;
        if !limits::is_fixed_arena(bytes) || bytes > reservation.bytes() {
            log::error(format_args!(
                "the device demands a fixed arena of {bytes} bytes, which is not possible"
            ));
            return Err(Error::DEVICE_UNAVAILABLE);
        }
        let slot = self.take_attachment(Some(layout::FIXED_ARENA_SLOT))?;
        let shared = self.share(&reservation, reservation.base(), bytes, slot)?;
        Ok(Some((reservation, shared)))
    }

    fn await_worker(&self, condition: Condition) -> Result {
        // The waker bounds each sleep, but without this deadline a device that never answers would hold the program for ever.
        let deadline = Instant::now() + OPEN_TIMEOUT;
        while !condition.holds(self.words()) {
            if Instant::now() > deadline {
                log::error(format_args!("the host started no worker within {} s", OPEN_TIMEOUT.as_secs()));
                return Err(Error::DEVICE_UNAVAILABLE);
            }
            // Waiting for the transport here needs no thread; wake-ups are hints, so check again in any case.
            if Parking::GUEST.enter(self.words(), || condition.holds(self.words())) {
                let waited = self.link.transport.wait(Duration::from_millis(200));
                Parking::GUEST.leave(self.words());
                waited.map_err(|error| {
                    log::error(format_args!("the device went away: {error}"));
                    Error::DEVICE_UNAVAILABLE
                })?;
            }
        }
        self.alive().inspect_err(|error| match *error {
            Error::SYSTEM_DRIVER_MISMATCH => {
                log::error(format_args!(
                    "the guest library and the components of the host have different versions"
                ));
            }
            _ => log::error(format_args!("the host could not start a worker")),
        })
    }

    pub(crate) fn words(&self) -> &Words {
        &self.link.words
    }

    pub(crate) fn transport(&self) -> &dyn Transport {
        &*self.link.transport
    }

    /// An error if the session is over.
    pub(crate) fn alive(&self) -> Result {
        self.link.alive()
    }

    /// An error if the session is over, or earlier work has failed in a way that ends all work. The kernels' output about such a failure
    /// is printed before the program gets the error.
    pub(crate) fn healthy(&self) -> Result {
        match self.words().load_u32(layout::STICKY, Ordering::Acquire) {
            0 => self.alive(),
            code => {
                self.pass_on_text();
                Err(Error(code))
            }
        }
    }

    /// Reports once the failure of a post that broke nothing: of this context, or of no context. Only calls that have waited for
    /// work call this, since a program expects errors of earlier calls from them.
    pub(crate) fn report(&self, context: u64) -> Result {
        for index in [late_index(context), limits::CONTEXTS] {
            let late = layout::late_error(self.words(), index);
            let Some(reported) = self.reported.get(index as usize) else { continue };
            let before = reported.load(Ordering::Relaxed);
            let swap = || reported.compare_exchange(before, late.count, Ordering::Relaxed, Ordering::Relaxed);
            if late.count != before && swap().is_ok() {
                return Err(Error(late.code));
            }
        }
        Ok(())
    }

    /// Marks the failures at a new context's index as reported: they are those of an earlier context.
    pub(crate) fn forget_late_errors(&self, context: u64) {
        let index = late_index(context);
        if let Some(reported) = self.reported.get(index as usize) {
            reported.store(layout::late_error(self.words(), index).count, Ordering::Relaxed);
        }
    }

    /// True if the worker has published that everything posted to a stream slot up to `sequence` is complete.
    pub(crate) fn is_published(&self, slot: u32, sequence: u64) -> bool {
        layout::completed(self.words(), slot) >= sequence
    }

    /// True if everything posted to a stream slot up to `sequence` is complete. Otherwise the worker publishes it once it is.
    pub(crate) fn is_complete(&self, slot: u32, sequence: u64) -> bool {
        let complete = self.is_published(slot, sequence);
        if !complete {
            self.ask(slot, sequence);
        }
        complete
    }

    /// Asks the worker to publish the end of what was posted to a stream slot up to `sequence`, unless it does so anyway. The request
    /// has a place in the ring, so later work does not delay the answer.
    fn ask(&self, slot: u32, sequence: u64) {
        let Some(asked) = self.asked.get(slot as usize) else { return };
        // A worker that sleeps has marked everything, and need not be woken for that.
        if layout::is_marked(self.words()) {
            return;
        }
        if asked.load(Ordering::Relaxed) < sequence && asked.fetch_max(sequence, Ordering::Relaxed) < sequence
        {
            // If it cannot be published, the session is over, which every wait finds.
            let _ = self.publish(0, &wire::mark::Args { slot }, None, NO_REPLY, 0);
        }
    }

    /// Waits until everything posted to these stream slots, up to a sequence of each, is complete. It asks for all of them before the
    /// first wait. So a wait includes no work that the same thread posts after it, and of other threads at most what they post while
    /// it begins.
    pub(crate) fn wait_all(&self, ends: impl IntoIterator<Item = (u32, u64)>) -> Result {
        let mut open: Vec<_> = ends.into_iter().collect();
        open.retain(|(slot, sequence)| !self.is_complete(*slot, *sequence));
        self.pass_on_text();
        open.into_iter().try_for_each(|(slot, sequence)| self.wait_complete(slot, sequence))
    }

    /// Waits until everything posted to a stream slot up to `sequence` is complete, and prints its output.
    pub(crate) fn wait_complete(&self, slot: u32, sequence: u64) -> Result {
        if !self.is_complete(slot, sequence) {
            self.waiting.until(Condition::Sequence { slot, sequence });
        }
        self.pass_on_text();
        if self.is_published(slot, sequence) {
            return Ok(());
        }
        self.healthy()?;
        Err(Error::UNKNOWN)
    }

    /// Waits for the worker's next call of a function of the program.
    ///
    /// # Errors
    /// The code with which work has failed, or with which the session is over: no more calls come.
    pub(crate) fn next_host_call(&self, latest: HostCall) -> Result<HostCall> {
        self.waiting.until(Condition::HostCall { latest });
        match layout::host_call(self.words()) {
            call if call != latest => Ok(call),
            _ => {
                self.healthy()?;
                Err(Error::UNKNOWN)
            }
        }
    }

    /// Tells the worker that a function of the program has returned.
    pub(crate) fn host_function_returned(&self, call: HostCall) {
        layout::set_host_return(self.words(), call);
        // After a failure the session is over, which all waits find.
        let _ = self.link.transport.host_function_returned(call).map_err(|error| self.link.lose(&error));
    }

    /// Writes the output of kernels to the program's output.
    fn pass_on_text(&self) {
        let some = || self.words().load_u32(layout::CONSOLE, Ordering::Acquire) != 0;
        // In this order: the thread that fetches the last text has set `passes_on_text` before.
        if !some() && !self.passes_on_text.load(Ordering::Acquire) {
            return;
        }
        // One thread at a time keeps the order of the text; the others wait, so that their text is printed before they return.
        let _order = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        self.passes_on_text.store(true, Ordering::Release);
        while some() {
            let read = wire::console_read::Args {};
            let publish = |slot, ticket| self.publish(0, &read, None, slot, ticket).map(drop);
            // A session that is over has no more text.
            let Ok(read) = self.answered(publish, wire::console_read::Reply::get) else { break };
            console::print(read.error, read.text.get(..read.length as usize).unwrap_or_default());
        }
        self.passes_on_text.store(false, Ordering::Release);
    }

    /// Makes a call that has an answer.
    pub(crate) fn sync<C: Answered>(&self, context: u64, call: &C) -> Result<C::Reply> {
        self.healthy()?;
        self.answered(|slot, ticket| self.publish(context, call, None, slot, ticket).map(drop), C::reply)
    }

    /// Makes a call without an answer. Returns its sequence on the stream, 0 without one.
    pub(crate) fn post(
        &self,
        context: u64,
        target: Option<PostTarget<'_>>,
        call: &impl Posted,
    ) -> Result<u64> {
        if self.synchronous {
            return self.post_checked(context, target, call);
        }
        self.healthy()?;
        let sequence = self.publish(context, call, target, NO_REPLY, 0)?;
        self.posted(context, target, call, sequence)
    }

    /// The end of a post: its sequence, when it may return.
    fn posted<C: Posted>(
        &self,
        context: u64,
        target: Option<PostTarget<'_>>,
        _: &C,
        sequence: u64,
    ) -> Result<u64> {
        if let Some(target) = target
            && C::BLOCKS
        {
            self.complete_if_blocking(context, target, sequence)?;
        }
        Ok(sequence)
    }

    /// True if launches block: the environment asks for that.
    pub(crate) const fn launches_block(&self) -> bool {
        self.launches_block
    }

    /// If launches block, waits for work that was posted, and reports its failure.
    pub(crate) fn complete_if_blocking(&self, context: u64, target: PostTarget<'_>, sequence: u64) -> Result {
        if self.launches_block {
            self.wait_complete(target.slot, sequence)?;
            self.healthy()?;
            self.report(context)?;
        }
        Ok(())
    }

    /// Makes a call without an answer and waits for its submission, so that an error that the driver finds at once is returned
    /// at once.
    pub(crate) fn post_checked(
        &self,
        context: u64,
        target: Option<PostTarget<'_>>,
        call: &impl Posted,
    ) -> Result<u64> {
        let mut sequence = 0;
        self.healthy()?;
        self.answered(
            |slot, ticket| {
                sequence = self.publish(context, call, target, slot, ticket)?;
                Ok(())
            },
            |_| Ok(()),
        )?;
        self.posted(context, target, call, sequence)
    }

    /// Runs a call through a reply slot: `publish` sends it, `get` decodes a successful answer.
    fn answered<R>(
        &self,
        publish: impl FnOnce(u32, u32) -> Result,
        get: impl FnOnce(&[u8]) -> core::result::Result<R, FieldError>,
    ) -> Result<R> {
        let slot = self.take_reply_slot();
        let answer = (|| {
            let ticket = self.next_ticket(slot);
            publish(slot, ticket)?;
            self.waiting.until(Condition::Reply { slot, ticket });
            if !reply::is_ready(self.words(), slot, ticket) {
                self.alive()?;
                return Err(Error::UNKNOWN);
            }
            let mut buffer = [0; limits::REPLY_BYTES];
            match reply::take(self.words(), slot, &mut buffer) {
                (0, fields) => get(fields).map_err(|error| {
                    log::error(format_args!("cannot decode an answer of the host: {error}"));
                    Error::UNKNOWN
                }),
                (code, _) => Err(Error(code)),
            }
        })();
        self.give_reply_slot(slot);
        answer
    }

    /// Builds a record and publishes it, waiting for room; then rings if the dispatcher sleeps. Sequences are counted under
    /// the ring's lock, so a stream's records lie in the ring in the order of their sequences.
    fn publish<C: Request>(
        &self,
        context: u64,
        call: &C,
        target: Option<PostTarget<'_>>,
        reply: u32,
        ticket: u32,
    ) -> Result<u64> {
        let thread = caller_number();
        let (mut ring, sequence) = self.take_credit(target)?;
        let Ring { producer, buffer } = &mut *ring;
        let stream = target.map_or(NO_STREAM, |target| target.slot);
        let header = Header { call: C::CALL, reply, ticket, context, stream, thread, sequence };
        let record = header.build(buffer, |writer| call.put(writer)).map_err(|_| Error::INVALID_VALUE)?;
        while producer.publish(self.words(), record).is_err() {
            // The dispatcher never waits for the GPU, so it makes room soon.
            self.alive()?;
            let head = self.words().load_u64(layout::RING_HEAD, Ordering::Acquire);
            if !producer.has_room(self.words(), record.len()) {
                self.ring_if_asleep()?;
                self.waiting.until(Condition::Room { head });
            }
        }
        if let Some(target) = target {
            if C::CALL != wire::launch::CALL {
                self.asked[target.slot as usize].store(sequence, Ordering::Relaxed);
            }
            target.posted.store(sequence, Ordering::Release);
        }
        // Under the lock: a transport that sends records keeps their order.
        let posted = self.link.transport.posted(record);
        drop(ring);
        posted.map_err(|error| self.link.lose(&error))?;
        self.ring_if_asleep()?;
        Ok(sequence)
    }

    fn ring_if_asleep(&self) -> Result {
        if Parking::WORKER.must_wake(self.words()) {
            self.link.transport.submit(Doorbell::Ring).map_err(|error| self.link.lose(&error))?;
        }
        Ok(())
    }

    /// Locks the ring when the stream has room for one more piece of work, and returns its sequence. A caller of a full stream waits
    /// for that stream only, without the lock. A stream is retired before its destruction is published, so work of a stream that
    /// is alive under the lock precedes the destruction in the ring.
    fn take_credit(&self, target: Option<PostTarget<'_>>) -> Result<(MutexGuard<'_, Ring>, u64)> {
        let Some(target) = target else { return Ok((self.lock_ring(), 0)) };
        loop {
            let ring = self.lock_ring();
            if target.live.load(Ordering::Acquire) != target.generation {
                return Err(Error::INVALID_HANDLE);
            }
            let sequence = target.posted.load(Ordering::Relaxed) + 1;
            match sequence.checked_sub(target.credits) {
                Some(oldest) if !self.is_published(target.slot, oldest) => {
                    drop(ring);
                    self.waiting.until(Condition::Credit { slot: target.slot, sequence: oldest });
                    // This succeeds, unless the session is over.
                    self.wait_complete(target.slot, oldest)?;
                }
                _ => return Ok((ring, sequence)),
            }
        }
    }

    fn lock_ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn take_reply_slot(&self) -> u32 {
        let first = caller_number() as usize;
        loop {
            for step in 0..self.replies.len() {
                let index = (first + step) % self.replies.len();
                let taken = self.replies[index].load(Ordering::Relaxed);
                let free = (!taken).trailing_zeros();
                if free < 64
                    && self.replies[index]
                        .compare_exchange(taken, taken | 1 << free, Ordering::Acquire, Ordering::Relaxed)
                        .is_ok()
                {
                    return u32::try_from(index).unwrap_or(0) * 64 + free;
                }
            }
            // More threads wait for answers than there are slots; each comes back as soon as its answer is there.
            std::thread::yield_now();
        }
    }

    fn give_reply_slot(&self, slot: u32) {
        self.replies[slot as usize / 64].fetch_and(!(1 << (slot % 64)), Ordering::Release);
    }

    fn next_ticket(&self, slot: u32) -> u32 {
        // Never 0, which is what an unused slot holds.
        let counter = &self.tickets[slot as usize];
        let ticket = counter.load(Ordering::Relaxed).wrapping_add(1).max(1);
        counter.store(ticket, Ordering::Relaxed);
        ticket
    }

    /// True if the worker gathers even the control resource, and so would gather any other, or gathers the only arena.
    pub(crate) fn gathers(&self) -> bool {
        self.gathers_fixed_arena || matches!(layout::attachment(self.words(), 0), Attachment::Gathered(_))
    }

    /// Creates shared memory at `at` in a reservation and has the worker map it at the same address, or gather it.
    pub(crate) fn attach(
        &self,
        reservation: &Reservation,
        at: u64,
        bytes: u64,
    ) -> Result<(Reach, SharedArena)> {
        let slot = self.take_attachment(None)?;
        let shared = self.share(reservation, at, bytes, slot)?;
        self.await_attachment(reservation, shared)
    }

    /// The file and the offset in it of shared memory.
    pub(crate) fn file_pages(&self, shared: &SharedArena) -> Result<(OwnedFd, u64)> {
        let pages = self.transport().file_pages(&shared.resource).map_err(|error| self.link.lose(&error))?;
        pages.ok_or(Error::NOT_SUPPORTED)
    }

    /// Has the worker unmap shared memory that no work uses, and destroys it. After an error the memory stays shared.
    pub(crate) fn detach(&self, reservation: &Reservation, shared: SharedArena) -> Result {
        let SharedArena { resource, slot, at, bytes } = shared;
        let was = layout::attachment(self.words(), slot);
        self.transport().submit(Doorbell::Detach { slot }).map_err(|error| self.link.lose(&error))?;
        self.waiting.until(Condition::Attachment { slot, was });
        self.alive()?;
        self.transport().destroy(resource).map_err(|error| self.link.lose(&error))?;
        reservation.unmap(at, bytes).map_err(|_| Error::OUT_OF_MEMORY)?;
        self.attachments()[slot as usize] = false;
        Ok(())
    }

    fn attachments(&self) -> MutexGuard<'_, Vec<bool>> {
        self.attachments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an entry of the attach table, this one or any.
    fn take_attachment(&self, slot: Option<u32>) -> Result<u32> {
        let mut taken = self.attachments();
        let free = slot.map_or_else(|| taken.iter().position(|taken| !taken), |slot| Some(slot as usize));
        let entry = free.and_then(|free| taken.get_mut(free)).ok_or(Error::OUT_OF_MEMORY)?;
        *entry = true;
        free.and_then(|free| u32::try_from(free).ok()).ok_or(Error::OUT_OF_MEMORY)
    }

    /// Creates shared memory and asks the device to have the worker map it.
    fn share(&self, reservation: &Reservation, at: u64, bytes: u64, slot: u32) -> Result<SharedArena> {
        let resource = self.transport().create(reservation, at, bytes).map_err(|error| {
            // The slot was never sent.
            self.attachments()[slot as usize] = false;
            cannot_share(bytes, &error)
        })?;
        // The entry may have been another resource's.
        layout::set_attachment(self.words(), slot, Attachment::Pending);
        let doorbell = Doorbell::Attach { resource: resource.id, slot, address: at };
        self.transport().submit(doorbell).map_err(|error| self.link.lose(&error))?;
        Ok(SharedArena { resource, slot, at, bytes })
    }

    /// Waits for the answer to an attach.
    fn await_attachment(
        &self,
        reservation: &Reservation,
        shared: SharedArena,
    ) -> Result<(Reach, SharedArena)> {
        let SharedArena { slot, at, bytes, .. } = shared;
        self.waiting.until(Condition::Attachment { slot, was: Attachment::Pending });
        match layout::attachment(self.words(), slot) {
            Attachment::Adopted(adopted) if adopted == bytes => Ok((Reach::InPlace, shared)),
            Attachment::Gathered(gathered) if gathered == bytes => Ok((Reach::Gathered, shared)),
            Attachment::Refused(code) => {
                let given_back = self.transport().destroy(shared.resource).map_err(|error| error.to_string());
                let given_back =
                    given_back.and_then(|()| reservation.unmap(at, bytes).map_err(|error| error.to_string()));
                match given_back {
                    Ok(()) => self.attachments()[slot as usize] = false,
                    Err(error) => {
                        log::warn(format_args!(
                            "{bytes} bytes that could not be shared stay in use: {error}"
                        ));
                    }
                }
                Err(cannot_share(bytes, &format_args!("refused with {code}")))
            }
            _ => {
                self.alive()?;
                Err(cannot_share(bytes, &"the worker mapped another number of bytes"))
            }
        }
    }
}

/// Memory that the worker was asked to map.
pub(crate) struct SharedArena {
    resource: TransportResource,
    slot: u32,
    at: u64,
    bytes: u64,
}

impl SharedArena {
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn cannot_share(bytes: u64, error: &dyn core::fmt::Display) -> Error {
    log::error(format_args!("cannot share {bytes} bytes with the worker: {error}"));
    Error::OUT_OF_MEMORY
}

/// A small number that names the calling thread.
fn caller_number() -> u32 {
    thread_local! {
        static NUMBER: u32 = {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            NEXT.fetch_add(1, Ordering::Relaxed)
        };
    }
    NUMBER.with(|number| *number)
}

/// Index of a context in the table of late errors.
fn late_index(context: u64) -> u32 {
    let index = Id::<Context>::from_raw(context).and_then(|id| u32::try_from(id.index()).ok());
    index.unwrap_or(limits::CONTEXTS)
}
