//! Processes that the launcher makes ahead, for the next start of the same kind.

use std::{collections::BTreeSet, fs, path::PathBuf};

use crate::{
    common::{
        Cgroup, Place, cgroup_directory, children, has_users, is_made_ahead, make_for_all_users, pid_of,
    },
    launcher::{Launcher, NotStarted, Started},
};
use rustix::process::{Pid, Signal};
use sluice_kit::{
    processes::{wait_gone, watch},
    wait::until,
};
use sluice_messages::{
    control::{LaunchRefusal, ToLauncher},
    inventory::Visible,
};

const NAMESPACES: [&str; 4] = ["user", "mnt", "net", "ipc"];

/// A launcher that confines workers with a library as their driver, and that library.
fn confining(place: &Place, extra: &[&str]) -> (Launcher, PathBuf) {
    let driver = place.directory.path().join("libdriver.so");
    fs::copy("/lib/x86_64-linux-gnu/libm.so.6", &driver).expect("a copy");
    let path = driver.to_str().expect("UTF-8");
    (Launcher::start(place, true, &[&["--driver", path], extra].concat()), driver)
}

/// The same with a worker, unless this host permits no namespaces.
fn begun(place: &Place, extra: &[&str]) -> Option<(Launcher, PathBuf, Started)> {
    let (launcher, driver) = confining(place, extra);
    let first = launcher.worker(1).expect("a worker");
    has_namespaces(&first).then_some((launcher, driver, first))
}

/// The namespaces of a process.
fn namespaces(process: u32) -> Vec<PathBuf> {
    NAMESPACES.map(|kind| fs::read_link(format!("/proc/{process}/ns/{kind}")).expect("a namespace")).into()
}

/// True if the host gives processes namespaces of their own; reports to the runner if not.
fn has_namespaces(started: &Started) -> bool {
    let own = namespaces(started.pid) != namespaces(std::process::id());
    if !own {
        sluice_skip::skip("this host permits no namespaces");
    }
    own
}

/// The process that waits for the launcher's next start, once it has all that it needs.
fn waiting(launcher: &Launcher) -> u32 {
    *waiting_of(launcher, 1).first().expect("a process that waits")
}

/// This many processes that wait for the launcher's next starts, or more.
fn waiting_of(launcher: &Launcher, number: usize) -> BTreeSet<u32> {
    let is_ready = |process: &u32| is_made_ahead(*process) && sockets(*process) == 1;
    let ready = || children(launcher.pid()).into_iter().filter(is_ready).collect::<BTreeSet<_>>();
    let ready = until(ready, |ready| ready.len() >= number);
    assert!(ready.len() >= number, "only {ready:?} wait");
    ready
}

/// The descriptors of a process, by what they are.
fn opened(process: u32) -> Vec<String> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/fd")) else { return Vec::new() };
    let link = |entry: fs::DirEntry| fs::read_link(entry.path()).ok();
    let kind = |link: PathBuf| link.to_string_lossy().split(':').next().unwrap_or_default().to_owned();
    entries.flatten().filter_map(link).map(kind).collect()
}

fn sockets(process: u32) -> usize {
    opened(process).iter().filter(|kind| *kind == "socket").count()
}

// Promise: P62
#[test]
fn next_worker_is_the_process_that_was_made_ahead_and_has_nothing_of_another() {
    let place = Place::new();
    let Some((launcher, _, first)) = begun(&place, &[]) else { return };
    let ready = waiting(&launcher);
    let kinds: BTreeSet<String> = opened(ready).into_iter().collect();
    let allowed = ["/dev/null", "pipe", "socket"].map(str::to_owned).into();
    assert_eq!(kinds, allowed, "it has no descriptor of another process");
    assert_eq!(opened(ready).iter().filter(|kind| *kind == "pipe").count(), 1, "only its own log");
    let own = namespaces(ready);
    for (kind, (own, others)) in NAMESPACES.iter().zip(own.iter().zip(namespaces(first.pid))) {
        assert_ne!(*own, others, "two workers have one {kind} namespace");
    }
    let second = launcher
        .ask(ToLauncher::StartWorker { vm: 2, session: 2, visible: Visible::Host })
        .expect("a worker");
    assert_eq!(second.pid, ready);
    let found = second.describe();
    assert_eq!(pid_of(&found), ready);
    assert_eq!((&found["fds"], &found["capabilities"]), (&serde_json::json!([0, 1, 2, 3]), &0.into()));
    assert_eq!(namespaces(ready), own);
    assert_ne!(waiting(&launcher), ready, "each is used once");
    launcher.end();
    place.wait_empty();
}

