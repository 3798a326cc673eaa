//! The interpreter: one dispatch executes one instruction for the lanes of a fragment. In one file, because the dispatch is one
//! table of all instructions.

use super::cta::Cta;
use super::grid::Grid;
use super::host;
use super::image;
use super::lanes::each;
use super::machine;
use super::matrix;
use super::mbarrier;
use super::mem::{self, Ranges, Spaces};
use super::warp::{self, Activation, BarrierKind, Fragment, MAX_LOCAL, SPIN_COST, Wait, Warp};
use super::{Fail, Special};
use crate::api::{Fault, FaultKind};
use crate::code_pages::RunCall;
use crate::ir::{Argument, Inst, Op, Target, flag, token_function};
use crate::regs::{Block, CONST, Frame, NONE, UNITS};

/// Backward branches that a fragment may take before another fragment of its warp runs.
pub(crate) const FRAGMENT_BUDGET: i32 = 4096;
/// Depth of calls, and bytes of register frames per warp.
const MAX_DEPTH: u32 = 1024;
const MAX_FRAME_BYTES: usize = 64 << 20;

/// Builds the report of a fault.
pub(crate) fn fault(
    grid: &Grid<'_>,
    cta: &Cta,
    kind: FaultKind,
    thread: u32,
    address: u64,
    line: u32,
) -> Fault {
    Fault { kind, cta: cta.id, thread: grid.thread_position(thread), address, line }
}

