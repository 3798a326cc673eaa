//! Doorbells of sessions: they open sessions, attach memory, and wait for the host.

use super::{Body, CommandOutcome, DONE, Device, Refused};
use crate::{
    chain::AnswerPlace,
    page::{self, ControlPages},
    resources::{Resource, User},
    sessions::{Arenas, CONTROL, INVALID, MISMATCH, SessionOwner, SessionPhase, SessionState, UNAVAILABLE},
    users::{ConnectionAccount, ResourceKind},
    waiters::Waiter,
};
use core::sync::atomic::Ordering;
use sluice_messages::control;
use sluice_protocol::{
    doorbell::Doorbell,
    gpu::{self, CommandHeader, Purpose, answer},
    limits,
    session::{self, Attachment},
    shared::Shared,
};
use std::time::{Duration, Instant};

/// Time limit of `sluiced` for giving a session its worker.
const WORKER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of a worker for exiting after its guest said goodbye.
const CLOSE_GRACE: Duration = Duration::from_millis(500);

impl Device {
    pub(super) fn doorbell(
        &mut self,
        header: &CommandHeader,
        owner: SessionOwner,
        doorbell: Doorbell,
        place: AnswerPlace,
    ) -> Result<CommandOutcome, Refused> {
        let number = self.session_of(owner);
        let session = number.ok_or(Refused::NoSession(owner));
        match doorbell {
            Doorbell::Open { resource } => {
                if number.is_some() {
                    return Err(Refused::Open(owner));
                }
                self.open(owner, resource)?;
            }
            Doorbell::Attach { resource, slot, address } => {
                self.attach(session?, owner, resource, slot, address)?;
            }
            Doorbell::Detach { slot } => {
                let session = session?;
                if slot != CONTROL {
                    self.detach(User { session, slot });
                }
            }
            Doorbell::Ring => {
                let number = session?;
                if let Some(SessionState { phase: SessionPhase::Running(worker), .. }) =
                    self.sessions.get(&number)
                {
                    worker.ring(number);
                }
            }
            Doorbell::Wait => return Ok(self.wait(number, header, place)),
            Doorbell::Close => self.abandon(session?, Some(CLOSE_GRACE)),
        }
        Ok(DONE)
    }

    /// The resource with which an owner opens a session.
    fn openable(&self, owner: SessionOwner, resource: u32) -> Result<&Resource, Refused> {
        let found = self.resources.get(resource).ok();
        let own = |found: &&Resource| match owner {
            SessionOwner::Context(context) => found.belongs_to(context),
            SessionOwner::Control(control) => control == resource && found.adopted.is_none(),
        };
        found.filter(own).ok_or(Refused::Foreign { owner, resource })
    }

    fn open(&mut self, owner: SessionOwner, resource: u32) -> Result<(), Refused> {
        let found = self.openable(owner, resource)?;
        if found.user.is_some() || found.is_leaving() {
            return Err(Refused::Busy(resource));
        }
        let bytes = found.bytes();
        let pages = ControlPages::new(found.runs()).ok_or(Refused::Control(resource))?;
        let memory = self.memory.as_ref().ok_or(Refused::Control(resource))?;
        let words = pages.words(memory);
        match session::version(words.load_u64(session::MAGIC_AT, Ordering::Acquire)) {
            Some(session::VERSION) if bytes >= session::BYTES as u64 => {}
            Some(session::VERSION) | None => return Err(Refused::Control(resource)),
            // Its layout may have another length.
            Some(theirs) => {
                session::set_lost(&words, MISMATCH);
                return Err(Refused::Layout(theirs));
            }
        }
        let nonce = match owner {
            SessionOwner::Context(_) => None,
            SessionOwner::Control(_) => {
                let nonce = page::nonce(found.runs(), memory);
                page::clear_nonce(found.runs(), memory);
                let unknown = nonce.filter(|nonce| !self.controls.is_known(*nonce));
                if unknown.is_none() {
                    session::set_lost(&words, INVALID);
                    return Err(Refused::Nonce(resource));
                }
                unknown
            }
        };
        let Some(number) = self.link.open(self.account.as_ref().map(ConnectionAccount::share)) else {
            session::set_lost(&words, UNAVAILABLE);
            return Err(Refused::Unavailable);
        };
        let until = Instant::now().checked_add(WORKER_TIMEOUT).unwrap_or_else(Instant::now);
        let mut session = SessionState::new(owner, pages, until, Arenas::new(self.fixed_arena));
        if let Err(refusal) = session.attach(CONTROL, resource, 0, bytes) {
            self.link.close(number);
            return Err(Refused::Attachment(refusal.0));
        }
        if let Ok(found) = self.resources.get_mut(resource) {
            found.user = Some(User { session: number, slot: CONTROL });
            found.adopted = nonce.map(|_| number);
        }
        self.sessions.insert(number, session);
        match (owner, nonce) {
            (SessionOwner::Context(context), _) => self.contexts.set_session(context, Some(number)),
            (SessionOwner::Control(_), Some(nonce)) => {
                let entered = self.controls.insert(resource, number, nonce);
                debug_assert!(entered, "neither resource nor nonce had a session");
            }
            (SessionOwner::Control(_), None) => {}
        }
        self.counters.sessions = self.counters.sessions.wrapping_add(1);
        self.poller.at_most(until);
        let user = self.account.as_ref().map_or(control::NO_USER, |account| account.share().user());
        self.link.wanted(number, user, &self.inbox);
        if let (Some(bytes), Some(memory)) = (self.fixed_arena, &self.memory) {
            pages.words(memory).store_u64(session::FIXED_ARENA, bytes, Ordering::Release);
            self.wake(number);
        }
        Ok(())
    }

