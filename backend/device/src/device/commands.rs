//! Commands of the guest's driver: each is decoded, executed and answered.

use super::{Body, CommandAnswer, CommandOutcome, DONE, Device, Refused};
use crate::{
    chain::{AnswerPlace, Copied},
    resources::{ResourceError, Withheld, WithheldKind},
    sessions::{SessionOwner, UNAVAILABLE},
    users::ResourceKind,
};
use sluice_protocol::{
    doorbell::{Capset, Doorbell},
    gpu::{self, Command, CommandHeader, Purpose, answer},
};
use sluice_runtime::limited;
use std::time::{Duration, Instant};

/// Time limit for a starting driver's wait for the workers of the driver before; it gives up after five seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest number of withheld answers to starting drivers.
const PROBES: usize = 2;

impl Device {
    /// Handles one command. [`Device::take_answers`] returns its answer, now or later.
    pub fn command(&mut self, copied: Copied, bytes: &[u8], place: AnswerPlace) {
        self.counters.commands = self.counters.commands.wrapping_add(1);
        let no_header = CommandHeader { kind: 0, flags: 0, fence: 0, context: 0, ring: 0 };
        let header = gpu::header(bytes).unwrap_or(no_header);
        let result = match copied {
            Copied::Whole if bytes.len() >= gpu::HEADER_BYTES => gpu::decode(&header, bytes)
                .map_err(Refused::from)
                .and_then(|command| self.execute(&header, command, place)),
            _ => Err(Refused::Unreadable),
        };
        match result {
            Ok(CommandOutcome::Later) => {}
            Ok(CommandOutcome::Now(kind, body)) => self.answer(place, &header, kind, &body),
            Err(refused) => {
                limited!(info, kind = format_args!("{:#x}", header.kind), context = header.context, %refused,
                        "a command is refused");
                self.counters.refused = self.counters.refused.wrapping_add(1);
                self.answer(place, &header, refused.kind(), &Body::None);
            }
        }
        self.settle();
    }

    /// Ends the session of a command whose handler panicked, and answers it.
    pub fn panicked(&mut self, bytes: &[u8], place: AnswerPlace) {
        self.counters.panics = self.counters.panics.wrapping_add(1);
        if let Some(header) = gpu::header(bytes) {
            let owner = match gpu::decode(&header, bytes) {
                Ok(Command::Transfer { resource, .. }) if self.flat => SessionOwner::Control(resource),
                _ => SessionOwner::Context(header.context),
            };
            if let Some(session) = self.session_of(owner) {
                self.lose(session, UNAVAILABLE);
            }
            self.answer(place, &header, answer::ERR_UNSPEC, &Body::None);
        }
    }

    pub(super) fn answer(&mut self, place: AnswerPlace, header: &CommandHeader, kind: u32, body: &Body) {
        let answer = match body {
            Body::None => CommandAnswer::new(place, header, kind, &[]),
            Body::Display => CommandAnswer::new(place, header, kind, &[0; gpu::DISPLAY_INFO_BYTES]),
            Body::CapsetInfo => CommandAnswer::new(place, header, kind, &gpu::capset_info()),
            Body::Capset => {
                let capset = Capset { version: sluice_protocol::calls::VERSION };
                CommandAnswer::new(place, header, kind, &capset.encode())
            }
        };
        self.answers.push(answer);
        // The guest ends these waits in any case. A waiter that it no longer has would take the wake meant for the next one.
        let passed = self.waiters.passed(header);
        self.answer_waiters(&passed);
    }

