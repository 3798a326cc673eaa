//! The program itself, confined, on the software GPU's management library, beside processes that hold memory.
#![allow(unsafe_code, reason = "calls a C library")]

use crate::common::*;

use libloading::os::unix::Library;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd as _, OwnedFd},
};
// Makes cargo build the libraries.
use sluice_messages::control::{BYTES, FromInventory, ToInventory};
use sluice_messages::inventory::{
    Instance, InstancePlace, NamePart, PciAddress, Recovery, Switch, Visible, VisibleInstance, WHOLE,
};
use sluice_shared_memory::socket;
use softgpu_cuda as _;
use softgpu_nvml as _;
use std::{
    ffi::{CStr, c_char, c_void},
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A program on the second device, with a context and three pages of memory.
fn holder(state: &Path) -> Process {
    holder_on(state, "1")
}

/// Such a program on another device.
fn holder_on(state: &Path, visible: &str) -> Process {
    start(Command::new(std::env::current_exe().unwrap()), state, visible)
}

/// Such a program that computes all the time.
fn computer(state: &Path) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(COMPUTES, "1");
    start(command, state, "1")
}

const COMPUTES: &str = "SLUICE_TEST_COMPUTES";

fn start(mut command: Command, state: &Path, visible: &str) -> Process {
    command.args(["--ignored", "--exact", "--nocapture", "inventory::holds_memory"]);
    command.env("CUDA_VISIBLE_DEVICES", visible);
    on_device(&mut command, state);
    Process::holding(&mut command)
}

#[test]
#[ignore = "a process of its own for the other tests"]
fn holds_memory() {
    // SAFETY: the driver in software.
    let driver = unsafe { Library::open(Some(library("libsoftgpu_cuda.so")), 2) }.unwrap();
    macro_rules! cuda {
        ($name:ident($($argument:expr => $type:ty),*)) => {{
            // SAFETY: the signature is the header's.
            let entry = unsafe { driver.get::<unsafe extern "C" fn($($type),*) -> u32>(stringify!($name).as_bytes()) };
            // SAFETY: the arguments have the types of the header.
            assert_eq!(unsafe { (*entry.unwrap())($($argument),*) }, 0, stringify!($name));
        }};
    }
    let (mut context, mut address) = (0u64, 0u64);
    cuda!(cuInit(0 => u32));
    cuda!(cuCtxCreate_v2(&raw mut context => *mut u64, 0 => u32, 0 => i32));
    cuda!(cuMemAlloc_v2(&raw mut address => *mut u64, 3 * PAGE => u64));
    println!("holding");
    std::io::stdout().flush().unwrap();
    if std::env::var_os(COMPUTES).is_none() {
        loop {
            thread::sleep(TIMEOUT);
        }
    }
    let (mut module, mut function) = (0u64, 0u64);
    cuda!(cuModuleLoadData(&raw mut module => *mut u64, SPIN.as_ptr() => *const c_char));
    cuda!(cuModuleGetFunction(&raw mut function => *mut u64, module => u64, c"spin".as_ptr() => *const c_char));
    let none = std::ptr::null_mut::<*mut c_void>();
    loop {
        cuda!(cuLaunchKernel(
            function => u64, 1 => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => u64,
            none => *mut *mut c_void, none => *mut *mut c_void
        ));
        cuda!(cuCtxSynchronize());
    }
}

/// A kernel that spins for some milliseconds.
const SPIN: &CStr = c".version 8.0
.target sm_80
.address_size 64
.visible .entry spin() {
    .reg .pred %p;
    .reg .u32 %r;
    mov.u32 %r, 1000000;
again:
    sub.u32 %r, %r, 1;
    setp.ne.u32 %p, %r, 0;
    @%p bra again;
    ret;
}
";

fn used(socket: &OwnedFd, unit: u32) -> u64 {
    match ask(socket, ToInventory::Memory { serial: 7, unit, instance: WHOLE }) {
        FromInventory::Memory { serial: 7, total, used, free } => {
            assert_eq!(total, used + free);
            used
        }
        other => panic!("{other:?}"),
    }
}

fn listed(socket: &OwnedFd, unit: u32, process: u32) -> (bool, u64) {
    match ask(socket, ToInventory::Process { serial: 8, unit, process, instance: WHOLE }) {
        FromInventory::Process { serial: 8, process: same, present, bytes, .. } if same == process => {
            (present, bytes)
        }
        other => panic!("{other:?}"),
    }
}

