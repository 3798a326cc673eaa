//! Each filter in a process of its own: allowed calls work, others end the process by SIGSYS or fail, as a table says. In one file: the
//! list of all filters.

#![allow(unsafe_code, reason = "fork, and raw system calls")]

use std::os::fd::AsRawFd as _;

use sluice_sandbox::{DriverBranch, DriverList, Role, enter};

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

const SOFTWARE: DriverList = DriverList::Software;

/// The filters that a process in its last role has entered, in order.
fn stack(role: Role) -> Vec<Role> {
    match role {
        Role::WorkerSettled => vec![Role::Worker(SOFTWARE), Role::WorkerSettled],
        Role::Device
        | Role::DirectDevice
        | Role::Arbiter(_)
        | Role::Worker(_)
        | Role::Inventory(_)
        | Role::Launcher => vec![role],
    }
}

fn stacks() -> Vec<Vec<Role>> {
    Role::all().into_iter().map(stack).collect()
}

/// A driver of NVIDIA's.
fn nvidia() -> DriverList {
    DriverList::Nvidia(DriverBranch::all().last().expect("a branch"))
}

/// The column of a role in [`ATTEMPTS`].
const fn column(role: Role) -> usize {
    use DriverList::{Nvidia, Software};
    match role {
        Role::Device => 0,
        Role::DirectDevice => 1,
        Role::WorkerSettled => 2,
        Role::Worker(Software) => 3,
        Role::Arbiter(Software) => 4,
        Role::Inventory(Software) => 5,
        Role::Worker(Nvidia(_)) => 6,
        Role::Arbiter(Nvidia(_)) => 7,
        Role::Inventory(Nvidia(_)) => 8,
        Role::Launcher => 9,
    }
}

/// A call with its arguments: harmless if it is allowed, because a descriptor or a pointer is bad.
type Attempt = (libc::c_long, [i64; 6]);

const fn on(call: libc::c_long, arguments: [i64; 2]) -> Attempt {
    (call, [arguments[0], arguments[1], 0, 0, 0, 0])
}

/// An `ioctl` on no descriptor.
const fn request(number: i64) -> Attempt {
    on(libc::SYS_ioctl, [-1, number])
}

/// A request of NVIDIA's module with an argument of 16 bytes.
const fn escape(number: i64) -> Attempt {
    request(0xc010_4600 | number)
}

const MAP: i64 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as i64;
const HUGE: i64 = libc::MAP_HUGETLB as i64;
const READ_EXECUTE: i64 = (libc::PROT_READ | libc::PROT_EXEC) as i64;
const NEW_USER: i64 = libc::CLONE_NEWUSER as i64;
const THREAD: i64 = 0x003d_0f00;
const OUT_OF_BAND: i64 = libc::MSG_OOB as i64;
const PACKETS: i64 = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as i64;

