//! Divergence, warp operations, barriers, budgets, calls, faults.

#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "test data")]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::{Buffer, Params, Rig, Shape, shape};
use softgpu_engine::{FaultKind, LoadErrorKind, Module};

const REGS: &str = ".reg .b32 %r<40>; .reg .b64 %d<20>; .reg .pred %p<10>; .reg .f32 %f<10>;\n\
    ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d0, %d1;\n";

fn one(body: &str, block: u32, n: usize) -> Vec<u32> {
    let mut rig = Rig::body(".param .u64 o", &format!("{REGS}{body}"));
    let o = Buffer::zeroed(n * 4);
    rig.map(&[&o]);
    rig.run("k", shape(1, block), Params::new().buf(&o));
    o.all()
}

#[test]
fn nested_divergence_reconverges() {
    // Every lane counts its own iterations; the active mask at the join is full again.
    let out = one(
        "mov.u32 %r1, 0; and.b32 %r2, %r0, 3;\n\
         outer: mov.u32 %r3, 0;\n\
         inner: add.u32 %r1, %r1, 1; add.u32 %r3, %r3, 1; setp.le.u32 %p1, %r3, %r2; @%p1 bra inner;\n\
         and.b32 %r4, %r1, 1; setp.eq.u32 %p2, %r4, 1; @%p2 bra odd; add.u32 %r1, %r1, 100; bra.uni join; odd: add.u32 %r1, %r1, 1000;\n\
         join: setp.lt.u32 %p3, %r1, 2000; @%p3 bra outer;\n\
         activemask.b32 %r5; st.global.u32 [%d1], %r1; st.global.u32 [%d1+128], %r5; ret;",
        32,
        64,
    );
    for lane in 0..32u32 {
        let mut c = 0;
        while c < 2000 {
            c += (lane & 3) + 1;
            c += if c & 1 == 1 { 1000 } else { 100 };
        }
        assert_eq!(out[lane as usize], c);
        assert_eq!(out[32 + lane as usize], !0);
    }
}

#[test]
fn guarded_exit_and_ret_end_only_their_lanes() {
    let out = one(
        "setp.gt.u32 %p1, %r0, 20; @%p1 exit; setp.lt.u32 %p2, %r0, 5; st.global.u32 [%d1], %r0; @!%p2 ret; st.global.u32 [%d1], 77; ret;",
        32,
        32,
    );
    let expected: Vec<u32> = (0..32)
        .map(|l| {
            if l > 20 {
                0
            } else if l < 5 {
                77
            } else {
                l
            }
        })
        .collect();
    assert_eq!(out, expected);
}

#[test]
fn branch_table_sends_each_lane_to_its_target() {
    let out = one(
        "rem.u32 %r1, %r0, 3; ts: .branchtargets L0, L1, L2;\n brx.idx %r1, ts;\n\
         L0: mov.u32 %r2, 10; bra done; L1: mov.u32 %r2, 20; bra done; L2: mov.u32 %r2, 30;\n done: st.global.u32 [%d1], %r2; ret;",
        32,
        32,
    );
    assert_eq!(out, (0..32).map(|l| (l % 3 + 1) * 10).collect::<Vec<u32>>());
}

#[test]
fn shuffles_in_parts_of_a_warp_stay_in_their_part() {
    // Tiles of eight lanes with their own masks; then the odd lanes alone inside a branch.
    let out = one(
        "and.b32 %r1, %r0, 24; mov.u32 %r2, 255; shl.b32 %r2, %r2, %r1;\n\
         shfl.sync.bfly.b32 %r3|%p1, %r0, 1, 0x181f, %r2; shfl.sync.down.b32 %r4|%p2, %r0, 3, 0x181f, %r2;\n\
         selp.u32 %r5, 100, 0, %p2; add.u32 %r4, %r4, %r5;\n\
         st.global.u32 [%d1], %r3; st.global.u32 [%d1+128], %r4;\n\
         and.b32 %r6, %r0, 1; setp.eq.u32 %p3, %r6, 0; @%p3 bra end;\n\
         shfl.sync.idx.b32 %r7, %r0, 7, 0x1f, 0xaaaaaaaa; vote.sync.ballot.b32 %r8, %p2, 0xaaaaaaaa; redux.sync.add.u32 %r9, %r0, 0xaaaaaaaa;\n\
         st.global.u32 [%d1+256], %r7; st.global.u32 [%d1+384], %r8; st.global.u32 [%d1+512], %r9;\n end: ret;",
        32,
        160,
    );
    for l in 0..32usize {
        let n = l as u32;
        assert_eq!(out[l], n ^ 1);
        let inside = l % 8 + 3 < 8;
        assert_eq!(out[32 + l], if inside { n + 3 + 100 } else { n });
        if l % 2 == 1 {
            assert_eq!(out[64 + l], 7);
            assert_eq!(out[96 + l], (1..32).step_by(2).filter(|k| k % 8 + 3 < 8).fold(0, |m, k| m | 1 << k));
            assert_eq!(out[128 + l], 256);
        }
    }
}

