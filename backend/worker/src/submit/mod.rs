//! Work for the GPU, resolved and checked, on its way to the driver.
//!
//! A [`Submitter`] puts work on a stream and marks it: it records an event directly behind the work, before work of any other
//! stream can come between, so the marker orders nothing that the work did not order already (an event in the legacy default
//! stream would). Before work that takes time, the earlier work of its stream is marked, too: a guest thread may wait for just
//! that work, and the wait must not last longer for work posted after it; or the guest may release a kernel only once it saw
//! the earlier work complete. So one marker serves several pieces of work only if those behind the first take no time, such as
//! the recording of an event.

pub(crate) mod completion;
#[cfg(test)]
mod cost;
pub(crate) mod event_clock;
pub(crate) mod fences;
mod handover;
pub(crate) mod host_calls;
pub(crate) mod local;
pub(crate) mod queue;
pub(crate) mod time;

use crate::{
    arenas::Attached,
    current::Current,
    session::{ReplyTo, Session, objects},
    submit::{
        completion::Completion,
        fences::{InFlightFences, Marker},
        host_calls::HostCalls,
        time::{Permit, SequenceTicket, Time},
    },
};
use sluice_cuda_abi::status;
use sluice_driver::{
    ArrayCopy, ArrayCopyEnd, Code, DeviceRange, Driver, Handle, HostRange, LaunchArguments, LaunchAttribute,
    Pitches, Rows, code,
};
use sluice_runtime::clock::nanoseconds as now;
use sluice_scheduler::estimate::WorkKind;
use std::sync::Arc;

/// The stream of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkTarget {
    pub(crate) slot: u32,
    pub(crate) stream: Handle,
    pub(crate) context: objects::ContextRef,
    /// Ordinal of the context's device.
    pub(crate) device: u8,
    pub(crate) order: StreamOrder,
}

/// The streams of its context for which a stream waits implicitly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamOrder {
    /// The default stream: waits for the [`StreamOrder::Blocking`] streams.
    Default,
    /// Waits for the default stream.
    Blocking,
    /// Waits for no stream.
    Apart,
}

impl StreamOrder {
    const fn waits_for(self, other: StreamOrder) -> bool {
        matches!(
            (self, other),
            (StreamOrder::Default, StreamOrder::Blocking) | (StreamOrder::Blocking, StreamOrder::Default)
        )
    }
}

impl WorkTarget {
    pub(crate) fn new(
        slot: u32,
        stream: Handle,
        context: &objects::GuestContext,
        order: StreamOrder,
    ) -> WorkTarget {
        // A session has fewer than 256 devices.
        let device = u8::try_from(context.device).unwrap_or(u8::MAX);
        WorkTarget { slot, stream, context: context.context, device, order }
    }
}

/// An operation on a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operation {
    /// No operation: the call was refused, or moves no bytes. Its sequence completes with the work before it.
    Nothing,
    MemcpyHtod {
        to: DeviceRange,
        from: HostRange,
    },
    MemcpyDtoh {
        to: HostRange,
        from: DeviceRange,
    },
    MemcpyDtod {
        to: DeviceRange,
        from: DeviceRange,
    },
    Memcpy2dHtod {
        to: (DeviceRange, u64),
        from: (HostRange, u64),
        rows: Rows,
    },
    Memcpy2dDtoh {
        to: (HostRange, u64),
        from: (DeviceRange, u64),
        rows: Rows,
    },
    Memcpy2dDtod {
        to: (DeviceRange, u64),
        from: (DeviceRange, u64),
        rows: Rows,
    },
    /// A copy from or to an array.
    ArrayCopy(ArrayCopy),
    Memset {
        to: DeviceRange,
        element: u32,
        value: u32,
        rows: Rows,
    },
    /// A value of 4 or 8 bytes, the length of `to`.
    WriteValue {
        to: DeviceRange,
        value: u64,
    },
    /// A wait until a comparison with a value of 4 or 8 bytes, the length of `at`, is true. It may never be.
    WaitValue {
        at: DeviceRange,
        value: u64,
        comparison: u32,
    },
    /// A memory barrier.
    Barrier {
        kind: u32,
    },
    /// A launch with the attributes and parameters of its [`Payload`].
    Launch(LaunchArguments),
    /// A launch of an executable graph, with its number of nodes.
    GraphLaunch {
        executable: Handle,
        nodes: u32,
    },
    Wait {
        event: Handle,
    },
    Record {
        event: Handle,
    },
    /// Records an event behind all work of the stream's context, and waits for it.
    ContextRecord {
        event: Handle,
    },
    /// Holds the stream while the guest runs a function.
    HostCall {
        token: u32,
    },
}

