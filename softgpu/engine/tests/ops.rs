//! Single instructions on all lanes, some lanes and one lane, compared with plain Rust. In one file: one table of cases.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "reference values are made by casts"
)]

use crate::common::{Buffer, Params, Rig, shape};

/// Edge cases among 64-bit patterns; narrower operands take the low bits.
fn patterns() -> Vec<u64> {
    let mut v: Vec<u64> = vec![
        0,
        1,
        2,
        3,
        7,
        31,
        32,
        33,
        63,
        64,
        65,
        0x7f,
        0x80,
        0xff,
        0x7fff,
        0x8000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        0x7fff_ffff_ffff_ffff,
        0x8000_0000_0000_0000,
        !0,
        0x0123_4567_89ab_cdef,
        0xdead_beef_cafe_f00d,
    ];
    let mut s = 0x9e37_79b9_7f4a_7c15u64;
    for _ in 0..39 {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        v.push(s);
    }
    v
}

fn floats32() -> Vec<u64> {
    let mut v: Vec<f32> = vec![
        0.0,
        -0.0,
        1.0,
        -1.0,
        1.5,
        -2.5,
        0.1,
        3.0,
        1e-40,
        -1e-40,
        1e-38,
        1e38,
        -1e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        16_777_216.0,
        0.5,
        2.5,
        1e10,
        -1e10,
        123.456,
        65504.0,
        1e-7,
        0.333_333_34,
    ];
    let mut s = 12345u32;
    while v.len() < 64 {
        s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        v.push(f32::from_bits(0x3800_0000 + (s >> 5)));
    }
    v.iter().map(|f| u64::from(f.to_bits())).collect()
}

fn floats64() -> Vec<u64> {
    floats32().iter().map(|b| (f64::from(f32::from_bits(*b as u32)) * 1.000_000_1).to_bits()).collect()
}

fn halves() -> Vec<u64> {
    let mut v: Vec<u64> = vec![
        0, 0x8000, 1, 0x3ff, 0x400, 0x3c00, 0xbc00, 0x7bff, 0x7c00, 0xfc00, 0x7e00, 0x3555, 0x4248, 0xc248,
    ];
    v.extend((0..50).map(|i| (i * 1237 + 77) & 0x7bff));
    v
}

/// Runs `code`, which computes %d from %a, %b, %c, and returns the results. `widths`: bits of d, a, b, c.
fn run(code: &str, widths: [u32; 4], inputs: &[[u64; 3]], block: u32) -> Vec<u64> {
    let n = inputs.len();
    let mem = |w: u32| if w == 8 { 16 } else { w };
    let regs = ["d", "a", "b", "c"]
        .iter()
        .zip(widths)
        .map(|(r, w)| format!(".reg .b{} %{r};", mem(w)))
        .collect::<String>();
    let loads = ["a", "b", "c"]
        .iter()
        .enumerate()
        .map(|(k, r)| {
            let w = mem(widths[k + 1]);
            format!(
                "ld.param.u64 %p, [k_{k}]; mad.wide.u32 %q, %t, {}, %p; ld.global.b{w} %{r}, [%q];\n",
                w / 8
            )
        })
        .collect::<String>();
    let wd = mem(widths[0]);
    let ptx = format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 k_0, .param .u64 k_1, .param .u64 k_2, .param .u64 k_3)\n\
         {{ {regs} .reg .b64 %p, %q; .reg .b32 %t, %u, %v; .reg .pred %go, %x, %y, %z;\n\
         mov.u32 %t, %tid.x; mov.u32 %u, %ctaid.x; mov.u32 %v, %ntid.x; mad.lo.u32 %t, %u, %v, %t;\n\
         setp.ge.u32 %go, %t, {n}; @%go bra done;\n{loads}{code}\n\
         ld.param.u64 %p, [k_3]; mad.wide.u32 %q, %t, {}, %p; st.global.b{wd} [%q], %d;\n done: ret; }}",
        wd / 8
    );
    let mut rig = Rig::new(&ptx);
    let buffers: Vec<Buffer> = (0..3)
        .map(|k| {
            let bytes = mem(widths[k + 1]) as usize / 8;
            let b = Buffer::zeroed(n * bytes);
            for (i, row) in inputs.iter().enumerate() {
                match bytes {
                    2 => b.set(i, row[k] as u16),
                    4 => b.set(i, row[k] as u32),
                    _ => b.set(i, row[k]),
                }
            }
            b
        })
        .collect();
    let out = Buffer::zeroed(n * wd as usize / 8);
    rig.map(&[&buffers[0], &buffers[1], &buffers[2], &out]);
    rig.run(
        "k",
        shape((n as u32).div_ceil(block), block),
        Params::new().buf(&buffers[0]).buf(&buffers[1]).buf(&buffers[2]).buf(&out),
    );
    (0..n)
        .map(|i| match wd {
            16 => u64::from(out.get::<u16>(i)),
            32 => u64::from(out.get::<u32>(i)),
            _ => out.get::<u64>(i),
        })
        .collect()
}

fn rows(v: &[u64]) -> Vec<[u64; 3]> {
    let n = v.len();
    let mut out = Vec::new();
    for i in 0..n {
        for step in [0, 1, 5, 17] {
            out.push([v[i], v[(i + step) % n], v[(i * 3 + step * 7) % n]]);
        }
    }
    out
}

/// Compares `code` with `f` for all three loops.
fn check(code: &str, widths: [u32; 4], values: &[u64], f: impl Fn(u64, u64, u64) -> u64) {
    let keep = |v: u64, w: u32| if w == 64 { v } else { v & ((1 << w) - 1) };
    let inputs: Vec<[u64; 3]> =
        rows(values).iter().map(|r| core::array::from_fn(|k| keep(r[k], widths[k + 1]))).collect();
    let expected: Vec<u64> = inputs.iter().map(|r| keep(f(r[0], r[1], r[2]), widths[0])).collect();
    for block in [64, 21, 1] {
        let got = run(code, widths, &inputs, block);
        for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(
                g, e,
                "{code} in blocks of {block}: inputs {:x?}, got {g:#x}, expected {e:#x}",
                inputs[i]
            );
        }
    }
}

fn s32(v: u64) -> i32 {
    v as u32 as i32
}
fn s64(v: u64) -> i64 {
    v as i64
}
fn r(v: i64) -> u64 {
    v as u64
}

