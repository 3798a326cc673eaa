//! Markers in flight: for each stream slot a queue from the thread that submits to the thread that polls for completion. In one file: the
//! loom tests prove it as a whole.
//!
//! A marker is an event recorded directly behind the work of a sequence. The queues have one producer and one consumer each,
//! have room for as many markers as a stream has credits (so they cannot overflow), and return the events the same way. Pieces without
//! a marker of their own leave only a ticket. Nothing here allocates once a stream was used.

use core::sync::atomic::Ordering;
#[cfg(not(all(test, loom)))]
use core::sync::atomic::{AtomicU64, fence};
#[cfg(all(test, loom))]
use model::{AtomicU64, fence};
use sluice_protocol::limits;
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use crate::{session::objects::ContextRef, submit::time::SequenceTicket};
use sluice_driver::{Handle, Rows};

/// A recorded event and its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marker {
    pub(crate) sequence: u64,
    /// 0 for no event: the work was waited for already because no event could be recorded.
    pub(crate) event: Handle,
    pub(crate) context: ContextRef,
    /// The work or wait that ends with it.
    pub(crate) ticket: SequenceTicket,
    /// The number of earlier pieces that end with it; their tickets were staged.
    pub(crate) staged: u64,
}

impl Marker {
    /// True if an event shows when it is reached; otherwise it is reached from the start.
    pub(crate) const fn has_event(&self) -> bool {
        self.event != 0
    }
}

/// Words of a marker in a queue.
const WORDS_EACH: usize = 6;
/// One marker for each credit, and some for the markers before work that waits for another stream.
const LENGTH: u64 = limits::STREAM_CREDITS + 8;
const _: () =
    assert!(limits::STREAM_CREDITS + LENGTH <= limits::DRIVER_QUEUE, "no work waits for room by default");

/// A single-producer single-consumer queue of markers.
#[derive(Debug)]
struct FenceQueue {
    head: AtomicU64,
    tail: AtomicU64,
    entries: Box<[[AtomicU64; WORDS_EACH]]>,
}

impl FenceQueue {
    fn new() -> FenceQueue {
        let entries = (0..LENGTH).map(|_| core::array::from_fn(|_| AtomicU64::new(0))).collect();
        FenceQueue { head: AtomicU64::new(0), tail: AtomicU64::new(0), entries }
    }

    fn entry(&self, position: u64) -> &[AtomicU64; WORDS_EACH] {
        // The remainder is below the length of the box.
        let index = (position % LENGTH) as usize;
        &self.entries[index]
    }

    /// Appends a marker; returns `false` if the queue is full. Producer only.
    fn push(&self, marker: Marker) -> bool {
        let tail = self.tail.load(Ordering::Relaxed);
        if tail - self.head.load(Ordering::Acquire) >= LENGTH {
            return false;
        }
        let [sequence, event, handle, serial, ticket, staged] = self.entry(tail);
        sequence.store(marker.sequence, Ordering::Relaxed);
        event.store(marker.event, Ordering::Relaxed);
        handle.store(marker.context.handle, Ordering::Relaxed);
        serial.store(marker.context.serial, Ordering::Relaxed);
        ticket.store(marker.ticket.bits(), Ordering::Relaxed);
        staged.store(marker.staged, Ordering::Relaxed);
        self.tail.store(tail + 1, Ordering::Release);
        true
    }

    fn len(&self) -> u64 {
        // Head first: it never passes the tail, so the difference cannot be negative.
        let head = self.head.load(Ordering::Acquire);
        self.tail.load(Ordering::Acquire) - head
    }

    /// The `ahead`-th marker from the head, below [`FenceQueue::len`].
    fn peek(&self, ahead: u64) -> Marker {
        let [sequence, event, handle, serial, ticket, staged] = self
            .entry(self.head.load(Ordering::Relaxed) + ahead)
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        let ticket = SequenceTicket::from_bits(ticket);
        Marker { sequence, event, context: ContextRef { handle, serial }, ticket, staged }
    }

