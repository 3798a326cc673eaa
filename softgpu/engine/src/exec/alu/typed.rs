//! The hot lane-wise operations, each for the types of its operands.

use crate::exec::lanes::{Op1, Op2, Op3};
use crate::exec::num::{self, canon, flush, flush_if};
use crate::ir::{Inst, Lanewise, flag};

macro_rules! ops1 { ($($name:ident: $a:ty => $d:ty, $costly:expr, |$i:ident, $x:ident| $body:expr;)*) => {$(
    pub(super) struct $name;
    impl Op1 for $name {
        type A = $a; type D = $d;
        const COSTLY: bool = $costly;
        const OPERATION: Lanewise = Lanewise::$name;
        #[inline(always)]
        #[allow(unused_variables, reason = "most operations need no modifiers")]
        fn f($i: &Inst, $x: $a) -> $d { $body }
    }
)*}; }
macro_rules! ops2 { ($($name:ident: $a:ty, $b:ty => $d:ty, $costly:expr, |$i:ident, $x:ident, $y:ident| $body:expr;)*) => {$(
    pub(super) struct $name;
    impl Op2 for $name {
        type A = $a; type B = $b; type D = $d;
        const COSTLY: bool = $costly;
        const OPERATION: Lanewise = Lanewise::$name;
        #[inline(always)]
        #[allow(unused_variables, reason = "most operations need no modifiers")]
        fn f($i: &Inst, $x: $a, $y: $b) -> $d { $body }
    }
)*}; }
macro_rules! ops3 { ($($name:ident: $a:ty, $b:ty, $c:ty => $d:ty, $costly:expr, |$i:ident, $x:ident, $y:ident, $z:ident| $body:expr;)*) => {$(
    pub(super) struct $name;
    impl Op3 for $name {
        type A = $a; type B = $b; type C = $c; type D = $d;
        const COSTLY: bool = $costly;
        const OPERATION: Lanewise = Lanewise::$name;
        #[inline(always)]
        #[allow(unused_variables, reason = "most operations need no modifiers")]
        fn f($i: &Inst, $x: $a, $y: $b, $z: $c) -> $d { $body }
    }
)*}; }

