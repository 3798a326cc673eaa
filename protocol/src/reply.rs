//! Answers: one slot per waiting guest thread.
//!
//! A slot is `ticket u32, result u32, length u32, reserved u32`, then the answer's fields. The worker writes the fields and the
//! result first and the ticket last; the guest polls for its own ticket. The guest trusts nothing in it beyond the checks of
//! decoding: the host may be hostile to the guest, too.

use crate::{
    limits,
    session::{self, entry},
    shared::Shared,
};
use core::sync::atomic::Ordering;

/// Offset of reply slot `slot` in the control resource.
#[must_use]
pub const fn slot_at(slot: u32) -> usize {
    entry(session::REPLIES_AT, slot % limits::REPLY_SLOTS, limits::REPLY_SLOT_BYTES)
}

/// Publishes an answer: `result` is a CUresult, `fields` are at most [`limits::REPLY_BYTES`] (more are cut, which the
/// guest's decoder refuses; answers are bounded by their types, so it does not happen).
pub fn publish(memory: &impl Shared, slot: u32, ticket: u32, result: u32, fields: &[u8]) {
    let at = slot_at(slot);
    let fields = fields.get(..limits::REPLY_BYTES).unwrap_or(fields);
    memory.write(at.wrapping_add(16), fields);
    memory.store_u32(at.wrapping_add(4), result, Ordering::Relaxed);
    memory.store_u32(at.wrapping_add(8), u32::try_from(fields.len()).unwrap_or(0), Ordering::Relaxed);
    memory.store_u32(at, ticket, Ordering::Release);
}

/// True if the slot holds the answer to `ticket`.
pub fn is_ready(memory: &impl Shared, slot: u32, ticket: u32) -> bool {
    memory.load_u32(slot_at(slot), Ordering::Acquire) == ticket
}

/// Copies a ready answer out: its result and its fields, a prefix of `into`.
pub fn take<'b>(memory: &impl Shared, slot: u32, into: &'b mut [u8; limits::REPLY_BYTES]) -> (u32, &'b [u8]) {
    let at = slot_at(slot);
    let result = memory.load_u32(at.wrapping_add(4), Ordering::Relaxed);
    let length = memory.load_u32(at.wrapping_add(8), Ordering::Relaxed) as usize;
    let fields = into.get_mut(..length).unwrap_or_default();
    memory.read(at.wrapping_add(16), fields);
    (result, fields)
}
