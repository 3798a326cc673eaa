//! Queues as this device uses them: no action of the front-end on its descriptors blocks a thread of ours.
//!
//! Kick and call are the front-end's open files. A hostile process can make a read or a write of them wait for ever, whatever
//! their flags: by reading a kick before the device, or by filling a call. So a kick is read without waiting, and a call is
//! written only while there is room; if the front-end fills it just then, [`release`] empties it again.
//!
//! A front-end that is a process passes the reading end of a pipe for errors, and keeps the other end: the kernel hangs it
//! up while the process exits, so that [`left`] finds at once the front-ends that have gone.

use crate::memory::MemorySnapshot;
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

/// Longest time for which the write of a call may wait.
const TIMEOUT: Duration = Duration::from_millis(500);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The calls of all queues of this process.
static CALLS: Mutex<Vec<Weak<Call>>> = Mutex::new(Vec::new());

/// The pipes of the front-ends of this process.
static PIPES: Mutex<Vec<Weak<File>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The eventfd that interrupts the front-end.
#[derive(Debug)]
struct Call {
    eventfd: File,
    /// Start of its present write, in milliseconds and never 0; 0 if there is none.
    since: AtomicU64,
}

fn now() -> u64 {
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
}

/// The bits of a file's mode for its type.
const TYPE: u32 = 0o170_000;
/// The type of a pipe.
const PIPE: u32 = 0o010_000;

/// Keeps a pipe that shows when its front-end goes. Other files, for instance an eventfd that a VMM passes, never
/// hang up and are useless here; only the kernel's own pipes can surely be polled without waiting.
fn pipe(file: File) -> Option<Arc<File>> {
    let is_pipe = fstat(&file).is_ok_and(|status| status.st_mode & TYPE == PIPE);
    Some(file).filter(|_| is_pipe).map(known)
}

/// Keeps a file that hangs up when its front-end goes. The connection is cleaned up when all copies of the result are dropped.
pub(crate) fn known(file: File) -> Arc<File> {
    let file = Arc::new(file);
    let mut pipes = lock(&PIPES);
    pipes.retain(|pipe| pipe.strong_count() > 0);
    pipes.push(Arc::downgrade(&file));
    file
}

/// Connections whose front-end has gone and which are not cleaned up yet. After the clean-up, an entry cannot be upgraded.
#[must_use]
pub fn left() -> Vec<Weak<File>> {
    /// The filter bounds the number in one call.
    const AT_ONCE: usize = 256;
    let pipes: Vec<Arc<File>> = lock(&PIPES).iter().filter_map(Weak::upgrade).collect();
    pipes.chunks(AT_ONCE).flat_map(left_of).collect()
}

