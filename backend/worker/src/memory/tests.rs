use super::*;
use proptest::prelude::*;
use std::{cell::RefCell, collections::HashMap, rc::Rc};

const MIB: u64 = 1 << 20;

/// The state of the mock source and mapper, checked at every change.
#[derive(Debug, Default)]
struct World {
    chunks: HashMap<u64, u64>,
    mapped: BTreeMap<u64, (u64, u64)>,
    next: u64,
    /// Bytes of chunks the device has left.
    left: u64,
    largest: u64,
    /// Bytes of chunks reported as idle.
    idle: u64,
    /// The number of calls.
    calls: u64,
    /// True if freed memory is cleared.
    clears: bool,
    /// The access of devices to mappings, by their addresses.
    access: BTreeMap<(u64, i32), u32>,
    /// The mapping to which no further device gets access.
    closed: Option<u64>,
}

#[derive(Clone, Debug, Default)]
struct Mock(Rc<RefCell<World>>);

impl ChunkSource for Mock {
    fn take(&mut self, device: i32, bytes: u64) -> Result<Chunk, Code> {
        let mut world = self.0.borrow_mut();
        world.calls += 1;
        assert!(CLASSES.contains(&bytes));
        if bytes > world.left || bytes > world.largest {
            return Err(code::OUT_OF_MEMORY);
        }
        world.left -= bytes;
        world.next += 1;
        let handle = world.next;
        world.chunks.insert(handle, bytes);
        Ok(Chunk { handle, bytes, device, lease: Lease::Own })
    }

    fn idle(&mut self, _device: i32, bytes: u64) {
        let mut world = self.0.borrow_mut();
        assert!(bytes <= world.chunks.values().sum(), "more bytes are idle than lent");
        world.calls += 1;
        world.idle = bytes;
    }

    fn free(&mut self, _device: i32) -> u64 {
        let world = self.0.borrow();
        world.left + world.idle
    }

    fn open(&mut self, device: i32, _share: u128) -> Result<Vec<Chunk>, Code> {
        self.take(device, 2 * MIB).map(|chunk| vec![chunk])
    }

    fn give(&mut self, chunk: Chunk) {
        let mut world = self.0.borrow_mut();
        assert_eq!(world.chunks.remove(&chunk.handle), Some(chunk.bytes), "given back once");
        assert!(world.mapped.values().all(|(handle, _)| *handle != chunk.handle), "given back while mapped");
        world.left += chunk.bytes;
    }
}

impl Mapper for Mock {
    fn reserve(&mut self, base: u64, _bytes: u64) -> Result<(), Code> {
        if base == limits::WINDOW_BOUNDS.start { Err(code::ALREADY_MAPPED) } else { Ok(()) }
    }

    fn map(&mut self, at: u64, bytes: u64, chunk: &Chunk) -> Result<(), Code> {
        let mut world = self.0.borrow_mut();
        assert!(bytes <= chunk.bytes);
        world.calls += 1;
        let before = world.mapped.range(..at + bytes).next_back().map(|(base, (_, bytes))| base + bytes);
        assert!(before.is_none_or(|end| end <= at), "mapped over something");
        world.mapped.insert(at, (chunk.handle, bytes));
        Ok(())
    }

    fn allow(&mut self, at: u64, bytes: u64, device: i32, access: u32) -> Result<(), Code> {
        let mut world = self.0.borrow_mut();
        let mappings: Vec<u64> = world.mapped.range(at..at + bytes).map(|(at, _)| *at).collect();
        assert_eq!(mappings.first(), Some(&at), "access to whole mappings");
        if world.closed.is_some_and(|closed| mappings.contains(&closed)) {
            return Err(code::INVALID_DEVICE);
        }
        world.access.extend(mappings.into_iter().map(|at| ((at, device), access)));
        Ok(())
    }

