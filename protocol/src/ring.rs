//! The ring of one session: many guest threads in, one dispatcher out, order kept.
//!
//! `tail` and `head` count bytes ever published and consumed, so full and empty cannot be confused. Records are multiples of 8
//! bytes and never wrap: a padding word fills the end of the ring where the next record does not fit. Guest threads take a lock
//! of their own process around [`Producer`]; the ring needs no lock of the worker.
//!
//! The consumer trusts nothing: it keeps `head` privately, checks that `tail` and every size are possible, and copies a record
//! out once before any code looks at it.

use crate::{limits, session, shared::Shared};
use core::sync::atomic::Ordering;

const MASK: u64 = limits::RING_BYTES - 1;
const _: () = assert!(limits::RING_BYTES.is_power_of_two());
/// First word of the space that is skipped at the end of the ring.
const PADDING: u32 = u32::MAX;

/// The guest's end. One per session, behind the shim's lock.
#[derive(Debug, Default)]
pub struct Producer {
    tail: u64,
    head_seen: u64,
}

/// The ring has no room for the record now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full;

impl Producer {
    /// A producer at the start of an empty ring.
    #[must_use]
    pub const fn new() -> Producer {
        Producer { tail: 0, head_seen: 0 }
    }

    /// Copies a record into the ring and publishes it. Its length is a multiple of 8, at most
    /// [`limits::RECORD_BYTES`], and is in its first four bytes; the consumer refuses any other record.
    ///
    /// # Errors
    /// [`Full`] when there is no room; nothing was written.
    pub fn publish(&mut self, memory: &impl Shared, record: &[u8]) -> Result<(), Full> {
        let bytes = record.len() as u64;
        let at = self.tail & MASK;
        let to_end = limits::RING_BYTES.wrapping_sub(at);
        let skip = if to_end < bytes { to_end } else { 0 };
        let end = self.tail.wrapping_add(skip).wrapping_add(bytes);
        if end.wrapping_sub(self.head_seen) > limits::RING_BYTES {
            self.head_seen = memory.load_u64(session::RING_HEAD, Ordering::Acquire);
            if end.wrapping_sub(self.head_seen) > limits::RING_BYTES {
                return Err(Full);
            }
        }
        if skip > 0 {
            memory.write(position(at), &PADDING.to_le_bytes());
        }
        memory.write(position(self.tail.wrapping_add(skip)), record);
        self.tail = end;
        memory.store_u64(session::RING_TAIL, end, Ordering::Release);
        Ok(())
    }

    /// True if a record of `bytes` would fit now.
    pub fn has_room(&mut self, memory: &impl Shared, bytes: usize) -> bool {
        self.head_seen = memory.load_u64(session::RING_HEAD, Ordering::Acquire);
        let worst = (bytes as u64).saturating_mul(2);
        self.tail.wrapping_add(worst).wrapping_sub(self.head_seen) <= limits::RING_BYTES
    }
}

/// A violation of the ring's rules by the guest; the session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The tail is impossible: it is behind the head, too far ahead, or not a multiple of 8.
    #[error("ring tail {tail:#x} is impossible at head {head:#x}")]
    Tail {
        /// Bytes consumed.
        head: u64,
        /// Bytes published, as the guest claims.
        tail: u64,
    },
    /// A record's size is too small, too large, unaligned, or exceeds what was published.
    #[error("record of {size} bytes at {head:#x}, {available} published")]
    Size {
        /// Bytes consumed.
        head: u64,
        /// The size in the record.
        size: u32,
        /// Bytes up to the tail.
        available: u64,
    },
}

/// The worker's end.
#[derive(Debug, Default)]
pub struct Consumer {
    head: u64,
}

impl Consumer {
    /// A consumer at the start of an empty ring.
    #[must_use]
    pub const fn new() -> Consumer {
        Consumer { head: 0 }
    }

    /// Bytes ever consumed.
    #[must_use]
    pub const fn position(&self) -> u64 {
        self.head
    }

    /// True if every published byte is consumed.
    pub fn is_empty(&self, memory: &impl Shared) -> bool {
        memory.load_u64(session::RING_TAIL, Ordering::Acquire) == self.head
    }

    /// Copies the next record into `into` and returns its size; `None` when the ring is empty. The space is given back
    /// to the guest before this returns, since the copy is complete.
    ///
    /// # Errors
    /// [`RingError`] when the guest wrote an impossible tail or size.
    pub fn next(
        &mut self,
        memory: &impl Shared,
        into: &mut [u8; limits::RECORD_BYTES],
    ) -> Result<Option<usize>, RingError> {
        loop {
            let tail = memory.load_u64(session::RING_TAIL, Ordering::Acquire);
            let available = tail.wrapping_sub(self.head);
            if available == 0 {
                return Ok(None);
            }
            if available > limits::RING_BYTES || !available.is_multiple_of(8) {
                return Err(RingError::Tail { head: self.head, tail });
            }
            let at = self.head & MASK;
            let mut first = [0; 4];
            memory.read(position(at), &mut first);
            let size = u32::from_le_bytes(first);
            let to_end = limits::RING_BYTES.wrapping_sub(at);
            // Padding is only where some record would not have fitted, so two never follow each other and a guest
            // cannot keep the dispatcher in this loop.
            if size == PADDING && to_end <= available && to_end < limits::RECORD_BYTES as u64 {
                self.advance(memory, to_end);
                continue;
            }
            let error = RingError::Size { head: self.head, size, available };
            let bytes = u64::from(size);
            if !bytes.is_multiple_of(8) || bytes > available || bytes > to_end {
                return Err(error);
            }
            let record = into
                .get_mut(..size as usize)
                .filter(|record| record.len() >= crate::record::HEADER_BYTES)
                .ok_or(error)?;
            memory.read(position(at), record);
            self.advance(memory, bytes);
            return Ok(Some(size as usize));
        }
    }

    fn advance(&mut self, memory: &impl Shared, bytes: u64) {
        self.head = self.head.wrapping_add(bytes);
        memory.store_u64(session::RING_HEAD, self.head, Ordering::Release);
    }
}

/// Byte offset of a ring position in the control resource.
fn position(at: u64) -> usize {
    session::RING_AT.wrapping_add((at & MASK) as usize)
}
