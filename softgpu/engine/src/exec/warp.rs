//! A warp as data (fragments, register frames, local memory), and the operations between its lanes.

use super::Fail;
use super::lanes::each;
use super::mem::Bytes;
use crate::api::FaultKind;
use crate::ir::{Inst, flag};
use crate::regs::{Block, Frame, NONE};

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident { $($variant:ident),* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum $name { $($variant),* }
        impl $name {
            const ALL: &'static [$name] = &[$($name::$variant),*];
            /// Decodes the `sub` field of an instruction.
            pub(crate) fn of(sub: u8) -> $name {
                Self::ALL[usize::from(sub) % Self::ALL.len()]
            }
        }
    };
}

numbered! {
    /// Modes of `shfl`.
    ShflMode { Up, Down, Butterfly, Index }
}
numbered! {
    /// Modes of `vote`.
    VoteMode { All, Any, Uni, Ballot }
}
numbered! {
    /// Operations of `redux`.
    ReduxOp { Add, Min, Max, And, Or, Xor }
}
numbered! {
    /// Kinds of `bar` and `barrier`.
    BarrierKind { Sync, Arrive, Popc, And, Or }
}

impl ReduxOp {
    pub(crate) fn parse(name: &str) -> Option<ReduxOp> {
        Some(match name {
            "add" => ReduxOp::Add,
            "min" => ReduxOp::Min,
            "max" => ReduxOp::Max,
            "and" => ReduxOp::And,
            "or" => ReduxOp::Or,
            "xor" => ReduxOp::Xor,
            _ => return None,
        })
    }
}

/// The reason that a fragment does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The fragment runs.
    Run,
    /// Waits at a CTA barrier.
    Barrier(u8),
    /// Waits at a warp operation until these lanes arrive.
    Lanes(u32),
    /// Waits at `bar.warp.sync` with this mask.
    WarpBarrier(u32),
}

/// Local memory per thread, all frames together.
pub(crate) const MAX_LOCAL: u32 = 512 << 10;

/// Budget that a volatile or ordered access, or an atomic, costs: spin loops yield sooner.
pub(crate) const SPIN_COST: i32 = 64;

/// Lanes that are at the same instruction of the same frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    pub(crate) pc: u32,
    pub(crate) mask: u32,
    pub(crate) frame: u32,
    pub(crate) depth: u32,
    /// Number of times that the budget ran out; fragments with the lowest number run first.
    pub(crate) turn: u32,
    /// Remaining budget. The parts of a fragment that splits inherit it, so that splitting does not gain time.
    pub(crate) budget: i32,
    pub(crate) wait: Wait,
}

/// One activation of a function.
pub(crate) struct Activation {
    pub(crate) function: u32,
    pub(crate) regs: Block,
    pub(crate) live: u32,
    pub(crate) parent: u32,
    pub(crate) return_pc: u32,
    pub(crate) call_site: u32,
    pub(crate) local_base: u32,
    pub(crate) depth: u32,
}

pub(crate) struct Warp {
    pub(crate) index: u32,
    /// Lanes below the block size.
    pub(crate) valid: u32,
    pub(crate) exited: u32,
    pub(crate) fragments: Vec<Fragment>,
    pub(crate) activations: Vec<Activation>,
    pub(crate) free: Vec<u32>,
    pub(crate) local: Bytes,
    pub(crate) local_stride: u32,
    /// Size of all register frames.
    pub(crate) frame_bytes: usize,
}

/// Bytes of local memory per lane that hold `bytes`.
pub(crate) fn local_stride(bytes: u32) -> u32 {
    bytes.next_power_of_two().max(64)
}

impl Warp {
    pub(crate) fn empty() -> Warp {
        Warp {
            index: 0,
            valid: 0,
            exited: 0,
            fragments: Vec::new(),
            activations: Vec::new(),
            free: Vec::new(),
            local: Bytes::new(),
            local_stride: 0,
            frame_bytes: 0,
        }
    }

    /// Lanes that exist and have not exited.
    pub(crate) fn alive(&self) -> u32 {
        self.valid & !self.exited
    }

    pub(crate) fn runnable(&self) -> bool {
        self.fragments.iter().any(|f| f.wait == Wait::Run)
    }

    /// Makes room for `bytes` of local memory per lane.
    pub(crate) fn reserve_local(&mut self, bytes: u32) {
        if bytes > self.local_stride {
            let new = local_stride(bytes);
            self.local.restride(32, self.local_stride as usize, new as usize);
            self.local_stride = new;
        }
    }

