//! Memory that a thread takes from its stack.

use softgpu_engine::FaultKind;

use crate::common::{Buffer, Params, Rig, shape};

// Promise: S76
#[test]
fn each_thread_takes_memory_of_its_own_size() {
    // Each thread fills as many words as its number says, twice, and adds up both: the first ones are still there.
    let rig = |align: u64| {
        Rig::body(
            ".param .u64 o",
            &format!(
                ".reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<2>; .local .align 8 .b8 l[24];\n\
                 ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; add.u32 %r1, %r0, 1; mul.wide.u32 %d1, %r1, 4;\n\
                 st.local.b32 [l+20], 77777;\n\
                 alloca.u64 %d2, %d1, {align}; alloca.u64 %d3, %d1;\n\
                 mov.u32 %r2, 0; mov.b64 %d4, %d2; mov.b64 %d5, %d3;\n\
                 fill: mad.lo.u32 %r3, %r2, 3, %r0; st.local.u32 [%d4], %r3; st.local.u32 [%d5], %r2;\n\
                 add.u64 %d4, %d4, 4; add.u64 %d5, %d5, 4; add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, %r1; @%p0 bra fill;\n\
                 mov.u32 %r4, 0; mov.b64 %d4, %d2; mov.b64 %d5, %d3;\n\
                 sum: ld.local.u32 %r5, [%d4]; ld.local.u32 %r6, [%d5]; add.u32 %r4, %r4, %r5; mad.lo.u32 %r4, %r6, 1000, %r4;\n\
                 add.u64 %d4, %d4, 4; add.u64 %d5, %d5, 4; sub.u32 %r2, %r2, 1; setp.gt.u32 %p0, %r2, 0; @%p0 bra sum;\n\
                 ld.local.u32 %r5, [l+20]; add.u32 %r4, %r4, %r5;\n\
                 mul.wide.u32 %d6, %r0, 16; add.u64 %d0, %d0, %d6; st.global.u32 [%d0], %r4;\n\
                 cvt.u32.u64 %r7, %d2; and.b32 %r7, %r7, {}; st.global.u32 [%d0+4], %r7; sub.u64 %d7, %d3, %d2; st.global.u64 [%d0+8], %d7; ret;",
                align - 1
            ),
        )
    };
    for align in [1, 8, 64, 1024] {
        let mut rig = rig(align);
        let out = Buffer::zeroed(64 * 16);
        rig.map(&[&out]);
        rig.run("k", shape(1, 64), Params::new().buf(&out));
        for thread in 0..64u32 {
            let words = 0..=thread;
            let expected: u32 = words.map(|n| 3 * n + thread + 1000 * n).sum::<u32>() + 77777;
            let n = thread as usize;
            assert_eq!(out.get::<u32>(4 * n), expected, "thread {thread}, alignment {align}");
            assert_eq!(out.get::<u32>(4 * n + 1), 0, "the address has the alignment {align}");
            let size = 4 * (u64::from(thread) + 1);
            assert!(out.get::<u64>(2 * n + 1) >= size, "the second memory is behind the first");
        }
    }
}

// Promise: S76
#[test]
fn restored_stack_is_used_again_and_called_functions_get_their_own() {
    let mut rig = Rig::new(
        ".version 8.7\n.target sm_90\n.address_size 64\n\
         .func (.param .b32 r) f(.param .b32 n) {\n\
         .reg .b32 %r<6>; .reg .b64 %d<6>; .reg .pred %p<2>; .param .b32 a; .param .b32 b;\n\
         ld.param.b32 %r0, [n]; mul.wide.u32 %d0, %r0, 8; alloca.u64 %d1, %d0; st.local.u32 [%d1], %r0; mov.b32 %r1, 0;\n\
         setp.le.u32 %p0, %r0, 1; @%p0 bra done; sub.u32 %r2, %r0, 1;\n\
         { st.param.b32 [a], %r2; call.uni (b), f, (a); ld.param.b32 %r1, [b]; }\n\
         done: ld.local.u32 %r3, [%d1]; add.u32 %r1, %r1, %r3; st.param.b32 [r], %r1; ret; }\n\
         .visible .entry k(.param .u64 o) {\n\
         .reg .b32 %r<6>; .reg .b64 %d<9>; .reg .pred %p<2>; .param .b32 a; .param .b32 b;\n\
         ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 16; add.u64 %d0, %d0, %d1;\n\
         alloca.u64 %d2, 40; st.local.u32 [%d2], %r0; stacksave.u64 %d3; mov.b32 %r3, 1000; mov.b64 %d5, 0;\n\
         again: alloca.u64 %d4, 4096; st.local.u32 [%d4], 5; stackrestore.u64 %d3; sub.u32 %r3, %r3, 1; setp.gt.u32 %p0, %r3, 0;\n\
         @%p0 bra again; alloca.u64 %d5, 4096; sub.u64 %d5, %d5, %d4;\n\
         add.u32 %r1, %r0, 1; { st.param.b32 [a], %r1; call.uni (b), f, (a); ld.param.b32 %r2, [b]; }\n\
         ld.local.u32 %r4, [%d2]; st.global.u32 [%d0], %r2; st.global.u32 [%d0+4], %r4; st.global.u64 [%d0+8], %d5; ret; }\n",
    );
    let out = Buffer::zeroed(64 * 16);
    rig.map(&[&out]);
    rig.run("k", shape(1, 64), Params::new().buf(&out));
    for thread in 0..64u32 {
        let n = thread as usize;
        let depth = thread + 1;
        assert_eq!(out.get::<u32>(4 * n), depth * (depth + 1) / 2, "each call keeps its word");
        assert_eq!(out.get::<u32>(4 * n + 1), thread, "the caller keeps its word");
        assert_eq!(out.get::<u64>(2 * n + 1), 0, "restored memory is taken again");
    }
}

// Promise: S76
#[test]
fn stack_without_room_ends_the_launch() {
    for (size, restore) in
        [("1048576", ""), ("-8", ""), ("%d1", ""), ("64", "mov.b64 %d1, 0xfffffff0; stackrestore.u64 %d1;")]
    {
        let mut rig = Rig::body(
            ".param .u64 o",
            &format!(
                ".reg .b32 %r<3>; .reg .b64 %d<4>; .reg .pred %p<2>; ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x;\n\
                 setp.eq.u32 %p0, %r0, 5; selp.b64 %d1, 0x8000000000000000, 16, %p0; {restore}\n\
                 alloca.u64 %d2, {size};\nst.local.u32 [%d2], %r0; st.global.u32 [%d0], %r0; ret;"
            ),
        );
        let out = Buffer::zeroed(8);
        rig.map(&[&out]);
        let fault = rig.launch("k", shape(1, 32), Params::new().buf(&out)).unwrap_err();
        let thread = if size == "%d1" { 5 } else { 0 };
        assert_eq!(
            (fault.kind, fault.thread[0], fault.line),
            (FaultKind::StackOverflow, thread, 8),
            "{size}"
        );
        assert_eq!(out.get::<u32>(0), 0);
    }
}
