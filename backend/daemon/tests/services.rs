//! `sluiced` without any privilege or sight of other users' processes, and its launcher as a service of its own. The test is the
//! service manager of both. Device, worker and arbiter are stand-ins.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use crate::common::{
    Cgroup, Daemon, DaemonBuilder, Place, SLUICED, cgroup_directory, has_users, launcher, make_for_all_users,
    pid_of,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::Signal,
};
use serde_json::{Value, json};
use sluice_kit::{
    processes::{is_alive, signal, wait_gone, watch},
    service_manager::ServiceManager,
    wait::{eventually, until},
};
use sluice_messages::{
    channel::{Channel, Received},
    control::{FromLauncher, LaunchRefusal, ToLauncher},
    inventory::Visible,
    launch::Fingerprint,
};
use sluice_runtime::process::Identity;

/// The user and the group of `sluiced`.
const USER: u32 = 4_100_000;
/// Users for the processes that the launcher starts.
const USERS: &str = "4000000:64";
/// Mounts a `/proc` without processes of other users, as `ProtectProc=invisible` does for the service.
const HIDE: &str = "mount -t proc -o hidepid=invisible proc /proc";
/// Period of the checks of the played service manager.
const CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// The socket of a launcher, which starts with the first connection to it, as systemd does it.
struct LauncherService {
    path: PathBuf,
    process: Arc<Mutex<Option<Child>>>,
    stop: Arc<AtomicBool>,
    /// True while no launcher is started.
    away: Arc<AtomicBool>,
    manager: Option<JoinHandle<()>>,
}

impl LauncherService {
    /// `command` makes the command for the next launcher.
    fn start(path: PathBuf, command: impl Fn() -> Command + Send + 'static) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .expect("a socket");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).expect("a path")).expect("bound");
        rustix::net::listen(&listener, 16).expect("listening");
        std::os::unix::fs::chown(&path, None, Some(USER)).expect("the group of sluiced");
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o660);
        std::fs::set_permissions(&path, permissions).expect("a mode");
        let (process, stop) = (Arc::<Mutex<Option<Child>>>::default(), Arc::<AtomicBool>::default());
        let away = Arc::<AtomicBool>::default();
        let (shared, stopped, is_away) = (Arc::clone(&process), Arc::clone(&stop), Arc::clone(&away));
        let manager = thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                let mut polled = [PollFd::new(&listener, PollFlags::IN)];
                let called = matches!(poll(&mut polled, Some(&CHECK)), Ok(1..));
                let mut process = shared.lock().expect("unpoisoned");
                let runs =
                    process.as_mut().is_some_and(|process| process.try_wait().expect("a child").is_none());
                if called && !runs && !is_away.load(Ordering::SeqCst) {
                    let socket = listener.try_clone().expect("a copy");
                    *process = Some(command().stdin(Stdio::from(socket)).spawn().expect("a launcher"));
                }
            }
        });
        Self { path, process, stop, away, manager: Some(manager) }
    }

    /// A new connection to the launcher.
    fn connect(&self) -> Channel<FromLauncher, ToLauncher> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .expect("a socket");
        let address = SocketAddrUnix::new(&self.path).expect("a path");
        rustix::net::connect(&socket, &address).expect("connected");
        Channel::new(socket)
    }

    /// The configuration of the running launcher.
    fn configuration(&self) -> Fingerprint {
        let command = std::fs::read_to_string(format!("/proc/{}/cmdline", self.pid().expect("a launcher")));
        let command = command.expect("a command line");
        let mut words = command.split('\0').skip_while(|word| *word != "--service");
        words.nth(1).expect("a fingerprint").parse().expect("a fingerprint")
    }

    fn pid(&self) -> Option<u32> {
        self.process.lock().expect("unpoisoned").as_ref().map(Child::id)
    }

    fn kill(&self) {
        let mut process = self.process.lock().expect("unpoisoned");
        if let Some(process) = process.as_mut() {
            process.kill().expect("killed");
            process.wait().expect("ended");
        }
    }
}