/// The results of forbidden and of a few permitted calls: `k` killed, `p` EPERM, `n` ENOSYS, `e` ENOENT, `.` the kernel's own answer, which is
/// none of these except for the launcher. The columns are
/// device, device of programs, settled worker; worker, arbiter, inventory with the software GPU; the same three with NVIDIA's driver;
/// launcher.
#[rustfmt::skip]
const ATTEMPTS: &[(&str, Attempt, &str)] = &[
    // Other processes.
    ("ptrace",                  on(libc::SYS_ptrace, [-1, 0]),                              "kkk kkk kkk k"),
    ("process_vm_readv",        on(libc::SYS_process_vm_readv, [-1, 0]),                    "kkk kkk kkk k"),
    ("process_vm_writev",       on(libc::SYS_process_vm_writev, [-1, 0]),                   "kkk kkk kkk k"),
    ("process_madvise",         on(libc::SYS_process_madvise, [-1, 0]),                     "kkk kkk kkk k"),
    ("pidfd_getfd",             on(libc::SYS_pidfd_getfd, [-1, 0]),                         "kkk kkk kkk k"),
    ("pidfd_open",              on(libc::SYS_pidfd_open, [-1, 0]),                          "kkk kkk kkk ."),
    ("kcmp",                    on(libc::SYS_kcmp, [-1, 0]),                                "kkk kkk kkk k"),
    ("a signal by number",      on(libc::SYS_kill, [i32::MAX as i64, 9]),                   "kkk kkk kkk ."),
    ("signal 0 by number",      on(libc::SYS_kill, [i32::MAX as i64, 0]),                   "kk. ... ppp ."),
    ("a thread's signal",       on(libc::SYS_tgkill, [i32::MAX as i64, 1]),                 "kkk kkk kkk ."),
    ("SIGTERM by pidfd",        on(libc::SYS_pidfd_send_signal, [-1, 15]),                  "kkk kkk ppp ."),
    ("SIGKILL by pidfd",        on(libc::SYS_pidfd_send_signal, [-1, 9]),                   "..k k.k p.p ."),
    ("another's limits",        on(libc::SYS_prlimit64, [i32::MAX as i64, 0]),              "kkk kkk ppp ."),
    ("a new limit",             (libc::SYS_prlimit64, [0, 7, 1, 0, 0, 0]),                  "kkk kkk ppp ."),
    ("another's processors",    on(libc::SYS_sched_setaffinity, [i32::MAX as i64, 0]),      "kkk kkk ppp ."),
    ("own processors",          on(libc::SYS_sched_setaffinity, [0, 0]),                    "kkk kkk ... ."),
    ("another's scheduling",    on(libc::SYS_sched_setscheduler, [i32::MAX as i64, 3]),     "kkk kkk ppp ."),
    ("real-time scheduling",    on(libc::SYS_sched_setscheduler, [0, 1]),                   "kkk kkk ppp ."),
    ("own scheduling",          on(libc::SYS_sched_setscheduler, [0, 3]),                   "kkk kkk ... ."),
    ("another's priority",      on(libc::SYS_setpriority, [0, i32::MAX as i64]),            "kkk kkk ppp ."),
    ("SIGKILL to a group",      (libc::SYS_pidfd_send_signal, [-1, 9, 0, 4, 0, 0]),         "kkk kkk ppp ."),
    // Programs and processes.
    ("execve",                  on(libc::SYS_execve, [0, 0]),                               "kkk kkk kkk ."),
    ("execveat",                on(libc::SYS_execveat, [-1, 0]),                            "kkk kkk kkk ."),
    ("clone3",                  on(libc::SYS_clone3, [0, 0]),                               "nnn nnn nnn ."),
    // Namespaces and file systems.
    ("clone of a namespace",    on(libc::SYS_clone, [NEW_USER | THREAD & !0x1_0000, 0]),    "kkk kkk kkk ."),
    ("thread in a namespace",   on(libc::SYS_clone, [NEW_USER | THREAD, 0]),                "kkk kkk ppp ."),
    ("unshare",                 on(libc::SYS_unshare, [-1, 0]),                             "kkk kkk kkk ."),
    ("setns",                   on(libc::SYS_setns, [-1, 0]),                               "kkk kkk kkk ."),
    ("mount",                   on(libc::SYS_mount, [0, 0]),                                "kkk kkk kkk ."),
    ("umount",                  on(libc::SYS_umount2, [0, 0]),                              "kkk kkk kkk ."),
    ("pivot_root",              on(libc::SYS_pivot_root, [0, 0]),                           "kkk kkk kkk ."),
    ("chroot",                  on(libc::SYS_chroot, [0, 0]),                               "kkk kkk kkk ."),
    ("open_tree",               on(libc::SYS_open_tree, [-1, 0]),                           "kkk kkk kkk ."),
    ("move_mount",              on(libc::SYS_move_mount, [-1, 0]),                          "kkk kkk kkk ."),
    ("fsopen",                  on(libc::SYS_fsopen, [0, 0]),                               "kkk kkk kkk ."),
    ("setuid",                  on(libc::SYS_setuid, [-1, 0]),                              "kkk kkk kkk ."),
    // Files.
    ("openat",                  on(libc::SYS_openat, [-1, 0]),                              "nnn ... ... ."),
    ("open",                    on(libc::SYS_open, [0, 0]),                                 "kkk kkk ... ."),
    ("openat2",                 on(libc::SYS_openat2, [-1, 0]),                             "kkk kkk ppp ."),
    ("open_by_handle_at",       on(libc::SYS_open_by_handle_at, [-1, 0]),                   "kkk kkk kkk k"),
    ("rename",                  on(libc::SYS_rename, [0, 0]),                               "kkk kkk ppp ."),
    ("mkdir",                   on(libc::SYS_mkdir, [0, 0]),                                "kkk ... eee ."),
    ("symlink",                 on(libc::SYS_symlink, [0, 0]),                              "kkk kkk eee ."),
    ("unlink",                  on(libc::SYS_unlink, [0, 0]),                               "kkk ... eee ."),
    // Sockets, and descriptors that are passed on.
    ("a local socket",          on(libc::SYS_socket, [libc::AF_UNIX as i64, 1]),            "kkk kkk ppp ."),
    ("the driver's socket",     on(libc::SYS_socket, [libc::AF_UNIX as i64, PACKETS]),      "kkk kkk ..p ."),
    ("a network socket",        on(libc::SYS_socket, [libc::AF_INET as i64, 1]),            "kkk kkk ppp ."),
    ("socketpair",              on(libc::SYS_socketpair, [libc::AF_UNIX as i64, 1]),        "kkk kkk ppp ."),
    ("bind",                    on(libc::SYS_bind, [-1, 0]),                                "kkk kkk ..p ."),
    ("connect",                 on(libc::SYS_connect, [-1, 0]),                             "kkk kkk eee ."),
    ("listen",                  on(libc::SYS_listen, [-1, 0]),                              "kkk kkk ..p ."),
    ("accept",                  on(libc::SYS_accept4, [-1, 0]),                             "..k kkk ppp ."),
    ("sendmsg",                 on(libc::SYS_sendmsg, [-1, 0]),                             "..k k.k p.p ."),
    ("sendmmsg",                on(libc::SYS_sendmmsg, [-1, 0]),                            "kkk kkk ppp ."),
    ("sendto its peer",         (libc::SYS_sendto, [-1, 0, 0, 0, 0, 0]),                    "... ... ... ."),
    ("sendto an address",       (libc::SYS_sendto, [-1, 0, 0, 0, 1 << 32, 0]),              "kkk kkk ppp ."),
    ("dup2 over a socket",      on(libc::SYS_dup2, [-1, 3]),                                "kkk kkk ppp ."),
    ("recvmsg, out of band",    (libc::SYS_recvmsg, [-1, 0, OUT_OF_BAND, 0, 0, 0]),         "kkk kkk ppp ."),
    ("sendmsg, out of band",    (libc::SYS_sendmsg, [-1, 0, OUT_OF_BAND, 0, 0, 0]),         "kkk kkk ppp ."),
    ("sendto, out of band",     (libc::SYS_sendto, [-1, 0, 0, OUT_OF_BAND, 0, 0]),          "kkk kkk ppp ."),
    ("poll of a crowd",         on(libc::SYS_ppoll, [8, 33]),                               "..k k.. p.. ."),
    ("poll of a large crowd",   on(libc::SYS_ppoll, [8, 1025]),                             "kkk k.. p.. ."),
    ("poll of a few",           on(libc::SYS_ppoll, [8, 32]),                               "... ... ... ."),
    ("owner of signals",        on(libc::SYS_fcntl, [-1, libc::F_SETOWN as i64]),           "kkk kkk ppp ."),
    // Requests to devices. The upper half of a request does not count.
    ("KVM_CREATE_VM",           request(0xae01),                                            "kkk kkk ppp ."),
    ("TIOCSTI",                 request(0x5412),                                            "kkk kkk ppp ."),
    ("TIOCSTI, upper half",     request(0x1_0000_5412),                                     "kkk kkk ppp ."),
    ("FIOASYNC",                request(0x5452),                                            "kkk kkk ppp ."),
    ("FIOSETOWN",               request(0x8901),                                            "kkk kkk ppp ."),
    ("TCGETS",                  request(0x5401),                                            "kk. .kk .pp ."),
    ("FIONBIO",                 request(0x5421),                                            "kkk kk. pp. ."),
    ("NV_ESC_RM_CONTROL",       escape(0x2a),                                               "kkk kkk ... ."),
    ("the same, another size",  request(0xc020_462a),                                       "kkk kkk ... ."),
    ("the same, another type",  request(0xc020_452a),                                       "kkk kkk ppp ."),
    ("the same, only reading",  request(0x8020_462a),                                       "kkk kkk ppp ."),
    ("NV_ESC_RM_I2C_ACCESS",    escape(0x39),                                               "kkk kkk ppp ."),
    ("NV_ESC_RM_GET_EVENT_DATA", escape(0x52),                                              "kkk kkk pp. ."),
    ("NV_ESC_IOCTL_XFER_CMD",   escape(211),                                                "kkk kkk ppp ."),
    ("UVM_INITIALIZE",          request(0x3000_0001),                                       "kkk kkk ..p ."),
    ("UVM_CREATE_EXTERNAL_…",   request(73),                                                "kkk kkk ..p ."),
    ("UVM_TOOLS_READ_…",        request(62),                                                "kkk kkk ppp ."),
    ("UVM_RUN_TEST",            request(9),                                                 "kkk kkk ppp ."),
    // Memory.
    ("mremap",                  on(libc::SYS_mremap, [0, 0]),                               "nnn nnn nnn ."),
    ("remap_file_pages",        on(libc::SYS_remap_file_pages, [-1, 0]),                    "kkk kkk kkk k"),
    ("mmap of code",            (libc::SYS_mmap, [0, 4096, READ_EXECUTE, MAP, -1, 0]),      "kkk ... ... ."),
    ("mmap of huge pages",      (libc::SYS_mmap, [0, 4096, 3, MAP | HUGE, -1, 0]),          "kkk kkk ppp ."),
    ("memfd of huge pages",     on(libc::SYS_memfd_create, [0, libc::MFD_HUGETLB as i64]),  "kkk kkk ppp ."),
    ("mlockall",                on(libc::SYS_mlockall, [-1, 0]),                            "kkk kkk ppp ."),
    ("userfaultfd",             on(libc::SYS_userfaultfd, [-1, 0]),                         "kkk kkk kkk k"),
    ("futex of priorities",     on(libc::SYS_futex, [0, libc::FUTEX_LOCK_PI as i64]),       "kkk kkk ppp ."),
    ("futex of its own",        on(libc::SYS_futex, [8, libc::FUTEX_WAIT_BITSET as i64]),   "... ... ... ."),
    // The kernel, and the filter itself.
    ("io_uring_setup",          on(libc::SYS_io_uring_setup, [0, 0]),                       "kkk kkk kkk k"),
    ("io_uring_enter",          on(libc::SYS_io_uring_enter, [-1, 0]),                      "kkk kkk kkk k"),
    ("bpf",                     on(libc::SYS_bpf, [-1, 0]),                                 "kkk kkk kkk k"),
    ("perf_event_open",         on(libc::SYS_perf_event_open, [0, 0]),                      "kkk kkk kkk k"),
    ("keyctl",                  on(libc::SYS_keyctl, [-1, 0]),                              "kkk kkk kkk k"),
    ("add_key",                 on(libc::SYS_add_key, [0, 0]),                              "kkk kkk kkk k"),
    ("request_key",             on(libc::SYS_request_key, [0, 0]),                          "kkk kkk kkk k"),
    ("kexec_load",              on(libc::SYS_kexec_load, [0, 0]),                           "kkk kkk kkk k"),
    ("modify_ldt",              on(libc::SYS_modify_ldt, [-1, 0]),                          "kkk kkk kkk k"),
    ("dumpable",                on(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as i64, 1]),     "nnk kkk ppp ."),
    ("filter with a listener",  on(libc::SYS_seccomp, [1, 8]),                              "kkk kkk ppp ."),
];

