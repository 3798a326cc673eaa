//! Primary contexts: one of each GPU, which programs retain and release. The first retain activates it.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use sluice_cuda_frontend::retains::{Retainer, Retains};

use crate::context::Context;
use crate::ending;
use crate::error::{Error, Result};
use crate::gpu::VisibleGpu;
use crate::lock::lock;

/// Result of `cuCtxGetApiVersion` for primary contexts.
const VERSION: u32 = 3020;

/// The primary context of one GPU. Lives as long as the process.
pub(crate) struct Primary {
    pub(crate) context: Arc<Context>,
    /// Flags for the next activation.
    flags: AtomicU32,
    retained: Mutex<Retains>,
}

impl Primary {
    /// Registers the primary context of a GPU, which is not alive yet. Called once, when the driver starts.
    pub(crate) fn register(gpu: &'static VisibleGpu) -> Result<Primary> {
        let context = Context::register(gpu, 0, VERSION, true)?;
        Ok(Primary { context, flags: AtomicU32::new(0), retained: Mutex::default() })
    }

    /// Retains the context; the first retain activates it.
    pub(crate) fn retain(&self, by: Retainer) -> Result<Arc<Context>> {
        let mut retained = lock(&self.retained);
        if !self.context.is_active() {
            self.context.activate()?;
            self.context.flags.store(self.flags(), Relaxed);
        }
        retained.add(by);
        Ok(Arc::clone(&self.context))
    }

    /// Releases the context; the last release ends it. `unheld` is the error if the holder has not retained it.
    pub(crate) fn release(&self, by: Retainer, unheld: Error) -> Result {
        let mut retained = lock(&self.retained);
        if !retained.remove(by) {
            return Err(unheld);
        }
        if !retained.is_held() {
            ending::end(&self.context);
        }
        Ok(())
    }

    /// Ends the context, even if it is retained.
    pub(crate) fn reset(&self) {
        let mut retained = lock(&self.retained);
        *retained = Retains::default();
        ending::end(&self.context);
        self.flags.store(0, Relaxed);
    }

    /// Returns the flags for the next activation.
    pub(crate) fn flags(&self) -> u32 {
        self.flags.load(Relaxed)
    }

    /// Sets the flags; since CUDA 11.0 they apply to a living context too.
    pub(crate) fn set_flags(&self, flags: u32) {
        self.flags.store(flags, Relaxed);
        self.context.flags.store(flags, Relaxed);
    }
}