ops1! {
    Mov32: u32 => u32, false, |i, a| a;
    Mov64: u64 => u64, false, |i, a| a;
    Not32: u32 => u32, false, |i, a| !a;
    Not64: u64 => u64, false, |i, a| !a;
    NegI32: i32 => i32, false, |i, a| a.wrapping_neg();
    NegI64: i64 => i64, false, |i, a| a.wrapping_neg();
    AbsI32: i32 => i32, false, |i, a| a.wrapping_abs();
    AbsI64: i64 => i64, false, |i, a| a.wrapping_abs();
    NegF32: u32 => u32, false, |i, a| a ^ 0x8000_0000;
    NegF64: u64 => u64, false, |i, a| a ^ (1 << 63);
    AbsF32: u32 => u32, false, |i, a| a & 0x7fff_ffff;
    AbsF64: u64 => u64, false, |i, a| a & !(1 << 63);
    SqrtF32: f32 => f32, false, |i, a| num::canon_bits(a.sqrt());
    SqrtF64: f64 => f64, false, |i, a| a.sqrt();
    RcpF32: f32 => f32, false, |i, a| canon(1.0 / a);
    RcpF64: f64 => f64, false, |i, a| 1.0 / a;
    Popc32: u32 => u32, false, |i, a| a.count_ones();
    Popc64: u64 => u32, true, |i, a| a.count_ones();
    Clz32: u32 => u32, false, |i, a| a.leading_zeros();
    Clz64: u64 => u32, true, |i, a| a.leading_zeros();
    Brev32: u32 => u32, false, |i, a| a.reverse_bits();
    Brev64: u64 => u64, false, |i, a| a.reverse_bits();
    Low32: u64 => u32, false, |i, a| a as u32;
    Zext32: u32 => u64, false, |i, a| u64::from(a);
    Sext32: i32 => i64, false, |i, a| i64::from(a);
    Mask16: u32 => u32, false, |i, a| a & 0xffff;
    Low16of64: u64 => u32, false, |i, a| (a & 0xffff) as u32;
    Zext16to64: u32 => u64, false, |i, a| u64::from(a & 0xffff);
    Sext16: u32 => i32, false, |i, a| i32::from(a as i16);
    Sext16to64: u32 => i64, false, |i, a| i64::from(a as i16);
    Mask8: u32 => u32, false, |i, a| a & 0xff;
    F32FromS32: i32 => f32, false, |i, a| a as f32;
    F32FromU32: u32 => f32, false, |i, a| a as f32;
    F64FromS32: i32 => f64, false, |i, a| f64::from(a);
    F64FromU32: u32 => f64, false, |i, a| f64::from(a);
    F64FromF32: f32 => f64, false, |i, a| f64::from(a);
    F32FromF64: f64 => f32, false, |i, a| canon(a as f32);
    F32FromF16: u32 => f32, false, |i, a| num::from_f16(a & 0xffff);
    F32FromBf16: u32 => f32, false, |i, a| num::from_bf16(a & 0xffff);
    F16FromF32: f32 => u32, false, |i, a| num::to_f16(a);
    S32FromF32Rz: f32 => i32, false, |i, a| a as i32;
    U32FromF32Rz: f32 => u32, false, |i, a| a as u32;
    S32FromF32Rn: f32 => i32, false, |i, a| a.round_ties_even() as i32;
    FloorF32: f32 => f32, false, |i, a| canon(a.floor());
    TruncF32: f32 => f32, false, |i, a| canon(a.trunc());
    RintF32: f32 => f32, false, |i, a| canon(a.round_ties_even());
    CeilF32: f32 => f32, false, |i, a| canon(a.ceil());
    SatF32: f32 => f32, false, |i, a| num::saturate(flush_if(a, i.has(flag::FTZ)));
    Ex2: f32 => f32, false, |i, a| num::ex2(a, i.has(flag::FTZ));
    Lg2: f32 => f32, false, |i, a| num::lg2(a, i.has(flag::FTZ));
    Sin: f32 => f32, true, |i, a| num::sin(a, i.has(flag::FTZ));
    Cos: f32 => f32, true, |i, a| num::cos(a, i.has(flag::FTZ));
    Tanh: f32 => f32, true, |i, a| num::tanh(a);
    RcpApprox: f32 => f32, false, |i, a| num::rcp(a, i.has(flag::FTZ));
    RsqrtApprox: f32 => f32, false, |i, a| num::rsqrt(a, i.has(flag::FTZ));
    SqrtApprox: f32 => f32, false, |i, a| num::canon_bits(flush_if(flush_if(a, i.has(flag::FTZ)).sqrt(), i.has(flag::FTZ)));
    RcpApprox64: f64 => f64, true, |i, a| approx64(a, |x| 1.0 / x);
    // Without `.ftz` this form has full precision.
    RsqrtApprox64: f64 => f64, true, |i, a| if i.has(flag::FTZ) { approx64(a, |x| 1.0 / x.sqrt()) } else { 1.0 / a.sqrt() };
    SlowUnary32: f32 => f32, true, |i, a| slow_unary32(i, a);
    SlowUnary64: f64 => f64, true, |i, a| slow_unary64(i, a);
}

/// `.approx.ftz.f64`: the low words of operand and result are treated as zero.
fn approx64(a: f64, f: impl Fn(f64) -> f64) -> f64 {
    let top = f64::from_bits(a.to_bits() & !0xffff_ffff);
    let top = if top.is_subnormal() { 0.0f64.copysign(top) } else { top };
    let r = f(top);
    let r = if r.is_subnormal() { 0.0f64.copysign(r) } else { r };
    if r.is_nan() { r } else { f64::from_bits(r.to_bits() & !0xffff_ffff) }
}

