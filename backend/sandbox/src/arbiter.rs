//! The filter of `sluice-arbiter`. It holds a driver for as long as it lives, so it may do what a worker may before its driver
//! is settled: a driver opens devices, and an export can open a file. Beside that it ends workers and waits for their ends.

use crate::{
    filter::{Profile, Rule},
    worker,
};
use libc::SYS_pidfd_send_signal;

pub(crate) fn profile() -> Profile {
    let Profile::Allow { mut allowed, absent } = worker::profile() else { return worker::profile() };
    allowed.extend([
        Rule::any(SYS_pidfd_send_signal, "ending a worker that breaks the custody protocol"),
        // Never credentials or a pidfd of the other end.
        Rule::exactly(
            libc::SYS_setsockopt,
            &[&[(1, libc::SOL_SOCKET), (2, libc::SO_SNDBUF)]],
            "a small buffer towards each worker",
        ),
    ]);
    Profile::Allow { allowed, absent }
}
