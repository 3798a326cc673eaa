//! The calls of the wire table, one method each.

use super::{Binding, Dispatcher, outcome, reply_to};
use crate::{
    helper::jobs::{MemoryJob, ModuleJob, PoolJob, Question, VirtualJob},
    memory,
    session::{ReplyTo, objects},
    submit::{Operation, Order, Payload, Target, lanes::ContextRef, queue::Item},
};
use sluice_cuda_abi::{attributes::guest_mask, symbols};
use sluice_driver::{Code, Rows, code};
use sluice_protocol::{
    calls::{self, Attributes, Handler, Outcome, wire},
    handle::{Function, Id, Module},
    limits,
    record::Header,
};
use sluice_runtime::limited;
use std::ffi::CString;

/// `CUdevice_attribute` that says whether streams have priorities.
const STREAM_PRIORITIES_SUPPORTED: u32 = 78;
/// What devices with priorities have answered for years, for a guest that asks before there is a context to ask.
const PRIORITIES: (i32, i32) = (0, -5);

/// Turns a result into a call's outcome.
fn answer<T, R>(result: Result<T, Code>, reply: impl FnOnce(T) -> R) -> Outcome<R> {
    match result {
        Ok(value) => Outcome::Done(reply(value)),
        Err(failed) => Outcome::Failed(failed),
    }
}

/// The outcome of a call that a helper took over, or that failed before.
fn later<R>(result: Result<(), Code>) -> Outcome<R> {
    match result {
        Ok(()) => Outcome::Later,
        Err(failed) => Outcome::Failed(failed),
    }
}

const NO_PAYLOAD: Payload<'static> = Payload { attributes: &[], parameters: &[] };

impl Handler for Dispatcher {
    fn session_hello(
        &mut self,
        _header: &Header,
        args: wire::session_hello::Args<'_>,
    ) -> Outcome<wire::session_hello::Reply> {
        if args.version != calls::VERSION {
            limited!(warn, version = args.version, "the shim speaks another version");
            return Outcome::Failed(code::SYSTEM_DRIVER_MISMATCH);
        }
        limited!(info, process = args.process, "session begins");
        let known = self.shared.driver.version().and_then(|version| {
            let devices = self.shared.driver.device_count()?.min(limits::DEVICES);
            // A device whose memory nobody lends is none.
            let lent = self.shared.provision.books().devices().and_then(|lent| u32::try_from(lent).ok());
            Ok((version.min(symbols::CUDA_VERSION), lent.map_or(devices, |lent| devices.min(lent))))
        });
        self.greeted = known.is_ok();
        if let Ok((_, devices)) = known {
            self.devices = devices;
            self.shared.helper.memory(MemoryJob::Hello { process: args.process });
        }
        answer(known, |(driver_version, devices)| wire::session_hello::Reply { driver_version, devices })
    }

    fn device_info(
        &mut self,
        _header: &Header,
        args: wire::device_info::Args<'_>,
    ) -> Outcome<wire::device_info::Reply> {
        match self.describe(args.device) {
            Ok(reply) => Outcome::Done(reply),
            Err(failed) => Outcome::Failed(failed),
        }
    }

    fn window_reserve(
        &mut self,
        header: &Header,
        args: wire::window_reserve::Args<'_>,
    ) -> Outcome<wire::window_reserve::Reply> {
        let job = MemoryJob::Window { to: reply_to(header), base: args.base, bytes: args.bytes.0 };
        self.shared.helper.memory(job);
        Outcome::Later
    }

    fn console_read(
        &mut self,
        _header: &Header,
        _args: wire::console_read::Args<'_>,
    ) -> Outcome<wire::console_read::Reply> {
        let mut text = [0; 1024];
        let (error, length) = self.shared.session.fetch_text(&mut text);
        // At most 1,024.
        let length = u32::try_from(length).unwrap_or(0);
        Outcome::Done(wire::console_read::Reply { error, length, text })
    }

