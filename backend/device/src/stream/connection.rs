//! One connection: it handles frames in both directions, and its thread waits in one place only.

use super::{
    Neighbours,
    bridge::Bridge,
    memory::{Budget, ConnectionMemory, MemoryError},
    mirror::{Mirror, Outgoing, RecordError},
};
use crate::{
    device::Device,
    link::Link,
    memory::{MemoryError as Refused, MemoryPolicy},
    sessions::UNAVAILABLE,
    users::UserShare,
    vring,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, OwnedFd},
    fs::OFlags,
    io::Errno,
};
use sluice_protocol::{
    calls,
    doorbell::Doorbell,
    field::FieldError,
    limits, session,
    staged::StagedRange as Arena,
    stream::{FromGuest, HEAD_BYTES, Head, ToGuest},
};
use sluice_shared_memory::{mapping::MapError, ranges::Range};
use std::{
    collections::HashMap,
    fs::File,
    sync::Arc,
    time::{Duration, Instant},
};

/// Bytes read at once: room for the longest frame that is kept complete.
const INPUT_BYTES: usize = 64 << 10;
/// Bytes written at once.
const OUTPUT_BYTES: usize = 64 << 10;
/// Reads in a row before the worker's publications get a turn.
const READS: usize = 16;

const _: () = assert!(INPUT_BYTES >= HEAD_BYTES + limits::RECORD_BYTES);

/// The reason why a connection ended, other than the guest leaving.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("a system call failed: {0}")]
    System(#[from] Errno),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("cannot decode a frame: {0}")]
    Frame(#[from] FieldError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("the guest's version {0} is not the device's")]
    Version(u32),
    #[error("a frame came at the wrong time: {0:?}")]
    Order(FromGuest),
    #[error("the guest sent bytes for {0:#x}, where no resource is attached")]
    Address(u64),
    #[error("the guest did not open a session in time")]
    Late,
}

/// The state of a connection after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// There may be more work.
    More,
    /// There may be more work after results are sent.
    Full,
    /// There is no work now.
    Idle,
    /// The guest has left.
    Over,
}

/// The state of one connection.
#[derive(Debug)]
pub(super) struct Connection {
    bridge: Bridge,
    memory: ConnectionMemory,
    /// True after the first frame.
    greeted: bool,
    resources: HashMap<u32, Range>,
    /// Set when the session is opened.
    mirror: Option<Mirror>,
    /// True if sleep is announced in the page.
    announced: bool,
    input: Input,
    output: Vec<u8>,
    /// Number of bytes of `output` that are sent.
    sent: usize,
    began: Instant,
    /// All connections of the device.
    neighbours: Arc<Neighbours>,
    /// Written when a new connection comes.
    arrival: Arc<OwnedFd>,
    /// Dropped last, because waiters for the end of this connection wait for it.
    socket: Arc<File>,
}

/// Bytes that were read and not processed yet.
#[derive(Debug)]
struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The address for the next bytes of a bulk frame, and the number of bytes to come.
    bulk: (u64, usize),
}

impl Input {
    fn new() -> Input {
        Input { buffer: vec![0; INPUT_BYTES].into(), start: 0, end: 0, bulk: (0, 0) }
    }

    fn bytes(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    fn take(&mut self, count: usize) {
        self.start = self.start.saturating_add(count).min(self.end);
    }

    /// The free space after the present bytes.
    fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end = self.end.saturating_sub(self.start);
            self.start = 0;
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }
}

impl Connection {
    pub(super) fn new(
        socket: OwnedFd,
        link: &Arc<Link>,
        budget: &Arc<Budget>,
        neighbours: &Arc<Neighbours>,
        user: Option<Arc<UserShare>>,
    ) -> Result<Connection, End> {
        rustix::fs::fcntl_setfl(&socket, OFlags::NONBLOCK)?;
        let memory = ConnectionMemory::new(budget)?;
        let mut device = Device::new(MemoryPolicy::Sealed, Arc::clone(link))?;
        if let Some(user) = user {
            device.count_for(user);
        }
        device.set_memory(memory.as_guest()?)?;
        device.keep(memory.share());
        Ok(Connection {
            bridge: Bridge::new(device),
            memory,
            greeted: false,
            resources: HashMap::new(),
            mirror: None,
            announced: false,
            input: Input::new(),
            output: Vec::new(),
            sent: 0,
            began: Instant::now(),
            neighbours: Arc::clone(neighbours),
            arrival: neighbours.join()?,
            socket: vring::known(File::from(socket)),
        })
    }

