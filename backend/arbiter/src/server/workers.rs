//! Workers: their adoption, messages, descriptors and ends, the places that a VM has, and the effects of custody.

use super::{
    EventToken, Server,
    links::{CROWDED, Incoming, Message, SendWait, Sent, WorkerLink},
    random, unblock,
};
use crate::{
    custody::{Effect, Millis},
    ids::{VmKey, WorkerId},
    inventory::Inventory,
    page::{Page, PageError, Report},
    time::EndReason,
};
use rustix::{
    event::{
        PollFd, PollFlags, Timespec,
        epoll::{self, EventFlags},
        poll,
    },
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    io::Errno,
    process::{Resource, getrlimit},
};
use sluice_messages::{
    control,
    custody::{CustodyAnswer, CustodyRequest},
};
use sluice_runtime::endable::EndableProcess;
use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

/// Time for serving workers before the loop checks its other sources.
const ROUND: Duration = Duration::from_millis(1);
/// Requests of a worker, and messages to it, per turn.
const REQUESTS: usize = 16;
const SAID: usize = 64;
/// Pending effects at which a worker's turn ends; one request may exceed this.
const EFFECTS: usize = 64;
/// Descriptors per worker: socket, process, cgroup and eventfd; and those of the arbiter and its driver.
const WORKER_DESCRIPTORS: usize = 4;
const OWN_DESCRIPTORS: usize = 96;
/// Milliseconds until a send is retried that failed for lack of kernel resources.
const RETRY: Millis = 2;

impl Server {
    /// Serves workers in turn, for a limited time.
    pub(super) fn serve_workers(&mut self) {
        let now = self.now();
        if self.held_at < now {
            self.held_at = now;
            for id in core::mem::take(&mut self.held) {
                if let Some(link) = self.links.get(&id) {
                    self.rounds.add(link.vm, id, EventFlags::IN);
                }
            }
        }
        let began = Instant::now();
        while let Some((id, flags)) = self.rounds.next() {
            if flags.contains(EventFlags::OUT) {
                if let Some(link) = self.links.get_mut(&id) {
                    link.send_wait = SendWait::Nothing;
                }
                self.send_to_worker(id);
            }
            self.receive_from_worker(id, flags.intersects(EventFlags::HUP | EventFlags::ERR));
            if began.elapsed() >= ROUND {
                break;
            }
        }
    }

    /// Carries out the effects of custody.
    pub(super) fn follow(&mut self) {
        for vm in self.custody.touched() {
            let (limit, used, open) = self.custody.figures(vm);
            for link in self.links.values().filter(|link| link.vm == vm) {
                link.page.write(limit, used, open);
            }
        }
        let mut spoken: HashSet<WorkerId> = HashSet::new();
        while let Some(effect) = self.custody.effect() {
            let (worker, message) = match effect {
                Effect::Lend { worker, serial, lease, chunk, bytes, more } => {
                    (worker, Message::Lend { serial, lease, chunk, bytes, more })
                }
                Effect::Answer { worker, answer } => (worker, Message::Plain(answer)),
                Effect::Kill { worker } => {
                    if let Some(link) = self.links.get(&worker) {
                        link.kill();
                    }
                    self.shut(worker);
                    continue;
                }
                Effect::Tell(message) => {
                    self.send_to_daemon(message);
                    continue;
                }
            };
            if let Some(link) = self.links.get_mut(&worker) {
                link.push(message);
                spoken.insert(worker);
            }
        }
        for id in spoken {
            self.send_to_worker(id);
        }
    }

