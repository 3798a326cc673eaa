//! Executable graphs: plans that are refused, order, changes, ends. In one file: they share one builder of plans.

use crate::{
    arbiter::FakeArbiter,
    code::{ILLEGAL_STATE, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY},
    guest::{ARENA, Arena, Guest, Start, null_driver},
    host_calls::{give_back, next},
    streams::{event, function, image, launch, ready, stream},
};
use sluice_kit::{guest::Answer, wait::eventually};
use sluice_messages::custody::Growth;
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, Bytes, DeviceAddress, ElementSize, LaunchAttributes, Mint, Take, Writer},
    graph::{
        Change, Conditional, ConditionalHead, Copy, CopyEnd, Dependency, Fill, Host, Kernel, NO_NODE,
        PlanWriter, Selection, Side, WireNode, WirePlan, WireWork, Write, Writes,
    },
    handle::{Array, ConditionalGraph, Context, Event, Function, GraphExecutable, Id},
    limits,
    session::{self, HostCall},
    shared::Shared,
};
use std::sync::atomic::Ordering;

const GRAPH: Id<GraphExecutable> = Id::<GraphExecutable>::new(0, 1);
/// Offsets in the arena of plans, words and copies.
const PLAN: usize = 64 << 10;
const WORD: usize = 4096;
const DATA: usize = 8192;

const fn at(offset: usize) -> u64 {
    ARENA + offset as u64
}

fn context(guest: &Guest) -> Id<Context> {
    Id::from_raw(guest.session.context).unwrap()
}

fn kernel(guest: &Guest, function: Id<Function>, parameters: &'static [u8]) -> WireWork<'static> {
    WireWork::Kernel(Kernel {
        function,
        context: context(guest),
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: LaunchAttributes(&[]),
        parameters: Bytes(parameters),
    })
}

fn end(side: Side, address: u64) -> CopyEnd {
    CopyEnd { side, address, pitch: 8, rows: 1, at: [0; 3] }
}

/// A copy of 8 bytes.
fn copy(guest: &Guest, to: CopyEnd, from: CopyEnd) -> WireWork<'static> {
    WireWork::Copy(Copy { context: context(guest), to, from, width: 8, height: 1, depth: 1 })
}

fn fill(guest: &Guest, to: u64, value: u32) -> WireWork<'static> {
    WireWork::Fill(Fill {
        context: context(guest),
        to: DeviceAddress(to),
        pitch: 0,
        element: ElementSize::Word,
        value,
        width: 2,
        height: 1,
    })
}

/// A plan whose nodes follow one another. Node i has number 10 + i.
fn chain(works: &[WireWork<'_>]) -> Vec<u8> {
    let mut writer = PlanWriter::default();
    for (index, work) in (0..).zip(works) {
        let behind = index > 0;
        let dependency = behind.then(|| Dependency { node: index - 1, edge: [0; 3] });
        writer.node(10 + index, true, dependency.into_iter(), work).unwrap();
    }
    writer.finish().unwrap()
}

fn put_plan(arena: &Arena, plan: &[u8]) -> ArenaIn<{ limits::GRAPH_BYTES }> {
    arena.write(PLAN, plan);
    ArenaIn { address: at(PLAN), bytes: plan.len() as u64 }
}

/// Makes an executable, and returns the answer's code, the driver's, and the node.
fn make(guest: &mut Guest, arena: &Arena, graph: Id<GraphExecutable>, plan: &[u8]) -> (u32, u32, u32) {
    let plan = put_plan(arena, plan);
    let answer = guest.call(wire::graph_instantiate::CALL, |w| {
        wire::graph_instantiate::Args { flags: 0, plan, graph: Mint(graph) }.put(w)
    });
    refusal(&answer)
}

fn refusal((code, fields): &Answer) -> (u32, u32, u32) {
    if *code != 0 {
        return (*code, 0, NO_NODE);
    }
    let reply = wire::graph_instantiate::Reply::get(fields).unwrap();
    (0, reply.error, reply.node)
}

const MADE: (u32, u32, u32) = (0, 0, NO_NODE);

fn update(guest: &mut Guest, arena: &Arena, plan: &[u8]) -> (u32, u32, u32) {
    let plan = put_plan(arena, plan);
    let answer =
        guest.call(wire::graph_update::CALL, |w| wire::graph_update::Args { graph: GRAPH, plan }.put(w));
    refusal(&answer)
}

fn set_work(guest: &mut Guest, arena: &Arena, path: &[u32], enabled: bool, work: &WireWork<'_>) -> u32 {
    let change = put_plan(arena, &Change::encode(path, enabled, work).unwrap());
    guest.call(wire::graph_set_work::CALL, |w| wire::graph_set_work::Args { graph: GRAPH, change }.put(w)).0
}

fn launch_graph(guest: &mut Guest, graph: Id<GraphExecutable>, slot: u32) -> u64 {
    guest.work(wire::graph_launch::CALL, slot, |w| wire::graph_launch::Args { graph }.put(w))
}

/// Launches with an answer, and returns its code.
fn launched(guest: &mut Guest, graph: Id<GraphExecutable>) -> u32 {
    let header = guest.on(wire::graph_launch::CALL, 0);
    let sequence = header.sequence;
    let (code, _) = guest.ask(header, |w| wire::graph_launch::Args { graph }.put(w));
    guest.wait(0, sequence);
    code
}

fn destroy(guest: &mut Guest, graph: Id<GraphExecutable>) {
    guest.post(wire::graph_destroy::CALL, |w| wire::graph_destroy::Args { graph }.put(w));
}

fn word(arena: &Arena, offset: usize) -> u64 {
    arena.words().load_u64(offset, Ordering::Acquire)
}

// Promise: C71
#[test]
fn graph_of_every_kind_of_node_computes_in_the_order_of_its_stream() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let (hold, nothing) = (function(&mut guest, 0, "hold_p1"), function(&mut guest, 1, "work_p2"));
    let (first, last) = (event(&mut guest, 0), event(&mut guest, 1));
    let mut list = Vec::new();
    let write = Write { to: DeviceAddress(memory + 8), value: 0x1234_5678_9abc, wide: true };
    Writes::push(&mut list, write).unwrap();
    let inner = chain(&[
        copy(&guest, end(Side::Arena, at(DATA)), end(Side::Device, memory)),
        copy(&guest, end(Side::Arena, at(DATA + 8)), end(Side::Device, memory + 8)),
    ]);
    let plan = chain(&[
        WireWork::EventRecord(first),
        fill(&guest, memory, 7),
        WireWork::Writes(Writes { context: context(&guest), list: Bytes(&list) }),
        kernel(&guest, nothing, &[0; 16]),
        WireWork::Empty,
        WireWork::EventWait(first),
        WireWork::Child(WirePlan::new(&inner).unwrap()),
        WireWork::EventRecord(last),
    ]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    stream(&mut guest, 0, 1);
    let held = launch(&mut guest, 1, hold, &at(WORD).to_le_bytes());
    let graph = launch_graph(&mut guest, GRAPH, 1);
    assert_eq!(graph, held + 1, "one piece of work");
    let behind = launch(&mut guest, 1, nothing, &[0; 16]);
    // Another stream waits for an event that the graph records.
    guest.work(wire::stream_wait::CALL, 0, |w| wire::stream_wait::Args { event: last }.put(w));
    let other = launch(&mut guest, 0, nothing, &[0; 16]);
    stream(&mut guest, 1, 2);
    let free = launch_graph(&mut guest, GRAPH, 2);
    guest.wait(2, free);
    assert_eq!(guest.completed(1), held - 1);
    arena.words().store_u32(WORD, 1, Ordering::Release);
    guest.wait(1, behind);
    guest.wait(0, other);
    assert_eq!((word(&arena, DATA), word(&arena, DATA + 8)), (0x7_0000_0007, 0x1234_5678_9abc));
}

// Promise: C70
#[test]
fn plan_that_names_what_its_session_does_not_have_is_refused_with_the_node() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let nothing = function(&mut guest, 0, "work_p2");
    let refused = function(&mut guest, 1, "refuse_209");
    let here = context(&guest);
    let WireWork::Kernel(launch) = kernel(&guest, nothing, &[0; 16]) else { unreachable!() };
    let WireWork::Fill(rows) = fill(&guest, memory, 1) else { unreachable!() };
    let elsewhere = Id::<Context>::new(9, 1);
    let device = end(Side::Device, memory);
    let bad_copy = |to: CopyEnd, [width, height, depth]: [u64; 3]| {
        WireWork::Copy(Copy { context: here, to, from: device, width, height, depth })
    };
    let mut list = Vec::new();
    Writes::push(&mut list, Write { to: DeviceAddress(memory + 4), value: 0, wide: true }).unwrap();
    let attributes = |id: u64| {
        let bytes = [&id.to_le_bytes()[..], &[0; 64]].concat();
        Box::leak(bytes.into_boxed_slice())
    };
    let cases = [
        (WireWork::Kernel(Kernel { function: Id::new(7, 1), ..launch }), INVALID_HANDLE, "no such function"),
        (WireWork::Kernel(Kernel { context: elsewhere, ..launch }), INVALID_CONTEXT, "no such context"),
        (
            WireWork::Kernel(Kernel { parameters: Bytes(&[0; 8]), ..launch }),
            INVALID_VALUE,
            "too few parameters",
        ),
        (
            WireWork::Kernel(Kernel { attributes: LaunchAttributes(attributes(13)), ..launch }),
            NOT_SUPPORTED,
            "updates from the device",
        ),
        (
            WireWork::Kernel(Kernel { attributes: LaunchAttributes(attributes(12)), ..launch }),
            INVALID_HANDLE,
            "no such event of a launch",
        ),
        (kernel(&guest, refused, &[]), 209, "the driver refuses"),
        (bad_copy(end(Side::Device, memory + 4090), [8, 1, 1]), INVALID_VALUE, "past an allocation"),
        (bad_copy(end(Side::Arena, at(1 << 20)), [8, 1, 1]), INVALID_VALUE, "past an arena"),
        (bad_copy(end(Side::Device, 0x1000), [8, 1, 1]), INVALID_VALUE, "memory of the worker"),
        (bad_copy(end(Side::Arena, 0x1000), [8, 1, 1]), INVALID_VALUE, "memory of the worker as an arena"),
        (bad_copy(device, [0, 1, 1]), INVALID_VALUE, "no bytes"),
        (bad_copy(device, [8, 1, u64::MAX]), INVALID_VALUE, "slices without an end"),
        (bad_copy(device, [9, 2, 1]), INVALID_VALUE, "rows that overlap"),
        (bad_copy(device, [8, 2, 2]), INVALID_VALUE, "slices that overlap"),
        (
            WireWork::Copy(Copy {
                context: elsewhere,
                to: device,
                from: device,
                width: 8,
                height: 1,
                depth: 1,
            }),
            INVALID_CONTEXT,
            "a copy in no context",
        ),
        (
            WireWork::Fill(Fill { to: DeviceAddress(memory + 1), ..rows }),
            INVALID_VALUE,
            "a fill that is not aligned",
        ),
        (WireWork::Fill(Fill { width: 1025, ..rows }), INVALID_VALUE, "a fill past an allocation"),
        (WireWork::Fill(Fill { height: 0, ..rows }), INVALID_VALUE, "a fill of no rows"),
        (WireWork::EventWait(Id::<Event>::new(0, 1)), INVALID_HANDLE, "no such event to wait for"),
        (WireWork::EventRecord(Id::<Event>::new(0, 1)), INVALID_HANDLE, "no such event to record"),
        (
            WireWork::Writes(Writes { context: here, list: Bytes(&list) }),
            INVALID_VALUE,
            "a value that is not aligned",
        ),
        (WireWork::Writes(Writes { context: here, list: Bytes(&[]) }), INVALID_VALUE, "no values"),
        (
            WireWork::Writes(Writes { context: here, list: Bytes(&list[1..]) }),
            INVALID_VALUE,
            "a part of a value",
        ),
    ];
    for (work, code, what) in &cases {
        let plan = chain(&[WireWork::Empty, *work]);
        assert_eq!(make(&mut guest, &arena, GRAPH, &plan), (0, *code, 11), "{what}");
        let inner = chain(&[*work]);
        let outer = chain(&[WireWork::Child(WirePlan::new(&inner).unwrap())]);
        assert_eq!(make(&mut guest, &arena, GRAPH, &outer), (0, *code, 10), "{what}, in a graph inside");
    }
    // The bytes themselves, and the call's own arguments.
    let whole = chain(&[WireWork::Empty]);
    let cut = &whole[..whole.len() - 8];
    assert_eq!(make(&mut guest, &arena, GRAPH, cut), (0, INVALID_VALUE, NO_NODE), "cut");
    let mut twins = PlanWriter::default();
    for _ in 0..2 {
        twins.node(5, true, [].into_iter(), &WireWork::Empty).unwrap();
    }
    let twins = twins.finish().unwrap();
    assert_eq!(make(&mut guest, &arena, GRAPH, &twins), (0, INVALID_VALUE, NO_NODE), "one number twice");
    let plan = put_plan(&arena, &whole);
    let (code, _) = guest.call(wire::graph_instantiate::CALL, |w| {
        wire::graph_instantiate::Args { flags: 4, plan, graph: Mint(GRAPH) }.put(w)
    });
    assert_eq!(code, INVALID_VALUE, "for launches from the device");
    let outside = ArenaIn { address: at(1 << 20) - 8, bytes: 16 };
    let (code, _) = guest.call(wire::graph_instantiate::CALL, |w| {
        wire::graph_instantiate::Args { flags: 0, plan: outside, graph: Mint(GRAPH) }.put(w)
    });
    assert_eq!(code, INVALID_VALUE, "a plan outside of arenas");
    // After all of this the id is free, and the session works.
    assert_eq!(make(&mut guest, &arena, GRAPH, &whole), MADE);
    assert_eq!(make(&mut guest, &arena, GRAPH, &whole).0, INVALID_VALUE, "the id is taken");
    assert_eq!(launched(&mut guest, GRAPH), 0);
}