impl Operation {
    /// True if it may complete later than the work before it in its stream.
    const fn takes_time(&self) -> bool {
        !matches!(self, Operation::Nothing | Operation::Record { .. })
    }

    /// True if it is work for the device.
    const fn is_work(&self) -> bool {
        !matches!(
            self,
            Operation::Nothing
                | Operation::Wait { .. }
                | Operation::WaitValue { .. }
                | Operation::ContextRecord { .. }
                | Operation::Record { .. }
                | Operation::HostCall { .. }
        )
    }

    /// The kind of work, if it is work.
    fn kind(&self) -> Option<WorkKind> {
        // Copies of about the same size are of one kind; so are launches of the same function with the same grid.
        let sized =
            |tag: u64, bytes: u64| Some(WorkKind::new(tag, bytes.checked_ilog2().unwrap_or(0).into()));
        match self {
            Operation::Nothing
            | Operation::Wait { .. }
            | Operation::WaitValue { .. }
            | Operation::ContextRecord { .. }
            | Operation::Record { .. }
            | Operation::HostCall { .. } => None,
            Operation::MemcpyHtod { to, .. } => sized(1, to.bytes()),
            Operation::MemcpyDtoh { to, .. } => sized(2, to.bytes()),
            Operation::MemcpyDtod { to, .. } => sized(3, to.bytes()),
            Operation::Memcpy2dHtod { rows, .. } => sized(4, area(rows)),
            Operation::Memcpy2dDtoh { rows, .. } => sized(5, area(rows)),
            Operation::Memcpy2dDtod { rows, .. } => sized(6, area(rows)),
            Operation::Memset { rows, .. } => sized(7, area(rows)),
            Operation::ArrayCopy(copy) => sized(9, volume(copy)),
            Operation::WriteValue { to, .. } => sized(8, to.bytes()),
            Operation::Barrier { .. } => sized(10, 1),
            Operation::GraphLaunch { executable, nodes } => {
                Some(WorkKind::new(*executable, u64::from(*nodes)))
            }
            Operation::Launch(launch) => {
                let [x, y, z] = launch.grid.map(u64::from);
                Some(WorkKind::new(launch.function, x ^ y.rotate_left(24) ^ z.rotate_left(48)))
            }
        }
    }

    /// The host memory it copies from.
    const fn reads_host(&self) -> Option<(HostRange, Rows)> {
        match *self {
            Operation::MemcpyHtod { from, .. } => Some((from, one_row(from))),
            Operation::Memcpy2dHtod { from: (from, pitch), rows, .. } => Some((from, Rows { pitch, ..rows })),
            Operation::ArrayCopy(ArrayCopy { from, extent, .. }) => host_end(from, extent),
            _ => None,
        }
    }

    /// The host memory it copies to.
    const fn writes_host(&self) -> Option<(HostRange, Rows)> {
        match *self {
            Operation::MemcpyDtoh { to, .. } => Some((to, one_row(to))),
            Operation::Memcpy2dDtoh { to: (to, pitch), rows, .. } => Some((to, Rows { pitch, ..rows })),
            Operation::ArrayCopy(ArrayCopy { to, extent, .. }) => host_end(to, extent),
            _ => None,
        }
    }
}

/// The number of bytes in rows.
const fn area(rows: &Rows) -> u64 {
    rows.width.saturating_mul(rows.height)
}

/// The number of bytes of a copy from or to an array.
fn volume(copy: &ArrayCopy) -> u64 {
    copy.extent.iter().fold(1, |bytes, length| bytes.saturating_mul(u64::from(*length)))
}

