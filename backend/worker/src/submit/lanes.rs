//! Markers under way: for each stream slot a queue from the thread that submits to the one that looks for completion.
//!
//! A marker is an event recorded directly behind the work of a sequence. The queues have one producer and one consumer each,
//! have room for all that a stream has credits for (so they cannot overflow), and give the events back the same way. Nothing
//! here allocates once a stream was used.

use core::sync::atomic::{AtomicU64, Ordering, fence};
use sluice_protocol::limits;
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use crate::submit::time::Ticket;
use sluice_driver::{Handle, Rows};

/// A context of the driver, named so that one that came later at the same address is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContextRef {
    pub(crate) handle: Handle,
    pub(crate) serial: u64,
}

/// A recorded event and what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marker {
    pub(crate) sequence: u64,
    /// 0, which is no event, where the work was waited for already because no event could be recorded.
    pub(crate) event: Handle,
    pub(crate) context: ContextRef,
    /// What ends with it.
    pub(crate) ticket: Ticket,
}

impl Marker {
    /// Whether an event tells when it is reached; else it is reached from the start.
    pub(crate) const fn has_event(&self) -> bool {
        self.event != 0
    }
}

/// One marker for each credit, and some that stand before work that waits for another stream.
const LENGTH: u64 = limits::STREAM_CREDITS + 8;

/// A single-producer single-consumer queue of markers.
#[derive(Debug)]
struct Queue {
    head: AtomicU64,
    tail: AtomicU64,
    entries: Box<[[AtomicU64; 5]]>,
}

impl Queue {
    fn new() -> Queue {
        let entries = (0..LENGTH).map(|_| [const { AtomicU64::new(0) }; 5]).collect();
        Queue { head: AtomicU64::new(0), tail: AtomicU64::new(0), entries }
    }

    fn entry(&self, position: u64) -> &[AtomicU64; 5] {
        // The remainder is below the length of the box.
        let index = (position % LENGTH) as usize;
        &self.entries[index]
    }

    /// Appends; `false` when the queue is full. Producer only.
    fn push(&self, marker: Marker) -> bool {
        let tail = self.tail.load(Ordering::Relaxed);
        if tail - self.head.load(Ordering::Acquire) >= LENGTH {
            return false;
        }
        let [sequence, event, handle, serial, ticket] = self.entry(tail);
        sequence.store(marker.sequence, Ordering::Relaxed);
        event.store(marker.event, Ordering::Relaxed);
        handle.store(marker.context.handle, Ordering::Relaxed);
        serial.store(marker.context.serial, Ordering::Relaxed);
        ticket.store(marker.ticket.bits(), Ordering::Relaxed);
        self.tail.store(tail + 1, Ordering::Release);
        true
    }

    fn len(&self) -> u64 {
        // Head first: it never passes the tail, so the difference cannot be negative.
        let head = self.head.load(Ordering::Acquire);
        self.tail.load(Ordering::Acquire) - head
    }

    /// The `ahead`-th from the head, of those counted by [`Queue::len`].
    fn peek(&self, ahead: u64) -> Marker {
        let [sequence, event, handle, serial, ticket] = self
            .entry(self.head.load(Ordering::Relaxed) + ahead)
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        let ticket = Ticket::from_bits(ticket);
        Marker { sequence, event, context: ContextRef { handle, serial }, ticket }
    }

    /// Drops the head. Consumer only.
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

/// The markers of one stream slot.
#[derive(Debug)]
pub(crate) struct Lane {
    pending: Queue,
    returned: Queue,
    /// What is to be delivered to guest pages that are gathered, once the work of a sequence is done. No longer than a
    /// stream has credits, and empty in a session that has no such pages.
    owed: Mutex<VecDeque<Delivery>>,
    /// How many those are, so that a session without takes no lock.
    owing: AtomicU64,
    /// Waits that were submitted, and those of them that are over. Work behind one that is not over is held.
    waits: AtomicU64,
    over: AtomicU64,
    /// How many of the markers under way the consumer has passed on its way to the first wait that is not over.
    ahead: AtomicU64,
    /// When the stream could begin with what was submitted while it was empty, or behind a wait; and when something of it ended
    /// last.
    started: AtomicU64,
    last: AtomicU64,
}

/// Bytes that the driver copies to private memory, and that the guest is to find in its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Delivery {
    sequence: u64,
    to: u64,
    rows: Rows,
}

impl Lane {
    /// Number of markers under way.
    pub(crate) fn pending(&self) -> u64 {
        self.pending.len()
    }

    /// A marker under way, the oldest being 0. Consumer only.
    pub(crate) fn peek(&self, ahead: u64) -> Marker {
        self.pending.peek(ahead)
    }

