//! Numbers: 16-bit formats, rounding directions, canonical NaN, approximate functions. Pure functions of bits.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "conversions between number formats are the subject"
)]

use crate::ir::Round;

/// The NaN that f32 operations produce.
pub(crate) const NAN32: u32 = 0x7fff_ffff;

/// Replaces a NaN by the canonical one.
#[inline(always)]
pub(crate) fn canon(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(NAN32) } else { x }
}

/// Replaces a NaN by the canonical one, found by its bits: the optimiser assumes that a square root equals itself.
#[inline(always)]
pub(crate) fn canon_bits(x: f32) -> f32 {
    let b = x.to_bits();
    f32::from_bits(if b & 0x7fff_ffff > 0x7f80_0000 { NAN32 } else { b })
}

/// Flushes subnormals to zero with their sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    let b = x.to_bits();
    f32::from_bits(if b & 0x7f80_0000 == 0 { b & 0x8000_0000 } else { b })
}

#[inline(always)]
pub(crate) fn flush_if(x: f32, ftz: bool) -> f32 {
    if ftz { flush(x) } else { x }
}

/// Clamps to [0, 1]; NaN becomes +0.
#[inline(always)]
pub(crate) fn saturate(x: f32) -> f32 {
    if x > 0.0 { if x < 1.0 { x } else { 1.0 } } else { 0.0 }
}

pub(crate) fn saturate64(x: f64) -> f64 {
    if x > 0.0 { if x < 1.0 { x } else { 1.0 } } else { 0.0 }
}

/// Returns the sum and its exact error.
pub(crate) fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let s = a + b;
    let bb = s - a;
    (s, (a - (s - bb)) + (b - bb))
}

/// Rounds `s + err` to odd, where `s` is the sum rounded to nearest: a later rounding to at most 51 bits is then exact.
fn to_odd(s: f64, err: f64) -> f64 {
    if err == 0.0 || !err.is_finite() || !s.is_finite() || s.to_bits() & 1 == 1 {
        s
    } else if err > 0.0 {
        s.next_up()
    } else {
        s.next_down()
    }
}

/// Rounds `s`, which is rounded to nearest, in another direction by the sign of its error.
fn direct(s: f64, err: f64, round: Round) -> f64 {
    if err == 0.0 || err.is_nan() || s.is_nan() {
        return s;
    }
    match round {
        Round::Rn | Round::Rna => s,
        Round::Rm if err < 0.0 => s.next_down(),
        Round::Rp if err > 0.0 => s.next_up(),
        Round::Rz if s > 0.0 && err < 0.0 => s.next_down(),
        Round::Rz if s < 0.0 && err > 0.0 => s.next_up(),
        _ => s,
    }
}

/// Converts f64 to f32 in any rounding direction.
pub(crate) fn narrow(x: f64, round: Round) -> f32 {
    let r = x as f32;
    let back = f64::from(r);
    if back == x || x.is_nan() || x.is_infinite() {
        return r;
    }
    match round {
        Round::Rn => r,
        Round::Rna => r,
        Round::Rm if back > x => r.next_down(),
        Round::Rp if back < x => r.next_up(),
        Round::Rz if back.abs() > x.abs() => {
            if r > 0.0 {
                r.next_down()
            } else {
                r.next_up()
            }
        }
        _ => r,
    }
}

fn zero_sign(a: f64, b: f64, s: f64, round: Round) -> f64 {
    // An exact zero sum of operands that are not both -0 is -0 only when rounding down.
    if s == 0.0 && !(a == 0.0 && b == 0.0 && a.is_sign_negative() == b.is_sign_negative()) {
        return if round == Round::Rm { -0.0 } else { 0.0 };
    }
    s
}

pub(crate) fn add32(a: f32, b: f32, round: Round) -> f32 {
    let (a, b) = (f64::from(a), f64::from(b));
    let (s, e) = two_sum(a, b);
    narrow(zero_sign(a, b, to_odd(s, e), round), round)
}

