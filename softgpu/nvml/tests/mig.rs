//! Instances seen by management tools: through the `nvml-wrapper` bindings, on every model.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::*;
use sluice_kit::processes::Process;
// Makes cargo build the libraries.
use softgpu_cuda as _;
use softgpu_device::{Geometry, MODELS, Model, PAGE_BYTES, Profile};
use softgpu_nvml as _;

const SCALE: u64 = 256;

fn state() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("softgpu-mig-").tempdir_in("/dev/shm").unwrap()
}

/// Runs an ignored test of this file in a process with its own devices of a model, already divided.
fn child(name: &str, state: &Path, model: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", &format!("mig::{name}")]);
    command
        .env("SLUICE_SOFTGPU_STATE", state)
        .env("SLUICE_SOFTGPU_SCALE", SCALE.to_string())
        .env("SLUICE_SOFTGPU_MODEL", model)
        .env("SLUICE_SOFTGPU_MIG", "1")
        .env("SLUICE_SOFTGPU_ECC", "1")
        .env("SLUICE_SOFTGPU_NODES", "1");
    command
}

fn run(name: &str, model: &str) {
    let state = state();
    let status = child(name, state.path(), model).status().unwrap();
    assert!(status.success(), "{name} on {model}: {status}");
}

fn place() -> PathBuf {
    std::env::var_os("SLUICE_SOFTGPU_STATE").unwrap().into()
}

fn geometry() -> &'static Geometry {
    let model = Model::find(&std::env::var("SLUICE_SOFTGPU_MODEL").unwrap()).unwrap();
    model.division.and_then(Geometry::find).unwrap()
}

fn nvml() -> Nvml {
    let path = std::env::current_exe().unwrap().with_file_name("libsoftgpu_nvml.so");
    Nvml::builder().lib_path(path.as_os_str()).init().unwrap()
}

/// Calls a function for which the wrapper has no method.
macro_rules! sys {
    ($nvml:ident.$name:ident($($argument:expr),* $(,)?)) => {{
        let entry = $nvml.lib().$name.as_ref().unwrap();
        // SAFETY: the arguments have the header's types, and pointers live through the call.
        unsafe { entry($($argument),*) }
    }};
}

fn handle(device: &Device<'_>) -> nvmlDevice_t {
    // SAFETY: the handle is used while the library is loaded.
    unsafe { device.handle() }
}

fn places(nvml: &Nvml, device: nvmlDevice_t, profile: u32) -> Vec<(u32, u32)> {
    let mut list = [nvmlGpuInstancePlacement_t { start: 0, size: 0 }; 16];
    let mut count = 0;
    let code = sys!(nvml.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device,
        profile,
        list.as_mut_ptr(),
        &raw mut count
    ));
    assert_eq!(code, 0);
    list[..count as usize].iter().map(|place| (place.start, place.size)).collect()
}

fn capacity(nvml: &Nvml, device: nvmlDevice_t, profile: u32) -> u32 {
    let mut count = 99;
    assert_eq!(sys!(nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, profile, &raw mut count)), 0);
    count
}

fn create(
    nvml: &Nvml,
    device: nvmlDevice_t,
    profile: u32,
    start: u32,
    size: u32,
) -> Result<nvmlGpuInstance_t, u32> {
    let (place, mut made) = (nvmlGpuInstancePlacement_t { start, size }, std::ptr::null_mut());
    match sys!(nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
        device,
        profile,
        &raw const place,
        &raw mut made
    )) {
        0 => Ok(made),
        code => Err(code),
    }
}

/// Creates the compute instance that fills a GPU instance.
fn fill(nvml: &Nvml, instance: nvmlGpuInstance_t, profile: &Profile) -> nvmlComputeInstance_t {
    for index in 0.. {
        // SAFETY: plain data.
        let mut info: nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        match sys!(nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, index, 0, &raw mut info)) {
            0 if info.multiprocessorCount == profile.multiprocessors => {
                let mut made = std::ptr::null_mut();
                assert_eq!(info.sliceCount, profile.slices);
                assert_eq!(
                    sys!(nvml.nvmlGpuInstanceCreateComputeInstance(instance, info.id, &raw mut made)),
                    0
                );
                return made;
            }
            0 | 3 => {}
            code => panic!("no compute instance fills {}: {code}", profile.name),
        }
    }
    unreachable!()
}

