use super::*;
use crate::plan::HostWork;

const CONTEXT: u64 = 100;

fn stream(key: u64) -> Stream {
    Stream { key, context: CONTEXT, order: StreamOrder::NonBlocking }
}

fn blocking(key: u64) -> Stream {
    Stream { order: StreamOrder::Blocking, ..stream(key) }
}

const LEGACY: Stream = Stream { key: 1, context: CONTEXT, order: StreamOrder::Legacy };

struct Fixture {
    model: Model,
    captures: Captures,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture { model: Model::new(), captures: Captures::new() }
    }

    fn begin(&mut self, stream: Stream, mode: Mode) {
        self.captures.begin(&mut self.model, stream, None, mode).unwrap();
    }

    fn end(&mut self, stream: Stream) -> Result<u64> {
        self.captures.end(&mut self.model, stream.key)
    }

    fn add(&mut self, stream: Stream) -> Result<u64> {
        assert!(self.captures.enter(stream)?);
        let work = Work::Host(HostWork { function: 8, data: 0 });
        self.add_work(stream, work)
    }

    fn add_work(&mut self, stream: Stream, work: Work) -> Result<u64> {
        match self.captures.add(&mut self.model, stream.key, NodeWork::Plain(work))? {
            Added::Node(node) => Ok(node),
            differs @ Added::Differs { .. } => panic!("{differs:?}"),
        }
    }

    fn record(&mut self, stream: Stream, event: u64) -> Result<bool> {
        self.captures.record(stream, event, false)
    }

    fn wait(&mut self, stream: Stream, event: u64) -> Result<bool> {
        self.captures.wait(stream, event, false)
    }

    fn before(&self, node: u64) -> Vec<u64> {
        self.model.node(node).unwrap().before.iter().map(|(node, _)| *node).collect()
    }

    /// The capture of the stream is invalid, and its end says so and removes its graph.
    fn assert_invalid(&mut self, stream: Stream) {
        assert_eq!(self.captures.status(stream), Ok(CaptureStatus::Invalidated));
        assert_eq!(self.captures.enter(stream), Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        assert_eq!(self.end(stream), Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        assert_eq!(self.captures.status(stream), Ok(CaptureStatus::None));
    }
}

#[test]
fn fork_and_join_make_a_diamond() {
    let mut at = Fixture::new();
    let (one, two) = (stream(10), stream(20));
    at.begin(one, Mode::Global);
    let root = at.add(one).unwrap();
    assert_eq!(at.record(one, 5), Ok(true));
    assert_eq!(at.wait(two, 5), Ok(true));
    let (left, right) = (at.add(one).unwrap(), at.add(two).unwrap());
    assert_eq!(at.record(two, 6), Ok(true));
    assert_eq!(at.wait(one, 6), Ok(true));
    let last = at.add(one).unwrap();
    let graph = at.end(one).unwrap();
    assert_eq!((at.before(left), at.before(right)), (vec![root], vec![root]));
    assert_eq!(at.before(last), [left, right]);
    assert_eq!(at.model.graph(graph).unwrap().nodes, [root, left, right, last]);
    assert_eq!((at.captures.status(two), at.captures.count()), (Ok(CaptureStatus::None), 0));
    at.model.destroy(graph).unwrap();
}

#[test]
fn event_keeps_the_work_before_its_record() {
    let mut at = Fixture::new();
    let (one, two) = (stream(10), stream(20));
    at.begin(one, Mode::Global);
    let early = at.add(one).unwrap();
    at.record(one, 5).unwrap();
    at.add(one).unwrap();
    at.wait(two, 5).unwrap();
    let forked = at.add(two).unwrap();
    assert_eq!(at.before(forked), [early]);
}

#[test]
fn legacy_stream_cannot_capture_and_a_capture_begins_once() {
    let mut at = Fixture::new();
    let begun = at.captures.begin(&mut at.model, LEGACY, None, Mode::Relaxed);
    assert_eq!(begun, Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(at.end(stream(10)), Err(Code::CUDA_ERROR_ILLEGAL_STATE));
    at.begin(stream(10), Mode::Global);
    let again = at.captures.begin(&mut at.model, stream(10), None, Mode::Global);
    assert_eq!(again, Err(Code::CUDA_ERROR_ILLEGAL_STATE));
    assert!(at.end(stream(10)).is_ok(), "a second begin leaves the capture as it is");
}

#[test]
fn wait_of_a_captured_stream_is_unsupported_and_invalidates() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Relaxed);
    assert_eq!(at.captures.refuse(stream(20)), Ok(()));
    assert_eq!(at.captures.refuse(stream(10)), Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    at.assert_invalid(stream(10));
    assert_eq!(at.model.counts(), (0, 0));
}

#[test]
fn event_of_another_capture_is_a_merge_and_invalidates_both() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Global);
    at.begin(stream(20), Mode::Global);
    at.record(stream(10), 5).unwrap();
    assert_eq!(at.wait(stream(20), 5), Err(Code::CUDA_ERROR_STREAM_CAPTURE_MERGE));
    at.assert_invalid(stream(10));
    at.assert_invalid(stream(20));
}

