//! Operations on predicates, tests of values and addresses, and additions with a carry, which is a predicate.

use super::compare::{Cmp, half_of};
use crate::exec::PARAM_WINDOW;
use crate::exec::lanes::each;
use crate::exec::num::{flush_if, sext, zext};
use crate::ir::{Inst, flag};
use crate::ptx::Ty;
use crate::regs::Frame;

/// Logical operations on predicates, the values of `sub`.
pub(crate) mod logic {
    pub(crate) const MOV: u8 = 0;
    pub(crate) const AND: u8 = 1;
    pub(crate) const OR: u8 = 2;
    pub(crate) const XOR: u8 = 3;
    pub(crate) const NOT: u8 = 4;
}

/// `d = a op b`; `CLAMP` negates a, `NOT_C` negates b.
pub(crate) fn predicate(frame: &Frame, i: &Inst, mask: u32) {
    let a = frame.pred(i.a) ^ if i.has(flag::CLAMP) { !0 } else { 0 };
    let b = frame.pred(i.b) ^ if i.has(flag::NOT_C) { !0 } else { 0 };
    let value = match i.sub {
        logic::MOV => a,
        logic::AND => a & b,
        logic::OR => a | b,
        logic::XOR => a ^ b,
        _ => !a,
    };
    frame.set_pred(i.d, mask, value);
}

/// Selects by predicate `c`.
pub(crate) fn select(frame: &Frame, i: &Inst, mask: u32) {
    let p = frame.pred(i.c) ^ if i.has(flag::NOT_C) { !0 } else { 0 };
    if i.has(flag::WIDE_D) {
        select_as::<u64>(frame, i, mask, p)
    } else {
        select_as::<u32>(frame, i, mask, p)
    }
}

fn select_as<T: crate::regs::Lane>(frame: &Frame, i: &Inst, mask: u32, p: u32) {
    for first in [0usize, 8, 16, 24] {
        let (m, p) = (mask >> first, p >> first);
        let a: [T; 8] = frame.load8(i.a, first);
        let b: [T; 8] = frame.load8(i.b, first);
        let mut out: [T; 8] = frame.load8(i.d, first);
        for n in 0..8 {
            let value = if p & (1 << n) != 0 { a[n] } else { b[n] };
            out[n] = if m & (1 << n) != 0 { value } else { out[n] };
        }
        frame.store8(i.d, first, out);
    }
}

/// Converts a predicate to a register: all ones or zero, or 1.0 for float results (`set`).
pub(crate) fn set_from(frame: &Frame, i: &Inst, mask: u32) {
    let p = frame.pred(i.a);
    let one = match i.ty {
        Ty::F32 => 0x3f80_0000,
        Ty::F16 => 0x3c00,
        Ty::Bf16 => 0x3f80,
        Ty::U16 | Ty::S16 | Ty::B16 => 0xffff,
        _ => !0u32,
    };
    each(mask, |lane| frame.set(i.d, lane, if p >> lane & 1 != 0 { one } else { 0u32 }));
}

/// `set` on packed halves.
pub(crate) fn set_packed(frame: &Frame, i: &Inst, mask: u32) {
    let op = Cmp::ALL[usize::from(i.sub) % Cmp::ALL.len()];
    let ty = half_of(i.sty);
    let one: u32 = match i.ty {
        Ty::F16x2 => 0x3c00,
        Ty::Bf16x2 => 0x3f80,
        _ => 0xffff,
    };
    each(mask, |lane| {
        let (a, b): (u32, u32) = (frame.get(i.a, lane), frame.get(i.b, lane));
        let low = op.test(ty, false, u64::from(a & 0xffff), u64::from(b & 0xffff));
        let high = op.test(ty, false, u64::from(a >> 16), u64::from(b >> 16));
        frame.set(i.d, lane, if low { one } else { 0 } | if high { one << 16 } else { 0 });
    });
}

/// `slct`: selects a if c is not negative, else b.
pub(crate) fn slct(frame: &Frame, i: &Inst, mask: u32) {
    let wide = i.has(flag::WIDE_D);
    each(mask, |lane| {
        let take = if i.sty == Ty::F32 {
            flush_if(f32::from_bits(frame.get(i.c, lane)), i.has(flag::FTZ)) >= 0.0
        } else {
            frame.get::<i32>(i.c, lane) >= 0
        };
        let v = frame.bits(if take { i.a } else { i.b }, lane, wide);
        frame.set_bits(i.d, lane, wide, v);
    });
}

