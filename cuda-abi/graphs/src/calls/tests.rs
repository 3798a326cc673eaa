//! The functions on a driver that refuses on demand and calls back. In one file: they share that driver.
#![expect(unsafe_code, reason = "passes pointers as a program does")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use sluice_cuda_frontend::ErrorCode;

use super::*;
use crate::capture::{Stream, StreamOrder};
use crate::driver::{ConditionalHandle, KernelFacts, Refusal};
use crate::layout::{AllocationAnswer, InstantiateParameters, PoolProperties, UpdateResult};
use crate::objects::Kept;
use crate::plan::Work;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Error(u32);

impl From<u32> for Error {
    fn from(code: u32) -> Error {
        Error(code)
    }
}

impl ErrorCode for Error {
    const NULL_POINTER: Error = Error(1);
    const NO_ROOM: Error = Error(1);
    const PANIC: Error = Error(999);

    fn code(self) -> u32 {
        self.0
    }
}

/// An error of the driver itself.
const OWN: Error = Error(777);
const INVALID: Error = Error(1);

/// The number of a node that the driver refuses; others pass.
#[derive(Default)]
struct Moody {
    refused_node: Mutex<Option<u32>>,
    /// The present plan of the executable graph, and the stream of each launch.
    seen: Mutex<(Plan, Vec<u64>)>,
    features: Mutex<Vec<&'static str>>,
    memory: Mutex<BTreeMap<u64, u64>>,
    until_reached: Mutex<Vec<Kept>>,
    /// Graphs with conditional handles that exist.
    conditional: AtomicUsize,
    /// The last executable was made or changed with such a graph.
    has_conditional: Mutex<bool>,
}

/// A graph with conditional handles, counted while it exists.
struct Live(*const AtomicUsize);

// SAFETY: the tests' graphs live as long as the process.
unsafe impl Send for Live {}
// SAFETY: the same.
unsafe impl Sync for Live {}

impl Drop for Live {
    fn drop(&mut self) {
        // SAFETY: the same.
        unsafe { &*self.0 }.fetch_sub(1, Ordering::Relaxed);
    }
}

type Place<T> = sluice_cuda_frontend::Out<T, Error>;

fn out<T>(place: &mut T) -> Place<T> {
    // SAFETY: the tests use a pointer only while its memory is borrowed.
    unsafe { Place::new(place) }
}

fn none<T>() -> sluice_cuda_frontend::In<T, Error> {
    sluice_cuda_frontend::In::missing()
}

impl Moody {
    fn judge(&self, plan: &Plan) -> std::result::Result<(), Refusal<Error>> {
        let refused = *self.refused_node.lock().unwrap();
        match plan.nodes.iter().find(|node| Some(node.number) == refused) {
            Some(node) => Err(Refusal { error: OWN, node: Some(node.number) }),
            None => {
                self.seen.lock().unwrap().0 = plan.clone();
                Ok(())
            }
        }
    }
}

