//! Capture of streams.

use sluice_cuda_abi::sys::CUresult as Code;

use super::{Graphs, In, Out, Result, failed, invalid};
use crate::capture::{self, CaptureStatus, Mode};
use crate::driver::GraphDriver;

/// `CUstreamCaptureStatus`.
const NONE: u32 = 0;
const ACTIVE: u32 = 1;
const INVALIDATED: u32 = 2;

/// `CU_STREAM_SET_CAPTURE_DEPENDENCIES`; the other value adds.
const SET: u32 = 1;

/// The places for the answer of `cuStreamGetCaptureInfo`.
#[derive(Clone, Copy)]
pub struct CaptureInfo<D: GraphDriver> {
    /// `CUstreamCaptureStatus`.
    pub status: Out<u32, D>,
    /// The id of the capture.
    pub id: Out<u64, D>,
    /// Its graph.
    pub graph: Out<u64, D>,
    /// The address of an array of nodes.
    pub nodes: Out<u64, D>,
    /// The address of an array of edge data.
    pub edges: Out<u64, D>,
    /// The length of both.
    pub count: Out<usize, D>,
}

impl<D: GraphDriver> CaptureInfo<D> {
    /// The places of the first form of `cuStreamGetCaptureInfo`, which has only these.
    #[must_use]
    pub const fn early(status: Out<u32, D>, id: Out<u64, D>) -> Self {
        Self {
            status,
            id,
            graph: Out::<u64, D>::missing(),
            nodes: Out::<u64, D>::missing(),
            edges: Out::<u64, D>::missing(),
            count: Out::<usize, D>::missing(),
        }
    }
}

impl<D: GraphDriver> Graphs<D> {
    /// `cuThreadExchangeStreamCaptureMode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn thread_exchange_stream_capture_mode(&self, mode: Out<u32, D>) -> Result<(), D> {
        mode.set(capture::exchange_mode(mode.get()?))
    }

    /// `cuStreamBeginCapture_v2`; the first form has mode 0.
    ///
    /// # Errors
    /// The driver's code.
    pub fn stream_begin_capture(&self, stream: u64, per_thread: bool, mode: u32) -> Result<(), D> {
        let mode = Mode::of(mode).map_err(failed::<D>)?;
        let stream = self.driver.stream(stream, per_thread)?;
        self.with(|state| state.captures.begin(&mut state.model, stream, None, mode))
    }

    /// `cuStreamBeginCaptureToGraph`.
    ///
    /// # Errors
    /// The driver's code.
    #[expect(clippy::too_many_arguments, reason = "those of the C function")]
    pub fn stream_begin_capture_to_graph(
        &self,
        stream: u64,
        per_thread: bool,
        graph: u64,
        before: In<u64, D>,
        data: In<[u8; 8], D>,
        count: usize,
        mode: u32,
    ) -> Result<(), D> {
        let mode = Mode::of(mode).map_err(failed::<D>)?;
        let before = self.dependencies(before, data, count)?;
        self.with(|state| state.model.graph(graph).map(drop))?;
        let stream = self.driver.stream(stream, per_thread)?;
        self.with(|state| state.captures.begin(&mut state.model, stream, Some((graph, before)), mode))
    }

    /// `cuStreamEndCapture`.
    ///
    /// # Errors
    /// The driver's code. Except for a call that leaves the capture as it is, the program gets a null graph.
    pub fn stream_end_capture(&self, stream: u64, per_thread: bool, graph: Out<u64, D>) -> Result<(), D> {
        let stream = self.driver.stream(stream, per_thread)?;
        graph.required()?;
        let ended = self.with(|state| state.captures.end(&mut state.model, stream.key));
        graph.set(*ended.as_ref().unwrap_or(&0))?;
        ended.map(drop)
    }

    /// `cuStreamIsCapturing`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn stream_is_capturing(&self, stream: u64, per_thread: bool, status: Out<u32, D>) -> Result<(), D> {
        status.required()?;
        let stream = self.driver.stream(stream, per_thread)?;
        status.set(match self.with(|state| state.captures.status(stream))? {
            CaptureStatus::None => NONE,
            CaptureStatus::Active(..) => ACTIVE,
            CaptureStatus::Invalidated => INVALIDATED,
        })
    }

    /// `cuStreamGetCaptureInfo_v3`; places that an earlier form does not have are missing.
    ///
    /// # Errors
    /// The driver's code.
    pub fn stream_get_capture_info(
        &self,
        stream: u64,
        per_thread: bool,
        info: CaptureInfo<D>,
    ) -> Result<(), D> {
        let CaptureInfo { status, id, graph, nodes, edges, count } = info;
        status.required()?;
        if edges.is_given() && !nodes.is_given() {
            return Err(invalid::<D>());
        }
        let stream = self.driver.stream(stream, per_thread)?;
        let found = self.with(|state| match state.captures.status(stream)? {
            CaptureStatus::None => Ok((NONE, None)),
            CaptureStatus::Invalidated => Ok((INVALIDATED, None)),
            CaptureStatus::Active(id, graph) => {
                let shown = state.captures.show(stream.key)?;
                let is_full = shown.edges.iter().all(|edge| *edge == [0; 8]);
                if nodes.is_given() && !edges.is_given() && !is_full {
                    return Err(Code::CUDA_ERROR_LOSSY_QUERY);
                }
                let list = shown.nodes.as_ptr().expose_provenance() as u64;
                let data = shown.edges.as_ptr().expose_provenance() as u64;
                Ok((ACTIVE, Some((id, graph, list, data, shown.nodes.len()))))
            }
        })?;
        if let Some((number, captured, list, data, length)) = found.1 {
            id.set_if_given(number);
            graph.set_if_given(captured);
            nodes.set_if_given(list);
            edges.set_if_given(data);
            count.set_if_given(length);
        }
        status.set(found.0)
    }

    /// `cuStreamUpdateCaptureDependencies_v2`; the first form has no `data`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn stream_update_capture_dependencies(
        &self,
        stream: u64,
        per_thread: bool,
        nodes: In<u64, D>,
        data: In<[u8; 8], D>,
        count: usize,
        flags: u32,
    ) -> Result<(), D> {
        if flags > SET {
            return Err(invalid::<D>());
        }
        let set = self.dependencies(nodes, data, count)?;
        let stream = self.driver.stream(stream, per_thread)?;
        self.with(|state| state.captures.update(&state.model, stream, set, flags == SET))
    }
}
