//! The memory helper: contexts, limits, windows, allocations, arenas. In one file: it implements one trait.

use crate::{
    arenas::{Arena, Attached, MappedResource},
    current::Current,
    helper::{
        Control, Helper,
        jobs::{MemoryJob, MemoryThread, ServeMemory, memory},
        notice::{Notice, Notices},
        report,
    },
    memory::{
        AccessedBlock, GroupUsage, SessionMemory, SharedAllocation,
        heaps::{self, Heaps},
        memory_source::{MemorySource, taken},
        tools::Tools,
    },
    session::{
        Session,
        objects::{ContextRef, GuestContext},
    },
};
use sluice_driver::{Code, Driver, code};
use sluice_messages::{control::FromWorker, custody::Growth};
use sluice_protocol::{calls::wire, field::AccessFlags, limits, session::Attachment};
use sluice_runtime::limited;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

/// An arena and the context it is pinned through.
#[derive(Debug)]
struct Pinned {
    arena: Arc<Arena>,
    through: Option<GuestContext>,
}

/// Time between two reports of the idle bytes.
const REPORT: Duration = Duration::from_millis(1);
/// Time after which kept memory is old; old memory is given back after as much time again.
const AGE: Duration = Duration::from_millis(limits::KEPT_MILLISECONDS / 2);

/// The times at which the thread tends idle memory without a job.
#[derive(Debug, Default)]
struct Due {
    report: Option<Instant>,
    age: Option<Instant>,
}

impl Due {
    fn next(&self) -> Option<Instant> {
        self.report.into_iter().chain(self.age).min()
    }
}

