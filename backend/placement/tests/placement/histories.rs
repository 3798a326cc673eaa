//! Random histories: in any order of events, instances never overlap, foreign ones are never touched, no slice and no VM is lost,
//! and equal histories have equal ends.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use sluice_placement::{
    AdminState, AffinityTarget, AntiAffinity, Class, DestructionAnswer, Division, DrainTarget, Fleet,
    Foreign, InstanceIdentity, Partition, Pin, PlanGpu, Policy, Request, Rules, SlicePlacement, Step,
    Strictness, UnitId, UnitPhase, VmId,
};

use crate::geometries::geometry;
use crate::life::uuid;

const GIB: u64 = 1 << 30;
const GPUS: usize = 4;

#[derive(Clone, Debug)]
enum Event {
    Arrive(Request),
    Leave(u64),
    /// The driver's answer for the unit at this rank.
    Create(usize, bool),
    Close(usize),
    Destroy(usize, u8),
    Audit,
    Idle(u64, bool),
    Drain(usize),
    MakeRoom(Request),
    Tidy,
    AdminState(usize, u8),
    Restart,
}

fn requests() -> impl Strategy<Value = Request> {
    let policy = prop_oneof![Just(Policy::Mig), Just(Policy::TimeSlice), Just(Policy::Any)];
    let strictness =
        prop_oneof![6 => Just(Strictness::Shared), 2 => Just(Strictness::Unit), 1 => Just(Strictness::Gpu)];
    let class = prop_oneof![
        (0_u16..700).prop_map(|permille| Class::Guaranteed { permille }),
        (0_u64..20).prop_map(|gib| Class::Burstable { floor_bytes: gib * GIB }),
    ];
    let anti_affinity = prop::collection::vec(
        (0_u64..3, any::<bool>())
            .prop_map(|(group, never)| AntiAffinity { from: AffinityTarget::Group(group), never }),
        0..2,
    );
    let pin = prop::option::weighted(
        0.1,
        (0..GPUS + 1, prop::option::of(0_u8..9)).prop_map(|(gpu, start)| Pin { gpu, start }),
    );
    (0_u64..24, policy, strictness, 0_u64..150, class, anti_affinity, pin, any::<bool>()).prop_map(
        |(vm, policy, strictness, gib, class, anti_affinity, pin, allow_larger)| Request {
            policy,
            strictness,
            class,
            anti_affinity,
            pin,
            allow_larger,
            overhead_bytes: GIB / 2,
            ..Request::new(VmId(vm), gib * GIB)
        },
    )
}

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => requests().prop_map(Event::Arrive),
        4 => (0_u64..24).prop_map(Event::Leave),
        6 => (0_usize..16, any::<bool>()).prop_map(|(rank, well)| Event::Create(rank, well)),
        4 => (0_usize..16).prop_map(Event::Close),
        6 => (0_usize..16, 0_u8..4).prop_map(|(rank, how)| Event::Destroy(rank, how)),
        1 => Just(Event::Audit),
        2 => (0_u64..24, any::<bool>()).prop_map(|(vm, idle)| Event::Idle(vm, idle)),
        1 => (0..GPUS).prop_map(Event::Drain),
        1 => requests().prop_map(Event::MakeRoom),
        1 => Just(Event::Tidy),
        1 => (0..GPUS, 0_u8..3).prop_map(|(gpu, admin_state)| Event::AdminState(gpu, admin_state)),
        1 => Just(Event::Restart),
    ]
}

fn foreign() -> Vec<Foreign> {
    vec![Foreign {
        instance: 99,
        profile: Some(19),
        placement: SlicePlacement { start: 3, size: 1 },
        compute_slices: 1,
    }]
}

fn gpus() -> Vec<PlanGpu> {
    let hopper = Arc::new(geometry("h200-141"));
    vec![
        PlanGpu::new(uuid(0), Some(0), Division::Mig(hopper.clone())),
        PlanGpu::new(uuid(1), Some(1), Division::Mig(hopper)),
        PlanGpu::new(uuid(2), Some(0), Division::Whole { memory_bytes: 140 * GIB, multiprocessors: 132 }),
        PlanGpu::new(uuid(3), None, Division::Mig(Arc::new(geometry("a30-24")))),
    ]
}

fn start() -> Fleet {
    let mut fleet =
        Fleet::new(Rules { overcommit_permille: 1200, weight_limit: 8, ..Rules::default() }, gpus());
    fleet.set_foreign(1, foreign()).expect("foreign");
    fleet
}

fn nth(fleet: &Fleet, rank: usize) -> Option<UnitId> {
    fleet.units().map(|unit| unit.id).nth(rank)
}

