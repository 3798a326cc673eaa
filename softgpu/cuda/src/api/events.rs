//! The entry points for events.

use crate::error::Error;
use crate::event;
use crate::ffi::Out;
use crate::stream::target;

calls! {
    fn cuEventCreate(place: Out<u64>, flags: u32) {
        place.required()?;
        place.set(event::create(flags)?)
    }

    fn cuEventDestroy(event: u64) { event::destroy(event) }

    fn cuEventDestroy_v2(event: u64) { event::destroy(event) }

    fn cuEventQuery(event: u64) { event::query(event) }

    fn cuEventSynchronize(event: u64) { event::synchronize(event) }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) {
        milliseconds.set(event::elapsed(start, end)?)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) {
        milliseconds.set(event::elapsed(start, end)?)
    }
}

twins! {
    fn cuEventRecord, cuEventRecord_ptsz(implicit; event: u64, stream: u64) {
        event::record(event, &target(stream, implicit)?)
    }

    fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(implicit; event: u64, stream: u64, flags: u32) {
        // Flag 1 requests a node of a graph, which is not allowed outside of a graph.
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        event::record(event, &target(stream, implicit)?)
    }
}
