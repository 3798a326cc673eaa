//! Barriers in memory, elections, cache policies, packed conversions, scalar video instructions and vector registers.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "reference values are made by casts"
)]

use softgpu_engine::{LoadErrorKind, Module};

use crate::common::{Buffer, Params, Rig, shape};

/// Runs a body for each input of three words; it stores the words `r0` to `r3`.
fn run(body: &str, inputs: &[[u32; 3]]) -> Vec<[u32; 4]> {
    let mut rig = Rig::body(
        ".param .u64 in, .param .u64 out",
        &format!(
            ".reg .b64 %in, %out, %a, %d<6>;\n.reg .b32 %x, %y, %z, %r<6>, %id;\n.reg .pred %p, %q;\n\
             ld.param.u64 %in, [in];\nld.param.u64 %out, [out];\nmov.u32 %id, %tid.x;\n\
             mul.wide.u32 %a, %id, 16;\nadd.u64 %in, %in, %a;\nadd.u64 %out, %out, %a;\n\
             ld.global.v4.b32 {{%x, %y, %z, %r0}}, [%in];\n\
             mov.u32 %r0, 0;\nmov.u32 %r1, 0;\nmov.u32 %r2, 0;\nmov.u32 %r3, 0;\n\
             {body}\nst.global.v4.b32 [%out], {{%r0, %r1, %r2, %r3}};"
        ),
    );
    let words: Vec<u32> = inputs.iter().flat_map(|v| [v[0], v[1], v[2], 0]).collect();
    let (input, output) = (Buffer::of(&words), Buffer::zeroed(words.len() * 4));
    rig.map(&[&input, &output]);
    rig.run("k", shape(1, inputs.len() as u32), Params::new().buf(&input).buf(&output));
    output.all::<u32>().as_chunks::<4>().0.to_vec()
}

#[test]
fn barrier_in_memory_hands_data_from_one_warp_to_another() {
    let mut rig = Rig::body(
        ".param .u64 out",
        ".reg .b64 %out, %a;\n.reg .b32 %t, %lane, %v, %sum, %n, %parity, %at, %x;\n.reg .pred %p, %q;\n\
         .shared .align 8 .b64 full;\n.shared .align 8 .b64 empty;\n.shared .align 4 .b8 data[128];\n\
         mov.u32 %t, %tid.x;\nand.b32 %lane, %t, 31;\nshl.b32 %at, %lane, 2;\nmov.u32 %x, data;\n\
         add.u32 %at, %at, %x;\nsetp.ne.u32 %p, %t, 0;\n@%p bra ready;\n\
         mbarrier.init.shared.b64 [full], 32;\nmbarrier.init.shared.b64 [empty], 32;\nready:\nbar.sync 0;\n\
         mov.u32 %n, 0;\nmov.u32 %sum, 0;\nsetp.lt.u32 %p, %t, 32;\nloop:\nand.b32 %parity, %n, 1;\n@%p bra produce;\n\
         wait_full:\nmbarrier.try_wait.parity.shared.b64 %q, [full], %parity;\n@!%q bra wait_full;\n\
         ld.shared.u32 %v, [%at];\nmad.lo.u32 %sum, %sum, 7, %v;\n\
         mbarrier.arrive.shared.b64 _, [empty];\nbra next;\n\
         produce:\nmad.lo.u32 %v, %n, 100, %lane;\nst.shared.u32 [%at], %v;\nmbarrier.arrive.shared.b64 _, [full];\n\
         wait_empty:\nmbarrier.try_wait.parity.shared.b64 %q, [empty], %parity;\n@!%q bra wait_empty;\n\
         next:\nadd.u32 %n, %n, 1;\nsetp.lt.u32 %q, %n, 5;\n@%q bra loop;\n\
         ld.param.u64 %out, [out];\nmul.wide.u32 %a, %t, 4;\nadd.u64 %a, %a, %out;\nst.global.u32 [%a], %sum;",
    );
    let output = Buffer::zeroed(64 * 4);
    rig.map(&[&output]);
    rig.run("k", shape(1, 64), Params::new().buf(&output));
    for lane in 0..32 {
        let sum = (0..5).fold(0u32, |sum, n| sum * 7 + n * 100 + lane);
        assert_eq!((output.get::<u32>(lane as usize), output.get::<u32>(lane as usize + 32)), (0, sum));
    }
}

