//! The management library: loaded by absolute path, one table of optional entry points.
//!
//! An entry point that the library does not have answers `NVML_ERROR_FUNCTION_NOT_FOUND`; newer forms of a call are tried
//! before older ones. The layouts are those of `sluice-cuda-abi`.

#![expect(unsafe_code, reason = "loads a C library and takes its entry points at their declared signatures")]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use sluice_cuda_abi::nvml::{
    DeviceHandle, EVENT_XID, EventData, EventSetHandle, MEMORY_V2, Memory, MemoryV1, MemoryV2, Process,
    ProcessInfoV1, ProcessInfoV2, Result, Status,
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    ptr::null_mut,
    time::Duration,
};

macro_rules! entries {
    ($($name:ident($($type:ty),*);)+) => {
        /// The entry points that the library has.
        #[expect(non_snake_case, reason = "the names of nvml.h")]
        struct Entries {
            $($name: Option<unsafe extern "C" fn($($type),*) -> u32>,)+
        }

        impl Entries {
            fn load(library: &Library) -> Entries {
                Entries {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the symbol has this signature in the library's header.
                        unsafe { library.get::<unsafe extern "C" fn($($type),*) -> u32>(symbol) }.ok().map(|entry| *entry)
                    },)+
                }
            }
        }
    };
}
entries! {
    nvmlInit_v2();
    nvmlDeviceGetCount_v2(*mut u32);
    nvmlDeviceGetHandleByIndex_v2(u32, *mut DeviceHandle);
    nvmlDeviceGetMemoryInfo(DeviceHandle, *mut MemoryV1);
    nvmlDeviceGetMemoryInfo_v2(DeviceHandle, *mut MemoryV2);
    nvmlDeviceGetComputeRunningProcesses(DeviceHandle, *mut u32, *mut ProcessInfoV1);
    nvmlDeviceGetComputeRunningProcesses_v2(DeviceHandle, *mut u32, *mut ProcessInfoV2);
    nvmlDeviceGetComputeRunningProcesses_v3(DeviceHandle, *mut u32, *mut ProcessInfoV2);
    nvmlDeviceGetGraphicsRunningProcesses(DeviceHandle, *mut u32, *mut ProcessInfoV1);
    nvmlDeviceGetGraphicsRunningProcesses_v2(DeviceHandle, *mut u32, *mut ProcessInfoV2);
    nvmlDeviceGetGraphicsRunningProcesses_v3(DeviceHandle, *mut u32, *mut ProcessInfoV2);
    nvmlDeviceGetMPSComputeRunningProcesses_v3(DeviceHandle, *mut u32, *mut ProcessInfoV2);
    nvmlEventSetCreate(*mut EventSetHandle);
    nvmlDeviceRegisterEvents(DeviceHandle, u64, EventSetHandle);
    nvmlEventSetWait_v2(EventSetHandle, *mut EventData, u32);
}

/// Calls an entry point, if there is one.
macro_rules! call {
    ($nvml:ident.$name:ident($($argument:expr),*)) => {
        match $nvml.entries.$name {
            // SAFETY: the arguments are of the declared types, and places live through the call.
            Some(entry) => status(unsafe { entry($($argument),*) }),
            None => Err(Status::FUNCTION_NOT_FOUND),
        }
    };
}

fn status(code: u32) -> Result {
    if code == 0 { Ok(()) } else { Err(Status(code)) }
}

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;
/// Processes on one device that are listed.
const PROCESSES: u32 = 1 << 16;

/// The loaded and started library.
pub struct Nvml {
    entries: Entries,
    /// Keeps the code of `entries` mapped.
    _library: Library,
}

/// Why there is no library.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A relative path would be searched for in places that others may write.
    #[error("the path {0} of the management library is not absolute")]
    Relative(PathBuf),
    /// It does not load.
    #[error("cannot load the management library: {0:?}")]
    Load(#[from] libloading::Error),
    /// It does not start.
    #[error("the management library does not start: nvmlReturn_t {}", .0.0)]
    Start(Status),
}

impl Nvml {
    /// Loads and starts the library at `path`.
    ///
    /// # Errors
    /// [`LoadError`] when that cannot be.
    pub fn load(path: &Path) -> core::result::Result<Nvml, LoadError> {
        if !path.is_absolute() {
            return Err(LoadError::Relative(path.to_path_buf()));
        }
        // SAFETY: the path comes from the operator; the library's constructors are the driver's own.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }?;
        let nvml = Nvml { entries: Entries::load(&library), _library: library };
        call!(nvml.nvmlInit_v2()).map_err(LoadError::Start)?;
        Ok(nvml)
    }

    /// How many devices there are.
    pub(crate) fn count(&self) -> Result<u32> {
        let mut count = 0;
        call!(self.nvmlDeviceGetCount_v2(&raw mut count))?;
        Ok(count)
    }

