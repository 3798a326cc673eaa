//! Device memory, only through the virtual-memory API.

use super::{Result, input, out, pointer, size};
use crate::{
    Driver, Handle,
    abi::{AccessDesc, AllocationProperties, POSIX_FILE_DESCRIPTOR, TensorMap},
    code,
};
use core::ffi::{c_int, c_uint, c_void};
use rustix::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use sluice_protocol::calls::wire;

/// A descriptor of a tensor of `rank` dimensions, which `encode` writes. The driver reads as many elements of the arrays.
fn tensor_map(rank: u32, encode: impl FnOnce(*mut c_void) -> Result<()>) -> Result<[u8; 128]> {
    if !(1..=5).contains(&rank) {
        return Err(code::INVALID_VALUE);
    }
    let mut map = TensorMap([0; 128]);
    encode(out(&mut map))?;
    Ok(map.0)
}

impl Driver {
    /// `cuMemGetAllocationGranularity`.
    pub fn granularity(&self, device: c_int) -> Result<u64> {
        let mut bytes = 0_usize;
        let properties = AllocationProperties::device(device);
        call!(self.cuMemGetAllocationGranularity(&raw mut bytes, input(&properties), 0))?;
        Ok(bytes as u64)
    }

    /// `cuMemGetInfo_v2`: free and total bytes of the current context's device.
    pub fn memory_info(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0_usize, 0_usize);
        call!(self.cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    /// `cuTensorMapEncodeTiled`.
    pub fn tensor_map_tiled(&self, tensor: &wire::tensor_map_tiled::Args) -> Result<[u8; 128]> {
        let address = pointer(tensor.address)?;
        tensor_map(tensor.rank, |map| {
            call!(self.cuTensorMapEncodeTiled(
                map,
                tensor.format,
                tensor.rank,
                address,
                tensor.dimensions.as_ptr(),
                tensor.strides.as_ptr(),
                tensor.tile.as_ptr(),
                tensor.steps.as_ptr(),
                tensor.interleave,
                tensor.swizzle,
                tensor.promotion,
                tensor.fill,
            ))
        })
    }

    /// `cuTensorMapEncodeIm2col`.
    pub fn tensor_map_im2col(&self, tensor: &wire::tensor_map_im2col::Args) -> Result<[u8; 128]> {
        let address = pointer(tensor.address)?;
        tensor_map(tensor.rank, |map| {
            call!(self.cuTensorMapEncodeIm2col(
                map,
                tensor.format,
                tensor.rank,
                address,
                tensor.dimensions.as_ptr(),
                tensor.strides.as_ptr(),
                tensor.lower.as_ptr(),
                tensor.upper.as_ptr(),
                tensor.channels,
                tensor.pixels,
                tensor.steps.as_ptr(),
                tensor.interleave,
                tensor.swizzle,
                tensor.promotion,
                tensor.fill,
            ))
        })
    }

    /// `cuTensorMapEncodeIm2colWide`.
    pub fn tensor_map_im2col_wide(&self, tensor: &wire::tensor_map_im2col_wide::Args) -> Result<[u8; 128]> {
        let address = pointer(tensor.address)?;
        tensor_map(tensor.rank, |map| {
            call!(self.cuTensorMapEncodeIm2colWide(
                map,
                tensor.format,
                tensor.rank,
                address,
                tensor.dimensions.as_ptr(),
                tensor.strides.as_ptr(),
                tensor.lower,
                tensor.upper,
                tensor.channels,
                tensor.pixels,
                tensor.steps.as_ptr(),
                tensor.interleave,
                tensor.mode,
                tensor.swizzle,
                tensor.promotion,
                tensor.fill,
            ))
        })
    }

    /// `cuTensorMapReplaceAddress`: returns the changed descriptor.
    pub fn tensor_map_replace(&self, descriptor: [u8; 128], address: u64) -> Result<[u8; 128]> {
        let mut map = TensorMap(descriptor);
        call!(self.cuTensorMapReplaceAddress(out(&mut map), pointer(address)?))?;
        Ok(map.0)
    }

    /// `cuTensorMapSetAllocationClass`: returns the changed descriptor and its class.
    pub fn tensor_map_set_class(&self, descriptor: [u8; 128], class: u32) -> Result<([u8; 128], u32)> {
        let (mut map, mut effective) = (TensorMap(descriptor), 0);
        call!(self.cuTensorMapSetAllocationClass(out(&mut map), class, &raw mut effective))?;
        Ok((map.0, effective))
    }

    /// `cuMemCreate`.
    pub fn chunk_create(&self, bytes: u64, device: c_int) -> Result<Handle> {
        let mut handle = 0;
        let properties = AllocationProperties::device(device);
        let bytes = size(bytes)?;
        call!(self.cuMemCreate(&raw mut handle, bytes, input(&properties), 0))?;
        Ok(handle)
    }

    /// `cuMemExportToShareableHandle`: a descriptor with which another process imports the chunk. The chunk lives as long as
    /// the descriptor, or a process that imported it.
    pub fn chunk_export(&self, handle: Handle) -> Result<OwnedFd> {
        let mut descriptor: c_int = -1;
        call!(self.cuMemExportToShareableHandle(out(&mut descriptor), handle, POSIX_FILE_DESCRIPTOR, 0))?;
        if descriptor < 0 {
            return Err(code::UNKNOWN);
        }
        // SAFETY: the driver created the descriptor for its caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// `cuMemImportFromShareableHandle`: a handle of this process for another process's chunk.
    pub fn chunk_import(&self, descriptor: BorrowedFd<'_>) -> Result<Handle> {
        let mut handle = 0;
        // The descriptor is passed in place of a pointer.
        let descriptor = usize::try_from(descriptor.as_raw_fd()).map_err(|_| code::INVALID_VALUE)?;
        let descriptor = core::ptr::without_provenance_mut::<c_void>(descriptor);
        call!(self.cuMemImportFromShareableHandle(&raw mut handle, descriptor, POSIX_FILE_DESCRIPTOR))?;
        Ok(handle)
    }

    /// Reserves addresses near `base`; the result may be elsewhere.
    pub fn address_reserve(&self, base: u64, bytes: u64) -> Result<u64> {
        let mut got = 0;
        let bytes = size(bytes)?;
        call!(self.cuMemAddressReserve(&raw mut got, bytes, 0, base, 0))?;
        Ok(got)
    }

    /// `cuMemAddressFree`.
    pub fn address_free(&self, base: u64, bytes: u64) -> Result<()> {
        let bytes = size(bytes)?;
        call!(self.cuMemAddressFree(base, bytes))
    }

    /// `cuMemMap`.
    pub fn map(&self, at: u64, bytes: u64, chunk: Handle) -> Result<()> {
        let bytes = size(bytes)?;
        call!(self.cuMemMap(at, bytes, 0, chunk, 0))
    }

    /// `cuMemUnmap`.
    pub fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        let bytes = size(bytes)?;
        call!(self.cuMemUnmap(at, bytes))
    }

    /// `cuMemSetAccess` for reading and writing.
    pub fn allow(&self, at: u64, bytes: u64, device: c_int) -> Result<()> {
        self.allow_as(at, bytes, device, 3)
    }

    /// `cuMemSetAccess` with flags: 0 for none, 1 for reading, 3 for reading and writing.
    pub fn allow_as(&self, at: u64, bytes: u64, device: c_int, flags: u32) -> Result<()> {
        let access = AccessDesc::new(device, flags);
        let bytes = size(bytes)?;
        call!(self.cuMemSetAccess(at, bytes, input(&access), 1))
    }

    /// Pins host pages for every context, at device addresses equal to their own.
    pub fn host_register(&self, address: u64, bytes: u64) -> Result<()> {
        const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
        let (address, bytes) = (pointer(address)?, size(bytes)?);
        call!(self.cuMemHostRegister_v2(address, bytes, PORTABLE_AND_MAPPED))
    }

    /// `cuMemHostUnregister`.
    pub fn host_unregister(&self, address: u64) -> Result<()> {
        let address = pointer(address)?;
        call!(self.cuMemHostUnregister(address))
    }
}
