//! The ballast: its size, and the next requirement of the driver.

use super::super::Custody;
use super::{SweepExtent, Wish};
use crate::ids::{ChunkId, Class};
use sluice_messages::{control::ArbiterEvent, custody::UNIT};

/// Looks after which taking memory that the driver could not give is tried again.
const LOOKS: u32 = 20;

/// Growth's next requirement of the driver.
pub(in crate::custody) enum Need {
    Nothing,
    Take {
        leave: u64,
        most: u64,
    },
    Release(Vec<ChunkId>),
    /// Clean ballast: too little is left, and some can be made of memory that no VM uses.
    Clean,
}

impl Custody {
    /// Bytes in chunks, and in chunks that did not come back.
    fn in_custody(&self) -> u64 {
        let (capacity, _) = self.ledger.totals();
        let kept = self.kept.iter().map(|kept| kept.bytes).fold(0, u64::saturating_add);
        capacity.saturating_add(self.suspect_bytes).saturating_add(kept)
    }

    /// Bytes that must leave custody before `price` more can be charged.
    pub(super) fn missing(&self, price: u64) -> u64 {
        let Some(whole) = self.whole else { return 0 };
        let outside = self.ledger.attributed().saturating_add(price).saturating_add(self.settings.reserve);
        self.in_custody().saturating_add(outside).saturating_sub(whole)
    }

    /// Bytes that custody could have in addition.
    fn uncharged(&self) -> u64 {
        let Some(whole) = self.whole else { return u64::MAX };
        whole.saturating_sub(
            self.in_custody().saturating_add(self.ledger.attributed()).saturating_add(self.settings.reserve),
        )
    }

    /// Growth's next requirement of the driver.
    pub(in crate::custody) fn growth_needs(&mut self) -> Need {
        let uncharged = self.uncharged();
        if self.growth.kept_returned && self.growth.may_shift() {
            self.growth.kept_returned = false;
            self.growth.settle(SweepExtent::All);
        }
        match self.growth.settle {
            // A sweep would take the memory of a grant that is about to be used.
            Some(SweepExtent::All) if self.growth.unlocked() => {
                self.growth.begin_sweep();
                return Need::Take { leave: 0, most: u64::MAX };
            }
            Some(SweepExtent::Uncharged) => {
                self.growth.settle = None;
                let leave = self.settings.reserve;
                if uncharged >= UNIT {
                    self.growth.taking = Some((
                        SweepExtent::Uncharged,
                        self.growth.free().saturating_sub(uncharged).max(leave),
                    ));
                    return Need::Take { leave, most: uncharged };
                }
            }
            Some(SweepExtent::All) | None => {}
        }
        let wish = self.next_wish();
        let price = wish.map_or(0, |(.., wish)| self.price(&wish));
        let missing = self.missing(price);
        // Measured growth is replaced by whole units only, because it fluctuates.
        if missing == 0 || wish.is_none() && missing < UNIT {
            return Need::Nothing;
        }
        let spare = wish.map_or_else(|| self.ledger.spare(), |(.., wish)| self.ledger.spare_for(wish.vm));
        match self.ballast(missing, spare) {
            Some(chunks) => Need::Release(chunks),
            None if missing <= spare && self.cleans() => Need::Clean,
            None => {
                let comes = !self.growth.unswept.is_empty() || self.shifts();
                let past = |wish: &Wish| {
                    let late = self.comes_back(None) && wish.late_memory_deadline() > self.growth.now;
                    wish.memory_deadline <= self.growth.now && !late
                };
                if let Some((line, index, _)) = wish.filter(|(.., wish)| past(wish) && !comes) {
                    self.refuse_wish(line, index);
                }
                Need::Nothing
            }
        }
    }

    /// Clean chunks of at least `bytes` in all, if custody can spare them.
    fn ballast(&self, bytes: u64, spare: u64) -> Option<Vec<ChunkId>> {
        if bytes > spare {
            return None;
        }
        let mut chosen = Vec::new();
        let mut sum = 0_u64;
        for class in Class::ALL {
            for chunk in self.chunks.clean_free(class) {
                if sum.saturating_add(class.bytes()) > bytes.next_multiple_of(UNIT) {
                    break;
                }
                sum += class.bytes();
                chosen.push(chunk);
            }
        }
        // The rest by one more chunk, the smallest that suffices.
        for class in Class::ALL.into_iter().rev().filter(|_| sum < bytes) {
            let next = self.chunks.clean_free(class).find(|chunk| !chosen.contains(chunk));
            if let Some(chunk) = next.filter(|_| sum.saturating_add(class.bytes()) >= bytes) {
                sum += class.bytes();
                chosen.push(chunk);
                break;
            }
        }
        (sum >= bytes && sum <= spare).then_some(chosen)
    }

    /// The driver's free memory was measured. Bytes that no charge covers are taken.
    pub(in crate::custody) fn measured(&mut self, free: u64) {
        // Memory that could not be taken may have been in transit.
        self.growth.looks = if self.growth.unusable == 0 { 0 } else { self.growth.looks + 1 };
        if self.growth.looks >= LOOKS {
            self.growth.looks = 0;
            self.growth.unusable = 0;
        }
        self.growth.set_free(free);
        self.see_returned(free);
        let reserve = self.settings.reserve;
        let workers = || self.workers.values();
        let unused: u64 = workers().map(|worker| worker.charged - worker.taken().min(worker.charged)).sum();
        let expected = reserve.saturating_add(unused);
        // Some process may have released memory that it kept. Its pages among the free ones are unknown.
        self.growth.kept_returned |=
            !self.kept.is_empty() && self.growth.free >= expected.saturating_add(UNIT);
        let above = self.growth.free > reserve.saturating_add(UNIT.saturating_mul(2));
        if above && self.uncharged() > UNIT && self.growth.wishes.is_empty() {
            self.growth.settle(SweepExtent::Uncharged);
        }
        self.see_drain(free);
    }

    /// The unit has more than it had at first: memory of processes that had ended before, which the driver gives back late. It is
    /// taken, all free memory with it, for its pages among the free ones are unknown. Memory of drivers is not counted, because no
    /// figure of it is as new as that of the free bytes: so a worker cannot make the unit look larger than it is.
    fn see_returned(&mut self, free: u64) {
        let Some(whole) = self.whole else { return };
        let (capacity, _) = self.ledger.totals();
        let has = capacity.saturating_add(self.suspect_bytes).saturating_add(free);
        let more = has.saturating_sub(whole);
        if more < UNIT {
            return;
        }
        tracing::info!(bytes = more, "the driver gave back memory of earlier processes; the unit takes it");
        self.whole = Some(has);
        self.ledger.set_nominal(has.saturating_sub(self.settings.reserve) / UNIT * UNIT);
        self.growth.kept_came_back(more);
        self.touched.extend(self.members.keys());
    }

    /// Reports once that memory is missing that no charge covers: some driver took it without a grant.
    fn see_drain(&mut self, free: u64) {
        if self.moves() || !self.growth.unlocked() {
            return;
        }
        let Some(whole) = self.whole else { return };
        let charged: u64 = self.workers.values().map(|worker| worker.charged).sum();
        let known = self.in_custody().saturating_add(free).saturating_add(charged);
        let missing = whole.saturating_sub(known);
        let much = missing > self.settings.reserve / 2 && missing >= UNIT;
        if much && !self.growth.drained {
            tracing::warn!(
                missing,
                "drivers took memory without a grant; the reserve is not refilled for them"
            );
            self.event(ArbiterEvent::Drift, 0, 0, missing);
        }
        self.growth.drained = much;
    }
}
