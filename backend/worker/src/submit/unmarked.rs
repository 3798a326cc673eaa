//! The work behind the last marker of each stream, and the moments at which it gets one.
//!
//! A marker is an event of the driver directly behind the work that it marks; it costs two calls of the driver and stands between two
//! kernels. So a launch gets one only if there is a reason:
//!
//! ```text
//!                 launch                      launch: joins the open work
//!              ┌──────────┐                  ┌────┐
//!              │          ▼                  │    ▼
//!        ┌─────┴────┐   ┌───────────────────────────┐   other work, or a launch that        ┌─────────────────┐
//!   ───► │  marked  │   │  open: nothing asks for   │ ─ needs a marker of its own ────────► │ due: the marker │
//!        └──────────┘   │  the end of this work     │                                       │ stands directly │
//!          ▲      ▲     └─────────────┬─────────────┘   work that takes no time joins ────► │ behind this work│
//!          │      │                   │                                                     └────────┬────────┘
//!          │      └── a request (`mark`); enough work, by number or by estimate; work to which the    │
//!          │          stream's work is an order for others; no record for a while; no permit          │
//!          └───────── the next work that takes time, or work of another stream; an empty ring ────────┘
//! ```
//!
//! - A wait never includes work that was posted after its request: a guest asks for the end of its launches by a place in the ring, and
//!   other work is due, so its marker precedes all later work.
//! - A marker orders nothing that the work did not order: an event in the legacy default stream waits for the blocking streams of its
//!   context, and they for it, so open work of the one is marked before work of the other.
//! - Work that holds its stream, such as a wait or a function of the guest, or that other work follows in an order which the guest can
//!   observe, is never behind open work of its stream.
//! - While other VMs request the device, an empty ring ends open work, too, and less of it is enough: a turn ends with its work.
//!
//! [`Unmarked`] decides and calls nothing.

use crate::submit::{
    WorkTarget,
    time::{MarkerInterval, SequenceTicket},
};

/// The work behind the last marker of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnmarkedWork {
    pub(super) target: WorkTarget,
    /// The last sequence, and the index of the guest's context that posted it.
    pub(super) sequence: u64,
    pub(super) owner: u32,
    /// The ticket of the last piece that takes time. Those of earlier pieces are staged.
    pub(super) ticket: SequenceTicket,
    /// Its pieces, and the sum of their estimates in microseconds.
    pieces: u32,
    estimate: u64,
    is_due: bool,
}

/// The properties of a piece of work that decide on markers.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkPiece {
    pub(super) target: WorkTarget,
    /// It may complete later than the work before it in its stream.
    pub(super) takes_time: bool,
    /// Its marker may be that of later work.
    pub(super) may_wait: bool,
    /// Earlier work of its stream is marked before it.
    pub(super) stands_apart: bool,
    /// Its stream waits for all work of its context.
    pub(super) follows_context: bool,
}

/// The work behind the last markers of all streams.
#[derive(Debug)]
pub(super) struct Unmarked {
    /// Oldest first. Few, so that a search costs little.
    streams: Vec<UnmarkedWork>,
}

/// Limit on streams with unmarked work.
const STREAMS: usize = 32;

impl UnmarkedWork {
    pub(super) const fn pieces(&self) -> u32 {
        self.pieces
    }
}

impl Unmarked {
    pub(super) fn new() -> Unmarked {
        Unmarked { streams: Vec::with_capacity(STREAMS) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// The number of pieces of a stream.
    pub(super) fn pieces(&self, slot: u32) -> u32 {
        self.of(slot).map_or(0, |work| work.pieces)
    }

    fn of(&self, slot: u32) -> Option<&UnmarkedWork> {
        self.streams.iter().find(|work| work.target.slot == slot)
    }

    /// Removes work that must be marked before the next piece is submitted, if there is any.
    pub(super) fn before(&mut self, next: &WorkPiece) -> Option<UnmarkedWork> {
        let target = next.target;
        let mut is_open = false;
        let must = |work: &UnmarkedWork| {
            let of = work.target;
            if of.slot == target.slot {
                is_open = true;
                return next.stands_apart || (work.is_due && next.takes_time);
            }
            let orders = next.follows_context || of.order.waits_for(target.order);
            work.is_due || (orders && of.context == target.context)
        };
        match self.streams.iter().position(must) {
            Some(at) => Some(self.streams.remove(at)),
            None if !is_open && self.streams.len() >= STREAMS => Some(self.streams.remove(0)),
            None => None,
        }
    }

    /// Adds a piece that was submitted. `ticket` is that of a piece that takes time. Returns the ticket of the piece before it, which
    /// ends with the same marker.
    pub(super) fn after(
        &mut self,
        piece: &WorkPiece,
        (sequence, owner): (u64, u32),
        ticket: Option<SequenceTicket>,
    ) -> Option<SequenceTicket> {
        let target = piece.target;
        let estimate = ticket.map_or(0, SequenceTicket::estimate);
        let Some(work) = self.streams.iter_mut().find(|work| work.target.slot == target.slot) else {
            let ticket = ticket.unwrap_or(SequenceTicket::nothing(target.device));
            let is_due = !piece.may_wait;
            self.streams.push(UnmarkedWork { target, sequence, owner, ticket, pieces: 1, estimate, is_due });
            return None;
        };
        (work.target, work.sequence, work.owner) = (target, sequence, owner);
        work.pieces += 1;
        work.estimate = work.estimate.saturating_add(estimate);
        work.is_due |= !piece.may_wait;
        ticket.map(|ticket| core::mem::replace(&mut work.ticket, ticket)).filter(|before| before.is_work())
    }

    /// Removes the work of a stream if it is enough for a marker.
    pub(super) fn enough(&mut self, slot: u32, interval: MarkerInterval) -> Option<UnmarkedWork> {
        self.take(|work| {
            work.target.slot == slot && (work.pieces >= interval.pieces || work.estimate >= interval.estimate)
        })
    }

    /// Removes the work of a stream.
    pub(super) fn of_stream(&mut self, slot: u32) -> Option<UnmarkedWork> {
        self.take(|work| work.target.slot == slot)
    }

    /// Removes work that is due, or on a device that is shared.
    pub(super) fn due(&mut self, is_shared: impl Fn(u8) -> bool) -> Option<UnmarkedWork> {
        self.take(|work| work.is_due || is_shared(work.target.device))
    }

    /// Removes the oldest work.
    pub(super) fn any(&mut self) -> Option<UnmarkedWork> {
        self.take(|_| true)
    }

    /// True if there is work that `is` holds for.
    pub(super) fn contains(&self, is: impl Fn(&WorkTarget) -> bool) -> bool {
        self.streams.iter().any(|work| is(&work.target))
    }

    fn take(&mut self, is: impl Fn(&UnmarkedWork) -> bool) -> Option<UnmarkedWork> {
        let at = self.streams.iter().position(is)?;
        Some(self.streams.remove(at))
    }
}
