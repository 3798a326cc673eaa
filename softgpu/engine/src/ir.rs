//! The decoded instruction: fixed size, slot numbers for operands, modifiers as fields. In one file: lowering and execution read it as one
//! table.

#![expect(unsafe_code, reason = "functions with target features are reached through pointers")]

use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;

use crate::api::{LOCAL_WINDOW, SHARED_WINDOW};
use crate::code_pages::{self, CodePages, MAX_LOADS, MAX_STORES, RunCall, RunEnd};
use crate::image::ReferenceKind;
use crate::ptx::{Space, Ty};
use crate::regs::Frame;

/// The lane-wise operations that have a name: those that the machine code may know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[rustfmt::skip]
pub(crate) enum Lanewise {
    /// No name: the interpreter executes it.
    Other, Select, Predicate, Mov32, Mov64, Not32, Not64, NegI32, NegI64, AbsI32, AbsI64, NegF32,
    NegF64, AbsF32, AbsF64, SqrtF32, SqrtF64, RcpF32, RcpF64, Popc32, Popc64, Clz32, Clz64, Brev32,
    Brev64, Low32, Zext32, Sext32, Mask16, Low16of64, Zext16to64, Sext16, Sext16to64, Mask8, F32FromS32,
    F32FromU32, F64FromS32, F64FromU32, F64FromF32, F32FromF64, F32FromF16, F32FromBf16, F16FromF32,
    S32FromF32Rz, U32FromF32Rz, S32FromF32Rn, FloorF32, TruncF32, RintF32, CeilF32, SatF32, Ex2, Lg2,
    Sin, Cos, Tanh, RcpApprox, RsqrtApprox, SqrtApprox, RcpApprox64, RsqrtApprox64, SlowUnary32,
    SlowUnary64, Add32, Add64, Sub32, Sub64, Mul32, Mul64, MulWideU32, MulWideS32, MulWideU16, MulWideS16, MulHiU32, MulHiS32,
    MulHiU64, MulHiS64, And32, And64, Or32, Or64, Xor32, Xor64, Shl32, ShrU32, ShrS32, Shl64, ShrU64,
    ShrS64, MinU32, MinS32, MaxU32, MaxS32, MinU64, MinS64, MaxU64, MaxS64, DivU32, DivS32, RemU32,
    RemS32, DivU64, DivS64, RemU64, RemS64, AddF32, SubF32, MulF32, AddF32Ftz, SubF32Ftz, MulF32Ftz,
    DivF32, DivApprox, AddF64, SubF64, MulF64, DivF64, MinF32, MaxF32, MinF64, MaxF64, SlowBinary32,
    SlowBinary64, CopySign32, CopySign64, Pack32, Pack16, MadLo32, MadLo64, MadWideU32, MadWideS32,
    FmaF32, FmaF32Ftz, FmaF64, SlowFma32, SlowFma64, Lop3, ShfLWrap, ShfRWrap, ShfLClamp, ShfRClamp,
    EqI32, NeI32, LtU32, LeU32, GtU32, GeU32, LtS32, LeS32, GtS32, GeS32, EqI64, NeI64, LtU64, LeU64,
    GtU64, GeU64, LtS64, LeS64, GtS64, GeS64, EqF32, NeF32, LtF32, LeF32, GtF32, GeF32, EquF32, NeuF32,
    LtuF32, LeuF32, GtuF32, GeuF32, NumF32, NanF32, EqF64, NeF64, LtF64, LeF64, GtF64, GeF64, EquF64,
    NeuF64, LtuF64, LeuF64, GtuF64, GeuF64, NumF64, NanF64,
}

/// Executes one lane-wise instruction for the lanes of a non-empty mask.
#[derive(Clone, Copy)]
pub(crate) struct Handler {
    function: unsafe fn(&Frame, &Inst, u32),
    operation: Lanewise,
}

impl Handler {
    /// Wraps a function that every processor can execute.
    pub(crate) const fn plain(function: fn(&Frame, &Inst, u32)) -> Handler {
        Handler { function, operation: Lanewise::Other }
    }

