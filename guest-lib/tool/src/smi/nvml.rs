//! The guest's management library, as every monitor loads it.

#![expect(unsafe_code, reason = "loads a C library and calls its functions")]

use anyhow::{Context as _, Result, bail};
use core::ffi::c_char;
use libloading::Library;
use sluice_nvml_abi::{DeviceHandle, MEMORY_V2, MemoryV2, PciInfo, ProcessInfoV2, Status, Utilization};
use std::ffi::CStr;

/// The functions that are called, by their names in nvml.h.
mod names {
    pub(super) const INIT: &str = "nvmlInit_v2";
    pub(super) const DRIVER_VERSION: &str = "nvmlSystemGetDriverVersion";
    pub(super) const CUDA_VERSION: &str = "nvmlSystemGetCudaDriverVersion_v2";
    pub(super) const PROCESS_NAME: &str = "nvmlSystemGetProcessName";
    pub(super) const COUNT: &str = "nvmlDeviceGetCount_v2";
    pub(super) const HANDLE: &str = "nvmlDeviceGetHandleByIndex_v2";
    pub(super) const NAME: &str = "nvmlDeviceGetName";
    pub(super) const UUID: &str = "nvmlDeviceGetUUID";
    pub(super) const PCI: &str = "nvmlDeviceGetPciInfo_v3";
    pub(super) const MINOR: &str = "nvmlDeviceGetMinorNumber";
    pub(super) const CAPABILITY: &str = "nvmlDeviceGetCudaComputeCapability";
    pub(super) const CORES: &str = "nvmlDeviceGetNumGpuCores";
    pub(super) const BUS_WIDTH: &str = "nvmlDeviceGetMemoryBusWidth";
    pub(super) const COMPUTE_MODE: &str = "nvmlDeviceGetComputeMode";
    pub(super) const ECC: &str = "nvmlDeviceGetEccMode";
    pub(super) const MIG: &str = "nvmlDeviceGetMigMode";
    pub(super) const DISPLAY_MODE: &str = "nvmlDeviceGetDisplayMode";
    pub(super) const DISPLAY_ACTIVE: &str = "nvmlDeviceGetDisplayActive";
    pub(super) const MEMORY: &str = "nvmlDeviceGetMemoryInfo_v2";
    pub(super) const UTILIZATION: &str = "nvmlDeviceGetUtilizationRates";
    pub(super) const PROCESSES: &str = "nvmlDeviceGetComputeRunningProcesses_v3";
}

/// Room for a text of the library.
const TEXT: usize = 256;
/// More processes than a VM may have.
const PROCESSES: usize = 4096;

/// The library, initialised.
pub(crate) struct Nvml(Library);

/// The state of the system at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct System {
    pub(crate) driver: String,
    /// As `cuDriverGetVersion` gives it.
    pub(crate) cuda: i32,
    pub(crate) gpus: Vec<SmiGpu>,
}

/// A device. A value that it does not have is `None`.
#[derive(Debug, Clone, Default)]
pub(crate) struct SmiGpu {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) bus_id: String,
    /// Domain, bus, device.
    pub(crate) bus: (u32, u32, u32),
    pub(crate) minor: Option<u32>,
    pub(crate) capability: Option<(i32, i32)>,
    pub(crate) cores: Option<u32>,
    pub(crate) bus_width: Option<u32>,
    pub(crate) compute_mode: Option<u32>,
    /// Error correction, now and after the next start.
    pub(crate) ecc: Option<(u32, u32)>,
    /// Division into instances, now and after the next start.
    pub(crate) mig: Option<(u32, u32)>,
    pub(crate) display: Option<(u32, u32)>,
    /// Total, reserved, used and free bytes.
    pub(crate) memory: Option<[u64; 4]>,
    /// Percentages of time in which kernels ran, and accessed memory.
    pub(crate) utilization: Option<(u32, u32)>,
    pub(crate) processes: Vec<SmiProcess>,
}