// Promise: C71
#[test]
fn changed_graph_launches_with_its_new_work() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let down = copy(&guest, end(Side::Arena, at(DATA)), end(Side::Device, memory));
    let fills = |guest: &Guest, value| fill(guest, memory, value);
    let (inner, outer) = (chain(&[fills(&guest, 2)]), chain(&[fills(&guest, 3)]));
    let plan = |guest: &Guest, inner: &[u8]| {
        chain(&[fills(guest, 1), WireWork::Child(WirePlan::new(inner).unwrap()), down])
    };
    let first = plan(&guest, &inner);
    assert_eq!(make(&mut guest, &arena, GRAPH, &first), MADE);
    let value = |guest: &mut Guest| {
        assert_eq!(launched(guest, GRAPH), 0);
        word(&arena, DATA)
    };
    assert_eq!(value(&mut guest), 0x2_0000_0002);
    let four = fills(&guest, 4);
    assert_eq!(set_work(&mut guest, &arena, &[11, 10], true, &four), 0, "inside");
    assert_eq!(value(&mut guest), 0x4_0000_0004);
    assert_eq!(set_work(&mut guest, &arena, &[11, 10], false, &four), 0, "turned off");
    assert_eq!(value(&mut guest), 0x1_0000_0001);
    assert_eq!(set_work(&mut guest, &arena, &[11, 10], true, &four), 0);
    let third = WireWork::Child(WirePlan::new(&outer).unwrap());
    assert_eq!(set_work(&mut guest, &arena, &[11], true, &third), 0, "the graph inside");
    assert_eq!(value(&mut guest), 0x3_0000_0003);
    for (path, what) in
        [(vec![10, 10], "inside no graph"), (vec![13], "no such node"), (vec![12], "another kind")]
    {
        assert_eq!(set_work(&mut guest, &arena, &path, true, &four), INVALID_VALUE, "{what}");
    }
    let larger = chain(&[fills(&guest, 1), fills(&guest, 2)]);
    let larger = WireWork::Child(WirePlan::new(&larger).unwrap());
    assert_eq!(set_work(&mut guest, &arena, &[11], true, &larger), INVALID_VALUE, "another shape");
    assert_eq!(value(&mut guest), 0x3_0000_0003, "refused changes change nothing");
    let inner = chain(&[fills(&guest, 9)]);
    let next = plan(&guest, &inner);
    assert_eq!(update(&mut guest, &arena, &next), MADE);
    assert_eq!(value(&mut guest), 0x9_0000_0009);
    const UPDATE_FAILURE: u32 = 910;
    let other = chain(&[fills(&guest, 1), down]);
    assert_eq!(update(&mut guest, &arena, &other), (0, UPDATE_FAILURE, NO_NODE), "other nodes");
    let gone = chain(&[
        fills(&guest, 1),
        WireWork::Child(WirePlan::new(&inner).unwrap()),
        copy(&guest, end(Side::Arena, 0x1000), end(Side::Device, memory)),
    ]);
    assert_eq!(update(&mut guest, &arena, &gone), (0, INVALID_VALUE, 12), "memory of the worker");
    assert_eq!(value(&mut guest), 0x9_0000_0009);
    assert_eq!(guest.late_error(0).0, 0);
}

/// A copy of 8 bytes whose ends may be arrays.
fn array_end(array: Id<Array>, at: [u32; 3]) -> CopyEnd {
    CopyEnd { side: Side::Array, address: array.raw(), pitch: 0, rows: 0, at }
}