// Promise: S95
#[test]
fn shuffle_gives_zero_for_a_lane_that_does_not_execute_it() {
    // Each lane has a value. When the odd lanes from 9 on read the lane below and the second one below, lanes 0 to 7 have exited and the
    // other even ones are at a later instruction. There, all lanes that are left read the lane below, which is not in their mask.
    let out = one(
        "add.u32 %r1, %r0, 100; and.b32 %r2, %r0, 1; setp.lt.u32 %p1, %r0, 8; @%p1 exit;\n\
         setp.eq.u32 %p2, %r2, 0; @%p2 bra join;\n\
         shfl.sync.up.b32 %r3|%p3, %r1, 1, 0, 0xaaaaaaaa; selp.u32 %r3, %r3, 1, %p3; st.global.u32 [%d1], %r3;\n\
         sub.u32 %r4, %r0, 2; shfl.sync.idx.b32 %r4, %r1, %r4, 31, 0xaaaaaaaa; st.global.u32 [%d1+128], %r4;\n\
         join: mov.u32 %r5, 1; shl.b32 %r5, %r5, %r0; shfl.sync.up.b32 %r6, %r1, 1, 0, %r5; st.global.u32 [%d1+256], %r6; ret;",
        32,
        96,
    );
    for lane in 8..32usize {
        let odd = lane % 2 == 1;
        assert_eq!(out[lane], 0, "lane {lane}");
        assert_eq!(out[32 + lane], if odd && lane > 9 { lane as u32 + 98 } else { 0 }, "lane {lane}");
        assert_eq!(out[64 + lane], if lane > 8 { lane as u32 + 99 } else { 0 }, "lane {lane}");
    }
}

#[test]
fn warp_operation_waits_for_its_members() {
    // Two paths of different length lead to one shuffle; a loop delays half of the lanes.
    let out = one(
        "setp.lt.u32 %p1, %r0, 16; @%p1 bra sync;\n mov.u32 %r1, 0;\n loop: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 50; @%p2 bra loop;\n\
         bra sync2;\n sync: bar.warp.sync 0xffffffff; bra join;\n sync2: bar.warp.sync 0xffffffff;\n\
         join: shfl.sync.idx.b32 %r2, %r0, 31, 0x1f, 0xffffffff; st.global.u32 [%d1], %r2; ret;",
        32,
        32,
    );
    assert_eq!(out, vec![31; 32]);
    // The exit of the missing lanes releases the others.
    let out = one(
        "setp.lt.u32 %p1, %r0, 16; @%p1 bra wait; mov.u32 %r1, 0;\n\
         loop: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 9000; @%p2 bra loop; exit;\n\
         wait: vote.sync.any.pred %p3, 1, 0xffffffff; selp.u32 %r2, 5, 6, %p3; st.global.u32 [%d1], %r2; ret;",
        32,
        16,
    );
    assert_eq!(out, vec![5; 16]);
}

// Promise: S95
#[test]
fn tiles_of_a_warp_wait_at_barriers_of_their_own() {
    // All lanes arrive together, with the masks of four tiles. Then a loop delays half of each tile, whose values the other half reads.
    let out = one(
        ".shared .b32 s[32]; and.b32 %r1, %r0, 24; mov.u32 %r2, 255; shl.b32 %r2, %r2, %r1; bar.warp.sync %r2;\n\
         and.b32 %r3, %r0, 7; setp.lt.u32 %p1, %r3, 4; @!%p1 bra store; mov.u32 %r4, 0;\n\
         loop: add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 9000; @%p2 bra loop;\n\
         store: mov.u32 %r5, s; mad.lo.u32 %r6, %r0, 4, %r5; st.shared.u32 [%r6], %r0; bar.warp.sync %r2;\n\
         xor.b32 %r7, %r0, 7; mad.lo.u32 %r6, %r7, 4, %r5; ld.shared.u32 %r8, [%r6]; st.global.u32 [%d1], %r8; ret;",
        32,
        32,
    );
    assert_eq!(out, (0..32).map(|lane| lane ^ 7).collect::<Vec<u32>>());
    // A tile does not wait for the lanes of another one, which wait for it.
    let out = one(
        ".shared .b32 s[32]; and.b32 %r1, %r0, 16; mov.u32 %r2, 65535; shl.b32 %r2, %r2, %r1; setp.lt.u32 %p1, %r0, 16; @%p1 bra first;\n\
         mov.u32 %r4, 0; wait: ld.volatile.shared.u32 %r4, [s]; setp.eq.u32 %p2, %r4, 0; @%p2 bra wait; bar.warp.sync %r2; bra end;\n\
         first: bar.warp.sync %r2; mov.u32 %r4, 5; st.volatile.shared.u32 [s], %r4;\n\
         end: st.global.u32 [%d1], %r4; ret;",
        32,
        32,
    );
    assert_eq!(out, vec![5; 32]);
}

