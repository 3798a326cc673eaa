//! Model checks: every interleaving, and every stale value the memory model allows, of the ring, of sleeping and waking,
//! and of the reply slots.
//!
//! Words are loom atomics. Bytes (records, answers) are plain memory with a race detector per eight bytes, so a party that
//! touches bytes that another may be using fails the model even when the values happen to agree. Each mechanism is also run
//! with its ordering taken away, and the model has to notice: a check that cannot fail proves nothing.

#![expect(clippy::cast_possible_truncation, reason = "the ring's size, and numbers of two threads")]
#![expect(unsafe_code, reason = "race detectors are shared between model threads, which run one at a time")]

use loom::{
    cell::UnsafeCell,
    sync::{
        Condvar, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
    thread,
};
use sluice_protocol::{
    limits,
    park::Parking,
    record, reply,
    ring::{Consumer, Producer},
    session,
    shared::Shared,
};
// The standard library's Arc: the drop of the last reference needs no exploration.
use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

/// A guarantee that a model removes from the memory, to prove that it matters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// Fences do nothing.
    Fence,
    /// Stores publish nothing: Release is Relaxed.
    Release,
}

/// A control resource of which only the named words and ranges exist for the model checker; other bytes are plain.
struct Memory {
    broken: Broken,
    words: BTreeMap<usize, AtomicU32>,
    longs: BTreeMap<usize, AtomicU64>,
    /// Race detectors of the watched ranges, by offset / 8.
    watched: BTreeMap<usize, UnsafeCell<()>>,
    /// Of the standard library: no model thread is ever switched away while it holds this.
    bytes: std::sync::Mutex<Vec<u8>>,
}

// SAFETY: loom runs the threads of a model one at a time on one thread; the detectors hold no data.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    fn new(broken: Broken, words: &[usize], watched: impl IntoIterator<Item = usize>) -> Memory {
        Memory {
            broken,
            words: words.iter().map(|at| (*at, AtomicU32::new(0))).collect(),
            longs: [session::RING_TAIL, session::RING_HEAD, session::HOST_CALL, session::HOST_RETURN]
                .into_iter()
                .map(|at| (at, AtomicU64::new(0)))
                .collect(),
            watched: watched.into_iter().map(|at| (at / 8, UnsafeCell::new(()))).collect(),
            bytes: std::sync::Mutex::new(vec![0; session::BYTES]),
        }
    }

    fn order(&self, order: Ordering) -> Ordering {
        match order {
            Ordering::Release if self.broken == Broken::Release => Ordering::Relaxed,
            order => order,
        }
    }

    fn detectors(&self, at: usize, bytes: usize) -> impl Iterator<Item = &UnsafeCell<()>> {
        self.watched.range(at / 8..(at + bytes).div_ceil(8)).map(|(_, detector)| detector)
    }
}

impl Shared for Memory {
    fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        self.words[&at].load(order)
    }
    fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        self.words[&at].store(value, self.order(order));
    }
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        self.words[&at].swap(value, Ordering::SeqCst)
    }
    fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        self.longs[&at].load(order)
    }
    fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        self.longs[&at].store(value, self.order(order));
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        self.detectors(at, into.len()).for_each(|detector| detector.with(|_| ()));
        into.copy_from_slice(&self.bytes.lock().unwrap()[at..at + into.len()]);
    }
    fn write(&self, at: usize, from: &[u8]) {
        self.detectors(at, from.len()).for_each(|detector| detector.with_mut(|_| ()));
        self.bytes.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
    }
    fn fence(&self) {
        if self.broken != Broken::Fence {
            fence(Ordering::SeqCst);
        }
    }
}

const RING: usize = limits::RING_BYTES as usize;

/// Offsets of the watched pieces: `bytes` around ring position `at`, wrapped.
fn around(at: usize, before: usize, bytes: usize) -> impl Iterator<Item = usize> {
    (0..bytes).step_by(8).map(move |i| session::RING_AT + (at + RING - before + i) % RING)
}

