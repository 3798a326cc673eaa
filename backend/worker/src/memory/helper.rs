//! The memory helper: contexts, limits, windows, allocations, arenas.

use crate::{
    arenas::{Arena, Attached, Mapped},
    helper::{
        Control, Helper, Tools,
        jobs::{MemoryJob, PoolJob, VirtualJob},
        notice::{Notice, Notices},
        respond, tell,
    },
    memory::{SessionMemory, Shared, Usage, provision::Provision},
    modules::heaps::{self, Heaps},
    session::{ReplyTo, Session, objects::Context},
    submit::{completion::Current, lanes::ContextRef},
};
use sluice_driver::{Code, Driver, code};
use sluice_messages::{control::FromWorker, custody::Growth};
use sluice_protocol::{calls::wire, session::Attachment};
use sluice_runtime::limited;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::Receiver};

/// An arena and the context it is pinned through.
#[derive(Debug)]
struct Pinned {
    arena: Arc<Arena>,
    through: Option<Context>,
}

/// The thread's state.
pub(crate) struct MemoryHelper {
    driver: Arc<Driver>,
    session: Arc<Session>,
    notices: Arc<Notices>,
    helper: Helper,
    provision: Provision,
    heaps: Arc<Heaps>,
    control: Arc<Control>,
    attached: Arc<Attached>,
    memory: Arc<Mutex<SessionMemory>>,
    current: Current,
    contexts: Vec<Context>,
    serial: u64,
    arenas: Vec<Pinned>,
}

impl MemoryHelper {
    pub(crate) fn new(
        tools: Tools,
        memory: Arc<Mutex<SessionMemory>>,
        control: Arc<Control>,
        attached: Arc<Attached>,
    ) -> MemoryHelper {
        let Tools { driver, session, notices, helper, provision, heaps } = tools;
        MemoryHelper {
            driver,
            session,
            notices,
            helper,
            provision,
            heaps,
            control,
            attached,
            memory,
            current: Current::default(),
            contexts: Vec::new(),
            serial: 0,
            arenas: Vec::new(),
        }
    }

    pub(crate) fn run(mut self, inbox: &Receiver<MemoryJob>) {
        while let Ok(job) = inbox.recv() {
            self.job(job);
        }
    }

    fn memory(&self) -> MutexGuard<'_, SessionMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back what the lenders want, as far as it is idle.
    fn recall(&mut self) {
        let Some(custody) = self.provision.custody() else { return };
        for device in custody.recalls() {
            self.memory().recall(device, custody.recalled(device));
        }
    }

