//! The kinds of children.

use crate::cgroup::{Family, Member};

/// The kind of a child, and its VM or unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChildRole {
    Device(u32),
    Worker(u32),
    Arbiter(u32),
    Probe(u32),
    Inventory,
}

impl std::fmt::Display for ChildRole {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ChildRole::Device(vm) => write!(formatter, "the device of VM {vm}"),
            ChildRole::Worker(vm) => write!(formatter, "a worker of VM {vm}"),
            ChildRole::Arbiter(unit) => write!(formatter, "the arbiter of unit {unit}"),
            ChildRole::Probe(unit) => write!(formatter, "a probe of unit {unit}"),
            ChildRole::Inventory => formatter.write_str("the inventory"),
        }
    }
}

impl ChildRole {
    /// The prefix of its log lines.
    pub(super) fn label(self, process: u32) -> String {
        match self {
            ChildRole::Device(vm) => format!("device vm={vm} pid={process}"),
            ChildRole::Worker(vm) => format!("worker vm={vm} pid={process}"),
            ChildRole::Arbiter(unit) => format!("arbiter unit={unit} pid={process}"),
            ChildRole::Probe(unit) => format!("probe unit={unit} pid={process}"),
            ChildRole::Inventory => format!("inventory pid={process}"),
        }
    }

    /// The cgroup in which it is.
    pub(super) const fn cgroup(self) -> (Family, Member) {
        match self {
            ChildRole::Device(vm) => (Family::Vm(vm), Member::Device),
            ChildRole::Worker(vm) => (Family::Vm(vm), Member::Worker),
            ChildRole::Probe(_) => (Family::Probes, Member::Worker),
            ChildRole::Arbiter(_) => (Family::Host, Member::Arbiter),
            ChildRole::Inventory => (Family::Host, Member::Inventory),
        }
    }

    /// The VM whose guest can reach it.
    pub(super) fn vm(self) -> Option<u32> {
        match self {
            ChildRole::Device(vm) | ChildRole::Worker(vm) => Some(vm),
            ChildRole::Arbiter(_) | ChildRole::Probe(_) | ChildRole::Inventory => None,
        }
    }
}
