//! Instructions of the capabilities above 8.0 that the engine executes: their values against plain Rust. In one file: one table of cases.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "reference values are made by casts"
)]

use crate::common::{Buffer, Params, Rig, shape};

/// Runs a body for each input of four words; it stores the words `r0` to `r3`.
fn run(target: &str, body: &str, inputs: &[[u32; 4]]) -> Vec<[u32; 4]> {
    let mut rig = Rig::new(&format!(
        ".version 9.0\n.target sm_{target}\n.address_size 64\n\
         .visible .entry k(.param .u64 in, .param .u64 out)\n{{\n\
         .reg .b64 %in, %out, %a, %d<9>;\n.reg .b32 %w<4>, %r<9>, %id;\n.reg .b16 %h<9>;\n.reg .b8 %q<4>;\n\
         .reg .pred %p, %z;\n.reg .b128 %o<4>;\n.reg .f32 %f<9>;\n\
         ld.param.u64 %in, [in];\nld.param.u64 %out, [out];\nmov.u32 %id, %tid.x;\n\
         mul.wide.u32 %a, %id, 16;\nadd.u64 %in, %in, %a;\nadd.u64 %out, %out, %a;\n\
         ld.global.v4.b32 {{%w0, %w1, %w2, %w3}}, [%in];\n\
         mov.u32 %r0, 0;\nmov.u32 %r1, 0;\nmov.u32 %r2, 0;\nmov.u32 %r3, 0;\n\
         {body}\nst.global.v4.b32 [%out], {{%r0, %r1, %r2, %r3}};\n}}\n"
    ));
    let words: Vec<u32> = inputs.iter().flatten().copied().collect();
    let (input, output) = (Buffer::of(&words), Buffer::zeroed(words.len() * 4));
    rig.map(&[&input, &output]);
    rig.run("k", shape(1, inputs.len() as u32), Params::new().buf(&input).buf(&output));
    output.all::<u32>().as_chunks::<4>().0.to_vec()
}

/// The value of a code, by the definition of the format: a sign, exponent bits, mantissa bits. `None` for no number.
fn value(code: u32, exponent: u32, mantissa: u32) -> Option<f64> {
    let sign = if code >> (exponent + mantissa) & 1 == 1 { -1.0 } else { 1.0 };
    let e = code >> mantissa & ((1 << exponent) - 1);
    let m = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let bias = (1 << (exponent - 1)) - 1;
    match (exponent, mantissa) {
        (4, 3) if e == 15 && code & 7 == 7 => return None,
        (5, 2) if e == 31 => return (code & 3 == 0).then_some(sign * f64::INFINITY),
        _ => {}
    }
    Some(if e == 0 { sign * m * 2f64.powi(1 - bias) } else { sign * (1.0 + m) * 2f64.powi(e as i32 - bias) })
}

/// The code whose value is nearest, of two the even one: by trying all of them.
fn nearest(x: f64, exponent: u32, mantissa: u32) -> u32 {
    let bits = 1 + exponent + mantissa;
    if x.is_nan() {
        return if bits == 8 { 0x7f } else { (1 << (bits - 1)) - 1 };
    }
    let finite = |code: &u32| value(*code, exponent, mantissa).is_some_and(f64::is_finite);
    let sign = u32::from(x.is_sign_negative()) << (bits - 1);
    let of_sign = (0..1u32 << (bits - 1)).map(|code| code | sign).filter(finite);
    let greatest = of_sign.clone().next_back().unwrap();
    if x.abs() >= value(greatest, exponent, mantissa).unwrap().abs() {
        return greatest;
    }
    let distance = |code: &u32| (value(*code, exponent, mantissa).unwrap() - x).abs();
    of_sign.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

const FORMATS: [(&str, u32, u32, &str); 5] = [
    ("e4m3x2", 4, 3, "90"),
    ("e5m2x2", 5, 2, "90"),
    ("e2m3x2", 2, 3, "120a"),
    ("e3m2x2", 3, 2, "120a"),
    ("e2m1x2", 2, 1, "120a"),
];

/// Numbers around every value of a format, and between two of them.
fn samples(exponent: u32, mantissa: u32) -> Vec<f32> {
    let bits = 1 + exponent + mantissa;
    let mut list = vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40, -1e-30, 5e4];
    for code in 0..1u32 << bits {
        let (Some(here), next) = (value(code, exponent, mantissa), value(code + 1, exponent, mantissa))
        else {
            continue;
        };
        let here = here as f32;
        list.extend([here, here.next_up(), here.next_down()]);
        if let Some(next) = next.filter(|next| next.is_finite()) {
            let middle = f32::midpoint(here, next as f32);
            list.extend([middle, middle.next_up(), middle.next_down()]);
        }
    }
    list.truncate(1 << 10);
    list
}

