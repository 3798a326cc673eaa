//! Threads that close descriptors of processes that a guest can take over.
//!
//! The last close of a file may take seconds: a memory file of a hundred gigabytes, a socket that lingers. It may also never end: a file of
//! a FUSE server that does not answer. A worker or a device may send any descriptor, also one that is never received because its socket is
//! closed first, so no loop that serves several VMs closes one itself. Each VM has a queue, and a thread while the queue has
//! work, so a close of one VM holds up no other's.

use crate::limited;
use rustix::fd::OwnedFd;
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

type Work = Box<dyn FnOnce() + Send>;

/// A queue with this many descriptors that are not closed is full: more than the sockets of all sessions of a VM. A message of a peer has
/// 253 at most.
pub const FULL: usize = 600;

/// The queues of all owners, and their threads.
#[derive(Clone, Debug)]
pub struct Closers {
    queues: Arc<Mutex<OwnerQueues>>,
    most_threads: usize,
}

#[derive(Debug, Default)]
struct OwnerQueues {
    /// By owner with work.
    by_owner: BTreeMap<u32, OwnerQueue>,
    /// The owners whose work waits for a thread, in the order of their turns.
    waiting: VecDeque<u32>,
    threads: usize,
    /// Threads that are at work. The others were started for owners that wait.
    working: usize,
}

#[derive(Default)]
struct OwnerQueue {
    /// Each with the number of its descriptors.
    work: VecDeque<(usize, Work)>,
    /// Those in `work`, and those that a thread closes.
    descriptors: usize,
}

impl fmt::Debug for OwnerQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerQueue").field("descriptors", &self.descriptors).finish_non_exhaustive()
    }
}

/// The queue of one owner.
#[derive(Clone, Debug)]
pub struct Closer {
    closers: Closers,
    owner: u32,
}

impl Closers {
    /// No queue and no thread. If `most_threads` owners have closes that do not end, the work of further ones waits.
    pub fn new(most_threads: usize) -> Self {
        Self { queues: Arc::default(), most_threads }
    }

    /// The queue of an owner, usually a VM by its number.
    pub fn of(&self, owner: u32) -> Closer {
        Closer { closers: self.clone(), owner }
    }

    /// True if no further descriptors of an owner should be received, because [`FULL`] or more are not closed yet.
    pub fn is_full(&self, owner: u32) -> bool {
        self.lock().by_owner.get(&owner).is_some_and(|queue| queue.descriptors >= FULL)
    }

    fn lock(&self) -> MutexGuard<'_, OwnerQueues> {
        // No code panics while it has the lock.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, owner: u32, descriptors: usize, work: Work) {
        let mut queues = self.lock();
        if !queues.by_owner.contains_key(&owner) {
            queues.waiting.push_back(owner);
        }
        let queue = queues.by_owner.entry(owner).or_default();
        queue.descriptors += descriptors;
        queue.work.push_back((descriptors, work));
        if queues.waiting.len() <= queues.threads - queues.working || queues.threads >= self.most_threads {
            return;
        }
        let closers = self.clone();
        match thread::Builder::new().name("closer".to_owned()).spawn(move || closers.work()) {
            Ok(_) => queues.threads += 1,
            // The next work tries again.
            Err(error) => limited!(error, %error, "cannot start a thread that closes descriptors"),
        }
    }

    /// Does one piece of work of each waiting owner in turn, until none waits.
    fn work(&self) {
        let mut queues = self.lock();
        while let Some(owner) = queues.waiting.pop_front() {
            let next = queues.by_owner.get_mut(&owner).and_then(|queue| queue.work.pop_front());
            let Some((descriptors, work)) = next else { continue };
            queues.working += 1;
            drop(queues);
            work();
            queues = self.lock();
            queues.working -= 1;
            let Some(queue) = queues.by_owner.get_mut(&owner) else { continue };
            queue.descriptors -= descriptors;
            if queue.work.is_empty() {
                queues.by_owner.remove(&owner);
            } else {
                queues.waiting.push_back(owner);
            }
        }
        queues.threads -= 1;
    }
}

