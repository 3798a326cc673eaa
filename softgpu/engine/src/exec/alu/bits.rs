//! Operations on bits: those that are rare or have many types read the type from the instruction.

use super::convert::convert;
use super::typed::binary;
use crate::exec::lanes::{OpAny, each};
use crate::exec::num::{self, sext, zext};
use crate::ir::{Inst, flag};
use crate::ptx::Ty;
use crate::regs::Frame;

macro_rules! anys { ($($name:ident |$i:ident, $x:ident, $y:ident, $z:ident| $body:expr;)*) => {$(
    pub(super) struct $name;
    impl OpAny for $name {
        #[inline(always)]
        #[allow(unused_variables, reason = "not every operation has three operands")]
        fn f($i: &Inst, $x: u64, $y: u64, $z: u64) -> u64 { $body }
    }
)*}; }

fn bits_of(i: &Inst) -> u32 {
    i.ty.bytes() * 8
}

fn int(i: &Inst, v: u64) -> i128 {
    if i.ty.signed() { i128::from(sext(v, bits_of(i))) } else { i128::from(zext(v, bits_of(i))) }
}

fn saturate_int(i: &Inst, v: i128) -> u64 {
    let n = bits_of(i);
    let v = if !i.has(flag::SAT) {
        v
    } else if i.ty.signed() {
        v.clamp(-(1i128 << (n - 1)), (1i128 << (n - 1)) - 1)
    } else {
        v.clamp(0, (1i128 << n) - 1)
    };
    zext(v as u64, n)
}

/// Applies `f` to both halves of packed operands, or once to whole operands.
fn halves(i: &Inst, x: u64, y: u64, z: u64, f: impl Fn(u32, u32, u32) -> u32) -> u64 {
    let low = f(x as u32 & 0xffff, y as u32 & 0xffff, z as u32 & 0xffff) & 0xffff;
    if i.ty.bytes() == 4 {
        let high = f((x >> 16) as u32 & 0xffff, (y >> 16) as u32 & 0xffff, (z >> 16) as u32 & 0xffff);
        u64::from(low | (high << 16))
    } else {
        u64::from(low)
    }
}

fn is_bf16(i: &Inst) -> bool {
    matches!(i.ty, Ty::Bf16 | Ty::Bf16x2)
}

fn unpack(i: &Inst, h: u32) -> f32 {
    if is_bf16(i) { num::from_bf16(h) } else { flush16(i, num::from_f16(h)) }
}

/// Flushes f16 subnormals if the instruction requests it.
fn flush16(i: &Inst, x: f32) -> f32 {
    if i.has(flag::FTZ) && x.abs() < 6.103_515_6e-5 { 0.0f32.copysign(x) } else { x }
}

fn repack(i: &Inst, x: f32) -> u32 {
    let x = if i.has(flag::SAT) { num::saturate(x) } else { x };
    if is_bf16(i) { num::to_bf16(x) } else { num::to_f16(flush16(i, x)) }
}

fn repack_bits(i: &Inst, h: u32) -> u32 {
    if i.flags & (flag::SAT | flag::FTZ | flag::RELU) == 0 {
        return h;
    }
    let x = unpack(i, h);
    if i.has(flag::RELU) && !x.is_nan() && x <= 0.0 {
        return 0;
    }
    repack(i, x)
}

fn shift_amount(v: u64) -> u32 {
    (v as u32).min(64)
}

fn bfe(i: &Inst, a: u64, b: u64, c: u64) -> u64 {
    let n = bits_of(i);
    let (pos, len) = ((b & 0xff) as u32, (c & 0xff) as u32);
    let a = zext(a, n);
    let sign_bit = if !i.ty.signed() || len == 0 { 0 } else { a >> (pos + len - 1).min(n - 1) & 1 };
    let field = if pos >= 64 { 0 } else { zext(a >> pos, len) };
    // Bits beyond the top of the source are copies of the sign.
    let valid = if pos >= n { 0 } else { (n - pos).min(len) };
    let out = if sign_bit == 1 && valid < 64 { field | !((1u64 << valid) - 1) } else { field };
    zext(out, n)
}

fn bfi(i: &Inst, a: u64, b: u64, pos: u32, len: u32) -> u64 {
    let n = bits_of(i);
    if pos >= n || len == 0 {
        return zext(b, n);
    }
    let len = len.min(n - pos);
    let mask = if len >= 64 { !0 } else { ((1u64 << len) - 1) << pos };
    zext((b & !mask) | ((a << pos) & mask), n)
}

