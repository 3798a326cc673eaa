//! virtio-gpu on the wire: the commands Sluice understands, bounded.
//!
//! Source: Virtual I/O Device (VIRTIO) specification, GPU device, and the requests Linux's `virtio_gpu` driver was seen to
//! send. A command is decoded from a private copy. Answers echo the fence of the command, since the guest finds the fence by it.

use crate::{
    doorbell::{self, Capset},
    limits,
};

/// Device feature: 3D commands.
pub const F_VIRGL: u64 = 0;
/// Device feature: blob resources.
pub const F_RESOURCE_BLOB: u64 = 3;
/// Device feature: contexts of a capset.
pub const F_CONTEXT_INIT: u64 = 4;

/// Number of the cursor queue. A guest that is a program has no cursor: it passes the eventfd by which it wakes its worker as this
/// queue's kick, and then the eventfd by which its worker wakes it as this queue's call.
pub const CURSOR_QUEUE: u16 = 1;

/// Bytes of the header of commands and answers.
pub const HEADER_BYTES: usize = 24;
/// Header flag: the answer signals a fence.
pub const FLAG_FENCE: u32 = 1;
/// Header flag: `ring_idx` is valid.
pub const FLAG_INFO_RING_IDX: u32 = 2;
/// Bytes of a guest page; entries are made of whole ones.
pub const PAGE: u64 = 4096;

/// Type words of commands.
pub mod command {
    #![expect(missing_docs, reason = "the names of the specification")]
    pub const GET_DISPLAY_INFO: u32 = 0x100;
    pub const RESOURCE_CREATE_2D: u32 = 0x101;
    pub const RESOURCE_UNREF: u32 = 0x102;
    pub const SET_SCANOUT: u32 = 0x103;
    pub const RESOURCE_FLUSH: u32 = 0x104;
    pub const TRANSFER_TO_HOST_2D: u32 = 0x105;
    pub const ATTACH_BACKING: u32 = 0x106;
    pub const DETACH_BACKING: u32 = 0x107;
    pub const GET_CAPSET_INFO: u32 = 0x108;
    pub const GET_CAPSET: u32 = 0x109;
    pub const RESOURCE_CREATE_BLOB: u32 = 0x10c;
    pub const CTX_CREATE: u32 = 0x200;
    pub const CTX_DESTROY: u32 = 0x201;
    pub const CTX_ATTACH_RESOURCE: u32 = 0x202;
    pub const CTX_DETACH_RESOURCE: u32 = 0x203;
    pub const RESOURCE_CREATE_3D: u32 = 0x204;
    pub const SUBMIT_3D: u32 = 0x207;
}

/// Type words of answers.
pub mod answer {
    #![expect(missing_docs, reason = "the names of the specification")]
    pub const OK_NODATA: u32 = 0x1100;
    pub const OK_DISPLAY_INFO: u32 = 0x1101;
    pub const OK_CAPSET_INFO: u32 = 0x1102;
    pub const OK_CAPSET: u32 = 0x1103;
    pub const ERR_UNSPEC: u32 = 0x1200;
    pub const ERR_OUT_OF_MEMORY: u32 = 0x1201;
    pub const ERR_INVALID_RESOURCE_ID: u32 = 0x1203;
    pub const ERR_INVALID_CONTEXT_ID: u32 = 0x1204;
    pub const ERR_INVALID_PARAMETER: u32 = 0x1205;
}

/// A command's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandHeader {
    /// The type word of the command.
    pub kind: u32,
    /// [`FLAG_FENCE`] and others.
    pub flags: u32,
    /// The fence to signal.
    pub fence: u64,
    /// The context the guest kernel sends this for: the identity of a session.
    pub context: u32,
    /// The ring within the context.
    pub ring: u8,
}

impl CommandHeader {
    /// An answer to this command of type `kind`, its header only.
    #[must_use]
    pub fn answer(&self, kind: u32) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let fenced = self.flags & FLAG_FENCE != 0;
        let words: [u32; 6] = if fenced {
            #[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
            [
                kind,
                self.flags,
                self.fence as u32,
                (self.fence >> 32) as u32,
                self.context,
                u32::from(self.ring),
            ]
        } else {
            [kind, 0, 0, 0, 0, 0]
        };
        for (word, chunk) in words.iter().zip(bytes.chunks_exact_mut(4)) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The page runs behind a resource, as sent: guest-physical address and bytes of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entries<'a>(&'a [u8]);

