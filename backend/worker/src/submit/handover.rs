//! The hand-over between the dispatcher and the submitter thread: the items that wait, and the one submitter.
//!
//! Only the thread that holds the submitter submits. While an item waits, or the submitter thread performs one, the dispatcher does not
//! get the submitter back, so items keep their order whichever thread performs them. The submitter thread performs them in the order of
//! the queue, except that an item without room stays there while later ones pass it, as [`super::order`] allows. The module knows
//! nothing of the driver, so a model can check all its interleavings.

use core::{sync::atomic::Ordering, time::Duration};
#[cfg(all(test, loom))]
use loom::sync::{Condvar, Mutex, MutexGuard, atomic::AtomicBool};
#[cfg(all(test, loom))]
use model::fence;
#[cfg(not(all(test, loom)))]
use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, fence},
};
use std::{collections::VecDeque, sync::PoisonError};

/// An item that waits for the submitter.
pub(super) trait QueuedItem {
    /// Bytes that it takes in the queue.
    fn bytes(&self) -> usize;

    /// The stream slot of an item of work.
    fn slot(&self) -> Option<u32>;
}

/// A submitter.
pub(super) trait HandedOver {
    /// True if it has to settle, which may wait, before it submits more.
    fn is_stuck(&self) -> bool;
}

/// The item that is to be performed next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The item at this place in the queue.
    Perform(usize),
    /// One that is not admitted yet.
    Refused,
    /// None: all wait for room in their streams.
    Full,
}

/// The next step of the submitter thread.
#[derive(Debug)]
pub(super) enum SubmitStep<S, I> {
    /// The submitter has to settle, and is then given back.
    Settle(S),
    /// The next item is not admitted; `mixed` is true if the queue has items of more than one stream. The submitter is given back
    /// before the thread waits.
    Refused { submitter: S, mixed: bool },
    /// No item has room. The submitter is given back by [`Handover::await_room`].
    Full(S),
    /// The item has to be performed, and the submitter is then given back; `last` is true if no item waits behind it.
    Perform { submitter: S, item: I, last: bool },
}

#[derive(Debug)]
struct HandoverState<S, I> {
    items: VecDeque<I>,
    bytes: usize,
    /// Here while the submitter thread may use it, and until the dispatcher takes it back.
    submitter: Option<S>,
    /// The submitter thread holds the submitter.
    submitting: bool,
    /// True if the queue has items of more than one stream.
    mixed: bool,
    /// Since the latest choice an item came, or a stream got room.
    changed: bool,
}

impl<S: HandedOver, I> HandoverState<S, I> {
    /// The submitter, if no item waits and the submitter thread neither holds it nor needs it.
    fn hand_back(&mut self) -> Option<S> {
        let done = self.items.is_empty() && !self.submitting;
        if done { self.submitter.take_if(|submitter| !submitter.is_stuck()) } else { None }
    }
}

/// The queue of items, and the submitter while the dispatcher does not hold it.
#[derive(Debug)]
pub(super) struct Handover<S, I> {
    state: Mutex<HandoverState<S, I>>,
    changed: Condvar,
    /// Set while items wait for room.
    awaits_room: AtomicBool,
    /// Limit on the bytes of waiting items. At it the dispatcher waits.
    most: usize,
}

impl<S: HandedOver, I: QueuedItem> Handover<S, I> {
    pub(super) fn new(most: usize) -> Handover<S, I> {
        let state = HandoverState {
            items: VecDeque::new(),
            bytes: 0,
            submitter: None,
            submitting: false,
            mixed: false,
            changed: false,
        };
        let awaits_room = AtomicBool::new(false);
        Handover { state: Mutex::new(state), changed: Condvar::new(), awaits_room, most }
    }