    fn job(&mut self, job: MemoryJob) {
        self.recall();
        // The job counts as done before its answer is published, so that the dispatcher sees an idle helper when the
        // guest's next call comes.
        let session = Arc::clone(&self.session);
        match job {
            MemoryJob::ContextCreate { to, id, device, flags, primary, slot } => {
                let created = self.create(device, flags, primary);
                self.notices.push(Notice::Context { id, slot, context: created.ok() });
                self.helper.memory_done();
                respond(&session, to, created, |_, writer| wire::context_create::Reply {}.put(writer));
            }
            MemoryJob::ContextDestroy { to, context, allocations } => {
                let destroyed = self.destroy(&context, &allocations);
                self.helper.memory_done();
                respond(&session, to, destroyed, |(), writer| wire::context_destroy::Reply {}.put(writer));
            }
            MemoryJob::Limit { to, context, limit } => {
                let value = self.set_current(context).and_then(|()| self.driver.limit(limit));
                self.helper.memory_done();
                respond(&session, to, value, |value, writer| {
                    wire::context_limit::Reply { value: *value }.put(writer)
                });
            }
            MemoryJob::SetLimit { to, context, limit, value } => {
                let value = self.set_limit(&context, limit, value);
                self.helper.memory_done();
                respond(&session, to, value, |value, writer| {
                    wire::context_set_limit::Reply { value: *value }.put(writer)
                });
            }
            MemoryJob::Window { to, base, bytes } => {
                let reserved = self.memory().reserve(base, bytes);
                self.helper.memory_done();
                respond(&session, to, reserved, |(), writer| wire::window_reserve::Reply {}.put(writer));
            }
            MemoryJob::Allocate { to, context, device, pool, bytes } => {
                let address = self.memory().allocate_in(pool, device, bytes);
                if let Ok(address) = address {
                    self.notices.push(Notice::Allocated { address, bytes, context });
                }
                self.helper.memory_done();
                respond(&session, to, address, |address, writer| {
                    wire::memory_allocate::Reply { address: *address }.put(writer)
                });
            }
            MemoryJob::Free { to, address } => {
                let freed = self.memory().free(address);
                // Clearing makes another context current.
                self.current = Current::default();
                self.helper.memory_done();
                session.conclude(to, freed);
            }
            MemoryJob::FreeAll(addresses) => {
                for address in addresses {
                    if let Err(failed) = self.memory().free(address) {
                        tracing::error!(code = failed, "cannot free what a stream has come to");
                    }
                }
                self.current = Current::default();
                self.helper.memory_done();
            }
            MemoryJob::Pool(job) => self.pool(job),
            MemoryJob::Virtual { to, job } => self.virtual_memory(to, job),
            MemoryJob::Share { to, address } => {
                let shared = self.memory().share(address);
                let shared = shared.and_then(|(device, shared)| Ok((self.unit(device)?, shared)));
                self.helper.memory_done();
                respond(&session, to, shared, |(unit, shared), writer| {
                    let Shared { share, offset } = *shared;
                    wire::memory_share::Reply { unit: *unit, share, offset }.put(writer)
                });
            }
            MemoryJob::Open { to, context, device, shared, bytes } => {
                let address = self.memory().open_share(device, shared, bytes);
                if let Ok(address) = address {
                    self.notices.push(Notice::Allocated { address, bytes, context });
                }
                self.helper.memory_done();
                respond(&session, to, address, |address, writer| {
                    wire::memory_open::Reply { address: *address }.put(writer)
                });
            }
            MemoryJob::Info { to, device } => {
                let books = self.provision.books();
                books.settle(device);
                let (free, total) = books.info(device);
                self.helper.memory_done();
                respond(&session, to, Ok(()), |(), writer| {
                    wire::memory_info::Reply { free, total }.put(writer)
                });
            }
            MemoryJob::Hello { process } => {
                if let Some(custody) = self.provision.custody() {
                    custody.hello(process);
                }
                self.helper.memory_done();
            }
            MemoryJob::Process { to, device, index } => {
                let tenant = match self.provision.custody() {
                    Some(custody) => custody.tenant(device, index),
                    None => Ok(None),
                };
                self.helper.memory_done();
                respond(&session, to, tenant, |tenant, writer| {
                    let (process, bytes) = tenant.map_or((0, 0), |tenant| (tenant.process, tenant.bytes));
                    wire::process_info::Reply { found: tenant.is_some(), process, bytes }.put(writer)
                });
            }
            MemoryJob::Recall => self.helper.memory_done(),
            MemoryJob::Adopt { slot, mapped } => {
                self.adopt(slot, mapped);
                self.helper.memory_done();
            }
            MemoryJob::Detach { arena } => {
                self.detach(arena);
                self.helper.memory_done();
            }
        }
    }

    fn unit(&self, device: i32) -> Result<u32, Code> {
        self.provision.custody().ok_or(code::NOT_SUPPORTED)?.unit(device)
    }

    fn pool(&mut self, job: PoolJob) {
        let session = Arc::clone(&self.session);
        match job {
            PoolJob::Threshold { to, pool, device, bytes } => {
                let set = self.memory().set_threshold(pool, device, bytes);
                self.helper.memory_done();
                session.conclude(to, set);
            }
            PoolJob::Trim { to, pool, keep } => {
                self.memory().trim(pool, keep);
                self.helper.memory_done();
                session.answer(to, 0, &[]);
            }
            PoolJob::Usage { to, pool, device, reset } => {
                let usage = self.memory().usage(pool, device, reset);
                self.helper.memory_done();
                respond(&session, to, usage, |usage, writer| {
                    let Usage { reserved, reserved_high, used, used_high } = *usage;
                    wire::pool_usage::Reply { reserved, reserved_high, used, used_high }.put(writer)
                });
            }
            PoolJob::End { to, pool } => {
                self.memory().end_group(pool);
                self.helper.memory_done();
                session.conclude(to, Ok(()));
            }
        }
    }

