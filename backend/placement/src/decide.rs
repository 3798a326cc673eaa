//! The placement decision for one VM: one request at a time, without moving any VM or instance.
//!
//! The search turns a request into a short list of **ways** to serve it, in the order of its policy, and the first way that
//! offers a place is taken, at the place of least cost:
//!
//! | way | candidates | cost, compared from left to right |
//! |---|---|---|
//! | join | shared units with room | unwanted neighbours, far NUMA node, remainder of the unit |
//! | instance | free positions of the smallest suitable profile | unwanted neighbours, far NUMA node, memory of the profile, **remaining configurations lost**, lower start, GPU |
//! | whole | GPUs without MIG and without VMs | unwanted neighbours, far NUMA node, memory, GPU |
//!
//! The loss does most of the work: it keeps the positions that larger profiles need, and as a GPU that is nearly full has few
//! configurations to lose, it packs GPUs instead of spreading over them.

use std::cmp::Reverse;

use crate::fleet::{
    AdminState, Decision, Division, Fleet, Partition, PlanError, PlanUnit, Room, Rules, UnitPhase,
};
use crate::geometry::Occupation;
use crate::request::{Class, Distance, MAX_ANTI_AFFINITY, Policy, Request, Strictness};

/// The reason why a VM has no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The VM has a place already.
    #[error("the VM has a unit already")]
    AlreadyPlaced,
    /// The request names more neighbours than [`MAX_ANTI_AFFINITY`].
    #[error("more than {MAX_ANTI_AFFINITY} neighbours are named")]
    TooManyRules,
    /// No GPU takes new VMs, or the requested GPU does not.
    #[error("no GPU takes new VMs: all are draining or quarantined, or the requested one is")]
    Unavailable,
    /// No GPU is in the MIG mode that the policy needs.
    #[error("no GPU is in the mode that the policy asks for")]
    Mode,
    /// No unit of that size exists even on an empty GPU.
    #[error("no unit is large enough; the largest could have {largest_bytes} bytes")]
    TooLarge {
        /// Memory of the largest possible unit that suits the policy.
        largest_bytes: u64,
    },
    /// There is room, but beside VMs that it must be kept apart from.
    #[error("there is room only beside VMs that this one must be kept apart from")]
    AntiAffinity,
    /// Only units with VMs of another organisation have room, and no figure shows how much the driver takes for each VM.
    #[error(
        "there is room only on units that VMs of another organisation use and whose driver does not report the memory of each process"
    )]
    Organisation,
    /// Only units with another VM have room, and kernels there reach host memory, or may reach it.
    #[error(
        "there is room only on units that another VM uses and whose kernels can reach host memory (HMM or ATS), or whose arbiter has not reported yet if they can"
    )]
    HostAccess,
    /// All suitable units are in use.
    #[error("all suitable units are in use")]
    NoRoom,
}

/// A way to serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Candidate {
    Join,
    Instance { shared: bool },
    Whole { shared: bool },
}

/// The ways to serve a request, best first.
pub(crate) fn ways(request: &Request) -> &'static [Candidate] {
    use Candidate::{Instance, Join, Whole};
    const OWN: Candidate = Instance { shared: false };
    let guaranteed = matches!(request.class, Class::Guaranteed { .. });
    match (request.strictness, request.policy) {
        // "time-slice" does not ask for a unit of its own; for such a VM a whole GPU comes before an instance.
        (Strictness::Unit | Strictness::Gpu, Policy::TimeSlice) => &[Whole { shared: false }, OWN],
        (Strictness::Unit | Strictness::Gpu, Policy::Any) => &[OWN, Whole { shared: false }],
        (_, Policy::Mig) => &[OWN],
        (Strictness::Shared, Policy::TimeSlice) => &[Join, Whole { shared: true }, Instance { shared: true }],
        // An instance of its own is the best guarantee; a burstable VM joins other VMs.
        (Strictness::Shared, Policy::Any) if guaranteed => &[OWN, Join, Whole { shared: true }],
        (Strictness::Shared, Policy::Any) => &[Join, OWN, Whole { shared: true }],
    }
}

/// Costs that are compared before any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wishes {
    unwanted: usize,
    far: bool,
}

impl Fleet {
    /// The best place for a VM now. Nothing is changed; [`Self::reserve`] carries it out.
    pub fn decide(&self, request: &Request) -> Result<Decision, Refusal> {
        if self.home(request.vm).is_some() {
            return Err(Refusal::AlreadyPlaced);
        }
        if request.anti_affinity.len() > MAX_ANTI_AFFINITY {
            return Err(Refusal::TooManyRules);
        }
        // Once per GPU: its costs for this VM, or `None` if the VM must not be there.
        let wishes: Vec<Option<Wishes>> =
            (0..self.gpus().len()).map(|gpu| self.wishes(request, gpu)).collect();
        match self.first_way(request, &wishes, self.rules()) {
            Some(decision) => Ok(decision),
            None => Err(self.refusal(request)),
        }
    }