/// Invariants that hold at any moment, written without the plan's own sums.
fn check(fleet: &Fleet) {
    assert!(fleet.consistent());
    for (index, gpu) in fleet.gpus().iter().enumerate() {
        let units: Vec<_> = fleet.units().filter(|unit| unit.gpu == index).collect();
        if gpu.geometry().is_none() {
            assert!(units.len() <= 1, "one unit on a whole GPU");
            continue;
        }
        let geometry = gpu.geometry().expect("divided");
        let mut occupied = 0_u64;
        let mut compute = 0_u32;
        for foreign in gpu.foreign() {
            assert_eq!(occupied & foreign.placement.mask(), 0);
            occupied |= foreign.placement.mask();
            compute += u32::from(foreign.compute_slices);
        }
        for unit in &units {
            let Partition::Instance { profile, placement } = unit.partition else { panic!("an instance") };
            let profile = &geometry.profiles()[geometry.index(profile).expect("a profile")];
            assert!(profile.placements.contains(&placement), "{placement:?}");
            assert_eq!(occupied & placement.mask(), 0, "overlap on GPU {index}");
            occupied |= placement.mask();
            compute += u32::from(profile.compute_slices);
        }
        assert_eq!(occupied, gpu.state().occupied(), "slices of GPU {index}");
        assert!(compute <= u32::from(geometry.compute()), "compute of GPU {index}");
    }
    let expected = usize::from(fleet.gpus()[1].foreign() == foreign());
    assert_eq!(expected, 1, "foreign instances are as they were");
    for unit in fleet.units() {
        let members = unit.members();
        assert!(unit.shared || members.len() <= 1, "alone");
        let firm: u64 = members.iter().map(|member| member.request.firm_bytes()).sum();
        let time: u32 = members.iter().map(|member| u32::from(member.request.firm_permille())).sum();
        assert!(firm <= unit.memory_bytes && time <= 1000);
        for member in members {
            assert!(members.len() == 1 || member.request.strictness == Strictness::Shared);
            assert_eq!(fleet.home(member.request.vm), Some(unit.id));
            // Neighbours on any unit of the same GPU.
            for other in fleet.units().filter(|other| other.gpu == unit.gpu).flat_map(|other| other.members())
            {
                if other.request.vm != member.request.vm {
                    assert_ne!(member.request.strictness, Strictness::Gpu);
                    let anti_affinity = member.request.anti_affinity.iter().any(|anti_affinity| {
                        anti_affinity.never
                            && other
                                .request
                                .anti_affinity
                                .iter()
                                .any(|theirs| theirs.from == anti_affinity.from)
                    });
                    assert!(!anti_affinity, "{:?} beside {:?}", member.request.vm, other.request.vm);
                }
            }
        }
    }
}

/// Follows a plan, and ends each unit that it empties before the next move, which may need its slices.
fn follow(fleet: &mut Fleet, moves: &[sluice_placement::Move], now: Duration) {
    for one in moves {
        let moved = fleet.follow(one).expect("a plan can be followed while nothing else happens");
        if moved.emptied && !fleet.close(moved.from, now).expect("an empty unit") {
            while fleet.closing_answer(moved.from, now, DestructionAnswer::Gone).expect("closing")
                != Step::Gone
            {}
        }
        check(fleet);
    }
}

/// Executes one event; returns its result as text.
fn step(fleet: &mut Fleet, event: &Event, now: Duration) -> String {
    match event {
        Event::Arrive(request) => format!("{:?}", fleet.place(request)),
        Event::Leave(vm) => format!("{:?}", fleet.leave(VmId(*vm))),
        Event::Create(rank, well) => match nth(fleet, *rank) {
            None => String::new(),
            Some(unit) if !well => format!("{:?}", fleet.abandon(unit)),
            Some(unit) => {
                let instance = u32::try_from(unit.0).unwrap_or(0);
                let whole = fleet.unit(unit).is_some_and(|unit| unit.partition == Partition::Whole);
                // The driver reuses the same few UUIDs.
                let uuid = uuid(200 + u8::try_from(instance % 3).unwrap_or(0));
                let identity = (!whole).then_some(InstanceIdentity { instance, compute_instance: 0, uuid });
                let highest = fleet.highest().epoch;
                let epoch = fleet.created(unit, identity);
                assert!(epoch.as_ref().map_or(true, |epoch| *epoch > highest), "epochs only rise");
                format!("{epoch:?} {:?}", fleet.proven_clean(unit))
            }
        },
        Event::Close(rank) => match nth(fleet, *rank) {
            Some(unit) => format!("{:?}", fleet.close(unit, now)),
            None => String::new(),
        },
        Event::Destroy(rank, how) => match nth(fleet, *rank) {
            Some(unit) => {
                let answer = [
                    DestructionAnswer::Gone,
                    DestructionAnswer::Gone,
                    DestructionAnswer::InUse,
                    DestructionAnswer::Failed,
                ][usize::from(*how)];
                let due = fleet.closing_step(unit, now);
                if matches!(due, Ok(Step::DestroyCompute | Step::DestroyInstance)) {
                    return format!("{:?}", fleet.closing_answer(unit, now, answer));
                }
                format!("{due:?}")
            }
            None => String::new(),
        },
        Event::Audit => format!("{:?}", fleet.audit_closing(now)),
        Event::Idle(vm, idle) => format!("{:?}", fleet.set_idle(VmId(*vm), *idle)),
        Event::Drain(gpu) => {
            let plan = fleet.drain(DrainTarget::Gpu(*gpu));
            let moved: Vec<VmId> = plan.moves.iter().map(|one| one.vm).collect();
            assert!(plan.moves.iter().all(|one| one.to.gpu != *gpu));
            assert!(plan.busy.iter().all(|vm| !moved.contains(vm)));
            follow(fleet, &plan.moves, now);
            format!("{plan:?}")
        }
        Event::MakeRoom(request) => {
            let plan = fleet.make_room(request, 2);
            follow(fleet, plan.as_deref().unwrap_or_default(), now);
            format!("{plan:?}")
        }
        Event::Tidy => {
            let plan = fleet.tidy(4, 1);
            follow(fleet, &plan, now);
            format!("{plan:?}")
        }
        Event::AdminState(gpu, admin_state) => {
            let admin_state =
                [AdminState::Open, AdminState::Draining, AdminState::Quarantined][usize::from(*admin_state)];
            format!("{:?}", fleet.set_gpu_admin_state(*gpu, admin_state))
        }
        Event::Restart => restart(fleet, now),
    }
}

