//! The rules for every confined process: memory, threads, time, and its existing descriptors.

use crate::filter::Rule;
use libc::{
    CLONE_THREAD, CLONE_VM, F_GETFD, F_GETFL, F_SETFD, F_SETFL, PROT_EXEC, SYS_brk, SYS_clock_gettime,
    SYS_clock_nanosleep, SYS_clone, SYS_clone3, SYS_close, SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait,
    SYS_epoll_wait, SYS_eventfd2, SYS_exit, SYS_exit_group, SYS_fstat, SYS_futex, SYS_getrandom, SYS_gettid,
    SYS_madvise, SYS_mmap, SYS_mprotect, SYS_mremap, SYS_munmap, SYS_openat, SYS_ppoll, SYS_prctl, SYS_read,
    SYS_recvmsg, SYS_restart_syscall, SYS_rseq, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn,
    SYS_sched_getaffinity, SYS_sched_yield, SYS_sendmsg, SYS_set_robust_list, SYS_sigaltstack, SYS_write,
};

/// Calls of every confined process.
pub(crate) fn rules() -> Vec<Rule> {
    vec![
        // Existing descriptors.
        Rule::any(SYS_read, "eventfds, and messages of a stream socket"),
        Rule::any(SYS_write, "eventfds, the log on stderr, memfds"),
        Rule::any(SYS_close, "descriptors of ended sessions"),
        Rule::any(SYS_recvmsg, "control messages with descriptors"),
        Rule::any(SYS_sendmsg, "control messages with descriptors"),
        Rule::any(SYS_fstat, "the type and the length of a descriptor's file"),
        // Waiting.
        Rule::any(SYS_epoll_create1, "an event loop of a new connection"),
        Rule::any(SYS_epoll_ctl, "watching the descriptors of a new session"),
        Rule::any(SYS_epoll_wait, "event loops"),
        Rule::any(SYS_epoll_pwait, "event loops of newer libraries"),
        Rule::any(SYS_ppoll, "waiting for a few descriptors"),
        Rule::any(SYS_eventfd2, "wake-ups of a new session, and inside one"),
        Rule::any(SYS_clock_gettime, "the time, if the vDSO cannot read the clock"),
        Rule::any(SYS_clock_nanosleep, "waiting before another try"),
        Rule::any(SYS_restart_syscall, "resuming a wait after SIGSTOP"),
        // Memory.
        Rule::any(SYS_brk, "the allocator's heap"),
        Rule::any(SYS_munmap, "the allocator, stacks of threads, guest pages of an ended session"),
        Rule::any(SYS_madvise, "the allocator gives memory back; stacks of threads that end"),
        // Threads.
        Rule::with(SYS_clone, 0, CLONE_THREAD | CLONE_VM, "threads, never processes"),
        Rule::any(SYS_set_robust_list, "the start of a thread"),
        Rule::any(SYS_rseq, "the start of a thread"),
        Rule::any(SYS_sigaltstack, "the start and end of a thread: its stack for overflow reports"),
        Rule::any(SYS_rt_sigprocmask, "the start of a thread"),
        Rule::any(SYS_rt_sigaction, "the C library's own handler, set at the start of the first thread"),
        Rule::any(SYS_sched_getaffinity, "the start of a thread: the bounds of its stack"),
        Rule::any(SYS_gettid, "the start of a thread, and its name in the log"),
        Rule::any(SYS_futex, "locks, and the end of threads"),
        Rule::any(SYS_sched_yield, "contended locks"),
        Rule::any(SYS_rt_sigreturn, "the end of a signal handler"),
        Rule::any(SYS_exit, "the end of a thread"),
        Rule::any(SYS_exit_group, "the end of the process"),
        // The standard library.
        Rule::any(SYS_getrandom, "seeds of hash tables, so that a guest cannot choose collisions"),
    ]
}

/// Memory without executable pages: for processes that load no more code.
pub(crate) fn data_only() -> Vec<Rule> {
    vec![
        Rule::without(SYS_mmap, 2, PROT_EXEC, "the allocator, stacks of threads, guest pages; never code"),
        Rule::without(SYS_mprotect, 2, PROT_EXEC, "the allocator's heaps, guards of stacks; never code"),
    ]
}

/// Queries of the vendor's libraries about their own process. Those of the software GPU make them, too, so that a forked child is
/// not taken for its parent.
pub(crate) fn identity() -> Vec<Rule> {
    [libc::SYS_getpid, libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid]
        .map(|call| Rule::any(call, "identity towards a driver"))
        .into()
}

/// Settings of descriptors and threads that do not change the rights of the process. Flags of the standard streams stay
/// unchanged: they belong to the open file, which other processes may share.
pub(crate) fn settings(more: &[i32]) -> Vec<Rule> {
    let commands = [&[F_GETFD, F_SETFD, F_GETFL], more].concat();
    vec![
        Rule::one_of(libc::SYS_fcntl, 1, &commands, "close-on-exec, non-blocking, duplicates and seals")
            .or_beyond_standard_streams(1, F_SETFL),
        Rule::one_of(SYS_prctl, 0, &[libc::PR_SET_NAME], "the name of a thread"),
    ]
}

/// `shutdown`, except of a standard stream: that would close it for every process that shares it.
pub(crate) fn shutdown(why: &'static str) -> Rule {
    Rule::none_of(libc::SYS_shutdown, 0, &[0, 1, 2], why)
}

/// Calls that libraries try first and can do without.
pub(crate) fn absent() -> Vec<Rule> {
    vec![
        Rule::any(SYS_clone3, "its flags cannot be filtered; the C library takes clone instead"),
        Rule::any(
            SYS_mremap,
            "would extend a mapping over neighbouring guest pages; the allocator copies instead",
        ),
    ]
}

/// Absent calls of processes that open no files. Opening fails instead of killing, because the allocator may try it at any time.
pub(crate) fn no_files() -> Vec<Rule> {
    let mut rules = absent();
    rules.push(Rule::any(
        SYS_openat,
        "the allocator reads settings of its heaps from files of the kernel; it and all other code work without them",
    ));
    rules
}
