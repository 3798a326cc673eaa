//! The runs of a function: sequences of instructions that machine code executes as one.

use std::collections::{HashMap, HashSet};

use super::form::{AccessSpace, ChangeKind, LaneForm, Nans, Width, change, form, load};
use crate::code_pages::{MAX_LOADS, MAX_STORES, SITES};
use crate::ir::{Argument, Inst, LoweredCode, Op, Target, flag};
use crate::regs::{CONST, NONE, UNITS};

/// Shortest run without a loop that is worth a call.
const LEAST_LENGTH: usize = 3;
/// Longest run; the analysis of one takes the square of its length.
const MAX_LENGTH: usize = 512;

/// Accesses of one size to addresses around one value of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessGroup {
    pub(super) slot: u32,
    pub(super) space: AccessSpace,
    /// Bytes of each access.
    pub(super) size: u32,
    /// The offsets of the first byte, and of the one after the last.
    pub(super) bytes: (i64, i64),
    /// The number of the range that the accesses use.
    pub(super) site: usize,
    /// The position of the first access.
    pub(super) first: usize,
    /// The number of instructions before the slot gets its value.
    version: usize,
}

impl AccessGroup {
    /// The first byte that a lane accesses, from its address, and the number of bytes from there to the last one of that lane, and of the
    /// eighth of lanes in a row. `None` if one is beyond 32 bits.
    pub(super) fn extents(&self) -> Option<[i32; 3]> {
        let (low, high) = self.bytes;
        let span = |lanes: i64| i32::try_from(high - low + lanes * i64::from(self.size)).ok();
        Some([i32::try_from(low).ok()?, span(0)?, span(7)?])
    }

    /// True if the run does not compute the addresses.
    pub(super) fn is_input(&self) -> bool {
        self.version == 0
    }
}

/// A store or atomic of a run. It happens after all other instructions of the run.
#[derive(Clone, Copy)]
pub(super) struct MemoryChange {
    pub(super) inst: Inst,
    pub(super) kind: ChangeKind,
    pub(super) access: AccessGroup,
}

impl MemoryChange {
    /// The slot of the old value of an atomic, or [`NONE`].
    pub(super) fn result(&self) -> u32 {
        if self.kind == ChangeKind::Add { self.inst.d } else { NONE }
    }

    /// The width of the value.
    pub(super) fn width(&self) -> Width {
        if self.inst.ty.bytes() == 8 { Width::Double } else { Width::Word }
    }
}

/// A sequence of lane-wise instructions and accesses to memory that execution enters only at its start.
pub(super) struct CompiledRun {
    /// Index of the first instruction, and of the one after the last.
    pub(super) start: usize,
    pub(super) end: usize,
    /// The instructions without those that change memory.
    pub(super) insts: Vec<Inst>,
    pub(super) forms: Vec<LaneForm>,
    /// The guard of the branch that closes a loop over the instructions, and whether it is negated.
    pub(super) repeat: Option<(u32, bool)>,
    /// The slots that other code may read, with their widths.
    pub(super) results: Vec<(u32, Width)>,
    /// The slots that are read before they are written.
    pub(super) inputs: Vec<(u32, Width)>,
    pub(super) loads: Vec<AccessGroup>,
    /// The group of each position with a load.
    pub(super) load_at: HashMap<usize, usize>,
    pub(super) changes: Vec<MemoryChange>,
    /// The instructions whose NaNs must be canonical.
    pub(super) canonical: Vec<bool>,
    /// The results whose NaNs become canonical when they are stored.
    pub(super) late: HashSet<u32>,
    /// Positions that read each slot, ascending.
    pub(super) reads: HashMap<u32, Vec<usize>>,
}

impl CompiledRun {
    pub(super) fn writes(&self, slot: u32) -> bool {
        self.insts.iter().any(|i| i.d == slot)
    }

    /// True if an iteration of the loop reads what the one before has written.
    pub(super) fn carried(&self, slot: u32) -> bool {
        self.repeat.is_some() && self.overwrites(slot)
    }

    /// True if the run reads the value of a slot that it then replaces.
    pub(super) fn overwrites(&self, slot: u32) -> bool {
        self.inputs.iter().any(|(s, _)| *s == slot) && self.writes(slot)
    }

    /// True if the run accesses memory.
    pub(super) fn accesses(&self) -> bool {
        !self.loads.is_empty() || !self.changes.is_empty()
    }
}

/// A run that grows by one instruction after the other.
#[derive(Default)]
struct RunDraft {
    insts: Vec<Inst>,
    forms: Vec<LaneForm>,
    loads: Vec<AccessGroup>,
    load_at: HashMap<usize, usize>,
    changes: Vec<MemoryChange>,
    /// The number of instructions before each slot got its value.
    versions: HashMap<u32, usize>,
}