    /// Serves the connection until it ends. Its worker is then killed, and the link waits for it.
    pub(super) fn serve(mut self) -> Result<(), End> {
        loop {
            self.bridge.events()?;
            for range in self.bridge.left() {
                self.memory.give(range);
            }
            let received = self.receive()?;
            let sent = self.send()?;
            if received == Flow::Over || sent == Flow::Over {
                return Ok(());
            }
            let more = match received {
                // Sending may have made room for frames that are here already, which no socket event reports.
                Flow::Full => self.may_receive(),
                flow => flow == Flow::More,
            };
            if !more && !self.has_more() && self.sleep()? == Flow::Over {
                return Ok(());
            }
        }
    }

    /// True if there is more to send before sleep; else sleep is announced.
    fn has_more(&mut self) -> bool {
        let unsent = !self.output.is_empty();
        let Some(mirror) = self.mirror.as_mut().filter(|mirror| !mirror.is_over()) else { return false };
        if !self.bridge.serves() {
            mirror.end(UNAVAILABLE);
            return true;
        }
        if self.announced && !self.bridge.is_waiting() {
            mirror.leave();
            self.announced = false;
            return !unsent;
        }
        // A guest that does not read its frames gets no more.
        if unsent || self.announced {
            return false;
        }
        if !mirror.enter() {
            return true;
        }
        self.announced = true;
        self.bridge.wait();
        // True if it was woken meanwhile, or the last wake found no sleeper.
        !self.bridge.is_waiting()
    }

    fn sleep(&mut self) -> Result<Flow, End> {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, self.may_receive());
        wanted.set(PollFlags::OUT, !self.output.is_empty());
        let timeout = match self.mirror {
            Some(_) => None,
            None => {
                let timeout = Duration::from_millis(limits::STREAM_OPEN_MILLISECONDS);
                let left = timeout.checked_sub(self.began.elapsed()).ok_or(End::Late)?;
                Timespec::try_from(left).ok()
            }
        };
        let events = self.bridge.device.poller.descriptor();
        let mut fds = [
            PollFd::new(&*self.socket, wanted),
            PollFd::new(&events, PollFlags::IN),
            PollFd::new(&*self.arrival, PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            // Hung up: also checked while no bytes are read.
            Ok(_) if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) => return Ok(Flow::Over),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if fds[2].revents().contains(PollFlags::IN) {
            // No other thread reads it, so it is readable.
            let _ = rustix::io::read(&*self.arrival, &mut [0; 8]);
            if let Some(mirror) = &mut self.mirror {
                mirror.pulse();
            }
        }
        Ok(Flow::More)
    }

    // ---- input ----

    /// True if frames may be processed: not while the largest number of calls is under way.
    fn may_receive(&self) -> bool {
        self.mirror.as_ref().is_none_or(|mirror| !mirror.is_full())
    }