    fn virtual_memory(&mut self, to: ReplyTo, job: VirtualJob) {
        let session = Arc::clone(&self.session);
        let none = |()| [None; 3];
        let one = |word| [Some(word), None, None];
        // The answers' fields are words, one behind the other.
        let done: Result<[Option<u64>; 3], Code> = match job {
            VirtualJob::Create { device, bytes } => self.memory().create_block(device, bytes).map(one),
            VirtualJob::Release { block } => self.memory().release_block(block).map(none),
            VirtualJob::Map { block, address, bytes } => {
                self.memory().map_block(block, address, bytes).map(none)
            }
            VirtualJob::Access { address, bytes, device, access } => {
                let set = self.memory().set_access(address, bytes, device, access);
                if set.is_ok() {
                    self.notices.push(Notice::Reach { address, bytes, may: access != 0 });
                }
                set.map(none)
            }
            VirtualJob::Unmap { address, bytes } => self.memory().unmap_range(address, bytes).map(none),
            VirtualJob::Reserve { bytes, alignment, hint } => {
                self.memory().reserve_range(bytes, alignment, hint).map(one)
            }
            VirtualJob::FreeRange { address, bytes } => self.memory().free_range(address, bytes).map(none),
            VirtualJob::Share { block } => {
                let shared = self.memory().share_block(block);
                shared.and_then(|(device, share)| {
                    let share = share.to_le_bytes();
                    let word = |at: usize| share.as_chunks::<8>().0.get(at).copied().map(u64::from_le_bytes);
                    Ok([Some(self.unit(device)?.into()), word(0), word(1)])
                })
            }
            VirtualJob::Open { device, share } => {
                self.memory().open_block(device, share).map(|(block, bytes)| [Some(block), Some(bytes), None])
            }
        };
        self.helper.memory_done();
        match job {
            VirtualJob::Release { .. } => session.conclude(to, done.map(drop)),
            _ => respond(&session, to, done, |words, writer| {
                words.iter().flatten().try_for_each(|word| writer.word(*word))
            }),
        }
    }

    fn set_current(&mut self, context: ContextRef) -> Result<(), Code> {
        self.current.set(&self.driver, context)
    }

    fn create(&mut self, ordinal: u32, flags: u32, primary: bool) -> Result<Context, Code> {
        let device = self.driver.device(ordinal)?;
        // Creating a context makes it this thread's current one behind our back.
        self.current = Current::default();
        let handle = {
            let _grant = self.provision.grow(device, Growth::Context, 0)?;
            match primary {
                true => self.driver.primary_retain(device, flags)?,
                false => self.driver.context_create(device, flags)?,
            }
        };
        self.serial += 1;
        let context = ContextRef { handle, serial: self.serial };
        let created = Context { context, device, primary };
        // One that was only retained is not current yet.
        let made = self
            .set_current(context)
            .and_then(|()| self.memory().mapper().context_made(device, context))
            .and_then(|()| self.pin_all(&created));
        if let Err(failed) = made {
            self.memory().mapper().context_gone(context);
            self.release(&created)?;
            return Err(failed);
        }
        self.contexts.push(created);
        Ok(created)
    }

    /// Sets a limit, for which the driver may take memory, and answers what it became.
    fn set_limit(&mut self, context: &Context, limit: u32, value: u64) -> Result<u64, Code> {
        self.set_current(context.context)?;
        let bytes = limit_bytes(&self.driver, context.device, limit, value);
        {
            let _grant = self.provision.grow(context.device, Growth::Limit, bytes)?;
            self.driver.set_limit(limit, value)?;
        }
        // A heap is taken when a module that calls `malloc` is loaded: that growth uses what was granted for it here.
        if limit == heaps::LIMIT && !self.heaps.has(context.context) {
            self.provision.shrunk(context.device, Growth::Limit, bytes);
        }
        self.driver.limit(limit)
    }

    fn release(&mut self, context: &Context) -> Result<(), Code> {
        self.current = Current::default();
        match context.primary {
            true => self.driver.primary_release(context.device),
            false => self.driver.context_destroy(context.context.handle),
        }
        .inspect(|()| self.provision.shrunk(context.device, Growth::Context, 0))
    }

