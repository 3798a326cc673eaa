//! The order of queued items where a stream is full.
//!
//! A driver takes a limited number of operations for a stream and then makes its caller wait, so a piece of work whose stream is full
//! stays in the queue. Later items pass it, since the work for which its stream waits may be among them, unless CUDA orders them:
//!
//! - Items of one stream keep their order.
//! - The legacy default stream and the blocking streams of its context keep theirs, because each waits for the other's earlier work.
//! - A wait for an event means the last record before it: records and waits of one event keep their order. The events of a graph, and of
//!   a launch that records one itself, count as all events.
//! - A record of a whole context, and a job for a helper, pass nothing and are passed by nothing.
//! - The end of a stream or an event passes nothing. Later items pass it, for they cannot name what it ends: a slot is free for another
//!   stream once its work is complete.
//!
//! An item that stays ties later items as well. With an unlimited queue of the driver a tie delays only the submission of an item, or CUDA
//! has it, too. Where items stay, three ties delay an item until a held stream goes on although CUDA has none: that of a record of an event to
//! earlier records and waits of this event, that of everything to a job for a helper or a record of a whole context, and that of an end.

use crate::{
    session::objects::ContextRef,
    submit::{StreamOrder, WorkTarget},
};
use sluice_driver::Handle;
use sluice_protocol::limits;
use std::collections::HashSet;

/// The ties of an item to others.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ties {
    /// Work of a stream.
    Work(WorkTarget, EventUse),
    /// Concerns the work of a stream slot.
    Slot(u32),
    /// Ends a stream or an event.
    End,
    /// Has its place among all items.
    All,
}

/// The use of events by work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventUse {
    None,
    Waits(Handle),
    Records(Handle),
    /// Any use of any events.
    Unknown,
}

/// The place of an item in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// It may be performed now.
    Now,
    /// It stays, and later items may pass it.
    Stays,
    /// It stays, and nothing passes it.
    Blocks,
}

const WORDS: usize = (limits::STREAMS as usize).div_ceil(64);

/// The items that stay, as far as they tie later ones.
#[derive(Debug, Default)]
pub(super) struct StayingItems {
    any: bool,
    slots: [u64; WORDS],
    /// The orders of streams that stay, by context; few.
    orders: Vec<(ContextRef, StreamOrder)>,
    recorded: HashSet<Handle>,
    awaited: HashSet<Handle>,
    unknown_events: bool,
}

impl StayingItems {
    fn clear(&mut self) {
        if self.any {
            (self.any, self.unknown_events, self.slots) = (false, false, [0; WORDS]);
            self.orders.clear();
            self.recorded.clear();
            self.awaited.clear();
        }
    }

    /// The place of the first item that may be performed, if there is any.
    pub(super) fn first<I>(
        &mut self,
        items: impl IntoIterator<Item = I>,
        ties: impl Fn(&I) -> Ties,
        has_room: impl Fn(&I) -> bool,
    ) -> Option<usize> {
        self.clear();
        for (at, item) in items.into_iter().enumerate() {
            match self.turn(ties(&item), || has_room(&item)) {
                Turn::Now => return Some(at),
                Turn::Stays => {}
                Turn::Blocks => return None,
            }
        }
        None
    }

    /// The turn of the next item of the queue. One that stays is added.
    fn turn(&mut self, ties: Ties, has_room: impl FnOnce() -> bool) -> Turn {
        let is_tied = match ties {
            Ties::Work(target, events) => self.has(target.slot) || self.orders(target) || self.uses(events),
            Ties::Slot(slot) => self.has(slot),
            Ties::End | Ties::All => self.any,
        };
        if !is_tied && has_room() {
            return Turn::Now;
        }
        self.any = true;
        match ties {
            Ties::Work(target, events) => self.add(target, events),
            // The items to which it is tied stay as well, and tie all that this one would.
            Ties::Slot(_) | Ties::End => {}
            Ties::All => return Turn::Blocks,
        }
        Turn::Stays
    }

    fn has(&self, slot: u32) -> bool {
        // Slots are checked when they are bound.
        self.slots[slot as usize / 64] & 1 << (slot % 64) != 0
    }

    fn orders(&self, target: WorkTarget) -> bool {
        self.orders
            .iter()
            .any(|(context, order)| *context == target.context && target.order.waits_for(*order))
    }

    fn uses(&self, events: EventUse) -> bool {
        match events {
            EventUse::None => false,
            EventUse::Waits(event) => self.unknown_events || self.recorded.contains(&event),
            EventUse::Records(event) => {
                self.unknown_events || self.recorded.contains(&event) || self.awaited.contains(&event)
            }
            EventUse::Unknown => self.unknown_events || !self.recorded.is_empty() || !self.awaited.is_empty(),
        }
    }