#[test]
fn end_in_another_stream_is_unmatched() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Global);
    at.record(stream(10), 5).unwrap();
    at.wait(stream(20), 5).unwrap();
    assert_eq!(at.end(stream(20)), Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    at.assert_invalid(stream(10));
}

#[test]
fn fork_without_join_is_unjoined_unless_it_has_no_work() {
    let mut at = Fixture::new();
    let (one, two) = (stream(10), stream(20));
    for works in [false, true] {
        at.begin(one, Mode::Global);
        at.add(one).unwrap();
        at.record(one, 5).unwrap();
        at.wait(two, 5).unwrap();
        if works {
            at.add(two).unwrap();
            assert_eq!(at.end(one), Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
        } else {
            let graph = at.end(one).unwrap();
            at.model.destroy(graph).unwrap();
        }
        assert_eq!((at.captures.count(), at.captures.status(two)), (0, Ok(CaptureStatus::None)));
        assert_eq!(at.model.counts(), (0, 0), "a failed capture leaves no graph");
    }
}

#[test]
fn work_after_the_join_is_unjoined() {
    let mut at = Fixture::new();
    let (one, two) = (stream(10), stream(20));
    at.begin(one, Mode::Global);
    at.record(one, 5).unwrap();
    at.wait(two, 5).unwrap();
    at.add(two).unwrap();
    at.record(two, 6).unwrap();
    at.wait(one, 6).unwrap();
    at.add(two).unwrap();
    assert_eq!(at.end(one), Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
}

#[test]
fn wait_for_an_uncaptured_event_is_isolation() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Relaxed);
    assert_eq!(at.record(stream(20), 5), Ok(false), "recorded outside");
    assert_eq!(at.wait(stream(10), 5), Err(Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION));
    at.assert_invalid(stream(10));
}

