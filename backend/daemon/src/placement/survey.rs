//! The devices of the host, and the ways in which each can be used: read from NVML, or from the configuration.

use std::{collections::BTreeMap, sync::Arc};

use sluice_messages::inventory::{PciAddress, Switch, Visible};
use sluice_placement::{Attributes, Division, Geometry, Profile, SlicePlacement as Position};
use sluice_protocol::limits;

use crate::{
    configuration::Configuration,
    units::inventory::{AskError, InstanceKind, Inventory},
    units::unit::UnitPlace,
};

/// The number of units if neither NVML nor the configuration gives it.
const UNITS: u32 = 1;
/// The memory of a device whose size is unknown, in bytes.
const UNKNOWN: u64 = 1 << 60;

/// A device, as found at the start.
#[derive(Clone, Debug)]
pub(crate) struct FoundDevice {
    pub(crate) ordinal: u32,
    pub(crate) uuid: [u8; 16],
    /// `None` if NVML does not report it.
    pub(crate) name: Option<String>,
    pub(crate) node: Option<u32>,
    pub(crate) pci: PciAddress,
    pub(crate) division: Division,
    /// True if the division changes with the next reset.
    pub(crate) switching: bool,
    /// Names of the kinds of instances into which it can be divided.
    pub(crate) kinds: BTreeMap<u32, String>,
}

impl FoundDevice {
    /// True if the whole device is one unit.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.division, Division::Whole { .. })
    }

    /// The place of a unit that is the whole device.
    pub(crate) fn place(&self, alone: bool) -> UnitPlace {
        let visible = match self.name {
            // A process on a host with one device needs no choice.
            _ if alone => Visible::Host,
            Some(_) => Visible::Gpu(self.uuid),
            None => Visible::Ordinal(self.ordinal),
        };
        UnitPlace { visible, ..UnitPlace::device(self.ordinal) }
    }
}

/// Finds the devices, and the ways in which each can be used.
pub(crate) async fn survey(configuration: &Configuration, inventory: Option<&Inventory>) -> Vec<FoundDevice> {
    let counted = match inventory {
        Some(inventory) if configuration.units.is_none() => {
            let counted = inventory.units().await;
            if counted.is_none() {
                tracing::error!("NVML does not report the number of devices");
            }
            counted
        }
        _ => None,
    };
    let count = configuration.units.or(counted).unwrap_or(UNITS).min(limits::DEVICES);
    if count == 0 {
        tracing::warn!("there is no unit: VMs have no devices");
    }
    // After one device did not answer, the others are not queried.
    let mut inventory = inventory.filter(|_| configuration.units.is_some() || counted.is_some());
    let mut all = Vec::new();
    for ordinal in 0..count {
        let found = match inventory {
            Some(asked) => look(asked, ordinal, configuration.reserve).await,
            None => Ok(None),
        };
        if found.is_err() {
            inventory = None;
        }
        all.push(found.ok().flatten().unwrap_or_else(|| FoundDevice {
            ordinal,
            // A UUID of no real device; the same after a restart.
            uuid: u128::from(ordinal).to_be_bytes(),
            name: None,
            node: None,
            pci: PciAddress::default(),
            division: Division::Whole { memory_bytes: UNKNOWN, multiprocessors: u32::MAX },
            switching: false,
            kinds: BTreeMap::new(),
        }));
    }
    all
}

/// The facts of a device from NVML; `None` if NVML refuses.
pub(super) async fn look(
    inventory: &Inventory,
    ordinal: u32,
    reserve: u64,
) -> Result<Option<FoundDevice>, AskError> {
    let silent = |error| if error == AskError::Silent { Err(error) } else { Ok(None) };
    let device = match inventory.device(ordinal).await {
        Ok(device) => device,
        Err(error) => return silent(error),
    };
    let (divided, pending) = match inventory.health(ordinal).await {
        Ok(health) => (health.mig.0 == Switch::On, health.mig.1 == Switch::On),
        Err(error) => return silent(error),
    };
    let mut found = FoundDevice {
        ordinal,
        uuid: device.uuid,
        name: Some(device.name),
        node: device.node,
        pci: device.pci,
        division: Division::Whole {
            memory_bytes: device.memory.saturating_sub(reserve),
            multiprocessors: if device.multiprocessors == 0 { u32::MAX } else { device.multiprocessors },
        },
        switching: divided != pending,
        kinds: BTreeMap::new(),
    };
    if divided {
        let kinds = match inventory.kinds(ordinal).await {
            Ok(kinds) => kinds,
            Err(error) => return silent(error),
        };
        found.kinds = kinds.iter().map(|kind| (kind.profile.id, kind.name.clone())).collect();
        match Geometry::from_profiles(kinds.iter().map(profile).collect()) {
            Ok(geometry) => found.division = Division::Mig(Arc::new(geometry)),
            Err(error) => {
                tracing::error!(gpu = ordinal, %error, "the GPU is in MIG mode and cannot be divided");
                return Ok(None);
            }
        }
    }
    Ok(Some(found))
}

/// Converts a kind of instance for the plan.
fn profile(kind: &InstanceKind) -> Profile {
    let reported = &kind.profile;
    let engines = reported.engines;
    Profile {
        id: reported.id,
        memory_slices: kind.places.first().map_or(0, |place| place.size),
        compute_slices: u8::try_from(reported.slices).unwrap_or(u8::MAX),
        instances: u16::try_from(reported.instances).unwrap_or(u16::MAX),
        placements: kind
            .places
            .iter()
            .map(|place| Position { start: place.start, size: place.size })
            .collect(),
        memory_bytes: reported.memory,
        multiprocessors: reported.multiprocessors,
        attributes: Attributes {
            copy_engines: engines.copy.into(),
            decoders: engines.decoder.into(),
            encoders: engines.encoder.into(),
            jpeg: engines.jpeg.into(),
            optical_flow: engines.ofa.into(),
        },
    }
}