/// The bits of an f16 that has the value exactly.
fn half(x: f64) -> u32 {
    if x.is_nan() {
        return 0x7fff;
    }
    let code = (0..0x8000u32).find(|code| {
        let (e, m) = (code >> 10, f64::from(code & 0x3ff));
        let v = match e {
            0 => m * 2f64.powi(-24),
            31 => {
                if m == 0.0 {
                    f64::INFINITY
                } else {
                    f64::NAN
                }
            }
            _ => (1024.0 + m) * 2f64.powi(e as i32 - 25),
        };
        v == x.abs()
    });
    code.expect("a value of f16") | if x.is_sign_negative() { 0x8000 } else { 0 }
}

// Promise: S66
#[test]
fn conversions_to_8_6_and_4_bits_take_the_nearest_value() {
    for (name, exponent, mantissa, target) in FORMATS {
        let (register, step) = if name == "e2m1x2" { ("%q0", 4) } else { ("%h0", 8) };
        let widen = if name == "e2m1x2" { "cvt.u32.u8 %r0, %q0;" } else { "cvt.u32.u16 %r0, %h0;" };
        let inputs: Vec<[u32; 4]> = samples(exponent, mantissa)
            .windows(2)
            .map(|pair| [pair[0].to_bits(), pair[1].to_bits(), 0, 0])
            .collect();
        for relu in [false, true] {
            let modifier = if relu { ".relu" } else { "" };
            let body = format!("cvt.rn.satfinite{modifier}.{name}.f32 {register}, %w0, %w1;\n{widen}");
            for chunk in inputs.chunks(1024) {
                let outputs = run(target, &body, chunk);
                for (input, output) in chunk.iter().zip(outputs) {
                    let code = |word: u32| {
                        let x = f64::from(f32::from_bits(word));
                        nearest(if relu && x <= 0.0 { 0.0 } else { x }, exponent, mantissa)
                    };
                    let expected = code(input[0]) << step | code(input[1]);
                    let shown = (f32::from_bits(input[0]), f32::from_bits(input[1]));
                    assert_eq!(output[0], expected, "{body} of {shown:?}: {:#x}", output[0]);
                }
            }
        }
    }
}

// Promise: S66
#[test]
fn conversions_from_8_6_and_4_bits_are_exact() {
    for (name, exponent, mantissa, target) in FORMATS {
        let bits = 1 + exponent + mantissa;
        let (register, step) = if name == "e2m1x2" { ("%q0", 4) } else { ("%h0", 8) };
        let narrow = if name == "e2m1x2" { "cvt.u8.u32 %q0, %w0;" } else { "cvt.u16.u32 %h0, %w0;" };
        let inputs: Vec<[u32; 4]> =
            (0..1u32 << bits).map(|code| [code << step | (code ^ 5) & ((1 << bits) - 1), 0, 0, 0]).collect();
        let body = format!(
            "{narrow}\ncvt.rn.f16x2.{name} %r0, {register};\ncvt.rn.relu.f16x2.{name} %r1, {register};"
        );
        for (input, output) in inputs.iter().zip(run(target, &body, &inputs)) {
            let codes = [input[0] >> step, input[0] & ((1 << bits) - 1)];
            let values = codes.map(|code| value(code, exponent, mantissa).unwrap_or(f64::NAN));
            assert_eq!(output[0], half(values[0]) << 16 | half(values[1]), "{name} {codes:x?}");
            let clamped = values.map(|x| if x <= 0.0 { 0.0 } else { x });
            assert_eq!(output[1], half(clamped[0]) << 16 | half(clamped[1]), "{name} {codes:x?}");
        }
    }
    // From a pair of f16, too.
    let body = "cvt.rn.satfinite.e4m3x2.f16x2 %h0, %w0;\ncvt.u32.u16 %r0, %h0;";
    // 1.0 and -448; 0.0625 and infinity.
    assert_eq!(
        run("90", body, &[[0x3c00_df00, 0, 0, 0], [0x2c00_7c00, 0, 0, 0]]),
        [[0x38fe, 0, 0, 0], [0x187e, 0, 0, 0]]
    );
}

