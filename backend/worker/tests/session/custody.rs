//! Memory that is lent: taking, giving, recalls, grants, the page, several workers of one VM.

use crate::{
    guest::{ARENA, Guest, eventually},
    lender::Lender,
    streams::{function, image, launch},
};
use sluice_messages::custody::{Growth, UNIT};
use sluice_protocol::{
    calls::wire,
    field::{ArenaAddress, DeviceAddress, Size, Writer},
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
    // A library takes memory where it is loaded, and where it is used first.
    let expected = [Growth::Context, Growth::Module, Growth::Module, Growth::Limit];
    assert_eq!(grown, expected.map(|reason| reason as u32));
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

fn pool_allocate(guest: &mut Guest, pool: u32, bytes: u64) -> u64 {
    let (result, fields) =
        guest.call(wire::pool_allocate::CALL, |w| wire::pool_allocate::put(w, pool, Size(bytes)));
    assert_eq!(result, 0);
    wire::pool_allocate::Reply::get(&fields).unwrap().address
}

fn usage(guest: &mut Guest, pool: u32) -> [u64; 4] {
    let (result, fields) = guest.call(wire::pool_usage::CALL, |w| wire::pool_usage::put(w, pool, 0, 0));
    assert_eq!(result, 0);
    let reply = wire::pool_usage::Reply::get(&fields).unwrap();
    [reply.reserved, reply.reserved_high, reply.used, reply.used_high]
}

// Promise: Q3
#[test]
fn memory_is_freed_when_its_stream_comes_to_it() {
    let lender = Lender::new(64 * MIB);
    let mut guest = Guest::of(&lender);
    guest.begin();
    let arena = image(&guest);
    let hold = function(&mut guest, 0, "hold_p1");
    let large = pool_allocate(&mut guest, 1, 32 * MIB);
    assert_eq!(usage(&mut guest, 1), [32 * MIB; 4]);
    let word = ARENA + 4096;
    launch(&mut guest, 0, hold, &word.to_le_bytes());
    let freed = guest.work(wire::memory_free_ordered::CALL, 0, |w| {
        wire::memory_free_ordered::put(w, DeviceAddress(large))
    });
    assert_eq!(guest.info().0, 32 * MIB, "the stream is held back");
    assert_eq!(guest.allocate(34 * MIB), Err(OUT_OF_MEMORY));
    arena.write(4096, &1_u32.to_le_bytes());
    guest.wait(0, freed);
    assert_eq!(guest.info().0, 64 * MIB, "whoever sees that it is done finds the memory free");
    assert_eq!(usage(&mut guest, 1), [0, 32 * MIB, 0, 32 * MIB]);
    let header = guest.on(wire::memory_free_ordered::CALL, 0);
    let again = guest.ask(header, |w| wire::memory_free_ordered::put(w, DeviceAddress(large)));
    assert_eq!(again.0, 1, "freed twice");
    guest.wait(0, header.sequence);
}

// Promise: Q3
#[test]
fn a_pool_keeps_what_it_is_told_to_and_gives_it_up_when_asked() {
    let lender = Lender::new(64 * MIB);
    let mut guest = Guest::of(&lender);
    guest.begin();
    let threshold = |w: &mut Writer<'_>| wire::pool_threshold::put(w, 20, 0, u64::MAX);
    assert_eq!(guest.call(wire::pool_threshold::CALL, threshold).0, 0);
    let (large, small) = (pool_allocate(&mut guest, 20, 8 * MIB), pool_allocate(&mut guest, 20, 100));
    assert_eq!(usage(&mut guest, 20), [10 * MIB, 10 * MIB, 8 * MIB + 512, 8 * MIB + 512]);
    for address in [large, small] {
        free(&mut guest, address);
    }
    assert_eq!(usage(&mut guest, 20), [10 * MIB, 10 * MIB, 0, 8 * MIB + 512]);
    assert_eq!((guest.info().0, lender.lent()), (64 * MIB, 10 * MIB), "kept, and yet free");
    assert_eq!(pool_allocate(&mut guest, 20, 8 * MIB), large, "used again as it is");
    free(&mut guest, large);
    assert_eq!(guest.call(wire::pool_trim::CALL, |w| wire::pool_trim::put(w, 20, 2 * MIB)).0, 0);
    assert_eq!(usage(&mut guest, 20)[0], 2 * MIB);
    pool_allocate(&mut guest, 20, 8 * MIB);
    guest.allocate(56 * MIB).unwrap();
    assert_eq!(lender.lent(), 64 * MIB, "and given up for what needs it");
    let other = guest.call(wire::pool_allocate::CALL, |w| wire::pool_allocate::put(w, 5000, Size(1)));
    assert_eq!(other.0, 1, "no such pool");
}

fn words<const N: usize>((result, fields): crate::guest::Answer) -> Result<[u64; N], u32> {
    if result != 0 {
        return Err(result);
    }
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(fields.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap());
    }
    Ok(words)
}

