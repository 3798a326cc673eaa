//! Machine code against the interpreter, on generated kernels: registers and predicates of all threads are equal, bit for bit.

use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use softgpu_engine::FaultKind;

use crate::common::{Buffer, Params, Rig, shape};

/// Instructions of which the engine makes machine code. `R`, `D` and `P` stand for registers of 32 and 64 bits and for predicates; lower
/// case letters for sources.
#[rustfmt::skip]
const INSTRUCTIONS: &[&str] = &[
    "mov.b32 R, r", "mov.b64 D, d", "not.b32 R, r", "not.b64 D, d", "neg.s32 R, r", "neg.s64 D, d", "abs.s32 R, r", "abs.s64 D, d",
    "neg.f32 R, r", "neg.f64 D, d", "abs.f32 R, r", "abs.f64 D, d", "sqrt.rn.f32 R, r", "sqrt.approx.f32 R, r",
    "sqrt.approx.ftz.f32 R, r", "sqrt.rn.f64 D, d", "rcp.rn.f32 R, r", "rcp.approx.f32 R, r", "rcp.approx.ftz.f32 R, r",
    "rsqrt.approx.f32 R, r", "rsqrt.approx.ftz.f32 R, r", "ex2.approx.f32 R, r", "ex2.approx.ftz.f32 R, r", "lg2.approx.f32 R, r",
    "lg2.approx.ftz.f32 R, r", "cvt.u32.u64 R, d", "cvt.u64.u32 D, r", "cvt.s64.s32 D, r", "cvt.rn.f32.s32 R, r", "cvt.rn.f32.u32 R, r",
    "cvt.rn.f64.s32 D, r", "cvt.rn.f64.u32 D, r", "cvt.f64.f32 D, r", "cvt.rn.f32.f64 R, d", "cvt.rzi.s32.f32 R, r",
    "cvt.rni.s32.f32 R, r", "cvt.rzi.f32.f32 R, r", "cvt.rni.f32.f32 R, r", "cvt.rmi.f32.f32 R, r", "cvt.rpi.f32.f32 R, r",
    "cvt.sat.f32.f32 R, r", "cvt.sat.ftz.f32.f32 R, r", "add.u32 R, r, r", "sub.u32 R, r, r", "mul.lo.u32 R, r, r", "add.u64 D, d, d",
    "sub.u64 D, d, d", "mul.lo.u64 D, d, d", "mul.wide.u32 D, r, r", "mul.wide.s32 D, r, r", "mul.hi.u32 R, r, r", "mul.hi.s32 R, r, r",
    "and.b32 R, r, r", "or.b32 R, r, r", "xor.b32 R, r, r", "and.b64 D, d, d", "or.b64 D, d, d", "xor.b64 D, d, d", "shl.b32 R, r, r",
    "shr.u32 R, r, r", "shr.s32 R, r, r", "shl.b64 D, d, r", "shr.u64 D, d, r", "shr.s64 D, d, r", "min.u32 R, r, r", "min.s32 R, r, r",
    "max.u32 R, r, r", "max.s32 R, r, r", "min.u64 D, d, d", "max.s64 D, d, d", "div.u32 R, r, r", "popc.b32 R, r", "clz.b32 R, r",
    "add.f32 R, r, r", "sub.f32 R, r, r", "mul.f32 R, r, r", "add.ftz.f32 R, r, r", "sub.ftz.f32 R, r, r", "mul.ftz.f32 R, r, r",
    "div.rn.f32 R, r, r", "div.approx.f32 R, r, r", "div.approx.ftz.f32 R, r, r", "min.f32 R, r, r", "max.f32 R, r, r",
    "add.f64 D, d, d", "sub.f64 D, d, d", "mul.f64 D, d, d", "div.rn.f64 D, d, d", "copysign.f32 R, r, r", "copysign.f64 D, d, d",
    "mov.b64 D, {r, r}", "mad.lo.u32 R, r, r, r", "mad.lo.u64 D, d, d, d", "mad.wide.u32 D, r, r, d", "mad.wide.s32 D, r, r, d",
    "fma.rn.f32 R, r, r, r", "fma.rn.ftz.f32 R, r, r, r", "fma.rn.f64 D, d, d, d", "add.rz.f32 R, r, r", "add.sat.f32 R, r, r",
    "lop3.b32 R, r, r, r, 0x96", "lop3.b32 R, r, r, r, 0xe8", "lop3.b32 R, r, r, r, 0x1b", "shf.l.wrap.b32 R, r, r, r",
    "shf.r.wrap.b32 R, r, r, r", "shf.r.clamp.b32 R, r, r, r", "selp.b32 R, r, r, p", "selp.b64 D, d, d, p", "selp.f32 R, 0f3f800000, r, p",
    "and.pred P, p, p", "or.pred P, p, p", "xor.pred P, p, p", "not.pred P, p", "mov.pred P, p",
    "setp.eq.u32 P, r, r", "setp.ne.u32 P, r, r", "setp.lt.u32 P, r, r", "setp.le.u32 P, r, r", "setp.gt.u32 P, r, r",
    "setp.ge.u32 P, r, r", "setp.lt.s32 P, r, r", "setp.le.s32 P, r, r", "setp.gt.s32 P, r, r", "setp.ge.s32 P, r, r",
    "setp.eq.u64 P, d, d", "setp.ne.u64 P, d, d", "setp.lt.u64 P, d, d", "setp.le.u64 P, d, d", "setp.gt.u64 P, d, d",
    "setp.ge.u64 P, d, d", "setp.lt.s64 P, d, d", "setp.le.s64 P, d, d", "setp.gt.s64 P, d, d", "setp.ge.s64 P, d, d",
    "setp.eq.f32 P, r, r", "setp.ne.f32 P, r, r", "setp.lt.f32 P, r, r", "setp.le.f32 P, r, r", "setp.gt.f32 P, r, r",
    "setp.ge.f32 P, r, r", "setp.equ.f32 P, r, r", "setp.neu.f32 P, r, r", "setp.ltu.f32 P, r, r", "setp.leu.f32 P, r, r",
    "setp.gtu.f32 P, r, r", "setp.geu.f32 P, r, r", "setp.num.f32 P, r, r", "setp.nan.f32 P, r, r", "setp.lt.ftz.f32 P, r, r",
    "setp.eq.f64 P, d, d", "setp.ne.f64 P, d, d", "setp.lt.f64 P, d, d", "setp.ge.f64 P, d, d", "setp.equ.f64 P, d, d",
    "setp.neu.f64 P, d, d", "setp.ltu.f64 P, d, d", "setp.geu.f64 P, d, d", "setp.num.f64 P, d, d", "setp.nan.f64 P, d, d",
    "setp.lt.and.f32 P, r, r, p", "setp.ge.or.s32 P, r, r, p", "add.u32 R, r, 7", "mul.f32 R, r, 0f40490fdb", "shl.b32 R, r, 5",
    "and.b64 D, d, 0xffff", "cvt.u32.u16 R, h", "cvt.s32.s16 R, h",
];