    fn context_create(
        &mut self,
        header: &Header,
        args: wire::context_create::Args<'_>,
    ) -> Outcome<wire::context_create::Reply> {
        let free =
            self.slots.get(args.stream as usize).is_some_and(|slot| matches!(slot.binding, Binding::Free));
        if !free || !self.greeted {
            return Outcome::Failed(code::INVALID_VALUE);
        }
        if args.device >= self.devices {
            return Outcome::Failed(code::INVALID_DEVICE);
        }
        let id = args.context.0;
        if let Err(failed) = self.contexts.reserve(id) {
            return Outcome::Failed(failed);
        }
        self.bind(args.stream, Binding::Reserved);
        self.shared.helper.memory(MemoryJob::ContextCreate {
            to: reply_to(header),
            id,
            device: args.device,
            flags: args.flags,
            primary: args.primary,
            slot: args.stream,
        });
        Outcome::Later
    }

    fn context_destroy(
        &mut self,
        header: &Header,
        args: wire::context_destroy::Args<'_>,
    ) -> Outcome<wire::context_destroy::Reply> {
        let Some(context) = self.contexts.get(args.context).copied() else {
            return Outcome::Failed(code::INVALID_CONTEXT);
        };
        // The guest has waited, so this holds, unless it lies; then its events would be looked at after they are gone.
        if !self.is_idle(context.context) {
            return Outcome::Failed(code::NOT_READY);
        }
        let allocations = self.forget(context.context);
        self.contexts.remove(args.context);
        if let Err(failed) = self.current.leave(&self.shared.driver, context.context) {
            limited!(warn, code = failed, "the dispatcher cannot leave a context that ends");
        }
        // The module helper may hold jobs of the context, and comes first.
        let question = Question::ContextDestroy { context, allocations };
        self.shared.helper.memory_announced();
        self.shared.helper.module(ModuleJob { to: reply_to(header), context: None, question });
        Outcome::Later
    }

    fn context_limit(
        &mut self,
        header: &Header,
        args: wire::context_limit::Args<'_>,
    ) -> Outcome<wire::context_limit::Reply> {
        later(self.context(header).map(|context| {
            let (to, context) = (reply_to(header), context.context);
            self.shared.helper.memory(MemoryJob::Limit { to, context, limit: args.limit });
        }))
    }

    fn context_set_limit(
        &mut self,
        header: &Header,
        args: wire::context_set_limit::Args<'_>,
    ) -> Outcome<wire::context_set_limit::Reply> {
        later(self.context(header).map(|context| {
            let to = reply_to(header);
            let (limit, value) = (args.limit, args.value);
            self.shared.helper.memory(MemoryJob::SetLimit { to, context, limit, value });
        }))
    }

    fn memory_allocate(
        &mut self,
        header: &Header,
        args: wire::memory_allocate::Args<'_>,
    ) -> Outcome<wire::memory_allocate::Reply> {
        match self.allocate(header, 0, args.bytes.0) {
            Ok(Some(address)) => Outcome::Done(wire::memory_allocate::Reply { address }),
            allocated => later(allocated.map(drop)),
        }
    }

    fn pool_allocate(
        &mut self,
        header: &Header,
        args: wire::pool_allocate::Args<'_>,
    ) -> Outcome<wire::pool_allocate::Reply> {
        match self.allocate(header, args.pool, args.bytes.0) {
            Ok(Some(address)) => Outcome::Done(wire::pool_allocate::Reply { address }),
            allocated => later(allocated.map(drop)),
        }
    }

    fn memory_free_ordered(
        &mut self,
        header: &Header,
        args: wire::memory_free_ordered::Args<'_>,
    ) -> Outcome<wire::memory_free_ordered::Reply> {
        let address = args.address;
        let freed = self.map.freed(address);
        if freed.is_ok() {
            self.shared.completion.free_after(header.stream, header.sequence, address.0);
        }
        let refused = freed.is_err();
        let submitted = self.work(header, freed.map(|()| Operation::Nothing), NO_PAYLOAD);
        if submitted.is_err() && !refused {
            self.shared.completion.keep(address.0);
        }
        outcome(submitted, wire::memory_free_ordered::Reply {})
    }