fn text(buffer: &[std::ffi::c_char]) -> String {
    buffer.iter().take_while(|byte| **byte != 0).map(|byte| char::from(byte.cast_unsigned())).collect()
}

// Promise: P40, S62
#[test]
fn every_model_divides_according_to_its_table() {
    for model in MODELS.iter().filter(|model| model.division.is_some()) {
        run("table_in_own_process", model.key);
    }
}

#[test]
#[ignore = "a part of every_model_divides_according_to_its_table"]
fn table_in_own_process() {
    let (nvml, geometry) = (nvml(), geometry());
    let device = nvml.device_by_index(0).unwrap();
    let raw = handle(&device);
    let mode = device.mig_mode().unwrap();
    assert_eq!((mode.current, mode.pending), (1, 1));
    assert_eq!(device.mig_device_count().unwrap(), geometry.compute_slices);
    let mut found = 0;
    for index in 0..NVML_GPU_INSTANCE_PROFILE_COUNT {
        let Some(profile) = geometry.profiles.iter().find(|profile| profile.index == index) else {
            assert!(matches!(device.profile_info(index), Err(NvmlError::NotSupported)), "{index}");
            continue;
        };
        found += 1;
        let name = &profile.name;
        let info = device.profile_info(index).unwrap();
        assert_eq!(
            (info.id, info.slice_count, info.instance_count, info.multiprocessor_count),
            (profile.id, profile.slices, profile.instances, profile.multiprocessors),
            "{name}"
        );
        assert_eq!(
            [info.copy_engine_count, info.decoder_count, info.encoder_count, info.jpeg_count, info.ofa_count],
            profile.engines,
            "{name}"
        );
        assert_eq!(info.memory_size_mb, profile.memory_mib / SCALE / 2 * 2, "{name}");
        // SAFETY: plain data.
        let mut named: nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        named.version = 0x200_0098;
        assert_eq!(sys!(nvml.nvmlDeviceGetGpuInstanceProfileInfoV(raw, index, &raw mut named)), 0);
        assert_eq!(
            (text(&named.name), named.id, named.memorySizeMB),
            (name.clone(), info.id, info.memory_size_mb)
        );
        // SAFETY: plain data.
        let mut newest: nvmlGpuInstanceProfileInfo_v3_t = unsafe { std::mem::zeroed() };
        newest.version = 0x300_0098;
        let place = (&raw mut newest).cast();
        assert_eq!(sys!(nvml.nvmlDeviceGetGpuInstanceProfileInfoByIdV(raw, info.id, place)), 0);
        assert_eq!((text(&newest.name), newest.sliceCount), (name.clone(), profile.slices));
        named.version = 7;
        assert_eq!(sys!(nvml.nvmlDeviceGetGpuInstanceProfileInfoV(raw, index, &raw mut named)), 25);
        let starts: Vec<_> = profile.starts.iter().map(|start| (*start, profile.size)).collect();
        assert_eq!(places(&nvml, raw, profile.id), starts, "{name}");
        assert_eq!(capacity(&nvml, raw, profile.id), profile.instances, "{name}");
    }
    assert_eq!(found, geometry.profiles.len());
    assert!(matches!(device.profile_info(NVML_GPU_INSTANCE_PROFILE_COUNT), Err(NvmlError::InvalidArg)));
}

// Promise: P40
#[test]
fn instance_is_created_and_destroyed_in_two_steps() {
    for model in ["A100-40", "H100-80", "H200-141", "A30-24"] {
        run("life_in_own_process", model);
    }
}

/// A process with a context and three pages of memory on a device.
fn holder(uuid: &str) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "mig::holds_memory"]);
    Process::holding(command.env("CUDA_VISIBLE_DEVICES", uuid))
}

