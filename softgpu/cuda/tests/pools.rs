//! Memory in stream order: its owner at each moment, and its return to the device.

use std::ffi::c_void;
use std::path::Path;
use std::ptr;

use crate::support::peer::{Peer, serve};
use crate::support::*;

const THRESHOLD: i32 = 4;
const RESERVED: i32 = 5;
const USED: i32 = 7;
const USED_HIGH: i32 = 8;

#[test]
#[ignore = "a process of the tests here"]
fn peer_process() {
    serve();
}

fn default_pool() -> u64 {
    let mut pool = 0;
    ok!(cuDeviceGetDefaultMemPool(&raw mut pool, 0));
    pool
}

fn number(pool: u64, attribute: i32) -> u64 {
    let mut value = 0u64;
    ok!(cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()));
    value
}

fn set(pool: u64, attribute: i32, value: u64) -> u32 {
    cu!(cuMemPoolSetAttribute(pool, attribute, (&raw const value).cast()))
}

fn take(bytes: u64, stream: u64) -> u64 {
    let mut address = 0;
    ok!(cuMemAllocAsync(&raw mut address, bytes, stream));
    address
}

/// `CUmemPoolProps` of a pool on device 0 with a maximum size.
fn properties(max_bytes: u64) -> [u64; 11] {
    let mut properties = [0; 11];
    (properties[0], properties[1], properties[3]) = (1, 1, max_bytes);
    properties
}

fn new_pool(max_bytes: u64) -> u64 {
    let (mut pool, properties) = (0, properties(max_bytes));
    ok!(cuMemPoolCreate(&raw mut pool, &raw const properties));
    pool
}

// Promise: C20
#[test]
fn pool_memory_follows_the_order_of_its_stream() {
    let _context = Context::new();
    let before = free_bytes();
    let (queue, pool) = (stream(1), default_pool());
    let increment = function(module(KERNELS), "increment");
    let with_module = free_bytes();
    let address = take(3 * PAGE, queue);
    assert_eq!(free_bytes(), with_module - 3 * PAGE);
    assert_eq!((number(pool, USED), number(pool, RESERVED)), (3 * PAGE, 3 * PAGE));
    ok!(cuMemsetD8Async(address, 0, 3 * PAGE, queue));
    for _ in 0..3 {
        assert_eq!(launch(increment, 1, 1, queue, &mut [address + PAGE]), 0);
    }
    let mut result = 0u64;
    ok!(cuMemcpyDtoHAsync_v2((&raw mut result).cast(), address + PAGE, 8, queue));
    ok!(cuMemFreeAsync(address, queue));
    assert_eq!(cu!(cuMemFreeAsync(address, queue)), INVALID_VALUE, "the block is freed already");
    ok!(cuStreamSynchronize(queue));
    assert_eq!(result, 3);
    // No block is left, the threshold is 0, and the program has synchronised.
    assert_eq!((number(pool, USED), number(pool, RESERVED)), (0, 0));
    assert_eq!(free_bytes(), with_module);
    assert_eq!(launch(increment, 1, 1, queue, &mut [address]), 0);
    assert_eq!(cu!(cuStreamSynchronize(queue)), ILLEGAL_ADDRESS);
    drop(_context);
    let _context = Context::new();
    assert_eq!(free_bytes(), before);
}

// Promise: C20
#[test]
fn freed_pool_memory_is_reused_only_in_its_stream() {
    let _context = Context::new();
    let (pool, one, other) = (default_pool(), stream(1), stream(1));
    let spin = function(module(KERNELS), "spin");
    let flag = Flag::new();
    let first = take(5000, one);
    assert_eq!(launch(spin, 1, 1, one, &mut [flag.address()]), 0);
    ok!(cuMemFreeAsync(first, one));
    // The stream has not reached the end of the first block: another stream gets other memory, unless it may be made to wait.
    assert_eq!(set(pool, 3, 0), 0);
    let second = take(5000, other);
    assert_ne!(second, first);
    assert_eq!(take(5000, one), first, "after its end in the same stream");
    ok!(cuMemFreeAsync(first, one));
    assert_eq!(set(pool, 3, 1), 0);
    assert_eq!(take(5000, other), first);
    assert_eq!(cu!(cuStreamQuery(other)), NOT_READY, "waits for the stream that freed it");
    flag.set(1);
    ok!(cuMemFreeAsync(first, other));
    ok!(cuMemFreeAsync(second, other));
    ok!(cuCtxSynchronize());
    assert_eq!((number(pool, USED), number(pool, RESERVED)), (0, 0));
    assert!(number(pool, USED_HIGH) >= 10240);
    assert_eq!(set(pool, USED_HIGH, 0), 0);
    assert_eq!(number(pool, USED_HIGH), 0);
    assert_eq!(set(pool, USED_HIGH, 5), INVALID_VALUE);
    assert_eq!(set(pool, USED, 0), INVALID_VALUE);
}

