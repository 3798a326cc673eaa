//! The machine code of a run: groups of lanes one after the other, values in vector registers between instructions.
//!
//! Registers: `rdi` the frame, `rsi` the constants, `rdx` the [`super::Call`], `rcx` the offset of the group in a slot of words, `r9` the
//! offset in a predicate, `r10` the lanes of the group that run, `r11` the budget; `rax` and `r8` hold what is used at once.

use std::collections::HashMap;

use super::encode::{self as x, Address, Code, Condition, Gpr, Label, Rm, Vex, shift};
use super::form::{Form, Nans, Width, number_test};
use super::plan::Run;
use crate::exec::alu::logic;
use crate::exec::num::{self, NAN32};
use crate::ir::{Inst, Lanewise, Op, flag};
use crate::regs::{CONST, NONE};

/// Vectors that may wait on the stack; together less than a page.
const MAX_SCRATCH: i32 = 100;
/// Bytes on the stack for the shapes of the addresses of two parts of [`super::plan::MAX_BASES`] slots.
const SHAPES: i32 = 2 * 16 * 8;
/// Registers that values of a loop may keep for all iterations.
const MAX_PINNED: usize = 10;

/// One vector of a slot: eight words, four of the doubles, or a predicate as eight words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    slot: u32,
    part: u8,
}

/// Where the value of a key is.
#[derive(Clone, Copy, Default)]
struct Place {
    register: Option<u8>,
    /// Offset on the stack of an up-to-date copy.
    scratch: Option<i32>,
    /// The slot itself is out of date.
    stale: bool,
}

#[derive(Clone)]
struct Registers {
    held: [Option<Key>; 16],
    places: HashMap<Key, Place>,
    /// Registers in use by the instruction that is translated.
    locked: u16,
}

struct Emitter<'a, 'r> {
    code: &'a mut Code,
    run: &'a Run<'r>,
    /// Vectors of words of a group.
    unroll: u8,
    registers: Registers,
    pinned: HashMap<Key, u8>,
    /// The stack place of each key that has one.
    scratch: HashMap<Key, i32>,
    /// The instruction that is translated, and the part of it.
    at: usize,
    part: u8,
    failed: bool,
}

/// Appends the function of a run. Returns false if it has no translation; the code is then unusable.
pub(super) fn emit(code: &mut Code, run: &Run<'_>) -> bool {
    let carried: Vec<(u32, Width)> =
        run.inputs.iter().copied().filter(|(slot, _)| run.carried(*slot)).collect();
    let vectors: usize = carried.iter().map(|(_, width)| if *width == Width::Double { 2 } else { 1 }).sum();
    // An iteration of a loop waits for its own results; two groups at once hide that.
    let narrow = run.forms.iter().all(|form| form.d != Width::Double);
    let unroll = if narrow && vectors * 2 <= MAX_PINNED { 2 } else { 1 };
    let mut emitter = Emitter {
        code,
        run,
        unroll,
        registers: Registers { held: [None; 16], places: HashMap::new(), locked: 0 },
        pinned: HashMap::new(),
        scratch: HashMap::new(),
        at: 0,
        part: 0,
        failed: false,
    };
    emitter.function(&carried);
    !emitter.failed
}

impl Emitter<'_, '_> {
    // ---- registers ----

    fn parts(&self, width: Width) -> core::ops::Range<u8> {
        0..if width == Width::Double { 2 * self.unroll } else { self.unroll }
    }

