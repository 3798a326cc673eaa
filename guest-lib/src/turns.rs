//! Turns with managed variables: their contents go to the device before work that may use them, and come back to the program when a
//! call that waits finds all work complete. Programs without such variables pay one load.

use crate::{
    error::Result,
    host_memory,
    process::ProcessState,
    state::{
        memory::{
            arena::PORTION,
            variables::{ManagedVariable, VariableBook},
        },
        streams::StreamRef,
    },
};
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaOut, DeviceAddress},
};
use std::sync::{RwLockReadGuard, RwLockWriteGuard};

/// The device's turn, which lasts at least until the work of the holder is posted.
pub(crate) type DeviceTurn<'a> = Option<RwLockReadGuard<'a, VariableBook>>;

/// Makes it the device's turn, before work is posted.
pub(crate) fn of_device(process: &ProcessState) -> Result<DeviceTurn<'_>> {
    let variables = &process.managed.variables;
    let Some(book) = variables.book() else { return Ok(None) };
    if book.with_program == 0 {
        return Ok(Some(book));
    }
    drop(book);
    let mut book = variables.change();
    carry(process, &mut book, true)?;
    Ok(Some(RwLockWriteGuard::downgrade(book)))
}

/// Ends the turn of a call that has posted work, and makes it the program's if all work is complete, but only after a call that `waits`
/// for its work by contract, or if launches block: other calls give no turn back.
pub(crate) fn end(
    process: &ProcessState,
    stream: StreamRef<'_>,
    turn: DeviceTurn<'_>,
    waits: bool,
) -> Result {
    if turn.is_none() {
        return Ok(());
    }
    drop(turn);
    if waits {
        process.wait_turn(stream)?;
        return of_program(process);
    }
    if process.session.launches_block() { of_program(process) } else { Ok(()) }
}

/// Makes it the program's turn if all work is complete.
pub(crate) fn of_program(process: &ProcessState) -> Result {
    let variables = &process.managed.variables;
    let posted = || process.streams.all_posted();
    let is_over = || posted().all(|(slot, sequence)| process.session.is_complete(slot, sequence));
    if variables.book().is_some_and(|book| book.with_program < book.variables.len()) {
        // Another thread that posts work holds the book: then the work is not over.
        while is_over() {
            if let Some(mut book) = variables.try_change() {
                // Work that was posted meanwhile may still run.
                return if is_over() { carry(process, &mut book, false) } else { Ok(()) };
            }
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// Carries the contents of all variables to the device or to the program, while no work can use them. Those that no context reaches stay:
/// no work can use them either.
fn carry(process: &ProcessState, book: &mut VariableBook, to_device: bool) -> Result {
    for index in 0..book.variables.len() {
        let ManagedVariable { start, bytes, context, on_device } = book.variables[index];
        if on_device == to_device {
            continue;
        }
        let Some(stream) = carrier(process, context)? else { continue };
        let mut done = 0;
        while done < bytes {
            let portion = PORTION.min(bytes - done);
            carry_portion(process, stream, start + done, portion, to_device)?;
            done += portion;
        }
        book.variables[index].on_device = to_device;
        if to_device { book.with_program -= 1 } else { book.with_program += 1 }
    }
    Ok(())
}

/// A stream of this library in a context, or in any one. The program's streams may be held by a wait that the caller ends itself.
fn carrier(process: &ProcessState, context: Option<u64>) -> Result<Option<StreamRef<'_>>> {
    let mut refusal = None;
    for raw in process.contexts.active().filter(|raw| context.is_none_or(|of| of == *raw)) {
        match process.own_stream(raw) {
            Ok(stream) => return Ok(Some(stream)),
            // It has ended meanwhile.
            Err(_) if process.contexts.get(raw).is_err() => {}
            Err(error) => refusal = Some(error),
        }
    }
    refusal.map_or(Ok(None), Err)
}

fn carry_portion(
    process: &ProcessState,
    stream: StreamRef<'_>,
    at: u64,
    bytes: u64,
    to_device: bool,
) -> Result {
    let (session, target) = (&process.session, Some(stream.target()));
    let length = usize::try_from(bytes).unwrap_or(0);
    process.arena.with_room(
        session,
        bytes,
        || process.wait_turn(stream),
        |room| {
            let sequence = if to_device {
                host_memory::stage(room, at, length);
                let from = ArenaIn { address: room, bytes };
                session.post(
                    stream.context,
                    target,
                    &wire::memcpy_htod::Args { to: DeviceAddress(at), from },
                )?
            } else {
                let to = ArenaOut { address: room, bytes };
                session.post(
                    stream.context,
                    target,
                    &wire::memcpy_dtoh::Args { to, from: DeviceAddress(at) },
                )?
            };
            session.wait_complete(stream.slot, sequence)?;
            if !to_device {
                host_memory::copy(at, room, length);
            }
            Ok(())
        },
    )
}