    fn pool_threshold(
        &mut self,
        header: &Header,
        args: wire::pool_threshold::Args<'_>,
    ) -> Outcome<wire::pool_threshold::Reply> {
        let (to, pool, bytes) = (reply_to(header), args.pool, args.bytes);
        later(self.device(args.device).map(|device| {
            self.ordered(Item::Memory(MemoryJob::Pool(PoolJob::Threshold { to, pool, device, bytes })));
        }))
    }

    fn pool_trim(
        &mut self,
        header: &Header,
        args: wire::pool_trim::Args<'_>,
    ) -> Outcome<wire::pool_trim::Reply> {
        let job = PoolJob::Trim { to: reply_to(header), pool: args.pool, keep: args.keep };
        self.ordered(Item::Memory(MemoryJob::Pool(job)));
        Outcome::Later
    }

    fn pool_usage(
        &mut self,
        header: &Header,
        args: wire::pool_usage::Args<'_>,
    ) -> Outcome<wire::pool_usage::Reply> {
        let (to, pool, reset) = (reply_to(header), args.pool, args.reset);
        later(self.device(args.device).map(|device| {
            self.ordered(Item::Memory(MemoryJob::Pool(PoolJob::Usage { to, pool, device, reset })));
        }))
    }

    fn pool_end(
        &mut self,
        header: &Header,
        args: wire::pool_end::Args<'_>,
    ) -> Outcome<wire::pool_end::Reply> {
        let job = PoolJob::End { to: reply_to(header), pool: args.pool };
        self.ordered(Item::Memory(MemoryJob::Pool(job)));
        Outcome::Later
    }

    fn block_create(
        &mut self,
        header: &Header,
        args: wire::block_create::Args<'_>,
    ) -> Outcome<wire::block_create::Reply> {
        let device = self.device(args.device);
        self.virtual_memory(header, device.map(|device| VirtualJob::Create { device, bytes: args.bytes }))
    }

    fn block_release(
        &mut self,
        header: &Header,
        args: wire::block_release::Args<'_>,
    ) -> Outcome<wire::block_release::Reply> {
        self.virtual_memory(header, Ok(VirtualJob::Release { block: args.block }))
    }

    fn block_map(
        &mut self,
        header: &Header,
        args: wire::block_map::Args<'_>,
    ) -> Outcome<wire::block_map::Reply> {
        let wire::block_map::Args { block, address, bytes, .. } = args;
        self.virtual_memory(header, Ok(VirtualJob::Map { block, address, bytes }))
    }

    fn range_access(
        &mut self,
        header: &Header,
        args: wire::range_access::Args<'_>,
    ) -> Outcome<wire::range_access::Reply> {
        let wire::range_access::Args { address, bytes, access, .. } = args;
        let device = self.device(args.device);
        let job = device.map(|device| VirtualJob::Access { address, bytes, device, access });
        self.virtual_memory(header, job)
    }

    fn range_unmap(
        &mut self,
        header: &Header,
        args: wire::range_unmap::Args<'_>,
    ) -> Outcome<wire::range_unmap::Reply> {
        let wire::range_unmap::Args { address, bytes, .. } = args;
        self.map.unmapped(address, bytes);
        self.virtual_memory(header, Ok(VirtualJob::Unmap { address, bytes }))
    }

    fn range_reserve(
        &mut self,
        header: &Header,
        args: wire::range_reserve::Args<'_>,
    ) -> Outcome<wire::range_reserve::Reply> {
        let wire::range_reserve::Args { bytes, alignment, hint, .. } = args;
        self.virtual_memory(header, Ok(VirtualJob::Reserve { bytes, alignment, hint }))
    }

    fn range_free(
        &mut self,
        header: &Header,
        args: wire::range_free::Args<'_>,
    ) -> Outcome<wire::range_free::Reply> {
        let wire::range_free::Args { address, bytes, .. } = args;
        self.virtual_memory(header, Ok(VirtualJob::FreeRange { address, bytes }))
    }

    fn block_share(
        &mut self,
        header: &Header,
        args: wire::block_share::Args<'_>,
    ) -> Outcome<wire::block_share::Reply> {
        self.virtual_memory(header, Ok(VirtualJob::Share { block: args.block }))
    }

