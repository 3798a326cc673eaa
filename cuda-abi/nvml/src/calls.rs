//! The supported calls, in one file in the order of nvml.h: one function per name, called after the library has checked that it is
//! initialised.

#![allow(non_snake_case, missing_docs, reason = "the names of nvml.h, which documents them")]
#![expect(clippy::missing_errors_doc, reason = "nvml.h documents the errors")]

use crate::driver::{Facts, GpuMemory, Health, Process};
use crate::layout::{
    DeviceHandle, EVENT_XID, EventData, EventSetHandle, FABRIC_INFO_V2, FABRIC_INFO_V3,
    FIELD_RECOVERY_ACTION, FabricInfo, FabricInfoV2, FabricInfoV3, FieldValue, MEMORY_V2, MemoryV1, MemoryV2,
    NO_INSTANCE, PROCESS_DETAILS_V1, PciInfo, ProcessDetail, ProcessDetails, ProcessInfoV1, ProcessInfoV2,
    ProcessSample, Utilization,
};
use crate::library::Library;
use crate::pointers::{Out, Text, utf8};
use crate::status::{Result, Status};
use crate::targets::{DeviceTarget, devices, gpu_handle, mig};
use crate::{
    DRIVER_VERSION, NVML_VERSION, architecture, brand, cores_per_multiprocessor, mig_uuid_text, uuid_text,
};
use core::ffi::c_char;
use core::mem::offset_of;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// `NVML_FEATURE_DISABLED`, and its opposite.
pub(crate) const DISABLED: u32 = 0;
pub(crate) const ENABLED: u32 = 1;

/// Result of every unsupported function.
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

/// The flags request the default behaviour: a missing device is no error, and no device is attached.
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
    version.set_text(DRIVER_VERSION, length)
}

pub fn nvmlSystemGetNVMLVersion(_: &Library, version: Out<c_char>, length: u32) -> Result {
    // One of the few calls that need no initialisation.
    version.set_text(NVML_VERSION, length)
}

pub fn nvmlSystemGetCudaDriverVersion(library: &Library, version: Out<i32>) -> Result {
    version.set(library.session()?.opened.cuda_version)
}

pub fn nvmlSystemGetCudaDriverVersion_v2(library: &Library, version: Out<i32>) -> Result {
    nvmlSystemGetCudaDriverVersion(library, version)
}

/// Returns the first word of the command line, cut to fit.
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
    name.set_text(&first[..end], length)
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
    if session.opened.gpus.len() <= index as usize {
        return Err(Status::INVALID_ARGUMENT);
    }
    device.set(gpu_handle(index as usize)?)
}

pub fn nvmlDeviceGetHandleByIndex_v2(library: &Library, index: u32, device: Out<DeviceHandle>) -> Result {
    nvmlDeviceGetHandleByIndex(library, index, device)
}

pub fn nvmlDeviceGetHandleByUUID(library: &Library, uuid: Text<'_>, device: Out<DeviceHandle>) -> Result {
    let session = library.session()?;
    let uuid = utf8(uuid)?;
    for (index, gpu) in session.opened.gpus.iter().enumerate() {
        if uuid_text(&gpu.facts().uuid).eq_ignore_ascii_case(uuid) {
            return device.set(gpu_handle(index)?);
        }
        for (handle, compute) in devices(index, &**gpu)? {
            if mig_uuid_text(&compute.uuid).eq_ignore_ascii_case(uuid) {
                return device.set(handle);
            }
        }
    }
    Err(Status::NOT_FOUND)
}

/// The domain may have any number of digits; the domain and the function are optional.
pub fn nvmlDeviceGetHandleByPciBusId(
    library: &Library,
    bus_id: Text<'_>,
    device: Out<DeviceHandle>,
) -> Result {
    let session = library.session()?;
    let text = utf8(bus_id)?;
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
    let found = session.opened.gpus.iter().position(|gpu| fits(gpu.facts())).ok_or(Status::NOT_FOUND)?;
    device.set(gpu_handle(found)?)
}

pub fn nvmlDeviceGetHandleByPciBusId_v2(
    library: &Library,
    bus_id: Text<'_>,
    device: Out<DeviceHandle>,
) -> Result {
    nvmlDeviceGetHandleByPciBusId(library, bus_id, device)
}

// --- Properties of devices -------------------------------------------------------------------------------------------

/// Returns one of a device's facts; for a device on an instance, that of its GPU.
fn fact<T>(
    library: &Library,
    device: DeviceHandle,
    place: Out<T>,
    fact: impl FnOnce(&Facts) -> Result<T>,
) -> Result {
    let session = library.session()?;
    place.required()?.set(fact(session.target(device)?.gpu.facts())?)
}

