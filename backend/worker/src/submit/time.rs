//! The worker's end of its devices' time: the work it may submit, the amount under way, and its report.
//!
//! Each device has a [`Meter`]. The thread that holds the [`crate::submit::Submitter`] begins pieces of work; the thread that
//! makes a pass of [`crate::submit::completion`] ends them; so each word has one writer. While the permit is open and the
//! device's window is not full, that is all: one load of the permit and a few words of this process. The arbiter reads the
//! report page when it needs it, and is signalled only when it waits for it or when work waits for a permit.
//!
//! Only work that can run is under way: work that stands behind a wait in its stream is *held*, and begins to count when the
//! wait is over. Until then the device does nothing for it, no process waits for its end, and it does not show how soon the
//! device is free.

use core::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering, fence},
    time::Duration,
};
use rustix::fd::OwnedFd;
use sluice_messages::custody::{page, report};
use sluice_protocol::shared::Shared as _;
use sluice_runtime::clock::nanoseconds as now;
use sluice_scheduler::{
    Nanos,
    estimate::{Estimates, Kind},
};
use sluice_shared_memory::{Mapping, mapping::Words};
use std::{
    sync::{Arc, OnceLock},
    thread::Thread,
    time::Instant,
};

/// What work is taken for that nobody knows, in microseconds: ten pieces fill a turn, a hundred a device that is free.
const UNKNOWN: u64 = 200;
/// A worker that waits for a permit says so again after this time: the arbiter takes silence for absence.
const HEARTBEAT: Duration = Duration::from_millis(10);
/// How long a full window holds back one stream for another although nothing ends: what is under way may wait for what is
/// held back.
const STUCK: Duration = Duration::from_millis(20);
/// Longest sleep for room in a window. It ends when a piece of work does.
const NAP: Duration = Duration::from_millis(1);

/// What ends with a marker. A piece of work: its kind, what it was taken for, the device, and whether it was held when it was
/// submitted. Or a wait. Or nothing that counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Ticket {
    const HELD: u64 = 1 << 31;
    /// Microseconds; more than any estimate.
    const ESTIMATE: u64 = (1 << 23) - 1;

    fn new(kind: Kind, estimate: u64, device: u8, held: bool) -> Ticket {
        let estimate = estimate.clamp(1, Ticket::ESTIMATE);
        let held = if held { Ticket::HELD } else { 0 };
        Ticket(u64::from(kind.bits()) << 32 | held | estimate << 8 | u64::from(device))
    }

    /// A wait on a stream of a device, behind which work is held. Work has an estimate.
    pub(crate) const fn wait(device: u8) -> Ticket {
        Ticket(Ticket::HELD | device as u64)
    }

    /// Nothing that counts.
    pub(crate) const fn nothing(device: u8) -> Ticket {
        Ticket(device as u64)
    }

    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u64) -> Ticket {
        Ticket(bits)
    }

    pub(crate) const fn is_wait(self) -> bool {
        self.0 & Ticket::HELD != 0 && !self.is_work()
    }

    pub(crate) const fn is_work(self) -> bool {
        self.estimate() > 0
    }

    /// Whether it is work that did not count when it was submitted.
    pub(crate) const fn is_held(self) -> bool {
        self.is_work() && self.0 & Ticket::HELD != 0
    }

    const fn kind(self) -> Kind {
        Kind::from_bits((self.0 >> 32) as u32)
    }

    const fn estimate(self) -> u64 {
        self.0 >> 8 & Ticket::ESTIMATE
    }

    const fn device(self) -> usize {
        (self.0 & 0xff) as usize
    }
}

/// What a permit says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permit {
    Closed,
    Open {
        /// Nobody else wants the device.
        alone: bool,
        /// As much is under way as may be.
        full: bool,
    },
}

