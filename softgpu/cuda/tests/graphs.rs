//! Graphs: capture of streams, nodes, executable graphs and their changes. In one file: they share one context.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::support::*;

const ILLEGAL_STATE: u32 = 401;
const UNSUPPORTED: u32 = 900;
const INVALIDATED: u32 = 901;
const MERGE: u32 = 902;
const UNMATCHED: u32 = 903;
const UNJOINED: u32 = 904;
const ISOLATION: u32 = 905;
const IMPLICIT: u32 = 906;
const CAPTURED_EVENT: u32 = 907;
const WRONG_THREAD: u32 = 908;
const UPDATE_FAILURE: u32 = 910;

// `CUstreamCaptureMode`.
const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// A stream that is independent of the legacy default stream.
const NON_BLOCKING: u32 = 1;

const ARITHMETIC: &str = r"
.visible .entry axpy(.param .u64 y, .param .u64 x, .param .u64 a)
{
    .reg .b32 %r<4>; .reg .b64 %rd<10>;
    mov.u32 %r0, %tid.x;
    cvt.u64.u32 %rd0, %r0; shl.b64 %rd0, %rd0, 3;
    ld.param.u64 %rd1, [y]; add.u64 %rd1, %rd1, %rd0;
    ld.param.u64 %rd2, [x]; add.u64 %rd2, %rd2, %rd0;
    ld.param.u64 %rd3, [a];
    ld.global.u64 %rd4, [%rd1]; ld.global.u64 %rd5, [%rd2];
    mad.lo.u64 %rd4, %rd5, %rd3, %rd4;
    st.global.u64 [%rd1], %rd4;
    ret;
}
.visible .entry sum(.param .u64 to, .param .u64 from, .param .u64 n)
{
    .reg .pred %p; .reg .b64 %rd<8>;
    ld.param.u64 %rd0, [from]; ld.param.u64 %rd1, [n]; mov.u64 %rd2, 0;
AGAIN:
    ld.global.u64 %rd3, [%rd0]; add.u64 %rd2, %rd2, %rd3;
    add.u64 %rd0, %rd0, 8; sub.u64 %rd1, %rd1, 1;
    setp.ne.u64 %p, %rd1, 0;
    @%p bra AGAIN;
    ld.param.u64 %rd4, [to];
    st.global.u64 [%rd4], %rd2;
    ret;
}
";

fn graph() -> u64 {
    let mut graph = 0;
    ok!(cuGraphCreate(&raw mut graph, 0));
    graph
}

fn begin(stream: u64, mode: u32) {
    ok!(cuStreamBeginCapture_v2(stream, mode));
}

fn end(stream: u64) -> u64 {
    let mut graph = 0;
    ok!(cuStreamEndCapture(stream, &raw mut graph));
    graph
}

/// The code of an end of capture that fails; it returns no graph.
fn failed_end(stream: u64) -> u32 {
    let mut graph = 1;
    let code = cu!(cuStreamEndCapture(stream, &raw mut graph));
    assert_eq!(graph, 0);
    code
}

fn instantiate(graph: u64) -> u64 {
    let mut executable = 0;
    ok!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
    executable
}

fn run(executable: u64, stream: u64) {
    ok!(cuGraphLaunch(executable, stream));
    ok!(cuStreamSynchronize(stream));
}

fn nodes(graph: u64) -> Vec<u64> {
    let mut count = 0;
    ok!(cuGraphGetNodes(graph, ptr::null_mut(), &raw mut count));
    let mut nodes = vec![0; count];
    ok!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count));
    nodes
}

fn kind(node: u64) -> u32 {
    let mut kind = 99;
    ok!(cuGraphNodeGetType(node, &raw mut kind));
    kind
}

fn status(stream: u64) -> u32 {
    let mut status = 9;
    ok!(cuStreamIsCapturing(stream, &raw mut status));
    status
}

/// A kernel's parameters in the form of the header.
struct Kernel {
    _values: Vec<u64>,
    _pointers: Vec<*const u64>,
    parameters: KernelParameters,
}

fn kernel(function: u64, values: &[u64]) -> Kernel {
    let values = values.to_vec();
    let pointers: Vec<*const u64> = values.iter().map(ptr::from_ref).collect();
    let parameters = KernelParameters {
        function,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        parameters: pointers.as_ptr(),
        extra: 0,
        kernel: 0,
        context: 0,
    };
    Kernel { _values: values, _pointers: pointers, parameters }
}

fn add_kernel(graph: u64, before: &[u64], function: u64, values: &[u64]) -> u64 {
    let (mut node, kernel) = (0, kernel(function, values));
    let (place, parameters) = (&raw mut node, &raw const kernel.parameters);
    ok!(cuGraphAddKernelNode_v2(place, graph, before.as_ptr(), before.len(), parameters));
    node
}

/// `CUDA_MEMCPY3D` of a flat copy; the kinds are host 1 and device 2.
fn copy(to: (u64, u64), from: (u64, u64), bytes: u64) -> [u64; 25] {
    let mut copy = [0; 25];
    for (start, (kind, address)) in [(0, from), (11, to)] {
        copy[start + 4] = kind;
        copy[start + if kind == 1 { 5 } else { 6 }] = address;
    }
    copy[22..].copy_from_slice(&[bytes, 1, 1]);
    copy
}

fn add_copy(graph: u64, before: &[u64], copy: &[u64; 25]) -> u64 {
    let mut node = 0;
    ok!(cuGraphAddMemcpyNode(&raw mut node, graph, before.as_ptr(), before.len(), copy, 0));
    node
}

/// `CUDA_MEMSET_NODE_PARAMS` of 4-byte elements in one row.
fn fill(to: u64, value: u32, width: u64) -> [u64; 5] {
    [to, 0, u64::from(value) | 4 << 32, width, 1]
}

fn add_fill(graph: u64, before: &[u64], fill: &[u64; 5]) -> u64 {
    let mut node = 0;
    ok!(cuGraphAddMemsetNode(&raw mut node, graph, before.as_ptr(), before.len(), fill, 0));
    node
}

extern "C" fn count(data: *mut c_void) {
    // SAFETY: the tests pass a counter that lives as long as the process.
    unsafe { &*data.cast::<AtomicU64>() }.fetch_add(1, Ordering::SeqCst);
}

fn counter() -> &'static AtomicU64 {
    Box::leak(Box::default())
}

fn pointer_to(counter: &'static AtomicU64) -> *mut c_void {
    ptr::from_ref(counter).cast_mut().cast()
}

fn host_call(counter: &'static AtomicU64) -> [u64; 2] {
    [(count as *const ()).addr() as u64, pointer_to(counter).addr() as u64]
}

