//! Doorbells, the messages of the shim to the device: the payload of an EXECBUFFER (SUBMIT_3D), four 64-bit words; for a driver
//! without contexts, the five numbers of a TRANSFER_TO_HOST_2D.
//!
//! The session is the virtio-gpu context in the command's header, which the guest kernel fills in; resource ids in the payload
//! prove nothing and are accepted only if they are attached to that context. Without contexts the session is the control
//! resource that is transferred, whose id the guest kernel fills in, and other ids are accepted only if their first page
//! carries the session's [`crate::session::Nonce`].

use crate::field::{Field, FieldError, Reader, Writer};

/// Bytes of a payload.
pub const BYTES: usize = 32;
/// Numbers of a transfer: x, y, width and height of its box, and its offset.
pub const NUMBERS: usize = 5;

/// A request to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbell {
    /// Open a session whose control resource is this one. The answer is the state word in it.
    Open {
        /// Id of the control resource.
        resource: u32,
    },
    /// Have the worker map a resource at `address`; it answers in attach-table entry `slot`.
    Attach {
        /// Id of the resource.
        resource: u32,
        /// Entry of the attach table.
        slot: u32,
        /// The address, the same in guest and worker.
        address: u64,
    },
    /// Have the worker unmap the resource attached in `slot`.
    Detach {
        /// Entry of the attach table.
        slot: u32,
    },
    /// The ring has something for a sleeping dispatcher.
    Ring,
    /// Answer this (fenced) command when the worker wakes the session, or after a bounded time. Transfers are never
    /// fenced: without contexts it is a token resource ([`crate::gpu::Purpose::Token`]) that waits.
    Wait,
    /// End the session.
    Close,
}

impl Doorbell {
    /// The payload.
    #[must_use]
    pub fn encode(self) -> [u8; BYTES] {
        let words = match self {
            Doorbell::Open { resource } => [1, u64::from(resource), 0, 0],
            Doorbell::Attach { resource, slot, address } => {
                [2, u64::from(resource), u64::from(slot), address]
            }
            Doorbell::Detach { slot } => [3, u64::from(slot), 0, 0],
            Doorbell::Ring => [4, 0, 0, 0],
            Doorbell::Wait => [5, 0, 0, 0],
            Doorbell::Close => [6, 0, 0, 0],
        };
        let mut bytes = [0; BYTES];
        for (word, chunk) in words.iter().zip(bytes.chunks_exact_mut(8)) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes the start of a payload; the guest kernel may have padded it.
    ///
    /// # Errors
    /// [`FieldError`] when the payload is not a doorbell.
    pub fn decode(payload: &[u8]) -> Result<Doorbell, FieldError> {
        let mut reader = Reader::new(payload);
        let operation = reader.word()?;
        let mut next = || reader.word();
        let narrow = |word: u64| u32::try_from(word).map_err(|_| FieldError::Range);
        Ok(match operation {
            1 => Doorbell::Open { resource: narrow(next()?)? },
            2 => Doorbell::Attach { resource: narrow(next()?)?, slot: narrow(next()?)?, address: next()? },
            3 => Doorbell::Detach { slot: narrow(next()?)? },
            4 => Doorbell::Ring,
            5 => Doorbell::Wait,
            6 => Doorbell::Close,
            _ => return Err(FieldError::Range),
        })
    }
}

impl Doorbell {
    /// The numbers of a transfer of the control resource; `None` if a transfer cannot express the doorbell.
    #[must_use]
    pub const fn numbers(self) -> Option<[u32; NUMBERS]> {
        #[expect(clippy::cast_possible_truncation, reason = "halves of an address")]
        Some(match self {
            Doorbell::Open { resource } => [1, resource, 0, 0, 0],
            Doorbell::Attach { resource, slot, address } => {
                [2, resource, slot, address as u32, (address >> 32) as u32]
            }
            Doorbell::Detach { slot } => [3, 0, slot, 0, 0],
            Doorbell::Ring => [4, 0, 0, 0, 0],
            Doorbell::Wait => return None,
            Doorbell::Close => [6, 0, 0, 0, 0],
        })
    }

    /// Decodes the numbers of a transfer.
    ///
    /// # Errors
    /// [`FieldError::Range`] when the numbers are not a doorbell.
    pub const fn from_numbers(numbers: [u32; NUMBERS]) -> Result<Doorbell, FieldError> {
        let [operation, resource, slot, low, high] = numbers;
        Ok(match operation {
            1 => Doorbell::Open { resource },
            2 => Doorbell::Attach { resource, slot, address: (high as u64) << 32 | low as u64 },
            3 => Doorbell::Detach { slot },
            4 => Doorbell::Ring,
            6 => Doorbell::Close,
            _ => return Err(FieldError::Range),
        })
    }
}

/// Body of capset 27, by which a guest recognises the device. It is constant, since the guest kernel caches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capset {
    /// [`crate::calls::VERSION`].
    pub version: u32,
}

impl Capset {
    /// The capset's id; must stay at or below 30, since the guest kernel builds its mask with a 32-bit shift.
    pub const ID: u32 = 27;
    /// Bytes of the body.
    pub const BYTES: usize = 64;
    const MAGIC: [u8; 16] = *b"sluice virtio v1";

    /// The body.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut writer = Writer::new(&mut bytes);
        // The body is larger than what is written, so this cannot fail.
        let written = writer.bytes(&Self::MAGIC).and_then(|()| self.version.put(&mut writer));
        debug_assert!(written.is_ok());
        bytes
    }

    /// Reads a body; `None` when the device is not Sluice's.
    #[must_use]
    pub fn decode(body: &[u8]) -> Option<Capset> {
        let mut reader = Reader::new(body);
        (reader.bytes(16).ok()? == Self::MAGIC).then_some(())?;
        Some(Capset { version: u32::get(&mut reader).ok()? })
    }
}
