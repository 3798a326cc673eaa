//! Matrix instructions.

use super::{Lower, Modifiers, Res};
use crate::ptx::Instruction;

impl<'a> Lower<'a, '_> {
    /// Lowers a matrix instruction; false if it is none.
    pub(super) fn matrix(&mut self, _inst: &Instruction<'a>, _m: &mut Modifiers<'a>) -> Res<bool> {
        Ok(false)
    }
}
