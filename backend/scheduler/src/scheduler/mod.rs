//! The order of turns.
//!
//! The arbiter's clock calls [`Scheduler`]: it passes the demand of VMs ([`Scheduler::see`]) and takes the decision
//! ([`Scheduler::turn`]): a permit for each VM and the time of the next call. It owns the virtual times of the VMs and the turn: one
//! VM is *current*, others may have work under way that they submitted in their turns, and they are charged their part of the time
//! until it ends. It must never read a clock or wait.
//!
//! Time is charged by the caller's own observations: the VM that had the turn and requested it, and the VMs with work
//! under way. A VM that has the turn but does not use it is charged all the same, but delays no other: the next one is
//! admitted after a moment. Its permit stays open a little longer, because it may just be slow to wake.

mod accounting;
mod choice;
mod tenant;
mod terms;

use crate::Nanos;
use tenant::{Tenant, Virtual, signed};
pub use terms::{CLASSES, Figures, Permit, Seen, Settings, Terms};

/// A VM of the scheduler. A number is reused after its VM is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// The slot's number; numbers are small.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The scheduler of one unit.
#[derive(Debug)]
pub struct Scheduler {
    settings: Settings,
    tenants: Vec<Option<Tenant>>,
    current: Option<Slot>,
    /// True if no other VM has work: the current one is not watched, and reports its use by [`Scheduler::metered`].
    quiet: bool,
    /// Virtual time of each priority: that of its last turn, or of its VM that is least ahead at a turn by a guarantee.
    clocks: [Virtual; CLASSES],
    /// Last time at which each priority had a turn, or no VM that waited for one.
    served: [Nanos; CLASSES],
    /// Time up to which use was charged.
    charged: Nanos,
}

impl Scheduler {
    /// Creates a scheduler without VMs.
    #[must_use]
    pub const fn new(settings: Settings, now: Nanos) -> Scheduler {
        Scheduler {
            settings,
            tenants: Vec::new(),
            current: None,
            quiet: false,
            clocks: [0; CLASSES],
            served: [now; CLASSES],
            charged: now,
        }
    }