// Promise: C20
#[test]
fn pool_keeps_memory_up_to_its_threshold() {
    let _context = Context::new();
    let before = free_bytes();
    let pool = new_pool(0);
    assert_eq!(set(pool, THRESHOLD, 4 * PAGE), 0);
    let mut addresses = [0; 6];
    for address in &mut addresses {
        ok!(cuMemAllocFromPoolAsync(address, PAGE, pool, 0));
    }
    assert_eq!(free_bytes(), before - 6 * PAGE);
    for address in addresses {
        ok!(cuMemFreeAsync(address, 0));
    }
    ok!(cuStreamSynchronize(0));
    assert_eq!((number(pool, USED), number(pool, RESERVED)), (0, 4 * PAGE));
    ok!(cuMemPoolTrimTo(pool, 3 * PAGE));
    assert_eq!(number(pool, RESERVED), 3 * PAGE);
    ok!(cuMemPoolTrimTo(pool, 0));
    assert_eq!(free_bytes(), before);
    ok!(cuMemPoolDestroy(pool));
    assert_eq!(cu!(cuMemPoolDestroy(pool)), INVALID_VALUE);
}

// Promise: C20
#[test]
fn pool_respects_its_limit_and_ends_with_its_last_block() {
    let _context = Context::new();
    let before = free_bytes();
    let pool = new_pool(2 * PAGE);
    let (mut one, mut two, mut more) = (0, 0, 0);
    ok!(cuMemAllocFromPoolAsync(&raw mut one, PAGE, pool, 0));
    ok!(cuMemAllocFromPoolAsync(&raw mut two, PAGE, pool, 0));
    assert_eq!(cu!(cuMemAllocFromPoolAsync(&raw mut more, 1, pool, 0)), OUT_OF_MEMORY);
    ok!(cuMemPoolDestroy(pool));
    assert_eq!(cu!(cuMemAllocFromPoolAsync(&raw mut more, 1, pool, 0)), INVALID_VALUE);
    write(two, &[7u64]);
    assert_eq!(read::<u64>(two, 1), [7]);
    ok!(cuMemFreeAsync(one, 0));
    // A block of a pool may also be freed at once.
    ok!(cuMemFree_v2(two));
    ok!(cuCtxSynchronize());
    assert_eq!(free_bytes(), before);
}

// Promise: C20
#[test]
fn device_allocates_from_its_current_pool() {
    let _context = Context::new();
    let (own, pool, mut current) = (default_pool(), new_pool(0), 0);
    ok!(cuDeviceGetMemPool(&raw mut current, 0));
    assert_eq!(current, own);
    ok!(cuDeviceSetMemPool(0, pool));
    ok!(cuDeviceGetMemPool(&raw mut current, 0));
    assert_eq!(current, pool);
    let address = take(100, 0);
    assert_eq!(number(pool, USED), 512);
    assert_eq!(pointer(address, 17), Ok(pool));
    ok!(cuMemFreeAsync(address, 0));
    ok!(cuMemPoolDestroy(pool));
    ok!(cuDeviceGetMemPool(&raw mut current, 0));
    assert_eq!(current, own);
    assert_eq!(cu!(cuMemPoolDestroy(own)), INVALID_VALUE);
    let mut flags = 9;
    ok!(cuMemPoolGetAccess(&raw mut flags, own, ptr::from_ref(&[1, 0])));
    assert_eq!(flags, 3);
    assert_eq!(cu!(cuMemPoolSetAccess(own, ptr::from_ref(&[1, 0, 3]), 1)), 0);
    assert_eq!(cu!(cuMemPoolSetAccess(own, ptr::from_ref(&[1, 0, 0]), 1)), INVALID_VALUE);
    let mut shared = properties(0);
    // Of the types of handles there are only descriptors.
    shared[0] |= 2 << 32;
    assert_eq!(cu!(cuMemPoolCreate(&raw mut current, &raw const shared)), NOT_SUPPORTED);
    assert_eq!((device_attribute(115), device_attribute(119)), (1, 1));
}