/// Runs one fragment until it waits, splits, meets another one or ends; true if its budget ran out.
#[inline(always)]
pub(crate) fn fragment<const FAST: bool>(
    grid: &Grid<'_>,
    ranges: &mut Ranges,
    cta: &mut Cta,
    warp: &mut Warp,
    mut f: Fragment,
    limit: u32,
) -> Result<bool, Fault> {
    let activation = &mut warp.activations[f.frame as usize];
    let code = grid.code(activation.function);
    let frame = Frame::new(&mut activation.regs, grid.constants(activation.function));
    let local_base = activation.local_base;
    let translation = code.machine.enter(code, machine::translate);
    let mut insts = translation.map_or(code.insts.as_slice(), |t| t.insts.as_slice());
    let extra = code.extra.as_slice();
    let spaces = Spaces {
        memory: grid.launch.memory,
        params: &grid.params,
        shared: cta.shared.pointer(),
        shared_len: u64::from(grid.shared_bytes),
        local: warp.local.pointer(),
        local_stride: u64::from(warp.local_stride),
    };
    let mask = f.mask;
    let mut pc = f.pc;
    // The end of instructions that are interpreted although they have machine code, or the limit.
    let mut stop = limit;
    loop {
        let i = &insts[pc as usize];
        let m = guarded(i, &frame, mask);
        // Splits off the lanes whose guard is false; they continue while the others wait or leave.
        macro_rules! split_rest {
            () => {
                if m != mask {
                    warp.fragments.push(Fragment { pc: pc + 1, mask: mask & !m, ..f });
                }
            };
        }
        macro_rules! check {
            ($e:expr) => {
                if let Err(fail) = $e {
                    return Err(locate(grid, cta, warp, i, fail));
                }
            };
        }
        match i.op {
            Op::Alu => {
                if m != 0 {
                    i.handler.call(&frame, i, m);
                }
            }
            Op::Run => {
                let call = RunCall {
                    mask,
                    running: 0,
                    budget: f.budget,
                    left: f.budget,
                    shared: spaces.shared,
                    shared_len: spaces.shared_len,
                    scratch: &mut ranges.scratch,
                    missed: 0,
                    threads: grid.threads_of(warp.index),
                    block: cta.id,
                };
                let range = |address, write| spaces.memory.range(address, write);
                let ran = translation.map_or(Err(limit), |t| t.run(i, &frame, call, range));
                let ran = match ran {
                    Ok(ran) => ran,
                    Err(end) => {
                        // The original has the instructions of the run.
                        insts = code.insts.as_slice();
                        stop = end.min(limit);
                        continue;
                    }
                };
                f.budget = ran.budget;
                if ran.running != 0 {
                    f = expired(f);
                    warp.fragments.push(Fragment { pc, mask: ran.running, ..f });
                    if ran.running != mask {
                        warp.fragments.push(Fragment { pc: ran.end, mask: mask & !ran.running, ..f });
                    }
                    return Ok(true);
                }
                // The end of the loop advances by one.
                pc = ran.end - 1;
            }
            Op::Bra => {
                if m == mask {
                    pc = jump(i);
                    // No branch leads into a run.
                    if let Some(translation) = translation {
                        (insts, stop) = (translation.insts.as_slice(), limit);
                    }
                    if i.has(flag::BACKWARD) {
                        f.budget -= 1;
                        if f.budget <= 0 {
                            warp.fragments.push(Fragment { pc, ..expired(f) });
                            return Ok(true);
                        }
                        if pc >= limit || lower(warp, &f, pc) {
                            f.pc = pc;
                            warp.fragments.push(f);
                            return Ok(false);
                        }
                    } else if pc >= limit {
                        f.pc = pc;
                        warp.fragments.push(f);
                        return Ok(false);
                    }
                    continue;
                }
                if m != 0 {
                    f.budget -= i32::from(i.has(flag::BACKWARD));
                    let over = f.budget <= 0;
                    if over {
                        f = expired(f);
                    }
                    warp.fragments.push(Fragment { pc: jump(i), mask: m, ..f });
                    warp.fragments.push(Fragment { pc: pc + 1, mask: mask & !m, ..f });
                    return Ok(over);
                }
            }
            Op::Load => {
                if m != 0 {
                    check!(mem::load::<FAST>(&spaces, ranges, &frame, i, extra, m));
                    if i.has(flag::ATOMIC) {
                        f.budget -= SPIN_COST;
                    }
                }
            }
            Op::Store => {
                if m != 0 {
                    check!(mem::store(&spaces, ranges, &frame, i, extra, m));
                }
            }
            Op::Atomic => {
                if m != 0 {
                    check!(mem::atomic(&spaces, ranges, &frame, i, extra, m));
                    f.budget -= SPIN_COST;
                }
            }
            Op::Mbarrier => {
                if m != 0 {
                    check!(mbarrier::execute(&spaces, ranges, &frame, i, m));
                    f.budget -= SPIN_COST;
                }
            }
            Op::CpAsync => {
                if m != 0 {
                    check!(mem::copy_async(&spaces, ranges, &frame, i, extra, m));
                }
            }
            Op::Image => {
                if m != 0 {
                    check!(image::execute(grid.launch, &mut ranges.images, code, &frame, i, m));
                }
            }
            Op::Special => {
                if m != 0 {
                    special(grid, cta.id, cta.linear, warp.index, &frame, i, m);
                }
            }
            Op::LocalAddress => {
                let v = u64::from(local_base).wrapping_add_signed(i.imm);
                each(m, |lane| frame.set_bits(i.d, lane, i.has(flag::WIDE_D), v));
            }
            Op::Alloca => {
                if m != 0 {
                    check!(warp.allocate(&frame, i, local_base + code.local_bytes, m));
                    // The local memory may have another address now.
                    warp.fragments.push(Fragment { pc: pc + 1, ..f });
                    return Ok(false);
                }
            }
            Op::ActiveMask => each(m, |lane| frame.set(i.d, lane, m)),
            Op::Fence => mem::fence(),
            Op::Nop => {}
            Op::Sleep => {
                if m != 0 {
                    warp.fragments.push(Fragment { pc: pc + 1, ..expired(f) });
                    return Ok(true);
                }
            }
            Op::Shfl
            | Op::Vote
            | Op::Match
            | Op::Redux
            | Op::LdMatrix
            | Op::Mma
            | Op::WmmaLoad
            | Op::WmmaStore => {
                if m != 0 {
                    let slot = match i.op {
                        Op::Shfl => u32::try_from(i.imm).unwrap_or(0),
                        _ => i.b,
                    };
                    let whole = matches!(i.op, Op::LdMatrix | Op::Mma | Op::WmmaLoad | Op::WmmaStore);
                    let members = if whole { warp.alive() } else { warp::members(&frame, slot, m) };
                    let need = members & warp.alive();
                    if need & !m != 0 {
                        split_rest!();
                        // Other lanes may have arrived already.
                        let mut here = Fragment { pc, mask: m, wait: Wait::Lanes(members), ..f };
                        warp.fragments.retain(|g| {
                            let same = g.pc == pc && g.frame == f.frame && matches!(g.wait, Wait::Lanes(_));
                            if same {
                                here.mask |= g.mask;
                                if let (Wait::Lanes(a), Wait::Lanes(b)) = (here.wait, g.wait) {
                                    here.wait = Wait::Lanes(a | b);
                                }
                            }
                            !same
                        });
                        warp.fragments.push(here);
                        warp.wake();
                        return Ok(false);
                    }
                    let mut sound = true;
                    match i.op {
                        Op::Shfl => {
                            sound = members & m == m && warp::groups(&frame, slot, m, |_| {});
                            warp::shfl(&frame, i, m);
                        }
                        Op::Vote => sound = warp::groups(&frame, slot, m, |g| warp::vote(&frame, i, g)),
                        Op::Match => {
                            sound = warp::groups(&frame, slot, m, |g| warp::match_lanes(&frame, i, g))
                        }
                        Op::Redux => sound = warp::groups(&frame, slot, m, |g| warp::redux(&frame, i, g)),
                        _ => check!(matrix::execute(&spaces, ranges, &frame, i, extra, m)),
                    }
                    if !sound {
                        return Err(locate(
                            grid,
                            cta,
                            warp,
                            i,
                            Fail::new(FaultKind::IllegalInstruction, m.trailing_zeros() as usize, 0),
                        ));
                    }
                }
            }
            Op::WarpBarrier => {
                if m != 0 {
                    // Lanes with another mask are at another barrier.
                    let alive = warp.alive();
                    let members = |group: u32| frame.get::<u32>(i.a, group.trailing_zeros() as usize);
                    let mut complete = true;
                    let sound = warp::groups(&frame, i.a, m, |group| {
                        complete &= members(group) & alive & !group == 0;
                    });
                    if !sound {
                        return Err(locate(
                            grid,
                            cta,
                            warp,
                            i,
                            Fail::new(FaultKind::IllegalInstruction, m.trailing_zeros() as usize, 0),
                        ));
                    }
                    if !complete {
                        split_rest!();
                        warp::groups(&frame, i.a, m, |group| {
                            let wait = Wait::WarpBarrier(members(group));
                            warp.fragments.push(Fragment { pc, mask: group, wait, ..f });
                        });
                        warp.wake();
                        return Ok(false);
                    }
                }
            }
            Op::Barrier => {
                if m != 0 {
                    let first = m.trailing_zeros() as usize;
                    let id: u32 = frame.get(i.a, first);
                    let count = if i.b == NONE { None } else { Some(frame.get::<u32>(i.b, first)) };
                    if id > 15 || count.is_some_and(|c| c == 0 || c > 1024 + 31) {
                        return Err(locate(
                            grid,
                            cta,
                            warp,
                            i,
                            Fail::new(FaultKind::IllegalInstruction, first, 0),
                        ));
                    }
                    // Lanes at another barrier get a turn of their own.
                    let mut same = m;
                    if i.a & CONST == 0 {
                        same = 0;
                        each(m, |lane| same |= u32::from(frame.get::<u32>(i.a, lane) == id) << lane);
                    }
                    if cta.ready >> id & 1 != 0 {
                        f.pc = pc;
                        warp.fragments.push(f);
                        return Ok(false);
                    }
                    let kind = BarrierKind::of(i.sub);
                    let truth = matches!(kind, BarrierKind::Popc | BarrierKind::And | BarrierKind::Or)
                        .then(|| frame.pred(i.c) ^ if i.has(flag::NOT_C) { !0 } else { 0 });
                    let waits = kind != BarrierKind::Arrive;
                    let leader = warp.alive().trailing_zeros() as usize;
                    let absent = if same >> leader & 1 != 0 { (!warp.alive()).count_ones() } else { 0 };
                    cta.arrive(u8::try_from(id).unwrap_or(0), count, same, absent, truth, waits);
                    if same != m {
                        warp.fragments.push(Fragment { pc, mask: m & !same, ..f });
                    }
                    split_rest!();
                    if waits {
                        let wait = Wait::Barrier(u8::try_from(id).unwrap_or(0));
                        warp.fragments.push(Fragment { pc, mask: same, wait, ..f });
                    } else {
                        warp.fragments.push(Fragment { pc: pc + 1, mask: same, ..f });
                    }
                    return Ok(false);
                }
            }
            Op::Exit => {
                if m != 0 {
                    warp.exited |= m;
                    cta.alive -= m.count_ones();
                    leave(warp, f.frame, m);
                    split_rest!();
                    return Ok(false);
                }
            }
            Op::Ret => {
                if m != 0 {
                    split_rest!();
                    give_back(grid, warp, f, m);
                    return Ok(false);
                }
            }
            Op::Trap => {
                if m != 0 {
                    return Err(locate(
                        grid,
                        cta,
                        warp,
                        i,
                        Fail::new(FaultKind::Trap, m.trailing_zeros() as usize, 0),
                    ));
                }
            }
            Op::Brx => {
                if m != 0 {
                    split_rest!();
                    let table = &code.tables[usize::try_from(i.imm).unwrap_or(0)];
                    let mut backward = false;
                    let mut left = m;
                    while left != 0 {
                        let lane = left.trailing_zeros() as usize;
                        let index: u32 = frame.get(i.a, lane);
                        let Some(&target) = table.get(index as usize) else {
                            return Err(locate(
                                grid,
                                cta,
                                warp,
                                i,
                                Fail::new(FaultKind::InvalidPc, lane, u64::from(index)),
                            ));
                        };
                        let mut same = 0;
                        each(left, |l| same |= u32::from(frame.get::<u32>(i.a, l) == index) << l);
                        backward |= target <= pc;
                        let f = if target <= pc { expired(f) } else { f };
                        warp.fragments.push(Fragment { pc: target, mask: same, ..f });
                        left &= !same;
                    }
                    return Ok(backward);
                }
            }
            Op::Call | Op::CallIndirect => {
                if m != 0 {
                    let site = u32::try_from(i.imm).unwrap_or(0);
                    match code.calls[site as usize].target {
                        Target::Builtin(which) => {
                            let callers = host::Callers { block: cta.id, warp: warp.index, mask: m };
                            check!(host::call(
                                grid,
                                &spaces,
                                ranges,
                                &frame,
                                which,
                                &code.calls[site as usize],
                                callers
                            ));
                        }
                        Target::Function(function) => {
                            split_rest!();
                            check!(enter(grid, warp, f, m, function, site, pc));
                            return Ok(false);
                        }
                        Target::Slot(slot) => {
                            split_rest!();
                            let mut left = m;
                            while left != 0 {
                                let lane = left.trailing_zeros() as usize;
                                let token: u64 = frame.get(slot, lane);
                                let mut same = 0;
                                each(left, |l| same |= u32::from(frame.get::<u64>(slot, l) == token) << l);
                                left &= !same;
                                let bad = Fail::new(FaultKind::InvalidPc, lane, token);
                                let Some(function) = token_function(token) else {
                                    return Err(locate(grid, cta, warp, i, bad));
                                };
                                let callee = grid.module.functions().get(function as usize);
                                let fits = callee.is_some_and(|c| {
                                    let site = &code.calls[site as usize];
                                    c.defined
                                        && c.params.len() == site.arguments.len()
                                        && c.returns.len() >= site.results.len()
                                });
                                if !fits {
                                    return Err(locate(grid, cta, warp, i, bad));
                                }
                                check!(enter(grid, warp, f, same, function, site, pc));
                            }
                            return Ok(false);
                        }
                    }
                }
            }
        }
        pc += 1;
        if pc >= stop {
            if pc >= limit {
                f.pc = pc;
                warp.fragments.push(f);
                return Ok(false);
            }
            // The run that the interpreter had to execute ends here.
            stop = limit;
            if let Some(translation) = translation {
                insts = translation.insts.as_slice();
            }
        }
    }
}