    fn destroy(&mut self, context: &Context, allocations: &[u64]) -> Result<(), Code> {
        for address in allocations {
            self.memory().free(*address)?;
        }
        self.current = Current::default();
        self.memory().mapper().context_gone(context.context);
        self.contexts.retain(|other| other.context != context.context);
        let ours = |through: &Context| through.context == context.context;
        let through = self.arenas.iter_mut().filter(|pinned| pinned.through.as_ref().is_some_and(ours));
        for pinned in through {
            self.current.set(&self.driver, context.context)?;
            self.driver.host_unregister(pinned.arena.base())?;
            pinned.through = None;
            self.provision.unpin(context.device, pinned.arena.bytes());
        }
        self.release(context)?;
        self.heaps.gone(context.context);
        match self.contexts.first().copied() {
            Some(other) => self.pin_all(&other),
            None => Ok(()),
        }
    }

    /// Pins every arena that is not pinned yet.
    fn pin_all(&mut self, through: &Context) -> Result<(), Code> {
        for pinned in self.arenas.iter_mut().filter(|pinned| pinned.through.is_none()) {
            let (base, bytes) = (pinned.arena.base(), pinned.arena.bytes());
            self.current.set(&self.driver, through.context)?;
            self.provision.pin(through.device, bytes)?;
            if let Err(failed) = self.driver.host_register(base, bytes) {
                self.provision.unpin(through.device, bytes);
                return Err(failed);
            }
            pinned.through = Some(*through);
        }
        Ok(())
    }

    /// Pins what the control thread mapped, as soon as there is a context to pin it through, and tells everybody.
    fn adopt(&mut self, slot: u32, mapped: Mapped) {
        let arena = Arc::new(Arena::new(slot, mapped));
        self.arenas.push(Pinned { arena: Arc::clone(&arena), through: None });
        if let Some(context) = self.contexts.first().copied()
            && let Err(failed) = self.pin_all(&context)
        {
            limited!(warn, slot, code = failed, "cannot pin guest memory");
            self.arenas.retain(|pinned| pinned.arena.slot() != slot);
            drop(arena);
            self.attached.remove(slot);
            self.session.set_attachment(slot, Attachment::Refused(failed));
            tell(&self.control, FromWorker::Attached { slot, error: failed });
            return;
        }
        let became = arena.attachment();
        self.attached.adopted(&arena);
        self.notices.push(Notice::Adopted(arena));
        self.session.set_attachment(slot, became);
        tell(&self.control, FromWorker::Attached { slot, error: 0 });
    }

    /// Unpins and unmaps. If either fails the pages stay ours until the process is gone, and the device is not told.
    fn detach(&mut self, arena: Arc<Arena>) {
        let slot = arena.slot();
        let Some(index) = self.arenas.iter().position(|pinned| pinned.arena.slot() == slot) else { return };
        let pinned = self.arenas.swap_remove(index);
        if let Some(context) = pinned.through {
            let unpinned = self
                .set_current(context.context)
                .and_then(|()| self.driver.host_unregister(pinned.arena.base()));
            if let Err(failed) = unpinned {
                limited!(error, slot, code = failed, "cannot unpin guest memory");
                self.arenas.push(pinned);
                return;
            }
            self.provision.unpin(context.device, pinned.arena.bytes());
        }
        drop(pinned);
        self.attached.detached(&arena);
        match Arc::try_unwrap(arena) {
            Ok(arena) => drop(arena),
            Err(_) => {
                limited!(error, slot, "guest memory is still in use and stays mapped");
                return;
            }
        }
        self.attached.remove(slot);
        self.session.set_attachment(slot, Attachment::Detached);
        tell(&self.control, FromWorker::Detached { slot });
    }
}

/// What a limit may make the driver take: local memory of every thread there can be, or a buffer as it is.
fn limit_bytes(driver: &Driver, device: i32, limit: u32, value: u64) -> u64 {
    const STACK: u32 = 0;
    const PRINT_BUFFER: u32 = 1;
    match limit {
        STACK => value.saturating_mul(resident_threads(driver, device)),
        PRINT_BUFFER | heaps::LIMIT => value,
        _ => 0,
    }
}

/// Threads that a device can have resident at once; 0 when the driver does not say.
pub(crate) fn resident_threads(driver: &Driver, device: i32) -> u64 {
    const MULTIPROCESSORS: u32 = 16;
    const THREADS_PER_MULTIPROCESSOR: u32 = 39;
    let attribute = |id| driver.device_attribute(id, device).ok().and_then(|value| u64::try_from(value).ok());
    attribute(MULTIPROCESSORS)
        .zip(attribute(THREADS_PER_MULTIPROCESSOR))
        .map_or(0, |(a, b)| a.saturating_mul(b))
}
