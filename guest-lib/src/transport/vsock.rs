//! The transport without shared memory: a stream to the host, a virtual socket or a Unix socket, that carries the data that the other side
//! has to see. In one file: one stream, both directions.
//!
//! The session page and the arenas are memory of this process. A record goes out after the arena memory that its call reads: at
//! once if the worker has consumed all earlier ones, else together with those that follow, when the worker has consumed them,
//! when a packet is full, or when a thread waits. A thread of the shim reads the host's publications from the stream and writes
//! them into the page, so a thread that waits there does not know the difference. The device itself never reaches memory
//! attached this way: the host reports all of it as gathered.
//!
//! One stream is one session: when this process is gone the host ends it.

#![expect(unsafe_code, reason = "the address of a virtual socket, and access to the control resource")]

use super::{
    held::HeldDescriptor,
    interface::{Token, Transport, TransportError, TransportResource},
    signals::signals_blocked,
};
use crate::{error::Error, host_memory, log, spawn::spawn};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsRawFd, OwnedFd},
    io::Errno,
    net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socket_with},
    thread::futex,
};
use sluice_protocol::{
    calls,
    doorbell::Doorbell,
    gpu, limits,
    record::Header,
    reply,
    session::{self as layout, HostCall},
    shared::Shared as _,
    stream::{FromGuest, HEAD_BYTES, Head, ToGuest},
};
use sluice_shared_memory::{Reservation, mapping::Words};
use std::{
    collections::BTreeMap,
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering, fence},
    },
    time::Duration,
};

/// Seconds for a connection: the kernel's default of two is little on slow machines, and a host without a listener refuses at
/// once.
const REACHED: libc::time_t = 8;
/// SO_VM_SOCKETS_CONNECT_TIMEOUT.
const CONNECT_TIMEOUT: libc::c_int = 6;
/// SO_VM_SOCKETS_BUFFER_SIZE and SO_VM_SOCKETS_BUFFER_MAX_SIZE.
const BUFFER_SIZE: libc::c_int = 0;
const BUFFER_MOST: libc::c_int = 2;
/// The longest wait for the first frame of the host, which may be busy; another program than Sluice closes the connection.
const TIMEOUT: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// Bytes that one write passes to a virtual socket, and of records that are held at most. A kernel may split a packet of more than
/// eight pages into several pieces, and some devices in user space drop such packets.
const PACKET_BYTES: usize = 28 << 10;
/// Bytes that are sent or received at once: a bulk frame and a record.
const BUFFER_BYTES: usize = limits::STREAM_BULK_BYTES + limits::RECORD_BYTES + 2 * HEAD_BYTES;

/// A connection to the host.
#[derive(Debug)]
pub struct Vsock {
    shared: Arc<Connection>,
    next_resource: AtomicU32,
}

/// The state that is shared with the receiving thread.
#[derive(Debug)]
struct Connection {
    socket: HeldDescriptor,
    /// Bytes that one write passes to the socket.
    packet: usize,
    /// The session page, once the session is opened.
    page: OnceLock<Words>,
    /// Locked while frames that belong together are sent.
    output: Mutex<Output>,
    /// True if records wait in `output`.
    holds_records: AtomicBool,
    /// Counts the times at which records had to be sent; the sending thread waits for a change of it.
    due: AtomicU32,
    /// Resources by their addresses: id and bytes.
    resources: Mutex<BTreeMap<u64, (u32, u64)>>,
    /// Counts arrivals; a waiting thread waits for a change of it.
    arrivals: AtomicU32,
    /// The value at the last wait.
    seen: AtomicU32,
    /// Set when the host is gone.
    lost: AtomicBool,
}

/// Frames that are not sent yet.
#[derive(Debug)]
struct Output {
    buffer: Box<[u8]>,
    length: usize,
    /// The ring's position after the last record that was put here, and after the last one that was sent.
    tail: u64,
    sent: u64,
}

