//! The virtual-memory API.

use std::ffi::c_void;

use softgpu_device::PAGE_BYTES;

use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::gpu::{self, VisibleGpu};
use crate::memory::{MEMORY, POSIX_FD, Space, export, release};
use crate::peers;

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct MemLocation {
    pub(super) kind: u32,
    pub(super) id: i32,
}

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Properties {
    kind: u32,
    shareable: u32,
    location: MemLocation,
    win32: u64,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Access {
    pub(super) location: MemLocation,
    pub(super) flags: u32,
}

const _: () = assert!(size_of::<Properties>() == size_of::<sluice_cuda_abi::sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<sluice_cuda_abi::sys::CUmemAccessDesc>());

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(super) const PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const ON_DEVICE: u32 = 1;

impl MemLocation {
    pub(super) fn gpu(self) -> Result<&'static VisibleGpu> {
        match self.kind {
            ON_DEVICE => gpu::at(self.id),
            // Host memory and its NUMA nodes: the attributes report that this is not supported.
            2..=4 => Err(Error::NOT_SUPPORTED),
            _ => Err(Error::INVALID_VALUE),
        }
    }
}

impl Properties {
    fn check(self) -> Result<&'static VisibleGpu> {
        if self.kind != PINNED {
            return Err(Error::INVALID_VALUE);
        }
        let gpu = self.location.gpu()?;
        if self.shareable & !POSIX_FD != 0 || self.compression != 0 || self.rdma != 0 || self.usage != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
        Ok(gpu)
    }
}

/// The GPU whose reservations contain an address.
fn gpu_of(address: u64) -> Result<&'static VisibleGpu> {
    let mut gpus = gpu::all()?.iter().copied();
    gpus.find(|gpu| gpu.space.reservation_at(address).is_some()).ok_or(Error::INVALID_VALUE)
}

fn first_gpu() -> Result<&'static VisibleGpu> {
    gpu::all()?.first().copied().ok_or(Error::NO_DEVICE)
}

calls! {
    fn cuMemGetAllocationGranularity(bytes: Out<u64>, properties: In<Properties>, option: u32) {
        // Host memory has a granularity, too, though none can be made.
        match properties.get()?.check() {
            Err(Error::NOT_SUPPORTED) | Ok(_) => {}
            Err(error) => return Err(error),
        }
        if option > 1 {
            return Err(Error::INVALID_VALUE);
        }
        bytes.set(PAGE_BYTES)
    }

    fn cuMemAddressReserve(place: Out<u64>, bytes: u64, alignment: u64, hint: u64, flags: u64) {
        place.required()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        place.set(first_gpu()?.space.reserve(bytes, alignment, hint)?)
    }

    fn cuMemAddressFree(address: u64, bytes: u64) { gpu_of(address)?.space.unreserve(address, bytes) }

    fn cuMemCreate(place: Out<u64>, bytes: u64, properties: In<Properties>, flags: u64) {
        place.required()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        let properties = properties.get()?;
        let gpu = properties.check()?;
        place.set(gpu.space.create(gpu.ordinal, bytes, properties.shareable)?)
    }

    fn cuMemRelease(handle: u64) { release(handle) }

    fn cuMemMap(address: u64, bytes: u64, offset: u64, handle: u64, flags: u64) {
        if flags != 0 || offset != 0 {
            return Err(Error::INVALID_VALUE);
        }
        gpu_of(address)?.space.map(address, bytes, offset, handle)
    }

    fn cuMemUnmap(address: u64, bytes: u64) {
        let all: Vec<&Space> = gpu::all()?.iter().map(|gpu| gpu.space).collect();
        gpu_of(address)?.space.unmap(address, bytes, &all)
    }

    fn cuMemSetAccess(address: u64, bytes: u64, descriptions: In<Access>, count: usize) {
        if count == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let space = gpu_of(address)?.space;
        for description in descriptions.list(count)? {
            let gpu = description.location.gpu()?;
            for owner in space.devices_in(address, bytes)? {
                if owner != gpu.ordinal && !peers::reaches(gpu, gpu::at(owner)?) {
                    return Err(Error::INVALID_DEVICE);
                }
            }
            space.set_access(address, bytes, (gpu.ordinal, gpu.space), description.flags)?;
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: Out<u64>, location: In<MemLocation>, address: u64) {
        let gpu = location.get()?.gpu()?;
        let access = gpu_of(address)?.space.access_at(address, gpu.ordinal).ok_or(Error::INVALID_VALUE)?;
        flags.set(u64::from(access))
    }

    fn cuMemGetAllocationPropertiesFromHandle(place: Out<Properties>, handle: u64) {
        let memory = MEMORY.get(handle)?;
        place.set(Properties {
            kind: PINNED,
            shareable: memory.shareable,
            location: MemLocation { kind: ON_DEVICE, id: memory.device },
            win32: 0,
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemRetainAllocationHandle(place: Out<u64>, address: u64) {
        place.required()?;
        place.set(gpu_of(address)?.space.retain_at(address)?)
    }

    fn cuMemExportToShareableHandle(place: Out<c_void>, handle: u64, kind: u32, flags: u64) {
        place.cast::<i32>().required()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if kind != POSIX_FD {
            return Err(Error::NOT_SUPPORTED);
        }
        place.cast::<i32>().set(export(handle)?)
    }

    fn cuMemImportFromShareableHandle(place: Out<u64>, descriptor: u64, kind: u32) {
        place.required()?;
        if kind != POSIX_FD {
            return Err(Error::NOT_SUPPORTED);
        }
        // The declared pointer is the descriptor number itself.
        let descriptor = i32::try_from(descriptor & 0xffff_ffff).map_err(|_| Error::INVALID_VALUE)?;
        let mut refused = Error::INVALID_VALUE;
        for gpu in gpu::all()? {
            match gpu.space.import(gpu.ordinal, descriptor) {
                Ok(handle) => return place.set(handle),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }
}