impl Drop for LauncherService {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.manager.take().into_iter().for_each(|manager| manager.join().expect("no panic"));
        self.kill();
    }
}

/// Both services, with the directories that packages make for them.
struct Services {
    cgroup: Cgroup,
    /// Further options of both.
    options: Arc<Mutex<Vec<String>>>,
    launcher: LauncherService,
    /// Receives the launcher's reports that it is alive.
    watchdog: ServiceManager,
    manager: ServiceManager,
    place: Place,
}

impl Services {
    fn new(test: &str) -> Option<Self> {
        if !has_users(4_000_000, 200_000) {
            sluice_skip::skip("needs root, and users from 4000000");
            return None;
        }
        let hides = Command::new("unshare").args(["--mount", "sh", "-c", HIDE]).status();
        if !hides.is_ok_and(|status| status.success()) {
            sluice_skip::skip("no /proc without processes of other users can be mounted");
            return None;
        }
        let Some(cgroup) = cgroup_directory(test).map(Cgroup) else {
            sluice_skip::skip("no cgroup v2 directory can be made");
            return None;
        };
        let place = Place::new();
        for program in ["sluice-device", "sluice-worker", "sluice-arbiter", "sluice-inventory"] {
            make_for_all_users(&place, program);
        }
        // Stand-ins listen beside their programs.
        for (path, mode) in [(place.libexec(), 0o1777), (place.run(), 0o1775)] {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(path, permissions).expect("a mode");
        }
        std::os::unix::fs::chown(place.run(), None, Some(USER)).expect("the group of sluiced");
        let state = place.directory.path().join("state");
        std::fs::create_dir(&state).expect("a directory");
        std::os::unix::fs::chown(&state, Some(USER), Some(USER)).expect("the user of sluiced");
        let socket = place.directory.path().join("notify.sock");
        let manager = ServiceManager::new(&socket);
        std::os::unix::fs::chown(socket, Some(USER), None).expect("the user of sluiced");
        let options = Arc::new(Mutex::new(vec![
            "--runtime-dir".to_owned(),
            place.run().display().to_string(),
            "--libexec".to_owned(),
            place.libexec().display().to_string(),
            "--driver".to_owned(),
            place.driver().display().to_string(),
            "--cgroup".to_owned(),
            cgroup.0.display().to_string(),
            "--vm-numbers".to_owned(),
            "7:100".to_owned(),
            "--worker-uids".to_owned(),
            USERS.to_owned(),
        ]));
        let shared = Arc::clone(&options);
        let notify = place.directory.path().join("notify-launcher.sock");
        let watchdog = ServiceManager::new(&notify);
        let softgpu = place.softgpu();
        let launcher = LauncherService::start(place.run().join("launcher.sock"), move || {
            let mut command = Command::new(SLUICED);
            command.env("NOTIFY_SOCKET", &notify).env("WATCHDOG_USEC", "300000").envs([softgpu.clone()]);
            command.args(&*shared.lock().expect("unpoisoned")).arg("--run-launcher");
            command.env("SLUICE_LOG", std::env::var("SLUICE_LOG").unwrap_or_else(|_| "off".to_owned()));
            command
        });
        Some(Self { cgroup, options, launcher, watchdog, manager, place })
    }

    fn sluiced(&self) -> DaemonBuilder<'_> {
        let script =
            format!("{HIDE} && exec setpriv --reuid {USER} --regid {USER} --clear-groups {SLUICED:?} \"$@\"");
        let mut command = self.manager.command("unshare");
        command.args(["--mount", "sh", "-c", &script, "sluiced"]);
        let options = self.options.lock().expect("unpoisoned").clone();
        let state = self.place.directory.path().join("state");
        DaemonBuilder::new(&self.place, command)
            .args(options.iter().skip(6))
            .units(1)
            .args(["--launcher".as_ref(), self.launcher.path.as_os_str()])
            .args(["--state-dir".as_ref(), state.as_os_str()])
    }

    /// Ends both services. Nothing is left.
    fn end(self, daemon: Daemon) {
        daemon.end();
        self.place.wait_empty_but(self.launcher.pid());
        drop(self.launcher);
        let groups = until(|| self.cgroup.groups(), |groups| groups.iter().all(|group| group == "daemon"));
        assert!(groups.iter().all(|group| group == "daemon"), "{groups:?}");
        let left = std::fs::read_dir(self.place.run()).expect("a directory");
        let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
        assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("vm-")), "{left:?}");
    }
}

