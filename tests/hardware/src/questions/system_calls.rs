//! The system calls of the driver in each phase of a worker's life.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};
use sluice_kit::trace::{self, Call};

use crate::kernels::Image;
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::worker::{Command, Peer};

pub(crate) const QUESTIONS: &[Question] = &[Question {
    name: "system-calls",
    question: "Which system calls, ioctls and files does the driver need in each phase of a worker's life?",
    expected: "ioctls of /dev/nvidiactl, /dev/nvidia0 and /dev/nvidia-uvm in all phases; files only up to the first context.",
    consequence: "The worker's and the arbiter's filters are made of this list: a request that is not on it is denied.",
    seconds: 90,
    ask: system_calls,
}];

const PHASES: [&str; 10] =
    ["process", "load", "init", "context", "chunk", "import", "module", "launch", "release", "end"];
/// Largest number of different files, or of control commands, in the list of a phase.
const MOST: usize = 400;

/// The calls of a phase.
#[derive(Default)]
struct Record {
    calls: BTreeMap<u64, u64>,
    ioctls: BTreeMap<(String, u32), u64>,
    files: BTreeSet<String>,
    maps: BTreeSet<String>,
    /// Commands of the resource manager's control request, and classes of its allocation request.
    controls: BTreeSet<u32>,
    classes: BTreeSet<u32>,
}

fn system_calls(step: &Step) -> Answer {
    let mut peer = step.peer()?;
    let mut owner = step.worker()?;
    owner.ask(Command::Create { bytes: 2 << 20 })?;
    let chunk =
        owner.obey(Command::Export, None)?.1.ok_or_else(|| Stop::failed("an export without a descriptor"))?;
    trace::seize(peer.process())
        .map_err(|error| Stop::not_asked(format!("ptrace is not permitted: {error}")))?;
    peer.disown();
    let phase = AtomicUsize::new(0);
    let mut records: Vec<Record> = PHASES.iter().map(|_| Record::default()).collect();
    let (traced, lived) = thread::scope(|scope| {
        let life = scope.spawn(|| {
            let lived = live(&peer, &phase, &chunk);
            phase.store(PHASES.len() - 1, Ordering::SeqCst);
            let closed = peer.hang_up();
            lived.and(closed)
        });
        let traced = trace::follow(|call| {
            if let Some(record) = records.get_mut(phase.load(Ordering::SeqCst)) {
                record.add(call);
            }
        });
        (traced, life.join().unwrap_or_else(|_| Err(Stop::failed("the commanding thread panicked"))))
    });
    for (name, record) in PHASES.iter().zip(records) {
        step.note(name, record.value())?;
    }
    traced?;
    lived
}

/// Leads the other process through its phases.
fn live(peer: &Peer, phase: &AtomicUsize, chunk: &std::os::fd::OwnedFd) -> Answer {
    const BYTES: u64 = 2 << 20;
    let enter = |number: usize| phase.store(number, Ordering::SeqCst);
    enter(1);
    peer.ask(Command::Open)?;
    enter(2);
    peer.ask(Command::Init)?;
    enter(3);
    peer.ask(Command::Start)?;
    enter(4);
    peer.ask(Command::Create { bytes: BYTES })?;
    drop(peer.export()?);
    peer.ask(Command::Release)?;
    enter(5);
    peer.import(chunk, BYTES)?;
    peer.ask(Command::Map)?;
    peer.ask(Command::Write { value: 1 })?;
    enter(6);
    peer.ask(Command::Load { image: Image::Small })?;
    enter(7);
    for _ in 0..3 {
        peer.ask(Command::Sample { milliseconds: 1 })?;
    }
    enter(8);
    peer.ask(Command::Unmap)?;
    peer.ask(Command::Release)?;
    Ok(())
}

