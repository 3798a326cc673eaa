//! The order in which workers are served: VMs one after the other, and the workers of each VM one after the other.
//!
//! A VM with many busy workers gets as many turns as a VM with one.

use crate::ids::{VmKey, WorkerId};
use rustix::event::epoll::EventFlags;
use std::collections::{HashMap, VecDeque};

/// Workers that wait to be served, and the events of their sockets.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// VMs with workers that wait, in order.
    vms: VecDeque<VmKey>,
    workers: HashMap<VmKey, VecDeque<WorkerId>>,
    flags: HashMap<WorkerId, EventFlags>,
}

impl Rounds {
    /// Adds a worker behind those of its VM that wait already.
    pub(crate) fn add(&mut self, vm: VmKey, worker: WorkerId, flags: EventFlags) {
        if let Some(known) = self.flags.get_mut(&worker) {
            *known |= flags;
            return;
        }
        self.flags.insert(worker, flags);
        let queue = self.workers.entry(vm).or_default();
        if queue.is_empty() {
            self.vms.push_back(vm);
        }
        queue.push_back(worker);
    }

    /// The next worker; its VM moves behind the others.
    pub(crate) fn next(&mut self) -> Option<(WorkerId, EventFlags)> {
        let vm = self.vms.pop_front()?;
        let queue = self.workers.get_mut(&vm)?;
        let worker = queue.pop_front()?;
        if queue.is_empty() {
            self.workers.remove(&vm);
        } else {
            self.vms.push_back(vm);
        }
        Some((worker, self.flags.remove(&worker)?))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.vms.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: F83
    #[test]
    fn rounds_serve_one_worker_of_each_vm_in_turn() {
        let vm = |vm| VmKey { vm, epoch: 1 };
        let mut rounds = Rounds::default();
        for worker in 0..512 {
            rounds.add(vm(1), WorkerId(worker), EventFlags::IN);
            // Added once, however often the kernel reports it.
            rounds.add(vm(1), WorkerId(worker), EventFlags::IN);
        }
        rounds.add(vm(2), WorkerId(1000), EventFlags::IN);
        rounds.add(vm(2), WorkerId(1000), EventFlags::OUT);
        rounds.add(vm(3), WorkerId(2000), EventFlags::IN);
        let mut served = Vec::new();
        for _ in 0..4 {
            let (worker, flags) = rounds.next().unwrap();
            // This worker has more requests.
            if worker.0 < 512 {
                rounds.add(vm(1), worker, flags);
            }
            served.push((worker.0, flags));
        }
        let both = EventFlags::IN | EventFlags::OUT;
        let expected = [(0, EventFlags::IN), (1000, both), (2000, EventFlags::IN), (1, EventFlags::IN)];
        assert_eq!(served, expected);
        // The workers of one VM also take turns.
        let rest: Vec<u64> = core::iter::from_fn(|| rounds.next()).map(|(worker, _)| worker.0).collect();
        assert_eq!(rest, (2..512).chain([0, 1]).collect::<Vec<u64>>());
        assert!(rounds.is_empty());
    }
}
