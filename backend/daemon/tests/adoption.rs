//! A daemon that replaces another, under a service manager that keeps sockets. The test is the service manager. Device, worker
//! and arbiter are stand-ins; the launcher is real.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use crate::common::{
    Cgroup, Daemon, DaemonBuilder, Place, SHARING, SLUICED, cgroup_directory, children, pid_of,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use sluice_kit::{
    processes::{is_alive, signal, wait_gone, watch},
    service_manager::ServiceManager,
    wait::until,
};
use sluice_messages::{
    control::{self, FromLauncher, ToLauncher},
    inventory::Visible,
};
use sluice_shared_memory::socket;

fn manager(place: &Place) -> ServiceManager {
    ServiceManager::new(&place.directory.path().join("notify.sock"))
}

fn builder<'a>(place: &'a Place, manager: &ServiceManager) -> DaemonBuilder<'a> {
    let watchdog = [("WATCHDOG_USEC", "300000")];
    DaemonBuilder::new(place, manager.command(SLUICED)).units(1).vm_numbers("7:100").envs(watchdog)
}

fn arbiter(place: &Place) -> Value {
    place.api("GET", "/v1/units/0", None).body["arbiter_process"].clone()
}

fn end(daemon: Daemon, place: &Place) {
    daemon.end();
    place.wait_empty();
}

// Promise: A11
#[test]
fn daemon_after_a_killed_one_adopts_everything_and_ends_no_session() {
    for how in [Signal::KILL, Signal::USR1] {
        let place = Place::new();
        let manager = manager(&place);
        let mut daemon = builder(&place, &manager).configuration(SHARING).serve();
        place.make_direct([7]);
        place.api("PUT", "/v1/organisations/acme", Some(&json!({ "memory_bytes": 1 << 30 })));
        let made = place.api("PUT", "/v1/vms/a", Some(&json!({ "organisation": "acme" }))).body;
        let number = u32::try_from(made["number"].as_u64().expect("a number")).expect("small");
        let mut fronts = [place.front(7), place.front(number)];
        let workers: Vec<OwnedFd> =
            fronts.iter_mut().map(|front| watch(pid_of(&front.open(1))).expect("a process")).collect();
        let before = (arbiter(&place), place.launcher_process());
        assert_eq!(manager.names(), ["device-7", "device-8", "launcher", "launcher-log", "unit-0"]);
        place.tell("unit-0", &format!("has {number} 4194304 0"));

        for _ in 0..2 {
            daemon.end_by(how);
            // A session requested while no daemon runs waits, and gets its worker.
            fronts[0].send("open 9");
            daemon = builder(&place, &manager).configuration(SHARING).serve();
            let answer = fronts[0].receive();
            assert!(answer.starts_with("worker 9 {"), "{answer}");
            assert_eq!(fronts[0].ask("close 9"), "closed 9");
            assert_eq!((arbiter(&place), place.launcher_process()), before);
            assert!(workers.iter().all(is_alive), "a worker was ended");
            for id in ["7", "a"] {
                let vm = place.api("GET", &format!("/v1/vms/{id}"), None).body;
                assert_eq!(vm["sessions"].as_array().map(Vec::len), Some(1), "{vm}");
            }
        }
        assert!(!place.told().iter().any(|line| line.starts_with("Forget")), "{:?}", place.told());
        let vm = place.api("GET", "/v1/vms/a", None).body;
        assert_eq!((&vm["device_process"], &vm["fence"]["epoch"]), (&made["device_process"], &1.into()));
        // The unit may lend the memory that it has lent already, until it asks for more.
        let lent = until(|| place.told(), |told| told.iter().any(|line| line.contains("bytes: 4194304 }")));
        assert!(
            lent.iter().any(|line| line.starts_with("Escrow") && line.contains("bytes: 4194304 }")),
            "{lent:?}"
        );

        // The daemon still starts sessions, fences and deletes VMs.
        fronts[1].open(2);
        assert_eq!(place.api("POST", "/v1/vms/7/fence", Some(&json!({}))).status, 200);
        wait_gone(&workers[0]);
        assert!(is_alive(&workers[1]));
        assert_eq!(place.api("DELETE", "/v1/vms/a", None).status, 204);
        wait_gone(&workers[1]);
        let (ready, alive) = until(
            || {
                let notifications = manager.notifications();
                (notifications.ready, notifications.alive)
            },
            |(ready, alive)| *ready >= 3 && *alive > 0,
        );
        assert!(ready == 3 && alive > 0, "reported ready {ready} times, alive {alive} times");
        end(daemon, &place);
        let kept = until(|| manager.names(), Vec::is_empty);
        assert_eq!(kept, [] as [String; 0]);
    }
}