    fn lock(&self) -> MutexGuard<'_, HandoverState<S, I>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, HandoverState<S, I>>) -> MutexGuard<'a, HandoverState<S, I>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self) {
        #[cfg(all(test, loom))]
        if model::is_broken() {
            return;
        }
        self.changed.notify_all();
    }

    /// Queues an item, together with the submitter if the dispatcher has it. Waits only if too much is queued.
    pub(super) fn queue(&self, submitter: &mut Option<S>, item: I) {
        let mut state = self.lock();
        if let Some(lent) = submitter.take() {
            state.submitter = Some(lent);
        }
        while state.bytes > self.most {
            state = self.wait(state);
        }
        state.bytes += item.bytes();
        state.mixed |= state.items.back().is_some_and(|last| last.slot() != item.slot());
        state.items.push_back(item);
        state.changed = true;
        self.notify();
    }

    /// Lends the submitter to the submitter thread.
    pub(super) fn lend(&self, submitter: &mut Option<S>) {
        self.lock().submitter = submitter.take();
        self.notify();
    }

    /// The submitter, if the submitter thread no longer uses it.
    pub(super) fn take_back(&self) -> Option<S> {
        self.lock().hand_back()
    }

    /// As [`Handover::take_back`], but waits up to `limit` for the submitter thread to finish. Does not wait for queued items.
    pub(super) fn take_back_soon(&self, limit: Duration) -> Option<S> {
        let just_submitting = |state: &mut HandoverState<S, I>| state.submitting && state.items.is_empty();
        self.wait_while(self.lock(), limit, just_submitting).hand_back()
    }

    #[cfg(not(all(test, loom)))]
    fn wait_while<'a>(
        &self,
        state: MutexGuard<'a, HandoverState<S, I>>,
        limit: Duration,
        condition: impl FnMut(&mut HandoverState<S, I>) -> bool,
    ) -> MutexGuard<'a, HandoverState<S, I>> {
        self.changed.wait_timeout_while(state, limit, condition).unwrap_or_else(PoisonError::into_inner).0
    }

    /// In a model no time passes.
    #[cfg(all(test, loom))]
    fn wait_while<'a>(
        &self,
        mut state: MutexGuard<'a, HandoverState<S, I>>,
        _limit: Duration,
        mut condition: impl FnMut(&mut HandoverState<S, I>) -> bool,
    ) -> MutexGuard<'a, HandoverState<S, I>> {
        while condition(&mut state) {
            state = self.wait(state);
        }
        state
    }

    /// Waits for the submitter thread's next step. `choose` finds the item to perform. It is called under the lock, for which the
    /// dispatcher may wait.
    pub(super) fn next(&self, mut choose: impl FnMut(&S, &VecDeque<I>) -> Choice) -> SubmitStep<S, I> {
        let mut state = self.lock();
        loop {
            if let Some(submitter) = state.submitter.take_if(|submitter| submitter.is_stuck()) {
                state.submitting = true;
                return SubmitStep::Settle(submitter);
            }
            let HandoverState { items, submitter, .. } = &mut *state;
            if !items.is_empty()
                && let Some(submitter) = submitter.take()
            {
                let mut choice = choose(&submitter, items);
                if choice == Choice::Full {
                    // With this store before the second look, and the room made before the load, one of the two threads sees the
                    // other's.
                    self.awaits_room.store(true, Ordering::Relaxed);
                    fence(Ordering::SeqCst);
                    choice = choose(&submitter, items);
                }
                let item = if let Choice::Perform(at) = choice { items.remove(at) } else { None };
                (state.submitting, state.changed) = (true, false);
                let Some(item) = item else {
                    return match choice {
                        Choice::Full => SubmitStep::Full(submitter),
                        _ => SubmitStep::Refused { submitter, mixed: state.mixed },
                    };
                };
                state.bytes -= item.bytes();
                let last = state.items.is_empty();
                state.mixed &= !last;
                return SubmitStep::Perform { submitter, item, last };
            }
            state = self.wait(state);
        }
    }

    /// Gives the submitter back, and waits until a stream may have got room, an item comes or the submitter has to settle.
    pub(super) fn await_room(&self, submitter: S) {
        let mut state = self.lock();
        state.submitting = false;
        let is_stuck = submitter.is_stuck();
        state.submitter = Some(submitter);
        while !state.changed && !is_stuck {
            state = self.wait(state);
        }
    }

    /// Has the submitter thread look again if items wait for room, after a stream got some. Costs no lock otherwise.
    pub(super) fn made_room(&self) {
        fence(Ordering::SeqCst);
        if self.awaits_room.load(Ordering::Relaxed) && self.awaits_room.swap(false, Ordering::Relaxed) {
            self.lock().changed = true;
            self.notify();
        }
    }

    /// Gives the submitter back after a step.
    pub(super) fn give_back(&self, submitter: S) {
        let mut state = self.lock();
        state.submitting = false;
        state.submitter = Some(submitter);
        self.notify();
    }
}

/// Model checks: every interleaving of a dispatcher and a submitter thread.
#[cfg(all(test, loom))]
mod model {
    use super::{Choice, Duration, HandedOver, Handover, Ordering, QueuedItem, SubmitStep};
    use std::sync::{Arc, atomic::AtomicU8};

    /// The part that is left out, which the model has to notice: a check that cannot fail proves nothing.
    static BROKEN: AtomicU8 = AtomicU8::new(0);
    const NOTIFICATIONS: u8 = 1;
    const FENCES: u8 = 2;

    pub(super) fn is_broken() -> bool {
        BROKEN.load(Ordering::Relaxed) == NOTIFICATIONS
    }

    pub(super) fn fence(order: Ordering) {
        if BROKEN.load(Ordering::Relaxed) != FENCES {
            loom::sync::atomic::fence(order);
        }
    }

    /// A submitter that records the performed items.
    #[derive(Debug, Default)]
    struct ModelSubmitter {
        performed: Vec<u32>,
        stuck: bool,
    }

    impl HandedOver for ModelSubmitter {
        fn is_stuck(&self) -> bool {
            self.stuck
        }
    }

    /// An item of one byte: its number, and the refusals before it is admitted.
    #[derive(Debug)]
    struct ModelItem(u32, u32);