// Promise: S66
#[test]
fn registers_of_128_bits_move_load_and_store() {
    let body = "mov.b128 %o0, {%d1, %d2};\nld.global.b128 %o1, [%in];\nmov.b128 %o2, %o1;\nmov.b128 {%d3, %d4}, %o2;\n\
                st.global.b128 [%out], %o2;\nld.global.v2.b64 {%d5, %d6}, [%out];\nxor.b64 %d7, %d5, %d4;\n\
                mov.b64 {%r0, %r1}, %d7;\nmov.b128 %o3, {%d4, %d3};\nmov.b128 {%d5, %d6}, %o3;\nmov.b64 {%r2, %r3}, %d5;";
    let inputs = [[1, 2, 3, 4], [5, 6, 7, 8]];
    assert_eq!(run("90", body, &inputs), inputs.map(|[a, b, c, d]| [a ^ c, b ^ d, c, d]));
}

// Promise: S66
#[test]
fn least_and_greatest_of_three_are_those_of_all() {
    let f = f32::from_bits;
    let numbers =
        [0.0, -0.0, 1.5, -2.25, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 3e38].map(f32::to_bits);
    let mut inputs = Vec::new();
    for a in numbers {
        for b in numbers {
            inputs.extend(numbers.map(|c| [a, b, c, 0]));
        }
    }
    let body = "min.f32 %r0, %w0, %w1, %w2;\nmax.f32 %r1, %w0, %w1, %w2;\nmin.NaN.f32 %r2, %w0, %w1, %w2;\n\
                max.ftz.f32 %r3, %w0, %w1, %w2;";
    for (input, output) in inputs.iter().zip(run("120", body, &inputs)) {
        let list: Vec<f32> = input[..3].iter().map(|word| f(*word)).filter(|x| !x.is_nan()).collect();
        // Ordered by the total order, in which -0 is before +0.
        let least = list.iter().copied().min_by(f32::total_cmp).unwrap_or(f(0x7fff_ffff));
        let greatest = list.iter().copied().max_by(f32::total_cmp).unwrap_or(f(0x7fff_ffff));
        assert_eq!((output[0], output[1]), (least.to_bits(), greatest.to_bits()), "{input:x?}");
        let nan = input[..3].iter().any(|word| f(*word).is_nan());
        assert_eq!(output[2], if nan { 0x7fff_ffff } else { least.to_bits() }, "{input:x?}");
        let flushed = if greatest.is_subnormal() { 0 } else { greatest.to_bits() };
        // Subnormals are flushed first, so +0 may be among the three.
        let zero = list.iter().any(|x| x.is_subnormal() || x.to_bits() == 0);
        let expected = if zero && greatest <= 0.0 { 0 } else { flushed };
        assert_eq!(output[3], expected, "{input:x?}");
    }
}

// Promise: S66
#[test]
fn pairs_of_floats_and_mixed_sums_compute_like_single_ones() {
    let body = "mov.b64 %d1, {%w0, %w1};\nmov.b64 %d2, {%w2, %w3};\nfma.rn.f32x2 %d3, %d1, %d2, %d1;\n\
                mov.b64 {%r0, %r1}, %d3;\nsub.rz.f32x2 %d4, %d1, %d2;\nmov.b64 {%r2, %r3}, %d4;";
    let inputs = [[1.5f32, -2.0, 3.25, 1e30], [0.1, 0.2, 0.3, 0.4], [-1e-20, 7.0, 1e-20, -7.0]];
    let bits = inputs.map(|four| four.map(f32::to_bits));
    for ([a, b, c, d], output) in inputs.iter().zip(run("120", body, &bits)) {
        assert_eq!(output[..2], [a.mul_add(*c, *a).to_bits(), b.mul_add(*d, *b).to_bits()]);
        // The exact difference in f64, towards zero.
        let toward_zero = |x: f32, y: f32| {
            let exact = f64::from(x) - f64::from(y);
            let near = exact as f32;
            let over = f64::from(near).abs() > exact.abs();
            (if over { if near > 0.0 { near.next_down() } else { near.next_up() } } else { near }).to_bits()
        };
        assert_eq!(output[2..], [toward_zero(*a, *c), toward_zero(*b, *d)], "{a} {c} {b} {d}");
    }
    let body = "cvt.u16.u32 %h0, %w0;\ncvt.u16.u32 %h1, %w1;\nmov.b32 %f0, %w2;\nadd.f32.f16 %r0, %h0, %f0;\n\
                sub.f32.bf16 %r1, %h1, %f0;\nfma.rn.f32.f16 %r2, %h0, %h0, %f0;\nfma.rn.f32.bf16 %r3, %h1, %h1, %f0;";
    // 1.5 in f16, -3.0 in bf16, 0.25 in f32.
    let output = run("120", body, &[[0x3e00, 0xc040, 0.25f32.to_bits(), 0]]);
    assert_eq!(output[0].map(f32::from_bits), [1.75, -3.25, 2.5, 9.25]);
}

