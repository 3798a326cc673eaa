//! Slots, names and operands: the places of registers, constants and addresses in the frame.

use super::{FunctionName, Lower, MAX_FRAME_UNITS, Res, Symbol};
use crate::api::{LOCAL_WINDOW, LoadError, LoadErrorKind, SHARED_WINDOW};
use crate::exec::Special;
use crate::ir::{Constant, Op, flag, function_token};
use crate::ptx::{Operand, Space, Ty};
use crate::regs::{CONST, UNITS};

impl<'a> Lower<'a, '_> {
    // ---- slots ----

    pub(super) fn slots(&mut self, units: u32) -> Res<u32> {
        let at = self.code.frame_units;
        match at.checked_add(units) {
            Some(end) if end <= MAX_FRAME_UNITS => {
                self.code.frame_units = end;
                Ok(at)
            }
            _ => self.unsupported(format!("function {} needs too many registers", self.code.name)),
        }
    }

    pub(super) fn register(&mut self, ty: Ty) -> Res<u32> {
        match ty {
            Ty::Pred => {
                if self.predicates.1 == 32 {
                    self.predicates = (self.slots(UNITS)?, 0);
                }
                self.predicates.1 += 1;
                Ok(self.predicates.0 + self.predicates.1 - 1)
            }
            Ty::B128 => self.fail("not a type of this register"),
            _ => self.slots(if ty.bytes() == 8 { 2 * UNITS } else { UNITS }),
        }
    }

    pub(super) fn constant(&mut self, c: Constant) -> Res<u32> {
        if let Some(&slot) = self.constants.get(&c) {
            return Ok(slot);
        }
        let wide = match c {
            Constant::Bits64(_) | Constant::Global { .. } | Constant::Reference(_) => true,
            Constant::Bits32(_) => false,
            Constant::Param { wide, .. }
            | Constant::Dynamic { wide, .. }
            | Constant::Special { wide, .. } => wide,
        };
        let at = self.code.const_units;
        let end = at + if wide { 2 * UNITS } else { UNITS };
        if end > MAX_FRAME_UNITS {
            return self.unsupported(format!("function {} has too many constants", self.code.name));
        }
        self.code.const_units = end;
        self.code.constants.push((c, at));
        self.constants.insert(c, at | CONST);
        Ok(at | CONST)
    }

    pub(super) fn bits(&mut self, value: u64, wide: bool) -> Res<u32> {
        #[expect(clippy::cast_possible_truncation, reason = "a 32-bit operand takes the low half")]
        let c = if wide { Constant::Bits64(value) } else { Constant::Bits32(value as u32) };
        self.constant(c)
    }

    // ---- names ----

    pub(super) fn declare(&mut self, name: &'a str, what: FunctionName) -> Res<()> {
        let known = self.scopes.last_mut().and_then(|(_, scope)| scope.insert(name, what));
        if known.is_some() { self.fail(format!("{name} is defined twice")) } else { Ok(()) }
    }

    pub(super) fn find(&self, name: &str) -> Option<FunctionName> {
        self.scopes.iter().rev().find_map(|(_, scope)| scope.get(name).copied())
    }

    /// Looks up a name, or a member of a family.
    pub(super) fn lookup(&mut self, name: &str) -> Res<Option<FunctionName>> {
        if let Some(found) = self.find(name)
            && !matches!(found, FunctionName::Family { .. })
        {
            return Ok(Some(found));
        }
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        for split in name.len() - digits..name.len() {
            let (stem, number) = name.split_at(split);
            if number.len() > 1 && number.starts_with('0') {
                continue;
            }
            if let (Some(FunctionName::Family { id, count, ty }), Ok(n)) =
                (self.find(stem), number.parse::<u32>())
                && n < count
            {
                let slot = match self.family_slots.get(&(id, n)) {
                    Some(&slot) => slot,
                    None => {
                        let slot = if ty == Ty::B128 { self.slots(4 * UNITS)? } else { self.register(ty)? };
                        self.family_slots.insert((id, n), slot);
                        slot
                    }
                };
                if ty == Ty::B128 {
                    let units = 2 * UNITS;
                    return Ok(Some(FunctionName::Vector { first: slot, units, count: 2, ty: Ty::B64 }));
                }
                return Ok(Some(FunctionName::Register { slot, ty }));
            }
        }
        Ok(None)
    }

    pub(super) fn unknown<T>(&self, name: &str) -> Res<T> {
        let kind = match self.symbols.names.get(name) {
            Some(Symbol::Undefined) => LoadErrorKind::Link,
            _ => LoadErrorKind::Syntax,
        };
        Err(LoadError { kind, line: self.line, message: format!("unknown symbol {name}") })
    }

    /// Looks up a register.
    pub(super) fn reg(&mut self, name: &str) -> Res<(u32, Ty)> {
        match self.lookup(name)? {
            Some(FunctionName::Register { slot, ty }) => Ok((slot, ty)),
            Some(_) => self.fail(format!("{name} is not a register")),
            None => self.unknown(name),
        }
    }

    // ---- operands ----

    /// A destination register with the slot width of `ty`; `_` gets a slot of its own.
    pub(super) fn dst(&mut self, operand: &Operand<'a>, ty: Ty) -> Res<u32> {
        match operand {
            Operand::Name("_") => self.register(ty),
            Operand::Name(name) => {
                let (slot, reg) = self.reg(name)?;
                self.check(name, reg, ty)?;
                Ok(slot)
            }
            Operand::Register(slot, reg) => {
                self.check("in a vector", *reg, ty)?;
                Ok(*slot)
            }
            _ => self.fail("a destination must be a register"),
        }
    }

    pub(super) fn check(&self, name: &str, reg: Ty, ty: Ty) -> Res<()> {
        let class = |t: Ty| if t == Ty::Pred { 0 } else { t.bytes() };
        if class(reg) != class(ty) {
            return self.fail(format!("register {name} does not have the width of the instruction"));
        }
        self.check_kind(name, reg, ty)
    }

    /// Checks that a register holds numbers of the instruction's kind: bits are any kind, and so is a register of bits.
    fn check_kind(&self, name: &str, reg: Ty, ty: Ty) -> Res<()> {
        let fits = match (reg, ty) {
            (Ty::F16 | Ty::F32 | Ty::F64, _) if ty.integer() => false,
            (Ty::F16 | Ty::F32 | Ty::F64 | Ty::F16x2, _) if ty.float() => reg == ty,
            _ => !(reg.integer() && ty.float()),
        };
        if fits { Ok(()) } else { self.fail(format!("register {name} does not hold the instruction's type")) }
    }

    /// A destination register at least as wide as `ty`. Returns its own type too.
    pub(super) fn dst_any(&mut self, operand: &Operand<'a>, ty: Ty) -> Res<(u32, Ty)> {
        match operand {
            Operand::Name("_") => Ok((self.register(ty)?, ty)),
            Operand::Name(name) => {
                let (slot, reg) = self.reg(name)?;
                if reg == Ty::Pred || reg.bytes() < ty.bytes() {
                    return self.fail(format!("register {name} is too narrow"));
                }
                self.check_kind(name, reg, ty)?;
                Ok((slot, reg))
            }
            Operand::Register(slot, reg) if reg.bytes() >= ty.bytes() => Ok((*slot, *reg)),
            _ => self.fail("a destination must be a register"),
        }
    }

    /// A source of exactly the width of `ty`.
    pub(super) fn src(&mut self, operand: &Operand<'a>, ty: Ty) -> Res<u32> {
        if let Operand::Name(name) = operand
            && let Some(FunctionName::Register { slot, ty: reg }) = self.lookup(name)?
        {
            self.check(name, reg, ty)?;
            return Ok(slot);
        }
        if let Operand::Register(slot, reg) = operand {
            self.check("in a vector", *reg, ty)?;
            return Ok(*slot);
        }
        self.value(operand, ty)
    }

    /// A source that may be wider than `ty` (`st`, `cvt`). Returns whether its slot is wide.
    pub(super) fn src_any(&mut self, operand: &Operand<'a>, ty: Ty) -> Res<(u32, bool)> {
        if let Operand::Name(name) = operand
            && let Some(FunctionName::Register { slot, ty: reg }) = self.lookup(name)?
        {
            if reg == Ty::Pred || reg.bytes() < ty.bytes() {
                return self.fail(format!("register {name} is too narrow"));
            }
            self.check_kind(name, reg, ty)?;
            return Ok((slot, reg.bytes() == 8));
        }
        if let Operand::Register(slot, reg) = operand
            && reg.bytes() >= ty.bytes()
        {
            return Ok((*slot, reg.bytes() == 8));
        }
        Ok((self.value(operand, ty)?, ty.bytes() == 8))
    }

    /// Any operand but a register.
    pub(super) fn value(&mut self, operand: &Operand<'a>, ty: Ty) -> Res<u32> {
        let wide = ty.bytes() == 8;
        match operand {
            Operand::Int(_) | Operand::Name(_) | Operand::Dotted(..) | Operand::SymbolOffset(..)
                if ty.float() =>
            {
                self.fail("a number with a fraction or a register is expected")
            }
            Operand::Int(v) => {
                let v = match ty.bytes() {
                    2 => v & 0xffff,
                    1 => v & 0xff,
                    _ => *v,
                };
                self.bits(v, wide)
            }
            Operand::F32(_) | Operand::F64(_) if ty.integer() => {
                self.fail("a constant with a fraction is not valid here")
            }
            Operand::F32(v) => match ty {
                Ty::F64 => self.bits(f64::from(f32::from_bits(*v)).to_bits(), true),
                _ if ty.bytes() == 4 => self.bits(u64::from(*v), false),
                _ => self.fail("an f32 constant is not valid here"),
            },
            Operand::F64(v) => match ty {
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "a constant is rounded to the type it is used as"
                )]
                Ty::F32 => self.bits(u64::from((f64::from_bits(*v) as f32).to_bits()), false),
                _ if wide => self.bits(*v, true),
                _ => self.fail("an f64 constant is not valid here"),
            },
            Operand::Dotted(name, part) => match self.special_register(name, part, wide)? {
                Some(slot) => Ok(slot),
                None => self.unknown(&format!("{name}.{part}")),
            },
            Operand::Name(name) => {
                if let Some(slot) = self.special_register(name, "", wide)? {
                    return Ok(slot);
                }
                self.address_of(name, 0, wide)
            }
            Operand::SymbolOffset(name, offset) => self.address_of(name, *offset, wide),
            _ => self.fail("this kind of operand is not valid here"),
        }
    }

    /// A special register by its name. Each block is a cluster of its own, as it is in every launch without the size of clusters.
    fn special_register(&mut self, name: &str, part: &str, wide: bool) -> Res<Option<u32>> {
        let (which, value, target, isa) = match (name, part) {
            ("%clusterid", _) => (Special::parse("%ctaid", part), None, 90, 78),
            ("%nclusterid", _) => (Special::parse("%nctaid", part), None, 90, 78),
            ("%cluster_ctaid", "x" | "y" | "z") | ("%cluster_ctarank", "") => (None, Some(0), 90, 78),
            ("%cluster_nctaid", "x" | "y" | "z") | ("%cluster_nctarank", "") => (None, Some(1), 90, 78),
            ("%aggr_smem_size", "") => (Special::parse(name, part), None, 90, 81),
            // No kernel runs in a graph of the device.
            ("%current_graph_exec", "") => (None, Some(0), 75, 80),
            _ => (Special::parse(name, part), None, 0, 0),
        };
        self.needs(target, isa)?;
        match (which, value) {
            (Some(which), _) => self.special(which, wide).map(Some),
            (None, Some(value)) => self.bits(value, wide).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// Checks the language of the text for something that is not an instruction.
    fn needs(&self, target: u32, isa: u32) -> Res<()> {
        let language = self.symbols.language;
        if language.target < target {
            return self.fail(format!("needs .target sm_{target} or higher"));
        }
        if language.isa < isa {
            return self.fail(format!("needs .version {}.{} or higher", isa / 10, isa % 10));
        }
        Ok(())
    }

    pub(super) fn special(&mut self, which: Special, wide: bool) -> Res<u32> {
        if which.uniform() {
            return self.constant(Constant::Special { which: which as u8, wide });
        }
        let ty = if wide { Ty::B64 } else { Ty::B32 };
        let d = self.register(ty)?;
        let mut inst = self.inst(Op::Special, ty);
        inst.d = d;
        inst.sub = which as u8;
        inst.flags |= if wide { flag::WIDE_D } else { 0 };
        self.emit(inst);
        Ok(d)
    }

    /// The address of a variable or function in its own space.
    pub(super) fn address_of(&mut self, name: &str, offset: i64, wide: bool) -> Res<u32> {
        match self.lookup(name)? {
            Some(FunctionName::Local(at)) => self.local_address(i64::from(at).wrapping_add(offset), wide),
            Some(FunctionName::Shared(at)) => self.bits(u64::from(at).wrapping_add_signed(offset), wide),
            Some(FunctionName::Dynamic) => self.constant(Constant::Dynamic { base: 0, offset, wide }),
            Some(FunctionName::Kernel { offset: at, .. }) => {
                self.bits(u64::from(at).wrapping_add_signed(offset), wide)
            }
            Some(FunctionName::Words { .. }) => {
                self.unsupported(format!("the address of parameter {name} cannot be taken"))
            }
            Some(FunctionName::Global(index)) if wide => self.constant(Constant::Global { index, offset }),
            Some(_) => self.fail(format!("{name} has no address")),
            None => match self.symbols.names.get(name) {
                Some(Symbol::Global(index)) if wide => {
                    self.constant(Constant::Global { index: *index, offset })
                }
                Some(Symbol::Reference(index)) if wide && offset == 0 => {
                    self.constant(Constant::Reference(*index))
                }
                Some(Symbol::Function(index)) if wide => self.bits(function_token(*index as usize), true),
                Some(Symbol::Shared(variable)) => {
                    let at = self.shared.named(*variable, self.line, name)?;
                    self.bits(u64::from(at).wrapping_add_signed(offset), wide)
                }
                Some(Symbol::Dynamic) => self.constant(Constant::Dynamic { base: 0, offset, wide }),
                Some(Symbol::Undefined) => self.unknown(name),
                Some(_) => self.fail(format!("the address of {name} has 64 bits")),
                None => self.unknown(name),
            },
        }
    }

    pub(super) fn local_address(&mut self, offset: i64, wide: bool) -> Res<u32> {
        let ty = if wide { Ty::B64 } else { Ty::B32 };
        let d = self.register(ty)?;
        let mut inst = self.inst(Op::LocalAddress, ty);
        inst.d = d;
        inst.imm = offset;
        inst.flags |= if wide { flag::WIDE_D } else { 0 };
        self.emit(inst);
        Ok(d)
    }

    /// A source predicate and whether it is negated. Constants are allowed.
    pub(super) fn pred(&mut self, operand: &Operand<'a>) -> Res<(u32, bool)> {
        match operand {
            Operand::Name("%is_explicit_cluster") => {
                self.needs(90, 78)?;
                Ok((self.bits(0, false)?, false))
            }
            Operand::Name(name) => {
                let (slot, ty) = self.reg(name)?;
                self.check(name, ty, Ty::Pred)?;
                Ok((slot, false))
            }
            Operand::Not(name) => {
                let (slot, ty) = self.reg(name)?;
                self.check(name, ty, Ty::Pred)?;
                Ok((slot, true))
            }
            Operand::Int(v) => Ok((self.bits(if *v != 0 { 0xffff_ffff } else { 0 }, false)?, false)),
            _ => self.fail("a predicate is expected"),
        }
    }

    /// An address operand: slot, constant offset, and flags; `space` is the space of the instruction.
    pub(super) fn address(&mut self, operand: &Operand<'a>, space: Space) -> Res<(u32, i64, u32)> {
        let Operand::Memory { base, offset } = operand else {
            return self.fail("an address in brackets is expected");
        };
        let Some(name) = base else {
            if space != Space::Local {
                return self.fail("only addresses of local memory are numbers");
            }
            return Ok((self.bits(0, true)?, *offset, 0));
        };
        match self.lookup(name)? {
            Some(FunctionName::Register { ty, .. }) if ty.float() || ty == Ty::Pred => {
                self.fail(format!("register {name} holds no address"))
            }
            Some(FunctionName::Register { slot, ty }) => match ty.bytes() {
                8 => Ok((slot, *offset, 0)),
                4 => Ok((slot, *offset, flag::ADDR32)),
                _ => self.unsupported("addresses of fewer than 32 bits are not supported"),
            },
            Some(FunctionName::Local(at)) if space == Space::Local => {
                Ok((self.local_address(i64::from(at), false)?, *offset, flag::ADDR32))
            }
            Some(FunctionName::Shared(at)) if space == Space::Shared => {
                Ok((self.bits(u64::from(at), false)?, *offset, flag::ADDR32))
            }
            Some(FunctionName::Dynamic) if space == Space::Shared => Ok((
                self.constant(Constant::Dynamic { base: 0, offset: 0, wide: false })?,
                *offset,
                flag::ADDR32,
            )),
            Some(FunctionName::Dynamic) if space == Space::Generic => Ok((
                self.constant(Constant::Dynamic { base: SHARED_WINDOW.start, offset: 0, wide: true })?,
                *offset,
                0,
            )),
            Some(FunctionName::Local(at)) if space == Space::Generic => {
                let window = LOCAL_WINDOW.start.cast_signed();
                Ok((self.local_address(window.wrapping_add(i64::from(at)), true)?, *offset, 0))
            }
            Some(FunctionName::Shared(at)) if space == Space::Generic => {
                Ok((self.bits(SHARED_WINDOW.start + u64::from(at), true)?, *offset, 0))
            }
            Some(FunctionName::Global(index))
                if matches!(space, Space::Global | Space::Const | Space::Generic) =>
            {
                Ok((self.constant(Constant::Global { index, offset: 0 })?, *offset, 0))
            }
            Some(_) => self.fail(format!("{name} is not in the space of the instruction")),
            None => match self.symbols.names.get(name) {
                Some(Symbol::Global(index)) => {
                    if !matches!(space, Space::Global | Space::Const | Space::Generic) {
                        return self.fail(format!("{name} is not in the space of the instruction"));
                    }
                    Ok((self.constant(Constant::Global { index: *index, offset: 0 })?, *offset, 0))
                }
                Some(Symbol::Shared(variable)) if space == Space::Shared => {
                    let at = self.shared.named(*variable, self.line, name)?;
                    Ok((self.bits(u64::from(at), false)?, *offset, flag::ADDR32))
                }
                Some(Symbol::Dynamic) if space == Space::Shared => Ok((
                    self.constant(Constant::Dynamic { base: 0, offset: 0, wide: false })?,
                    *offset,
                    flag::ADDR32,
                )),
                Some(Symbol::Dynamic) if space == Space::Generic => Ok((
                    self.constant(Constant::Dynamic { base: SHARED_WINDOW.start, offset: 0, wide: true })?,
                    *offset,
                    0,
                )),
                Some(Symbol::Shared(variable)) if space == Space::Generic => {
                    let at = self.shared.named(*variable, self.line, name)?;
                    Ok((self.bits(SHARED_WINDOW.start + u64::from(at), true)?, *offset, 0))
                }
                Some(Symbol::Undefined) | None => self.unknown(name),
                Some(_) => self.fail(format!("{name} is not in the space of the instruction")),
            },
        }
    }
}
