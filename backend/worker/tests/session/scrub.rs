//! Memory that is freed and allocated again in the same process, on the software GPU, which clears no memory by itself.

use crate::{
    arbiter::Terms,
    guest::{ARENA, Arena, Guest},
    softgpu::Device,
};
use sluice_protocol::{
    calls::wire,
    field::{ArenaOut, DeviceAddress, ElementSize, Ordinal, Size},
    limits,
};

const MIB: u64 = 1 << 20;
const PATTERN: u8 = 0x5c;
/// A pool that keeps freed memory.
const POOL: u32 = 20;
/// Allocations whose memory the worker keeps when they are freed (the arbiter clears chunks that go back to it): one that
/// shares a chunk, and one with chunks of its own in a pool.
const KEPT: [(u32, u64); 2] = [(0, 100_000), (POOL, 6 * MIB)];

fn allocate(guest: &mut Guest, pool: u32, bytes: u64) -> u64 {
    if pool == 0 {
        return guest.allocate(bytes).unwrap();
    }
    let (result, fields) = guest.call(wire::memory_allocate::CALL, |w| {
        wire::memory_allocate::Args { pool, bytes: Size(bytes) }.put(w)
    });
    assert_eq!(result, 0);
    wire::memory_allocate::Reply::get(&fields).unwrap().address
}

fn contents(guest: &mut Guest, arena: &Arena, address: u64, bytes: u64) -> Vec<u8> {
    let last = guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
        wire::memcpy_dtoh::Args { to: ArenaOut { address: ARENA, bytes }, from: DeviceAddress(address) }
            .put(w)
    });
    guest.wait(0, last);
    arena.read(0, usize::try_from(bytes).unwrap())
}

/// The number of bytes of the pattern that are found where they were freed.
fn found(scrub_every_free: bool) -> [u64; 2] {
    let device = Device::small(Terms { limit: 32 * MIB, ..Terms::default() });
    let mut guest = device.guest(limits::MAPPED_RUNS, scrub_every_free);
    let arena = guest.attach(1, ARENA, 8 * MIB);
    let keep = guest.call(wire::pool_threshold::CALL, |w| {
        wire::pool_threshold::Args { pool: POOL, device: Ordinal(0), bytes: u64::MAX }.put(w)
    });
    assert_eq!(keep.0, 0);
    KEPT.map(|(pool, bytes)| {
        let address = allocate(&mut guest, pool, bytes);
        let last = guest.work(wire::memset::CALL, 0, |w| {
            wire::memset::Args {
                to: DeviceAddress(address),
                pitch: 0,
                element: ElementSize::Byte,
                value: PATTERN.into(),
                width: bytes,
                height: 1,
            }
            .put(w)
        });
        guest.wait(0, last);
        assert!(contents(&mut guest, &arena, address, bytes).iter().all(|byte| *byte == PATTERN));
        guest.post(wire::memory_free::CALL, |w| {
            wire::memory_free::Args { address: DeviceAddress(address) }.put(w)
        });
        let again = allocate(&mut guest, pool, bytes);
        assert_eq!(again, address, "the same memory");
        let seen = contents(&mut guest, &arena, again, bytes);
        seen.iter().map(|byte| u64::from(*byte == PATTERN)).sum()
    })
}

// Promise: S6
#[test]
fn next_allocation_has_no_bytes_of_a_freed_one_when_every_free_is_scrubbed() {
    assert_eq!(found(true), [0, 0]);
    // Without the option the process finds its own bytes again, so the assertion above would find them.
    assert_eq!(found(false), KEPT.map(|(_, bytes)| bytes));
}