// Promise: S66
#[test]
fn each_block_is_a_cluster_of_its_own() {
    let body = "mov.u32 %r0, %cluster_ctarank;\nmov.u32 %r1, %cluster_nctarank;\nmov.u32 %r2, %clusterid.x;\n\
                mov.u32 %r3, %nclusterid.x;\nmov.pred %p, %is_explicit_cluster;\n@%p mov.u32 %r0, 9;\n\
                mov.u32 %r4, %cluster_nctaid.y;\nadd.u32 %r1, %r1, %r4;\nsetmaxnreg.inc.sync.aligned.u32 64;";
    assert_eq!(run("90a", body, &[[0; 4]]), [[0, 2, 0, 1]]);
}

/// Runs a kernel of one warp over words in memory: `%d1` is the address of the input, `%d2` of the output.
fn warp(target: &str, body: &str, input: &[u32], outputs: usize) -> Vec<u32> {
    let mut rig = Rig::new(&format!(
        ".version 9.0\n.target sm_{target}\n.address_size 64\n\
         .visible .entry k(.param .u64 in, .param .u64 out)\n{{\n\
         .reg .b64 %d<9>;\n.reg .b32 %r<30>;\n.reg .f32 %f<9>;\n.reg .pred %p<3>;\n\
         .shared .align 128 .b8 area[1024];\n.shared .align 8 .b64 bar;\n\
         ld.param.u64 %d1, [in];\nld.param.u64 %d2, [out];\nmov.u32 %r0, %tid.x;\n{body}\n}}\n"
    ));
    let (from, to) = (Buffer::of(input), Buffer::zeroed(outputs * 4));
    rig.map(&[&from, &to]);
    rig.run("k", shape(1, 32), Params::new().buf(&from).buf(&to));
    to.all()
}

/// A sequence of words without a pattern.
fn noise(count: usize) -> Vec<u32> {
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) as u32
    };
    (0..count).map(|_| next()).collect()
}

// Promise: S66
#[test]
fn copies_in_bulk_move_bytes_and_complete_their_barrier() {
    let body = "mov.u32 %r1, area;\nmov.u32 %r2, bar;\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra wait;\n\
                mbarrier.init.shared.b64 [%r2], 1;\nfence.mbarrier_init.release.cluster;\n\
                mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;\n\
                cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1 + 16], 256, [%r2];\n\
                mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 0;\nselp.u32 %r9, 1, 0, %p2;\n\
                mov.u32 %r3, 256;\n\
                cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1 + 256], [%d1 + 512], %r3, [%r2];\n\
                wait:\nbar.sync 0;\nagain:\nmbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;\n@!%p2 bra again;\n\
                @%p1 bra end;\n\
                cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1 + 512], [%r1], 16, [%r2];\n\
                cp.async.bulk.prefetch.L2.global [%d1], 64;\n\
                cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r1 + 16], 512;\n\
                cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\n\
                st.global.u32 [%d2 + 512], %r9;\nend:";
    let input = noise(200);
    let output = warp("90", body, &input, 130);
    let mut expected = input[8..68].to_vec();
    expected.extend(&input[128..192]);
    expected.extend(&input[4..8]);
    assert_eq!(output[..128], expected);
    assert_eq!(output[128], 0, "half of the bytes do not end the phase");
}