/// One device.
#[derive(Debug)]
pub(crate) struct Meter {
    /// What the pages below are of.
    _pages: (Arc<Mapping>, Mapping),
    permit: Words,
    report: Words,
    /// `None` where nobody listens.
    bell: Option<OwnedFd>,
    /// Written by who submits: pieces that could run, and microseconds by estimate.
    begun: AtomicU64,
    given: AtomicU64,
    /// Written by who looks for completion: the same of pieces that were held, once they no longer are; and of those that
    /// ended.
    freed: AtomicU64,
    released: AtomicU64,
    ended: AtomicU64,
    taken: AtomicU64,
    /// Up to when the time is counted in which some was under way.
    counted: AtomicU64,
    /// Since when some is under way without a break. Written by who begins what comes first.
    since: AtomicU64,
    waiting: AtomicBool,
}

impl Meter {
    /// A device whose arbiter wrote `page` and reads `report`.
    pub(crate) fn new(page: Arc<Mapping>, report: Mapping, bell: Option<OwnedFd>) -> Meter {
        let zero = || AtomicU64::new(0);
        Meter {
            permit: page.words(),
            report: report.words(),
            _pages: (page, report),
            bell,
            begun: zero(),
            given: zero(),
            freed: zero(),
            released: zero(),
            ended: zero(),
            taken: zero(),
            counted: zero(),
            since: zero(),
            waiting: AtomicBool::new(false),
        }
    }

    fn word(&self) -> u32 {
        self.permit.load_u32(page::PERMIT, Ordering::Acquire)
    }

    /// Microseconds by estimate of what can run and did not end.
    fn under_way(&self) -> u64 {
        // What is taken is read first, so that the difference is never negative.
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

    /// Something is about to be under way; the first since `at`, if nothing is.
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
            self.tell(|| false);
        }
    }

    /// Rings where the permit is closed, for nobody looks at a worker without one; and `while_shared` where somebody waits for it.
    /// Whoever closes a permit looks at the report behind it; here the report was written, and then the permit is looked at: one of
    /// the two sees the other.
    fn tell(&self, while_shared: impl FnOnce() -> bool) {
        fence(Ordering::SeqCst);
        let word = self.word();
        let is_closed = word & !page::TELL == 0;
        if is_closed || (word & page::TELL != 0 && while_shared()) {
            self.ring();
        }
    }

    /// A piece that was held can run since `at`.
    fn free(&self, estimate: u64, at: Nanos) {
        let was_idle = self.is_idle();
        self.released.store(self.released.load(Ordering::Relaxed).wrapping_add(estimate), Ordering::Release);
        self.wake(|| at);
        let freed = self.freed.load(Ordering::Relaxed) + 1;
        self.freed.store(freed, Ordering::Release);
        self.report.store_u64(report::FREED, freed, Ordering::Release);
        if was_idle {
            self.tell(|| true);
        }
    }

    /// Pieces have ended, the last of them at `at`.
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
        let ended = self.ended.load(Ordering::Relaxed) + pieces;
        self.ended.store(ended, Ordering::Release);
        self.report.store_u64(report::ENDED, ended, Ordering::Release);
        if self.is_idle() {
            self.tell_idle();
        }
    }

    /// Nothing is under way. While something waits that is no end of the turn.
    fn tell_idle(&self) {
        self.tell(|| !self.waiting.load(Ordering::Relaxed));
    }

    fn ring(&self) {
        let Some(bell) = &self.bell else { return };
        // It fails only when it was rung ever so often and nobody listens.
        if let Err(error) = rustix::io::write(bell, &1_u64.to_ne_bytes()) {
            tracing::debug!(%error, "the bell is stuck");
        }
    }

    fn set_waiting(&self, waiting: bool) {
        if self.waiting.swap(waiting, Ordering::Relaxed) != waiting {
            self.report.store_u32(report::WAITING, u32::from(waiting), Ordering::SeqCst);
        }
    }

    fn count(&self, at: usize, more: u64) {
        let sum = self.report.load_u64(at, Ordering::Relaxed).wrapping_add(more);
        self.report.store_u64(at, sum, Ordering::Relaxed);
    }
}

/// All devices of the session.
#[derive(Debug)]
pub(crate) struct Time {
    devices: Box<[Meter]>,
    estimates: Estimates,
    /// Who waits for room, once it has.
    feeder: OnceLock<Thread>,
}