    fn unmap(&mut self, at: u64, bytes: u64) -> Result<(), Code> {
        self.0.borrow_mut().calls += 1;
        self.0.borrow_mut().access.retain(|(mapping, _), _| *mapping != at);
        let unmapped = self.0.borrow_mut().mapped.remove(&at);
        assert_eq!(unmapped.map(|(_, mapped)| mapped), Some(bytes));
        Ok(())
    }

    fn clears(&self) -> bool {
        self.0.borrow().clears
    }

    fn clear(&mut self, _at: u64, _bytes: u64, _device: i32) -> Result<(), Code> {
        Ok(())
    }
}

const BASE: u64 = limits::WINDOW_BOUNDS.start + (128 << 30);
const WINDOW: u64 = 4 << 30;

fn memory(left: u64) -> (Memory<Mock, Mock>, Mock) {
    let mock = Mock::default();
    mock.0.borrow_mut().left = left;
    mock.0.borrow_mut().largest = u64::MAX;
    let mut memory = Memory::new(mock.clone(), mock.clone());
    memory.reserve(BASE, WINDOW).unwrap();
    (memory, mock)
}

// Promise: C126
#[test]
fn windows_stay_inside_their_bounds() {
    let (mut memory, _) = memory(0);
    let (bounds, wide) = (limits::WINDOW_BOUNDS, limits::WIDE_WINDOW_BOUNDS);
    assert_eq!(memory.reserve(bounds.start, UNIT), Err(code::ALREADY_MAPPED), "the driver refuses");
    for (base, bytes) in [
        (bounds.start - UNIT, 2 * UNIT),
        (bounds.end - UNIT, 2 * UNIT),
        (bounds.start, limits::SESSION_WINDOW_BYTES + UNIT),
        (wide.start - UNIT, UNIT),
        (wide.start, limits::WIDE_WINDOW_BYTES + UNIT),
        (bounds.start + 1, UNIT),
        (bounds.start, UNIT + 1),
        (bounds.start, 0),
        (u64::MAX - UNIT + 1, UNIT),
        (0, UNIT),
    ] {
        assert_eq!(memory.reserve(base, bytes), Err(code::INVALID_VALUE), "{base:#x} {bytes:#x}");
    }
}

#[test]
fn large_allocation_is_one_range_of_many_chunks() {
    let (mut memory, mock) = memory(4 << 30);
    let address = memory.allocate(0, 600 * MIB + 1).unwrap();
    assert_eq!(address, BASE);
    let sizes: Vec<u64> = mock.0.borrow().mapped.values().map(|(_, bytes)| bytes / MIB).collect();
    assert_eq!(sizes, [512, 32, 32, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]);
    memory.free(address).unwrap();
    assert_eq!(memory.free(address), Err(code::INVALID_VALUE), "freed twice");
    memory.recall(0, 1);
    assert!(mock.0.borrow().chunks.is_empty());
    assert_eq!(memory.space.ranges(), [(BASE, WINDOW)]);
}

/// The number of mappings to which a device has an access.
fn reached(mock: &Mock, device: i32, access: u32) -> usize {
    mock.0.borrow().access.iter().filter(|((_, of), held)| *of == device && **held == access).count()
}

