//! The lowering of moves, arithmetic and conversions, and the choice by opcode of every lowering that computes or moves data. In one file:
//! the table and its rows.

use super::{Lower, Modifiers, Res};
use crate::exec::alu::{self, logic, permute};
use crate::exec::dispatch::plain;
use crate::ir::{Op, Round, flag};
use crate::ptx::{Instruction, Operand, Space, Ty};
use crate::regs::NONE;

impl<'a> Lower<'a, '_> {
    /// Lowers an instruction that works lane by lane or on memory. Returns false for all others.
    pub(super) fn data(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<bool> {
        match inst.opcode {
            "mov" => self.mov_inst(inst, m)?,
            "cvta" => self.cvta(inst, m)?,
            "cvt" => self.cvt(inst, m)?,
            "ld" | "ldu" => self.load(inst, m)?,
            "st" => self.store(inst, m)?,
            "atom" | "red" => self.atomic(inst, m)?,
            "alloca" | "stacksave" | "stackrestore" => self.stack(inst, m)?,
            "setp" => self.setp(inst, m)?,
            "set" => self.set(inst, m)?,
            "selp" | "slct" | "bfi" if m.types.contains(&Ty::Pred) => {
                return self.fail("not defined for predicates");
            }
            "selp" => {
                let ty = self.one_type(m)?;
                let [d, a, b, p] = self.operands(inst)?;
                let (a, b) = (self.src(a, ty)?, self.src(b, ty)?);
                let (c, negated) = self.pred(p)?;
                let d = self.dst(d, ty)?;
                let wide = if ty.bytes() == 8 { flag::WIDE_D } else { 0 };
                self.alu(alu::selection(), ty, d, [a, b, c], wide | if negated { flag::NOT_C } else { 0 });
            }
            "slct" => {
                let (ty, sty) = self.two_types(m)?;
                let [d, a, b, c] = self.operands(inst)?;
                let (a, b, c) = (self.src(a, ty)?, self.src(b, ty)?, self.src(c, sty)?);
                let d = self.dst(d, ty)?;
                let mut i = self.inst(Op::Alu, ty);
                i.handler = plain(alu::slct);
                (i.d, i.a, i.b, i.c, i.sty) = (d, a, b, c, sty);
                i.flags |= m.flags | if ty.bytes() == 8 { flag::WIDE_D } else { 0 };
                self.emit(i);
            }
            "testp" => {
                let ty = self.one_type(m)?;
                let [d, a] = self.operands(inst)?;
                let sub = m.find(|w| {
                    ["finite", "infinite", "number", "notanumber", "normal", "subnormal"]
                        .iter()
                        .position(|x| *x == w)
                });
                let Some(sub) = sub else { return self.fail("a property is missing") };
                let a = self.src(a, ty)?;
                let d = self.dst(d, Ty::Pred)?;
                let mut i = self.inst(Op::Alu, ty);
                i.handler = plain(alu::testp);
                (i.d, i.a, i.sub) = (d, a, u8::try_from(sub).unwrap_or(0));
                self.emit(i);
            }
            "isspacep" => {
                let [d, a] = self.operands(inst)?;
                // Each block is a cluster of its own.
                let space = m.space.or(m.take("shared::cluster").then_some(Space::Shared));
                let Some(space) = space else { return self.fail("a state space is missing") };
                let a = self.src(a, Ty::B64)?;
                let d = self.dst(d, Ty::Pred)?;
                let mut i = self.inst(Op::Alu, Ty::B64);
                i.handler = plain(alu::isspacep);
                (i.d, i.a, i.space) = (d, a, space);
                i.flags |= flag::WIDE_A;
                self.emit(i);
            }
            "and" | "or" | "xor" | "not" if m.ty() == Some(Ty::Pred) => {
                let sub = match inst.opcode {
                    "and" => logic::AND,
                    "or" => logic::OR,
                    "xor" => logic::XOR,
                    _ => logic::NOT,
                };
                let [d, rest @ ..] = inst.operands.as_slice() else {
                    return self.fail("operands are missing");
                };
                if rest.len() != if sub == logic::NOT { 1 } else { 2 } {
                    return self.fail("wrong number of operands");
                }
                let a = self.pred(&rest[0])?;
                let b = if rest.len() > 1 { self.pred(&rest[1])? } else { (self.bits(0, false)?, false) };
                let d = self.dst(d, Ty::Pred)?;
                self.logic(sub, d, a, b);
            }
            "add" | "sub" | "addc" | "subc" if m.cc || inst.opcode.ends_with('c') => {
                self.carry_add(inst, m)?
            }
            "mad" | "madc" if m.cc || inst.opcode == "madc" => self.carry_mad(inst, m)?,
            "bfi" => {
                let ty = self.one_type(m)?;
                if !matches!(ty.bytes(), 4 | 8) {
                    return self.fail("only defined for 32 and 64 bits");
                }
                let [d, a, b, pos, len] = self.operands(inst)?;
                let (a, b) = (self.src(a, ty)?, self.src(b, ty)?);
                let (c, e) = (self.src(pos, Ty::U32)?, self.src(len, Ty::U32)?);
                let d = self.dst(d, ty)?;
                let mut i = self.inst(Op::Alu, ty);
                i.handler = plain(alu::bit_insert);
                (i.d, i.a, i.b, i.c, i.e) = (d, a, b, c, e);
                i.flags |= flag::FOUR | if ty.bytes() == 8 { flag::WIDE_D } else { 0 };
                self.emit(i);
            }
            "add" | "sub" | "mul" | "fma" if m.take("f32x2") => self.pair_of_floats(inst, m)?,
            "add" | "sub" | "fma" if matches!(m.types.as_slice(), [Ty::F32, Ty::F16 | Ty::Bf16]) => {
                self.mixed(inst, m)?
            }
            "tanh" | "ex2" | "lg2" | "sin" | "cos" | "rcp" | "rsqrt" | "sqrt" | "copysign" | "fma" => {
                let ty = self.one_type(m)?;
                self.floating(inst, m, ty)?;
            }
            "lop3" if m.other.iter().any(|word| matches!(*word, "or" | "and")) => {
                self.logic_with_predicate(inst, m)?
            }
            "add" | "sub" | "mul" | "mad" | "div" | "min" | "max" | "neg" | "abs"
                if m.ty().is_some_and(Ty::float) =>
            {
                let ty = self.one_type(m)?;
                self.floating(inst, m, ty)?;
            }
            "add" | "sub" | "mul" | "mad" | "mul24" | "mad24" | "div" | "rem" | "min" | "max" | "neg"
            | "abs" | "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "popc" | "clz" | "brev"
            | "bfe" | "bfind" | "sad" | "bmsk" | "fns" | "szext" | "shf" | "lop3" | "prmt" | "dp4a"
            | "dp2a" => self.integral(inst, m)?,
            "vabsdiff2" | "vabsdiff4" | "vadd2" | "vadd4" | "vsub2" | "vsub4" | "vmin2" | "vmin4"
            | "vmax2" | "vmax4" | "vavrg2" | "vavrg4" => self.video(inst, m)?,
            "vadd" | "vsub" | "vabsdiff" | "vmin" | "vmax" | "vshl" | "vshr" | "vmad" | "vset" => {
                self.scalar_video(inst, m)?
            }
            // A block has as many registers as its launch found for it.
            "setmaxnreg" => {
                for word in ["sync", "aligned"] {
                    m.take(word);
                }
                if !(m.take("inc") || m.take("dec")) || self.one_type(m)? != Ty::U32 {
                    return self.fail("a direction or a type is missing");
                }
                match inst.operands.as_slice() {
                    [Operand::Int(count)] if (24..=256).contains(count) && count.is_multiple_of(8) => {}
                    _ => return self.fail("takes a multiple of 8 from 24 to 256"),
                }
            }
            "createpolicy" => self.policy(inst, m)?,
            "prefetch" | "prefetchu" | "applypriority" | "discard" => {
                // These are only hints; the operand is checked like any other.
                m.other.clear();
                let space = m.space.unwrap_or(Space::Generic);
                let Some(address) = inst.operands.first() else { return self.fail("an address is missing") };
                self.address(address, space)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A conversion to a pair of a small format, or from one.
    fn convert_small(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>, format: u8) -> Res<()> {
        let ty = self.one_type(m)?;
        let pair = alu::Small::pair_type(format);
        let is_last = inst.modifiers.last().is_some_and(|word| alu::Small::find(word).is_some());
        if m.round != Some(Round::Rn) {
            return self.fail(".rn is missing");
        }
        let mut i = self.inst(Op::Alu, ty);
        if is_last {
            if ty != Ty::F16x2 || m.has(flag::SAT) {
                return self.fail("a pair of a small format becomes a pair of f16");
            }
            let [d, a] = self.operands(inst)?;
            (i.d, i.a) = (self.dst(d, Ty::B32)?, self.src(a, pair)?);
        } else {
            if !m.has(flag::SAT) {
                return self.fail(".satfinite is missing");
            }
            match (ty, inst.operands.as_slice()) {
                (Ty::F32, [d, a, b]) => {
                    (i.a, i.b) = (self.src(a, Ty::F32)?, self.src(b, Ty::F32)?);
                    i.d = self.dst(d, pair)?;
                }
                (Ty::F16x2, [d, a]) if pair == Ty::B16 => {
                    i.a = self.src(a, Ty::B32)?;
                    i.d = self.dst(d, pair)?;
                }
                _ => return self.fail("not defined for these operands"),
            }
        }
        (i.handler, i.sty, i.imm) = (alu::convert_small(!is_last), ty, i64::from(format));
        i.round = Round::Rn;
        i.flags |= m.flags & flag::RELU;
        self.emit(i);
        Ok(())
    }

    pub(super) fn one_type(&self, m: &Modifiers<'a>) -> Res<Ty> {
        match m.types.as_slice() {
            [ty] => Ok(*ty),
            _ => self.fail("exactly one type is expected"),
        }
    }

    pub(super) fn two_types(&self, m: &Modifiers<'a>) -> Res<(Ty, Ty)> {
        match m.types.as_slice() {
            [a, b] => Ok((*a, *b)),
            _ => self.fail("exactly two types are expected"),
        }
    }

    fn floating(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>, ty: Ty) -> Res<()> {
        let Some((d, sources)) = inst.operands.split_first() else {
            return self.fail("operands are missing");
        };
        let count = match inst.opcode {
            "fma" | "mad" => 3,
            "add" | "sub" | "mul" | "div" | "copysign" => 2,
            "min" | "max" if sources.len() == 3 => {
                if ty != Ty::F32 {
                    return self.fail("three sources are for .f32");
                }
                return self.minimum_of_three(inst, m);
            }
            "min" | "max" => 2,
            _ => 1,
        };
        if sources.len() != count {
            return self.fail(format!("takes {} operands, has {}", count + 1, inst.operands.len()));
        }
        if ty == Ty::F64 && inst.opcode == "div" && m.has(flag::APPROX) {
            return self.fail("there is no approximate f64 division");
        }
        let mut slots = [0; 3];
        for (slot, operand) in slots.iter_mut().zip(sources) {
            *slot = self.src(operand, ty)?;
        }
        let d = self.dst(d, ty)?;
        let mut i = self.inst(Op::Alu, ty);
        i.round = m.round.unwrap_or(Round::Rn);
        i.flags |= m.flags & !flag::HI;
        let wide = ty.bytes() == 8;
        i.flags |= if wide { flag::WIDE_D | flag::WIDE_A | flag::WIDE_B | flag::WIDE_C } else { 0 };
        match alu::float(inst.opcode, ty, &mut i) {
            Some(handler) => i.handler = handler,
            None => return self.unsupported("not supported for this type"),
        }
        i.d = d;
        [i.a, i.b, i.c] = slots;
        self.emit(i);
        Ok(())
    }

    /// The least or the greatest of three is that of two, and the third.
    fn minimum_of_three(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let [d, a, b, c] = self.operands(inst)?;
        let first = Operand::Register(self.register(Ty::F32)?, Ty::F32);
        let guard = inst.guard;
        let step = |operands: Vec<Operand<'a>>| Instruction { operands, guard, ..inst.clone() };
        self.floating(&step(vec![first.clone(), a.clone(), b.clone()]), m, Ty::F32)?;
        self.floating(&step(vec![d.clone(), first, c.clone()]), m, Ty::F32)
    }

    /// An operation on two f32 in registers of 64 bits.
    fn pair_of_floats(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let Some((d, sources)) = inst.operands.split_first() else {
            return self.fail("operands are missing");
        };
        if !m.types.is_empty() {
            return self.fail("exactly one type is expected");
        }
        let mut slots = Vec::new();
        for source in sources {
            slots.push(self.src(source, Ty::B64)?);
        }
        let mut halves = Vec::new();
        for half in 0..2 {
            let result = Operand::Register(self.register(Ty::F32)?, Ty::F32);
            let mut operands = vec![result.clone()];
            for slot in &slots {
                let part = self.register(Ty::B32)?;
                self.extract(part, Ty::B32, *slot, true, half * 32);
                operands.push(Operand::Register(part, Ty::F32));
            }
            m.types = vec![Ty::F32];
            self.floating(&Instruction { operands, ..inst.clone() }, m, Ty::F32)?;
            halves.push(result);
        }
        let operands = vec![d.clone(), Operand::Vector(halves)];
        m.types = vec![Ty::B64];
        self.mov_inst(&Instruction { operands, ..inst.clone() }, m)
    }

    /// An f32 operation with sources of 16 bits, all but the last.
    fn mixed(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let (_, narrow) = self.two_types(m)?;
        let count = if inst.opcode == "fma" { 4 } else { 3 };
        if inst.operands.len() != count {
            return self.fail(format!("takes {count} operands, has {}", inst.operands.len()));
        }
        let mut operands = inst.operands.clone();
        for operand in &mut operands[1..count - 1] {
            let wide = Operand::Register(self.register(Ty::F32)?, Ty::F32);
            let mut exact = Modifiers::parse(&[]);
            exact.types = vec![Ty::F32, narrow];
            let conversion = Instruction { operands: vec![wide.clone(), operand.clone()], ..inst.clone() };
            self.cvt(&conversion, &mut exact)?;
            *operand = wide;
        }
        m.types = vec![Ty::F32];
        self.floating(&Instruction { operands, ..inst.clone() }, m, Ty::F32)
    }

    pub(super) fn integral(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let op = inst.opcode;
        let ty = match (op, m.types.as_slice()) {
            ("dp4a" | "dp2a", [a, b]) => {
                if !b.signed() {
                    m.flags |= flag::UNSIGNED_B;
                }
                *a
            }
            (_, [ty]) => *ty,
            _ => return self.fail("exactly one type is expected"),
        };
        if ty.float() || matches!(ty, Ty::Pred | Ty::B128 | Ty::B1 | Ty::S4 | Ty::U4) {
            return self.fail("not defined for this type");
        }
        let b32 = Ty::B32;
        let wide_result = if m.has(flag::WIDE) {
            match ty.bytes() {
                2 => Ty::B32,
                4 => Ty::B64,
                _ => return self.fail(".wide is for 16 and 32 bits"),
            }
        } else {
            ty
        };
        // Destination and sources.
        let shape: (Ty, &[Ty]) = match op {
            "mul" => (wide_result, &[ty, ty]),
            "mad" => (wide_result, &[ty, ty, wide_result]),
            "add" | "sub" | "div" | "rem" | "min" | "max" | "and" | "or" | "xor" | "mul24" => (ty, &[ty, ty]),
            "neg" | "abs" | "not" | "cnot" => (ty, &[ty]),
            "mad24" | "sad" => (ty, &[ty, ty, ty]),
            // The count is a number, not bits.
            "shl" | "shr" => (ty, &[ty, Ty::U32]),
            "shf" => (b32, &[b32, b32, Ty::U32]),
            "popc" | "clz" | "bfind" => (b32, &[ty]),
            "brev" => (ty, &[ty]),
            "bfe" => (ty, &[ty, b32, b32]),
            "bmsk" => (b32, &[b32, b32]),
            "szext" => (ty, &[ty, b32]),
            "fns" | "prmt" | "dp4a" | "dp2a" | "lop3" => (b32, &[b32, b32, b32]),
            _ => return self.fail("unknown instruction"),
        };
        if matches!(op, "fns" | "shf" | "prmt" | "dp4a" | "dp2a" | "lop3" | "bmsk" | "szext")
            && ty.bytes() != 4
        {
            return self.fail("only defined for 32 bits");
        }
        if matches!(op, "popc" | "clz" | "brev" | "bfe" | "bfind" | "bfi") && ty.bytes() < 4 {
            return self.fail("only defined for 32 and 64 bits");
        }
        if op == "mad24" {
            m.flags |= flag::THIRD;
        }
        let mut sub = 0;
        match op {
            "shf" => {
                m.flags &= !flag::HI;
                if m.take("r") {
                    m.flags |= flag::HI;
                } else if !m.take("l") {
                    return self.fail("a direction is missing");
                }
                if !inst.modifiers.iter().any(|word| matches!(*word, "wrap" | "clamp")) {
                    return self.fail("a mode is missing");
                }
                m.take("wrap");
            }
            "prmt" => {
                sub = m
                    .find(|w| {
                        Some(match w {
                            "f4e" => permute::F4E,
                            "b4e" => permute::B4E,
                            "rc8" => permute::RC8,
                            "ecl" => permute::ECL,
                            "ecr" => permute::ECR,
                            "rc16" => permute::RC16,
                            _ => return None,
                        })
                    })
                    .unwrap_or(permute::INDEX);
            }
            "bmsk" | "szext" => {
                m.take("wrap");
            }
            _ => {}
        }
        let Some((d, sources)) = inst.operands.split_first() else {
            return self.fail("operands are missing");
        };
        let mut imm = 0;
        let mut count = shape.1.len();
        if op == "lop3" {
            count = 4;
            match sources.get(3) {
                Some(Operand::Int(table)) => imm = i64::from(table.to_le_bytes()[0]),
                _ => return self.fail("the table must be a constant"),
            }
        }
        if sources.len() != count {
            return self.fail(format!("takes {} operands, has {}", count + 1, inst.operands.len()));
        }
        let mut slots = [0; 3];
        for ((slot, operand), ty) in slots.iter_mut().zip(sources).zip(shape.1) {
            *slot = self.src(operand, *ty)?;
        }
        let dst = self.dst(d, shape.0)?;
        let Some(handler) = alu::integer(op, ty, m.flags) else { return self.unsupported("not supported") };
        let mut i = self.inst(Op::Alu, ty);
        i.handler = handler;
        i.imm = imm;
        i.sub = sub;
        i.d = dst;
        [i.a, i.b, i.c] = slots;
        i.flags |= m.flags;
        for (n, (flag, ty)) in [flag::WIDE_A, flag::WIDE_B, flag::WIDE_C].iter().zip(shape.1).enumerate() {
            debug_assert!(n < 3);
            i.flags |= if ty.bytes() == 8 { *flag } else { 0 };
        }
        i.flags |= if shape.0.bytes() == 8 { flag::WIDE_D } else { 0 };
        self.emit(i);
        Ok(())
    }

    fn video(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let [dt, at, bt] = m.types.as_slice() else { return self.fail("three types are expected") };
        let (dt, at, bt) = (*dt, *at, *bt);
        let sub = match inst.opcode.trim_end_matches(['2', '4']) {
            "vadd" => 0,
            "vsub" => 1,
            "vabsdiff" => 2,
            "vmin" => 3,
            "vmax" => 4,
            _ => 5,
        };
        let [d, a, b, c] = self.operands(inst)?;
        if m.take("add") {
            m.flags |= flag::THIRD;
        }
        if !dt.signed() {
            m.flags |= flag::UNSIGNED_B;
        }
        let slots = [self.src(a, Ty::B32)?, self.src(b, Ty::B32)?, self.src(c, Ty::B32)?];
        let d = self.dst(d, Ty::B32)?;
        let Some(handler) = alu::integer("video", Ty::B32, 0) else {
            return self.unsupported("not supported");
        };
        let mut i = self.inst(Op::Alu, at);
        i.handler = handler;
        i.sty = bt;
        i.sub = sub;
        i.imm = if inst.opcode.ends_with('4') { 8 } else { 16 };
        i.d = d;
        [i.a, i.b, i.c] = slots;
        i.flags |= m.flags;
        self.emit(i);
        Ok(())
    }

    fn carry(&mut self) -> Res<u32> {
        if self.carry == NONE {
            self.carry = self.register(Ty::Pred)?;
        }
        Ok(self.carry)
    }

    fn carry_add(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let ty = self.one_type(m)?;
        if !matches!(ty.bytes(), 4 | 8) || ty.float() {
            return self.fail("not defined for this type");
        }
        let [d, a, b] = self.operands(inst)?;
        let (a, b) = (self.src(a, ty)?, self.src(b, ty)?);
        let d = self.dst(d, ty)?;
        let e = self.carry()?;
        let mut i = self.inst(Op::Alu, ty);
        i.handler = plain(alu::carry_add);
        (i.d, i.a, i.b, i.e) = (d, a, b, e);
        i.sub = u8::from(inst.opcode.starts_with("sub"));
        i.flags |= if inst.opcode.ends_with('c') { flag::CARRY_IN } else { 0 }
            | if m.cc { flag::CARRY_OUT } else { 0 };
        self.emit(i);
        Ok(())
    }

    fn carry_mad(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let ty = self.one_type(m)?;
        if !matches!(ty.bytes(), 4 | 8) || ty.float() {
            return self.fail("not defined for this type");
        }
        let [d, a, b, c] = self.operands(inst)?;
        let (a, b, c) = (self.src(a, ty)?, self.src(b, ty)?, self.src(c, ty)?);
        let d = self.dst(d, ty)?;
        let e = self.carry()?;
        let mut i = self.inst(Op::Alu, ty);
        i.handler = plain(alu::carry_mad);
        (i.d, i.a, i.b, i.c, i.e) = (d, a, b, c, e);
        i.flags |= m.flags & flag::HI;
        i.flags |=
            if inst.opcode == "madc" { flag::CARRY_IN } else { 0 } | if m.cc { flag::CARRY_OUT } else { 0 };
        self.emit(i);
        Ok(())
    }

    // ---- moves and conversions ----

    fn mov_inst(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let [d, a] = self.operands(inst)?;
        Self::halve(m);
        let ty = self.one_type(m)?;
        if ty == Ty::Pred {
            let a = self.pred(a)?;
            let d = self.dst(d, Ty::Pred)?;
            let zero = self.bits(0, false)?;
            self.logic(logic::MOV, d, a, (zero, false));
            return Ok(());
        }
        match (d, a) {
            (d, a) if m.vector != 1 => {
                let (to, from) = (self.elements(d, m.vector)?, self.elements(a, m.vector)?);
                // All sources are read first: a register may be on both sides.
                let mut copies = Vec::new();
                for operand in from {
                    let (a, copy) = (self.src(operand, ty)?, self.register(ty)?);
                    self.mov(copy, a, ty.bytes() == 8);
                    copies.push(copy);
                }
                for (operand, copy) in to.iter().zip(copies) {
                    let d = self.dst(operand, ty)?;
                    self.mov(d, copy, ty.bytes() == 8);
                }
            }
            (Operand::Vector(parts), a) => {
                let part = self.part_type(ty, parts.len())?;
                let a = self.src(a, ty)?;
                for (n, operand) in parts.iter().enumerate() {
                    if matches!(operand, Operand::Name("_")) {
                        continue;
                    }
                    let d = self.dst(operand, part)?;
                    self.extract(
                        d,
                        part,
                        a,
                        ty.bytes() == 8,
                        u32::try_from(n).unwrap_or(0) * part.bytes() * 8,
                    );
                }
            }
            (d, Operand::Vector(parts)) => {
                let part = self.part_type(ty, parts.len())?;
                let mut slots = Vec::new();
                for operand in parts {
                    slots.push(self.src(operand, part)?);
                }
                let d = self.dst(d, ty)?;
                let wide = ty.bytes() == 8;
                match slots.as_slice() {
                    [a, b] if part.bytes() >= 2 => self.alu(alu::pack_pair(wide), ty, d, [*a, *b, 0], 0),
                    _ => {
                        let mut so_far = self.bits(0, wide)?;
                        for (n, a) in slots.iter().enumerate() {
                            let to = if n + 1 == slots.len() { d } else { self.register(ty)? };
                            let mut i = self.inst(Op::Alu, part);
                            i.handler = alu::insert_part();
                            i.imm = i64::try_from(n).unwrap_or(0) * i64::from(part.bytes()) * 8;
                            (i.d, i.a, i.c) = (to, *a, so_far);
                            i.flags |= if wide { flag::WIDE_D | flag::WIDE_C } else { 0 };
                            self.emit(i);
                            so_far = to;
                        }
                    }
                }
            }
            (d, a) => {
                let a = self.src(a, ty)?;
                let d = self.dst(d, ty)?;
                self.mov(d, a, ty.bytes() == 8);
            }
        }
        Ok(())
    }

    fn part_type(&self, ty: Ty, parts: usize) -> Res<Ty> {
        match (ty.bytes(), parts) {
            (8, 2) => Ok(Ty::B32),
            (8, 4) | (4, 2) => Ok(Ty::B16),
            (8, 8) | (4, 4) | (2, 2) => Ok(Ty::B8),
            _ => self.fail("the vector does not fit the type"),
        }
    }

    /// Copies `part` of `a` at bit `position` to `d`.
    pub(super) fn extract(&mut self, d: u32, part: Ty, a: u32, wide: bool, position: u32) {
        let mut i = self.inst(Op::Alu, part);
        if position == 0 && wide && part.bytes() == 4 {
            i.handler = alu::resize(false);
        } else {
            i.handler = alu::unpack_part(position == 0);
        }
        (i.d, i.a, i.imm) = (d, a, i64::from(position));
        i.flags |= if wide { flag::WIDE_A } else { 0 } | if part.bytes() == 8 { flag::WIDE_D } else { 0 };
        self.emit(i);
    }

    fn cvta(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let to = m.take("to");
        let ty = self.one_type(m)?;
        let Some(space) = m.space else { return self.fail("a state space is missing") };
        let [d, a] = self.operands(inst)?;
        let a = self.src(a, ty)?;
        let d = self.dst(d, ty)?;
        if ty.bytes() != 8 {
            return self.unsupported("addresses have 64 bits");
        }
        let base = Self::window(space);
        if base == 0 {
            self.mov(d, a, true);
        } else {
            let base = self.bits(if to { base.wrapping_neg() } else { base }, true)?;
            self.alu(alu::add64(), Ty::U64, d, [a, base, 0], 0);
        }
        Ok(())
    }

    fn cvt(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if m.take("pack") {
            return self.pack(inst, m);
        }
        if let Some(format) = m.find(alu::Small::find) {
            return self.convert_small(inst, m, format);
        }
        let (dst, src) = self.two_types(m)?;
        if matches!(dst, Ty::F16x2 | Ty::Bf16x2) {
            let [d, a, b] = self.operands(inst)?;
            if src != Ty::F32 {
                return self.unsupported("not supported for this type");
            }
            let (a, b) = (self.src(a, src)?, self.src(b, src)?);
            let d = self.dst(d, dst)?;
            let mut i = self.inst(Op::Alu, dst);
            i.handler = alu::convert_pair();
            i.round = m.round.unwrap_or(Round::Rn);
            i.flags |= m.flags;
            (i.d, i.a, i.b, i.sty) = (d, a, b, src);
            self.emit(i);
            return Ok(());
        }
        let packed = |t: Ty| {
            matches!(
                t,
                Ty::Pred
                    | Ty::B128
                    | Ty::F16x2
                    | Ty::Bf16x2
                    | Ty::U16x2
                    | Ty::S16x2
                    | Ty::B1
                    | Ty::S4
                    | Ty::U4
            )
        };
        if packed(dst) || packed(src) || src == Ty::Tf32 {
            return self.unsupported("not supported for this type");
        }
        let [d, a] = self.operands(inst)?;
        let (a, wide_a) = self.src_any(a, src)?;
        let (d, reg) = self.dst_any(d, dst)?;
        let wide_d = reg.bytes() == 8;
        let round = m.round.unwrap_or(if src.float() && !dst.float() { Round::Rz } else { Round::Rn });
        // Between floats of one size a plain rounding mode requests an integral result, as in `cvt.rni`.
        let handler = alu::conversion(dst, src, wide_d, wide_a, reg.bytes(), m.flags, round);
        let mut i = self.inst(Op::Alu, dst);
        i.handler = handler;
        i.round = round;
        i.flags |= m.flags | if wide_d { flag::WIDE_D } else { 0 } | if wide_a { flag::WIDE_A } else { 0 };
        (i.d, i.a, i.sty) = (d, a, src);
        self.emit(i);
        if reg.bytes() == 2 && dst.bytes() < 2 && dst.signed() {
            // A signed byte in a 16-bit register keeps 16 bits.
            self.extract(d, Ty::B16, d, false, 0);
        } else if reg.bytes() == 2 && dst == Ty::S16 {
            self.extract(d, Ty::B16, d, false, 0);
        }
        Ok(())
    }
}
