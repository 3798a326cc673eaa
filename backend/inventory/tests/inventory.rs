//! The program itself, confined, on the software GPU's management library, beside processes that hold memory.
#![allow(unsafe_code, reason = "calls a C library")]

use libloading::os::unix::Library;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd as _, OwnedFd},
};
// Has cargo build the libraries.
use sluice_protocol::control::{BYTES, FromInventory, ToInventory};
use sluice_protocol::inventory::WHOLE;
use sluice_shared_memory::socket;
use softgpu_cuda as _;
use softgpu_nvml as _;
use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(20);
const PAGE: u64 = 2 << 20;
const CONTEXT: u64 = 6 << 20;

fn library(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().with_file_name(name)
}

fn state() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("sluice-inventory-").tempdir_in("/dev/shm").unwrap()
}

fn on_device(command: &mut Command, state: &Path) {
    command
        .env("SLUICE_SOFTGPU_STATE", state)
        .env("SLUICE_SOFTGPU_SCALE", "1024")
        .env("SLUICE_SOFTGPU_DEVICES", "2")
        .env("SLUICE_SOFTGPU_CONTEXT_BYTES", CONTEXT.to_string());
}

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program on the second device, with a context and three pages of memory.
fn holder(state: &Path) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "holds_memory"]).stdout(Stdio::piped());
    on_device(&mut command, state);
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("holding")));
    Process(child)
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
            // SAFETY: the arguments are what the header says.
            assert_eq!(unsafe { (*entry.unwrap())($($argument),*) }, 0, stringify!($name));
        }};
    }
    let (mut context, mut address) = (0u64, 0u64);
    cuda!(cuInit(0 => u32));
    cuda!(cuCtxCreate_v2(&raw mut context => *mut u64, 0 => u32, 1 => i32));
    cuda!(cuMemAlloc_v2(&raw mut address => *mut u64, 3 * PAGE => u64));
    println!("holding");
    std::io::stdout().flush().unwrap();
    loop {
        thread::sleep(PATIENCE);
    }
}

struct Inventory {
    process: Process,
    control: OwnedFd,
}

impl Inventory {
    fn start(state: &Path) -> Inventory {
        let (ours, theirs) = socket::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-inventory"));
        command.args(["--control-fd", "0", "--nvml"]).arg(library("libsoftgpu_nvml.so"));
        on_device(&mut command, state);
        let process = Process(command.stdin(Stdio::from(theirs)).spawn().unwrap());
        Inventory { process, control: ours }
    }

    /// Another socket to it.
    fn client(&self) -> OwnedFd {
        let (ours, theirs) = socket::pair().unwrap();
        socket::send(&self.control, &ToInventory::Client {}.encode(), &[theirs.as_fd()]).unwrap();
        ours
    }

    /// Whether it ends by itself, and well.
    fn ends(mut self) -> bool {
        drop(self.control);
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(status) = self.process.0.try_wait().unwrap() {
                return status.success();
            }
            thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

/// The next message; `None` when the other end is closed.
fn hear(socket: &OwnedFd) -> Option<FromInventory> {
    let limit = Timespec::try_from(PATIENCE).unwrap();
    assert!(poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit)).unwrap() > 0, "no answer");
    let mut buffer = [0; BYTES];
    let (message, descriptors) = match socket::receive(socket, &mut buffer) {
        Ok(received) => received?,
        Err(rustix::io::Errno::CONNRESET) => return None,
        Err(error) => panic!("{error}"),
    };
    assert!(descriptors.is_empty());
    Some(FromInventory::decode(message).unwrap())
}

fn ask(socket: &OwnedFd, request: ToInventory) -> FromInventory {
    socket::send(socket, &request.encode(), &[]).unwrap();
    hear(socket).expect("an answer")
}

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
        FromInventory::Process { serial: 8, process: same, present, bytes } if same == process => {
            (present, bytes)
        }
        other => panic!("{other:?}"),
    }
}

fn all(socket: &OwnedFd, unit: u32) -> Vec<(u32, u64)> {
    let mut list = Vec::new();
    for index in 0.. {
        match ask(socket, ToInventory::Nth { serial: 9, unit, index, instance: WHOLE }) {
            FromInventory::Process { serial: 9, process, present: true, bytes } => {
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
fn the_inventory_says_who_holds_what_and_who_is_gone() {
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
    assert_eq!((used(&client, 0), all(&client, 0)), (0, Vec::new()), "the first device is nobody's");
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
    // The driver's own code, for a device that there is not.
    assert_eq!(
        ask(&client, ToInventory::Memory { serial: 3, unit: 2, instance: WHOLE }),
        FromInventory::Failed { serial: 3, error: 2 }
    );
    assert!(inventory.ends());
}

// Promise: F15
#[test]
fn a_client_of_the_inventory_can_spoil_only_its_own_socket() {
    let state = state();
    let inventory = Inventory::start(state.path());
    let good = inventory.client();
    let units = FromInventory::Units { serial: 1, count: 2 };
    for nonsense in [&[0xff; BYTES][..], &[1; 3], &ToInventory::Client {}.encode()] {
        let bad = inventory.client();
        assert_eq!(ask(&bad, ToInventory::Units { serial: 1 }), units);
        socket::send(&bad, nonsense, &[]).unwrap();
        assert_eq!(hear(&bad), None, "{nonsense:?}");
    }
    // Only sluiced brings clients.
    let bad = inventory.client();
    let (_, theirs) = socket::pair().unwrap();
    socket::send(&bad, &ToInventory::Client {}.encode(), &[theirs.as_fd()]).unwrap();
    assert_eq!(hear(&bad), None);
    // One that asks and never listens.
    let deaf = inventory.client();
    rustix::io::ioctl_fionbio(&deaf, true).unwrap();
    let start = Instant::now();
    let refused = loop {
        match socket::send(&deaf, &ToInventory::Units { serial: 2 }.encode(), &[]) {
            Ok(()) | Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => break error,
        }
        assert!(start.elapsed() < PATIENCE, "the inventory puts up with it");
    };
    assert!(matches!(refused, rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET), "{refused}");
    assert_eq!(ask(&good, ToInventory::Units { serial: 1 }), units);
    assert!(inventory.ends());
}

#[test]
fn an_error_of_a_device_reaches_sluiced_alone() {
    let state = state();
    let inventory = Inventory::start(state.path());
    let client = inventory.client();
    ask(&client, ToInventory::Units { serial: 1 });
    let file = state.path().join("gpu1/xid");
    // The thread may not have begun to watch when the first answer comes; the file is there once it has.
    let start = Instant::now();
    while !file.exists() {
        assert!(start.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(5));
    }
    thread::sleep(Duration::from_millis(100));
    std::fs::OpenOptions::new().append(true).open(&file).unwrap().write_all(b"48\n").unwrap();
    assert_eq!(
        hear(&inventory.control),
        Some(FromInventory::Xid { unit: 1, xid: 48, process: 0, instance: WHOLE })
    );
    let limit = Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&client, PollFlags::IN)], Some(&limit)).unwrap(), 0);
    assert!(inventory.ends());
}

#[test]
fn without_a_library_there_is_no_inventory() {
    for path in ["/nowhere/libnvidia-ml.so.1", "libnvidia-ml.so.1"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-inventory"));
        let (_ours, theirs) = socket::pair().unwrap();
        command.args(["--control-fd", "0", "--nvml", path]).stdin(Stdio::from(theirs));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(path), "{output:?}");
    }
}
