//! What each call does: one function per served name, after the library's check that it was started.

#![allow(non_snake_case, missing_docs, reason = "the names of nvml.h, which says what each does")]
#![expect(clippy::missing_errors_doc, reason = "each answers as nvml.h says")]

use super::driver::{Facts, Process};
use super::layout::{
    DeviceHandle, EVENT_XID, EventData, EventSetHandle, MEMORY_V2, MemoryV1, MemoryV2, NO_INSTANCE,
    PROCESS_DETAILS_V1, PciInfo, ProcessDetail, ProcessDetails, ProcessInfoV1, ProcessInfoV2, ProcessSample,
    Utilization,
};
use super::library::Library;
use super::pointers::{Out, Text};
use super::status::{Result, Status};
use super::{DRIVER_VERSION, NVML_VERSION, architecture, brand, cores_per_multiprocessor, uuid_text};
use core::ffi::c_char;
use core::mem::offset_of;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// `NVML_FEATURE_DISABLED`, and its opposite.
const DISABLED: u32 = 0;
const ENABLED: u32 = 1;

/// The answer of every function that is not served.
pub fn refused(library: &Library) -> Result {
    library.session()?;
    Err(Status::NOT_SUPPORTED)
}

pub fn nvmlInit(library: &Library) -> Result {
    library.start()
}

pub fn nvmlInit_v2(library: &Library) -> Result {
    library.start()
}

/// What the flags ask for is so in any case: no device is no error, and none is attached to.
pub fn nvmlInitWithFlags(library: &Library, flags: u32) -> Result {
    const NO_GPUS: u32 = 1;
    const NO_ATTACH: u32 = 2;
    if flags & !(NO_GPUS | NO_ATTACH) != 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    library.start()
}

pub fn nvmlShutdown(library: &Library) -> Result {
    library.end()
}

// --- The system ------------------------------------------------------------------------------------------------------

pub fn nvmlSystemGetDriverVersion(library: &Library, version: Out<c_char>, length: u32) -> Result {
    library.session()?;
    version.text(DRIVER_VERSION, length)
}

pub fn nvmlSystemGetNVMLVersion(_: &Library, version: Out<c_char>, length: u32) -> Result {
    // One of the few calls that need no start.
    version.text(NVML_VERSION, length)
}

pub fn nvmlSystemGetCudaDriverVersion(library: &Library, version: Out<i32>) -> Result {
    version.set(library.session()?.opened.cuda_version)
}

pub fn nvmlSystemGetCudaDriverVersion_v2(library: &Library, version: Out<i32>) -> Result {
    nvmlSystemGetCudaDriverVersion(library, version)
}

/// The first word of the command line, cut to what fits.
pub fn nvmlSystemGetProcessName(library: &Library, pid: u32, name: Out<c_char>, length: u32) -> Result {
    library.session()?;
    let room = (length as usize).checked_sub(1).ok_or(Status::INVALID_ARGUMENT)?;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| Status::NOT_FOUND)?;
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    let first = String::from_utf8_lossy(first);
    let mut end = first.len().min(room);
    while !first.is_char_boundary(end) {
        end -= 1;
    }
    name.text(&first[..end], length)
}

// --- Finding devices -------------------------------------------------------------------------------------------------

pub fn nvmlDeviceGetCount(library: &Library, count: Out<u32>) -> Result {
    let count = count.required()?;
    count.set(u32::try_from(library.session()?.opened.gpus.len()).map_err(|_| Status::UNKNOWN)?)
}

pub fn nvmlDeviceGetCount_v2(library: &Library, count: Out<u32>) -> Result {
    nvmlDeviceGetCount(library, count)
}

pub fn nvmlDeviceGetHandleByIndex(library: &Library, index: u32, device: Out<DeviceHandle>) -> Result {
    let session = library.session()?;
    let handle = index as usize + 1;
    session.gpu(handle)?;
    device.set(handle)
}

pub fn nvmlDeviceGetHandleByIndex_v2(library: &Library, index: u32, device: Out<DeviceHandle>) -> Result {
    nvmlDeviceGetHandleByIndex(library, index, device)
}

pub fn nvmlDeviceGetHandleByUUID(library: &Library, uuid: Text<'_>, device: Out<DeviceHandle>) -> Result {
    let session = library.session()?;
    let uuid = uuid.get()?;
    device.set(session.find(|gpu| uuid_text(&gpu.facts().uuid).eq_ignore_ascii_case(uuid))?)
}

