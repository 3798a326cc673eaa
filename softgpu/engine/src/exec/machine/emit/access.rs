//! Accesses to memory. The first load of a group finds the shape of the addresses and checks all bytes that the group accesses; each
//! load then follows the shape. The addresses of stores and atomics are checked in the same way at the end of the run; they happen
//! when no lane of the warp can fail any more.
//!
//! `rbx` is the [`RunScratch`]; `r12`, `r13` and `r14` are free for one instruction.

use super::{Emitter, Key, reg, scratch, state};
use crate::code_pages::{MAX_SAVED, RunCall, RunEnd, RunScratch};
use crate::exec::machine::encode::{self as x, Address, Gpr, JumpCondition, Label, Rm};
use crate::exec::machine::form::{AccessSpace, ChangeKind, Width};
use crate::exec::machine::plan::{AccessGroup, MemoryChange};
use crate::ir::Inst;
use crate::regs::{CONST, NONE};

/// Loads of a group that are worth code for each shape, the groups of a run that get it, and the instructions of such a run.
const FREQUENT_LOADS: usize = 4;
const MAX_VARIANT_GROUPS: usize = VARIANT_BASES.len();
pub(super) const MAX_VARIANT_LENGTH: usize = 160;
/// Registers for their first addresses, for each of two parts: no instruction of a run without a loop uses the first two before the last
/// load, and none of a run with regular addresses uses any.
pub(super) const VARIANT_BASES: [[Gpr; 2]; 2] = [[Gpr::R11, Gpr::R12], [Gpr::R14, Gpr::R13]];

/// The shapes of eight addresses.
pub(super) mod shape {
    /// All are equal.
    pub(in crate::exec::machine::emit) const EQUAL: u32 = 0;
    /// Each one follows the one before.
    pub(in crate::exec::machine::emit) const CONSECUTIVE: u32 = 1;
    /// Others, which are in the scratch.
    pub(super) const SCATTERED: u32 = 2;
    /// All are equal, and in two groups of lanes at once the same.
    pub(in crate::exec::machine::emit) const PAIRED: u32 = 3;
}

/// The places in the scratch for eight addresses.
pub(super) struct ShapePlace {
    first: Rm,
    pub(super) shape: Rm,
    base: Gpr,
    /// The offset of the lanes from the base.
    lanes: i32,
    /// True if the lanes are wanted whatever the shape is.
    keep: bool,
}

impl ShapePlace {
    fn lane(&self, index: Gpr) -> Rm {
        at(self.base, Some((index, 3)), self.lanes)
    }
}

/// A load of eight lanes.
struct VectorLoad {
    /// Bytes of an element.
    size: u32,
    signed: bool,
    offset: i32,
    /// One register, or two for elements of 64 bits.
    to: Vec<u8>,
}

impl VectorLoad {
    /// The width and the opcode of the move that loads one element.
    fn element(&self) -> (u32, &'static [u8]) {
        match (self.size, self.signed) {
            (1, false) => (32, &[0x0f, 0xb6]),
            (1, true) => (32, &[0x0f, 0xbe]),
            (2, false) => (32, &[0x0f, 0xb7]),
            (2, true) => (32, &[0x0f, 0xbf]),
            (4, _) => (32, &[0x8b]),
            _ => (64, &[0x8b]),
        }
    }
}

/// The end of a run whose address is not in its range.
pub(super) struct Miss {
    label: Label,
    code: u32,
}

pub(super) fn at(base: Gpr, index: Option<(Gpr, u8)>, offset: i32) -> Rm {
    Rm::Memory(Address { base, index, offset })
}

fn number(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(0)
}

/// The place for the addresses of a group of loads.
pub(super) fn load_place(n: usize) -> ShapePlace {
    ShapePlace {
        first: scratch(RunScratch::FIRST + 8 * number(n)),
        shape: scratch(RunScratch::SHAPE + 4 * number(n)),
        base: Gpr::Rbx,
        lanes: RunScratch::LANES + 64 * number(n),
        keep: false,
    }
}