/// Operations of [`slow_unary32`], the values of `sub`.
pub(crate) mod unary {
    pub(crate) const SQRT: u8 = 0;
    pub(crate) const RCP: u8 = 1;
    pub(crate) const NEG: u8 = 2;
    pub(crate) const ABS: u8 = 3;
}

fn slow_unary32(i: &Inst, a: f32) -> f32 {
    let ftz = i.has(flag::FTZ);
    let a = flush_if(a, ftz);
    let r = match i.sub {
        unary::SQRT => num::sqrt32(a, i.round),
        unary::RCP => num::div32(1.0, a, i.round),
        unary::NEG => return -a,
        _ => return a.abs(),
    };
    canon(flush_if(r, ftz))
}

fn slow_unary64(i: &Inst, a: f64) -> f64 {
    if i.sub == unary::SQRT { num::sqrt64(a, i.round) } else { num::div64(1.0, a, i.round) }
}

ops2! {
    Add32: u32, u32 => u32, false, |i, a, b| a.wrapping_add(b);
    Add64: u64, u64 => u64, false, |i, a, b| a.wrapping_add(b);
    Sub32: u32, u32 => u32, false, |i, a, b| a.wrapping_sub(b);
    Sub64: u64, u64 => u64, false, |i, a, b| a.wrapping_sub(b);
    Mul32: u32, u32 => u32, false, |i, a, b| a.wrapping_mul(b);
    Mul64: u64, u64 => u64, false, |i, a, b| a.wrapping_mul(b);
    MulWideU32: u32, u32 => u64, false, |i, a, b| u64::from(a).wrapping_mul(u64::from(b));
    MulWideU16: u32, u32 => u32, false, |i, a, b| (a & 0xffff).wrapping_mul(b & 0xffff);
    MulWideS16: i32, i32 => i32, false, |i, a, b| (a << 16 >> 16).wrapping_mul(b << 16 >> 16);
    MulWideS32: i32, i32 => i64, false, |i, a, b| i64::from(a).wrapping_mul(i64::from(b));
    MulHiU32: u32, u32 => u32, false, |i, a, b| (u64::from(a).wrapping_mul(u64::from(b)) >> 32) as u32;
    MulHiS32: i32, i32 => i32, false, |i, a, b| (i64::from(a).wrapping_mul(i64::from(b)) >> 32) as i32;
    MulHiU64: u64, u64 => u64, true, |i, a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64;
    MulHiS64: i64, i64 => i64, true, |i, a, b| ((i128::from(a) * i128::from(b)) >> 64) as i64;
    And32: u32, u32 => u32, false, |i, a, b| a & b;
    And64: u64, u64 => u64, false, |i, a, b| a & b;
    Or32: u32, u32 => u32, false, |i, a, b| a | b;
    Or64: u64, u64 => u64, false, |i, a, b| a | b;
    Xor32: u32, u32 => u32, false, |i, a, b| a ^ b;
    Xor64: u64, u64 => u64, false, |i, a, b| a ^ b;
    Shl32: u32, u32 => u32, false, |i, a, b| if b < 32 { a << (b & 31) } else { 0 };
    ShrU32: u32, u32 => u32, false, |i, a, b| if b < 32 { a >> (b & 31) } else { 0 };
    ShrS32: i32, u32 => i32, false, |i, a, b| a >> b.min(31);
    Shl64: u64, u32 => u64, false, |i, a, b| if b < 64 { a << (b & 63) } else { 0 };
    ShrU64: u64, u32 => u64, false, |i, a, b| if b < 64 { a >> (b & 63) } else { 0 };
    ShrS64: i64, u32 => i64, false, |i, a, b| a >> b.min(63);
    MinU32: u32, u32 => u32, false, |i, a, b| a.min(b);
    MinS32: i32, i32 => i32, false, |i, a, b| a.min(b);
    MaxU32: u32, u32 => u32, false, |i, a, b| a.max(b);
    MaxS32: i32, i32 => i32, false, |i, a, b| a.max(b);
    MinU64: u64, u64 => u64, false, |i, a, b| a.min(b);
    MinS64: i64, i64 => i64, false, |i, a, b| a.min(b);
    MaxU64: u64, u64 => u64, false, |i, a, b| a.max(b);
    MaxS64: i64, i64 => i64, false, |i, a, b| a.max(b);
    DivU32: u32, u32 => u32, true, |i, a, b| a.checked_div(b).unwrap_or(!0);
    DivS32: i32, i32 => i32, true, |i, a, b| if b == 0 { -1 } else { a.wrapping_div(b) };
    RemU32: u32, u32 => u32, true, |i, a, b| a.checked_rem(b).unwrap_or(a);
    RemS32: i32, i32 => i32, true, |i, a, b| if b == 0 { a } else { a.wrapping_rem(b) };
    DivU64: u64, u64 => u64, true, |i, a, b| a.checked_div(b).unwrap_or(!0);
    DivS64: i64, i64 => i64, true, |i, a, b| if b == 0 { -1 } else { a.wrapping_div(b) };
    RemU64: u64, u64 => u64, true, |i, a, b| a.checked_rem(b).unwrap_or(a);
    RemS64: i64, i64 => i64, true, |i, a, b| if b == 0 { a } else { a.wrapping_rem(b) };
    AddF32: f32, f32 => f32, false, |i, a, b| canon(a + b);
    SubF32: f32, f32 => f32, false, |i, a, b| canon(a - b);
    MulF32: f32, f32 => f32, false, |i, a, b| canon(a * b);
    AddF32Ftz: f32, f32 => f32, false, |i, a, b| canon(flush(flush(a) + flush(b)));
    SubF32Ftz: f32, f32 => f32, false, |i, a, b| canon(flush(flush(a) - flush(b)));
    MulF32Ftz: f32, f32 => f32, false, |i, a, b| canon(flush(flush(a) * flush(b)));
    DivF32: f32, f32 => f32, false, |i, a, b| canon(a / b);
    DivApprox: f32, f32 => f32, false, |i, a, b| num::div_approx(a, b, i.has(flag::FTZ));
    AddF64: f64, f64 => f64, false, |i, a, b| a + b;
    SubF64: f64, f64 => f64, false, |i, a, b| a - b;
    MulF64: f64, f64 => f64, false, |i, a, b| a * b;
    DivF64: f64, f64 => f64, false, |i, a, b| a / b;
    MinF32: f32, f32 => f32, false, |i, a, b| num::min32(a, b, false);
    MaxF32: f32, f32 => f32, false, |i, a, b| num::max32(a, b, false);
    MinF64: f64, f64 => f64, false, |i, a, b| num::min64(a, b);
    MaxF64: f64, f64 => f64, false, |i, a, b| num::max64(a, b);
    SlowBinary32: f32, f32 => f32, true, |i, a, b| slow_binary32(i, a, b);
    SlowBinary64: f64, f64 => f64, true, |i, a, b| slow_binary64(i, a, b);
    CopySign32: u32, u32 => u32, false, |i, a, b| (a & 0x8000_0000) | (b & 0x7fff_ffff);
    CopySign64: u64, u64 => u64, false, |i, a, b| (a & (1 << 63)) | (b & !(1 << 63));
    Pack32: u32, u32 => u64, false, |i, a, b| u64::from(a) | (u64::from(b) << 32);
    Pack16: u32, u32 => u32, false, |i, a, b| (a & 0xffff) | (b << 16);
}