// Promise: C86
#[test]
fn copy_nodes_move_boxes_of_arrays_until_an_array_ends() {
    let (mut guest, arena) = ready();
    let (one, two) = (Id::<Array>::new(0, 1), Id::<Array>::new(1, 1));
    create_array(&mut guest, one);
    create_array(&mut guest, two);
    let memory = guest.allocate(4096).unwrap();
    let works = [
        fill(&guest, memory, 7),
        copy(&guest, array_end(one, [8, 3, 0]), end(Side::Device, memory)),
        copy(&guest, array_end(two, [16, 15, 0]), array_end(one, [8, 3, 0])),
        copy(&guest, end(Side::Arena, at(DATA)), array_end(two, [16, 15, 0])),
    ];
    for (number, bad) in [
        array_end(one, [60, 0, 0]),
        array_end(one, [0, 16, 0]),
        array_end(one, [0, 0, 1]),
        array_end(one, [58, 0, 0]),
        array_end(one, [u32::MAX; 3]),
    ]
    .into_iter()
    .enumerate()
    {
        let refused = chain(&[copy(&guest, bad, end(Side::Device, memory))]);
        assert_eq!(make(&mut guest, &arena, GRAPH, &refused), (0, INVALID_VALUE, 10), "{number}");
    }
    for unknown in [Id::<Array>::new(0, 2).raw(), Id::<Array>::new(5, 1).raw(), 0, u64::MAX] {
        let end_of = CopyEnd { address: unknown, ..array_end(one, [0; 3]) };
        let refused = chain(&[copy(&guest, end_of, end(Side::Device, memory))]);
        assert_eq!(make(&mut guest, &arena, GRAPH, &refused), (0, INVALID_HANDLE, 10), "{unknown:#x}");
    }
    assert_eq!(make(&mut guest, &arena, GRAPH, &chain(&works)), MADE);
    let sequence = launch_graph(&mut guest, GRAPH, 0);
    guest.wait(0, sequence);
    assert_eq!(word(&arena, DATA), 0x7_0000_0007);
    assert_eq!(guest.late_error(0).0, 0);
    let ended = wire::array_destroy::Args { array: Take(one) };
    assert_eq!(guest.call(wire::array_destroy::CALL, |w| ended.put(w)).0, 0);
    let sequence = launch_graph(&mut guest, GRAPH, 0);
    guest.wait(0, sequence);
    assert_eq!(guest.late_error(0), (1, INVALID_HANDLE), "the launch after the end of an array");
    create_array(&mut guest, one);
    assert_eq!(launched(&mut guest, GRAPH), INVALID_HANDLE, "the executable has the array of before");
    create_array(&mut guest, Id::new(2, 1));
    let again = chain(&[copy(&guest, array_end(Id::new(2, 1), [0; 3]), end(Side::Device, memory))]);
    let other = Id::new(1, 1);
    assert_eq!(make(&mut guest, &arena, other, &again), MADE);
    assert_eq!(launched(&mut guest, other), 0);
}

fn create_array(guest: &mut Guest, array: Id<Array>) {
    let extent = [16, 16, 0];
    let call = wire::array_create::Args { extent, format: 0x20, channels: 1, flags: 0, array: Mint(array) };
    assert_eq!(guest.call(wire::array_create::CALL, |w| call.put(w)).0, 0);
}

// Promise: C71
#[test]
fn large_graph_is_one_piece_of_work() {
    const NODES: usize = 1000;
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let nothing = function(&mut guest, 0, "work_p2");
    let mut works = vec![kernel(&guest, nothing, &[0; 16]); NODES - 2];
    works.push(fill(&guest, memory, 5));
    works.push(copy(&guest, end(Side::Arena, at(DATA)), end(Side::Device, memory)));
    assert_eq!(make(&mut guest, &arena, GRAPH, &chain(&works)), MADE);
    let sequences: Vec<u64> = (0..100).map(|_| launch_graph(&mut guest, GRAPH, 0)).collect();
    assert!(sequences.iter().copied().eq(1..=100), "one sequence for each launch");
    guest.wait(0, 100);
    assert_eq!(guest.completed(0), 100);
    assert_eq!(word(&arena, DATA), 0x5_0000_0005);
}

// Promise: C71
#[test]
fn memory_of_an_executable_is_granted_and_given_back() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = image(&guest);
    let before = (arbiter.granted_now(), arbiter.shrunk());
    let mut plan = PlanWriter::default();
    for number in 0..5000 {
        plan.node(number, true, [].into_iter(), &WireWork::Empty).unwrap();
    }
    let plan = plan.finish().unwrap();
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    eventually("the end of the grant", || arbiter.grants().1 == 0);
    assert_eq!(arbiter.grants().0.last(), Some(&(Growth::Graph as u32)));
    assert!(arbiter.granted_now() >= before.0 + 5000 * 1024, "a KiB for each node");
    destroy(&mut guest, GRAPH);
    eventually("the memory is given back", || arbiter.granted_now() == before.0);
    assert!(arbiter.shrunk() > before.1);
}

// Promise: C71
#[test]
fn memory_that_an_update_takes_is_granted_and_given_back() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let _image = image(&guest);
    let there = ARENA + (1 << 30);
    let arena = guest.attach(2, there, 8 << 20);
    let (few, many) = (function(&mut guest, 0, "work_p1"), function(&mut guest, 1, "work_p56"));
    let works = |guest: &Guest, function, parameters| chain(&vec![kernel(guest, function, parameters); 5000]);
    let put = |plan: Vec<u8>| {
        arena.write(0, &plan);
        ArenaIn { address: there, bytes: plan.len() as u64 }
    };
    let before = arbiter.granted_now();
    let plan = put(works(&guest, few, &[0; 8]));
    let answer = guest.call(wire::graph_instantiate::CALL, |w| {
        wire::graph_instantiate::Args { flags: 0, plan, graph: Mint(GRAPH) }.put(w)
    });
    assert_eq!(refusal(&answer), MADE);
    let made = arbiter.granted_now();
    for _ in 0..2 {
        let plan = put(works(&guest, many, &[0; 448]));
        let answer =
            guest.call(wire::graph_update::CALL, |w| wire::graph_update::Args { graph: GRAPH, plan }.put(w));
        assert_eq!(refusal(&answer), MADE);
        eventually("the end of the grants", || arbiter.grants().1 == 0);
    }
    // 7.2 MiB after 5 MiB, in blocks of 2 MiB.
    assert_eq!(arbiter.granted_now() - made, 2 << 20, "for the longer parameters, once");
    destroy(&mut guest, GRAPH);
    eventually("the memory is given back", || arbiter.granted_now() <= before);
}

// Promise: C72
#[test]
fn executable_that_is_destroyed_while_it_runs_completes() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let hold = function(&mut guest, 0, "hold_p1");
    let held: &'static [u8] = Box::leak(Box::new(at(WORD).to_le_bytes()));
    let plan = chain(&[
        fill(&guest, memory, 6),
        copy(&guest, end(Side::Arena, at(DATA)), end(Side::Device, memory)),
        kernel(&guest, hold, held),
    ]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    let running = launch_graph(&mut guest, GRAPH, 0);
    destroy(&mut guest, GRAPH);
    assert_eq!(set_work(&mut guest, &arena, &[10], true, &WireWork::Empty), INVALID_HANDLE);
    let next = Id::new(0, 2);
    assert_eq!(make(&mut guest, &arena, next, &chain(&[WireWork::Empty])), MADE, "its place is free");
    assert!(guest.completed(0) < running);
    arena.words().store_u32(WORD, 1, Ordering::Release);
    guest.wait(0, running);
    assert_eq!(word(&arena, DATA), 0x6_0000_0006);
    assert_eq!(launched(&mut guest, GRAPH), INVALID_HANDLE);
    assert_eq!(launched(&mut guest, next), 0);
}

// Promise: C72
#[test]
fn launch_is_refused_after_its_arena_was_detached() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let other = guest.attach(2, ARENA + (1 << 30), 1 << 20);
    let there = ARENA + (1 << 30);
    let plan = |to: u64| {
        let down = copy(&guest, end(Side::Arena, to), end(Side::Device, memory));
        chain(&[fill(&guest, memory, 8), down])
    };
    let (one, two) = (plan(there), plan(at(DATA)));
    let second = Id::new(1, 1);
    let up = copy(&guest, end(Side::Arena, at(DATA)), end(Side::Device, memory));
    assert_eq!(make(&mut guest, &arena, GRAPH, &one), MADE);
    assert_eq!(make(&mut guest, &arena, second, &two), MADE);
    assert_eq!(launched(&mut guest, GRAPH), 0);
    assert_eq!(word(&other, 0), 0x8_0000_0008);
    detach(&mut guest, 2);
    assert_eq!(launched(&mut guest, GRAPH), INVALID_VALUE);
    assert_eq!(launched(&mut guest, second), 0, "it uses another arena");
    // New work without the arena makes the executable usable again.
    assert_eq!(set_work(&mut guest, &arena, &[11], true, &up), 0);
    assert_eq!(launched(&mut guest, GRAPH), 0);
    assert_eq!(word(&arena, DATA), 0x8_0000_0008);
}

fn detach(guest: &mut Guest, slot: u32) {
    use sluice_messages::control::ToWorker;
    use sluice_protocol::session::{self, Attachment};
    sluice_shared_memory::socket::send(&guest.control, &ToWorker::Detach { slot }.encode(), &[]).unwrap();
    eventually("the detaching", || session::attachment(&guest.words(), slot) == Attachment::Detached);
}