/// A record of `bytes` that holds its sender and its sequence.
fn record(bytes: usize, thread: u32, sequence: u64) -> Vec<u8> {
    let header = record::Header {
        call: 1,
        reply: record::NO_REPLY,
        ticket: 0,
        context: 0,
        stream: record::NO_STREAM,
        thread,
        sequence,
    };
    let mut buffer = vec![0; bytes];
    let built =
        header.build(&mut buffer, |writer| writer.bytes(&vec![0xa5; bytes - record::HEADER_BYTES])).unwrap();
    assert_eq!(built.len(), bytes);
    buffer
}

/// A consumer with its buffer, which is too large for the stack of a model thread.
struct Dispatcher {
    consumer: Consumer,
    buffer: Box<[u8; limits::RECORD_BYTES]>,
}

impl Dispatcher {
    fn new() -> Dispatcher {
        Dispatcher {
            consumer: Consumer::new(),
            buffer: vec![0; limits::RECORD_BYTES].into_boxed_slice().try_into().unwrap(),
        }
    }

    /// The next record's length, thread and sequence.
    fn next(&mut self, memory: &Memory) -> Option<(usize, u32, u64)> {
        let size = self.consumer.next(memory, &mut self.buffer).expect("the producers are honest")?;
        let (header, fields) = record::Header::read(&self.buffer[..size]).unwrap();
        // The fillers are not checked, and there are thousands of rounds.
        assert!(header.thread == 0 || fields.iter().all(|byte| *byte == 0xa5));
        Some((size, header.thread, header.sequence))
    }
}

static FILLER: LazyLock<Vec<u8>> = LazyLock::new(|| record(limits::RECORD_BYTES, 0, 0));

/// Moves an empty ring to `left` bytes before its end; nothing is concurrent yet. With `keep`, the records stay in.
fn advance(memory: &Memory, producer: &mut Producer, dispatcher: &mut Dispatcher, left: usize, keep: bool) {
    let mut to_go = RING - left;
    while to_go > 0 {
        let bytes = to_go.min(limits::RECORD_BYTES);
        let rest = (bytes < limits::RECORD_BYTES).then(|| record(bytes, 0, 0));
        producer.publish(memory, rest.as_ref().unwrap_or(&FILLER)).unwrap();
        if !keep {
            assert_eq!(dispatcher.next(memory), Some((bytes, 0, 0)));
        }
        to_go -= bytes;
    }
}

/// Two guest threads publish one record each of `bytes`, behind the shim's lock, `left` bytes before the ring's end; one
/// dispatcher reads. The order in the ring is the order of the lock.
fn two_producers(broken: Broken, bytes: [usize; 2], left: usize) {
    let mut builder = loom::model::Builder::new();
    // The two publishers are symmetric and behind a lock; two forced switches reach every pair of their steps.
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let memory = Arc::new(Memory::new(broken, &[], around(RING - left, 64, 256)));
        let mut dispatcher = Dispatcher::new();
        let mut producer = Producer::new();
        advance(&memory, &mut producer, &mut dispatcher, left, false);
        let guest = Arc::new(Mutex::new((producer, Vec::new())));
        let publishers: Vec<_> = (0..2)
            .map(|i| {
                let (memory, guest) = (Arc::clone(&memory), Arc::clone(&guest));
                thread::spawn(move || {
                    let thread = i as u32 + 1;
                    let mut guest = guest.lock().unwrap();
                    guest.0.publish(&*memory, &record(bytes[i], thread, 7)).unwrap();
                    guest.1.push(thread);
                })
            })
            .collect();
        let mut seen = Vec::new();
        while seen.len() < 2 {
            match dispatcher.next(&memory) {
                Some((size, thread, sequence)) => {
                    assert_eq!((size, sequence), (bytes[thread as usize - 1], 7));
                    seen.push(thread);
                }
                None => thread::yield_now(),
            }
        }
        publishers.into_iter().for_each(|publisher| publisher.join().unwrap());
        assert_eq!(seen, guest.lock().unwrap().1, "the order of the lock");
        assert_eq!(dispatcher.next(&memory), None, "nothing comes twice");
    });
}

