//! Comparisons: operators, and the handlers that write predicates.

use crate::exec::dispatch::{cmp, plain};
use crate::exec::lanes::{OpCmp, each};
use crate::exec::num::{self, flush_if, sext, zext};
use crate::ir::{Handler, Inst, Lanewise, flag};
use crate::ptx::Ty;
use crate::regs::Frame;

macro_rules! cmps { ($($name:ident: $a:ty, |$x:ident, $y:ident| $body:expr;)*) => {$(
    struct $name;
    impl OpCmp for $name {
        type A = $a;
        const OPERATION: Lanewise = Lanewise::$name;
        #[inline(always)]
        fn f(_: &Inst, $x: $a, $y: $a) -> bool { $body }
    }
)*}; }

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

    #[inline]
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
    #[inline]
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
#[inline]
pub(super) fn half_of(ty: Ty) -> Ty {
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
