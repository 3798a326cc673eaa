//! Lent memory: taking, giving, recalls, grants, the page, several workers of one VM.

use crate::{
    arbiter::FakeArbiter,
    code::{DEVICE_UNAVAILABLE, INVALID_VALUE, OUT_OF_MEMORY},
    guest::{ARENA, Guest},
    streams::{function, image, launch},
};
use sluice_kit::wait::eventually;
use sluice_messages::custody::Growth;
use sluice_protocol::{
    calls::wire,
    field::{AccessFlags, ArenaIn, ArenaOut, DeviceAddress, ElementSize, Ordinal, Size, Writer},
    limits, session,
};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn free(guest: &mut Guest, address: u64) {
    guest.post(wire::memory_free::CALL, |w| {
        wire::memory_free::Args { address: DeviceAddress(address) }.put(w)
    });
}

// Promise: Q1
#[test]
fn lent_memory_equals_used_memory_to_the_byte() {
    let arbiter = FakeArbiter::new(97 * MIB);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    assert_eq!(guest.info(), (96 * MIB, 96 * MIB), "counted in units of 2 MiB");
    let large = guest.allocate(33 * MIB).unwrap();
    assert_eq!(guest.info(), (62 * MIB, 96 * MIB));
    assert_eq!(arbiter.lent(), 34 * MIB);
    let small = guest.allocate(1).unwrap();
    assert_eq!(guest.info().0, 60 * MIB);
    assert_eq!(guest.allocate(61 * MIB), Err(OUT_OF_MEMORY));
    assert_eq!((guest.info().0, arbiter.lent()), (60 * MIB, 36 * MIB), "a refusal changes nothing");
    free(&mut guest, small);
    assert_eq!(guest.info().0, 62 * MIB, "a pool without users is free");
    assert_eq!(arbiter.lent(), 36 * MIB, "and the worker keeps its chunk");
    guest.allocate(62 * MIB).unwrap();
    assert_eq!(
        (guest.info().0, arbiter.lent()),
        (0, 96 * MIB),
        "idle memory is given up for an allocation that needs it"
    );
    free(&mut guest, large);
    assert_eq!(guest.info().0, 34 * MIB, "the next call observes a post");
    drop(guest);
    eventually("the dead worker's memory", || arbiter.lent() == 0);
}

// Promise: Q2
#[test]
fn workers_of_a_vm_share_its_limit_and_return_idle_memory_on_recall() {
    let arbiter = FakeArbiter::new(64 * MIB);
    let (mut one, mut two) = (Guest::of(&arbiter), Guest::of(&arbiter));
    one.begin();
    two.begin();
    let held = one.allocate(40 * MIB).unwrap();
    assert_eq!(two.info(), (24 * MIB, 64 * MIB), "the other worker's memory is not free");
    assert_eq!(two.allocate(26 * MIB), Err(OUT_OF_MEMORY));
    let freed = Instant::now();
    free(&mut one, held);
    let small = one.allocate(100).unwrap();
    free(&mut one, small);
    assert_eq!(one.info().0, 64 * MIB);
    // A busy machine may need for this test as long as freed memory is kept.
    let lent = arbiter.lent();
    let late = freed.elapsed() >= Duration::from_millis(limits::KEPT_MILLISECONDS / 2);
    assert!(lent == 42 * MIB || late, "an idle pool, and the allocation that was freed: {lent}");
    arbiter.recall(42 * MIB);
    eventually("all of it", || arbiter.lent() == 0);
    two.allocate(64 * MIB).unwrap();
    assert_eq!(one.info().0, 0);
    assert_eq!(one.allocate(1), Err(OUT_OF_MEMORY));
}

#[test]
fn driver_grows_only_with_a_grant() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let _arena = image(&guest);
    function(&mut guest, 0, "work");
    let set = guest.call(wire::context_set_limit::CALL, |w| {
        wire::context_set_limit::Args { limit: 0, value: 4096 }.put(w)
    });
    assert_eq!(set.0, 0);
    let (grown, _) = arbiter.grants();
    // A library takes memory when it is loaded, and at its first use in a context.
    let expected = [Growth::Context, Growth::Module, Growth::Module, Growth::Limit];
    assert_eq!(grown, expected.map(|reason| reason as u32));
    eventually("the end of every grant", || arbiter.grants().1 == 0);
    assert_eq!(arbiter.pinned(), MIB);
}

