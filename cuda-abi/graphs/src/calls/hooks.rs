//! The functions that a library calls from its own: captures see every use of a stream or an event.

use std::sync::atomic::Ordering;

use sluice_cuda_abi::sys::CUresult as Code;

use super::{GraphState, Graphs, Result, failed};
use crate::capture::{self, Stream};
use crate::driver::GraphDriver;
use crate::graph::NodeWork;
use crate::plan::Work;

impl<D: GraphDriver> Graphs<D> {
    /// True if a capture has begun and not ended, in any thread. This is one relaxed load: without captures a library need not
    /// call [`Graphs::capture`].
    #[inline]
    pub fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn knows_events(&self) -> bool {
        self.is_capturing() || self.captured_events.load(Ordering::Relaxed) != 0
    }

    /// Asynchronous work is given to a stream. True if it became a node, so that the library must not submit it.
    ///
    /// # Errors
    /// The code of a rule of capture, and the errors of the work.
    #[inline]
    pub fn capture(&self, stream: Stream, work: impl FnOnce() -> Result<Work, D>) -> Result<bool, D> {
        if self.is_capturing() { self.capture_slowly(stream, work) } else { Ok(false) }
    }

    #[cold]
    fn capture_slowly(&self, stream: Stream, work: impl FnOnce() -> Result<Work, D>) -> Result<bool, D> {
        if !self.with(|state| state.captures.enter(stream))? {
            return Ok(false);
        }
        let work = work()?;
        self.driver.check(&work)?;
        self.add_captured(stream, NodeWork::Plain(work)).map(|()| true)
    }

    /// Adds a node of an external event, if the stream captures.
    fn add_external(&self, stream: Stream, work: Work) -> Result<(), D> {
        if self.with(|state| state.captures.enter(stream))? {
            self.add_captured(stream, NodeWork::Plain(work))?;
        }
        Ok(())
    }

    /// A call on a stream waits for it, queries it, or is one for which graphs have no node.
    ///
    /// # Errors
    /// The code of a rule of capture; then the captures that it concerns are invalid.
    #[inline]
    pub fn refuse(&self, stream: Stream) -> Result<(), D> {
        if self.is_capturing() { self.with(|state| state.captures.refuse(stream)) } else { Ok(()) }
    }

    /// A call is one that the header names potentially unsafe: an allocation or a release of memory, a synchronous copy or fill, a
    /// query.
    ///
    /// # Errors
    /// The code of a rule of capture; then the captures that it concerns are invalid.
    #[inline]
    pub fn potentially_unsafe(&self) -> Result<(), D> {
        if !self.is_capturing() {
            return Ok(());
        }
        self.with(|state| state.captures.check_unsafe(capture::thread_mode()))
    }

    /// A synchronous copy or fill uses a stream.
    ///
    /// # Errors
    /// The code of a rule of capture; then the captures that it concerns are invalid.
    #[inline]
    pub fn synchronous(&self, stream: Stream) -> Result<(), D> {
        self.refuse(stream)?;
        self.potentially_unsafe()
    }

    /// A call waits for all work of a context.
    ///
    /// # Errors
    /// The code of a rule of capture; then the captures that it concerns are invalid.
    #[inline]
    pub fn synchronize_context(&self, context: u64) -> Result<(), D> {
        if !self.is_capturing() {
            return Ok(());
        }
        self.with(|state| state.captures.check_context(context))?;
        self.potentially_unsafe()
    }

    /// A call records the work of all streams of a context, or makes all of them wait.
    ///
    /// # Errors
    /// The code of a rule of capture; then the captures that it concerns are invalid.
    #[inline]
    pub fn use_context(&self, context: u64) -> Result<(), D> {
        if self.is_capturing() { self.with(|state| state.captures.check_context(context)) } else { Ok(()) }
    }

    /// A call queries an event or waits for it.
    ///
    /// # Errors
    /// The code of a rule of capture; then the captures that it concerns are invalid.
    #[inline]
    pub fn synchronize_event(&self, event: u64) -> Result<(), D> {
        self.check_event(event)?;
        self.potentially_unsafe()
    }

    /// A call asks for the time of an event.
    ///
    /// # Errors
    /// The code of a rule of capture; then the captures that it concerns are invalid.
    #[inline]
    pub fn check_event(&self, event: u64) -> Result<(), D> {
        if self.knows_events() { self.with(|state| state.captures.check_event(event)) } else { Ok(()) }
    }

    /// An event is recorded in a stream; `is_external` is the flag of that name. True if that happened in a capture, so that the
    /// library must not record it. The stream is only looked up if a capture can have it.
    ///
    /// # Errors
    /// The code of a rule of capture, `CUDA_ERROR_ILLEGAL_STATE` for the flag outside of a capture, and the errors of the stream.
    #[inline]
    pub fn record_event(
        &self,
        stream: impl FnOnce() -> Result<Stream, D>,
        event: u64,
        is_external: bool,
    ) -> Result<bool, D> {
        if !self.knows_events() {
            return if is_external { Err(failed::<D>(Code::CUDA_ERROR_ILLEGAL_STATE)) } else { Ok(false) };
        }
        if is_external {
            self.driver.check(&Work::EventRecord { event })?;
        }
        let stream = stream()?;
        if is_external {
            self.add_external(stream, Work::EventRecord { event })?;
        }
        self.with(|state| state.captures.record(stream, event, is_external))
    }

    /// A stream waits for an event; `is_external` is the flag of that name. True if that happened in a capture, so that the library
    /// must not make the stream wait. The stream is only looked up if a capture can have it.
    ///
    /// # Errors
    /// The code of a rule of capture, `CUDA_ERROR_ILLEGAL_STATE` for the flag outside of a capture, and the errors of the stream.
    #[inline]
    pub fn wait_event(
        &self,
        stream: impl FnOnce() -> Result<Stream, D>,
        event: u64,
        is_external: bool,
    ) -> Result<bool, D> {
        if !self.knows_events() {
            return if is_external { Err(failed::<D>(Code::CUDA_ERROR_ILLEGAL_STATE)) } else { Ok(false) };
        }
        if is_external {
            self.driver.check(&Work::EventWait { event })?;
        }
        let stream = stream()?;
        if is_external {
            self.add_external(stream, Work::EventWait { event })?;
        }
        self.with(|state| state.captures.wait(stream, event, is_external))
    }

    /// A stream is destroyed, by itself or with its thread.
    #[inline]
    pub fn stream_destroyed(&self, key: u64) {
        if self.is_capturing() {
            self.forget(|state| state.captures.forget_stream(&mut state.model, key));
        }
    }

    /// An event is destroyed.
    #[inline]
    pub fn event_destroyed(&self, event: u64) {
        if self.knows_events() {
            self.forget(|state| state.captures.forget_event(event));
        }
    }

    /// A context is destroyed, with its streams and events.
    #[inline]
    pub fn context_destroyed(&self, context: u64) {
        if self.knows_events() {
            self.forget(|state| state.captures.forget_context(&mut state.model, context));
        }
    }

    #[cold]
    fn forget(&self, action: impl FnOnce(&mut GraphState)) {
        let done: Result<(), D> = self.with(|state| {
            action(state);
            Ok(())
        });
        debug_assert!(done.is_ok());
    }

    /// Refuses a feature that no library serves yet.
    pub(crate) fn refuse_feature<T>(&self, feature: &'static str) -> Result<T, D> {
        self.driver.refused(feature);
        Err(failed::<D>(Code::CUDA_ERROR_NOT_SUPPORTED))
    }
}