// Promise: S66
#[test]
fn matrices_are_stored_as_the_loads_read_them() {
    // Lane l holds row l / 4, columns l % 4 * 2 and the next of each matrix; lane n * 8 + r has the address of row r of matrix n.
    let body = |trans: &str| {
        format!(
            "shl.b32 %r1, %r0, 4;\nmov.u32 %r2, area;\nadd.u32 %r2, %r2, %r1;\nmul.wide.u32 %d3, %r0, 16;\n\
             add.u64 %d4, %d1, %d3;\nld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d4];\n\
             stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {{%r10, %r11, %r12, %r13}};\nbar.warp.sync -1;\n\
             ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r2];\nadd.u64 %d5, %d2, %d3;\n\
             st.global.v4.u32 [%d5], {{%r20, %r21, %r22, %r23}};"
        )
    };
    let input = noise(128);
    let half = |matrix: usize, row: usize, column: usize| {
        let word = input[(row * 4 + column / 2) * 4 + matrix];
        word >> (column % 2 * 16) & 0xffff
    };
    for trans in ["", ".trans"] {
        let output = warp("90", &body(trans), &input, 128);
        for matrix in 0..4 {
            for row in 0..8 {
                for pair in 0..4 {
                    let at = |column| {
                        if trans.is_empty() { half(matrix, row, column) } else { half(matrix, column, row) }
                    };
                    let expected = at(2 * pair) | at(2 * pair + 1) << 16;
                    assert_eq!(
                        output[(matrix * 8 + row) * 4 + pair],
                        expected,
                        "{trans} {matrix} {row} {pair}"
                    );
                }
            }
        }
    }
}

// Promise: S66
#[test]
fn products_of_8_bit_floats_are_those_of_their_values() {
    for (at, bt, k, d) in [
        ("e4m3", "e4m3", 32, "f32"),
        ("e4m3", "e5m2", 32, "f32"),
        ("e5m2", "e4m3", 16, "f32"),
        ("e5m2", "e5m2", 32, "f16"),
    ] {
        let (count_a, count_b) = (k / 8, k / 16);
        let list = |first: usize, count: usize| {
            (first..first + count).map(|n| format!("%r{n}")).collect::<Vec<_>>().join(", ")
        };
        let (cd, words) = if d == "f32" { ("%f1, %f2, %f3, %f4", 4) } else { ("%r21, %r22", 2) };
        let clear = cd.split(", ").map(|name| format!("mov.b32 {name}, 0;\n")).collect::<String>();
        let store = cd.split(", ").enumerate();
        let store =
            store.map(|(n, name)| format!("st.global.b32 [%d5 + {}], {name};\n", n * 4)).collect::<String>();
        let body = format!(
            "mul.wide.u32 %d3, %r0, 32;\nadd.u64 %d4, %d1, %d3;\nmul.wide.u32 %d3, %r0, 16;\nadd.u64 %d5, %d2, %d3;\n\
             ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d4];\nld.global.v2.u32 {{%r14, %r15}}, [%d4 + 16];\n{clear}\
             mma.sync.aligned.m16n8k{k}.row.col.{d}.{at}.{bt}.{d} {{{cd}}}, {{{}}}, {{{}}}, {{{cd}}};\n{store}",
            list(10, count_a),
            list(14, count_b)
        );
        // Bytes without infinities and numbers that are none, and small enough for exact sums.
        let input: Vec<u32> = noise(256).into_iter().map(|word| word & 0xbfbf_bfbf).collect();
        let of = |name: &str, code: u32| if name == "e4m3" { value(code, 4, 3) } else { value(code, 5, 2) };
        let byte = |lane: usize, word: usize, n: usize| input[lane * 8 + word] >> (n * 8) & 0xff;
        // The layout that the language defines, by element: a row and a column for each byte of each lane.
        let (mut a, mut b) = (vec![0.0; 16 * k], vec![0.0; k * 8]);
        for lane in 0..32 {
            let (group, thread) = (lane / 4, lane % 4);
            for n in 0..count_a * 4 {
                let row = group + if n / 4 % 2 == 1 { 8 } else { 0 };
                let column = thread * 4 + n % 4 + if n >= 8 { 16 } else { 0 };
                a[row * k + column] = of(at, byte(lane, n / 4, n % 4)).unwrap();
            }
            for n in 0..count_b * 4 {
                let row = thread * 4 + n % 4 + if n >= 4 { 16 } else { 0 };
                b[row * 8 + group] = of(bt, byte(lane, 4 + n / 4, n % 4)).unwrap();
            }
        }
        let output = warp("89", &body, &input, 128);
        for lane in 0..32 {
            for n in 0..4 {
                let (row, column) = (lane / 4 + n / 2 * 8, lane % 4 * 2 + n % 2);
                let expected: f64 = (0..k).map(|j| a[row * k + j] * b[j * 8 + column]).sum();
                let scale: f64 = (0..k).map(|j| (a[row * k + j] * b[j * 8 + column]).abs()).sum();
                let word = output[lane * 4 + n * words / 4];
                let (got, precision) = if d == "f32" {
                    (f64::from(f32::from_bits(word)), 1e-6)
                } else {
                    let half = word >> (n % 2 * 16) & 0xffff;
                    (f64::from(of_half(half)), 1e-3)
                };
                assert!(
                    (got - expected).abs() <= scale * precision,
                    "{at} {bt} {row} {column}: {got} {expected}"
                );
            }
        }
    }
}