// Promise: C60
#[test]
fn captured_chain_over_two_streams_replays_a_hundred_times() {
    let _context = Context::new();
    let module = module(ARITHMETIC);
    let (axpy, sum) = (function(module, "axpy"), function(module, "sum"));
    let n = 64_u64;
    let (x, y, z) = (allocate(8 * n), allocate(8 * n), allocate(8 * n));
    let totals = allocate(16);
    let mut results = [0_u64; 2];
    write(x, &(1..=n).collect::<Vec<u64>>());
    for address in [y, z] {
        ok!(cuMemsetD8_v2(address, 0, 8 * n));
    }
    ok!(cuCtxSynchronize());
    let (one, two) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
    let (forked, joined) = (event(), event());
    begin(one, GLOBAL);
    assert_eq!(launch(axpy, 1, 64, one, &mut [y, x, 1]), 0);
    ok!(cuEventRecord(forked, one));
    ok!(cuStreamWaitEvent(two, forked, 0));
    assert_eq!((status(one), status(two)), (1, 1));
    assert_eq!(launch(sum, 1, 1, one, &mut [totals, y, n]), 0);
    assert_eq!(launch(axpy, 1, 64, two, &mut [z, y, 2]), 0);
    assert_eq!(launch(sum, 1, 1, two, &mut [totals + 8, z, n]), 0);
    ok!(cuEventRecord(joined, two));
    ok!(cuStreamWaitEvent(one, joined, 0));
    ok!(cuMemcpyDtoHAsync_v2(results.as_mut_ptr().cast(), totals, 16, one));
    let captured = end(one);
    assert_eq!((status(one), status(two)), (0, 0));
    assert_eq!(read::<u64>(y, 1), [0], "nothing ran in the capture");
    assert_eq!(nodes(captured).iter().map(|node| kind(*node)).collect::<Vec<_>>(), [0, 0, 0, 0, 1]);
    let executable = instantiate(captured);
    ok!(cuGraphDestroy(captured));
    let (mut first, mut second) = (0, 0);
    for round in 1..=100 {
        run(executable, one);
        // y grows by x, and z by twice the new y.
        first += (1..=n).sum::<u64>();
        second += 2 * first;
        assert_eq!(results, [first, second], "round {round}");
    }
    ok!(cuGraphExecDestroy(executable));
}

// Promise: C60
#[test]
fn graph_of_every_kind_of_node_runs_them_in_order() {
    let _context = Context::new();
    let kernels = module(KERNELS);
    let (increment, store) = (function(kernels, "increment"), function(kernels, "store"));
    let (word, other) = (allocate(8), allocate(8));
    let (calls, recorded, outside) = (counter(), event(), event());
    let result = [0_u64];
    let at = result.as_ptr().addr() as u64;
    let graph = graph();
    let filled = add_fill(graph, &[], &fill(word, 0, 2));
    let inner = {
        let child = self::graph();
        let first = add_kernel(child, &[], increment, &[word]);
        add_kernel(child, &[first], increment, &[word]);
        child
    };
    let mut child = 0;
    ok!(cuGraphAddChildGraphNode(&raw mut child, graph, &filled, 1, inner));
    // The node has a graph of its own.
    ok!(cuGraphDestroy(inner));
    let (mut waited, mut called, mut empty, mut record, mut batch) = (0, 0, 0, 0, 0);
    ok!(cuGraphAddEventWaitNode(&raw mut waited, graph, &child, 1, outside));
    let call = host_call(calls);
    ok!(cuGraphAddHostNode(&raw mut called, graph, &waited, 1, &call));
    let stored = add_kernel(graph, &[], store, &[other, 5]);
    ok!(cuGraphAddEmptyNode(&raw mut empty, graph, [called, stored].as_ptr(), 2));
    let write_value = [2_u64, other, 7, 0, 0, 0];
    let operations = [0, 1, ptr::from_ref(&write_value).addr() as u64, 0];
    ok!(cuGraphAddBatchMemOpNode(&raw mut batch, graph, &empty, 1, &operations));
    let copied = add_copy(graph, &[empty], &copy((1, at), (2, word), 8));
    ok!(cuGraphAddEventRecordNode(&raw mut record, graph, [copied, batch].as_ptr(), 2, recorded));
    let all = [filled, child, waited, called, stored, empty, batch, copied, record];
    assert_eq!(nodes(graph), all);
    assert_eq!(all.map(kind), [2, 4, 6, 3, 0, 5, 12, 1, 7]);
    let executable = instantiate(graph);
    let queue = stream(NON_BLOCKING);
    for round in 1..=3 {
        ok!(cuGraphLaunch(executable, queue));
        ok!(cuEventSynchronize(recorded));
        // SAFETY: the graph has written the word, and its work is complete.
        assert_eq!(unsafe { result.as_ptr().read_volatile() }, 2);
        assert_eq!((calls.load(Ordering::SeqCst), read::<u64>(other, 1)[0]), (round, 7));
    }
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
}