pub(crate) fn mul32(a: f32, b: f32, round: Round) -> f32 {
    narrow(f64::from(a) * f64::from(b), round)
}

pub(crate) fn fma32(a: f32, b: f32, c: f32, round: Round) -> f32 {
    let p = f64::from(a) * f64::from(b);
    let c = f64::from(c);
    let (s, e) = two_sum(p, c);
    narrow(zero_sign(p, c, to_odd(s, e), round), round)
}

pub(crate) fn div32(a: f32, b: f32, round: Round) -> f32 {
    let (a, b) = (f64::from(a), f64::from(b));
    let q = a / b;
    if !q.is_finite() || q == 0.0 {
        return q as f32;
    }
    let rest = (-q).mul_add(b, a);
    narrow(to_odd(q, if b < 0.0 { -rest } else { rest }), round)
}

pub(crate) fn sqrt32(a: f32, round: Round) -> f32 {
    let a = f64::from(a);
    let q = a.sqrt();
    if !q.is_finite() || q == 0.0 {
        return q as f32;
    }
    narrow(to_odd(q, (-q).mul_add(q, a)), round)
}

pub(crate) fn add64(a: f64, b: f64, round: Round) -> f64 {
    if round == Round::Rn {
        return a + b;
    }
    let (s, e) = two_sum(a, b);
    direct(zero_sign(a, b, s, round), e, round)
}

pub(crate) fn mul64(a: f64, b: f64, round: Round) -> f64 {
    let s = a * b;
    if round == Round::Rn { s } else { direct(s, a.mul_add(b, -s), round) }
}

pub(crate) fn fma64(a: f64, b: f64, c: f64, round: Round) -> f64 {
    let s = a.mul_add(b, c);
    if round == Round::Rn || !s.is_finite() {
        return s;
    }
    let p = a * b;
    let pe = a.mul_add(b, -p);
    let (t, te) = two_sum(p, c);
    let (w, we) = two_sum(te, pe);
    let (v, ve) = two_sum(t - s, w);
    direct(zero_sign(p, c, s, round), v + (ve + we), round)
}

pub(crate) fn div64(a: f64, b: f64, round: Round) -> f64 {
    let q = a / b;
    if round == Round::Rn || !q.is_finite() {
        return q;
    }
    let rest = (-q).mul_add(b, a);
    direct(q, if b < 0.0 { -rest } else { rest }, round)
}

pub(crate) fn sqrt64(a: f64, round: Round) -> f64 {
    let q = a.sqrt();
    if round == Round::Rn || !q.is_finite() { q } else { direct(q, (-q).mul_add(q, a), round) }
}

/// Rounds to an integral value.
pub(crate) fn integral(x: f64, round: Round) -> f64 {
    match round {
        Round::Rn => x.round_ties_even(),
        Round::Rz => x.trunc(),
        Round::Rm => x.floor(),
        Round::Rp => x.ceil(),
        Round::Rna => x.round(),
    }
}

/// A small binary format: exponent and mantissa bits.
#[derive(Clone, Copy)]
pub(crate) struct FloatFormat {
    exponent: u32,
    mantissa: u32,
}

pub(crate) const F16: FloatFormat = FloatFormat { exponent: 5, mantissa: 10 };
pub(crate) const BF16: FloatFormat = FloatFormat { exponent: 8, mantissa: 7 };
pub(crate) const TF32: FloatFormat = FloatFormat { exponent: 8, mantissa: 10 };

