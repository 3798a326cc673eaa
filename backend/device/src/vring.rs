//! Queues as this device uses them: no action of the front-end on its descriptors blocks a thread of ours.
//!
//! Kick and call are the front-end's open files. A hostile process can make a read or a write of them wait for ever, flags or
//! not: by taking a kick before we do, by filling a call. So a kick is read without waiting, and a call is written only while
//! there is room; should the front-end fill it just then, [`release`] empties it again.
//!
//! A front-end that is a process hands over the reading end of a pipe for errors, and keeps the other end: the kernel hangs it
//! up while the process exits, so that [`left`] finds at once who has gone.

use crate::memory::Memory;
use core::sync::atomic::{AtomicU64, Ordering};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::AsFd,
    fs::fstat,
    io::{Errno, IoSliceMut, ReadWriteFlags, preadv2},
};
use sluice_runtime::limited;
use std::{
    fs::File,
    io,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};
use virtio_queue::{DescriptorChain, Error, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{GuestAddress, GuestMemoryMmap};

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
            limited!(warn, "a call descriptor is no eventfd");
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

/// What a queue is set to.
#[derive(Debug)]
struct State {
    queue: Queue,
    kick: Option<Arc<File>>,
    enabled: bool,
}

/// A queue. It has no memory: each function that reads or writes the ring takes the snapshot of guest memory that was checked,
/// so that there is no other.
#[derive(Clone, Debug)]
pub struct Vring {
    state: Arc<Mutex<State>>,
    call: Arc<Mutex<Option<Arc<Call>>>>,
    pipe: Arc<Mutex<Option<Arc<File>>>>,
}

impl Vring {
    /// A queue of at most this many slots.
    ///
    /// # Errors
    /// Not a size that a queue can have.
    pub fn new(slots: u16) -> Result<Vring, Error> {
        let state = State { queue: Queue::new(slots)?, kick: None, enabled: false };
        Ok(Vring { state: Arc::new(Mutex::new(state)), call: Arc::default(), pipe: Arc::default() })
    }

    /// Takes the next chain, if there is one.
    ///
    /// # Errors
    /// The ring is not in memory, or its indices are impossible.
    pub fn take(&self, memory: &Memory) -> Result<Option<DescriptorChain<Memory>>, Error> {
        lock(&self.state).queue.iter(Arc::clone(memory)).map(|mut chains| chains.next())
    }

    /// Gives a chain back.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn add_used(&self, memory: &GuestMemoryMmap<()>, head: u16, length: u32) -> Result<(), Error> {
        lock(&self.state).queue.add_used(memory, head, length)
    }

    /// Asks for kicks; `true` when there are chains already.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn enable_notification(&self, memory: &GuestMemoryMmap<()>) -> Result<bool, Error> {
        lock(&self.state).queue.enable_notification(memory)
    }

    /// Asks for no kicks.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn disable_notification(&self, memory: &GuestMemoryMmap<()>) -> Result<(), Error> {
        lock(&self.state).queue.disable_notification(memory)
    }

    /// Whether the front-end is to be called.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn needs_notification(&self, memory: &GuestMemoryMmap<()>) -> Result<bool, Error> {
        lock(&self.state).queue.needs_notification(memory)
    }

    /// Calls the front-end.
    ///
    /// # Errors
    /// The kernel's.
    pub fn signal(&self) -> io::Result<()> {
        // Not under the lock, which a new call must be able to take.
        let call = lock(&self.call).clone();
        call.map_or(Ok(()), |call| call.signal())
    }

    /// Takes a kick, if there is one.
    ///
    /// # Errors
    /// The kick is no eventfd.
    pub fn read_kick(&self) -> io::Result<()> {
        self.kick().map_or(Ok(()), empty)
    }

    /// Says where the ring is, and goes on behind what it says was given back: a queue whose driver is another one begins anew.
    ///
    /// # Errors
    /// The ring is not in memory, or not aligned.
    pub fn set_addresses(
        &self,
        memory: &GuestMemoryMmap<()>,
        descriptors: u64,
        available: u64,
        used: u64,
    ) -> Result<(), Error> {
        let queue = &mut lock(&self.state).queue;
        queue.try_set_desc_table_address(GuestAddress(descriptors))?;
        queue.try_set_avail_ring_address(GuestAddress(available))?;
        queue.try_set_used_ring_address(GuestAddress(used))?;
        let index = queue.used_idx(memory, Ordering::Relaxed)?;
        queue.set_next_used(index.0);
        Ok(())
    }

    /// Index of the next chain to take.
    #[must_use]
    pub fn next_available(&self) -> u16 {
        lock(&self.state).queue.next_avail()
    }

    /// Sets the index of the next chain to take.
    pub fn set_next_available(&self, index: u16) {
        lock(&self.state).queue.set_next_avail(index);
    }

    /// Slots.
    #[must_use]
    pub fn size(&self) -> u16 {
        lock(&self.state).queue.size()
    }

    /// Sets the number of slots.
    pub fn set_size(&self, slots: u16) {
        lock(&self.state).queue.set_size(slots);
    }

    /// Sets whether kicks and calls are asked for by index.
    pub fn set_event_index(&self, enabled: bool) {
        lock(&self.state).queue.set_event_idx(enabled);
    }

    /// Whether the queue is started.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        lock(&self.state).queue.ready()
    }

    /// Starts or stops the queue.
    pub fn set_ready(&self, ready: bool) {
        lock(&self.state).queue.set_ready(ready);
    }

    /// Whether the front-end lets the queue be served.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        lock(&self.state).enabled
    }

    /// Lets the queue be served, or not.
    pub fn set_enabled(&self, enabled: bool) {
        lock(&self.state).enabled = enabled;
    }

    /// By what the front-end kicks.
    #[must_use]
    pub fn kick(&self) -> Option<Arc<File>> {
        lock(&self.state).kick.clone()
    }

    /// Sets by what the front-end kicks.
    pub fn set_kick(&self, file: Option<File>) {
        lock(&self.state).kick = file.map(Arc::new);
    }

    /// Sets by what the front-end is called.
    pub fn set_call(&self, file: Option<File>) {
        *lock(&self.call) = file.and_then(Call::new);
    }

    /// Sets the pipe by which it is known that the front-end has gone.
    pub fn set_pipe(&self, file: Option<File>) {
        *lock(&self.pipe) = file.and_then(pipe);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn vring() -> Vring {
        Vring::new(64).unwrap()
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
        theirs.set_pipe(Some(read.into()));
        ours.set_pipe(Some(other.into()));
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
        ours.set_pipe(Some(blocking()));
        assert!(lock(&ours.pipe).is_none(), "what never hangs up is not asked");
    }

    // Promise: F9
    #[test]
    fn a_kick_that_somebody_else_took_is_not_waited_for() {
        let vring = vring();
        let kick = blocking();
        vring.set_kick(Some(kick.try_clone().unwrap()));
        vring.read_kick().unwrap();
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
        vring.signal().unwrap();
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