#[test]
fn integer_operations_of_32_bits_match_rust() {
    let v = patterns();
    let w = [32, 32, 32, 32];
    check("add.s32 %d, %a, %b;", w, &v, |a, b, _| u64::from((a as u32).wrapping_add(b as u32)));
    check("add.sat.s32 %d, %a, %b;", w, &v, |a, b, _| r(s32(a).saturating_add(s32(b)).into()));
    check("sub.u32 %d, %a, %b;", w, &v, |a, b, _| u64::from((a as u32).wrapping_sub(b as u32)));
    check("sub.sat.s32 %d, %a, %b;", w, &v, |a, b, _| r(s32(a).saturating_sub(s32(b)).into()));
    check("mul.lo.s32 %d, %a, %b;", w, &v, |a, b, _| r(s32(a).wrapping_mul(s32(b)).into()));
    check("mul.hi.s32 %d, %a, %b;", w, &v, |a, b, _| r((i64::from(s32(a)) * i64::from(s32(b))) >> 32));
    check("mul.hi.u32 %d, %a, %b;", w, &v, |a, b, _| (a * b) >> 32);
    check("mul24.lo.s32 %d, %a, %b;", w, &v, |a, b, _| {
        r((i64::from(s32(a)) << 40 >> 40) * (i64::from(s32(b)) << 40 >> 40))
    });
    check("mul24.hi.u32 %d, %a, %b;", w, &v, |a, b, _| ((a & 0xff_ffff) * (b & 0xff_ffff)) >> 16);
    check("mad.lo.u32 %d, %a, %b, %c;", w, &v, |a, b, c| (a * b).wrapping_add(c));
    check("mad.hi.sat.s32 %d, %a, %b, %c;", w, &v, |a, b, c| {
        let p = (i64::from(s32(a)) * i64::from(s32(b))) >> 32;
        r((p + i64::from(s32(c))).clamp(i32::MIN.into(), i32::MAX.into()))
    });
    check(
        "div.s32 %d, %a, %b;",
        w,
        &v,
        |a, b, _| if b == 0 { !0 } else { r(s32(a).wrapping_div(s32(b)).into()) },
    );
    check("div.u32 %d, %a, %b;", w, &v, |a, b, _| a.checked_div(b).unwrap_or(!0));
    check(
        "rem.s32 %d, %a, %b;",
        w,
        &v,
        |a, b, _| if b == 0 { a } else { r(s32(a).wrapping_rem(s32(b)).into()) },
    );
    check("rem.u32 %d, %a, %b;", w, &v, |a, b, _| a.checked_rem(b).unwrap_or(a));
    check("min.s32 %d, %a, %b;", w, &v, |a, b, _| r(s32(a).min(s32(b)).into()));
    check("max.u32 %d, %a, %b;", w, &v, |a, b, _| a.max(b));
    check("abs.s32 %d, %a;", w, &v, |a, _, _| r(s32(a).wrapping_abs().into()));
    check("neg.s32 %d, %a;", w, &v, |a, _, _| r(-i64::from(s32(a))));
    check("and.b32 %d, %a, %b;", w, &v, |a, b, _| a & b);
    check("or.b32 %d, %a, %b;", w, &v, |a, b, _| a | b);
    check("xor.b32 %d, %a, %b;", w, &v, |a, b, _| a ^ b);
    check("not.b32 %d, %a;", w, &v, |a, _, _| !a);
    check("cnot.b32 %d, %a;", w, &v, |a, _, _| u64::from(a == 0));
    check("shl.b32 %d, %a, %b;", w, &v, |a, b, _| if b > 31 { 0 } else { a << b });
    check("shr.u32 %d, %a, %b;", w, &v, |a, b, _| if b > 31 { 0 } else { a >> b });
    check("shr.s32 %d, %a, %b;", w, &v, |a, b, _| r((s32(a) >> b.min(31)).into()));
    check("shf.l.wrap.b32 %d, %a, %b, %c;", w, &v, |a, b, c| ((b << 32 | a) << (c & 31)) >> 32);
    check("shf.r.wrap.b32 %d, %a, %b, %c;", w, &v, |a, b, c| (b << 32 | a) >> (c & 31));
    check("shf.l.clamp.b32 %d, %a, %b, %c;", w, &v, |a, b, c| {
        ((u128::from(b << 32 | a) << c.min(32)) >> 32) as u64
    });
    check("shf.r.clamp.b32 %d, %a, %b, %c;", w, &v, |a, b, c| (b << 32 | a) >> c.min(32));
    check("popc.b32 %d, %a;", w, &v, |a, _, _| a.count_ones().into());
    check("clz.b32 %d, %a;", w, &v, |a, _, _| (a as u32).leading_zeros().into());
    check("brev.b32 %d, %a;", w, &v, |a, _, _| (a as u32).reverse_bits().into());
    check("bfind.u32 %d, %a;", w, &v, |a, _, _| if a == 0 { !0 } else { 63 - u64::from(a.leading_zeros()) });
    check("bfind.s32 %d, %a;", w, &v, |a, _, _| {
        let x = if s32(a) < 0 { !(a as u32) } else { a as u32 };
        if x == 0 { !0 } else { 31 - u64::from(x.leading_zeros()) }
    });
    check(
        "bfind.shiftamt.u32 %d, %a;",
        w,
        &v,
        |a, _, _| if a == 0 { !0 } else { (a as u32).leading_zeros().into() },
    );
    check("sad.s32 %d, %a, %b, %c;", w, &v, |a, b, c| c.wrapping_add(s32(a).abs_diff(s32(b)).into()));
    check("sad.u32 %d, %a, %b, %c;", w, &v, |a, b, c| c.wrapping_add(a.abs_diff(b)));
    check("bmsk.clamp.b32 %d, %a, %b;", w, &v, |a, b, _| (((1u128 << b.min(32)) - 1) << a.min(32)) as u64);
    check("bmsk.wrap.b32 %d, %a, %b;", w, &v, |a, b, _| ((1 << (b & 31)) - 1) << (a & 31));
    check("lop3.b32 %d, %a, %b, %c, 0x96;", w, &v, |a, b, c| a ^ b ^ c);
    check("lop3.b32 %d, %a, %b, %c, 0xe8;", w, &v, |a, b, c| (a & b) | (a & c) | (b & c));
    check("lop3.b32 %d, %a, %b, %c, 0x35;", w, &v, |a, b, c| {
        (0..32).fold(0, |m, n| {
            let k = (a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1);
            m | (0x35 >> k & 1) << n
        })
    });
    check("selp.b32 %d, %a, %b, 1;", w, &v, |a, _, _| a);
    check(
        "setp.lt.s32 %x, %a, %b; selp.b32 %d, %b, %c, %x;",
        w,
        &v,
        |a, b, c| if s32(a) < s32(b) { b } else { c },
    );
    check("slct.b32.s32 %d, %a, %b, %c;", w, &v, |a, b, c| if s32(c) >= 0 { a } else { b });
    check("szext.clamp.s32 %d, %a, %b;", w, &v, |a, b, _| match b {
        0 => 0,
        1..32 => r(i64::from(s32(a) << (32 - b) >> (32 - b))),
        _ => a,
    });
    check("mov.b32 %d, -5;", w, &v, |_, _, _| r(-5));
    check("mov.b32 %d, 0xfU;", w, &v, |_, _, _| 15);
    check("mov.b32 %d, (3+4)*5-0b11;", w, &v, |_, _, _| 32);
}

