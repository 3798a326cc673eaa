//! Messages with `sluiced`: its commands about VMs, workers and time, and the events and figures that it receives.

use super::{EventToken, MESSAGES, Server, unblock};
use crate::{custody::Millis, ids::VmKey, inventory::Inventory};
use rustix::{
    event::epoll::{self, EventFlags},
    fd::{AsFd as _, OwnedFd},
    io::Errno,
};
use sluice_messages::{
    channel::{ReceiveError, Received},
    control::{FromArbiter, ToArbiter},
    figures::Upkeep,
};
use sluice_runtime::endable::EndableProcess;

/// Messages to `sluiced` that may wait while it does not read; beyond this the oldest are dropped.
const BACKLOG: usize = 4096;

/// The descriptors of a worker: its custody socket and its process.
fn worker(descriptors: Vec<OwnedFd>) -> Option<(OwnedFd, EndableProcess)> {
    let mut descriptors = descriptors.into_iter();
    let socket = descriptors.next()?;
    Some((socket, EndableProcess::from_message(descriptors)?))
}

impl Server {
    pub(super) fn receive_from_daemon(&mut self) {
        for _ in 0..MESSAGES {
            let Some(control) = &self.control else { return };
            match control.receive() {
                Ok(Received::Message(message, descriptors)) => self.command(message, descriptors),
                Ok(Received::Empty) => return,
                Ok(Received::Closed) => return self.without_daemon(),
                Err(ReceiveError::Failed(error)) => {
                    tracing::error!(%error, "cannot receive from the control socket");
                    return self.without_daemon();
                }
                // Without room for its descriptors, the worker that the message concerns sees its socket close.
                Err(error) => tracing::error!(%error, "cannot use a message of sluiced"),
            }
        }
    }

    /// Continues without `sluiced`, with the last terms.
    fn without_daemon(&mut self) {
        tracing::info!("sluiced has closed the control socket");
        if let Some(control) = self.control.take() {
            // Closing it also removes it from the epoll set.
            drop(control);
        }
        self.outbox.clear();
    }

    pub(super) fn command(&mut self, message: ToArbiter, descriptors: Vec<OwnedFd>) {
        let now = self.now();
        match message {
            ToArbiter::DescribeUnit { .. } => {
                let upkeep = Upkeep { drift: self.audit.drift(), ..self.upkeep };
                self.send_to_daemon(FromArbiter::Upkeep { upkeep, figures: self.figures });
                self.custody.command(message, now);
            }
            ToArbiter::Worker { vm, epoch, process: number, session, user, grouped: _ } => {
                if let Some((socket, process)) = worker(descriptors)
                    && let Err(error) = self.adopt(VmKey { vm, epoch }, (number, user), socket, process)
                {
                    tracing::error!(vm, session, %error, "cannot serve a worker");
                }
            }
            ToArbiter::Probe {} => self.probe(),
            ToArbiter::Prober { process: number, grouped: _ } => {
                if let Some((socket, process)) = worker(descriptors) {
                    self.begin_booking_probe(number, socket, process);
                }
            }
            ToArbiter::Inventory {} => {
                let Some(socket) = descriptors.into_iter().next() else { return };
                let watched = unblock(socket.as_fd()).and_then(|()| {
                    epoll::add(&self.epoll, &socket, EventToken::Inventory.encode(), EventFlags::IN)
                });
                match watched {
                    Ok(()) => self.inventory = Some(Inventory::new(socket, self.listed)),
                    Err(error) => tracing::error!(%error, "cannot watch the inventory's socket"),
                }
            }
            ToArbiter::TimeShare { vm, epoch, share } => self.time.set(VmKey { vm, epoch }, share),
            other => {
                match other {
                    ToArbiter::Vm { vm, epoch, .. } => {
                        self.time.admit(VmKey { vm, epoch });
                        self.usage.forget_before(VmKey { vm, epoch });
                    }
                    ToArbiter::Fence { vm, epoch } => self.time.fence(VmKey { vm, epoch }),
                    ToArbiter::Forget { vm, epoch } => {
                        self.time.forget(VmKey { vm, epoch });
                        self.usage.forget_before(VmKey { vm, epoch: epoch.saturating_add(1) });
                    }
                    ToArbiter::DescribeVm { vm, .. } => {
                        if let Some(time) = self.time.describe(vm) {
                            self.send_to_daemon(time);
                        }
                        self.describe_work(vm, now);
                    }
                    _ => {}
                }
                self.custody.command(other, now);
            }
        }
    }

    /// Sends the totals of work that a VM's workers report.
    fn describe_work(&mut self, vm: u32, now: Millis) {
        for (id, link) in self.links.iter().filter(|(_, link)| link.vm.vm == vm) {
            self.usage.see(*id, link.report.work(), now);
        }
        let Some(key) = self.custody.current(vm) else { return };
        self.send_to_daemon(FromArbiter::Work { vm, epoch: key.epoch, work: self.usage.of(key) });
    }

    pub(super) fn send_to_daemon(&mut self, message: FromArbiter) {
        if self.control.is_none() {
            return;
        }
        if self.outbox.len() >= BACKLOG {
            self.outbox.pop_front();
        }
        self.outbox.push_back(message);
    }

    /// Sends `sluiced` as many messages as its socket has room for.
    pub(super) fn flush(&mut self) {
        let Some(control) = &self.control else { return };
        let waited = !self.outbox.is_empty();
        while let Some(message) = self.outbox.front() {
            match control.send(message, &[]) {
                Ok(()) => {
                    self.outbox.pop_front();
                }
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => break,
                // Reading reports this error, too.
                Err(_) => self.outbox.clear(),
            }
        }
        if waited {
            let mut flags = EventFlags::IN;
            flags.set(EventFlags::OUT, !self.outbox.is_empty());
            if let Err(error) = epoll::modify(&self.epoll, control, EventToken::Control.encode(), flags) {
                tracing::error!(%error, "cannot watch the control socket");
            }
        }
    }
}
