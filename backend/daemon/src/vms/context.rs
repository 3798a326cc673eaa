//! The parts of the daemon that every VM needs.

use std::{rc::Rc, sync::Arc};

use sluice_runtime::closer::Closers;

use crate::{
    configuration::Configuration, handover::launching::Launching, records::journal::Journal,
    records::state::checkpoint::Checkpoint, records::unit_event::UnitEventSender, units::set::Units,
};

/// The shared objects that every VM needs.
#[derive(Debug)]
pub(crate) struct VmContext {
    pub(crate) configuration: Rc<Configuration>,
    pub(crate) launching: Rc<Launching>,
    pub(crate) units: Rc<Units>,
    pub(crate) checkpoint: Rc<Checkpoint>,
    pub(crate) event_sender: UnitEventSender,
    pub(crate) journal: Arc<Journal>,
    /// Close descriptors that devices have sent.
    pub(crate) closers: Closers,
}