impl Entries<'_> {
    /// Number of runs.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.len() / 16
    }

    /// True if there are no runs.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The runs: guest-physical address, bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.0.chunks_exact(16).map(|entry| (u64_at(entry, 0).unwrap_or(0), u32_at(entry, 8).unwrap_or(0)))
    }
}

/// A decoded command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Asks for the state of the scanouts.
    GetDisplayInfo,
    /// Asks for the id and size of a capset; marks a new driver instance.
    GetCapsetInfo {
        /// Index of the capset.
        index: u32,
    },
    /// A capset's body.
    GetCapset {
        /// Its id.
        id: u32,
        /// Its version.
        version: u32,
    },
    /// A new context.
    CtxCreate {
        /// The id of its capset; 0 in LEGACY mode.
        capset: u32,
    },
    /// A context ends: its file was closed, or its process died.
    CtxDestroy,
    /// A resource may be used by the context in the header.
    CtxAttach {
        /// The resource.
        resource: u32,
    },
    /// A resource may no longer be used by the context in the header.
    CtxDetach {
        /// The resource.
        resource: u32,
    },
    /// A 3D resource without memory yet.
    Create {
        /// The resource.
        resource: u32,
    },
    /// A 2D resource without memory yet.
    Create2d {
        /// The resource.
        resource: u32,
        /// Its purpose.
        purpose: Purpose,
    },
    /// A resource with guest memory (FULL mode).
    CreateBlob {
        /// The resource.
        resource: u32,
        /// Its memory.
        entries: Entries<'a>,
    },
    /// Guest memory for a resource created before.
    AttachBacking {
        /// The resource.
        resource: u32,
        /// Its memory.
        entries: Entries<'a>,
    },
    /// Takes the memory from a resource.
    DetachBacking {
        /// The resource.
        resource: u32,
    },
    /// Ends a resource; the guest has its pages back when this is answered.
    Unref {
        /// The resource.
        resource: u32,
    },
    /// A payload for the device: [`crate::doorbell::Doorbell`].
    Submit {
        /// The payload.
        payload: &'a [u8],
    },
    /// A transfer of a 2D resource. Of a control resource it is [`crate::doorbell::Doorbell::from_numbers`].
    Transfer {
        /// The resource.
        resource: u32,
        /// Its box and its offset.
        numbers: [u32; doorbell::NUMBERS],
    },
    /// A command that changes nothing here (scanouts, cursors).
    Ignored,
}

/// The purpose of a 2D resource. A driver without 3D passes on any format, width and height that a process gives a resource,
/// so these encode the purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// A picture, of no use here.
    #[default]
    Picture,
    /// Memory to be shared with a worker: a control resource or an arena.
    Memory,
    /// The sleep of a session's process: the answer to the creation is withheld until its worker wakes it, or for a
    /// bounded time.
    Token {
        /// The session: [`crate::session::Nonce::key`].
        key: u64,
    },
}

impl Purpose {
    /// Formats that no picture has.
    const MEMORY: u32 = u32::from_le_bytes(*b"slcm");
    const TOKEN: u32 = u32::from_le_bytes(*b"slct");

    /// Format, width and height.
    #[must_use]
    pub const fn encode(self) -> [u32; 3] {
        #[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
        match self {
            Purpose::Picture => [1, 1, 1],
            Purpose::Memory => [Self::MEMORY, 1, 1],
            Purpose::Token { key } => [Self::TOKEN, key as u32, (key >> 32) as u32],
        }
    }

    /// Decodes format, width and height.
    #[must_use]
    pub const fn decode([format, width, height]: [u32; 3]) -> Purpose {
        match format {
            Self::MEMORY => Purpose::Memory,
            Self::TOKEN => Purpose::Token { key: (height as u64) << 32 | width as u64 },
            _ => Purpose::Picture,
        }
    }
}

/// The reason for which a command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// Shorter than its type asks for.
    #[error("command {kind:#x} of {bytes} bytes is too short")]
    Short {
        /// Its type.
        kind: u32,
        /// Its length.
        bytes: usize,
    },
    /// More page runs than a resource may have, or than were sent.
    #[error("{entries} entries, {room} sent")]
    Entries {
        /// The number that the command announces.
        entries: u32,
        /// The number for which bytes were sent.
        room: usize,
    },
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk::<4>().map(|word| u32::from_le_bytes(*word))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk::<8>().map(|word| u64::from_le_bytes(*word))
}