/// A new process takes over from the old one: records, and the existing instances.
fn restart(fleet: &mut Fleet, now: Duration) -> String {
    let records = fleet.records();
    let mut listed = Vec::new();
    for (unit, record) in fleet.units().zip(&records) {
        if let (Partition::Instance { profile, placement }, Some(identity)) = (unit.partition, &unit.identity)
        {
            let gpu = &fleet.gpus()[unit.gpu];
            let geometry = gpu.geometry().expect("divided");
            let compute_slices =
                geometry.profiles()[geometry.index(profile).expect("a profile")].compute_slices;
            listed.push(sluice_placement::ListedInstance {
                gpu: record.gpu,
                instance: identity.instance,
                compute_instance: Some(identity.compute_instance),
                uuid: Some(identity.uuid),
                profile,
                placement,
                compute_slices,
            });
        }
    }
    let existing = listed.len();
    let theirs = foreign()[0];
    listed.push(sluice_placement::ListedInstance {
        gpu: uuid(1),
        instance: theirs.instance,
        compute_instance: None,
        uuid: None,
        profile: 19,
        placement: theirs.placement,
        compute_slices: 1,
    });
    let standings: Vec<AdminState> = fleet.gpus().iter().map(|gpu| gpu.admin_state).collect();
    let mut after = Fleet::new(*fleet.rules(), gpus());
    for (gpu, admin_state) in standings.into_iter().enumerate() {
        after.set_gpu_admin_state(gpu, admin_state).expect("a GPU");
    }
    let matches = after.adopt(&records, &listed, fleet.highest(), now).expect("adopted");
    assert_eq!(matches.adopted.len(), existing);
    assert_eq!(matches.foreign, [existing], "only instances that were foreign before");
    for unit in
        fleet.units().filter(|unit| unit.phase != UnitPhase::Reserved || unit.partition == Partition::Whole)
    {
        for member in unit.members() {
            after.rejoin(unit.id, member.request.clone(), member.idle).expect("its unit is there");
        }
    }
    *fleet = after;
    format!("{matches:?}")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    // Promise: P6, P10
    #[test]
    fn any_history_overlaps_no_instance_and_touches_no_foreign_one(
        history in prop::collection::vec(events(), 1..80)
    ) {
        let (mut one, mut two) = (start(), start());
        let mut now = Duration::ZERO;
        for event in &history {
            now += Duration::from_millis(700);
            let outcome = step(&mut one, event, now);
            check(&one);
            // Equal histories end equally.
            prop_assert_eq!(outcome, step(&mut two, event, now), "{:?}", event);
        }
        prop_assert_eq!(format!("{one:?}"), format!("{two:?}"));

        // Every VM leaves: only foreign instances remain.
        let units: Vec<UnitId> = one.units().map(|unit| unit.id).collect();
        for vm in 0..24 {
            let _ = one.leave(VmId(vm));
        }
        for unit in units {
            let _ = one.close(unit, now);
        }
        one.audit_closing(now);
        now += Duration::from_secs(2);
        for unit in one.units().map(|unit| unit.id).collect::<Vec<_>>() {
            while one.unit(unit).is_some() {
                one.closing_answer(unit, now, DestructionAnswer::Gone).expect("closing");
            }
        }
        check(&one);
        let occupied: Vec<u64> = one.gpus().iter().map(|gpu| gpu.state().occupied()).collect();
        prop_assert_eq!(occupied, vec![0, 1 << 3, 0, 0]);
    }
}
