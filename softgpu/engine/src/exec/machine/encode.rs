//! An encoder of the x86-64 instructions that kernels need: vector instructions with a VEX prefix, and a few others.

/// A VEX instruction: prefix, opcode map, W and opcode. All are 256 bits wide but the moves between registers of the two kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vex {
    prefix: u8,
    map: u8,
    wide: bool,
    opcode: u8,
}

macro_rules! vex { ($($name:ident: $prefix:literal $map:literal $wide:literal $opcode:literal;)*) => {$(
    pub(super) const $name: Vex = Vex { prefix: $prefix, map: $map, wide: $wide, opcode: $opcode };
)*}; }

// Prefix: 0 none, 1 66, 2 F3, 3 F2. Map: 1 0F, 2 0F38, 3 0F3A.
vex! {
    MOVUPS_LOAD: 0 1 false 0x10; MOVUPS_STORE: 0 1 false 0x11; MOVAPS: 0 1 false 0x28; MOVMSKPS: 0 1 false 0x50;
    ADDPS: 0 1 false 0x58; MULPS: 0 1 false 0x59; SUBPS: 0 1 false 0x5c; MINPS: 0 1 false 0x5d; DIVPS: 0 1 false 0x5e;
    MAXPS: 0 1 false 0x5f; SQRTPS: 0 1 false 0x51; CMPPS: 0 1 false 0xc2; SHUFPS: 0 1 false 0xc6; CVTDQ2PS: 0 1 false 0x5b;
    CVTPS2PD: 0 1 false 0x5a; MINPD: 1 1 false 0x5d; MAXPD: 1 1 false 0x5f;
    ADDPD: 1 1 false 0x58; MULPD: 1 1 false 0x59; SUBPD: 1 1 false 0x5c; DIVPD: 1 1 false 0x5e; SQRTPD: 1 1 false 0x51;
    CMPPD: 1 1 false 0xc2; CVTPD2PS: 1 1 false 0x5a; CVTPS2DQ: 1 1 false 0x5b; CVTTPS2DQ: 2 1 false 0x5b;
    CVTDQ2PD: 2 1 false 0xe6;
    PADDD: 1 1 false 0xfe; PADDQ: 1 1 false 0xd4; PSUBD: 1 1 false 0xfa; PSUBQ: 1 1 false 0xfb; PAND: 1 1 false 0xdb;
    PANDN: 1 1 false 0xdf; POR: 1 1 false 0xeb; PXOR: 1 1 false 0xef; PCMPEQD: 1 1 false 0x76; PCMPGTD: 1 1 false 0x66;
    PMULUDQ: 1 1 false 0xf4; SHIFT_32: 1 1 false 0x72;
    SHIFT_64: 1 1 false 0x73; MOVD: 1 1 false 0x6e;
    PCMPEQQ: 1 2 false 0x29; PCMPGTQ: 1 2 false 0x37; PMULLD: 1 2 false 0x40; PMULDQ: 1 2 false 0x28; PMINSD: 1 2 false 0x39;
    PMINUD: 1 2 false 0x3b; PMAXSD: 1 2 false 0x3d; PMAXUD: 1 2 false 0x3f; PABSD: 1 2 false 0x1e; PSRLVD: 1 2 false 0x45;
    PSRLVQ: 1 2 true 0x45; PSRAVD: 1 2 false 0x46; PSLLVD: 1 2 false 0x47; PSLLVQ: 1 2 true 0x47; PMOVSXDQ: 1 2 false 0x25;
    PMOVZXDQ: 1 2 false 0x35; PBROADCASTB: 1 2 false 0x78; PBROADCASTD: 1 2 false 0x58;
    FMADD213PS: 1 2 false 0xa8; FMADD231PS: 1 2 false 0xb8; FMADD231PD: 1 2 true 0xb8;
    PBROADCASTQ: 1 2 false 0x59; PTEST: 1 2 false 0x17; PMOVSXBD: 1 2 false 0x21; PMOVSXWD: 1 2 false 0x23;
    PMOVZXBD: 1 2 false 0x31; PMOVZXWD: 1 2 false 0x33; MOVMSKPD: 1 1 false 0x50; MOVQ_FROM: 1 1 true 0x6e; MOVQ_TO: 1 1 true 0x7e;
    PMADDWD: 1 1 false 0xf5; BLSR: 0 2 false 0xf3;
    PBLENDD: 1 3 false 0x02; BLENDVPS: 1 3 false 0x4a; ROUNDPS: 1 3 false 0x08; ROUNDPD: 1 3 false 0x09; PERMQ: 1 3 true 0x00;
    INSERTI128: 1 3 false 0x38; EXTRACTI128: 1 3 false 0x39;
}