// Promise: C60
#[test]
fn event_node_waits_for_the_latest_record_outside_of_the_graph() {
    let _context = Context::new();
    let kernels = module(KERNELS);
    let (spin, increment) = (function(kernels, "spin"), function(kernels, "increment"));
    let (flag, word, outside) = (Flag::new(), allocate(8), event());
    write(word, &[0_u64]);
    let graph = graph();
    let mut waited = 0;
    ok!(cuGraphAddEventWaitNode(&raw mut waited, graph, ptr::null(), 0, outside));
    add_kernel(graph, &[waited], increment, &[word]);
    let executable = instantiate(graph);
    let (one, two) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
    assert_eq!(launch(spin, 1, 1, one, &mut [flag.address()]), 0);
    ok!(cuEventRecord(outside, one));
    ok!(cuGraphLaunch(executable, two));
    a_moment();
    assert_eq!(cu!(cuStreamQuery(two)), NOT_READY);
    flag.set(1);
    ok!(cuStreamSynchronize(two));
    assert_eq!(read::<u64>(word, 1), [1]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
}

// Promise: C60
#[test]
fn launches_of_one_executable_graph_follow_each_other_in_all_streams() {
    let _context = Context::new();
    let kernels = module(KERNELS);
    let (spin, increment) = (function(kernels, "spin"), function(kernels, "increment"));
    let (flag, word) = (Flag::new(), allocate(8));
    write(word, &[0_u64]);
    let graph = graph();
    let first = add_kernel(graph, &[], increment, &[word]);
    add_kernel(graph, &[first], spin, &[flag.address()]);
    let executable = instantiate(graph);
    let (one, two, free) = (stream(NON_BLOCKING), stream(NON_BLOCKING), stream(NON_BLOCKING));
    let value = || {
        let mut value = [0_u64];
        ok!(cuMemcpyDtoHAsync_v2(value.as_mut_ptr().cast(), word, 8, free));
        ok!(cuStreamSynchronize(free));
        value[0]
    };
    ok!(cuGraphLaunch(executable, one));
    ok!(cuGraphLaunch(executable, two));
    // Destroying both objects ends no work.
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    while value() == 0 {
        std::thread::yield_now();
    }
    a_moment();
    assert_eq!(value(), 1, "the second launch waits for the first");
    assert_eq!((cu!(cuStreamQuery(one)), cu!(cuStreamQuery(two))), (NOT_READY, NOT_READY));
    flag.set(1);
    ok!(cuStreamSynchronize(two));
    ok!(cuStreamQuery(one));
    assert_eq!(value(), 2);
}

// Promise: C60
#[test]
fn nodes_of_an_executable_graph_take_new_parameters_one_by_one() {
    let context = Context::new();
    let kernels = module(KERNELS);
    let (store, load) = (function(kernels, "store"), function(kernels, "load"));
    let (a, b) = (allocate(8), allocate(8));
    let (calls, others) = (counter(), counter());
    let results = [0_u64; 2];
    let at = |index: usize| results.as_ptr().wrapping_add(index).addr() as u64;
    let graph = graph();
    let filled = add_fill(graph, &[], &fill(b, 1, 2));
    let stored = add_kernel(graph, &[filled], store, &[a, 5]);
    let copied = add_copy(graph, &[stored], &copy((1, at(0)), (2, a), 8));
    let (mut called, mut child, mut record) = (0, 0, 0);
    let call = host_call(calls);
    ok!(cuGraphAddHostNode(&raw mut called, graph, &copied, 1, &call));
    let inner = self::graph();
    add_fill(inner, &[], &fill(b, 3, 1));
    ok!(cuGraphAddChildGraphNode(&raw mut child, graph, &called, 1, inner));
    let (early, late) = (event(), event());
    ok!(cuGraphAddEventRecordNode(&raw mut record, graph, &child, 1, early));
    let executable = instantiate(graph);
    run(executable, 0);
    // SAFETY: the graph has written the words, and its work is complete.
    let result = |index: usize| unsafe { results.as_ptr().wrapping_add(index).read_volatile() };
    assert_eq!((result(0), calls.load(Ordering::SeqCst), read::<u32>(b, 2)), (5, 1, vec![3, 1]));

    // Another function with other parameters, another place, another value, another host function, another child.
    write(b, &[99_u64]);
    let other = kernel(load, &[b, a]);
    ok!(cuGraphExecKernelNodeSetParams_v2(executable, stored, &raw const other.parameters));
    ok!(cuGraphExecMemcpyNodeSetParams(executable, copied, &copy((1, at(1)), (2, a), 8), context.handle));
    ok!(cuGraphExecMemsetNodeSetParams(executable, filled, &fill(b, 7, 2), context.handle));
    let call = host_call(others);
    ok!(cuGraphExecHostNodeSetParams(executable, called, &call));
    let changed = self::graph();
    add_fill(changed, &[], &fill(b, 4, 1));
    ok!(cuGraphExecChildGraphNodeSetParams(executable, child, changed));
    ok!(cuGraphExecEventRecordNodeSetEvent(executable, record, late));
    run(executable, 0);
    assert_eq!((result(0), result(1)), (5, 7 | 7 << 32));
    assert_eq!((calls.load(Ordering::SeqCst), others.load(Ordering::SeqCst)), (1, 1));
    assert_eq!(read::<u32>(b, 2), [4, 7]);
    let mut span = 0.0;
    ok!(cuEventElapsedTime_v2(&raw mut span, early, late));

    // The graph itself has not changed.
    let mut found = [0; 5];
    ok!(cuGraphMemsetNodeGetParams(filled, &raw mut found));
    assert_eq!(found, fill(b, 1, 2));
    // A disabled node keeps its place in the order.
    let mut enabled = 9;
    ok!(cuGraphNodeSetEnabled(executable, filled, 0));
    ok!(cuGraphNodeGetEnabled(executable, filled, &raw mut enabled));
    assert_eq!(enabled, 0);
    write(b, &[50_u64]);
    run(executable, 0);
    assert_eq!(result(1), 50);
    ok!(cuGraphNodeSetEnabled(executable, filled, 1));
    run(executable, 0);
    assert_eq!(result(1), 7 | 7 << 32);

    // Refused: a node that cannot be disabled, a node of another graph, another kind, another kind of memory, several rows.
    assert_eq!(cu!(cuGraphNodeSetEnabled(executable, called, 0)), INVALID_VALUE);
    let foreign = add_fill(changed, &[], &fill(b, 4, 1));
    assert_eq!(cu!(cuGraphExecMemsetNodeSetParams(executable, foreign, &fill(b, 7, 2), 0)), INVALID_VALUE);
    let parameters = &raw const other.parameters;
    assert_eq!(cu!(cuGraphExecKernelNodeSetParams_v2(executable, copied, parameters)), INVALID_VALUE);
    let turned = copy((2, a), (1, at(0)), 8);
    assert_eq!(cu!(cuGraphExecMemcpyNodeSetParams(executable, copied, &turned, 0)), INVALID_VALUE);
    let mut rows = copy((1, at(1)), (2, a), 4);
    rows[23] = 2;
    assert_eq!(cu!(cuGraphExecMemcpyNodeSetParams(executable, copied, &rows, 0)), INVALID_VALUE);
    let mut rows = fill(b, 7, 1);
    (rows[1], rows[4]) = (4, 2);
    assert_eq!(cu!(cuGraphExecMemsetNodeSetParams(executable, filled, &rows, 0)), INVALID_VALUE);
    let added = add_fill(graph, &[], &fill(b, 4, 1));
    assert_eq!(cu!(cuGraphExecMemsetNodeSetParams(executable, added, &fill(b, 4, 1), 0)), INVALID_VALUE);
    run(executable, 0);
    assert_eq!(result(1), 7 | 7 << 32, "refused calls change nothing");
    for graph in [graph, inner, changed] {
        ok!(cuGraphDestroy(graph));
    }
    assert_eq!(cu!(cuGraphNodeSetEnabled(executable, filled, 0)), INVALID_VALUE, "its graph is gone");
    run(executable, 0);
    ok!(cuGraphExecDestroy(executable));
}

// Promise: C60
#[test]
fn executable_graph_takes_the_work_of_another_graph() {
    let _context = Context::new();
    let kernels = module(KERNELS);
    let (store, increment) = (function(kernels, "store"), function(kernels, "increment"));
    let (word, queue) = (allocate(8), stream(NON_BLOCKING));
    let record = |value: u64| {
        begin(queue, THREAD_LOCAL);
        assert_eq!(launch(store, 1, 1, queue, &mut [word, value]), 0);
        assert_eq!(launch(increment, 1, 1, queue, &mut [word]), 0);
        end(queue)
    };
    let first = record(10);
    let executable = instantiate(first);
    for value in [20, 30, 40] {
        let next = record(value);
        let mut result = [9; 3];
        ok!(cuGraphExecUpdate_v2(executable, next, &raw mut result));
        assert_eq!((result[0] & 0xffff_ffff, &result[1..]), (0, &[0, 0][..]));
        ok!(cuGraphDestroy(next));
        run(executable, queue);
        assert_eq!(read::<u64>(word, 1), [value + 1]);
    }
    // A node more, and a node of another kind.
    let longer = record(50);
    let last = nodes(longer)[1];
    add_kernel(longer, &[last], increment, &[word]);
    let mut result = [9; 3];
    assert_eq!(cu!(cuGraphExecUpdate_v2(executable, longer, &raw mut result)), UPDATE_FAILURE);
    assert_eq!((result[0] & 0xffff_ffff, &result[1..]), (2, &[0, 0][..]));
    let other = graph();
    let begun = add_kernel(other, &[], store, &[word, 60]);
    let filled = add_fill(other, &[begun], &fill(word, 0, 2));
    let (mut node, mut code) = (0, 9);
    assert_eq!(cu!(cuGraphExecUpdate(executable, other, &raw mut node, &raw mut code)), UPDATE_FAILURE);
    assert_eq!((node, code), (filled, 3));
    run(executable, queue);
    assert_eq!(read::<u64>(word, 1), [41], "a failed update changes nothing");
}

// Promise: C60
#[test]
fn parameters_of_nodes_are_copied_and_returned() {
    let context = Context::new();
    let kernels = module(KERNELS);
    let (store, increment) = (function(kernels, "store"), function(kernels, "increment"));
    let word = allocate(16);
    let graph = graph();
    let node = add_kernel(graph, &[], store, &[word, 77]);
    let mut found = kernel(0, &[]).parameters;
    ok!(cuGraphKernelNodeGetParams_v2(node, &raw mut found));
    assert_eq!((found.function, found.grid, found.extra), (store, [1; 3], 0));
    let values = |found: &KernelParameters| {
        // SAFETY: the driver returns an array of two pointers.
        let [first, second] = unsafe { found.parameters.cast::<[*const u64; 2]>().read() };
        // SAFETY: each of them points to a word.
        let first = unsafe { first.read() };
        // SAFETY: the same.
        [first, unsafe { second.read() }]
    };
    assert_eq!(values(&found), [word, 77]);
    // The first form of the structure ends before the last two fields.
    found = KernelParameters { kernel: 3, context: 4, ..kernel(0, &[]).parameters };
    ok!(cuGraphKernelNodeGetParams(node, &raw mut found));
    assert_eq!((found.function, values(&found)[1], found.kernel, found.context), (store, 77, 3, 4));
    // The parameters that a query returned make the same node.
    let mut second = 0;
    ok!(cuGraphAddKernelNode(&raw mut second, graph, &node, 1, &raw const found));
    let changed = kernel(increment, &[word]);
    ok!(cuGraphKernelNodeSetParams_v2(second, &raw const changed.parameters));

    let mut parameters = [0_u64; 32];
    ok!(cuGraphNodeGetParams(node, &raw mut parameters));
    assert_eq!((parameters[0], parameters[2], parameters[31]), (0, store, 0));
    let mut third = 0;
    let place = &raw mut parameters;
    ok!(cuGraphAddNode_v2(&raw mut third, graph, &second, ptr::null(), 1, place));
    ok!(cuGraphDestroyNode(third));
    parameters[31] = 1;
    let place = &raw mut parameters;
    let added = cu!(cuGraphAddNode_v2(&raw mut third, graph, &second, ptr::null(), 1, place));
    assert_eq!(added, INVALID_VALUE, "reserved bytes");

    let described = copy((2, word + 8), (2, word), 8);
    let copied = add_copy(graph, &[second], &described);
    let mut found = [9; 25];
    ok!(cuGraphMemcpyNodeGetParams(copied, &raw mut found));
    assert_eq!(found, described);
    ok!(cuGraphNodeGetParams(copied, &raw mut parameters));
    assert_eq!((parameters[0], parameters[3], &parameters[4..29]), (1, context.handle, &described[..]));
    // The destination, as `cuGraphNodeSetParams` gets it.
    parameters[4 + 11 + 6] = word;
    parameters[4 + 6] = word + 8;
    ok!(cuGraphNodeSetParams(copied, &raw mut parameters));
    let executable = instantiate(graph);
    write(word, &[0_u64, 5]);
    run(executable, 0);
    assert_eq!(read::<u64>(word, 2), [5, 5]);
}

// Promise: C60
#[test]
fn attributes_of_kernel_nodes_are_kept_and_copied() {
    let _context = Context::new();
    let increment = function(module(KERNELS), "increment");
    let word = allocate(8);
    let graph = graph();
    let first = add_kernel(graph, &[], increment, &[word]);
    let second = add_kernel(graph, &[first], increment, &[word]);
    let mut value = [0_u32; 16];
    value[0] = 1;
    // Cooperative.
    ok!(cuGraphKernelNodeSetAttribute(first, 2, &value));
    ok!(cuGraphKernelNodeCopyAttributes(second, first));
    let mut found = [9; 16];
    ok!(cuGraphKernelNodeGetAttribute(second, 2, &raw mut found));
    assert_eq!(found, value);
    ok!(cuGraphKernelNodeGetAttribute(second, 8, &raw mut found));
    assert_eq!(found[0], 0, "the priority was not set");
    // New parameters leave the attributes as they are.
    let same = kernel(increment, &[word]);
    ok!(cuGraphKernelNodeSetParams_v2(second, &raw const same.parameters));
    ok!(cuGraphKernelNodeGetAttribute(second, 2, &raw mut found));
    assert_eq!(found, value);
    assert_eq!(cu!(cuGraphKernelNodeSetAttribute(first, 99, &value)), INVALID_VALUE);
    assert_eq!(cu!(cuGraphKernelNodeSetAttribute(first, 13, &value)), NOT_SUPPORTED);
    // Clusters have one block here.
    assert_eq!(cu!(cuGraphKernelNodeSetAttribute(first, 4, &[2; 16])), 912);
    let executable = instantiate(graph);
    write(word, &[0_u64]);
    run(executable, 0);
    assert_eq!(read::<u64>(word, 1), [2]);
}

// Promise: C60
#[test]
fn edges_nodes_and_clones_are_listed() {
    let _context = Context::new();
    let graph = graph();
    let mut made = [0; 4];
    for node in &mut made {
        ok!(cuGraphAddEmptyNode(node, graph, ptr::null(), 0));
    }
    let [a, b, c, d] = made;
    let (from, to) = ([a, a, b, c], [b, c, d, d]);
    ok!(cuGraphAddDependencies(graph, from.as_ptr(), to.as_ptr(), 4));
    assert_eq!(cu!(cuGraphAddDependencies(graph, from.as_ptr(), to.as_ptr(), 1)), INVALID_VALUE);
    let (mut first, mut last, mut data, mut count) = ([9; 6], [9; 6], [[9; 8]; 6], 6);
    let places = (first.as_mut_ptr(), last.as_mut_ptr(), data.as_mut_ptr());
    ok!(cuGraphGetEdges_v2(graph, places.0, places.1, places.2, &raw mut count));
    assert_eq!((count, first, last), (4, [a, a, b, c, 0, 0], [b, c, d, d, 0, 0]));
    assert_eq!(data, [[0; 8]; 6]);
    count = 1;
    ok!(cuGraphGetRootNodes(graph, first.as_mut_ptr(), &raw mut count));
    assert_eq!((count, first[0]), (1, a));
    count = 6;
    ok!(cuGraphNodeGetDependencies(d, first.as_mut_ptr(), &raw mut count));
    assert_eq!((count, &first[..3]), (2, &[b, c, 0][..]));
    ok!(cuGraphNodeGetDependentNodes(a, first.as_mut_ptr(), &raw mut count));
    assert_eq!((count, &first[..2]), (2, &[b, c][..]));
    let (mut clone, mut found, mut id, mut other) = (0, 0, 0, 0);
    ok!(cuGraphClone(&raw mut clone, graph));
    ok!(cuGraphNodeFindInClone(&raw mut found, d, clone));
    assert_eq!(nodes(clone)[3], found);
    ok!(cuGraphNodeGetLocalId(found, &raw mut id));
    ok!(cuGraphNodeGetContainingGraph(found, &raw mut other));
    assert_eq!((id, other), (3, clone));
    let (mut one, mut two) = (0, 0);
    ok!(cuGraphGetId(graph, &raw mut one));
    ok!(cuGraphGetId(clone, &raw mut two));
    assert_ne!(one, two);
    ok!(cuGraphRemoveDependencies(graph, &a, &b, 1));
    assert_eq!(cu!(cuGraphRemoveDependencies(graph, &a, &b, 1)), INVALID_VALUE);
    ok!(cuGraphDestroyNode(d));
    assert_eq!((nodes(graph).len(), nodes(clone).len()), (3, 4));
    let path = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    let name = text(path.path().to_str().unwrap());
    ok!(cuGraphDebugDotPrint(graph, name.as_ptr(), 1));
    let dot = std::fs::read_to_string(path.path()).unwrap();
    assert!(dot.contains(&format!("\"graph_{one}_node_0\" -> \"graph_{one}_node_2\"")), "{dot}");
}

// Promise: C60
#[test]
fn edge_data_is_kept_and_is_not_lost_in_a_query_without_room_for_it() {
    const LOSSY_QUERY: u32 = 402;
    let _context = Context::new();
    let increment = function(module(KERNELS), "increment");
    let (word, graph) = (allocate(8), graph());
    write(word, &[0_u64]);
    let first = add_kernel(graph, &[], increment, &[word]);
    let second = add_kernel(graph, &[], increment, &[word]);
    // The second kernel may begin when the first one permits it.
    let early = [1, 0, 1, 0, 0, 0, 0, 0];
    for wrong in [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 9], [0, 0, 1, 0, 0, 0, 0, 0]] {
        let added = cu!(cuGraphAddDependencies_v2(graph, &first, &second, &wrong, 1));
        assert_eq!(added, INVALID_VALUE, "{wrong:?}");
    }
    ok!(cuGraphAddDependencies_v2(graph, &first, &second, &early, 1));
    let (mut from, mut to, mut data, mut count) = (0, 0, [9; 8], 1);
    ok!(cuGraphGetEdges_v2(graph, &raw mut from, &raw mut to, &raw mut data, &raw mut count));
    assert_eq!((from, to, data, count), (first, second, early, 1));
    let none = ptr::null_mut();
    let lossy = cu!(cuGraphGetEdges_v2(graph, &raw mut from, &raw mut to, none, &raw mut count));
    assert_eq!(lossy, LOSSY_QUERY);
    assert_eq!(cu!(cuGraphNodeGetDependencies(second, &raw mut from, &raw mut count)), LOSSY_QUERY);
    let outer = self::graph();
    let (mut child, mut inner) = (0, 0);
    ok!(cuGraphAddChildGraphNode(&raw mut child, outer, ptr::null(), 0, graph));
    ok!(cuGraphChildGraphNodeGetGraph(child, &raw mut inner));
    assert_ne!(inner, graph);
    assert_eq!((nodes(inner).len(), cu!(cuGraphDestroy(inner))), (2, INVALID_VALUE));
    run(instantiate(outer), 0);
    assert_eq!(read::<u64>(word, 1), [2]);
}