    /// Serves a worker. It enters custody last, so after an error no state of it remains.
    pub(super) fn adopt(
        &mut self,
        vm: VmKey,
        (process, user): (u32, u32),
        socket: OwnedFd,
        ended_by: EndableProcess,
    ) -> Result<(), PageError> {
        if !self.custody.admits(vm) {
            tracing::warn!(vm = vm.vm, epoch = vm.epoch, "a worker of an old epoch is refused");
            self.discard(vm, socket);
            return Ok(());
        }
        if self.closers.is_full(vm.vm) || !self.has_place(vm) {
            self.discard(vm, socket);
            self.refused(vm);
            return Ok(());
        }
        let id = WorkerId(self.next_worker);
        self.next_worker += 1;
        let pages = unblock(socket.as_fd()).map_err(PageError::from).and_then(|()| {
            let (page, descriptor) = Page::new(vm.epoch)?;
            let (report, theirs) = Report::new()?;
            Ok((page, report, [descriptor, theirs]))
        });
        let (page, report, [descriptor, theirs]) = match pages {
            Ok(pages) => pages,
            Err(error) => {
                self.discard(vm, socket);
                return Err(error);
            }
        };
        let mut link = WorkerLink::new(vm, socket, ended_by, Arc::new(page), Arc::new(report));
        let wake_fd = match self.enlist(id, &link) {
            Ok(wake_fd) => wake_fd,
            Err(error) => {
                if let Some(socket) = link.close() {
                    self.unwatch(socket.as_fd());
                    self.discard(vm, socket);
                }
                return Err(error);
            }
        };
        // Checked above, with no change since.
        let entered = self.custody.add_worker(id, vm, process, user);
        debug_assert!(entered, "the VM is open");
        let (limit, used, open) = self.custody.figures(vm);
        link.page.write(limit, used, open);
        let welcome = CustodyAnswer::Welcome {
            unit: self.custody.unit(),
            epoch: vm.epoch,
            limit,
            version: control::VERSION,
        };
        let sent = [descriptor.as_fd(), theirs.as_fd(), wake_fd.as_fd()];
        // A new socket has room for one message.
        if link.send(&welcome, &sent) != Sent::Yes {
            tracing::warn!(vm = vm.vm, process, "cannot send the welcome to a worker");
        }
        self.links.insert(id, link);
        self.usage.join(id, vm, self.now());
        Ok(())
    }

    /// Watches a worker's socket and process, and starts to count its time. Returns its eventfd.
    fn enlist(&mut self, id: WorkerId, link: &WorkerLink) -> Result<OwnedFd, PageError> {
        if let Some(socket) = link.socket() {
            epoll::add(&self.epoll, socket, EventToken::Worker(id).encode(), EventFlags::IN)?;
        }
        epoll::add(&self.epoll, link.pidfd(), EventToken::Process(id).encode(), EventFlags::IN)?;
        self.time.join(id, link.vm, Arc::clone(&link.page), Arc::clone(&link.report)).inspect_err(|_| {
            self.unwatch(link.pidfd());
        })
    }

    /// Removes a descriptor from the epoll set.
    fn unwatch(&self, descriptor: BorrowedFd<'_>) {
        match epoll::delete(&self.epoll, descriptor) {
            // It was never in the set, or was removed before.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => tracing::error!(%error, "cannot remove a descriptor from the epoll set"),
        }
    }

    /// Closes a worker's socket.
    pub(super) fn shut(&mut self, id: WorkerId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let vm = link.vm;
        if let Some(socket) = link.close() {
            self.unwatch(socket.as_fd());
            self.discard(vm, socket);
        }
    }

    /// Has a worker's socket closed on the thread of its VM.
    fn discard(&self, vm: VmKey, socket: OwnedFd) {
        self.closers.of(vm.vm).close(vec![socket]);
    }

    /// True if there are descriptors for another worker of a VM. Half of them are reserved for the unit's VMs in equal
    /// parts, so that no number of other VMs' workers keeps a VM from its first ones.
    fn has_place(&self, vm: VmKey) -> bool {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let places = limit.saturating_sub(OWN_DESCRIPTORS.min(limit / 2)) / WORKER_DESCRIPTORS;
        let mut workers: BTreeMap<VmKey, usize> = self.custody.vms().map(|vm| (vm, 0)).collect();
        let part = places / 2 / workers.len().max(1);
        for link in self.links.values() {
            *workers.entry(link.vm).or_default() += 1;
        }
        let free = places.saturating_sub(self.links.len());
        let own = workers.remove(&vm).unwrap_or(0);
        let aside: usize = workers.values().map(|count| part.saturating_sub(*count)).sum();
        free > if own < part { 0 } else { aside }
    }

    /// Counts a worker that was refused for lack of descriptors, and logs it at most once a second.
    fn refused(&mut self, vm: VmKey) {
        self.refusals += 1;
        let now = self.now();
        if self.refusal_told.is_none_or(|told| now.saturating_sub(told) >= 1000) {
            self.refusal_told = Some(now);
            tracing::warn!(
                vm = vm.vm,
                in_all = self.refusals,
                "a worker is refused: there are no descriptors for it"
            );
        }
    }

