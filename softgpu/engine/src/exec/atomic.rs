//! The results of atomic operations.

#![expect(clippy::cast_possible_truncation, reason = "operands have the width of the type")]

use super::num;
use crate::ptx::Ty;

/// The operation of `atom` and `red`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Inc,
    Dec,
    Exch,
    Cas,
}

impl AtomicOp {
    pub(crate) const ALL: [AtomicOp; 10] = [
        AtomicOp::Add,
        AtomicOp::Min,
        AtomicOp::Max,
        AtomicOp::And,
        AtomicOp::Or,
        AtomicOp::Xor,
        AtomicOp::Inc,
        AtomicOp::Dec,
        AtomicOp::Exch,
        AtomicOp::Cas,
    ];

    pub(crate) fn parse(name: &str) -> Option<AtomicOp> {
        Some(match name {
            "add" => AtomicOp::Add,
            "min" => AtomicOp::Min,
            "max" => AtomicOp::Max,
            "and" => AtomicOp::And,
            "or" => AtomicOp::Or,
            "xor" => AtomicOp::Xor,
            "inc" => AtomicOp::Inc,
            "dec" => AtomicOp::Dec,
            "exch" => AtomicOp::Exch,
            "cas" => AtomicOp::Cas,
            _ => return None,
        })
    }

    /// True if the operation exists for type `ty`.
    pub(crate) fn takes(self, ty: Ty) -> bool {
        let half = matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2);
        match self {
            AtomicOp::Add => half || matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::F32 | Ty::F64),
            AtomicOp::Min | AtomicOp::Max => matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64) || half,
            AtomicOp::Inc | AtomicOp::Dec => ty == Ty::U32,
            AtomicOp::And | AtomicOp::Or | AtomicOp::Xor | AtomicOp::Exch => matches!(ty, Ty::B32 | Ty::B64),
            AtomicOp::Cas => matches!(ty, Ty::B16 | Ty::B32 | Ty::B64),
        }
    }

    /// Computes the new value.
    pub(crate) fn apply(self, ty: Ty, old: u64, b: u64, c: u64) -> u64 {
        match self {
            AtomicOp::Exch => b,
            AtomicOp::Cas => {
                if old == b {
                    c
                } else {
                    old
                }
            }
            AtomicOp::And => old & b,
            AtomicOp::Or => old | b,
            AtomicOp::Xor => old ^ b,
            AtomicOp::Inc => {
                if old as u32 >= b as u32 {
                    0
                } else {
                    old + 1
                }
            }
            AtomicOp::Dec => {
                if old as u32 == 0 || old as u32 > b as u32 {
                    b
                } else {
                    old - 1
                }
            }
            AtomicOp::Add => match ty {
                Ty::F32 => {
                    u64::from(num::canon(f32::from_bits(old as u32) + f32::from_bits(b as u32)).to_bits())
                }
                Ty::F64 => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
                Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2 => half(ty, old, b, |x, y| x + y),
                _ if ty.bytes() == 4 => u64::from((old as u32).wrapping_add(b as u32)),
                _ => old.wrapping_add(b),
            },
            AtomicOp::Min | AtomicOp::Max => {
                let min = self == AtomicOp::Min;
                if ty.float() {
                    return half(ty, old, b, |x, y| {
                        if min { num::min32(x, y, false) } else { num::max32(x, y, false) }
                    });
                }
                let n = ty.bytes() * 8;
                let less = if ty.signed() { num::sext(b, n) < num::sext(old, n) } else { b < old };
                if less == min { b } else { old }
            }
        }
    }
}

fn half(ty: Ty, old: u64, b: u64, f: impl Fn(f32, f32) -> f32) -> u64 {
    let one = |x: u64, y: u64| {
        let (x, y) = ((x & 0xffff) as u32, (y & 0xffff) as u32);
        u64::from(if matches!(ty, Ty::Bf16 | Ty::Bf16x2) {
            num::to_bf16(f(num::from_bf16(x), num::from_bf16(y)))
        } else {
            num::to_f16(f(num::from_f16(x), num::from_f16(y)))
        })
    };
    let low = one(old, b);
    if ty.bytes() == 4 { low | one(old >> 16, b >> 16) << 16 } else { low }
}