    fn device(&self, index: u32) -> Result<DeviceHandle> {
        let mut device = 0;
        call!(self.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device))?;
        Ok(device)
    }

    /// A device's memory. What the driver reserves for itself counts as used.
    pub(crate) fn memory(&self, index: u32) -> Result<Memory> {
        let device = self.device(index)?;
        let mut memory = MemoryV2 { version: MEMORY_V2, ..MemoryV2::default() };
        let (total, free) = match call!(self.nvmlDeviceGetMemoryInfo_v2(device, &raw mut memory)) {
            Ok(()) => (memory.total, memory.free),
            Err(Status::FUNCTION_NOT_FOUND) => {
                let mut memory = MemoryV1::default();
                call!(self.nvmlDeviceGetMemoryInfo(device, &raw mut memory))?;
                (memory.total, memory.free)
            }
            Err(error) => return Err(error),
        };
        Ok(Memory { total, used: total.saturating_sub(free) })
    }

    /// The processes on a device, whatever they do there, in the order of their numbers.
    pub(crate) fn processes(&self, index: u32) -> Result<Vec<Process>> {
        let device = self.device(index)?;
        let compute = first_known([
            list::<ProcessInfoV2>(|count, room| {
                call!(self.nvmlDeviceGetComputeRunningProcesses_v3(device, count, room))
            }),
            list::<ProcessInfoV2>(|count, room| {
                call!(self.nvmlDeviceGetComputeRunningProcesses_v2(device, count, room))
            }),
            list::<ProcessInfoV1>(|count, room| {
                call!(self.nvmlDeviceGetComputeRunningProcesses(device, count, room))
            }),
        ])?;
        // Which of them hold memory is all the same here, and a device or driver without such processes need not list them.
        let graphics = first_known([
            list::<ProcessInfoV2>(|count, room| {
                call!(self.nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, room))
            }),
            list::<ProcessInfoV2>(|count, room| {
                call!(self.nvmlDeviceGetGraphicsRunningProcesses_v2(device, count, room))
            }),
            list::<ProcessInfoV1>(|count, room| {
                call!(self.nvmlDeviceGetGraphicsRunningProcesses(device, count, room))
            }),
        ]);
        let shared = first_known([list::<ProcessInfoV2>(|count, room| {
            call!(self.nvmlDeviceGetMPSComputeRunningProcesses_v3(device, count, room))
        })]);
        let mut bytes: BTreeMap<u32, u64> = compute.into_iter().collect();
        for others in [graphics, shared] {
            match others {
                Ok(others) => {
                    for (pid, more) in others {
                        // A process in two lists has one amount.
                        let amount = bytes.entry(pid).or_insert(0);
                        *amount = (*amount).max(more);
                    }
                }
                Err(Status::NOT_SUPPORTED | Status::FUNCTION_NOT_FOUND) => {}
                Err(error) => return Err(error),
            }
        }
        let process = |(pid, bytes)| Process { pid, bytes, busy_nanoseconds: None, instance: None };
        Ok(bytes.into_iter().map(process).collect())
    }

    /// A set of the errors of all devices; `None` where no device reports any.
    pub(crate) fn watch(&self) -> Result<Option<EventSetHandle>> {
        let mut set = 0;
        match call!(self.nvmlEventSetCreate(&raw mut set)) {
            Err(Status::NOT_SUPPORTED | Status::FUNCTION_NOT_FOUND) => return Ok(None),
            other => other?,
        }
        let mut any = false;
        for index in 0..self.count()? {
            let device = self.device(index)?;
            match call!(self.nvmlDeviceRegisterEvents(device, EVENT_XID, set)) {
                Ok(()) => any = true,
                Err(Status::NOT_SUPPORTED | Status::FUNCTION_NOT_FOUND) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(any.then_some(set))
    }

    /// Waits for an error of a device: its index and the Xid; `None` when there was none in time.
    pub(crate) fn wait(&self, set: EventSetHandle, limit: Duration) -> Result<Option<(u32, u32)>> {
        let mut event = EventData::default();
        let milliseconds = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        match call!(self.nvmlEventSetWait_v2(set, &raw mut event, milliseconds)) {
            Err(Status::TIMEOUT) => return Ok(None),
            other => other?,
        }
        if event.kind != EVENT_XID {
            return Ok(None);
        }
        for index in 0..self.count()? {
            if self.device(index) == Ok(event.device) {
                return Ok(Some((index, u32::try_from(event.data).unwrap_or(u32::MAX))));
            }
        }
        Err(Status::NOT_FOUND)
    }
}

/// A process and its bytes, as a version of the calls gives them.
trait Listed: Default + Clone {
    fn listed(&self) -> (u32, u64);
}

/// What the driver does not say counts as nothing.
fn known(bytes: u64) -> u64 {
    if bytes == NOT_AVAILABLE { 0 } else { bytes }
}

impl Listed for ProcessInfoV1 {
    fn listed(&self) -> (u32, u64) {
        (self.pid, known(self.used))
    }
}

impl Listed for ProcessInfoV2 {
    fn listed(&self) -> (u32, u64) {
        (self.pid, known(self.used))
    }
}

type List = Result<Vec<(u32, u64)>>;

/// The first answer of a form that the library has. The later ones are not asked before.
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

/// Asks for a list with as much room as it needs, which may change from one try to the next.
fn list<'a, T: Listed + 'a>(ask: impl Fn(*mut u32, *mut T) -> Result + 'a) -> Asked<'a> {
    const TRIES: usize = 8;
    const FIRST: u32 = 64;
    Box::new(move || {
        let mut room = FIRST;
        for _ in 0..TRIES {
            let mut infos = vec![T::default(); room as usize];
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