/// The domain may have any number of digits, and both it and the function may be left out.
pub fn nvmlDeviceGetHandleByPciBusId(
    library: &Library,
    bus_id: Text<'_>,
    device: Out<DeviceHandle>,
) -> Result {
    let session = library.session()?;
    let text = bus_id.get()?;
    let number = |text: &str| u32::from_str_radix(text, 16).map_err(|_| Status::INVALID_ARGUMENT);
    let text = match text.split_once('.') {
        Some((rest, function)) => {
            if number(function)? != 0 {
                return Err(Status::NOT_FOUND);
            }
            rest
        }
        None => text,
    };
    let parts = text.split(':').map(number).collect::<Result<Vec<_>>>()?;
    let (domain, bus, slot) = match parts[..] {
        [domain, bus, slot] => (domain, bus, slot),
        [bus, slot] => (0, bus, slot),
        _ => return Err(Status::INVALID_ARGUMENT),
    };
    let fits = |facts: &Facts| facts.pci.domain == domain && facts.pci.bus == bus && facts.pci.device == slot;
    device.set(session.find(|gpu| fits(gpu.facts()))?)
}

pub fn nvmlDeviceGetHandleByPciBusId_v2(
    library: &Library,
    bus_id: Text<'_>,
    device: Out<DeviceHandle>,
) -> Result {
    nvmlDeviceGetHandleByPciBusId(library, bus_id, device)
}

// --- What a device is ------------------------------------------------------------------------------------------------

/// Answers from a device's facts.
fn fact<T>(
    library: &Library,
    device: DeviceHandle,
    place: Out<T>,
    fact: impl FnOnce(&Facts) -> Result<T>,
) -> Result {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    place.required()?.set(fact(gpu.facts())?)
}

pub fn nvmlDeviceGetName(library: &Library, device: DeviceHandle, name: Out<c_char>, length: u32) -> Result {
    let session = library.session()?;
    name.text(&session.gpu(device)?.1.facts().name, length)
}

pub fn nvmlDeviceGetUUID(library: &Library, device: DeviceHandle, uuid: Out<c_char>, length: u32) -> Result {
    let session = library.session()?;
    uuid.text(&uuid_text(&session.gpu(device)?.1.facts().uuid), length)
}

pub fn nvmlDeviceGetIndex(library: &Library, device: DeviceHandle, index: Out<u32>) -> Result {
    let session = library.session()?;
    let (place, _) = session.gpu(device)?;
    index.set(u32::try_from(place).map_err(|_| Status::UNKNOWN)?)
}

pub fn nvmlDeviceGetMinorNumber(library: &Library, device: DeviceHandle, minor: Out<u32>) -> Result {
    fact(library, device, minor, |facts| Ok(facts.minor))
}

fn pci_info(facts: &Facts) -> PciInfo {
    fn field<const ROOM: usize>(text: &str) -> [c_char; ROOM] {
        let mut field = [0; ROOM];
        for (place, byte) in field.iter_mut().zip(text.bytes()) {
            *place = byte.cast_signed();
        }
        field
    }
    let pci = facts.pci;
    PciInfo {
        bus_id_legacy: field(&format!("{:04X}:{:02X}:{:02X}.0", pci.domain & 0xffff, pci.bus, pci.device)),
        domain: pci.domain,
        bus: pci.bus,
        device: pci.device,
        device_id: 0,
        subsystem_id: 0,
        bus_id: field(&pci.to_string()),
    }
}

/// The first two versions end before the long bus id.
pub fn nvmlDeviceGetPciInfo(library: &Library, device: DeviceHandle, info: Out<PciInfo>) -> Result {
    let session = library.session()?;
    info.set_first(&pci_info(session.gpu(device)?.1.facts()), offset_of!(PciInfo, bus_id))
}

pub fn nvmlDeviceGetPciInfo_v2(library: &Library, device: DeviceHandle, info: Out<PciInfo>) -> Result {
    nvmlDeviceGetPciInfo(library, device, info)
}

pub fn nvmlDeviceGetPciInfo_v3(library: &Library, device: DeviceHandle, info: Out<PciInfo>) -> Result {
    fact(library, device, info, |facts| Ok(pci_info(facts)))
}

