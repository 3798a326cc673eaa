//! Frames: a session over a byte stream, where guest and host share no memory.
//!
//! Each side has the session page and the arenas in memory of its own, and sends the parts that the other has to see. The guest
//! sends records and, before each, the arena memory that its call reads ([`crate::staged`]). The host puts them into the memory
//! that its worker shares, and sends the worker's publications there: a change of a word, an answer, and before those the arena
//! memory that the call wrote. Frames take effect in the order in which they were sent, so neither side sees a sequence before
//! the bytes that it promises.
//!
//! A frame is a head of [`HEAD_BYTES`] and a payload:
//!
//! | offset | content |
//! |---|---|
//! | 0 | kind, `u32` |
//! | 4 | bytes of the payload, `u32` |
//! | 8 | two words, by kind |
//!
//! Both ends are hostile to each other: a head fully bounds its frame before a byte of the payload is taken.

use crate::{
    field::{FieldError, Reader},
    limits,
    session::{Attachment, AttachmentState, HostCall, LATE_ERRORS, LateError},
};

/// Bytes of a head.
pub const HEAD_BYTES: usize = 24;
/// First word of the first frame in each direction.
pub const MAGIC: u64 = u64::from_le_bytes(*b"sluice\x02\x00");

/// A head as bytes.
pub type Head = [u8; HEAD_BYTES];

/// A frame that a guest sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromGuest {
    /// First: the version of the records.
    Hello {
        /// [`crate::calls::VERSION`].
        version: u32,
    },
    /// The guest has a new resource, of zeroes.
    Create {
        /// Its id, the guest's choice.
        resource: u32,
        /// Its bytes.
        bytes: u64,
    },
    /// The guest has destroyed a resource.
    Destroy {
        /// Its id.
        resource: u32,
    },
    /// [`crate::doorbell::Doorbell::Open`].
    Open {
        /// The control resource.
        resource: u32,
    },
    /// [`crate::doorbell::Doorbell::Attach`].
    Attach {
        /// The resource.
        resource: u32,
        /// Entry of the attach table.
        slot: u32,
        /// The address.
        address: u64,
    },
    /// [`crate::doorbell::Doorbell::Detach`].
    Detach {
        /// Entry of the attach table.
        slot: u32,
    },
    /// [`crate::doorbell::Doorbell::Close`].
    Close,
    /// The payload is the next record of the ring.
    Record {
        /// Its bytes.
        bytes: u32,
    },
    /// The payload is the current content of arena memory.
    Bulk {
        /// The first address.
        address: u64,
        /// Bytes of the payload.
        bytes: u32,
    },
    /// [`crate::session::HOST_RETURN`].
    HostReturn {
        /// The call that has returned.
        call: HostCall,
    },
}

/// A frame that the host sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToGuest {
    /// First: the version of the records.
    Hello {
        /// [`crate::calls::VERSION`].
        version: u32,
    },
    /// [`crate::session::STATE`].
    State {
        /// The state.
        state: u32,
        /// [`crate::session::LOST_ERROR`].
        error: u32,
    },
    /// [`crate::session::STICKY`].
    Sticky {
        /// The error.
        error: u32,
    },
    /// [`crate::session::RING_HEAD`].
    Room {
        /// Bytes ever consumed.
        head: u64,
    },
    /// [`crate::session::CONSOLE`].
    Console {
        /// 1 if there is text to fetch.
        waiting: u32,
    },
    /// An entry of the attach table.
    Attachment {
        /// The index of the entry.
        slot: u32,
        /// The state of the resource.
        attachment: Attachment,
    },
    /// The completed sequence of a stream slot.
    Sequence {
        /// The stream slot.
        slot: u32,
        /// The sequence.
        sequence: u64,
    },
    /// The payload is the fields of an answer.
    Reply {
        /// Its slot.
        slot: u32,
        /// The ticket of the call.
        ticket: u32,
        /// A CUresult.
        result: u32,
        /// Bytes of the fields.
        bytes: u32,
    },
    /// The payload is the current content of arena memory.
    Bulk {
        /// The first address.
        address: u64,
        /// Bytes of the payload.
        bytes: u32,
    },
    /// An entry of the table of late errors.
    LateError {
        /// Its index.
        index: u32,
        /// Its content.
        error: LateError,
    },
    /// [`crate::session::HOST_CALL`].
    HostCall {
        /// The call.
        call: HostCall,
    },
}

