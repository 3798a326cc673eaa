//! A front-end of the device that sends any vhost-user message, with any descriptors, and changes its memory meanwhile: the device
//! neither panics nor touches memory that can go away, and leaves no session behind. A memory table lends each page to one resource,
//! and only pages of the files that were checked.
//!
//! The first byte of the input chooses between the connection and the memory table; the rest is a program: an operation byte, then its
//! operands.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::pwrite,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use sluice_device::{
    device::Device,
    endpoint::{DeviceMode, Endpoint},
    frontend::{self, FrontendError},
    link::Link,
    memory::{MemoryPolicy, MemoryTable, PIECES, PageRun},
};
use sluice_fuzz::input::Input;
use sluice_protocol::gpu::PAGE;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{IoSlice, Read as _},
    mem::MaybeUninit,
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::Arc,
    time::Duration,
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// Pages of each memory file.
const PAGES: u64 = 64;
/// Operations of one input.
const OPERATIONS: usize = 48;
/// Descriptors of one message; the most that the protocol has are 32.
const DESCRIPTORS: usize = 10;
/// The front-end's address of guest address 0.
const BASE: u64 = 1 << 40;
/// Places in guest memory of the parts of a queue, and of a command.
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x6000;
const COMMAND: u64 = 0x8000;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const GET_CONFIG: u32 = 24;
/// Version 1.
const FLAGS: u32 = 1;
/// The bit of a request that its sender waits for.
const NEED_REPLY: u32 = 8;

/// A number of bytes or an address: mostly whole pages of a small memory, and some that are none.
fn size(input: &mut Input<'_>) -> u64 {
    match input.byte() {
        value @ 0..=199 => u64::from(value) * PAGE,
        value @ 200..=219 => u64::from(value - 200) * 7,
        value @ 220..=239 => (1 << 52) - u64::from(value - 220) * PAGE,
        value => u64::MAX - u64::from(value - 240) * PAGE / 2,
    }
}