impl Time {
    pub(crate) fn new(devices: Vec<Meter>) -> Time {
        Time { devices: devices.into(), estimates: Estimates::default(), feeder: OnceLock::new() }
    }

    /// One device whose permit is what [`Time::set`] says.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn own() -> Time {
        let private = || Mapping::private(0, page::BYTES as u64).expect("a page");
        let time = Time::new(vec![Meter::new(Arc::new(private()), private(), None)]);
        time.set(OPEN);
        time
    }

    /// Opens or closes the first device.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn set(&self, permit: u32) {
        let Some(meter) = self.devices.first() else { return };
        meter.permit.store_u32(page::PERMIT, permit, Ordering::Release);
        meter.permit.wake(page::PERMIT);
    }

    /// Pieces under way on the first device, and nanoseconds counted.
    #[cfg(test)]
    pub(crate) fn shown(&self) -> (u64, u64) {
        let meter = self.devices.first().expect("a device");
        let report = |at| meter.report.load_u64(at, Ordering::Acquire);
        let ended = report(report::ENDED);
        (report(report::BEGUN) + report(report::FREED) - ended, report(report::BUSY))
    }

    /// What is under way on the first device, by estimate.
    #[cfg(test)]
    pub(crate) fn in_window(&self) -> u64 {
        self.devices.first().expect("a device").under_way()
    }

    /// The meter of a device; sessions have at least one device where they have work.
    fn meter(&self, device: u8) -> Option<&Meter> {
        self.devices.get(usize::from(device))
    }

    /// What may be submitted to a device now.
    pub(crate) fn permit(&self, device: u8) -> Permit {
        self.meter(device).map_or(Permit::Open { alone: true, full: false }, Meter::permit)
    }

    /// Counts a call of the guest. By the dispatcher.
    pub(crate) fn call(&self) {
        if let Some(meter) = self.meter(0) {
            meter.count(report::CALLS, 1);
        }
    }

    /// Counts a launch. By who submits.
    pub(crate) fn launch(&self, device: u8) {
        if let Some(meter) = self.meter(device) {
            meter.count(report::LAUNCHES, 1);
        }
    }

    /// Counts a copy. By who submits.
    pub(crate) fn copy(&self, device: u8, bytes: u64) {
        if let Some(meter) = self.meter(device) {
            meter.count(report::COPIES, 1);
            meter.count(report::COPIED, bytes);
        }
    }

    /// Work of a kind is about to be submitted; `held` when it stands behind a wait. It ends by [`Passed`].
    pub(crate) fn begin(&self, device: u8, kind: Kind, held: bool) -> Ticket {
        let Some(meter) = self.meter(device) else { return Ticket::nothing(device) };
        let known = u64::from(self.estimates.of(kind)).div_ceil(1000);
        let ticket = Ticket::new(kind, if known == 0 { UNKNOWN } else { known }, device, held);
        if !held {
            meter.begin(ticket.estimate());
        }
        ticket
    }

    /// Work that was held can run since `at`. By who looks for completion.
    pub(crate) fn free(&self, ticket: Ticket, at: Nanos) {
        if let Some(meter) = self.devices.get(ticket.device()) {
            meter.free(ticket.estimate(), at);
        }
    }

    /// The driver says nothing any more of a context that this belongs to: nothing that was begun on its device ends any more,
    /// and nobody is to wait for it.
    pub(crate) fn abandon(&self, ticket: Ticket) {
        let Some(meter) = self.devices.get(ticket.device()) else { return };
        let all = meter.begun.load(Ordering::Acquire) + meter.freed.load(Ordering::Acquire);
        meter.ended.store(all, Ordering::Release);
        meter.report.store_u64(report::ENDED, all, Ordering::Release);
        meter.set_waiting(false);
        meter.tell_idle();
    }

    /// Nothing waits.
    pub(crate) fn rest(&self) {
        self.devices.iter().for_each(|meter| meter.set_waiting(false));
    }

    /// Waits a moment for a device to admit a piece of work, for which `patience` is a fresh one. `others` when work stands
    /// behind it that is not of its stream. `true` when it is to be submitted although the window is full.
    pub(crate) fn wait(&self, device: u8, others: bool, patience: &mut Patience) -> bool {
        let Some(meter) = self.meter(device) else { return true };
        for (other, meter) in self.devices.iter().enumerate() {
            meter.set_waiting(other == usize::from(device));
        }
        fence(Ordering::SeqCst);
        let word = meter.word();
        if word & !page::TELL == 0 {
            if patience.rang.is_none_or(|rang| rang.elapsed() >= HEARTBEAT) {
                patience.rang = Some(Instant::now());
                meter.ring();
            }
            meter.permit.sleep_while(page::PERMIT, word, HEARTBEAT);
            return false;
        }
        patience.rang = None;
        let ended = meter.ended.load(Ordering::Relaxed);
        let since = match patience.stuck {
            Some((before, since)) if before == ended => since,
            _ => {
                let now = Instant::now();
                patience.stuck = Some((ended, now));
                now
            }
        };
        let alone = word & page::TELL == 0;
        // One stream does not wait for another's room: not at all where nobody else gains by it, and not for ever elsewhere.
        if others && (alone || since.elapsed() >= STUCK) {
            return true;
        }
        // Whoever ends a piece from now on wakes this thread; what ended before has made room.
        self.feeder.get_or_init(std::thread::current);
        fence(Ordering::SeqCst);
        if !matches!(meter.permit(), Permit::Open { full: false, .. }) {
            std::thread::park_timeout(NAP);
        }
        false
    }
}

