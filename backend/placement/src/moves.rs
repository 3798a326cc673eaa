//! Plans of moves: to empty a GPU or a unit, to make room for one more, to undo fragmentation.
//!
//! Only VMs without a session move, and each is given its new place before it leaves the old one: a plan never needs slices
//! that are only free afterwards, so it can be stopped after any of its moves. Plans are suggestions. They are made on a copy,
//! and are carried out one [`Fleet::follow`] at a time.

use crate::batch::{Answer, Item, pack};
use crate::decide::{Candidate, Refusal, ways};
use crate::fleet::{
    AdminState, Decision, Fleet, Partition, PlanError, PlanUnit, Relocation, UnitId, UnitPhase,
};
use crate::geometry::{Occupation, SlicePlacement};
use crate::request::{Distance, Request, Strictness, VmId};

/// Maximum number of moves in a row that [`Fleet::make_room`] considers.
pub const MAX_MOVES: usize = 3;
/// Maximum number of situations that [`Fleet::make_room`] considers.
const MAX_SITUATIONS: u32 = 10_000;

/// The target to be emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainTarget {
    /// A GPU, by index.
    Gpu(usize),
    /// One unit.
    Unit(UnitId),
}

/// The new place of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Index of the GPU.
    pub gpu: usize,
    /// Its place there.
    pub partition: Partition,
    /// The unit there, if it exists before the plan begins; otherwise it is opened by this move or an earlier one.
    pub unit: Option<UnitId>,
    /// True if several VMs may share it.
    pub shared: bool,
}

/// The move of one VM to another unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The VM.
    pub vm: VmId,
    /// Its unit before.
    pub from: UnitId,
    /// Its place after.
    pub to: Destination,
}

/// A plan that empties a GPU or a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainPlan {
    /// Moves of idle VMs, in this order.
    pub moves: Vec<Move>,
    /// VMs with sessions, which move when they are idle.
    pub busy: Vec<VmId>,
    /// Idle VMs without a place elsewhere.
    pub stuck: Vec<(VmId, Refusal)>,
}

/// An instance with one idle VM in it.
#[derive(Clone, Copy)]
struct Movable {
    vm: VmId,
    unit: UnitId,
    gpu: usize,
    profile: usize,
    placement: SlicePlacement,
    shared: bool,
}

impl Fleet {
    /// Carries out one move of a plan, if it is still possible.
    pub fn follow(&mut self, one: &Move) -> Result<Relocation, PlanError> {
        let Destination { gpu, partition, shared, .. } = one.to;
        // The VM may have moved since the plan was made.
        let from = self.unit(one.from).ok_or(PlanError::UnknownUnit)?;
        if !from.members().iter().any(|member| member.request.vm == one.vm) {
            return Err(PlanError::UnknownVm);
        }
        let there =
            self.units().find(|unit| unit.gpu == gpu && unit.partition == partition).map(|unit| unit.id);
        self.relocate(one.vm, there.map_or(Decision::Open { gpu, partition, shared }, Decision::Join))
    }

    /// The moves of a target's VMs, under the assumption that no new VM comes to it.
    pub fn drain(&self, target: DrainTarget) -> DrainPlan {
        let mut plan = DrainPlan::default();
        let mut fleet = self.clone();
        // A target that does not exist has no VMs; a quarantined one keeps its state.
        match target {
            DrainTarget::Gpu(gpu)
                if self.gpus().get(gpu).is_some_and(|gpu| gpu.admin_state == AdminState::Open) =>
            {
                let _ = fleet.set_gpu_admin_state(gpu, AdminState::Draining);
            }
            DrainTarget::Unit(unit)
                if self.unit(unit).is_some_and(|unit| unit.admin_state == AdminState::Open) =>
            {
                let _ = fleet.set_unit_admin_state(unit, AdminState::Draining);
            }
            _ => {}
        }
        let mut idle: Vec<Request> = Vec::new();
        let on_target = self.units().filter(|unit| match target {
            DrainTarget::Gpu(gpu) => unit.gpu == gpu,
            DrainTarget::Unit(id) => unit.id == id,
        });
        for member in on_target.flat_map(|unit| unit.members()) {
            if member.idle {
                idle.push(member.request.clone());
            } else {
                plan.busy.push(member.request.vm);
            }
        }
        // The large ones first: these have the fewest places.
        idle.sort_by_key(|request| (std::cmp::Reverse(request.memory_bytes()), request.vm));

        let (moves, stuck) = self.one_by_one(fleet.clone(), &idle, &[]);
        (plan.moves, plan.stuck) = (moves, stuck);
        // One by one may have ended in a corner. VMs that need an instance of their own are then packed together first.
        if !plan.stuck.is_empty()
            && let Some(packed) = together(&fleet, &idle)
        {
            let (moves, stuck) = self.one_by_one(fleet, &idle, &packed);
            if stuck.len() < plan.stuck.len() {
                (plan.moves, plan.stuck) = (moves, stuck);
            }
        }
        plan
    }