// Promise: A11
#[test]
fn processes_that_ended_between_daemons_are_not_adopted() {
    let place = Place::new();
    let manager = manager(&place);
    let mut daemon = builder(&place, &manager).serve();
    place.make_direct([7]);
    place.api("PUT", "/v1/vms/a", Some(&json!({})));
    let mut front = place.front(7);
    let worker = watch(pid_of(&front.open(1))).expect("a process");
    let before = arbiter(&place);
    daemon.kill();
    signal(&worker, Signal::KILL);
    wait_gone(&worker);
    let arbiter_process =
        watch(u32::try_from(before.as_u64().expect("a pid")).expect("a pid")).expect("a process");
    signal(&arbiter_process, Signal::KILL);
    wait_gone(&arbiter_process);
    let daemon = builder(&place, &manager).serve();
    assert_ne!(arbiter(&place), before);
    let vm = until(|| place.api("GET", "/v1/vms/7", None).body, |vm| vm["sessions"] == json!([]));
    assert_eq!(vm["sessions"], json!([]));
    place.front(7).open(2);
    end(daemon, &place);
}

/// Asks a launcher for a worker of VM 7, as a daemon does.
fn ask_for_worker(launcher: &OwnedFd) {
    let request = ToLauncher::StartWorker { vm: 7, session: 99, visible: Visible::Host };
    socket::send(launcher, &request.encode(), &[]).expect("asked");
}

// Promise: A11
#[test]
fn worker_started_for_a_dead_daemon_is_ended() {
    let place = Place::new();
    let manager = manager(&place);
    let mut daemon = builder(&place, &manager).serve();
    place.make_direct([7]);
    let mut front = place.front(7);
    let known = watch(pid_of(&front.open(1))).expect("a process");
    let launcher = u32::try_from(place.launcher_process().as_u64().expect("a pid")).expect("a pid");
    let socket = manager.kept("launcher");
    daemon.kill();

    let before = children(launcher);
    ask_for_worker(&socket);
    let started = || children(launcher).into_iter().find(|child| !before.contains(child));
    let orphan = until(started, Option::is_some).expect("a started worker");
    let orphan = watch(orphan).expect("it runs");
    assert!(is_alive(&orphan), "the worker ended before the next daemon started");
    let daemon = builder(&place, &manager).serve();
    wait_gone(&orphan);
    assert!(is_alive(&known), "a worker of a session was ended");
    assert_eq!(front.ask("close 1"), "closed 1");
    front.open(2);
    end(daemon, &place);
}

// Promise: F44
#[test]
fn worker_without_session_is_ended_while_others_live() {
    ends_a_worker_of_no_session(false);
}

// Promise: F44
#[test]
fn worker_without_session_that_renames_itself_is_ended() {
    ends_a_worker_of_no_session(true);
}

