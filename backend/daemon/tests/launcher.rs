//! The launcher as its own process. In one file: they share one played `sluiced`. The tests send its requests in the place of `sluiced`.

use std::{
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{fs::PermissionsExt as _, net::UnixStream},
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::common::{
    Cgroup, Place, Traced, cgroup_directory, children, descriptors, has_users, launcher, make_for_all_users,
    pid_of,
};
use rustix::{io::Errno, process::Signal};
use sluice_kit::{
    processes::{is_alive, make_script, signal, wait_gone, watch},
    wait::{eventually, until},
};
use sluice_messages::{
    control::{self, FromLauncher, LaunchRefusal, ToLauncher, WorkerSetup, codec},
    inventory::{Visible, VisibleInstance},
    launch::{device_socket, stream_socket},
};
use sluice_protocol::limits;
use sluice_runtime::process::Identity;
use sluice_shared_memory::socket;

pub(crate) struct Launcher {
    pub(crate) process: Child,
    socket: OwnedFd,
    lifeline: Option<UnixStream>,
}

/// The reason why no process was started.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotStarted {
    Refused(LaunchRefusal),
    Failed(Errno),
}

pub(crate) struct Started {
    pub(crate) pid: u32,
    started: u64,
    socket: OwnedFd,
    pub(crate) pidfd: OwnedFd,
    cgroup_kill: Option<OwnedFd>,
}

impl Launcher {
    pub(crate) fn start(place: &Place, supervised: bool, extra: &[&str]) -> Self {
        let (ours, theirs) = socket::pair().expect("a pair");
        let mut command = Command::new(launcher());
        command.arg("--device").arg(place.libexec().join("sluice-device"));
        command.arg("--worker").arg(place.libexec().join("sluice-worker"));
        command.arg("--arbiter").arg(place.libexec().join("sluice-arbiter")).args(["--units", "2"]);
        command.arg("--inventory").arg(place.libexec().join("sluice-inventory"));
        command.arg("--socket-dir").arg(place.run()).args(["--vm-numbers", "1:2"]).args(extra);
        command.env("SECRET", "of the host").env("CUDA_FORCE_PTX_JIT", "1").env("SLUICE_LOG", "off");
        command.env("SLUICE_SOFTGPU_MEMORY", "1G").env_remove("RUST_BACKTRACE");
        if extra.contains(&"--driver") {
            command.envs([place.softgpu()]);
        }
        if !rustix::process::geteuid().is_root() {
            // In its filter the launcher cannot be dumped, and its descriptors cannot be counted by an ordinary user.
            command.env("SLUICE_SECCOMP", "off");
        }
        let mut lifeline = None;
        if supervised {
            let (ours, theirs) = UnixStream::pair().expect("a pair");
            command.arg("--supervised").stdout(Stdio::from(OwnedFd::from(theirs)));
            lifeline = Some(ours);
        }
        let process = command.stdin(Stdio::from(theirs)).spawn().expect("a launcher");
        Self { process, socket: ours, lifeline }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn receive(&self) -> Result<Started, NotStarted> {
        match self.hear_answer() {
            (FromLauncher::Started { process, started, .. }, descriptors) => {
                let mut descriptors = descriptors.into_iter();
                let (Some(socket), Some(pidfd)) = (descriptors.next(), descriptors.next()) else {
                    panic!("two descriptors at least");
                };
                Ok(Started { pid: process, started, socket, pidfd, cgroup_kill: descriptors.next() })
            }
            (FromLauncher::Refused { refusal }, _) => Err(NotStarted::Refused(refusal)),
            (FromLauncher::Failed { error }, _) => {
                Err(NotStarted::Failed(Errno::from_raw_os_error(error.cast_signed())))
            }
            (answer, _) => panic!("{answer:?} to another question"),
        }
    }

    fn hear_answer(&self) -> (FromLauncher, Vec<OwnedFd>) {
        let mut bytes = [0; control::BYTES];
        let (message, descriptors) =
            socket::receive(&self.socket, &mut bytes).expect("an answer").expect("a launcher");
        let answer = FromLauncher::decode(message).expect("an answer");
        assert_eq!(descriptors.len(), answer.descriptors());
        (answer, descriptors)
    }

    /// Requests a process by its number. Returns its start, and true if the launcher knows it as a worker.
    fn find(&self, process: u32) -> Option<(u64, bool)> {
        self.tell(ToLauncher::Find { process });
        match self.hear_answer().0 {
            FromLauncher::Found { started, worker, .. } => Some((started, worker)),
            FromLauncher::Refused { refusal: LaunchRefusal::NoProcess } => None,
            answer => panic!("{answer:?} to another question"),
        }
    }

    pub(crate) fn ask(&self, request: ToLauncher) -> Result<Started, NotStarted> {
        socket::send(&self.socket, &request.encode(), &[]).expect("a launcher that listens");
        self.receive()
    }

    /// Sends a message that has no answer.
    pub(crate) fn tell(&self, message: ToLauncher) {
        socket::send(&self.socket, &message.encode(), &[]).expect("a launcher that listens");
    }

    pub(crate) fn worker(&self, session: u32) -> Result<Started, NotStarted> {
        self.ask(ToLauncher::StartWorker { vm: 1, session, visible: Visible::Host })
    }

    pub(crate) fn end(mut self) {
        drop(self.socket);
        drop(self.lifeline);
        let status = self.process.wait().expect("a launcher");
        assert!(status.success(), "{status}");
    }
}

impl Started {
    /// The description that a stand-in worker gives of itself.
    pub(crate) fn describe(&self) -> serde_json::Value {
        let setup = WorkerSetup {
            vm: 1,
            session: 9,
            driver: "/d".into(),
            mapped_runs: 9,
            driver_queue: 11,
            devices: 0,
            scrub_every_free: false,
            identity: None,
        };
        socket::send(&self.socket, &codec::encode(&setup).expect("coded"), &[]).expect("a worker");
        let mut bytes = vec![0; 4096];
        let (found, _) = socket::receive(&self.socket, &mut bytes).expect("an answer").expect("a worker");
        serde_json::from_slice(found).expect("JSON")
    }
}

#[test]
fn output_of_kernels_of_a_vm_is_discarded() {
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &[]);
    let started = launcher
        .ask(ToLauncher::StartWorker { vm: 2, session: 1, visible: Visible::Host })
        .expect("a worker");
    assert_eq!(started.describe()["silent"], true);
    drop(started.socket);
    wait_gone(&started.pidfd);
    launcher.end();
}

