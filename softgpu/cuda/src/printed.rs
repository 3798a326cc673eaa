//! The text that kernels print, stored from a launch until the call that writes it to the program's streams.
#![expect(unsafe_code, reason = "writes to the C library's streams")]

use std::mem;
use std::sync::Mutex;

use crate::lock::lock;
use crate::log::log;

/// A standard stream of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StandardStream {
    Output,
    Error,
}

/// The streams, in the order in which their text is written.
const STREAMS: [StandardStream; 2] = [StandardStream::Output, StandardStream::Error];

/// The text that kernels of a context printed since the last synchronisation, and the reports of their assertions.
#[derive(Debug, Default)]
pub(crate) struct Printed {
    texts: Mutex<[Vec<u8>; STREAMS.len()]>,
    /// Held while text is written: a flush returns only when text taken by another thread is written too.
    writing: Mutex<()>,
}

impl Printed {
    /// Stores text of a kernel. Like the device's buffer, it holds `room` bytes of a stream and then drops the oldest.
    pub(crate) fn take(&self, stream: StandardStream, text: &[u8], room: usize) {
        let mut texts = lock(&self.texts);
        let held = &mut texts[stream as usize];
        held.extend_from_slice(text);
        let excess = held.len().saturating_sub(room);
        held.drain(..excess);
    }

    /// Writes all text and returns when it is written, by this or another thread.
    pub(crate) fn flush(&self, write: impl Fn(StandardStream, &[u8])) {
        let _writing = lock(&self.writing);
        let texts = mem::take(&mut *lock(&self.texts));
        for (stream, text) in STREAMS.into_iter().zip(texts) {
            if !text.is_empty() {
                write(stream, &text);
            }
        }
    }
}

/// Writes text of kernels through the program's own stream, so that it appears in order with the program's output.
pub(crate) fn write(stream: StandardStream, text: &[u8]) {
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
        static stderr: *mut libc::FILE;
    }
    // SAFETY: the C library's streams exist from its start to its end.
    let stream = unsafe {
        match stream {
            StandardStream::Output => stdout,
            StandardStream::Error => stderr,
        }
    };
    // SAFETY: pointer and length describe the text. Errors of a closed stream are ignored.
    let written = unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stream) };
    if written != text.len() {
        log!("a kernel's output could not be written completely");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn flush_returns_when_another_thread_has_written_the_text() {
        let printed = Printed::default();
        printed.take(StandardStream::Error, b"failed", 64);
        let written = AtomicBool::new(false);
        let (begun, begins) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                printed.flush(|_, text| {
                    assert_eq!(text, b"failed");
                    begun.send(()).unwrap();
                    thread::sleep(Duration::from_millis(50));
                    written.store(true, Ordering::Release);
                });
            });
            begins.recv().unwrap();
            printed.flush(|_, _| panic!("the text is written once"));
            assert!(written.load(Ordering::Acquire));
        });
    }

    #[test]
    fn full_buffer_drops_the_oldest_text() {
        let printed = Printed::default();
        printed.take(StandardStream::Output, b"one", 4);
        printed.take(StandardStream::Output, b"two", 4);
        printed.flush(|_, text| assert_eq!(text, b"etwo"));
    }
}
