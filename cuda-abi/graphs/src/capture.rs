//! The capture of streams: its state, and the rules with their codes. In one file: the state and its rules are one machine.
//!
//! Streams and events are numbers of the library. A stream that takes part in a capture has a set of nodes on which its next node
//! will depend; an event that was recorded there has a copy of that set. An operation that is not allowed invalidates the captures
//! that it concerns: then every use of their streams fails until the capture is ended.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use sluice_cuda_abi::sys::CUresult as Code;

use crate::graph::{Edge, INVALID, Model, NodeWork, Result};
use crate::plan::Work;

/// A stream, as a library knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Unique among all streams of the process, default streams of contexts and threads included.
    pub key: u64,
    /// The handle of its context.
    pub context: u64,
    /// Its order relative to the legacy default stream.
    pub order: StreamOrder,
}

/// The order of a stream relative to the legacy default stream of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamOrder {
    /// It is the legacy default stream.
    Legacy,
    /// It waits for that stream, and that stream waits for it.
    Blocking,
    /// It is independent of that stream.
    NonBlocking,
}

/// `CUstreamCaptureMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

impl Mode {
    pub(crate) fn of(number: u32) -> Result<Mode> {
        match number {
            0 => Ok(Mode::Global),
            1 => Ok(Mode::ThreadLocal),
            2 => Ok(Mode::Relaxed),
            _ => Err(INVALID),
        }
    }
}

static NEXT_THREAD: AtomicU64 = AtomicU64::new(1);

thread_local! {
    // Neither has a destructor, so that both can be read at any time.
    static THREAD: Cell<u64> = const { Cell::new(0) };
    /// As the program gave it, also a number that is no mode.
    static MODE: Cell<u32> = const { Cell::new(Mode::Global as u32) };
}

/// The calling thread.
pub(crate) fn this_thread() -> u64 {
    if THREAD.get() == 0 {
        THREAD.set(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
    }
    THREAD.get()
}

/// The calling thread's mode. A number that is no mode prohibits as much as the strictest one.
pub(crate) fn thread_mode() -> Mode {
    Mode::of(MODE.get()).unwrap_or(Mode::Global)
}

/// `cuThreadExchangeStreamCaptureMode`. Like NVIDIA's driver, it takes any number.
pub(crate) fn exchange_mode(new: u32) -> u32 {
    MODE.replace(new)
}

/// A stream in a capture.
struct CapturedStream {
    capture: u64,
    context: u64,
    order: StreamOrder,
    /// The next node depends on these.
    set: Vec<Edge>,
    /// Arrays that a query returned; they are valid until the next call on the stream.
    shown: Option<Box<Shown>>,
}

/// The set of a stream in the form of the header.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) nodes: Vec<u64>,
    pub(crate) edges: Vec<[u8; 8]>,
}

struct Capture {
    graph: u64,
    /// The graph was made by the capture, which also removes it after a failure.
    owns_graph: bool,
    /// The stream in which it began.
    origin: u64,
    mode: Mode,
    thread: u64,
    is_invalid: bool,
    /// Last nodes of destroyed streams.
    orphans: Vec<u64>,
    recapture: Option<Recapture>,
}

/// The nodes that a capture makes again, in the order of their creation.
struct Recapture {
    nodes: Vec<u64>,
    next: usize,
    judge: Judge,
}

/// The program's function that judges new parameters of nodes, or 0, and its argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Judge {
    pub(crate) callback: u64,
    pub(crate) data: u64,
}

/// Work that was given to a stream that captures.
#[derive(Debug)]
pub(crate) enum Added {
    /// This node has it.
    Node(u64),
    /// This node of an existing graph has other work.
    Differs { node: u64, work: Box<NodeWork>, judge: Judge },
}

/// A capture makes other nodes than its graph has.
const RECAPTURE_FAILURE: Code = Code::CUDA_ERROR_GRAPH_RECAPTURE_FAILURE;

impl Capture {
    /// True if it has made all nodes of its graph again, if it makes any.
    fn is_complete(&self, model: &Model) -> bool {
        let Some(Recapture { nodes, next, .. }) = &self.recapture else { return true };
        *next == nodes.len() && model.graph(self.graph).is_ok_and(|graph| graph.nodes == *nodes)
    }
}

