//! Sequences of machine instructions that several instructions share.

use super::{Emitter, Key};
use crate::exec::alu::logic;
use crate::exec::machine::encode::{self as x, Rm, Vex, shift};
use crate::exec::machine::form::Width;
use crate::exec::num::{self, NAN32};
use crate::ir::{Inst, Lanewise, flag};
use crate::regs::{CONST, NONE};

impl Emitter<'_> {
    /// The width of a source.
    pub(super) fn width(&self, n: usize) -> Width {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        form.sources(i).nth(n).map_or(Width::Word, |(_, width)| width)
    }

    /// The parts of the result that belong to a part of words.
    pub(super) fn results(&self, part: u8) -> core::ops::Range<u8> {
        if self.run.forms[self.at].d == Width::Double { 2 * part..2 * part + 2 } else { part..part + 1 }
    }

    pub(super) fn with_constant(&mut self, part: u8, op: Vex, constant: [u32; 8]) {
        for p in self.results(part) {
            self.next_half(&[]);
            let a = self.source(0, p);
            let constant = self.code.constant(constant);
            self.last(p, op, a, constant, None);
        }
    }

    pub(super) fn unary(&mut self, part: u8, op: Vex, immediate: Option<u8>) {
        for p in self.results(part) {
            self.next_half(&[]);
            let a = self.source_rm(0, p);
            self.last(p, op, 0, a, immediate);
        }
    }

    pub(super) fn binary(&mut self, part: u8, op: Vex) {
        for p in self.results(part) {
            self.next_half(&[]);
            let (a, b) = (self.source(0, p), self.source_rm(1, p));
            self.last(p, op, a, b, None);
        }
    }

    pub(super) fn widen(&mut self, part: u8, op: Vex) {
        let a = self.source(0, part);
        for half in [0, 1] {
            self.next_half(&[a]);
            let t = self.extend(op, a, half);
            self.define(2 * part + half, t);
        }
    }

    pub(super) fn flushed(&mut self, part: u8, op: Vex) {
        let (a, b) = (self.source(0, part), self.source(1, part));
        let (a, b) = (self.flush(a), self.flush(b));
        self.code.vex(op, a, a, Rm::Reg(b), None);
        let t = self.flush(a);
        self.define(part, t);
    }

    /// A saturating conversion to signed integers; a NaN becomes 0.
    pub(super) fn integer(&mut self, part: u8, op: Vex) {
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
    pub(super) fn extreme(&mut self, part: u8, op: Vex, join: Vex) {
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
    pub(super) fn through(&mut self, i: &Inst, part: u8, f: impl Fn(&mut Self, u8) -> u8) {
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
    pub(super) fn polynomial(&mut self, coefficients: &[f64], at: u8) -> u8 {
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
    pub(super) fn exp2(&mut self, value: u8) -> u8 {
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
        self.code.vex(x::SHIFT_64, shift::LEFT, whole, Rm::Reg(whole), Some(52));
        self.code.vex(x::MULPD, p, p, Rm::Reg(whole), None);
        self.code.vex(x::CMPPD, f, value, Rm::Reg(value), Some(3));
        self.blend(p, p, value, f);
        p
    }

    /// The same steps as [`num::lg2`].
    pub(super) fn log2(&mut self, value: u8) -> u8 {
        // k + 2048, so that it is never negative: the sum of the high word and this constant, shifted.
        let offset = self.all_doubles(u64::from((1u32 << 31).wrapping_sub(num::ROOT_HALF.cast_unsigned())));
        let k = self.shifted(x::SHIFT_64, shift::RIGHT, value, 32);
        self.code.vex(x::PADDD, k, k, offset, None);
        self.code.vex(x::SHIFT_32, shift::RIGHT, k, Rm::Reg(k), Some(20));
        let m = self.shifted(x::SHIFT_64, shift::LEFT, k, 52);
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

    pub(super) fn divide_approx(&mut self, i: &Inst, part: u8) {
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

    pub(super) fn high_product(&mut self, part: u8, op: Vex) {
        let (a, b) = (self.source(0, part), self.source(1, part));
        let even = self.step(op, a, Rm::Reg(b));
        let odd_a = self.shifted(x::SHIFT_64, shift::RIGHT, a, 32);
        let odd_b = self.shifted(x::SHIFT_64, shift::RIGHT, b, 32);
        self.code.vex(op, odd_a, odd_a, Rm::Reg(odd_b), None);
        self.code.vex(x::SHIFT_64, shift::RIGHT, even, Rm::Reg(even), Some(32));
        self.last(part, x::PBLENDD, even, Rm::Reg(odd_a), Some(0xaa));
    }

    /// The low 64 bits of products of 64-bit lanes.
    pub(super) fn product(&mut self, a: u8, b: u8) -> u8 {
        let t = self.shifted(x::SHIFT_64, shift::RIGHT, a, 32);
        self.code.vex(x::PMULUDQ, t, t, Rm::Reg(b), None);
        let u = self.shifted(x::SHIFT_64, shift::RIGHT, b, 32);
        self.code.vex(x::PMULUDQ, u, u, Rm::Reg(a), None);
        self.code.vex(x::PADDQ, t, t, Rm::Reg(u), None);
        self.code.vex(x::SHIFT_64, shift::LEFT, t, Rm::Reg(t), Some(32));
        self.code.vex(x::PMULUDQ, u, a, Rm::Reg(b), None);
        self.code.vex(x::PADDQ, t, t, Rm::Reg(u), None);
        t
    }

    pub(super) fn fused(&mut self, part: u8, op: Vex) {
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
    pub(super) fn leave(&mut self, n: usize, part: u8) {
        if let Some(key) = self.key(n, part)
            && let Some(place) = self.registers.places.get_mut(&key)
            && let Some(register) = place.register.take()
        {
            self.registers.held[usize::from(register)] = None;
        }
    }

    /// The vector that a source is.
    pub(super) fn key(&self, n: usize, part: u8) -> Option<Key> {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        form.sources(i).nth(n).map(|(slot, _)| Key { slot, part })
    }

    /// True if the current instruction may overwrite the register of a source: it is the last reader of its value, or writes it.
    pub(super) fn dies(&self, n: usize, part: u8) -> bool {
        let (i, form) = (&self.run.insts[self.at], self.run.forms[self.at]);
        let Some((slot, _)) = form.sources(i).nth(n) else { return false };
        let pinned = self.pinned.contains_key(&Key { slot, part });
        let once = form.sources(i).filter(|(other, _)| *other == slot).count() == 1;
        let ends = slot == i.d || !pinned && self.next_read(slot, self.at + 1) == usize::MAX;
        once && i.guard == NONE && slot & CONST == 0 && ends
    }

    /// Combines three words by the truth table in the immediate.
    pub(super) fn truth_table(&mut self, i: &Inst, part: u8) {
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

    pub(super) fn logic(&mut self, i: &Inst, part: u8) {
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

    pub(super) fn compare_integers(&mut self, operation: Lanewise, part: u8) {
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
