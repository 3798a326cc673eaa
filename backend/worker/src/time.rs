//! The worker's end of its devices' time: what it may submit, how much is under way, and what it reports.
//!
//! Each device has a [`Meter`]. Whoever holds the [`crate::submit::Submitter`] begins pieces of work; whoever makes a pass
//! of [`crate::completion`] ends them; so each word has one writer. While the permit is open and the device's window is not
//! full, that is all: one load of the permit and a few words of this process. The arbiter reads the report page when it
//! wants to know, and is rung only when it waits for it or when work waits for a permit.

use core::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering, fence},
    time::Duration,
};
use rustix::{
    fd::OwnedFd,
    time::{ClockId, clock_gettime},
};
use sluice_protocol::{
    custody::{page, report},
    shared::Shared as _,
};
use sluice_scheduler::{
    Nanos,
    estimate::{Estimates, Kind},
};
use sluice_shared_memory::{Mapping, mapping::Words};
use std::{sync::Arc, time::Instant};

/// What work is taken for that nobody knows, in microseconds: two or three pieces fill a turn, twenty a device that is free.
const UNKNOWN: u64 = 1_000;
/// A worker that waits for a permit says so again after this time: the arbiter takes silence for absence.
const HEARTBEAT: Duration = Duration::from_millis(10);
/// How long a full window holds back work although nothing ends: what is under way may wait for what is held back.
const STUCK: Duration = Duration::from_millis(20);
/// Bounds of the sleep for room in a window.
const NAP: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

/// Nanoseconds of the monotonic clock, which is the same for all processes.
pub(crate) fn now() -> Nanos {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither is negative.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// A piece of work that was begun: its kind, what it was taken for, and the device. 0 for none that counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Ticket {
    const fn new(kind: Kind, estimate: u64, device: u8) -> Ticket {
        Ticket((kind.bits() as u64) << 32 | estimate << 8 | device as u64)
    }

    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u64) -> Ticket {
        Ticket(bits)
    }

    pub(crate) const fn is_none(self) -> bool {
        self.0 == 0
    }

    const fn kind(self) -> Kind {
        Kind::from_bits((self.0 >> 32) as u32)
    }

    const fn estimate(self) -> u64 {
        self.0 >> 8 & 0xff_ffff
    }

    const fn device(self) -> usize {
        (self.0 & 0xff) as usize
    }
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
    /// Written by who submits: pieces, and microseconds by estimate.
    begun: AtomicU64,
    given: AtomicU64,
    /// Since when some is under way without a break.
    since: AtomicU64,
    /// Written by who looks for completion.
    ended: AtomicU64,
    taken: AtomicU64,
    counted: AtomicU64,
    waiting: AtomicBool,
}

impl Meter {
    /// A device whose arbiter wrote `page` and reads `report`.
    pub(crate) fn new(page: Arc<Mapping>, report: Mapping, bell: Option<OwnedFd>) -> Meter {
        Meter {
            permit: page.words(),
            report: report.words(),
            _pages: (page, report),
            bell,
            begun: AtomicU64::new(0),
            given: AtomicU64::new(0),
            since: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            counted: AtomicU64::new(0),
            waiting: AtomicBool::new(false),
        }
    }

    fn word(&self) -> u32 {
        self.permit.load_u32(page::PERMIT, Ordering::Acquire)
    }

    fn window(&self) -> u64 {
        u64::from(self.word() & !page::TELL)
    }

    /// Whether work may be submitted now.
    fn admits(&self) -> bool {
        let under_way = self.given.load(Ordering::Relaxed).wrapping_sub(self.taken.load(Ordering::Relaxed));
        under_way < self.window()
    }

    fn begin(&self, estimate: u64) {
        self.given.store(self.given.load(Ordering::Relaxed).wrapping_add(estimate), Ordering::Relaxed);
        let begun = self.begun.load(Ordering::Relaxed);
        if begun == self.ended.load(Ordering::Acquire) {
            let now = now();
            self.since.store(now, Ordering::Release);
            self.report.store_u64(report::COUNTED, now, Ordering::Release);
        }
        self.begun.store(begun + 1, Ordering::Release);
        self.report.store_u64(report::BEGUN, begun + 1, Ordering::Release);
    }

    fn end(&self, pieces: u64, estimate: u64, now: Nanos) {
        self.taken.store(self.taken.load(Ordering::Relaxed).wrapping_add(estimate), Ordering::Relaxed);
        let from = self.counted.load(Ordering::Relaxed).max(self.since.load(Ordering::Acquire));
        let busy = self.report.load_u64(report::BUSY, Ordering::Relaxed);
        self.report.store_u64(report::BUSY, busy.wrapping_add(now.saturating_sub(from)), Ordering::Release);
        self.counted.store(now, Ordering::Relaxed);
        self.report.store_u64(report::COUNTED, now, Ordering::Release);
        let ended = self.ended.load(Ordering::Relaxed) + pieces;
        self.ended.store(ended, Ordering::Release);
        self.report.store_u64(report::ENDED, ended, Ordering::Release);
        if ended == self.begun.load(Ordering::Acquire) {
            self.tell_idle();
        }
    }

