//! The calls that are work on a stream. Each checks its arguments and turns them into an operation, which goes to the submitter at once or
//! waits in the submit queue.

use super::{
    Binding, Dispatcher, Violation,
    attributes::AttributeList,
    calls::{Launches, OnStream, Served},
    images::pitches,
    reply_to,
};
use crate::{
    helper::kinds::Tables as _,
    memory::{
        address::{AddressMap, MemoryPlace},
        helper::resident_threads,
    },
    session::{ReplyTo, objects::ContextRef},
    submit::{Operation, Payload, Work, WorkTarget, local::Local, queue::QueueItem},
};
use sluice_driver::{ArrayCopy, ArrayCopyEnd, Code, DeviceRange, Handle, LaunchArguments, Rows, code};
use sluice_protocol::{
    calls::wire,
    field::{DeviceAddress, ElementSize},
    handle::{Function, Id},
    limits,
    record::Header,
};

const NO_PAYLOAD: Payload<'static> = Payload { attributes: &[], parameters: &[] };

/// A call that moves no bytes becomes no operation, whatever its addresses: the driver accepts that, too.
fn unless_empty(bytes: u64, operation: Result<Operation, Code>) -> Result<Operation, Code> {
    if bytes == 0 { Ok(Operation::Nothing) } else { operation }
}

/// The state of work that was handed in: submitted or queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Submitted {
    Done,
    Later,
}

impl Submitted {
    /// `reply` if the work was submitted; other work is answered by the thread that submits it.
    pub(super) fn then<R>(self, reply: R) -> Option<R> {
        match self {
            Submitted::Done => Some(reply),
            Submitted::Later => None,
        }
    }
}

impl OnStream for Dispatcher {
    fn memcpy_htod(&self, args: &wire::memcpy_htod::Args) -> Result<Operation, Code> {
        let bytes = args.from.bytes;
        let (to, from) = (self.map.device(args.to.0, bytes), self.map.host(args.from.address, bytes));
        unless_empty(bytes, to.and_then(|to| Ok(Operation::MemcpyHtod { to, from: from? })))
    }

    fn memcpy_dtoh(&self, args: &wire::memcpy_dtoh::Args) -> Result<Operation, Code> {
        let bytes = args.to.bytes;
        let (to, from) = (self.map.host(args.to.address, bytes), self.map.device(args.from.0, bytes));
        unless_empty(bytes, to.and_then(|to| Ok(Operation::MemcpyDtoh { to, from: from? })))
    }

    fn memcpy_dtod(&self, args: &wire::memcpy_dtod::Args) -> Result<Operation, Code> {
        let (to, from) = (self.map.device(args.to.0, args.bytes), self.map.device(args.from.0, args.bytes));
        let operation = to.and_then(|to| {
            let from = from?;
            Ok(match self.peers(args.to, args.from) {
                None => Operation::MemcpyDtod { to, from },
                Some([there, here]) => Operation::MemcpyPeer { to: (to, there), from: (from, here) },
            })
        });
        unless_empty(args.bytes, operation)
    }

    fn memcpy_2d_htod(&self, args: &wire::memcpy_2d_htod::Args) -> Result<Operation, Code> {
        let from = args.from;
        let Some([rows, from_rows]) = rows([args.to_pitch, from.pitch], from.width, from.height) else {
            return Ok(Operation::Nothing);
        };
        Ok(Operation::Memcpy2dHtod {
            to: (self.map.device_rows(args.to.0, rows)?, rows.pitch),
            from: (self.map.host_rows(from.address, from_rows)?, from_rows.pitch),
            rows,
        })
    }

    fn memcpy_2d_dtoh(&self, args: &wire::memcpy_2d_dtoh::Args) -> Result<Operation, Code> {
        let to = args.to;
        let Some([rows, from_rows]) = rows([to.pitch, args.from_pitch], to.width, to.height) else {
            return Ok(Operation::Nothing);
        };
        Ok(Operation::Memcpy2dDtoh {
            to: (self.map.host_rows(to.address, rows)?, rows.pitch),
            from: (self.map.device_rows(args.from.0, from_rows)?, from_rows.pitch),
            rows,
        })
    }

    fn memcpy_2d_dtod(&self, args: &wire::memcpy_2d_dtod::Args) -> Result<Operation, Code> {
        let Some([rows, from_rows]) = rows([args.to_pitch, args.from_pitch], args.width, args.height) else {
            return Ok(Operation::Nothing);
        };
        let (to, to_pitch) = (self.map.device_rows(args.to.0, rows)?, rows.pitch);
        let (from, from_pitch) = (self.map.device_rows(args.from.0, from_rows)?, from_rows.pitch);
        Ok(match self.peers(args.to, args.from) {
            None => Operation::Memcpy2dDtod { to: (to, to_pitch), from: (from, from_pitch), rows },
            Some([there, here]) => {
                Operation::Memcpy2dPeer { to: (to, to_pitch, there), from: (from, from_pitch, here), rows }
            }
        })
    }

