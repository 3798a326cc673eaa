//! The worker's accounting of its devices' time: the work it may submit, the amount in flight, and its report.
//!
//! Each device has a [`TimeAccounting`]. The thread that holds the [`crate::submit::Submitter`] begins pieces of work; the
//! thread that makes a pass of [`crate::submit::completion`] ends them; so each word has one writer. Work that the worker itself makes
//! is counted under the lock of a pass, as work that was held and can run now. While the permit is open
//! and the device's window is not full, the cost is one load of the permit and a few words of this process. The arbiter reads
//! the report page when it needs it, and is signalled only when it waits for it or when work waits for a permit.
//!
//! Only work that can run is in flight: work that stands behind a wait in its stream is *held*, and begins to count when the
//! wait is over. Until then it takes no time of the device, no process waits for its end, and it does not show how soon the
//! device is free.

use core::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
    time::Duration,
};
use rustix::fd::OwnedFd;
use sluice_messages::custody::{page, report};
use sluice_protocol::shared::Shared as _;
use sluice_runtime::clock::nanoseconds as now;
use sluice_scheduler::{
    Nanos,
    estimate::{Estimates, WorkKind},
};
use sluice_shared_memory::{Mapping, mapping::Words};
use std::{
    sync::{Arc, OnceLock},
    thread::Thread,
    time::Instant,
};

/// Estimate for work of an unknown kind, in microseconds: ten pieces fill a turn, a hundred a device that is free.
const UNKNOWN: u64 = 200;
/// A worker that waits for a permit repeats its signal after this time: the arbiter treats silence as absence.
const HEARTBEAT: Duration = Duration::from_millis(10);
/// Time for which a full window holds back one stream for another although no work ends: the work in flight may wait for the
/// work that is held back.
const STUCK: Duration = Duration::from_millis(20);
/// Launches of a stream for a marker, while no other VM requests their device and while one does. With the marker's record, the query
/// and the query for the time, the driver has 1.05 calls for a launch at most, or 1.25.
pub(crate) const PIECES_ALONE: u32 = 64;
pub(crate) const PIECES_SHARED: u32 = 12;
/// Parts of a window for each of which there is a marker.
const PARTS: u64 = 4;
/// Longest sleep for room in a window. The sleep ends when a piece of work does.
const NAP: Duration = Duration::from_millis(1);

/// The work or wait that ends with a marker. A piece of work has its kind, its estimate, its device, and a flag for work that
/// was held when it was submitted. A wait has the flag without an estimate. Otherwise nothing counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SequenceTicket(u64);

impl SequenceTicket {
    const HELD: u64 = 1 << 31;
    /// Work of an unknown kind.
    const GUESSED: u64 = 1 << 30;
    /// Microseconds, 4.1 s.
    const ESTIMATE: u64 = (1 << 22) - 1;

    /// `estimate` is in microseconds, 0 for an unknown kind.
    fn new(kind: WorkKind, estimate: u64, device: u8, held: bool) -> SequenceTicket {
        let guessed = if estimate == 0 { SequenceTicket::GUESSED | UNKNOWN << 8 } else { 0 };
        let estimate = estimate.min(SequenceTicket::ESTIMATE) << 8;
        let held = if held { SequenceTicket::HELD } else { 0 };
        SequenceTicket(u64::from(kind.bits()) << 32 | held | guessed | estimate | u64::from(device))
    }

    /// A wait on a stream of a device, which holds the work behind it. Unlike work, it has no estimate.
    pub(crate) const fn wait(device: u8) -> SequenceTicket {
        SequenceTicket(SequenceTicket::HELD | device as u64)
    }

    /// Neither work nor a wait.
    pub(crate) const fn nothing(device: u8) -> SequenceTicket {
        SequenceTicket(device as u64)
    }

    /// Work of a known kind that takes so many microseconds.
    #[cfg(test)]
    pub(crate) fn known(estimate: u64) -> SequenceTicket {
        SequenceTicket::new(WorkKind::from_bits(1), estimate, 0, false)
    }

    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u64) -> SequenceTicket {
        SequenceTicket(bits)
    }

    pub(crate) const fn is_wait(self) -> bool {
        self.0 & SequenceTicket::HELD != 0 && !self.is_work()
    }

    pub(crate) const fn is_work(self) -> bool {
        self.estimate() > 0
    }

    /// True if it is work that was not counted when it was submitted.
    pub(crate) const fn is_held(self) -> bool {
        self.is_work() && self.0 & SequenceTicket::HELD != 0
    }

    /// True if it is work of an unknown kind.
    pub(crate) const fn is_guessed(self) -> bool {
        self.0 & SequenceTicket::GUESSED != 0
    }

    const fn kind(self) -> WorkKind {
        WorkKind::from_bits((self.0 >> 32) as u32)
    }

    /// Microseconds that the work is expected to take, 0 for no work.
    pub(crate) const fn estimate(self) -> u64 {
        self.0 >> 8 & SequenceTicket::ESTIMATE
    }

    const fn device(self) -> usize {
        (self.0 & 0xff) as usize
    }
}

