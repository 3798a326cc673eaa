//! The guest's paths to multiprocessors, walked on the driver.
//!
//! The dispatcher answers queries and splits with it, and the module helper makes green contexts. No byte of the guest gets into a
//! resource: each comes from the driver, in the same process.

use sluice_cuda_abi::resources::{DevResource, GroupParameters, kind};
use sluice_driver::{Code, Driver, Handle, code};
use sluice_protocol::resources::{Pick, Queues, SmGroup, SmResults, SmSplit};

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
    /// The bytes of the description, which name it.
    pub(crate) name: Vec<u8>,
}

/// The work queues of a green context.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ResolvedQueues {
    Any,
    Config { limit: u32, scope: u32 },
    Of(ResolvedOrigin),
}

impl ResolvedQueues {
    pub(crate) fn new(queues: Queues, of: Option<ResolvedOrigin>) -> ResolvedQueues {
        match (queues, of) {
            (Queues::Config { limit, scope }, _) => ResolvedQueues::Config { limit, scope },
            (Queues::Of(_), Some(origin)) => ResolvedQueues::Of(origin),
            _ => ResolvedQueues::Any,
        }
    }
}

/// The results of the last split of a path, or its origin alone.
struct Found {
    groups: Vec<DevResource>,
    remainder: Option<DevResource>,
    /// The counts that a discovery found.
    discovered: Option<Vec<u32>>,
}

impl Found {
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

fn split(driver: &Driver, resource: &DevResource, split: &SmSplit) -> Result<Found, Code> {
    let (groups, discovers) = match split {
        SmSplit::ByCount { groups, minimum, flags } => {
            let (groups, remainder) = driver.split_by_count(resource, *groups, *minimum, *flags)?;
            return Ok(Found { groups, remainder, discovered: None });
        }
        SmSplit::Groups(groups) => (groups, false),
        SmSplit::Discovery(groups) => (groups, true),
    };
    let mut parameters = parameters(groups);
    let (groups, remainder) = driver.split(resource, &mut parameters, discovers)?;
    let discovered = discovers.then(|| parameters.iter().map(|group| group.count).collect());
    Ok(Found { groups, remainder, discovered })
}

impl ResolvedResources {
    fn find(&self, driver: &Driver) -> Result<Found, Code> {
        let whole = match self.origin {
            ResolvedOrigin::Device(device) => driver.device_resource(device, kind::SM)?,
            ResolvedOrigin::Green(green) => driver.green_resource(green, kind::SM)?,
        };
        let mut found = Found { groups: vec![whole], remainder: None, discovered: None };
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

    /// The driver's resources. Work queues of a device are those of its context `context`.
    pub(crate) fn all(
        &self,
        driver: &Driver,
        context: Option<Handle>,
        device: i32,
    ) -> Result<Vec<DevResource>, Code> {
        let found = self.find(driver)?;
        let first = self.splits.last().map_or(Pick::Group(0), |(_, pick)| *pick);
        let picks = core::iter::once(first).chain(self.more.iter().copied());
        let mut resources = picks.map(|pick| found.pick(pick)).collect::<Result<Vec<_>, _>>()?;
        resources.extend(match self.queues {
            ResolvedQueues::Any => None,
            ResolvedQueues::Config { limit, scope } => {
                let mut config = driver.device_resource(device, kind::WORKQUEUE_CONFIG)?;
                config.value[1] = limit;
                config.value[2] = scope;
                Some(config)
            }
            ResolvedQueues::Of(ResolvedOrigin::Device(_)) => {
                let context = context.ok_or(code::INVALID_CONTEXT)?;
                Some(driver.context_resource(context, kind::WORKQUEUE)?)
            }
            ResolvedQueues::Of(ResolvedOrigin::Green(green)) => {
                Some(driver.green_resource(green, kind::WORKQUEUE)?)
            }
        });
        Ok(resources)
    }
}