/// The host memory of one end of a copy, which has one slice.
const fn host_end(end: ArrayCopyEnd, [width, height, _]: [u32; 3]) -> Option<(HostRange, Rows)> {
    match end {
        ArrayCopyEnd::Host(range, Pitches { pitch, .. }) => {
            Some((range, Rows { pitch: pitch as u64, width: width as u64, height: height as u64 }))
        }
        ArrayCopyEnd::Array(..) | ArrayCopyEnd::Device(..) => None,
    }
}

/// A range as one row.
const fn one_row(range: HostRange) -> Rows {
    Rows { pitch: range.bytes(), width: range.bytes(), height: 1 }
}

/// The parts of a launch that have no fixed size.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Payload<'a> {
    pub(crate) attributes: &'a [LaunchAttribute],
    pub(crate) parameters: &'a [u8],
}

/// One piece of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) target: WorkTarget,
    pub(crate) sequence: u64,
    pub(crate) reply: ReplyTo,
    pub(crate) operation: Operation,
}

/// Limit on pieces of work under one marker.
const BATCH: u32 = 32;
/// Markers after which the completion thread is notified even though the ring has not run empty.
const UNANNOUNCED: u32 = 16;

/// The work that is not marked yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Unmarked {
    /// Stream slot and last sequence; no work is unmarked if `count` is 0.
    slot: u32,
    sequence: u64,
    count: u32,
}

impl Unmarked {
    /// True if a marker must be placed before the next work is submitted.
    const fn before(self, slot: u32, takes_time: bool) -> bool {
        self.count > 0 && (self.slot != slot || takes_time)
    }

    /// Counts submitted work; returns `true` if it must be marked at once.
    const fn after(&mut self, slot: u32, sequence: u64) -> bool {
        *self = Unmarked { slot, sequence, count: self.count + 1 };
        self.count >= BATCH
    }
}

/// Work whose marker could not be placed. A thread that may block waits for it instead.
#[derive(Clone, Copy, Debug)]
struct Stuck {
    target: WorkTarget,
    sequence: u64,
    ticket: SequenceTicket,
}

/// Submits to the driver; used by one thread at a time.
#[derive(Debug)]
pub(crate) struct Submitter {
    driver: Arc<Driver>,
    session: Arc<Session>,
    fences: Arc<InFlightFences>,
    completion: Arc<Completion>,
    attached: Arc<Attached>,
    time: Arc<Time>,
    host_calls: Arc<HostCalls>,
    unmarked: Unmarked,
    /// The stream of `unmarked`, if any.
    target: Option<WorkTarget>,
    /// The ticket of the next marker.
    ticket: SequenceTicket,
    /// Index of the guest's context of the unmarked work.
    owner: u32,
    /// While this is not empty, no work is admitted: see [`Submitter::settle`].
    stuck: Vec<Stuck>,
    /// Streams that may be held, and for which others may wait implicitly.
    held: Vec<WorkTarget>,
    /// Markers of which the completion thread was not notified.
    unannounced: u32,
}

impl Submitter {
    pub(crate) fn new(
        driver: Arc<Driver>,
        session: Arc<Session>,
        fences: Arc<InFlightFences>,
        completion: Arc<Completion>,
        attached: Arc<Attached>,
        time: Arc<Time>,
        host_calls: Arc<HostCalls>,
    ) -> Submitter {
        Submitter {
            driver,
            session,
            fences,
            completion,
            attached,
            time,
            host_calls,
            unmarked: Unmarked::default(),
            target: None,
            ticket: SequenceTicket::default(),
            owner: 0,
            stuck: Vec::new(),
            held: Vec::new(),
            unannounced: 0,
        }
    }