/// `bfi`, which reads a fourth operand from slot `e`.
pub(crate) fn bit_insert(frame: &Frame, i: &Inst, mask: u32) {
    let wide = i.has(flag::WIDE_D);
    each(mask, |lane| {
        let (pos, len) = (frame.get::<u32>(i.c, lane) & 0xff, frame.get::<u32>(i.e, lane) & 0xff);
        let out = bfi(i, frame.bits(i.a, lane, wide), frame.bits(i.b, lane, wide), pos, len);
        frame.set_bits(i.d, lane, wide, out);
    });
}

fn bfind(i: &Inst, a: u64) -> u64 {
    let n = bits_of(i);
    let v = zext(a, n);
    let v = if i.ty.signed() && v >> (n - 1) & 1 == 1 { zext(!v, n) } else { v };
    if v == 0 {
        return 0xffff_ffff;
    }
    let top = 63 - v.leading_zeros();
    u64::from(if i.has(flag::SHIFT_AMOUNT) { n - 1 - top } else { top })
}

/// Modes of `prmt`, in `sub`.
pub(crate) mod permute {
    pub(crate) const INDEX: u8 = 0;
    pub(crate) const F4E: u8 = 1;
    pub(crate) const B4E: u8 = 2;
    pub(crate) const RC8: u8 = 3;
    pub(crate) const ECL: u8 = 4;
    pub(crate) const ECR: u8 = 5;
    pub(crate) const RC16: u8 = 6;
}

fn prmt(i: &Inst, a: u64, b: u64, c: u64) -> u64 {
    let bytes = ((b << 32) | (a & 0xffff_ffff)).to_le_bytes();
    let n = (c & 3) as usize;
    let mut out = [0u8; 4];
    for (k, slot) in out.iter_mut().enumerate() {
        let index = match i.sub {
            permute::INDEX => {
                let selector = (c >> (4 * k)) as usize;
                let byte = bytes[selector & 7];
                *slot = if selector & 8 != 0 { 0u8.wrapping_sub(byte >> 7) } else { byte };
                continue;
            }
            permute::F4E => n + k,
            permute::B4E => (n + 8 - k) & 7,
            permute::RC8 => n,
            permute::ECL => k.max(n),
            permute::ECR => k.min(n),
            _ => (k & 1) | ((n & 1) << 1),
        };
        *slot = bytes[index & 7];
    }
    u64::from(u32::from_le_bytes(out))
}

fn dp4a(i: &Inst, a: u64, b: u64, c: u64) -> u64 {
    let (a, b) = ((a as u32).to_le_bytes(), (b as u32).to_le_bytes());
    let mut acc = c as u32;
    for k in 0..4 {
        let x = if i.ty.signed() { i32::from(a[k] as i8) } else { i32::from(a[k]) };
        let y = if i.has(flag::UNSIGNED_B) { i32::from(b[k]) } else { i32::from(b[k] as i8) };
        acc = acc.wrapping_add((x * y) as u32);
    }
    u64::from(acc)
}

fn dp2a(i: &Inst, a: u64, b: u64, c: u64) -> u64 {
    let b = (b as u32).to_le_bytes();
    let start = if i.has(flag::HI) { 2 } else { 0 };
    let mut acc = c as u32;
    for k in 0..2 {
        let half = (a >> (16 * k)) as u16;
        let x = if i.ty.signed() { i64::from(half as i16) } else { i64::from(half) };
        let byte = b[start + k];
        let y = if i.has(flag::UNSIGNED_B) { i64::from(byte) } else { i64::from(byte as i8) };
        acc = acc.wrapping_add((x * y) as u32);
    }
    u64::from(acc)
}

/// SIMD video instructions on bytes or halves: `sub` 0 add, 1 sub, 2 absolute difference, 3 min, 4 max, 5 average;
/// `imm` is the width of a lane. The accumulating form adds all lanes to c.
fn video(i: &Inst, a: u64, b: u64, c: u64) -> u64 {
    let w = i.imm as u32;
    let mut packed = 0u64;
    let mut sum = 0i64;
    for k in 0..32 / w {
        let (sa, sb) = (i.ty.signed(), i.sty.signed());
        let x = if sa { sext(a >> (k * w), w) } else { zext(a >> (k * w), w) as i64 };
        let y = if sb { sext(b >> (k * w), w) } else { zext(b >> (k * w), w) as i64 };
        let r = match i.sub {
            0 => x + y,
            1 => x - y,
            2 => (x - y).abs(),
            3 => x.min(y),
            4 => x.max(y),
            _ => (x + y + i64::from(x + y >= 0)) >> 1,
        };
        let r = if i.has(flag::SAT) {
            if i.has(flag::UNSIGNED_B) {
                r.clamp(0, (1 << w) - 1)
            } else {
                r.clamp(-(1 << (w - 1)), (1 << (w - 1)) - 1)
            }
        } else {
            r
        };
        sum += if i.has(flag::UNSIGNED_B) { zext(r as u64, w) as i64 } else { sext(r as u64, w) };
        packed |= zext(r as u64, w) << (k * w);
    }
    if i.has(flag::THIRD) { u64::from((sum as u32).wrapping_add(c as u32)) } else { packed & 0xffff_ffff }
}

