//! Queues as this device uses them: nothing the front-end does to its descriptors keeps a thread of ours.
//!
//! Kick and call are the front-end's open files. One that is a hostile process can have a read or a write of them wait for
//! ever, flags or not: by taking a kick before we do, by filling a call. So a kick is read without waiting, and a call
//! is written only while there is room; should the front-end fill it just then, [`release`] empties it again.
//!
//! A front-end that is a process hands over the reading end of a pipe for errors, of which it keeps the other: the kernel
//! hangs it up while the process exits, so that [`left`] knows who has gone before anybody had the time to say so.

#![expect(unsafe_code, reason = "a kick is lent as a number")]

use crate::{limiter::Limiter, memory::Memory};
use core::sync::atomic::{AtomicU64, Ordering};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, AsRawFd, BorrowedFd},
    fs::fstat,
    io::{Errno, IoSliceMut, ReadWriteFlags, preadv2},
};
use std::{
    fs::File,
    io,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};
use vhost_user_backend::{VringMutex, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::Error;

/// How long the write of a call may wait.
const PATIENCE: Duration = Duration::from_millis(500);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Calls of all queues of this process.
static CALLS: Mutex<Vec<Weak<Call>>> = Mutex::new(Vec::new());

/// Pipes of the front-ends of this process.
static PIPES: Mutex<Vec<Weak<File>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How the front-end is interrupted.
#[derive(Debug)]
struct Call {
    eventfd: File,
    /// When its write began, in milliseconds and never 0; 0 while none is under way.
    since: AtomicU64,
}

fn now() -> u64 {
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
}

/// The bits of a file's mode that say what it is.
const TYPE: u32 = 0o170_000;
/// A pipe.
const PIPE: u32 = 0o010_000;

/// Keeps a pipe to know by when its front-end goes. Everything else, an eventfd that a VMM hands over for instance, never
/// hangs up and is of no use; only the kernel's own pipes are known to be asked without waiting.
fn pipe(file: File) -> Option<Arc<File>> {
    let is_pipe = fstat(&file).is_ok_and(|status| status.st_mode & TYPE == PIPE);
    Some(file).filter(|_| is_pipe).map(known)
}

/// Keeps a file that hangs up when its front-end goes; the connection is cleared up when nobody else has what is returned.
pub(crate) fn known(file: File) -> Arc<File> {
    let file = Arc::new(file);
    let mut pipes = lock(&PIPES);
    pipes.retain(|pipe| pipe.strong_count() > 0);
    pipes.push(Arc::downgrade(&file));
    file
}

/// Connections whose front-end has gone and which are not cleared up yet. When one is, nobody can upgrade its entry.
#[must_use]
pub fn left() -> Vec<Weak<File>> {
    let pipes: Vec<Arc<File>> = lock(&PIPES).iter().filter_map(Weak::upgrade).collect();
    let mut polled: Vec<_> = pipes.iter().map(|pipe| PollFd::new(&**pipe, PollFlags::empty())).collect();
    if poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_err() {
        return Vec::new();
    }
    let gone = |polled: &PollFd<'_>| polled.revents().contains(PollFlags::HUP);
    pipes
        .iter()
        .zip(&polled)
        .filter(|(_, polled)| gone(polled))
        .map(|(pipe, _)| Arc::downgrade(pipe))
        .collect()
}

/// Reads an eventfd without waiting, whatever its flags; nothing there is no error.
fn empty(eventfd: impl AsFd) -> io::Result<()> {
    let mut counter = [0; 8];
    // The offset of a file that has none.
    match preadv2(eventfd, &mut [IoSliceMut::new(&mut counter)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Call {
    /// Takes over a descriptor if it is of a kind that can be emptied by whoever writes it: an eventfd, which of all files
    /// that can be written has no type.
    fn new(file: File) -> Option<Arc<Call>> {
        let untyped = fstat(&file).is_ok_and(|status| status.st_mode & TYPE == 0);
        if !untyped {
            static LINES: Limiter = Limiter::new();
            LINES.run(|suppressed| tracing::warn!(suppressed, "a call descriptor is no eventfd"));
            return None;
        }
        let call = Arc::new(Call { eventfd: file, since: AtomicU64::new(0) });
        let mut calls = lock(&CALLS);
        calls.retain(|call| call.strong_count() > 0);
        calls.push(Arc::downgrade(&call));
        Some(call)
    }

    fn signal(&self) -> io::Result<()> {
        let mut polled = [PollFd::new(&self.eventfd, PollFlags::OUT)];
        // Full: the front-end has not looked since many calls.
        if poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0 {
            return Ok(());
        }
        self.since.store(now(), Ordering::Relaxed);
        let written = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        self.since.store(0, Ordering::Relaxed);
        match written {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Lets a write go on that waits for too long.
    fn release(&self, now: u64) {
        let since = self.since.load(Ordering::Relaxed);
        if since != 0 && u128::from(now.saturating_sub(since)) >= PATIENCE.as_millis() {
            // An error leaves it as it is, until the next time.
            let _ = empty(&self.eventfd);
        }
    }
}

/// Keeps calls from waiting, for ever: a thread of its own where front-ends are processes.
pub fn release() -> ! {
    loop {
        std::thread::sleep(PATIENCE);
        let calls: Vec<_> = lock(&CALLS).iter().filter_map(Weak::upgrade).collect();
        let now = now();
        for call in calls {
            call.release(now);
        }
    }
}

/// A queue with its memory.
#[derive(Clone)]
pub struct Vring {
    inner: VringMutex<Memory>,
    call: Arc<Mutex<Option<Arc<Call>>>>,
    pipe: Arc<Mutex<Option<Arc<File>>>>,
}

impl<'a> VringStateGuard<'a, Memory> for Vring {
    type G = <VringMutex<Memory> as VringStateGuard<'a, Memory>>::G;
}

impl<'a> VringStateMutGuard<'a, Memory> for Vring {
    type G = <VringMutex<Memory> as VringStateMutGuard<'a, Memory>>::G;
}

impl VringT<Memory> for Vring {
    fn new(memory: Memory, slots: u16) -> Result<Vring, Error> {
        Ok(Vring { inner: VringMutex::new(memory, slots)?, call: Arc::default(), pipe: Arc::default() })
    }

    fn set_call(&self, file: Option<File>) {
        *lock(&self.call) = file.and_then(Call::new);
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        // Not under the lock, which a new call must be able to take.
        let call = lock(&self.call).clone();
        call.map_or(Ok(()), |call| call.signal())
    }

    fn read_kick(&self) -> io::Result<bool> {
        let state = self.inner.get_ref();
        if let Some(kick) = state.get_kick() {
            // SAFETY: open for as long as the state is locked.
            empty(unsafe { BorrowedFd::borrow_raw(kick.as_raw_fd()) })?;
        }
        Ok(state.is_enabled())
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, Memory>>::G {
        self.inner.get_ref()
    }
    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, Memory>>::G {
        self.inner.get_mut()
    }
    fn add_used(&self, head: u16, length: u32) -> Result<(), Error> {
        self.inner.add_used(head, length)
    }
    fn enable_notification(&self) -> Result<bool, Error> {
        self.inner.enable_notification()
    }
    fn disable_notification(&self) -> Result<(), Error> {
        self.inner.disable_notification()
    }
    fn needs_notification(&self) -> Result<bool, Error> {
        self.inner.needs_notification()
    }
    fn set_enabled(&self, enabled: bool) {
        self.inner.set_enabled(enabled);
    }
    fn set_queue_info(&self, descriptors: u64, available: u64, used: u64) -> Result<(), Error> {
        self.inner.set_queue_info(descriptors, available, used)
    }
    fn queue_next_avail(&self) -> u16 {
        self.inner.queue_next_avail()
    }
    fn set_queue_next_avail(&self, base: u16) {
        self.inner.set_queue_next_avail(base);
    }
    fn set_queue_next_used(&self, index: u16) {
        self.inner.set_queue_next_used(index);
    }
    fn queue_used_idx(&self) -> Result<u16, Error> {
        self.inner.queue_used_idx()
    }
    fn set_queue_size(&self, slots: u16) {
        self.inner.set_queue_size(slots);
    }
    fn set_queue_event_idx(&self, enabled: bool) {
        self.inner.set_queue_event_idx(enabled);
    }
    fn set_queue_ready(&self, ready: bool) {
        self.inner.set_queue_ready(ready);
    }
    fn set_kick(&self, file: Option<File>) {
        self.inner.set_kick(file);
    }
    fn set_err(&self, file: Option<File>) {
        *lock(&self.pipe) = file.and_then(pipe);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use vm_memory::GuestMemoryMmap;

    fn vring() -> Vring {
        Vring::new(Memory::new(GuestMemoryMmap::new()), 64).unwrap()
    }

    fn blocking() -> File {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap().into()
    }

    // Promise: Q51
    #[test]
    fn a_front_end_that_has_gone_is_known_by_its_pipe() {
        let (theirs, ours) = (vring(), vring());
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (other, _kept) = rustix::pipe::pipe().unwrap();
        theirs.set_err(Some(read.into()));
        ours.set_err(Some(other.into()));
        let ends = |vring: &Vring| {
            let pipe = Arc::downgrade(lock(&vring.pipe).as_ref().unwrap());
            left().iter().any(|left| left.ptr_eq(&pipe))
        };
        assert!(!ends(&theirs), "it is there");
        drop(write);
        assert!(ends(&theirs), "it has gone");
        assert!(!ends(&ours), "the other has not");
        let gone = Arc::downgrade(lock(&theirs.pipe).as_ref().unwrap());
        drop(theirs);
        assert!(gone.upgrade().is_none(), "the connection is cleared up");
        ours.set_err(Some(blocking()));
        assert!(lock(&ours.pipe).is_none(), "what never hangs up is not asked");
    }

    // Promise: F9
    #[test]
    fn a_kick_that_somebody_else_took_is_not_waited_for() {
        let vring = vring();
        let kick = blocking();
        vring.set_kick(Some(kick.try_clone().unwrap()));
        assert!(!vring.read_kick().unwrap(), "nothing was there, and the queue is not enabled");
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        vring.read_kick().unwrap();
        let nothing = preadv2(&kick, &mut [IoSliceMut::new(&mut [0; 8])], u64::MAX, ReadWriteFlags::NOWAIT);
        assert_eq!(nothing, Err(Errno::AGAIN), "the kick was taken");
    }

    // Promise: F9
    #[test]
    fn a_full_call_is_not_waited_for() {
        let vring = vring();
        let call = blocking();
        rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        vring.set_call(Some(call));
        vring.signal_used_queue().unwrap();
    }

    // Promise: F9
    #[test]
    fn a_write_that_waits_is_let_go() {
        let call = Call::new(blocking()).unwrap();
        rustix::io::write(&call.eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        std::thread::scope(|scope| {
            // As if it had been filled just after there was room.
            let writer = scope.spawn(|| {
                call.since.store(now(), Ordering::Relaxed);
                rustix::io::write(&call.eventfd, &1u64.to_ne_bytes()).unwrap();
            });
            let since = loop {
                match call.since.load(Ordering::Relaxed) {
                    0 => std::thread::yield_now(),
                    since => break since,
                }
            };
            std::thread::sleep(Duration::from_millis(50));
            call.release(since);
            assert!(!writer.is_finished(), "not before its time");
            // Again and again, as it is done: the first may come before the write does.
            while !writer.is_finished() {
                call.release(u64::MAX);
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn only_an_eventfd_is_called() {
        let (_, pipe) = rustix::pipe::pipe().unwrap();
        assert!(Call::new(pipe.into()).is_none());
    }
}
