use super::{
    time::{MarkerInterval, SequenceTicket},
    unmarked::{Unmarked, WorkPiece},
    *,
};
use crate::session::objects::ContextRef;
use proptest::prelude::*;

const INTERVAL: MarkerInterval = MarkerInterval { pieces: 8, estimate: 100 };

/// A step of a dispatcher.
#[derive(Clone, Copy, Debug)]
enum Step {
    Piece {
        slot: u32,
        kind: u8,
    },
    /// The guest asks for the end of a stream's work.
    Ask {
        slot: u32,
    },
    /// The ring is empty, perhaps beside other VMs, or stays empty.
    Empty {
        shared: bool,
    },
    Rest,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0_u32..24, 0_u8..8).prop_map(|(slot, kind)| Step::Piece { slot, kind }),
        12 => (0_u32..3, 0_u8..8).prop_map(|(slot, kind)| Step::Piece { slot, kind }),
        2 => (0_u32..3).prop_map(|slot| Step::Ask { slot }),
        2 => any::<bool>().prop_map(|shared| Step::Empty { shared }),
        1 => Just(Step::Rest),
    ]
}

/// Slots 0 and 3 are legacy default streams of two contexts; of the other slots, some wait for them and some for no stream.
fn target(slot: u32) -> WorkTarget {
    let order = match slot % 3 {
        0 if slot < 6 => StreamOrder::Default,
        0 | 1 => StreamOrder::Blocking,
        _ => StreamOrder::Apart,
    };
    let serial = u64::from(slot / 3 % 2);
    WorkTarget { slot, stream: 0, context: ContextRef { handle: 1, serial }, device: 0, order }
}

fn piece(slot: u32, kind: u8) -> WorkPiece {
    WorkPiece {
        target: target(slot),
        takes_time: kind != 1,
        may_wait: kind > 3,
        stands_apart: kind == 2 || kind == 3,
        follows_context: kind == 3,
    }
}

/// A piece without a marker: its sequence, and the estimate of its ticket, if it has one.
type Open = (u64, WorkPiece, Option<u64>);

/// The state that markers must keep right: for each stream its pieces without a marker.
#[derive(Default)]
struct Model {
    streams: Vec<(u32, Vec<Open>)>,
}

impl Model {
    fn of(&mut self, slot: u32) -> &mut Vec<Open> {
        if let Some(at) = self.streams.iter().position(|(of, _)| *of == slot) {
            return &mut self.streams[at].1;
        }
        self.streams.push((slot, Vec::new()));
        &mut self.streams.last_mut().unwrap().1
    }

    /// A marker covers all pieces of its stream that have none.
    fn marked(&mut self, work: UnmarkedWork) {
        let pieces = core::mem::take(self.of(work.target.slot));
        let (last, ..) = pieces.last().expect("work to mark");
        assert_eq!((work.sequence, work.pieces() as usize), (*last, pieces.len()));
    }

    fn open(&self) -> impl Iterator<Item = (u32, &[Open])> {
        self.streams.iter().map(|(slot, pieces)| (*slot, pieces.as_slice())).filter(|(_, of)| !of.is_empty())
    }
}

proptest! {
    // Promise: P52
    /// For any sequence of work: a marker that a wait may need precedes all later work that takes time, no marker orders two
    /// streams that the work did not order, work that stands apart follows marked work only, and each ticket is kept once.
    #[test]
    fn markers_follow_their_work(steps in prop::collection::vec(step(), 0..400)) {
        let (mut unmarked, mut model, mut sequence) = (Unmarked::new(), Model::default(), 0);
        for step in steps {
            match step {
                Step::Piece { slot, kind } => {
                    let next = piece(slot, kind);
                    while let Some(work) = unmarked.before(&next) {
                        model.marked(work);
                    }
                    for (of, open) in model.open() {
                        let due = open.iter().any(|(_, piece, _)| !piece.may_wait);
                        prop_assert!(!due || (of == slot && !next.takes_time), "due work waits for its marker");
                        if of == slot {
                            prop_assert!(!next.stands_apart);
                        } else if target(of).context == next.target.context {
                            prop_assert!(!target(of).order.waits_for(next.target.order));
                            prop_assert!(!next.follows_context);
                        }
                    }
                    sequence += 1;
                    let ticket = next.takes_time.then(|| SequenceTicket::known(1 + sequence % 40));
                    let staged = unmarked.after(&next, (sequence, 0), ticket);
                    let open = model.of(slot);
                    let before = open.iter().rev().find_map(|(_, _, ticket)| *ticket);
                    let replaced = before.filter(|estimate| ticket.is_some() && *estimate > 0);
                    prop_assert_eq!(staged.map(SequenceTicket::estimate), replaced);
                    open.push((sequence, next, ticket.map(SequenceTicket::estimate)));
                    let all: u64 = open.iter().filter_map(|(_, _, ticket)| *ticket).sum();
                    let is_enough = open.len() >= INTERVAL.pieces as usize || all >= INTERVAL.estimate;
                    let enough = unmarked.enough(slot, INTERVAL);
                    prop_assert_eq!(enough.is_some(), is_enough);
                    if let Some(work) = enough {
                        model.marked(work);
                    }
                }
                Step::Ask { slot } => {
                    if let Some(work) = unmarked.of_stream(slot) {
                        model.marked(work);
                    }
                    prop_assert!(model.of(slot).is_empty());
                }
                Step::Empty { shared } => {
                    while let Some(work) = unmarked.due(|_| shared) {
                        model.marked(work);
                    }
                    for (_, open) in model.open() {
                        prop_assert!(!shared && open.iter().all(|(_, piece, _)| piece.may_wait));
                    }
                }
                Step::Rest => {
                    while let Some(work) = unmarked.any() {
                        model.marked(work);
                    }
                    prop_assert_eq!(model.open().count(), 0);
                }
            }
            prop_assert_eq!(unmarked.is_empty(), model.open().count() == 0);
        }
    }
}

#[test]
fn launches_share_a_marker_and_other_work_has_its_own() {
    let mut unmarked = Unmarked::new();
    let (event, copy, wait, launch) = (piece(1, 1), piece(1, 0), piece(1, 2), piece(1, 4));
    for sequence in 1..=3 {
        assert_eq!(unmarked.before(&launch), None);
        let staged = unmarked.after(&launch, (sequence, 0), Some(SequenceTicket::known(sequence)));
        assert_eq!(staged.map(SequenceTicket::estimate), (sequence > 1).then(|| sequence - 1));
    }
    assert_eq!(unmarked.before(&event), None, "an event shares the kernels' marker");
    assert_eq!(unmarked.after(&event, (4, 0), None), None);
    assert_eq!(unmarked.before(&event), None);
    let marked = unmarked.before(&launch).expect("the event may be waited for");
    assert_eq!((marked.sequence, marked.pieces(), marked.ticket.estimate()), (4, 4, 3));
    unmarked.after(&launch, (5, 0), Some(SequenceTicket::known(1)));
    assert_eq!(unmarked.before(&copy), None, "a copy has a marker, which launches before it may share");
    assert!(unmarked.before(&wait).is_some(), "the end of a launch is seen before its stream is held");
    let event = Operation::Record { event: 0 };
    assert!(!event.takes_time());
    assert!(Operation::Wait { event: 0 }.takes_time() && Operation::Wait { event: 0 }.stands_apart());
}
