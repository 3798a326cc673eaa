//! Floating-point formats of 8, 6 and 4 bits, two in a word.

use super::super::lanes::OpAny;
use crate::exec::num;
use crate::ir::{Inst, flag};
use crate::ptx::Ty;

/// A format of at most 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Small {
    /// Bits of one value.
    bits: u32,
    mantissa: u32,
    /// Exponent of the smallest normal number.
    least: i32,
    /// The greatest finite number.
    greatest: u32,
    /// A number that is none, if there is one.
    nan: Option<u32>,
    /// Infinity, if there is one.
    infinity: Option<u32>,
}

/// The formats, by the names of their pairs.
const FORMATS: [(&str, Small); 5] = [
    ("e4m3x2", Small { bits: 8, mantissa: 3, least: -6, greatest: 0x7e, nan: Some(0x7f), infinity: None }),
    (
        "e5m2x2",
        Small { bits: 8, mantissa: 2, least: -14, greatest: 0x7b, nan: Some(0x7f), infinity: Some(0x7c) },
    ),
    ("e2m3x2", Small { bits: 6, mantissa: 3, least: 0, greatest: 0x1f, nan: None, infinity: None }),
    ("e3m2x2", Small { bits: 6, mantissa: 2, least: -2, greatest: 0x1f, nan: None, infinity: None }),
    ("e2m1x2", Small { bits: 4, mantissa: 1, least: 0, greatest: 0x7, nan: None, infinity: None }),
];

impl Small {
    /// The number of a format by the name of its pair.
    pub(crate) fn find(pair: &str) -> Option<u8> {
        let at = FORMATS.iter().position(|(name, _)| *name == pair)?;
        u8::try_from(at).ok()
    }

    /// The format of 8 bits that a type names.
    pub(crate) fn of(ty: Ty) -> Small {
        FORMATS[usize::from(ty == Ty::E5m2)].1
    }

    /// The value of a code, which f32 has exactly.
    pub(crate) fn value(self, code: u32) -> f32 {
        self.decode(code) as f32
    }

    fn at(number: i64) -> Small {
        FORMATS[usize::try_from(number).unwrap_or(0) % FORMATS.len()].1
    }

    /// Bits from one value of a pair to the other.
    const fn step(self) -> u32 {
        if self.bits == 4 { 4 } else { 8 }
    }

    /// Bits of a register with a pair.
    pub(crate) fn pair_type(number: u8) -> Ty {
        if Small::at(i64::from(number)).bits == 4 { Ty::B8 } else { Ty::B16 }
    }

    /// Rounds to nearest; beyond the greatest number is the greatest.
    fn encode(self, x: f64) -> u32 {
        if x.is_nan() {
            return self.nan.unwrap_or(self.greatest);
        }
        let sign = u32::from(x.is_sign_negative()) << (self.bits - 1);
        let a = x.abs();
        if a.is_infinite() {
            return sign | self.greatest;
        }
        // The exponent of zero and of subnormal f64 is below that of every format.
        let exponent = ((a.to_bits() >> 52) as i32 - 1023).max(self.least);
        // A power of two scales exactly.
        let mantissa = i32::try_from(self.mantissa).unwrap_or(0);
        let scaled = (a * 2f64.powi(mantissa - exponent)).round_ties_even();
        // A carry runs into the exponent. The scaled value is at most 16 for a format's own numbers.
        let scaled = (scaled as u64).min(1 << 32);
        let code = (u64::try_from(exponent - self.least).unwrap_or(0) << self.mantissa) + scaled;
        sign | u32::try_from(code).unwrap_or(u32::MAX).min(self.greatest)
    }

    /// The exact value.
    fn decode(self, code: u32) -> f64 {
        let sign = if code >> (self.bits - 1) & 1 == 1 { -1.0 } else { 1.0 };
        let magnitude = code & ((1 << (self.bits - 1)) - 1);
        if magnitude > self.greatest {
            return if Some(magnitude) == self.infinity { sign * f64::INFINITY } else { f64::NAN };
        }
        let exponent = magnitude >> self.mantissa;
        let fraction = f64::from(magnitude & ((1 << self.mantissa) - 1));
        let mantissa = i32::try_from(self.mantissa).unwrap_or(0);
        let (hidden, exponent) = match i32::try_from(exponent).unwrap_or(0) {
            0 => (0.0, self.least),
            e => (f64::from(1u32 << self.mantissa), e - 1 + self.least),
        };
        sign * (hidden + fraction) * 2f64.powi(exponent - mantissa)
    }
}

fn clamped(i: &Inst, x: f64) -> f64 {
    if i.has(flag::RELU) && x <= 0.0 { 0.0 } else { x }
}

/// Converts two f32, or a pair of f16, to a pair of a small format. The first source is the high half.
pub(super) struct AnyToSmall;

impl OpAny for AnyToSmall {
    fn f(i: &Inst, a: u64, b: u64, _: u64) -> u64 {
        let format = Small::at(i.imm);
        let (high, low) = if i.sty == Ty::F32 {
            let wide = |bits: u64| f64::from(f32::from_bits(bits as u32));
            (wide(a), wide(b))
        } else {
            let half = |bits: u64| f64::from(num::from_f16(bits as u32 & 0xffff));
            (half(a >> 16), half(a))
        };
        let code = |x: f64| u64::from(format.encode(clamped(i, x)));
        code(high) << format.step() | code(low)
    }
}

/// Converts a pair of a small format to a pair of f16, which has each of its values.
pub(super) struct AnyFromSmall;

impl OpAny for AnyFromSmall {
    fn f(i: &Inst, a: u64, _: u64, _: u64) -> u64 {
        let format = Small::at(i.imm);
        let half = |code: u64| {
            let x = clamped(i, format.decode(code as u32));
            u64::from(num::pack(x, num::F16, i.round))
        };
        half(a >> format.step()) << 16 | half(a & ((1 << format.step()) - 1))
    }
}
