//! The runs of a function: sequences of instructions that machine code executes as one.

use std::collections::{HashMap, HashSet};

use super::form::{LaneForm, Nans, Width, form, shared_load};
use crate::ir::{Argument, Inst, LoweredCode, Op, Target, flag};
use crate::regs::{CONST, NONE, UNITS};

/// Shortest run without a loop that is worth a call.
const LEAST_LENGTH: usize = 3;
/// Longest run; the analysis of one takes the square of its length.
const MAX_LENGTH: usize = 512;
/// Slots with addresses of loads in a run.
pub(super) const MAX_BASES: usize = 8;

/// A sequence of lane-wise instructions that execution enters only at its start.
pub(super) struct CompiledRun<'a> {
    /// Index of the first instruction.
    pub(super) start: usize,
    pub(super) insts: &'a [Inst],
    pub(super) forms: Vec<LaneForm>,
    /// The guard of the branch that closes a loop over the instructions, and whether it is negated.
    pub(super) repeat: Option<(u32, bool)>,
    /// The slots that other code may read, with their widths.
    pub(super) results: Vec<(u32, Width)>,
    /// The slots that are read before they are written.
    pub(super) inputs: Vec<(u32, Width)>,
    /// The slots with addresses of loads from shared memory, with the largest offset of each.
    pub(super) bases: Vec<(u32, i64)>,
    /// The instructions whose NaNs must be canonical.
    pub(super) canonical: Vec<bool>,
    /// The results whose NaNs become canonical when they are stored.
    pub(super) late: HashSet<u32>,
    /// Positions that read each slot, ascending.
    pub(super) reads: HashMap<u32, Vec<usize>>,
}

impl CompiledRun<'_> {
    pub(super) fn writes(&self, slot: u32) -> bool {
        self.insts.iter().any(|i| i.d == slot)
    }

    /// True if an iteration of the loop reads what the one before has written.
    pub(super) fn carried(&self, slot: u32) -> bool {
        self.repeat.is_some() && self.inputs.iter().any(|(s, _)| *s == slot) && self.writes(slot)
    }
}

/// Finds the runs of a function.
pub(super) fn runs(code: &LoweredCode) -> Vec<CompiledRun<'_>> {
    let mut targets: HashSet<usize> = code.tables.iter().flatten().map(|&t| t as usize).collect();
    targets.extend(code.insts.iter().filter(|i| i.op == Op::Bra).filter_map(|i| usize::try_from(i.imm).ok()));
    let references = references(code);
    let mut out = Vec::new();
    let mut start = 0;
    while start < code.insts.len() {
        let (mut forms, mut written, mut bases) = (Vec::new(), HashSet::new(), Vec::new());
        let mut end = start;
        while end < code.insts.len() && end - start < MAX_LENGTH && (end == start || !targets.contains(&end))
        {
            let i = &code.insts[end];
            let Some(form) = form(i) else { break };
            // The addresses of loads are checked before the run, so it must not compute them.
            if shared_load(i) && (written.contains(&i.a) || !admit(&mut bases, i)) {
                break;
            }
            written.insert(i.d);
            forms.push(form);
            end += 1;
        }
        let branch = code.insts.get(end).filter(|i| {
            let loops = i.op == Op::Bra && i.has(flag::BACKWARD) && i.guard != NONE;
            loops
                && bases.is_empty()
                && end > start
                && !targets.contains(&end)
                && usize::try_from(i.imm) == Ok(start)
        });
        let repeat = branch.map(|i| (i.guard, i.has(flag::NOT)));
        if repeat.is_some() || end - start >= LEAST_LENGTH {
            out.push(run(start, &code.insts[start..end], forms, repeat, bases, &references));
        }
        start = end.max(start + 1);
    }
    out
}

/// Adds the address of a load to those of a run, unless it has too many.
fn admit(bases: &mut Vec<(u32, i64)>, i: &Inst) -> bool {
    if let Some((_, most)) = bases.iter_mut().find(|(slot, _)| *slot == i.a) {
        *most = i.imm.max(*most);
        return true;
    }
    let room = bases.len() < MAX_BASES;
    if room {
        bases.push((i.a, i.imm));
    }
    room
}

/// The number of times that the function names each slot. Numbers that are no slots may be among them.
fn references(code: &LoweredCode) -> HashMap<u32, u32> {
    let mut count = HashMap::new();
    let mut add = |slot: u32| *count.entry(slot).or_insert(0) += 1;
    for i in &code.insts {
        fields(i).into_iter().for_each(&mut add);
        if i.op != Op::Alu {
            add(u32::try_from(i.imm).unwrap_or(NONE));
        }
    }
    code.extra.iter().copied().for_each(&mut add);
    let sites = code.calls.iter().flat_map(|c| c.arguments.iter().chain(&c.results));
    for argument in sites.chain(&code.params).chain(&code.returns) {
        match *argument {
            Argument::Words(first, words) => (0..words).for_each(|n| add(first + n * UNITS)),
            Argument::Narrow(slot) | Argument::Wide(slot) => add(slot),
            Argument::Sink => {}
        }
    }
    for call in &code.calls {
        if let Target::Slot(slot) = call.target {
            add(slot);
        }
    }
    for image in &code.images {
        let lists =
            [&image.results, &image.coordinates, &image.detail, &image.offsets, &image.values].into_iter();
        lists.flatten().copied().chain([image.handle]).for_each(&mut add);
    }
    count
}

