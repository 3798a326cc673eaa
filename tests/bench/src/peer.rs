//! The other process of the yardsticks: answers over shared memory, over TCP, or by eventfd, or takes records from a ring. Those that
//! poll are stopped while they are not measured.

use crate::measure::Samples;
use anyhow::{Context as _, Result, bail};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    fs::{MemfdFlags, ftruncate, memfd_create},
    process::{Pid, Signal, kill_process},
};
use sluice_protocol::shared::Shared as _;
use sluice_shared_memory::{Mapping, Run, mapping::Words};
use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

/// Offsets of the request and answer words, each in its own cache line.
const REQUEST: usize = 0;
const ANSWER: usize = 64;
/// The request that ends the peer.
const END: u32 = u32::MAX;

/// Offset of the first record of the ring. The request counts its records, the answer those that were taken.
const RECORDS: usize = 128;
/// Bytes of a record, as those of a launch with few parameters.
const RECORD: usize = 128;
/// Number of records in the ring.
const CAPACITY: u32 = 256;
/// Bytes of the shared memory.
const SHARED: usize = RECORDS + RECORD * CAPACITY as usize;

/// Memory shared with a peer that polls. The peer is stopped, except in [`Polling::awake`].
struct Polling {
    _mapping: Mapping,
    words: Words,
    peer: Child,
}

/// A peer that answers each request.
pub(crate) struct PingPong {
    shared: Polling,
    next: u32,
}

/// A peer that takes records from a ring.
pub(crate) struct Ring {
    shared: Polling,
    posted: u32,
}

fn map(file: BorrowedFd<'_>) -> Result<Mapping> {
    let bytes = SHARED.next_multiple_of(4096);
    Ok(Mapping::scattered(0, bytes as u64, [(file, Run { offset: 0, bytes: bytes as u64 })])?)
}

/// Starts this program again; the descriptors in `keep` stay open in it.
fn start(arguments: &[String], keep: &[&OwnedFd]) -> Result<Child> {
    for descriptor in keep {
        rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::empty())?;
    }
    let child = Command::new(std::env::current_exe()?)
        .arg("peer")
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the peer")?;
    Ok(child)
}

impl Polling {
    fn start(kind: &str) -> Result<Polling> {
        let file = memfd_create(kind, MemfdFlags::CLOEXEC)?;
        ftruncate(&file, SHARED.next_multiple_of(4096) as u64)?;
        let mapping = map(file.as_fd())?;
        let words = mapping.words();
        let peer = start(&[kind.into(), file.as_raw_fd().to_string()], &[&file])?;
        let shared = Polling { _mapping: mapping, words, peer };
        shared.signal(Signal::STOP)?;
        Ok(shared)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.peer), signal)?)
    }

    /// Lets the peer run until `body` returns.
    fn awake(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        self.signal(Signal::CONT)?;
        body()?;
        self.signal(Signal::STOP)
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        self.words.store_u32(REQUEST, END, Ordering::Release);
        // A peer that has ended needs no signal.
        let _ = self.signal(Signal::CONT);
        // It ends by itself; its last answer is not needed.
        let _ = self.peer.wait();
    }
}

impl PingPong {
    pub(crate) fn start() -> Result<PingPong> {
        Ok(PingPong { shared: Polling::start("memory")?, next: 0 })
    }

    /// Adds the times of requests with their answers, both sides polling. The first ones find the peer asleep and do not count.
    pub(crate) fn turns(&mut self, samples: &mut Samples, times: usize) -> Result<()> {
        const FIRST: usize = 500;
        let Self { shared, next } = self;
        let turn = || {
            *next += 1;
            shared.words.store_u32(REQUEST, *next, Ordering::Release);
            while shared.words.load_u32(ANSWER, Ordering::Acquire) != *next {
                std::hint::spin_loop();
            }
            Ok(())
        };
        shared.awake(|| {
            let mut turn = turn;
            (0..FIRST).try_for_each(|_| turn())?;
            samples.time(times, turn)
        })
    }
}

impl Ring {
    pub(crate) fn start() -> Result<Ring> {
        Ok(Ring { shared: Polling::start("ring")?, posted: 0 })
    }

    /// The time to post records until the last one is taken.
    pub(crate) fn post(&mut self, records: u32) -> Result<Duration> {
        let mut elapsed = Duration::ZERO;
        let Self { shared, posted } = self;
        shared.awake(|| {
            let record = [7; RECORD];
            let taken = || shared.words.load_u32(ANSWER, Ordering::Acquire);
            // The peer runs when it has taken one.
            for number in [1, records] {
                let (start, mut known) = (Instant::now(), taken());
                for _ in 0..number {
                    while posted.wrapping_sub(known) == CAPACITY {
                        known = taken();
                        std::hint::spin_loop();
                    }
                    shared.words.write(slot(*posted), &record);
                    *posted = posted.wrapping_add(1);
                    shared.words.store_u32(REQUEST, *posted, Ordering::Release);
                }
                while taken() != *posted {
                    std::hint::spin_loop();
                }
                elapsed = start.elapsed();
            }
            Ok(())
        })?;
        Ok(elapsed)
    }
}

