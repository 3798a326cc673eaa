//! Events that processes of the system share: their words in device memory, which streams write and for which they wait.
//!
//! A recording is numbered before the call returns, so another process that learns of it afterwards finds it. A process that ends
//! before its recording is reached leaves it unreached, and streams that wait for it stay held.

use crate::{
    error::{Error, Result},
    host_memory,
    process::ProcessState,
    session::waiting::pause,
    state::{
        contexts::Context,
        devices::attribute,
        events::{EventRef, INTERPROCESS},
        memory::{device_map::RangeOrigin, imports::ExportToken},
        shared_events::{
            ALL_WORDS, BYTES, CHUNK_BYTES, ChunkName, EventWords, SharedEvent, WORDS, slot_of, take_slot,
            taken_at,
        },
        streams::{NON_BLOCKING, StreamRef},
    },
};
use core::time::Duration;
use sluice_protocol::{
    calls::wire,
    field::{ArenaOut, DeviceAddress, ElementSize, Ordinal, Size},
};
use std::sync::{Arc, PoisonError};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// Shortest and longest time between two looks of a thread that waits.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// The shared form of an event, if it has one.
pub(super) fn of(process: &ProcessState, event: &EventRef<'_>) -> Option<Arc<SharedEvent>> {
    if event.flags() & INTERPROCESS == 0 { None } else { process.shared_events.get(event.id.raw()) }
}

/// Reads the first words of an event.
fn read<const N: usize>(process: &ProcessState, event: &SharedEvent) -> Result<EventWords<N>> {
    let stream = process.own_stream(event.context)?;
    let bytes = 8 * N as u64;
    let mut words = [0; N];
    process.arena.with_room(
        &process.session,
        bytes,
        || Ok(()),
        |at| {
            let call = wire::memcpy_dtoh::Args {
                to: ArenaOut { address: at, bytes },
                from: DeviceAddress(event.words),
            };
            let sequence = process.session.post(stream.context, Some(stream.target()), &call)?;
            process.session.wait_complete(stream.slot, sequence)?;
            for (word, at) in words.iter_mut().zip((at..).step_by(8)) {
                let mut bytes = [0; 8];
                host_memory::read(at, &mut bytes);
                *word = u64::from_ne_bytes(bytes);
            }
            Ok(())
        },
    )?;
    Ok(EventWords(words))
}

fn write(
    process: &ProcessState,
    event: &SharedEvent,
    stream: StreamRef<'_>,
    index: usize,
    value: u64,
) -> Result<u64> {
    let to = DeviceAddress(event.words + 8 * index as u64);
    let call = wire::stream_write_value::Args { to, value, wide: true };
    process.session.post(stream.context, Some(stream.target()), &call)
}

/// Begins a recording that is reached when work of `stream` is. If all slots are taken, waits for one of this process's recordings.
pub(super) fn record(process: &ProcessState, event: &SharedEvent, stream: StreamRef<'_>) -> Result {
    let mut recordings = event.recordings.lock().unwrap_or_else(PoisonError::into_inner);
    let notes = process.own_stream(event.context)?;
    let mut nap = SHORTEST_NAP;
    let number = loop {
        let access = |index, value| {
            write(process, event, notes, index, value)?;
            read::<ALL_WORDS>(process, event)
        };
        if let Some(number) = take_slot(recordings.next, process.shared_events.id(), access)? {
            break number;
        }
        // Recordings of processes that have ended are never reached.
        if recordings.under_way.is_empty() {
            return Err(Error::OUT_OF_MEMORY);
        }
        recordings.under_way.retain(|(slot, sequence)| !process.session.is_complete(*slot, *sequence));
        pause(nap);
        nap = (nap * 2).min(LONGEST_NAP);
    };
    let slot = slot_of(number);
    recordings.next = slot;
    let sequence = write(process, event, notes, 0, number)?;
    process.session.wait_complete(notes.slot, sequence)?;
    let reach = |stream: StreamRef<'_>| {
        write(process, event, stream, slot, number)?;
        write(process, event, stream, taken_at(slot), 0)
    };
    match reach(stream) {
        Ok(sequence) => {
            recordings.under_way.retain(|(slot, sequence)| !process.session.is_complete(*slot, *sequence));
            recordings.under_way.push((stream.slot, sequence));
            Ok(())
        }
        // The stream has ended meanwhile, and no other process shall wait for the recording.
        Err(error) => reach(notes).and(Err(error)),
    }
}