// Promise: P62
#[test]
fn device_and_worker_that_start_at_once_both_leave_a_process_made_ahead() {
    let place = Place::new();
    let (launcher, _) = confining(&place, &[]);
    let device = |vm| ToLauncher::StartDevice { vm, scanouts: 0, direct: true, fixed_arena: 0 };
    let worker = |vm| ToLauncher::StartWorker { vm, session: vm, visible: Visible::Host };
    // The second request is there before the launcher has answered the first one.
    launcher.tell(device(1));
    launcher.tell(worker(1));
    let [first, second] = [launcher.receive().expect("a device"), launcher.receive().expect("a worker")];
    if !has_namespaces(&first) || !has_namespaces(&second) {
        return;
    }
    let ready = waiting_of(&launcher, 2);
    for request in [device(2), worker(2)] {
        let started = launcher.ask(request).expect("a process");
        assert!(ready.contains(&started.pid), "{request:?}");
    }
    launcher.end();
    place.wait_empty();
}

// Promise: P62
#[test]
fn process_made_ahead_that_has_ended_or_sees_replaced_files_is_not_used() {
    let place = Place::new();
    let Some((launcher, driver, _first)) = begun(&place, &[]) else { return };
    let stale = waiting(&launcher);
    let update = driver.with_extension("new");
    fs::copy(&driver, &update).and_then(|_| fs::rename(&update, &driver)).expect("an update");
    let second = launcher.worker(2).expect("a worker");
    assert_ne!(second.pid, stale);
    assert_eq!(pid_of(&second.describe()), second.pid);
    assert!(watch(stale).is_none(), "a process that is of no use has ended");
    let killed = waiting(&launcher);
    let pidfd = watch(killed).expect("a process");
    rustix::process::kill_process(Pid::from_raw(killed.cast_signed()).expect("a process"), Signal::KILL)
        .expect("killed");
    wait_gone(&pidfd);
    let third = launcher.worker(3).expect("a worker");
    assert_ne!(third.pid, killed);
    assert_eq!(pid_of(&third.describe()), third.pid);
    launcher.end();
    place.wait_empty();
}

// Promise: P62
#[test]
fn process_made_ahead_ends_with_a_killed_launcher() {
    let place = Place::new();
    let Some((mut launcher, _, worker)) = begun(&place, &[]) else { return };
    let ready = watch(waiting(&launcher)).expect("a process");
    launcher.process.kill().expect("killed");
    launcher.process.wait().expect("ended");
    wait_gone(&ready);
    wait_gone(&worker.pidfd);
}

// Promise: P62
#[test]
fn process_made_ahead_keeps_no_user_from_another_start() {
    if !has_users(4_000_000, 2) {
        sluice_skip::skip("needs root, and users 4000000 and 4000001");
        return;
    }
    let Some(directory) = cgroup_directory("ready").map(Cgroup) else {
        sluice_skip::skip("no cgroup v2 directory can be made");
        return;
    };
    let place = Place::new();
    make_for_all_users(&place, "sluice-worker");
    let cgroup = directory.0.to_str().expect("UTF-8");
    let Some((launcher, _, _first)) = begun(&place, &["--worker-uids", "4000000:2", "--cgroup", cgroup])
    else {
        return;
    };
    let ready = waiting(&launcher);
    let probe = launcher.ask(ToLauncher::StartProbe { unit: 0, visible: Visible::Host }).expect("a probe");
    assert_eq!(probe.describe()["uid"], 4_000_001);
    assert!(watch(ready).is_none(), "its user has come free");
    assert_eq!(
        launcher.worker(2).err(),
        Some(NotStarted::Refused(LaunchRefusal::NoUser)),
        "two processes have one user"
    );
    launcher.end();
    fs::remove_dir(&directory.0).expect("no group is left");
}