/// Rounds once to a small format. `x` must be exact, or rounded to odd.
pub(crate) fn pack(x: f64, f: FloatFormat, round: Round) -> u32 {
    let sign = u32::from(x.is_sign_negative()) << (f.exponent + f.mantissa);
    let top = ((1u32 << f.exponent) - 1) << f.mantissa;
    if x.is_nan() {
        return (1 << (f.exponent + f.mantissa)) - 1;
    }
    if x.is_infinite() {
        return sign | top;
    }
    if x == 0.0 {
        return sign;
    }
    let bits = x.abs().to_bits();
    let mut e = (bits >> 52) as i32 - 1023;
    let mut m = bits & ((1 << 52) - 1);
    if e == -1023 {
        // An f64 subnormal is far below every small format: a sticky bit is enough.
        e = -1022;
        m |= 1;
    } else {
        m |= 1 << 52;
    }
    let bias = (1i32 << (f.exponent - 1)) - 1;
    let least = 1 - bias;
    // Number of bits that are dropped.
    let mut drop = 52 - f.mantissa as i32;
    if e < least {
        drop += least - e;
    }
    let drop = drop.min(60) as u32;
    let kept = if drop > 53 { 0 } else { m >> drop };
    let rest = m & ((1u64 << drop) - 1);
    let half = 1u64 << (drop - 1);
    let up = match round {
        Round::Rn => rest > half || (rest == half && kept & 1 == 1),
        Round::Rna => rest >= half,
        Round::Rz => false,
        Round::Rm => sign != 0 && rest != 0,
        Round::Rp => sign == 0 && rest != 0,
    };
    let kept = (kept + u64::from(up)) as u32;
    // `kept` holds the hidden bit in normal numbers; adding lets a carry run into the exponent.
    let exponent = if e < least { 0 } else { (e + bias - 1) as u32 };
    let value = u64::from(kept) + (u64::from(exponent) << f.mantissa);
    if value >= u64::from(top) {
        let overflow_to_infinity = match round {
            Round::Rn | Round::Rna => true,
            Round::Rz => false,
            Round::Rm => sign != 0,
            Round::Rp => sign == 0,
        };
        return sign | if overflow_to_infinity { top } else { top - 1 };
    }
    sign | value as u32
}

/// Converts f16 to f32 exactly.
#[inline(always)]
pub(crate) fn from_f16(h: u32) -> f32 {
    let sign = (h & 0x8000) << 16;
    let magnitude = h & 0x7fff;
    // Scaling by a power of two handles subnormals; the exponent of infinities and NaNs is then completed.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
    let bits = if magnitude >= 0x7c00 { (magnitude << 13) | 0x7f80_0000 } else { scaled.to_bits() };
    f32::from_bits(sign | bits)
}

/// Converts f32 to f16, to nearest even.
#[inline(always)]
pub(crate) fn to_f16(x: f32) -> u32 {
    let b = x.to_bits();
    let sign = (b >> 16) & 0x8000;
    let a = b & 0x7fff_ffff;
    let out = if a > 0x7f80_0000 {
        return 0x7fff;
    } else if a >= 0x4780_0000 {
        0x7c00
    } else if a < 0x3880_0000 {
        // Subnormal: adding a magic number aligns and rounds.
        (f32::from_bits(a) + 0.5).to_bits() - 0x3f00_0000
    } else {
        let odd = (a >> 13) & 1;
        (a.wrapping_add(0xc800_0fff).wrapping_add(odd)) >> 13
    };
    sign | out
}

/// Converts bf16 to f32 exactly.
#[inline(always)]
pub(crate) fn from_bf16(h: u32) -> f32 {
    f32::from_bits(h << 16)
}

/// Converts f32 to bf16, to nearest even.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u32 {
    let b = x.to_bits();
    if x.is_nan() { 0x7fff } else { b.wrapping_add(0x7fff + ((b >> 16) & 1)) >> 16 }
}

/// Fused multiply-add in a 16-bit format, rounded once.
pub(crate) fn fma16(a: f32, b: f32, c: f32, f: FloatFormat) -> u32 {
    let p = f64::from(a) * f64::from(b);
    let c = f64::from(c);
    let (s, e) = two_sum(p, c);
    pack(zero_sign(p, c, to_odd(s, e), Round::Rn), f, Round::Rn)
}

/// Converts a float to an integer of `bits` bits, saturating.
pub(crate) fn to_int(x: f64, round: Round, signed: bool, bits: u32, nan: u64) -> u64 {
    if x.is_nan() {
        return nan;
    }
    let x = integral(x, round);
    if signed {
        let (low, high) = (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1);
        (x as i128).clamp(low, high) as i64 as u64
    } else {
        (x as u128).min((1u128 << bits) - 1) as u64
    }
}

