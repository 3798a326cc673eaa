//! GPUs and units that operators drain.

use super::Placer;
use std::{cell::RefCell, collections::BTreeSet, io};

use sluice_placement::DrainTarget;

use crate::units::unit::Unit;

impl Placer {
    /// True if a GPU is drained.
    pub(crate) fn is_draining(&self, gpu: u32) -> bool {
        self.draining.borrow().contains(&gpu)
    }

    /// True if an instance is drained, by itself or with its GPU.
    pub(crate) fn is_unit_draining(&self, unit: &Unit) -> bool {
        self.is_draining(unit.place().device) || self.is_alone_draining(unit.number())
    }

    /// True if an instance is drained, and its GPU is not.
    pub(crate) fn is_alone_draining(&self, unit: u32) -> bool {
        self.draining_units.borrow().contains(&unit)
    }

    /// Drains or readmits a GPU.
    pub(crate) async fn set_draining(&self, gpu: u32, draining: bool) -> io::Result<()> {
        self.change_drained(&self.draining, gpu, draining).await
    }

    /// Drains or readmits an instance.
    pub(crate) async fn set_unit_draining(&self, unit: u32, draining: bool) -> io::Result<()> {
        self.change_drained(&self.draining_units, unit, draining).await
    }

    pub(super) async fn change_drained(
        &self,
        all: &RefCell<BTreeSet<u32>>,
        one: u32,
        draining: bool,
    ) -> io::Result<()> {
        let change = |draining: bool| {
            let mut all = all.borrow_mut();
            if draining { all.insert(one) } else { all.remove(&one) }
        };
        if change(draining)
            && let Err(error) = self.write().await
        {
            change(!draining);
            return Err(error);
        }
        self.look_around();
        Ok(())
    }

    /// The drained GPUs and units, as targets of the plan.
    pub(crate) fn drained(&self) -> Vec<DrainTarget> {
        self.look_around();
        let draining = self.draining.borrow();
        let found = self.found.borrow();
        let gpus = found.iter().enumerate().filter(|(_, found)| draining.contains(&found.ordinal));
        let (numbers, units) = (self.numbers.borrow(), self.draining_units.borrow());
        let units = numbers.iter().filter(|(_, number)| units.contains(number));
        gpus.map(|(at, _)| DrainTarget::Gpu(at))
            .chain(units.map(|(unit, _)| DrainTarget::Unit(*unit)))
            .collect()
    }
}
