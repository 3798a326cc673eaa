//! The socket between a supervised `sluiced` (`--supervised`, on its standard input) and its supervisor.

use std::io::{self, ErrorKind, Read};

/// The line that a supervised `sluiced` sends once it is ready. It sends nothing else.
pub const READY: &[u8; 6] = b"ready\n";

/// Waits for the line of a `sluiced` that is ready.
///
/// # Errors
/// `UnexpectedEof` if it ended before, `InvalidData` if it sent another line, and those of the socket, a time limit's among them.
pub fn wait_ready(mut socket: impl Read) -> io::Result<()> {
    let mut line = [0; READY.len()];
    socket.read_exact(&mut line)?;
    if line == *READY {
        Ok(())
    } else {
        Err(io::Error::new(ErrorKind::InvalidData, line.escape_ascii().to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket that gives a byte at a time, with an interruption before each.
    struct Slow<'line> {
        line: &'line [u8],
        is_interrupted: bool,
    }

    impl Read for Slow<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.is_interrupted = !self.is_interrupted;
            if self.is_interrupted {
                return Err(ErrorKind::Interrupted.into());
            }
            let most = into.len().min(1);
            self.line.read(&mut into[..most])
        }
    }

    fn read(line: &[u8]) -> Result<(), ErrorKind> {
        wait_ready(Slow { line, is_interrupted: false }).map_err(|error| error.kind())
    }

    #[test]
    fn line_that_comes_in_pieces_between_interruptions_is_read_whole() {
        assert_eq!(read(READY), Ok(()));
        assert_eq!(read(b"reader"), Err(ErrorKind::InvalidData));
        assert_eq!(read(b"read"), Err(ErrorKind::UnexpectedEof));
        assert_eq!(read(b""), Err(ErrorKind::UnexpectedEof));
    }
}
