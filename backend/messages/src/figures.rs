//! The figures of an arbiter: totals and sums that it counts, that its messages carry whole, and that `sluiced` shows.
//!
//! A figure is a field here, the place in the arbiter that counts it, and the place in `sluiced` that shows it.

use serde::{Deserialize, Serialize};
use sluice_protocol::field::{Field, FieldError, Reader, Writer};

/// Declares groups of figures. A message has room for seven words beside its type. A file of an earlier version may lack a figure.
macro_rules! figures {
    ($($(#[$doc:meta])* $name:ident { $($(#[$note:meta])* $field:ident,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$note])* pub $field: u64,)+
        }

        impl $name {
            /// Combines each figure with the other's.
            #[must_use]
            pub fn combine(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
                Self { $($field: with(self.$field, other.$field)),+ }
            }
        }

        impl<'a> Field<'a> for $name {
            fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                [$(self.$field),+].into_iter().try_for_each(|figure| writer.word(figure))
            }

            fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
                Ok(Self { $($field: reader.word()?),+ })
            }
        }
    )+};
}

figures! {
    /// The memory of a unit, in bytes.
    UnitBytes {
        /// Memory in custody.
        total,
        /// The lent part.
        lent,
        /// The clean part.
        clean,
        /// The part that waits to be scrubbed.
        dirty,
        /// Memory that is released for growth of drivers.
        headroom,
        /// The part that is not proven clean after all tries, and never lent again.
        suspect,
    }
    /// A VM's use of a unit's time in its epoch, in nanoseconds. No figure decreases.
    VmTime {
        /// Charged GPU time.
        used,
        /// The part of the charged time in which other VMs were admitted beside it.
        overlapped,
        /// Time in which it had work and had to wait for its turn.
        waited,
        /// Number of its turns.
        turns,
    }
    /// The work of a VM in its epoch, as its workers report it. No figure decreases. The reports are not verified, but bounded by the
    /// work that a device could do in that time.
    WorkCounts {
        /// Kernels launched.
        launches,
        /// Number of copies.
        copies,
        /// Bytes copied.
        copied,
        /// Number of guest calls that reached a worker.
        calls,
    }
    /// The care for a unit's memory since the start of its arbiter.
    Upkeep {
        /// Number of scrubbed chunks.
        scrubs,
        /// Bytes of these chunks.
        scrubbed,
        /// Nanoseconds spent on scrubs.
        took,
        /// Bytes by which the driver's figure and the ledger's differed at the last comparison; 0 if normal.
        drift,
    }
}