#[test]
fn bit_field_operations_match_rust() {
    let v = patterns();
    let field = |v: u64, signed: bool, bits: u32, pos: u64, len: u64| {
        // Bit by bit, as the ISA defines it.
        let (pos, len) = ((pos & 0xff) as u32, (len & 0xff) as u32);
        let msb = bits - 1;
        let sign = if !signed || len == 0 { 0 } else { v >> (pos + len - 1).min(msb) & 1 };
        (0..bits).fold(0u64, |d, i| {
            let bit = if i < len && pos + i <= msb { v >> (pos + i) & 1 } else { sign };
            d | bit << i
        })
    };
    check("bfe.u32 %d, %a, %b, %c;", [32, 32, 32, 32], &v, |a, b, c| field(a, false, 32, b, c));
    check("bfe.s32 %d, %a, %b, %c;", [32, 32, 32, 32], &v, |a, b, c| field(a, true, 32, b, c));
    check("bfe.u64 %d, %a, %b, %c;", [64, 64, 32, 32], &v, |a, b, c| field(a, false, 64, b, c));
    check("bfe.s64 %d, %a, %b, %c;", [64, 64, 32, 32], &v, |a, b, c| field(a, true, 64, b, c));
    check("bfi.b32 %d, %a, %b, 5, 9;", [32, 32, 32, 32], &v, |a, b, _| {
        (b & !(0x1ff << 5)) | (a & 0x1ff) << 5
    });
    check("bfi.b32 %d, %a, %b, %c, 12;", [32, 32, 32, 32], &v, |a, b, c| {
        let pos = c & 0xff;
        (0..12).fold(
            b,
            |d, i| if pos + i < 32 { (d & !(1 << (pos + i))) | (a >> i & 1) << (pos + i) } else { d },
        )
    });
    check("bfi.b64 %d, %a, %b, 32, 32;", [64, 64, 64, 32], &v, |a, b, _| a << 32 | b & 0xffff_ffff);
    for (mode, f) in [
        ("prmt.b32", None),
        ("prmt.b32.f4e", Some([[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]])),
        ("prmt.b32.b4e", Some([[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]])),
        ("prmt.b32.rc8", Some([[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]])),
        ("prmt.b32.ecl", Some([[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]])),
        ("prmt.b32.ecr", Some([[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]])),
        ("prmt.b32.rc16", Some([[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]])),
    ] {
        check(&format!("{mode} %d, %a, %b, %c;"), [32, 32, 32, 32], &v, |a, b, c| {
            let all = (b << 32 | a).to_le_bytes();
            let byte = |k: usize| match f {
                Some(table) => all[table[(c & 3) as usize][k]],
                None => {
                    let s = (c >> (4 * k) & 15) as usize;
                    if s & 8 != 0 { if all[s & 7] & 0x80 != 0 { 0xff } else { 0 } } else { all[s] }
                }
            };
            u32::from_le_bytes(core::array::from_fn(byte)).into()
        });
    }
    check("fns.b32 %d, %a, 0, 3;", [32, 32, 32, 32], &v, |a, _, _| {
        (0..32).filter(|n| a >> n & 1 == 1).nth(2).unwrap_or(0xffff_ffff)
    });
}

#[test]
fn packed_byte_operations_match_rust() {
    let v = patterns();
    let w = [32, 32, 32, 32];
    let bytes = |v: u64| (v as u32).to_le_bytes();
    check("dp4a.s32.u32 %d, %a, %b, %c;", w, &v, |a, b, c| {
        let s: i64 = (0..4).map(|k| i64::from(bytes(a)[k] as i8) * i64::from(bytes(b)[k])).sum();
        c.wrapping_add(r(s))
    });
    check("dp4a.u32.u32 %d, %a, %b, %c;", w, &v, |a, b, c| {
        c + (0..4).map(|k| u64::from(bytes(a)[k]) * u64::from(bytes(b)[k])).sum::<u64>()
    });
    check("dp2a.hi.s32.s32 %d, %a, %b, %c;", w, &v, |a, b, c| {
        let s: i64 =
            (0..2).map(|k| i64::from((a >> (16 * k)) as i16) * i64::from(bytes(b)[k + 2] as i8)).sum();
        c.wrapping_add(r(s))
    });
    check("vabsdiff4.u32.u32.u32.add %d, %a, %b, %c;", w, &v, |a, b, c| {
        c + (0..4).map(|k| u64::from(bytes(a)[k].abs_diff(bytes(b)[k]))).sum::<u64>()
    });
    check("vabsdiff4.u32.u32.u32 %d, %a, %b, 0;", w, &v, |a, b, _| {
        u32::from_le_bytes(core::array::from_fn(|k| bytes(a)[k].abs_diff(bytes(b)[k]))).into()
    });
}