    /// Like [`Handler::plain`] for an operation that the machine code knows.
    pub(crate) const fn named(function: fn(&Frame, &Inst, u32), operation: Lanewise) -> Handler {
        Handler { function, operation }
    }

    /// The operation that the function executes.
    pub(crate) const fn operation(self) -> Lanewise {
        self.operation
    }

    /// # Safety
    ///
    /// This processor must have the target features of the function.
    pub(crate) const unsafe fn new(function: unsafe fn(&Frame, &Inst, u32), operation: Lanewise) -> Handler {
        Handler { function, operation }
    }

    #[inline(always)]
    pub(crate) fn call(self, frame: &Frame, inst: &Inst, mask: u32) {
        // SAFETY: the constructors take only functions that this processor can execute.
        unsafe { (self.function)(frame, inst, mask) }
    }
}

/// The kind of an instruction. Lane-wise instructions are [`Op::Alu`] and call their handler; the others concern memory, the warp
/// or control flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Alu,
    /// Several instructions as machine code; `imm` is the number of the run. Only in a [`Translation`].
    Run,
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
    /// Takes `a` bytes of local memory, with the alignment `imm`; `c` is the slot of the stack.
    Alloca,
    LdMatrix,
    Mma,
    WmmaLoad,
    WmmaStore,
    Sleep,
    Mbarrier,
    /// A texture or surface instruction; `imm` is its index in [`LoweredCode::images`].
    Image,
}

/// Rounding direction.
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

/// Boolean modifiers and operand widths.
pub(crate) mod flag {
    /// The slot of the destination holds 64-bit lanes; the next three flags mean the same for a, b and c.
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
    /// Rounds to an integral value (`.rni` and its kin).
    pub(crate) const INTEGRAL: u32 = 1 << 16;
    /// The load or store must be a host atomic.
    pub(crate) const ATOMIC: u32 = 1 << 17;
    /// The order is acquire, release or sequentially consistent.
    pub(crate) const ORDERED: u32 = 1 << 18;
    /// The address operand is a 32-bit slot.
    pub(crate) const ADDR32: u32 = 1 << 19;
    pub(crate) const XORSIGN: u32 = 1 << 20;
    /// The instruction has a third operand (`min` and `max` of three, `vote` of a negated predicate, …).
    pub(crate) const THIRD: u32 = 1 << 21;
    pub(crate) const TRANSPOSE: u32 = 1 << 22;
    pub(crate) const LAYOUT_A_COL: u32 = 1 << 23;
    pub(crate) const ABS: u32 = 1 << 25;
    /// The second source is unsigned; the first one decides the type (`dp4a`).
    pub(crate) const UNSIGNED_B: u32 = 1 << 26;
    /// `bfind` returns a shift amount.
    pub(crate) const SHIFT_AMOUNT: u32 = 1 << 27;
    /// The branch goes backward.
    pub(crate) const BACKWARD: u32 = 1 << 28;
    pub(crate) const OOB: u32 = 1 << 29;
    /// The instruction is a plain copy.
    pub(crate) const COPY: u32 = 1 << 30;
    /// `e` is a fourth source.
    pub(crate) const FOUR: u32 = 1 << 31;
}

#[derive(Clone, Copy)]
pub(crate) struct Inst {
    pub(crate) handler: Handler,
    /// Address offset, branch target, call site, or another number that the operation defines.
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
    /// Variant of the operation (comparison, atomic operation, shuffle mode, …).
    pub(crate) sub: u8,
    /// Number of elements of a vector access.
    pub(crate) n: u8,
}

impl Inst {
    #[inline(always)]
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// The content of a constant slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Constant {
    Bits32(u32),
    Bits64(u64),
    /// Bytes of the parameter block, sign-extended to the slot if requested.
    Param {
        offset: u32,
        size: u8,
        signed: bool,
        wide: bool,
    },
    /// The handle of a texture or surface reference.
    Reference(u32),
    /// The address of a global plus an offset.
    Global {
        index: u32,
        offset: i64,
    },
    /// A special register with one value in a launch.
    Special {
        which: u8,
        wide: bool,
    },
    /// Start of dynamic shared memory, plus a base (of the window) and an offset.
    Dynamic {
        base: u64,
        offset: i64,
        wide: bool,
    },
}

