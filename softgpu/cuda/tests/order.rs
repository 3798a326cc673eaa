//! The order of work: streams, events, default streams, host functions, and waits that must not deadlock.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::*;

struct Kernels {
    spin: u64,
    increment: u64,
}

fn kernels() -> Kernels {
    let module = module(KERNELS);
    Kernels { spin: function(module, "spin"), increment: function(module, "increment") }
}

#[test]
fn launch_returns_before_its_kernel_ends_and_queries_report_it() {
    let _context = Context::new();
    let Kernels { spin, .. } = kernels();
    let (flag, queue, done) = (Flag::new(), stream(1), event());
    ok!(cuEventQuery(done)); // Never recorded: complete.
    assert_eq!(launch(spin, 1, 1, queue, &mut [flag.address()]), 0);
    ok!(cuEventRecord(done, queue));
    assert_eq!(cu!(cuEventQuery(done)), NOT_READY);
    assert_eq!(cu!(cuStreamQuery(queue)), NOT_READY);
    flag.set(1);
    ok!(cuEventSynchronize(done));
    ok!(cuEventQuery(done));
    ok!(cuStreamQuery(queue));
}

#[test]
fn legacy_stream_and_blocking_streams_wait_for_each_other_and_for_no_others() {
    let _context = Context::new();
    let Kernels { spin, increment } = kernels();
    let (first, second) = (Flag::new(), Flag::new());
    let (blocking, other, free) = (stream(0), stream(0), stream(1));
    let word = allocate(8);
    write(word, &[0u64]);
    let value = || -> u64 {
        // Reads through a stream that waits for no other.
        let mut value = [0u64];
        ok!(cuMemcpyDtoHAsync_v2(value.as_mut_ptr().cast(), word, 8, free));
        ok!(cuStreamSynchronize(free));
        value[0]
    };
    // blocking: spin │ legacy: increment │ other: increment. Neither increment may run while `blocking` spins.
    assert_eq!(launch(spin, 1, 1, blocking, &mut [first.address()]), 0);
    assert_eq!(launch(increment, 1, 1, 0, &mut [word]), 0);
    assert_eq!(launch(increment, 1, 1, other, &mut [word]), 0);
    a_moment();
    assert_eq!(value(), 0);
    assert_eq!(cu!(cuStreamQuery(0)), NOT_READY);
    assert_eq!(cu!(cuStreamQuery(other)), NOT_READY);
    // A non-blocking stream can run.
    assert_eq!(launch(increment, 1, 1, free, &mut [word]), 0);
    ok!(cuStreamSynchronize(free));
    assert_eq!(value(), 1);
    first.set(1);
    ok!(cuStreamSynchronize(other));
    assert_eq!(value(), 3);

    // In reverse: a non-blocking stream that spins delays no other stream.
    assert_eq!(launch(spin, 1, 1, free, &mut [second.address()]), 0);
    assert_eq!(launch(increment, 1, 1, 0, &mut [word]), 0);
    ok!(cuStreamSynchronize(0));
    assert_eq!(cu!(cuStreamQuery(free)), NOT_READY);
    second.set(1);
    assert_eq!(value(), 4);
}

// Promise: C90
#[test]
fn stream_waits_for_a_value_and_others_do_not() {
    let _context = Context::new();
    let Kernels { increment, .. } = kernels();
    let word = allocate(16);
    write(word, &[0u64, 0]);
    // Many more streams than the scheduler has threads.
    let queues: Vec<u64> = (0..300).map(|_| stream(1)).collect();
    let free = stream(1);
    for queue in &queues {
        ok!(cuStreamWaitValue32_v2(*queue, word, 5, 0));
    }
    assert_eq!(launch(increment, 1, 1, queues[0], &mut [word + 8]), 0);
    ok!(cuStreamWriteValue32_v2(free, word, 4, 0));
    ok!(cuStreamSynchronize(free));
    a_moment();
    for queue in &queues {
        assert_eq!(cu!(cuStreamQuery(*queue)), NOT_READY);
    }
    ok!(cuStreamWriteValue32_v2(free, word, 5, 0));
    for queue in &queues {
        ok!(cuStreamSynchronize(*queue));
    }
    let mut value = [0u64];
    ok!(cuMemcpyDtoH_v2(value.as_mut_ptr().cast(), word + 8, 8));
    assert_eq!(value, [1]);
}