// Promise: C114
#[test]
fn peer_reaches_memory_of_now_and_of_later_until_its_access_ends() {
    let (mut memory, mock) = memory(256 * MIB);
    let (small, large) = (memory.allocate(0, 100).unwrap(), memory.allocate(0, 36 * MIB).unwrap());
    memory.allocate(1, 4 * MIB).unwrap();
    memory.allocate_in(3, 0, 100).unwrap();
    assert_eq!(reached(&mock, 1, READ_WRITE), 2, "its own memory");
    memory.set_peer(0, 0, 1, AccessFlags::ReadWrite).unwrap();
    assert_eq!(
        reached(&mock, 1, READ_WRITE),
        2 + 4,
        "the pool chunk, and the three chunks of the large allocation"
    );
    let later = memory.allocate(0, 2 * MIB).unwrap();
    assert_eq!(reached(&mock, 1, READ_WRITE), 2 + 5);
    memory.free(large).unwrap();
    memory.free(later).unwrap();
    assert_eq!(reached(&mock, 1, READ_WRITE), 2 + 5, "what is kept is reached, too");
    memory.recall(0, 38 * MIB);
    assert_eq!(reached(&mock, 1, READ_WRITE), 2 + 1);
    memory.set_peer(0, 0, 1, AccessFlags::None).unwrap();
    assert_eq!((reached(&mock, 1, READ_WRITE), reached(&mock, 1, 0)), (2, 1));
    memory.free(small).unwrap();
    memory.allocate(0, 6 * MIB).unwrap();
    assert_eq!(reached(&mock, 1, READ_WRITE), 2, "memory of later");
    assert_eq!(memory.set_peer(0, 0, 0, AccessFlags::ReadWrite), Err(code::INVALID_DEVICE), "itself");
}

// Promise: C141
#[test]
fn memory_of_another_process_is_reached_by_its_device_and_by_the_opener() {
    let (mut memory, mock) = memory(256 * MIB);
    let reached = |mock: &Mock| [0, 1, 2].map(|device| reached(mock, device, READ_WRITE));
    let shared = SharedAllocation { share: 1, offset: 512 };
    let (own, there) =
        (memory.open_share(1, 1, shared, 100).unwrap(), memory.open_share(1, 0, shared, 100).unwrap());
    assert_eq!(reached(&mock), [1, 2, 0]);
    memory.free(there).unwrap();
    assert_eq!(reached(&mock), [0, 1, 0]);
    memory.free(own).unwrap();
    assert_eq!(reached(&mock), [0, 0, 0]);
    assert_eq!(memory.open_share(1, 0, shared, 2 * MIB), Err(code::INVALID_VALUE), "beyond the share");
    assert!(mock.0.borrow().chunks.is_empty());
}

// Promise: C114
#[test]
fn access_of_a_peer_to_a_pool_covers_that_pool_and_kept_memory_of_it() {
    let (mut memory, mock) = memory(256 * MIB);
    memory.allocate(0, 100).unwrap();
    memory.set_threshold(3, 0, u64::MAX).unwrap();
    let kept = memory.allocate_in(3, 0, 2 * MIB).unwrap();
    memory.free(kept).unwrap();
    memory.set_peer(3, 0, 1, AccessFlags::Read).unwrap();
    assert_eq!(reached(&mock, 1, 1), 1, "kept memory");
    memory.allocate_in(3, 0, 100).unwrap();
    assert_eq!(reached(&mock, 1, 1), 2);
    assert_eq!(
        memory.set_peer(3, 1, 0, AccessFlags::Read),
        Err(code::INVALID_VALUE),
        "another device's pool"
    );
    assert_eq!(memory.set_peer(limits::POOLS, 0, 1, AccessFlags::Read), Err(code::INVALID_VALUE));
}

#[test]
fn access_of_a_peer_that_fails_in_part_is_taken_back() {
    let (mut memory, mock) = memory(256 * MIB);
    memory.allocate(0, 100).unwrap();
    let last = memory.allocate(0, 2 * MIB).unwrap();
    mock.0.borrow_mut().closed = Some(last);
    assert_eq!(memory.set_peer(0, 0, 1, AccessFlags::ReadWrite), Err(code::INVALID_DEVICE));
    assert_eq!((reached(&mock, 1, READ_WRITE), reached(&mock, 1, 0)), (0, 1));
    memory.allocate(0, 4 * MIB).unwrap();
    assert_eq!(reached(&mock, 1, READ_WRITE), 0, "memory of later");
}

