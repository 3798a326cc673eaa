use super::terms::{MILLISECOND, WHOLE};
use super::*;
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Add(Terms),
    Remove(usize),
    Set(usize, Terms),
    Fence(usize),
    See(usize, u32, u32, bool),
    Alive(usize),
    Turn,
    Wait(Nanos),
}

fn terms() -> impl Strategy<Value = Terms> {
    let cap = prop_oneof![3 => Just(WHOLE), 1 => 1_u32..WHOLE];
    (1_u32..=10_000, 0_usize..CLASSES, cap, prop_oneof![3 => Just(0_u32), 1 => 0_u32..=WHOLE])
        .prop_map(|(weight, class, cap, guarantee)| Terms { weight, class, cap, guarantee })
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0_usize..8;
    prop_oneof![
        2 => terms().prop_map(Step::Add),
        1 => which.clone().prop_map(Step::Remove),
        1 => (which.clone(), terms()).prop_map(|(which, terms)| Step::Set(which, terms)),
        1 => which.clone().prop_map(Step::Fence),
        20 => (which.clone(), 0_u32..3, 0_u32..3, any::<bool>())
            .prop_map(|(which, waiting, flying, begins)| Step::See(which, waiting, flying, begins)),
        2 => which.prop_map(Step::Alive),
        20 => Just(Step::Turn),
        20 => (1..30 * MILLISECOND).prop_map(Step::Wait),
    ]
}

// Promise: T27
#[test]
fn worker_that_begins_late_does_not_keep_its_permit_at_a_late_sample() {
    let mut scheduler = Scheduler::new(Settings::default(), 0);
    let [slow, other] = [(); 2].map(|()| scheduler.add(Terms::default(), 0));
    scheduler.see(slow, Seen { waiting: 1, flying: 0, begun: 0 }, 0);
    scheduler.turn(0);
    scheduler.see(other, Seen { waiting: 1, flying: 0, begun: 0 }, 0);
    // It does not begin: the other one is let in beside it.
    let due = scheduler.turn(MILLISECOND).expect("a permit is open beside the turn");
    assert!([slow, other].iter().all(|slot| scheduler.permit(*slot) != Permit::Closed));
    // It has begun, and this look is late as well; both have all that they want.
    let now = due + 50 * MILLISECOND;
    for slot in [slow, other] {
        scheduler.see(slot, Seen { waiting: 0, flying: 1, begun: 1 }, now);
    }
    scheduler.turn(now);
    assert_eq!(scheduler.permit(slow), Permit::Closed);
}

/// The number of turns of a VM whose work never ends, beside one that always has work waiting.
fn turns_beside_its_kernel(weights: [u32; 2], length: Nanos) -> u64 {
    let mut scheduler = Scheduler::new(Settings::default(), 0);
    let [endless, busy] = weights.map(|weight| scheduler.add(Terms { weight, ..Terms::default() }, 0));
    let (mut now, mut begun) = (0, [1, 1]);
    while now < length {
        for (slot, begun) in [endless, busy].into_iter().zip(&mut begun) {
            *begun += u64::from(scheduler.permit(slot) != Permit::Closed);
            scheduler.see(slot, Seen { waiting: 1, flying: 1, begun: *begun }, now);
        }
        let due = scheduler.turn(now);
        now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
    }
    scheduler.figures(endless).turns
}

// Promise: T33
#[test]
fn worker_with_an_endless_kernel_gets_some_turns_and_not_unbounded_ones() {
    let even = turns_beside_its_kernel([100, 100], 1_000 * MILLISECOND);
    assert!(even >= 4, "{even} turns beside an equal");
    let light = turns_beside_its_kernel([100, 300], 1_000 * MILLISECOND);
    assert!(light >= 4, "{light} turns beside three times the weight");
    // A VM that always has work under way cannot continue for ever on extra turns.
    let greedy = turns_beside_its_kernel([1, 100], 60_000 * MILLISECOND);
    assert!(greedy <= 16, "{greedy} turns in a minute");
}

/// The time of ten seconds that a VM of long kernels uses beside one that always has work waiting. After each kernel it
/// gets the next of these terms.
fn used_with_changing(terms: &[Terms]) -> Nanos {
    const KERNEL: Nanos = 20 * MILLISECOND;
    let mut scheduler = Scheduler::new(Settings::default(), 0);
    let [slow, busy] = [terms[0], Terms::default()].map(|terms| scheduler.add(terms, 0));
    let (mut now, mut begun, mut kernels, mut ends) = (0, 0, 0_u64, None);
    while now < 10_000 * MILLISECOND {
        if ends.is_some_and(|end| now >= end) {
            ends = None;
            let at = usize::try_from(kernels).expect("small") % terms.len();
            scheduler.set(slow, terms[at], now);
        }
        if ends.is_none() && scheduler.permit(slow) != Permit::Closed {
            kernels += 1;
            ends = Some(now + KERNEL);
        }
        let flying = u32::from(ends.is_some());
        scheduler.see(slow, Seen { waiting: 1, flying, begun: kernels }, now);
        let open = scheduler.permit(busy) != Permit::Closed;
        begun += u64::from(open);
        scheduler.see(busy, Seen { waiting: 1, flying: u32::from(open), begun }, now);
        let due = scheduler.turn(now);
        now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
    }
    scheduler.figures(slow).used
}

