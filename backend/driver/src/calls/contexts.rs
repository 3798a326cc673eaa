//! Contexts.

use super::Result;
use crate::{Driver, Handle, code};
use core::ffi::c_int;

impl Driver {
    /// `cuDevicePrimaryCtxSetFlags_v2`.
    pub fn primary_retain(&self, device: c_int, flags: u32) -> Result<Handle> {
        // The flags of an inactive primary context are set before it is created; an active one keeps its own.
        if flags != 0 {
            call!(self.cuDevicePrimaryCtxSetFlags_v2(device, flags))?;
        }
        let mut context = 0;
        call!(self.cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        Ok(context)
    }

    /// `cuCtxCreate_v2`.
    pub fn context_create(&self, device: c_int, flags: u32) -> Result<Handle> {
        let mut context = 0;
        match call!(self.cuCtxCreate_v2(&raw mut context, flags, device)) {
            Err(code::NOT_SUPPORTED) => {
                call!(self.cuCtxCreate_v4(&raw mut context, core::ptr::null_mut(), flags, device))?;
            }
            other => other?,
        }
        Ok(context)
    }

    /// `cuCtxSetCurrent`.
    pub fn set_current(&self, context: Handle) -> Result<()> {
        call!(self.cuCtxSetCurrent(context))
    }
}
