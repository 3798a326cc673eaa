//! Placement of VMs: the GPU, whole or in MIG instances, the position, and the neighbours.
//!
//! Pure logic. Plain values come in (the driver's report, the requests of VMs, the load), decisions and suggestions go out.
//! There is no I/O, no clock, no thread and no table of GPU models; equal inputs give equal answers. Its caller reads the
//! driver, carries decisions out, and keeps [`UnitRecord`]s over a restart.
//!
//! # The problem
//!
//! A GPU in MIG mode is an axis of memory slices. An instance of a profile occupies some of them from one of a few starts, and
//! consumes compute slices:
//!
//! ```text
//! slice      0   1   2   3   4   5   6   7        compute: 7 in all
//! 1g         ■   ■   ■   ■   ■   ■   ■            1 each
//! 2g         ■■■■■   ■■■■■   ■■■■■                2 each
//! 3g         ■■■■■■■■■■■■■   ■■■■■■■■■■■■■        3 each
//! 7g         ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■        7
//! ```
//!
//! Instances cannot be moved, so a 1g at slice 4 prevents a 3g there for its whole life. The aim is to put each new instance
//! where it prevents least.
//!
//! # The rule
//!
//! N(state) is the number of sets of instances that could still be added ([`Geometry::remaining`]; 723 for an empty H200). An
//! instance goes where N falls least; among equals to the higher start, then to the lower GPU. The same rule chooses among GPUs:
//! one that is nearly full has few configurations to lose, so GPUs are filled before others are opened.
//!
//! # How it is used
//!
//! ```
//! # use sluice_placement::*;
//! # use std::{sync::Arc, time::Duration};
//! # let at = |size, starts: &[u8]| starts.iter().map(|&start| SlicePlacement { start, size }).collect::<Vec<_>>();
//! # let profile = |id, size, compute, instances, starts: &[u8]| Profile {
//! #     id, memory_slices: size, compute_slices: compute, instances, placements: at(size, starts),
//! #     memory_bytes: u64::from(size) << 34, multiprocessors: 16, attributes: Attributes::default(),
//! # };
//! # let reported = vec![profile(19, 1, 1, 7, &[0, 1, 2, 3, 4, 5, 6]), profile(0, 8, 7, 1, &[0])];
//! let geometry = Arc::new(Geometry::new(8, reported)?);
//! let gpu = PlanGpu::new([1; 16], None, Division::Mig(geometry));
//! let mut fleet = Fleet::new(Rules::default(), vec![gpu]);
//!
//! // Decide and hold the slices; create the instance; record it; prove its memory clean.
//! let request = Request { policy: Policy::Mig, ..Request::new(VmId(7), 10 << 30) };
//! let (unit, decision) = fleet.place(&request)?;
//! assert!(matches!(decision, Decision::Open { partition: Partition::Instance { profile: 19, .. }, .. }));
//! let epoch = fleet.created(unit, Some(InstanceIdentity { instance: 3, compute_instance: 0, uuid: [9; 16] }))?;
//! fleet.proven_clean(unit)?;
//! assert_eq!((epoch, fleet.records().len()), (1, 1));
//!
//! // The VM goes, then the instance: get the next step, do it, report the result.
//! let now = Duration::ZERO;
//! let empty = fleet.leave(VmId(7))?.ok_or("its unit is empty")?;
//! fleet.close(empty, now)?;
//! assert_eq!(fleet.closing_step(empty, now)?, Step::DestroyCompute);
//! fleet.closing_answer(empty, now, DestructionAnswer::InUse)?;
//! assert_eq!(fleet.closing_step(empty, now)?, Step::WaitUntil(Duration::from_millis(50)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Modules
//!
//! - [`geometry`], `configurations`: the possible divisions of a GPU, and N.
//! - [`request`]: the request of a VM.
//! - [`fleet`]: the plan, and the life of a unit from reservation to destruction.
//! - [`decide`]: the decision for one VM, now.
//! - [`batch`], `patterns`: decisions for many at once, by search; finds a solution whenever one exists.
//! - [`capacity`]: the number of VMs that still fit; fragmentation.
//! - [`adoption`], [`destruction`]: after a restart; the end of an instance.
//! - [`moves`]: emptying a GPU, and making room by moving idle VMs.
//! - [`forecast`], [`rebalance`]: suggestions from load.

pub mod adoption;
pub mod batch;
pub mod capacity;
pub mod decide;
pub mod destruction;
pub mod fleet;
pub mod forecast;
pub mod geometry;
pub mod moves;
pub mod rebalance;
pub mod request;

mod axis;
mod configurations;
mod patterns;
mod record;
mod wishes;

pub use adoption::{ListedInstance, Matches};
pub use capacity::More;
pub use decide::{PlaceError, Refusal};
pub use destruction::{Destruction, DestructionAnswer, Step};
pub use fleet::{
    AdminState, Decision, Division, Fleet, Foreign, GpuUuid, Highest, InstanceIdentity, Member, Partition,
    PlanError, PlanGpu, PlanUnit, RecordPhase, Rules, UnitId, UnitPhase, UnitRecord,
};
pub use forecast::{Forecast, Smoothing};
pub use geometry::{Attributes, Geometry, GeometryError, Need, Occupation, Profile, SlicePlacement};
pub use moves::{Destination, DrainPlan, DrainTarget, Move};
pub use rebalance::{RebalancePolicy, Rebalancer, ShortResource, Suggestion};
pub use request::{AffinityTarget, AntiAffinity, Class, Pin, Policy, Request, Strictness, VmId};
