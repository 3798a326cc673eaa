//! Shared parts of the tests: the program itself, confined, on the software GPU's management library.

use rustix::fd::{AsFd as _, OwnedFd};
use sluice_kit::wait::readable;
use sluice_messages::control::{BYTES, FromInventory, ToInventory};
use sluice_messages::inventory::{Instance, InstancePlace, InstanceProfile, NAME_PARTS, NamePart};
use sluice_shared_memory::socket;
// Makes cargo build the library.
use softgpu_nvml as _;
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

pub(crate) use sluice_kit::{processes::Process, wait::TIMEOUT};
pub(crate) const PAGE: u64 = 2 << 20;
pub(crate) const CONTEXT: u64 = 6 << 20;

pub(crate) fn library(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().with_file_name(name)
}

pub(crate) fn state() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("sluice-inventory-").tempdir_in("/dev/shm").unwrap()
}

pub(crate) fn on_device(command: &mut Command, state: &Path) {
    command
        .env("SLUICE_SOFTGPU_STATE", state)
        .env("SLUICE_SOFTGPU_SCALE", "1024")
        .env("SLUICE_SOFTGPU_DEVICES", "2")
        .env("SLUICE_SOFTGPU_CONTEXT_BYTES", CONTEXT.to_string());
}

pub(crate) struct Inventory {
    pub(crate) process: Process,
    pub(crate) control: OwnedFd,
}

impl Inventory {
    pub(crate) fn start(state: &Path) -> Inventory {
        Inventory::start_with(state, &[])
    }

    pub(crate) fn start_with(state: &Path, settings: &[(&str, &str)]) -> Inventory {
        let (ours, theirs) = socket::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-inventory"));
        command.args(["--control-fd", "0", "--nvml"]).arg(library("libsoftgpu_nvml.so"));
        on_device(&mut command, state);
        command.envs(settings.iter().copied());
        let process = Process(command.stdin(Stdio::from(theirs)).spawn().unwrap());
        Inventory { process, control: ours }
    }

    /// Creates another socket to it.
    pub(crate) fn client(&self) -> OwnedFd {
        let (ours, theirs) = socket::pair().unwrap();
        socket::send(&self.control, &ToInventory::Client {}.encode(), &[theirs.as_fd()]).unwrap();
        ours
    }

    /// True if it ends by itself, with success.
    pub(crate) fn ends(mut self) -> bool {
        drop(self.control);
        let start = Instant::now();
        while start.elapsed() < TIMEOUT {
            if let Some(status) = self.process.0.try_wait().unwrap() {
                return status.success();
            }
            thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

/// The next message; `None` if the other end is closed.
pub(crate) fn next_message(socket: &OwnedFd) -> Option<FromInventory> {
    assert!(readable(socket, TIMEOUT), "no answer");
    let mut buffer = [0; BYTES];
    let (message, descriptors) = match socket::receive(socket, &mut buffer) {
        Ok(received) => received?,
        Err(rustix::io::Errno::CONNRESET) => return None,
        Err(error) => panic!("{error}"),
    };
    assert!(descriptors.is_empty());
    Some(FromInventory::decode(message).unwrap())
}

pub(crate) fn ask(socket: &OwnedFd, request: ToInventory) -> FromInventory {
    socket::send(socket, &request.encode(), &[]).unwrap();
    next_message(socket).expect("an answer")
}

/// Divided devices without instances.
pub(crate) const DIVIDED: [(&str, &str); 4] = [
    ("SLUICE_SOFTGPU_MIG", "1"),
    ("SLUICE_SOFTGPU_MODEL", "H100-80"),
    ("SLUICE_SOFTGPU_ECC", "1"),
    ("SLUICE_SOFTGPU_NODES", "1,0"),
];

pub(crate) fn kinds(socket: &OwnedFd) -> Vec<(InstanceProfile, String, Vec<InstancePlace>)> {
    let mut kinds = Vec::new();
    for index in 0.. {
        let profile = match ask(socket, ToInventory::Profile { serial: 1, unit: 0, index }) {
            FromInventory::Profile { serial: 1, profile } => profile,
            FromInventory::Nothing { serial: 1 } => break,
            other => panic!("{other:?}"),
        };
        let id = profile.id;
        let part =
            |part| match ask(socket, ToInventory::ProfileName { serial: 2, unit: 0, profile: id, part }) {
                FromInventory::Name { serial: 2, text } => text,
                other => panic!("{other:?}"),
            };
        let name = NamePart::join(&(0..NAME_PARTS).map(part).collect::<Vec<_>>());
        match ask(socket, ToInventory::Places { serial: 3, unit: 0, profile: id }) {
            FromInventory::Places { serial: 3, places } => {
                kinds.push((profile, name, places.as_slice().to_vec()));
            }
            other => panic!("{other:?}"),
        }
    }
    kinds
}

pub(crate) fn instances(socket: &OwnedFd) -> Vec<Instance> {
    let mut instances = Vec::new();
    for index in 0.. {
        match ask(socket, ToInventory::Instance { serial: 4, unit: 0, index }) {
            FromInventory::Instance { serial: 4, instance } => instances.push(instance),
            FromInventory::Nothing { serial: 4 } => break,
            other => panic!("{other:?}"),
        }
    }
    instances
}