pub fn nvmlDeviceGetBrand(library: &Library, device: DeviceHandle, place: Out<u32>) -> Result {
    fact(library, device, place, |facts| Ok(brand(&facts.name)))
}

pub fn nvmlDeviceGetArchitecture(library: &Library, device: DeviceHandle, place: Out<u32>) -> Result {
    fact(library, device, place, |facts| Ok(architecture(facts.capability)))
}

pub fn nvmlDeviceGetCudaComputeCapability(
    library: &Library,
    device: DeviceHandle,
    major: Out<i32>,
    minor: Out<i32>,
) -> Result {
    let signed = |number: u32| i32::try_from(number).map_err(|_| Status::UNKNOWN);
    minor.required()?;
    fact(library, device, major, |facts| signed(facts.capability.0))?;
    fact(library, device, minor, |facts| signed(facts.capability.1))
}

pub fn nvmlDeviceGetNumGpuCores(library: &Library, device: DeviceHandle, cores: Out<u32>) -> Result {
    fact(library, device, cores, |facts| {
        let each = cores_per_multiprocessor(facts.capability).ok_or(Status::NOT_SUPPORTED)?;
        each.checked_mul(facts.multiprocessors).ok_or(Status::UNKNOWN)
    })
}

pub fn nvmlDeviceGetMemoryBusWidth(library: &Library, device: DeviceHandle, bits: Out<u32>) -> Result {
    fact(library, device, bits, |facts| Ok(facts.bus_bits))
}

/// Any number of processes may compute on it.
pub fn nvmlDeviceGetComputeMode(library: &Library, device: DeviceHandle, mode: Out<u32>) -> Result {
    const DEFAULT: u32 = 0;
    fact(library, device, mode, |_| Ok(DEFAULT))
}

pub fn nvmlDeviceGetDisplayMode(library: &Library, device: DeviceHandle, connected: Out<u32>) -> Result {
    fact(library, device, connected, |_| Ok(DISABLED))
}

pub fn nvmlDeviceGetDisplayActive(library: &Library, device: DeviceHandle, active: Out<u32>) -> Result {
    fact(library, device, active, |_| Ok(DISABLED))
}

pub fn nvmlDeviceGetEccMode(
    library: &Library,
    device: DeviceHandle,
    current: Out<u32>,
    pending: Out<u32>,
) -> Result {
    let mode = |facts: &Facts| {
        let on = facts.ecc.ok_or(Status::NOT_SUPPORTED)?;
        Ok(if on { ENABLED } else { DISABLED })
    };
    pending.required()?;
    fact(library, device, current, mode)?;
    fact(library, device, pending, mode)
}

// --- Instances -------------------------------------------------------------------------------------------------------

pub fn nvmlDeviceGetMigMode(
    library: &Library,
    device: DeviceHandle,
    current: Out<u32>,
    pending: Out<u32>,
) -> Result {
    let mode = |facts: &Facts| if facts.divisible { Ok(DISABLED) } else { Err(Status::NOT_SUPPORTED) };
    pending.required()?;
    fact(library, device, current, mode)?;
    fact(library, device, pending, mode)
}

pub fn nvmlDeviceGetMaxMigDeviceCount(library: &Library, device: DeviceHandle, count: Out<u32>) -> Result {
    fact(library, device, count, |_| Ok(0))
}

pub fn nvmlDeviceGetMigDeviceHandleByIndex(
    library: &Library,
    device: DeviceHandle,
    _index: u32,
    _instance: Out<DeviceHandle>,
) -> Result {
    library.session()?.gpu(device)?;
    Err(Status::NOT_FOUND)
}

pub fn nvmlDeviceIsMigDeviceHandle(library: &Library, device: DeviceHandle, answer: Out<u32>) -> Result {
    fact(library, device, answer, |_| Ok(0))
}

// --- Memory ----------------------------------------------------------------------------------------------------------

pub fn nvmlDeviceGetMemoryInfo(library: &Library, device: DeviceHandle, place: Out<MemoryV1>) -> Result {
    let session = library.session()?;
    let memory = session.gpu(device)?.1.memory()?;
    place.set(MemoryV1 {
        total: memory.total,
        free: memory.total.saturating_sub(memory.used),
        used: memory.used,
    })
}

