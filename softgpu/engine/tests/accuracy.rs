//! The error of approximate instructions, measured against the library of the C language in f64. `data/accuracy.txt` has the
//! results, which softgpu/README.md shows.

use std::f32::consts::TAU;

use crate::common::{Buffer, Params, Rig, shape};

/// Values of a sample.
const COUNT: usize = 1 << 20;

/// An approximate instruction.
struct Approximation {
    instruction: &'static str,
    exact: fn(f64) -> f64,
    /// The values of its sample lie between these.
    range: (f32, f32),
}

const APPROXIMATIONS: &[Approximation] = &[
    Approximation { instruction: "ex2.approx.f32", exact: f64::exp2, range: (-126.0, 128.0) },
    Approximation { instruction: "lg2.approx.f32", exact: f64::log2, range: (1e-38, f32::MAX) },
    Approximation { instruction: "sin.approx.f32", exact: f64::sin, range: (-TAU, TAU) },
    Approximation { instruction: "cos.approx.f32", exact: f64::cos, range: (-TAU, TAU) },
    Approximation { instruction: "tanh.approx.f32", exact: f64::tanh, range: (-10.0, 10.0) },
    Approximation { instruction: "rcp.approx.f32", exact: |x| 1.0 / x, range: (1e-37, 1e37) },
    Approximation { instruction: "rsqrt.approx.f32", exact: |x| 1.0 / x.sqrt(), range: (1e-38, f32::MAX) },
    Approximation { instruction: "sqrt.approx.f32", exact: f64::sqrt, range: (1e-38, f32::MAX) },
];

/// Values between two, as dense as f32 is, in both signs if the range has both.
fn sample((low, high): (f32, f32)) -> Vec<f32> {
    // The order of the bits is that of the values if negative ones count downward.
    let place = |value: f32| {
        let bits = value.to_bits();
        let magnitude = i64::from(bits & 0x7fff_ffff);
        if value.is_sign_negative() { -magnitude } else { magnitude }
    };
    let (first, last) = (place(low), place(high));
    let values = (0..COUNT).map(|index| {
        let place =
            first + (last - first) * i64::try_from(index).unwrap() / i64::try_from(COUNT - 1).unwrap();
        let magnitude = f32::from_bits(u32::try_from(place.unsigned_abs()).unwrap());
        if place < 0 { -magnitude } else { magnitude }
    });
    values.collect()
}

/// The largest error in units of the last place of the exact value, among values whose result is a normal number.
fn error(of: &Approximation) -> f64 {
    let values = sample(of.range);
    let (input, output) = (Buffer::of(&values), Buffer::zeroed(COUNT * 4));
    let body = format!(
        ".reg .b64 %d<5>; .reg .b32 %r<5>; .reg .f32 %f<3>;\n\
         ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;\n\
         mad.lo.u32 %r4, %r1, %r2, %r3; mul.wide.u32 %d3, %r4, 4; add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3;\n\
         ld.global.f32 %f1, [%d1]; {} %f2, %f1; st.global.f32 [%d2], %f2; ret;",
        of.instruction
    );
    let mut rig = Rig::body(".param .u64 a, .param .u64 b", &body);
    rig.map(&[&input, &output]);
    let blocks = u32::try_from(COUNT / 256).unwrap();
    rig.run("k", shape(blocks, 256), Params::new().buf(&input).buf(&output));
    let mut most = 0_f64;
    for (value, got) in values.iter().zip(output.all::<f32>()) {
        let exact = (of.exact)(f64::from(*value));
        let magnitude = exact.abs();
        if magnitude < f64::from(f32::MIN_POSITIVE) || magnitude > f64::from(f32::MAX) {
            continue;
        }
        // The last place of a f32 with this exponent has 2^-23 of its power of two.
        let exponent = i32::try_from(magnitude.to_bits() >> 52).unwrap() - 1023;
        let place = 2_f64.powi(exponent - 23);
        most = most.max((f64::from(got) - exact).abs() / place);
    }
    most
}

// Promise: S83
#[test]
fn errors_of_approximate_instructions_are_those_of_the_page() {
    let mut measured = String::new();
    for approximation in APPROXIMATIONS {
        let most = error(approximation);
        measured.push_str(&format!("{} {most:.4}\n", approximation.instruction));
        assert!(most < 1.0, "{}: {most}", approximation.instruction);
    }
    let noted = include_str!("data/accuracy.txt").lines().filter(|line| !line.starts_with('#'));
    let noted: String = noted.map(|line| format!("{}\n", line.split(" | ").next().unwrap_or(""))).collect();
    assert_eq!(
        measured, noted,
        "data/accuracy.txt has other figures; `cargo xtask docs` makes the page of it"
    );
}

// Promise: S83
#[test]
fn products_add_one_after_the_other_and_round_each_sum() {
    // In the order of k, the large terms go first and the small one stays; in any other order it is lost in them.
    let body = ".reg .b32 %a<4>; .reg .b32 %b<2>; .reg .f32 %d<4>; .reg .f32 %z; .reg .b64 %p; .reg .b32 %t, %g, %e; .reg .pred %q, %s;\n\
        ld.param.u64 %p, [a]; mov.f32 %z, 0f00000000;\n\
        mov.u32 %t, %laneid; and.b32 %g, %t, 3; mov.u32 %a0, 0; mov.u32 %a1, 0; mov.u32 %a2, 0; mov.u32 %a3, 0; mov.u32 %b0, 0; mov.u32 %b1, 0;\n\
        setp.eq.u32 %q, %g, 0;\n\
        @%q mov.u32 %a0, 0xfc007c00; @%q mov.u32 %a0, 0xf8007800; @%q mov.u32 %b0, 0x78007800;\n\
        setp.eq.u32 %s, %g, 1;\n\
        @%s mov.u32 %a0, 0x00003c00; @%s mov.u32 %b0, 0x00001400;\n\
        mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%d0, %d1, %d2, %d3}, {%a0, %a1}, {%b0}, {%z, %z, %z, %z};\n\
        setp.eq.u32 %q, %t, 0; @%q st.global.f32 [%p], %d0; ret;";
    let output = Buffer::zeroed(4);
    let mut rig = Rig::body(".param .u64 a", body);
    rig.map(&[&output]);
    rig.run("k", shape(1, 32), Params::new().buf(&output));
    // 2^15 * 2^15 - 2^15 * 2^15 + 1 * 2^-10: exact only if the small product is added last.
    assert_eq!(output.get::<f32>(0), 2_f32.powi(-10));
}
