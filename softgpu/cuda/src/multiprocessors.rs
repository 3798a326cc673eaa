//! Sets of multiprocessors, and how they are split into groups: the arithmetic of green contexts.
//!
//! A program holds a set by value, in the private words of a `CUdevResource`, and may write anything into them. So every set that comes
//! back is checked: it has multiprocessors of one visible GPU, and no other.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use sluice_cuda_abi::resources::{DevResource, GroupParameters, SmFields, group_flags, kind, split_flags};

use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;

/// The first private word of a set.
const MARK: u32 = 0x736d_7321;
/// Multiprocessors in a set, at most.
const MOST: u32 = 256;
/// Multiprocessors that share a part of the device; the least that can be told apart.
const PAIR: u32 = 2;
/// Multiprocessors that run the blocks of the largest cluster, and the most that a program may ask for.
const LARGEST_CLUSTER: u32 = 16;
const MOST_COSCHEDULED: u32 = 32;

static NEXT_SPLIT: AtomicU64 = AtomicU64::new(1);

/// The granularity of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granularity {
    /// The least number of multiprocessors of a group.
    pub(crate) minimum: u32,
    /// The number is a multiple of this one.
    pub(crate) alignment: u32,
    /// True if multiprocessors run blocks of one cluster.
    clusters: bool,
}

impl Granularity {
    /// The granularity of a compute capability, times 10, as the header and the programming guide state it.
    pub(crate) const fn of(capability: u32) -> Granularity {
        match capability {
            90.. => Granularity { minimum: 8, alignment: 8, clusters: true },
            80.. => Granularity { minimum: 4, alignment: PAIR, clusters: false },
            _ => Granularity { minimum: PAIR, alignment: PAIR, clusters: false },
        }
    }
}

/// The origin of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SetRole {
    /// All multiprocessors of a device, a context or a stream.
    Whole,
    /// A group of the split with this number.
    Group(u64),
    /// The rest of the split.
    Remainder(u64),
}

/// Multiprocessors of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Multiprocessors {
    device: i32,
    role: SetRole,
    /// Numbers of the multiprocessors, ascending.
    members: Vec<u32>,
    fields: SmFields,
}

/// The results of a split.
pub(crate) struct Parts {
    pub(crate) groups: Vec<Multiprocessors>,
    pub(crate) remainder: Option<Multiprocessors>,
}

impl Multiprocessors {
    /// All of a GPU.
    pub(crate) fn of(gpu: &VisibleGpu, granularity: Granularity) -> Multiprocessors {
        Multiprocessors::whole(gpu.ordinal, (0..gpu.multiprocessors().min(MOST)).collect(), granularity)
    }

    fn whole(device: i32, members: Vec<u32>, granularity: Granularity) -> Multiprocessors {
        let Granularity { minimum, alignment, .. } = granularity;
        let fields = SmFields { count: count(&members), minimum, alignment, ..SmFields::default() };
        Multiprocessors { device, role: SetRole::Whole, members, fields }
    }

    /// The number of multiprocessors.
    pub(crate) fn count(&self) -> u32 {
        self.fields.count
    }

    /// The device.
    pub(crate) fn device(&self) -> i32 {
        self.device
    }

    /// The same multiprocessors as a context has them, which may be split again.
    pub(crate) fn in_context(&self) -> Multiprocessors {
        Multiprocessors { role: SetRole::Whole, ..self.clone() }
    }

    /// Groups of one split as one set.
    pub(crate) fn join(sets: &[Multiprocessors]) -> Result<Multiprocessors> {
        let [first, others @ ..] = sets else { return Err(Error::INVALID_VALUE) };
        if others.is_empty() {
            return Ok(first.clone());
        }
        let split = |set: &Multiprocessors| match set.role {
            SetRole::Whole => None,
            SetRole::Group(split) | SetRole::Remainder(split) => Some(split),
        };
        let fits = |other: &Multiprocessors| {
            other.device == first.device
                && split(first).is_some()
                && split(other) == split(first)
                && other.fields.alignment == first.fields.alignment
                && other.fields.domain == first.fields.domain
        };
        let mut members: Vec<u32> = sets.iter().flat_map(|set| set.members.clone()).collect();
        members.sort_unstable();
        let all = members.len();
        members.dedup();
        if !others.iter().all(fits) || members.len() != all {
            return Err(Error::INVALID_RESOURCE_CONFIGURATION);
        }
        let fields = SmFields { count: count(&members), ..first.fields };
        Ok(Multiprocessors { members, fields, ..first.clone() })
    }