/// The lanes of a mask for which the guard of an instruction holds.
#[inline(always)]
pub(super) fn guarded(i: &Inst, frame: &Frame, mask: u32) -> u32 {
    if i.guard == NONE {
        return mask;
    }
    mask & (frame.pred(i.guard) ^ if i.has(flag::NOT) { !0 } else { 0 })
}

/// Marks a fragment whose budget is used up.
pub(super) fn expired(f: Fragment) -> Fragment {
    Fragment { turn: f.turn.wrapping_add(1), budget: FRAGMENT_BUDGET, ..f }
}

#[inline(always)]
pub(super) fn jump(i: &Inst) -> u32 {
    u32::try_from(i.imm).unwrap_or(0)
}

/// True if another fragment of the frame runs at or below `pc`, for which the limit of this run is no longer valid.
#[inline(always)]
fn lower(warp: &Warp, f: &Fragment, pc: u32) -> bool {
    warp.fragments.iter().any(|g| g.wait == Wait::Run && g.frame == f.frame && g.pc >= pc && g.pc <= f.pc)
}

#[cold]
fn locate(grid: &Grid<'_>, cta: &Cta, warp: &Warp, i: &Inst, fail: Fail) -> Fault {
    let lane = u32::try_from(fail.lane).unwrap_or(0);
    fault(grid, cta, fail.kind, warp.index * 32 + lane, fail.address, i.line)
}