// Promise: C20
#[test]
fn allocation_waits_for_freed_memory_of_its_stream_instead_of_failing() {
    let _context = Context::new();
    let before = free_bytes();
    let queue = stream(1);
    // Each size is new, so that no block is reused as it is.
    for round in 0..200 {
        let address = take(before - (round % 7) * PAGE - 512, queue);
        ok!(cuMemsetD8Async(address, 1, 64, queue));
        ok!(cuMemFreeAsync(address, queue));
    }
    let mut address = 0;
    assert_eq!(cu!(cuMemAllocAsync(&raw mut address, before + 1, queue)), OUT_OF_MEMORY);
    assert_eq!(cu!(cuMemAllocAsync(&raw mut address, 0, queue)), INVALID_VALUE);
    ok!(cuStreamSynchronize(queue));
    assert_eq!(free_bytes(), before);
}

// Promise: C20
#[test]
fn unfreed_pool_memory_ends_with_its_context() {
    let context = Context::new();
    let before = free_bytes();
    let mut other = 0;
    ok!(cuCtxCreate_v2(&raw mut other, 0, 0));
    let (queue, kept) = (stream(1), take(3 * PAGE, 0));
    let freed = take(PAGE, queue);
    ok!(cuMemFreeAsync(freed, queue));
    assert_ne!(kept, 0);
    ok!(cuCtxDestroy_v2(other));
    ok!(cuCtxSetCurrent(context.handle));
    assert_eq!(free_bytes(), before);
}

// Promise: C20
#[test]
fn many_threads_and_streams_share_a_pool() {
    let _context = Context::new();
    let mut context = 0;
    ok!(cuCtxGetCurrent(&raw mut context));
    let before = free_bytes();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                ok!(cuCtxSetCurrent(context));
                let queue = stream(1);
                for round in 0..200u64 {
                    let words = usize::try_from(1 + (round * 37 + thread) % 3000).unwrap();
                    let address = take(8 * words as u64, queue);
                    let mine = vec![thread << 32 | round; words];
                    let from: *const c_void = mine.as_ptr().cast();
                    ok!(cuMemcpyHtoDAsync_v2(address, from, 8 * words as u64, queue));
                    let mut back = vec![0u64; words];
                    let to: *mut c_void = back.as_mut_ptr().cast();
                    ok!(cuMemcpyDtoHAsync_v2(to, address, 8 * words as u64, queue));
                    ok!(cuMemFreeAsync(address, queue));
                    ok!(cuStreamSynchronize(queue));
                    assert_eq!(back, mine);
                }
            });
        }
    });
    ok!(cuCtxSynchronize());
    assert_eq!((number(default_pool(), USED), free_bytes()), (0, before));
}

fn start(state: &Path) -> Peer {
    let peer = Peer::start("pools::peer_process", state);
    peer.ask("context").unwrap();
    peer
}