#[test]
fn match_finds_the_lanes_with_equal_values() {
    let out = one(
        "rem.u32 %r1, %r0, 5; match.any.sync.b32 %r2, %r1, 0xffffffff; st.global.u32 [%d1], %r2;\n\
         match.all.sync.b32 %r3|%p1, %r1, 0xffffffff; selp.u32 %r4, 1, 0, %p1; add.u32 %r3, %r3, %r4; st.global.u32 [%d1+128], %r3; ret;",
        32,
        64,
    );
    for l in 0..32usize {
        assert_eq!(out[l], (0..32).filter(|k| k % 5 == l % 5).fold(0, |m, k| m | 1 << k));
        assert_eq!(out[32 + l], 0);
    }
}

// Promise: S95
#[test]
fn warp_operation_whose_mask_lacks_the_lane_is_an_illegal_instruction() {
    for operation in ["shfl.sync.idx.b32 %r1, %r0, 0, 31, 0xfffffffe", "bar.warp.sync 0xfffffffe"] {
        let mut rig =
            Rig::body(".param .u64 o", &format!("{REGS} {operation}; st.global.u32 [%d1], %r1; ret;"));
        let o = Buffer::zeroed(128);
        rig.map(&[&o]);
        assert_eq!(
            rig.launch("k", shape(1, 32), Params::new().buf(&o)).unwrap_err().kind,
            FaultKind::IllegalInstruction,
            "{operation}"
        );
    }
}

#[test]
fn barriers_complete_with_partial_warps_and_after_exits() {
    // 50 threads; the last ten exit before the barrier; values cross warps through shared memory.
    let body = format!(
        ".shared .b32 s[64];\n{REGS} setp.ge.u32 %p1, %r0, 40; @%p1 exit;\n mov.u32 %r1, s; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], %r0;\n\
         bar.sync 0; sub.u32 %r3, 39, %r0; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r4, [%r3]; bar.sync 0;\n\
         setp.lt.u32 %p2, %r0, 8; bar.red.popc.u32 %r5, 0, %p2; bar.red.and.pred %p3, 0, !%p2; selp.u32 %r6, 1, 0, %p3;\n\
         mad.lo.u32 %r4, %r5, 1000, %r4; add.u32 %r4, %r4, %r6; st.global.u32 [%d1], %r4; ret;"
    );
    let mut rig = Rig::body(".param .u64 o", &body);
    let o = Buffer::zeroed(200);
    rig.map(&[&o]);
    rig.run("k", shape(1, 50), Params::new().buf(&o));
    let out: Vec<u32> = o.all();
    for t in 0..40u32 {
        assert_eq!(out[t as usize], 39 - t + 8000);
    }
}

#[test]
fn consumers_at_a_named_barrier_wait_for_producers() {
    let body = format!(
        ".shared .b32 s[64];\n{REGS} mov.u32 %r1, s; mad.lo.u32 %r2, %r0, 4, %r1; setp.lt.u32 %p1, %r0, 32; @%p1 bra producer;\n\
         barrier.sync 3, 64; ld.shared.u32 %r3, [%r2+-128]; st.global.u32 [%d1], %r3; bra end;\n\
         producer: add.u32 %r3, %r0, 7; st.shared.u32 [%r2], %r3; barrier.cta.arrive 3, 64;\n end: ret;"
    );
    let mut rig = Rig::body(".param .u64 o", &body);
    let o = Buffer::zeroed(256);
    rig.map(&[&o]);
    rig.run("k", shape(1, 64), Params::new().buf(&o));
    assert_eq!(o.all::<u32>()[32..], (0..32).map(|l| l + 7).collect::<Vec<u32>>());
}

#[test]
fn barrier_that_cannot_complete_ends_the_launch() {
    let mut rig =
        Rig::body(".param .u64 o", &format!("{REGS} bar.sync 1, 96; st.global.u32 [%d1], %r0; ret;"));
    let o = Buffer::zeroed(256);
    rig.map(&[&o]);
    assert_eq!(
        rig.launch("k", shape(1, 64), Params::new().buf(&o)).unwrap_err().kind,
        FaultKind::LaunchFailed
    );
}

