//! virtio-gpu commands through the device: any descriptor chain on a mock queue, any payload, in any order, with workers
//! that come, send any message, and go. The device neither panics nor grows beyond its limits, and answers what it took.
//!
//! The input is a program: an operation byte, then its operands.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::OwnedFd,
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
};
use sluice_device::{
    chain::Buffer,
    device::Device,
    link::{Arrival, Link},
    memory::{MemoryPolicy, MemorySnapshot},
};
use sluice_fuzz::input::Input;
use sluice_messages::control;
use sluice_protocol::{limits, session};
use sluice_shared_memory::socket;
use std::{
    collections::HashSet,
    fs::File,
    sync::{Arc, LazyLock},
    time::Duration,
};
use virtio_queue::{
    Queue, QueueOwnedT,
    desc::{RawDescriptor, split::Descriptor},
    mock::MockSplitQueue,
};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryMmap};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Addresses of commands, an indirect table, answers, and pages for resources: above those that the mock queue uses itself.
const COMMAND: u64 = 0x10_0000;
const TABLE: u64 = 0x7_0000;
const ANSWER: u64 = 0x8_0000;
const PAGES: u64 = 0x20_0000;
/// Two regions with a hole between them, as on a PC.
const LOW_BYTES: u64 = 0x80_0000;
const HIGH: u64 = 1 << 32;
const HIGH_BYTES: u64 = 0x40_0000;

/// The nonce in the first pages of the control resource and an arena, for drivers without contexts.
const NONCE: [u8; 16] = *b"sixteen of bytes";
/// Address of that arena.
const ARENA: u64 = PAGES + 0x20_0000;

