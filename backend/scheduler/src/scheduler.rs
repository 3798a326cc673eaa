//! The order of turns.
//!
//! [`Scheduler`] takes the demand of VMs ([`Scheduler::see`]) and returns the decision ([`Scheduler::turn`]): a permit for each
//! VM and the time of the next call. One VM is *current*: it has the turn. Others may have work under way that they submitted
//! in their turns; they are charged their part of the time until it ends.
//!
//! Time is charged by what the caller can observe itself: the VM that had the turn and requested it, and the VMs with work
//! under way. A VM that has the turn and does nothing with it is charged all the same, but delays no other: the next one is
//! admitted after a moment. Its permit stays open a little longer, for it may just be slow to wake.

use crate::Nanos;

const MICROSECOND: Nanos = 1_000;
const MILLISECOND: Nanos = 1_000_000;

/// A VM of the scheduler; used again for another one once it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// Its number; numbers are small.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// How a unit is shared.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long a turn is while others wait.
    pub quantum: Nanos,
    /// Estimated work that a VM may have under way while it is alone.
    pub alone: Nanos,
    /// After a turn: for how long what is still under way is taken to be what the device works on, and is charged alone.
    pub tail: Nanos,
    /// How long is waited for work that a turn left behind, where it is known to end by then: nobody is charged for what
    /// another one does, and a kernel is not cut into slices for nothing.
    pub hold: Nanos,
    /// How long a VM may take to begin its turn before the next one is admitted.
    pub begin: Nanos,
    /// How long it may take before its permit closes.
    pub late: Nanos,
    /// So many VMs with long kernels may have some under way after their turns, before another one with long kernels is let
    /// in: whoever has short ones then shares the device with few.
    pub hogs: usize,
    /// How long it is kept out for that.
    pub hog_patience: Nanos,
    /// How long a priority may go without a turn before it has one in any case.
    pub starvation: Nanos,
    /// How long a VM whose work does not end goes without a turn before it has one in any case; each time twice as long, up to
    /// `stuck_most`.
    pub stuck: Nanos,
    /// The longest of these.
    pub stuck_most: Nanos,
}

impl Settings {
    /// With this quantum, everything else follows.
    #[must_use]
    pub const fn with_quantum(quantum: Nanos) -> Settings {
        Settings {
            quantum,
            alone: 20 * MILLISECOND,
            tail: quantum / 4,
            hold: 2 * quantum,
            begin: quantum / 4,
            late: 8 * quantum,
            hogs: 2,
            hog_patience: 25 * quantum,
            starvation: 50 * quantum,
            stuck: 50 * quantum,
            stuck_most: 5_000 * quantum,
        }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings::with_quantum(2 * MILLISECOND)
    }
}

/// Priorities, the highest last.
pub const CLASSES: usize = 3;

/// What a VM may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Its part relative to others, at least 1.
    pub weight: u32,
    /// Its priority, below [`CLASSES`].
    pub class: usize,
    /// Thousandths of the time it never exceeds in the long run.
    pub cap: u32,
    /// Thousandths of the time it has while it has work. Those of all VMs together have to be fewer than all.
    pub guarantee: u32,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { weight: 100, class: 1, cap: WHOLE, guarantee: 0 }
    }
}

const WHOLE: u32 = 1000;

/// What the workers of a VM are seen to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// How many have work that waits for a permit, or for earlier work to end.
    pub waiting: u32,
    /// How many have submitted work that did not end. A driver slices processes: so many parts of the device does the VM
    /// have while others have work under way, too.
    pub flying: u32,
    /// Pieces of work that were submitted so far; only that it changes matters.
    pub begun: u64,
}

/// What a VM may do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permit {
    /// Submit nothing, and say when that hinders, and when nothing is under way any more.
    Closed,
    /// Submit, but have no more than so much estimated work under way.
    Open {
        /// How much.
        window: Nanos,
        /// Whether somebody waits for it to have nothing to do.
        tell: bool,
    },
}

/// What a VM had; nothing of it ever decreases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Time it is charged.
    pub used: Nanos,
    /// Of that, time in which others were charged, too.
    pub overlapped: Nanos,
    /// Time in which it waited for a turn.
    pub waited: Nanos,
    /// Turns.
    pub turns: u64,
}

/// Virtual time: nanoseconds times [`VIRTUAL`] divided by the weight.
type Virtual = u128;
const VIRTUAL: u64 = 10_000;