    /// Takes the oldest marker off and gives its event back, if it has one. Consumer only.
    pub(crate) fn retire(&self) {
        let marker = self.pending.peek(0);
        self.drop_oldest();
        if !marker.has_event() {
            return;
        }
        let returned = self.returned.push(marker);
        debug_assert!(returned, "no more events exist than fit");
    }

    /// Takes the oldest marker off; its event is the caller's. Consumer only.
    pub(crate) fn drop_oldest(&self) {
        self.pending.advance();
        self.ahead.store(self.ahead().saturating_sub(1), Ordering::Relaxed);
    }

    /// Whether what is submitted now stands behind a wait. Producer only.
    pub(crate) fn is_held(&self) -> bool {
        self.waits.load(Ordering::Relaxed) != self.over.load(Ordering::Acquire)
    }

    /// A wait was submitted. Producer only.
    pub(crate) fn hold(&self) {
        self.waits.store(self.waits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// A wait is over. Consumer only.
    pub(crate) fn release(&self) {
        self.over.store(self.over.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Markers that were passed. Consumer only.
    pub(crate) fn ahead(&self) -> u64 {
        self.ahead.load(Ordering::Relaxed)
    }

    /// One more was passed. Consumer only.
    pub(crate) fn pass(&self) {
        self.ahead.store(self.ahead() + 1, Ordering::Relaxed);
    }

    /// The stream can begin with what comes next at this time. By the producer while nothing is under way, else by the consumer.
    pub(crate) fn start(&self, at: u64) {
        self.started.store(at, Ordering::Release);
    }

    /// When the stream could begin with the oldest that did not end. Consumer only.
    pub(crate) fn started(&self) -> u64 {
        self.started.load(Ordering::Acquire).max(self.last.load(Ordering::Relaxed))
    }

    /// Something that counts has ended. Consumer only.
    pub(crate) fn end(&self, at: u64) {
        self.last.store(at, Ordering::Relaxed);
    }

    fn owed(&self) -> MutexGuard<'_, VecDeque<Delivery>> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Work was submitted whose results are to be delivered when it is done. Producer only, before its marker is pushed.
    pub(crate) fn owe(&self, sequence: u64, to: u64, rows: Rows) {
        let mut owed = self.owed();
        owed.push_back(Delivery { sequence, to, rows });
        self.owing.store(owed.len() as u64, Ordering::Relaxed);
    }

    /// Delivers what is owed up to a sequence that is done and was not published. Consumer only.
    pub(crate) fn settle(&self, sequence: u64, mut deliver: impl FnMut(u64, Rows)) {
        // What is owed was stored before the marker was pushed that says so.
        if self.owing.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut owed = self.owed();
        while let Some(delivery) = owed.pop_front_if(|delivery| delivery.sequence <= sequence) {
            deliver(delivery.to, delivery.rows);
        }
        self.owing.store(owed.len() as u64, Ordering::Relaxed);
    }

    /// An event that can be recorded again. Producer only.
    pub(crate) fn recycled(&self) -> Option<Marker> {
        self.returned.pop()
    }
}

const WORDS: usize = (limits::STREAMS as usize).div_ceil(64);

/// All lanes, and which of them have markers under way.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Box<[OnceLock<Lane>]>,
    active: [AtomicU64; WORDS],
}

impl Lanes {
    pub(crate) fn new() -> Lanes {
        Lanes {
            lanes: (0..limits::STREAMS).map(|_| OnceLock::new()).collect(),
            active: [const { AtomicU64::new(0) }; WORDS],
        }
    }

    /// The lane of a slot. Slots are checked when they are bound.
    pub(crate) fn lane(&self, slot: u32) -> &Lane {
        self.lanes[slot as usize].get_or_init(|| Lane {
            pending: Queue::new(),
            returned: Queue::new(),
            owed: Mutex::default(),
            owing: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            over: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            started: AtomicU64::new(0),
            last: AtomicU64::new(0),
        })
    }

    /// Hands a marker to the completion side; `false` when the lane is full. Producer only.
    pub(crate) fn push(&self, slot: u32, marker: Marker) -> bool {
        let pushed = self.lane(slot).pending.push(marker);
        let (word, bit) = (&self.active[slot as usize / 64], 1 << (slot % 64));
        // The consumer clears the bit, passes a fence, and looks at the lane a last time; here the marker is stored, a fence
        // passed, and the bit looked at. At least one of the two sees the other's store, so no marker is left without a bit.
        fence(Ordering::SeqCst);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::SeqCst);
        }
        pushed
    }

    /// Whether any marker is under way.
    pub(crate) fn is_pending(&self) -> bool {
        self.active.iter().any(|word| word.load(Ordering::SeqCst) != 0)
    }

    /// Visits every lane that may have markers under way; `visit` retires what it can. Consumer only.
    pub(crate) fn for_each_pending(&self, mut visit: impl FnMut(u32, &Lane)) {
        for (index, word) in (0_u32..).zip(&self.active) {
            let mut bits = word.load(Ordering::SeqCst);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let slot = index * 64 + bit;
                let lane = self.lane(slot);
                visit(slot, lane);
                if lane.pending() == 0 {
                    word.fetch_and(!(1 << bit), Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    if lane.pending() != 0 {
                        word.fetch_or(1 << bit, Ordering::SeqCst);
                    }
                }
            }
        }
    }

    /// Whether a marker of a context is under way. Producer only: entries under way are its own.
    pub(crate) fn uses(&self, context: ContextRef) -> bool {
        self.lanes
            .iter()
            .filter_map(OnceLock::get)
            .any(|lane| (0..lane.pending.len()).any(|ahead| lane.pending.peek(ahead).context == context))
    }

    /// Takes all events that were given back and are of `context`, which is going away; hands the others to `keep`.
    /// Producer only.
    pub(crate) fn purge(&self, context: ContextRef, mut keep: impl FnMut(Marker)) {
        for lane in self.lanes.iter().filter_map(OnceLock::get) {
            while let Some(marker) = lane.returned.pop() {
                if marker.context != context {
                    keep(marker);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marker(sequence: u64) -> Marker {
        let context = ContextRef { handle: 1, serial: 1 };
        Marker { sequence, event: sequence + 1000, context, ticket: Ticket::default() }
    }

    #[test]
    fn markers_keep_their_order_and_events_come_back() {
        let lanes = Lanes::new();
        for sequence in 1..=LENGTH {
            assert!(lanes.push(5, marker(sequence)));
        }
        assert!(!lanes.push(5, marker(LENGTH + 1)), "as long as a stream has credits");
        let mut seen = Vec::new();
        lanes.for_each_pending(|slot, lane| {
            assert_eq!(slot, 5);
            while lane.pending() > 0 {
                seen.push(lane.peek(0).sequence);
                lane.retire();
            }
        });
        assert_eq!(seen, (1..=LENGTH).collect::<Vec<_>>());
        assert!(!lanes.is_pending());
        assert_eq!(lanes.lane(5).recycled().map(|marker| marker.event), Some(1001));
    }

    #[test]
    fn a_lane_held_back_does_not_hide_another() {
        let lanes = Lanes::new();
        lanes.push(0, marker(1));
        lanes.push(1023, marker(1));
        let mut visited = Vec::new();
        lanes.for_each_pending(|slot, lane| {
            visited.push(slot);
            if slot == 1023 {
                lane.retire();
            }
        });
        assert_eq!(visited, [0, 1023]);
        assert!(lanes.is_pending());
        visited.clear();
        lanes.for_each_pending(|slot, _| visited.push(slot));
        assert_eq!(visited, [0]);
    }

    #[test]
    fn a_context_leaves_no_event_behind() {
        let lanes = Lanes::new();
        let (dead, live) = (ContextRef { handle: 1, serial: 1 }, ContextRef { handle: 1, serial: 2 });
        lanes.push(0, Marker { context: dead, ..marker(1) });
        lanes.push(0, Marker { context: live, ..marker(2) });
        assert!(lanes.uses(dead));
        lanes.for_each_pending(|_, lane| {
            lane.retire();
            lane.retire();
        });
        assert!(!lanes.uses(dead));
        let mut kept = Vec::new();
        lanes.purge(dead, |marker| kept.push(marker.context));
        assert_eq!(kept, [live]);
        assert_eq!(lanes.lane(0).recycled(), None);
    }

    #[test]
    fn threads_lose_no_marker() {
        const COUNT: u64 = 100_000;
        let lanes = Lanes::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut events = 0;
                for sequence in 1..=COUNT {
                    while events == LENGTH && lanes.lane(7).recycled().is_none() {
                        std::thread::yield_now();
                    }
                    events = (events + 1).min(LENGTH);
                    assert!(lanes.push(7, marker(sequence)), "no more markers than events");
                }
            });
            let mut last = 0;
            while last < COUNT {
                // What is missed here would be missed for ever: nothing but the bit leads to the lane.
                lanes.for_each_pending(|_, lane| {
                    while lane.pending() > 0 {
                        let sequence = lane.peek(0).sequence;
                        assert_eq!(sequence, last + 1);
                        last = sequence;
                        lane.retire();
                    }
                });
            }
        });
        assert!(!lanes.is_pending());
    }
}
