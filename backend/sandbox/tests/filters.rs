//! Each filter in a process of its own: allowed calls work, forbidden ones end the process by SIGSYS.

#![allow(unsafe_code, reason = "fork, and raw system calls")]

use sluice_sandbox::{Role, enter};

#[derive(Debug, PartialEq, Eq)]
enum End {
    Exit(i32),
    Signal(i32),
}

const KILLED: End = End::Signal(libc::SIGSYS);
const WORKED: End = End::Exit(0);

/// Runs `body` in a child under the filters of `roles`; its result is the exit status.
fn under(roles: &[Role], body: impl FnOnce() -> bool) -> End {
    // SAFETY: the child uses only memory of its own, and ends by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let entered = roles.iter().all(|role| enter(*role).is_ok());
        let status = if !entered { 100 } else { i32::from(!body()) };
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: waits for the child above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFSIGNALED(status) {
        End::Signal(libc::WTERMSIG(status))
    } else {
        End::Exit(libc::WEXITSTATUS(status))
    }
}

/// A raw system call; the arguments are chosen to be harmless.
fn call(number: libc::c_long, arguments: [i64; 3]) -> i64 {
    let [a, b, c] = arguments;
    // SAFETY: each use states that its arguments are harmless.
    unsafe { libc::syscall(number, a, b, c, 0, 0, 0) }
}

fn open_file() -> bool {
    std::fs::File::open("/dev/null").is_ok()
}

fn map(protection: i32) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping.
    unsafe { libc::mmap(core::ptr::null_mut(), 4096, protection, flags, -1, 0) != libc::MAP_FAILED }
}

fn fork_here() -> bool {
    // SAFETY: the new process, if there is one, ends at once.
    match unsafe { libc::fork() } {
        // SAFETY: as above.
        0 => unsafe { libc::_exit(0) },
        child => child > 0,
    }
}

/// Calls that no confined process may make. All fail harmlessly if they are allowed.
const FORBIDDEN: [(libc::c_long, &str); 12] = [
    (libc::SYS_ptrace, "ptrace"),
    (libc::SYS_process_vm_readv, "process_vm_readv"),
    (libc::SYS_process_vm_writev, "process_vm_writev"),
    (libc::SYS_userfaultfd, "userfaultfd"),
    (libc::SYS_remap_file_pages, "remap_file_pages"),
    (libc::SYS_bpf, "bpf"),
    (libc::SYS_perf_event_open, "perf_event_open"),
    (libc::SYS_io_uring_setup, "io_uring_setup"),
    (libc::SYS_keyctl, "keyctl"),
    (libc::SYS_pidfd_getfd, "pidfd_getfd"),
    (libc::SYS_kexec_load, "kexec_load"),
    (libc::SYS_modify_ldt, "modify_ldt"),
];

/// The filters that each role needs, in order.
const STACKS: [&[Role]; 6] = [
    &[Role::Device],
    &[Role::Worker],
    &[Role::Worker, Role::WorkerSettled],
    &[Role::Inventory],
    &[Role::Launcher],
    &[Role::Arbiter],
];

// Promise: V32
#[test]
fn direct_device_may_read_peer_credentials_and_no_other_peer_option() {
    const SO_PEERPIDFD: i32 = 77;
    use std::os::fd::AsRawFd;
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let asked = |option: i32| {
        let (mut value, mut length) = ([0u8; 64], 64u32);
        let (value, length) = (value.as_mut_ptr(), &raw mut length);
        // SAFETY: the kernel writes at most 64 bytes to the array, and their number to the length.
        let asked = unsafe {
            libc::syscall(libc::SYS_getsockopt, ours.as_raw_fd(), libc::SOL_SOCKET, option, value, length)
        };
        asked == 0
    };
    for option in [libc::SO_PEERCRED, libc::SO_TYPE, libc::SO_DOMAIN] {
        assert_eq!(under(&[Role::DirectDevice], || asked(option)), WORKED, "{option}");
    }
    for option in [SO_PEERPIDFD, libc::SO_PEERSEC, libc::SO_RCVBUF] {
        assert_eq!(under(&[Role::DirectDevice], || asked(option)), KILLED, "{option}");
    }
}

// Promise: F5
#[test]
fn forbidden_calls_kill_every_role() {
    for roles in STACKS {
        for (number, name) in FORBIDDEN {
            // Arguments with which each call fails without effect: bad descriptors, null pointers, unknown requests.
            assert_eq!(under(roles, || call(number, [-1, 0, 0]) == 0), KILLED, "{roles:?} {name}");
        }
    }
}

