//! Waiting for the host: poll a little, then nap, then sleep.
//!
//! A wake-up takes several processes, each of which has to be woken itself: a tenth of a millisecond on a machine with few
//! processors. So a thread that has polled in vain takes naps first and looks again after each. Where there are processors enough it
//! polls on for a while before its first nap, unless that was in vain lately: the end of a nap takes longer than a short kernel. When
//! the wait is so long that a wake-up hardly adds to it, the thread registers its condition and sleeps on a futex of its own. One thread
//! of the shim, started when the first has to sleep, sleeps on the transport on behalf of all and wakes those whose condition holds, so
//! a wake-up from the host costs one thread, not one per sleeper.

use crate::{session::link::SessionLink, spawn::spawn, transport::TransportError};
use core::{
    num::NonZeroU64,
    sync::atomic::{AtomicU32, Ordering, fence},
};
use rustix::thread::{self, futex};
use sluice_protocol::{
    limits,
    park::{Parking, is_worthwhile},
    reply,
    session::{self, Attachment, HostCall},
    shared::Shared as _,
};
use sluice_shared_memory::mapping::Words;
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard},
    time::{Duration, Instant},
};

/// The condition that a thread waits for. The end of the session ends every wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The device has set the size of a fixed arena, or the session is open.
    Answered,
    /// The worker has adopted the session.
    Open,
    /// The answer to a call.
    Reply { slot: u32, ticket: u32 },
    /// Work posted to a stream, up to a sequence; a sticky error ends it, too.
    Sequence { slot: u32, sequence: u64 },
    /// The same, to post more work.
    Credit { slot: u32, sequence: u64 },
    /// The answer to an attach or detach.
    Attachment { slot: u32, was: Attachment },
    /// Room in the ring.
    Room { head: u64 },
    /// A call of a function of the program after this one; a sticky error ends the wait, too.
    HostCall { latest: HostCall },
}

impl Condition {
    /// True if the wait is over.
    pub(crate) fn holds(self, words: &Words) -> bool {
        let state = words.load_u32(session::STATE, Ordering::Acquire);
        state == session::LOST
            || match self {
                Condition::Answered => {
                    state != session::NEW || words.load_u64(session::FIXED_ARENA, Ordering::Acquire) != 0
                }
                Condition::Open => state != session::NEW,
                Condition::Reply { slot, ticket } => reply::is_ready(words, slot, ticket),
                Condition::Sequence { slot, sequence } | Condition::Credit { slot, sequence } => {
                    session::completed(words, slot) >= sequence
                        || words.load_u32(session::STICKY, Ordering::Acquire) != 0
                }
                Condition::Attachment { slot, was } => session::attachment(words, slot) != was,
                Condition::HostCall { latest } => {
                    session::host_call(words) != latest
                        || words.load_u32(session::STICKY, Ordering::Acquire) != 0
                }
                Condition::Room { head } => words.load_u64(session::RING_HEAD, Ordering::Acquire) != head,
            }
    }

    const fn place(self) -> usize {
        match self {
            Condition::Open | Condition::Answered => 0,
            Condition::Reply { .. } => 1,
            Condition::Sequence { .. } => 2,
            Condition::Attachment { .. } => 3,
            Condition::Room { .. } => 4,
            Condition::Credit { .. } => 5,
            Condition::HostCall { .. } => 6,
        }
    }

    /// True if the thread should return fast. Credit and room grow while a thread waits: threads that returned for
    /// every little would fill the ring in drops.
    const fn is_urgent(self) -> bool {
        !matches!(self, Condition::Credit { .. } | Condition::Room { .. })
    }

    /// A shorter nap often ends before the kernel runs another thread. The thread that waits for a call of a function was woken when
    /// the function was entered, so it must leave its processor to the threads that bring the stream to the function.
    const fn shortest_nap(self) -> Duration {
        if matches!(self, Condition::HostCall { .. }) { LONGEST_NAP } else { SHORTEST_NAP }
    }
}

const KINDS: usize = 7;

struct Sleeper {
    condition: Condition,
    /// 0 while asleep.
    awake: AtomicU32,
}

/// The sleepers of the process and the thread that wakes them.
pub(crate) struct Waiting {
    link: Arc<SessionLink>,
    state: Arc<WaitState>,
    /// Nanoseconds that a wait polls, per kind of condition: few if recent waits outlasted them.
    budgets: [AtomicU32; KINDS],
    longest: u32,
    /// True if a thread may poll on without delaying others; and waits in a row that outlasted this, per kind of condition.
    polls_on: bool,
    unended: [AtomicU32; KINDS],
    /// Waits in a row that outlasted their naps, per kind of condition.
    outlasted: [AtomicU32; KINDS],
    napping: AtomicU32,
}

struct WaitState {
    sleepers: Mutex<Sleepers>,
    /// Notifies the waker thread of a sleeper.
    some: Condvar,
}

#[derive(Default)]
struct Sleepers {
    list: Vec<Arc<Sleeper>>,
    waker: bool,
}