// Promise: A44
#[test]
fn terms_that_change_after_each_kernel_do_not_loosen_the_cap() {
    let capped = |class, weight| Terms { cap: 100, class, weight, ..Terms::default() };
    let still = used_with_changing(&[capped(1, 100), capped(1, 100)]);
    assert!(still <= 1_200 * MILLISECOND, "{still} of ten seconds at a cap of a tenth");
    for changing in [
        &[capped(0, 100), capped(2, 100)][..],
        &[capped(1, 100), capped(1, 101)],
        &[capped(1, 100), Terms { guarantee: 1, ..capped(1, 100) }],
    ] {
        let used = used_with_changing(changing);
        assert!(used <= 1_200 * MILLISECOND, "{used} with {changing:?}, {still} without a change");
    }
}

// Promise: T24
#[test]
fn lifted_cap_gives_back_no_time_that_it_withheld() {
    let mut scheduler = Scheduler::new(Settings::default(), 0);
    let capped = scheduler.add(Terms { cap: 100, ..Terms::default() }, 0);
    let other = scheduler.add(Terms::default(), 0);
    let (mut now, mut begun) = (0, [0, 0]);
    let mut run = |scheduler: &mut Scheduler, length: Nanos| {
        let end = now + length;
        while now < end {
            for (slot, begun) in [capped, other].into_iter().zip(&mut begun) {
                let open = scheduler.permit(slot) != Permit::Closed;
                *begun += u64::from(open);
                let seen = Seen { waiting: 1, flying: u32::from(open), begun: *begun };
                scheduler.see(slot, seen, now);
            }
            let due = scheduler.turn(now);
            now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
        }
        now
    };
    let now = run(&mut scheduler, 10_000 * MILLISECOND);
    scheduler.set(capped, Terms::default(), now);
    let before = scheduler.figures(capped).used;
    run(&mut scheduler, 1_000 * MILLISECOND);
    let used = scheduler.figures(capped).used - before;
    assert!(used < 600 * MILLISECOND, "{used} of a second at equal weights");
}

// Promise: A44
#[test]
fn change_of_terms_keeps_tokens_credit_and_virtual_time() {
    let mut scheduler = Scheduler::new(Settings::default(), 0);
    let own = Terms { cap: 100, guarantee: 50, ..Terms::default() };
    let slot = scheduler.add(own, 0);
    let other = scheduler.add(Terms::default(), 0);
    for slot in [slot, other] {
        scheduler.see(slot, Seen { waiting: 1, ..Seen::default() }, 0);
    }
    scheduler.turn(0);
    // One long kernel, begun in its turn, puts it in debt to its cap, its guarantee and its neighbour.
    let first = if scheduler.permit(slot) == Permit::Closed { other } else { slot };
    scheduler.see(first, Seen::default(), 0);
    scheduler.turn(0);
    scheduler.see(slot, Seen { waiting: 1, flying: 1, begun: 1 }, 1);
    scheduler.turn(100 * MILLISECOND);
    let debts = |scheduler: &Scheduler| {
        let tenant = scheduler.peek(slot).expect("it is there");
        (tenant.tokens, tenant.throttled, tenant.credit, tenant.time)
    };
    let before = debts(&scheduler);
    assert!(before.0 < 0 && before.1 && before.2 < 0, "{before:?}");
    let now = 100 * MILLISECOND;
    for terms in [Terms { weight: 200, ..own }, Terms { class: 0, ..own }, Terms { class: 2, ..own }, own] {
        scheduler.set(slot, terms, now);
        let (tokens, throttled, credit, time) = debts(&scheduler);
        assert_eq!((tokens, throttled, credit), (before.0, before.1, before.2), "{terms:?}");
        let clock = scheduler.clocks[terms.class];
        assert!(terms.class != 1 || time >= before.3, "{terms:?}: {time} after {}", before.3);
        assert!(time >= clock, "{terms:?}");
    }
    // Removing a cap and setting it again does not forgive either.
    scheduler.set(slot, Terms { cap: WHOLE, ..own }, now);
    assert!(!debts(&scheduler).1, "nothing throttles without a cap");
    scheduler.set(slot, own, now);
    assert_eq!(debts(&scheduler).0, before.0);
}

// Promise: T26
/// A VM with a guarantee has more time than its weight gives it. A VM that comes later competes with the others of its priority as if
/// there were none.
#[test]
fn guarantee_of_a_vm_delays_no_other_vm_of_its_priority() {
    let terms = |weight, class, cap, guarantee| Terms { weight, class, cap, guarantee };
    let all = [
        (terms(100, 1, 1000, 240), 0),
        (terms(100, 2, 1000, 0), 1),
        (terms(4400, 1, 1000, 0), 0),
        (terms(100, 1, 50, 0), 0),
    ];
    let mut scheduler = Scheduler::new(Settings::default(), 0);
    let mut vms = all.map(|(terms, flying)| (scheduler.add(terms, 0), flying, 0_u64));
    let capped = vms[3].0;
    let mut now = 0;
    while scheduler.figures(capped).turns == 0 {
        assert!(now < 2000 * MILLISECOND, "no turn in two seconds");
        for (slot, flying, begun) in &mut vms {
            let open = scheduler.permit(*slot) != Permit::Closed;
            *begun += u64::from(open);
            let flying = if open { *flying } else { 0 };
            scheduler.see(*slot, Seen { waiting: 1, flying, begun: *begun }, now);
        }
        let due = scheduler.turn(now);
        now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
    }
}