/// An event that was last recorded in a capture.
struct Recorded {
    capture: u64,
    context: u64,
    set: Vec<Edge>,
}

/// The state of a stream for `cuStreamGetCaptureInfo`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CaptureStatus {
    None,
    /// The id of the capture, and its graph.
    Active(u64, u64),
    Invalidated,
}

/// All captures of a process.
pub(crate) struct Captures {
    last_id: u64,
    all: BTreeMap<u64, Capture>,
    streams: BTreeMap<u64, CapturedStream>,
    events: BTreeMap<u64, Recorded>,
}

impl Captures {
    pub(crate) const fn new() -> Captures {
        Captures { last_id: 0, all: BTreeMap::new(), streams: BTreeMap::new(), events: BTreeMap::new() }
    }

    /// Number of captures that have not ended.
    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    /// Number of events that were last recorded in a capture.
    pub(crate) fn count_events(&self) -> usize {
        self.events.len()
    }

    fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.all.get_mut(&capture) {
            capture.is_invalid = true;
        }
    }

    fn is_invalid(&self, capture: u64) -> bool {
        self.all.get(&capture).is_none_or(|capture| capture.is_invalid)
    }

    /// Begins a capture, into a new graph or behind these nodes of a given one.
    pub(crate) fn begin(
        &mut self,
        model: &mut Model,
        stream: Stream,
        into: Option<(u64, Vec<Edge>)>,
        mode: Mode,
    ) -> Result {
        if stream.order == StreamOrder::Legacy {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.streams.contains_key(&stream.key) {
            return Err(Code::CUDA_ERROR_ILLEGAL_STATE);
        }
        let owns_graph = into.is_none();
        let (graph, set) = match into {
            Some((graph, set)) => {
                if model.graph(graph)?.is_capturing {
                    return Err(INVALID);
                }
                model.check_dependencies(graph, &set)?;
                (graph, set)
            }
            None => (model.create()?, Vec::new()),
        };
        model.graph_mut(graph)?.is_capturing = true;
        self.last_id += 1;
        let id = self.last_id;
        let thread = this_thread();
        let origin = stream.key;
        let capture = Capture {
            graph,
            owns_graph,
            origin,
            mode,
            thread,
            is_invalid: false,
            orphans: Vec::new(),
            recapture: None,
        };
        self.all.insert(id, capture);
        self.join(stream, id, set);
        Ok(())
    }

    /// Begins a capture that makes the nodes of a graph again.
    pub(crate) fn begin_again(
        &mut self,
        model: &mut Model,
        stream: Stream,
        graph: u64,
        judge: Judge,
        mode: Mode,
    ) -> Result {
        let nodes = model.graph(graph)?.nodes.clone();
        self.begin(model, stream, Some((graph, Vec::new())), mode)?;
        model.release_objects(graph)?;
        if let Some(capture) = self.all.get_mut(&self.last_id) {
            capture.recapture = Some(Recapture { nodes, next: 0, judge });
        }
        Ok(())
    }

    fn join(&mut self, stream: Stream, capture: u64, set: Vec<Edge>) {
        let Stream { key, context, order } = stream;
        self.streams.insert(key, CapturedStream { capture, context, order, set, shown: None });
    }

    /// Ends a capture and returns its graph.
    pub(crate) fn end(&mut self, model: &mut Model, stream: u64) -> Result<u64> {
        let id = self.streams.get(&stream).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?.capture;
        let capture = self.all.get(&id).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        if capture.origin != stream {
            self.invalidate(id);
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != Mode::Relaxed && capture.thread != this_thread() {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let outcome = if capture.is_invalid {
            Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        } else if !self.is_joined(model, id) {
            Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        } else if !capture.is_complete(model) {
            Err(RECAPTURE_FAILURE)
        } else {
            Ok(capture.graph)
        };
        self.terminate(model, id, outcome.is_ok());
        outcome
    }

    /// True if all work of other streams is before the last work of the origin.
    fn is_joined(&self, model: &Model, id: u64) -> bool {
        let Some(capture) = self.all.get(&id) else { return true };
        let nodes = |member: &CapturedStream| member.set.iter().map(|(node, _)| *node).collect::<Vec<u64>>();
        let last = self.streams.get(&capture.origin).map(nodes).unwrap_or_default();
        let reached = model.ancestors(last);
        let members = self.streams.values().filter(|member| member.capture == id);
        members.flat_map(nodes).chain(capture.orphans.iter().copied()).all(|node| reached.contains(&node))
    }

    /// Takes all streams out of a capture.
    fn terminate(&mut self, model: &mut Model, id: u64, keep_graph: bool) {
        self.streams.retain(|_, member| member.capture != id);
        let Some(capture) = self.all.remove(&id) else { return };
        if let Ok(graph) = model.graph_mut(capture.graph) {
            graph.is_capturing = false;
        }
        if !keep_graph && capture.owns_graph {
            model.remove(capture.graph);
        }
    }

    /// Refuses a use of the legacy stream that would order it against a capture.
    fn check_legacy(&mut self, stream: Stream) -> Result {
        if stream.order != StreamOrder::Legacy {
            return Ok(());
        }
        let concerned: Vec<u64> = self.blocking(stream.context).collect();
        if concerned.is_empty() {
            return Ok(());
        }
        concerned.into_iter().for_each(|capture| self.invalidate(capture));
        Err(Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    }

    /// Captures with a stream of the context that is ordered against its legacy stream.
    fn blocking(&self, context: u64) -> impl Iterator<Item = u64> + '_ {
        let concerned = move |member: &&CapturedStream| {
            member.context == context && member.order == StreamOrder::Blocking
        };
        self.streams.values().filter(concerned).map(|member| member.capture)
    }

    /// Checks a use of a stream. True if it captures, so that the work becomes a node.
    pub(crate) fn enter(&mut self, stream: Stream) -> Result<bool> {
        self.check_legacy(stream)?;
        let Some(member) = self.streams.get_mut(&stream.key) else { return Ok(false) };
        member.shown = None;
        let capture = member.capture;
        if self.is_invalid(capture) {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        Ok(true)
    }

    /// Refuses a call on a stream that captures: one that waits, or for which graphs have no node.
    pub(crate) fn refuse(&mut self, stream: Stream) -> Result {
        if !self.enter(stream)? {
            return Ok(());
        }
        let capture = self.streams.get(&stream.key).map(|member| member.capture);
        capture.into_iter().for_each(|capture| self.invalidate(capture));
        Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Adds a node behind the set of a stream that [`Captures::enter`] has found capturing. If its capture makes the nodes of a graph again,
    /// finds the next one of them.
    pub(crate) fn add(&mut self, model: &mut Model, stream: u64, work: NodeWork) -> Result<Added> {
        if let Some((node, judge)) = self.next_again(model, stream)? {
            let is_same = match (&model.node(node)?.work, &work) {
                (NodeWork::Plain(old), NodeWork::Plain(new)) if old.kind() == new.kind() => {
                    // The nodes for memory of a graph are those of its allocations.
                    if old != new && old.is_of_memory() {
                        return Err(self.fail_again(stream));
                    }
                    old == new
                }
                (NodeWork::Child(old), NodeWork::Child(new)) => {
                    let (old, new) = (model.plan(*old), model.plan(*new));
                    matches!((old, new), (Ok(old), Ok(new)) if old == new)
                }
                _ => return Err(self.fail_again(stream)),
            };
            if !is_same {
                return Ok(Added::Differs { node, work: Box::new(work), judge });
            }
            if let NodeWork::Child(twin) = work {
                model.remove(twin);
            }
            self.advance(stream, node)?;
            return Ok(Added::Node(node));
        }
        let member = self.streams.get_mut(&stream).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        let capture = self.all.get(&member.capture).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        let node = model.add(capture.graph, work, &member.set)?;
        member.set = vec![(node, Default::default())];
        Ok(Added::Node(node))
    }

    /// The node that the next work of a stream must make again, if its capture makes nodes again, and the judge of its parameters.
    fn next_again(&mut self, model: &Model, stream: u64) -> Result<Option<(u64, Judge)>> {
        let member = self.streams.get(&stream).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        let capture = self.all.get(&member.capture).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        let Some(Recapture { nodes, next, judge }) = &capture.recapture else { return Ok(None) };
        let sorted = |edges: &[Edge]| {
            let mut edges: Vec<_> = edges.iter().map(|(node, edge)| (*node, edge.bytes())).collect();
            edges.sort_unstable();
            edges
        };
        match nodes.get(*next) {
            Some(node) if model.node(*node).is_ok_and(|node| sorted(&node.before) == sorted(&member.set)) => {
                Ok(Some((*node, *judge)))
            }
            _ => Err(self.fail_again(stream)),
        }
    }

    /// The work of the memory node that a call must make again, if its capture makes nodes again. Other work is a failure.
    pub(crate) fn memory_again(
        &mut self,
        model: &Model,
        stream: u64,
        is_same: impl FnOnce(&Work) -> bool,
    ) -> Result<Option<Work>> {
        let Some((node, _)) = self.next_again(model, stream)? else { return Ok(None) };
        match model.work(node) {
            Ok(work) if is_same(work) => {
                let work = work.clone();
                self.advance(stream, node)?;
                Ok(Some(work))
            }
            _ => Err(self.fail_again(stream)),
        }
    }

    fn advance(&mut self, stream: u64, node: u64) -> Result {
        let member = self.streams.get_mut(&stream).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        member.set = vec![(node, Default::default())];
        let capture = self.all.get_mut(&member.capture).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        if let Some(recapture) = &mut capture.recapture {
            recapture.next += 1;
        }
        Ok(())
    }

    /// Gives the next node new work, if the capture still waits for it.
    pub(crate) fn replace(&mut self, model: &mut Model, stream: Stream, node: u64, work: NodeWork) -> Result {
        if !self.enter(stream)? || self.next_again(model, stream.key)?.is_none_or(|(next, _)| next != node) {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        model.put_work(node, work)?;
        self.advance(stream.key, node)
    }

    /// The capture of a stream has failed.
    pub(crate) fn fail(&mut self, stream: Stream) {
        self.fail_again(stream.key);
    }

    fn fail_again(&mut self, stream: u64) -> Code {
        if let Some(member) = self.streams.get(&stream) {
            self.invalidate(member.capture);
        }
        RECAPTURE_FAILURE
    }

    /// An event is recorded in a stream. True if that happens in a capture, which has a node for an external event.
    pub(crate) fn record(&mut self, stream: Stream, event: u64, is_external: bool) -> Result<bool> {
        let captures = self.enter(stream)?;
        if is_external && !captures {
            return Err(Code::CUDA_ERROR_ILLEGAL_STATE);
        }
        self.events.remove(&event);
        if captures
            && !is_external
            && let Some(CapturedStream { capture, context, set, .. }) = self.streams.get(&stream.key)
        {
            let recorded = Recorded { capture: *capture, context: *context, set: set.clone() };
            self.events.insert(event, recorded);
        }
        Ok(captures)
    }

    /// A stream waits for an event. True if that happens in a capture, which the stream may join by it, and which has a node for an
    /// external event.
    pub(crate) fn wait(&mut self, stream: Stream, event: u64, is_external: bool) -> Result<bool> {
        let captures = self.enter(stream)?;
        if is_external {
            return if captures { Ok(true) } else { Err(Code::CUDA_ERROR_ILLEGAL_STATE) };
        }
        let recorded = self.events.get(&event).map(|recorded| (recorded.capture, recorded.set.clone()));
        let own = self.streams.get(&stream.key).map(|member| member.capture);
        match (own, recorded) {
            (None, None) => Ok(false),
            (None, Some((capture, _))) if !self.all.contains_key(&capture) => {
                Err(Code::CUDA_ERROR_CAPTURED_EVENT)
            }
            (None, Some((capture, _))) if self.is_invalid(capture) => {
                Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
            }
            (None, Some((capture, _))) if stream.order == StreamOrder::Legacy => {
                self.invalidate(capture);
                Err(Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
            }
            (None, Some((capture, set))) => {
                self.join(stream, capture, set);
                Ok(true)
            }
            (Some(own), Some((capture, set))) if own == capture => {
                if let Some(member) = self.streams.get_mut(&stream.key) {
                    unite(&mut member.set, &set);
                }
                Ok(true)
            }
            (Some(own), Some((capture, _))) if self.all.contains_key(&capture) => {
                self.invalidate(own);
                self.invalidate(capture);
                Err(Code::CUDA_ERROR_STREAM_CAPTURE_MERGE)
            }
            (Some(own), _) => {
                self.invalidate(own);
                Err(Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
            }
        }
    }

    /// Checks a query of an event, or a wait of the program for it.
    pub(crate) fn check_event(&mut self, event: u64) -> Result {
        let Some(recorded) = self.events.get(&event) else { return Ok(()) };
        let capture = recorded.capture;
        self.invalidate(capture);
        Err(Code::CUDA_ERROR_CAPTURED_EVENT)
    }

    /// Checks a query of a context, or a wait for it.
    pub(crate) fn check_context(&mut self, context: u64) -> Result {
        let members = self.streams.values().filter(|member| member.context == context);
        let concerned: Vec<u64> = members.map(|member| member.capture).collect();
        if concerned.is_empty() {
            return Ok(());
        }
        concerned.into_iter().for_each(|capture| self.invalidate(capture));
        Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Checks a call that is potentially unsafe, with the calling thread's mode.
    pub(crate) fn check_unsafe(&mut self, mode: Mode) -> Result {
        let thread = this_thread();
        let prohibits = |capture: &Capture| match mode {
            Mode::Relaxed => false,
            _ if capture.thread == thread => capture.mode != Mode::Relaxed,
            Mode::Global => capture.mode == Mode::Global,
            Mode::ThreadLocal => false,
        };
        let mut is_prohibited = false;
        for capture in self.all.values_mut().filter(|capture| prohibits(capture)) {
            capture.is_invalid = true;
            is_prohibited = true;
        }
        if is_prohibited { Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// The state of a stream. The query invalidates nothing.
    pub(crate) fn status(&self, stream: Stream) -> Result<CaptureStatus> {
        if stream.order == StreamOrder::Legacy && self.blocking(stream.context).next().is_some() {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        let Some(member) = self.streams.get(&stream.key) else { return Ok(CaptureStatus::None) };
        Ok(match self.all.get(&member.capture) {
            Some(capture) if !capture.is_invalid => CaptureStatus::Active(member.capture, capture.graph),
            _ => CaptureStatus::Invalidated,
        })
    }

    /// The set of a stream. It stays where it is until the next call on the stream.
    pub(crate) fn show(&mut self, stream: u64) -> Result<&Shown> {
        let member = self.streams.get_mut(&stream).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        let nodes = member.set.iter().map(|(node, _)| *node).collect();
        let edges = member.set.iter().map(|(_, edge)| edge.bytes()).collect();
        Ok(member.shown.insert(Box::new(Shown { nodes, edges })))
    }

    /// Adds to the set of a stream, or replaces it.
    pub(crate) fn update(&mut self, model: &Model, stream: Stream, set: Vec<Edge>, replaces: bool) -> Result {
        if !self.enter(stream)? {
            return Err(Code::CUDA_ERROR_ILLEGAL_STATE);
        }
        let member = self.streams.get_mut(&stream.key).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        let graph = self.all.get(&member.capture).ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?.graph;
        model.check_dependencies(graph, &set)?;
        if replaces {
            member.set = set;
        } else {
            unite(&mut member.set, &set);
        }
        Ok(())
    }

    /// A stream is destroyed. With the origin its capture ends.
    pub(crate) fn forget_stream(&mut self, model: &mut Model, stream: u64) {
        let Some(member) = self.streams.remove(&stream) else { return };
        let Some(capture) = self.all.get_mut(&member.capture) else { return };
        if capture.origin == stream {
            self.terminate(model, member.capture, false);
        } else {
            capture.orphans.extend(member.set.iter().map(|(node, _)| *node));
        }
    }

    /// A context is destroyed, with its streams and events.
    pub(crate) fn forget_context(&mut self, model: &mut Model, context: u64) {
        let members = self.streams.iter().filter(|(_, member)| member.context == context);
        let streams: Vec<u64> = members.map(|(stream, _)| *stream).collect();
        for stream in streams {
            self.forget_stream(model, stream);
        }
        self.events.retain(|_, recorded| recorded.context != context);
    }

    /// An event is destroyed.
    pub(crate) fn forget_event(&mut self, event: u64) {
        self.events.remove(&event);
    }
}

/// Adds those edges whose nodes the set does not have.
fn unite(set: &mut Vec<Edge>, more: &[Edge]) {
    for edge in more {
        if !set.iter().any(|(node, _)| *node == edge.0) {
            set.push(*edge);
        }
    }
}

#[cfg(test)]
mod tests;
