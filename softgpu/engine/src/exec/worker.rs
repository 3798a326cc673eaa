//! A thread that executes blocks: turns of the warps, releases of barriers, parking.

use std::sync::atomic::Ordering;

use super::cta::{Barrier, Cta};
use super::fragment;
use super::grid::{Grid, lock};
use super::interp;
use super::lanes::each;
use super::mem::Ranges;
use super::together::{self, WholeWarp};
use super::warp::{Activation, BarrierKind, Fragment, Wait, Warp};
use crate::api::{Fault, FaultKind, Runtime};
use crate::ir::Op;
use crate::regs::{Block, Frame, NONE};

/// Blocks that a thread executes between two scheduling points.
const SLICE_PIECES: u32 = 8;

/// Rounds over the warps of a block, each of which used up its budget, before its worker takes another block.
const CTA_ROUNDS: u32 = 16;
/// Rounds of a block, and barriers that its warps pass together, after which it has the cost of a used-up budget.
const ROUNDS: u32 = 1024;
/// Turns of fragments before the next warp runs.
const WARP_TURNS: u32 = 16;

/// The reason that a warp yields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Yield {
    /// All fragments wait or are done.
    Blocked,
    /// The budget ran out.
    Budget,
}

/// Allocations that a worker keeps between blocks, with their old contents.
pub(crate) struct BlockWorker<'a, 'g> {
    grid: &'g Grid<'a>,
    ranges: Ranges,
    spare: Vec<Cta>,
    /// Room for the warps of a block that run together.
    together: Vec<WholeWarp>,
    /// Blocks until the next scheduling point.
    left_of_slice: u32,
}

/// Marks a thread as executing blocks, until it is dropped.
struct SliceGuard<'g>(&'g dyn Runtime);

impl Drop for SliceGuard<'_> {
    fn drop(&mut self) {
        self.0.end_slice();
    }
}

enum Outcome {
    Done,
    Parked,
}

impl<'a, 'g> BlockWorker<'a, 'g> {
    pub(crate) fn new(grid: &'g Grid<'a>, spare: Vec<Cta>) -> BlockWorker<'a, 'g> {
        BlockWorker {
            grid,
            ranges: Ranges::default(),
            spare,
            together: Vec::new(),
            left_of_slice: SLICE_PIECES,
        }
    }

    /// Executes blocks until none is left. Returns the allocations.
    pub(crate) fn run(mut self) -> Vec<Cta> {
        self.grid.launch.runtime.begin_slice();
        let _slice = SliceGuard(self.grid.launch.runtime);
        loop {
            if self.grid.failed() {
                break;
            }
            let Some(mut cta) = self.next() else { break };
            self.left_of_slice -= 1;
            if self.left_of_slice == 0 {
                self.left_of_slice = SLICE_PIECES;
                self.grid.launch.runtime.yield_now();
                // Blocks that end at once never look for it themselves.
                if let Some(kind) = self.grid.ended() {
                    self.grid.fail(self.interrupted(&cta, kind));
                    self.spare.push(cta);
                    break;
                }
            }
            match self.turn(&mut cta) {
                Ok(Outcome::Done) => {
                    self.grid.resident.fetch_sub(1, Ordering::SeqCst);
                    self.spare.push(cta);
                }
                Ok(Outcome::Parked) => lock(&self.grid.parked).push_back(cta),
                Err(fault) => {
                    self.grid.fail(fault);
                    self.spare.push(cta);
                    break;
                }
            }
        }
        if self.grid.failed() {
            self.spare.extend(lock(&self.grid.parked).drain(..));
        }
        for cta in &mut self.spare {
            cta.give_back(self.grid.launch.runtime);
        }
        self.spare.truncate(64);
        self.spare
    }

