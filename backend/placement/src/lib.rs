//! Where VMs go: which GPU, whole or in MIG instances, at which position, beside whom.
//!
//! Pure logic. Plain values come in (what the driver reports, what VMs ask for, how loaded things are), decisions and
//! suggestions go out. There is no I/O, no clock, no thread and no table of GPU models; equal inputs give equal
//! answers. Whoever uses it reads the driver, carries decisions out, and keeps [`Record`]s over a restart.
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
//! Instances cannot be moved, so a 1g at slice 4 forbids a 3g there for as long as it lives. The art is to put each new one
//! where it forbids least.
//!
//! # The rule
//!
//! N(state) is the number of sets of instances that could still be added ([`Geometry::remaining`]; 723 for an empty GPU of
//! the figure). An instance goes where N falls least; of equals to the higher start, then to the lower GPU. The same rule chooses
//! among GPUs: one that is nearly full has little to lose, so GPUs are filled before others are opened.
//!
//! # Rooms
//!
//! - [`geometry`], `configurations`: what a GPU can be divided into, and N.
//! - [`request`]: what a VM asks for.
//! - [`fleet`]: the plan, and the life of a unit from reservation to destruction.
//! - [`decide`]: one VM, now.
//! - [`batch`]: many at once, by search; finds a solution whenever there is one.
//! - [`capacity`]: how many more would fit; fragmentation.
//! - [`adoption`], [`destruction`]: after a restart; the end of an instance.
//! - [`moves`]: emptying a GPU, and making room by moving idle VMs.
//! - [`forecast`], [`rebalance`]: what load suggests.

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

mod configurations;

pub use adoption::{Listed, Matches};
pub use capacity::More;
pub use decide::{PlaceError, Refusal};
pub use destruction::{Answer, Destruction, Step};
pub use fleet::{
    Decision, Division, Fleet, Foreign, Gpu, GpuUuid, Highest, Identity, Member, Phase, PlanError, Record,
    RecordPhase, Rules, Spot, Standing, Unit, UnitId,
};
pub use forecast::{Forecast, Smoothing};
pub use geometry::{Attributes, Geometry, GeometryError, Need, Placement, Profile, State};
pub use moves::{Destination, DrainPlan, Move, Target};
pub use rebalance::{Rebalancer, Suggestion};
pub use request::{Apart, Class, Pin, Policy, Request, Strictness, VmId, Whom};
