//! The propagation of constants: a register that is written once, from a constant slot, is read there instead.
//!
//! Parameters, immediates and launch dimensions are constants; most kernels move them to registers first. A register with one
//! definition holds that constant wherever its value is defined at all, so the move can be removed.

use std::collections::HashMap;

use crate::ir::{Argument, ImageAccess, LoweredCode, Op, Target, flag};
use crate::ptx::Ty;
use crate::regs::{CONST, NONE};

/// Rewrites reads and removes moves; returns the new index of each old instruction.
pub(super) fn constants(code: &mut LoweredCode) -> Vec<u32> {
    let writes = count_writes(code);
    let mut known: HashMap<u32, u32> = HashMap::new();
    let mut keep = vec![true; code.insts.len()];
    for (i, keep) in code.insts.iter().zip(&mut keep) {
        if !i.has(flag::COPY) || i.guard != NONE || writes.get(&i.d).copied() != Some(1) {
            continue;
        }
        let source = known.get(&i.a).copied().unwrap_or(i.a);
        if source & CONST != 0 && source != NONE {
            known.insert(i.d, source);
            *keep = false;
        }
    }
    let swap = |slot: &mut u32| {
        if let Some(&source) = known.get(slot) {
            *slot = source;
        }
    };
    for i in &mut code.insts {
        match i.op {
            Op::Alu => {
                swap(&mut i.a);
                swap(&mut i.b);
                swap(&mut i.c);
                if i.has(flag::FOUR) {
                    swap(&mut i.e);
                }
            }
            Op::Load
            | Op::Alloca
            | Op::Mbarrier
            | Op::Brx
            | Op::Redux
            | Op::Match
            | Op::Vote
            | Op::WarpBarrier
            | Op::WmmaLoad
            | Op::WmmaStore => {
                swap(&mut i.a);
                swap(&mut i.b);
            }
            Op::Store => {
                swap(&mut i.a);
                swap(&mut i.b);
                for slot in code.extra.iter_mut().skip(i.e as usize).take(usize::from(i.n)) {
                    swap(slot);
                }
            }
            Op::Atomic | Op::CpAsync | Op::Barrier => {
                if i.ty == Ty::B128 {
                    code.extra.iter_mut().skip(i.e as usize + 2).take(4).for_each(swap);
                }
                swap(&mut i.a);
                swap(&mut i.b);
                swap(&mut i.c);
            }
            Op::Shfl => {
                swap(&mut i.a);
                swap(&mut i.b);
                swap(&mut i.c);
                let mut members = u32::try_from(i.imm).unwrap_or(0);
                swap(&mut members);
                i.imm = i64::from(members);
            }
            Op::LdMatrix => swap(&mut i.a),
            Op::Mma => {
                // d, a, b, c, metadata: each after its length; the first is written.
                let mut at = i.e as usize;
                for list in 0..5 {
                    let len = code.extra.get(at).copied().unwrap_or(0) as usize;
                    if list > 0 {
                        code.extra.iter_mut().skip(at + 1).take(len).for_each(swap);
                    }
                    at += 1 + len;
                }
            }
            Op::CallIndirect => swap(&mut i.a),
            Op::Image => {
                let access = usize::try_from(i.imm).ok().and_then(|n| code.images.get_mut(n));
                if let Some(ImageAccess { handle, coordinates, detail, offsets, values, .. }) = access {
                    swap(handle);
                    let slots = coordinates.iter_mut().chain(detail).chain(offsets);
                    slots.chain(values).for_each(swap);
                }
            }
            Op::Run
            | Op::Nop
            | Op::Bra
            | Op::Call
            | Op::Ret
            | Op::Exit
            | Op::Trap
            | Op::Fence
            | Op::ActiveMask
            | Op::Special => {}
            Op::LocalAddress | Op::Sleep => {}
        }
        if i.op == Op::WmmaStore {
            let at = i.e as usize + 3;
            let len = code.extra.get(at).copied().unwrap_or(0) as usize;
            code.extra.iter_mut().skip(at + 1).take(len).for_each(swap);
        }
    }
    for site in &mut code.calls {
        for argument in &mut site.arguments {
            if let Argument::Narrow(slot) | Argument::Wide(slot) = argument {
                swap(slot);
            }
        }
        if let Target::Slot(slot) = &mut site.target {
            swap(slot);
        }
    }
    let mut index = Vec::with_capacity(keep.len() + 1);
    let mut next = 0;
    for k in &keep {
        index.push(next);
        next += u32::from(*k);
    }
    index.push(next);
    let mut k = keep.iter();
    code.insts.retain(|_| k.next().copied().unwrap_or(true));
    index
}

/// Counts the writes of each slot. A slot that an instruction writes in an unusual way, or reads where it is not rewritten,
/// counts twice.
fn count_writes(code: &LoweredCode) -> HashMap<u32, u32> {
    let mut writes: HashMap<u32, u32> = HashMap::new();
    let mut add = |slot: u32, n: u32| *writes.entry(slot).or_default() += n;
    for i in &code.insts {
        match i.op {
            Op::Load => {
                for slot in code.extra.iter().skip(i.e as usize).take(usize::from(i.n)) {
                    add(*slot, 1);
                }
            }
            Op::Mma | Op::LdMatrix | Op::WmmaLoad => {
                let mut at = i.e as usize + if i.op == Op::WmmaLoad { 3 } else { 0 };
                let len = code.extra.get(at).copied().unwrap_or(0) as usize;
                at += 1;
                for slot in code.extra.iter().skip(at).take(len) {
                    add(*slot, 2);
                }
                add(i.d, 1);
            }
            Op::Image => {
                let access = usize::try_from(i.imm).ok().and_then(|n| code.images.get(n));
                for slot in access.iter().flat_map(|access| &access.results) {
                    add(*slot, 2);
                }
            }
            Op::Alloca => {
                add(i.d, 1);
                add(i.c, 2);
            }
            Op::Atomic if i.ty == Ty::B128 => {
                for slot in code.extra.iter().skip(i.e as usize).take(2) {
                    add(*slot, 2);
                }
            }
            Op::Store | Op::WmmaStore => {}
            _ => add(i.d, 1),
        }
    }
    let mut pin = |a: &Argument| match a {
        Argument::Words(first, words) => (0..*words).for_each(|n| add(first + n * crate::regs::UNITS, 2)),
        Argument::Narrow(slot) | Argument::Wide(slot) => add(*slot, 2),
        Argument::Sink => {}
    };
    for a in code.params.iter().chain(&code.returns) {
        pin(a);
    }
    for site in &code.calls {
        site.results.iter().for_each(&mut pin);
        // The call copies words from their place in the frame.
        site.arguments.iter().filter(|a| matches!(a, Argument::Words(..))).for_each(&mut pin);
    }
    writes
}