impl Record {
    fn add(&mut self, call: Call) {
        const NO_FILE: u64 = 0xffff_ffff;
        const ANONYMOUS: u64 = libc::MAP_ANONYMOUS as u64;
        *self.calls.entry(call.number).or_default() += 1;
        let [first, second, third, fourth, fifth, _] = call.arguments;
        match i64::try_from(call.number).unwrap_or(-1) {
            libc::SYS_ioctl => {
                let request = low(second);
                *self.ioctls.entry((path(call.thread, first), request)).or_default() += 1;
                self.resource_manager(call.thread, request, third);
            }
            libc::SYS_openat => self.file(text(call.thread, second)),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open => self.file(text(call.thread, first)),
            libc::SYS_mmap if fourth & ANONYMOUS == 0 && fifth & NO_FILE != NO_FILE => {
                let path = path(call.thread, fifth);
                if path.starts_with("/dev/") && self.maps.len() < MOST {
                    self.maps.insert(format!("{path} prot {third:#x} flags {fourth:#x}"));
                }
            }
            _ => {}
        }
    }

    fn file(&mut self, path: String) {
        if self.files.len() < MOST {
            self.files.insert(path);
        }
    }

    /// The commands behind the pointer of the resource manager's two main requests.
    fn resource_manager(&mut self, thread: i32, request: u32, at: u64) {
        const MAGIC: u32 = b'F' as u32;
        const CONTROL: u32 = 0x2a;
        const ALLOCATE: u32 = 0x2b;
        let (kind, number) = (request >> 8 & 0xff, request & 0xff);
        let (offset, set) = match (kind, number) {
            (MAGIC, CONTROL) => (8, &mut self.controls),
            (MAGIC, ALLOCATE) => (12, &mut self.classes),
            _ => return,
        };
        let mut word = [0; 4];
        if set.len() < MOST && read(thread, at + offset, &mut word) == 4 {
            set.insert(u32::from_ne_bytes(word));
        }
    }

    fn value(&self) -> Value {
        let calls: serde_json::Map<String, Value> =
            self.calls.iter().map(|(number, count)| (name(*number), json!(count))).collect();
        let ioctls: Vec<Value> = self
            .ioctls
            .iter()
            .map(|((path, request), count)| json!({ "file": path, "request": format!("{request:#x}"), "count": count }))
            .collect();
        let hexadecimal =
            |set: &BTreeSet<u32>| set.iter().map(|number| format!("{number:#x}")).collect::<Vec<_>>();
        json!({
            "calls": calls, "ioctls": ioctls, "files": self.files, "device_maps": self.maps,
            "rm_controls": hexadecimal(&self.controls), "rm_classes": hexadecimal(&self.classes),
        })
    }
}

/// The low half of an argument, which is all that the kernel reads of a 32-bit one.
fn low(argument: u64) -> u32 {
    u32::try_from(argument & 0xffff_ffff).unwrap_or(0)
}

/// The file of a descriptor.
fn path(thread: i32, descriptor: u64) -> String {
    let link = std::fs::read_link(format!("/proc/{thread}/fd/{}", low(descriptor)));
    link.map_or_else(|_| "unknown".to_owned(), |path| path.to_string_lossy().into_owned())
}

/// Reads memory of a stopped thread; the number of bytes that could be read.
fn read(thread: i32, at: u64, into: &mut [u8]) -> usize {
    let memory = std::fs::File::open(format!("/proc/{thread}/mem"));
    memory.and_then(|memory| memory.read_at(into, at)).unwrap_or(0)
}

/// A path in the memory of a stopped thread.
fn text(thread: i32, at: u64) -> String {
    let mut bytes = [0; 256];
    let read = read(thread, at, &mut bytes);
    let text: Vec<u8> = bytes.iter().take(read).copied().take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&text).into_owned()
}