// Promise: C72
#[test]
fn launch_is_refused_after_the_module_of_a_kernel_was_unloaded() {
    let (mut guest, arena) = ready();
    let nothing = function(&mut guest, 0, "work_p2");
    let plan = chain(&[kernel(&guest, nothing, &[0; 16])]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    assert_eq!(launched(&mut guest, GRAPH), 0);
    let (code, _) = guest.call(wire::module_unload::CALL, |w| {
        wire::module_unload::Args { module: Take(Id::new(0, 1)) }.put(w)
    });
    assert_eq!(code, 0);
    assert_eq!(launched(&mut guest, GRAPH), INVALID_HANDLE, "the null driver would end the worker");
    assert_eq!(function(&mut guest, 0, "work_p2"), nothing, "the same id, of a later module");
    assert_eq!(launched(&mut guest, GRAPH), INVALID_HANDLE, "the executable has the function of before");
    destroy(&mut guest, GRAPH);
    assert_eq!(make(&mut guest, &arena, Id::new(0, 2), &chain(&[WireWork::Empty])), MADE);
}

// Promise: C72
#[test]
fn event_that_is_destroyed_stays_for_the_executables_that_use_it() {
    let (mut guest, arena) = ready();
    let (one, two) = (event(&mut guest, 0), event(&mut guest, 1));
    let plan = chain(&[WireWork::EventRecord(one), WireWork::EventWait(one)]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    for event in [one, two] {
        guest.post(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event }.put(w));
    }
    // The null driver ends the worker at the use of an event that was destroyed.
    assert_eq!(launched(&mut guest, GRAPH), 0);
    let record = WireWork::EventRecord(two);
    assert_eq!(set_work(&mut guest, &arena, &[10], true, &record), INVALID_HANDLE, "its id is free");
    let two = event_again(&mut guest, 1);
    assert_eq!(set_work(&mut guest, &arena, &[10], true, &WireWork::EventRecord(two)), 0);
    guest.post(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event: two }.put(w));
    assert_eq!(launched(&mut guest, GRAPH), 0);
    destroy(&mut guest, GRAPH);
    assert_eq!(make(&mut guest, &arena, Id::new(0, 2), &chain(&[WireWork::Empty])), MADE);
}

fn event_again(guest: &mut Guest, index: u32) -> Id<Event> {
    let id = Id::<Event>::new(index, 2);
    guest.post(wire::event_create::CALL, |w| wire::event_create::Args { event: Mint(id), flags: 0 }.put(w));
    id
}

// Promise: C51
#[test]
fn executable_ends_with_the_context_of_any_of_its_nodes() {
    let (mut guest, arena) = ready();
    let nothing = function(&mut guest, 0, "work_p2");
    let first = guest.session.context;
    let other = guest.create_context(1, 5);
    let WireWork::Kernel(here) = kernel(&guest, nothing, &[0; 16]) else { unreachable!() };
    let both = chain(&[WireWork::Kernel(here), WireWork::Kernel(Kernel { context: other, ..here })]);
    let second = Id::new(1, 1);
    assert_eq!(make(&mut guest, &arena, GRAPH, &both), MADE);
    assert_eq!(make(&mut guest, &arena, second, &chain(&[WireWork::Kernel(here)])), MADE);
    assert_eq!(launched(&mut guest, GRAPH), 0);
    let (code, _) =
        guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context: other }.put(w));
    assert_eq!(code, 0);
    assert_eq!(guest.session.context, first);
    assert_eq!(launched(&mut guest, GRAPH), INVALID_HANDLE);
    assert_eq!(launched(&mut guest, second), 0);
    assert_eq!(make(&mut guest, &arena, GRAPH, &both), (0, INVALID_CONTEXT, 11), "its id is free");
}

// Promise: C72
#[test]
fn executable_ends_with_the_context_of_an_array_of_its_copies() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let first = guest.session.context;
    let other = guest.create_context(1, 5);
    let array = Id::<Array>::new(0, 1);
    guest.session.context = other.raw();
    create_array(&mut guest, array);
    guest.session.context = first;
    let plan = chain(&[copy(&guest, array_end(array, [8, 3, 0]), end(Side::Device, memory))]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    assert_eq!(launched(&mut guest, GRAPH), 0);
    let gone = wire::context_destroy::Args { context: other };
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| gone.put(w)).0, 0);
    assert_eq!(launched(&mut guest, GRAPH), INVALID_HANDLE);
}

// Promise: C51
#[test]
fn executable_ends_with_a_context_that_only_a_change_named() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = image(&guest);
    let memory = guest.allocate(4096).unwrap();
    let mut plan = PlanWriter::default();
    plan.node(0, true, [].into_iter(), &fill(&guest, memory, 1)).unwrap();
    for number in 1..5000 {
        plan.node(number, true, [].into_iter(), &WireWork::Empty).unwrap();
    }
    let plan = plan.finish().unwrap();
    let WireWork::Fill(here) = fill(&guest, memory, 2) else { unreachable!() };
    for (number, expected) in [(0, 0), (1, INVALID_VALUE)] {
        let before = arbiter.granted_now();
        let other = guest.create_context(1 + number, 5 + number);
        assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
        let change = WireWork::Fill(Fill { context: other, ..here });
        assert_eq!(set_work(&mut guest, &arena, &[number], true, &change), expected);
        let (code, _) = guest
            .call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context: other }.put(w));
        assert_eq!(code, 0);
        assert_eq!(launched(&mut guest, GRAPH), INVALID_HANDLE);
        eventually("the memory is given back", || arbiter.granted_now() == before);
    }
}

// Promise: C71
#[test]
fn local_memory_of_kernels_is_granted_in_each_of_their_contexts() {
    const EACH: u64 = 108 * 2048 * 1024;
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let arena = image(&guest);
    let deep = function(&mut guest, 0, "deep");
    let alone = launch(&mut guest, 0, deep, &[]);
    guest.wait(0, alone);
    let at_first = arbiter.granted_now();
    assert!(at_first >= EACH);
    let others = [guest.create_context(1, 5), guest.create_context(2, 6)];
    let WireWork::Kernel(here) = kernel(&guest, deep, &[]) else { unreachable!() };
    let one = WireWork::Kernel(Kernel { context: others[0], ..here });
    let two = WireWork::Kernel(Kernel { context: others[1], ..here });
    assert_eq!(make(&mut guest, &arena, GRAPH, &chain(&[WireWork::Kernel(here), one, two])), MADE);
    let launches = || {
        eventually("the end of the grants", || arbiter.grants().1 == 0);
        arbiter.grants().0.iter().filter(|reason| **reason == Growth::Launch as u32).count()
    };
    assert_eq!(launches(), 1);
    let before = arbiter.granted_now();
    for _ in 0..2 {
        assert_eq!(launched(&mut guest, GRAPH), 0);
        assert_eq!(launches(), 2, "one grant for a device");
        assert!(arbiter.granted_now() >= before + 2 * EACH, "for both contexts");
    }
    for (context, rest) in others.into_iter().zip([EACH, 0]) {
        let (code, _) =
            guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context }.put(w));
        assert_eq!(code, 0);
        eventually("the memory is given back with its context", || {
            arbiter.granted_now() < at_first + rest + EACH
        });
        assert!(arbiter.granted_now() >= at_first + rest);
    }
    eventually("all is given back", || arbiter.granted_now() == at_first);
}

// Promise: C72
#[test]
fn executable_that_a_refused_change_left_half_changed_is_not_launched() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let (nothing, refused) = (function(&mut guest, 0, "work"), function(&mut guest, 1, "refuse_209"));
    let there = ARENA + (1 << 30);
    let other = guest.attach(2, there, 1 << 20);
    let inside = |to: u64, function| {
        let down = copy(&guest, end(Side::Arena, to), end(Side::Device, memory));
        chain(&[down, kernel(&guest, function, &[])])
    };
    let first = fill(&guest, memory, 8);
    let (old, new, bad) = (inside(at(DATA), nothing), inside(there, nothing), inside(there, refused));
    let child = |plan| WireWork::Child(WirePlan::new(plan).unwrap());
    let plan = chain(&[first, child(&old)]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    assert_eq!(set_work(&mut guest, &arena, &[11], false, &child(&new)), INVALID_VALUE, "cannot be off");
    assert_eq!(launched(&mut guest, GRAPH), 0);
    assert_eq!((word(&arena, DATA), word(&other, 0)), (0x8_0000_0008, 0), "nothing was changed");
    assert_eq!(set_work(&mut guest, &arena, &[11], true, &child(&bad)), 209, "at its second node");
    detach(&mut guest, 2);
    assert_eq!(launched(&mut guest, GRAPH), ILLEGAL_STATE, "its copy may have been replaced");
    assert_eq!(set_work(&mut guest, &arena, &[11], true, &child(&old)), 0);
    assert_eq!(launched(&mut guest, GRAPH), ILLEGAL_STATE, "only the change of all nodes counts");
    assert_eq!(update(&mut guest, &arena, &plan), MADE);
    assert_eq!(launched(&mut guest, GRAPH), 0);
}

