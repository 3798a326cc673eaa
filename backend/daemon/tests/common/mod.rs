//! Helpers for the tests of launcher and daemon: a directory of programs in which device and worker are stand-ins, and
//! functions that wait for processes without sleeping.

mod daemon;

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{net::UnixStream, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

pub(crate) use daemon::{Daemon, DaemonBuilder, SHARING, SLUICED};
use sluice_api::{
    client::Client,
    v1::{Placement, VmRequest},
};
use sluice_kit::{
    processes::{MADE_AHEAD, Started, make_program, wait_gone, watch},
    wait::{TIMEOUT, until},
};
use tempfile::TempDir;

/// The launcher, of a package that `cargo test -p sluice-daemon` does not build.
pub(crate) fn launcher() -> PathBuf {
    let launcher = Path::new(SLUICED).with_file_name("sluice-launcher");
    assert!(launcher.exists(), "{} is missing: run `cargo build --release`", launcher.display());
    launcher
}

/// A directory for one test: programs in `libexec`, sockets in `run`.
pub(crate) struct Place {
    started: Started,
    pub(crate) directory: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let started = Started { libexec: directory.path().join("libexec") };
        let place = Self { started, directory };
        for directory in [place.libexec(), place.run()] {
            std::fs::create_dir(directory).expect("a directory");
        }
        place.link("sluice-launcher", launcher().to_str().expect("UTF-8"));
        for name in ["sluice-device", "sluice-worker", "sluice-arbiter", "sluice-inventory"] {
            place.link(name, env!("CARGO_BIN_EXE_sluice-stand-in"));
        }
        std::fs::write(place.driver(), "").expect("a driver");
        place
    }

    fn link(&self, name: &str, target: &str) {
        std::os::unix::fs::symlink(target, self.libexec().join(name)).expect("a link");
    }

    pub(crate) fn libexec(&self) -> PathBuf {
        self.started.libexec.clone()
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    pub(crate) fn driver(&self) -> PathBuf {
        self.directory.path().join("driver.so")
    }

    /// A start of sluiced in this place.
    pub(crate) fn daemon(&self) -> DaemonBuilder<'_> {
        DaemonBuilder::new(self, Command::new(SLUICED))
    }

    /// Connects to the stand-in device of a VM.
    pub(crate) fn front(&self, vm: u32) -> Front {
        Front::connect(&self.run().join(format!("vm-{vm}.sock")))
    }

    /// Sends a command to the stand-in arbiter of a unit or to the inventory, once it listens. Returns the answer.
    pub(crate) fn tell(&self, whom: &str, command: &str) -> String {
        let path = self.libexec().join(format!("{whom}.sock"));
        let stream = until(|| UnixStream::connect(&path), Result::is_ok).expect("a listening stand-in");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
        Front { stream: BufReader::new(stream) }.ask(command)
    }

    /// The messages that the stand-in arbiter of the first unit has got.
    pub(crate) fn told(&self) -> Vec<String> {
        serde_json::from_str(&self.tell("unit-0", "told")).expect("a list")
    }

    /// Sends a request to the management API.
    pub(crate) fn api(&self, method: &str, path: &str, body: Option<&serde_json::Value>) -> Reply {
        self.try_api(method, path, body).expect("an answer of the API")
    }

    /// Sends a request to the management API. Fails if no daemon answers.
    pub(crate) fn try_api(
        &self,
        method: &str,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> std::io::Result<Reply> {
        let (status, body) = Client::at(self.run().join("api.sock")).exchange(method, path, body)?;
        Ok(Reply { status, body })
    }

    /// The current answer of the management API at a path.
    pub(crate) fn look(&self, path: &str) -> serde_json::Value {
        let reply = self.api("GET", path, None);
        assert_eq!(reply.status, 200, "{path}: {reply:?}");
        reply.body
    }

    /// The launcher's process in the management API, which names none while the launcher is busy with a start.
    pub(crate) fn launcher_process(&self) -> serde_json::Value {
        until(|| self.look("/v1/host")["launcher_process"].clone(), |process| !process.is_null())
    }

    /// The variable for a directory of software GPUs in this place: the launcher would make the user's own.
    pub(crate) fn softgpu(&self) -> (&'static str, PathBuf) {
        ("SLUICE_SOFTGPU_STATE", self.directory.path().join("softgpu"))
    }

    /// A VM in the management API.
    pub(crate) fn vm(&self, vm: u32) -> serde_json::Value {
        self.look(&format!("/v1/vms/{vm}"))
    }

    /// True if there is an event of this kind.
    pub(crate) fn has_event(&self, kind: &str) -> bool {
        let path = "/v1/events?follow=false&after=0.0";
        let mut answer =
            sluice_api::http::request(&self.run().join("api.sock"), "GET", path, None).expect("an answer");
        std::iter::from_fn(|| answer.line(64 << 10).ok().flatten()).any(|line| line.contains(kind))
    }

    /// A unit in the management API.
    pub(crate) fn unit(&self, unit: u32) -> serde_json::Value {
        self.look(&format!("/v1/units/{unit}"))
    }

    /// Posts a verb to a VM: `fence`, `readmit`.
    pub(crate) fn post(&self, vm: u32, verb: &str, body: &serde_json::Value) -> Reply {
        self.api("POST", &format!("/v1/vms/{vm}/{verb}"), Some(body))
    }

    /// Creates a VM with this number.
    pub(crate) fn make(&self, vm: u32, wanted: &VmRequest) {
        let made = Client::at(self.run().join("api.sock")).put_vm(&vm.to_string(), wanted);
        made.unwrap_or_else(|error| panic!("VM {vm}: {error:?}"));
    }

    /// Creates VMs with these numbers, to whose devices programs of this host connect.
    pub(crate) fn make_direct(&self, vms: impl IntoIterator<Item = u32>) {
        vms.into_iter().for_each(|vm| self.make(vm, &direct()));
    }

    /// Creates one of many VMs, with little memory. Tries again if the device does not start in time on a busy machine.
    pub(crate) fn make_one_of_many(&self, number: usize) {
        let wanted = serde_json::json!({ "memory_bytes": 4 << 20 });
        let made = until(
            || self.api("PUT", &format!("/v1/vms/vm-{number}"), Some(&wanted)),
            |reply| reply.status != 503,
        );
        assert_eq!(made.status, 201, "{made:?}");
    }

    /// Writes a checkpoint like that of an earlier daemon.
    pub(crate) fn checkpoint(&self, content: &serde_json::Value) {
        use sha2::Digest as _;
        let content = content.to_string();
        let sum: String =
            sha2::Sha256::digest(content.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        let header = serde_json::json!({ "version": 2, "sha256": sum });
        std::fs::write(self.run().join("checkpoint.json"), format!("{header}\n{content}")).expect("written");
    }

    /// Creates a file beside the programs, which changes the behaviour of a stand-in.
    pub(crate) fn mark(&self, name: &str, text: &str) {
        std::fs::write(self.libexec().join(name), text).expect("written");
    }

    /// Removes such a file.
    pub(crate) fn unmark(&self, name: &str) {
        std::fs::remove_file(self.libexec().join(name)).expect("removed");
    }

    /// Ids of the running processes that were started from this place.
    pub(crate) fn processes(&self) -> Vec<u32> {
        self.started.processes()
    }

    /// Waits until all processes started from this place have ended.
    pub(crate) fn wait_empty(&self) {
        self.wait_empty_but(None);
    }

    /// As [`Self::wait_empty`], except for one process.
    pub(crate) fn wait_empty_but(&self, but: Option<u32>) {
        let others = || self.processes().into_iter().filter(|pid| Some(*pid) != but).collect::<Vec<_>>();
        // The process may end before it can be watched.
        others().into_iter().filter_map(watch).for_each(|process| wait_gone(&process));
        // A process that is ending has no command line, by which it is found.
        let left = until(others, Vec::is_empty);
        assert_eq!(left, [] as [u32; 0], "processes were left");
    }
}

/// A request for a VM to whose device programs of this host connect.
pub(crate) fn direct() -> VmRequest {
    VmRequest { direct: true, ..VmRequest::default() }
}

/// A request for a VM on several GPUs to whose device programs of this host connect.
pub(crate) fn direct_on(gpus: impl IntoIterator<Item = u32>) -> VmRequest {
    let placement = Placement { gpus: gpus.into_iter().collect(), ..Placement::default() };
    VmRequest { placement: Some(placement), ..direct() }
}

/// An answer of the management API.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: serde_json::Value,
}

/// Status and error code of an answer.
pub(crate) fn code(reply: &Reply) -> (u16, &str) {
    (reply.status, reply.body["code"].as_str().unwrap_or_default())
}

/// Sends one request with these lines of a head on a new connection. A body that is not JSON is returned as a string.
pub(crate) fn request(socket: &Path, head: &str, body: &[u8]) -> std::io::Result<Reply> {
    let head = format!("{head}Host: sluice\r\nConnection: close\r\n\r\n");
    let answer = sluice_api::http::exchange(socket, &head, body)?;
    let status = answer.status;
    let text = answer.read(64 << 20)?;
    let body = serde_json::from_slice(&text).unwrap_or_else(|_| String::from_utf8_lossy(&text).into());
    Ok(Reply { status, body })
}

/// Parses the bytes of an answer.
pub(crate) fn parse(answer: &[u8]) -> Option<Reply> {
    let text = String::from_utf8_lossy(answer);
    let (_, body) = text.split_once("\r\n\r\n")?;
    let body = serde_json::from_str(body).unwrap_or_else(|_| body.into());
    Some(Reply { status: text.get(9..12)?.parse().ok()?, body })
}

/// A connection to a stand-in device.
pub(crate) struct Front {
    stream: BufReader<UnixStream>,
}

impl Front {
    pub(crate) fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("the device's socket");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
        Self { stream: BufReader::new(stream) }
    }

    pub(crate) fn send(&mut self, command: &str) {
        writeln!(self.stream.get_mut(), "{command}").expect("a listening device");
    }

    pub(crate) fn receive(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("an answer");
        line.trim_end().to_owned()
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.receive()
    }

    /// Opens a session. Returns the description that its worker gives of itself.
    pub(crate) fn open(&mut self, session: u32) -> serde_json::Value {
        let answer = self.ask(&format!("open {session}"));
        let text = answer
            .strip_prefix(&format!("worker {session} "))
            .unwrap_or_else(|| panic!("no worker: {answer}"));
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// True if the device has closed the connection.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut line = String::new();
        matches!(self.stream.read_line(&mut line), Ok(0) | Err(_))
    }
}

