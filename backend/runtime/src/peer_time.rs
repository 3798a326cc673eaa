//! The processor time that calls on a socket or a pipe take because of its peer.
//!
//! The kernel wakes all that wait at the other end of a socket or a pipe in the time of the process that sends or reads. A peer whose threads wait there
//! thousands of times so takes seconds of a process that serves all VMs, in every call.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};

/// More than a call takes with an honest peer, unless the host interrupts it.
const USUAL: Duration = Duration::from_micros(300);
/// Largest sum of the times beyond [`USUAL`]: interrupts of a virtual machine that happen to be in calls with one peer stay below.
const MOST: Duration = Duration::from_millis(250);
/// One of so many parts of the time that passes is forgiven: even 512 peers get half of the process's time at most.
const PARTS: u32 = 1024;

/// The state of a socket, or of several of one peer.
#[derive(Debug)]
pub struct PeerTime {
    /// Processor time beyond [`USUAL`] per call that is not forgiven yet.
    excess: Cell<Duration>,
    /// Time of the last call.
    last: Cell<Instant>,
}

impl PeerTime {
    /// Of a new socket.
    #[must_use]
    pub fn new() -> PeerTime {
        PeerTime { excess: Cell::default(), last: Cell::new(Instant::now()) }
    }

    /// Makes a call on the socket, and adds its processor time.
    pub fn measure<R>(&self, call: impl FnOnce() -> R) -> R {
        let own = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
        let begun = own();
        let result = call();
        self.add(own().saturating_sub(begun), Instant::now());
        result
    }

    /// True if the calls took too much: the peer lets a crowd wait on its socket.
    pub fn is_over(&self) -> bool {
        self.excess.get() > MOST
    }

    /// True if at `now` no time is left that is not forgiven.
    pub fn is_forgiven(&self, now: Instant) -> bool {
        self.excess.get() <= now.saturating_duration_since(self.last.get()) / PARTS
    }

    /// Adds the processor time of a call that has ended at `now`.
    fn add(&self, taken: Duration, now: Instant) {
        let forgiven = now.saturating_duration_since(self.last.replace(now)) / PARTS;
        let left = self.excess.get().saturating_sub(forgiven);
        // One slow call counts for minutes, not for hours.
        self.excess.set((left + taken.saturating_sub(USUAL)).min(2 * MOST));
    }
}

impl Default for PeerTime {
    fn default() -> Self {
        PeerTime::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::{
        event::{PollFd, PollFlags, poll},
        net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair},
    };
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn time_beyond_the_usual_adds_up_and_is_forgiven_slowly() {
        let (now, slow) = (Instant::now(), USUAL + MOST / 5);
        let usual = PeerTime::new();
        (0..100_000).for_each(|_| usual.add(USUAL, now));
        assert!(!usual.is_over());
        let time = PeerTime::new();
        (0..5).for_each(|_| time.add(slow, now));
        assert!(!time.is_over());
        time.add(slow, now);
        assert!(time.is_over() && !time.is_forgiven(now));
        assert!(usual.is_forgiven(now));
        let (rare, mut later) = (PeerTime::new(), now);
        for _ in 0..100 {
            later += MOST / 5 * PARTS;
            rare.add(slow, later);
        }
        assert!(!rare.is_over());
    }

    // Promise: F112
    #[test]
    #[cfg(not(miri))]
    fn crowd_that_waits_on_a_socket_is_noticed_by_its_peer() {
        /// Entries of each waiting thread, within every limit of descriptors.
        const ENTRIES: usize = 512;
        const THREADS: usize = 256;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.expect("a pair");
        /// Beyond all interruptions of a call without a crowd.
        const NOTICED: Duration = Duration::from_millis(10);
        let sent = |time: &PeerTime| {
            time.measure(|| send(&ours, b"x", SendFlags::NOSIGNAL)).expect("sent");
            time.excess.get() > NOTICED
        };
        let read = || recv(&theirs, &mut [0; 1][..], RecvFlags::empty()).expect("a message");
        let alone = PeerTime::new();
        for _ in 0..1000 {
            sent(&alone);
            read();
        }
        assert!(!alone.is_over(), "{alone:?}");
        let over = AtomicBool::new(false);
        let crowded = PeerTime::new();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let mut polled: Vec<_> =
                            (0..ENTRIES).map(|_| PollFd::new(&theirs, PollFlags::IN)).collect();
                        let _ = poll(&mut polled, None);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            }
            let end = Instant::now() + Duration::from_secs(60);
            while !sent(&crowded) && Instant::now() < end {
                read();
                // The threads wait again.
                std::thread::sleep(Duration::from_millis(100));
            }
            over.store(true, Ordering::Relaxed);
            // Readable from now on: all threads end.
            sent(&crowded);
        });
        assert!(crowded.excess.get() > NOTICED, "{crowded:?}");
    }
}