    /// Checks that a session may use a resource. Without contexts, a resource with the session's nonce becomes the session's here.
    fn may_use(&mut self, number: u32, owner: SessionOwner, resource: u32) -> Result<(), Refused> {
        let foreign = Refused::Foreign { owner, resource };
        let Ok(found) = self.resources.get_mut(resource) else { return Err(foreign) };
        let own = match owner {
            SessionOwner::Context(context) => found.belongs_to(context),
            SessionOwner::Control(control) => match (found.adopted, &self.memory) {
                (Some(session), _) => session == number,
                (None, Some(memory)) if found.purpose == Purpose::Memory => {
                    let nonce = page::nonce(found.runs(), memory);
                    let carries = nonce.is_some() && nonce == self.controls.nonce(control);
                    if carries {
                        page::clear_nonce(found.runs(), memory);
                        found.adopted = Some(number);
                    }
                    carries
                }
                (None, _) => false,
            },
        };
        if own { Ok(()) } else { Err(foreign) }
    }

    pub(super) fn attach(
        &mut self,
        number: u32,
        owner: SessionOwner,
        resource: u32,
        slot: u32,
        address: u64,
    ) -> Result<(), Refused> {
        // The worker reports that an entry is free before the guest sees it, but perhaps on a socket that is read later.
        let may_be_free =
            |session: &SessionState| session.is_any_leaving() || session.attachments.contains_key(&slot);
        if self.sessions.get(&number).is_some_and(may_be_free) {
            self.receive_from_worker(number);
        }
        let usable =
            |found: &&Resource| found.user.is_none() && !found.is_leaving() && !found.runs().is_empty();
        let refused = self.may_use(number, owner, resource).err();
        let found = self.resources.get(resource).ok().filter(|_| refused.is_none());
        let bytes = found.filter(usable).map(Resource::bytes);
        let session = self.sessions.get_mut(&number).ok_or(Refused::NoSession(owner))?;
        let entry_free = slot != CONTROL
            && slot < limits::ATTACHMENTS
            && !session.attachments.contains_key(&slot)
            && matches!(session.phase, SessionPhase::Waiting(_) | SessionPhase::Running(_));
        let attached = match bytes {
            _ if !entry_free => return Err(Refused::Attachment(INVALID)),
            Some(bytes) => session.attach(slot, resource, address, bytes).map_err(|refusal| refusal.0),
            None => Err(INVALID),
        };
        match attached {
            Ok(()) => {
                if let Ok(found) = self.resources.get_mut(resource) {
                    found.user = Some(User { session: number, slot });
                }
                self.begin_freed_search();
                self.flush(number);
                Ok(())
            }
            // The guest waits for this entry, and no worker will write it.
            Err(error) => {
                self.refuse_entry(number, slot, error);
                Err(refused.unwrap_or(if bytes.is_none() {
                    Refused::Busy(resource)
                } else {
                    Refused::Attachment(error)
                }))
            }
        }
    }

    fn refuse_entry(&mut self, number: u32, slot: u32, error: u32) {
        if let (Some(memory), Some(pages)) =
            (&self.memory, self.sessions.get(&number).and_then(|session| session.pages))
        {
            session::set_attachment(&pages.words(memory), slot, Attachment::Refused(error));
        }
        self.wake(number);
    }

    pub(super) fn wait(
        &mut self,
        number: Option<u32>,
        header: &CommandHeader,
        place: AnswerPlace,
    ) -> CommandOutcome {
        let full = self.room(&[ResourceKind::Withheld]).is_err();
        let session = number.and_then(|number| self.sessions.get_mut(&number));
        let (Some(number), Some(session)) = (number, session) else { return DONE };
        let live = matches!(session.phase, SessionPhase::Waiting(_) | SessionPhase::Running(_));
        if !live || header.flags & gpu::FLAG_FENCE == 0 || core::mem::take(&mut session.wake_pending) {
            return DONE;
        }
        if full {
            // Answered at once, as with too many waiters of a session: the guest reads its memory and asks again.
            self.counters.expired = self.counters.expired.wrapping_add(1);
            return DONE;
        }
        let now = Instant::now();
        if let Some(evicted) = self.waiters.push(number, *header, place, now, self.waiter_limit) {
            self.counters.expired = self.counters.expired.wrapping_add(1);
            self.answer_waiters(&[evicted]);
        }
        if let Some(deadline) = self.waiters.deadline() {
            self.poller.at_most(deadline);
        }
        CommandOutcome::Later
    }

    pub(super) fn answer_waiters(&mut self, waiters: &[Waiter]) {
        for waiter in waiters {
            self.answer(waiter.place, &waiter.header, answer::OK_NODATA, &Body::None);
        }
    }

    /// Ends the sleep of a session's guest, or the next one if it does not sleep.
    pub(super) fn wake(&mut self, number: u32) {
        let waiters = self.waiters.take(number);
        if waiters.is_empty()
            && let Some(session) = self.sessions.get_mut(&number)
        {
            session.wake_pending = true;
        }
        self.answer_waiters(&waiters);
    }
}
