//! The other process of the yardsticks: answers over shared memory, over TCP, or by eventfd.

use anyhow::{Context as _, Result, bail};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    fs::{MemfdFlags, ftruncate, memfd_create},
};
use sluice_protocol::shared::Shared as _;
use sluice_shared_memory::{Mapping, Run, mapping::Words};
use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
};

/// Offsets of the request and answer words, each in its own cache line.
const REQUEST: usize = 0;
const ANSWER: usize = 64;
/// The request that ends the peer.
const END: u32 = u32::MAX;

/// A page shared with a peer that answers by polling.
pub(crate) struct PingPong {
    _mapping: Mapping,
    words: Words,
    next: u32,
    peer: Child,
}

fn map(file: BorrowedFd<'_>) -> Result<Mapping> {
    Ok(Mapping::scattered(0, 4096, [(file, Run { offset: 0, bytes: 4096 })])?)
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

impl PingPong {
    pub(crate) fn start() -> Result<PingPong> {
        let file = memfd_create("ping-pong", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, 4096)?;
        let mapping = map(file.as_fd())?;
        let words = mapping.words();
        let peer = start(&["memory".into(), file.as_raw_fd().to_string()], &[&file])?;
        Ok(PingPong { _mapping: mapping, words, next: 0, peer })
    }

    /// One request and its answer, both sides polling.
    pub(crate) fn turn(&mut self) {
        self.next += 1;
        self.words.store_u32(REQUEST, self.next, Ordering::Release);
        while self.words.load_u32(ANSWER, Ordering::Acquire) != self.next {
            std::hint::spin_loop();
        }
    }
}

impl Drop for PingPong {
    fn drop(&mut self) {
        self.words.store_u32(REQUEST, END, Ordering::Release);
        // It ends by itself; its last answer is not needed.
        let _ = self.peer.wait();
    }
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