    /// Takes local memory beyond the first `base` bytes for lanes (`alloca`). Fails where a lane would have more than [`MAX_LOCAL`].
    pub(crate) fn allocate(&mut self, frame: &Frame, i: &Inst, base: u32, mask: u32) -> Result<(), Fail> {
        let align = u64::try_from(i.imm).unwrap_or(1).max(1);
        let (mut last, mut failed) = (0, None);
        each(mask, |lane| {
            let size = frame.bits(i.a, lane, i.has(flag::WIDE_A));
            let start = (u64::from(base) + u64::from(frame.get::<u32>(i.c, lane))).next_multiple_of(align);
            match start
                .checked_add(size)
                .and_then(|end| u32::try_from(end).ok())
                .filter(|end| *end <= MAX_LOCAL)
            {
                Some(end) => {
                    frame.set(i.c, lane, end - base);
                    frame.set_bits(i.d, lane, i.has(flag::WIDE_D), start);
                    last = end.max(last);
                }
                None => {
                    failed.get_or_insert(lane);
                }
            }
        });
        if let Some(lane) = failed {
            return Err(Fail::new(FaultKind::StackOverflow, lane, 0));
        }
        self.reserve_local(last);
        Ok(())
    }

    /// Wakes fragments whose awaited lanes have all arrived or exited. Returns true if there was one.
    pub(crate) fn wake(&mut self) -> bool {
        let alive = self.alive();
        let mut woke = false;
        for n in 0..self.fragments.len() {
            match self.fragments[n].wait {
                Wait::Lanes(mask) if mask & alive & !self.fragments[n].mask == 0 => {
                    self.fragments[n].wait = Wait::Run;
                    woke = true;
                }
                Wait::WarpBarrier(mask) => {
                    let there = self
                        .fragments
                        .iter()
                        .filter(|f| f.wait == Wait::WarpBarrier(mask))
                        .fold(0, |m, f| m | f.mask);
                    if mask & alive & !there == 0 {
                        for f in &mut self.fragments {
                            if f.wait == Wait::WarpBarrier(mask) {
                                f.wait = Wait::Run;
                                f.pc += 1;
                            }
                        }
                        woke = true;
                    }
                }
                _ => {}
            }
        }
        woke
    }

    /// Merges runnable fragments at the same place and takes the next one: fewest turns, deepest call, lowest pc.
    pub(crate) fn pick(&mut self) -> Option<Fragment> {
        let mut best: Option<usize> = None;
        let mut n = 0;
        while n < self.fragments.len() {
            let f = self.fragments[n];
            if f.wait != Wait::Run {
                n += 1;
                continue;
            }
            // An equal fragment later in the list absorbs this one.
            let twin = self.fragments[n + 1..]
                .iter()
                .position(|g| g.wait == Wait::Run && g.pc == f.pc && g.frame == f.frame);
            if let Some(k) = twin {
                let g = &mut self.fragments[n + 1 + k];
                g.mask |= f.mask;
                g.turn = g.turn.min(f.turn);
                g.budget = g.budget.min(f.budget);
                self.fragments.swap_remove(n);
                // The swapped-in fragment has not been compared, and nothing before `n` has changed.
                best = None;
                n = 0;
                continue;
            }
            let key = |f: &Fragment| (f.turn, u32::MAX - f.depth, f.pc);
            if best.is_none_or(|b| key(&f) < key(&self.fragments[b])) {
                best = Some(n);
            }
            n += 1;
        }
        best.map(|b| self.fragments.swap_remove(b))
    }

    /// The next pc at which `f` meets another fragment of its frame.
    pub(crate) fn limit(&self, f: &Fragment) -> u32 {
        self.fragments
            .iter()
            .filter(|g| g.wait == Wait::Run && g.frame == f.frame && g.pc > f.pc)
            .map(|g| g.pc)
            .min()
            .unwrap_or(u32::MAX)
    }
}

/// Calls `f` for each group of lanes of `mask` that name the same members. Returns true if every lane is a member of its own
/// group.
pub(crate) fn groups(frame: &Frame, slot: u32, mask: u32, mut f: impl FnMut(u32)) -> bool {
    let mut left = mask;
    let mut sound = true;
    while left != 0 {
        let members: u32 = frame.get(slot, left.trailing_zeros() as usize);
        let mut group = 0;
        each(left, |lane| {
            if frame.get::<u32>(slot, lane) == members {
                group |= 1 << lane;
            }
        });
        sound &= group & !members == 0;
        f(group);
        left &= !group;
    }
    sound
}

