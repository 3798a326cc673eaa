//! Groups in a recorded directory, in which ordinary files stand for the control files. The kernel's own groups are tested in
//! `backend/daemon/tests/launcher.rs`.

use super::*;

/// A recorded cgroup directory of a host with these controllers, and its groups.
fn recorded(controllers: &str, limits: VmLimits) -> (tempfile::TempDir, Cgroups) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    fs::write(path.join("cgroup.controllers"), controllers).expect("written");
    fs::write(path.join("cgroup.procs"), "").expect("written");
    let mut cgroups = Cgroups::new(path, limits, memory_of_vm(limits));
    assert!(cgroups.vacate());
    cgroups.enable();
    (directory, cgroups)
}

/// The files of a group, with their contents.
fn files(group: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(group).expect("a group").map(|entry| entry.expect("an entry").path());
    let files = entries.filter(|path| path.is_file());
    files
        .map(|path| {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, fs::read_to_string(path).expect("text"))
        })
        .collect()
}

fn expected(files: &[(&str, &str)]) -> BTreeMap<String, String> {
    files.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

// Promise: F86
#[test]
fn vm_has_a_group_with_its_limits_and_each_process_one_in_it() {
    let limits = VmLimits {
        memory: Some(8 << 30),
        swap: 5 << 20,
        huge_pages: 3 << 20,
        tasks: 5000,
        worker_tasks: 70,
        cpu_weight: 40,
    };
    let (directory, mut cgroups) = recorded("cpuset cpu io memory hugetlb pids rdma misc", limits);
    let vm = directory.path().join("vm-7");
    fs::create_dir(&vm).expect("a group");
    // Files whose names depend on the host.
    for name in ["hugetlb.2MB.max", "hugetlb.1GB.rsvd.max", "hugetlb.2MB.current", "memory.swap.max"] {
        fs::write(vm.join(name), "max").expect("written");
    }
    let device = cgroups.make(Family::Vm(7), Member::Device, 3).expect("a group");
    let worker = cgroups.make(Family::Vm(7), Member::Worker, 4).expect("a group");
    let probe = cgroups.make(Family::Probes, Member::Worker, 5).expect("a group");
    assert_eq!(device.path, vm.join("device-3"));
    assert_eq!(worker.path, vm.join("worker-4"));
    assert_eq!(probe.path, directory.path().join("probes/worker-5"));

    let enabled = "+cpu +hugetlb +memory +pids";
    assert_eq!(files(directory.path())["cgroup.subtree_control"], enabled);
    let all = [
        ("memory.max", "8589934592"),
        ("memory.swap.max", "5242880"),
        ("pids.max", "5000"),
        ("cpu.weight", "40"),
        ("hugetlb.2MB.max", "3145728"),
        ("hugetlb.1GB.rsvd.max", "3145728"),
        ("hugetlb.2MB.current", "max"),
        ("cgroup.subtree_control", enabled),
    ];
    assert_eq!(files(&vm), expected(&all));
    let opened = [("cgroup.procs", ""), ("cgroup.kill", "")];
    let of_worker = [("memory.oom.group", "1"), ("pids.max", "70")];
    assert_eq!(files(&worker.path), expected(&[&opened[..], &of_worker].concat()));
    assert_eq!(files(&probe.path), files(&worker.path));
    assert_eq!(files(&device.path), expected(&[&opened[..], &[("cpu.weight", "1000")]].concat()));
    assert_eq!(files(&directory.path().join("probes"))["memory.max"], "8589934592");

    // The limits are written once per group, not at each start.
    fs::write(vm.join("memory.max"), "changed").expect("written");
    cgroups.make(Family::Vm(7), Member::Worker, 6).expect("a group");
    assert_eq!(files(&vm)["memory.max"], "changed");
}

// Promise: F86
#[test]
fn memory_of_a_vm_is_half_of_the_hosts_unless_configured() {
    let (directory, mut cgroups) = recorded("memory", VmLimits::default());
    cgroups.make(Family::Vm(1), Member::Worker, 0).expect("a group");
    let half = memory_of_host().expect("the memory of this host") / 2;
    assert!(half > 0);
    assert_eq!(files(&directory.path().join("vm-1"))["memory.max"], half.to_string());
}

// Promise: F86
#[test]
fn missing_controller_costs_its_limits_and_nothing_else() {
    let (directory, mut cgroups) = recorded("pids", VmLimits::default());
    let worker = cgroups.make(Family::Vm(1), Member::Worker, 0).expect("a group");
    let vm = expected(&[("pids.max", "32768"), ("cgroup.subtree_control", "+pids")]);
    assert_eq!(files(&directory.path().join("vm-1")), vm);
    assert_eq!(files(&worker.path).keys().collect::<Vec<_>>(), ["cgroup.kill", "cgroup.procs", "pids.max"]);

    let (directory, mut cgroups) = recorded("", VmLimits::default());
    let worker = cgroups.make(Family::Vm(1), Member::Worker, 0).expect("a group");
    assert_eq!(files(&directory.path().join("vm-1")), expected(&[]));
    assert_eq!(files(&worker.path).keys().collect::<Vec<_>>(), ["cgroup.kill", "cgroup.procs"]);
}

// Promise: F86
#[test]
fn limit_that_cannot_be_written_keeps_no_process_from_starting() {
    let (directory, mut cgroups) = recorded("cpu hugetlb memory pids", VmLimits::default());
    // A directory cannot be written, not even by root.
    let vm = directory.path().join("vm-1");
    fs::create_dir_all(vm.join("memory.max")).expect("a directory");
    let worker = cgroups.make(Family::Vm(1), Member::Worker, 0).expect("a group");
    let reported: Vec<&String> = cgroups.reported.iter().collect();
    assert!(matches!(reported[..], [one] if one.starts_with("memory.max ")), "{reported:?}");
    assert_eq!(files(&vm)["pids.max"], "32768");
    assert_eq!(files(&worker.path)["memory.oom.group"], "1");
}

// Promise: F86
#[test]
fn processes_in_the_directory_itself_get_a_group_beside_those_of_vms() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    fs::write(path.join("cgroup.controllers"), "cpu").expect("written");
    fs::write(path.join("cgroup.procs"), "12345\n0\n").expect("written");
    let mut cgroups = Cgroups::new(path, VmLimits::default(), memory_of_vm(VmLimits::default()));
    // A recorded list does not change, so the attempts end without success.
    assert!(!cgroups.vacate());
    assert_eq!(files(&path.join("daemon"))["cgroup.procs"], "12345");
    fs::write(path.join("cgroup.procs"), "").expect("written");
    assert!(cgroups.vacate());
    cgroups.enable();
    assert_eq!(files(&path.join("daemon"))["cpu.weight"], "1000");
}