struct Reference(&'static Graphs<Shared>);
#[derive(Default)]
struct Shared {
    moody: Moody,
    graphs: Mutex<Option<Reference>>,
}

impl Shared {
    /// Uses the graphs: a lock that the caller held would never be free.
    fn call_back(&self) {
        let graphs = self.graphs.lock().unwrap();
        let mut graph = 0;
        let graphs = graphs.as_ref().unwrap().0;
        graphs.graph_create(out(&mut graph), 0).unwrap();
        graphs.graph_destroy(graph).unwrap();
    }
}

impl GraphDriver for Shared {
    type Error = Error;
    type Executable = Kept;
    type ConditionalGraph = Live;

    fn context(&self) -> std::result::Result<u64, Error> {
        self.call_back();
        Ok(9)
    }

    fn stream(&self, stream: u64, _: bool) -> std::result::Result<Stream, Error> {
        self.call_back();
        Ok(Stream { key: stream, context: 9, order: StreamOrder::NonBlocking })
    }

    fn kernel(&self, _: u64, _: u64) -> std::result::Result<KernelFacts, Error> {
        Err(OWN)
    }

    fn check(&self, work: &Work) -> std::result::Result<(), Error> {
        self.call_back();
        if matches!(work, Work::EventRecord { event: 0 }) { Err(OWN) } else { Ok(()) }
    }

    fn conditional_graph(&self, _: u64) -> std::result::Result<Live, Error> {
        self.call_back();
        self.moody.conditional.fetch_add(1, Ordering::Relaxed);
        Ok(Live(&self.moody.conditional))
    }

    fn create_handle(&self, _: &Live, condition: ConditionalHandle) -> std::result::Result<u64, Error> {
        self.call_back();
        Ok(u64::from(condition.value) << 8 | u64::from(condition.is_assigned))
    }

    fn instantiate(
        &self,
        plan: &Plan,
        conditional: Option<&Live>,
        _: u64,
        kept: Kept,
    ) -> std::result::Result<Kept, Refusal<Error>> {
        self.call_back();
        *self.moody.has_conditional.lock().unwrap() = conditional.is_some();
        self.moody.judge(plan).map(|()| kept)
    }

    fn set_work(&self, _: &Kept, path: &[u32], work: &Work, on: bool) -> std::result::Result<(), Error> {
        self.call_back();
        if *self.moody.refused_node.lock().unwrap() == path.last().copied() {
            return Err(OWN);
        }
        let mut seen = self.moody.seen.lock().unwrap();
        let node = seen.0.node_mut(path).unwrap();
        (node.work, node.enabled) = (work.clone(), on);
        Ok(())
    }

    fn update(
        &self,
        _: &Kept,
        plan: &Plan,
        conditional: Option<&Live>,
    ) -> std::result::Result<(), Refusal<Error>> {
        self.call_back();
        *self.moody.has_conditional.lock().unwrap() = conditional.is_some();
        self.moody.judge(plan)
    }

    fn launch(&self, _: &Kept, stream: u64, _: bool) -> std::result::Result<(), Error> {
        self.call_back();
        self.moody.seen.lock().unwrap().1.push(stream);
        Ok(())
    }

    fn upload(&self, _: &Kept, _: u64, _: bool) -> std::result::Result<(), Error> {
        Ok(())
    }

    fn allocate_memory(&self, device: i32, bytes: u64) -> std::result::Result<u64, Error> {
        self.call_back();
        if device != 0 {
            return Err(OWN);
        }
        let mut memory = self.moody.memory.lock().unwrap();
        let address = memory.last_key_value().map_or(1 << 20, |(start, bytes)| start + bytes);
        memory.insert(address, bytes);
        Ok(address)
    }

    fn free_memory(&self, address: u64) {
        self.call_back();
        assert!(self.moody.memory.lock().unwrap().remove(&address).is_some());
    }

    fn keep_until_reached(&self, _: u64, _: bool, kept: Kept) -> std::result::Result<(), Error> {
        self.call_back();
        self.moody.until_reached.lock().unwrap().push(kept);
        Ok(())
    }

    fn refused(&self, feature: &'static str) {
        self.call_back();
        self.moody.features.lock().unwrap().push(feature);
    }
}

fn graphs() -> &'static Graphs<Shared> {
    let graphs: &'static Graphs<Shared> = Box::leak(Box::new(Graphs::new(Shared::default())));
    *graphs.driver().graphs.lock().unwrap() = Some(Reference(graphs));
    graphs
}

fn create(graphs: &Graphs<Shared>) -> u64 {
    let mut graph = 0;
    graphs.graph_create(out(&mut graph), 0).unwrap();
    graph
}

fn record(graphs: &Graphs<Shared>, graph: u64, event: u64) -> std::result::Result<u64, Error> {
    let mut node = 0;
    graphs.graph_add_event_record_node(out(&mut node), graph, none(), 0, event).map(|()| node)
}

fn instantiate(graphs: &'static Graphs<Shared>, graph: u64) -> std::result::Result<u64, Error> {
    let mut executable = 0;
    graphs.graph_instantiate_with_flags(out(&mut executable), graph, 0).map(|()| executable)
}

fn refuse(graphs: &Graphs<Shared>, node: Option<u32>) {
    *graphs.driver().moody.refused_node.lock().unwrap() = node;
}

fn events(plan: &Plan) -> Vec<u64> {
    let event = |work: &Work| match work {
        Work::EventRecord { event } => *event,
        other => panic!("{other:?}"),
    };
    plan.nodes.iter().map(|node| event(&node.work)).collect()
}

#[test]
fn refusal_of_the_driver_names_the_node_and_leaves_nothing() {
    let graphs = graphs();
    let graph = create(graphs);
    assert_eq!(record(graphs, graph, 0), Err(OWN));
    record(graphs, graph, 1).unwrap();
    let second = record(graphs, graph, 2).unwrap();
    let mut count = 0;
    graphs.graph_get_nodes(graph, Place::missing(), out(&mut count)).unwrap();
    assert_eq!(count, 2, "a refused node is not added");
    let (ended, mut object) = (Box::leak(Box::<AtomicU32>::default()), 0);
    let data = std::ptr::from_mut(ended).cast();
    graphs.user_object_create(out(&mut object), data, Some(end), 1, 1).unwrap();
    graphs.graph_retain_user_object(graph, object, 1, 1).unwrap();
    refuse(graphs, Some(1));
    let mut parameters = InstantiateParameters { flags: 0, stream: 0, node: 9, result: 9 };
    let mut executable = 5;
    let made = graphs.graph_instantiate_with_params(out(&mut executable), graph, out(&mut parameters), false);
    assert_eq!((made, executable), (Err(OWN), 5));
    assert_eq!((parameters.node, parameters.result), (second, 1));
    refuse(graphs, None);
    executable = instantiate(graphs, graph).unwrap();
    graphs.graph_destroy(graph).unwrap();
    // SAFETY: the counter lives as long as the process.
    let ended = || unsafe { &*data.cast::<AtomicU32>() }.load(Ordering::Relaxed);
    assert_eq!(ended(), 0, "the executable graph keeps the object");
    graphs.graph_exec_destroy(executable).unwrap();
    assert_eq!(ended(), 1);
}

