//! The filter of the launcher. Filters are inherited, so this one has to allow all calls of a device or a worker and those
//! for starting a program; it forbids the ways into other processes and into the kernel.

use crate::filter::{FilterProfile, Rule};
use libc::*;

pub(crate) fn profile() -> FilterProfile {
    FilterProfile::Deny(vec![
        Rule::any(SYS_ptrace, "no process of Sluice reads or controls another"),
        Rule::any(SYS_process_vm_readv, "no process of Sluice reads another's memory"),
        Rule::any(SYS_process_vm_writev, "no process of Sluice writes another's memory"),
        Rule::any(SYS_process_madvise, "no process of Sluice changes another's memory"),
        Rule::any(SYS_pidfd_getfd, "descriptors travel by messages only"),
        Rule::any(SYS_kcmp, "no process of Sluice compares itself with another"),
        Rule::any(SYS_userfaultfd, "stopping a thread at a chosen access is an attacker's tool"),
        Rule::any(SYS_remap_file_pages, "would rearrange guest pages without a trace"),
        Rule::any(SYS_bpf, "no programs in the kernel"),
        Rule::any(SYS_perf_event_open, "no measuring of other processes"),
        Rule::any(SYS_io_uring_setup, "its operations bypass the filter"),
        Rule::any(SYS_keyctl, "no keys are used"),
        Rule::any(SYS_add_key, "no keys are used"),
        Rule::any(SYS_request_key, "no keys are used"),
        Rule::any(SYS_init_module, "Sluice never changes the kernel"),
        Rule::any(SYS_finit_module, "Sluice never changes the kernel"),
        Rule::any(SYS_delete_module, "Sluice never changes the kernel"),
        Rule::any(SYS_kexec_load, "Sluice never changes the kernel"),
        Rule::any(SYS_kexec_file_load, "Sluice never changes the kernel"),
        Rule::any(SYS_reboot, "Sluice never stops the host"),
        Rule::any(SYS_swapon, "Sluice never manages the host's swap"),
        Rule::any(SYS_swapoff, "Sluice never manages the host's swap"),
        Rule::any(SYS_acct, "Sluice never changes the host's accounting"),
        Rule::any(SYS_settimeofday, "Sluice never sets the host's clock"),
        Rule::any(SYS_clock_settime, "Sluice never sets the host's clock"),
        Rule::any(SYS_adjtimex, "Sluice never sets the host's clock"),
        Rule::any(SYS_iopl, "no direct hardware access"),
        Rule::any(SYS_ioperm, "no direct hardware access"),
        Rule::any(SYS_open_by_handle_at, "reaches files around every path check"),
        Rule::any(SYS_quotactl, "Sluice never manages the host's quotas"),
        Rule::any(SYS_syslog, "the kernel's log reveals addresses"),
        Rule::any(SYS_lookup_dcookie, "the kernel's caches reveal paths"),
        Rule::any(SYS_vhangup, "Sluice never hangs up terminals"),
        Rule::any(SYS_modify_ldt, "no segments are used"),
        Rule::one_of(SYS_shutdown, 0, &[0, 1, 2], "other processes share the standard streams"),
        Rule::exactly(
            SYS_fcntl,
            &[&[(0, 0), (1, F_SETFL)], &[(0, 1), (1, F_SETFL)], &[(0, 2), (1, F_SETFL)]],
            "other processes share the flags of the standard streams",
        ),
    ])
}