const WORDS: usize = 10;
const DOUBLES: usize = 6;
const PREDICATES: usize = 5;
/// Threads of a launch: the second warp is not full.
const THREADS: usize = 45;
/// Words that each thread reads and writes.
const CELL: usize = WORDS + 2 * DOUBLES + 2;

#[derive(Clone, Debug)]
struct GeneratedStep {
    instruction: usize,
    registers: [u8; 5],
    /// A number of a predicate, perhaps negated, or none.
    guard: u8,
}

fn step() -> impl Strategy<Value = GeneratedStep> {
    let guard = prop_oneof![3 => Just(u8::MAX), 1 => 0..2 * u8::try_from(PREDICATES).unwrap()];
    (0..INSTRUCTIONS.len(), any::<[u8; 5]>(), guard)
        .prop_map(|(instruction, registers, guard)| GeneratedStep { instruction, registers, guard })
}

/// The text of an instruction.
fn spell(step: &GeneratedStep) -> String {
    let mut numbers = step.registers.iter().map(|&n| usize::from(n)).cycle();
    let mut out = String::new();
    if step.guard != u8::MAX {
        let n = usize::from(step.guard);
        out += &format!("@{}%p{} ", if n >= PREDICATES { "!" } else { "" }, n % PREDICATES);
    }
    let (opcode, operands) = INSTRUCTIONS[step.instruction].split_once(' ').unwrap();
    out += opcode;
    out.push(' ');
    if operands.contains('h') {
        // The source is a register of 16 bits, which has the low half of a word.
        let (d, a) = (numbers.next().unwrap() % WORDS, numbers.next().unwrap() % WORDS);
        return format!("cvt.u16.u32 %h0, %r{a};\n{out}%r{d}, %h0;\n");
    }
    let mut characters = operands.chars().peekable();
    let mut previous = ' ';
    while let Some(c) = characters.next() {
        let alone = !previous.is_alphanumeric() && !characters.peek().is_some_and(|c| c.is_alphanumeric());
        match c {
            'R' | 'r' if alone => out += &format!("%r{}", numbers.next().unwrap() % WORDS),
            'D' | 'd' if alone => out += &format!("%d{}", numbers.next().unwrap() % DOUBLES),
            'P' | 'p' if alone => out += &format!("%p{}", numbers.next().unwrap() % PREDICATES),
            c => out.push(c),
        }
        previous = c;
    }
    out += ";\n";
    // It is not defined which of two NaNs an f64 operation passes on.
    let arithmetic = ["add.", "sub.", "mul.", "div.", "fma."].iter().any(|name| opcode.starts_with(name));
    if arithmetic && opcode.ends_with("f64") {
        let d = usize::from(step.registers[0]) % DOUBLES;
        out += &format!(
            "setp.nan.f64 %p{0}, %d{d}, %d{d};\nselp.b64 %d{d}, 0x7ff8000000000000, %d{d}, %p{0};\n",
            PREDICATES + 1
        );
    }
    out
}

