//! The library as monitors use it: loaded by name, called through C, in a process beside others that compute.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libloading::os::unix::Library;
use sluice_kit::processes::Process;
use sluice_kit::wait::eventually;
use sluice_nvml_abi::{
    EVENT_XID, EventData, FABRIC_INFO_V2, FABRIC_INFO_V3, FabricInfo, FabricInfoV2, FabricInfoV3, MEMORY_V2,
    MemoryV1, MemoryV2, NO_INSTANCE, Out, PROCESS_DETAILS_V1, PciInfo, ProcessDetail, ProcessDetails,
    ProcessInfoV1, ProcessInfoV2, ProcessSample, Status, Utilization,
};
// Makes cargo build the library.
use softgpu_device::{Booking, Client, Config, Device, PAGE_BYTES, Use};
use softgpu_nvml as _;

/// `NVML_SUCCESS`.
const SUCCESS: u32 = 0;

struct Nvml(Library);

impl Nvml {
    fn load() -> Nvml {
        let path = std::env::current_exe().unwrap().with_file_name("libsoftgpu_nvml.so");
        // SAFETY: our own library, which has no constructors of its own.
        Nvml(unsafe { Library::open(Some(path), libc::RTLD_NOW | libc::RTLD_LOCAL) }.unwrap())
    }

    /// Looks up a function by its name, with the C types of the header.
    fn entry<F: Copy>(&self, name: &str) -> F {
        // SAFETY: each use names the header's type.
        *unsafe { self.0.get::<F>(name.as_bytes()) }.unwrap_or_else(|error| panic!("{name}: {error}"))
    }
}

macro_rules! nvml {
    ($library:ident.$name:ident($($argument:expr => $type:ty),*)) => {{
        let entry: unsafe extern "C" fn($($type),*) -> u32 = $library.entry(stringify!($name));
        // SAFETY: the arguments have the header's types.
        unsafe { entry($($argument),*) }
    }};
}

macro_rules! ok {
    ($($call:tt)*) => { assert_eq!(nvml!($($call)*), 0, "{}", stringify!($($call)*)) };
}

fn text(buffer: &[c_char]) -> String {
    // SAFETY: the library has written a terminating NUL.
    unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_str().unwrap().to_owned()
}

fn configuration(state: &Path) -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        ("SLUICE_SOFTGPU_STATE", state.display().to_string()),
        ("SLUICE_SOFTGPU_SCALE", "1024".into()),
        ("SLUICE_SOFTGPU_MODEL", "A100-40".into()),
        ("SLUICE_SOFTGPU_DEVICES", "2".into()),
    ])
}

fn open(state: &Path) -> Arc<Device> {
    let variables = configuration(state);
    let config = Config::from_variables(&|name| variables.get(name).map(Into::into)).unwrap();
    Arc::new(Device::open(&config, 0).unwrap())
}

fn state() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("softgpu-nvml-").tempdir_in("/dev/shm").unwrap()
}

/// Runs an ignored test of this file in a process with its own device.
fn child(name: &str, state: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", &format!("nvml::{name}")]);
    command.envs(configuration(state));
    command
}

fn run(name: &str, state: &Path) {
    let status = child(name, state).status().unwrap();
    assert!(status.success(), "{name}: {status}");
}

/// Holds three pages of its heap, and one of the driver's, until it is killed.
#[test]
#[ignore = "a process of its own for the other tests"]
fn holder_process() {
    let device = open(Path::new(&std::env::var("SLUICE_SOFTGPU_STATE").unwrap()));
    let owner = device.attach(Client::Cuda).unwrap();
    owner.context_began();
    let _heap = owner.allocate(3 * PAGE_BYTES, Use::Heap).unwrap();
    let _context = owner.allocate(PAGE_BYTES, Use::Driver).unwrap();
    println!("holding");
    std::io::stdout().flush().unwrap();
    loop {
        owner.launched(1_000_000);
        std::thread::sleep(Duration::from_millis(2));
    }
}

// Promise: Q10
#[test]
fn device_has_the_identity_that_the_driver_reports() {
    run("identity_in_own_process", state().path());
}

