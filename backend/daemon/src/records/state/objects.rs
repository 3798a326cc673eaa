//! The objects that clients of the management API have made: VMs, organisations, projects, sizes.
//!
//! This is their form on disk. The form that clients see is another one, with a version of its own.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sluice_api::{
    ByteSize, VmSpec,
    v1::{Apart, FencedBy, Isolation, Policy, Priority},
};
use sluice_placement::{Highest, Record, Request, UnitId};

use crate::{configuration::Configuration, spec};

/// VMs of one owner, where no number is set.
const VMS_PER_OWNER: u32 = 16;

/// All of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Objects {
    pub(crate) vms: BTreeMap<String, VmObject>,
    pub(crate) organisations: BTreeMap<String, Ancestor>,
    pub(crate) projects: BTreeMap<String, Ancestor>,
    pub(crate) sizes: BTreeMap<String, SizeObject>,
    /// Which VM is on which unit.
    #[serde(default)]
    pub(crate) plan: Plan,
    /// Numbers of VMs that begin no session.
    pub(crate) draining: BTreeSet<u32>,
    /// Of these, the ones that a tenant drained itself. Versions before it did not write this.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) tenant_drains: BTreeSet<u32>,
    /// The number that the last VM got.
    pub(crate) last_vm: u32,
    /// The number that the last organisation or project got.
    pub(crate) last_ancestor: u32,
}

/// Which VM is on which unit, and what was made for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// Units.
    pub(crate) records: Vec<Record>,
    /// The highest numbers ever given.
    pub(crate) highest: Highest,
    /// What units of the plan are called everywhere else.
    pub(crate) numbers: BTreeMap<u64, u32>,
    /// By VM.
    pub(crate) homes: BTreeMap<String, Home>,
    /// GPUs that are being emptied.
    pub(crate) draining: BTreeSet<u32>,
    /// Instances that are being emptied, by the numbers of their units. Versions before it knew no such thing.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) draining_units: BTreeSet<u32>,
}

/// Where a VM is, and what it had asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Home {
    pub(crate) unit: UnitId,
    pub(crate) request: Request,
}

/// A VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmObject {
    pub(crate) number: u32,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) organisation: Option<String>,
    pub(crate) project: Option<String>,
    pub(crate) scanouts: u8,
    pub(crate) direct: bool,
    pub(crate) size: Option<String>,
    pub(crate) memory: u64,
    pub(crate) guaranteed: u64,
    pub(crate) headroom: u64,
    pub(crate) pinned: u64,
    pub(crate) shares: Shares,
    pub(crate) placement: Placement,
    pub(crate) readmit_after: u32,
    pub(crate) hang_after: u32,
    pub(crate) guest_memory: Option<u64>,
    /// The user that made it. Versions before it did not write this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<u32>,
}

/// What a VM has of GPU time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shares {
    pub(crate) weight: u32,
    pub(crate) priority: Priority,
    pub(crate) cap_permille: u32,
    pub(crate) guarantee_permille: u32,
}

impl Default for Shares {
    fn default() -> Self {
        Self { weight: 100, priority: Priority::Normal, cap_permille: 0, guarantee_permille: 0 }
    }
}

/// Where a VM may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Placement {
    pub(crate) policy: Policy,
    pub(crate) isolation: Isolation,
    pub(crate) gpu: Option<u32>,
    pub(crate) start: Option<u8>,
    pub(crate) profile: Option<u32>,
    pub(crate) allow_larger: bool,
    pub(crate) multiprocessors: u32,
    /// The most VMs on its unit; 0 for any number.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) replicas: u32,
    pub(crate) numa_node: Option<u32>,
    pub(crate) apart: Vec<Apart>,
}

/// An organisation or project.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ancestor {
    /// What arbiters know it by.
    pub(crate) number: u32,
    /// Of a project.
    pub(crate) organisation: Option<String>,
    pub(crate) memory: u64,
    pub(crate) vms: Option<u32>,
    /// What its tenants may set of their VMs. Versions before it did not write this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limits: Option<Limits>,
}