pub fn nvmlDeviceGetMemoryInfo_v2(library: &Library, device: DeviceHandle, place: Out<MemoryV2>) -> Result {
    let session = library.session()?;
    let gpu = session.gpu(device)?.1;
    if place.current()?.version != MEMORY_V2 {
        return Err(Status::ARGUMENT_VERSION_MISMATCH);
    }
    let memory = gpu.memory()?;
    place.set(MemoryV2 {
        version: MEMORY_V2,
        total: memory.total,
        reserved: 0,
        free: memory.total.saturating_sub(memory.used),
        used: memory.used,
    })
}

// --- Processes -------------------------------------------------------------------------------------------------------

/// Which processes are asked for. Only those that compute exist here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Compute,
    Other,
}

fn processes(library: &Library, device: DeviceHandle, kind: Kind) -> Result<Vec<Process>> {
    let session = library.session()?;
    let (_, gpu) = session.gpu(device)?;
    if kind == Kind::Compute { gpu.processes() } else { Ok(Vec::new()) }
}

/// Fills a list of the caller's. `count` says how much room there is, and then how many there are.
fn fill<T>(items: &[Process], count: Out<u32>, list: Out<T>, item: impl Fn(&Process) -> T) -> Result {
    let room = count.current()? as usize;
    count.set(u32::try_from(items.len()).map_err(|_| Status::UNKNOWN)?)?;
    if items.is_empty() {
        return Ok(());
    }
    if room < items.len() || !list.is_given() {
        return Err(if room == 0 || list.is_given() {
            Status::INSUFFICIENT_SIZE
        } else {
            Status::INVALID_ARGUMENT
        });
    }
    items.iter().enumerate().try_for_each(|(index, process)| list.set_at(index, item(process)))
}

fn list_v1(
    library: &Library,
    device: DeviceHandle,
    kind: Kind,
    count: Out<u32>,
    list: Out<ProcessInfoV1>,
) -> Result {
    let item = |process: &Process| ProcessInfoV1 { pid: process.pid, used: process.bytes };
    fill(&processes(library, device, kind)?, count, list, item)
}

fn list_v2(
    library: &Library,
    device: DeviceHandle,
    kind: Kind,
    count: Out<u32>,
    list: Out<ProcessInfoV2>,
) -> Result {
    let item = |process: &Process| ProcessInfoV2 {
        pid: process.pid,
        used: process.bytes,
        gpu_instance: NO_INSTANCE,
        compute_instance: NO_INSTANCE,
    };
    fill(&processes(library, device, kind)?, count, list, item)
}

macro_rules! process_lists {
    ($($name:ident $form:ident $info:ident $kind:ident;)+) => {$(
        pub fn $name(library: &Library, device: DeviceHandle, count: Out<u32>, list: Out<$info>) -> Result {
            $form(library, device, Kind::$kind, count, list)
        }
    )+};
}
process_lists! {
    nvmlDeviceGetComputeRunningProcesses list_v1 ProcessInfoV1 Compute;
    nvmlDeviceGetComputeRunningProcesses_v2 list_v2 ProcessInfoV2 Compute;
    nvmlDeviceGetComputeRunningProcesses_v3 list_v2 ProcessInfoV2 Compute;
    nvmlDeviceGetGraphicsRunningProcesses list_v1 ProcessInfoV1 Other;
    nvmlDeviceGetGraphicsRunningProcesses_v2 list_v2 ProcessInfoV2 Other;
    nvmlDeviceGetGraphicsRunningProcesses_v3 list_v2 ProcessInfoV2 Other;
    nvmlDeviceGetMPSComputeRunningProcesses list_v1 ProcessInfoV1 Other;
    nvmlDeviceGetMPSComputeRunningProcesses_v2 list_v2 ProcessInfoV2 Other;
    nvmlDeviceGetMPSComputeRunningProcesses_v3 list_v2 ProcessInfoV2 Other;
}

