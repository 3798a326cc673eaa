//! Objects of the plain kinds.

use crate::{
    code::{INVALID_HANDLE, INVALID_VALUE},
    guest::Guest,
    streams::ready,
};
use sluice_protocol::{
    calls::wire,
    field::{Mint, Take},
    handle::{Context, Graph, Id},
    limits,
};

fn create(guest: &mut Guest, graph: Id<Graph>, flags: u32) -> u32 {
    guest.call(wire::graph_create::CALL, |w| wire::graph_create::Args { flags, graph: Mint(graph) }.put(w)).0
}

fn destroy(guest: &mut Guest, graph: Id<Graph>) -> u32 {
    guest.call(wire::graph_destroy::CALL, |w| wire::graph_destroy::Args { graph: Take(graph) }.put(w)).0
}

#[test]
fn graph_is_created_and_destroyed_once_and_its_id_is_then_free() {
    let (mut guest, _arena) = ready();
    let (graph, next) = (Id::<Graph>::new(0, 1), Id::<Graph>::new(0, 2));
    assert_eq!(create(&mut guest, graph, 9), INVALID_VALUE, "the driver refuses the flags");
    assert_eq!(create(&mut guest, graph, 0), 0, "the id of a failure is free");
    assert_eq!(create(&mut guest, next, 0), INVALID_VALUE, "the id of a success is not");
    assert_eq!(destroy(&mut guest, next), INVALID_HANDLE, "another generation");
    assert_eq!(destroy(&mut guest, graph), 0);
    assert_eq!(destroy(&mut guest, graph), INVALID_HANDLE, "the null driver would end the worker");
    assert_eq!(create(&mut guest, next, 0), 0);
    assert_eq!(create(&mut guest, Id::new(limits::GRAPHS - 1, 1), 0), 0);
}

#[test]
fn graph_belongs_to_no_context() {
    let (mut guest, _arena) = ready();
    let graph = Id::<Graph>::new(0, 1);
    assert_eq!(create(&mut guest, graph, 0), 0);
    let context = Id::<Context>::from_raw(guest.session.context).unwrap();
    let (result, _) =
        guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context }.put(w));
    assert_eq!(result, 0);
    guest.session.context = 0;
    assert_eq!(destroy(&mut guest, graph), 0);
    assert_eq!(create(&mut guest, graph, 0), 0, "none is needed");
}