// Promise: C20
#[test]
fn process_opens_device_memory_of_another_by_its_ipc_name() {
    let state = new_state();
    let (mut maker, taker) = (start(state.path()), start(state.path()));
    let free = maker.ask("free").unwrap();
    maker.ask("allocate 0 1000").unwrap();
    maker.ask("allocate 1 5000000").unwrap();
    maker.ask("put 0 40 4040").unwrap();
    maker.ask("put 1 4999992 1111").unwrap();
    let (small, large) = (maker.name(0, 0), maker.name(1, 77));
    assert_eq!(maker.ask(&format!("open 9 1000 {small}")), Err(INVALID_CONTEXT), "its own memory");
    let first = taker.ask(&format!("open 0 1000 {small}")).unwrap();
    assert_eq!(taker.ask(&format!("open 0 1000 {small}")), Ok(first), "one address for one name");
    taker.ask(&format!("open 1 5000000 {large}")).unwrap();
    assert_eq!((taker.ask("get 0 40"), taker.ask("get 1 4999992")), (Ok(4040), Ok(1111)));
    taker.ask("put 0 48 5050").unwrap();
    assert_eq!(maker.ask("get 0 48"), Ok(5050));
    // After its maker frees it, it stays until it is closed as often as it was opened.
    maker.ask("deallocate 0").unwrap();
    maker.ask("deallocate 1").unwrap();
    assert_eq!(maker.ask("free"), Ok(free - 4 * PAGE));
    taker.ask("close 0").unwrap();
    assert_eq!(taker.ask("get 0 48"), Ok(5050));
    taker.ask("close 0").unwrap();
    assert_eq!(taker.ask("close 0"), Err(INVALID_VALUE));
    assert_eq!(maker.ask("free"), Ok(free - 3 * PAGE));
    assert_eq!(taker.ask("deallocate 1"), Err(INVALID_VALUE), "opened, not allocated");
    taker.ask("close 1").unwrap();
    assert_eq!(maker.ask("free"), Ok(free));
    for name in [small, large, "1 2 3 4 5 6 7 8".to_owned()] {
        assert_eq!(taker.ask(&format!("open 0 1000 {name}")), Err(INVALID_VALUE), "it is gone");
    }
    // Memory of the virtual-memory API has descriptors and no IPC names.
    maker.ask("create 3 1 1").unwrap();
    maker.ask("map 3").unwrap();
    assert_eq!(maker.ask("name 3 0"), Err(INVALID_VALUE));
}

// Promise: C141
#[test]
fn failed_open_gives_its_device_no_access_to_memory_that_is_open() {
    let state = new_state();
    let start = || {
        let mut command = command("pools::peer_process", state.path(), "peer");
        command.env("SLUICE_SOFTGPU_DEVICES", "2");
        let peer = Peer::start_as(command);
        peer.ask("context").unwrap();
        peer
    };
    let mut maker = start();
    maker.ask("allocate 0 4096").unwrap();
    // Pages of its own, which end with it: small allocations share pages, and the pages of a freed one can be opened.
    maker.ask("allocate 1 3000000").unwrap();
    let (kept, gone) = (maker.name(0, 0), maker.name(1, 0));
    maker.ask("deallocate 1").unwrap();
    // The name that the second device opens exists, or does not any more.
    for (name, has_access) in [(&kept, true), (&gone, false)] {
        let taker = start();
        taker.ask(&format!("open 0 4096 {kept}")).unwrap();
        taker.ask("context 1").unwrap();
        let opened = taker.ask(&format!("open 1 4096 {name}"));
        assert_eq!(opened.is_ok(), has_access, "{opened:?}");
        assert_eq!(taker.ask("set 0 9").is_ok(), has_access);
    }
    assert_eq!(maker.ask("get 0 0"), Ok(u64::from_ne_bytes([9; 8])));
}

// Promise: C20
#[test]
fn opened_memory_ends_with_its_opener() {
    let state = new_state();
    let mut maker = start(state.path());
    let free = maker.ask("free").unwrap();
    for killed in [true, false] {
        let taker = start(state.path());
        maker.ask("allocate 0 3000000").unwrap();
        let name = maker.name(0, 0);
        taker.ask("confine").unwrap();
        taker.ask(&format!("open 0 3000000 {name}")).unwrap();
        maker.ask("deallocate 0").unwrap();
        assert_eq!(maker.ask("free"), Ok(free - 2 * PAGE));
        if killed {
            taker.kill();
        } else {
            let mut current = 0;
            while taker.ask(&format!("destroy {current}")).is_err() {
                current = taker.ask("current").unwrap();
            }
        }
        assert_eq!(maker.ask("free"), Ok(free));
    }
}