#[test]
fn barrier_in_memory_counts_arrivals_bytes_and_phases() {
    // Each step sets a bit of r0 for a phase that has ended.
    let test = |bit: u32| {
        format!("mbarrier.test_wait.shared.b64 %p, [bar], %d1;\n@%p or.b32 %r0, %r0, {};\n", 1u32 << bit)
    };
    let parity = |value: u32, bit: u32| {
        format!(
            "mbarrier.test_wait.parity.shared.b64 %p, [bar], {value};\n@%p or.b32 %r0, %r0, {};\n",
            1u32 << bit
        )
    };
    let body = [
        ".shared .align 8 .b64 bar;\nmbarrier.init.shared.b64 [bar], 3;\n".to_owned(),
        parity(0, 0),
        parity(1, 1),
        "mbarrier.arrive.shared.b64 %d1, [bar];\nmbarrier.pending_count.b64 %r1, %d1;\n".to_owned(),
        test(2),
        // The first arrival left two; one of them gives up its part of later phases.
        "mbarrier.arrive_drop.shared.b64 %d2, [bar];\nmbarrier.pending_count.b64 %r2, %d2;\n".to_owned(),
        test(3),
        "mbarrier.arrive.shared.b64 _, [bar];\n".to_owned(),
        test(4),
        parity(0, 5),
        parity(1, 6),
        // The second phase has two arrivals, and 16 bytes.
        "mbarrier.arrive.expect_tx.shared.b64 %d1, [bar], 16;\nmbarrier.pending_count.b64 %r3, %d1;\n"
            .to_owned(),
        "mbarrier.arrive.noComplete.shared.b64 %d2, [bar], 1;\n".to_owned(),
        test(7),
        "mbarrier.complete_tx.relaxed.cta.shared.b64 [bar], 12;\n".to_owned(),
        test(8),
        "mbarrier.complete_tx.relaxed.cta.shared.b64 [bar], 4;\n".to_owned(),
        test(9),
        // Copies are complete at once: only the form that counts as an arrival changes the barrier.
        "mbarrier.arrive.shared.b64 %d1, [bar];\ncp.async.mbarrier.arrive.shared.b64 [bar];\n".to_owned(),
        test(10),
        "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];\n".to_owned(),
        test(11),
        "mbarrier.inval.shared.b64 [bar];\n".to_owned(),
    ]
    .concat();
    let got = run(&body, &[[0; 3]])[0];
    let ended = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 9 | 1 << 11;
    assert_eq!(got, [ended, 3, 2, 2]);
}

#[test]
fn barriers_and_pipelines_of_libcu_order_the_threads_of_a_block() {
    let input: Vec<i32> = (0..1024).map(|n| n * 37 % 1013).collect();
    let (from, to) = (Buffer::of(&input), Buffer::zeroed(256 * 4));
    let mut rig = Rig::new(include_str!("data/barriers.ptx"));
    rig.map(&[&from, &to]);
    let params = || Params::new().buf(&to).buf(&from);
    rig.run("barriers", shape(1, 256), params());
    for t in 0..256 {
        let v = |t: usize| input[(t + 33) % 256];
        assert_eq!(to.get::<i32>(t), v(t) + 2 * v((t + 1) % 256));
    }
    rig.run("pipelines", shape(1, 256), params());
    for t in 0..256 {
        let sum = (0..4).fold(0, |sum, n| sum * 3 + input[n * 256 + (t + 40) % 256]);
        assert_eq!(to.get::<i32>(t), sum);
    }
}

