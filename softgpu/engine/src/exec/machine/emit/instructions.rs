//! The translation of each instruction, as one table.

use super::{Emitter, state};
use crate::code_pages::RunCall;
use crate::exec::machine::encode::{self as x, Address, Gpr, Rm, Vex, shift};
use crate::exec::machine::form::{LaneForm, SpecialPlace, Width, number_test, special};
use crate::ir::{Inst, Lanewise, Op, flag};

impl Emitter<'_> {
    /// A source, by its number, in a register.
    pub(super) fn source(&mut self, n: usize, part: u8) -> u8 {
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
    pub(super) fn source_rm(&mut self, n: usize, part: u8) -> Rm {
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
    pub(super) fn step(&mut self, op: Vex, a: u8, b: Rm) -> u8 {
        let to = self.take();
        self.code.vex(op, to, a, b, None);
        to
    }

    /// `d = op(b)` on one vector.
    pub(super) fn step1(&mut self, op: Vex, b: Rm) -> u8 {
        self.step(op, 0, b)
    }

    pub(super) fn shifted(&mut self, op: Vex, kind: u8, a: u8, by: u8) -> u8 {
        let to = self.take();
        // The destination is in the second field.
        self.code.vex(op, kind, to, Rm::Reg(a), Some(by));
        to
    }

    /// Writes the last step of the instruction.
    pub(super) fn last(&mut self, part: u8, op: Vex, a: u8, b: Rm, immediate: Option<u8>) {
        let to = self.target(part);
        self.code.vex(op, to, a, b, immediate);
        self.define(part, to);
    }

    /// Flushes subnormal numbers to zero.
    pub(super) fn flush(&mut self, a: u8) -> u8 {
        let exponent = self.all(0x7f80_0000);
        let t = self.step(x::PAND, a, exponent);
        let zero = self.all(0);
        self.code.vex(x::PCMPEQD, t, t, zero, None);
        self.code.vex(x::SHIFT_32, shift::RIGHT, t, Rm::Reg(t), Some(1));
        self.code.vex(x::PANDN, t, t, Rm::Reg(a), None);
        t
    }

    pub(super) fn flush_if(&mut self, a: u8, i: &Inst) -> u8 {
        if i.has(flag::FTZ) { self.flush(a) } else { a }
    }

    /// Frees the registers of one half of doubles before the other; those with values keep them.
    pub(super) fn next_half(&mut self, keep: &[u8]) {
        self.registers.locked = keep.iter().fold(0, |locked, r| locked | 1 << r);
    }

    /// The parts of doubles that belong to a part of words.
    pub(super) fn doubles(part: u8) -> [u8; 2] {
        [2 * part, 2 * part + 1]
    }

    /// Joins two vectors of 64-bit lanes to their low words.
    pub(super) fn join(&mut self, part: u8, low: u8, high: Rm) {
        let t = self.take();
        self.code.vex(x::SHUFPS, t, low, high, Some(0x88));
        self.last(part, x::PERMQ, 0, Rm::Reg(t), Some(0xd8));
    }

    fn special(&mut self, i: &Inst, part: u8) {
        let to = self.target(part);
        match special(i) {
            Some(SpecialPlace::Block(axis)) => {
                let offset = RunCall::BLOCK + [0, 4, 8][axis % 3];
                self.code.vex(x::PBROADCASTD, to, 0, state(offset, false), None);
            }
            Some(SpecialPlace::Threads(axis)) => {
                self.general(64, &[0x8b], Gpr::Eax, state(RunCall::THREADS, false));
                let offset = [0, 128, 256, 384][axis % 4] + 32 * i32::from(part);
                let row = Address { base: Gpr::Eax, index: Some((Gpr::Rcx, 0)), offset };
                self.code.vex(x::MOVUPS_LOAD, to, 0, Rm::Memory(row), None);
            }
            None => self.failed = true,
        }
        self.define(part, to);
    }

    #[expect(clippy::too_many_lines, reason = "one table of all instructions")]
    pub(super) fn instruction(&mut self, i: &Inst, form: LaneForm, part: u8) {
        use Lanewise as L;
        if i.op == Op::Load {
            return self.load(i, part);
        }
        if i.op == Op::Special {
            return self.special(i, part);
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
                let t = self.shifted(x::SHIFT_32, shift::LEFT, a, 16);
                let t = self.shifted(x::SHIFT_32, shift::ARITHMETIC, t, 16);
                self.define(part, t);
            }
            L::F32FromS32 => self.unary(part, x::CVTDQ2PS, None),
            L::F32FromU32 => {
                // Both halves as exact numbers; their sum rounds once.
                let a = self.source(0, part);
                let low = self.all(0xffff);
                let low = self.step(x::PAND, a, low);
                self.code.vex(x::CVTDQ2PS, low, 0, Rm::Reg(low), None);
                let high = self.shifted(x::SHIFT_32, shift::RIGHT, a, 16);
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
            L::MulWideU16 | L::MulWideS16 => {
                let (a, b) = (self.source(0, part), self.source(1, part));
                let low = self.all(0xffff);
                let (a, b) = (self.step(x::PAND, a, low), self.step(x::PAND, b, low));
                // The signed product of halves adds that of the upper ones, which are 0.
                let op = if operation == L::MulWideS16 { x::PMADDWD } else { x::PMULLD };
                self.last(part, op, a, Rm::Reg(b), None);
            }
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
                    self.code.vex(x::SHIFT_64, shift::LEFT, high, Rm::Reg(high), Some(32));
                    self.last(2 * part + half, x::POR, low, Rm::Reg(high), None);
                }
            }
            L::Pack16 => {
                let (a, b) = (self.source(0, part), self.source(1, part));
                let low = self.all(0xffff);
                let low = self.step(x::PAND, a, low);
                let high = self.shifted(x::SHIFT_32, shift::LEFT, b, 16);
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
}