// Promise: Q4
#[test]
fn mapped_memory_is_charged_until_it_is_released_and_unmapped() {
    let lender = Lender::new(64 * MIB);
    let mut guest = Guest::of(&lender);
    guest.begin();
    let create = |guest: &mut Guest, bytes| {
        words::<1>(guest.call(wire::block_create::CALL, |w| wire::block_create::put(w, 0, bytes)))
    };
    assert_eq!(create(&mut guest, 66 * MIB), Err(OUT_OF_MEMORY));
    assert_eq!(create(&mut guest, MIB), Err(1), "not the granularity");
    let [block] = create(&mut guest, 36 * MIB).unwrap();
    assert_eq!(guest.info().0, 28 * MIB, "charged when it is made");
    let reserve = |guest: &mut Guest, bytes| {
        words::<1>(guest.call(wire::range_reserve::CALL, |w| wire::range_reserve::put(w, bytes, 0, 0)))
    };
    let [range] = reserve(&mut guest, 1 << 35).unwrap();
    assert_eq!(guest.info().0, 28 * MIB, "addresses cost nothing");
    let map = |guest: &mut Guest, at| {
        guest.call(wire::block_map::CALL, |w| wire::block_map::put(w, block, at, 36 * MIB)).0
    };
    assert_eq!(map(&mut guest, range), 0);
    assert_eq!(map(&mut guest, range + 2 * MIB), 1, "taken");
    assert_eq!(map(&mut guest, range + 36 * MIB), 0, "twice, side by side");
    let fill = |guest: &mut Guest| {
        let header = guest.on(wire::fill::CALL, 0);
        let at = DeviceAddress(range + 30 * MIB);
        let result = guest.ask(header, |w| wire::fill::put(w, at, 0, 1, 7, 10 * MIB, 1)).0;
        guest.wait(0, header.sequence);
        result
    };
    assert_eq!(fill(&mut guest), 1, "no access yet");
    let access = |guest: &mut Guest, access| {
        let put = |w: &mut Writer<'_>| wire::range_access::put(w, range, 72 * MIB, 0, access);
        guest.call(wire::range_access::CALL, put).0
    };
    assert_eq!(access(&mut guest, 3), 0);
    assert_eq!(fill(&mut guest), 0);
    guest.post(wire::block_release::CALL, |w| wire::block_release::put(w, block));
    assert_eq!(guest.info().0, 28 * MIB, "still mapped");
    let free_range = |guest: &mut Guest| {
        guest.call(wire::range_free::CALL, |w| wire::range_free::put(w, range, 1 << 35)).0
    };
    assert_eq!(free_range(&mut guest), 1, "still mapped");
    let unmap = |guest: &mut Guest, at| {
        guest.call(wire::range_unmap::CALL, |w| wire::range_unmap::put(w, at, 36 * MIB)).0
    };
    assert_eq!(unmap(&mut guest, range), 0);
    assert_eq!(fill(&mut guest), 1, "unmapped");
    assert_eq!(guest.info().0, 28 * MIB);
    assert_eq!(unmap(&mut guest, range + 36 * MIB), 0);
    assert_eq!(guest.info().0, 64 * MIB);
    assert_eq!(unmap(&mut guest, range), 1, "unmapped twice");
    assert_eq!(free_range(&mut guest), 0);
}

// Promise: Q5
#[test]
fn processes_of_a_vm_share_memory_and_are_charged_once() {
    let lender = Lender::new(64 * MIB);
    let (mut one, mut two) = (Guest::of(&lender), Guest::of(&lender));
    one.begin();
    two.begin();
    let (arena, theirs) = (image(&one), image(&two));
    for bytes in [100, 5 * MIB] {
        let before = one.info().0;
        let address = one.allocate(bytes).unwrap();
        arena.write(8192, b"from one process to another");
        let last = one.work(wire::copy_to_device::CALL, 0, |w| {
            wire::copy_to_device::put(w, DeviceAddress(address), ArenaAddress(ARENA + 8192), 27)
        });
        one.wait(0, last);
        let shared =
            one.call(wire::memory_share::CALL, |w| wire::memory_share::put(w, DeviceAddress(address)));
        let [unit, low, high, offset] = words::<4>(shared).unwrap();
        let share = u128::from(high) << 64 | u128::from(low);
        assert_eq!(unit, 0);
        let charged = one.info().0;
        let open = |guest: &mut Guest, share| {
            words::<1>(
                guest.call(wire::memory_open::CALL, |w| wire::memory_open::put(w, share, offset, bytes)),
            )
        };
        let [opened] = open(&mut two, share).unwrap();
        assert_eq!(two.info().0, charged, "charged once");
        let last = two.work(wire::copy_from_device::CALL, 0, |w| {
            wire::copy_from_device::put(w, ArenaAddress(ARENA + 8192), DeviceAddress(opened), 27)
        });
        two.wait(0, last);
        assert_eq!(theirs.read(8192, 27), b"from one process to another");
        assert_eq!(open(&mut two, share + 100), Err(1), "no such share");
        assert_eq!(open(&mut two, low.into()), Err(1), "half of a number is none");
        free(&mut one, address);
        one.info();
        assert!(two.info().0 < before, "the other still has it");
        free(&mut two, opened);
        assert_eq!(two.info().0, before);
    }
}