impl Emitter<'_> {
    /// An operation with a constant of 32 bits, by its number in the opcode: 0 adds, 5 subtracts, 7 compares.
    pub(super) fn immediate(&mut self, bits: u32, operation: u8, rm: Rm, value: i32) {
        self.code.general(bits, &[0x81], operation, rm);
        self.code.raw(&value.to_le_bytes());
    }

    pub(super) fn put(&mut self, place: Rm, value: u32) {
        self.code.general(32, &[0xc7], 0, place);
        self.code.raw(&value.to_le_bytes());
    }

    /// Start and length of the range of a group for reading or for writing.
    pub(super) fn range(group: &AccessGroup, write: bool) -> [Rm; 2] {
        if group.space == AccessSpace::Shared {
            return [state(RunCall::SHARED, false), state(RunCall::SHARED_LEN, false)];
        }
        let ranges = if write { RunScratch::WRITTEN } else { RunScratch::READ };
        let start = ranges + 16 * number(group.site);
        [scratch(start), scratch(start + 8)]
    }

    /// Two registers with the addresses of the group's lanes, as far as 64 bits go, without the offsets of the accesses.
    fn addresses(&mut self, group: &AccessGroup) -> [u8; 2] {
        let low = group.bytes.0;
        if group.space != AccessSpace::Shared {
            let halves = [0, 1].map(|half| self.read(group.slot, Width::Double, half));
            return halves.map(|half| self.step1(x::MOVAPS, Rm::Reg(half)));
        }
        let words = self.read(group.slot, Width::Word, 0);
        // The sum of a word and an offset wraps at 32 bits.
        let sum = match i32::try_from(low) {
            Ok(0) => words,
            Ok(low) => {
                let low = self.all(low.cast_unsigned());
                self.step(x::PADDD, words, low)
            }
            Err(_) => {
                self.failed = true;
                words
            }
        };
        let halves = [0, 1].map(|half| self.extend(x::PMOVZXDQ, sum, half));
        let start = self.step1(x::PBROADCASTQ, state(RunCall::SHARED, false));
        if low != 0 {
            let low = self.all_doubles(low.cast_unsigned());
            self.code.vex(x::PSUBQ, start, start, low, None);
        }
        for half in halves {
            self.code.vex(x::PADDQ, half, half, Rm::Reg(start), None);
        }
        halves
    }

    /// Gives the lanes that do not run the address of the first one that does.
    fn cover_idle_lanes(&mut self, halves: [u8; 2], place: &ShapePlace, temporary: [u8; 2]) {
        let whole = self.code.label();
        self.compare(Gpr::R10, 0xff);
        self.code.jump_if(JumpCondition::Zero, whole);
        self.keep_lanes(halves, place);
        self.count_zeros(Gpr::Eax, Gpr::R10);
        let [first, running] = temporary;
        self.code.vex(x::PBROADCASTQ, first, 0, place.lane(Gpr::Eax), None);
        for (n, half) in halves.into_iter().enumerate() {
            self.code.vmovd(running, Gpr::R10);
            self.code.vex(x::PBROADCASTQ, running, 0, Rm::Reg(running), None);
            let bits = self
                .code
                .constant(core::array::from_fn(|k| if k % 2 == 0 { 1 << (4 * n + k / 2) } else { 0 }));
            self.code.vex(x::PAND, running, running, bits, None);
            self.code.vex(x::PCMPEQQ, running, running, bits, None);
            self.blend(half, first, half, running);
        }
        self.code.bind(whole);
    }

    /// `to` = the number of zero bits below the lowest set one of `from`.
    fn count_zeros(&mut self, to: Gpr, from: Gpr) {
        self.code.raw(&[0xf3]);
        self.general(32, &[0x0f, 0xbc], to, reg(from));
    }

    /// Finds the shape of the addresses of a group, and checks all bytes that it accesses.
    fn check(&mut self, group: &AccessGroup, place: &ShapePlace, write: bool) {
        let step = group.size;
        let Some([offset, one, eight]) = group.extents() else {
            self.failed = true;
            return;
        };
        // Shared memory has no other range.
        let miss = if group.space == AccessSpace::Shared {
            self.decline
        } else {
            let label = self.code.label();
            self.misses.push(Miss { label, code: RunEnd::missed(group.site, write) });
            label
        };
        let [start, len] = Self::range(group, write);
        let halves = self.addresses(group);
        self.registers.locked = 1 << halves[0] | 1 << halves[1];
        let [first, t, u, v] = [(); 4].map(|()| self.take());
        self.cover_idle_lanes(halves, place, [first, t]);
        if place.keep {
            self.keep_lanes(halves, place);
        }
        // r8 = the first byte of the first lane, r13 = its offset in the range.
        self.code.vmovq_to(Gpr::R8, halves[0]);
        self.general(64, &[0x89], Gpr::R8, place.first);
        self.immediate(64, 0, reg(Gpr::R8), offset);
        self.general(64, &[0x89], Gpr::R8, reg(Gpr::R13));
        self.general(64, &[0x2b], Gpr::R13, start);
        self.code.vex(x::PBROADCASTQ, first, 0, Rm::Reg(halves[0]), None);
        self.code.vex(x::PSUBQ, t, halves[0], Rm::Reg(first), None);
        self.code.vex(x::PSUBQ, u, halves[1], Rm::Reg(first), None);
        let steps = [0, 4].map(|lane| {
            let word = |n: usize| {
                if n.is_multiple_of(2) { (lane + u32::try_from(n).unwrap_or(0) / 2) * step } else { 0 }
            };
            self.code.constant(core::array::from_fn(word))
        });
        self.code.vex(x::PCMPEQQ, first, t, steps[0], None);
        self.code.vex(x::PCMPEQQ, v, u, steps[1], None);
        self.code.vex(x::PAND, first, first, Rm::Reg(v), None);
        self.code.vex(x::MOVMSKPS, Gpr::Eax as u8, 0, Rm::Reg(first), None);
        let [other, scattered, done] = [(); 3].map(|()| self.code.label());
        self.compare(Gpr::Eax, 0xff);
        self.code.jump_if(JumpCondition::NotZero, other);
        self.put(place.shape, shape::CONSECUTIVE);
        self.bound(&len, eight, step, miss);
        self.code.jump(done);
        self.code.bind(other);
        self.code.vex(x::POR, t, t, Rm::Reg(u), None);
        self.code.vex(x::PTEST, t, 0, Rm::Reg(t), None);
        self.code.jump_if(JumpCondition::NotZero, scattered);
        self.put(place.shape, shape::EQUAL);
        self.bound(&len, one, step, miss);
        self.code.jump(done);

        self.code.bind(scattered);
        self.put(place.shape, shape::SCATTERED);
        if !place.keep {
            self.keep_lanes(halves, place);
        }
        self.code.vex(x::POR, first, halves[0], Rm::Reg(halves[1]), None);
        let low_bits = self.all_doubles(u64::from(step) - 1);
        self.code.vex(x::PTEST, first, 0, low_bits, None);
        self.code.jump_if(JumpCondition::NotZero, self.decline);
        // The offsets in the range. One that is negative, or above the last at which the access fits, is outside.
        self.code.vex(x::PBROADCASTQ, first, 0, start, None);
        let offsets = self.all_doubles(i64::from(offset).cast_unsigned());
        for (to, half) in [(t, halves[0]), (u, halves[1])] {
            self.code.vex(x::PSUBQ, to, half, Rm::Reg(first), None);
            self.code.vex(x::PADDQ, to, to, offsets, None);
        }
        self.general(64, &[0x8b], Gpr::R12, len);
        self.immediate(64, 5, reg(Gpr::R12), one);
        self.code.jump_if(JumpCondition::Below, miss);
        self.code.vmovq_from(first, Gpr::R12);
        self.code.vex(x::PBROADCASTQ, first, 0, Rm::Reg(first), None);
        for (to, half) in [(Gpr::Eax, t), (Gpr::R12, u)] {
            self.code.vex(x::PCMPGTQ, v, half, Rm::Reg(first), None);
            self.code.vex(x::POR, half, half, Rm::Reg(v), None);
            self.code.vex(x::MOVMSKPD, to as u8, 0, Rm::Reg(half), None);
        }
        self.shift_left(32, Gpr::R12, 4);
        self.general(32, &[0x09], Gpr::R12, reg(Gpr::Eax));
        self.code.jump_if(JumpCondition::Zero, done);
        self.count_zeros(Gpr::Eax, Gpr::Eax);
        self.general(64, &[0x8b], Gpr::R8, place.lane(Gpr::Eax));
        self.immediate(64, 0, reg(Gpr::R8), offset);
        self.code.jump(miss);
        self.code.bind(done);
        self.registers.locked = 0;
    }

    fn keep_lanes(&mut self, halves: [u8; 2], place: &ShapePlace) {
        for (half, offset) in halves.into_iter().zip([0, 32]) {
            self.code.vex(x::MOVUPS_STORE, half, 0, at(place.base, None, place.lanes + offset), None);
        }
    }

    /// Leaves the run unless `span` bytes from the offset in `r13` on are in the range, and the address in `r8` is aligned.
    fn bound(&mut self, len: &Rm, span: i32, align: u32, miss: Label) {
        self.general(64, &[0x8b], Gpr::R12, *len);
        self.immediate(64, 5, reg(Gpr::R12), span);
        self.code.jump_if(JumpCondition::Below, miss);
        self.general(64, &[0x39], Gpr::R12, reg(Gpr::R13));
        self.code.jump_if(JumpCondition::Above, miss);
        // test r8d, align - 1
        self.code.general(32, &[0xf7], 0, reg(Gpr::R8));
        self.code.raw(&(align - 1).to_le_bytes());
        self.code.jump_if(JumpCondition::NotZero, self.decline);
    }

    fn shift_left(&mut self, bits: u32, register: Gpr, by: u8) {
        self.code.general(bits, &[0xc1], 4, reg(register));
        self.code.raw(&[by]);
    }

    /// The ends of the run for addresses that are not in their ranges: all go on at `end` with their number in `eax`.
    pub(super) fn end_misses(&mut self, end: Label) {
        for Miss { label, code } in core::mem::take(&mut self.misses) {
            self.code.bind(label);
            self.general(64, &[0x89], Gpr::R8, state(RunCall::MISSED, false));
            self.code.raw(&[0xb8]);
            self.code.raw(&code.to_le_bytes());
            self.code.jump(end);
        }
    }

    /// The groups of loads that get code for each shape: few, with many loads, and with addresses that the run does not compute.
    pub(super) fn frequent_loads(&self) -> Vec<usize> {
        if self.run.insts.len() > MAX_VARIANT_LENGTH {
            return Vec::new();
        }
        let loads = |n: usize| self.run.load_at.values().filter(|group| **group == n).count();
        let mut groups: Vec<usize> = (0..self.run.loads.len())
            .filter(|&n| self.run.loads[n].is_input() && loads(n) >= FREQUENT_LOADS)
            .collect();
        groups.sort_by_key(|&n| core::cmp::Reverse(loads(n)));
        groups.truncate(MAX_VARIANT_GROUPS);
        groups
    }

    /// Checks the addresses of a group of loads.
    pub(super) fn check_load(&mut self, n: usize) {
        let run = self.run;
        match run.loads.get(n) {
            Some(group) => self.check(group, &load_place(n), false),
            None => self.failed = true,
        }
    }

    /// Keeps the first address of a group of loads in a register.
    pub(super) fn keep_first(&mut self, n: usize, to: Gpr) {
        self.general(64, &[0x8b], to, load_place(n).first);
    }

    pub(super) fn compare_shape(&mut self, n: usize, shape: u32) {
        self.immediate(32, 7, load_place(n).shape, shape.cast_signed());
    }

    pub(super) fn load(&mut self, i: &Inst, part: u8) {
        let number_of = self.run.load_at.get(&self.at).copied();
        let Some((n, group)) = number_of.and_then(|n| Some((n, *self.run.loads.get(n)?))) else {
            self.failed = true;
            return;
        };
        let place = load_place(n);
        if group.first == self.at && !self.checked.contains(&n) {
            self.check_load(n);
        }
        let Ok(offset) = i32::try_from(i.imm) else {
            self.failed = true;
            return;
        };
        let load = VectorLoad {
            size: group.size,
            signed: i.ty.signed(),
            offset,
            to: (part..part + if group.size == 8 { 2 } else { 1 }).map(|part| self.target(part)).collect(),
        };
        match self.shapes.get(&n).map(|(shape, bases)| (*shape, bases[usize::from(part)])) {
            Some((shape::PAIRED, _)) if part == 1 => {
                let first = self.read(i.d, Width::Word, 0);
                self.code.vex(x::MOVAPS, load.to[0], 0, Rm::Reg(first), None);
            }
            Some((shape::EQUAL | shape::PAIRED, base)) => self.load_equal(&load, base),
            Some((_, base)) => self.load_consecutive(&load, base),
            None => {
                let [scattered, consecutive, done] = [(); 3].map(|()| self.code.label());
                if self.is_regular {
                    self.regular_base(&group, part, Gpr::Eax);
                    self.compare_shape(n, shape::CONSECUTIVE);
                } else {
                    self.compare_shape(n, shape::CONSECUTIVE);
                    self.general(64, &[0x8b], Gpr::Eax, place.first);
                    self.code.jump_if(JumpCondition::Above, scattered);
                }
                self.code.jump_if(JumpCondition::Zero, consecutive);
                self.load_equal(&load, Gpr::Eax);
                self.code.jump(done);
                self.code.bind(consecutive);
                self.load_consecutive(&load, Gpr::Eax);
                if !self.is_regular {
                    self.code.jump(done);
                    self.code.bind(scattered);
                    self.load_scattered(&load, &place);
                }
                self.code.bind(done);
            }
        }
        for (part, &to) in (part..).zip(&load.to) {
            self.define(part, to);
        }
    }

    /// Loads one element.
    fn load_equal(&mut self, load: &VectorLoad, base: Gpr) {
        let from = at(base, None, load.offset);
        if load.size >= 4 {
            let op = if load.size == 8 { x::PBROADCASTQ } else { x::PBROADCASTD };
            for &to in &load.to {
                self.code.vex(op, to, 0, from, None);
            }
        } else {
            let (bits, one) = load.element();
            self.general(bits, one, Gpr::Eax, from);
            self.code.vmovd(load.to[0], Gpr::Eax);
            self.code.vex(x::PBROADCASTD, load.to[0], 0, Rm::Reg(load.to[0]), None);
        }
    }

    /// Loads eight elements, one after the other.
    fn load_consecutive(&mut self, load: &VectorLoad, base: Gpr) {
        let all = match (load.size, load.signed) {
            (1, false) => x::PMOVZXBD,
            (1, true) => x::PMOVSXBD,
            (2, false) => x::PMOVZXWD,
            (2, true) => x::PMOVSXWD,
            _ => x::MOVUPS_LOAD,
        };
        for (&to, more) in load.to.iter().zip([0, 32]) {
            self.code.vex(all, to, 0, at(base, None, load.offset + more), None);
        }
    }

    /// Loads eight elements from the addresses in the scratch.
    fn load_scattered(&mut self, load: &VectorLoad, place: &ShapePlace) {
        let (bits, one) = load.element();
        let width = if load.size == 8 { 8 } else { 4 };
        for lane in 0..8 {
            self.general(64, &[0x8b], Gpr::Eax, scratch(place.lanes + 8 * lane));
            self.general(bits, one, Gpr::R8, at(Gpr::Eax, None, load.offset));
            self.general(bits, &[0x89], Gpr::R8, scratch(RunScratch::VALUES + width * lane));
        }
        for (&to, more) in load.to.iter().zip([0, 32]) {
            self.code.vex(x::MOVUPS_LOAD, to, 0, scratch(RunScratch::VALUES + more), None);
        }
    }

    /// Checks the addresses of the stores and atomics of a group of lanes.
    pub(super) fn check_changes(&mut self) {
        let run = self.run;
        if run.changes.is_empty() {
            return;
        }
        // r14 = the scratch, at the place of the group in 32 addresses.
        self.general(64, &[0x89], Gpr::R9, reg(Gpr::R14));
        self.shift_left(64, Gpr::R14, 6);
        self.general(64, &[0x01], Gpr::Rbx, reg(Gpr::R14));
        for (n, change) in run.changes.iter().enumerate() {
            let place = ShapePlace {
                first: at(Gpr::Rbx, Some((Gpr::R9, 3)), RunScratch::STORE_FIRST + 32 * number(n)),
                shape: at(Gpr::Rbx, Some((Gpr::R9, 2)), RunScratch::STORE_SHAPE + 16 * number(n)),
                base: Gpr::R14,
                lanes: RunScratch::STORE_LANES + 256 * number(n),
                keep: true,
            };
            self.check(&change.access, &place, true);
        }
    }

    /// Executes the stores and atomics, one after the other for all lanes.
    pub(super) fn change_memory(&mut self) {
        let run = self.run;
        for (n, change) in run.changes.iter().enumerate() {
            self.change(number(n), change);
        }
    }

    fn change(&mut self, n: i32, change: &MemoryChange) {
        let (i, wide) = (&change.inst, change.width() == Width::Double);
        let Ok(offset) = i32::try_from(i.imm) else {
            self.failed = true;
            return;
        };
        let [group, lanes, lane, next] = [(); 4].map(|()| self.code.label());
        self.general(32, &[0x31], Gpr::Rcx, reg(Gpr::Rcx));
        self.general(32, &[0x31], Gpr::R9, reg(Gpr::R9));
        self.code.bind(group);
        self.general(32, &[0x0f, 0xb6], Gpr::R10, state(RunCall::MASK, true));
        self.general(32, &[0x85], Gpr::R10, reg(Gpr::R10));
        self.code.jump_if(JumpCondition::Zero, next);
        if change.kind == ChangeKind::Store && i.ty.bytes() >= 4 {
            self.compare(Gpr::R10, 0xff);
            self.code.jump_if(JumpCondition::NotZero, lanes);
            let shape = at(Gpr::Rbx, Some((Gpr::R9, 2)), RunScratch::STORE_SHAPE + 16 * n);
            self.immediate(32, 7, shape, 1);
            self.code.jump_if(JumpCondition::NotZero, lanes);
            let first = at(Gpr::Rbx, Some((Gpr::R9, 3)), RunScratch::STORE_FIRST + 32 * n);
            self.general(64, &[0x8b], Gpr::Eax, first);
            for (part, more) in [(0, 0), (1, 32)].into_iter().take(if wide { 2 } else { 1 }) {
                let value = self.home(Key { slot: i.b, part }, change.width());
                self.code.vex(x::MOVUPS_LOAD, 0, 0, value, None);
                self.code.vex(x::MOVUPS_STORE, 0, 0, at(Gpr::Eax, None, offset + more), None);
            }
            self.code.jump(next);
        }
        self.code.bind(lanes);
        self.general(64, &[0x89], Gpr::R9, reg(Gpr::R14));
        self.shift_left(64, Gpr::R14, 6);
        self.general(64, &[0x01], Gpr::Rbx, reg(Gpr::R14));
        // r12 = the frame at the place of the group.
        self.general(64, &[0x89], Gpr::Rdi, reg(Gpr::R12));
        for _ in 0..if wide { 2 } else { 1 } {
            self.general(64, &[0x01], Gpr::Rcx, reg(Gpr::R12));
        }
        self.code.bind(lane);
        self.count_zeros(Gpr::R8, Gpr::R10);
        let address = at(Gpr::R14, Some((Gpr::R8, 3)), RunScratch::STORE_LANES + 256 * n);
        self.general(64, &[0x8b], Gpr::Eax, address);
        let value = self.lane_of(i.b, wide);
        let bits = 8 * i.ty.bytes();
        self.general(if wide { 64 } else { 32 }, &[0x8b], Gpr::R13, value);
        let memory = at(Gpr::Eax, None, offset);
        match (change.kind, change.access.space) {
            (ChangeKind::Store, _) => {
                self.general(bits, if bits == 8 { &[0x88] } else { &[0x89] }, Gpr::R13, memory);
            }
            (ChangeKind::Add, space) => {
                // Shared memory has one thread.
                if space != AccessSpace::Shared {
                    self.code.raw(&[0xf0]);
                }
                self.general(32, &[0x0f, 0xc1], Gpr::R13, memory);
            }
        }
        if change.result() != NONE {
            let result = self.lane_of(change.result(), false);
            self.general(32, &[0x89], Gpr::R13, result);
        }
        self.code.clear_lowest(Gpr::R10);
        self.code.jump_if(JumpCondition::NotZero, lane);
        self.code.bind(next);
        self.add(Gpr::Rcx, 32);
        self.add(Gpr::R9, 1);
        self.compare(Gpr::R9, 4);
        self.code.jump_if(JumpCondition::Below, group);
    }

    /// The lane in `r8` of a slot, in the group that `r12` is at.
    fn lane_of(&mut self, slot: u32, wide: bool) -> Rm {
        let units = i32::try_from(slot & !CONST).ok().and_then(|units| units.checked_mul(4));
        self.failed |= units.is_none();
        let base = if slot & CONST == 0 { Gpr::R12 } else { Gpr::Rsi };
        at(base, Some((Gpr::R8, if wide { 3 } else { 2 })), units.unwrap_or(0))
    }

    /// Copies the slots that the run overwrites to the scratch, or from there.
    pub(super) fn copy_saved(&mut self, restore: bool) {
        let mut offset = RunScratch::SAVED;
        let run = self.run;
        for &(slot, width) in run.results.iter().filter(|(slot, _)| run.overwrites(*slot)) {
            let Some(units) = i32::try_from(slot).ok().and_then(|units| units.checked_mul(4)) else {
                self.failed = true;
                return;
            };
            let vectors = match width {
                Width::Word => 4,
                Width::Double => 8,
                Width::Mask => 1,
            };
            if offset + 32 * vectors > RunScratch::SAVED + 4 * number(MAX_SAVED) {
                self.failed = true;
                return;
            }
            for n in 0..vectors {
                let (home, copy) = (at(Gpr::Rdi, None, units + 32 * n), scratch(offset + 32 * n));
                let (from, to) = if restore { (copy, home) } else { (home, copy) };
                if width == Width::Mask {
                    self.general(32, &[0x8b], Gpr::R8, from);
                    self.general(32, &[0x89], Gpr::R8, to);
                } else {
                    self.code.vex(x::MOVUPS_LOAD, 0, 0, from, None);
                    self.code.vex(x::MOVUPS_STORE, 0, 0, to, None);
                }
            }
            offset += 32 * vectors;
        }
    }
}