// Promise: C72
#[test]
fn late_end_of_a_change_does_not_free_the_id_of_the_next_executable() {
    let (mut guest, arena) = ready();
    _ = function(&mut guest, 0, "work");
    let memory = guest.allocate(4096).unwrap();
    let plan = chain(&[fill(&guest, memory, 1)]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    // The module helper is busy, so the change ends after the id has a new owner.
    let busy = guest.session.answered(guest.header(wire::module_function::CALL));
    guest.put(busy, |w| {
        let name = sluice_protocol::field::Name(b"slow");
        wire::module_function::Args { module: Id::new(0, 1), function: Mint(Id::new(9, 1)), name }.put(w)
    });
    let two = fill(&guest, memory, 2);
    let change = put_plan(&arena, &Change::encode(&[10], true, &two).unwrap());
    let pending = guest.session.answered(guest.header(wire::graph_set_work::CALL));
    guest.put(pending, |w| wire::graph_set_work::Args { graph: GRAPH, change }.put(w));
    // An answer to a later call: the plan was read.
    stream(&mut guest, 0, 1);
    let early = guest.on(wire::graph_launch::CALL, 1);
    let (code, _) = guest.ask(early, |w| wire::graph_launch::Args { graph: GRAPH }.put(w));
    assert_eq!(code, ILLEGAL_STATE);
    destroy(&mut guest, GRAPH);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    assert_eq!(launched(&mut guest, GRAPH), 0);
}

// Promise: C72
#[test]
fn executable_that_is_being_changed_is_not_launched() {
    let (mut guest, arena) = ready();
    let hold = function(&mut guest, 0, "hold_p1");
    let memory = guest.allocate(4096).unwrap();
    let plan = chain(&[fill(&guest, memory, 1)]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    // A library's kernel is slow to be found, so the module helper is busy while the change waits for it.
    let held = launch(&mut guest, 0, hold, &at(WORD).to_le_bytes());
    let busy = guest.session.answered(guest.header(wire::module_function::CALL));
    guest.put(busy, |w| {
        let name = sluice_protocol::field::Name(b"slow");
        wire::module_function::Args { module: Id::new(0, 1), function: Mint(Id::new(9, 1)), name }.put(w)
    });
    let two = fill(&guest, memory, 2);
    let change = put_plan(&arena, &Change::encode(&[10], true, &two).unwrap());
    let pending = guest.session.answered(guest.header(wire::graph_set_work::CALL));
    guest.put(pending, |w| wire::graph_set_work::Args { graph: GRAPH, change }.put(w));
    stream(&mut guest, 0, 1);
    let early = guest.on(wire::graph_launch::CALL, 1);
    let (code, _) = guest.ask(early, |w| wire::graph_launch::Args { graph: GRAPH }.put(w));
    assert_eq!(code, ILLEGAL_STATE);
    assert_eq!(guest.answer(pending.ticket).0, 0);
    arena.words().store_u32(WORD, 1, Ordering::Release);
    guest.wait(0, held);
    assert_eq!(launched(&mut guest, GRAPH), 0);
}

fn host(token: u32) -> WireWork<'static> {
    WireWork::Host(Host { token })
}

/// Runs the guest's side of calls, which must come with these tokens in this order.
fn serve(guest: &Guest, latest: &mut HostCall, tokens: &[u32]) {
    for token in tokens {
        *latest = next(guest, *latest);
        assert_eq!(latest.token, *token);
        give_back(guest, *latest);
    }
}

// Promise: C73
#[test]
fn host_nodes_call_the_guest_in_the_order_of_edges_at_each_launch() {
    let (mut guest, arena) = ready();
    let nothing = function(&mut guest, 0, "work_p2");
    let inside = chain(&[host(9), host(10)]);
    let inside = WireWork::Child(WirePlan::new(&inside).unwrap());
    let plan = chain(&[host(7), kernel(&guest, nothing, &[0; 16]), inside, host(8)]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    assert_eq!(session::host_call(&guest.words()), HostCall::default(), "only a launch calls");
    stream(&mut guest, 0, 1);
    let mut latest = HostCall::default();
    let mut last = Vec::new();
    for slot in [0, 0, 1] {
        let sequence = launch_graph(&mut guest, GRAPH, slot);
        assert!(guest.completed(slot) < sequence);
        last.push((slot, sequence));
    }
    // Launches in one stream come one after another; the null driver does not order those of two streams.
    let mut tokens = Vec::new();
    for _ in 0..12 {
        latest = next(&guest, latest);
        tokens.push(latest.token);
        give_back(&guest, latest);
    }
    for (slot, sequence) in last {
        guest.wait(slot, sequence);
    }
    for token in 7..=10 {
        assert_eq!(tokens.iter().filter(|called| **called == token).count(), 3, "{tokens:?}");
    }
    // Many launches, each with the same calls in the same order.
    let mut sequence = 0;
    for _ in 0..200 {
        sequence = launch_graph(&mut guest, GRAPH, 0);
        serve(&guest, &mut latest, &[7, 9, 10, 8]);
    }
    guest.wait(0, sequence);
    assert_eq!(session::host_call(&guest.words()), latest, "no call comes twice");
}

// Promise: C73
#[test]
fn changed_host_node_calls_its_new_function_in_later_launches_only() {
    let (mut guest, arena) = ready();
    let plan = chain(&[host(7), host(8)]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    let mut latest = HostCall::default();
    launch_graph(&mut guest, GRAPH, 0);
    latest = next(&guest, latest);
    assert_eq!(set_work(&mut guest, &arena, &[11], true, &host(80)), 0, "while the earlier launch runs");
    launch_graph(&mut guest, GRAPH, 0);
    give_back(&guest, latest);
    serve(&guest, &mut latest, &[8, 7, 80]);
    assert_eq!(update(&mut guest, &arena, &chain(&[host(1), host(2)])), MADE);
    launch_graph(&mut guest, GRAPH, 0);
    serve(&guest, &mut latest, &[1, 2]);
    // A node of another kind is none, and a function cannot be turned off.
    assert_eq!(set_work(&mut guest, &arena, &[10], true, &WireWork::Empty), INVALID_VALUE);
    assert_eq!(set_work(&mut guest, &arena, &[10], false, &host(3)), INVALID_VALUE);
    let last = launch_graph(&mut guest, GRAPH, 0);
    serve(&guest, &mut latest, &[1, 2]);
    guest.wait(0, last);
}

// Promise: C73
#[test]
fn executable_that_is_destroyed_while_its_function_runs_completes() {
    let (mut guest, arena) = ready();
    assert_eq!(make(&mut guest, &arena, GRAPH, &chain(&[host(7), host(8)])), MADE);
    let running = launch_graph(&mut guest, GRAPH, 0);
    let mut latest = next(&guest, HostCall::default());
    destroy(&mut guest, GRAPH);
    assert_eq!(make(&mut guest, &arena, Id::new(0, 2), &chain(&[host(9)])), MADE, "its place is free");
    assert!(guest.completed(0) < running);
    give_back(&guest, latest);
    serve(&guest, &mut latest, &[8]);
    guest.wait(0, running);
    assert_eq!(launched(&mut guest, GRAPH), INVALID_HANDLE);
}

// Promise: C74
#[test]
fn function_of_a_node_that_never_returns_holds_only_its_own_stream() {
    let (mut guest, arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    stream(&mut guest, 0, 1);
    // Tokens are the guest's own: none is refused, and one may stand in many nodes and be that of a call in a stream.
    assert_eq!(make(&mut guest, &arena, GRAPH, &chain(&[host(u32::MAX), host(u32::MAX)])), MADE);
    let held = launch_graph(&mut guest, GRAPH, 1);
    let now = next(&guest, HostCall::default());
    for word in [
        HostCall::default(),
        HostCall { number: now.number, token: 3 },
        HostCall { number: now.number + 1, token: now.token },
        HostCall { number: u32::MAX, token: u32::MAX },
    ] {
        give_back(&guest, word);
        let beside = launch(&mut guest, 0, kernel, &[]);
        guest.wait(0, beside);
        assert!(guest.completed(1) < held, "{word:?}");
        assert_eq!(session::host_call(&guest.words()), now);
    }
    // Twice, and one that is early: the second call counts as returned when it comes.
    give_back(&guest, now);
    let second = next(&guest, now);
    assert_eq!(second, now.next(u32::MAX));
    give_back(&guest, now);
    assert!(guest.completed(1) < held, "a return of the first call does not end the second");
    give_back(&guest, second);
    guest.wait(1, held);
    let last = launch_graph(&mut guest, GRAPH, 1);
    next(&guest, second);
    assert!(guest.completed(1) < last);
    guest.hang_up();
    assert_eq!(guest.ended().code(), Some(0));
}

// Promise: C73
#[test]
fn host_node_behind_a_fault_is_not_called() {
    let (mut guest, arena) = ready();
    let fault = function(&mut guest, 0, "fault");
    assert_eq!(make(&mut guest, &arena, GRAPH, &chain(&[host(7)])), MADE);
    launch(&mut guest, 0, fault, &[]);
    launch_graph(&mut guest, GRAPH, 0);
    eventually("the failure", || guest.sticky() != 0);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(session::host_call(&guest.words()), HostCall::default());
    assert!(guest.worker.try_wait().unwrap().is_none());
}

const CONDITIONAL: Id<ConditionalGraph> = Id::<ConditionalGraph>::new(0, 1);
const SECOND: Id<ConditionalGraph> = Id::<ConditionalGraph>::new(1, 1);

fn conditional_graph(guest: &mut Guest, graph: Id<ConditionalGraph>) -> u32 {
    let create = |w: &mut Writer<'_>| wire::conditional_graph_create::Args { graph: Mint(graph) }.put(w);
    guest.call(wire::conditional_graph_create::CALL, create).0
}

/// Creates a handle whose value is 1 at the begin of a launch.
fn condition(guest: &mut Guest, graph: Id<ConditionalGraph>, flags: u32) -> Result<u64, u32> {
    let (code, fields) = guest.call(wire::conditional_handle_create::CALL, |w| {
        wire::conditional_handle_create::Args { graph, value: 1, flags }.put(w)
    });
    let reply = wire::conditional_handle_create::Reply::get(&fields);
    if code == 0 { Ok(reply.unwrap().handle) } else { Err(code) }
}

fn end_conditional_graph(guest: &mut Guest, graph: Id<ConditionalGraph>) {
    let end = |w: &mut Writer<'_>| wire::conditional_graph_destroy::Args { graph: Take(graph) }.put(w);
    guest.post(wire::conditional_graph_destroy::CALL, end);
}

/// A plan of a fill, of a conditional node behind it, and of other work.
struct Choice {
    graph: Id<ConditionalGraph>,
    handle: u64,
    selection: Selection,
    bodies: Vec<Vec<u8>>,
}

impl Choice {
    /// The bodies, one behind the other.
    fn list(&self) -> Vec<u8> {
        let mut list = Vec::new();
        self.bodies.iter().for_each(|body| Conditional::push(&mut list, body));
        list
    }

    /// The node, with the bodies of [`Choice::list`].
    fn node<'a>(&self, guest: &Guest, list: &'a [u8]) -> WireWork<'a> {
        let count = u32::try_from(self.bodies.len()).unwrap();
        let &Choice { graph, handle, selection, .. } = self;
        let head = ConditionalHead { context: context(guest), graph, handle, selection, count };
        WireWork::Conditional(Conditional::new(head, list))
    }

    fn plan(&self, guest: &Guest, before: &[WireWork<'_>], behind: &[WireWork<'_>]) -> Vec<u8> {
        let list = self.list();
        chain(&[before, &[self.node(guest, &list)], behind].concat())
    }
}

// Promise: C108
#[test]
fn conditional_node_has_a_handle_of_the_driver_and_takes_new_bodies() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let down = copy(&guest, end(Side::Arena, at(DATA)), end(Side::Device, memory));
    let fills = |guest: &Guest, value| fill(guest, memory, value);
    assert_eq!(conditional_graph(&mut guest, CONDITIONAL), 0);
    let handle = condition(&mut guest, CONDITIONAL, 1).unwrap();
    let choice = |guest: &Guest, graph, handle, value| Choice {
        graph,
        handle,
        selection: Selection::If,
        bodies: vec![chain(&[fills(guest, value)])],
    };
    let plan = |guest: &Guest, graph, handle, value: u32| {
        choice(guest, graph, handle, value).plan(guest, &[fills(guest, 1)], &[down])
    };
    let first = plan(&guest, CONDITIONAL, handle, 2);
    assert_eq!(make(&mut guest, &arena, GRAPH, &first), MADE);
    let value = |guest: &mut Guest| {
        assert_eq!(launched(guest, GRAPH), 0);
        word(&arena, DATA) & 0xffff
    };
    assert_eq!(value(&mut guest), 2);
    let four = fills(&guest, 4);
    assert_eq!(set_work(&mut guest, &arena, &[11, 0, 10], true, &four), 0, "a node of the body");
    assert_eq!(value(&mut guest), 4);
    assert_eq!(set_work(&mut guest, &arena, &[11, 1, 10], true, &four), INVALID_VALUE, "no such body");
    let fifth = plan(&guest, CONDITIONAL, handle, 5);
    assert_eq!(update(&mut guest, &arena, &fifth), MADE, "by the same graph");
    assert_eq!(value(&mut guest), 5);
    assert_eq!(set_work(&mut guest, &arena, &[11, 0, 10], true, &four), 0);
    assert_eq!(update(&mut guest, &arena, &fifth), MADE, "a change since is undone");
    assert_eq!(value(&mut guest), 5);
    // Another graph, with a handle of its own.
    assert_eq!(conditional_graph(&mut guest, SECOND), 0);
    let other = condition(&mut guest, SECOND, 1).unwrap();
    let (sixth, seventh) = (plan(&guest, SECOND, other, 6), plan(&guest, SECOND, other, 7));
    assert_eq!(update(&mut guest, &arena, &sixth), MADE);
    assert_eq!(value(&mut guest), 6);
    assert_eq!(update(&mut guest, &arena, &seventh), MADE, "the graph of the present handles");
    assert_eq!(value(&mut guest), 7);
    // The graph outlives its executable, and has more nodes then: the conditional one stays.
    destroy(&mut guest, GRAPH);
    let longer = choice(&guest, CONDITIONAL, handle, 8).plan(&guest, &[fills(&guest, 1); 2], &[down]);
    assert_eq!(
        make(&mut guest, &arena, GRAPH, &longer).1,
        INVALID_VALUE,
        "a driver makes one node for a handle"
    );
    let again = plan(&guest, CONDITIONAL, handle, 9);
    assert_eq!(make(&mut guest, &arena, GRAPH, &again).1, INVALID_VALUE, "and the node was destroyed");
    let eighth = plan(&guest, SECOND, other, 8);
    assert_eq!(make(&mut guest, &arena, GRAPH, &eighth), MADE);
    assert_eq!(value(&mut guest), 8);
    // The executable outlives its graph.
    end_conditional_graph(&mut guest, SECOND);
    assert_eq!(value(&mut guest), 8);
    assert_eq!(condition(&mut guest, SECOND, 1), Err(INVALID_HANDLE));
}

// Promise: C108
#[test]
fn conditional_node_with_foreign_handles_or_work_is_refused() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let value = fill(&guest, memory, 1);
    let recorded = event(&mut guest, 0);
    assert_eq!(condition(&mut guest, CONDITIONAL, 0), Err(INVALID_HANDLE), "no such graph");
    assert_eq!(conditional_graph(&mut guest, CONDITIONAL), 0);
    assert_eq!(conditional_graph(&mut guest, CONDITIONAL), INVALID_VALUE, "the id is taken");
    assert_eq!(conditional_graph(&mut guest, SECOND), 0);
    assert_eq!(condition(&mut guest, CONDITIONAL, 2), Err(INVALID_VALUE), "an unknown flag");
    let handle = condition(&mut guest, CONDITIONAL, 1).unwrap();
    let foreign = condition(&mut guest, SECOND, 1).unwrap();
    let body = chain(&[value]);
    let choice = |graph, handle, selection, bodies: usize| Choice {
        graph,
        handle,
        selection,
        bodies: vec![body.clone(); bodies],
    };
    let (own, nowhere) = (CONDITIONAL, Id::<ConditionalGraph>::new(7, 1));
    for (choice, code, what) in [
        (choice(nowhere, handle, Selection::If, 1), INVALID_HANDLE, "no such graph"),
        (choice(own, handle, Selection::If, 0), INVALID_VALUE, "no body"),
        (choice(own, handle, Selection::If, 3), INVALID_VALUE, "three bodies of an IF"),
        (choice(own, handle, Selection::While, 2), INVALID_VALUE, "two of a WHILE"),
        (choice(own, handle, Selection::Switch, 0), INVALID_VALUE, "none of a SWITCH"),
        (
            Choice {
                bodies: vec![chain(&[]); limits::CONDITIONAL_BODIES as usize + 1],
                ..choice(own, handle, Selection::Switch, 0)
            },
            INVALID_VALUE,
            "more than the limit",
        ),
    ] {
        let plan = choice.plan(&guest, &[], &[]);
        assert_eq!(make(&mut guest, &arena, GRAPH, &plan), (0, code, 10), "{what}");
    }
    for (choice, what) in [
        (choice(own, foreign, Selection::If, 1), "another graph's"),
        (choice(own, 0, Selection::If, 1), "no handle"),
    ] {
        let plan = choice.plan(&guest, &[], &[]);
        assert_eq!(make(&mut guest, &arena, GRAPH, &plan), (0, INVALID_VALUE, NO_NODE), "{what}");
    }
    let lawful = choice(own, handle, Selection::If, 1);
    let mut list = Vec::new();
    Writes::push(&mut list, Write { to: DeviceAddress(memory), value: 0, wide: true }).unwrap();
    let elsewhere = WireWork::Conditional(Conditional::new(
        ConditionalHead {
            context: context(&guest),
            graph: SECOND,
            handle: foreign,
            selection: Selection::While,
            count: 1,
        },
        &[],
    ));
    let two = lawful.plan(&guest, &[elsewhere], &[]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &two).1, INVALID_VALUE, "a body is missing");
    for (work, what) in [
        (WireWork::Host(Host { token: 1 }), "a function"),
        (WireWork::EventRecord(recorded), "a recording"),
        (WireWork::EventWait(recorded), "a wait"),
        (WireWork::Writes(Writes { context: context(&guest), list: Bytes(&list) }), "written values"),
    ] {
        let (body, inner) = (chain(&[work]), chain(&[work]));
        let inside = chain(&[WireWork::Child(WirePlan::new(&inner).unwrap())]);
        for body in [body, inside] {
            let plan = Choice { bodies: vec![body], ..choice(own, handle, Selection::If, 0) };
            let plan = plan.plan(&guest, &[], &[]);
            assert_eq!(make(&mut guest, &arena, GRAPH, &plan), (0, NOT_SUPPORTED, 10), "{what}");
        }
    }
    let inner = lawful.plan(&guest, &[], &[]);
    let outer = chain(&[WireWork::Child(WirePlan::new(&inner).unwrap())]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &outer), (0, NOT_SUPPORTED, 10), "in a child graph");
    let plan = lawful.plan(&guest, &[value], &[]);
    let list = lawful.list();
    let node = lawful.node(&guest, &list);
    let twice = chain(&[node, node]);
    assert_eq!(
        make(&mut guest, &arena, GRAPH, &twice),
        (0, INVALID_VALUE, NO_NODE),
        "one handle for two nodes"
    );
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    let other = Id::<GraphExecutable>::new(1, 1);
    assert_eq!(make(&mut guest, &arena, other, &plan).1, NOT_SUPPORTED, "a second executable");
    let WireNode { work, .. } = WirePlan::new(&plan).unwrap().nodes().nth(1).unwrap().unwrap();
    assert_eq!(set_work(&mut guest, &arena, &[11], true, &work), NOT_SUPPORTED, "the node itself");
    assert_eq!(launched(&mut guest, GRAPH), 0);
    // Everything else ends with the context.
    let here = context(&guest);
    let destroy = |w: &mut Writer<'_>| wire::context_destroy::Args { context: here }.put(w);
    assert_eq!(guest.call(wire::context_destroy::CALL, destroy).0, 0);
}