// Promise: C60
#[test]
fn graph_with_a_cycle_is_not_instantiated() {
    let _context = Context::new();
    let graph = graph();
    let (mut a, mut b) = (0, 0);
    ok!(cuGraphAddEmptyNode(&raw mut a, graph, ptr::null(), 0));
    ok!(cuGraphAddEmptyNode(&raw mut b, graph, &a, 1));
    ok!(cuGraphAddDependencies(graph, &b, &a, 1));
    let mut executable = 0;
    assert_eq!(cu!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)), INVALID_VALUE);
    let mut parameters = [0_u64; 4];
    let place = &raw mut parameters;
    assert_eq!(cu!(cuGraphInstantiateWithParams(&raw mut executable, graph, place)), INVALID_VALUE);
    assert_eq!((parameters[2], parameters[3] & 0xffff_ffff), (a, 2));
    let (mut node, mut words) = (0, [1; 64]);
    let place = (&raw mut node, words.as_mut_ptr());
    let made = cu!(cuGraphInstantiate_v2(&raw mut executable, graph, place.0, place.1, 64));
    assert_eq!((made, node, words.contains(&0)), (INVALID_VALUE, a, true));
    ok!(cuGraphRemoveDependencies(graph, &b, &a, 1));
    // Upload, in a stream.
    (parameters, executable) = ([2, 0, 9, 9], 0);
    ok!(cuGraphInstantiateWithParams(&raw mut executable, graph, &raw mut parameters));
    assert_eq!((parameters[2], parameters[3] & 0xffff_ffff), (0, 0));
    let mut flags = 9;
    ok!(cuGraphExecGetFlags(executable, &raw mut flags));
    assert_eq!(flags, 2);
    ok!(cuGraphUpload(executable, 0));
    run(executable, 0);
    assert_eq!(cu!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 2)), INVALID_VALUE);
    assert_eq!(cu!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 16)), INVALID_VALUE);
}