// Promise: P45
#[test]
fn worker_sees_only_the_device_it_is_started_for() {
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &[]);
    let uuid = 0x0123_4567_89ab_cdef_0011_2233_4455_6677_u128.to_be_bytes();
    for (visible, expected) in [
        (Visible::Host, ""),
        (Visible::Gpu(uuid), "GPU-01234567-89ab-cdef-0011-223344556677"),
        (
            Visible::Instance(VisibleInstance { uuid, ..VisibleInstance::default() }),
            "MIG-01234567-89ab-cdef-0011-223344556677",
        ),
    ] {
        let request = ToLauncher::StartWorker { vm: 1, session: 1, visible };
        let started = launcher.ask(request).expect("a worker");
        assert_eq!(started.describe()["visible"], expected);
        drop(started.socket);
        wait_gone(&started.pidfd);
    }
    launcher.end();
}

// Promise: F7
#[test]
fn worker_has_only_the_descriptors_and_variables_it_is_given() {
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &[]);
    let started = launcher.worker(1).expect("a worker");
    let found = started.describe();
    assert_eq!(pid_of(&found), started.pid);
    assert_eq!(found["fds"], serde_json::json!([0, 1, 2, 3]));
    let mut environment = found["environment"].as_array().expect("names").clone();
    environment.retain(|name| name != "SLUICE_SECCOMP");
    assert_eq!(environment, ["CUDA_FORCE_PTX_JIT", "SLUICE_LOG", "SLUICE_SOFTGPU_MEMORY"]);
    assert_eq!(found["group"], started.pid, "the worker has no process group of its own");
    assert_eq!(found["core"], 0);
    assert_eq!(found["privileges"], false, "the worker can gain privileges");
    assert_eq!(found["capabilities"], 0, "the worker has capabilities");
    drop(started.socket);
    wait_gone(&started.pidfd);
    launcher.end();
}

// Promise: S96
#[test]
fn only_workers_get_machine_code_of_the_software_gpu() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &[]);
    let worker = launcher.worker(1).expect("a worker");
    let arbiter = launcher.ask(ToLauncher::StartArbiter { unit: 0, visible: Visible::Host });
    let inventory = launcher.ask(ToLauncher::StartInventory {}).expect("an inventory");
    let is_interpreted = |started: &Started| {
        let environment = || std::fs::read(format!("/proc/{}/environ", started.pid)).expect("a process");
        // It is empty until the kernel has loaded the program.
        until(environment, |environment| !environment.is_empty())
            .split(|byte| *byte == 0)
            .any(|variable| variable == b"SLUICE_SOFTGPU_JIT=0")
    };
    let all = [worker, arbiter.expect("an arbiter"), inventory];
    assert_eq!(all.each_ref().map(is_interpreted), [false, true, true]);
    launcher.end();
    place.wait_empty();
}

// Promise: A24, F121
#[test]
fn device_is_reachable_at_once_and_a_second_one_is_refused() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &[]);
    let device = launcher
        .ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("a device");
    let socket = place.run().join("vm-1.sock");
    assert_eq!(std::fs::metadata(&socket).expect("a socket").permissions().mode() & 0o777, 0o600);
    let found: serde_json::Value =
        serde_json::from_str(&place.front(1).ask("describe")).expect("a description");
    assert_eq!(found["core"], 0);
    // Root's device has no capability but CAP_SYS_RESOURCE (bit 24), if this host has it.
    let capabilities = found["capabilities"].as_u64().expect("capabilities");
    assert_eq!(capabilities & !(1 << 24), 0, "{capabilities:#x}");
    assert_eq!(
        launcher.ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 }).err(),
        Some(NotStarted::Refused(LaunchRefusal::NotReaped)),
        "a second device of the VM is started"
    );
    assert!(is_alive(&device.pidfd));
    let odd = ToLauncher::StartDevice { vm: 2, scanouts: 0, direct: false, fixed_arena: 5 };
    assert_eq!(
        launcher.ask(odd).err(),
        Some(NotStarted::Refused(LaunchRefusal::OutOfRange)),
        "an arena of 5 bytes"
    );
    let other = launcher
        .ask(ToLauncher::StartDevice { vm: 2, scanouts: 0, direct: false, fixed_arena: 0 })
        .expect("a device for another VM");
    // The next device can start as soon as the end of the first can be seen.
    signal(&device.pidfd, Signal::KILL);
    wait_gone(&device.pidfd);
    let next = launcher
        .ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("the next device");
    launcher.end();
    wait_gone(&next.pidfd);
    wait_gone(&other.pidfd);
}