#[test]
fn blocks_that_wait_for_each_other_make_progress() {
    // Block 0 waits for the last block on one worker: the launch can only end if blocks are parked.
    let body = format!(
        "{REGS} mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; sub.u32 %r2, %r2, 1; setp.eq.u32 %p1, %r1, %r2; @%p1 bra last;\n\
         spin: ld.acquire.gpu.global.u32 %r3, [%d0]; setp.eq.u32 %p2, %r3, 0; @%p2 bra spin;\n\
         atom.global.add.u32 %r4, [%d0+4], 1; bra end;\n\
         last: st.release.gpu.global.u32 [%d0], 1;\n end: ret;"
    );
    let mut rig = Rig::body(".param .u64 o", &body);
    rig.pool = softgpu_engine::Pool::new(1);
    let o = Buffer::zeroed(8);
    rig.map(&[&o]);
    rig.run("k", shape(20, 1), Params::new().buf(&o));
    assert_eq!(o.get::<u32>(1), 19);
}

#[test]
fn stop_flag_ends_an_endless_loop() {
    let mut rig = Rig::body("", "loop: bra loop;");
    rig.alone = true;
    std::thread::scope(|s| {
        let run = s.spawn(|| rig.launch("k", shape(3, 64), Params::new()));
        std::thread::sleep(Duration::from_millis(30));
        rig.stop.store(true, Ordering::Relaxed);
        assert_eq!(run.join().unwrap().unwrap_err().kind, FaultKind::Stopped);
    });
}

#[test]
fn stop_flag_ends_an_endless_loop_that_splits_in_every_round() {
    let body = ".reg .b32 %r<3>; .reg .pred %p<3>; mov.u32 %r0, %tid.x; and.b32 %r0, %r0, 1; setp.eq.u32 %p0, %r0, 0;\n\
        loop: @%p0 bra even; add.u32 %r1, %r1, 1; even: bra loop;";
    let mut rig = Rig::body("", body);
    rig.alone = true;
    std::thread::scope(|s| {
        let run = s.spawn(|| rig.launch("k", shape(3, 64), Params::new()));
        std::thread::sleep(Duration::from_millis(30));
        rig.stop.store(true, Ordering::Relaxed);
        assert_eq!(run.join().unwrap().unwrap_err().kind, FaultKind::Stopped);
    });
}

#[test]
fn wait_in_a_loop_that_splits_lets_other_lanes_run() {
    // Lanes other than 0 wait for lane 0 at a low pc, and split in every round.
    let out = one(
        "and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r0, 0; @%p2 bra store;\n\
         spin: @%p1 bra even; add.u32 %r2, %r2, 1; even: ld.volatile.global.u32 %r3, [%d0+128]; setp.eq.u32 %p3, %r3, 0; @%p3 bra spin;\n\
         st.global.u32 [%d1], 1; ret;\n store: st.volatile.global.u32 [%d0+128], 5; st.global.u32 [%d1], 1; ret;",
        32,
        33,
    );
    assert_eq!(&out[..32], &[1; 32]);
}

#[test]
fn fault_names_the_thread_the_address_and_the_line() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 o)\n{\n.reg .b32 %r<3>; .reg .b64 %d<3>;\n\
        ld.param.u64 %d0, [o];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %d1, %r0, 4;\nadd.s64 %d1, %d0, %d1;\nst.global.u32 [%d1], %r0;\nret;\n}\n";
    let mut rig = Rig::new(text);
    let o = Buffer::zeroed(100 * 4);
    rig.map(&[&o]);
    let mut s = shape(2, 1);
    s.block = [10, 11, 1];
    // Rows of ten: thread (x, y) writes element x, always in range.
    rig.run("k", s, Params::new().buf(&o));
    let fault = rig.launch("k", shape(1, 128), Params::new().buf(&o)).unwrap_err();
    assert_eq!((fault.kind, fault.thread, fault.line), (FaultKind::IllegalAddress, [100, 0, 0], 11));
    assert_eq!(fault.address, o.addr() + 400);
    let fault = rig.launch("k", shape(1, 4), Params::new().put(o.addr() + 2)).unwrap_err();
    assert_eq!((fault.kind, fault.thread, fault.address), (FaultKind::Misaligned, [0, 0, 0], o.addr() + 2));
    // Read-only memory.
    rig.table.ranges.iter_mut().for_each(|r| r.1 = false);
    assert_eq!(
        rig.launch("k", shape(1, 4), Params::new().buf(&o)).unwrap_err().kind,
        FaultKind::IllegalAddress
    );
}

#[test]
fn access_beyond_shared_memory_or_a_mapping_fails() {
    let body =
        format!(".shared .b32 s[4];\n{REGS} ld.shared.u32 %r1, [%r0+60000]; st.global.u32 [%d1], %r1; ret;");
    let mut rig = Rig::body(".param .u64 o", &body);
    let o = Buffer::zeroed(128);
    rig.map(&[&o]);
    assert_eq!(
        rig.launch("k", shape(1, 1), Params::new().buf(&o)).unwrap_err().kind,
        FaultKind::LaunchFailed
    );
    let mut rig = Rig::body(
        ".param .u64 o",
        &format!("{REGS} ld.global.v2.u64 {{%d2, %d3}}, [%d0]; st.global.u64 [%d0], %d2; ret;"),
    );
    let (lo, hi) = (o.addr().next_multiple_of(16), o.addr().next_multiple_of(16) + 8);
    rig.table.ranges.push((lo..hi, true));
    assert_eq!(
        rig.launch("k", shape(1, 1), Params::new().put(lo)).unwrap_err().kind,
        FaultKind::IllegalAddress
    );
    // Two adjacent ranges act as one.
    rig.table.ranges.push((hi..hi + 8, true));
    rig.run("k", shape(1, 1), Params::new().put(lo));
}