/// Operations of [`slow_binary32`], the values of `sub`.
pub(crate) mod binary {
    pub(crate) const ADD: u8 = 0;
    pub(crate) const SUB: u8 = 1;
    pub(crate) const MUL: u8 = 2;
    pub(crate) const DIV: u8 = 3;
    pub(crate) const MIN: u8 = 4;
    pub(crate) const MAX: u8 = 5;
    pub(crate) const FMA: u8 = 6;
}

fn slow_binary32(i: &Inst, a: f32, b: f32) -> f32 {
    let ftz = i.has(flag::FTZ);
    let (a, b) = (flush_if(a, ftz), flush_if(b, ftz));
    let r = match i.sub {
        binary::ADD => num::add32(a, b, i.round),
        binary::SUB => num::add32(a, -b, i.round),
        binary::MUL => num::mul32(a, b, i.round),
        binary::DIV => num::div32(a, b, i.round),
        _ => {
            let (x, y) = if i.has(flag::ABS) { (a.abs(), b.abs()) } else { (a, b) };
            let r = if i.sub == binary::MIN {
                num::min32(x, y, i.has(flag::NAN))
            } else {
                num::max32(x, y, i.has(flag::NAN))
            };
            if i.has(flag::XORSIGN) { r.copysign(f32::from_bits(a.to_bits() ^ b.to_bits())) } else { r }
        }
    };
    let r = canon(flush_if(r, ftz));
    if i.has(flag::SAT) { num::saturate(r) } else { r }
}

