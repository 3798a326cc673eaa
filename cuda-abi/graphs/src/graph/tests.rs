use proptest::prelude::*;

use super::*;
use crate::plan::{HostWork, KernelWork};

const FULL: EdgeData = EdgeData { from_port: 0, to_port: 0, kind: 0 };
const EARLY: EdgeData = EdgeData { from_port: 1, to_port: 0, kind: 1 };

fn host(data: u64) -> NodeWork {
    NodeWork::Plain(Work::Host(HostWork { function: 8, data }))
}

fn kernel() -> NodeWork {
    NodeWork::Plain(Work::Kernel(KernelWork {
        function: 1,
        context: 1,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        parameters: Box::default(),
        attributes: Vec::new(),
    }))
}

/// Adds a host node behind others.
fn add(model: &mut Model, graph: u64, before: &[u64]) -> u64 {
    let before: Vec<Edge> = before.iter().map(|node| (*node, FULL)).collect();
    let data = model.graph(graph).unwrap().nodes.len() as u64;
    model.add(graph, host(data), &before).unwrap()
}

fn data(node: &PlanNode) -> u64 {
    match &node.work {
        Work::Host(host) => host.data,
        other => panic!("{other:?}"),
    }
}

proptest! {
    /// Edges of random acyclic graphs, added in any direction of creation order: each node of the plan stands after its dependencies,
    /// and clones and imported plans have the same plan.
    #[test]
    fn plan_of_a_random_graph_keeps_every_dependency(
        order in Just((0..24_usize).collect::<Vec<_>>()).prop_shuffle(),
        pairs in prop::collection::hash_set((0..24_usize, 0..24_usize), 0..90),
    ) {
        let mut model = Model::new();
        let graph = model.create().unwrap();
        let nodes: Vec<u64> = order.iter().map(|_| add(&mut model, graph, &[])).collect();
        let rank = |node: usize| order.iter().position(|other| *other == node).unwrap();
        let mut expected = HashSet::new();
        for (one, other) in pairs {
            if one != other {
                let (from, to) = if rank(one) < rank(other) { (one, other) } else { (other, one) };
                if expected.insert((from, to)) {
                    model.connect(graph, &[(nodes[from], nodes[to], FULL)]).unwrap();
                }
            }
        }
        let plan = model.plan(graph).unwrap();
        let mut seen = HashSet::new();
        for (index, node) in plan.nodes.iter().enumerate() {
            for dependency in &node.dependencies {
                prop_assert!((dependency.node as usize) < index);
                let from = usize::try_from(data(&plan.nodes[dependency.node as usize])).unwrap();
                seen.insert((from, usize::try_from(data(node)).unwrap()));
            }
        }
        prop_assert_eq!(seen, expected);
        let clone = model.clone_graph(graph).unwrap();
        prop_assert_eq!(&model.plan(clone).unwrap(), &plan);
        let imported = model.import(&plan).unwrap();
        prop_assert_eq!(&model.plan(imported).unwrap(), &plan);
        for graph in [graph, clone, imported] {
            model.destroy(graph).unwrap();
        }
        prop_assert_eq!(model.counts(), (0, 0));
    }
}

#[test]
fn cycle_is_found_by_the_plan_and_names_a_node() {
    let mut model = Model::new();
    let graph = model.create().unwrap();
    let first = add(&mut model, graph, &[]);
    let second = add(&mut model, graph, &[first]);
    let third = add(&mut model, graph, &[second]);
    model.connect(graph, &[(third, second, FULL)]).unwrap();
    assert_eq!(model.plan(graph), Err(NoPlan::Cycle(second)));
    model.disconnect(graph, &[(third, second, FULL)]).unwrap();
    assert_eq!(model.plan(graph).unwrap().nodes.len(), 3);
}

#[test]
fn dependencies_of_another_graph_or_given_twice_are_refused() {
    let mut model = Model::new();
    let (graph, other) = (model.create().unwrap(), model.create().unwrap());
    let (node, foreign) = (add(&mut model, graph, &[]), add(&mut model, other, &[]));
    for wrong in [vec![foreign], vec![node, node], vec![graph], vec![0], vec![node + 16]] {
        let before: Vec<Edge> = wrong.iter().map(|node| (*node, FULL)).collect();
        assert_eq!(model.add(graph, host(0), &before), Err(INVALID), "{wrong:?}");
    }
    let later = add(&mut model, graph, &[node]);
    for (from, to) in [(node, later), (node, node), (node, foreign), (foreign, node)] {
        assert_eq!(model.connect(graph, &[(from, to, FULL)]), Err(INVALID));
    }
    assert_eq!(model.disconnect(graph, &[(later, node, FULL)]), Err(INVALID));
    assert_eq!(model.counts(), (2, 3), "a refused call changes nothing");
}

#[test]
fn refused_list_of_edges_changes_nothing() {
    let mut model = Model::new();
    let graph = model.create().unwrap();
    let (one, other) = (add(&mut model, graph, &[]), add(&mut model, graph, &[]));
    assert_eq!(model.connect(graph, &[(one, other, FULL), (one, other, FULL)]), Err(INVALID));
    assert!(model.node(other).unwrap().before.is_empty() && model.node(one).unwrap().after.is_empty());
    model.connect(graph, &[(one, other, FULL)]).unwrap();
    assert_eq!(model.disconnect(graph, &[(one, other, FULL), (one, other, FULL)]), Err(INVALID));
    assert_eq!(model.disconnect(graph, &[(one, other, EARLY)]), Err(INVALID), "the data must match");
    assert_eq!(model.node(other).unwrap().before, [(one, FULL)]);
}

