//! Work in a capture, and captures into a graph whose nodes they make again: the program judges what differs.
#![expect(unsafe_code, reason = "calls a function of a program with memory of this crate")]

use std::ffi::c_void;

use sluice_cuda_abi::sys::CUresult as Code;

use super::{Graphs, Out, Result, failed};
use crate::capture::{Added, Judge, Mode, Stream};
use crate::driver::GraphDriver;
use crate::graph::{Model, NodeWork};
use crate::layout::NodeParameters;
use crate::plan::Work;
use crate::update;

/// `CUgraphRecaptureCallback`.
type Callback = unsafe extern "C" fn(
    data: *mut c_void,
    node: u64,
    original: *const NodeParameters,
    recaptured: *const NodeParameters,
    status: u32,
) -> u32;

// `CUgraphRecaptureStatus`.
const ELIGIBLE: u32 = 0;
const INELIGIBLE: u32 = 1;

/// `CUDA_ERROR_GRAPH_RECAPTURE_FAILURE`.
const FAILURE: Code = Code::CUDA_ERROR_GRAPH_RECAPTURE_FAILURE;

impl<D: GraphDriver> Graphs<D> {
    /// `cuStreamBeginRecaptureToGraph`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn stream_begin_recapture_to_graph(
        &self,
        stream: u64,
        per_thread: bool,
        mode: u32,
        graph: u64,
        judge: (u64, u64),
    ) -> Result<(), D> {
        let mode = Mode::of(mode).map_err(failed::<D>)?;
        let stream = self.driver.stream(stream, per_thread)?;
        let judge = Judge { callback: judge.0, data: judge.1 };
        self.with(|state| state.captures.begin_again(&mut state.model, stream, graph, judge, mode))
    }

    /// Adds work to the capture of a stream.
    pub(super) fn add_captured(&self, stream: Stream, work: NodeWork) -> Result<(), D> {
        let added = self.with(|state| {
            if !state.captures.enter(stream)? {
                // Another thread has ended the capture since.
                return Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            }
            state.captures.add(&mut state.model, stream.key, work)
        })?;
        let Added::Differs { node, work, judge } = added else { return Ok(()) };
        let (status, scratch) = self.with(|state| {
            let status = if can_be_updated(&state.model, node, &work)? { ELIGIBLE } else { INELIGIBLE };
            // The parameters of the new work have the form that a node of it has.
            let scratch = state.model.create()?;
            let made = state.model.add(scratch, work, &[]);
            if made.is_err() {
                state.model.remove(scratch);
            }
            Ok((status, (scratch, made?)))
        })?;
        let judged = self.judge(judge, node, scratch.1, status);
        self.with(|state| {
            let taken = state.model.take_work(scratch.1);
            state.model.remove(scratch.0);
            let taken = taken?;
            let inner = taken.inner().to_vec();
            let replaced = match judged {
                Ok(()) => state.captures.replace(&mut state.model, stream, node, taken),
                Err(_) => Err(FAILURE),
            };
            if replaced.is_err() {
                inner.into_iter().for_each(|inside| state.model.remove(inside));
                state.captures.fail(stream);
            }
            replaced
        })
    }

    /// Asks the program about a node with new parameters.
    fn judge(&self, judge: Judge, node: u64, new: u64, status: u32) -> Result<(), D> {
        let Some(callback) = usize::try_from(judge.callback).ok().filter(|address| *address != 0) else {
            return Ok(());
        };
        let (original, recaptured) = (self.parameters_of(node)?, self.parameters_of(new)?);
        let callback = std::ptr::with_exposed_provenance::<()>(callback);
        // SAFETY: not null, and the program guarantees that it is a function of this type.
        let callback = unsafe { std::mem::transmute::<*const (), Callback>(callback) };
        let data = usize::try_from(judge.data).map_err(|_| failed::<D>(FAILURE))?;
        let data = std::ptr::with_exposed_provenance_mut(data);
        // SAFETY: the program asked for this call; both structures live until it returns.
        match unsafe { callback(data, node, &raw const original, &raw const recaptured, status) } {
            0 => Ok(()),
            _ => Err(failed::<D>(FAILURE)),
        }
    }

    fn parameters_of(&self, node: u64) -> Result<NodeParameters, D> {
        let mut parameters = NodeParameters { kind: 0, reserved: [0; 3], body: [0; 29], end: 0 };
        // SAFETY: the structure is written during this call only.
        let place = unsafe { Out::<NodeParameters, D>::new(&raw mut parameters) };
        self.graph_node_get_params(node, place)?;
        Ok(parameters)
    }
}

/// True if an executable graph could take the work in the place of that of a node.
fn can_be_updated(model: &Model, node: u64, new: &NodeWork) -> std::result::Result<bool, Code> {
    let plain = |work: &NodeWork| -> std::result::Result<Work, Code> {
        Ok(match work {
            NodeWork::Plain(work) => work.clone(),
            NodeWork::Child(child) => Work::Child(model.plan(*child).map_err(|_| FAILURE)?),
            NodeWork::Conditional(_) => return Err(FAILURE),
        })
    };
    let old = plain(&model.node(node)?.work)?;
    Ok(update::change(&old, &plain(new)?, false).is_ok())
}
