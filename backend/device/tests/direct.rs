//! The real device process, in its filter, with its peers: a front-end, `sluiced` and workers, all played by this test. In one file: they
//! share its peers.

use crate::common::{Device, SECOND, Worker, in_time};
use rustix::fs::SealFlags;
use sluice_guest::transport::{Transport, direct::Direct};
use sluice_kit::front_end::{self, EventFd, FREE, FrontEnd, command, submit};
use sluice_kit::wait::{TIMEOUT, eventually, readable};
use sluice_messages::control::{FromDevice, FromWorker, ToDevice, ToWorker};
use sluice_protocol::{
    doorbell::Doorbell,
    gpu::command::*,
    limits,
    session::{self, Attachment},
    shared::Shared,
};
use sluice_shared_memory::{Reservation, mapping::Words, socket};
use std::{
    os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::EFD_NONBLOCK;

const OK: u32 = 0x1100;
const BASE: u64 = limits::WINDOW_BOUNDS.start;
const CONTROL: u64 = FREE;
const ARENA: u64 = FREE + 0x20_0000;

/// Opens a session over the shim's transport: the connection, the mapping of the control resource, and its words.
fn open_session(device: &Device) -> (Direct, Reservation, Words) {
    let direct = Direct::connect(&device.path).unwrap();
    let bytes = session::BYTES as u64;
    let reservation = Reservation::new(0, bytes).unwrap();
    let control = direct.create(&reservation, reservation.base(), bytes).unwrap();
    // SAFETY: mapped by the transport for as long as the reservation.
    #[allow(unsafe_code, reason = "a test")]
    let words = unsafe { Words::new(reservation.base() as usize, session::BYTES) };
    words.store_u64(session::MAGIC_AT, session::MAGIC, Ordering::Release);
    direct.submit(Doorbell::Open { resource: control.id }).unwrap();
    (direct, reservation, words)
}

#[test]
fn session_over_the_shims_transport_opens_attaches_and_wakes() {
    let device = Device::start(&["--direct"]);
    let (direct, _control, words) = open_session(&device);
    let worker = device.give_worker();
    let begun = worker.begin();
    eventually("ready", || words.load_u32(session::STATE, Ordering::Acquire) == session::READY);

    // An arena: both sides see the same bytes.
    let arena_bytes = 3 << 20;
    let window = Reservation::new(BASE + (9 << 30), arena_bytes).unwrap();
    let arena = direct.create(&window, window.base(), arena_bytes).unwrap();
    // SAFETY: as above.
    #[allow(unsafe_code, reason = "a test")]
    let arena_words = unsafe { Words::new(window.base() as usize, arena_bytes as usize) };
    assert_eq!(arena_words.load_u64(8, Ordering::Relaxed), 0);
    arena_words.store_u64(arena_bytes as usize - 8, 0x5a5a, Ordering::Release);
    direct.submit(Doorbell::Attach { resource: arena.id, slot: 1, address: window.base() }).unwrap();
    let (slot, address, mapped) = worker.attach();
    assert_eq!((slot, address, mapped.bytes()), (1, window.base(), arena_bytes));
    assert_eq!(mapped.words().load_u64(arena_bytes as usize - 8, Ordering::Acquire), 0x5a5a);
    session::set_attachment(&begun.words, 1, Attachment::Adopted(arena_bytes));
    worker.say(FromWorker::Attached { slot: 1, error: 0 });
    eventually("adopted", || session::attachment(&words, 1) == Attachment::Adopted(arena_bytes));

    // Doorbell and wake.
    direct.submit(Doorbell::Ring).unwrap();
    assert!(readable(&begun.doorbell, TIMEOUT));
    direct.wait(SECOND).unwrap(); // the wake of `begin`, or spurious
    in_time(|| {
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                begun.wake();
            });
            while started.elapsed() < Duration::from_millis(290) {
                direct.wait(TIMEOUT).unwrap();
            }
        });
        (started.elapsed(), ())
    });

    // Freed memory comes back when the worker has unmapped it, and is zero.
    drop(window);
    direct.destroy(arena).unwrap();
    let (message, _) = worker.receive();
    assert_eq!(message, ToWorker::Detach { slot: 1 });
    drop(mapped);
    worker.say(FromWorker::Detached { slot: 1 });

    // The worker dies: the guest gets it, also where it sleeps.
    rustix::process::pidfd_send_signal(&worker.pidfd, rustix::process::Signal::KILL).unwrap();
    eventually("lost", || {
        direct.wait(TIMEOUT).unwrap();
        session::lost(&words).is_some()
    });
    assert_eq!(session::lost(&words), Some(46));
    assert_eq!(device.receive(), FromDevice::SessionEnded { session: worker.session });
}

