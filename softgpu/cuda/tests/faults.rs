//! Errors of calls, faults that poison a context, and state that survives a fault.

use std::ptr;

use crate::support::*;

#[test]
fn invalid_launch_is_refused_at_once_and_leaves_the_context_sound() {
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
    // The device could run that many threads, but the function cannot.
    assert_eq!(launch(bounded, 1, 65, 0, &mut []), OUT_OF_RESOURCES);
    assert_eq!(launch(bounded, 1, 1025, 0, &mut []), INVALID_VALUE);
    assert_eq!(launch(bounded, 1, 64, 0, &mut []), 0);
    // A kernel with parameters is launched without any.
    assert_eq!(cu!(cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, 0, none(), none())), INVALID_VALUE);
    assert_eq!(launch(0x1234, 1, 1, 0, &mut []), INVALID_HANDLE);
    assert_eq!(launch(nothing, 1, 1, 0x1234, &mut []), INVALID_HANDLE);
    assert_eq!(cu!(cuLaunchCooperativeKernel(nothing, 1 << 20, 1, 1, 32, 1, 1, 0, 0, none())), TOO_LARGE);
    ok!(cuLaunchCooperativeKernel(nothing, 8, 1, 1, 32, 1, 1, 0, 0, none()));
    ok!(cuCtxSynchronize());
}

#[test]
fn out_of_bounds_write_poisons_only_its_context_permanently() {
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
    // The launch is valid; its fault shows later.
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
    // Work after the fault was not executed.
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
fn work_after_a_fault_never_appears_complete() {
    for _ in 0..1000 {
        let _context = Context::new();
        let store = function(module(KERNELS), "store");
        let after = event();
        assert_eq!(launch(store, 1, 1, 0, &mut [0x40, 1]), 0);
        ok_or(cu!(cuEventRecord(after, 0)), ILLEGAL_ADDRESS);
        // Repeated queries also hit the moment at which the kernel ends.
        let state = (0..).map(|_: u64| cu!(cuEventQuery(after))).find(|state| *state != NOT_READY);
        assert_eq!(state, Some(ILLEGAL_ADDRESS));
    }
}

#[test]
fn each_fault_returns_its_code() {
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
fn fault_ends_other_kernels_of_its_context() {
    let _context = Context::new();
    let module = module(KERNELS);
    let (spin, store) = (function(module, "spin"), function(module, "store"));
    let flag = Flag::new();
    assert_eq!(launch(spin, 1, 1, stream(1), &mut [flag.address()]), 0);
    assert_eq!(launch(store, 1, 1, stream(1), &mut [0x40, 1]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
}

#[test]
fn access_to_freed_memory_fails() {
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
fn call_without_a_context_returns_invalid_context() {
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
fn calls_before_initialisation_fail() {
    let state = new_state();
    let mut child = start_child("faults::before_the_start", state.path(), "cold");
    assert!(child.wait().unwrap().success());
}

#[test]
#[ignore = "a part of calls_before_initialisation_fail"]
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
    // A forked child has no driver, and does not affect its parent's.
    let mut context = 0;
    ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
    let word = allocate(8);
    // SAFETY: the child calls the driver, which returns at once, and exits.
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
