//! The filter of `sluice-worker` from its start until its driver is initialised. A driver opens devices, reads files and loads
//! code; it never needs another process, another program, or a way into one.

use crate::{
    common,
    filter::{FilterProfile, Rule},
};
use libc::*;

/// Commands with which a descriptor that every process has reaches other processes: typing into the terminal that standard error may
/// be, and sending signals to a chosen process.
pub(crate) const REACHING_OUT: [u32; 8] = {
    const FIOSETOWN: u32 = 0x8901;
    const SIOCSPGRP: u32 = 0x8902;
    [
        truncated(TIOCSTI),
        truncated(TIOCLINUX),
        truncated(TIOCSETD),
        truncated(TIOCSCTTY),
        truncated(TIOCCONS),
        truncated(FIOASYNC),
        FIOSETOWN,
        SIOCSPGRP,
    ]
};

#[expect(clippy::cast_possible_truncation, reason = "commands have 32 bits")]
const fn truncated(command: Ioctl) -> u32 {
    command as u32
}

/// Calls of the worker itself, at any time.
pub(crate) fn own() -> Vec<Rule> {
    let mut rules = common::rules();
    rules.extend(common::identity());
    rules.extend([
        Rule::any(SYS_poll, "waiting for a few descriptors"),
        Rule::any(SYS_readv, "library code that reads records"),
        Rule::any(SYS_writev, "the log of libraries on stderr"),
        Rule::any(SYS_pread64, "a driver's memory file"),
        Rule::any(SYS_pwrite64, "a driver's memory file"),
        Rule::any(SYS_recvfrom, "messages without descriptors"),
        Rule::any(SYS_sendto, "messages without descriptors"),
        common::shutdown("the end of the session"),
        Rule::any(SYS_lseek, "the length of a page list"),
        Rule::any(SYS_ftruncate, "the length of memory files"),
        Rule::any(SYS_fallocate, "giving pages of memory files back"),
        Rule::any(SYS_fstatfs, "the kind of memory of a file"),
        Rule::any(SYS_memfd_create, "memory files of a driver"),
        Rule::any(SYS_flock, "a driver's memory file, shared by processes"),
        Rule::any(SYS_dup, "descriptors that are exported"),
        Rule::one_of(SYS_dup2, 1, &[1, 2], "the output and reports of kernels go to the guest"),
        Rule::any(SYS_pipe2, "wake-ups inside a driver"),
        Rule::any(SYS_timerfd_create, "deadlines"),
        Rule::any(SYS_timerfd_settime, "deadlines"),
        Rule::any(SYS_nanosleep, "waiting of libraries"),
        Rule::any(SYS_getcpu, "choosing a queue by processor"),
        Rule::any(SYS_sched_setaffinity, "binding of a driver's threads"),
        Rule::any(SYS_sched_getparam, "priority of threads"),
        Rule::any(SYS_sched_getscheduler, "priority of threads"),
        Rule::any(SYS_sched_setscheduler, "priority of a driver's threads"),
        Rule::any(SYS_sysinfo, "the amount of the host's memory"),
        Rule::one_of(SYS_prlimit64, 0, &[0], "limits of its own; bounds of the stack"),
        Rule::any(SYS_uname, "version of the kernel"),
        Rule::any(SYS_times, "processor time"),
        Rule::any(SYS_getrusage, "processor time"),
        Rule::any(SYS_mlock, "pages of a driver"),
        Rule::any(SYS_munlock, "pages of a driver"),
        Rule::any(SYS_mincore, "checking that an address is mapped"),
        Rule::any(SYS_msync, "checking that an address is mapped"),
        Rule::any(SYS_membarrier, "fences between threads and a device"),
        Rule::any(SYS_mbind, "host memory near a GPU"),
        Rule::any(SYS_get_mempolicy, "the NUMA node of host memory"),
        Rule::any(SYS_set_mempolicy, "host memory near a GPU"),
        Rule::any(SYS_rt_sigtimedwait, "threads that take signals"),
        Rule::one_of(
            SYS_tgkill,
            0,
            &[std::process::id().cast_signed()],
            "ending itself by a signal; any other target is refused, because workers without separate users could kill other processes",
        ),
        Rule::one_of(
            SYS_kill,
            1,
            &[0],
            "checking that another user of a driver's memory file still lives; no signal is sent",
        ),
        Rule::any(SYS_getpriority, "priority of threads"),
    ]);
    rules.extend(common::settings(&[
        F_DUPFD_CLOEXEC,
        F_DUPFD,
        F_GET_SEALS,
        F_ADD_SEALS,
        F_SETLK,
        F_GETLK,
        F_OFD_GETLK,
        F_OFD_SETLK,
        F_OFD_SETLKW,
    ]));
    rules
}

pub(crate) fn profile() -> FilterProfile {
    let mut allowed = own();
    allowed.retain(|rule| rule.call != SYS_prctl);
    allowed.extend([
        Rule::any(SYS_mmap, "loading a driver: its code is mapped"),
        Rule::any(SYS_mprotect, "loading a driver: its tables become read-only"),
        Rule::any(SYS_open, "files of a driver"),
        Rule::any(SYS_openat, "devices, libraries and files of a driver"),
        Rule::any(SYS_stat, "files of a driver"),
        Rule::any(SYS_lstat, "files of a driver"),
        Rule::any(SYS_statx, "files of a driver"),
        Rule::any(SYS_newfstatat, "loading libraries"),
        Rule::any(SYS_statfs, "file systems that a driver queries"),
        Rule::any(SYS_access, "checking that devices and files exist"),
        Rule::any(SYS_faccessat, "checking that devices and files exist"),
        Rule::any(SYS_faccessat2, "checking that devices and files exist"),
        Rule::any(SYS_readlink, "paths of devices and of the driver"),
        Rule::any(SYS_readlinkat, "paths of devices and of the driver"),
        Rule::any(SYS_getcwd, "relative paths"),
        Rule::any(SYS_getdents64, "lists of devices"),
        Rule::any(SYS_mkdir, "a driver's cache of compiled code"),
        Rule::any(SYS_unlink, "unlinking a driver's memory file"),
        Rule::any(SYS_rename, "a driver's cache of compiled code"),
        Rule::one_of(
            SYS_socket,
            0,
            &[AF_UNIX],
            "a driver connects to its services on Unix sockets; never to the network",
        ),
        Rule::any(SYS_connect, "a driver connects to its services on Unix sockets"),
        Rule::any(SYS_bind, "a driver's event channel"),
        Rule::none_of(
            SYS_ioctl,
            1,
            &REACHING_OUT,
            "a real driver consists of ioctls; its commands must be listed for each branch of the driver",
        ),
        Rule::any(SYS_prctl, "entering the second filter; names of threads"),
        Rule::any(SYS_seccomp, "entering the second filter"),
        Rule::any(SYS_arch_prctl, "start-up of libraries"),
        Rule::any(SYS_set_tid_address, "start-up of libraries"),
    ]);
    FilterProfile::Allow { allowed, absent: common::absent() }
}