fn fields(i: &Inst) -> [u32; 6] {
    [i.guard, i.d, i.a, i.b, i.c, i.e]
}

/// The slots that an instruction reads: its guard, its sources, and what a guarded instruction keeps.
fn reads(i: &Inst, form: LaneForm) -> Vec<(u32, Width)> {
    let mut out: Vec<_> = form.sources(i).collect();
    if i.guard != NONE {
        out.extend([(i.guard, Width::Mask), (i.d, form.d)]);
    }
    out
}

fn run<'a>(
    start: usize,
    insts: &'a [Inst],
    forms: Vec<LaneForm>,
    repeat: Option<(u32, bool)>,
    bases: Vec<(u32, i64)>,
    references: &HashMap<u32, u32>,
) -> CompiledRun<'a> {
    let mut here: HashMap<u32, u32> = HashMap::new();
    insts.iter().flat_map(fields).for_each(|slot| *here.entry(slot).or_insert(0) += 1);
    if let Some((guard, _)) = repeat {
        *here.entry(guard).or_insert(0) += 1;
    }
    let mut read_at: HashMap<u32, Vec<usize>> = HashMap::new();
    let (mut inputs, mut results) = (Vec::new(), Vec::new());
    let mut written = HashSet::new();
    let mut widths = HashMap::new();
    for (at, (i, form)) in insts.iter().zip(&forms).enumerate() {
        for (slot, width) in reads(i, *form) {
            read_at.entry(slot).or_default().push(at);
            if !written.contains(&slot) && widths.insert(slot, width).is_none() {
                inputs.push((slot, width));
            }
        }
        written.insert(i.d);
        widths.insert(i.d, form.d);
    }
    if let Some((guard, _)) = repeat {
        read_at.entry(guard).or_default().push(insts.len());
        if !written.contains(&guard) && !widths.contains_key(&guard) {
            inputs.push((guard, Width::Mask));
        }
    }
    let mut seen = HashSet::new();
    for (i, form) in insts.iter().zip(&forms) {
        let elsewhere = references.get(&i.d) > here.get(&i.d) || inputs.iter().any(|(slot, _)| *slot == i.d);
        if elsewhere && seen.insert(i.d) {
            results.push((i.d, form.d));
        }
    }
    let (canonical, late) = canonical(insts, &forms, repeat.is_some(), &results);
    CompiledRun { start, insts, forms, repeat, results, inputs, bases, canonical, late, reads: read_at }
}

/// Decides where NaNs become canonical: at the instruction, or when a result is stored.
fn canonical(
    insts: &[Inst],
    forms: &[LaneForm],
    repeats: bool,
    results: &[(u32, Width)],
) -> (Vec<bool>, HashSet<u32>) {
    let last = |slot: u32, before: usize| insts[..before].iter().rposition(|i| i.d == slot);
    // The instruction whose value a read sees, in this iteration or the one before.
    let source = |slot: u32, at: usize| {
        last(slot, at).or_else(|| if repeats { last(slot, insts.len()) } else { None })
    };
    let mut need = vec![false; insts.len()];
    let mut work = Vec::new();
    for (at, (i, form)) in insts.iter().zip(forms).enumerate() {
        if matches!(form.nans, Nans::Exact | Nans::ExactNumber) {
            work.extend(form.sources(i).filter_map(|(slot, _)| source(slot, at)));
        }
    }
    let raw = |mut at: usize| loop {
        match forms[at].nans {
            _ if insts[at].guard != NONE => break false,
            Nans::Number | Nans::ExactNumber => break true,
            Nans::Copy => match last(insts[at].a, at) {
                Some(before) => at = before,
                None => break false,
            },
            _ => break false,
        }
    };
    let mut late = HashSet::new();
    for (slot, _) in results {
        if let Some(at) = last(*slot, insts.len()) {
            if raw(at) {
                late.insert(*slot);
            } else {
                work.push(at);
            }
        }
    }
    while let Some(at) = work.pop() {
        if core::mem::replace(&mut need[at], true) {
            continue;
        }
        let (i, form) = (&insts[at], forms[at]);
        if matches!(form.nans, Nans::Copy | Nans::Pass) {
            work.extend(form.sources(i).filter_map(|(slot, _)| source(slot, at)));
        }
        if i.guard != NONE {
            work.extend(source(i.d, at));
        }
    }
    late.retain(|slot| slot & CONST == 0);
    (need, late)
}