/// Location of one argument or result of a call: consecutive 32-bit words of a frame, or one register.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument {
    /// Index of the first word of a `.param` variable, and number of words.
    Words(u32, u32),
    /// A register or constant of 32 bits.
    Narrow(u32),
    /// A register or constant of 64 bits.
    Wide(u32),
    /// The value is discarded.
    Sink,
}

/// A host function that kernels may call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Builtin {
    Printf,
    AssertFail,
    Malloc,
    Free,
    SetConditional,
}

/// The target of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    Function(u32),
    Builtin(Builtin),
    /// The address is in a register.
    Slot(u32),
}

#[derive(Clone, Debug)]
pub(crate) struct CallSite {
    pub(crate) target: Target,
    pub(crate) arguments: Vec<Argument>,
    pub(crate) results: Vec<Argument>,
}

/// The coordinates that a texture or surface instruction has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageGeometry {
    D1,
    D2,
    D3,
    D1Layered,
    D2Layered,
    Cube,
    CubeLayered,
}

impl ImageGeometry {
    pub(crate) fn parse(word: &str) -> Option<ImageGeometry> {
        Some(match word {
            "1d" => ImageGeometry::D1,
            "2d" => ImageGeometry::D2,
            "3d" => ImageGeometry::D3,
            "a1d" => ImageGeometry::D1Layered,
            "a2d" => ImageGeometry::D2Layered,
            "cube" => ImageGeometry::Cube,
            "acube" => ImageGeometry::CubeLayered,
            _ => return None,
        })
    }

    /// True if the first coordinate is a layer.
    pub(crate) fn layered(self) -> bool {
        matches!(self, ImageGeometry::D1Layered | ImageGeometry::D2Layered | ImageGeometry::CubeLayered)
    }

    pub(crate) fn cube(self) -> bool {
        matches!(self, ImageGeometry::Cube | ImageGeometry::CubeLayered)
    }

    /// The number of coordinates without the layer.
    pub(crate) fn dimensions(self) -> usize {
        match self {
            ImageGeometry::D1 | ImageGeometry::D1Layered => 1,
            ImageGeometry::D2 | ImageGeometry::D2Layered => 2,
            ImageGeometry::D3 | ImageGeometry::Cube | ImageGeometry::CubeLayered => 3,
        }
    }
}

/// The form of the results of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Four words.
    Words,
    /// Four halves.
    Halves,
    /// Two words of two halves.
    HalfPairs,
}

/// The choice of the mip level of a fetch; the slots are in [`ImageAccess::detail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    Base,
    /// One level of detail.
    Level,
    /// Two vectors of derivatives.
    Gradients,
}

/// The treatment of surface coordinates outside the surface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outside {
    Trap,
    Clamp,
    Zero,
}

/// A property of an image that an instruction reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    Width,
    Height,
    Depth,
    ArraySize,
    Levels,
    Samples,
    ChannelType,
    ChannelOrder,
    NormalizedCoords,
    ForceUnnormalizedCoords,
    FilterMode,
    AddressMode(u8),
    MemoryLayout,
}

/// A texture or surface operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageOperation {
    Fetch {
        geometry: ImageGeometry,
        float: bool,
        detail: Detail,
        packing: Packing,
    },
    /// The channel of four texels.
    Gather {
        geometry: ImageGeometry,
        channel: u8,
        packing: Packing,
    },
    TextureQuery(Query),
    SurfaceQuery(Query),
    /// Elements of this type, at an offset in bytes.
    SurfaceLoad {
        geometry: ImageGeometry,
        ty: Ty,
        outside: Outside,
    },
    SurfaceStore {
        geometry: ImageGeometry,
        ty: Ty,
        outside: Outside,
    },
    /// Stores a texel, converted to the format of the surface.
    SurfaceStoreTexel {
        geometry: ImageGeometry,
        outside: Outside,
    },
    /// An atomic, by its number; on a texel if there is no type.
    SurfaceReduce {
        geometry: ImageGeometry,
        op: u8,
        ty: Option<Ty>,
        outside: Outside,
    },
    /// True if the handle is one of this kind.
    IsType(Option<ReferenceKind>),
}