#[derive(Clone, Debug)]
struct Tenant {
    terms: Terms,
    time: Virtual,
    /// Its virtual time in each priority when it left that priority, so that a return does not forgive a debt.
    times: [Virtual; CLASSES],
    seen: Seen,
    /// Gets no turn any more.
    fenced: bool,
    open: bool,
    /// When its turn began, and what it had begun by then.
    opened: Nanos,
    begun_before: u64,
    /// When its permit may be closed for others.
    until: Nanos,
    /// Whether its turn is its own by a guarantee, or because its priority had none for long: nobody takes it away.
    promoted: bool,
    /// It did not use its last turn at all, and gives no sign of life.
    absent: bool,
    /// When its permit was closed and what it had used by then, while work of then is under way.
    left: Option<(Nanos, Nanos)>,
    /// How much more it uses after its turns.
    overrun: Nanos,
    /// Turns it had by [`Scheduler::is_stuck`] since it had one by right.
    freed: u32,
    /// Its turn is one of these.
    is_freed: bool,
    /// What is left under its cap; negative for what it took too much.
    tokens: i64,
    throttled: bool,
    /// What is missing of its guarantee.
    credit: i64,
    /// Since when it waits for a turn.
    ready_since: Option<Nanos>,
    figures: Figures,
}

impl Tenant {
    const fn is_active(&self) -> bool {
        self.seen.waiting > 0 || self.seen.flying > 0
    }

    const fn is_flying(&self) -> bool {
        self.seen.flying > 0
    }

    const fn is_waiting(&self) -> bool {
        self.seen.waiting > 0
    }

    /// A window of the VM, for each of its workers.
    fn each(&self, window: Nanos) -> Nanos {
        window / Nanos::from(self.seen.waiting.max(self.seen.flying).max(1))
    }

    const fn has_begun(&self) -> bool {
        self.seen.begun != self.begun_before
    }

    /// Whether it could have a turn.
    const fn is_ready(&self) -> bool {
        self.is_waiting() && !self.open && !self.fenced && !self.throttled && !self.absent
    }

    const fn is_capped(&self) -> bool {
        self.terms.cap < WHOLE
    }

    /// It competes for turns again, and has no claim to the time that passed while it did not.
    fn rejoin(&mut self, clocks: &[Virtual; CLASSES]) {
        self.time = self.time.max(clocks[self.terms.class]);
    }

    /// It gives a sign of life.
    fn alive(&mut self, clocks: &[Virtual; CLASSES]) {
        if core::mem::take(&mut self.absent) {
            self.rejoin(clocks);
        }
    }

    fn charge(&mut self, time: Nanos, overlapped: bool) {
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

    fn shut(&mut self, now: Nanos) {
        if self.open {
            self.open = false;
            self.promoted = false;
            self.left = self.is_flying().then_some((now, self.figures.used));
            if !self.is_flying() {
                self.overrun /= 2;
            }
        }
    }

    /// Its work of an earlier turn ended, or it has another turn.
    fn settle(&mut self) {
        if let Some((_, used)) = self.left.take() {
            self.overrun = self.overrun / 2 + self.figures.used.saturating_sub(used) / 2;
        }
    }
}

/// Times are far below the limits of either type.
fn signed(time: Nanos) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}

fn thousandths(time: Nanos, part: u32) -> i64 {
    signed(time.saturating_mul(u64::from(part)) / u64::from(WHOLE))
}

/// The scheduler of one unit.
#[derive(Debug)]
pub struct Scheduler {
    settings: Settings,
    tenants: Vec<Option<Tenant>>,
    current: Option<Slot>,
    /// Nobody else wants anything: the current one is not watched, and what it used is said by [`Scheduler::metered`].
    quiet: bool,
    /// Virtual time at which the last turn of each priority began.
    clocks: [Virtual; CLASSES],
    /// When a priority last had a turn, or nobody who wanted one.
    served: [Nanos; CLASSES],
    /// Up to when time was charged.
    charged: Nanos,
}

impl Scheduler {
    /// Nobody.
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

