//! A VM of the configuration file or of a command line.

use std::{fmt, str::FromStr};

use serde::Deserialize;

use crate::{ByteSize, v1::Priority};

/// A VM of the configuration file or of a command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct VmSpec {
    /// Number of the VM.
    pub id: u32,
    /// True for programs of this host, which connect to the device themselves; there is no VM.
    #[serde(default)]
    pub direct: bool,
    /// Displays of its device, 0 or 1.
    #[serde(default, deserialize_with = "scanouts")]
    pub scanouts: u8,
    /// Quota of device memory on each unit; 0 for all of it.
    #[serde(default)]
    pub memory: ByteSize,
    /// Part of `memory` that is guaranteed to the VM. The rest is available while no other VM has it.
    #[serde(default)]
    pub guaranteed: ByteSize,
    /// Allowance beside the quota. Memory the driver takes for this VM is charged to it first.
    #[serde(default)]
    pub headroom: ByteSize,
    /// Limit of pinned guest memory; 0 for no limit.
    #[serde(default)]
    pub pinned: ByteSize,
    /// Number of its project; 0 for none.
    #[serde(default)]
    pub project: u32,
    /// Number of its organisation; 0 for that of its project, if any.
    #[serde(default)]
    pub organisation: u32,
    /// Seconds from a fence to automatic readmission; 0 for readmission by an operator only.
    #[serde(default)]
    pub readmit_after: u32,
    /// Share of GPU time relative to the weights of other VMs that have work at the same time; 0 for 100.
    #[serde(default)]
    pub weight: u32,
    /// Scheduling priority.
    #[serde(default)]
    pub priority: Priority,
    /// Upper limit of a unit's time in the long run, in thousandths; 0 for no limit.
    #[serde(default)]
    pub cap: u32,
    /// Guaranteed part of a unit's time in thousandths, available whenever the VM has work, whatever weights and priorities.
    #[serde(default)]
    pub guarantee: u32,
    /// Seconds without a completion of submitted work after which a worker is killed; 0 for never.
    #[serde(default)]
    pub hang_after: u32,
    /// Creation time, in seconds since 1970; 0 for a VM of the configuration file.
    #[serde(skip)]
    pub created: u64,
}

fn scanouts<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    match u8::deserialize(deserializer)? {
        count @ 0..=1 => Ok(count),
        count => Err(serde::de::Error::custom(format!("scanouts is {count}; it can be 0 or 1"))),
    }
}

/// The text does not describe a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a VM: its number, then any of `,direct`, `,scanouts=0|1`, `,memory=SIZE`, `,guaranteed=SIZE`, \
     `,headroom=SIZE`, `,pinned=SIZE`, `,project=N`, `,organisation=N`, `,readmit-after=SECONDS`, \
     `,weight=N`, `,priority=low|normal|high`, `,cap=THOUSANDTHS`, `,guarantee=THOUSANDTHS`, `,hang-after=SECONDS`"
)]
pub struct VmSpecError(String);

impl FromStr for VmSpec {
    type Err = VmSpecError;

    fn from_str(text: &str) -> Result<Self, VmSpecError> {
        let error = || VmSpecError(text.to_owned());
        let mut parts = text.split(',');
        let id = parts.next().and_then(|id| id.parse().ok()).ok_or_else(error)?;
        let mut spec = Self { id, ..Self::default() };
        for part in parts {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let size = || value.parse::<ByteSize>().map_err(|_| error());
            let number = || value.parse::<u32>().map_err(|_| error());
            match (name, value) {
                ("direct", "") if part == "direct" => spec.direct = true,
                ("scanouts", "0") => spec.scanouts = 0,
                ("scanouts", "1") => spec.scanouts = 1,
                ("memory", _) => spec.memory = size()?,
                ("guaranteed", _) => spec.guaranteed = size()?,
                ("headroom", _) => spec.headroom = size()?,
                ("pinned", _) => spec.pinned = size()?,
                ("project", _) => spec.project = number()?,
                ("organisation", _) => spec.organisation = number()?,
                ("readmit-after", _) => spec.readmit_after = number()?,
                ("weight", _) => spec.weight = number()?,
                ("priority", word) => spec.priority = word.parse().map_err(|_| error())?,
                ("cap", _) => spec.cap = number()?,
                ("guarantee", _) => spec.guarantee = number()?,
                ("hang-after", _) => spec.hang_after = number()?,
                _ => return Err(error()),
            }
        }
        Ok(spec)
    }
}

impl fmt::Display for VmSpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direct = if self.direct { ",direct" } else { "" };
        write!(formatter, "{}{direct},scanouts={}", self.id, self.scanouts)?;
        let sizes = [
            ("memory", self.memory),
            ("guaranteed", self.guaranteed),
            ("headroom", self.headroom),
            ("pinned", self.pinned),
        ];
        for (name, size) in sizes.into_iter().filter(|(_, size)| size.0 > 0) {
            write!(formatter, ",{name}={size}")?;
        }
        let numbers = [
            ("project", self.project),
            ("organisation", self.organisation),
            ("readmit-after", self.readmit_after),
            ("weight", self.weight),
            ("cap", self.cap),
            ("guarantee", self.guarantee),
            ("hang-after", self.hang_after),
        ];
        for (name, number) in numbers.into_iter().filter(|(_, number)| *number > 0) {
            write!(formatter, ",{name}={number}")?;
        }
        if self.priority != Priority::default() {
            write!(formatter, ",priority={}", self.priority)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_read_and_written_alike() {
        let everything = "9,scanouts=0,memory=3GiB,guaranteed=1GiB,headroom=600MiB,pinned=5,project=2,organisation=3,\
                          readmit-after=10,weight=7,cap=500,guarantee=250,hang-after=9,priority=high";
        for text in ["1,scanouts=0", "7,direct,scanouts=1", "4294967295,direct,scanouts=0", everything] {
            assert_eq!(text.parse::<VmSpec>().expect("a VM").to_string(), text);
        }
        assert_eq!("3".parse(), Ok(VmSpec { id: 3, ..VmSpec::default() }));
        for text in [
            "",
            "x",
            "-1",
            "1,",
            "1,scanouts=2",
            "4294967296",
            "1, direct",
            "1,direct=",
            "1,memory=",
            "1,memory=x",
            "1,priority=urgent",
            "1,weight=",
        ] {
            assert!(text.parse::<VmSpec>().is_err(), "{text:?} was taken");
        }
    }
}
