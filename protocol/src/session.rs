//! The control resource of a session: its layout, word by word.
//!
//! One guest process has one session and one control resource, [`BYTES`] long, shared by shim and worker:
//!
//! | offset | content | written by |
//! |---|---|---|
//! | `0x0000` | header words below, one cache line each | as noted |
//! | `0x1000` | attach table, one [`Attachment`] per resource | worker |
//! | `0x2000` | completed sequence of each stream, `u64` | worker |
//! | `0x4000` | late errors, one [`LateError`] per context and one of no context | worker |
//! | `0x10000` | reply slots | worker |
//! | `0x50000` | ring | guest |
//!
//! **State.** The shim writes magic and version and asks the device to open the session; the worker maps the resource and sets
//! [`STATE`] to [`READY`]. When there will be no worker, or it is gone, the device sets [`LOST`] and a CUresult in
//! [`LOST_ERROR`]; every wait of the shim looks at the state, so no thread is left waiting for a dead worker.
//!
//! **Host functions.** A stream that reaches a function of the program is held while the program runs it. The worker stores a
//! [`HostCall`] at [`HOST_CALL`] and wakes the guest; the guest runs the function and stores the same word at [`HOST_RETURN`]. The next
//! call is stored only after that, so each direction has one word. Before a call is stored, the sequences of all work that the function
//! may rely on are published as completed.
//!
//! **Fixed arena.** If the VM has fixed arenas, the device sets [`FIXED_ARENA`] when it opens the session. The shim then attaches one
//! resource of that size in entry [`FIXED_ARENA_SLOT`], and the worker receives it before it receives the control resource. The
//! device refuses every other resource.

use crate::{limits, shared::Shared};
use core::sync::atomic::Ordering;

/// The version of this layout. The magic word, [`STATE`] and [`LOST_ERROR`] have these offsets in every version, so that a guest of
/// another version receives an error.
pub const VERSION: u16 = 1;
/// First word of a control resource, written by the shim: "sluice" and the layout's version.
pub const MAGIC: u64 = magic(VERSION);

/// The first word of a control resource whose layout is of this version.
#[must_use]
pub const fn magic(version: u16) -> u64 {
    let [low, high] = version.to_le_bytes();
    let [a, b, c, d, e, f] = *b"sluice";
    u64::from_le_bytes([a, b, c, d, e, f, low, high])
}

/// The version of the layout that begins with this word; `None` if the word is not a shim's.
#[must_use]
pub const fn version(word: u64) -> Option<u16> {
    let [.., low, high] = word.to_le_bytes();
    let version = u16::from_le_bytes([low, high]);
    if magic(version) == word { Some(version) } else { None }
}

/// Offset of the magic word.
pub const MAGIC_AT: usize = 0x00;
/// Offset of the state word ([`NEW`], [`READY`] or [`LOST`]); host to guest.
pub const STATE: usize = 0x40;
/// Offset of the CUresult that goes with [`LOST`]; host to guest, written before the state.
pub const LOST_ERROR: usize = 0x44;
/// Offset of the bytes of the session's only arena, 0 if arenas grow; device to guest, written when the session is opened.
pub const FIXED_ARENA: usize = 0x48;
/// Entry of the attach table for the only arena of a session whose VM has fixed arenas.
pub const FIXED_ARENA_SLOT: u32 = 1;
/// Offset of the session's sticky CUresult, 0 while healthy; worker to guest.
pub const STICKY: usize = 0x80;
/// Offset of the word the worker sets while its dispatcher sleeps; the guest swaps it to 0 and rings the doorbell.
pub const WORKER_PARKED: usize = 0xc0;
/// Offset of the word the shim sets while its waker thread sleeps; the worker swaps it to 0 and wakes the guest.
pub const GUEST_PARKED: usize = 0x100;
/// Offset of the ring's tail: bytes ever published; guest to worker.
pub const RING_TAIL: usize = 0x140;
/// Offset of the ring's head: bytes ever consumed; worker to guest.
pub const RING_HEAD: usize = 0x180;

