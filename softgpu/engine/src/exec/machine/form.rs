//! The form of an instruction that machine code can execute: the widths of its operands, and its use of NaNs.

use crate::exec::Special;
use crate::exec::alu::logic;
use crate::exec::atomic::AtomicOp;
use crate::ir::{Inst, Lanewise, Op, flag};
use crate::ptx::{Space, Ty};
use crate::regs::NONE;

/// The width of the lanes of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Word,
    Double,
    /// A predicate.
    Mask,
}

/// The treatment of the bits of NaNs by an instruction. f32 arithmetic makes a NaN the canonical one; that costs two more instructions,
/// which can wait until a bit of the result is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nans {
    /// Reads bits.
    Exact,
    /// Reads numbers; the result is exact.
    Test,
    /// Reads numbers; the result needs to be made canonical.
    Number,
    /// Reads bits; the result needs to be made canonical.
    ExactNumber,
    /// Copies its source.
    Copy,
    /// The bits of the result are those of sources, changed.
    Pass,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LaneForm {
    pub(super) d: Width,
    sources: [Option<Width>; 3],
    pub(super) nans: Nans,
}

impl LaneForm {
    pub(super) fn without_sources(self) -> LaneForm {
        LaneForm { sources: [None; 3], ..self }
    }

    /// The sources of an instruction, with their widths.
    pub(super) fn sources(self, i: &Inst) -> impl Iterator<Item = (u32, Width)> {
        [i.a, i.b, i.c].into_iter().zip(self.sources).filter_map(|(slot, width)| Some((slot, width?)))
    }
}

/// Largest offset of an access that is part of a run.
const MAX_OFFSET: i64 = 1 << 20;

/// The memory of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessSpace {
    /// Ranges of addresses with 64 bits. `anywhere`: an address that is in no range may be in another space.
    Device { anywhere: bool },
    /// Shared memory, with addresses of 32 bits.
    Shared,
}

impl AccessSpace {
    /// True if accesses of the two may be to the same bytes.
    pub(super) fn meets(self, other: AccessSpace) -> bool {
        self == other || self == AccessSpace::GENERIC || other == AccessSpace::GENERIC
    }

    const GENERIC: AccessSpace = AccessSpace::Device { anywhere: true };

    /// The width of addresses.
    pub(super) fn address(self) -> Width {
        if self == AccessSpace::Shared { Width::Word } else { Width::Double }
    }
}

/// The memory that an instruction accesses, if machine code knows such accesses: plain ones of one element, for all lanes that run.
fn access(i: &Inst) -> Option<AccessSpace> {
    let aligned = i.imm % i64::from(i.ty.bytes().max(1)) == 0 && i.imm.abs() < MAX_OFFSET;
    if i.guard != NONE || i.n != 1 || i.has(flag::ATOMIC) || !aligned {
        return None;
    }
    match (i.space, i.has(flag::ADDR32)) {
        (Space::Shared, true) => Some(AccessSpace::Shared),
        (Space::Global | Space::Const, false) => Some(AccessSpace::Device { anywhere: false }),
        (Space::Generic, false) => Some(AccessSpace::GENERIC),
        _ => None,
    }
}

/// The space of a load that machine code can execute.
pub(super) fn load(i: &Inst) -> Option<AccessSpace> {
    let fits = match i.ty.bytes() {
        1 | 2 | 4 => !i.has(flag::WIDE_D),
        8 => i.has(flag::WIDE_D),
        _ => false,
    };
    if i.op == Op::Load && fits { access(i) } else { None }
}

/// An instruction that changes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChangeKind {
    Store,
    /// Adds a word atomically.
    Add,
}

/// The space and the kind of a store or atomic that machine code can execute.
pub(super) fn change(i: &Inst) -> Option<(AccessSpace, ChangeKind)> {
    let wide = i.has(flag::WIDE_B);
    let change = match (i.op, i.ty.bytes()) {
        (Op::Store, 1 | 2 | 4) if !wide => ChangeKind::Store,
        (Op::Store, 8) if wide => ChangeKind::Store,
        (Op::Atomic, 4) if matches!(i.ty, Ty::U32 | Ty::S32) && i.sub == AtomicOp::Add as u8 => {
            ChangeKind::Add
        }
        _ => return None,
    };
    Some((access(i)?, change))
}

