//! The hand-over between the dispatcher and the submitter thread: the items that wait, and the one submitter.
//!
//! Only the thread that holds the submitter submits. While an item waits, or the submitter thread performs one, the dispatcher does not
//! get the submitter back, so items keep their order whichever thread performs them. The module knows nothing of the driver, so a
//! model can check all its interleavings.

use core::time::Duration;
#[cfg(all(test, loom))]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, loom)))]
use std::sync::{Condvar, Mutex, MutexGuard};
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

/// The next step of the submitter thread.
#[derive(Debug)]
pub(super) enum SubmitStep<S, I> {
    /// The submitter has to settle, and is then given back.
    Settle(S),
    /// The first item is not admitted; `mixed` is true if the queue has items of more than one stream. The submitter is given back
    /// before the thread waits.
    Refused { submitter: S, mixed: bool },
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
        };
        Handover { state: Mutex::new(state), changed: Condvar::new(), most }
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

    /// Waits for the submitter thread's next step. `admits` is true if the first item may be submitted now. It is called under the lock,
    /// for which the dispatcher may wait.
    pub(super) fn next(&self, mut admits: impl FnMut(&S, &I) -> bool) -> SubmitStep<S, I> {
        let mut state = self.lock();
        loop {
            if let Some(submitter) = state.submitter.take_if(|submitter| submitter.is_stuck()) {
                state.submitting = true;
                return SubmitStep::Settle(submitter);
            }
            let HandoverState { items, submitter, .. } = &mut *state;
            if let Some(first) = items.front()
                && let Some(submitter) = submitter.take()
            {
                let item = if admits(&submitter, first) { items.pop_front() } else { None };
                state.submitting = true;
                let Some(item) = item else {
                    return SubmitStep::Refused { submitter, mixed: state.mixed };
                };
                state.bytes -= item.bytes();
                let last = state.items.is_empty();
                state.mixed &= !last;
                return SubmitStep::Perform { submitter, item, last };
            }
            state = self.wait(state);
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
    use super::{Duration, HandedOver, Handover, QueuedItem, SubmitStep};
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    /// True to leave the notifications out, which the model has to notice: a check that cannot fail proves nothing.
    static BROKEN: AtomicBool = AtomicBool::new(false);

    pub(super) fn is_broken() -> bool {
        BROKEN.load(Ordering::Relaxed)
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
            match handover.next(|_, ModelItem(_, refusals)| refused >= *refusals) {
                SubmitStep::Settle(mut submitter) => {
                    submitter.stuck = false;
                    handover.give_back(submitter);
                }
                SubmitStep::Refused { submitter, .. } => {
                    refused += 1;
                    handover.give_back(submitter);
                }
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
        BROKEN.store(true, Ordering::Relaxed);
        let noticed =
            std::panic::catch_unwind(|| loom::model(|| run(usize::MAX, 0, false, Handover::take_back)));
        assert!(noticed.is_err(), "notifications do not matter to the model");
    }
}