#[test]
fn election_names_the_first_member() {
    let inputs: Vec<[u32; 3]> = (0..32).map(|n| [n, 0, 0]).collect();
    let all = run("elect.sync %r0|%p, -1;\nselp.u32 %r1, 1, 0, %p;", &inputs);
    for (n, got) in (0..).zip(all) {
        assert_eq!(got[..2], [0, u32::from(n == 0)]);
    }
    let some = run(
        "and.b32 %r2, %x, 4; setp.ne.u32 %q, %r2, 0;\n@%q elect.sync %r0|%p, 0xf0f0f0f0;\n@%q selp.u32 %r1, 1, 0, %p;",
        &inputs,
    );
    for (n, got) in (0u32..).zip(some) {
        let wanted = if n & 4 == 0 { [0, 0] } else { [4, u32::from(n == 4)] };
        assert_eq!(got[..2], wanted, "lane {n}");
    }
}

#[test]
fn hints_change_no_result() {
    let got = run(
        "griddepcontrol.wait;\n\
         createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %d1, 0.5;\ncreatepolicy.cvt.L2.b64 %d2, %d1;\n\
         createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %d3, [%in], %x, %x;\n\
         ld.global.L2::cache_hint.b32 %r0, [%in], %d1;\nst.global.L2::cache_hint.b32 [%out], %r0, %d2;\n\
         atom.global.add.L2::cache_hint.u32 %r1, [%out], 5, %d1;\nred.global.add.L2::cache_hint.u32 [%out], 1, %d3;\n\
         ld.global.u32 %r2, [%out];\ngriddepcontrol.launch_dependents;",
        &[[40, 0, 0]],
    );
    assert_eq!(got[0], [40, 40, 46, 0]);
}

/// Pairs of patterns that are mostly edges.
fn inputs() -> Vec<[u32; 3]> {
    let edges =
        [0u32, 1, 2, 31, 32, 33, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fff_ffff, 0x8000_0000, !0];
    let mut s = 0x1234_5678_9abc_def1u64;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        if s & 3 == 0 { (s >> 20) as u32 } else { edges[(s >> 40) as usize % edges.len()] }
    };
    (0..512).map(|_| [next(), next(), next()]).collect()
}