    /// Decides and reserves in one step.
    pub fn place(&mut self, request: &Request) -> Result<(crate::UnitId, Decision), PlaceError> {
        let decision = self.decide(request)?;
        Ok((self.reserve(request, decision)?, decision))
    }

    fn first_way(&self, request: &Request, wishes: &[Option<Wishes>], rules: &Rules) -> Option<Decision> {
        ways(request).iter().find_map(|way| match *way {
            Candidate::Join => self.join(request, wishes, rules),
            Candidate::Instance { shared } => self.instance(request, wishes, shared),
            Candidate::Whole { shared } => self.whole(request, wishes, rules, shared),
        })
    }

    /// The costs of a GPU for the VM's wishes; `None` if the VM must not be there.
    pub(crate) fn wishes(&self, request: &Request, gpu: usize) -> Option<Wishes> {
        let pinned_elsewhere = request.pin.is_some_and(|pin| pin.gpu != gpu);
        if self.gpus()[gpu].admin_state != AdminState::Open || pinned_elsewhere {
            return None;
        }
        let mut unwanted = 0;
        for unit in self.units().filter(|unit| unit.gpu == gpu) {
            for member in unit.members().iter().filter(|member| member.request.vm != request.vm) {
                // A VM with a GPU of its own excludes all others, regardless of free slices.
                if member.request.strictness == Strictness::Gpu {
                    return None;
                }
                match request.distance(&member.request) {
                    Distance::Never => return None,
                    Distance::Prefer => unwanted += 1,
                    Distance::Any => {}
                }
            }
        }
        let node = self.gpus()[gpu].numa;
        let far = request.numa.is_some_and(|wanted| node.is_some_and(|node| node != wanted));
        Some(Wishes { unwanted, far })
    }

    fn join(&self, request: &Request, wishes: &[Option<Wishes>], rules: &Rules) -> Option<Decision> {
        let pinned = request.pin.and_then(|pin| pin.start);
        self.units()
            .filter(|unit| unit.shared && unit.admin_state == AdminState::Open && !unit.members().is_empty())
            .filter(|unit| !matches!(unit.phase, UnitPhase::Closing(_)))
            .filter(|unit| match unit.partition {
                Partition::Whole => pinned.is_none() && request.profile.is_none(),
                Partition::Instance { profile, placement } => {
                    pinned.is_none_or(|start| start == placement.start)
                        && request.profile.is_none_or(|wanted| wanted == profile)
                }
            })
            .filter(|unit| self.admits((unit.gpu, unit.partition), unit.members(), request, rules))
            .filter_map(|unit| {
                let wishes = wishes[unit.gpu]?;
                let room = unit.room(request, rules)?;
                Some((wishes, fit(request, unit, &room, rules), unit.id))
            })
            .min()
            .map(|(_, _, unit)| Decision::Join(unit))
    }

    fn instance(&self, request: &Request, wishes: &[Option<Wishes>], shared: bool) -> Option<Decision> {
        let mut best = None;
        for (at, gpu) in self.gpus().iter().enumerate() {
            let (Some(wishes), Some(geometry)) = (wishes[at], gpu.geometry()) else { continue };
            let state = gpu.state();
            let alone = request.strictness == Strictness::Gpu;
            if alone && *state != Occupation::default() {
                continue;
            }
            let before = geometry.remaining(state);
            for profile in geometry.suitable(request.need()) {
                let of = &geometry.profiles()[profile];
                if of.memory_bytes < request.memory_bytes()
                    || (alone && of.memory_slices != geometry.slices())
                {
                    continue;
                }
                let pinned = request.pin.and_then(|pin| pin.start);
                let places = geometry
                    .free(state, profile)
                    .filter(|placement| pinned.is_none_or(|start| start == placement.start))
                    .map(|placement| {
                        let loss = before - geometry.remaining(&geometry.with(state, profile, placement));
                        let cost = (wishes, of.memory_bytes, loss, Reverse(placement.start), at);
                        (cost, Partition::Instance { profile: of.id, placement })
                    })
                    .min_by_key(|(cost, _)| *cost);
                let found = places.is_some();
                best = best.into_iter().chain(places).min_by_key(|(cost, _)| *cost);
                // The next profile is larger, and fits at no position where this one does not.
                if found || !(request.allow_larger || alone) {
                    break;
                }
            }
        }
        best.map(|((_, _, _, _, gpu), partition)| Decision::Open { gpu, partition, shared })
    }

