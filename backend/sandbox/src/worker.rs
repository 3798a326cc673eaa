//! The filters of `sluice-worker`. The first holds from its start: a driver opens devices, reads files and loads code; it never needs
//! another process, another program, or a way into one. The second holds while it serves a guest, with a driver that opens nothing
//! more: no files, no sockets, no code.
//!
//! A worker passes no descriptor on: it has no call that sends one, and none that makes a socket. The sockets that it has are those to its
//! device and to its arbiters.

use crate::{
    common,
    driver::{self, DriverList},
    filter::{AllowList, FilterProfile, Rule},
    ioctls::DriverUser,
};
use libc::*;

/// The request of `isatty`, whose type differs between C libraries.
const IS_TERMINAL: i32 = 0x5401;
/// `SECCOMP_FILTER_FLAG_TSYNC`, which `libc` declares with another width.
const EVERY_THREAD: i32 = 1;

/// Most descriptors of a `ppoll`: a socket for each of a VM's GPUs, and a few.
const POLLED: u32 = 32;

/// Calls of the worker itself, at any time.
fn ours() -> Vec<Rule> {
    let mut rules = common::rules();
    rules.retain(|rule| rule.call != SYS_ppoll);
    rules.extend([
        common::polling(POLLED),
        common::descriptors(&[]),
        common::wake_ups(),
        Rule::any(SYS_pread64, "page lists of the guest's memory"),
        Rule::any(SYS_writev, "the C library's message before it ends the process").rare(),
        Rule::one_of(SYS_dup2, 1, &[1, 2], "the output and reports of kernels go to the guest"),
        Rule::only(SYS_pipe2, &[(1, O_CLOEXEC | O_NONBLOCK)], "the output and reports of kernels"),
        Rule::one_of(SYS_ioctl, 1, &[IS_TERMINAL], "checking if standard error is a terminal, before a report of a panic").rare(),
        Rule::any(SYS_getpid, "its number, by which the arbiter finds it in the driver's lists"),
        Rule::one_of(
            SYS_tgkill,
            0,
            &[std::process::id().cast_signed()],
            "ending itself by a signal; any other target is refused, because workers without separate users could kill other processes",
        )
        .rare(),
    ]);
    rules
}

pub(crate) fn profile(list: DriverList) -> FilterProfile {
    let mut ours = ours();
    if list == DriverList::Software {
        ours.retain(|rule| rule.call != SYS_prctl);
        ours.extend([
            Rule::exactly(
                SYS_prctl,
                &[&[(0, PR_SET_NAME)], &[(0, PR_SET_NO_NEW_PRIVS)], &[(0, PR_SET_DUMPABLE), (1, 0)]],
                "names of threads; entering the second filter",
            ),
            Rule::exactly(
                SYS_seccomp,
                &[&[(0, SECCOMP_SET_MODE_FILTER.cast_signed()), (1, EVERY_THREAD)]],
                "entering the second filter, without a process that could answer for the kernel",
            ),
        ]);
    }
    driver::profile(ours, list, DriverUser::Worker)
}

/// With a driver that needs no more files; entered on top of the first.
pub(crate) fn settled() -> FilterProfile {
    FilterProfile::Allow(AllowList::strict(ours(), driver::software(), common::no_files()))
}