    fn memcpy_htoa(&self, args: &wire::memcpy_htoa::Args) -> Result<Operation, Code> {
        let from = args.from;
        let extent = [from.width, from.height, 1];
        let to = self.array_end(args.to, args.at, extent)?;
        let rows = Rows { pitch: from.pitch, width: from.width, height: from.height };
        let range = self.map.host_rows(from.address, rows)?;
        array_copy(to, ArrayCopyEnd::Host(range, pitches(from.pitch, from.height)?), extent)
    }

    fn memcpy_atoh(&self, args: &wire::memcpy_atoh::Args) -> Result<Operation, Code> {
        let to = args.to;
        let extent = [to.width, to.height, 1];
        let from = self.array_end(args.from, args.at, extent)?;
        let rows = Rows { pitch: to.pitch, width: to.width, height: to.height };
        let range = self.map.host_rows(to.address, rows)?;
        array_copy(ArrayCopyEnd::Host(range, pitches(to.pitch, to.height)?), from, extent)
    }

    fn memcpy_dtoa(&self, args: &wire::memcpy_dtoa::Args) -> Result<Operation, Code> {
        let to = self.array_end(args.to, args.at, args.extent)?;
        let from = self.device_end(args.from, args.from_pitch, args.from_rows, args.extent)?;
        array_copy(to, from, args.extent)
    }

    fn memcpy_atod(&self, args: &wire::memcpy_atod::Args) -> Result<Operation, Code> {
        let from = self.array_end(args.from, args.at, args.extent)?;
        let to = self.device_end(args.to, args.to_pitch, args.to_rows, args.extent)?;
        array_copy(to, from, args.extent)
    }

    fn memcpy_atoa(&self, args: &wire::memcpy_atoa::Args) -> Result<Operation, Code> {
        let to = self.array_end(args.to, args.to_at, args.extent)?;
        array_copy(to, self.array_end(args.from, args.from_at, args.extent)?, args.extent)
    }

    fn memset(&self, args: &wire::memset::Args) -> Result<Operation, Code> {
        if args.width == 0 || args.height == 0 {
            return Ok(Operation::Nothing);
        }
        let (to, rows) = filled(&self.map, args.to, args.element, (args.pitch, args.width, args.height))?;
        Ok(Operation::Memset { to, element: args.element as u32, value: args.value, rows })
    }

    fn stream_write_value(&self, args: &wire::stream_write_value::Args) -> Result<Operation, Code> {
        let bytes = if args.wide { 8 } else { 4 };
        if !args.to.0.is_multiple_of(bytes) {
            return Err(code::INVALID_VALUE);
        }
        Ok(Operation::WriteValue { to: self.map.device(args.to.0, bytes)?, value: args.value })
    }

    fn stream_wait_value(&self, args: &wire::stream_wait_value::Args) -> Result<Operation, Code> {
        /// `CU_STREAM_WAIT_VALUE_NOR`.
        const LAST_COMPARISON: u32 = 3;
        let bytes = if args.wide { 8 } else { 4 };
        if !args.at.0.is_multiple_of(bytes) || args.comparison > LAST_COMPARISON {
            return Err(code::INVALID_VALUE);
        }
        let at = self.map.device(args.at.0, bytes)?;
        Ok(Operation::WaitValue { at, value: args.value, comparison: args.comparison })
    }

    fn stream_barrier(&self, args: &wire::stream_barrier::Args) -> Result<Operation, Code> {
        /// `CU_STREAM_MEMORY_BARRIER_TYPE_GPU`.
        const LAST_KIND: u32 = 1;
        if args.kind > LAST_KIND {
            Err(code::INVALID_VALUE)
        } else {
            Ok(Operation::Barrier { kind: args.kind })
        }
    }

    fn stream_wait(&self, args: &wire::stream_wait::Args) -> Result<Operation, Code> {
        let event = self.events.get(args.event).ok_or(code::INVALID_HANDLE)?;
        Ok(Operation::Wait { event: event.handle })
    }

    fn context_record(&self, args: &wire::context_record::Args) -> Result<Operation, Code> {
        let event = self.events.get(args.event).ok_or(code::INVALID_HANDLE)?;
        Ok(Operation::ContextRecord { event: event.handle })
    }

    fn host_call(&self, args: &wire::host_call::Args) -> Result<Operation, Code> {
        Ok(Operation::HostCall { token: args.token })
    }