    /// As a program gets it.
    pub(crate) fn resource(&self) -> DevResource {
        let (role, split) = match self.role {
            SetRole::Whole => (0, 0),
            SetRole::Group(split) => (1, split),
            SetRole::Remainder(split) => (2, split),
        };
        let mut mask = [0_u32; MOST as usize / 32];
        for member in &self.members {
            mask[*member as usize / 32] |= 1 << (member % 32);
        }
        let [low, high] = halves(split);
        let private = [&[MARK, self.device.cast_unsigned(), role, low, high], mask.as_slice()].concat();
        DevResource::new(kind::SM, &private, &self.fields.words())
    }

    /// The set in a resource of a program; `find` returns a GPU.
    pub(crate) fn read(
        resource: &DevResource,
        find: impl FnOnce(i32) -> Result<&'static VisibleGpu>,
    ) -> Result<Multiprocessors> {
        if resource.kind != kind::SM {
            return Err(Error::INVALID_RESOURCE_TYPE);
        }
        let [mark, device, role, low, high, mask @ ..] = &resource.private;
        let split = u64::from(*low) | u64::from(*high) << 32;
        let role = match role {
            0 => SetRole::Whole,
            1 => SetRole::Group(split),
            2 => SetRole::Remainder(split),
            _ => return Err(Error::INVALID_VALUE),
        };
        let gpu = find(device.cast_signed()).map_err(|_| Error::INVALID_VALUE)?;
        let is_set =
            |member: &u32| mask.get(*member as usize / 32).is_some_and(|word| word >> (member % 32) & 1 == 1);
        let members: Vec<u32> = (0..MOST).filter(is_set).collect();
        let fields = resource.multiprocessors();
        let is_own = members.last().is_some_and(|last| *last < gpu.multiprocessors());
        if *mark != MARK || !is_own || fields.count != count(&members) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(Multiprocessors { device: gpu.ordinal, role, members, fields })
    }

    /// The multiprocessors of a group cannot be split again before a green context has them.
    fn splittable(&self) -> Result {
        if matches!(self.role, SetRole::Group(_)) {
            Err(Error::INVALID_RESOURCE_CONFIGURATION)
        } else {
            Ok(())
        }
    }

    /// `cuDevSmResourceSplitByCount`: at most `most` groups of one size.
    pub(crate) fn by_count(
        &self,
        most: u32,
        minimum: u32,
        flags: u32,
        granularity: Granularity,
    ) -> Result<Parts> {
        // NVIDIA's driver ignores flags that do not exist.
        let known = flags & (split_flags::IGNORE_COSCHEDULING | split_flags::LARGEST_CLUSTER);
        let Granularity { minimum: least, alignment, clusters } = match known {
            0 => granularity,
            split_flags::IGNORE_COSCHEDULING => Granularity { minimum: PAIR, alignment: PAIR, ..granularity },
            split_flags::LARGEST_CLUSTER if granularity.clusters => {
                Granularity { minimum: LARGEST_CLUSTER, alignment: LARGEST_CLUSTER, ..granularity }
            }
            _ => return Err(Error::INVALID_VALUE),
        };
        let granularity = Granularity { minimum: least, alignment, clusters };
        if minimum > self.count() || most == 0 {
            return Err(Error::INVALID_VALUE);
        }
        self.splittable()?;
        // The count is at most `MOST`, so nothing overflows.
        let size = minimum.max(least).next_multiple_of(alignment);
        let groups = most.min(self.count() / size);
        if groups == 0 {
            return Err(Error::INVALID_RESOURCE_CONFIGURATION);
        }
        Ok(self.cut(&vec![(size, granularity, 0); groups as usize]))
    }

    /// `cuDevSmResourceSplit`: groups of different sizes. A count of 0 becomes the largest that is possible; `discovers` if it may stay 0.
    pub(crate) fn groups(
        &self,
        parameters: &mut [GroupParameters],
        discovers: bool,
        granularity: Granularity,
    ) -> Result<Parts> {
        for group in &*parameters {
            self.check(group, granularity)?;
        }
        self.splittable()?;
        let mut free = self.count();
        let mut sizes = Vec::new();
        for group in parameters {
            let together = if group.coscheduled == 0 { granularity.alignment } else { group.coscheduled };
            let backfills = group.flags & group_flags::BACKFILL != 0;
            let unit = if backfills { PAIR } else { together };
            if group.count == 0 {
                group.count = if free < together { 0 } else { free / unit * unit };
            }
            let fits = group.count.is_multiple_of(unit) && group.count >= together && group.count <= free;
            let stays_empty = discovers && group.count == 0;
            if !(fits || stays_empty) {
                return Err(Error::INVALID_RESOURCE_CONFIGURATION);
            }
            free -= group.count;
            sizes.push((group.count, Granularity { alignment: together, ..granularity }, group.flags));
        }
        Ok(self.cut(&sizes))
    }