/// A word that is often special: zeros, infinities, NaNs, subnormal numbers, small integers.
fn word(seed: &mut u64) -> u32 {
    const SPECIAL: &[u32] = &[
        0,
        1,
        2,
        31,
        32,
        33,
        63,
        64,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x7f80_0001,
        0xffc1_2345,
        0x0000_1234,
        0x8000_0001,
        0x007f_ffff,
        0x0080_0000,
        0x3f80_0000,
        0xbf80_0000,
        0x4f00_0000,
        0xcf00_0000,
        0x4effffff,
        0x7e80_0001,
        0xfe90_0000,
        0x4049_0fdb,
        0x3f00_0000,
        0x3fe0_0000,
        0x7ff0_0000,
        0x7ff8_0000,
        0xfff0_0001,
    ];
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let random = u32::try_from(*seed >> 32).unwrap();
    match *seed >> 8 & 7 {
        0..3 => SPECIAL[random as usize % SPECIAL.len()],
        // An f32 of common size, or anything.
        3..6 => (random & 0x83ff_ffff) | 0x3c00_0000,
        _ => random,
    }
}

/// Runs the steps in threads that differ in all registers: at once, or in a loop with a different number of iterations in each
/// thread; for all lanes, or for some. Only the registers that `kept` has bits for are results, so that values end.
fn run(steps: &[GeneratedStep], repeat: bool, some: bool, kept: u16, mut seed: u64) {
    let mut text = format!(
        ".reg .b32 %r<{}>; .reg .b64 %d<{}>; .reg .pred %p<{}>; .reg .b16 %h<1>; .reg .b64 %a<3>;\n\
         ld.param.u64 %a0, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %a1, %r0, {}; add.u64 %a0, %a0, %a1;\n",
        WORDS + 3,
        DOUBLES,
        PREDICATES + 2,
        CELL * 4
    );
    for n in 0..WORDS {
        text += &format!("ld.global.b32 %r{n}, [%a0+{}];\n", 4 * n);
    }
    for n in 0..DOUBLES {
        text += &format!("ld.global.b64 %d{n}, [%a0+{}];\n", 4 * WORDS + 8 * n);
    }
    let (count, extra) = (4 * (CELL - 2), 4 * (CELL - 1));
    text +=
        &format!("ld.global.b32 %r{WORDS}, [%a0+{count}];\nld.global.b32 %r{}, [%a0+{extra}];\n", WORDS + 1);
    for n in 0..PREDICATES {
        text += &format!(
            "and.b32 %r{}, %r{}, {}; setp.ne.u32 %p{n}, %r{}, 0;\n",
            WORDS + 2,
            WORDS + 1,
            1 << n,
            WORDS + 2
        );
    }
    if some {
        text += &format!("setp.lt.s32 %p{PREDICATES}, %r{}, 0; @%p{PREDICATES} bra end;\n", WORDS + 1);
    }
    if repeat {
        text += "again:\n";
    }
    text.extend(steps.iter().map(spell));
    if repeat {
        text += &format!(
            "sub.u32 %r{WORDS}, %r{WORDS}, 1; setp.gt.s32 %p{PREDICATES}, %r{WORDS}, 0; @%p{PREDICATES} bra again;\n"
        );
    }
    text += "end:\n";
    for n in (0..WORDS).filter(|n| kept >> n & 1 != 0) {
        text += &format!("st.global.b32 [%a0+{}], %r{n};\n", 4 * n);
    }
    for n in (0..DOUBLES).filter(|n| kept >> (n + WORDS) & 1 != 0) {
        text += &format!("st.global.b64 [%a0+{}], %d{n};\n", 4 * WORDS + 8 * n);
    }
    text += &format!("mov.b32 %r{}, 0;\n", WORDS + 1);
    for n in 0..PREDICATES {
        text += &format!("@%p{n} or.b32 %r{0}, %r{0}, {1};\n", WORDS + 1, 1 << n);
    }
    text += &format!(
        "st.global.b32 [%a0+{count}], %r{WORDS};\nst.global.b32 [%a0+{extra}], %r{};\nret;",
        WORDS + 1
    );
    let mut rig = Rig::body(".param .u64 o", &text);
    let cells = Buffer::zeroed(THREADS * CELL * 4);
    for n in 0..THREADS * CELL {
        let value = word(&mut seed);
        cells.set(n, if n % CELL == CELL - 2 { value & 7 } else { value });
    }
    rig.map(&[&cells]);
    // The launch compares machine code with the interpreter.
    rig.run("k", shape(1, u32::try_from(THREADS).unwrap()), Params::new().buf(&cells));
}

