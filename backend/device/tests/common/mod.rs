//! A real `sluice-device` process between a front-end and a `sluiced` that are this test.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(unsafe_code, reason = "descriptors for a child, and shared memory")]

pub mod raw;

use raw::{FREE, Raw};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, AsRawFd, OwnedFd},
    process::{Pid, PidfdFlags, pidfd_open},
};
use sluice_messages::control::{self, FromDevice, FromWorker, ToDevice, ToWorker};
use sluice_protocol::{doorbell::Doorbell, limits, session, shared::Shared};
use sluice_shared_memory::{Mapping, Run, mapping::Words, socket};
use std::{
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

pub const SECOND: Duration = Duration::from_secs(1);
/// What must not take long is given this long, on a machine that may be busy.
pub const SOON: Duration = Duration::from_secs(60);
/// What took no longer was not ended by time, as a wait is in the end.
const IN_TIME: Duration = Duration::from_millis(limits::WAITER_MILLISECONDS * 9 / 10);

/// Does something until it did not take as long as a wait that is ended by time, and answers what came of it. A busy
/// machine may be late a few times; where only time ends a wait, each time is.
#[track_caller]
pub fn in_time<T>(mut attempt: impl FnMut() -> (Duration, T)) -> T {
    let mut took = Vec::new();
    while took.len() < 20 {
        let (this, made) = attempt();
        if this < IN_TIME {
            return made;
        }
        took.push(this);
    }
    panic!("waits are ended by time only: {took:?}");
}

/// Waits until something is so.
#[track_caller]
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !so() {
        assert!(started.elapsed() < SOON, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn readable(fd: impl AsFd, timeout: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: timeout.as_secs().try_into().unwrap(), tv_nsec: timeout.subsec_nanos().into() };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).unwrap() > 0
}

/// Has a child find a descriptor under a number of its own.
pub fn pass_on(command: &mut Command, descriptor: &impl AsRawFd, number: i32) {
    let descriptor = descriptor.as_raw_fd();
    let duplicate = move || {
        // SAFETY: any two numbers may be given to dup2, which may be called between fork and exec.
        let duplicated = unsafe { libc::dup2(descriptor, number) };
        // SAFETY: as above. A descriptor that had the number already is still close-on-exec.
        let kept = unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
        if (duplicated, kept) == (number, 0) { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: the closure only makes a system call.
    unsafe { command.pre_exec(duplicate) };
}

fn receive(from: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    assert!(readable(from, SOON), "no message");
    let mut buffer = [0; control::BYTES];
    let (bytes, fds) = socket::receive(from, &mut buffer).unwrap().expect("the peer is gone");
    (bytes.to_vec(), fds)
}

/// A device process and the test's end of its control socket.
pub struct Device {
    pub process: Child,
    pub control: OwnedFd,
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Device {
    pub fn start(arguments: &[&str]) -> Device {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("device");
        let (control, theirs) = socket::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-device"));
        command.arg("--socket-path").arg(&path).args(["--control-fd", "200"]).args(arguments);
        command.env("SLUICE_LOG", std::env::var("SLUICE_LOG").unwrap_or("warn".into())).stdin(Stdio::null());
        pass_on(&mut command, &theirs, 200);
        let process = command.spawn().unwrap();
        let device = Device { process, control, path, _directory: directory };
        eventually("listening", || std::os::unix::net::UnixStream::connect(&device.path).is_ok());
        device
    }

    /// Answers the next request for a worker with one.
    pub fn give_worker(&self) -> Worker {
        self.give_worker_to(self.wanted())
    }

    /// Answers a request for a worker with one.
    pub fn give_worker_to(&self, session: u32) -> Worker {
        let (worker, theirs) = Worker::new(session);
        let message = ToDevice::Worker { session }.encode();
        socket::send(&self.control, &message, &[theirs.as_fd(), worker.pidfd.as_fd()]).unwrap();
        worker
    }

    /// The next request for a worker.
    pub fn wanted(&self) -> u32 {
        loop {
            match self.hear() {
                FromDevice::WorkerWanted { session, .. } => return session,
                FromDevice::SessionEnded { .. } => {}
            }
        }
    }

    /// The next message.
    pub fn hear(&self) -> FromDevice {
        let (bytes, fds) = receive(&self.control);
        assert!(fds.is_empty());
        FromDevice::decode(&bytes).unwrap()
    }

    /// Open descriptors of the process.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.process.id())).unwrap().count()
    }

    /// Mappings of the process.
    pub fn mappings(&self) -> usize {
        std::fs::read_to_string(format!("/proc/{}/maps", self.process.id())).unwrap().lines().count()
    }

    pub fn is_alive(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let alive = self.process.try_wait().unwrap();
        let _ = self.process.kill();
        let _ = self.process.wait();
        if !std::thread::panicking() {
            assert_eq!(alive, None, "the device died");
        }
    }
}

/// A worker: a process to be killed, and this test's thread to do its work.
pub struct Worker {
    pub session: u32,
    pub process: Child,
    pub pidfd: OwnedFd,
    pub socket: OwnedFd,
}

impl Worker {
    fn new(session: u32) -> (Worker, OwnedFd) {
        let (socket, theirs) = socket::pair().unwrap();
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_raw(process.id().try_into().unwrap()).unwrap();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        (Worker { session, process, pidfd, socket }, theirs)
    }

    pub fn hear(&self) -> (ToWorker, Vec<OwnedFd>) {
        let (bytes, fds) = receive(&self.socket);
        let message = ToWorker::decode(&bytes).unwrap();
        assert_eq!(message.descriptors(), fds.len());
        (message, fds)
    }

    pub fn say(&self, message: FromWorker) {
        socket::send(&self.socket, &message.encode(), &[]).unwrap();
    }

    /// Takes the start of a session: its eventfds and its control resource, and declares it ready.
    pub fn begin(&self) -> Begun {
        let (message, fds) = self.hear();
        assert_eq!(message, ToWorker::Begin { session: self.session, version: control::VERSION });
        let [doorbell, wake] = fds.try_into().unwrap();
        let (slot, address, control) = self.attach();
        assert_eq!((slot, address, control.bytes()), (0, 0, session::BYTES as u64));
        let words = control.words();
        self.say(FromWorker::Attached { slot: 0, error: 0 });
        words.store_u32(session::STATE, session::READY, Ordering::Release);
        let begun = Begun { doorbell, wake, words, _control: control };
        begun.wake();
        begun
    }

    /// Takes a request to map something and maps it, anywhere.
    pub fn attach(&self) -> (u32, u64, Mapping) {
        let mut pieces = Vec::new();
        loop {
            let (message, fds) = self.hear();
            let ToWorker::Attach { slot, address, bytes, runs, extents, granule, more } = message else {
                panic!("{message:?}")
            };
            assert!(extents > 0 && granule == 4096, "{message:?}");
            let [list, region] = fds.try_into().unwrap();
            let mut buffer = vec![0; (extents + runs) as usize * Run::BYTES];
            assert_eq!(rustix::io::pread(&list, &mut buffer, 0).unwrap(), buffer.len());
            let refused = rustix::io::pwrite(&list, &[0], 0);
            assert!(refused.is_err(), "the list must be sealed");
            let mut extents_and_runs = Run::list(&buffer);
            let parts: Vec<Run> = extents_and_runs.by_ref().take(extents as usize).collect();
            let list: Vec<Run> = extents_and_runs.collect();
            let inside = |run: &Run, part: &Run| {
                part.offset <= run.offset && run.offset + run.bytes <= part.offset + part.bytes
            };
            assert!(list.iter().all(|run| parts.iter().any(|part| inside(run, part))), "{list:?} {parts:?}");
            pieces.push((region, list));
            if !more {
                let pieces = pieces.iter().flat_map(|(fd, runs)| runs.iter().map(|run| (fd.as_fd(), *run)));
                return (slot, address, Mapping::scattered(0, bytes, pieces).unwrap());
            }
        }
    }

    /// Whether the process is gone, now or soon.
    pub fn ends(&self, timeout: Duration) -> bool {
        readable(&self.pidfd, timeout)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a worker has of its session.
pub struct Begun {
    pub doorbell: OwnedFd,
    pub wake: OwnedFd,
    pub words: Words,
    _control: Mapping,
}

impl Begun {
    pub fn wake(&self) {
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).unwrap();
    }
}

/// A program with a session of its own, which goes on whatever others do.
pub struct Neighbour {
    pub raw: Raw,
    _worker: Worker,
    pub begun: Begun,
}

impl Neighbour {
    /// Opens a session over a connection that has the context 1.
    pub fn start(device: &Device, mut raw: Raw) -> Neighbour {
        raw.open(1, 10, FREE);
        let worker = device.give_worker();
        let begun = worker.begin();
        Neighbour { raw, _worker: worker, begun }
    }

    /// A call of it is served.
    pub fn computes(&mut self) {
        assert_eq!(self.raw.doorbell(1, Doorbell::Ring), 0x1100);
        assert!(readable(&self.begun.doorbell, SOON), "a doorbell did not arrive");
        rustix::io::read(&self.begun.doorbell, &mut [0; 64]).unwrap();
        assert_eq!(self.raw.state(FREE), session::READY);
    }
}