/// Removes exited lanes from the activations that contain them.
fn leave(warp: &mut Warp, from: u32, mask: u32) {
    let mut at = from;
    while at != NONE {
        let a = &mut warp.activations[at as usize];
        a.live &= !mask;
        let parent = a.parent;
        if a.live == 0 && parent != NONE {
            warp.free.push(at);
        }
        at = parent;
    }
}

/// Calls `function` with the lanes of `mask`.
fn enter(
    grid: &Grid<'_>,
    warp: &mut Warp,
    f: Fragment,
    mask: u32,
    function: u32,
    site: u32,
    pc: u32,
) -> Result<(), Fail> {
    let overflow = Fail::new(FaultKind::StackOverflow, mask.trailing_zeros() as usize, 0);
    let callee = grid.code(function);
    let caller = &warp.activations[f.frame as usize];
    let caller_function = caller.function;
    let caller_code = grid.code(caller_function);
    let caller_base = caller.local_base + caller_code.local_bytes;
    let depth = caller.depth + 1;
    let from = Frame::new(&mut warp.activations[f.frame as usize].regs, grid.constants(caller_function));
    let mut taken = 0;
    if let Some(slot) = caller_code.stack {
        each(mask, |lane| taken = from.get::<u32>(slot, lane).max(taken));
    }
    if taken > MAX_LOCAL {
        return Err(overflow);
    }
    let local_base = (caller_base + taken).next_multiple_of(16);
    if depth > MAX_DEPTH || local_base + callee.local_bytes > MAX_LOCAL {
        return Err(overflow);
    }
    let index = match warp.free.pop() {
        Some(index) => {
            let regs = &mut warp.activations[index as usize].regs;
            let before = regs.bytes();
            regs.resize(callee.frame_units);
            warp.frame_bytes += regs.bytes() - before;
            index
        }
        None => {
            let regs = Block::new(callee.frame_units);
            warp.frame_bytes += regs.bytes();
            warp.activations.push(Activation {
                function,
                regs,
                live: 0,
                parent: NONE,
                return_pc: 0,
                call_site: 0,
                local_base: 0,
                depth: 0,
            });
            u32::try_from(warp.activations.len() - 1).unwrap_or(0)
        }
    };
    if warp.frame_bytes > MAX_FRAME_BYTES {
        return Err(overflow);
    }
    warp.reserve_local(local_base + callee.local_bytes);
    let a = &mut warp.activations[index as usize];
    (a.function, a.live, a.parent, a.return_pc) = (function, mask, f.frame, pc + 1);
    (a.call_site, a.local_base, a.depth) = (site, local_base, depth);
    let to = Frame::new(&mut a.regs, grid.constants(function));
    let from = Frame::new(&mut warp.activations[f.frame as usize].regs, grid.constants(caller_function));
    if let Some(slot) = callee.stack {
        each(mask, |lane| to.set(slot, lane, 0u32));
    }
    for (argument, formal) in caller_code.calls[site as usize].arguments.iter().zip(&callee.params) {
        copy(&from, *argument, &to, *formal, mask);
    }
    warp.fragments.push(Fragment { pc: 0, mask, frame: index, depth, ..f });
    Ok(())
}

