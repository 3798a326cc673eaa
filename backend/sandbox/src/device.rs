//! The filter of `sluice-device`. A guest reaches it directly, so it must be able to do next to nothing: no files, no programs,
//! no new sockets except accepted ones.

use crate::{
    common,
    filter::{Profile, Rule},
};
use libc::{
    F_ADD_SEALS, F_DUPFD_CLOEXEC, F_GET_SEALS, SO_DOMAIN, SO_TYPE, SOL_SOCKET, SYS_accept4, SYS_fallocate,
    SYS_fstatfs, SYS_ftruncate, SYS_getsockopt, SYS_memfd_create, SYS_pidfd_send_signal, SYS_pipe2,
    SYS_preadv2, SYS_timerfd_create, SYS_timerfd_settime,
};

pub(crate) fn profile() -> Profile {
    let mut allowed = common::rules();
    allowed.extend(common::data_only());
    allowed.extend(common::settings(&[F_DUPFD_CLOEXEC, F_GET_SEALS, F_ADD_SEALS]));
    allowed.extend([
        Rule::any(SYS_accept4, "the VMM, or another process"),
        common::shutdown("asking a worker to exit; ending a connection"),
        // Not the process at the other end: its pidfd would be the right to end it.
        Rule::exactly(
            SYS_getsockopt,
            &[&[(1, SOL_SOCKET), (2, SO_DOMAIN)], &[(1, SOL_SOCKET), (2, SO_TYPE)]],
            "what the VMM hands over as its back channel and its display: whether it is a socket",
        ),
        Rule::any(SYS_fstatfs, "whether a memory region is made of huge pages"),
        Rule::any(
            SYS_memfd_create,
            "page lists for workers; what stands for the memory of a guest that shares none",
        ),
        Rule::any(SYS_ftruncate, "the length of such memory"),
        Rule::any(SYS_fallocate, "emptying what a guest has given back of it"),
        Rule::any(SYS_preadv2, "kicks, without waiting for one that somebody else took"),
        Rule::any(SYS_pipe2, "the doorbell of a new session"),
        Rule::any(SYS_timerfd_create, "the timer of a new connection"),
        Rule::any(SYS_timerfd_settime, "deadlines of waiters and sessions"),
        Rule::any(SYS_pidfd_send_signal, "killing the worker of a session that is over"),
    ]);
    Profile::Allow { allowed, absent: common::no_files() }
}

/// The device of programs. It learns which user's program connects, for each user has a share; it gets no descriptor of that program.
pub(crate) fn direct() -> Profile {
    let Profile::Allow { mut allowed, absent } = profile() else { return profile() };
    let option = |name: i32| [(1, SOL_SOCKET), (2, name)];
    let [domain, kind, peer] = [SO_DOMAIN, SO_TYPE, libc::SO_PEERCRED].map(option);
    allowed.retain(|rule| rule.call != SYS_getsockopt);
    allowed.push(Rule::exactly(
        SYS_getsockopt,
        &[&domain, &kind, &peer],
        "whether a descriptor is a socket, and the user of a program that connects",
    ));
    Profile::Allow { allowed, absent }
}