#[test]
fn generic_addresses_reach_every_window() {
    let body = format!(
        ".shared .align 8 .b32 s[64]; .local .align 8 .b8 l[64];\n{REGS}\
         mov.u64 %d2, s; cvta.shared.u64 %d2, %d2; mul.wide.u32 %d3, %r0, 4; add.u64 %d2, %d2, %d3; st.u32 [%d2], %r0;\n\
         mov.u64 %d4, l; cvta.local.u64 %d4, %d4; add.u32 %r1, %r0, 5; st.u32 [%d4+8], %r1;\n\
         isspacep.shared %p1, %d2; isspacep.local %p2, %d4; isspacep.global %p3, %d0; and.pred %p1, %p1, %p2; and.pred %p1, %p1, %p3;\n\
         bar.sync 0; xor.b32 %r2, %r0, 1; mov.u32 %r3, s; mad.lo.u32 %r3, %r2, 4, %r3; ld.shared.u32 %r4, [%r3];\n\
         ld.local.u32 %r5, [l+8]; atom.add.u32 %r6, [%d2], 10; ld.u32 %r7, [%d2];\n\
         mad.lo.u32 %r4, %r4, 100, %r5; add.u32 %r4, %r4, %r7; selp.u32 %r8, 100000, 0, %p1; add.u32 %r4, %r4, %r8; st.u32 [%d1], %r4; ret;"
    );
    let mut rig = Rig::body(".param .u64 o", &body);
    let o = Buffer::zeroed(128);
    rig.map(&[&o]);
    rig.run("k", shape(1, 32), Params::new().buf(&o));
    for t in 0..32u32 {
        assert_eq!(o.get::<u32>(t as usize), (t ^ 1) * 100 + t + 5 + t + 10 + 100_000);
    }
    // Atomics on local memory are faults.
    let body = format!(
        ".local .align 8 .b8 l[64];\n{REGS} mov.u64 %d4, l; cvta.local.u64 %d4, %d4; atom.add.u32 %r6, [%d4], 10; st.u32 [%d1], %r6; ret;"
    );
    let mut rig = Rig::body(".param .u64 o", &body);
    rig.map(&[&o]);
    assert_eq!(
        rig.launch("k", shape(1, 32), Params::new().buf(&o)).unwrap_err().kind,
        FaultKind::AddressSpace
    );
}

#[test]
fn parameters_are_read_by_address_and_in_small_types() {
    let rig_text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .align 4 .b8 a[12], .param .u64 o)\n{ .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .b16 %h<3>;\n\
        ld.param.u64 %d0, [o]; mov.b64 %d1, a; cvta.param.u64 %d2, %d1; mov.u32 %r0, %tid.x; mul.wide.u32 %d3, %r0, 4; add.u64 %d2, %d2, %d3; ld.u32 %r1, [%d2];\n\
        add.u64 %d1, %d1, %d3; ld.param.u32 %r2, [%d1]; ld.param.s8 %r3, [a+1]; ld.param.u8 %h0, [a]; cvt.u32.u16 %r4, %h0;\n\
        add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; add.u32 %r1, %r1, %r4; add.u64 %d0, %d0, %d3; st.global.u32 [%d0], %r1; ret; }";
    let mut rig = Rig::new(rig_text);
    let o = Buffer::zeroed(12);
    rig.map(&[&o]);
    rig.run("k", shape(1, 3), Params::new().put(0x0000_fe07u32).put(20u32).put(30u32).put(0u32).buf(&o));
    assert_eq!(o.all::<u32>(), [2 * 0xfe07 - 2 + 7, 40 - 2 + 7, 60 - 2 + 7]);
}

