//! The device model: it carries out commands with resources, contexts, sessions and waiters. One device per connection.
//!
//! Everything happens on one thread, in short steps that never wait. Answers are collected, and the caller gives them to the
//! queue, so this module does not know whether the queue belongs to a VM, a process or a test.

use crate::{
    chain::{ANSWER_BYTES, Copied, Place},
    contexts::Contexts,
    controls::Controls,
    link::{Arrival, Inbox, Kept, Link},
    memory::{Memory, MemoryError, Policy, Table},
    page::{self, ControlPages},
    poller::{Event, Poller},
    resources::{Resource, ResourceError, Resources, User, Wanted, Withheld},
    sessions::{CONTROL, INVALID, MISMATCH, Order, Owner, Phase, Session, UNAVAILABLE},
    users::{Account, Kind, Share},
    waiters::{Waiter, Waiters},
    workers::{Heard, Worker},
};
use core::sync::atomic::Ordering;
use rustix::{fd::OwnedFd, io::Errno};
use sluice_messages::control::{self, FromWorker};
use sluice_protocol::{
    doorbell::{Capset, Doorbell},
    gpu::{self, Command, Header, Purpose, answer},
    limits,
    session::{self, Attachment},
    shared::Shared,
};
use sluice_runtime::limited;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long `sluiced` may take to give a session its worker.
const WORKER_PATIENCE: Duration = Duration::from_secs(30);
/// How long a worker may take to unmap a resource before it is killed.
const DETACH_PATIENCE: Duration = Duration::from_secs(5);
/// How long a worker may take to exit when its guest said goodbye.
const CLOSE_GRACE: Duration = Duration::from_millis(500);
/// How long a starting driver is kept waiting for the workers of the one before; it gives up after five seconds.
const PROBE_PATIENCE: Duration = Duration::from_secs(3);
/// Answers to starting drivers that are withheld.
const PROBES: usize = 2;
/// Messages of one worker that are handled in a row; the others come in the next round.
const MESSAGES_PER_ROUND: usize = 64;

/// An answer and where it goes.
#[derive(Debug)]
pub struct Answer {
    /// Where.
    pub place: Place,
    bytes: [u8; ANSWER_BYTES],
    length: usize,
}

impl Answer {
    fn new(place: Place, header: &Header, kind: u32, body: &[u8]) -> Answer {
        let mut bytes = [0; ANSWER_BYTES];
        let (head, rest) = bytes.split_at_mut(gpu::HEADER_BYTES);
        head.copy_from_slice(&header.answer(kind));
        let body = body.get(..rest.len()).unwrap_or(body);
        for (to, from) in rest.iter_mut().zip(body) {
            *to = *from;
        }
        Answer { place, bytes, length: gpu::HEADER_BYTES.saturating_add(body.len()) }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or(&self.bytes)
    }
}

/// What happened on a device, for the log and for tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Commands taken from the queue.
    pub commands: u64,
    /// Commands answered with an error.
    pub refused: u64,
    /// Sessions opened.
    pub sessions: u64,
    /// Sessions whose worker was lost.
    pub lost: u64,
    /// Waiters answered because of a bound or a time-out.
    pub expired: u64,
    /// Handlers that panicked.
    pub panics: u64,
    /// Answers that could not be given because a worker that was killed is not gone.
    pub leaked: u64,
}