    pub(super) fn receive_from_worker(&mut self, id: WorkerId, hung_up: bool) {
        let Some(vm) = self.links.get(&id).map(|link| link.vm.vm) else { return };
        let mut strange = Vec::new();
        for _ in 0..REQUESTS {
            let now = self.now();
            let Some(link) = self.links.get_mut(&id) else { break };
            let listens = hung_up || (link.is_clear() && self.custody.listens(id));
            // One request may cause thousands of messages.
            if !listens || self.custody.effects() >= EFFECTS {
                break;
            }
            let (request, since) = match link.held.take() {
                Some(held) => held,
                // Each worker could leave some hundred more.
                None if self.closers.is_full(vm) => {
                    self.custody
                        .abuse(id, "belongs to a VM that has sent descriptors whose close takes long");
                    break;
                }
                None => match link.receive(&mut strange) {
                    Incoming::Request(request) => (request, now),
                    Incoming::Nothing => break,
                    Incoming::Left => {
                        self.custody.worker_left(id);
                        break;
                    }
                    Incoming::Abuse(how) => {
                        self.custody.abuse(id, how);
                        break;
                    }
                },
            };
            if let (CustodyRequest::Take { serial, .. }, Some(probe)) = (request, &mut self.booking_probe)
                && probe.worker() == id
            {
                let step = probe.takes(serial, self.inventory.as_ref().is_some_and(Inventory::is_looking));
                self.inventory.as_mut().into_iter().for_each(Inventory::request_look);
                self.follow_probe(id, step);
                continue;
            }
            if self.custody.exceeds(id, &request) && !self.notes_ends(id, since, now) {
                if let Some(link) = self.links.get_mut(&id) {
                    link.held = Some((request, since));
                    self.held.push(id);
                }
                break;
            }
            if matches!(request, CustodyRequest::Share { share: 0, .. }) {
                self.custody.set_next_share(random());
            }
            self.custody.request(id, request, now);
        }
        self.closers.of(vm).close(strange);
        self.follow();
        self.watch(id);
    }

    /// A request beyond the VM's limit may follow from the end of another worker, so ends are handled first, whatever the order
    /// of the kernel's events. Looks at most once per VM and millisecond. Returns `false` if there was no look since the request
    /// came; then the request waits for the next look.
    fn notes_ends(&mut self, id: WorkerId, since: Millis, now: Millis) -> bool {
        let Some(vm) = self.links.get(&id).map(|link| link.vm) else { return true };
        match self.looked.get(&vm) {
            Some(last) if *last > since => return true,
            Some(last) if *last == now => return false,
            _ => {}
        }
        self.looked.retain(|_, last| *last == now);
        self.looked.insert(vm, now);
        self.note_ends(vm);
        true
    }

    fn note_ends(&mut self, vm: VmKey) {
        let (mut workers, mut polled) = (Vec::new(), Vec::new());
        for (id, link) in self.links.iter().filter(|(_, link)| link.vm == vm) {
            workers.push((*id, false));
            polled.push(PollFd::from_borrowed_fd(link.pidfd(), PollFlags::IN));
            if let Some(socket) = link.socket() {
                workers.push((*id, true));
                polled.push(PollFd::from_borrowed_fd(socket, PollFlags::empty()));
            }
        }
        match poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(_) => {}
            Err(error) => return tracing::error!(%error, "cannot poll for ended workers"),
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        for ((id, _), _) in workers.iter().zip(&ready).filter(|((_, socket), ready)| **ready && *socket) {
            self.custody.worker_left(*id);
        }
        for ((id, _), _) in workers.iter().zip(&ready).filter(|((_, socket), ready)| **ready && !*socket) {
            self.reap(*id);
        }
    }