fn all(socket: &OwnedFd, unit: u32) -> Vec<(u32, u64)> {
    let mut list = Vec::new();
    for index in 0.. {
        match ask(socket, ToInventory::Nth { serial: 9, unit, index, instance: WHOLE }) {
            FromInventory::Process { serial: 9, process, present: true, bytes, .. } => {
                list.push((process, bytes))
            }
            FromInventory::Process { process: 0, present: false, bytes: 0, .. } => break,
            other => panic!("{other:?}"),
        }
    }
    list
}

// Promise: F15
#[test]
fn inventory_lists_processes_with_their_bytes_until_they_exit() {
    let state = state();
    let inventory = Inventory::start(state.path());
    let client = inventory.client();
    for socket in [&inventory.control, &client] {
        assert_eq!(
            ask(socket, ToInventory::Units { serial: 1 }),
            FromInventory::Units { serial: 1, count: 2 }
        );
        assert_eq!((used(socket, 1), all(socket, 1)), (0, Vec::new()));
    }
    let (one, other) = (holder(state.path()), holder(state.path()));
    let bytes = CONTEXT + 3 * PAGE;
    assert_eq!(used(&client, 1), 2 * bytes);
    assert_eq!((used(&client, 0), all(&client, 0)), (0, Vec::new()), "no process uses the first device");
    let mut expected = [(one.0.id(), bytes), (other.0.id(), bytes)];
    expected.sort_unstable();
    assert_eq!(all(&client, 1), expected);
    assert_eq!(listed(&client, 1, one.0.id()), (true, bytes));
    assert_eq!(listed(&client, 1, std::process::id()), (false, 0));

    let gone = one.0.id();
    drop(one);
    assert_eq!(listed(&client, 1, gone), (false, 0), "the answer is not older than the question");
    assert_eq!(used(&client, 1), bytes);
    assert_eq!(all(&client, 1), [(other.0.id(), bytes)]);
    // The driver's own code, for a device that does not exist.
    assert_eq!(
        ask(&client, ToInventory::Memory { serial: 3, unit: 2, instance: WHOLE }),
        FromInventory::Failed { serial: 3, error: 2 }
    );
    assert!(inventory.ends());
}

// Promise: T35
#[test]
fn inventory_reports_utilization_per_process() {
    let state = state();
    let inventory = Inventory::start(state.path());
    let client = inventory.client();
    let (idle, busy) = (holder(state.path()), computer(state.path()));
    let percent = |of: u32| {
        let nth = |index| ask(&client, ToInventory::Nth { serial: 9, unit: 1, index, instance: WHOLE });
        (0..2).map(nth).find_map(|answer| match answer {
            FromInventory::Process { process, busy, .. } if process == of => Some(busy),
            _ => None,
        })
    };
    let deadline = Instant::now() + TIMEOUT;
    while percent(busy.0.id()).is_none_or(|percent| !(10..=100).contains(&percent)) {
        assert!(Instant::now() < deadline, "{:?}", percent(busy.0.id()));
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(percent(idle.0.id()), Some(0));
    assert!(inventory.ends());
}

// Promise: F15
#[test]
fn misbehaving_client_of_the_inventory_loses_only_its_own_socket() {
    let state = state();
    let inventory = Inventory::start(state.path());
    let good = inventory.client();
    let units = FromInventory::Units { serial: 1, count: 2 };
    for nonsense in [&[0xff; BYTES][..], &[1; 3], &ToInventory::Client {}.encode()] {
        let bad = inventory.client();
        assert_eq!(ask(&bad, ToInventory::Units { serial: 1 }), units);
        socket::send(&bad, nonsense, &[]).unwrap();
        assert_eq!(next_message(&bad), None, "{nonsense:?}");
    }
    // Only sluiced brings clients.
    let bad = inventory.client();
    let (_, theirs) = socket::pair().unwrap();
    socket::send(&bad, &ToInventory::Client {}.encode(), &[theirs.as_fd()]).unwrap();
    assert_eq!(next_message(&bad), None);
    // A client that sends queries and never reads.
    let deaf = inventory.client();
    rustix::io::ioctl_fionbio(&deaf, true).unwrap();
    let start = Instant::now();
    let refused = loop {
        match socket::send(&deaf, &ToInventory::Units { serial: 2 }.encode(), &[]) {
            Ok(()) | Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => break error,
        }
        assert!(start.elapsed() < TIMEOUT, "the inventory puts up with it");
    };
    assert!(matches!(refused, rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET), "{refused}");
    assert_eq!(ask(&good, ToInventory::Units { serial: 1 }), units);
    assert!(inventory.ends());
}

// Promise: F42
#[test]
fn xid_of_a_device_is_reported_to_sluiced_only() {
    let state = state();
    let inventory = Inventory::start(state.path());
    let client = inventory.client();
    ask(&client, ToInventory::Units { serial: 1 });
    let file = state.path().join("gpu1/xid");
    // The thread may not have begun to watch when the first answer comes; the file exists once it has.
    let start = Instant::now();
    while !file.exists() {
        assert!(start.elapsed() < TIMEOUT);
        thread::sleep(Duration::from_millis(5));
    }
    // Errors before it begins to watch are not reported: repeated until one is.
    let mut file = std::fs::OpenOptions::new().append(true).open(&file).unwrap();
    let limit = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let is_answered =
        || poll(&mut [PollFd::new(&inventory.control, PollFlags::IN)], Some(&limit)).unwrap() > 0;
    while {
        file.write_all(b"48\n").unwrap();
        !is_answered()
    } {
        assert!(start.elapsed() < TIMEOUT);
    }
    assert_eq!(
        next_message(&inventory.control),
        Some(FromInventory::Xid { unit: 1, xid: 48, process: 0, instance: WHOLE })
    );
    let limit = Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&client, PollFlags::IN)], Some(&limit)).unwrap(), 0);
    assert!(inventory.ends());
}

