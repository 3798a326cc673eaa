//! The calls that the dispatcher serves itself: sessions, contexts, streams, events. In one file: they implement one trait.

use super::{
    Binding, Dispatcher, StreamSlot,
    attributes::AttributeList,
    calls::{Inline, Quick, Served},
    reply_to,
};
use crate::{
    arenas::HeldRange,
    graphs::plan::{ConditionalSerial, EventKey},
    helper::{
        jobs::{MemoryJob, ModuleJob},
        kinds::{ModuleRef, ReservedId, Tables},
    },
    memory::SessionMemory,
    resources::{ResolvedOrigin, ResolvedQueues, ResolvedResources},
    session::{
        ReplyTo,
        images::{GuestArray, GuestMipmapped, GuestReference, ResolvedImage},
        objects::{self, GuestContext},
    },
    submit::{Operation, StreamOrder, WorkTarget, queue::QueueItem},
};
use sluice_cuda_abi::{
    attributes::{correct_dependent, guest_mask},
    resources::kind,
    symbols,
};
use sluice_driver::{Code, Handle, LaunchAttribute, code};
use sluice_protocol::{
    calls::{self, Attributes, wire},
    field::{LaunchAttributes, Ordinal},
    handle::{
        Array, ConditionalGraph, Context, Function, GreenContext, Id, Link, MipmappedArray, Module, Stream,
        SurfaceReference, TextureReference,
    },
    image::ImageResource,
    limits,
    record::Header,
    resources::{Origin, QueueChoice, ResourceDescription},
};
use sluice_runtime::limited;
use std::{
    collections::HashSet,
    sync::{Arc, MutexGuard},
};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// The `CUdevice_attribute` for support of stream priorities.
const STREAM_PRIORITIES_SUPPORTED: u32 = 78;
/// The range of devices with priorities, for a guest that queries it before it has a context.
const PRIORITIES: (i32, i32) = (0, -5);

impl Inline for Dispatcher {
    fn session_hello(
        &mut self,
        _: &Header,
        args: &wire::session_hello::Args,
    ) -> Served<wire::session_hello::Reply> {
        if args.version != calls::VERSION {
            limited!(warn, version = args.version, "the shim uses another version of the calls");
            return Err(code::SYSTEM_DRIVER_MISMATCH);
        }
        limited!(info, process = args.process, "session begins");
        self.greeted = false;
        let driver_version = self.shared.driver.version()?.min(symbols::CUDA_VERSION);
        let devices = self.shared.driver.device_count()?.min(limits::DEVICES);
        // Only devices whose memory an arbiter lends can be used.
        let lent = self.shared.memory_source.stats().devices().and_then(|lent| u32::try_from(lent).ok());
        let devices = lent.map_or(devices, |lent| devices.min(lent));
        self.devices =
            (0..devices).map(|ordinal| self.shared.driver.device(ordinal)).collect::<Result<_, _>>()?;
        self.greeted = true;
        self.memory_job(MemoryJob::Hello { process: args.process });
        let room = u32::try_from(self.room).unwrap_or(u32::MAX);
        Ok(Some(wire::session_hello::Reply { driver_version, devices, room }))
    }

    fn device_info(
        &mut self,
        _: &Header,
        args: &wire::device_info::Args,
    ) -> Served<wire::device_info::Reply> {
        self.describe(args.device).map(Some)
    }

    fn device_peer(
        &mut self,
        _: &Header,
        args: &wire::device_peer::Args,
    ) -> Served<wire::device_peer::Reply> {
        let (device, peer) = (self.device(args.device)?, self.device(args.peer)?);
        if device == peer {
            return Err(code::INVALID_DEVICE);
        }
        let driver = &self.shared.driver;
        let (reaches, rank) = (driver.reaches(device, peer)?, driver.link_rank(device, peer)?);
        Ok(Some(wire::device_peer::Reply { reaches, rank }))
    }

