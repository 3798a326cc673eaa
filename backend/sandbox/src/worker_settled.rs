//! The filter of `sluice-worker` while it serves a guest, with a driver that opens nothing any more: no files, no sockets, no
//! code.

use crate::{
    common,
    filter::{Profile, Rule},
    worker,
};

/// `libc::TCGETS`, whose type differs between C libraries.
const TCGETS: i32 = 0x5401;

pub(crate) fn profile() -> Profile {
    let mut allowed = worker::own();
    allowed.extend(common::data_only());
    allowed.push(Rule::one_of(libc::SYS_ioctl, 1, &[TCGETS], "whether standard error is a terminal"));
    Profile::Allow { allowed, absent: common::no_files() }
}
