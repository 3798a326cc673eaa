//! The filter of `sluice-device`. A guest reaches it directly, so it allows as little as possible: no files, no programs,
//! no new sockets except accepted ones.

use crate::{
    common,
    filter::{AllowList, FilterProfile, Rule},
};
use libc::*;

/// The number of cachestat(2) on every architecture (`asm-generic/unistd.h`); `libc` does not name it yet.
const SYS_CACHESTAT: c_long = 451;

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
    FilterProfile::Allow(AllowList::strict(ours, Vec::new(), common::no_files()))
}

/// The rules of any device. `options` are those that it may query of a socket, by which it gets no pidfd of a peer: that would be the
/// right to end it.
fn rules(options: &[i32], why: &'static str) -> Vec<Rule> {
    let queries: Vec<_> = options.iter().map(|option| [(1, SOL_SOCKET), (2, *option)]).collect();
    let queries: Vec<&[(u8, i32)]> = queries.iter().map(<[_; 2]>::as_slice).collect();
    let mut ours = common::rules();
    // Its first thread, with which the C library sets its handler, starts before the filter.
    ours.retain(|rule| rule.call != SYS_rt_sigaction);
    ours.extend(common::events());
    ours.extend([
        common::passing_on(),
        common::descriptors(&[F_GET_SEALS, F_ADD_SEALS]),
        Rule::any(SYS_epoll_wait, "event loops of the vhost-user library"),
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
        Rule::any(SYS_ftruncate, "the length of such memory"),
        Rule::one_of(
            SYS_fallocate,
            1,
            &[FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE],
            "freeing the parts of such memory that a guest has given back",
        ),
        Rule::one_of(SYS_preadv2, 5, &[RWF_NOWAIT], "kicks, without blocking if another thread has read them"),
        Rule::only(SYS_pipe2, &[(1, O_CLOEXEC | O_NONBLOCK)], "the doorbell of a new session"),
        common::killing("killing the worker of an ended session"),
    ]);
    ours
}