fn ends_a_worker_of_no_session(renames: bool) {
    let place = Place::new();
    let manager = manager(&place);
    let mut daemon = builder(&place, &manager).serve();
    place.make_direct([7]);
    let mut front = place.front(7);
    let known = watch(pid_of(&front.open(1))).expect("a process");
    if renames {
        place.mark("renames", "");
    }
    let launcher = manager.kept("launcher");
    // While no daemon runs, none takes the answer, and the next one does not know of this worker.
    daemon.kill();
    ask_for_worker(&launcher);
    let receive = || {
        let mut bytes = [0; control::BYTES];
        let (message, descriptors) = socket::receive(&launcher, &mut bytes).ok().flatten()?;
        match FromLauncher::decode(message).expect("an answer") {
            FromLauncher::Started { process, grouped: false, .. } => Some((process, descriptors)),
            // The killed daemon asked for this.
            FromLauncher::Found { .. } | FromLauncher::Failed { .. } | FromLauncher::Refused { .. } => None,
            answer => panic!("{answer:?}"),
        }
    };
    let (process, mut descriptors) = until(receive, Option::is_some).expect("an answer");
    let orphan = descriptors.pop().expect("its pidfd");
    if renames {
        let name = || std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        assert_eq!(until(name, |name| name == "kworker/0:1\n"), "kworker/0:1\n");
    }
    let started = Instant::now();
    let daemon = builder(&place, &manager).serve();
    wait_gone(&orphan);
    println!("a worker without session is ended after {:?}", started.elapsed());
    assert!(started.elapsed() >= Duration::from_secs(10), "{:?}", started.elapsed());
    let events = || place.api("GET", "/v1/host", None).body["events"].to_string();
    let events = until(events, |events| events.contains("worker-without-session"));
    assert!(events.contains("worker-without-session"), "{events}");
    assert!(is_alive(&known), "a worker of a session was ended");
    front.open(2);
    drop(descriptors);
    end(daemon, &place);
}

/// Kills a daemon and starts another with more arguments.
fn follow(mut daemon: Daemon, manager: &ServiceManager, place: &Place, arguments: &[&str]) -> Daemon {
    daemon.kill();
    builder(place, manager).args(arguments).serve()
}

// Promise: F75
#[test]
fn reload_with_another_configuration_ends_no_session() {
    let place = Place::new();
    let manager = manager(&place);
    let daemon = builder(&place, &manager).serve();
    place.make_direct([7]);
    let worker = watch(pid_of(&place.front(7).open(1))).expect("a process");
    let before = (arbiter(&place), place.vm(7)["device_process"].clone());
    let first = place.launcher_process();

    // The launcher does not know the default quota of VMs.
    let daemon = follow(daemon, &manager, &place, &["--memory", "64MiB"]);
    assert_eq!(place.launcher_process(), first);
    assert_eq!((arbiter(&place), place.vm(7)["device_process"].clone()), before);

    // The launcher knows an option of devices: only the launcher is replaced.
    let configuration = ["--trust-vmm-memory"];
    let daemon = follow(daemon, &manager, &place, &configuration);
    place.make_direct([8]);
    place.front(8).open(1);
    assert_ne!(place.launcher_process(), first);
    assert_eq!((arbiter(&place), place.vm(7)["device_process"].clone()), before);
    assert!(is_alive(&worker));
    place.front(7).open(2);

    // The next daemon adopts the new processes, too. Each name has one socket.
    assert_eq!(manager.names(), ["device-7", "device-8", "launcher", "launcher-log", "unit-0"]);
    let before = (arbiter(&place), place.launcher_process(), place.vm(7)["device_process"].clone());
    let daemon = follow(daemon, &manager, &place, &configuration);
    assert_eq!((arbiter(&place), place.launcher_process(), place.vm(7)["device_process"].clone()), before);
    place.front(7).open(3);
    assert!(is_alive(&worker));
    end(daemon, &place);
}