    fn add(&mut self, target: WorkTarget, events: EventUse) {
        self.slots[target.slot as usize / 64] |= 1 << (target.slot % 64);
        let order = (target.context, target.order);
        if target.order != StreamOrder::Apart && !self.orders.contains(&order) {
            self.orders.push(order);
        }
        match events {
            EventUse::None => {}
            EventUse::Waits(event) => _ = self.awaited.insert(event),
            EventUse::Records(event) => _ = self.recorded.insert(event),
            EventUse::Unknown => self.unknown_events = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};

    /// An item of a model: the stream, and the operation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Step {
        Work(u32, Work),
        Mark(u32),
        End,
        Helper,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Work {
        Plain,
        Wait(u64),
        Record(u64),
        Graph,
        WholeContext,
        /// Holds its stream until the release of this number ran.
        Hold(usize),
        Release(usize),
    }

    const STREAMS: u32 = 6;

    /// Two contexts, each with a legacy default stream, a blocking one and one apart.
    fn target(slot: u32) -> WorkTarget {
        let order = [StreamOrder::Default, StreamOrder::Blocking, StreamOrder::Apart][slot as usize % 3];
        let context = ContextRef { handle: 1, serial: u64::from(slot / 3) };
        WorkTarget { slot, stream: 0, context, device: 0, order }
    }

    impl Step {
        fn ties(self) -> Ties {
            match self {
                Step::Work(_, Work::WholeContext) | Step::Helper => Ties::All,
                Step::Work(slot, work) => {
                    let events = match work {
                        Work::Wait(event) => EventUse::Waits(event),
                        Work::Record(event) => EventUse::Records(event),
                        Work::Graph => EventUse::Unknown,
                        _ => EventUse::None,
                    };
                    Ties::Work(target(slot), events)
                }
                Step::Mark(slot) => Ties::Slot(slot),
                Step::End => Ties::End,
            }
        }

        const fn slot(self) -> Option<u32> {
            match self {
                Step::Work(slot, _) | Step::Mark(slot) => Some(slot),
                Step::End | Step::Helper => None,
            }
        }

        /// True if CUDA orders this item before `later`, by its rules and not by those of the queue.
        fn precedes(self, later: Step) -> bool {
            let same_slot = self.slot().is_some() && self.slot() == later.slot();
            let (Step::Work(of, work), Step::Work(to, then)) = (self, later) else {
                return same_slot || self == Step::Helper || matches!(later, Step::Helper | Step::End);
            };
            let (one, two) = (target(of), target(to));
            let default = one.context == two.context
                && one.order != two.order
                && one.order != StreamOrder::Apart
                && two.order != StreamOrder::Apart;
            let whole =
                one.context == two.context && (work == Work::WholeContext || then == Work::WholeContext);
            let uses_events = |work| matches!(work, Work::Wait(_) | Work::Record(_) | Work::Graph);
            let event = match (work, then) {
                (Work::Record(one), Work::Record(two) | Work::Wait(two))
                | (Work::Wait(one), Work::Record(two)) => one == two,
                (Work::Graph, _) => uses_events(then),
                (_, Work::Graph) => uses_events(work),
                _ => false,
            };
            same_slot || default || whole || event
        }
    }

    /// A driver with the items that were performed.
    struct Model<'a> {
        steps: &'a [Step],
        /// Steps in the order in which they were performed.
        performed: Vec<usize>,
        complete: Vec<bool>,
    }

    impl Model<'_> {
        fn in_flight(&self, slot: u32) -> usize {
            let of = |at: &&usize| matches!(self.steps[**at], Step::Work(other, _) if other == slot);
            self.performed.iter().filter(of).filter(|at| !self.complete[**at]).count()
        }

        /// True if an operation in the driver can run now.
        fn runs(&self, at: usize) -> bool {
            let Step::Work(slot, work) = self.steps[at] else { return true };
            let place = self.performed.iter().position(|other| *other == at).unwrap();
            let before = &self.performed[..place];
            let waits = |other: usize| match self.steps[other] {
                Step::Work(of, then) => {
                    let (one, two) = (target(of), target(slot));
                    of == slot
                        || one.context == two.context
                            && (one.order.waits_for(two.order) || work == Work::WholeContext)
                        || matches!((then, work), (Work::Record(one), Work::Wait(two)) if one == two)
                }
                _ => false,
            };
            let released = |number| {
                let is = |other: &&usize| matches!(self.steps[**other], Step::Work(_, Work::Release(of)) if of == number);
                self.performed.iter().filter(is).any(|other| self.complete[*other])
            };
            let is_held = matches!(work, Work::Hold(number) if !released(number));
            !is_held && before.iter().all(|other| self.complete[*other] || !waits(*other))
        }

        /// Runs operations until none can run.
        fn run(&mut self) -> bool {
            let mut any = false;
            while let Some(at) =
                self.performed.iter().copied().find(|at| !self.complete[*at] && self.runs(*at))
            {
                self.complete[at] = true;
                any = true;
            }
            any
        }