/// A guest thread finds a full ring and tries again, while the dispatcher takes out the first record.
fn full_ring(broken: Broken) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let memory = Arc::new(Memory::new(broken, &[], around(0, 64, 256)));
        let mut dispatcher = Dispatcher::new();
        let mut producer = Producer::new();
        advance(&memory, &mut producer, &mut dispatcher, 0, true);
        let publisher = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                while producer.publish(&*memory, &record(48, 1, 7)).is_err() {
                    thread::yield_now();
                }
            })
        };
        assert_eq!(dispatcher.next(&memory), Some((limits::RECORD_BYTES, 0, 0)));
        publisher.join().unwrap();
        for _ in 1..RING.div_ceil(limits::RECORD_BYTES) {
            assert!(matches!(dispatcher.next(&memory), Some((_, 0, 0))));
        }
        assert_eq!(dispatcher.next(&memory), Some((48, 1, 7)), "what was in the ring comes first");
        assert_eq!(dispatcher.next(&memory), None, "nothing comes twice");
    });
}

// Promise: V1
#[test]
fn loom_ring_keeps_the_order_of_two_threads() {
    two_producers(Broken::Nothing, [40, 48], RING);
}

// Promise: V1
#[test]
fn loom_ring_wraps_with_padding() {
    two_producers(Broken::Nothing, [48, 56], 40);
}

// Promise: V1
#[test]
fn loom_ring_wraps_at_exactly_the_end() {
    two_producers(Broken::Nothing, [40, 40], 40);
}

// Promise: V1
#[test]
fn loom_full_ring_loses_no_record() {
    full_ring(Broken::Nothing);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_ring_without_release_fails() {
    two_producers(Broken::Release, [40, 40], RING);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_full_ring_without_release_fails() {
    full_ring(Broken::Release);
}

/// An eventfd as a counter.
struct Eventfd {
    count: Mutex<u64>,
    written: Condvar,
}

impl Eventfd {
    fn new() -> Eventfd {
        Eventfd { count: Mutex::new(0), written: Condvar::new() }
    }

    fn write(&self) {
        *self.count.lock().unwrap() += 1;
        self.written.notify_one();
    }

    /// Blocks while the counter is 0; a lost wake-up is a deadlock, which loom reports.
    fn read(&self) {
        let mut count = self.count.lock().unwrap();
        while *count == 0 {
            count = self.written.wait(count).unwrap();
        }
        *count = 0;
    }
}

/// Guest threads publish and ring when they must; the dispatcher consumes everything and parks in between.
fn park_the_worker(broken: Broken, look_again: bool, threads: u32) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let memory = Arc::new(Memory::new(broken, &[session::WORKER_PARKED], around(0, 0, 128)));
        let doorbell = Arc::new(Eventfd::new());
        let guest = Arc::new(Mutex::new(Producer::new()));
        let rings = Arc::new(Mutex::new(0));
        let publishers: Vec<_> = (1..=threads)
            .map(|number| {
                let (memory, doorbell) = (Arc::clone(&memory), Arc::clone(&doorbell));
                let (guest, rings) = (Arc::clone(&guest), Arc::clone(&rings));
                thread::spawn(move || {
                    guest.lock().unwrap().publish(&*memory, &record(40, number, 0)).unwrap();
                    if Parking::WORKER.must_wake(&*memory) {
                        *rings.lock().unwrap() += 1;
                        doorbell.write();
                    }
                })
            })
            .collect();
        let mut dispatcher = Dispatcher::new();
        let (mut consumed, mut announced) = (0, 0);
        while consumed < threads {
            if dispatcher.next(&memory).is_some() {
                consumed += 1;
                continue;
            }
            announced += 1;
            let ready = || look_again && !dispatcher.consumer.is_empty(&*memory);
            if Parking::WORKER.enter(&*memory, ready) {
                doorbell.read();
                Parking::WORKER.leave(&*memory);
            }
        }
        publishers.into_iter().for_each(|publisher| publisher.join().unwrap());
        assert!(*rings.lock().unwrap() <= announced, "one doorbell per announcement at most");
    });
}

