//! The filter of `sluice-worker` from its start until its driver is initialised. A driver opens devices, reads files and loads
//! code; it can never need another process, another program, or a way into one.

use crate::{
    common,
    filter::{Profile, Rule},
};
use libc::*;

/// Commands by which a descriptor that every process has reaches others: typing into the terminal that standard error may
/// be, and having signals sent to a process of choice.
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

/// What the worker does itself, for ever.
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
        Rule::any(SYS_fstatfs, "which kind of memory a file is"),
        Rule::any(SYS_memfd_create, "memory files of a driver"),
        Rule::any(SYS_flock, "a driver's memory file, shared by processes"),
        Rule::any(SYS_dup, "descriptors that are exported"),
        Rule::one_of(SYS_dup2, 1, &[1, 2], "what kernels print and report goes to the guest"),
        Rule::any(SYS_pipe2, "wake-ups inside a driver"),
        Rule::any(SYS_timerfd_create, "deadlines"),
        Rule::any(SYS_timerfd_settime, "deadlines"),
        Rule::any(SYS_nanosleep, "waiting of libraries"),
        Rule::any(SYS_getcpu, "choosing a queue by processor"),
        Rule::any(SYS_sched_setaffinity, "threads a driver binds"),
        Rule::any(SYS_sched_getparam, "priority of threads"),
        Rule::any(SYS_sched_getscheduler, "priority of threads"),
        Rule::any(SYS_sched_setscheduler, "priority of threads a driver makes"),
        Rule::any(SYS_sysinfo, "how much memory the host has"),
        Rule::one_of(SYS_prlimit64, 0, &[0], "limits of its own; bounds of the stack"),
        Rule::any(SYS_uname, "version of the kernel"),
        Rule::any(SYS_times, "processor time"),
        Rule::any(SYS_getrusage, "processor time"),
        Rule::any(SYS_mlock, "pages of a driver"),
        Rule::any(SYS_munlock, "pages of a driver"),
        Rule::any(SYS_mincore, "whether an address is mapped"),
        Rule::any(SYS_msync, "whether an address is mapped"),
        Rule::any(SYS_membarrier, "fences between threads and a device"),
        Rule::any(SYS_mbind, "host memory near a GPU"),
        Rule::any(SYS_get_mempolicy, "where host memory lies"),
        Rule::any(SYS_set_mempolicy, "host memory near a GPU"),
        Rule::any(SYS_rt_sigtimedwait, "threads that take signals"),
        Rule::one_of(
            SYS_tgkill,
            0,
            &[std::process::id().cast_signed()],
            "ending itself by a signal; without users of their own it could end every other process here",
        ),
        Rule::one_of(
            SYS_kill,
            1,
            &[0],
            "whether another user of a driver's memory file still lives; no signal is sent",
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

pub(crate) fn profile() -> Profile {
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
        Rule::any(SYS_statfs, "file systems a driver asks about"),
        Rule::any(SYS_access, "which devices and files exist"),
        Rule::any(SYS_faccessat, "which devices and files exist"),
        Rule::any(SYS_faccessat2, "which devices and files exist"),
        Rule::any(SYS_readlink, "paths of devices and of the driver"),
        Rule::any(SYS_readlinkat, "paths of devices and of the driver"),
        Rule::any(SYS_getcwd, "relative paths"),
        Rule::any(SYS_getdents64, "lists of devices"),
        Rule::any(SYS_mkdir, "a driver's cache of compiled code"),
        Rule::any(SYS_unlink, "a driver's memory file loses its name"),
        Rule::any(SYS_rename, "a driver's cache of compiled code"),
        Rule::one_of(
            SYS_socket,
            0,
            &[AF_UNIX],
            "a driver looks for its services on Unix sockets; never the network",
        ),
        Rule::any(SYS_connect, "a driver looks for its services on Unix sockets"),
        Rule::any(SYS_bind, "a driver's event channel"),
        Rule::none_of(
            SYS_ioctl,
            1,
            &REACHING_OUT,
            "a real driver is made of it; its commands are to be listed per branch of the driver",
        ),
        Rule::any(SYS_prctl, "entering the second filter; names of threads"),
        Rule::any(SYS_seccomp, "entering the second filter"),
        Rule::any(SYS_arch_prctl, "start-up of libraries"),
        Rule::any(SYS_set_tid_address, "start-up of libraries"),
    ]);
    Profile::Allow { allowed, absent: common::absent() }
}
