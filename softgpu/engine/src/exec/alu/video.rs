//! Scalar video instructions, and the packed conversion of integers.

use super::compare::Cmp;
use crate::exec::lanes::OpAny;
use crate::exec::num::sext;
use crate::ir::{Inst, flag};

/// The operation of a scalar video instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VideoOp {
    Add,
    Sub,
    AbsDiff,
    Min,
    Max,
    ShiftLeft,
    ShiftRight,
    Mad,
    Set(Cmp),
}

/// A part of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    Byte(u8),
    Half(u8),
}

impl Part {
    pub(crate) fn parse(word: &str) -> Option<Part> {
        Some(match word {
            "b0" => Part::Byte(0),
            "b1" => Part::Byte(1),
            "b2" => Part::Byte(2),
            "b3" => Part::Byte(3),
            "h0" => Part::Half(0),
            "h1" => Part::Half(1),
            _ => return None,
        })
    }

    /// Number of bits, and the position of the first.
    fn place(self) -> (u32, u32) {
        match self {
            Part::Whole => (32, 0),
            Part::Byte(n) => (8, u32::from(n) * 8),
            Part::Half(n) => (16, u32::from(n) * 16),
        }
    }

    fn select(self, bits: u64, signed: bool) -> i64 {
        let (count, at) = self.place();
        let v = bits >> at & ((1 << count) - 1);
        if signed { sext(v, count) } else { v.cast_signed() }
    }
}

/// The operation that combines the result with the third operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Second {
    None,
    Add,
    Min,
    Max,
}

/// Everything beside the types: an instruction keeps it in its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Video {
    pub(crate) op: VideoOp,
    pub(crate) parts: [Part; 3],
    pub(crate) second: Second,
    /// Shift of a product.
    pub(crate) scale: u8,
    /// Adds one to a product.
    pub(crate) plus_one: bool,
    /// Shift amounts wrap.
    pub(crate) wrap: bool,
}

const PARTS: [Part; 7] =
    [Part::Whole, Part::Byte(0), Part::Byte(1), Part::Byte(2), Part::Byte(3), Part::Half(0), Part::Half(1)];
const SECONDS: [Second; 4] = [Second::None, Second::Add, Second::Min, Second::Max];
const OPS: [VideoOp; 8] = [
    VideoOp::Add,
    VideoOp::Sub,
    VideoOp::AbsDiff,
    VideoOp::Min,
    VideoOp::Max,
    VideoOp::ShiftLeft,
    VideoOp::ShiftRight,
    VideoOp::Mad,
];

fn index<T: PartialEq>(all: &[T], one: &T) -> i64 {
    all.iter().position(|x| x == one).and_then(|n| i64::try_from(n).ok()).unwrap_or(0)
}

impl Video {
    pub(crate) fn encode(self) -> i64 {
        let op = match self.op {
            VideoOp::Set(cmp) => 0x80 | index(&Cmp::ALL, &cmp),
            op => index(&OPS, &op),
        };
        let [a, b, d] = self.parts.map(|part| index(&PARTS, &part));
        let flags = i64::from(self.plus_one) | i64::from(self.wrap) << 1;
        op | a << 8
            | b << 12
            | d << 16
            | index(&SECONDS, &self.second) << 20
            | flags << 24
            | i64::from(self.scale) << 32
    }

    fn decode(v: i64) -> Video {
        let field = |at: u32, bits: u32| (v >> at & ((1 << bits) - 1)) as usize;
        let op = match field(0, 8) {
            set if set & 0x80 != 0 => VideoOp::Set(Cmp::ALL[(set & 0x7f) % Cmp::ALL.len()]),
            plain => OPS[plain % OPS.len()],
        };
        Video {
            op,
            parts: [8, 12, 16].map(|at| PARTS[field(at, 4) % PARTS.len()]),
            second: SECONDS[field(20, 4) % SECONDS.len()],
            scale: field(32, 8) as u8,
            plus_one: field(24, 1) != 0,
            wrap: field(25, 1) != 0,
        }
    }
}

fn limits(signed: bool, bits: u32) -> (i64, i64) {
    if signed { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

pub(crate) struct AnyVideo;

impl OpAny for AnyVideo {
    fn f(i: &Inst, a: u64, b: u64, c: u64) -> u64 {
        let video = Video::decode(i.imm);
        let [pa, pb, pd] = video.parts;
        let (signed, signed_a, signed_b) = (i.ty.signed(), i.sty.signed(), !i.has(flag::UNSIGNED_B));
        let (x, y) = (pa.select(a, signed_a), pb.select(b, signed_b));
        let third = Part::Whole.select(c, signed);
        let amount = if video.wrap { y & 31 } else { y.clamp(0, 32) };
        let (bits, at) = pd.place();
        if video.op == VideoOp::Mad {
            // Both products and sums fit 128 bits.
            let signed = signed_a || signed_b;
            let sum = i128::from(x) * i128::from(y)
                + i128::from(Part::Whole.select(c, signed))
                + i128::from(video.plus_one);
            let sum = sum >> video.scale;
            let (low, high) = limits(signed, 32);
            let sum = if i.has(flag::SAT) { sum.clamp(low.into(), high.into()) } else { sum };
            return (sum & 0xffff_ffff) as u64;
        }
        let mut value = match video.op {
            VideoOp::Add => x + y,
            VideoOp::Sub => x - y,
            VideoOp::AbsDiff => (x - y).abs(),
            VideoOp::Min => x.min(y),
            VideoOp::Max => x.max(y),
            VideoOp::ShiftLeft => x << amount,
            VideoOp::ShiftRight => x >> amount,
            VideoOp::Mad => 0,
            VideoOp::Set(cmp) => i64::from(match cmp {
                Cmp::Eq => x == y,
                Cmp::Ne => x != y,
                Cmp::Lt => x < y,
                Cmp::Le => x <= y,
                Cmp::Gt => x > y,
                _ => x >= y,
            }),
        };
        if i.has(flag::SAT) {
            let (low, high) = limits(signed, bits);
            value = value.clamp(low, high);
        }
        let word = |v: i64| (v & 0xffff_ffff) as u64;
        if pd != Part::Whole {
            let mask = ((1u64 << bits) - 1) << at;
            return (word(value) << at & mask) | (c & !mask);
        }
        // The result has 32 bits before it is combined.
        let value = Part::Whole.select(word(value), signed);
        word(match video.second {
            Second::None => value,
            Second::Add => value + third,
            Second::Min => value.min(third),
            Second::Max => value.max(third),
        })
    }
}

/// `cvt.pack`: two integers saturate to `imm` bits, and go before the low bits of a third.
pub(crate) struct AnyPack;

impl OpAny for AnyPack {
    fn f(i: &Inst, a: u64, b: u64, c: u64) -> u64 {
        let bits = u32::try_from(i.imm).unwrap_or(16).clamp(1, 16);
        let (low, high) = limits(!i.has(flag::UNSIGNED_B), bits);
        let part = |v: u64| {
            (Part::Whole.select(v, i.sty.signed()).clamp(low, high) & ((1 << bits) - 1)).cast_unsigned()
        };
        let rest = if bits == 16 { 0 } else { c << (2 * bits) };
        (rest | part(a) << bits | part(b)) & 0xffff_ffff
    }
}