/// Offset of the word that is 1 while there is text of kernels to fetch; worker to guest.
pub const CONSOLE: usize = 0x1c0;

/// Offset of a session's [`Nonce`], in the first page of each of its resources. The shim writes it if the driver has no contexts, and
/// the device clears it after reading it.
pub const NONCE_AT: usize = 0x200;

/// Offset of the latest [`HostCall`]; worker to guest.
pub const HOST_CALL: usize = 0x240;
/// Offset of the latest [`HostCall`] that has returned; guest to worker.
pub const HOST_RETURN: usize = 0x280;

/// Offset of the ring position up to which the worker publishes the ends of all work without being asked; worker to guest. A mirror of
/// the page leaves it at 0.
pub const MARKED: usize = 0x2c0;

/// Offset of the attach table.
pub const ATTACHMENTS_AT: usize = 0x1000;
/// Offset of the table of completed sequences.
pub const SEQUENCES_AT: usize = 0x2000;
/// Offset of the table of late errors.
pub const LATE_ERRORS_AT: usize = 0x4000;
/// Entries of the table of late errors: one per context, by its index, then one for posts that name no context.
pub const LATE_ERRORS: u32 = limits::CONTEXTS + 1;
/// Offset of the reply slots.
pub const REPLIES_AT: usize = 0x1_0000;
/// Offset of the ring.
pub const RING_AT: usize = REPLIES_AT + limits::REPLY_SLOTS as usize * limits::REPLY_SLOT_BYTES;
/// Bytes of the control resource.
pub const BYTES: usize = RING_AT + ring_bytes();

const _: () = assert!(ATTACHMENTS_AT + limits::ATTACHMENTS as usize * 16 <= SEQUENCES_AT);
const _: () = assert!(SEQUENCES_AT + limits::STREAMS as usize * 8 <= LATE_ERRORS_AT);
const _: () = assert!(LATE_ERRORS_AT + LATE_ERRORS as usize * 8 <= REPLIES_AT);
const _: () = assert!(BYTES.is_multiple_of(4096));

#[expect(clippy::cast_possible_truncation, reason = "one mebibyte")]
const fn ring_bytes() -> usize {
    limits::RING_BYTES as usize
}

/// The worker has not adopted the session yet.
pub const NEW: u32 = 0;
/// The worker serves the session.
pub const READY: u32 = 1;
/// There is no worker, or no longer: [`LOST_ERROR`] holds the reason.
pub const LOST: u32 = 2;

/// The secret that marks the resources of one session if a driver has no contexts: random, chosen by the shim, known to no other
/// process. The control resource carries it when the session is opened, every other resource when it is attached.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce([u8; 16]);

impl Nonce {
    /// Bytes of a nonce.
    pub const BYTES: usize = 16;

    /// The nonce of these bytes; `None` for zeros, the content of every page that was never written.
    #[must_use]
    pub fn new(bytes: [u8; Self::BYTES]) -> Option<Nonce> {
        (bytes != [0; Self::BYTES]).then_some(Nonce(bytes))
    }

    /// Its bytes.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// The half of it by which a token names its session.
    #[must_use]
    pub const fn key(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

// The value stays out of logs, since a reader of a log could use it.
impl core::fmt::Debug for Nonce {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Nonce")
    }
}

/// The state of a resource that the shim asked to attach; 16 bytes in the attach table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// Not answered yet.
    Pending,
    /// Mapped by the worker at the address asked for, this many bytes.
    Adopted(u64),
    /// This many bytes, but not mapped: the worker fetches data that is copied from there, and delivers data that is copied to there
    /// before it reports the copy as complete. The GPU cannot access this memory by itself.
    Gathered(u64),
    /// Refused with this CUresult.
    Refused(u32),
    /// Unmapped; the slot may be used again.
    Detached,
}

crate::numbered! {
    /// The state word of an [`Attachment`].
    pub(crate) enum AttachmentState {
        /// [`Attachment::Pending`].
        Pending = 0,
        /// [`Attachment::Adopted`].
        Adopted = 1,
        /// [`Attachment::Refused`].
        Refused = 2,
        /// [`Attachment::Detached`].
        Detached = 3,
        /// [`Attachment::Gathered`].
        Gathered = 4,
    }
}

