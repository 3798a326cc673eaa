//! A launch and its blocks: barriers, turns of the warps, parking.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::Special;
use super::interp::{self, Yield};
use super::mem::{Bytes, Ranges};
use super::warp::{Activation, BarrierKind, Fragment, Wait, Warp, local_stride};
use crate::api::{Fault, FaultKind, Kernel, Launch, Runtime};
use crate::ir::{Code, Constant, Op};
use crate::module::Module;
use crate::regs::{Block, CONST, Frame, NONE};

/// Blocks that a thread executes between two breaths.
const BREATH: u32 = 8;

/// Rounds over the warps of a block, each of which used up its budget, before another block gets its worker.
const CTA_ROUNDS: u32 = 16;

/// One launch, shared by the workers.
pub(crate) struct Grid<'a> {
    pub(crate) launch: &'a Launch<'a>,
    pub(crate) module: &'a Module,
    pub(crate) kernel: &'a Kernel,
    constants: Vec<OnceLock<Block>>,
    pub(crate) params: Vec<u8>,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) started: Instant,
    dynamic_base: u32,
    total: u64,
    next: AtomicU64,
    resident: AtomicU64,
    limit: u64,
    parked: Mutex<VecDeque<Cta>>,
    failed: AtomicBool,
    fault: Mutex<Option<Fault>>,
}

/// A barrier of a block.
#[derive(Clone, Copy, Default)]
pub(crate) struct Barrier {
    arrived: u32,
    /// As a warp of 32 counts: lanes that do not exist count where a number is given.
    expected: Option<u32>,
    popc: u32,
    all: bool,
    waiting: bool,
}

/// A block.
pub(crate) struct Cta {
    pub(crate) id: [u32; 3],
    pub(crate) linear: u64,
    pub(crate) warps: Vec<Warp>,
    pub(crate) shared: Bytes,
    /// What the device has lent for its shared and local memory.
    scratch: Option<(u64, u64)>,
    pub(crate) barriers: [Barrier; 16],
    /// Barriers that are complete and not yet released.
    pub(crate) ready: u16,
    /// Threads that have not exited.
    pub(crate) alive: u32,
}

/// What a worker keeps between blocks: allocations with their old contents.
pub(crate) struct Worker<'a, 'g> {
    pub(crate) grid: &'g Grid<'a>,
    pub(crate) ranges: Ranges,
    spare: Vec<Cta>,
    /// Blocks until the next breath.
    breath: u32,
}

/// A thread that executes blocks, until this is dropped.
struct Seat<'g>(&'g dyn Runtime);

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.0.rise();
    }
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cta {
    /// Borrows memory of the device for shared memory and for what local memory the kernel itself needs, once a launch.
    /// What functions need beyond that, and everything when the device has none, is the engine's own.
    fn borrow(&mut self, grid: &Grid<'_>, local_bytes: u32) {
        if self.scratch.is_some() || grid.shared_bytes == 0 && local_bytes == 0 {
            return;
        }
        let stride = if local_bytes == 0 { 0 } else { local_stride(local_bytes) };
        let (shared, local) = (grid.shared_bytes as usize, stride as usize * 32);
        let each = if local == 0 { 0 } else { Bytes::loan(local) };
        let total = Bytes::loan(shared) + each * self.warps.len() as u64;
        let address = grid.launch.runtime.take_scratch(total);
        if address == 0 {
            return;
        }
        self.scratch = Some((address, total));
        self.shared.lend(address, shared);
        if local > 0 {
            let mut at = address + Bytes::loan(shared);
            for warp in &mut self.warps {
                warp.local.lend(at, local);
                warp.local_stride = stride;
                at += each;
            }
        }
    }

    /// Gives back what it borrowed.
    fn give_back(&mut self, runtime: &dyn Runtime) {
        let Some((address, bytes)) = self.scratch.take() else { return };
        self.shared.unlend();
        for warp in &mut self.warps {
            warp.local.unlend();
            warp.local_stride = 0;
        }
        runtime.give_scratch(address, bytes);
    }
}

enum Outcome {
    Done,
    Parked,
}