#[test]
fn inventory_without_an_nvml_library_exits_and_names_its_path() {
    for path in ["/nowhere/libnvidia-ml.so.1", "libnvidia-ml.so.1"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-inventory"));
        let (_ours, theirs) = socket::pair().unwrap();
        command.args(["--control-fd", "0", "--nvml", path]).stdin(Stdio::from(theirs));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(path), "{output:?}");
    }
}

const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const IN_USE: u32 = 19;
const INSUFFICIENT_RESOURCES: u32 = 23;

fn create(profile: u32, start: u32, size: u32) -> ToInventory {
    ToInventory::Create { serial: 5, unit: 0, profile, start, size }
}

fn made(socket: &OwnedFd, profile: u32, start: u32, size: u32) -> Instance {
    match ask(socket, create(profile, start, size)) {
        FromInventory::Instance { serial: 5, instance } => instance,
        other => panic!("{other:?}"),
    }
}

fn destroy(instance: &Instance) -> ToInventory {
    let Instance { gpu, profile, start, size, .. } = *instance;
    ToInventory::Destroy { serial: 6, unit: 0, instance: gpu, profile, start, size }
}

// Promise: P44
#[test]
fn device_name_health_and_mig_profiles_are_those_of_the_driver() {
    let state = state();
    let inventory = Inventory::start_with(state.path(), &DIVIDED);
    let client = inventory.client();
    let part = |part| match ask(&client, ToInventory::DeviceName { serial: 1, unit: 1, part }) {
        FromInventory::Name { serial: 1, text } => text,
        other => panic!("{other:?}"),
    };
    assert_eq!(NamePart::join(&[part(0), part(1)]), "NVIDIA H100 80GB HBM3");
    match ask(&client, ToInventory::Device { serial: 2, unit: 1 }) {
        FromInventory::Device {
            serial: 2,
            uuid,
            memory,
            multiprocessors: 132,
            node: 0,
            pci: PciAddress { domain: 0, bus: 2, device: 0 },
        } => {
            assert!(uuid != [0; 16] && memory == 81_559 / 2 / 1024 * PAGE);
        }
        other => panic!("{other:?}"),
    }
    let health = |mig, recovery, uncorrected, repair| FromInventory::Health {
        serial: 3,
        mig,
        pending: mig,
        ecc: Switch::On,
        recovery,
        uncorrected,
        repair,
    };
    let well = ask(&client, ToInventory::Health { serial: 3, unit: 0 });
    assert_eq!(well, health(Switch::On, Recovery::None, 0, false));
    std::fs::write(state.path().join("gpu0/health"), "uncorrected 2\npending 1\nrecovery 1\n").unwrap();
    let ill = ask(&client, ToInventory::Health { serial: 3, unit: 0 });
    assert_eq!(ill, health(Switch::On, Recovery::Reset, 2, true));

    let kinds = kinds(&client);
    let shown: Vec<_> =
        kinds.iter().map(|(profile, name, places)| (profile.id, name.as_str(), places.len())).collect();
    let expected = [
        (19, "1g.10gb", 7),
        (14, "2g.20gb", 3),
        (9, "3g.40gb", 2),
        (5, "4g.40gb", 1),
        (0, "7g.80gb", 1),
        (20, "1g.10gb+me", 7),
        (15, "1g.20gb", 4),
    ];
    assert_eq!(shown, expected);
    let (profile, _, places) = &kinds[2];
    assert_eq!(
        (profile.slices, profile.instances, profile.multiprocessors, profile.engines.copy),
        (3, 2, 60, 3)
    );
    assert_eq!(profile.memory, 40_448 / 2 / 1024 * PAGE);
    assert_eq!(places[..], [InstancePlace { start: 0, size: 4 }, InstancePlace { start: 4, size: 4 }]);
    let capacity = ToInventory::Capacity { serial: 4, unit: 0, profile: 9 };
    assert_eq!(ask(&client, capacity), FromInventory::Capacity { serial: 4, count: 2 });
    assert!(inventory.ends());
}

