//! Messages between backend processes.
//!
//! Every socket between two processes is a Unix SEQPACKET socket for one authority; descriptors flow down, requests flow
//! up. Messages are fixed-size: 64 bytes, a type word and scalars, with a fixed number of descriptors each. What comes up
//! from a worker or a device is hostile (either may have been taken over by a guest), so nothing in it has a length.
//! The one variable message, [`WorkerSetup`], goes down only.

use crate::field::{Field, FieldError, Reader, Writer};

/// Bytes of a fixed-size message.
pub const BYTES: usize = 64;

macro_rules! messages {
    ($($(#[$edoc:meta])* enum $enum:ident { $($(#[$doc:meta])* $tag:literal $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty),* } fds $fds:literal,)+ })+) => {$(
        $(#[$edoc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $enum {
            $($(#[$doc])* $name { $($(#[$fdoc])* $field: $ty),* },)+
        }

        impl $enum {
            /// The message's bytes.
            #[must_use]
            pub fn encode(&self) -> [u8; BYTES] {
                let mut bytes = [0; BYTES];
                let mut writer = Writer::new(&mut bytes);
                let written = match self {
                    $($enum::$name { $($field),* } => {
                        (|| { writer.word($tag)?; $($field.put(&mut writer)?;)* Ok::<(), FieldError>(()) })()
                    })+
                };
                debug_assert!(written.is_ok(), "a message has at most seven fields");
                bytes
            }

            /// Decodes a message.
            ///
            /// # Errors
            /// [`FieldError`] when the bytes are none of these.
            pub fn decode(bytes: &[u8]) -> Result<$enum, FieldError> {
                if bytes.len() != BYTES {
                    return Err(FieldError::Short);
                }
                let mut reader = Reader::new(bytes);
                match reader.word()? {
                    $($tag => Ok($enum::$name { $($field: <$ty as Field>::get(&mut reader)?),* }),)+
                    _ => Err(FieldError::Range),
                }
            }

            /// Descriptors that come with the message.
            #[must_use]
            pub const fn descriptors(&self) -> usize {
                match self {
                    $($enum::$name { .. } => $fds,)+
                }
            }
        }
    )+};
}

messages! {
    /// From the device to a worker.
    enum ToWorker {
        /// The session begins. Descriptors: the reading end of the doorbell pipe (the worker waits on it), wake
        /// eventfd (the worker writes it).
        1 Begin { /** The device's number of the session. */ session: u32 } fds 2,
        /// Map guest pages. Descriptors: a memfd of [`Run`]s, the memory region they lie in.
        2 Attach {
            /** Entry of the attach table; 0 is the control resource. */ slot: u32,
            /** Where to map; 0 for the control resource, whose place is the worker's choice. */ address: u64,
            /** Bytes in all. */ bytes: u64,
            /** Number of runs in the memfd. */ runs: u32,
            /** Whether more messages for the same slot follow, with the runs of further regions. */ more: bool
        } fds 2,
        /// Unmap what is attached in a slot, then say so.
        3 Detach { /** Entry of the attach table. */ slot: u32 } fds 0,
    }
    /// From a worker to the device.
    enum FromWorker {
        /// The pages are mapped (`error` 0) or not (a CUresult).
        1 Attached { /** Entry of the attach table. */ slot: u32, /** A CUresult. */ error: u32 } fds 0,
        /// The pages are unmapped and no DMA can reach them.
        2 Detached { /** Entry of the attach table. */ slot: u32 } fds 0,
    }
    /// From a device to `sluiced`.
    enum FromDevice {
        /// A guest process wants a worker.
        1 WorkerWanted { /** The device's number of the session. */ session: u32 } fds 0,
        /// The session's worker is reaped.
        2 SessionEnded { /** The device's number of the session. */ session: u32 } fds 0,
    }
    /// From `sluiced` to a device.
    enum ToDevice {
        /// A worker. Descriptors: its control socket, its pidfd.
        1 Worker { /** The device's number of the session. */ session: u32 } fds 2,
        /// No worker can be had; `error` is the CUresult for the guest.
        2 NoWorker { /** The device's number of the session. */ session: u32, /** A CUresult. */ error: u32 } fds 0,
    }
    /// From `sluiced` to the launcher.
    enum ToLauncher {
        /// Start a worker for a session of a VM.
        1 StartWorker { /** The VM. */ vm: u32, /** The session. */ session: u32 } fds 0,
        /// Start the device of a VM.
        2 StartDevice { /** The VM. */ vm: u32 } fds 0,
    }
    /// From the launcher to `sluiced`.
    enum FromLauncher {
        /// A process runs. Descriptors: its control socket, its pidfd.
        1 Started { /** Its process id. */ process: u32 } fds 2,
        /// It could not be started; `error` is an errno.
        2 Failed { /** An errno. */ error: u32 } fds 0,
    }
}

/// A run of guest pages inside a memory region: how a worker is told what to map. 16 bytes in a memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset in the region's file.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Run {
    /// Bytes of a run in the memfd.
    pub const BYTES: usize = 16;

    /// Appends the run to a list.
    pub fn push(&self, list: &mut Vec<u8>) {
        list.extend_from_slice(&self.offset.to_le_bytes());
        list.extend_from_slice(&self.bytes.to_le_bytes());
    }

    /// Reads a list; bytes after the last whole run are not looked at.
    pub fn list(bytes: &[u8]) -> impl Iterator<Item = Run> + '_ {
        bytes.chunks_exact(Run::BYTES).filter_map(|chunk| {
            let mut reader = Reader::new(chunk);
            Some(Run { offset: reader.word().ok()?, bytes: reader.word().ok()? })
        })
    }
}

/// What a worker is told before anything else, by `sluiced`, on the socket that then belongs to the device.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WorkerSetup {
    /// The VM, for logs.
    pub vm: u32,
    /// The session, for logs.
    pub session: u32,
    /// Absolute path of the driver library to load.
    pub driver: String,
    /// Bytes of device memory the session may use; 0 for all there is.
    pub memory: u64,
}