    /// True if a piece of work may be submitted now. While the window is full, a stream may still have one piece in flight, and
    /// two if no other VM requests the device; so every stream that is held back has work ahead of it. Work behind a wait is
    /// not in flight and does not fill the window.
    pub(crate) fn admits(&self, work: &Work) -> bool {
        if self.is_stuck() {
            return false;
        }
        if !work.operation.is_work() {
            return true;
        }
        match self.time.permit(work.target.device) {
            Permit::Closed => false,
            Permit::Open { full: false, .. } => true,
            Permit::Open { alone, full: true } => {
                let stream_fences = self.fences.of(work.target.slot);
                let unmarked = u64::from(self.unmarked.count > 0 && self.unmarked.slot == work.target.slot);
                stream_fences.is_held() || stream_fences.pending() + unmarked < if alone { 2 } else { 1 }
            }
        }
    }

    /// Submits one piece of work. Its sequence counts even if the driver refuses it. The failure of a post is kept for its
    /// context here, before the sequence can complete.
    pub(crate) fn submit(
        &mut self,
        current: &mut Current,
        work: &Work,
        payload: Payload<'_>,
    ) -> Result<(), Code> {
        let target = work.target;
        let delays = work.operation.takes_time() || self.must_precede(work);
        if self.unmarked.before(target.slot, delays) {
            self.mark(current);
        }
        if let Some((from, rows)) = work.operation.reads_host() {
            self.attached.fetch(from.address(), rows);
        }
        // Under one marker only the first piece counts as work.
        if self.unmarked.count == 0 {
            self.ticket = self.begin(current, work);
        }
        let result = current
            .set(&self.driver, target.context)
            .and_then(|()| self.run(target, work.sequence, &work.operation, payload));
        if let Err(failed) = result {
            self.publish_text(failed);
            self.session.work_failed(work.reply, failed);
        }
        self.count(target.device, &work.operation);
        if let Some((to, rows)) = work.operation.writes_host()
            && result.is_ok()
            && self.attached.is_gathered(to.address(), to.bytes())
        {
            self.fences.of(target.slot).defer_write_back(work.sequence, to.address(), rows);
        }
        self.target = Some(target);
        self.owner = work.reply.context;
        // A wait in the place of a marker covers all work of the stream up to then.
        for stuck in self.stuck.iter_mut().filter(|stuck| stuck.target.slot == target.slot) {
            stuck.sequence = work.sequence;
        }
        if self.unmarked.after(target.slot, work.sequence) {
            self.mark(current);
        }
        result
    }

    /// True if earlier work of the stream must be marked before this work, although it takes no time: the recording of an event
    /// behind copies to gathered memory. A host function of another stream that waits for the event may read that memory, which
    /// has the bytes only once the marker was seen.
    fn must_precede(&self, work: &Work) -> bool {
        matches!(work.operation, Operation::Record { .. })
            && self.fences.of(work.target.slot).has_write_backs()
    }

    /// The ticket of a piece of work, which is counted as begun if it can run.
    fn begin(&mut self, current: &mut Current, work: &Work) -> SequenceTicket {
        let target = work.target;
        if let Operation::Wait { event, .. } = work.operation {
            let pends =
                current.set(&self.driver, target.context).and_then(|()| self.driver.event_done(event));
            // An event that was reached, or never recorded, delays nothing.
            if pends != Ok(false) {
                return SequenceTicket::nothing(target.device);
            }
            self.hold(target);
            return SequenceTicket::wait(target.device);
        }
        // The value may be there already, and a context may be idle; the wait is then over at once.
        if let Operation::HostCall { .. } | Operation::WaitValue { .. } | Operation::ContextRecord { .. } =
            work.operation
        {
            self.hold(target);
            return SequenceTicket::wait(target.device);
        }
        let Some(kind) = work.operation.kind() else { return SequenceTicket::nothing(target.device) };
        if !self.held.is_empty() {
            self.wait_for_held(current, work);
        }
        let stream_fences = self.fences.of(target.slot);
        let is_held = stream_fences.is_held();
        if stream_fences.pending() == 0 && !is_held {
            stream_fences.start(now());
        }
        self.time.begin(target.device, kind, is_held)
    }

    /// Records that later work of this stream is held.
    fn hold(&mut self, target: WorkTarget) {
        self.fences.of(target.slot).hold();
        if target.order != StreamOrder::Apart && !self.held.iter().any(|held| held.slot == target.slot) {
            self.held.push(target);
        }
    }

