//! The lowering of comparisons.

use super::{Lower, Modifiers, Res};
use crate::exec::alu::{self, Cmp, logic};
use crate::exec::dispatch::plain;
use crate::ir::{Op, flag};
use crate::ptx::{Instruction, Operand, Ty};

impl<'a> Lower<'a, '_> {
    fn bool_op(m: &mut Modifiers<'a>) -> Option<u8> {
        m.find(|w| match w {
            "and" => Some(logic::AND),
            "or" => Some(logic::OR),
            "xor" => Some(logic::XOR),
            _ => None,
        })
    }

    pub(super) fn compare_into(&mut self, op: Cmp, ty: Ty, flags: u32, d: u32, a: u32, b: u32) {
        let mut i = self.inst(Op::Alu, ty);
        i.handler = alu::compare(op, ty, flags & flag::FTZ != 0);
        (i.d, i.a, i.b, i.sub) = (d, a, b, op as u8);
        i.flags |= flags;
        self.emit(i);
    }

    /// `lop3` with a predicate: true if the result is not zero, combined with another predicate.
    pub(super) fn logic_with_predicate(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let Some(op) = Self::bool_op(m) else { return self.fail("an operation is missing") };
        let [Operand::Pair(d, p), sources @ .., q] = inst.operands.as_slice() else {
            return self.fail("takes d|p, sources, a table and a predicate");
        };
        let d = if *d == "_" { self.register(Ty::B32)? } else { self.dst(&Operand::Name(d), Ty::B32)? };
        let mut operands = vec![Operand::Register(d, Ty::B32)];
        operands.extend_from_slice(sources);
        self.integral(&Instruction { operands, ..inst.clone() }, m)?;
        let (hit, zero) = (self.register(Ty::Pred)?, self.bits(0, false)?);
        self.compare_into(Cmp::Ne, Ty::U32, 0, hit, d, zero);
        let q = self.pred(q)?;
        let p = self.dst(&Operand::Name(p), Ty::Pred)?;
        self.logic(op, p, (hit, false), q);
        Ok(())
    }

    pub(super) fn setp(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        // The parser took `lo`, the unsigned comparison, for the modifier of multiplications.
        let op = m.find(Cmp::parse).or(if m.has(flag::NAN) { None } else { Self::plain_cmp(inst) });
        let Some(op) = op else { return self.fail("a comparison is missing") };
        m.flags &= !flag::HI;
        let combine = Self::bool_op(m);
        let ty = self.one_type(m)?;
        let [d, rest @ ..] = inst.operands.as_slice() else { return self.fail("operands are missing") };
        let (a, b, c) = match (rest, combine) {
            ([a, b], None) => (a, b, None),
            ([a, b, c], Some(op)) => (a, b, Some((op, self.pred(c)?))),
            _ => return self.fail("wrong number of operands"),
        };
        let (a, b) = (self.src(a, ty)?, self.src(b, ty)?);
        let (p, q) = match d {
            Operand::Pair(p, q) => {
                let sink = |n: &str| n == "_";
                let p = if sink(p) { None } else { Some(self.dst(&Operand::Name(p), Ty::Pred)?) };
                let q = if sink(q) { None } else { Some(self.dst(&Operand::Name(q), Ty::Pred)?) };
                (p, q)
            }
            other => (Some(self.dst(other, Ty::Pred)?), None),
        };
        if matches!(ty, Ty::F16x2 | Ty::Bf16x2) {
            let (low, high) = (self.register(Ty::Pred)?, self.register(Ty::Pred)?);
            let mut i = self.inst(Op::Alu, ty);
            i.handler = plain(alu::compare_packed);
            (i.d, i.e, i.a, i.b, i.sub) = (low, high, a, b, op as u8);
            self.emit(i);
            let zero = self.bits(0, false)?;
            for (d, t) in [(p, low), (q, high)] {
                let Some(d) = d else { continue };
                match c {
                    Some((op, c)) => self.logic(op, d, (t, false), c),
                    None => self.logic(logic::MOV, d, (t, false), (zero, false)),
                }
            }
            return Ok(());
        }
        if ty == Ty::Pred || ty == Ty::B128 || ty.bytes() == 1 {
            return self.fail("not defined for this type");
        }
        if let (Some(p), None, None) = (p, q, c) {
            self.compare_into(op, ty, m.flags, p, a, b);
            return Ok(());
        }
        let t = self.register(Ty::Pred)?;
        self.compare_into(op, ty, m.flags, t, a, b);
        let zero = self.bits(0, false)?;
        let (op, c) = c.unwrap_or((logic::OR, (zero, false)));
        // Computes the complement first, into a register of its own: p may be an input of both.
        let u = self.register(Ty::Pred)?;
        if q.is_some() {
            self.logic(op, u, (t, true), c);
        }
        if let Some(p) = p {
            self.logic(op, p, (t, false), c);
        }
        if let Some(q) = q {
            self.logic(logic::MOV, q, (u, false), (zero, false));
        }
        Ok(())
    }

    fn plain_cmp(inst: &Instruction<'a>) -> Option<Cmp> {
        inst.modifiers.iter().find_map(|w| match *w {
            "lo" => Some(Cmp::Lt),
            "hi" => Some(Cmp::Gt),
            _ => None,
        })
    }

    pub(super) fn set(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let op = m.find(Cmp::parse).or_else(|| Self::plain_cmp(inst));
        let Some(op) = op else { return self.fail("a comparison is missing") };
        let combine = Self::bool_op(m);
        let (dst, src) = self.two_types(m)?;
        let [d, rest @ ..] = inst.operands.as_slice() else { return self.fail("operands are missing") };
        let (a, b, c) = match (rest, combine) {
            ([a, b], None) => (a, b, None),
            ([a, b, c], Some(op)) => (a, b, Some((op, self.pred(c)?))),
            _ => return self.fail("wrong number of operands"),
        };
        let (a, b) = (self.src(a, src)?, self.src(b, src)?);
        let d = self.dst(d, dst)?;
        if matches!(src, Ty::F16x2 | Ty::Bf16x2) {
            if c.is_some() {
                return self.unsupported("the packed form with a predicate is not supported");
            }
            let mut i = self.inst(Op::Alu, dst);
            i.handler = plain(alu::set_packed);
            (i.d, i.a, i.b, i.sty, i.sub) = (d, a, b, src, op as u8);
            self.emit(i);
            return Ok(());
        }
        if dst.bytes() == 8 || src.bytes() == 1 || src == Ty::B128 || src == Ty::Pred {
            return self.fail("not defined for this type");
        }
        let t = self.register(Ty::Pred)?;
        self.compare_into(op, src, m.flags, t, a, b);
        if let Some((op, c)) = c {
            self.logic(op, t, (t, false), c);
        }
        self.alu(plain(alu::set_from), dst, d, [t, 0, 0], 0);
        Ok(())
    }
}