#[test]
fn legacy_stream_is_implicit_only_beside_a_blocking_stream_of_its_context() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Relaxed);
    assert_eq!(at.captures.enter(LEGACY), Ok(false));
    assert_eq!(at.captures.status(LEGACY), Ok(CaptureStatus::None));
    at.begin(blocking(20), Mode::Relaxed);
    assert_eq!(at.captures.enter(Stream { context: 101, ..LEGACY }), Ok(false));
    assert_eq!(at.captures.status(LEGACY), Err(Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
    assert!(at.captures.enter(blocking(20)).is_ok(), "a query of the state invalidates nothing");
    assert_eq!(at.record(LEGACY, 9), Err(Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
    at.assert_invalid(blocking(20));
    assert!(at.end(stream(10)).is_ok());
}

#[test]
fn legacy_stream_cannot_join_a_capture() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Relaxed);
    at.record(stream(10), 5).unwrap();
    assert_eq!(at.wait(LEGACY, 5), Err(Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
    at.assert_invalid(stream(10));
}

#[test]
fn captured_event_cannot_be_queried_until_it_is_recorded_again() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Relaxed);
    at.record(stream(10), 5).unwrap();
    at.end(stream(10)).unwrap();
    assert_eq!(at.captures.check_event(5), Err(Code::CUDA_ERROR_CAPTURED_EVENT));
    assert_eq!(at.wait(stream(10), 5), Err(Code::CUDA_ERROR_CAPTURED_EVENT));
    assert_eq!(at.record(stream(10), 5), Ok(false));
    assert_eq!((at.captures.check_event(5), at.captures.count_events()), (Ok(()), 0));
    at.begin(stream(10), Mode::Relaxed);
    at.record(stream(10), 5).unwrap();
    assert_eq!(at.captures.check_event(5), Err(Code::CUDA_ERROR_CAPTURED_EVENT));
    at.assert_invalid(stream(10));
    at.captures.forget_event(5);
    assert_eq!(at.captures.count_events(), 0);
}

#[test]
fn capture_ends_in_its_thread_unless_it_is_relaxed() {
    let mut at = Fixture::new();
    for (mode, outcome) in [
        (Mode::Global, Err(Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)),
        (Mode::ThreadLocal, Err(Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)),
        (Mode::Relaxed, Ok(())),
    ] {
        at.begin(stream(10), mode);
        let elsewhere = std::thread::scope(|scope| scope.spawn(|| at.end(stream(10))).join().unwrap());
        assert_eq!(elsewhere.map(drop), outcome, "{mode:?}");
        if outcome.is_err() {
            assert!(at.end(stream(10)).is_ok(), "the right thread still ends it");
        }
    }
}

// Promise: C60
#[test]
fn unsafe_calls_follow_the_modes_of_capture_and_thread() {
    // The mode of the capture, that of the thread, whether the capture is in another thread, and whether a call is prohibited.
    let (global, local, relaxed) = (Mode::Global, Mode::ThreadLocal, Mode::Relaxed);
    for (capture, thread, elsewhere, prohibited) in [
        (global, global, false, true),
        (global, global, true, true),
        (global, local, false, true),
        (global, local, true, false),
        (global, relaxed, false, false),
        (global, relaxed, true, false),
        (local, global, false, true),
        (local, global, true, false),
        (local, local, false, true),
        (local, local, true, false),
        (local, relaxed, false, false),
        (relaxed, global, false, false),
        (relaxed, global, true, false),
        (relaxed, local, false, false),
    ] {
        let mut at = Fixture::new();
        at.begin(stream(10), capture);
        let outcome = if elsewhere {
            let captures = &mut at.captures;
            std::thread::scope(|scope| scope.spawn(|| captures.check_unsafe(thread)).join().unwrap())
        } else {
            at.captures.check_unsafe(thread)
        };
        let text = format!("{capture:?} {thread:?} {elsewhere}");
        assert_eq!(outcome.is_err(), prohibited, "{text}");
        if prohibited {
            assert_eq!(outcome, Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED), "{text}");
            at.assert_invalid(stream(10));
        } else {
            assert!(at.end(stream(10)).is_ok(), "{text}");
        }
    }
}

#[test]
fn wait_for_a_context_with_a_captured_stream_is_unsupported() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Relaxed);
    assert_eq!(at.captures.check_context(101), Ok(()));
    assert_eq!(at.captures.check_context(CONTEXT), Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    at.assert_invalid(stream(10));
}

#[test]
fn external_events_are_nodes_and_only_within_a_capture() {
    let mut at = Fixture::new();
    assert_eq!(at.captures.record(stream(10), 5, true), Err(Code::CUDA_ERROR_ILLEGAL_STATE));
    assert_eq!(at.captures.wait(stream(10), 5, true), Err(Code::CUDA_ERROR_ILLEGAL_STATE));
    at.begin(stream(10), Mode::Global);
    at.add_work(stream(10), Work::EventWait { event: 5 }).unwrap();
    assert_eq!(at.captures.wait(stream(10), 5, true), Ok(true));
    at.add_work(stream(10), Work::EventRecord { event: 6 }).unwrap();
    assert_eq!(at.captures.record(stream(10), 6, true), Ok(true));
    let (model, captures) = (&mut at.model, &mut at.captures);
    assert_eq!((captures.check_event(5), captures.check_event(6)), (Ok(()), Ok(())));
    let graph = captures.end(model, 10).unwrap();
    let plan = model.plan(graph).unwrap();
    let work: Vec<&Work> = plan.nodes.iter().map(|node| &node.work).collect();
    assert_eq!(work, [&Work::EventWait { event: 5 }, &Work::EventRecord { event: 6 }]);
    assert_eq!(plan.nodes[1].dependencies.len(), 1);
}

