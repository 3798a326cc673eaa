//! The lowering of scalar video instructions and of packed conversions of integers.

use super::{Lower, Modifiers, Res};
use crate::exec::alu::video::{Part, Second, Video, VideoOp};
use crate::exec::alu::{self, Cmp};
use crate::ir::{Op, flag};
use crate::ptx::{Instruction, Operand, Ty};

impl<'a> Lower<'a, '_> {
    /// `vadd`, `vsub`, `vabsdiff`, `vmin`, `vmax`, `vshl`, `vshr`, `vmad` and `vset`.
    pub(super) fn scalar_video(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let op = match inst.opcode {
            "vadd" => VideoOp::Add,
            "vsub" => VideoOp::Sub,
            "vabsdiff" => VideoOp::AbsDiff,
            "vmin" => VideoOp::Min,
            "vmax" => VideoOp::Max,
            "vshl" => VideoOp::ShiftLeft,
            "vshr" => VideoOp::ShiftRight,
            "vmad" => VideoOp::Mad,
            _ => match m.find(Cmp::parse) {
                Some(cmp @ (Cmp::Eq | Cmp::Ne | Cmp::Lt | Cmp::Le | Cmp::Gt | Cmp::Ge)) => VideoOp::Set(cmp),
                _ => return self.fail("a comparison is missing"),
            },
        };
        let (to, from, other) = match (op, m.types.as_slice()) {
            (VideoOp::Set(_), [a, b]) => (Ty::U32, *a, *b),
            (VideoOp::Set(_), _) => return self.fail("exactly two types are expected"),
            (_, [d, a, b]) => (*d, *a, *b),
            _ => return self.fail("exactly three types are expected"),
        };
        if [to, from, other].iter().any(|ty| !matches!(ty, Ty::U32 | Ty::S32)) {
            return self.fail("video instructions have the types .u32 and .s32");
        }
        let shifts = matches!(op, VideoOp::ShiftLeft | VideoOp::ShiftRight);
        let wrap = m.take("wrap");
        if shifts && !wrap && !m.has(flag::CLAMP) {
            return self.fail("a mode is missing");
        }
        let second = if op == VideoOp::Mad {
            None
        } else {
            m.find(|word| match word {
                "add" => Some(Second::Add),
                "min" => Some(Second::Min),
                "max" => Some(Second::Max),
                _ => None,
            })
        };
        let mad = op == VideoOp::Mad;
        let scale = if mad && m.take("shr7") {
            7
        } else if mad && m.take("shr15") {
            15
        } else {
            0
        };
        let plus_one = mad && m.take("po");
        let [d, a, b, rest @ ..] = inst.operands.as_slice() else { return self.fail("operands are missing") };
        let (d, part) = match d {
            Operand::Dotted(name, part) if !mad => (Operand::Name(name), self.register_part(part)?),
            other => (other.clone(), Part::Whole),
        };
        let third = match rest {
            [c] if mad || second.is_some() || part != Part::Whole => self.src(c, Ty::B32)?,
            [] if !mad && second.is_none() && part == Part::Whole => self.bits(0, false)?,
            _ => return self.fail("wrong number of operands"),
        };
        if second.is_some() && part != Part::Whole {
            return self.fail("a part of a register takes no second operation");
        }
        let (a, part_a) = self.video_source(a, from)?;
        let (b, part_b) = self.video_source(b, other)?;
        let d = self.dst(&d, Ty::B32)?;
        let second = second.unwrap_or(Second::None);
        let video = Video { op, parts: [part_a, part_b, part], second, scale, plus_one, wrap };
        let mut i = self.inst(Op::Alu, to);
        i.handler = alu::video();
        (i.d, i.a, i.b, i.c, i.sty, i.imm) = (d, a, b, third, from, video.encode());
        i.flags |= (m.flags & flag::SAT) | if other.signed() { 0 } else { flag::UNSIGNED_B };
        self.emit(i);
        Ok(())
    }

    fn register_part(&self, word: &str) -> Res<Part> {
        match Part::parse(word) {
            Some(part) => Ok(part),
            None => self.fail(format!("no part of a register is named {word}")),
        }
    }

    /// A source, or a part of a register.
    fn video_source(&mut self, operand: &Operand<'a>, ty: Ty) -> Res<(u32, Part)> {
        match operand {
            Operand::Dotted(name, part) if Part::parse(part).is_some() => {
                Ok((self.src(&Operand::Name(name), Ty::B32)?, self.register_part(part)?))
            }
            other => Ok((self.src(other, ty)?, Part::Whole)),
        }
    }

    /// `cvt.pack`.
    pub(super) fn pack(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        // Types of two bits are no types of registers.
        let tiny = m.find(|word| match word {
            "u2" => Some(false),
            "s2" => Some(true),
            _ => None,
        });
        let (bits, signed, rest) = match (tiny, m.types.as_slice()) {
            (Some(signed), rest) => (2, signed, rest),
            (None, [to @ (Ty::U4 | Ty::S4), rest @ ..]) => (4, to.signed(), rest),
            (None, [to @ (Ty::U8 | Ty::S8), rest @ ..]) => (8, to.signed(), rest),
            (None, [to @ (Ty::U16 | Ty::S16), rest @ ..]) => (16, to.signed(), rest),
            _ => return self.fail("no such type"),
        };
        let (from, third) = match rest {
            [from @ Ty::S32] if bits == 16 => (*from, false),
            [from @ Ty::S32, Ty::B32] if bits < 16 => (*from, true),
            _ => return self.fail("no such type"),
        };
        if !m.has(flag::SAT) {
            return self.fail(".sat is missing");
        }
        let (d, a, b, c) = match inst.operands.as_slice() {
            [d, a, b] if !third => (d, a, b, self.bits(0, false)?),
            [d, a, b, c] if third => (d, a, b, self.src(c, Ty::B32)?),
            _ => return self.fail("wrong number of operands"),
        };
        let (a, b) = (self.src(a, from)?, self.src(b, from)?);
        let d = self.dst(d, Ty::B32)?;
        let mut i = self.inst(Op::Alu, Ty::B32);
        i.handler = alu::pack_integers();
        (i.d, i.a, i.b, i.c, i.sty, i.imm) = (d, a, b, c, from, bits);
        i.flags |= if signed { 0 } else { flag::UNSIGNED_B };
        self.emit(i);
        Ok(())
    }
}
