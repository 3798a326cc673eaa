use super::*;
use crate::plan::{CopySide, Dependency, EdgeData, HostWork, KernelAttribute};

fn kernel(function: u64) -> KernelWork {
    KernelWork {
        function,
        context: 1,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        parameters: Box::default(),
        attributes: Vec::new(),
    }
}

fn copy(from: u32, to: u32) -> Work {
    let side = |kind| CopySide {
        x: 0,
        y: 0,
        z: 0,
        level: 0,
        kind,
        host: 0,
        device: 0,
        array: 0,
        pitch: 0,
        height: 0,
    };
    let copy = Copy3D { from: side(from), to: side(to), width: 8, height: 1, depth: 1 };
    Work::Copy { copy, context: 1 }
}

fn fill(width: u64, height: u64) -> FillWork {
    FillWork { to: 0, pitch: 64, value: 0, element: 1, width, height }
}

fn host(data: u64) -> Work {
    Work::Host(HostWork { function: 8, data })
}

/// A plan of nodes with their numbers, work, and the indexes of earlier nodes.
fn plan(nodes: &[(u32, Work, &[u32])]) -> Plan {
    let node = |(number, work, before): &(u32, Work, &[u32])| PlanNode {
        number: *number,
        enabled: true,
        dependencies: before
            .iter()
            .map(|node| Dependency { node: *node, edge: EdgeData::default() })
            .collect(),
        work: work.clone(),
    };
    Plan { nodes: nodes.iter().map(node).collect() }
}

fn topology(node: &[u32], from: &[u32]) -> Result<Plan, Change> {
    let outcome = Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    Err(Change { outcome, node: node.to_vec(), from: from.to_vec() })
}

#[test]
fn new_work_takes_the_numbers_and_the_state_of_the_old_nodes() {
    let mut old = plan(&[(4, host(1), &[]), (6, host(2), &[0]), (9, host(3), &[0, 1])]);
    old.nodes[1].enabled = false;
    let new = plan(&[(0, host(11), &[]), (1, host(12), &[0]), (2, host(13), &[0, 1])]);
    let adopted = adopt(&old, &new, false).unwrap();
    let mut expected = plan(&[(4, host(11), &[]), (6, host(12), &[0]), (9, host(13), &[0, 1])]);
    expected.nodes[1].enabled = false;
    assert_eq!(adopted, expected);
}

#[test]
fn nodes_are_paired_by_their_edges_and_not_by_the_order_of_their_creation() {
    let old = plan(&[(0, host(1), &[]), (1, copy(1, 2), &[]), (2, Work::Empty, &[0, 1])]);
    let new = plan(&[(0, copy(1, 2), &[]), (1, host(5), &[]), (2, Work::Empty, &[1, 0])]);
    let adopted = adopt(&old, &new, false).unwrap();
    assert_eq!((&adopted.nodes[0].work, &adopted.nodes[1].work), (&host(5), &copy(1, 2)));
}

#[test]
fn changed_topology_names_the_node_that_the_header_says() {
    let old = plan(&[(0, host(0), &[]), (1, host(0), &[0]), (2, host(0), &[1])]);
    // Another number of nodes.
    assert_eq!(adopt(&old, &plan(&[(0, host(0), &[])]), false), topology(&[], &[]));
    // More last nodes.
    let new = plan(&[(0, host(0), &[]), (1, host(0), &[0]), (2, host(0), &[0])]);
    assert_eq!(adopt(&old, &new, false), topology(&[2], &[]));
    // Another number of dependencies.
    let new = plan(&[(0, host(0), &[]), (1, host(0), &[0]), (7, host(0), &[0, 1])]);
    assert_eq!(adopt(&old, &new, false), topology(&[7], &[]));
    // A dependency that is paired with another node.
    let old = plan(&[(0, host(0), &[]), (1, host(0), &[]), (2, host(0), &[0, 1]), (3, host(0), &[2, 0])]);
    let new = plan(&[(0, host(0), &[]), (1, host(0), &[]), (2, host(0), &[0, 1]), (3, host(0), &[2, 1])]);
    let Err(change) = adopt(&old, &new, false) else { panic!("it changed") };
    assert_eq!((change.node, change.from), (vec![2], vec![0]));
    // Another kind of edge.
    let old = plan(&[(0, Work::Kernel(kernel(1)), &[]), (1, Work::Kernel(kernel(1)), &[0])]);
    let mut new = old.clone();
    new.nodes[1].dependencies[0].edge = EdgeData { from_port: 1, to_port: 0, kind: 1 };
    assert_eq!(adopt(&old, &new, false), topology(&[1], &[0]));
}

