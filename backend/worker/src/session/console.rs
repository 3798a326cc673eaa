//! The text that kernels print, on its way to the guest.
//!
//! A driver prints through C's standard output of its own process, and reports a failed assertion on standard error. Once an
//! image is loaded that may do either, both are pipes; a thread empties them into bounded buffers, so that a driver that prints
//! never waits for the guest, and the guest fetches the text when the session page shows that there is some. Before work is
//! published as complete, its text is in the buffers: a program that waits for its kernel finds the text there.
//!
//! The worker's own log goes to another file: see [`sluice_runtime::log::move_log`].

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

/// The text of one session: of standard output, and of standard error.
#[derive(Debug, Default)]
pub(crate) struct Console {
    /// The read ends, once an image that may print is loaded.
    pipes: OnceLock<[OwnedFd; 2]>,
    /// Under one lock, so that the guest finds both together.
    texts: Mutex<[VecDeque<u8>; 2]>,
}

impl Console {
    /// True if an image that may print is loaded.
    pub(crate) fn is_open(&self) -> bool {
        self.pipes.get().is_some()
    }

    /// Makes standard output and standard error pipes; returns `true` the first time, when a thread has to [`Console::watch`]
    /// them.
    pub(crate) fn open(&self) -> Result<bool, Errno> {
        if self.is_open() {
            return Ok(false);
        }
        let (output_reader, output) = pipe()?;
        let (error_reader, error) = pipe()?;
        // The stream gets its buffer here. Otherwise it would first make a system call for the kind of its file.
        let buffer: &'static mut [u8; 4096] = Box::leak(Box::new([0; 4096]));
        // SAFETY: no text was printed to the stream yet, and the buffer lives as long as the process.
        let status = unsafe {
            libc::setvbuf(standard_output(), buffer.as_mut_ptr().cast(), libc::_IOFBF, buffer.len())
        };
        if status != 0 {
            return Err(Errno::NOMEM);
        }
        rustix::stdio::dup2_stdout(&output)?;
        // Standard error is unbuffered from the start in C.
        rustix::stdio::dup2_stderr(&error)?;
        Ok(self.pipes.set([output_reader, error_reader]).is_ok())
    }

    /// Reads the text that is printed so far into the buffers, whole lines or not; returns `true` if they have text.
    pub(crate) fn settle(&self) -> bool {
        // SAFETY: the stream is open for the life of the process.
        if unsafe { libc::fflush(standard_output()) } != 0 {
            tracing::debug!("cannot flush standard output; the output of kernels is truncated");
        }
        self.collect()
    }

    /// Sleeps until text is printed, and reads it into the buffers.
    pub(crate) fn watch(&self) -> Result<bool, Errno> {
        let Some(pipes) = self.pipes.get() else { return Err(Errno::BADF) };
        let mut polled = pipes.each_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN));
        match poll(&mut polled, None::<&Timespec>) {
            Ok(_) | Err(Errno::INTR) => Ok(self.collect()),
            Err(error) => Err(error),
        }
    }

    fn collect(&self) -> bool {
        let mut texts = self.lock();
        for (pipe, text) in self.pipes.get().into_iter().flatten().zip(&mut *texts) {
            let mut bytes = [0; 4096];
            // Read under the lock, so that two readers keep the order.
            while let Ok(length @ 1..) = rustix::io::read(pipe, &mut bytes) {
                text.extend(bytes.get(..length).unwrap_or_default());
            }
            // As on hardware: a program that does not fetch in time loses the oldest text.
            let excess = text.len().saturating_sub(limits::CONSOLE_BYTES);
            text.drain(..excess);
        }
        !is_empty(&texts)
    }

    /// Moves text of one stream to the guest's answer; returns `true` for standard error, and the number of bytes. `more`
    /// receives true if more text is left; it is called while no thread can add text.
    pub(crate) fn fetch(&self, into: &mut [u8], more: impl FnOnce(bool)) -> (bool, usize) {
        let mut texts = self.lock();
        let [output, error] = &mut *texts;
        let is_error = output.is_empty();
        let text = if is_error { error } else { output };
        let length = text.len().min(into.len());
        for (to, from) in into.iter_mut().zip(text.drain(..length)) {
            *to = from;
        }
        more(!is_empty(&texts));
        (is_error, length)
    }

    fn lock(&self) -> MutexGuard<'_, [VecDeque<u8>; 2]> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_empty(texts: &[VecDeque<u8>; 2]) -> bool {
    texts.iter().all(VecDeque::is_empty)
}

/// A pipe with a non-blocking reader.
fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)?;
    Ok((reader, writer))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C13
    #[test]
    fn text_is_fetched_in_order_and_the_oldest_is_dropped_first() {
        let console = Console::default();
        console.lock()[0].extend(b"hello, kernel");
        console.lock()[1].extend(b"failed");
        let mut into = [0; 8];
        let mut left = None;
        assert_eq!(console.fetch(&mut into, |more| left = Some(more)), (false, 8));
        assert_eq!((&into[..], left), (&b"hello, k"[..], Some(true)));
        assert_eq!(console.fetch(&mut into, |more| left = Some(more)), (false, 5));
        assert_eq!((&into[..5], left), (&b"ernel"[..], Some(true)));
        assert_eq!(console.fetch(&mut into, |more| left = Some(more)), (true, 6));
        assert_eq!((&into[..6], left), (&b"failed"[..], Some(false)));
        let ((output_reader, output), (error_reader, error)) =
            (pipe().expect("a pipe"), pipe().expect("a pipe"));
        console.pipes.set([output_reader, error_reader]).expect("first");
        for (text, writer) in [&output, &error].into_iter().enumerate() {
            console.lock()[text].extend(std::iter::repeat_n(b'a', limits::CONSOLE_BYTES));
            assert_eq!(rustix::io::write(writer, b"bbbb"), Ok(4));
        }
        assert!(console.collect());
        for text in &*console.lock() {
            assert_eq!(text.len(), limits::CONSOLE_BYTES);
            assert_eq!(text.iter().rev().take(4).copied().collect::<Vec<_>>(), b"bbbb");
        }
    }
}
