//! Work for the GPU, resolved and checked, on its way to the driver. In one file: the state of one submitter.
//!
//! The dispatcher calls it, and the submitter thread ([`queue`]) while work waits for a permit. A [`Submitter`] puts work on a stream
//! and marks it: it records an event behind the work, whose end shows that the work is complete. [`unmarked`] has the moments at which
//! it does, and the reasons. It owns the work in flight; it never reads the ring, and checks no call of the guest.

pub(crate) mod completion;
#[cfg(test)]
mod cost;
pub(crate) mod event_clock;
pub(crate) mod fences;
mod handover;
pub(crate) mod host_calls;
pub(crate) mod local;
mod order;
pub(crate) mod queue;
pub(crate) mod time;
mod unmarked;

use crate::{
    arenas::Attached,
    current::Current,
    session::{ReplyTo, Session, objects},
    submit::{
        completion::Completion,
        fences::{InFlightFences, Marker},
        host_calls::HostCalls,
        order::EventUse,
        time::{Permit, SequenceTicket, Time},
        unmarked::{Unmarked, UnmarkedWork, WorkPiece},
    },
};
use sluice_cuda_abi::status;
use sluice_driver::{
    ArrayCopy, ArrayCopyEnd, Code, DeviceRange, Driver, Handle, HostRange, LaunchArguments, LaunchAttribute,
    Pitches, Rows, code,
};
use sluice_protocol::limits;
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
    /// A copy between devices, by contexts of theirs.
    MemcpyPeer {
        to: (DeviceRange, Handle),
        from: (DeviceRange, Handle),
    },
    Memcpy2dPeer {
        to: (DeviceRange, u64, Handle),
        from: (DeviceRange, u64, Handle),
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

    /// True if it holds its stream, or other work follows it in an order that the guest can observe.
    const fn stands_apart(&self) -> bool {
        matches!(
            self,
            Operation::Wait { .. }
                | Operation::WaitValue { .. }
                | Operation::ContextRecord { .. }
                | Operation::HostCall { .. }
                | Operation::GraphLaunch { .. }
        )
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
            Operation::MemcpyPeer { to, .. } => sized(11, to.0.bytes()),
            Operation::Memcpy2dPeer { rows, .. } => sized(12, area(rows)),
            Operation::GraphLaunch { executable, nodes } => {
                Some(WorkKind::new(*executable, u64::from(*nodes)))
            }
            Operation::Launch(launch) => {
                let [x, y, z] = launch.grid.map(u64::from);
                Some(WorkKind::new(launch.function, x ^ y.rotate_left(24) ^ z.rotate_left(48)))
            }
        }
    }

    /// Its use of events, and `None` if it has its place among all items of the queue.
    const fn events(&self) -> Option<EventUse> {
        Some(match *self {
            Operation::ContextRecord { .. } => return None,
            Operation::Wait { event } => EventUse::Waits(event),
            Operation::Record { event } => EventUse::Records(event),
            Operation::GraphLaunch { .. } => EventUse::Unknown,
            _ => EventUse::None,
        })
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

/// Pieces of work with new markers of which the completion thread is notified even though the ring has not run empty: a quarter of a
/// stream's credits.
const UNANNOUNCED: u64 = limits::STREAM_CREDITS / 4;

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
    /// While this is not empty, no work is admitted: see [`Submitter::settle`].
    stuck: Vec<Stuck>,
    /// Streams that may be held, and for which others may wait implicitly.
    held: Vec<WorkTarget>,
    /// Pieces of work with markers of which the completion thread was not notified.
    unannounced: u64,
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
            unmarked: Unmarked::new(),
            stuck: Vec::new(),
            held: Vec::new(),
            unannounced: 0,
        }
    }

    /// True if a piece of work may be submitted now: its stream has room in the driver, and its device admits it. While the window is
    /// full, a stream may still have one piece in flight, and two if no other VM requests the device; so every stream that is held
    /// back has work ahead of it. Work behind a wait is not in flight and does not fill the window.
    pub(crate) fn admits(&self, work: &Work) -> bool {
        if self.is_stuck() || !self.has_room(work) {
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
                let unmarked = u64::from(self.unmarked.pieces(work.target.slot));
                stream_fences.is_held() || stream_fences.pending() + unmarked < if alone { 2 } else { 1 }
            }
        }
    }

    /// Pieces of work of one stream that the driver takes without making this thread wait.
    pub(crate) fn room(&self) -> u64 {
        self.fences.room()
    }

    /// True if the driver takes a piece of work without making this thread wait for earlier work of its stream. After a failure it refuses
    /// work at once, and no sequence completes any more.
    pub(crate) fn has_room(&self, work: &Work) -> bool {
        let ahead = work.sequence.wrapping_sub(self.session.completed(work.target.slot));
        ahead <= self.room() || self.has_failed()
    }

    /// True if work of the session has failed in a way that all later work finds.
    pub(crate) fn has_failed(&self) -> bool {
        self.session.sticky().is_some()
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
        let mut piece = self.piece(work, payload);
        self.mark_before(current, &piece);
        if let Some((from, rows)) = work.operation.reads_host() {
            self.attached.fetch(from.address(), rows);
        }
        // Work that takes no time ends with the work before it.
        let ticket = piece.takes_time.then(|| self.begin(current, work));
        if ticket.is_some_and(|ticket| ticket.is_guessed() || ticket.is_held()) {
            // The end of this work alone shows the duration of its kind, or whether its stream is still held.
            (piece.may_wait, piece.stands_apart) = (false, true);
            self.mark_before(current, &piece);
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
        // A wait in the place of a marker covers all work of the stream up to then.
        for stuck in self.stuck.iter_mut().filter(|stuck| stuck.target.slot == target.slot) {
            stuck.sequence = work.sequence;
        }
        piece.may_wait &= result.is_ok();
        let before = self.unmarked.after(&piece, (work.sequence, work.reply.context), ticket);
        if let Some(before) = before {
            // There is room for the tickets of as many pieces as a stream has credits.
            let staged = self.fences.of(target.slot).stage(before);
            debug_assert!(staged, "more pieces than credits");
        }
        if let Some(enough) = self.unmarked.enough(target.slot, self.time.marker_interval(target.device)) {
            self.mark_work(current, enough);
        }
        result
    }

    /// The properties of a piece of work that decide on markers.
    fn piece(&self, work: &Work, payload: Payload<'_>) -> WorkPiece {
        let operation = &work.operation;
        let is_launch = matches!(operation, Operation::Launch(_));
        // A host function of another stream that waits for the event may read gathered memory, which has the bytes only once the
        // marker of the copies was seen.
        let follows_copies = matches!(operation, Operation::Record { .. })
            && self.fences.of(work.target.slot).has_write_backs();
        WorkPiece {
            target: work.target,
            takes_time: operation.takes_time(),
            may_wait: is_launch && !payload.attributes.iter().any(LaunchAttribute::records_event),
            stands_apart: operation.stands_apart() || follows_copies,
            follows_context: matches!(operation, Operation::ContextRecord { .. }),
        }
    }

    /// Marks the work that must be marked before a piece is submitted.
    fn mark_before(&mut self, current: &mut Current, piece: &WorkPiece) {
        while let Some(work) = self.unmarked.before(piece) {
            self.mark_work(current, work);
        }
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
        if stream_fences.pending() == 0 && !is_held && self.unmarked.pieces(target.slot) == 0 {
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
        let may_mark = fences.has_spare() && !fences.of(target.slot).is_held();
        if !waits || !may_mark || self.has_failed() {
            return;
        }
        self.mark_stream(current, target.slot);
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
            self.session.publish_text(|| self.driver.cuCtxSynchronize());
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
                .and_then(|()| self.driver.cuStreamSynchronize(target.stream));
            let marker = Marker { sequence, event: 0, context: target.context, ticket, staged: 0 };
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
            Operation::MemcpyDtod { to, .. } | Operation::MemcpyPeer { to: (to, _), .. } => {
                self.time.copy(device, to.bytes());
            }
            Operation::Memcpy2dHtod { rows, .. }
            | Operation::Memcpy2dDtoh { rows, .. }
            | Operation::Memcpy2dDtod { rows, .. }
            | Operation::Memcpy2dPeer { rows, .. } => self.time.copy(device, area(rows)),
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
            Operation::MemcpyPeer { to, from } => driver.memcpy_peer(to, from, stream),
            Operation::Memcpy2dPeer { to, from, rows } => driver.memcpy_2d_peer(to, from, rows, stream),
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
            Operation::GraphLaunch { executable, .. } => driver.cuGraphLaunch(executable, stream),
            Operation::Wait { event } => driver.cuStreamWaitEvent(stream, event, 0),
            Operation::Record { event } => driver.cuEventRecord(event, stream),
            Operation::ContextRecord { event } => {
                driver.cuCtxRecordEvent(target.context.handle, event)?;
                driver.cuStreamWaitEvent(stream, event, 0)
            }
            Operation::HostCall { token } => {
                self.host_calls.launch(driver, target.stream, (target.slot, sequence), token)
            }
        }
    }

    /// Marks all work that is not marked yet.
    pub(crate) fn mark(&mut self, current: &mut Current) {
        while let Some(work) = self.unmarked.any() {
            self.mark_work(current, work);
        }
    }

    /// Marks all work and notifies the completion thread, for a caller that is about to wait.
    pub(crate) fn mark_before_wait(&mut self, current: &mut Current) {
        self.mark(current);
        self.announce();
    }

    /// Marks the work of a stream.
    pub(crate) fn mark_stream(&mut self, current: &mut Current, slot: u32) {
        if let Some(work) = self.unmarked.of_stream(slot) {
            self.mark_work(current, work);
        }
    }

    /// Marks the work whose end must be seen although nothing asks for it.
    pub(crate) fn mark_due(&mut self, current: &mut Current) {
        let time = Arc::clone(&self.time);
        while let Some(work) = self.unmarked.due(|device| time.is_shared(device)) {
            self.mark_work(current, work);
        }
    }

    fn mark_work(&mut self, current: &mut Current, work: UnmarkedWork) {
        let UnmarkedWork { target, sequence, owner, ticket, .. } = work;
        match self.place(current, target, sequence, ticket) {
            Ok(()) => {}
            Err(failed) if status::is_sticky(failed) => self.fail(failed, ticket),
            Err(failed) => {
                self.session.post_failed(owner, failed);
                self.stuck.push(Stuck { target, sequence, ticket });
            }
        }
        self.unannounced += u64::from(work.pieces());
        if self.unannounced >= UNANNOUNCED {
            self.announce();
        }
    }

    /// True if there is work without a marker.
    pub(crate) fn has_unmarked(&self) -> bool {
        !self.unmarked.is_empty()
    }

    /// True if there are markers of which the completion thread was not notified.
    pub(crate) const fn has_unannounced(&self) -> bool {
        self.unannounced > 0
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
        self.driver.cuEventRecord(event, target.stream)?;
        let marker = Marker { sequence, event, context: target.context, ticket, staged: 0 };
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
            self.driver.cuEventDestroy_v2(marker.event)?;
        }
        // With timing: the time at which it is reached is read from it.
        self.driver.cuEventCreate(0)
    }

    /// Notifies the completion thread of new markers, unless all are reached.
    pub(crate) fn announce(&mut self) {
        if core::mem::take(&mut self.unannounced) > 0 && self.completion.is_pending() {
            self.completion.notify();
        }
    }

    /// True if work of a context is in flight.
    pub(crate) fn uses(&self, context: objects::ContextRef) -> bool {
        self.fences.uses(context) || self.unmarked.contains(|target| target.context == context)
    }

    /// Destroys the events of a context that is being destroyed.
    pub(crate) fn forget(&mut self, context: objects::ContextRef) {
        self.held.retain(|held| held.context != context);
        self.completion.forget(context);
        self.fences.purge(context, |marker| {
            if let Err(failed) = self.driver.cuEventDestroy_v2(marker.event) {
                tracing::debug!(code = failed, "cannot destroy an event");
            }
        });
    }
}

#[cfg(test)]
mod tests;