#[test]
#[ignore = "a process of its own for the other tests"]
fn holds_memory() {
    use libloading::os::unix::Library;
    let path = std::env::current_exe().unwrap().with_file_name("libsoftgpu_cuda.so");
    // SAFETY: the library is the software driver.
    let driver = unsafe { Library::open(Some(path), libc::RTLD_NOW) }.unwrap();
    macro_rules! cuda {
        ($name:ident($($argument:expr => $type:ty),*)) => {{
            // SAFETY: the signature is the header's.
            let entry = unsafe { driver.get::<unsafe extern "C" fn($($type),*) -> u32>(stringify!($name).as_bytes()) };
            // SAFETY: the arguments have the header's types.
            assert_eq!(unsafe { (*entry.unwrap())($($argument),*) }, 0, stringify!($name));
        }};
    }
    let (mut context, mut address) = (0u64, 0u64);
    cuda!(cuInit(0 => u32));
    cuda!(cuCtxCreate_v2(&raw mut context => *mut u64, 0 => u32, 0 => i32));
    cuda!(cuMemAlloc_v2(&raw mut address => *mut u64, 3 * PAGE_BYTES => u64));
    println!("holding");
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

#[test]
#[ignore = "a part of instance_is_created_and_destroyed_in_two_steps"]
fn life_in_own_process() {
    let (nvml, geometry) = (nvml(), geometry());
    let device = nvml.device_by_index(0).unwrap();
    let raw = handle(&device);
    let whole = device.memory_info().unwrap();
    for profile in geometry.profiles.iter().filter(|profile| profile.memory_mib / SCALE >= 16) {
        let start = *profile.starts.last().unwrap();
        let instance = create(&nvml, raw, profile.id, start, profile.size).unwrap();
        assert_eq!(create(&nvml, raw, profile.id, start, profile.size), Err(23), "the position is occupied");
        assert_eq!(create(&nvml, raw, profile.id, 99, profile.size), Err(2));
        assert_eq!(create(&nvml, raw, profile.id, start, profile.size + 1), Err(2));
        // A GPU instance alone is not yet a device for programs.
        assert!(matches!(device.mig_device_by_index(0), Err(NvmlError::NotFound)));
        // SAFETY: plain data.
        let mut info: nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
        assert_eq!(sys!(nvml.nvmlGpuInstanceGetInfo(instance, &raw mut info)), 0);
        assert_eq!((info.device, info.profileId), (raw, profile.id));
        assert_eq!((info.placement.start, info.placement.size), (start, profile.size));
        let (mut list, mut count) = ([std::ptr::null_mut(); 8], 0);
        let listed = sys!(nvml.nvmlDeviceGetGpuInstances(raw, profile.id, list.as_mut_ptr(), &raw mut count));
        assert_eq!((listed, count, list[0]), (0, 1, instance));
        let mut same = std::ptr::null_mut();
        assert_eq!(sys!(nvml.nvmlDeviceGetGpuInstanceById(raw, info.id, &raw mut same)), 0);
        assert_eq!(same, instance);
        assert_eq!(sys!(nvml.nvmlDeviceGetGpuInstanceById(raw, 77, &raw mut same)), 6);

        let compute = fill(&nvml, instance, profile);
        let part = device.mig_device_by_index(0).unwrap();
        assert!(part.mig_is_mig_device_handle().unwrap() && !device.mig_is_mig_device_handle().unwrap());
        assert_eq!(handle(&part.mig_parent_device().unwrap()), raw);
        assert_eq!(part.name().unwrap(), format!("{} MIG {}", device.name().unwrap(), profile.name));
        let uuid = part.uuid().unwrap();
        assert!(uuid.starts_with("MIG-") && uuid.len() == 40, "{uuid}");
        assert_eq!(handle(&nvml.device_by_uuid(uuid.as_str()).unwrap()), handle(&part));
        let (mut gpu, mut inner) = (99, 99);
        assert_eq!(sys!(nvml.nvmlDeviceGetGpuInstanceId(handle(&part), &raw mut gpu)), 0);
        assert_eq!(sys!(nvml.nvmlDeviceGetComputeInstanceId(handle(&part), &raw mut inner)), 0);
        assert_eq!((gpu, inner), (info.id, 0));
        let memory = part.memory_info().unwrap();
        assert_eq!((memory.total, memory.used), (profile.memory_mib / SCALE / 2 * PAGE_BYTES, 0));
        let attributes = part.attributes().unwrap();
        assert_eq!(
            (attributes.multiprocessor_count, attributes.gpu_instance_slice_count, attributes.memory_size_mb),
            (profile.multiprocessors, profile.slices, memory.total >> 20)
        );

        let holder = holder(&uuid);
        let used = part.memory_info().unwrap().used;
        assert!(used >= 3 * PAGE_BYTES, "{used}");
        let now = device.memory_info().unwrap();
        assert_eq!((now.total, now.used), (whole.total, used), "the board reports all memory");
        for seen in [&part, &device] {
            let processes = seen.running_compute_processes().unwrap();
            assert_eq!(processes.len(), 1);
            assert_eq!((processes[0].pid, processes[0].gpu_instance_id), (holder.0.id(), Some(gpu)));
            assert!(matches!(processes[0].used_gpu_memory, UsedGpuMemory::Used(bytes) if bytes == used));
        }
        // Instances in use stay, in any order of destruction.
        assert_eq!(sys!(nvml.nvmlGpuInstanceDestroy(instance)), 19);
        assert_eq!(sys!(nvml.nvmlComputeInstanceDestroy(compute)), 19);
        assert_eq!(device.set_mig_mode(false).unwrap(), 19);
        drop(holder);
        assert_eq!(sys!(nvml.nvmlGpuInstanceDestroy(instance)), 19, "it contains a compute instance");
        assert_eq!(sys!(nvml.nvmlComputeInstanceDestroy(compute)), 0);
        assert!(matches!(part.memory_info(), Err(NvmlError::InvalidArg)));
        assert_eq!(sys!(nvml.nvmlGpuInstanceDestroy(instance)), 0);
        assert_eq!(sys!(nvml.nvmlGpuInstanceDestroy(instance)), 2, "its handle is stale");
    }
    assert_eq!(device.set_mig_mode(false).unwrap(), 0);
    let first = &geometry.profiles[0];
    assert_eq!(create(&nvml, raw, first.id, first.starts[0], first.size), Err(3));
    assert_eq!(device.mig_device_count().unwrap(), 0);
}

// Promise: P40
#[test]
fn every_configuration_of_hopper_can_be_created() {
    run("configurations_in_own_process", "H100-80");
}

/// Creates all placed configurations, each once, by adding one instance at a time, and compares the remaining capacity with a
/// count by hand.
#[test]
#[ignore = "a part of every_configuration_of_hopper_can_be_created"]
fn configurations_in_own_process() {
    struct Walk<'a> {
        nvml: &'a Nvml,
        device: nvmlDevice_t,
        all: Vec<(&'a Profile, u32)>,
        seen: usize,
    }
    impl Walk<'_> {
        fn from(&mut self, first: usize, placed: &mut Vec<(u32, u32, u32, u32)>) {
            self.seen += 1;
            for (index, (profile, start)) in self.all.clone().into_iter().enumerate() {
                let apart = |(other, size, _, _): &(u32, u32, u32, u32)| {
                    other + size <= start || start + profile.size <= *other
                };
                let slices: u32 = placed.iter().map(|(_, _, slices, _)| slices).sum();
                let same = placed.iter().filter(|(_, _, _, id)| *id == profile.id).count();
                let fits = placed.iter().all(apart)
                    && slices + profile.slices <= 7
                    && same < profile.instances as usize;
                if !fits {
                    let refused = create(self.nvml, self.device, profile.id, start, profile.size);
                    assert_eq!(refused, Err(23), "{} at {start} beside {placed:?}", profile.name);
                } else if index >= first {
                    assert!(capacity(self.nvml, self.device, profile.id) > 0);
                    let made = create(self.nvml, self.device, profile.id, start, profile.size).unwrap();
                    placed.push((start, profile.size, profile.slices, profile.id));
                    self.from(index + 1, placed);
                    placed.pop();
                    let nvml = self.nvml;
                    assert_eq!(sys!(nvml.nvmlGpuInstanceDestroy(made)), 0);
                }
            }
        }
    }
    let (nvml, geometry) = (nvml(), geometry());
    let device = handle(&nvml.device_by_index(0).unwrap());
    let plain = geometry.profiles.iter().filter(|profile| !profile.name.contains("+me"));
    let all = plain.flat_map(|profile| profile.starts.iter().map(move |start| (profile, *start))).collect();
    let mut walk = Walk { nvml: &nvml, device, all, seen: 0 };
    walk.from(0, &mut Vec::new());
    assert_eq!(walk.seen, 723);
}