// Promise: C60
#[test]
fn user_objects_live_until_the_last_launch_that_needs_them() {
    let _context = Context::new();
    let spin = function(module(KERNELS), "spin");
    let (ended, flag) = (counter(), Flag::new());
    let graph = graph();
    add_kernel(graph, &[], spin, &[flag.address()]);
    let mut object = 0;
    ok!(cuUserObjectCreate(&raw mut object, pointer_to(ended), count, 1, 1));
    ok!(cuGraphRetainUserObject(graph, object, 1, 1));
    let executable = instantiate(graph);
    ok!(cuGraphDestroy(graph));
    ok!(cuGraphLaunch(executable, 0));
    ok!(cuGraphExecDestroy(executable));
    a_moment();
    assert_eq!(ended.load(Ordering::SeqCst), 0, "the launch still runs");
    flag.set(1);
    ok!(cuCtxSynchronize());
    // The executor drops the graph after the work that a synchronisation waits for.
    while ended.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(cu!(cuUserObjectRelease(object, 1)), INVALID_VALUE);
    assert_eq!(ended.load(Ordering::SeqCst), 1);
}

// Promise: C60
#[test]
fn operations_of_every_kind_become_nodes() {
    let _context = Context::new();
    let kernels = module(KERNELS);
    let increment = function(kernels, "increment");
    let (word, other, queue, calls) = (allocate(8), allocate(8), stream(0), counter());
    let (outside, inside) = (event(), event());
    let inner = graph();
    add_kernel(inner, &[], increment, &[word]);
    let executable = instantiate(inner);
    let source = [40_u64];
    begin(queue, RELAXED);
    ok!(cuMemcpyHtoDAsync_v2(word, source.as_ptr().cast(), 8, queue));
    assert_eq!(launch(increment, 1, 1, queue, &mut [word]), 0);
    ok!(cuGraphLaunch(executable, queue));
    ok!(cuMemcpyDtoDAsync_v2(other, word, 8, queue));
    ok!(cuMemsetD8Async(word, 1, 8, queue));
    ok!(cuStreamWriteValue32_v2(queue, word, 9, 0));
    ok!(cuLaunchHostFunc(queue, count, pointer_to(calls)));
    ok!(cuStreamWaitEvent(queue, outside, 1));
    ok!(cuEventRecordWithFlags(inside, queue, 1));
    // Work of no size adds no node, and captured events add none.
    ok!(cuMemsetD8Async(word, 1, 0, queue));
    ok!(cuEventRecord(outside, queue));
    let captured = end(queue);
    let kinds: Vec<u32> = nodes(captured).iter().map(|node| kind(*node)).collect();
    assert_eq!(kinds, [1, 0, 4, 1, 2, 12, 3, 6, 7]);
    let replay = instantiate(captured);
    for _ in 0..2 {
        run(replay, queue);
        let expected = 9 | 0x0101_0101 << 32;
        assert_eq!((read::<u64>(other, 1)[0], read::<u64>(word, 1)[0]), (42, expected));
    }
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    ok!(cuEventQuery(inside));
    // Memory of the program is read at each launch.
    // SAFETY: no launch reads the word now.
    unsafe { source.as_ptr().cast_mut().write_volatile(50) };
    run(replay, queue);
    assert_eq!(read::<u64>(other, 1), [52]);
}

