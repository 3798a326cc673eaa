//! Functions of the program, which the guest runs while a stream waits.

use crate::{
    code::OUT_OF_MEMORY,
    guest::Guest,
    softgpu::Device,
    streams::{function, launch, ready, stream},
};
use sluice_kit::wait::eventually;
use sluice_protocol::{
    calls::wire,
    limits,
    record::Header,
    session::{self, HostCall},
};
use std::time::Duration;

/// Posts the call of a function.
fn call(guest: &mut Guest, slot: u32, token: u32) -> u64 {
    guest.work(wire::host_call::CALL, slot, |w| wire::host_call::Args { token }.put(w))
}

/// The next call, once the worker has published it.
pub(crate) fn next(guest: &Guest, after: HostCall) -> HostCall {
    eventually("a call", || session::host_call(&guest.words()) != after);
    session::host_call(&guest.words())
}

pub(crate) fn give_back(guest: &Guest, call: HostCall) {
    session::set_host_return(&guest.words(), call);
}

// Promise: C54
#[test]
fn stream_is_held_until_its_host_function_returns_and_others_are_not() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    stream(&mut guest, 0, 1);
    stream(&mut guest, 1, 2);
    let before = launch(&mut guest, 1, kernel, &[]);
    let sequence = call(&mut guest, 1, 77);
    let behind = launch(&mut guest, 1, kernel, &[]);
    let first = next(&guest, HostCall::default());
    assert_eq!(first.token, 77);
    assert!(guest.completed(1) >= before, "work before the function appears complete when it runs");
    let beside = launch(&mut guest, 2, kernel, &[]);
    guest.wait(2, beside);
    assert_eq!(guest.completed(1), before, "the stream is held");
    give_back(&guest, first);
    guest.wait(1, behind);
    assert!(behind > sequence);
}

// Promise: C54
#[test]
fn host_functions_of_a_stream_come_one_at_a_time_and_in_order() {
    let (mut guest, _arena) = ready();
    stream(&mut guest, 0, 1);
    let mut last = 0;
    for token in 0..300 {
        last = call(&mut guest, 1, token);
    }
    let mut latest = HostCall::default();
    for token in 0..300 {
        let now = next(&guest, latest);
        assert_eq!(now.token, token);
        give_back(&guest, now);
        latest = now;
    }
    guest.wait(1, last);
    assert_eq!(session::host_call(&guest.words()), latest, "no call comes twice");
}

// Promise: C54
#[test]
fn two_calls_of_one_token_are_two_calls() {
    let (mut guest, _arena) = ready();
    call(&mut guest, 0, 5);
    let last = call(&mut guest, 0, 5);
    let first = next(&guest, HostCall::default());
    give_back(&guest, first);
    let second = next(&guest, first);
    assert_eq!((second.token, second.number), (5, first.number + 1));
    std::thread::sleep(Duration::from_millis(20));
    assert!(guest.completed(0) < last, "the first return does not end the second call");
    give_back(&guest, second);
    guest.wait(0, last);
}

// Promise: C55
#[test]
fn returns_that_are_early_repeated_or_of_no_call_hold_or_free_only_their_own_stream() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    stream(&mut guest, 0, 1);
    // Early: the call returns at once.
    let early = HostCall::default().next(1);
    give_back(&guest, early);
    let sequence = call(&mut guest, 1, 1);
    guest.wait(1, sequence);
    // Repeated, and of no call: the stream stays held, and other streams go on.
    let held = call(&mut guest, 1, 2);
    let now = next(&guest, early);
    for word in [early, HostCall { number: now.number, token: 3 }, HostCall { number: u32::MAX, token: 2 }] {
        give_back(&guest, word);
        let beside = launch(&mut guest, 0, kernel, &[]);
        guest.wait(0, beside);
        assert!(guest.completed(1) < held);
    }
    give_back(&guest, now);
    guest.wait(1, held);
}

// Promise: C55
#[test]
fn host_calls_beyond_the_limit_are_refused_and_the_others_run() {
    let device = Device::new();
    let mut guest = device.guest(limits::MAPPED_RUNS, false);
    let credits = u32::try_from(limits::STREAM_CREDITS).unwrap();
    let slots = limits::HOST_FUNCTIONS / credits + 1;
    let refused = slots * credits - limits::HOST_FUNCTIONS;
    for slot in 1..=slots {
        stream(&mut guest, slot, slot);
    }
    // None of them returns meanwhile.
    for token in 0..slots * credits {
        let (slot, before) = (1 + token / credits, token % credits);
        let header = guest.header(wire::host_call::CALL);
        let header = Header { stream: slot, sequence: u64::from(before) + 1, ..header };
        guest.put(header, |w| wire::host_call::Args { token }.put(w));
        guest.ring();
    }
    eventually("the refusals", || guest.late_error(0) == (refused, OUT_OF_MEMORY));
    // The first calls return; there is room again.
    let mut latest = HostCall::default();
    for _ in 0..10 {
        latest = next(&guest, latest);
        give_back(&guest, latest);
    }
    next(&guest, latest);
    let last = call(&mut guest, 0, 1);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(
        (guest.late_error(0).0, guest.completed(0)),
        (refused, last - 1),
        "accepted, and not complete"
    );
}

// Promise: C55
#[test]
fn worker_ends_with_its_device_while_a_host_function_never_returns() {
    let (mut guest, _arena) = ready();
    call(&mut guest, 0, 1);
    next(&guest, HostCall::default());
    guest.hang_up();
    assert_eq!(guest.ended().code(), Some(0));
}

// Promise: C54
#[test]
fn host_function_behind_a_fault_is_not_called() {
    let (mut guest, _arena) = ready();
    let fault = function(&mut guest, 0, "fault");
    launch(&mut guest, 0, fault, &[]);
    call(&mut guest, 0, 1);
    eventually("the failure", || guest.sticky() != 0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(session::host_call(&guest.words()), HostCall::default());
    assert!(guest.worker.try_wait().unwrap().is_none());
}
