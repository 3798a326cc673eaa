//! The request of a VM: the permitted sharing of its unit, its needs, and the VMs it keeps away from.

use serde::{Deserialize, Serialize};

use crate::geometry::Need;

/// Maximum number of neighbours and groups that one VM can name.
pub const MAX_ANTI_AFFINITY: usize = 64;

/// A VM, by a number that its owner gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VmId(pub u64);

/// The kind of unit that a VM may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// A MIG instance of its own.
    Mig,
    /// A unit shared in time: a whole GPU, or a MIG instance.
    TimeSlice,
    /// Either kind.
    #[default]
    Any,
}

/// The isolation that a VM requires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strictness {
    /// It may share a unit, as its policy permits.
    #[default]
    Shared,
    /// A unit of its own, which is never shared.
    Unit,
    /// A GPU of its own: no neighbour on any other instance of it.
    Gpu,
}

/// The guarantee of a VM's share when a shared unit is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// All its memory, and its part of the time, are available at any moment.
    Guaranteed {
        /// Thousandths of the unit's time.
        permille: u16,
    },
    /// It uses free resources, beyond a floor.
    Burstable {
        /// Bytes of its quota that are available at any moment.
        floor_bytes: u64,
    },
}

/// The target of an anti-affinity rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AffinityTarget {
    /// One VM. It need not name this one in turn.
    Vm(VmId),
    /// All members of a group, which the VM joins by this rule.
    Group(u64),
}

/// An anti-affinity rule: not on the same GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AntiAffinity {
    /// The VM or group to keep away from.
    pub from: AffinityTarget,
    /// True to be refused rather than placed beside them. If two rules disagree, the stricter counts.
    pub never: bool,
}

/// A position that the operator chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Index of the GPU.
    pub gpu: usize,
    /// First memory slice; `None` for the best.
    pub start: Option<u8>,
}

/// The request of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The VM.
    pub vm: VmId,
    /// The organisation of the VM, by a number that its owner gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub organisation: Option<u64>,
    /// Permitted kind of unit.
    pub policy: Policy,
    /// Required isolation.
    pub strictness: Strictness,
    /// Its memory quota.
    pub quota_bytes: u64,
    /// True if the quota is only the guaranteed memory, and the VM may take all memory of its unit.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unlimited: bool,
    /// Memory that serving the VM needs beside the quota: contexts of the driver, headroom.
    pub overhead_bytes: u64,
    /// Minimum number of multiprocessors of its unit; 0 for any.
    pub multiprocessors: u32,
    /// Maximum number of VMs that share its unit, itself included; 0 for any.
    #[serde(default)]
    pub replicas: u32,
    /// A MIG profile by the driver's number; `None` for any that is large enough.
    pub profile: Option<u32>,
    /// True if a larger instance is acceptable.
    pub allow_larger: bool,
    /// Guaranteed or burstable.
    pub class: Class,
    /// Weight of its share of the time.
    pub weight: u32,
    /// Its anti-affinity rules.
    #[serde(alias = "apart")]
    pub anti_affinity: Vec<AntiAffinity>,
    /// The NUMA node of its processors; a GPU there is preferred.
    pub numa: Option<u32>,
    /// The position that the operator chose.
    pub pin: Option<Pin>,
    /// The VM, if this request is for a further GPU of that VM; rules about the VM then hold for this request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<VmId>,
}

impl Request {
    /// The request of a VM for so much memory, with defaults for the rest.
    pub fn new(vm: VmId, quota_bytes: u64) -> Self {
        Self {
            vm,
            organisation: None,
            policy: Policy::Any,
            strictness: Strictness::Shared,
            quota_bytes,
            unlimited: false,
            overhead_bytes: 0,
            multiprocessors: 0,
            replicas: 0,
            profile: None,
            allow_larger: false,
            class: Class::Burstable { floor_bytes: 0 },
            weight: 1,
            anti_affinity: Vec::new(),
            numa: None,
            pin: None,
            part_of: None,
        }
    }

    /// Memory of the smallest unit that can serve it.
    pub fn memory_bytes(&self) -> u64 {
        self.quota_bytes.saturating_add(self.overhead_bytes)
    }

    /// Memory that its unit must have available for it at any moment.
    pub fn firm_bytes(&self) -> u64 {
        match self.class {
            Class::Guaranteed { .. } => self.memory_bytes(),
            Class::Burstable { floor_bytes } => {
                floor_bytes.min(self.quota_bytes).saturating_add(self.overhead_bytes)
            }
        }
    }

    /// Thousandths of the unit's time that must be available to it.
    pub fn firm_permille(&self) -> u16 {
        match self.class {
            Class::Guaranteed { permille } => permille,
            Class::Burstable { .. } => 0,
        }
    }

    /// True if the quotas of both hold on one unit: a VM without a quota may take all memory, and so that of another organisation.
    pub(crate) fn promises_beside(&self, other: &Self) -> bool {
        self.unlimited == other.unlimited || self.organisation == other.organisation
    }

    /// Its need for a MIG instance.
    pub fn need(&self) -> Need {
        self.profile.map_or(
            Need::Size { memory_bytes: self.memory_bytes(), multiprocessors: self.multiprocessors },
            Need::Profile,
        )
    }

    /// The rule between the two about sharing a GPU.
    pub(crate) fn distance(&self, other: &Self) -> Distance {
        let named = |one: &Self, two: &Self| {
            one.anti_affinity
                .iter()
                .filter(|anti_affinity| match anti_affinity.from {
                    AffinityTarget::Vm(vm) => vm == two.part_of.unwrap_or(two.vm),
                    AffinityTarget::Group(_) => {
                        two.anti_affinity.iter().any(|theirs| theirs.from == anti_affinity.from)
                    }
                })
                .map(|anti_affinity| if anti_affinity.never { Distance::Never } else { Distance::Prefer })
                .max()
        };
        named(self, other).max(named(other, self)).unwrap_or(Distance::Any)
    }
}

/// The rule between two VMs about sharing a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    /// No rule.
    Any,
    /// Better on different GPUs.
    Prefer,
    /// Never on one GPU.
    Never,
}
