//! The machine code of a run: groups of lanes one after the other, values in vector registers between instructions.
//!
//! The folder above calls it with a run of a form that it has checked. It owns the use of registers. It must never emit an access to
//! an address that the code has not checked.
//!
//! Registers: `rdi` the frame, `rsi` the constants, `rdx` the [`RunCall`], `rcx` the offset of the group in a slot of words, `r9` the
//! offset in a predicate, `r10` the lanes of the group that run, `r11` the budget, `rbx` the [`RunScratch`](crate::code_pages::RunScratch)
//! of runs that access memory; `rax`, `r8`, `r12`, `r13` and `r14` hold values that are used at once.

mod access;
mod instructions;
mod registers;
mod regular;
mod sequences;

use std::collections::HashMap;

use access::{Miss, VARIANT_BASES};

use super::encode::{self as x, Address, CodeBuffer, Gpr, JumpCondition, Label, Rm};
use super::form::Width;
use super::plan::CompiledRun;
use crate::code_pages::{RunCall, RunEnd};
use crate::regs::NONE;

/// Vectors that may wait on the stack; together less than a page.
const MAX_SCRATCH: i32 = 100;
/// Registers that values of a loop may keep for all iterations: without accesses to memory, and with some.
const MAX_PINNED: [usize; 2] = [10, 6];

/// One vector of a slot: eight words, four of the doubles, or a predicate as eight words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    slot: u32,
    part: u8,
}

/// The place of the value of a key.
#[derive(Clone, Copy, Default)]
struct VectorPlace {
    register: Option<u8>,
    /// Offset on the stack of an up-to-date copy.
    scratch: Option<i32>,
    /// The slot itself is out of date.
    stale: bool,
}

#[derive(Clone)]
struct Registers {
    held: [Option<Key>; 16],
    places: HashMap<Key, VectorPlace>,
    /// Registers in use by the instruction that is translated.
    locked: u16,
}

struct Emitter<'a> {
    code: &'a mut CodeBuffer,
    run: &'a CompiledRun,
    /// Vectors of words of a group.
    unroll: u8,
    registers: Registers,
    pinned: HashMap<Key, u8>,
    /// The stack place of each key that has one.
    scratch: HashMap<Key, i32>,
    /// The instruction that is translated, and the part of it.
    at: usize,
    part: u8,
    /// The end of a run that the interpreter must execute.
    decline: Label,
    misses: Vec<Miss>,
    /// The groups of loads whose addresses are checked before the instructions; the shapes that the code is for, and the registers with the
    /// first addresses.
    checked: Vec<usize>,
    shapes: HashMap<usize, (u32, [Gpr; 2])>,
    /// The code is for whole warps with regular addresses.
    is_regular: bool,
    failed: bool,
}

/// Appends the function of a run. Returns false if it has no translation; the code is then unusable.
pub(super) fn emit(code: &mut CodeBuffer, run: &CompiledRun) -> bool {
    let carried: Vec<(u32, Width)> =
        run.inputs.iter().copied().filter(|(slot, _)| run.carried(*slot)).collect();
    let vectors: usize = carried.iter().map(|(_, width)| if *width == Width::Double { 2 } else { 1 }).sum();
    // An iteration of a loop waits for its own results; two groups at once hide that.
    let narrow = run.forms.iter().all(|form| form.d != Width::Double) && !run.accesses();
    let unroll = if narrow && vectors * 2 <= MAX_PINNED[0] { 2 } else { 1 };
    let decline = code.label();
    let mut emitter = Emitter {
        code,
        run,
        unroll,
        registers: Registers { held: [None; 16], places: HashMap::new(), locked: 0 },
        pinned: HashMap::new(),
        scratch: HashMap::new(),
        at: 0,
        part: 0,
        decline,
        misses: Vec::new(),
        checked: Vec::new(),
        shapes: HashMap::new(),
        is_regular: false,
        failed: false,
    };
    emitter.function(&carried);
    !emitter.failed
}

