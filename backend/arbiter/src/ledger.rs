//! Accounts: the limits of each VM, and the memory it has.
//!
//! Pure and with one writer. Sums are kept, never derived from a worker's messages, and every step is checked arithmetic: a
//! step that would leave a sum wrong is refused and reported as [`Broken`]. The ledger has no chunks; the
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
pub struct MemoryTerms {
    /// The quota: bytes of chunks and of the VM's driver share; 0 for all of the unit.
    pub limit: u64,
    /// The part of the quota that no other VM gets, in bytes.
    pub guaranteed: u64,
    /// Bytes beside the quota, to which the driver's share is charged first.
    pub headroom: u64,
    /// Bytes of guest memory that may be pinned; 0 for no limit.
    pub pinned: u64,
    /// Project and organisation; 0 for none.
    pub ancestors: [u32; 2],
}

/// The reason why bytes cannot be lent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LendRefusal {
    /// The VM's limit would be exceeded by this many bytes.
    Limit(u64),
    /// The unit has no free bytes, or keeps the rest for other VMs.
    Capacity,
    /// An ancestor's escrow does not suffice: its id, and the bytes that it needs in all.
    Ancestor(u32, u64),
    /// The VM is fenced or unknown.
    Closed,
}

/// A VM's account.
#[derive(Clone, Debug, Default)]
pub struct Account {
    /// The VM's terms.
    pub terms: MemoryTerms,
    /// Bytes of chunks lent to it.
    pub lent: u64,
    /// The part of `lent` that its workers report as idle, in bytes.
    pub idle: u64,
    /// Bytes that it gave back and that could not be taken away from it.
    pub kept: u64,
    /// The driver share: bytes of contexts, code, variables, heap, stacks and local memory.
    pub driver: u64,
    /// Bytes beyond `driver` that the drivers have taken if they did not give back all that their workers report. They are no
    /// charge, and no room either.
    pub doubtful: u64,
    /// Bytes that its drivers were granted and that no measured figure has replaced.
    pub granted: u64,
    /// Bytes of guest memory pinned.
    pub pinned: u64,
    /// True once it gets no more memory.
    pub closed: bool,
}

impl Account {
    /// Bytes that count towards the quota: the driver's share is charged to the headroom first.
    #[must_use]
    pub const fn charged(&self) -> u64 {
        self.charged_with(0)
    }

    /// The same with this many bytes more of the driver.
    const fn charged_with(&self, bytes: u64) -> u64 {
        let beside = self.driver.saturating_add(bytes).saturating_sub(self.terms.headroom);
        self.lent.saturating_add(self.kept).saturating_add(beside)
    }

    /// True if it is charged for memory of the unit.
    const fn has_memory(&self) -> bool {
        self.lent > 0 || self.kept > 0 || self.driver > 0
    }

    /// Its quota; `nominal` if it has no limit.
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
    /// Guaranteed bytes that VMs do not use yet.
    promised: u128,
    /// Bytes of drivers that are covered by charges: up to each VM's quota, or its grants if they are more.
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
struct AncestorAccount {
    escrow: u64,
    used: u64,
}

/// All accounts of a unit.
#[derive(Debug, Default)]
pub struct Ledger {
    accounts: HashMap<VmKey, Account>,
    sums: Sums,
    ancestors: BTreeMap<u32, AncestorAccount>,
    /// Bytes of all chunks in custody.
    capacity: u64,
    /// Bytes of these that are lent.
    lent: u64,
    /// The quota that is reported to a VM without a limit.
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
    /// [`Broken`] if the VM's ancestors change while it has memory: their sums would be wrong.
    pub fn set_terms(&mut self, key: VmKey, terms: MemoryTerms) -> Result<(), Broken> {
        self.accounts.entry(key).or_default();
        self.change(key, "terms of an unknown VM", |account| {
            if account.terms.ancestors != terms.ancestors && account.has_memory() {
                return Err(Broken("ancestors of a VM with memory cannot change"));
            }
            account.terms =
                MemoryTerms { limit: whole(terms.limit), guaranteed: whole(terms.guaranteed), ..terms };
            Ok(())
        })
    }

    /// Changes an account and the sums that include it.
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

    /// Closes an account: the VM gets no more memory.
    pub fn close(&mut self, key: VmKey) {
        // An unknown VM gets no memory anyway.
        _ = self.change(key, "an unknown VM is closed", |account| {
            account.closed = true;
            Ok(())
        });
    }