/// The lines of a process's status with these names.
fn status(process: u32, names: &[&str]) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a living process");
    let value = |name: &&str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:"))).expect("a line");
        line.split_whitespace().next().expect("a value").to_owned()
    };
    names.iter().map(value).collect()
}

// Promise: F95
#[test]
fn sluiced_without_privilege_starts_fences_and_ends_processes_of_other_users() {
    let Some(services) = Services::new("services") else { return };
    let place = &services.place;
    let mut daemon = services.sluiced().serve();
    let user = USER.to_string();
    let none = "0000000000000000".to_owned();
    let capabilities = [none.clone(), none.clone(), none];
    assert_eq!(status(daemon.pid(), &["CapPrm", "CapEff", "CapAmb"]), capabilities);
    assert_eq!(status(daemon.pid(), &["Uid", "Gid"]), [user.clone(), user]);
    place.make_direct([7, 8]);
    let mut fronts = [place.front(7), place.front(8)];
    let workers: Vec<OwnedFd> =
        fronts.iter_mut().map(|front| watch(pid_of(&front.open(1))).expect("a process")).collect();
    let before = (place.launcher_process(), place.vm(7)["device_process"].clone());
    assert_eq!(before.0, json!(services.launcher.pid()));
    let alive = until(|| services.watchdog.notifications().alive, |alive| *alive > 2);
    assert!(alive > 2, "the launcher reported {alive} times that it is alive");

    // The next daemon takes over all processes, and nothing on the data path notices.
    for how in [Signal::KILL, Signal::USR1] {
        daemon.end_by(how);
        fronts[0].send("open 9");
        daemon = services.sluiced().serve();
        let answer = fronts[0].receive();
        assert!(answer.starts_with("worker 9 {"), "{answer}");
        assert_eq!(fronts[0].ask("close 9"), "closed 9");
        assert_eq!((place.launcher_process(), place.vm(7)["device_process"].clone()), before);
        assert!(workers.iter().all(is_alive), "a worker was ended");
        assert_eq!(place.vm(8)["sessions"].as_array().map(Vec::len), Some(1));
    }

    // A fence and the deletion of a VM end processes of other users, and so does the end of the daemon.
    assert_eq!(place.post(7, "fence", &json!({})).status, 200);
    wait_gone(&workers[0]);
    assert!(is_alive(&workers[1]));
    let device = watch(pid_of_value(&place.vm(8)["device_process"])).expect("a process");
    assert_eq!(place.api("DELETE", "/v1/vms/8", None).status, 204);
    wait_gone(&workers[1]);
    wait_gone(&device);
    let sockets = || place.run().join("vm-8.sock").exists();
    assert!(!until(sockets, |exists| !exists), "the socket of a deleted VM is left");
    services.end(daemon);
}

// Promise: F95
#[test]
fn launcher_that_is_killed_ends_no_session_of_a_sluiced_without_privilege() {
    let Some(services) = Services::new("killed-service") else { return };
    let place = &services.place;
    let mut daemon = services.sluiced().serve();
    place.make_direct([7]);
    let mut front = place.front(7);
    let worker = watch(pid_of(&front.open(1))).expect("a process");
    let device = place.vm(7)["device_process"].clone();
    let first = services.launcher.pid();
    services.launcher.kill();

    // The next one is told of the worker that continues, and the daemon ends the processes of the first one.
    let second = watch(pid_of(&front.open(2))).expect("a process");
    assert_ne!(services.launcher.pid(), first);
    assert!(is_alive(&worker), "a worker of the first launcher was ended");
    assert_eq!(place.vm(7)["device_process"], device);
    daemon.kill();
    services.launcher.kill();
    let daemon = services.sluiced().serve();
    front.open(3);
    assert!(is_alive(&worker) && is_alive(&second), "a worker was ended");
    assert_eq!(place.vm(7)["device_process"], device);
    assert_eq!(place.post(7, "fence", &json!({})).status, 200);
    wait_gone(&worker);
    wait_gone(&second);
    services.end(daemon);
}