unsafe extern "C" fn end(data: *mut c_void) {
    // SAFETY: the counter of the test, which lives as long as the process.
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn refused_change_leaves_the_work_as_it_was() {
    let graphs = graphs();
    let (graph, other) = (create(graphs), create(graphs));
    let node = record(graphs, graph, 1).unwrap();
    record(graphs, other, 0x20).unwrap();
    let executable = instantiate(graphs, graph).unwrap();
    let seen = || events(&graphs.driver().moody.seen.lock().unwrap().0);
    refuse(graphs, Some(0));
    assert_eq!(graphs.graph_exec_event_record_node_set_event(executable, node, 5), Err(OWN));
    let mut result = UpdateResult { result: 9, node: 9, from: 9 };
    assert_eq!(graphs.graph_exec_update_v2(executable, other, out(&mut result)), Err(OWN));
    assert_eq!((result.result, result.node, result.from), (1, 0, 0));
    refuse(graphs, None);
    assert_eq!(graphs.graph_exec_event_record_node_set_event(executable, node, 0), Err(OWN));
    assert_eq!(graphs.graph_exec_event_wait_node_set_event(executable, node, 5), Err(INVALID));
    assert_eq!(seen(), [1]);
    graphs.graph_exec_event_record_node_set_event(executable, node, 6).unwrap();
    assert_eq!(seen(), [6]);
    graphs.graph_exec_update_v2(executable, other, out(&mut result)).unwrap();
    assert_eq!((seen(), result.result), (vec![0x20], 0));
    assert_eq!(graphs.graph_node_set_enabled(executable, node, 0), Err(INVALID), "not such a node");
}

#[test]
fn launch_in_a_capture_becomes_a_child_with_the_present_work() {
    let graphs = graphs();
    let graph = create(graphs);
    let node = record(graphs, graph, 1).unwrap();
    let executable = instantiate(graphs, graph).unwrap();
    graphs.graph_exec_event_record_node_set_event(executable, node, 7).unwrap();
    assert!(!graphs.is_capturing());
    graphs.stream_begin_capture(30, false, 0).unwrap();
    assert!(graphs.is_capturing());
    graphs.graph_launch(executable, 30, false).unwrap();
    graphs.graph_launch(executable, 40, false).unwrap();
    assert_eq!(graphs.graph_upload(executable, 30, false), Err(Error(900)));
    let mut captured = 1;
    assert_eq!(graphs.stream_end_capture(30, false, out(&mut captured)), Err(Error(901)));
    assert_eq!((captured, graphs.is_capturing()), (0, false));
    graphs.stream_begin_capture(30, false, 0).unwrap();
    graphs.graph_launch(executable, 30, false).unwrap();
    graphs.stream_end_capture(30, false, out(&mut captured)).unwrap();
    assert_eq!(graphs.driver().moody.seen.lock().unwrap().1, [40], "a captured launch is not one");
    instantiate(graphs, captured).unwrap();
    let seen = graphs.driver().moody.seen.lock().unwrap();
    assert!(matches!(&seen.0.nodes[0].work, Work::Child(child) if events(child) == [7]));
}

#[test]
fn work_of_a_capture_is_described_only_if_its_stream_captures() {
    let graphs = graphs();
    let stream = |key| Stream { key, context: 9, order: StreamOrder::NonBlocking };
    let never = || panic!("the stream does not capture");
    assert_eq!(graphs.capture(stream(30), never), Ok(false));
    graphs.stream_begin_capture(30, false, 0).unwrap();
    assert_eq!(graphs.capture(stream(40), never), Ok(false));
    assert_eq!(graphs.capture(stream(30), || Err(OWN)), Err(OWN));
    assert_eq!(graphs.capture(stream(30), || Ok(Work::EventRecord { event: 0 })), Err(OWN));
    assert_eq!(graphs.capture(stream(30), || Ok(Work::Empty)), Ok(true));
    let mut captured = 0;
    graphs.stream_end_capture(30, false, out(&mut captured)).unwrap();
    let mut count = 0;
    graphs.graph_get_nodes(captured, Place::missing(), out(&mut count)).unwrap();
    assert_eq!(count, 1, "a refused operation leaves the capture as it is");
}

#[test]
fn stream_of_an_event_is_looked_up_only_if_a_capture_can_have_it() {
    let graphs = graphs();
    let looked_up = AtomicU32::new(0);
    let stream = || {
        looked_up.fetch_add(1, Ordering::Relaxed);
        Ok(Stream { key: 5, context: 9, order: StreamOrder::NonBlocking })
    };
    let both = || (graphs.record_event(stream, 7, false), graphs.wait_event(stream, 7, false));
    assert_eq!(both(), (Ok(false), Ok(false)));
    assert_eq!(looked_up.load(Ordering::Relaxed), 0);
    graphs.stream_begin_capture(5, false, 2).unwrap();
    assert_eq!(both(), (Ok(true), Ok(true)));
    assert_eq!(looked_up.load(Ordering::Relaxed), 2);
}

#[test]
fn refused_features_are_reported_to_the_library() {
    let graphs = graphs();
    let graph = create(graphs);
    let mut place = 0;
    let refused = Err(Error(801));
    assert_eq!(graphs.graph_instantiate_with_flags(out(&mut place), graph, 4), refused);
    let features = graphs.driver().moody.features.lock().unwrap();
    assert_eq!(features[..], ["graph launched by a device"]);
}

fn asked(bytes: usize) -> AllocationAnswer {
    let pool = PoolProperties { kind: 1, place: 1, ..PoolProperties::default() };
    AllocationAnswer { pool, bytes, ..AllocationAnswer::default() }
}

/// Adds an allocation of these parameters, and returns its address.
fn allocation(
    graphs: &'static Graphs<Shared>,
    graph: u64,
    mut asked: AllocationAnswer,
) -> std::result::Result<(u64, u64), Error> {
    let mut node = 0;
    graphs.graph_add_mem_alloc_node(out(&mut node), graph, none(), 0, out(&mut asked).cast())?;
    Ok((node, asked.address))
}

fn free(graphs: &'static Graphs<Shared>, graph: u64, address: u64) -> std::result::Result<u64, Error> {
    let mut node = 0;
    graphs.graph_add_mem_free_node(out(&mut node), graph, none(), 0, address).map(|()| node)
}

// Promise: C76
#[test]
fn graph_with_memory_keeps_its_nodes_and_has_no_copy_and_one_executable() {
    let graphs = graphs();
    let (graph, outer) = (create(graphs), create(graphs));
    let plain = record(graphs, graph, 1).unwrap();
    let (node, address) = allocation(graphs, graph, asked(64)).unwrap();
    let unsupported = Err(Error(801));
    let mut place = 0;
    assert_eq!(graphs.graph_destroy_node(plain), unsupported);
    assert_eq!(graphs.graph_clone(out(&mut place), graph), unsupported);
    assert_eq!(graphs.graph_add_child_graph_node(out(&mut place), outer, none(), 0, graph), unsupported);
    let one = [node];
    // SAFETY: the list lives until the end of the call.
    let list = unsafe { sluice_cuda_frontend::In::<u64, Error>::new(one.as_ptr()) };
    assert_eq!(graphs.graph_remove_dependencies(graph, list, list, none(), 1), unsupported);
    let mut shown = AllocationAnswer::default();
    graphs.graph_mem_alloc_node_get_params(node, out(&mut shown).cast()).unwrap();
    assert_eq!((shown.address, shown.bytes, shown.pool), (address, 64, asked(64).pool));
    assert_eq!(graphs.graph_mem_free_node_get_params(node, out(&mut place)), Err(INVALID));
    let executable = instantiate(graphs, graph).unwrap();
    assert_eq!(instantiate(graphs, graph), Err(Error(801)));
    graphs.graph_exec_destroy(executable).unwrap();
    instantiate(graphs, graph).unwrap();
}

// Promise: C76
#[test]
fn allocation_lives_from_a_launch_until_a_call_frees_it() {
    let graphs = graphs();
    let moody = &graphs.driver().moody;
    let graph = create(graphs);
    let (_, address) = allocation(graphs, graph, asked(64)).unwrap();
    let executable = instantiate(graphs, graph).unwrap();
    assert_eq!(graphs.free_outside(address).err(), Some(INVALID), "no launch made it");
    assert!(graphs.free_outside(5).unwrap().is_none(), "it is none of a graph's");
    graphs.graph_launch(executable, 3, false).unwrap();
    assert_eq!(graphs.graph_launch(executable, 3, false), Err(INVALID));
    drop(graphs.free_outside(address).unwrap().unwrap());
    graphs.graph_launch(executable, 3, false).unwrap();
    graphs.graph_exec_destroy(executable).unwrap();
    graphs.graph_destroy(graph).unwrap();
    assert!(moody.memory.lock().unwrap().contains_key(&address), "it is live");
    // A graph that frees it holds it until its stream has come to that.
    let other = create(graphs);
    free(graphs, other, address).unwrap();
    let frees = instantiate(graphs, other).unwrap();
    graphs.graph_launch(frees, 4, false).unwrap();
    assert!(moody.memory.lock().unwrap().contains_key(&address), "the stream has not reached the end");
    let reached = std::mem::take(&mut *moody.until_reached.lock().unwrap());
    drop(reached);
    assert!(moody.memory.lock().unwrap().is_empty());
    let mut used = 1;
    graphs.memory_attribute(0, 0, out(&mut used)).unwrap();
    assert_eq!(used, 0);
}

// Promise: C76
#[test]
fn executable_that_frees_on_launch_is_launched_again() {
    let graphs = graphs();
    let graph = create(graphs);
    let (_, address) = allocation(graphs, graph, asked(64)).unwrap();
    let mut executable = 0;
    graphs.graph_instantiate_with_flags(out(&mut executable), graph, 1).unwrap();
    for _ in 0..3 {
        graphs.graph_launch(executable, 3, false).unwrap();
    }
    drop(graphs.free_outside(address).unwrap().unwrap());
    assert_eq!(graphs.free_outside(address).err(), Some(INVALID), "twice");
}

// Promise: C76
#[test]
fn refused_allocation_leaves_no_memory_behind() {
    let graphs = graphs();
    let graph = create(graphs);
    let other_pool = |change: fn(&mut PoolProperties)| {
        let mut asked = asked(64);
        change(&mut asked.pool);
        asked
    };
    let wrong = [
        (asked(0), INVALID),
        (other_pool(|pool| pool.kind = 2), INVALID),
        (other_pool(|pool| pool.handles = 1), INVALID),
        (other_pool(|pool| pool.place = 2), Error(801)),
        (other_pool(|pool| pool.place = 9), INVALID),
        (other_pool(|pool| pool.rest[3] = 1), INVALID),
        (other_pool(|pool| pool.device = 1), OWN),
        (AllocationAnswer { count: usize::MAX, ..asked(64) }, INVALID),
        (AllocationAnswer { count: 1, ..asked(64) }, INVALID),
    ];
    for (parameters, code) in wrong {
        assert_eq!(allocation(graphs, graph, parameters), Err(code), "{parameters:?}");
    }
    assert_eq!(allocation(graphs, 77, asked(64)), Err(INVALID), "no such graph");
    assert_eq!(free(graphs, graph, 1 << 20), Err(INVALID), "no such allocation");
    let mut node = 0;
    let twice = [1, 1];
    // SAFETY: the list lives until the end of the call.
    let list = unsafe { sluice_cuda_frontend::In::<u64, Error>::new(twice.as_ptr()) };
    let mut parameters = asked(64);
    let place = out(&mut parameters).cast();
    assert_eq!(graphs.graph_add_mem_alloc_node(out(&mut node), graph, list, 2, place), Err(INVALID));
    assert!(graphs.driver().moody.memory.lock().unwrap().is_empty());
    graphs.graph_destroy_node(record(graphs, graph, 1).unwrap()).unwrap();
}

// Promise: C76
#[test]
fn allocation_and_free_in_a_captured_stream_become_nodes() {
    let graphs = graphs();
    let stream = |key| Stream { key, context: 9, order: StreamOrder::NonBlocking };
    assert_eq!(graphs.capture_allocation(stream(30), 0, 64), Ok(None));
    graphs.stream_begin_capture(30, false, 0).unwrap();
    assert_eq!(graphs.capture_allocation(stream(40), 0, 64), Ok(None));
    let kept = graphs.capture_allocation(stream(30), 0, 64).unwrap().unwrap();
    let freed = graphs.capture_allocation(stream(30), 0, 64).unwrap().unwrap();
    assert_eq!(graphs.capture_free(stream(30), 5), Err(INVALID));
    assert_eq!(graphs.capture_free(stream(30), freed), Ok(true));
    let mut graph = 0;
    graphs.stream_end_capture(30, false, out(&mut graph)).unwrap();
    let executable = instantiate(graphs, graph).unwrap();
    assert_eq!(graphs.driver().moody.seen.lock().unwrap().0.nodes.len(), 3);
    graphs.graph_launch(executable, 3, false).unwrap();
    assert_eq!(graphs.free_outside(freed).err(), Some(INVALID), "its graph frees it");
    drop(graphs.free_outside(kept).unwrap().unwrap());
    graphs.stream_begin_capture(30, false, 0).unwrap();
    assert_eq!(graphs.graph_launch(executable, 30, false), Err(Error(900)), "no copy of it can be made");
}

/// `CUgraphNodeParams` of a conditional node.
fn conditional(handle: u64, kind: u32, size: u32) -> [u64; 32] {
    let mut parameters = [0; 32];
    parameters[0] = 13;
    parameters[2] = handle;
    parameters[3] = u64::from(kind) | u64::from(size) << 32;
    parameters
}

fn create_handle(
    graphs: &Graphs<Shared>,
    graph: u64,
    value: u32,
    flags: u32,
) -> std::result::Result<u64, Error> {
    let mut handle = 0;
    graphs.graph_conditional_handle_create(out(&mut handle), graph, 0, value, flags).map(|()| handle)
}

/// Adds a conditional node, and returns it with its bodies.
fn add_conditional(
    graphs: &Graphs<Shared>,
    graph: u64,
    mut parameters: [u64; 32],
) -> std::result::Result<(u64, Vec<u64>), Error> {
    let mut node = 0;
    let place = out(&mut parameters).cast();
    graphs.graph_add_node(out(&mut node), graph, none(), none(), 0, place)?;
    let bodies = std::ptr::with_exposed_provenance::<u64>(usize::try_from(parameters[4]).unwrap());
    let size = usize::try_from(parameters[3] >> 32).unwrap();
    // SAFETY: the node owns an array of that length.
    Ok((node, unsafe { std::slice::from_raw_parts(bodies, size) }.to_vec()))
}

// Promise: C107
#[test]
fn handle_of_a_graph_makes_one_conditional_node_of_its_graph_or_of_a_body() {
    let graphs = graphs();
    let (graph, other) = (create(graphs), create(graphs));
    assert_eq!(create_handle(graphs, graph, 1, 2), Err(INVALID), "an unknown flag");
    assert_eq!(create_handle(graphs, 0, 1, 0), Err(INVALID), "no graph");
    let outer = create_handle(graphs, graph, 1, 1).unwrap();
    assert_eq!(outer, 1 << 8 | 1);
    for (kind, size, what) in [
        (0, 0, "an IF without a body"),
        (0, 3, "an IF with three"),
        (1, 2, "a WHILE with two"),
        (2, 0, "a SWITCH without a body"),
        (2, u32::MAX, "a SWITCH with more bodies than anyone needs"),
        (3, 1, "another kind"),
    ] {
        assert_eq!(add_conditional(graphs, graph, conditional(outer, kind, size)), Err(INVALID), "{what}");
    }
    assert_eq!(add_conditional(graphs, other, conditional(outer, 0, 1)), Err(INVALID), "another graph's");
    let (node, bodies) = add_conditional(graphs, graph, conditional(outer, 0, 2)).unwrap();
    assert_eq!(bodies.len(), 2);
    assert_eq!(add_conditional(graphs, graph, conditional(outer, 0, 2)), Err(INVALID), "used already");
    let mut kind = 0;
    graphs.graph_node_get_type(node, out(&mut kind)).unwrap();
    assert_eq!(kind, 13);
    let mut answer = [0_u64; 32];
    graphs.graph_node_get_params(node, out(&mut answer).cast()).unwrap();
    assert_eq!(answer[..4], [13, 0, outer, 2 << 32]);
    // A handle for a node in a body belongs to the outermost graph.
    let inner = create_handle(graphs, bodies[1], 2, 0).unwrap();
    let (loop_node, loop_bodies) = add_conditional(graphs, bodies[1], conditional(inner, 1, 1)).unwrap();
    assert_eq!(graphs.with(|state| state.model.path(loop_node)), Ok((graph, vec![0, 1, 0])));
    assert_eq!(graphs.with(|state| Ok(state.model.find(graph, &[0, 1, 0]))), Ok(loop_node));
    assert_eq!(graphs.graph_destroy(loop_bodies[0]), Err(INVALID), "its node owns it");
    let executable = instantiate(graphs, graph).unwrap();
    assert!(*graphs.driver().moody.has_conditional.lock().unwrap());
    let (plan, _) = &*graphs.driver().moody.seen.lock().unwrap();
    let Work::Conditional(work) = &plan.nodes[0].work else { panic!("{plan:?}") };
    assert_eq!((work.handle, work.bodies.len()), (outer, 2));
    assert!(matches!(&work.bodies[1].nodes[0].work, Work::Conditional(work) if work.handle == inner));
    graphs.graph_exec_destroy(executable).unwrap();
    assert_eq!(graphs.driver().moody.conditional.load(Ordering::Relaxed), 1, "one for the graph");
    graphs.graph_destroy(graph).unwrap();
    assert_eq!(graphs.driver().moody.conditional.load(Ordering::Relaxed), 0);
}

// Promise: C107
#[test]
fn graph_with_a_conditional_node_has_one_executable_and_no_copy() {
    const NOT_SUPPORTED: Error = Error(801);
    let graphs = graphs();
    let graph = create(graphs);
    let handle = create_handle(graphs, graph, 1, 0).unwrap();
    let mut parameters = InstantiateParameters { flags: 0, stream: 0, node: 7, result: 0 };
    let mut executable = 0;
    let made = graphs.graph_instantiate_with_params(out(&mut executable), graph, out(&mut parameters), false);
    assert_eq!((made, parameters.result, parameters.node), (Err(INVALID), 5, 0), "no node uses the handle");
    let (_, bodies) = add_conditional(graphs, graph, conditional(handle, 0, 1)).unwrap();
    let mut copy = 0;
    assert_eq!(graphs.graph_clone(out(&mut copy), graph), Err(NOT_SUPPORTED));
    let outer = create(graphs);
    let mut node = 0;
    let child = graphs.graph_add_child_graph_node(out(&mut node), outer, none(), 0, graph);
    assert_eq!(child, Err(NOT_SUPPORTED));
    let executable = instantiate(graphs, graph).unwrap();
    assert_eq!(instantiate(graphs, graph), Err(NOT_SUPPORTED), "a second one");
    graphs.graph_exec_destroy(executable).unwrap();
    // A node that a body must not have.
    let recorded = record(graphs, bodies[0], 5).unwrap();
    let made = graphs.graph_instantiate_with_params(out(&mut node), graph, out(&mut parameters), false);
    assert_eq!((made, parameters.result, parameters.node), (Err(NOT_SUPPORTED), 3, recorded));
    graphs.graph_destroy_node(recorded).unwrap();
    let executable = instantiate(graphs, graph).unwrap();
    // A launch in a capture would be a child graph.
    graphs.stream_begin_capture(3, false, 2).unwrap();
    assert_eq!(graphs.graph_launch(executable, 3, false), Err(Error(900)));
    let mut captured = 0;
    assert_eq!(graphs.stream_end_capture(3, false, out(&mut captured)), Err(Error(901)));
    // The graph may end first.
    graphs.graph_destroy(graph).unwrap();
    graphs.graph_launch(executable, 3, false).unwrap();
    graphs.graph_exec_destroy(executable).unwrap();
}

// Promise: C107
#[test]
fn executable_with_a_conditional_node_takes_the_bodies_of_another_graph() {
    let graphs = graphs();
    let describe = |value: u32, kind: u32, nodes: usize| {
        let graph = create(graphs);
        let handle = create_handle(graphs, graph, value, 1).unwrap();
        let (_, bodies) = add_conditional(graphs, graph, conditional(handle, kind, 1)).unwrap();
        for _ in 0..nodes {
            let mut node = 0;
            graphs.graph_add_empty_node(out(&mut node), bodies[0], none(), 0).unwrap();
        }
        (graph, bodies[0])
    };
    let ((graph, _), (same, _)) = (describe(1, 1, 2), describe(2, 1, 2));
    let ((longer, body), (other, _)) = (describe(3, 1, 3), describe(4, 2, 2));
    let executable = instantiate(graphs, graph).unwrap();
    let mut result = UpdateResult { result: 9, node: 9, from: 9 };
    graphs.graph_exec_update_v2(executable, same, out(&mut result)).unwrap();
    assert_eq!((result.result, result.node), (0, 0));
    let handle = match &graphs.driver().moody.seen.lock().unwrap().0.nodes[0].work {
        Work::Conditional(work) => work.handle,
        work => panic!("{work:?}"),
    };
    assert_eq!(handle, 2 << 8 | 1, "the handle comes with the bodies");
    assert_eq!(graphs.graph_exec_update_v2(executable, longer, out(&mut result)), Err(Error(910)));
    let node = graphs.with(|state| Ok(state.model.find(longer, &[0])));
    assert_eq!((result.result, Ok(result.node)), (2, node), "the topology of a body");
    assert_eq!(graphs.graph_exec_update_v2(executable, other, out(&mut result)), Err(Error(910)));
    assert_eq!(result.result, 5, "the parameters of the node");
    graphs.stream_begin_capture_to_graph(3, false, body, none(), none(), 0, 2).unwrap();
    assert_eq!(graphs.graph_exec_update_v2(executable, longer, out(&mut result)), Err(INVALID), "captured");
    let mut captured = 0;
    graphs.stream_end_capture(3, false, out(&mut captured)).unwrap();
    assert_eq!(captured, body);
}

/// The arguments of the program's judge of a recapture: the kinds and first words of both parameters, and the status.
static JUDGED: Mutex<Vec<[u64; 5]>> = Mutex::new(Vec::new());

unsafe extern "C" fn judge(
    refusal: *mut c_void,
    _: u64,
    original: *const [u64; 32],
    new: *const [u64; 32],
    status: u32,
) -> u32 {
    // SAFETY: the structure lives during the call.
    let original = unsafe { *original };
    // SAFETY: the same.
    let new = unsafe { *new };
    JUDGED.lock().unwrap().push([original[0], original[2], new[0], new[2], u64::from(status)]);
    u32::try_from(refusal.addr()).unwrap()
}

// Promise: C109
#[test]
fn recapture_makes_the_nodes_of_a_graph_again_and_asks_about_each_that_differs() {
    const FAILURE: Error = Error(918);
    const INVALIDATED: Error = Error(901);
    let graphs = graphs();
    let stream = Stream { key: 3, context: 9, order: StreamOrder::NonBlocking };
    let record = |event: u64| graphs.record_event(|| Ok(stream), event, true);
    let wait = |event: u64| graphs.wait_event(|| Ok(stream), event, true);
    let end = || {
        let mut graph = 0;
        graphs.stream_end_capture(3, false, out(&mut graph)).map(|()| graph)
    };
    graphs.stream_begin_capture(3, false, 2).unwrap();
    record(5).unwrap();
    wait(6).unwrap();
    let graph = end().unwrap();
    let function = (judge as *const ()).addr() as u64;
    let begin = |judge: u64, refusal: u64| {
        graphs.stream_begin_recapture_to_graph(3, false, 2, graph, (judge, refusal))
    };
    assert_eq!(begin(function, 0), Ok(()));
    assert_eq!(begin(function, 0), Err(Error(401)), "the stream captures");
    record(5).unwrap();
    wait(7).unwrap();
    assert_eq!(end(), Ok(graph));
    // `EVENT_RECORD` and `WAIT_EVENT` are 7 and 6; the first word of both is the event.
    assert_eq!(*JUDGED.lock().unwrap(), [[6, 6, 6, 7, 0]], "the record is as it was");
    let executable = instantiate(graphs, graph).unwrap();
    let works: Vec<Work> =
        graphs.driver().moody.seen.lock().unwrap().0.nodes.iter().map(|node| node.work.clone()).collect();
    assert_eq!(works, [Work::EventRecord { event: 5 }, Work::EventWait { event: 7 }]);
    graphs.graph_exec_destroy(executable).unwrap();
    // Without a judge all parameters may differ.
    begin(0, 0).unwrap();
    record(8).unwrap();
    wait(9).unwrap();
    assert_eq!(end(), Ok(graph));
    // The judge refuses; another kind; too many nodes; too few.
    begin(function, 1).unwrap();
    assert_eq!((record(5), wait(6), end()), (Err(FAILURE), Err(INVALIDATED), Err(INVALIDATED)));
    begin(0, 0).unwrap();
    assert_eq!((wait(8), end()), (Err(FAILURE), Err(INVALIDATED)));
    begin(0, 0).unwrap();
    record(8).unwrap();
    wait(9).unwrap();
    assert_eq!((wait(9), end()), (Err(FAILURE), Err(INVALIDATED)));
    begin(0, 0).unwrap();
    record(8).unwrap();
    assert_eq!(end(), Err(FAILURE));
    // Other edges.
    begin(0, 0).unwrap();
    record(8).unwrap();
    graphs.stream_update_capture_dependencies(3, false, none(), none(), 0, 1).unwrap();
    assert_eq!((wait(9), end()), (Err(FAILURE), Err(INVALIDATED)));
    graphs.graph_destroy(graph).unwrap();
    assert_eq!(begin(0, 0), Err(INVALID), "the graph is gone");
}

// Promise: C109
#[test]
fn recapture_finds_the_allocations_of_its_graph_again() {
    let graphs = graphs();
    let stream = Stream { key: 3, context: 9, order: StreamOrder::NonBlocking };
    let end = || {
        let mut graph = 0;
        graphs.stream_end_capture(3, false, out(&mut graph)).map(|()| graph)
    };
    graphs.stream_begin_capture(3, false, 2).unwrap();
    let address = graphs.capture_allocation(stream, 0, 64).unwrap().unwrap();
    assert_eq!(graphs.capture_free(stream, address), Ok(true));
    let graph = end().unwrap();
    let begin = || graphs.stream_begin_recapture_to_graph(3, false, 2, graph, (0, 0));
    begin().unwrap();
    assert_eq!(graphs.capture_allocation(stream, 0, 64), Ok(Some(address)));
    assert_eq!(graphs.capture_free(stream, address), Ok(true));
    assert_eq!(end(), Ok(graph));
    begin().unwrap();
    assert_eq!(graphs.capture_allocation(stream, 0, 65), Err(Error(918)), "another size");
    assert_eq!(end(), Err(Error(901)));
    graphs.graph_destroy(graph).unwrap();
    assert!(graphs.driver().moody.memory.lock().unwrap().is_empty());
}