    fn block_open(
        &mut self,
        header: &Header,
        args: wire::block_open::Args<'_>,
    ) -> Outcome<wire::block_open::Reply> {
        let device = self.device(args.device);
        self.virtual_memory(header, device.map(|device| VirtualJob::Open { device, share: args.share }))
    }

    fn memory_share(
        &mut self,
        header: &Header,
        args: wire::memory_share::Args<'_>,
    ) -> Outcome<wire::memory_share::Reply> {
        let job = MemoryJob::Share { to: reply_to(header), address: args.address.0 };
        self.ordered(Item::Memory(job));
        Outcome::Later
    }

    fn memory_open(
        &mut self,
        header: &Header,
        args: wire::memory_open::Args<'_>,
    ) -> Outcome<wire::memory_open::Reply> {
        later(self.context(header).map(|context| {
            self.shared.helper.memory(MemoryJob::Open {
                to: reply_to(header),
                context: context.context,
                device: context.device,
                shared: memory::Shared { share: args.share, offset: args.offset },
                bytes: args.bytes,
            });
        }))
    }

    fn memory_free(
        &mut self,
        header: &Header,
        args: wire::memory_free::Args<'_>,
    ) -> Outcome<wire::memory_free::Reply> {
        let address = args.address.0;
        if let Err(failed) = self.map.freed(args.address) {
            return Outcome::Failed(failed);
        }
        if self.nothing_waits()
            && self.memory_at_hand().is_some_and(|mut memory| memory.free_at_hand(address))
        {
            return Outcome::Done(wire::memory_free::Reply {});
        }
        self.ordered(Item::Memory(MemoryJob::Free { to: reply_to(header), address }));
        Outcome::Later
    }

    fn memory_info(
        &mut self,
        header: &Header,
        _args: wire::memory_info::Args<'_>,
    ) -> Outcome<wire::memory_info::Reply> {
        let device = match self.context(header) {
            Ok(context) => context.device,
            Err(failed) => return Outcome::Failed(failed),
        };
        // Nothing under way and nothing queued: the books are what the guest's earlier calls made them.
        let books = self.shared.provision.books();
        if self.shared.helper.memory_is_idle() && books.is_settled(device) {
            let (free, total) = books.info(device);
            return Outcome::Done(wire::memory_info::Reply { free, total });
        }
        self.ordered(Item::Memory(MemoryJob::Info { to: reply_to(header), device }));
        Outcome::Later
    }

    fn process_info(
        &mut self,
        header: &Header,
        args: wire::process_info::Args<'_>,
    ) -> Outcome<wire::process_info::Reply> {
        later(self.device(args.device).map(|device| {
            let job = MemoryJob::Process { to: reply_to(header), device, index: args.index };
            self.shared.helper.memory(job);
        }))
    }

    fn device_memory(
        &mut self,
        header: &Header,
        args: wire::device_memory::Args<'_>,
    ) -> Outcome<wire::device_memory::Reply> {
        later(self.device(args.device).map(|device| {
            self.ordered(Item::Memory(MemoryJob::Info { to: reply_to(header), device }));
        }))
    }

    fn copy_to_device(
        &mut self,
        header: &Header,
        args: wire::copy_to_device::Args<'_>,
    ) -> Outcome<wire::copy_to_device::Reply> {
        let (to, from) = (self.map.device(args.to.0, args.bytes), self.map.host(args.from.0, args.bytes));
        let operation = to.and_then(|to| Ok(Operation::CopyToDevice { to, from: from? }));
        let operation = unless_empty(args.bytes, operation);
        outcome(self.work(header, operation, NO_PAYLOAD), wire::copy_to_device::Reply {})
    }

    fn copy_from_device(
        &mut self,
        header: &Header,
        args: wire::copy_from_device::Args<'_>,
    ) -> Outcome<wire::copy_from_device::Reply> {
        let (to, from) = (self.map.host(args.to.0, args.bytes), self.map.device(args.from.0, args.bytes));
        let operation = to.and_then(|to| Ok(Operation::CopyFromDevice { to, from: from? }));
        let operation = unless_empty(args.bytes, operation);
        outcome(self.work(header, operation, NO_PAYLOAD), wire::copy_from_device::Reply {})
    }