#[test]
fn allocation_in_a_pool_calls_neither_source_nor_mapper() {
    let (mut memory, mock) = memory(64 * MIB);
    assert_eq!(memory.allocate_at_hand(0, 0, 1), None, "there is no chunk yet");
    let first = memory.allocate(0, 1).unwrap();
    let calls = mock.0.borrow().calls;
    let second = memory.allocate_at_hand(0, 0, 1).unwrap();
    assert_ne!(first, second);
    for (group, device, bytes) in [(0, 0, 0), (0, 0, LARGE), (0, 1, 1), (1, 0, 1), (limits::POOLS, 0, 1)] {
        assert_eq!(memory.allocate_at_hand(group, device, bytes), None, "{group} {device} {bytes}");
    }
    assert!(memory.free_at_hand(first), "the chunk stays in use");
    assert!(!memory.free_at_hand(first), "freed twice");
    assert_eq!(memory.allocate_at_hand(0, 0, 1), Some(first), "the freed address is used again");
    assert!(memory.free_at_hand(first));
    assert!(!memory.begin_watch(), "nothing is idle");
    assert!(memory.free_at_hand(second), "one idle chunk stays");
    assert!(memory.begin_watch(), "which has to be reported");
    assert_eq!(mock.0.borrow().calls, calls, "source and mapper are not called");
    assert!(memory.watch());
    assert_eq!(mock.0.borrow().idle, UNIT);
    assert!(memory.allocate_at_hand(0, 0, 1).is_some());
    assert!(!memory.begin_watch(), "a thread watches already");
    assert!(memory.watch());
    assert_eq!(mock.0.borrow().idle, 0);
    assert!(!memory.watch(), "nothing has changed");

    let (first, _) = (memory.allocate(0, 1).unwrap(), memory.allocate(0, 1).unwrap());
    mock.0.borrow_mut().clears = true;
    assert!(!memory.free_at_hand(first), "freed memory must be cleared");
}

// Promise: P60
#[test]
fn large_allocation_of_the_same_size_takes_the_place_of_a_freed_one() {
    let (mut memory, mock) = memory(128 * MIB);
    let first = memory.allocate(0, 34 * MIB - 1).unwrap();
    let calls = mock.0.borrow().calls;
    assert!(memory.free_at_hand(first));
    assert_eq!(memory.allocate_at_hand(0, 0, 32 * MIB), None, "of another size");
    assert_eq!(memory.allocate_at_hand(0, 0, 34 * MIB), Some(first));
    assert!(!memory.begin_watch(), "nothing is idle, and nothing is kept");
    assert!(memory.free_at_hand(first));
    assert!(memory.begin_watch(), "a thread must look after it");
    assert_eq!(mock.0.borrow().calls, calls, "source and mapper are not called");

    memory.age();
    assert_eq!(memory.allocate_at_hand(0, 0, 34 * MIB), Some(first), "kept since the last time");
    assert!(memory.free_at_hand(first));
    memory.age();
    assert!(memory.ages());
    memory.age();
    assert!(!memory.ages());
    assert_eq!((mock.0.borrow().left, mock.0.borrow().idle), (128 * MIB, 0), "it is given back");
}

// Promise: P60
#[test]
fn kept_memory_makes_room_for_allocations_of_other_sizes() {
    let (mut memory, mock) = memory(128 * MIB);
    let large = [32, 32, 64].map(|size| memory.allocate(0, size * MIB).unwrap());
    assert_eq!(memory.allocate(0, 2 * MIB), Err(code::OUT_OF_MEMORY));
    large.into_iter().for_each(|at| assert!(memory.free_at_hand(at)));
    assert_eq!(mock.0.borrow().left, 0);
    let at = memory.allocate(0, 128 * MIB).unwrap();
    let sizes: Vec<u64> = mock.0.borrow().mapped.values().map(|(_, bytes)| bytes / MIB).collect();
    assert_eq!(sizes, [32; 4], "in the largest chunks");
    memory.free(at).unwrap();
    assert!(memory.allocate(0, 1).is_ok(), "a pool has room, too");
}