#[test]
fn integer_operations_of_64_bits_match_rust() {
    let v = patterns();
    let w = [64, 64, 64, 64];
    check("add.u64 %d, %a, %b;", w, &v, |a, b, _| a.wrapping_add(b));
    check("sub.s64 %d, %a, %b;", w, &v, |a, b, _| a.wrapping_sub(b));
    check("mul.lo.u64 %d, %a, %b;", w, &v, |a, b, _| a.wrapping_mul(b));
    check("mul.hi.u64 %d, %a, %b;", w, &v, |a, b, _| ((u128::from(a) * u128::from(b)) >> 64) as u64);
    check("mul.hi.s64 %d, %a, %b;", w, &v, |a, b, _| {
        ((i128::from(s64(a)) * i128::from(s64(b))) >> 64) as u64
    });
    check("mad.lo.s64 %d, %a, %b, %c;", w, &v, |a, b, c| a.wrapping_mul(b).wrapping_add(c));
    check("mad.hi.u64 %d, %a, %b, %c;", w, &v, |a, b, c| {
        (((u128::from(a) * u128::from(b)) >> 64) as u64).wrapping_add(c)
    });
    check("div.s64 %d, %a, %b;", w, &v, |a, b, _| if b == 0 { !0 } else { r(s64(a).wrapping_div(s64(b))) });
    check("rem.s64 %d, %a, %b;", w, &v, |a, b, _| if b == 0 { a } else { r(s64(a).wrapping_rem(s64(b))) });
    check("div.u64 %d, %a, %b;", w, &v, |a, b, _| a.checked_div(b).unwrap_or(!0));
    check("min.s64 %d, %a, %b;", w, &v, |a, b, _| r(s64(a).min(s64(b))));
    check("max.u64 %d, %a, %b;", w, &v, |a, b, _| a.max(b));
    check("shl.b64 %d, %a, %b;", [64, 64, 32, 32], &v, |a, b, _| if b > 63 { 0 } else { a << b });
    check("shr.u64 %d, %a, %b;", [64, 64, 32, 32], &v, |a, b, _| if b > 63 { 0 } else { a >> b });
    check("shr.s64 %d, %a, %b;", [64, 64, 32, 32], &v, |a, b, _| r(s64(a) >> b.min(63)));
    check("popc.b64 %d, %a;", [32, 64, 32, 32], &v, |a, _, _| a.count_ones().into());
    check("clz.b64 %d, %a;", [32, 64, 32, 32], &v, |a, _, _| a.leading_zeros().into());
    check("brev.b64 %d, %a;", w, &v, |a, _, _| a.reverse_bits());
    check("neg.s64 %d, %a;", w, &v, |a, _, _| a.wrapping_neg());
    check("not.b64 %d, %a;", w, &v, |a, _, _| !a);
    check("mul.wide.s32 %d, %a, %b;", [64, 32, 32, 32], &v, |a, b, _| {
        r(i64::from(s32(a)) * i64::from(s32(b)))
    });
    check("mul.wide.u32 %d, %a, %b;", [64, 32, 32, 32], &v, |a, b, _| a * b);
    check("mad.wide.s32 %d, %a, %b, %c;", [64, 32, 32, 64], &v, |a, b, c| {
        r(i64::from(s32(a)) * i64::from(s32(b))).wrapping_add(c)
    });
    check("mul.wide.u16 %d, %a, %b;", [32, 16, 16, 16], &v, |a, b, _| a * b);
    check("mul.wide.s16 %d, %a, %b;", [32, 16, 16, 16], &v, |a, b, _| {
        r(i64::from(a as i16) * i64::from(b as i16))
    });
    check("mov.b64 {%u, %v}, %a; xor.b32 %d, %u, %v;", [32, 64, 32, 32], &v, |a, _, _| {
        (a ^ a >> 32) & 0xffff_ffff
    });
    check("mov.b64 %d, {%a, %b};", [64, 32, 32, 32], &v, |a, b, _| a | b << 32);
    check("mov.b32 %d, {%a, %b};", [32, 16, 16, 16], &v, |a, b, _| a | b << 16);
    check(
        "{.reg .b16 %h<4>; mov.b64 {%h0, %h1, %h2, %h3}, %a; mov.b64 %d, {%h3, %h2, %h1, %h0};}",
        w,
        &v,
        |a, _, _| (a >> 48) | (a >> 32 & 0xffff) << 16 | (a >> 16 & 0xffff) << 32 | a << 48,
    );
}

#[test]
fn integer_operations_of_16_bits_match_rust() {
    let v = patterns();
    let w = [16, 16, 16, 16];
    check("add.s16 %d, %a, %b;", w, &v, |a, b, _| a + b);
    check("sub.u16 %d, %a, %b;", w, &v, |a, b, _| a.wrapping_sub(b));
    check("mul.lo.s16 %d, %a, %b;", w, &v, |a, b, _| a * b);
    check("mul.hi.u16 %d, %a, %b;", w, &v, |a, b, _| (a * b) >> 16);
    check("mad.lo.u16 %d, %a, %b, %c;", w, &v, |a, b, c| a * b + c);
    check("div.u16 %d, %a, %b;", w, &v, |a, b, _| a.checked_div(b).unwrap_or(!0));
    check("div.s16 %d, %a, %b;", w, &v, |a, b, _| {
        if b == 0 { !0 } else { r((a as i16).wrapping_div(b as i16).into()) }
    });
    check(
        "rem.s16 %d, %a, %b;",
        w,
        &v,
        |a, b, _| if b == 0 { a } else { r((a as i16).wrapping_rem(b as i16).into()) },
    );
    check("shl.b16 %d, %a, %b;", [16, 16, 32, 32], &v, |a, b, _| if b > 15 { 0 } else { a << b });
    check("shr.s16 %d, %a, %b;", [16, 16, 32, 32], &v, |a, b, _| r((a as i16 >> b.min(15)).into()));
    check("shr.u16 %d, %a, %b;", [16, 16, 32, 32], &v, |a, b, _| if b > 15 { 0 } else { a >> b });
    check("min.s16 %d, %a, %b;", w, &v, |a, b, _| r((a as i16).min(b as i16).into()));
    check("neg.s16 %d, %a;", w, &v, |a, _, _| a.wrapping_neg());
    check("abs.s16 %d, %a;", w, &v, |a, _, _| r((a as i16).wrapping_abs().into()));
    check("not.b16 %d, %a;", w, &v, |a, _, _| !a);
    check("xor.b16 %d, %a, %b;", w, &v, |a, b, _| a ^ b);
    check("setp.lt.s16 %x, %a, %b; selp.b16 %d, 1, 0, %x;", w, &v, |a, b, _| {
        u64::from((a as i16) < (b as i16))
    });
}

