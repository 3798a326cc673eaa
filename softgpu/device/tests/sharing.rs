//! Several processes on one device: the header must stay consistent if any process is killed at any point.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_kit::wait::eventually;
use softgpu_device::{Allocation, Client, Config, Device, Held, ImportError, Owner, PAGE_BYTES, Run, Use};

fn open(state: &Path) -> Arc<Device> {
    open_nth(state, 0)
}

fn open_nth(state: &Path, index: u32) -> Arc<Device> {
    let state = state.to_owned();
    let config = Config::from_variables(&|name| match name {
        "SLUICE_SOFTGPU_STATE" => Some(state.clone().into()),
        "SLUICE_SOFTGPU_SCALE" => Some("2048".into()),
        _ => None,
    })
    .unwrap();
    Arc::new(Device::open(&config, index).unwrap())
}

fn attach(state: &Path) -> Arc<Owner> {
    open(state).attach(Client::Cuda).unwrap()
}

fn state() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("softgpu-test-").tempdir_in("/dev/shm").unwrap()
}

/// Waits until this many bytes are in use: a process that another test starts has copies of exports until its exec.
fn wait_for_use(device: &Device, bytes: u64) {
    eventually(&format!("{bytes} bytes are in use"), || {
        device.collect();
        device.used_bytes() == bytes
    });
}

fn pages(runs: &[Run]) -> Vec<u64> {
    runs.iter().flat_map(|run| run.first..run.first + run.count).collect()
}

#[test]
fn pages_belong_to_one_allocation_at_a_time_and_are_returned() {
    let state = state();
    let owner = attach(state.path());
    let device = owner.device();
    let total = device.total_bytes();
    assert_eq!(device.free_bytes(), total);
    let allocations: Vec<_> =
        (1..=4).map(|count| owner.allocate(count * PAGE_BYTES, Use::Chunk).unwrap()).collect();
    let mut seen = HashSet::new();
    for allocation in &allocations {
        for page in pages(allocation.runs()) {
            assert!(seen.insert(page), "page {page} twice");
        }
    }
    assert_eq!(device.free_bytes(), total - 10 * PAGE_BYTES);
    assert!(owner.allocate(total, Use::Chunk).is_err());
    assert_eq!(device.free_bytes(), total - 10 * PAGE_BYTES, "a failed allocation leaks no page");
    drop(allocations);
    assert_eq!(device.free_bytes(), total);
}

#[test]
fn allocation_succeeds_when_free_memory_is_fragmented() {
    let state = state();
    let owner = attach(state.path());
    let count = owner.device().total_bytes() / PAGE_BYTES;
    let mut single: Vec<_> = (0..count).map(|_| Some(owner.allocate(1, Use::Chunk).unwrap())).collect();
    for allocation in single.iter_mut().step_by(2) {
        *allocation = None;
    }
    let scattered = owner.allocate(count / 2 * PAGE_BYTES, Use::Chunk).unwrap();
    assert_eq!(pages(scattered.runs()).len() as u64, count / 2);
    assert!(scattered.runs().len() as u64 >= count / 2);
}

#[test]
fn export_is_imported_on_its_own_device_only() {
    let state = state();
    let [first, second] = [0, 1].map(|index| open_nth(state.path(), index).attach(Client::Cuda).unwrap());
    // The first allocation of each device: all numbers that could tell them apart are equal.
    let [one, other] = [&first, &second].map(|owner| owner.allocate(PAGE_BYTES, Use::Chunk).unwrap());
    let [one, other] = [&one, &other].map(|allocation| allocation.export().unwrap());
    assert!(first.import(&one).is_ok() && second.import(&other).is_ok());
    assert!(matches!(first.import(&other), Err(ImportError::Foreign)));
    assert!(matches!(second.import(&one), Err(ImportError::Foreign)));
}

#[test]
fn import_keeps_an_allocation_that_its_maker_dropped() {
    let state = state();
    let maker = attach(state.path());
    let other = attach(state.path());
    let device = maker.device();
    let total = device.total_bytes();
    let made = maker.allocate(3 * PAGE_BYTES, Use::Chunk).unwrap();
    let descriptor = made.export().unwrap();
    let held = other.import(&descriptor).unwrap();
    assert_eq!(held.runs(), made.runs());
    assert!(Arc::ptr_eq(&held, &other.import(&descriptor).unwrap()));
    drop(made);
    drop(descriptor);
    assert_eq!(device.free_bytes(), total - 3 * PAGE_BYTES);
    drop(held);
    wait_for_use(device, 0);
}