// Promise: V44
#[test]
fn program_and_worker_wake_each_other_without_the_device() {
    let device = Device::start(&["--direct"]);
    let (direct, _control, words) = open_session(&device);
    let worker = device.give_worker();
    let begun = worker.begin();
    direct.wait(TIMEOUT).unwrap(); // the wake of `begin`

    device.signal(rustix::process::Signal::STOP);
    direct.submit(Doorbell::Ring).unwrap();
    assert!(readable(&begun.doorbell, TIMEOUT), "the program rings the worker");
    std::thread::scope(|scope| {
        let waited = scope.spawn(|| {
            let started = Instant::now();
            direct.wait(TIMEOUT * 2).unwrap();
            started.elapsed()
        });
        begun.wake();
        assert!(waited.join().unwrap() < TIMEOUT, "the worker wakes the program");
    });
    device.signal(rustix::process::Signal::CONT);
    rustix::process::pidfd_send_signal(&worker.pidfd, rustix::process::Signal::KILL).unwrap();
    eventually("lost", || {
        direct.wait(TIMEOUT).unwrap();
        session::lost(&words).is_some()
    });
}

// Promise: V44
#[test]
fn signals_of_a_program_are_eventfds_and_for_one_session() {
    let device = Device::start(&["--direct"]);
    let eventfd = || EventFd::new(EFD_NONBLOCK).unwrap();
    // SAFETY: the owner gives up the number.
    #[allow(unsafe_code, reason = "a test")]
    let other = |fd: OwnedFd| unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) };
    let (read, write) = rustix::pipe::pipe().unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let mut first = FrontEnd::connect(&device.path);
    assert!(first.signals(&other(read), &eventfd()).is_err(), "the end of a pipe");
    let mut second = FrontEnd::connect(&device.path);
    assert!(second.signals(&eventfd(), &other(write)).is_err(), "the other end");
    let mut third = FrontEnd::connect(&device.path);
    assert!(third.signals(&other(epoll), &eventfd()).is_err(), "another file without a type");

    let mut guest = FrontEnd::connect(&device.path);
    let (doorbell, wake) = (eventfd(), eventfd());
    guest.signals(&doorbell, &wake).unwrap();
    assert_eq!(guest.context(2), OK);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let begun = worker.begin();
    assert_eq!(wake.read().unwrap(), 1, "the worker of the first session has them");
    guest.open(2, 11, CONTROL + 0x20_0000);
    let second = device.give_worker();
    let other = second.begin();
    assert!(wake.read().is_err(), "the worker of the second does not");
    doorbell.write(1).unwrap();
    assert!(readable(&begun.doorbell, TIMEOUT));
    assert!(!readable(&other.doorbell, Duration::ZERO));
    assert_eq!(guest.doorbell(2, Doorbell::Ring), OK);
    assert!(readable(&other.doorbell, TIMEOUT), "the device rings it");
}

#[test]
fn sleeping_guest_is_woken_at_once_when_its_worker_dies() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    let mut index = 0;
    in_time(|| {
        let at = CONTROL + 0x20_0000 * u64::from(index);
        guest.open(1, 10 + index, at);
        index += 1;
        let worker = device.give_worker();
        let _begun = worker.begin();
        let head = guest.wait(1);
        guest.soon(head); // the wake of `begin`
        let started = Instant::now();
        let head = guest.wait(1);
        rustix::process::pidfd_send_signal(&worker.pidfd, rustix::process::Signal::KILL).unwrap();
        guest.soon(head);
        let took = started.elapsed();
        eventually("lost", || guest.state(at) == session::LOST);
        assert_eq!(guest.doorbell(1, Doorbell::Close), OK);
        (took, ())
    });
}