/// The thread's state.
pub(crate) struct MemoryHelper {
    driver: Arc<Driver>,
    session: Arc<Session>,
    notices: Arc<Notices>,
    helper: Helper,
    memory_source: MemorySource,
    heaps: Arc<Heaps>,
    control: Arc<Control>,
    attached: Arc<Attached>,
    memory: Arc<Mutex<SessionMemory>>,
    current: Current,
    contexts: Vec<GuestContext>,
    /// Pairs of contexts of which the first may access the memory of the second.
    peers: Vec<[GuestContext; 2]>,
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
        let Tools { driver, session, notices, helper, memory_source, heaps } = tools;
        MemoryHelper {
            driver,
            session,
            notices,
            helper,
            memory_source,
            heaps,
            control,
            attached,
            memory,
            current: Current::default(),
            contexts: Vec::new(),
            peers: Vec::new(),
            serial: 0,
            arenas: Vec::new(),
        }
    }

    pub(crate) fn run(mut self, inbox: &Receiver<Box<MemoryJob>>) {
        let mut due = Due::default();
        loop {
            let received = match due.next() {
                Some(next) => inbox.recv_timeout(next.saturating_duration_since(Instant::now())),
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match received {
                Ok(job) => self.job(*job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.tend_idle(&mut due);
        }
    }

    /// Reports idle memory that the dispatcher has taken or left, and gives back what was kept for long.
    fn tend_idle(&self, due: &mut Due) {
        let mut memory = self.memory();
        let now = Instant::now();
        if due.age.is_some_and(|age| age <= now) {
            memory.age();
            due.age = None;
        }
        due.age = memory.ages().then(|| due.age.unwrap_or(now + AGE));
        due.report = memory.watch().then(|| now + REPORT);
    }

    fn memory(&self) -> MutexGuard<'_, SessionMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back recalled memory, as far as it is idle.
    fn recall(&mut self) {
        let Some(custody) = self.memory_source.custody() else { return };
        for device in custody.recalls() {
            self.memory().recall(device, custody.recalled(device));
        }
    }

    fn job(&mut self, job: MemoryJob) {
        self.recall();
        // The job counts as done before its answer is published, so that the dispatcher finds the helper idle when the guest's
        // next call comes.
        let session = Arc::clone(&self.session);
        match job {
            MemoryJob::Call { to, caller, call } => return self.serve(&session, to, caller, call),
            MemoryJob::ContextCreate { to, id, device, flags, primary, slot } => {
                let created = self.create(device, flags, primary);
                self.notices.push(Notice::Context { id, slot, context: created.ok() });
                self.helper.memory_done();
                session.conclude(to, created.map(drop));
                return;
            }
            MemoryJob::ContextDestroy { to, context, allocations } => {
                let destroyed = self.destroy(&context, &allocations);
                self.helper.memory_done();
                session.conclude(to, destroyed);
                return;
            }
            MemoryJob::FreeAll(addresses) => {
                for address in addresses {
                    if let Err(failed) = self.free(address) {
                        tracing::error!(code = failed, "cannot free the memory of an asynchronous free");
                    }
                }
            }
            MemoryJob::Hello { process } => {
                if let Some(custody) = self.memory_source.custody() {
                    custody.hello(process);
                }
            }
            MemoryJob::TendIdle => return,
            MemoryJob::Settle(done) => drop(done),
            MemoryJob::Adopt { slot, mapped } => self.adopt(slot, mapped),
            MemoryJob::Detach { arena } => self.detach(arena),
        }
        self.helper.memory_done();
    }

    fn unit(&self, device: i32) -> Result<u32, Code> {
        self.memory_source.custody().ok_or(code::NOT_SUPPORTED)?.unit(device)
    }

    fn free(&mut self, address: u64) -> Result<(), Code> {
        let freed = self.memory().free(address);
        // Clearing may change the current context.
        self.current = Current::default();
        freed
    }

    /// Gives idle memory back before growth: this thread would wait for the arbiter, and could not answer its recall.
    fn free_idle(&self, device: i32) {
        self.memory().recall(device, u64::MAX);
    }

    fn set_current(&mut self, context: ContextRef) -> Result<(), Code> {
        self.current.set(&self.driver, context)
    }

    fn create(&mut self, device: i32, flags: u32, primary: bool) -> Result<GuestContext, Code> {
        // Creating a context makes it this thread's current one in the driver.
        self.current = Current::default();
        self.free_idle(device);
        let handle = {
            let grant = self.memory_source.grow(device, Growth::Context, 0)?;
            let handle = match primary {
                true => self.driver.primary_retain(device, flags)?,
                false => self.driver.context_create(device, flags)?,
            };
            taken(grant, None);
            handle
        };
        self.serial += 1;
        let context = ContextRef { handle, serial: self.serial };
        let created = GuestContext { context, device, primary };
        // A context that was only retained is not current yet.
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

    /// Sets a limit, for which the driver may take memory, and returns its new value.
    fn set_limit(&mut self, context: &GuestContext, limit: u32, value: u64) -> Result<u64, Code> {
        self.set_current(context.context)?;
        let bytes = limit_bytes(&self.driver, context.device, limit, value);
        self.free_idle(context.device);
        let grant = self.memory_source.grow(context.device, Growth::Limit, bytes)?;
        self.driver.cuCtxSetLimit(limit, value)?;
        // Otherwise the driver takes the heap when a module that calls `malloc` is loaded, which has its own grant.
        if limit != heaps::LIMIT || self.heaps.has(context.context) {
            taken(grant, Some(context.context));
        }
        Ok(self.driver.cuCtxGetLimit(limit)? as u64)
    }

    /// Lets a context access the memory of another: the driver's own memory by its call, and that of this process, which the call does not
    /// cover, mapping by mapping.
    fn enable_peer(&mut self, context: &GuestContext, peer: &GuestContext) -> Result<(), Code> {
        if context.device == peer.device {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        self.set_current(context.context)?;
        self.driver.cuCtxEnablePeerAccess(peer.context.handle, 0)?;
        if let Err(failed) = self.memory().set_peer(0, peer.device, context.device, AccessFlags::ReadWrite) {
            self.driver.cuCtxDisablePeerAccess(peer.context.handle)?;
            return Err(failed);
        }
        self.peers.push([*context, *peer]);
        Ok(())
    }

    fn disable_peer(&mut self, context: &GuestContext, peer: &GuestContext) -> Result<(), Code> {
        let is =
            |[from, to]: &[GuestContext; 2]| (from.context, to.context) == (context.context, peer.context);
        if !self.peers.iter().any(is) {
            return Err(code::PEER_ACCESS_NOT_ENABLED);
        }
        self.set_current(context.context)?;
        self.driver.cuCtxDisablePeerAccess(peer.context.handle)?;
        self.end_peers(is)
    }

    /// Ends pairs of contexts. A device has access as long as one pair of contexts has. After a failure the other pairs are still ended.
    fn end_peers(&mut self, ends: impl Fn(&[GuestContext; 2]) -> bool) -> Result<(), Code> {
        let ended: Vec<_> = self.peers.extract_if(.., |pair| ends(pair)).collect();
        let mut result = Ok(());
        for [from, to] in ended {
            let devices = (from.device, to.device);
            if !self.peers.iter().any(|[from, to]| (from.device, to.device) == devices) {
                let taken_back = self.memory().set_peer(0, to.device, from.device, AccessFlags::None);
                result = result.and(taken_back);
            }
        }
        result
    }

    fn release(&mut self, context: &GuestContext) -> Result<(), Code> {
        self.current = Current::default();
        match context.primary {
            true => self.driver.cuDevicePrimaryCtxRelease_v2(context.device),
            false => self.driver.cuCtxDestroy_v2(context.context.handle),
        }
        .inspect(|()| self.memory_source.context_gone(context.device, context.context))
    }

    /// Destroys a context with its memory and its access to other contexts. The context is released even if one of these is not.
    fn destroy(&mut self, context: &GuestContext, allocations: &[u64]) -> Result<(), Code> {
        let mut result = Ok(());
        for address in allocations {
            let freed = self.memory().free(*address);
            result = result.and(freed);
        }
        let ended = self.end_peers(|pair| pair.iter().any(|of| of.context == context.context));
        result = result.and(ended);
        self.current = Current::default();
        self.memory().mapper().context_gone(context.context);
        self.contexts.retain(|other| other.context != context.context);
        let ours = |through: &GuestContext| through.context == context.context;
        let through = self.arenas.iter_mut().filter(|pinned| pinned.through.as_ref().is_some_and(ours));
        for pinned in through {
            self.current.set(&self.driver, context.context)?;
            self.driver.host_unregister(pinned.arena.base())?;
            pinned.through = None;
            self.memory_source.unpin(context.device, pinned.arena.bytes());
        }
        self.release(context)?;
        self.heaps.gone(context.context);
        let pinned = match self.contexts.first().copied() {
            Some(other) => self.pin_all(&other),
            None => Ok(()),
        };
        result.and(pinned)
    }

    /// Pins every arena that is not pinned yet.
    fn pin_all(&mut self, through: &GuestContext) -> Result<(), Code> {
        for pinned in self.arenas.iter_mut().filter(|pinned| pinned.through.is_none()) {
            let (base, bytes) = (pinned.arena.base(), pinned.arena.bytes());
            self.current.set(&self.driver, through.context)?;
            self.memory_source.pin(through.device, bytes)?;
            if let Err(failed) = self.driver.host_register(base, bytes) {
                self.memory_source.unpin(through.device, bytes);
                return Err(failed);
            }
            pinned.through = Some(*through);
        }
        Ok(())
    }

    /// Pins the pages that the control thread mapped as soon as there is a context, and reports the attachment to all sides.
    fn adopt(&mut self, slot: u32, mapped: MappedResource) {
        let arena = Arc::new(Arena::new(slot, mapped));
        self.arenas.push(Pinned { arena: Arc::clone(&arena), through: None });
        if let Some(context) = self.contexts.first().copied()
            && let Err(failed) = self.pin_all(&context)
        {
            limited!(warn, slot, code = failed, "cannot pin guest memory");
            self.arenas.retain(|pinned| pinned.arena.slot() != slot);
            drop(arena);
            self.attached.remove(slot);
            report(&self.control, FromWorker::Attached { slot, error: failed });
            self.session.set_attachment(slot, Attachment::Refused(failed));
            return;
        }
        let became = arena.attachment();
        self.attached.adopted(&arena);
        self.notices.push(Notice::Adopted(arena));
        self.session.set_attachment(slot, became);
        report(&self.control, FromWorker::Attached { slot, error: 0 });
    }

    /// Unpins and unmaps an arena. If either fails the pages stay mapped until the process ends, and the device gets no answer.
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
            self.memory_source.unpin(context.device, pinned.arena.bytes());
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
        // In this order: a guest that sees the entry free may use it at once, and the device must know by then.
        report(&self.control, FromWorker::Detached { slot });
        self.session.set_attachment(slot, Attachment::Detached);
    }
}

/// The current context of a caller.
fn current(caller: Option<GuestContext>) -> Result<GuestContext, Code> {
    caller.ok_or(code::INVALID_CONTEXT)
}

impl MemoryThread for MemoryHelper {
    fn served(&mut self) {
        self.helper.memory_done();
    }
}

impl ServeMemory for MemoryHelper {
    fn device_memory(
        &mut self,
        _: Option<GuestContext>,
        args: memory::device_memory,
    ) -> Result<wire::device_memory::Reply, Code> {
        self.memory().report_idle();
        let stats = self.memory_source.stats();
        stats.settle(args.device);
        let (free, total) = stats.info(args.device);
        Ok(wire::device_memory::Reply { free, total })
    }

    fn memory_allocate(
        &mut self,
        caller: Option<GuestContext>,
        args: memory::memory_allocate,
    ) -> Result<wire::memory_allocate::Reply, Code> {
        let GuestContext { context, device, .. } = current(caller)?;
        let address = self.memory().allocate_in(args.pool, device, args.bytes)?;
        self.notices.push(Notice::Allocated { address, bytes: args.bytes, context });
        Ok(wire::memory_allocate::Reply { address })
    }

    fn memory_free(
        &mut self,
        _: Option<GuestContext>,
        args: memory::memory_free,
    ) -> Result<wire::memory_free::Reply, Code> {
        self.free(args.address)?;
        Ok(wire::memory_free::Reply {})
    }

    fn va_range_unmap(
        &mut self,
        _: Option<GuestContext>,
        args: memory::va_range_unmap,
    ) -> Result<wire::va_range_unmap::Reply, Code> {
        self.memory().unmap_range(args.address, args.bytes)?;
        Ok(wire::va_range_unmap::Reply {})
    }

    fn window_reserve(
        &mut self,
        _: Option<GuestContext>,
        args: memory::window_reserve,
    ) -> Result<wire::window_reserve::Reply, Code> {
        self.memory().reserve(args.base, args.bytes)?;
        Ok(wire::window_reserve::Reply {})
    }

    fn process_info(
        &mut self,
        _: Option<GuestContext>,
        args: memory::process_info,
    ) -> Result<wire::process_info::Reply, Code> {
        let tenant = match self.memory_source.custody() {
            Some(custody) => custody.tenant(args.device, args.index)?,
            None => None,
        };
        let (process, bytes) = tenant.as_ref().map_or((0, 0), |tenant| (tenant.process, tenant.bytes));
        Ok(wire::process_info::Reply { found: tenant.is_some(), process, bytes })
    }

    fn context_limit(
        &mut self,
        caller: Option<GuestContext>,
        args: memory::context_limit,
    ) -> Result<wire::context_limit::Reply, Code> {
        self.set_current(current(caller)?.context)?;
        Ok(wire::context_limit::Reply { value: self.driver.cuCtxGetLimit(args.limit)? as u64 })
    }

    fn context_set_limit(
        &mut self,
        caller: Option<GuestContext>,
        args: memory::context_set_limit,
    ) -> Result<wire::context_set_limit::Reply, Code> {
        let value = self.set_limit(&current(caller)?, args.limit, args.value)?;
        Ok(wire::context_set_limit::Reply { value })
    }

    fn flush_rdma_writes(
        &mut self,
        caller: Option<GuestContext>,
        args: memory::flush_rdma_writes,
    ) -> Result<wire::flush_rdma_writes::Reply, Code> {
        self.set_current(current(caller)?.context)?;
        self.driver.cuFlushGPUDirectRDMAWrites(args.target, args.scope)?;
        Ok(wire::flush_rdma_writes::Reply {})
    }

    fn pool_threshold(
        &mut self,
        _: Option<GuestContext>,
        args: memory::pool_threshold,
    ) -> Result<wire::pool_threshold::Reply, Code> {
        self.memory().set_threshold(args.pool, args.device, args.bytes)?;
        Ok(wire::pool_threshold::Reply {})
    }

    fn pool_trim(
        &mut self,
        _: Option<GuestContext>,
        args: memory::pool_trim,
    ) -> Result<wire::pool_trim::Reply, Code> {
        self.memory().trim(args.pool, args.keep);
        Ok(wire::pool_trim::Reply {})
    }

    fn pool_usage(
        &mut self,
        _: Option<GuestContext>,
        args: memory::pool_usage,
    ) -> Result<wire::pool_usage::Reply, Code> {
        let usage = self.memory().usage(args.pool, args.device, args.reset_reserved, args.reset_used)?;
        let GroupUsage { reserved, reserved_high, used, used_high } = usage;
        Ok(wire::pool_usage::Reply { reserved, reserved_high, used, used_high })
    }

    fn pool_access(
        &mut self,
        _: Option<GuestContext>,
        args: memory::pool_access,
    ) -> Result<wire::pool_access::Reply, Code> {
        let memory::pool_access { pool, device, peer, access } = args;
        if pool == 0 || device == peer || !self.driver.reaches(peer, device)? {
            return Err(code::INVALID_DEVICE);
        }
        self.memory().set_peer(pool, device, peer, access)?;
        Ok(wire::pool_access::Reply {})
    }

    fn peer_enable(
        &mut self,
        caller: Option<GuestContext>,
        args: memory::peer_enable,
    ) -> Result<wire::peer_enable::Reply, Code> {
        self.enable_peer(&current(caller)?, &args.peer)?;
        Ok(wire::peer_enable::Reply {})
    }

    fn peer_disable(
        &mut self,
        caller: Option<GuestContext>,
        args: memory::peer_disable,
    ) -> Result<wire::peer_disable::Reply, Code> {
        self.disable_peer(&current(caller)?, &args.peer)?;
        Ok(wire::peer_disable::Reply {})
    }

    fn graph_memory_trim(
        &mut self,
        _: Option<GuestContext>,
        args: memory::graph_memory_trim,
    ) -> Result<wire::graph_memory_trim::Reply, Code> {
        self.driver.cuDeviceGraphMemTrim(args.device)?;
        Ok(wire::graph_memory_trim::Reply {})
    }

    fn pool_end(
        &mut self,
        _: Option<GuestContext>,
        args: memory::pool_end,
    ) -> Result<wire::pool_end::Reply, Code> {
        self.memory().end_group(args.pool);
        Ok(wire::pool_end::Reply {})
    }

    fn phys_alloc_create(
        &mut self,
        _: Option<GuestContext>,
        args: memory::phys_alloc_create,
    ) -> Result<wire::phys_alloc_create::Reply, Code> {
        let allocation = self.memory().create_block(args.device, args.bytes)?;
        Ok(wire::phys_alloc_create::Reply { allocation })
    }

    fn phys_alloc_release(
        &mut self,
        _: Option<GuestContext>,
        args: memory::phys_alloc_release,
    ) -> Result<wire::phys_alloc_release::Reply, Code> {
        self.memory().release_block(args.allocation)?;
        Ok(wire::phys_alloc_release::Reply {})
    }

    fn phys_alloc_map(
        &mut self,
        _: Option<GuestContext>,
        args: memory::phys_alloc_map,
    ) -> Result<wire::phys_alloc_map::Reply, Code> {
        self.memory().map_block(args.allocation, args.address, args.bytes)?;
        Ok(wire::phys_alloc_map::Reply {})
    }

    fn phys_alloc_export(
        &mut self,
        _: Option<GuestContext>,
        args: memory::phys_alloc_export,
    ) -> Result<wire::phys_alloc_export::Reply, Code> {
        let (device, share) = self.memory().share_block(args.allocation)?;
        Ok(wire::phys_alloc_export::Reply { unit: self.unit(device)?, share })
    }

    fn phys_alloc_import(
        &mut self,
        _: Option<GuestContext>,
        args: memory::phys_alloc_import,
    ) -> Result<wire::phys_alloc_import::Reply, Code> {
        let (allocation, bytes) = self.memory().open_block(args.device, args.share)?;
        Ok(wire::phys_alloc_import::Reply { allocation, bytes })
    }

    fn va_range_set_access(
        &mut self,
        _: Option<GuestContext>,
        args: memory::va_range_set_access,
    ) -> Result<wire::va_range_set_access::Reply, Code> {
        let memory::va_range_set_access { address, bytes, device, access } = args;
        for AccessedBlock { at, bytes, device, may } in
            self.memory().set_access(address, bytes, device, access)?
        {
            self.notices.push(Notice::Reach { address: at, bytes, device, may });
        }
        Ok(wire::va_range_set_access::Reply {})
    }

    fn va_range_reserve(
        &mut self,
        _: Option<GuestContext>,
        args: memory::va_range_reserve,
    ) -> Result<wire::va_range_reserve::Reply, Code> {
        let address = self.memory().reserve_range(args.bytes, args.alignment, args.hint)?;
        Ok(wire::va_range_reserve::Reply { address })
    }

    fn va_range_free(
        &mut self,
        _: Option<GuestContext>,
        args: memory::va_range_free,
    ) -> Result<wire::va_range_free::Reply, Code> {
        self.memory().free_range(args.address, args.bytes)?;
        Ok(wire::va_range_free::Reply {})
    }

    fn ipc_export(
        &mut self,
        _: Option<GuestContext>,
        args: memory::ipc_export,
    ) -> Result<wire::ipc_export::Reply, Code> {
        let (device, SharedAllocation { share, offset }) = self.memory().share(args.address)?;
        Ok(wire::ipc_export::Reply { unit: self.unit(device)?, share, offset })
    }

    fn ipc_open(
        &mut self,
        caller: Option<GuestContext>,
        args: memory::ipc_open,
    ) -> Result<wire::ipc_open::Reply, Code> {
        let GuestContext { context, device: opener, .. } = current(caller)?;
        let owner = args.device;
        if opener != owner && !self.driver.reaches(opener, owner)? {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        let shared = SharedAllocation { share: args.share, offset: args.offset };
        let address = self.memory().open_share(owner, opener, shared, args.bytes)?;
        self.notices.push(Notice::Allocated { address, bytes: args.bytes, context });
        Ok(wire::ipc_open::Reply { address })
    }
}

/// Bytes that the driver may take for a limit: local memory of every resident thread, or a buffer of the limit's size.
fn limit_bytes(driver: &Driver, device: i32, limit: u32, value: u64) -> u64 {
    const STACK: u32 = 0;
    const PRINT_BUFFER: u32 = 1;
    match limit {
        STACK => value.saturating_mul(resident_threads(driver, device)),
        PRINT_BUFFER | heaps::LIMIT => value,
        _ => 0,
    }
}

/// Threads that a device can have resident at once; 0 if the driver does not report it.
pub(crate) fn resident_threads(driver: &Driver, device: i32) -> u64 {
    const MULTIPROCESSORS: u32 = 16;
    const THREADS_PER_MULTIPROCESSOR: u32 = 39;
    let attribute = |id| driver.device_attribute(id, device).ok().and_then(|value| u64::try_from(value).ok());
    attribute(MULTIPROCESSORS)
        .zip(attribute(THREADS_PER_MULTIPROCESSOR))
        .map_or(0, |(a, b)| a.saturating_mul(b))
}
