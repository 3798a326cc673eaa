//! The check that the sums and states of custody agree, for the audit and the tests.

use super::{Custody, WorkerState};
use crate::{
    chunks::ChunkState,
    ids::{ChunkId, VmKey},
    ledger::{Account, Broken},
};
use std::collections::{BTreeMap, HashMap};

impl Custody {
    /// Checks that sums and states agree.
    ///
    /// # Errors
    /// [`Broken`] with the first contradiction.
    pub fn check(&self) -> Result<(), Broken> {
        let mut lent: HashMap<VmKey, u64> = HashMap::new();
        let (mut capacity, mut suspect) = (0_u64, 0_u64);
        for (_, chunk) in self.chunks.iter() {
            match chunk.state {
                ChunkState::Suspect => suspect += chunk.class.bytes(),
                _ => capacity += chunk.class.bytes(),
            }
            if chunk.state == ChunkState::Lent
                && let Some(vm) = chunk.vm
            {
                *lent.entry(vm).or_default() += chunk.class.bytes();
            }
            for importer in &chunk.importers {
                if self.workers.get(importer).is_none_or(|worker| Some(worker.vm) != chunk.vm) {
                    return Err(Broken("a chunk can be reached from two VMs"));
                }
            }
        }
        self.chunks.check()?;
        let (mut drivers, mut granted) = (HashMap::<VmKey, u64>::new(), HashMap::<VmKey, u64>::new());
        for (id, worker) in &self.workers {
            *drivers.entry(worker.vm).or_default() += worker.charged;
            *granted.entry(worker.vm).or_default() += worker.granted;
            if self.ending.contains(&(worker.vm, *id)) == (worker.life == WorkerState::Alive) {
                return Err(Broken("a worker that ends is not listed, or one that does not is"));
            }
        }
        self.ledger.check(&lent, &drivers, capacity)?;
        let grants =
            |(key, account): (VmKey, &Account)| account.granted == granted.get(&key).copied().unwrap_or(0);
        if !self.ledger.accounts().all(grants) {
            return Err(Broken("a VM's grants are not those of its workers"));
        }
        if suspect != self.suspect_bytes {
            return Err(Broken("the sum of suspect chunks is wrong"));
        }
        let mut leases: HashMap<ChunkId, u32> = HashMap::new();
        for worker in self.workers.values() {
            let (mut bytes, mut held) = (0, 0);
            let mut own: BTreeMap<ChunkId, u32> = BTreeMap::new();
            for id in worker.leases.values() {
                let chunk = self.chunks.get(*id).ok_or(Broken("a lease on no chunk"))?;
                bytes += chunk.class.bytes();
                let count = own.entry(*id).or_default();
                held += if *count == 0 { chunk.class.bytes() } else { 0 };
                *count += 1;
                *leases.entry(*id).or_default() += 1;
            }
            if (bytes, held) != (worker.lent, worker.held) {
                return Err(Broken("a worker's sum is not that of its leases"));
            }
            if !worker.imported.iter().filter(|(_, leases)| **leases > 0).eq(&own) {
                return Err(Broken("a worker's numbers of leases on its chunks are not those of its leases"));
            }
        }
        for (id, chunk) in self.chunks.iter() {
            if chunk.leases != leases.get(&id).copied().unwrap_or(0) {
                return Err(Broken("a chunk's number of leases is not that of its workers"));
            }
        }
        Ok(())
    }
}