    /// Watches a worker's socket for requests while it may send some, and for room while messages wait.
    fn watch(&mut self, id: WorkerId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let mut wanted = EventFlags::empty();
        wanted.set(EventFlags::IN, link.is_clear() && link.held.is_none() && self.custody.listens(id));
        wanted.set(EventFlags::OUT, !link.is_clear() && link.send_wait != SendWait::Time);
        if wanted == link.interest {
            return;
        }
        if let Some(socket) = link.socket() {
            match epoll::modify(&self.epoll, socket, EventToken::Worker(id).encode(), wanted) {
                Ok(()) => link.interest = wanted,
                Err(error) => tracing::error!(%error, "cannot watch a worker's socket"),
            }
        }
    }

    /// A worker's process has ended: reads its last report and closes all that belongs to it.
    pub(super) fn reap(&mut self, id: WorkerId) {
        let now = self.now();
        self.shut(id);
        if let Some(link) = self.links.remove(&id) {
            // Other processes have the same file open, so closing it would leave it in the epoll set.
            self.unwatch(link.pidfd());
            self.usage.see(id, link.report.work(), now);
        }
        self.usage.leave(id);
        self.time.leave(id);
        self.custody.worker_died(id, now);
        if self.booking_probe.as_ref().is_some_and(|probe| probe.worker() == id) {
            self.end_booking_probe("the probe has ended");
        }
    }

    /// Kills workers whose work does not complete, and those that submit without a permit.
    pub(super) fn end_wrong(&mut self) {
        for (id, why) in self.time.wrong() {
            match why {
                EndReason::Hung => self.custody.hung(id),
                EndReason::Trespass => self.custody.abuse(id, "submits work without a permit"),
            }
        }
        self.follow();
    }

    /// Gives links that wait for the kernel's resources another turn.
    pub(super) fn retry_sends(&mut self) {
        for id in core::mem::take(&mut self.retrying) {
            if let Some(link) = self.links.get(&id) {
                self.rounds.add(link.vm, id, EventFlags::OUT);
            }
        }
    }

    /// Ends workers that have not read their answers for too long.
    pub(super) fn end_stalled(&mut self, now: Millis) {
        let stalled: Vec<WorkerId> =
            self.links.iter().filter(|(_, link)| link.stalls(now)).map(|(id, _)| *id).collect();
        for id in stalled {
            // It may have read while this process did not run.
            if let Some(link) = self.links.get_mut(&id) {
                link.send_wait = SendWait::Nothing;
            }
            self.send_to_worker(id);
            if self.links.get(&id).is_some_and(|link| link.stalls(now)) {
                self.custody.abuse(id, "does not read its answers");
            }
        }
    }

    /// Sends a worker its pending messages, within its socket's room and its turn.
    pub(super) fn send_to_worker(&mut self, id: WorkerId) {
        let now = self.now();
        for _ in 0..SAID {
            let Some(link) = self.links.get_mut(&id) else { break };
            // To export a chunk for a full socket would be in vain.
            if link.send_wait != SendWait::Nothing {
                break;
            }
            let Some(message) = link.front() else { break };
            let sent = match message {
                Message::Plain(answer) => link.send(&answer, &[]),
                Message::Lend { serial, lease, chunk, bytes, more } => {
                    let piece = self.pieces.get(chunk.0 as usize).and_then(Option::as_ref);
                    match piece.filter(|_| self.custody.holds(id, lease, chunk)) {
                        // The lease ended before it was sent.
                        None => Sent::Yes,
                        Some(piece) => match self.driver.chunk_export(piece.handle()) {
                            Ok(descriptor) => {
                                let lent = CustodyAnswer::Lent { serial, lease, bytes, more };
                                link.send(&lent, &[descriptor.as_fd()])
                            }
                            Err(code) => {
                                tracing::error!(code, "cannot export a chunk");
                                link.pop();
                                self.custody.not_sent(id, serial, lease);
                                continue;
                            }
                        },
                    }
                }
            };
            match sent {
                Sent::Yes => link.pop(),
                Sent::Full => {
                    link.wait_for_room(now);
                    break;
                }
                Sent::Exhausted => {
                    link.send_wait = SendWait::Time;
                    self.retrying.push(id);
                    self.retry = Some(self.retry.map_or(now + RETRY, |retry| retry.min(now + RETRY)));
                    break;
                }
                Sent::Crowded => {
                    self.custody.abuse(id, CROWDED);
                    break;
                }
                Sent::Gone => {
                    self.shut(id);
                    self.custody.worker_left(id);
                    break;
                }
            }
        }
        self.watch(id);
    }
}
