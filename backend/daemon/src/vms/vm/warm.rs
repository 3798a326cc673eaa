//! The warm worker of a VM: a process that waits for the VM's next session. It is confined and has started its driver, and knows
//! neither a guest nor an arbiter, so it can lend and keep nothing.
//!
//! ```text
//!         keep_warm             it has its setup             take_warm
//!   Empty ───────────▶ Starting ───────────────────▶ Ready ──────────────▶ Empty
//!     ▲                   │                            │   (its session's)
//!     │                   └────────────┬───────────────┘
//!     │                                ▼ dismiss_warm: a fence, a change of units, the end of the device
//!     └──────────────────────────── Ending
//!         the process is gone
//! ```

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    time::Duration,
};

use sluice_messages::inventory::Visible;
use tokio::{sync::Notify, time::sleep};

use super::{DeviceProcess, Vm};
use crate::handover::{process::LaunchedProcess, running::Started};

/// Time after which a VM without a warm worker looks if it can have one: it may be fenced, or its unit quarantined.
const AGAIN: Duration = Duration::from_secs(1);

/// Time that a session has for its start before the next warm worker takes processors for its own.
const SETTLED: Duration = Duration::from_millis(20);

/// The place of a VM's warm worker.
#[derive(Debug, Default)]
pub(super) struct WarmPlace {
    state: RefCell<WarmState>,
    /// The number of dismissals, by which a worker that is being started notices one.
    dismissals: Cell<u64>,
    changed: Notify,
    /// The end of a start, for sessions that wait for it.
    started: Notify,
}

#[derive(Debug, Default)]
enum WarmState {
    #[default]
    Empty,
    Starting,
    Ready(Started, Visible),
    Ending(Rc<LaunchedProcess>),
}

impl WarmPlace {
    /// Its process, if it has one.
    fn process(&self) -> Option<Rc<LaunchedProcess>> {
        match &*self.state.borrow() {
            WarmState::Ready(started, _) => Some(Rc::clone(&started.process)),
            WarmState::Ending(process) => Some(Rc::clone(process)),
            WarmState::Empty | WarmState::Starting => None,
        }
    }
}

impl Vm {
    /// Keeps a worker ready for the next session while the device runs, if the configuration wants one.
    pub(super) async fn keep_warm(self: Rc<Self>, device_process: Rc<DeviceProcess>) {
        if !self.configuration.warm_workers {
            return;
        }
        let mut over = device_process.over.subscribe();
        while !*over.borrow() {
            self.warm_up().await;
            let process = self.warm.process();
            let ended = async {
                match &process {
                    Some(process) => process.gone().await,
                    None => sleep(AGAIN).await,
                }
            };
            tokio::select! {
                () = ended => {}
                () = self.warm.changed.notified() => sleep(SETTLED).await,
                _ = over.wait_for(|over| *over) => {}
            }
            if process.is_some_and(|process| process.is_gone()) {
                self.warm.state.replace(WarmState::Empty);
            }
        }
    }

    /// Starts a worker for the next session, if there is none and the VM may have one.
    async fn warm_up(&self) {
        let is_served = self.checkpoint.admitted(self.id()).is_some() && self.has_sound_units();
        let is_empty = matches!(*self.warm.state.borrow(), WarmState::Empty);
        if !is_empty || !is_served || *self.moving.borrow() {
            return;
        }
        self.warm.state.replace(WarmState::Starting);
        let dismissals = self.warm.dismissals.get();
        let visible = self.visible();
        let next = match self.launch_worker(0).await {
            Ok(started) if self.warm.dismissals.get() == dismissals => WarmState::Ready(started, visible),
            Ok(unwanted) => {
                unwanted.process.kill();
                WarmState::Ending(unwanted.process)
            }
            Err(reason) => {
                if self.may_log() {
                    tracing::warn!(vm = self.id(), reason, "cannot start a worker for the next session");
                }
                WarmState::Empty
            }
        };
        self.warm.state.replace(next);
        self.warm.started.notify_waiters();
    }

    /// Takes the warm worker for a session. A worker that is being started is waited for, because it is there sooner than one whose
    /// start has not begun. The caller calls [`Self::want_warm`] once the session has it.
    pub(super) async fn take_warm(&self) -> Option<Started> {
        loop {
            let started = self.warm.started.notified();
            if !matches!(*self.warm.state.borrow(), WarmState::Starting) {
                break;
            }
            started.await;
        }
        let mut state = self.warm.state.borrow_mut();
        match std::mem::take(&mut *state) {
            WarmState::Ready(started, visible) if visible == self.visible() && !started.process.is_gone() => {
                Some(started)
            }
            other => {
                *state = other;
                None
            }
        }
    }

    /// Lets the next warm worker start.
    pub(super) fn want_warm(&self) {
        self.warm.changed.notify_one();
    }

    /// Ends the warm worker, also if it is being started.
    pub(super) fn dismiss_warm(&self) {
        self.warm.dismissals.set(self.warm.dismissals.get() + 1);
        let mut state = self.warm.state.borrow_mut();
        if let WarmState::Ready(started, _) = &*state {
            started.process.kill();
            *state = WarmState::Ending(Rc::clone(&started.process));
            self.warm.changed.notify_one();
        }
    }

    /// The process of the warm worker.
    pub(crate) fn warm_worker(&self) -> Option<u32> {
        self.warm.process().map(|process| process.number())
    }

    /// The number of warm workers that a fence waits for: 1 while one is not reaped, or may still be started.
    pub(crate) fn warm_left(&self) -> usize {
        let is_starting = matches!(*self.warm.state.borrow(), WarmState::Starting);
        let is_left = self.warm.process().is_some_and(|process| !process.is_gone());
        usize::from(is_starting || is_left)
    }
}
