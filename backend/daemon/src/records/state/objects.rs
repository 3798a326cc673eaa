//! The objects that clients of the management API have made: VMs, organisations, projects, sizes.
//!
//! This is their form on disk. The form that clients see is separate, with its own version.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer, Serialize};
use sluice_api::{
    ByteSize,
    v1::{
        AntiAffinity, FencedBy, Isolation, MemoryShare, MemoryShareStored, Policy, Priority, Rules,
        RulesStored, TimeShare, TimeShareStored,
    },
};
use sluice_placement::{Highest, Request, UnitId, UnitRecord};

use crate::spec::VmSpec;

/// Limit of VMs of one owner, if no number is set.
const VMS_PER_OWNER: u32 = 16;

/// All objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Objects {
    pub(crate) vms: BTreeMap<String, VmObject>,
    pub(crate) organisations: BTreeMap<String, Ancestor>,
    pub(crate) projects: BTreeMap<String, Ancestor>,
    pub(crate) sizes: BTreeMap<String, SizeObject>,
    /// The placement of VMs on units.
    #[serde(default)]
    pub(crate) plan: Plan,
    /// Numbers of drained VMs.
    pub(crate) draining: BTreeSet<u32>,
    /// Those of `draining` that a tenant drained itself. Earlier versions did not write this.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) tenant_drains: BTreeSet<u32>,
    /// The number of the last VM.
    pub(crate) last_vm: u32,
    /// The number of the last organisation or project.
    pub(crate) last_ancestor: u32,
}

/// The placement of VMs on units, and the instances made for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// Units.
    pub(crate) records: Vec<UnitRecord>,
    /// The highest numbers ever given.
    pub(crate) highest: Highest,
    /// The numbers of the plan's units in the rest of the daemon.
    pub(crate) numbers: BTreeMap<u64, u32>,
    /// By VM.
    pub(crate) homes: BTreeMap<String, Home>,
    /// Drained GPUs.
    pub(crate) draining: BTreeSet<u32>,
    /// Drained instances, by the numbers of their units. Earlier versions did not write this.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) draining_units: BTreeSet<u32>,
}

/// The unit of a VM, and its request.
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
    #[serde(flatten, with = "MemoryShareStored")]
    pub(crate) share: MemoryShare,
    #[serde(rename = "shares", with = "TimeShareStored")]
    pub(crate) time: TimeShare,
    pub(crate) placement: PlacementSettings,
    #[serde(flatten, with = "RulesStored")]
    pub(crate) rules: Rules,
    pub(crate) guest_memory: Option<u64>,
    /// Bytes of the only arena of each of its sessions; `None` if arenas grow. Earlier versions did not write this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fixed_arena: Option<u64>,
    /// The user that created it. Earlier versions did not write this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<u32>,
}

/// The placement settings of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PlacementSettings {
    pub(crate) policy: Policy,
    #[serde(deserialize_with = "stored_isolation")]
    pub(crate) isolation: Isolation,
    pub(crate) gpu: Option<u32>,
    /// Ordinals of the whole GPUs that it has together. Older versions did not write this field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) gpus: Vec<u32>,
    pub(crate) start: Option<u8>,
    pub(crate) profile: Option<u32>,
    pub(crate) allow_larger: bool,
    pub(crate) multiprocessors: u32,
    /// Limit of VMs on its unit; 0 for any number.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) replicas: u32,
    pub(crate) numa_node: Option<u32>,
    #[serde(alias = "apart")]
    pub(crate) anti_affinity: Vec<AntiAffinity>,
}

/// An organisation or project.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ancestor {
    /// Its number in messages to arbiters.
    pub(crate) number: u32,
    /// The organisation of a project.
    pub(crate) organisation: Option<String>,
    pub(crate) memory: u64,
    pub(crate) vms: Option<u32>,
    /// Limits on the VM settings of its tenants. Earlier versions did not write this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limits: Option<TenantLimits>,
}

/// The settings of a VM of a size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SizeObject {
    pub(crate) memory: u64,
    #[serde(flatten, with = "MemoryShareStored")]
    pub(crate) share: MemoryShare,
    #[serde(rename = "shares", with = "TimeShareStored")]
    pub(crate) time: TimeShare,
    /// The kind of unit, if the size sets it. Earlier versions did not write these three.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) policy: Option<Policy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) profile: Option<u32>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) replicas: u32,
}

