//! Signals of a foreign program, kept away from work of this library.

#![expect(unsafe_code, reason = "signal masks")]

/// Runs `body` with all signals blocked, and swallows a SIGPIPE that it caused: the vhost-user library neither
/// expects interruptions nor suppresses the signal, and the program's handlers must not run for it.
pub(super) fn signals_blocked<R>(body: impl FnOnce() -> R) -> R {
    use core::mem::MaybeUninit;
    let mut all = MaybeUninit::uninit();
    let mut old = MaybeUninit::uninit();
    let mut pipe = MaybeUninit::uninit();
    let mut pending = MaybeUninit::uninit();
    // SAFETY: fills a set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: fills a set.
    unsafe { libc::sigemptyset(pipe.as_mut_ptr()) };
    // SAFETY: the set was initialised.
    unsafe { libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE) };
    // SAFETY: both sets are valid; `old` is filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr()) };
    let sigpipe_pending = |pending: &mut MaybeUninit<libc::sigset_t>| {
        // SAFETY: fills a set.
        unsafe { libc::sigpending(pending.as_mut_ptr()) };
        // SAFETY: the set was filled.
        unsafe { libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1 }
    };
    let before = sigpipe_pending(&mut pending);
    let result = body();
    if !before && sigpipe_pending(&mut pending) {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: valid set and time; the details of the signal are not needed.
        unsafe { libc::sigtimedwait(pipe.as_ptr(), core::ptr::null_mut(), &raw const now) };
    }
    // SAFETY: the set was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), core::ptr::null_mut()) };
    result
}