#[test]
fn destroyed_context_kills_its_worker_before_unref_is_answered() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let _begun = worker.begin();
    eventually("ready", || guest.state(CONTROL) == session::READY);

    // UNREF of a resource that the worker maps is answered only after the worker is gone.
    assert!(!worker.ends(Duration::ZERO));
    assert_eq!(guest.ask(&command(CTX_DESTROY, 1, &[])), OK);
    let head = guest.send(&command(RESOURCE_UNREF, 0, &[10, 0]));
    assert!(worker.ends(TIMEOUT));
    guest.soon(head);
    assert_eq!(device.receive(), FromDevice::SessionEnded { session: worker.session });

    // In the other order: the kernel may send UNREF first.
    assert_eq!(guest.context(1), OK);
    guest.open(1, 11, CONTROL);
    let worker = device.give_worker();
    let _begun = worker.begin();
    let head = guest.send(&command(RESOURCE_UNREF, 0, &[11, 0]));
    assert_eq!(guest.ask(&command(CTX_DESTROY, 1, &[])), OK);
    assert!(worker.ends(TIMEOUT));
    guest.soon(head);
}

#[test]
fn closed_connection_kills_its_worker() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let _begun = worker.begin();
    drop(guest);
    assert!(worker.ends(TIMEOUT));
    assert_eq!(device.receive(), FromDevice::SessionEnded { session: worker.session });
}

#[test]
fn worker_that_arrives_after_its_session_ended_is_killed() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    assert_eq!(guest.ask(&command(CTX_DESTROY, 1, &[])), OK);
    let late = device.give_worker();
    assert!(late.ends(TIMEOUT));

    guest.context(1);
    assert_eq!(guest.ask(&command(RESOURCE_UNREF, 0, &[10, 0])), OK);
    guest.open(1, 11, CONTROL);
    // Requested before the guest leaves: no worker is requested for one that has left.
    let session = device.wanted();
    drop(guest);
    let later = device.give_worker_to(session);
    assert!(later.ends(TIMEOUT));
}

// Promise: V11
#[test]
fn resources_of_another_context_are_refused() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    assert_eq!(guest.context(2), OK);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let begun = worker.begin();
    assert_eq!(guest.resource(2, 20, &[(ARENA, 0x4000)]), OK);

    // Not attached to context 1: refused, and the guest gets it in the attach table and a wake.
    let wait = guest.wait(1);
    guest.soon(wait); // the wake of `begin`
    let wait = guest.wait(1);
    let attach = Doorbell::Attach { resource: 20, slot: 3, address: BASE };
    assert_eq!(guest.doorbell(1, attach), 0x1203);
    guest.soon(wait);
    assert_eq!(session::attachment(&begun.words, 3), Attachment::Refused(1));
    // Nor can another context open a session with the first one's page, or have it ring.
    assert_eq!(guest.doorbell(2, Doorbell::Open { resource: 10 }), 0x1203);
    assert_eq!(guest.doorbell(2, Doorbell::Ring), 0x1205);
    assert_eq!(guest.doorbell(2, Doorbell::Close), 0x1205);
    assert!(!readable(&begun.doorbell, Duration::ZERO));
    // Attached to it: accepted.
    assert_eq!(guest.ask(&command(CTX_ATTACH_RESOURCE, 1, &[20, 0])), OK);
    assert_eq!(guest.doorbell(1, attach), OK);
    assert_eq!(worker.attach().0, 3);
    // Another connection's resources belong to another device.
    let mut other = FrontEnd::connect(&device.path);
    assert_eq!(other.doorbell(1, Doorbell::Open { resource: 10 }), 0x1203);
}

// Promise: V10
#[test]
fn memory_that_can_shrink_is_refused() {
    let mut device = Device::start(&["--direct"]);
    for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::SEAL] {
        assert!(FrontEnd::with_memory(&device.path, front_end::memory(seals)).is_err(), "{seals:?}");
    }
    assert!(device.is_alive());
    FrontEnd::connect(&device.path);
}

