//! A device that was taken over. It is started in place of `sluice-device`. For programs of this host (`--direct`) it is the real
//! one; for a VM it attacks the host in the filter and the confinement of the real one.
//!
//! A test is its guest: it connects to the device's socket, sends an [`Order`], and gets a [`Report`]. The attempts are data
//! ([`attempts`]); with `--attempts` the program prints their names and expected outcomes. Attempts that are [`Attempt::lifted`] run without a filter, as if a
//! flaw in the kernel had lifted it. The test judges the effect on a neighbour, an operator and the processes of the host.

#![expect(unsafe_code, reason = "adopts inherited descriptors")]

mod attempts;

use std::io::{IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::epoll::{self, EventData};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg};
use sluice_messages::control::{FromDevice, NO_USER, ToDevice};
use sluice_sandbox::Role;
use sluice_shared_memory::socket;
use sluice_tests::hostile_device::{ORDER_BYTES, Order, Report};

use attempts::Attempt;

/// Time limit for steps that take milliseconds on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Largest number of descriptors in an order.
const GIVEN: usize = 64;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.iter().any(|argument| argument == "--attempts") {
        let names = attempts::all(&Order::default());
        names.iter().for_each(|attempt| println!("{}\t{}", attempt.name, attempt.expected));
        return Ok(());
    }
    if arguments.iter().any(|argument| argument == "--direct") {
        // SAFETY: no other code uses the descriptors of the command line.
        return unsafe { sluice_device::program::main() };
    }
    let inherited = |option: &str| -> Result<OwnedFd> {
        let at = arguments.iter().position(|argument| argument == option).context("an option is missing")?;
        let number: RawFd = arguments.get(at + 1).context("a number is missing")?.parse()?;
        // SAFETY: the launcher passes it open, and no other code here uses it.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    };
    let control = inherited("--control-fd")?;
    let listener = UnixListener::from(inherited("--fd")?);
    let (mut guest, _) = listener.accept().context("a guest")?;
    let (order, given) = order(&guest)?;
    let all = attempts::all(&order);
    let attempt = all.iter().find(|attempt| attempt.name == order.attempt);
    let attempt = attempt.with_context(|| format!("no attempt {:?}", order.attempt))?;
    if !attempt.lifted {
        sluice_sandbox::enter(Role::Device)?;
    }
    let mut device = Hostile { control, listener, order, given, next: 1 << 20 };
    let outcome = (attempt.run)(&mut device, attempt).unwrap_or_else(|error| format!("failed: {error:#}"));
    let report = Report { outcome };
    guest.write_all(&serde_json::to_vec(&report)?)?;
    guest.shutdown(std::net::Shutdown::Write)?;
    // Until it is ended.
    loop {
        poll(&mut [], None).ok();
    }
}

/// The order of a guest, and the descriptors that came with it.
fn order(guest: &UnixStream) -> Result<(Order, Vec<OwnedFd>)> {
    let mut bytes = vec![0; ORDER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GIVEN))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(guest, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let given = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    let given = given.collect();
    Ok((serde_json::from_slice(&bytes[..got.bytes])?, given))
}

/// An answer of `sluiced`.
#[derive(Debug)]
enum Answer {
    /// A worker with its descriptors: its control socket, its pidfd, and `cgroup.kill` if it has a cgroup of its own.
    Worker { session: u32, descriptors: Vec<OwnedFd> },
    /// No worker for a session.
    None { session: u32 },
}

struct Hostile {
    control: OwnedFd,
    /// The socket for front-ends.
    listener: UnixListener,
    order: Order,
    /// Descriptors that the guest has sent.
    given: Vec<OwnedFd>,
    /// Number of the next session that is only to show whether `sluiced` answers.
    next: u32,
}

impl Hostile {
    fn say(&self, message: FromDevice) -> Result<(), Errno> {
        socket::send(&self.control, &message.encode(), &[])
    }

    fn want(&self, session: u32) -> Result<(), Errno> {
        self.say(FromDevice::WorkerWanted { session, user: NO_USER })
    }

