//! The filter of the launcher. Filters are inherited, so this one has to allow all calls of a device or a worker and those
//! for starting and confining a program; it forbids the ways into other processes and into the kernel.

use crate::{
    attacks,
    filter::{FilterProfile, Rule},
};
use libc::*;

pub(crate) fn profile() -> FilterProfile {
    let mut denied = attacks::everywhere();
    denied.extend([
        Rule::one_of(SYS_shutdown, 0, &[0, 1, 2], "other processes share the standard streams"),
        Rule::exactly(
            SYS_fcntl,
            &[&[(0, 0), (1, F_SETFL)], &[(0, 1), (1, F_SETFL)], &[(0, 2), (1, F_SETFL)]],
            "other processes share the flags of the standard streams",
        ),
    ]);
    FilterProfile::Deny(denied)
}
