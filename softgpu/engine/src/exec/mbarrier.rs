//! Barriers in memory: counters of arrivals and of bytes in flight.
//!
//! The object has 64 bits: expected arrivals, pending arrivals, pending bytes (signed) and the parity of the phase. A phase ends
//! when nothing is pending. The state that an arrival returns is the object before it.

use super::Fail;
use super::lanes::each;
use super::mem::{self, Ranges, Spaces};
use crate::api::FaultKind;
use crate::ir::{Inst, flag};
use crate::ptx::Space;
use crate::regs::{Frame, NONE};

/// The operation of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum BarrierOp {
    Init,
    Invalidate,
    Arrive,
    /// Arrives, and expects as many arrivals less from the next phase on.
    Drop,
    /// Expects bytes.
    Expect,
    /// Expects bytes, and arrives once.
    ArriveExpect,
    /// Expects bytes, arrives once and drops it.
    DropExpect,
    /// Counts bytes that have arrived.
    Complete,
    /// Compares with the phase of a state.
    Test,
    /// Compares with a parity.
    TestParity,
    /// The pending arrivals of a state.
    PendingCount,
    /// Copies to shared memory, and counts the bytes as arrived.
    CopyIn,
    /// Copies from shared memory; no barrier counts the bytes.
    CopyOut,
}

impl BarrierOp {
    pub(crate) const ALL: [BarrierOp; 13] = [
        BarrierOp::Init,
        BarrierOp::Invalidate,
        BarrierOp::Arrive,
        BarrierOp::Drop,
        BarrierOp::Expect,
        BarrierOp::ArriveExpect,
        BarrierOp::DropExpect,
        BarrierOp::Complete,
        BarrierOp::Test,
        BarrierOp::TestParity,
        BarrierOp::PendingCount,
        BarrierOp::CopyIn,
        BarrierOp::CopyOut,
    ];
}

/// Bits of a count of arrivals, and the most that it can be.
const COUNT_BITS: u32 = 20;
const MOST: u64 = (1 << COUNT_BITS) - 1;
/// Bits of the count of bytes.
const BYTES_BITS: u32 = 21;

/// The fields of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Object {
    expected: u64,
    pending: u64,
    bytes: i64,
    parity: u64,
}

impl Object {
    fn of(bits: u64) -> Object {
        let rest = 64 - BYTES_BITS;
        Object {
            expected: bits & MOST,
            pending: bits >> COUNT_BITS & MOST,
            bytes: (bits >> (2 * COUNT_BITS) << rest).cast_signed() >> rest,
            parity: bits >> 63,
        }
    }

    fn bits(self) -> u64 {
        let bytes = self.bytes.cast_unsigned() & ((1 << BYTES_BITS) - 1);
        self.expected | self.pending << COUNT_BITS | bytes << (2 * COUNT_BITS) | self.parity << 63
    }

    fn arrive(&mut self, count: u64) {
        self.pending = self.pending.saturating_sub(count);
    }

    fn end_phase(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.pending = self.expected;
            self.parity ^= 1;
        }
    }
}

/// Executes an instruction for the lanes of a mask, in ascending order.
pub(crate) fn execute(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    mask: u32,
) -> Result<(), Fail> {
    let op = BarrierOp::ALL[usize::from(i.sub) % BarrierOp::ALL.len()];
    let operand = |lane: usize| match i.b {
        NONE => 1,
        slot => frame.bits(slot, lane, i.has(flag::WIDE_B)),
    };
    if op == BarrierOp::PendingCount {
        each(mask, |lane| frame.set_bits(i.d, lane, false, Object::of(operand(lane)).pending));
        return Ok(());
    }
    let mut left = mask;
    while left != 0 {
        let lane = left.trailing_zeros() as usize;
        left &= left - 1;
        if matches!(op, BarrierOp::CopyIn | BarrierOp::CopyOut) {
            copy(spaces, ranges, frame, i, lane, op == BarrierOp::CopyIn)?;
            if op == BarrierOp::CopyOut {
                continue;
            }
        }
        let address = mem::address(frame, i, lane);
        if mem::misaligned(address, 8) {
            return Err(Fail::new(FaultKind::Misaligned, lane, address));
        }
        let value = operand(lane);
        let p = spaces.pointer(ranges, i.space, address, 8, true, lane)?;
        // One worker owns the block, so plain accesses are enough.
        let old = mem::read(p, 8, false);
        let mut object = Object::of(old);
        match op {
            BarrierOp::Init => {
                let count = value.min(MOST);
                object = Object { expected: count, pending: count, bytes: 0, parity: 0 };
            }
            BarrierOp::Invalidate => object = Object::of(0),
            BarrierOp::Arrive => object.arrive(value),
            BarrierOp::Drop => {
                object.expected = object.expected.saturating_sub(value);
                object.arrive(value);
            }
            BarrierOp::Expect => object.bytes += (value & 0xffff_ffff).cast_signed(),
            BarrierOp::ArriveExpect | BarrierOp::DropExpect => {
                object.bytes += (value & 0xffff_ffff).cast_signed();
                object.expected = object.expected.saturating_sub(u64::from(op == BarrierOp::DropExpect));
                object.arrive(1);
            }
            BarrierOp::Complete | BarrierOp::CopyIn => object.bytes -= (value & 0xffff_ffff).cast_signed(),
            BarrierOp::Test | BarrierOp::TestParity => {
                let waited = if op == BarrierOp::Test { value >> 63 } else { value & 1 };
                frame.set_pred(i.d, 1 << lane, if object.parity != waited { !0 } else { 0 });
                continue;
            }
            BarrierOp::PendingCount | BarrierOp::CopyOut => {}
        }
        if !matches!(op, BarrierOp::Init | BarrierOp::Invalidate | BarrierOp::Expect) {
            object.end_phase();
        }
        mem::write(p, 8, object.bits(), false);
        if i.d != NONE {
            frame.set_bits(i.d, lane, true, old);
        }
    }
    Ok(())
}

/// The copy of one thread, executed at once: the number of bytes is the second operand, and `c` and `e` have the addresses.
fn copy(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    lane: usize,
    inwards: bool,
) -> Result<(), Fail> {
    let bytes = u64::from(frame.get::<u32>(i.b, lane));
    let (to, from) = (frame.get::<u64>(i.c, lane), frame.get::<u64>(i.e, lane));
    for value in [to, from, bytes] {
        if mem::misaligned(value, 16) {
            return Err(Fail::new(FaultKind::Misaligned, lane, value));
        }
    }
    let outside = if i.has(flag::THIRD) { Space::Shared } else { Space::Global };
    let (to_space, from_space) = if inwards { (Space::Shared, outside) } else { (outside, Space::Shared) };
    mem::copy(spaces, ranges, (to_space, to), (from_space, from), bytes, lane)
}