/// Returns the lanes of `mask` to the caller.
fn give_back(grid: &Grid<'_>, warp: &mut Warp, f: Fragment, mask: u32) {
    let a = &mut warp.activations[f.frame as usize];
    let (function, parent, return_pc, site) = (a.function, a.parent, a.return_pc, a.call_site);
    a.live &= !mask;
    let done = a.live == 0;
    let depth = a.depth.saturating_sub(1);
    let from = Frame::new(&mut a.regs, grid.constants(function));
    let caller = &mut warp.activations[parent as usize];
    let caller_function = caller.function;
    let to = Frame::new(&mut caller.regs, grid.constants(caller_function));
    let results = &grid.code(caller_function).calls[site as usize].results;
    for (result, formal) in results.iter().zip(&grid.code(function).returns) {
        copy(&from, *formal, &to, *result, mask);
    }
    if done {
        warp.free.push(f.frame);
    }
    warp.fragments.push(Fragment { pc: return_pc, mask, frame: parent, depth, ..f });
}

/// Copies one argument between frames; words that the source lacks keep their value in the target.
fn copy(from: &Frame, source: Argument, to: &Frame, target: Argument, mask: u32) {
    let word = |a: Argument, n: u32, lane: usize| -> Option<u32> {
        match a {
            Argument::Words(first, words) if n < words => Some(from.get(first + n * UNITS, lane)),
            Argument::Narrow(slot) if n == 0 => Some(from.get(slot, lane)),
            #[expect(clippy::cast_possible_truncation, reason = "one half")]
            Argument::Wide(slot) if n < 2 => Some((from.get::<u64>(slot, lane) >> (32 * n)) as u32),
            _ => None,
        }
    };
    each(mask, |lane| match target {
        Argument::Words(first, words) => {
            for n in 0..words {
                if let Some(v) = word(source, n, lane) {
                    to.set(first + n * UNITS, lane, v);
                }
            }
        }
        Argument::Narrow(slot) => {
            if let Some(v) = word(source, 0, lane) {
                to.set(slot, lane, v);
            }
        }
        Argument::Wide(slot) => {
            let (low, high) = (word(source, 0, lane).unwrap_or(0), word(source, 1, lane).unwrap_or(0));
            to.set(slot, lane, u64::from(low) | u64::from(high) << 32);
        }
        Argument::Sink => {}
    });
}

