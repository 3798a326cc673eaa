//! The guest's `libcuda.so.1`, used through the table that it has for a management library.

#![expect(unsafe_code, reason = "loads a C library and calls what its table holds")]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use sluice_cuda_abi::sys::CUresult;
use sluice_cuda_frontend::tables::{MONITOR, MonitoredDevice, MonitoredProcess};
use sluice_nvml_abi::{GpuMemory, Result, Status};
use std::ffi::c_void;

/// The table in its documented layout. It is static memory of a library that is never unloaded.
#[repr(C)]
struct ShimTable {
    bytes: usize,
    devices: unsafe extern "C" fn(*mut u32) -> u32,
    device: unsafe extern "C" fn(u32, *mut MonitoredDevice) -> u32,
    memory: unsafe extern "C" fn(u32, *mut u64, *mut u64) -> u32,
    processes: unsafe extern "C" fn(u32, *mut u32, *mut MonitoredProcess) -> u32,
    attribute: unsafe extern "C" fn(u32, u32, *mut i32) -> u32,
    driver_version: unsafe extern "C" fn(*mut u32) -> u32,
}

/// The shim, and a session with the host behind it.
#[derive(Clone, Copy)]
pub(crate) struct Shim(&'static ShimTable);

/// Converts a code of the driver.
fn status(code: u32) -> Result {
    const SUCCESS: u32 = CUresult::CUDA_SUCCESS as u32;
    const OUT_OF_MEMORY: u32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
    const NOT_INITIALIZED: u32 = CUresult::CUDA_ERROR_NOT_INITIALIZED as u32;
    const DEINITIALIZED: u32 = CUresult::CUDA_ERROR_DEINITIALIZED as u32;
    const NO_DEVICE: u32 = CUresult::CUDA_ERROR_NO_DEVICE as u32;
    const INVALID_DEVICE: u32 = CUresult::CUDA_ERROR_INVALID_DEVICE as u32;
    const UNAVAILABLE: u32 = CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE as u32;
    const NOT_SUPPORTED: u32 = CUresult::CUDA_ERROR_NOT_SUPPORTED as u32;
    const MISMATCH: u32 = CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as u32;
    Err(match code {
        SUCCESS => return Ok(()),
        OUT_OF_MEMORY => Status::MEMORY,
        NOT_INITIALIZED | DEINITIALIZED => Status::UNINITIALIZED,
        NO_DEVICE => Status::DRIVER_NOT_LOADED,
        INVALID_DEVICE => Status::INVALID_ARGUMENT,
        UNAVAILABLE => Status::GPU_IS_LOST,
        NOT_SUPPORTED => Status::NOT_SUPPORTED,
        MISMATCH => Status::LIB_RM_VERSION_MISMATCH,
        _ => Status::UNKNOWN,
    })
}

impl Shim {
    /// Loads the library, connects it to the host, and takes its table.
    pub(crate) fn load() -> Result<Shim> {
        // SAFETY: the driver that the program itself would load; its constructors are its own.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|_| Status::DRIVER_NOT_LOADED)?;
        // SAFETY: the symbol has this signature in the driver's header.
        let get_table = unsafe {
            library.get::<unsafe extern "C" fn(*mut *const c_void, *const [u8; 16]) -> u32>(
                b"cuGetExportTable\0",
            )
        }
        .map_err(|_| Status::DRIVER_NOT_LOADED)?;
        // This call connects to the host. `cuInit` is not called: it fails for a program that may see no device, and prevents a
        // forked child of this process from starting anew.
        let (mut table, id) = (core::ptr::null(), MONITOR);
        // SAFETY: a place for the answer, and an id of 16 bytes.
        let found = unsafe { get_table(&raw mut table, &raw const id) };
        const INVALID_VALUE: u32 = CUresult::CUDA_ERROR_INVALID_VALUE as u32;
        if found == INVALID_VALUE {
            // Another driver has no such table.
            return Err(Status::DRIVER_NOT_LOADED);
        }
        status(found)?;
        // The driver stays for the life of the process, and its table with it.
        core::mem::forget(library);
        // SAFETY: the id determines the type of the table, and tables are never written nor freed.
        let table = unsafe { table.cast::<ShimTable>().as_ref() }.ok_or(Status::UNKNOWN)?;
        if table.bytes < size_of::<ShimTable>() {
            return Err(Status::LIB_RM_VERSION_MISMATCH);
        }
        Ok(Shim(table))
    }

    pub(crate) fn devices(self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a place for the answer.
        status(unsafe { (self.0.devices)(&raw mut count) })?;
        Ok(count)
    }

    pub(crate) fn driver_version(self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: a place for the answer.
        status(unsafe { (self.0.driver_version)(&raw mut version) })?;
        Ok(version)
    }

    /// The name and the UUID of a device.
    pub(crate) fn identity(self, index: u32) -> Result<(String, [u8; 16])> {
        let mut device = MonitoredDevice { uuid: [0; 16], name: [0; 128] };
        // SAFETY: a place for the answer.
        status(unsafe { (self.0.device)(index, &raw mut device) })?;
        let name = device.name.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok((String::from_utf8_lossy(name).into_owned(), device.uuid))
    }

    pub(crate) fn memory(self, index: u32) -> Result<GpuMemory> {
        let mut memory = GpuMemory::default();
        // SAFETY: places for both answers.
        status(unsafe { (self.0.memory)(index, &raw mut memory.total, &raw mut memory.used) })?;
        Ok(memory)
    }

    /// The processes of this VM that use a device.
    pub(crate) fn processes(self, index: u32) -> Result<Vec<MonitoredProcess>> {
        /// More than a VM may have; a larger count of a host is an error.
        const MOST: usize = 1024;
        let mut list = vec![MonitoredProcess::default(); MOST];
        let mut count = u32::try_from(list.len()).map_err(|_| Status::UNKNOWN)?;
        // SAFETY: room for `count` entries, and a place for the returned count.
        status(unsafe { (self.0.processes)(index, &raw mut count, list.as_mut_ptr()) })?;
        list.truncate(count as usize);
        Ok(list)
    }

    pub(crate) fn attribute(self, index: u32, id: u32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a place for the answer.
        status(unsafe { (self.0.attribute)(index, id, &raw mut value) })?;
        Ok(value)
    }
}