// Promise: F7, F121
#[test]
fn malformed_request_is_refused_and_changes_nothing() {
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &[]);
    let good = ToLauncher::StartWorker { vm: 1, session: 1, visible: Visible::Host }.encode();
    let mut unknown = good;
    unknown[0] = 0x7f;
    let mut wide = good;
    wide[8..16].fill(0xff);
    let long = [good.as_slice(), &[0; 64]].concat();
    for bytes in [&good[..63], &good[..1], &long, &unknown, &[0xff; control::BYTES], &wide] {
        socket::send(&launcher.socket, bytes, &[]).expect("sent");
        assert_eq!(
            launcher.receive().err(),
            Some(NotStarted::Refused(LaunchRefusal::BadRequest)),
            "{bytes:x?} is accepted"
        );
    }
    let before = descriptors(launcher.pid());
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    for count in [1, 2, 4] {
        socket::send(&launcher.socket, &good, &vec![null.as_fd(); count]).expect("sent");
        assert_eq!(
            launcher.receive().err(),
            Some(NotStarted::Refused(LaunchRefusal::BadRequest)),
            "{count} descriptors are accepted"
        );
    }
    let left = until(|| descriptors(launcher.pid()), |now| *now <= before);
    assert!(left <= before, "{left} descriptors are left of {before}");
    for vm in [0, 3, u32::MAX] {
        assert_eq!(
            launcher.ask(ToLauncher::StartWorker { vm, session: 1, visible: Visible::Host }).err(),
            Some(NotStarted::Refused(LaunchRefusal::OutOfRange))
        );
        assert_eq!(
            launcher.ask(ToLauncher::StartDevice { vm, scanouts: 0, direct: false, fixed_arena: 0 }).err(),
            Some(NotStarted::Refused(LaunchRefusal::OutOfRange))
        );
    }
    assert_eq!(children(launcher.pid()), [] as [u32; 0], "a process was started");
    launcher.worker(1).expect("a worker");
    launcher.end();
}

// Promise: F62
#[test]
fn launcher_serves_no_sluiced_of_another_version() {
    let mut command = Command::new(launcher());
    command.args(["--device", "/none", "--worker", "/none", "--socket-dir", "/none", "--messages", "999"]);
    let output = command.stdin(Stdio::null()).output().expect("the launcher");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("speaks version 999"), "{said}");
}

#[test]
fn missing_program_is_an_error() {
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &[]);
    std::fs::remove_file(place.libexec().join("sluice-worker")).expect("removed");
    // The first answer proves that the launcher is set up.
    assert_eq!(launcher.worker(0).err(), Some(NotStarted::Failed(Errno::NOENT)));
    let before = descriptors(launcher.pid());
    for session in 0..50 {
        assert_eq!(launcher.worker(session).err(), Some(NotStarted::Failed(Errno::NOENT)));
    }
    let left = until(|| descriptors(launcher.pid()), |now| *now <= before);
    assert!(left <= before, "{left} descriptors are left of {before}");
    assert_eq!(until(|| children(launcher.pid()), Vec::is_empty), [] as [u32; 0]);
    launcher.end();
}

#[test]
fn thousand_starts_leave_no_descriptor_and_no_zombie() {
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &[]);
    // The first start creates the resources that all starts share.
    wait_gone(&launcher.worker(0).map(|started| started.pidfd).expect("a worker"));
    let idle = || descriptors(launcher.pid());
    let nothing =
        |session| launcher.ask(ToLauncher::StartWorker { vm: 99, session, visible: Visible::Host }).err();
    assert_eq!(nothing(0), Some(NotStarted::Refused(LaunchRefusal::OutOfRange)));
    let before = idle();
    for session in 0..1000 {
        let Started { socket, pidfd, .. } = launcher.worker(session).expect("a worker");
        drop(socket);
        // Half of the workers end before the next start.
        if session % 2 == 0 {
            wait_gone(&pidfd);
        }
    }
    // Each refused request gives the launcher a turn, in which it waits for its children.
    let left = until(
        || {
            assert_eq!(nothing(1), Some(NotStarted::Refused(LaunchRefusal::OutOfRange)));
            children(launcher.pid())
        },
        Vec::is_empty,
    );
    assert_eq!(left, [] as [u32; 0], "children were not waited for");
    let left = until(idle, |now| *now <= before);
    assert!(left <= before, "{left} descriptors are left of {before}");
    launcher.end();
}

