//! Memory that is lent: taking, giving, recalls, grants, the page, several workers of one VM.

use crate::{
    guest::{Guest, eventually},
    lender::Lender,
    streams::{function, image},
};
use sluice_protocol::{
    calls::wire,
    custody::{Growth, UNIT},
    field::DeviceAddress,
    session,
};

const MIB: u64 = 1 << 20;
const OUT_OF_MEMORY: u32 = 2;

fn free(guest: &mut Guest, address: u64) {
    guest.post(wire::memory_free::CALL, |w| wire::memory_free::put(w, DeviceAddress(address)));
}

// Promise: Q1
#[test]
fn what_is_lent_is_what_is_used_to_the_byte() {
    let lender = Lender::new(97 * MIB);
    let mut guest = Guest::of(&lender);
    guest.begin();
    assert_eq!(guest.info(), (96 * MIB, 96 * MIB), "in units of 2 MiB");
    let large = guest.allocate(33 * MIB).unwrap();
    assert_eq!(guest.info(), (62 * MIB, 96 * MIB));
    assert_eq!(lender.lent(), 34 * MIB);
    let small = guest.allocate(1).unwrap();
    assert_eq!(guest.info().0, 60 * MIB);
    assert_eq!(guest.allocate(61 * MIB), Err(OUT_OF_MEMORY));
    assert_eq!((guest.info().0, lender.lent()), (60 * MIB, 36 * MIB), "a refusal changes nothing");
    free(&mut guest, small);
    assert_eq!(guest.info().0, 62 * MIB, "a pool without users is free");
    assert_eq!(lender.lent(), 36 * MIB, "and kept");
    guest.allocate(62 * MIB).unwrap();
    assert_eq!((guest.info().0, lender.lent()), (0, 96 * MIB), "given for what needs it");
    free(&mut guest, large);
    assert_eq!(guest.info().0, 34 * MIB, "a post is seen by the next call");
    drop(guest);
    eventually("the dead worker's memory", || lender.lent() == 0);
}

// Promise: Q2
#[test]
fn workers_of_a_vm_share_its_limit_and_idle_memory_is_recalled() {
    let lender = Lender::new(64 * MIB);
    let (mut one, mut two) = (Guest::of(&lender), Guest::of(&lender));
    one.begin();
    two.begin();
    let held = one.allocate(40 * MIB).unwrap();
    assert_eq!(two.info(), (24 * MIB, 64 * MIB), "what the other has is not free");
    assert_eq!(two.allocate(26 * MIB), Err(OUT_OF_MEMORY));
    free(&mut one, held);
    let small = one.allocate(100).unwrap();
    free(&mut one, small);
    assert_eq!(one.info().0, 64 * MIB);
    assert_eq!(lender.lent(), UNIT, "an idle pool");
    lender.recall(UNIT);
    eventually("the idle pool", || lender.lent() == 0);
    two.allocate(64 * MIB).unwrap();
    assert_eq!(one.info().0, 0);
    assert_eq!(one.allocate(1), Err(OUT_OF_MEMORY));
}

#[test]
fn the_driver_grows_only_with_leave() {
    let lender = Lender::new(0);
    let mut guest = Guest::of(&lender);
    guest.begin();
    let _arena = image(&guest);
    function(&mut guest, 0, "work");
    let set = guest.call(wire::context_set_limit::CALL, |w| wire::context_set_limit::put(w, 0, 4096));
    assert_eq!(set.0, 0);
    let (grown, _) = lender.grants();
    let expected = [Growth::Context, Growth::Module];
    assert_eq!(grown[..2], expected.map(|reason| reason as u32));
    assert_eq!(grown[2..], [Growth::Limit as u32]);
    eventually("the end of every grant", || lender.grants().1 == 0);
    assert_eq!(lender.pinned(), MIB);
}

#[test]
fn a_vm_sees_its_own_processes() {
    let lender = Lender::new(0);
    let (mut one, mut two) = (Guest::of(&lender), Guest::of(&lender));
    one.begin();
    two.begin();
    one.allocate(4 * MIB).unwrap();
    two.allocate(6 * MIB).unwrap();
    let mut listed = Vec::new();
    for index in 0..3 {
        let (result, fields) = one.call(wire::process_info::CALL, |w| wire::process_info::put(w, 0, index));
        assert_eq!(result, 0);
        let reply = wire::process_info::Reply::get(&fields).unwrap();
        if reply.found {
            listed.push((reply.process, reply.bytes));
        }
    }
    assert_eq!(listed, [(42, 4 * MIB), (42, 6 * MIB)]);
    let (result, fields) = two.call(wire::device_memory::CALL, |w| wire::device_memory::put(w, 0));
    assert_eq!(result, 0);
    let reply = wire::device_memory::Reply::get(&fields).unwrap();
    assert_eq!((reply.free, reply.total), two.info());
    assert_ne!(two.call(wire::device_memory::CALL, |w| wire::device_memory::put(w, 1)).0, 0);
}

// Promise: F2
#[test]
fn a_session_ends_with_its_lender() {
    let lender = Lender::new(0);
    let mut guest = Guest::of(&lender);
    guest.begin();
    lender.hang_up();
    eventually("LOST", || guest.state() == session::LOST);
    assert_eq!(session::lost(&guest.words()), Some(46));
    assert_eq!(guest.ended().code(), Some(1));
}
