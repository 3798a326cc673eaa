//! Streams and events.

use super::{Result, input};
use crate::{Driver, Handle, code};

impl Driver {
    /// `cuStreamCreateWithPriority`.
    pub fn stream_create(&self, flags: u32, priority: i32) -> Result<Handle> {
        let mut stream = 0;
        call!(self.cuStreamCreateWithPriority(&raw mut stream, flags, priority))?;
        Ok(stream)
    }

    /// `cuStreamDestroy_v2`.
    pub fn stream_destroy(&self, stream: Handle) -> Result<()> {
        call!(self.cuStreamDestroy_v2(stream))
    }

    /// `cuStreamSetAttribute`; the value is a union of 64 bytes.
    pub fn stream_set_attribute(&self, stream: Handle, attribute: u32, value: &[u64; 8]) -> Result<()> {
        call!(self.cuStreamSetAttribute(stream, attribute, input(value)))
    }

    /// `cuStreamSynchronize`: waits until all work of the stream is complete.
    pub fn stream_synchronize(&self, stream: Handle) -> Result<()> {
        call!(self.cuStreamSynchronize(stream))
    }

    /// `cuCtxSynchronize`, for the current context.
    pub fn context_synchronize(&self) -> Result<()> {
        call!(self.cuCtxSynchronize())
    }

    /// `cuStreamWaitEvent`.
    pub fn stream_wait(&self, stream: Handle, event: Handle) -> Result<()> {
        call!(self.cuStreamWaitEvent(stream, event, 0))
    }

    /// `cuEventCreate`.
    pub fn event_create(&self, flags: u32) -> Result<Handle> {
        let mut event = 0;
        call!(self.cuEventCreate(&raw mut event, flags))?;
        Ok(event)
    }

    /// `cuEventDestroy_v2`.
    pub fn event_destroy(&self, event: Handle) -> Result<()> {
        call!(self.cuEventDestroy_v2(event))
    }

    /// `cuEventRecord`.
    pub fn event_record(&self, event: Handle, stream: Handle) -> Result<()> {
        call!(self.cuEventRecord(event, stream))
    }

    /// `cuEventSynchronize`, for events that are reached; it waits for others.
    pub fn event_synchronize(&self, event: Handle) -> Result<()> {
        call!(self.cuEventSynchronize(event))
    }

    /// True if all work before the event's last recording is complete.
    pub fn event_done(&self, event: Handle) -> Result<bool> {
        match call!(self.cuEventQuery(event)) {
            Ok(()) => Ok(true),
            Err(code::NOT_READY) => Ok(false),
            Err(failed) => Err(failed),
        }
    }

    /// `cuEventElapsedTime_v2`.
    pub fn event_elapsed(&self, start: Handle, end: Handle) -> Result<f32> {
        let mut milliseconds = 0.0;
        match call!(self.cuEventElapsedTime_v2(&raw mut milliseconds, start, end)) {
            Err(code::NOT_SUPPORTED) => call!(self.cuEventElapsedTime(&raw mut milliseconds, start, end))?,
            other => other?,
        }
        Ok(milliseconds)
    }
}
