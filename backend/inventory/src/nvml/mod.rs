//! The management library: loaded by absolute path, called through the bindings of its own header.
//!
//! The server loop calls it. It owns the loaded library and its event sets. It must never decide about an instance: it makes and
//! destroys those that `sluiced` names.
//!
//! The bindings are `nvml-wrapper-sys`; its companion `nvml-wrapper` is not used here: it cannot make instances,
//! lists their places wrongly (always none), gives up on a process list that grows meanwhile, and hides the library's codes,
//! which `sluiced` needs. An entry point that the library does not have answers `NVML_ERROR_FUNCTION_NOT_FOUND`; newer forms of
//! a call are tried before older ones.

#![expect(
    unsafe_code,
    reason = "loads a C library and calls its entry points with pointers to places for answers"
)]

mod instances;

pub(crate) use instances::Meant;

use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlDevice_t, nvmlEccCounterType_enum_NVML_VOLATILE_ECC, nvmlEventData_t, nvmlEventSet_t,
    nvmlEventTypeXidCriticalError, nvmlFieldValue_t, nvmlMemory_t, nvmlMemory_v2_t,
    nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvmlPciInfo_t, nvmlProcessInfo_t,
    nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlProcessUtilizationSample_t, nvmlUtilization_t,
};
use sluice_messages::inventory::{PciAddress, Recovery, Switch, WHOLE};
use sluice_nvml_abi::{FIELD_RECOVERY_ACTION, Result, Status, cores_per_multiprocessor};
use std::{
    collections::BTreeMap,
    ffi::c_char,
    path::{Path, PathBuf},
    ptr::null_mut,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Calls an entry point, if the library has it.
macro_rules! call {
    ($nvml:ident.$name:ident($($argument:expr),* $(,)?)) => {
        match &$nvml.library.$name {
            // SAFETY: the arguments are of the header's types, and places live through the call.
            Ok(entry) => $crate::nvml::status(unsafe { entry($($argument),*) }),
            Err(_) => Err(sluice_nvml_abi::Status::FUNCTION_NOT_FOUND),
        }
    };
}
use call;

fn status(code: u32) -> Result {
    if code == 0 { Ok(()) } else { Err(Status(code)) }
}

/// A structure of the header: numbers, texts and pointers, for which all zeroes are a valid value.
trait Plain: Copy {
    /// Returns a value of all zeroes.
    fn blank() -> Self {
        // SAFETY: this trait promises that all zeroes are a valid value.
        unsafe { core::mem::zeroed() }
    }
}

macro_rules! plain {
    ($($name:ty),+ $(,)?) => { $(impl $crate::nvml::Plain for $name {})+ };
}
use plain;
plain!(
    nvmlEventData_t,
    nvmlFieldValue_t,
    nvmlMemory_t,
    nvmlMemory_v2_t,
    nvmlPciInfo_t,
    nvmlProcessInfo_v1_t,
    nvmlProcessInfo_v2_t,
    nvmlProcessUtilizationSample_t,
    nvmlUtilization_t,
);

/// The version number of a structure.
#[expect(clippy::cast_possible_truncation, reason = "the structures are small")]
const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;
/// The period for which use of a device is queried: drivers sample it each second at least.
const LATELY: Duration = Duration::from_secs(1);
/// Largest number of listed processes of one device.
const PROCESSES: u32 = 1 << 16;
/// Buffer length for any text.
const TEXT: u32 = 96;

fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> =
        buffer.iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The bytes of `GPU-…` or `MIG-…`.
fn uuid(text: &str) -> Result<[u8; 16]> {
    let digits: String = text.get(4..).unwrap_or_default().chars().filter(|digit| *digit != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32);
    number.map(u128::to_be_bytes).ok_or(Status::UNKNOWN)
}

/// The loaded and started library.
pub struct Nvml {
    library: NvmlLib,
}

/// The reason why the library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A relative path would be searched for in places that others may write.
    #[error("the path {0} of the management library is not absolute")]
    Relative(PathBuf),
    /// The library cannot be loaded.
    #[error("cannot load the management library: {0}")]
    Load(String),
    /// The library cannot be initialised.
    #[error("cannot initialise the management library: nvmlReturn_t {}", .0.0)]
    Start(Status),
}

/// An event set of the library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventSet(usize);

/// Memory of a device or an instance, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryUse {
    pub(crate) total: u64,
    pub(crate) used: u64,
}