/// A directory with the group of a VM, its device and a worker, all with their limits.
fn with_groups() -> (tempfile::TempDir, Cgroups, [PathBuf; 3]) {
    let (directory, mut cgroups) = recorded("cpu memory pids", VmLimits::default());
    let device = cgroups.make(Family::Vm(1), Member::Device, 0).expect("a group").path;
    let worker = cgroups.make(Family::Vm(1), Member::Worker, 1).expect("a group").path;
    let vm = directory.path().join("vm-1");
    (directory, cgroups, [vm, device, worker])
}

/// The directory's list of enabled controllers, as the kernel gives it.
fn write_enabled(group: &Path, controllers: &str) {
    fs::write(group.join(SUBTREE_CONTROL), format!("{controllers}\n")).expect("written");
}

// Promise: F86
#[test]
fn limits_are_written_again_after_the_controllers_were_disabled() {
    let (directory, mut cgroups, groups) = with_groups();
    let before = groups.each_ref().map(|group| files(group));
    let unset = || {
        for (group, files) in groups.iter().zip(&before) {
            for name in files.keys().filter(|name| !name.starts_with("cgroup.")) {
                fs::write(group.join(name), "max").expect("written");
            }
        }
    };
    // The same launcher, for the next `sluiced`, and another launcher.
    for open in [false, true] {
        unset();
        write_enabled(directory.path(), "");
        write_enabled(&groups[0], "");
        if open {
            cgroups = Cgroups::new(directory.path(), VmLimits::default(), memory_of_vm(VmLimits::default()));
        }
        cgroups.settle();
        assert_eq!(files(directory.path())[SUBTREE_CONTROL], "+cpu +memory +pids");
        assert_eq!(groups.each_ref().map(|group| files(group)), before);
    }
    // Limits in effect stay unchanged.
    unset();
    write_enabled(directory.path(), "cpu memory pids");
    let changed = groups.each_ref().map(|group| files(group));
    cgroups.settle();
    assert_eq!(groups.each_ref().map(|group| files(group)), changed);
}

/// The command of the service that disables controllers.
fn releasing_command() -> &'static str {
    let unit = include_str!("../../../../packaging/host/sluice-launcher.service");
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStopPost=-/bin/sh -c '"));
    line.and_then(|line| line.strip_suffix('\'')).expect("a step after the end of the daemon")
}

// Promise: F86
#[test]
fn service_disables_controllers_only_if_systemd_starts_the_daemon_in_the_directory() {
    let (directory, _, [vm, ..]) = with_groups();
    let daemon = directory.path().join("daemon");
    fs::create_dir(&daemon).expect("a group");
    let programs = tempfile::tempdir().expect("a directory");
    let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").expect("a path"));
    // An old systemd has no such property; a systemd that does not answer is taken for one.
    for (systemctl, released) in [("echo daemon", false), ("echo", true), ("true", true), ("exit 1", true)] {
        let program = programs.path().join("systemctl");
        fs::write(&program, format!("#!/bin/sh\n{systemctl}\n")).expect("written");
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .expect("executable");
        for (group, controllers) in
            [(directory.path(), "cpu memory pids"), (&vm, "memory pids"), (&daemon, "")]
        {
            write_enabled(group, controllers);
        }
        let status = std::process::Command::new("/bin/sh")
            .args(["-c", releasing_command()])
            .env("PATH", &path)
            .env(RELEASED, directory.path())
            .status();
        assert!(status.expect("a shell").success(), "{systemctl}");
        let expected = if released {
            ["-cpu -memory -pids\n", "-memory -pids\n", "\n"]
        } else {
            ["cpu memory pids\n", "memory pids\n", "\n"]
        };
        let found = [directory.path(), &vm, &daemon].map(|group| files(group)[SUBTREE_CONTROL].clone());
        assert_eq!(found, expected, "{systemctl}");
    }
}

// Promise: F61
#[test]
fn groups_of_earlier_versions_are_found_by_their_names() {
    assert_eq!(flat_number("vm-9-worker-3"), Some(3));
    assert_eq!(family_of("vm-9"), Some(Family::Vm(9)));
    assert_eq!(family_of("probes"), Some(Family::Probes));
    assert_eq!(member_of("worker-8"), Some((Member::Worker, 8)));
    assert_eq!(member_of("device-8"), Some((Member::Device, 8)));
    for name in ["daemon", "another", "vm-", "vm-x", "vm-9-worker-", "vm-x-worker-3", ".control"] {
        assert_eq!((flat_number(name), family_of(name), member_of(name)), (None, None, None), "{name}");
    }
}
