//! The filter of `sluice-inventory`. The management library opens devices and reads files for as long as it lives; it never
//! needs another program, another process or a network. The device nodes have to exist: a library that would create them with a
//! helper program is killed.

use crate::{
    common,
    filter::{FilterProfile, Rule},
    worker::REACHING_OUT,
};
use libc::*;

pub(crate) fn profile() -> FilterProfile {
    let mut allowed = common::rules();
    allowed.extend(common::identity());
    allowed.extend(common::settings(&[
        F_DUPFD_CLOEXEC,
        F_SETLK,
        F_GETLK,
        F_OFD_GETLK,
        F_OFD_SETLK,
        F_OFD_SETLKW,
    ]));
    allowed.extend([
        // Loading the library.
        Rule::any(SYS_mmap, "the library's code, the memory it shares with the driver"),
        Rule::any(SYS_mprotect, "loading the library: its tables become read-only"),
        Rule::any(SYS_openat, "devices, libraries, and the kernel's files about processes"),
        Rule::any(SYS_open, "devices and files of the library"),
        Rule::any(SYS_stat, "the device of a node"),
        Rule::any(SYS_lstat, "the device of a node"),
        Rule::any(SYS_statx, "the device of a node"),
        Rule::any(SYS_newfstatat, "loading libraries"),
        Rule::any(SYS_fstatfs, "the kind of memory of a file"),
        Rule::any(SYS_access, "checking that devices and files exist"),
        Rule::any(SYS_faccessat, "checking that devices and files exist"),
        Rule::any(SYS_faccessat2, "checking that devices and files exist"),
        Rule::any(SYS_readlink, "paths of devices and of the library"),
        Rule::any(SYS_readlinkat, "paths of devices and of the library"),
        Rule::any(SYS_getcwd, "relative paths"),
        Rule::any(SYS_getdents64, "lists of devices and processes"),
        Rule::any(SYS_pread64, "configuration space of devices"),
        Rule::any(SYS_lseek, "files of the library"),
        Rule::any(SYS_poll, "waiting for sockets and for errors of devices"),
        Rule::any(SYS_writev, "the log of libraries on stderr"),
        Rule::none_of(
            SYS_ioctl,
            1,
            &REACHING_OUT,
            "a real driver consists of ioctls; its commands must be listed for each branch of the driver",
        ),
        // The software GPU's library: it may be the first user of a memory file.
        Rule::any(SYS_mkdir, "the software GPU's directory"),
        Rule::any(SYS_flock, "the software GPU's files, shared by processes"),
        Rule::any(SYS_ftruncate, "the length of the software GPU's files"),
        Rule::any(SYS_unlink, "unused memory files of the software GPU"),
        Rule::any(SYS_inotify_init1, "errors of the software GPU"),
        Rule::any(SYS_inotify_add_watch, "errors of the software GPU"),
        Rule::one_of(
            SYS_kill,
            1,
            &[0],
            "checking that a process that uses a device still lives; no signal is sent",
        ),
        // Queries of libraries about their own process.
        Rule::any(SYS_uname, "version of the kernel"),
        Rule::any(SYS_sysinfo, "the amount of the host's memory"),
        Rule::any(SYS_nanosleep, "waiting of libraries"),
        Rule::one_of(SYS_prlimit64, 0, &[0], "limits of its own; bounds of the stack"),
        Rule::any(SYS_getrusage, "processor time"),
        Rule::any(SYS_getcpu, "choosing a queue by processor"),
        Rule::any(SYS_pipe2, "wake-ups inside a driver"),
        Rule::any(SYS_readv, "library code that reads records"),
        Rule::any(SYS_sched_getparam, "priority of threads"),
        Rule::any(SYS_sched_getscheduler, "priority of threads"),
        Rule::any(SYS_get_mempolicy, "the NUMA node of host memory"),
        Rule::one_of(SYS_tgkill, 0, &[std::process::id().cast_signed()], "ending itself by a signal"),
    ]);
    let mut absent = common::absent();
    absent.extend([
        Rule::any(SYS_socket, "services of a driver that are not needed to read its state"),
        Rule::any(SYS_connect, "services of a driver that are not needed to read its state"),
    ]);
    FilterProfile::Allow { allowed, absent }
}