/// Reads an isolation, also by the word of an older version.
fn stored_isolation<'de, D: Deserializer<'de>>(stored: D) -> Result<Isolation, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum StoredIsolation {
        Shared,
        Strict,
        #[serde(alias = "strict-plus")]
        ExclusiveGpu,
    }
    Ok(match StoredIsolation::deserialize(stored)? {
        StoredIsolation::Shared => Isolation::Shared,
        StoredIsolation::Strict => Isolation::Strict,
        StoredIsolation::ExclusiveGpu => Isolation::ExclusiveGpu,
    })
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Limits that an operator sets on an organisation or project, for its tenants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TenantLimits {
    /// The sizes that a VM may have, whose figures then apply exactly. `None`: any memory, within these limits.
    pub(crate) sizes: Option<BTreeSet<String>>,
    pub(crate) weight: u32,
    pub(crate) priority: Priority,
    /// 0: a VM needs no cap.
    pub(crate) cap_permille: u32,
    pub(crate) guarantee_permille: u32,
    #[serde(deserialize_with = "stored_isolation")]
    pub(crate) isolation: Isolation,
    pub(crate) headroom: u64,
    /// 0: a VM needs no limit.
    pub(crate) pinned: u64,
    /// The shortest time after which a VM may be readmitted without an operator; 0: a tenant may not set one.
    pub(crate) readmit_after: u32,
    /// True if tenants may choose GPU, slice, profile, multiprocessors and NUMA node.
    pub(crate) unit_choice: bool,
    pub(crate) vms_per_owner: u32,
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            sizes: None,
            weight: TimeShare::default().weight,
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
    /// Converts the state of an older version: names of VMs become those on their host, where organisations shared one namespace,
    /// and drains of VMs of the configuration file end.
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
        // Drains of VMs that a configuration file defined: the next VM of their number must not be born drained.
        let numbers: BTreeSet<u32> = self.vms.values().map(|vm| vm.number).collect();
        self.draining.retain(|number| numbers.contains(number));
        self.tenant_drains.retain(|number| numbers.contains(number));
        self
    }

    /// True if there are no objects, and never were.
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

    /// The authority that is needed to readmit a drained VM.
    pub(crate) fn drained_by(&self, number: u32) -> FencedBy {
        match self.draining.contains(&number) && !self.tenant_drains.contains(&number) {
            true => FencedBy::Operator,
            false => FencedBy::Tenant,
        }
    }
}

impl SizeObject {
    /// A VM with the settings of the size and no others.
    pub(crate) fn vm(&self) -> VmObject {
        VmObject {
            memory: self.memory,
            share: self.share,
            time: self.time,
            placement: PlacementSettings {
                policy: self.policy.unwrap_or_default(),
                profile: self.profile,
                replicas: self.replicas,
                ..PlacementSettings::default()
            },
            ..VmObject::default()
        }
    }
}

/// The name of a VM on its host, from its client's name: `organisation/name`. A VM of a project without an organisation is
/// `project:project/name`, and one of neither has its name alone.
pub(crate) fn host_name(organisation: Option<&str>, project: Option<&str>, name: &str) -> String {
    match (organisation, project) {
        (Some(organisation), _) => format!("{organisation}/{name}"),
        (None, Some(project)) => format!("project:{project}/{name}"),
        (None, None) => name.to_owned(),
    }
}

/// The client's name of a VM, from its name on its host.
pub(crate) fn short_name(host_name: &str) -> &str {
    host_name.rsplit_once('/').map_or(host_name, |(_, name)| name)
}

impl VmObject {
    /// Bytes that no other VM gets, on all its units together: guaranteed memory and headroom.
    pub(crate) fn promised(&self) -> u64 {
        let units = u64::try_from(self.placement.gpus.len().max(1)).unwrap_or(u64::MAX);
        self.share.guaranteed_bytes.saturating_add(self.share.headroom_bytes).saturating_mul(units)
    }

    /// The name on the host of the VM `name` of the same organisation.
    pub(crate) fn host_name(&self, name: &str) -> String {
        host_name(self.organisation.as_deref(), self.project.as_deref(), name)
    }

