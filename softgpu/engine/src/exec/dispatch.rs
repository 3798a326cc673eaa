//! Lane-wise handlers in two versions, and the choice between them.
//!
//! A handler executes one instruction for the lanes of a mask. The fast version is compiled for AVX2 and FMA, the other for the
//! baseline of the target. The load of a module chooses the version of each instruction.

#![expect(unsafe_code, reason = "functions with target features are reached through pointers")]

use std::sync::OnceLock;

use super::lanes::{self, Op1, Op2, Op3, OpAny, OpCmp};
use crate::ir::{Handler, Inst};
use crate::regs::Frame;

/// True if the fast versions run here: the processor has the features, and `SOFTGPU_BASELINE` does not select the others.
pub(crate) fn fast() -> bool {
    static FAST: OnceLock<bool> = OnceLock::new();
    *FAST.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            std::env::var_os("SOFTGPU_BASELINE").is_none()
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("popcnt")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("f16c")
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            false
        }
    })
}

/// True if a non-empty mask has one lane. The path of one lane comes first and is short: the vector paths are functions of their
/// own, so that a single-thread block does not pay for their registers.
#[inline(always)]
fn single(mask: u32) -> bool {
    mask & mask.wrapping_sub(1) == 0
}

macro_rules! versions {
    ($($pick:ident $fast:ident $fast_wide:ident $base:ident $bound:ident $one:ident $wide:ident;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,lzcnt,f16c")]
        #[inline(never)]
        fn $fast_wide<O: $bound>(frame: &Frame, inst: &Inst, mask: u32) {
            lanes::$wide::<O>(frame, inst, mask);
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,lzcnt,f16c")]
        fn $fast<O: $bound>(frame: &Frame, inst: &Inst, mask: u32) {
            if single(mask) { lanes::$one::<O>(frame, inst, mask) } else { $fast_wide::<O>(frame, inst, mask) }
        }
        fn $base<O: $bound>(frame: &Frame, inst: &Inst, mask: u32) {
            if single(mask) { lanes::$one::<O>(frame, inst, mask) } else { lanes::$wide::<O>(frame, inst, mask) }
        }
        /// The version for this processor.
        pub(crate) fn $pick<O: $bound>() -> Handler {
            #[cfg(target_arch = "x86_64")]
            if fast() {
                // SAFETY: the processor has the features.
                return unsafe { Handler::new($fast::<O>, O::OPERATION) };
            }
            Handler::named($base::<O>, O::OPERATION)
        }
    )*};
}

versions! {
    op1 fast1 fast_wide1 base1 Op1 one1 wide1;
    op2 fast2 fast_wide2 base2 Op2 one2 wide2;
    op3 fast3 fast_wide3 base3 Op3 one3 wide3;
}

/// An operation on bits: not hot, one version.
pub(crate) fn any<O: OpAny>() -> Handler {
    Handler::plain(lanes::run_any::<O>)
}

/// The sign bits of eight words.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn signs(words: [u32; 8]) -> u32 {
    use core::arch::x86_64::{_mm256_castsi256_ps, _mm256_loadu_si256, _mm256_movemask_ps};
    // SAFETY: the array has the 32 bytes that are loaded.
    let v = unsafe { _mm256_loadu_si256(words.as_ptr().cast()) };
    _mm256_movemask_ps(_mm256_castsi256_ps(v)).cast_unsigned()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,lzcnt,f16c")]
#[inline(never)]
fn fast_wide_cmp<O: OpCmp>(frame: &Frame, inst: &Inst, mask: u32) {
    lanes::wide_cmp::<O>(frame, inst, mask, |words| signs(words));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,lzcnt,f16c")]
fn fast_cmp<O: OpCmp>(frame: &Frame, inst: &Inst, mask: u32) {
    if single(mask) { lanes::one_cmp::<O>(frame, inst, mask) } else { fast_wide_cmp::<O>(frame, inst, mask) }
}

fn base_cmp<O: OpCmp>(frame: &Frame, inst: &Inst, mask: u32) {
    if single(mask) {
        lanes::one_cmp::<O>(frame, inst, mask);
    } else {
        lanes::wide_cmp::<O>(frame, inst, mask, |words| (0..8).fold(0, |m, n| m | (words[n] & 1) << n));
    }
}

/// The version of a comparison for this processor.
pub(crate) fn cmp<O: OpCmp>() -> Handler {
    #[cfg(target_arch = "x86_64")]
    if fast() {
        // SAFETY: the processor has the features.
        return unsafe { Handler::new(fast_cmp::<O>, O::OPERATION) };
    }
    Handler::named(base_cmp::<O>, O::OPERATION)
}

/// Wraps a function that has one version.
pub(crate) const fn plain(f: fn(&Frame, &Inst, u32)) -> Handler {
    Handler::plain(f)
}
