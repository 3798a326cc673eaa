//! `sluice-worker` while it serves a guest, with a driver that opens nothing any more: no files, no sockets, no code.

use crate::{
    common,
    filter::{Profile, Rule},
    worker,
};
use libc::SYS_openat;

pub(crate) fn profile() -> Profile {
    let mut allowed = worker::own();
    allowed.extend(common::data_only());
    let mut absent = common::absent();
    absent.push(Rule::any(
        SYS_openat,
        "the allocator asks files of the kernel how to manage its heaps, and copes without",
    ));
    Profile::Allow { allowed, absent }
}