/// What a VM of a size has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SizeObject {
    pub(crate) memory: u64,
    pub(crate) guaranteed: u64,
    pub(crate) headroom: u64,
    pub(crate) pinned: u64,
    pub(crate) shares: Shares,
    /// The kind of unit, if the size says it. Versions before it did not write these three.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) policy: Option<Policy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) profile: Option<u32>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) replicas: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Limits that an operator sets on an organisation or project, for its tenants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Limits {
    /// The sizes that a VM may have, whose figures then hold exactly. `None`: any memory, within these limits.
    pub(crate) sizes: Option<BTreeSet<String>>,
    pub(crate) weight: u32,
    pub(crate) priority: Priority,
    /// 0: a VM needs no cap.
    pub(crate) cap_permille: u32,
    pub(crate) guarantee_permille: u32,
    pub(crate) isolation: Isolation,
    pub(crate) headroom: u64,
    /// 0: a VM needs no limit.
    pub(crate) pinned: u64,
    /// The shortest time after which a VM may be readmitted without an operator; 0: a tenant may not set one.
    pub(crate) readmit_after: u32,
    /// Whether tenants choose GPU, slice, profile, multiprocessors and NUMA node.
    pub(crate) unit_choice: bool,
    pub(crate) vms_per_owner: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sizes: None,
            weight: Shares::default().weight,
            priority: Priority::Normal,
            cap_permille: 0,
            guarantee_permille: 0,
            isolation: Isolation::Shared,
            headroom: 0,
            pinned: 0,
            readmit_after: 0,
            unit_choice: false,
            vms_per_owner: VMS_PER_OWNER,
        }
    }
}

impl Objects {
    /// The VMs, projects and organisations of the configuration file. Their names are numbers.
    pub(crate) fn configured(configuration: &Configuration) -> Objects {
        let name = |number: u32| (number > 0).then(|| number.to_string());
        let mut objects = Objects::default();
        for vm in &configuration.vms {
            let object = VmObject {
                number: vm.id,
                organisation: name(vm.organisation),
                project: name(vm.project),
                scanouts: vm.scanouts,
                direct: vm.direct,
                memory: vm.memory.0,
                guaranteed: vm.guaranteed.0,
                headroom: vm.headroom.0,
                pinned: vm.pinned.0,
                readmit_after: vm.readmit_after,
                hang_after: vm.hang_after,
                shares: Shares {
                    weight: spec::shares(vm).weight,
                    priority: vm.priority,
                    cap_permille: vm.cap,
                    guarantee_permille: vm.guarantee,
                },
                ..VmObject::default()
            };
            objects.vms.insert(vm.id.to_string(), object);
        }
        for ancestor in &configuration.ancestors {
            let object = Ancestor {
                number: ancestor.id,
                organisation: name(ancestor.organisation),
                memory: ancestor.memory.0,
                vms: None,
                limits: None,
            };
            let all = if ancestor.is_project { &mut objects.projects } else { &mut objects.organisations };
            all.insert(ancestor.id.to_string(), object);
        }
        objects
    }

    /// Gives VMs the names that they have on their host, where a version wrote them that knew one name for all organisations.
    pub(crate) fn scoped(mut self) -> Self {
        let renamed: BTreeMap<String, String> = self
            .vms
            .iter()
            .filter(|(name, _)| !name.contains('/'))
            .map(|(name, vm)| (name.clone(), vm.host_name(name)))
            .collect();
        let new = |name: String| renamed.get(&name).cloned().unwrap_or(name);
        self.vms = self.vms.into_iter().map(|(name, vm)| (new(name), vm)).collect();
        self.plan.homes = self.plan.homes.into_iter().map(|(name, home)| (new(name), home)).collect();
        self
    }

