//! Plans of graphs: they arrive as they were written, and other bytes are refused.

use proptest::prelude::*;
use sluice_protocol::{
    field::{Bytes, DeviceAddress, ElementSize, FieldError, LaunchAttributes},
    graph::{
        Change, Conditional, ConditionalHead, Copy, CopyEnd, Dependency, Fill, Host, Kernel, NodeKind,
        PlanWriter, Selection, Side, WireNode, WirePlan, WireWork, Write, Writes,
    },
    handle::{ConditionalGraph, Context, Event, Function, Id},
    limits,
};

const CONTEXT: Id<Context> = Id::<Context>::new(0, 1);

fn full(node: u32) -> Dependency {
    Dependency { node, edge: [0; 3] }
}

fn kernel(parameters: &[u8]) -> WireWork<'_> {
    WireWork::Kernel(Kernel {
        function: Id::<Function>::new(3, 1),
        context: CONTEXT,
        grid: [1, 2, 3],
        block: [4, 5, 6],
        shared: 7,
        attributes: LaunchAttributes(&[9; 72]),
        parameters: Bytes(parameters),
    })
}

fn end(side: Side, address: u64) -> CopyEnd {
    CopyEnd { side, address, pitch: 64, rows: 2, at: [0; 3] }
}

/// One work of each kind that has no graph inside.
fn kinds(list: &[u8]) -> Vec<WireWork<'_>> {
    let event = Id::<Event>::new(5, 2);
    vec![
        kernel(&[1, 2, 3]),
        WireWork::Copy(Copy {
            context: CONTEXT,
            to: end(Side::Device, 0x1000),
            from: end(Side::Arena, 0x2000),
            width: 16,
            height: 2,
            depth: 3,
        }),
        WireWork::Fill(Fill {
            context: CONTEXT,
            to: DeviceAddress(0x3000),
            pitch: 32,
            element: ElementSize::Half,
            value: 9,
            width: 8,
            height: 4,
        }),
        WireWork::Host(Host { token: 7 }),
        WireWork::Empty,
        WireWork::EventWait(event),
        WireWork::EventRecord(event),
        WireWork::Writes(Writes { context: CONTEXT, list: Bytes(list) }),
    ]
}

fn plan(works: &[WireWork<'_>]) -> Vec<u8> {
    let mut writer = PlanWriter::default();
    for (number, work) in (0..).zip(works) {
        let dependencies = if number > 0 { vec![full(number - 1)] } else { Vec::new() };
        writer.node(number + 10, number % 2 == 0, dependencies.into_iter(), work).unwrap();
    }
    writer.finish().unwrap()
}

fn read(bytes: &[u8]) -> Result<Vec<WireNode<'_>>, FieldError> {
    WirePlan::new(bytes)?.nodes().collect()
}

/// Reads a plan with everything inside it.
fn read_all(bytes: &[u8]) -> Result<(), FieldError> {
    fn all(plan: WirePlan<'_>) -> Result<(), FieldError> {
        for node in plan.nodes() {
            match node?.work {
                WireWork::Child(plan) => all(plan)?,
                WireWork::Conditional(work) => {
                    work.bodies().try_for_each(|body| body.and_then(all))?;
                }
                WireWork::Writes(writes) => writes.each().try_for_each(|write| write.map(drop))?,
                _ => {}
            }
        }
        Ok(())
    }
    all(WirePlan::new(bytes)?)
}

// Promise: C70
#[test]
fn plan_with_every_kind_of_work_arrives_as_it_was_written() {
    let mut list = Vec::new();
    let write = Write { to: DeviceAddress(0x4000), value: 5, wide: true };
    Writes::push(&mut list, write).unwrap();
    let works = kinds(&list);
    let inner = plan(&works);
    let outer = [&works[..], &[WireWork::Child(WirePlan::new(&inner).unwrap())]].concat();
    let bytes = plan(&outer);
    let nodes = read(&bytes).unwrap();
    assert_eq!(nodes.len(), outer.len());
    for (at, (node, work)) in (0_u32..).zip(nodes.iter().zip(&outer)) {
        assert_eq!((node.number, node.enabled, node.work.kind()), (at + 10, at % 2 == 0, work.kind()));
        assert!(node.dependencies().eq(at.checked_sub(1).map(full)));
    }
    let (WireWork::Child(inner), works_inside) = (nodes.last().unwrap().work, &nodes[..works.len()]) else {
        panic!("the last node is a graph");
    };
    assert!(inner.nodes().map(|node| node.unwrap().work).eq(works.iter().copied()));
    assert!(works_inside.iter().map(|node| node.work).eq(works.iter().copied()));
    let Some(WireWork::Writes(writes)) = works.last() else { panic!("the last work writes") };
    assert!(writes.each().eq([Ok(write)]));
    for work in &outer {
        let bytes = Change::encode(&[4, 5], false, work).unwrap();
        let change = Change::new(&bytes).unwrap();
        assert_eq!((change.enabled, change.work.kind()), (false, work.kind()));
        assert!(change.path().eq([4, 5]));
    }
}

