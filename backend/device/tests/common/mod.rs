//! A real `sluice-device` process between a played front-end and a played `sluiced`.

#![allow(unsafe_code, reason = "descriptors for a child, and shared memory")]

use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    process::{Pid, PidfdFlags, pidfd_open},
};
use sluice_kit::{
    front_end::{FREE, FrontEnd},
    wait::{TIMEOUT, eventually, readable},
};
use sluice_messages::control::{self, FromDevice, FromWorker, ToDevice, ToWorker};
use sluice_protocol::{doorbell::Doorbell, limits, session, shared::Shared};
use sluice_shared_memory::{Mapping, Run, mapping::Words, socket};
use std::{
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    time::Duration,
};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// Time within which a wait was not ended by its timeout.
const IN_TIME: Duration = Duration::from_millis(limits::WAITER_MILLISECONDS * 9 / 10);

/// Repeats an attempt until it takes less time than a wait that ends by timeout; returns its result. A busy machine may be late
/// a few times; if only the timeout ends a wait, every attempt is.
#[track_caller]
pub(crate) fn in_time<T>(mut attempt: impl FnMut() -> (Duration, T)) -> T {
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

/// Passes a descriptor to a child under a number of its own.
pub(crate) fn pass_on(command: &mut Command, descriptor: &impl AsRawFd, number: i32) {
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
    assert!(readable(from, TIMEOUT), "no message");
    let mut buffer = [0; control::BYTES];
    let (bytes, fds) = socket::receive(from, &mut buffer).unwrap().expect("the peer is gone");
    (bytes.to_vec(), fds)
}

/// A device process and the test's end of its control socket.
pub(crate) struct Device {
    pub(crate) process: Child,
    pub(crate) control: OwnedFd,
    pub(crate) path: PathBuf,
    ended: bool,
    _directory: tempfile::TempDir,
}

impl Device {
    /// Starts a device for programs, and waits until it listens.
    pub(crate) fn start(arguments: &[&str]) -> Device {
        let device = Device::spawn(arguments);
        eventually("listening", || std::os::unix::net::UnixStream::connect(&device.path).is_ok());
        device
    }

    /// Starts a device, which may accept only one connection.
    pub(crate) fn spawn(arguments: &[&str]) -> Device {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("device");
        let (control, theirs) = socket::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-device"));
        command.arg("--socket-path").arg(&path).args(["--control-fd", "200"]).args(arguments);
        command.env("SLUICE_LOG", std::env::var("SLUICE_LOG").unwrap_or("warn".into())).stdin(Stdio::null());
        pass_on(&mut command, &theirs, 200);
        let process = command.spawn().unwrap();
        Device { process, control, path, ended: false, _directory: directory }
    }

    /// Answers the next request for a worker with a worker.
    pub(crate) fn give_worker(&self) -> Worker {
        self.give_worker_to(self.wanted())
    }

    /// Answers a request for a worker with a worker.
    pub(crate) fn give_worker_to(&self, session: u32) -> Worker {
        let (worker, theirs) = Worker::new(session);
        let message = ToDevice::Worker { session, grouped: false }.encode();
        socket::send(&self.control, &message, &[theirs.as_fd(), worker.pidfd.as_fd()]).unwrap();
        worker
    }

    /// The next request for a worker.
    pub(crate) fn wanted(&self) -> u32 {
        loop {
            match self.receive() {
                FromDevice::WorkerWanted { session, .. } => return session,
                FromDevice::SessionEnded { .. } => {}
            }
        }
    }

    /// The next message.
    pub(crate) fn receive(&self) -> FromDevice {
        let (bytes, fds) = receive(&self.control);
        assert!(fds.is_empty());
        FromDevice::decode(&bytes).unwrap()
    }

    /// Number of open descriptors of the process.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.process.id())).unwrap().count()
    }

    /// Number of mappings of the process.
    pub(crate) fn mappings(&self) -> usize {
        std::fs::read_to_string(format!("/proc/{}/maps", self.process.id())).unwrap().lines().count()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = Pid::from_raw(self.process.id().try_into().unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Waits until the process has ended by itself, without an error.
    pub(crate) fn ends(&mut self) {
        eventually("the end", || !self.is_alive());
        self.ended = true;
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let alive = self.process.try_wait().unwrap();
        let _ = self.process.kill();
        let _ = self.process.wait();
        if !std::thread::panicking() {
            assert!(self.ended || alive.is_none(), "the device died: {alive:?}");
        }
    }
}

/// A worker: a process to be killed, whose work this test's thread does.
pub(crate) struct Worker {
    pub(crate) session: u32,
    pub(crate) process: Child,
    pub(crate) pidfd: OwnedFd,
    pub(crate) socket: OwnedFd,
}

impl Worker {
    fn new(session: u32) -> (Worker, OwnedFd) {
        let (socket, theirs) = socket::pair().unwrap();
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_raw(process.id().try_into().unwrap()).unwrap();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        (Worker { session, process, pidfd, socket }, theirs)
    }

    pub(crate) fn receive(&self) -> (ToWorker, Vec<OwnedFd>) {
        let (bytes, fds) = receive(&self.socket);
        let message = ToWorker::decode(&bytes).unwrap();
        assert_eq!(message.descriptors(), fds.len());
        (message, fds)
    }

    pub(crate) fn say(&self, message: FromWorker) {
        socket::send(&self.socket, &message.encode(), &[]).unwrap();
    }

    /// Receives the start of a session: its eventfds and its control resource, and declares it ready.
    pub(crate) fn begin(&self) -> Begun {
        let (message, fds) = self.receive();
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

    /// Receives a request to map a resource and maps it, anywhere.
    pub(crate) fn attach(&self) -> (u32, u64, Mapping) {
        let mut pieces = Vec::new();
        loop {
            let (message, fds) = self.receive();
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

    /// True if the process is gone, now or soon.
    pub(crate) fn ends(&self, timeout: Duration) -> bool {
        readable(&self.pidfd, timeout)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A worker's resources of its session.
pub(crate) struct Begun {
    pub(crate) doorbell: OwnedFd,
    pub(crate) wake: OwnedFd,
    pub(crate) words: Words,
    _control: Mapping,
}

impl Begun {
    pub(crate) fn wake(&self) {
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).unwrap();
    }
}

/// A program with a session of its own, which continues whatever others do.
pub(crate) struct Neighbour {
    pub(crate) raw: FrontEnd,
    _worker: Worker,
    pub(crate) begun: Begun,
}

impl Neighbour {
    /// Opens a session over a connection that has the context 1.
    pub(crate) fn start(device: &Device, mut raw: FrontEnd) -> Neighbour {
        raw.open(1, 10, FREE);
        let worker = device.give_worker();
        let begun = worker.begin();
        Neighbour { raw, _worker: worker, begun }
    }

    /// Checks that a call of it is served.
    pub(crate) fn computes(&mut self) {
        assert_eq!(self.raw.doorbell(1, Doorbell::Ring), 0x1100);
        assert!(readable(&self.begun.doorbell, TIMEOUT), "a doorbell did not arrive");
        rustix::io::read(&self.begun.doorbell, &mut [0; 64]).unwrap();
        assert_eq!(self.raw.state(FREE), session::READY);
    }
}
