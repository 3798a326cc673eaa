//! Records and waits of whole contexts, green ones included.
//!
//! A context that needs them gets a stream and an event of its own. An event of all its work is recorded in that stream, behind the work
//! of the others. A wait of all its streams is one for the event of this file, which stands behind the program's event in that stream;
//! so streams that are created later can wait for it too, whatever becomes of the program's event.

use crate::{
    error::Result,
    session::Session,
    state::{
        events::Events,
        green::Green,
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
    /// In the gate of a green context, an event that leads from its other streams to the gate's.
    joint: Option<Id<EventKind>>,
}

/// The streams that a gate is for: those of a context, or those of a green context in it.
#[derive(Clone, Copy)]
pub(crate) struct Whole {
    context: u64,
    /// Raw id of the green context, 0 for none.
    green: u64,
}

impl Whole {
    pub(crate) const fn of_context(context: u64) -> Whole {
        Whole { context, green: 0 }
    }

    pub(crate) fn of_green(green: &Green) -> Whole {
        Whole { context: green.primary, green: green.id.raw() }
    }

    fn key(self) -> u64 {
        if self.green == 0 { self.context } else { self.green }
    }
}

/// The gates of contexts, by raw id.
#[derive(Default)]
pub(crate) struct Gates {
    gates: Mutex<BTreeMap<u64, Gate>>,
    /// Held while streams are led to a gate: all use one event.
    joining: Mutex<()>,
}

impl Gates {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Gate>> {
        self.gates.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The gate of a context, created at first use.
    fn of(&self, session: &Session, streams: &Streams, events: &Events, whole: Whole) -> Result<Gate> {
        /// `CU_EVENT_DISABLE_TIMING`.
        const DISABLE_TIMING: u32 = 2;
        let mut gates = self.lock();
        let context = whole.context;
        if let Some(gate) = gates.get(&whole.key()) {
            return Ok(*gate);
        }
        let create = || events.create(session, context, DISABLE_TIMING);
        let destroy = |event: Id<EventKind>| events.destroy(session, events.resolve(event.raw())?);
        let event = create()?;
        let joint = if whole.green == 0 { Ok(None) } else { create().map(Some) };
        let joint = joint.or_else(|error| destroy(event).and(Err(error)))?;
        let stream = match streams.create_apart(session, context, NON_BLOCKING, 0) {
            Ok(stream) => stream.id().raw(),
            Err(error) => {
                joint.map_or(Ok(()), destroy)?;
                destroy(event)?;
                return Err(error);
            }
        };
        let gate = Gate { stream, event, until: None, joint };
        gates.insert(whole.key(), gate);
        Ok(gate)
    }

    /// Makes all later work of a context, or of a green one, wait for an event, for which `wait` makes one stream wait.
    pub(crate) fn wait(
        &self,
        session: &Session,
        streams: &Streams,
        events: &Events,
        whole: Whole,
        wait: impl FnOnce(StreamRef<'_>) -> Result,
    ) -> Result {
        let gate = self.of(session, streams, events, whole)?;
        let own = streams.by_id(gate.stream)?;
        wait(own)?;
        let gate_event = events.resolve(gate.event.raw())?;
        gate_event.record(session, own)?;
        // First for later streams, then for those that there are.
        if let Some(gate) = self.lock().get_mut(&whole.key()) {
            gate.until = gate.until.max(gate_event.recorded());
        }
        let held: Vec<_> = match whole.green {
            0 => streams.held_with(whole.context).collect(),
            green => streams.of_green(green).collect(),
        };
        for stream in held {
            match wait_behind(session, stream, gate) {
                // Another thread has ended the stream meanwhile.
                Err(_) if !stream.is_live() => {}
                posted => posted?,
            }
        }
        Ok(())
    }

    /// Leads the work of a stream so far to the gate of its green context.
    fn join(&self, session: &Session, events: &Events, gate: Gate, pair: [StreamRef<'_>; 2]) -> Result {
        let [own, stream] = pair;
        let Some(joint) = gate.joint else { return Ok(()) };
        let _joining = self.joining.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        events.resolve(joint.raw())?.record(session, stream)?;
        let call = wire::stream_wait::Args { event: joint };
        session.post(own.context, Some(own.target()), &call).map(drop)
    }

    /// Records in a stream behind all work of a context, or of a green one.
    pub(crate) fn record(
        &self,
        session: &Session,
        streams: &Streams,
        events: &Events,
        whole: Whole,
        record: impl FnOnce(StreamRef<'_>) -> Result,
    ) -> Result {
        let gate = self.of(session, streams, events, whole)?;
        let own = streams.by_id(gate.stream)?;
        // The driver finds the work of a context, but not that of a green one.
        let led = (whole.green != 0).then(|| streams.of_green(whole.green));
        for stream in led.into_iter().flatten() {
            match self.join(session, events, gate, [own, stream]) {
                // Another thread has ended the stream meanwhile, and led its work to the gate.
                Err(_) if !stream.is_live() => {}
                joined => joined?,
            }
        }
        record(own)
    }

    /// Leads work of a stream that is about to be destroyed to the gate of its green context, for events that are recorded later.
    pub(crate) fn leave(
        &self,
        session: &Session,
        streams: &Streams,
        events: &Events,
        stream: StreamRef<'_>,
    ) -> Result {
        if session.is_complete(stream.slot, stream.posted()) {
            return Ok(());
        }
        let whole = Whole { context: stream.context, green: stream.green() };
        let gate = self.of(session, streams, events, whole)?;
        self.join(session, events, gate, [streams.by_id(gate.stream)?, stream])
    }

    /// Destroys the gate of a green context whose work is complete.
    pub(crate) fn end_green(
        &self,
        session: &Session,
        streams: &Streams,
        events: &Events,
        green: u64,
    ) -> Result {
        let Some(gate) = self.lock().remove(&green) else { return Ok(()) };
        let own = streams.by_id(gate.stream)?;
        session.wait_complete(own.slot, own.posted())?;
        streams.destroy(session, own)?;
        for event in [Some(gate.event), gate.joint].into_iter().flatten() {
            events.destroy(session, events.resolve(event.raw())?)?;
        }
        Ok(())
    }

    /// Makes a new stream wait as the others of its context do, and those of its green context.
    pub(crate) fn enter(&self, session: &Session, stream: StreamRef<'_>) -> Result {
        self.enter_gate(session, stream, stream.context)?;
        if stream.green() == 0 { Ok(()) } else { self.enter_gate(session, stream, stream.green()) }
    }

    fn enter_gate(&self, session: &Session, stream: StreamRef<'_>, key: u64) -> Result {
        let gate = self.lock().get(&key).copied();
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