    fn execute(
        &mut self,
        header: &CommandHeader,
        command: Command<'_>,
        place: AnswerPlace,
    ) -> Result<CommandOutcome, Refused> {
        let context = header.context;
        #[cfg(test)]
        assert_ne!(self.cursed, Some(context), "cursed");
        let withheld = |wanted| Withheld { wanted, header: *header, place };
        match command {
            Command::GetDisplayInfo => {
                return Ok(CommandOutcome::Now(answer::OK_DISPLAY_INFO, Body::Display));
            }
            Command::GetCapsetInfo { index } => {
                // A driver sends this when it starts, so all state belongs to the driver before.
                self.restart();
                if index != 0 {
                    return Err(Refused::Capset(index));
                }
                if self.is_dying() && self.probes.len() < PROBES {
                    let deadline = Instant::now().checked_add(PROBE_TIMEOUT).unwrap_or_else(Instant::now);
                    self.probes.push((*header, place, deadline));
                    self.poller.at_most(deadline);
                    return Ok(CommandOutcome::Later);
                }
                return Ok(CommandOutcome::Now(answer::OK_CAPSET_INFO, Body::CapsetInfo));
            }
            Command::GetCapset { id, version } => {
                if id != Capset::ID || version != 0 {
                    return Err(Refused::Capset(id));
                }
                return Ok(CommandOutcome::Now(answer::OK_CAPSET, Body::Capset));
            }
            Command::CtxCreate { capset } => {
                self.room(&[ResourceKind::Contexts])?;
                self.contexts.create(context, capset)?;
            }
            Command::CtxDestroy => {
                let destroyed = self.contexts.destroy(context).ok_or(Refused::NoContext(context))?;
                self.resources.forget_context(context);
                if let Some(session) = destroyed.session {
                    self.abandon(session, None);
                }
            }
            Command::CtxAttach { resource } => {
                self.contexts.get(context).ok_or(Refused::NoContext(context))?;
                self.resources.share(resource, context)?;
            }
            Command::CtxDetach { resource } => {
                self.contexts.get(context).ok_or(Refused::NoContext(context))?;
                if let Some(user) = self.resources.unshare(resource, context)? {
                    let own = self
                        .sessions
                        .get(&user.session)
                        .is_some_and(|session| session.owner == Some(SessionOwner::Context(context)));
                    if own {
                        self.detach(user);
                    }
                }
            }
            Command::Create { resource } => {
                self.room(&[ResourceKind::Resources])?;
                self.resources.create(resource)?;
            }
            Command::Create2d { resource, purpose } => {
                let room = self.room(&[ResourceKind::Resources]).map_err(|_| ResourceError::Many);
                match (room.and_then(|()| self.resources.create(resource)), purpose) {
                    // A token needs no resource, only a late answer: an answer at once would be no sleep.
                    (Err(ResourceError::Many), Purpose::Token { .. }) if self.flat => {}
                    (created, _) => created?,
                }
                match purpose {
                    Purpose::Memory if self.flat => self.resources.get_mut(resource)?.purpose = purpose,
                    Purpose::Token { key } if self.flat => {
                        let number = self.controls.by_key(key);
                        return Ok(self.wait(number, header, place));
                    }
                    _ => {}
                }
            }
            Command::CreateBlob { resource, entries } => {
                self.room(&[ResourceKind::Resources, ResourceKind::Runs, ResourceKind::Pages])?;
                self.resources.create_blob(resource, &mut self.table, entries.iter())?;
            }
            Command::AttachBacking { resource, entries } => {
                self.room(&[ResourceKind::Runs, ResourceKind::Pages])?;
                self.resources.attach_backing(resource, &mut self.table, entries.iter())?;
            }
            Command::DetachBacking { resource } => {
                return self.withhold(resource, withheld(WithheldKind::DetachBacking));
            }
            Command::Unref { resource } => {
                if let Some(session) = self.controls.session(resource) {
                    self.abandon(session, None);
                }
                return self.withhold(resource, withheld(WithheldKind::Unref));
            }
            Command::Submit { payload } => {
                self.contexts.get(context).ok_or(Refused::NoContext(context))?;
                let doorbell = Doorbell::decode(payload)?;
                return self.doorbell(header, SessionOwner::Context(context), doorbell, place);
            }
            Command::Transfer { resource, numbers } if self.flat => {
                // A transfer of a picture is not a doorbell.
                if self.resources.get(resource)?.purpose == Purpose::Memory {
                    let doorbell = Doorbell::from_numbers(numbers)?;
                    return self.doorbell(header, SessionOwner::Control(resource), doorbell, place);
                }
            }
            Command::Transfer { .. } => {}
            Command::Ignored => {}
        }
        Ok(DONE)
    }

    /// Takes a resource's pages away, once its worker has unmapped them.
    fn withhold(&mut self, resource: u32, command: Withheld) -> Result<CommandOutcome, Refused> {
        let user = self.resources.leave(resource, &mut self.table, command)?;
        Ok(match user {
            None => DONE,
            Some(user) => {
                self.detach(user);
                CommandOutcome::Later
            }
        })
    }

    pub(super) fn session_of(&self, owner: SessionOwner) -> Option<u32> {
        match owner {
            SessionOwner::Context(id) => self.contexts.get(id).and_then(|context| context.session),
            SessionOwner::Control(id) => self.controls.session(id),
        }
    }
}