    fn copy_on_device(
        &mut self,
        header: &Header,
        args: wire::copy_on_device::Args<'_>,
    ) -> Outcome<wire::copy_on_device::Reply> {
        let (to, from) = (self.map.device(args.to.0, args.bytes), self.map.device(args.from.0, args.bytes));
        let operation = to.and_then(|to| Ok(Operation::CopyOnDevice { to, from: from? }));
        let operation = unless_empty(args.bytes, operation);
        outcome(self.work(header, operation, NO_PAYLOAD), wire::copy_on_device::Reply {})
    }

    fn copy_rows(
        &mut self,
        header: &Header,
        args: wire::copy_rows::Args<'_>,
    ) -> Outcome<wire::copy_rows::Reply> {
        let operation = self.rows(&args);
        outcome(self.work(header, operation, NO_PAYLOAD), wire::copy_rows::Reply {})
    }

    fn fill(&mut self, header: &Header, args: wire::fill::Args<'_>) -> Outcome<wire::fill::Reply> {
        let operation = self.filling(&args);
        outcome(self.work(header, operation, NO_PAYLOAD), wire::fill::Reply {})
    }

    fn module_load(
        &mut self,
        header: &Header,
        args: wire::module_load::Args<'_>,
    ) -> Outcome<wire::module_load::Reply> {
        later(self.load(header, &args))
    }

    fn module_unload(
        &mut self,
        header: &Header,
        args: wire::module_unload::Args<'_>,
    ) -> Outcome<wire::module_unload::Reply> {
        let Some(module) = self.modules.remove(args.module) else {
            return Outcome::Failed(code::INVALID_HANDLE);
        };
        self.map.module_gone(args.module);
        for function in module.functions {
            self.functions.remove(function);
        }
        let question = Question::Unload { image: module.image };
        let context = self.caller_for(header, module.context);
        self.ordered(Item::Module(ModuleJob { to: reply_to(header), context, question }));
        Outcome::Later
    }

    fn module_function(
        &mut self,
        header: &Header,
        args: wire::module_function::Args<'_>,
    ) -> Outcome<wire::module_function::Reply> {
        later(self.module(args.module).and_then(|(image, context)| {
            let name = CString::new(args.name.0).map_err(|_| code::INVALID_VALUE)?;
            self.functions.reserve(args.function.0)?;
            let question = Question::Function { module: args.module, image, id: args.function.0, name };
            self.ask(header, context, question);
            Ok(())
        }))
    }

    fn module_global(
        &mut self,
        header: &Header,
        args: wire::module_global::Args<'_>,
    ) -> Outcome<wire::module_global::Reply> {
        later(self.module(args.module).and_then(|(image, context)| {
            let name = CString::new(args.name.0).map_err(|_| code::INVALID_VALUE)?;
            self.ask(header, context, Question::Global { module: args.module, image, name });
            Ok(())
        }))
    }

    fn module_function_count(
        &mut self,
        header: &Header,
        args: wire::module_function_count::Args<'_>,
    ) -> Outcome<wire::module_function_count::Reply> {
        later(self.module(args.module).map(|(image, context)| {
            self.ask(header, context, Question::FunctionCount { image });
        }))
    }

    fn module_function_name(
        &mut self,
        header: &Header,
        args: wire::module_function_name::Args<'_>,
    ) -> Outcome<wire::module_function_name::Reply> {
        later(self.module(args.module).and_then(|(image, context)| {
            let into = self.map.hold(args.into, args.bytes.0)?;
            self.ask(header, context, Question::FunctionName { image, index: args.index, into });
            Ok(())
        }))
    }

    fn function_set_attribute(
        &mut self,
        header: &Header,
        args: wire::function_set_attribute::Args<'_>,
    ) -> Outcome<wire::function_set_attribute::Reply> {
        later(self.function(args.function).map(|function| {
            let (attribute, value) = (args.attribute, args.value);
            let question = Question::SetAttribute { code: function.code, attribute, value };
            self.ask(header, function.context, question);
        }))
    }