// Promise: S70
#[test]
fn every_instruction_gives_the_bits_of_the_interpreter() {
    for instruction in 0..INSTRUCTIONS.len() {
        for (seed, guard) in [(1, u8::MAX), (2, 3), (3, 8)] {
            let step = |registers| GeneratedStep { instruction, registers, guard };
            run(
                &[step([0, 1, 2, 3, 4]), step([5, 5, 6, 5, 2]), step([8, 7, 8, 9, 1])],
                false,
                false,
                !0,
                seed,
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    // Promise: S70
    #[test]
    fn sequences_of_instructions_give_the_bits_of_the_interpreter(
        steps in prop::collection::vec(step(), 3..60), repeat: bool, some: bool, kept: u16, seed: u64,
    ) {
        run(&steps, repeat, some, kept, seed);
    }
}

// Promise: S70
#[test]
fn loads_from_shared_memory_of_every_shape_give_the_words_of_the_interpreter() {
    // Each thread fills its word, and then loads at addresses that are equal, consecutive, reversed, or two rows of 16.
    let shapes = [
        "mov.u32 %r2, 16;",
        "shl.b32 %r2, %r0, 2; and.b32 %r2, %r2, 127;",
        "shl.b32 %r2, %r0, 2; and.b32 %r2, %r2, 127; sub.u32 %r2, 124, %r2;",
        "shl.b32 %r2, %r0, 2; and.b32 %r2, %r2, 64;",
    ];
    for (n, shape_of_address) in shapes.iter().enumerate() {
        for threads in [32u32, 64, 45] {
            let mut rig = shared_words(shape_of_address);
            let out = Buffer::zeroed(64 * 4);
            rig.map(&[&out]);
            rig.run("k", shape(1, threads), Params::new().buf(&out));
            let address = |t: u32| [16, (t * 4) & 127, 124 - ((t * 4) & 127), (t * 4) & 64][n];
            for t in 0..threads {
                let word = |at: u32| (at / 4) * 3 + 1;
                let a = address(t);
                let expected = word(a) + 2 * word(a + 4) + 3 * word(a + 124);
                // All words are written if all threads exist.
                if threads == 64 {
                    assert_eq!(out.get::<u32>(t as usize), expected, "{shape_of_address} {t}");
                }
            }
        }
    }
}

/// A kernel that loads three words from shared memory, at an address in `%r2` that these instructions compute from the thread `%r0`.
fn shared_words(address: &str) -> Rig {
    Rig::body(
        ".param .u64 o",
        &format!(
            ".shared .align 4 .b8 s[256]; .reg .b32 %r<9>; .reg .b64 %d<3>;\n\
             ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, %d1;\n\
             mov.u32 %r3, s; shl.b32 %r4, %r0, 2; add.u32 %r3, %r3, %r4; mad.lo.u32 %r4, %r0, 3, 1; st.shared.u32 [%r3], %r4;\n\
             bar.sync 0;\n{address}\nmov.u32 %r3, s; add.u32 %r2, %r2, %r3; bar.sync 0;\n\
             ld.shared.u32 %r5, [%r2];\nld.shared.u32 %r6, [%r2+4];\nmad.lo.u32 %r5, %r6, 2, %r5;\n\
             ld.shared.u32 %r7, [%r2+124];\nmad.lo.u32 %r5, %r7, 3, %r5;\nst.global.u32 [%d0], %r5; ret;"
        ),
    )
}

// Promise: S71
#[test]
fn fault_of_a_load_is_reported_at_its_line() {
    // Lane 9 leaves shared memory with the third load, lane 3 is not aligned in the first one.
    for (address, kind, thread) in [
        ("setp.eq.u32 %p0, %r0, 9; selp.b32 %r2, 140, 8, %p0;", FaultKind::LaunchFailed, 9),
        ("setp.eq.u32 %p0, %r0, 3; selp.b32 %r2, 6, 8, %p0;", FaultKind::Misaligned, 3),
    ] {
        let mut rig = shared_words(&format!(".reg .pred %p<1>; {address}"));
        let out = Buffer::zeroed(64 * 4);
        rig.map(&[&out]);
        // The launch compares the fault with that of the interpreter.
        let fault = rig.launch("k", shape(1, 32), Params::new().buf(&out)).unwrap_err();
        assert_eq!((fault.kind, fault.thread[0]), (kind, thread), "{address}");
    }
}

// Promise: S73
#[test]
fn hot_kernels_get_machine_code_and_modules_can_refuse_it() {
    let text = include_str!("data/elementwise.ptx");
    let module = softgpu_engine::Module::load(text.as_bytes(), 80).unwrap();
    module.interpret();
    assert_eq!(module.translate(), 0, "an interpreted module stays interpreted");
    let module = softgpu_engine::Module::load(text.as_bytes(), 80).unwrap();
    let runs = module.translate();
    if cfg!(target_arch = "x86_64") && std::env::var_os("SOFTGPU_BASELINE").is_none() && is_fast() {
        assert!(runs > 20, "{runs} runs");
    } else {
        assert_eq!(runs, 0);
    }
}

// Promise: S93
#[test]
fn sequence_with_more_values_than_fit_twice_gets_machine_code() {
    for loads in [40, 64, 90] {
        let text: String = (0..loads).map(|n| format!("ld.global.f32 %f{n}, [%d0+{}];\n", 4 * n)).collect();
        let sum: String = (1..loads).map(|n| format!("add.f32 %f0, %f0, %f{n};\n")).collect();
        let module = softgpu_engine::Module::load(
            format!(
                ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 i) {{ .reg .b64 %d<2>;\n\
                 .reg .b32 %r<2>; .reg .f32 %f<{loads}>; ld.param.u64 %d0, [i]; mov.u32 %r0, %tid.x;\n\
                 mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, %d1; {text} bar.sync 0; {sum} st.global.f32 [%d0], %f0; ret; }}"
            )
            .as_bytes(),
            80,
        )
        .unwrap();
        let runs = module.translate();
        let fast =
            cfg!(target_arch = "x86_64") && std::env::var_os("SOFTGPU_BASELINE").is_none() && is_fast();
        assert_eq!(runs, if fast { 2 } else { 0 }, "{loads} loads");
    }
}

fn is_fast() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

// Promise: S72
#[test]
fn endless_loop_in_machine_code_ends_with_its_launch() {
    let mut rig = Rig::body(
        "",
        ".reg .b32 %r<2>; .reg .pred %p<1>; mov.u32 %r0, 1;\n\
        loop: or.b32 %r0, %r0, 1; setp.ne.u32 %p0, %r0, 0; @%p0 bra loop; ret;",
    );
    rig.alone = true;
    std::thread::scope(|s| {
        let run = s.spawn(|| rig.launch("k", shape(3, 64), Params::new()));
        std::thread::sleep(Duration::from_millis(30));
        rig.stop.store(true, Ordering::Relaxed);
        assert_eq!(run.join().unwrap().unwrap_err().kind, FaultKind::Stopped);
    });
}
