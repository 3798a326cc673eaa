//! The second half of the batch solver: GPU by GPU instead of instance by instance.
//!
//! A **pattern** is a set of requests that one GPU can take: the number of each kind. A GPU has few patterns (an empty Hopper GPU
//! has 38 that cannot be extended), and the choice of patterns that fit together is a question about small numbers, no longer
//! about positions. GPUs are taken in turn. Each takes a pattern that the remaining requests cannot extend, because unused room
//! never helps the others. The search remembers requests that the rest of the GPUs cannot hold.
//!
//! Most impossible requests are found without a search: give each kind a weight, and no GPU takes more weight than its heaviest
//! pattern has. If the requests weigh more than all GPUs together can take, by any of many such weights, they do not fit.

use std::collections::{BTreeMap, HashSet};

use crate::geometry::Occupation;
use crate::wishes::{CandidateGpu, Position, WishKind};

/// Memory for wishes that are known not to fit.
const MEMORY_BYTES: usize = 16 << 20;

/// Numbers per kind.
type Counts = Vec<u16>;

/// The kinds and their positions.
type Arrangement = Vec<(usize, Position)>;

/// The patterns of one GPU.
struct Patterns {
    /// All patterns, with one arrangement each. For each pattern, all smaller ones are included, too.
    all: BTreeMap<Counts, Arrangement>,
    /// The same patterns, the fullest first.
    fullest_first: Vec<Counts>,
    /// For each of the weights, the weight of the heaviest pattern.
    heaviest: Vec<u32>,
}

/// The number of kinds up to which all groups of kinds are weighed.
const GROUPED_KINDS: usize = 6;
/// The number of kinds up to which pairs are weighed; of more kinds only each one.
const PAIRED_KINDS: usize = 16;
/// The work that keeping an arrangement counts as: it bounds the memory for all of them to some tens of MiB.
const KEEPING: u32 = 40;

/// Weights: groups of kinds count by number, by slices, and by compute slices.
fn weights(kinds: &[WishKind]) -> Vec<Vec<u32>> {
    let groups: Vec<Vec<usize>> = if kinds.len() <= GROUPED_KINDS {
        let members = |group: u32| (0..kinds.len()).filter(|kind| group >> kind & 1 == 1).collect();
        (1..1_u32 << kinds.len()).map(members).collect()
    } else {
        let until = |one: usize| if kinds.len() <= PAIRED_KINDS { kinds.len() } else { one + 1 };
        (0..kinds.len()).flat_map(|one| (one..until(one)).map(move |two| vec![one, two])).collect()
    };
    let mut all: Vec<Vec<u32>> = Vec::new();
    for group in groups {
        for of in
            [|_: &WishKind| 1, |kind: &WishKind| kind.least_slices, |kind: &WishKind| kind.least_compute]
        {
            let weight = |kind: usize| if group.contains(&kind) { of(&kinds[kind]) } else { 0 };
            let weights = (0..kinds.len()).map(weight).collect();
            if !all.contains(&weights) {
                all.push(weights);
            }
        }
    }
    all
}

fn weigh(weights: &[u32], counts: &Counts) -> u32 {
    weights.iter().zip(counts).map(|(weight, &count)| weight * u32::from(count)).sum()
}