fn bmsk(i: &Inst, a: u64, b: u64) -> u64 {
    let (pos, len) = if i.has(flag::CLAMP) {
        ((a as u32).min(32), (b as u32).min(32))
    } else {
        (a as u32 & 31, b as u32 & 31)
    };
    let ones = if len >= 32 { 0xffff_ffff } else { (1u64 << len) - 1 };
    (ones << pos) & 0xffff_ffff
}

fn fns(mask: u64, base: u64, offset: u64) -> u64 {
    let (mask, base, offset) = (mask as u32, base as u32, offset as i32);
    if base > 31 {
        return 0xffff_ffff;
    }
    let none = 0xffff_ffff;
    if offset == 0 {
        return if mask >> base & 1 != 0 { u64::from(base) } else { none };
    }
    let mut left = offset.unsigned_abs();
    let mut pos = base as i32;
    while (0..32).contains(&pos) {
        if mask >> pos & 1 != 0 {
            left -= 1;
            if left == 0 {
                return pos as u64;
            }
        }
        pos += offset.signum();
    }
    none
}

fn szext(i: &Inst, a: u64, b: u64) -> u64 {
    let n = if i.has(flag::CLAMP) { (b as u32).min(32) } else { b as u32 & 31 };
    if n == 0 {
        return 0;
    }
    if n >= 32 {
        return a & 0xffff_ffff;
    }
    if i.ty.signed() { sext(a, n) as u64 & 0xffff_ffff } else { zext(a, n) }
}

