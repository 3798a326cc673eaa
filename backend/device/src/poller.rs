//! The poller, the one place where the device waits: an epoll of worker sockets, pidfds, wake eventfds and one timer.
//!
//! It is itself an epoll descriptor inside the loop of a connection ([`crate::frontend`]), which so delivers queue kicks and
//! everything else on one thread.

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

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// `sluiced` answered: look into the inbox.
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

impl Event {
    fn encode(self) -> epoll::EventData {
        let (kind, session) = match self {
            Event::Inbox => (0, 0),
            Event::Again => (1, 0),
            Event::Timer => (2, 0),
            Event::Wake(session) => (3, session),
            Event::Socket(session) => (4, session),
            Event::Exited(session) => (5, session),
        };
        epoll::EventData::new_u64(kind << 32 | u64::from(session))
    }

    fn decode(data: epoll::EventData) -> Option<Event> {
        let data = data.u64();
        let session = u32::try_from(data & 0xffff_ffff).ok()?;
        Some(match data >> 32 {
            0 => Event::Inbox,
            1 => Event::Again,
            2 => Event::Timer,
            3 => Event::Wake(session),
            4 => Event::Socket(session),
            5 => Event::Exited(session),
            _ => return None,
        })
    }
}

/// The epoll, its timer, and an eventfd by which the device calls itself back.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    armed: Option<Instant>,
    again: OwnedFd,
}

/// Events taken per round; the others come in the next.
const ROUND: usize = 64;

impl Poller {
    /// An empty poller.
    ///
    /// # Errors
    /// The kernel's, out of descriptors for instance.
    pub fn new() -> Result<Poller, Errno> {
        let poller = Poller {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            timer: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?,
            armed: None,
            again: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        poller.edge(poller.timer.as_fd(), Event::Timer)?;
        poller.edge(poller.again.as_fd(), Event::Again)?;
        Ok(poller)
    }

    /// The epoll descriptor, readable while something is ready.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Reports each change of a descriptor once. An eventfd watched so is never read: each write to it is a change, and
    /// a read could be made to block by whoever else holds the eventfd.
    ///
    /// # Errors
    /// The kernel's.
    pub fn edge(&self, fd: BorrowedFd<'_>, event: Event) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, event.encode(), epoll::EventFlags::IN | epoll::EventFlags::ET)
    }

    /// Reports a descriptor for as long as it is readable.
    ///
    /// # Errors
    /// The kernel's.
    pub fn level(&self, fd: BorrowedFd<'_>, event: Event) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, event.encode(), epoll::EventFlags::IN)
    }

    /// Whether a socket is also to be reported when it can take more.
    ///
    /// # Errors
    /// The kernel's.
    pub fn writable(&self, fd: BorrowedFd<'_>, event: Event, wanted: bool) -> Result<(), Errno> {
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, wanted);
        epoll::modify(&self.epoll, fd, event.encode(), flags)
    }

    /// Reports a descriptor no more. Closing is not enough, since a worker holds the other end of some of them.
    pub fn forget(&self, fd: BorrowedFd<'_>) {
        // ENOENT is the only error possible: it was not watched, which is what is wanted.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Asks for [`Event::Again`].
    pub fn again(&self) {
        // EAGAIN would mean that the counter is full, and then the event is pending anyway.
        let _ = rustix::io::write(&self.again, &1u64.to_ne_bytes());
    }

    /// Makes sure that [`Event::Timer`] comes no later than `deadline`.
    pub fn at_most(&mut self, deadline: Instant) {
        if self.armed.is_none_or(|armed| deadline < armed) {
            self.arm(deadline);
        }
    }

    /// Sets the timer after it has fired: the next deadline, if there is one.
    pub fn rearm(&mut self, next: Option<Instant>) {
        self.armed = None;
        if let Some(deadline) = next {
            self.arm(deadline);
        }
    }

    fn arm(&mut self, deadline: Instant) {
        // A millisecond late rather than a microsecond early, which would be a round for nothing.
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

    /// Takes what is ready, waiting at most `timeout`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, timeout: Duration, events: &mut Vec<Event>) -> Result<(), Errno> {
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut ready = [const { MaybeUninit::uninit() }; ROUND];
        match epoll::wait(&self.epoll, &mut ready, Some(&timeout)) {
            Ok((ready, _)) => events.extend(ready.iter().filter_map(|ready| Event::decode(ready.data))),
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
    fn every_event_survives_its_encoding() {
        let all = [
            Event::Inbox,
            Event::Again,
            Event::Timer,
            Event::Wake(7),
            Event::Socket(u32::MAX),
            Event::Exited(0),
        ];
        for event in all {
            assert_eq!(Event::decode(event.encode()), Some(event));
        }
        assert_eq!(Event::decode(epoll::EventData::new_u64(u64::MAX)), None);
    }

    #[test]
    fn an_eventfd_that_is_never_read_is_reported_for_each_write() {
        let poller = Poller::new().unwrap();
        let wake = eventfd(0, EventfdFlags::empty()).unwrap();
        poller.edge(wake.as_fd(), Event::Wake(3)).unwrap();
        for _ in 0..3 {
            let mut events = Vec::new();
            poller.wait(Duration::ZERO, &mut events).unwrap();
            assert_eq!(events, []);
            rustix::io::write(&wake, &1u64.to_ne_bytes()).unwrap();
            poller.wait(Duration::ZERO, &mut events).unwrap();
            assert_eq!(events, [Event::Wake(3)]);
        }
    }

    #[test]
    fn the_timer_takes_the_earlier_deadline() {
        let mut poller = Poller::new().unwrap();
        let now = Instant::now();
        poller.at_most(now + Duration::from_secs(60));
        poller.at_most(now + Duration::from_millis(20));
        poller.at_most(now + Duration::from_secs(30));
        let mut events = Vec::new();
        while events.is_empty() {
            poller.wait(Duration::from_secs(5), &mut events).unwrap();
        }
        assert_eq!(events, [Event::Timer]);
        assert!(now.elapsed() >= Duration::from_millis(20) && now.elapsed() < Duration::from_secs(5));
    }
}
