//! Work for the GPU, resolved and checked, on its way into the driver.
//!
//! A [`Submitter`] puts work on a stream and marks it: it records an event directly behind the work, before work of any other
//! stream can come between, so the marker orders nothing that the work did not order already (an event in the legacy default
//! stream would). Before work that takes time, the earlier work of its stream is marked, too: a guest thread may wait for just
//! that, and the wait must not last longer for work posted after it; or it may release a kernel only once it saw the earlier
//! work complete. So one marker serves several pieces of work only where those behind the first take no time, such as the
//! recording of an event.

pub(crate) mod completion;
#[cfg(test)]
mod cost;
pub(crate) mod event_clock;
pub(crate) mod lanes;
pub(crate) mod local;
pub(crate) mod queue;
pub(crate) mod time;

use crate::{
    arenas::Attached,
    session::{ReplyTo, Session, objects},
    submit::{
        completion::{Completion, Current},
        lanes::{ContextRef, Lanes, Marker},
        time::{Permit, Ticket, Time},
    },
};
use sluice_cuda_abi::status;
use sluice_driver::{Code, Device, Driver, Handle, Host, Launch, LaunchAttribute, Rows, code};
use sluice_runtime::clock::nanoseconds as now;
use sluice_scheduler::estimate::Kind;
use std::sync::Arc;

/// A stream as work is put on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) slot: u32,
    pub(crate) stream: Handle,
    pub(crate) context: ContextRef,
    /// Ordinal of the context's device.
    pub(crate) device: u8,
    pub(crate) order: Order,
}

/// Which streams of its context a stream waits for without being told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The default stream: for those that are [`Order::Blocking`].
    Default,
    /// For the default stream.
    Blocking,
    /// For none.
    Apart,
}

impl Order {
    const fn waits_for(self, other: Order) -> bool {
        matches!((self, other), (Order::Default, Order::Blocking) | (Order::Blocking, Order::Default))
    }
}

impl Target {
    pub(crate) fn new(slot: u32, stream: Handle, context: &objects::Context, order: Order) -> Target {
        // A session has fewer devices.
        let device = u8::try_from(context.device).unwrap_or(u8::MAX);
        Target { slot, stream, context: context.context, device, order }
    }
}

/// What is to be done on a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operation {
    /// Nothing: the call was refused, or moves no bytes. Its sequence completes with what is before it.
    Nothing,
    CopyToDevice {
        to: Device,
        from: Host,
    },
    CopyFromDevice {
        to: Host,
        from: Device,
    },
    CopyOnDevice {
        to: Device,
        from: Device,
    },
    CopyRowsToDevice {
        to: (Device, u64),
        from: (Host, u64),
        rows: Rows,
    },
    CopyRowsFromDevice {
        to: (Host, u64),
        from: (Device, u64),
        rows: Rows,
    },
    CopyRowsOnDevice {
        to: (Device, u64),
        from: (Device, u64),
        rows: Rows,
    },
    Fill {
        to: Device,
        element: u32,
        value: u32,
        rows: Rows,
    },
    /// With the attributes and parameters of its [`Payload`].
    Launch(Launch),
    Wait {
        event: Handle,
        flags: u32,
    },
    Record {
        event: Handle,
        flags: u32,
    },
}

impl Operation {
    /// Whether it may complete later than what is before it in its stream.
    const fn takes_time(&self) -> bool {
        !matches!(self, Operation::Nothing | Operation::Record { .. })
    }

    /// Whether it makes the device work.
    const fn is_work(&self) -> bool {
        !matches!(self, Operation::Nothing | Operation::Wait { .. } | Operation::Record { .. })
    }