    fn console_read(
        &mut self,
        _: &Header,
        _: &wire::console_read::Args,
    ) -> Served<wire::console_read::Reply> {
        let mut text = [0; 1024];
        let (error, length) = self.shared.session.fetch_text(&mut text);
        // `length` is at most 1,024.
        let length = u32::try_from(length).unwrap_or(0);
        Ok(Some(wire::console_read::Reply { error, length, text }))
    }

    fn context_create(
        &mut self,
        header: &Header,
        args: &wire::context_create::Args,
    ) -> Served<wire::context_create::Reply> {
        let slot = self.slots.get(args.stream as usize);
        if !slot.is_some_and(|slot| matches!(slot.binding, Binding::Free)) || !self.greeted {
            return Err(code::INVALID_VALUE);
        }
        let device = self.device(args.device)?;
        let id = args.context.0;
        self.contexts.reserve(id)?;
        self.bind(args.stream, Binding::Reserved);
        self.memory_job(MemoryJob::ContextCreate {
            to: reply_to(header),
            id,
            device,
            flags: args.flags,
            primary: args.primary,
            slot: args.stream,
        });
        Ok(None)
    }

    fn context_destroy(
        &mut self,
        header: &Header,
        args: &wire::context_destroy::Args,
    ) -> Served<wire::context_destroy::Reply> {
        let context = *self.contexts.get(args.context).ok_or(code::INVALID_CONTEXT)?;
        // A correct shim has waited, so the context is idle. Otherwise completion would query events that are destroyed.
        if !self.is_idle(context.context) {
            return Err(code::NOT_READY);
        }
        let allocations = self.forget(context.context);
        self.contexts.remove(args.context);
        if let Err(failed) = self.current.leave(&self.shared.driver, context.context) {
            limited!(warn, code = failed, "the dispatcher cannot leave a context that is being destroyed");
        }
        // The module helper may still have jobs of the context, so it gets this job first.
        self.shared.helper.memory_announced();
        self.module_job(ModuleJob::ContextDestroy { to: reply_to(header), context, allocations });
        Ok(None)
    }

    fn sm_resources(
        &mut self,
        _: &Header,
        args: &wire::sm_resources::Args,
    ) -> Served<wire::sm_resources::Reply> {
        let results = self.resources(args.path.0)?.results(&self.shared.driver)?;
        Ok(Some(wire::sm_resources::Reply { results }))
    }

    fn workqueue_limit(
        &mut self,
        _: &Header,
        args: &wire::workqueue_limit::Args,
    ) -> Served<wire::workqueue_limit::Reply> {
        let device = self.device(args.device)?;
        let (_, limit, _) = self.shared.driver.device_resource(device, kind::WORKQUEUE_CONFIG)?.queues();
        Ok(Some(wire::workqueue_limit::Reply { limit }))
    }

    fn tensor_map_tiled(
        &mut self,
        header: &Header,
        args: &wire::tensor_map_tiled::Args,
    ) -> Served<wire::tensor_map_tiled::Reply> {
        self.enter(header)?;
        Ok(Some(wire::tensor_map_tiled::Reply { descriptor: self.shared.driver.tensor_map_tiled(args)? }))
    }

    fn tensor_map_im2col(
        &mut self,
        header: &Header,
        args: &wire::tensor_map_im2col::Args,
    ) -> Served<wire::tensor_map_im2col::Reply> {
        self.enter(header)?;
        let descriptor = self.shared.driver.tensor_map_im2col(args)?;
        Ok(Some(wire::tensor_map_im2col::Reply { descriptor }))
    }

    fn tensor_map_im2col_wide(
        &mut self,
        header: &Header,
        args: &wire::tensor_map_im2col_wide::Args,
    ) -> Served<wire::tensor_map_im2col_wide::Reply> {
        self.enter(header)?;
        let descriptor = self.shared.driver.tensor_map_im2col_wide(args)?;
        Ok(Some(wire::tensor_map_im2col_wide::Reply { descriptor }))
    }