/// A special register that machine code can read.
pub(super) enum SpecialPlace {
    /// A row of [`WarpThreads`](crate::code_pages::WarpThreads).
    Threads(usize),
    /// A part of the index of the block.
    Block(usize),
}

/// The place of the special register that an instruction reads.
pub(super) fn special(i: &Inst) -> Option<SpecialPlace> {
    let which = Special::ALL[usize::from(i.sub) % Special::ALL.len()];
    Some(match which {
        Special::CtaidX => SpecialPlace::Block(0),
        Special::CtaidY => SpecialPlace::Block(1),
        Special::CtaidZ => SpecialPlace::Block(2),
        _ => SpecialPlace::Threads(which.thread_axis()?),
    })
}

/// The form of an instruction, or `None` if the interpreter executes it.
pub(super) fn form(i: &Inst) -> Option<LaneForm> {
    if let Some(space) = load(i) {
        let d = if i.has(flag::WIDE_D) { Width::Double } else { Width::Word };
        return Some(LaneForm { d, sources: [Some(space.address()), None, None], nans: Nans::Exact });
    }
    if i.op == Op::Special {
        let known = !i.has(flag::WIDE_D) && special(i).is_some();
        return known.then_some(LaneForm { d: Width::Word, sources: [None; 3], nans: Nans::Exact });
    }
    if i.op != Op::Alu {
        return None;
    }
    use Lanewise as L;
    use Width::{Double as D, Mask as M, Word as W};
    let one = |d, a, nans| Some(LaneForm { d, sources: [Some(a), None, None], nans });
    let two = |d, a, b, nans| Some(LaneForm { d, sources: [Some(a), Some(b), None], nans });
    let three = |d, a, b, c, nans| Some(LaneForm { d, sources: [Some(a), Some(b), Some(c)], nans });
    if i.d == NONE {
        return None;
    }
    match i.handler.operation() {
        L::Mov32 => one(W, W, Nans::Copy),
        L::NegF32 | L::AbsF32 => one(W, W, Nans::Pass),
        L::Not32
        | L::NegI32
        | L::AbsI32
        | L::Mask16
        | L::Mask8
        | L::Sext16
        | L::F32FromS32
        | L::F32FromU32 => one(W, W, Nans::Exact),
        L::S32FromF32Rz | L::S32FromF32Rn | L::SatF32 => one(W, W, Nans::Test),
        L::SqrtF32
        | L::RcpF32
        | L::FloorF32
        | L::TruncF32
        | L::RintF32
        | L::CeilF32
        | L::RcpApprox
        | L::RsqrtApprox
        | L::SqrtApprox
        | L::Ex2
        | L::Lg2 => one(W, W, Nans::Number),
        L::Mov64 | L::Not64 | L::NegI64 | L::NegF64 | L::AbsF64 | L::SqrtF64 => one(D, D, Nans::Exact),
        L::Low32 => one(W, D, Nans::Exact),
        L::F32FromF64 => one(W, D, Nans::Number),
        L::Zext32 | L::Sext32 | L::F64FromS32 | L::F64FromU32 | L::F64FromF32 => one(D, W, Nans::Exact),
        L::Add32
        | L::Sub32
        | L::Mul32
        | L::MulHiU32
        | L::MulHiS32
        | L::MulWideU16
        | L::MulWideS16
        | L::And32
        | L::Or32
        | L::Xor32
        | L::Shl32
        | L::ShrU32
        | L::ShrS32
        | L::MinU32
        | L::MinS32
        | L::MaxU32
        | L::MaxS32
        | L::Pack16 => two(W, W, W, Nans::Exact),
        // The sign of a NaN may become that of a number.
        L::CopySign32 => two(W, W, W, Nans::Exact),
        L::AddF32
        | L::SubF32
        | L::MulF32
        | L::AddF32Ftz
        | L::SubF32Ftz
        | L::MulF32Ftz
        | L::DivF32
        | L::MinF32
        | L::MaxF32 => two(W, W, W, Nans::Number),
        // Its zeros have the sign of the dividend, also if that is a NaN.
        L::DivApprox => two(W, W, W, Nans::ExactNumber),
        L::Add64
        | L::Sub64
        | L::Mul64
        | L::And64
        | L::Or64
        | L::Xor64
        | L::AddF64
        | L::SubF64
        | L::MulF64
        | L::DivF64
        | L::CopySign64 => two(D, D, D, Nans::Exact),
        L::MulWideU32 | L::MulWideS32 | L::Pack32 => two(D, W, W, Nans::Exact),
        L::Shl64 | L::ShrU64 => two(D, D, W, Nans::Exact),
        L::MadLo32 | L::Lop3 | L::ShfLWrap | L::ShfRWrap => three(W, W, W, W, Nans::Exact),
        L::FmaF32 | L::FmaF32Ftz => three(W, W, W, W, Nans::Number),
        L::MadLo64 | L::FmaF64 => three(D, D, D, D, Nans::Exact),
        L::MadWideU32 | L::MadWideS32 => three(D, W, W, D, Nans::Exact),
        L::Select if i.has(flag::WIDE_D) => three(D, D, D, M, Nans::Exact),
        L::Select => three(W, W, W, M, Nans::Pass),
        L::Predicate if matches!(i.sub, logic::MOV | logic::NOT) => one(M, M, Nans::Exact),
        L::Predicate => two(M, M, M, Nans::Exact),
        L::EqI32
        | L::NeI32
        | L::LtU32
        | L::LeU32
        | L::GtU32
        | L::GeU32
        | L::LtS32
        | L::LeS32
        | L::GtS32
        | L::GeS32 => two(M, W, W, Nans::Exact),
        L::EqI64
        | L::NeI64
        | L::LtU64
        | L::LeU64
        | L::GtU64
        | L::GeU64
        | L::LtS64
        | L::LeS64
        | L::GtS64
        | L::GeS64 => two(M, D, D, Nans::Exact),
        operation if number_test(operation).is_some_and(|(width, _)| width == W) => two(M, W, W, Nans::Test),
        operation if number_test(operation).is_some() => two(M, D, D, Nans::Exact),
        _ => None,
    }
}