proptest! {
    // Promise: T27
    /// In any order of events: no VM is charged time that did not pass, a VM without permission has no permit, the unit is idle
    /// only if no VM may have it, and the next decision lies in the future.
    #[test]
    fn any_order_of_steps_keeps_charges_permits_and_deadlines_valid(steps in prop::collection::vec(step(), 0..400)) {
        let mut scheduler = Scheduler::new(Settings::default(), 0);
        let mut now = 0;
        let mut slots: Vec<(Slot, bool, u64)> = Vec::new();
        let mut gone = 0;
        for step in steps {
            let at = |which: usize| (!slots.is_empty()).then(|| which % slots.len());
            match step {
                Step::Add(terms) if slots.len() < 8 => {
                    slots.push((scheduler.add(terms, now), false, 0));
                }
                Step::Add(_) => {}
                Step::Remove(which) => if let Some(at) = at(which) {
                    let (slot, ..) = slots.remove(at);
                    gone += scheduler.figures(slot).used;
                    scheduler.remove(slot, now);
                },
                Step::Set(which, terms) => if let Some(at) = at(which) {
                    scheduler.set(slots[at].0, terms, now);
                },
                Step::Fence(which) => if let Some(at) = at(which) {
                    scheduler.fence(slots[at].0);
                    slots[at].1 = true;
                },
                Step::See(which, waiting, flying, begins) => if let Some(at) = at(which) {
                    slots[at].2 += u64::from(begins);
                    let seen = Seen { waiting, flying, begun: slots[at].2 };
                    scheduler.see(slots[at].0, seen, now);
                },
                Step::Alive(which) => if let Some(at) = at(which) {
                    scheduler.alive(slots[at].0, now);
                },
                Step::Wait(time) => now += time,
                Step::Turn => {
                    let due = scheduler.turn(now);
                    prop_assert!(due.is_none_or(|due| due > now));
                    for (slot, fenced, _) in &slots {
                        prop_assert!(!fenced || scheduler.permit(*slot) == Permit::Closed);
                    }
                    let ready = entries(&scheduler.tenants).any(|(_, tenant)| tenant.is_ready());
                    let held_or_had = scheduler.current.is_some();
                    let beside = |index: usize| scheduler.current.is_none_or(|slot| slot.index() != index);
                    let left_open = entries(&scheduler.tenants)
                        .any(|(index, tenant)| tenant.open && tenant.is_active() && beside(index));
                    prop_assert!(!left_open || due.is_some(), "a permit beside the turn is never closed");
                    prop_assert!(!ready || held_or_had || due.is_some(), "a ready VM is forgotten");
                }
            }
            let used: Nanos = slots.iter().map(|(slot, ..)| scheduler.figures(*slot).used).sum();
            prop_assert!(used + gone <= now, "{used} and {gone} of {now}");
        }
    }

    // Promise: T26
    /// Every VM that waits gets a turn before long, whatever the others do in theirs.
    #[test]
    fn every_waiting_worker_gets_a_turn(
        all in prop::collection::vec((terms(), 0_u32..4, any::<bool>()), 1..8),
    ) {
        let mut scheduler = Scheduler::new(Settings::default(), 0);
        let mut slots = Vec::new();
        // Guarantees beyond the whole take the time from the other VMs.
        let promised: u32 = all.iter().map(|(terms, ..)| terms.guarantee).sum();
        for (terms, flying, begins) in all {
            let guarantee = terms.guarantee * 900 / promised.max(900);
            let terms = Terms { cap: terms.cap.max(50), weight: terms.weight.max(100), guarantee, ..terms };
            slots.push((scheduler.add(terms, 0), flying, begins, 0_u64));
        }
        let mut now = 0;
        // Many turns for each at the worst weights, and time for caps to fill.
        while now < 20_000 * MILLISECOND {
            for (slot, flying, begins, begun) in &mut slots {
                let open = scheduler.permit(*slot) != Permit::Closed;
                *begun += u64::from(open && *begins);
                // Work that does not end would use up a cap for ever.
                let flying = if open && *begins { *flying } else { 0 };
                scheduler.see(*slot, Seen { waiting: 1, flying, begun: *begun }, now);
                scheduler.alive(*slot, now);
            }
            let due = scheduler.turn(now);
            now = due.unwrap_or(now + MILLISECOND).min(now + MILLISECOND);
        }
        for (slot, ..) in slots {
            prop_assert!(scheduler.figures(slot).turns > 0);
        }
    }
}
