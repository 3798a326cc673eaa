//! Sessions of a driver without contexts: identified by a nonce, rung by transfers, asleep on tokens. First the device by itself,
//! with a hostile guest kernel; then the real process, with a played front-end, `sluiced` and workers.

use crate::common::{Device as Process, in_time};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use sluice_device::{
    chain::{AnswerPlace, Copied},
    device::Device,
    link::Link,
    memory::{MemoryPolicy, MemorySnapshot},
};
use sluice_kit::front_end::{FREE, FrontEnd, backing, command, create_2d, submit, transfer};
use sluice_kit::wait::{TIMEOUT, eventually, readable};
use sluice_messages::control::{FromDevice, FromWorker, ToWorker};
use sluice_protocol::{
    doorbell::Doorbell,
    gpu::{Purpose, answer::*, command::*},
    limits,
    session::{self, Attachment, Nonce},
    shared::Shared,
};
use std::{
    fs::File,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryMmap};

const BASE: u64 = limits::WINDOW_BOUNDS.start;
const MEMORY: u64 = 64 << 20;
/// Features acknowledged by a driver without 3D, and by one with 3D.
const FLAT: u64 = 1 << 32;
const WITH_3D: u64 = 1 << 32 | 1;

type Bytes16 = [u8; Nonce::BYTES];
const ALICE: Bytes16 = *b"alice's, 16 byte";
const BOB: Bytes16 = *b"bob's own marker";

fn key(nonce: Bytes16) -> u64 {
    Nonce::new(nonce).unwrap().key()
}

/// A guest kernel's side, without a queue.
struct Guest {
    memory: MemorySnapshot,
    device: Device,
    next: u16,
    fence: u64,
    /// Heads that were answered late.
    late: Vec<u16>,
}