#[test]
#[ignore = "a part of device_has_the_identity_that_the_driver_reports"]
fn identity_in_own_process() {
    let nvml = Nvml::load();
    let mut number = 0u32;
    let mut name = [0; 96];
    assert_eq!(nvml!(nvml.nvmlDeviceGetCount_v2(&raw mut number => *mut u32)), Status::UNINITIALIZED.0);
    assert_eq!(nvml!(nvml.nvmlShutdown()), Status::UNINITIALIZED.0);
    assert_eq!(nvml!(nvml.nvmlDeviceGetTemperature()), Status::UNINITIALIZED.0);
    ok!(nvml.nvmlInit_v2());
    ok!(nvml.nvmlInitWithFlags(1 => u32));
    ok!(nvml.nvmlShutdown());
    // The library was initialised twice and shut down once.
    ok!(nvml.nvmlDeviceGetCount_v2(&raw mut number => *mut u32));
    assert_eq!(number, 2);
    let mut version = 0;
    ok!(nvml.nvmlSystemGetCudaDriverVersion_v2(&raw mut version => *mut i32));
    assert_eq!(version, 13050);

    let (mut device, mut other) = (0usize, 0usize);
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(1 => u32, &raw mut device => *mut usize));
    assert_eq!(
        nvml!(nvml.nvmlDeviceGetHandleByIndex_v2(2 => u32, &raw mut other => *mut usize)),
        Status::INVALID_ARGUMENT.0
    );
    ok!(nvml.nvmlDeviceGetName(device => usize, name.as_mut_ptr() => *mut c_char, 96 => u32));
    assert_eq!(text(&name), "NVIDIA A100-SXM4-40GB");
    assert_eq!(
        nvml!(nvml.nvmlDeviceGetName(device => usize, name.as_mut_ptr() => *mut c_char, 4 => u32)),
        Status::INSUFFICIENT_SIZE.0
    );
    let mut uuid = [0; 96];
    ok!(nvml.nvmlDeviceGetUUID(device => usize, uuid.as_mut_ptr() => *mut c_char, 96 => u32));
    assert!(text(&uuid).starts_with("GPU-") && text(&uuid).len() == 40, "{}", text(&uuid));
    ok!(nvml.nvmlDeviceGetHandleByUUID(uuid.as_ptr() => *const c_char, &raw mut other => *mut usize));
    assert_eq!(other, device);
    // SAFETY: plain data.
    let mut pci: PciInfo = unsafe { std::mem::zeroed() };
    ok!(nvml.nvmlDeviceGetPciInfo_v2(device => usize, &raw mut pci => *mut PciInfo));
    assert_eq!(
        (text(&pci.bus_id_legacy).as_str(), pci.bus_id[0]),
        ("0000:02:00.0", 0),
        "nothing is written after the old form"
    );
    ok!(nvml.nvmlDeviceGetPciInfo_v3(device => usize, &raw mut pci => *mut PciInfo));
    assert_eq!((text(&pci.bus_id).as_str(), pci.bus), ("00000000:02:00.0", 2));
    for bus_id in [c"00000000:02:00.0", c"0000:02:00.0", c"02:00"] {
        ok!(nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.as_ptr() => *const c_char, &raw mut other => *mut usize));
        assert_eq!(other, device);
    }
    assert_eq!(
        nvml!(nvml.nvmlDeviceGetHandleByPciBusId_v2(c"09:00.0".as_ptr() => *const c_char, &raw mut other => *mut usize)),
        Status::NOT_FOUND.0
    );
    ok!(nvml.nvmlDeviceGetNumGpuCores(device => usize, &raw mut number => *mut u32));
    assert_eq!(number, 108 * 64);
    let (mut current, mut pending) = (9, 9);
    ok!(nvml.nvmlDeviceGetMigMode(device => usize, &raw mut current => *mut u32, &raw mut pending => *mut u32));
    assert_eq!((current, pending), (0, 0));

    // Calls without a meaning here return no made-up value.
    for name in [
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetFanSpeed",
        "nvmlDeviceGetClockInfo",
    ] {
        let entry: unsafe extern "C" fn(usize, u32, *mut u32) -> u32 = nvml.entry(name);
        number = 77;
        // SAFETY: these functions take a handle and at most two further arguments.
        assert_eq!(unsafe { entry(device, 0, &raw mut number) }, Status::NOT_SUPPORTED.0, "{name}");
        assert_eq!(number, 77, "{name} has written something");
    }
    ok!(nvml.nvmlShutdown());
    assert_eq!(nvml!(nvml.nvmlDeviceGetCount_v2(&raw mut number => *mut u32)), Status::UNINITIALIZED.0);
}

