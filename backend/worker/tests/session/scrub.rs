//! Memory that is freed and allocated again in the same process, on the software GPU, which clears nothing by itself.

use crate::{
    guest::{ARENA, Arena, Guest},
    lender::Terms,
    softgpu::Device,
};
use sluice_protocol::{
    calls::wire,
    field::{ArenaAddress, DeviceAddress, Size},
    limits,
};

const MIB: u64 = 1 << 20;
const PATTERN: u8 = 0x5c;
/// A pool that keeps what is freed.
const POOL: u32 = 20;
/// What the worker keeps when it is freed; what goes back to the lender is that one's to clear. One that shares a chunk, and
/// one with chunks of its own in a pool.
const KEPT: [(u32, u64); 2] = [(0, 100_000), (POOL, 6 * MIB)];

fn allocate(guest: &mut Guest, pool: u32, bytes: u64) -> u64 {
    if pool == 0 {
        return guest.allocate(bytes).unwrap();
    }
    let (result, fields) =
        guest.call(wire::pool_allocate::CALL, |w| wire::pool_allocate::put(w, pool, Size(bytes)));
    assert_eq!(result, 0);
    wire::pool_allocate::Reply::get(&fields).unwrap().address
}

fn contents(guest: &mut Guest, arena: &Arena, address: u64, bytes: u64) -> Vec<u8> {
    let last = guest.work(wire::copy_from_device::CALL, 0, |w| {
        wire::copy_from_device::put(w, ArenaAddress(ARENA), DeviceAddress(address), bytes)
    });
    guest.wait(0, last);
    arena.read(0, usize::try_from(bytes).unwrap())
}

/// Bytes of the pattern that are found where they were freed.
fn found(scrub_every_free: bool) -> [u64; 2] {
    let device = Device::small(Terms { limit: 32 * MIB, ..Terms::default() });
    let mut guest = device.guest(limits::MAPPED_RUNS, scrub_every_free);
    let arena = guest.attach(1, ARENA, 8 * MIB);
    let keep = guest.call(wire::pool_threshold::CALL, |w| wire::pool_threshold::put(w, POOL, 0, u64::MAX));
    assert_eq!(keep.0, 0);
    KEPT.map(|(pool, bytes)| {
        let address = allocate(&mut guest, pool, bytes);
        let last = guest.work(wire::fill::CALL, 0, |w| {
            wire::fill::put(w, DeviceAddress(address), 0, 1, PATTERN.into(), bytes, 1)
        });
        guest.wait(0, last);
        assert!(contents(&mut guest, &arena, address, bytes).iter().all(|byte| *byte == PATTERN));
        guest.post(wire::memory_free::CALL, |w| wire::memory_free::put(w, DeviceAddress(address)));
        let again = allocate(&mut guest, pool, bytes);
        assert_eq!(again, address, "the same memory");
        let seen = contents(&mut guest, &arena, again, bytes);
        seen.iter().map(|byte| u64::from(*byte == PATTERN)).sum()
    })
}

// Promise: S6
#[test]
fn nothing_of_a_freed_allocation_is_in_the_next_where_every_free_is_scrubbed() {
    assert_eq!(found(true), [0, 0]);
    // Without the option the process finds its own bytes again, so the test above would see them.
    assert_eq!(found(false), KEPT.map(|(_, bytes)| bytes));
}
