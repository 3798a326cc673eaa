//! The bounds of the settings that a tenant may give its own VMs.
//!
//! The registry calls it before it creates or changes a VM for a tenant; operators are exempt. It owns no state: an operator
//! sets the limits on an organisation or a project, and [`TenantLimits::default`] applies if none are set.

use std::{collections::BTreeSet, iter};

use sluice_api::v1::{
    Isolation, MemoryShareRequest, Policy, RulesRequest, Setting, SettingsRequest as _, TimeShareRequest,
};

use crate::records::state::objects::{PlacementSettings, SizeObject, TenantLimits, VmObject};

/// Limit of VMs of an organisation created by its tenants, if no number is set.
pub(crate) const VMS: u32 = 64;

/// A tenant's request is beyond its limits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LimitError {
    /// A number or a class is too high.
    #[error("{field} is beyond the limit {most}")]
    Beyond { field: &'static str, most: String },
    /// A number is too low.
    #[error("{field} is below the limit {least}")]
    Below { field: &'static str, least: u32 },
    /// The VM has no quota.
    #[error("memory_bytes must be given: a VM without a quota may take all memory of its unit")]
    NoQuota,
    /// Only an operator may set the field.
    #[error("only an operator may set {0}")]
    Operators(&'static str),
    /// The size is not among those allowed.
    #[error("the size must be one of {0:?}")]
    Size(BTreeSet<String>),
    /// A field differs from the size's.
    #[error("{0} differs from the size's value")]
    NotOfSize(&'static str),
}

impl TenantLimits {
    /// Checks a tenant's request for a VM that has a size and may exist already. A field with its present value, or with the
    /// value of an allowed size, is within the limits. Fields that the limits require and the request leaves out are filled in.
    pub(crate) fn check(
        &self,
        size: Option<&SizeObject>,
        before: Option<&VmObject>,
        wanted: &mut VmObject,
    ) -> Result<(), LimitError> {
        if wanted.time.cap_permille == 0 {
            wanted.time.cap_permille = self.cap_permille;
        }
        if wanted.share.pinned_bytes == 0 {
            wanted.share.pinned_bytes = self.pinned;
        }
        let has = before.unwrap_or(&VmObject::default()).clone();
        let kept = before.is_some();
        if let Some(sizes) = &self.sizes {
            let listed = wanted.size.as_ref().is_some_and(|name| sizes.contains(name));
            let Some(size) = size.filter(|_| listed) else {
                // A size that an operator gave the VM stays allowed.
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
        if wanted.memory == 0 && !(kept && has.memory == 0) {
            return Err(LimitError::NoQuota);
        }
        let within = |field, wanted: u64, had: u64, most: u64| {
            if wanted <= most || kept && wanted == had {
                return Ok(());
            }
            Err(LimitError::Beyond { field, most: most.to_string() })
        };
        let (shares, had) = (&wanted.time, &has.time);
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
        within("headroom_bytes", wanted.share.headroom_bytes, has.share.headroom_bytes, self.headroom)?;
        if self.pinned > 0 {
            within("pinned_bytes", wanted.share.pinned_bytes, has.share.pinned_bytes, self.pinned)?;
        }
        if shares.priority > self.priority && !(kept && shares.priority == had.priority) {
            return Err(LimitError::Beyond { field: "priority", most: self.priority.to_string() });
        }
        decided(MemoryShareRequest::compare(&has.share, &wanted.share))?;
        decided(TimeShareRequest::compare(&has.time, &wanted.time))?;
        self.check_rest(None, before, wanted)
    }

    /// True if the limits fill in this field, so that a size need not set it.
    fn fills(&self, field: &str, wanted: &VmObject) -> bool {
        match field {
            "cap_permille" => self.cap_permille > 0 && wanted.time.cap_permille <= self.cap_permille,
            "pinned_bytes" => self.pinned > 0 && wanted.share.pinned_bytes <= self.pinned,
            _ => false,
        }
    }

    /// Checks the settings that no size gives, or only in part. An allowed size may give a part of the placement.
    fn check_rest(
        &self,
        of_size: Option<&PlacementSettings>,
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
        let given = of_size.map_or_else(PlacementSettings::default, PlacementSettings::chosen);
        if !self.unit_choice && chosen != given && had.is_none_or(|had| had.chosen() != chosen) {
            return Err(LimitError::Operators(
                "gpu, gpus, start, profile, allow_larger, multiprocessors, replicas and numa_node of placement",
            ));
        }
        let had = before.map(|vm| vm.rules).unwrap_or_default();
        decided(RulesRequest::compare(&had, &wanted.rules))?;
        let readmit = wanted.rules.readmit_after_seconds;
        if readmit > 0 && before.is_none_or(|vm| vm.rules.readmit_after_seconds != readmit) {
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

/// Refuses a change of a setting that tenants may not give; each setting comes with a flag that it is unchanged.
fn decided(settings: Vec<(&Setting, bool)>) -> Result<(), LimitError> {
    let changed = settings.into_iter().find(|(setting, same)| !same && !setting.for_tenants);
    changed.map_or(Ok(()), |(setting, _)| Err(LimitError::Operators(setting.name)))
}

/// The settings that a size gives, each with a flag that two VMs agree on it.
fn figures(one: &VmObject, other: &VmObject) -> Vec<(&'static str, bool)> {
    let mut settings = MemoryShareRequest::compare(&one.share, &other.share);
    settings.extend(TimeShareRequest::compare(&one.time, &other.time));
    let named = settings.into_iter().map(|(setting, same)| (setting.name, same));
    iter::once(("memory_bytes", one.memory == other.memory)).chain(named).collect()
}

fn same_figures(one: &VmObject, other: &VmObject) -> bool {
    one.size == other.size && figures(one, other).iter().all(|(_, same)| *same)
}

impl PlacementSettings {
    /// The part of it that selects a unit, apart from the kind of unit.
    fn chosen(&self) -> Self {
        Self { policy: Policy::Any, isolation: Isolation::Shared, anti_affinity: Vec::new(), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn default_limits_refuse_each_field_that_takes_from_others() {
        let limits = TenantLimits::default();
        for good in [
            plain(),
            changed(|vm| vm.memory = 7 * GIB),
            changed(|vm| vm.time.weight = 1),
            changed(|vm| vm.time.priority = Priority::Low),
            changed(|vm| vm.time.cap_permille = 100),
            changed(|vm| vm.placement.policy = Policy::Mig),
        ] {
            assert_eq!(limits.check(None, None, &mut good.clone()), Ok(()), "{good:?}");
        }
        for bad in [
            changed(|vm| vm.memory = 0),
            changed(|vm| vm.time.weight = 101),
            changed(|vm| vm.time.weight = 10_000),
            changed(|vm| vm.time.priority = Priority::High),
            changed(|vm| vm.time.guarantee_permille = 1),
            changed(|vm| vm.share.headroom_bytes = 1),
            changed(|vm| vm.placement.isolation = Isolation::Strict),
            changed(|vm| vm.placement.isolation = Isolation::ExclusiveGpu),
            changed(|vm| vm.placement.gpu = Some(0)),
            changed(|vm| vm.placement.profile = Some(0)),
            changed(|vm| vm.placement.multiprocessors = 132),
            changed(|vm| vm.placement.numa_node = Some(0)),
            changed(|vm| vm.rules.readmit_after_seconds = 1),
        ] {
            assert!(limits.check(None, None, &mut bad.clone()).is_err(), "{bad:?} was accepted");
            // An operator gave it this value: a tenant that repeats the value changes nothing.
            assert_eq!(limits.check(None, Some(&bad), &mut bad.clone()), Ok(()), "{bad:?}");
            assert!(limits.check(None, Some(&plain()), &mut bad.clone()).is_err(), "{bad:?} was accepted");
        }
    }

    // Promise: A42
    #[test]
    fn setting_without_a_limit_is_reserved_to_operators() {
        let mut colour = RulesRequest::SETTINGS[0];
        (colour.name, colour.for_tenants) = ("colour", false);
        let weight = &TimeShareRequest::SETTINGS[0];
        assert_eq!(decided(vec![(weight, false), (&colour, true)]), Ok(()));
        assert_eq!(decided(vec![(weight, false), (&colour, false)]), Err(LimitError::Operators("colour")));
    }

    // Promise: A42
    #[test]
    fn value_at_a_limit_is_accepted_and_above_it_refused() {
        let limits = TenantLimits {
            weight: 300,
            priority: Priority::High,
            cap_permille: 500,
            guarantee_permille: 200,
            isolation: Isolation::Strict,
            headroom: GIB,
            pinned: GIB,
            readmit_after: 60,
            unit_choice: true,
            ..TenantLimits::default()
        };
        let most = changed(|vm| {
            (vm.time.weight, vm.time.priority) = (300, Priority::High);
            (vm.time.cap_permille, vm.time.guarantee_permille) = (500, 200);
            (vm.share.headroom_bytes, vm.share.pinned_bytes, vm.rules.readmit_after_seconds) = (GIB, GIB, 60);
            (vm.placement.isolation, vm.placement.gpu) = (Isolation::Strict, Some(3));
        });
        assert_eq!(limits.check(None, None, &mut most.clone()), Ok(()));
        let beyond: [fn(&mut VmObject); 7] = [
            |vm| vm.time.weight = 301,
            |vm| vm.time.cap_permille = 501,
            |vm| vm.time.guarantee_permille = 201,
            |vm| vm.share.headroom_bytes = GIB + 1,
            |vm| vm.share.pinned_bytes = GIB + 1,
            |vm| vm.rules.readmit_after_seconds = 59,
            |vm| vm.placement.isolation = Isolation::ExclusiveGpu,
        ];
        for change in beyond {
            let mut vm = most.clone();
            change(&mut vm);
            assert!(limits.check(None, None, &mut vm.clone()).is_err(), "{vm:?} was accepted");
        }
        // A missing cap, and a missing limit of pinned memory, are above every limit.
        let mut open = plain();
        assert_eq!(limits.check(None, None, &mut open), Ok(()));
        assert_eq!((open.time.cap_permille, open.share.pinned_bytes), (500, GIB));
    }

    // Promise: A42
    #[test]
    fn listed_sizes_apply_exactly_and_may_exceed_the_limits() {
        let mut large = SizeObject {
            memory: 4 * GIB,
            policy: Some(Policy::Mig),
            profile: Some(9),
            replicas: 2,
            ..SizeObject::default()
        };
        (large.time.weight, large.time.priority) = (400, Priority::High);
        (large.time.cap_permille, large.time.guarantee_permille) = (250, 100);
        let limits = TenantLimits { sizes: Some(["large".to_owned()].into()), ..TenantLimits::default() };
        let of_size = VmObject { size: Some("large".to_owned()), ..large.vm() };
        assert_eq!(limits.check(Some(&large), None, &mut of_size.clone()), Ok(()));
        let changes: [fn(&mut VmObject); 5] = [
            |vm| vm.placement.policy = Policy::TimeSlice,
            |vm| vm.memory += 1,
            |vm| vm.time.cap_permille = 0,
            |vm| vm.time.weight = 1,
            |vm| vm.share.guaranteed_bytes = 1,
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
                "the VM has this value already"
            );
        }
    }
}