pub fn nvmlDeviceGetRunningProcessDetailList(
    library: &Library,
    device: DeviceHandle,
    list: Out<ProcessDetails>,
) -> Result {
    let asked = list.current()?;
    let kind = match (asked.version, asked.mode) {
        (PROCESS_DETAILS_V1, 0 | 3) => Kind::Compute,
        (PROCESS_DETAILS_V1, 1 | 2) => Kind::Other,
        (PROCESS_DETAILS_V1, _) => return Err(Status::INVALID_ARGUMENT),
        _ => return Err(Status::ARGUMENT_VERSION_MISMATCH),
    };
    let item = |process: &Process| ProcessDetail {
        pid: process.pid,
        used: process.bytes,
        gpu_instance: NO_INSTANCE,
        compute_instance: NO_INSTANCE,
        protected: 0,
    };
    let items = processes(library, device, kind)?;
    let count = u32::try_from(items.len()).map_err(|_| Status::UNKNOWN)?;
    list.set(ProcessDetails { count, ..asked })?;
    if asked.count < count || count > 0 && asked.entries.is_null() {
        return Err(Status::INSUFFICIENT_SIZE);
    }
    let entries = Out::inside(asked.entries);
    items.iter().enumerate().try_for_each(|(index, process)| entries.set_at(index, item(process)))
}

// --- Time ------------------------------------------------------------------------------------------------------------

/// Of the time since this was last asked, or the start. Kernels count when they end. Nobody counts accesses to memory.
pub fn nvmlDeviceGetUtilizationRates(
    library: &Library,
    device: DeviceHandle,
    utilization: Out<Utilization>,
) -> Result {
    let session = library.session()?;
    let (index, gpu) = session.gpu(device)?;
    let (before, now) = session.look(index, gpu)?;
    let shares = before.map(|before| now.shares(&before)).unwrap_or_default();
    let gpu = shares.iter().map(|(_, percent)| percent).sum::<u32>().min(100);
    utilization.set(Utilization { gpu, memory: 0 })
}

/// As [`nvmlDeviceGetUtilizationRates`], for each process that computed.
pub fn nvmlDeviceGetProcessUtilization(
    library: &Library,
    device: DeviceHandle,
    list: Out<ProcessSample>,
    count: Out<u32>,
    _since: u64,
) -> Result {
    let session = library.session()?;
    let (index, gpu) = session.gpu(device)?;
    let room = count.current()? as usize;
    if !list.is_given() {
        // As many as there may be, so that the list is long enough when it is filled.
        count.set(u32::try_from(gpu.processes()?.len()).map_err(|_| Status::UNKNOWN)?)?;
        return Err(Status::INSUFFICIENT_SIZE);
    }
    let (before, now) = session.look(index, gpu)?;
    let shares = before.map(|before| now.shares(&before)).unwrap_or_default();
    if shares.is_empty() {
        return Err(Status::NOT_FOUND);
    }
    count.set(u32::try_from(shares.len()).map_err(|_| Status::UNKNOWN)?)?;
    if room < shares.len() {
        return Err(Status::INSUFFICIENT_SIZE);
    }
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|_| Status::UNKNOWN)?.as_micros();
    let time = u64::try_from(time).map_err(|_| Status::UNKNOWN)?;
    shares.iter().enumerate().try_for_each(|(index, (pid, gpu))| {
        list.set_at(index, ProcessSample { pid: *pid, time, gpu: *gpu, ..ProcessSample::default() })
    })
}

// --- Events ----------------------------------------------------------------------------------------------------------

pub fn nvmlDeviceGetSupportedEventTypes(library: &Library, device: DeviceHandle, kinds: Out<u64>) -> Result {
    let session = library.session()?;
    let watched = session.gpu(device)?.1.watch();
    kinds.set(match watched {
        Ok(_) => EVENT_XID,
        Err(Status::NOT_SUPPORTED) => 0,
        Err(error) => return Err(error),
    })
}

pub fn nvmlDeviceRegisterEvents(
    library: &Library,
    device: DeviceHandle,
    kinds: u64,
    set: EventSetHandle,
) -> Result {
    library.session()?.register(device, kinds, set)
}

pub fn nvmlEventSetCreate(library: &Library, set: Out<EventSetHandle>) -> Result {
    let session = library.session()?;
    set.required()?.set(session.sets.create())
}

pub fn nvmlEventSetFree(library: &Library, set: EventSetHandle) -> Result {
    library.session()?.sets.free(set)
}

pub fn nvmlEventSetWait(
    library: &Library,
    set: EventSetHandle,
    event: Out<EventData>,
    milliseconds: u32,
) -> Result {
    let event = event.required()?;
    event.set(library.session()?.wait(set, Duration::from_millis(milliseconds.into()))?)
}

pub fn nvmlEventSetWait_v2(
    library: &Library,
    set: EventSetHandle,
    event: Out<EventData>,
    milliseconds: u32,
) -> Result {
    nvmlEventSetWait(library, set, event, milliseconds)
}