#[test]
fn calls_with_structures_and_divergent_depth_return_their_results() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n\
        .func (.param .align 4 .b8 ret[12]) f(.param .align 4 .b8 arg[12], .param .b32 n);\n\
        .func (.param .align 4 .b8 ret[12]) f(.param .align 4 .b8 arg[12], .param .b32 n)\n\
        { .reg .b32 %r<9>; .reg .pred %p<2>; .local .align 4 .b8 l[16];\n\
          ld.param.u32 %r0, [n]; ld.param.u32 %r1, [arg]; ld.param.u32 %r2, [arg+4]; ld.param.u16 %r3, [arg+8]; st.local.u32 [l], %r0;\n\
          setp.eq.u32 %p0, %r0, 0; @%p0 bra leaf; sub.u32 %r4, %r0, 1; add.u32 %r1, %r1, %r0; add.u32 %r3, %r3, 1;\n\
          { .param .align 4 .b8 a0[12]; .param .b32 a1; .param .align 4 .b8 r0[12]; st.param.b32 [a0], %r1; st.param.b32 [a0+4], %r2; st.param.b16 [a0+8], %r3; st.param.b32 [a1], %r4;\n\
            call.uni (r0), f, (a0, a1); ld.param.b32 %r1, [r0]; ld.param.b32 %r2, [r0+4]; ld.param.b16 %r3, [r0+8]; }\n\
          ld.local.u32 %r5, [l]; mad.lo.u32 %r2, %r5, 3, %r2;\n\
          leaf: st.param.b32 [ret], %r1; st.param.b32 [ret+4], %r2; st.param.b16 [ret+8], %r3; ret; }\n\
        .visible .entry k(.param .u64 o)\n{ .reg .b32 %r<9>; .reg .b64 %d<3>; ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 12; add.u64 %d0, %d0, %d1;\n\
          { .param .align 4 .b8 a0[12]; .param .b32 a1; .param .align 4 .b8 r0[12]; st.param.b32 [a0], %r0; st.param.b32 [a0+4], 5; st.param.b16 [a0+8], 1; and.b32 %r5, %r0, 7; st.param.b32 [a1], %r5;\n\
            call (r0), f, (a0, a1); ld.param.b32 %r1, [r0]; ld.param.b32 %r2, [r0+4]; ld.param.u16 %r3, [r0+8]; }\n\
          st.global.u32 [%d0], %r1; st.global.u32 [%d0+4], %r2; st.global.u32 [%d0+8], %r3; ret; }";
    let mut rig = Rig::new(text);
    let o = Buffer::zeroed(40 * 12);
    rig.map(&[&o]);
    rig.run("k", shape(1, 40), Params::new().buf(&o));
    for t in 0..40u32 {
        let n = t & 7;
        let sum: u32 = (0..=n).sum();
        let at = t as usize * 3;
        assert_eq!([o.get::<u32>(at), o.get(at + 1), o.get(at + 2)], [t + sum, 5 + 3 * sum, 1 + n]);
    }
}

#[test]
fn endless_recursion_fails_the_launch() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.func f() { call.uni f; ret; }\n.visible .entry k() { call.uni f; ret; }";
    let rig = Rig::new(text);
    assert_eq!(rig.launch("k", shape(2, 64), Params::new()).unwrap_err().kind, FaultKind::StackOverflow);
}

#[test]
fn initialisers_produce_the_bytes_of_globals() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.global .align 4 .b32 a[2][3] = {{1, 2}, {4, -5, 6}};\n\
        .global .align 8 .u64 p[2] = {a+8, generic(a)};\n.const .align 4 .f32 c[] = {0f3F800000, 2.5};\n.global .align 1 .b8 m[2] = {0xFF(a), 0xFF00(a)};\n\
        .visible .global .align 8 .f64 d = 0d4000000000000000;\n.global .b32 u;\n.visible .entry k() { ret; }";
    let m = Module::load(text.as_bytes(), 80).unwrap();
    let at = |i: usize| 0x1000 + 0x100 * i as u64;
    let bytes = |i: usize| m.initial_bytes(i, &at);
    let words = |b: Vec<u8>| b.as_chunks::<4>().0.iter().map(|w| i32::from_le_bytes(*w)).collect::<Vec<_>>();
    assert_eq!(words(bytes(0)), [1, 2, 0, 4, -5, 6]);
    assert_eq!(words(bytes(1)), [0x1008, 0, 0x1000, 0]);
    assert_eq!(words(bytes(2)), [0x3f80_0000, 0x4020_0000]);
    assert_eq!(bytes(3), [0x00, 0x10]);
    assert_eq!(f64::from_le_bytes(bytes(4).try_into().unwrap()), 2.0);
    assert!(
        bytes(5).is_empty()
            && !m.globals()[5].initialised
            && m.globals()[4].visible
            && m.globals()[2].constant
    );
}