// Promise: F121
#[test]
fn workers_of_a_vm_are_bounded() {
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &[]);
    let bound = u32::try_from(limits::SESSIONS).expect("small");
    let mut workers: Vec<Started> =
        (0..bound).map(|session| launcher.worker(session).expect("a worker")).collect();
    assert_eq!(launcher.worker(bound).err(), Some(NotStarted::Refused(LaunchRefusal::TooMany)));
    let other = launcher
        .ask(ToLauncher::StartWorker { vm: 2, session: 0, visible: Visible::Host })
        .expect("another VM's worker");
    let Started { socket, pidfd, .. } = workers.pop().expect("a worker");
    drop(socket);
    wait_gone(&pidfd);
    workers.push(launcher.worker(bound).expect("a worker within the bound"));
    for Started { socket, pidfd, .. } in workers.into_iter().chain([other]) {
        drop(socket);
        wait_gone(&pidfd);
    }
    launcher.end();
}

#[test]
fn children_without_a_supervisor_outlive_the_launcher() {
    let place = Place::new();
    let mut launcher = Launcher::start(&place, false, &[]);
    let device = launcher
        .ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("a device");
    let worker = launcher.worker(1).expect("a worker");
    launcher.process.kill().expect("killed");
    launcher.process.wait().expect("ended");
    assert_eq!(pid_of(&worker.describe()), worker.pid, "the worker still works");
    assert!(place.front(1).ask("describe").contains("fds"), "the device still works");
    drop(worker.socket);
    wait_gone(&worker.pidfd);
    signal(&device.pidfd, Signal::KILL);
    wait_gone(&device.pidfd);
}

#[test]
fn supervised_children_outlive_sluiced_but_not_the_supervisor() {
    let place = Place::new();
    let mut launcher = Launcher::start(&place, true, &[]);
    let lifeline = launcher.lifeline.take();
    let device = launcher
        .ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("a device");
    let worker = launcher.worker(1).expect("a worker");
    let dead = launcher.worker(2).expect("a worker");
    let Launcher { mut process, socket, .. } = launcher;
    drop(socket);
    // Without sluiced, the launcher still waits for its children.
    drop(dead.socket);
    wait_gone(&dead.pidfd);
    assert_eq!(pid_of(&worker.describe()), worker.pid, "the worker still works");
    assert!(place.front(1).ask("describe").contains("fds"), "the device still works");
    assert!(process.try_wait().expect("a launcher").is_none(), "the launcher has ended");
    drop(lifeline);
    assert!(process.wait().expect("a launcher").success());
    // The launcher reaped them before it ended: there is no process to wait for.
    assert!(!is_alive(&device.pidfd));
    assert!(!is_alive(&worker.pidfd));
    assert!(watch(device.pid).is_none());
}

// Promise: F117
#[test]
fn child_whose_status_a_debugger_has_costs_the_launcher_no_time_and_is_reaped_later() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &[]);
    let worker = launcher.worker(1).expect("a worker");
    let debugger = Traced::after_its_end(worker.pid);
    signal(&worker.pidfd, Signal::KILL);
    wait_gone(&worker.pidfd);
    // A launcher that is woken again and again never sleeps.
    eventually("the launcher sleeps", || {
        (0..20).all(|_| {
            std::thread::sleep(Duration::from_millis(5));
            is_asleep(launcher.pid())
        })
    });
    assert!(children(launcher.pid()).contains(&worker.pid), "the launcher has waited for the worker");
    launcher.worker(2).expect("another worker");
    debugger.release();
    eventually("the worker is reaped", || !children(launcher.pid()).contains(&worker.pid));
    launcher.end();
    place.wait_empty();
}

// Promise: F117
#[test]
fn launcher_ends_beside_debuggers_of_its_killed_children() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &[]);
    let workers = [1, 2].map(|session| launcher.worker(session).expect("a worker"));
    let debuggers = [Traced::before_its_end(workers[0].pid), Traced::after_its_end(workers[1].pid)];
    let Launcher { mut process, socket, lifeline } = launcher;
    drop((socket, lifeline));
    let status = until(|| process.try_wait().expect("a launcher"), Option::is_some);
    if status.is_none() {
        process.kill().expect("killed");
        process.wait().expect("ended");
    }
    assert!(status.is_some_and(|status| status.success()), "the launcher waits for debuggers");
    for debugger in debuggers {
        debugger.release();
    }
    for worker in &workers {
        wait_gone(&worker.pidfd);
    }
    place.wait_empty();
}

/// True if a process sleeps.
fn is_asleep(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a process");
    status.contains("\nState:\tS ")
}

#[test]
fn supervised_children_die_with_a_killed_launcher() {
    let place = Place::new();
    let mut launcher = Launcher::start(&place, true, &[]);
    let device = launcher
        .ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("a device");
    let worker = launcher.worker(1).expect("a worker");
    launcher.process.kill().expect("killed");
    launcher.process.wait().expect("ended");
    wait_gone(&device.pidfd);
    wait_gone(&worker.pidfd);
}