/// The value of an f16, by its definition.
fn of_half(code: u32) -> f32 {
    let sign = if code & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (e, m) = (code >> 10 & 31, (code & 0x3ff) as f32);
    sign * if e == 0 { m * 2f32.powi(-24) } else { (1024.0 + m) * 2f32.powi(e as i32 - 25) }
}

// Promise: S66
#[test]
fn atomics_on_vectors_change_each_element() {
    let body = "mul.wide.u32 %d3, %r0, 0;\nmov.f32 %f1, 0f3F800000;\nmov.f32 %f2, 0f40000000;\n\
                atom.global.add.v2.f32 {%f3, %f4}, [%d2], {%f1, %f2};\nred.global.add.v4.f32 [%d2 + 16], {%f1, %f2, %f2, %f1};\n\
                mov.b32 %r1, 0x40003c00;\nred.relaxed.gpu.global.max.noftz.v2.f16x2 [%d2 + 32], {%r1, %r1};";
    let output = warp("90", body, &[0], 10);
    let f = |x: f32| x.to_bits();
    assert_eq!(output[..2], [f(32.0), f(64.0)]);
    assert_eq!(output[4..8], [f(32.0), f(64.0), f(64.0), f(32.0)]);
    assert_eq!(output[8..], [0x4000_3c00; 2]);
}

// Promise: S66
#[test]
fn functions_have_variables_of_their_own_in_global_memory() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.global .u32 shared_name = 5;\n\
                .func (.param .u32 r) next()\n{ .reg .b32 %r<3>; .global .u32 shared_name[2] = {100, 7};\n.reg .b64 %d<2>; mov.u64 %d1, shared_name;\n\
                atom.global.add.u32 %r1, [shared_name], 1; ld.global.u32 %r2, [%d1 + 4]; add.u32 %r1, %r1, %r2; st.param.u32 [r], %r1; ret; }\n\
                .visible .entry k(.param .u64 out)\n{ .reg .b32 %r<5>; .reg .b64 %d<3>; .const .u32 shared_name[2] = {1, 9}; .param .u32 p;\n\
                ld.param.u64 %d1, [out]; call.uni (p), next, (); call.uni (p), next, (); ld.param.u32 %r1, [p];\n\
                ld.const.u32 %r2, [shared_name + 4]; st.global.v2.u32 [%d1], {%r1, %r2}; ret; }";
    let mut rig = Rig::new(text);
    let out = Buffer::zeroed(8);
    rig.map(&[&out]);
    rig.run("k", shape(1, 1), Params::new().buf(&out));
    assert_eq!(out.all::<u32>(), [108, 9]);
}

