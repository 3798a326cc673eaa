//! Time limits that pass while this process is stopped: the answers that came meanwhile count.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use super::*;
use crate::{chain::Copied, link::Arrival};
use rustix::{
    fd::OwnedFd,
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
};
use sluice_messages::{
    channel::{Channel, Received},
    control::{FromWorker, ToWorker},
};
use sluice_protocol::{
    doorbell::Doorbell,
    gpu::{HEADER_BYTES, command},
};
use sluice_shared_memory::socket;
use std::{fs::File, time::Duration};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const CONTEXT: u32 = 1;
const CONTROL: u32 = 10;
const ARENA: u32 = 11;
const PAGES: u64 = 0x20_0000;

/// A guest with a session, and its worker, whose process is gone when `lives` is closed.
struct Guest {
    device: Device,
    worker: Channel<ToWorker, FromWorker>,
    lives: OwnedFd,
}

fn words(kind: u32, context: u32, words: &[u32]) -> Vec<u8> {
    let header = [kind, 0, 0, 0, context, 0];
    header.iter().chain(words).flat_map(|word| word.to_le_bytes()).collect()
}

fn submit(doorbell: Doorbell) -> Vec<u8> {
    let mut bytes = words(command::SUBMIT_3D, CONTEXT, &[32, 0]);
    bytes.extend(doorbell.encode());
    bytes
}

/// A worker's end of its socket, and the pipe in place of its process: its read end is readable when the write end is closed.
fn worker(session: u32) -> (Arrival, Channel<ToWorker, FromWorker>, OwnedFd) {
    let (ours, theirs) = socket::pair().unwrap();
    rustix::io::ioctl_fionbio(&ours, true).unwrap();
    let (gone, lives) = rustix::pipe::pipe().unwrap();
    (Arrival::Worker { session, socket: theirs, process: gone.into() }, Channel::new(ours), lives)
}