/// The state of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permit {
    Closed,
    Open {
        /// No other VM requests the device.
        alone: bool,
        /// The work in flight fills the window.
        full: bool,
    },
}

/// The work of a stream that is enough for a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MarkerInterval {
    pub(crate) pieces: u32,
    /// Microseconds.
    pub(crate) estimate: u64,
}

/// The time accounting of one device.
#[derive(Debug)]
pub(crate) struct TimeAccounting {
    /// The mappings of the pages below.
    _pages: (Arc<Mapping>, Mapping),
    permit: Words,
    report: Words,
    /// `None` if no arbiter reads it.
    wake_fd: Option<OwnedFd>,
    /// Written by the thread that submits: pieces that could run when submitted, and the sum of their estimates in
    /// microseconds.
    begun: AtomicU64,
    given: AtomicU64,
    /// Written by the thread that looks for completion: the same two figures of pieces that were held, once they no longer are;
    /// and of pieces that ended.
    freed: AtomicU64,
    released: AtomicU64,
    ended: AtomicU64,
    taken: AtomicU64,
    /// The time up to which busy time is counted.
    counted: AtomicU64,
    /// The time since which work is in flight without a break. Written by the thread that begins the first piece.
    since: AtomicU64,
    /// The threads that wait for a permit or for room: [`SUBMITTER`], [`BESIDE`].
    waiting: AtomicU32,
}

/// The thread that submits the guest's work.
const SUBMITTER: u32 = 1;
/// The thread that makes work beside it.
const BESIDE: u32 = 2;

impl TimeAccounting {
    /// A device whose arbiter wrote `page` and reads `report`.
    pub(crate) fn new(page: Arc<Mapping>, report: Mapping, wake_fd: Option<OwnedFd>) -> TimeAccounting {
        let zero = || AtomicU64::new(0);
        TimeAccounting {
            permit: page.words(),
            report: report.words(),
            _pages: (page, report),
            wake_fd,
            begun: zero(),
            given: zero(),
            freed: zero(),
            released: zero(),
            ended: zero(),
            taken: zero(),
            counted: zero(),
            since: zero(),
            waiting: AtomicU32::new(0),
        }
    }

    fn word(&self) -> u32 {
        self.permit.load_u32(page::PERMIT, Ordering::Acquire)
    }

    /// The sum of the estimates of work that can run and did not end, in microseconds.
    fn under_way(&self) -> u64 {
        // `taken` is read first, so that the difference is never negative.
        let taken = self.taken.load(Ordering::Acquire);
        let given = self.given.load(Ordering::Relaxed).wrapping_add(self.released.load(Ordering::Relaxed));
        given.wrapping_sub(taken)
    }

    fn permit(&self) -> Permit {
        let word = self.word();
        match u64::from(word & !page::TELL) {
            0 => Permit::Closed,
            window => Permit::Open { alone: word & page::TELL == 0, full: self.under_way() >= window },
        }
    }

    fn is_idle(&self) -> bool {
        let ended = self.ended.load(Ordering::Acquire);
        self.begun.load(Ordering::Acquire) + self.freed.load(Ordering::Acquire) == ended
    }

    /// Records that work is about to be in flight; if none is, since `at`.
    fn wake(&self, at: impl FnOnce() -> Nanos) {
        if self.is_idle() {
            let at = at();
            self.since.store(at, Ordering::Release);
            self.report.store_u64(report::COUNTED, at, Ordering::Release);
        }
    }

    fn begin(&self, estimate: u64) {
        let was_idle = self.is_idle();
        self.given.store(self.given.load(Ordering::Relaxed).wrapping_add(estimate), Ordering::Relaxed);
        self.wake(now);
        let begun = self.begun.load(Ordering::Relaxed) + 1;
        self.begun.store(begun, Ordering::Release);
        self.report.store_u64(report::BEGUN, begun, Ordering::Release);
        if was_idle {
            self.announce(|| false);
        }
    }

