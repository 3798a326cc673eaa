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

    /// `cuDevicePrimaryCtxRelease_v2`.
    pub fn primary_release(&self, device: c_int) -> Result<()> {
        call!(self.cuDevicePrimaryCtxRelease_v2(device))
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

    /// `cuCtxDestroy_v2`.
    pub fn context_destroy(&self, context: Handle) -> Result<()> {
        call!(self.cuCtxDestroy_v2(context))
    }

    /// `cuCtxSetCurrent`.
    pub fn set_current(&self, context: Handle) -> Result<()> {
        call!(self.cuCtxSetCurrent(context))
    }

    /// `cuCtxEnablePeerAccess`: lets the current context access the memory of another.
    pub fn peer_enable(&self, peer: Handle) -> Result<()> {
        call!(self.cuCtxEnablePeerAccess(peer, 0))
    }

    /// `cuCtxDisablePeerAccess`.
    pub fn peer_disable(&self, peer: Handle) -> Result<()> {
        call!(self.cuCtxDisablePeerAccess(peer))
    }

    /// `cuCtxGetStreamPriorityRange`.
    pub fn priorities(&self) -> Result<(i32, i32)> {
        let (mut least, mut greatest) = (0, 0);
        call!(self.cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))?;
        Ok((least, greatest))
    }
}