/// Offset of a record by its number.
fn slot(number: u32) -> usize {
    RECORDS + (number % CAPACITY) as usize * RECORD
}

/// A TCP connection over loopback to a peer that echoes requests.
pub(crate) struct Tcp {
    stream: TcpStream,
    peer: Child,
}

/// Bytes of a request and of an answer: the size of a small call.
const MESSAGE: usize = 96;

impl Tcp {
    pub(crate) fn start() -> Result<Tcp> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let peer = start(&["tcp".into(), listener.local_addr()?.port().to_string()], &[])?;
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        Ok(Tcp { stream, peer })
    }

    /// One request and its answer.
    pub(crate) fn turn(&mut self) -> Result<()> {
        let mut message = [7; MESSAGE];
        self.stream.write_all(&message)?;
        self.stream.read_exact(&mut message)?;
        Ok(())
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // The peer ends when the connection does.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let _ = self.peer.wait();
    }
}

/// A pair of eventfds to a peer that sleeps on one and answers on the other.
pub(crate) struct Eventfds {
    request: OwnedFd,
    answer: OwnedFd,
    peer: Child,
}

impl Eventfds {
    pub(crate) fn start() -> Result<Eventfds> {
        let request = eventfd(0, EventfdFlags::CLOEXEC)?;
        let answer = eventfd(0, EventfdFlags::CLOEXEC)?;
        let arguments = ["eventfd".into(), request.as_raw_fd().to_string(), answer.as_raw_fd().to_string()];
        let peer = start(&arguments, &[&request, &answer])?;
        Ok(Eventfds { request, answer, peer })
    }

    /// One wake-up there and one back.
    pub(crate) fn turn(&self) -> Result<()> {
        rustix::io::write(&self.request, &1u64.to_ne_bytes())?;
        rustix::io::read(&self.answer, &mut [0; 8])?;
        Ok(())
    }
}

impl Drop for Eventfds {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.request, &END_OF_EVENTS.to_ne_bytes());
        let _ = self.peer.wait();
    }
}

/// Added to an eventfd to end the peer.
const END_OF_EVENTS: u64 = 1 << 40;

/// The peer process.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let kind = arguments.first().context("peer KIND")?;
    let number = |index: usize| -> Result<i32> { Ok(arguments.get(index).context("a number")?.parse()?) };
    match kind.as_str() {
        "memory" => {
            let file = inherited(number(1)?);
            let mapping = map(file.as_fd())?;
            let words = mapping.words();
            let mut last = 0;
            loop {
                let request = words.load_u32(REQUEST, Ordering::Acquire);
                if request == END {
                    return Ok(());
                }
                if request != last {
                    last = request;
                    words.store_u32(ANSWER, request, Ordering::Release);
                }
                std::hint::spin_loop();
            }
        }
        "ring" => {
            let file = inherited(number(1)?);
            let mapping = map(file.as_fd())?;
            let words = mapping.words();
            let (mut taken, mut record) = (0u32, [0; RECORD]);
            loop {
                let posted = words.load_u32(REQUEST, Ordering::Acquire);
                if posted == END {
                    return Ok(());
                }
                while taken != posted {
                    words.read(slot(taken), &mut record);
                    std::hint::black_box(&record);
                    taken = taken.wrapping_add(1);
                    words.store_u32(ANSWER, taken, Ordering::Release);
                }
                std::hint::spin_loop();
            }
        }
        "tcp" => {
            let mut stream = TcpStream::connect(("127.0.0.1", u16::try_from(number(1)?)?))?;
            stream.set_nodelay(true)?;
            let mut message = [0; MESSAGE];
            while stream.read_exact(&mut message).is_ok() {
                stream.write_all(&message)?;
            }
            Ok(())
        }
        "eventfd" => {
            let (request, answer) = (inherited(number(1)?), inherited(number(2)?));
            loop {
                let mut count = [0; 8];
                rustix::io::read(&request, &mut count)?;
                if u64::from_ne_bytes(count) >= END_OF_EVENTS {
                    return Ok(());
                }
                rustix::io::write(&answer, &1u64.to_ne_bytes())?;
            }
        }
        other => bail!("unknown peer {other}"),
    }
}

#[expect(unsafe_code, reason = "a descriptor that the parent left open for this process")]
fn inherited(number: i32) -> OwnedFd {
    use std::os::fd::FromRawFd as _;
    // SAFETY: the parent passed the number of a descriptor that nothing else in this process uses.
    unsafe { OwnedFd::from_raw_fd(number) }
}
