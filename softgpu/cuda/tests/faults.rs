//! What is refused at the call, what poisons a context, and what a fault leaves alone.
#![allow(unsafe_code, reason = "calls the C interface")]

mod support;

use std::ptr;

use support::*;

#[test]
fn a_launch_that_cannot_be_is_refused_at_once_and_harms_nothing() {
    let _context = Context::new();
    let module = module(KERNELS);
    let (nothing, store, bounded) =
        (function(module, "nothing"), function(module, "store"), function(module, "bounded"));
    let none = ptr::null_mut;
    let with = |grid: [u32; 3], block: [u32; 3], shared: u32| {
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        cu!(cuLaunchKernel(nothing, gx, gy, gz, bx, by, bz, shared, 0, none(), none()))
    };
    for (grid, block, shared) in [
        ([0, 1, 1], [1, 1, 1], 0),
        ([1, 65_536, 1], [1, 1, 1], 0),
        ([1, 1, 65_536], [1, 1, 1], 0),
        ([0x8000_0000, 1, 1], [1, 1, 1], 0),
        ([1, 1, 1], [0, 1, 1], 0),
        ([1, 1, 1], [2048, 1, 1], 0),
        ([1, 1, 1], [32, 33, 1], 0),
        ([1, 1, 1], [1, 1, 65], 0),
        ([1, 1, 1], [1, 1, 1], (48 << 10) + 1),
    ] {
        assert_eq!(with(grid, block, shared), INVALID_VALUE, "{grid:?} {block:?} {shared}");
    }
    assert_eq!(with([1, 1, 1], [1024, 1, 1], 48 << 10), 0);
    // The device could run so many threads, the function cannot.
    assert_eq!(launch(bounded, 1, 65, 0, &mut []), OUT_OF_RESOURCES);
    assert_eq!(launch(bounded, 1, 1025, 0, &mut []), INVALID_VALUE);
    assert_eq!(launch(bounded, 1, 64, 0, &mut []), 0);
    // No parameters at all for a kernel that has some.
    assert_eq!(cu!(cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, 0, none(), none())), INVALID_VALUE);
    assert_eq!(launch(0x1234, 1, 1, 0, &mut []), INVALID_HANDLE);
    assert_eq!(launch(nothing, 1, 1, 0x1234, &mut []), INVALID_HANDLE);
    assert_eq!(cu!(cuLaunchCooperativeKernel(nothing, 1 << 20, 1, 1, 32, 1, 1, 0, 0, none())), TOO_LARGE);
    ok!(cuLaunchCooperativeKernel(nothing, 8, 1, 1, 32, 1, 1, 0, 0, none()));
    ok!(cuCtxSynchronize());
}

#[test]
fn a_wild_write_poisons_its_context_for_good_and_no_other() {
    let context = Context::new();
    let store_here = function(module(KERNELS), "store");
    let word = allocate(8);
    let before = event();

    let mut doomed = 0;
    ok!(cuCtxCreate_v2(&raw mut doomed, 0, 0));
    let store = function(module(KERNELS), "store");
    let there = allocate(8);
    write(there, &[1u64]);
    let (first, second) = (stream(1), stream(1));
    let after = event();
    ok!(cuStreamWaitEvent(second, before, 0));
    // The launch is in order; that it faults shows later.
    assert_eq!(launch(store, 1, 1, first, &mut [0x40, 5]), 0);
    ok_or(launch(store, 1, 1, first, &mut [there, 5]), ILLEGAL_ADDRESS);
    ok_or(cu!(cuEventRecord(after, first)), ILLEGAL_ADDRESS);
    assert_eq!(cu!(cuStreamSynchronize(first)), ILLEGAL_ADDRESS);
    for _ in 0..2 {
        assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
        assert_eq!(cu!(cuStreamQuery(second)), ILLEGAL_ADDRESS);
        assert_eq!(cu!(cuEventQuery(after)), ILLEGAL_ADDRESS);
        let mut address = 99;
        assert_eq!(cu!(cuMemAlloc_v2(&raw mut address, 8)), ILLEGAL_ADDRESS);
        assert_eq!(address, 99);
        let mut value = 0u64;
        assert_eq!(cu!(cuMemcpyDtoH_v2(ptr::from_mut(&mut value).cast(), there, 8)), ILLEGAL_ADDRESS);
        assert_eq!(launch(store, 1, 1, 0, &mut [there, 6]), ILLEGAL_ADDRESS);
    }
    assert_eq!(error_name(ILLEGAL_ADDRESS), "CUDA_ERROR_ILLEGAL_ADDRESS");

    ok!(cuCtxSetCurrent(context.handle));
    assert_eq!(launch(store_here, 1, 1, 0, &mut [word, 7]), 0);
    assert_eq!(read::<u64>(word, 1), [7]);
    // Work behind the fault was not done.
    let mut value = 0u64;
    ok!(cuMemcpyDtoH_v2(ptr::from_mut(&mut value).cast(), there, 8));
    assert_eq!(value, 1);
    ok!(cuCtxDestroy_v2(doomed));
}