    /// Removes an account if it is empty; `false` if it is not.
    pub fn forget(&mut self, key: VmKey) -> bool {
        let empty = |account: &Account| !account.has_memory() && account.pinned == 0;
        let is_empty = self.accounts.get(&key).is_some_and(empty);
        // A new account adds nothing to the sums, so they stay right without it.
        let cleared = |account: &mut Account| {
            *account = Account::default();
            Ok(())
        };
        is_empty
            && self.change(key, "an unknown VM is forgotten", cleared).is_ok()
            && self.accounts.remove(&key).is_some()
    }

    /// Sets the bytes that an ancestor's VMs may have in all.
    pub fn set_escrow(&mut self, ancestor: u32, bytes: u64) {
        self.ancestors.entry(ancestor).or_default().escrow = bytes;
    }

    /// A VM's quota in bytes, as its guests see it.
    #[must_use]
    pub fn limit(&self, key: VmKey) -> u64 {
        self.accounts.get(&key).map_or(0, |account| account.limit(self.nominal))
    }

    /// Bytes in custody, and the part of them that is lent.
    #[must_use]
    pub const fn totals(&self) -> (u64, u64) {
        (self.capacity, self.lent)
    }

    /// The quota that is reported to a VM without a limit: all bytes that were in custody at first.
    #[must_use]
    pub const fn nominal(&self) -> u64 {
        self.nominal
    }

    /// Changes the quota of VMs without a limit.
    pub fn set_nominal(&mut self, bytes: u64) {
        self.nominal = bytes;
        self.sums = self.counted();
    }

    /// Adds bytes to custody.
    ///
    /// # Errors
    /// [`Broken`] if the sum overflows.
    pub fn grow(&mut self, bytes: u64) -> Result<(), Broken> {
        self.capacity = self.capacity.checked_add(bytes).ok_or(Broken("capacity overflows"))?;
        Ok(())
    }

    /// Removes bytes from custody.
    ///
    /// # Errors
    /// [`Broken`] if custody has fewer unlent bytes.
    pub fn shrink(&mut self, bytes: u64) -> Result<(), Broken> {
        let rest = self.capacity.checked_sub(bytes).ok_or(Broken("capacity below zero"))?;
        if rest < self.lent {
            return Err(Broken("less in custody than lent"));
        }
        self.capacity = rest;
        Ok(())
    }

    /// Bytes that can leave custody: neither lent nor guaranteed.
    #[must_use]
    pub fn spare(&self) -> u64 {
        self.free_beside(None)
    }

    /// Bytes that can leave custody for a VM's driver: neither lent nor guaranteed to other VMs.
    #[must_use]
    pub fn spare_for(&self, key: VmKey) -> u64 {
        self.free_beside(Some(key))
    }

    /// Free bytes less the bytes that are kept for VMs other than `except`.
    fn free_beside(&self, except: Option<VmKey>) -> u64 {
        let own = except.and_then(|key| self.accounts.get(&key));
        let own = own.map_or(0, |account| account.part(self.nominal).promised);
        let kept = saturating(self.sums.promised - own);
        self.capacity.saturating_sub(self.lent).saturating_sub(kept)
    }

    /// Bytes of drivers that are covered by charges. Bytes of a VM's drivers beyond its quota and without a grant do not count,
    /// so they are no reason to give the drivers more.
    #[must_use]
    pub fn attributed(&self) -> u64 {
        saturating(self.sums.attributed)
    }

    /// Checks that `bytes` more may be lent to a VM.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn admit(&self, key: VmKey, bytes: u64) -> Result<(), LendRefusal> {
        let account = self.accounts.get(&key).filter(|account| !account.closed).ok_or(LendRefusal::Closed)?;
        self.within(key, account.charged_with(account.doubtful).checked_add(bytes))?;
        self.within_ancestors(account, bytes)?;
        if bytes > self.free_beside(Some(key)) { Err(LendRefusal::Capacity) } else { Ok(()) }
    }