#[test]
fn per_thread_stream_is_a_blocking_stream_of_one_thread() {
    let context = Context::new();
    let Kernels { spin, increment } = kernels();
    let (flag, word) = (Flag::new(), allocate(8));
    write(word, &[0u64]);
    const PER_THREAD: u64 = 2;
    assert_eq!(launch(spin, 1, 1, PER_THREAD, &mut [flag.address()]), 0);
    let handle = context.handle;
    std::thread::spawn(move || {
        ok!(cuCtxSetCurrent(handle));
        assert_eq!(launch(increment, 1, 1, PER_THREAD, &mut [word]), 0);
        ok!(cuStreamSynchronize(PER_THREAD));
        assert_eq!(cu!(cuStreamQuery(PER_THREAD)), 0);
    })
    .join()
    .unwrap();
    assert_eq!(cu!(cuStreamQuery(PER_THREAD)), NOT_READY);
    assert_eq!(cu!(cuStreamQuery(0)), NOT_READY);
    flag.set(1);
    ok!(cuCtxSynchronize());
    assert_eq!(read::<u64>(word, 1), [1]);
}

#[test]
fn event_wait_refers_to_the_record_before_the_call() {
    let _context = Context::new();
    let Kernels { spin, increment } = kernels();
    let (early, late) = (Flag::new(), Flag::new());
    let (recorder, waiter) = (stream(1), stream(1));
    let (mark, word) = (event(), allocate(8));
    write(word, &[0u64]);
    assert_eq!(launch(spin, 1, 1, recorder, &mut [early.address()]), 0);
    ok!(cuEventRecord(mark, recorder));
    ok!(cuStreamWaitEvent(waiter, mark, 0));
    assert_eq!(launch(increment, 1, 1, waiter, &mut [word]), 0);
    assert_eq!(launch(spin, 1, 1, recorder, &mut [late.address()]), 0);
    ok!(cuEventRecord(mark, recorder));
    ok!(cuEventDestroy_v2(mark)); // Waits for it continue.
    a_moment();
    assert_eq!(cu!(cuStreamQuery(waiter)), NOT_READY);
    early.set(1);
    ok!(cuStreamSynchronize(waiter));
    assert_eq!(cu!(cuStreamQuery(recorder)), NOT_READY);
    late.set(1);
    ok!(cuStreamSynchronize(recorder));
}

#[test]
fn many_streams_that_wait_for_each_other_hold_no_thread() {
    let _context = Context::new();
    let Kernels { spin, increment } = kernels();
    let (flag, word) = (Flag::new(), allocate(8));
    write(word, &[0u64]);
    let first = stream(1);
    assert_eq!(launch(spin, 1, 1, first, &mut [flag.address()]), 0);
    let mut last = first;
    // Far more streams than the driver has threads; each waits for the one before.
    let streams: Vec<u64> = (0..400)
        .map(|_| {
            let mark = event();
            ok!(cuEventRecord(mark, last));
            let next = stream(1);
            ok!(cuStreamWaitEvent(next, mark, 0));
            assert_eq!(launch(increment, 1, 1, next, &mut [word]), 0);
            last = next;
            next
        })
        .collect();
    a_moment();
    assert_eq!(cu!(cuStreamQuery(streams[0])), NOT_READY);
    flag.set(1);
    ok!(cuStreamSynchronize(last));
    assert_eq!(read::<u64>(word, 1), [400]);
}

#[test]
fn host_functions_run_in_order_beside_kernels_of_other_streams() {
    static STEPS: AtomicU64 = AtomicU64::new(0);
    extern "C" fn step(data: *mut c_void) {
        while STEPS.load(Ordering::SeqCst) == 99 {
            std::thread::yield_now();
        }
        STEPS.store(STEPS.load(Ordering::SeqCst) * 10 + data.addr() as u64, Ordering::SeqCst);
    }
    let _context = Context::new();
    let Kernels { increment, .. } = kernels();
    let (queue, other, word) = (stream(1), stream(1), allocate(8));
    write(word, &[0u64]);
    STEPS.store(99, Ordering::SeqCst);
    ok!(cuLaunchHostFunc(queue, step, std::ptr::without_provenance_mut(1)));
    assert_eq!(launch(increment, 1, 1, queue, &mut [word]), 0);
    ok!(cuLaunchHostFunc(queue, step, std::ptr::without_provenance_mut(2)));
    assert_eq!(launch(increment, 1, 1, other, &mut [word]), 0);
    ok!(cuStreamSynchronize(other));
    assert_eq!(read_now(word, other), 1);
    STEPS.store(0, Ordering::SeqCst);
    ok!(cuStreamSynchronize(queue));
    assert_eq!(STEPS.load(Ordering::SeqCst), 12);
    assert_eq!(read::<u64>(word, 1), [2]);
}