/// Sets an option of a virtual socket. After an error the kernel's own value applies.
fn set_option<T: Copy>(socket: &OwnedFd, name: libc::c_int, value: &T) {
    #[expect(clippy::cast_possible_truncation, reason = "the size of a small value")]
    let length = size_of::<T>() as libc::socklen_t;
    // SAFETY: an open socket, and a value of the given length.
    let _ = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::AF_VSOCK, name, core::ptr::from_ref(value).cast(), length)
    };
}

impl Vsock {
    /// Connects through the virtual socket device of this machine.
    ///
    /// # Errors
    /// [`TransportError::NoDevice`] when there is none, or no host listens at its other end.
    pub fn open() -> Result<Vsock, TransportError> {
        let socket = match socket_with(AddressFamily::VSOCK, SocketType::STREAM, SocketFlags::CLOEXEC, None) {
            Ok(socket) => socket,
            // The kernel has no such family, or a sandbox refuses it.
            Err(_) => return Err(TransportError::NoDevice),
        };
        set_option(&socket, CONNECT_TIMEOUT, &libc::timeval { tv_sec: REACHED, tv_usec: 0 });
        set_option(&socket, BUFFER_MOST, &limits::STREAM_AHEAD_BYTES);
        set_option(&socket, BUFFER_SIZE, &limits::STREAM_AHEAD_BYTES);
        // SAFETY: all zeroes is a value of this structure.
        let mut address: libc::sockaddr_vm = unsafe { core::mem::zeroed() };
        #[expect(clippy::cast_possible_truncation, reason = "small constants")]
        let (family, length) =
            (libc::AF_VSOCK as libc::sa_family_t, size_of::<libc::sockaddr_vm>() as libc::socklen_t);
        (address.svm_family, address.svm_cid, address.svm_port) =
            (family, libc::VMADDR_CID_HOST, limits::STREAM_PORT);
        let connected = signals_blocked(|| {
            // SAFETY: an open socket, and an address of the given length.
            unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) }
        });
        if connected != 0 {
            // Refused, reset, no device, no route, timed out: no host answers there.
            log::info(format_args!(
                "no host answers at the virtual socket: {}",
                std::io::Error::last_os_error()
            ));
            return Err(TransportError::NoDevice);
        }
        Vsock::greet(socket, PACKET_BYTES)
    }

    /// Connects to the host that listens at `path`.
    ///
    /// # Errors
    /// [`TransportError`] when there is none.
    pub fn connect(path: &Path) -> Result<Vsock, TransportError> {
        let stream =
            signals_blocked(|| UnixStream::connect(path)).map_err(|error| TransportError::System {
                what: "connecting to SLUICE_SOCKET",
                error: Errno::from_io_error(&error).unwrap_or(Errno::IO),
            })?;
        Vsock::greet(stream.into(), BUFFER_BYTES)
    }

    /// Checks that the other side has this version of the protocol.
    fn greet(socket: OwnedFd, packet: usize) -> Result<Vsock, TransportError> {
        let system = |error| TransportError::System { what: "the connection", error };
        let output = Output { buffer: vec![0; BUFFER_BYTES].into(), length: 0, tail: 0, sent: 0 };
        let shared = Connection {
            socket: HeldDescriptor::new(socket).map_err(system)?,
            packet,
            page: OnceLock::new(),
            output: Mutex::new(output),
            holds_records: AtomicBool::new(false),
            due: AtomicU32::new(0),
            resources: Mutex::default(),
            arrivals: AtomicU32::new(0),
            seen: AtomicU32::new(0),
            lost: AtomicBool::new(false),
        };
        shared.say(FromGuest::Hello { version: calls::VERSION })?;
        let mut head: Head = [0; HEAD_BYTES];
        let mut done = 0;
        while done < HEAD_BYTES {
            let socket = shared.socket.get()?;
            let polled = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&TIMEOUT));
            match polled {
                Ok(0) => return Err(TransportError::NoDevice),
                Err(Errno::INTR) => continue,
                Ok(_) | Err(_) => {}
            }
            match rustix::io::read(socket, &mut head[done..]) {
                // A host other than Sluice closes the connection, at once or after the first frame.
                Ok(0) | Err(Errno::CONNRESET) => return Err(TransportError::NoDevice),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(system(error)),
            }
        }
        match ToGuest::decode(&head) {
            Ok(ToGuest::Hello { version: calls::VERSION }) => {}
            Ok(ToGuest::Hello { version }) => return Err(TransportError::Version(version)),
            _ => return Err(TransportError::NoDevice),
        }
        Ok(Vsock { shared: Arc::new(shared), next_resource: AtomicU32::new(1) })
    }

    /// Starts the thread that receives, which writes to this control resource, and the thread that sends held records.
    fn receive_into(&self, resource: u32) -> Result<(), TransportError> {
        let control = {
            let resources = self.shared.resources();
            resources.iter().find(|(_, (id, _))| *id == resource).map(|(at, _)| *at)
        };
        let base = control.and_then(|at| usize::try_from(at).ok()).ok_or(TransportError::Size(0))?;
        // SAFETY: the session keeps its control resource mapped for the life of the process.
        let words = unsafe { Words::new(base, layout::BYTES) };
        self.shared.page.get_or_init(|| words);
        let (receiver, sender) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        // The receiving thread comes last: without a session the page is unmapped.
        let started = spawn("sluice-sender", move || sender.send_held())
            .and_then(|()| spawn("sluice-stream", move || receiver.receive(&words)));
        started.map_err(|error| {
            self.shared.lost.store(true, Ordering::Relaxed);
            self.shared.send_soon();
            TransportError::System {
                what: "a thread",
                error: Errno::from_io_error(&error).unwrap_or(Errno::AGAIN),
            }
        })
    }
}