/// Decodes a header; `None` when there are fewer than [`HEADER_BYTES`].
#[must_use]
pub fn header(bytes: &[u8]) -> Option<CommandHeader> {
    Some(CommandHeader {
        kind: u32_at(bytes, 0)?,
        flags: u32_at(bytes, 4)?,
        fence: u64_at(bytes, 8)?,
        context: u32_at(bytes, 16)?,
        ring: u32_at(bytes, 20)?.to_le_bytes()[0],
    })
}

/// Decodes what follows the header.
///
/// # Errors
/// [`GpuError`] when the command is too short or announces more than it brings.
pub fn decode<'a>(header: &CommandHeader, bytes: &'a [u8]) -> Result<Command<'a>, GpuError> {
    let short = GpuError::Short { kind: header.kind, bytes: bytes.len() };
    let word = |at: usize| u32_at(bytes, at).ok_or(short);
    let entries = |count_at: usize, at: usize| -> Result<Entries<'a>, GpuError> {
        let count = word(count_at)?;
        let sent = bytes.get(at..).unwrap_or_default();
        let error = GpuError::Entries { entries: count, room: sent.len() / 16 };
        let count =
            usize::try_from(count).ok().filter(|count| *count <= limits::RESOURCE_RUNS).ok_or(error)?;
        Ok(Entries(sent.get(..count.saturating_mul(16)).ok_or(error)?))
    };
    Ok(match header.kind {
        command::GET_DISPLAY_INFO => Command::GetDisplayInfo,
        command::GET_CAPSET_INFO => Command::GetCapsetInfo { index: word(24)? },
        command::GET_CAPSET => Command::GetCapset { id: word(24)?, version: word(28)? },
        command::CTX_CREATE => Command::CtxCreate { capset: word(28)? & 0xff },
        command::CTX_DESTROY => Command::CtxDestroy,
        command::CTX_ATTACH_RESOURCE => Command::CtxAttach { resource: word(24)? },
        command::CTX_DETACH_RESOURCE => Command::CtxDetach { resource: word(24)? },
        command::RESOURCE_CREATE_2D => Command::Create2d {
            resource: word(24)?,
            purpose: Purpose::decode([word(28)?, word(32)?, word(36)?]),
        },
        command::RESOURCE_CREATE_3D => Command::Create { resource: word(24)? },
        command::TRANSFER_TO_HOST_2D => {
            let numbers = [word(24)?, word(28)?, word(32)?, word(36)?, word(40)?];
            let resource = word(48)?;
            // The ioctl's offset has 32 bits: a transfer with a larger one is not a doorbell.
            if word(44)? == 0 { Command::Transfer { resource, numbers } } else { Command::Ignored }
        }
        command::RESOURCE_CREATE_BLOB => {
            Command::CreateBlob { resource: word(24)?, entries: entries(36, 56)? }
        }
        command::ATTACH_BACKING => Command::AttachBacking { resource: word(24)?, entries: entries(28, 32)? },
        command::DETACH_BACKING => Command::DetachBacking { resource: word(24)? },
        command::RESOURCE_UNREF => Command::Unref { resource: word(24)? },
        command::SUBMIT_3D => {
            let size = usize::try_from(word(24)?).map_err(|_| short)?;
            let payload = bytes.get(32..).ok_or(short)?;
            Command::Submit { payload: payload.get(..size).ok_or(short)? }
        }
        _ => Command::Ignored,
    })
}

/// The answer to GET_DISPLAY_INFO: sixteen scanouts, all disabled.
pub const DISPLAY_INFO_BYTES: usize = 16 * 24;

/// The answer's body to GET_CAPSET_INFO: id, version, size, padding.
#[must_use]
pub fn capset_info() -> [u8; 16] {
    let mut bytes = [0; 16];
    #[expect(clippy::cast_possible_truncation, reason = "64")]
    let words = [Capset::ID, 0, Capset::BYTES as u32, 0];
    for (word, chunk) in words.iter().zip(bytes.chunks_exact_mut(4)) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The device's configuration space: events_read, events_clear, num_scanouts, num_capsets.
#[must_use]
pub fn configuration(scanouts: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (word, chunk) in [0, 0, scanouts, 1u32].iter().zip(bytes.chunks_exact_mut(4)) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}