/// The width and the predicate of `vcmpps` of a comparison of numbers.
pub(super) fn number_test(operation: Lanewise) -> Option<(Width, u8)> {
    use Lanewise as L;
    use Width::{Double as D, Word as W};
    Some(match operation {
        L::EqF32 => (W, 0x00),
        L::NeF32 => (W, 0x0c),
        L::LtF32 => (W, 0x11),
        L::LeF32 => (W, 0x12),
        L::GtF32 => (W, 0x1e),
        L::GeF32 => (W, 0x1d),
        L::EquF32 => (W, 0x08),
        L::NeuF32 => (W, 0x04),
        L::LtuF32 => (W, 0x19),
        L::LeuF32 => (W, 0x1a),
        L::GtuF32 => (W, 0x16),
        L::GeuF32 => (W, 0x15),
        L::NumF32 => (W, 0x07),
        L::NanF32 => (W, 0x03),
        L::EqF64 => (D, 0x00),
        L::NeF64 => (D, 0x0c),
        L::LtF64 => (D, 0x11),
        L::LeF64 => (D, 0x12),
        L::GtF64 => (D, 0x1e),
        L::GeF64 => (D, 0x1d),
        L::EquF64 => (D, 0x08),
        L::NeuF64 => (D, 0x04),
        L::LtuF64 => (D, 0x19),
        L::LeuF64 => (D, 0x1a),
        L::GtuF64 => (D, 0x16),
        L::GeuF64 => (D, 0x15),
        L::NumF64 => (D, 0x07),
        L::NanF64 => (D, 0x03),
        _ => return None,
    })
}