#[test]
fn only_kernels_release_an_edge_early() {
    let mut model = Model::new();
    let graph = model.create().unwrap();
    let kernel_node = model.add(graph, kernel(), &[]).unwrap();
    let host_node = add(&mut model, graph, &[]);
    assert!(model.add(graph, kernel(), &[(kernel_node, EARLY)]).is_ok());
    assert_eq!(model.add(graph, kernel(), &[(host_node, EARLY)]), Err(INVALID));
    assert_eq!(model.add(graph, host(0), &[(kernel_node, EARLY)]), Err(INVALID));
    for wrong in [
        EdgeData { to_port: 1, ..FULL },
        EdgeData { kind: 2, from_port: 1, ..FULL },
        EdgeData { from_port: 3, ..FULL },
        EdgeData { kind: 1, ..FULL },
    ] {
        assert_eq!(model.add(graph, kernel(), &[(kernel_node, wrong)]), Err(INVALID), "{wrong:?}");
    }
}

#[test]
fn destroyed_node_leaves_no_edge_and_its_number_is_not_used_again() {
    let mut model = Model::new();
    let graph = model.create().unwrap();
    let first = add(&mut model, graph, &[]);
    let middle = add(&mut model, graph, &[first]);
    let last = add(&mut model, graph, &[middle]);
    model.destroy_node(middle).unwrap();
    assert!(model.node(last).unwrap().before.is_empty() && model.node(first).unwrap().after.is_empty());
    assert_eq!(model.destroy_node(middle), Err(INVALID));
    let new = add(&mut model, graph, &[]);
    assert_eq!(model.node(new).unwrap().number, 3);
    let clone = model.clone_graph(graph).unwrap();
    let numbers = |graph| {
        let plan = model.plan(graph).unwrap();
        plan.nodes.iter().map(|node| node.number).collect::<Vec<u32>>()
    };
    assert_eq!((numbers(graph), numbers(clone)), (vec![0, 2, 3], vec![0, 2, 3]));
}

#[test]
fn clone_knows_the_originals_of_its_nodes() {
    let mut model = Model::new();
    let graph = model.create().unwrap();
    let first = add(&mut model, graph, &[]);
    let last = add(&mut model, graph, &[first]);
    let clone = model.clone_graph(graph).unwrap();
    let (one, other) =
        (model.find_in_clone(first, clone).unwrap(), model.find_in_clone(last, clone).unwrap());
    assert_eq!(model.node(other).unwrap().before, [(one, FULL)]);
    assert_eq!(model.node(one).unwrap().graph, clone);
    assert_eq!(model.find_in_clone(one, clone), Err(INVALID));
    assert_eq!(model.find_in_clone(first, graph), Err(INVALID));
    model.destroy_node(first).unwrap();
    assert_eq!(model.find_in_clone(first, clone), Err(INVALID));
    assert_eq!(model.plan(clone).unwrap().nodes.len(), 2, "the clone is independent");
}

#[test]
fn child_graph_belongs_to_its_node() {
    let mut model = Model::new();
    let (graph, child) = (model.create().unwrap(), model.create().unwrap());
    let inner = add(&mut model, child, &[]);
    let node = model.add(graph, NodeWork::Child(child), &[]).unwrap();
    assert_eq!(model.destroy(child), Err(INVALID));
    let other = model.create().unwrap();
    assert_eq!(model.add(other, NodeWork::Child(child), &[]), Err(INVALID), "it has an owner");
    assert_eq!(model.add(child, NodeWork::Child(graph), &[]), Err(INVALID), "no graph contains itself");
    assert_eq!(model.path(inner), Ok((graph, vec![0, 0])));
    assert_eq!(model.find(graph, &[0, 0]), inner);
    assert_eq!((model.find(graph, &[0, 1]), model.find(graph, &[1])), (0, 0));
    let copy = model.clone_graph(graph).unwrap();
    model.destroy_node(node).unwrap();
    assert!(model.node(inner).is_err() && model.graph(child).is_err());
    assert!(matches!(&model.plan(copy).unwrap().nodes[0].work, Work::Child(plan) if plan.nodes.len() == 1));
    model.destroy(copy).unwrap();
    model.destroy(graph).unwrap();
    model.destroy(other).unwrap();
    assert_eq!(model.counts(), (0, 0));
}

#[test]
fn references_to_user_objects_follow_their_graphs() {
    let mut model = Model::new();
    let graph = model.create().unwrap();
    model.own_object(graph, 7, 2).unwrap();
    assert_eq!(model.disown_object(graph, 7, 3), Err(INVALID));
    model.disown_object(graph, 7, 1).unwrap();
    let clone = model.clone_graph(graph).unwrap();
    assert_eq!(std::mem::take(&mut model.retained), [(7, 1)]);
    let outer = model.create().unwrap();
    model.add(outer, NodeWork::Child(clone), &[]).unwrap();
    assert_eq!(model.objects(outer), Ok(vec![(7, 1)]));
    model.destroy(outer).unwrap();
    assert_eq!(std::mem::take(&mut model.released), [(7, 1)]);
    model.destroy(graph).unwrap();
    assert_eq!(model.released, [(7, 1)]);
}

#[test]
fn work_of_another_kind_is_refused() {
    let mut model = Model::new();
    let graph = model.create().unwrap();
    let node = add(&mut model, graph, &[]);
    assert_eq!(model.set_work(node, Work::Empty), Err(INVALID));
    model.set_work(node, Work::Host(HostWork { function: 1, data: 99 })).unwrap();
    assert!(matches!(model.work(node), Ok(Work::Host(HostWork { data: 99, .. }))));
}
