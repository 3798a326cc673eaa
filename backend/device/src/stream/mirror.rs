//! The mirror: it finds the worker's publications in the session page, and puts them in an order in which they can be sent.
//!
//! This is the guest's end of the page: it publishes records there, announces that it sleeps, and is woken. It compares the
//! worker's publications with those it sent last. The order of reading is the reverse of the order of sending: if the worker
//! published one thing before another, the first is there when the second is seen, and arrives before it.

use sluice_protocol::{
    calls::{self, CallError},
    field::FieldError,
    limits,
    park::Parking,
    record::{Header, NO_REPLY, NO_STREAM},
    reply,
    ring::{Full, Producer},
    session::{self, Attachment, HostCall, LateError},
    shared::Shared as _,
    staged::StagedRange,
    stream::ToGuest,
};
use sluice_shared_memory::{Mapping, mapping::Words};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::atomic::Ordering,
};

/// The reason why a record ends its connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    #[error("cannot decode a record's header: {0}")]
    Header(FieldError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the header of a record of {0} bytes has another length")]
    Size(usize),
    #[error(transparent)]
    Ring(#[from] Full),
}

/// An item to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outgoing {
    /// A frame without a payload.
    Frame(ToGuest),
    /// The answer in a slot.
    Reply { slot: u32, ticket: u32 },
    /// A range of arena memory.
    Bulk(StagedRange),
}

/// A stream slot with work that is not complete.
#[derive(Debug, Default)]
struct MirroredStream {
    /// The last sequence that was sent.
    sent: u64,
    posted: u64,
    /// Ranges that calls will have written, by their sequences, ascending.
    results: VecDeque<(u64, StagedRange)>,
}

/// A reply slot with a pending answer.
#[derive(Debug)]
struct Due {
    ticket: u32,
    result: Option<StagedRange>,
}

/// The guest's copy of the page, and pending results.
#[derive(Debug)]
pub(super) struct Mirror {
    page: Mapping,
    producer: Producer,
    state: u32,
    sticky: u32,
    console: u32,
    /// The last errors that were sent, by index.
    late_errors: Box<[LateError]>,
    head: u64,
    /// The last call of a function of the program that was sent.
    host_call: HostCall,
    /// Requested entries of the attach table.
    attachments: BTreeMap<u32, Attachment>,
    /// Stream slots with work.
    streams: BTreeMap<u32, MirroredStream>,
    /// Reply slots with pending answers.
    replies: BTreeMap<u32, Due>,
    /// Number of pending results of all streams and replies.
    results: usize,
    out: VecDeque<Outgoing>,
}

impl Mirror {
    /// Creates the mirror of a fresh page.
    pub(super) fn new(page: Mapping) -> Mirror {
        page.words().store_u64(session::MAGIC_AT, session::MAGIC, Ordering::Release);
        Mirror {
            page,
            producer: Producer::new(),
            state: session::NEW,
            sticky: 0,
            console: 0,
            late_errors: vec![LateError::default(); session::LATE_ERRORS as usize].into(),
            head: 0,
            host_call: HostCall::default(),
            attachments: BTreeMap::from([(0, Attachment::Pending)]),
            streams: BTreeMap::new(),
            replies: BTreeMap::new(),
            results: 0,
            out: VecDeque::new(),
        }
    }

    fn words(&self) -> Words {
        self.page.words()
    }

    /// True if another record has to wait until results are sent. Not if no more results come: after a failure no work
    /// completes, and without a worker nothing is published.
    pub(super) const fn is_full(&self) -> bool {
        self.results >= limits::STREAM_RESULTS && self.sticky == 0 && !self.is_over()
    }

