//! Blocks whose warps are whole: each warp executes machine code, branches and barriers without a turn for each part, and barriers of all
//! threads cost nothing. The worker calls it before it gives turns. It ends at the first instruction of another kind, and at a branch that
//! some lanes take; turns go on from there. The order of all effects is that of turns: a warp goes on to its barrier before the next one.

use super::cta::Cta;
use super::grid::Grid;
use super::interp::{self, expired, jump};
use super::mem::Ranges;
use super::warp::{BarrierKind, Fragment, Wait, Warp};
use crate::code_pages::RunCall;
use crate::ir::{Inst, Op, Translation, flag};
use crate::regs::{CONST, Frame, NONE};

/// A warp whose living lanes are all in one fragment.
pub(super) struct WholeWarp {
    frame: Frame,
    fragment: Fragment,
    /// The position of the warp in the block.
    position: usize,
}

impl WholeWarp {
    /// The lanes for which the guard of an instruction holds.
    fn guarded(&self, i: &Inst) -> u32 {
        interp::guarded(i, &self.frame, self.fragment.mask)
    }
}

/// Runs the warps of a block as far as they are whole, up to their next `most` barriers. Returns the number of barriers.
pub(super) fn run(
    grid: &Grid<'_>,
    ranges: &mut Ranges,
    cta: &mut Cta,
    warps: &mut [Warp],
    members: &mut Vec<WholeWarp>,
    most: u32,
) -> u32 {
    let Some(translation) = gather(grid, warps, members) else { return 0 };
    let mut block = WholeBlock { grid, ranges, cta, translation };
    let mut barriers = 0;
    while barriers < most && block.segment(warps, members) {
        barriers += 1;
    }
    for member in members.drain(..) {
        warps[member.position].fragments[0] = member.fragment;
    }
    barriers
}

/// Finds the warps and their machine code, if there are several and all are whole. Without a barrier, turns cost nothing.
fn gather<'a>(grid: &Grid<'a>, warps: &mut [Warp], members: &mut Vec<WholeWarp>) -> Option<&'a Translation> {
    members.clear();
    let (mut function, mut known) = (None, None);
    for (position, warp) in warps.iter_mut().enumerate() {
        let alive = warp.alive();
        if alive == 0 {
            continue;
        }
        let [fragment] = warp.fragments[..] else { return None };
        let activation = &mut warp.activations[fragment.frame as usize];
        let own = activation.function;
        if fragment.mask != alive || fragment.wait != Wait::Run || *function.get_or_insert(own) != own {
            return None;
        }
        let translation = grid.code(own).machine.known().filter(|translation| translation.has_barrier)?;
        known = Some(translation);
        let frame = Frame::new(&mut activation.regs, grid.constants(own));
        members.push(WholeWarp { frame, fragment, position });
    }
    known.filter(|_| members.len() > 1)
}

/// The block that runs.
struct WholeBlock<'b, 'a> {
    grid: &'b Grid<'a>,
    ranges: &'b mut Ranges,
    cta: &'b mut Cta,
    translation: &'a Translation,
}

impl WholeBlock<'_, '_> {
    /// Brings all warps behind their next barrier. Returns false if one of them stays at another instruction; those after it have not run.
    fn segment(&mut self, warps: &mut [Warp], members: &mut [WholeWarp]) -> bool {
        let mut barrier = None;
        for member in &mut *members {
            while self.step(&mut warps[member.position], member) {}
            let pc = member.fragment.pc;
            if !self.is_barrier(member) || *barrier.get_or_insert(pc) != pc {
                return false;
            }
        }
        for member in members {
            member.fragment.pc += 1;
        }
        true
    }

    /// Executes one instruction. Returns false if the warp stays there.
    fn step(&mut self, warp: &mut Warp, member: &mut WholeWarp) -> bool {
        let pc = member.fragment.pc;
        let i = &self.translation.insts[pc as usize];
        match i.op {
            Op::Run => self.execute(i, warp, member),
            Op::Alu => {
                let lanes = member.guarded(i);
                if lanes != 0 {
                    i.handler.call(&member.frame, i, lanes);
                }
                member.fragment.pc = pc + 1;
                true
            }
            Op::Bra => {
                let lanes = member.guarded(i);
                if lanes == 0 {
                    member.fragment.pc = pc + 1;
                    return true;
                }
                let cost = i32::from(i.has(flag::BACKWARD));
                if lanes != member.fragment.mask || member.fragment.budget <= cost {
                    return false;
                }
                member.fragment.budget -= cost;
                member.fragment.pc = jump(i);
                true
            }
            _ => false,
        }
    }

    /// Executes machine code. Returns false if it declines, or uses up the budget.
    fn execute(&mut self, i: &Inst, warp: &mut Warp, member: &mut WholeWarp) -> bool {
        let WholeWarp { frame, fragment, .. } = member;
        let call = RunCall {
            mask: fragment.mask,
            running: 0,
            budget: fragment.budget,
            left: fragment.budget,
            shared: self.cta.shared.pointer(),
            shared_len: u64::from(self.grid.shared_bytes),
            scratch: &mut self.ranges.scratch,
            missed: 0,
            threads: self.grid.threads_of(warp.index),
            block: self.cta.id,
        };
        let range = |address, write| self.grid.launch.memory.range(address, write);
        let Ok(ran) = self.translation.run(i, frame, call, range) else { return false };
        fragment.budget = ran.budget;
        if ran.running != 0 {
            *fragment = expired(*fragment);
            let rest = fragment.mask & !ran.running;
            if rest != 0 {
                warp.fragments.push(Fragment { pc: ran.end, mask: rest, ..*fragment });
            }
            fragment.mask = ran.running;
            return false;
        }
        fragment.pc = ran.end;
        true
    }

    /// True if a warp is at a barrier of all threads of the block, at which none is yet.
    fn is_barrier(&self, member: &WholeWarp) -> bool {
        let i = &self.translation.insts[member.fragment.pc as usize];
        i.op == Op::Barrier
            && i.guard == NONE
            && i.b == NONE
            && i.a & CONST != 0
            && BarrierKind::of(i.sub) == BarrierKind::Sync
            && self.cta.is_idle(member.frame.get(i.a, 0))
    }
}