/// A choice with one body of one node.
fn one_of(graph: Id<ConditionalGraph>, handle: u64, work: WireWork<'_>) -> Choice {
    Choice { graph, handle, selection: Selection::If, bodies: vec![chain(&[work])] }
}

fn destroy_context(guest: &mut Guest, context: Id<Context>) -> u32 {
    guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context }.put(w)).0
}

// Promise: C108
#[test]
fn executable_takes_the_handles_of_graphs_in_turn() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let down = copy(&guest, end(Side::Arena, at(DATA)), end(Side::Device, memory));
    let fills = |guest: &Guest, value| fill(guest, memory, value);
    let plan = |guest: &Guest, graph, handle, value: u32| {
        one_of(graph, handle, fills(guest, value)).plan(guest, &[fills(guest, value + 1)], &[down])
    };
    let value = |guest: &mut Guest| {
        assert_eq!(launched(guest, GRAPH), 0);
        word(&arena, DATA) & 0xffff
    };
    for graph in [CONDITIONAL, SECOND] {
        assert_eq!(conditional_graph(&mut guest, graph), 0);
    }
    let one = condition(&mut guest, CONDITIONAL, 1).unwrap();
    let spare = condition(&mut guest, CONDITIONAL, 1).unwrap();
    let two = condition(&mut guest, SECOND, 1).unwrap();
    let first = plan(&guest, CONDITIONAL, one, 20);
    assert_eq!(make(&mut guest, &arena, GRAPH, &first), MADE);
    assert_eq!(value(&mut guest), 20);
    for (graph, handle, number) in [
        (SECOND, two, 30),
        (CONDITIONAL, one, 40),
        (CONDITIONAL, one, 50),
        (SECOND, two, 60),
        (SECOND, two, 70),
    ] {
        let next = plan(&guest, graph, handle, number);
        assert_eq!(update(&mut guest, &arena, &next), MADE, "{number}");
        assert_eq!(value(&mut guest), u64::from(number));
        let inside = fills(&guest, number + 5);
        assert_eq!(set_work(&mut guest, &arena, &[11, 0, 10], true, &inside), 0, "{number}");
        assert_eq!(value(&mut guest), u64::from(number + 5));
    }
    let other = plan(&guest, CONDITIONAL, spare, 80);
    assert_eq!(update(&mut guest, &arena, &other).1, NOT_SUPPORTED, "another handle of its own graph");
    assert_eq!(value(&mut guest), 75, "a refusal changes nothing");
    let foreign = plan(&guest, CONDITIONAL, two, 80);
    assert_eq!(update(&mut guest, &arena, &foreign).1, INVALID_VALUE, "a handle of another graph");
    assert_eq!(value(&mut guest), 75);
    // The driver gives the next graph the address of the one that ended.
    end_conditional_graph(&mut guest, SECOND);
    let third = Id::<ConditionalGraph>::new(1, 2);
    assert_eq!(conditional_graph(&mut guest, third), 0);
    let three = condition(&mut guest, third, 1).unwrap();
    let next = plan(&guest, third, three, 90);
    assert_eq!(update(&mut guest, &arena, &next), MADE, "a later graph at the same address");
    assert_eq!(value(&mut guest), 90);
}

