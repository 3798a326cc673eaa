//! The device model: it carries out commands with resources, contexts, sessions and waiters. One device per connection.
//!
//! The endpoint of a front-end and the bridge of a connection call it. It owns the resources, contexts, sessions and waiters of one
//! guest. It must never wait, and never touch a virtqueue.
//!
//! Everything happens on one thread, in short steps that never wait. Answers are collected, and the caller gives them to the
//! queue, so this module does not know whether the queue belongs to a VM, a process or a test.

mod attachments;
mod commands;
mod doorbells;
mod events;
mod freed;
mod lifecycle;

use crate::{
    chain::{ANSWER_BYTES, AnswerPlace},
    contexts::Contexts,
    controls::Controls,
    link::{Inbox, KeepAlive, Link},
    memory::{MemoryError, MemoryPolicy, MemorySnapshot, MemoryTable},
    poller::{PollEvent, Poller},
    resources::{ResourceError, Resources, User},
    sessions::{SessionOwner, SessionPhase, SessionState, UNAVAILABLE},
    users::{ConnectionAccount, ResourceKind, UserShare},
    waiters::Waiters,
    workers::ProgramSignals,
};
use freed::FreedSearch;
use rustix::io::Errno;
use sluice_protocol::{
    gpu::{self, CommandHeader, answer},
    limits, session,
};
use std::{collections::HashMap, sync::Arc, time::Instant};

/// An answer with its place.
#[derive(Debug)]
pub struct CommandAnswer {
    /// The place for the answer.
    pub place: AnswerPlace,
    bytes: [u8; ANSWER_BYTES],
    length: usize,
}

impl CommandAnswer {
    fn new(place: AnswerPlace, header: &CommandHeader, kind: u32, body: &[u8]) -> CommandAnswer {
        let mut bytes = [0; ANSWER_BYTES];
        let (head, rest) = bytes.split_at_mut(gpu::HEADER_BYTES);
        head.copy_from_slice(&header.answer(kind));
        let body = body.get(..rest.len()).unwrap_or(body);
        for (to, from) in rest.iter_mut().zip(body) {
            *to = *from;
        }
        CommandAnswer { place, bytes, length: gpu::HEADER_BYTES.saturating_add(body.len()) }
    }

    /// The answer's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or(&self.bytes)
    }
}

/// Counts of events on a device, for the log and for tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of commands taken from the queue.
    pub commands: u64,
    /// Number of commands answered with an error.
    pub refused: u64,
    /// Number of sessions opened.
    pub sessions: u64,
    /// Number of sessions whose worker was lost.
    pub lost: u64,
    /// Number of waiters answered because of a limit or a time-out.
    pub expired: u64,
    /// Number of handlers that panicked.
    pub panics: u64,
    /// Number of answers withheld for ever because a killed worker is not gone.
    pub leaked: u64,
}

