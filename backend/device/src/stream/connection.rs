//! One connection: frames in, frames out, and the one place where its thread waits.

use super::{
    Neighbours,
    bridge::Bridge,
    memory::{Budget, Memory, MemoryError},
    mirror::{Mirror, Out, RecordError},
};
use crate::{
    device::Device,
    link::Link,
    memory::{MemoryError as Refused, Policy},
    sessions::UNAVAILABLE,
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
    staged::Range as Arena,
    stream::{FromGuest, HEAD_BYTES, Head, ToGuest},
};
use sluice_shared_memory::{mapping::MapError, ranges::Range};
use std::{
    collections::HashMap,
    fs::File,
    sync::Arc,
    time::{Duration, Instant},
};

/// Bytes read at once: room for the longest frame that is kept whole.
const INPUT_BYTES: usize = 64 << 10;
/// Bytes written at once.
const OUTPUT_BYTES: usize = 64 << 10;
/// Reads in a row before what the worker has published gets its turn.
const READS: usize = 16;

const _: () = assert!(INPUT_BYTES >= HEAD_BYTES + limits::RECORD_BYTES);

/// Why a connection is over, other than that the guest has gone.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the kernel: {0}")]
    System(#[from] Errno),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("a frame: {0}")]
    Frame(#[from] FieldError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("a guest of version {0}")]
    Version(u32),
    #[error("a frame that cannot come now: {0:?}")]
    Order(FromGuest),
    #[error("bytes for {0:#x}, where nothing is attached")]
    Address(u64),
    #[error("no session was opened in time")]
    Late,
}

/// Whether a connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// There may be more to do.
    More,
    /// There is nothing to do now.
    Idle,
    /// The guest has gone.
    Over,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    bridge: Bridge,
    memory: Memory,
    /// Set by the first frame.
    greeted: bool,
    resources: HashMap<u32, Range>,
    /// Set when the session is opened.
    mirror: Option<Mirror>,
    /// Sleep is announced in the page.
    announced: bool,
    input: Input,
    output: Vec<u8>,
    /// How much of `output` is sent.
    sent: usize,
    began: Instant,
    /// Of all connections of the device.
    neighbours: Arc<Neighbours>,
    /// Written when a new one has come.
    arrival: Arc<OwnedFd>,
    /// Dropped last: whoever waits for the end of this connection waits for that.
    socket: Arc<File>,
}

/// What was read and not understood yet.
#[derive(Debug)]
struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Where the next bytes of a bulk frame go, and how many are to come.
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

    /// Room for more, after what is there.
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
    ) -> Result<Connection, End> {
        rustix::fs::fcntl_setfl(&socket, OFlags::NONBLOCK)?;
        let memory = Memory::new(budget)?;
        let mut device = Device::new(Policy::Sealed, Arc::clone(link))?;
        device.set_memory(memory.as_guest()?)?;
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

    /// Serves it until it is over. Its worker is then killed, and waited for by the link.
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
            if received == Flow::Idle && !self.has_more() && self.sleep()? == Flow::Over {
                return Ok(());
            }
        }
    }

    /// Whether something is to be sent before sleep; else sleep is announced.
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
        // A guest that does not read what there is need not be told of more.
        if unsent || self.announced {
            return false;
        }
        if !mirror.enter() {
            return true;
        }
        self.announced = true;
        self.bridge.wait();
        // Woken meanwhile, or the last time nobody was asleep.
        !self.bridge.is_waiting()
    }

    fn sleep(&mut self) -> Result<Flow, End> {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, self.may_receive());
        wanted.set(PollFlags::OUT, !self.output.is_empty());
        let timeout = match self.mirror {
            Some(_) => None,
            None => {
                let patience = Duration::from_millis(limits::STREAM_OPEN_MILLISECONDS);
                let left = patience.checked_sub(self.began.elapsed()).ok_or(End::Late)?;
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
            // Hung up: also where nothing is read for now.
            Ok(_) if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) => return Ok(Flow::Over),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if fds[2].revents().contains(PollFlags::IN) {
            // Taken by nobody else, so it is there.
            let _ = rustix::io::read(&*self.arrival, &mut [0; 8]);
            if let Some(mirror) = &mut self.mirror {
                mirror.pulse();
            }
        }
        Ok(Flow::More)
    }

    // ---- in ----

    /// Whether frames may be taken: not while as many calls are under way as may be.
    fn may_receive(&self) -> bool {
        self.mirror.as_ref().is_none_or(|mirror| !mirror.is_full())
    }

    fn receive(&mut self) -> Result<Flow, End> {
        for _ in 0..READS {
            self.understand()?;
            if !self.may_receive() {
                return Ok(Flow::Idle);
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

    /// Does what the frames say that are there as a whole.
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
            // Whichever side is older says so.
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
                // Refused: the device has written why, or there is no session, which is found out before sleep.
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
            FromGuest::Close => {
                self.bridge.say(Doorbell::Close);
            }
            FromGuest::Record { .. } => {
                let bytes = self.input.bytes();
                let whole = HEAD_BYTES.saturating_add(usize::try_from(frame.payload()).unwrap_or(0));
                let record = bytes.get(HEAD_BYTES..whole).unwrap_or_default();
                let Some(mirror) = &mut self.mirror else { return Err(order) };
                // Once there is no worker, nothing consumes records and nobody waits for what becomes of them.
                if !mirror.is_over() && mirror.record(record)? {
                    self.bridge.say(Doorbell::Ring);
                }
            }
        }
        Ok(())
    }

    /// Makes a resource. One that is refused is unknown from then on, which its attachment will be told.
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

    // ---- out ----

    fn put(&mut self, bytes: &[u8]) {
        self.output.extend_from_slice(bytes);
    }

    /// Sends what there is, until the socket is full.
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

    /// Collects what is to be sent next.
    fn fill(&mut self) {
        let Some(mirror) = &mut self.mirror else { return };
        mirror.look();
        while self.output.len() < OUTPUT_BYTES {
            let Some(next) = mirror.next() else { return };
            match next {
                Out::Frame(frame) => self.output.extend(frame.encode()),
                Out::Reply { slot, ticket } => {
                    let mut buffer = [0; limits::REPLY_BYTES];
                    let (result, fields) = mirror.answer(slot, &mut buffer);
                    let bytes = u32::try_from(fields.len()).unwrap_or(0);
                    self.output.extend(ToGuest::Reply { slot, ticket, result, bytes }.encode());
                    self.output.extend(fields);
                }
                Out::Bulk(range) => {
                    if let Some(rest) = bulk(&self.memory, range, &mut self.output) {
                        mirror.put_back(Out::Bulk(rest));
                    }
                }
            }
        }
    }
}

/// Appends a frame of arena memory; answers what there was no room for.
fn bulk(memory: &Memory, range: Arena, output: &mut Vec<u8>) -> Option<Arena> {
    let start = output.len();
    let first = start.saturating_add(HEAD_BYTES);
    // A frame of a few bytes would be mostly head.
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
        // The guest has taken the memory away that it wanted this in.
        output.truncate(start);
        return None;
    }
    let done = u64::from(bytes);
    let rest = Arena { address: range.address.wrapping_add(done), bytes: range.bytes.saturating_sub(done) };
    (rest.bytes > 0 && read == count).then_some(rest)
}