    /// The next position that reads a slot, from this one on.
    fn next_read(&self, slot: u32, from: usize) -> usize {
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
    fn next_use(&self, key: Key) -> usize {
        let passed = self.unroll == 2 && key.part < self.part;
        self.next_read(key.slot, self.at + usize::from(passed))
    }

    /// Takes a register for the current instruction.
    fn take(&mut self) -> u8 {
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
    fn spill(&mut self, key: Key, register: u8) {
        let place = self.registers.places.entry(key).or_default();
        place.register = None;
        let copied = place.scratch.is_some() || !place.stale;
        if !copied && self.next_use(key) != usize::MAX {
            self.save(key, register);
        }
    }

    /// Copies a register to the stack place of a key.
    fn save(&mut self, key: Key, register: u8) {
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

    fn lock(&mut self, register: u8) -> u8 {
        self.registers.locked |= 1 << register;
        register
    }

    /// The place of a vector in the frame or in the constants.
    fn home(&mut self, key: Key, width: Width) -> Rm {
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
    fn read(&mut self, slot: u32, width: Width, part: u8) -> u8 {
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
    fn fetch(&mut self, register: u8, home: Rm, width: Width) {
        if width == Width::Mask {
            self.code.vex(x::PBROADCASTB, register, 0, home, None);
            self.select_bits(register, 0);
        } else {
            self.code.vex(x::MOVUPS_LOAD, register, 0, home, None);
        }
    }

    /// Makes each lane all ones if its bit, of part `part`, is set in all lanes.
    fn select_bits(&mut self, register: u8, part: u8) {
        let bits = self.code.constant(core::array::from_fn(|n| 1 << (n + 8 * usize::from(part))));
        self.code.vex(x::PAND, register, register, bits, None);
        self.code.vex(x::PCMPEQD, register, register, bits, None);
    }

    fn hold(&mut self, key: Key, register: u8) {
        self.registers.held[usize::from(register)] = Some(key);
        self.registers.places.entry(key).or_default().register = Some(register);
    }

    /// The value of a vector, in memory if this is its last use.
    fn operand(&mut self, slot: u32, width: Width, part: u8) -> Rm {
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
    fn target(&mut self, part: u8) -> u8 {
        let i = &self.run.insts[self.at];
        match self.pinned.get(&Key { slot: i.d, part }) {
            Some(&register) if i.guard == NONE => self.lock(register),
            _ => self.take(),
        }
    }

    /// Makes a register the value of a part of the destination of the current instruction.
    fn define(&mut self, part: u8, mut register: u8) {
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
        self.registers.places.insert(key, Place { register: None, scratch: None, stale: true });
        self.hold(key, register);
        if self.run.carried(i.d) {
            self.save(key, register);
        }
    }

    /// Predicate lanes, as wide as the lanes of a part.
    fn guard(&mut self, slot: u32, width: Width, part: u8) -> u8 {
        if width == Width::Double {
            let words = self.read(slot, Width::Mask, part / 2);
            return self.extend(x::PMOVSXDQ, words, part & 1);
        }
        self.read(slot, Width::Mask, part)
    }

    /// Extends four of eight words to doubles.
    fn extend(&mut self, op: Vex, words: u8, half: u8) -> u8 {
        let to = self.take();
        if half == 0 {
            self.code.vex(op, to, 0, Rm::Reg(words), None);
        } else {
            self.code.vex(x::EXTRACTI128, words, 0, Rm::Reg(to), Some(1));
            self.code.vex(op, to, 0, Rm::Reg(to), None);
        }
        to
    }

    fn blend(&mut self, to: u8, no: u8, yes: u8, lanes: u8) {
        self.code.vex(x::BLENDVPS, to, no, Rm::Reg(yes), Some(lanes << 4));
    }

    /// Replaces NaNs by the canonical one.
    fn canonical(&mut self, register: u8) -> u8 {
        let (lanes, to) = (self.take(), self.take());
        self.code.vex(x::CMPPS, lanes, register, Rm::Reg(register), Some(3));
        let nan = self.all(NAN32);
        self.code.vex(x::BLENDVPS, to, register, nan, Some(lanes << 4));
        to
    }

    fn all(&mut self, word: u32) -> Rm {
        self.code.constant([word; 8])
    }

    fn all_doubles(&mut self, double: u64) -> Rm {
        let (low, high) = ((double & 0xffff_ffff) as u32, (double >> 32) as u32);
        self.code.constant([low, high, low, high, low, high, low, high])
    }

    /// Frees what the current instruction no longer needs.
    fn settle(&mut self) {
        self.registers.locked = 0;
        for r in 0..16usize {
            let Some(key) = self.registers.held[r] else { continue };
            if self.next_read(key.slot, self.at + 1) == usize::MAX {
                self.registers.held[r] = None;
                self.registers.places.entry(key).or_default().register = None;
            }
        }
    }

    // ---- the function ----

    fn function(&mut self, carried: &[(u32, Width)]) {
        let lanes = 8 * u32::from(self.unroll);
        let whole = (1u32 << lanes) - 1;
        // A frame aligned for vectors.
        self.code.raw(&[0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xe4, 0xe0]);
        self.code.raw(&[0x48, 0x81, 0xec]);
        self.code.raw(&(MAX_SCRATCH * 32 + SHAPES).to_le_bytes());
        let decline = self.code.label();
        self.check_addresses(decline);
        self.general(32, &[0x31], Gpr::Rcx, reg(Gpr::Rcx));
        self.general(32, &[0x31], Gpr::R9, reg(Gpr::R9));
        let (group, next) = (self.code.label(), self.code.label());
        self.code.bind(group);
        let load: &[u8] = if self.unroll == 1 { &[0x0f, 0xb6] } else { &[0x0f, 0xb7] };
        self.general(32, load, Gpr::R10, state(super::Call::MASK, true));
        self.general(32, &[0x85], Gpr::R10, reg(Gpr::R10));
        self.code.jump_if(Condition::Zero, next);
        if self.run.repeat.is_some() {
            self.looped(carried, next);
        } else {
            self.find_shapes();
            self.body();
            let partial = self.code.label();
            self.compare(Gpr::R10, whole);
            self.code.jump_if(Condition::Below, partial);
            let before = self.registers.clone();
            self.store(true);
            self.code.jump(next);
            self.code.bind(partial);
            self.registers = before;
            self.general(32, &[0x89], Gpr::R10, reg(Gpr::R8));
            self.store(false);
        }
        self.code.bind(next);
        self.add(Gpr::Rcx, 32 * u32::from(self.unroll));
        self.add(Gpr::R9, self.unroll.into());
        self.compare(Gpr::R9, 4);
        self.code.jump_if(Condition::Below, group);
        self.general(32, &[0x31], Gpr::Eax, reg(Gpr::Eax));
        let end = self.code.label();
        self.code.bind(end);
        // vzeroupper; leave; ret
        self.code.raw(&[0xc5, 0xf8, 0x77, 0xc9, 0xc3]);
        self.code.bind(decline);
        // mov eax, 1
        self.code.raw(&[0xb8, 1, 0, 0, 0]);
        self.code.jump(end);
    }

    // ---- loads from shared memory ----

    /// Jumps to `decline` unless all lanes run and all their addresses are inside shared memory, and aligned.
    fn check_addresses(&mut self, decline: Label) {
        let bases = self.run.bases.clone();
        if bases.is_empty() {
            return;
        }
        self.code.general(32, &[0x81], 7, state(super::Call::MASK, false));
        self.code.raw(&(!0u32).to_le_bytes());
        self.code.jump_if(Condition::NotZero, decline);
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
            self.general(32, &[0x8b], Gpr::Eax, state(super::Call::SHARED_LEN, false));
            self.code.general(32, &[0x81], 5, reg(Gpr::Eax));
            self.code.raw(&(u32::try_from(most).unwrap_or(u32::MAX - 4) + 4).to_le_bytes());
            self.code.jump_if(Condition::Below, decline);
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
            self.code.jump_if(Condition::NotZero, decline);
        }
    }

    /// The place on the stack of the shape of the addresses in a part of a base: the address of the first lane, and 0 if all are
    /// equal, 1 if they are consecutive, else 2.
    fn shape(&self, base: usize, part: u8) -> i32 {
        let number = base * usize::from(self.unroll) + usize::from(part);
        MAX_SCRATCH * 32 + 16 * i32::try_from(number).unwrap_or(0)
    }

    /// Finds the shapes of the addresses of the group.
    fn find_shapes(&mut self) {
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
                    self.code.jump_if(Condition::NotZero, other);
                    self.put(at + 8, shape);
                    self.code.bind(other);
                }
                self.general(32, &[0x8b], Gpr::R8, home);
                self.general(64, &[0x03], Gpr::R8, state(super::Call::SHARED, false));
                self.general(64, &[0x89], Gpr::R8, stack(at));
            }
        }
    }

    fn put(&mut self, at: i32, value: u32) {
        self.code.general(32, &[0xc7], 0, stack(at));
        self.code.raw(&value.to_le_bytes());
    }

    fn load(&mut self, i: &Inst, part: u8) {
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
        self.code.jump_if(Condition::Above, scattered);
        self.code.jump_if(Condition::Zero, consecutive);
        self.code.vex(x::BROADCASTSS, to, 0, first, None);
        self.code.jump(done);
        self.code.bind(consecutive);
        self.code.vex(x::MOVUPS_LOAD, to, 0, first, None);
        self.code.jump(done);
        self.code.bind(scattered);
        let home = self.home(Key { slot: i.a, part }, Width::Word);
        self.code.vex(x::MOVUPS_LOAD, offsets, 0, home, None);
        self.code.vex(x::PCMPEQD, mask, mask, Rm::Reg(mask), None);
        self.general(64, &[0x8b], Gpr::R8, state(super::Call::SHARED, false));
        self.code.gather(to, mask, Gpr::R8, offsets, offset);
        self.code.bind(done);
        self.define(part, to);
    }

    fn general(&mut self, bits: u32, opcode: &[u8], register: Gpr, rm: Rm) {
        self.code.general(bits, opcode, register as u8, rm);
    }

    fn compare(&mut self, register: Gpr, with: u32) {
        self.code.general(32, &[0x81], 7, reg(register));
        self.code.raw(&with.to_le_bytes());
    }

    fn add(&mut self, register: Gpr, value: u32) {
        self.code.general(32, &[0x81], 0, reg(register));
        self.code.raw(&value.to_le_bytes());
    }

    fn looped(&mut self, carried: &[(u32, Width)], next: Label) {
        self.general(32, &[0x8b], Gpr::R11, state(super::Call::BUDGET, false));
        let mut vectors = Vec::new();
        for &(slot, width) in carried {
            vectors.extend(self.parts(width).map(|part| (Key { slot, part }, width)));
        }
        // Those that are read most often keep a register.
        vectors.sort_by_key(|(key, _)| core::cmp::Reverse(self.run.reads.get(&key.slot).map_or(0, Vec::len)));
        for (n, &(key, width)) in vectors.iter().enumerate() {
            if n < MAX_PINNED {
                let register = self.take();
                let home = self.home(key, width);
                self.fetch(register, home, width);
                self.pinned.insert(key, register);
            } else {
                let register = self.read(key.slot, width, key.part);
                self.save(key, register);
                self.registers.places.entry(key).or_default().stale = true;
                self.forget();
            }
        }
        self.forget();
        let (head, again, leave) = (self.code.label(), self.code.label(), self.code.label());
        self.code.bind(head);
        let (guard, negated) = self.run.repeat.unwrap_or((NONE, false));
        self.body();
        self.at = self.run.insts.len();
        for part in (0..self.unroll).rev() {
            let lanes = self.read(guard, Width::Mask, part);
            let to = if part == 0 { Gpr::Eax } else { Gpr::R8 };
            self.code.vex(x::MOVMSKPS, to as u8, 0, Rm::Reg(lanes), None);
        }
        if self.unroll == 2 {
            // shl r8d, 8; or eax, r8d
            self.code.raw(&[0x41, 0xc1, 0xe0, 8]);
            self.general(32, &[0x09], Gpr::R8, reg(Gpr::Eax));
        }
        self.registers.locked = 0;
        if negated {
            // not eax
            self.code.raw(&[0xf7, 0xd0]);
        }
        self.general(32, &[0x21], Gpr::R10, reg(Gpr::Eax));
        self.general(32, &[0x39], Gpr::R10, reg(Gpr::Eax));
        self.code.jump_if(Condition::NotZero, leave);
        self.code.bind(again);
        // dec r11d
        self.code.raw(&[0x41, 0xff, 0xcb]);
        self.code.jump_if(Condition::Greater, head);
        // The budget is used up: the lanes that still run stop before the next iteration.
        let before = self.registers.clone();
        self.general(32, &[0x89], Gpr::R10, reg(Gpr::R8));
        self.store(false);
        let (bits, or): (u32, &[u8]) = if self.unroll == 1 { (8, &[0x08]) } else { (16, &[0x09]) };
        self.general(bits, or, Gpr::R10, state(super::Call::RUNNING, true));
        let done = self.code.label();
        self.code.jump(done);
        self.code.bind(leave);
        self.registers = before;
        // r8 = the lanes that leave, r10 = those that stay.
        self.general(32, &[0x89], Gpr::Eax, reg(Gpr::R8));
        self.code.raw(&[0x41, 0xf7, 0xd0]);
        self.general(32, &[0x21], Gpr::R10, reg(Gpr::R8));
        self.general(32, &[0x89], Gpr::Eax, reg(Gpr::R10));
        self.store(false);
        self.general(32, &[0x85], Gpr::R10, reg(Gpr::R10));
        self.code.jump_if(Condition::NotZero, again);
        self.code.bind(done);
        // The group with the most iterations decides what is left of the budget.
        self.general(32, &[0x39], Gpr::R11, state(super::Call::LEFT, false));
        let skip = self.code.label();
        self.code.jump_if(Condition::LessEqual, skip);
        self.general(32, &[0x89], Gpr::R11, state(super::Call::LEFT, false));
        self.code.bind(skip);
        self.code.jump(next);
    }

    /// Drops all values that are not pinned: their copies elsewhere are up to date.
    fn forget(&mut self) {
        self.registers.locked = 0;
        self.registers.held = [None; 16];
        for place in self.registers.places.values_mut() {
            place.register = None;
        }
    }

    fn body(&mut self) {
        for at in 0..self.run.insts.len() {
            self.at = at;
            let (i, form) = (&self.run.insts[at], self.run.forms[at]);
            for part in 0..self.unroll {
                self.part = part;
                self.instruction(i, form, part);
                self.registers.locked = 0;
            }
            self.part = 0;
            self.settle();
            if self.failed {
                return;
            }
        }
        self.at = self.run.insts.len();
    }

    /// Stores the results: of all lanes, or of those in `r8`.
    fn store(&mut self, whole: bool) {
        let results = self.run.results.clone();
        let masks: Vec<u8> = if whole {
            Vec::new()
        } else {
            (0..self.unroll)
                .map(|part| {
                    let lanes = self.take();
                    self.code.vmovd(lanes, Gpr::R8);
                    self.code.vex(x::PBROADCASTD, lanes, 0, Rm::Reg(lanes), None);
                    self.select_bits(lanes, part);
                    lanes
                })
                .collect()
        };
        let kept = self.registers.locked;
        for &(slot, width) in results.iter().filter(|(_, width)| *width != Width::Mask) {
            for part in self.parts(width) {
                let mut value = self.read(slot, width, part);
                if self.run.late.contains(&slot) {
                    value = self.canonical(value);
                }
                let home = self.home(Key { slot, part }, width);
                if !whole {
                    let lanes = match width {
                        Width::Double => {
                            let words = masks[usize::from(part / 2)];
                            self.extend(x::PMOVSXDQ, words, part & 1)
                        }
                        _ => masks[usize::from(part)],
                    };
                    let to = self.take();
                    self.code.vex(x::MOVUPS_LOAD, to, 0, home, None);
                    self.blend(to, to, value, lanes);
                    value = to;
                }
                self.code.vex(x::MOVUPS_STORE, value, 0, home, None);
                self.registers.locked = kept;
            }
        }
        for part in 0..self.unroll {
            for &(slot, width) in results.iter().filter(|(_, width)| *width == Width::Mask) {
                let value = self.read(slot, width, part);
                self.code.vex(x::MOVMSKPS, Gpr::Eax as u8, 0, Rm::Reg(value), None);
                let home = self.home(Key { slot, part }, width);
                if whole {
                    self.general(8, &[0x88], Gpr::Eax, home);
                } else {
                    // Exchanges the bits of the lanes: old ^ ((old ^ new) & lanes).
                    self.general(8, &[0x32], Gpr::Eax, home);
                    self.general(32, &[0x21], Gpr::R8, reg(Gpr::Eax));
                    self.general(8, &[0x30], Gpr::Eax, home);
                }
                self.registers.locked = kept;
            }
            // shr r8d, 8
            self.code.raw(&[0x41, 0xc1, 0xe8, 8]);
        }
        self.registers.locked = 0;
    }

    // ---- instructions ----

    /// A source, by its number, in a register.
    fn source(&mut self, n: usize, part: u8) -> u8 {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        match form.sources(i).nth(n) {
            Some((slot, width)) => self.read(slot, width, part),
            None => {
                self.failed = true;
                0
            }
        }
    }

    /// A source, by its number, in a register or in memory.
    fn source_rm(&mut self, n: usize, part: u8) -> Rm {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        match form.sources(i).nth(n) {
            Some((slot, width)) => self.operand(slot, width, part),
            None => {
                self.failed = true;
                Rm::Reg(0)
            }
        }
    }

    /// `d = op(a, b)` on one vector.
    fn step(&mut self, op: Vex, a: u8, b: Rm) -> u8 {
        let to = self.take();
        self.code.vex(op, to, a, b, None);
        to
    }

    /// `d = op(b)` on one vector.
    fn step1(&mut self, op: Vex, b: Rm) -> u8 {
        self.step(op, 0, b)
    }

    fn shifted(&mut self, op: Vex, kind: u8, a: u8, by: u8) -> u8 {
        let to = self.take();
        // The destination is in the second field.
        self.code.vex(op, kind, to, Rm::Reg(a), Some(by));
        to
    }

    /// Writes the last step of the instruction.
    fn last(&mut self, part: u8, op: Vex, a: u8, b: Rm, immediate: Option<u8>) {
        let to = self.target(part);
        self.code.vex(op, to, a, b, immediate);
        self.define(part, to);
    }

    /// Flushes subnormal numbers to zero.
    fn flush(&mut self, a: u8) -> u8 {
        let exponent = self.all(0x7f80_0000);
        let t = self.step(x::PAND, a, exponent);
        let zero = self.all(0);
        self.code.vex(x::PCMPEQD, t, t, zero, None);
        self.code.vex(x::SHIFTD, shift::RIGHT, t, Rm::Reg(t), Some(1));
        self.code.vex(x::PANDN, t, t, Rm::Reg(a), None);
        t
    }

    fn flush_if(&mut self, a: u8, i: &Inst) -> u8 {
        if i.has(flag::FTZ) { self.flush(a) } else { a }
    }

    /// Frees the registers of one half of doubles before the other; those with values keep them.
    fn next_half(&mut self, keep: &[u8]) {
        self.registers.locked = keep.iter().fold(0, |locked, r| locked | 1 << r);
    }

    /// The parts of doubles that belong to a part of words.
    fn doubles(part: u8) -> [u8; 2] {
        [2 * part, 2 * part + 1]
    }

    /// Joins two vectors of 64-bit lanes to their low words.
    fn join(&mut self, part: u8, low: u8, high: Rm) {
        let t = self.take();
        self.code.vex(x::SHUFPS, t, low, high, Some(0x88));
        self.last(part, x::PERMQ, 0, Rm::Reg(t), Some(0xd8));
    }

    #[expect(clippy::too_many_lines, reason = "one table of all instructions")]
    fn instruction(&mut self, i: &Inst, form: Form, part: u8) {
        use Lanewise as L;
        if i.op == Op::Load {
            return self.load(i, part);
        }
        let operation = i.handler.operation();
        match operation {
            L::Mov32 => {
                let a = self.source_rm(0, part);
                self.last(part, x::MOVUPS_LOAD, 0, a, None);
            }
            L::Mov64 => {
                for p in Self::doubles(part) {
                    self.next_half(&[]);
                    let a = self.source_rm(0, p);
                    self.last(p, x::MOVUPS_LOAD, 0, a, None);
                }
            }
            L::Not32 => self.with_constant(part, x::PXOR, [!0; 8]),
            L::NegF32 => self.with_constant(part, x::PXOR, [0x8000_0000; 8]),
            L::AbsF32 => self.with_constant(part, x::PAND, [0x7fff_ffff; 8]),
            L::Mask16 => self.with_constant(part, x::PAND, [0xffff; 8]),
            L::Mask8 => self.with_constant(part, x::PAND, [0xff; 8]),
            L::Not64 => self.with_constant(part, x::PXOR, [!0; 8]),
            L::NegF64 => self.with_constant(part, x::PXOR, [0, 1 << 31, 0, 1 << 31, 0, 1 << 31, 0, 1 << 31]),
            L::AbsF64 => {
                self.with_constant(part, x::PAND, [!0, !0 >> 1, !0, !0 >> 1, !0, !0 >> 1, !0, !0 >> 1]);
            }
            L::AbsI32 => self.unary(part, x::PABSD, None),
            L::NegI32 => {
                let zero = self.all(0);
                let zero = self.step1(x::MOVUPS_LOAD, zero);
                let a = self.source_rm(0, part);
                self.last(part, x::PSUBD, zero, a, None);
            }
            L::NegI64 => {
                for p in Self::doubles(part) {
                    self.next_half(&[]);
                    let zero = self.all(0);
                    let zero = self.step1(x::MOVUPS_LOAD, zero);
                    let a = self.source_rm(0, p);
                    self.last(p, x::PSUBQ, zero, a, None);
                }
            }
            L::Sext16 => {
                let a = self.source(0, part);
                let t = self.shifted(x::SHIFTD, shift::LEFT, a, 16);
                let t = self.shifted(x::SHIFTD, shift::ARITHMETIC, t, 16);
                self.define(part, t);
            }
            L::F32FromS32 => self.unary(part, x::CVTDQ2PS, None),
            L::F32FromU32 => {
                // Both halves as exact numbers; their sum rounds once.
                let a = self.source(0, part);
                let low = self.all(0xffff);
                let low = self.step(x::PAND, a, low);
                self.code.vex(x::CVTDQ2PS, low, 0, Rm::Reg(low), None);
                let high = self.shifted(x::SHIFTD, shift::RIGHT, a, 16);
                self.code.vex(x::CVTDQ2PS, high, 0, Rm::Reg(high), None);
                let scale = self.all(65536f32.to_bits());
                self.code.vex(x::MULPS, high, high, scale, None);
                self.last(part, x::ADDPS, high, Rm::Reg(low), None);
            }
            L::S32FromF32Rz => self.integer(part, x::CVTTPS2DQ),
            L::S32FromF32Rn => self.integer(part, x::CVTPS2DQ),
            L::SatF32 => {
                let a = self.source(0, part);
                let a = self.flush_if(a, i);
                let zero = self.all(0);
                let t = self.step(x::MAXPS, a, zero);
                let one = self.all(1f32.to_bits());
                self.last(part, x::MINPS, t, one, None);
            }
            L::SqrtF32 => self.unary(part, x::SQRTPS, None),
            L::FloorF32 => self.unary(part, x::ROUNDPS, Some(9)),
            L::CeilF32 => self.unary(part, x::ROUNDPS, Some(10)),
            L::TruncF32 => self.unary(part, x::ROUNDPS, Some(11)),
            L::RintF32 => self.unary(part, x::ROUNDPS, Some(8)),
            L::RcpF32 | L::RcpApprox => {
                // The quotient of f64 that the interpreter rounds is the same number: it has more than twice the bits.
                let ftz = operation == L::RcpApprox && i.has(flag::FTZ);
                let one = self.all(1f32.to_bits());
                let one = self.step1(x::MOVUPS_LOAD, one);
                let a = self.source(0, part);
                let a = if ftz { self.flush(a) } else { a };
                let t = self.step(x::DIVPS, one, Rm::Reg(a));
                let t = if ftz { self.flush(t) } else { t };
                self.define(part, t);
            }
            L::SqrtApprox => {
                let a = self.source(0, part);
                let a = self.flush_if(a, i);
                let t = self.step1(x::SQRTPS, Rm::Reg(a));
                let t = self.flush_if(t, i);
                self.define(part, t);
            }
            L::RsqrtApprox => self.through(i, part, |e, x_| {
                let one = e.all_doubles(1f64.to_bits());
                let one = e.step1(x::MOVUPS_LOAD, one);
                let t = e.step1(x::SQRTPD, Rm::Reg(x_));
                e.code.vex(x::DIVPD, t, one, Rm::Reg(t), None);
                t
            }),
            L::Ex2 => self.through(i, part, Self::exp2),
            L::Lg2 => self.through(i, part, Self::log2),
            L::SqrtF64 => self.unary(part, x::SQRTPD, None),
            L::Low32 => {
                let low = self.source(0, 2 * part);
                let high = self.source_rm(0, 2 * part + 1);
                self.join(part, low, high);
            }
            L::F32FromF64 => {
                let halves = Self::doubles(part).map(|p| {
                    let a = self.source(0, p);
                    self.step1(x::CVTPD2PS, Rm::Reg(a))
                });
                self.last(part, x::INSERTI128, halves[0], Rm::Reg(halves[1]), Some(1));
            }
            L::Zext32 => self.widen(part, x::PMOVZXDQ),
            L::Sext32 => self.widen(part, x::PMOVSXDQ),
            L::F64FromS32 => self.widen(part, x::CVTDQ2PD),
            L::F64FromF32 => self.widen(part, x::CVTPS2PD),
            L::F64FromU32 => {
                let a = self.source(0, part);
                for half in [0, 1] {
                    self.next_half(&[a]);
                    let t = self.extend(x::PMOVZXDQ, a, half);
                    let magic = self.all_doubles(0x4330_0000_0000_0000);
                    self.code.vex(x::POR, t, t, magic, None);
                    self.code.vex(x::SUBPD, t, t, magic, None);
                    self.define(2 * part + half, t);
                }
            }
            L::Add32 => self.binary(part, x::PADDD),
            L::Sub32 => self.binary(part, x::PSUBD),
            L::Mul32 => self.binary(part, x::PMULLD),
            L::And32 => self.binary(part, x::PAND),
            L::Or32 => self.binary(part, x::POR),
            L::Xor32 => self.binary(part, x::PXOR),
            L::Shl32 => self.binary(part, x::PSLLVD),
            L::ShrU32 => self.binary(part, x::PSRLVD),
            L::ShrS32 => self.binary(part, x::PSRAVD),
            L::MinU32 => self.binary(part, x::PMINUD),
            L::MinS32 => self.binary(part, x::PMINSD),
            L::MaxU32 => self.binary(part, x::PMAXUD),
            L::MaxS32 => self.binary(part, x::PMAXSD),
            L::AddF32 => self.binary(part, x::ADDPS),
            L::SubF32 => self.binary(part, x::SUBPS),
            L::MulF32 => self.binary(part, x::MULPS),
            L::DivF32 => self.binary(part, x::DIVPS),
            L::Add64 => self.binary(part, x::PADDQ),
            L::Sub64 => self.binary(part, x::PSUBQ),
            L::And64 => self.binary(part, x::PAND),
            L::Or64 => self.binary(part, x::POR),
            L::Xor64 => self.binary(part, x::PXOR),
            L::AddF64 => self.binary(part, x::ADDPD),
            L::SubF64 => self.binary(part, x::SUBPD),
            L::MulF64 => self.binary(part, x::MULPD),
            L::DivF64 => self.binary(part, x::DIVPD),
            L::AddF32Ftz => self.flushed(part, x::ADDPS),
            L::SubF32Ftz => self.flushed(part, x::SUBPS),
            L::MulF32Ftz => self.flushed(part, x::MULPS),
            L::DivApprox => self.divide_approx(i, part),
            L::MinF32 => self.extreme(part, x::MINPS, x::POR),
            L::MaxF32 => self.extreme(part, x::MAXPS, x::PAND),
            L::MulHiU32 => self.high_product(part, x::PMULUDQ),
            L::MulHiS32 => self.high_product(part, x::PMULDQ),
            L::Mul64 => {
                for p in Self::doubles(part) {
                    self.next_half(&[]);
                    let (a, b) = (self.source(0, p), self.source(1, p));
                    let t = self.product(a, b);
                    self.define(p, t);
                }
            }
            L::MadLo64 => {
                for p in Self::doubles(part) {
                    self.next_half(&[]);
                    let (a, b) = (self.source(0, p), self.source(1, p));
                    let t = self.product(a, b);
                    let c = self.source_rm(2, p);
                    self.last(p, x::PADDQ, t, c, None);
                }
            }
            L::MulWideU32 | L::MulWideS32 | L::MadWideU32 | L::MadWideS32 => {
                let signed = matches!(operation, L::MulWideS32 | L::MadWideS32);
                let (a, b) = (self.source(0, part), self.source(1, part));
                for half in [0, 1] {
                    self.next_half(&[a, b]);
                    // Only the low word of each lane counts.
                    let (x_, y) = (self.extend(x::PMOVZXDQ, a, half), self.extend(x::PMOVZXDQ, b, half));
                    let op = if signed { x::PMULDQ } else { x::PMULUDQ };
                    self.code.vex(op, x_, x_, Rm::Reg(y), None);
                    if matches!(operation, L::MadWideU32 | L::MadWideS32) {
                        let c = self.source_rm(2, 2 * part + half);
                        self.code.vex(x::PADDQ, x_, x_, c, None);
                    }
                    self.define(2 * part + half, x_);
                }
            }
            L::Shl64 | L::ShrU64 => {
                let op = if operation == L::Shl64 { x::PSLLVQ } else { x::PSRLVQ };
                let by = self.source(1, part);
                for half in [0, 1] {
                    self.next_half(&[by]);
                    let by = self.extend(x::PMOVZXDQ, by, half);
                    let a = self.source(0, 2 * part + half);
                    self.last(2 * part + half, op, a, Rm::Reg(by), None);
                }
            }
            L::Pack32 => {
                let (a, b) = (self.source(0, part), self.source(1, part));
                for half in [0, 1] {
                    self.next_half(&[a, b]);
                    let low = self.extend(x::PMOVZXDQ, a, half);
                    let high = self.extend(x::PMOVZXDQ, b, half);
                    self.code.vex(x::SHIFTQ, shift::LEFT, high, Rm::Reg(high), Some(32));
                    self.last(2 * part + half, x::POR, low, Rm::Reg(high), None);
                }
            }
            L::Pack16 => {
                let (a, b) = (self.source(0, part), self.source(1, part));
                let low = self.all(0xffff);
                let low = self.step(x::PAND, a, low);
                let high = self.shifted(x::SHIFTD, shift::LEFT, b, 16);
                self.last(part, x::POR, low, Rm::Reg(high), None);
            }
            L::CopySign32 | L::CopySign64 => {
                let doubles = form.d == Width::Double;
                let parts = if doubles { Self::doubles(part).to_vec() } else { vec![part] };
                for p in parts {
                    self.next_half(&[]);
                    let sign = if doubles { self.all_doubles(1 << 63) } else { self.all(1 << 31) };
                    let sign = self.step1(x::MOVUPS_LOAD, sign);
                    let (a, b) = (self.source(0, p), self.source_rm(1, p));
                    let magnitude = self.step(x::PANDN, sign, b);
                    self.code.vex(x::PAND, sign, sign, Rm::Reg(a), None);
                    self.last(p, x::POR, sign, Rm::Reg(magnitude), None);
                }
            }
            L::MadLo32 => {
                let (a, b) = (self.source(0, part), self.source_rm(1, part));
                let t = self.step(x::PMULLD, a, b);
                let c = self.source_rm(2, part);
                self.last(part, x::PADDD, t, c, None);
            }
            L::FmaF32 => self.fused(part, x::FMADD231PS),
            L::FmaF64 => {
                for p in Self::doubles(part) {
                    self.next_half(&[]);
                    self.fused(p, x::FMADD231PD);
                }
            }
            L::FmaF32Ftz => {
                let [a, b, c] = [0, 1, 2].map(|n| {
                    let a = self.source(n, part);
                    self.flush(a)
                });
                self.code.vex(x::FMADD231PS, c, a, Rm::Reg(b), None);
                let t = self.flush(c);
                self.define(part, t);
            }
            L::Lop3 => self.truth_table(i, part),
            L::ShfLWrap | L::ShfRWrap => {
                let (a, b, c) = (self.source(0, part), self.source(1, part), self.source(2, part));
                let low = self.all(31);
                let by = self.step(x::PAND, c, low);
                let word = self.all(32);
                let rest = self.step1(x::MOVUPS_LOAD, word);
                self.code.vex(x::PSUBD, rest, rest, Rm::Reg(by), None);
                // Left: b << n | a >> (32 - n). Right: a >> n | b << (32 - n). A shift by 32 gives zero.
                let (left, right) = if operation == L::ShfLWrap { (by, rest) } else { (rest, by) };
                let high = self.step(x::PSLLVD, b, Rm::Reg(left));
                let low = self.step(x::PSRLVD, a, Rm::Reg(right));
                self.last(part, x::POR, high, Rm::Reg(low), None);
            }
            L::Select => {
                let doubles = form.d == Width::Double;
                let parts = if doubles { Self::doubles(part).to_vec() } else { vec![part] };
                for p in parts {
                    self.next_half(&[]);
                    let lanes = self.guard(i.c, form.d, p);
                    let (yes, no) = if i.has(flag::NOT_C) { (1, 0) } else { (0, 1) };
                    let no = self.source(no, p);
                    let yes = self.source_rm(yes, p);
                    self.last(p, x::BLENDVPS, no, yes, Some(lanes << 4));
                }
            }
            L::Predicate => self.logic(i, part),
            operation if number_test(operation).is_some() => {
                let predicate = number_test(operation).map_or(0, |(_, predicate)| predicate);
                if self.width(0) == Width::Word {
                    let (a, b) = (self.source(0, part), self.source_rm(1, part));
                    self.last(part, x::CMPPS, a, b, Some(predicate));
                } else {
                    let halves = Self::doubles(part).map(|p| {
                        let (a, b) = (self.source(0, p), self.source_rm(1, p));
                        let t = self.take();
                        self.code.vex(x::CMPPD, t, a, b, Some(predicate));
                        t
                    });
                    self.join(part, halves[0], Rm::Reg(halves[1]));
                }
            }
            _ => self.compare_integers(operation, part),
        }
    }

    /// The width of a source.
    fn width(&self, n: usize) -> Width {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        form.sources(i).nth(n).map_or(Width::Word, |(_, width)| width)
    }

    /// The parts of the result that belong to a part of words.
    fn results(&self, part: u8) -> core::ops::Range<u8> {
        if self.run.forms[self.at].d == Width::Double { 2 * part..2 * part + 2 } else { part..part + 1 }
    }

    fn with_constant(&mut self, part: u8, op: Vex, constant: [u32; 8]) {
        for p in self.results(part) {
            self.next_half(&[]);
            let a = self.source(0, p);
            let constant = self.code.constant(constant);
            self.last(p, op, a, constant, None);
        }
    }

    fn unary(&mut self, part: u8, op: Vex, immediate: Option<u8>) {
        for p in self.results(part) {
            self.next_half(&[]);
            let a = self.source_rm(0, p);
            self.last(p, op, 0, a, immediate);
        }
    }

    fn binary(&mut self, part: u8, op: Vex) {
        for p in self.results(part) {
            self.next_half(&[]);
            let (a, b) = (self.source(0, p), self.source_rm(1, p));
            self.last(p, op, a, b, None);
        }
    }

    fn widen(&mut self, part: u8, op: Vex) {
        let a = self.source(0, part);
        for half in [0, 1] {
            self.next_half(&[a]);
            let t = self.extend(op, a, half);
            self.define(2 * part + half, t);
        }
    }

    fn flushed(&mut self, part: u8, op: Vex) {
        let (a, b) = (self.source(0, part), self.source(1, part));
        let (a, b) = (self.flush(a), self.flush(b));
        self.code.vex(op, a, a, Rm::Reg(b), None);
        let t = self.flush(a);
        self.define(part, t);
    }

    /// A saturating conversion to signed integers; a NaN becomes 0.
    fn integer(&mut self, part: u8, op: Vex) {
        let a = self.source(0, part);
        let value = self.step1(op, Rm::Reg(a));
        let limit = self.all(2_147_483_648f32.to_bits());
        let large = self.take();
        self.code.vex(x::CMPPS, large, a, limit, Some(0x1d));
        let top = self.all(0x7fff_ffff);
        self.code.vex(x::BLENDVPS, value, value, top, Some(large << 4));
        let number = self.take();
        self.code.vex(x::CMPPS, number, a, Rm::Reg(a), Some(7));
        self.last(part, x::PAND, value, Rm::Reg(number), None);
    }

    /// Minimum or maximum of numbers; a NaN gives way, and zeros are ordered by their signs.
    fn extreme(&mut self, part: u8, op: Vex, join: Vex) {
        let (a, b) = (self.source(0, part), self.source(1, part));
        let one = self.step(op, a, Rm::Reg(b));
        let other = self.step(op, b, Rm::Reg(a));
        self.code.vex(join, one, one, Rm::Reg(other), None);
        let nan = self.take();
        self.code.vex(x::CMPPS, nan, a, Rm::Reg(a), Some(3));
        self.blend(one, one, b, nan);
        self.code.vex(x::CMPPS, nan, b, Rm::Reg(b), Some(3));
        self.last(part, x::BLENDVPS, one, Rm::Reg(a), Some(nan << 4));
    }

    /// A function that is computed in f64 and rounded once.
    fn through(&mut self, i: &Inst, part: u8, f: impl Fn(&mut Self, u8) -> u8) {
        let a = self.source(0, part);
        let a = self.flush_if(a, i);
        let low = self.take();
        let mut to = low;
        for half in [0, 1] {
            self.registers.locked = 1 << a | 1 << low;
            let value = self.extend(x::CVTPS2PD, a, half);
            to = f(self, value);
            self.code.vex(x::CVTPD2PS, to, 0, Rm::Reg(to), None);
            if half == 0 {
                self.code.vex(x::MOVAPS, low, 0, Rm::Reg(to), None);
            }
        }
        self.code.vex(x::INSERTI128, to, low, Rm::Reg(to), Some(1));
        let to = self.flush_if(to, i);
        self.define(part, to);
    }

    /// A polynomial of four doubles: the coefficients from the highest down.
    fn polynomial(&mut self, coefficients: &[f64], at: u8) -> u8 {
        let first = self.all_doubles(coefficients[0].to_bits());
        let p = self.step1(x::MOVUPS_LOAD, first);
        for c in &coefficients[1..] {
            let c = self.all_doubles(c.to_bits());
            self.code.vex(x::MULPD, p, p, Rm::Reg(at), None);
            self.code.vex(x::ADDPD, p, p, c, None);
        }
        p
    }

    /// The same steps as [`num::ex2`].
    fn exp2(&mut self, value: u8) -> u8 {
        let least = self.all_doubles((-num::EXP2_LIMIT).to_bits());
        let most = self.all_doubles(num::EXP2_LIMIT.to_bits());
        let f = self.step(x::MAXPD, value, least);
        self.code.vex(x::MINPD, f, f, most, None);
        let whole = self.take();
        self.code.vex(x::ROUNDPD, whole, 0, Rm::Reg(f), Some(8));
        self.code.vex(x::SUBPD, f, f, Rm::Reg(whole), None);
        let p = self.polynomial(&num::EXP2, f);
        let bias = self.all_doubles(num::EXP2_BIAS.to_bits());
        self.code.vex(x::ADDPD, whole, whole, bias, None);
        self.code.vex(x::SHIFTQ, shift::LEFT, whole, Rm::Reg(whole), Some(52));
        self.code.vex(x::MULPD, p, p, Rm::Reg(whole), None);
        self.code.vex(x::CMPPD, f, value, Rm::Reg(value), Some(3));
        self.blend(p, p, value, f);
        p
    }

    /// The same steps as [`num::lg2`].
    fn log2(&mut self, value: u8) -> u8 {
        // k + 2048, so that it is never negative: the sum of the high word and this constant, shifted.
        let offset = self.all_doubles(u64::from((1u32 << 31).wrapping_sub(num::ROOT_HALF.cast_unsigned())));
        let k = self.shifted(x::SHIFTQ, shift::RIGHT, value, 32);
        self.code.vex(x::PADDD, k, k, offset, None);
        self.code.vex(x::SHIFTD, shift::RIGHT, k, Rm::Reg(k), Some(20));
        let m = self.shifted(x::SHIFTQ, shift::LEFT, k, 52);
        self.code.vex(x::PSUBQ, m, value, Rm::Reg(m), None);
        let sign = self.all_doubles(1 << 63);
        self.code.vex(x::PXOR, m, m, sign, None);
        let magic = self.all_doubles(0x4330_0000_0000_0000);
        self.code.vex(x::POR, k, k, magic, None);
        let magic = self.all_doubles((4_503_599_627_370_496.0f64 + 2048.0).to_bits());
        self.code.vex(x::SUBPD, k, k, magic, None);
        let one = self.all_doubles(1f64.to_bits());
        let z = self.step(x::SUBPD, m, one);
        self.code.vex(x::ADDPD, m, m, one, None);
        self.code.vex(x::DIVPD, z, z, Rm::Reg(m), None);
        self.code.vex(x::MULPD, m, z, Rm::Reg(z), None);
        let p = self.polynomial(&num::LOG2, m);
        self.code.vex(x::MULPD, p, z, Rm::Reg(p), None);
        self.code.vex(x::ADDPD, p, k, Rm::Reg(p), None);
        let infinity = self.all_doubles(f64::INFINITY.to_bits());
        self.code.vex(x::CMPPD, m, value, infinity, Some(0x11));
        self.blend(p, value, p, m);
        let zero = self.all(0);
        self.code.vex(x::CMPPD, m, value, zero, Some(0x1e));
        let nan = self.all_doubles(f64::NAN.to_bits());
        self.code.vex(x::MOVUPS_LOAD, z, 0, nan, None);
        self.blend(p, z, p, m);
        self.code.vex(x::CMPPD, m, value, zero, Some(0));
        let lowest = self.all_doubles(f64::NEG_INFINITY.to_bits());
        self.code.vex(x::BLENDVPS, p, p, lowest, Some(m << 4));
        p
    }

    fn divide_approx(&mut self, i: &Inst, part: u8) {
        let (a, b) = (self.source(0, part), self.source(1, part));
        let (a, b) = (self.flush_if(a, i), self.flush_if(b, i));
        let quotient = self.step(x::DIVPS, a, Rm::Reg(b));
        let quotient = self.flush_if(quotient, i);
        // A finite divisor above 2^126: a zero, or a NaN for an infinite dividend.
        let magnitude = self.all(0x7fff_ffff);
        let magnitude = self.step(x::PAND, b, magnitude);
        let low = self.all(0x7e80_0000);
        let large = self.step(x::PCMPGTD, magnitude, low);
        let infinity = self.all(0x7f80_0000);
        let infinity = self.step1(x::MOVUPS_LOAD, infinity);
        self.code.vex(x::PCMPGTD, magnitude, infinity, Rm::Reg(magnitude), None);
        self.code.vex(x::PAND, large, large, Rm::Reg(magnitude), None);
        let value = self.step(x::PXOR, a, Rm::Reg(b));
        let sign = self.all(0x8000_0000);
        self.code.vex(x::PAND, value, value, sign, None);
        let positive = self.all(0x7fff_ffff);
        let infinite = self.step(x::PAND, a, positive);
        self.code.vex(x::PCMPEQD, infinite, infinite, Rm::Reg(infinity), None);
        let nan = self.all(NAN32);
        self.code.vex(x::BLENDVPS, value, value, nan, Some(infinite << 4));
        self.last(part, x::BLENDVPS, quotient, Rm::Reg(value), Some(large << 4));
    }

    fn high_product(&mut self, part: u8, op: Vex) {
        let (a, b) = (self.source(0, part), self.source(1, part));
        let even = self.step(op, a, Rm::Reg(b));
        let odd_a = self.shifted(x::SHIFTQ, shift::RIGHT, a, 32);
        let odd_b = self.shifted(x::SHIFTQ, shift::RIGHT, b, 32);
        self.code.vex(op, odd_a, odd_a, Rm::Reg(odd_b), None);
        self.code.vex(x::SHIFTQ, shift::RIGHT, even, Rm::Reg(even), Some(32));
        self.last(part, x::PBLENDD, even, Rm::Reg(odd_a), Some(0xaa));
    }

    /// The low 64 bits of products of 64-bit lanes.
    fn product(&mut self, a: u8, b: u8) -> u8 {
        let t = self.shifted(x::SHIFTQ, shift::RIGHT, a, 32);
        self.code.vex(x::PMULUDQ, t, t, Rm::Reg(b), None);
        let u = self.shifted(x::SHIFTQ, shift::RIGHT, b, 32);
        self.code.vex(x::PMULUDQ, u, u, Rm::Reg(a), None);
        self.code.vex(x::PADDQ, t, t, Rm::Reg(u), None);
        self.code.vex(x::SHIFTQ, shift::LEFT, t, Rm::Reg(t), Some(32));
        self.code.vex(x::PMULUDQ, u, a, Rm::Reg(b), None);
        self.code.vex(x::PADDQ, t, t, Rm::Reg(u), None);
        t
    }

    fn fused(&mut self, part: u8, op: Vex) {
        // Of f64, the order of the operands decides which NaN is passed on.
        let over = (op == x::FMADD231PS).then(|| (0..2).find(|&n| self.dies(n, part))).flatten();
        if let Some(n) = over {
            let (to, other) = (self.source(n, part), self.source(1 - n, part));
            let c = self.source_rm(2, part);
            self.leave(n, part);
            self.code.vex(x::FMADD213PS, to, other, c, None);
            return self.define(part, to);
        }
        let (a, c) = (self.source(0, part), self.source_rm(2, part));
        let b = self.source_rm(1, part);
        let to = match c {
            Rm::Reg(c) if self.dies(2, part) => {
                self.leave(2, part);
                c
            }
            _ => {
                let to = self.take();
                self.code.vex(x::MOVUPS_LOAD, to, 0, c, None);
                to
            }
        };
        self.code.vex(op, to, a, b, None);
        self.define(part, to);
    }

    /// Takes the register of a source for the result: the value of the source ends.
    fn leave(&mut self, n: usize, part: u8) {
        if let Some(key) = self.key(n, part)
            && let Some(place) = self.registers.places.get_mut(&key)
            && let Some(register) = place.register.take()
        {
            self.registers.held[usize::from(register)] = None;
        }
    }

    /// The vector that a source is.
    fn key(&self, n: usize, part: u8) -> Option<Key> {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        form.sources(i).nth(n).map(|(slot, _)| Key { slot, part })
    }

    /// True if the current instruction may overwrite the register of a source: it is the last reader of its value, or writes it.
    fn dies(&self, n: usize, part: u8) -> bool {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        let Some((slot, _)) = form.sources(i).nth(n) else { return false };
        let pinned = self.pinned.contains_key(&Key { slot, part });
        let once = form.sources(i).filter(|(other, _)| *other == slot).count() == 1;
        let ends = slot == i.d || !pinned && self.next_read(slot, self.at + 1) == usize::MAX;
        once && i.guard == NONE && slot & CONST == 0 && ends
    }

    /// Combines three words by the truth table in the immediate.
    fn truth_table(&mut self, i: &Inst, part: u8) {
        let sources = [0, 1, 2].map(|n| self.source(n, part));
        let ones = self.all(!0);
        let ones = self.step1(x::MOVUPS_LOAD, ones);
        let zero = self.all(0);
        let sum = self.step1(x::MOVUPS_LOAD, zero);
        let term = self.take();
        for n in (0..8).filter(|n| i.imm >> n & 1 != 0) {
            let mut so_far = ones;
            for (k, &source) in sources.iter().enumerate() {
                if n >> (2 - k) & 1 != 0 {
                    self.code.vex(x::PAND, term, so_far, Rm::Reg(source), None);
                } else {
                    self.code.vex(x::PANDN, term, source, Rm::Reg(so_far), None);
                }
                so_far = term;
            }
            self.code.vex(x::POR, sum, sum, Rm::Reg(term), None);
        }
        self.define(part, sum);
    }

    fn logic(&mut self, i: &Inst, part: u8) {
        let ones = self.all(!0);
        let mut a = self.source(0, part);
        if i.has(flag::CLAMP) {
            a = self.step(x::PXOR, a, ones);
        }
        match i.sub {
            logic::MOV => return self.last(part, x::MOVAPS, 0, Rm::Reg(a), None),
            logic::AND | logic::OR | logic::XOR => {}
            _ => return self.last(part, x::PXOR, a, ones, None),
        }
        let mut b = self.source(1, part);
        if i.has(flag::NOT_C) {
            b = self.step(x::PXOR, b, ones);
        }
        let op = match i.sub {
            logic::AND => x::PAND,
            logic::OR => x::POR,
            _ => x::PXOR,
        };
        self.last(part, op, a, Rm::Reg(b), None);
    }

    fn compare_integers(&mut self, operation: Lanewise, part: u8) {
        use Lanewise as L;
        // Everything is an equality or `x > y`, perhaps with exchanged operands, perhaps negated.
        let (equal, swap, negate) = match operation {
            L::EqI32 | L::EqI64 => (true, false, false),
            L::NeI32 | L::NeI64 => (true, false, true),
            L::GtU32 | L::GtS32 | L::GtU64 | L::GtS64 => (false, false, false),
            L::LtU32 | L::LtS32 | L::LtU64 | L::LtS64 => (false, true, false),
            L::LeU32 | L::LeS32 | L::LeU64 | L::LeS64 => (false, false, true),
            L::GeU32 | L::GeS32 | L::GeU64 | L::GeS64 => (false, true, true),
            _ => {
                self.failed = true;
                return;
            }
        };
        let unsigned = matches!(
            operation,
            L::GtU32 | L::LtU32 | L::LeU32 | L::GeU32 | L::GtU64 | L::LtU64 | L::LeU64 | L::GeU64
        );
        let doubles = self.width(0) == Width::Double;
        let op = match (equal, doubles) {
            (true, false) => x::PCMPEQD,
            (true, true) => x::PCMPEQQ,
            (false, false) => x::PCMPGTD,
            (false, true) => x::PCMPGTQ,
        };
        let parts = if doubles { Self::doubles(part).to_vec() } else { vec![part] };
        let mut out = Vec::new();
        for p in parts {
            let (one, other) = if swap { (1, 0) } else { (0, 1) };
            let (mut a, mut b) = (self.source(one, p), self.source_rm(other, p));
            if unsigned {
                let sign = if doubles { self.all_doubles(1 << 63) } else { self.all(1 << 31) };
                let sign = self.step1(x::MOVUPS_LOAD, sign);
                a = self.step(x::PXOR, a, Rm::Reg(sign));
                b = Rm::Reg(self.step(x::PXOR, sign, b));
            }
            let t = self.step(op, a, b);
            if negate {
                let ones = self.all(!0);
                self.code.vex(x::PXOR, t, t, ones, None);
            }
            out.push(t);
        }
        match out[..] {
            [low, high] => self.join(part, low, Rm::Reg(high)),
            [t] => self.define(part, t),
            _ => self.failed = true,
        }
    }
}

fn reg(register: Gpr) -> Rm {
    Rm::Reg(register as u8)
}

fn stack(offset: i32) -> Rm {
    Rm::Memory(Address { base: Gpr::Rsp, index: None, offset })
}

/// A field of the call, perhaps at the place of the group.
fn state(offset: i32, group: bool) -> Rm {
    Rm::Memory(Address { base: Gpr::Rdx, index: group.then_some((Gpr::R9, 0)), offset })
}