// Promise: P60
#[test]
fn kept_allocations_are_bounded_and_never_shared() {
    let (mut memory, mock) = memory(512 * MIB);
    let all: Vec<u64> = (0..=limits::KEPT).map(|_| memory.allocate(0, LARGE).unwrap()).collect();
    let (last, kept) = all.split_last().unwrap();
    kept.iter().for_each(|at| assert!(memory.free_at_hand(*at)));
    assert!(!memory.free_at_hand(*last));
    memory.free(*last).unwrap();
    assert_eq!(mock.0.borrow().idle, kept.len() as u64 * LARGE, "the last one is given back");

    memory.recall(0, u64::MAX);
    let shared = memory.allocate(0, LARGE).unwrap();
    memory.shares.insert(shared, 1);
    assert!(!memory.free_at_hand(shared), "another process may have it open");
    memory.free(shared).unwrap();
    assert_eq!((mock.0.borrow().left, memory.shares.len()), (512 * MIB, 0));
}

// Promise: P60
#[test]
fn idle_pool_chunks_stay_for_a_burst_and_one_of_them_for_longer() {
    let (mut memory, mock) = memory(512 * MIB);
    mock.0.borrow_mut().largest = UNIT;
    let burst = |memory: &mut Memory<Mock, Mock>| -> Vec<u64> {
        (0..16).map(|_| memory.allocate(0, 3 * MIB / 2).unwrap()).collect()
    };
    let first = burst(&mut memory);
    let calls = mock.0.borrow().calls;
    first.iter().for_each(|at| assert!(memory.free_at_hand(*at)));
    for _ in 0..2 {
        assert!((0..16).all(|_| memory.allocate_at_hand(0, 0, 3 * MIB / 2).is_some()));
        memory.age();
        first.iter().for_each(|at| assert!(memory.free_at_hand(*at)));
    }
    assert_eq!(mock.0.borrow().calls, calls, "source and mapper are not called");

    memory.age();
    assert!(memory.ages());
    memory.age();
    assert!(!memory.ages(), "the last one does not grow older");
    memory.report_idle();
    let (idle, chunks) = (mock.0.borrow().idle, mock.0.borrow().chunks.values().sum::<u64>());
    assert_eq!((chunks, idle, mock.0.borrow().chunks.len()), (idle, chunks, 1), "one pool chunk stays");

    let many: Vec<u64> = (0..=limits::KEPT).map(|_| memory.allocate(0, 3 * MIB / 2).unwrap()).collect();
    many.into_iter().for_each(|at| memory.free(at).unwrap());
    assert_eq!(mock.0.borrow().chunks.len(), limits::KEPT);
}

#[test]
fn fragmented_device_lends_smaller_chunks() {
    let (mut memory, mock) = memory(64 * MIB);
    mock.0.borrow_mut().largest = UNIT;
    let address = memory.allocate(0, 64 * MIB).unwrap();
    assert_eq!(mock.0.borrow().mapped.len(), 32);
    assert_eq!(memory.allocate(0, 1), Err(code::OUT_OF_MEMORY));
    memory.free(address).unwrap();
    assert!(memory.allocate(0, 1).is_ok(), "kept memory is given back");
}

#[test]
fn failed_allocation_leaves_no_chunk_and_no_mapping() {
    let (mut memory, mock) = memory(40 * MIB);
    assert_eq!(memory.allocate(0, 48 * MIB), Err(code::OUT_OF_MEMORY));
    assert_eq!(mock.0.borrow().left, 40 * MIB);
    assert_eq!(memory.space.ranges(), [(BASE, WINDOW)]);
}