    /// Publishes a record. `true`: the dispatcher sleeps and needs a ring.
    pub(super) fn record(&mut self, record: &[u8]) -> Result<bool, RecordError> {
        let (header, fields) = Header::read(record).map_err(RecordError::Header)?;
        let says = record.first_chunk().map(|size| u32::from_le_bytes(*size));
        if says.and_then(|size| usize::try_from(size).ok()) != Some(record.len()) {
            return Err(RecordError::Size(record.len()));
        }
        let writes = calls::staged(header.call, fields)
            .map_err(|error| CallError::Field { call: header.call, error })?
            .writes;
        let on_stream = header.stream != NO_STREAM && header.stream < limits::STREAMS;
        if on_stream {
            // The completed sequence of the slot's last look was sent.
            let sent = session::completed(&self.words(), header.stream);
            let stream = self
                .streams
                .entry(header.stream)
                .or_insert_with(|| MirroredStream { sent, ..MirroredStream::default() });
            stream.posted = stream.posted.max(header.sequence);
            if let Some(range) = writes.filter(|_| self.sticky == 0) {
                stream.results.push_back((header.sequence, range));
                self.results = self.results.saturating_add(1);
            }
        }
        if header.reply != NO_REPLY && header.reply < limits::REPLY_SLOTS {
            let result = writes.filter(|_| !on_stream);
            self.results = self.results.saturating_add(usize::from(result.is_some()));
            let due = Due { ticket: header.ticket, result };
            // If a guest sends a second call with a pending reply slot, it gets the later answer.
            let before = self.replies.insert(header.reply, due);
            let forgotten = before.is_some_and(|before| before.result.is_some());
            self.results = self.results.saturating_sub(usize::from(forgotten));
        }
        let words = self.words();
        self.producer.publish(&words, record)?;
        Ok(Parking::WORKER.must_wake(&words))
    }

    /// A function of the program has returned. The worker looks at the word and needs no ring.
    pub(super) fn host_function_returned(&self, call: HostCall) {
        session::set_host_return(&self.words(), call);
    }

    /// The guest has requested to attach or detach an entry of the attach table.
    pub(super) fn watch(&mut self, slot: u32) {
        if slot < limits::ATTACHMENTS {
            self.attachments.entry(slot).or_insert(Attachment::Pending);
        }
    }

    /// Announces sleep. `false`: the page has changed, and the change must be sent first.
    pub(super) fn enter(&mut self) -> bool {
        let words = self.words();
        Parking::GUEST.enter(&words, || self.look())
    }

    /// Ends the announced sleep.
    pub(super) fn leave(&self) {
        Parking::GUEST.leave(&self.words());
    }

    /// True if the guest was told that it has no worker any more: then nothing else is published.
    pub(super) const fn is_over(&self) -> bool {
        self.state == session::LOST
    }

    /// Ends the session for lack of a worker, whatever the page shows.
    pub(super) fn end(&mut self, error: u32) {
        let written = session::lost(&self.words()).unwrap_or(error);
        self.state = session::LOST;
        self.out.push_back(Outgoing::Frame(ToGuest::State { state: session::LOST, error: written }));
    }

    /// Sends a frame that changes nothing, unless another item waits.
    pub(super) fn pulse(&mut self) {
        if self.out.is_empty() {
            self.out.push_back(Outgoing::Frame(ToGuest::Room { head: self.head }));
        }
    }

    /// Looks for changes, if all earlier ones were sent; true if there is an item to send.
    pub(super) fn look(&mut self) -> bool {
        if self.out.is_empty() && !self.is_over() {
            self.find();
        }
        !self.out.is_empty()
    }