    /// The specification for units and launcher, without the numbers of project and organisation.
    pub(crate) fn spec(&self) -> VmSpec {
        VmSpec {
            id: self.number,
            direct: self.direct,
            scanouts: self.scanouts,
            fixed_arena: self.fixed_arena,
            memory: ByteSize(self.memory),
            share: self.share,
            time: self.time,
            rules: self.rules,
            created: self.created,
            ..VmSpec::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// True if a value has all fields of another, with their values.
    fn has(whole: &Value, part: &Value) -> bool {
        match (whole, part) {
            (Value::Object(whole), Value::Object(part)) => {
                part.iter().all(|(name, part)| whole.get(name).is_some_and(|whole| has(whole, part)))
            }
            _ => whole == part,
        }
    }

    // Promise: A2
    #[test]
    fn settings_keep_their_names_in_the_state_file() {
        let shares =
            json!({ "weight": 300, "priority": "high", "cap_permille": 500, "guarantee_permille": 250 });
        let size = json!({ "memory": 8, "guaranteed": 4, "headroom": 2, "pinned": 1, "shares": shares });
        let mut vm = json!({
            "number": 7, "created": 5, "organisation": "acme", "project": null, "scanouts": 1, "direct": false, "size": "small",
            "placement": PlacementSettings::default(), "readmit_after": 9, "hang_after": 3, "guest_memory": null
        });
        for (name, value) in size.as_object().expect("an object") {
            vm[name] = value.clone();
        }
        let read: VmObject = serde_json::from_value(vm.clone()).expect("a VM");
        assert_eq!((read.share.headroom_bytes, read.time.weight, read.rules.hang_after_seconds), (2, 300, 3));
        assert!(has(&serde_json::to_value(&read).expect("written"), &vm), "{read:?}");
        assert_eq!(read.fixed_arena, None, "arenas of a VM of an older state grow");
        let read: SizeObject = serde_json::from_value(size.clone()).expect("a size");
        assert!(has(&serde_json::to_value(read).expect("written"), &size), "{read:?}");
        for unknown in ["headroom_bytes", "colour"] {
            let mut other = vm.clone();
            other[unknown] = 1.into();
            assert!(serde_json::from_value::<VmObject>(other).is_err(), "{unknown} was ignored");
        }
        vm["shares"]["colour"] = 1.into();
        assert!(serde_json::from_value::<VmObject>(vm).is_err(), "an unknown share was ignored");
    }

    // Promise: A41
    #[test]
    fn plan_and_vms_of_an_older_state_are_read_under_their_old_names() {
        let request = json!({
            "vm": 7, "organisation": null, "policy": "any", "strictness": "shared", "quota_bytes": 1, "overhead_bytes": 0,
            "multiprocessors": 0, "profile": null, "allow_larger": false, "class": { "guaranteed": { "permille": 0 } }, "weight": 100,
            "apart": [{ "from": { "group": 3 }, "never": true }], "numa": null, "pin": null
        });
        let home: Home = serde_json::from_value(json!({ "unit": 1, "request": request })).expect("a home");
        assert_eq!(home.request.anti_affinity.len(), 1);
        let mut placement = serde_json::to_value(PlacementSettings::default()).expect("written");
        let fields = placement.as_object_mut().expect("an object");
        let rules = fields.remove("anti_affinity").expect("the rules");
        fields.insert("apart".to_owned(), rules);
        fields.insert("isolation".to_owned(), "strict-plus".into());
        let placement: PlacementSettings = serde_json::from_value(placement).expect("a placement");
        assert_eq!(placement.isolation, Isolation::ExclusiveGpu);
    }

    // Promise: A41
    #[test]
    fn names_of_an_older_state_get_their_organisations() {
        let vm = |organisation: Option<&str>, project: Option<&str>| VmObject {
            organisation: organisation.map(str::to_owned),
            project: project.map(str::to_owned),
            ..VmObject::default()
        };
        let mut old = Objects { draining: [99].into(), ..Objects::default() };
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
        assert!(new.draining.is_empty(), "no VM has the number 99");
        let names = ["acme/a", "acme/b", "d", "project:web/c"];
        assert_eq!(new.vms.keys().collect::<Vec<_>>(), names);
        assert_eq!(new.plan.homes.keys().collect::<Vec<_>>(), names);
        assert_eq!(new.clone().scoped(), new, "the next daemon changes nothing");
        assert_eq!(names.map(short_name), ["a", "b", "d", "c"]);
    }
}
