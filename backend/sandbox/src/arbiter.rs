//! The filter of `sluice-arbiter`. It uses a driver for as long as it lives. Its own code ends workers, waits for their ends, and passes
//! memory on.

use crate::{
    common,
    driver::{self, DriverList},
    filter::{FilterProfile, Rule},
    ioctls::DriverUser,
};
use libc::*;

pub(crate) fn profile(list: DriverList) -> FilterProfile {
    let mut ours = common::rules();
    ours.extend(common::events());
    ours.extend([
        common::passing_on(),
        common::descriptors(&[F_ADD_SEALS]),
        common::killing("ending a worker that breaks the custody protocol"),
        // Neither credentials nor a pidfd of the other end.
        Rule::exactly(
            SYS_setsockopt,
            &[&[(1, SOL_SOCKET), (2, SO_SNDBUF)]],
            "a small buffer towards each worker",
        ),
        common::memory_file("the pages on which a worker reads its quota and its permit"),
        Rule::any(SYS_ftruncate, "the length of such a page, and of a log of receipts"),
        Rule::of_self(SYS_prlimit64, "the limit of descriptors, which are shared out among VMs"),
        Rule::any(SYS_getpid, "the process whose bytes in the driver are its own"),
    ]);
    driver::profile(ours, list, DriverUser::Arbiter)
}