// Promise: S66
#[test]
fn four_products_of_8_by_4_by_8_have_the_layout_of_the_language() {
    for (a_layout, b_layout, d, c) in [
        ("row", "col", "f32", "f32"),
        ("col", "row", "f16", "f16"),
        ("row", "row", "f32", "f16"),
        ("col", "col", "f32", "f32"),
    ] {
        let names = |ty: &str, first: usize| {
            let count = if ty == "f32" { 8 } else { 4 };
            (first..first + count).map(|n| format!("%r{n}")).collect::<Vec<_>>()
        };
        let (cs, ds) = (names(c, 10), names(d, 20));
        let load: String = cs
            .iter()
            .enumerate()
            .map(|(n, name)| format!("ld.global.b32 {name}, [%d4 + {}];\n", 16 + n * 4))
            .collect();
        let store: String = ds
            .iter()
            .enumerate()
            .map(|(n, name)| format!("st.global.b32 [%d5 + {}], {name};\n", n * 4))
            .collect();
        let body = format!(
            "mul.wide.u32 %d3, %r0, 48;\nadd.u64 %d4, %d1, %d3;\nmul.wide.u32 %d3, %r0, 32;\nadd.u64 %d5, %d2, %d3;\n\
             ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d4];\n{load}\
             mma.sync.aligned.m8n8k4.{a_layout}.{b_layout}.{d}.f16.f16.{c} {{{}}}, {{%r1, %r2}}, {{%r3, %r4}}, {{{}}};\n{store}",
            ds.join(", "),
            cs.join(", ")
        );
        // Small whole numbers, whose products and sums are exact in every type.
        let small = |word: u32| f32::from(i16::try_from(word >> 8 & 7).unwrap() - 3);
        let raw = noise(32 * 24);
        let element = |lane: usize, n: usize| small(raw[lane * 24 + n]);
        let f16 = |x: f32| half(f64::from(x));
        let mut input = Vec::new();
        for lane in 0..32 {
            let pair = |n: usize| f16(element(lane, n)) | f16(element(lane, n + 1)) << 16;
            input.extend([pair(0), pair(2), pair(4), pair(6)]);
            let addends =
                (0..8).map(|n| if c == "f32" { element(lane, 8 + n).to_bits() } else { pair(8 + n % 4 * 2) });
            input.extend(addends);
        }
        let output = warp("75", &body, &input, 32 * 8);
        // The tables of the language, from the number of a lane and of an element to a row and a column.
        let high = |lane: usize| if lane < 16 { 0 } else { 4 };
        let of_c = |ty: &str, lane: usize, n: usize| {
            if ty == "f16" {
                (lane % 4 + high(lane), n)
            } else {
                ((lane & 1) + (n & 2) + high(lane), (n & 4) + (lane & 2) + (n & 1))
            }
        };
        for quad in 0..4 {
            let lanes: Vec<usize> = (0..32).filter(|lane| lane % 16 / 4 == quad).collect();
            let (mut a, mut b, mut sum) = ([[0f32; 4]; 8], [[0f32; 8]; 4], [[0f32; 8]; 8]);
            for &lane in &lanes {
                for n in 0..4 {
                    let (row, column) = if a_layout == "row" {
                        (lane % 4 + high(lane), n)
                    } else {
                        (n + high(lane), lane % 4)
                    };
                    a[row][column] = element(lane, n);
                    let (row, column) = if b_layout == "row" {
                        (lane % 4, n + high(lane))
                    } else {
                        (n, lane % 4 + high(lane))
                    };
                    b[row][column] = element(lane, 4 + n);
                }
                for n in 0..8 {
                    let (row, column) = of_c(c, lane, n);
                    sum[row][column] = element(lane, 8 + n);
                }
            }
            for row in 0..8 {
                for column in 0..8 {
                    sum[row][column] += (0..4).map(|j| a[row][j] * b[j][column]).sum::<f32>();
                }
            }
            for &lane in &lanes {
                for n in 0..8 {
                    let (row, column) = of_c(d, lane, n);
                    let got = if d == "f32" {
                        f32::from_bits(output[lane * 8 + n])
                    } else {
                        of_half(output[lane * 8 + n / 2] >> (n % 2 * 16) & 0xffff)
                    };
                    assert_eq!(
                        got, sum[row][column],
                        "{a_layout} {b_layout} {d} {c}: lane {lane} element {n}"
                    );
                }
            }
        }
    }
}