/// A process on a device and its use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessUse {
    pub(crate) pid: u32,
    pub(crate) bytes: u64,
    /// Percent of recent time in which its kernels ran; `None` if not requested or unknown.
    pub(crate) busy: Option<u32>,
}

/// The identity of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceIdentity {
    pub(crate) uuid: [u8; 16],
    pub(crate) memory: u64,
    pub(crate) multiprocessors: u32,
    pub(crate) node: u32,
    pub(crate) pci: PciAddress,
}

/// The health of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceHealth {
    pub(crate) mig: Switch,
    pub(crate) pending: Switch,
    pub(crate) ecc: Switch,
    pub(crate) recovery: Recovery,
    pub(crate) uncorrected: u64,
    pub(crate) repair: bool,
}

/// An answer, or `None` if the driver or the device does not support the query.
fn optional<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(Status::NOT_SUPPORTED | Status::FUNCTION_NOT_FOUND) => Ok(None),
        Err(error) => Err(error),
    }
}

fn switch(answer: Option<u32>) -> Switch {
    match answer {
        Some(0) => Switch::Off,
        Some(_) => Switch::On,
        None => Switch::Absent,
    }
}

impl Nvml {
    /// Loads and starts the library at `path`.
    ///
    /// # Errors
    /// [`LoadError`] if it cannot be loaded or initialised.
    pub fn load(path: &Path) -> core::result::Result<Nvml, LoadError> {
        if !path.is_absolute() {
            return Err(LoadError::Relative(path.to_path_buf()));
        }
        // SAFETY: the path comes from the operator; the library's constructors are the driver's own, and its entry points those
        // of the header that the bindings were made from.
        let library = unsafe { NvmlLib::new(path) }.map_err(|error| LoadError::Load(format!("{error:?}")))?;
        let nvml = Nvml { library };
        call!(nvml.nvmlInit_v2()).map_err(LoadError::Start)?;
        Ok(nvml)
    }

    /// The number of devices.
    pub(crate) fn count(&self) -> Result<u32> {
        let mut count = 0;
        call!(self.nvmlDeviceGetCount_v2(&raw mut count))?;
        Ok(count)
    }