fn ok_or(code: u32, other: u32) {
    assert!(code == 0 || code == other, "{code}");
}

// Promise: C7
#[test]
fn nothing_behind_a_fault_ever_appears_done() {
    for _ in 0..1000 {
        let _context = Context::new();
        let store = function(module(KERNELS), "store");
        let after = event();
        assert_eq!(launch(store, 1, 1, 0, &mut [0x40, 1]), 0);
        ok_or(cu!(cuEventRecord(after, 0)), ILLEGAL_ADDRESS);
        // Whoever asks again and again asks at the moment at which the kernel ends, too.
        let state = (0..).map(|_: u64| cu!(cuEventQuery(after))).find(|state| *state != NOT_READY);
        assert_eq!(state, Some(ILLEGAL_ADDRESS));
    }
}

#[test]
fn each_fault_has_its_code() {
    for (kernel, parameters, expected) in [
        ("store", &mut [0x41u64, 0][..], 716),
        ("store", &mut [0, 0][..], ILLEGAL_ADDRESS),
        ("load", &mut [0x7fff_ffff_f000, 0x40][..], ILLEGAL_ADDRESS),
        ("stop", &mut [][..], 715),
    ] {
        let _context = Context::new();
        let function = function(module(KERNELS), kernel);
        assert_eq!(launch(function, 1, 1, 0, parameters), 0);
        assert_eq!(cu!(cuCtxSynchronize()), expected, "{kernel}");
    }
}

#[test]
fn a_fault_ends_what_else_runs_in_its_context() {
    let _context = Context::new();
    let module = module(KERNELS);
    let (spin, store) = (function(module, "spin"), function(module, "store"));
    let flag = Flag::new();
    assert_eq!(launch(spin, 1, 1, stream(1), &mut [flag.address()]), 0);
    assert_eq!(launch(store, 1, 1, stream(1), &mut [0x40, 1]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
}

#[test]
fn memory_that_was_freed_cannot_be_reached() {
    let _context = Context::new();
    let store = function(module(KERNELS), "store");
    let block = allocate(4 * PAGE);
    assert_eq!(launch(store, 1, 1, 0, &mut [block, 1]), 0);
    ok!(cuMemFree_v2(block));
    assert_eq!(cu!(cuMemFree_v2(block)), INVALID_VALUE);
    assert_eq!(cu!(cuMemFree_v2(block + 512)), INVALID_VALUE);
    assert_eq!(cu!(cuMemFree_v2(0x40)), INVALID_VALUE);
    ok!(cuMemFree_v2(0));
    let mut value = 0u64;
    assert_eq!(cu!(cuMemcpyDtoH_v2(ptr::from_mut(&mut value).cast(), block, 8)), INVALID_VALUE);
    assert_eq!(launch(store, 1, 1, 0, &mut [block, 1]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
}

#[test]
fn calls_without_a_context_say_so() {
    init();
    std::thread::spawn(|| {
        let mut address = 0;
        assert_eq!(cu!(cuMemAlloc_v2(&raw mut address, 8)), INVALID_CONTEXT);
        assert_eq!(cu!(cuCtxSynchronize()), INVALID_CONTEXT);
        let mut current = 1;
        ok!(cuCtxGetCurrent(&raw mut current));
        assert_eq!(current, 0);
        assert_eq!(cu!(cuCtxSetCurrent(0x77)), INVALID_CONTEXT);
    })
    .join()
    .unwrap();
}

#[test]
fn nothing_works_before_the_start() {
    let state = new_state();
    let mut child = start_child("before_the_start", state.path(), "cold");
    assert!(child.wait().unwrap().success());
}

#[test]
#[ignore = "a part of nothing_works_before_the_start"]
fn before_the_start() {
    let mut number = 0;
    assert_eq!(cu!(cuDeviceGetCount(&raw mut number)), NOT_INITIALIZED);
    ok!(cuDriverGetVersion(&raw mut number));
    assert_eq!(number, 13050);
    assert_eq!(cu!(cuInit(1)), INVALID_VALUE);
    ok!(cuInit(0));
    ok!(cuInit(0));
    ok!(cuDeviceGetCount(&raw mut number));
    assert_eq!(number, 1);
    // A forked child has no driver, and takes nothing of its parent's with it.
    let mut context = 0;
    ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
    let word = allocate(8);
    // SAFETY: the child calls the driver, which answers at once, and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let answers = [
            cu!(cuDeviceGetCount(&raw mut number)),
            cu!(cuInit(0)),
            cu!(cuMemFree_v2(word)),
            cu!(cuCtxSynchronize()),
        ];
        let good = answers.iter().all(|answer| *answer == NOT_INITIALIZED);
        // SAFETY: ends the child without the parent's handlers.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    write(word, &[3u64]);
    assert_eq!(read::<u64>(word, 1), [3]);
}
