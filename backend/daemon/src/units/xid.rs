//! The action for an error that a GPU reports, by the vendor's catalogue of Xids.
//!
//! The number selects the action. A unit is taken out of service only for an error that is documented to concern the device: a
//! number that is not in the catalogue is reported, and not held against every VM of the unit.

/// The subject of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum XidClass {
    /// Caused by one process: its session ends if the report names it, and the device continues.
    Session,
    /// Counted only.
    Note,
    /// The device needs a reset.
    Reset,
    /// A link between devices.
    Link,
    /// The host must act.
    Host,
    /// The driver reports the needed recovery separately.
    Recovery,
    /// Not in the catalogue.
    Unknown,
}

impl XidClass {
    /// The class of an error.
    pub(crate) fn of(xid: u32) -> Self {
        match xid {
            8
            | 11
            | 13
            | 25
            | 31
            | 32
            | 39..=41
            | 60
            | 68..=72
            | 75..=77
            | 80
            | 82..=86
            | 88
            | 89
            | 94
            | 96..=105
            | 126..=135 => Self::Session,
            // 45 follows kills by Sluice.
            14 | 37 | 38 | 43..=45 | 63 | 66 | 67 | 92 | 93 | 106..=108 | 121 | 137 | 141 => Self::Note,
            46 | 48 | 62 | 64 | 95 | 109 | 110 | 119 | 120 | 136 | 140 | 143 | 155 | 156 | 158 => Self::Reset,
            74 | 144..=150 => Self::Link,
            79 | 151 => Self::Host,
            154 => Self::Recovery,
            _ => Self::Unknown,
        }
    }

    /// All classes, with their names in metrics.
    pub(crate) const ALL: [(Self, &'static str); 7] = [
        (Self::Session, "session"),
        (Self::Note, "note"),
        (Self::Reset, "reset"),
        (Self::Link, "link"),
        (Self::Host, "host"),
        (Self::Recovery, "recovery"),
        (Self::Unknown, "unknown"),
    ];

    /// The reason for taking the unit out of service, if the class requires that.
    pub(crate) fn quarantine(self) -> Option<&'static str> {
        match self {
            Self::Session | Self::Note | Self::Unknown => None,
            Self::Reset => Some("the GPU needs a reset"),
            Self::Link => Some("a link between GPUs has failed"),
            Self::Host => Some("the host has lost the GPU"),
            Self::Recovery => Some("the GPU's driver requests recovery"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: F42
    #[test]
    fn table_matches_the_catalogue_and_other_numbers_are_unknown() {
        let named = |class| (0..=400).filter(|xid| XidClass::of(*xid) == class).collect::<Vec<u32>>();
        assert_eq!(named(XidClass::Session).len(), 5 + 1 + 3 + 1 + 5 + 3 + 1 + 5 + 2 + 1 + 10 + 10);
        assert_eq!(
            named(XidClass::Note),
            [14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141]
        );
        assert_eq!(
            named(XidClass::Reset),
            [46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158]
        );
        assert_eq!(named(XidClass::Link), [74, 144, 145, 146, 147, 148, 149, 150]);
        assert_eq!(named(XidClass::Host), [79, 151]);
        for xid in [0, 1, 42, 142, 157, 159, 1000, u32::MAX] {
            assert_eq!(XidClass::of(xid), XidClass::Unknown, "{xid}");
        }
    }

    // Promise: F42
    #[test]
    fn unit_stays_in_service_unless_the_catalogue_attributes_the_error_to_the_device() {
        for xid in 0..=400 {
            let stays = matches!(XidClass::of(xid), XidClass::Session | XidClass::Note | XidClass::Unknown);
            assert_eq!(XidClass::of(xid).quarantine().is_none(), stays, "{xid}");
        }
    }
}
