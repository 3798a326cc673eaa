//! The lowering of barriers in memory, of the election of a lane, and of cache policies.

use super::{Lower, Modifiers, Res};
use crate::exec::Special;
use crate::exec::alu::{self, Cmp};
use crate::exec::mbarrier::BarrierOp;
use crate::exec::warp::VoteMode;
use crate::ir::{Op, flag};
use crate::ptx::{Instruction, Operand, Space, Ty};
use crate::regs::NONE;

impl<'a> Lower<'a, '_> {
    pub(super) fn mbarrier(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let op = m.find(|word| {
            Some(match word {
                "init" => BarrierOp::Init,
                "inval" => BarrierOp::Invalidate,
                "arrive" => BarrierOp::Arrive,
                "arrive_drop" => BarrierOp::Drop,
                "expect_tx" => BarrierOp::Expect,
                "complete_tx" => BarrierOp::Complete,
                "test_wait" | "try_wait" => BarrierOp::Test,
                "pending_count" => BarrierOp::PendingCount,
                _ => return None,
            })
        });
        let Some(mut op) = op else { return self.fail("an operation is missing") };
        let space = m.space.unwrap_or(Space::Generic);
        if !matches!(space, Space::Shared | Space::Generic) || m.take("shared::cluster") {
            return self.unsupported("barriers lie in the shared memory of the block");
        }
        let ty = self.one_type(m);
        // Operations on bytes have no type.
        if !matches!(op, BarrierOp::Expect | BarrierOp::Complete) && ty? != Ty::B64 {
            return self.fail("a barrier has the type .b64");
        }
        let list = inst.operands.as_slice();
        let mut wide = false;
        let (d, address, b) = match op {
            BarrierOp::Init | BarrierOp::Expect | BarrierOp::Complete => {
                let [address, count] = self.operands(inst)?;
                (NONE, address, self.src(count, Ty::U32)?)
            }
            BarrierOp::Invalidate => {
                let [address] = self.operands(inst)?;
                (NONE, address, NONE)
            }
            BarrierOp::PendingCount => {
                let [d, state] = self.operands(inst)?;
                let b = self.src(state, Ty::B64)?;
                let mut i = self.inst(Op::Mbarrier, Ty::B64);
                (i.d, i.b, i.sub) = (self.dst(d, Ty::U32)?, b, op as u8);
                i.flags |= flag::WIDE_B;
                self.emit(i);
                return Ok(());
            }
            BarrierOp::Test => {
                let parity = m.take("parity");
                // The time that a wait may take is a hint.
                let ([d, address, state] | [d, address, state, _]) = list else {
                    return self.fail("takes 3 operands");
                };
                wide = !parity;
                if parity {
                    op = BarrierOp::TestParity;
                }
                let b = self.src(state, if parity { Ty::U32 } else { Ty::B64 })?;
                (self.dst(d, Ty::Pred)?, address, b)
            }
            _ => {
                // A phase that an arrival must not complete is one that it does not complete.
                m.take("noComplete");
                let expects = m.take("expect_tx");
                let (d, address, count) = match list {
                    [address @ Operand::Memory { .. }] => (None, address, None),
                    [address @ Operand::Memory { .. }, count] => (None, address, Some(count)),
                    [d, address] => (Some(d), address, None),
                    [d, address, count] => (Some(d), address, Some(count)),
                    _ => return self.fail("wrong number of operands"),
                };
                if expects {
                    op = if op == BarrierOp::Drop { BarrierOp::DropExpect } else { BarrierOp::ArriveExpect };
                    if count.is_none() {
                        return self.fail("a number of bytes is missing");
                    }
                }
                let b = match count {
                    Some(count) => self.src(count, Ty::U32)?,
                    None => NONE,
                };
                let d = match d {
                    Some(Operand::Name("_")) | None => NONE,
                    Some(d) => self.dst(d, Ty::B64)?,
                };
                (d, address, b)
            }
        };
        let (a, imm, flags) = self.address(address, space)?;
        let mut i = self.inst(Op::Mbarrier, Ty::B64);
        (i.d, i.a, i.b, i.imm, i.space, i.sub) = (d, a, b, imm, space, op as u8);
        i.flags |= flags | if wide { flag::WIDE_B } else { 0 };
        self.emit(i);
        Ok(())
    }

    /// `cp.async.mbarrier.arrive`: the copies before it are complete.
    pub(super) fn copies_arrive(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if !m.take("arrive") || self.one_type(m)? != Ty::B64 {
            return self.fail(".arrive and .b64 are expected");
        }
        let space = m.space.unwrap_or(Space::Generic);
        let counted = m.take("noinc");
        let [address] = self.operands(inst)?;
        let (a, imm, flags) = self.address(address, space)?;
        let mut i = self.inst(Op::Mbarrier, Ty::B64);
        (i.d, i.a, i.b, i.imm, i.space, i.sub) = (NONE, a, NONE, imm, space, BarrierOp::Arrive as u8);
        if !counted {
            // The arrival adds itself to the pending ones first, so that nothing changes.
            i.b = self.bits(0, false)?;
        }
        i.flags |= flags;
        self.emit(i);
        Ok(())
    }

    /// `cp.async.bulk` between global memory and the block's shared memory. A copy is complete when it is issued.
    pub(super) fn copy_in_bulk(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let nop = |lower: &mut Self| {
            let i = lower.inst(Op::Nop, Ty::B32);
            lower.emit(i);
        };
        if m.take("commit_group") {
            nop(self);
            return if inst.operands.is_empty() { Ok(()) } else { self.fail("takes no operands") };
        }
        if m.take("wait_group") {
            m.take("read");
            let [_count] = self.operands(inst)?;
            nop(self);
            return Ok(());
        }
        let not_here = ["tensor", "multicast::cluster", "cp_mask", "ignore_oob", "im2col", "tile"];
        if not_here.iter().any(|word| m.other.contains(word)) {
            return self.unsupported("this form of cp.async.bulk is not supported");
        }
        if m.take("prefetch") {
            m.take("L2");
            let ([from, bytes] | [from, bytes, _]) = inst.operands.as_slice() else {
                return self.fail("takes 2 operands");
            };
            self.address(from, Space::Global)?;
            self.src(bytes, Ty::U32)?;
            nop(self);
            return Ok(());
        }
        let outwards = m.take("bulk_group");
        if !outwards && !m.take("mbarrier::complete_tx::bytes") {
            return self.fail("the mechanism of completion is missing");
        }
        // The block is its whole cluster.
        let to_cluster = m.take("shared::cluster");
        let (to_space, from_space) = match (outwards, to_cluster, m.space, m.second_space) {
            (true, false, Some(Space::Global), Some(Space::Shared)) => (Space::Global, Space::Shared),
            (false, true, Some(from @ (Space::Global | Space::Shared)), None) => (Space::Shared, from),
            (false, false, Some(Space::Shared), Some(Space::Global)) => (Space::Shared, Space::Global),
            _ => return self.fail("not defined between these state spaces"),
        };
        let [to, from, bytes, rest @ ..] = inst.operands.as_slice() else {
            return self.fail("operands are missing");
        };
        let (c, e) = (self.whole_address(to, to_space)?, self.whole_address(from, from_space)?);
        let b = self.src(bytes, Ty::U32)?;
        let (a, imm, flags) = match rest.first() {
            Some(barrier) if !outwards => self.address(barrier, Space::Shared)?,
            None if !outwards => return self.fail("a barrier is missing"),
            _ => (b, 0, 0),
        };
        let op = if outwards { BarrierOp::CopyOut } else { BarrierOp::CopyIn };
        let mut i = self.inst(Op::Mbarrier, Ty::B64);
        (i.d, i.a, i.b, i.c, i.e, i.imm) = (NONE, a, b, c, e, imm);
        (i.space, i.sub) = (Space::Shared, op as u8);
        let both_shared = to_space == Space::Shared && from_space == Space::Shared;
        i.flags |= flags | if both_shared { flag::THIRD } else { 0 };
        self.emit(i);
        Ok(())
    }

    /// An address in a register of its own, of 64 bits.
    fn whole_address(&mut self, operand: &Operand<'a>, space: Space) -> Res<u32> {
        let (slot, offset, flags) = self.address(operand, space)?;
        let (mut wide, sum) = (slot, self.register(Ty::B64)?);
        if flags & flag::ADDR32 != 0 {
            wide = self.register(Ty::B64)?;
            self.alu(alu::resize(true), Ty::B64, wide, [slot, 0, 0], flag::WIDE_D);
        }
        let offset = self.bits(offset.cast_unsigned(), true)?;
        self.alu(alu::add64(), Ty::B64, sum, [wide, offset, 0], flag::WIDE_D | flag::WIDE_A | flag::WIDE_B);
        Ok(sum)
    }

    /// `elect.sync`: the first of the members.
    pub(super) fn elect(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if !m.take("sync") {
            return self.fail(".sync is missing");
        }
        let [Operand::Pair(d, p), members] = inst.operands.as_slice() else {
            return self.fail("takes d|p and a mask");
        };
        let b = self.src(members, Ty::B32)?;
        let ones = self.bits(0xffff_ffff, false)?;
        let (here, reversed) = (self.register(Ty::B32)?, self.register(Ty::B32)?);
        let d = if *d == "_" { self.register(Ty::B32)? } else { self.dst(&Operand::Name(d), Ty::B32)? };
        let p = self.dst(&Operand::Name(p), Ty::Pred)?;
        let mut vote = self.inst(Op::Vote, Ty::B32);
        (vote.d, vote.a, vote.b, vote.sub) = (here, ones, b, VoteMode::Ballot as u8);
        self.emit(vote);
        let (Some(reverse), Some(zeros)) =
            (alu::integer("brev", Ty::B32, 0), alu::integer("clz", Ty::B32, 0))
        else {
            return self.fail("no such operation");
        };
        self.alu(reverse, Ty::B32, reversed, [here, 0, 0], 0);
        self.alu(zeros, Ty::B32, d, [reversed, 0, 0], 0);
        let lane = self.special(Special::LaneId, false)?;
        self.compare_into(Cmp::Eq, Ty::U32, 0, p, d, lane);
        Ok(())
    }

    /// `createpolicy`: a hint that no access uses.
    pub(super) fn policy(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let kinds = [m.take("fractional"), m.take("range"), m.take("cvt")];
        m.take("L2");
        if !kinds.contains(&true) || self.one_type(m)? != Ty::B64 {
            return self.fail("a kind and .b64 are expected");
        }
        let [d, ..] = inst.operands.as_slice() else { return self.fail("operands are missing") };
        let (d, zero) = (self.dst(d, Ty::B64)?, self.bits(0, true)?);
        self.mov(d, zero, true);
        Ok(())
    }
}