/// Copies a text into a field of a structure.
pub(crate) fn field<const ROOM: usize>(text: &str) -> [c_char; ROOM] {
    let mut field = [0; ROOM];
    for (place, byte) in field.iter_mut().zip(text.bytes()).take(ROOM - 1) {
        *place = byte.cast_signed();
    }
    field
}

pub fn nvmlDeviceGetName(library: &Library, device: DeviceHandle, name: Out<c_char>, length: u32) -> Result {
    let session = library.session()?;
    let DeviceTarget { gpu, part, .. } = session.target(device)?;
    match part {
        Some(part) => name.set_text(format!("{} {}", gpu.facts().name, part.name()?), length),
        None => name.set_text(&gpu.facts().name, length),
    }
}

pub fn nvmlDeviceGetUUID(library: &Library, device: DeviceHandle, uuid: Out<c_char>, length: u32) -> Result {
    let session = library.session()?;
    let DeviceTarget { gpu, part, .. } = session.target(device)?;
    let text = part.map(|part| mig_uuid_text(&part.compute.uuid));
    uuid.set_text(text.unwrap_or_else(|| uuid_text(&gpu.facts().uuid)), length)
}

/// For a device on an instance, its index within its GPU.
pub fn nvmlDeviceGetIndex(library: &Library, device: DeviceHandle, index: Out<u32>) -> Result {
    let session = library.session()?;
    let target = session.target(device)?;
    let place = match target.part {
        Some(_) => {
            let all = devices(target.index, target.gpu)?;
            all.iter().position(|(handle, _)| *handle == device).ok_or(Status::INVALID_ARGUMENT)?
        }
        None => target.index,
    };
    index.set(u32::try_from(place).map_err(|_| Status::UNKNOWN)?)
}

pub fn nvmlDeviceGetMinorNumber(library: &Library, device: DeviceHandle, minor: Out<u32>) -> Result {
    fact(library, device, minor, |facts| Ok(facts.minor))
}

