//! Vector registers: each element is a register, and instructions see vectors of them.

use super::{FunctionName, Lower, Modifiers, Res};
use crate::ptx::{Instruction, Operand, Ty};
use crate::regs::UNITS;

impl<'a> Lower<'a, '_> {
    /// Declares vector registers.
    pub(super) fn vectors(&mut self, ty: Ty, count: u8, names: &[(&'a str, Option<u32>)]) -> Res<()> {
        for (name, family) in names {
            if family.is_some() {
                return self.unsupported(format!("families of vector registers ({name}) are not supported"));
            }
            let first = self.register(ty)?;
            let mut units = 0;
            for n in 1..count {
                units = (self.register(ty)? - first) / u32::from(n);
            }
            self.declare(name, FunctionName::Vector { first, units, count, ty })?;
            self.has_vectors = true;
        }
        Ok(())
    }

    /// A register of 128 bits is a vector of two of 64 bits.
    pub(super) fn register_of_128_bits(&mut self) -> Res<FunctionName> {
        self.has_vectors = true;
        let (first, units) = (self.slots(4 * UNITS)?, 2 * UNITS);
        Ok(FunctionName::Vector { first, units, count: 2, ty: Ty::B64 })
    }

    /// Makes a move or an access of 128 bits one of two halves.
    pub(super) fn halve(m: &mut Modifiers<'a>) {
        if m.vector == 1 && m.types == [Ty::B128] {
            (m.vector, m.types) = (2, vec![Ty::B64]);
        }
    }

    /// The instruction with the elements of its vector registers; `None` if it names none.
    pub(super) fn expanded(&mut self, inst: &Instruction<'a>) -> Res<Option<Instruction<'a>>> {
        if !self.has_vectors {
            return Ok(None);
        }
        let mut out = inst.clone();
        for operand in &mut out.operands {
            self.expand(operand)?;
        }
        Ok(Some(out))
    }

    fn expand(&mut self, operand: &mut Operand<'a>) -> Res<()> {
        match operand {
            Operand::Name(name) => {
                if let Some(FunctionName::Vector { first, units, count, ty }) = self.lookup(name)? {
                    let element = |n: u8| Operand::Register(first + u32::from(n) * units, ty);
                    *operand = Operand::Vector((0..count).map(element).collect());
                }
            }
            Operand::Dotted(name, part) => {
                if let Some(FunctionName::Vector { first, units, count, ty }) = self.lookup(name)? {
                    let index = ["x", "y", "z", "w"].iter().position(|p| p == part);
                    let index = index.or_else(|| ["r", "g", "b", "a"].iter().position(|p| p == part));
                    match index.and_then(|n| u8::try_from(n).ok()).filter(|n| *n < count) {
                        Some(n) => *operand = Operand::Register(first + u32::from(n) * units, ty),
                        None => return self.fail(format!("{name} has no element {part}")),
                    }
                }
            }
            Operand::Vector(parts) | Operand::List(parts) | Operand::Resident(parts, _) => {
                for part in parts {
                    // A vector in a list stays whole: nothing takes vectors of vectors.
                    self.expand(part)?;
                }
            }
            Operand::Image { operands, .. } => {
                for operand in operands {
                    self.expand(operand)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}