// Promise: C60
#[test]
fn capture_into_a_graph_and_its_dependencies() {
    let _context = Context::new();
    let increment = function(module(KERNELS), "increment");
    let (word, queue) = (allocate(8), stream(NON_BLOCKING));
    let graph = graph();
    let (mut root, mut extra) = (0, 0);
    ok!(cuGraphAddEmptyNode(&raw mut root, graph, ptr::null(), 0));
    ok!(cuStreamBeginCaptureToGraph(queue, graph, &root, ptr::null(), 1, GLOBAL));
    let (mut state, mut id, mut found, mut list, mut length) = (9, 0, 0, ptr::null::<u64>(), 0);
    let info = (&raw mut state, &raw mut id, &raw mut found, &raw mut list, &raw mut length);
    ok!(cuStreamGetCaptureInfo_v2(queue, info.0, info.1, info.2, info.3, info.4));
    // SAFETY: the list has one node.
    assert_eq!((state, found, length, unsafe { *list }), (1, graph, 1, root));
    assert_ne!(id, 0);
    // A program may add nodes itself, and let the stream continue behind them.
    ok!(cuGraphAddEmptyNode(&raw mut extra, graph, &root, 1));
    ok!(cuStreamUpdateCaptureDependencies(queue, &extra, 1, 1));
    assert_eq!(launch(increment, 1, 1, queue, &mut [word]), 0);
    assert_eq!(cu!(cuGraphDestroy(graph)), INVALID_VALUE);
    let mut executable = 0;
    assert_eq!(cu!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)), INVALID_VALUE);
    assert_eq!(end(queue), graph);
    let last = nodes(graph)[2];
    let (mut before, mut count) = ([0; 2], 2);
    ok!(cuGraphNodeGetDependencies(last, before.as_mut_ptr(), &raw mut count));
    assert_eq!((count, before), (1, [extra, 0]));
    let idle = cu!(cuStreamUpdateCaptureDependencies(queue, &extra, 1, 1));
    assert_eq!(idle, ILLEGAL_STATE);
    write(word, &[0_u64]);
    run(instantiate(graph), queue);
    assert_eq!(read::<u64>(word, 1), [1]);
}

/// Begins a capture, makes a call that must fail with this code, and checks that the capture is invalid.
fn invalidates(queue: u64, mode: u32, expected: u32, call: impl FnOnce() -> u32) {
    begin(queue, mode);
    assert_eq!(call(), expected);
    assert_eq!(status(queue), 2);
    assert_eq!(cu!(cuMemsetD8Async(0, 1, 8, queue)), INVALIDATED);
    assert_eq!(failed_end(queue), INVALIDATED);
    assert_eq!(status(queue), 0);
}