anys! {
    AnyAdd |i, a, b, c| saturate_int(i, int(i, a) + int(i, b));
    AnySub |i, a, b, c| saturate_int(i, int(i, a) - int(i, b));
    AnyAddX2 |i, a, b, c| halves(i, a, b, c, |x, y, _| x.wrapping_add(y));
    AnyMul |i, a, b, c| {
        let p = int(i, a).wrapping_mul(int(i, b));
        if i.has(flag::WIDE) { zext(p as u64, 2 * bits_of(i)) } else if i.has(flag::HI) { zext((p >> bits_of(i)) as u64, bits_of(i)) } else { zext(p as u64, bits_of(i)) }
    };
    AnyMad |i, a, b, c| {
        let p = int(i, a).wrapping_mul(int(i, b));
        if i.has(flag::WIDE) {
            zext((p as u64).wrapping_add(c), 2 * bits_of(i))
        } else {
            let part = if i.has(flag::HI) { p >> bits_of(i) } else { i128::from(sext(p as u64, bits_of(i))) };
            saturate_int(i, part + int(i, c))
        }
    };
    AnyMul24 |i, a, b, c| {
        let (x, y) = if i.ty.signed() { (sext(a, 24), sext(b, 24)) } else { (zext(a, 24) as i64, zext(b, 24) as i64) };
        let p = x * y;
        let part = (if i.has(flag::HI) { p >> 16 } else { p }) as u32;
        if !i.has(flag::THIRD) {
            u64::from(part)
        } else if i.has(flag::SAT) {
            (i64::from(part as i32) + i64::from(c as i32)).clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as u64 & 0xffff_ffff
        } else {
            u64::from(part.wrapping_add(c as u32))
        }
    };
    AnyDiv |i, a, b, c| {
        let (x, y) = (int(i, a), int(i, b));
        zext(if y == 0 { !0 } else { x.wrapping_div(y) as u64 }, bits_of(i))
    };
    AnyRem |i, a, b, c| {
        let (x, y) = (int(i, a), int(i, b));
        zext(if y == 0 { x as u64 } else { x.wrapping_rem(y) as u64 }, bits_of(i))
    };
    AnyMin |i, a, b, c| zext(int(i, a).min(int(i, b)) as u64, bits_of(i));
    AnyMax |i, a, b, c| zext(int(i, a).max(int(i, b)) as u64, bits_of(i));
    AnyMinX2 |i, a, b, c| halves(i, a, b, c, |x, y, _| if i.ty == Ty::S16x2 { u32::from((x as i16).min(y as i16) as u16) } else { x.min(y) });
    AnyMaxX2 |i, a, b, c| halves(i, a, b, c, |x, y, _| if i.ty == Ty::S16x2 { u32::from((x as i16).max(y as i16) as u16) } else { x.max(y) });
    AnyNeg |i, a, b, c| zext(int(i, a).wrapping_neg() as u64, bits_of(i));
    AnyAbs |i, a, b, c| zext(int(i, a).wrapping_abs() as u64, bits_of(i));
    AnyNot |i, a, b, c| zext(!a, bits_of(i));
    AnyCnot |i, a, b, c| u64::from(zext(a, bits_of(i)) == 0);
    AnyAnd |i, a, b, c| zext(a & b, bits_of(i));
    AnyOr |i, a, b, c| zext(a | b, bits_of(i));
    AnyXor |i, a, b, c| zext(a ^ b, bits_of(i));
    AnyShl |i, a, b, c| zext(a.checked_shl(shift_amount(b)).unwrap_or(0), bits_of(i));
    AnyShr |i, a, b, c| {
        let n = shift_amount(b);
        if i.ty.signed() { zext((int(i, a) >> n.min(63)) as u64, bits_of(i)) } else { zext(a, bits_of(i)).checked_shr(n).unwrap_or(0) }
    };
    AnyBfe |i, a, b, c| bfe(i, a, b, c);
    AnyBfind |i, a, b, c| bfind(i, a);
    AnyPrmt |i, a, b, c| prmt(i, a, b, c);
    AnySad |i, a, b, c| zext((int(i, a) - int(i, b)).unsigned_abs() as u64, bits_of(i)).wrapping_add(c) & if bits_of(i) >= 64 { !0 } else { (1 << bits_of(i)) - 1 };
    AnyDp4a |i, a, b, c| dp4a(i, a, b, c);
    AnyDp2a |i, a, b, c| dp2a(i, a, b, c);
    AnyVideo |i, a, b, c| video(i, a, b, c);
    AnyBmsk |i, a, b, c| bmsk(i, a, b);
    AnyFns |i, a, b, c| fns(a, b, c);
    AnySzext |i, a, b, c| szext(i, a, b);
    AnyHalf |i, a, b, c| halves(i, a, b, c, |x, y, z| {
        if i.sub == binary::FMA {
            let f = if is_bf16(i) { num::BF16 } else { num::F16 };
            return repack_bits(i, num::fma16(unpack(i, x), unpack(i, y), unpack(i, z), f));
        }
        let (x, y) = (unpack(i, x), unpack(i, y));
        match i.sub {
            binary::ADD => repack(i, x + y),
            binary::SUB => repack(i, x - y),
            binary::MUL => repack(i, x * y),
            _ => {
                let (p, q) = if i.has(flag::ABS) { (x.abs(), y.abs()) } else { (x, y) };
                let r = if i.sub == binary::MIN { num::min32(p, q, i.has(flag::NAN)) } else { num::max32(p, q, i.has(flag::NAN)) };
                let r = if i.has(flag::XORSIGN) { r.copysign(f32::from_bits(x.to_bits() ^ y.to_bits())) } else { r };
                repack(i, r)
            }
        }
    });
    AnyHalfNeg |i, a, b, c| halves(i, a, b, c, |x, _, _| if i.has(flag::FTZ) { repack(i, -unpack(i, x)) } else { x ^ 0x8000 });
    AnyHalfAbs |i, a, b, c| halves(i, a, b, c, |x, _, _| if i.has(flag::FTZ) { repack(i, unpack(i, x).abs()) } else { x & 0x7fff });
    AnyHalfEx2 |i, a, b, c| halves(i, a, b, c, |x, _, _| repack(i, num::ex2(unpack(i, x), false)));
    AnyHalfTanh |i, a, b, c| halves(i, a, b, c, |x, _, _| repack(i, num::tanh(unpack(i, x))));
    AnyCvt |i, a, b, c| convert(i, a);
    AnyCvtPack |i, a, b, c| {
        // The first source goes to the high half.
        let one = |v: u64| {
            let x = f32::from_bits(v as u32);
            let x = if i.has(flag::RELU) && !x.is_nan() && x <= 0.0 { 0.0 } else { x };
            num::pack(f64::from(x), if is_bf16(i) { num::BF16 } else { num::F16 }, i.round)
        };
        u64::from(one(a) << 16 | one(b))
    };
    AnyUnpackLo |i, a, b, c| zext(a, bits_of(i));
    AnyUnpackHi |i, a, b, c| zext(a >> (i.imm as u32 & 63), bits_of(i));
    AnyInsert |i, a, b, c| {
        // c is the word so far, imm the position.
        let p = i.imm as u32 & 63;
        c | (zext(a, bits_of(i)) << p)
    };
}