/// A VM whose device ends while there is no launcher gets another one when the launcher is back, and does not fail meanwhile.
// Promise: F95
#[test]
fn vm_that_loses_its_device_waits_for_an_absent_launcher() {
    let Some(services) = Services::new("absent-service") else { return };
    let place = &services.place;
    let daemon = services.sluiced().serve();
    place.make_direct([7]);
    let worker = watch(pid_of(&place.front(7).open(1))).expect("a process");
    let before = pid_of_value(&place.vm(7)["device_process"]);
    let device = watch(before).expect("a process");
    services.launcher.away.store(true, Ordering::SeqCst);
    services.launcher.kill();
    signal(&device, Signal::KILL);
    wait_gone(&device);
    wait_gone(&worker);
    eventually("an event says that the VM waits", || place.has_event("device-waits"));
    assert_ne!(place.vm(7)["state"], "failed");

    services.launcher.away.store(false, Ordering::SeqCst);
    let now = until(|| place.vm(7)["device_process"].clone(), |now| now.is_u64() && *now != json!(before));
    assert!(now.is_u64(), "no other device: {now}");
    place.front(7).open(2);
    services.end(daemon);
}

// Promise: F95
#[test]
fn reload_with_another_configuration_replaces_the_launchers_service() {
    let Some(services) = Services::new("reload-service") else { return };
    let place = &services.place;
    let mut daemon = services.sluiced().serve();
    place.make_direct([7]);
    let worker = watch(pid_of(&place.front(7).open(1))).expect("a process");
    let first = services.launcher.pid();
    services.options.lock().expect("unpoisoned").push("--trust-vmm-memory".to_owned());
    daemon.end_by(Signal::USR1);
    let mut daemon = services.sluiced().serve();
    place.front(7).open(2);
    assert_ne!(services.launcher.pid(), first, "the launcher has the old configuration");
    assert!(is_alive(&worker));

    // A daemon with other options than its launcher's says so and ends nothing.
    daemon.end_by(Signal::USR1);
    let output = services.sluiced().args(["--vm-socket-mode", "0666"]).output();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("both services must have the same options"), "{said}");
    assert!(is_alive(&worker));
    let daemon = services.sluiced().serve();
    place.front(7).open(4);
    services.end(daemon);
}

/// The answer to a request.
fn ask(
    channel: &Channel<FromLauncher, ToLauncher>,
    request: ToLauncher,
) -> Option<(FromLauncher, Vec<OwnedFd>)> {
    match channel.send(&request, &[]) {
        Err(Errno::PIPE) => return None,
        result => result.expect("sent"),
    }
    channel.receive().map(Received::message).ok().flatten()
}