// Promise: S77
#[test]
fn exchanges_of_128_bits_match_rust() {
    // Each thread exchanges two cells of its own in the space, and stores the old values and the new ones.
    for (space, own) in [
        ("global", "mov.b64 %b, %c;"),
        ("shared", "mov.u64 %b, s; add.u64 %b, %b, %a;"),
        ("", "mov.b64 %b, %c;"),
    ] {
        let dot = if space.is_empty() { String::new() } else { format!(".{space}") };
        let mut rig = Rig::new(&format!(
            ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 in, .param .u64 out, .param .u64 cells)\n{{\n\
             .shared .align 16 .b8 s[1024]; .reg .b64 %i, %o, %a, %b, %c, %d<12>; .reg .b32 %t; .reg .b128 %q<6>;\n\
             ld.param.u64 %i, [in]; ld.param.u64 %o, [out]; ld.param.u64 %c, [cells]; mov.u32 %t, %tid.x;\n\
             mul.wide.u32 %a, %t, 48; add.u64 %i, %i, %a; mul.wide.u32 %a, %t, 64; add.u64 %o, %o, %a;\n\
             mul.wide.u32 %a, %t, 16; add.u64 %c, %c, %a; {own}\n\
             ld.global.v2.b64 {{%d0, %d1}}, [%i]; ld.global.v2.b64 {{%d2, %d3}}, [%i+16]; ld.global.v2.b64 {{%d4, %d5}}, [%i+32];\n\
             mov.b128 %q0, {{%d0, %d1}}; mov.b128 %q1, {{%d2, %d3}}; mov.b128 %q2, {{%d4, %d5}};\n\
             st{dot}.b128 [%b], %q0;\n\
             atom{dot}.cas.b128 %q3, [%b], %q1, %q2; st.global.b128 [%o], %q3;\n\
             ld{dot}.b128 %q4, [%b]; st.global.b128 [%o+16], %q4;\n\
             atom{dot}.exch.b128 %q5, [%b], %q1; st.global.b128 [%o+32], %q5;\n\
             ld{dot}.b128 %q4, [%b]; st.global.b128 [%o+48], %q4; atom{dot}.exch.b128 _, [%b], %q0; ret;\n}}\n"
        ));
        // The compared value equals the cell in all bits, or differs in one of either half.
        let cell = |n: u64| [n.wrapping_mul(0x9e37_79b9_7f4a_7c15), !n];
        let compared = |n: u64| match n % 4 {
            0 => [cell(n)[0] ^ 1 << 63, cell(n)[1]],
            1 => [cell(n)[0], cell(n)[1] ^ 1],
            _ => cell(n),
        };
        let new = |n: u64| [n + 5, n << 40];
        let words: Vec<u64> = (0..64).flat_map(|n| [cell(n), compared(n), new(n)].concat()).collect();
        let (input, output, cells) = (Buffer::of(&words), Buffer::zeroed(64 * 64), Buffer::zeroed(64 * 16));
        rig.map(&[&input, &output, &cells]);
        rig.run("k", shape(1, 64), Params::new().buf(&input).buf(&output).buf(&cells));
        let output = output.all::<u64>();
        for n in 0..64 {
            let after = if compared(n) == cell(n) { new(n) } else { cell(n) };
            let expected = [cell(n), after, after, compared(n)].concat();
            assert_eq!(output[8 * n as usize..][..8], expected, "{space} {n}");
            if space != "shared" {
                assert_eq!(cells.all::<u64>()[2 * n as usize..][..2], cell(n));
            }
        }
    }
}

// Promise: S77
#[test]
fn exchanges_of_128_bits_of_many_blocks_lose_nothing() {
    // All threads add 1 to the low half and 3 to the high half of one cell, in loops of a compare and exchange.
    let mut rig = Rig::body(
        ".param .u64 o",
        ".reg .b64 %d<9>; .reg .b128 %q<4>; .reg .pred %p<3>; ld.param.u64 %d0, [o]; mov.b64 %d1, 0; mov.b64 %d2, 0;\n\
         again: add.u64 %d3, %d1, 1; add.u64 %d4, %d2, 3; mov.b128 %q0, {%d1, %d2}; mov.b128 %q1, {%d3, %d4};\n\
         atom.global.cas.b128 %q2, [%d0], %q0, %q1; mov.b128 {%d5, %d6}, %q2;\n\
         setp.ne.u64 %p0, %d5, %d1; setp.ne.or.u64 %p1, %d6, %d2, %p0; mov.b64 %d1, %d5; mov.b64 %d2, %d6; @%p1 bra again; ret;",
    );
    let cell = Buffer::zeroed(16);
    rig.map(&[&cell]);
    rig.run("k", shape(16, 64), Params::new().buf(&cell));
    assert_eq!(cell.all::<u64>(), [1024, 3072]);
}

// Promise: S77
#[test]
fn exchange_of_128_bits_needs_its_alignment_and_its_types() {
    let mut rig = Rig::body(
        ".param .u64 o",
        ".reg .b64 %d<3>; .reg .b128 %q<3>; ld.param.u64 %d0, [o]; mov.b128 %q0, {%d0, %d0};\n\
         atom.exch.b128 %q1, [%d0+8], %q0; ret;",
    );
    let cell = Buffer::zeroed(32);
    rig.map(&[&cell]);
    let fault = rig.launch("k", shape(1, 1), Params::new().buf(&cell)).unwrap_err();
    assert_eq!(fault.kind, softgpu_engine::FaultKind::Misaligned);
    // The vendor's assembler refuses these too.
    for line in [
        "atom.add.b128 %q1, [%d0], %q0;",
        "atom.and.b128 %q1, [%d0], %q0;",
        "red.exch.b128 [%d0], %q0;",
        "atom.exch.b128 %q1, [%d0], {%d1, %d2};",
        "atom.cas.b128 %q1, [%d0], %q0;",
    ] {
        let text = format!(
            ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k() {{ .reg .b64 %d<3>; .reg .b128 %q<3>;\n{line}\nret; }}\n"
        );
        assert!(softgpu_engine::Module::load(text.as_bytes(), 90).is_err(), "{line}");
    }
}