    /// What kind of work it is, if it is any.
    fn kind(&self) -> Option<Kind> {
        // Copies of about the same size are of a kind; launches are that with the same grid.
        let sized = |tag: u64, bytes: u64| Some(Kind::new(tag, bytes.checked_ilog2().unwrap_or(0).into()));
        match self {
            Operation::Nothing | Operation::Wait { .. } | Operation::Record { .. } => None,
            Operation::CopyToDevice { to, .. } => sized(1, to.bytes()),
            Operation::CopyFromDevice { to, .. } => sized(2, to.bytes()),
            Operation::CopyOnDevice { to, .. } => sized(3, to.bytes()),
            Operation::CopyRowsToDevice { rows, .. } => sized(4, area(rows)),
            Operation::CopyRowsFromDevice { rows, .. } => sized(5, area(rows)),
            Operation::CopyRowsOnDevice { rows, .. } => sized(6, area(rows)),
            Operation::Fill { rows, .. } => sized(7, area(rows)),
            Operation::Launch(launch) => {
                let [x, y, z] = launch.grid.map(u64::from);
                Some(Kind::new(launch.function, x ^ y.rotate_left(24) ^ z.rotate_left(48)))
            }
        }
    }

    /// The host memory it copies from.
    const fn reads_host(&self) -> Option<(Host, Rows)> {
        match *self {
            Operation::CopyToDevice { from, .. } => Some((from, one_row(from))),
            Operation::CopyRowsToDevice { from: (from, pitch), rows, .. } => {
                Some((from, Rows { pitch, ..rows }))
            }
            _ => None,
        }
    }

    /// The host memory it copies to.
    const fn writes_host(&self) -> Option<(Host, Rows)> {
        match *self {
            Operation::CopyFromDevice { to, .. } => Some((to, one_row(to))),
            Operation::CopyRowsFromDevice { to: (to, pitch), rows, .. } => Some((to, Rows { pitch, ..rows })),
            _ => None,
        }
    }
}

/// Bytes that rows have.
const fn area(rows: &Rows) -> u64 {
    rows.width.saturating_mul(rows.height)
}

/// A range as rows.
const fn one_row(range: Host) -> Rows {
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
    pub(crate) target: Target,
    pub(crate) sequence: u64,
    pub(crate) reply: ReplyTo,
    pub(crate) operation: Operation,
}

/// Work that may share one marker.
const BATCH: u32 = 32;
/// Markers after which the completion thread is told even though the ring has not run empty.
const UNTOLD: u32 = 16;

/// Which work is not marked yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Unmarked {
    /// Stream slot and last sequence; nothing is unmarked for `count` 0.
    slot: u32,
    sequence: u64,
    count: u32,
}

impl Unmarked {
    /// Whether a marker must be placed before the next work is submitted.
    const fn before(self, slot: u32, takes_time: bool) -> bool {
        self.count > 0 && (self.slot != slot || takes_time)
    }

    /// Counts work that was submitted; `true` when it must be marked at once.
    const fn after(&mut self, slot: u32, sequence: u64) -> bool {
        *self = Unmarked { slot, sequence, count: self.count + 1 };
        self.count >= BATCH
    }
}

/// Work whose marker could not be placed. It is waited for instead, by a thread that may wait.
#[derive(Clone, Copy, Debug)]
struct Stuck {
    target: Target,
    sequence: u64,
    ticket: Ticket,
}

/// Submits to the driver; used by one thread at a time.
#[derive(Debug)]
pub(crate) struct Submitter {
    driver: Arc<Driver>,
    session: Arc<Session>,
    lanes: Arc<Lanes>,
    completion: Arc<Completion>,
    attached: Arc<Attached>,
    time: Arc<Time>,
    unmarked: Unmarked,
    /// Where `unmarked` is, if anything is.
    target: Option<Target>,
    /// What ends with it.
    ticket: Ticket,
    /// Index of the guest's context that it is of.
    owner: u32,
    /// While there is any, no work is admitted: see [`Submitter::settle`].
    stuck: Vec<Stuck>,
    /// Streams that may be held, and that others may wait for without being told.
    held: Vec<Target>,
    /// Markers the completion thread was not told of.
    untold: u32,
}