    fn occupancy_blocks(
        &mut self,
        header: &Header,
        args: wire::occupancy_blocks::Args<'_>,
    ) -> Outcome<wire::occupancy_blocks::Reply> {
        later(self.function(args.function).map(|function| {
            let (block, shared, flags) = (args.block, args.shared, args.flags);
            let question = Question::Blocks { function: function.code.handle(), block, shared, flags };
            self.ask(header, function.context, question);
        }))
    }

    fn occupancy_block_size(
        &mut self,
        header: &Header,
        args: wire::occupancy_block_size::Args<'_>,
    ) -> Outcome<wire::occupancy_block_size::Reply> {
        later(self.function(args.function).map(|function| {
            let (shared, limit, flags) = (args.shared, args.limit, args.flags);
            let question = Question::BlockSize { function: function.code.handle(), shared, limit, flags };
            self.ask(header, function.context, question);
        }))
    }

    fn occupancy_shared(
        &mut self,
        header: &Header,
        args: wire::occupancy_shared::Args<'_>,
    ) -> Outcome<wire::occupancy_shared::Reply> {
        later(self.function(args.function).map(|function| {
            let (blocks, block) = (args.blocks, args.block);
            let question = Question::Shared { function: function.code.handle(), blocks, block };
            self.ask(header, function.context, question);
        }))
    }

    fn occupancy_clusters(
        &mut self,
        header: &Header,
        args: wire::occupancy_clusters::Args<'_>,
    ) -> Outcome<wire::occupancy_clusters::Reply> {
        later(self.function(args.function).and_then(|function| {
            let question = self.clusters(&function, &args)?;
            self.ask(header, function.context, question);
            Ok(())
        }))
    }

    fn launch(&mut self, header: &Header, args: wire::launch::Args<'_>) -> Outcome<wire::launch::Reply> {
        outcome(self.launch_kernel(header, &args), wire::launch::Reply {})
    }

    fn stream_create(
        &mut self,
        header: &Header,
        args: wire::stream_create::Args<'_>,
    ) -> Outcome<wire::stream_create::Reply> {
        answer(self.create_stream(header, &args), |()| wire::stream_create::Reply {})
    }

    fn stream_destroy(
        &mut self,
        header: &Header,
        args: wire::stream_destroy::Args<'_>,
    ) -> Outcome<wire::stream_destroy::Reply> {
        let removed = self.streams.remove(args.stream).ok_or(code::INVALID_HANDLE);
        answer(removed, |stream| {
            self.bind(stream.slot, Binding::Free);
            self.ordered(Item::StreamDestroy(ReplyTo::nowhere(reply_to(header).context), stream.handle));
            wire::stream_destroy::Reply {}
        })
    }

    fn stream_wait(
        &mut self,
        header: &Header,
        args: wire::stream_wait::Args<'_>,
    ) -> Outcome<wire::stream_wait::Reply> {
        let event = self.events.get(args.event).ok_or(code::INVALID_HANDLE);
        let operation = event.map(|event| Operation::Wait { event: event.handle, flags: args.flags });
        outcome(self.work(header, operation, NO_PAYLOAD), wire::stream_wait::Reply {})
    }

    fn event_create(
        &mut self,
        header: &Header,
        args: wire::event_create::Args<'_>,
    ) -> Outcome<wire::event_create::Reply> {
        /// Timing and how a host thread waits; nothing that leaves the process.
        const ALLOWED: u32 = 1 | 2;
        let created = self.enter(header).and_then(|context| {
            if args.flags & !ALLOWED != 0 || !self.events.is_free(args.event.0) {
                return Err(code::INVALID_VALUE);
            }
            let handle = self.shared.driver.event_create(args.flags)?;
            self.events.insert(args.event.0, objects::Event { handle, context: context.context })
        });
        answer(created, |()| wire::event_create::Reply {})
    }

    fn event_destroy(
        &mut self,
        header: &Header,
        args: wire::event_destroy::Args<'_>,
    ) -> Outcome<wire::event_destroy::Reply> {
        let removed = self.events.remove(args.event).ok_or(code::INVALID_HANDLE);
        answer(removed, |event| {
            self.ordered(Item::EventDestroy(ReplyTo::nowhere(reply_to(header).context), event.handle));
            wire::event_destroy::Reply {}
        })
    }

