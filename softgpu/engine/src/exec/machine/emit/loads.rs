//! Loads from shared memory: all addresses are checked before a run, and each load then knows their shape.

use super::{Emitter, Key, MAX_SCRATCH, reg, stack, state};
use crate::code_pages::RunCall;
use crate::exec::machine::encode::{self as x, Address, Gpr, JumpCondition, Label, Rm};
use crate::exec::machine::form::Width;
use crate::ir::Inst;

impl Emitter<'_, '_> {
    /// Jumps to `decline` unless all lanes run and all their addresses are inside shared memory, and aligned.
    pub(super) fn check_addresses(&mut self, decline: Label) {
        let bases = self.run.bases.clone();
        if bases.is_empty() {
            return;
        }
        self.code.general(32, &[0x81], 7, state(RunCall::MASK, false));
        self.code.raw(&(!0u32).to_le_bytes());
        self.code.jump_if(JumpCondition::NotZero, decline);
        for (slot, most) in bases {
            let (most_of_all, low, limit, good) = (0, 1, 2, 3);
            for lane in [0, 8, 16, 24] {
                let Some(units) = i32::try_from(slot).ok().and_then(|units| (units + lane).checked_mul(4))
                else {
                    self.failed = true;
                    return;
                };
                let words = Rm::Memory(Address { base: Gpr::Rdi, index: None, offset: units });
                if lane == 0 {
                    self.code.vex(x::MOVUPS_LOAD, most_of_all, 0, words, None);
                    self.code.vex(x::MOVAPS, low, 0, Rm::Reg(most_of_all), None);
                } else {
                    self.code.vex(x::PMAXUD, most_of_all, most_of_all, words, None);
                    self.code.vex(x::POR, low, low, words, None);
                }
            }
            // The last address at which the largest offset is inside.
            self.general(32, &[0x8b], Gpr::Eax, state(RunCall::SHARED_LEN, false));
            self.code.general(32, &[0x81], 5, reg(Gpr::Eax));
            self.code.raw(&(u32::try_from(most).unwrap_or(u32::MAX - 4) + 4).to_le_bytes());
            self.code.jump_if(JumpCondition::Below, decline);
            self.code.vmovd(limit, Gpr::Eax);
            self.code.vex(x::PBROADCASTD, limit, 0, Rm::Reg(limit), None);
            self.code.vex(x::PMAXUD, good, most_of_all, Rm::Reg(limit), None);
            self.code.vex(x::PCMPEQD, good, good, Rm::Reg(limit), None);
            let (three, zero) = (self.all(3), self.all(0));
            self.code.vex(x::PAND, low, low, three, None);
            self.code.vex(x::PCMPEQD, low, low, zero, None);
            self.code.vex(x::PAND, good, good, Rm::Reg(low), None);
            self.code.vex(x::MOVMSKPS, Gpr::Eax as u8, 0, Rm::Reg(good), None);
            self.compare(Gpr::Eax, 0xff);
            self.code.jump_if(JumpCondition::NotZero, decline);
        }
    }

    /// The place on the stack of the shape of the addresses in a part of a base: the address of the first lane, and 0 if all are
    /// equal, 1 if they are consecutive, else 2.
    pub(super) fn shape(&self, base: usize, part: u8) -> i32 {
        let number = base * usize::from(self.unroll) + usize::from(part);
        MAX_SCRATCH * 32 + 16 * i32::try_from(number).unwrap_or(0)
    }

    /// Finds the shapes of the addresses of the group.
    pub(super) fn find_shapes(&mut self) {
        for (n, (slot, _)) in self.run.bases.clone().into_iter().enumerate() {
            for part in 0..self.unroll {
                let (at, home) = (self.shape(n, part), self.home(Key { slot, part }, Width::Word));
                let (words, first, equal) = (0, 1, 2);
                self.code.vex(x::MOVUPS_LOAD, words, 0, home, None);
                self.code.vex(x::PBROADCASTD, first, 0, home, None);
                self.code.vex(x::PCMPEQD, equal, words, Rm::Reg(first), None);
                self.code.vex(x::MOVMSKPS, Gpr::Eax as u8, 0, Rm::Reg(equal), None);
                let steps = self.code.constant([0, 4, 8, 12, 16, 20, 24, 28]);
                self.code.vex(x::PADDD, first, first, steps, None);
                self.code.vex(x::PCMPEQD, words, words, Rm::Reg(first), None);
                self.code.vex(x::MOVMSKPS, Gpr::R8 as u8, 0, Rm::Reg(words), None);
                self.put(at + 8, 2);
                for (register, shape) in [(Gpr::R8, 1), (Gpr::Eax, 0)] {
                    let other = self.code.label();
                    self.compare(register, 0xff);
                    self.code.jump_if(JumpCondition::NotZero, other);
                    self.put(at + 8, shape);
                    self.code.bind(other);
                }
                self.general(32, &[0x8b], Gpr::R8, home);
                self.general(64, &[0x03], Gpr::R8, state(RunCall::SHARED, false));
                self.general(64, &[0x89], Gpr::R8, stack(at));
            }
        }
    }

    pub(super) fn put(&mut self, at: i32, value: u32) {
        self.code.general(32, &[0xc7], 0, stack(at));
        self.code.raw(&value.to_le_bytes());
    }

    pub(super) fn load(&mut self, i: &Inst, part: u8) {
        let base = self.run.bases.iter().position(|(slot, _)| *slot == i.a);
        let (Some(base), Ok(offset)) = (base, i32::try_from(i.imm)) else {
            self.failed = true;
            return;
        };
        let (to, offsets, mask) = (self.target(part), self.take(), self.take());
        let at = self.shape(base, part);
        let (scattered, consecutive, done) = (self.code.label(), self.code.label(), self.code.label());
        let first = Rm::Memory(Address { base: Gpr::Eax, index: None, offset });
        self.general(64, &[0x8b], Gpr::Eax, stack(at));
        self.code.general(32, &[0x81], 7, stack(at + 8));
        self.code.raw(&1u32.to_le_bytes());
        self.code.jump_if(JumpCondition::Above, scattered);
        self.code.jump_if(JumpCondition::Zero, consecutive);
        self.code.vex(x::BROADCASTSS, to, 0, first, None);
        self.code.jump(done);
        self.code.bind(consecutive);
        self.code.vex(x::MOVUPS_LOAD, to, 0, first, None);
        self.code.jump(done);
        self.code.bind(scattered);
        let home = self.home(Key { slot: i.a, part }, Width::Word);
        self.code.vex(x::MOVUPS_LOAD, offsets, 0, home, None);
        self.code.vex(x::PCMPEQD, mask, mask, Rm::Reg(mask), None);
        self.general(64, &[0x8b], Gpr::R8, state(RunCall::SHARED, false));
        self.code.gather(to, mask, Gpr::R8, offsets, offset);
        self.code.bind(done);
        self.define(part, to);
    }
}