// Promise: P44
#[test]
fn instance_is_created_where_asked_and_destroyed_only_when_unused() {
    let state = state();
    let inventory = Inventory::start_with(state.path(), &DIVIDED);
    let client = inventory.client();
    assert_eq!(instances(&client), []);
    let large = made(&inventory.control, 9, 4, 4);
    // The profile whose compute instance does not have its number.
    let double = made(&inventory.control, 15, 2, 2);
    assert_eq!((large.gpu, large.compute, large.profile, large.start, large.size), (2, 0, 9, 4, 4));
    assert_eq!(instances(&client), [double, large], "everybody may look");
    let refused = ask(&inventory.control, create(19, 5, 1));
    assert_eq!(refused, FromInventory::Failed { serial: 5, error: INSUFFICIENT_RESOURCES });

    // A program finds it by its UUID, and is on it alone.
    let visible = Visible::Instance(VisibleInstance { uuid: large.uuid, ..VisibleInstance::default() })
        .variable()
        .unwrap();
    let program = holder_on(state.path(), &visible);
    let memory = |instance| match ask(&client, ToInventory::Memory { serial: 7, unit: 0, instance }) {
        FromInventory::Memory { serial: 7, total, used, .. } => (total, used),
        other => panic!("{other:?}"),
    };
    let bytes = CONTEXT + 3 * PAGE;
    assert_eq!(memory(large.gpu), (40_448 / 2 / 1024 * PAGE, bytes));
    assert_eq!((memory(double.gpu).1, memory(WHOLE).1), (0, bytes));
    let listed = |instance| {
        let question = ToInventory::Process { serial: 8, unit: 0, process: program.0.id(), instance };
        matches!(ask(&client, question), FromInventory::Process { present: true, .. })
    };
    assert_eq!((listed(large.gpu), listed(double.gpu), listed(WHOLE)), (true, false, true));
    let first = |instance| ask(&client, ToInventory::Nth { serial: 9, unit: 0, index: 0, instance });
    assert!(matches!(first(large.gpu), FromInventory::Process { process, .. } if process == program.0.id()));
    assert!(matches!(first(double.gpu), FromInventory::Process { process: 0, present: false, .. }));
    let busy = ToInventory::Utilization { serial: 2, unit: 0, instance: large.gpu };
    assert!(matches!(ask(&client, busy), FromInventory::Utilization { serial: 2, .. }));
    let gone = ToInventory::Memory { serial: 2, unit: 0, instance: 13 };
    assert_eq!(ask(&client, gone), FromInventory::Failed { serial: 2, error: NOT_FOUND });

    assert_eq!(ask(&inventory.control, destroy(&large)), FromInventory::Failed { serial: 6, error: IN_USE });
    // An instance that differs from the request, whatever its number: left alone.
    for other in [
        Instance { profile: 5, ..double },
        Instance { start: 0, ..double },
        Instance { size: 1, ..double },
        Instance { gpu: 13, ..double },
    ] {
        let answer = ask(&inventory.control, destroy(&other));
        assert_eq!(answer, FromInventory::Failed { serial: 6, error: NOT_FOUND }, "{other:?}");
    }
    assert_eq!(instances(&client), [double, large]);
    drop(program);
    for instance in [large, double] {
        assert_eq!(ask(&inventory.control, destroy(&instance)), FromInventory::Done { serial: 6 });
    }
    assert_eq!(instances(&client), []);
    assert_eq!(
        ask(&inventory.control, destroy(&large)),
        FromInventory::Failed { serial: 6, error: NOT_FOUND }
    );
    let off = ToInventory::SetMig { serial: 3, unit: 0, on: false };
    assert_eq!(ask(&inventory.control, off), FromInventory::Done { serial: 3 });
    let refused = ask(&inventory.control, create(9, 4, 4));
    assert_eq!(refused, FromInventory::Failed { serial: 5, error: NOT_SUPPORTED });
    assert!(
        kinds(&client).len() == 7 && instances(&client).is_empty(),
        "a device that is not divided has profiles"
    );
    assert!(inventory.ends());
}