impl Attachment {
    /// Its state, its error and its bytes.
    pub(crate) const fn parts(self) -> (AttachmentState, u32, u64) {
        match self {
            Attachment::Pending => (AttachmentState::Pending, 0, 0),
            Attachment::Adopted(bytes) => (AttachmentState::Adopted, 0, bytes),
            Attachment::Refused(error) => (AttachmentState::Refused, error, 0),
            Attachment::Detached => (AttachmentState::Detached, 0, 0),
            Attachment::Gathered(bytes) => (AttachmentState::Gathered, 0, bytes),
        }
    }

    /// The attachment of these parts; a state uses the parts that it has.
    pub(crate) const fn of(state: AttachmentState, error: u32, bytes: u64) -> Attachment {
        match state {
            AttachmentState::Pending => Attachment::Pending,
            AttachmentState::Adopted => Attachment::Adopted(bytes),
            AttachmentState::Refused => Attachment::Refused(error),
            AttachmentState::Detached => Attachment::Detached,
            AttachmentState::Gathered => Attachment::Gathered(bytes),
        }
    }
}

/// Offset of entry `index`, taken modulo its table's length by the caller, of a table: the tables' sizes are asserted above.
pub(crate) const fn entry(table: usize, index: u32, bytes: usize) -> usize {
    table.wrapping_add((index as usize).wrapping_mul(bytes))
}

/// Offset of attach-table entry `slot`.
#[must_use]
pub const fn attachment_at(slot: u32) -> usize {
    entry(ATTACHMENTS_AT, slot % limits::ATTACHMENTS, 16)
}

/// Reads attach-table entry `slot`.
pub fn attachment(memory: &impl Shared, slot: u32) -> Attachment {
    let at = attachment_at(slot);
    let state = AttachmentState::from_number(memory.load_u32(at, Ordering::Acquire));
    let error = memory.load_u32(at.wrapping_add(4), Ordering::Relaxed);
    let bytes = memory.load_u64(at.wrapping_add(8), Ordering::Relaxed);
    Attachment::of(state.unwrap_or(AttachmentState::Pending), error, bytes)
}

/// Writes attach-table entry `slot`.
pub fn set_attachment(memory: &impl Shared, slot: u32, value: Attachment) {
    let at = attachment_at(slot);
    let (state, error, bytes) = value.parts();
    memory.store_u32(at.wrapping_add(4), error, Ordering::Relaxed);
    memory.store_u64(at.wrapping_add(8), bytes, Ordering::Relaxed);
    memory.store_u32(at, state as u32, Ordering::Release);
}

/// Offset of the completed sequence of stream slot `slot`.
#[must_use]
pub const fn sequence_at(slot: u32) -> usize {
    entry(SEQUENCES_AT, slot % limits::STREAMS, 8)
}

/// The sequence up to which everything posted to stream slot `slot` is complete.
pub fn completed(memory: &impl Shared, slot: u32) -> u64 {
    memory.load_u64(sequence_at(slot), Ordering::Acquire)
}

/// Publishes that everything posted to stream slot `slot` up to `sequence` is complete.
pub fn set_completed(memory: &impl Shared, slot: u32, sequence: u64) {
    memory.store_u64(sequence_at(slot), sequence, Ordering::Release);
}

/// True if the worker publishes the ends of everything that is in the ring now without being asked.
pub fn is_marked(memory: &impl Shared) -> bool {
    memory.load_u64(MARKED, Ordering::Acquire) >= memory.load_u64(RING_TAIL, Ordering::Acquire)
}

/// Publishes that the ends of everything up to a position of the ring are published without a request.
pub fn set_marked(memory: &impl Shared, position: u64) {
    memory.store_u64(MARKED, position, Ordering::Release);
}