// Promise: Q11
#[test]
fn exports_of_a_killed_process_are_freed_by_a_process_that_never_exports() {
    let state = state();
    let other = attach(state.path());
    let device = other.device();
    let mut exporter = start(state.path(), "export_and_wait");
    let path = state.path().join("exported");
    eventually("the child has exported memory", || path.exists());
    device.collect();
    assert_eq!(device.used_bytes(), 4 * PAGE_BYTES);
    exporter.kill().unwrap();
    exporter.wait().unwrap();
    device.collect();
    assert_eq!(device.used_bytes(), 0);
}

#[test]
fn memory_of_a_killed_process_is_free_late_if_configured() {
    const LATE: Duration = Duration::from_millis(300);
    let state = state();
    let path = state.path().to_owned();
    let config = Config::from_variables(&|name| match name {
        "SLUICE_SOFTGPU_STATE" => Some(path.clone().into()),
        "SLUICE_SOFTGPU_SCALE" => Some("2048".into()),
        "SLUICE_SOFTGPU_LATE_FREE" => Some("300".into()),
        _ => None,
    })
    .unwrap();
    let other = Arc::new(Device::open(&config, 0).unwrap()).attach(Client::Cuda).unwrap();
    let device = other.device();
    let mut exporter = start(state.path(), "export_and_wait");
    let exported = state.path().join("exported");
    eventually("the child has exported memory", || exported.exists());
    exporter.kill().unwrap();
    exporter.wait().unwrap();
    let killed = Instant::now();
    device.collect();
    let (free, since) = (device.free_bytes(), killed.elapsed());
    // A test that was stopped for as long sees nothing.
    assert!(free < device.total_bytes() || since >= LATE, "all is free {since:?} after the kill");
    wait_for_use(device, 0);
    assert!(killed.elapsed() >= LATE);
    other.allocate(device.total_bytes(), Use::Chunk).unwrap();
}

