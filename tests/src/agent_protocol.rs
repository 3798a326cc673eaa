//! Frames between a test on the host and the agent in its guest, over one virtio-serial port.
//!
//! A frame is `magic, kind, request, length, payload`. Several requests are in flight at once; `request` names the one that a
//! frame belongs to. A reader skips to the next magic, so half a frame of a guest that was reset does no harm.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

const MAGIC: [u8; 4] = *b"SLGA";

/// Longest payload of one frame; longer output is sent in several.
pub const MAX_PAYLOAD: usize = 64 << 10;

/// Kind of a frame. The comment of each kind describes the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Host to guest: start a command ([`RunRequest`] as JSON).
    Run = 1,
    /// Host to guest: send a signal to a started command ([`SignalRequest`] as JSON).
    Signal = 2,
    /// Host to guest: append to a file ([`PutRequest`] as JSON, a newline, the bytes).
    Put = 3,
    /// Host to guest: "reboot", "reset" or "poweroff".
    Shutdown = 4,
    /// Guest to host, once per boot: [`Hello`] as JSON.
    Hello = 16,
    /// Guest to host: the command runs (process id in decimal).
    Started = 17,
    /// Guest to host: bytes of standard output.
    Stdout = 18,
    /// Guest to host: bytes of standard error.
    Stderr = 19,
    /// Guest to host: the command has ended and all its output was sent ([`Exited`] as JSON).
    Exited = 20,
    /// Guest to host: a request without output is done; an error text, or empty.
    Done = 21,
}

impl Kind {
    fn from_wire(byte: u8) -> Option<Self> {
        use Kind::{Done, Exited, Hello, Put, Run, Shutdown, Signal, Started, Stderr, Stdout};
        [Run, Signal, Put, Shutdown, Hello, Started, Stdout, Stderr, Exited, Done]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Kind of the frame.
    pub kind: Kind,
    /// The request it belongs to; chosen by the host, 0 for [`Kind::Hello`].
    pub request: u32,
    /// Payload of the frame.
    pub payload: Vec<u8>,
}

/// Payload of [`Kind::Run`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunRequest {
    /// Script for `sh -c`.
    pub script: String,
    /// User of the guest who runs it.
    pub user: String,
    /// Variables added to the environment.
    pub environment: BTreeMap<String, String>,
}

/// Payload of [`Kind::Signal`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SignalRequest {
    /// The process as reported by [`Kind::Started`].
    pub process: i32,
    /// Signal number.
    pub signal: i32,
}

/// Head of the payload of [`Kind::Put`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PutRequest {
    /// File to append to.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Empty the file first.
    pub truncate: bool,
}

/// Payload of [`Kind::Hello`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hello {
    /// `uname -r`.
    pub kernel: String,
    /// Id of the boot; differs from boot to boot.
    pub boot_id: String,
    /// Time since the start of the kernel, in seconds.
    pub uptime_seconds: f64,
    /// True if the guest has a DRM render node.
    pub render_node: bool,
}

/// Payload of [`Kind::Exited`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Exited {
    /// Exit code, if it exited.
    pub code: Option<i32>,
    /// Signal, if one ended it.
    pub signal: Option<i32>,
    /// Wall-clock time from start to end in the guest, in seconds.
    pub seconds: f64,
}

/// Writes one frame.
///
/// # Errors
/// As the writer; a payload over [`MAX_PAYLOAD`] is `InvalidInput`.
pub fn write_frame(to: &mut impl Write, kind: Kind, request: u32, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= MAX_PAYLOAD);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "frame too long"))?;
    let mut bytes = Vec::with_capacity(16 + payload.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[kind as u8, 0, 0, 0]);
    bytes.extend_from_slice(&request.to_le_bytes());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(payload);
    to.write_all(&bytes)?;
    to.flush()
}

/// Reads the next frame; `None` at the end of the stream.
///
/// # Errors
/// As the reader; a stream that ends inside a frame is `UnexpectedEof`.
pub fn read_frame(from: &mut impl Read) -> io::Result<Option<Frame>> {
    loop {
        let mut window = [0_u8; 4];
        let mut filled = 0;
        while window != MAGIC {
            let mut byte = [0_u8];
            if from.read(&mut byte)? == 0 {
                return if filled == 0 { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            window.rotate_left(1);
            window[3] = byte[0];
            filled += 1;
        }
        let mut head = [0_u8; 12];
        from.read_exact(&mut head)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let length = usize::try_from(word(8)).unwrap_or(usize::MAX);
        let (Some(kind), true) = (Kind::from_wire(head[0]), length <= MAX_PAYLOAD) else { continue };
        let mut payload = vec![0; length];
        from.read_exact(&mut payload)?;
        return Ok(Some(Frame { kind, request: word(4), payload }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire_and_preceding_noise() {
        let mut wire = b"noise SLG SLGA\xff half a frame".to_vec();
        write_frame(&mut wire, Kind::Stdout, 7, b"hello").unwrap();
        write_frame(&mut wire, Kind::Exited, 7, b"").unwrap();
        let mut from = wire.as_slice();
        let first = read_frame(&mut from).unwrap().unwrap();
        assert_eq!(first, Frame { kind: Kind::Stdout, request: 7, payload: b"hello".to_vec() });
        assert_eq!(read_frame(&mut from).unwrap().unwrap().kind, Kind::Exited);
        assert!(read_frame(&mut from).unwrap().is_none());
    }

    #[test]
    fn payload_over_the_limit_is_refused() {
        assert!(write_frame(&mut Vec::new(), Kind::Stdout, 1, &vec![0; MAX_PAYLOAD + 1]).is_err());
    }
}