    /// Checks that the driver may take `bytes` more for a VM, not that the unit has them.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn admit_driver(&self, key: VmKey, bytes: u64) -> Result<(), LendRefusal> {
        let account = self.accounts.get(&key).filter(|account| !account.closed).ok_or(LendRefusal::Closed)?;
        self.within(key, account.doubtful.checked_add(bytes).map(|bytes| account.charged_with(bytes)))?;
        self.within_ancestors(account, bytes)
    }

    /// Bytes that the driver may take for a VM within its quota, its headroom and its ancestors' escrows.
    #[must_use]
    pub fn driver_room(&self, key: VmKey) -> u64 {
        let Some(account) = self.accounts.get(&key).filter(|account| !account.closed) else { return 0 };
        let quota = self.limit(key).saturating_sub(account.charged_with(account.doubtful));
        let driver = account.driver.saturating_add(account.doubtful);
        let room = quota.saturating_add(account.terms.headroom.saturating_sub(driver));
        let ids = account.terms.ancestors.into_iter().filter(|id| *id != 0);
        ids.map(|id| self.ancestor(id)).map(|(used, escrow)| escrow.saturating_sub(used)).fold(room, u64::min)
    }

    fn within(&self, key: VmKey, charged: Option<u64>) -> Result<(), LendRefusal> {
        match charged.map(|charged| charged.saturating_sub(self.limit(key))) {
            Some(0) => Ok(()),
            Some(over) => Err(LendRefusal::Limit(over)),
            None => Err(LendRefusal::Limit(u64::MAX)),
        }
    }

    fn within_ancestors(&self, account: &Account, bytes: u64) -> Result<(), LendRefusal> {
        for id in account.terms.ancestors.into_iter().filter(|id| *id != 0) {
            let ancestor = self.ancestors.get(&id).copied().unwrap_or_default();
            match ancestor.used.saturating_add(account.doubtful).checked_add(bytes) {
                Some(wanted) if wanted <= ancestor.escrow => {}
                wanted => return Err(LendRefusal::Ancestor(id, wanted.unwrap_or(u64::MAX))),
            }
        }
        Ok(())
    }

    /// Replaces one worker's part of a VM's driver share. Measured bytes are charged even beyond the limits.
    ///
    /// # Errors
    /// [`Broken`] if the sum overflows or falls below zero.
    pub fn set_driver(&mut self, key: VmKey, before: u64, after: u64) -> Result<(), Broken> {
        let change = |sum: u64| sum.checked_sub(before).and_then(|rest| rest.checked_add(after));
        let ancestors = self.change(key, "the driver's share of an unknown VM", |account| {
            account.driver = change(account.driver).ok_or(Broken("a VM's driver share cannot be"))?;
            Ok(account.terms.ancestors)
        })?;
        self.change_ancestors(ancestors, change)
    }

    /// Changes the sums of a VM's ancestors.
    fn change_ancestors(
        &mut self,
        ancestors: [u32; 2],
        change: impl Fn(u64) -> Option<u64>,
    ) -> Result<(), Broken> {
        for id in ancestors.into_iter().filter(|id| *id != 0) {
            let ancestor = self.ancestors.entry(id).or_default();
            ancestor.used = change(ancestor.used).ok_or(Broken("an ancestor's sum cannot be"))?;
        }
        Ok(())
    }

    /// Replaces one worker's part of the bytes that a VM's drivers were granted.
    ///
    /// # Errors
    /// [`Broken`] if the sum overflows or falls below zero.
    pub fn set_granted(&mut self, key: VmKey, before: u64, after: u64) -> Result<(), Broken> {
        self.change(key, "grants of an unknown VM", |account| {
            let rest = account.granted.checked_sub(before).and_then(|rest| rest.checked_add(after));
            account.granted = rest.ok_or(Broken("a VM's grants cannot be"))?;
            Ok(())
        })
    }

    /// Replaces one worker's part of a VM's doubtful bytes.
    ///
    /// # Errors
    /// [`Broken`] if the sum overflows or falls below zero.
    pub fn set_doubtful(&mut self, key: VmKey, before: u64, after: u64) -> Result<(), Broken> {
        self.change(key, "doubtful bytes of an unknown VM", |account| {
            let rest = account.doubtful.checked_sub(before).and_then(|rest| rest.checked_add(after));
            account.doubtful = rest.ok_or(Broken("a VM's doubtful bytes cannot be"))?;
            Ok(())
        })
    }

    /// Lends `bytes` to a VM.
    ///
    /// # Errors
    /// As [`Ledger::admit`]; then nothing is changed.
    pub fn charge(&mut self, key: VmKey, bytes: u64) -> Result<(), LendRefusal> {
        self.admit(key, bytes)?;
        let lent = self.lent.checked_add(bytes).ok_or(LendRefusal::Capacity)?;
        // None of these can overflow: each is at most a limit that was checked above.
        let changed = self.change(key, "bytes are lent to an unknown VM", |account| {
            account.lent += bytes;
            Ok(account.terms.ancestors)
        });
        for id in changed.map_err(|_| LendRefusal::Closed)?.into_iter().filter(|id| *id != 0) {
            self.ancestors.entry(id).or_default().used += bytes;
        }
        self.lent = lent;
        Ok(())
    }

    /// Takes `bytes` back from a VM.
    ///
    /// # Errors
    /// [`Broken`] if the VM has fewer.
    pub fn refund(&mut self, key: VmKey, bytes: u64) -> Result<(), Broken> {
        let ancestors = self.change(key, "refund to an unknown VM", |account| {
            account.lent = account.lent.checked_sub(bytes).ok_or(Broken("a VM's sum below zero"))?;
            Ok(account.terms.ancestors)
        })?;
        self.lent = self.lent.checked_sub(bytes).ok_or(Broken("the unit's sum below zero"))?;
        self.change_ancestors(ancestors, |sum| sum.checked_sub(bytes))
    }

    /// Replaces a worker's part of the idle bytes.
    ///
    /// # Errors
    /// [`Broken`] if the sum overflows or falls below zero.
    pub fn set_idle(&mut self, key: VmKey, before: u64, after: u64) -> Result<(), Broken> {
        let account = self.accounts.get_mut(&key).ok_or(Broken("idle bytes of an unknown VM"))?;
        let rest = account.idle.checked_sub(before).ok_or(Broken("idle bytes below zero"))?;
        account.idle = rest.checked_add(after).ok_or(Broken("idle bytes overflow"))?;
        Ok(())
    }

    /// Charges a VM and its ancestors for `bytes` that it gave back, until no process can hold them any more.
    ///
    /// # Errors
    /// [`Broken`] if the sum overflows.
    pub fn keep(&mut self, key: VmKey, bytes: u64) -> Result<(), Broken> {
        let ancestors = self.change(key, "an unknown VM keeps memory", |account| {
            account.kept = account.kept.checked_add(bytes).ok_or(Broken("kept bytes overflow"))?;
            Ok(account.terms.ancestors)
        })?;
        self.change_ancestors(ancestors, |sum| sum.checked_add(bytes))
    }

    /// Ends the charge of [`Ledger::keep`].
    ///
    /// # Errors
    /// [`Broken`] if the VM keeps fewer bytes.
    pub fn release(&mut self, key: VmKey, bytes: u64) -> Result<(), Broken> {
        let ancestors = self.change(key, "an unknown VM kept memory", |account| {
            account.kept = account.kept.checked_sub(bytes).ok_or(Broken("kept bytes below zero"))?;
            Ok(account.terms.ancestors)
        })?;
        self.change_ancestors(ancestors, |sum| sum.checked_sub(bytes))
    }

    /// Counts pinned guest memory; `false` if the VM's limit does not allow it.
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

    /// Ends the count of pinned guest memory.
    ///
    /// # Errors
    /// [`Broken`] if fewer bytes are pinned.
    pub fn unpin(&mut self, key: VmKey, bytes: u64) -> Result<(), Broken> {
        let account = self.accounts.get_mut(&key).ok_or(Broken("unpins for an unknown VM"))?;
        account.pinned = account.pinned.checked_sub(bytes).ok_or(Broken("pinned bytes below zero"))?;
        Ok(())
    }

    /// Checks that the sums agree with each other and with `lent`, `drivers` and `capacity`, counted elsewhere.
    ///
    /// # Errors
    /// [`Broken`] with the first contradiction.
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
            if sum(children.flat_map(|account| [account.lent, account.kept, account.driver]))
                != Some(ancestor.used)
            {
                return Err(Broken("an ancestor's sum is not that of its VMs"));
            }
        }
        Ok(())
    }

    /// Bytes of an ancestor's VMs, driver shares and kept memory included, and the ancestor's escrow.
    #[must_use]
    pub fn ancestor(&self, id: u32) -> (u64, u64) {
        self.ancestors.get(&id).map_or((0, 0), |ancestor| (ancestor.used, ancestor.escrow))
    }
}

#[cfg(test)]
mod tests;
