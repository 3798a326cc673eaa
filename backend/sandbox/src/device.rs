//! The filter of `sluice-device`. A guest reaches it directly, so it allows as little as possible: no files, no programs,
//! no new sockets except accepted ones.

use crate::{
    common,
    filter::{AllowList, FilterProfile, Rule},
};
use libc::*;

/// The number of cachestat(2) on every architecture (`asm-generic/unistd.h`); `libc` does not name it yet.
const SYS_CACHESTAT: c_long = 451;

/// Most descriptors of a `ppoll`: the workers of all sessions that end, and a few.
const POLLED: u32 = 1024;

pub(crate) fn profile() -> FilterProfile {
    let mut ours =
        rules(&[SO_DOMAIN, SO_TYPE], "checking that the VMM's back channel and its display are sockets");
    let why = "finding pages that a balloon took although a session uses them";
    ours.push(Rule::one_of(SYS_CACHESTAT, 3, &[0], why));
    strict(ours)
}

/// The device of programs. It queries the user of a connecting program, because each user has a share; it gets no descriptor of that
/// program.
pub(crate) fn direct() -> FilterProfile {
    strict(rules(
        &[SO_DOMAIN, SO_TYPE, SO_PEERCRED],
        "checking that a descriptor is a socket, and the user of a program that connects",
    ))
}

fn strict(ours: Vec<Rule>) -> FilterProfile {
    FilterProfile::Allow(AllowList::strict(ours, Vec::new(), absent()))
}

/// Calls that are answered with ENOSYS. The C library and Rust's make those of threads without need of their results.
fn absent() -> Vec<Rule> {
    let mut rules = common::no_files();
    rules.extend([
        Rule::any(SYS_set_robust_list, "locks that outlive a thread, which no code here uses"),
        Rule::any(
            SYS_sched_getaffinity,
            "part of the C library's answer about a stack that its caller does not read",
        ),
        Rule::any(SYS_sched_yield, "contended locks of libraries, which try again anyway"),
        Rule::any(SYS_gettid, "the number of a thread in the report of a stack overflow"),
        Rule::any(SYS_prctl, "the name of a thread for debuggers"),
    ]);
    rules
}

/// The rules of any device. `options` are those that it may query of a socket, by which it gets no pidfd of a peer: that would be the
/// right to end it.
fn rules(options: &[i32], why: &'static str) -> Vec<Rule> {
    let queries: Vec<_> = options.iter().map(|option| [(1, SOL_SOCKET), (2, *option)]).collect();
    let queries: Vec<&[(u8, i32)]> = queries.iter().map(<[_; 2]>::as_slice).collect();
    let absent: Vec<_> = absent().iter().map(|rule| rule.call).collect();
    // The C library sets its handler with the first thread, which starts before the filter; no handler returns. Its own rule for waiting follows.
    let unused = [SYS_ppoll, SYS_rt_sigaction, SYS_rt_sigreturn, SYS_clock_nanosleep];
    let mut ours = common::rules();
    ours.retain(|rule| !absent.contains(&rule.call) && !unused.contains(&rule.call));
    ours.extend(common::events());
    ours.extend([
        common::polling(POLLED),
        common::passing_on(),
        common::descriptors(&[F_GET_SEALS, F_ADD_SEALS]),
        Rule::only(SYS_accept4, &[(3, SOCK_CLOEXEC | SOCK_NONBLOCK)], "the VMM, or another process"),
        Rule::none_of(
            SYS_shutdown,
            0,
            &[0, 1, 2],
            "asking a worker to exit; ending a connection; never a standard stream, which other processes may share",
        ),
        Rule::exactly(SYS_getsockopt, &queries, why),
        Rule::any(SYS_fstatfs, "the page size of a memory region"),
        common::memory_file(
            "page lists for workers; the memory that stands for that of a guest without shared memory",
        ),
        Rule::one_of(
            SYS_fallocate,
            1,
            &[0, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE],
            "the length of such memory; freeing the parts of it that a guest has given back",
        ),
        Rule::one_of(SYS_preadv2, 5, &[RWF_NOWAIT], "kicks, without blocking if another thread has read them"),
        Rule::only(SYS_pipe2, &[(1, O_CLOEXEC | O_NONBLOCK)], "the doorbell of a new session"),
        common::killing("killing the worker of an ended session"),
    ]);
    ours
}