    fn tensor_map_replace(
        &mut self,
        header: &Header,
        args: &wire::tensor_map_replace::Args,
    ) -> Served<wire::tensor_map_replace::Reply> {
        self.enter(header)?;
        let replaced = self.shared.driver.tensor_map_replace(args.descriptor, args.address)?;
        Ok(Some(wire::tensor_map_replace::Reply { replaced }))
    }

    fn tensor_map_set_class(
        &mut self,
        header: &Header,
        args: &wire::tensor_map_set_class::Args,
    ) -> Served<wire::tensor_map_set_class::Reply> {
        self.enter(header)?;
        let (changed, effective) = self.shared.driver.tensor_map_set_class(args.descriptor, args.class)?;
        Ok(Some(wire::tensor_map_set_class::Reply { changed, effective }))
    }

    fn memory_free_ordered(
        &mut self,
        header: &Header,
        args: &wire::memory_free_ordered::Args,
    ) -> Served<wire::memory_free_ordered::Reply> {
        let address = args.address;
        let freed = self.map.freed(address);
        if freed.is_ok() {
            self.shared.completion.free_after(header.stream, header.sequence, address.0);
        }
        let refused = freed.is_err();
        let submitted = self.work(header, freed.map(|()| Operation::Nothing));
        if submitted.is_err() && !refused {
            self.shared.completion.keep(address.0);
        }
        Ok(submitted?.then(wire::memory_free_ordered::Reply {}))
    }

    fn mark(&mut self, _: &Header, args: &wire::mark::Args) -> Served<wire::mark::Reply> {
        self.ordered(QueueItem::Mark(args.slot));
        Ok(Some(wire::mark::Reply {}))
    }

    fn green_stream_create(
        &mut self,
        header: &Header,
        args: &wire::green_stream_create::Args,
    ) -> Served<wire::green_stream_create::Reply> {
        let caller = self.enter(header)?;
        let context = caller.context;
        let green = *self.plain.GreenContext.get(args.green).ok_or(code::INVALID_CONTEXT)?;
        if green.context != Some(context) || !self.is_free_for(args.stream.0, args.slot) {
            return Err(code::INVALID_VALUE);
        }
        let handle = self.shared.driver.cuGreenCtxStreamCreate(green.handle, NON_BLOCKING, args.priority)?;
        let stream = objects::GuestStream { handle, slot: args.slot, context, green: Some(args.green) };
        self.streams.insert(args.stream.0, stream)?;
        let target = WorkTarget::new(args.slot, handle, &caller, StreamOrder::Apart);
        self.bind(args.slot, Binding::Stream(target));
        Ok(Some(wire::green_stream_create::Reply {}))
    }

    fn stream_create(
        &mut self,
        header: &Header,
        args: &wire::stream_create::Args,
    ) -> Served<wire::stream_create::Reply> {
        let caller = self.enter(header)?;
        let context = caller.context;
        if !self.is_free_for(args.stream.0, args.slot) || args.flags & !NON_BLOCKING != 0 {
            return Err(code::INVALID_VALUE);
        }
        let handle = self.shared.driver.cuStreamCreateWithPriority(args.flags, args.priority)?;
        let stream = objects::GuestStream { handle, slot: args.slot, context, green: None };
        self.streams.insert(args.stream.0, stream)?;
        let order = if args.flags & NON_BLOCKING == 0 { StreamOrder::Blocking } else { StreamOrder::Apart };
        self.bind(args.slot, Binding::Stream(WorkTarget::new(args.slot, handle, &caller, order)));
        Ok(Some(wire::stream_create::Reply {}))
    }

    fn stream_destroy(
        &mut self,
        header: &Header,
        args: &wire::stream_destroy::Args,
    ) -> Served<wire::stream_destroy::Reply> {
        let stream = self.streams.remove(args.stream).ok_or(code::INVALID_HANDLE)?;
        self.bind(stream.slot, Binding::Free);
        self.ordered(QueueItem::StreamDestroy(ReplyTo::nowhere(reply_to(header).context), stream.handle));
        Ok(Some(wire::stream_destroy::Reply {}))
    }