    /// Signals the arbiter if the permit is closed, because it does not poll a worker without one; and if another VM waits and
    /// `while_shared()`. Dekker pairing: the worker stores the report, then loads the permit; the arbiter stores the permit,
    /// then loads the report. One of the two sees the other's store.
    fn announce(&self, while_shared: impl FnOnce() -> bool) {
        fence(Ordering::SeqCst);
        let word = self.word();
        let is_closed = word & !page::TELL == 0;
        if is_closed || (word & page::TELL != 0 && while_shared()) {
            self.ring();
        }
    }

    /// Records that a held piece can run since `at`.
    fn free(&self, estimate: u64, at: Nanos) {
        let was_idle = self.is_idle();
        self.released.store(self.released.load(Ordering::Relaxed).wrapping_add(estimate), Ordering::Release);
        self.wake(|| at);
        let freed = self.freed.load(Ordering::Relaxed) + 1;
        self.freed.store(freed, Ordering::Release);
        self.report.store_u64(report::FREED, freed, Ordering::Release);
        if was_idle {
            self.announce(|| true);
        }
    }

    /// Records that pieces have ended, the last of them at `at`.
    fn end(&self, pieces: u64, estimate: u64, at: Nanos) {
        self.taken.store(self.taken.load(Ordering::Relaxed).wrapping_add(estimate), Ordering::Release);
        let from = self.counted.load(Ordering::Relaxed).max(self.since.load(Ordering::Acquire));
        if at > from {
            let busy = self.report.load_u64(report::BUSY, Ordering::Relaxed);
            self.report.store_u64(report::BUSY, busy.wrapping_add(at - from), Ordering::Release);
        }
        let counted = from.max(at);
        self.counted.store(counted, Ordering::Relaxed);
        self.report.store_u64(report::COUNTED, counted, Ordering::Release);
        // After a failure all work counts as ended already.
        let all = self.begun.load(Ordering::Acquire) + self.freed.load(Ordering::Relaxed);
        let ended = all.min(self.ended.load(Ordering::Relaxed) + pieces);
        self.ended.store(ended, Ordering::Release);
        self.report.store_u64(report::ENDED, ended, Ordering::Release);
        if self.is_idle() {
            self.announce_idle();
        }
    }

    /// Signals that no work is in flight. If work waits, this does not end the turn.
    fn announce_idle(&self) {
        self.announce(|| self.waiting.load(Ordering::Relaxed) == 0);
    }

    fn ring(&self) {
        let Some(wake_fd) = &self.wake_fd else { return };
        // It fails only if the counter is full, hence only if the arbiter has not read it for very long.
        if let Err(error) = rustix::io::write(wake_fd, &1_u64.to_ne_bytes()) {
            tracing::debug!(%error, "cannot signal the arbiter");
        }
    }

    fn set_waiting(&self, thread: u32, waiting: bool) {
        let before = if waiting {
            self.waiting.fetch_or(thread, Ordering::SeqCst)
        } else {
            self.waiting.fetch_and(!thread, Ordering::SeqCst)
        };
        if (before & thread != 0) == waiting {
            return;
        }
        // Two threads write the word: the one that stores last stores the latest state.
        loop {
            let state = self.waiting.load(Ordering::SeqCst);
            self.report.store_u32(report::WAITING, u32::from(state != 0), Ordering::SeqCst);
            if self.waiting.load(Ordering::SeqCst) == state {
                return;
            }
        }
    }

    fn count(&self, at: usize, more: u64) {
        let sum = self.report.load_u64(at, Ordering::Relaxed).wrapping_add(more);
        self.report.store_u64(at, sum, Ordering::Relaxed);
    }
}

/// The time accounting of all devices of the session.
#[derive(Debug)]
pub(crate) struct Time {
    devices: Box<[TimeAccounting]>,
    estimates: Estimates,
    /// The thread that waits for room in a window, once it has waited.
    submitter: OnceLock<Thread>,
}

impl Time {
    pub(crate) fn new(devices: Vec<TimeAccounting>) -> Time {
        Time { devices: devices.into(), estimates: Estimates::default(), submitter: OnceLock::new() }
    }