/// Nanoseconds that a wait polls at most, if polling has succeeded lately.
const LONGEST: u32 = 50_000;
/// Nanoseconds that it polls at least.
const SHORTEST: u32 = 500;
/// Time for which a thread polls on before its first nap, on machines with this many processors.
const POLLING: Duration = Duration::from_micros(200);
const AMPLE: usize = 4;
/// Polls between two readings of the clock.
const POLLS: u32 = 16;
/// The longest time for naps in one wait: a wake-up takes a fiftieth of it.
const NAPS: Duration = Duration::from_millis(5);
/// A nap lasts this fraction of the wait so far, within bounds; the kernel adds some twenty microseconds.
const PART: u32 = 64;
/// If a hypervisor traps the timer, a shorter nap ends before the kernel has run another thread of this processor, which may be the one
/// that is waited for, and takes hardly less time.
const SHORTEST_NAP: Duration = Duration::from_micros(10);
const LONGEST_NAP: Duration = Duration::from_micros(20);
/// Threads of a process that nap at a time. The others sleep: many napping threads would load the machine.
const NAPPERS: u32 = 2;
/// Nanoseconds by which the kernel may end a nap late, instead of the usual fifty thousand.
const SLACK: NonZeroU64 = NonZeroU64::new(1000).unwrap();

/// Lets the calling thread, which belongs to the program, rest for a while, less if a signal comes. It waits on a futex that is never
/// woken, since the functions that sleep are cancellation points.
pub(crate) fn pause(duration: Duration) {
    // A duration that the kernel cannot express gives no pause.
    if let Ok(duration) = rustix::time::Timespec::try_from(duration) {
        let _ = futex::wait(&AtomicU32::new(0), futex::Flags::PRIVATE, 0, Some(&duration));
    }
}

/// Polls until the condition holds; `false` if it does not within `time`. The clock bounds it, since a poll takes ten times as long
/// where the hypervisor traps the pause between two.
fn poll(condition: Condition, words: &Words, time: Duration) -> bool {
    let mut started = None;
    loop {
        for _ in 0..POLLS {
            if condition.holds(words) {
                return true;
            }
            core::hint::spin_loop();
        }
        if started.get_or_insert_with(Instant::now).elapsed() >= time {
            return false;
        }
    }
}

impl Waiting {
    pub(crate) fn new(link: Arc<SessionLink>) -> Waiting {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Waiting {
            link,
            state: Arc::new(WaitState { sleepers: Mutex::default(), some: Condvar::new() }),
            budgets: [const { AtomicU32::new(LONGEST) }; KINDS],
            // With one processor the other side cannot run while this one polls.
            longest: if processors > 1 { LONGEST } else { SHORTEST },
            polls_on: processors >= AMPLE,
            unended: [const { AtomicU32::new(0) }; KINDS],
            outlasted: [const { AtomicU32::new(0) }; KINDS],
            napping: AtomicU32::new(0),
        }
    }

    /// Waits until the condition holds or the session is over; the caller checks which.
    pub(crate) fn until(&self, condition: Condition) {
        let words = &self.link.words;
        if let Err(error) = self.link.transport.flush() {
            self.link.lose(&error);
        }
        let Some(budget) = self.budgets.get(condition.place()) else { return };
        let time = budget.load(Ordering::Relaxed).min(self.longest);
        if poll(condition, words, Duration::from_nanos(time.into())) {
            if time < LONGEST {
                budget.store(LONGEST.min(time.saturating_mul(2)), Ordering::Relaxed);
            }
            return;
        }
        let napped = condition.is_urgent().then(|| self.nap(condition)).flatten();
        // A wait that ended soon after the poll may have been just longer; longer polls find out.
        let longest = Duration::from_nanos(LONGEST.into());
        let could_end = napped.is_some_and(|napped| Duration::from_nanos(time.into()) + napped <= longest);
        let next = if could_end { time.saturating_mul(2).min(LONGEST) } else { (time / 2).max(SHORTEST) };
        budget.store(next, Ordering::Relaxed);
        if napped.is_none() {
            self.sleep(condition);
        }
    }

