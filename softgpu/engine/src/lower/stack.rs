//! Memory on the stack of a thread: `alloca`, `stacksave` and `stackrestore`.
//!
//! A function that has one of them has a slot with the bytes that each of its threads has taken beyond the local variables.

use super::{Lower, Modifiers, Res};
use crate::exec::alu;
use crate::ir::{Op, flag};
use crate::ptx::{Instruction, Operand, Ty};

/// Alignment of memory that names none, and the largest one.
const ALIGNMENT: i64 = 8;
const MAX_ALIGNMENT: i64 = 1 << 23;

impl<'a> Lower<'a, '_> {
    pub(super) fn stack(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let ty = self.one_type(m)?;
        let wide = match ty {
            Ty::U32 => false,
            Ty::U64 => true,
            _ => return self.fail("has the type .u32 or .u64"),
        };
        let slot = match self.code.stack {
            Some(slot) => slot,
            None => self.register(Ty::U32)?,
        };
        self.code.stack = Some(slot);
        match inst.opcode {
            "alloca" => {
                let (d, size, align) = match inst.operands.as_slice() {
                    [d, size] => (d, size, ALIGNMENT),
                    [d, size, Operand::Int(align)] => (d, size, i64::try_from(*align).unwrap_or(0)),
                    _ => return self.fail("takes 2 operands, and an alignment"),
                };
                if align <= 0 || align & (align - 1) != 0 || align > MAX_ALIGNMENT {
                    return self.fail("the alignment is a power of two up to 2^23");
                }
                let size = self.src(size, ty)?;
                let mut i = self.inst(Op::Alloca, ty);
                (i.d, i.a, i.c, i.imm) = (self.dst(d, ty)?, size, slot, align);
                i.flags |= if wide { flag::WIDE_D | flag::WIDE_A } else { 0 };
                self.emit(i);
            }
            "stacksave" => {
                let [d] = self.operands(inst)?;
                let d = self.dst(d, ty)?;
                if wide {
                    let zero = self.bits(0, false)?;
                    self.alu(alu::pack_pair(true), ty, d, [slot, zero, 0], flag::WIDE_D);
                } else {
                    self.mov(d, slot, false);
                }
            }
            _ => {
                let [a] = self.operands(inst)?;
                if matches!(a, Operand::Int(_)) {
                    return self.fail("takes a register");
                }
                let a = self.src(a, ty)?;
                self.extract(slot, Ty::B32, a, wide, 0);
            }
        }
        Ok(())
    }
}
