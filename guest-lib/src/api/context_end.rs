//! The end of a context, which the calls for contexts and for green contexts have in common.

use crate::{error::Result, graphs, images, process::ProcessState};
use sluice_protocol::handle::{self, Id};

/// Ends a context, and everything in it.
pub(super) fn end_context(process: &ProcessState, id: Id<handle::Context>) -> Result {
    let modules = process.modules.of_context(id.raw());
    graphs::end_context(process, id)?;
    images::context_ended(process, id.raw(), &modules);
    Ok(())
}
