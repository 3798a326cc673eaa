//! The filter of `sluice-worker` while it serves a guest, with a driver that opens nothing more: no files, no sockets, no
//! code.

use crate::{
    common,
    filter::{FilterProfile, Rule},
    worker,
};

/// `libc::TCGETS`, whose type differs between C libraries.
const TCGETS: i32 = 0x5401;

pub(crate) fn profile() -> FilterProfile {
    let mut allowed = worker::own();
    allowed.extend(common::data_only());
    allowed.push(Rule::one_of(libc::SYS_ioctl, 1, &[TCGETS], "checking if standard error is a terminal"));
    FilterProfile::Allow { allowed, absent: common::no_files() }
}
