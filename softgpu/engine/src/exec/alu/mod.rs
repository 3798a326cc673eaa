//! The lane-wise operations: hot ones typed, the others on bits with the type read from the instruction.
//!
//! The lowering asks here for the handler of an instruction, by opcode and type, and the interpreter calls the handler. The folder owns
//! the results of arithmetic, bit for bit. It must never access memory of the device.

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

mod bits;
mod compare;
mod convert;
mod predicates;
mod small;
mod typed;
pub(crate) mod video;

pub(crate) use bits::{bit_insert, permute};
pub(crate) use compare::{Cmp, compare, compare_packed};
pub(crate) use predicates::{carry_add, carry_mad, isspacep, logic, set_from, set_packed, slct, testp};
pub(crate) use small::Small;

use super::dispatch::{any, op1, op2, op3};
use crate::ir::{Handler, Inst, Lanewise, Round, flag};
use crate::ptx::Ty;
use bits::*;
use typed::*;

/// The handler of a scalar video instruction.
pub(crate) fn video() -> Handler {
    any::<video::AnyVideo>()
}

/// The handler of a packed conversion of integers.
pub(crate) fn pack_integers() -> Handler {
    any::<video::AnyPack>()
}

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
        "mul" if wide && ty == Ty::U16 => op2::<MulWideU16>(),
        "mul" if wide && ty == Ty::S16 => op2::<MulWideS16>(),
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

/// Selects one of two values by a predicate.
pub(crate) fn selection() -> Handler {
    Handler::named(predicates::select, Lanewise::Select)
}

/// Logical operations on predicates.
pub(crate) fn predicate_logic() -> Handler {
    Handler::named(predicates::predicate, Lanewise::Predicate)
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

/// Converts a pair to one of a small format, or back.
pub(crate) fn convert_small(to_small: bool) -> Handler {
    if to_small { any::<small::AnyToSmall>() } else { any::<small::AnyFromSmall>() }
}

/// Adds 64-bit values, for address arithmetic that the lowering inserts.
pub(crate) fn add64() -> Handler {
    op2::<Add64>()
}

/// Extends 32 bits to 64 with zeros, or takes the low half of 64.
pub(crate) fn resize(to_wide: bool) -> Handler {
    if to_wide { op1::<Zext32>() } else { op1::<Low32>() }
}