/// The one place where bincode is used: messages that go down between processes of the same build.
pub mod codec {
    use crate::limits;

    const CONFIGURATION: bincode::config::Configuration<
        bincode::config::LittleEndian,
        bincode::config::Fixint,
        bincode::config::Limit<{ limits::CONTROL_BYTES }>,
    > = bincode::config::standard().with_fixed_int_encoding().with_limit::<{ limits::CONTROL_BYTES }>();

    /// A message cannot be coded.
    #[derive(Debug, thiserror::Error)]
    pub enum CodecError {
        /// Too long.
        #[error("cannot encode: {0}")]
        Encode(#[from] bincode::error::EncodeError),
        /// Malformed.
        #[error("cannot decode: {0}")]
        Decode(#[from] bincode::error::DecodeError),
        /// Longer than its content.
        #[error("{0} bytes after the message")]
        Trailing(usize),
    }

    /// Encodes a message.
    ///
    /// # Errors
    /// When it is longer than [`limits::CONTROL_BYTES`].
    pub fn encode(message: &impl bincode::Encode) -> Result<Vec<u8>, CodecError> {
        // The configuration's limit holds for decoding only.
        let bytes = bincode::encode_to_vec(message, CONFIGURATION)?;
        if bytes.len() > limits::CONTROL_BYTES {
            return Err(bincode::error::EncodeError::Other("longer than a message").into());
        }
        Ok(bytes)
    }

    /// Decodes a message, all of it.
    ///
    /// # Errors
    /// When the bytes are not exactly one such message.
    pub fn decode<T: bincode::Decode<()>>(bytes: &[u8]) -> Result<T, CodecError> {
        let (message, read) = bincode::decode_from_slice(bytes, CONFIGURATION)?;
        match bytes.len().saturating_sub(read) {
            0 => Ok(message),
            trailing => Err(CodecError::Trailing(trailing)),
        }
    }
}
