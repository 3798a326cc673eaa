//! The code of a run for whole warps with regular addresses: in each group of lanes, those of a load are equal or consecutive, and those of
//! a store consecutive. They are all in slots when the run starts, so one check before the first group covers the warp. It changes nothing:
//! the other code of the run, with its own checks, executes every other warp.

use super::access::{MAX_VARIANT_LENGTH, VARIANT_BASES, at, load_place, shape};
use super::{Emitter, Key, MAX_SCRATCH, reg, state};
use crate::code_pages::RunCall;
use crate::exec::machine::encode::{self as x, Gpr, JumpCondition, Label, Rm};
use crate::exec::machine::form::{AccessSpace, ChangeKind, Width};
use crate::exec::machine::plan::{AccessGroup, CompiledRun};
use crate::regs::CONST;

/// Groups of lanes of a warp.
const GROUPS: i32 = 4;
/// Places on the stack for values that are no results.
const BETWEEN: usize = 20;
/// Vector registers of the check, which hold no values yet: the first address, the distances from it, their comparison with those of
/// consecutive addresses, and both for all groups.
const FIRST: u8 = 0;
const DISTANCE: u8 = 1;
const FOLLOWS: u8 = 2;
const DISTANCES: u8 = 3;
const ALL_FOLLOW: u8 = 4;

/// True if a run has code for whole warps.
pub(super) fn is_applicable(run: &CompiledRun) -> bool {
    let stores = |kind: ChangeKind, group: &AccessGroup| {
        kind == ChangeKind::Store && group.size >= 4 && group.is_input()
    };
    run.repeat.is_none()
        && run.accesses()
        && run.loads.iter().all(AccessGroup::is_input)
        && run.changes.iter().all(|c| stores(c.kind, &c.access))
}

