//! The driver's current context of a thread.

use crate::session::objects::ContextRef;
use sluice_driver::Driver;

/// The driver's current context of one of the worker's threads, remembered so that it is set only when it changes.
#[derive(Debug, Default)]
pub(crate) struct Current {
    context: Option<ContextRef>,
}

impl Current {
    pub(crate) fn set(&mut self, driver: &Driver, context: ContextRef) -> Result<(), u32> {
        if self.context != Some(context) {
            self.context = None;
            driver.set_current(context.handle)?;
            self.context = Some(context);
        }
        Ok(())
    }

    /// Leaves a context that is about to be destroyed, so that no later call of this thread has it as the current one.
    pub(crate) fn leave(&mut self, driver: &Driver, context: ContextRef) -> Result<(), u32> {
        if self.context == Some(context) {
            self.context = None;
            driver.set_current(0)?;
        }
        Ok(())
    }
}
