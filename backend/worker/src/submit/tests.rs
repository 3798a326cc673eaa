use super::*;
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Work { slot: u32, slow: bool },
    Empty,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0_u32..3, any::<bool>()).prop_map(|(slot, slow)| Step::Work { slot, slow }),
        1 => Just(Step::Empty),
    ]
}

proptest! {
    /// For any sequence of work a marker is placed before another stream is touched, before anything that takes time,
    /// within a batch, and when the ring runs empty.
    #[test]
    fn markers_follow_their_work(steps in prop::collection::vec(step(), 0..300)) {
        let mut unmarked = Unmarked::default();
        let mut waiting = Vec::<(u32, u64)>::new();
        let mut sequence = 0;
        for step in steps {
            match step {
                Step::Empty => {
                    unmarked = Unmarked::default();
                    waiting.clear();
                }
                Step::Work { slot, slow } => {
                    if unmarked.before(slot, slow) {
                        prop_assert!(!waiting.is_empty(), "no work to mark");
                        unmarked = Unmarked::default();
                        waiting.clear();
                    }
                    prop_assert!(waiting.iter().all(|(other, _)| *other == slot && !slow));
                    sequence += 1;
                    waiting.push((slot, sequence));
                    if unmarked.after(slot, sequence) {
                        prop_assert_eq!(unmarked.sequence, sequence);
                        unmarked = Unmarked::default();
                        waiting.clear();
                    }
                    prop_assert!(waiting.len() < BATCH as usize);
                }
            }
        }
    }
}

#[test]
fn only_work_that_takes_no_time_shares_a_marker() {
    let mut unmarked = Unmarked::default();
    assert!(!unmarked.before(1, true), "there is no work to mark");
    assert!(!unmarked.after(1, 1));
    assert!(!unmarked.before(1, false), "an event shares the kernel's marker");
    assert!(unmarked.before(1, true), "a kernel may spin until the guest saw the earlier work complete");
    assert!(unmarked.before(2, false), "another stream needs the marker first");
    let event = Operation::Record { event: 0 };
    assert!(!event.takes_time());
    assert!(Operation::Wait { event: 0 }.takes_time());
}