/// Checks a reload with a configuration. Returns the error, if the reload is refused.
fn refused(place: &Place, extra: &[&str]) -> Option<String> {
    let builder = place.daemon().units(1).vm_numbers("7:100");
    let output = builder.args(extra).args(["--check-reload"]).output();
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Changes the record of processes.
fn record(place: &Place, change: impl Fn(&mut Value)) {
    use sha2::Digest as _;
    let path = place.run().join("processes.json");
    let text = std::fs::read_to_string(&path).expect("a record");
    let (header, content) = text.split_once('\n').expect("a header");
    let mut header: Value = serde_json::from_str(header).expect("a header");
    let mut content: Value = serde_json::from_str(content).expect("a record");
    change(&mut content);
    let content = content.to_string();
    let sum = sha2::Sha256::digest(content.as_bytes());
    header["sha256"] = sum.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into();
    std::fs::write(path, format!("{header}\n{content}")).expect("written");
}

// Promise: F75
#[test]
fn reload_that_cannot_adopt_is_refused_with_a_reason_and_ends_nothing() {
    let place = Place::new();
    let manager = manager(&place);
    let mut daemon = builder(&place, &manager).serve();
    place.make_direct([7]);
    let worker = watch(pid_of(&place.front(7).open(1))).expect("a process");
    let before = (arbiter(&place), place.launcher_process(), place.vm(7)["device_process"].clone());
    assert_eq!(refused(&place, &["--trust-vmm-memory"]), None);

    // The same holds for a start without a check.
    daemon.kill();
    record(&place, |record| record["speaks"] = 999.into());
    let said = refused(&place, &[]).expect("refused");
    assert!(said.contains("speaks version 999"), "{said}");
    let mut other = builder(&place, &manager).spawn();
    assert!(!other.wait().success(), "sluiced started in spite of the record");
    record(&place, |record| record["more"] = "of a later version".into());
    assert!(refused(&place, &[]).is_some_and(|said| said.contains("cannot be understood")));
    record(&place, |record| {
        record.as_object_mut().expect("a record").remove("more");
        record["speaks"] = control::VERSION.into();
    });

    let daemon = builder(&place, &manager).serve();
    assert_eq!((arbiter(&place), place.launcher_process(), place.vm(7)["device_process"].clone()), before);
    assert!(is_alive(&worker));
    end(daemon, &place);
}

// Promise: F75
#[test]
fn daemon_that_uses_a_launchers_service_does_not_follow_one_that_started_its_own() {
    let place = Place::new();
    let manager = manager(&place);
    let mut daemon = builder(&place, &manager).serve();
    place.make_direct([7]);
    let mut front = place.front(7);
    front.open(1);
    daemon.kill();
    let service = ["--launcher", "/none.sock"];
    let said = refused(&place, &service).expect("refused");
    assert!(said.contains("sluiced itself has started the launcher"), "{said}");
    // A record of processes that have ended keeps no daemon from its start.
    // Some end with the launcher. One that is ending has no command line any more, by which a place finds its processes.
    let processes: Vec<OwnedFd> = place.processes().into_iter().filter_map(watch).collect();
    processes.iter().for_each(|process| signal(process, Signal::KILL));
    processes.iter().for_each(wait_gone);
    place.wait_empty();
    // They exist until they are reaped.
    assert_eq!(until(|| refused(&place, &service), Option::is_none), None);
}

// Promise: F74
#[test]
fn launcher_that_is_killed_ends_no_session_and_the_next_starts_new_ones() {
    let place = Place::new();
    let manager = manager(&place);
    let cgroup = cgroup_directory("killed").map(Cgroup);
    let mut extra = Vec::new();
    if let Some(cgroup) = &cgroup {
        extra.extend(["--cgroup", cgroup.0.to_str().expect("UTF-8")]);
    }
    let mut daemon = builder(&place, &manager).args(&extra).serve();
    place.make_direct([7, 8]);
    let (mut seven, mut eight) = (place.front(7), place.front(8));
    let mut workers = vec![watch(pid_of(&seven.open(1))).expect("a process")];
    workers.push(watch(pid_of(&eight.open(1))).expect("a process"));
    let before = (arbiter(&place), place.vm(7)["device_process"].clone());
    let mut launchers = vec![place.launcher_process()];
    for round in 2..5 {
        let killed = launchers.last().and_then(Value::as_u64).and_then(|pid| u32::try_from(pid).ok());
        let killed = killed.and_then(watch).expect("a launcher");
        signal(&killed, Signal::KILL);
        wait_gone(&killed);
        if round == 3 {
            // The sessions also outlive a replaced daemon.
            daemon = follow(daemon, &manager, &place, &extra);
        }
        workers.push(watch(pid_of(&seven.open(round))).expect("a process"));
        workers.push(watch(pid_of(&eight.open(round))).expect("a process"));
        let now = place.launcher_process();
        assert!(!launchers.contains(&now));
        launchers.push(now);
        assert!(workers.iter().all(is_alive), "a worker was ended");
        assert_eq!((arbiter(&place), place.vm(7)["device_process"].clone()), before);
    }
    if let Some(cgroup) = &cgroup {
        let groups = || cgroup.workers().len();
        assert_eq!(groups(), workers.len());
        // The cgroup of a worker is removed with it, also if an earlier launcher started the worker.
        assert_eq!(seven.ask("close 1"), "closed 1");
        let left = until(groups, |left| *left < workers.len());
        assert_eq!(left, workers.len() - 1);
    } else {
        sluice_skip::skip("the removal of cgroups needs a directory in the cgroup v2 tree");
    }
    end(daemon, &place);
    if let Some(cgroup) = &cgroup {
        std::fs::remove_dir(&cgroup.0).expect("no cgroup is left");
    }
}

// Promise: F73
#[test]
fn worker_that_attacks_its_standard_error_harms_no_process_and_forges_no_line() {
    use std::io::{BufRead as _, BufReader};
    let place = Place::new();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    // Without the filter, which would end the worker at once, only the pipes protect the other processes.
    let environment = [("SLUICE_SECCOMP", "off"), ("SLUICE_LOG", "warn")];
    let builder = place.daemon().units(1).envs(environment).stderr(OwnedFd::from(theirs));
    let log = std::thread::spawn(move || {
        BufReader::new(ours).lines().map(|line| line.expect("text")).collect::<Vec<String>>()
    });
    let began = Instant::now();
    let mut daemon = builder.serve();
    place.make_direct([7, 8]);
    let (mut seven, mut eight) = (place.front(7), place.front(8));
    let neighbour = eight.open(1);
    let pipe = |worker: &Value| worker["log"].as_str().expect("a name").to_owned();
    assert!(pipe(&neighbour).starts_with("pipe:"), "{neighbour}");
    let neighbour_process = watch(pid_of(&neighbour)).expect("a process");
    let before = (arbiter(&place), place.launcher_process(), place.vm(8)["device_process"].clone());
    place.mark("hostile", "7");
    for session in 1..4 {
        assert_ne!(pipe(&seven.open(session)), pipe(&neighbour), "a pipe is shared");
    }
    // Each process that reads or writes the log has a line to log.
    seven.send("garbage");
    eight.open(2);
    assert_eq!((arbiter(&place), place.launcher_process(), place.vm(8)["device_process"].clone()), before);
    assert!(is_alive(&neighbour_process) && !daemon.has_ended());
    let flags = std::fs::read_to_string(format!("/proc/{}/fdinfo/2", daemon.pid())).expect("flags");
    let flags = flags.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags").trim();
    let flags = u32::from_str_radix(flags, 8).expect("octal");
    assert_eq!(
        flags & rustix::fs::OFlags::NONBLOCK.bits(),
        0,
        "the flags of the daemon's own standard error changed"
    );
    place.unmark("hostile");
    end(daemon, &place);

    let lines = log.join().expect("lines");
    let forged: Vec<&String> = lines.iter().filter(|line| line.contains("forged")).collect();
    // The limit of all workers of a VM: lines at once, and in each second.
    let most = 400 + 20 * (began.elapsed().as_secs() + 1);
    assert!(!forged.is_empty() && forged.len() as u64 <= most, "{} lines", forged.len());
    for line in &lines {
        let own = !line.contains("forged");
        assert!(own || line.starts_with("launcher pid=") && line.contains(": worker vm=7 pid="), "{line}");
        assert!(!line.contains(|character: char| character.is_control()), "{line:?}");
    }
    assert!(lines.iter().any(|line| line.contains("worker vm=7 pid=") && line.ends_with("lines dropped]")));
    // The daemon's own line is in the log.
    assert!(lines.iter().any(|line| line.contains("sluice_daemon::vms::vm")), "{lines:?}");
}