// Promise: C60
#[test]
fn calls_that_a_capture_does_not_allow_fail_and_invalidate_it() {
    extern "C" fn callback(_: u64, _: u32, _: *mut c_void) {}

    let _context = Context::new();
    let (queue, blocking, other) = (stream(NON_BLOCKING), stream(0), stream(NON_BLOCKING));
    let (word, mark, outside) = (allocate(8), event(), event());
    let (mut address, mut value) = (0, [0_u64]);
    let place = value.as_mut_ptr().cast::<c_void>();
    ok!(cuEventRecord(outside, other));
    ok!(cuCtxSynchronize());

    // Waits for a captured stream, its context and its events, even if the capture is relaxed.
    invalidates(queue, RELAXED, UNSUPPORTED, || cu!(cuStreamSynchronize(queue)));
    invalidates(queue, RELAXED, UNSUPPORTED, || cu!(cuStreamQuery(queue)));
    invalidates(queue, RELAXED, UNSUPPORTED, || cu!(cuCtxSynchronize()));
    invalidates(queue, RELAXED, CAPTURED_EVENT, || {
        ok!(cuEventRecord(mark, queue));
        cu!(cuEventQuery(mark))
    });
    invalidates(queue, RELAXED, CAPTURED_EVENT, || {
        ok!(cuEventRecord(mark, queue));
        cu!(cuEventSynchronize(mark))
    });
    // Operations without a node.
    // A free of memory that is none of a graph's leaves the capture as it is.
    begin(queue, RELAXED);
    ok!(cuMemAllocAsync(&raw mut address, 8, queue));
    assert_eq!(cu!(cuMemFreeAsync(word, queue)), INVALID_VALUE);
    ok!(cuMemFreeAsync(address, queue));
    ok!(cuGraphDestroy(end(queue)));
    invalidates(queue, RELAXED, UNSUPPORTED, || cu!(cuStreamAddCallback(queue, callback, place, 0)));
    // Calls that are potentially unsafe.
    invalidates(queue, GLOBAL, UNSUPPORTED, || cu!(cuMemAlloc_v2(&raw mut address, 8)));
    invalidates(queue, THREAD_LOCAL, UNSUPPORTED, || cu!(cuMemFree_v2(word)));
    invalidates(queue, GLOBAL, UNSUPPORTED, || cu!(cuMemHostAlloc((&raw mut address).cast(), 8, 0)));
    invalidates(queue, GLOBAL, UNSUPPORTED, || cu!(cuMemcpyDtoH_v2(place, word, 8)));
    invalidates(queue, GLOBAL, UNSUPPORTED, || cu!(cuMemsetD8_v2(word, 0, 8)));
    invalidates(queue, GLOBAL, UNSUPPORTED, || cu!(cuEventQuery(outside)));
    // The legacy stream beside a blocking one.
    invalidates(blocking, RELAXED, IMPLICIT, || cu!(cuMemsetD8Async(word, 0, 8, 0)));
    invalidates(blocking, RELAXED, IMPLICIT, || cu!(cuMemcpyDtoH_v2(place, word, 8)));
    invalidates(blocking, RELAXED, IMPLICIT, || cu!(cuStreamSynchronize(0)));
    invalidates(blocking, RELAXED, IMPLICIT, || cu!(cuEventRecord(mark, 0)));
    // Events from outside, and of another capture.
    invalidates(queue, RELAXED, ISOLATION, || cu!(cuStreamWaitEvent(queue, outside, 0)));
    begin(other, RELAXED);
    invalidates(queue, RELAXED, MERGE, || {
        ok!(cuEventRecord(mark, other));
        cu!(cuStreamWaitEvent(queue, mark, 0))
    });
    assert_eq!(failed_end(other), INVALIDATED);
    // The wrong stream.
    invalidates(queue, RELAXED, UNMATCHED, || {
        ok!(cuEventRecord(mark, queue));
        ok!(cuStreamWaitEvent(other, mark, 0));
        failed_end(other)
    });
    assert_eq!(status(other), 0);

    // A relaxed capture, and a relaxed thread, allow unsafe calls.
    begin(queue, RELAXED);
    ok!(cuMemAlloc_v2(&raw mut address, 8));
    ok!(cuMemcpyDtoH_v2(place, word, 8));
    ok!(cuGraphDestroy(end(queue)));
    let mut mode = RELAXED;
    ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    assert_eq!(mode, GLOBAL);
    begin(queue, GLOBAL);
    ok!(cuMemFree_v2(address));
    ok!(cuGraphDestroy(end(queue)));
    ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    assert_eq!(mode, RELAXED);
    // A number that is no mode is taken, and prohibits as much as the strictest mode.
    mode = 3;
    ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    invalidates(queue, GLOBAL, UNSUPPORTED, || cu!(cuMemAlloc_v2(&raw mut address, 8)));
    mode = GLOBAL;
    ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    assert_eq!(mode, 3);
}

// Promise: C60
#[test]
fn capture_with_an_open_fork_or_in_a_wrong_state_does_not_end_or_begin() {
    let _context = Context::new();
    let increment = function(module(KERNELS), "increment");
    let (queue, other) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
    let (word, mark) = (allocate(8), event());
    write(word, &[0_u64]);
    begin(queue, GLOBAL);
    assert_eq!(cu!(cuStreamBeginCapture_v2(queue, GLOBAL)), ILLEGAL_STATE);
    ok!(cuEventRecord(mark, queue));
    ok!(cuStreamWaitEvent(other, mark, 0));
    assert_eq!(launch(increment, 1, 1, other, &mut [word]), 0);
    assert_eq!(failed_end(queue), UNJOINED);
    assert_eq!((status(queue), status(other)), (0, 0));
    assert_eq!(failed_end(queue), ILLEGAL_STATE);
    assert_eq!(cu!(cuStreamBeginCapture_v2(0, GLOBAL)), UNSUPPORTED);
    assert_eq!(cu!(cuStreamBeginCapture_v2(queue, 3)), INVALID_VALUE);
    // External flags outside of a capture.
    assert_eq!(cu!(cuStreamWaitEvent(queue, mark, 1)), ILLEGAL_STATE);
    assert_eq!(cu!(cuEventRecordWithFlags(mark, queue, 1)), ILLEGAL_STATE);
    // The event is still one of a capture until it is recorded again.
    assert_eq!(cu!(cuEventQuery(mark)), CAPTURED_EVENT);
    ok!(cuEventRecord(mark, queue));
    ok!(cuEventSynchronize(mark));
    // A failed launch leaves the capture as it is.
    begin(queue, GLOBAL);
    assert_eq!(launch(increment, 1, 4096, queue, &mut [word]), INVALID_VALUE);
    assert_eq!(launch(increment, 1, 1, queue, &mut [word]), 0);
    let captured = end(queue);
    assert_eq!(nodes(captured).len(), 1);
    // With its origin a capture ends.
    begin(queue, GLOBAL);
    assert_eq!(launch(increment, 1, 1, queue, &mut [word]), 0);
    ok!(cuStreamDestroy_v2(queue));
    ok!(cuMemFree_v2(allocate(8)));
    assert_eq!(read::<u64>(word, 1), [0]);
}

