//! The filter of `sluice-device`. A guest reaches it directly, so it allows as little as possible: no files, no programs,
//! no new sockets except accepted ones.

use crate::{
    common,
    filter::{FilterProfile, Rule},
};
use libc::{
    F_ADD_SEALS, F_DUPFD_CLOEXEC, F_GET_SEALS, SO_DOMAIN, SO_TYPE, SOL_SOCKET, SYS_accept4, SYS_fallocate,
    SYS_fstatfs, SYS_ftruncate, SYS_getsockopt, SYS_memfd_create, SYS_pidfd_send_signal, SYS_pipe2,
    SYS_preadv2, SYS_timerfd_create, SYS_timerfd_settime,
};

pub(crate) fn profile() -> FilterProfile {
    let mut allowed = common::rules();
    allowed.extend(common::data_only());
    allowed.extend(common::settings(&[F_DUPFD_CLOEXEC, F_GET_SEALS, F_ADD_SEALS]));
    allowed.extend([
        Rule::any(SYS_accept4, "the VMM, or another process"),
        common::shutdown("asking a worker to exit; ending a connection"),
        // Without the peer's pidfd, which would be the right to end that process.
        Rule::exactly(
            SYS_getsockopt,
            &[&[(1, SOL_SOCKET), (2, SO_DOMAIN)], &[(1, SOL_SOCKET), (2, SO_TYPE)]],
            "checking that the VMM's back channel and its display are sockets",
        ),
        Rule::any(SYS_fstatfs, "the page size of a memory region"),
        Rule::any(
            SYS_memfd_create,
            "page lists for workers; the memory that stands for that of a guest without shared memory",
        ),
        Rule::any(SYS_ftruncate, "the length of such memory"),
        Rule::any(SYS_fallocate, "freeing the parts of such memory that a guest has given back"),
        Rule::any(SYS_preadv2, "kicks, without blocking if another thread has read them"),
        Rule::any(SYS_pipe2, "the doorbell of a new session"),
        Rule::any(SYS_timerfd_create, "the timer of a new connection"),
        Rule::any(SYS_timerfd_settime, "deadlines of waiters and sessions"),
        Rule::any(SYS_pidfd_send_signal, "killing the worker of an ended session"),
    ]);
    FilterProfile::Allow { allowed, absent: common::no_files() }
}

/// The device of programs. It queries the user of a connecting program, because each user has a share; it gets no descriptor of that
/// program.
pub(crate) fn direct() -> FilterProfile {
    let FilterProfile::Allow { mut allowed, absent } = profile() else { return profile() };
    let option = |name: i32| [(1, SOL_SOCKET), (2, name)];
    let [domain, kind, peer] = [SO_DOMAIN, SO_TYPE, libc::SO_PEERCRED].map(option);
    allowed.retain(|rule| rule.call != SYS_getsockopt);
    allowed.push(Rule::exactly(
        SYS_getsockopt,
        &[&domain, &kind, &peer],
        "checking that a descriptor is a socket, and the user of a program that connects",
    ));
    FilterProfile::Allow { allowed, absent }
}
