//! A launch, shared by the threads that execute its blocks.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::Special;
use super::cta::Cta;
use super::num::sext;
use crate::api::{Fault, FaultKind, Kernel};
use crate::code_pages::WarpThreads;
use crate::ir::{Constant, LoweredCode};
use crate::launch::Launch;
use crate::module::Module;
use crate::regs::{Block, CONST};

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
    pub(super) resident: AtomicU64,
    pub(super) limit: u64,
    pub(super) parked: Mutex<VecDeque<Cta>>,
    failed: AtomicBool,
    fault: Mutex<Option<Fault>>,
    /// The threads of each warp of a block.
    warps: Vec<WarpThreads>,
}

pub(super) fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
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
            warps: warps(launch.block, threads),
        })
    }

    /// The threads of a warp of a block.
    pub(crate) fn threads_of(&self, warp: u32) -> &WarpThreads {
        &self.warps[warp as usize]
    }

    /// The number of workers that the launch can use.
    pub(crate) fn width(&self) -> u64 {
        self.total
    }

    /// The indices of a thread in its block.
    pub(crate) const fn thread_position(&self, thread: u32) -> [u32; 3] {
        let [x, y, _] = self.launch.block;
        [thread % x, thread / x % y, thread / x / y]
    }

    pub(crate) fn code(&self, function: u32) -> &'a LoweredCode {
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
                    Constant::Reference(index) => {
                        let handle = self.launch.references.get(index as usize).copied();
                        block.broadcast64(slot, handle.unwrap_or(0));
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
                        let v = if signed { sext(v, u32::from(size) * 8).cast_unsigned() } else { v };
                        broadcast(&mut block, slot, wide, v);
                    }
                }
            }
            block
        })
    }

    /// Value of a special register that is the same in the whole launch.
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

    /// The reason to end the launch from outside, if there is one.
    pub(super) fn ended(&self) -> Option<FaultKind> {
        if self.launch.stop.load(Ordering::Relaxed) {
            return Some(FaultKind::Stopped);
        }
        let expired = self.launch.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        expired.then_some(FaultKind::Timeout)
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

    pub(super) fn start(&self) -> Option<u64> {
        let n = self.next.fetch_add(1, Ordering::SeqCst);
        (n < self.total).then_some(n)
    }

    fn unstarted(&self) -> bool {
        self.next.load(Ordering::SeqCst) < self.total
    }

    /// True if another block can run when this one is parked.
    pub(super) fn others(&self) -> bool {
        !lock(&self.parked).is_empty()
            || (self.unstarted() && self.resident.load(Ordering::SeqCst) < self.limit)
    }
}

/// The threads of the warps of a block. Lanes without a thread go on counting.
fn warps([x, y, _]: [u32; 3], threads: u32) -> Vec<WarpThreads> {
    // Counts up: a division for each thread would cost more than a short launch.
    let mut at = [0u32; 3];
    let mut warps = vec![[[0; 32]; 4]; threads.div_ceil(32) as usize];
    for warp in &mut warps {
        for lane in 0..32u32 {
            for (axis, value) in at.into_iter().chain([lane]).enumerate() {
                warp[axis][lane as usize] = value;
            }
            at[0] += 1;
            if at[0] == x {
                at = [0, at[1] + 1, at[2]];
                if at[1] == y {
                    at = [0, 0, at[2] + 1];
                }
            }
        }
    }
    warps
}

fn broadcast(block: &mut Block, slot: u32, wide: bool, v: u64) {
    if wide {
        block.broadcast64(slot, v);
    } else {
        block.broadcast32(slot, (v & 0xffff_ffff) as u32);
    }
}