    /// Naps until the condition holds, and returns the time that this took; `None` if it takes too long, or did so lately.
    fn nap(&self, condition: Condition) -> Option<Duration> {
        let outlasted = self.outlasted.get(condition.place())?;
        let misses = outlasted.load(Ordering::Relaxed);
        if !is_worthwhile(misses) {
            outlasted.store(misses.wrapping_add(1), Ordering::Relaxed);
            return None;
        }
        if self.napping.fetch_add(1, Ordering::Relaxed) >= NAPPERS {
            self.napping.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let started = Instant::now();
        let mut over = self.poll_on(condition);
        let mut elapsed = started.elapsed();
        // The thread belongs to the program, so its timer slack is restored.
        let before = (!over).then(thread::current_timer_slack).and_then(|slack| NonZeroU64::new(slack.ok()?));
        let changed = before.is_some() && thread::set_current_timer_slack(Some(SLACK)).is_ok();
        while !over && elapsed < NAPS {
            pause((elapsed / PART).clamp(condition.shortest_nap(), LONGEST_NAP));
            over = condition.holds(&self.link.words);
            elapsed = started.elapsed();
        }
        if changed {
            // The value was set until now, so it is allowed.
            let _ = thread::set_current_timer_slack(before);
        }
        self.napping.fetch_sub(1, Ordering::Relaxed);
        outlasted.store(if over { 0 } else { misses.wrapping_add(1) }, Ordering::Relaxed);
        over.then_some(elapsed)
    }

    /// Polls until the condition holds; `false` if that takes too long, or did so lately.
    fn poll_on(&self, condition: Condition) -> bool {
        let Some(unended) = self.unended.get(condition.place()).filter(|_| self.polls_on) else {
            return false;
        };
        let misses = unended.load(Ordering::Relaxed);
        let over = is_worthwhile(misses) && poll(condition, &self.link.words, POLLING);
        unended.store(if over { 0 } else { misses.wrapping_add(1) }, Ordering::Relaxed);
        over
    }

    fn sleep(&self, condition: Condition) {
        let sleeper = Arc::new(Sleeper { condition, awake: AtomicU32::new(0) });
        {
            let mut sleepers = self.state.lock();
            sleepers.list.push(sleeper.clone());
            if !sleepers.waker {
                let (link, state) = (self.link.clone(), self.state.clone());
                sleepers.waker = spawn("sluice-waker", move || wake_sleepers(&link, &state)).is_ok();
            }
            self.state.some.notify_one();
        }
        // The waker announces sleep before it looks at the list; this thread enters the list before it looks at the condition.
        // With a fence on both sides, the waker sees this thread or this thread sees the published value.
        fence(Ordering::SeqCst);
        while sleeper.awake.load(Ordering::Acquire) == 0 && !condition.holds(&self.link.words) {
            // Without a waker thread (none could be started) sleep in small portions.
            let portion = rustix::time::Timespec { tv_sec: 0, tv_nsec: 200_000 };
            let timeout = if self.state.lock().waker { None } else { Some(&portion) };
            // Woken, interrupted, timed out: the loop checks again in any case.
            let _ = futex::wait(&sleeper.awake, futex::Flags::PRIVATE, 0, timeout);
        }
        self.state.lock().list.retain(|other| !Arc::ptr_eq(other, &sleeper));
    }
}

impl WaitState {
    fn lock(&self) -> MutexGuard<'_, Sleepers> {
        self.sleepers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Wakes every sleeper whose condition holds; returns the state of the others.
    fn scan(&self, words: &Words) -> Scan {
        let mut sleepers = self.lock();
        let mut woken = false;
        sleepers.list.retain(|sleeper| {
            let holds = sleeper.condition.holds(words);
            if holds {
                woken = true;
                sleeper.awake.store(1, Ordering::Release);
                // A wake-up before the sleep is harmless: the sleeper looks at the word before it sleeps.
                let _ = futex::wake(&sleeper.awake, futex::Flags::PRIVATE, 1);
            }
            !holds
        });
        match (woken, sleepers.list.is_empty()) {
            (true, _) => Scan::Woke,
            (false, true) => Scan::Nobody,
            (false, false) => Scan::Asleep,
        }
    }
}

#[derive(PartialEq, Eq)]
enum Scan {
    Woke,
    Nobody,
    Asleep,
}

/// The waker thread.
fn wake_sleepers(link: &SessionLink, state: &WaitState) {
    let words = &link.words;
    loop {
        if state.scan(words) == Scan::Nobody {
            let sleepers = state.lock();
            if sleepers.list.is_empty() {
                drop(state.some.wait(sleepers).unwrap_or_else(|poisoned| poisoned.into_inner()));
            }
            continue;
        }
        if Parking::GUEST.enter(words, || state.scan(words) != Scan::Asleep) {
            // Woken by the worker, by the time-out, or for no reason: look again. The pause is for errors that may pass, and
            // keeps this loop from spinning.
            match link.transport.wait(Duration::from_millis(limits::WAITER_MILLISECONDS)) {
                Ok(()) => {}
                Err(error @ TransportError::Lost) => drop(link.lose(&error)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
            Parking::GUEST.leave(words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        ffi::{c_int, c_ulong},
        os::unix::thread::JoinHandleExt as _,
        sync::atomic::AtomicBool,
    };

    #[test]
    #[expect(unsafe_code, reason = "the cancellation of a thread")]
    fn pause_is_no_cancellation_point_of_the_programs_thread() {
        unsafe extern "C" {
            fn pthread_cancel(thread: c_ulong) -> c_int;
        }
        static OVER: AtomicBool = AtomicBool::new(false);
        let thread = std::thread::spawn(|| {
            while !OVER.load(Ordering::Acquire) {
                pause(Duration::from_millis(1));
            }
            pause(Duration::from_millis(1));
            7
        });
        // SAFETY: the thread was not joined, so it exists.
        assert_eq!(unsafe { pthread_cancel(thread.as_pthread_t()) }, 0);
        OVER.store(true, Ordering::Release);
        assert_eq!(thread.join().unwrap(), 7);
    }
}