#[test]
fn worker_lists_the_processes_of_its_own_vm() {
    let arbiter = FakeArbiter::new(0);
    let (mut one, mut two) = (Guest::of(&arbiter), Guest::of(&arbiter));
    one.begin();
    two.begin();
    one.allocate(4 * MIB).unwrap();
    two.allocate(6 * MIB).unwrap();
    let mut listed = Vec::new();
    for index in 0..3 {
        let (result, fields) = one.call(wire::process_info::CALL, |w| {
            wire::process_info::Args { device: Ordinal(0), index }.put(w)
        });
        assert_eq!(result, 0);
        let reply = wire::process_info::Reply::get(&fields).unwrap();
        if reply.found {
            listed.push((reply.process, reply.bytes));
        }
    }
    assert_eq!(listed, [(42, 4 * MIB), (42, 6 * MIB)]);
    let (result, fields) =
        two.call(wire::device_memory::CALL, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w));
    assert_eq!(result, 0);
    let reply = wire::device_memory::Reply::get(&fields).unwrap();
    assert_eq!((reply.free, reply.total), two.info());
    assert_ne!(
        two.call(wire::device_memory::CALL, |w| wire::device_memory::Args { device: Ordinal(1) }.put(w)).0,
        0
    );
}

// Promise: F2
#[test]
fn session_ends_when_its_arbiter_ends() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    arbiter.hang_up();
    eventually("LOST", || guest.state() == session::LOST);
    assert_eq!(session::lost(&guest.words()), Some(DEVICE_UNAVAILABLE));
    assert_eq!(guest.ended().code(), Some(1));
}

fn pool_allocate(guest: &mut Guest, pool: u32, bytes: u64) -> u64 {
    let (result, fields) = guest.call(wire::memory_allocate::CALL, |w| {
        wire::memory_allocate::Args { pool, bytes: Size(bytes) }.put(w)
    });
    assert_eq!(result, 0);
    wire::memory_allocate::Reply::get(&fields).unwrap().address
}

fn usage(guest: &mut Guest, pool: u32) -> [u64; 4] {
    let (result, fields) = guest.call(wire::pool_usage::CALL, |w| {
        wire::pool_usage::Args { pool, device: Ordinal(0), reset_reserved: false, reset_used: false }.put(w)
    });
    assert_eq!(result, 0);
    let reply = wire::pool_usage::Reply::get(&fields).unwrap();
    [reply.reserved, reply.reserved_high, reply.used, reply.used_high]
}

// Promise: Q3
#[test]
fn ordered_free_takes_effect_when_its_stream_reaches_it() {
    let arbiter = FakeArbiter::new(64 * MIB);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = image(&guest);
    let hold = function(&mut guest, 0, "hold_p1");
    let large = pool_allocate(&mut guest, 1, 32 * MIB);
    assert_eq!(usage(&mut guest, 1), [32 * MIB; 4]);
    let word = ARENA + 4096;
    launch(&mut guest, 0, hold, &word.to_le_bytes());
    let freed = guest.work(wire::memory_free_ordered::CALL, 0, |w| {
        wire::memory_free_ordered::Args { address: DeviceAddress(large) }.put(w)
    });
    assert_eq!(guest.info().0, 32 * MIB, "the stream is held back");
    assert_eq!(guest.allocate(34 * MIB), Err(OUT_OF_MEMORY));
    arena.write(4096, &1_u32.to_le_bytes());
    guest.wait(0, freed);
    assert_eq!(guest.info().0, 64 * MIB, "a guest that sees the completion finds the memory free");
    assert_eq!(usage(&mut guest, 1), [0, 32 * MIB, 0, 32 * MIB]);
    let header = guest.on(wire::memory_free_ordered::CALL, 0);
    let again =
        guest.ask(header, |w| wire::memory_free_ordered::Args { address: DeviceAddress(large) }.put(w));
    assert_eq!(again.0, INVALID_VALUE, "freed twice");
    guest.wait(0, header.sequence);
}