/// Reads a special register that differs between threads, blocks or moments.
fn special(grid: &Grid<'_>, cta: [u32; 3], linear: u64, warp: u32, frame: &Frame, i: &Inst, mask: u32) {
    let which = Special::ALL[usize::from(i.sub) % Special::ALL.len()];
    let launch = grid.launch;
    let wide = i.has(flag::WIDE_D);
    let nanos = || u64::try_from(grid.started.elapsed().as_nanos()).unwrap_or(u64::MAX) + 1;
    let now = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
    };
    let uniform = match which {
        Special::CtaidX => u64::from(cta[0]),
        Special::CtaidY => u64::from(cta[1]),
        Special::CtaidZ => u64::from(cta[2]),
        Special::WarpId => u64::from(warp),
        Special::SmId => linear % u64::from(launch.resident_ctas.max(1)),
        Special::Clock | Special::Clock64 => nanos(),
        Special::ClockHi => nanos() >> 32,
        Special::GlobalTimer => now(),
        Special::GlobalTimerLo => now() & 0xffff_ffff,
        Special::GlobalTimerHi => now() >> 32,
        Special::TidX | Special::TidY | Special::TidZ | Special::LaneId => {
            let axis = which.thread_axis().unwrap_or(0);
            return lanes(frame, i, mask, |n| grid.threads_of(warp)[axis][n as usize & 31]);
        }
        Special::MaskEq => return lanes(frame, i, mask, |n| 1 << n),
        Special::MaskLt => return lanes(frame, i, mask, |n| (1 << n) - 1),
        Special::MaskLe => return lanes(frame, i, mask, |n| u32::MAX >> (31 - n)),
        Special::MaskGt => return lanes(frame, i, mask, |n| !(u32::MAX >> (31 - n))),
        Special::MaskGe => return lanes(frame, i, mask, |n| u32::MAX << n),
        _ => return lanes(frame, i, mask, |n| n),
    };
    if mask == !0 && !wide {
        frame.store(i.d, &[(uniform & 0xffff_ffff) as u32; 32]);
    } else {
        each(mask, |lane| frame.set_bits(i.d, lane, wide, uniform));
    }
}

/// Writes a value per lane.
#[inline(always)]
fn lanes(frame: &Frame, i: &Inst, mask: u32, f: impl Fn(u32) -> u32) {
    let mut values = [0u32; 32];
    for (n, v) in (0u32..).zip(&mut values) {
        *v = f(n);
    }
    if mask == !0 && !i.has(flag::WIDE_D) {
        frame.store(i.d, &values);
    } else {
        each(mask, |lane| frame.set_bits(i.d, lane, i.has(flag::WIDE_D), u64::from(values[lane])));
    }
}
