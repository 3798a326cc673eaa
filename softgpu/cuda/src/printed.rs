//! The text that kernels print, kept between a launch and the call that hands it to the program.

use std::mem;
use std::sync::Mutex;

use crate::context::lock;
use crate::process::Stream;

/// The streams, in the order in which their text is written.
const STREAMS: [Stream; 2] = [Stream::Output, Stream::Error];

/// What the kernels of a context printed since the last synchronisation, and the reports of their assertions.
#[derive(Debug, Default)]
pub(crate) struct Printed {
    texts: Mutex<[Vec<u8>; STREAMS.len()]>,
    /// Held while text is written: a thread whose text another one writes returns when it is written.
    writing: Mutex<()>,
}

impl Printed {
    /// Takes text of a kernel; like the device's buffer, it holds `room` bytes of a stream and then drops the oldest.
    pub(crate) fn take(&self, stream: Stream, text: &[u8], room: usize) {
        let mut texts = lock(&self.texts);
        let held = &mut texts[stream as usize];
        held.extend_from_slice(text);
        let excess = held.len().saturating_sub(room);
        held.drain(..excess);
    }

    /// Writes all text and returns when it is written, by whichever thread.
    pub(crate) fn flush(&self, write: impl Fn(Stream, &[u8])) {
        let _writing = lock(&self.writing);
        let texts = mem::take(&mut *lock(&self.texts));
        for (stream, text) in STREAMS.into_iter().zip(texts) {
            if !text.is_empty() {
                write(stream, &text);
            }
        }
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
    fn a_flush_returns_when_another_thread_has_written_the_text() {
        let printed = Printed::default();
        printed.take(Stream::Error, b"failed", 64);
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
    fn the_oldest_text_goes_first() {
        let printed = Printed::default();
        printed.take(Stream::Output, b"one", 4);
        printed.take(Stream::Output, b"two", 4);
        printed.flush(|_, text| assert_eq!(text, b"etwo"));
    }
}
