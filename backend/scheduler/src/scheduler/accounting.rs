//! The charge of time to the VMs with work under way, and the tokens of caps and guarantees.

use super::{
    Scheduler, Slot, entries,
    tenant::{Tenant, signed},
    terms::{CLASSES, WHOLE},
};
use crate::Nanos;

fn thousandths(time: Nanos, part: u32) -> i64 {
    signed(time.saturating_mul(u64::from(part)) / u64::from(WHOLE))
}

impl Scheduler {
    /// Charges the use of the VM that is alone since the last call.
    pub fn metered(&mut self, slot: Slot, used: Nanos) {
        if self.quiet() != Some(slot) {
            return;
        }
        let Some(tenant) = self.get(slot) else { return };
        tenant.charge(used, false);
        let (class, time) = (tenant.terms.class, tenant.time);
        self.clocks[class] = self.clocks[class].max(time);
    }

    /// Charges time that a VM used and that was not charged when it passed.
    pub fn correct(&mut self, slot: Slot, missing: Nanos) {
        if self.quiet() == Some(slot) {
            self.metered(slot, missing);
        } else if let Some(tenant) = self.get(slot) {
            tenant.charge(missing, false);
        }
    }

    /// Charges the time that has passed.
    pub(super) fn advance(&mut self, now: Nanos) {
        while self.charged < now {
            let from = self.charged;
            let (current, quiet, tail) = (self.current, self.quiet, self.settings.tail);
            // While work left by a turn is young, the device still runs it, and not yet the work of the next turn.
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
            // Each has one part of the time per process with work, as a driver slices.
            let parts_of = |index: usize, tenant: &Tenant| {
                let comes_next = any_young && tenant.open && is_current(index);
                match (occupies(index, tenant), is_current(index) && tenant.open) {
                    (false, _) => 0,
                    (true, _) if comes_next => 0,
                    // Waiting workers are about to begin.
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
            // No VM waits: one that comes later has no claim to the time that passes now.
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
}