// Promise: V2
#[test]
fn loom_dispatcher_never_sleeps_over_a_record() {
    park_the_worker(Broken::Nothing, true, 1);
}

// Promise: V2
#[test]
fn loom_dispatcher_is_woken_by_either_of_two_threads() {
    park_the_worker(Broken::Nothing, true, 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_parking_without_fence_fails() {
    park_the_worker(Broken::Fence, true, 1);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_parking_without_second_check_fails() {
    park_the_worker(Broken::Nothing, false, 1);
}

/// The worker writes a result and calls a function of the guest, which reads the result and writes another; the worker reads that
/// after the return. Two calls, of one token.
fn call_the_host(broken: Broken) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        const RESULT: usize = session::RING_AT;
        const INPUT: usize = session::RING_AT + 64;
        let memory = Arc::new(Memory::new(broken, &[], [RESULT, INPUT]));
        let guest = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                let mut latest = session::HostCall::default();
                for round in 1..=2 {
                    while session::host_call(&*memory) == latest {
                        thread::yield_now();
                    }
                    latest = session::host_call(&*memory);
                    let mut result = [0; 8];
                    memory.read(RESULT, &mut result);
                    assert_eq!(result, [round; 8], "the result before the call");
                    memory.write(INPUT, &[round + 10; 8]);
                    session::set_host_return(&*memory, latest);
                }
            })
        };
        let mut call = session::HostCall::default();
        for round in 1..=2 {
            memory.write(RESULT, &[round; 8]);
            call = call.next(7);
            session::set_host_call(&*memory, call);
            while session::host_return(&*memory) != call {
                thread::yield_now();
            }
            let mut input = [0; 8];
            memory.read(INPUT, &mut input);
            assert_eq!(input, [round + 10; 8], "the input before the return");
        }
        guest.join().unwrap();
    });
}

// Promise: C54
#[test]
fn loom_host_function_sees_what_came_before_it_and_is_seen_by_what_follows() {
    call_the_host(Broken::Nothing);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_host_call_without_release_fails() {
    call_the_host(Broken::Release);
}

/// The device between worker and guest: a wake that finds no waiter is kept for the next one.
#[derive(Default)]
struct Device {
    /// The worker wrote the wake eventfd.
    woken: bool,
    /// The guest sent Wait.
    asked: bool,
    waiting: bool,
    pending: bool,
    answered: bool,
    over: bool,
}

/// The worker answers a call and wakes the guest when it must; the device passes the wake on; the guest's waker thread
/// parks with a withheld Wait.
fn park_the_guest(broken: Broken, look_again: bool, keep_wake: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let at = reply::slot_at(0);
        let words = [session::GUEST_PARKED, at, at + 4, at + 8];
        let memory = Arc::new(Memory::new(broken, &words, [at + 16]));
        let device = Arc::new((Mutex::new(Device::default()), Condvar::new()));

        let worker = {
            let (memory, device) = (Arc::clone(&memory), Arc::clone(&device));
            thread::spawn(move || {
                reply::publish(&*memory, 0, 1, 0, &[9; 8]);
                if Parking::GUEST.must_wake(&*memory) {
                    device.0.lock().unwrap().woken = true;
                    device.1.notify_all();
                }
            })
        };
        let endpoint = {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                let mut state = device.0.lock().unwrap();
                while !state.over {
                    // Wakes first: the order in which an event loop may report them.
                    if std::mem::take(&mut state.woken) {
                        if std::mem::take(&mut state.waiting) {
                            state.answered = true;
                        } else {
                            state.pending = keep_wake;
                        }
                        device.1.notify_all();
                    } else if std::mem::take(&mut state.asked) {
                        if std::mem::take(&mut state.pending) {
                            state.answered = true;
                        } else {
                            state.waiting = true;
                        }
                        device.1.notify_all();
                    } else {
                        state = device.1.wait(state).unwrap();
                    }
                }
            })
        };

        while !reply::is_ready(&*memory, 0, 1) {
            if Parking::GUEST.enter(&*memory, || look_again && reply::is_ready(&*memory, 0, 1)) {
                let mut state = device.0.lock().unwrap();
                state.asked = true;
                device.1.notify_all();
                while !std::mem::take(&mut state.answered) {
                    state = device.1.wait(state).unwrap();
                }
                drop(state);
                Parking::GUEST.leave(&*memory);
            }
        }
        device.0.lock().unwrap().over = true;
        device.1.notify_all();
        worker.join().unwrap();
        endpoint.join().unwrap();
    });
}