// Promise: V12
#[test]
fn waits_beyond_the_session_limit_are_answered_at_once() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let begun = worker.begin();
    let first = guest.wait(1);
    guest.soon(first); // the wake of `begin`

    let early = in_time(|| {
        guest.forget();
        let started = Instant::now();
        for _ in 0..300 {
            guest.wait(1);
        }
        // All but the last few are answered at once, ...
        eventually("answers", || guest.answers() >= 300 - limits::WAITERS_PER_SESSION);
        // ... commands continue in between, ...
        assert_eq!(guest.doorbell(1, Doorbell::Ring), OK);
        let early = guest.answers();
        // ... and the last ones end together, by a wake ...
        begun.wake();
        eventually("the rest", || guest.answers() == 300);
        (started.elapsed(), early)
    });
    assert_eq!(early, 300 - limits::WAITERS_PER_SESSION);
    // ... or by timeout.
    guest.forget();
    let started = Instant::now();
    let head = guest.wait(1);
    assert_eq!(guest.soon(head)[8..16], guest.fence.to_le_bytes(), "the fence is echoed");
    assert!(started.elapsed() > Duration::from_millis(900), "{:?}", started.elapsed());
}

// Promise: V2
#[test]
fn wait_ends_when_a_later_fence_is_answered() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let begun = worker.begin();
    // Fences of a LEGACY guest: one timeline for all, on which a later fence ends all earlier ones.
    let fenced = |mut command: Vec<u8>, fence: u64| {
        command[4..8].copy_from_slice(&1u32.to_le_bytes());
        command[8..16].copy_from_slice(&fence.to_le_bytes());
        command
    };
    let wait = |fence| fenced(submit(1, Doorbell::Wait, fence), fence);
    let first = guest.send(&wait(1));
    guest.soon(first); // the wake of `begin`
    let mut fence = 1;
    in_time(|| {
        let started = Instant::now();
        let given_up = guest.send(&wait(fence + 1));
        let resource = fence as u32 + 10;
        let create = command(RESOURCE_CREATE_3D, 0, &[resource, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let other = guest.send(&fenced(create, fence + 2));
        guest.soon(other);
        guest.soon(given_up);
        // A wake between the guest's read of its memory and its next wait is for that wait.
        begun.wake();
        std::thread::sleep(Duration::from_millis(50));
        let next = guest.send(&wait(fence + 3));
        guest.soon(next);
        fence += 3;
        (started.elapsed(), ())
    });
}

// Promise: V12
#[test]
fn waits_of_all_sessions_beyond_the_device_limit_are_answered() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    let mut workers = Vec::new();
    let sessions = 40u32;
    for context in 1..=sessions {
        if context > 1 {
            guest.context(context);
        }
        guest.open(context, 100 + context, CONTROL + u64::from(context) * 0x15_0000);
        let worker = device.give_worker();
        let begun = worker.begin();
        let head = guest.wait(context);
        guest.soon(head);
        workers.push((worker, begun));
    }
    // 160 waits, room for 128: the oldest are answered to make room.
    let room = 160 - limits::WAITERS_PER_DEVICE;
    let early = in_time(|| {
        guest.forget();
        let started = Instant::now();
        for context in 1..=sessions {
            for _ in 0..limits::WAITERS_PER_SESSION {
                guest.wait(context);
            }
        }
        eventually("answers", || guest.answers() >= room);
        // All their answers without delay have come by now.
        assert_eq!(guest.doorbell(1, Doorbell::Ring), OK);
        let (took, early) = (started.elapsed(), guest.answers());
        eventually("the rest, by time", || guest.answers() == 160);
        (took, early)
    });
    assert_eq!(early, room);
}

