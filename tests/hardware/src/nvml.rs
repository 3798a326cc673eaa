//! NVML: the few calls that the steps make, all of which only read.

#![expect(unsafe_code, reason = "calls C functions of NVML")]

use core::ffi::{c_char, c_int, c_uint};
use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use sluice_nvml_abi::{DeviceHandle, MemoryV1, ProcessInfoV2};

use crate::stop::{Answer, Stop};

/// Largest number of processes in a list.
const MOST: usize = 256;

/// NVML with its first device.
#[derive(Debug)]
pub(crate) struct Nvml {
    library: Library,
    device: DeviceHandle,
}

impl Nvml {
    /// Loads the library and takes the first device.
    pub(crate) fn open(path: Option<&Path>) -> Answer<Nvml> {
        type Init = unsafe extern "C" fn() -> c_uint;
        type ByIndex = unsafe extern "C" fn(c_uint, *mut DeviceHandle) -> c_uint;
        let path =
            path.ok_or_else(|| Stop::Refused { reason: "libnvidia-ml.so.1 is absent".into(), code: None })?;
        // SAFETY: the path is the operator's, or in a folder of the loader; constructors are NVML's own.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| Stop::Refused { reason: format!("NVML does not load: {error}"), code: None })?;
        let mut nvml = Nvml { library, device: 0 };
        // SAFETY: this is the function's signature in NVML's header.
        let init = unsafe { nvml.entry::<Init>("nvmlInit_v2") }?;
        // SAFETY: the function has no parameter.
        result("nvmlInit_v2", unsafe { init() })?;
        // SAFETY: this is the function's signature in NVML's header.
        let by_index = unsafe { nvml.entry::<ByIndex>("nvmlDeviceGetHandleByIndex_v2") }?;
        let mut device = 0;
        // SAFETY: the library writes one handle to a live variable.
        result("nvmlDeviceGetHandleByIndex_v2", unsafe { by_index(0, &raw mut device) })?;
        nvml.device = device;
        Ok(nvml)
    }

    /// The driver's version.
    pub(crate) fn driver_version(&self) -> Answer<String> {
        type Entry = unsafe extern "C" fn(*mut c_char, c_uint) -> c_uint;
        let mut text = [0_u8; 96];
        // SAFETY: this is the function's signature in NVML's header.
        let entry = unsafe { self.entry::<Entry>("nvmlSystemGetDriverVersion") }?;
        // SAFETY: the library writes at most 95 bytes to a live array.
        result("nvmlSystemGetDriverVersion", unsafe { entry(text.as_mut_ptr().cast(), 95) })?;
        Ok(text.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect())
    }

    /// Memory of the device.
    pub(crate) fn memory(&self) -> Answer<MemoryV1> {
        type Entry = unsafe extern "C" fn(DeviceHandle, *mut MemoryV1) -> c_uint;
        let mut memory = MemoryV1::default();
        // SAFETY: this is the function's signature in NVML's header.
        let entry = unsafe { self.entry::<Entry>("nvmlDeviceGetMemoryInfo") }?;
        // SAFETY: the library writes the structure, which is live.
        result("nvmlDeviceGetMemoryInfo", unsafe { entry(self.device, &raw mut memory) })?;
        Ok(memory)
    }

    /// True if the device is divided into instances now.
    pub(crate) fn divided(&self) -> Answer<bool> {
        type Entry = unsafe extern "C" fn(DeviceHandle, *mut c_uint, *mut c_uint) -> c_uint;
        let (mut current, mut pending) = (0, 0);
        // SAFETY: this is the function's signature in NVML's header.
        let entry = unsafe { self.entry::<Entry>("nvmlDeviceGetMigMode") }?;
        // SAFETY: the library writes two numbers to live variables.
        result("nvmlDeviceGetMigMode", unsafe { entry(self.device, &raw mut current, &raw mut pending) })?;
        Ok(current != 0)
    }

    /// Generation and lanes of the device's PCIe link, as the device and its slot permit.
    pub(crate) fn pcie(&self) -> Answer<(u32, u32)> {
        type Entry = unsafe extern "C" fn(DeviceHandle, *mut c_uint) -> c_uint;
        let number = |symbol: &str| -> Answer<u32> {
            let mut value = 0;
            // SAFETY: this is the signature of both functions in NVML's header.
            let entry = unsafe { self.entry::<Entry>(symbol) }?;
            // SAFETY: the library writes a number to a live variable.
            result(symbol, unsafe { entry(self.device, &raw mut value) })?;
            Ok(value)
        };
        Ok((number("nvmlDeviceGetMaxPcieLinkGeneration")?, number("nvmlDeviceGetMaxPcieLinkWidth")?))
    }

    /// Bytes that NVML books to each process that computes. `None` for a process without a figure.
    pub(crate) fn processes(&self) -> Answer<Vec<(u32, Option<u64>)>> {
        type Entry = unsafe extern "C" fn(DeviceHandle, *mut c_uint, *mut ProcessInfoV2) -> c_uint;
        let empty = ProcessInfoV2 { pid: 0, used: 0, gpu_instance: 0, compute_instance: 0 };
        let mut list = vec![empty; MOST];
        let mut count = c_uint::try_from(MOST).unwrap_or(0);
        // SAFETY: this is the function's signature in NVML's header.
        let entry = unsafe { self.entry::<Entry>("nvmlDeviceGetComputeRunningProcesses_v3") }?;
        // SAFETY: the library writes at most `count` elements, which the list has.
        let code = unsafe { entry(self.device, &raw mut count, list.as_mut_ptr()) };
        result("nvmlDeviceGetComputeRunningProcesses_v3", code)?;
        let figure =
            |process: &ProcessInfoV2| (process.pid, (process.used != u64::MAX).then_some(process.used));
        Ok(list.iter().take(count as usize).map(figure).collect())
    }

    /// Takes an entry point.
    ///
    /// # Safety
    /// `T` is the function's type in NVML's header.
    unsafe fn entry<T: Copy>(&self, symbol: &str) -> Answer<T> {
        // SAFETY: as the caller promises. The library stays loaded as long as `self`.
        unsafe { self.library.get::<T>(symbol.as_bytes()) }
            .map(|entry| *entry)
            .map_err(|_| Stop::absent(symbol))
    }
}

fn result(call: &str, code: c_uint) -> Answer {
    match c_int::try_from(code) {
        Ok(0) => Ok(()),
        _ => Err(Stop::Refused {
            reason: format!("{call} returned NVML result {code}"),
            code: Some(format!("nvmlReturn {code}")),
        }),
    }
}