    fn stream_set_attribute(
        &mut self,
        header: &Header,
        args: &wire::stream_set_attribute::Args,
    ) -> Served<wire::stream_set_attribute::Reply> {
        let context = self.enter(header)?.context;
        self.check_stream_attribute(args.attribute, &args.value)?;
        match self.slots.get(args.slot as usize).map(|slot| slot.binding) {
            Some(Binding::Stream(target)) if target.context == context => {
                self.shared.driver.stream_set_attribute(target.stream, args.attribute, &args.value)?;
                Ok(Some(wire::stream_set_attribute::Reply {}))
            }
            _ => Err(code::INVALID_HANDLE),
        }
    }

    fn event_create(
        &mut self,
        header: &Header,
        args: &wire::event_create::Args,
    ) -> Served<wire::event_create::Reply> {
        /// Timing, and the way a host thread waits; nothing that leaves the process.
        const ALLOWED: u32 = 1 | 2;
        let context = self.enter(header)?;
        if args.flags & !ALLOWED != 0 || !self.events.is_free(args.event.0) {
            return Err(code::INVALID_VALUE);
        }
        let handle = self.shared.driver.cuEventCreate(args.flags)?;
        self.events.insert(args.event.0, objects::GuestEvent { handle, context: context.context })?;
        Ok(Some(wire::event_create::Reply {}))
    }

    fn event_destroy(
        &mut self,
        header: &Header,
        args: &wire::event_destroy::Args,
    ) -> Served<wire::event_destroy::Reply> {
        let event = self.events.remove(args.event).ok_or(code::INVALID_HANDLE)?;
        let key = EventKey { context: event.context.serial, handle: event.handle };
        if !self.graphs.keeps(key) {
            self.ordered(QueueItem::EventDestroy(ReplyTo::nowhere(reply_to(header).context), event.handle));
        }
        Ok(Some(wire::event_destroy::Reply {}))
    }

    fn event_elapsed(
        &mut self,
        _: &Header,
        args: &wire::event_elapsed::Args,
    ) -> Served<wire::event_elapsed::Reply> {
        let handles = self.events.get(args.start).zip(self.events.get(args.end));
        let (start, end) = handles.ok_or(code::INVALID_HANDLE)?;
        self.current.set(&self.shared.driver, start.context)?;
        let milliseconds = self.shared.driver.event_elapsed(start.handle, end.handle)?;
        Ok(Some(wire::event_elapsed::Reply { milliseconds }))
    }

    fn graph_instantiate(
        &mut self,
        header: &Header,
        args: &wire::graph_instantiate::Args,
    ) -> Served<wire::graph_instantiate::Reply> {
        self.make_graph(header, args)
    }

    fn graph_set_work(
        &mut self,
        header: &Header,
        args: &wire::graph_set_work::Args,
    ) -> Served<wire::graph_set_work::Reply> {
        self.change_graph(header, args)
    }

    fn graph_update(
        &mut self,
        header: &Header,
        args: &wire::graph_update::Args,
    ) -> Served<wire::graph_update::Reply> {
        self.update_graph(header, args)
    }

    fn graph_destroy(
        &mut self,
        _: &Header,
        args: &wire::graph_destroy::Args,
    ) -> Served<wire::graph_destroy::Reply> {
        self.destroy_graph(args)
    }
}

impl Quick for Dispatcher {
    fn device_memory(
        &mut self,
        _: &Header,
        args: &wire::device_memory::Args,
    ) -> Served<wire::device_memory::Reply> {
        let device = self.device(args.device)?;
        // No memory job runs or waits, and the page is up to date: the statistics include all earlier calls of the guest.
        let stats = self.shared.memory_source.stats();
        let is_reported = self.memory_at_hand().is_some_and(|memory| memory.is_reported());
        if !is_reported || !stats.is_settled(device) {
            return Ok(None);
        }
        let (free, total) = stats.info(device);
        Ok(Some(wire::device_memory::Reply { free, total }))
    }