/// Makes a stream wait for the latest recording.
pub(super) fn wait(process: &ProcessState, event: &SharedEvent, stream: StreamRef<'_>) -> Result {
    let words = read::<WORDS>(process, event)?;
    if words.is_reached() {
        return Ok(());
    }
    let (value, slot) = (words.latest(), slot_of(words.latest()));
    let at = DeviceAddress(event.words + 8 * slot as u64);
    let call = wire::stream_wait_value::Args { at, value, wide: true, comparison: 0 };
    process.session.post(stream.context, Some(stream.target()), &call).map(drop)
}

/// True if the latest recording is reached.
pub(super) fn is_reached(process: &ProcessState, event: &SharedEvent) -> Result<bool> {
    read::<WORDS>(process, event).map(|words| words.is_reached())
}

/// Waits on this thread for the recording that is the latest now.
pub(super) fn synchronize(process: &ProcessState, event: &SharedEvent) -> Result {
    let mut nap = SHORTEST_NAP;
    let latest = read::<WORDS>(process, event)?.latest();
    loop {
        if read::<WORDS>(process, event)?.reached(latest) {
            return Ok(());
        }
        pause(nap);
        nap = (nap * 2).min(LONGEST_NAP);
    }
}

/// Shares an event with other processes, and returns its token.
pub(super) fn share(process: &ProcessState, event: &EventRef<'_>) -> Result<ExportToken> {
    if event.flags() & INTERPROCESS == 0 {
        return Err(Error::INVALID_HANDLE);
    }
    let device = process.devices.get(process.contexts.device(event.context)?)?;
    if device.bound(attribute::CAN_USE_64_BIT_STREAM_MEM_OPS) == 0 {
        return Err(Error::NOT_SUPPORTED);
    }
    let context = event.context;
    let allocate = || {
        let call = wire::memory_allocate::Args { pool: 0, bytes: Size(CHUNK_BYTES) };
        let start = process.session.sync(context, &call)?.address;
        process.device_map.enter(start, CHUNK_BYTES, context, RangeOrigin::Internal)?;
        let call = wire::ipc_export::Args { address: DeviceAddress(start) };
        let shared = process.session.sync(context, &call)?;
        Ok((start, ChunkName { share: shared.share, offset: shared.offset }))
    };
    let _sharing = process.shared_events.sharing.lock().unwrap_or_else(PoisonError::into_inner);
    // A later call finds the event shared, and its place by its address.
    if let Some(shared) = of(process, event) {
        return process
            .shared_events
            .name_of(&shared)
            .map(|(name, place)| ExportToken::event(device.uuid, name.share, name.offset, place))
            .ok_or(Error::INVALID_VALUE);
    }
    let is_complete = |slot, sequence| process.session.is_complete(slot, sequence);
    let (shared, name, place) = process.shared_events.place(context, is_complete, allocate)?;
    let begun = begin(process, event, &shared);
    if let Err(error) = begun {
        process.shared_events.give(&shared, || posted(process));
        return Err(error);
    }
    process.shared_events.insert(event.id.raw(), shared);
    Ok(ExportToken::event(device.uuid, name.share, name.offset, place))
}

