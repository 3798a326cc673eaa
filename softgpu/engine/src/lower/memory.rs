//! The lowering of loads, stores and atomics.

use super::{FunctionName, Lower, Modifiers, Res};
use crate::exec::alu;
use crate::exec::atomic::AtomicOp;
use crate::ir::{Constant, Op, Round, flag};
use crate::ptx::{Instruction, Operand, Space, Ty};
use crate::regs::{NONE, UNITS};

impl<'a> Lower<'a, '_> {
    /// The registers of a vector operand, or the one register.
    pub(super) fn elements<'o>(&self, operand: &'o Operand<'a>, n: u8) -> Res<&'o [Operand<'a>]> {
        let list = match operand {
            Operand::Vector(parts) => parts.as_slice(),
            one => core::slice::from_ref(one),
        };
        if list.len() == usize::from(n) {
            Ok(list)
        } else {
            self.fail("the vector does not have the length of the instruction")
        }
    }

    /// Checks that the registers of a vector have one width.
    pub(super) fn one_width(&mut self, elements: &[Operand<'a>]) -> Res<()> {
        let mut width = None;
        for element in elements {
            let Operand::Name(name) = element else { continue };
            if let Some(FunctionName::Register { ty, .. }) = self.lookup(name)?
                && *width.get_or_insert(ty.bytes()) != ty.bytes()
            {
                return self.fail("the registers of a vector must have one width");
            }
        }
        Ok(())
    }

    fn memory_type(&self, m: &Modifiers<'a>) -> Res<Ty> {
        let ty = self.one_type(m)?;
        match ty {
            Ty::Pred | Ty::B1 | Ty::S4 | Ty::U4 => self.fail("not a memory type"),
            Ty::B128 => self.fail("not a type of this access"),
            ty if ty.bytes() * u32::from(m.vector) > 32 => self.fail("an access has at most 32 bytes"),
            ty => Ok(ty),
        }
    }

    pub(super) fn load(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        Self::halve(m);
        // The optional cache policy operand is a hint.
        let (d, address) = match inst.operands.as_slice() {
            [d, address] | [d, address, _] => (d, address),
            _ => return self.fail("takes 2 operands"),
        };
        m.take("unified");
        let ty = self.memory_type(m)?;
        let space = m.space.unwrap_or(Space::Generic);
        let elements = self.elements(d, m.vector)?;
        self.one_width(elements)?;
        if space == Space::Param && matches!(address, Operand::Memory { base: None, .. }) {
            return self.fail("a parameter is expected");
        }
        if space == Space::Param
            && let Operand::Memory { base: Some(name), offset } = address
        {
            match self.lookup(name)? {
                Some(FunctionName::Kernel { offset: at, .. }) => {
                    for (n, element) in elements.iter().enumerate() {
                        let (d, reg) = self.dst_any(element, ty)?;
                        let at_in =
                            offset.wrapping_add(i64::from(ty.bytes()) * i64::try_from(n).unwrap_or(0));
                        if at_in < 0 {
                            return self.fail(format!("the access is outside of parameter {name}"));
                        }
                        let wide = reg.bytes() == 8;
                        // Beyond its parameter an access reads the next ones, and beyond all of them zeroes.
                        let offset = at.saturating_add(u32::try_from(at_in).unwrap_or(u32::MAX));
                        let size = u8::try_from(ty.bytes()).unwrap_or(8);
                        let a = self.constant(Constant::Param { offset, size, signed: ty.signed(), wide })?;
                        self.mov(d, a, wide);
                        if reg.bytes() == 2 && ty.signed() {
                            self.extract(d, Ty::B16, d, false, 0);
                        }
                    }
                    return Ok(());
                }
                Some(FunctionName::Words { first, bytes }) => {
                    for (n, element) in elements.iter().enumerate() {
                        let at = offset.wrapping_add(i64::from(ty.bytes()) * i64::try_from(n).unwrap_or(0));
                        self.load_word(element, ty, first, bytes, at)?;
                    }
                    return Ok(());
                }
                _ => {}
            }
        }
        let (a, imm, flags) = self.address(address, space)?;
        let mut slots = Vec::new();
        let mut wide = false;
        for element in elements {
            let (slot, reg) = self.dst_any(element, ty)?;
            wide = reg.bytes() == 8;
            slots.push(slot);
        }
        let mut i = self.inst(Op::Load, ty);
        (i.a, i.imm, i.space, i.n) = (a, imm, space, m.vector);
        i.flags |= flags | m.flags | if wide { flag::WIDE_D } else { 0 };
        i.d = slots[0];
        i.e = u32::try_from(self.code.extra.len()).unwrap_or(u32::MAX);
        self.code.extra.extend(&slots);
        self.emit(i);
        if !wide && ty.signed() && ty.bytes() < 4 {
            for (slot, element) in slots.iter().zip(elements) {
                if self.dst_any(element, ty)?.1.bytes() == 2 {
                    self.extract(*slot, Ty::B16, *slot, false, 0);
                }
            }
        }
        Ok(())
    }

    /// A load from a parameter that is stored in the frame.
    fn load_word(&mut self, element: &Operand<'a>, ty: Ty, first: u32, bytes: u32, at: i64) -> Res<()> {
        let (d, reg) = self.dst_any(element, ty)?;
        let end = at.checked_add(i64::from(ty.bytes()));
        if at < 0 || end.is_none_or(|e| e > i64::from(bytes)) || at % i64::from(ty.bytes()) != 0 {
            return self.unsupported("the access is outside of the parameter, or misaligned");
        }
        let at = u32::try_from(at).unwrap_or(0);
        let word = first + at / 4 * UNITS;
        let wide = reg.bytes() == 8;
        match ty.bytes() {
            8 => self.alu(alu::pack_pair(true), ty, d, [word, word + UNITS, 0], 0),
            4 if !wide => self.mov(d, word, false),
            size => {
                let part = if at % 4 == 0 {
                    word
                } else {
                    let t = self.register(Ty::B32)?;
                    self.extract(t, if size == 1 { Ty::B8 } else { Ty::B16 }, word, false, at % 4 * 8);
                    t
                };
                let to = match reg.bytes() {
                    8 => {
                        if ty.signed() {
                            Ty::S64
                        } else {
                            Ty::U64
                        }
                    }
                    4 => {
                        if ty.signed() {
                            Ty::S32
                        } else {
                            Ty::U32
                        }
                    }
                    _ => {
                        if ty.signed() {
                            Ty::S16
                        } else {
                            Ty::U16
                        }
                    }
                };
                let from = match (size, ty.signed()) {
                    (1, true) => Ty::S8,
                    (1, false) => Ty::U8,
                    (2, true) => Ty::S16,
                    (2, false) => Ty::U16,
                    (_, true) => Ty::S32,
                    (_, false) => Ty::U32,
                };
                let mut i = self.inst(Op::Alu, to);
                i.handler = alu::conversion(to, from, wide, false, reg.bytes(), 0, Round::Rn);
                (i.d, i.a, i.sty) = (d, part, from);
                i.flags |= if wide { flag::WIDE_D } else { 0 };
                self.emit(i);
                if reg.bytes() == 2 {
                    self.extract(d, Ty::B16, d, false, 0);
                }
            }
        }
        Ok(())
    }

    pub(super) fn store(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        Self::halve(m);
        let (address, a) = match inst.operands.as_slice() {
            [address, a] | [address, a, _] => (address, a),
            _ => return self.fail("takes 2 operands"),
        };
        let ty = self.memory_type(m)?;
        let space = m.space.unwrap_or(Space::Generic);
        let elements = self.elements(a, m.vector)?;
        self.one_width(elements)?;
        if space == Space::Param
            && let Operand::Memory { base: Some(name), offset } = address
            && let Some(FunctionName::Words { first, bytes }) = self.lookup(name)?
        {
            for (n, element) in elements.iter().enumerate() {
                let at = offset.wrapping_add(i64::from(ty.bytes()) * i64::try_from(n).unwrap_or(0));
                self.store_word(element, ty, first, bytes, at)?;
            }
            return Ok(());
        }
        if matches!(space, Space::Const | Space::Param) {
            return self.fail("this space is read-only");
        }
        let (to, imm, flags) = self.address(address, space)?;
        let mut slots = Vec::new();
        let mut wide = false;
        for (n, element) in elements.iter().enumerate() {
            let (slot, w) = self.src_any(element, ty)?;
            if n > 0 && wide != w {
                return self.fail("the registers of a vector must have one width");
            }
            wide = w;
            slots.push(slot);
        }
        let mut i = self.inst(Op::Store, ty);
        (i.a, i.imm, i.space, i.n) = (to, imm, space, m.vector);
        i.flags |= flags | m.flags | if wide { flag::WIDE_B } else { 0 };
        i.b = slots[0];
        i.e = u32::try_from(self.code.extra.len()).unwrap_or(u32::MAX);
        self.code.extra.extend(&slots);
        self.emit(i);
        Ok(())
    }

    fn store_word(&mut self, element: &Operand<'a>, ty: Ty, first: u32, bytes: u32, at: i64) -> Res<()> {
        let (a, wide) = self.src_any(element, ty)?;
        let end = at.checked_add(i64::from(ty.bytes()));
        if at < 0 || end.is_none_or(|e| e > i64::from(bytes)) || at % i64::from(ty.bytes()) != 0 {
            return self.unsupported("the access is outside of the parameter, or misaligned");
        }
        let at = u32::try_from(at).unwrap_or(0);
        let word = first + at / 4 * UNITS;
        match ty.bytes() {
            8 => {
                self.extract(word, Ty::B32, a, true, 0);
                self.extract(word + UNITS, Ty::B32, a, true, 32);
            }
            4 => self.extract(word, Ty::B32, a, wide, 0),
            size => {
                let (shift, mask) = (at % 4 * 8, if size == 1 { 0xffu32 } else { 0xffff });
                let keep = self.bits(u64::from(!(mask << shift)), false)?;
                let Some(and) = alu::integer("and", Ty::B32, 0) else {
                    return self.fail("no such operation");
                };
                self.alu(and, Ty::B32, word, [word, keep, 0], 0);
                let mut i = self.inst(Op::Alu, if size == 1 { Ty::B8 } else { Ty::B16 });
                i.handler = alu::insert_part();
                i.imm = i64::from(shift);
                (i.d, i.a, i.c) = (word, a, word);
                i.flags |= if wide { flag::WIDE_A } else { 0 };
                self.emit(i);
            }
        }
        Ok(())
    }

    pub(super) fn atomic(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if m.take("async") {
            return self.unsupported("asynchronous reductions are not supported");
        }
        let Some(op) = m.find(AtomicOp::parse) else { return self.fail("an operation is missing") };
        let ty = self.one_type(m)?;
        if m.vector != 1 {
            return self.atomic_on_elements(inst, m, op);
        }
        if ty == Ty::B128 {
            return self.atomic_of_128_bits(inst, m, op);
        }
        if !op.takes(ty) {
            return self.fail("the operation is not defined for this type");
        }
        let red = inst.opcode == "red";
        let list = inst.operands.as_slice();
        let (d, rest) = if red { (None, list) } else { (list.first(), list.get(1..).unwrap_or(&[])) };
        let sources = if op == AtomicOp::Cas { 2 } else { 1 };
        if rest.len() != sources + 1 && rest.len() != sources + 2 {
            return self.fail("wrong number of operands");
        }
        let space = m.space.unwrap_or(Space::Generic);
        if !matches!(space, Space::Generic | Space::Global | Space::Shared) {
            return self.fail("atomics work on global and shared memory");
        }
        let (a, imm, flags) = self.address(&rest[0], space)?;
        let b = self.src(&rest[1], ty)?;
        let c = if sources == 2 { self.src(&rest[2], ty)? } else { 0 };
        let d = match d {
            Some(d) => self.dst(d, ty)?,
            None => NONE,
        };
        let mut i = self.inst(Op::Atomic, ty);
        (i.d, i.a, i.b, i.c, i.imm, i.space, i.sub) = (d, a, b, c, imm, space, op as u8);
        i.flags |= flags | (m.flags & flag::ORDERED);
        self.emit(i);
        Ok(())
    }

    /// An exchange of 128 bits; its registers are pairs.
    fn atomic_of_128_bits(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>, op: AtomicOp) -> Res<()> {
        let (d, address, sources) = match (inst.opcode, op, inst.operands.as_slice()) {
            ("atom", AtomicOp::Exch, [d, address, b] | [d, address, b, _]) => (d, address, [b, b]),
            ("atom", AtomicOp::Cas, [d, address, b, c] | [d, address, b, c, _]) => (d, address, [b, c]),
            _ => return self.fail("128 bits have exch and cas, and a result"),
        };
        let space = m.space.unwrap_or(Space::Generic);
        if !matches!(space, Space::Generic | Space::Global | Space::Shared) {
            return self.fail("atomics work on global and shared memory");
        }
        let (a, imm, flags) = self.address(address, space)?;
        let mut slots = Vec::new();
        match d {
            Operand::Name("_") => slots.extend([self.register(Ty::B64)?, self.register(Ty::B64)?]),
            d => slots.extend(self.pair(d)?),
        }
        for source in sources {
            slots.extend(self.pair(source)?);
        }
        let mut i = self.inst(Op::Atomic, Ty::B128);
        (i.d, i.a, i.imm, i.space, i.sub) = (NONE, a, imm, space, op as u8);
        i.flags |= flags | (m.flags & flag::ORDERED);
        i.e = u32::try_from(self.code.extra.len()).unwrap_or(u32::MAX);
        self.code.extra.extend(slots);
        self.emit(i);
        Ok(())
    }

    /// The halves of a register of 128 bits.
    fn pair(&self, operand: &Operand<'a>) -> Res<[u32; 2]> {
        match operand {
            Operand::Vector(parts) => match parts.as_slice() {
                [Operand::Register(low, Ty::B64), Operand::Register(high, Ty::B64)] => Ok([*low, *high]),
                _ => self.fail("a register of 128 bits is expected"),
            },
            _ => self.fail("a register of 128 bits is expected"),
        }
    }

    /// An atomic operation on a vector is one on each of its elements.
    fn atomic_on_elements(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>, op: AtomicOp) -> Res<()> {
        let ty = self.one_type(m)?;
        let word = inst.modifiers.iter().copied().find(|word| AtomicOp::parse(word) == Some(op));
        let Some(word) = word else { return self.fail("an operation is missing") };
        let sixteen = matches!(ty, Ty::F16 | Ty::Bf16);
        let fits = match ty {
            Ty::F32 => op == AtomicOp::Add && matches!(m.vector, 2 | 4),
            Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                matches!(op, AtomicOp::Add | AtomicOp::Min | AtomicOp::Max) && (m.vector != 8 || sixteen)
            }
            _ => false,
        };
        if !fits || !matches!(m.space.unwrap_or(Space::Generic), Space::Generic | Space::Global) {
            return self.fail("not defined for this vector");
        }
        let (d, rest) = match (inst.opcode, inst.operands.as_slice()) {
            ("red", rest) => (None, rest),
            (_, [d, rest @ ..]) => (Some(self.elements(d, m.vector)?), rest),
            _ => return self.fail("operands are missing"),
        };
        let [Operand::Memory { base, offset }, b, ..] = rest else {
            return self.fail("an address and a vector are expected");
        };
        let count = m.vector;
        let b = self.elements(b, count)?;
        m.vector = 1;
        for n in 0..usize::from(count) {
            let at = i64::try_from(n).unwrap_or(0) * i64::from(ty.bytes());
            let mut operands =
                vec![Operand::Memory { base: *base, offset: offset.wrapping_add(at) }, b[n].clone()];
            if let Some(d) = d {
                operands.insert(0, d[n].clone());
            }
            m.other.push(word);
            self.atomic(&Instruction { operands, ..inst.clone() }, m)?;
        }
        Ok(())
    }
}