#[test]
fn change_within_a_child_graph_names_the_inner_node() {
    let child = |data| Work::Child(plan(&[(3, data, &[])]));
    let old = plan(&[(5, child(host(1)), &[])]);
    let new = plan(&[(8, Work::Child(plan(&[(6, host(2), &[])])), &[])]);
    assert_eq!(adopt(&old, &new, false), Ok(plan(&[(5, child(host(2)), &[])])));
    let new = plan(&[(8, Work::Child(plan(&[(6, Work::Empty, &[])])), &[])]);
    let Err(change) = adopt(&old, &new, false) else { panic!("it changed") };
    assert_eq!(change.outcome, Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED);
    assert_eq!(change.node, [8, 6]);
}

#[test]
fn each_change_of_work_has_its_code() {
    let attribute = |id, byte| {
        let mut value = [0; 64];
        value[0] = byte;
        KernelAttribute { id, value }
    };
    let with = |attribute| Work::Kernel(KernelWork { attributes: vec![attribute], ..kernel(1) });
    let elsewhere = |work: &Work| match work.clone() {
        Work::Kernel(kernel) => Work::Kernel(KernelWork { context: 2, ..kernel }),
        Work::Copy { copy, .. } => Work::Copy { copy, context: 2 },
        Work::Fill { fill, .. } => Work::Fill { fill, context: 2 },
        other => other,
    };
    let flat = |width| Work::Fill { fill: fill(width, 1), context: 1 };
    let rows = |width| Work::Fill { fill: fill(width, 2), context: 1 };
    let operations = |list: &[bool]| {
        let operation = |is_write: &bool| match is_write {
            true => MemoryOperation::Write { to: 0, value: 0, wide: false, flags: 0 },
            false => MemoryOperation::Wait { at: 0, value: 0, wide: false, flags: 0 },
        };
        Work::MemoryOperations { operations: list.iter().map(operation).collect(), context: 1 }
    };
    let launch = Work::Kernel(kernel(1));
    let kind = Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    let function = Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
    let parameters = Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    let attributes = Outcome::CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED;
    for (old, new, uses_priority, outcome) in [
        (&launch, &Work::Kernel(kernel(2)), true, None),
        (&launch, &host(0), false, Some(kind)),
        (&launch, &elsewhere(&launch), false, Some(function)),
        (&launch, &with(attribute(COOPERATIVE, 1)), false, Some(attributes)),
        (&launch, &with(attribute(COOPERATIVE, 0)), false, None),
        (&launch, &with(attribute(PRIORITY, 3)), false, None),
        (&launch, &with(attribute(PRIORITY, 3)), true, Some(attributes)),
        (&copy(1, 2), &copy(1, 2), false, None),
        (&copy(1, 2), &copy(2, 2), false, Some(parameters)),
        (&copy(1, 2), &elsewhere(&copy(1, 2)), false, Some(parameters)),
        (&flat(8), &flat(16), false, None),
        (&flat(8), &rows(8), false, Some(parameters)),
        (&rows(8), &rows(16), false, Some(parameters)),
        (&flat(8), &elsewhere(&flat(8)), false, Some(parameters)),
        (&operations(&[true]), &operations(&[true]), false, None),
        (&operations(&[true]), &operations(&[true, true]), false, Some(parameters)),
        (&operations(&[true]), &operations(&[false]), false, Some(parameters)),
        (&Work::EventWait { event: 1 }, &Work::EventWait { event: 2 }, false, None),
    ] {
        let changed = change(old, new, uses_priority);
        let text = format!("{old:?} to {new:?}");
        match outcome {
            None => assert_eq!(changed.as_ref(), Ok(new), "{text}"),
            Some(outcome) => assert_eq!(changed.map_err(|change| change.outcome), Err(outcome), "{text}"),
        }
    }
}