/// `testp`; `sub` selects the test.
pub(crate) fn testp(frame: &Frame, i: &Inst, mask: u32) {
    let mut out = 0u32;
    each(mask, |lane| {
        let class = if i.ty == Ty::F64 {
            f64::from_bits(frame.get(i.a, lane)).classify()
        } else {
            f32::from_bits(frame.get(i.a, lane)).classify()
        };
        use core::num::FpCategory::{Infinite, Nan, Normal, Subnormal, Zero};
        let hit = match i.sub {
            0 => matches!(class, Normal | Subnormal | Zero),
            1 => class == Infinite,
            2 => class != Nan,
            3 => class == Nan,
            4 => class == Normal,
            _ => matches!(class, Subnormal | Zero),
        };
        out |= u32::from(hit) << lane;
    });
    frame.set_pred(i.d, mask, out);
}

/// `isspacep`: `imm` and `e` are the bounds of the window. If `sub` is 1, tests that the address is outside of both windows.
pub(crate) fn isspacep(frame: &Frame, i: &Inst, mask: u32) {
    let mut out = 0u32;
    each(mask, |lane| {
        let a = frame.bits(i.a, lane, i.has(flag::WIDE_A));
        let shared = crate::api::SHARED_WINDOW.contains(&a);
        let local = crate::api::LOCAL_WINDOW.contains(&a);
        let param = local && a >= PARAM_WINDOW;
        let hit = match i.space {
            crate::ptx::Space::Shared => shared,
            crate::ptx::Space::Local => local && !param,
            crate::ptx::Space::Param => param,
            crate::ptx::Space::Const => false,
            _ => !shared && !local,
        };
        out |= u32::from(hit) << lane;
    });
    frame.set_pred(i.d, mask, out);
}

// ---- carries ----

/// `add.cc`, `addc`, `sub.cc`, `subc`: the carry of each lane is the predicate `e`. `sub` is 1 for subtraction.
pub(crate) fn carry_add(frame: &Frame, i: &Inst, mask: u32) {
    let wide = i.ty.bytes() == 8;
    let old = frame.pred(i.e);
    let mut new = 0u32;
    each(mask, |lane| {
        let (a, b) = (frame.bits(i.a, lane, wide), frame.bits(i.b, lane, wide));
        let input = u128::from(i.has(flag::CARRY_IN) && old >> lane & 1 != 0);
        let n = if wide { 64 } else { 32 };
        let full = if i.sub == 1 {
            u128::from(a).wrapping_sub(u128::from(b)).wrapping_sub(input)
        } else {
            u128::from(a) + u128::from(b) + input
        };
        new |= u32::from(full >> n & 1 != 0) << lane;
        frame.set_bits(i.d, lane, wide, zext(full as u64, n));
    });
    if i.has(flag::CARRY_OUT) {
        frame.set_pred(i.e, mask, new);
    }
}

/// `mad.cc` and `madc`.
pub(crate) fn carry_mad(frame: &Frame, i: &Inst, mask: u32) {
    let wide = i.ty.bytes() == 8;
    let n = if wide { 64 } else { 32 };
    let old = frame.pred(i.e);
    let mut new = 0u32;
    each(mask, |lane| {
        let (a, b) = (frame.bits(i.a, lane, wide), frame.bits(i.b, lane, wide));
        let c = frame.bits(i.c, lane, wide);
        let product = if i.ty.signed() {
            (i128::from(sext(a, n)) * i128::from(sext(b, n))) as u128
        } else {
            u128::from(a) * u128::from(b)
        };
        let part = zext(if i.has(flag::HI) { (product >> n) as u64 } else { product as u64 }, n);
        let full =
            u128::from(part) + u128::from(c) + u128::from(i.has(flag::CARRY_IN) && old >> lane & 1 != 0);
        new |= u32::from(full >> n & 1 != 0) << lane;
        frame.set_bits(i.d, lane, wide, zext(full as u64, n));
    });
    if i.has(flag::CARRY_OUT) {
        frame.set_pred(i.e, mask, new);
    }
}