impl<'a> Grid<'a> {
    pub(crate) fn new(launch: &'a Launch<'a>) -> Option<Grid<'a>> {
        let module = launch.module.module();
        let kernel = module.kernels().get(launch.kernel)?;
        let mut params = launch.params.to_vec();
        params.resize((kernel.param_bytes as usize).max(params.len()), 0);
        let threads = launch
            .block
            .iter()
            .try_fold(1u32, |a, &b| a.checked_mul(b))
            .filter(|t| (1..=1024).contains(t))?;
        let total = launch.grid.iter().try_fold(1u64, |a, &b| a.checked_mul(u64::from(b)))?;
        let dynamic_base = kernel.static_shared.next_multiple_of(16);
        let limit = u64::from(launch.resident_ctas.max(1));
        Some(Grid {
            launch,
            module,
            kernel,
            constants: (0..module.functions().len()).map(|_| OnceLock::new()).collect(),
            params,
            threads,
            shared_bytes: dynamic_base.checked_add(launch.dynamic_shared)?,
            started: Instant::now(),
            dynamic_base,
            total,
            next: AtomicU64::new(0),
            resident: AtomicU64::new(0),
            limit: if launch.cooperative.is_some() { limit.max(total) } else { limit },
            parked: Mutex::new(VecDeque::new()),
            failed: AtomicBool::new(false),
            fault: Mutex::new(None),
        })
    }

    /// How many workers can be of use.
    pub(crate) fn width(&self) -> u64 {
        self.total
    }

    pub(crate) fn code(&self, function: u32) -> &'a Code {
        &self.module.functions()[function as usize]
    }

    /// The constants of a function, filled on first use.
    pub(crate) fn constants(&self, function: u32) -> &Block {
        self.constants[function as usize].get_or_init(|| {
            let code = self.code(function);
            let mut block = Block::new(code.const_units);
            for (constant, slot) in &code.constants {
                let slot = slot & !CONST;
                match *constant {
                    Constant::Bits32(v) => block.broadcast32(slot, v),
                    Constant::Bits64(v) => block.broadcast64(slot, v),
                    Constant::Global { index, offset } => {
                        let base = self.launch.module.addresses().get(index as usize).copied().unwrap_or(0);
                        block.broadcast64(slot, base.wrapping_add_signed(offset));
                    }
                    Constant::Special { which, wide } => {
                        broadcast(&mut block, slot, wide, self.uniform(which))
                    }
                    Constant::Dynamic { base, offset, wide } => {
                        let v = base.wrapping_add(u64::from(self.dynamic_base)).wrapping_add_signed(offset);
                        broadcast(&mut block, slot, wide, v);
                    }
                    Constant::Param { offset, size, signed, wide } => {
                        let mut bytes = [0u8; 8];
                        let from = self
                            .params
                            .get(offset as usize..offset as usize + usize::from(size))
                            .unwrap_or(&[]);
                        bytes[..from.len()].copy_from_slice(from);
                        let v = u64::from_le_bytes(bytes);
                        let v =
                            if signed { super::num::sext(v, u32::from(size) * 8).cast_unsigned() } else { v };
                        broadcast(&mut block, slot, wide, v);
                    }
                }
            }
            block
        })
    }

    /// A special register that has one value in this launch.
    fn uniform(&self, which: u8) -> u64 {
        let launch = self.launch;
        let workspace = launch.cooperative.unwrap_or(0);
        match Special::ALL[usize::from(which) % Special::ALL.len()] {
            Special::NtidX => u64::from(launch.block[0]),
            Special::NtidY => u64::from(launch.block[1]),
            Special::NtidZ => u64::from(launch.block[2]),
            Special::NctaidX => u64::from(launch.grid[0]),
            Special::NctaidY => u64::from(launch.grid[1]),
            Special::NctaidZ => u64::from(launch.grid[2]),
            Special::NWarpId => 32,
            Special::NSmId => u64::from(launch.resident_ctas.max(1)),
            Special::GridId => launch.grid_id,
            Special::EnvReg1 => workspace >> 32,
            Special::EnvReg2 => workspace & 0xffff_ffff,
            Special::TotalShared | Special::AggrShared => u64::from(self.shared_bytes),
            Special::DynamicShared => u64::from(launch.dynamic_shared),
            _ => 0,
        }
    }

    pub(crate) fn fail(&self, fault: Fault) {
        lock(&self.fault).get_or_insert(fault);
        self.failed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    pub(crate) fn result(&self) -> Result<(), Fault> {
        match *lock(&self.fault) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    fn start(&self) -> Option<u64> {
        let n = self.next.fetch_add(1, Ordering::SeqCst);
        (n < self.total).then_some(n)
    }

    fn unstarted(&self) -> bool {
        self.next.load(Ordering::SeqCst) < self.total
    }

    /// Whether parking a block lets another one run.
    fn others(&self) -> bool {
        !lock(&self.parked).is_empty()
            || (self.unstarted() && self.resident.load(Ordering::SeqCst) < self.limit)
    }
}

fn broadcast(block: &mut Block, slot: u32, wide: bool, v: u64) {
    if wide {
        block.broadcast64(slot, v);
    } else {
        block.broadcast32(slot, (v & 0xffff_ffff) as u32);
    }
}

impl<'a, 'g> Worker<'a, 'g> {
    pub(crate) fn new(grid: &'g Grid<'a>, spare: Vec<Cta>) -> Worker<'a, 'g> {
        Worker { grid, ranges: Ranges::default(), spare, breath: BREATH }
    }

    /// Runs blocks until none is left; gives back the allocations.
    pub(crate) fn run(mut self) -> Vec<Cta> {
        self.grid.launch.runtime.sit();
        let _seat = Seat(self.grid.launch.runtime);
        loop {
            if self.grid.failed() {
                break;
            }
            let Some(mut cta) = self.next() else { break };
            self.breath -= 1;
            if self.breath == 0 {
                self.breath = BREATH;
                self.grid.launch.runtime.breathe();
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

    /// A new block while more may be resident, else the one that has waited longest.
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
        // The limit is on what is parked; a worker without work may always start one.
        let linear = grid.start()?;
        grid.resident.fetch_add(1, Ordering::SeqCst);
        Some(self.create(linear))
    }

    fn create(&mut self, linear: u64) -> Cta {
        let grid = self.grid;
        let [gx, gy, _] = grid.launch.grid.map(u64::from);
        let id = [linear % gx, linear / gx % gy, linear / gx / gy].map(|v| u32::try_from(v).unwrap_or(0));
        let mut cta = self.spare.pop().unwrap_or_else(|| Cta {
            id,
            linear,
            warps: Vec::new(),
            shared: Bytes::new(),
            scratch: None,
            barriers: [Barrier::default(); 16],
            ready: 0,
            alive: 0,
        });
        let function = u32::try_from(grid.kernel.function).unwrap_or(0);
        let code = grid.code(function);
        (cta.id, cta.linear, cta.ready, cta.alive) = (id, linear, 0, grid.threads);
        cta.barriers = [Barrier::default(); 16];
        let count = grid.threads.div_ceil(32);
        cta.warps.resize_with(count as usize, Warp::empty);
        cta.borrow(grid, code.local_bytes);
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
            warp.frame_bytes = warp.activations[0].regs.bytes();
            warp.reserve_local(code.local_bytes);
        }
        cta
    }

    /// Lets the warps of a block run until all are done or the block has had its share.
    fn turn(&mut self, cta: &mut Cta) -> Result<Outcome, Fault> {
        let (mut spent, mut rounds) = (0, 0u32);
        loop {
            let (mut progress, mut busy) = (false, false);
            for n in 0..cta.warps.len() {
                if !cta.warps[n].runnable() && !cta.warps[n].wake() {
                    continue;
                }
                progress = true;
                let mut warp = core::mem::replace(&mut cta.warps[n], Warp::empty());
                let result = interp::warp(self, cta, &mut warp);
                cta.warps[n] = warp;
                busy |= result? == Yield::Budget;
                self.release(cta);
            }
            if cta.alive == 0 {
                return Ok(Outcome::Done);
            }
            // Exits may have completed a barrier.
            if self.complete_by_exit(cta) {
                self.release(cta);
                progress = true;
            }
            if !progress {
                let stuck = cta.warps.iter().flat_map(|w| w.fragments.iter().map(move |f| (w, f))).next();
                let (thread, line) = match stuck {
                    Some((w, f)) => {
                        let function = w.activations[f.frame as usize].function;
                        let line = self.grid.code(function).insts.get(f.pc as usize).map_or(0, |i| i.line);
                        (w.index * 32 + f.mask.trailing_zeros(), line)
                    }
                    None => (0, 0),
                };
                return Err(interp::fault(self.grid, cta, FaultKind::LaunchFailed, thread, 0, line));
            }
            if self.grid.launch.stop.load(Ordering::Relaxed) {
                return Err(interp::fault(self.grid, cta, FaultKind::Stopped, 0, 0, 0));
            }
            if self.grid.failed() {
                // Another block has failed; what this one does no longer matters.
                return Ok(Outcome::Parked);
            }
            // A loop around a barrier uses up no budget and may wait for another block all the same.
            rounds = rounds.wrapping_add(1);
            if busy || rounds.is_multiple_of(1024) {
                self.grid.launch.runtime.breathe();
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

    fn complete_by_exit(&self, cta: &mut Cta) -> bool {
        let mut any = false;
        for n in 0..16 {
            let b = &cta.barriers[n];
            if b.waiting && b.expected.is_none() && b.arrived >= cta.alive {
                cta.ready |= 1 << n;
                any = true;
            }
        }
        any
    }

    /// Lets go of everything that waits at complete barriers.
    fn release(&self, cta: &mut Cta) {
        while cta.ready != 0 {
            let n = u8::try_from(cta.ready.trailing_zeros()).unwrap_or(0);
            cta.ready &= cta.ready - 1;
            let barrier = cta.barriers[usize::from(n)];
            for warp in &mut cta.warps {
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
                            BarrierKind::Popc => {
                                super::lanes::each(f.mask, |lane| frame.set(inst.d, lane, barrier.popc))
                            }
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

impl Cta {
    /// Counts `mask` of a warp at barrier `n`. `absent` are lanes that a given number counts although they do not exist.
    pub(crate) fn arrive(
        &mut self,
        n: u8,
        expected: Option<u32>,
        mask: u32,
        absent: u32,
        truth: Option<u32>,
        waits: bool,
    ) {
        let b = &mut self.barriers[usize::from(n)];
        if b.arrived == 0 {
            b.all = true;
        }
        b.arrived += mask.count_ones() + if expected.is_some() { absent } else { 0 };
        b.expected = expected;
        b.waiting |= waits;
        if let Some(p) = truth {
            b.popc += (p & mask).count_ones();
            b.all &= p & mask == mask;
        }
        if b.arrived >= expected.unwrap_or(self.alive) {
            self.ready |= 1 << n;
        }
    }
}
