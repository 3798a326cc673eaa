//! The transport without a VM: this process is the vhost-user front-end and the virtio-gpu driver at once.
//!
//! A sealed memory file plays guest RAM, its offsets are guest-physical addresses, and the commands are those the kernel's
//! driver would send. Connection, context and session are one: the device ends all three when this process is gone. A container
//! needs nothing but the socket.
//!
//! This process and its worker wake each other by two eventfds, so that the device need not wake in between.

#![expect(unsafe_code, reason = "borrowing a descriptor of a library")]
#![expect(clippy::cast_possible_truncation, reason = "halves of words, and the length of a doorbell")]

use super::{
    held::HeldDescriptor,
    interface::{Token, Transport, TransportError, TransportResource},
    queue::{self, CommandQueue, HALF_BYTES, Ticket},
    ram::{Ram, Range},
    signals::signals_blocked,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsRawFd, FromRawFd as _, IntoRawFd as _, OwnedFd},
    io::Errno,
    pipe::{PipeFlags, pipe_with},
};
use sluice_protocol::{
    calls,
    doorbell::{self, Capset, Doorbell},
    gpu::{self, HEADER_BYTES, answer, command},
    limits,
};
use sluice_shared_memory::{Mapping, Reservation, Run, mapping::Words};
use std::{
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend,
        message::{VhostUserConfigFlags, VhostUserProtocolFeatures, VhostUserVirtioFeatures},
    },
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The only context of a connection.
const CONTEXT: u32 = 1;
/// The ring on which waits are fenced.
const WAIT_RING: u32 = 1;
/// The longest wait for an answer that a device gives at once.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Yields before a thread that waits for an answer sleeps.
const YIELDS: u32 = 200;

/// Number of queues of a virtio-gpu device.
const QUEUES: u64 = 2;
const VERSION_1: u64 = 1 << 32;
const EVENT_IDX: u64 = 1 << 29;

/// A connection to a device.
pub struct Direct {
    state: Mutex<DirectState>,
    /// Not under the lock of the queue, since emptying a large range takes milliseconds.
    ram: Mutex<Ram>,
    /// The connection; it ends when the device is gone.
    socket: HeldDescriptor,
    /// Written to notify the device of commands.
    kick: HeldDescriptor,
    /// Written by the device to notify of answers; read by the one thread that waits.
    call: HeldDescriptor,
    /// Written to wake the worker.
    doorbell: HeldDescriptor,
    /// Written by the worker to wake this process; read by the one thread that waits.
    wake: HeldDescriptor,
    /// Our end of a pipe that closes when this process exits; the device sees it before it has read the end of the connection.
    _alive: HeldDescriptor,
    next_resource: AtomicU32,
    next_fence: AtomicU32,
    /// Set when the device is gone or has broken the protocol.
    lost: AtomicBool,
    _queue: Mapping,
}

struct DirectState {
    queue: CommandQueue<Words, Range>,
    /// The unanswered wait.
    waiting: Option<Ticket>,
}

impl core::fmt::Debug for Direct {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Direct").field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// A command under construction.
struct PendingCommand {
    bytes: [u8; HALF_BYTES],
    length: usize,
}

impl PendingCommand {
    fn new(kind: u32, context: u32) -> PendingCommand {
        let mut command = PendingCommand { bytes: [0; HALF_BYTES], length: HEADER_BYTES };
        command.set(0, kind);
        command.set(16, context);
        command
    }

    /// Asks for an answer that echoes a fence.
    fn fenced(mut self, fence: u32, ring: u32) -> PendingCommand {
        self.set(4, gpu::FLAG_FENCE | gpu::FLAG_INFO_RING_IDX);
        self.set(8, fence);
        self.set(20, ring);
        self
    }

    fn set(&mut self, at: usize, word: u32) {
        self.bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }

    fn words(mut self, words: &[u32]) -> PendingCommand {
        for word in words {
            self.set(self.length, *word);
            self.length += 4;
        }
        self
    }

    fn wide(self, value: u64) -> PendingCommand {
        self.words(&[(value & 0xffff_ffff) as u32, (value >> 32) as u32])
    }