// Promise: Q3
#[test]
fn pool_keeps_memory_up_to_its_threshold_and_gives_it_up_on_trim() {
    let arbiter = FakeArbiter::new(64 * MIB);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let threshold = |w: &mut Writer<'_>| {
        wire::pool_threshold::Args { pool: 20, device: Ordinal(0), bytes: u64::MAX }.put(w)
    };
    assert_eq!(guest.call(wire::pool_threshold::CALL, threshold).0, 0);
    let (large, small) = (pool_allocate(&mut guest, 20, 8 * MIB), pool_allocate(&mut guest, 20, 100));
    assert_eq!(usage(&mut guest, 20), [10 * MIB, 10 * MIB, 8 * MIB + 512, 8 * MIB + 512]);
    for address in [large, small] {
        free(&mut guest, address);
    }
    assert_eq!(usage(&mut guest, 20), [10 * MIB, 10 * MIB, 0, 8 * MIB + 512]);
    assert_eq!((guest.info().0, arbiter.lent()), (64 * MIB, 10 * MIB), "kept memory counts as free");
    assert_eq!(pool_allocate(&mut guest, 20, 8 * MIB), large, "kept memory is allocated again");
    free(&mut guest, large);
    assert_eq!(
        guest.call(wire::pool_trim::CALL, |w| wire::pool_trim::Args { pool: 20, keep: 2 * MIB }.put(w)).0,
        0
    );
    assert_eq!(usage(&mut guest, 20)[0], 2 * MIB);
    pool_allocate(&mut guest, 20, 8 * MIB);
    guest.allocate(56 * MIB).unwrap();
    assert_eq!(arbiter.lent(), 64 * MIB, "kept memory is given up for an allocation that needs it");
    let other = guest.call(wire::memory_allocate::CALL, |w| {
        wire::memory_allocate::Args { pool: 5000, bytes: Size(1) }.put(w)
    });
    assert_eq!(other.0, INVALID_VALUE, "there is no such pool");
}

fn words<const N: usize>((result, fields): sluice_kit::guest::Answer) -> Result<[u64; N], u32> {
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
    let arbiter = FakeArbiter::new(64 * MIB);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let create = |guest: &mut Guest, bytes| {
        words::<1>(guest.call(wire::phys_alloc_create::CALL, |w| {
            wire::phys_alloc_create::Args { device: Ordinal(0), bytes }.put(w)
        }))
    };
    assert_eq!(create(&mut guest, 66 * MIB), Err(OUT_OF_MEMORY));
    assert_eq!(create(&mut guest, MIB), Err(INVALID_VALUE), "not a multiple of the granularity");
    let [block] = create(&mut guest, 36 * MIB).unwrap();
    assert_eq!(guest.info().0, 28 * MIB, "charged when it is made");
    let reserve = |guest: &mut Guest, bytes| {
        words::<1>(guest.call(wire::va_range_reserve::CALL, |w| {
            wire::va_range_reserve::Args { bytes, alignment: 0, hint: 0 }.put(w)
        }))
    };
    let [range] = reserve(&mut guest, 1 << 35).unwrap();
    assert_eq!(guest.info().0, 28 * MIB, "addresses cost nothing");
    let map = |guest: &mut Guest, at| {
        guest
            .call(wire::phys_alloc_map::CALL, |w| {
                wire::phys_alloc_map::Args { allocation: block, address: at, bytes: 36 * MIB }.put(w)
            })
            .0
    };
    assert_eq!(map(&mut guest, range), 0);
    assert_eq!(map(&mut guest, range + 2 * MIB), INVALID_VALUE, "the range is taken");
    assert_eq!(map(&mut guest, range + 36 * MIB), 0, "a block may be mapped twice at adjacent addresses");
    let fill = |guest: &mut Guest| {
        let header = guest.on(wire::memset::CALL, 0);
        let at = DeviceAddress(range + 30 * MIB);
        let result = guest
            .ask(header, |w| {
                wire::memset::Args {
                    to: at,
                    pitch: 0,
                    element: ElementSize::Byte,
                    value: 7,
                    width: 10 * MIB,
                    height: 1,
                }
                .put(w)
            })
            .0;
        guest.wait(0, header.sequence);
        result
    };
    assert_eq!(fill(&mut guest), INVALID_VALUE, "the mapping has no access yet");
    let access = |guest: &mut Guest, access| {
        let put = |w: &mut Writer<'_>| {
            wire::va_range_set_access::Args { address: range, bytes: 72 * MIB, device: Ordinal(0), access }
                .put(w)
        };
        guest.call(wire::va_range_set_access::CALL, put).0
    };
    assert_eq!(access(&mut guest, AccessFlags::ReadWrite), 0);
    assert_eq!(fill(&mut guest), 0);
    guest.post(wire::phys_alloc_release::CALL, |w| {
        wire::phys_alloc_release::Args { allocation: block }.put(w)
    });
    assert_eq!(guest.info().0, 28 * MIB, "the block is still mapped");
    let free_range = |guest: &mut Guest| {
        guest
            .call(wire::va_range_free::CALL, |w| {
                wire::va_range_free::Args { address: range, bytes: 1 << 35 }.put(w)
            })
            .0
    };
    assert_eq!(free_range(&mut guest), INVALID_VALUE, "the range is still mapped");
    let unmap = |guest: &mut Guest, at| {
        guest
            .call(wire::va_range_unmap::CALL, |w| {
                wire::va_range_unmap::Args { address: at, bytes: 36 * MIB }.put(w)
            })
            .0
    };
    assert_eq!(unmap(&mut guest, range), 0);
    assert_eq!(fill(&mut guest), INVALID_VALUE, "unmapped");
    assert_eq!(guest.info().0, 28 * MIB);
    assert_eq!(unmap(&mut guest, range + 36 * MIB), 0);
    assert_eq!(guest.info().0, 64 * MIB);
    assert_eq!(unmap(&mut guest, range), INVALID_VALUE, "unmapped twice");
    assert_eq!(free_range(&mut guest), 0);
}

