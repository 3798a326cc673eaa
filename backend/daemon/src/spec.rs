//! The settings of a VM as units, arbiters and the launcher know them: derived from a [`VmSpec`], and checked for whether they
//! are possible.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use sluice_api::{ByteSize, VmSpec, v1::Priority};
use sluice_messages::control::{self, Shares};
use sluice_protocol::limits;

/// A project or an organisation, with what all its VMs together may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ancestor {
    /// Its number, which no other project or organisation has.
    pub id: u32,
    /// The organisation of a project.
    #[serde(default)]
    pub organisation: u32,
    /// Bytes of device memory of all its VMs on all units.
    pub memory: ByteSize,
    /// Whether it is a project.
    #[serde(skip)]
    pub is_project: bool,
}

/// What arbiters are told of its share of time.
pub(crate) fn shares(spec: &VmSpec) -> Shares {
    let usual = Shares::default();
    let or = |value: u32, usual: u32| if value == 0 { usual } else { value };
    Shares {
        weight: or(spec.weight, usual.weight),
        priority: match spec.priority {
            Priority::Low => control::Priority::Low,
            Priority::Normal => control::Priority::Normal,
            Priority::High => control::Priority::High,
        },
        cap: or(spec.cap, usual.cap),
        guarantee: spec.guarantee,
        hang: spec.hang_after.saturating_mul(1000),
    }
}

/// Fills in what it does not say itself, and checks the result.
pub(crate) fn resolve(
    spec: &mut VmSpec,
    memory: ByteSize,
    organisations: &[Ancestor],
    projects: &[Ancestor],
) -> Result<()> {
    let id = spec.id;
    ensure!(id > 0, "0 is no number of a VM: probes of units have it");
    if spec.memory.0 == 0 {
        spec.memory = memory;
    }
    ensure!(
        spec.memory.0 == 0 || spec.guaranteed.0 <= spec.memory.0,
        "VM {id} is guaranteed more memory than it may have"
    );
    let Shares { weight, cap, guarantee, .. } = shares(spec);
    ensure!(weight <= limits::WEIGHT, "the weight of VM {id} can be {} at most", limits::WEIGHT);
    ensure!(cap <= 1000, "the cap of VM {id} is in thousandths of a unit's time");
    ensure!(guarantee <= cap, "VM {id} is guaranteed more of a unit's time than it may have");
    if spec.project != 0 {
        let project = projects.iter().find(|project| project.id == spec.project);
        let project =
            project.with_context(|| format!("VM {id} is of project {}, which there is not", spec.project))?;
        ensure!(
            spec.organisation == 0 || spec.organisation == project.organisation,
            "VM {id} is of another organisation than its project"
        );
        spec.organisation = project.organisation;
    }
    let organisation = spec.organisation;
    ensure!(
        organisation == 0 || organisations.iter().any(|known| known.id == organisation),
        "VM {id} is of organisation {organisation}, which there is not"
    );
    Ok(())
}

/// Its project and organisation as arbiters are told of them.
pub(crate) const fn ancestors(spec: &VmSpec) -> u64 {
    ((spec.organisation as u64) << 32) | spec.project as u64
}

/// How long after a fence it is admitted again by itself, if ever.
pub(crate) fn hold_off(spec: &VmSpec) -> Option<Duration> {
    (spec.readmit_after > 0).then(|| Duration::from_secs(spec.readmit_after.into()))
}