    fn event_record(
        &mut self,
        header: &Header,
        args: wire::event_record::Args<'_>,
    ) -> Outcome<wire::event_record::Reply> {
        let event = self.events.get(args.event).ok_or(code::INVALID_HANDLE);
        let operation = event.map(|event| Operation::Record { event: event.handle, flags: args.flags });
        outcome(self.work(header, operation, NO_PAYLOAD), wire::event_record::Reply {})
    }

    fn event_elapsed(
        &mut self,
        _header: &Header,
        args: wire::event_elapsed::Args<'_>,
    ) -> Outcome<wire::event_elapsed::Reply> {
        let handles = self.events.get(args.start).zip(self.events.get(args.end));
        let elapsed = handles.ok_or(code::INVALID_HANDLE).and_then(|(start, end)| {
            self.current.set(&self.shared.driver, start.context)?;
            self.shared.driver.event_elapsed(start.handle, end.handle)
        });
        answer(elapsed, |milliseconds| wire::event_elapsed::Reply { milliseconds })
    }
}

/// What moves no bytes is no operation, wherever it points: the driver accepts that, too.
fn unless_empty(bytes: u64, operation: Result<Operation, Code>) -> Result<Operation, Code> {
    if bytes == 0 { Ok(Operation::Nothing) } else { operation }
}

impl Dispatcher {
    /// Hands a question about the guest's own mappings to the memory helper, behind everything that was posted.
    fn virtual_memory<R>(&mut self, header: &Header, job: Result<VirtualJob, Code>) -> Outcome<R> {
        later(job.map(|job| {
            self.ordered(Item::Memory(MemoryJob::Virtual { to: reply_to(header), job }));
        }))
    }

    /// A device of the session.
    fn device(&self, ordinal: u32) -> Result<i32, Code> {
        let known = (ordinal < self.devices).then_some(ordinal).ok_or(code::INVALID_DEVICE)?;
        self.shared.driver.device(known)
    }

    /// What the guest keeps about a device.
    fn describe(&self, ordinal: u32) -> Result<wire::device_info::Reply, Code> {
        let driver = &self.shared.driver;
        if ordinal >= self.devices {
            return Err(code::INVALID_DEVICE);
        }
        let device = driver.device(ordinal)?;
        let mut attributes = Attributes([0; limits::DEVICE_ATTRIBUTES]);
        for (id, value) in (0_i32..).zip(&mut attributes.0) {
            // An attribute that this driver does not know is 0.
            let answered = || driver.device_attribute(id.cast_unsigned(), device).unwrap_or(0);
            *value = guest_mask(id).unwrap_or_else(answered);
        }
        let prioritised = attributes.0[STREAM_PRIORITIES_SUPPORTED as usize] != 0;
        let (least_priority, greatest_priority) = match driver.priorities() {
            Ok(range) => range,
            Err(_) if prioritised => PRIORITIES,
            Err(_) => (0, 0),
        };
        Ok(wire::device_info::Reply {
            name: driver.device_name(device)?,
            uuid: driver.device_uuid(device)?,
            memory: self.shared.provision.books().info(device).1,
            least_priority,
            greatest_priority,
            attributes,
        })
    }

    fn rows(&self, args: &wire::copy_rows::Args<'_>) -> Result<Operation, Code> {
        let shape = |pitch| Rows { pitch, width: args.width, height: args.height };
        let (to_rows, from_rows) = (shape(args.to_pitch), shape(args.from_pitch));
        if args.width == 0 || args.height == 0 {
            return Ok(Operation::Nothing);
        }
        let map = &self.map;
        let device = |address, rows: Rows| Ok::<_, Code>((map.device_rows(address, rows)?, rows.pitch));
        let host = |address, rows: Rows| Ok::<_, Code>((map.host_rows(address, rows)?, rows.pitch));
        // Pitches travel beside the ranges; what the shape has in common is width and height.
        let rows = to_rows;
        match args.direction {
            0 => Ok(Operation::CopyRowsToDevice {
                to: device(args.to, to_rows)?,
                from: host(args.from, from_rows)?,
                rows,
            }),
            1 => Ok(Operation::CopyRowsFromDevice {
                to: host(args.to, to_rows)?,
                from: device(args.from, from_rows)?,
                rows,
            }),
            2 => Ok(Operation::CopyRowsOnDevice {
                to: device(args.to, to_rows)?,
                from: device(args.from, from_rows)?,
                rows,
            }),
            _ => Err(code::INVALID_VALUE),
        }
    }

