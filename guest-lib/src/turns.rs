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
use std::sync::RwLockReadGuard;

/// The device's turn, which lasts at least until the work of the holder is posted.
pub(crate) type DeviceTurn<'a> = Option<RwLockReadGuard<'a, VariableBook>>;

/// Makes it the device's turn, before work is posted.
pub(crate) fn of_device(process: &ProcessState) -> Result<DeviceTurn<'_>> {
    let variables = &process.managed.variables;
    loop {
        let Some(book) = variables.book() else { return Ok(None) };
        if book.with_program == 0 {
            return Ok(Some(book));
        }
        drop(book);
        carry(process, &mut variables.change(), true)?;
    }
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

/// Makes it the program's turn after a synchronous copy, which need not be complete yet.
pub(crate) fn after_copy(process: &ProcessState, stream: StreamRef<'_>) -> Result {
    if process.managed.variables.book().is_none() {
        return Ok(());
    }
    process.wait_turn(stream)?;
    of_program(process)
}

/// Carries the contents of all variables to the device or to the program, while no work runs.
fn carry(process: &ProcessState, book: &mut VariableBook, to_device: bool) -> Result {
    for index in 0..book.variables.len() {
        let ManagedVariable { start, bytes, context, on_device } = book.variables[index];
        if on_device == to_device {
            continue;
        }
        let context = process.contexts.get(context);
        // Without its context no work can use it.
        if let Ok(stream) = context.and_then(|context| process.streams.at(context.legacy)) {
            let mut done = 0;
            while done < bytes {
                let portion = PORTION.min(bytes - done);
                carry_portion(process, stream, start + done, portion, to_device)?;
                done += portion;
            }
        }
        book.variables[index].on_device = to_device;
        if to_device { book.with_program -= 1 } else { book.with_program += 1 }
    }
    Ok(())
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
                host_memory::copy(room, at, length);
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