    /// One device; [`Time::set`] sets its permit.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn own() -> Time {
        let private = || Mapping::private(0, page::BYTES as u64).expect("a page");
        let time = Time::new(vec![TimeAccounting::new(Arc::new(private()), private(), None)]);
        time.set(OPEN);
        time
    }

    /// Sets the permit of the first device.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn set(&self, permit: u32) {
        let Some(account) = self.devices.first() else { return };
        account.permit.store_u32(page::PERMIT, permit, Ordering::Release);
        account.permit.wake(page::PERMIT, page::SLEEPERS);
    }

    /// Pieces in flight on the first device, and nanoseconds counted.
    #[cfg(test)]
    pub(crate) fn shown(&self) -> (u64, u64) {
        let account = self.devices.first().expect("a device");
        let report = |at| account.report.load_u64(at, Ordering::Acquire);
        let ended = report(report::ENDED);
        (report(report::BEGUN) + report(report::FREED) - ended, report(report::BUSY))
    }

    /// The estimate of the work in flight on the first device.
    #[cfg(test)]
    pub(crate) fn in_window(&self) -> u64 {
        self.devices.first().expect("a device").under_way()
    }

    /// The accounting of a device; a session with work has at least one device.
    fn account(&self, device: u8) -> Option<&TimeAccounting> {
        self.devices.get(usize::from(device))
    }

    /// The state of a device's permit.
    pub(crate) fn permit(&self, device: u8) -> Permit {
        self.account(device).map_or(Permit::Open { alone: true, full: false }, TimeAccounting::permit)
    }

    /// True if another VM requests the device.
    pub(crate) fn is_shared(&self, device: u8) -> bool {
        self.account(device).is_some_and(|account| account.word() & page::TELL != 0)
    }

    /// The work for which there is a marker now. Without a permit all work is enough.
    pub(crate) fn marker_interval(&self, device: u8) -> MarkerInterval {
        let Some(account) = self.account(device) else {
            return MarkerInterval { pieces: PIECES_ALONE, estimate: u64::MAX };
        };
        let word = account.word();
        let pieces = if word & page::TELL == 0 { PIECES_ALONE } else { PIECES_SHARED };
        MarkerInterval { pieces, estimate: u64::from(word & !page::TELL) / PARTS }
    }

    /// Counts a call of the guest. Called by the dispatcher.
    pub(crate) fn call(&self) {
        if let Some(account) = self.account(0) {
            account.count(report::CALLS, 1);
        }
    }

    /// Counts a launch. Called by the thread that submits.
    pub(crate) fn launch(&self, device: u8) {
        if let Some(account) = self.account(device) {
            account.count(report::LAUNCHES, 1);
        }
    }

    /// Counts a copy. Called by the thread that submits.
    pub(crate) fn copy(&self, device: u8, bytes: u64) {
        if let Some(account) = self.account(device) {
            account.count(report::COPIES, 1);
            account.count(report::COPIED, bytes);
        }
    }

    /// Counts work of a kind that is about to be submitted; `held` if it stands behind a wait. It ends with [`Passed`].
    pub(crate) fn begin(&self, device: u8, kind: WorkKind, held: bool) -> SequenceTicket {
        let Some(account) = self.account(device) else { return SequenceTicket::nothing(device) };
        let known = u64::from(self.estimates.of(kind)).div_ceil(1000);
        let ticket = SequenceTicket::new(kind, known, device, held);
        if !held {
            account.begin(ticket.estimate());
        }
        ticket
    }

    /// Counts held work that can run since `at`. Called by the thread that looks for completion.
    pub(crate) fn free(&self, ticket: SequenceTicket, at: Nanos) {
        if let Some(account) = self.devices.get(ticket.device()) {
            account.free(ticket.estimate(), at);
        }
    }

    /// Ends the accounting of work whose context has failed: the driver reports no completion of it, so all work begun on its
    /// device counts as ended, and no process waits for it.
    pub(crate) fn abandon(&self, ticket: SequenceTicket) {
        let Some(account) = self.devices.get(ticket.device()) else { return };
        let all = account.begun.load(Ordering::Acquire) + account.freed.load(Ordering::Acquire);
        account.ended.store(all, Ordering::Release);
        account.report.store_u64(report::ENDED, all, Ordering::Release);
        account.set_waiting(SUBMITTER, false);
        account.announce_idle();
    }

    /// Records that no work waits.
    pub(crate) fn rest(&self) {
        self.devices.iter().for_each(|account| account.set_waiting(SUBMITTER, false));
    }

    /// Waits until a device's permit is open, for a thread with work beside the submitter's. A full window does not delay it: that work is
    /// one piece at a time, as a stream may have while the window is full.
    pub(crate) fn wait_open(&self, device: u8) {
        let Some(account) = self.account(device) else { return };
        let mut rang: Option<Instant> = None;
        loop {
            if account.word() & !page::TELL != 0 {
                break;
            }
            account.set_waiting(BESIDE, true);
            fence(Ordering::SeqCst);
            let word = account.word();
            if word & !page::TELL != 0 {
                break;
            }
            if rang.is_none_or(|rang| rang.elapsed() >= HEARTBEAT) {
                rang = Some(Instant::now());
                account.ring();
            }
            account.permit.sleep_while(page::PERMIT, word, HEARTBEAT);
        }
        account.set_waiting(BESIDE, false);
    }

    /// Waits a moment for a device to admit a piece of work; `wait` is new for each piece. `others`: work of other streams
    /// stands behind it. Returns `true` if the piece is to be submitted although the window is full.
    pub(crate) fn wait(&self, device: u8, others: bool, wait: &mut AdmissionWait) -> bool {
        let Some(account) = self.account(device) else { return true };
        for (other, account) in self.devices.iter().enumerate() {
            account.set_waiting(SUBMITTER, other == usize::from(device));
        }
        fence(Ordering::SeqCst);
        let word = account.word();
        if word & !page::TELL == 0 {
            if wait.rang.is_none_or(|rang| rang.elapsed() >= HEARTBEAT) {
                wait.rang = Some(Instant::now());
                account.ring();
            }
            account.permit.sleep_while(page::PERMIT, word, HEARTBEAT);
            return false;
        }
        wait.rang = None;
        let ended = account.ended.load(Ordering::Relaxed);
        let since = match wait.stuck {
            Some((before, since)) if before == ended => since,
            _ => {
                let now = Instant::now();
                wait.stuck = Some((ended, now));
                now
            }
        };
        let alone = word & page::TELL == 0;
        // A stream does not wait for room that another fills: not at all if no other VM gains by it, and otherwise for a
        // limited time.
        if others && (alone || since.elapsed() >= STUCK) {
            return true;
        }
        // A thread that ends a piece from now on wakes this thread; a piece that ended before has made room.
        self.submitter.get_or_init(std::thread::current);
        fence(Ordering::SeqCst);
        if !matches!(account.permit(), Permit::Open { full: false, .. }) {
            std::thread::park_timeout(NAP);
        }
        false
    }
}