    fn find(&mut self) {
        let words = self.words();
        let state = words.load_u32(session::STATE, Ordering::Acquire);
        let host_call = session::host_call(&words);
        let answered: Vec<u32> = self
            .replies
            .iter()
            .filter(|(slot, due)| reply::is_ready(&words, **slot, due.ticket))
            .map(|(slot, _)| *slot)
            .collect();
        let head = words.load_u64(session::RING_HEAD, Ordering::Acquire);
        let completed: Vec<(u32, u64)> = self
            .streams
            .iter()
            .map(|(slot, stream)| (*slot, session::completed(&words, *slot), stream.sent))
            .filter(|(_, now, sent)| now > sent)
            .map(|(slot, now, _)| (slot, now))
            .collect();
        let attachments: Vec<(u32, Attachment)> = self
            .attachments
            .iter()
            .map(|(slot, sent)| (*slot, session::attachment(&words, *slot), *sent))
            .filter(|(_, now, sent)| now != sent)
            .map(|(slot, now, _)| (slot, now))
            .collect();
        let console = words.load_u32(session::CONSOLE, Ordering::Acquire);
        let sticky = words.load_u32(session::STICKY, Ordering::Acquire);

        let out = &mut self.out;
        if sticky != self.sticky {
            self.sticky = sticky;
            out.push_back(Outgoing::Frame(ToGuest::Sticky { error: sticky }));
        }
        // Before the sequences and answers whose calls report them.
        for (index, sent) in (0..).zip(&mut self.late_errors) {
            let error = session::late_error(&words, index);
            if error != *sent {
                *sent = error;
                out.push_back(Outgoing::Frame(ToGuest::LateError { index, error }));
            }
        }
        if console != self.console {
            self.console = console;
            out.push_back(Outgoing::Frame(ToGuest::Console { waiting: console }));
        }
        for (slot, now) in attachments {
            self.attachments.insert(slot, now);
            // The worker maps it; the guest has other memory, to and from which the bytes are copied.
            let attachment = match now {
                Attachment::Adopted(bytes) => Attachment::Gathered(bytes),
                other => other,
            };
            out.push_back(Outgoing::Frame(ToGuest::Attachment { slot, attachment }));
        }
        for (slot, sequence) in completed {
            let Some(stream) = self.streams.get_mut(&slot) else { continue };
            while let Some((_, range)) = stream.results.pop_front_if(|(due, _)| *due <= sequence) {
                self.results = self.results.saturating_sub(1);
                out.push_back(Outgoing::Bulk(range));
            }
            stream.sent = sequence;
            out.push_back(Outgoing::Frame(ToGuest::Sequence { slot, sequence }));
            // A slot without work is skipped; the page keeps its sequence.
            if stream.sent >= stream.posted && stream.results.is_empty() {
                self.streams.remove(&slot);
            }
        }
        if head != self.head {
            self.head = head;
            out.push_back(Outgoing::Frame(ToGuest::Room { head }));
        }
        for slot in answered {
            let Some(due) = self.replies.remove(&slot) else { continue };
            if let Some(range) = due.result {
                self.results = self.results.saturating_sub(1);
                out.push_back(Outgoing::Bulk(range));
            }
            out.push_back(Outgoing::Reply { slot, ticket: due.ticket });
        }
        // After the results and sequences on which the function may rely.
        if host_call != self.host_call {
            self.host_call = host_call;
            out.push_back(Outgoing::Frame(ToGuest::HostCall { call: host_call }));
        }
        if state != self.state {
            self.state = state;
            let error = words.load_u32(session::LOST_ERROR, Ordering::Relaxed);
            out.push_back(Outgoing::Frame(ToGuest::State { state, error }));
        }
    }

    /// The next item to send.
    pub(super) fn next(&mut self) -> Option<Outgoing> {
        self.out.pop_front()
    }

    /// Puts back an item of which only a part could be sent.
    pub(super) fn put_back(&mut self, rest: Outgoing) {
        self.out.push_front(rest);
    }