#[test]
#[ignore = "a part of exports_of_a_killed_process_are_freed_by_a_process_that_never_exports"]
fn export_and_wait() {
    let state = std::env::var_os("SOFTGPU_TEST_STATE").unwrap();
    let owner = attach(Path::new(&state));
    let made = [1, 3].map(|pages| owner.allocate(pages * PAGE_BYTES, Use::Chunk).unwrap());
    // One allocation is held by its maker, the other by a descriptor alone.
    let _descriptors = [&made[0], &made[1]].map(|allocation| allocation.export().unwrap());
    let [_held, given_up] = made;
    drop(given_up);
    std::fs::write(Path::new(&state).join("exported"), "").unwrap();
    // Orphans exit when their parent's device is gone.
    while Path::new(&state).exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn descriptor_of_an_ended_allocation_names_nothing() {
    let state = state();
    let maker = attach(state.path());
    let made = maker.allocate(PAGE_BYTES, Use::Chunk).unwrap();
    let descriptor = made.export().unwrap();
    drop(made);
    // The allocation lives: the descriptor holds it.
    let again = maker.import(&descriptor).unwrap();
    drop(again);
    assert_eq!(maker.device().free_bytes(), maker.device().total_bytes() - PAGE_BYTES);
    let position = File::from(descriptor.try_clone().unwrap()).stream_position().unwrap();
    drop(descriptor);
    wait_for_use(maker.device(), 0);
    // The same position in the same file does not bring it back; in another file it names nothing.
    let forged = |path: &Path| {
        let mut forged = File::open(path).unwrap();
        forged.seek(SeekFrom::Start(position)).unwrap();
        maker.import(&forged).err()
    };
    assert!(matches!(forged(&state.path().join("gpu0/exported")), Some(ImportError::Gone)));
    assert!(matches!(forged(&state.path().join("gpu0/hbm")), Some(ImportError::Foreign)));
}

#[test]
fn memory_of_a_process_is_reported_by_purpose() {
    let state = state();
    let (one, other) = (attach(state.path()), attach(state.path()));
    let device = one.device();
    let chunk = one.allocate(3 * PAGE_BYTES, Use::Chunk).unwrap();
    let _heap = one.allocate(2 * PAGE_BYTES, Use::Heap).unwrap();
    let driver = other.allocate(PAGE_BYTES, Use::Driver).unwrap();
    let shared = other.import(chunk.export().unwrap()).unwrap();
    one.context_began();
    one.launched(1234);
    let held = |device: &Device| -> Vec<Held> {
        let processes = device.processes();
        assert!(processes.iter().all(|one| one.pid == std::process::id() && one.same_namespace));
        processes.iter().map(|process| process.held).collect()
    };
    let page = PAGE_BYTES;
    assert_eq!(
        held(device),
        [
            Held { chunks: 3 * page, heap: 2 * page, driver: 0, imported: 0, lent: 3 * page },
            Held { chunks: 3 * page, heap: 0, driver: page, imported: 3 * page, lent: 0 }
        ]
    );
    // Both are owners of this process, which made all of it.
    let together = Held { chunks: 3 * page, heap: 2 * page, driver: page, imported: 0, lent: 0 };
    assert_eq!(device.held_together(&[std::process::id()]), together);
    assert_eq!(device.held_together(&[u32::MAX]), Held::default());
    // An allocation of two holders counts once.
    assert_eq!(device.used_bytes(), 6 * page);
    assert_eq!(device.free_bytes(), device.total_bytes() - 6 * page);
    let first = device.processes()[0];
    assert_eq!((first.contexts, first.launches, first.busy_nanoseconds), (1, 1, 1234));
    drop((chunk, driver));
    assert_eq!(held(device)[1], Held { chunks: 3 * page, heap: 0, driver: 0, imported: 3 * page, lent: 0 });
    drop(shared);
    one.context_ended();
    assert_eq!(device.processes()[0].contexts, 0);
    wait_for_use(device, 2 * page);
}

#[test]
fn device_of_another_model_or_scale_is_refused_and_not_overwritten() {
    let state = state();
    let uuid = open(state.path()).identity().uuid;
    let directory = state.path().to_owned();
    let other = Config::from_variables(&|name| match name {
        "SLUICE_SOFTGPU_STATE" => Some(directory.clone().into()),
        "SLUICE_SOFTGPU_SCALE" => Some("64".into()),
        _ => None,
    })
    .unwrap();
    assert!(Device::open(&other, 0).is_err());
    let any =
        Config::from_variables(&|name| (name == "SLUICE_SOFTGPU_STATE").then(|| directory.clone().into()));
    assert_eq!(Device::open(&any.unwrap(), 0).unwrap().identity().uuid, uuid);
    assert_eq!(open(state.path()).identity().uuid, uuid);
}

#[test]
fn new_device_is_filled_as_configured() {
    let state = state();
    let directory = state.path().to_owned();
    let config = Config::from_variables(&|name| match name {
        "SLUICE_SOFTGPU_STATE" => Some(directory.clone().into()),
        "SLUICE_SOFTGPU_SCALE" => Some("16384".into()),
        "SLUICE_SOFTGPU_FILL" => Some("0xA5".into()),
        _ => None,
    })
    .unwrap();
    Device::open(&config, 0).unwrap();
    let bytes = std::fs::read(state.path().join("gpu0/hbm")).unwrap();
    assert_eq!(
        bytes.len() as u64,
        config.model.map_or(143_771 / 2 / 16384, |model| model.pages(16384)) * PAGE_BYTES
    );
    assert!(bytes.iter().all(|byte| *byte == 0xA5));
}

/// Kills processes that take and give back memory as fast as they can, at random moments and many times. Afterwards no page may
/// be missing, and no page may ever have had two owners.
#[test]
fn no_page_is_lost_when_processes_are_killed_at_any_point() {
    let state = state();
    let watcher = attach(state.path());
    let end = Instant::now() + Duration::from_secs(4);
    let mut children: Vec<Child> = (0..4).map(|_| churn(state.path())).collect();
    let mut killed = 0;
    // Continues on a busy machine until enough processes were killed.
    while Instant::now() < end || killed <= 50 {
        for child in &mut children {
            std::thread::sleep(Duration::from_millis(3 + killed % 7));
            child.kill().unwrap();
            child.wait().unwrap();
            killed += 1;
            *child = churn(state.path());
            // Each allocation during this time must get pages that no other process writes to.
            if let Ok(allocation) = watcher.allocate(2 * PAGE_BYTES, Use::Chunk) {
                assert_eq!(pages(allocation.runs()).len(), 2);
            }
        }
    }
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    drop(attach(state.path()));
    let device = watcher.device();
    assert_eq!(device.free_bytes(), device.total_bytes(), "after {killed} deaths");
    let all = watcher.allocate(device.total_bytes(), Use::Chunk).unwrap();
    let unique: HashSet<u64> = pages(all.runs()).into_iter().collect();
    assert_eq!(unique.len() as u64 * PAGE_BYTES, device.total_bytes());
    assert_eq!(device.processes().len(), 1);
}

/// Kills processes that import and release as fast as they can, at random moments, while the imported allocations begin and end.
/// The maker keeps its allocations, and in the end no hold is left.
#[test]
fn no_hold_is_lost_or_left_when_importers_are_killed_at_any_point() {
    let state = state();
    let maker = attach(state.path());
    let device = Arc::clone(maker.device());
    let make = || {
        // A process that another test starts keeps allocations that have ended, until its exec.
        let mut allocation = None;
        eventually("memory is free", || {
            allocation = maker.allocate(2 * PAGE_BYTES, Use::Chunk).ok();
            allocation.is_some()
        });
        let allocation = allocation.unwrap();
        let descriptor = allocation.export().unwrap();
        (allocation, descriptor)
    };
    let mut made: Vec<_> = (0..8).map(|_| make()).collect();
    let names = state.path().join("names");
    let tell = |made: &[(Arc<Allocation>, OwnedFd)]| {
        let position = |(_, descriptor): &(_, OwnedFd)| {
            File::from(descriptor.try_clone().unwrap()).stream_position().unwrap().to_string()
        };
        std::fs::write(&names, made.iter().map(position).collect::<Vec<_>>().join(" ")).unwrap();
    };
    tell(&made);
    let end = Instant::now() + Duration::from_secs(3);
    let mut children: Vec<Child> = (0..3).map(|_| start(state.path(), "import_and_let_go")).collect();
    let mut killed = 0;
    // Continues on a busy machine until enough processes were killed.
    while Instant::now() < end || killed <= 50 {
        for child in &mut children {
            std::thread::sleep(Duration::from_millis(2 + killed % 9));
            child.kill().unwrap();
            child.wait().unwrap();
            killed += 1;
            *child = start(state.path(), "import_and_let_go");
            let ended = made.remove(usize::try_from(killed % 8).unwrap());
            drop(ended);
            made.push(make());
            tell(&made);
            let pages: Vec<u64> = made.iter().flat_map(|(allocation, _)| pages(allocation.runs())).collect();
            assert_eq!(pages.iter().collect::<HashSet<_>>().len(), 16, "each page is in one allocation");
        }
    }
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    drop(made);
    std::fs::remove_file(&names).unwrap();
    // A process that another test starts at this moment has copies of the descriptors until its exec.
    wait_for_use(&device, 0);
}

#[test]
#[ignore = "a part of no_hold_is_lost_or_left_when_importers_are_killed_at_any_point"]
fn import_and_let_go() {
    let state = std::env::var_os("SOFTGPU_TEST_STATE").unwrap();
    let owner = attach(Path::new(&state));
    let names = Path::new(&state).join("names");
    let mut held = Vec::new();
    // Orphans exit when their parent's device is gone.
    while let Ok(positions) = std::fs::read_to_string(&names) {
        for position in positions.split(' ').filter_map(|position| position.parse().ok()) {
            let Ok(mut file) = File::open(Path::new(&state).join("gpu0/exported")) else { return };
            file.seek(SeekFrom::Start(position)).unwrap();
            if let Ok(allocation) = owner.import(&file) {
                held.push(allocation);
            }
            if held.len() > 3 {
                held.swap_remove(1);
            }
        }
    }
}

fn churn(state: &Path) -> Child {
    start(state, "take_and_give")
}

fn start(state: &Path, test: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("sharing::{test}"), "--ignored", "--test-threads=1"])
        .env("SOFTGPU_TEST_STATE", state)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "a part of no_page_is_lost_when_processes_are_killed_at_any_point"]
fn take_and_give() {
    let state = std::env::var_os("SOFTGPU_TEST_STATE").unwrap();
    let owner = attach(Path::new(&state));
    let mut held = Vec::new();
    for round in 0u64.. {
        if let Ok(allocation) = owner.allocate((1 + round % 3) * PAGE_BYTES, Use::Chunk) {
            held.push(allocation);
        }
        if held.len() > 3 {
            held.swap_remove(usize::try_from(round % 3).unwrap());
        }
        // Orphans exit when their parent's device is gone.
        if round % 1000 == 0 && !Path::new(&state).exists() {
            return;
        }
    }
}