fn file(pages: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create(c"ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
    ftruncate(&file, pages * PAGE).expect("truncate");
    fcntl_add_seals(&file, seals).expect("seal");
    file
}

// ---- the connection ----

struct Frontend {
    stream: UnixStream,
    /// Memory files first, then other descriptors.
    files: Vec<OwnedFd>,
    kick: OwnedFd,
    available: u16,
    over: bool,
}

impl Frontend {
    fn new(stream: UnixStream) -> Frontend {
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd");
        let (read, write) = rustix::pipe::pipe().expect("pipe");
        let files = vec![
            file(PAGES, SealFlags::SHRINK),
            file(PAGES, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL),
            file(PAGES, SealFlags::empty()),
            file(1, SealFlags::SHRINK),
            event(),
            read,
            write,
        ];
        Frontend { stream, files, kick: event(), available: 0, over: false }
    }

    /// Sends a message with descriptors, and waits until the device has handled it.
    fn send(&mut self, request: u32, body: &[u8], descriptors: &[BorrowedFd<'_>]) {
        if self.over {
            return;
        }
        let length = u32::try_from(body.len()).expect("a short body");
        let header = [request, FLAGS, length].map(u32::to_le_bytes).concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let message = [header, body.to_vec()].concat();
        let sent = sendmsg(&self.stream, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL);
        // The device closes the connection of a front-end that breaks the rules.
        if sent != Ok(message.len()) {
            self.over = true;
            return;
        }
        let ask = [GET_FEATURES, FLAGS | NEED_REPLY, 0].map(u32::to_le_bytes).concat();
        let asked =
            sendmsg(&self.stream, &[IoSlice::new(&ask)], &mut Default::default(), SendFlags::NOSIGNAL);
        self.over = asked != Ok(ask.len()) || !self.answered(request != GET_FEATURES);
    }

    /// Reads messages until the answer to the question for the features; `false` if the connection is over.
    fn answered(&mut self, own: bool) -> bool {
        let mut left = if own { 1 } else { 2 };
        while left > 0 {
            let mut header = [0; 12];
            if self.stream.read_exact(&mut header).is_err() {
                return false;
            }
            let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
            let length = usize::try_from(word(8)).expect("a length");
            assert!(length <= 4096, "an answer of {length} bytes");
            if self.stream.read_exact(&mut vec![0; length]).is_err() {
                return false;
            }
            left -= u32::from(word(0) == GET_FEATURES);
        }
        true
    }

    /// Sends words with the chosen files.
    fn words(&mut self, request: u32, words: &[u64], chosen: &[usize]) {
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let files: Vec<OwnedFd> = chosen
            .iter()
            .map(|chosen| rustix::io::dup(&self.files[chosen % self.files.len()]).expect("dup"))
            .collect();
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        self.send(request, &body, &files);
    }

    fn table(&mut self, input: &mut Input<'_>) {
        let kind = input.byte();
        if kind < 128 {
            // One sealed file, as of a VMM.
            let chosen = usize::from(kind % 2);
            return self.words(SET_MEM_TABLE, &[1, 0, PAGES * PAGE, BASE, 0], &[chosen]);
        }
        let count = usize::from(kind % 8);
        let mut words = vec![count as u64];
        let mut chosen = Vec::new();
        let mut free = 0_u64;
        for _ in 0..count {
            let (place, bytes) = (input.byte(), size(input));
            // Mostly behind the region before, so that the table can be accepted.
            let at = if place < 200 { free.wrapping_add(u64::from(place % 4) * PAGE) } else { size(input) };
            let offset = if place % 2 == 0 { 0 } else { size(input) };
            words.extend([at, bytes, BASE.wrapping_add(at), offset]);
            chosen.push(usize::from(input.byte()));
            free = at.saturating_add(bytes);
        }
        if kind >= 240 {
            chosen.pop();
        }
        self.words(SET_MEM_TABLE, &words, &chosen);
    }

    /// The messages by which a VMM starts a queue.
    fn start(&mut self, queue: u64) {
        self.words(SET_VRING_NUM, &[queue | 64 << 32], &[]);
        self.words(SET_VRING_ADDR, &[queue, BASE, BASE + USED, BASE + AVAILABLE, 0], &[]);
        self.words(SET_VRING_BASE, &[queue], &[]);
        let kick = rustix::io::dup(&self.kick).expect("dup");
        self.send(SET_VRING_KICK, &queue.to_le_bytes(), &[kick.as_fd()]);
        self.words(SET_VRING_ENABLE, &[queue | 1 << 32], &[]);
    }

    /// Makes a command available, and kicks.
    fn command(&mut self, command: &[u8], memory: usize) {
        let memory = &self.files[memory % 3];
        // Those that were cut are not made longer again.
        let _ = pwrite(memory, command, COMMAND);
        let mut descriptors = Vec::new();
        for (at, bytes, flags) in [(COMMAND, command.len() as u64, 1), (COMMAND + 2 * PAGE, PAGE, 2)] {
            descriptors.extend(at.to_le_bytes());
            descriptors.extend((bytes | flags << 32 | 1 << 48).to_le_bytes());
        }
        let _ = pwrite(memory, &descriptors, 0);
        self.available = self.available.wrapping_add(1);
        let _ = pwrite(memory, &self.available.to_le_bytes(), AVAILABLE + 2);
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    fn act(&mut self, operation: u8, input: &mut Input<'_>) {
        let queue = u64::from(operation % 8 / 6);
        match operation {
            0..=39 => self.table(input),
            40..=59 => self.start(queue),
            60..=79 => {
                let length = usize::from(input.byte());
                self.command(input.bytes(length), operation.into());
            }
            80..=89 => {
                let features = match input.byte() {
                    bits @ 0..=199 => 1 << 30 | 1 << 32 | u64::from(bits % 32) | u64::from(bits / 32) << 28,
                    bits => 1 << (bits % 64),
                };
                self.words(SET_FEATURES, &[features], &[]);
            }
            90..=94 => self.words(SET_PROTOCOL_FEATURES, &[u64::from(input.byte()) << 3], &[]),
            95..=109 => {
                let [table, used, available] = [size(input), size(input), size(input)];
                let at = |address: u64| BASE.wrapping_add(address);
                self.words(SET_VRING_ADDR, &[queue, at(table), at(used), at(available), 0], &[]);
            }
            110..=119 => self.words(GET_VRING_BASE, &[queue], &[]),
            120..=134 => {
                let request = [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR][usize::from(operation % 3)];
                let chosen = input.byte();
                let none = if chosen >= 240 { 1 << 8 } else { 0 };
                let files = if chosen >= 240 { vec![] } else { vec![usize::from(chosen)] };
                self.words(request, &[queue | none], &files);
            }
            135..=144 => {
                let value = u64::from(input.short());
                let request = [SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ENABLE][usize::from(operation % 3)];
                self.words(request, &[queue | value << 32], &[]);
            }
            145..=154 => {
                let [offset, size] = [input.byte(), input.byte()].map(|byte| u32::from(byte).to_le_bytes());
                let bytes = vec![0; usize::from(u32::from_le_bytes(size) as u8)];
                let body = [&offset[..], &size, &[0; 4], &bytes].concat();
                self.send(GET_CONFIG, &body, &[]);
            }
            // The front-end cuts a file, or seals it later than it should.
            155..=174 => {
                let chosen = &self.files[usize::from(input.byte() % 4)];
                let _ = ftruncate(chosen, size(input) % (2 * PAGES * PAGE));
            }
            175..=179 => {
                let chosen = &self.files[usize::from(input.byte() % 4)];
                let _ = fcntl_add_seals(chosen, SealFlags::SHRINK);
            }
            // The ring's own words, as its driver leaves them.
            180..=199 => {
                let chosen = &self.files[usize::from(operation % 3)];
                let place = [0, AVAILABLE, USED, COMMAND][usize::from(input.byte() % 4)];
                let (inside, length) = (input.byte(), input.byte() % 64);
                let words = input.bytes(length.into());
                // A longer file is another case.
                let _ = pwrite(chosen, words, place + u64::from(inside));
                let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
            }
            _ => {
                let request = u32::from(input.byte() % 48);
                let (length, count) = (input.byte(), input.byte());
                let body = input.bytes(usize::from(length)).to_vec();
                let files: Vec<usize> = (0..usize::from(count % 4)).map(|file| file + 3).collect();
                let files: Vec<OwnedFd> = files
                    .iter()
                    .map(|chosen| rustix::io::dup(&self.files[chosen % self.files.len()]).expect("dup"))
                    .collect();
                let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
                self.send(request, &body, &files);
            }
        }
    }
}

fn connection(mut input: Input<'_>) {
    let link = Arc::new(Link::new(true).expect("an eventfd"));
    let setting = input.byte();
    let policy = if setting % 2 == 0 { MemoryPolicy::Sealed } else { MemoryPolicy::Vmm };
    let mode = [DeviceMode::Full, DeviceMode::Legacy, DeviceMode::Flat][usize::from(setting / 2) % 3];
    let device = Device::new(policy, Arc::clone(&link)).expect("epoll");
    let endpoint = Arc::new(Endpoint::new(device, mode, 1));
    let (theirs, ours) = UnixStream::pair().expect("a pair");
    std::thread::scope(|scope| {
        let server = scope.spawn(|| frontend::serve(ours, &endpoint));
        let mut front_end = Frontend::new(theirs);
        // SET_OWNER, and the usual features.
        front_end.words(3, &[], &[]);
        front_end.words(SET_FEATURES, &[1 << 30 | 1 << 32 | u64::from(setting / 64)], &[]);
        for _ in 0..OPERATIONS {
            let Some(operation) = input.next() else { break };
            front_end.act(operation, &mut input);
        }
        let _ = front_end.stream.shutdown(Shutdown::Both);
        let ended = server.join().expect("a connection panicked");
        assert!(!matches!(ended, Err(FrontendError::Panic)), "a handler panicked");
    });
    link.round();
    assert_eq!(link.sessions(), 0, "a session is left");
}

// ---- the memory table ----

/// A table and the places of its pages, by the number of the guest's page: file and page of it.
struct Model {
    table: MemoryTable,
    pages: BTreeMap<u64, (usize, u64)>,
}

/// A resource's runs and pages.
type Resource = (Vec<PageRun>, Vec<u64>);

impl Model {
    fn new(files: &[Arc<File>], policy: MemoryPolicy, input: &mut Input<'_>) -> Option<Model> {
        let mut parts = Vec::new();
        let mut pages = BTreeMap::new();
        let mut free = 0;
        for _ in 0..input.byte() % 6 {
            let (place, chosen, count, offset) = (input.byte(), input.byte(), input.byte(), input.byte());
            let chosen = usize::from(chosen) % files.len();
            let (count, offset) = (u64::from(count) % PAGES + 1, u64::from(offset) % PAGES);
            let first = free + u64::from(place % 4);
            free = first + count;
            let odd = if place > 250 { 512 } else { 0 };
            let from = FileOffset::from_arc(Arc::clone(&files[chosen]), offset * PAGE + odd);
            parts.push((GuestAddress(first * PAGE), (count * PAGE) as usize, Some(from)));
            pages.extend((0..count).map(|page| (first + page, (chosen, offset + page))));
        }
        let count = parts.len();
        // Parts beyond the end of their file cannot be mapped in the first place.
        let memory = GuestMemoryMmap::from_ranges_with_files(parts).ok()?;
        let table = MemoryTable::new(&memory, policy).ok()?;
        for (file, page) in pages.values() {
            let acceptable = policy == MemoryPolicy::Any || *file < 2;
            assert!(acceptable, "a file is accepted that can shrink");
            assert!(*page < PAGES, "a page behind the end of its file");
        }
        assert!(policy != MemoryPolicy::Sealed || count <= 4, "too many regions");
        Some(Model { table, pages })
    }

    /// A resource of these entries: accepted if each page is in the table, and no resource has it.
    fn claim(&mut self, taken: &mut BTreeSet<u64>, input: &mut Input<'_>) -> Option<Resource> {
        let mut entries = Vec::new();
        let mut wanted = Vec::new();
        let mut possible = true;
        for _ in 0..input.byte() % 12 {
            let (page, count) = (u64::from(input.byte()), input.byte());
            let odd = u64::from(count > 250) * 8;
            let bytes = if count > 248 { 0 } else { u32::from(count % 32 + 1) * PAGE as u32 };
            entries.push((page * PAGE + odd, bytes));
            possible &= odd == 0 && bytes != 0;
            wanted.extend((0..u64::from(bytes) / PAGE).map(|next| page + next));
        }
        let distinct: BTreeSet<u64> = wanted.iter().copied().collect();
        possible &= distinct.len() == wanted.len();
        possible &= wanted.iter().all(|page| self.pages.contains_key(page) && !taken.contains(page));
        let before = (self.table.pages(), self.table.runs());
        match self.table.claim(entries.into_iter()) {
            Ok(runs) => {
                assert!(possible, "pages are claimed that are not free");
                let listed: Vec<u64> =
                    runs.iter().flat_map(|run| run.page()..run.page() + run.count()).collect();
                assert_eq!(listed, wanted, "other pages than those of the entries");
                taken.extend(distinct);
                Some((runs, wanted))
            }
            Err(error) => {
                assert!(!possible, "refused: {error}");
                assert_eq!((self.table.pages(), self.table.runs()), before, "a refused list keeps pages");
                None
            }
        }
    }

    /// The places of a resource are those of its pages, and inside the parts of the files that are guest memory.
    fn check(&self, (runs, pages): &Resource, files: &[Arc<File>]) {
        let expected: Vec<(usize, u64)> = pages.iter().map(|page| self.pages[page]).collect();
        let changes = expected.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
        let pieces = match self.table.pieces(runs) {
            Ok(pieces) => pieces,
            Err(error) => return assert!(changes >= PIECES, "{error}"),
        };
        let mut listed = Vec::new();
        for piece in &pieces {
            let same = |file: &Arc<File>| same(file, &piece.file);
            let file = files.iter().position(same).expect("a file of the front-end");
            for run in &piece.runs {
                let end = run.offset + run.bytes;
                let inside = |extent: &sluice_shared_memory::Run| {
                    extent.offset <= run.offset && end <= extent.offset + extent.bytes
                };
                assert!(piece.extents.iter().any(inside), "a place outside guest memory");
                listed.extend((run.offset / PAGE..end / PAGE).map(|page| (file, page)));
            }
            let apart = |pair: &[sluice_shared_memory::Run]| pair[0].offset + pair[0].bytes < pair[1].offset;
            assert!(piece.extents.windows(2).all(apart), "parts that touch or overlap");
        }
        assert_eq!(listed, expected, "other places than those of the pages");
    }
}

fn same(one: &File, other: &File) -> bool {
    let of =
        |file: &File| rustix::fs::fstat(file).map(|status| (status.st_dev, status.st_ino)).expect("a file");
    of(one) == of(other)
}

fn memory_table(mut input: Input<'_>) {
    let policy = [MemoryPolicy::Sealed, MemoryPolicy::Vmm, MemoryPolicy::Any][usize::from(input.byte()) % 3];
    let kinds = [SealFlags::SHRINK, SealFlags::SHRINK | SealFlags::SEAL, SealFlags::empty()];
    let files = kinds.map(|seals| Arc::new(File::from(file(PAGES, seals))));
    let Some(mut model) = Model::new(&files, policy, &mut input) else { return };
    let (mut taken, mut resources) = (BTreeSet::new(), Vec::<Resource>::new());
    for _ in 0..OPERATIONS {
        let Some(operation) = input.next() else { break };
        match operation {
            0..=159 => resources.extend(model.claim(&mut taken, &mut input)),
            160..=219 if !resources.is_empty() => {
                let (runs, pages) = resources.swap_remove(usize::from(input.byte()) % resources.len());
                model.table.release(&runs);
                pages.iter().for_each(|page| assert!(taken.remove(page)));
            }
            _ => {
                // The front-end replaces its memory: resources in the same bytes of the same files remain.
                let Some(mut next) = Model::new(&files, policy, &mut input) else { continue };
                resources.retain(|(runs, pages)| {
                    let place = |model: &Model, page: &u64| model.pages.get(page).copied();
                    let stays = pages.iter().all(|page| {
                        place(&next, page).is_some() && place(&next, page) == place(&model, page)
                    });
                    let adopted = next.table.adopt(&model.table, runs);
                    assert_eq!(adopted, stays, "a resource in other memory is kept, or one in the same lost");
                    adopted
                });
                model = next;
                taken = resources.iter().flat_map(|(_, pages)| pages.iter().copied()).collect();
            }
        }
        resources.iter().for_each(|resource| model.check(resource, &files));
        assert_eq!(model.table.pages(), taken.len() as u64, "the sum of pages is wrong");
        let runs: usize = resources.iter().map(|(runs, _)| runs.len()).sum();
        assert_eq!(model.table.runs(), runs, "the sum of runs is wrong");
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    match input.next() {
        Some(first) if first % 2 == 0 => connection(input),
        Some(_) => memory_table(input),
        None => {}
    }
});