    impl QueuedItem for ModelItem {
        fn bytes(&self) -> usize {
            1
        }

        fn slot(&self) -> Option<u32> {
            Some(self.0)
        }
    }

    /// The number of the item at which the submitter thread ends.
    const END: u32 = 0;

    type Model = Handover<ModelSubmitter, ModelItem>;

    /// The submitter thread, to the last item. Returns the performed items.
    fn submit(handover: &Model) -> Vec<u32> {
        let mut refused = 0;
        loop {
            let admits = |item: Option<&ModelItem>| item.is_some_and(|ModelItem(_, most)| refused >= *most);
            match handover.next(
                |_, items| {
                    if admits(items.front()) { Choice::Perform(0) } else { Choice::Refused }
                },
            ) {
                SubmitStep::Settle(mut submitter) => {
                    submitter.stuck = false;
                    handover.give_back(submitter);
                }
                SubmitStep::Refused { submitter, .. } => {
                    refused += 1;
                    handover.give_back(submitter);
                }
                SubmitStep::Full(_) => unreachable!("no item waits for room"),
                SubmitStep::Perform { submitter, item: ModelItem(END, _), last } => {
                    assert!(last, "an item behind the last");
                    return submitter.performed;
                }
                SubmitStep::Perform { mut submitter, item, .. } => {
                    refused = 0;
                    submitter.performed.push(item.0);
                    handover.give_back(submitter);
                }
            }
        }
    }

    /// A dispatcher that performs an item by itself when it gets the submitter, and queues it otherwise.
    fn run(most: usize, refusals: u32, stuck: bool, take: fn(&Model) -> Option<ModelSubmitter>) {
        let handover = Arc::new(Model::new(most));
        let thread = loom::thread::spawn({
            let handover = Arc::clone(&handover);
            move || submit(&handover)
        });
        let mut own = Some(ModelSubmitter { stuck, ..ModelSubmitter::default() });
        if stuck {
            handover.lend(&mut own);
        } else {
            handover.queue(&mut own, ModelItem(1, refusals));
        }
        for number in [2, 3] {
            own = own.or_else(|| take(&handover));
            match &mut own {
                Some(submitter) => {
                    assert!(!submitter.stuck, "a submitter that has to settle");
                    submitter.performed.push(number);
                }
                None => handover.queue(&mut own, ModelItem(number, 0)),
            }
        }
        handover.queue(&mut own, ModelItem(END, 0));
        let expected: &[u32] = if stuck { &[2, 3] } else { &[1, 2, 3] };
        assert_eq!(thread.join().unwrap(), expected);
    }

    /// An item waits for room that another thread makes, and a later one passes it meanwhile.
    fn make_room() {
        let handover = Arc::new(Model::new(usize::MAX));
        let room = Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let thread = loom::thread::spawn({
            let (handover, room) = (Arc::clone(&handover), Arc::clone(&room));
            move || {
                let mut performed = Vec::new();
                while performed.len() < 2 {
                    let has_room = |item: &ModelItem| item.0 != 1 || room.load(Ordering::Relaxed);
                    match handover.next(|_, items| {
                        items.iter().position(has_room).map_or(Choice::Full, Choice::Perform)
                    }) {
                        SubmitStep::Full(submitter) => handover.await_room(submitter),
                        SubmitStep::Perform { submitter, item, .. } => {
                            performed.push(item.0);
                            handover.give_back(submitter);
                        }
                        SubmitStep::Settle(_) | SubmitStep::Refused { .. } => unreachable!("only room lacks"),
                    }
                }
                performed
            }
        });
        let mut own = Some(ModelSubmitter::default());
        handover.queue(&mut own, ModelItem(1, 0));
        handover.queue(&mut own, ModelItem(2, 0));
        room.store(true, Ordering::Relaxed);
        handover.made_room();
        let performed = thread.join().unwrap();
        assert!(performed == [1, 2] || performed == [2, 1], "{performed:?}");
    }

    // One test, because the models share the switch.
    #[test]
    fn loom_items_keep_their_order_whichever_thread_performs_them_and_wait_without_notifications() {
        let takes: [fn(&Model) -> Option<ModelSubmitter>; 2] =
            [Handover::take_back, |handover| handover.take_back_soon(Duration::MAX)];
        for take in takes {
            loom::model(move || run(usize::MAX, 0, false, take));
            // The dispatcher waits until the queue is empty.
            loom::model(move || run(0, 0, false, take));
            loom::model(move || run(usize::MAX, 1, false, take));
            loom::model(move || run(usize::MAX, 0, true, take));
        }
        loom::model(make_room);
        for (part, model) in [
            (NOTIFICATIONS, (|| run(usize::MAX, 0, false, Handover::take_back)) as fn()),
            (NOTIFICATIONS, make_room),
            (FENCES, make_room),
        ] {
            BROKEN.store(part, Ordering::Relaxed);
            let noticed = std::panic::catch_unwind(|| loom::model(model));
            assert!(noticed.is_err(), "part {part} does not matter to the model");
        }
    }
}