/// Guest memory, the same for all inputs: the device reads only a page's magic word and its nonce from it.
static MEMORY: LazyLock<MemorySnapshot> = LazyLock::new(|| {
    let file = memfd_create(c"ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
    ftruncate(&file, LOW_BYTES + HIGH_BYTES).expect("truncate");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("seal");
    let file = Arc::new(File::from(file));
    let part = |at, bytes: u64, offset| {
        (GuestAddress(at), bytes as usize, Some(FileOffset::from_arc(Arc::clone(&file), offset)))
    };
    let parts = [part(0, LOW_BYTES, 0), part(HIGH, HIGH_BYTES, LOW_BYTES)];
    MemorySnapshot::new(GuestMemoryMmap::from_ranges_with_files(parts).expect("maps"))
});

/// A worker from the device's view. Its pidfd is an eventfd: readable when the worker is gone, and a kill has no effect.
struct Worker {
    socket: OwnedFd,
    exit: OwnedFd,
    eventfds: Vec<OwnedFd>,
}

struct Guest {
    device: Device,
    buffer: Buffer,
    workers: Vec<Worker>,
    heads: u16,
    /// Heads of unanswered chains.
    open: HashSet<u16>,
}

/// Puts the nonces in the places from which the device takes them.
fn mark() {
    for page in [PAGES, ARENA] {
        let at = GuestAddress(page + session::NONCE_AT as u64);
        MEMORY.memory().write_slice(&NONCE, at).expect("inside");
    }
}

fn signal(eventfd: &OwnedFd) {
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

impl Guest {
    fn new() -> Guest {
        let link = Arc::new(Link::new(true).expect("eventfd"));
        let mut device = Device::new(MemoryPolicy::Sealed, link).expect("epoll");
        device.set_memory(MEMORY.clone()).expect("sealed memory");
        MEMORY.memory().write_obj(session::MAGIC, GuestAddress(PAGES)).expect("inside");
        mark();
        Guest { device, buffer: Buffer::default(), workers: Vec::new(), heads: 0, open: HashSet::new() }
    }

    /// Makes the device handle the chain that begins at descriptor 0 of these; indirect ones are at [`TABLE`].
    fn chain(&mut self, descriptors: &[Descriptor]) {
        let memory = MEMORY.memory();
        let mock = MockSplitQueue::new(&*memory, 256);
        // Each chain has its own head, as for a guest that has many in flight.
        let head = self.heads % 200;
        for (index, descriptor) in (0u16..).zip(descriptors.iter().take(56)) {
            mock.desc_table().store(head + index, RawDescriptor::from(*descriptor)).expect("inside");
        }
        mock.avail().ring().ref_at(0).expect("inside").store(head);
        mock.avail().idx().store(1);
        let mut queue: Queue = mock.create_queue().expect("a queue");
        let Some(chain) = queue.iter(&*memory).ok().and_then(|mut chains| chains.next()) else { return };
        let (copied, place) = self.buffer.copy(&memory, chain);
        assert!(self.buffer.command().len() <= limits::GPU_COMMAND_BYTES, "a longer command than any");
        assert_eq!(place.head(), head);
        if self.open.insert(head) {
            self.device.command(copied, self.buffer.command(), place);
        }
        self.heads = self.heads.wrapping_add(1);
        self.answers();
    }

    fn answers(&mut self) {
        let memory = MEMORY.memory();
        for answer in self.device.take_answers() {
            assert!(self.open.remove(&answer.place.head()), "answered twice");
            let written = answer.place.write(&memory, answer.bytes());
            assert!(written as usize <= answer.bytes().len());
        }
    }

    /// A chain in Linux's form.
    fn plain(&mut self, command: &[u8], cut: Option<usize>) {
        MEMORY.memory().write_slice(command, GuestAddress(COMMAND)).expect("inside");
        let (head, length) = (self.heads % 200, command.len() as u32);
        let answer = |index| Descriptor::new(ANSWER, 4096, WRITE, index);
        match cut.filter(|cut| *cut < command.len()) {
            None => self.chain(&[Descriptor::new(COMMAND, length, NEXT, head + 1), answer(0)]),
            Some(cut) => self.chain(&[
                Descriptor::new(COMMAND, cut as u32, NEXT, head + 1),
                Descriptor::new(COMMAND + cut as u64, length - cut as u32, NEXT, head + 2),
                answer(0),
            ]),
        }
    }

    /// Raw descriptors, in the table or in an indirect one.
    fn raw(&mut self, bytes: &[u8], indirect: bool) {
        let head = self.heads % 200;
        let descriptors: Vec<Descriptor> = bytes
            .chunks_exact(16)
            .map(|raw| {
                let word = |at: usize| u64::from_le_bytes(raw[at..at + 8].try_into().expect("eight bytes"));
                let rest = word(8);
                // Relative to the head; otherwise no descriptors would ever be linked.
                let next = (rest >> 48) as u16;
                let next = if indirect { next } else { next.wrapping_add(head) };
                Descriptor::new(word(0), rest as u32, (rest >> 32) as u16, next)
            })
            .collect();
        if indirect {
            MEMORY.memory().write_slice(bytes, GuestAddress(TABLE)).expect("inside");
            self.chain(&[Descriptor::new(TABLE, bytes.len() as u32, INDIRECT, 0)]);
        } else {
            self.chain(&descriptors);
        }
    }

    /// `sluiced` answers about a session.
    fn arrive(&mut self, session: u32, worker: bool) {
        if !worker || self.workers.len() >= 16 {
            return self.device.arrive(Arrival::None { session, error: 46 });
        }
        let (socket, theirs) = socket::pair().expect("socket pair");
        rustix::io::ioctl_fionbio(&socket, true).expect("non-blocking");
        let exit = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd");
        let pidfd = rustix::io::dup(&exit).expect("dup");
        self.workers.push(Worker { socket, exit, eventfds: Vec::new() });
        self.device.arrive(Arrival::Worker { session, socket: theirs, process: pidfd.into() });
    }

    /// A worker reads its messages and then sends one.
    fn say(&mut self, worker: usize, message: &[u8]) {
        let count = self.workers.len();
        if count == 0 {
            return;
        }
        let worker = &mut self.workers[worker % count];
        let mut buffer = [0; control::BYTES];
        while let Ok(Some((_, descriptors))) = socket::receive(&worker.socket, &mut buffer) {
            worker.eventfds.extend(descriptors);
            worker.eventfds.truncate(2);
        }
        if !message.is_empty() {
            let _ = socket::send(&worker.socket, message, &[]);
        }
    }

    /// Handles all events that have happened meanwhile.
    fn events(&mut self) {
        let mut events = Vec::new();
        let _ = self.device.poller.wait(Duration::ZERO, &mut events);
        for event in events {
            self.device.event(event);
        }
        self.answers();
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let mut guest = Guest::new();
    while let Some(operation) = input.next() {
        match operation {
            0..=127 => {
                let length = input.short();
                guest.plain(input.bytes(length.into()), None);
            }
            128..=159 => {
                let (cut, length) = (input.next().unwrap_or(0), input.short());
                guest.plain(input.bytes(length.into()), Some(cut.into()));
            }
            160..=191 => {
                let count = usize::from(input.next().unwrap_or(0) % 32);
                guest.raw(input.bytes(16 * count), operation % 2 == 1);
            }
            192..=207 => {
                let session = input.next().unwrap_or(0) % 8;
                guest.arrive(session.into(), operation % 4 != 0);
            }
            208..=223 => {
                let worker = input.next().unwrap_or(0);
                let length =
                    if operation % 4 == 0 { input.next().unwrap_or(0).into() } else { control::BYTES };
                guest.say(worker.into(), input.bytes(length));
            }
            224..=231 => {
                let worker = usize::from(input.next().unwrap_or(0));
                if let Some(worker) = guest.workers.get(worker % guest.workers.len().max(1)) {
                    worker.eventfds.iter().for_each(signal);
                }
            }
            232..=235 => {
                let worker = usize::from(input.next().unwrap_or(0));
                if let Some(worker) = guest.workers.get(worker % guest.workers.len().max(1)) {
                    signal(&worker.exit);
                }
            }
            236 => {
                guest.device.restart();
                guest.answers();
            }
            237 => {
                let _ = guest.device.set_memory(MEMORY.clone());
                guest.answers();
            }
            // A driver without contexts, and one with.
            238 => guest.device.set_driver_features(0),
            239 => guest.device.set_driver_features(1),
            240 => mark(),
            // Sessions opened from here on have one arena of two pages.
            241 => guest.device.fix_arenas(8192),
            _ => guest.events(),
        }
        assert!(guest.device.resource_count() <= limits::RESOURCES);
        assert!(guest.device.sessions() <= limits::SESSIONS);
        assert!(guest.device.withheld() <= guest.open.len(), "withholds more answers than open requests");
    }
});