    /// Moves VMs on a copy of the plan: VMs with a place fixed beforehand, then the others to their best places.
    fn one_by_one(
        &self,
        mut fleet: Self,
        requests: &[Request],
        fixed: &[(VmId, Decision)],
    ) -> (Vec<Move>, Vec<(VmId, Refusal)>) {
        let (mut moves, mut stuck) = (Vec::new(), Vec::new());
        let fixed_for = |request: &Request| fixed.iter().find(|(vm, _)| *vm == request.vm).map(|pair| pair.1);
        let (first, then): (Vec<_>, Vec<_>) =
            requests.iter().partition(|request| fixed_for(request).is_some());
        for request in first.into_iter().chain(then) {
            let fixed = fixed_for(request).filter(|decision| match decision {
                Decision::Open { gpu, .. } => fleet.wishes(request, *gpu).is_some(),
                Decision::Join(_) => false,
            });
            let decision = match fixed {
                Some(decision) => Ok(decision),
                None => fleet.decide_move(request),
            };
            let Some(from) = fleet.home(request.vm) else { continue };
            match decision
                .and_then(|decision| fleet.relocate(request.vm, decision).map_err(|_| Refusal::NoRoom))
            {
                Ok(moved) => {
                    if let Some(unit) = fleet.unit(moved.to) {
                        let existing = self.unit(unit.id).map(|unit| unit.id);
                        let to = Destination {
                            gpu: unit.gpu,
                            partition: unit.partition,
                            unit: existing,
                            shared: unit.shared,
                        };
                        moves.push(Move { vm: request.vm, from, to });
                    }
                }
                Err(refusal) => stuck.push((request.vm, refusal)),
            }
        }
        (moves, stuck)
    }

    /// The best place for a VM other than its present one.
    pub fn decide_move(&self, request: &Request) -> Result<Decision, Refusal> {
        let mut fleet = self.clone();
        let from = fleet.home(request.vm);
        if let Some(from) = from {
            // A VM neither joins its own unit, nor frees it for itself by leaving.
            let _ = fleet.leave(request.vm);
            if fleet.unit(from).is_some_and(|unit| unit.admin_state == AdminState::Open) {
                let _ = fleet.set_unit_admin_state(from, AdminState::Draining);
            }
        }
        fleet.decide(request)
    }

    /// The fewest moves of idle VMs, each in a MIG instance of its own, after which a request without a place has one. At most
    /// `most`, and at most [`MAX_MOVES`]. `None` if no such moves exist, or if the search takes too long.
    pub fn make_room(&self, request: &Request, most: usize) -> Option<Vec<Move>> {
        let movable = self.movable();
        let mut states: Vec<Occupation> = self.gpus().iter().map(|gpu| *gpu.state()).collect();
        let mut situations = MAX_SITUATIONS;
        (1..=most.min(MAX_MOVES)).find_map(|depth| {
            let mut moves = Vec::new();
            let mut left = movable.clone();
            self.search_room(request, &mut states, &mut left, depth, &mut moves, &mut situations)
                .then_some(moves)
        })
    }

    fn search_room(
        &self,
        request: &Request,
        states: &mut [Occupation],
        movable: &mut [Movable],
        depth: usize,
        moves: &mut Vec<Move>,
        situations: &mut u32,
    ) -> bool {
        if depth == 0 {
            return false;
        }
        for at in 0..movable.len() {
            let one = movable[at];
            if moves.iter().any(|earlier| earlier.vm == one.vm) {
                continue;
            }
            let Some(geometry) = self.gpus()[one.gpu].geometry() else { continue };
            for (gpu, placement, profile) in self.alternatives(&one, states, moves) {
                let Some(left) = situations.checked_sub(1) else { return false };
                *situations = left;
                let Some(there) = self.gpus()[gpu].geometry() else { continue };
                let before = (states[one.gpu], states[gpu]);
                // The new instance comes before the old one goes.
                states[gpu] = there.with(&states[gpu], profile, placement);
                states[one.gpu] = geometry.without(&states[one.gpu], one.profile, one.placement);
                let partition = Partition::Instance { profile: there.profiles()[profile].id, placement };
                moves.push(Move {
                    vm: one.vm,
                    from: one.unit,
                    to: Destination { gpu, partition, unit: None, shared: one.shared },
                });
                let welcome = !self.unwelcome(request, one.gpu, moves);
                if (welcome && self.fits_in(request, one.gpu, &states[one.gpu]))
                    || self.search_room(request, states, movable, depth - 1, moves, situations)
                {
                    return true;
                }
                moves.pop();
                // In this order, because both may be the same GPU.
                states[gpu] = before.1;
                states[one.gpu] = before.0;
            }
        }
        false
    }