#[test]
fn worker_that_sends_invalid_messages_is_killed() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    let rules: [&dyn Fn(&Worker); 4] = [
        &|worker| worker.say(FromWorker::Detached { slot: 0 }),
        &|worker| worker.say(FromWorker::Attached { slot: 77, error: 0 }),
        &|worker| socket::send(&worker.socket, &[1, 2, 3], &[]).unwrap(),
        &|worker| {
            use rustix::fd::AsFd;
            let message = FromWorker::Attached { slot: 0, error: 0 }.encode();
            socket::send(&worker.socket, &message, &[worker.socket.as_fd()]).unwrap();
        },
    ];
    for (index, break_rule) in (0..).zip(rules) {
        let at = CONTROL + 0x20_0000 * u64::from(index);
        let id = 10 + index;
        guest.open(1, id, at);
        let worker = device.give_worker();
        let _begun = worker.begin();
        break_rule(&worker);
        assert!(worker.ends(TIMEOUT), "rule {index}");
        eventually("lost", || guest.state(at) == session::LOST);
        assert_eq!(guest.doorbell(1, Doorbell::Close), OK);
    }
}

#[test]
fn refused_worker_marks_the_session_lost_with_its_error() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let session = device.wanted();
    socket::send(&device.control, &ToDevice::NoWorker { session, error: 999 }.encode(), &[]).unwrap();
    eventually("lost", || guest.state(CONTROL) == session::LOST);
    assert_eq!(guest.words.load_u32(CONTROL as usize + session::LOST_ERROR, Ordering::Relaxed), 999);
    // A wait is not withheld for a session that is over.
    let head = guest.wait(1);
    guest.soon(head);
}

// Promise: F8
#[test]
fn sessions_without_sluiced_continue_and_new_ones_are_refused() {
    let mut device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let begun = worker.begin();
    // `sluiced` dies.
    device.control = socket::pair().unwrap().0;
    // The device may accept requests until it sees that; each has a context and a control resource of its own.
    let mut context = 1;
    eventually("refusal", || {
        context += 1;
        let (at, resource) = (CONTROL + u64::from(context) * 0x20_0000, 10 * context);
        guest.words.store_u32(at as usize + session::STATE, session::NEW, Ordering::SeqCst);
        guest.context(context);
        guest.resource(context, resource, &[(at, session::BYTES as u32)]);
        guest.words.store_u64(at as usize, session::MAGIC, Ordering::SeqCst);
        let answer = guest.doorbell(context, Doorbell::Open { resource });
        eventually("lost", || guest.state(at) == session::LOST);
        answer == 0x1201
    });
    assert_eq!(guest.doorbell(1, Doorbell::Ring), OK);
    assert!(readable(&begun.doorbell, TIMEOUT));
    assert_eq!(guest.state(CONTROL), session::READY);
    drop(guest);
    device.ends();
}

// Promise: F8
#[test]
fn device_without_sluiced_ends_with_its_last_front_end() {
    let mut used = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&used.path);
    guest.open(1, 10, CONTROL);
    used.give_worker().begin();
    used.control = socket::pair().unwrap().0;
    drop(guest);
    used.ends();

    let mut unused = Device::start(&["--direct"]);
    unused.control = socket::pair().unwrap().0;
    unused.ends();
}

// Promise: F62
#[test]
fn session_of_mismatched_versions_is_refused_and_others_continue() {
    const MISMATCH: u32 = 803;
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let begun = worker.begin();
    // A worker reports the other version.
    let at = CONTROL + 0x20_0000;
    let error = |guest: &FrontEnd, at: u64| {
        guest.words.load_u32(at as usize + session::LOST_ERROR, Ordering::Acquire)
    };
    guest.context(2);
    guest.open(2, 20, at);
    let foreign = device.give_worker();
    foreign.say(FromWorker::Attached { slot: 0, error: MISMATCH });
    eventually("lost", || guest.state(at) == session::LOST);
    assert_eq!(error(&guest, at), MISMATCH);
    assert!(foreign.ends(TIMEOUT));
    // The device detects it.
    let at = CONTROL + 0x40_0000;
    guest.context(3);
    assert_eq!(guest.resource(3, 30, &[(at, session::BYTES as u32)]), OK);
    let magic = session::magic(session::VERSION + 1);
    guest.words.store_u64(at as usize + session::MAGIC_AT, magic, Ordering::SeqCst);
    assert_ne!(guest.doorbell(3, Doorbell::Open { resource: 30 }), OK);
    assert_eq!((guest.state(at), error(&guest, at)), (session::LOST, MISMATCH));

    assert_eq!(guest.doorbell(1, Doorbell::Ring), OK);
    assert!(readable(&begun.doorbell, TIMEOUT));
    assert_eq!(guest.state(CONTROL), session::READY);
}