impl Submitter {
    pub(crate) fn new(
        driver: Arc<Driver>,
        session: Arc<Session>,
        lanes: Arc<Lanes>,
        completion: Arc<Completion>,
        attached: Arc<Attached>,
        time: Arc<Time>,
    ) -> Submitter {
        Submitter {
            driver,
            session,
            lanes,
            completion,
            attached,
            time,
            unmarked: Unmarked::default(),
            target: None,
            ticket: Ticket::default(),
            owner: 0,
            stuck: Vec::new(),
            held: Vec::new(),
            untold: 0,
        }
    }

    /// Whether a piece of work may be submitted now. While the window is full, a stream still may have one piece under way, and
    /// two where nobody else wants the device; so whoever is held back has something ahead of it. What stands behind a wait is
    /// not under way and does not fill the window.
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
                let lane = self.lanes.lane(work.target.slot);
                let unmarked = u64::from(self.unmarked.count > 0 && self.unmarked.slot == work.target.slot);
                lane.is_held() || lane.pending() + unmarked < if alone { 2 } else { 1 }
            }
        }
    }

    /// Submits one piece of work. Its sequence counts whether or not the driver takes it. The failure of a post is kept for its
    /// context here, before the sequence can complete.
    pub(crate) fn submit(
        &mut self,
        current: &mut Current,
        work: &Work,
        payload: Payload<'_>,
    ) -> Result<(), Code> {
        let target = work.target;
        if self.unmarked.before(target.slot, work.operation.takes_time()) {
            self.mark(current);
        }
        if let Some((from, rows)) = work.operation.reads_host() {
            self.attached.fetch(from.address(), rows);
        }
        // Nothing that counts comes behind the first piece under one marker.
        if self.unmarked.count == 0 {
            self.ticket = self.begin(current, work);
        }
        let result = current
            .set(&self.driver, target.context)
            .and_then(|()| self.run(target.stream, &work.operation, payload));
        if let Err(failed) = result {
            self.publish_text(failed);
            self.session.work_failed(work.reply, failed);
        }
        self.count(target.device, &work.operation);
        if let Some((to, rows)) = work.operation.writes_host()
            && result.is_ok()
            && self.attached.is_gathered(to.address(), to.bytes())
        {
            self.lanes.lane(target.slot).owe(work.sequence, to.address(), rows);
        }
        self.target = Some(target);
        self.owner = work.reply.context;
        // What is waited for instead of a marker is all that the stream has by then.
        for stuck in self.stuck.iter_mut().filter(|stuck| stuck.target.slot == target.slot) {
            stuck.sequence = work.sequence;
        }
        if self.unmarked.after(target.slot, work.sequence) {
            self.mark(current);
        }
        result
    }

    /// What ends with a piece of work, which is counted as begun if it can run.
    fn begin(&mut self, current: &mut Current, work: &Work) -> Ticket {
        let target = work.target;
        if let Operation::Wait { event, .. } = work.operation {
            let pends =
                current.set(&self.driver, target.context).and_then(|()| self.driver.event_done(event));
            // What was reached, or never recorded, holds up nothing.
            if pends != Ok(false) {
                return Ticket::nothing(target.device);
            }
            self.hold(target);
            return Ticket::wait(target.device);
        }
        let Some(kind) = work.operation.kind() else { return Ticket::nothing(target.device) };
        if !self.held.is_empty() {
            self.wait_for_held(current, work);
        }
        let lane = self.lanes.lane(target.slot);
        let is_held = lane.is_held();
        if lane.pending() == 0 && !is_held {
            lane.start(now());
        }
        self.time.begin(target.device, kind, is_held)
    }

    /// What comes behind this in its stream is held.
    fn hold(&mut self, target: Target) {
        self.lanes.lane(target.slot).hold();
        if target.order != Order::Apart && !self.held.iter().any(|held| held.slot == target.slot) {
            self.held.push(target);
        }
    }

    /// The default stream waits for what others hold, and others for what it holds: a marker before the work is reached when
    /// that is over. The work itself would add the same order.
    fn wait_for_held(&mut self, current: &mut Current, work: &Work) {
        let target = work.target;
        let lanes = Arc::clone(&self.lanes);
        self.held.retain(|held| lanes.lane(held.slot).is_held());
        let waits =
            self.held.iter().any(|held| held.context == target.context && target.order.waits_for(held.order));
        if !waits || lanes.lane(target.slot).is_held() || self.session.sticky().is_some() {
            return;
        }
        // Of everything before it in its stream: what comes before the first sequence is nothing.
        match self.place(current, target, work.sequence.wrapping_sub(1), Ticket::wait(target.device)) {
            Ok(()) => self.hold(target),
            Err(failed) if status::is_sticky(failed) => self.fail(failed, Ticket::wait(target.device)),
            // The wait counts as work, then.
            Err(failed) => tracing::debug!(code = failed, "a wait is not marked"),
        }
    }

    /// Behind a failure nothing appears done any more.
    fn fail(&self, failed: Code, ticket: Ticket) {
        self.publish_text(failed);
        self.session.set_sticky(failed);
        self.time.abandon(ticket);
    }

    /// Offers the text of kernels before a failure that breaks their context is published. The wait for such a context is short.
    fn publish_text(&self, failed: Code) {
        if status::is_sticky(failed) {
            self.session.publish_text(|| self.driver.stream_synchronize(0));
        }
    }

    /// Whether work is under way without a marker that would show its end.
    pub(crate) const fn is_stuck(&self) -> bool {
        !self.stuck.is_empty()
    }

    /// Waits for work whose markers could not be placed, so that it appears done. For a thread that may wait.
    #[cold]
    pub(crate) fn settle(&mut self, current: &mut Current) {
        for Stuck { target, sequence, ticket } in core::mem::take(&mut self.stuck) {
            let ended = current
                .set(&self.driver, target.context)
                .and_then(|()| self.driver.stream_synchronize(target.stream));
            let marker = Marker { sequence, event: 0, context: target.context, ticket };
            match ended {
                Ok(()) if self.lanes.push(target.slot, marker) => self.untold += 1,
                Ok(()) => self.fail(code::UNKNOWN, ticket),
                Err(failed) => self.fail(failed, ticket),
            }
        }
        self.tell();
    }

    /// Counts what the VM's figures show.
    fn count(&self, device: u8, operation: &Operation) {
        match operation {
            Operation::Launch(_) => self.time.launch(device),
            Operation::CopyToDevice { to, .. } => self.time.copy(device, to.bytes()),
            Operation::CopyFromDevice { to, .. } => self.time.copy(device, to.bytes()),
            Operation::CopyOnDevice { to, .. } => self.time.copy(device, to.bytes()),
            Operation::CopyRowsToDevice { rows, .. }
            | Operation::CopyRowsFromDevice { rows, .. }
            | Operation::CopyRowsOnDevice { rows, .. } => self.time.copy(device, area(rows)),
            Operation::Nothing
            | Operation::Fill { .. }
            | Operation::Wait { .. }
            | Operation::Record { .. } => {}
        }
    }

    fn run(&self, stream: Handle, operation: &Operation, payload: Payload<'_>) -> Result<(), Code> {
        let driver = &self.driver;
        match *operation {
            Operation::Nothing => Ok(()),
            Operation::CopyToDevice { to, from } => driver.copy_to_device(to, from, stream),
            Operation::CopyFromDevice { to, from } => driver.copy_from_device(to, from, stream),
            Operation::CopyOnDevice { to, from } => driver.copy_on_device(to, from, stream),
            Operation::CopyRowsToDevice { to, from, rows } => {
                driver.copy_rows_to_device(to, from, rows, stream)
            }
            Operation::CopyRowsFromDevice { to, from, rows } => {
                driver.copy_rows_from_device(to, from, rows, stream)
            }
            Operation::CopyRowsOnDevice { to, from, rows } => {
                driver.copy_rows_on_device(to, from, rows, stream)
            }
            Operation::Fill { to, element, value, rows } => driver.fill(to, element, value, rows, stream),
            Operation::Launch(launch) => {
                driver.launch(&launch, payload.attributes, payload.parameters, stream)
            }
            Operation::Wait { event, flags } => driver.stream_wait(stream, event, flags),
            Operation::Record { event, flags } => driver.event_record(event, flags, stream),
        }
    }

    /// Marks what is not marked yet.
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
        self.untold += 1;
        if self.untold >= UNTOLD {
            self.tell();
        }
    }

    fn place(
        &self,
        current: &mut Current,
        target: Target,
        sequence: u64,
        ticket: Ticket,
    ) -> Result<(), Code> {
        current.set(&self.driver, target.context)?;
        let event = self.event(target)?;
        self.driver.event_record(event, 0, target.stream)?;
        let marker = Marker { sequence, event, context: target.context, ticket };
        if self.lanes.push(target.slot, marker) { Ok(()) } else { Err(code::UNKNOWN) }
    }

    /// An event of the target's context: one that came back, or a new one.
    fn event(&self, target: Target) -> Result<Handle, Code> {
        let lane = self.lanes.lane(target.slot);
        while let Some(marker) = lane.recycled() {
            if marker.context == target.context {
                return Ok(marker.event);
            }
            // The slot has a stream of another context now.
            self.driver.event_destroy(marker.event)?;
        }
        // With timing: it is asked when it was reached.
        self.driver.event_create(0)
    }

    /// Tells the completion thread of markers it may not know of.
    pub(crate) fn tell(&mut self) {
        if self.untold > 0 {
            self.untold = 0;
            self.completion.notify();
        }
    }

    /// Whether work of a context is under way.
    pub(crate) fn uses(&self, context: ContextRef) -> bool {
        self.lanes.uses(context)
    }

    /// Lets go of the events of a context that is going away.
    pub(crate) fn forget(&mut self, context: ContextRef) {
        self.held.retain(|held| held.context != context);
        self.completion.forget(context);
        self.lanes.purge(context, |marker| {
            if let Err(failed) = self.driver.event_destroy(marker.event) {
                tracing::debug!(code = failed, "event not destroyed");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Work { slot: u32, slow: bool },
        Empty,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0_u32..3, any::<bool>()).prop_map(|(slot, slow)| Step::Work { slot, slow }),
            1 => Just(Step::Empty),
        ]
    }

    proptest! {
        /// What the rules promise, whatever comes: a marker is placed before another stream is touched, before anything
        /// that takes time, within a batch, and when the ring runs empty.
        #[test]
        fn markers_follow_their_work(steps in prop::collection::vec(step(), 0..300)) {
            let mut unmarked = Unmarked::default();
            let mut waiting = Vec::<(u32, u64)>::new();
            let mut sequence = 0;
            for step in steps {
                match step {
                    Step::Empty => {
                        unmarked = Unmarked::default();
                        waiting.clear();
                    }
                    Step::Work { slot, slow } => {
                        if unmarked.before(slot, slow) {
                            prop_assert!(!waiting.is_empty(), "nothing to mark");
                            unmarked = Unmarked::default();
                            waiting.clear();
                        }
                        prop_assert!(waiting.iter().all(|(other, _)| *other == slot && !slow));
                        sequence += 1;
                        waiting.push((slot, sequence));
                        if unmarked.after(slot, sequence) {
                            prop_assert_eq!(unmarked.sequence, sequence);
                            unmarked = Unmarked::default();
                            waiting.clear();
                        }
                        prop_assert!(waiting.len() < BATCH as usize);
                    }
                }
            }
        }
    }

    #[test]
    fn only_what_takes_no_time_shares_a_marker() {
        let mut unmarked = Unmarked::default();
        assert!(!unmarked.before(1, true), "nothing to mark");
        assert!(!unmarked.after(1, 1));
        assert!(!unmarked.before(1, false), "an event behind a kernel");
        assert!(unmarked.before(1, true), "a kernel may spin until the guest saw what was before it");
        assert!(unmarked.before(2, false), "another stream");
        let event = Operation::Record { event: 0, flags: 0 };
        assert!(!event.takes_time());
        assert!(Operation::Wait { event: 0, flags: 0 }.takes_time());
    }
}