    fn memory_allocate(
        &mut self,
        header: &Header,
        args: &wire::memory_allocate::Args,
    ) -> Served<wire::memory_allocate::Reply> {
        let GuestContext { context, device, .. } = self.context(header)?;
        let bytes = args.bytes.0;
        let address = self.at_hand(|memory| memory.allocate_at_hand(args.pool, device, bytes));
        Ok(address.flatten().map(|address| {
            self.map.allocated(address, bytes, context);
            wire::memory_allocate::Reply { address }
        }))
    }

    fn memory_free(
        &mut self,
        _: &Header,
        args: &wire::memory_free::Args,
    ) -> Served<wire::memory_free::Reply> {
        self.map.freed(args.address)?;
        let freed =
            self.nothing_waits() && self.at_hand(|memory| memory.free_at_hand(args.address.0)) == Some(true);
        Ok(freed.then_some(wire::memory_free::Reply {}))
    }

    fn va_range_unmap(
        &mut self,
        _: &Header,
        args: &wire::va_range_unmap::Args,
    ) -> Served<wire::va_range_unmap::Reply> {
        self.map.unmapped(args.address, args.bytes);
        Ok(None)
    }
}

impl Dispatcher {
    /// The session's memory, if no thread uses it and no job waits for it: an operation that needs no call of the driver is
    /// then done at once, without the helper.
    fn memory_at_hand(&self) -> Option<MutexGuard<'_, SessionMemory>> {
        if self.shared.helper.memory_is_idle() { self.shared.memory.try_lock().ok() } else { None }
    }

    /// Uses the session's memory without the helper, which learns of changed idle bytes.
    fn at_hand<T>(&self, use_memory: impl FnOnce(&mut SessionMemory) -> T) -> Option<T> {
        let mut memory = self.memory_at_hand()?;
        let used = use_memory(&mut memory);
        let begins_watch = memory.begin_watch();
        drop(memory);
        if begins_watch {
            self.shared.helper.tend_idle();
        }
        Some(used)
    }
}

impl Tables for Dispatcher {
    fn device(&self, Ordinal(ordinal): Ordinal) -> Result<i32, Code> {
        self.devices.get(ordinal as usize).copied().ok_or(code::INVALID_DEVICE)
    }

    fn module(&self, id: Id<Module>) -> Result<ModuleRef, Code> {
        let module = self.modules.get(id).ok_or(code::INVALID_HANDLE)?;
        Ok(ModuleRef { id, image: module.image, context: module.context })
    }

    fn take_module(&mut self, id: Id<Module>) -> Result<ModuleRef, Code> {
        let module = self.modules.remove(id).ok_or(code::INVALID_HANDLE)?;
        self.map.module_gone(id);
        self.graphs.module_gone(id);
        self.texture_references.forget(|reference| reference.module == id);
        self.surface_references.forget(|reference| reference.module == id);
        for function in module.functions {
            self.functions.remove(function);
        }
        Ok(ModuleRef { id, image: module.image, context: module.context })
    }

    fn function(&self, id: Id<Function>) -> Result<objects::GuestFunction, Code> {
        self.functions.get(id).copied().ok_or(code::INVALID_HANDLE)
    }