/// The `/n` of shifts by a constant.
pub(super) mod shift {
    pub(in crate::exec::machine) const RIGHT: u8 = 2;
    pub(in crate::exec::machine) const ARITHMETIC: u8 = 4;
    pub(in crate::exec::machine) const LEFT: u8 = 6;
}

/// General registers, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Gpr {
    Eax = 0,
    Rcx = 1,
    Rdx = 2,
    Rbx = 3,
    Rsp = 4,
    Rsi = 6,
    Rdi = 7,
    R8 = 8,
    R9 = 9,
    R10 = 10,
    R11 = 11,
    R12 = 12,
    R13 = 13,
    R14 = 14,
}

/// An address: base, scaled index (the scale as a power of two) and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) base: Gpr,
    pub(super) index: Option<(Gpr, u8)>,
    pub(super) offset: i32,
}

/// The operand of an instruction that may be in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rm {
    Reg(u8),
    Memory(Address),
    /// A constant behind the code.
    Constant(usize),
}

/// A place in the code that jumps may name before it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label(usize);

/// Conditions of jumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum JumpCondition {
    Below = 2,
    Zero = 4,
    NotZero = 5,
    Above = 7,
    LessEqual = 14,
    Greater = 15,
}

#[derive(Default)]
pub(super) struct CodeBuffer {
    bytes: Vec<u8>,
    /// Positions of labels.
    labels: Vec<Option<usize>>,
    /// Places of 32-bit distances to labels.
    jumps: Vec<(usize, Label)>,
    constants: Vec<[u32; 8]>,
    /// Places of 32-bit distances to constants, and the number of bytes of the instruction that follow.
    references: Vec<(usize, usize, usize)>,
}

impl CodeBuffer {
    pub(super) fn len(&self) -> usize {
        self.bytes.len() + self.constants.len() * 32
    }

    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    pub(super) fn bind(&mut self, label: Label) {
        self.labels[label.0] = Some(self.bytes.len());
    }

    pub(super) fn jump(&mut self, label: Label) {
        self.raw(&[0xe9]);
        self.distance(label);
    }

    pub(super) fn jump_if(&mut self, condition: JumpCondition, label: Label) {
        self.raw(&[0x0f, 0x80 | condition as u8]);
        self.distance(label);
    }

    fn distance(&mut self, label: Label) {
        self.jumps.push((self.bytes.len(), label));
        self.raw(&[0; 4]);
    }

    /// A constant of eight words.
    pub(super) fn constant(&mut self, words: [u32; 8]) -> Rm {
        let known = self.constants.iter().position(|c| *c == words);
        Rm::Constant(known.unwrap_or_else(|| {
            self.constants.push(words);
            self.constants.len() - 1
        }))
    }

    /// An instruction with a VEX prefix: `reg` and `second` are registers, `rm` may be in memory. Without a second operand,
    /// `second` is 0.
    pub(super) fn vex(&mut self, op: Vex, reg: u8, second: u8, rm: Rm, immediate: Option<u8>) {
        self.vector(op, true, reg, second, rm, immediate);
    }

    /// Moves the low 32 bits of a general register to a vector register.
    pub(super) fn vmovd(&mut self, to: u8, from: Gpr) {
        self.vector(MOVD, false, to, 0, Rm::Reg(from as u8), None);
    }

    /// Moves a general register to the low 64 bits of a vector register.
    pub(super) fn vmovq_from(&mut self, to: u8, from: Gpr) {
        self.vector(MOVQ_FROM, false, to, 0, Rm::Reg(from as u8), None);
    }