    /// Idle VMs alone in their instance, if the instance is in use and neither VM nor GPU is fixed.
    fn movable(&self) -> Vec<Movable> {
        self.units()
            .filter(|unit| matches!(unit.phase, UnitPhase::Ready | UnitPhase::Unproven))
            .filter_map(|unit| {
                let [member] = unit.members() else { return None };
                let Partition::Instance { profile, placement } = unit.partition else { return None };
                let profile = self.gpus()[unit.gpu].geometry()?.index(profile)?;
                // A VM with a GPU of its own would need another whole one, without gain.
                let alone = member.request.strictness == Strictness::Gpu;
                let free = member.idle && member.request.pin.is_none() && !alone;
                let vm = member.request.vm;
                free.then_some(Movable {
                    vm,
                    unit: unit.id,
                    gpu: unit.gpu,
                    profile,
                    placement,
                    shared: unit.shared,
                })
            })
            .collect()
    }

    /// True if a VM must not be on a GPU because of VMs that earlier moves of a plan bring there.
    fn unwelcome(&self, request: &Request, gpu: usize, moves: &[Move]) -> bool {
        moves.iter().filter(|earlier| earlier.to.gpu == gpu && earlier.vm != request.vm).any(|earlier| {
            let members = self.unit(earlier.from).map(PlanUnit::members).unwrap_or_default();
            members.iter().any(|member| request.distance(&member.request) == Distance::Never)
        })
    }

    /// Other possible positions of an instance after these moves, best first: its VM's needs decide the profile on another GPU.
    fn alternatives(
        &self,
        one: &Movable,
        states: &[Occupation],
        moves: &[Move],
    ) -> Vec<(usize, SlicePlacement, usize)> {
        let Some(unit) = self.unit(one.unit) else { return Vec::new() };
        let Some(member) = unit.members().first() else { return Vec::new() };
        let mut found = Vec::new();
        for (gpu, state) in states.iter().enumerate() {
            let (Some(geometry), Some(wishes)) =
                (self.gpus()[gpu].geometry(), self.wishes(&member.request, gpu))
            else {
                continue;
            };
            if self.unwelcome(&member.request, gpu, moves) {
                continue;
            }
            let suitable = geometry
                .suitable(member.request.need())
                .into_iter()
                .find(|&profile| geometry.profiles()[profile].memory_bytes >= member.request.memory_bytes());
            let profile = if gpu == one.gpu { Some(one.profile) } else { suitable };
            let Some(profile) = profile else { continue };
            let before = geometry.remaining(state);
            for placement in geometry.free(state, profile) {
                let loss = before - geometry.remaining(&geometry.with(state, profile, placement));
                found.push((
                    (wishes, loss, std::cmp::Reverse(placement.start), gpu),
                    (gpu, placement, profile),
                ));
            }
        }
        found.sort_by_key(|(cost, _)| *cost);
        found.into_iter().map(|(_, place)| place).collect()
    }

    /// True if a GPU in this state would serve a request for an instance.
    fn fits_in(&self, request: &Request, gpu: usize, state: &Occupation) -> bool {
        let pinned = request.pin.and_then(|pin| pin.start);
        let instance = ways(request).iter().any(|way| matches!(way, Candidate::Instance { .. }));
        let alone = request.strictness == Strictness::Gpu;
        let (Some(geometry), Some(_)) = (self.gpus()[gpu].geometry(), self.wishes(request, gpu)) else {
            return false;
        };
        instance
            && (!alone || *state == Occupation::default())
            && geometry.suitable(request.need()).into_iter().any(|profile| {
                let of = &geometry.profiles()[profile];
                of.memory_bytes >= request.memory_bytes()
                    && (!alone || of.memory_slices == geometry.slices())
                    && geometry
                        .free(state, profile)
                        .any(|place| pinned.is_none_or(|start| start == place.start))
            })
    }

