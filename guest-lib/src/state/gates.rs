//! Records and waits of whole contexts.
//!
//! A context that needs them gets a stream and an event of its own. An event of all its work is recorded in that stream, behind the work
//! of the others. A wait of all its streams is one for the event of this file, which stands behind the program's event in that stream;
//! so streams that are created later can wait for it too, whatever becomes of the program's event.

use crate::{
    error::Result,
    session::Session,
    state::{
        events::{EventRef, Events},
        streams::{NON_BLOCKING, StreamRef, Streams},
    },
};
use sluice_protocol::{
    calls::wire,
    handle::{Event as EventKind, Id},
};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
};

#[derive(Clone, Copy)]
struct Gate {
    /// Raw id of the stream.
    stream: u64,
    event: Id<EventKind>,
    /// Stream slot and sequence at which all waits of the context so far are over.
    until: Option<(u32, u64)>,
}

/// The gates of contexts, by raw id.
#[derive(Default)]
pub(crate) struct Gates {
    gates: Mutex<BTreeMap<u64, Gate>>,
}

impl Gates {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Gate>> {
        self.gates.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The gate of a context, created at first use.
    fn of(&self, session: &Session, streams: &Streams, events: &Events, context: u64) -> Result<Gate> {
        /// `CU_EVENT_DISABLE_TIMING`.
        const DISABLE_TIMING: u32 = 2;
        let mut gates = self.lock();
        if let Some(gate) = gates.get(&context) {
            return Ok(*gate);
        }
        let event = events.create(session, context, DISABLE_TIMING)?;
        let stream = match streams.create_apart(session, context, NON_BLOCKING, 0) {
            Ok(stream) => stream.id().raw(),
            Err(error) => {
                events.destroy(session, events.resolve(event.raw())?)?;
                return Err(error);
            }
        };
        let gate = Gate { stream, event, until: None };
        gates.insert(context, gate);
        Ok(gate)
    }

    /// Records an event behind all work of its context; `behind` may post more work there.
    pub(crate) fn record(
        &self,
        session: &Session,
        streams: &Streams,
        events: &Events,
        event: EventRef<'_>,
        behind: impl FnOnce(StreamRef<'_>) -> Result,
    ) -> Result {
        let gate = self.of(session, streams, events, event.context)?;
        let stream = streams.by_id(gate.stream)?;
        let call = wire::context_record::Args { event: event.id };
        let sequence = session.post(stream.context, Some(stream.target()), &call)?;
        event.recorded_at(stream, sequence);
        behind(stream)
    }

    /// Makes all later work of a context wait for an event, for which `wait` makes one stream wait.
    pub(crate) fn wait(
        &self,
        session: &Session,
        streams: &Streams,
        events: &Events,
        context: u64,
        wait: impl FnOnce(StreamRef<'_>) -> Result,
    ) -> Result {
        let gate = self.of(session, streams, events, context)?;
        let own = streams.by_id(gate.stream)?;
        wait(own)?;
        let gate_event = events.resolve(gate.event.raw())?;
        gate_event.record(session, own)?;
        // First for later streams, then for those that there are.
        if let Some(gate) = self.lock().get_mut(&context) {
            gate.until = gate.until.max(gate_event.recorded());
        }
        for stream in streams.held_with(context) {
            match wait_behind(session, stream, gate) {
                // Another thread has ended the stream meanwhile.
                Err(_) if !stream.is_live() => {}
                posted => posted?,
            }
        }
        Ok(())
    }

    /// Makes a new stream wait as the others of its context do.
    pub(crate) fn enter(&self, session: &Session, stream: StreamRef<'_>) -> Result {
        let gate = self.lock().get(&stream.context).copied();
        match gate.and_then(|gate| Some((gate, gate.until?))) {
            Some((gate, (slot, sequence))) if !session.is_complete(slot, sequence) => {
                wait_behind(session, stream, gate)
            }
            _ => Ok(()),
        }
    }

    /// Forgets the gate of a context that has ended with its streams and events.
    pub(crate) fn forget_context(&self, context: u64) {
        self.lock().remove(&context);
    }
}

fn wait_behind(session: &Session, stream: StreamRef<'_>, gate: Gate) -> Result {
    let call = wire::stream_wait::Args { event: gate.event };
    session.post(stream.context, Some(stream.target()), &call).map(drop)
}