/// A process that holds memory of a device.
#[derive(Debug, Clone, Default)]
pub(crate) struct SmiProcess {
    pub(crate) pid: u32,
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

type Call0 = unsafe extern "C" fn() -> u32;
type Call1<A> = unsafe extern "C" fn(A) -> u32;
type Call2<A, B> = unsafe extern "C" fn(A, B) -> u32;
type Call3<A, B, C> = unsafe extern "C" fn(A, B, C) -> u32;

/// A type of functions, whose callers guarantee their arguments.
trait NvmlFunction: Copy {}
impl NvmlFunction for Call0 {}
impl<A> NvmlFunction for Call1<A> {}
impl<A, B> NvmlFunction for Call2<A, B> {}
impl<A, B, C> NvmlFunction for Call3<A, B, C> {}

/// A result of the library: `None` if the device does not have the value.
fn optional(what: &str, code: u32) -> Result<Option<()>> {
    match code {
        0 => Ok(Some(())),
        code if code == Status::NOT_SUPPORTED.0 => Ok(None),
        code => bail!("{what}: {}", Status::text(code).to_string_lossy()),
    }
}

impl Nvml {
    /// Loads and initialises the library.
    pub(crate) fn load() -> Result<Nvml> {
        // SAFETY: loading runs the library's initialisers; it is the one of this system.
        let library =
            unsafe { Library::new("libnvidia-ml.so.1") }.context("cannot load the management library")?;
        let nvml = Nvml(library);
        let init = nvml.function::<Call0>(names::INIT)?;
        // SAFETY: the signature of nvml.h.
        let code = unsafe { init() };
        match code {
            0 => Ok(nvml),
            code if code == Status::DRIVER_NOT_LOADED.0 => {
                bail!("no device was found; `sluice-guest doctor` names the reason")
            }
            code => bail!("cannot start the management library: {}", Status::text(code).to_string_lossy()),
        }
    }

    /// A function of the library, of the type that its caller knows.
    fn function<F: NvmlFunction>(&self, name: &str) -> Result<F> {
        // SAFETY: a pointer to a function, and each call of it is unsafe; the library stays loaded as long as `self`.
        let found = unsafe { self.0.get::<F>(name.as_bytes()) };
        Ok(*found.with_context(|| format!("the management library has no {name}"))?)
    }

    fn text(&self, name: &str, fill: impl FnOnce(*mut c_char, u32) -> u32) -> Result<String> {
        let mut room = [0 as c_char; TEXT];
        let code = fill(room.as_mut_ptr(), u32::try_from(TEXT)?);
        if optional(name, code)?.is_none() {
            return Ok("N/A".to_owned());
        }
        // SAFETY: the library stored a text with its NUL within the room.
        Ok(unsafe { CStr::from_ptr(room.as_ptr()) }.to_string_lossy().into_owned())
    }

    fn system_text(&self, name: &str) -> Result<String> {
        let call = self.function::<Call2<*mut c_char, u32>>(name)?;
        // SAFETY: the signature of nvml.h, and room of the stated length.
        self.text(name, |room, bytes| unsafe { call(room, bytes) })
    }

    fn device_text(&self, name: &str, device: DeviceHandle) -> Result<String> {
        let call = self.function::<Call3<DeviceHandle, *mut c_char, u32>>(name)?;
        // SAFETY: the signature of nvml.h, and room of the stated length.
        self.text(name, |room, bytes| unsafe { call(device, room, bytes) })
    }

    fn value<T: Copy>(&self, name: &str, device: DeviceHandle, initial: T) -> Result<Option<T>> {
        let mut value = initial;
        let call = self.function::<Call2<DeviceHandle, *mut T>>(name)?;
        // SAFETY: the signature of nvml.h, and a place for the answer.
        let code = unsafe { call(device, &raw mut value) };
        Ok(optional(name, code)?.map(|()| value))
    }

    fn two<T: Copy + Default>(&self, name: &str, device: DeviceHandle) -> Result<Option<(T, T)>> {
        let (mut one, mut other) = (T::default(), T::default());
        let call = self.function::<Call3<DeviceHandle, *mut T, *mut T>>(name)?;
        // SAFETY: the signature of nvml.h, and places for the answers.
        let code = unsafe { call(device, &raw mut one, &raw mut other) };
        Ok(optional(name, code)?.map(|()| (one, other)))
    }

