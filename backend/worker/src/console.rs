//! What kernels print, on its way to the guest.
//!
//! A driver prints through C's standard output of its own process. Once an image is loaded that may print, that is a pipe;
//! a thread empties it into a bounded buffer, so that whoever prints never waits for the guest, and the guest fetches the
//! text when the session page says that there is some. Before work is published as complete, what it has printed is in
//! the buffer: a program that waits for its kernel finds the text there.

#![expect(unsafe_code, reason = "sets C's standard output up and flushes it")]

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    fs::OFlags,
    io::Errno,
    pipe::{PipeFlags, pipe_with},
};
use sluice_protocol::limits;
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// C's standard output of this process.
fn standard_output() -> *mut libc::FILE {
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
    }
    // SAFETY: the C library's stream exists from its start to its end.
    unsafe { stdout }
}

/// The text of one session.
#[derive(Debug, Default)]
pub(crate) struct Console {
    /// The reading end of standard output, once there is something that may print.
    pipe: OnceLock<OwnedFd>,
    text: Mutex<VecDeque<u8>>,
}

impl Console {
    /// Whether anything may print.
    pub(crate) fn is_open(&self) -> bool {
        self.pipe.get().is_some()
    }

    /// Makes standard output a pipe; `true` the first time, when somebody has to [`Console::watch`] it.
    pub(crate) fn open(&self) -> Result<bool, Errno> {
        if self.is_open() {
            return Ok(false);
        }
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
        // The stream gets its buffer here. Left to itself it would first ask what kind of file it writes to.
        let buffer: &'static mut [u8; 4096] = Box::leak(Box::new([0; 4096]));
        // SAFETY: nothing was printed to the stream yet, and the buffer lives as long as the process.
        let status = unsafe {
            libc::setvbuf(standard_output(), buffer.as_mut_ptr().cast(), libc::_IOFBF, buffer.len())
        };
        if status != 0 {
            return Err(Errno::NOMEM);
        }
        rustix::stdio::dup2_stdout(&writer)?;
        Ok(self.pipe.set(reader).is_ok())
    }

    /// Takes what has been printed so far into the buffer, whole lines or not; `true` when the buffer has text.
    pub(crate) fn settle(&self) -> bool {
        // SAFETY: the stream is open for the life of the process.
        if unsafe { libc::fflush(standard_output()) } != 0 {
            tracing::debug!("what kernels print was cut");
        }
        self.collect()
    }

    /// Sleeps until something is printed, and takes it into the buffer.
    pub(crate) fn watch(&self) -> Result<bool, Errno> {
        let Some(pipe) = self.pipe.get() else { return Err(Errno::BADF) };
        match poll(&mut [PollFd::new(pipe, PollFlags::IN)], None::<&Timespec>) {
            Ok(_) | Err(Errno::INTR) => Ok(self.collect()),
            Err(error) => Err(error),
        }
    }

    fn collect(&self) -> bool {
        let mut text = self.lock();
        if let Some(pipe) = self.pipe.get() {
            let mut bytes = [0; 4096];
            // Read under the lock, so that two readers keep the order.
            while let Ok(length @ 1..) = rustix::io::read(pipe, &mut bytes) {
                text.extend(bytes.get(..length).unwrap_or_default());
            }
            // As on hardware: who does not fetch in time loses the oldest.
            let excess = text.len().saturating_sub(limits::CONSOLE_BYTES);
            text.drain(..excess);
        }
        !text.is_empty()
    }

    /// Moves text to the guest's answer; how much, and whether more is left, is told while nobody can add to it.
    pub(crate) fn fetch(&self, into: &mut [u8], more: impl FnOnce(bool)) -> usize {
        let mut text = self.lock();
        let length = text.len().min(into.len());
        for (to, from) in into.iter_mut().zip(text.drain(..length)) {
            *to = from;
        }
        more(!text.is_empty());
        length
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<u8>> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C13
    #[test]
    fn text_is_fetched_in_order_and_the_oldest_goes_first() {
        let console = Console::default();
        console.lock().extend(b"hello, kernel");
        let mut into = [0; 8];
        let mut left = None;
        assert_eq!(console.fetch(&mut into, |more| left = Some(more)), 8);
        assert_eq!((&into[..], left), (&b"hello, k"[..], Some(true)));
        assert_eq!(console.fetch(&mut into, |more| left = Some(more)), 5);
        assert_eq!((&into[..5], left), (&b"ernel"[..], Some(false)));
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK).expect("non-blocking");
        console.pipe.set(reader).expect("first");
        console.lock().extend(std::iter::repeat_n(b'a', limits::CONSOLE_BYTES));
        assert_eq!(rustix::io::write(&writer, b"bbbb"), Ok(4));
        assert!(console.collect());
        let text = console.lock();
        assert_eq!(text.len(), limits::CONSOLE_BYTES);
        assert_eq!(text.iter().rev().take(4).copied().collect::<Vec<_>>(), b"bbbb");
    }
}
