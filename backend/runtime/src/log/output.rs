//! The output of the log, one line at a time: standard error, or the descriptor to which it was moved. A line without
//! room or reader is dropped and counted: no process waits for its log, and none ends for want of one.

use std::{
    io::{self, Write as _},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

/// Bytes of a line with its end. A write of this many to a pipe is atomic.
pub const LINE_BYTES: usize = 4096;

static LOG: Output = Output::new();
/// The descriptor to which the log was moved.
static MOVED: OnceLock<OwnedFd> = OnceLock::new();

/// Writes one line to the log; false if it was dropped. A line beyond [`LINE_BYTES`] is cut.
pub fn put(line: &[u8]) -> bool {
    match MOVED.get() {
        Some(to) => LOG.put(to.as_fd(), line),
        None => LOG.put(io::stderr().as_fd(), line),
    }
}

/// Moves the log; see [`super::move_log`].
pub(crate) fn move_away() -> io::Result<BorrowedFd<'static>> {
    let copy = io::stderr().as_fd().try_clone_to_owned()?;
    Ok(MOVED.get_or_init(|| copy).as_fd())
}

/// The destination of lines, and the number of dropped ones since the last report.
#[derive(Debug)]
struct Output {
    dropped: AtomicU64,
}

impl Output {
    const fn new() -> Self {
        Self { dropped: AtomicU64::new(0) }
    }

    fn put(&self, to: BorrowedFd<'_>, line: &[u8]) -> bool {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 && !say_dropped(to, dropped) {
            // Another thread may have counted lines meanwhile.
            self.dropped.fetch_add(dropped.saturating_add(1), Ordering::Relaxed);
            return false;
        }
        let written = write_line(to, line);
        if !written {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        written
    }
}

fn say_dropped(to: BorrowedFd<'_>, dropped: u64) -> bool {
    let mut text = [0; 64];
    let mut rest = text.as_mut_slice();
    if writeln!(rest, "{dropped} lines of this log were dropped").is_err() {
        return false;
    }
    let left = rest.len();
    write_line(to, &text[..text.len() - left])
}

fn write_line(to: BorrowedFd<'_>, line: &[u8]) -> bool {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let mut whole = [0; LINE_BYTES];
    let length = line.len().min(LINE_BYTES - 1);
    whole[..length].copy_from_slice(&line[..length]);
    whole[length] = b'\n';
    let mut rest = &whole[..=length];
    while !rest.is_empty() {
        // Other processes may share the open file, so its flags stay unchanged: a write that would wait is not made.
        if !is_writable(to) {
            return false;
        }
        match rustix::io::write(to, rest) {
            Ok(0) => return false,
            Ok(written) => rest = &rest[written..],
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}

fn is_writable(to: BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
    // On an error or a hang-up without room, the write would only fail, too.
    matches!(poll(&mut polled, Some(&now)), Ok(1..)) && polled[0].revents().contains(PollFlags::OUT)
}

/// The writer for events of `tracing`, one write per event.
#[derive(Debug)]
pub(crate) struct EventWriter;

impl io::Write for EventWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A dropped line is counted, and is not an error: a caller could only log it.
        put(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

    // Promise: F70
    #[test]
    fn dropped_lines_are_counted_and_reported_when_there_is_room() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        fcntl_setpipe_size(&writer, 16 << 10).expect("a small pipe");
        let output = Output::new();
        let line = [b'x'; 100];
        let written = (0..1000).filter(|_| output.put(writer.as_fd(), &line)).count();
        assert!((1..1000).contains(&written), "{written}");
        let mut bytes = vec![0; 32 << 10];
        let read = rustix::io::read(&reader, &mut bytes).expect("lines");
        assert_eq!(read, written * 101, "whole lines only");
        assert!(output.put(writer.as_fd(), b"after"));
        let read = rustix::io::read(&reader, &mut bytes).expect("lines");
        let said = format!("{} lines of this log were dropped\nafter\n", 1000 - written);
        assert_eq!(String::from_utf8_lossy(&bytes[..read]), said);
        assert!(output.put(writer.as_fd(), b"once"));
        let read = rustix::io::read(&reader, &mut bytes).expect("a line");
        assert_eq!(&bytes[..read], b"once\n");
    }

    #[test]
    fn log_line_beyond_the_limit_is_cut() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        assert!(Output::new().put(writer.as_fd(), &[b'y'; 2 * LINE_BYTES]));
        let mut bytes = vec![0; 3 * LINE_BYTES];
        assert_eq!(rustix::io::read(&reader, &mut bytes), Ok(LINE_BYTES));
        assert_eq!(bytes[LINE_BYTES - 2..LINE_BYTES], *b"y\n");
    }
}