#[test]
fn load_error_names_its_kind_and_its_line() {
    let head = ".version 8.7\n.target sm_90a\n.address_size 64\n";
    let load = |text: &str| match Module::load(text.as_bytes(), 90) {
        Ok(module) => module.kernels().iter().find_map(|kernel| kernel.refusal.clone()),
        Err(error) => Some(error),
    };
    let load = |text: &str| load(text).map(|e| (e.kind, e.line, e.message));
    let kernel = |body: &str| {
        format!(
            "{head}.visible .entry k()\n{{ .reg .b32 %r<5>; .reg .b64 %d<5>; .reg .f32 %f<9>; .reg .pred %p<3>;\n{body}\nret; }}"
        )
    };
    let expect = |text: &str, kind: LoadErrorKind, line: u32, part: &str| {
        let (k, l, m) = load(text).unwrap_or_else(|| panic!("loads: {text}"));
        assert_eq!((k, l), (kind, line), "{m}");
        assert!(m.contains(part), "{m}");
    };
    expect(".version 9.9\n.target sm_80\n", LoadErrorKind::Version, 1, "9.9");
    expect(".version 8.0\n.target sm_100\n", LoadErrorKind::Target, 2, "sm_100 is above sm_90");
    expect(".version 8.0\n.target sm_80a\n", LoadErrorKind::Target, 2, "sm_80a is not for sm_90");
    expect(
        &kernel("tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d1, %d2, {%f5,%f6}];"),
        LoadErrorKind::Unsupported,
        6,
        "tex.2d.v4.f32.f32",
    );
    expect(&kernel("wgmma.fence.sync.aligned;"), LoadErrorKind::Unsupported, 6, "wgmma");
    expect(&kernel("frobnicate.u32 %r1, %r2;"), LoadErrorKind::Syntax, 6, "frobnicate.u32");
    expect(&kernel("add.s32 %r1, %r2;"), LoadErrorKind::Syntax, 6, "operands");
    expect(&kernel("add.s64 %d1, %d2, %r1;"), LoadErrorKind::Syntax, 6, "%r1");
    expect(&kernel("add.s32.banana %r1, %r2, %r3;"), LoadErrorKind::Syntax, 6, "banana");
    expect(&kernel("mov.u32 %r9, 0;"), LoadErrorKind::Syntax, 6, "%r9");
    expect(&kernel("bra nowhere;"), LoadErrorKind::Syntax, 6, "nowhere");
    expect(&kernel("add.s32 %r1, %r2 %r3;"), LoadErrorKind::Syntax, 6, "','");
    expect(
        &format!("{head}.extern .func g();\n.visible .entry k() {{\ncall.uni g; ret; }}"),
        LoadErrorKind::Link,
        6,
        "g",
    );
    expect(
        &format!(
            "{head}.extern .global .b32 x;\n.visible .entry k() {{ .reg .b32 %r<2>;\nld.global.u32 %r1, [x]; ret; }}"
        ),
        LoadErrorKind::Link,
        6,
        "x",
    );
    assert!(load("\0").is_some() && load("").is_some());
    assert!(load(&format!("{}\0junk", kernel(""))).is_none());
}

// Promise: S65
#[test]
fn launch_ends_when_its_time_has_come() {
    let mut rig = Rig::body("", "again:\nbra again;");
    rig.alone = true;
    rig.deadline = Some(Instant::now() + Duration::from_millis(50));
    let fault = rig.launch("k", shape(2, 64), Params::new()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Timeout);
    assert!(Instant::now() >= rig.deadline.unwrap());
    // The line of the loop.
    assert!((6..=7).contains(&fault.line), "{fault}");
    rig.deadline = Some(Instant::now() + Duration::from_secs(3600));
    let rig = Rig { linked: Rig::body("", "").linked, ..rig };
    rig.run("k", shape(2, 64), Params::new());
}

// Promise: S65
#[test]
fn stop_ends_a_launch_of_many_short_blocks() {
    let mut rig = Rig::body("", "");
    rig.alone = true;
    // All blocks take months.
    let endless = Shape { grid: [i32::MAX.cast_unsigned(), 65_535, 1], ..shape(1, 1) };
    std::thread::scope(|scope| {
        let launched = scope.spawn(|| rig.launch("k", endless, Params::new()));
        rig.stop.store(true, Ordering::Relaxed);
        assert_eq!(launched.join().unwrap().unwrap_err().kind, FaultKind::Stopped);
    });
}

// Promise: S65
#[test]
fn block_that_needs_more_registers_than_there_are_is_too_large() {
    let live: String = (0..400).map(|n| format!("mov.u64 %d{n}, %clock64;\n")).collect();
    let used: String = (1..400).map(|n| format!("add.u64 %d0, %d0, %d{n};\n")).collect();
    let of = |directive: &str| {
        let text = format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 o) {directive}\n\
             {{ .reg .b64 %d<400>; {live}{used} st.global.u64 [%d0], %d0; ret; }}"
        );
        let module = Module::load(text.as_bytes(), 80).unwrap();
        (module.kernels()[0].registers, module.kernels()[0].max_threads)
    };
    // As a compiler does: what nothing allows stays small enough for the largest block.
    assert_eq!(of(""), (64, 1024));
    assert_eq!(of(".maxntid 256, 1, 1"), (128, 256));
    assert_eq!(of(".maxnreg 128"), (128, 512));
    assert_eq!(of(".maxnreg 96"), (96, 640));
    assert_eq!(of(".maxnreg 32"), (32, 1024));
}