    /// The next answer of `sluiced`.
    fn receive(&self) -> Result<Answer> {
        let deadline = Instant::now() + TIMEOUT;
        if !readable(&self.control, deadline) {
            bail!("sluiced does not answer");
        }
        let mut bytes = [0; sluice_messages::control::BYTES];
        let (message, descriptors) =
            socket::receive(&self.control, &mut bytes)?.context("sluiced has closed")?;
        Ok(match ToDevice::decode(message)? {
            ToDevice::Worker { session, .. } => Answer::Worker { session, descriptors },
            ToDevice::NoWorker { session, .. } => Answer::None { session },
            ToDevice::Resume {} => bail!("another sluiced"),
        })
    }

    /// Requests a worker and returns its descriptors.
    fn worker(&mut self) -> Result<Vec<OwnedFd>> {
        let number = self.next;
        self.next += 1;
        self.want(number)?;
        loop {
            match self.receive()? {
                Answer::Worker { session, descriptors } if session == number => return Ok(descriptors),
                Answer::None { session } if session == number => bail!("no worker for session {session}"),
                _ => {}
            }
        }
    }

    /// Tells whether `sluiced` gives a worker still.
    fn served(&mut self) -> Result<String> {
        self.worker().map(|_| "served".to_owned())
    }

    /// Waits until `sluiced` takes no more messages.
    fn closed(&self) -> Result<String> {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            // A message without an effect: there is no such session.
            let message = FromDevice::SessionEnded { session: 0 }.encode();
            match rustix::net::send(&self.control, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) | Err(Errno::AGAIN) => std::thread::park_timeout(Duration::from_millis(1)),
                Err(Errno::PIPE) => return Ok("closed".to_owned()),
                Err(error) => return Err(error.into()),
            }
        }
        bail!("sluiced takes messages still")
    }

    /// Has so many event loops wait on its socket that each message of `sluiced` takes long, until the descriptors are closed.
    fn gather_crowd(&self) -> Result<Vec<OwnedFd>> {
        /// Event loops, and descriptors of the socket that each watches: within the limit of descriptors.
        const EACH: usize = 1200;
        let mut all = (0..EACH).map(|_| self.control.try_clone()).collect::<Result<Vec<_>, _>>()?;
        'all: for _ in 0..EACH {
            let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            for socket in all.iter().take(EACH) {
                let wanted = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
                match epoll::add(&events, socket, EventData::new_u64(0), wanted) {
                    Ok(()) => {}
                    // All that the kernel lets a user watch.
                    Err(Errno::NOSPC) => break 'all,
                    Err(error) => return Err(error.into()),
                }
            }
            all.push(events);
        }
        Ok(all)
    }

    /// Lets `sluiced` send messages to a crowd until this process is ended.
    fn crowd(&self) -> Result<String> {
        let _crowd = self.gather_crowd()?;
        for session in 0.. {
            match self.want(session) {
                Ok(()) => drop(self.receive()?),
                // It is to be killed.
                Err(Errno::PIPE) => break,
                Err(error) => return Err(error.into()),
            }
            match self.say(FromDevice::SessionEnded { session }) {
                Ok(()) | Err(Errno::PIPE) => {}
                Err(error) => return Err(error.into()),
            }
        }
        std::thread::park_timeout(TIMEOUT);
        bail!("a crowd does no harm")
    }

    /// Lets `sluiced` throw messages of a crowd away, behind one that is malformed.
    fn crowd_behind_malformed_message(&self) -> Result<String> {
        let _crowd = self.gather_crowd()?;
        socket::send(&self.control, &[0xff], &[])?;
        // The socket is shut down when the first is read.
        while self.want(0).is_ok() {}
        std::thread::park_timeout(TIMEOUT);
        bail!("a crowd does no harm")
    }

    /// Tells what is expected of an attempt after which `sluiced` either serves or does not.
    fn state(&mut self, attempt: &Attempt) -> Result<String> {
        if attempt.expected == "closed" { self.closed() } else { self.served() }
    }
}

/// Waits until a socket is readable.
fn readable(socket: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
        let limit = Timespec::try_from(left).ok();
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) | Err(_) => {}
            Ok(_) => return true,
        }
    }
}
