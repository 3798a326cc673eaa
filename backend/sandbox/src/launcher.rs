//! The filter of the launcher. Filters are inherited, so this one has to allow everything that a device or a worker may do and
//! that starting a program takes; it takes away the ways into other processes and into the kernel.

use crate::filter::{Profile, Rule};
use libc::*;

pub(crate) fn profile() -> Profile {
    Profile::Deny(vec![
        Rule::any(SYS_ptrace, "no process here looks into another"),
        Rule::any(SYS_process_vm_readv, "no process here looks into another"),
        Rule::any(SYS_process_vm_writev, "no process here looks into another"),
        Rule::any(SYS_process_madvise, "no process here touches another's memory"),
        Rule::any(SYS_pidfd_getfd, "descriptors travel by messages only"),
        Rule::any(SYS_kcmp, "no process here compares itself with another"),
        Rule::any(SYS_userfaultfd, "stopping a thread at a chosen access is an attacker's tool"),
        Rule::any(SYS_remap_file_pages, "would rearrange guest pages unseen"),
        Rule::any(SYS_bpf, "no programs in the kernel"),
        Rule::any(SYS_perf_event_open, "no measuring of other processes"),
        Rule::any(SYS_io_uring_setup, "system calls that no filter sees"),
        Rule::any(SYS_keyctl, "no keys are used"),
        Rule::any(SYS_add_key, "no keys are used"),
        Rule::any(SYS_request_key, "no keys are used"),
        Rule::any(SYS_init_module, "the kernel is not ours to change"),
        Rule::any(SYS_finit_module, "the kernel is not ours to change"),
        Rule::any(SYS_delete_module, "the kernel is not ours to change"),
        Rule::any(SYS_kexec_load, "the kernel is not ours to change"),
        Rule::any(SYS_kexec_file_load, "the kernel is not ours to change"),
        Rule::any(SYS_reboot, "the host is not ours to stop"),
        Rule::any(SYS_swapon, "the host's memory is not ours to manage"),
        Rule::any(SYS_swapoff, "the host's memory is not ours to manage"),
        Rule::any(SYS_acct, "the host's accounting is not ours"),
        Rule::any(SYS_settimeofday, "the host's clock is not ours"),
        Rule::any(SYS_clock_settime, "the host's clock is not ours"),
        Rule::any(SYS_adjtimex, "the host's clock is not ours"),
        Rule::any(SYS_iopl, "no direct hardware access"),
        Rule::any(SYS_ioperm, "no direct hardware access"),
        Rule::any(SYS_open_by_handle_at, "reaches files around every path check"),
        Rule::any(SYS_quotactl, "the host's file systems are not ours to manage"),
        Rule::any(SYS_syslog, "the kernel's log tells addresses"),
        Rule::any(SYS_lookup_dcookie, "the kernel's caches tell paths"),
        Rule::any(SYS_vhangup, "terminals are not ours"),
        Rule::any(SYS_modify_ldt, "no segments are used"),
        Rule::one_of(
            SYS_shutdown,
            0,
            &[0, 1, 2],
            "a standard stream is not shut down for those who share it",
        ),
        Rule::exactly(
            SYS_fcntl,
            &[&[(0, 0), (1, F_SETFL)], &[(0, 1), (1, F_SETFL)], &[(0, 2), (1, F_SETFL)]],
            "flags of a standard stream are not set for those who share it",
        ),
    ])
}