    /// Removes the head. Consumer only.
    fn advance(&self) {
        let head = self.head.load(Ordering::Relaxed);
        self.head.store(head + 1, Ordering::Release);
    }

    fn pop(&self) -> Option<Marker> {
        (self.len() > 0).then(|| {
            let marker = self.peek(0);
            self.advance();
            marker
        })
    }
}

/// The tickets of pieces without a marker of their own, oldest first. The marker with which they end hands them over.
#[derive(Debug)]
struct StagedTickets {
    /// Tickets ever removed.
    taken: AtomicU64,
    /// Tickets ever added, and those of them that a marker has handed over. Producer only.
    added: AtomicU64,
    handed: AtomicU64,
    entries: Box<[AtomicU64]>,
}

impl StagedTickets {
    fn new() -> StagedTickets {
        let zero = || AtomicU64::new(0);
        StagedTickets {
            taken: zero(),
            added: zero(),
            handed: zero(),
            entries: (0..LENGTH).map(|_| zero()).collect(),
        }
    }

    fn entry(&self, position: u64) -> &AtomicU64 {
        // The remainder is below the length of the box.
        &self.entries[(position % LENGTH) as usize]
    }

    fn add(&self, ticket: SequenceTicket) -> bool {
        let added = self.added.load(Ordering::Relaxed);
        if added - self.taken.load(Ordering::Acquire) >= LENGTH {
            return false;
        }
        self.entry(added).store(ticket.bits(), Ordering::Relaxed);
        self.added.store(added + 1, Ordering::Relaxed);
        true
    }

    /// The number of tickets for the next marker. Producer only.
    fn waiting(&self) -> u64 {
        self.added.load(Ordering::Relaxed) - self.handed.load(Ordering::Relaxed)
    }

    /// Records that a marker has the tickets that waited for one. Producer only.
    fn hand_over(&self) {
        self.handed.store(self.added.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn peek(&self, count: u64) -> impl Iterator<Item = SequenceTicket> + '_ {
        let taken = self.taken.load(Ordering::Relaxed);
        let entries = (taken..taken + count).map(|position| self.entry(position));
        entries.map(|entry| SequenceTicket::from_bits(entry.load(Ordering::Relaxed)))
    }

    fn take(&self, count: u64) {
        self.taken.store(self.taken.load(Ordering::Relaxed) + count, Ordering::Release);
    }
}

/// The markers of one stream slot.
#[derive(Debug)]
pub(crate) struct StreamFences {
    pending: FenceQueue,
    returned: FenceQueue,
    staged: StagedTickets,
    /// The write-backs to gathered guest pages that are due once the work of a sequence is complete. Never more than the stream
    /// has credits, and none in a session without such pages.
    write_backs: Mutex<VecDeque<WriteBack>>,
    /// The number of write-backs, so that a session without any takes no lock.
    deferred: AtomicU64,
    /// Waits that were submitted, and those that are over. Work behind one that is not over is held.
    waits: AtomicU64,
    over: AtomicU64,
    /// The number of markers in flight that the consumer has passed on its way to the first wait that is not over.
    ahead: AtomicU64,
    /// The time at which the stream could begin with the work that was submitted while it was empty, or behind a wait; and the
    /// time at which work of it last ended.
    started: AtomicU64,
    last: AtomicU64,
}

/// Bytes that the driver copies to private memory, to be copied on to the guest's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WriteBack {
    sequence: u64,
    to: u64,
    rows: Rows,
}

impl StreamFences {
    /// The number of markers in flight.
    pub(crate) fn pending(&self) -> u64 {
        self.pending.len()
    }

    /// A marker in flight; the oldest is 0. Consumer only.
    pub(crate) fn peek(&self, ahead: u64) -> Marker {
        self.pending.peek(ahead)
    }

    /// Removes the oldest marker and returns its event for reuse, if it has one. Consumer only.
    pub(crate) fn retire(&self) {
        let marker = self.pending.peek(0);
        self.drop_oldest();
        if !marker.has_event() {
            return;
        }
        let returned = self.returned.push(marker);
        debug_assert!(returned, "no more events exist than fit");
    }

