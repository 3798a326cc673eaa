//! The decoded instruction: fixed size, slot numbers for operands, modifiers as fields.

#![expect(unsafe_code, reason = "functions with target features are reached through pointers")]

use crate::ptx::{Space, Ty};
use crate::regs::Frame;

/// Executes one lane-wise instruction for the lanes of a mask that is not empty.
#[derive(Clone, Copy)]
pub(crate) struct Handler(unsafe fn(&Frame, &Inst, u32));

impl Handler {
    /// A function that every processor can execute.
    pub(crate) const fn plain(function: fn(&Frame, &Inst, u32)) -> Handler {
        Handler(function)
    }

    /// # Safety
    ///
    /// This processor has the target features of the function.
    pub(crate) const unsafe fn new(function: unsafe fn(&Frame, &Inst, u32)) -> Handler {
        Handler(function)
    }

    #[inline(always)]
    pub(crate) fn call(self, frame: &Frame, inst: &Inst, mask: u32) {
        // SAFETY: `new` and `plain` take only functions that this processor can execute.
        unsafe { (self.0)(frame, inst, mask) }
    }
}

/// What the executor does with an instruction. Everything that works lane by lane is [`Op::Alu`] and goes through its
/// handler; the rest concerns memory, the warp or control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Alu,
    Nop,
    Bra,
    Brx,
    Call,
    CallIndirect,
    Ret,
    Exit,
    Trap,
    Load,
    Store,
    Atomic,
    CpAsync,
    Fence,
    Barrier,
    WarpBarrier,
    Shfl,
    Vote,
    Match,
    Redux,
    ActiveMask,
    Special,
    LocalAddress,
    LdMatrix,
    Mma,
    WmmaLoad,
    WmmaStore,
    Sleep,
}

/// Rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    /// To nearest, ties to even.
    Rn,
    /// To zero.
    Rz,
    /// Down.
    Rm,
    /// Up.
    Rp,
    /// To nearest, ties away from zero.
    Rna,
}

/// Yes-or-no modifiers and operand widths.
pub(crate) mod flag {
    /// The slot of the destination holds 64-bit lanes; then a, b and c.
    pub(crate) const WIDE_D: u32 = 1;
    pub(crate) const WIDE_A: u32 = 1 << 1;
    pub(crate) const WIDE_B: u32 = 1 << 2;
    pub(crate) const WIDE_C: u32 = 1 << 3;
    /// The guard is negated.
    pub(crate) const NOT: u32 = 1 << 4;
    pub(crate) const FTZ: u32 = 1 << 5;
    pub(crate) const SAT: u32 = 1 << 6;
    pub(crate) const HI: u32 = 1 << 7;
    pub(crate) const WIDE: u32 = 1 << 8;
    pub(crate) const CARRY_IN: u32 = 1 << 9;
    pub(crate) const CARRY_OUT: u32 = 1 << 10;
    pub(crate) const APPROX: u32 = 1 << 11;
    pub(crate) const NAN: u32 = 1 << 12;
    pub(crate) const RELU: u32 = 1 << 13;
    pub(crate) const CLAMP: u32 = 1 << 14;
    /// The predicate operand is negated.
    pub(crate) const NOT_C: u32 = 1 << 15;
    /// Round to an integral value (`.rni` and its kin).
    pub(crate) const INTEGRAL: u32 = 1 << 16;
    /// Loads and stores that must be host atomics.
    pub(crate) const ATOMIC: u32 = 1 << 17;
    /// An acquire, release or sequentially consistent order.
    pub(crate) const ORDERED: u32 = 1 << 18;
    /// The address operand is a 32-bit slot.
    pub(crate) const ADDR32: u32 = 1 << 19;
    pub(crate) const XORSIGN: u32 = 1 << 20;
    /// A third operand is there (`min` and `max` of three, `vote` of a negated predicate, …).
    pub(crate) const THIRD: u32 = 1 << 21;
    pub(crate) const TRANSPOSE: u32 = 1 << 22;
    pub(crate) const LAYOUT_A_COL: u32 = 1 << 23;
    pub(crate) const ABS: u32 = 1 << 25;
    /// The second source is unsigned where the first one decides the type (`dp4a`).
    pub(crate) const UNSIGNED_B: u32 = 1 << 26;
    /// Shift amounts are counted by `bfind`.
    pub(crate) const SHIFT_AMOUNT: u32 = 1 << 27;
    /// The branch goes backward.
    pub(crate) const BACKWARD: u32 = 1 << 28;
    pub(crate) const OOB: u32 = 1 << 29;
    /// A plain copy.
    pub(crate) const COPY: u32 = 1 << 30;
    /// `e` is a fourth source.
    pub(crate) const FOUR: u32 = 1 << 31;
}

