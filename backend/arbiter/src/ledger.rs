//! Accounts: the limits of each VM, and the memory it has.
//!
//! Pure and with one writer. Sums are kept, never derived from a worker's messages, and every step is checked arithmetic: a
//! step that would leave a sum wrong is refused and reported as [`Broken`]. The ledger knows nothing of chunks; the
//! [`audit`](crate::audit) compares the two.

use crate::ids::VmKey;
use sluice_messages::custody::UNIT;
use std::collections::{BTreeMap, HashMap};

/// Sums or states contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ledger: {0}")]
pub struct Broken(pub &'static str);

/// The grants of `sluiced` to a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// The quota: bytes of chunks and of what the driver takes for the VM; 0 for all of the unit.
    pub limit: u64,
    /// Of these, bytes nobody else gets.
    pub guaranteed: u64,
    /// Bytes beside the quota, to which the driver's share is charged first.
    pub headroom: u64,
    /// Bytes of guest memory that may be pinned; 0 for no limit.
    pub pinned: u64,
    /// Project and organisation; 0 for none.
    pub ancestors: [u32; 2],
}

/// Why bytes cannot be lent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The VM has its limit; over it by so many bytes.
    Limit(u64),
    /// The unit has no more, or keeps the rest for others.
    Capacity,
    /// An ancestor's escrow does not suffice; this much in all would.
    Ancestor(u32, u64),
    /// The VM is fenced or unknown.
    Closed,
}

/// A VM's account.
#[derive(Clone, Debug, Default)]
pub struct Account {
    /// Its terms.
    pub terms: Terms,
    /// Bytes of chunks lent to it.
    pub lent: u64,
    /// Of these, bytes its workers call idle.
    pub idle: u64,
    /// Bytes it keeps although it gave them back: chunks that could not be taken away from it.
    pub kept: u64,
    /// Bytes that the driver takes for it: contexts, code, variables, heap, stacks, local memory.
    pub driver: u64,
    /// Bytes that its drivers were granted, as far as no figure has corrected them.
    pub granted: u64,
    /// Bytes of guest memory pinned.
    pub pinned: u64,
    /// Gets nothing any more.
    pub closed: bool,
}

impl Account {
    /// Bytes that count towards the quota: the driver's share is charged to the headroom first.
    #[must_use]
    pub const fn charged(&self) -> u64 {
        let beside = self.driver.saturating_sub(self.terms.headroom);
        self.lent.saturating_add(self.kept).saturating_add(beside)
    }

    /// Its quota, where one without a limit has `nominal`.
    const fn limit(&self, nominal: u64) -> u64 {
        if self.terms.limit == 0 { nominal } else { self.terms.limit }
    }

    /// Its part of the sums over all accounts.
    fn part(&self, nominal: u64) -> Sums {
        let promised = if self.closed { 0 } else { self.terms.guaranteed.saturating_sub(self.charged()) };
        let quota = self.limit(nominal).saturating_add(self.terms.headroom);
        let allowed = quota.saturating_sub(self.lent.saturating_add(self.kept));
        let attributed = self.driver.min(allowed).max(self.granted);
        Sums { promised: promised.into(), attributed: attributed.into() }
    }
}

/// Sums over all accounts, kept because decisions need them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    /// Bytes that are guaranteed to VMs which have less.
    promised: u128,
    /// Bytes of drivers that charges stand for, as far as each VM's quota allows or a grant was given for them.
    attributed: u128,
}

impl Sums {
    const fn change(&mut self, before: Sums, after: Sums) {
        self.promised = self.promised - before.promised + after.promised;
        self.attributed = self.attributed - before.attributed + after.attributed;
    }
}