    /// The tickets of the pieces that end with the oldest marker, except its own. Consumer only.
    pub(crate) fn staged(&self) -> impl Iterator<Item = SequenceTicket> + '_ {
        self.staged.peek(self.pending.peek(0).staged)
    }

    /// Adds the ticket of a piece that ends with the next marker; returns `false` if there is no room. Producer only.
    pub(crate) fn stage(&self, ticket: SequenceTicket) -> bool {
        self.staged.add(ticket)
    }

    /// Removes the oldest marker with its tickets; its event is the caller's. Consumer only.
    pub(crate) fn drop_oldest(&self) {
        self.staged.take(self.pending.peek(0).staged);
        self.pending.advance();
        self.ahead.store(self.ahead().saturating_sub(1), Ordering::Relaxed);
    }

    /// True if work submitted now stands behind a wait. Producer only.
    pub(crate) fn is_held(&self) -> bool {
        self.waits.load(Ordering::Relaxed) != self.over.load(Ordering::Acquire)
    }

    /// Records the submission of a wait. Producer only.
    pub(crate) fn hold(&self) {
        self.waits.store(self.waits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Records the end of a wait. Consumer only.
    pub(crate) fn release(&self) {
        self.over.store(self.over.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// The number of markers that were passed. Consumer only.
    pub(crate) fn ahead(&self) -> u64 {
        self.ahead.load(Ordering::Relaxed)
    }

    /// Passes one more marker. Consumer only.
    pub(crate) fn pass(&self) {
        self.ahead.store(self.ahead() + 1, Ordering::Relaxed);
    }

    /// Sets the time at which the stream can begin with the next work. Called by the producer while no work is in flight,
    /// otherwise by the consumer.
    pub(crate) fn start(&self, at: u64) {
        self.started.store(at, Ordering::Release);
    }

    /// The time at which the stream could begin with the oldest work that did not end. Consumer only.
    pub(crate) fn started(&self) -> u64 {
        self.started.load(Ordering::Acquire).max(self.last.load(Ordering::Relaxed))
    }

    /// Records the end of work at `at`. Consumer only.
    pub(crate) fn end(&self, at: u64) {
        self.last.store(at, Ordering::Relaxed);
    }

    fn write_backs(&self) -> MutexGuard<'_, VecDeque<WriteBack>> {
        self.write_backs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Defers a write-back until its work is complete. Producer only, before the work's marker is pushed.
    pub(crate) fn defer_write_back(&self, sequence: u64, to: u64, rows: Rows) {
        let mut write_backs = self.write_backs();
        write_backs.push_back(WriteBack { sequence, to, rows });
        self.deferred.store(write_backs.len() as u64, Ordering::Relaxed);
    }

    /// True if a write-back is deferred. Producer only.
    pub(crate) fn has_write_backs(&self) -> bool {
        self.deferred.load(Ordering::Relaxed) > 0
    }

    /// Makes the deferred write-backs up to a sequence that is complete and not published yet. Consumer only.
    pub(crate) fn settle(&self, sequence: u64, mut deliver: impl FnMut(u64, Rows)) {
        // A write-back is recorded before the marker of its work is pushed.
        if self.deferred.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut write_backs = self.write_backs();
        while let Some(delivery) = write_backs.pop_front_if(|delivery| delivery.sequence <= sequence) {
            deliver(delivery.to, delivery.rows);
        }
        self.deferred.store(write_backs.len() as u64, Ordering::Relaxed);
    }

    /// An event that can be recorded again. Producer only.
    pub(crate) fn recycled(&self) -> Option<Marker> {
        self.returned.pop()
    }
}

const WORDS: usize = (limits::STREAMS as usize).div_ceil(64);

/// The queues of all stream slots, and the set of those with markers in flight.
#[derive(Debug)]
pub(crate) struct InFlightFences {
    /// Boxed, because few slots are ever used, and every session's start clears the table.
    fences: Box<[OnceLock<Box<StreamFences>>]>,
    active: [AtomicU64; WORDS],
    /// Operations that the driver takes for one stream before it makes its caller wait.
    driver_queue: u64,
}

impl InFlightFences {
    pub(crate) fn new(driver_queue: u64) -> InFlightFences {
        InFlightFences {
            // A piece of work and its marker.
            driver_queue: driver_queue.max(2),
            fences: (0..limits::STREAMS).map(|_| OnceLock::new()).collect(),
            active: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Pieces of work of one stream that the driver takes together with their markers, and one marker before work that waits for another
    /// stream, without making its caller wait.
    pub(crate) const fn room(&self) -> u64 {
        let pieces = (self.driver_queue - 1) / 2;
        if pieces == 0 { 1 } else { pieces }
    }

    /// True if the marker before work that waits for another stream fits beside the pieces.
    pub(crate) const fn has_spare(&self) -> bool {
        self.driver_queue > 2 * self.room()
    }

    /// The queues of a slot. Slots are checked when they are bound.
    pub(crate) fn of(&self, slot: u32) -> &StreamFences {
        self.fences[slot as usize].get_or_init(|| {
            Box::new(StreamFences {
                pending: FenceQueue::new(),
                returned: FenceQueue::new(),
                staged: StagedTickets::new(),
                write_backs: Mutex::default(),
                deferred: AtomicU64::new(0),
                waits: AtomicU64::new(0),
                over: AtomicU64::new(0),
                ahead: AtomicU64::new(0),
                started: AtomicU64::new(0),
                last: AtomicU64::new(0),
            })
        })
    }

    /// Hands a marker with the staged tickets to the completion side; returns `false` if the queue is full. Producer only.
    pub(crate) fn push(&self, slot: u32, marker: Marker) -> bool {
        let stream_fences = self.of(slot);
        let staged = stream_fences.staged.waiting();
        let pushed = stream_fences.pending.push(Marker { staged, ..marker });
        if pushed {
            stream_fences.staged.hand_over();
        }
        let (word, bit) = (&self.active[slot as usize / 64], 1 << (slot % 64));
        // The consumer clears the bit, executes a fence, and checks the queue once more; the producer stores the marker,
        // executes a fence, and checks the bit. At least one of the two sees the other's store, so no marker is left without a
        // bit.
        fence(Ordering::SeqCst);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::SeqCst);
        }
        pushed
    }

    /// True if any marker is in flight.
    pub(crate) fn is_pending(&self) -> bool {
        self.active.iter().any(|word| word.load(Ordering::SeqCst) != 0)
    }

    /// True if a marker of another slot is in flight.
    pub(crate) fn is_pending_beside(&self, slot: u32) -> bool {
        (0_u32..).zip(&self.active).any(|(index, word)| {
            let own = if index == slot / 64 { 1 << (slot % 64) } else { 0 };
            word.load(Ordering::SeqCst) & !own != 0
        })
    }

    /// Visits every stream that may have markers in flight; `visit` retires the complete ones. Consumer only.
    pub(crate) fn for_each_pending(&self, mut visit: impl FnMut(u32, &StreamFences)) {
        for (index, word) in (0_u32..).zip(&self.active) {
            let mut bits = word.load(Ordering::SeqCst);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let slot = index * 64 + bit;
                let stream_fences = self.of(slot);
                visit(slot, stream_fences);
                if stream_fences.pending() == 0 {
                    word.fetch_and(!(1 << bit), Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    if stream_fences.pending() != 0 {
                        word.fetch_or(1 << bit, Ordering::SeqCst);
                    }
                }
            }
        }
    }

    /// True if a marker of a context is in flight. Producer only: it made the markers in flight.
    pub(crate) fn uses(&self, context: ContextRef) -> bool {
        self.fences.iter().filter_map(OnceLock::get).any(|stream_fences| {
            (0..stream_fences.pending.len()).any(|ahead| stream_fences.pending.peek(ahead).context == context)
        })
    }

    /// Takes the returned events of `context`, which is being destroyed; passes the others to `keep`. Producer only.
    pub(crate) fn purge(&self, context: ContextRef, mut keep: impl FnMut(Marker)) {
        for stream_fences in self.fences.iter().filter_map(OnceLock::get) {
            while let Some(marker) = stream_fences.returned.pop() {
                if marker.context != context {
                    keep(marker);
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn marker(sequence: u64) -> Marker {
        let context = ContextRef { handle: 1, serial: 1 };
        Marker { sequence, event: sequence + 1000, context, ticket: SequenceTicket::default(), staged: 0 }
    }

    #[test]
    fn markers_keep_their_order_and_events_are_reused() {
        let fences = InFlightFences::new(limits::DRIVER_QUEUE);
        for sequence in 1..=LENGTH {
            assert!(fences.push(5, marker(sequence)));
        }
        assert!(!fences.push(5, marker(LENGTH + 1)), "the queue is as long as a stream has credits");
        let mut seen = Vec::new();
        fences.for_each_pending(|slot, stream_fences| {
            assert_eq!(slot, 5);
            while stream_fences.pending() > 0 {
                seen.push(stream_fences.peek(0).sequence);
                stream_fences.retire();
            }
        });
        assert_eq!(seen, (1..=LENGTH).collect::<Vec<_>>());
        assert!(!fences.is_pending());
        assert_eq!(fences.of(5).recycled().map(|marker| marker.event), Some(1001));
    }

    #[test]
    fn staged_tickets_end_with_the_next_marker_and_make_room() {
        let fences = InFlightFences::new(limits::DRIVER_QUEUE);
        let stream_fences = fences.of(3);
        for round in 1..=2 * LENGTH {
            let staged = round % 4;
            for piece in 1..=staged {
                assert!(stream_fences.stage(SequenceTicket::known(10 * round + piece)));
            }
            assert!(fences.push(3, marker(round)));
            let tickets: Vec<_> = stream_fences.staged().map(SequenceTicket::estimate).collect();
            assert_eq!(tickets, (1..=staged).map(|piece| 10 * round + piece).collect::<Vec<_>>());
            stream_fences.retire();
            while stream_fences.recycled().is_some() {}
        }
        for piece in 1..=LENGTH {
            assert!(stream_fences.stage(SequenceTicket::known(piece)));
        }
        assert!(!stream_fences.stage(SequenceTicket::known(1)), "as many as a stream has credits");
    }

    #[test]
    fn stream_held_back_does_not_hide_another() {
        let fences = InFlightFences::new(limits::DRIVER_QUEUE);
        fences.push(0, marker(1));
        fences.push(1023, marker(1));
        let mut visited = Vec::new();
        fences.for_each_pending(|slot, stream_fences| {
            visited.push(slot);
            if slot == 1023 {
                stream_fences.retire();
            }
        });
        assert_eq!(visited, [0, 1023]);
        assert!(fences.is_pending());
        visited.clear();
        fences.for_each_pending(|slot, _| visited.push(slot));
        assert_eq!(visited, [0]);
    }

    #[test]
    fn context_that_is_destroyed_leaves_no_event() {
        let fences = InFlightFences::new(limits::DRIVER_QUEUE);
        let (dead, live) = (ContextRef { handle: 1, serial: 1 }, ContextRef { handle: 1, serial: 2 });
        fences.push(0, Marker { context: dead, ..marker(1) });
        fences.push(0, Marker { context: live, ..marker(2) });
        assert!(fences.uses(dead));
        fences.for_each_pending(|_, stream_fences| {
            stream_fences.retire();
            stream_fences.retire();
        });
        assert!(!fences.uses(dead));
        let mut kept = Vec::new();
        fences.purge(dead, |marker| kept.push(marker.context));
        assert_eq!(kept, [live]);
        assert_eq!(fences.of(0).recycled(), None);
    }

    #[test]
    fn threads_lose_no_marker() {
        const COUNT: u64 = 100_000;
        let fences = InFlightFences::new(limits::DRIVER_QUEUE);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut events = 0;
                for sequence in 1..=COUNT {
                    while events == LENGTH && fences.of(7).recycled().is_none() {
                        std::thread::yield_now();
                    }
                    events = (events + 1).min(LENGTH);
                    assert!(fences.push(7, marker(sequence)), "no more markers than events");
                }
            });
            let mut last = 0;
            while last < COUNT {
                // A marker missed here would be missed for ever: only the bit leads to the queue.
                fences.for_each_pending(|_, stream_fences| {
                    while stream_fences.pending() > 0 {
                        let sequence = stream_fences.peek(0).sequence;
                        assert_eq!(sequence, last + 1);
                        last = sequence;
                        stream_fences.retire();
                    }
                });
            }
        });
        assert!(!fences.is_pending());
    }
}

/// Model checks: every interleaving of a producer and a consumer, and every stale value that the memory model allows.
#[cfg(all(test, loom))]
mod model {
    use super::{ContextRef, InFlightFences, Marker, Ordering, SequenceTicket, limits};
    pub(super) use loom::sync::atomic::AtomicU64;
    use std::sync::{Arc, atomic::AtomicBool};

    /// True to leave the fences out, which the model has to notice: a check that cannot fail proves nothing.
    static BROKEN: AtomicBool = AtomicBool::new(false);

    pub(super) fn fence(order: Ordering) {
        if !BROKEN.load(Ordering::Relaxed) {
            loom::sync::atomic::fence(order);
        }
    }

    const SLOT: u32 = 7;

    fn marker(sequence: u64) -> Marker {
        let context = ContextRef { handle: 1, serial: 1 };
        Marker { sequence, event: sequence + 1000, context, ticket: SequenceTicket::default(), staged: 0 }
    }

    /// Retires all markers that the set of active streams leads to; returns their sequences.
    fn retire(fences: &InFlightFences) -> Vec<u64> {
        let mut seen = Vec::new();
        fences.for_each_pending(|_, stream| {
            while stream.pending() > 0 {
                let marker = stream.peek(0);
                assert_eq!(marker.event, marker.sequence + 1000, "a marker of two sequences");
                for ticket in stream.staged() {
                    assert_eq!(ticket.estimate(), marker.sequence, "the ticket of another marker");
                }
                seen.push(marker.sequence);
                stream.retire();
            }
        });
        seen
    }

    /// A producer pushes markers beside a consumer that retires; afterwards each marker is found once, in order.
    fn no_marker_is_lost() {
        let fences = Arc::new(InFlightFences::new(limits::DRIVER_QUEUE));
        assert!(fences.push(SLOT, marker(1)));
        let producer = Arc::clone(&fences);
        let thread = loom::thread::spawn(move || {
            assert!(producer.of(SLOT).stage(SequenceTicket::known(2)));
            assert!(producer.push(SLOT, marker(2)));
            assert!(producer.push(SLOT, marker(3)));
        });
        let mut seen = retire(&fences);
        thread.join().unwrap();
        seen.extend(retire(&fences));
        assert_eq!(seen, [1, 2, 3]);
        assert!(!fences.is_pending());
    }

    /// An event comes back to the producer with the marker that it was pushed with.
    fn events_come_back() {
        let fences = Arc::new(InFlightFences::new(limits::DRIVER_QUEUE));
        assert!(fences.push(SLOT, marker(1)));
        let consumer = Arc::clone(&fences);
        let thread = loom::thread::spawn(move || retire(&consumer));
        let early = fences.of(SLOT).recycled();
        assert!(early.is_none_or(|marker| (marker.sequence, marker.event) == (1, 1001)));
        assert_eq!(thread.join().unwrap(), [1]);
        let late = fences.of(SLOT).recycled();
        assert_eq!(early.or(late).map(|marker| marker.event), Some(1001));
        assert!(early.is_none() || late.is_none());
    }

    // One test, because the models share the switch.
    #[test]
    fn loom_markers_in_flight_are_found_once_and_not_without_fences() {
        loom::model(no_marker_is_lost);
        loom::model(events_come_back);
        BROKEN.store(true, Ordering::Relaxed);
        let noticed = std::panic::catch_unwind(|| loom::model(no_marker_is_lost));
        assert!(noticed.is_err(), "the fences do not matter to the model");
    }
}