impl RunDraft {
    /// Adds an instruction, unless the run must end before it. `site` numbers the ranges of the function.
    fn admit(&mut self, i: &Inst, site: &mut usize) -> bool {
        if let Some((space, kind)) = change(i) {
            let waits = self.changes.iter().any(|c| c.result() != NONE && [i.a, i.b].contains(&c.result()));
            if self.changes.len() == MAX_STORES || waits {
                return false;
            }
            let access = self.group(i, space, site);
            self.changes.push(MemoryChange { inst: *i, kind, access });
            return true;
        }
        let Some(mut form) = form(i) else { return false };
        let read = reads(i, form);
        // Changes of memory come last, so nothing may replace their operands, or depend on their results.
        let waits = self.changes.iter().any(|c| {
            let old = c.result();
            [c.inst.a, c.inst.b].contains(&i.d)
                || old != NONE && (i.d == old || read.iter().any(|(slot, _)| *slot == old))
        });
        if waits {
            return false;
        }
        if let Some(space) = load(i) {
            if self.changes.iter().any(|c| c.access.space.meets(space)) {
                return false;
            }
            let new = self.group(i, space, &mut site.clone());
            let same = |g: &AccessGroup| {
                (g.slot, g.version, g.space, g.size) == (new.slot, new.version, new.space, new.size)
            };
            let known = self.loads.iter().position(same);
            if let Some(group) = known.and_then(|n| self.loads.get_mut(n)) {
                group.bytes = (group.bytes.0.min(new.bytes.0), group.bytes.1.max(new.bytes.1));
                // The first load of the group has looked at the addresses.
                form = form.without_sources();
            } else if self.loads.len() < MAX_LOADS {
                *site += 1;
                self.loads.push(new);
            } else {
                return false;
            }
            self.load_at.insert(self.insts.len(), known.unwrap_or(self.loads.len() - 1));
        }
        self.insts.push(*i);
        self.forms.push(form);
        self.versions.insert(i.d, self.insts.len());
        true
    }

    fn group(&self, i: &Inst, space: AccessSpace, site: &mut usize) -> AccessGroup {
        let (number, size) = (*site % SITES, i.ty.bytes());
        *site += 1;
        AccessGroup {
            slot: i.a,
            space,
            size,
            bytes: (i.imm, i.imm + i64::from(size)),
            site: number,
            first: self.insts.len(),
            version: self.versions.get(&i.a).copied().unwrap_or(0),
        }
    }
}

/// Finds the runs of a function.
pub(super) fn runs(code: &LoweredCode) -> Vec<CompiledRun> {
    let mut targets: HashSet<usize> = code.tables.iter().flatten().map(|&t| t as usize).collect();
    targets.extend(code.insts.iter().filter(|i| i.op == Op::Bra).filter_map(|i| usize::try_from(i.imm).ok()));
    let references = references(code);
    let mut out = Vec::new();
    let (mut start, mut site) = (0, 0);
    while start < code.insts.len() {
        let mut draft = RunDraft::default();
        let mut end = start;
        while end < code.insts.len()
            && end - start < MAX_LENGTH
            && (end == start || !targets.contains(&end))
            && draft.admit(&code.insts[end], &mut site)
        {
            end += 1;
        }
        let branch = code.insts.get(end).filter(|i| {
            let loops = i.op == Op::Bra && i.has(flag::BACKWARD) && i.guard != NONE;
            loops
                && draft.changes.is_empty()
                && end > start
                && !targets.contains(&end)
                && usize::try_from(i.imm) == Ok(start)
        });
        let repeat = branch.map(|i| (i.guard, i.has(flag::NOT)));
        if repeat.is_some() || end - start >= LEAST_LENGTH {
            out.push(run((start, end + usize::from(repeat.is_some())), draft, repeat, &references));
        }
        start = end.max(start + 1);
    }
    out
}

/// The number of times that the function names each slot. Numbers that are no slots may be among them.
fn references(code: &LoweredCode) -> HashMap<u32, u32> {
    let mut count = HashMap::new();
    let mut add = |slot: u32| *count.entry(slot).or_insert(0) += 1;
    // The one slot of a scalar access is among its fields too.
    let mut repeated = HashSet::new();
    for i in &code.insts {
        fields(i).into_iter().for_each(&mut add);
        if !matches!(i.op, Op::Alu | Op::Load | Op::Store | Op::Atomic) {
            add(u32::try_from(i.imm).unwrap_or(NONE));
        }
        if matches!(i.op, Op::Load | Op::Store) && i.n == 1 {
            repeated.insert(i.e as usize);
        }
    }
    let extra = code.extra.iter().enumerate().filter(|(n, _)| !repeated.contains(n));
    extra.for_each(|(_, slot)| add(*slot));
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

fn run(
    (start, end): (usize, usize),
    draft: RunDraft,
    repeat: Option<(u32, bool)>,
    references: &HashMap<u32, u32>,
) -> CompiledRun {
    let RunDraft { insts, forms, loads, load_at, changes, .. } = draft;
    let mut here: HashMap<u32, u32> = HashMap::new();
    let all = insts.iter().chain(changes.iter().map(|c| &c.inst));
    all.flat_map(fields).for_each(|slot| *here.entry(slot).or_insert(0) += 1);
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
    let guard = repeat.map(|(guard, _)| (guard, Width::Mask));
    let addresses = changes.iter().map(|c| (c.access.slot, c.access.space.address()));
    for (slot, width) in guard.into_iter().chain(addresses) {
        read_at.entry(slot).or_default().push(insts.len());
        if !written.contains(&slot) && widths.insert(slot, width).is_none() {
            inputs.push((slot, width));
        }
    }
    let mut seen = HashSet::new();
    for (i, form) in insts.iter().zip(&forms) {
        let elsewhere = references.get(&i.d) > here.get(&i.d)
            || inputs.iter().any(|(slot, _)| *slot == i.d)
            || changes.iter().any(|c| c.inst.b == i.d);
        if elsewhere && seen.insert(i.d) {
            results.push((i.d, form.d));
        }
    }
    let (canonical, late) = canonical(&insts, &forms, repeat.is_some(), &results);
    let reads = read_at;
    CompiledRun {
        start,
        end,
        insts,
        forms,
        repeat,
        results,
        inputs,
        loads,
        load_at,
        changes,
        canonical,
        late,
        reads,
    }
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