// Promise: F5
// Promise: F110
// Promise: F111
// Promise: F112
// Promise: F113
#[test]
fn each_attempt_under_each_role_ends_as_the_table_says() {
    let columns: std::collections::BTreeSet<usize> = Role::all().into_iter().map(column).collect();
    for role in Role::all() {
        let filters = stack(role);
        for (name, (number, arguments), results) in ATTEMPTS {
            let results: Vec<char> = results.chars().filter(|result| *result != ' ').collect();
            assert!(columns.iter().copied().eq(0..results.len()), "{name}: a role has no result");
            let [a, b, c, d, e, f] = *arguments;
            let attempt = || {
                // SAFETY: the arguments have no effect: the descriptor, the pointer, the process or the flags are bad.
                let result = unsafe { libc::syscall(*number, a, b, c, d, e, f) };
                let status = if result >= 0 { 0 } else { errno() };
                // SAFETY: ends the child without running the parent's destructors.
                unsafe { libc::_exit(status) }
            };
            let end = under(&filters, attempt);
            let is_as_expected = match results[column(role)] {
                'k' => end == KILLED,
                'p' => end == End::Exit(libc::EPERM),
                'n' => end == End::Exit(libc::ENOSYS),
                'e' => end == End::Exit(libc::ENOENT),
                '.' if role == Role::Launcher => matches!(end, End::Exit(_)),
                '.' => {
                    let refusals = [libc::EPERM, libc::ENOSYS, libc::ENOENT];
                    matches!(end, End::Exit(status) if !refusals.contains(&status))
                }
                other => panic!("{name}: {other} is no result"),
            };
            assert!(is_as_expected, "{role:?}, {name}: {end:?}, not {}", results[column(role)]);
        }
    }
}