    fn filling(&self, args: &wire::fill::Args<'_>) -> Result<Operation, Code> {
        if !matches!(args.element, 1 | 2 | 4) {
            return Err(code::INVALID_VALUE);
        }
        if args.width == 0 || args.height == 0 {
            return Ok(Operation::Nothing);
        }
        let bytes = args.width.checked_mul(u64::from(args.element)).ok_or(code::INVALID_VALUE)?;
        let span = Rows { pitch: args.pitch, width: bytes, height: args.height };
        let aligned = args.to.0.is_multiple_of(u64::from(args.element));
        if !aligned || (args.height > 1 && !args.pitch.is_multiple_of(u64::from(args.element))) {
            return Err(code::INVALID_VALUE);
        }
        Ok(Operation::Fill {
            to: self.map.device_rows(args.to.0, span)?,
            element: args.element,
            value: args.value,
            rows: Rows { width: args.width, ..span },
        })
    }

    fn load(&mut self, header: &Header, args: &wire::module_load::Args<'_>) -> Result<(), Code> {
        let context = match args.library {
            true => None,
            false => Some(self.context(header)?.context),
        };
        let image = self.map.hold(args.image, args.bytes.0)?;
        let log = self.map.hold(args.log, args.log_bytes.0)?;
        self.modules.reserve(args.module.0)?;
        let question = Question::Load { id: args.module.0, library: args.library, image, log };
        self.ask(header, context, question);
        Ok(())
    }

    fn module(&self, id: Id<Module>) -> Result<(objects::Image, Option<ContextRef>), Code> {
        let module = self.modules.get(id).ok_or(code::INVALID_HANDLE)?;
        Ok((module.image, module.context))
    }

    pub(super) fn function(&self, id: Id<Function>) -> Result<objects::Function, Code> {
        self.functions.get(id).copied().ok_or(code::INVALID_HANDLE)
    }

    /// Hands a question to the module helper, in the context of its object, or else in the caller's.
    fn ask(&mut self, header: &Header, context: Option<ContextRef>, question: Question) {
        let context = self.caller_for(header, context);
        self.shared.helper.module(ModuleJob { to: reply_to(header), context, question });
    }

    /// The context for a question about an object of `context`, with its device.
    fn caller_for(&mut self, header: &Header, context: Option<ContextRef>) -> Option<(ContextRef, i32)> {
        let caller = self.context(header).ok();
        match (context, caller) {
            (Some(context), Some(caller)) => Some((context, caller.device)),
            (Some(context), None) => Some((context, 0)),
            (None, caller) => caller.map(|caller| (caller.context, caller.device)),
        }
    }

    fn create_stream(&mut self, header: &Header, args: &wire::stream_create::Args<'_>) -> Result<(), Code> {
        const NON_BLOCKING: u32 = 1;
        let caller = self.enter(header)?;
        let context = caller.context;
        let slot = self.slots.get(args.slot as usize).ok_or(code::INVALID_VALUE)?;
        let free = matches!(slot.binding, Binding::Free) && self.streams.is_free(args.stream.0);
        if !free || args.flags & !NON_BLOCKING != 0 {
            return Err(code::INVALID_VALUE);
        }
        let handle = self.shared.driver.stream_create(args.flags, args.priority)?;
        self.streams.insert(args.stream.0, objects::Stream { handle, slot: args.slot, context })?;
        let order = if args.flags & NON_BLOCKING == 0 { Order::Blocking } else { Order::Apart };
        self.bind(args.slot, Binding::Stream(Target::new(args.slot, handle, &caller, order)));
        Ok(())
    }
}
