//! A process that gives up the right to open files after `cuInit`, as Sluice's worker does, can still compute.

use crate::support::confine::confine;
use crate::support::*;

#[test]
fn driver_opens_no_file_after_initialisation() {
    let state = new_state();
    let status = start_child("confined::confined_in_own_process", state.path(), "confined").wait().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
#[ignore = "a part of driver_opens_no_file_after_initialisation"]
fn confined_in_own_process() {
    ok!(cuInit(0));
    // On a thread of its own: the filter applies to threads started from here.
    std::thread::spawn(|| {
        confine();
        let mut context = 0;
        ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
        let module = module(KERNELS);
        let increment = function(module, "increment");
        let word = allocate(8);
        write(word, &[1u64]);
        let streams = [stream(0), stream(1), stream(1)];
        for stream in streams {
            assert_eq!(launch(increment, 1, 1, stream, &mut [word]), 0);
            ok!(cuStreamSynchronize(stream));
        }
        assert_eq!(read::<u64>(word, 1), [4]);
        // No memory is left, so the driver reaps dead owners first.
        let mut address = 0;
        assert_eq!(cu!(cuMemAlloc_v2(&raw mut address, free_bytes() + PAGE)), OUT_OF_MEMORY);
        let nothing = function(module, "nothing");
        let fault = function(module, "stop");
        assert_eq!(launch(nothing, 4, 32, 0, &mut []), 0);
        assert_eq!(launch(fault, 1, 1, 0, &mut []), 0);
        assert_eq!(cu!(cuCtxSynchronize()), 719);
        ok!(cuCtxDestroy_v2(context));
    })
    .join()
    .unwrap();
}