#[test]
fn carry_chains_match_wide_arithmetic() {
    let v = patterns();
    // 64-bit sums, differences and products from halves.
    let split = "{.reg .b32 %l<8>; mov.b64 {%l0, %l1}, %a; mov.b64 {%l2, %l3}, %b;";
    check(
        &format!("{split} add.cc.u32 %l4, %l0, %l2; addc.u32 %l5, %l1, %l3; mov.b64 %d, {{%l4, %l5}};}}"),
        [64; 4],
        &v,
        |a, b, _| a.wrapping_add(b),
    );
    check(
        &format!("{split} sub.cc.u32 %l4, %l0, %l2; subc.u32 %l5, %l1, %l3; mov.b64 %d, {{%l4, %l5}};}}"),
        [64; 4],
        &v,
        |a, b, _| a.wrapping_sub(b),
    );
    check(
        &format!(
            "{split} mul.lo.u32 %l4, %l0, %l2; mul.hi.u32 %l5, %l0, %l2; mad.lo.u32 %l5, %l0, %l3, %l5; \
             mad.lo.u32 %l5, %l1, %l2, %l5; mov.b64 %d, {{%l4, %l5}};}}"
        ),
        [64; 4],
        &v,
        |a, b, _| a.wrapping_mul(b),
    );
    // The high 64 bits of a 128-bit accumulation.
    check("mad.lo.cc.u64 %p, %a, %b, %c; madc.hi.u64 %d, %a, %b, 0;", [64; 4], &v, |a, b, c| {
        ((u128::from(a) * u128::from(b) + u128::from(c)) >> 64) as u64
    });
    check("add.cc.u64 %p, %a, %b; addc.u64 %d, 0, 0;", [64; 4], &v, |a, b, _| {
        u64::from(a.checked_add(b).is_none())
    });
}

#[test]
fn comparisons_match_rust() {
    let v = patterns();
    for (name, f) in [
        ("eq", (|a, b| a == b) as fn(i64, i64) -> bool),
        ("ne", |a, b| a != b),
        ("lt", |a, b| a < b),
        ("le", |a, b| a <= b),
        ("gt", |a, b| a > b),
        ("ge", |a, b| a >= b),
    ] {
        let set = |ty: &str| format!("setp.{name}.{ty} %x, %a, %b; selp.b32 %d, 1, 0, %x;");
        check(&set("s32"), [32; 4], &v, |a, b, _| f(s32(a).into(), s32(b).into()).into());
        check(&set("u32"), [32; 4], &v, |a, b, _| f(s64(a), s64(b)).into());
        check(&set("s64"), [32, 64, 64, 64], &v, |a, b, _| f(s64(a), s64(b)).into());
        check(&set("u64"), [32, 64, 64, 64], &v, |a, b, _| f(s64(a ^ 1 << 63), s64(b ^ 1 << 63)).into());
    }
    check("setp.lo.u32 %x, %a, %b; selp.b32 %d, 1, 0, %x;", [32; 4], &v, |a, b, _| (a < b).into());
    check("setp.hs.u32 %x, %a, %b; selp.b32 %d, 1, 0, %x;", [32; 4], &v, |a, b, _| (a >= b).into());
    let f = floats32();
    for (name, ordered, unordered) in [
        ("lt", (|o| o == -1) as fn(i32) -> bool, "ltu"),
        ("ge", |o| o >= 0, "geu"),
        ("eq", |o| o == 0, "equ"),
        ("ne", |o| o != 0, "neu"),
    ] {
        let order = |a: u64, b: u64| {
            f32::from_bits(a as u32).partial_cmp(&f32::from_bits(b as u32)).map(|o| o as i32)
        };
        let set = |n: &str, t: &str| format!("setp.{n}.{t} %x, %a, %b; selp.b32 %d, 1, 0, %x;");
        check(&set(name, "f32"), [32; 4], &f, |a, b, _| order(a, b).is_some_and(ordered).into());
        check(&set(unordered, "f32"), [32; 4], &f, |a, b, _| order(a, b).is_none_or(ordered).into());
        let d = floats64();
        let order = |a: u64, b: u64| f64::from_bits(a).partial_cmp(&f64::from_bits(b)).map(|o| o as i32);
        check(&set(name, "f64"), [32, 64, 64, 64], &d, |a, b, _| order(a, b).is_some_and(ordered).into());
        check(&set(unordered, "f64"), [32, 64, 64, 64], &d, |a, b, _| order(a, b).is_none_or(ordered).into());
    }
    check("setp.nan.f32 %x, %a, %b; selp.b32 %d, 1, 0, %x;", [32; 4], &f, |a, b, _| {
        (f32::from_bits(a as u32).is_nan() || f32::from_bits(b as u32).is_nan()).into()
    });
    check("setp.num.f64 %x, %a, %b; selp.b32 %d, 1, 0, %x;", [32, 64, 64, 64], &floats64(), |a, b, _| {
        (!f64::from_bits(a).is_nan() && !f64::from_bits(b).is_nan()).into()
    });
    // Two destinations and a third input.
    check(
        "setp.gt.s32 %z, %c, 0; setp.lt.and.s32 %x|%y, %a, %b, !%z; selp.b32 %d, 1, 0, %x; selp.b32 %u, 2, 0, %y; or.b32 %d, %d, %u;",
        [32; 4],
        &v,
        |a, b, c| {
            let (p, z) = (s32(a) < s32(b), s32(c) > 0);
            u64::from(p && !z) | u64::from(!p && !z) << 1
        },
    );
    check(
        "setp.gt.s32 %z, %c, 0; setp.eq.s32 %x, %a, %b; xor.pred %y, %x, %z; not.pred %y, %y; mov.pred %x, %y; @!%x mov.b32 %d, 4; @%x mov.b32 %d, 9;",
        [32; 4],
        &v,
        |a, b, c| if (a == b) ^ (s32(c) > 0) { 4 } else { 9 },
    );
    check("set.lt.u32.s32 %d, %a, %b;", [32; 4], &v, |a, b, _| if s32(a) < s32(b) { !0 } else { 0 });
    check(
        "set.ge.f32.u32 %d, %a, %b;",
        [32; 4],
        &v,
        |a, b, _| if a >= b { 1f32.to_bits().into() } else { 0 },
    );
    check("testp.subnormal.f32 %x, %a; selp.b32 %d, 1, 0, %x;", [32; 4], &f, |a, _, _| {
        // Zero counts as subnormal here: the exponent field decides.
        (a & 0x7f80_0000 == 0).into()
    });
}

fn f(v: u64) -> f32 {
    f32::from_bits(v as u32)
}
/// f32 results: every NaN is the canonical one.
fn bits(x: f32) -> u64 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits().into() }
}
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

