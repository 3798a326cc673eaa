//! The records that outlive the daemon, and the plan that the next one makes of them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{AdminState, Fleet, Foreign, Member, PlanError, PlanUnit, UnitPhase};
use crate::adoption::{ListedInstance, Matches, match_instances};
use crate::destruction::Destruction;
use crate::record::{Partition, RecordPhase, UnitId, UnitRecord};
use crate::request::Request;

impl Fleet {
    /// The records to keep over a restart, beside the requests of the VMs.
    pub fn records(&self) -> Vec<UnitRecord> {
        let record = |unit: &PlanUnit| UnitRecord {
            unit: unit.id,
            gpu: self.gpus[unit.gpu].uuid,
            partition: unit.partition,
            shared: unit.shared,
            phase: match &unit.phase {
                UnitPhase::Reserved => RecordPhase::Reserved,
                UnitPhase::Unproven => RecordPhase::Unproven,
                UnitPhase::Ready => RecordPhase::Ready,
                UnitPhase::Closing(destruction) if destruction.is_quarantined() => RecordPhase::Quarantined,
                UnitPhase::Closing(_) => RecordPhase::Closing,
            },
            identity: unit.identity.clone(),
            epoch: unit.epoch,
        };
        self.units.values().map(record).collect()
    }

    /// After a restart, on an empty plan: takes over recorded units that still exist, under new epochs, and counts all other
    /// instances that the driver lists as foreign. Instances with an unconfirmed record are foreign here; the caller may read
    /// [`Matches::unconfirmed`]. `highest` is the highest epoch and unit that were ever recorded.
    pub fn adopt(
        &mut self,
        records: &[UnitRecord],
        listed: &[ListedInstance],
        highest: Highest,
        now: Duration,
    ) -> Result<Matches, PlanError> {
        let mut matches = match_instances(records, listed)?;
        // A record that no longer fits its GPU (MIG switched on or off, a profile gone) proves nothing.
        let fits = |record: &UnitRecord| {
            let gpu = self.gpus.iter().position(|gpu| gpu.uuid == record.gpu);
            gpu.is_some_and(|gpu| self.size(gpu, record.partition).is_ok())
        };
        let unfit = matches.adopted.extract_if(.., |pair| !fits(&records[pair.0]));
        let (lost, foreign): (Vec<usize>, Vec<usize>) = unfit.unzip();
        matches.lost.extend(lost);
        matches.foreign.extend(foreign);
        let whole = (0..records.len()).filter(|&at| records[at].partition == Partition::Whole);
        let (whole, lost): (Vec<usize>, Vec<usize>) = whole.partition(|&at| fits(&records[at]));
        matches.lost.extend(lost);
        let mut next = Self::new(self.rules, self.gpus.clone());
        next.epoch = records.iter().map(|record| record.epoch).fold(highest.epoch, u64::max);
        next.next_unit = records.iter().map(|record| record.unit.0).fold(highest.unit, u64::max);
        for gpu in &mut next.gpus {
            let ours = |index: &usize| matches.adopted.iter().any(|pair| pair.1 == *index);
            gpu.foreign = (0..listed.len())
                .filter(|index| !ours(index) && listed[*index].gpu == gpu.uuid)
                .map(|index| Foreign {
                    instance: listed[index].instance,
                    profile: Some(listed[index].profile),
                    placement: listed[index].placement,
                    compute_slices: listed[index].compute_slices,
                })
                .collect();
        }
        for at in matches.adopted.iter().map(|pair| pair.0).chain(whole) {
            next.take_over(&records[at], now)?;
        }
        for gpu in 0..next.gpus.len() {
            match next.state_of(gpu, &next.gpus[gpu]) {
                Ok(state) => next.gpus[gpu].state = state,
                // The list contradicts itself: other GPUs go on, this one gets nothing new.
                Err(_) => next.gpus[gpu].admin_state = AdminState::Quarantined,
            }
        }
        *self = next;
        Ok(matches)
    }

    /// Returns a VM to its unit of before the restart, regardless of the present rules.
    pub fn rejoin(&mut self, unit: UnitId, request: Request, idle: bool) -> Result<(), PlanError> {
        if self.homes.contains_key(&request.vm) {
            return Err(PlanError::AlreadyPlaced);
        }
        let vm = request.vm;
        self.unit_mut(unit)?.members.push(Member { request, idle });
        self.homes.insert(vm, unit);
        Ok(())
    }

    /// The highest epoch and unit used so far, for [`Self::adopt`].
    pub const fn highest(&self) -> Highest {
        Highest { epoch: self.epoch, unit: self.next_unit }
    }

    fn take_over(&mut self, record: &UnitRecord, now: Duration) -> Result<(), PlanError> {
        let Some(gpu) = self.gpus.iter().position(|gpu| gpu.uuid == record.gpu) else { return Ok(()) };
        let (memory_bytes, multiprocessors) = self.size(gpu, record.partition)?;
        self.epoch += 1;
        let phase = match record.phase {
            RecordPhase::Reserved => UnitPhase::Reserved,
            RecordPhase::Unproven => UnitPhase::Unproven,
            RecordPhase::Ready => UnitPhase::Ready,
            RecordPhase::Closing => UnitPhase::Closing(Destruction::new(now)),
            RecordPhase::Quarantined => UnitPhase::Closing(Destruction::quarantined()),
        };
        let unit = PlanUnit {
            id: record.unit,
            gpu,
            partition: record.partition,
            shared: record.shared,
            memory_bytes,
            multiprocessors,
            phase,
            admin_state: AdminState::Open,
            identity: record.identity.clone(),
            epoch: self.epoch,
            members: Vec::new(),
        };
        self.units.insert(record.unit, unit);
        Ok(())
    }
}

/// The highest numbers used so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Highest {
    /// The highest epoch.
    pub epoch: u64,
    /// The highest number of a unit.
    pub unit: u64,
}