// Promise: S94
#[test]
fn warps_that_leave_a_loop_with_a_barrier_one_by_one_give_their_sums() {
    // Each warp adds the word of the next one, which that warp has changed before the barrier; warp n leaves after n + 1 rounds.
    let mut rig = Rig::body(
        ".param .u64 o",
        ".shared .align 4 .b8 s[1024]; .reg .b32 %r<12>; .reg .b64 %d<3>; .reg .pred %p<2>;\n\
         ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, %d1;\n\
         shl.b32 %r1, %r0, 2; mov.u32 %r2, s; add.u32 %r1, %r1, %r2; add.u32 %r3, %r0, 32; and.b32 %r3, %r3, 255;\n\
         shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r2; shr.u32 %r4, %r0, 5; mov.u32 %r5, 0; mov.u32 %r6, 0;\n\
         again: mad.lo.u32 %r7, %r5, 1000, %r0; st.shared.u32 [%r1], %r7; bar.sync 0;\n\
         ld.shared.u32 %r8, [%r3]; add.u32 %r6, %r6, %r8; bar.sync 0;\n\
         add.u32 %r5, %r5, 1; setp.le.u32 %p0, %r5, %r4; @%p0 bra again; st.global.u32 [%d0], %r6; ret;",
    );
    let out = Buffer::zeroed(256 * 4);
    rig.map(&[&out]);
    rig.run("k", shape(1, 256), Params::new().buf(&out));
    for thread in 0..256u32 {
        let (warp, next) = (thread / 32, (thread + 32) % 256);
        // The next warp of the last one is the first, which stays at the word of its only round.
        let last = |round: u32| round.min(next / 32);
        let expected: u32 = (0..=warp).map(|round| last(round) * 1000 + next).sum();
        assert_eq!(out.get::<u32>(thread as usize), expected, "thread {thread}");
    }
}

// Promise: S94
#[test]
fn fault_of_a_later_warp_behind_a_barrier_has_its_thread() {
    // Thread 70 leaves its memory in the third round; the warps before its own have finished that round.
    let mut rig = Rig::body(
        ".param .u64 o",
        ".reg .b32 %r<12>; .reg .b64 %d<4>; .reg .pred %p<3>;\n\
         ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, %d1; mov.u32 %r5, 0;\n\
         again: add.u32 %r5, %r5, 1; setp.eq.u32 %p0, %r0, 70; setp.eq.u32 %p1, %r5, 3; and.pred %p0, %p0, %p1;\n\
         selp.b64 %d2, 4096, %d0, %p0; bar.sync 0;\n\
         st.global.u32 [%d2], %r5; bar.sync 0; setp.lt.u32 %p1, %r5, 9; @%p1 bra again; ret;",
    );
    let out = Buffer::zeroed(128 * 4);
    rig.map(&[&out]);
    let fault = rig.launch("k", shape(1, 128), Params::new().buf(&out)).unwrap_err();
    assert_eq!((fault.kind, fault.thread, fault.address), (FaultKind::IllegalAddress, [70, 0, 0], 4096));
    let out = out.all::<u32>();
    assert!(
        out[..64].iter().all(|&round| round == 3) && out[96..].iter().all(|&round| round == 2),
        "{out:?}"
    );
}

// Promise: S94
#[test]
fn block_in_a_loop_around_a_barrier_offers_the_device_to_others() {
    const BARRIERS: u32 = 100_000;
    let mut rig = Rig::body(
        "",
        &format!(
            ".reg .b32 %r<2>; .reg .pred %p<1>; mov.u32 %r0, 0;\n\
             again: add.u32 %r0, %r0, 1; bar.sync 0; setp.lt.u32 %p0, %r0, {BARRIERS}; @%p0 bra again; ret;"
        ),
    );
    rig.alone = true;
    rig.run("k", shape(1, 64), Params::new());
    let yields = rig.host.yields.load(Ordering::Relaxed);
    assert!(yields >= BARRIERS / 1024, "{yields}");
}

// Promise: S94
#[test]
fn endless_loop_around_a_barrier_ends_with_its_launch() {
    let mut rig = Rig::body(
        "",
        ".reg .b32 %r<2>; .reg .pred %p<1>; mov.u32 %r0, 1;\n\
         again: or.b32 %r0, %r0, 1; bar.sync 0; setp.ne.u32 %p0, %r0, 0; @%p0 bra again; ret;",
    );
    rig.alone = true;
    std::thread::scope(|s| {
        let run = s.spawn(|| rig.launch("k", shape(3, 96), Params::new()));
        std::thread::sleep(Duration::from_millis(30));
        rig.stop.store(true, Ordering::Relaxed);
        assert_eq!(run.join().unwrap().unwrap_err().kind, FaultKind::Stopped);
    });
}