#[test]
fn single_precision_operations_match_rust() {
    let v = floats32();
    let w = [32; 4];
    check("add.f32 %d, %a, %b;", w, &v, |a, b, _| bits(f(a) + f(b)));
    check("sub.rn.f32 %d, %a, %b;", w, &v, |a, b, _| bits(f(a) - f(b)));
    check("mul.f32 %d, %a, %b;", w, &v, |a, b, _| bits(f(a) * f(b)));
    check("add.ftz.f32 %d, %a, %b;", w, &v, |a, b, _| bits(flushed(flushed(f(a)) + flushed(f(b)))));
    check("mul.ftz.f32 %d, %a, %b;", w, &v, |a, b, _| bits(flushed(flushed(f(a)) * flushed(f(b)))));
    check("fma.rn.f32 %d, %a, %b, %c;", w, &v, |a, b, c| bits(f(a).mul_add(f(b), f(c))));
    check("fma.rn.ftz.f32 %d, %a, %b, %c;", w, &v, |a, b, c| {
        bits(flushed(flushed(f(a)).mul_add(flushed(f(b)), flushed(f(c)))))
    });
    check("div.rn.f32 %d, %a, %b;", w, &v, |a, b, _| bits(f(a) / f(b)));
    check("rcp.rn.f32 %d, %a;", w, &v, |a, _, _| bits(1.0 / f(a)));
    check("sqrt.rn.f32 %d, %a;", w, &v, |a, _, _| bits(f(a).sqrt()));
    check("add.sat.f32 %d, %a, %b;", w, &v, |a, b, _| {
        let x = f(a) + f(b);
        bits(if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 })
    });
    check("neg.f32 %d, %a;", w, &v, |a, _, _| a ^ 0x8000_0000);
    check("abs.f32 %d, %a;", w, &v, |a, _, _| a & 0x7fff_ffff);
    check("copysign.f32 %d, %a, %b;", w, &v, |a, b, _| (a & 0x8000_0000) | (b & 0x7fff_ffff));
    let min = |a: f32, b: f32| match (a.is_nan(), b.is_nan()) {
        (true, true) => f32::NAN,
        (true, _) => b,
        (_, true) => a,
        _ if a == 0.0 && b == 0.0 => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    };
    check("min.f32 %d, %a, %b;", w, &v, |a, b, _| bits(min(f(a), f(b))));
    check("max.f32 %d, %a, %b;", w, &v, |a, b, _| bits(-min(-f(a), -f(b))));
    check("max.NaN.f32 %d, %a, %b;", w, &v, |a, b, _| {
        if f(a).is_nan() || f(b).is_nan() { 0x7fff_ffff } else { bits(-min(-f(a), -f(b))) }
    });
    let relative = |code: &str, exact: fn(f64) -> f64, tolerance: f64| {
        let inputs: Vec<[u64; 3]> = v.iter().map(|&a| [a, 0, 0]).collect();
        for (row, got) in inputs.iter().zip(run(code, w, &inputs, 32)) {
            let (x, got) = (f64::from(f(row[0])), f64::from(f(got)));
            let e = exact(x);
            let ok = (got.is_nan() && e.is_nan())
                || got == f64::from(e as f32)
                || (got - e).abs() <= e.abs() * tolerance;
            assert!(ok, "{code} of {x}: {got}, exactly {e}");
        }
    };
    relative("ex2.approx.f32 %d, %a;", f64::exp2, 2e-7);
    relative("lg2.approx.f32 %d, %a;", f64::log2, 2e-7);
    relative("rcp.approx.f32 %d, %a;", |x| 1.0 / x, 1e-7);
    relative("rsqrt.approx.f32 %d, %a;", |x| 1.0 / x.sqrt(), 1e-7);
    relative("sqrt.approx.f32 %d, %a;", f64::sqrt, 1e-7);
    relative("tanh.approx.f32 %d, %a;", f64::tanh, 1e-3);
    // Beyond 2^126 the quotient is zero.
    let huge = f32::from_bits(0x7f00_0000);
    let got =
        run("div.approx.f32 %d, %a, %b;", w, &[[bits(1e30), bits(huge), 0], [bits(6.0), bits(2.0), 0]], 32);
    assert_eq!(got, [0, bits(3.0)]);
}

/// The value rounded in a direction, from an exact rational number: `exact` is an integer and a power of two.
fn directed(exact: (i128, i32), mode: &str) -> f32 {
    // exact = m * 2^e. All f32 in the tests are normal.
    let (m, e) = exact;
    if m == 0 {
        return 0.0;
    }
    let negative = m < 0;
    let mut m = m.unsigned_abs();
    let mut e = e;
    let mut sticky = false;
    while m >= 1 << 24 {
        sticky |= m & 1 == 1;
        if m < 1 << 25 {
            break;
        }
        m >>= 1;
        e += 1;
    }
    let (kept, rest) = if m >= 1 << 24 { (m >> 1, m & 1 == 1 || sticky) } else { (m, false) };
    let e = if m >= 1 << 24 { e + 1 } else { e };
    let up = rest && matches!((mode, negative), ("rp", false) | ("rm", true));
    let x = (kept + u128::from(up)) as f64 * 2f64.powi(e);
    (if negative { -x } else { x }) as f32
}

#[test]
fn directed_rounding_matches_exact_arithmetic() {
    let v: Vec<u64> = (0..64u32)
        .map(|i| u64::from((0x3f00_0000 + i.wrapping_mul(0x0123_4567) % 0x0180_0000) ^ (i & 1) << 31))
        .collect();
    let exact = |x: f32| -> (i128, i32) {
        let b = x.to_bits();
        let m = i128::from(b & 0x7f_ffff | 0x80_0000);
        (if b >> 31 == 1 { -m } else { m }, (b >> 23 & 0xff) as i32 - 150)
    };
    let add = |x: (i128, i32), y: (i128, i32)| {
        let e = x.1.min(y.1);
        ((x.0 << (x.1 - e)) + (y.0 << (y.1 - e)), e)
    };
    let mul = |x: (i128, i32), y: (i128, i32)| (x.0 * y.0, x.1 + y.1);
    for mode in ["rz", "rm", "rp"] {
        check(&format!("mul.{mode}.f32 %d, %a, %b;"), [32; 4], &v, |a, b, _| {
            bits(directed(mul(exact(f(a)), exact(f(b))), mode))
        });
        let zero = |x: f32| if x == 0.0 && mode == "rm" { -0.0 } else { x };
        check(&format!("add.{mode}.f32 %d, %a, %b;"), [32; 4], &v, |a, b, _| {
            bits(zero(directed(add(exact(f(a)), exact(f(b))), mode)))
        });
        check(&format!("fma.{mode}.f32 %d, %a, %b, %c;"), [32; 4], &v, |a, b, c| {
            bits(zero(directed(add(mul(exact(f(a)), exact(f(b))), exact(f(c))), mode)))
        });
    }
    // f64: the directed results bracket the nearest one, and differ from it by at most one step.
    let d: Vec<u64> = v.iter().map(|&b| (f64::from(f(b)) / 3.0).to_bits()).collect();
    for op in ["add", "mul"] {
        let inputs = rows(&d);
        let of = |mode: &str| run(&format!("{op}.{mode}.f64 %d, %a, %b;"), [64; 4], &inputs, 64);
        let (rn, rm, rp, rz) = (of("rn"), of("rm"), of("rp"), of("rz"));
        let mut inexact = 0;
        for i in 0..inputs.len() {
            let [n, m, p, z] = [rn[i], rm[i], rp[i], rz[i]].map(f64::from_bits);
            assert!(m <= n && n <= p && (m == p || m.next_up() == p), "{op}: {m} {n} {p}");
            assert_eq!(z, if n > 0.0 { m } else { p });
            inexact += usize::from(m != p);
        }
        assert!(inexact > 10, "{op}: {inexact}");
    }
}