#[test]
fn packed_conversions_saturate() {
    let forms: [(&str, bool, u32); 8] = [
        ("s16.s32", true, 16),
        ("u16.s32", false, 16),
        ("s8.s32.b32", true, 8),
        ("u8.s32.b32", false, 8),
        ("s4.s32.b32", true, 4),
        ("u4.s32.b32", false, 4),
        ("s2.s32.b32", true, 2),
        ("u2.s32.b32", false, 2),
    ];
    for (form, signed, bits) in forms {
        let third = if bits < 16 { ", %z" } else { "" };
        let inputs = inputs();
        let got = run(&format!("cvt.pack.sat.{form} %r0, %x, %y{third};"), &inputs);
        for ([x, y, z], got) in inputs.into_iter().zip(got) {
            let (low, high) =
                if signed { (-(1i64 << (bits - 1)), (1i64 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) };
            let part = |v: u32| i64::from(v as i32).max(low).min(high) as u64 % (1 << bits);
            let rest = if bits == 16 { 0 } else { u64::from(z) << (2 * bits) };
            assert_eq!(got[0], (rest + (part(x) << bits) + part(y)) as u32, "{form} {x:#x} {y:#x} {z:#x}");
        }
    }
}

/// The value that a part of a register has in the pseudo-code of the ISA.
fn selected(v: u32, part: &str, signed: bool) -> i128 {
    match (part, signed) {
        ("b0" | "b1" | "b2" | "b3", _) => {
            let byte = v.to_le_bytes()[usize::from(part.as_bytes()[1] - b'0')];
            if signed { (byte as i8).into() } else { byte.into() }
        }
        ("h0" | "h1", _) => {
            let half = if part == "h0" { v as u16 } else { (v >> 16) as u16 };
            if signed { (half as i16).into() } else { half.into() }
        }
        (_, true) => (v as i32).into(),
        (_, false) => v.into(),
    }
}

/// One form: opcode and modifiers, then parts of d, a and b.
type Form = (&'static str, &'static str, &'static str, &'static str);

fn reference((opcode, to, pa, pb): Form, [x, y, z]: [u32; 3]) -> u32 {
    let words: Vec<&str> = opcode.split('.').collect();
    let types: Vec<bool> =
        words.iter().filter(|w| matches!(**w, "s32" | "u32")).map(|w| *w == "s32").collect();
    let set = words[0] == "vset";
    let (sd, sa, sb) = if set { (false, types[0], types[1]) } else { (types[0], types[1], types[2]) };
    let (a, b) = (selected(x, pa, sa), selected(y, pb, sb));
    let amount = if words.contains(&"wrap") { b & 31 } else { b.min(32) };
    let mut value = match words[0] {
        "vadd" => a + b,
        "vsub" => a - b,
        "vabsdiff" => (a - b).abs(),
        "vmin" => a.min(b),
        "vmax" => a.max(b),
        "vshl" => a << amount,
        "vshr" => a >> amount,
        "vmad" => a * b + selected(z, "", sa || sb) + i128::from(words.contains(&"po")),
        _ => i128::from(match words[3] {
            "lt" => a < b,
            "ge" => a >= b,
            "ne" => a != b,
            other => panic!("{other}"),
        }),
    };
    value >>= if words.contains(&"shr7") {
        7
    } else if words.contains(&"shr15") {
        15
    } else {
        0
    };
    let bits = match to.as_bytes().first() {
        Some(b'b') => 8,
        Some(b'h') => 16,
        _ => 32,
    };
    if words.contains(&"sat") {
        let signed = if words[0] == "vmad" { sa || sb } else { sd };
        let high = if signed { 1i128 << (bits - 1) } else { 1 << bits };
        value = value.max(if signed { -high } else { 0 }).min(high - 1);
    }
    let word = value as u32;
    let insert = |at: u32| {
        let mask = ((1u64 << bits) - 1) as u32;
        (z & !(mask << at)) | (word & mask) << at
    };
    match to {
        "b0" | "h0" => return insert(0),
        "b1" => return insert(8),
        "b2" => return insert(16),
        "b3" => return insert(24),
        "h1" => return insert(16),
        _ => {}
    }
    let (whole, third) = (selected(word, "", sd), selected(z, "", sd));
    if words[0] == "vmad" {
        return word;
    }
    if words.contains(&"add") {
        (whole + third) as u32
    } else if words.contains(&"min") {
        whole.min(third) as u32
    } else if words.contains(&"max") {
        whole.max(third) as u32
    } else {
        word
    }
}

#[test]
fn scalar_video_instructions_follow_the_pseudo_code() {
    let forms: [Form; 24] = [
        ("vadd.s32.s32.s32", "", "", ""),
        ("vadd.s32.u32.s32.sat", "", "b0", "h1"),
        ("vadd.u32.u32.u32.sat.min", "", "b3", ""),
        ("vadd.s32.u32.s32.sat", "b2", "b1", "h0"),
        ("vsub.s32.s32.u32", "h1", "b3", "b2"),
        ("vsub.u32.s32.s32.sat.max", "", "", ""),
        ("vsub.u32.u32.u32.add", "", "", ""),
        ("vabsdiff.u32.s32.s32.add", "", "", ""),
        ("vabsdiff.s32.u32.s32.sat", "h0", "", ""),
        ("vmin.u32.s32.u32", "", "", ""),
        ("vmin.s32.s32.s32.max", "", "h1", "b0"),
        ("vmax.s32.s32.u32.sat", "b3", "h0", ""),
        ("vmax.u32.u32.u32.sat", "b0", "", ""),
        ("vshl.s32.u32.u32.clamp", "", "", ""),
        ("vshl.u32.s32.u32.sat.wrap", "", "", ""),
        ("vshr.u32.s32.u32.wrap.add", "", "", "b0"),
        ("vshr.s32.s32.u32.clamp", "b1", "h1", ""),
        ("vmad.s32.s32.u32.sat.shr7", "", "h0", "h1"),
        ("vmad.s32.s32.s32.po.shr15", "", "", ""),
        ("vmad.u32.u32.u32", "", "", ""),
        ("vmad.u32.u32.u32.sat", "", "", "b2"),
        ("vset.s32.u32.lt", "", "b0", ""),
        ("vset.s32.s32.ge.max", "", "", ""),
        ("vset.u32.u32.ne", "b1", "", "h1"),
    ];
    let inputs = inputs();
    for form in forms {
        let (opcode, to, pa, pb) = form;
        let named = |register: &str, part: &str| {
            if part.is_empty() { register.to_owned() } else { format!("{register}.{part}") }
        };
        let second = ["add", "min", "max"].iter().any(|w| opcode.split('.').skip(1).any(|o| o == *w));
        let third = if second || !to.is_empty() || opcode.starts_with("vmad") { ", %z" } else { "" };
        let text = format!("{opcode} {}, {}, {}{third};", named("%r0", to), named("%x", pa), named("%y", pb));
        for (input, got) in inputs.iter().zip(run(&text, &inputs)) {
            assert_eq!(got[0], reference(form, *input), "{text} with {input:x?}");
        }
    }
}

#[test]
fn vector_registers_are_registers_of_their_elements() {
    let got = run(
        ".reg .v2 .b32 %v;\n.reg .v4 .u32 %w;\n.reg .v2 .b64 %l;\n\
         mov.u32 %v.x, %x;\nadd.u32 %v.y, %v.x, %y;\nmov.v2.b32 %v, {%v.y, %v.x};\nmov.b64 %d1, %v;\n\
         mov.b64 %l, {%d1, %d1};\n\
         ld.global.v4.u32 %w, [%in];\nadd.u32 %w.w, %w.x, %w.b;\nst.global.v2.b32 [%out], %v;\n\
         ld.global.u32 %r0, [%out];\nld.global.u32 %r1, [%out + 4];\nmov.b64 {%r2, _}, %d1;\nmov.u32 %r3, %w.a;"
            .replace("mov.b64 %l, {%d1, %d1};", "mov.v2.b64 %l, {%d1, %d1};\nmov.b64 %d1, %l.y;")
            .as_str(),
        &[[5, 6, 7], [8, 9, 10]],
    );
    assert_eq!(got, [[11, 5, 11, 12], [17, 8, 17, 18]]);
}

#[test]
fn variables_of_vector_type_have_the_size_and_alignment_of_their_elements() {
    let text = ".version 8.7\n.target sm_90\n.address_size 64\n\
                .visible .global .v4 .f32 one = {0f3f800000, 0f40000000, 0f0, 0f3f800000};\n\
                .visible .global .v2 .u16 many[3] = {{1, 2}, {3, 4}};\n\
                .visible .entry k(.param .v2 .u64 p) { ret; }\n"
        .replace("0f0,", "0f00000000,");
    let module = Module::load(text.as_bytes(), 90).unwrap_or_else(|error| panic!("{error}"));
    let sizes: Vec<(u64, u32)> = module.globals().iter().map(|g| (g.size, g.align)).collect();
    assert_eq!(sizes, [(16, 16), (12, 4)]);
    assert_eq!(module.initial_bytes(1, &|_| 0), [1, 0, 2, 0, 3, 0, 4, 0, 0, 0, 0, 0]);
    assert_eq!((module.kernels()[0].params[0].size, module.kernels()[0].params[0].align), (16, 16));
}

#[test]
fn logic_operation_reports_a_result_of_zero() {
    let body = "setp.eq.u32 %q, %z, 1;\n\
                lop3.or.b32 %r0|%p, %x, %y, %z, 0xc0, %q;\nselp.u32 %r1, 1, 0, %p;\n\
                lop3.and.b32 _|%p, %x, %y, %z, 0x3c, %q;\nselp.u32 %r2, 1, 0, %p;";
    let inputs = [[1, 3, 0], [1, 2, 0], [1, 2, 1], [5, 5, 1], [4, 5, 1]];
    for ([x, y, z], got) in inputs.into_iter().zip(run(body, &inputs)) {
        let or = x & y != 0 || z == 1;
        let and = x ^ y != 0 && z == 1;
        assert_eq!(got[..3], [x & y, u32::from(or), u32::from(and)]);
    }
}

#[test]
fn copy_with_an_ignored_source_clears_its_target() {
    let body = ".shared .align 16 .b8 to[2048];\n.reg .b32 %at;\nmov.u32 %at, to;\nshl.b32 %r3, %id, 4;\nadd.u32 %at, %at, %r3;\n\
                mov.u32 %r3, 0;\nst.shared.v4.u32 [%at], {%y, %y, %y, %y};\nsetp.eq.u32 %p, %z, 1;\n\
                cp.async.ca.shared.global [%at], [%in], 8, %p;\ncp.async.wait_all;\nld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [%at];";
    let got = run(body, &[[5, 7, 0], [6, 7, 1]]);
    assert_eq!(got, [[5, 7, 7, 7], [0, 0, 7, 7]]);
}

#[test]
fn local_name_has_a_generic_address() {
    let body = ".local .align 4 .b32 l;\nst.local.u32 [l], %x;\nld.u32 %r0, [l];\nst.u32 [l], %y;\nld.local.u32 %r1, [l];";
    assert_eq!(run(body, &[[5, 6, 0], [7, 8, 0]]), [[5, 6, 0, 0], [7, 8, 0, 0]]);
}

#[test]
fn forms_that_no_device_has_are_refused() {
    let head = ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k() {\n.reg .b32 %r<6>; .reg .b64 %d<3>; \
                .reg .pred %p; .reg .v2 .b32 %v; .shared .align 8 .b64 bar;\n";
    for text in [
        "mbarrier.init.shared.b32 [bar], 1;",
        "mbarrier.init.shared.b64 [bar];",
        "mbarrier.arrive.expect_tx.shared.b64 %d1, [bar];",
        "mbarrier.frob.shared.b64 [bar];",
        "mbarrier.test_wait.shared.b64 %p, [bar], %r1;",
        "elect.sync %r1, -1;",
        "elect %r1|%p, -1;",
        "griddepcontrol.frob;",
        "createpolicy.b64 %d1;",
        "cvt.pack.s16.s32 %r1, %r2, %r3;",
        "cvt.pack.sat.s16.u32 %r1, %r2, %r3;",
        "cvt.pack.sat.u8.s32.b32 %r1, %r2, %r3;",
        "vadd.s32.s32 %r1, %r2, %r3;",
        "vadd.s32.s32.s32 %r1.b9, %r2, %r3, %r4;",
        "vadd.s32.s32.s32 %r1, %r2, %r3, %r4;",
        "vshl.s32.u32.u32 %r1, %r2, %r3;",
        "vset.s32.s32 %r1, %r2, %r3;",
        "mov.u32 %r1, %v.z;",
        "mov.u32 %r1, %v;",
        "mov.v4.b32 %v, {%r1, %r2, %r3, %r4};",
    ] {
        match Module::load(format!("{head}{text}\nret; }}\n").as_bytes(), 90) {
            Ok(_) => panic!("{text}: accepted"),
            Err(error) => assert_eq!(error.kind, LoadErrorKind::Syntax, "{text}: {error}"),
        }
    }
}
