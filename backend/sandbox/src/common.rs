//! The rules for every confined process: memory, threads, time, and its existing descriptors.

use crate::filter::Rule;
use libc::*;

/// The flags with which the C library starts a thread. The kernel takes the lower 32 bits.
const THREAD: i32 = CLONE_VM
    | CLONE_FS
    | CLONE_FILES
    | CLONE_SIGHAND
    | CLONE_THREAD
    | CLONE_SYSVSEM
    | CLONE_SETTLS
    | CLONE_PARENT_SETTID
    | CLONE_CHILD_CLEARTID;

/// Flags of `mmap` in Sluice's own code and in the allocator: none of huge pages, which would empty the pool of the host's VMs.
const MAPPING: i32 =
    MAP_SHARED | MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK | MAP_FIXED_NOREPLACE;

/// Flags of sent messages: none of bytes out of band, whose code in the kernel has been a way out of sandboxes.
const SENDING: i32 = MSG_NOSIGNAL | MSG_DONTWAIT;

/// Flags of received messages.
const RECEIVING: i32 = MSG_CMSG_CLOEXEC | MSG_DONTWAIT | MSG_WAITALL | MSG_NOSIGNAL;

/// Advice with which newer C libraries guard the stacks of threads; `libc` does not name it yet.
const MADV_GUARD_INSTALL: i32 = 102;

/// More descriptors than any process may have. The kernel refuses so many; the handler for refused calls has a set of signals checked by it.
const IMPOSSIBLE: i32 = -1;

/// Waiting for at most so many descriptors. A process that sends to a socket wakes all that wait at the other end, in its own time, and each entry of
/// each thread waits. So threads with thousands of entries would stop the process that sends.
pub(crate) fn polling(most: u32) -> Rule {
    Rule::at_most(SYS_ppoll, 1, most, "waiting for a few descriptors").or_is(1, IMPOSSIBLE)
}

/// Calls of every confined process.
pub(crate) fn rules() -> Vec<Rule> {
    vec![
        // Existing descriptors.
        Rule::any(SYS_read, "eventfds, and messages of a stream socket"),
        Rule::any(SYS_write, "eventfds, the log on stderr, memfds"),
        Rule::any(SYS_close, "descriptors of ended sessions"),
        Rule::only(SYS_recvmsg, &[(2, RECEIVING)], "control messages with descriptors"),
        Rule::null(SYS_sendto, 4, "control messages without descriptors, to the peer of the socket only")
            .and_only(3, SENDING),
        Rule::any(SYS_fstat, "the type and the length of a descriptor's file"),
        // Waiting.
        Rule::any(SYS_ppoll, "waiting for a few descriptors"),
        Rule::any(
            SYS_clock_gettime,
            "the time, if the vDSO cannot read the clock; an arbiter's processor time",
        )
        .rare(),
        Rule::any(SYS_clock_nanosleep, "waiting before another try").rare(),
        Rule::any(SYS_restart_syscall, "resuming a wait after SIGSTOP").rare(),
        // Memory.
        Rule::only(
            SYS_mmap,
            &[(2, PROT_READ | PROT_WRITE), (3, MAPPING)],
            "the allocator, stacks of threads, guest pages; never code or huge pages",
        ),
        Rule::without(SYS_mprotect, 2, PROT_EXEC, "the allocator's heaps, guards of stacks; never code"),
        Rule::any(SYS_brk, "the allocator's heap, if its first thread needs more").rare(),
        Rule::any(SYS_munmap, "the allocator, stacks of threads, guest pages of an ended session").rare(),
        Rule::one_of(
            SYS_madvise,
            2,
            &[MADV_DONTNEED, MADV_FREE, MADV_GUARD_INSTALL, MADV_DONTFORK],
            "the allocator gives memory back; stacks of threads; pages of a guest",
        )
        .rare(),
        // Threads.
        Rule::one_of(SYS_clone, 0, &[THREAD], "threads, never processes or namespaces"),
        Rule::any(SYS_set_robust_list, "the start of a thread"),
        Rule::any(SYS_rseq, "the start of a thread"),
        Rule::any(SYS_sigaltstack, "the start and end of a thread: its stack for overflow reports"),
        Rule::any(SYS_rt_sigprocmask, "the start of a thread"),
        Rule::any(SYS_rt_sigaction, "the C library's own handler, set at the start of the first thread"),
        Rule::any(SYS_sched_getaffinity, "the start of a thread: the bounds of its stack"),
        Rule::any(SYS_gettid, "the start of a thread, and its name in the log"),
        Rule::one_of(SYS_prctl, 0, &[PR_SET_NAME], "the name of a thread"),
        Rule::commands(
            SYS_futex,
            1,
            &[FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET],
            FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME,
            "contended locks, and the end of threads",
        )
        .rare(),
        Rule::any(SYS_sched_yield, "contended locks").rare(),
        Rule::any(SYS_rt_sigreturn, "the end of a signal handler").rare(),
        Rule::any(
            SYS_exit,
            "the end of a thread; those of an arbiter and a worker mostly live as long as it",
        )
        .rare(),
        Rule::any(SYS_exit_group, "the end of the process, if it is not killed").rare(),
        // The standard library.
        Rule::any(SYS_getrandom, "seeds of hash tables, so that a guest cannot choose collisions"),
    ]
}

/// Messages with descriptors, for processes that pass some on.
pub(crate) fn passing_on() -> Rule {
    Rule::only(SYS_sendmsg, &[(2, SENDING)], "control messages with descriptors")
}

/// An event loop.
pub(crate) fn events() -> Vec<Rule> {
    vec![
        Rule::only(SYS_epoll_create1, &[(0, EPOLL_CLOEXEC)], "an event loop of a new connection"),
        Rule::any(SYS_epoll_ctl, "watching the descriptors of a new session"),
        Rule::any(SYS_epoll_pwait, "event loops"),
        wake_ups(),
        Rule::exactly(
            SYS_timerfd_create,
            &[&[(0, CLOCK_MONOTONIC), (1, TFD_CLOEXEC | TFD_NONBLOCK)]],
            "the timer of a new connection",
        ),
        Rule::any(SYS_timerfd_settime, "deadlines of waiters, sessions and turns"),
    ]
}

/// Descriptors that wake a thread.
pub(crate) fn wake_ups() -> Rule {
    Rule::only(SYS_eventfd2, &[(1, EFD_CLOEXEC | EFD_NONBLOCK)], "wake-ups of a new session, and inside one")
}

/// A file in memory that is shared with another process.
pub(crate) fn memory_file(why: &'static str) -> Rule {
    Rule::only(SYS_memfd_create, &[(1, (MFD_CLOEXEC | MFD_ALLOW_SEALING).cast_signed())], why)
}

/// Killing the process of a descriptor, and no group of processes.
pub(crate) fn killing(why: &'static str) -> Rule {
    Rule::exactly(SYS_pidfd_send_signal, &[&[(1, SIGKILL), (3, 0)]], why)
}

/// Settings of descriptors. Flags of the standard streams stay unchanged: they belong to the open file, which other processes may share.
pub(crate) fn descriptors(more: &[i32]) -> Rule {
    let commands = [&[F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC], more].concat();
    Rule::one_of(SYS_fcntl, 1, &commands, "close-on-exec, non-blocking, duplicates and seals")
        .or_beyond_standard_streams(1, F_SETFL)
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