pub(crate) fn pid_of(value: &serde_json::Value) -> u32 {
    value["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a pid")
}

/// Makes a stand-in a program that every user can execute.
pub(crate) fn make_for_all_users(place: &Place, program: &str) {
    let program = place.libexec().join(program);
    make_program(Path::new(env!("CARGO_BIN_EXE_sluice-stand-in")), &program);
    for path in [place.directory.path(), &place.libexec(), &program] {
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(path, permissions).expect("readable");
    }
}

/// True if a test can run workers as these users: only root can, and only if its user namespace maps them.
pub(crate) fn has_users(first: u64, count: u64) -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").expect("a map");
    let covers = |line: &str| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        matches!(*numbers, [inside, _, many] if inside <= first && first + count <= inside + many)
    };
    rustix::process::geteuid().is_root() && map.lines().any(covers)
}

/// A place in the cgroup v2 tree where a test may make groups.
pub(crate) fn cgroup_directory(test: &str) -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        right.starts_with("cgroup2 ").then(|| left.split(' ').nth(4).map(ToOwned::to_owned))?
    })?;
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
    let directory = Path::new(&mount).join(own).join(format!("sluice-test-{test}-{}", std::process::id()));
    // The directory may be left from a killed test with the same process id.
    _ = std::fs::remove_dir(&directory);
    std::fs::create_dir(&directory).ok()?;
    Some(directory)
}