/// The last post of a context that failed without breaking the context. The guest reports each count once; it never writes
/// here, so that the table also serves guests that have a mirror of the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LateError {
    /// Failed posts of the context so far; the count wraps.
    pub count: u32,
    /// CUresult of the last one.
    pub code: u32,
}

/// Offset of an entry of the table of late errors.
#[must_use]
pub const fn late_error_at(index: u32) -> usize {
    entry(LATE_ERRORS_AT, index % LATE_ERRORS, 8)
}

/// The late error at `index`: the index of a context, or `limits::CONTEXTS` for no context.
pub fn late_error(memory: &impl Shared, index: u32) -> LateError {
    let [a, b, c, d, e, f, g, h] = memory.load_u64(late_error_at(index), Ordering::Acquire).to_le_bytes();
    LateError { code: u32::from_le_bytes([a, b, c, d]), count: u32::from_le_bytes([e, f, g, h]) }
}

/// Publishes a late error, before the work that failed appears complete.
pub fn set_late_error(memory: &impl Shared, index: u32, error: LateError) {
    let word = u64::from(error.code) | u64::from(error.count) << 32;
    memory.store_u64(late_error_at(index), word, Ordering::Release);
}

/// The call of a function of the program, as a word of the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCall {
    /// The number of the call, which distinguishes two calls of one function. 0 only in a page without a call.
    pub number: u32,
    /// The guest's name for the function.
    pub token: u32,
}

impl HostCall {
    /// The call of `token` that follows this call.
    #[must_use]
    pub const fn next(self, token: u32) -> HostCall {
        let number = match self.number.wrapping_add(1) {
            0 => 1,
            number => number,
        };
        HostCall { number, token }
    }

    /// Its word.
    #[must_use]
    pub const fn word(self) -> u64 {
        (self.number as u64) << 32 | self.token as u64
    }

    /// The call of a word.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
    pub const fn from_word(word: u64) -> HostCall {
        HostCall { number: (word >> 32) as u32, token: word as u32 }
    }
}

/// The latest call of a function of the program.
pub fn host_call(memory: &impl Shared) -> HostCall {
    HostCall::from_word(memory.load_u64(HOST_CALL, Ordering::Acquire))
}

/// Publishes a call of a function of the program, after everything that the function may rely on.
pub fn set_host_call(memory: &impl Shared, call: HostCall) {
    memory.store_u64(HOST_CALL, call.word(), Ordering::Release);
}

/// The latest call that has returned. A guest may store any word at any time, so it is only compared with the worker's own.
pub fn host_return(memory: &impl Shared) -> HostCall {
    HostCall::from_word(memory.load_u64(HOST_RETURN, Ordering::Acquire))
}

/// Publishes that a call has returned, after everything that its function wrote.
pub fn set_host_return(memory: &impl Shared, call: HostCall) {
    memory.store_u64(HOST_RETURN, call.word(), Ordering::Release);
}

/// The CUresults that the device and the daemon send into a session. They know nothing of the driver's interface, so the
/// numbers stand here; a test compares them with the driver's.
pub mod refusal {
    /// `CUDA_ERROR_INVALID_VALUE`: the request is malformed.
    pub const INVALID_VALUE: u32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`: the request exceeds a limit.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_DEVICE_UNAVAILABLE`: the session has no worker.
    pub const DEVICE_UNAVAILABLE: u32 = 46;
    /// `CUDA_ERROR_SYSTEM_DRIVER_MISMATCH`: the guest's library has another version.
    pub const SYSTEM_DRIVER_MISMATCH: u32 = 803;
}

/// Ends a session: stores the error, then the state.
pub fn set_lost(memory: &impl Shared, error: u32) {
    memory.store_u32(LOST_ERROR, error, Ordering::Relaxed);
    memory.store_u32(STATE, LOST, Ordering::Release);
}

/// The CUresult that every call returns from now on, if the session is over.
pub fn lost(memory: &impl Shared) -> Option<u32> {
    (memory.load_u32(STATE, Ordering::Acquire) == LOST)
        .then(|| memory.load_u32(LOST_ERROR, Ordering::Relaxed))
}