// Promise: F95, F121
#[test]
fn hostile_client_of_the_launchers_service_reaches_only_processes_of_sluice() {
    let directories = ["hostile-client", "stranger"].map(|name| cgroup_directory(name).map(Cgroup));
    let [Some(cgroup), Some(strange_groups)] = directories else {
        sluice_skip::skip("no cgroup v2 directory can be made");
        return;
    };
    if !has_users(USER.into(), 1) {
        sluice_skip::skip("needs root");
        return;
    }
    let place = Place::new();
    let (directory, run, group) = (place.libexec(), place.run(), cgroup.0.clone());
    let own = Fingerprint([7; 16]);
    let service = LauncherService::start(place.run().join("launcher.sock"), move || {
        let mut command = Command::new(launcher());
        command.arg("--device").arg(directory.join("sluice-device"));
        command.arg("--worker").arg(directory.join("sluice-worker"));
        command.arg("--socket-dir").arg(&run).args(["--vm-numbers", "1:2"]);
        command.arg("--cgroup").arg(&group).args(["--service", &own.to_string()]);
        command.env("SLUICE_LOG", "off");
        command
    });
    let attach = ToLauncher::Attach { configuration: own.0 };
    let start = ToLauncher::StartWorker { vm: 1, session: 1, visible: Visible::Host };
    // Nothing comes before the configuration, and a launcher of another one ends.
    assert!(ask(&service.connect(), start).is_none());
    let first = service.pid();
    let stale = FromLauncher::Refused { refusal: LaunchRefusal::OtherConfiguration };
    let other = ask(&service.connect(), ToLauncher::Attach { configuration: [8; 16] });
    assert_eq!(other.expect("an answer").0, stale);
    let client = until(
        || {
            let client = service.connect();
            let (answer, _) = ask(&client, attach)?;
            Some((client, answer))
        },
        Option::is_some,
    );
    let (client, answer) = client.expect("the next launcher");
    assert_ne!(service.pid(), first);
    assert!(matches!(answer, FromLauncher::Attached { fresh: true, .. }), "{answer:?}");

    // No process starts before the client has named those that continue, whose users are taken.
    assert!(ask(&client, start).is_none());
    let client = service.connect();
    ask(&client, attach).expect("an answer");
    // A process of the host is neither found nor kept, whatever the client says.
    let mut stranger = Command::new("sleep").arg("1000").spawn().expect("a process");
    let Identity { process: strange, started } = Identity::of(stranger.id()).expect("a process");
    client.send(&ToLauncher::KeepWorker { process: strange, started }, &[]).expect("sent");
    client.send(&ToLauncher::Sweep {}, &[]).expect("sent");
    let (started, descriptors) = ask(&client, start).expect("an answer");
    let FromLauncher::Started { process, started, grouped: true } = started else { panic!("{started:?}") };
    let worker = watch(process).expect("a process");
    // A process in a group of the same names, of another directory, is none of the launcher's.
    let group = format!("vm-1/{}", cgroup.workers()[0].rsplit_once('/').expect("a group").1);
    let strange_group = strange_groups.0.join(group);
    std::fs::create_dir_all(&strange_group).expect("a group");
    std::fs::write(strange_group.join("cgroup.procs"), strange.to_string()).expect("moved");
    let missing = FromLauncher::Refused { refusal: LaunchRefusal::NoProcess };
    for process in [strange, std::process::id(), service.pid().expect("a launcher"), 1, 0, u32::MAX] {
        assert_eq!(ask(&client, ToLauncher::Find { process }).expect("an answer").0, missing, "{process}");
    }

    // A second sweep is not taken: it could give the users of living processes away.
    client.send(&ToLauncher::Sweep {}, &[]).expect("sent");
    assert!(ask(&client, ToLauncher::Find { process }).is_none());
    let client = service.connect();
    ask(&client, attach).expect("an answer");

    // The last connection counts, and a worker whose socket is kept outlives the first one.
    let second = service.connect();
    let (answer, _) = ask(&second, attach).expect("an answer");
    assert!(matches!(answer, FromLauncher::Attached { fresh: false, .. }), "{answer:?}");
    assert!(ask(&client, ToLauncher::Find { process }).is_none(), "two clients are served");
    let (found, given) = ask(&second, ToLauncher::Find { process }).expect("an answer");
    assert_eq!(found, FromLauncher::Found { started, worker: true, grouped: true });
    assert!(is_alive(&worker));

    // The same holds for a worker of a launcher that was killed.
    service.kill();
    let third = service.connect();
    let (answer, _) = ask(&third, attach).expect("an answer");
    assert!(matches!(answer, FromLauncher::Attached { fresh: true, .. }), "{answer:?}");
    let (found, _) = ask(&third, ToLauncher::Find { process }).expect("an answer");
    assert_eq!(found, FromLauncher::Found { started, worker: true, grouped: true });
    assert_eq!(rustix::io::write(given[1].as_fd(), b"1"), Ok(1));
    wait_gone(&worker);
    drop(descriptors);
    signal(&watch(strange).expect("it lives"), Signal::KILL);
    stranger.wait().expect("ended");
    drop(service);
    for group in [strange_group.as_path(), strange_group.parent().expect("a group")] {
        std::fs::remove_dir(group).expect("an empty group");
    }
}