    /// Nothing is under way. Whoever closes a permit looks at the report behind it; here the report is written and then the
    /// permit looked at: one of the two sees the other.
    fn tell_idle(&self) {
        fence(Ordering::SeqCst);
        let word = self.word();
        let is_closed = word & !page::TELL == 0;
        if is_closed || (word & page::TELL != 0 && !self.waiting.load(Ordering::Relaxed)) {
            self.ring();
        }
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
}

/// All devices of the session.
#[derive(Debug)]
pub(crate) struct Time {
    devices: Box<[Meter]>,
    estimates: Estimates,
}

impl Time {
    pub(crate) fn new(devices: Vec<Meter>) -> Time {
        Time { devices: devices.into(), estimates: Estimates::default() }
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

    /// The meter of a device; sessions have at least one device where they have work.
    fn meter(&self, device: u8) -> Option<&Meter> {
        self.devices.get(usize::from(device))
    }

    /// Whether work may be submitted to a device now.
    pub(crate) fn admits(&self, device: u8) -> bool {
        self.meter(device).is_none_or(Meter::admits)
    }

    /// Work of a kind is about to be submitted. It ends by [`Passed`].
    pub(crate) fn begin(&self, device: u8, kind: Kind) -> Ticket {
        let Some(meter) = self.meter(device) else { return Ticket::default() };
        let known = u64::from(self.estimates.of(kind)).div_ceil(1000);
        let estimate = if known == 0 { UNKNOWN } else { known };
        meter.begin(estimate);
        Ticket::new(kind, estimate, device)
    }

    /// The session has failed: nothing that was begun ends any more, and nobody is to wait for it.
    pub(crate) fn abandon(&self) {
        for meter in &self.devices {
            let begun = meter.begun.load(Ordering::Acquire);
            meter.report.store_u64(report::ENDED, begun, Ordering::Release);
            meter.set_waiting(false);
            meter.tell_idle();
        }
    }

    /// Nothing waits.
    pub(crate) fn rest(&self) {
        self.devices.iter().for_each(|meter| meter.set_waiting(false));
    }

    /// Waits a moment for a device to admit work, for which `patience` is a fresh one. `true` when it is to be submitted.
    pub(crate) fn wait(&self, device: u8, patience: &mut Patience) -> bool {
        let Some(meter) = self.meter(device) else { return true };
        for (other, meter) in self.devices.iter().enumerate() {
            meter.set_waiting(other == usize::from(device));
        }
        fence(Ordering::SeqCst);
        let word = meter.word();
        if word & !page::TELL == 0 {
            patience.stuck = None;
            if patience.rang.is_none_or(|rang| rang.elapsed() >= HEARTBEAT) {
                patience.rang = Some(Instant::now());
                meter.ring();
            }
            meter.permit.sleep_while(page::PERMIT, word, HEARTBEAT);
            return false;
        }
        patience.rang = None;
        if meter.admits() {
            return true;
        }
        let ended = meter.ended.load(Ordering::Relaxed);
        let since = match patience.stuck {
            Some((before, since)) if before == ended => since,
            _ => {
                let now = Instant::now();
                patience.stuck = Some((ended, now));
                now
            }
        };
        if since.elapsed() >= STUCK {
            return true;
        }
        let excess = meter.given.load(Ordering::Relaxed).wrapping_sub(meter.taken.load(Ordering::Relaxed));
        std::thread::sleep(
            Duration::from_micros(excess.saturating_sub(meter.window() / 2) / 4).clamp(NAP[0], NAP[1]),
        );
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
    pieces: u64,
    estimate: u64,
    device: usize,
}

impl Passed {
    /// Of so many the kind is learned about.
    const KINDS: usize = 16;

    pub(crate) const fn new() -> Passed {
        Passed { kinds: [Kind::from_bits(0); Passed::KINDS], pieces: 0, estimate: 0, device: 0 }
    }

    pub(crate) fn add(&mut self, ticket: Ticket) {
        if ticket.is_none() {
            return;
        }
        if let Some(kind) = usize::try_from(self.pieces).ok().and_then(|piece| self.kinds.get_mut(piece)) {
            *kind = ticket.kind();
        }
        self.device = ticket.device();
        self.estimate += ticket.estimate();
        self.pieces += 1;
    }

    /// Ends them. `last` is when something of the stream ended before.
    pub(crate) fn settle(self, time: &Time, last: &AtomicU64) {
        let Some(meter) = time.devices.get(self.device).filter(|_| self.pieces > 0) else { return };
        let now = now();
        let from = last.swap(now, Ordering::Relaxed).max(meter.since.load(Ordering::Acquire));
        let each = now.saturating_sub(from) / self.pieces;
        for kind in self.kinds.iter().take(usize::try_from(self.pieces).unwrap_or(usize::MAX)) {
            time.estimates.learn(*kind, each);
        }
        meter.end(self.pieces, self.estimate, now);
    }
}