impl Emitter<'_> {
    /// The whole run, or a jump to `general`. Goes on at `done` after it.
    pub(super) fn regular(&mut self, general: Label, done: Label) {
        let run = self.run;
        self.code.general(32, &[0x83], 7, state(RunCall::MASK, false));
        self.code.raw(&[0xff]);
        self.code.jump_if(JumpCondition::NotZero, general);
        // The steps of two groups at once wait less for each other.
        let narrow = run.forms.iter().all(|form| form.d != Width::Double);
        // Each result of both may have to wait on the stack, beside some values between them.
        let fits = 2 * run.results.len() + BETWEEN <= MAX_SCRATCH.unsigned_abs() as usize;
        self.unroll = if narrow && fits && run.insts.len() <= MAX_VARIANT_LENGTH { 2 } else { 1 };
        for (n, group) in run.loads.iter().enumerate() {
            self.check_warp(group, false, Some(n), general);
        }
        for change in &run.changes {
            self.check_warp(&change.access, true, None, general);
        }
        let start = self.registers.clone();
        let frequent = self.frequent_loads();
        self.checked = (0..run.loads.len()).collect();
        self.is_regular = true;
        let stores = self.code.label();
        // The shapes that have code of their own: if two groups are at once, equal addresses are most often those of one row of threads.
        let equal = if self.unroll == 2 { shape::PAIRED } else { shape::EQUAL };
        for combination in 0..1u32 << frequent.len() {
            let other = self.code.label();
            for (n, &group) in frequent.iter().enumerate() {
                let shape = if combination >> n & 1 == 0 { equal } else { shape::CONSECUTIVE };
                self.shapes.insert(group, (shape, VARIANT_BASES[n]));
                self.compare_shape(group, shape);
                self.code.jump_if(JumpCondition::NotZero, other);
            }
            self.groups(&frequent);
            self.code.jump(stores);
            self.code.bind(other);
            self.registers.clone_from(&start);
            self.shapes.clear();
        }
        if !frequent.is_empty() {
            self.groups(&[]);
            self.registers.clone_from(&start);
        }
        self.code.bind(stores);
        self.store_warp();
        self.code.jump(done);
        self.checked.clear();
        self.is_regular = false;
        self.unroll = 1;
    }

    /// The instructions for all groups of lanes. The addresses of the loads in `frequent` are in registers.
    fn groups(&mut self, frequent: &[usize]) {
        let head = self.code.label();
        self.general(32, &[0x31], Gpr::Rcx, reg(Gpr::Rcx));
        self.general(32, &[0x31], Gpr::R9, reg(Gpr::R9));
        self.code.bind(head);
        let run = self.run;
        for (&group, bases) in frequent.iter().zip(VARIANT_BASES) {
            for (part, base) in (0..self.unroll).zip(bases) {
                self.regular_base(&run.loads[group], part, base);
            }
        }
        self.body();
        self.store(true);
        self.add(Gpr::Rcx, 32 * u32::from(self.unroll));
        self.add(Gpr::R9, self.unroll.into());
        self.compare(Gpr::R9, GROUPS.cast_unsigned());
        self.code.jump_if(JumpCondition::Below, head);
    }

    /// The place of the addresses, or of the values, of a group of lanes: `more` bytes beyond the first.
    fn lanes_of(&mut self, slot: u32, width: Width, group: i32, more: i32) -> Rm {
        let units = i32::try_from(slot & !CONST).ok().and_then(|units| units.checked_mul(4));
        self.failed |= units.is_none();
        let bytes = if width == Width::Double { 64 } else { 32 };
        // All lanes of a constant are equal.
        let (base, group) = if slot & CONST == 0 { (Gpr::Rdi, group) } else { (Gpr::Rsi, 0) };
        at(base, None, units.unwrap_or(0) + group * bytes + more)
    }

    /// Finds the shape of the addresses of all groups of lanes, and checks all bytes that they access. Jumps to `general` if one is not
    /// regular, or not in the range. A load keeps the shape.
    fn check_warp(&mut self, group: &AccessGroup, write: bool, load: Option<usize>, general: Label) {
        let step = group.size;
        let Some([offset, one, eight]) = group.extents() else {
            self.failed = true;
            return;
        };
        let width = group.space.address();
        let (broadcast, subtract, equal, bits) = match width {
            Width::Double => (x::PBROADCASTQ, x::PSUBQ, x::PCMPEQQ, 64),
            _ => (x::PBROADCASTD, x::PSUBD, x::PCMPEQD, 32),
        };
        for lanes in 0..GROUPS {
            let first = self.lanes_of(group.slot, width, lanes, 0);
            self.code.vex(broadcast, FIRST, 0, first, None);
            for half in 0..if width == Width::Double { 2 } else { 1 } {
                let place = self.lanes_of(group.slot, width, lanes, 32 * half);
                let steps = self.steps(width, half.cast_unsigned(), step);
                let is_first = lanes == 0 && half == 0;
                let (distance, follows) =
                    if is_first { (DISTANCES, ALL_FOLLOW) } else { (DISTANCE, FOLLOWS) };
                self.code.vex(subtract, distance, FIRST, place, None);
                self.code.vex(equal, follows, distance, steps, None);
                if !is_first {
                    self.code.vex(x::POR, DISTANCES, DISTANCES, Rm::Reg(distance), None);
                    self.code.vex(x::PAND, ALL_FOLLOW, ALL_FOLLOW, Rm::Reg(follows), None);
                }
            }
        }
        // r12 = the last offset in the range at which the accesses fit.
        let [start, len] = Self::range(group, write);
        self.general(64, &[0x8b], Gpr::R12, len);
        self.code.vex(x::MOVMSKPS, Gpr::Eax as u8, 0, Rm::Reg(ALL_FOLLOW), None);
        self.compare(Gpr::Eax, 0xff);
        if let Some(n) = load {
            let (consecutive, bounds) = (self.code.label(), self.code.label());
            self.code.jump_if(JumpCondition::Zero, consecutive);
            self.code.vex(x::PTEST, DISTANCES, 0, Rm::Reg(DISTANCES), None);
            self.code.jump_if(JumpCondition::NotZero, general);
            self.put(load_place(n).shape, shape::EQUAL);
            if self.unroll == 2 {
                let unpaired = self.code.label();
                for lanes in [0, 2] {
                    let [first, second] =
                        [0, 1].map(|next| self.lanes_of(group.slot, width, lanes + next, 0));
                    self.general(bits, &[0x8b], Gpr::R8, first);
                    self.general(bits, &[0x3b], Gpr::R8, second);
                    self.code.jump_if(JumpCondition::NotZero, unpaired);
                }
                self.put(load_place(n).shape, shape::PAIRED);
                self.code.bind(unpaired);
            }
            self.immediate(64, 5, reg(Gpr::R12), one);
            self.code.jump_if(JumpCondition::Below, general);
            self.code.jump(bounds);
            self.code.bind(consecutive);
            self.put(load_place(n).shape, shape::CONSECUTIVE);
            self.immediate(64, 5, reg(Gpr::R12), eight);
            self.code.jump_if(JumpCondition::Below, general);
            self.code.bind(bounds);
        } else {
            self.code.jump_if(JumpCondition::NotZero, general);
            self.immediate(64, 5, reg(Gpr::R12), eight);
            self.code.jump_if(JumpCondition::Below, general);
        }
        // r13 = the bits of the start and of all offsets: if the low ones are 0, all addresses are aligned.
        self.general(64, &[0x8b], Gpr::R13, start);
        for lanes in 0..GROUPS {
            let first = self.lanes_of(group.slot, width, lanes, 0);
            self.general(bits, &[0x8b], Gpr::R8, first);
            if offset != 0 {
                // The sum of a word and an offset wraps at 32 bits.
                self.immediate(bits, 0, reg(Gpr::R8), offset);
            }
            if width == Width::Double {
                self.general(64, &[0x2b], Gpr::R8, start);
            }
            self.general(32, &[0x09], Gpr::R8, reg(Gpr::R13));
            self.general(64, &[0x39], Gpr::R12, reg(Gpr::R8));
            self.code.jump_if(JumpCondition::Above, general);
        }
        // test r13d, step - 1
        self.code.general(32, &[0xf7], 0, reg(Gpr::R13));
        self.code.raw(&(step - 1).to_le_bytes());
        self.code.jump_if(JumpCondition::NotZero, general);
    }

    /// The distances from the first of consecutive addresses to half of them, or to all words, negated.
    fn steps(&mut self, width: Width, half: u32, step: u32) -> Rm {
        let distance = |lane: u32| 0i64.wrapping_sub(i64::from(lane * step));
        let word = |n: usize| {
            let n = u32::try_from(n).unwrap_or(0);
            let bits = match width {
                Width::Double => distance(4 * half + n / 2) >> (n % 2 * 32),
                _ => distance(n),
            };
            u32::try_from(bits & 0xffff_ffff).unwrap_or(0)
        };
        self.code.constant(core::array::from_fn(word))
    }

    /// The first address of a group of lanes, the current one or that of a part after it, without the offsets of the accesses.
    pub(super) fn regular_base(&mut self, group: &AccessGroup, part: u8, to: Gpr) {
        let width = group.space.address();
        let vector = if width == Width::Double { 2 * part } else { part };
        let first = self.home(Key { slot: group.slot, part: vector }, width);
        self.first_address(group, first, to);
    }

    fn first_address(&mut self, group: &AccessGroup, first: Rm, to: Gpr) {
        if group.space != AccessSpace::Shared {
            return self.general(64, &[0x8b], to, first);
        }
        self.general(32, &[0x8b], to, first);
        let Ok(low) = i32::try_from(group.bytes.0) else {
            self.failed = true;
            return;
        };
        if low != 0 {
            self.immediate(32, 0, reg(to), low);
        }
        self.general(64, &[0x03], to, state(RunCall::SHARED, false));
        if low != 0 {
            self.immediate(64, 5, reg(to), low);
        }
    }

    /// Executes the stores, one after the other for all lanes.
    fn store_warp(&mut self) {
        let run = self.run;
        for change in &run.changes {
            let (group, width) = (&change.access, change.width());
            let Ok(offset) = i32::try_from(change.inst.imm) else {
                self.failed = true;
                return;
            };
            for lanes in 0..GROUPS {
                let first = self.lanes_of(group.slot, group.space.address(), lanes, 0);
                self.first_address(group, first, Gpr::Eax);
                for more in [0, 32].into_iter().take(if width == Width::Double { 2 } else { 1 }) {
                    let value = self.lanes_of(change.inst.b, width, lanes, more);
                    self.code.vex(x::MOVUPS_LOAD, 0, 0, value, None);
                    self.code.vex(x::MOVUPS_STORE, 0, 0, at(Gpr::Eax, None, offset + more), None);
                }
            }
        }
    }
}