// Promise: F95
#[test]
fn launchers_service_without_a_cgroup_directory_or_a_directory_of_its_own_is_refused() {
    let refused = |extra: &[&str]| {
        let (socket, _other) = sluice_shared_memory::socket::pair().expect("a pair");
        let mut command = Command::new(launcher());
        command.args(["--device", "/none", "--worker", "/none", "--vm-numbers", "1:2"]).args(extra);
        command.args(["--service", &Fingerprint([7; 16]).to_string()]);
        let output = command.stdin(Stdio::from(socket)).output().expect("the launcher");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let own = tempfile::tempdir().expect("a directory");
    let own = own.path().to_str().expect("UTF-8");
    let said = refused(&["--socket-dir", own]);
    assert!(said.contains("a launcher that is a service needs"), "{said}");
    // Another user could replace a socket there.
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(own, permissions).expect("a mode");
    let said = refused(&["--socket-dir", own]);
    assert!(said.contains("closed to other users or sticky"), "{said}");
}

// Promise: F95
#[test]
fn client_that_reads_no_answer_does_not_block_the_launcher() {
    let Some(services) = Services::new("silent-client") else { return };
    let daemon = services.sluiced().serve();
    let place = &services.place;
    place.make_direct([7]);
    let worker = watch(pid_of(&place.front(7).open(1))).expect("a process");
    let client = services.launcher.connect();
    let configuration = services.launcher.configuration().0;
    let (answer, _) = ask(&client, ToLauncher::Attach { configuration }).expect("an answer");
    assert!(matches!(answer, FromLauncher::Attached { fresh: false, .. }), "{answer:?}");
    rustix::io::ioctl_fionbio(&client, true).expect("non-blocking");
    let mut sent = 0_u32;
    let send = || client.send(&ToLauncher::Find { process: 1 }, &[]);
    // More answers than the buffer holds. The launcher may be slower than this client.
    let last = until(
        || {
            while send().is_ok() {
                sent += 1;
            }
            send().err()
        },
        |error| *error == Some(Errno::PIPE),
    );
    assert_eq!(last, Some(Errno::PIPE), "after {sent} requests");
    println!("the launcher hung up after {sent} requests");
    // The launcher serves the daemon, which connects again.
    place.front(7).open(2);
    assert!(is_alive(&worker));
    services.end(daemon);
}

// Promise: F95
#[test]
fn sluiced_without_kept_sockets_ends_the_processes_of_the_one_before() {
    let Some(services) = Services::new("without-sockets") else { return };
    let place = &services.place;
    let mut daemon = services.sluiced().serve();
    place.make_direct([7]);
    let mut front = place.front(7);
    let worker = watch(pid_of(&front.open(1))).expect("a process");
    let before = place.vm(7)["device_process"].clone();
    let device = watch(pid_of_value(&before)).expect("a process");
    daemon.kill();
    // A service manager drops them when a service is stopped.
    services.manager.drop_all();
    let daemon = services.sluiced().serve();
    wait_gone(&device);
    wait_gone(&worker);
    let now = until(|| place.vm(7)["device_process"].clone(), |process| !process.is_null());
    assert_ne!(now, before);
    place.front(7).open(2);
    services.end(daemon);
}

fn pid_of_value(value: &Value) -> u32 {
    value.as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a pid")
}