    fn event_record(&self, args: &wire::event_record::Args) -> Result<Operation, Code> {
        let event = self.events.get(args.event).ok_or(code::INVALID_HANDLE)?;
        Ok(Operation::Record { event: event.handle })
    }
}

impl Launches for Dispatcher {
    fn launch(&mut self, header: &Header, args: &wire::launch::Args) -> Served<wire::launch::Reply> {
        let operation = self.checked_launch(header, args);
        let local = if operation.is_ok() { self.local(header, args.function) } else { None };
        let parameters = args.parameters.0;
        if args.attributes.0.is_empty() && !args.cooperative {
            let submitted =
                self.growing_work(header, operation, Payload { attributes: &[], parameters }, local);
            return Ok(submitted?.then(wire::launch::Reply {}));
        }
        let mut list = AttributeList::new();
        let read = self.read_attributes(args.attributes, &mut list).and_then(|()| {
            if args.cooperative {
                list.push_cooperative()?;
            }
            Ok(())
        });
        let operation = read.and(operation);
        let local = local.filter(|_| operation.is_ok());
        let payload = Payload { attributes: list.as_slice(), parameters };
        Ok(self.growing_work(header, operation, payload, local)?.then(wire::launch::Reply {}))
    }

    fn graph_launch(
        &mut self,
        header: &Header,
        args: &wire::graph_launch::Args,
    ) -> Served<wire::graph_launch::Reply> {
        let operation = self.checked_graph_launch(args.graph);
        let local = if operation.is_ok() { self.graph_local(args.graph) } else { Vec::new() };
        Ok(self.growing_work(header, operation, NO_PAYLOAD, local)?.then(wire::graph_launch::Reply {}))
    }
}

impl Dispatcher {
    /// The local memory that the function needs and the driver has not reserved yet, if any.
    fn local(&mut self, header: &Header, function: Id<Function>) -> Option<Local> {
        let each = self.function(function).ok()?.local;
        if each == 0 {
            return None;
        }
        let context = self.target(header)?.context;
        let device = self.context(header).ok()?.device;
        self.local_in(context, device, each)
    }

    /// Local memory of `each` bytes for each thread in a context, if the driver has not reserved it yet.
    pub(super) fn local_in(&self, context: ContextRef, device: i32, each: u32) -> Option<Local> {
        if self.shared.submit_queue.local.covers(context, each) {
            return None;
        }
        let bytes = u64::from(each).saturating_mul(resident_threads(&self.shared.driver, device));
        Some(Local { context, device, each, bytes })
    }

    fn checked_launch(&self, header: &Header, args: &wire::launch::Args) -> Result<Operation, Code> {
        let function = self.function(args.function)?;
        let elsewhere = function.context.is_some()
            && function.context != self.target(header).map(|target| target.context);
        if elsewhere {
            return Err(code::INVALID_HANDLE);
        }
        if args.parameters.0.len() != function.parameters {
            return Err(code::INVALID_VALUE);
        }
        Ok(Operation::Launch(LaunchArguments {
            function: function.code.handle(),
            grid: args.grid,
            block: args.block,
            shared: args.shared,
        }))
    }

    /// Work on the header's stream: checks its sequence and submits it, or queues it. A refused operation keeps its place in
    /// the stream, so that its sequence completes.
    pub(super) fn work(
        &mut self,
        header: &Header,
        operation: Result<Operation, Code>,
    ) -> Result<Submitted, Code> {
        self.growing_work(header, operation, NO_PAYLOAD, [])
    }

    /// As [`Dispatcher::work`], for work that may make the driver allocate memory for itself: it goes to the submitter thread,
    /// because it has to wait.
    fn growing_work(
        &mut self,
        header: &Header,
        operation: Result<Operation, Code>,
        payload: Payload<'_>,
        local: impl IntoIterator<Item = Local>,
    ) -> Result<Submitted, Code> {
        let target = self.count(header)?;
        let refused = operation.err();
        let operation = operation.unwrap_or(Operation::Nothing);
        let to = reply_to(header);
        if let Some(failed) = refused {
            self.shared.session.work_failed(to, failed);
        }
        let reply = if refused.is_some() { ReplyTo::nowhere(to.context) } else { to };
        let work = Work { target, sequence: header.sequence, reply, operation };
        let local: Box<[Local]> = local.into_iter().collect();
        let submitted = match &mut self.submitter {
            _ if !local.is_empty() => {
                let (attributes, parameters) = (payload.attributes.into(), payload.parameters.into());
                let item = QueueItem::Growing(work, attributes, parameters, local);
                self.shared.submit_queue.queue(&mut self.submitter, item);
                Ok(Submitted::Later)
            }
            Some(submitter) if submitter.admits(&work) => {
                concluded(&work, submitter.submit(&mut self.current, &work, payload))
            }
            _ => self.queue(work, payload),
        };
        match refused {
            Some(failed) if to.is_due() => Err(failed),
            Some(_) => Ok(Submitted::Later),
            None => submitted,
        }
    }