    /// Returns a new block if more may be resident, else the parked block that has waited longest.
    fn next(&mut self) -> Option<Cta> {
        let grid = self.grid;
        let before = grid.resident.fetch_add(1, Ordering::SeqCst);
        if before < grid.limit
            && let Some(linear) = grid.start()
        {
            return Some(self.create(linear));
        }
        grid.resident.fetch_sub(1, Ordering::SeqCst);
        if let Some(cta) = lock(&grid.parked).pop_front() {
            return Some(cta);
        }
        // The limit applies to parked blocks; a worker without work may always start one.
        let linear = grid.start()?;
        grid.resident.fetch_add(1, Ordering::SeqCst);
        Some(self.create(linear))
    }

    fn create(&mut self, linear: u64) -> Cta {
        let grid = self.grid;
        let [gx, gy, _] = grid.launch.grid.map(u64::from);
        let id = [linear % gx, linear / gx % gy, linear / gx / gy].map(|v| u32::try_from(v).unwrap_or(0));
        let mut cta = self.spare.pop().unwrap_or_else(|| Cta::new(id, linear));
        let function = u32::try_from(grid.kernel.function).unwrap_or(0);
        let code = grid.code(function);
        (cta.id, cta.linear, cta.ready, cta.alive) = (id, linear, 0, grid.threads);
        cta.barriers = [Barrier::default(); 16];
        let count = grid.threads.div_ceil(32);
        cta.warps.resize_with(count as usize, Warp::empty);
        cta.borrow(grid.launch.runtime, grid.shared_bytes, code.local_bytes);
        cta.shared.resize(grid.shared_bytes as usize);
        for (index, warp) in (0u32..).zip(&mut cta.warps) {
            let threads = (grid.threads - index * 32).min(32);
            let valid = if threads == 32 { !0 } else { (1u32 << threads) - 1 };
            warp.index = index;
            warp.valid = valid;
            warp.exited = 0;
            warp.fragments.clear();
            warp.fragments.push(Fragment {
                pc: 0,
                mask: valid,
                frame: 0,
                depth: 0,
                turn: 0,
                budget: interp::FRAGMENT_BUDGET,
                wait: Wait::Run,
            });
            warp.free.clear();
            warp.activations.truncate(1);
            match warp.activations.first_mut() {
                Some(first) => first.regs.resize(code.frame_units),
                None => warp.activations.push(Activation {
                    function,
                    regs: Block::new(code.frame_units),
                    live: valid,
                    parent: NONE,
                    return_pc: 0,
                    call_site: 0,
                    local_base: 0,
                    depth: 0,
                }),
            }
            warp.activations[0].function = function;
            warp.activations[0].live = valid;
            if let Some(slot) = code.stack {
                warp.activations[0].regs.broadcast32(slot, 0);
            }
            warp.frame_bytes = warp.activations[0].regs.bytes();
            warp.reserve_local(code.local_bytes);
        }
        cta
    }

    /// Runs the warps of a block until all are done or the block has used its share.
    fn turn(&mut self, cta: &mut Cta) -> Result<Outcome, Fault> {
        // The warps leave the block, so that one of them and the block can change.
        let mut warps = core::mem::take(&mut cta.warps);
        let result = self.rounds(cta, &mut warps);
        cta.warps = warps;
        result.map_err(|fault| fault.unwrap_or_else(|kind| self.interrupted(cta, kind)))
    }

    /// The error is a fault, or the kind of one from outside.
    fn rounds(&mut self, cta: &mut Cta, warps: &mut [Warp]) -> Result<Outcome, Result<Fault, FaultKind>> {
        let (mut spent, mut rounds) = (0, 0u32);
        loop {
            let (mut progress, mut busy) = (false, false);
            let left = ROUNDS.saturating_sub(rounds);
            rounds += together::run(self.grid, &mut self.ranges, cta, warps, &mut self.together, left);
            for n in 0..warps.len() {
                if !warps[n].runnable() && !warps[n].wake() {
                    continue;
                }
                progress = true;
                busy |= self.warp(cta, &mut warps[n]).map_err(Ok)? == Yield::Budget;
                self.release(cta, warps);
            }
            if cta.alive == 0 {
                return Ok(Outcome::Done);
            }
            // Exits may have completed a barrier.
            if cta.complete_by_exit() {
                self.release(cta, warps);
                progress = true;
            }
            if !progress {
                return Err(Err(FaultKind::LaunchFailed));
            }
            if let Some(kind) = self.grid.ended() {
                return Err(Err(kind));
            }
            if self.grid.failed() {
                // Another block has failed, so the result of this one does not matter.
                return Ok(Outcome::Parked);
            }
            // A loop around a barrier uses up no budget but may still wait for another block.
            rounds += 1;
            if busy || rounds >= ROUNDS {
                rounds = 0;
                self.grid.launch.runtime.yield_now();
                spent += 1;
                if spent >= CTA_ROUNDS {
                    if self.grid.others() {
                        return Ok(Outcome::Parked);
                    }
                    spent = 0;
                    std::thread::yield_now();
                }
            }
        }
    }