fn pci_info(facts: &Facts) -> PciInfo {
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

/// In the first two versions the structure ends before the long bus id.
pub fn nvmlDeviceGetPciInfo(library: &Library, device: DeviceHandle, info: Out<PciInfo>) -> Result {
    let session = library.session()?;
    info.set_first(&pci_info(session.target(device)?.gpu.facts()), offset_of!(PciInfo, bus_id))
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

/// No device here is part of an NVLink fabric. Since 9.0 a device without one has a state that says so, and the call succeeds.
fn fabric(facts: &Facts) -> Result<FabricInfo> {
    if facts.capability < (9, 0) { Err(Status::NOT_SUPPORTED) } else { Ok(FabricInfo::default()) }
}

pub fn nvmlDeviceGetGpuFabricInfo(library: &Library, device: DeviceHandle, place: Out<FabricInfo>) -> Result {
    fact(library, device, place, fabric)
}

pub fn nvmlDeviceGetGpuFabricInfoV(
    library: &Library,
    device: DeviceHandle,
    place: Out<FabricInfoV2>,
) -> Result {
    let info = fabric(library.session()?.target(device)?.gpu.facts())?;
    let version = place.cast().get()?;
    let info = FabricInfoV2 { version, info, health: 0 };
    match version {
        FABRIC_INFO_V2 => place.set(info),
        FABRIC_INFO_V3 => place.cast().set(FabricInfoV3 { info, summary: 0 }),
        _ => Err(Status::ARGUMENT_VERSION_MISMATCH),
    }
}

pub fn nvmlDeviceGetNumGpuCores(library: &Library, device: DeviceHandle, cores: Out<u32>) -> Result {
    // Like the vendor's: a device on an instance has attributes instead.
    library.session()?.gpu(device)?;
    fact(library, device, cores, |facts| {
        let each = cores_per_multiprocessor(facts.capability).ok_or(Status::NOT_SUPPORTED)?;
        each.checked_mul(facts.multiprocessors).ok_or(Status::UNKNOWN)
    })
}

pub fn nvmlDeviceGetMemoryBusWidth(library: &Library, device: DeviceHandle, bits: Out<u32>) -> Result {
    fact(library, device, bits, |facts| Ok(facts.bus_bits))
}

/// Any number of processes may compute on the device.
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

/// One bit for each near node. A node that is near in one scope is near in all.
pub fn nvmlDeviceGetMemoryAffinity(
    library: &Library,
    device: DeviceHandle,
    words: u32,
    nodes: Out<u64>,
    _scope: u32,
) -> Result {
    let session = library.session()?;
    let node = session.target(device)?.gpu.facts().node.ok_or(Status::NOT_SUPPORTED)?;
    if words == 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    let nodes = nodes.required()?;
    (0..words).try_for_each(|word| {
        let here = node / u64::BITS == word;
        nodes.set_at(word as usize, if here { 1 << (node % u64::BITS) } else { 0 })
    })
}

// --- Health ----------------------------------------------------------------------------------------------------------

fn health(library: &Library, device: DeviceHandle) -> Result<Health> {
    let session = library.session()?;
    session.gpu(device)?.1.health()
}

/// Counts since the driver's start and total counts are equal: nothing is stored here.
pub fn nvmlDeviceGetTotalEccErrors(
    library: &Library,
    device: DeviceHandle,
    kind: u32,
    counter: u32,
    count: Out<u64>,
) -> Result {
    let session = library.session()?;
    let facts = session.gpu(device)?.1.facts();
    let health = health(library, device)?;
    if facts.ecc != Some(true) {
        return Err(Status::NOT_SUPPORTED);
    }
    match (kind, counter) {
        (0, 0 | 1) => count.set(health.corrected),
        (1, 0 | 1) => count.set(health.uncorrected),
        _ => Err(Status::INVALID_ARGUMENT),
    }
}

pub fn nvmlDeviceGetRetiredPagesPendingStatus(
    library: &Library,
    device: DeviceHandle,
    pending: Out<u32>,
) -> Result {
    pending.required()?.set(if health(library, device)?.pending { ENABLED } else { DISABLED })
}

pub fn nvmlDeviceGetRemappedRows(
    library: &Library,
    device: DeviceHandle,
    corrected: Out<u32>,
    uncorrected: Out<u32>,
    pending: Out<u32>,
    failed: Out<u32>,
) -> Result {
    let health = health(library, device)?;
    for place in [corrected, uncorrected, pending, failed] {
        place.required()?;
    }
    corrected.set(health.remapped.0)?;
    uncorrected.set(health.remapped.1)?;
    pending.set(u32::from(health.pending))?;
    failed.set(0)
}

/// Each field has its own result.
pub fn nvmlDeviceGetFieldValues(
    library: &Library,
    device: DeviceHandle,
    count: i32,
    values: Out<FieldValue>,
) -> Result {
    const UNSIGNED_INT: u32 = 1;
    let session = library.session()?;
    let target = session.target(device)?;
    let count = usize::try_from(count).map_err(|_| Status::INVALID_ARGUMENT)?;
    let values = values.required()?;
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|_| Status::UNKNOWN)?.as_micros();
    let time = i64::try_from(time).map_err(|_| Status::UNKNOWN)?;
    (0..count).try_for_each(|index| {
        let asked = values.get_at(index)?;
        let found = match asked.field {
            FIELD_RECOVERY_ACTION => target.gpu.health().map(|health| health.recovery),
            _ => Err(Status::NOT_SUPPORTED),
        };
        let (status, value) = found.map_or_else(|Status(code)| (code, 0), |value| (0, value));
        let (kind, value) = (UNSIGNED_INT, value.into());
        values.set_at(index, FieldValue { time, latency: 0, kind, status, value, ..asked })
    })
}

// --- Memory ----------------------------------------------------------------------------------------------------------

fn memory(target: &DeviceTarget<'_>) -> Result<GpuMemory> {
    match &target.part {
        Some(part) => mig(target.gpu)?.memory(part.instance.epoch),
        None => target.gpu.memory(),
    }
}

pub fn nvmlDeviceGetMemoryInfo(library: &Library, device: DeviceHandle, place: Out<MemoryV1>) -> Result {
    let session = library.session()?;
    let memory = memory(&session.target(device)?)?;
    place.set(MemoryV1 {
        total: memory.total,
        free: memory.total.saturating_sub(memory.used),
        used: memory.used,
    })
}

pub fn nvmlDeviceGetMemoryInfo_v2(library: &Library, device: DeviceHandle, place: Out<MemoryV2>) -> Result {
    let session = library.session()?;
    let target = session.target(device)?;
    if place.get()?.version != MEMORY_V2 {
        return Err(Status::ARGUMENT_VERSION_MISMATCH);
    }
    let memory = memory(&target)?;
    place.set(MemoryV2 {
        version: MEMORY_V2,
        total: memory.total,
        reserved: 0,
        free: memory.total.saturating_sub(memory.used),
        used: memory.used,
    })
}

// --- Processes -------------------------------------------------------------------------------------------------------

/// The kind of the requested processes. Only compute processes exist here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ProcessKind {
    Compute,
    Other,
}

