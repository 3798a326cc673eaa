//! `sluice-worker` while it serves a guest, with a driver that opens nothing any more: no files, no sockets, no code.

use crate::{common, filter::Profile, worker};

pub(crate) fn profile() -> Profile {
    let mut allowed = worker::own();
    allowed.extend(common::data_only());
    Profile::Allow { allowed, absent: common::no_files() }
}
