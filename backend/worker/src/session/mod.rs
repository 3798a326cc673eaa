//! The session state that all threads of the worker share: its page, its two eventfds, its sticky error.
//!
//! Every publication to the guest goes through here, so that each wakes a sleeping guest. Every other folder uses this one. It
//! has the tables of the session's objects ([`objects`], [`images`], [`plain`], [`table`]), the text that kernels print ([`console`]), and the end of
//! the process ([`mod@exit`]). Nothing here depends on the driver, except by the wait that a caller passes in.

pub(crate) mod console;
pub(crate) mod exit;
pub(crate) mod images;
pub(crate) mod objects;
pub(crate) mod plain;
pub(crate) mod shape;
pub(crate) mod table;

use crate::{
    arenas::Pages,
    session::{console::Console, exit::exit},
};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fd::OwnedFd,
    io::Errno,
};
use sluice_cuda_abi::status;
use sluice_driver::{Code, code};
use sluice_protocol::{
    limits,
    park::Parking,
    record::NO_REPLY,
    reply,
    session::{self, Attachment, HostCall, LateError},
    shared::Shared,
};
use sluice_runtime::limited;
use std::sync::{Mutex, PoisonError};

/// Exit status after the guest broke the protocol.
pub(crate) const EXIT_MALFORMED: i32 = 2;

/// The place for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReplyTo {
    pub(crate) slot: u32,
    pub(crate) ticket: u32,
    /// Index of the caller's context, `limits::CONTEXTS` for none: the context gets the error of a post.
    pub(crate) context: u32,
}

impl ReplyTo {
    /// No answer; the context with this index gets an error.
    pub(crate) const fn nowhere(context: u32) -> ReplyTo {
        ReplyTo { slot: NO_REPLY, ticket: 0, context }
    }

    /// True if the guest waits for the answer.
    pub(crate) const fn is_due(self) -> bool {
        self.slot != NO_REPLY
    }
}

/// The session state that all threads share.
#[derive(Debug)]
pub(crate) struct Session {
    /// The control resource; stays mapped until the process ends.
    words: Pages,
    /// Signalled by the device, or by the guest if it is a program.
    doorbell: OwnedFd,
    /// Signalled by threads of the worker.
    inner: OwnedFd,
    /// Wakes the guest, by the device or directly.
    wake: OwnedFd,
    sticky: AtomicU32,
    /// Late errors as published; the guest's page is not read back.
    late_errors: Mutex<Box<[LateError]>>,
    console: Console,
    /// Held while text is taken from the driver and offered to the guest.
    publishing: Mutex<()>,
    /// The sequence published as complete, per stream slot; the guest's page is not read back.
    completed: Box<[AtomicU64]>,
}

impl Session {
    pub(crate) fn new(words: Pages, doorbell: OwnedFd, wake: OwnedFd) -> Result<Session, Errno> {
        let inner = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let completed = (0..limits::STREAMS).map(|_| AtomicU64::new(0)).collect();
        Ok(Session {
            words,
            doorbell,
            inner,
            wake,
            sticky: AtomicU32::new(0),
            late_errors: Mutex::new(vec![LateError::default(); session::LATE_ERRORS as usize].into()),
            console: Console::default(),
            publishing: Mutex::default(),
            completed,
        })
    }

    /// The control resource.
    pub(crate) fn words(&self) -> &Pages {
        &self.words
    }

    /// Wakes the guest if its waker thread sleeps; called after every publication.
    pub(crate) fn wake_guest(&self) {
        if Parking::GUEST.must_wake(&self.words) {
            signal(&self.wake);
        }
    }

    /// Interrupts a sleeping dispatcher from inside the worker.
    pub(crate) fn wake_dispatcher(&self) {
        signal(&self.inner);
    }

    /// Sleeps until the doorbell is signalled. The dispatcher has announced in the page that it sleeps.
    pub(crate) fn await_doorbell(&self) {
        let wake_fds = [&self.doorbell, &self.inner];
        let mut polled = wake_fds.map(|wake_fd| PollFd::new(wake_fd, PollFlags::IN));
        // An interrupted sleep is a spurious wake-up: the caller checks the ring again.
        if let Err(error) = poll(&mut polled, None::<&Timespec>)
            && error != Errno::INTR
        {
            self.doorbell_failed(error);
        }
        for (wake_fd, polled) in wake_fds.into_iter().zip(polled) {
            if polled.revents().is_empty() {
                continue;
            }
            // Reads all signals at once, of a pipe as of an eventfd.
            match rustix::io::read(wake_fd, &mut [0; 4096]) {
                // The device is gone; the control thread is about to find that, too.
                Ok(0) => exit(0),
                Ok(_) | Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => self.doorbell_failed(error),
            }
        }
    }

    fn doorbell_failed(&self, error: Errno) -> ! {
        tracing::error!(%error, "cannot wait for the doorbell");
        self.lose(code::DEVICE_UNAVAILABLE, 1)
    }

    /// Publishes an answer, if the guest waits for it.
    pub(crate) fn answer(&self, to: ReplyTo, result: Code, fields: &[u8]) {
        if to.is_due() {
            reply::publish(&self.words, to.slot, to.ticket, result, fields);
            self.wake_guest();
        }
    }