/// Converts an exact integer to f32 in any rounding direction.
pub(crate) fn int_to_f32(v: i128, round: Round) -> f32 {
    let r = v as f32;
    let back = r as i128;
    match round {
        Round::Rm if back > v => r.next_down(),
        Round::Rp if back < v => r.next_up(),
        Round::Rz if back.abs() > v.abs() => {
            if r > 0.0 {
                r.next_down()
            } else {
                r.next_up()
            }
        }
        _ => r,
    }
}

/// Converts an exact integer to f64 in any rounding direction.
pub(crate) fn int_to_f64(v: i128, round: Round) -> f64 {
    let r = v as f64;
    let back = r as i128;
    match round {
        Round::Rm if back > v => r.next_down(),
        Round::Rp if back < v => r.next_up(),
        Round::Rz if back.abs() > v.abs() => {
            if r > 0.0 {
                r.next_down()
            } else {
                r.next_up()
            }
        }
        _ => r,
    }
}

/// Computes a function in f64 and rounds once, with flushing of operand and result.
#[inline(always)]
fn through(x: f32, ftz: bool, f: impl Fn(f64) -> f64) -> f32 {
    // Without a branch on the modifier, which would keep the loops over lanes from becoming vector code.
    let keep = if ftz { 0x8000_0000 } else { !0 };
    let flush = |x: f32| {
        let b = x.to_bits();
        f32::from_bits(if b & 0x7f80_0000 == 0 { b & keep } else { b })
    };
    canon(flush(f(f64::from(flush(x))) as f32))
}

/// The Taylor coefficients of 2^x, from the highest down: powers of ln 2 over factorials.
pub(crate) const EXP2: [f64; 12] = {
    let mut out = [1.0; 12];
    let mut n = 10;
    let mut term = 1.0;
    let mut k = 1.0;
    loop {
        term = term * core::f64::consts::LN_2 / k;
        out[n] = term;
        if n == 0 {
            break out;
        }
        n -= 1;
        k += 1.0;
    }
};
/// Adding it puts an integer, and the bias of the exponent, in the low bits of an f64.
pub(crate) const EXP2_BIAS: f64 = 6_755_399_441_055_744.0 + 1023.0;
/// Powers of two beyond it are zero or infinite as f32.
pub(crate) const EXP2_LIMIT: f64 = 200.0;

/// 2^x to about 2^-47, without a branch, so that the loops over lanes become vector code. Operations are not fused: the result is the
/// same on every processor.
#[inline(always)]
fn exp2(x: f64) -> f64 {
    let bounded = if x > -EXP2_LIMIT { x } else { -EXP2_LIMIT };
    let bounded = if bounded < EXP2_LIMIT { bounded } else { EXP2_LIMIT };
    let whole = bounded.round_ties_even();
    let f = bounded - whole;
    let mut p = EXP2[0];
    for c in &EXP2[1..] {
        p = p * f + c;
    }
    let power = f64::from_bits((whole + EXP2_BIAS).to_bits() << 52);
    if x.is_nan() { x } else { p * power }
}

/// The coefficients of log2((1 + z) / (1 - z)) / z in z^2, from the highest down.
pub(crate) const LOG2: [f64; 9] = {
    let mut out = [0.0; 9];
    let (mut n, mut k) = (0, 17.0);
    while n < 9 {
        out[n] = 2.0 / core::f64::consts::LN_2 / k;
        n += 1;
        k -= 2.0;
    }
    out
};
/// The high word of the square root of 1/2.
pub(crate) const ROOT_HALF: i32 = 0x3fe6_a09e;

