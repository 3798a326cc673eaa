//! Sessions: the device's state of one guest process that uses CUDA.
//!
//! A session waits for a worker, has one, has one that dies, or has lost it:
//!
//! ```text
//!        new         arrived: a worker             abandon, or lose: hung up, killed after a grace or at once
//!  (none) ──▶ Waiting ────────────────▶ Running ──────────────────────────────────────▶ Dying ◀─┐ abandon, or lose:
//!                │ arrived: no worker,     │ exited: the worker is gone                 │   └───┘ less grace
//!                │ its time is up,         │                                            │ exited
//!                │ or abandon              ▼                                            │
//!                └──────────────────────▶ Lost ◀────────────────────────────────────────┘
//!                                          │ remove_if_over: no owner, and no request that `sluiced` has not answered
//!                                          ▼
//!                                        (none)
//! ```
//! Its attachments are the resources that its worker maps, entry by entry; an entry is occupied from the request to map until
//! the worker reports that it has unmapped, or is gone.
//!
//! Each request to map brings the worker the memory file of the guest. A session with a fixed arena gets no worker's request before
//! it has its arena, and none later: the control resource, with the ring, is the last resource that the worker receives. So
//! a worker has closed every such file before it can read a byte of the guest.

use crate::{page::ControlPages, workers::Worker};
pub use sluice_protocol::session::refusal::{
    DEVICE_UNAVAILABLE as UNAVAILABLE, INVALID_VALUE as INVALID, OUT_OF_MEMORY as EXHAUSTED,
    SYSTEM_DRIVER_MISMATCH as MISMATCH,
};
use sluice_protocol::{limits, session::FIXED_ARENA_SLOT};
use std::{
    collections::{HashMap, VecDeque},
    time::Instant,
};

/// The control resource's entry of the attach table.
pub const CONTROL: u32 = 0;

/// The owner of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionOwner {
    /// A context owns it.
    Context(u32),
    /// The holder of the control resource owns it, if the driver has no contexts.
    Control(u32),
}

impl core::fmt::Display for SessionOwner {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            SessionOwner::Context(id) => write!(f, "context {id}"),
            SessionOwner::Control(id) => write!(f, "control resource {id}"),
        }
    }
}

/// The stage of a session's life.
#[derive(Debug)]
pub enum SessionPhase {
    /// `sluiced` was asked for a worker and may take until this time.
    Waiting(Instant),
    /// The session has a worker.
    Running(Worker),
    /// Its worker was asked to exit and is killed at this time, or was killed (`None`); it still maps its pages.
    Dying(Worker, Option<Instant>),
    /// The session has no worker any more, and its guest was told.
    Lost,
}

/// The state of one attached resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The resource's id.
    pub resource: u32,
    /// The address at which the worker maps it; 0 for the control resource.
    pub address: u64,
    /// The resource's size in bytes.
    pub bytes: u64,
    /// True if the worker was requested to unmap it.
    pub leaving: bool,
}

/// An order for the worker. Orders are sent in sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerOrder {
    /// Map a resource; its first `sent` pieces were sent.
    Attach {
        /// The attach-table entry.
        slot: u32,
        /// Number of pieces sent.
        sent: usize,
    },
    /// Unmap a resource.
    Detach {
        /// The attach-table entry.
        slot: u32,
    },
}

/// The arenas that a session may still attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arenas {
    /// Any number.
    Growing,
    /// One of this many bytes. The worker receives nothing before it.
    Awaited(u64),
    /// None: the fixed arena was attached.
    Complete,
}

impl Arenas {
    /// The arenas of a session of a VM whose arenas have this fixed size, if they have one.
    #[must_use]
    pub fn new(fixed: Option<u64>) -> Arenas {
        fixed.map_or(Arenas::Growing, Arenas::Awaited)
    }
}

/// The state of one session.
#[derive(Debug)]
pub struct SessionState {
    /// The session's owner, until it is gone.
    pub owner: Option<SessionOwner>,
    /// The device's words in its control resource, while the resource exists.
    pub pages: Option<ControlPages>,
    /// The stage of the session's life.
    pub phase: SessionPhase,
    /// The resources that its worker maps, by entry.
    pub attachments: HashMap<u32, Attachment>,
    /// The arenas that it may still attach.
    pub arenas: Arenas,
    /// Orders that are still to be sent to its worker.
    pub orders: VecDeque<WorkerOrder>,
    /// True if a wake came while no thread of the guest waited.
    pub wake_pending: bool,
    /// True if `sluiced` has not answered yet; the session's number is not free before it has.
    pub unanswered: bool,
    /// The time at which a worker that does not unmap as requested is killed.
    pub unmap_deadline: Option<Instant>,
}