#[test]
fn double_precision_operations_match_rust() {
    let v = floats64();
    let w = [64; 4];
    let d = f64::from_bits;
    let same = |code: &str, f: &dyn Fn(f64, f64, f64) -> f64| {
        let inputs = rows(&v);
        for (row, got) in inputs.iter().zip(run(code, w, &inputs, 64)) {
            let e = f(d(row[0]), d(row[1]), d(row[2]));
            assert!(
                got == e.to_bits() || (e.is_nan() && d(got).is_nan()),
                "{code}: {row:x?}: {} {e}",
                d(got)
            );
        }
    };
    same("add.f64 %d, %a, %b;", &|a, b, _| a + b);
    same("sub.f64 %d, %a, %b;", &|a, b, _| a - b);
    same("mul.f64 %d, %a, %b;", &|a, b, _| a * b);
    same("div.rn.f64 %d, %a, %b;", &|a, b, _| a / b);
    same("fma.rn.f64 %d, %a, %b, %c;", &|a, b, c| a.mul_add(b, c));
    same("sqrt.rn.f64 %d, %a;", &|a, _, _| a.sqrt());
    same("neg.f64 %d, %a;", &|a, _, _| -a);
    same("abs.f64 %d, %a;", &|a, _, _| a.abs());
}

#[test]
fn conversions_match_rust() {
    let v = patterns();
    let x = floats32();
    let d = floats64();
    check("cvt.u64.u32 %d, %a;", [64, 32, 32, 32], &v, |a, _, _| a);
    check("cvt.s64.s32 %d, %a;", [64, 32, 32, 32], &v, |a, _, _| r(s32(a).into()));
    check("cvt.u32.u64 %d, %a;", [32, 64, 32, 32], &v, |a, _, _| a);
    check("cvt.s32.s16 %d, %a;", [32, 16, 32, 32], &v, |a, _, _| r((a as i16).into()));
    check("cvt.u32.u16 %d, %a;", [32, 16, 32, 32], &v, |a, _, _| a);
    check("cvt.u16.u32 %d, %a;", [16, 32, 32, 32], &v, |a, _, _| a);
    check("cvt.s64.s16 %d, %a;", [64, 16, 32, 32], &v, |a, _, _| r((a as i16).into()));
    check("cvt.s32.s8 %d, %a;", [32, 32, 32, 32], &v, |a, _, _| r((a as i8).into()));
    check("cvt.u16.u8 %d, %a;", [16, 16, 32, 32], &v, |a, _, _| a & 0xff);
    check("cvt.s16.s8 %d, %a;", [16, 16, 32, 32], &v, |a, _, _| r((a as i8).into()));
    check("cvt.sat.u8.s32 %d, %a;", [32, 32, 32, 32], &v, |a, _, _| r(s32(a).clamp(0, 255).into()));
    check("cvt.sat.s16.s32 %d, %a;", [16, 32, 32, 32], &v, |a, _, _| r(s32(a).clamp(-32768, 32767).into()));
    check("cvt.rn.f32.s32 %d, %a;", [32; 4], &v, |a, _, _| bits(s32(a) as f32));
    check("cvt.rn.f32.u32 %d, %a;", [32; 4], &v, |a, _, _| bits(a as u32 as f32));
    check("cvt.rn.f32.u64 %d, %a;", [32, 64, 32, 32], &v, |a, _, _| bits(a as f32));
    check("cvt.rn.f32.s64 %d, %a;", [32, 64, 32, 32], &v, |a, _, _| bits(s64(a) as f32));
    check("cvt.rz.f32.u64 %d, %a;", [32, 64, 32, 32], &v, |a, _, _| {
        let keep = 64 - a.leading_zeros();
        bits((if keep > 24 { a >> (keep - 24) << (keep - 24) } else { a }) as f32)
    });
    check("cvt.rn.f64.u64 %d, %a;", [64; 4], &v, |a, _, _| (a as f64).to_bits());
    check("cvt.rn.f64.s32 %d, %a;", [64, 32, 32, 32], &v, |a, _, _| f64::from(s32(a)).to_bits());
    check("cvt.rzi.s32.f32 %d, %a;", [32; 4], &x, |a, _, _| r((f(a) as i32).into()));
    check("cvt.rni.s32.f32 %d, %a;", [32; 4], &x, |a, _, _| r((f(a).round_ties_even() as i32).into()));
    check("cvt.rmi.s32.f32 %d, %a;", [32; 4], &x, |a, _, _| r((f(a).floor() as i32).into()));
    check("cvt.rpi.u32.f32 %d, %a;", [32; 4], &x, |a, _, _| (f(a).ceil() as u32).into());
    check(
        "cvt.rzi.u64.f32 %d, %a;",
        [64, 32, 32, 32],
        &x,
        |a, _, _| if f(a).is_nan() { 1 << 63 } else { f(a) as u64 },
    );
    check("cvt.rzi.s32.f64 %d, %a;", [32, 64, 32, 32], &d, |a, _, _| {
        let x = f64::from_bits(a);
        if x.is_nan() { 1 << 31 } else { r((x as i32).into()) }
    });
    check("cvt.rzi.s16.f32 %d, %a;", [16, 32, 32, 32], &x, |a, _, _| r((f(a) as i16).into()));
    check("cvt.rni.f32.f32 %d, %a;", [32; 4], &x, |a, _, _| bits(f(a).round_ties_even()));
    check("cvt.rzi.f32.f32 %d, %a;", [32; 4], &x, |a, _, _| bits(f(a).trunc()));
    check("cvt.rmi.f64.f64 %d, %a;", [64; 4], &d[..15], |a, _, _| f64::from_bits(a).floor().to_bits());
    check("cvt.sat.f32.f32 %d, %a;", [32; 4], &x, |a, _, _| {
        let x = f(a);
        bits(if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 })
    });
    check("cvt.f64.f32 %d, %a;", [64, 32, 32, 32], &x[..15], |a, _, _| f64::from(f(a)).to_bits());
    check("cvt.rn.f32.f64 %d, %a;", [32, 64, 32, 32], &d, |a, _, _| bits(f64::from_bits(a) as f32));
    check("cvt.rz.f32.f64 %d, %a;", [32, 64, 32, 32], &d[16..], |a, _, _| {
        let x = f64::from_bits(a);
        let y = x as f32;
        bits(if f64::from(y).abs() > x.abs() { f32::from_bits(y.to_bits() - 1) } else { y })
    });
}

