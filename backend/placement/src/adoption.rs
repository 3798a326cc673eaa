//! Adoption after a restart: decides which of the existing instances are ours.
//!
//! An instance is ours if a record names it: same GPU, same numbers, same profile, position and UUID. UUIDs and numbers can
//! come back after a destroy and a create, so neither alone proves anything. An instance without a record is foreign, and is
//! never touched.

use std::collections::BTreeSet;

use crate::axis::SlicePlacement;
use crate::record::{GpuUuid, Partition, RecordPhase, UnitRecord};

/// An instance as the driver lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedInstance {
    /// Its GPU.
    pub gpu: GpuUuid,
    /// Number of the GPU instance.
    pub instance: u32,
    /// Number of its only compute instance, if it has exactly one.
    pub compute_instance: Option<u32>,
    /// UUID of the MIG device, if one exists.
    pub uuid: Option<[u8; 16]>,
    /// Profile, by the driver's number.
    pub profile: u32,
    /// Position on the axis of slices.
    pub placement: SlicePlacement,
    /// Compute slices, if its profile is not known.
    pub compute_slices: u8,
}

/// Matches of records and instances: indices into the records and the list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches {
    /// Record and instance: ours.
    pub adopted: Vec<(usize, usize)>,
    /// A creation was recorded but not its end, and an instance lies exactly there: probably ours, but possibly by coincidence
    /// not. It is not adopted, because it may be half made, and its creation was never reported.
    pub unconfirmed: Vec<(usize, usize)>,
    /// Instances without a record.
    pub foreign: Vec<usize>,
    /// Records of instances that do not exist.
    pub lost: Vec<usize>,
}

/// Error: the driver lists an instance twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("instance {0} of a GPU is listed twice")]
pub struct ListedTwice(pub u32);

/// Matches the records with the existing instances. Records of whole GPUs are left out: they have no instance.
pub fn match_instances(records: &[UnitRecord], listed: &[ListedInstance]) -> Result<Matches, ListedTwice> {
    let mut seen = BTreeSet::new();
    if let Some(twice) = listed.iter().find(|instance| !seen.insert((instance.gpu, instance.instance))) {
        return Err(ListedTwice(twice.instance));
    }
    let mut matches = Matches::default();
    let mut taken = BTreeSet::new();
    // Records with a number first: a match by position alone gets only the rest.
    let mut order: Vec<usize> = (0..records.len()).collect();
    order.sort_by_key(|&at| records[at].identity.is_none());
    for at in order {
        let record = &records[at];
        let Partition::Instance { profile, placement } = record.partition else { continue };
        let found = listed.iter().enumerate().position(|(index, instance)| {
            let there =
                instance.gpu == record.gpu && instance.profile == profile && instance.placement == placement;
            let same = record.identity.as_ref().is_none_or(|identity| {
                // An instance whose destruction has begun may have lost its compute instance, and with it the UUID.
                let bare = instance.compute_instance.is_none()
                    && matches!(record.phase, RecordPhase::Closing | RecordPhase::Quarantined);
                instance.instance == identity.instance
                    && (bare
                        || (instance.compute_instance == Some(identity.compute_instance)
                            && instance.uuid == Some(identity.uuid)))
            });
            there && same && !taken.contains(&index)
        });
        match found {
            None => matches.lost.push(at),
            Some(index) => {
                taken.insert(index);
                if record.identity.is_some() && record.phase != RecordPhase::Reserved {
                    matches.adopted.push((at, index));
                } else {
                    matches.unconfirmed.push((at, index));
                }
            }
        }
    }
    matches.foreign = (0..listed.len()).filter(|index| !taken.contains(index)).collect();
    Ok(matches)
}