    /// Reads everything.
    pub(crate) fn read(&self) -> Result<System> {
        let mut cuda = 0;
        let call = self.function::<Call1<*mut i32>>(names::CUDA_VERSION)?;
        // SAFETY: the signature of nvml.h, and a place for the answer.
        let code = unsafe { call(&raw mut cuda) };
        optional(names::CUDA_VERSION, code)?;
        let mut count = 0;
        let call = self.function::<Call1<*mut u32>>(names::COUNT)?;
        // SAFETY: the signature of nvml.h, and a place for the answer.
        let code = unsafe { call(&raw mut count) };
        optional(names::COUNT, code)?;
        Ok(System {
            driver: self.system_text(names::DRIVER_VERSION)?,
            cuda,
            gpus: (0..count).map(|index| self.gpu(index)).collect::<Result<_>>()?,
        })
    }

    fn gpu(&self, index: u32) -> Result<SmiGpu> {
        let mut device: DeviceHandle = 0;
        let call = self.function::<Call2<u32, *mut DeviceHandle>>(names::HANDLE)?;
        // SAFETY: the signature of nvml.h, and a place for the answer.
        let code = unsafe { call(index, &raw mut device) };
        optional(names::HANDLE, code)?;
        // SAFETY: numbers and texts, which zeroes are.
        let pci: PciInfo = unsafe { core::mem::zeroed() };
        let pci = self.value(names::PCI, device, pci)?;
        let bus_id = |pci: &PciInfo| {
            let bytes: Vec<u8> =
                pci.bus_id.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let memory = MemoryV2 { version: MEMORY_V2, ..MemoryV2::default() };
        let memory = self.value(names::MEMORY, device, memory)?;
        let display = |name| self.value::<u32>(name, device, 0);
        Ok(SmiGpu {
            index,
            name: self.device_text(names::NAME, device)?,
            uuid: self.device_text(names::UUID, device)?,
            bus_id: pci.as_ref().map_or_else(|| "N/A".to_owned(), bus_id),
            bus: pci.map_or((0, 0, 0), |pci| (pci.domain, pci.bus, pci.device)),
            minor: self.value(names::MINOR, device, 0)?,
            capability: self.two(names::CAPABILITY, device)?,
            cores: self.value(names::CORES, device, 0)?,
            bus_width: self.value(names::BUS_WIDTH, device, 0)?,
            compute_mode: self.value(names::COMPUTE_MODE, device, 0)?,
            ecc: self.two(names::ECC, device)?,
            mig: self.two(names::MIG, device)?,
            display: display(names::DISPLAY_MODE)?.zip(display(names::DISPLAY_ACTIVE)?),
            memory: memory.map(|memory| [memory.total, memory.reserved, memory.used, memory.free]),
            utilization: self
                .value(names::UTILIZATION, device, Utilization::default())?
                .map(|utilization| (utilization.gpu, utilization.memory)),
            processes: self.processes(device)?,
        })
    }

    fn processes(&self, device: DeviceHandle) -> Result<Vec<SmiProcess>> {
        let mut list = vec![ProcessInfoV2::default(); PROCESSES];
        let mut count = u32::try_from(PROCESSES)?;
        let call = self.function::<Call3<DeviceHandle, *mut u32, *mut ProcessInfoV2>>(names::PROCESSES)?;
        // SAFETY: the signature of nvml.h, a place for the count, and room for as many entries.
        let code = unsafe { call(device, &raw mut count, list.as_mut_ptr()) };
        if optional(names::PROCESSES, code)?.is_none() {
            return Ok(Vec::new());
        }
        list.truncate(count as usize);
        let call = self.function::<Call3<u32, *mut c_char, u32>>(names::PROCESS_NAME)?;
        list.into_iter()
            .map(|process| {
                // SAFETY: the signature of nvml.h, and room of the stated length.
                let fill = |room, bytes| unsafe { call(process.pid, room, bytes) };
                // A process may end between the list and this call.
                let name = self.text(names::PROCESS_NAME, fill).unwrap_or_else(|_| "[Not Found]".to_owned());
                Ok(SmiProcess { pid: process.pid, name, bytes: process.used })
            })
            .collect()
    }
}