/// A test's cgroups, which end with it.
pub(crate) struct Cgroup(pub(crate) PathBuf);

impl Cgroup {
    /// The cgroups in it, at every depth, by their paths in it.
    pub(crate) fn groups(&self) -> Vec<String> {
        let (mut found, mut unread) = (Vec::new(), vec![self.0.clone()]);
        while let Some(directory) = unread.pop() {
            // It may have been removed meanwhile.
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            for path in entries.map(|entry| entry.path()).filter(|path| path.is_dir()) {
                found.push(path.strip_prefix(&self.0).expect("a group in it").display().to_string());
                unread.push(path);
            }
        }
        found
    }

    /// The cgroups of workers in it.
    pub(crate) fn workers(&self) -> Vec<String> {
        let mut groups = self.groups();
        groups.retain(|group| group.contains("/worker-"));
        groups
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A failed test may have left processes, and a test without fault groups, in which nothing runs.
        _ = std::fs::write(self.0.join("cgroup.kill"), "1");
        let is_removed = || {
            let mut groups = self.groups();
            groups.sort();
            for group in groups.iter().rev() {
                _ = std::fs::remove_dir(self.0.join(group));
            }
            _ = std::fs::remove_dir(&self.0);
            !self.0.exists()
        };
        if !until(is_removed, |removed| *removed) {
            eprintln!("{} is left", self.0.display());
        }
    }
}

/// Open descriptors of a process.
pub(crate) fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process").count()
}

/// True if the launcher has made a process ahead, which has executed no program yet.
pub(crate) fn is_made_ahead(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.trim_end() == MADE_AHEAD)
}

/// Children of a process, zombies included.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let mut children = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten() {
        let list = match std::fs::read_to_string(thread.path().join("children")) {
            Ok(list) => list,
            // The thread has ended meanwhile.
            Err(_) if !thread.path().exists() => continue,
            Err(error) => panic!("{thread:?}: {error}"),
        };
        children.extend(list.split_whitespace().map(|pid| pid.parse::<u32>().expect("a pid")));
    }
    children
}

/// A process that another one traces.
pub(crate) struct Traced(Child);

impl Traced {
    /// Lets a process not end although it is killed, like one that hangs in a driver.
    pub(crate) fn before_its_end(process: u32) -> Self {
        Self::by_tracer(process, &[])
    }

    /// Keeps the status of a process from its parent when it ends, as a debugger does until its user goes on.
    pub(crate) fn after_its_end(process: u32) -> Self {
        Self::by_tracer(process, &["--after-end"])
    }

    fn by_tracer(process: u32, options: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-stand-in"));
        command.arg0("tracer").arg(process.to_string()).args(options);
        let mut tracer = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a tracer");
        let mut said = [0; 7];
        tracer.stdout.as_mut().expect("piped").read_exact(&mut said).expect("the process is traced");
        assert_eq!(&said, b"traced\n");
        Self(tracer)
    }

    /// Lets the process end.
    pub(crate) fn release(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().expect("ended").success());
    }
}