    /// The default stream waits for work that other streams hold, and other streams for work that it holds: a marker before the
    /// work is reached when that wait is over. The work itself would add the same order.
    fn wait_for_held(&mut self, current: &mut Current, work: &Work) {
        let target = work.target;
        let fences = Arc::clone(&self.fences);
        self.held.retain(|held| fences.of(held.slot).is_held());
        let waits =
            self.held.iter().any(|held| held.context == target.context && target.order.waits_for(held.order));
        if !waits || fences.of(target.slot).is_held() || self.session.sticky().is_some() {
            return;
        }
        // The marker is for the work before this sequence; before the first sequence there is none.
        match self.place(current, target, work.sequence.wrapping_sub(1), SequenceTicket::wait(target.device))
        {
            Ok(()) => self.hold(target),
            Err(failed) if status::is_sticky(failed) => {
                self.fail(failed, SequenceTicket::wait(target.device))
            }
            // The wait then counts as work.
            Err(failed) => tracing::debug!(code = failed, "cannot mark a wait"),
        }
    }

    /// After a failure no work appears complete any more.
    fn fail(&self, failed: Code, ticket: SequenceTicket) {
        self.publish_text(failed);
        self.session.set_sticky(failed);
        self.time.abandon(ticket);
    }

    /// Offers the text of kernels before a failure that breaks their context is published. The wait for such a context is
    /// short.
    fn publish_text(&self, failed: Code) {
        if status::is_sticky(failed) {
            // A driver may refuse a stream of a failed context before it hands out text.
            self.session.publish_text(|| self.driver.context_synchronize());
        }
    }

    /// True if work is in flight without a marker that would show its end.
    pub(crate) const fn is_stuck(&self) -> bool {
        !self.stuck.is_empty()
    }

    /// Waits for work whose markers could not be placed, so that it can be published as complete. For a thread that may block.
    #[cold]
    pub(crate) fn settle(&mut self, current: &mut Current) {
        for Stuck { target, sequence, ticket } in core::mem::take(&mut self.stuck) {
            let ended = current
                .set(&self.driver, target.context)
                .and_then(|()| self.driver.stream_synchronize(target.stream));
            let marker = Marker { sequence, event: 0, context: target.context, ticket };
            match ended {
                Ok(()) if self.fences.push(target.slot, marker) => self.unannounced += 1,
                Ok(()) => self.fail(code::UNKNOWN, ticket),
                Err(failed) => self.fail(failed, ticket),
            }
        }
        self.announce();
    }

    /// Counts an operation in the VM's figures.
    fn count(&self, device: u8, operation: &Operation) {
        match operation {
            Operation::Launch(_) | Operation::GraphLaunch { .. } => self.time.launch(device),
            Operation::MemcpyHtod { to, .. } => self.time.copy(device, to.bytes()),
            Operation::MemcpyDtoh { to, .. } => self.time.copy(device, to.bytes()),
            Operation::MemcpyDtod { to, .. } => self.time.copy(device, to.bytes()),
            Operation::Memcpy2dHtod { rows, .. }
            | Operation::Memcpy2dDtoh { rows, .. }
            | Operation::Memcpy2dDtod { rows, .. } => self.time.copy(device, area(rows)),
            Operation::ArrayCopy(copy) => self.time.copy(device, volume(copy)),
            Operation::Nothing
            | Operation::Memset { .. }
            | Operation::WriteValue { .. }
            | Operation::WaitValue { .. }
            | Operation::ContextRecord { .. }
            | Operation::Barrier { .. }
            | Operation::Wait { .. }
            | Operation::Record { .. }
            | Operation::HostCall { .. } => {}
        }
    }