    fn reserve_module(&mut self, id: Id<Module>) -> Result<ReservedId<Module>, Code> {
        self.modules.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn reserve_function(&mut self, id: Id<Function>) -> Result<ReservedId<Function>, Code> {
        self.functions.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn link(&self, id: Id<Link>) -> Result<Handle, Code> {
        self.plain.Link.get(id).map(|link| link.handle).ok_or(code::INVALID_HANDLE)
    }

    fn take_link(&mut self, id: Id<Link>) -> Result<Handle, Code> {
        self.plain.Link.remove(id).map(|link| link.handle).ok_or(code::INVALID_HANDLE)
    }

    fn reserve_link(&mut self, id: Id<Link>) -> Result<ReservedId<Link>, Code> {
        self.plain.Link.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn context_of(&self, id: Id<Context>) -> Result<GuestContext, Code> {
        self.contexts.get(id).copied().ok_or(code::INVALID_CONTEXT)
    }

    fn resources(&self, description: &[u8]) -> Result<ResolvedResources, Code> {
        let ResourceDescription { path, more, queues } =
            ResourceDescription::decode(description).map_err(|_| code::INVALID_VALUE)?;
        let green = |id| self.plain.GreenContext.get(id).map(|green| green.handle).ok_or(code::INVALID_VALUE);
        let origin = match path.origin {
            Origin::Device(ordinal) => ResolvedOrigin::Device(self.device(ordinal)?),
            Origin::Green(id) => ResolvedOrigin::Green(green(id)?),
        };
        let queues = match queues {
            QueueChoice::Any => ResolvedQueues::Any,
            QueueChoice::Config { limit, scope } => ResolvedQueues::Config { limit, scope },
            QueueChoice::Of(Origin::Device(ordinal)) => {
                let device = self.device(ordinal)?;
                let primary = self.contexts.find(|known| known.primary && known.device == device);
                let context = primary.ok_or(code::INVALID_CONTEXT)?.context;
                ResolvedQueues::OfPrimary { context, device }
            }
            QueueChoice::Of(Origin::Green(id)) => ResolvedQueues::OfGreen(green(id)?),
        };
        Ok(ResolvedResources { origin, splits: path.splits, more, queues })
    }

    fn take_green(&mut self, id: Id<GreenContext>) -> Result<objects::GuestObject, Code> {
        // A correct shim has destroyed them.
        if self.streams.any(|stream| stream.green == Some(id)) {
            return Err(code::INVALID_VALUE);
        }
        self.plain.GreenContext.remove(id).ok_or(code::INVALID_HANDLE)
    }

    fn reserve_green(&mut self, id: Id<GreenContext>) -> Result<ReservedId<GreenContext>, Code> {
        self.plain.GreenContext.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn conditional_graph(&self, id: Id<ConditionalGraph>) -> Result<ConditionalSerial, Code> {
        self.plain.ConditionalGraph.get(id).map(|graph| graph.handle).ok_or(code::INVALID_HANDLE)
    }

    fn take_conditional_graph(&mut self, id: Id<ConditionalGraph>) -> Result<ConditionalSerial, Code> {
        self.plain.ConditionalGraph.remove(id).map(|graph| graph.handle).ok_or(code::INVALID_HANDLE)
    }

    fn reserve_conditional_graph(
        &mut self,
        id: Id<ConditionalGraph>,
    ) -> Result<ReservedId<ConditionalGraph>, Code> {
        self.plain.ConditionalGraph.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn array(&self, id: Id<Array>) -> Result<GuestArray, Code> {
        self.arrays.get(id).copied().ok_or(code::INVALID_HANDLE)
    }

    fn take_array(&mut self, id: Id<Array>) -> Result<GuestArray, Code> {
        if self.array(id)?.level_of.is_some() {
            return Err(code::INVALID_HANDLE);
        }
        self.graphs.arrays_gone(&HashSet::from([id]));
        self.arrays.remove(id).ok_or(code::INVALID_HANDLE)
    }

    fn reserve_array(&mut self, id: Id<Array>) -> Result<ReservedId<Array>, Code> {
        self.arrays.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn mipmapped_to_name(&mut self, id: Id<MipmappedArray>) -> Result<GuestMipmapped, Code> {
        let whole = self.mipmapped.get_mut(id).ok_or(code::INVALID_HANDLE)?;
        if whole.names == limits::LEVEL_NAMES {
            return Err(code::OUT_OF_MEMORY);
        }
        whole.names += 1;
        Ok(whole.of)
    }

    fn take_mipmapped(&mut self, id: Id<MipmappedArray>) -> Result<GuestMipmapped, Code> {
        let whole = self.mipmapped.remove(id).ok_or(code::INVALID_HANDLE)?;
        self.graphs.arrays_gone(&whole.levels);
        for level in whole.levels {
            self.arrays.remove(level);
        }
        Ok(whole.of)
    }

    fn reserve_mipmapped(&mut self, id: Id<MipmappedArray>) -> Result<ReservedId<MipmappedArray>, Code> {
        self.mipmapped.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn texture_reference(&self, id: Id<TextureReference>) -> Result<GuestReference, Code> {
        self.texture_references.get(id).copied().ok_or(code::INVALID_HANDLE)
    }

    fn reserve_texture_reference(
        &mut self,
        id: Id<TextureReference>,
    ) -> Result<ReservedId<TextureReference>, Code> {
        self.texture_references.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn surface_reference(&self, id: Id<SurfaceReference>) -> Result<GuestReference, Code> {
        self.surface_references.get(id).copied().ok_or(code::INVALID_HANDLE)
    }

    fn reserve_surface_reference(
        &mut self,
        id: Id<SurfaceReference>,
    ) -> Result<ReservedId<SurfaceReference>, Code> {
        self.surface_references.reserve(id)?;
        Ok(ReservedId::new(id, Arc::clone(&self.shared.notices)))
    }

    fn image(&self, resource: ImageResource) -> Result<ResolvedImage, Code> {
        self.resolved_image(resource)
    }

    fn hold(&self, address: u64, bytes: u64) -> Result<HeldRange, Code> {
        self.map.hold(address, bytes)
    }

    fn attributes(&self, attributes: LaunchAttributes<'_>) -> Result<Vec<LaunchAttribute>, Code> {
        let mut list = AttributeList::new();
        self.read_attributes(attributes, &mut list)?;
        Ok(list.as_slice().to_vec())
    }
}

impl Dispatcher {
    /// True if no stream has this id or this slot, and the work of earlier streams of the slot is complete: later work of a slot may pass
    /// the end of its stream.
    fn is_free_for(&self, stream: Id<Stream>, number: u32) -> bool {
        let is_free = |slot: &StreamSlot| {
            matches!(slot.binding, Binding::Free) && slot.last == self.shared.session.completed(number)
        };
        self.slots.get(number as usize).is_some_and(is_free) && self.streams.is_free(stream)
    }

    /// The facts that the guest keeps about a device.
    fn describe(&self, ordinal: Ordinal) -> Result<wire::device_info::Reply, Code> {
        let driver = &self.shared.driver;
        let device = self.device(ordinal)?;
        let mut attributes = Attributes([0; limits::DEVICE_ATTRIBUTES]);
        for (id, value) in (0_i32..).zip(&mut attributes.0) {
            // An attribute unknown to this driver is 0.
            let answered = || driver.device_attribute(id.cast_unsigned(), device).unwrap_or(0);
            *value = guest_mask(id).unwrap_or_else(answered);
        }
        correct_dependent(&mut attributes.0);
        let prioritised = attributes.0[STREAM_PRIORITIES_SUPPORTED as usize] != 0;
        let (least_priority, greatest_priority) = match driver.cuCtxGetStreamPriorityRange() {
            Ok(range) => range,
            Err(_) if prioritised => PRIORITIES,
            Err(_) => (0, 0),
        };
        Ok(wire::device_info::Reply {
            name: driver.device_name(device)?,
            uuid: driver.device_uuid(device)?,
            memory: self.shared.memory_source.stats().info(device).1,
            least_priority,
            greatest_priority,
            attributes,
            // Unknown to drivers before CUDA 13.
            host_atomics: driver.host_atomics(device).unwrap_or_default(),
        })
    }
}
