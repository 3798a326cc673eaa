//! The units there are: those that were there at the start, and those that placement opens and closes.
//!
//! Owns who keeps an arbiter running for each. A number is a unit's for as long as it is here; what a unit is for, and who is
//! on it, is decided elsewhere.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet, spawn_local},
};

use crate::unit::{Unit, UnitError};

/// The units.
#[derive(Debug, Default)]
pub(crate) struct Units {
    fixed: Rc<[Rc<Unit>]>,
    opened: RefCell<BTreeMap<u32, Opened>>,
}

#[derive(Debug)]
struct Opened {
    unit: Rc<Unit>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<Result<(), UnitError>>,
}

impl Units {
    /// Those that are there for good.
    pub(crate) fn new(fixed: Vec<Rc<Unit>>) -> Rc<Self> {
        Rc::new(Self { fixed: fixed.into(), opened: RefCell::default() })
    }

    /// Those that are there for good: whole devices.
    pub(crate) fn fixed(&self) -> &Rc<[Rc<Unit>]> {
        &self.fixed
    }

    /// All of them, in the order of their numbers.
    pub(crate) fn iter(&self) -> std::vec::IntoIter<Rc<Unit>> {
        let opened = self.opened.borrow();
        let all = self.fixed.iter().chain(opened.values().map(|opened| &opened.unit));
        all.cloned().collect::<Vec<_>>().into_iter()
    }

    /// A unit by its number.
    pub(crate) fn get(&self, number: u32) -> Option<Rc<Unit>> {
        self.iter().find(|unit| unit.number() == number)
    }

    /// All their numbers.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        self.iter().map(|unit| unit.number()).collect()
    }

    /// Has arbiters run for those that are there for good.
    pub(crate) fn serve(
        &self,
        tasks: &mut JoinSet<Result<(), UnitError>>,
        stop: &watch::Receiver<bool>,
        give_up: bool,
    ) {
        for unit in self.fixed.iter() {
            tasks.spawn_local(Rc::clone(unit).serve(stop.clone(), give_up));
        }
    }

    /// Adds a unit, and has an arbiter run for it.
    pub(crate) fn open(&self, unit: Rc<Unit>) {
        let (stop, stopping) = watch::channel(false);
        let serving = spawn_local(Rc::clone(&unit).serve(stopping, false));
        self.opened.borrow_mut().insert(unit.number(), Opened { unit, stop, serving });
    }

    /// Ends a unit that was opened, with its arbiter; returns when that is gone.
    pub(crate) async fn close(&self, number: u32) {
        let opened = self.opened.borrow_mut().remove(&number);
        if let Some(opened) = opened {
            opened.end().await;
        }
    }

    /// Ends all that were opened, at once.
    pub(crate) async fn end(&self) {
        let opened = std::mem::take(&mut *self.opened.borrow_mut());
        for unit in opened.values() {
            unit.stop.send_replace(true);
        }
        for unit in opened.into_values() {
            unit.end().await;
        }
    }
}

impl Opened {
    async fn end(self) {
        self.stop.send_replace(true);
        match self.serving.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("{error}"),
            Err(panic) => tracing::error!("unit {}: {panic}", self.unit.number()),
        }
    }
}
