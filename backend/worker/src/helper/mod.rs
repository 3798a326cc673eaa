//! The two helper threads: they run the jobs that may wait, each in the order of requests.
//!
//! The dispatcher sends jobs and never waits for their results; only if a queue is full does it wait for room.
//! The memory helper owns contexts, device memory and the pinning of arenas; the module helper owns images and functions.
//! A helper leaves a [`Notice`](crate::helper::notice::Notice) for the dispatcher before it answers the guest. It never takes a
//! record off the ring.

pub(crate) mod jobs;
pub(crate) mod kinds;
pub(crate) mod notice;

use crate::helper::jobs::{MemoryJob, ModuleJob};
use core::sync::atomic::{AtomicUsize, Ordering};
use sluice_messages::{
    channel::Channel,
    control::{FromWorker, ToWorker},
};
use std::sync::{
    Arc,
    mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
};

/// Jobs that may wait for a helper; at this limit the dispatcher waits, which delays this session only.
const JOBS: usize = 1024;

/// The other threads' handle to the helpers. Jobs are boxed: a queue has its whole buffer from the start of the session, and a job has
/// room for the parameters of the largest call.
#[derive(Clone, Debug)]
pub(crate) struct Helper {
    memory: SyncSender<Box<MemoryJob>>,
    modules: SyncSender<Box<ModuleJob>>,
    /// Jobs that were announced and that the memory helper has not finished.
    memory_jobs: Arc<AtomicUsize>,
}

/// The receiving ends of the helpers' queues.
pub(crate) struct Inboxes {
    pub(crate) memory: Receiver<Box<MemoryJob>>,
    pub(crate) modules: Receiver<Box<ModuleJob>>,
}

impl Helper {
    pub(crate) fn new() -> (Helper, Inboxes) {
        let (memory, memory_inbox) = sync_channel(JOBS);
        let (modules, modules_inbox) = sync_channel(JOBS);
        let helper = Helper { memory, modules, memory_jobs: Arc::default() };
        (helper, Inboxes { memory: memory_inbox, modules: modules_inbox })
    }

    pub(crate) fn memory(&self, job: MemoryJob) {
        self.memory_announced();
        self.announced_memory(job, || {});
    }

    /// Announces a memory job that is sent later.
    pub(crate) fn memory_announced(&self) {
        self.memory_jobs.fetch_add(1, Ordering::AcqRel);
    }

    /// Sends the announced job. `before_wait` is called if the queue is full, before the thread waits for room.
    pub(crate) fn announced_memory(&self, job: MemoryJob, before_wait: impl FnOnce()) {
        send(&self.memory, job, before_wait);
    }

    /// Waits until the memory helper has done all jobs that were sent to it. Not for that helper itself.
    pub(crate) fn settle_memory(&self) {
        let (done, settled) = sync_channel(1);
        self.memory(MemoryJob::Settle(done));
        // The helper sends nothing: it ends the wait when it drops the sender.
        let _ended = settled.recv();
    }

    /// Sends a job to the module helper. `before_wait` is as for [`Helper::announced_memory`].
    pub(crate) fn module(&self, job: ModuleJob, before_wait: impl FnOnce()) {
        send(&self.modules, job, before_wait);
    }

    /// Makes the memory helper tend idle memory: the arbiters' recalls, and reports. It counts as no job, because calls that use the
    /// memory beside it find it in order.
    pub(crate) fn tend_idle(&self) {
        // If the queue is full, the helper does so behind the next job.
        _ = self.memory.try_send(Box::new(MemoryJob::TendIdle));
    }

    /// Counts a memory job as finished.
    pub(crate) fn memory_done(&self) {
        self.memory_jobs.fetch_sub(1, Ordering::AcqRel);
    }

    /// True if the memory helper has no job, queued or announced, so that the memory statistics include all earlier calls of
    /// the guest.
    pub(crate) fn memory_is_idle(&self) -> bool {
        self.memory_jobs.load(Ordering::Acquire) == 0
    }
}

fn send<J>(queue: &SyncSender<Box<J>>, job: J, before_wait: impl FnOnce()) {
    let is_sent = match queue.try_send(Box::new(job)) {
        Ok(()) => true,
        Err(TrySendError::Full(job)) => {
            before_wait();
            queue.send(job).is_ok()
        }
        Err(TrySendError::Disconnected(_)) => false,
    };
    // A helper that is gone has panicked, and the process is about to end.
    if !is_sent {
        tracing::error!("a helper thread is gone");
    }
}

/// The worker's end of the socket to its device.
pub(crate) type Control = Channel<ToWorker, FromWorker>;

/// Sends a message to the device. If that fails the device is gone, and the control thread ends the process.
pub(crate) fn report(control: &Control, message: FromWorker) {
    if let Err(error) = control.send(&message, &[]) {
        tracing::warn!(%error, "cannot send to the device");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_learns_that_it_is_about_to_wait_for_room() {
        let (queue, inbox) = sync_channel(1);
        send(&queue, 1, || panic!("there is room"));
        send(&queue, 2, || assert_eq!(inbox.recv(), Ok(Box::new(1))));
        assert_eq!(inbox.recv(), Ok(Box::new(2)));
    }
}