/// Clears the words of an event, and takes its recording over into them.
fn begin(process: &ProcessState, event: &EventRef<'_>, shared: &SharedEvent) -> Result {
    let notes = process.own_stream(shared.context)?;
    let call = wire::memset::Args {
        to: DeviceAddress(shared.words),
        pitch: 0,
        element: ElementSize::Byte,
        value: 0,
        width: BYTES,
        height: 1,
    };
    let sequence = process.session.post(notes.context, Some(notes.target()), &call)?;
    process.session.wait_complete(notes.slot, sequence)?;
    match event.recorded() {
        Some((slot, sequence)) if !process.session.is_complete(slot, sequence) => {
            // A stream of its own, because it is held meanwhile.
            let stream = process.streams.create_apart(&process.session, shared.context, NON_BLOCKING, 0)?;
            let call = wire::stream_wait::Args { event: event.id };
            process.session.post(stream.context, Some(stream.target()), &call)?;
            record(process, shared, stream)?;
            process.streams.destroy(&process.session, stream)
        }
        Some(_) => record(process, shared, notes),
        None => Ok(()),
    }
}

/// Opens an event of another process in a context; returns its id.
pub(super) fn open(process: &ProcessState, context: Context, handle: &[u8; 64]) -> Result<u64> {
    let token = ExportToken::from_event(&process.devices, context.device, handle)?;
    release_unused(process)?;
    let (offset, place) = token.within();
    let map = || {
        let device = Ordinal(process.devices.get(context.device)?.ordinal);
        let call = wire::ipc_open::Args { device, share: token.share, offset, bytes: CHUNK_BYTES };
        let start = process.session.sync(context.raw, &call)?.address;
        process.device_map.enter(start, CHUNK_BYTES, context.raw, RangeOrigin::Internal)
    };
    let name = ChunkName { share: token.share, offset };
    let shared = process.shared_events.open(context.raw, name, place, map)?;
    match process.events.create(&process.session, context.raw, INTERPROCESS | DISABLE_TIMING) {
        Ok(event) => {
            process.shared_events.insert(event.raw(), shared);
            Ok(event.raw())
        }
        Err(error) => {
            process.shared_events.give(&shared, Vec::new);
            Err(error)
        }
    }
}

/// Ends the sharing of an event that was destroyed here.
pub(super) fn destroyed(process: &ProcessState, event: u64) -> Result {
    if let Some(shared) = process.shared_events.remove(event) {
        process.shared_events.give(&shared, || posted(process));
        release_unused(process)?;
    }
    Ok(())
}

/// Slots and sequences of all work that is under way.
fn posted(process: &ProcessState) -> Vec<(u32, u64)> {
    let is_open = |(slot, sequence): &(u32, u64)| !process.session.is_complete(*slot, *sequence);
    process.streams.all_posted().filter(is_open).collect()
}

/// Unmaps memory of other processes' events that nothing uses any more.
fn release_unused(process: &ProcessState) -> Result {
    let is_complete = |slot, sequence| process.session.is_complete(slot, sequence);
    for (context, start) in process.shared_events.take_unused(is_complete) {
        process.device_map.forget(start);
        let call = wire::memory_free::Args { address: DeviceAddress(start) };
        process.session.post(context, None, &call)?;
    }
    Ok(())
}

/// Makes one stream wait for an event.
pub(super) fn wait_in(process: &ProcessState, event: &EventRef<'_>, stream: StreamRef<'_>) -> Result {
    match of(process, event) {
        Some(shared) => wait(process, &shared, stream),
        None => {
            let call = wire::stream_wait::Args { event: event.id };
            process.session.post(stream.context, Some(stream.target()), &call).map(drop)
        }
    }
}

/// True if all work before an event's last recording is complete.
pub(super) fn is_complete(process: &ProcessState, event: u64) -> Result<bool> {
    let found = process.events.resolve(event)?;
    if let Some(shared) = of(process, &found) {
        return is_reached(process, &shared);
    }
    Ok(found.recorded().is_none_or(|(slot, sequence)| process.session.is_complete(slot, sequence)))
}