    fn check(&self, group: &GroupParameters, granularity: Granularity) -> Result {
        let GroupParameters { count, coscheduled, preferred, flags, domain: _, reserved } = *group;
        let known = group_flags::BACKFILL | group_flags::LOCALITY_DOMAIN | group_flags::SUPPLEMENTAL;
        let largest = if granularity.clusters { MOST_COSCHEDULED } else { PAIR };
        let may_be = |number: u32| number == 0 || (number.is_multiple_of(PAIR) && number <= largest);
        let of_domain = flags & group_flags::LOCALITY_DOMAIN != 0;
        if !count.is_multiple_of(PAIR)
            || count > self.count()
            || !may_be(coscheduled)
            || !(may_be(preferred) && (preferred == 0 || preferred >= coscheduled))
            || flags & !known != 0
            || (flags & group_flags::SUPPLEMENTAL != 0 && !of_domain)
            || reserved != [0; 11]
        {
            return Err(Error::INVALID_VALUE);
        }
        // The device has no locality domains, as its attributes say.
        if of_domain { Err(Error::INVALID_RESOURCE_CONFIGURATION) } else { Ok(()) }
    }

    fn cut(&self, sizes: &[(u32, Granularity, u32)]) -> Parts {
        let split = NEXT_SPLIT.fetch_add(1, Relaxed);
        let mut left = self.members.as_slice();
        let set = |role, members: &[u32], granularity, flags| {
            let whole = Multiprocessors::whole(self.device, members.to_vec(), granularity);
            Multiprocessors { role, fields: SmFields { flags, ..whole.fields }, ..whole }
        };
        let mut groups = Vec::new();
        for (size, granularity, flags) in sizes {
            let (members, rest) = left.split_at(*size as usize);
            groups.push(set(SetRole::Group(split), members, *granularity, *flags));
            left = rest;
        }
        let loose = Granularity { minimum: PAIR, alignment: PAIR, clusters: false };
        let remainder = (!left.is_empty()).then(|| set(SetRole::Remainder(split), left, loose, 0));
        Parts { groups, remainder }
    }
}

/// The low and the high half of a number.
#[expect(clippy::cast_possible_truncation, reason = "halves of a number")]
fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