macro_rules! names {
    ($($name:ident $constant:ident,)+) => {
        /// Name of a system call, or its number.
        fn name(number: u64) -> String {
            match i64::try_from(number).unwrap_or(-1) {
                $(libc::$constant => stringify!($name).to_owned(),)+
                _ => format!("number {number}"),
            }
        }
    };
}
names! {
    read SYS_read, write SYS_write, close SYS_close, fstat SYS_fstat, lseek SYS_lseek, mmap SYS_mmap,
    mprotect SYS_mprotect, munmap SYS_munmap, brk SYS_brk, rt_sigaction SYS_rt_sigaction,
    rt_sigprocmask SYS_rt_sigprocmask, ioctl SYS_ioctl, pread64 SYS_pread64, pwrite64 SYS_pwrite64, readv SYS_readv,
    writev SYS_writev, sched_yield SYS_sched_yield, mremap SYS_mremap, mincore SYS_mincore, madvise SYS_madvise,
    dup SYS_dup, nanosleep SYS_nanosleep, getpid SYS_getpid, socket SYS_socket, connect SYS_connect,
    sendto SYS_sendto, recvfrom SYS_recvfrom, sendmsg SYS_sendmsg, recvmsg SYS_recvmsg, shutdown SYS_shutdown,
    bind SYS_bind, listen SYS_listen, accept4 SYS_accept4, getsockname SYS_getsockname, socketpair SYS_socketpair,
    setsockopt SYS_setsockopt, getsockopt SYS_getsockopt, clone SYS_clone, clone3 SYS_clone3, execve SYS_execve,
    exit SYS_exit, exit_group SYS_exit_group, wait4 SYS_wait4, kill SYS_kill, tgkill SYS_tgkill, uname SYS_uname,
    fcntl SYS_fcntl, flock SYS_flock, fsync SYS_fsync, ftruncate SYS_ftruncate, getcwd SYS_getcwd,
    fallocate SYS_fallocate, umask SYS_umask, getrlimit SYS_getrlimit, prlimit64 SYS_prlimit64,
    getrusage SYS_getrusage, sysinfo SYS_sysinfo, getuid SYS_getuid, getgid SYS_getgid, geteuid SYS_geteuid,
    getegid SYS_getegid, sigaltstack SYS_sigaltstack, statfs SYS_statfs, getpriority SYS_getpriority, prctl SYS_prctl,
    gettid SYS_gettid, futex SYS_futex, sched_setaffinity SYS_sched_setaffinity,
    sched_getaffinity SYS_sched_getaffinity, set_tid_address SYS_set_tid_address, clock_gettime SYS_clock_gettime,
    clock_nanosleep SYS_clock_nanosleep, mbind SYS_mbind, get_mempolicy SYS_get_mempolicy,
    set_mempolicy SYS_set_mempolicy, openat SYS_openat, mkdirat SYS_mkdirat, newfstatat SYS_newfstatat,
    unlinkat SYS_unlinkat, readlinkat SYS_readlinkat, faccessat SYS_faccessat, faccessat2 SYS_faccessat2,
    ppoll SYS_ppoll, set_robust_list SYS_set_robust_list, epoll_create1 SYS_epoll_create1, epoll_ctl SYS_epoll_ctl,
    epoll_pwait SYS_epoll_pwait, eventfd2 SYS_eventfd2, pipe2 SYS_pipe2, dup3 SYS_dup3,
    inotify_init1 SYS_inotify_init1, getrandom SYS_getrandom, memfd_create SYS_memfd_create, statx SYS_statx,
    rseq SYS_rseq, getdents64 SYS_getdents64, membarrier SYS_membarrier, userfaultfd SYS_userfaultfd,
    pidfd_open SYS_pidfd_open, pidfd_getfd SYS_pidfd_getfd, rt_sigtimedwait SYS_rt_sigtimedwait,
    timerfd_create SYS_timerfd_create, restart_syscall SYS_restart_syscall, getppid SYS_getppid,
    mlock SYS_mlock, munlock SYS_munlock, set_mempolicy_home_node SYS_set_mempolicy_home_node, capget SYS_capget,
}