impl Closer {
    /// Hands descriptors over to be closed.
    pub fn close(&self, descriptors: Vec<OwnedFd>) {
        if !descriptors.is_empty() {
            self.run(descriptors.len(), move || drop(descriptors));
        }
    }

    /// Has a thread do the last work on a number of descriptors, which closes them.
    pub fn run(&self, descriptors: usize, work: impl FnOnce() + Send + 'static) {
        self.closers.add(self.owner, descriptors, Box::new(work));
    }

    /// As [`Closers::is_full`], for this owner.
    pub fn is_full(&self) -> bool {
        self.closers.is_full(self.owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::mpsc::{Receiver, Sender, channel},
        time::{Duration, Instant},
    };

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// A close that ends when the sender is dropped.
    fn hang(closer: &Closer) -> Sender<()> {
        let (release, ends) = channel::<()>();
        closer.run(1, move || _ = ends.recv());
        release
    }

    /// A close that reports its end.
    fn report(closer: &Closer) -> Receiver<()> {
        let (done, ended) = channel();
        closer.run(1, move || _ = done.send(()));
        ended
    }

    fn is_idle(closers: &Closers) -> bool {
        let queues = closers.lock();
        queues.threads == 0 && queues.by_owner.is_empty()
    }

    fn eventually(what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < TIMEOUT, "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    // Promise: F118
    #[test]
    fn close_that_does_not_end_holds_up_no_close_of_another_owner() {
        let closers = Closers::new(2);
        let hung = hang(&closers.of(1));
        let behind = report(&closers.of(1));
        for owner in 2..100 {
            report(&closers.of(owner)).recv_timeout(TIMEOUT).expect("closed beside the hung close");
        }
        assert!(behind.try_recv().is_err(), "an owner's work is done in order");
        drop(hung);
        behind.recv_timeout(TIMEOUT).expect("closed behind the hung close");
        eventually("threads are left", || is_idle(&closers));
    }

    // Promise: F118
    #[test]
    fn owner_with_much_work_has_one_thread() {
        let closers = Closers::new(100);
        let closer = closers.of(1);
        // No thread takes anything while the queues are locked, as on a busy machine.
        let all: Vec<_> = (0..100).map(|_| hang(&closer)).collect();
        assert_eq!(closers.lock().threads, 1);
        drop(all);
        eventually("threads are left", || is_idle(&closers));
    }

    // Promise: F118
    #[test]
    fn threads_are_bounded_and_work_of_further_owners_waits() {
        let closers = Closers::new(2);
        let hung = [1, 2].map(|owner| hang(&closers.of(owner)));
        let waiting: Vec<_> = (3..100).map(|owner| report(&closers.of(owner))).collect();
        assert_eq!(closers.lock().threads, 2);
        assert!(waiting.iter().all(|ended| ended.try_recv().is_err()));
        let [first, second] = hung;
        drop(first);
        for ended in waiting {
            ended.recv_timeout(TIMEOUT).expect("closed once a thread is free");
        }
        drop(second);
        eventually("threads are left", || is_idle(&closers));
    }

    // Promise: F118
    #[test]
    #[cfg(not(miri))]
    fn queue_is_full_until_its_descriptors_are_closed() {
        let closers = Closers::new(1);
        let (closer, other) = (closers.of(1), closers.of(2));
        let (release, ends) = channel::<()>();
        closer.run(FULL - 1, move || _ = ends.recv());
        assert!(!closer.is_full());
        let (_, pipe) = rustix::pipe::pipe().expect("a pipe");
        closer.close(vec![pipe]);
        assert!(closer.is_full() && !other.is_full());
        drop(release);
        eventually("the queue stays full", || !closer.is_full());
    }
}