/// The reason why a command is answered with an error.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Resource(#[from] ResourceError),
    #[error(transparent)]
    Context(#[from] crate::contexts::ContextError),
    #[error(transparent)]
    Command(#[from] gpu::GpuError),
    #[error("cannot decode a doorbell: {0}")]
    Doorbell(#[from] sluice_protocol::field::FieldError),
    #[error("there is no context {0}")]
    NoContext(u32),
    #[error("{0} has no session")]
    NoSession(SessionOwner),
    #[error("{owner} may not use resource {resource}")]
    Foreign { owner: SessionOwner, resource: u32 },
    #[error("{0} has a session already")]
    Open(SessionOwner),
    #[error("resource {0} is not a control resource")]
    Control(u32),
    #[error("the session is laid out by version {0}; this device supports version {ours}", ours = session::VERSION)]
    Layout(u16),
    #[error("control resource {0} has no nonce, or the nonce of another session")]
    Nonce(u32),
    #[error("the programs of this user have all {0:?} that one user may have: {limit}", limit = .0.limit())]
    User(ResourceKind),
    #[error("there are too many sessions, or sluiced is gone")]
    Unavailable,
    #[error("resource {0} is attached or has no memory")]
    Busy(u32),
    #[error("the attachment is refused with CUresult {0}")]
    Attachment(u32),
    #[error("there is no capset {0}")]
    Capset(u32),
    #[error("the command is too long, or lies outside guest memory")]
    Unreadable,
}

impl Refused {
    /// The type word of the answer.
    const fn kind(&self) -> u32 {
        match self {
            Refused::Resource(ResourceError::Many) => answer::ERR_OUT_OF_MEMORY,
            Refused::Resource(ResourceError::Id(_) | ResourceError::Unknown(_)) | Refused::Foreign { .. } => {
                answer::ERR_INVALID_RESOURCE_ID
            }
            Refused::NoContext(_) | Refused::Context(crate::contexts::ContextError::Id(_)) => {
                answer::ERR_INVALID_CONTEXT_ID
            }
            Refused::Context(crate::contexts::ContextError::Many)
            | Refused::Unavailable
            | Refused::User(_) => answer::ERR_OUT_OF_MEMORY,
            Refused::Unreadable => answer::ERR_UNSPEC,
            _ => answer::ERR_INVALID_PARAMETER,
        }
    }
}

/// The result of a command.
enum CommandOutcome {
    /// An answer of this type with this body.
    Now(u32, Body),
    /// An answer later; the command's place is kept.
    Later,
}

enum Body {
    None,
    Display,
    CapsetInfo,
    Capset,
}

const DONE: CommandOutcome = CommandOutcome::Now(answer::OK_NODATA, Body::None);

/// The state of one device.
#[derive(Debug)]
pub struct Device {
    policy: MemoryPolicy,
    link: Arc<Link>,
    inbox: Arc<Inbox>,
    /// The place where the device waits.
    pub poller: Poller,
    /// Bytes of the only arena of each session; `None` if arenas grow.
    fixed_arena: Option<u64>,
    memory: Option<MemorySnapshot>,
    table: MemoryTable,
    resources: Resources,
    contexts: Contexts,
    /// True if the driver has no contexts.
    flat: bool,
    controls: Controls,
    sessions: HashMap<u32, SessionState>,
    waiters: Waiters,
    /// Starting drivers that wait until the workers of the driver before are gone, each with its deadline.
    probes: Vec<(CommandHeader, AnswerPlace, Instant)>,
    /// Number of waiters for which the queue has slots.
    waiter_limit: usize,
    answers: Vec<CommandAnswer>,
    /// The connection's part of its user's share, if its guest is a program.
    account: Option<ConnectionAccount>,
    /// The signals of a guest that is a program, for its first session.
    program_signals: Option<ProgramSignals>,
    /// Kept until every worker is gone that may map the guest's memory.
    kept: Option<KeepAlive>,
    freed_search: FreedSearch,
    /// Counts of events.
    pub counters: Counters,
    /// A context whose commands panic, for a test.
    #[cfg(test)]
    pub(crate) cursed: Option<u32>,
}

impl Device {
    /// Creates a device without memory.
    ///
    /// # Errors
    /// The kernel's, for instance if there are no descriptors left.
    pub fn new(policy: MemoryPolicy, link: Arc<Link>) -> Result<Device, Errno> {
        let poller = Poller::new()?;
        let inbox = Arc::new(Inbox::new()?);
        poller.edge(inbox.event(), PollEvent::Inbox)?;
        Ok(Device {
            policy,
            link,
            inbox,
            poller,
            fixed_arena: None,
            memory: None,
            table: MemoryTable::default(),
            resources: Resources::default(),
            contexts: Contexts::default(),
            flat: false,
            controls: Controls::default(),
            sessions: HashMap::new(),
            waiters: Waiters::default(),
            probes: Vec::new(),
            waiter_limit: limits::WAITERS_PER_DEVICE,
            answers: Vec::new(),
            account: None,
            program_signals: None,
            kept: None,
            freed_search: FreedSearch::new(policy),
            counters: Counters::default(),
            #[cfg(test)]
            cursed: None,
        })
    }

    /// Sets a new memory table. Sessions and resources whose pages are unchanged in it are not affected.
    ///
    /// # Errors
    /// [`MemoryError`] if it could crash this process or cannot be lent; the device then has no memory at all.
    pub fn set_memory(&mut self, memory: MemorySnapshot) -> Result<(), MemoryError> {
        let table = MemoryTable::new(&memory, self.policy);
        let refused = table.as_ref().err().copied();
        let mut new = table.unwrap_or_default();
        let old = core::mem::take(&mut self.table);
        let moved = self.resources.move_to(&old, &mut new);
        self.table = new;
        for resource in moved {
            if let Ok(Some(User { session, .. })) = self.resources.get(resource).map(|resource| resource.user)
            {
                self.lose(session, UNAVAILABLE);
            }
        }
        match refused {
            Some(error) => {
                self.memory = None;
                Err(error)
            }
            None => {
                self.memory = Some(memory);
                Ok(())
            }
        }
    }

    /// Sets the features that the guest's driver accepted. A driver without 3D has no contexts, so its sessions are identified by
    /// nonces; the commands for that have no effect for other drivers.
    pub const fn set_driver_features(&mut self, features: u64) {
        self.flat = features & 1 << gpu::F_VIRGL == 0;
    }

    /// Gives each session that opens from now on one arena of this many bytes, and no other.
    pub const fn fix_arenas(&mut self, bytes: u64) {
        self.fixed_arena = Some(bytes);
    }

    /// The guest's memory, if it was accepted. This module reads and writes all guest memory through it.
    #[must_use]
    pub const fn memory(&self) -> Option<&MemorySnapshot> {
        self.memory.as_ref()
    }

    /// Keeps a value until the device and all workers that may map the guest's memory are gone.
    pub fn keep(&mut self, kept: KeepAlive) {
        self.kept = Some(kept);
    }

    /// Counts the device's use in a user's share.
    pub fn count_for(&mut self, user: Arc<UserShare>) {
        self.account = Some(ConnectionAccount::new(user));
    }

    /// True if the guest is a program.
    #[must_use]
    pub const fn serves_program(&self) -> bool {
        self.account.is_some()
    }

    /// Gives the first session that gets a worker from now on a program's own signals.
    pub fn set_program_signals(&mut self, signals: ProgramSignals) {
        self.program_signals = Some(signals);
    }

    /// Checks that the user may have more of each of these kinds.
    fn room(&self, kinds: &[ResourceKind]) -> Result<(), Refused> {
        let Some(account) = &self.account else { return Ok(()) };
        let full = kinds.iter().find(|kind| account.share().is_full(**kind));
        full.map_or(Ok(()), |kind| Err(Refused::User(*kind)))
    }

    /// Updates the counts, after any change of use.
    fn settle(&mut self) {
        let Some(account) = &mut self.account else { return };
        let counts = [
            (ResourceKind::Contexts, self.contexts.len()),
            (ResourceKind::Resources, self.resources.len()),
            (ResourceKind::Runs, self.table.runs()),
            (ResourceKind::Pages, usize::try_from(self.table.pages()).unwrap_or(usize::MAX)),
            (ResourceKind::Withheld, self.waiters.len()),
        ];
        for (kind, count) in counts {
            account.settle(kind, u64::try_from(count).unwrap_or(u64::MAX));
        }
    }

    /// Limits waiters to half of a queue.
    pub fn set_queue_size(&mut self, slots: u16) {
        self.waiter_limit = limits::WAITERS_PER_DEVICE.min(usize::from(slots / 2)).max(1);
    }

    /// Takes the answers that are due.
    pub fn take_answers(&mut self) -> Vec<CommandAnswer> {
        core::mem::take(&mut self.answers)
    }

    /// Takes an empty list back for reuse, so that answering does not allocate.
    pub fn recycle(&mut self, mut answers: Vec<CommandAnswer>) {
        answers.clear();
        if self.answers.is_empty() && answers.capacity() <= 64 {
            self.answers = answers;
        }
    }

    /// Number of sessions, including the ending ones.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// True if a context's session has a worker, or may get one.
    #[must_use]
    pub fn serves(&self, context: u32) -> bool {
        let session = self.contexts.get(context).and_then(|context| context.session);
        let phase = session.and_then(|number| self.sessions.get(&number)).map(|session| &session.phase);
        matches!(phase, Some(SessionPhase::Waiting(_) | SessionPhase::Running(_)))
    }

    /// Number of withheld answers.
    #[must_use]
    pub fn withheld(&self) -> usize {
        self.waiters.len().saturating_add(self.resources.withheld())
    }

    /// Number of resources.
    #[must_use]
    pub fn resource_count(&self) -> usize {
        self.resources.len()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.disconnect();
    }
}

#[cfg(test)]
mod tests;
