//! The filter of `sluice-arbiter`. It uses a driver for as long as it lives, so it may do all that a worker may before its driver
//! is settled: a driver opens devices, and an export can open a file. In addition it ends workers and waits for their ends.

use crate::{
    filter::{FilterProfile, Rule},
    worker,
};
use libc::SYS_pidfd_send_signal;

pub(crate) fn profile() -> FilterProfile {
    let FilterProfile::Allow { mut allowed, absent } = worker::profile() else { return worker::profile() };
    allowed.extend([
        Rule::any(SYS_pidfd_send_signal, "ending a worker that breaks the custody protocol"),
        // Neither credentials nor a pidfd of the other end.
        Rule::exactly(
            libc::SYS_setsockopt,
            &[&[(1, libc::SOL_SOCKET), (2, libc::SO_SNDBUF)]],
            "a small buffer towards each worker",
        ),
    ]);
    FilterProfile::Allow { allowed, absent }
}