/// The CUresult with which an attachment is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachRefusal(pub u32);

impl SessionState {
    /// Creates a session that waits for a worker.
    #[must_use]
    pub fn new(owner: SessionOwner, pages: ControlPages, until: Instant, arenas: Arenas) -> SessionState {
        SessionState {
            owner: Some(owner),
            pages: Some(pages),
            phase: SessionPhase::Waiting(until),
            attachments: HashMap::new(),
            arenas,
            orders: VecDeque::new(),
            wake_pending: false,
            unanswered: true,
            unmap_deadline: None,
        }
    }

    /// Queues a resource to be mapped.
    ///
    /// # Errors
    /// [`AttachRefusal`] if the entry is occupied, or the range is outside the window, taken, or too large, or if the session has
    /// a fixed arena and this is not it.
    pub fn attach(
        &mut self,
        slot: u32,
        resource: u32,
        address: u64,
        bytes: u64,
    ) -> Result<(), AttachRefusal> {
        if slot >= limits::ATTACHMENTS || self.attachments.contains_key(&slot) {
            return Err(AttachRefusal(INVALID));
        }
        if slot != CONTROL {
            let end = address.checked_add(bytes).ok_or(AttachRefusal(INVALID))?;
            let bounds = limits::WINDOW_BOUNDS;
            if !address.is_multiple_of(4096) || address < bounds.start || end > bounds.end {
                return Err(AttachRefusal(INVALID));
            }
            let overlaps = |other: &Attachment| {
                other.address < end && address < other.address.saturating_add(other.bytes)
            };
            if self.attachments.values().any(overlaps) {
                return Err(AttachRefusal(INVALID));
            }
            match self.arenas {
                Arenas::Growing => {}
                Arenas::Awaited(fixed) if slot == FIXED_ARENA_SLOT && bytes == fixed => {}
                Arenas::Awaited(_) => return Err(AttachRefusal(INVALID)),
                Arenas::Complete => return Err(AttachRefusal(EXHAUSTED)),
            }
        }
        let mapped = self.attachments.values().fold(bytes, |sum, other| sum.saturating_add(other.bytes));
        if mapped > limits::SESSION_BYTES {
            return Err(AttachRefusal(EXHAUSTED));
        }
        self.attachments.insert(slot, Attachment { resource, address, bytes, leaving: false });
        let order = WorkerOrder::Attach { slot, sent: 0 };
        if slot != CONTROL && matches!(self.arenas, Arenas::Awaited(_)) {
            self.arenas = Arenas::Complete;
            // Before the control resource: the worker reads its first byte of the guest in that one.
            self.orders.push_front(order);
        } else {
            self.orders.push_back(order);
        }
        Ok(())
    }

    /// True if the worker may receive memory now: a fixed arena comes before everything else.
    #[must_use]
    pub const fn may_receive(&self) -> bool {
        !matches!(self.arenas, Arenas::Awaited(_))
    }

    /// Requests that a resource be unmapped. Returns true if it is unmapped already, because the request to map was never sent.
    pub fn detach(&mut self, slot: u32, unmap_deadline: Instant) -> bool {
        let Some(attachment) = self.attachments.get_mut(&slot) else { return false };
        if attachment.leaving {
            return false;
        }
        let untold = |order: &WorkerOrder| matches!(order, WorkerOrder::Attach { slot: other, sent: 0 } if *other == slot);
        if self.orders.iter().any(untold) {
            self.orders.retain(|order| !untold(order));
            return true;
        }
        attachment.leaving = true;
        self.orders.push_back(WorkerOrder::Detach { slot });
        self.unmap_deadline.get_or_insert(unmap_deadline);
        false
    }

    /// True if the worker was told to unmap a resource and has not answered.
    #[must_use]
    pub fn is_any_leaving(&self) -> bool {
        self.attachments.values().any(|attachment| attachment.leaving)
    }

    /// Frees an entry; returns its resource.
    pub fn release(&mut self, slot: u32) -> Option<u32> {
        let attachment = self.attachments.remove(&slot)?;
        if !self.is_any_leaving() {
            self.unmap_deadline = None;
        }
        Some(attachment.resource)
    }