    /// Whether there are none, and never were.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { vms, organisations, projects, sizes, plan, draining, .. } = self;
        vms.is_empty()
            && organisations.is_empty()
            && projects.is_empty()
            && sizes.is_empty()
            && draining.is_empty()
            && plan.records.is_empty()
            && plan.draining.is_empty()
    }

    /// The authority that it takes to let a VM begin sessions again, as far as it is drained.
    pub(crate) fn drained_by(&self, number: u32) -> FencedBy {
        match self.draining.contains(&number) && !self.tenant_drains.contains(&number) {
            true => FencedBy::Operator,
            false => FencedBy::Tenant,
        }
    }
}

impl SizeObject {
    /// A VM that has what the size gives and nothing else.
    pub(crate) fn vm(&self) -> VmObject {
        VmObject {
            memory: self.memory,
            guaranteed: self.guaranteed,
            headroom: self.headroom,
            pinned: self.pinned,
            shares: self.shares,
            placement: Placement {
                policy: self.policy.unwrap_or_default(),
                profile: self.profile,
                replicas: self.replicas,
                ..Placement::default()
            },
            ..VmObject::default()
        }
    }
}

/// The name of a VM on its host, of the name that its client gave: `organisation/name`. A VM of a project without an
/// organisation is `project:project/name`, and one of neither has its name alone.
pub(crate) fn host_name(organisation: Option<&str>, project: Option<&str>, name: &str) -> String {
    match (organisation, project) {
        (Some(organisation), _) => format!("{organisation}/{name}"),
        (None, Some(project)) => format!("project:{project}/{name}"),
        (None, None) => name.to_owned(),
    }
}

/// The name that its client gave a VM, of its name on its host.
pub(crate) fn short_name(host_name: &str) -> &str {
    host_name.rsplit_once('/').map_or(host_name, |(_, name)| name)
}

impl VmObject {
    /// The name on its host of a VM that is called `name` where this one is.
    pub(crate) fn host_name(&self, name: &str) -> String {
        host_name(self.organisation.as_deref(), self.project.as_deref(), name)
    }

    /// As units and launcher know it, but for the numbers of project and organisation.
    pub(crate) fn spec(&self) -> VmSpec {
        VmSpec {
            id: self.number,
            direct: self.direct,
            scanouts: self.scanouts,
            memory: ByteSize(self.memory),
            guaranteed: ByteSize(self.guaranteed),
            headroom: ByteSize(self.headroom),
            pinned: ByteSize(self.pinned),
            readmit_after: self.readmit_after,
            weight: self.shares.weight,
            priority: self.shares.priority,
            cap: self.shares.cap_permille,
            guarantee: self.shares.guarantee_permille,
            hang_after: self.hang_after,
            created: self.created,
            ..VmSpec::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: A41
    #[test]
    fn names_of_an_older_state_get_their_organisations() {
        let vm = |organisation: Option<&str>, project: Option<&str>| VmObject {
            organisation: organisation.map(str::to_owned),
            project: project.map(str::to_owned),
            ..VmObject::default()
        };
        let mut old = Objects::default();
        for (name, object) in [
            ("a", vm(Some("acme"), None)),
            ("b", vm(Some("acme"), Some("web"))),
            ("c", vm(None, Some("web"))),
            ("d", vm(None, None)),
        ] {
            let request = Request::new(sluice_placement::VmId(7), 1);
            old.plan.homes.insert(name.to_owned(), Home { unit: UnitId(1), request });
            old.vms.insert(name.to_owned(), object);
        }
        let text = serde_json::to_string(&old).expect("written");
        let read: Objects = serde_json::from_str(&text).expect("read");
        let new = read.scoped();
        let names = ["acme/a", "acme/b", "d", "project:web/c"];
        assert_eq!(new.vms.keys().collect::<Vec<_>>(), names);
        assert_eq!(new.plan.homes.keys().collect::<Vec<_>>(), names);
        assert_eq!(new.clone().scoped(), new, "the next daemon changes nothing");
        assert_eq!(names.map(short_name), ["a", "b", "d", "c"]);
    }
}