        /// Performs all items that can be performed, with a driver that takes `most` pieces of work for a stream.
        fn drain(steps: &[Step], most: usize) -> (Vec<usize>, Vec<bool>) {
            let mut model = Model { steps, performed: Vec::new(), complete: vec![false; steps.len()] };
            let mut queue: VecDeque<usize> = (0..steps.len()).collect();
            let mut staying = StayingItems::default();
            loop {
                let has_room = |at: &&usize| !matches!(steps[**at], Step::Work(slot, _) if model.in_flight(slot) >= most);
                match staying.first(&queue, |at| steps[**at].ties(), has_room) {
                    Some(at) => model.performed.extend(queue.remove(at)),
                    None if model.run() => {}
                    None => return (model.performed, model.complete),
                }
            }
        }
    }

    fn step() -> impl Strategy<Value = Step> {
        let slot = 0..STREAMS;
        prop_oneof![
            8 => slot.clone().prop_map(|slot| Step::Work(slot, Work::Plain)),
            4 => (slot.clone(), 0_u64..3).prop_map(|(slot, event)| Step::Work(slot, Work::Wait(event))),
            4 => (slot.clone(), 0_u64..3).prop_map(|(slot, event)| Step::Work(slot, Work::Record(event))),
            1 => slot.clone().prop_map(|slot| Step::Work(slot, Work::Graph)),
            1 => slot.clone().prop_map(|slot| Step::Work(slot, Work::WholeContext)),
            2 => (slot.clone(), 0_usize..3).prop_map(|(slot, number)| Step::Work(slot, Work::Hold(number))),
            3 => (slot.clone(), 0_usize..3).prop_map(|(slot, number)| Step::Work(slot, Work::Release(number))),
            1 => slot.prop_map(Step::Mark),
            1 => Just(Step::End),
            1 => Just(Step::Helper),
        ]
    }

    proptest! {
        // Promise: C138
        /// Whichever streams are full, no item is performed before one that CUDA orders ahead of it.
        #[test]
        fn items_pass_no_other_that_cuda_orders_ahead(
            steps in prop::collection::vec(step(), 0..60), most in 1_usize..4,
        ) {
            let (performed, _) = Model::drain(&steps, most);
            let mut places = BTreeMap::new();
            for (place, at) in performed.iter().enumerate() {
                places.insert(*at, place);
            }
            for (later, place) in &places {
                for earlier in (0..*later).filter(|earlier| steps[*earlier].precedes(steps[*later])) {
                    let before = places.get(&earlier);
                    prop_assert!(before.is_some_and(|before| before < place), "{later} passed {earlier}");
                }
            }
        }

        // Promise: C138
        /// Work that ends with an unlimited queue ends with a short one, too, where each event is recorded once.
        #[test]
        fn work_of_streams_ends_with_short_queues_if_it_ends_with_long_ones(
            steps in prop::collection::vec(step(), 0..60), most in 1_usize..4,
        ) {
            let mut recorded = HashSet::new();
            let mut awaited = HashSet::new();
            let steps: Vec<Step> = steps
                .into_iter()
                .filter(|step| match step {
                    Step::Work(_, Work::Record(event)) => !awaited.contains(event) && recorded.insert(*event),
                    Step::Work(_, Work::Wait(event)) => { awaited.insert(*event); true }
                    Step::Work(_, Work::Graph | Work::WholeContext) | Step::Helper => false,
                    _ => true,
                })
                .collect();
            let (_, unlimited) = Model::drain(&steps, usize::MAX);
            let (_, limited) = Model::drain(&steps, most);
            for (at, step) in steps.iter().enumerate().filter(|(_, step)| matches!(step, Step::Work(..))) {
                prop_assert!(limited[at] || !unlimited[at], "{at}: {step:?} does not end");
            }
        }
    }

    #[test]
    fn items_that_stay_tie_nothing_once_they_are_gone() {
        let mut staying = StayingItems::default();
        let record = Ties::Work(target(1), EventUse::Records(7));
        assert_eq!(staying.turn(record, || false), Turn::Stays);
        for tied in [
            Ties::Work(target(0), EventUse::None),
            Ties::Work(target(1), EventUse::None),
            Ties::Work(target(2), EventUse::Waits(7)),
            Ties::Work(target(5), EventUse::Unknown),
            Ties::Slot(1),
            Ties::End,
        ] {
            let mut staying = StayingItems::default();
            staying.turn(record, || false);
            assert_eq!(staying.turn(tied, || true), Turn::Stays, "{tied:?}");
        }
        for free in
            [Ties::Work(target(2), EventUse::None), Ties::Work(target(3), EventUse::Waits(8)), Ties::Slot(2)]
        {
            assert_eq!(staying.turn(free, || true), Turn::Now, "{free:?}");
        }
        assert_eq!(staying.turn(Ties::All, || true), Turn::Blocks);
        staying.clear();
        assert_eq!(staying.turn(Ties::All, || true), Turn::Now);
        assert_eq!(staying.turn(record, || true), Turn::Now);
    }
}
