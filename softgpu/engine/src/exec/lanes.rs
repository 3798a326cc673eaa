//! The loops over lanes: all 32 without a blend, one lane, or some lanes with a blend.

use crate::ir::{Inst, Lanewise, flag};
use crate::regs::{Frame, Lane};

/// An operation of one operand.
pub(crate) trait Op1 {
    type A: Lane;
    type D: Lane;
    /// True if skipping inactive lanes pays.
    const COSTLY: bool;
    const OPERATION: Lanewise;
    fn f(i: &Inst, a: Self::A) -> Self::D;
}

/// An operation of two operands.
pub(crate) trait Op2 {
    type A: Lane;
    type B: Lane;
    type D: Lane;
    const COSTLY: bool;
    const OPERATION: Lanewise;
    fn f(i: &Inst, a: Self::A, b: Self::B) -> Self::D;
}

/// An operation of three operands.
pub(crate) trait Op3 {
    type A: Lane;
    type B: Lane;
    type C: Lane;
    type D: Lane;
    const COSTLY: bool;
    const OPERATION: Lanewise;
    fn f(i: &Inst, a: Self::A, b: Self::B, c: Self::C) -> Self::D;
}

pub(crate) trait OpCmp {
    type A: Lane;
    const OPERATION: Lanewise;
    fn f(i: &Inst, a: Self::A, b: Self::A) -> bool;
}

/// An operation on bits that reads types and modifiers from the instruction: for rare instructions.
pub(crate) trait OpAny {
    fn f(i: &Inst, a: u64, b: u64, c: u64) -> u64;
}

/// The lanes of a mask, ascending.
#[inline(always)]
pub(crate) fn each(mut mask: u32, mut f: impl FnMut(usize)) {
    while mask != 0 {
        f(mask.trailing_zeros() as usize);
        mask &= mask - 1;
    }
}

macro_rules! runner {
    ($one:ident, $wide:ident, $bound:ident, $($slot:ident: $ty:ident),*) => {
        /// Runs a mask of one lane.
        #[inline(always)]
        pub(crate) fn $one<O: $bound>(frame: &Frame, i: &Inst, mask: u32) {
            let lane = mask.trailing_zeros() as usize & 31;
            let out = O::f(i, $(frame.get::<O::$ty>(i.$slot, lane)),*);
            frame.set(i.d, lane, out);
        }

        /// Runs any mask.
        #[inline(always)]
        pub(crate) fn $wide<O: $bound>(frame: &Frame, i: &Inst, mask: u32) {
            if mask == !0 {
                for first in [0, 8, 16, 24] {
                    $(let $slot: [O::$ty; 8] = frame.load8(i.$slot, first);)*
                    let mut out = [O::D::default(); 8];
                    for n in 0..8 {
                        out[n] = O::f(i, $($slot[n]),*);
                    }
                    frame.store8(i.d, first, out);
                }
            } else if O::COSTLY {
                each(mask, |lane| {
                    let out = O::f(i, $(frame.get::<O::$ty>(i.$slot, lane)),*);
                    frame.set(i.d, lane, out);
                });
            } else {
                for first in [0usize, 8, 16, 24] {
                    let part = mask >> first;
                    $(let $slot: [O::$ty; 8] = frame.load8(i.$slot, first);)*
                    let mut out: [<O::D as Lane>::Bits; 8] = frame.load8(i.d, first);
                    for n in 0..8 {
                        let new = O::f(i, $($slot[n]),*).bits();
                        out[n] = if part & (1 << n) != 0 { new } else { out[n] };
                    }
                    frame.store8(i.d, first, out);
                }
            }
        }
    };
}

runner!(one1, wide1, Op1, a: A);
runner!(one2, wide2, Op2, a: A, b: B);
runner!(one3, wide3, Op3, a: A, b: B, c: C);

/// Compares one lane into the predicate `d`.
#[inline(always)]
pub(crate) fn one_cmp<O: OpCmp>(frame: &Frame, i: &Inst, mask: u32) {
    let lane = mask.trailing_zeros() as usize & 31;
    let hit = O::f(i, frame.get(i.a, lane), frame.get(i.b, lane));
    frame.set_pred(i.d, mask, if hit { mask } else { 0 });
}

/// Compares into the predicate `d`; `pack` makes one bit of each all-ones word.
#[inline(always)]
pub(crate) fn wide_cmp<O: OpCmp>(frame: &Frame, i: &Inst, mask: u32, pack: impl Fn([u32; 8]) -> u32) {
    let mut result = 0;
    for first in [0usize, 8, 16, 24] {
        let a: [O::A; 8] = frame.load8(i.a, first);
        let b: [O::A; 8] = frame.load8(i.b, first);
        let mut hits = [0u32; 8];
        for n in 0..8 {
            hits[n] = if O::f(i, a[n], b[n]) { !0 } else { 0 };
        }
        result |= pack(hits) << first;
    }
    frame.set_pred(i.d, mask, result);
}

/// Runs lane by lane on zero-extended bits.
#[inline(always)]
pub(crate) fn run_any<O: OpAny>(frame: &Frame, i: &Inst, mask: u32) {
    each(mask, |lane| {
        let out = O::f(
            i,
            frame.bits(i.a, lane, i.has(flag::WIDE_A)),
            frame.bits(i.b, lane, i.has(flag::WIDE_B)),
            frame.bits(i.c, lane, i.has(flag::WIDE_C)),
        );
        frame.set_bits(i.d, lane, i.has(flag::WIDE_D), out);
    });
}