/// A window that is never full.
#[cfg(any(test, fuzzing))]
pub(crate) const OPEN: u32 = 1_000_000_000;

/// The state of one piece's wait for admission.
#[derive(Debug, Default)]
pub(crate) struct AdmissionWait {
    rang: Option<Instant>,
    /// The number of ended pieces when the last one ended, and that time.
    stuck: Option<(u64, Instant)>,
}

/// Pieces of one stream whose ends were seen at the same time.
#[derive(Debug)]
pub(crate) struct Passed {
    /// Kinds of work with their estimates.
    kinds: [(WorkKind, u64); Passed::KINDS],
    known: usize,
    /// The sum of the estimates of pieces that took the time since `from`.
    recent: u64,
    from: Nanos,
    pieces: u64,
    estimate: u64,
    device: usize,
}

impl Passed {
    /// Limit on pieces whose kinds learn their duration.
    const KINDS: usize = 16;

    /// `from` is the time at which the stream could begin with the first of them.
    pub(crate) const fn new(from: Nanos) -> Passed {
        let kinds = [(WorkKind::from_bits(0), 0); Passed::KINDS];
        Passed { kinds, known: 0, recent: 0, from, pieces: 0, estimate: 0, device: 0 }
    }

    pub(crate) fn add(&mut self, ticket: SequenceTicket) {
        if !ticket.is_work() {
            return;
        }
        if let Some(kind) = self.kinds.get_mut(self.known) {
            *kind = (ticket.kind(), ticket.estimate());
            self.known += 1;
        }
        self.device = ticket.device();
        self.estimate += ticket.estimate();
        self.recent += ticket.estimate();
        self.pieces += 1;
    }

    /// Records that the next piece could begin only at `at`; the durations of the earlier pieces are not known.
    pub(crate) const fn wait_ended(&mut self, at: Nanos) {
        (self.known, self.recent, self.from) = (0, 0, at);
    }

    /// True if no piece has ended.
    pub(crate) const fn is_empty(&self) -> bool {
        self.pieces == 0
    }

    /// Counts the pieces as ended, the last one at `at`.
    pub(crate) fn settle(self, time: &Time, at: Nanos) {
        let Some(account) = time.devices.get(self.device).filter(|_| self.pieces > 0) else { return };
        // Each has a part of the time as large as its part of the estimates.
        let took = at.saturating_sub(self.from);
        for (kind, estimate) in self.kinds.iter().take(self.known) {
            if let Some(took) = took.saturating_mul(*estimate).checked_div(self.recent) {
                time.estimates.learn(*kind, took);
            }
        }
        account.end(self.pieces, self.estimate, at);
        if account.waiting.load(Ordering::Relaxed) != 0
            && let Some(submitter) = time.submitter.get()
        {
            submitter.unpark();
        }
    }
}
