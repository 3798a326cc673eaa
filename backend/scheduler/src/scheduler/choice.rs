//! The choice of the next VM, and the time of the next decision.

use super::{
    Scheduler, Slot, entries,
    tenant::{Tenant, signed},
    terms::{CLASSES, MICROSECOND, Settings, WHOLE},
};
use crate::Nanos;

impl Scheduler {
    /// True if work left by a turn is about to end, so that another VM would only interfere.
    pub(super) fn is_held(&self, tenant: &Tenant, now: Nanos) -> bool {
        let Settings { tail, hold, .. } = self.settings;
        let expected = tail < tenant.overrun && tenant.overrun <= hold;
        let alone = entries(&self.tenants).filter(|(_, tenant)| tenant.is_flying()).count() == 1;
        alone && tenant.left.is_some_and(|(left, _)| expected && now < left + hold)
    }

    /// The time at which a VM gets a turn in any case while its work is under way. That work may end only after its waiting work has
    /// run; and until it ends, its VM is charged as much as the VM with the turn, so it would never be less far ahead.
    fn freed_at(&self, tenant: &Tenant) -> Option<Nanos> {
        let Settings { stuck, stuck_most, .. } = self.settings;
        let timeout = stuck.saturating_mul(1 << tenant.freed.min(16)).min(stuck_most);
        tenant.ready_since.filter(|_| tenant.is_ready() && tenant.is_flying()).map(|since| since + timeout)
    }

    pub(super) fn is_stuck(&self, slot: Slot, now: Nanos) -> bool {
        self.peek(slot).and_then(|tenant| self.freed_at(tenant)).is_some_and(|at| now >= at)
    }

    pub(super) fn is_entitled(&self, slot: Slot) -> bool {
        self.peek(slot).is_some_and(|tenant| tenant.terms.guarantee > 0 && tenant.credit > 0)
    }

    /// True if a priority had no turn for so long that it has the next.
    pub(super) fn is_starving(&self, class: usize, now: Nanos) -> bool {
        self.served.get(class).is_some_and(|served| now.saturating_sub(*served) >= self.settings.starvation)
    }

    /// True if enough VMs have long kernels under way.
    fn is_crowded(&self, now: Nanos) -> bool {
        let old = |tenant: &Tenant| {
            tenant.left.is_some_and(|(left, _)| now.saturating_sub(left) > self.settings.quantum / 2)
        };
        entries(&self.tenants).filter(|(_, tenant)| old(tenant)).count() >= self.settings.hogs
    }

    fn is_hog(&self, tenant: &Tenant) -> bool {
        tenant.overrun > self.settings.hold
    }

    /// The VM for the next turn, of those without one.
    pub(super) fn best(&self, now: Nanos) -> Option<Slot> {
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
        // Of two with equal virtual time, the one that waits longer.
        of(class).min_by_key(|(_, tenant)| (tenant.time, tenant.ready_since.unwrap_or(now))).map(slot)
    }

    /// The time of the next decision if there is no event before.
    pub(super) fn due(&self, now: Nanos) -> Option<Nanos> {
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
            // Decisions that were due have been made as far as possible.
            let freed = self.freed_at(tenant);
            [turn, cap, kept_out, freed].into_iter().flatten().filter(|due| *due > now).min()
        };
        entries(&self.tenants).filter_map(|(index, tenant)| one(index, tenant)).min()
    }
}