// Promise: C142
#[test]
fn fabric_of_a_device_is_absent_since_9_0_and_unsupported_before() {
    for (model, expected) in [("A100-40", Status::NOT_SUPPORTED.0), ("H200-141", SUCCESS)] {
        let state = state();
        let mut process = child("fabric_in_own_process", state.path());
        process.env("SLUICE_SOFTGPU_MODEL", model).env("EXPECTED_STATUS", expected.to_string());
        let status = process.status().unwrap();
        assert!(status.success(), "{model}: {status}");
    }
}

#[test]
#[ignore = "a part of fabric_of_a_device_is_absent_since_9_0_and_unsupported_before"]
fn fabric_in_own_process() {
    let expected: u32 = std::env::var("EXPECTED_STATUS").unwrap().parse().unwrap();
    let nvml = Nvml::load();
    ok!(nvml.nvmlInit_v2());
    let mut device = 0usize;
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(0 => u32, &raw mut device => *mut usize));
    let other = FabricInfo { cluster: [1; 16], status: 1, clique: 1, state: 3 };
    let absent = if expected == SUCCESS { FabricInfo::default() } else { other };
    let health = if expected == SUCCESS { 0 } else { 7 };

    let mut info = other;
    assert_eq!(
        nvml!(nvml.nvmlDeviceGetGpuFabricInfo(device => usize, &raw mut info => *mut FabricInfo)),
        expected
    );
    assert_eq!(info, absent);
    let mut second = FabricInfoV2 { version: FABRIC_INFO_V2, info: other, health: 7 };
    assert_eq!(
        nvml!(nvml.nvmlDeviceGetGpuFabricInfoV(device => usize, &raw mut second => *mut FabricInfoV2)),
        expected
    );
    assert_eq!(second, FabricInfoV2 { version: FABRIC_INFO_V2, info: absent, health });
    let mut third =
        FabricInfoV3 { info: FabricInfoV2 { version: FABRIC_INFO_V3, info: other, health: 7 }, summary: 7 };
    assert_eq!(
        nvml!(nvml.nvmlDeviceGetGpuFabricInfoV(device => usize, &raw mut third => *mut FabricInfoV3)),
        expected
    );
    let read = (third.info.version, third.info.info, third.info.health, u32::from(third.summary));
    assert_eq!(read, (FABRIC_INFO_V3, absent, health, health));
    if expected == SUCCESS {
        let mut fourth = FabricInfoV2 { version: 4, info: other, health: 0 };
        assert_eq!(
            nvml!(nvml.nvmlDeviceGetGpuFabricInfoV(device => usize, &raw mut fourth => *mut FabricInfoV2)),
            Status::ARGUMENT_VERSION_MISMATCH.0
        );
    }
}

// Promise: Q10
#[test]
fn memory_and_processes_match_the_device() {
    run("accounts_in_own_process", state().path());
}