// Promise: F5
#[test]
fn no_role_but_the_launcher_starts_a_process() {
    for filters in stacks().into_iter().filter(|filters| *filters != [Role::Launcher]) {
        assert_eq!(under(&filters, fork_here), KILLED, "{filters:?}");
    }
}

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

#[test]
fn every_role_may_use_memory_threads_and_time() {
    for roles in &stacks() {
        let body = || {
            let big = vec![1u8; 8 << 20];
            let handle = std::thread::spawn(move || big.iter().map(|byte| u64::from(*byte)).sum::<u64>());
            std::thread::park_timeout(std::time::Duration::from_millis(1));
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
                    std::thread::park_timeout(std::time::Duration::from_millis(20));
                    list.len()
                })
            })
            .collect();
        threads.into_iter().all(|thread| thread.join().is_ok_and(|count| count == 100))
    };
    for roles in [stack(Role::Device), stack(Role::WorkerSettled), stack(Role::Worker(nvidia()))] {
        assert_eq!(under(&roles, body), WORKED, "{roles:?}");
    }
}

// Promise: F5
#[test]
fn growing_vector_works_without_mremap() {
    for roles in &stacks() {
        let body = || {
            let mut list: Vec<u64> = Vec::new();
            (0..4u64 << 20).for_each(|i| list.push(i));
            list.iter().sum::<u64>() == (0..4u64 << 20).sum()
        };
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
    assert_eq!(under(device, || std::os::unix::net::UnixStream::pair().is_ok()), KILLED);
    assert_eq!(under(device, || std::os::unix::net::UnixDatagram::unbound().is_ok()), KILLED);
    assert_eq!(under(device, || map(libc::PROT_READ | libc::PROT_EXEC)), KILLED);
    assert_eq!(under(device, || map(libc::PROT_READ | libc::PROT_WRITE)), WORKED);
}

// Promise: F5, F99
#[test]
fn worker_may_open_files_only_until_it_is_settled() {
    let (worker, settled) = (stack(Role::Worker(SOFTWARE)), stack(Role::WorkerSettled));
    assert_eq!(under(&worker, open_file), WORKED);
    assert_eq!(under(&settled, || !open_file() && errno() == libc::ENOSYS), WORKED);
    assert_eq!(under(&worker, || map(libc::PROT_READ | libc::PROT_EXEC)), WORKED);
    assert_eq!(under(&settled, || map(libc::PROT_READ | libc::PROT_EXEC)), KILLED);
    assert_eq!(under(&stack(Role::Worker(nvidia())), open_file), WORKED);
}

// Promise: S96
#[test]
fn settled_worker_changes_code_through_its_file_and_maps_none() {
    const RETURN: [u8; 1] = [0xc3];
    let file = rustix::fs::memfd_create("code", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let descriptor = file.as_raw_fd();
    let map_file = |protection| {
        // SAFETY: a new mapping at an address that the system chooses.
        unsafe { libc::mmap(core::ptr::null_mut(), 4096, protection, libc::MAP_SHARED, descriptor, 0) }
    };
    let code = map_file(libc::PROT_READ | libc::PROT_EXEC);
    assert_ne!(code, libc::MAP_FAILED);
    let roles = stack(Role::WorkerSettled);
    let executable = libc::PROT_READ | libc::PROT_EXEC;
    // SAFETY: the page has no other user.
    let protect = |protection| unsafe { libc::mprotect(code, 4096, protection) } == 0;
    let change = || {
        // SAFETY: the bytes are a constant, and the file has a page.
        let written = unsafe { libc::pwrite(descriptor, RETURN.as_ptr().cast(), RETURN.len(), 0) } == 1;
        // SAFETY: the page is mapped for reading.
        let seen = unsafe { code.cast::<u8>().read_volatile() } == RETURN[0];
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the range is that of the file.
        let went = unsafe { libc::fallocate(descriptor, hole, 0, 4096) } == 0;
        // SAFETY: as above.
        written && seen && went && unsafe { code.cast::<u8>().read_volatile() } == 0
    };
    assert_eq!(under(&roles, change), WORKED);
    assert_eq!(under(&roles, || protect(libc::PROT_READ)), WORKED);
    assert_eq!(under(&roles, || protect(executable)), KILLED);
    assert_eq!(under(&roles, || map_file(executable) != libc::MAP_FAILED), KILLED);
}

// Promise: F5
#[test]
fn worker_may_signal_only_itself() {
    let parent = i64::from(std::process::id());
    for roles in [stack(Role::Worker(SOFTWARE)), stack(Role::WorkerSettled), stack(Role::Worker(nvidia()))] {
        // Signal 0 sends no signal if it is allowed.
        assert_eq!(under(&roles, || call(libc::SYS_tgkill, [parent, parent, 0]) == 0), KILLED, "{roles:?}");
        let own = || {
            let own = i64::from(std::process::id());
            call(libc::SYS_tgkill, [own, own, 0]) == 0
        };
        assert_eq!(under(&roles, own), WORKED, "{roles:?}");
        assert_eq!(under(&roles, || call(libc::SYS_kill, [parent, 9, 0]) == 0), KILLED, "{roles:?}");
    }
}

// Promise: F111
#[test]
fn worker_cannot_pass_a_descriptor_on() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
    use std::os::fd::AsFd as _;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let message = || send(&ours, b"x", SendFlags::NOSIGNAL) == Ok(1);
    let with_descriptor = || {
        let mut space = [core::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [theirs.as_fd()];
        let text = [std::io::IoSlice::new(b"x")];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&ours, &text, &mut control, SendFlags::NOSIGNAL)
    };
    // The message is valid: a process that may send it does.
    assert_eq!(under(&[Role::Device], || with_descriptor() == Ok(1)), WORKED);
    for roles in [stack(Role::Worker(SOFTWARE)), stack(Role::WorkerSettled)] {
        assert_eq!(under(&roles, message), WORKED, "{roles:?}");
        assert_eq!(under(&roles, || with_descriptor().is_ok()), KILLED, "{roles:?}");
    }
    let refused = || with_descriptor() == Err(rustix::io::Errno::PERM);
    assert_eq!(under(&[Role::Worker(nvidia())], message), WORKED);
    assert_eq!(under(&[Role::Worker(nvidia())], refused), WORKED);
}

// Promise: F15
#[test]
fn inventory_may_open_files_and_start_no_process() {
    let parent = i64::from(std::process::id());
    for list in [SOFTWARE, nvidia()] {
        let inventory = &[Role::Inventory(list)];
        assert_eq!(under(inventory, open_file), WORKED);
        assert_eq!(under(inventory, || map(libc::PROT_READ | libc::PROT_EXEC)), WORKED);
        assert_eq!(under(inventory, fork_here), KILLED);
        assert_eq!(under(inventory, || call(libc::SYS_kill, [parent, 9, 0]) == 0), KILLED);
    }
    assert_eq!(under(&[Role::Inventory(SOFTWARE)], || call(libc::SYS_kill, [parent, 0, 0]) == 0), WORKED);
}

// Promise: F5
#[test]
fn arbiter_may_signal_by_pidfd_and_start_no_process() {
    let parent = i64::from(std::process::id());
    for list in [SOFTWARE, nvidia()] {
        let arbiter = &[Role::Arbiter(list)];
        assert_eq!(under(arbiter, open_file), WORKED, "a driver opens its devices");
        // A bad descriptor: the call is made and refused.
        let signal = || call(libc::SYS_pidfd_send_signal, [-1, 9, 0]) == -1 && errno() == libc::EBADF;
        assert_eq!(under(arbiter, signal), WORKED);
        assert_eq!(under(arbiter, fork_here), KILLED);
        assert_eq!(under(arbiter, || call(libc::SYS_kill, [parent, 9, 0]) == 0), KILLED, "never by a number");
    }
}

/// Runs `body` under the filter of a role, and returns its end and the lines that it left on standard error.
fn with_lines(role: Role, body: impl FnOnce() -> bool) -> (End, Vec<String>) {
    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let end = under(&[], || {
        // SAFETY: the child's standard error becomes the pipe.
        let moved = unsafe { libc::dup2(writer.as_raw_fd(), 2) };
        moved == 2 && enter(role).is_ok() && body()
    });
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("text");
    (end, text.lines().map(str::to_owned).collect())
}

/// Makes a request to no descriptor; true if it is refused.
fn is_refused(request: i64) -> bool {
    call(libc::SYS_ioctl, [-1, request, 0]) == -1 && errno() == libc::EPERM
}

// Promise: F98
#[test]
fn refused_call_of_a_driver_leaves_one_line() {
    for role in [Role::Worker(nvidia()), Role::Arbiter(nvidia()), Role::Inventory(nvidia())] {
        let body = || {
            let socket = || call(libc::SYS_socket, [libc::AF_UNIX.into(), 1, 0]) == -1;
            (0..1000).all(|_| is_refused(0xae01) && is_refused(0x5412) && socket() && errno() == libc::EPERM)
        };
        let (end, lines) = with_lines(role, body);
        assert_eq!(end, WORKED, "{role:?}: {lines:?}");
        let rest = "is not on the list of this process and its driver: EPERM";
        let expected = [
            format!("request 0xae01 of system call 16 {rest}"),
            format!("request 0x5412 of system call 16 {rest}"),
            format!("system call 41 {rest}"),
        ];
        assert_eq!(lines, expected, "{role:?}");
    }
}

// Promise: F98
#[test]
fn flood_of_refused_calls_leaves_few_lines() {
    let (end, lines) = with_lines(Role::Worker(nvidia()), || (0xa000..0xb000).all(is_refused));
    assert_eq!((end, lines.len()), (WORKED, 32));
    assert!(lines.last().is_some_and(|line| line.ends_with("; others leave no line any more")), "{lines:?}");
}

// Promise: F98
#[test]
fn refused_call_does_not_end_a_thread_that_blocks_all_signals() {
    let body = || {
        let every = u64::MAX;
        let mask = |how: i32, set: *const u64, old: *mut u64| {
            // SAFETY: each pointer is null or to eight bytes.
            unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, set, old, 8) == 0 }
        };
        let blocked = move || {
            let mut now = 0;
            let read = mask(libc::SIG_BLOCK, core::ptr::null(), &raw mut now);
            if read { now } else { 0 }
        };
        let none: *mut u64 = core::ptr::null_mut();
        let set = mask(libc::SIG_SETMASK, &raw const every, none);
        // Its thread inherits the mask, and is started with more calls that block all signals.
        let thread = std::thread::spawn(move || is_refused(0xae01) && blocked().count_ones() >= 60);
        set && is_refused(0xae01) && thread.join().is_ok_and(|refused| refused)
    };
    let (end, lines) = with_lines(Role::Worker(nvidia()), body);
    assert_eq!((end, lines.len()), (WORKED, 1), "{lines:?}");
}

