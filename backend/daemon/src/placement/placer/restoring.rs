//! The plan in the state file, and its restoration by the next daemon.

use super::{Placer, anti_affinity, list, member_name, organisation_id, vm_id};
use crate::placement::survey::FoundDevice;
use std::{collections::BTreeSet, io, rc::Rc};

use sluice_messages::inventory::Instance;
use sluice_placement::{AdminState, Foreign, ListedInstance, Request, UnitId, UnitPhase};
use tokio::task::spawn_local;

use crate::records::state::objects::{Home, Plan};

impl Placer {
    /// The plan, in the form that is stored.
    pub(crate) fn plan(&self) -> Plan {
        let fleet = self.fleet.borrow();
        let names = self.names.borrow();
        let members = fleet
            .units()
            .flat_map(|unit| unit.members().iter().map(move |member| (unit.id, &member.request)))
            .filter_map(|(unit, request)| {
                let name = member_name(names.get(&request.vm)?, request);
                Some((name, Home { unit, request: request.clone() }))
            });
        Plan {
            records: fleet.records(),
            highest: fleet.highest(),
            numbers: self.numbers.borrow().iter().map(|(unit, number)| (unit.0, *number)).collect(),
            homes: members.collect(),
            draining: self.draining.borrow().clone(),
            draining_units: self.draining_units.borrow().clone(),
        }
    }

    /// Writes the plan to disk, as it is when its turn comes.
    pub(crate) async fn write(&self) -> io::Result<()> {
        self.parts.checkpoint.change_objects(|objects| objects.plan = self.plan()).await
    }

    pub(super) async fn write_or_log(self: Rc<Self>) {
        if let Err(error) = self.write().await {
            tracing::error!(%error, "cannot write the plan");
        }
        self.tidying.set(false);
    }

    /// Adopts the plan that an earlier daemon stored, as far as its instances still exist.
    pub(crate) async fn adopt(self: &Rc<Self>) {
        let plan = self.parts.checkpoint.objects().plan.clone();
        let mut listed = Vec::new();
        let mut unknown = Vec::new();
        let all = self.found();
        for (at, found) in all.iter().enumerate().filter(|(_, found)| !found.is_whole()) {
            let Some(inventory) = &self.parts.inventory else { continue };
            match inventory.instances(found.ordinal).await {
                Ok(instances) => listed.extend(instances.iter().map(|instance| (found, *instance))),
                Err(error) => {
                    tracing::error!(gpu = found.ordinal, %error, "cannot list the instances of the GPU");
                    unknown.push(at);
                }
            }
        }
        let entries: Vec<ListedInstance> =
            listed.iter().map(|(found, instance)| list(found, instance)).collect();
        let now = self.now();
        let matches = self.fleet.borrow_mut().adopt(&plan.records, &entries, plan.highest, now);
        let matches = match matches {
            Ok(matches) => matches,
            Err(error) => {
                tracing::error!(%error, "cannot adopt the stored plan");
                unknown.extend((0..all.len()).filter(|at| !all[*at].is_whole()));
                sluice_placement::Matches::default()
            }
        };
        for at in unknown {
            _ = self.fleet.borrow_mut().set_gpu_admin_state(at, AdminState::Quarantined);
        }
        for (_, index) in matches.unconfirmed {
            self.forget_unconfirmed(listed[index].0, &listed[index].1).await;
        }
        {
            let fleet = self.fleet.borrow();
            let known = plan.numbers.iter().map(|(unit, number)| (UnitId(*unit), *number));
            *self.numbers.borrow_mut() = known.filter(|(unit, _)| fleet.unit(*unit).is_some()).collect();
        }
        *self.draining.borrow_mut() = plan.draining;
        // The number of a drained unit that is gone may have been given to another.
        let numbers: BTreeSet<u32> = self.numbers.borrow().values().copied().collect();
        *self.draining_units.borrow_mut() =
            plan.draining_units.into_iter().filter(|number| numbers.contains(number)).collect();
        for (member, Home { unit, request }) in plan.homes {
            let name = member.split_once('#').map_or(&member[..], |(name, _)| name).to_owned();
            let Some(vm) = self.parts.checkpoint.objects().vms.get(&name).cloned() else { continue };
            let (anti_affinity, organisation) = (anti_affinity(&vm), organisation_id(&vm));
            // An older version derived the numbers of VMs and groups from names without an organisation.
            let part_of = request.part_of.map(|_| vm_id(&name));
            let unlimited = vm.memory == 0;
            let request =
                Request { vm: vm_id(&member), part_of, organisation, anti_affinity, unlimited, ..request };
            let vm = request.vm;
            if self.fleet.borrow_mut().rejoin(unit, request, true).is_ok() {
                self.names.borrow_mut().insert(vm, name);
            }
        }
        for (record, index) in matches.adopted {
            let (unit, (found, instance)) = (plan.records[record].unit, &listed[index]);
            let closing = {
                let fleet = self.fleet.borrow();
                fleet.unit(unit).is_none_or(|unit| matches!(unit.phase, UnitPhase::Closing(_)))
            };
            if closing {
                spawn_local(Rc::clone(self).close(unit));
            } else if let Some(number) = self.numbers.borrow().get(&unit) {
                self.add_unit(*number, found, instance);
            }
        }
        self.look_around();
        self.tidy();
    }

    /// Destroys an instance whose daemon was killed before it recorded the creation: the instance is at the very place held for
    /// it, and no client was told of it.
    pub(super) async fn forget_unconfirmed(&self, found: &FoundDevice, instance: &Instance) {
        let Some(inventory) = &self.parts.inventory else { return };
        if let Err(error) = inventory.destroy(found.ordinal, instance).await {
            tracing::warn!(gpu = found.ordinal, %error, "cannot destroy an unrecorded instance");
            return;
        }
        let mut fleet = self.fleet.borrow_mut();
        let Some(at) = fleet.gpus().iter().position(|gpu| gpu.uuid == found.uuid) else { return };
        let left: Vec<Foreign> = fleet.gpus()[at]
            .foreign()
            .iter()
            .filter(|foreign| foreign.instance != instance.gpu)
            .copied()
            .collect();
        if let Err(error) = fleet.set_foreign(at, left) {
            tracing::error!(gpu = found.ordinal, %error, "cannot remove an instance from the plan");
        }
    }
}