/// Why a command is answered with an error.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Resource(#[from] ResourceError),
    #[error(transparent)]
    Context(#[from] crate::contexts::ContextError),
    #[error(transparent)]
    Command(#[from] gpu::GpuError),
    #[error("doorbell: {0}")]
    Doorbell(#[from] sluice_protocol::field::FieldError),
    #[error("no context {0}")]
    NoContext(u32),
    #[error("{0} has no session")]
    NoSession(Owner),
    #[error("{owner} may not use resource {resource}")]
    Foreign { owner: Owner, resource: u32 },
    #[error("{0} has a session")]
    Open(Owner),
    #[error("resource {0} is no control resource")]
    Control(u32),
    #[error("the session is laid out by version {0}, and this device knows version {ours}", ours = session::VERSION)]
    Layout(u16),
    #[error("control resource {0} has no nonce, or that of another session")]
    Nonce(u32),
    #[error("this user's programs have all {0:?} that one user may have: {limit}", limit = .0.limit())]
    User(Kind),
    #[error("too many sessions, or no sluiced")]
    Unavailable,
    #[error("resource {0} is attached or has no memory")]
    Busy(u32),
    #[error("attachment refused with CUresult {0}")]
    Attachment(u32),
    #[error("no capset {0}")]
    Capset(u32),
    #[error("longer than any command, or outside guest memory")]
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

/// What a command leads to.
enum Outcome {
    /// An answer of this type with this body.
    Now(u32, Body),
    /// An answer later; the command's place was kept.
    Later,
}

/// Bodies of answers.
enum Body {
    None,
    Display,
    CapsetInfo,
    Capset,
}

const DONE: Outcome = Outcome::Now(answer::OK_NODATA, Body::None);

/// One device.
#[derive(Debug)]
pub struct Device {
    policy: Policy,
    link: Arc<Link>,
    inbox: Arc<Inbox>,
    /// Where it waits.
    pub poller: Poller,
    memory: Option<Memory>,
    table: Table,
    resources: Resources,
    contexts: Contexts,
    /// Whether the driver has no contexts.
    flat: bool,
    controls: Controls,
    sessions: HashMap<u32, Session>,
    waiters: Waiters,
    /// Drivers that start, which wait until the workers of the one before are gone: until when at most.
    probes: Vec<(Header, Place, Instant)>,
    /// Waiters the queue has slots for.
    waiter_limit: usize,
    answers: Vec<Answer>,
    /// What it has of a user's share, where its guest is a program.
    account: Option<Account>,
    /// Not given back before every worker is gone that may map the guest's memory.
    kept: Option<Kept>,
    /// What happened.
    pub counters: Counters,
    /// A context whose commands panic, for the test of what then happens.
    #[cfg(test)]
    pub(crate) cursed: Option<u32>,
}

impl Device {
    /// A device without memory.
    ///
    /// # Errors
    /// The kernel's, out of descriptors for instance.
    pub fn new(policy: Policy, link: Arc<Link>) -> Result<Device, Errno> {
        let poller = Poller::new()?;
        let inbox = Arc::new(Inbox::new()?);
        poller.edge(inbox.event(), Event::Inbox)?;
        Ok(Device {
            policy,
            link,
            inbox,
            poller,
            memory: None,
            table: Table::default(),
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
            kept: None,
            counters: Counters::default(),
            #[cfg(test)]
            cursed: None,
        })
    }

    /// Takes a new memory table. Sessions and resources whose pages are in it as before are not touched.
    ///
    /// # Errors
    /// [`MemoryError`] when it could crash this process or cannot be lent; the device then has no memory at all.
    pub fn set_memory(&mut self, memory: Memory) -> Result<(), MemoryError> {
        let table = Table::new(&memory, self.policy);
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

    /// Learns what the guest's driver has of what was offered. One without 3D has no contexts, and sessions are known by
    /// their nonces instead; to any other driver the commands for that mean nothing.
    pub const fn set_driver_features(&mut self, features: u64) {
        self.flat = features & 1 << gpu::F_VIRGL == 0;
    }

    /// The guest's memory, if it was accepted: what everything here reads and writes, and nothing else does.
    #[must_use]
    pub const fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }

    /// Keeps something until the device and every worker is gone that may map the guest's memory.
    pub fn keep(&mut self, kept: Kept) {
        self.kept = Some(kept);
    }

    /// Counts what it has as a user's.
    pub fn count_for(&mut self, user: Arc<Share>) {
        self.account = Some(Account::new(user));
    }

    /// Whether the user may have more of all of these.
    fn room(&self, kinds: &[Kind]) -> Result<(), Refused> {
        let Some(account) = &self.account else { return Ok(()) };
        let full = kinds.iter().find(|kind| account.share().is_full(**kind));
        full.map_or(Ok(()), |kind| Err(Refused::User(*kind)))
    }

    /// Counts anew, after anything that may have changed what it has.
    fn settle(&mut self) {
        let Some(account) = &mut self.account else { return };
        let counts = [
            (Kind::Contexts, self.contexts.len()),
            (Kind::Resources, self.resources.len()),
            (Kind::Runs, self.table.runs()),
            (Kind::Pages, usize::try_from(self.table.pages()).unwrap_or(usize::MAX)),
            (Kind::Withheld, self.waiters.len()),
        ];
        for (kind, count) in counts {
            account.settle(kind, u64::try_from(count).unwrap_or(u64::MAX));
        }
    }

    /// Keeps half of a queue free of waiters.
    pub fn set_queue_size(&mut self, slots: u16) {
        self.waiter_limit = limits::WAITERS_PER_DEVICE.min(usize::from(slots / 2)).max(1);
    }

    /// Takes the answers that are due.
    pub fn take_answers(&mut self) -> Vec<Answer> {
        core::mem::take(&mut self.answers)
    }

    /// Gives an empty list back for use, so that answering does not allocate.
    pub fn recycle(&mut self, mut answers: Vec<Answer>) {
        answers.clear();
        if self.answers.is_empty() && answers.capacity() <= 64 {
            self.answers = answers;
        }
    }

    /// Sessions, the ending ones included.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Whether a context has a session that has a worker, or may get one.
    #[must_use]
    pub fn serves(&self, context: u32) -> bool {
        let session = self.contexts.get(context).and_then(|context| context.session);
        let phase = session.and_then(|number| self.sessions.get(&number)).map(|session| &session.phase);
        matches!(phase, Some(Phase::Waiting(_) | Phase::Running(_)))
    }

    /// Withheld answers.
    #[must_use]
    pub fn withheld(&self) -> usize {
        self.waiters.len().saturating_add(self.resources.withheld())
    }

    /// Resources.
    #[must_use]
    pub fn resource_count(&self) -> usize {
        self.resources.len()
    }

    // ---- commands ----

    /// Handles one command. Its answer is among [`Device::take_answers`], now or later.
    pub fn command(&mut self, copied: Copied, bytes: &[u8], place: Place) {
        self.counters.commands = self.counters.commands.wrapping_add(1);
        let no_header = Header { kind: 0, flags: 0, fence: 0, context: 0, ring: 0 };
        let header = gpu::header(bytes).unwrap_or(no_header);
        let result = match copied {
            Copied::Whole if bytes.len() >= gpu::HEADER_BYTES => gpu::decode(&header, bytes)
                .map_err(Refused::from)
                .and_then(|command| self.execute(&header, command, place)),
            _ => Err(Refused::Unreadable),
        };
        match result {
            Ok(Outcome::Later) => {}
            Ok(Outcome::Now(kind, body)) => self.answer(place, &header, kind, &body),
            Err(refused) => {
                limited!(info, kind = format_args!("{:#x}", header.kind), context = header.context, %refused,
                        "refused");
                self.counters.refused = self.counters.refused.wrapping_add(1);
                self.answer(place, &header, refused.kind(), &Body::None);
            }
        }
        self.settle();
    }

    /// Ends the session of a command whose handler panicked, and answers it.
    pub fn panicked(&mut self, bytes: &[u8], place: Place) {
        self.counters.panics = self.counters.panics.wrapping_add(1);
        if let Some(header) = gpu::header(bytes) {
            let owner = match gpu::decode(&header, bytes) {
                Ok(Command::Transfer { resource, .. }) if self.flat => Owner::Control(resource),
                _ => Owner::Context(header.context),
            };
            if let Some(session) = self.session_of(owner) {
                self.lose(session, UNAVAILABLE);
            }
            self.answer(place, &header, answer::ERR_UNSPEC, &Body::None);
        }
    }

    fn answer(&mut self, place: Place, header: &Header, kind: u32, body: &Body) {
        let answer = match body {
            Body::None => Answer::new(place, header, kind, &[]),
            Body::Display => Answer::new(place, header, kind, &[0; gpu::DISPLAY_INFO_BYTES]),
            Body::CapsetInfo => Answer::new(place, header, kind, &gpu::capset_info()),
            Body::Capset => {
                let capset = Capset { version: sluice_protocol::calls::VERSION };
                Answer::new(place, header, kind, &capset.encode())
            }
        };
        self.answers.push(answer);
        // The guest ends them now in any case. A waiter it no longer has would take the wake meant for the next one.
        let passed = self.waiters.passed(header);
        self.answer_waiters(&passed);
    }

    fn execute(&mut self, header: &Header, command: Command<'_>, place: Place) -> Result<Outcome, Refused> {
        let context = header.context;
        #[cfg(test)]
        assert_ne!(self.cursed, Some(context), "cursed");
        let withheld = |wanted| Withheld { wanted, header: *header, place };
        match command {
            Command::GetDisplayInfo => return Ok(Outcome::Now(answer::OK_DISPLAY_INFO, Body::Display)),
            Command::GetCapsetInfo { index } => {
                // A driver asks for this when it starts, so whatever was before belongs to another one.
                self.restart();
                if index != 0 {
                    return Err(Refused::Capset(index));
                }
                if self.is_dying() && self.probes.len() < PROBES {
                    let deadline = Instant::now().checked_add(PROBE_PATIENCE).unwrap_or_else(Instant::now);
                    self.probes.push((*header, place, deadline));
                    self.poller.at_most(deadline);
                    return Ok(Outcome::Later);
                }
                return Ok(Outcome::Now(answer::OK_CAPSET_INFO, Body::CapsetInfo));
            }
            Command::GetCapset { id, version } => {
                if id != Capset::ID || version != 0 {
                    return Err(Refused::Capset(id));
                }
                return Ok(Outcome::Now(answer::OK_CAPSET, Body::Capset));
            }
            Command::CtxCreate { capset } => {
                self.room(&[Kind::Contexts])?;
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
                        .is_some_and(|session| session.owner == Some(Owner::Context(context)));
                    if own {
                        self.detach(user);
                    }
                }
            }
            Command::Create { resource } => {
                self.room(&[Kind::Resources])?;
                self.resources.create(resource)?;
            }
            Command::Create2d { resource, purpose } => {
                let room = self.room(&[Kind::Resources]).map_err(|_| ResourceError::Many);
                match (room.and_then(|()| self.resources.create(resource)), purpose) {
                    // A token needs no place, only an answer that comes late: at once it would be no sleep.
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
                self.room(&[Kind::Resources, Kind::Runs, Kind::Pages])?;
                self.resources.create_blob(resource, &mut self.table, entries.iter())?;
            }
            Command::AttachBacking { resource, entries } => {
                self.room(&[Kind::Runs, Kind::Pages])?;
                self.resources.attach_backing(resource, &mut self.table, entries.iter())?;
            }
            Command::DetachBacking { resource } => {
                return self.leave(resource, withheld(Wanted::DetachBacking));
            }
            Command::Unref { resource } => {
                if let Some(session) = self.controls.session(resource) {
                    self.abandon(session, None);
                }
                return self.leave(resource, withheld(Wanted::Unref));
            }
            Command::Submit { payload } => {
                self.contexts.get(context).ok_or(Refused::NoContext(context))?;
                let doorbell = Doorbell::decode(payload)?;
                return self.doorbell(header, Owner::Context(context), doorbell, place);
            }
            Command::Transfer { resource, numbers } if self.flat => {
                // Of a picture it is nobody's doorbell.
                if self.resources.get(resource)?.purpose == Purpose::Memory {
                    let doorbell = Doorbell::from_numbers(numbers)?;
                    return self.doorbell(header, Owner::Control(resource), doorbell, place);
                }
            }
            Command::Transfer { .. } => {}
            Command::Ignored => {}
        }
        Ok(DONE)
    }

    /// Takes a resource's pages away, when its worker has let go of them.
    fn leave(&mut self, resource: u32, command: Withheld) -> Result<Outcome, Refused> {
        let user = self.resources.leave(resource, &mut self.table, command)?;
        Ok(match user {
            None => DONE,
            Some(user) => {
                self.detach(user);
                Outcome::Later
            }
        })
    }

    fn session_of(&self, owner: Owner) -> Option<u32> {
        match owner {
            Owner::Context(id) => self.contexts.get(id).and_then(|context| context.session),
            Owner::Control(id) => self.controls.session(id),
        }
    }

    fn doorbell(
        &mut self,
        header: &Header,
        owner: Owner,
        doorbell: Doorbell,
        place: Place,
    ) -> Result<Outcome, Refused> {
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
                if let Some(Session { phase: Phase::Running(worker), .. }) = self.sessions.get(&number) {
                    worker.ring(number);
                }
            }
            Doorbell::Wait => return Ok(self.wait(number, header, place)),
            Doorbell::Close => self.abandon(session?, Some(CLOSE_GRACE)),
        }
        Ok(DONE)
    }

    /// A resource that an owner wants to open a session with.
    fn openable(&self, owner: Owner, resource: u32) -> Result<&Resource, Refused> {
        let found = self.resources.get(resource).ok();
        let own = |found: &&Resource| match owner {
            Owner::Context(context) => found.belongs_to(context),
            Owner::Control(control) => control == resource && found.adopted.is_none(),
        };
        found.filter(own).ok_or(Refused::Foreign { owner, resource })
    }

    fn open(&mut self, owner: Owner, resource: u32) -> Result<(), Refused> {
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
            // Perhaps of another length.
            Some(theirs) => {
                session::set_lost(&words, MISMATCH);
                return Err(Refused::Layout(theirs));
            }
        }
        let nonce = match owner {
            Owner::Context(_) => None,
            Owner::Control(_) => {
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
        let Some(number) = self.link.open(self.account.as_ref().map(Account::share)) else {
            session::set_lost(&words, UNAVAILABLE);
            return Err(Refused::Unavailable);
        };
        let until = Instant::now().checked_add(WORKER_PATIENCE).unwrap_or_else(Instant::now);
        let mut session = Session::new(owner, pages, until);
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
            (Owner::Context(context), _) => self.contexts.set_session(context, Some(number)),
            (Owner::Control(_), Some(nonce)) => {
                let entered = self.controls.insert(resource, number, nonce);
                debug_assert!(entered, "neither resource nor nonce had a session");
            }
            (Owner::Control(_), None) => {}
        }
        self.counters.sessions = self.counters.sessions.wrapping_add(1);
        self.poller.at_most(until);
        let user = self.account.as_ref().map_or(control::NO_USER, |account| account.share().user());
        self.link.wanted(number, user, &self.inbox);
        Ok(())
    }

    /// Whether a session may use a resource. Without contexts, one that carries its nonce becomes its own by that.
    fn may_use(&mut self, number: u32, owner: Owner, resource: u32) -> Result<(), Refused> {
        let foreign = Refused::Foreign { owner, resource };
        let Ok(found) = self.resources.get_mut(resource) else { return Err(foreign) };
        let own = match owner {
            Owner::Context(context) => found.belongs_to(context),
            Owner::Control(control) => match (found.adopted, &self.memory) {
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

    fn attach(
        &mut self,
        number: u32,
        owner: Owner,
        resource: u32,
        slot: u32,
        address: u64,
    ) -> Result<(), Refused> {
        let usable =
            |found: &&Resource| found.user.is_none() && !found.is_leaving() && !found.runs().is_empty();
        let refused = self.may_use(number, owner, resource).err();
        let found = self.resources.get(resource).ok().filter(|_| refused.is_none());
        let bytes = found.filter(usable).map(Resource::bytes);
        let session = self.sessions.get_mut(&number).ok_or(Refused::NoSession(owner))?;
        let entry_free = slot != CONTROL
            && slot < limits::ATTACHMENTS
            && !session.attachments.contains_key(&slot)
            && matches!(session.phase, Phase::Waiting(_) | Phase::Running(_));
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
                self.flush(number);
                Ok(())
            }
            // The guest waits for this entry, and no worker will ever write it.
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

    fn wait(&mut self, number: Option<u32>, header: &Header, place: Place) -> Outcome {
        let full = self.room(&[Kind::Withheld]).is_err();
        let session = number.and_then(|number| self.sessions.get_mut(&number));
        let (Some(number), Some(session)) = (number, session) else { return DONE };
        let live = matches!(session.phase, Phase::Waiting(_) | Phase::Running(_));
        if !live || header.flags & gpu::FLAG_FENCE == 0 || core::mem::take(&mut session.wake_pending) {
            return DONE;
        }
        if full {
            // At once, as where a session has too many: the guest looks at its memory and asks again.
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
        Outcome::Later
    }

    fn answer_waiters(&mut self, waiters: &[Waiter]) {
        for waiter in waiters {
            self.answer(waiter.place, &waiter.header, answer::OK_NODATA, &Body::None);
        }
    }

    /// Ends the sleep of a session's guest, now or the next time it wants to sleep.
    fn wake(&mut self, number: u32) {
        let waiters = self.waiters.take(number);
        if waiters.is_empty()
            && let Some(session) = self.sessions.get_mut(&number)
        {
            session.wake_pending = true;
        }
        self.answer_waiters(&waiters);
    }

    // ---- attachments ----

    /// Has the worker of a user let go of a resource.
    fn detach(&mut self, user: User) {
        if user.slot == CONTROL {
            return self.abandon(user.session, None);
        }
        let Some(session) = self.sessions.get_mut(&user.session) else { return };
        let patience = Instant::now().checked_add(DETACH_PATIENCE).unwrap_or_else(Instant::now);
        if session.detach(user.slot, patience) {
            let resource = session.release(user.slot);
            if let (Some(memory), Some(pages)) = (&self.memory, session.pages) {
                session::set_attachment(&pages.words(memory), user.slot, Attachment::Detached);
            }
            self.released(resource);
        } else {
            self.poller.at_most(patience);
            self.flush(user.session);
        }
    }

    /// Resources no worker has any more: answers what waited for that.
    fn released(&mut self, resources: impl IntoIterator<Item = u32>) {
        for resource in resources {
            for command in self.resources.released(resource, &mut self.table) {
                self.answer(command.place, &command.header, answer::OK_NODATA, &Body::None);
            }
        }
    }

    /// Sends a session's orders as far as its worker takes them.
    fn flush(&mut self, number: u32) {
        let result = self.send_orders(number);
        let Some(Session { phase: Phase::Running(worker), .. }) = self.sessions.get_mut(&number) else {
            return;
        };
        match result {
            Ok(()) => worker.watch_room(number, false, &self.poller),
            Err(Errno::AGAIN) => worker.watch_room(number, true, &self.poller),
            Err(error) => {
                // Of a guest's making where its pages lie in too many files.
                limited!(warn, session = number, %error, "a worker cannot be told what to map");
                self.lose(number, UNAVAILABLE);
            }
        }
    }

    fn send_orders(&mut self, number: u32) -> Result<(), Errno> {
        let Some(session) = self.sessions.get_mut(&number) else { return Ok(()) };
        let Phase::Running(worker) = &session.phase else { return Ok(()) };
        while let Some(order) = session.orders.front_mut() {
            match order {
                Order::Detach { slot } => worker.detach(*slot)?,
                Order::Attach { slot, sent } => {
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

    // ---- the life of a session ----

    /// The guest has no use for a session any more. Its worker is killed, after `grace` if it may say goodbye.
    fn abandon(&mut self, number: u32, grace: Option<Duration>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        match session.owner.take() {
            Some(Owner::Context(id)) => self.contexts.set_session(id, None),
            Some(Owner::Control(id)) => drop(self.controls.remove(id)),
            None => {}
        }
        session.pages = None;
        self.end(number, grace);
        let waiters = self.waiters.take(number);
        self.answer_waiters(&waiters);
    }

    /// A session has no worker any more, or never had one: tells its guest, which may be waiting anywhere.
    fn lose(&mut self, number: u32, error: u32) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if let (Some(memory), Some(pages)) = (&self.memory, session.pages.take()) {
            session::set_lost(&pages.words(memory), error);
            self.counters.lost = self.counters.lost.wrapping_add(1);
        }
        self.end(number, None);
        let waiters = self.waiters.take(number);
        self.answer_waiters(&waiters);
    }

    /// Ends a session's worker.
    fn end(&mut self, number: u32, grace: Option<Duration>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let phase = core::mem::replace(&mut session.phase, Phase::Lost);
        session.orders.clear();
        match phase {
            Phase::Waiting(_) | Phase::Lost => {
                let resources = session.release_all();
                self.released(resources);
                self.remove_if_over(number);
            }
            Phase::Running(worker) => {
                worker.hang_up(&self.poller);
                self.link.ending(number);
                let until = grace.and_then(|grace| Instant::now().checked_add(grace));
                match until {
                    Some(until) => self.poller.at_most(until),
                    None => worker.kill(),
                }
                session.phase = Phase::Dying(worker, until);
            }
            Phase::Dying(worker, until) => {
                // A worker that was given time and whose guest then died has no time left.
                if until.is_some() && grace.is_none() {
                    worker.kill();
                }
                session.phase = Phase::Dying(worker, until.filter(|_| grace.is_some()));
            }
        }
    }

    /// A worker is gone, and with it every mapping it had.
    fn exited(&mut self, number: u32) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        match core::mem::replace(&mut session.phase, Phase::Lost) {
            Phase::Running(worker) | Phase::Dying(worker, _) => drop(worker.release(&self.poller)),
            other => {
                session.phase = other;
                return;
            }
        }
        let resources = session.release_all();
        self.lose(number, UNAVAILABLE);
        self.released(resources);
        self.link.ended(number);
        self.remove_if_over(number);
        if !self.probes.is_empty() {
            self.answer_probes(Some(Instant::now()));
        }
    }

    /// Forgets a session nobody has anything to do with any more. One whose guest is still there stays, so that every
    /// wait in it is answered at once.
    fn remove_if_over(&mut self, number: u32) {
        let over = self.sessions.get(&number).is_some_and(|session| {
            session.owner.is_none() && !session.owed && matches!(session.phase, Phase::Lost)
        });
        if over {
            self.sessions.remove(&number);
            self.link.close(number);
        }
    }

    /// What came from `sluiced`, without the link, for whoever plays `sluiced` in a fuzz target or a test.
    #[cfg(any(test, fuzzing))]
    pub fn arrive(&mut self, arrival: Arrival) {
        self.arrived(arrival);
    }

    fn arrived(&mut self, arrival: Arrival) {
        let (Arrival::Worker { session: number, .. } | Arrival::None { session: number, .. }) = arrival;
        let Some(session) = self.sessions.get_mut(&number) else {
            return self.link.bury_arrival(arrival);
        };
        session.owed = false;
        match arrival {
            Arrival::Worker { socket, pidfd, .. } if matches!(session.phase, Phase::Waiting(_)) => {
                self.adopt(number, socket, pidfd);
            }
            Arrival::Worker { .. } => {
                self.link.bury_arrival(arrival);
                self.remove_if_over(number);
            }
            Arrival::None { error, .. } => {
                self.lose(number, error);
                self.remove_if_over(number);
            }
        }
    }

    fn adopt(&mut self, number: u32, socket: OwnedFd, pidfd: OwnedFd) {
        match Worker::adopt(number, socket, pidfd, &self.poller) {
            Ok(worker) => {
                if let Some(session) = self.sessions.get_mut(&number) {
                    session.phase = Phase::Running(worker);
                }
                self.flush(number);
            }
            Err((error, pidfd)) => {
                tracing::error!(session = number, %error, "a worker cannot be adopted");
                self.link.bury(number, pidfd, None);
                self.lose(number, UNAVAILABLE);
            }
        }
    }

    /// Ends everything that belongs to a driver instance which is no more.
    pub fn restart(&mut self) {
        let numbers: Vec<u32> = self.sessions.keys().copied().collect();
        for number in numbers {
            self.abandon(number, None);
            // The ids in its attach table will soon be those of other resources.
            if let Some(session) = self.sessions.get_mut(&number) {
                session.release_all();
            }
        }
        self.contexts.clear();
        self.controls.clear();
        self.resources.clear(&mut self.table);
    }

    fn is_dying(&self) -> bool {
        self.sessions.values().any(|session| matches!(session.phase, Phase::Dying(..)))
    }

    /// Answers drivers that start: those whose time is up, or all when no worker of the one before is left.
    fn answer_probes(&mut self, now: Option<Instant>) {
        let all = now.is_none() || !self.is_dying();
        let (due, left): (Vec<_>, Vec<_>) = core::mem::take(&mut self.probes)
            .into_iter()
            .partition(|(_, _, deadline)| all || now.is_some_and(|now| *deadline <= now));
        self.probes = left;
        for (header, place, _) in due {
            self.answer(place, &header, answer::OK_CAPSET_INFO, &Body::CapsetInfo);
        }
    }

    /// The queue stops: answers everything withheld, so that nothing is in flight when it starts again. Pages that a
    /// worker still has are waited for, a bounded time; the front-end waits meanwhile.
    pub fn stop(&mut self, patience: Duration) {
        let waiters = self.waiters.take_all();
        self.answer_waiters(&waiters);
        self.answer_probes(None);
        let started = Instant::now();
        let mut events = Vec::new();
        while self.resources.withheld() > 0 && started.elapsed() < patience {
            if started.elapsed().saturating_mul(2) > patience {
                let numbers: Vec<u32> = self.sessions.keys().copied().collect();
                for number in numbers {
                    if self.sessions.get(&number).is_some_and(|session| session.patience.is_some()) {
                        self.lose(number, UNAVAILABLE);
                    }
                }
            }
            events.clear();
            if self.poller.wait(Duration::from_millis(10), &mut events).is_err() {
                break;
            }
            for event in &events {
                self.event(*event);
            }
        }
        let leaked = self.resources.withheld();
        if leaked > 0 {
            // Answering would give the guest pages that a GPU may still write to.
            self.counters.leaked =
                self.counters.leaked.saturating_add(u64::try_from(leaked).unwrap_or(u64::MAX));
            tracing::error!(
                leaked,
                "workers that were killed are not gone; their guest pages are not given back"
            );
        }
    }

    /// The connection is over: workers are killed and left to the link to wait for.
    pub fn disconnect(&mut self) {
        for (number, session) in core::mem::take(&mut self.sessions) {
            if let Phase::Running(worker) | Phase::Dying(worker, _) = session.phase {
                self.link.bury(number, worker.release(&self.poller), self.kept.clone());
            }
            // What `sluiced` has not answered the link counts until it has.
            if !session.owed {
                self.link.close(number);
            }
        }
        for arrival in self.inbox.close() {
            self.link.turn_away(arrival);
        }
        self.waiters = Waiters::default();
        self.contexts.clear();
        self.controls.clear();
        self.resources.clear(&mut self.table);
        self.memory = None;
        self.settle();
    }

    // ---- events ----

    /// Handles what the poller reported.
    pub fn event(&mut self, event: Event) {
        match event {
            Event::Inbox => {
                for arrival in self.inbox.take() {
                    self.arrived(arrival);
                }
            }
            Event::Again => {}
            Event::Timer => self.expire(),
            Event::Wake(number) => self.wake(number),
            Event::Socket(number) => self.hear(number),
            Event::Exited(number) => self.exited(number),
        }
        self.settle();
    }

    fn hear(&mut self, number: u32) {
        self.flush(number);
        for _ in 0..MESSAGES_PER_ROUND {
            let Some(Session { phase: Phase::Running(worker), .. }) = self.sessions.get(&number) else {
                return;
            };
            let lawful = match worker.hear() {
                Heard::Nothing => return,
                Heard::Gone => false,
                Heard::Message(FromWorker::Attached { slot, error }) => self.attached(number, slot, error),
                Heard::Message(FromWorker::Detached { slot }) => self.detached(number, slot),
            };
            if !lawful {
                return self.lose(number, UNAVAILABLE);
            }
        }
    }

    /// A worker has mapped a resource, or not. Answers whether it was asked to.
    fn attached(&mut self, number: u32, slot: u32, error: u32) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        if !session.attachments.contains_key(&slot) {
            return false;
        }
        if error != 0 {
            if slot == CONTROL {
                self.lose(number, error);
                return true;
            }
            // If it is leaving as well: a worker does not answer the request to unmap what it never mapped.
            let resource = session.release(slot);
            self.released(resource);
        }
        true
    }

    /// A worker has unmapped a resource. Answers whether it was asked to.
    fn detached(&mut self, number: u32, slot: u32) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        if session.attachments.get(&slot).is_none_or(|attachment| !attachment.leaving) {
            return false;
        }
        let resource = session.release(slot);
        self.released(resource);
        true
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let expired = self.waiters.expire(now);
        self.counters.expired =
            self.counters.expired.saturating_add(u64::try_from(expired.len()).unwrap_or(u64::MAX));
        self.answer_waiters(&expired);
        self.answer_probes(Some(now));
        let due: Vec<u32> = self
            .sessions
            .iter()
            .filter(|(_, session)| session.deadline().is_some_and(|deadline| deadline <= now))
            .map(|(number, _)| *number)
            .collect();
        for number in due {
            let Some(session) = self.sessions.get_mut(&number) else { continue };
            match &mut session.phase {
                Phase::Waiting(_) => self.lose(number, UNAVAILABLE),
                Phase::Running(_) => {
                    limited!(warn, session = number, "a worker does not give back guest pages and is killed");
                    self.lose(number, UNAVAILABLE);
                }
                Phase::Dying(worker, until) => {
                    *until = None;
                    worker.kill();
                }
                Phase::Lost => {}
            }
        }
        let probes = self.probes.iter().map(|(_, _, deadline)| *deadline);
        let sessions = self.sessions.values().filter_map(Session::deadline);
        let next = sessions.chain(self.waiters.deadline()).chain(probes).min();
        self.poller.rearm(next);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.disconnect();
    }
}