// Promise: V13
#[test]
fn guest_that_reboots_starts_clean() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let _begun = worker.begin();
    let head = guest.wait(1);
    guest.soon(head);

    // A pause: withheld commands are answered, the session continues. The second answer shows that the wait was taken.
    let head = guest.wait(1);
    assert_eq!(guest.doorbell(1, Doorbell::Ring), OK);
    let base = guest.stop();
    assert!(guest.answer(head).is_some(), "answered before the queue stopped");
    // A command that is not taken before the queue stops is taken after.
    let head = guest.wait(1);
    guest.start(base as u16).unwrap();
    guest.soon(head);
    assert_eq!(guest.doorbell(1, Doorbell::Ring), OK);
    assert!(!worker.ends(Duration::ZERO));

    // A reboot: the queue starts from the beginning.
    guest.stop();
    guest.start(0).unwrap();
    assert_eq!(guest.context(1), OK, "the old context is forgotten");
    assert!(worker.ends(TIMEOUT));
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let _begun = worker.begin();

    // A new driver on the same queue: its first question waits until the old one's worker is gone.
    assert_eq!(guest.ask(&command(GET_CAPSET_INFO, 0, &[0, 0])), 0x1102);
    assert!(worker.ends(Duration::ZERO));
    assert_eq!(guest.context(1), OK);
    assert_eq!(guest.ask(&command(RESOURCE_UNREF, 0, &[10, 0])), 0x1203);
}

// Promise: V14
#[test]
fn stopping_queue_waits_until_the_worker_has_released_its_pages() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let _begun = worker.begin();
    guest.resource(1, 20, &[(ARENA, 0x4000)]);
    guest.doorbell(1, Doorbell::Attach { resource: 20, slot: 1, address: BASE });
    worker.attach();
    let head = guest.send(&command(RESOURCE_UNREF, 0, &[20, 0]));
    assert_eq!(worker.receive().0, ToWorker::Detach { slot: 1 });
    assert!(guest.answer(head).is_none());
    // The worker never answers, so it is killed before the queue stops.
    guest.stop();
    assert!(guest.answer(head).is_some());
    assert!(worker.ends(Duration::ZERO));
}

// Promise: V14
#[test]
fn worker_that_does_not_release_pages_is_killed() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let _begun = worker.begin();
    guest.resource(1, 20, &[(ARENA, 0x4000)]);
    guest.doorbell(1, Doorbell::Attach { resource: 20, slot: 1, address: BASE });
    worker.attach();
    let head = guest.send(&command(RESOURCE_UNREF, 0, &[20, 0]));
    assert!(worker.ends(TIMEOUT));
    guest.soon(head);
    eventually("lost", || guest.state(CONTROL) == session::LOST);
}

// Promise: V14
#[test]
fn pages_that_a_worker_refuses_are_released_at_once() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let _begun = worker.begin();
    guest.resource(1, 20, &[(ARENA, 0x4000)]);
    guest.doorbell(1, Doorbell::Attach { resource: 20, slot: 1, address: BASE });
    worker.attach();
    // The guest gets the refusal from the worker, and may be faster than the device.
    let head = guest.send(&command(RESOURCE_UNREF, 0, &[20, 0]));
    worker.say(FromWorker::Attached { slot: 1, error: 2 });
    guest.soon(head);
    assert_ne!(guest.state(CONTROL), session::LOST);
    // Memory and entry are free again.
    guest.resource(1, 21, &[(ARENA, 0x4000)]);
    assert_eq!(guest.doorbell(1, Doorbell::Attach { resource: 21, slot: 1, address: BASE }), OK);
}