// Promise: C60
#[test]
fn capture_is_ended_by_its_thread_and_guards_others_by_its_mode() {
    let context = Context::new();
    let (queue, failures) = (stream(NON_BLOCKING), AtomicU32::new(0));
    let elsewhere = |action: &(dyn Fn() -> u32 + Sync)| {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                ok!(cuCtxSetCurrent(context.handle));
                failures.store(action(), Ordering::SeqCst);
            });
            thread.join().unwrap();
        });
        failures.load(Ordering::SeqCst)
    };
    let unsafe_call = || {
        let mut address = 0;
        cu!(cuMemAlloc_v2(&raw mut address, 8))
    };
    for (mode, end_code, call_code) in
        [(GLOBAL, WRONG_THREAD, UNSUPPORTED), (THREAD_LOCAL, WRONG_THREAD, 0), (RELAXED, 0, 0)]
    {
        begin(queue, mode);
        assert_eq!(elsewhere(&unsafe_call), call_code, "mode {mode}");
        let mut graph = 0;
        if call_code == 0 {
            let code = elsewhere(&|| {
                let mut graph = 0;
                cu!(cuStreamEndCapture(queue, &raw mut graph))
            });
            assert_eq!(code, end_code, "mode {mode}");
        }
        let code = cu!(cuStreamEndCapture(queue, &raw mut graph));
        let expected = match mode {
            GLOBAL => INVALIDATED,
            THREAD_LOCAL => 0,
            _ => ILLEGAL_STATE,
        };
        assert_eq!(code, expected, "mode {mode}");
    }
}

// Promise: C60
#[test]
fn stale_and_foreign_handles_are_refused() {
    let _context = Context::new();
    let graph = graph();
    let mut node = 0;
    ok!(cuGraphAddEmptyNode(&raw mut node, graph, ptr::null(), 0));
    let executable = instantiate(graph);
    let queue = stream(0);
    let mut place = 0;
    let stale = self::graph();
    ok!(cuGraphDestroy(stale));
    for handle in [0, 1, stale, node, executable, queue, u64::MAX] {
        assert_eq!(cu!(cuGraphDestroy(handle)), INVALID_VALUE);
        assert_eq!(cu!(cuGraphClone(&raw mut place, handle)), INVALID_VALUE);
    }
    for handle in [0, 1, graph, node, queue] {
        assert_eq!(cu!(cuGraphExecDestroy(handle)), INVALID_VALUE);
        assert_eq!(cu!(cuGraphLaunch(handle, queue)), INVALID_VALUE);
    }
    let mut kind = 0;
    for handle in [0, graph, executable] {
        assert_eq!(cu!(cuGraphNodeGetType(handle, &raw mut kind)), INVALID_VALUE);
        assert_eq!(cu!(cuGraphDestroyNode(handle)), INVALID_VALUE);
    }
    ok!(cuGraphDestroy(graph));
    ok!(cuGraphExecDestroy(executable));
    assert_eq!(cu!(cuGraphDestroyNode(node)), INVALID_VALUE, "its graph is gone");
    assert_eq!(cu!(cuGraphExecDestroy(executable)), INVALID_VALUE);
    assert_eq!(cu!(cuGraphCreate(ptr::null_mut(), 0)), INVALID_VALUE);
}

const CONDITIONAL: &str = r"
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);
.visible .entry choose(.param .u64 handle, .param .u64 value)
{
    .reg .b32 %r<2>; .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [handle]; ld.param.u32 %r0, [value];
    {
        .param .b64 first; .param .b32 second;
        st.param.b64 [first], %rd0; st.param.b32 [second], %r0;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;
}
";

/// A new handle, whose value is 1 at the begin of a launch.
fn handle(graph: u64) -> u64 {
    let mut handle = 0;
    ok!(cuGraphConditionalHandleCreate(&raw mut handle, graph, 0, 1, 1));
    handle
}

/// Adds a conditional node, and returns its bodies.
fn add_conditional(graph: u64, before: &[u64], handle: u64, kind: u32, size: u32) -> Vec<u64> {
    let mut parameters = [0; 32];
    parameters[0] = 13;
    parameters[2] = handle;
    parameters[3] = u64::from(kind) | u64::from(size) << 32;
    let (mut node, data) = (0, ptr::null());
    let place = &raw mut parameters;
    ok!(cuGraphAddNode_v2(&raw mut node, graph, before.as_ptr(), data, before.len(), place));
    let bodies = ptr::with_exposed_provenance::<u64>(usize::try_from(parameters[4]).unwrap());
    // SAFETY: the node owns an array of that length.
    unsafe { std::slice::from_raw_parts(bodies, size as usize) }.to_vec()
}

// Promise: C107
#[test]
fn kernel_chooses_the_body_of_a_conditional_node() {
    let _context = Context::new();
    let kernels = module(KERNELS);
    let (increment, choose) = (function(kernels, "increment"), function(module(CONDITIONAL), "choose"));
    let words: Vec<u64> = (0..4).map(|_| allocate(8)).collect();
    words.iter().for_each(|word| write(*word, &[0_u64]));
    let graph = graph();
    let condition = handle(graph);
    let chosen = add_kernel(graph, &[], choose, &[condition, 2]);
    for (body, word) in add_conditional(graph, &[chosen], condition, 2, 4).iter().zip(&words) {
        add_kernel(*body, &[], increment, &[*word]);
    }
    let executable = instantiate(graph);
    let value = |word: usize| read::<u64>(words[word], 1)[0];
    run(executable, 0);
    assert_eq!([value(0), value(1), value(2), value(3)], [0, 0, 1, 0]);
    let last = kernel(choose, &[condition, 3]);
    ok!(cuGraphExecKernelNodeSetParams_v2(executable, chosen, &raw const last.parameters));
    run(executable, 0);
    assert_eq!((value(2), value(3)), (1, 1));
    let none = kernel(choose, &[condition, 4]);
    ok!(cuGraphExecKernelNodeSetParams_v2(executable, chosen, &raw const none.parameters));
    run(executable, 0);
    assert_eq!([value(0), value(1), value(2), value(3)], [0, 0, 1, 1], "no such body");
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    // The handle is gone, and the kernel that sets it breaks its context.
    assert_eq!(launch(choose, 1, 1, 0, &mut [condition, 1]), 0);
    assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
}

// Promise: C107
#[test]
fn loop_of_a_graph_without_an_end_ends_with_its_context() {
    let context = Context::new();
    let graph = graph();
    let condition = handle(graph);
    add_conditional(graph, &[], condition, 1, 1);
    let (executable, queue) = (instantiate(graph), stream(NON_BLOCKING));
    ok!(cuGraphLaunch(executable, queue));
    assert_eq!(cu!(cuStreamQuery(queue)), NOT_READY);
    // Destroys the context, which must not wait for ever.
    drop(context);
}