fn processes(library: &Library, device: DeviceHandle, kind: ProcessKind) -> Result<Vec<Process>> {
    let session = library.session()?;
    let target = session.target(device)?;
    if kind == ProcessKind::Compute { target.processes() } else { Ok(Vec::new()) }
}

/// Fills a list of the caller. `count` contains the room of the list, then the number of entries.
fn fill<T>(items: &[Process], count: Out<u32>, list: Out<T>, item: impl Fn(&Process) -> T) -> Result {
    let room = count.get()? as usize;
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
    kind: ProcessKind,
    count: Out<u32>,
    list: Out<ProcessInfoV1>,
) -> Result {
    let item = |process: &Process| ProcessInfoV1 { pid: process.pid, used: process.bytes };
    fill(&processes(library, device, kind)?, count, list, item)
}

fn list_v2(
    library: &Library,
    device: DeviceHandle,
    kind: ProcessKind,
    count: Out<u32>,
    list: Out<ProcessInfoV2>,
) -> Result {
    let item = |process: &Process| ProcessInfoV2 {
        pid: process.pid,
        used: process.bytes,
        gpu_instance: process.instance.map_or(NO_INSTANCE, |id| id.gpu),
        compute_instance: process.instance.map_or(NO_INSTANCE, |id| id.compute),
    };
    fill(&processes(library, device, kind)?, count, list, item)
}

macro_rules! process_lists {
    ($($name:ident $form:ident $info:ident $kind:ident;)+) => {$(
        pub fn $name(library: &Library, device: DeviceHandle, count: Out<u32>, list: Out<$info>) -> Result {
            $form(library, device, ProcessKind::$kind, count, list)
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
    let asked = list.get()?;
    let kind = match (asked.version, asked.mode) {
        (PROCESS_DETAILS_V1, 0 | 3) => ProcessKind::Compute,
        (PROCESS_DETAILS_V1, 1 | 2) => ProcessKind::Other,
        (PROCESS_DETAILS_V1, _) => return Err(Status::INVALID_ARGUMENT),
        _ => return Err(Status::ARGUMENT_VERSION_MISMATCH),
    };
    let item = |process: &Process| ProcessDetail {
        pid: process.pid,
        used: process.bytes,
        gpu_instance: process.instance.map_or(NO_INSTANCE, |id| id.gpu),
        compute_instance: process.instance.map_or(NO_INSTANCE, |id| id.compute),
        protected: 0,
    };
    let items = processes(library, device, kind)?;
    let count = u32::try_from(items.len()).map_err(|_| Status::UNKNOWN)?;
    list.set(ProcessDetails { count, ..asked })?;
    if asked.count < count || count > 0 && !asked.entries.is_given() {
        return Err(Status::INSUFFICIENT_SIZE);
    }
    items.iter().enumerate().try_for_each(|(index, process)| asked.entries.set_at(index, item(process)))
}

// --- Time ------------------------------------------------------------------------------------------------------------

/// Measured since the last call, or since initialisation. Kernels count when they end; memory accesses are not counted. A divided
/// GPU does not support it. A device on an instance does, unlike the vendor's.
pub fn nvmlDeviceGetUtilizationRates(
    library: &Library,
    device: DeviceHandle,
    utilization: Out<Utilization>,
) -> Result {
    let session = library.session()?;
    let target = session.target(device)?;
    if target.part.is_none() {
        undivided(&target)?;
    }
    let (before, now) = session.look(device, target.processes()?)?;
    let shares = before.map(|before| now.shares(&before)).unwrap_or_default();
    let gpu = shares.iter().map(|(_, percent)| percent).sum::<u32>().min(100);
    utilization.set(Utilization { gpu, memory: 0 })
}

/// A divided GPU does not report utilisation.
fn undivided(target: &DeviceTarget<'_>) -> Result {
    match target.gpu.mig() {
        Some(mig) if mig.is_divided()? => Err(Status::NOT_SUPPORTED),
        _ => Ok(()),
    }
}

/// Like [`nvmlDeviceGetUtilizationRates`], for each process that computed.
pub fn nvmlDeviceGetProcessUtilization(
    library: &Library,
    device: DeviceHandle,
    list: Out<ProcessSample>,
    count: Out<u32>,
    _since: u64,
) -> Result {
    let session = library.session()?;
    let target = session.target(device)?;
    if target.part.is_none() {
        undivided(&target)?;
    }
    let room = count.get()? as usize;
    if !list.is_given() {
        // The maximum, so that the list is long enough for the next call.
        count.set(u32::try_from(target.processes()?.len()).map_err(|_| Status::UNKNOWN)?)?;
        return Err(Status::INSUFFICIENT_SIZE);
    }
    let (before, now) = session.look(device, target.processes()?)?;
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
