//! The guest's paths to multiprocessors, walked on the driver.
//!
//! The dispatcher answers queries and splits with it, and the module helper makes green contexts. No byte of the guest gets into a
//! resource: each comes from the driver, in the same process.

use crate::session::objects::ContextRef;
use sluice_cuda_abi::resources::{DevResource, GroupParameters, LAST_SCOPE, kind};
use sluice_driver::{Code, Driver, Handle, code};
use sluice_protocol::resources::{Pick, SmGroup, SmResults, SmSplit};

/// The start of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ResolvedOrigin {
    /// The driver's number of a device.
    Device(i32),
    /// The driver's handle of a green context.
    Green(Handle),
}

/// A description of resources, with objects instead of ids.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedResources {
    pub(crate) origin: ResolvedOrigin,
    pub(crate) splits: Vec<(SmSplit, Pick)>,
    /// More groups of the last split.
    pub(crate) more: Vec<Pick>,
    pub(crate) queues: ResolvedQueues,
}

/// The work queues of a green context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResolvedQueues {
    Any,
    Config {
        limit: u32,
        scope: u32,
    },
    /// Those of a primary context.
    OfPrimary {
        context: ContextRef,
        device: i32,
    },
    /// Those of a green context, by its handle of the driver.
    OfGreen(Handle),
}

/// The driver's wish about queues, with these values if the device allows them.
fn queue_config(driver: &Driver, device: i32, limit: u32, scope: u32) -> Result<DevResource, Code> {
    let mut config = driver.device_resource(device, kind::WORKQUEUE_CONFIG)?;
    let (_, most, _) = config.queues();
    if limit == 0 || limit > most || scope > LAST_SCOPE {
        return Err(code::INVALID_VALUE);
    }
    config.value[1] = limit;
    config.value[2] = scope;
    Ok(config)
}

/// The results of the last split of a path, or its origin alone.
struct FoundGroups {
    groups: Vec<DevResource>,
    remainder: Option<DevResource>,
    /// The counts that a discovery found.
    discovered: Option<Vec<u32>>,
}

impl FoundGroups {
    fn pick(&self, pick: Pick) -> Result<DevResource, Code> {
        let found = match pick {
            Pick::Group(index) => self.groups.get(index as usize).copied(),
            Pick::Remainder => self.remainder,
        };
        found.ok_or(code::INVALID_RESOURCE_CONFIGURATION)
    }
}

fn parameters(groups: &[SmGroup]) -> Vec<GroupParameters> {
    let group = |group: &SmGroup| {
        let SmGroup { count, coscheduled, preferred, flags, domain } = *group;
        GroupParameters { count, coscheduled, preferred, flags, domain, reserved: [0; 11] }
    };
    groups.iter().map(group).collect()
}

fn split(driver: &Driver, resource: &DevResource, split: &SmSplit) -> Result<FoundGroups, Code> {
    let (groups, discovers) = match split {
        SmSplit::ByCount { groups, minimum, flags } => {
            let (groups, remainder) = driver.split_by_count(resource, *groups, *minimum, *flags)?;
            return Ok(FoundGroups { groups, remainder, discovered: None });
        }
        SmSplit::Groups(groups) => (groups, false),
        SmSplit::Discovery(groups) => (groups, true),
    };
    let mut parameters = parameters(groups);
    let (groups, remainder) = driver.split(resource, &mut parameters, discovers)?;
    let discovered = discovers.then(|| parameters.iter().map(|group| group.count).collect());
    Ok(FoundGroups { groups, remainder, discovered })
}

impl ResolvedResources {
    fn find(&self, driver: &Driver) -> Result<FoundGroups, Code> {
        let whole = match self.origin {
            ResolvedOrigin::Device(device) => driver.device_resource(device, kind::SM)?,
            ResolvedOrigin::Green(green) => driver.green_resource(green, kind::SM)?,
        };
        let mut found = FoundGroups { groups: vec![whole], remainder: None, discovered: None };
        let mut next = Pick::Group(0);
        for (how, pick) in &self.splits {
            found = split(driver, &found.pick(next)?, how)?;
            next = *pick;
        }
        Ok(found)
    }

    /// The multiprocessors at the end of the path.
    pub(crate) fn results(&self, driver: &Driver) -> Result<SmResults, Code> {
        let found = self.find(driver)?;
        let fields = |resource: &DevResource| resource.multiprocessors().words();
        let groups: Vec<[u32; 5]> = match found.discovered {
            Some(counts) => counts.into_iter().map(|count| [count, 0, 0, 0, 0]).collect(),
            None => found.groups.iter().map(fields).collect(),
        };
        let remainder = found.remainder.as_ref().map_or([0; 5], fields);
        SmResults::new(&groups, remainder).ok_or(code::INVALID_RESOURCE_CONFIGURATION)
    }

    /// The driver's resources, for a green context of `device`.
    pub(crate) fn all(&self, driver: &Driver, device: i32) -> Result<Vec<DevResource>, Code> {
        let found = self.find(driver)?;
        let first = self.splits.last().map_or(Pick::Group(0), |(_, pick)| *pick);
        let picks = core::iter::once(first).chain(self.more.iter().copied());
        let mut resources = picks.map(|pick| found.pick(pick)).collect::<Result<Vec<_>, _>>()?;
        resources.extend(match self.queues {
            ResolvedQueues::Any => None,
            ResolvedQueues::Config { limit, scope } => Some(queue_config(driver, device, limit, scope)?),
            ResolvedQueues::OfPrimary { context, .. } => {
                Some(driver.context_resource(context.handle, kind::WORKQUEUE)?)
            }
            ResolvedQueues::OfGreen(green) => Some(driver.green_resource(green, kind::WORKQUEUE)?),
        });
        Ok(resources)
    }
}