    /// Adds a VM.
    pub fn add(&mut self, terms: Terms, now: Nanos) -> Slot {
        self.advance(now);
        let class = terms.class.min(CLASSES - 1);
        let tenant = Tenant {
            terms: Terms { class, ..terms },
            time: self.clocks[class],
            times: [0; CLASSES],
            seen: Seen::default(),
            fenced: false,
            open: false,
            opened: now,
            begun_before: 0,
            until: now,
            promoted: false,
            absent: false,
            left: None,
            overrun: 0,
            freed: 0,
            is_freed: false,
            tokens: 0,
            throttled: false,
            credit: 0,
            ready_since: None,
            figures: Figures::default(),
        };
        let index = match self.tenants.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.tenants.push(None);
                self.tenants.len() - 1
            }
        };
        self.tenants[index] = Some(tenant);
        Slot(u32::try_from(index).unwrap_or(u32::MAX))
    }

    /// Changes the terms of a VM. Its debts stay: to its cap, to its guarantee, and to the others of each priority.
    pub fn set(&mut self, slot: Slot, terms: Terms, now: Nanos) {
        self.advance(now);
        let clocks = self.clocks;
        if let Some(tenant) = self.get(slot) {
            let (class, before) = (terms.class.min(CLASSES - 1), tenant.terms.class);
            if class != before {
                let debt = tenant.time.saturating_sub(clocks[before]);
                tenant.times[before] = tenant.time;
                tenant.time = tenant.times[class].max(clocks[class].saturating_add(debt));
            }
            tenant.terms = Terms { class, ..terms };
            // Only a cap throttles, but a debt to the last cap remains under the next.
            if tenant.throttled && !tenant.is_capped() {
                tenant.throttled = false;
                tenant.rejoin(&clocks);
            }
        }
    }

    /// Removes a VM.
    pub fn remove(&mut self, slot: Slot, now: Nanos) {
        self.advance(now);
        if let Some(place) = self.tenants.get_mut(slot.index()) {
            *place = None;
        }
        if self.current == Some(slot) {
            self.current = None;
        }
    }

    /// Ends the turns of a VM for ever.
    pub fn fence(&mut self, slot: Slot) {
        if let Some(tenant) = self.get(slot) {
            tenant.fenced = true;
        }
    }

    fn get(&mut self, slot: Slot) -> Option<&mut Tenant> {
        self.tenants.get_mut(slot.index())?.as_mut()
    }

    fn peek(&self, slot: Slot) -> Option<&Tenant> {
        self.tenants.get(slot.index())?.as_ref()
    }

    /// The figures of a VM's use.
    #[must_use]
    pub fn figures(&self, slot: Slot) -> Figures {
        self.peek(slot).map_or_else(Figures::default, |tenant| tenant.figures)
    }

    /// The present permit of a VM.
    #[must_use]
    pub fn permit(&self, slot: Slot) -> Permit {
        match self.peek(slot) {
            Some(tenant) if tenant.open && self.quiet => {
                Permit::Open { window: tenant.each(self.settings.alone), tell: false }
            }
            Some(tenant) if tenant.open => {
                Permit::Open { window: tenant.each(self.settings.quantum), tell: true }
            }
            _ => Permit::Closed,
        }
    }

    /// The VM with the turn if it is alone and unwatched; its use is then reported by [`Scheduler::metered`].
    #[must_use]
    pub const fn quiet(&self) -> Option<Slot> {
        if self.quiet { self.current } else { None }
    }

    /// Sets the observed state of a VM from now on.
    pub fn see(&mut self, slot: Slot, seen: Seen, now: Nanos) {
        self.advance(now);
        let clocks = self.clocks;
        let Some(tenant) = self.get(slot) else { return };
        let was = tenant.seen;
        if was == seen {
            return;
        }
        let was_active = tenant.is_active();
        tenant.seen = seen;
        if !was_active && tenant.is_active() {
            tenant.rejoin(&clocks);
        }
        if seen.begun != was.begun || (seen.waiting > 0 && was.waiting == 0) {
            tenant.alive(&clocks);
        }
        if seen.flying == 0 {
            tenant.settle();
        }
    }

    /// Reports activity of a VM that waits.
    pub fn alive(&mut self, slot: Slot, now: Nanos) {
        self.advance(now);
        let clocks = self.clocks;
        if let Some(tenant) = self.get(slot) {
            tenant.alive(&clocks);
        }
    }

    /// Decides which VM has the turn now. Returns the time of the next call if there is no event before.
    pub fn turn(&mut self, now: Nanos) -> Option<Nanos> {
        self.advance(now);
        self.limit(now);
        self.close_late(now);
        let next = self.best(now);
        match self.current.and_then(|slot| Some((slot, self.peek(slot)?))) {
            Some((_, tenant)) if !tenant.open => {
                if !self.is_held(tenant, now) {
                    self.current = None;
                    self.give(next, now);
                }
            }
            Some((slot, tenant)) => match next {
                None if !tenant.is_active() && tenant.is_capped() => self.take(slot, now),
                None => {}
                Some(_) if !tenant.is_active() => {
                    self.take(slot, now);
                    self.give(next, now);
                }
                Some(next) => self.rotate(slot, next, now),
            },
            None => self.give(next, now),
        }
        let alone = self.current;
        self.quiet = alone.is_some_and(|slot| {
            let others = |(index, tenant): (usize, &Tenant)| {
                index == slot.index() || !(tenant.is_active() || tenant.open)
            };
            self.peek(slot).is_some_and(|tenant| tenant.open && !tenant.is_capped())
                && entries(&self.tenants).all(others)
        });
        self.due(now)
    }

    /// Enforces caps.
    fn limit(&mut self, now: Nanos) {
        let enough = signed(self.settings.quantum);
        for tenant in self.tenants.iter_mut().flatten() {
            if tenant.is_capped() {
                if tenant.tokens <= 0 && tenant.is_active() {
                    tenant.throttled = true;
                } else if tenant.tokens >= enough && tenant.throttled {
                    tenant.throttled = false;
                    tenant.rejoin(&self.clocks);
                }
            }
            if tenant.fenced || tenant.throttled {
                tenant.shut(now);
            }
        }
    }

    /// Closes permits that are open beside the current one's and have expired.
    fn close_late(&mut self, now: Nanos) {
        let (current, quantum) = (self.current, self.settings.quantum);
        for (index, tenant) in self.tenants.iter_mut().enumerate() {
            let Some(tenant) = tenant.as_mut().filter(|tenant| tenant.open) else { continue };
            if current.is_some_and(|slot| slot.index() == index) {
                continue;
            }
            if !tenant.is_active() {
                tenant.shut(now);
            } else if now >= tenant.until {
                tenant.absent = !tenant.has_begun();
                tenant.shut(now);
            } else if tenant.has_begun() && tenant.until > tenant.opened + quantum {
                // It began after all: its turn is as long as any.
                tenant.until = tenant.until.min(now + quantum);
                tenant.opened = tenant.until - quantum;
            }
        }
    }

    /// Handles a current VM that has more work while others wait.
    fn rotate(&mut self, slot: Slot, next: Slot, now: Nanos) {
        let (begin, late) = (self.settings.begin, self.settings.late);
        let class = self.peek(next).map_or(0, |tenant| tenant.terms.class);
        let urgent = self.is_entitled(next) || self.is_stuck(next, now) || self.is_starving(class, now);
        let Some(tenant) = self.get(slot) else { return };
        if !tenant.has_begun() && !tenant.is_flying() {
            if now >= tenant.opened + begin {
                // Its permit stays open, so it has its turn when it wakes.
                tenant.until = tenant.opened + late;
                if now >= tenant.until {
                    tenant.absent = true;
                    tenant.shut(now);
                }
                self.current = None;
                self.give(Some(next), now);
            }
            return;
        }
        let overtaken = class > tenant.terms.class && !tenant.promoted;
        if now < tenant.until && !overtaken {
            return;
        }
        let same = tenant.terms.class == class;
        let ahead = tenant.time;
        let stays = tenant.is_waiting() && !overtaken && !urgent;
        let behind = self.peek(next).is_some_and(|next| same && next.time > ahead);
        let below = self.peek(slot).is_some_and(|tenant| tenant.terms.class > class);
        if stays && (behind || below || self.is_entitled(slot)) {
            self.open(slot, now);
            return;
        }
        self.take(slot, now);
        let held = self.peek(slot).is_some_and(|tenant| self.is_held(tenant, now));
        if held && !overtaken {
            self.current = Some(slot);
        } else {
            self.give(Some(next), now);
        }
    }

    fn take(&mut self, slot: Slot, now: Nanos) {
        if let Some(tenant) = self.get(slot) {
            tenant.shut(now);
        }
        self.current = None;
    }

    fn give(&mut self, next: Option<Slot>, now: Nanos) {
        if let Some(slot) = next {
            self.open(slot, now);
            self.current = Some(slot);
        }
    }

    /// The least virtual time of a VM and of those of its priority that are ready for a turn.
    fn least_time(&self, slot: Slot) -> Virtual {
        let Some(own) = self.peek(slot) else { return 0 };
        let rivals = entries(&self.tenants).map(|(_, tenant)| tenant);
        let rivals = rivals.filter(|tenant| tenant.is_ready() && tenant.terms.class == own.terms.class);
        rivals.map(|tenant| tenant.time).fold(own.time, Virtual::min)
    }

    fn open(&mut self, slot: Slot, now: Nanos) {
        let quantum = self.settings.quantum;
        let class = self.peek(slot).map_or(0, |tenant| tenant.terms.class);
        let entitled = self.is_entitled(slot);
        let freed = self.is_stuck(slot, now);
        let promoted = entitled || freed || self.is_starving(class, now);
        let least = entitled.then(|| self.least_time(slot));
        let Some(tenant) = self.get(slot) else { return };
        tenant.freed = if freed { tenant.freed.saturating_add(1) } else { 0 };
        tenant.is_freed = freed;
        if !tenant.open {
            tenant.settle();
            tenant.begun_before = tenant.seen.begun;
            tenant.figures.turns += 1;
        }
        (tenant.open, tenant.opened, tenant.until) = (true, now, now + quantum);
        tenant.promoted = promoted;
        tenant.ready_since = None;
        // A VM that is let in although it is ahead of others advances the clock no further than to these.
        let time = least.unwrap_or(tenant.time);
        if !freed {
            self.clocks[class] = self.clocks[class].max(time);
        }
        if !entitled {
            self.served[class] = now;
        }
    }
}

fn entries(tenants: &[Option<Tenant>]) -> impl Iterator<Item = (usize, &Tenant)> {
    tenants.iter().enumerate().filter_map(|(index, tenant)| Some((index, tenant.as_ref()?)))
}

#[cfg(test)]
mod tests;