#[test]
fn model_without_mig_reports_no_instances() {
    run("indivisible_in_own_process", "A10-24");
}

#[test]
#[ignore = "a part of model_without_mig_reports_no_instances"]
fn indivisible_in_own_process() {
    // The configuration requests MIG for a model without it.
    let path = std::env::current_exe().unwrap().with_file_name("libsoftgpu_nvml.so");
    assert!(Nvml::builder().lib_path(path.as_os_str()).init().is_err());
    // SAFETY: no other thread reads the environment.
    unsafe { std::env::remove_var("SLUICE_SOFTGPU_MIG") };
    let nvml = nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(device.set_mig_mode(true), Err(NvmlError::NotSupported)));
    assert!(matches!(device.profile_info(0), Err(NvmlError::NotSupported)));
    assert!(matches!(device.mig_device_by_index(0), Err(NvmlError::NotFound)));
    assert_eq!(device.mig_device_count().unwrap(), 0);
}

// Promise: P43
#[test]
fn injected_faults_and_health_are_reported() {
    run("faults_in_own_process", "H200-141");
}

#[test]
#[ignore = "a part of injected_faults_and_health_are_reported"]
fn faults_in_own_process() {
    let (nvml, place) = (nvml(), place());
    let device = nvml.device_by_index(0).unwrap();
    let raw = handle(&device);
    let instance = create(&nvml, raw, 19, 0, 1).unwrap();

    std::fs::write(place.join("faults"), "fail nvmlGpuInstanceDestroy 19\n").unwrap();
    assert_eq!(sys!(nvml.nvmlGpuInstanceDestroy(instance)), 19);
    std::fs::write(place.join("faults"), "hang nvmlGpuInstanceDestroy\n").unwrap();
    let ends = place.join("faults");
    let start = Instant::now();
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        std::fs::remove_file(ends).unwrap();
    });
    assert_eq!(nvml.device_count().unwrap(), 1, "other calls continue");
    assert_eq!(sys!(nvml.nvmlGpuInstanceDestroy(instance)), 0);
    assert!(start.elapsed() >= Duration::from_millis(200));
    release.join().unwrap();

    let recovery = || {
        let fields = device.field_values_for(&[FieldId(230), FieldId(1)]).unwrap();
        assert!(fields[1].as_ref().unwrap().value.is_err(), "an unknown value is not made up");
        format!("{:?}", fields[0].as_ref().unwrap().value)
    };
    let errors = || device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).unwrap();
    assert!(device.is_ecc_enabled().unwrap().currently_enabled);
    assert_eq!((errors(), device.are_pages_pending_retired().unwrap()), (0, false));
    let well = recovery();
    std::fs::write(place.join("gpu0/health"), "uncorrected 3\npending 1\nrecovery 4\nremapped 1 2\n")
        .unwrap();
    assert_eq!((errors(), device.are_pages_pending_retired().unwrap()), (3, true));
    assert!(well.contains('0') && recovery().contains('4'), "{well} {}", recovery());
    let (mut corrected, mut uncorrected, mut pending, mut failed) = (9, 9, 9, 9);
    let code = sys!(nvml.nvmlDeviceGetRemappedRows(
        raw,
        &raw mut corrected,
        &raw mut uncorrected,
        &raw mut pending,
        &raw mut failed
    ));
    assert_eq!((code, corrected, uncorrected, pending, failed), (0, 1, 2, 1, 0));
    let mut nodes = [9u64; 2];
    assert_eq!(sys!(nvml.nvmlDeviceGetMemoryAffinity(raw, 2, nodes.as_mut_ptr(), 0)), 0);
    assert_eq!(nodes, [2, 0], "near node 1");

    // An error in an instance reports its instance.
    let set = nvml.create_event_set().unwrap();
    let set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set).unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).open(place.join("gpu0/xid")).unwrap();
    file.write_all(b"31 7 0\n79\n").unwrap();
    // SAFETY: the set stays alive.
    let set = unsafe { set.handle() };
    // SAFETY: plain data.
    let mut event: nvmlEventData_t = unsafe { std::mem::zeroed() };
    for expected in [(31, 7, 0), (79, u32::MAX, u32::MAX)] {
        assert_eq!(sys!(nvml.nvmlEventSetWait_v2(set, &raw mut event, 60_000)), 0);
        assert_eq!((event.eventData, event.gpuInstanceId, event.computeInstanceId), expected);
    }
}