// Promise: P44
#[test]
fn instance_without_a_compute_instance_is_destroyed_or_listed() {
    let state = state();
    let inventory = Inventory::start_with(state.path(), &DIVIDED);
    ask(&inventory.control, ToInventory::Units { serial: 1 });
    let faults = state.path().join("faults");
    std::fs::write(&faults, "fail nvmlGpuInstanceCreateComputeInstance 23\n").unwrap();
    let refused = ask(&inventory.control, create(19, 0, 1));
    assert_eq!(refused, FromInventory::Failed { serial: 5, error: INSUFFICIENT_RESOURCES });
    assert_eq!(instances(&inventory.control), []);
    // It cannot be removed either: then it exists, without a compute instance, and can be named.
    std::fs::write(&faults, "fail nvmlGpuInstanceCreateComputeInstance 23\nfail nvmlGpuInstanceDestroy 19\n")
        .unwrap();
    ask(&inventory.control, create(19, 0, 1));
    let left = instances(&inventory.control);
    assert!(
        matches!(left[..], [Instance { compute: WHOLE, profile: 19, start: 0, size: 1, .. }]),
        "{left:?}"
    );
    std::fs::remove_file(&faults).unwrap();
    assert_eq!(ask(&inventory.control, destroy(&left[0])), FromInventory::Done { serial: 6 });
    assert!(inventory.ends());
}

// Promise: P44
#[test]
fn hanging_instance_creation_delays_no_query() {
    let state = state();
    let inventory = Inventory::start_with(state.path(), &DIVIDED);
    let client = inventory.client();
    ask(&client, ToInventory::Units { serial: 1 });
    let faults = state.path().join("faults");
    std::fs::write(&faults, "hang nvmlDeviceCreateGpuInstanceWithPlacement\n").unwrap();
    socket::send(&inventory.control, &create(19, 0, 1).encode(), &[]).unwrap();
    for socket in [&client, &inventory.control] {
        for _ in 0..20 {
            let units = FromInventory::Units { serial: 1, count: 2 };
            assert_eq!(ask(socket, ToInventory::Units { serial: 1 }), units);
        }
    }
    assert_eq!(instances(&client), []);
    std::fs::remove_file(&faults).unwrap();
    assert!(matches!(next_message(&inventory.control), Some(FromInventory::Instance { serial: 5, .. })));
    assert_eq!(instances(&client).len(), 1);
    // Killed during a change: the next inventory finds all that exists.
    std::fs::write(&faults, "hang nvmlGpuInstanceCreateComputeInstance\n").unwrap();
    socket::send(&inventory.control, &create(19, 1, 1).encode(), &[]).unwrap();
    let start = Instant::now();
    while instances(&client).len() < 2 {
        assert!(start.elapsed() < TIMEOUT);
        thread::sleep(Duration::from_millis(5));
    }
    drop(inventory);
    std::fs::remove_file(&faults).unwrap();
    let next = Inventory::start_with(state.path(), &DIVIDED);
    let found = instances(&next.control);
    assert_eq!(
        found.iter().map(|instance| (instance.start, instance.compute)).collect::<Vec<_>>(),
        [(0, 0), (1, WHOLE)]
    );
    for instance in &found {
        assert_eq!(ask(&next.control, destroy(instance)), FromInventory::Done { serial: 6 });
    }
    assert!(next.ends());
}

// Promise: P44
#[test]
fn change_requested_by_a_client_of_the_inventory_is_refused() {
    let state = state();
    let inventory = Inventory::start_with(state.path(), &DIVIDED);
    let there = made(&inventory.control, 19, 0, 1);
    for change in [create(19, 1, 1), destroy(&there), ToInventory::SetMig { serial: 1, unit: 0, on: false }] {
        let client = inventory.client();
        assert!(matches!(
            ask(&client, ToInventory::Units { serial: 1 }),
            FromInventory::Units { count: 2, .. }
        ));
        socket::send(&client, &change.encode(), &[]).unwrap();
        assert_eq!(next_message(&client), None, "{change:?}");
    }
    assert_eq!(instances(&inventory.control), [there]);
    assert!(inventory.ends());
}
