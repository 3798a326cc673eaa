//! The set of units: whole devices, and the instances that placement opens and closes.
//!
//! It owns the task that keeps an arbiter running for each unit. A number belongs to a unit for as long as the unit is in the
//! set; other modules decide the purpose of a unit and its VMs.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use tokio::{
    sync::watch,
    task::{JoinSet, spawn_local},
};

use crate::units::unit::{Unit, UnitError};

/// The units.
#[derive(Debug, Default)]
pub(crate) struct Units(RefCell<BTreeMap<u32, Served>>);

/// A unit, and the task that keeps its arbiter running.
#[derive(Debug)]
struct Served {
    unit: Rc<Unit>,
    stop: watch::Sender<bool>,
    /// Closed when its arbiter has ended for good.
    serving: watch::Receiver<()>,
}

impl Units {
    /// All units, in the order of their numbers.
    pub(crate) fn iter(&self) -> std::vec::IntoIter<Rc<Unit>> {
        let all = self.0.borrow();
        all.values().map(|served| Rc::clone(&served.unit)).collect::<Vec<_>>().into_iter()
    }

    /// A unit by its number.
    pub(crate) fn get(&self, number: u32) -> Option<Rc<Unit>> {
        self.0.borrow().get(&number).map(|served| Rc::clone(&served.unit))
    }

    /// The numbers of all units.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        self.0.borrow().keys().copied().collect()
    }

    /// Adds a unit that exists from the start, and runs an arbiter for it; `tasks` receives the result of its end.
    pub(crate) fn serve(
        &self,
        unit: Rc<Unit>,
        tasks: &mut JoinSet<Result<(), UnitError>>,
        stop: &watch::Receiver<bool>,
        give_up: bool,
    ) {
        let mut everything_ends = stop.clone();
        let (stop, serve) = self.add(unit, give_up);
        tasks.spawn_local(async move {
            let mut serve = std::pin::pin!(serve);
            tokio::select! {
                ended = &mut serve => return ended,
                // No task is left to stop it: then it ends, too.
                _ = everything_ends.wait_for(|ends| *ends) => {}
            }
            stop.send_replace(true);
            serve.await
        });
    }

    /// Adds a unit, and runs an arbiter for it.
    pub(crate) fn open(&self, unit: Rc<Unit>) {
        let number = unit.number();
        let (_, serve) = self.add(unit, false);
        spawn_local(async move {
            if let Err(error) = serve.await {
                tracing::error!(unit = number, %error, "the unit ended with an error");
            }
        });
    }

    fn add(
        &self,
        unit: Rc<Unit>,
        give_up: bool,
    ) -> (watch::Sender<bool>, impl Future<Output = Result<(), UnitError>> + use<>) {
        let (stop, stopping) = watch::channel(false);
        let (served, serving) = watch::channel(());
        let known = Served { unit: Rc::clone(&unit), stop: stop.clone(), serving };
        self.0.borrow_mut().insert(unit.number(), known);
        let serve = async move {
            let ended = unit.serve(stopping, give_up).await;
            drop(served);
            ended
        };
        (stop, serve)
    }

    /// Ends a unit and its arbiter; returns when the arbiter has ended.
    pub(crate) async fn close(&self, number: u32) {
        let closed = self.0.borrow_mut().remove(&number);
        if let Some(closed) = closed {
            closed.end().await;
        }
    }

    /// Ends all units, at once.
    pub(crate) async fn end(&self) {
        let all = std::mem::take(&mut *self.0.borrow_mut());
        for served in all.values() {
            served.stop.send_replace(true);
        }
        for served in all.into_values() {
            served.end().await;
        }
    }
}

impl Served {
    async fn end(mut self) {
        self.stop.send_replace(true);
        // The channel carries no value; it closes at the end.
        while self.serving.changed().await.is_ok() {}
    }
}