#[test]
#[ignore = "a part of memory_and_processes_match_the_device"]
fn accounts_in_own_process() {
    let state = std::env::var("SLUICE_SOFTGPU_STATE").unwrap();
    let nvml = Nvml::load();
    ok!(nvml.nvmlInit_v2());
    let mut device = 0usize;
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(0 => u32, &raw mut device => *mut usize));
    let memory = || {
        let (mut old, mut new) = (MemoryV1::default(), MemoryV2::default());
        ok!(nvml.nvmlDeviceGetMemoryInfo(device => usize, &raw mut old => *mut MemoryV1));
        assert_eq!(
            nvml!(nvml.nvmlDeviceGetMemoryInfo_v2(device => usize, &raw mut new => *mut MemoryV2)),
            Status::ARGUMENT_VERSION_MISMATCH.0
        );
        new.version = MEMORY_V2;
        ok!(nvml.nvmlDeviceGetMemoryInfo_v2(device => usize, &raw mut new => *mut MemoryV2));
        assert_eq!((old.total, old.free, old.used), (new.total, new.free, new.used));
        assert_eq!(old.total, old.free + old.used);
        old.used
    };
    let processes = || {
        let mut count = 0u32;
        let status = nvml!(nvml.nvmlDeviceGetComputeRunningProcesses_v3(
            device => usize, &raw mut count => *mut u32, std::ptr::null_mut() => *mut ProcessInfoV2));
        assert_eq!(status, if count == 0 { 0 } else { Status::INSUFFICIENT_SIZE.0 });
        let mut new = [ProcessInfoV2::default(); 8];
        let mut old = [ProcessInfoV1::default(); 8];
        let mut details = [ProcessDetail::default(); 8];
        count = 8;
        ok!(nvml.nvmlDeviceGetComputeRunningProcesses_v3(
            device => usize, &raw mut count => *mut u32, new.as_mut_ptr() => *mut ProcessInfoV2));
        let count = count as usize;
        let mut room = 8u32;
        ok!(nvml.nvmlDeviceGetComputeRunningProcesses(
            device => usize, &raw mut room => *mut u32, old.as_mut_ptr() => *mut ProcessInfoV1));
        // SAFETY: the array has the room that the structure states, and outlives the call.
        let entries = unsafe { Out::new(details.as_mut_ptr()) };
        let mut list = ProcessDetails { version: PROCESS_DETAILS_V1, mode: 0, count: 8, entries };
        ok!(nvml.nvmlDeviceGetRunningProcessDetailList(device => usize, &raw mut list => *mut ProcessDetails));
        assert_eq!((room as usize, list.count as usize), (count, count));
        for index in 0..count {
            assert_eq!(new[index].gpu_instance, NO_INSTANCE);
            assert_eq!((new[index].pid, new[index].used), (old[index].pid, old[index].used));
            assert_eq!((new[index].pid, new[index].used), (details[index].pid, details[index].used));
        }
        let mut graphics = 8u32;
        ok!(nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(
            device => usize, &raw mut graphics => *mut u32, new.as_mut_ptr() => *mut ProcessInfoV2));
        assert_eq!(graphics, 0);
        old[..count].iter().map(|process| (process.pid, process.used)).collect::<BTreeMap<_, _>>()
    };
    assert_eq!((memory(), processes()), (0, BTreeMap::new()), "this process only observes");

    let holder = Process::holding(&mut child("holder_process", Path::new(&state)));
    let pid = holder.0.id();
    assert_eq!(memory(), 4 * PAGE_BYTES);
    assert_eq!(processes(), BTreeMap::from([(pid, 4 * PAGE_BYTES)]));

    // Kernels of this process run, and no others.
    let mut samples = [ProcessSample::default(); 8];
    eventually("the process computes", || {
        let mut count = 8u32;
        let status = nvml!(nvml.nvmlDeviceGetProcessUtilization(
            device => usize, samples.as_mut_ptr() => *mut ProcessSample, &raw mut count => *mut u32, 0 => u64));
        assert!(status == Status::NOT_FOUND.0 || (status, count) == (0, 1), "{status}, {count} processes");
        status == 0
    });
    assert_eq!(samples[0].pid, pid);
    eventually("the device computes", || {
        let mut utilization = Utilization::default();
        ok!(nvml.nvmlDeviceGetUtilizationRates(device => usize, &raw mut utilization => *mut Utilization));
        assert!(utilization.gpu <= 100, "{utilization:?}");
        utilization.gpu > 0
    });

    drop(holder);
    assert_eq!((memory(), processes()), (0, BTreeMap::new()), "the killed process is gone");
}

// Promise: Q10
#[test]
fn imported_chunk_is_booked_to_its_maker_or_as_configured() {
    const CHUNK: u64 = 2 * PAGE_BYTES;
    let state = state();
    let (maker, importer) =
        (open(state.path()).attach(Client::Cuda).unwrap(), open(state.path()).attach(Client::Cuda).unwrap());
    let chunk = maker.allocate(CHUNK, Use::Chunk).unwrap();
    let device = open(state.path());
    let booked = |booking| {
        let held = device.processes().into_iter().map(|process| process.held.booked(booking));
        let mut held: Vec<_> = held.collect();
        held.sort_unstable();
        held
    };
    for booking in [Booking::Owner, Booking::Importer, Booking::Both] {
        assert_eq!(booked(booking), [0, CHUNK], "{booking:?} without an importer");
    }
    let imported = importer.import(chunk.export().unwrap()).unwrap();
    assert_eq!(booked(Booking::Owner), [0, CHUNK]);
    assert_eq!(booked(Booking::Importer), [0, CHUNK]);
    assert_eq!(booked(Booking::Both), [CHUNK, CHUNK]);
    assert_eq!(booked(Booking::Nowhere), [0, 0]);
    drop(chunk);
    assert_eq!(booked(Booking::Owner), [0, 0], "the maker has released the chunk");
    assert_eq!(booked(Booking::Importer), [0, CHUNK]);
    drop(imported);
    drop(maker);
    // The next owner of the slot is not the maker of the last owner's chunks.
    let next = open(state.path()).attach(Client::Cuda).unwrap();
    assert_eq!(booked(Booking::Owner), [0, 0]);
    drop(next);
}

