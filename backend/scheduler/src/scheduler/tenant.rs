//! One VM of the scheduler: its virtual time, its turn, its cap and its guarantee.

use super::terms::{CLASSES, Figures, Seen, Terms, WHOLE};
use crate::Nanos;

/// Virtual time: nanoseconds times [`VIRTUAL`] divided by the weight.
pub(super) type Virtual = u128;

const VIRTUAL: u64 = 10_000;

#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub(super) terms: Terms,
    pub(super) time: Virtual,
    /// Its virtual time in each priority when it left that priority, so that a return does not forgive a debt.
    pub(super) times: [Virtual; CLASSES],
    pub(super) seen: Seen,
    /// True if it gets no more turns.
    pub(super) fenced: bool,
    pub(super) open: bool,
    /// Start of its turn, and its number of begun pieces of work at that time.
    pub(super) opened: Nanos,
    pub(super) begun_before: u64,
    /// Time from which its permit may be closed for other VMs.
    pub(super) until: Nanos,
    /// True if no other VM may take its turn: it has it by a guarantee, or because its priority had none for long.
    pub(super) promoted: bool,
    /// True if it did not use its last turn at all, and has been inactive since.
    pub(super) absent: bool,
    /// Time and charged use at the close of its permit, while work from before is under way.
    pub(super) left: Option<(Nanos, Nanos)>,
    /// Estimate of its further use after its turns.
    pub(super) overrun: Nanos,
    /// Turns by `Scheduler::is_stuck` since its last regular turn.
    pub(super) freed: u32,
    /// True if its turn is one of these.
    pub(super) is_freed: bool,
    /// Time left under its cap; negative for excess use.
    pub(super) tokens: i64,
    pub(super) throttled: bool,
    /// Time missing of its guarantee.
    pub(super) credit: i64,
    /// Time since which it waits for a turn.
    pub(super) ready_since: Option<Nanos>,
    pub(super) figures: Figures,
}

impl Tenant {
    pub(super) const fn is_active(&self) -> bool {
        self.seen.waiting > 0 || self.seen.flying > 0
    }

    pub(super) const fn is_flying(&self) -> bool {
        self.seen.flying > 0
    }

    pub(super) const fn is_waiting(&self) -> bool {
        self.seen.waiting > 0
    }

    /// The window of each worker of the VM.
    pub(super) fn each(&self, window: Nanos) -> Nanos {
        window / Nanos::from(self.seen.waiting.max(self.seen.flying).max(1))
    }

    pub(super) const fn has_begun(&self) -> bool {
        self.seen.begun != self.begun_before
    }

    /// True if it can have a turn.
    pub(super) const fn is_ready(&self) -> bool {
        self.is_waiting() && !self.open && !self.fenced && !self.throttled && !self.absent
    }

    pub(super) const fn is_capped(&self) -> bool {
        self.terms.cap < WHOLE
    }

    /// Makes it compete for turns again, without a claim to the time before.
    pub(super) fn rejoin(&mut self, clocks: &[Virtual; CLASSES]) {
        self.time = self.time.max(clocks[self.terms.class]);
    }

    /// Ends its absence after activity.
    pub(super) fn alive(&mut self, clocks: &[Virtual; CLASSES]) {
        if core::mem::take(&mut self.absent) {
            self.rejoin(clocks);
        }
    }

    pub(super) fn charge(&mut self, time: Nanos, overlapped: bool) {
        self.figures.used = self.figures.used.saturating_add(time);
        if overlapped {
            self.figures.overlapped = self.figures.overlapped.saturating_add(time);
        }
        let time = signed(time);
        self.time += Virtual::from(time.unsigned_abs().saturating_mul(VIRTUAL))
            / Virtual::from(self.terms.weight.max(1));
        if self.is_capped() {
            self.tokens = self.tokens.saturating_sub(time);
        }
        if self.terms.guarantee > 0 {
            self.credit = self.credit.saturating_sub(time);
        }
    }

    pub(super) fn shut(&mut self, now: Nanos) {
        if self.open {
            self.open = false;
            self.promoted = false;
            self.left = self.is_flying().then_some((now, self.figures.used));
            if !self.is_flying() {
                self.overrun /= 2;
            }
        }
    }

    /// Its work of an earlier turn has ended, or it gets another turn.
    pub(super) fn settle(&mut self) {
        if let Some((_, used)) = self.left.take() {
            self.overrun = self.overrun / 2 + self.figures.used.saturating_sub(used) / 2;
        }
    }
}

/// No overflow: times are far below the limits of both types.
pub(super) fn signed(time: Nanos) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}