    fn receive(&mut self) -> Result<Flow, End> {
        for _ in 0..READS {
            self.understand()?;
            if !self.may_receive() {
                return Ok(Flow::Full);
            }
            match rustix::io::read(self.socket.as_fd(), self.input.room()) {
                Ok(0) => return Ok(Flow::Over),
                Ok(count) => self.input.end = self.input.end.saturating_add(count),
                Err(Errno::AGAIN) => return Ok(Flow::Idle),
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(Flow::Over),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Flow::More)
    }

    /// Processes all complete frames.
    fn understand(&mut self) -> Result<(), End> {
        while self.may_receive() {
            let (address, left) = self.input.bulk;
            if left > 0 {
                let bytes = self.input.bytes();
                let bytes = bytes.get(..bytes.len().min(left)).unwrap_or_default();
                if bytes.is_empty() {
                    return Ok(());
                }
                if !self.memory.write(address, bytes) {
                    return Err(End::Address(address));
                }
                let count = bytes.len();
                self.input.bulk = (address.wrapping_add(count as u64), left.saturating_sub(count));
                self.input.take(count);
                continue;
            }
            let Some(head) = self.input.bytes().first_chunk::<HEAD_BYTES>() else { return Ok(()) };
            let frame = FromGuest::decode(head)?;
            let payload = usize::try_from(frame.payload()).map_err(|_| FieldError::Range)?;
            if let FromGuest::Bulk { address, .. } = frame {
                if self.mirror.is_none() {
                    return Err(End::Order(frame));
                }
                self.input.take(HEAD_BYTES);
                self.input.bulk = (address, payload);
                continue;
            }
            let whole = HEAD_BYTES.saturating_add(payload);
            if self.input.bytes().len() < whole {
                return Ok(());
            }
            self.frame(frame)?;
            self.input.take(whole);
        }
        Ok(())
    }

    fn frame(&mut self, frame: FromGuest) -> Result<(), End> {
        let order = End::Order(frame);
        if let FromGuest::Hello { version } = frame {
            if self.greeted {
                return Err(order);
            }
            self.greeted = true;
            self.neighbours.tell(&self.arrival);
            // The older side reports the difference.
            self.put(&ToGuest::Hello { version: calls::VERSION }.encode());
            if version != calls::VERSION {
                self.send()?;
                return Err(End::Version(version));
            }
            return Ok(());
        }
        if !self.greeted {
            return Err(order);
        }
        match frame {
            FromGuest::Hello { .. } | FromGuest::Bulk { .. } => return Err(order),
            FromGuest::Create { resource, bytes } => self.create(resource, bytes),
            FromGuest::Destroy { resource } => {
                if let Some(range) = self.resources.remove(&resource) {
                    self.memory.detach(resource);
                    self.bridge.destroy(resource, range);
                }
            }
            FromGuest::Open { resource } => {
                let range = self.resources.get(&resource).copied();
                let range = range.filter(|range| range.bytes >= session::BYTES as u64);
                let (Some(range), None) = (range, &self.mirror) else { return Err(order) };
                self.mirror = Some(Mirror::new(self.memory.map(range)?));
                // Refused: the device has written the reason, or there is no session, which is found before sleep.
                self.bridge.say(Doorbell::Open { resource });
            }
            FromGuest::Attach { resource, slot, address } => {
                let Some(mirror) = &mut self.mirror else { return Err(order) };
                mirror.watch(slot);
                if self.bridge.say(Doorbell::Attach { resource, slot, address })
                    && let Some(range) = self.resources.get(&resource)
                {
                    self.memory.attach(address, resource, *range);
                }
            }
            FromGuest::Detach { slot } => {
                let Some(mirror) = &mut self.mirror else { return Err(order) };
                mirror.watch(slot);
                self.bridge.say(Doorbell::Detach { slot });
            }
            FromGuest::HostReturn { call } => {
                let Some(mirror) = &self.mirror else { return Err(order) };
                mirror.host_function_returned(call);
            }
            FromGuest::Close => {
                self.bridge.say(Doorbell::Close);
            }
            FromGuest::Record { .. } => {
                let bytes = self.input.bytes();
                let whole = HEAD_BYTES.saturating_add(usize::try_from(frame.payload()).unwrap_or(0));
                let record = bytes.get(HEAD_BYTES..whole).unwrap_or_default();
                let Some(mirror) = &mut self.mirror else { return Err(order) };
                // Without a worker, records are not consumed and no thread waits for their results.
                if !mirror.is_over() && mirror.record(record)? {
                    self.bridge.say(Doorbell::Ring);
                }
            }
        }
        Ok(())
    }

    /// Creates a resource. A refused one is unknown from then on, which its attachment reports.
    fn create(&mut self, resource: u32, bytes: u64) {
        let known = self.resources.len().saturating_add(self.bridge.leaving());
        if known >= limits::ATTACHMENTS as usize || self.resources.contains_key(&resource) {
            return;
        }
        let Some(range) = self.memory.take(bytes) else { return };
        if self.bridge.create(resource, range) {
            self.resources.insert(resource, range);
        } else {
            self.memory.give(range);
        }
    }

    // ---- output ----

    fn put(&mut self, bytes: &[u8]) {
        self.output.extend_from_slice(bytes);
    }

    /// Sends output until the socket is full.
    fn send(&mut self) -> Result<Flow, End> {
        loop {
            if self.output.is_empty() {
                self.fill();
            }
            let unsent = self.output.get(self.sent..).unwrap_or_default();
            if unsent.is_empty() {
                return Ok(Flow::Idle);
            }
            match rustix::io::write(self.socket.as_fd(), unsent) {
                Ok(count) => self.sent = self.sent.saturating_add(count),
                Err(Errno::AGAIN) => return Ok(Flow::Idle),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Flow::Over),
                Err(error) => return Err(error.into()),
            }
            if self.sent >= self.output.len() {
                self.output.clear();
                self.sent = 0;
            }
        }
    }