// Promise: V2
#[test]
fn loom_guest_never_sleeps_over_an_answer() {
    park_the_guest(Broken::Nothing, true, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_guest_parking_without_fence_fails() {
    park_the_guest(Broken::Fence, true, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_guest_parking_without_second_check_fails() {
    park_the_guest(Broken::Nothing, false, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_device_that_drops_a_wake_fails() {
    park_the_guest(Broken::Nothing, true, false);
}

/// The answer to an earlier call of the slot comes late; the thread that waits for ticket 2 takes ticket 2's answer, whole.
fn late_answer(broken: Broken) {
    loom::model(move || {
        let at = reply::slot_at(5);
        let memory = Arc::new(Memory::new(broken, &[at, at + 4, at + 8], [at + 16, at + 24]));
        let worker = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                reply::publish(&*memory, 5, 1, 700, &[1; 8]);
                reply::publish(&*memory, 5, 2, 0, &[2; 16]);
            })
        };
        while !reply::is_ready(&*memory, 5, 2) {
            thread::yield_now();
        }
        let mut buffer = [0; limits::REPLY_BYTES];
        assert_eq!(reply::take(&*memory, 5, &mut buffer), (0, &[2; 16][..]));
        worker.join().unwrap();
    });
}

// Promise: V3
#[test]
fn loom_late_answer_is_not_taken_for_another_call() {
    late_answer(Broken::Nothing);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_answer_without_release_fails() {
    late_answer(Broken::Release);
}

// Promise: V3
#[test]
fn loom_slot_is_used_again_after_its_answer_was_taken() {
    loom::model(|| {
        let at = reply::slot_at(0);
        let memory = Arc::new(Memory::new(Broken::Nothing, &[at, at + 4, at + 8], [at + 16]));
        // Stands for the ring: the last call that the worker was sent.
        let sent = Arc::new(AtomicU32::new(1));
        let worker = {
            let (memory, sent) = (Arc::clone(&memory), Arc::clone(&sent));
            thread::spawn(move || {
                for ticket in 1..=2u8 {
                    while sent.load(Ordering::Acquire) < u32::from(ticket) {
                        thread::yield_now();
                    }
                    reply::publish(&*memory, 0, u32::from(ticket), u32::from(ticket), &[ticket; 8]);
                }
            })
        };
        let mut buffer = [0; limits::REPLY_BYTES];
        for ticket in 1..=2u8 {
            sent.store(u32::from(ticket), Ordering::Release);
            while !reply::is_ready(&*memory, 0, u32::from(ticket)) {
                thread::yield_now();
            }
            let taken = reply::take(&*memory, 0, &mut buffer);
            assert_eq!(taken, (u32::from(ticket), &[ticket; 8][..]));
        }
        worker.join().unwrap();
    });
}