    fn whole(
        &self,
        request: &Request,
        wishes: &[Option<Wishes>],
        rules: &Rules,
        shared: bool,
    ) -> Option<Decision> {
        if request.profile.is_some() || request.pin.is_some_and(|pin| pin.start.is_some()) {
            return None;
        }
        let used: std::collections::BTreeSet<usize> = self.units().map(|unit| unit.gpu).collect();
        (0..self.gpus().len())
            .filter(|gpu| !used.contains(gpu) && self.admits((*gpu, Partition::Whole), &[], request, rules))
            .filter_map(|gpu| {
                let wishes = wishes[gpu]?;
                let (memory, multiprocessors) = self.size(gpu, Partition::Whole).ok()?;
                (memory >= request.memory_bytes() && multiprocessors >= request.multiprocessors)
                    .then_some((wishes, memory, gpu))
            })
            .min()
            .map(|(_, _, gpu)| Decision::Open { gpu, partition: Partition::Whole, shared })
    }

    /// The reason for having no place: the first one that a person can act on.
    fn refusal(&self, request: &Request) -> Refusal {
        let candidates: Vec<_> = self
            .gpus()
            .iter()
            .enumerate()
            .filter(|(at, gpu)| {
                gpu.admin_state == AdminState::Open && request.pin.is_none_or(|pin| pin.gpu == *at)
            })
            .map(|(_, gpu)| &gpu.division)
            .collect();
        if candidates.is_empty() {
            return Refusal::Unavailable;
        }
        let whole_serves = ways(request).iter().any(|way| matches!(way, Candidate::Whole { .. }));
        let suitable: Vec<_> = candidates
            .into_iter()
            .filter(|division| {
                matches!(division, Division::Mig(_)) || (whole_serves && request.profile.is_none())
            })
            .collect();
        if suitable.is_empty() {
            return Refusal::Mode;
        }
        let largest = |division: &&Division| match division {
            Division::Whole { memory_bytes, multiprocessors } => {
                (*multiprocessors >= request.multiprocessors).then_some(*memory_bytes)
            }
            Division::Mig(geometry) => geometry
                .profiles()
                .iter()
                .filter(|profile| request.profile.is_none_or(|id| id == profile.id))
                .filter(|profile| profile.multiprocessors >= request.multiprocessors)
                .map(|profile| profile.memory_bytes)
                .max(),
        };
        let largest_bytes = suitable.iter().filter_map(largest).max().unwrap_or(0);
        if largest_bytes < request.memory_bytes() || largest_bytes == 0 {
            return Refusal::TooLarge { largest_bytes };
        }
        // Would there be room without rules about neighbours?
        let open = |gpu: usize| {
            let open = self.gpus()[gpu].admin_state == AdminState::Open;
            (open && request.pin.is_none_or(|pin| pin.gpu == gpu))
                .then_some(Wishes { unwanted: 0, far: false })
        };
        let wishes: Vec<_> = (0..self.gpus().len()).map(open).collect();
        let rules = *self.rules();
        let unmeasured = Rules { share_unmeasured: true, ..rules };
        if self.first_way(request, &wishes, &rules).is_some() {
            Refusal::AntiAffinity
        } else if self.first_way(request, &wishes, &unmeasured).is_some() {
            Refusal::Organisation
        } else if self.first_way(request, &wishes, &Rules { share_unconfined: true, ..unmeasured }).is_some()
        {
            Refusal::HostAccess
        } else {
            Refusal::NoRoom
        }
    }
}

/// The reason why a VM was not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// No place suits the VM.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The plan refused the decision.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// Rank of a shared unit for a VM; less is better. Guaranteed VMs are packed: the least memory and time together are left (the
/// norm of the remainder, as in vector packing). Burstable ones go to the unit with most time left for bursts, and among equals
/// by best fit of memory.
fn fit(request: &Request, unit: &PlanUnit, room: &Room, rules: &Rules) -> (u64, u64) {
    let memory_permille =
        u64::try_from(u128::from(room.memory_left) * 1000 / u128::from(room.memory_bytes.max(1)))
            .unwrap_or(1000);
    match request.class {
        Class::Guaranteed { .. } => (memory_permille.pow(2) + room.permille_left.pow(2), 0),
        Class::Burstable { .. } => {
            // Weight per multiprocessor, so that larger units take more VMs.
            let capacity = if rules.weight_limit > 0 { u64::from(rules.weight_limit) } else { 1 };
            let load =
                room.weight.saturating_mul(1_000_000) / capacity / u64::from(unit.multiprocessors.max(1));
            (load, memory_permille)
        }
    }
}