// Promise: F98
#[test]
fn bad_set_of_blocked_signals_fails_and_ends_no_process() {
    for role in [Role::Worker(nvidia()), Role::Arbiter(nvidia()), Role::Inventory(nvidia())] {
        let body = || {
            let set = u64::MAX;
            let error = |set: *const u64, old: *mut u64, bytes: usize| {
                // SAFETY: the kernel, or the handler in its place, checks the pointers.
                let result =
                    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, set, old, bytes) };
                if result == 0 { 0 } else { errno() }
            };
            let (none, bad) = (core::ptr::null_mut(), core::ptr::without_provenance_mut(8));
            error(bad, none, 8) == libc::EFAULT
                && error(bad, none, 4) == libc::EINVAL
                && error(&raw const set, bad, 8) == libc::EFAULT
                && error(&raw const set, none, 8) == 0
                && is_refused(0xae01)
        };
        assert_eq!(with_lines(role, body).0, WORKED, "{role:?}");
    }
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
    let may_not = |roles: &Vec<Role>| *roles != [Role::Launcher] && *roles != [Role::DirectDevice];
    for roles in stacks().into_iter().filter(may_not) {
        for asked in [SO_PEERPIDFD, libc::SO_PEERCRED, libc::SO_PEERSEC] {
            let held = pair();
            let end = under(&roles, || !option(held.0, asked) && errno() == libc::EPERM);
            assert_eq!(end, if refuses(&roles) { WORKED } else { KILLED }, "{roles:?} {asked}");
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
    for role in [Role::Arbiter(SOFTWARE), Role::Arbiter(nvidia())] {
        assert_eq!(under(&[role], || set(libc::SO_SNDBUF)), WORKED);
        for option in [SO_PASSPIDFD, libc::SO_PASSCRED, libc::SO_RCVBUF] {
            // NVIDIA's driver tries this one at its start.
            let refusal = if option == libc::SO_PASSCRED { libc::ENOENT } else { libc::EPERM };
            let end = under(&[role], || !set(option) && errno() == refusal);
            assert_eq!(end, if refuses(&[role]) { WORKED } else { KILLED }, "{role:?} {option}");
        }
    }
}

/// True if calls that are on no list fail with EPERM.
fn refuses(roles: &[Role]) -> bool {
    use DriverList::Nvidia;
    matches!(roles, [Role::Worker(Nvidia(_)) | Role::Arbiter(Nvidia(_)) | Role::Inventory(Nvidia(_))])
}

// Promise: F71
#[test]
fn standard_streams_are_neither_shut_down_nor_changed() {
    for roles in &stacks() {
        let refusal = if refuses(roles) { WORKED } else { KILLED };
        let is_refused = |done: bool| !done && errno() == libc::EPERM;
        for stream in 0..3 {
            // Of a descriptor that is no socket, with an invalid direction: refused if it is allowed.
            let shut = || is_refused(call(libc::SYS_shutdown, [stream, 99, 0]) == 0);
            // The launcher's filter, which they inherit, kills.
            assert_eq!(under(roles, shut), refusal, "{roles:?} shutdown({stream})");
            let now = || call(libc::SYS_fcntl, [stream, i64::from(libc::F_GETFL), 0]) >= 0;
            assert_eq!(under(roles, now), WORKED, "{roles:?} F_GETFL of {stream}");
            let set = || {
                let flags = call(libc::SYS_fcntl, [stream, i64::from(libc::F_GETFL), 0]);
                is_refused(call(libc::SYS_fcntl, [stream, i64::from(libc::F_SETFL), flags]) == 0)
            };
            assert_eq!(under(roles, set), refusal, "{roles:?} F_SETFL of {stream}");
        }
        let held = pair();
        let set =
            || call(libc::SYS_fcntl, [held.0, i64::from(libc::F_SETFL), i64::from(libc::O_NONBLOCK)]) == 0;
        assert_eq!(under(roles, set), WORKED, "{roles:?} F_SETFL of a socket");
        // Only a device ends connections itself.
        let may = matches!(roles[..], [Role::Device | Role::DirectDevice | Role::Launcher]);
        let shut = || {
            let done = call(libc::SYS_shutdown, [held.0, i64::from(libc::SHUT_RDWR), 0]) == 0;
            if may { done } else { is_refused(done) }
        };
        assert_eq!(under(roles, shut), if may { WORKED } else { refusal }, "{roles:?} shutdown of a socket");
    }
}

#[test]
fn launcher_may_start_programs() {
    let body = || std::process::Command::new("/bin/true").status().is_ok_and(|status| status.success());
    assert_eq!(under(&[Role::Launcher], body), WORKED);
}

#[test]
fn filtered_process_is_not_dumpable_and_gains_no_privileges() {
    let body = || {
        let dumpable = call(libc::SYS_prctl, [i64::from(libc::PR_GET_DUMPABLE), 0, 0]);
        let locked = call(libc::SYS_prctl, [i64::from(libc::PR_GET_NO_NEW_PRIVS), 0, 0]);
        (dumpable, locked) == (0, 1)
    };
    assert_eq!(under(&[Role::Launcher], body), WORKED);
    let locked = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        status.lines().any(|line| line.split_whitespace().eq(["NoNewPrivs:", "1"]))
    };
    for role in [Role::Worker(SOFTWARE), Role::Worker(nvidia())] {
        assert_eq!(under(&[role], locked), WORKED, "{role:?}");
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
