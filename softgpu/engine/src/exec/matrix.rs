//! `ldmatrix`, `mma` and `wmma`.

use super::Fail;
use super::mem::{Ranges, Spaces};
use crate::ir::Inst;
use crate::regs::Frame;

/// Executes a matrix instruction for a whole warp.
pub(crate) fn execute(
    _: &Spaces<'_>,
    _: &mut Ranges,
    _: &Frame,
    _: &Inst,
    _: &[u32],
    _: u32,
) -> Result<(), Fail> {
    Ok(())
}
