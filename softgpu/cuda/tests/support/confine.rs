//! The restrictions that Sluice's worker applies to itself once its driver is initialised.

use std::mem::offset_of;

/// Kills the process when it opens, looks up or executes a file, or creates a socket.
pub(crate) fn confine() {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset_of!(libc::seccomp_data, nr));
    let statement = |code: u32, value: u32| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: 0,
        jf: 0,
        k: value,
    };
    let mut program = vec![statement(load.0, u32::try_from(load.1).unwrap())];
    for call in [
        libc::SYS_open,
        libc::SYS_openat,
        libc::SYS_openat2,
        libc::SYS_creat,
        libc::SYS_stat,
        libc::SYS_statx,
        libc::SYS_newfstatat,
        libc::SYS_readlink,
        libc::SYS_readlinkat,
        libc::SYS_unlink,
        libc::SYS_socket,
        libc::SYS_execve,
    ] {
        let mut jump = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, u32::try_from(call).unwrap());
        jump.jf = 1;
        program.push(jump);
        program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS));
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    let filter =
        libc::sock_fprog { len: u16::try_from(program.len()).unwrap(), filter: program.as_mut_ptr() };
    // SAFETY: restricts this process.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program lives through the call.
    let confined = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    assert_eq!(confined, 0);
}