// Promise: C108
#[test]
fn executable_does_not_take_back_work_whose_module_is_gone() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let nothing = function(&mut guest, 0, "work_p2");
    for graph in [CONDITIONAL, SECOND] {
        assert_eq!(conditional_graph(&mut guest, graph), 0);
    }
    let one = condition(&mut guest, CONDITIONAL, 1).unwrap();
    let two = condition(&mut guest, SECOND, 1).unwrap();
    let behind = [kernel(&guest, nothing, &[0; 16])];
    let plan = |guest: &Guest, graph, handle| {
        one_of(graph, handle, fill(guest, memory, 1)).plan(guest, &[], &behind)
    };
    let (first, second) = (plan(&guest, CONDITIONAL, one), plan(&guest, SECOND, two));
    assert_eq!(make(&mut guest, &arena, GRAPH, &first), MADE);
    assert_eq!(update(&mut guest, &arena, &second), MADE);
    let unload = wire::module_unload::Args { module: Take(Id::new(0, 1)) };
    assert_eq!(guest.call(wire::module_unload::CALL, |w| unload.put(w)).0, 0);
    let latest = function(&mut guest, 2, "work_p2");
    let behind = [kernel(&guest, latest, &[0; 16])];
    let again = one_of(CONDITIONAL, one, fill(&guest, memory, 1)).plan(&guest, &[], &behind);
    assert_eq!(update(&mut guest, &arena, &again).1, NOT_SUPPORTED);
    let again = one_of(SECOND, two, fill(&guest, memory, 1)).plan(&guest, &[], &behind);
    assert_eq!(update(&mut guest, &arena, &again), MADE, "all of its work is new");
    assert_eq!(launched(&mut guest, GRAPH), 0);
}

// Promise: C108
#[test]
fn graph_with_handles_keeps_no_nodes_without_its_executable() {
    const EACH: usize = 100;
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::ready(Start {
        lenders: vec![arbiter.admit()],
        environment: &[("SLUICE_NULL_GRAPH_NODES", "2000".as_ref())],
        ..Start::on(null_driver())
    });
    guest.begin();
    let arena = image(&guest);
    let memory = guest.allocate(4096).unwrap();
    let value = fill(&guest, memory, 1);
    let refused = function(&mut guest, 0, "refuse_209");
    let recorded = event(&mut guest, 0);
    let before = vec![WireWork::EventRecord(recorded); EACH];
    for index in 0..20 {
        let graph = Id::<ConditionalGraph>::new(index, 1);
        assert_eq!(conditional_graph(&mut guest, graph), 0);
        let handle = condition(&mut guest, graph, 1).unwrap();
        let body = chain(&vec![value; EACH]);
        let choice = Choice { graph, handle, selection: Selection::If, bodies: vec![body] };
        // A plan that the driver refuses leaves none, either.
        let bad = choice.plan(&guest, &before, &[kernel(&guest, refused, &[])]);
        assert_eq!(make(&mut guest, &arena, GRAPH, &bad).1, 209, "{index}");
        let plan = choice.plan(&guest, &before, &[WireWork::Empty]);
        let executable = Id::new(0, 1 + index);
        assert_eq!(make(&mut guest, &arena, executable, &plan), MADE, "{index}");
        assert_eq!(launched(&mut guest, executable), 0);
        destroy(&mut guest, executable);
    }
}

// Promise: C108
#[test]
fn bodies_of_the_conditional_nodes_of_a_session_have_a_bound() {
    const BODIES: usize = limits::CONDITIONAL_BODIES as usize;
    let (mut guest, arena) = ready();
    let switch = |guest: &mut Guest, graph: Id<ConditionalGraph>, bodies: usize| {
        assert_eq!(conditional_graph(guest, graph), 0);
        let handle = condition(guest, graph, 1).unwrap();
        let bodies = vec![chain(&[]); bodies];
        Choice { graph, handle, selection: Selection::Switch, bodies }.plan(guest, &[], &[])
    };
    for round in 0..u32::try_from(limits::SESSION_CONDITIONAL_BODIES / BODIES).unwrap() {
        let plan = switch(&mut guest, Id::new(round, 1), BODIES);
        let executable = Id::new(round, 1);
        assert_eq!(make(&mut guest, &arena, executable, &plan), MADE, "{round}");
        destroy(&mut guest, executable);
    }
    let plan = switch(&mut guest, Id::new(100, 1), 1);
    let executable = Id::new(100, 1);
    assert_eq!(make(&mut guest, &arena, executable, &plan).1, OUT_OF_MEMORY);
    end_conditional_graph(&mut guest, CONDITIONAL);
    // They end with their graph, which ends with its executable.
    eventually("the end of a graph", || make(&mut guest, &arena, executable, &plan) == MADE);
}

