//! Machine code for runs of lane-wise instructions, made while a kernel runs.
//!
//! The interpreter calls it. The folder owns the code pages of a function's runs. It must never give other bits than the interpreter.
//!
//! The interpreter executes one instruction at a time for 32 lanes, and each instruction reads and writes its slots in memory. A run is a
//! sequence of such instructions, perhaps with the branch that repeats it, as one function in machine code: values stay in vector
//! registers, and only what other code may read is stored. A run loads from memory and stores to it. It checks all addresses before it
//! changes memory; if one is not valid, it restores its slots and declines, and the interpreter reports the fault. A function of a kernel
//! gets its runs when the interpreter has entered it often.
//!
//! The interpreter is the fallback, and the definition: machine code gives the same bits. It is used where the processor lacks AVX2, where
//! the system refuses executable memory, where the area for code is full, and where `SLUICE_SOFTGPU_JIT` is 0.

mod emit;
mod encode;
mod form;
mod plan;

use core::sync::atomic::AtomicU32;
use std::sync::OnceLock;

use crate::code_area::{self, CodeArea};
use crate::code_pages::CodePages;
use crate::exec::dispatch;
use crate::exec::warp::SPIN_COST;
use crate::ir::{LoweredCode, Op, RunEntry, Translation};
use crate::regs::NONE;
use encode::CodeBuffer;
use form::ChangeKind;

/// Bytes of machine code of a function.
const MAX_BYTES: usize = 1 << 20;

fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| {
        cfg!(all(target_arch = "x86_64", not(miri)))
            && dispatch::fast()
            && std::env::var_os("SLUICE_SOFTGPU_JIT").is_none_or(|value| value != "0")
    })
}

/// Reserves the area for code, if there will be code. `log` gets messages about it.
pub(crate) fn reserve_code(log: fn(core::fmt::Arguments<'_>)) {
    if enabled() {
        CodeArea::reserve(log);
    }
}

/// Translates the runs of a function. `None` if there are none, or no memory for code.
pub(crate) fn translate(code: &LoweredCode) -> Option<Translation> {
    if !enabled() {
        return None;
    }
    let mut insts = code.insts.clone();
    let (mut bytes, mut entries) = (Vec::new(), Vec::new());
    for run in plan::runs(code) {
        let mut function = CodeBuffer::default();
        if !emit::emit(&mut function, &run) || bytes.len() + function.len() > MAX_BYTES {
            continue;
        }
        let Some(function) = function.finish() else { continue };
        let first = &mut insts[run.start];
        (first.op, first.guard, first.imm) = (Op::Run, NONE, i64::try_from(entries.len()).ok()?);
        let adds = run.changes.iter().filter(|c| c.kind == ChangeKind::Add).count();
        let cost = SPIN_COST * i32::try_from(adds).ok()?;
        entries.push(RunEntry {
            offset: bytes.len(),
            end: u32::try_from(run.end).ok()?,
            cost,
            declined: AtomicU32::new(0),
        });
        bytes.extend_from_slice(&function);
        bytes.resize(bytes.len().next_multiple_of(32), 0xcc);
    }
    if entries.is_empty() {
        return None;
    }
    let has_barrier = insts.iter().any(|i| i.op == Op::Barrier);
    let pages = CodePages::new(&bytes)?;
    let (runs, len) = (entries.len(), bytes.len());
    code_area::tell(format_args!("{}: machine code for {runs} sequences, {len} bytes", code.name));
    Some(Translation { insts, has_barrier, runs: entries, pages })
}