impl Guest {
    /// A guest whose session has no worker yet.
    fn opened() -> Device {
        let file: File =
            memfd_create(c"ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap().into();
        ftruncate(&file, 0x80_0000).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let part = (GuestAddress(0), 0x80_0000, Some(FileOffset::new(file, 0)));
        let memory = MemorySnapshot::new(GuestMemoryMmap::from_ranges_with_files([part]).unwrap());
        memory.write_obj(session::MAGIC, GuestAddress(PAGES)).unwrap();
        let mut device = Device::new(MemoryPolicy::Sealed, Arc::new(Link::new(true).unwrap())).unwrap();
        device.set_memory(memory).unwrap();
        run(&mut device, &words(command::CTX_CREATE, CONTEXT, &[0, 0]), true);
        let control = u32::try_from(session::BYTES).unwrap();
        share(&mut device, CONTROL, u32::try_from(PAGES).unwrap(), control);
        run(&mut device, &submit(Doorbell::Open { resource: CONTROL }), true);
        device
    }

    /// A guest with a worker that has mapped an arena.
    fn new() -> Guest {
        let mut device = Guest::opened();
        let number = *device.sessions.keys().next().unwrap();
        let (arrival, worker, lives) = worker(number);
        device.arrive(arrival);
        let mut guest = Guest { device, worker, lives };
        share(&mut guest.device, ARENA, 0x60_0000, 0x1000);
        let attach = Doorbell::Attach { resource: ARENA, slot: 1, address: limits::WINDOW_BOUNDS.start };
        run(&mut guest.device, &submit(attach), true);
        guest.say(FromWorker::Attached { slot: 0, error: 0 });
        guest.say(FromWorker::Attached { slot: 1, error: 0 });
        guest.events();
        guest
    }

    fn say(&self, message: FromWorker) {
        self.worker.send(&message, &[]).unwrap();
    }

    /// Handles all events that are ready.
    fn events(&mut self) {
        let mut events = Vec::new();
        self.device.poller.wait(Duration::ZERO, &mut events).unwrap();
        events.into_iter().for_each(|event| self.device.event(event));
    }

    /// Destroys the arena, which the worker has to unmap before the answer.
    fn destroy_arena(&mut self) {
        run(&mut self.device, &words(command::RESOURCE_UNREF, 0, &[ARENA, 0]), false);
        assert_eq!(self.device.resources.withheld(), 1);
        while let Received::Message(message, _) = self.worker.receive().unwrap() {
            if message == (ToWorker::Detach { slot: 1 }) {
                return;
            }
        }
        panic!("the worker is not asked");
    }

    fn session(&mut self) -> &mut SessionState {
        self.device.sessions.values_mut().next().unwrap()
    }
}

/// Runs a command, whose answer comes at once or is withheld.
fn run(device: &mut Device, bytes: &[u8], at_once: bool) {
    device.command(Copied::Whole, bytes, AnswerPlace::nowhere(0));
    let answers = device.take_answers();
    assert_eq!(answers.len(), usize::from(at_once));
    for answer in answers {
        let kind = answer.bytes().first_chunk().copied().map(u32::from_le_bytes);
        assert_eq!((kind, answer.bytes().len()), (Some(answer::OK_NODATA), HEADER_BYTES));
    }
}

/// Creates a resource that belongs to the context.
fn share(device: &mut Device, resource: u32, at: u32, bytes: u32) {
    let blob = words(command::RESOURCE_CREATE_BLOB, 0, &[resource, 1, 1, 1, 0, 0, 0, 0, at, 0, bytes, 0]);
    run(device, &blob, true);
    run(device, &words(command::CTX_ATTACH_RESOURCE, CONTEXT, &[resource, 0]), true);
}

// Promise: P65
#[test]
fn worker_that_unmapped_in_time_lives_although_the_limit_is_seen_first() {
    let mut guest = Guest::new();
    guest.destroy_arena();
    // Behind as many messages as a worker can have sent for its other arenas.
    (1..limits::ATTACHMENTS).for_each(|_| guest.say(FromWorker::Attached { slot: 0, error: 0 }));
    guest.say(FromWorker::Detached { slot: 1 });
    guest.session().unmap_deadline = Some(Instant::now());
    guest.device.event(PollEvent::Timer);
    assert_eq!(guest.device.take_answers().len(), 1);
    assert!(guest.device.serves(CONTEXT));

    // One that is silent is killed.
    let mut guest = Guest::new();
    guest.destroy_arena();
    guest.session().unmap_deadline = Some(Instant::now());
    guest.device.event(PollEvent::Timer);
    assert!(!guest.device.serves(CONTEXT));
    assert_eq!(guest.device.withheld(), 1, "its process is not gone");
}

// Promise: P65
#[test]
fn worker_that_arrived_in_time_is_adopted_although_the_limit_is_seen_first() {
    for arrives in [true, false] {
        let mut device = Guest::opened();
        let (number, session) = device.sessions.iter_mut().next().unwrap();
        session.phase = SessionPhase::Waiting(Instant::now());
        let (arrival, _worker, _lives) = worker(*number);
        if arrives {
            device.inbox.put(arrival).unwrap();
        }
        device.event(PollEvent::Timer);
        assert_eq!(device.serves(CONTEXT), arrives);
    }
}

// Promise: P65
#[test]
fn answers_that_are_ready_count_although_the_time_for_a_stop_is_over() {
    // Unmapped in time.
    let mut guest = Guest::new();
    guest.destroy_arena();
    guest.say(FromWorker::Detached { slot: 1 });
    guest.device.stop(Duration::ZERO);
    assert_eq!((guest.device.take_answers().len(), guest.device.counters.leaked), (1, 0));
    assert!(guest.device.serves(CONTEXT));

    // Gone.
    let mut guest = Guest::new();
    guest.destroy_arena();
    drop(guest.lives);
    guest.device.stop(Duration::ZERO);
    assert_eq!((guest.device.take_answers().len(), guest.device.counters.leaked), (1, 0));

    // Neither.
    let mut guest = Guest::new();
    guest.destroy_arena();
    guest.device.stop(Duration::ZERO);
    assert_eq!((guest.device.take_answers().len(), guest.device.counters.leaked), (0, 1));
}