#[test]
fn every_role_may_use_memory_threads_and_time() {
    for roles in STACKS {
        let body = || {
            let big = vec![1u8; 8 << 20];
            let handle = std::thread::spawn(move || big.iter().map(|byte| u64::from(*byte)).sum::<u64>());
            std::thread::sleep(std::time::Duration::from_millis(1));
            handle.join().is_ok_and(|sum| sum == 8 << 20)
        };
        assert_eq!(under(roles, body), WORKED, "{roles:?}");
    }
}

#[test]
fn allocator_with_64_threads_works_under_the_filter() {
    let body = || {
        let threads: Vec<_> = (0..64)
            .map(|i| {
                std::thread::spawn(move || {
                    let list: Vec<Vec<u8>> = (0..100).map(|j| vec![i; 100 * (j + 1)]).collect();
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    list.len()
                })
            })
            .collect();
        threads.into_iter().all(|thread| thread.join().is_ok_and(|count| count == 100))
    };
    for roles in [&[Role::Device][..], &[Role::Worker, Role::WorkerSettled]] {
        assert_eq!(under(roles, body), WORKED, "{roles:?}");
    }
}

// Promise: F5
#[test]
fn growing_vector_works_without_mremap() {
    for roles in STACKS {
        let body = || {
            let mut list: Vec<u64> = Vec::new();
            (0..4u64 << 20).for_each(|i| list.push(i));
            list.iter().sum::<u64>() == (0..4u64 << 20).sum()
        };
        assert_eq!(under(roles, body), WORKED, "{roles:?}");
    }
    for roles in [&[Role::Device][..], &[Role::Worker]] {
        let body = || call(libc::SYS_mremap, [0, 0, 0]) == -1 && errno() == libc::ENOSYS;
        assert_eq!(under(roles, body), WORKED, "{roles:?}");
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

// Promise: F4
#[test]
fn device_may_open_no_file_and_start_no_process() {
    let device = &[Role::Device];
    assert_eq!(under(device, || !open_file() && errno() == libc::ENOSYS), WORKED);
    assert_eq!(under(device, || call(libc::SYS_open, [0, 0, 0]) == 0), KILLED);
    assert_eq!(under(device, || call(libc::SYS_openat2, [0, 0, 0]) == 0), KILLED);
    assert_eq!(under(device, || std::os::unix::net::UnixStream::pair().is_ok()), KILLED);
    assert_eq!(under(device, || std::os::unix::net::UnixDatagram::unbound().is_ok()), KILLED);
    assert_eq!(under(device, fork_here), KILLED);
    assert_eq!(under(device, || call(libc::SYS_execve, [0, 0, 0]) == 0), KILLED);
    assert_eq!(under(device, || map(libc::PROT_READ | libc::PROT_EXEC)), KILLED);
    assert_eq!(under(device, || call(libc::SYS_kill, [0, 0, 0]) == 0), KILLED);
    assert_eq!(under(device, || call(libc::SYS_ioctl, [0, 0, 0]) == 0), KILLED);
    assert_eq!(
        under(device, || call(libc::SYS_prctl, [i64::from(libc::PR_SET_DUMPABLE), 1, 0]) == 0),
        KILLED
    );
    assert_eq!(under(device, || call(libc::SYS_fcntl, [0, i64::from(libc::F_SETOWN), 0]) == 0), KILLED);
    assert_eq!(under(device, || map(libc::PROT_READ | libc::PROT_WRITE)), WORKED);
}

// Promise: F5
#[test]
fn worker_may_open_files_only_until_it_is_settled() {
    let (worker, settled) = (&[Role::Worker][..], &[Role::Worker, Role::WorkerSettled][..]);
    assert_eq!(under(worker, open_file), WORKED);
    assert_eq!(under(settled, || !open_file() && errno() == libc::ENOSYS), WORKED);
    assert_eq!(under(settled, || call(libc::SYS_open, [0, 0, 0]) == 0), KILLED);
    assert_eq!(under(settled, || std::os::unix::net::UnixStream::connect("/").is_ok()), KILLED);
    assert_eq!(under(worker, || map(libc::PROT_READ | libc::PROT_EXEC)), WORKED);
    assert_eq!(under(settled, || map(libc::PROT_READ | libc::PROT_EXEC)), KILLED);
    for roles in [worker, settled] {
        assert_eq!(under(roles, fork_here), KILLED);
        assert_eq!(under(roles, || call(libc::SYS_execve, [0, 0, 0]) == 0), KILLED);
        assert_eq!(under(roles, || map(libc::PROT_READ | libc::PROT_WRITE)), WORKED);
        // A bad descriptor: the call is made and refused.
        let ask = || call(libc::SYS_ioctl, [-1, 0x5401, 0]) == -1 && errno() == libc::EBADF;
        assert_eq!(under(roles, ask), WORKED);
    }
    assert_eq!(
        under(worker, || call(libc::SYS_ioctl, [-1, 0x46_2a, 0]) == -1 && errno() == libc::EBADF),
        WORKED
    );
    assert_eq!(under(settled, || call(libc::SYS_ioctl, [-1, 0x46_2a, 0]) == 0), KILLED);
}

// Promise: F5
#[test]
fn worker_may_signal_only_itself_and_inject_no_terminal_input() {
    let parent = i64::from(std::process::id());
    for roles in [&[Role::Worker][..], &[Role::Worker, Role::WorkerSettled]] {
        // Signal 0 sends no signal if it is allowed.
        assert_eq!(under(roles, || call(libc::SYS_tgkill, [parent, parent, 0]) == 0), KILLED, "{roles:?}");
        let own = || {
            let own = i64::from(std::process::id());
            call(libc::SYS_tgkill, [own, own, 0]) == 0
        };
        assert_eq!(under(roles, own), WORKED, "{roles:?}");
        assert_eq!(under(roles, || call(libc::SYS_kill, [parent, 9, 0]) == 0), KILLED, "{roles:?}");
        // TIOCSTI, FIOASYNC, FIOSETOWN, SIOCSPGRP on no descriptor; the upper half of a command does not count.
        for command in [0x5412, 0x5452, 0x8901, 0x8902, 0x1_0000_5412] {
            assert_eq!(under(roles, || call(libc::SYS_ioctl, [-1, command, 0]) == 0), KILLED, "{command:#x}");
        }
        // Another process's limits, queried without a buffer for the answer.
        assert_eq!(under(roles, || call(libc::SYS_prlimit64, [parent, 0, 0]) == 0), KILLED, "{roles:?}");
        assert_eq!(under(roles, || call(libc::SYS_prlimit64, [0, 0, 0]) == 0), WORKED, "{roles:?}");
        let network =
            || call(libc::SYS_socket, [i64::from(libc::AF_INET), i64::from(libc::SOCK_DGRAM), 0]) >= 0;
        assert_eq!(under(roles, network), KILLED, "{roles:?}");
    }
}

// Promise: F15
#[test]
fn inventory_may_open_files_and_start_no_process() {
    let inventory = &[Role::Inventory];
    assert_eq!(under(inventory, open_file), WORKED);
    assert_eq!(under(inventory, || map(libc::PROT_READ | libc::PROT_EXEC)), WORKED);
    assert_eq!(under(inventory, fork_here), KILLED);
    assert_eq!(under(inventory, || call(libc::SYS_execve, [0, 0, 0]) == 0), KILLED);
    assert_eq!(under(inventory, || call(libc::SYS_ioctl, [-1, 0x5412, 0]) == 0), KILLED);
    let parent = i64::from(std::process::id());
    assert_eq!(under(inventory, || call(libc::SYS_kill, [parent, 0, 0]) == 0), WORKED);
    assert_eq!(under(inventory, || call(libc::SYS_kill, [parent, 9, 0]) == 0), KILLED);
    let network = || std::net::UdpSocket::bind("127.0.0.1:0").is_err() && errno() == libc::ENOSYS;
    assert_eq!(under(inventory, network), WORKED);
}

// Promise: F5
#[test]
fn arbiter_may_signal_by_pidfd_and_start_no_process() {
    let arbiter = &[Role::Arbiter];
    assert_eq!(under(arbiter, open_file), WORKED, "a driver opens its devices");
    // A bad descriptor: the call is made and refused.
    let signal = || call(libc::SYS_pidfd_send_signal, [-1, 9, 0]) == -1 && errno() == libc::EBADF;
    assert_eq!(under(arbiter, signal), WORKED);
    assert_eq!(under(arbiter, fork_here), KILLED);
    assert_eq!(under(arbiter, || call(libc::SYS_execve, [0, 0, 0]) == 0), KILLED);
    let parent = i64::from(std::process::id());
    assert_eq!(under(arbiter, || call(libc::SYS_kill, [parent, 9, 0]) == 0), KILLED, "never by a number");
    let network = || call(libc::SYS_socket, [i64::from(libc::AF_INET), i64::from(libc::SOCK_DGRAM), 0]) >= 0;
    assert_eq!(under(arbiter, network), KILLED);
}

/// A socket pair, made before the filter is entered.
fn pair() -> (i64, std::os::unix::net::UnixStream, std::os::unix::net::UnixStream) {
    use std::os::fd::AsRawFd as _;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    (i64::from(ours.as_raw_fd()), ours, theirs)
}

/// A socket option of a peer, or of the socket.
fn option(socket: i64, option: i32) -> bool {
    let (mut value, mut length) = ([0u8; 64], 64u32);
    let (value, length) = (value.as_mut_ptr() as i64, (&raw mut length) as i64);
    let arguments = [socket, i64::from(libc::SOL_SOCKET), i64::from(option)];
    // SAFETY: the kernel writes at most 64 bytes to the array, and their number to the length.
    unsafe {
        libc::syscall(libc::SYS_getsockopt, arguments[0], arguments[1], arguments[2], value, length) == 0
    }
}

// Promise: F71
#[test]
fn process_that_reads_peer_credentials_is_killed() {
    const SO_PEERPIDFD: i32 = 77;
    for roles in STACKS.into_iter().filter(|roles| **roles != [Role::Launcher]) {
        for asked in [SO_PEERPIDFD, libc::SO_PEERCRED, libc::SO_PEERSEC] {
            let held = pair();
            assert_eq!(under(roles, || option(held.0, asked)), KILLED, "{roles:?} {asked}");
        }
    }
    let held = pair();
    for asked in [libc::SO_TYPE, libc::SO_DOMAIN] {
        assert_eq!(under(&[Role::Device], || option(held.0, asked)), WORKED, "{asked}");
    }
    // The same numbers at another level are other options.
    let other =
        || call(libc::SYS_getsockopt, [held.0, i64::from(libc::SOL_TCP), i64::from(libc::SO_TYPE)]) == 0;
    assert_eq!(under(&[Role::Device], other), KILLED);
}

// Promise: F71
#[test]
fn arbiter_may_set_no_socket_option_but_the_send_buffer() {
    const SO_PASSPIDFD: i32 = 76;
    let held = pair();
    let set = |option: i32| {
        let one = 1u32;
        // SAFETY: four bytes are read from the number.
        unsafe {
            libc::syscall(libc::SYS_setsockopt, held.0, libc::SOL_SOCKET, option, &raw const one, 4u32) == 0
        }
    };
    assert_eq!(under(&[Role::Arbiter], || set(libc::SO_SNDBUF)), WORKED);
    for option in [SO_PASSPIDFD, libc::SO_PASSCRED, libc::SO_RCVBUF] {
        assert_eq!(under(&[Role::Arbiter], || set(option)), KILLED, "{option}");
    }
}

// Promise: F71
#[test]
fn standard_streams_are_neither_shut_down_nor_changed() {
    for roles in STACKS {
        for stream in 0..3 {
            // Of a descriptor that is no socket, with an invalid direction: refused if it is allowed.
            let shut = || call(libc::SYS_shutdown, [stream, 99, 0]) == 0;
            assert_eq!(under(roles, shut), KILLED, "{roles:?} shutdown({stream})");
            let now = || call(libc::SYS_fcntl, [stream, i64::from(libc::F_GETFL), 0]) >= 0;
            assert_eq!(under(roles, now), WORKED, "{roles:?} F_GETFL of {stream}");
            let set = || {
                let flags = call(libc::SYS_fcntl, [stream, i64::from(libc::F_GETFL), 0]);
                call(libc::SYS_fcntl, [stream, i64::from(libc::F_SETFL), flags]) == 0
            };
            assert_eq!(under(roles, set), KILLED, "{roles:?} F_SETFL of {stream}");
        }
        let held = pair();
        let set =
            || call(libc::SYS_fcntl, [held.0, i64::from(libc::F_SETFL), i64::from(libc::O_NONBLOCK)]) == 0;
        assert_eq!(under(roles, set), WORKED, "{roles:?} F_SETFL of a socket");
        // An inventory ends no connection itself.
        let ends = if *roles == [Role::Inventory] { KILLED } else { WORKED };
        let shut = || call(libc::SYS_shutdown, [held.0, i64::from(libc::SHUT_RDWR), 0]) == 0;
        assert_eq!(under(roles, shut), ends, "{roles:?} shutdown of a socket");
    }
}

#[test]
fn launcher_may_start_programs() {
    let body = || std::process::Command::new("/bin/true").status().is_ok_and(|status| status.success());
    assert_eq!(under(&[Role::Launcher], body), WORKED);
}

#[test]
fn filtered_process_is_not_dumpable_and_gains_no_privileges() {
    for roles in [&[Role::Worker][..], &[Role::Launcher]] {
        let body = || {
            let dumpable = call(libc::SYS_prctl, [i64::from(libc::PR_GET_DUMPABLE), 0, 0]);
            let locked = call(libc::SYS_prctl, [i64::from(libc::PR_GET_NO_NEW_PRIVS), 0, 0]);
            (dumpable, locked) == (0, 1)
        };
        assert_eq!(under(roles, body), WORKED, "{roles:?}");
    }
}

#[test]
fn unknown_seccomp_setting_is_refused() {
    let body = || {
        // SAFETY: the child has one thread.
        unsafe { std::env::set_var("SLUICE_SECCOMP", "yes") };
        enter(Role::Device).is_err()
    };
    assert_eq!(under(&[], body), WORKED);
}
