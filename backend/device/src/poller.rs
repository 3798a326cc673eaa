//! The poller, the one place where the device waits: an epoll of worker sockets, pidfds, wake eventfds and one timer.
//!
//! It is itself an epoll descriptor inside the loop of a connection ([`crate::frontend`]), which so delivers queue kicks and
//! all other events on one thread.

use rustix::{
    event::{EventfdFlags, epoll, eventfd},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};
use std::{
    mem::MaybeUninit,
    time::{Duration, Instant},
};

/// An event for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollEvent {
    /// `sluiced` answered: the inbox has arrivals.
    Inbox,
    /// The queue has more than one round of commands.
    Again,
    /// The earliest deadline has passed.
    Timer,
    /// The session's worker wrote the wake eventfd.
    Wake(u32),
    /// The session's worker sent something, can take more, or hung up.
    Socket(u32),
    /// The session's worker is gone.
    Exited(u32),
}

impl PollEvent {
    fn encode(self) -> epoll::EventData {
        let (kind, session) = match self {
            PollEvent::Inbox => (0, 0),
            PollEvent::Again => (1, 0),
            PollEvent::Timer => (2, 0),
            PollEvent::Wake(session) => (3, session),
            PollEvent::Socket(session) => (4, session),
            PollEvent::Exited(session) => (5, session),
        };
        epoll::EventData::new_u64(kind << 32 | u64::from(session))
    }

    fn decode(data: epoll::EventData) -> Option<PollEvent> {
        let data = data.u64();
        let session = u32::try_from(data & 0xffff_ffff).ok()?;
        Some(match data >> 32 {
            0 => PollEvent::Inbox,
            1 => PollEvent::Again,
            2 => PollEvent::Timer,
            3 => PollEvent::Wake(session),
            4 => PollEvent::Socket(session),
            5 => PollEvent::Exited(session),
            _ => return None,
        })
    }
}

/// The epoll, its timer, and an eventfd with which the device calls itself back.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    armed: Option<Instant>,
    again: OwnedFd,
}

/// Events taken per round; the others wait for the next.
pub(crate) const ROUND: usize = 64;

impl Poller {
    /// Creates an empty poller.
    ///
    /// # Errors
    /// The kernel's, for instance if there are no descriptors left.
    pub fn new() -> Result<Poller, Errno> {
        let poller = Poller {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            timer: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?,
            armed: None,
            again: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        poller.edge(poller.timer.as_fd(), PollEvent::Timer)?;
        poller.edge(poller.again.as_fd(), PollEvent::Again)?;
        Ok(poller)
    }

    /// The epoll descriptor, readable while an event is ready.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Reports each change of a descriptor once. An eventfd watched so is never read: each write to it is a change, and
    /// another owner of the eventfd could make a read block.
    ///
    /// # Errors
    /// The kernel's error of `epoll_ctl`.
    pub fn edge(&self, fd: BorrowedFd<'_>, event: PollEvent) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, event.encode(), epoll::EventFlags::IN | epoll::EventFlags::ET)
    }

    /// Reports a descriptor for as long as it is readable.
    ///
    /// # Errors
    /// The kernel's error of `epoll_ctl`.
    pub fn level(&self, fd: BorrowedFd<'_>, event: PollEvent) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, event.encode(), epoll::EventFlags::IN)
    }

    /// Sets whether a socket is also reported when it can take more.
    ///
    /// # Errors
    /// The kernel's error of `epoll_ctl`.
    pub fn writable(&self, fd: BorrowedFd<'_>, event: PollEvent, wanted: bool) -> Result<(), Errno> {
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, wanted);
        epoll::modify(&self.epoll, fd, event.encode(), flags)
    }

    /// Stops watching a descriptor. Closing it is not enough, since a worker holds the other end of some of them.
    pub fn forget(&self, fd: BorrowedFd<'_>) {
        // ENOENT is the only possible error: it was not watched, which is the goal.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Requests [`PollEvent::Again`].
    pub fn again(&self) {
        // EAGAIN means that the counter is full, so the event is pending already.
        let _ = rustix::io::write(&self.again, &1u64.to_ne_bytes());
    }

    /// Ensures that [`PollEvent::Timer`] comes no later than `deadline`.
    pub fn at_most(&mut self, deadline: Instant) {
        if self.armed.is_none_or(|armed| deadline < armed) {
            self.arm(deadline);
        }
    }

    /// Sets the timer after it has fired, to the next deadline if there is one.
    pub fn rearm(&mut self, next: Option<Instant>) {
        self.armed = None;
        if let Some(deadline) = next {
            self.arm(deadline);
        }
    }

    fn arm(&mut self, deadline: Instant) {
        // A millisecond late is better than a microsecond early, which would cause an empty round.
        let wait =
            deadline.saturating_duration_since(Instant::now()).saturating_add(Duration::from_millis(1));
        let value = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        let interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let set = timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval: interval, it_value: value },
        );
        debug_assert!(set.is_ok(), "a valid timer and a valid time");
        self.armed = Some(deadline);
    }

    /// Takes ready events; waits at most `timeout`.
    ///
    /// # Errors
    /// The kernel's error of `epoll_wait`.
    pub fn wait(&self, timeout: Duration, events: &mut Vec<PollEvent>) -> Result<(), Errno> {
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut ready = [const { MaybeUninit::uninit() }; ROUND];
        match epoll::wait(&self.epoll, &mut ready, Some(&timeout)) {
            Ok((ready, _)) => events.extend(ready.iter().filter_map(|ready| PollEvent::decode(ready.data))),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, reason = "a test")]
    use super::*;

    #[test]
    fn event_encoding_round_trips() {
        let all = [
            PollEvent::Inbox,
            PollEvent::Again,
            PollEvent::Timer,
            PollEvent::Wake(7),
            PollEvent::Socket(u32::MAX),
            PollEvent::Exited(0),
        ];
        for event in all {
            assert_eq!(PollEvent::decode(event.encode()), Some(event));
        }
        assert_eq!(PollEvent::decode(epoll::EventData::new_u64(u64::MAX)), None);
    }

    #[test]
    fn eventfd_that_is_never_read_is_reported_for_each_write() {
        let poller = Poller::new().unwrap();
        let wake = eventfd(0, EventfdFlags::empty()).unwrap();
        poller.edge(wake.as_fd(), PollEvent::Wake(3)).unwrap();
        for _ in 0..3 {
            let mut events = Vec::new();
            poller.wait(Duration::ZERO, &mut events).unwrap();
            assert_eq!(events, []);
            rustix::io::write(&wake, &1u64.to_ne_bytes()).unwrap();
            poller.wait(Duration::ZERO, &mut events).unwrap();
            assert_eq!(events, [PollEvent::Wake(3)]);
        }
    }

    #[test]
    fn timer_takes_the_earlier_deadline() {
        let mut poller = Poller::new().unwrap();
        let now = Instant::now();
        poller.at_most(now + Duration::from_secs(60));
        poller.at_most(now + Duration::from_millis(20));
        poller.at_most(now + Duration::from_secs(30));
        let mut events = Vec::new();
        while events.is_empty() {
            poller.wait(Duration::from_secs(5), &mut events).unwrap();
        }
        assert_eq!(events, [PollEvent::Timer]);
        assert!(now.elapsed() >= Duration::from_millis(20) && now.elapsed() < Duration::from_secs(30));
    }
}
