//! Conversions between types, for every pair of types.

use crate::exec::num::{self, canon, flush_if, sext, zext};
use crate::ir::{Inst, Round, flag};
use crate::ptx::Ty;

pub(super) fn convert(i: &Inst, a: u64) -> u64 {
    let (dst, src) = (i.ty, i.sty);
    let ftz = i.has(flag::FTZ);
    if !src.float() {
        let n = src.bytes() * 8;
        let v = if src.signed() { i128::from(sext(a, n)) } else { i128::from(zext(a, n)) };
        return match dst {
            Ty::F32 => {
                let r = num::int_to_f32(v, i.round);
                u64::from(if i.has(flag::SAT) { num::saturate(r) } else { r }.to_bits())
            }
            Ty::F64 => {
                let r = num::int_to_f64(v, i.round);
                if i.has(flag::SAT) { num::saturate64(r) } else { r }.to_bits()
            }
            Ty::F16 | Ty::Bf16 => {
                // 64-bit integers beyond f64 are beyond f16 too; for bf16 the sticky bit decides.
                let exact = v as f64;
                let odd = if exact as i128 != v && exact.to_bits() & 1 == 0 {
                    if (exact as i128) < v { exact.next_up() } else { exact.next_down() }
                } else {
                    exact
                };
                u64::from(num::pack(odd, if dst == Ty::F16 { num::F16 } else { num::BF16 }, i.round))
            }
            _ => {
                let n = dst.bytes() * 8;
                let v = if !i.has(flag::SAT) {
                    v
                } else if dst.signed() {
                    v.clamp(-(1i128 << (n - 1)), (1i128 << (n - 1)) - 1)
                } else {
                    v.clamp(0, (1i128 << n) - 1)
                };
                extend(dst, v as u64, i.has(flag::WIDE_D))
            }
        };
    }
    let x = match src {
        Ty::F64 => f64::from_bits(a),
        Ty::F16 => f64::from(num::from_f16(a as u32 & 0xffff)),
        Ty::Bf16 => f64::from(num::from_bf16(a as u32 & 0xffff)),
        _ => f64::from(flush_if(f32::from_bits(a as u32), ftz)),
    };
    match dst {
        Ty::F32 => {
            let r = if i.has(flag::INTEGRAL) {
                num::integral(x, i.round) as f32
            } else {
                num::narrow(x, i.round)
            };
            let r = if i.has(flag::RELU) && r <= 0.0 { 0.0 } else { r };
            let r = if i.has(flag::SAT) { num::saturate(r) } else { r };
            u64::from(canon(flush_if(r, ftz)).to_bits())
        }
        Ty::F64 => {
            let r = if i.has(flag::INTEGRAL) { num::integral(x, i.round) } else { x };
            if i.has(flag::SAT) { num::saturate64(r) } else { r }.to_bits()
        }
        Ty::F16 | Ty::Bf16 | Ty::Tf32 => {
            let x = if i.has(flag::INTEGRAL) { num::integral(x, i.round) } else { x };
            let x = if i.has(flag::SAT) { num::saturate64(x) } else { x };
            let x = if i.has(flag::RELU) && x <= 0.0 { 0.0 } else { x };
            let round = if i.has(flag::INTEGRAL) { Round::Rn } else { i.round };
            match dst {
                Ty::F16 => u64::from(num::pack(x, num::F16, round)),
                Ty::Bf16 => u64::from(num::pack(x, num::BF16, round)),
                _ => u64::from(num::pack(x, num::TF32, round)) << 13,
            }
        }
        _ => {
            let n = dst.bytes() * 8;
            let nan = if src == Ty::F64 || n == 64 { 1u64 << (n - 1) } else { 0 };
            extend(dst, num::to_int(x, i.round, dst.signed(), n, nan), i.has(flag::WIDE_D))
        }
    }
}

/// An integer result in a register that may be wider than its type.
fn extend(ty: Ty, v: u64, wide: bool) -> u64 {
    let n = ty.bytes() * 8;
    if ty.signed() && n < 64 {
        // A 16-bit register holds 16 bits; a wider one the sign extension.
        let v = sext(v, n) as u64;
        if wide { v } else { v & 0xffff_ffff }
    } else {
        zext(v, n)
    }
}