#[test]
fn idle_pools_make_room_for_large_allocations() {
    let (mut memory, mock) = memory(32 * MIB);
    let (fine, coarse) = (memory.allocate(0, 100).unwrap(), memory.allocate(0, 100_000).unwrap());
    assert_eq!(memory.allocate(0, 30 * MIB), Err(code::OUT_OF_MEMORY), "the pools are in use");
    memory.free(fine).unwrap();
    memory.free(coarse).unwrap();
    assert_eq!(mock.0.borrow().left, 28 * MIB, "one idle pool of a kind stays");
    assert_eq!(mock.0.borrow().idle, 4 * MIB);
    assert!(memory.allocate(0, 32 * MIB).is_ok());
    assert_eq!(mock.0.borrow().idle, 0);
}

// Promise: Q1
#[test]
fn million_tiny_allocations_take_no_more_than_their_chunks() {
    let (mut memory, mock) = memory(512 * MIB);
    let all: Vec<u64> = (0..1_000_000).map(|_| memory.allocate(0, 1).unwrap()).collect();
    assert_eq!(mock.0.borrow().left, 512 * MIB - 1_000_000_u64.div_ceil(4096) * UNIT, "every chunk is full");
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    for address in all {
        memory.free(address).unwrap();
    }
    for _ in 0..2 {
        memory.age();
    }
    assert_eq!(mock.0.borrow().left, 512 * MIB - UNIT, "one idle pool stays");
    assert_eq!(mock.0.borrow().idle, UNIT);
}

#[test]
fn recall_gives_back_idle_memory_only() {
    let (mut memory, mock) = memory(64 * MIB);
    let (fine, coarse) = (memory.allocate(0, 1).unwrap(), memory.allocate(0, 1 << 20).unwrap());
    memory.recall(0, 64 * MIB);
    assert_eq!(mock.0.borrow().left, 60 * MIB, "nothing is idle");
    memory.free(fine).unwrap();
    memory.recall(0, 64 * MIB);
    assert_eq!((mock.0.borrow().left, mock.0.borrow().idle), (62 * MIB, 0));
    memory.free(coarse).unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    Free(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u64..5000).prop_map(Step::Allocate),
        2 => (1_u64..(3 << 20)).prop_map(Step::Allocate),
        1 => (UNIT..(80 << 20)).prop_map(Step::Allocate),
        5 => (0_usize..64).prop_map(Step::Free),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// For any sequence of allocations and frees nothing overlaps, everything is mapped, and in the end everything is back.
    #[test]
    fn allocations_never_overlap_and_all_memory_comes_back(steps in prop::collection::vec(step(), 1..120)) {
        let (mut memory, mock) = memory(256 << 20);
        let mut live = BTreeMap::<u64, u64>::new();
        for step in steps {
            match step {
                Step::Allocate(bytes) => {
                    let Ok(address) = memory.allocate(0, bytes) else { continue };
                    prop_assert!(address.is_multiple_of(512));
                    let before = live.range(..address + bytes).next_back().map(|(base, length)| base + length);
                    prop_assert!(before.is_none_or(|end| end <= address), "overlap");
                    let mut at = address;
                    while at < address + bytes {
                        let world = mock.0.borrow();
                        let (base, (_, length)) = world.mapped.range(..=at).next_back().unwrap();
                        prop_assert!(base + length > at, "not mapped");
                        at = base + length;
                    }
                    live.insert(address, bytes);
                }
                Step::Free(which) => {
                    let Some(address) = live.keys().nth(which % live.len().max(1)).copied() else { continue };
                    live.remove(&address);
                    prop_assert_eq!(memory.free(address), Ok(()));
                }
            }
        }
        for address in live.into_keys() {
            prop_assert_eq!(memory.free(address), Ok(()));
        }
        let left = mock.0.borrow().left;
        prop_assert_eq!(memory.idle_bytes(0), (256 << 20) - left, "all that is kept is idle");
        memory.recall(0, u64::MAX);
        prop_assert_eq!(mock.0.borrow().left, 256 << 20);
        prop_assert_eq!(memory.space.ranges(), [(BASE, WINDOW)]);
    }
}