    fn submit(doorbell: Doorbell) -> PendingCommand {
        let mut command =
            PendingCommand::new(command::SUBMIT_3D, CONTEXT).words(&[doorbell::BYTES as u32, 0]);
        let at = command.length;
        command.bytes[at..at + doorbell::BYTES].copy_from_slice(&doorbell.encode());
        command.length += doorbell::BYTES;
        command
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Direct {
    /// Connects to the device that listens at `path`.
    ///
    /// # Errors
    /// [`TransportError`] when there is none, or it is not a Sluice device of this version.
    pub fn connect(path: &Path) -> Result<Direct, TransportError> {
        signals_blocked(|| Direct::set_up(path))
    }

    fn set_up(path: &Path) -> Result<Direct, TransportError> {
        let system = |what| move |error| TransportError::System { what, error };
        let eventfd = |flags| EventFd::new(flags | EFD_CLOEXEC).map_err(|error| errno("eventfd", &error));
        let ram = Ram::new(queue::BYTES as u64)?;
        let run = Run { offset: 0, bytes: queue::BYTES as u64 };
        let mapping = Mapping::scattered(0, queue::BYTES as u64, [(ram.file.get()?, run)])?;
        let queue = CommandQueue::new(mapping.words());
        let socket =
            UnixStream::connect(path).map_err(|error| errno("connecting to SLUICE_SOCKET", &error))?;
        let socket = HeldDescriptor::new(OwnedFd::from(socket)).map_err(system("the connection"))?;
        // The library owns its copy, and only while it negotiates: the held copy keeps the connection.
        let copy = rustix::io::fcntl_dupfd_cloexec(socket.get()?, socket.get()?.as_raw_fd())
            .map_err(system("the connection"))?;
        let events = FrontendEvents {
            kick: eventfd(0)?,
            call: eventfd(EFD_NONBLOCK)?,
            doorbell: eventfd(EFD_NONBLOCK)?,
            wake: eventfd(EFD_NONBLOCK)?,
        };
        let mut frontend = Frontend::from_stream(UnixStream::from(copy), QUEUES);
        let (ends, alive) = pipe_with(PipeFlags::CLOEXEC).map_err(system("a pipe"))?;
        let alive = HeldDescriptor::new(alive).map_err(system("a pipe"))?;
        // SAFETY: the owner has just given up the number.
        let ends = unsafe { EventFd::from_raw_fd(ends.into_raw_fd()) };
        negotiate(&mut frontend, &ram, mapping.base(), &events, &ends)?;
        drop((frontend, ends));
        let held = |event: &EventFd| {
            use rustix::fd::{AsFd, BorrowedFd};
            let raw = event.as_raw_fd();
            // SAFETY: borrowed from `event`, which outlives the borrow.
            let borrowed: BorrowedFd<'_> = unsafe { BorrowedFd::borrow_raw(raw) };
            let copy = rustix::io::fcntl_dupfd_cloexec(borrowed.as_fd(), 3).map_err(system("eventfd"))?;
            HeldDescriptor::new(copy).map_err(system("eventfd"))
        };
        let direct = Direct {
            state: Mutex::new(DirectState { queue, waiting: None }),
            ram: Mutex::new(ram),
            socket,
            kick: held(&events.kick)?,
            call: held(&events.call)?,
            doorbell: held(&events.doorbell)?,
            wake: held(&events.wake)?,
            _alive: alive,
            next_resource: AtomicU32::new(1),
            next_fence: AtomicU32::new(1),
            lost: AtomicBool::new(false),
            _queue: mapping,
        };
        direct.greet()?;
        Ok(direct)
    }

    /// Checks that it is a Sluice device of this version, and creates the context.
    fn greet(&self) -> Result<(), TransportError> {
        let mut into = [0; HALF_BYTES];
        let info = PendingCommand::new(command::GET_CAPSET_INFO, 0).words(&[0, 0]);
        self.ask("GET_CAPSET_INFO", &info, answer::OK_CAPSET_INFO, &mut into)?;
        let capset = PendingCommand::new(command::GET_CAPSET, 0).words(&[Capset::ID, 0]);
        let length = self.ask("GET_CAPSET", &capset, answer::OK_CAPSET, &mut into)?;
        let body = into.get(HEADER_BYTES..length).unwrap_or_default();
        match Capset::decode(body) {
            Some(Capset { version: calls::VERSION }) => {}
            Some(Capset { version }) => return Err(TransportError::Version(version)),
            None => return Err(TransportError::NoDevice),
        }
        let mut create = PendingCommand::new(command::CTX_CREATE, CONTEXT).words(&[6, Capset::ID]);
        create.bytes[create.length..create.length + 6].copy_from_slice(b"direct");
        create.length += 64;
        self.ask("CTX_CREATE", &create, answer::OK_NODATA, &mut into)?;
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, DirectState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ram(&self) -> MutexGuard<'_, Ram> {
        self.ram.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alive(&self) -> Result<(), TransportError> {
        if self.lost.load(Ordering::Relaxed) { Err(TransportError::Lost) } else { Ok(()) }
    }

    fn give_up(&self) -> TransportError {
        self.lost.store(true, Ordering::Relaxed);
        TransportError::Lost
    }

    /// True if the device has closed the connection.
    fn hung_up(&self) -> Result<bool, TransportError> {
        let socket = self.socket.get()?;
        let mut fds = [PollFd::new(&socket, PollFlags::IN)];
        let polled = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        // The device sends nothing unasked, so a readable socket is at its end.
        Ok(polled.is_ok_and(|ready| ready > 0))
    }

    fn ring(&self, eventfd: &HeldDescriptor) -> Result<(), TransportError> {
        match rustix::io::write(eventfd.get()?, &1u64.to_ne_bytes()) {
            // AGAIN: the counter is full, so the other side will wake in any case.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(Errno::INTR) => self.ring(eventfd),
            Err(_) => Err(self.give_up()),
        }
    }

    fn collect<'s>(&self, state: &mut MutexGuard<'s, DirectState>) -> Result<(), TransportError> {
        state.queue.collect().map_err(|queue::Corrupt| self.give_up())
    }

    /// Runs `put` as soon as there is a slot for its command, and kicks the device if it asked for that.
    fn put<R>(
        &self,
        mut put: impl FnMut(&mut DirectState) -> Option<(R, bool)>,
    ) -> Result<R, TransportError> {
        let mut pause = Pause::new();
        loop {
            self.alive()?;
            let mut state = self.state();
            self.collect(&mut state)?;
            if let Some((result, kick)) = put(&mut state) {
                drop(state);
                if kick {
                    self.ring(&self.kick)?;
                }
                return Ok(result);
            }
            drop(state);
            if pause.expired() || self.hung_up()? {
                return Err(self.give_up());
            }
            pause.rest();
        }
    }

    /// Sends a command and waits for its answer, which must be of type `expected`. Returns its length.
    fn ask(
        &self,
        what: &'static str,
        command: &PendingCommand,
        expected: u32,
        into: &mut [u8; HALF_BYTES],
    ) -> Result<usize, TransportError> {
        let ticket = self.put(|state| state.queue.ask(command.bytes()))?;
        let mut pause = Pause::new();
        let length = loop {
            let mut state = self.state();
            self.collect(&mut state)?;
            if let Some(length) = state.queue.answer(&ticket, into) {
                break length;
            }
            drop(state);
            if pause.expired() || self.hung_up()? {
                self.state().queue.forget(ticket);
                return Err(self.give_up());
            }
            pause.rest();
        };
        let kind = u32::from_le_bytes([into[0], into[1], into[2], into[3]]);
        if kind == expected && length >= HEADER_BYTES {
            Ok(length)
        } else {
            Err(TransportError::Answer { what, kind })
        }
    }

    /// Frees memory whose resources are gone.
    fn tidy(&self) -> Result<(), TransportError> {
        loop {
            let due = self.state().queue.take_due();
            let Some(range) = due else { return Ok(()) };
            self.ram().give(range)?;
        }
    }

    fn create_resource(&self, id: u32, range: Range) -> Result<(), TransportError> {
        let mut into = [0; HALF_BYTES];
        // Guest memory, mappable, one entry.
        let blob = PendingCommand::new(command::RESOURCE_CREATE_BLOB, 0)
            .words(&[id, 1, 1, 1])
            .wide(0)
            .wide(range.bytes)
            .wide(range.offset)
            .words(&[u32::try_from(range.bytes).map_err(|_| TransportError::Size(range.bytes))?, 0]);
        self.ask("RESOURCE_CREATE_BLOB", &blob, answer::OK_NODATA, &mut into)?;
        let attach = PendingCommand::new(command::CTX_ATTACH_RESOURCE, CONTEXT).words(&[id, 0]);
        self.ask("CTX_ATTACH_RESOURCE", &attach, answer::OK_NODATA, &mut into)?;
        Ok(())
    }

    /// Makes the device forget a resource; its memory is freed when the device answers that it has no more users.
    fn retire(&self, id: u32, range: Range) -> Result<(), TransportError> {
        let detach = PendingCommand::new(command::CTX_DETACH_RESOURCE, CONTEXT).words(&[id, 0]);
        let unref = PendingCommand::new(command::RESOURCE_UNREF, 0).words(&[id, 0]);
        self.put(|state| state.queue.post(detach.bytes()).map(|kick| ((), kick)))?;
        self.put(|state| state.queue.post_due(unref.bytes(), range).map(|kick| ((), kick)))
    }
}

impl Transport for Direct {
    fn create(
        &self,
        reservation: &Reservation,
        at: u64,
        bytes: u64,
    ) -> Result<TransportResource, TransportError> {
        if bytes == 0 || !bytes.is_multiple_of(gpu::PAGE) || bytes > limits::RESOURCE_BYTES {
            return Err(TransportError::Size(bytes));
        }
        self.alive()?;
        self.tidy()?;
        let range = self.ram().take(bytes)?;
        let id = self.next_resource.fetch_add(1, Ordering::Relaxed);
        let mapped = self.create_resource(id, range).and_then(|()| {
            let ram = self.ram();
            Ok(reservation.map(at, ram.file.get()?, range.offset, range.bytes)?)
        });
        match mapped {
            Ok(()) => Ok(TransportResource { id, token: Token::Range(range) }),
            Err(error) => {
                // The device may or may not have the resource; either way it answers when it does not.
                let retired = self.retire(id, range);
                debug_assert!(retired.is_ok() || self.lost.load(Ordering::Relaxed));
                Err(error)
            }
        }
    }

    fn file_pages(&self, resource: &TransportResource) -> Result<Option<(OwnedFd, u64)>, TransportError> {
        let Token::Range(range) = resource.token else { return Ok(None) };
        let file = rustix::io::fcntl_dupfd_cloexec(self.ram().file.get()?, 0)
            .map_err(|error| TransportError::System { what: "a second descriptor", error })?;
        Ok(Some((file, range.offset)))
    }

    fn destroy(&self, resource: TransportResource) -> Result<(), TransportError> {
        let Token::Range(range) = resource.token else { return Err(TransportError::Lost) };
        self.retire(resource.id, range)?;
        self.tidy()
    }

    fn submit(&self, doorbell: Doorbell) -> Result<(), TransportError> {
        if doorbell == Doorbell::Ring {
            self.alive()?;
            return self.ring(&self.doorbell);
        }
        let command = PendingCommand::submit(doorbell);
        self.put(|state| state.queue.post(command.bytes()).map(|kick| ((), kick)))
    }

    fn wait(&self, timeout: Duration) -> Result<(), TransportError> {
        let started = Instant::now();
        let mut into = [0; HALF_BYTES];
        // The worker wakes this process itself. The wait is for the device, which answers it if there is no worker any more.
        self.put(|state| {
            if state.waiting.is_some() {
                return Some(((), false));
            }
            let fence = self.next_fence.fetch_add(1, Ordering::Relaxed);
            let command = PendingCommand::submit(Doorbell::Wait).fenced(fence, WAIT_RING);
            let (ticket, kick) = state.queue.ask(command.bytes())?;
            state.waiting = Some(ticket);
            Some(((), kick))
        })?;
        loop {
            let mut state = self.state();
            self.collect(&mut state)?;
            state.queue.want_interrupt();
            self.collect(&mut state)?;
            let answered = match state.waiting.take() {
                Some(ticket) if state.queue.answer(&ticket, &mut into).is_none() => {
                    state.waiting = Some(ticket);
                    false
                }
                _ => true,
            };
            drop(state);
            self.tidy()?;
            let left = timeout.saturating_sub(started.elapsed());
            if answered || left.is_zero() || self.sleep(left)? {
                return Ok(());
            }
        }
    }
}

impl Direct {
    /// Sleeps until the worker wakes this process, or the device answers a command. Returns `true` if the worker did.
    fn sleep(&self, timeout: Duration) -> Result<bool, TransportError> {
        let (wake, call, socket) = (self.wake.get()?, self.call.get()?, self.socket.get()?);
        let mut fds = [&wake, &call, &socket].map(|fd| PollFd::new(fd, PollFlags::IN));
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(TransportError::System { what: "poll", error }),
        }
        let [woken, called, closed] = fds.map(|fd| !fd.revents().is_empty());
        if closed {
            return Err(self.give_up());
        }
        for (eventfd, written) in [(wake, woken), (call, called)] {
            if written {
                // AGAIN when another answer's interrupt was taken for this one.
                let _ = rustix::io::read(eventfd, &mut [0; 8]);
            }
        }
        Ok(woken)
    }
}

/// A pause in a wait that mostly takes microseconds.
struct Pause {
    started: Instant,
    rounds: u32,
}

impl Pause {
    fn new() -> Pause {
        Pause { started: Instant::now(), rounds: 0 }
    }

