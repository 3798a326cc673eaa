//! The bounds of the settings that a tenant may give its own VMs.
//!
//! The registry calls it before it makes or changes a VM for a tenant; operators are exempt. It owns no state: an operator sets
//! the limits on an organisation or a project, and [`Limits::default`] holds if none are set.

use std::collections::BTreeSet;

use sluice_api::v1::{Isolation, Policy};

use crate::records::state::objects::{Limits, Placement, SizeObject, VmObject};

/// VMs of an organisation that its tenants may make, where no number is set.
pub(crate) const VMS: u32 = 64;
/// A tenant may not have a field so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LimitError {
    /// A number or a class is too high.
    #[error("{field} is beyond the limit {most}")]
    Beyond { field: &'static str, most: String },
    /// A number is too low.
    #[error("{field} is below the limit {least}")]
    Below { field: &'static str, least: u32 },
    /// An operator alone sets the field.
    #[error("only an operator sets {0}")]
    Operators(&'static str),
    /// The size is not among those allowed.
    #[error("the size has to be one of {0:?}")]
    Size(BTreeSet<String>),
    /// A field differs from the size's.
    #[error("{0} differs from what the size says")]
    NotOfSize(&'static str),
}

impl Limits {
    /// Checks what a tenant wants of a VM that has a size and may be there already. A field that the VM has so already, or
    /// that an allowed size gives, is within the limits. What the limits demand and the request leaves open is filled in.
    pub(crate) fn check(
        &self,
        size: Option<&SizeObject>,
        before: Option<&VmObject>,
        wanted: &mut VmObject,
    ) -> Result<(), LimitError> {
        if wanted.shares.cap_permille == 0 {
            wanted.shares.cap_permille = self.cap_permille;
        }
        if wanted.pinned == 0 {
            wanted.pinned = self.pinned;
        }
        let has = before.unwrap_or(&VmObject::default()).clone();
        let kept = before.is_some();
        if let Some(sizes) = &self.sizes {
            let listed = wanted.size.as_ref().is_some_and(|name| sizes.contains(name));
            let Some(size) = size.filter(|_| listed) else {
                // One that an operator gave it stays.
                return match kept && same_figures(&has, wanted) {
                    true => self.check_rest(None, before, wanted),
                    false => Err(LimitError::Size(sizes.clone())),
                };
            };
            let of_size = VmObject { size: wanted.size.clone(), ..size.vm() };
            for (field, equal) in figures(&of_size, wanted) {
                let is_kept =
                    kept && figures(&has, wanted).iter().any(|(name, same)| *name == field && *same);
                if !equal && !is_kept && !self.fills(field, wanted) {
                    return Err(LimitError::NotOfSize(field));
                }
            }
            if size.policy.is_some_and(|policy| wanted.placement.policy != policy)
                && !(kept && has.placement.policy == wanted.placement.policy)
            {
                return Err(LimitError::NotOfSize("placement.policy"));
            }
            return self.check_rest(Some(&of_size.placement), before, wanted);
        }
        let within = |field, wanted: u64, had: u64, most: u64| {
            if wanted <= most || kept && wanted == had {
                return Ok(());
            }
            Err(LimitError::Beyond { field, most: most.to_string() })
        };
        let (shares, had) = (&wanted.shares, &has.shares);
        within("weight", shares.weight.into(), had.weight.into(), self.weight.into())?;
        within(
            "guarantee_permille",
            shares.guarantee_permille.into(),
            had.guarantee_permille.into(),
            self.guarantee_permille.into(),
        )?;
        if self.cap_permille > 0 {
            within(
                "cap_permille",
                shares.cap_permille.into(),
                had.cap_permille.into(),
                self.cap_permille.into(),
            )?;
        }
        within("headroom_bytes", wanted.headroom, has.headroom, self.headroom)?;
        if self.pinned > 0 {
            within("pinned_bytes", wanted.pinned, has.pinned, self.pinned)?;
        }
        if shares.priority > self.priority && !(kept && shares.priority == had.priority) {
            return Err(LimitError::Beyond { field: "priority", most: self.priority.to_string() });
        }
        self.check_rest(None, before, wanted)
    }

    /// The limits fill in this field, which no size has to say.
    fn fills(&self, field: &str, wanted: &VmObject) -> bool {
        match field {
            "cap_permille" => self.cap_permille > 0 && wanted.shares.cap_permille <= self.cap_permille,
            "pinned_bytes" => self.pinned > 0 && wanted.pinned <= self.pinned,
            _ => false,
        }
    }

    /// What no size gives, or only in part. An allowed size may give a part of the placement.
    fn check_rest(
        &self,
        of_size: Option<&Placement>,
        before: Option<&VmObject>,
        wanted: &VmObject,
    ) -> Result<(), LimitError> {
        let had = before.map(|vm| &vm.placement);
        let placement = &wanted.placement;
        if placement.isolation > self.isolation && had.is_none_or(|had| had.isolation != placement.isolation)
        {
            return Err(LimitError::Beyond {
                field: "placement.isolation",
                most: self.isolation.to_string(),
            });
        }
        let chosen = placement.chosen();
        let given = of_size.map_or_else(Placement::default, Placement::chosen);
        if !self.unit_choice && chosen != given && had.is_none_or(|had| had.chosen() != chosen) {
            return Err(LimitError::Operators(
                "gpu, start, profile, allow_larger, multiprocessors, replicas and numa_node of placement",
            ));
        }
        let readmit = wanted.readmit_after;
        if readmit > 0 && before.is_none_or(|vm| vm.readmit_after != readmit) {
            match self.readmit_after {
                0 => return Err(LimitError::Operators("readmit_after_seconds")),
                least if readmit < least => {
                    return Err(LimitError::Below { field: "readmit_after_seconds", least });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// What a size gives, and whether two VMs have the same of it.
fn figures(one: &VmObject, other: &VmObject) -> [(&'static str, bool); 8] {
    [
        ("memory_bytes", one.memory == other.memory),
        ("guaranteed_bytes", one.guaranteed == other.guaranteed),
        ("headroom_bytes", one.headroom == other.headroom),
        ("pinned_bytes", one.pinned == other.pinned),
        ("weight", one.shares.weight == other.shares.weight),
        ("priority", one.shares.priority == other.shares.priority),
        ("cap_permille", one.shares.cap_permille == other.shares.cap_permille),
        ("guarantee_permille", one.shares.guarantee_permille == other.shares.guarantee_permille),
    ]
}

fn same_figures(one: &VmObject, other: &VmObject) -> bool {
    one.size == other.size && figures(one, other).iter().all(|(_, same)| *same)
}

impl Placement {
    /// The part of it that says which unit, apart from its kind.
    fn chosen(&self) -> Self {
        Self { policy: Policy::Any, isolation: Isolation::Shared, apart: Vec::new(), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::state::objects::Shares;
    use sluice_api::v1::Priority;

    const GIB: u64 = 1 << 30;

    fn plain() -> VmObject {
        VmObject { memory: GIB, ..VmObject::default() }
    }

    fn changed(change: impl FnOnce(&mut VmObject)) -> VmObject {
        let mut vm = plain();
        change(&mut vm);
        vm
    }

    // Promise: A42
    #[test]
    fn defaults_refuse_each_field_that_takes_from_others() {
        let limits = Limits::default();
        for good in [
            plain(),
            changed(|vm| vm.memory = 7 * GIB),
            changed(|vm| vm.shares.weight = 1),
            changed(|vm| vm.shares.priority = Priority::Low),
            changed(|vm| vm.shares.cap_permille = 100),
            changed(|vm| vm.placement.policy = Policy::Mig),
        ] {
            assert_eq!(limits.check(None, None, &mut good.clone()), Ok(()), "{good:?}");
        }
        for bad in [
            changed(|vm| vm.shares.weight = 101),
            changed(|vm| vm.shares.weight = 10_000),
            changed(|vm| vm.shares.priority = Priority::High),
            changed(|vm| vm.shares.guarantee_permille = 1),
            changed(|vm| vm.headroom = 1),
            changed(|vm| vm.placement.isolation = Isolation::Strict),
            changed(|vm| vm.placement.isolation = Isolation::StrictPlus),
            changed(|vm| vm.placement.gpu = Some(0)),
            changed(|vm| vm.placement.profile = Some(0)),
            changed(|vm| vm.placement.multiprocessors = 132),
            changed(|vm| vm.placement.numa_node = Some(0)),
            changed(|vm| vm.readmit_after = 1),
        ] {
            assert!(limits.check(None, None, &mut bad.clone()).is_err(), "{bad:?} was let through");
            // An operator gave it that: a tenant that repeats it changes nothing.
            assert_eq!(limits.check(None, Some(&bad), &mut bad.clone()), Ok(()), "{bad:?}");
            assert!(limits.check(None, Some(&plain()), &mut bad.clone()).is_err(), "{bad:?} was let through");
        }
    }

    // Promise: A42
    #[test]
    fn limits_that_are_set_are_reached_and_not_passed() {
        let limits = Limits {
            weight: 300,
            priority: Priority::High,
            cap_permille: 500,
            guarantee_permille: 200,
            isolation: Isolation::Strict,
            headroom: GIB,
            pinned: GIB,
            readmit_after: 60,
            unit_choice: true,
            ..Limits::default()
        };
        let most = changed(|vm| {
            vm.shares =
                Shares { weight: 300, priority: Priority::High, cap_permille: 500, guarantee_permille: 200 };
            (vm.headroom, vm.pinned, vm.readmit_after) = (GIB, GIB, 60);
            (vm.placement.isolation, vm.placement.gpu) = (Isolation::Strict, Some(3));
        });
        assert_eq!(limits.check(None, None, &mut most.clone()), Ok(()));
        let beyond: [fn(&mut VmObject); 7] = [
            |vm| vm.shares.weight = 301,
            |vm| vm.shares.cap_permille = 501,
            |vm| vm.shares.guarantee_permille = 201,
            |vm| vm.headroom = GIB + 1,
            |vm| vm.pinned = GIB + 1,
            |vm| vm.readmit_after = 59,
            |vm| vm.placement.isolation = Isolation::StrictPlus,
        ];
        for change in beyond {
            let mut vm = most.clone();
            change(&mut vm);
            assert!(limits.check(None, None, &mut vm.clone()).is_err(), "{vm:?} was let through");
        }
        // No cap, and no limit of pinned memory, are more than any.
        let mut open = plain();
        assert_eq!(limits.check(None, None, &mut open), Ok(()));
        assert_eq!((open.shares.cap_permille, open.pinned), (500, GIB));
    }

    // Promise: A42
    #[test]
    fn listed_sizes_hold_exactly_and_may_be_beyond_the_limits() {
        let large = SizeObject {
            memory: 4 * GIB,
            shares: Shares {
                weight: 400,
                priority: Priority::High,
                cap_permille: 250,
                guarantee_permille: 100,
            },
            policy: Some(Policy::Mig),
            profile: Some(9),
            replicas: 2,
            ..SizeObject::default()
        };
        let limits = Limits { sizes: Some(["large".to_owned()].into()), ..Limits::default() };
        let of_size = VmObject { size: Some("large".to_owned()), ..large.vm() };
        assert_eq!(limits.check(Some(&large), None, &mut of_size.clone()), Ok(()));
        let changes: [fn(&mut VmObject); 5] = [
            |vm| vm.placement.policy = Policy::TimeSlice,
            |vm| vm.memory += 1,
            |vm| vm.shares.cap_permille = 0,
            |vm| vm.shares.weight = 1,
            |vm| vm.guaranteed = 1,
        ];
        for change in changes {
            let mut vm = of_size.clone();
            change(&mut vm);
            let refused = limits.check(Some(&large), None, &mut vm);
            assert!(matches!(refused, Err(LimitError::NotOfSize(_))), "{refused:?}");
        }
        let mut larger = of_size.clone();
        larger.placement.profile = Some(0);
        let refused = limits.check(Some(&large), None, &mut larger);
        assert!(matches!(refused, Err(LimitError::Operators(_))), "{refused:?}");
        for other in [plain(), VmObject { size: Some("other".to_owned()), ..plain() }] {
            let refused = limits.check(Some(&large), None, &mut other.clone());
            assert!(matches!(refused, Err(LimitError::Size(_))), "{refused:?}");
            assert_eq!(
                limits.check(Some(&large), Some(&other), &mut other.clone()),
                Ok(()),
                "it is so already"
            );
        }
    }
}