// Promise: C54
#[test]
fn calls_of_a_host_function_are_not_permitted() {
    static RESULTS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
    extern "C" fn make_calls(queue: *mut c_void) {
        let queue = queue.addr() as u64;
        let results = [
            cu!(cuStreamQuery(queue)),
            cu!(cuCtxSynchronize()),
            cu!(cuLaunchHostFunc(queue, make_calls, std::ptr::null_mut())),
        ];
        for (place, result) in RESULTS.iter().zip(results) {
            place.store(result.into(), Ordering::SeqCst);
        }
    }
    let _context = Context::new();
    let queue = stream(1);
    let data = std::ptr::without_provenance_mut(usize::try_from(queue).unwrap());
    ok!(cuLaunchHostFunc(queue, make_calls, data));
    ok!(cuStreamSynchronize(queue));
    assert_eq!(RESULTS.each_ref().map(|result| result.load(Ordering::SeqCst)), [800; 3]);
    // The thread goes on with other work, and this thread may call.
    ok!(cuStreamQuery(queue));
}

fn read_now(word: u64, stream: u64) -> u64 {
    let mut value = [0u64];
    ok!(cuMemcpyDtoHAsync_v2(value.as_mut_ptr().cast(), word, 8, stream));
    value[0]
}

#[test]
fn kernels_of_two_streams_run_at_the_same_time() {
    let _context = Context::new();
    let module = module(KERNELS);
    let (spin, store) = (function(module, "spin"), function(module, "store"));
    let (first, second, flag) = (stream(1), stream(1), Flag::new());
    // The first kernel cannot end before the second has run.
    assert_eq!(launch(spin, 1, 1, first, &mut [flag.address()]), 0);
    assert_eq!(launch(store, 1, 1, second, &mut [flag.address(), 1]), 0);
    ok!(cuCtxSynchronize());
    assert_eq!(flag.get(), 1);
}

#[test]
fn elapsed_time_between_events_is_that_of_the_work() {
    let _context = Context::new();
    let Kernels { spin, .. } = kernels();
    let (flag, queue, start, end) = (Flag::new(), stream(1), event(), event());
    let mut milliseconds = -1.0;
    ok!(cuEventRecord(start, queue));
    assert_eq!(launch(spin, 1, 1, queue, &mut [flag.address()]), 0);
    ok!(cuEventRecord(end, queue));
    assert_eq!(cu!(cuEventElapsedTime_v2(&raw mut milliseconds, start, end)), NOT_READY);
    assert_eq!(milliseconds, -1.0);
    // The event is recorded when its stream reaches it.
    ok!(cuEventSynchronize(start));
    let begun = Instant::now();
    std::thread::sleep(Duration::from_millis(20));
    flag.set(1);
    ok!(cuEventSynchronize(end));
    let waited = begun.elapsed().as_secs_f32() * 1e3;
    ok!(cuEventElapsedTime_v2(&raw mut milliseconds, start, end));
    assert!(milliseconds >= 20.0, "{milliseconds} of {waited}");
    assert_eq!(cu!(cuEventElapsedTime_v2(&raw mut milliseconds, start, event())), INVALID_HANDLE);
}

#[test]
fn destroyed_stream_finishes_its_work() {
    let _context = Context::new();
    let Kernels { spin, increment } = kernels();
    let (flag, queue, word) = (Flag::new(), stream(1), allocate(8));
    write(word, &[0u64]);
    assert_eq!(launch(spin, 1, 1, queue, &mut [flag.address()]), 0);
    assert_eq!(launch(increment, 1, 1, queue, &mut [word]), 0);
    let mark = event();
    ok!(cuEventRecord(mark, queue));
    ok!(cuStreamDestroy_v2(queue));
    assert_eq!(cu!(cuStreamQuery(queue)), INVALID_HANDLE);
    flag.set(1);
    ok!(cuEventSynchronize(mark));
    assert_eq!(read::<u64>(word, 1), [1]);
}

#[test]
fn context_with_an_endless_kernel_can_be_destroyed() {
    let context = Context::new();
    let mut doomed = 0;
    ok!(cuCtxCreate_v2(&raw mut doomed, 0, 0));
    let Kernels { spin, .. } = kernels();
    let word = allocate(8);
    write(word, &[0u64]);
    assert_eq!(launch(spin, 1, 1, stream(1), &mut [word]), 0);
    a_moment();
    ok!(cuCtxDestroy_v2(doomed));
    ok!(cuCtxSetCurrent(context.handle));
    ok!(cuCtxSynchronize());
}

#[test]
fn eight_threads_share_a_stream() {
    let context = Context::new();
    let Kernels { increment, .. } = kernels();
    let (queue, word, handle) = (stream(1), allocate(8), context.handle);
    write(word, &[0u64]);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(move || {
                ok!(cuCtxSetCurrent(handle));
                for _ in 0..200 {
                    assert_eq!(launch(increment, 1, 1, queue, &mut [word]), 0);
                }
                ok!(cuStreamSynchronize(queue));
            });
        }
    });
    assert_eq!(read::<u64>(word, 1), [1600]);
}
