//! The warm worker of a VM: a process that waits for the VM's next session. It is confined and has started its driver, and knows
//! neither a guest nor an arbiter, so it can lend and keep nothing.
//!
//! ```text
//!            warm_up              it has its setup             take_warm
//!   Empty ───────────▶ Starting ───────────────────▶ Ready ──────────────▶ Empty
//!     ▲                   │                            │   (its session's)
//!     └───────────────────┴────────────────────────────┘
//!        dismiss_warm: a fence, a change of units, the end of the device. The worker is killed.
//! ```

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use sluice_messages::inventory::Visible;

use super::{DeviceProcess, Vm};
use crate::handover::running::Started;

/// The place of a VM's warm worker.
#[derive(Debug, Default)]
pub(super) struct WarmPlace {
    state: RefCell<WarmState>,
    /// The number of dismissals, by which a worker that is being started notices one.
    dismissals: Cell<u64>,
}

#[derive(Debug, Default)]
enum WarmState {
    #[default]
    Empty,
    Starting,
    Ready(Started, Visible),
}

impl Vm {
    /// Starts a worker for the next session, if the configuration wants one and there is none.
    pub(super) async fn warm_up(self: Rc<Self>, device_process: Rc<DeviceProcess>) {
        let is_served = self.checkpoint.admitted(self.id()).is_some() && self.has_sound_units();
        let is_empty = matches!(*self.warm.state.borrow(), WarmState::Empty);
        if !self.configuration.warm_workers || !is_empty || !is_served || *device_process.over.borrow() {
            return;
        }
        self.warm.state.replace(WarmState::Starting);
        let dismissals = self.warm.dismissals.get();
        let visible = self.visible();
        let started = self.launch_worker(0).await;
        let next = match started {
            Ok(started) if self.warm.dismissals.get() == dismissals => WarmState::Ready(started, visible),
            Ok(unwanted) => {
                unwanted.process.kill();
                WarmState::Empty
            }
            Err(reason) => {
                if self.may_log() {
                    tracing::warn!(vm = self.id(), reason, "cannot start a worker for the next session");
                }
                WarmState::Empty
            }
        };
        self.warm.state.replace(next);
    }

    /// Takes the warm worker for a session.
    pub(super) fn take_warm(&self) -> Option<Started> {
        let mut state = self.warm.state.borrow_mut();
        let (started, visible) = match std::mem::take(&mut *state) {
            WarmState::Ready(started, visible) => (started, visible),
            other => {
                *state = other;
                return None;
            }
        };
        if started.process.is_gone() || visible != self.visible() {
            started.process.kill();
            return None;
        }
        Some(started)
    }

    /// Ends the warm worker, also if it is being started.
    pub(super) fn dismiss_warm(&self) {
        self.warm.dismissals.set(self.warm.dismissals.get() + 1);
        let mut state = self.warm.state.borrow_mut();
        if let WarmState::Ready(started, _) = &*state {
            started.process.kill();
            *state = WarmState::Empty;
        }
    }

    /// The process of the warm worker.
    pub(crate) fn warm_worker(&self) -> Option<u32> {
        match &*self.warm.state.borrow() {
            WarmState::Ready(started, _) => Some(started.process.number()),
            WarmState::Empty | WarmState::Starting => None,
        }
    }
}