    fn device(&self, index: u32) -> Result<nvmlDevice_t> {
        let mut device = null_mut();
        call!(self.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device))?;
        Ok(device)
    }

    /// A device, or the device that programs see on an instance of it.
    fn target(&self, index: u32, instance: u32) -> Result<nvmlDevice_t> {
        let device = self.device(index)?;
        if instance == WHOLE { Ok(device) } else { self.on_instance(device, instance, None) }
    }

    /// The memory of a device or an instance. Memory reserved by the driver counts as used.
    pub(crate) fn memory(&self, index: u32, instance: u32) -> Result<MemoryUse> {
        let device = self.target(index, instance)?;
        let mut memory = nvmlMemory_v2_t { version: version::<nvmlMemory_v2_t>(2), ..Plain::blank() };
        let (total, free) = match call!(self.nvmlDeviceGetMemoryInfo_v2(device, &raw mut memory)) {
            Ok(()) => (memory.total, memory.free),
            Err(Status::FUNCTION_NOT_FOUND) => {
                let mut memory = nvmlMemory_t::blank();
                call!(self.nvmlDeviceGetMemoryInfo(device, &raw mut memory))?;
                (memory.total, memory.free)
            }
            Err(error) => return Err(error),
        };
        Ok(MemoryUse { total, used: total.saturating_sub(free) })
    }

    /// The identity of a device.
    pub(crate) fn identity(&self, index: u32) -> Result<DeviceIdentity> {
        let device = self.device(index)?;
        let mut name = [0; TEXT as usize];
        call!(self.nvmlDeviceGetUUID(device, name.as_mut_ptr(), TEXT))?;
        let mut pci = nvmlPciInfo_t::blank();
        call!(self.nvmlDeviceGetPciInfo_v3(device, &raw mut pci))?;
        let ([bus, ..], [device_number, ..]) = (pci.bus.to_le_bytes(), pci.device.to_le_bytes());
        Ok(DeviceIdentity {
            uuid: uuid(&text(&name))?,
            memory: self.memory(index, WHOLE)?.total,
            multiprocessors: optional(self.multiprocessors(device))?.unwrap_or(0),
            node: optional(self.node(device))?.flatten().unwrap_or(u32::MAX),
            pci: PciAddress { domain: pci.domain, bus, device: device_number },
        })
    }

    fn multiprocessors(&self, device: nvmlDevice_t) -> Result<u32> {
        let (mut cores, mut major, mut minor) = (0, 0, 0);
        call!(self.nvmlDeviceGetNumGpuCores(device, &raw mut cores))?;
        call!(self.nvmlDeviceGetCudaComputeCapability(device, &raw mut major, &raw mut minor))?;
        let each = cores_per_multiprocessor((major.cast_unsigned(), minor.cast_unsigned()));
        Ok(each.map_or(0, |each| cores / each))
    }

    /// The first NUMA node that is near a device.
    fn node(&self, device: nvmlDevice_t) -> Result<Option<u32>> {
        const NODES: usize = 1024;
        const NODE_SCOPE: u32 = 0;
        let mut set = [0; NODES / 64];
        let words = u32::try_from(set.len()).map_err(|_| Status::UNKNOWN)?;
        call!(self.nvmlDeviceGetMemoryAffinity(device, words, set.as_mut_ptr(), NODE_SCOPE))?;
        let mut nodes = (0..).zip(set).filter(|(_, word)| *word != 0);
        Ok(nodes.next().map(|(place, word): (u32, u64)| place * 64 + word.trailing_zeros()))
    }

    /// The name of a device.
    pub(crate) fn name(&self, index: u32) -> Result<String> {
        let device = self.device(index)?;
        let mut name = [0; TEXT as usize];
        call!(self.nvmlDeviceGetName(device, name.as_mut_ptr(), TEXT))?;
        Ok(text(&name))
    }

    /// The health of a device. A value that the driver does not report leaves the other values valid.
    pub(crate) fn health(&self, index: u32) -> Result<DeviceHealth> {
        let device = self.device(index)?;
        let (mut mig, mut later) = (0, 0);
        let divided = optional(call!(self.nvmlDeviceGetMigMode(device, &raw mut mig, &raw mut later)))?;
        let (mut ecc, mut ecc_later) = (0, 0);
        let corrects = optional(call!(self.nvmlDeviceGetEccMode(device, &raw mut ecc, &raw mut ecc_later)))?;
        let mut uncorrected = 0;
        let counted = optional(call!(self.nvmlDeviceGetTotalEccErrors(
            device,
            nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvmlEccCounterType_enum_NVML_VOLATILE_ECC,
            &raw mut uncorrected,
        )))?;
        Ok(DeviceHealth {
            mig: switch(divided.map(|()| mig)),
            pending: switch(divided.map(|()| later)),
            ecc: switch(corrects.map(|()| ecc)),
            recovery: optional(self.recovery(device))?.unwrap_or(Recovery::Unknown),
            uncorrected: counted.map_or(u64::MAX, |()| uncorrected),
            repair: self.waits_for_repair(device)?,
        })
    }

    fn recovery(&self, device: nvmlDevice_t) -> Result<Recovery> {
        let mut field = nvmlFieldValue_t { fieldId: FIELD_RECOVERY_ACTION, ..Plain::blank() };
        call!(self.nvmlDeviceGetFieldValues(device, 1, &raw mut field))?;
        // An older driver reports in the field that it does not support it.
        status(field.nvmlReturn).map_err(|_| Status::NOT_SUPPORTED)?;
        // SAFETY: every part of the union is a number, and the driver has filled this one in.
        Ok(Recovery::from_number(unsafe { field.value.uiVal }))
    }

    /// True if rows wait to be replaced, or before Ampere, if pages wait to be retired.
    fn waits_for_repair(&self, device: nvmlDevice_t) -> Result<bool> {
        let (mut corrected, mut uncorrected, mut rows, mut failed, mut pages) = (0, 0, 0, 0, 0);
        let remapped = optional(call!(self.nvmlDeviceGetRemappedRows(
            device,
            &raw mut corrected,
            &raw mut uncorrected,
            &raw mut rows,
            &raw mut failed,
        )))?;
        let retired = optional(call!(self.nvmlDeviceGetRetiredPagesPendingStatus(device, &raw mut pages)))?;
        Ok(remapped.is_some() && rows != 0 || retired.is_some() && pages != 0)
    }

    /// The utilization of kernels and memory of a device or an instance, in percent.
    pub(crate) fn utilization(&self, index: u32, instance: u32) -> Result<(u32, u32)> {
        let device = self.target(index, instance)?;
        let mut utilization = nvmlUtilization_t::blank();
        call!(self.nvmlDeviceGetUtilizationRates(device, &raw mut utilization))?;
        Ok((utilization.gpu, utilization.memory))
    }

    /// All processes on a device or an instance, in the order of their numbers.
    pub(crate) fn processes(&self, index: u32, instance: u32) -> Result<Vec<ProcessUse>> {
        let device = self.target(index, instance)?;
        let compute = first_known([
            list::<nvmlProcessInfo_t>(|count, room| {
                call!(self.nvmlDeviceGetComputeRunningProcesses_v3(device, count, room))
            }),
            list::<nvmlProcessInfo_v2_t>(|count, room| {
                call!(self.nvmlDeviceGetComputeRunningProcesses_v2(device, count, room))
            }),
            list::<nvmlProcessInfo_v1_t>(|count, room| {
                call!(self.nvmlDeviceGetComputeRunningProcesses(device, count, room))
            }),
        ])?;
        // The kind of a process does not matter here, and a device or driver without such processes need not list them.
        let graphics = first_known([
            list::<nvmlProcessInfo_t>(|count, room| {
                call!(self.nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, room))
            }),
            list::<nvmlProcessInfo_v2_t>(|count, room| {
                call!(self.nvmlDeviceGetGraphicsRunningProcesses_v2(device, count, room))
            }),
            list::<nvmlProcessInfo_v1_t>(|count, room| {
                call!(self.nvmlDeviceGetGraphicsRunningProcesses(device, count, room))
            }),
        ]);
        let shared = first_known([list::<nvmlProcessInfo_t>(|count, room| {
            call!(self.nvmlDeviceGetMPSComputeRunningProcesses_v3(device, count, room))
        })]);
        let mut bytes: BTreeMap<u32, u64> = compute.into_iter().collect();
        for others in [graphics, shared] {
            for (pid, more) in optional(others)?.unwrap_or_default() {
                // A process in two lists has one amount of memory.
                let amount = bytes.entry(pid).or_insert(0);
                *amount = (*amount).max(more);
            }
        }
        Ok(bytes.into_iter().map(|(pid, bytes)| ProcessUse { pid, bytes, busy: None }).collect())
    }

    /// The processes, with their recent busy time.
    pub(crate) fn working(&self, index: u32, instance: u32) -> Result<Vec<ProcessUse>> {
        let mut processes = self.processes(index, instance)?;
        if let Some(busy) = self.busy(self.target(index, instance)?)? {
            for process in &mut processes {
                process.busy = Some(busy.get(&process.pid).copied().unwrap_or(0));
            }
        }
        Ok(processes)
    }

    /// Percent of recent time in which kernels of each process ran; idle processes may be absent. `None` if the
    /// driver does not report it, as on a device that is divided.
    fn busy(&self, device: nvmlDevice_t) -> Result<Option<BTreeMap<u32, u32>>> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|_| Status::UNKNOWN)?;
        let since = u64::try_from(now.saturating_sub(LATELY).as_micros()).map_err(|_| Status::UNKNOWN)?;
        let samples = list::<nvmlProcessUtilizationSample_t>(|count, room| {
            call!(self.nvmlDeviceGetProcessUtilization(device, room, count, since))
        });
        let samples = match samples() {
            // All processes were idle.
            Err(Status::NOT_FOUND) => Vec::new(),
            answer => match optional(answer)? {
                Some(samples) => samples,
                None => return Ok(None),
            },
        };
        let mut sums: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for (pid, percent) in samples {
            let (sum, count) = sums.entry(pid).or_default();
            (*sum, *count) = (sum.saturating_add(percent), *count + 1);
        }
        let mean = |(sum, count): (u64, u64)| u32::try_from(sum / count.max(1)).unwrap_or(100).min(100);
        Ok(Some(sums.into_iter().map(|(pid, sum)| (pid, mean(sum))).collect()))
    }

    /// An event set for errors of all devices; `None` if no device reports any.
    pub(crate) fn watch(&self) -> Result<Option<EventSet>> {
        let mut set = null_mut();
        if optional(call!(self.nvmlEventSetCreate(&raw mut set)))?.is_none() {
            return Ok(None);
        }
        let mut any = false;
        for index in 0..self.count()? {
            let device = self.device(index)?;
            let kinds = nvmlEventTypeXidCriticalError.into();
            any |= optional(call!(self.nvmlDeviceRegisterEvents(device, kinds, set)))?.is_some();
        }
        Ok(any.then(|| EventSet(set.expose_provenance())))
    }

    /// Waits for an error of a device: its index, the Xid and the instance; `None` after the time limit.
    pub(crate) fn wait(&self, set: EventSet, limit: Duration) -> Result<Option<(u32, u32, u32)>> {
        let set: nvmlEventSet_t = core::ptr::with_exposed_provenance_mut(set.0);
        let mut event = nvmlEventData_t::blank();
        let milliseconds = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        match call!(self.nvmlEventSetWait_v2(set, &raw mut event, milliseconds)) {
            Err(Status::TIMEOUT) => return Ok(None),
            other => other?,
        }
        if event.eventType != u64::from(nvmlEventTypeXidCriticalError) {
            return Ok(None);
        }
        for index in 0..self.count()? {
            if self.device(index) == Ok(event.device) {
                let xid = u32::try_from(event.eventData).unwrap_or(u32::MAX);
                // The library's number for no instance is the same as `WHOLE`.
                return Ok(Some((index, xid, event.gpuInstanceId)));
            }
        }
        Err(Status::NOT_FOUND)
    }
}