impl Emitter<'_> {
    fn function(&mut self, carried: &[(u32, Width)]) {
        let lanes = 8 * u32::from(self.unroll);
        let whole = (1u32 << lanes) - 1;
        let accesses = self.run.accesses();
        // push rbp; mov rbp, rsp
        self.code.raw(&[0x55, 0x48, 0x89, 0xe5]);
        if accesses {
            // push rbx, r12, r13, r14
            self.code.raw(&[0x53, 0x41, 0x54, 0x41, 0x55, 0x41, 0x56]);
            self.general(64, &[0x8b], Gpr::Rbx, state(RunCall::SCRATCH, false));
        }
        // A frame aligned for vectors.
        self.code.raw(&[0x48, 0x83, 0xe4, 0xe0, 0x48, 0x81, 0xec]);
        self.code.raw(&(MAX_SCRATCH * 32).to_le_bytes());
        let (irregular, done) = (self.code.label(), self.code.label());
        let is_regular = regular::is_applicable(self.run);
        if is_regular {
            self.regular(irregular, done);
        }
        self.code.bind(irregular);
        if accesses {
            self.copy_saved(false);
        }
        self.general(32, &[0x31], Gpr::Rcx, reg(Gpr::Rcx));
        self.general(32, &[0x31], Gpr::R9, reg(Gpr::R9));
        let (group, next) = (self.code.label(), self.code.label());
        self.code.bind(group);
        let load: &[u8] = if self.unroll == 1 { &[0x0f, 0xb6] } else { &[0x0f, 0xb7] };
        self.general(32, load, Gpr::R10, state(RunCall::MASK, true));
        self.general(32, &[0x85], Gpr::R10, reg(Gpr::R10));
        self.code.jump_if(JumpCondition::Zero, next);
        if self.run.repeat.is_some() {
            self.looped(carried, next);
        } else if is_regular {
            self.straight(whole, next);
        } else {
            self.variants(whole, next);
        }
        self.code.bind(next);
        self.add(Gpr::Rcx, 32 * u32::from(self.unroll));
        self.add(Gpr::R9, self.unroll.into());
        self.compare(Gpr::R9, 4);
        self.code.jump_if(JumpCondition::Below, group);
        self.change_memory();
        self.code.bind(done);
        self.general(32, &[0x31], Gpr::Eax, reg(Gpr::Eax));
        let (end, restore) = (self.code.label(), self.code.label());
        self.code.bind(end);
        // vzeroupper
        self.code.raw(&[0xc5, 0xf8, 0x77]);
        if accesses {
            // mov rbx, [rbp - 8]; the same of r12, r13, r14
            self.code.raw(&[0x48, 0x8b, 0x5d, 0xf8, 0x4c, 0x8b, 0x65, 0xf0]);
            self.code.raw(&[0x4c, 0x8b, 0x6d, 0xe8, 0x4c, 0x8b, 0x75, 0xe0]);
        }
        // leave; ret
        self.code.raw(&[0xc9, 0xc3]);
        self.end_misses(restore);
        self.code.bind(self.decline);
        // mov eax, RunEnd::DECLINED
        self.code.raw(&[0xb8]);
        self.code.raw(&RunEnd::DECLINED.to_le_bytes());
        self.code.bind(restore);
        if accesses {
            self.copy_saved(true);
        }
        self.code.jump(end);
    }

    /// The instructions for one group of lanes, once for each combination of the shapes of those addresses that most loads use.
    fn variants(&mut self, whole: u32, next: Label) {
        let checked = self.frequent_loads();
        for &group in &checked {
            self.check_load(group);
        }
        let start = self.registers.clone();
        self.checked.clone_from(&checked);
        let combinations = if checked.is_empty() { 0 } else { 1 << checked.len() };
        for combination in 0..combinations {
            let other = self.code.label();
            for (n, &group) in checked.iter().enumerate() {
                let (shape, bases) = (combination >> n & 1, VARIANT_BASES[n]);
                self.shapes.insert(group, (shape, bases));
                self.compare_shape(group, shape);
                self.code.jump_if(JumpCondition::NotZero, other);
                self.keep_first(group, bases[0]);
            }
            self.straight(whole, next);
            self.code.jump(next);
            self.code.bind(other);
            self.registers.clone_from(&start);
        }
        self.shapes.clear();
        self.straight(whole, next);
    }

    /// The instructions of a run without a loop for one group of lanes.
    fn straight(&mut self, whole: u32, next: Label) {
        self.body();
        self.check_changes();
        let partial = self.code.label();
        self.compare(Gpr::R10, whole);
        self.code.jump_if(JumpCondition::Below, partial);
        let before = self.registers.clone();
        self.store(true);
        self.code.jump(next);
        self.code.bind(partial);
        self.registers = before;
        self.general(32, &[0x89], Gpr::R10, reg(Gpr::R8));
        self.store(false);
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
        self.general(32, &[0x8b], Gpr::R11, state(RunCall::BUDGET, false));
        let mut vectors = Vec::new();
        for &(slot, width) in carried {
            vectors.extend(self.parts(width).map(|part| (Key { slot, part }, width)));
        }
        // Those that are read most often keep a register.
        vectors.sort_by_key(|(key, _)| core::cmp::Reverse(self.run.reads.get(&key.slot).map_or(0, Vec::len)));
        for (n, &(key, width)) in vectors.iter().enumerate() {
            if n < MAX_PINNED[usize::from(self.run.accesses())] {
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
        self.code.jump_if(JumpCondition::NotZero, leave);
        self.code.bind(again);
        // dec r11d
        self.code.raw(&[0x41, 0xff, 0xcb]);
        self.code.jump_if(JumpCondition::Greater, head);
        // The budget is used up: the lanes that still run stop before the next iteration.
        let before = self.registers.clone();
        self.general(32, &[0x89], Gpr::R10, reg(Gpr::R8));
        self.store(false);
        let (bits, or): (u32, &[u8]) = if self.unroll == 1 { (8, &[0x08]) } else { (16, &[0x09]) };
        self.general(bits, or, Gpr::R10, state(RunCall::RUNNING, true));
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
        self.code.jump_if(JumpCondition::NotZero, again);
        self.code.bind(done);
        // The group with the most iterations decides what is left of the budget.
        self.general(32, &[0x39], Gpr::R11, state(RunCall::LEFT, false));
        let skip = self.code.label();
        self.code.jump_if(JumpCondition::LessEqual, skip);
        self.general(32, &[0x89], Gpr::R11, state(RunCall::LEFT, false));
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
}

fn reg(register: Gpr) -> Rm {
    Rm::Reg(register as u8)
}

fn stack(offset: i32) -> Rm {
    Rm::Memory(Address { base: Gpr::Rsp, index: None, offset })
}

/// A field of the scratch.
fn scratch(offset: i32) -> Rm {
    Rm::Memory(Address { base: Gpr::Rbx, index: None, offset })
}

/// A field of the call, perhaps at the place of the group.
fn state(offset: i32, group: bool) -> Rm {
    Rm::Memory(Address { base: Gpr::Rdx, index: group.then_some((Gpr::R9, 0)), offset })
}
