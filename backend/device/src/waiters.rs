//! Withheld answers, in which guest threads sleep: bounded per session and per device, oldest first out, and answered after a
//! bounded time even without an event, because each holds a slot of the guest's queue.

use crate::chain::AnswerPlace;
use sluice_protocol::{gpu, limits};
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// One withheld answer.
#[derive(Clone, Copy, Debug)]
pub struct Waiter {
    /// The waiting session.
    pub session: u32,
    /// The command's header, to echo.
    pub header: gpu::CommandHeader,
    /// The place for the answer.
    pub place: AnswerPlace,
    /// The latest time of the answer.
    pub deadline: Instant,
}

/// All withheld answers of a device, oldest first. All wait equally long, so they also expire in this order.
#[derive(Debug, Default)]
pub struct Waiters {
    queue: VecDeque<Waiter>,
}

impl Waiters {
    /// Number of waiters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// True if there are no waiters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The deadline of the oldest waiter.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.queue.front().map(|waiter| waiter.deadline)
    }

    /// Adds a waiter. If there are too many now, one is evicted: the session's own oldest if the session has too many,
    /// else the device's oldest.
    pub fn push(
        &mut self,
        session: u32,
        header: gpu::CommandHeader,
        place: AnswerPlace,
        now: Instant,
        limit: usize,
    ) -> Option<Waiter> {
        let deadline = now.checked_add(Duration::from_millis(limits::WAITER_MILLISECONDS)).unwrap_or(now);
        self.queue.push_back(Waiter { session, header, place, deadline });
        let own = self.queue.iter().filter(|waiter| waiter.session == session).count();
        if own > limits::WAITERS_PER_SESSION {
            let oldest = self.queue.iter().position(|waiter| waiter.session == session)?;
            return self.queue.remove(oldest);
        }
        if self.queue.len() > limit { self.queue.pop_front() } else { None }
    }

    /// Takes all waiters of a session.
    pub fn take(&mut self, session: u32) -> Vec<Waiter> {
        let (taken, left): (Vec<Waiter>, Vec<Waiter>) =
            core::mem::take(&mut self.queue).into_iter().partition(|waiter| waiter.session == session);
        self.queue = left.into();
        taken
    }

    /// Takes the waiters that the answer to a command ends in the guest: its kernel takes a fence for the end of all earlier
    /// ones of the same timeline, which is a context's ring, or one timeline for all commands that name no ring.
    pub fn passed(&mut self, by: &gpu::CommandHeader) -> Vec<Waiter> {
        let ends = |waiter: &Waiter| {
            by.flags & gpu::FLAG_FENCE != 0
                && waiter.header.fence < by.fence
                && timeline(&waiter.header) == timeline(by)
        };
        if !self.queue.iter().any(ends) {
            return Vec::new();
        }
        let (passed, left): (Vec<Waiter>, Vec<Waiter>) =
            core::mem::take(&mut self.queue).into_iter().partition(ends);
        self.queue = left.into();
        passed
    }

    /// Takes the expired waiters.
    pub fn expire(&mut self, now: Instant) -> Vec<Waiter> {
        let expired = self.queue.partition_point(|waiter| waiter.deadline <= now);
        self.queue.drain(..expired).collect()
    }

    /// Takes all waiters.
    pub fn take_all(&mut self) -> Vec<Waiter> {
        core::mem::take(&mut self.queue).into()
    }
}

/// The timeline of a fence.
fn timeline(header: &gpu::CommandHeader) -> Option<(u32, u8)> {
    (header.flags & gpu::FLAG_INFO_RING_IDX != 0).then_some((header.context, header.ring))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::arithmetic_side_effects, clippy::unwrap_used, reason = "a test")]
    use super::*;

    const HEADER: gpu::CommandHeader =
        gpu::CommandHeader { kind: 0x207, flags: 1, fence: 0, context: 1, ring: 0 };

    #[test]
    fn session_with_too_many_waiters_loses_its_own_oldest() {
        let mut waiters = Waiters::default();
        let now = Instant::now();
        assert!(waiters.push(9, HEADER, AnswerPlace::nowhere(99), now, 128).is_none());
        for head in 0..4 {
            assert!(waiters.push(1, HEADER, AnswerPlace::nowhere(head), now, 128).is_none());
        }
        let out = waiters.push(1, HEADER, AnswerPlace::nowhere(4), now, 128).unwrap();
        assert_eq!((out.session, out.place.head()), (1, 0));
        assert_eq!(waiters.len(), 5);
    }

    #[test]
    fn device_with_too_many_waiters_loses_the_oldest() {
        let mut waiters = Waiters::default();
        let now = Instant::now();
        for session in 0..8 {
            assert!(waiters.push(session, HEADER, AnswerPlace::nowhere(0), now, 8).is_none());
        }
        assert_eq!(waiters.push(8, HEADER, AnswerPlace::nowhere(0), now, 8).unwrap().session, 0);
        assert_eq!(waiters.len(), 8);
    }

    #[test]
    fn later_fence_of_a_timeline_releases_earlier_waiters() {
        let header = |flags, fence, context| gpu::CommandHeader { flags, fence, context, ..HEADER };
        let mut waiters = Waiters::default();
        let now = Instant::now();
        for (head, flags, fence, context) in [(0, 1, 5, 1), (1, 1, 7, 2), (2, 3, 5, 1), (3, 3, 5, 2)] {
            waiters.push(context, header(flags, fence, context), AnswerPlace::nowhere(head), now, 8);
        }
        let mut passed =
            |by| waiters.passed(&by).iter().map(|waiter| waiter.place.head()).collect::<Vec<u16>>();
        assert_eq!(passed(header(0, 9, 1)), [0u16; 0], "no fence");
        assert_eq!(passed(header(1, 5, 3)), [0u16; 0], "no later fence");
        assert_eq!(passed(header(1, 6, 3)), [0]);
        assert_eq!(passed(header(3, 6, 2)), [3], "a ring of one context");
        assert_eq!(passed(header(3, 6, 1)), [2]);
        assert_eq!(passed(header(1, 8, 1)), [1]);
    }

    #[test]
    fn waiters_expire_in_order() {
        let mut waiters = Waiters::default();
        let now = Instant::now();
        waiters.push(1, HEADER, AnswerPlace::nowhere(1), now, 8);
        waiters.push(2, HEADER, AnswerPlace::nowhere(2), now + Duration::from_millis(10), 8);
        assert!(waiters.expire(now + Duration::from_millis(999)).is_empty());
        let expired = waiters.expire(now + Duration::from_millis(1000));
        assert_eq!(expired.iter().map(|waiter| waiter.session).collect::<Vec<_>>(), [1]);
        assert_eq!(waiters.take(2).len(), 1);
        assert!(waiters.is_empty());
    }
}