    /// A VM more.
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
            // Only a cap throttles, but what is missing under the last one is still missing under the next.
            if tenant.throttled && !tenant.is_capped() {
                tenant.throttled = false;
                tenant.rejoin(&clocks);
            }
        }
    }

    /// A VM is gone.
    pub fn remove(&mut self, slot: Slot, now: Nanos) {
        self.advance(now);
        if let Some(place) = self.tenants.get_mut(slot.index()) {
            *place = None;
        }
        if self.current == Some(slot) {
            self.current = None;
        }
    }

    /// A VM gets no turn any more.
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

    /// What a VM had.
    #[must_use]
    pub fn figures(&self, slot: Slot) -> Figures {
        self.peek(slot).map_or_else(Figures::default, |tenant| tenant.figures)
    }

    /// What a VM may do.
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

    /// Whether the VM with the turn is alone and says nothing; then [`Scheduler::metered`] says what it used.
    #[must_use]
    pub const fn quiet(&self) -> Option<Slot> {
        if self.quiet { self.current } else { None }
    }

    /// A VM does something, from now on.
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

    /// A VM that waits gives a sign of life.
    pub fn alive(&mut self, slot: Slot, now: Nanos) {
        self.advance(now);
        let clocks = self.clocks;
        if let Some(tenant) = self.get(slot) {
            tenant.alive(&clocks);
        }
    }

    /// What the VM used that is alone, since this was last said.
    pub fn metered(&mut self, slot: Slot, used: Nanos) {
        if self.quiet() != Some(slot) {
            return;
        }
        let Some(tenant) = self.get(slot) else { return };
        tenant.charge(used, false);
        let (class, time) = (tenant.terms.class, tenant.time);
        self.clocks[class] = self.clocks[class].max(time);
    }

    /// Charges the time that has passed.
    fn advance(&mut self, now: Nanos) {
        while self.charged < now {
            let from = self.charged;
            let (current, quiet, tail) = (self.current, self.quiet, self.settings.tail);
            // While what a turn left behind is young, the device is still at it, and not yet at what the next turn brings.
            let young = |tenant: &Tenant| {
                tenant
                    .left
                    .filter(|_| tenant.is_flying())
                    .map(|(left, _)| left + tail)
                    .filter(|end| *end > from)
            };
            let is_current = |index: usize| current.is_some_and(|current| current.index() == index);
            let occupies = |index: usize, tenant: &Tenant| {
                let uses = tenant.is_flying() || (is_current(index) && tenant.is_waiting());
                uses && !(quiet && is_current(index))
            };
            let (mut to, mut all, mut ready) = (now, 0_u64, [false; CLASSES]);
            for (index, tenant) in entries(&self.tenants) {
                all += u64::from(occupies(index, tenant));
                to = young(tenant).map_or(to, |end| to.min(end));
                ready[tenant.terms.class] |= tenant.is_ready();
            }
            let time = to - from;
            let any_young = entries(&self.tenants).any(|(_, tenant)| young(tenant).is_some());
            // Each has as many parts of the time as it has processes with work, for that is how a driver slices.
            let parts_of = |index: usize, tenant: &Tenant| {
                let comes_next = any_young && tenant.open && is_current(index);
                match (occupies(index, tenant), is_current(index) && tenant.open) {
                    (false, _) => 0,
                    (true, _) if comes_next => 0,
                    // Those that wait are about to begin.
                    (true, true) => tenant.seen.flying.max(tenant.seen.waiting),
                    (true, false) => tenant.seen.flying,
                }
            };
            let parts: u64 =
                entries(&self.tenants).map(|(index, tenant)| u64::from(parts_of(index, tenant))).sum();
            for (index, tenant) in self.tenants.iter_mut().enumerate() {
                let Some(tenant) = tenant else { continue };
                // Without a cap a debt shrinks by all the time that passes, but is not forgotten.
                let burst = signed(2 * self.settings.quantum);
                tenant.tokens = tenant.tokens.saturating_add(thousandths(time, tenant.terms.cap)).min(burst);
                if tenant.terms.guarantee > 0 && tenant.is_active() {
                    let most = signed(4 * self.settings.quantum);
                    let credit = tenant.credit + thousandths(time, tenant.terms.guarantee);
                    tenant.credit = credit.clamp(-most, most);
                }
                if tenant.is_ready() {
                    tenant.ready_since.get_or_insert(from);
                    tenant.figures.waited = tenant.figures.waited.saturating_add(time);
                } else {
                    tenant.ready_since = None;
                }
                let mine = u64::from(parts_of(index, tenant));
                if mine > 0 {
                    tenant.charge(time.saturating_mul(mine) / parts, all > 1);
                }
            }
            for (served, ready) in self.served.iter_mut().zip(ready) {
                if !ready {
                    *served = to;
                }
            }
            // Nobody waits: who comes later has no claim to the time that passes now.
            if !ready.contains(&true)
                && let Some((class, time)) = current
                    .and_then(|slot| self.peek(slot))
                    .filter(|tenant| !tenant.is_freed)
                    .map(|tenant| (tenant.terms.class, tenant.time))
            {
                self.clocks[class] = self.clocks[class].max(time);
            }
            self.charged = to;
        }
    }

    /// Decides who has the turn now. Returns when to ask again, if nothing happens until then.
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

    /// Caps.
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

    /// Permits that are open beside the current one's.
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
                // It has come after all: its turn is as long as any.
                tenant.until = tenant.until.min(now + quantum);
                tenant.opened = tenant.until - quantum;
            }
        }
    }

    /// The current VM wants the turn, and so do others.
    fn rotate(&mut self, slot: Slot, next: Slot, now: Nanos) {
        let (begin, late) = (self.settings.begin, self.settings.late);
        let class = self.peek(next).map_or(0, |tenant| tenant.terms.class);
        let urgent = self.is_entitled(next) || self.is_stuck(next, now) || self.is_starving(class, now);
        let Some(tenant) = self.get(slot) else { return };
        if !tenant.has_begun() && !tenant.is_flying() {
            if now >= tenant.opened + begin {
                // Its permit stays open: whenever it wakes, it has its turn.
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

    /// Whether what a turn left behind is about to end, and somebody else would only come between.
    fn is_held(&self, tenant: &Tenant, now: Nanos) -> bool {
        let Settings { tail, hold, .. } = self.settings;
        let expected = tail < tenant.overrun && tenant.overrun <= hold;
        let alone = entries(&self.tenants).filter(|(_, tenant)| tenant.is_flying()).count() == 1;
        alone && tenant.left.is_some_and(|(left, _)| expected && now < left + hold)
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

    fn open(&mut self, slot: Slot, now: Nanos) {
        let quantum = self.settings.quantum;
        let class = self.peek(slot).map_or(0, |tenant| tenant.terms.class);
        let entitled = self.is_entitled(slot);
        let freed = self.is_stuck(slot, now);
        let promoted = entitled || freed || self.is_starving(class, now);
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
        let time = tenant.time;
        // Who is let in although it is far ahead is nobody's measure.
        if !freed {
            self.clocks[class] = self.clocks[class].max(time);
        }
        if !entitled {
            self.served[class] = now;
        }
    }

    /// When a VM has a turn in any case whose work is still under way. What is under way may end only when what waits has run;
    /// and while it does not end its VM is charged as much as whoever has the turn, and would never be less far ahead.
    fn freed_at(&self, tenant: &Tenant) -> Option<Nanos> {
        let Settings { stuck, stuck_most, .. } = self.settings;
        let patience = stuck.saturating_mul(1 << tenant.freed.min(16)).min(stuck_most);
        tenant.ready_since.filter(|_| tenant.is_ready() && tenant.is_flying()).map(|since| since + patience)
    }

    fn is_stuck(&self, slot: Slot, now: Nanos) -> bool {
        self.peek(slot).and_then(|tenant| self.freed_at(tenant)).is_some_and(|at| now >= at)
    }

    fn is_entitled(&self, slot: Slot) -> bool {
        self.peek(slot).is_some_and(|tenant| tenant.terms.guarantee > 0 && tenant.credit > 0)
    }

    /// Whether a priority had no turn for so long that it has the next.
    fn is_starving(&self, class: usize, now: Nanos) -> bool {
        self.served.get(class).is_some_and(|served| now.saturating_sub(*served) >= self.settings.starvation)
    }

    /// Whether enough VMs have long kernels under way.
    fn is_crowded(&self, now: Nanos) -> bool {
        let old = |tenant: &Tenant| {
            tenant.left.is_some_and(|(left, _)| now.saturating_sub(left) > self.settings.quantum / 2)
        };
        entries(&self.tenants).filter(|(_, tenant)| old(tenant)).count() >= self.settings.hogs
    }

    fn is_hog(&self, tenant: &Tenant) -> bool {
        tenant.overrun > self.settings.hold
    }

    /// Who is to have the next turn, of those without one.
    fn best(&self, now: Nanos) -> Option<Slot> {
        let crowded = self.is_crowded(now);
        let kept_out = |tenant: &Tenant| {
            let waited = tenant.ready_since.map_or(0, |since| now.saturating_sub(since));
            crowded && tenant.left.is_none() && self.is_hog(tenant) && waited < self.settings.hog_patience
        };
        let ready = || entries(&self.tenants).filter(|(_, tenant)| tenant.is_ready() && !kept_out(tenant));
        let slot = |(index, _): (usize, &Tenant)| Slot(u32::try_from(index).unwrap_or(u32::MAX));
        let entitled = ready().filter(|(_, tenant)| tenant.terms.guarantee > 0 && tenant.credit > 0);
        if let Some(oldest) = entitled.min_by_key(|(_, tenant)| tenant.ready_since.unwrap_or(now)) {
            return Some(slot(oldest));
        }
        let stuck =
            ready().filter_map(|entry| Some((self.freed_at(entry.1).filter(|at| now >= *at)?, entry)));
        if let Some((_, oldest)) = stuck.min_by_key(|(at, _)| *at) {
            return Some(slot(oldest));
        }
        let of = |class: usize| ready().filter(move |(_, tenant)| tenant.terms.class == class);
        let starving =
            (0..CLASSES).find(|class| self.is_starving(*class, now) && of(*class).next().is_some());
        let class = starving.or_else(|| (0..CLASSES).rev().find(|class| of(*class).next().is_some()))?;
        // Of two that are as far, the one that waits longer.
        of(class).min_by_key(|(_, tenant)| (tenant.time, tenant.ready_since.unwrap_or(now))).map(slot)
    }

    /// When something is to be decided, if nothing happens until then.
    fn due(&self, now: Nanos) -> Option<Nanos> {
        let others = entries(&self.tenants).any(|(_, tenant)| tenant.is_ready());
        let one = |index: usize, tenant: &Tenant| {
            let is_current = self.current.is_some_and(|slot| slot.index() == index);
            let turn = match (tenant.open, is_current) {
                (true, true) if others && !tenant.has_begun() && !tenant.is_flying() => {
                    Some(tenant.until.min(tenant.opened + self.settings.begin))
                }
                (true, true) => Some(tenant.until).filter(|_| others),
                (true, false) => Some(tenant.until),
                (false, true) => tenant.left.map(|(left, _)| left + self.settings.hold),
                (false, false) => None,
            };
            let cap = if !tenant.is_capped() || !tenant.is_active() || tenant.fenced {
                None
            } else if tenant.throttled {
                let missing = signed(self.settings.quantum).saturating_sub(tenant.tokens).max(0);
                let refill = missing.unsigned_abs().saturating_mul(u64::from(WHOLE));
                Some(now + refill / u64::from(tenant.terms.cap.max(1)) + MICROSECOND)
            } else {
                tenant.open.then(|| now + tenant.tokens.max(0).unsigned_abs() + MICROSECOND)
            };
            let kept_out = (tenant.is_ready() && self.is_hog(tenant))
                .then(|| tenant.ready_since.unwrap_or(now) + self.settings.hog_patience);
            // What was due was done, as far as it could be.
            let freed = self.freed_at(tenant);
            [turn, cap, kept_out, freed].into_iter().flatten().filter(|due| *due > now).min()
        };
        entries(&self.tenants).filter_map(|(index, tenant)| one(index, tenant)).min()
    }
}

fn entries(tenants: &[Option<Tenant>]) -> impl Iterator<Item = (usize, &Tenant)> {
    tenants.iter().enumerate().filter_map(|(index, tenant)| Some((index, tenant.as_ref()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Add(Terms),
        Remove(usize),
        Set(usize, Terms),
        Fence(usize),
        See(usize, u32, u32, bool),
        Alive(usize),
        Turn,
        Wait(Nanos),
    }

    fn terms() -> impl Strategy<Value = Terms> {
        let cap = prop_oneof![3 => Just(WHOLE), 1 => 1_u32..WHOLE];
        (1_u32..=10_000, 0_usize..CLASSES, cap, prop_oneof![3 => Just(0_u32), 1 => 0_u32..=WHOLE])
            .prop_map(|(weight, class, cap, guarantee)| Terms { weight, class, cap, guarantee })
    }

    fn step() -> impl Strategy<Value = Step> {
        let which = 0_usize..8;
        prop_oneof![
            2 => terms().prop_map(Step::Add),
            1 => which.clone().prop_map(Step::Remove),
            1 => (which.clone(), terms()).prop_map(|(which, terms)| Step::Set(which, terms)),
            1 => which.clone().prop_map(Step::Fence),
            20 => (which.clone(), 0_u32..3, 0_u32..3, any::<bool>())
                .prop_map(|(which, waiting, flying, begins)| Step::See(which, waiting, flying, begins)),
            2 => which.prop_map(Step::Alive),
            20 => Just(Step::Turn),
            20 => (1..30 * MILLISECOND).prop_map(Step::Wait),
        ]
    }

    // Promise: T27
    #[test]
    fn who_comes_late_to_a_late_look_does_not_keep_its_permit() {
        let mut scheduler = Scheduler::new(Settings::default(), 0);
        let [slow, other] = [(); 2].map(|()| scheduler.add(Terms::default(), 0));
        scheduler.see(slow, Seen { waiting: 1, flying: 0, begun: 0 }, 0);
        scheduler.turn(0);
        scheduler.see(other, Seen { waiting: 1, flying: 0, begun: 0 }, 0);
        // It does not begin: the other one is let in beside it.
        let due = scheduler.turn(MILLISECOND).expect("a permit is open beside the turn");
        assert!([slow, other].iter().all(|slot| scheduler.permit(*slot) != Permit::Closed));
        // It has come, and whoever looks is late as well; both have all that they want.
        let now = due + 50 * MILLISECOND;
        for slot in [slow, other] {
            scheduler.see(slot, Seen { waiting: 0, flying: 1, begun: 1 }, now);
        }
        scheduler.turn(now);
        assert_eq!(scheduler.permit(slow), Permit::Closed);
    }

    /// Turns that a VM has whose work never ends all, beside one that always wants more.
    fn turns_beside_its_kernel(weights: [u32; 2], length: Nanos) -> u64 {
        let mut scheduler = Scheduler::new(Settings::default(), 0);
        let [endless, busy] = weights.map(|weight| scheduler.add(Terms { weight, ..Terms::default() }, 0));
        let (mut now, mut begun) = (0, [1, 1]);
        while now < length {
            for (slot, begun) in [endless, busy].into_iter().zip(&mut begun) {
                *begun += u64::from(scheduler.permit(slot) != Permit::Closed);
                scheduler.see(slot, Seen { waiting: 1, flying: 1, begun: *begun }, now);
            }
            let due = scheduler.turn(now);
            now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
        }
        scheduler.figures(endless).turns
    }

    // Promise: T33
    #[test]
    fn work_that_may_have_to_run_for_a_kernel_to_end_has_turns() {
        let even = turns_beside_its_kernel([100, 100], 1_000 * MILLISECOND);
        assert!(even >= 4, "{even} turns beside an equal");
        let light = turns_beside_its_kernel([100, 300], 1_000 * MILLISECOND);
        assert!(light >= 4, "{light} turns beside three times the weight");
        // Who always has something under way cannot go on for ever on turns that are not its own.
        let greedy = turns_beside_its_kernel([1, 100], 60_000 * MILLISECOND);
        assert!(greedy <= 16, "{greedy} turns in a minute");
    }

    /// The time of ten seconds that a VM of long kernels uses beside one that always wants more. After each kernel it gets the
    /// next of these terms.
    fn used_with_changing(terms: &[Terms]) -> Nanos {
        const KERNEL: Nanos = 20 * MILLISECOND;
        let mut scheduler = Scheduler::new(Settings::default(), 0);
        let [slow, busy] = [terms[0], Terms::default()].map(|terms| scheduler.add(terms, 0));
        let (mut now, mut begun, mut kernels, mut ends) = (0, 0, 0_u64, None);
        while now < 10_000 * MILLISECOND {
            if ends.is_some_and(|end| now >= end) {
                ends = None;
                let at = usize::try_from(kernels).expect("small") % terms.len();
                scheduler.set(slow, terms[at], now);
            }
            if ends.is_none() && scheduler.permit(slow) != Permit::Closed {
                kernels += 1;
                ends = Some(now + KERNEL);
            }
            let flying = u32::from(ends.is_some());
            scheduler.see(slow, Seen { waiting: 1, flying, begun: kernels }, now);
            let open = scheduler.permit(busy) != Permit::Closed;
            begun += u64::from(open);
            scheduler.see(busy, Seen { waiting: 1, flying: u32::from(open), begun }, now);
            let due = scheduler.turn(now);
            now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
        }
        scheduler.figures(slow).used
    }

    // Promise: A44
    #[test]
    fn terms_that_change_after_each_kernel_leave_the_cap() {
        let capped = |class, weight| Terms { cap: 100, class, weight, ..Terms::default() };
        let still = used_with_changing(&[capped(1, 100), capped(1, 100)]);
        assert!(still <= 1_200 * MILLISECOND, "{still} of ten seconds at a cap of a tenth");
        for changing in [
            &[capped(0, 100), capped(2, 100)][..],
            &[capped(1, 100), capped(1, 101)],
            &[capped(1, 100), Terms { guarantee: 1, ..capped(1, 100) }],
        ] {
            let used = used_with_changing(changing);
            assert!(used <= 1_200 * MILLISECOND, "{used} with {changing:?}, {still} without a change");
        }
    }

    // Promise: T24
    #[test]
    fn a_cap_that_is_lifted_gives_back_nothing() {
        let mut scheduler = Scheduler::new(Settings::default(), 0);
        let capped = scheduler.add(Terms { cap: 100, ..Terms::default() }, 0);
        let other = scheduler.add(Terms::default(), 0);
        let (mut now, mut begun) = (0, [0, 0]);
        let mut run = |scheduler: &mut Scheduler, length: Nanos| {
            let end = now + length;
            while now < end {
                for (slot, begun) in [capped, other].into_iter().zip(&mut begun) {
                    let open = scheduler.permit(slot) != Permit::Closed;
                    *begun += u64::from(open);
                    let seen = Seen { waiting: 1, flying: u32::from(open), begun: *begun };
                    scheduler.see(slot, seen, now);
                }
                let due = scheduler.turn(now);
                now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
            }
            now
        };
        let now = run(&mut scheduler, 10_000 * MILLISECOND);
        scheduler.set(capped, Terms::default(), now);
        let before = scheduler.figures(capped).used;
        run(&mut scheduler, 1_000 * MILLISECOND);
        let used = scheduler.figures(capped).used - before;
        assert!(used < 600 * MILLISECOND, "{used} of a second at equal weights");
    }

    // Promise: A44
    #[test]
    fn a_change_of_terms_keeps_tokens_credit_and_virtual_time() {
        let mut scheduler = Scheduler::new(Settings::default(), 0);
        let own = Terms { cap: 100, guarantee: 50, ..Terms::default() };
        let slot = scheduler.add(own, 0);
        let other = scheduler.add(Terms::default(), 0);
        for slot in [slot, other] {
            scheduler.see(slot, Seen { waiting: 1, ..Seen::default() }, 0);
        }
        scheduler.turn(0);
        // One long kernel, begun in its turn, puts it in debt to its cap, its guarantee and its neighbour.
        let first = if scheduler.permit(slot) == Permit::Closed { other } else { slot };
        scheduler.see(first, Seen::default(), 0);
        scheduler.turn(0);
        scheduler.see(slot, Seen { waiting: 1, flying: 1, begun: 1 }, 1);
        scheduler.turn(100 * MILLISECOND);
        let debts = |scheduler: &Scheduler| {
            let tenant = scheduler.peek(slot).expect("it is there");
            (tenant.tokens, tenant.throttled, tenant.credit, tenant.time)
        };
        let before = debts(&scheduler);
        assert!(before.0 < 0 && before.1 && before.2 < 0, "{before:?}");
        let now = 100 * MILLISECOND;
        for terms in [Terms { weight: 200, ..own }, Terms { class: 0, ..own }, Terms { class: 2, ..own }, own]
        {
            scheduler.set(slot, terms, now);
            let (tokens, throttled, credit, time) = debts(&scheduler);
            assert_eq!((tokens, throttled, credit), (before.0, before.1, before.2), "{terms:?}");
            let clock = scheduler.clocks[terms.class];
            assert!(terms.class != 1 || time >= before.3, "{terms:?}: {time} after {}", before.3);
            assert!(time >= clock, "{terms:?}");
        }
        // A cap that is taken away and given back does not forgive either.
        scheduler.set(slot, Terms { cap: WHOLE, ..own }, now);
        assert!(!debts(&scheduler).1, "nothing throttles without a cap");
        scheduler.set(slot, own, now);
        assert_eq!(debts(&scheduler).0, before.0);
    }

    proptest! {
        // Promise: T27
        /// Whatever VMs do: nobody is charged time that did not pass, a VM without permission has none, the unit is left to
        /// nobody only where nobody may have it, and what is due lies ahead.
        #[test]
        fn the_rules_hold_in_any_order(steps in prop::collection::vec(step(), 0..400)) {
            let mut scheduler = Scheduler::new(Settings::default(), 0);
            let mut now = 0;
            let mut slots: Vec<(Slot, bool, u64)> = Vec::new();
            let mut gone = 0;
            for step in steps {
                let at = |which: usize| (!slots.is_empty()).then(|| which % slots.len());
                match step {
                    Step::Add(terms) if slots.len() < 8 => {
                        slots.push((scheduler.add(terms, now), false, 0));
                    }
                    Step::Add(_) => {}
                    Step::Remove(which) => if let Some(at) = at(which) {
                        let (slot, ..) = slots.remove(at);
                        gone += scheduler.figures(slot).used;
                        scheduler.remove(slot, now);
                    },
                    Step::Set(which, terms) => if let Some(at) = at(which) {
                        scheduler.set(slots[at].0, terms, now);
                    },
                    Step::Fence(which) => if let Some(at) = at(which) {
                        scheduler.fence(slots[at].0);
                        slots[at].1 = true;
                    },
                    Step::See(which, waiting, flying, begins) => if let Some(at) = at(which) {
                        slots[at].2 += u64::from(begins);
                        let seen = Seen { waiting, flying, begun: slots[at].2 };
                        scheduler.see(slots[at].0, seen, now);
                    },
                    Step::Alive(which) => if let Some(at) = at(which) {
                        scheduler.alive(slots[at].0, now);
                    },
                    Step::Wait(time) => now += time,
                    Step::Turn => {
                        let due = scheduler.turn(now);
                        prop_assert!(due.is_none_or(|due| due > now));
                        for (slot, fenced, _) in &slots {
                            prop_assert!(!fenced || scheduler.permit(*slot) == Permit::Closed);
                        }
                        let ready = entries(&scheduler.tenants).any(|(_, tenant)| tenant.is_ready());
                        let held_or_had = scheduler.current.is_some();
                        let beside = |index: usize| scheduler.current.is_none_or(|slot| slot.index() != index);
                        let left_open = entries(&scheduler.tenants)
                            .any(|(index, tenant)| tenant.open && tenant.is_active() && beside(index));
                        prop_assert!(!left_open || due.is_some(), "a permit beside the turn is never closed");
                        prop_assert!(!ready || held_or_had || due.is_some(), "somebody is forgotten");
                    }
                }
                let used: Nanos = slots.iter().map(|(slot, ..)| scheduler.figures(*slot).used).sum();
                prop_assert!(used + gone <= now, "{used} and {gone} of {now}");
            }
        }

        // Promise: T26
        /// Whoever wants a turn has one before long, whatever the others do in it.
        #[test]
        fn nobody_waits_for_ever(
            all in prop::collection::vec((terms(), 0_u32..4, any::<bool>()), 1..8),
        ) {
            let mut scheduler = Scheduler::new(Settings::default(), 0);
            let mut slots = Vec::new();
            // Who promises more than there is takes it from the others.
            let promised: u32 = all.iter().map(|(terms, ..)| terms.guarantee).sum();
            for (terms, flying, begins) in all {
                let guarantee = terms.guarantee * 900 / promised.max(900);
                let terms = Terms { cap: terms.cap.max(50), weight: terms.weight.max(100), guarantee, ..terms };
                slots.push((scheduler.add(terms, 0), flying, begins, 0_u64));
            }
            let mut now = 0;
            // Many turns for each at the worst weights, and time for caps to fill.
            while now < 20_000 * MILLISECOND {
                for (slot, flying, begins, begun) in &mut slots {
                    let open = scheduler.permit(*slot) != Permit::Closed;
                    *begun += u64::from(open && *begins);
                    // Work that does not end would use up a cap for ever.
                    let flying = if open && *begins { *flying } else { 0 };
                    scheduler.see(*slot, Seen { waiting: 1, flying, begun: *begun }, now);
                    scheduler.alive(*slot, now);
                }
                let due = scheduler.turn(now);
                now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
            }
            for (slot, ..) in slots {
                prop_assert!(scheduler.figures(slot).turns > 0);
            }
        }
    }
}