    /// Collects the next output.
    fn fill(&mut self) {
        let Some(mirror) = &mut self.mirror else { return };
        mirror.look();
        while self.output.len() < OUTPUT_BYTES {
            let Some(next) = mirror.next() else { return };
            match next {
                Outgoing::Frame(frame) => self.output.extend(frame.encode()),
                Outgoing::Reply { slot, ticket } => {
                    let mut buffer = [0; limits::REPLY_BYTES];
                    let (result, fields) = mirror.answer(slot, &mut buffer);
                    let bytes = u32::try_from(fields.len()).unwrap_or(0);
                    self.output.extend(ToGuest::Reply { slot, ticket, result, bytes }.encode());
                    self.output.extend(fields);
                }
                Outgoing::Bulk(range) => {
                    if let Some(rest) = bulk(&self.memory, range, &mut self.output) {
                        mirror.put_back(Outgoing::Bulk(rest));
                    }
                }
            }
        }
    }
}

/// Appends a frame of arena memory; returns the part without room.
fn bulk(memory: &ConnectionMemory, range: Arena, output: &mut Vec<u8>) -> Option<Arena> {
    let start = output.len();
    let first = start.saturating_add(HEAD_BYTES);
    // A frame of a few bytes would be mostly header.
    let room = OUTPUT_BYTES.saturating_sub(first).max(4096);
    let count = usize::try_from(range.bytes).unwrap_or(usize::MAX).min(room);
    output.resize(first.saturating_add(count), 0);
    let read = output.get_mut(first..).map_or(0, |into| memory.read(range.address, into));
    output.truncate(first.saturating_add(read));
    let head = output.get_mut(start..).and_then(|frame| frame.first_chunk_mut())?;
    let bytes = u32::try_from(read).unwrap_or(0);
    let encoded: Head = ToGuest::Bulk { address: range.address, bytes }.encode();
    *head = encoded;
    if read == 0 {
        // The guest has removed the memory in which it wanted this.
        output.truncate(start);
        return None;
    }
    let done = u64::from(bytes);
    let rest = Arena { address: range.address.wrapping_add(done), bytes: range.bytes.saturating_sub(done) };
    (rest.bytes > 0 && read == count).then_some(rest)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, reason = "a test")]
    use super::*;
    use crate::link::Arrival;
    use sluice_kit::wait::eventually;
    use sluice_protocol::{
        calls::wire,
        field::{ArenaOut, DeviceAddress},
        record::{Header, NO_REPLY},
        shared::Shared as _,
    };
    use std::{io::Write as _, os::unix::net::UnixStream, sync::atomic::Ordering};

    /// A record that fetches eight bytes on the first stream.
    fn fetch(sequence: u64) -> Vec<u8> {
        let call = wire::memcpy_dtoh::CALL;
        let header = Header { call, reply: NO_REPLY, ticket: 0, context: 1, stream: 1, thread: 1, sequence };
        let address = limits::WINDOW_BOUNDS.start;
        let call =
            wire::memcpy_dtoh::Args { to: ArenaOut { address, bytes: 8 }, from: DeviceAddress(address) };
        let mut buffer = [0; limits::RECORD_BYTES];
        let record = header.build(&mut buffer, |writer| call.put(writer)).unwrap();
        let bytes = u32::try_from(record.len()).unwrap();
        [FromGuest::Record { bytes }.encode().as_slice(), record].concat()
    }

    const CONTROL: u32 = 1;

    /// A connection whose guest has just opened its session.
    fn opened(link: &Arc<Link>, budget: &Arc<Budget>) -> (UnixStream, Connection) {
        let (mut guest, ours) = UnixStream::pair().unwrap();
        guest.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut connection = Connection::new(ours.into(), link, budget, &Arc::default(), None).unwrap();
        let bytes = session::BYTES as u64;
        for frame in [
            FromGuest::Hello { version: calls::VERSION },
            FromGuest::Create { resource: CONTROL, bytes },
            FromGuest::Open { resource: CONTROL },
        ] {
            guest.write_all(&frame.encode()).unwrap();
        }
        assert_eq!(connection.receive().unwrap(), Flow::Idle);
        (guest, connection)
    }

    // Promise: V23
    #[test]
    fn memory_counts_until_the_worker_that_maps_it_is_gone() {
        let bytes = session::BYTES as u64;
        let budget = Budget::new(bytes);
        let link = Arc::new(Link::new(true).unwrap());
        let (_guest, mut connection) = opened(&link, &budget);
        // In place of a pidfd: readable when the worker is gone, and not a process to kill.
        let (pidfd, end) = rustix::pipe::pipe().unwrap();
        let (socket, _worker) = sluice_shared_memory::socket::pair().unwrap();
        connection.bridge.device.arrive(Arrival::Worker { session: 1, socket, process: pidfd.into() });
        assert!(connection.bridge.serves());
        drop(connection);
        let broker = Arc::clone(&link);
        std::thread::spawn(move || crate::link::serve(&broker, None));
        std::thread::sleep(Duration::from_millis(50));
        let mut next = ConnectionMemory::new(&budget).unwrap();
        assert_eq!(next.take(bytes), None, "its worker may still have it");
        drop(end);
        eventually("it is given back", || next.take(bytes).is_some());
    }

    // Promise: V23
    #[test]
    fn queued_frames_are_taken_as_soon_as_earlier_results_complete() {
        // Other load of the machine delays some of them. A connection that waited would wait each time.
        let bound = Duration::from_millis(limits::WAITER_MILLISECONDS / 2);
        assert!((0..20).any(|_| time_of_queued_frames() < bound), "they wait");
    }

    /// Time in which a connection takes the frames that are queued when earlier results complete.
    fn time_of_queued_frames() -> Duration {
        const BATCH: u64 = 128;
        const LIMIT: u64 = limits::STREAM_RESULTS as u64;
        let link = Arc::new(Link::new(true).unwrap());
        let (mut guest, mut connection) = opened(&link, &Budget::new(limits::STREAM_BYTES));
        let range = *connection.resources.get(&CONTROL).unwrap();
        // The worker's end of the page; the test plays the worker.
        let page = connection.memory.map(range).unwrap();
        let words = page.words();
        // As many as may be due, and in one piece with the last of them some more.
        let record = (fetch(1).len() - HEAD_BYTES) as u64;
        for first in (0..LIMIT).step_by(usize::try_from(BATCH).unwrap()) {
            let more = if first + BATCH == LIMIT { 2 } else { 1 };
            let frames: Vec<u8> =
                (first..first + more * BATCH).flat_map(|number| fetch(number + 1)).collect();
            guest.write_all(&frames).unwrap();
            let flow = connection.receive().unwrap();
            assert_eq!(flow, if more == 1 { Flow::Idle } else { Flow::Full });
            let tail = words.load_u64(session::RING_TAIL, Ordering::Acquire);
            assert_eq!(tail, (first + BATCH) * record, "no more than may be");
            words.store_u64(session::RING_HEAD, tail, Ordering::Release);
        }
        // The results are completed before the connection looks, so it gets no wake.
        session::set_completed(&words, 1, LIMIT);
        let since = Instant::now();
        let server = std::thread::spawn(move || connection.serve().map_err(|end| end.to_string()));
        let tail = || words.load_u64(session::RING_TAIL, Ordering::Acquire);
        eventually("the frames are taken", || tail() >= (LIMIT + BATCH) * record);
        let took = since.elapsed();
        drop(guest);
        assert_eq!(server.join().unwrap(), Ok(()));
        took
    }
}