    /// The header's stream, after its sequence is incremented.
    fn count(&mut self, header: &Header) -> Result<WorkTarget, Code> {
        let slot = self.slots.get_mut(header.stream as usize).ok_or(code::INVALID_HANDLE)?;
        let Binding::Stream(target) = slot.binding else { return Err(code::INVALID_HANDLE) };
        let sequence = header.sequence;
        if sequence != slot.last.wrapping_add(1) {
            self.violation = Some(Violation::Sequence { slot: target.slot, sequence, last: slot.last });
            return Err(code::UNKNOWN);
        }
        if sequence - self.shared.session.completed(target.slot) > limits::STREAM_CREDITS {
            self.violation = Some(Violation::Credits { slot: target.slot, sequence });
            return Err(code::UNKNOWN);
        }
        slot.last = sequence;
        Ok(target)
    }

    /// The stream a header names, if it names one.
    fn target(&self, header: &Header) -> Option<WorkTarget> {
        match self.slots.get(header.stream as usize)?.binding {
            Binding::Stream(target) => Some(target),
            Binding::Free | Binding::Reserved => None,
        }
    }

    #[cold]
    fn queue(&mut self, work: Work, payload: Payload<'_>) -> Result<Submitted, Code> {
        self.regain();
        if let Some(submitter) = &mut self.submitter
            && submitter.admits(&work)
        {
            return concluded(&work, submitter.submit(&mut self.current, &work, payload));
        }
        let item = QueueItem::Work(work, payload.attributes.into(), payload.parameters.into());
        self.shared.submit_queue.queue(&mut self.submitter, item);
        Ok(Submitted::Later)
    }

    /// The contexts of a copy between devices: without access to each other's memory, the driver makes it only by contexts.
    fn peers(&self, to: DeviceAddress, from: DeviceAddress) -> Option<[Handle; 2]> {
        if self.devices.len() < 2 {
            return None;
        }
        let [to, from] = [to, from].map(|address| self.map.place(address));
        let (to, from) = (to?, from?);
        if to == from {
            return None;
        }
        let find = |place| match place {
            MemoryPlace::Context(context) => self.contexts.find(|known| known.context == context),
            MemoryPlace::Device(device) => self.contexts.find(|known| known.device == device),
        };
        let (to, from) = (find(to)?, find(from)?);
        (to.device != from.device).then_some([to.context.handle, from.context.handle])
    }
}

/// The outcome of work that was submitted at once. The failure of a post is recorded already and needs no answer.
fn concluded(work: &Work, result: Result<(), Code>) -> Result<Submitted, Code> {
    match result {
        Ok(()) => Ok(Submitted::Done),
        Err(failed) if work.reply.is_due() => Err(failed),
        Err(_) => Ok(Submitted::Later),
    }
}

/// A copy of a box that lies in an array, so each of its lengths fits 32 bits.
fn array_copy(to: ArrayCopyEnd, from: ArrayCopyEnd, extent: [u64; 3]) -> Result<Operation, Code> {
    let narrow = |value: u64| u32::try_from(value).map_err(|_| code::INVALID_VALUE);
    let [width, height, depth] = extent;
    let extent = [narrow(width)?, narrow(height)?, narrow(depth)?];
    Ok(Operation::ArrayCopy(ArrayCopy { to, from, extent }))
}

/// The same rows with two pitches; `None` if they are empty.
fn rows(pitches: [u64; 2], width: u64, height: u64) -> Option<[Rows; 2]> {
    (width > 0 && height > 0).then(|| pitches.map(|pitch| Rows { pitch, width, height }))
}

/// The memory of a fill, and its rows of elements.
pub(super) fn filled(
    map: &AddressMap,
    DeviceAddress(to): DeviceAddress,
    element: ElementSize,
    (pitch, width, height): (u64, u64, u64),
) -> Result<(DeviceRange, Rows), Code> {
    let each = element.bytes();
    let bytes = width.checked_mul(each).ok_or(code::INVALID_VALUE)?;
    if !to.is_multiple_of(each) || (height > 1 && !pitch.is_multiple_of(each)) {
        return Err(code::INVALID_VALUE);
    }
    let to = map.device_rows(to, Rows { pitch, width: bytes, height })?;
    Ok((to, Rows { pitch, width, height }))
}