#[test]
fn dependencies_of_a_stream_can_be_added_and_replaced() {
    let mut at = Fixture::new();
    at.begin(stream(10), Mode::Global);
    let first = at.add(stream(10)).unwrap();
    let second = at.add(stream(10)).unwrap();
    let set = |node| vec![(node, Default::default())];
    let (model, captures) = (&at.model, &mut at.captures);
    captures.update(model, stream(10), set(first), false).unwrap();
    assert_eq!(captures.show(10).unwrap().nodes, [second, first]);
    captures.update(model, stream(10), set(first), true).unwrap();
    assert_eq!(captures.show(10).unwrap().nodes, [first]);
    assert_eq!(captures.update(model, stream(10), set(99), true), Err(INVALID));
    let idle = captures.update(model, stream(20), Vec::new(), true);
    assert_eq!(idle, Err(Code::CUDA_ERROR_ILLEGAL_STATE));
    let third = at.add(stream(10)).unwrap();
    assert_eq!(at.before(third), [first]);
    assert!(at.end(stream(10)).is_ok(), "a removed dependency is not unjoined");
}

#[test]
fn capture_into_a_graph_continues_behind_its_nodes() {
    let mut at = Fixture::new();
    let graph = at.model.create().unwrap();
    let first = at.model.add(graph, NodeWork::Plain(Work::Empty), &[]).unwrap();
    let into = Some((graph, vec![(first, Default::default())]));
    at.captures.begin(&mut at.model, stream(10), into.clone(), Mode::Global).unwrap();
    let second = at.captures.begin(&mut at.model, stream(20), into, Mode::Global);
    assert_eq!(second, Err(INVALID), "one capture at a time");
    assert_eq!((at.model.destroy(graph), at.model.destroy_node(first)), (Err(INVALID), Err(INVALID)));
    let node = at.add(stream(10)).unwrap();
    assert_eq!(at.before(node), [first]);
    assert_eq!(at.end(stream(10)), Ok(graph));
    at.captures.begin(&mut at.model, stream(10), Some((graph, Vec::new())), Mode::Global).unwrap();
    at.captures.refuse(stream(10)).unwrap_err();
    at.assert_invalid(stream(10));
    assert!(at.model.graph(graph).is_ok(), "the program's graph stays after a failure");
}

#[test]
fn destroyed_origin_ends_its_capture_and_a_destroyed_fork_must_be_joined() {
    let mut at = Fixture::new();
    let (one, two) = (stream(10), stream(20));
    for joins in [true, false] {
        at.begin(one, Mode::Global);
        at.record(one, 5).unwrap();
        at.wait(two, 5).unwrap();
        at.add(two).unwrap();
        at.record(two, 6).unwrap();
        at.captures.forget_stream(&mut at.model, two.key);
        if joins {
            at.wait(one, 6).unwrap();
            at.add(one).unwrap();
            let graph = at.end(one).unwrap();
            at.model.destroy(graph).unwrap();
        } else {
            assert_eq!(at.end(one), Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
        }
    }
    at.begin(one, Mode::Global);
    at.record(one, 5).unwrap();
    at.wait(two, 5).unwrap();
    at.captures.forget_context(&mut at.model, CONTEXT);
    assert_eq!((at.captures.count(), at.captures.count_events(), at.model.counts()), (0, 0, (0, 0)));
    assert_eq!(at.captures.status(two), Ok(CaptureStatus::None));
}

#[test]
fn each_capture_has_its_own_id() {
    let mut at = Fixture::new();
    let mut ids = Vec::new();
    for _ in 0..3 {
        at.begin(stream(10), Mode::Global);
        let Ok(CaptureStatus::Active(id, graph)) = at.captures.status(stream(10)) else {
            panic!("not active")
        };
        assert_eq!(at.end(stream(10)), Ok(graph));
        ids.push(id);
    }
    assert_eq!(ids, [1, 2, 3]);
}

#[test]
fn number_that_is_no_mode_of_a_thread_is_kept_and_prohibits_like_the_strictest() {
    assert_eq!(exchange_mode(9), Mode::Global as u32);
    assert_eq!(thread_mode(), Mode::Global);
    assert_eq!(exchange_mode(Mode::Relaxed as u32), 9);
    assert_eq!(thread_mode(), Mode::Relaxed);
}