/// The operands of a texture or surface instruction: slots.
#[derive(Clone, Debug)]
pub(crate) struct ImageAccess {
    pub(crate) operation: ImageOperation,
    /// 64 bits.
    pub(crate) handle: u32,
    pub(crate) results: Vec<u32>,
    pub(crate) coordinates: Vec<u32>,
    /// Level of detail, or derivatives.
    pub(crate) detail: Vec<u32>,
    pub(crate) offsets: Vec<u32>,
    /// The data of a store or atomic.
    pub(crate) values: Vec<u32>,
    /// True if results or values are slots of 64 bits.
    pub(crate) wide: bool,
}

/// A lowered function.
#[derive(Default)]
pub(crate) struct LoweredCode {
    pub(crate) name: String,
    pub(crate) insts: Vec<Inst>,
    /// Extra slots of vector accesses and matrix operations.
    pub(crate) extra: Vec<u32>,
    /// Targets of `brx.idx`.
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) calls: Vec<CallSite>,
    pub(crate) images: Vec<ImageAccess>,
    pub(crate) constants: Vec<(Constant, u32)>,
    /// Size of the register frame and of the constants, in units.
    pub(crate) frame_units: u32,
    pub(crate) const_units: u32,
    pub(crate) local_bytes: u32,
    /// The slot with the bytes that each thread has taken from its stack, if the function takes some.
    pub(crate) stack: Option<u32>,
    /// Locations of the formal parameters and of the results.
    pub(crate) params: Vec<Argument>,
    pub(crate) returns: Vec<Argument>,
    pub(crate) defined: bool,
    pub(crate) machine: MachineCode,
}

/// A token for the address of function `index`; every load from it fails.
pub(crate) fn function_token(index: usize) -> u64 {
    0x0f00_0000_0000_0000 | ((index as u64) << 4)
}

/// The function that a token names.
pub(crate) fn token_function(token: u64) -> Option<u32> {
    (token >> 56 == 0x0f && token & 15 == 0)
        .then(|| u32::try_from((token & 0x00ff_ffff_ffff_ffff) >> 4).ok())
        .flatten()
}

/// Ranges of memory that a run may miss in one execution.
const MAX_MISSES: usize = 2 * (MAX_LOADS + MAX_STORES);
/// Times that a run may decline until the interpreter executes it always: its addresses are in other spaces.
const MAX_DECLINED: u32 = 256;
/// The generic addresses of shared and local memory.
const WINDOWS: Range<u64> = SHARED_WINDOW.start..LOCAL_WINDOW.end;

/// Fragments of a function that the interpreter runs before the function gets machine code.
const WARM: u32 = 64;

/// Makes machine code of a function. `None` if the interpreter is to execute all of it.
type Translate = fn(&LoweredCode) -> Option<Translation>;

/// The machine code of a function, once there is some.
#[derive(Default)]
pub(crate) struct MachineCode {
    entered: AtomicU32,
    code: OnceLock<Option<Translation>>,
}

/// The instructions of a function with runs in the place of their first instructions, which the original keeps.
pub(crate) struct Translation {
    pub(crate) insts: Vec<Inst>,
    /// There is a barrier among them.
    pub(crate) has_barrier: bool,
    pub(crate) runs: Vec<RunEntry>,
    pub(crate) pages: CodePages,
}

pub(crate) struct RunEntry {
    pub(crate) offset: usize,
    /// Index of the instruction after the run.
    pub(crate) end: u32,
    /// Budget that its atomics cost.
    pub(crate) cost: i32,
    /// The number of times that it declined.
    pub(crate) declined: AtomicU32,
}