// Promise: F7, F86, F100, F121
#[test]
fn each_worker_runs_as_a_user_of_its_own() {
    if !has_users(4_000_000, 2) {
        sluice_skip::skip("needs root, and users 4000000 and 4000001");
        return;
    }
    let Some(directory) = cgroup_directory("users").map(Cgroup) else {
        sluice_skip::skip("no cgroup v2 directory can be made");
        return;
    };
    let place = Place::new();
    make_for_all_users(&place, "sluice-worker");
    let cgroup = directory.0.to_str().expect("UTF-8");
    let launcher = Launcher::start(&place, false, &["--worker-uids", "4000000:2", "--cgroup", cgroup]);
    let uid = |started: &Started| started.describe()["uid"].as_u64().expect("a uid");
    let first = launcher.worker(1).expect("a worker");
    let second = launcher.worker(2).expect("a worker");
    assert_eq!((uid(&first), uid(&second)), (4_000_000, 4_000_001));
    assert_eq!(
        launcher.worker(3).err(),
        Some(NotStarted::Refused(LaunchRefusal::NoUser)),
        "two workers have one user"
    );
    drop(first.socket);
    wait_gone(&first.pidfd);
    let third = launcher.worker(4).expect("a worker");
    assert_eq!(uid(&third), 4_000_000);
    // The kernel counts its threads apart.
    assert_eq!(limit_of(third.pid, "Max processes"), ["1024", "1024"]);
    for worker in [second, third] {
        // A process without any capability, of another user, ends a worker by its cgroup.
        let kill = worker.cgroup_kill.expect("a worker in a cgroup");
        let mut printf = Command::new("printf");
        std::os::unix::process::CommandExt::uid(&mut printf, 65534);
        let status = printf.arg("1").stdout(kill).status().expect("a program");
        assert!(status.success(), "{status}");
        wait_gone(&worker.pidfd);
    }
    launcher.end();
    std::fs::remove_dir(&directory.0).expect("no group is left");
}

// Promise: F86
#[test]
fn workers_are_no_users_of_their_own_without_a_cgroup_directory() {
    let place = Place::new();
    let plain = place.directory.path().to_str().expect("UTF-8");
    for (extra, reason) in [(&[][..], "none is configured"), (&["--cgroup", plain], "no cgroup of version 2")]
    {
        let mut command = Command::new(launcher());
        command.args([
            "--device",
            "/none",
            "--worker",
            "/none",
            "--socket-dir",
            "/none",
            "--vm-numbers",
            "1:2",
        ]);
        command.args(["--worker-uids", "4000000:2"]).args(extra);
        let (_ours, theirs) = socket::pair().expect("a pair");
        let output = command.stdin(Stdio::from(theirs)).output().expect("the launcher");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(reason), "{said}");
    }
    // Without users of their own they are ended by their pidfds.
    let launcher = Launcher::start(&place, false, &["--cgroup", plain]);
    let worker = launcher.worker(1).expect("a worker");
    assert!(worker.cgroup_kill.is_none());
    signal(&worker.pidfd, Signal::KILL);
    wait_gone(&worker.pidfd);
    launcher.end();
}

// Promise: F86
#[test]
fn limit_of_a_vm_that_is_out_of_its_range_is_refused() {
    let mut arguments = vec!["--device", "/none", "--worker", "/none", "--socket-dir", "/none"];
    arguments.extend(["--vm-numbers", "1:2"]);
    for (option, value) in [
        ("--vm-memory", "1000000"),
        ("--vm-memory", "18446744073709551615"),
        ("--vm-tasks", "0"),
        ("--worker-tasks", "4194305"),
        ("--vm-cpu-weight", "10001"),
        ("--vm-swap", "max"),
    ] {
        let mut command = Command::new(launcher());
        let output = command.args(&arguments).args([option, value]).stdin(Stdio::null()).output();
        let output = output.expect("the launcher");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(option), "{said}");
    }
}