    /// Ends a call that has no result beyond its status: answers it, or keeps the failure of a post for its context.
    pub(crate) fn conclude(&self, to: ReplyTo, result: Result<(), Code>) {
        match result {
            _ if to.is_due() => self.answer(to, result.err().unwrap_or(0), &[]),
            Ok(()) => {}
            Err(failed) => self.post_failed(to.context, failed),
        }
    }

    /// Concludes work. If it was posted, [`Session::work_failed`] has kept its failure for the context already.
    pub(crate) fn conclude_work(&self, to: ReplyTo, result: Result<(), Code>) {
        if to.is_due() {
            self.answer(to, result.err().unwrap_or(0), &[]);
        }
    }

    /// Keeps the failure of posted work for its context. Called before the work is marked, so that a guest that waits for it
    /// finds the error.
    pub(crate) fn work_failed(&self, to: ReplyTo, failed: Code) {
        if !to.is_due() {
            self.post_failed(to.context, failed);
        }
    }

    /// Handles the failure of a post. A failure that breaks a context ends all work of the session; any other is reported once
    /// by the guest.
    #[cold]
    pub(crate) fn post_failed(&self, context: u32, failed: Code) {
        if status::is_sticky(failed) {
            return self.set_sticky(failed);
        }
        limited!(warn, context, code = failed, "a posted call failed; its context reports the failure once");
        let index = context.min(limits::CONTEXTS);
        let mut errors = self.late_errors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = errors.get_mut(index as usize) {
            *error = LateError { count: error.count.wrapping_add(1), code: failed };
            session::set_late_error(&self.words, index, *error);
        }
        drop(errors);
        self.wake_guest();
    }

    /// The code that answers every call from now on, if work has failed.
    pub(crate) fn sticky(&self) -> Option<Code> {
        match self.sticky.load(Ordering::Relaxed) {
            0 => None,
            failed => Some(failed),
        }
    }

    /// Records a failure that breaks the context of posted work. The first one stays.
    pub(crate) fn set_sticky(&self, failed: Code) {
        if self.sticky.compare_exchange(0, failed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            tracing::warn!(
                code = failed,
                "posted work failed; all calls of the session fail with this code from now on"
            );
            self.words.store_u32(session::STICKY, failed, Ordering::Release);
            self.wake_guest();
        }
    }

    /// The sequence up to which a stream slot's work is complete.
    pub(crate) fn completed(&self, slot: u32) -> u64 {
        self.completed.get(slot as usize).map_or(0, |sequence| sequence.load(Ordering::Acquire))
    }

    /// Publishes completion. The caller wakes the guest once after all its publications.
    pub(crate) fn set_completed(&self, slot: u32, sequence: u64) {
        if let Some(word) = self.completed.get(slot as usize) {
            word.store(sequence, Ordering::Release);
            session::set_completed(&self.words, slot, sequence);
        }
    }

    /// Publishes a call of a function of the program.
    pub(crate) fn call_host(&self, call: HostCall) {
        session::set_host_call(&self.words, call);
        self.wake_guest();
    }

    /// The call that the guest says has returned: any value at all.
    pub(crate) fn host_returned(&self) -> HostCall {
        session::host_return(&self.words)
    }

    /// The text that kernels print.
    pub(crate) const fn console(&self) -> &Console {
        &self.console
    }

    /// Offers the text that kernels have printed, before their work is published as complete or failed. A driver hands out text
    /// when a call waits for the work (`wait`), not when a call queries it. `wait` is short, because the work is complete or
    /// has failed.
    pub(crate) fn publish_text(&self, wait: impl FnOnce() -> Result<(), Code>) {
        if self.console.is_open() {
            // The driver gives the text to the first thread that waits; the others pass this lock after that thread has offered
            // it.
            let _publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(failed) = wait() {
                tracing::debug!(code = failed, "cannot wait for kernels whose text is fetched");
            }
            self.offer_text(self.console.settle());
        }
    }

    /// Reports to the guest that there is text to fetch, if there is.
    pub(crate) fn offer_text(&self, some: bool) {
        if some {
            self.words.store_u32(session::CONSOLE, 1, Ordering::Release);
        }
    }

    /// Moves text to the guest, as [`Console::fetch`] does.
    pub(crate) fn fetch_text(&self, into: &mut [u8]) -> (bool, usize) {
        self.console
            .fetch(into, |more| self.words.store_u32(session::CONSOLE, more.into(), Ordering::Release))
    }

    /// Publishes the state of an attachment.
    pub(crate) fn set_attachment(&self, slot: u32, state: Attachment) {
        session::set_attachment(&self.words, slot, state);
        self.wake_guest();
    }

    /// Publishes that the worker serves the session from now on.
    pub(crate) fn set_ready(&self) {
        self.words.store_u32(session::STATE, session::READY, Ordering::Release);
        self.wake_guest();
    }

    /// Ends the session: the guest reads `reason`, the process exits with `status`.
    pub(crate) fn lose(&self, reason: Code, status: i32) -> ! {
        session::set_lost(&self.words, reason);
        self.wake_guest();
        exit(status)
    }
}

fn signal(eventfd: &OwnedFd) {
    // It fails only if the counter is full; then the other side has a wake-up pending already.
    if let Err(error) = rustix::io::write(eventfd, &1_u64.to_ne_bytes()) {
        tracing::debug!(%error, "cannot write to the eventfd");
    }
}
