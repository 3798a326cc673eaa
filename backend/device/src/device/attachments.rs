//! Memory that workers map: it stays with the guest's resource until the worker has released it.

use super::{Body, Device};
use crate::{
    resources::User,
    sessions::{Arenas, CONTROL, SessionPhase, SessionState, UNAVAILABLE, WorkerOrder},
};
use rustix::io::Errno;
use sluice_protocol::{
    gpu::answer,
    session::{self, Attachment},
};
use sluice_runtime::limited;
use std::time::{Duration, Instant};

/// Time limit of a worker for unmapping a resource; then it is killed.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);

impl Device {
    /// Requests a worker to unmap a resource.
    pub(super) fn detach(&mut self, user: User) {
        let Some(session) = self.sessions.get_mut(&user.session) else { return };
        // A worker with a fixed arena has all of its memory for its whole life, so the guest has the pages back when the worker
        // is gone, whatever the worker reports.
        if user.slot == CONTROL || session.arenas == Arenas::Complete {
            return self.abandon(user.session, None);
        }
        let deadline = Instant::now().checked_add(DETACH_TIMEOUT).unwrap_or_else(Instant::now);
        if session.detach(user.slot, deadline) {
            let resource = session.release(user.slot);
            if let (Some(memory), Some(pages)) = (&self.memory, session.pages) {
                session::set_attachment(&pages.words(memory), user.slot, Attachment::Detached);
            }
            self.released(resource);
        } else {
            self.poller.at_most(deadline);
            self.flush(user.session);
        }
    }

    /// No worker has these resources any more: answers the commands that waited for that.
    pub(super) fn released(&mut self, resources: impl IntoIterator<Item = u32>) {
        for resource in resources {
            for command in self.resources.released(resource, &mut self.table) {
                self.answer(command.place, &command.header, answer::OK_NODATA, &Body::None);
            }
        }
    }

    /// Sends a session's orders, as many as its worker's socket takes.
    pub(super) fn flush(&mut self, number: u32) {
        let result = self.send_orders(number);
        let Some(SessionState { phase: SessionPhase::Running(worker), .. }) = self.sessions.get_mut(&number)
        else {
            return;
        };
        match result {
            Ok(()) => worker.watch_room(number, false, &self.poller),
            Err(Errno::AGAIN) => worker.watch_room(number, true, &self.poller),
            Err(error) => {
                // A guest can cause this with pages in too many files.
                limited!(warn, session = number, %error, "cannot send a worker its mappings");
                self.lose(number, UNAVAILABLE);
            }
        }
    }

    fn send_orders(&mut self, number: u32) -> Result<(), Errno> {
        let Some(session) = self.sessions.get_mut(&number) else { return Ok(()) };
        let SessionPhase::Running(worker) = &session.phase else { return Ok(()) };
        if !session.may_receive() {
            return Ok(());
        }
        while let Some(order) = session.orders.front_mut() {
            match order {
                WorkerOrder::Detach { slot } => worker.detach(*slot)?,
                WorkerOrder::Attach { slot, sent } => {
                    let Some(attachment) = session.attachments.get(slot) else {
                        session.orders.pop_front();
                        continue;
                    };
                    let resource = self.resources.get(attachment.resource).map_err(|_| Errno::NOENT)?;
                    let pieces = self.table.pieces(resource.runs()).map_err(|_| Errno::NODEV)?;
                    for (index, piece) in pieces.iter().enumerate().skip(*sent) {
                        let more = index.saturating_add(1) < pieces.len();
                        worker.attach(*slot, attachment.address, attachment.bytes, piece, more)?;
                        *sent = index.saturating_add(1);
                    }
                }
            }
            session.orders.pop_front();
        }
        Ok(())
    }
}