/// The positions of all kinds, for all wishes; `Some(None)` if they do not fit, `None` if the work ran out.
pub(crate) fn solve(
    slots: &[CandidateGpu<'_>],
    kinds: &[WishKind],
    work: &mut u32,
) -> Option<Option<Arrangement>> {
    let weights = weights(kinds);
    let wanted: Counts = kinds.iter().map(|kind| kind.count).collect();
    // Equal GPUs share their patterns.
    let mut patterns: Vec<(usize, Patterns)> = Vec::new();
    let mut of_slot = Vec::with_capacity(slots.len());
    for (at, slot) in slots.iter().enumerate() {
        let known = patterns.iter().position(|(other, _)| {
            let same = slots[*other].state == slot.state && slots[*other].geometry == slot.geometry;
            same && kinds.iter().all(|kind| kind.profiles[*other] == kind.profiles[at])
        });
        of_slot.push(match known {
            Some(known) => known,
            None => {
                patterns.push((at, enumerate(slots, at, kinds, &wanted, &weights, work)?));
                patterns.len() - 1
            }
        });
    }
    // GPUs with fewest patterns first, and equal ones together, so that remembered cases recur.
    let mut order: Vec<usize> = (0..slots.len()).collect();
    order.sort_by_key(|&slot| (patterns[of_slot[slot]].1.all.len(), of_slot[slot], slot));
    // The capacity of all GPUs from one on, by each of the weights.
    let mut heaviest_from = vec![vec![0_u32; weights.len()]; order.len() + 1];
    for (at, &slot) in order.iter().enumerate().rev() {
        heaviest_from[at] = heaviest_from[at + 1]
            .iter()
            .zip(&patterns[of_slot[slot]].1.heaviest)
            .map(|(after, &heaviest)| after + heaviest)
            .collect();
    }
    let patterns_of: Vec<&Patterns> = order.iter().map(|&slot| &patterns[of_slot[slot]].1).collect();
    let mut search = Search {
        patterns: &patterns_of,
        weights: &weights,
        heaviest_from,
        failed: HashSet::new(),
        failed_bytes: 0,
        chosen: Vec::new(),
    };
    if !search.fits(&wanted, work)? {
        return Some(None);
    }
    let mut places = Arrangement::new();
    for (at, counts) in search.chosen.iter().enumerate() {
        // The arrangement was found on an equal GPU.
        let arrangement = patterns_of[at].all.get(counts)?;
        places.extend(
            arrangement.iter().map(|&(kind, position)| (kind, Position { slot: order[at], ..position })),
        );
    }
    Some(Some(places))
}

/// All patterns of a GPU, by exhaustive search.
fn enumerate(
    slots: &[CandidateGpu<'_>],
    at: usize,
    kinds: &[WishKind],
    wanted: &Counts,
    weights: &[Vec<u32>],
    work: &mut u32,
) -> Option<Patterns> {
    let geometry = slots[at].geometry;
    let none: Counts = vec![0; kinds.len()];
    let mut all = BTreeMap::from([(none.clone(), Arrangement::new())]);
    let mut seen: HashSet<(Occupation, Counts)> = HashSet::from([(slots[at].state, none.clone())]);
    let mut stack = vec![(slots[at].state, none, Arrangement::new())];
    while let Some((state, counts, places)) = stack.pop() {
        for (kind, of) in kinds.iter().enumerate().filter(|(kind, _)| counts[*kind] < wanted[*kind]) {
            for &profile in &of.profiles[at] {
                for placement in geometry.free(&state, profile) {
                    *work = work.checked_sub(1)?;
                    let next = geometry.with(&state, profile, placement);
                    let mut more = counts.clone();
                    more[kind] += 1;
                    if !seen.insert((next, more.clone())) {
                        continue;
                    }
                    *work = work.checked_sub(KEEPING)?;
                    let mut places = places.clone();
                    places.push((kind, Position { slot: at, profile, placement }));
                    all.entry(more.clone()).or_insert_with(|| places.clone());
                    stack.push((next, more, places));
                }
            }
        }
    }
    let fullness = |counts: &Counts| {
        let of = |kind: &WishKind| kind.least_slices + kind.least_compute;
        kinds.iter().zip(counts).map(|(kind, &count)| of(kind) * u32::from(count)).sum::<u32>()
    };
    let mut fullest_first: Vec<Counts> = all.keys().cloned().collect();
    fullest_first.sort_by_key(|counts| std::cmp::Reverse(fullness(counts)));
    let heaviest = |weights: &Vec<u32>| all.keys().map(|counts| weigh(weights, counts)).max().unwrap_or(0);
    let heaviest = weights.iter().map(heaviest).collect();
    Some(Patterns { all, fullest_first, heaviest })
}

struct Search<'a> {
    /// The patterns of each GPU, in the order in which the GPUs are taken.
    patterns: &'a [&'a Patterns],
    weights: &'a [Vec<u32>],
    heaviest_from: Vec<Vec<u32>>,
    failed: HashSet<(usize, Counts)>,
    failed_bytes: usize,
    chosen: Vec<Counts>,
}

impl Search<'_> {
    /// True if the GPUs from the next one on hold the remaining requests; `None` if the work ran out.
    fn fits(&mut self, left: &Counts, work: &mut u32) -> Option<bool> {
        let at = self.chosen.len();
        if left.iter().all(|&count| count == 0) {
            return Some(true);
        }
        let too_heavy = |(weights, &heaviest): (&Vec<u32>, &u32)| weigh(weights, left) > heaviest;
        let hopeless = self.weights.iter().zip(&self.heaviest_from[at]).any(too_heavy);
        if hopeless || self.failed.contains(&(at, left.clone())) {
            return Some(false);
        }
        let patterns = self.patterns[at];
        for counts in &patterns.fullest_first {
            *work = work.checked_sub(1)?;
            if counts.iter().zip(left).any(|(count, left)| count > left) {
                continue;
            }
            // A pattern that could be extended leaves room unused.
            let extensible = (0..left.len()).any(|kind| {
                let mut more = counts.clone();
                more[kind] += 1;
                more[kind] <= left[kind] && patterns.all.contains_key(&more)
            });
            if extensible {
                continue;
            }
            let rest: Counts = left.iter().zip(counts).map(|(left, count)| left - count).collect();
            self.chosen.push(counts.clone());
            if self.fits(&rest, work)? {
                return Some(true);
            }
            self.chosen.pop();
        }
        let bytes = left.len() * 2 + 64;
        if self.failed_bytes + bytes <= MEMORY_BYTES {
            self.failed_bytes += bytes;
            self.failed.insert((at, left.clone()));
        }
        Some(false)
    }
}