impl Guest {
    fn new() -> Guest {
        let file = memfd_create(c"ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, MEMORY).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let part = (GuestAddress(0), MEMORY as usize, Some(FileOffset::new(File::from(file), 0)));
        let memory = MemorySnapshot::new(GuestMemoryMmap::from_ranges_with_files([part]).unwrap());
        let mut device = Device::new(MemoryPolicy::Sealed, Arc::new(Link::new(true).unwrap())).unwrap();
        device.set_memory(memory.clone()).unwrap();
        device.set_driver_features(FLAT);
        Guest { memory, device, next: 0, fence: 0, late: Vec::new() }
    }

    /// Sends a command; returns its head, and the type word of its answer unless that is withheld.
    fn head(&mut self, command: &[u8]) -> (u16, Option<u32>) {
        let head = self.next;
        self.next = self.next.wrapping_add(1);
        self.device.command(Copied::Whole, command, AnswerPlace::nowhere(head));
        (head, self.collect(Some(head)))
    }

    /// Takes answers; returns that of `head`, and keeps the others as late ones.
    fn collect(&mut self, head: Option<u16>) -> Option<u32> {
        let mut own = None;
        for answer in self.device.take_answers() {
            let kind = u32::from_le_bytes(answer.bytes()[..4].try_into().unwrap());
            if Some(answer.place.head()) == head {
                assert_eq!(own.replace(kind), None, "answered twice");
            } else {
                assert!(!self.late.contains(&answer.place.head()), "answered twice");
                self.late.push(answer.place.head());
            }
        }
        own
    }

    fn send(&mut self, command: &[u8]) -> u32 {
        self.head(command).1.expect("an answer")
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn nonce_at(&self, at: u64) -> Bytes16 {
        let mut bytes = [0; Nonce::BYTES];
        self.memory.memory().read_slice(&mut bytes, GuestAddress(at + session::NONCE_AT as u64)).unwrap();
        bytes
    }

    fn memory(&mut self, id: u32, at: u64, bytes: u32, nonce: Bytes16) {
        assert_eq!(self.send(&create_2d(id, Purpose::Memory, 0)), OK_NODATA);
        assert_eq!(self.send(&backing(id, &[(at, bytes)])), OK_NODATA);
        self.write(at + session::NONCE_AT as u64, &nonce);
    }

    /// A control resource that could open a session.
    fn control(&mut self, id: u32, at: u64, nonce: Bytes16) {
        self.memory(id, at, session::BYTES as u32, nonce);
        self.write(at, &session::MAGIC.to_le_bytes());
    }

    fn open(&mut self, id: u32) -> u32 {
        self.send(&transfer(id, Doorbell::Open { resource: id }))
    }

    fn attach(&mut self, control: u32, resource: u32, slot: u32) -> u32 {
        let address = BASE + (u64::from(slot) << 24);
        self.send(&transfer(control, Doorbell::Attach { resource, slot, address }))
    }

    fn token(&mut self, id: u32, key: u64) -> (u16, bool) {
        self.fence += 1;
        let (head, answered) = self.head(&create_2d(id, Purpose::Token { key }, self.fence));
        assert!(answered.is_none_or(|kind| kind == OK_NODATA));
        (head, answered.is_some())
    }

    fn state(&self, at: u64) -> u32 {
        self.memory.memory().read_obj(GuestAddress(at + session::STATE as u64)).unwrap()
    }

    fn entry(&self, at: u64, slot: u32) -> u32 {
        let entry = session::attachment_at(slot) as u64;
        self.memory.memory().read_obj(GuestAddress(at + entry)).unwrap()
    }

    fn unref(&mut self, id: u32) -> u32 {
        self.send(&command(RESOURCE_UNREF, 0, &[id, 0]))
    }

    /// Two sessions: Alice's on resource 1, Bob's on resource 2.
    fn two() -> Guest {
        let mut guest = Guest::new();
        guest.control(1, A, ALICE);
        guest.control(2, B, BOB);
        assert_eq!((guest.open(1), guest.open(2)), (OK_NODATA, OK_NODATA));
        assert_eq!(guest.device.sessions(), 2);
        guest
    }
}

/// Addresses of the two control resources, and memory beside them.
const A: u64 = 0x10_0000;
const B: u64 = 0x40_0000;
const FREE_PAGES: u64 = 0x80_0000;

// Promise: V16
#[test]
fn session_opens_only_with_an_unused_nonce() {
    let mut guest = Guest::new();
    // Not without a nonce, and its guest is told.
    guest.control(1, A, [0; 16]);
    assert_eq!(guest.open(1), ERR_INVALID_PARAMETER);
    assert_eq!(guest.state(A), session::LOST);
    assert_eq!(guest.unref(1), OK_NODATA);
    // With a nonce, once; and it does not stay where the worker can read it.
    guest.write(A + session::STATE as u64, &[0; 4]);
    guest.control(1, A, ALICE);
    assert_eq!(
        guest.send(&transfer(1, Doorbell::Open { resource: 2 })),
        ERR_INVALID_RESOURCE_ID,
        "another's id"
    );
    assert_eq!(guest.open(1), OK_NODATA);
    assert_eq!(guest.nonce_at(A), [0; 16]);
    assert_eq!(guest.open(1), ERR_INVALID_PARAMETER);
    // Not with the nonce of an existing session.
    guest.control(2, B, ALICE);
    assert_eq!(guest.open(2), ERR_INVALID_PARAMETER);
    assert_eq!((guest.state(B), guest.state(A)), (session::LOST, session::NEW));
    assert_eq!(guest.device.sessions(), 1);
    // Neither without the magic word, nor with too few bytes, nor with a picture.
    guest.memory(3, FREE_PAGES, session::BYTES as u32, BOB);
    assert_eq!(guest.open(3), ERR_INVALID_PARAMETER);
    assert_eq!(guest.unref(3), OK_NODATA);
    guest.memory(3, FREE_PAGES, 0x3000, BOB);
    guest.write(FREE_PAGES, &session::MAGIC.to_le_bytes());
    assert_eq!(guest.open(3), ERR_INVALID_PARAMETER);
    assert_eq!(guest.send(&create_2d(4, Purpose::Picture, 0)), OK_NODATA);
    assert_eq!(guest.open(4), OK_NODATA, "a picture may be transferred, which means nothing");
    assert_eq!(guest.device.sessions(), 1);
}

// Promise: V16
#[test]
fn resource_attaches_only_to_the_session_of_its_nonce() {
    let mut guest = Guest::two();
    let arena = |index: u64| FREE_PAGES + 0x1_0000 * index;
    guest.memory(10, arena(0), 0x4000, ALICE);
    guest.memory(11, arena(1), 0x4000, [0; 16]);
    // Bob, who has rung with his own control resource, names Alice's, and one without a nonce.
    for (slot, resource) in [(1, 10), (2, 11), (3, 1), (4, 99)] {
        assert_eq!(guest.attach(2, resource, slot), ERR_INVALID_RESOURCE_ID);
        assert_eq!(guest.entry(B, slot), 2, "and is told");
    }
    assert_eq!(guest.nonce_at(arena(0)), ALICE);
    assert_eq!(guest.attach(1, 10, 1), OK_NODATA);
    assert_eq!(guest.nonce_at(arena(0)), [0; 16], "it has served");
    // Once it is hers, it stays hers: its pages may carry any bytes from now on.
    guest.write(arena(0) + session::NONCE_AT as u64, &BOB);
    assert_eq!(guest.attach(2, 10, 5), ERR_INVALID_RESOURCE_ID);
    assert_eq!(guest.send(&transfer(1, Doorbell::Detach { slot: 1 })), OK_NODATA);
    assert_eq!(guest.entry(A, 1), 3, "detached");
    assert_eq!(guest.attach(2, 10, 6), ERR_INVALID_RESOURCE_ID);
    assert_eq!(guest.attach(1, 10, 1), OK_NODATA);
    assert_eq!(guest.open(10), ERR_INVALID_RESOURCE_ID, "nor does it open a session");
    // A picture is not a session's memory, whatever it carries.
    assert_eq!(guest.send(&create_2d(12, Purpose::Picture, 0)), OK_NODATA);
    assert_eq!(guest.send(&backing(12, &[(arena(2), 0x4000)])), OK_NODATA);
    guest.write(arena(2) + session::NONCE_AT as u64, &ALICE);
    assert_eq!(guest.attach(1, 12, 2), ERR_INVALID_RESOURCE_ID);
    // A reused id is another resource.
    guest.memory(13, arena(3), 0x4000, ALICE);
    assert_eq!(guest.attach(1, 13, 3), OK_NODATA);
    assert_eq!(guest.send(&transfer(1, Doorbell::Detach { slot: 3 })), OK_NODATA);
    assert_eq!(guest.unref(13), OK_NODATA);
    guest.memory(13, arena(3), 0x4000, BOB);
    assert_eq!(guest.attach(1, 13, 3), ERR_INVALID_RESOURCE_ID);
    assert_eq!(guest.attach(2, 13, 7), OK_NODATA);
}

// Promise: V12, V16
#[test]
fn token_waits_are_bounded_per_session_and_expire() {
    let mut guest = Guest::two();
    let (first, answered) = guest.token(100, key(ALICE));
    assert!(!answered);
    // A session with too many loses its own oldest; other sessions lose none.
    let (bobs, _) = guest.token(101, key(BOB));
    for id in 0..limits::WAITERS_PER_SESSION as u32 {
        assert!(!guest.token(110 + id, key(ALICE)).1);
    }
    // The answer to a fenced command ends all earlier waits of the guest, so the first was the only one to be answered.
    assert_eq!(guest.late, [first]);
    assert_eq!(guest.device.withheld(), limits::WAITERS_PER_SESSION + 1);
    // A token without a session is answered at once, and that is a later fence for all sessions.
    assert!(guest.token(120, 12345).1);
    assert_eq!(guest.device.withheld(), 0);
    assert!(guest.late.contains(&bobs));
    // All of them end by themselves.
    guest.late.clear();
    let started = Instant::now();
    let (head, _) = guest.token(121, key(BOB));
    while guest.late.is_empty() {
        let mut events = Vec::new();
        guest.device.poller.wait(Duration::from_millis(20), &mut events).unwrap();
        for event in events {
            guest.device.event(event);
        }
        guest.collect(None);
        assert!(started.elapsed() < TIMEOUT, "a token is not answered");
    }
    assert_eq!(guest.late, [head]);
    assert!(started.elapsed() >= Duration::from_millis(limits::WAITER_MILLISECONDS));
    assert_eq!(guest.device.counters.expired, 2);
}

// Promise: V12
#[test]
fn token_waits_take_at_most_half_of_the_queue() {
    let mut guest = Guest::new();
    guest.device.set_queue_size(16);
    for session in 0..8u8 {
        let (id, at) = (u32::from(session) + 1, 0x20_0000 * (u64::from(session) + 1));
        guest.control(id, at, [session + 1; 16]);
        assert_eq!(guest.open(id), OK_NODATA);
        for token in 0..4 {
            guest.token(100 + 4 * id + token, key([session + 1; 16]));
            assert!(guest.device.withheld() <= 8);
        }
    }
    assert_eq!(guest.device.withheld(), 8);
    assert_eq!(guest.late.len(), 24);
}

// Promise: V12
#[test]
fn token_wait_beside_a_full_resource_table_is_withheld() {
    let mut guest = Guest::two();
    for id in 1000..1000 + limits::RESOURCES as u32 - 2 {
        assert_eq!(guest.send(&create_2d(id, Purpose::Picture, 0)), OK_NODATA);
    }
    assert_eq!(guest.send(&create_2d(100, Purpose::Memory, 0)), ERR_OUT_OF_MEMORY);
    let (token, answered) = guest.token(101, key(ALICE));
    assert!(!answered, "an answer at once is no sleep");
    // Other commands of a kernel about a token have no effect.
    assert_eq!(guest.send(&backing(101, &[(FREE_PAGES, 4096)])), ERR_INVALID_RESOURCE_ID);
    assert_eq!(guest.unref(101), ERR_INVALID_RESOURCE_ID);
    assert_eq!(guest.device.withheld(), 1);
    assert_eq!(guest.unref(1), OK_NODATA);
    assert_eq!(guest.late, [token], "and it ends as any other");
}

// Promise: V16
#[test]
fn session_ends_when_its_control_resource_is_unreferenced() {
    // Before and after its arena, with a token, twice, and after a goodbye.
    for order in 0..4 {
        let mut guest = Guest::two();
        guest.memory(10, FREE_PAGES, 0x4000, ALICE);
        assert_eq!(guest.attach(1, 10, 1), OK_NODATA);
        let (token, _) = guest.token(100, key(ALICE));
        match order {
            0 => assert_eq!((guest.unref(10), guest.unref(1)), (OK_NODATA, OK_NODATA)),
            1 => assert_eq!((guest.unref(1), guest.unref(10)), (OK_NODATA, OK_NODATA)),
            2 => {
                assert_eq!(guest.unref(1), OK_NODATA);
                assert_eq!(guest.unref(1), ERR_INVALID_RESOURCE_ID);
            }
            _ => {
                assert_eq!(guest.send(&transfer(1, Doorbell::Close)), OK_NODATA);
                assert_eq!(guest.unref(1), OK_NODATA);
            }
        }
        assert_eq!(guest.late, [token], "the sleeping waiter was woken");
        assert!(guest.token(101, key(ALICE)).1, "no waiter is left");
        assert_eq!(guest.unref(100), OK_NODATA);
        // The id is free for another session, even with the same nonce.
        guest.control(1, A, ALICE);
        assert_eq!(guest.open(1), OK_NODATA);
        assert_eq!(guest.state(B), session::NEW, "Bob's goes on");
        assert!(!guest.token(102, key(BOB)).1);
    }
}

// Promise: V16
#[test]
fn tokens_and_nonces_of_a_driver_with_contexts_are_ignored() {
    let mut guest = Guest::new();
    guest.device.set_driver_features(WITH_3D);
    guest.control(1, A, ALICE);
    assert_eq!(guest.open(1), OK_NODATA, "a transfer means nothing");
    assert_eq!(guest.device.sessions(), 0);
    assert!(guest.token(100, key(ALICE)).1);
    assert_eq!(guest.nonce_at(A), ALICE);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    // Promise: V16
    #[test]
    fn any_flat_command_sequence_is_answered_and_leaves_no_resource(
        steps in proptest::collection::vec((0..14usize, 1..7u32, 0..7u32, 0..4u32, 0..3usize), 1..80)
    ) {
        let mut guest = Guest::new();
        let nonces = [ALICE, BOB, [0; 16]];
        for (what, id, other, slot, nonce) in steps {
            let at = 0x20_0000 * u64::from(id);
            let address = BASE + (u64::from(slot) << 24);
            let whole = session::BYTES as u32;
            let bytes = match what {
                0..=2 => create_2d(id, Purpose::Memory, 0),
                3..=4 => {
                    guest.write(at, &session::MAGIC.to_le_bytes());
                    guest.write(at + session::NONCE_AT as u64, &nonces[nonce]);
                    backing(id, &[(at, whole)])
                }
                5 => transfer(id, Doorbell::Open { resource: if slot == 0 { other } else { id } }),
                6 => transfer(id, Doorbell::Attach { resource: other, slot, address }),
                7 => transfer(id, Doorbell::Detach { slot }),
                8 => transfer(id, Doorbell::Close),
                9 => {
                    guest.fence += 1;
                    let key = Nonce::new(nonces[nonce]).map_or(0, |nonce| nonce.key());
                    create_2d(id, Purpose::Token { key }, guest.fence)
                }
                10 | 11 => command(RESOURCE_UNREF, 0, &[id, 0]),
                12 => command(DETACH_BACKING, 0, &[id, 0]),
                _ => submit(id, Doorbell::Open { resource: other }, 0),
            };
            let (head, answered) = guest.head(&bytes);
            prop_assert!(answered.is_some() || what == 9, "{what} of {head} is withheld");
            prop_assert!(guest.device.withheld() <= 2 * limits::WAITERS_PER_SESSION);
            prop_assert!(guest.device.sessions() <= guest.next.into());
        }
        guest.device.stop(Duration::ZERO);
        guest.collect(None);
        prop_assert_eq!(guest.device.withheld(), 0);
        for id in 0..7 {
            guest.head(&command(RESOURCE_UNREF, 0, &[id, 0]));
        }
        prop_assert_eq!(guest.device.resource_count(), 0);
        for id in 1..7 {
            guest.memory(id, 0x20_0000 * u64::from(id), 0x1000, [0; 16]);
        }
    }
}

const CONTROL: u64 = FREE;
const ARENA: u64 = FREE + 0x20_0000;

/// The whole life of a session on the real device.
// Promise: V16
#[test]
fn session_without_contexts_opens_attaches_wakes_and_detaches() {
    let device = Process::start(&["--direct"]);
    let mut guest = FrontEnd::flat(&device.path);
    guest.flat_open(10, CONTROL, ALICE);
    let worker = device.give_worker();
    let begun = worker.begin();
    eventually("ready", || guest.state(CONTROL) == session::READY);

    // An arena, which the worker maps.
    guest.flat_memory(11, &[(ARENA, 0x8000)], ALICE);
    guest.words.store_u64(ARENA as usize + 0x7ff8, 0x5a5a, Ordering::SeqCst);
    assert_eq!(
        guest.ask(&transfer(10, Doorbell::Attach { resource: 11, slot: 1, address: BASE })),
        OK_NODATA
    );
    let (slot, address, mapped) = worker.attach();
    assert_eq!((slot, address, mapped.bytes()), (1, BASE, 0x8000));
    assert_eq!(mapped.words().load_u64(0x7ff8, Ordering::SeqCst), 0x5a5a);
    assert_eq!(mapped.words().load_u64(session::NONCE_AT, Ordering::SeqCst), 0);
    session::set_attachment(&begun.words, 1, Attachment::Adopted(0x8000));
    worker.say(FromWorker::Attached { slot: 1, error: 0 });

    // Doorbell and wake.
    assert_eq!(guest.ask(&transfer(10, Doorbell::Ring)), OK_NODATA);
    assert!(readable(&begun.doorbell, TIMEOUT));
    let head = guest.token(100, ALICE);
    guest.soon(head); // the wake of `begin`
    let mut id = 101;
    in_time(|| {
        let started = Instant::now();
        let head = guest.token(id, ALICE);
        id += 1;
        begun.wake();
        let answer = guest.soon(head);
        assert_eq!(answer[..4], OK_NODATA.to_le_bytes());
        assert_eq!(answer[8..16], guest.fence.to_le_bytes(), "the guest finds it by its fence");
        (started.elapsed(), ())
    });

    // Pages go back when the worker has unmapped them.
    let head = guest.send(&command(RESOURCE_UNREF, 0, &[11, 0]));
    assert_eq!(worker.receive().0, ToWorker::Detach { slot: 1 });
    assert_eq!(guest.answer(head), None);
    drop(mapped);
    worker.say(FromWorker::Detached { slot: 1 });
    guest.soon(head);

    // The guest process dies: its kernel sends UNREF only.
    let token = guest.token(id, ALICE);
    let head = guest.send(&command(RESOURCE_UNREF, 0, &[10, 0]));
    assert!(worker.ends(TIMEOUT));
    guest.soon(head);
    guest.soon(token);
    assert_eq!(device.receive(), FromDevice::SessionEnded { session: worker.session });

    // A worker dies: the guest gets it where it sleeps, and the control resource still ends the session.
    guest.flat_open(12, CONTROL + 0x40_0000, BOB);
    let worker = device.give_worker();
    let _begun = worker.begin();
    rustix::process::pidfd_send_signal(&worker.pidfd, rustix::process::Signal::KILL).unwrap();
    eventually("lost", || guest.state(CONTROL + 0x40_0000) == session::LOST);
    let head = guest.token(200, BOB);
    guest.soon(head);
    assert_eq!(guest.ask(&command(RESOURCE_UNREF, 0, &[12, 0])), OK_NODATA);
}
