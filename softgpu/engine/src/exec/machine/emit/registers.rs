//! The registers of vectors: values come in when they are read, and leave for the stack when no register is free.

use super::{Emitter, Key, MAX_SCRATCH, VectorPlace, stack};
use crate::exec::machine::encode::{self as x, Address, Gpr, Rm, Vex};
use crate::exec::machine::form::{Nans, Width};
use crate::exec::num::NAN32;
use crate::ir::flag;
use crate::regs::{CONST, NONE};

impl Emitter<'_> {
    pub(super) fn parts(&self, width: Width) -> core::ops::Range<u8> {
        0..if width == Width::Double { 2 * self.unroll } else { self.unroll }
    }

    /// The next position that reads a slot, from this one on.
    pub(super) fn next_read(&self, slot: u32, from: usize) -> usize {
        let reads = self.run.reads.get(&slot).map_or(&[][..], Vec::as_slice);
        let next = reads.get(reads.partition_point(|&at| at < from));
        if let Some(&next) = next {
            return next;
        }
        let end = self.run.insts.len() + 1;
        match reads.first() {
            Some(first) if self.run.repeat.is_some() && (slot & CONST != 0 || !self.run.writes(slot)) => {
                end + first
            }
            _ if self.run.results.iter().any(|(result, _)| *result == slot) => end,
            _ => usize::MAX,
        }
    }

    /// The next position that reads a vector, which is the current one if it has not come to this part.
    pub(super) fn next_use(&self, key: Key) -> usize {
        let passed = self.unroll == 2 && key.part < self.part;
        self.next_read(key.slot, self.at + usize::from(passed))
    }

    /// Takes a register for the current instruction.
    pub(super) fn take(&mut self) -> u8 {
        let free = |r: &u8| self.registers.locked >> r & 1 == 0 && !self.pinned.values().any(|p| p == r);
        let candidates: Vec<u8> = (0..16).filter(free).collect();
        let empty = candidates.iter().copied().find(|&r| self.registers.held[usize::from(r)].is_none());
        let register = empty.or_else(|| {
            candidates
                .into_iter()
                .max_by_key(|&r| self.registers.held[usize::from(r)].map_or(0, |key| self.next_use(key)))
        });
        let Some(register) = register else {
            self.failed = true;
            return 0;
        };
        if let Some(key) = self.registers.held[usize::from(register)].take() {
            self.spill(key, register);
        }
        self.registers.locked |= 1 << register;
        register
    }

    /// Keeps the value of a register that is taken for another one.
    pub(super) fn spill(&mut self, key: Key, register: u8) {
        let place = self.registers.places.entry(key).or_default();
        place.register = None;
        let copied = place.scratch.is_some() || !place.stale;
        if !copied && self.next_use(key) != usize::MAX {
            self.save(key, register);
        }
    }

    /// Copies a register to the stack place of a key.
    pub(super) fn save(&mut self, key: Key, register: u8) {
        let next = i32::try_from(self.scratch.len()).unwrap_or(i32::MAX);
        let number = *self.scratch.entry(key).or_insert(next);
        if number >= MAX_SCRATCH {
            self.failed = true;
            return;
        }
        let offset = number * 32;
        self.code.vex(x::MOVUPS_STORE, register, 0, stack(offset), None);
        self.registers.places.entry(key).or_default().scratch = Some(offset);
    }

    pub(super) fn lock(&mut self, register: u8) -> u8 {
        self.registers.locked |= 1 << register;
        register
    }

    /// The place of a vector in the frame or in the constants.
    pub(super) fn home(&mut self, key: Key, width: Width) -> Rm {
        let Some(units) = i32::try_from(key.slot & !CONST).ok().and_then(|units| units.checked_mul(4)) else {
            self.failed = true;
            return Rm::Reg(0);
        };
        let constant = key.slot & CONST != 0;
        let base = if constant { Gpr::Rsi } else { Gpr::Rdi };
        let part = i32::from(key.part);
        let (index, offset) = match width {
            Width::Mask => (Some((Gpr::R9, 0)), part),
            // All lanes of a constant are equal.
            _ if constant => (None, 0),
            Width::Word => (Some((Gpr::Rcx, 0)), part * 32),
            Width::Double => (Some((Gpr::Rcx, 1)), part * 32),
        };
        Rm::Memory(Address { base, index, offset: units + offset })
    }

    /// A register with the value of a vector.
    pub(super) fn read(&mut self, slot: u32, width: Width, part: u8) -> u8 {
        let key = Key { slot, part };
        if let Some(&register) = self.pinned.get(&key) {
            return self.lock(register);
        }
        let place = self.registers.places.get(&key).copied().unwrap_or_default();
        if let Some(register) = place.register {
            return self.lock(register);
        }
        let register = self.take();
        match place.scratch {
            Some(offset) => self.code.vex(x::MOVUPS_LOAD, register, 0, stack(offset), None),
            None => {
                let home = self.home(key, width);
                self.fetch(register, home, width);
            }
        }
        self.hold(key, register);
        register
    }

    /// Loads a vector from its slot.
    pub(super) fn fetch(&mut self, register: u8, home: Rm, width: Width) {
        if width == Width::Mask {
            self.code.vex(x::PBROADCASTB, register, 0, home, None);
            self.select_bits(register, 0);
        } else {
            self.code.vex(x::MOVUPS_LOAD, register, 0, home, None);
        }
    }

    /// Makes each lane all ones if its bit, of part `part`, is set in all lanes.
    pub(super) fn select_bits(&mut self, register: u8, part: u8) {
        let bits = self.code.constant(core::array::from_fn(|n| 1 << (n + 8 * usize::from(part))));
        self.code.vex(x::PAND, register, register, bits, None);
        self.code.vex(x::PCMPEQD, register, register, bits, None);
    }

    pub(super) fn hold(&mut self, key: Key, register: u8) {
        self.registers.held[usize::from(register)] = Some(key);
        self.registers.places.entry(key).or_default().register = Some(register);
    }

    /// The value of a vector, in memory if this is its last use.
    pub(super) fn operand(&mut self, slot: u32, width: Width, part: u8) -> Rm {
        let key = Key { slot, part };
        let place = self.registers.places.get(&key).copied().unwrap_or_default();
        let inside = place.register.is_some() || self.pinned.contains_key(&key);
        let written = self.run.writes(slot);
        let last = self.next_read(slot, self.at + 1) > self.run.insts.len();
        let once = last && !written || slot & CONST != 0;
        if !inside && width != Width::Mask && once && place.scratch.is_none() && !place.stale {
            return self.home(key, width);
        }
        Rm::Reg(self.read(slot, width, part))
    }

    /// A register for the last step of the current instruction, which may read the register too.
    pub(super) fn target(&mut self, part: u8) -> u8 {
        let i = &self.run.insts[self.at];
        match self.pinned.get(&Key { slot: i.d, part }) {
            Some(&register) if i.guard == NONE => self.lock(register),
            _ => self.take(),
        }
    }

    /// Makes a register the value of a part of the destination of the current instruction.
    pub(super) fn define(&mut self, part: u8, mut register: u8) {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        if matches!(form.nans, Nans::Number | Nans::ExactNumber) && self.run.canonical[self.at] {
            register = self.canonical(register);
        }
        if i.guard != NONE {
            let lanes = self.guard(i.guard, form.d, part);
            let old = self.read(i.d, form.d, part);
            let (yes, no) = if i.has(flag::NOT) { (old, register) } else { (register, old) };
            let to = self.take();
            self.blend(to, no, yes, lanes);
            register = to;
        }
        let key = Key { slot: i.d, part };
        if let Some(&pinned) = self.pinned.get(&key) {
            if pinned != register {
                self.code.vex(x::MOVAPS, pinned, 0, Rm::Reg(register), None);
            }
            return;
        }
        if let Some(old) = self.registers.places.get(&key).and_then(|place| place.register) {
            self.registers.held[usize::from(old)] = None;
        }
        self.registers.places.insert(key, VectorPlace { register: None, scratch: None, stale: true });
        self.hold(key, register);
        if self.run.carried(i.d) {
            self.save(key, register);
        }
    }

    /// Predicate lanes, as wide as the lanes of a part.
    pub(super) fn guard(&mut self, slot: u32, width: Width, part: u8) -> u8 {
        if width == Width::Double {
            let words = self.read(slot, Width::Mask, part / 2);
            return self.extend(x::PMOVSXDQ, words, part & 1);
        }
        self.read(slot, Width::Mask, part)
    }

    /// Extends four of eight words to doubles.
    pub(super) fn extend(&mut self, op: Vex, words: u8, half: u8) -> u8 {
        let to = self.take();
        if half == 0 {
            self.code.vex(op, to, 0, Rm::Reg(words), None);
        } else {
            self.code.vex(x::EXTRACTI128, words, 0, Rm::Reg(to), Some(1));
            self.code.vex(op, to, 0, Rm::Reg(to), None);
        }
        to
    }

    pub(super) fn blend(&mut self, to: u8, no: u8, yes: u8, lanes: u8) {
        self.code.vex(x::BLENDVPS, to, no, Rm::Reg(yes), Some(lanes << 4));
    }

    /// Replaces NaNs by the canonical one.
    pub(super) fn canonical(&mut self, register: u8) -> u8 {
        let (lanes, to) = (self.take(), self.take());
        self.code.vex(x::CMPPS, lanes, register, Rm::Reg(register), Some(3));
        let nan = self.all(NAN32);
        self.code.vex(x::BLENDVPS, to, register, nan, Some(lanes << 4));
        to
    }

    pub(super) fn all(&mut self, word: u32) -> Rm {
        self.code.constant([word; 8])
    }

    pub(super) fn all_doubles(&mut self, double: u64) -> Rm {
        let (low, high) = ((double & 0xffff_ffff) as u32, (double >> 32) as u32);
        self.code.constant([low, high, low, high, low, high, low, high])
    }

    /// Frees what the current instruction no longer needs.
    pub(super) fn settle(&mut self) {
        self.registers.locked = 0;
        for r in 0..16usize {
            let Some(key) = self.registers.held[r] else { continue };
            if self.next_read(key.slot, self.at + 1) == usize::MAX {
                self.registers.held[r] = None;
                self.registers.places.entry(key).or_default().register = None;
            }
        }
    }
}