/// The value of an f16, and the nearest f16 of an exact value by search.
fn half_value(h: u64) -> f64 {
    let (s, e, m) = (h >> 15 & 1, (h >> 10 & 31) as i32, (h & 1023) as f64);
    let x = match e {
        0 => m * 2f64.powi(-24),
        31 if m == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + m / 1024.0) * 2f64.powi(e - 15),
    };
    if s == 1 { -x } else { x }
}

fn nearest_half(x: f64) -> u64 {
    if x.is_nan() {
        return 0x7fff;
    }
    let sign = u64::from(x.is_sign_negative()) << 15;
    let x = x.abs();
    if x >= 65520.0 {
        return sign | 0x7c00;
    }
    let (mut low, mut high) = (0u64, 0x7c00);
    while high - low > 1 {
        let mid = u64::midpoint(low, high);
        if half_value(mid) <= x { low = mid } else { high = mid }
    }
    let (down, up) = (x - half_value(low), if high == 0x7c00 { 65536.0 - x } else { half_value(high) - x });
    sign | if down < up || (down == up && low & 1 == 0) { low } else { high }
}

#[test]
fn sixteen_bit_float_operations_match_exact_arithmetic() {
    let v = halves();
    let w = [16; 4];
    let h = half_value;
    check("add.f16 %d, %a, %b;", w, &v, |a, b, _| nearest_half(h(a) + h(b)));
    check("sub.f16 %d, %a, %b;", w, &v, |a, b, _| nearest_half(h(a) - h(b)));
    check("mul.f16 %d, %a, %b;", w, &v, |a, b, _| nearest_half(h(a) * h(b)));
    check("fma.rn.f16 %d, %a, %b, %c;", w, &v[..8], |a, b, c| {
        // For these operands the sum is exact in f64.
        nearest_half(h(a) * h(b) + h(c))
    });
    check("neg.f16 %d, %a;", w, &v, |a, _, _| a ^ 0x8000);
    check("cvt.f32.f16 %d, %a;", [32, 16, 16, 16], &v, |a, _, _| {
        let x = h(a) as f32;
        if x.is_nan() { 0x7fc0_0000 } else { bits(x) }
    });
    check("cvt.rn.f16.f32 %d, %a;", [16, 32, 32, 32], &floats32(), |a, _, _| nearest_half(f(a).into()));
    check("cvt.rn.f16.f64 %d, %a;", [16, 64, 32, 32], &floats64(), |a, _, _| nearest_half(f64::from_bits(a)));
    check("cvt.rn.f16x2.f32 %d, %a, %b;", [32; 4], &floats32(), |a, b, _| {
        nearest_half(f(a).into()) << 16 | nearest_half(f(b).into())
    });
    let pairs: Vec<u64> = (0..v.len()).map(|i| v[i] << 16 | v[(i * 5 + 3) % v.len()]).collect();
    check("mul.f16x2 %d, %a, %b;", [32; 4], &pairs, |a, b, _| {
        nearest_half(h(a >> 16) * h(b >> 16)) << 16 | nearest_half(h(a & 0xffff) * h(b & 0xffff))
    });
    check("setp.lt.f16 %x, %a, %b; selp.b16 %d, 1, 0, %x;", w, &v, |a, b, _| (h(a) < h(b)).into());
    // bf16 is the top of an f32.
    let b16 = |v: u64| f32::from_bits((v << 16) as u32);
    let round = |x: f32| {
        if x.is_nan() {
            return 0x7fff;
        }
        let b = x.to_bits();
        u64::from((u64::from(b) + 0x7fff + u64::from(b >> 16 & 1)) as u32 >> 16)
    };
    let bf: Vec<u64> = floats32().iter().map(|v| v >> 16).collect();
    check("cvt.rn.bf16.f32 %d, %a;", [16, 32, 32, 32], &floats32(), |a, _, _| round(f(a)));
    check("mul.bf16 %d, %a, %b;", w, &bf, |a, b, _| round(b16(a) * b16(b)));
    check("cvt.rna.tf32.f32 %d, %a;", [32; 4], &floats32()[16..], |a, _, _| (a + 0x1000) & !0x1fff);
}

#[test]
fn f16_fma_rounds_once() {
    // 1 + 2^-10 times 1 + 2^-10 plus 2^-24: a rounding to f32 or f64 first does not matter here, but ties do. a * b = 2049/2048
    // is exactly half way between two f16; c decides.
    let (a, b) = (nearest_half(1.5), nearest_half(683.0 / 1024.0));
    let product = half_value(a) * half_value(b);
    let tiny = 1u64;
    for (c, sum) in [(tiny, product + 2f64.powi(-24)), (0x8001, product - 2f64.powi(-24)), (0, product)] {
        let got = run("fma.rn.f16 %d, %a, %b, %c;", [16; 4], &[[a, b, c]], 32);
        assert_eq!(got[0], nearest_half(sum));
    }
    // Beyond 53 bits: 65504 * 1 and 2^-24 of either sign next to a tie of large numbers.
    let (a, b) = (nearest_half(2049.0 / 2.0 * 2.0), nearest_half(1.0));
    assert_eq!(run("fma.rn.f16 %d, %a, %b, %c;", [16; 4], &[[a, b, tiny]], 32)[0], a);
}