/// A window that is as good as open.
#[cfg(any(test, fuzzing))]
pub(crate) const OPEN: u32 = 1_000_000_000;

/// How long somebody has waited with one piece of work.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    rang: Option<Instant>,
    /// What had ended when nothing ended any more, and since when.
    stuck: Option<(u64, Instant)>,
}

/// Pieces of one stream that were seen to have ended at the same time.
#[derive(Debug)]
pub(crate) struct Passed {
    kinds: [Kind; Passed::KINDS],
    known: usize,
    /// Pieces whose duration is the time since `from`.
    recent: u64,
    from: Nanos,
    pieces: u64,
    estimate: u64,
    device: usize,
}

impl Passed {
    /// Of so many the kind is learned about.
    const KINDS: usize = 16;

    /// `from` is when the stream could begin with the first of them.
    pub(crate) const fn new(from: Nanos) -> Passed {
        let kinds = [Kind::from_bits(0); Passed::KINDS];
        Passed { kinds, known: 0, recent: 0, from, pieces: 0, estimate: 0, device: 0 }
    }

    pub(crate) fn add(&mut self, ticket: Ticket) {
        if !ticket.is_work() {
            return;
        }
        if let Some(kind) = self.kinds.get_mut(self.known) {
            *kind = ticket.kind();
            self.known += 1;
        }
        self.device = ticket.device();
        self.estimate += ticket.estimate();
        self.recent += 1;
        self.pieces += 1;
    }

    /// What comes next could begin only at `at`, and how long took what came before is not known.
    pub(crate) const fn wait_ended(&mut self, at: Nanos) {
        (self.known, self.recent, self.from) = (0, 0, at);
    }

    /// Whether anything that counts has ended.
    pub(crate) const fn is_empty(&self) -> bool {
        self.pieces == 0
    }

    /// Ends them, the last one at `at`.
    pub(crate) fn settle(self, time: &Time, at: Nanos) {
        let Some(meter) = time.devices.get(self.device).filter(|_| self.pieces > 0) else { return };
        if let Some(each) = at.saturating_sub(self.from).checked_div(self.recent) {
            for kind in self.kinds.iter().take(self.known) {
                time.estimates.learn(*kind, each);
            }
        }
        meter.end(self.pieces, self.estimate, at);
        if meter.waiting.load(Ordering::Relaxed)
            && let Some(feeder) = time.feeder.get()
        {
            feeder.unpark();
        }
    }
}
