//! Calls that only an attacker makes. They end every process, also one whose driver has no traced list.

use crate::filter::Rule;
use libc::*;

/// Ways into other processes and into the kernel, of no use to any process of Sluice.
pub(crate) fn everywhere() -> Vec<Rule> {
    vec![
        Rule::any(SYS_ptrace, "no process of Sluice reads or controls another"),
        Rule::any(SYS_process_vm_readv, "no process of Sluice reads another's memory"),
        Rule::any(SYS_process_vm_writev, "no process of Sluice writes another's memory"),
        Rule::any(SYS_process_madvise, "no process of Sluice changes another's memory"),
        Rule::any(SYS_process_mrelease, "no process of Sluice takes another's memory"),
        Rule::any(SYS_pidfd_getfd, "descriptors travel by messages only"),
        Rule::any(SYS_kcmp, "no process of Sluice compares itself with another"),
        Rule::any(SYS_userfaultfd, "stopping a thread at a chosen access is an attacker's tool"),
        Rule::any(SYS_remap_file_pages, "would rearrange guest pages without a trace"),
        Rule::any(SYS_bpf, "no programs in the kernel"),
        Rule::any(SYS_perf_event_open, "no measuring of other processes"),
        Rule::any(SYS_io_uring_setup, "its operations bypass the filter"),
        Rule::any(SYS_io_uring_enter, "its operations bypass the filter"),
        Rule::any(SYS_io_uring_register, "its operations bypass the filter"),
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
        Rule::any(SYS_clock_adjtime, "Sluice never sets the host's clock"),
        Rule::any(SYS_iopl, "no direct hardware access"),
        Rule::any(SYS_ioperm, "no direct hardware access"),
        Rule::any(SYS_open_by_handle_at, "reaches files around every path check"),
        Rule::any(SYS_quotactl, "Sluice never manages the host's quotas"),
        Rule::any(SYS_syslog, "the kernel's log reveals addresses"),
        Rule::any(SYS_lookup_dcookie, "the kernel's caches reveal paths"),
        Rule::any(SYS_vhangup, "Sluice never hangs up terminals"),
        Rule::any(SYS_modify_ldt, "no segments are used"),
    ]
}

/// Further calls with which a process with a driver would leave its confinement; the launcher needs some of them to make it.
pub(crate) fn leaving() -> Vec<Rule> {
    vec![
        Rule::any(SYS_execve, "no process with a driver starts a program"),
        Rule::any(SYS_execveat, "no process with a driver starts a program"),
        Rule::any(SYS_fork, "no process with a driver starts a process"),
        Rule::any(SYS_vfork, "no process with a driver starts a process"),
        Rule::without(SYS_clone, 0, CLONE_THREAD, "no process with a driver starts a process"),
        Rule::any(SYS_unshare, "no new namespaces"),
        Rule::any(SYS_setns, "no other namespaces"),
        Rule::any(SYS_mount, "the file system stays as the launcher made it"),
        Rule::any(SYS_umount2, "the file system stays as the launcher made it"),
        Rule::any(SYS_pivot_root, "the file system stays as the launcher made it"),
        Rule::any(SYS_chroot, "the file system stays as the launcher made it"),
        Rule::any(SYS_open_tree, "the file system stays as the launcher made it"),
        Rule::any(SYS_move_mount, "the file system stays as the launcher made it"),
        Rule::any(SYS_fsopen, "the file system stays as the launcher made it"),
        Rule::any(SYS_fsconfig, "the file system stays as the launcher made it"),
        Rule::any(SYS_fsmount, "the file system stays as the launcher made it"),
        Rule::any(SYS_fspick, "the file system stays as the launcher made it"),
        Rule::any(SYS_mount_setattr, "the file system stays as the launcher made it"),
        Rule::any(SYS_pidfd_open, "no process is named by its number"),
        Rule::none_of(SYS_kill, 1, &[0], "no signal to a process that is named by its number"),
        Rule::any(SYS_tkill, "no signal to a thread of another process"),
        Rule::none_of(SYS_tgkill, 0, &[std::process::id()], "no signal to a thread of another process"),
        Rule::any(SYS_rt_sigqueueinfo, "no signal to another process"),
        Rule::any(SYS_rt_tgsigqueueinfo, "no signal to another process"),
        Rule::any(SYS_personality, "would make addresses predictable"),
        Rule::any(SYS_setuid, "the user stays as the launcher chose it"),
        Rule::any(SYS_setgid, "the user stays as the launcher chose it"),
        Rule::any(SYS_setresuid, "the user stays as the launcher chose it"),
        Rule::any(SYS_setresgid, "the user stays as the launcher chose it"),
        Rule::any(SYS_capset, "the capabilities stay as the launcher chose them"),
    ]
}