fn count(members: &[u32]) -> u32 {
    // At most `MOST`.
    u32::try_from(members.len()).unwrap_or(MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(count: u32, capability: u32) -> (Multiprocessors, Granularity) {
        let granularity = Granularity::of(capability);
        (Multiprocessors::whole(0, (0..count).collect(), granularity), granularity)
    }

    fn counts(parts: &Parts) -> (Vec<u32>, u32) {
        let remainder = parts.remainder.as_ref().map_or(0, Multiprocessors::count);
        (parts.groups.iter().map(Multiprocessors::count).collect(), remainder)
    }

    // Promise: C105
    #[test]
    fn split_by_count_follows_the_granularity_of_the_capability() {
        for (capability, minimum, flags, expected) in [
            (90, 0, 0, (vec![8; 16], 4)),
            (90, 9, 0, (vec![16; 8], 4)),
            (90, 16, split_flags::LARGEST_CLUSTER, (vec![16; 8], 4)),
            (90, 0, split_flags::IGNORE_COSCHEDULING, (vec![2; 66], 0)),
            (80, 0, 0, (vec![4; 33], 0)),
            (80, 5, 0, (vec![6; 22], 0)),
            (75, 0, 0, (vec![2; 66], 0)),
            (90, 132, 0, (Vec::new(), 0)),
        ] {
            let (set, granularity) = all(132, capability);
            match set.by_count(u32::MAX, minimum, flags, granularity) {
                Ok(parts) => assert_eq!(counts(&parts), expected, "{capability}, {minimum}, {flags}"),
                Err(error) => {
                    assert_eq!((error, expected.0.len()), (Error::INVALID_RESOURCE_CONFIGURATION, 0));
                }
            }
        }
        let (set, granularity) = all(132, 90);
        let two = set.by_count(2, 20, 0, granularity).unwrap();
        assert_eq!(counts(&two), (vec![24; 2], 84));
        let refused = |most, minimum, flags| set.by_count(most, minimum, flags, granularity).err();
        assert_eq!(refused(1, 133, 0), Some(Error::INVALID_VALUE));
        assert_eq!(refused(0, 8, 0), Some(Error::INVALID_VALUE));
        assert_eq!(refused(1, 8, 3), Some(Error::INVALID_VALUE));
        assert_eq!(refused(1, 8, 4), None, "a flag that does not exist");
        let (old, granularity) = all(132, 80);
        let largest = old.by_count(1, 8, split_flags::LARGEST_CLUSTER, granularity);
        assert_eq!(largest.err(), Some(Error::INVALID_VALUE), "a device without clusters");
    }

    #[test]
    fn groups_are_disjoint_and_are_joined_only_if_they_are_of_one_split() {
        let (set, granularity) = all(132, 90);
        let parts = set.by_count(3, 8, 0, granularity).unwrap();
        let mut members: Vec<u32> = parts.groups.iter().flat_map(|group| group.members.clone()).collect();
        members.extend(&parts.remainder.as_ref().unwrap().members);
        members.sort_unstable();
        assert_eq!(members, set.members);
        let joined = Multiprocessors::join(&parts.groups[..2]).unwrap();
        assert_eq!(joined.count(), 16);
        let other = set.by_count(3, 8, 0, granularity).unwrap();
        for wrong in [
            [parts.groups[0].clone(), other.groups[1].clone()],
            [parts.groups[0].clone(), parts.groups[0].clone()],
            [parts.groups[0].clone(), parts.remainder.clone().unwrap()],
            [set.clone(), set.clone()],
        ] {
            assert_eq!(Multiprocessors::join(&wrong), Err(Error::INVALID_RESOURCE_CONFIGURATION));
        }
        assert_eq!(Multiprocessors::join(&[]), Err(Error::INVALID_VALUE));
        let again = parts.groups[0].by_count(1, 8, 0, granularity);
        assert_eq!(again.err(), Some(Error::INVALID_RESOURCE_CONFIGURATION), "a split of a group");
        assert!(parts.groups[0].in_context().by_count(1, 8, 0, granularity).is_ok());
        assert!(parts.remainder.unwrap().by_count(1, 8, 0, granularity).is_ok());
    }

    // Promise: C105
    #[test]
    fn structured_groups_follow_their_parameters() {
        let group =
            |count, coscheduled, flags| GroupParameters { count, coscheduled, flags, ..Default::default() };
        let (set, granularity) = all(132, 90);
        let split = |groups: &[GroupParameters], discovers| {
            let mut groups = groups.to_vec();
            set.groups(&mut groups, discovers, granularity).map(|parts| (counts(&parts), groups))
        };
        let (found, parameters) = split(&[group(0, 0, 0)], false).unwrap();
        assert_eq!((found, parameters[0].count, parameters[0].coscheduled), ((vec![128], 4), 128, 0));
        assert_eq!(split(&[group(10, 2, 0)], false).unwrap().0, (vec![10], 122));
        let rest = [group(8, 4, 0), group(0, 2, group_flags::BACKFILL)];
        assert_eq!(split(&rest, false).unwrap().0, (vec![8, 124], 0));
        let nothing_left = [group(132, 2, 0), group(0, 2, 0)];
        assert_eq!(split(&nothing_left, true).unwrap().0, (vec![132, 0], 0));
        assert_eq!(split(&nothing_left, false).err(), Some(Error::INVALID_RESOURCE_CONFIGURATION));
        for (wrong, error) in [
            (group(3, 2, 0), Error::INVALID_VALUE),
            (group(134, 2, 0), Error::INVALID_VALUE),
            (group(8, 3, 0), Error::INVALID_VALUE),
            (group(8, 34, 0), Error::INVALID_VALUE),
            (group(8, 8, 8), Error::INVALID_VALUE),
            (group(8, 8, group_flags::SUPPLEMENTAL), Error::INVALID_VALUE),
            (GroupParameters { preferred: 4, ..group(8, 8, 0) }, Error::INVALID_VALUE),
            (GroupParameters { reserved: [1; 11], ..group(8, 8, 0) }, Error::INVALID_VALUE),
            (group(10, 8, 0), Error::INVALID_RESOURCE_CONFIGURATION),
            (group(8, 8, group_flags::LOCALITY_DOMAIN), Error::INVALID_RESOURCE_CONFIGURATION),
        ] {
            assert_eq!(split(&[wrong], false).err(), Some(error), "{wrong:?}");
        }
        assert_eq!(split(&[group(10, 8, group_flags::BACKFILL)], false).unwrap().0, (vec![10], 122));
    }
}