    fn expired(&self) -> bool {
        self.rounds > YIELDS && self.started.elapsed() > TIMEOUT
    }

    fn rest(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds <= YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// The eventfds of a connection, by their fields' names in [`Direct`].
struct FrontendEvents {
    kick: EventFd,
    call: EventFd,
    doorbell: EventFd,
    wake: EventFd,
}

/// Sends features, memory, the queue and the eventfds to the device.
fn negotiate(
    frontend: &mut Frontend,
    ram: &Ram,
    base: u64,
    events: &FrontendEvents,
    ends: &EventFd,
) -> Result<(), TransportError> {
    fn step<T>(what: &'static str, result: vhost::Result<T>) -> Result<T, TransportError> {
        result.map_err(|error| TransportError::VhostUser { what, error: error.to_string() })
    }
    step("SET_OWNER", frontend.set_owner())?;
    let offered = step("GET_FEATURES", frontend.get_features())?;
    let features = VERSION_1
        | EVENT_IDX
        | 1 << gpu::F_VIRGL
        | 1 << gpu::F_RESOURCE_BLOB
        | 1 << gpu::F_CONTEXT_INIT
        | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    if offered & features != features {
        let error = format!("features {offered:#x} lack some of {features:#x}");
        return Err(TransportError::VhostUser { what: "GET_FEATURES", error });
    }
    // Nothing is acknowledged, since each acknowledgement takes two changes of process: a device that refuses a message closes the
    // connection, which the first command finds.
    let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ;
    let protocol = step("GET_PROTOCOL_FEATURES", frontend.get_protocol_features())? & wanted;
    step("SET_PROTOCOL_FEATURES", frontend.set_protocol_features(protocol))?;
    step("SET_FEATURES", frontend.set_features(features))?;
    let (_, config) =
        step("GET_CONFIG", frontend.get_config(0, 16, VhostUserConfigFlags::WRITABLE, &[0; 16]))?;
    if config.get(12..16) != Some(&1u32.to_le_bytes()) {
        return Err(TransportError::NoDevice);
    }
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: ram.bytes,
        userspace_addr: base,
        mmap_offset: 0,
        mmap_handle: ram.file.get()?.as_raw_fd(),
    };
    step("SET_MEM_TABLE", frontend.set_mem_table(&[region]))?;
    step("SET_VRING_NUM", frontend.set_vring_num(0, queue::DESCRIPTORS))?;
    let rings = VringConfigData {
        queue_max_size: queue::DESCRIPTORS,
        queue_size: queue::DESCRIPTORS,
        flags: 0,
        desc_table_addr: base + queue::TABLE_AT as u64,
        avail_ring_addr: base + queue::AVAILABLE_AT as u64,
        used_ring_addr: base + queue::USED_AT as u64,
        log_addr: None,
    };
    step("SET_VRING_ADDR", frontend.set_vring_addr(0, &rings))?;
    step("SET_VRING_BASE", frontend.set_vring_base(0, 0))?;
    // Not for errors, since there are none: the kernel closes our end of this pipe while the process exits.
    step("SET_VRING_ERR", frontend.set_vring_err(0, ends))?;
    let signals = usize::from(gpu::CURSOR_QUEUE);
    step("SET_VRING_KICK", frontend.set_vring_kick(signals, &events.doorbell))?;
    step("SET_VRING_CALL", frontend.set_vring_call(signals, &events.wake))?;
    step("SET_VRING_CALL", frontend.set_vring_call(0, &events.call))?;
    step("SET_VRING_KICK", frontend.set_vring_kick(0, &events.kick))?;
    step("SET_VRING_ENABLE", frontend.set_vring_enable(0, true))
}

fn errno(what: &'static str, error: &std::io::Error) -> TransportError {
    TransportError::System { what, error: Errno::from_io_error(error).unwrap_or(Errno::IO) }
}