#[test]
fn hostile_front_end_leaves_other_connections_working() {
    let mut device = Device::start(&["--direct"]);
    let mut good = FrontEnd::connect(&device.path);
    good.open(1, 10, CONTROL);
    let worker = device.give_worker();
    let begun = worker.begin();

    // Invalid indices, chains that lead nowhere, and a queue that is removed while it is kicked.
    let mut bad = FrontEnd::connect(&device.path);
    bad.descriptor(0, u64::MAX - 3, u32::MAX, 1, 0);
    bad.make_available(0);
    bad.descriptor(2, 0, 16, 4, 0);
    bad.make_available(2);
    bad.make_available(u16::MAX);
    bad.words.store_u32(0x4000, 0xffff_0000, Ordering::SeqCst);
    bad.make_available(0);
    for _ in 0..20 {
        bad.make_available(0);
        bad.stop();
        bad.start(0).unwrap();
    }
    drop(bad);
    // Malformed messages.
    for garbage in [&[0u8; 12][..], &[0xff; 400], &[1, 0, 0, 0, 1, 0, 0, 0, 255, 255, 255, 255]] {
        use std::io::Write;
        let mut stream = std::os::unix::net::UnixStream::connect(&device.path).unwrap();
        stream.write_all(garbage).unwrap();
    }
    assert!(device.is_alive());
    assert_eq!(good.doorbell(1, Doorbell::Ring), OK);
    assert!(readable(&begun.doorbell, TIMEOUT));
}

#[test]
fn thousand_connections_leak_no_descriptors_or_mappings() {
    let device = Device::start(&["--direct"]);
    let cycle = |session: bool| {
        let mut guest = FrontEnd::connect(&device.path);
        if session {
            guest.open(1, 10, CONTROL);
            let worker = device.give_worker();
            let _begun = worker.begin();
            guest.doorbell(1, Doorbell::Close);
            assert!(worker.ends(TIMEOUT));
        }
    };
    let settle = || {
        let mut figures = (0, 0);
        for _ in 0..500 {
            let now = (device.descriptors(), device.mappings());
            if now == figures {
                std::thread::sleep(Duration::from_millis(20));
                if now == (device.descriptors(), device.mappings()) {
                    break;
                }
            }
            figures = now;
            std::thread::sleep(Duration::from_millis(10));
        }
        figures
    };
    (0..5).for_each(|_| cycle(true));
    let before = settle();
    (0..1000).for_each(|i| cycle(i % 50 == 0));
    // The C library keeps some stacks of threads that ended, two mappings each.
    eventually("nothing is left behind", || {
        let after = (device.descriptors(), device.mappings());
        let clean = after.0 <= before.0 + 2 && after.1 <= before.1 + 40;
        if !clean {
            std::thread::sleep(Duration::from_millis(50));
        }
        clean
    });
}

#[test]
fn submit_that_is_cut_short_is_refused() {
    let device = Device::start(&["--direct"]);
    let mut guest = FrontEnd::connect(&device.path);
    let whole = submit(1, Doorbell::Ring, 0);
    for length in 24..whole.len() {
        assert!(guest.ask(&whole[..length]) >= 0x1200, "{length} bytes");
    }
}

/// Bytes of a fixed arena.
const FIXED: u64 = *limits::FIXED_ARENAS.start();

/// A device with fixed arenas, a guest with a session there, and the session's worker.
fn with_fixed_arena() -> (Device, FrontEnd, Worker) {
    let device = Device::start(&["--direct", "--fixed-arena", &FIXED.to_string()]);
    let mut guest = FrontEnd::connect(&device.path);
    guest.open(1, 10, CONTROL);
    let worker = device.give_worker();
    (device, guest, worker)
}

fn attach(guest: &mut FrontEnd, resource: u32, slot: u32, address: u64) -> u32 {
    guest.doorbell(1, Doorbell::Attach { resource, slot, address })
}

fn attachment(guest: &FrontEnd, slot: u32) -> Attachment {
    let at = CONTROL as usize + session::attachment_at(slot);
    match guest.words.load_u32(at, Ordering::Acquire) {
        2 => Attachment::Refused(guest.words.load_u32(at + 4, Ordering::Acquire)),
        0 => Attachment::Pending,
        other => panic!("state {other}"),
    }
}