    /// Moves the low 64 bits of a vector register to a general register.
    pub(super) fn vmovq_to(&mut self, to: Gpr, from: u8) {
        self.vector(MOVQ_TO, false, from, 0, Rm::Reg(to as u8), None);
    }

    /// Clears the lowest set bit of a general register.
    pub(super) fn clear_lowest(&mut self, register: Gpr) {
        self.vector(BLSR, false, 1, register as u8, Rm::Reg(register as u8), None);
    }

    fn vector(&mut self, op: Vex, long: bool, reg: u8, second: u8, rm: Rm, immediate: Option<u8>) {
        let (index, base) = extensions(rm);
        let first = (u8::from(reg < 8) << 7) | (u8::from(!index) << 6) | (u8::from(!base) << 5) | op.map;
        let last = (u8::from(op.wide) << 7) | ((!second & 15) << 3) | (u8::from(long) << 2) | op.prefix;
        self.raw(&[0xc4, first, last, op.opcode]);
        self.operands(reg, rm, immediate.is_some().into());
        self.bytes.extend(immediate);
    }

    /// An instruction on general registers of 8, 16, 32 or 64 bits; `reg` may be a number of the opcode. `opcode` is without
    /// prefixes.
    pub(super) fn general(&mut self, bits: u32, opcode: &[u8], reg: u8, rm: Rm) {
        let (index, base) = extensions(rm);
        if bits == 16 {
            self.raw(&[0x66]);
        }
        // The prefix is also what names the low byte of every register.
        let rex = 0x40
            | (u8::from(bits == 64) << 3)
            | (u8::from(reg >= 8) << 2)
            | (u8::from(index) << 1)
            | u8::from(base);
        self.raw(&[rex]);
        self.raw(opcode);
        self.operands(reg, rm, 0);
    }

    fn operands(&mut self, reg: u8, rm: Rm, tail: usize) {
        let reg = (reg & 7) << 3;
        match rm {
            Rm::Reg(r) => self.raw(&[0xc0 | reg | (r & 7)]),
            Rm::Constant(constant) => {
                self.raw(&[reg | 5]);
                self.references.push((self.bytes.len(), constant, tail));
                self.raw(&[0; 4]);
            }
            Rm::Memory(Address { base, index, offset }) => {
                let base = base as u8 & 7;
                // Always with a 32-bit offset: one form.
                match index {
                    Some((index, scale)) => {
                        self.raw(&[0x84 | reg, (scale << 6) | ((index as u8 & 7) << 3) | base]);
                    }
                    None if base == 4 => self.raw(&[0x84 | reg, 0x24]),
                    None => self.raw(&[0x80 | reg | base]),
                }
                self.raw(&offset.to_le_bytes());
            }
        }
    }

    /// The bytes, with the constants behind the code. `None` if a label is not bound or a distance does not fit.
    pub(super) fn finish(mut self) -> Option<Vec<u8>> {
        let put = |bytes: &mut Vec<u8>, at: usize, target: usize, end: usize| {
            let distance = i32::try_from(target).ok()?.checked_sub(i32::try_from(end).ok()?)?;
            bytes.get_mut(at..at + 4)?.copy_from_slice(&distance.to_le_bytes());
            Some(())
        };
        for (at, label) in core::mem::take(&mut self.jumps) {
            put(&mut self.bytes, at, self.labels[label.0]?, at + 4)?;
        }
        // Execution that runs off the code stops at a breakpoint.
        self.bytes.resize(self.bytes.len().next_multiple_of(32), 0xcc);
        let constants = self.bytes.len();
        for (at, constant, tail) in core::mem::take(&mut self.references) {
            put(&mut self.bytes, at, constants + constant * 32, at + 4 + tail)?;
        }
        for word in self.constants.iter().flatten() {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
        Some(self.bytes)
    }
}

/// True if the index, and the base or register, is one of the upper eight.
fn extensions(rm: Rm) -> (bool, bool) {
    match rm {
        Rm::Reg(r) => (false, r >= 8),
        Rm::Constant(_) => (false, false),
        Rm::Memory(a) => (a.index.is_some_and(|(r, _)| r as u8 >= 8), a.base as u8 >= 8),
    }
}