    /// At most `most` moves of idle VMs that win back remaining configurations, the best first. Each wins at least
    /// `gain_permille` of those that all GPUs have at that moment.
    pub fn tidy(&self, most: usize, gain_permille: u32) -> Vec<Move> {
        self.tidy_gains(most, gain_permille).into_iter().map(|(one, _)| one).collect()
    }

    /// As [`Self::tidy`], with the gain of each move in remaining configurations, relative to those before it.
    pub fn tidy_gains(&self, most: usize, gain_permille: u32) -> Vec<(Move, f64)> {
        let mut states: Vec<Occupation> = self.gpus().iter().map(|gpu| *gpu.state()).collect();
        let mut movable = self.movable();
        let (mut moves, mut gains) = (Vec::new(), Vec::new());
        let remaining = |gpu: usize, state: &Occupation| {
            self.gpus()[gpu].geometry().map_or(0, |geometry| geometry.remaining(state))
        };
        while moves.len() < most {
            let total = states
                .iter()
                .enumerate()
                .map(|(gpu, state)| remaining(gpu, state))
                .fold(0_u128, u128::saturating_add);
            let mut best: Option<(u128, usize, usize, SlicePlacement, usize)> = None;
            for (at, one) in movable.iter().enumerate() {
                let Some(geometry) = self.gpus()[one.gpu].geometry() else { continue };
                for (gpu, placement, profile) in self.alternatives(one, &states, &moves) {
                    let Some(there) = self.gpus()[gpu].geometry() else { continue };
                    let entered = there.with(&states[gpu], profile, placement);
                    let left_from = if gpu == one.gpu { &entered } else { &states[one.gpu] };
                    let left = geometry.without(left_from, one.profile, one.placement);
                    let (before, after) = if gpu == one.gpu {
                        (remaining(gpu, &states[gpu]), remaining(gpu, &left))
                    } else {
                        (
                            remaining(gpu, &states[gpu]).saturating_add(remaining(one.gpu, &states[one.gpu])),
                            remaining(gpu, &entered).saturating_add(remaining(one.gpu, &left)),
                        )
                    };
                    let gain = after.saturating_sub(before);
                    if gain > best.map_or(0, |best| best.0) {
                        best = Some((gain, at, gpu, placement, profile));
                    }
                }
            }
            let Some((gain, at, gpu, placement, profile)) = best else { break };
            if gain.saturating_mul(1000) < total.saturating_mul(u128::from(gain_permille)) {
                break;
            }
            let one = movable.remove(at);
            let (Some(there), Some(geometry)) =
                (self.gpus()[gpu].geometry(), self.gpus()[one.gpu].geometry())
            else {
                break;
            };
            states[gpu] = there.with(&states[gpu], profile, placement);
            states[one.gpu] = geometry.without(&states[one.gpu], one.profile, one.placement);
            let partition = Partition::Instance { profile: there.profiles()[profile].id, placement };
            moves.push(Move {
                vm: one.vm,
                from: one.unit,
                to: Destination { gpu, partition, unit: None, shared: one.shared },
            });
            let permille = gain.saturating_mul(1000) / total.max(1);
            gains.push(f64::from(u32::try_from(permille).unwrap_or(u32::MAX)) / 1000.0);
        }
        moves.into_iter().zip(gains).collect()
    }
}

/// Places for all VMs that may have an instance of their own, found together.
fn together(fleet: &Fleet, requests: &[Request]) -> Option<Vec<(VmId, Decision)>> {
    let gpus = fleet.mig_gpus();
    let (mut wanting, mut items) = (Vec::new(), Vec::new());
    for request in requests {
        let shared = ways(request).iter().find_map(|way| match way {
            Candidate::Instance { shared } => Some(*shared),
            _ => None,
        });
        let Some(shared) = shared.filter(|_| request.strictness < Strictness::Gpu) else { continue };
        let slots =
            gpus.iter().take(64).enumerate().fold(0_u64, |bits, (slot, &gpu)| {
                bits | u64::from(fleet.wishes(request, gpu).is_some()) << slot
            });
        wanting.push((request.vm, shared));
        items.push(Item { need: request.need(), slots });
    }
    match pack(&fleet.slots(), &items) {
        Answer::Fits(found) => Some(
            found
                .into_iter()
                .zip(wanting)
                .filter_map(|(position, (vm, shared))| {
                    let gpu = gpus[position.slot];
                    let profile = fleet.gpus()[gpu].geometry()?.profiles()[position.profile].id;
                    let partition = Partition::Instance { profile, placement: position.placement };
                    Some((vm, Decision::Open { gpu, partition, shared }))
                })
                .collect(),
        ),
        Answer::Impossible | Answer::Unknown => None,
    }
}