// Promise: Q5
#[test]
fn processes_of_a_vm_share_memory_and_are_charged_once() {
    let arbiter = FakeArbiter::new(64 * MIB);
    let (mut one, mut two) = (Guest::of(&arbiter), Guest::of(&arbiter));
    one.begin();
    two.begin();
    let (arena, theirs) = (image(&one), image(&two));
    for bytes in [100, 5 * MIB] {
        let before = one.info().0;
        let address = one.allocate(bytes).unwrap();
        arena.write(8192, b"from one process to another");
        let last = one.work(wire::memcpy_htod::CALL, 0, |w| {
            wire::memcpy_htod::Args {
                to: DeviceAddress(address),
                from: ArenaIn { address: ARENA + 8192, bytes: 27 },
            }
            .put(w)
        });
        one.wait(0, last);
        let shared = one.call(wire::ipc_export::CALL, |w| {
            wire::ipc_export::Args { address: DeviceAddress(address) }.put(w)
        });
        let [unit, low, high, offset] = words::<4>(shared).unwrap();
        let share = u128::from(high) << 64 | u128::from(low);
        assert_eq!(unit, 0);
        let charged = one.info().0;
        let open = |guest: &mut Guest, share| {
            words::<1>(guest.call(wire::ipc_open::CALL, |w| {
                wire::ipc_open::Args { device: Ordinal(0), share, offset, bytes }.put(w)
            }))
        };
        let [opened] = open(&mut two, share).unwrap();
        assert_eq!(two.info().0, charged, "charged once");
        let last = two.work(wire::memcpy_dtoh::CALL, 0, |w| {
            wire::memcpy_dtoh::Args {
                to: ArenaOut { address: ARENA + 8192, bytes: 27 },
                from: DeviceAddress(opened),
            }
            .put(w)
        });
        two.wait(0, last);
        assert_eq!(theirs.read(8192, 27), b"from one process to another");
        assert_eq!(open(&mut two, share + 100), Err(INVALID_VALUE), "there is no such share");
        assert_eq!(open(&mut two, low.into()), Err(INVALID_VALUE), "half of a share's number is no share");
        free(&mut one, address);
        one.info();
        assert!(two.info().0 < before, "the other process still has the memory");
        free(&mut two, opened);
        assert_eq!(two.info().0, before);
    }
}
