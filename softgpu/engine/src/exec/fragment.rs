//! The interpreter in two versions, like the handlers that it calls, and the choice between them.

#![expect(unsafe_code, reason = "a function with target features is called where they were detected")]

use super::cta::Cta;
use super::dispatch;
use super::grid::Grid;
use super::interp;
use super::mem::Ranges;
use super::warp::{Fragment, Warp};
use crate::api::Fault;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,lzcnt,f16c")]
fn run_fast(
    grid: &Grid<'_>,
    ranges: &mut Ranges,
    cta: &mut Cta,
    warp: &mut Warp,
    f: Fragment,
    limit: u32,
) -> Result<bool, Fault> {
    interp::fragment::<true>(grid, ranges, cta, warp, f, limit)
}

fn run_base(
    grid: &Grid<'_>,
    ranges: &mut Ranges,
    cta: &mut Cta,
    warp: &mut Warp,
    f: Fragment,
    limit: u32,
) -> Result<bool, Fault> {
    interp::fragment::<false>(grid, ranges, cta, warp, f, limit)
}

/// Runs one fragment in the version for this processor.
#[inline(always)]
pub(super) fn run(
    grid: &Grid<'_>,
    ranges: &mut Ranges,
    cta: &mut Cta,
    warp: &mut Warp,
    f: Fragment,
    limit: u32,
) -> Result<bool, Fault> {
    #[cfg(target_arch = "x86_64")]
    if dispatch::fast() {
        // SAFETY: the features were detected.
        return unsafe { run_fast(grid, ranges, cta, warp, f, limit) };
    }
    run_base(grid, ranges, cta, warp, f, limit)
}