/// All members named by the lanes of `mask`.
pub(crate) fn members(frame: &Frame, slot: u32, mask: u32) -> u32 {
    let mut all = 0;
    each(mask, |lane| all |= frame.get::<u32>(slot, lane));
    all
}

/// `shfl.sync` for the lanes of `mask`, which may have several groups of members.
pub(crate) fn shfl(frame: &Frame, i: &Inst, mask: u32) {
    let mut values: [u32; 32] = frame.load(i.a);
    // The value of another lane is undefined. Its register may hold a value of an earlier kernel, and a program that multiplies the
    // value by zero relies on a finite one.
    each(!mask, |lane| values[lane] = 0);
    let mode = ShflMode::of(i.sub);
    let mut inside = 0u32;
    let mut out = [0u32; 32];
    for lane in 0..32usize {
        let n = u32::try_from(lane).unwrap_or(0);
        let b: u32 = frame.get::<u32>(i.b, lane) & 31;
        let c: u32 = frame.get(i.c, lane);
        let (clamp, segment) = (c & 31, c >> 8 & 31);
        let max_lane = (n & segment) | (clamp & !segment);
        let min_lane = n & segment;
        let (j, ok) = match mode {
            ShflMode::Up => (n.wrapping_sub(b), n >= b && n - b >= max_lane),
            ShflMode::Down => (n + b, n + b <= max_lane),
            ShflMode::Butterfly => (n ^ b, n ^ b <= max_lane),
            ShflMode::Index => {
                let j = min_lane | (b & !segment);
                (j, j <= max_lane)
            }
        };
        out[lane] = values[if ok { j as usize & 31 } else { lane }];
        inside |= u32::from(ok) << lane;
    }
    if mask == !0 {
        frame.store(i.d, &out);
    } else {
        each(mask, |lane| frame.set(i.d, lane, out[lane]));
    }
    if i.e != NONE {
        frame.set_pred(i.e, mask, inside);
    }
}

/// `vote.sync` for one group.
pub(crate) fn vote(frame: &Frame, i: &Inst, group: u32) {
    let p = (frame.pred(i.a) ^ if i.has(flag::NOT_C) { !0 } else { 0 }) & group;
    let result = match VoteMode::of(i.sub) {
        VoteMode::Ballot => {
            each(group, |lane| frame.set(i.d, lane, p));
            return;
        }
        VoteMode::All => p == group,
        VoteMode::Any => p != 0,
        VoteMode::Uni => p == 0 || p == group,
    };
    frame.set_pred(i.d, group, if result { !0 } else { 0 });
}

/// `match.sync` for one group.
pub(crate) fn match_lanes(frame: &Frame, i: &Inst, group: u32) {
    let wide = i.ty.bytes() == 8;
    let mut values = [0u64; 32];
    each(group, |lane| values[lane] = frame.bits(i.a, lane, wide));
    let equal = |to: u64| {
        let mut m = 0u32;
        each(group, |lane| m |= u32::from(values[lane] == to) << lane);
        m
    };
    if i.sub == 1 {
        let all = equal(values[group.trailing_zeros() as usize & 31]) == group;
        each(group, |lane| frame.set(i.d, lane, if all { group } else { 0 }));
        if i.e != NONE {
            frame.set_pred(i.e, group, if all { !0 } else { 0 });
        }
    } else {
        each(group, |lane| frame.set(i.d, lane, equal(values[lane])));
    }
}

/// `redux.sync` for one group.
pub(crate) fn redux(frame: &Frame, i: &Inst, group: u32) {
    let op = ReduxOp::of(i.sub);
    let mut acc: Option<u32> = None;
    each(group, |lane| {
        let v: u32 = frame.get(i.a, lane);
        acc = Some(match acc {
            None => v,
            Some(a) => match op {
                ReduxOp::Add => a.wrapping_add(v),
                ReduxOp::And => a & v,
                ReduxOp::Or => a | v,
                ReduxOp::Xor => a ^ v,
                ReduxOp::Min if i.ty.signed() => a.cast_signed().min(v.cast_signed()).cast_unsigned(),
                ReduxOp::Max if i.ty.signed() => a.cast_signed().max(v.cast_signed()).cast_unsigned(),
                ReduxOp::Min => a.min(v),
                ReduxOp::Max => a.max(v),
            },
        });
    });
    let result = acc.unwrap_or(0);
    each(group, |lane| frame.set(i.d, lane, result));
}