impl Connection {
    fn output(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn resources(&self) -> MutexGuard<'_, BTreeMap<u64, (u32, u64)>> {
        self.resources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alive(&self) -> Result<(), TransportError> {
        if self.lost.load(Ordering::Relaxed) { Err(TransportError::Lost) } else { Ok(()) }
    }

    /// Sends a frame without a payload.
    fn say(&self, frame: FromGuest) -> Result<(), TransportError> {
        let mut output = self.output();
        output.put(&frame.encode());
        self.flush(&mut output)
    }

    /// Sends the collected frames. The host accepts every frame, or the stream ends; a thread here reads its frames, so
    /// neither side waits for the other.
    fn flush(&self, output: &mut Output) -> Result<(), TransportError> {
        let length = core::mem::take(&mut output.length);
        output.sent = output.tail;
        self.holds_records.store(false, Ordering::Relaxed);
        self.alive()?;
        let sent = self.send_all(output.buffer.get(..length).unwrap_or_default());
        if sent.is_err() {
            // Nothing was sent, or half a frame: the host could not parse any later frame. Waiting threads must find out now.
            self.lost.store(true, Ordering::Relaxed);
            self.arrived();
        }
        sent
    }

    /// True if the worker has consumed all records that were sent.
    fn is_consumed(&self, output: &Output) -> bool {
        self.page
            .get()
            .is_none_or(|words| words.load_u64(layout::RING_HEAD, Ordering::Acquire) >= output.sent)
    }

    /// Leaves the last record in the output, if there is a reason to wait for further ones, or sends it.
    fn send_or_hold(&self, output: &mut Output) -> Result<(), TransportError> {
        if output.length < PACKET_BYTES && !self.is_consumed(output) {
            self.holds_records.store(true, Ordering::Relaxed);
            // Either this thread sees the new head, or the receiving thread sees that records are held.
            fence(Ordering::SeqCst);
            if !self.is_consumed(output) {
                return Ok(());
            }
        }
        self.flush(output)
    }

    /// Sends held records whenever the worker has consumed the earlier ones. The receiving thread must not do it: it would no
    /// longer receive while the socket takes no more.
    fn send_held(&self) {
        while self.alive().is_ok() {
            let due = self.due.load(Ordering::Acquire);
            let mut output = self.output();
            // A failure marks the stream as lost.
            if output.length > 0 && self.is_consumed(&output) && self.flush(&mut output).is_err() {
                return;
            }
            drop(output);
            // Woken, interrupted, or a change before: the loop looks again in any case.
            let _ = futex::wait(&self.due, futex::Flags::PRIVATE, due, None);
        }
    }

    /// Wakes the sending thread if records are held.
    fn send_soon(&self) {
        fence(Ordering::SeqCst);
        if self.holds_records.load(Ordering::Relaxed) || self.alive().is_err() {
            self.due.fetch_add(1, Ordering::Release);
            let _ = futex::wake(&self.due, futex::Flags::PRIVATE, 1);
        }
    }

    fn send_all(&self, mut left: &[u8]) -> Result<(), TransportError> {
        while !left.is_empty() {
            let packet = left.get(..self.packet).unwrap_or(left);
            match send(self.socket.get()?, packet, SendFlags::NOSIGNAL) {
                Ok(count) => left = left.get(count..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(_) => return Err(TransportError::Lost),
            }
        }
        Ok(())
    }

    /// Receives until the stream ends, and marks the session in the page as lost.
    fn receive(&self, words: &Words) {
        let mut input = Input { buffer: vec![0; BUFFER_BYTES].into(), length: 0 };
        while self.receive_some(&mut input, words).is_some() {}
        self.lost.store(true, Ordering::Relaxed);
        if layout::lost(words).is_none() {
            layout::set_lost(words, Error::DEVICE_UNAVAILABLE.0);
        }
        self.arrived();
        self.send_soon();
    }

    /// Reads the available bytes and applies their frames; `None` at the end.
    fn receive_some(&self, input: &mut Input, words: &Words) -> Option<()> {
        let socket = self.socket.get().ok()?;
        let count = match rustix::io::read(socket, input.buffer.get_mut(input.length..)?) {
            Ok(0) => return None,
            Ok(count) => count,
            Err(Errno::INTR) => return Some(()),
            Err(_) => return None,
        };
        input.length += count;
        let mut start = 0;
        loop {
            let bytes = input.buffer.get(start..input.length)?;
            let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else { break };
            let frame = ToGuest::decode(head).ok()?;
            let whole = HEAD_BYTES + frame.payload() as usize;
            let Some(payload) = bytes.get(HEAD_BYTES..whole) else { break };
            self.frame(frame, payload, words)?;
            start += whole;
        }
        input.buffer.copy_within(start..input.length, 0);
        input.length -= start;
        if start > 0 {
            self.arrived();
        }
        Some(())
    }

    fn frame(&self, frame: ToGuest, payload: &[u8], words: &Words) -> Option<()> {
        match frame {
            ToGuest::Hello { .. } => return None,
            ToGuest::State { state, error } => {
                words.store_u32(layout::LOST_ERROR, error, Ordering::Relaxed);
                words.store_u32(layout::STATE, state, Ordering::Release);
            }
            ToGuest::Sticky { error } => words.store_u32(layout::STICKY, error, Ordering::Release),
            ToGuest::Room { head } => {
                words.store_u64(layout::RING_HEAD, head, Ordering::Release);
                self.send_soon();
            }
            ToGuest::Console { waiting } => words.store_u32(layout::CONSOLE, waiting, Ordering::Release),
            ToGuest::Attachment { slot, attachment } => layout::set_attachment(words, slot, attachment),
            ToGuest::Sequence { slot, sequence } => layout::set_completed(words, slot, sequence),
            ToGuest::Reply { slot, ticket, result, .. } => {
                reply::publish(words, slot, ticket, result, payload);
            }
            ToGuest::LateError { index, error } => layout::set_late_error(words, index, error),
            ToGuest::Bulk { address, .. } => self.bulk(address, payload)?,
            ToGuest::HostCall { call } => layout::set_host_call(words, call),
        }
        Some(())
    }

    /// Writes to arena memory, in the resource that holds the address.
    fn bulk(&self, address: u64, bytes: &[u8]) -> Option<()> {
        let resources = self.resources();
        let (mut at, mut left) = (address, bytes);
        while !left.is_empty() {
            let (base, (id, length)) = resources.range(..=at).next_back()?;
            let room =
                length.checked_sub(at.checked_sub(*base)?).filter(|room| *room > 0 && *id != CONTROL)?;
            let (now, later) = left.split_at(left.len().min(usize::try_from(room).ok()?));
            host_memory::copy(at, now.as_ptr().expose_provenance() as u64, now.len());
            at += now.len() as u64;
            left = later;
        }
        Some(())
    }

    /// Records an arrival and wakes the waiting thread.
    fn arrived(&self) {
        self.arrivals.fetch_add(1, Ordering::Release);
        // A wake-up without a waiting thread costs only a system call.
        let _ = futex::wake(&self.arrivals, futex::Flags::PRIVATE, 1);
    }
}

/// The id of the first resource, which is the session page.
const CONTROL: u32 = 1;

/// Received bytes that are not parsed yet.
struct Input {
    buffer: Box<[u8]>,
    length: usize,
}

impl Output {
    fn room(&self) -> usize {
        self.buffer.len() - self.length
    }

    fn put(&mut self, bytes: &[u8]) {
        self.buffer[self.length..][..bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }

    /// Appends a frame of arena memory.
    fn bulk(&mut self, address: u64, bytes: u32) {
        self.put(&FromGuest::Bulk { address, bytes }.encode());
        let into = &mut self.buffer[self.length..][..bytes as usize];
        host_memory::read(address, into);
        self.length += bytes as usize;
    }
}

impl Transport for Vsock {
    fn create(
        &self,
        reservation: &Reservation,
        at: u64,
        bytes: u64,
    ) -> Result<TransportResource, TransportError> {
        if bytes == 0 || !bytes.is_multiple_of(gpu::PAGE) || bytes > limits::RESOURCE_BYTES {
            return Err(TransportError::Size(bytes));
        }
        self.shared.alive()?;
        reservation.fill(at, bytes)?;
        let id = self.next_resource.fetch_add(1, Ordering::Relaxed);
        self.shared.resources().insert(at, (id, bytes));
        if let Err(error) = self.shared.say(FromGuest::Create { resource: id, bytes }) {
            self.shared.resources().remove(&at);
            return Err(error);
        }
        Ok(TransportResource { id, token: Token::Private })
    }

    fn destroy(&self, resource: TransportResource) -> Result<(), TransportError> {
        self.shared.resources().retain(|_, (id, _)| *id != resource.id);
        self.shared.say(FromGuest::Destroy { resource: resource.id })
    }

    fn submit(&self, doorbell: Doorbell) -> Result<(), TransportError> {
        let frame = match doorbell {
            Doorbell::Open { resource } => {
                self.receive_into(resource)?;
                FromGuest::Open { resource }
            }
            Doorbell::Attach { resource, slot, address } => FromGuest::Attach { resource, slot, address },
            Doorbell::Detach { slot } => FromGuest::Detach { slot },
            Doorbell::Close => FromGuest::Close,
            // The host rings by itself, and its frames wake this side.
            Doorbell::Ring | Doorbell::Wait => return Ok(()),
        };
        self.shared.say(frame)
    }

    fn posted(&self, record: &[u8]) -> Result<(), TransportError> {
        // The record was just encoded here, so it decodes.
        let reads = Header::read(record).and_then(|(header, fields)| calls::staged(header.call, fields));
        let mut output = self.shared.output();
        let held = output.length;
        for range in reads.map(|staged| staged.reads).unwrap_or_default().into_iter().flatten() {
            let (mut address, mut left) = (range.address, range.bytes);
            while left > 0 {
                let most = output.room().saturating_sub(HEAD_BYTES).min(limits::STREAM_BULK_BYTES);
                let now = u32::try_from(left.min(most as u64)).unwrap_or(0);
                if now == 0 || most < limits::STREAM_BULK_BYTES && left > most as u64 {
                    self.shared.flush(&mut output)?;
                    continue;
                }
                output.bulk(address, now);
                address += u64::from(now);
                left -= u64::from(now);
            }
        }
        let frame = HEAD_BYTES + record.len();
        let fills_a_packet = held > 0 && held == output.length && held + frame > PACKET_BYTES;
        if fills_a_packet || output.room() < frame {
            self.shared.flush(&mut output)?;
        }
        let bytes = u32::try_from(record.len()).map_err(|_| TransportError::Size(record.len() as u64))?;
        output.put(&FromGuest::Record { bytes }.encode());
        output.put(record);
        output.tail =
            self.shared.page.get().map_or(0, |words| words.load_u64(layout::RING_TAIL, Ordering::Relaxed));
        self.shared.send_or_hold(&mut output)
    }

    fn flush(&self) -> Result<(), TransportError> {
        if !self.shared.holds_records.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut output = self.shared.output();
        if output.length > 0 { self.shared.flush(&mut output) } else { Ok(()) }
    }

    fn host_function_returned(&self, call: HostCall) -> Result<(), TransportError> {
        self.shared.say(FromGuest::HostReturn { call })
    }

    fn wait(&self, timeout: Duration) -> Result<(), TransportError> {
        let shared = &self.shared;
        let (seen, now) = (shared.seen.load(Ordering::Relaxed), shared.arrivals.load(Ordering::Acquire));
        if seen == now {
            self.shared.alive()?;
            let timeout = Timespec::try_from(timeout).ok();
            // Woken, interrupted, timed out, or an arrival before: the caller checks again in any case.
            let _ = futex::wait(&shared.arrivals, futex::Flags::PRIVATE, now, timeout.as_ref());
        }
        shared.seen.store(shared.arrivals.load(Ordering::Acquire), Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_protocol::{calls::wire, record::NO_REPLY, ring::Producer};
    use std::io::Write as _;

    /// A transport whose session is open, its page, and the host's end, at which each packet is one read.
    fn opened() -> (Vsock, Words, OwnedFd) {
        let (host, guest) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::io::write(&host, &ToGuest::Hello { version: calls::VERSION }.encode()).unwrap();
        let transport = Vsock::greet(guest, PACKET_BYTES).unwrap();
        let control = Reservation::new(0, layout::BYTES as u64).unwrap();
        let page = transport.create(&control, control.base(), layout::BYTES as u64).unwrap();
        transport.submit(Doorbell::Open { resource: page.id }).unwrap();
        // The receiving thread may write the page until the process ends.
        core::mem::forget(control);
        for _ in ["hello", "create", "open"] {
            rustix::io::read(&host, &mut [0; HEAD_BYTES]).unwrap();
        }
        let words = *transport.shared.page.get().unwrap();
        (transport, words, host)
    }

    /// Posts records as a session does.
    fn post(transport: &Vsock, words: &Words, producer: &mut Producer, count: usize) {
        let header = Header {
            call: wire::launch::CALL,
            reply: NO_REPLY,
            ticket: 0,
            context: 1,
            stream: 1,
            thread: 1,
            sequence: 1,
        };
        let mut buffer = [0; limits::RECORD_BYTES];
        let record = header.build(&mut buffer, |_| Ok(())).unwrap();
        for _ in 0..count {
            producer.publish(words, record).unwrap();
            transport.posted(record).unwrap();
        }
    }

    /// True if a packet is there, now or within this time.
    fn comes(host: &OwnedFd, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).unwrap();
        let wait = || poll(&mut [PollFd::new(host, PollFlags::IN)], Some(&limit));
        rustix::io::retry_on_intr(wait) != Ok(0)
    }

    /// The number of records in the next packet, which another thread may send.
    fn records(host: &OwnedFd) -> usize {
        assert!(comes(host, Duration::from_secs(60)), "no packet comes");
        let mut packet = [0; 2 * PACKET_BYTES];
        let length = rustix::io::read(host, &mut packet).unwrap();
        let mut left = &packet[..length];
        let mut count = 0;
        while let Some((head, rest)) = left.split_first_chunk::<HEAD_BYTES>() {
            let frame = FromGuest::decode(head).unwrap();
            left = &rest[frame.payload() as usize..];
            count += usize::from(matches!(frame, FromGuest::Record { .. }));
        }
        count
    }

    // Promise: V43
    #[test]
    fn records_are_sent_together_until_the_worker_has_consumed_earlier_ones_or_a_thread_waits() {
        let (transport, words, host) = opened();
        let mut producer = Producer::new();
        let none_comes = || !comes(&host, Duration::from_millis(50));
        post(&transport, &words, &mut producer, 4);
        assert_eq!(records(&host), 1, "nothing is under way, so it is sent at once");
        assert!(none_comes(), "the others wait for the worker");
        let head = words.load_u64(layout::RING_TAIL, Ordering::Relaxed) / 4;
        rustix::io::write(&host, &ToGuest::Room { head }.encode()).unwrap();
        assert_eq!(records(&host), 3, "it has consumed what was sent");
        post(&transport, &words, &mut producer, 3);
        transport.flush().unwrap();
        assert_eq!(records(&host), 3, "a thread waits");
        transport.flush().unwrap();
        assert!(none_comes());
        // Neither an answer nor a wait: full packets go out.
        post(&transport, &words, &mut producer, 1000);
        transport.flush().unwrap();
        let (mut packets, mut sent) = (0, 0);
        while sent < 1000 {
            packets += 1;
            sent += records(&host);
        }
        assert!(packets <= 20, "{packets} packets");
    }

    // Promise: G1
    #[test]
    fn memory_can_be_unmapped_once_its_resource_is_destroyed_although_the_host_writes_to_it() {
        const BYTES: u64 = 4 * gpu::PAGE;
        let (mut stream, guest) = UnixStream::pair().unwrap();
        // At once: the guest's wait for it is limited.
        stream.write_all(&ToGuest::Hello { version: calls::VERSION }.encode()).unwrap();
        let memory = Reservation::new(0, BYTES).unwrap();
        let at = memory.base();
        let host = std::thread::spawn(move || {
            let bytes = u32::try_from(BYTES).unwrap();
            let mut frame = ToGuest::Bulk { address: at, bytes }.encode().to_vec();
            frame.extend(vec![7; bytes as usize]);
            while stream.write_all(&frame).is_ok() {}
        });
        let transport = Vsock::greet(guest.into(), BUFFER_BYTES).unwrap();
        let control = Reservation::new(0, layout::BYTES as u64).unwrap();
        let page = transport.create(&control, control.base(), layout::BYTES as u64).unwrap();
        let arena = transport.create(&memory, at, BYTES).unwrap();
        transport.submit(Doorbell::Open { resource: page.id }).unwrap();
        let mut byte = [0];
        while std::hint::black_box(byte) == [0] {
            host_memory::read(at, &mut byte);
            std::thread::yield_now();
        }
        transport.destroy(arena).unwrap();
        memory.unmap(at, BYTES).unwrap();
        // The next frame has an address that belongs to no resource, so the stream ends, and nothing is written.
        while transport.wait(Duration::from_millis(10)).is_ok() {}
        // The guest's end stays open as long as its process, so the host would wait for room for ever.
        rustix::net::shutdown(transport.shared.socket.get().unwrap(), rustix::net::Shutdown::Both).unwrap();
        drop(transport);
        host.join().unwrap();
        // The receiving thread may still write the control page.
        core::mem::forget(control);
    }
}
