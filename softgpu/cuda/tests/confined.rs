//! A process that gives up the right to open files after `cuInit`, as Sluice's worker does, computes on.
#![allow(unsafe_code, reason = "calls the C interface and the kernel")]

mod support;

use std::mem::offset_of;

use support::*;

/// Ends the process when it opens, looks for or executes a file, or makes a socket.
fn confine() {
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

#[test]
fn after_the_start_no_file_is_opened() {
    let state = new_state();
    let status = start_child("confined", state.path(), "confined").wait().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
#[ignore = "a part of after_the_start_no_file_is_opened"]
fn confined() {
    ok!(cuInit(0));
    // On a thread of its own: the filter is for what is started from here.
    std::thread::spawn(|| {
        confine();
        let mut context = 0;
        ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
        let module = module(KERNELS);
        let increment = function(module, "increment");
        let word = allocate(8);
        write(word, &[1u64]);
        let streams = [stream(0), stream(1), stream(1)];
        for stream in streams {
            assert_eq!(launch(increment, 1, 1, stream, &mut [word]), 0);
            ok!(cuStreamSynchronize(stream));
        }
        assert_eq!(read::<u64>(word, 1), [4]);
        // No memory left: looks for dead owners first.
        let mut address = 0;
        assert_eq!(cu!(cuMemAlloc_v2(&raw mut address, free_bytes() + PAGE)), OUT_OF_MEMORY);
        let nothing = function(module, "nothing");
        let fault = function(module, "stop");
        assert_eq!(launch(nothing, 4, 32, 0, &mut []), 0);
        assert_eq!(launch(fault, 1, 1, 0, &mut []), 0);
        assert_eq!(cu!(cuCtxSynchronize()), 715);
        ok!(cuCtxDestroy_v2(context));
    })
    .join()
    .unwrap();
}