fn slow_binary64(i: &Inst, a: f64, b: f64) -> f64 {
    match i.sub {
        binary::ADD => num::add64(a, b, i.round),
        binary::SUB => num::add64(a, -b, i.round),
        binary::MUL => num::mul64(a, b, i.round),
        _ => num::div64(a, b, i.round),
    }
}

ops3! {
    MadLo32: u32, u32, u32 => u32, false, |i, a, b, c| a.wrapping_mul(b).wrapping_add(c);
    MadLo64: u64, u64, u64 => u64, false, |i, a, b, c| a.wrapping_mul(b).wrapping_add(c);
    MadWideU32: u32, u32, u64 => u64, false, |i, a, b, c| u64::from(a).wrapping_mul(u64::from(b)).wrapping_add(c);
    MadWideS32: i32, i32, i64 => i64, false, |i, a, b, c| i64::from(a).wrapping_mul(i64::from(b)).wrapping_add(c);
    FmaF32: f32, f32, f32 => f32, false, |i, a, b, c| canon(a.mul_add(b, c));
    FmaF32Ftz: f32, f32, f32 => f32, false, |i, a, b, c| canon(flush(flush(a).mul_add(flush(b), flush(c))));
    FmaF64: f64, f64, f64 => f64, false, |i, a, b, c| a.mul_add(b, c);
    SlowFma32: f32, f32, f32 => f32, true, |i, a, b, c| {
        let ftz = i.has(flag::FTZ);
        let r = num::fma32(flush_if(a, ftz), flush_if(b, ftz), flush_if(c, ftz), i.round);
        let r = canon(flush_if(r, ftz));
        if i.has(flag::SAT) { num::saturate(r) } else { r }
    };
    SlowFma64: f64, f64, f64 => f64, true, |i, a, b, c| num::fma64(a, b, c, i.round);
    Lop3: u32, u32, u32 => u32, false, |i, a, b, c| {
        // Shannon expansion of the truth table in imm: each minterm selects.
        let t = i.imm as u32;
        let m = |n: u32| 0u32.wrapping_sub((t >> n) & 1);
        (!a & !b & !c & m(0)) | (!a & !b & c & m(1)) | (!a & b & !c & m(2)) | (!a & b & c & m(3))
            | (a & !b & !c & m(4)) | (a & !b & c & m(5)) | (a & b & !c & m(6)) | (a & b & c & m(7))
    };
    ShfLWrap: u32, u32, u32 => u32, false, |i, a, b, c| {
        let v = (u64::from(b) << 32) | u64::from(a);
        ((v << (c & 31)) >> 32) as u32
    };
    ShfRWrap: u32, u32, u32 => u32, false, |i, a, b, c| {
        let v = (u64::from(b) << 32) | u64::from(a);
        (v >> (c & 31)) as u32
    };
    ShfLClamp: u32, u32, u32 => u32, false, |i, a, b, c| {
        let v = (u64::from(b) << 32) | u64::from(a);
        ((v << c.min(32)) >> 32) as u32
    };
    ShfRClamp: u32, u32, u32 => u32, false, |i, a, b, c| {
        let v = (u64::from(b) << 32) | u64::from(a);
        (v >> c.min(32)) as u32
    };
}