    /// The end of a block from outside, at the place of its first living thread.
    fn interrupted(&self, cta: &Cta, kind: FaultKind) -> Fault {
        let (thread, line) = cta.warps.iter().find_map(|warp| self.place_of(warp)).unwrap_or_default();
        interp::fault(self.grid, cta, kind, thread, 0, line)
    }

    /// The first living thread of a warp, and its line.
    fn place_of(&self, warp: &Warp) -> Option<(u32, u32)> {
        let f = warp.fragments.first()?;
        let function = warp.activations[f.frame as usize].function;
        let line = self.grid.code(function).insts.get(f.pc as usize).map_or(0, |i| i.line);
        Some((warp.index * 32 + f.mask.trailing_zeros(), line))
    }

    /// Runs a warp until all its fragments wait, or its budget is used up.
    fn warp(&mut self, cta: &mut Cta, warp: &mut Warp) -> Result<Yield, Fault> {
        let mut turns = 0;
        loop {
            let Some(f) = warp.pick() else {
                if warp.wake() {
                    continue;
                }
                return Ok(Yield::Blocked);
            };
            let limit = warp.limit(&f);
            let expired = fragment::run(self.grid, &mut self.ranges, cta, warp, f, limit)?;
            if expired {
                if let Some(kind) = self.grid.ended() {
                    let (thread, line) = self.place_of(warp).unwrap_or_default();
                    return Err(interp::fault(self.grid, cta, kind, thread, 0, line));
                }
                turns += 1;
                if turns >= WARP_TURNS || self.grid.failed() {
                    return Ok(Yield::Budget);
                }
            }
            if cta.ready != 0 {
                return Ok(Yield::Blocked);
            }
        }
    }

    /// Releases all fragments that wait at complete barriers.
    fn release(&self, cta: &mut Cta, warps: &mut [Warp]) {
        while cta.ready != 0 {
            let n = u8::try_from(cta.ready.trailing_zeros()).unwrap_or(0);
            cta.ready &= cta.ready - 1;
            let barrier = cta.barriers[usize::from(n)];
            for warp in &mut *warps {
                for k in 0..warp.fragments.len() {
                    let f = warp.fragments[k];
                    if f.wait != Wait::Barrier(n) {
                        continue;
                    }
                    let activation = &mut warp.activations[f.frame as usize];
                    let function = activation.function;
                    let inst = &self.grid.code(function).insts[f.pc as usize];
                    debug_assert!(inst.op == Op::Barrier);
                    if inst.d != NONE {
                        let frame = Frame::new(&mut activation.regs, self.grid.constants(function));
                        match BarrierKind::of(inst.sub) {
                            BarrierKind::Popc => each(f.mask, |lane| frame.set(inst.d, lane, barrier.popc)),
                            BarrierKind::And => {
                                frame.set_pred(inst.d, f.mask, if barrier.all { !0 } else { 0 })
                            }
                            _ => frame.set_pred(inst.d, f.mask, if barrier.popc != 0 { !0 } else { 0 }),
                        }
                    }
                    warp.fragments[k].wait = Wait::Run;
                    warp.fragments[k].pc += 1;
                }
            }
            cta.barriers[usize::from(n)] = Barrier::default();
        }
    }
}
