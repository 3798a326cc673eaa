//! The parts of the daemon that every VM needs.

use std::{rc::Rc, sync::Arc};

use crate::{
    configuration::Configuration, handover::launching::Launching, records::journal::Journal,
    records::notice::Notices, records::state::checkpoint::Checkpoint, units::set::Units,
};

/// What every VM needs.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) configuration: Rc<Configuration>,
    pub(crate) launching: Rc<Launching>,
    pub(crate) units: Rc<Units>,
    pub(crate) checkpoint: Rc<Checkpoint>,
    pub(crate) notices: Notices,
    pub(crate) journal: Arc<Journal>,
}
