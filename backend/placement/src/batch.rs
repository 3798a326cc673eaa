//! The batch solver: it places many instances at once, in every case where all of them fit.
//!
//! One decision after the other can end in a corner: 1g, 1g, 2g, 3g fit on one GPU, but not in every order. Here all requests
//! are known, so a search finds the solution. It always takes the request with the fewest positions left, tries positions in the
//! order of [`Geometry::best`](crate::geometry::Geometry::best), skips GPUs equal to one already tried, and remembers the
//! states from which it failed. That mostly answers at once. Cases that remain open after a part of the work are settled GPU by
//! GPU (`patterns`). Real questions are answered exactly; the work is bounded all the same, and the answer shows when the bound
//! is reached.

use std::cmp::Reverse;
use std::collections::HashSet;

use crate::geometry::Occupation;
use crate::patterns;
use crate::wishes::WishKind;
pub use crate::wishes::{CandidateGpu, Item, Position};

/// Maximum number of instances in one question.
pub const MAX_ITEMS: usize = 1024;
/// Bounds of the solver's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkBounds {
    /// Positions tried instance by instance.
    pub positions: u32,
    /// Positions and patterns tried GPU by GPU, after that.
    pub patterns: u32,
}

impl Default for WorkBounds {
    /// At most some tenths of a second with real geometries, some seconds with absurd ones.
    fn default() -> Self {
        Self { positions: 20_000, patterns: 4_000_000 }
    }
}

/// Memory for states that are known to fail.
const MEMORY_BYTES: usize = 16 << 20;

/// The result for a set of wishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// All fit, at these positions, in the order of the wishes.
    Fits(Vec<Position>),
    /// They cannot fit together.
    Impossible,
    /// The search reached its bound without a result.
    Unknown,
}

/// Finds places for all wishes together. Slots beyond the 64th are not used.
pub fn pack(slots: &[CandidateGpu<'_>], items: &[Item]) -> Answer {
    pack_within(slots, items, WorkBounds::default())
}

/// [`pack`] with a given bound.
pub fn pack_within(slots: &[CandidateGpu<'_>], items: &[Item], work: WorkBounds) -> Answer {
    if items.len() > MAX_ITEMS {
        return Answer::Unknown;
    }
    // Equal wishes are interchangeable: search over how many of each kind remain.
    let mut kinds: Vec<WishKind> = Vec::new();
    let mut kind_of = Vec::with_capacity(items.len());
    for item in items {
        let at = kinds.iter().position(|kind| kind.item == *item).unwrap_or_else(|| {
            kinds.push(WishKind::new(item.clone(), slots));
            kinds.len() - 1
        });
        kinds[at].count += 1;
        kind_of.push(at);
    }
    let mut search = Search {
        slots,
        alike: alike(slots),
        states: slots.iter().map(|slot| slot.state).collect(),
        left: kinds.iter().map(|kind| kind.count).collect(),
        kinds,
        found: Vec::new(),
        failed: HashSet::new(),
        failed_bytes: 0,
        work: work.positions,
    };
    let found = match search.solve() {
        Some(true) => Some(std::mem::take(&mut search.found)),
        Some(false) => None,
        None => {
            let mut work = work.patterns;
            match patterns::solve(slots, &search.kinds, &mut work) {
                Some(found) => found,
                None => return Answer::Unknown,
            }
        }
    };
    let Some(found) = found else { return Answer::Impossible };
    let mut places: Vec<Vec<Position>> = vec![Vec::new(); search.kinds.len()];
    for (kind, position) in found.into_iter().rev() {
        places[kind].push(position);
    }
    Answer::Fits(kind_of.into_iter().filter_map(|kind| places[kind].pop()).collect())
}

/// Per slot, the first slot with the same geometry.
fn alike(slots: &[CandidateGpu<'_>]) -> Vec<usize> {
    let first = |slot: &CandidateGpu<'_>| {
        slots
            .iter()
            .position(|other| std::ptr::eq(other.geometry, slot.geometry) || other.geometry == slot.geometry)
    };
    slots.iter().enumerate().map(|(at, slot)| first(slot).unwrap_or(at)).collect()
}

/// A situation up to the order of equal GPUs: states with their geometry, and wishes left.
type Situation = (Vec<(usize, Occupation)>, Vec<u16>);

struct Search<'a> {
    slots: &'a [CandidateGpu<'a>],
    alike: Vec<usize>,
    states: Vec<Occupation>,
    left: Vec<u16>,
    kinds: Vec<WishKind>,
    found: Vec<(usize, Position)>,
    failed: HashSet<Situation>,
    failed_bytes: usize,
    work: u32,
}