    fn run(
        &self,
        target: WorkTarget,
        sequence: u64,
        operation: &Operation,
        payload: Payload<'_>,
    ) -> Result<(), Code> {
        let (driver, stream) = (&self.driver, target.stream);
        match *operation {
            Operation::Nothing => Ok(()),
            Operation::MemcpyHtod { to, from } => driver.memcpy_htod(to, from, stream),
            Operation::MemcpyDtoh { to, from } => driver.memcpy_dtoh(to, from, stream),
            Operation::MemcpyDtod { to, from } => driver.memcpy_dtod(to, from, stream),
            Operation::Memcpy2dHtod { to, from, rows } => driver.memcpy_2d_htod(to, from, rows, stream),
            Operation::Memcpy2dDtoh { to, from, rows } => driver.memcpy_2d_dtoh(to, from, rows, stream),
            Operation::Memcpy2dDtod { to, from, rows } => driver.memcpy_2d_dtod(to, from, rows, stream),
            Operation::ArrayCopy(copy) => driver.memcpy_box(&copy.into(), stream),
            Operation::Memset { to, element, value, rows } => driver.memset(to, element, value, rows, stream),
            Operation::WriteValue { to, value } => driver.write_value(to, value, stream),
            Operation::WaitValue { at, value, comparison } => {
                driver.wait_value(at, value, comparison, stream)
            }
            Operation::Barrier { kind } => driver.stream_barrier(kind, stream),
            Operation::Launch(launch) => {
                driver.launch(&launch, payload.attributes, payload.parameters, stream)
            }
            Operation::GraphLaunch { executable, .. } => driver.graph_launch(executable, stream),
            Operation::Wait { event } => driver.stream_wait(stream, event),
            Operation::Record { event } => driver.event_record(event, stream),
            Operation::ContextRecord { event } => {
                driver.context_record(target.context.handle, event)?;
                driver.stream_wait(stream, event)
            }
            Operation::HostCall { token } => {
                self.host_calls.launch(driver, target.stream, (target.slot, sequence), token)
            }
        }
    }

    /// Marks the work that is not marked yet.
    pub(crate) fn mark(&mut self, current: &mut Current) {
        let unmarked = core::mem::take(&mut self.unmarked);
        let Some(target) = self.target.take() else { return };
        let ticket = core::mem::take(&mut self.ticket);
        match self.place(current, target, unmarked.sequence, ticket) {
            Ok(()) => {}
            Err(failed) if status::is_sticky(failed) => self.fail(failed, ticket),
            Err(failed) => {
                self.session.post_failed(self.owner, failed);
                self.stuck.push(Stuck { target, sequence: unmarked.sequence, ticket });
            }
        }
        self.unannounced += 1;
        if self.unannounced >= UNANNOUNCED {
            self.announce();
        }
    }

    fn place(
        &self,
        current: &mut Current,
        target: WorkTarget,
        sequence: u64,
        ticket: SequenceTicket,
    ) -> Result<(), Code> {
        current.set(&self.driver, target.context)?;
        let event = self.event(target)?;
        self.driver.event_record(event, target.stream)?;
        let marker = Marker { sequence, event, context: target.context, ticket };
        if self.fences.push(target.slot, marker) { Ok(()) } else { Err(code::UNKNOWN) }
    }

    /// An event of the target's context: a returned one, or a new one.
    fn event(&self, target: WorkTarget) -> Result<Handle, Code> {
        let stream_fences = self.fences.of(target.slot);
        while let Some(marker) = stream_fences.recycled() {
            if marker.context == target.context {
                return Ok(marker.event);
            }
            // The slot now has a stream of another context.
            self.driver.event_destroy(marker.event)?;
        }
        // With timing: the time at which it is reached is read from it.
        self.driver.event_create(0)
    }

    /// Notifies the completion thread of new markers.
    pub(crate) fn announce(&mut self) {
        if self.unannounced > 0 {
            self.unannounced = 0;
            self.completion.notify();
        }
    }

    /// True if work of a context is in flight.
    pub(crate) fn uses(&self, context: objects::ContextRef) -> bool {
        self.fences.uses(context)
    }

    /// Destroys the events of a context that is being destroyed.
    pub(crate) fn forget(&mut self, context: objects::ContextRef) {
        self.held.retain(|held| held.context != context);
        self.completion.forget(context);
        self.fences.purge(context, |marker| {
            if let Err(failed) = self.driver.event_destroy(marker.event) {
                tracing::debug!(code = failed, "cannot destroy an event");
            }
        });
    }
}

#[cfg(test)]
mod tests;