// Promise: F86
#[test]
fn each_process_has_a_cgroup_and_the_launcher_one_beside() {
    let Some(directory) = cgroup_directory("tree").map(Cgroup) else {
        sluice_skip::skip("no cgroup v2 directory can be made");
        return;
    };
    let place = Place::new();
    // Processes of an earlier start, in the directory itself.
    let mut earlier = Command::new("sleep").arg("1000").spawn().expect("a process");
    std::fs::write(directory.0.join("cgroup.procs"), earlier.id().to_string()).expect("moved");
    let launcher = Launcher::start(&place, true, &["--cgroup", directory.0.to_str().expect("UTF-8")]);
    let device = launcher
        .ask(ToLauncher::StartDevice { vm: 2, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("a device");
    let worker = launcher.worker(1).expect("a worker");
    let arbiter =
        launcher.ask(ToLauncher::StartArbiter { unit: 0, visible: Visible::Host }).expect("an arbiter");
    let probe = launcher.ask(ToLauncher::StartProbe { unit: 0, visible: Visible::Host }).expect("a probe");
    let group = |pid: u32| {
        let all = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a cgroup");
        let own = all.lines().find_map(|line| line.strip_prefix("0::")).expect("a group").to_owned();
        let directory = directory.0.file_name().expect("a name").to_str().expect("UTF-8");
        own.split_once(&format!("/{directory}")).map(|(_, group)| group.to_owned())
    };
    let starts = |pid: u32, name: &str| group(pid).is_some_and(|group| group.starts_with(name));
    assert!(starts(device.pid, "/vm-2/device-"), "{:?}", group(device.pid));
    assert!(starts(worker.pid, "/vm-1/worker-"), "{:?}", group(worker.pid));
    assert!(starts(probe.pid, "/probes/worker-"), "{:?}", group(probe.pid));
    assert_eq!(group(earlier.id()).as_deref(), Some("/daemon"));
    // An old systemd starts each `sluiced` in the directory itself, also one that adopts this launcher.
    std::fs::write(directory.0.join("cgroup.procs"), earlier.id().to_string()).expect("moved");
    launcher.tell(ToLauncher::Settle {});
    assert!(matches!(launcher.hear_answer().0, FromLauncher::Settled {}));
    assert_eq!(group(earlier.id()).as_deref(), Some("/daemon"));
    assert!(starts(arbiter.pid, "/host/arbiter-"), "{:?}", group(arbiter.pid));
    assert!([&device, &arbiter, &worker, &probe].iter().all(|started| started.cgroup_kill.is_some()));
    earlier.kill().expect("killed");
    earlier.wait().expect("ended");
    launcher.end();
    std::fs::remove_dir(directory.0.join("daemon")).expect("an empty group");
    std::fs::remove_dir(&directory.0).expect("no group is left");
}

// Promise: F86
#[test]
fn worker_ends_before_other_processes_when_memory_is_short() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &[]);
    let device = launcher
        .ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("a device");
    let worker = launcher.worker(1).expect("a worker");
    let adjustment = |pid: u32| -> i32 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("a process");
        text.trim().parse().expect("a number")
    };
    assert_eq!(adjustment(worker.pid), 500);
    for other in [launcher.pid(), device.pid] {
        assert_eq!(adjustment(other), adjustment(std::process::id()));
    }
    launcher.end();
}

/// The soft and the hard limit in the kernel's list of a process.
fn limit_of(process: u32, name: &str) -> [String; 2] {
    let text = std::fs::read_to_string(format!("/proc/{process}/limits")).expect("a process");
    let rest = text.lines().find_map(|line| line.strip_prefix(name)).expect("a limit of the kernel");
    let mut words = rest.split_whitespace().map(str::to_owned);
    [words.next().expect("a soft limit"), words.next().expect("a hard limit")]
}

// Promise: F100
#[test]
fn process_of_each_role_has_the_resource_limits_of_its_role() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &["--vm-memory", "1073741824"]);
    let host = Visible::Host;
    let device = ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 };
    let device = launcher.ask(device).expect("a device");
    let worker = launcher.worker(1).expect("a worker");
    let probe = launcher.ask(ToLauncher::StartProbe { unit: 0, visible: host }).expect("a probe");
    let arbiter = launcher.ask(ToLauncher::StartArbiter { unit: 0, visible: host }).expect("an arbiter");
    let inventory = launcher.ask(ToLauncher::StartInventory {}).expect("an inventory");
    let inherited = |name| limit_of(launcher.pid(), name);
    // Descriptors, size of a file, locked memory.
    let (files, locked) = (inherited("Max file size"), inherited("Max locked memory"));
    let stream = [limits::STREAM_BYTES.to_string(), limits::STREAM_BYTES.to_string()];
    let none = ["0".to_owned(), "0".to_owned()];
    for (role, started, descriptors, file, lock) in [
        ("device", &device, "8192", &stream, &none),
        ("worker", &worker, "4096", &files, &locked),
        ("probe", &probe, "4096", &files, &locked),
        ("arbiter", &arbiter, "65536", &files, &locked),
        ("inventory", &inventory, "1024", &files, &locked),
    ] {
        let of = |name| limit_of(started.pid, name);
        // The host may permit fewer.
        let [_, most] = inherited("Max open files");
        let fewer =
            |most: &str| most.parse::<u64>().is_ok_and(|most| most < descriptors.parse().expect("a number"));
        let descriptors = if fewer(&most) { &most } else { descriptors };
        assert_eq!(of("Max open files"), [descriptors, descriptors], "{role}");
        assert_eq!((&of("Max file size"), &of("Max locked memory")), (file, lock), "{role}");
        for (name, limit) in [
            ("Max data size", "3221225472"),
            ("Max stack size", "8388608"),
            ("Max pending signals", "64"),
            ("Max core file size", "0"),
            ("Max msgqueue size", "0"),
            ("Max nice priority", "0"),
            ("Max realtime priority", "0"),
        ] {
            assert_eq!(of(name), [limit, limit], "{role}: {name}");
        }
        // Its threads are counted with those of all processes of the user.
        assert_eq!(of("Max processes"), inherited("Max processes"), "{role}");
    }
    launcher.end();
}