impl Search<'_> {
    /// True if the remaining wishes fit; `None` if the bound was reached.
    fn solve(&mut self) -> Option<bool> {
        if self.left.iter().all(|&left| left == 0) {
            return Some(true);
        }
        self.work = self.work.checked_sub(1)?;
        if !self.enough_slices() {
            return Some(false);
        }
        let Some(kind) = self.scarcest() else { return Some(false) };
        let situation = self.situation();
        if self.failed.contains(&situation) {
            return Some(false);
        }
        let positions = self.positions(kind, true);
        self.work = self.work.checked_sub(u32::try_from(positions.len()).unwrap_or(u32::MAX))?;
        for position in positions {
            let before = self.states[position.slot];
            self.states[position.slot] =
                self.slots[position.slot].geometry.with(&before, position.profile, position.placement);
            self.left[kind] -= 1;
            self.found.push((kind, position));
            if self.solve()? {
                return Some(true);
            }
            self.found.pop();
            self.left[kind] += 1;
            self.states[position.slot] = before;
        }
        self.remember(situation);
        Some(false)
    }

    /// True if the total number of free slices could suffice.
    fn enough_slices(&self) -> bool {
        let (mut slices, mut compute) = (0_u32, 0_u32);
        for (state, slot) in self.states.iter().zip(self.slots) {
            slices += u32::from(slot.geometry.slices()) - state.occupied.count_ones();
            compute += u32::from(slot.geometry.compute() - state.compute);
        }
        let wanted = |of: fn(&WishKind) -> u32| -> u32 {
            self.kinds.iter().zip(&self.left).map(|(kind, &left)| of(kind) * u32::from(left)).sum()
        };
        wanted(|kind| kind.least_slices) <= slices && wanted(|kind| kind.least_compute) <= compute
    }

    /// The remaining kind with the fewest positions per wish; `None` if one has too few.
    fn scarcest(&self) -> Option<usize> {
        let mut best: Option<(usize, usize)> = None;
        for kind in (0..self.kinds.len()).filter(|&kind| self.left[kind] > 0) {
            let positions = self.positions(kind, false).len();
            if positions < usize::from(self.left[kind]) {
                return None;
            }
            let scarcity = positions / usize::from(self.left[kind]);
            if best.is_none_or(|(least, _)| scarcity < least) {
                best = Some((scarcity, kind));
            }
        }
        best.map(|(_, kind)| kind)
    }

    /// Possible positions of an item of a kind, sorted; with `to_try`, without GPUs in the same state as an earlier one.
    fn positions(&self, kind: usize, to_try: bool) -> Vec<Position> {
        let mut positions = Vec::new();
        for (slot, profiles) in self.kinds[kind].profiles.iter().enumerate() {
            let state = &self.states[slot];
            let same = |other: usize| {
                self.alike[other] == self.alike[slot]
                    && self.states[other] == *state
                    && self.kinds.iter().all(|kind| kind.profiles[other] == kind.profiles[slot])
            };
            if to_try && (0..slot).any(same) {
                continue;
            }
            let geometry = self.slots[slot].geometry;
            let before = if to_try { geometry.remaining(state) } else { 0 };
            for (rank, &profile) in profiles.iter().enumerate() {
                for placement in geometry.free(state, profile) {
                    let loss = if to_try {
                        before - geometry.remaining(&geometry.with(state, profile, placement))
                    } else {
                        0
                    };
                    let order = (rank, loss, Reverse(placement.start), slot);
                    positions.push((order, Position { slot, profile, placement }));
                }
            }
        }
        positions.sort_unstable_by_key(|(order, _)| *order);
        positions.into_iter().map(|(_, position)| position).collect()
    }

    fn situation(&self) -> Situation {
        let mut states: Vec<(usize, Occupation)> =
            self.alike.iter().copied().zip(self.states.iter().copied()).collect();
        // The identity of a GPU matters only to wishes that name GPUs.
        if self.kinds.iter().all(|kind| kind.item.slots == u64::MAX) {
            states.sort_unstable();
        }
        (states, self.left.clone())
    }

    fn remember(&mut self, situation: Situation) {
        let bytes = situation.0.len() * size_of::<(usize, Occupation)>() + situation.1.len() * 2 + 64;
        if self.failed_bytes + bytes <= MEMORY_BYTES {
            self.failed_bytes += bytes;
            self.failed.insert(situation);
        }
    }
}