// Promise: C70
#[test]
fn plan_that_breaks_a_rule_is_refused() {
    let whole = plan(&[WireWork::Empty, WireWork::Empty]);
    assert!(read(&whole).is_ok());
    let word = |at: usize, value: u64| {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        read(&bytes).map(|nodes| nodes.len())
    };
    // Nodes; number, kind, enabled, dependencies, length; the same and the dependency before the length.
    assert_eq!(word(0, 3), Err(FieldError::Short), "fewer nodes than stated");
    assert_eq!(word(0, 1), Err(FieldError::Trailing), "more nodes than stated");
    assert_eq!(word(0, u64::from(limits::GRAPH_NODES) + 1), Err(FieldError::Range));
    assert_eq!(word(8, 1 << 32), Err(FieldError::Range), "a number of more than 32 bits");
    for kind in [0, 11, u64::MAX] {
        assert_eq!(word(16, kind), Err(FieldError::Range), "kind {kind}");
    }
    assert_eq!(word(16, NodeKind::Kernel as u64), Err(FieldError::Short), "work of another kind");
    assert_eq!(word(24, 2), Err(FieldError::Range), "enabled twice");
    assert_eq!(word(32, 1), Err(FieldError::Range), "a first node with a dependency");
    assert_eq!(word(40, 4), Err(FieldError::Range), "a length that is no number of words");
    assert_eq!(word(40, 8), Err(FieldError::Trailing), "work that is too long");
    assert_eq!(word(72, 2), Err(FieldError::Range), "more dependencies than earlier nodes");
    for node in [1, 2, u64::from(u32::MAX)] {
        assert_eq!(word(80, node), Err(FieldError::Range), "a dependency on node {node}");
    }
    assert_eq!(word(80, 1 << 56), Err(FieldError::Range), "an unused byte of a dependency");
    assert_eq!(word(80, 5 << 48), Ok(2), "edge data are the driver's to judge");
    for length in 0..whole.len() {
        assert!(read(&whole[..length]).is_err(), "{length} bytes");
    }
}

fn conditional(count: u32, bodies: &[u8]) -> WireWork<'_> {
    let graph = Id::<ConditionalGraph>::new(2, 1);
    let head =
        ConditionalHead { context: CONTEXT, graph, handle: 1 << 40, selection: Selection::Switch, count };
    WireWork::Conditional(Conditional::new(head, bodies))
}

// Promise: C108
#[test]
fn bodies_of_a_conditional_node_arrive_as_they_were_written() {
    let (first, second) =
        (plan(&[WireWork::Empty]), plan(&[WireWork::Host(Host { token: 7 }), WireWork::Empty]));
    let mut list = Vec::new();
    Conditional::push(&mut list, &first);
    Conditional::push(&mut list, &second);
    let bytes = plan(&[conditional(2, &list)]);
    let nodes = read(&bytes).unwrap();
    let WireWork::Conditional(read) = nodes[0].work else { panic!("{nodes:?}") };
    let WireWork::Conditional(written) = conditional(2, &list) else { unreachable!() };
    assert_eq!(read.head, written.head);
    let works = |plan: WirePlan<'_>| plan.nodes().map(|node| node.unwrap().work.kind()).collect::<Vec<_>>();
    let bodies: Vec<_> = read.bodies().map(|body| works(body.unwrap())).collect();
    assert_eq!(bodies, [vec![NodeKind::Empty], vec![NodeKind::Host, NodeKind::Empty]]);
    assert_eq!(read_all(&plan(&[conditional(3, &list)])), Err(FieldError::Short), "a body that is missing");
    assert_eq!(read_all(&plan(&[conditional(1, &list)])), Err(FieldError::Trailing), "a body too many");
    assert_eq!(read_all(&plan(&[conditional(u32::MAX, &[])])), Err(FieldError::Short));
}

// Promise: C108
#[test]
fn bodies_inside_bodies_have_a_limit() {
    let mut bytes = plan(&[WireWork::Empty]);
    for depth in 0..=limits::GRAPH_DEPTH / 2 {
        assert_eq!(read_all(&bytes), Ok(()), "depth {depth}");
        let mut list = Vec::new();
        Conditional::push(&mut list, &bytes);
        bytes = plan(&[conditional(1, &list)]);
    }
    assert_eq!(read_all(&bytes), Err(FieldError::Range));
}

// Promise: C70
#[test]
fn graphs_inside_graphs_have_a_limit() {
    let mut bytes = plan(&[WireWork::Empty]);
    for depth in 0..=limits::GRAPH_DEPTH {
        assert_eq!(read_all(&bytes), Ok(()), "depth {depth}");
        bytes = plan(&[WireWork::Child(WirePlan::new(&bytes).unwrap())]);
    }
    assert_eq!(read_all(&bytes), Err(FieldError::Range));
    let path = vec![0; limits::GRAPH_DEPTH as usize + 2];
    let change = Change::encode(&path, true, &WireWork::Empty).unwrap();
    assert_eq!(Change::new(&change), Err(FieldError::Range), "a path deeper than a plan");
    let change = Change::encode(&[], true, &WireWork::Empty).unwrap();
    assert_eq!(Change::new(&change), Err(FieldError::Range), "a path to no node");
}

#[test]
fn list_of_writes_has_a_limit() {
    let mut list = Vec::new();
    let write = Write { to: DeviceAddress(0), value: 0, wide: false };
    for _ in 0..limits::GRAPH_WRITES {
        Writes::push(&mut list, write).unwrap();
    }
    assert_eq!(Writes::push(&mut list, write), Err(FieldError::Long));
    let bytes = plan(&[WireWork::Writes(Writes { context: CONTEXT, list: Bytes(&list[1..]) })]);
    assert_eq!(read_all(&bytes), Err(FieldError::Short), "the last value is cut");
}

proptest! {
    // Promise: C70
    #[test]
    fn random_bytes_are_refused_or_read(words in prop::collection::vec(prop_oneof![0_u64..12, any::<u64>()], 0..64)) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let _ = read_all(&bytes);
        let _ = Change::new(&bytes);
    }

    // Promise: C70
    #[test]
    fn plan_with_a_changed_byte_is_refused_or_read(at in 0_usize..2000, value: u8) {
        let list = [0; 24];
        let works = kinds(&list);
        let mut bytes = plan(&works);
        let at = at % bytes.len();
        bytes[at] = value;
        let _ = read_all(&bytes);
    }
}
