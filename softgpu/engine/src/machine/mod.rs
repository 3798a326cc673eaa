//! MachineCode code for runs of lane-wise instructions, made while a kernel runs.
//!
//! The interpreter executes one instruction at a time for 32 lanes, and each instruction reads and writes its slots in memory. A run is a
//! sequence of such instructions, perhaps with the branch that repeats it, as one function in machine code: values stay in vector
//! registers, and only what other code may read is stored. A function of a kernel gets its runs when the interpreter has entered it often.
//!
//! The interpreter is the fallback, and the definition: machine code gives the same bits. It is used where the processor lacks AVX2, where
//! the system refuses executable memory, and where `SLUICE_SOFTGPU_JIT` is 0. It is that in Sluice's workers, whose filter of system calls
//! allows no new code.

mod emit;
mod encode;
mod form;
mod pages;
mod plan;

use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;

use crate::exec::dispatch;
use crate::exec::mem::Spaces;
use crate::ir::{Inst, LoweredCode, Op};
use crate::regs::{Frame, NONE};
use encode::Code;
use pages::Pages;

/// Fragments of a function that the interpreter runs before the function gets machine code.
const WARM: u32 = 64;
/// Bytes of machine code of a function.
const MAX_BYTES: usize = 1 << 20;

/// The machine code of a function, once there is some.
#[derive(Default)]
pub(crate) struct MachineCode {
    entered: AtomicU32,
    code: OnceLock<Option<Translation>>,
}

/// The instructions of a function with runs in the place of their first instructions, which the original keeps.
pub(crate) struct Translation {
    pub(crate) insts: Vec<Inst>,
    runs: Vec<RunEntry>,
    pages: Pages,
}

struct RunEntry {
    offset: usize,
    /// Index of the instruction after the run.
    end: u32,
}

/// The state that a run and the interpreter share.
#[repr(C)]
struct RunCall {
    /// The lanes that run.
    mask: u32,
    /// The lanes that the budget stopped before their next iteration.
    running: u32,
    budget: i32,
    /// What is left of the budget.
    left: i32,
    /// Shared memory of the block, and its length.
    shared: *mut u8,
    shared_len: u32,
}

impl RunCall {
    const MASK: i32 = 0;
    const RUNNING: i32 = 4;
    const BUDGET: i32 = 8;
    const LEFT: i32 = 12;
    const SHARED: i32 = 16;
    const SHARED_LEN: i32 = 24;
}

/// The result of a run.
pub(crate) struct Ran {
    /// Index of the instruction after the run.
    pub(crate) end: u32,
    /// Lanes that are back at the start of the run, because the budget is used up.
    pub(crate) running: u32,
    pub(crate) budget: i32,
}

fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| {
        cfg!(all(target_arch = "x86_64", not(miri)))
            && dispatch::fast()
            && std::env::var_os("SLUICE_SOFTGPU_JIT").is_none_or(|value| value != "0")
    })
}

impl MachineCode {
    /// The translation of a function that a fragment enters. Translates it if it has been entered often enough.
    #[inline(always)]
    pub(crate) fn enter<'c>(&'c self, code: &LoweredCode) -> Option<&'c Translation> {
        match self.code.get() {
            Some(translation) => translation.as_ref(),
            None => self.warm(code),
        }
    }

    /// Lets the interpreter execute the function always, unless it has machine code already.
    pub(crate) fn interpret(&self) {
        let _ = self.code.set(None);
    }

    /// Translates the function now. Returns the number of its runs.
    pub(crate) fn translate(&self, code: &LoweredCode) -> usize {
        let translation = self.code.get_or_init(|| if enabled() { translate(code) } else { None });
        translation.as_ref().map_or(0, |t| t.runs.len())
    }

    #[cold]
    fn warm(&self, code: &LoweredCode) -> Option<&Translation> {
        // Exactly one thread counts to the end; the others go on interpreting.
        if self.entered.fetch_add(1, Ordering::Relaxed) == WARM {
            let translation = if enabled() { translate(code) } else { None };
            return self.code.get_or_init(|| translation).as_ref();
        }
        None
    }
}

/// Translates the runs of a function. `None` if there are none, or the system refuses executable memory.
fn translate(code: &LoweredCode) -> Option<Translation> {
    let mut insts = code.insts.clone();
    let (mut bytes, mut entries) = (Vec::new(), Vec::new());
    for run in plan::runs(code) {
        let mut function = Code::default();
        if !emit::emit(&mut function, &run) || bytes.len() + function.len() > MAX_BYTES {
            continue;
        }
        let Some(function) = function.finish() else { continue };
        let end = run.start + run.insts.len() + usize::from(run.repeat.is_some());
        let first = &mut insts[run.start];
        (first.op, first.guard, first.imm) = (Op::Run, NONE, i64::try_from(entries.len()).ok()?);
        entries.push(RunEntry { offset: bytes.len(), end: u32::try_from(end).ok()? });
        bytes.extend_from_slice(&function);
        bytes.resize(bytes.len().next_multiple_of(32), 0xcc);
    }
    if entries.is_empty() {
        return None;
    }
    Some(Translation { insts, runs: entries, pages: Pages::new(&bytes)? })
}

impl Translation {
    /// Executes the run of an instruction [`Op::Run`] for the lanes of a non-empty mask. `None` if the interpreter must execute it: some
    /// lane is off, or an address is not valid. Then the run has had no effect.
    #[inline(always)]
    pub(crate) fn run(
        &self,
        i: &Inst,
        frame: &Frame,
        mask: u32,
        budget: i32,
        spaces: &Spaces<'_>,
    ) -> Option<Ran> {
        let entry = &self.runs[usize::try_from(i.imm).unwrap_or(usize::MAX)];
        let shared_len = u32::try_from(spaces.shared_len).unwrap_or(0);
        let mut call = RunCall { mask, running: 0, budget, left: budget, shared: spaces.shared, shared_len };
        pages::call(&self.pages, entry.offset, frame, &mut call).then_some(Ran {
            end: entry.end,
            running: call.running,
            budget: call.left,
        })
    }
}