fn saturating(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[derive(Clone, Copy, Debug, Default)]
struct Ancestor {
    escrow: u64,
    used: u64,
}

/// All accounts of a unit.
#[derive(Debug, Default)]
pub struct Ledger {
    accounts: HashMap<VmKey, Account>,
    sums: Sums,
    ancestors: BTreeMap<u32, Ancestor>,
    /// Bytes that can be lent in all: chunks in custody.
    capacity: u64,
    /// Bytes lent in all.
    lent: u64,
    /// The quota of a VM without a limit, as it is told.
    nominal: u64,
}

fn sum(mut values: impl Iterator<Item = u64>) -> Option<u64> {
    values.try_fold(0, u64::checked_add)
}

const fn whole(bytes: u64) -> u64 {
    bytes / UNIT * UNIT
}

impl Ledger {
    /// Opens an account or changes its terms.
    ///
    /// # Errors
    /// [`Broken`] when the VM's ancestors change while it has something: their sums would be wrong.
    pub fn set_terms(&mut self, key: VmKey, terms: Terms) -> Result<(), Broken> {
        self.accounts.entry(key).or_default();
        self.change(key, "terms of an unknown VM", |account| {
            if account.terms.ancestors != terms.ancestors && account.lent + account.driver > 0 {
                return Err(Broken("ancestors of a VM with memory cannot change"));
            }
            account.terms = Terms { limit: whole(terms.limit), guaranteed: whole(terms.guaranteed), ..terms };
            Ok(())
        })
    }

    /// Changes an account, and the sums with it.
    fn change<T>(
        &mut self,
        key: VmKey,
        unknown: &'static str,
        change: impl FnOnce(&mut Account) -> Result<T, Broken>,
    ) -> Result<T, Broken> {
        let account = self.accounts.get_mut(&key).ok_or(Broken(unknown))?;
        let before = account.part(self.nominal);
        let done = change(account);
        self.sums.change(before, account.part(self.nominal));
        done
    }

    fn counted(&self) -> Sums {
        let mut sums = Sums::default();
        self.accounts.values().for_each(|account| sums.change(Sums::default(), account.part(self.nominal)));
        sums
    }

    /// The account of a VM.
    #[must_use]
    pub fn account(&self, key: VmKey) -> Option<&Account> {
        self.accounts.get(&key)
    }

    /// Every account.
    pub fn accounts(&self) -> impl Iterator<Item = (VmKey, &Account)> {
        self.accounts.iter().map(|(key, account)| (*key, account))
    }

    /// A VM gets nothing any more.
    pub fn close(&mut self, key: VmKey) {
        // One that is unknown gets nothing as it is.
        _ = self.change(key, "an unknown VM is closed", |account| {
            account.closed = true;
            Ok(())
        });
    }

    /// Forgets an account with nothing in it; `false` when it is not.
    pub fn forget(&mut self, key: VmKey) -> bool {
        let empty = |account: &Account| {
            account.lent == 0 && account.kept == 0 && account.driver == 0 && account.pinned == 0
        };
        let is_empty = self.accounts.get(&key).is_some_and(empty);
        // A new account is no part of the sums, so they hold without it.
        let cleared = |account: &mut Account| {
            *account = Account::default();
            Ok(())
        };
        is_empty
            && self.change(key, "an unknown VM is forgotten", cleared).is_ok()
            && self.accounts.remove(&key).is_some()
    }

    /// Sets the bytes that an ancestor may have in all.
    pub fn set_escrow(&mut self, ancestor: u32, bytes: u64) {
        self.ancestors.entry(ancestor).or_default().escrow = bytes;
    }

    /// Bytes that a VM may have, as its guests are told.
    #[must_use]
    pub fn limit(&self, key: VmKey) -> u64 {
        self.accounts.get(&key).map_or(0, |account| account.limit(self.nominal))
    }

    /// Bytes in custody, and of these lent.
    #[must_use]
    pub const fn totals(&self) -> (u64, u64) {
        (self.capacity, self.lent)
    }

    /// The quota of a VM without a limit, as it is told: all that was in custody at first.
    #[must_use]
    pub const fn nominal(&self) -> u64 {
        self.nominal
    }

    /// Changes the quota of VMs without a limit.
    pub fn set_nominal(&mut self, bytes: u64) {
        self.nominal = bytes;
        self.sums = self.counted();
    }

    /// More bytes come into custody.
    ///
    /// # Errors
    /// [`Broken`] when the sum cannot be.
    pub fn grow(&mut self, bytes: u64) -> Result<(), Broken> {
        self.capacity = self.capacity.checked_add(bytes).ok_or(Broken("capacity overflows"))?;
        Ok(())
    }

    /// Bytes leave custody.
    ///
    /// # Errors
    /// [`Broken`] when they were not in it.
    pub fn shrink(&mut self, bytes: u64) -> Result<(), Broken> {
        let rest = self.capacity.checked_sub(bytes).ok_or(Broken("capacity below zero"))?;
        if rest < self.lent {
            return Err(Broken("less in custody than lent"));
        }
        self.capacity = rest;
        Ok(())
    }

    /// Bytes that can leave custody without touching what is lent or guaranteed.
    #[must_use]
    pub fn spare(&self) -> u64 {
        self.free_beside(None)
    }

    /// Bytes that can leave custody for a VM's driver: beside what is lent, and guaranteed to other VMs.
    #[must_use]
    pub fn spare_for(&self, key: VmKey) -> u64 {
        self.free_beside(Some(key))
    }

    /// Free bytes less what is kept for others than `except`.
    fn free_beside(&self, except: Option<VmKey>) -> u64 {
        let own = except.and_then(|key| self.accounts.get(&key));
        let own = own.map_or(0, |account| account.part(self.nominal).promised);
        let kept = saturating(self.sums.promised - own);
        self.capacity.saturating_sub(self.lent).saturating_sub(kept)
    }

    /// Bytes of drivers that charges stand for. Bytes that drivers of a VM have beyond its quota and without a grant are no
    /// reason to give them more.
    #[must_use]
    pub fn attributed(&self) -> u64 {
        saturating(self.sums.attributed)
    }

    /// Whether `bytes` more may be lent to a VM.
    ///
    /// # Errors
    /// Why not.
    pub fn admit(&self, key: VmKey, bytes: u64) -> Result<(), Refusal> {
        let account = self.accounts.get(&key).filter(|account| !account.closed).ok_or(Refusal::Closed)?;
        self.within(key, account.charged().checked_add(bytes))?;
        self.within_ancestors(account, bytes)?;
        if bytes > self.free_beside(Some(key)) { Err(Refusal::Capacity) } else { Ok(()) }
    }

    /// Whether the driver may take `bytes` more for a VM. Whether the unit has them is not looked at.
    ///
    /// # Errors
    /// Why not.
    pub fn admit_driver(&self, key: VmKey, bytes: u64) -> Result<(), Refusal> {
        let account = self.accounts.get(&key).filter(|account| !account.closed).ok_or(Refusal::Closed)?;
        let driver = account.driver.checked_add(bytes);
        let beside = driver.map(|driver| driver.saturating_sub(account.terms.headroom));
        self.within(
            key,
            beside.and_then(|beside| beside.checked_add(account.lent)?.checked_add(account.kept)),
        )?;
        self.within_ancestors(account, bytes)
    }

    /// Bytes that the driver may take for a VM within its quota, its headroom and its ancestors' escrows.
    #[must_use]
    pub fn driver_room(&self, key: VmKey) -> u64 {
        let Some(account) = self.accounts.get(&key).filter(|account| !account.closed) else { return 0 };
        let quota = self.limit(key).saturating_sub(account.charged());
        let room = quota.saturating_add(account.terms.headroom.saturating_sub(account.driver));
        let ids = account.terms.ancestors.into_iter().filter(|id| *id != 0);
        ids.map(|id| self.ancestor(id)).map(|(used, escrow)| escrow.saturating_sub(used)).fold(room, u64::min)
    }

    fn within(&self, key: VmKey, charged: Option<u64>) -> Result<(), Refusal> {
        match charged.map(|charged| charged.saturating_sub(self.limit(key))) {
            Some(0) => Ok(()),
            Some(over) => Err(Refusal::Limit(over)),
            None => Err(Refusal::Limit(u64::MAX)),
        }
    }

    fn within_ancestors(&self, account: &Account, bytes: u64) -> Result<(), Refusal> {
        for id in account.terms.ancestors.into_iter().filter(|id| *id != 0) {
            let ancestor = self.ancestors.get(&id).copied().unwrap_or_default();
            match ancestor.used.checked_add(bytes) {
                Some(wanted) if wanted <= ancestor.escrow => {}
                wanted => return Err(Refusal::Ancestor(id, wanted.unwrap_or(u64::MAX))),
            }
        }
        Ok(())
    }

    /// A part of the driver's share of a VM changes: one worker's. Measured bytes are charged whatever the limits say.
    ///
    /// # Errors
    /// [`Broken`] when the sum cannot be.
    pub fn set_driver(&mut self, key: VmKey, before: u64, after: u64) -> Result<(), Broken> {
        let change = |sum: u64| sum.checked_sub(before).and_then(|rest| rest.checked_add(after));
        let ancestors = self.change(key, "the driver's share of an unknown VM", |account| {
            account.driver = change(account.driver).ok_or(Broken("a VM's driver share cannot be"))?;
            Ok(account.terms.ancestors)
        })?;
        for id in ancestors.into_iter().filter(|id| *id != 0) {
            let ancestor = self.ancestors.entry(id).or_default();
            ancestor.used = change(ancestor.used).ok_or(Broken("an ancestor's sum cannot be"))?;
        }
        Ok(())
    }

    /// Of the bytes that a VM's drivers were granted, a part changes: one worker's.
    ///
    /// # Errors
    /// [`Broken`] when the sum cannot be.
    pub fn set_granted(&mut self, key: VmKey, before: u64, after: u64) -> Result<(), Broken> {
        self.change(key, "grants of an unknown VM", |account| {
            let rest = account.granted.checked_sub(before).and_then(|rest| rest.checked_add(after));
            account.granted = rest.ok_or(Broken("a VM's grants cannot be"))?;
            Ok(())
        })
    }

    /// Lends `bytes` to a VM.
    ///
    /// # Errors
    /// As [`Ledger::admit`]; nothing is changed then.
    pub fn charge(&mut self, key: VmKey, bytes: u64) -> Result<(), Refusal> {
        self.admit(key, bytes)?;
        let lent = self.lent.checked_add(bytes).ok_or(Refusal::Capacity)?;
        // None of these can overflow: each is at most a limit that was compared with above.
        let changed = self.change(key, "bytes are lent to an unknown VM", |account| {
            account.lent += bytes;
            Ok(account.terms.ancestors)
        });
        for id in changed.map_err(|_| Refusal::Closed)?.into_iter().filter(|id| *id != 0) {
            self.ancestors.entry(id).or_default().used += bytes;
        }
        self.lent = lent;
        Ok(())
    }

    /// Takes `bytes` back from a VM.
    ///
    /// # Errors
    /// [`Broken`] when it had less.
    pub fn refund(&mut self, key: VmKey, bytes: u64) -> Result<(), Broken> {
        let ancestors = self.change(key, "refund to an unknown VM", |account| {
            account.lent = account.lent.checked_sub(bytes).ok_or(Broken("a VM's sum below zero"))?;
            Ok(account.terms.ancestors)
        })?;
        self.lent = self.lent.checked_sub(bytes).ok_or(Broken("the unit's sum below zero"))?;
        for id in ancestors.into_iter().filter(|id| *id != 0) {
            let ancestor = self.ancestors.entry(id).or_default();
            ancestor.used = ancestor.used.checked_sub(bytes).ok_or(Broken("an ancestor's sum below zero"))?;
        }
        Ok(())
    }

    /// A worker's idle bytes change.
    ///
    /// # Errors
    /// [`Broken`] when the sum cannot be.
    pub fn set_idle(&mut self, key: VmKey, before: u64, after: u64) -> Result<(), Broken> {
        let account = self.accounts.get_mut(&key).ok_or(Broken("idle bytes of an unknown VM"))?;
        let rest = account.idle.checked_sub(before).ok_or(Broken("idle bytes below zero"))?;
        account.idle = rest.checked_add(after).ok_or(Broken("idle bytes overflow"))?;
        Ok(())
    }

    /// A VM keeps `bytes` that it gave back, until nobody can hold them any more.
    ///
    /// # Errors
    /// [`Broken`] when the sum cannot be.
    pub fn keep(&mut self, key: VmKey, bytes: u64) -> Result<(), Broken> {
        self.change(key, "an unknown VM keeps memory", |account| {
            account.kept = account.kept.checked_add(bytes).ok_or(Broken("kept bytes overflow"))?;
            Ok(())
        })
    }

    /// The end of [`Ledger::keep`].
    ///
    /// # Errors
    /// [`Broken`] when it kept less.
    pub fn release(&mut self, key: VmKey, bytes: u64) -> Result<(), Broken> {
        self.change(key, "an unknown VM kept memory", |account| {
            account.kept = account.kept.checked_sub(bytes).ok_or(Broken("kept bytes below zero"))?;
            Ok(())
        })
    }

    /// Counts pinned guest memory; `false` when the VM's limit does not allow it.
    pub fn pin(&mut self, key: VmKey, bytes: u64) -> bool {
        let Some(account) = self.accounts.get_mut(&key) else { return false };
        let limit = if account.terms.pinned == 0 { u64::MAX } else { account.terms.pinned };
        match account.pinned.checked_add(bytes) {
            Some(sum) if sum <= limit && !account.closed => {
                account.pinned = sum;
                true
            }
            _ => false,
        }
    }

    /// Guest memory is no longer pinned.
    ///
    /// # Errors
    /// [`Broken`] when less was.
    pub fn unpin(&mut self, key: VmKey, bytes: u64) -> Result<(), Broken> {
        let account = self.accounts.get_mut(&key).ok_or(Broken("unpins for an unknown VM"))?;
        account.pinned = account.pinned.checked_sub(bytes).ok_or(Broken("pinned bytes below zero"))?;
        Ok(())
    }

    /// Whether the sums hold together and with `lent`, `drivers` and `capacity`, counted elsewhere.
    ///
    /// # Errors
    /// [`Broken`] says which does not.
    pub fn check(
        &self,
        lent: &HashMap<VmKey, u64>,
        drivers: &HashMap<VmKey, u64>,
        capacity: u64,
    ) -> Result<(), Broken> {
        if sum(self.accounts.values().map(|account| account.lent)) != Some(self.lent) {
            return Err(Broken("the unit's sum is not that of its VMs"));
        }
        if self.capacity != capacity || self.lent > self.capacity {
            return Err(Broken("the unit's sum is not that of its chunks"));
        }
        for (key, account) in &self.accounts {
            if account.lent != lent.get(key).copied().unwrap_or(0) {
                return Err(Broken("a VM's sum is not that of its chunks"));
            }
            if account.driver != drivers.get(key).copied().unwrap_or(0) {
                return Err(Broken("a VM's driver share is not that of its workers"));
            }
        }
        if lent.keys().any(|key| !self.accounts.contains_key(key)) {
            return Err(Broken("chunks are lent to an unknown VM"));
        }
        if self.sums != self.counted() {
            return Err(Broken("the sums over all VMs are not those of their accounts"));
        }
        for (id, ancestor) in &self.ancestors {
            let children = self.accounts.values().filter(|account| account.terms.ancestors.contains(id));
            if sum(children.flat_map(|account| [account.lent, account.driver])) != Some(ancestor.used) {
                return Err(Broken("an ancestor's sum is not that of its VMs"));
            }
        }
        Ok(())
    }

    /// Bytes an ancestor's VMs have, the driver's shares included, and what they may have.
    #[must_use]
    pub fn ancestor(&self, id: u32) -> (u64, u64) {
        self.ancestors.get(&id).map_or((0, 0), |ancestor| (ancestor.used, ancestor.escrow))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: VmKey = VmKey { vm: 1, epoch: 1 };

    // Promise: Q21
    #[test]
    fn sums_that_contradict_each_other_are_found() {
        type Plant = fn(&mut Ledger, &mut HashMap<VmKey, u64>);
        const OTHER: VmKey = VmKey { vm: 2, epoch: 1 };
        let planted: [(&str, Plant); 11] = [
            ("the unit's sum is not that of its VMs", |ledger, _| ledger.lent += UNIT),
            ("the unit's sum is not that of its VMs", |ledger, _| {
                ledger.accounts.get_mut(&VM).unwrap().lent = u64::MAX;
                ledger.accounts.insert(OTHER, Account { lent: u64::MAX, ..Account::default() });
            }),
            ("the unit's sum is not that of its chunks", |ledger, _| ledger.capacity -= UNIT),
            ("a VM's sum is not that of its chunks", |_, lent| *lent.get_mut(&VM).unwrap() += UNIT),
            ("a VM's sum is not that of its chunks", |_, lent| lent.clear()),
            ("a VM's driver share is not that of its workers", |ledger, _| {
                ledger.set_driver(VM, 0, UNIT).unwrap();
            }),
            ("chunks are lent to an unknown VM", |_, lent| _ = lent.insert(OTHER, UNIT)),
            ("the sums over all VMs are not those of their accounts", |ledger, _| ledger.sums.promised += 1),
            ("the sums over all VMs are not those of their accounts", |ledger, _| {
                ledger.accounts.get_mut(&VM).unwrap().granted = 4 * UNIT;
            }),
            ("an ancestor's sum is not that of its VMs", |ledger, _| {
                ledger.ancestors.get_mut(&7).unwrap().used -= UNIT;
            }),
            ("an ancestor's sum is not that of its VMs", |ledger, _| {
                ledger.accounts.get_mut(&VM).unwrap().terms.ancestors = [0, 0];
            }),
        ];
        for (expected, plant) in planted {
            let mut ledger = Ledger::default();
            ledger.grow(4 * UNIT).unwrap();
            ledger.set_escrow(7, u64::MAX);
            let terms = Terms { limit: 4 * UNIT, ancestors: [7, 0], ..Terms::default() };
            ledger.set_terms(VM, terms).unwrap();
            ledger.charge(VM, 2 * UNIT).unwrap();
            ledger.set_driver(VM, 0, UNIT).unwrap();
            let mut lent = HashMap::from([(VM, 2 * UNIT)]);
            assert_eq!(
                ledger.check(&lent, &HashMap::from([(VM, UNIT)]), 4 * UNIT),
                Ok(()),
                "before it is planted"
            );
            plant(&mut ledger, &mut lent);
            assert_eq!(ledger.check(&lent, &HashMap::from([(VM, UNIT)]), 4 * UNIT), Err(Broken(expected)));
        }
    }

    // Promise: Q21
    #[test]
    fn sums_hold_when_a_vm_with_a_guarantee_is_closed_and_forgotten() {
        let mut ledger = Ledger::default();
        ledger.grow(4 * UNIT).unwrap();
        ledger.set_nominal(4 * UNIT);
        ledger.set_terms(VM, Terms { guaranteed: 3 * UNIT, ..Terms::default() }).unwrap();
        ledger.charge(VM, UNIT).unwrap();
        assert_eq!(ledger.spare(), UNIT);
        ledger.close(VM);
        ledger.close(VmKey { vm: 9, epoch: 1 });
        assert_eq!(ledger.spare(), 3 * UNIT, "nothing is kept for it any more");
        assert!(!ledger.forget(VM), "it has something");
        ledger.refund(VM, UNIT).unwrap();
        assert!(ledger.forget(VM) && !ledger.forget(VM));
        // One that is open still has its guarantee in the sums.
        ledger.set_terms(VM, Terms { guaranteed: 3 * UNIT, ..Terms::default() }).unwrap();
        assert_eq!(ledger.spare(), UNIT);
        assert!(ledger.forget(VM));
        assert_eq!(ledger.spare(), 4 * UNIT);
        assert_eq!(ledger.check(&HashMap::new(), &HashMap::new(), 4 * UNIT), Ok(()));
    }

    // Promise: Q20
    #[test]
    fn sizes_near_the_end_of_the_numbers_are_refused_not_wrapped() {
        let mut ledger = Ledger::default();
        ledger.grow(u64::MAX - 1).unwrap();
        assert!(ledger.grow(2).is_err());
        let terms = Terms { limit: u64::MAX, guaranteed: u64::MAX, ancestors: [7, 0], ..Terms::default() };
        ledger.set_terms(VM, terms).unwrap();
        ledger.set_terms(VmKey { vm: 2, epoch: 1 }, terms).unwrap();
        assert_eq!(ledger.spare(), 0, "what is guaranteed does not wrap either");
        ledger.set_escrow(7, u64::MAX);
        ledger.set_terms(VmKey { vm: 2, epoch: 1 }, Terms { guaranteed: 0, ..terms }).unwrap();
        ledger.charge(VM, UNIT).unwrap();
        assert!(matches!(ledger.charge(VM, u64::MAX), Err(Refusal::Limit(_))));
        assert!(matches!(ledger.charge(VM, u64::MAX - UNIT), Err(Refusal::Limit(_))));
        assert_eq!(ledger.account(VM).unwrap().lent, UNIT);
        assert!(ledger.pin(VM, u64::MAX));
        assert!(!ledger.pin(VM, 1));
        assert!(ledger.refund(VM, UNIT + 1).is_err());
        assert!(ledger.refund(VM, u64::MAX).is_err());
        assert!(ledger.set_terms(VM, Terms { ancestors: [8, 0], ..terms }).is_err(), "it has something");
        ledger.refund(VM, UNIT).unwrap();
        assert!(!ledger.forget(VM), "its pinned memory is not accounted for yet");
        ledger.unpin(VM, u64::MAX).unwrap();
        assert!(ledger.forget(VM));
    }
}
