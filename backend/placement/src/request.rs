//! The request of a VM: the permitted sharing of its unit, the resources it needs of it, and the VMs it keeps away from.

use serde::{Deserialize, Serialize};

use crate::geometry::Need;

/// Most neighbours and groups that one VM can name.
pub const MAX_APART: usize = 64;

/// A VM, by a number that its owner gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VmId(pub u64);

/// Which kind of unit a VM may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// A MIG instance of its own.
    Mig,
    /// A unit shared in time: a whole GPU, or a MIG instance.
    TimeSlice,
    /// Either.
    #[default]
    Any,
}

/// How much isolation a VM insists on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strictness {
    /// It may share a unit, as its policy says.
    #[default]
    Shared,
    /// A unit of its own, which is never shared.
    Unit,
    /// A GPU of its own: no neighbour on any other instance of it.
    Gpu,
}

/// What a VM's share of a shared unit is worth when the unit is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// All its memory, and its part of the time, are there at any moment.
    Guaranteed {
        /// Thousandths of the unit's time.
        permille: u16,
    },
    /// It takes what is free, beyond a floor.
    Burstable {
        /// Bytes of its quota that are there at any moment.
        floor_bytes: u64,
    },
}

/// Whom a VM keeps away from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Whom {
    /// One VM. It need not name this one in turn.
    Vm(VmId),
    /// All members of a group, to which the VM hereby belongs.
    Group(u64),
}

/// A distance on GPUs: not the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Apart {
    /// From whom.
    pub from: Whom,
    /// Whether to be refused rather than placed beside them. Of two that disagree, the stricter counts.
    pub never: bool,
}

/// A position that the operator chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Index of the GPU.
    pub gpu: usize,
    /// First memory slice, or nothing for the best.
    pub start: Option<u8>,
}

/// A VM's wish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Whose.
    pub vm: VmId,
    /// The organisation of the VM, by a number that its owner gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub organisation: Option<u64>,
    /// Kind of unit.
    pub policy: Policy,
    /// Isolation.
    pub strictness: Strictness,
    /// Its memory quota.
    pub quota_bytes: u64,
    /// What the unit needs beside the quota to serve it: contexts of the driver, headroom.
    pub overhead_bytes: u64,
    /// Least multiprocessors of its unit; 0 for any.
    pub multiprocessors: u32,
    /// Most VMs that share its unit, itself included; 0 for any.
    #[serde(default)]
    pub replicas: u32,
    /// A MIG profile by the driver's number, if not just any that is large enough.
    pub profile: Option<u32>,
    /// Whether a larger instance is better than none.
    pub allow_larger: bool,
    /// Guaranteed or burstable.
    pub class: Class,
    /// Weight of its share of the time.
    pub weight: u32,
    /// Whom it keeps away from.
    pub apart: Vec<Apart>,
    /// The NUMA node of its processors; a GPU there is preferred.
    pub numa: Option<u32>,
    /// Where it must be.
    pub pin: Option<Pin>,
}

impl Request {
    /// The request of a VM that wants so much memory, and has no other wish.
    pub fn new(vm: VmId, quota_bytes: u64) -> Self {
        Self {
            vm,
            organisation: None,
            policy: Policy::Any,
            strictness: Strictness::Shared,
            quota_bytes,
            overhead_bytes: 0,
            multiprocessors: 0,
            replicas: 0,
            profile: None,
            allow_larger: false,
            class: Class::Burstable { floor_bytes: 0 },
            weight: 1,
            apart: Vec::new(),
            numa: None,
            pin: None,
        }
    }

    /// Memory of the smallest unit that serves it.
    pub fn memory_bytes(&self) -> u64 {
        self.quota_bytes.saturating_add(self.overhead_bytes)
    }

    /// Memory that its unit must have for it at any moment.
    pub fn firm_bytes(&self) -> u64 {
        match self.class {
            Class::Guaranteed { .. } => self.memory_bytes(),
            Class::Burstable { floor_bytes } => {
                floor_bytes.min(self.quota_bytes).saturating_add(self.overhead_bytes)
            }
        }
    }

    /// Thousandths of the unit's time that must be there for it.
    pub fn firm_permille(&self) -> u16 {
        match self.class {
            Class::Guaranteed { permille } => permille,
            Class::Burstable { .. } => 0,
        }
    }

    /// What it needs of a MIG instance.
    pub fn need(&self) -> Need {
        self.profile.map_or(
            Need::Size { memory_bytes: self.memory_bytes(), multiprocessors: self.multiprocessors },
            Need::Profile,
        )
    }

    /// Whether the two must not, or had better not, be on one GPU.
    pub(crate) fn distance(&self, other: &Self) -> Distance {
        let named = |one: &Self, two: &Self| {
            one.apart
                .iter()
                .filter(|apart| match apart.from {
                    Whom::Vm(vm) => vm == two.vm,
                    Whom::Group(_) => two.apart.iter().any(|theirs| theirs.from == apart.from),
                })
                .map(|apart| if apart.never { Distance::Never } else { Distance::Prefer })
                .max()
        };
        named(self, other).max(named(other, self)).unwrap_or(Distance::Any)
    }
}

/// How two VMs stand to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    /// They do not mind.
    Any,
    /// Better on different GPUs.
    Prefer,
    /// Never on one GPU.
    Never,
}