// Promise: C108
#[test]
fn handles_count_as_long_as_an_executable_keeps_their_graph() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    assert_eq!(conditional_graph(&mut guest, CONDITIONAL), 0);
    let handle = condition(&mut guest, CONDITIONAL, 1).unwrap();
    for _ in 1..limits::CONDITIONAL_HANDLES {
        condition(&mut guest, CONDITIONAL, 0).unwrap();
    }
    assert_eq!(condition(&mut guest, CONDITIONAL, 0), Err(OUT_OF_MEMORY));
    let plan = one_of(CONDITIONAL, handle, fill(&guest, memory, 1)).plan(&guest, &[], &[]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    end_conditional_graph(&mut guest, CONDITIONAL);
    assert_eq!(conditional_graph(&mut guest, SECOND), 0);
    assert_eq!(condition(&mut guest, SECOND, 0), Err(OUT_OF_MEMORY), "the driver has the handles");
    destroy(&mut guest, GRAPH);
    // The destruction follows the work of the session.
    eventually("the end of the graph", || condition(&mut guest, SECOND, 0).is_ok());
}

// Promise: C108
#[test]
fn graph_that_ended_with_a_context_is_destroyed_without_an_error() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let first = guest.session.context;
    let other = guest.create_context(1, 5);
    guest.session.context = other.raw();
    assert_eq!(conditional_graph(&mut guest, CONDITIONAL), 0);
    let handle = condition(&mut guest, CONDITIONAL, 1).unwrap();
    guest.session.context = first;
    let WireWork::Fill(value) = fill(&guest, memory, 1) else { unreachable!() };
    // The node states another context than that of its handle.
    let plan = one_of(CONDITIONAL, handle, WireWork::Fill(value)).plan(&guest, &[], &[]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan).1, INVALID_VALUE, "the handle is of another context");
    assert_eq!(destroy_context(&mut guest, other), 0);
    assert_eq!(condition(&mut guest, CONDITIONAL, 1), Err(INVALID_HANDLE), "it ended with the context");
    // The driver gives the next graph the address of the one that ended.
    assert_eq!(conditional_graph(&mut guest, SECOND), 0);
    let handle = condition(&mut guest, SECOND, 1).unwrap();
    assert_eq!(condition(&mut guest, CONDITIONAL, 1), Err(INVALID_HANDLE), "its id names no other graph");
    end_conditional_graph(&mut guest, CONDITIONAL);
    let plan = one_of(SECOND, handle, fill(&guest, memory, 1)).plan(&guest, &[], &[]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE, "the later graph exists");
    assert_eq!(launched(&mut guest, GRAPH), 0);
    assert_eq!(guest.late_error(0).0, 0);
}

// Promise: C108
#[test]
fn changed_node_of_a_body_has_only_work_that_a_body_may_have() {
    let (mut guest, arena) = ready();
    let memory = guest.allocate(4096).unwrap();
    let nothing = function(&mut guest, 0, "work_p2");
    let other = guest.create_context(1, 5);
    let array = Id::<Array>::new(0, 1);
    create_array(&mut guest, array);
    assert_eq!(conditional_graph(&mut guest, CONDITIONAL), 0);
    let handle = condition(&mut guest, CONDITIONAL, 1).unwrap();
    let WireWork::Kernel(here) = kernel(&guest, nothing, &[0; 16]) else { unreachable!() };
    let elsewhere = WireWork::Kernel(Kernel { context: other, ..here });
    let down = copy(&guest, end(Side::Arena, at(DATA)), end(Side::Device, memory));
    let to_array = copy(&guest, array_end(array, [0; 3]), end(Side::Device, memory));
    let (inner, foreign) = (chain(&[WireWork::Kernel(here)]), chain(&[elsewhere]));
    let body = chain(&[WireWork::Kernel(here), down, WireWork::Child(WirePlan::new(&inner).unwrap())]);
    let choice = Choice { graph: CONDITIONAL, handle, selection: Selection::If, bodies: vec![body] };
    let plan = choice.plan(&guest, &[down], &[]);
    assert_eq!(make(&mut guest, &arena, GRAPH, &plan), MADE);
    let child = WireWork::Child(WirePlan::new(&foreign).unwrap());
    for (path, work, what) in [
        (vec![11, 0, 10], &elsewhere, "a kernel of another context"),
        (vec![11, 0, 11], &to_array, "a copy to an array"),
        (vec![11, 0, 12, 10], &elsewhere, "a kernel of another context in a child graph"),
        (vec![11, 0, 12], &child, "a child graph with one"),
    ] {
        assert_eq!(set_work(&mut guest, &arena, &path, true, work), NOT_SUPPORTED, "{what}");
    }
    for (path, work) in
        [(vec![11, 0, 10], &WireWork::Kernel(here)), (vec![11, 0, 11], &down), (vec![10], &to_array)]
    {
        assert_eq!(set_work(&mut guest, &arena, &path, true, work), 0, "{path:?}");
    }
    assert_eq!(launched(&mut guest, GRAPH), 0);
}

// Promise: C108
#[test]
fn memory_that_an_update_by_the_same_graph_takes_is_granted() {
    let arbiter = FakeArbiter::new(0);
    let mut guest = Guest::of(&arbiter);
    guest.begin();
    let _image = image(&guest);
    let there = ARENA + (1 << 30);
    let arena = guest.attach(2, there, 8 << 20);
    let memory = guest.allocate(4096).unwrap();
    let (few, many) = (function(&mut guest, 0, "work_p1"), function(&mut guest, 1, "work_p56"));
    assert_eq!(conditional_graph(&mut guest, CONDITIONAL), 0);
    let handle = condition(&mut guest, CONDITIONAL, 1).unwrap();
    let works = |guest: &Guest, function, parameters| {
        let kernels = vec![kernel(guest, function, parameters); 5000];
        one_of(CONDITIONAL, handle, fill(guest, memory, 1)).plan(guest, &[], &kernels)
    };
    let put = |plan: Vec<u8>| {
        arena.write(0, &plan);
        ArenaIn { address: there, bytes: plan.len() as u64 }
    };
    let plan = put(works(&guest, few, &[0; 8]));
    let answer = guest.call(wire::graph_instantiate::CALL, |w| {
        wire::graph_instantiate::Args { flags: 0, plan, graph: Mint(GRAPH) }.put(w)
    });
    assert_eq!(refusal(&answer), MADE);
    let made = arbiter.granted_now();
    let plan = put(works(&guest, many, &[0; 448]));
    let answer =
        guest.call(wire::graph_update::CALL, |w| wire::graph_update::Args { graph: GRAPH, plan }.put(w));
    assert_eq!(refusal(&answer), MADE);
    eventually("the end of the grants", || arbiter.grants().1 == 0);
    assert_eq!(arbiter.granted_now() - made, 2 << 20, "for the longer parameters");
}

// Promise: C70
#[test]
fn plan_with_the_most_nodes_is_built_in_a_time_that_grows_with_it() {
    // With an edge of data to each node, a search for each among all would take minutes.
    const NODES: u32 = limits::GRAPH_NODES - 2;
    let (mut guest, _image) = ready();
    let memory = guest.allocate(4096).unwrap();
    let there = ARENA + (1 << 30);
    let arena = guest.attach(2, there, 64 << 20);
    assert_eq!(conditional_graph(&mut guest, CONDITIONAL), 0);
    let handle = condition(&mut guest, CONDITIONAL, 1).unwrap();
    let bodies = vec![chain(&[fill(&guest, memory, 1)])];
    let choice = Choice { graph: CONDITIONAL, handle, selection: Selection::If, bodies };
    let list = choice.list();
    let node = choice.node(&guest, &list);
    let mut plan = PlanWriter::default();
    for number in 0..NODES - 1 {
        let behind = number.checked_sub(1).map(|node| Dependency { node, edge: [1, 0, 1] });
        let work = if number == 0 { &node } else { &WireWork::Empty };
        plan.node(number, true, behind.into_iter(), work).unwrap();
    }
    let plan = plan.finish().unwrap();
    arena.write(0, &plan);
    let plan = ArenaIn { address: there, bytes: plan.len() as u64 };
    let started = std::time::Instant::now();
    let answer = guest.call(wire::graph_instantiate::CALL, |w| {
        wire::graph_instantiate::Args { flags: 0, plan, graph: Mint(GRAPH) }.put(w)
    });
    assert_eq!(refusal(&answer), MADE);
    println!("made in {:?}", started.elapsed());
}