/// A process and its bytes, in the form of one version of the calls.
trait ListedForm: Plain {
    fn listed(&self) -> (u32, u64);
}

/// A value that the driver does not report counts as 0.
fn known(bytes: u64) -> u64 {
    if bytes == NOT_AVAILABLE { 0 } else { bytes }
}

impl ListedForm for nvmlProcessInfo_v1_t {
    fn listed(&self) -> (u32, u64) {
        (self.pid, known(self.usedGpuMemory))
    }
}

impl ListedForm for nvmlProcessInfo_v2_t {
    fn listed(&self) -> (u32, u64) {
        (self.pid, known(self.usedGpuMemory))
    }
}

impl ListedForm for nvmlProcessUtilizationSample_t {
    /// Drivers report more than 100 percent for a process without samples.
    fn listed(&self) -> (u32, u64) {
        (self.pid, if self.smUtil > 100 { 0 } else { self.smUtil.into() })
    }
}

type List = Result<Vec<(u32, u64)>>;

/// The first answer of a form that the library supports. Later forms are tried only after earlier ones.
fn first_known<const FORMS: usize>(forms: [Asked<'_>; FORMS]) -> List {
    let mut last = Err(Status::FUNCTION_NOT_FOUND);
    for ask in forms {
        last = ask();
        if !matches!(last, Err(Status::FUNCTION_NOT_FOUND)) {
            break;
        }
    }
    last
}

type Asked<'a> = Box<dyn FnOnce() -> List + 'a>;

/// Queries a list with a buffer of the required length, which may change between tries.
fn list<'a, T: ListedForm + 'a>(ask: impl Fn(*mut u32, *mut T) -> Result + 'a) -> Asked<'a> {
    const TRIES: usize = 8;
    const FIRST: u32 = 64;
    Box::new(move || {
        let mut room = FIRST;
        for _ in 0..TRIES {
            let mut infos = vec![T::blank(); room as usize];
            let mut count = room;
            match ask(&raw mut count, if room == 0 { null_mut() } else { infos.as_mut_ptr() }) {
                Ok(()) => {
                    infos.truncate(count.min(room) as usize);
                    return Ok(infos.iter().map(T::listed).collect());
                }
                Err(Status::INSUFFICIENT_SIZE) if count < PROCESSES => room = count.max(room) + FIRST,
                Err(error) => return Err(error),
            }
        }
        Err(Status::INSUFFICIENT_SIZE)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_read_as_the_vendor_writes_them() {
        let bytes = 0x0123_4567_89ab_cdef_0011_2233_4455_6677_u128.to_be_bytes();
        assert_eq!(uuid("GPU-01234567-89ab-cdef-0011-223344556677"), Ok(bytes));
        assert_eq!(uuid("MIG-01234567-89ab-cdef-0011-223344556677"), Ok(bytes));
        for text in
            ["", "GPU-", "MIG-GPU-01234567-89ab-cdef-0011-223344556677/1/0", "GPU-0123", "\u{e9}\u{e9}\u{e9}"]
        {
            assert_eq!(uuid(text), Err(Status::UNKNOWN), "{text}");
        }
    }
}