#[test]
fn cgroup_ends_processes_that_a_worker_has_forked() {
    let Some(directory) = cgroup_directory("forked") else {
        sluice_skip::skip("no cgroup v2 directory can be made");
        return;
    };
    let place = Place::new();
    let directory = Cgroup(directory);
    // A worker that has broken out of its filter: its child leaves the process group and holds no socket.
    let worker = place.libexec().join("sluice-worker");
    let fifo = place.directory.path().join("fifo");
    let sleeper = place.libexec().join("sleeper");
    std::os::unix::fs::symlink("/bin/sleep", &sleeper).expect("a link");
    let script = format!(
        "#!/bin/sh\nsetsid sh -c 'echo $$ > {}; exec {} 1000' 3<&- &\nwait\n",
        fifo.display(),
        sleeper.display()
    );
    std::fs::remove_file(&worker).expect("a stand-in");
    make_script(&worker, &script);
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).expect("a fifo");

    let launcher = Launcher::start(&place, false, &["--cgroup", directory.0.to_str().expect("UTF-8")]);
    let started = launcher.worker(1).expect("a worker");
    let forked = std::fs::read_to_string(&fifo).expect("a pid").trim().parse::<u32>().expect("a pid");
    let forked = watch(forked).expect("a process");
    let group = std::fs::read_to_string(format!("/proc/{}/cgroup", started.pid)).expect("a cgroup");
    assert!(group.contains("/vm-1/worker-"), "{group}");
    assert!(is_alive(&forked));
    signal(&started.pidfd, Signal::KILL);
    wait_gone(&started.pidfd);
    wait_gone(&forked);
    let groups = || {
        // The launcher tries again to remove a busy group when it starts or ends another worker.
        let another = launcher.worker(2).expect("a worker");
        signal(&another.pidfd, Signal::KILL);
        wait_gone(&another.pidfd);
        assert_eq!(
            launcher
                .ask(ToLauncher::StartDevice { vm: 99, scanouts: 0, direct: false, fixed_arena: 0 })
                .err(),
            Some(NotStarted::Refused(LaunchRefusal::OutOfRange))
        );
        directory.workers().len()
    };
    // The last group may contain a dying child; the launcher waits for it at the end.
    assert!(until(groups, |&count| count <= 1) <= 1, "groups are left");
    launcher.end();
    std::fs::remove_dir(&directory.0).expect("no group is left");
}

// Promise: F61, F74
#[test]
fn processes_in_cgroups_of_an_earlier_launcher_are_ended() {
    let Some(directory) = cgroup_directory("before") else {
        sluice_skip::skip("no cgroup v2 directory can be made");
        return;
    };
    let directory = Cgroup(directory);
    // Groups of this version and, without a group of the VM, of earlier ones.
    let [left, empty, flat, flat_empty, device, other] =
        ["vm-9/worker-3", "vm-9/worker-4", "vm-9-worker-5", "vm-8-worker-6", "vm-9/device-7", "another"].map(
            |name| {
                let group = directory.0.join(name);
                std::fs::create_dir_all(&group).expect("a group");
                group
            },
        );
    let sleep_in = |group: &Path| {
        let sleeper = Command::new("sleep").arg("1000").spawn().expect("a process");
        std::fs::write(group.join("cgroup.procs"), sleeper.id().to_string()).expect("moved");
        sleeper
    };
    let (sleepers, mut of_device) = ([sleep_in(&left), sleep_in(&flat)], sleep_in(&device));
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &["--cgroup", directory.0.to_str().expect("UTF-8")]);
    launcher.tell(ToLauncher::Sweep {});
    for mut sleeper in sleepers {
        let status = sleeper.wait().expect("a status");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    }
    assert!(of_device.try_wait().expect("a status").is_none(), "a device was ended");
    // A new worker gets a number beyond all of the earlier ones.
    let worker = launcher.worker(1).expect("a worker");
    let group = std::fs::read_to_string(format!("/proc/{}/cgroup", worker.pid)).expect("a cgroup");
    let number = group.trim().rsplit_once("/vm-1/worker-").and_then(|(_, number)| number.parse().ok());
    assert!(number.is_some_and(|number: u64| number > 7), "{group}");
    // The device's group is removed at the end, after the device.
    of_device.kill().expect("killed");
    of_device.wait().expect("ended");
    drop(worker.socket);
    wait_gone(&worker.pidfd);
    launcher.end();
    assert!([left, empty, flat, flat_empty, device].iter().all(|group| !group.exists()));
    std::fs::remove_dir(other).expect("a foreign group stays");
    std::fs::remove_dir(&directory.0).expect("no group is left");
}

// Promise: F44
#[test]
fn launcher_finds_processes_that_it_started_or_was_told_to_keep_and_no_other() {
    let place = Place::new();
    let mut first = Launcher::start(&place, false, &[]);
    let start_of = |process: u32| Identity::of(process).expect("a living process").started;
    let device = first
        .ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("a device");
    let [worker, kept, unnamed] = [1, 2, 3].map(|session| first.worker(session).expect("a worker"));
    assert_eq!(first.find(device.pid), Some((start_of(device.pid), false)));
    assert_eq!(first.find(worker.pid), Some((start_of(worker.pid), true)));
    assert_eq!(worker.started, start_of(worker.pid));
    assert_eq!(first.find(std::process::id()), None, "a process of another parent is found");
    signal(&worker.pidfd, Signal::KILL);
    wait_gone(&worker.pidfd);
    assert_eq!(until(|| first.find(worker.pid), Option::is_none), None);

    let kept_start = start_of(kept.pid);
    first.process.kill().expect("killed");
    first.process.wait().expect("ended");
    let second = Launcher::start(&place, false, &[]);
    second.tell(ToLauncher::KeepWorker { process: kept.pid, started: kept_start });
    second.tell(ToLauncher::Sweep {});
    assert_eq!(second.find(unnamed.pid), None, "a worker that it was not told to keep is found");
    assert_eq!(second.find(kept.pid), Some((kept_start, true)));
    for left in [kept, unnamed, device] {
        assert!(is_alive(&left.pidfd));
        signal(&left.pidfd, Signal::KILL);
        wait_gone(&left.pidfd);
    }
    second.end();
}