/// log2(x) of an f32 to about 2^-47, without a branch.
#[inline(always)]
fn log2(x: f64) -> f64 {
    let bits = x.to_bits();
    // x = 2^k m with m about between the square roots of 1/2 and of 2.
    let k = ((bits >> 32) as i32).wrapping_sub(ROOT_HALF) >> 20;
    let m = f64::from_bits(bits.wrapping_sub((k as u64) << 52));
    let z = (m - 1.0) / (m + 1.0);
    let s = z * z;
    let mut p = LOG2[0];
    for c in &LOG2[1..] {
        p = p * s + c;
    }
    let r = f64::from(k) + z * p;
    let r = if x < f64::INFINITY { r } else { x };
    let r = if x > 0.0 { r } else { f64::NAN };
    if x == 0.0 { f64::NEG_INFINITY } else { r }
}

#[inline(always)]
pub(crate) fn ex2(x: f32, ftz: bool) -> f32 {
    through(x, ftz, exp2)
}

#[inline(always)]
pub(crate) fn lg2(x: f32, ftz: bool) -> f32 {
    through(x, ftz, log2)
}

pub(crate) fn sin(x: f32, ftz: bool) -> f32 {
    through(x, ftz, f64::sin)
}

pub(crate) fn cos(x: f32, ftz: bool) -> f32 {
    through(x, ftz, f64::cos)
}

pub(crate) fn tanh(x: f32) -> f32 {
    through(x, false, f64::tanh)
}

pub(crate) fn rcp(x: f32, ftz: bool) -> f32 {
    through(x, ftz, |x| 1.0 / x)
}

pub(crate) fn rsqrt(x: f32, ftz: bool) -> f32 {
    through(x, ftz, |x| 1.0 / x.sqrt())
}

/// `div.approx`: a zero or NaN for the largest divisors, as the ISA specifies.
pub(crate) fn div_approx(a: f32, b: f32, ftz: bool) -> f32 {
    let (a, b) = (flush_if(a, ftz), flush_if(b, ftz));
    let magnitude = b.abs();
    if magnitude > f32::from_bits(0x7e80_0000) && magnitude.is_finite() {
        return if a.is_infinite() { f32::from_bits(NAN32) } else { 0.0f32.copysign(a) * 1.0f32.copysign(b) };
    }
    canon(flush_if((f64::from(a) / f64::from(b)) as f32, ftz))
}

/// Minimum with -0 below +0. A NaN operand is ignored, or becomes the result if `nan` is set.
#[inline(always)]
pub(crate) fn min32(a: f32, b: f32, nan: bool) -> f32 {
    if a.is_nan() || b.is_nan() {
        if nan || (a.is_nan() && b.is_nan()) {
            f32::from_bits(NAN32)
        } else if a.is_nan() {
            b
        } else {
            a
        }
    } else if a == b {
        f32::from_bits(a.to_bits() | b.to_bits())
    } else if a < b {
        a
    } else {
        b
    }
}

/// Maximum with +0 above -0.
#[inline(always)]
pub(crate) fn max32(a: f32, b: f32, nan: bool) -> f32 {
    if a.is_nan() || b.is_nan() {
        if nan || (a.is_nan() && b.is_nan()) {
            f32::from_bits(NAN32)
        } else if a.is_nan() {
            b
        } else {
            a
        }
    } else if a == b {
        f32::from_bits(a.to_bits() & b.to_bits())
    } else if a > b {
        a
    } else {
        b
    }
}

pub(crate) fn min64(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        f64::from_bits(a.to_bits() | b.to_bits())
    } else if a < b {
        a
    } else {
        b
    }
}

pub(crate) fn max64(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        f64::from_bits(a.to_bits() & b.to_bits())
    } else if a > b {
        a
    } else {
        b
    }
}

/// Sign-extends the low `bits` bits.
#[inline(always)]
pub(crate) fn sext(v: u64, bits: u32) -> i64 {
    let s = 64 - bits;
    ((v << s) as i64) >> s
}

/// Keeps the low `bits` bits.
#[inline(always)]
pub(crate) fn zext(v: u64, bits: u32) -> u64 {
    if bits >= 64 { v } else { v & ((1 << bits) - 1) }
}