/// Those of a few connections whose front-end has gone.
fn left_of(pipes: &[Arc<File>]) -> Vec<Weak<File>> {
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

fn is_untyped(file: &File) -> bool {
    fstat(file).is_ok_and(|status| status.st_mode & TYPE == 0)
}

/// True if a file is an eventfd, as far as its type and a read without waiting can tell.
pub(crate) fn is_eventfd(file: &File) -> bool {
    is_untyped(file) && empty(file).is_ok()
}

/// Reads an eventfd without waiting, whatever its flags; an empty one is no error.
fn empty(eventfd: impl AsFd) -> io::Result<()> {
    let mut counter = [0; 8];
    // The offset for a file without offsets.
    match preadv2(eventfd, &mut [IoSliceMut::new(&mut counter)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Call {
    /// Takes over a descriptor if its writer can also empty it: an eventfd, the only writable file without a type.
    fn new(file: File) -> Option<Arc<Call>> {
        if !is_untyped(&file) {
            limited!(warn, "a call descriptor is not an eventfd");
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
        // Full: the front-end has ignored many calls.
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

    /// Releases a write that has waited too long.
    fn release(&self, now: u64) {
        let since = self.since.load(Ordering::Relaxed);
        if since != 0 && u128::from(now.saturating_sub(since)) >= TIMEOUT.as_millis() {
            // After an error, the next call tries again.
            let _ = empty(&self.eventfd);
        }
    }
}

/// Releases waiting calls, for ever, in a thread of its own; used if front-ends are processes.
pub fn release() -> ! {
    loop {
        std::thread::park_timeout(TIMEOUT);
        let calls: Vec<_> = lock(&CALLS).iter().filter_map(Weak::upgrade).collect();
        let now = now();
        for call in calls {
            call.release(now);
        }
    }
}

/// The settings of a queue.
#[derive(Debug)]
struct VringState {
    queue: Queue,
    kick: Option<Arc<File>>,
    enabled: bool,
}

/// A queue. It has no memory: each function that reads or writes the ring takes the snapshot of guest memory that was checked,
/// so no other memory is used.
#[derive(Clone, Debug)]
pub struct Vring {
    state: Arc<Mutex<VringState>>,
    call: Arc<Mutex<Option<Arc<Call>>>>,
    pipe: Arc<Mutex<Option<Arc<File>>>>,
}

impl Vring {
    /// Creates a queue of at most this many slots.
    ///
    /// # Errors
    /// The size is not valid for a queue.
    pub fn new(slots: u16) -> Result<Vring, Error> {
        let state = VringState { queue: Queue::new(slots)?, kick: None, enabled: false };
        Ok(Vring { state: Arc::new(Mutex::new(state)), call: Arc::default(), pipe: Arc::default() })
    }

    /// Takes the next chain, if there is one.
    ///
    /// # Errors
    /// The ring is not in memory, or its indices are invalid.
    pub fn take(&self, memory: &MemorySnapshot) -> Result<Option<DescriptorChain<MemorySnapshot>>, Error> {
        lock(&self.state).queue.iter(Arc::clone(memory)).map(|mut chains| chains.next())
    }

    /// Returns a chain to the driver.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn add_used(&self, memory: &GuestMemoryMmap<()>, head: u16, length: u32) -> Result<(), Error> {
        lock(&self.state).queue.add_used(memory, head, length)
    }

    /// Enables kicks; `true` if there are chains already.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn enable_notification(&self, memory: &GuestMemoryMmap<()>) -> Result<bool, Error> {
        lock(&self.state).queue.enable_notification(memory)
    }

    /// Disables kicks.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn disable_notification(&self, memory: &GuestMemoryMmap<()>) -> Result<(), Error> {
        lock(&self.state).queue.disable_notification(memory)
    }

    /// True if the front-end requests a notification.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn needs_notification(&self, memory: &GuestMemoryMmap<()>) -> Result<bool, Error> {
        lock(&self.state).queue.needs_notification(memory)
    }

    /// Calls the front-end, if it set a call.
    ///
    /// # Errors
    /// The kernel's error of the write.
    pub fn signal(&self) -> io::Result<()> {
        // Not under the lock, which setting a new call needs.
        let call = lock(&self.call).clone();
        call.map_or(Ok(()), |call| call.signal())
    }

    /// Reads a kick, if there is one.
    ///
    /// # Errors
    /// The kick is not an eventfd.
    pub fn read_kick(&self) -> io::Result<()> {
        self.kick().map_or(Ok(()), empty)
    }

    /// Sets the ring's addresses, and continues after the last used index in it: a queue of a new driver starts at 0.
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

    /// Number of slots.
    #[must_use]
    pub fn size(&self) -> u16 {
        lock(&self.state).queue.size()
    }

    /// Sets the number of slots.
    pub fn set_size(&self, slots: u16) {
        lock(&self.state).queue.set_size(slots);
    }

    /// Sets whether event indices are used.
    pub fn set_event_index(&self, enabled: bool) {
        lock(&self.state).queue.set_event_idx(enabled);
    }

    /// True if the queue is started.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        lock(&self.state).queue.ready()
    }

    /// Starts or stops the queue.
    pub fn set_ready(&self, ready: bool) {
        lock(&self.state).queue.set_ready(ready);
    }

    /// True if the front-end lets the queue be served.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        lock(&self.state).enabled
    }

    /// Enables or disables serving of the queue.
    pub fn set_enabled(&self, enabled: bool) {
        lock(&self.state).enabled = enabled;
    }

    /// The front-end's kick descriptor.
    #[must_use]
    pub fn kick(&self) -> Option<Arc<File>> {
        lock(&self.state).kick.clone()
    }

    /// Sets the kick descriptor.
    pub fn set_kick(&self, file: Option<File>) {
        lock(&self.state).kick = file.map(Arc::new);
    }

    /// Sets the call descriptor.
    pub fn set_call(&self, file: Option<File>) {
        *lock(&self.call) = file.and_then(Call::new);
    }

    /// Sets the pipe that shows when the front-end has gone.
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
    fn front_end_that_has_gone_is_detected_by_its_pipe() {
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
    fn kick_read_by_another_reader_does_not_block() {
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
    fn signal_on_a_full_call_eventfd_does_not_block() {
        let vring = vring();
        let call = blocking();
        rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        vring.set_call(Some(call));
        vring.signal().unwrap();
    }

    // Promise: F9
    #[test]
    fn blocked_call_write_is_released_after_its_deadline() {
        let call = Call::new(blocking()).unwrap();
        rustix::io::write(&call.eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        std::thread::scope(|scope| {
            // As if it was filled just after there was room.
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
            // Repeated, as in production: the first may come before the write does.
            while !writer.is_finished() {
                call.release(u64::MAX);
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn call_descriptor_that_is_no_eventfd_is_refused() {
        let (_, pipe) = rustix::pipe::pipe().unwrap();
        assert!(Call::new(pipe.into()).is_none());
    }
}