    /// Frees all entries; returns their resources.
    pub fn release_all(&mut self) -> Vec<u32> {
        self.unmap_deadline = None;
        self.orders.clear();
        self.attachments.drain().map(|(_, attachment)| attachment.resource).collect()
    }

    /// The session's next deadline.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            SessionPhase::Waiting(until) => Some(*until),
            SessionPhase::Running(_) => self.unmap_deadline,
            SessionPhase::Dying(_, until) => *until,
            SessionPhase::Lost => None,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::arithmetic_side_effects, clippy::unwrap_used, reason = "a test")]
    use super::*;
    use std::time::Duration;

    const BASE: u64 = limits::WINDOW_BOUNDS.start;

    fn session() -> SessionState {
        SessionState {
            owner: Some(SessionOwner::Context(1)),
            pages: None,
            phase: SessionPhase::Lost,
            attachments: HashMap::new(),
            arenas: Arenas::Growing,
            orders: VecDeque::new(),
            wake_pending: false,
            unanswered: true,
            unmap_deadline: None,
        }
    }

    #[test]
    fn attachment_with_bad_slot_address_or_size_is_refused() {
        let mut session = session();
        session.attach(1, 10, BASE, 8192).unwrap();
        let refused = [
            (1, BASE + 0x10_0000, 4096, INVALID),
            (limits::ATTACHMENTS, BASE + 0x10_0000, 4096, INVALID),
            (2, BASE + 0x10_0001, 4096, INVALID),
            (2, BASE - 4096, 4096, INVALID),
            (2, limits::WINDOW_BOUNDS.end - 4096, 8192, INVALID),
            (2, !4095, 8192, INVALID),
            (2, BASE + 4096, 4096, INVALID),
            (2, BASE + 0x10_0000, limits::SESSION_BYTES, EXHAUSTED),
        ];
        for (slot, address, bytes, error) in refused {
            assert_eq!(session.attach(slot, 11, address, bytes), Err(AttachRefusal(error)), "{address:#x}");
        }
        session.attach(2, 11, BASE + 8192, 4096).unwrap();
        assert_eq!(session.attachments.len(), 2);
    }

    #[test]
    fn attachment_never_sent_to_the_worker_is_released_at_once() {
        let mut session = session();
        let later = Instant::now() + Duration::from_secs(5);
        session.attach(1, 10, BASE, 4096).unwrap();
        assert!(session.detach(1, later));
        assert_eq!(session.release(1), Some(10));
        assert!(session.orders.is_empty());

        session.attach(1, 10, BASE, 4096).unwrap();
        session.orders.clear(); // sent
        assert!(!session.detach(1, later));
        assert!(!session.detach(1, later), "asked only once");
        assert_eq!(session.orders, [WorkerOrder::Detach { slot: 1 }]);
        assert_eq!(session.unmap_deadline, Some(later));
        assert_eq!(session.release(1), Some(10));
        assert_eq!(session.unmap_deadline, None);
    }

    // Promise: F96
    #[test]
    fn fixed_arena_precedes_the_control_resource_and_no_other_is_attached() {
        let fixed = limits::FIXED_ARENA_BYTES;
        let mut session = SessionState { arenas: Arenas::Awaited(fixed), ..session() };
        session.attach(CONTROL, 9, 0, 8192).unwrap();
        assert!(!session.may_receive(), "the worker must receive the arena first");
        for (slot, bytes) in [
            (FIXED_ARENA_SLOT, fixed - 4096),
            (FIXED_ARENA_SLOT, fixed + 4096),
            (FIXED_ARENA_SLOT + 1, fixed),
        ] {
            assert_eq!(
                session.attach(slot, 10, BASE, bytes),
                Err(AttachRefusal(INVALID)),
                "{slot} {bytes:#x}"
            );
        }
        session.attach(FIXED_ARENA_SLOT, 10, BASE, fixed).unwrap();
        assert!(session.may_receive());
        let sent = [FIXED_ARENA_SLOT, CONTROL].map(|slot| WorkerOrder::Attach { slot, sent: 0 });
        assert_eq!(session.orders, sent);
        for slot in [2, limits::ATTACHMENTS - 1] {
            let more = session.attach(slot, 11, BASE + fixed, 4096);
            assert_eq!(more, Err(AttachRefusal(EXHAUSTED)), "in entry {slot}");
        }
        // Not after the arena is gone, either.
        session.release(FIXED_ARENA_SLOT);
        assert_eq!(session.attach(FIXED_ARENA_SLOT, 10, BASE, fixed), Err(AttachRefusal(EXHAUSTED)));
    }
}