/// In milliseconds: longer than a busy machine delays a thread.
const MINUTE: u32 = 60_000;

#[test]
fn appended_xid_wakes_a_waiting_event_set() {
    run("errors_in_own_process", state().path());
}

#[test]
#[ignore = "a part of appended_xid_wakes_a_waiting_event_set"]
fn errors_in_own_process() {
    let state = std::env::var("SLUICE_SOFTGPU_STATE").unwrap();
    let nvml = Nvml::load();
    ok!(nvml.nvmlInit_v2());
    let (mut device, mut set, mut kinds) = (0usize, 0usize, 0u64);
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(1 => u32, &raw mut device => *mut usize));
    ok!(nvml.nvmlDeviceGetSupportedEventTypes(device => usize, &raw mut kinds => *mut u64));
    assert_eq!(kinds, EVENT_XID);
    ok!(nvml.nvmlEventSetCreate(&raw mut set => *mut usize));
    let register = |kinds| nvml!(nvml.nvmlDeviceRegisterEvents(device => usize, kinds => u64, set => usize));
    assert_eq!(register(u64::MAX), Status::NOT_SUPPORTED.0);
    assert_eq!(register(kinds), 0);
    let wait = |milliseconds| {
        let mut event = EventData::default();
        let status = nvml!(nvml.nvmlEventSetWait_v2(
            set => usize, &raw mut event => *mut EventData, milliseconds => u32));
        (status, event.device, event.kind, event.data)
    };
    let start = Instant::now();
    assert_eq!(wait(50).0, Status::TIMEOUT.0);
    assert!(start.elapsed() >= Duration::from_millis(50));

    let file = Path::new(&state).join("gpu1/xid");
    let inject = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        let mut file = std::fs::OpenOptions::new().append(true).open(file).unwrap();
        file.write_all(b"31\n79").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        file.write_all(b"\n").unwrap();
    });
    assert_eq!(wait(MINUTE), (0, device, EVENT_XID, 31));
    assert_eq!(wait(MINUTE), (0, device, EVENT_XID, 79), "the error is reported once its line is complete");
    assert_eq!(wait(0).0, Status::TIMEOUT.0);
    inject.join().unwrap();
    ok!(nvml.nvmlEventSetFree(set => usize));
    assert_eq!(wait(0).0, Status::INVALID_ARGUMENT.0);
}

/// A forked child does not use its parent's devices: it initialises anew, or gets an error that it must.
#[test]
fn forked_child_initialises_anew() {
    run("forked_in_own_process", state().path());
}

#[test]
#[ignore = "a part of forked_child_initialises_anew"]
fn forked_in_own_process() {
    let nvml = Nvml::load();
    ok!(nvml.nvmlInit_v2());
    let mut count = 0u32;
    ok!(nvml.nvmlDeviceGetCount_v2(&raw mut count => *mut u32));
    // SAFETY: the child calls the library, whose locks are free, and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let before = nvml!(nvml.nvmlDeviceGetCount_v2(&raw mut count => *mut u32));
        let started = nvml!(nvml.nvmlInit_v2());
        let after = nvml!(nvml.nvmlDeviceGetCount_v2(&raw mut count => *mut u32));
        let right = (before, started, after) == (Status::UNINITIALIZED.0, 0, 0) && count == 2;
        // SAFETY: ends the child without its parent's handlers.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = 0;
    // SAFETY: the process is our child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    ok!(nvml.nvmlDeviceGetCount_v2(&raw mut count => *mut u32));
    ok!(nvml.nvmlShutdown());
}
