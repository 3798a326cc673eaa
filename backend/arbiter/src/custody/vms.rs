//! VMs: the messages of `sluiced` about them, and the answers to it.

use super::{Custody, Effect, Millis, tasks};
use crate::{
    chunks::ChunkState,
    ids::{VmKey, WorkerId},
    ledger::MemoryTerms,
};
use sluice_driver::code;
use sluice_messages::{
    control::{FromArbiter, ToArbiter},
    figures::UnitBytes,
};

impl Custody {
    /// Handles a message of `sluiced` that carries no descriptor.
    pub fn command(&mut self, message: ToArbiter, now: Millis) {
        match message {
            ToArbiter::Vm { vm, epoch, limit, guaranteed, headroom, pinned, ancestors } => {
                let low = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0);
                let ancestors = [low(ancestors), low(ancestors >> 32)];
                self.set_vm(
                    VmKey { vm, epoch },
                    MemoryTerms { limit, guaranteed, headroom, pinned, ancestors },
                    now,
                );
            }
            ToArbiter::Escrow { ancestor, bytes } => {
                self.ledger.set_escrow(ancestor, bytes);
                self.recheck = true;
            }
            ToArbiter::Fence { vm, epoch } => self.fence(VmKey { vm, epoch }),
            ToArbiter::Forget { vm, epoch } => {
                self.fence(VmKey { vm, epoch });
                self.leaving.insert(VmKey { vm, epoch });
                self.forget_leaving();
            }
            ToArbiter::DescribeVm { serial, vm } => {
                let described = [self.describe_pinned(vm), self.describe_vm(serial, vm)];
                self.effects.extend(described.map(Effect::Tell));
            }
            ToArbiter::DescribeUnit { serial } => {
                let described = self.describe_unit(serial);
                self.effects.push_back(Effect::Tell(described));
            }
            ToArbiter::Worker { .. }
            | ToArbiter::Inventory {}
            | ToArbiter::TimeShare { .. }
            | ToArbiter::Probe {}
            | ToArbiter::Prober { .. } => {
                tracing::error!("BUG: the server loop must handle this message, not custody");
            }
        }
    }

    fn set_vm(&mut self, key: VmKey, terms: MemoryTerms, _now: Millis) {
        let others = self.ledger.accounts().map(|(other, _)| other).filter(|other| other.vm == key.vm);
        let others: Vec<VmKey> = others.filter(|other| *other != key).collect();
        if others.iter().any(|other| other.epoch > key.epoch) {
            self.stale += 1;
            return;
        }
        for older in others {
            self.fence(older);
            self.leaving.insert(older);
        }
        if self.ledger.account(key).is_some_and(|account| account.closed) {
            // A fenced epoch does not return; its successor has another number.
            self.stale += 1;
            return;
        }
        let done = self.ledger.set_terms(key, terms);
        self.report_if_broken(key, done);
        self.recheck = true;
        self.changed = true;
        self.touched.insert(key);
        self.forget_leaving();
    }

    /// Closes a VM: it gets no more memory or grants.
    fn fence(&mut self, key: VmKey) {
        if self.ledger.account(key).is_none() {
            self.stale += 1;
            return;
        }
        self.ledger.close(key);
        self.touched.insert(key);
        for waiter in self.waiters.remove_vm(key) {
            self.no_longer_waits(waiter.worker);
            self.refuse(waiter.worker, waiter.serial, code::DEVICE_UNAVAILABLE);
        }
        self.refuse_growth(key);
    }

    pub(super) fn no_longer_waits(&mut self, worker: WorkerId) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.waiting = worker.waiting.saturating_sub(1);
        }
    }

    pub(super) fn forget_leaving(&mut self) {
        for key in self.leaving.clone() {
            let empty = !self.members.contains_key(&key) && self.dirty_of(key) == 0;
            if empty && (self.ledger.forget(key) || self.ledger.account(key).is_none()) {
                self.leaving.remove(&key);
                self.growth.forget(key);
            }
        }
    }

    /// Bytes that a VM gave back and that are not yet clean for other VMs.
    fn dirty_of(&self, key: VmKey) -> u64 {
        // Spoiled chunks are not counted: the VM is charged for them instead.
        let of = |chunk: &&crate::chunks::Chunk| {
            chunk.vm == Some(key) && chunk.state != ChunkState::Lent && !chunk.spoiled
        };
        let chunks: u64 =
            self.chunks.iter().map(|(_, chunk)| chunk).filter(of).map(|chunk| chunk.class.bytes()).sum();
        let moving = match &self.busy {
            Some(tasks::Busy::Move { vm, bytes, .. }) if *vm == key => *bytes,
            _ => 0,
        };
        chunks + moving + self.growth.unswept_bytes(key)
    }

    /// The newest epoch of a VM that has an account.
    #[must_use]
    pub fn current(&self, vm: u32) -> Option<VmKey> {
        self.ledger.accounts().map(|(key, _)| key).filter(|key| key.vm == vm).max_by_key(|key| key.epoch)
    }

    fn describe_vm(&self, serial: u64, vm: u32) -> FromArbiter {
        let newest = self.current(vm).and_then(|key| Some((key, self.ledger.account(key)?)));
        let Some((key, account)) = newest else {
            return FromArbiter::Vm { serial, vm, epoch: 0, lent: 0, headroom: 0, dirty: 0, holders: 0 };
        };
        let holders = self.members.get(&key).map_or(0, Vec::len);
        FromArbiter::Vm {
            serial,
            vm,
            epoch: key.epoch,
            lent: account.lent.saturating_add(account.kept),
            headroom: account.driver,
            dirty: self.dirty_of(key),
            holders: u32::try_from(holders).unwrap_or(u32::MAX),
        }
    }

    fn describe_pinned(&self, vm: u32) -> FromArbiter {
        let newest = self.current(vm).and_then(|key| Some((key.epoch, self.ledger.account(key)?.pinned)));
        let (epoch, bytes) = newest.unwrap_or_default();
        FromArbiter::Pinned { vm, epoch, bytes }
    }

    fn describe_unit(&self, serial: u64) -> FromArbiter {
        let mut bytes = [0_u64; 3];
        for (_, chunk) in self.chunks.iter() {
            let place = match chunk.state {
                ChunkState::Clean if chunk.vm.is_none() => 0,
                ChunkState::Clean | ChunkState::Dirty | ChunkState::Scrubbing { .. } => 1,
                ChunkState::Suspect => 2,
                ChunkState::Lent => continue,
            };
            if let Some(sum) = bytes.get_mut(place) {
                *sum += chunk.class.bytes();
            }
        }
        let [clean, dirty, suspect] = bytes;
        let (total, lent) = self.ledger.totals();
        let headroom = self.ledger.nominal().saturating_sub(total + suspect);
        let memory = UnitBytes { total: total + suspect, lent, clean, dirty, headroom, suspect };
        FromArbiter::Unit { serial, memory }
    }

    /// The charged driver share of a VM.
    #[must_use]
    pub fn driver_share(&self, key: VmKey) -> u64 {
        self.ledger.account(key).map_or(0, |account| account.driver)
    }

    /// True if the VM's account is open, so its worker may be served; otherwise counts a message of an old epoch.
    pub fn admits(&mut self, key: VmKey) -> bool {
        let closed = self.ledger.account(key).is_none_or(|account| account.closed);
        self.stale += u64::from(closed);
        !closed
    }
}