/// The result of a run.
pub(crate) struct Ran {
    /// Index of the instruction after the run.
    pub(crate) end: u32,
    /// Lanes that are back at the start of the run, because the budget is used up.
    pub(crate) running: u32,
    pub(crate) budget: i32,
}

impl MachineCode {
    /// The translation of a function that a fragment enters. Translates it if it has been entered often enough.
    #[inline(always)]
    pub(crate) fn enter<'c>(&'c self, code: &LoweredCode, translate: Translate) -> Option<&'c Translation> {
        match self.code.get() {
            Some(translation) => translation.as_ref(),
            None => self.warm(code, translate),
        }
    }

    /// The translation of a function that has been entered often enough.
    pub(crate) fn known(&self) -> Option<&Translation> {
        self.code.get().and_then(Option::as_ref)
    }

    /// Lets the interpreter execute the function always, unless it has machine code already.
    pub(crate) fn interpret(&self) {
        let _ = self.code.set(None);
    }

    /// Translates the function now. Returns the number of its runs.
    pub(crate) fn translate(&self, code: &LoweredCode, translate: Translate) -> usize {
        let translation = self.code.get_or_init(|| translate(code));
        translation.as_ref().map_or(0, |t| t.runs.len())
    }

    #[cold]
    fn warm(&self, code: &LoweredCode, translate: Translate) -> Option<&Translation> {
        // Exactly one thread counts to the end; the others go on interpreting.
        if self.entered.fetch_add(1, Ordering::Relaxed) == WARM {
            let translation = translate(code);
            return self.code.get_or_init(|| translation).as_ref();
        }
        None
    }
}

impl Translation {
    /// Executes the run of an instruction [`Op::Run`] for the lanes of a mask that is not empty. Returns the index of the instruction after
    /// the run if the interpreter must execute it, because an address is not valid or in another space. Then the run has had no
    /// effect. `range` finds the range of an address, for reading or for writing.
    #[inline(always)]
    pub(crate) fn run(
        &self,
        i: &Inst,
        frame: &Frame,
        mut call: RunCall<'_>,
        range: impl FnMut(u64, bool) -> Option<Range<u64>>,
    ) -> Result<Ran, u32> {
        let entry = &self.runs[usize::try_from(i.imm).unwrap_or(usize::MAX)];
        if entry.declined.load(Ordering::Relaxed) > MAX_DECLINED {
            return Err(entry.end);
        }
        let done = match code_pages::call(&self.pages, entry.offset, frame, &mut call) {
            RunEnd::Done => Some(()),
            RunEnd::Missed { site, write } => self.retry(entry, frame, &mut call, (site, write), range),
            RunEnd::Declined => None,
        };
        if done.is_none() {
            entry.declined.fetch_add(1, Ordering::Relaxed);
            return Err(entry.end);
        }
        Ok(Ran { end: entry.end, running: call.running, budget: call.left - entry.cost })
    }

    /// Finds the ranges that a run misses. Each round finds another one.
    #[cold]
    #[inline(never)]
    fn retry(
        &self,
        entry: &RunEntry,
        frame: &Frame,
        call: &mut RunCall<'_>,
        (mut site, mut write): (usize, bool),
        mut range: impl FnMut(u64, bool) -> Option<Range<u64>>,
    ) -> Option<()> {
        for _ in 0..MAX_MISSES {
            // A generic address of shared or local memory has no range.
            if WINDOWS.contains(&call.missed) {
                return None;
            }
            let found = range(call.missed, write).filter(|range| range.contains(&call.missed))?;
            if !call.scratch.enter(site, write, &found) {
                return None;
            }
            (call.running, call.left) = (0, call.budget);
            match code_pages::call(&self.pages, entry.offset, frame, call) {
                RunEnd::Done => return Some(()),
                RunEnd::Missed { site: next, write: way } => (site, write) = (next, way),
                RunEnd::Declined => return None,
            }
        }
        None
    }
}
