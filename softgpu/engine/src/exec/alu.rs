//! The lane-wise operations: hot ones typed, the others on bits with the type read from the instruction.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "integer instructions reinterpret and truncate by definition"
)]
#![expect(
    clippy::neg_cmp_op_on_partial_ord,
    clippy::double_comparisons,
    reason = "unordered comparisons are negations of ordered ones"
)]

use super::dispatch::{any, cmp, op1, op2, op3, plain};
use super::lanes::{Op1, Op2, Op3, OpAny, OpCmp, each};
use super::num::{self, canon, flush, flush_if, sext, zext};
use crate::ir::{Handler, Inst, Round, flag};
use crate::ptx::Ty;
use crate::regs::Frame;

macro_rules! ops1 { ($($name:ident: $a:ty => $d:ty, $costly:expr, |$i:ident, $x:ident| $body:expr;)*) => {$(
    struct $name;
    impl Op1 for $name {
        type A = $a; type D = $d;
        const COSTLY: bool = $costly;
        #[inline(always)]
        #[allow(unused_variables, reason = "most operations need no modifiers")]
        fn f($i: &Inst, $x: $a) -> $d { $body }
    }
)*}; }
macro_rules! ops2 { ($($name:ident: $a:ty, $b:ty => $d:ty, $costly:expr, |$i:ident, $x:ident, $y:ident| $body:expr;)*) => {$(
    struct $name;
    impl Op2 for $name {
        type A = $a; type B = $b; type D = $d;
        const COSTLY: bool = $costly;
        #[inline(always)]
        #[allow(unused_variables, reason = "most operations need no modifiers")]
        fn f($i: &Inst, $x: $a, $y: $b) -> $d { $body }
    }
)*}; }
macro_rules! ops3 { ($($name:ident: $a:ty, $b:ty, $c:ty => $d:ty, $costly:expr, |$i:ident, $x:ident, $y:ident, $z:ident| $body:expr;)*) => {$(
    struct $name;
    impl Op3 for $name {
        type A = $a; type B = $b; type C = $c; type D = $d;
        const COSTLY: bool = $costly;
        #[inline(always)]
        #[allow(unused_variables, reason = "most operations need no modifiers")]
        fn f($i: &Inst, $x: $a, $y: $b, $z: $c) -> $d { $body }
    }
)*}; }
macro_rules! cmps { ($($name:ident: $a:ty, |$x:ident, $y:ident| $body:expr;)*) => {$(
    struct $name;
    impl OpCmp for $name {
        type A = $a;
        #[inline(always)]
        fn f(_: &Inst, $x: $a, $y: $a) -> bool { $body }
    }
)*}; }
macro_rules! anys { ($($name:ident |$i:ident, $x:ident, $y:ident, $z:ident| $body:expr;)*) => {$(
    struct $name;
    impl OpAny for $name {
        #[inline(always)]
        #[allow(unused_variables, reason = "not every operation has three operands")]
        fn f($i: &Inst, $x: u64, $y: u64, $z: u64) -> u64 { $body }
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
    Ex2: f32 => f32, true, |i, a| num::ex2(a, i.has(flag::FTZ));
    Lg2: f32 => f32, true, |i, a| num::lg2(a, i.has(flag::FTZ));
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

cmps! {
    EqI32: u32, |a, b| a == b; NeI32: u32, |a, b| a != b;
    LtU32: u32, |a, b| a < b; LeU32: u32, |a, b| a <= b; GtU32: u32, |a, b| a > b; GeU32: u32, |a, b| a >= b;
    LtS32: i32, |a, b| a < b; LeS32: i32, |a, b| a <= b; GtS32: i32, |a, b| a > b; GeS32: i32, |a, b| a >= b;
    EqI64: u64, |a, b| a == b; NeI64: u64, |a, b| a != b;
    LtU64: u64, |a, b| a < b; LeU64: u64, |a, b| a <= b; GtU64: u64, |a, b| a > b; GeU64: u64, |a, b| a >= b;
    LtS64: i64, |a, b| a < b; LeS64: i64, |a, b| a <= b; GtS64: i64, |a, b| a > b; GeS64: i64, |a, b| a >= b;
    EqF32: f32, |a, b| a == b; NeF32: f32, |a, b| a < b || a > b; LtF32: f32, |a, b| a < b; LeF32: f32, |a, b| a <= b;
    GtF32: f32, |a, b| a > b; GeF32: f32, |a, b| a >= b;
    EquF32: f32, |a, b| !(a < b || a > b); NeuF32: f32, |a, b| a != b;
    LtuF32: f32, |a, b| !(a >= b); LeuF32: f32, |a, b| !(a > b); GtuF32: f32, |a, b| !(a <= b); GeuF32: f32, |a, b| !(a < b);
    NumF32: f32, |a, b| !a.is_nan() && !b.is_nan(); NanF32: f32, |a, b| a.is_nan() || b.is_nan();
    EqF64: f64, |a, b| a == b; NeF64: f64, |a, b| a < b || a > b; LtF64: f64, |a, b| a < b; LeF64: f64, |a, b| a <= b;
    GtF64: f64, |a, b| a > b; GeF64: f64, |a, b| a >= b;
    EquF64: f64, |a, b| !(a < b || a > b); NeuF64: f64, |a, b| a != b;
    LtuF64: f64, |a, b| !(a >= b); LeuF64: f64, |a, b| !(a > b); GtuF64: f64, |a, b| !(a <= b); GeuF64: f64, |a, b| !(a < b);
    NumF64: f64, |a, b| !a.is_nan() && !b.is_nan(); NanF64: f64, |a, b| a.is_nan() || b.is_nan();
}

/// Comparison operators, the values of `sub`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

impl Cmp {
    pub(crate) const ALL: [Cmp; 14] = [
        Cmp::Eq,
        Cmp::Ne,
        Cmp::Lt,
        Cmp::Le,
        Cmp::Gt,
        Cmp::Ge,
        Cmp::Equ,
        Cmp::Neu,
        Cmp::Ltu,
        Cmp::Leu,
        Cmp::Gtu,
        Cmp::Geu,
        Cmp::Num,
        Cmp::Nan,
    ];

    /// Parses a name; `lo`, `ls`, `hi`, `hs` are the old unsigned forms.
    pub(crate) fn parse(name: &str) -> Option<Cmp> {
        Some(match name {
            "eq" => Cmp::Eq,
            "ne" => Cmp::Ne,
            "lt" | "lo" => Cmp::Lt,
            "le" | "ls" => Cmp::Le,
            "gt" | "hi" => Cmp::Gt,
            "ge" | "hs" => Cmp::Ge,
            "equ" => Cmp::Equ,
            "neu" => Cmp::Neu,
            "ltu" => Cmp::Ltu,
            "leu" => Cmp::Leu,
            "gtu" => Cmp::Gtu,
            "geu" => Cmp::Geu,
            "num" => Cmp::Num,
            "nan" => Cmp::Nan,
            _ => return None,
        })
    }

    fn ordering(self, o: Option<core::cmp::Ordering>) -> bool {
        use core::cmp::Ordering::{Equal, Greater, Less};
        match (self, o) {
            (Cmp::Num, o) => o.is_some(),
            (Cmp::Nan, o) => o.is_none(),
            (Cmp::Equ | Cmp::Neu | Cmp::Ltu | Cmp::Leu | Cmp::Gtu | Cmp::Geu, None) => true,
            (_, None) => false,
            (Cmp::Eq | Cmp::Equ, Some(o)) => o == Equal,
            (Cmp::Ne | Cmp::Neu, Some(o)) => o != Equal,
            (Cmp::Lt | Cmp::Ltu, Some(o)) => o == Less,
            (Cmp::Le | Cmp::Leu, Some(o)) => o != Greater,
            (Cmp::Gt | Cmp::Gtu, Some(o)) => o == Greater,
            (Cmp::Ge | Cmp::Geu, Some(o)) => o != Less,
        }
    }

    /// Compares the bits of two values of any type.
    pub(crate) fn test(self, ty: Ty, ftz: bool, a: u64, b: u64) -> bool {
        let o = match ty {
            Ty::F32 => {
                flush_if(f32::from_bits(a as u32), ftz).partial_cmp(&flush_if(f32::from_bits(b as u32), ftz))
            }
            Ty::F64 => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
            Ty::F16 => num::from_f16(a as u32 & 0xffff).partial_cmp(&num::from_f16(b as u32 & 0xffff)),
            Ty::Bf16 => num::from_bf16(a as u32 & 0xffff).partial_cmp(&num::from_bf16(b as u32 & 0xffff)),
            _ => {
                let n = ty.bytes() * 8;
                Some(if ty.signed() { sext(a, n).cmp(&sext(b, n)) } else { zext(a, n).cmp(&zext(b, n)) })
            }
        };
        self.ordering(o)
    }
}

struct CmpAny;
impl CmpAny {
    fn run(frame: &Frame, i: &Inst, mask: u32) {
        let op = Cmp::ALL[usize::from(i.sub) % Cmp::ALL.len()];
        let wide = i.ty.bytes() == 8;
        let mut out = 0u32;
        each(mask, |lane| {
            let (a, b) = (frame.bits(i.a, lane, wide), frame.bits(i.b, lane, wide));
            out |= u32::from(op.test(i.ty, i.has(flag::FTZ), a, b)) << lane;
        });
        frame.set_pred(i.d, mask, out);
    }
}

/// f16x2 and bf16x2 comparisons: `d` gets the result of the low half, `e` that of the high half.
pub(crate) fn compare_packed(frame: &Frame, i: &Inst, mask: u32) {
    let op = Cmp::ALL[usize::from(i.sub) % Cmp::ALL.len()];
    let ty = half_of(i.ty);
    let (mut low, mut high) = (0u32, 0u32);
    each(mask, |lane| {
        let (a, b): (u32, u32) = (frame.get(i.a, lane), frame.get(i.b, lane));
        low |= u32::from(op.test(ty, false, u64::from(a & 0xffff), u64::from(b & 0xffff))) << lane;
        high |= u32::from(op.test(ty, false, u64::from(a >> 16), u64::from(b >> 16))) << lane;
    });
    frame.set_pred(i.d, mask, low);
    if i.e != crate::regs::NONE {
        frame.set_pred(i.e, mask, high);
    }
}

/// The element type of a packed type.
pub(crate) fn half_of(ty: Ty) -> Ty {
    match ty {
        Ty::F16x2 => Ty::F16,
        Ty::Bf16x2 => Ty::Bf16,
        Ty::U16x2 => Ty::U16,
        Ty::S16x2 => Ty::S16,
        other => other,
    }
}

/// The comparison `op` of `ty` into a predicate.
pub(crate) fn compare(op: Cmp, ty: Ty, ftz: bool) -> Handler {
    use Cmp::{Eq, Equ, Ge, Geu, Gt, Gtu, Le, Leu, Lt, Ltu, Nan, Ne, Neu, Num};
    match ty {
        Ty::B32 | Ty::U32 | Ty::S32 => match (op, ty) {
            (Eq, _) => cmp::<EqI32>(),
            (Ne, _) => cmp::<NeI32>(),
            (Lt, Ty::S32) => cmp::<LtS32>(),
            (Le, Ty::S32) => cmp::<LeS32>(),
            (Gt, Ty::S32) => cmp::<GtS32>(),
            (Ge, Ty::S32) => cmp::<GeS32>(),
            (Lt, _) => cmp::<LtU32>(),
            (Le, _) => cmp::<LeU32>(),
            (Gt, _) => cmp::<GtU32>(),
            (Ge, _) => cmp::<GeU32>(),
            _ => plain(CmpAny::run),
        },
        Ty::B64 | Ty::U64 | Ty::S64 => match (op, ty) {
            (Eq, _) => cmp::<EqI64>(),
            (Ne, _) => cmp::<NeI64>(),
            (Lt, Ty::S64) => cmp::<LtS64>(),
            (Le, Ty::S64) => cmp::<LeS64>(),
            (Gt, Ty::S64) => cmp::<GtS64>(),
            (Ge, Ty::S64) => cmp::<GeS64>(),
            (Lt, _) => cmp::<LtU64>(),
            (Le, _) => cmp::<LeU64>(),
            (Gt, _) => cmp::<GtU64>(),
            (Ge, _) => cmp::<GeU64>(),
            _ => plain(CmpAny::run),
        },
        Ty::F32 if !ftz => match op {
            Eq => cmp::<EqF32>(),
            Ne => cmp::<NeF32>(),
            Lt => cmp::<LtF32>(),
            Le => cmp::<LeF32>(),
            Gt => cmp::<GtF32>(),
            Ge => cmp::<GeF32>(),
            Equ => cmp::<EquF32>(),
            Neu => cmp::<NeuF32>(),
            Ltu => cmp::<LtuF32>(),
            Leu => cmp::<LeuF32>(),
            Gtu => cmp::<GtuF32>(),
            Geu => cmp::<GeuF32>(),
            Num => cmp::<NumF32>(),
            Nan => cmp::<NanF32>(),
        },
        Ty::F64 => match op {
            Eq => cmp::<EqF64>(),
            Ne => cmp::<NeF64>(),
            Lt => cmp::<LtF64>(),
            Le => cmp::<LeF64>(),
            Gt => cmp::<GtF64>(),
            Ge => cmp::<GeF64>(),
            Equ => cmp::<EquF64>(),
            Neu => cmp::<NeuF64>(),
            Ltu => cmp::<LtuF64>(),
            Leu => cmp::<LeuF64>(),
            Gtu => cmp::<GtuF64>(),
            Geu => cmp::<GeuF64>(),
            Num => cmp::<NumF64>(),
            Nan => cmp::<NanF64>(),
        },
        _ => plain(CmpAny::run),
    }
}

// ---- predicates ----

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
        let param = local && a >= super::PARAM_WINDOW;
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

// ---- on bits ----

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

fn convert(i: &Inst, a: u64) -> u64 {
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

/// The handler of a conversion: a fast one if it exists, else the general one.
pub(crate) fn conversion(
    dst: Ty,
    src: Ty,
    wide_d: bool,
    wide_a: bool,
    reg_bytes: u32,
    flags: u32,
    round: Round,
) -> Handler {
    use Ty::{B16, B32, B64, F16, F32, F64, S16, S32, S64, U8, U16, U32, U64};
    let plain_int = flags & flag::SAT == 0;
    let same_width = |wd: bool, wa: bool| wide_d == wd && wide_a == wa;
    let any16 = |t: Ty| matches!(t, U16 | S16 | B16);
    let any32 = |t: Ty| matches!(t, U32 | S32 | B32);
    let any64 = |t: Ty| matches!(t, U64 | S64 | B64);
    match (dst, src) {
        (d, s) if plain_int && any32(d) && any64(s) && same_width(false, true) => op1::<Low32>(),
        (d, s) if plain_int && any64(d) && any64(s) && same_width(true, true) => op1::<Mov64>(),
        (d, U32 | B32) if plain_int && any64(d) && same_width(true, false) => op1::<Zext32>(),
        (d, S32) if plain_int && any64(d) && same_width(true, false) => op1::<Sext32>(),
        (d, s) if plain_int && any32(d) && any32(s) && same_width(false, false) => op1::<Mov32>(),
        (d, U16 | B16) if plain_int && any32(d) && same_width(false, false) => op1::<Mask16>(),
        (d, S16) if plain_int && any32(d) && same_width(false, false) => op1::<Sext16>(),
        (d, U16 | B16) if plain_int && any64(d) && same_width(true, false) => op1::<Zext16to64>(),
        (d, S16) if plain_int && any64(d) && same_width(true, false) => op1::<Sext16to64>(),
        (d, s)
            if plain_int
                && any16(d)
                && (any32(s) || any16(s))
                && same_width(false, false)
                && reg_bytes == 2 =>
        {
            op1::<Mask16>()
        }
        (U16 | B16, s) if plain_int && any64(s) && same_width(false, true) => op1::<Low16of64>(),
        (d, U8) if plain_int && (any32(d) || any16(d)) && same_width(false, false) => op1::<Mask8>(),
        (F32, S32) if round == Round::Rn && plain_int => op1::<F32FromS32>(),
        (F32, U32) if round == Round::Rn && plain_int => op1::<F32FromU32>(),
        (F64, S32) if plain_int => op1::<F64FromS32>(),
        (F64, U32) if plain_int => op1::<F64FromU32>(),
        (F64, F32) if flags & (flag::SAT | flag::FTZ) == 0 => op1::<F64FromF32>(),
        (F32, F64) if round == Round::Rn && flags & (flag::SAT | flag::FTZ) == 0 => op1::<F32FromF64>(),
        (F32, F16) if flags & (flag::SAT | flag::FTZ) == 0 => op1::<F32FromF16>(),
        (F32, Ty::Bf16) if flags & (flag::SAT | flag::FTZ) == 0 => op1::<F32FromBf16>(),
        (F16, F32)
            if round == Round::Rn && flags & (flag::SAT | flag::RELU | flag::FTZ | flag::INTEGRAL) == 0 =>
        {
            op1::<F16FromF32>()
        }
        (S32, F32) if round == Round::Rz && flags & flag::FTZ == 0 && same_width(false, false) => {
            op1::<S32FromF32Rz>()
        }
        (S32, F32) if round == Round::Rn && flags & flag::FTZ == 0 && same_width(false, false) => {
            op1::<S32FromF32Rn>()
        }
        (U32, F32) if round == Round::Rz && flags & flag::FTZ == 0 && same_width(false, false) => {
            op1::<U32FromF32Rz>()
        }
        (F32, F32) if flags & (flag::INTEGRAL | flag::SAT | flag::FTZ | flag::RELU) == flag::INTEGRAL => {
            match round {
                Round::Rn => op1::<RintF32>(),
                Round::Rz => op1::<TruncF32>(),
                Round::Rm => op1::<FloorF32>(),
                Round::Rp => op1::<CeilF32>(),
                Round::Rna => any::<AnyCvt>(),
            }
        }
        (F32, F32) if flags & (flag::INTEGRAL | flag::RELU) == 0 && flags & flag::SAT != 0 => op1::<SatF32>(),
        _ => any::<AnyCvt>(),
    }
}

// ---- choice of a handler ----

/// The handler of an integer or bitwise operation of two or three operands, by opcode.
pub(crate) fn integer(opcode: &str, ty: Ty, flags: u32) -> Option<Handler> {
    use Ty::{B32, B64, S16x2, S32, S64, U16x2, U32, U64};
    let sat = flags & flag::SAT != 0;
    let hi = flags & flag::HI != 0;
    let wide = flags & flag::WIDE != 0;
    let w32 = matches!(ty, B32 | U32 | S32);
    let w64 = matches!(ty, B64 | U64 | S64);
    Some(match opcode {
        "add" if matches!(ty, U16x2 | S16x2) => any::<AnyAddX2>(),
        "add" if w32 && !sat => op2::<Add32>(),
        "add" if w64 => op2::<Add64>(),
        "add" => any::<AnyAdd>(),
        "sub" if w32 && !sat => op2::<Sub32>(),
        "sub" if w64 => op2::<Sub64>(),
        "sub" => any::<AnySub>(),
        "mul" if wide && ty == U32 => op2::<MulWideU32>(),
        "mul" if wide && ty == S32 => op2::<MulWideS32>(),
        "mul" if !wide && !hi && w32 => op2::<Mul32>(),
        "mul" if !wide && !hi && w64 => op2::<Mul64>(),
        "mul" if hi && ty == U32 => op2::<MulHiU32>(),
        "mul" if hi && ty == S32 => op2::<MulHiS32>(),
        "mul" if hi && ty == U64 => op2::<MulHiU64>(),
        "mul" if hi && ty == S64 => op2::<MulHiS64>(),
        "mul" => any::<AnyMul>(),
        "mad" if wide && ty == U32 => op3::<MadWideU32>(),
        "mad" if wide && ty == S32 => op3::<MadWideS32>(),
        "mad" if !wide && !hi && w32 && !sat => op3::<MadLo32>(),
        "mad" if !wide && !hi && w64 && !sat => op3::<MadLo64>(),
        "mad" => any::<AnyMad>(),
        "mul24" | "mad24" => any::<AnyMul24>(),
        "div" => match ty {
            U32 => op2::<DivU32>(),
            S32 => op2::<DivS32>(),
            U64 => op2::<DivU64>(),
            S64 => op2::<DivS64>(),
            _ => any::<AnyDiv>(),
        },
        "rem" => match ty {
            U32 => op2::<RemU32>(),
            S32 => op2::<RemS32>(),
            U64 => op2::<RemU64>(),
            S64 => op2::<RemS64>(),
            _ => any::<AnyRem>(),
        },
        "min" => match ty {
            U32 => op2::<MinU32>(),
            S32 => op2::<MinS32>(),
            U64 => op2::<MinU64>(),
            S64 => op2::<MinS64>(),
            U16x2 | S16x2 => any::<AnyMinX2>(),
            _ => any::<AnyMin>(),
        },
        "max" => match ty {
            U32 => op2::<MaxU32>(),
            S32 => op2::<MaxS32>(),
            U64 => op2::<MaxU64>(),
            S64 => op2::<MaxS64>(),
            U16x2 | S16x2 => any::<AnyMaxX2>(),
            _ => any::<AnyMax>(),
        },
        "and" if w32 => op2::<And32>(),
        "and" if w64 => op2::<And64>(),
        "and" => any::<AnyAnd>(),
        "or" if w32 => op2::<Or32>(),
        "or" if w64 => op2::<Or64>(),
        "or" => any::<AnyOr>(),
        "xor" if w32 => op2::<Xor32>(),
        "xor" if w64 => op2::<Xor64>(),
        "xor" => any::<AnyXor>(),
        "not" if w32 => op1::<Not32>(),
        "not" if w64 => op1::<Not64>(),
        "not" => any::<AnyNot>(),
        "cnot" => any::<AnyCnot>(),
        "neg" if ty == S32 => op1::<NegI32>(),
        "neg" if ty == S64 => op1::<NegI64>(),
        "neg" => any::<AnyNeg>(),
        "abs" if ty == S32 => op1::<AbsI32>(),
        "abs" if ty == S64 => op1::<AbsI64>(),
        "abs" => any::<AnyAbs>(),
        "shl" if w32 => op2::<Shl32>(),
        "shl" if w64 => op2::<Shl64>(),
        "shl" => any::<AnyShl>(),
        "shr" => match ty {
            U32 | B32 => op2::<ShrU32>(),
            S32 => op2::<ShrS32>(),
            U64 | B64 => op2::<ShrU64>(),
            S64 => op2::<ShrS64>(),
            _ => any::<AnyShr>(),
        },
        "popc" if w32 => op1::<Popc32>(),
        "popc" => op1::<Popc64>(),
        "clz" if w32 => op1::<Clz32>(),
        "clz" => op1::<Clz64>(),
        "brev" if w32 => op1::<Brev32>(),
        "brev" => op1::<Brev64>(),
        "bfe" => any::<AnyBfe>(),
        "bfind" => any::<AnyBfind>(),
        "prmt" => any::<AnyPrmt>(),
        "sad" => any::<AnySad>(),
        "dp4a" => any::<AnyDp4a>(),
        "dp2a" => any::<AnyDp2a>(),
        "bmsk" => any::<AnyBmsk>(),
        "fns" => any::<AnyFns>(),
        "szext" => any::<AnySzext>(),
        "video" => any::<AnyVideo>(),
        "lop3" => op3::<Lop3>(),
        "shf" => match (flags & flag::HI != 0, flags & flag::CLAMP != 0) {
            (true, false) => op3::<ShfRWrap>(),
            (false, false) => op3::<ShfLWrap>(),
            (true, true) => op3::<ShfRClamp>(),
            (false, true) => op3::<ShfLClamp>(),
        },
        _ => return None,
    })
}

/// The handler of a floating-point operation, by opcode; sets the fields that the slow versions read.
pub(crate) fn float(opcode: &str, ty: Ty, inst: &mut Inst) -> Option<Handler> {
    let ftz = inst.has(flag::FTZ);
    let simple = inst.round == Round::Rn && !inst.has(flag::SAT);
    let half = matches!(ty, Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2);
    let code = match opcode {
        "add" => binary::ADD,
        "sub" => binary::SUB,
        "mul" => binary::MUL,
        "div" => binary::DIV,
        "min" => binary::MIN,
        "max" => binary::MAX,
        "fma" | "mad" => binary::FMA,
        _ => 0,
    };
    inst.sub = code;
    Some(match (opcode, ty) {
        ("add" | "sub" | "mul" | "fma" | "min" | "max", _) if half => any::<AnyHalf>(),
        ("neg", _) if half => any::<AnyHalfNeg>(),
        ("abs", _) if half => any::<AnyHalfAbs>(),
        ("ex2", _) if half => any::<AnyHalfEx2>(),
        ("tanh", _) if half => any::<AnyHalfTanh>(),
        ("add", Ty::F32) if simple => {
            if ftz {
                op2::<AddF32Ftz>()
            } else {
                op2::<AddF32>()
            }
        }
        ("sub", Ty::F32) if simple => {
            if ftz {
                op2::<SubF32Ftz>()
            } else {
                op2::<SubF32>()
            }
        }
        ("mul", Ty::F32) if simple => {
            if ftz {
                op2::<MulF32Ftz>()
            } else {
                op2::<MulF32>()
            }
        }
        ("fma" | "mad", Ty::F32) if simple => {
            if ftz {
                op3::<FmaF32Ftz>()
            } else {
                op3::<FmaF32>()
            }
        }
        ("fma" | "mad", Ty::F32) => op3::<SlowFma32>(),
        ("div", Ty::F32) if inst.has(flag::APPROX) => op2::<DivApprox>(),
        ("div", Ty::F32) if simple && !ftz => op2::<DivF32>(),
        ("min", Ty::F32) if inst.flags & (flag::FTZ | flag::NAN | flag::XORSIGN | flag::ABS) == 0 => {
            op2::<MinF32>()
        }
        ("max", Ty::F32) if inst.flags & (flag::FTZ | flag::NAN | flag::XORSIGN | flag::ABS) == 0 => {
            op2::<MaxF32>()
        }
        ("add" | "sub" | "mul" | "div" | "min" | "max", Ty::F32) => op2::<SlowBinary32>(),
        ("add", Ty::F64) if simple => op2::<AddF64>(),
        ("sub", Ty::F64) if simple => op2::<SubF64>(),
        ("mul", Ty::F64) if simple => op2::<MulF64>(),
        ("div", Ty::F64) if simple => op2::<DivF64>(),
        ("min", Ty::F64) => op2::<MinF64>(),
        ("max", Ty::F64) => op2::<MaxF64>(),
        ("add" | "sub" | "mul" | "div", Ty::F64) => op2::<SlowBinary64>(),
        ("fma" | "mad", Ty::F64) if simple => op3::<FmaF64>(),
        ("fma" | "mad", Ty::F64) => op3::<SlowFma64>(),
        ("neg", Ty::F32) if !ftz => op1::<NegF32>(),
        ("abs", Ty::F32) if !ftz => op1::<AbsF32>(),
        ("neg", Ty::F64) => op1::<NegF64>(),
        ("abs", Ty::F64) => op1::<AbsF64>(),
        ("neg", Ty::F32) => {
            inst.sub = unary::NEG;
            op1::<SlowUnary32>()
        }
        ("abs", Ty::F32) => {
            inst.sub = unary::ABS;
            op1::<SlowUnary32>()
        }
        ("sqrt", Ty::F32) if inst.has(flag::APPROX) => op1::<SqrtApprox>(),
        ("sqrt", Ty::F32) if simple && !ftz => op1::<SqrtF32>(),
        ("sqrt", Ty::F32) => {
            inst.sub = unary::SQRT;
            op1::<SlowUnary32>()
        }
        ("sqrt", Ty::F64) if simple => op1::<SqrtF64>(),
        ("sqrt", Ty::F64) => {
            inst.sub = unary::SQRT;
            op1::<SlowUnary64>()
        }
        ("rcp", Ty::F32) if inst.has(flag::APPROX) => op1::<RcpApprox>(),
        ("rcp", Ty::F32) if simple && !ftz => op1::<RcpF32>(),
        ("rcp", Ty::F32) => {
            inst.sub = unary::RCP;
            op1::<SlowUnary32>()
        }
        ("rcp", Ty::F64) if inst.has(flag::APPROX) => op1::<RcpApprox64>(),
        ("rcp", Ty::F64) if simple => op1::<RcpF64>(),
        ("rcp", Ty::F64) => {
            inst.sub = unary::RCP;
            op1::<SlowUnary64>()
        }
        ("rsqrt", Ty::F32) => op1::<RsqrtApprox>(),
        ("rsqrt", Ty::F64) => op1::<RsqrtApprox64>(),
        ("ex2", Ty::F32) => op1::<Ex2>(),
        ("lg2", Ty::F32) => op1::<Lg2>(),
        ("sin", Ty::F32) => op1::<Sin>(),
        ("cos", Ty::F32) => op1::<Cos>(),
        ("tanh", Ty::F32) => op1::<Tanh>(),
        ("copysign", Ty::F32) => op2::<CopySign32>(),
        ("copysign", Ty::F64) => op2::<CopySign64>(),
        _ => return None,
    })
}

/// Moves 32 or 64 bits.
pub(crate) fn mov(wide: bool) -> Handler {
    if wide { op1::<Mov64>() } else { op1::<Mov32>() }
}

/// Packs two 32-bit values into one of 64 bits, or two 16-bit values into one of 32.
pub(crate) fn pack_pair(wide: bool) -> Handler {
    if wide { op2::<Pack32>() } else { op2::<Pack16>() }
}

/// Extracts part of a value, at bit `imm`.
pub(crate) fn unpack_part(low: bool) -> Handler {
    if low { any::<AnyUnpackLo>() } else { any::<AnyUnpackHi>() }
}

/// Inserts a part at bit `imm` of `c`.
pub(crate) fn insert_part() -> Handler {
    any::<AnyInsert>()
}

/// Converts two f32 to a packed pair.
pub(crate) fn convert_pair() -> Handler {
    any::<AnyCvtPack>()
}

/// Adds 64-bit values, for address arithmetic that the lowering inserts.
pub(crate) fn add64() -> Handler {
    op2::<Add64>()
}

/// Extends 32 bits to 64 with zeros, or takes the low half of 64.
pub(crate) fn resize(to_wide: bool) -> Handler {
    if to_wide { op1::<Zext32>() } else { op1::<Low32>() }
}