    /// The answer in a slot: its result and its fields.
    pub(super) fn answer<'b>(&self, slot: u32, into: &'b mut [u8; limits::REPLY_BYTES]) -> (u32, &'b [u8]) {
        reply::take(&self.words(), slot, into)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, reason = "a test")]
    use super::*;
    use sluice_protocol::{
        calls::wire,
        field::{ArenaOut, DeviceAddress, Writer},
        handle::Id,
    };

    const ARENA: u64 = limits::WINDOW_BOUNDS.start;
    const DEVICE: u64 = limits::WINDOW_BOUNDS.end - 4096;

    fn mirror() -> Mirror {
        Mirror::new(Mapping::private(0, session::BYTES as u64).unwrap())
    }

    fn record(
        call: u16,
        stream: u32,
        sequence: u64,
        reply: u32,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
    ) -> Vec<u8> {
        let header = Header { call, reply, ticket: 9, context: 1, stream, thread: 0, sequence };
        let mut buffer = vec![0; limits::RECORD_BYTES];
        header.build(&mut buffer, put).unwrap().to_vec()
    }

    fn fetch(stream: u32, sequence: u64, address: u64, bytes: u64) -> Vec<u8> {
        record(wire::memcpy_dtoh::CALL, stream, sequence, NO_REPLY, |writer| {
            wire::memcpy_dtoh::Args { to: ArenaOut { address, bytes }, from: DeviceAddress(DEVICE) }
                .put(writer)
        })
    }

    fn sent(mirror: &mut Mirror) -> Vec<Outgoing> {
        mirror.look();
        core::iter::from_fn(|| mirror.next()).collect()
    }

    const fn bulk(address: u64, bytes: u64) -> Outgoing {
        Outgoing::Bulk(StagedRange { address, bytes })
    }

    // Promise: V21
    #[test]
    fn results_of_a_call_are_sent_before_its_completion() {
        let mut mirror = mirror();
        let words = mirror.words();
        for (stream, sequence) in [(5, 1), (5, 2), (5, 3), (6, 1)] {
            let address = ARENA + u64::from(stream) * 0x1000 + sequence * 0x100;
            mirror.record(&fetch(stream, sequence, address, 16)).unwrap();
        }
        assert_eq!(sent(&mut mirror), [], "nothing is complete");
        session::set_completed(&words, 5, 2);
        let sequence = |slot, sequence| Outgoing::Frame(ToGuest::Sequence { slot, sequence });
        assert_eq!(
            sent(&mut mirror),
            [bulk(ARENA + 0x5100, 16), bulk(ARENA + 0x5200, 16), sequence(5, 2)],
            "what is complete and nothing else"
        );
        session::set_completed(&words, 5, 3);
        session::set_completed(&words, 6, 1);
        assert_eq!(
            sent(&mut mirror),
            [bulk(ARENA + 0x5300, 16), sequence(5, 3), bulk(ARENA + 0x6100, 16), sequence(6, 1)]
        );
        assert!(mirror.streams.is_empty(), "a slot without work is not looked at");
        mirror.record(&fetch(5, 4, ARENA, 0)).unwrap();
        assert_eq!(sent(&mut mirror), [], "an old sequence is not sent again");
        session::set_completed(&words, 5, 4);
        assert_eq!(sent(&mut mirror), [sequence(5, 4)]);
        mirror.pulse();
        assert_eq!(
            sent(&mut mirror),
            [Outgoing::Frame(ToGuest::Room { head: 0 })],
            "what the guest knows already"
        );
    }

    // Promise: V21
    #[test]
    fn host_call_is_sent_after_the_results_of_the_work_before_it() {
        let mut mirror = mirror();
        let words = mirror.words();
        mirror.record(&fetch(5, 1, ARENA, 16)).unwrap();
        let call = HostCall::default().next(7);
        session::set_completed(&words, 5, 1);
        session::set_host_call(&words, call);
        let sequence = Outgoing::Frame(ToGuest::Sequence { slot: 5, sequence: 1 });
        assert_eq!(
            sent(&mut mirror),
            [bulk(ARENA, 16), sequence, Outgoing::Frame(ToGuest::HostCall { call })]
        );
        assert_eq!(sent(&mut mirror), [], "once");
        mirror.host_function_returned(call);
        assert_eq!(session::host_return(&words), call, "where the worker looks");
    }

    // Promise: V21
    #[test]
    fn reply_is_sent_after_the_bytes_that_its_call_wrote() {
        let mut mirror = mirror();
        let words = mirror.words();
        let name = record(wire::module_function_name::CALL, NO_STREAM, 0, 3, |writer| {
            wire::module_function_name::Args {
                module: Id::new(0, 1),
                index: 0,
                into: ArenaOut { address: ARENA, bytes: 64 },
            }
            .put(writer)
        });
        mirror.record(&name).unwrap();
        assert_eq!(sent(&mut mirror), []);
        reply::publish(&words, 3, 8, 0, &[]);
        assert_eq!(sent(&mut mirror), [], "the answer to an earlier call");
        reply::publish(&words, 3, 9, 0, &[1; 8]);
        words.store_u32(session::CONSOLE, 1, Ordering::Relaxed);
        let console = Outgoing::Frame(ToGuest::Console { waiting: 1 });
        assert_eq!(sent(&mut mirror), [console, bulk(ARENA, 64), Outgoing::Reply { slot: 3, ticket: 9 }]);
        assert_eq!(mirror.answer(3, &mut [0; limits::REPLY_BYTES]), (0, &[1; 8][..]));
        assert_eq!(sent(&mut mirror), []);
    }

    // Promise: V22
    #[test]
    fn adopted_attachment_is_reported_to_the_guest_as_gathered() {
        let mut mirror = mirror();
        let words = mirror.words();
        session::set_attachment(&words, 0, Attachment::Adopted(4096));
        words.store_u32(session::STATE, session::READY, Ordering::Release);
        let attachment = |slot, attachment| Outgoing::Frame(ToGuest::Attachment { slot, attachment });
        let ready = Outgoing::Frame(ToGuest::State { state: session::READY, error: 0 });
        assert_eq!(sent(&mut mirror), [attachment(0, Attachment::Gathered(4096)), ready]);
        session::set_attachment(&words, 4, Attachment::Refused(2));
        assert_eq!(sent(&mut mirror), [], "this attachment was not requested");
        mirror.watch(4);
        mirror.watch(limits::ATTACHMENTS);
        assert_eq!(sent(&mut mirror), [attachment(4, Attachment::Refused(2))]);
    }

    /// Records with pending results, as if consumed, up to the limit.
    fn fill(mirror: &mut Mirror) -> u64 {
        let words = mirror.words();
        let mut sequence = 0;
        while !mirror.is_full() {
            sequence += 1;
            mirror.record(&fetch(1, sequence, ARENA, 8)).unwrap();
            let tail = words.load_u64(session::RING_TAIL, Ordering::Relaxed);
            words.store_u64(session::RING_HEAD, tail, Ordering::Relaxed);
        }
        sequence
    }

    // Promise: V23
    #[test]
    fn full_mirror_accepts_frames_once_no_more_results_can_come() {
        let mut failed = mirror();
        let sequence = fill(&mut failed);
        failed.words().store_u32(session::STICKY, 700, Ordering::Release);
        sent(&mut failed);
        assert!(!failed.is_full(), "nothing is completed after a failure");
        failed.record(&fetch(1, sequence + 1, ARENA, 8)).unwrap();
        assert_eq!(failed.results, limits::STREAM_RESULTS, "nor is more due");

        let mut lost = mirror();
        fill(&mut lost);
        lost.words().store_u32(session::STATE, session::LOST, Ordering::Release);
        sent(&mut lost);
        assert!(!lost.is_full(), "nothing is published without a worker");

        let mut ended = mirror();
        fill(&mut ended);
        ended.end(46);
        assert!(!ended.is_full(), "whatever the page says");
    }

    // Promise: V23
    #[test]
    fn pending_results_stay_bounded_with_a_hostile_guest_or_worker() {
        let mut mirror = mirror();
        let words = mirror.words();
        let sequence = fill(&mut mirror);
        assert_eq!(sequence, limits::STREAM_RESULTS as u64);
        // For a guest that does not read, no more changes are found.
        session::set_completed(&words, 1, 5);
        assert!(mirror.look());
        let found = mirror.out.len();
        session::set_completed(&words, 1, sequence);
        assert!(mirror.look());
        assert_eq!(mirror.out.len(), found);
        assert_eq!(sent(&mut mirror).len(), found);
        assert_eq!(sent(&mut mirror).len(), limits::STREAM_RESULTS - 5 + 1);
        assert!(!mirror.is_full());

        assert!(matches!(mirror.record(&[0; 40]), Err(RecordError::Size(40))));
        let mut full = Ok(false);
        for _ in 0..=limits::RING_BYTES / 40 {
            full = mirror.record(&fetch(2, 1, ARENA, 0));
            if full.is_err() {
                break;
            }
        }
        assert!(matches!(full, Err(RecordError::Ring(Full))), "more than the ring holds");
        words.store_u32(session::STATE, session::LOST, Ordering::Release);
        assert!(mirror.look() && sent(&mut mirror).len() == 1);
        words.store_u32(session::STATE, session::READY, Ordering::Release);
        session::set_completed(&words, 2, 1);
        assert!(mirror.is_over() && !mirror.look(), "lost is lost");
    }
}