/// One instruction.
#[derive(Clone, Copy)]
pub(crate) struct Inst {
    pub(crate) handler: Handler,
    /// Address offset, branch target, call site, or what the operation says.
    pub(crate) imm: i64,
    /// Guard predicate, or [`crate::regs::NONE`].
    pub(crate) guard: u32,
    pub(crate) d: u32,
    pub(crate) a: u32,
    pub(crate) b: u32,
    pub(crate) c: u32,
    /// A second destination, or the first index into the list of extra slots.
    pub(crate) e: u32,
    pub(crate) flags: u32,
    pub(crate) line: u32,
    pub(crate) op: Op,
    pub(crate) ty: Ty,
    pub(crate) sty: Ty,
    pub(crate) round: Round,
    pub(crate) space: Space,
    /// Which of several (comparison, atomic operation, shuffle mode, …).
    pub(crate) sub: u8,
    /// Elements of a vector access.
    pub(crate) n: u8,
}

impl Inst {
    #[inline(always)]
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// What a constant slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Constant {
    Bits32(u32),
    Bits64(u64),
    /// Bytes of the parameter block; sign-extended to the slot when asked.
    Param {
        offset: u32,
        size: u8,
        signed: bool,
        wide: bool,
    },
    /// The address of a global plus an offset.
    Global {
        index: u32,
        offset: i64,
    },
    /// A special register that has one value in a launch.
    Special {
        which: u8,
        wide: bool,
    },
    /// Where dynamic shared memory starts, plus a base (of the window) and an offset.
    Dynamic {
        base: u64,
        offset: i64,
        wide: bool,
    },
}

/// Where one argument or result of a call comes from: consecutive 32-bit words of a frame, or one register.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument {
    /// First of the words of a `.param` variable, and how many.
    Words(u32, u32),
    /// A register or constant of 32 bits.
    Narrow(u32),
    /// A register or constant of 64 bits.
    Wide(u32),
    /// Not wanted.
    Sink,
}

/// A host function that kernels may call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Builtin {
    Printf,
    AssertFail,
    Malloc,
    Free,
}

/// Who is called.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    Function(u32),
    Builtin(Builtin),
    /// Through a register.
    Slot(u32),
}

/// One call.
#[derive(Clone, Debug)]
pub(crate) struct CallSite {
    pub(crate) target: Target,
    pub(crate) arguments: Vec<Argument>,
    pub(crate) results: Vec<Argument>,
}

/// A lowered function.
#[derive(Default)]
pub(crate) struct Code {
    pub(crate) name: String,
    pub(crate) insts: Vec<Inst>,
    /// Extra slots of vector accesses and matrix operations.
    pub(crate) extra: Vec<u32>,
    /// Targets of `brx.idx`.
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) calls: Vec<CallSite>,
    pub(crate) constants: Vec<(Constant, u32)>,
    /// Size of the register frame and of the constants, in units.
    pub(crate) frame_units: u32,
    pub(crate) const_units: u32,
    pub(crate) local_bytes: u32,
    /// Where the formal parameters and the results are.
    pub(crate) params: Vec<Argument>,
    pub(crate) returns: Vec<Argument>,
    pub(crate) defined: bool,
}

/// A token for the address of function `index`: no load can follow it.
pub(crate) fn function_token(index: usize) -> u64 {
    0x0f00_0000_0000_0000 | ((index as u64) << 4)
}

/// The function that a token names.
pub(crate) fn token_function(token: u64) -> Option<u32> {
    (token >> 56 == 0x0f && token & 15 == 0)
        .then(|| u32::try_from((token & 0x00ff_ffff_ffff_ffff) >> 4).ok())
        .flatten()
}