/// Two halves as one word.
const fn join(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
const fn split(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

fn narrow(word: u64) -> Result<u32, FieldError> {
    u32::try_from(word).map_err(|_| FieldError::Range)
}

fn head(kind: u32, payload: u32, words: [u64; 2]) -> Head {
    let mut bytes = [0; HEAD_BYTES];
    let words = [join(kind, payload), words[0], words[1]];
    for (word, chunk) in words.iter().zip(bytes.chunks_exact_mut(8)) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Kind, bytes of the payload, words.
fn parse(bytes: &Head) -> Result<(u32, u32, [u64; 2]), FieldError> {
    let mut reader = Reader::new(bytes);
    let (kind, payload) = split(reader.word()?);
    Ok((kind, payload, [reader.word()?, reader.word()?]))
}

/// A payload's length, if it is within its bounds.
fn payload(bytes: u32, least: usize, most: usize) -> Result<u32, FieldError> {
    let length = usize::try_from(bytes).map_err(|_| FieldError::Range)?;
    if (least..=most).contains(&length) { Ok(bytes) } else { Err(FieldError::Range) }
}

/// Checks a frame without a payload: its unused words are 0.
fn plain(payload: u32, unused: &[u64]) -> Result<(), FieldError> {
    if payload == 0 && unused.iter().all(|word| *word == 0) { Ok(()) } else { Err(FieldError::Range) }
}

fn hello(payload: u32, words: [u64; 2]) -> Result<u32, FieldError> {
    plain(payload, &[])?;
    if words[0] == MAGIC { narrow(words[1]) } else { Err(FieldError::Range) }
}

impl FromGuest {
    /// The head.
    #[must_use]
    pub fn encode(self) -> Head {
        match self {
            FromGuest::Hello { version } => head(1, 0, [MAGIC, version.into()]),
            FromGuest::Create { resource, bytes } => head(2, 0, [resource.into(), bytes]),
            FromGuest::Destroy { resource } => head(3, 0, [resource.into(), 0]),
            FromGuest::Open { resource } => head(4, 0, [resource.into(), 0]),
            FromGuest::Attach { resource, slot, address } => head(5, 0, [join(resource, slot), address]),
            FromGuest::Detach { slot } => head(6, 0, [slot.into(), 0]),
            FromGuest::Close => head(7, 0, [0, 0]),
            FromGuest::Record { bytes } => head(8, bytes, [0, 0]),
            FromGuest::Bulk { address, bytes } => head(9, bytes, [address, 0]),
            FromGuest::HostReturn { call } => head(10, 0, [call.word(), 0]),
        }
    }

    /// Decodes a head.
    ///
    /// # Errors
    /// [`FieldError`] when the bytes are not a head of a guest's frame.
    pub fn decode(bytes: &Head) -> Result<FromGuest, FieldError> {
        let (kind, length, words) = parse(bytes)?;
        let [first, second] = words;
        Ok(match kind {
            1 => FromGuest::Hello { version: hello(length, words)? },
            2 => {
                plain(length, &[])?;
                FromGuest::Create { resource: narrow(first)?, bytes: second }
            }
            3 | 4 | 6 => {
                plain(length, &[second])?;
                let number = narrow(first)?;
                match kind {
                    3 => FromGuest::Destroy { resource: number },
                    4 => FromGuest::Open { resource: number },
                    _ => FromGuest::Detach { slot: number },
                }
            }
            5 => {
                plain(length, &[])?;
                let (resource, slot) = split(first);
                FromGuest::Attach { resource, slot, address: second }
            }
            7 => {
                plain(length, &words)?;
                FromGuest::Close
            }
            8 => {
                plain(0, &words)?;
                let bytes = payload(length, crate::record::HEADER_BYTES, limits::RECORD_BYTES)?;
                if bytes.is_multiple_of(8) {
                    FromGuest::Record { bytes }
                } else {
                    return Err(FieldError::Range);
                }
            }
            9 => {
                plain(0, &[second])?;
                FromGuest::Bulk { address: first, bytes: payload(length, 1, limits::STREAM_BULK_BYTES)? }
            }
            10 => {
                plain(length, &[second])?;
                FromGuest::HostReturn { call: HostCall::from_word(first) }
            }
            _ => return Err(FieldError::Range),
        })
    }

    /// Bytes of the payload.
    #[must_use]
    pub const fn payload(self) -> u32 {
        match self {
            FromGuest::Record { bytes } | FromGuest::Bulk { bytes, .. } => bytes,
            _ => 0,
        }
    }
}

impl ToGuest {
    /// The head.
    #[must_use]
    pub fn encode(self) -> Head {
        match self {
            ToGuest::Hello { version } => head(1, 0, [MAGIC, version.into()]),
            ToGuest::State { state, error } => head(2, 0, [join(state, error), 0]),
            ToGuest::Sticky { error } => head(3, 0, [error.into(), 0]),
            ToGuest::Room { head: consumed } => head(4, 0, [consumed, 0]),
            ToGuest::Console { waiting } => head(5, 0, [waiting.into(), 0]),
            ToGuest::Attachment { slot, attachment } => {
                // Only one of them is not 0.
                let (state, error, bytes) = attachment.parts();
                head(6, 0, [join(slot, state as u32), bytes | u64::from(error)])
            }
            ToGuest::Sequence { slot, sequence } => head(7, 0, [slot.into(), sequence]),
            ToGuest::Reply { slot, ticket, result, bytes } => {
                head(8, bytes, [join(slot, ticket), result.into()])
            }
            ToGuest::Bulk { address, bytes } => head(9, bytes, [address, 0]),
            ToGuest::LateError { index, error: LateError { count, code } } => {
                head(10, 0, [join(index, count), code.into()])
            }
            ToGuest::HostCall { call } => head(11, 0, [call.word(), 0]),
        }
    }

    /// Decodes a head.
    ///
    /// # Errors
    /// [`FieldError`] when the bytes are not a head of a host's frame.
    pub fn decode(bytes: &Head) -> Result<ToGuest, FieldError> {
        let (kind, length, words) = parse(bytes)?;
        let [first, second] = words;
        Ok(match kind {
            1 => ToGuest::Hello { version: hello(length, words)? },
            2 => {
                plain(length, &[second])?;
                let (state, error) = split(first);
                ToGuest::State { state, error }
            }
            3..=5 => {
                plain(length, &[second])?;
                match kind {
                    3 => ToGuest::Sticky { error: narrow(first)? },
                    4 => ToGuest::Room { head: first },
                    _ => ToGuest::Console { waiting: narrow(first)? },
                }
            }
            6 => {
                plain(length, &[])?;
                let (slot, state) = split(first);
                let state = AttachmentState::from_number(state).ok_or(FieldError::Range)?;
                let (error, bytes) =
                    if state == AttachmentState::Refused { (narrow(second)?, 0) } else { (0, second) };
                let attachment = Attachment::of(state, error, bytes);
                if attachment.parts() != (state, error, bytes) {
                    return Err(FieldError::Range);
                }
                ToGuest::Attachment { slot, attachment }
            }
            7 => {
                plain(length, &[])?;
                ToGuest::Sequence { slot: narrow(first)?, sequence: second }
            }
            8 => {
                let (slot, ticket) = split(first);
                let bytes = payload(length, 0, limits::REPLY_BYTES)?;
                ToGuest::Reply { slot, ticket, result: narrow(second)?, bytes }
            }
            9 => {
                plain(0, &[second])?;
                ToGuest::Bulk { address: first, bytes: payload(length, 1, limits::STREAM_BULK_BYTES)? }
            }
            10 => {
                plain(length, &[])?;
                let (index, count) = split(first);
                if index >= LATE_ERRORS {
                    return Err(FieldError::Range);
                }
                ToGuest::LateError { index, error: LateError { count, code: narrow(second)? } }
            }
            11 => {
                plain(length, &[second])?;
                ToGuest::HostCall { call: HostCall::from_word(first) }
            }
            _ => return Err(FieldError::Range),
        })
    }

    /// Bytes of the payload.
    #[must_use]
    pub const fn payload(self) -> u32 {
        match self {
            ToGuest::Reply { bytes, .. } | ToGuest::Bulk { bytes, .. } => bytes,
            _ => 0,
        }
    }
}