// Promise: F96
#[test]
fn worker_with_a_fixed_arena_receives_it_before_the_ring_and_no_memory_after() {
    let (_device, mut guest, worker) = with_fixed_arena();
    let size = CONTROL as usize + session::FIXED_ARENA;
    assert_eq!(guest.words.load_u64(size, Ordering::Acquire), FIXED, "the guest knows the size at once");
    // Another size, or another entry, is not the arena, and a worker gets nothing before the arena.
    let slot = session::FIXED_ARENA_SLOT;
    assert_eq!(guest.resource(1, 20, &[(ARENA, FIXED as u32)]), OK);
    assert_eq!(guest.resource(1, 21, &[(ARENA + FIXED, 4096)]), OK);
    for (resource, entry) in [(21, slot), (20, slot + 1)] {
        assert_ne!(attach(&mut guest, resource, entry, BASE), OK, "resource {resource} in entry {entry}");
        assert_eq!(attachment(&guest, entry), Attachment::Refused(1));
    }
    assert_eq!(attach(&mut guest, 20, slot, BASE), OK);
    let (message, _) = worker.receive();
    assert!(matches!(message, ToWorker::Begin { .. }), "{message:?}");
    let (first, address, arena) = worker.attach();
    assert_eq!((first, address, arena.bytes()), (slot, BASE, FIXED));
    let (second, _, control) = worker.attach();
    assert_eq!((second, control.bytes()), (0, session::BYTES as u64), "the ring comes last");

    // After that a worker gets no message with a descriptor for any request of its guest.
    for entry in [2, 3, limits::ATTACHMENTS - 1] {
        assert_ne!(attach(&mut guest, 21, entry, BASE + FIXED), OK, "entry {entry}");
        assert_eq!(attachment(&guest, entry), Attachment::Refused(2), "out of memory");
    }
    assert_eq!(guest.doorbell(1, Doorbell::Ring), OK);
    assert_eq!(guest.doorbell(1, Doorbell::Close), OK);
    let mut buffer = [0; 128];
    let next = socket::receive(&worker.socket, &mut buffer).unwrap();
    assert!(next.is_none(), "the worker received {next:?}");
}

// Promise: F96
#[test]
fn pages_of_a_fixed_arena_go_back_only_when_the_worker_is_gone() {
    let unref = command(RESOURCE_UNREF, 0, &[20, 0]);
    // The guest destroys the arena, or asks to unmap it first; or the worker pretends that it never mapped it, or has unmapped it.
    type Step = fn(&mut FrontEnd, &Worker);
    let steps: [Step; 4] = [
        |_, _| {},
        |guest, _| {
            assert_eq!(guest.doorbell(1, Doorbell::Detach { slot: session::FIXED_ARENA_SLOT }), OK);
        },
        |_, worker| worker.say(FromWorker::Attached { slot: session::FIXED_ARENA_SLOT, error: 1 }),
        |_, worker| worker.say(FromWorker::Detached { slot: session::FIXED_ARENA_SLOT }),
    ];
    for step in steps {
        let (_device, mut guest, worker) = with_fixed_arena();
        assert_eq!(guest.resource(1, 20, &[(ARENA, FIXED as u32)]), OK);
        assert_eq!(attach(&mut guest, 20, session::FIXED_ARENA_SLOT, BASE), OK);
        let (message, _) = worker.receive();
        assert!(matches!(message, ToWorker::Begin { .. }), "{message:?}");
        let _maps = [worker.attach(), worker.attach()];
        step(&mut guest, &worker);
        let head = guest.send(&unref);
        // A request to unmap is answered with a lie.
        let mut buffer = [0; 128];
        if socket::receive(&worker.socket, &mut buffer).unwrap().is_some() {
            worker.say(FromWorker::Detached { slot: session::FIXED_ARENA_SLOT });
        }
        guest.soon(head);
        assert!(worker.ends(Duration::ZERO), "the guest has pages back that a worker still maps");
    }
}
