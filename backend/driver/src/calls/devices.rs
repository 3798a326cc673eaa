//! Start-up and devices.

use super::{Result, out};
use crate::{Driver, DriverError, code};
use core::ffi::{c_char, c_int};

impl Driver {
    /// `cuInit`.
    pub fn init(&self) -> Result<()> {
        call!(self.cuInit(0))
    }

    /// `cuDriverGetVersion`.
    pub fn version(&self) -> Result<u32> {
        let mut version = 0;
        call!(self.cuDriverGetVersion(&raw mut version))?;
        u32::try_from(version).map_err(|_| code::UNKNOWN)
    }

    /// `cuDeviceGetCount`.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        call!(self.cuDeviceGetCount(&raw mut count))?;
        u32::try_from(count).map_err(|_| code::UNKNOWN)
    }

    /// `cuDeviceGet`.
    pub fn device(&self, ordinal: u32) -> Result<c_int> {
        let ordinal = c_int::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
        let mut device = 0;
        call!(self.cuDeviceGet(&raw mut device, ordinal))?;
        Ok(device)
    }

    /// `cuDeviceGetName`.
    pub fn device_name(&self, device: c_int) -> Result<[u8; 128]> {
        let mut name = [0_u8; 128];
        // The length excludes the last byte, so the name ends with a NUL whatever the driver does.
        call!(self.cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 127, device))?;
        Ok(name)
    }

    /// `cuDeviceGetUuid_v2`.
    pub fn device_uuid(&self, device: c_int) -> Result<[u8; 16]> {
        let mut uuid = [0_u8; 16];
        call!(self.cuDeviceGetUuid_v2(out(&mut uuid), device))?;
        Ok(uuid)
    }

    /// Checks that the driver shows one device, and that it is the given one. The devices that a process sees are
    /// chosen before it starts; if the driver has interpreted that differently, the process must not use it.
    pub fn confirm(&self, identity: Option<[u8; 16]>) -> core::result::Result<(), DriverError> {
        let Some(identity) = identity else { return Ok(()) };
        let count = self.device_count().map_err(DriverError::Init)?;
        let first = self.device(0).and_then(|device| self.device_uuid(device)).map_err(DriverError::Init)?;
        if count == 1 && first == identity { Ok(()) } else { Err(DriverError::Identity { count }) }
    }

    /// `cuDeviceTotalMem_v2`.
    pub fn device_memory(&self, device: c_int) -> Result<u64> {
        let mut bytes = 0_usize;
        call!(self.cuDeviceTotalMem_v2(&raw mut bytes, device))?;
        Ok(bytes as u64)
    }

    /// `cuDeviceCanAccessPeer`.
    pub fn reaches(&self, device: c_int, peer: c_int) -> Result<bool> {
        let mut can = 0;
        call!(self.cuDeviceCanAccessPeer(&raw mut can, device, peer))?;
        Ok(can != 0)
    }

    /// `cuDeviceGetP2PAttribute`: the relative performance of the link from a device to another.
    pub fn link_rank(&self, device: c_int, peer: c_int) -> Result<i32> {
        const PERFORMANCE_RANK: u32 = 1;
        let mut rank = 0;
        call!(self.cuDeviceGetP2PAttribute(&raw mut rank, PERFORMANCE_RANK, device, peer))?;
        Ok(rank)
    }

    /// `cuDeviceGetAttribute`.
    pub fn device_attribute(&self, attribute: u32, device: c_int) -> Result<i32> {
        let mut value = 0;
        call!(self.cuDeviceGetAttribute(&raw mut value, attribute, device))?;
        Ok(value)
    }

    /// `cuDeviceGetHostAtomicCapabilities` of every operation of the header.
    pub fn host_atomics(&self, device: c_int) -> Result<[u32; 13]> {
        let operations = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        let (count, mut capabilities) = (13, [0; 13]);
        call!(self.cuDeviceGetHostAtomicCapabilities(
            capabilities.as_mut_ptr(),
            operations.as_ptr(),
            count,
            device
        ))?;
        Ok(capabilities)
    }
}
