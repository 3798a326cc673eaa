//! Sessions: the device's state of one guest process that uses CUDA.
//!
//! A session waits for a worker, has one, has one that dies, or has lost it. Its attachments are the resources that its worker
//! maps, entry by entry; an entry is occupied from the moment the worker is requested to map until it reports that it has
//! unmapped or is gone.

use crate::{page::ControlPages, workers::Worker};
use sluice_protocol::limits;
use std::{
    collections::{HashMap, VecDeque},
    time::Instant,
};

/// CUDA_ERROR_DEVICE_UNAVAILABLE: the session has no worker.
pub const UNAVAILABLE: u32 = 46;
/// CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: the guest's library is of another version.
pub const MISMATCH: u32 = 803;
/// CUDA_ERROR_INVALID_VALUE: a request that cannot be.
pub const INVALID: u32 = 1;
/// CUDA_ERROR_OUT_OF_MEMORY: a request beyond a limit.
pub const EXHAUSTED: u32 = 2;
/// Entry of the attach table that is the control resource.
pub const CONTROL: u32 = 0;

/// Who a session belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A context.
    Context(u32),
    /// Whoever has the control resource, where the driver has no contexts.
    Control(u32),
}

impl core::fmt::Display for Owner {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Owner::Context(id) => write!(f, "context {id}"),
            Owner::Control(id) => write!(f, "control resource {id}"),
        }
    }
}

/// Where a session is in its life.
#[derive(Debug)]
pub enum Phase {
    /// `sluiced` was asked for a worker; until when it may take.
    Waiting(Instant),
    /// It has a worker.
    Running(Worker),
    /// Its worker has been asked to exit and is killed at this time, or was killed (`None`); its pages are still mapped.
    Dying(Worker, Option<Instant>),
    /// It has no worker any more, and its guest was told.
    Lost,
}

/// One attached resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The resource.
    pub resource: u32,
    /// Where the worker maps it; 0 for the control resource.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Whether the worker was asked to unmap it.
    pub leaving: bool,
}

/// Something to be sent to the worker, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Map; pieces below `sent` were sent.
    Attach {
        /// Entry of the attach table.
        slot: u32,
        /// Pieces sent.
        sent: usize,
    },
    /// Unmap.
    Detach {
        /// Entry of the attach table.
        slot: u32,
    },
}

/// One session.
#[derive(Debug)]
pub struct Session {
    /// Who has it, until that is gone.
    pub owner: Option<Owner>,
    /// The device's words in its control resource, while the resource exists.
    pub pages: Option<ControlPages>,
    /// Where it is.
    pub phase: Phase,
    /// What its worker maps.
    pub attachments: HashMap<u32, Attachment>,
    /// What its worker is still to be told.
    pub orders: VecDeque<Order>,
    /// A wake came when nobody waited.
    pub wake_pending: bool,
    /// `sluiced` has not answered yet; the session's number is not free before it has.
    pub owed: bool,
    /// When a worker that does not unmap what it was asked to is killed.
    pub patience: Option<Instant>,
}

/// Why an attachment is refused, as a CUresult.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal(pub u32);

impl Session {
    /// A session that waits for a worker.
    #[must_use]
    pub fn new(owner: Owner, pages: ControlPages, until: Instant) -> Session {
        Session {
            owner: Some(owner),
            pages: Some(pages),
            phase: Phase::Waiting(until),
            attachments: HashMap::new(),
            orders: VecDeque::new(),
            wake_pending: false,
            owed: true,
            patience: None,
        }
    }

    /// Enters a resource as the next thing to map.
    ///
    /// # Errors
    /// [`Refusal`] when the entry is occupied, or the place is outside the window, taken, or too much.
    pub fn attach(&mut self, slot: u32, resource: u32, address: u64, bytes: u64) -> Result<(), Refusal> {
        if slot >= limits::ATTACHMENTS || self.attachments.contains_key(&slot) {
            return Err(Refusal(INVALID));
        }
        if slot != CONTROL {
            let end = address.checked_add(bytes).ok_or(Refusal(INVALID))?;
            let bounds = limits::WINDOW_BOUNDS;
            if !address.is_multiple_of(4096) || address < bounds.start || end > bounds.end {
                return Err(Refusal(INVALID));
            }
            let overlaps = |other: &Attachment| {
                other.address < end && address < other.address.saturating_add(other.bytes)
            };
            if self.attachments.values().any(overlaps) {
                return Err(Refusal(INVALID));
            }
        }
        let mapped = self.attachments.values().fold(bytes, |sum, other| sum.saturating_add(other.bytes));
        if mapped > limits::SESSION_BYTES {
            return Err(Refusal(EXHAUSTED));
        }
        self.attachments.insert(slot, Attachment { resource, address, bytes, leaving: false });
        self.orders.push_back(Order::Attach { slot, sent: 0 });
        Ok(())
    }

    /// Asks for a resource to be unmapped. Answers whether that is already so, because the worker was never told of it.
    pub fn detach(&mut self, slot: u32, patience: Instant) -> bool {
        let Some(attachment) = self.attachments.get_mut(&slot) else { return false };
        if attachment.leaving {
            return false;
        }
        let untold =
            |order: &Order| matches!(order, Order::Attach { slot: other, sent: 0 } if *other == slot);
        if self.orders.iter().any(untold) {
            self.orders.retain(|order| !untold(order));
            return true;
        }
        attachment.leaving = true;
        self.orders.push_back(Order::Detach { slot });
        self.patience.get_or_insert(patience);
        false
    }

    /// Frees an entry and answers the resource that was in it.
    pub fn release(&mut self, slot: u32) -> Option<u32> {
        let attachment = self.attachments.remove(&slot)?;
        if !self.attachments.values().any(|other| other.leaving) {
            self.patience = None;
        }
        Some(attachment.resource)
    }

    /// Frees all entries and answers the resources that were in them.
    pub fn release_all(&mut self) -> Vec<u32> {
        self.patience = None;
        self.orders.clear();
        self.attachments.drain().map(|(_, attachment)| attachment.resource).collect()
    }

    /// When something has to happen at the latest.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Waiting(until) => Some(*until),
            Phase::Running(_) => self.patience,
            Phase::Dying(_, until) => *until,
            Phase::Lost => None,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::arithmetic_side_effects, clippy::unwrap_used, reason = "a test")]
    use super::*;
    use std::time::Duration;

    const BASE: u64 = limits::WINDOW_BOUNDS.start;

    fn session() -> Session {
        Session {
            owner: Some(Owner::Context(1)),
            pages: None,
            phase: Phase::Lost,
            attachments: HashMap::new(),
            orders: VecDeque::new(),
            wake_pending: false,
            owed: true,
            patience: None,
        }
    }

    #[test]
    fn attachments_are_checked() {
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
            assert_eq!(session.attach(slot, 11, address, bytes), Err(Refusal(error)), "{address:#x}");
        }
        session.attach(2, 11, BASE + 8192, 4096).unwrap();
        assert_eq!(session.attachments.len(), 2);
    }

    #[test]
    fn what_the_worker_was_never_told_is_released_at_once() {
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
        assert_eq!(session.orders, [Order::Detach { slot: 1 }]);
        assert_eq!(session.patience, Some(later));
        assert_eq!(session.release(1), Some(10));
        assert_eq!(session.patience, None);
    }
}