// Promise: F74, F121
#[test]
fn sockets_of_a_vm_are_removed_when_its_device_does_not_run() {
    let place = Place::new();
    let launcher = Launcher::start(&place, false, &[]);
    let device = launcher
        .ask(ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: true, fixed_arena: 0 })
        .expect("a device");
    let sockets = [device_socket(&place.run(), 1), stream_socket(&place.run(), 1)];
    let remove = |vm| {
        launcher.tell(ToLauncher::RemoveSockets { vm });
        launcher.hear_answer().0
    };
    let refused = |refusal| FromLauncher::Refused { refusal };
    assert_eq!(remove(1), refused(LaunchRefusal::DeviceRuns));
    assert_eq!(remove(99), refused(LaunchRefusal::OutOfRange), "a VM that is not the launcher's");
    assert!(sockets.iter().all(|socket| socket.exists()));
    signal(&device.pidfd, Signal::KILL);
    wait_gone(&device.pidfd);
    assert_eq!(until(|| remove(1), |answer| *answer == FromLauncher::Settled {}), FromLauncher::Settled {});
    assert!(!sockets.iter().any(|socket| socket.exists()));
    assert_eq!(remove(1), FromLauncher::Settled {}, "a removal can be repeated");
    launcher.end();
}

#[test]
fn second_arbiter_of_a_unit_and_an_unknown_unit_are_refused() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &[]);
    let arbiter =
        launcher.ask(ToLauncher::StartArbiter { unit: 1, visible: Visible::Host }).expect("an arbiter");
    assert_eq!(
        launcher.ask(ToLauncher::StartArbiter { unit: 1, visible: Visible::Host }).err(),
        Some(NotStarted::Refused(LaunchRefusal::NotReaped))
    );
    assert_eq!(
        launcher.ask(ToLauncher::StartArbiter { unit: 2, visible: Visible::Host }).err(),
        Some(NotStarted::Refused(LaunchRefusal::OutOfRange))
    );
    drop(
        launcher
            .ask(ToLauncher::StartArbiter { unit: 0, visible: Visible::Host })
            .expect("an arbiter of another unit"),
    );
    signal(&arbiter.pidfd, Signal::KILL);
    wait_gone(&arbiter.pidfd);
    let again =
        until(|| launcher.ask(ToLauncher::StartArbiter { unit: 1, visible: Visible::Host }), Result::is_ok)
            .expect("an arbiter");
    assert_ne!(again.pid, arbiter.pid);
    launcher.end();
    place.wait_empty();
}

// Promise: Q66
#[test]
fn probe_is_a_worker_without_vm_and_a_second_one_is_refused() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &[]);
    let probe = |unit| launcher.ask(ToLauncher::StartProbe { unit, visible: Visible::Ordinal(3) });
    let first = probe(1).expect("a probe");
    let found = first.describe();
    assert_eq!(
        (&found["visible"], &found["silent"], &found["probe"]),
        (&"3".into(), &true.into(), &true.into())
    );
    assert_eq!((&found["fds"], &found["capabilities"]), (&serde_json::json!([0, 1, 2, 3]), &0.into()));
    assert_eq!(launcher.worker(1).expect("a worker").describe()["probe"], false);
    assert_eq!(probe(1).err(), Some(NotStarted::Refused(LaunchRefusal::NotReaped)));
    assert_eq!(probe(2).err(), Some(NotStarted::Refused(LaunchRefusal::OutOfRange)));
    signal(&first.pidfd, Signal::KILL);
    wait_gone(&first.pidfd);
    until(|| probe(1), Result::is_ok).expect("the next probe");
    launcher.end();
    place.wait_empty();
}

// Promise: F121
#[test]
fn inventory_that_cannot_be_killed_is_replaced() {
    let place = Place::new();
    let launcher = Launcher::start(&place, true, &[]);
    let first = launcher.ask(ToLauncher::StartInventory {}).expect("an inventory");
    let second = launcher.ask(ToLauncher::StartInventory {}).expect("a second inventory");
    assert_ne!(first.pid, second.pid);
    // Each runs as long as its socket is open.
    let _others = [(); 2].map(|()| launcher.ask(ToLauncher::StartInventory {}).expect("another inventory"));
    let beyond = launcher.ask(ToLauncher::StartInventory {}).err();
    assert_eq!(beyond, Some(NotStarted::Refused(LaunchRefusal::TooMany)));
    launcher.end();
    place.wait_empty();
}
