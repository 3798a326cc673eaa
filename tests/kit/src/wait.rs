//! Waits for other processes, with one limit.

use std::{
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::AsFd,
};

/// Long enough for a busy machine; no passing test waits so long.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A wait that is longer than this is no answer of a peer that runs.
const QUICK: Duration = Duration::from_millis(1);

/// Waits until a condition holds that another process or thread brings about.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    loop {
        // Before the question: a pause of this thread behind the last answer does not count.
        let waited = started.elapsed();
        if holds() {
            return;
        }
        assert!(waited < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        give_way(waited);
    }
}

/// Leaves the processor to others between two questions.
fn give_way(waited: Duration) {
    if waited < QUICK { thread::yield_now() } else { thread::sleep(QUICK) }
}

/// Repeats a question until the answer is as wanted, or until the limit has passed. Returns the last answer.
pub fn until<T>(mut ask: impl FnMut() -> T, wanted: impl Fn(&T) -> bool) -> T {
    let started = Instant::now();
    loop {
        let waited = started.elapsed();
        let answer = ask();
        if wanted(&answer) || waited > TIMEOUT {
            return answer;
        }
        give_way(waited);
    }
}

/// True if the other end of a socket is closed.
pub fn hung_up(socket: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut polled, Some(&Timespec::default()))).expect("poll");
    polled[0].revents().contains(PollFlags::HUP)
}

/// True if a descriptor is readable, now or within this time.
pub fn readable(descriptor: &impl AsFd, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).expect("a time");
    let mut polled = [PollFd::new(descriptor, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut polled, Some(&limit))).expect("poll") > 0
}
