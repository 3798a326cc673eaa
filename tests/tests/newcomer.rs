//! Fresh Debian systems with systemd, in which the packages are installed as a newcomer does: one is a host, and one is a guest.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use sluice_messages::launch::VmLimits;
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::host::Host;
use sluice_tests::image::Image;
use sluice_tests::packages::{self, Package, Packages};
use sluice_tests::paths::Binaries;
use sluice_tests::process::output_of;
use sluice_tests::programs;
use sluice_tests::vm::{Completed, Gpu, Guest, GuestCommand, Machine};

/// Time limit from the first command to the end of the first CUDA program.
const NEWCOMER: Duration = Duration::from_secs(180);
/// Time limit of a boot: a whole distribution boots slowly under software emulation.
const BOOT: Duration = Duration::from_secs(600);
const COMMAND: Duration = Duration::from_secs(600);

/// A version later than any.
const NEWER: &str = "999.0";
/// Waits until the daemon reports a unit that lends.
const READY: &str =
    "for i in $(seq 300); do sluice units 2> /dev/null | grep -q lending && exit 0; sleep 1; done; exit 1";

/// A fresh system with packages in /root.
fn boot(name: &str, gpu: Gpu, packages: &Packages, which: &[Package]) -> Result<Guest> {
    start(name, gpu, &image(packages, which)?)
}

/// As [`boot`], without graphics, with all packages, and other files.
fn boot_with(name: &str, packages: &Packages, others: &[(String, Vec<u8>)]) -> Result<Guest> {
    let mut image = image(packages, &Package::ALL)?;
    for (name, contents) in others {
        image.file(&format!("root/{name}"), 0o644, contents.clone());
    }
    start(name, Gpu::None, &image)
}

fn image(packages: &Packages, which: &[Package]) -> Result<Image> {
    let binaries = Binaries::locate()?;
    let kernel = Kernel::fetch(Series::V6_12)?;
    let mut programs = programs::compile_all()?;
    programs.extend(programs::compile_hostile()?);
    programs.retain(|program| ["vector_add", "instance"].contains(&program.name.as_str()));
    let mut image = Image::debian(&kernel, &binaries, &programs)?;
    for package in which {
        let file = packages.deb(*package);
        let name = file.file_name().and_then(|name| name.to_str()).context("a package has a name")?;
        image.add(&file, &format!("root/{name}"))?;
    }
    Ok(image)
}

fn start(name: &str, gpu: Gpu, image: &Image) -> Result<Guest> {
    let machine = Machine { memory_mib: 4608, cpus: 2, gpu, boot_limit: BOOT, ..Machine::new(name) };
    Guest::boot(&machine, &Kernel::fetch(Series::V6_12)?, image)
}

/// The last line of the output, with the variables for programs.
fn last(text: &str) -> &str {
    text.lines().last().unwrap_or_default()
}

/// Runs a script as root; when it fails, the service's log is in the error.
fn root(guest: &Guest, script: &str) -> Result<Completed> {
    let run = |script: &str| guest.start(&GuestCommand::script(script).user("root").limit(COMMAND))?.wait();
    let completed = run(script)?;
    if completed.success() {
        return Ok(completed);
    }
    let log = run("journalctl --no-pager --lines 40 --unit sluiced --unit sluice-launcher 2>&1")?.stdout;
    completed.expect_success().with_context(|| format!("{script}\n{log}"))
}

fn user(guest: &Guest, script: &str) -> Result<Completed> {
    guest.start(&GuestCommand::script(script).limit(COMMAND))?.wait()
}

/// `apt install` of packages that are in /root.
fn install(guest: &Guest, which: &[Package]) -> Result<Duration> {
    let files: Vec<String> = which.iter().map(|package| format!("/root/{}_*.deb", package.name())).collect();
    let script = format!("DEBIAN_FRONTEND=noninteractive apt-get install --yes {} 2>&1", files.join(" "));
    Ok(root(guest, &script)?.elapsed)
}

/// Lists all installed files, except those that change by themselves, or are the system's own records.
const FILES: &str = "find / -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /var/lib/dpkg \
                     -o -path /var/cache -o -path /var/log -o -path /var/lib/apt -o -path /root -o -path /var/lib/systemd \\) -prune -o \
                     -print | grep -v -e '^/etc/group-*$' -e '^/etc/gshadow-*$' -e '^/etc/passwd-*$' -e '^/etc/shadow-*$' -e '^/etc/ld.so.cache$' | sort";

// Promise: A32, F95
#[test]
#[ignore = "for the full tier"]
fn fresh_host_computes_within_three_minutes_and_purge_leaves_no_file() -> Result<()> {
    let packages = packages::quick()?;
    let guest = boot("newcomer-host", Gpu::None, &packages, &Package::ALL)?;
    root(&guest, "systemctl is-system-running --wait || systemctl --failed")?;
    let before = root(&guest, FILES)?.stdout;

    let installed = install(&guest, &[Package::Host, Package::Softgpu])?;
    let ran = user(&guest, "sluice run -- vector_add")?.expect_success()?;
    ensure!(ran.stdout.contains("PASS"), "{}", ran.stdout);
    let took = installed + ran.elapsed;
    println!("apt install {:.0} s, sluice run {:.0} s", installed.as_secs_f64(), ran.elapsed.as_secs_f64());
    if took >= NEWCOMER {
        let log = root(&guest, "journalctl --no-pager --output short-monotonic --lines 100")?.stdout;
        anyhow::bail!("it took {took:?}\n{log}");
    }

    root(&guest, READY).context("the service")?;
    root(&guest, "systemd-analyze verify --man=no sluiced.service sluice-launcher.service")?;
    // The daemon is a user of its own, without any capability.
    let status = format!("cat /proc/$({MAIN_PROCESS})/status");
    let status = root(&guest, &format!("id -u sluice && {status} | grep -e ^Uid -e ^Cap"))?.stdout;
    let user = status.lines().next().context("a user")?;
    ensure!(user != "0" && status.contains(&format!("Uid:\t{user}\t{user}")), "{status}");
    let capabilities = status.lines().filter(|line| line.starts_with("Cap"));
    ensure!(capabilities.into_iter().all(|line| line.ends_with("\t0000000000000000")), "{status}");
    install(&guest, &[Package::Guest])?;
    let connect = root(&guest, "sluice create web-1 --direct --memory 64MiB")?.stdout;
    let program = root(&guest, &format!("{} vector_add", last(&connect)))?;
    ensure!(program.stdout.contains("PASS"), "{}", program.stdout);
    let log = root(&guest, "journalctl --no-pager --unit sluiced --unit sluice-launcher")?.stdout;
    ensure!(!log.contains("workers get no namespaces") && !log.contains("ERROR"), "{log}");
    println!("limits of a VM: {}", limits(&guest)?.join(", "));

    let purged = root(
        &guest,
        "DEBIAN_FRONTEND=noninteractive apt-get purge --yes sluice-host sluice-softgpu sluice-guest 2>&1",
    )?;
    let after = root(&guest, FILES)?.stdout;
    let extra: Vec<&str> = after.lines().filter(|file| !before.lines().any(|there| there == *file)).collect();
    ensure!(extra.is_empty(), "left behind: {extra:?}\n{}", purged.stdout);
    let running = root(
        &guest,
        "ls -l /proc/[0-9]*/exe 2> /dev/null | grep -e /libexec/ -e bin/sluice$ || true; ls /dev/shm /run/sluice 2> /dev/null || true",
    )?;
    ensure!(!running.stdout.contains("sluice"), "{}", running.stdout);
    guest.kill()
}

/// The processes of the daemon and of the device of `web-1`.
fn processes(guest: &Guest) -> Result<(String, String)> {
    let daemon = root(guest, MAIN_PROCESS)?.stdout.trim().to_owned();
    let shown = root(guest, "sluice show web-1")?.stdout;
    let device = shown.lines().find_map(|line| line.trim().strip_prefix("device")).context(shown.clone())?;
    Ok((daemon, device.trim().to_owned()))
}

/// Prints the number of the process of the daemon, or of its launcher.
const MAIN_PROCESS: &str = "systemctl show --property MainPID --value sluiced";
const LAUNCHER_PROCESS: &str = "systemctl show --property MainPID --value sluice-launcher";

/// Waits until the VM `web-1` has its limits, with all of its workers, and the daemon is in its own group. Returns the limits.
fn limits(guest: &Guest) -> Result<Vec<String>> {
    // An unlimited value is the word `max`. Each worker has a limit of threads, and its threads are counted.
    let script = format!(
        "cd {GROUP} && main=$({LAUNCHER_PROCESS}) && for i in $(seq 60); do \
         if ! cat memory.max memory.swap.max pids.max cpu.weight worker-*/pids.max 2> /dev/null | grep -q max && \
         ! cat pids.current worker-*/pids.current 2> /dev/null | grep -qx 0 && grep -q '/daemon$' /proc/$main/cgroup; \
         then cat memory.max memory.swap.max pids.max cpu.weight && exit 0; fi; sleep 1; done; \
         cat /proc/$main/cgroup; grep . cgroup.* */cgroup.* ../cgroup.* */pids.* pids.* memory.max; exit 1"
    );
    let limits = root(guest, &script).context("a VM without limits")?.stdout;
    let limits: Vec<String> = limits.lines().map(str::to_owned).collect();
    ensure!(limits.len() == 4, "a limit is missing: {limits:?}");
    Ok(limits)
}

// Promise: A33, F86
#[test]
#[ignore = "for the full tier"]
fn package_upgrade_ends_no_device_and_no_program() -> Result<()> {
    let packages = packages::quick()?;
    let newer = newer(&packages)?;
    let guest = boot_with("newcomer-upgrade", &packages, &newer)?;
    install(&guest, &Package::ALL)?;
    root(&guest, READY).context("the service")?;
    root(&guest, "echo '# Changed here.' >> /etc/sluice/sluiced.toml")?;
    let connect = root(&guest, "sluice create web-1 --direct --memory 64MiB")?.stdout;
    let script =
        format!("mkfifo /root/in && exec 3<>/root/in && {} exec instance 5 <&3 >/root/out", last(&connect));
    let program = guest.start(&GuestCommand::script(&script).user("root").limit(COMMAND))?;
    let mut seen = 0;
    let mut look = || -> Result<()> {
        seen += 1;
        let script = format!(
            "[ {seen} -gt 1 ] && echo >/root/in; for i in $(seq 300); do \
             [ $(grep -c -e '^holding' -e '^as it should be' /root/out) -ge {seen} ] && exit 0; sleep 1; done; cat /root/out; exit 1"
        );
        root(&guest, &script).map(drop)
    };
    look()?;
    let (mut daemon, device) = processes(&guest)?;
    let limited = limits(&guest)?;
    let files = newer.iter().map(|(name, _)| format!("/root/{name}")).collect::<Vec<_>>().join(" ");
    let upgrade = format!("DEBIAN_FRONTEND=noninteractive apt-get install --yes {files} 2>&1");
    for change in [
        "systemctl reload sluiced",
        &upgrade,
        &format!("kill -KILL $({MAIN_PROCESS})"),
        &format!("kill -KILL $({MAIN_PROCESS}) $({LAUNCHER_PROCESS})"),
    ] {
        root(&guest, change)?;
        let followed = format!(
            "for i in $(seq 120); do p=$({MAIN_PROCESS}); \
                                [ $p != 0 ] && [ $p != {daemon} ] && exit 0; sleep 1; done; exit 1"
        );
        root(&guest, &followed).with_context(|| format!("{change}: another daemon"))?;
        root(&guest, READY).with_context(|| change.to_owned())?;
        let now = processes(&guest)?;
        ensure!(now.0 != daemon && now.1 == device, "{change}: {daemon} {device} {now:?}");
        look().with_context(|| change.to_owned())?;
        let now_limited = limits(&guest).with_context(|| change.to_owned())?;
        ensure!(now_limited == limited, "{change}: {limited:?}, then {now_limited:?}");
        daemon = now.0;
    }
    // The daemon uses the next launcher.
    root(&guest, "systemctl restart sluice-launcher")?;
    look().context("after a restart of the launcher")?;
    ensure!(processes(&guest)? == (daemon, device), "a process was ended");
    let another = root(&guest, "sluice create web-2 --direct --memory 64MiB")?.stdout;
    root(&guest, &format!("{} vector_add", last(&another)))?;
    ensure!(limits(&guest)? == limited, "the limits of the VM are other ones");
    let installed = root(
        &guest,
        "dpkg-query --show --showformat '${Version}' sluice-host && tail -1 /etc/sluice/sluiced.toml",
    )?;
    ensure!(installed.stdout.trim() == format!("{NEWER}# Changed here."), "{}", installed.stdout);
    drop(program);
    guest.kill()
}

/// A newer version of the host's packages, with only the number changed: names and contents.
fn newer(packages: &Packages) -> Result<Vec<(String, Vec<u8>)>> {
    let folder = tempfile::tempdir()?;
    let mut made = Vec::new();
    for package in [Package::Host, Package::Softgpu] {
        let tree = folder.path().join(package.name());
        let deb = |arguments: &[&std::ffi::OsStr]| {
            output_of(std::process::Command::new("dpkg-deb").args(arguments), COMMAND)
        };
        deb(&["--raw-extract".as_ref(), packages.deb(package).as_ref(), tree.as_ref()])?;
        let control = tree.join("DEBIAN/control");
        let text = std::fs::read_to_string(&control)?;
        let old = env!("CARGO_PKG_VERSION");
        let text = text.replace(&format!("Version: {old}\n"), &format!("Version: {NEWER}\n"));
        std::fs::write(&control, text.replace(&format!(" {old})"), &format!(" {NEWER})")))?;
        let name = format!("newer-{}.deb", package.name());
        let file = folder.path().join(&name);
        deb(&[
            "--root-owner-group".as_ref(),
            "-Zgzip".as_ref(),
            "--build".as_ref(),
            tree.as_ref(),
            file.as_ref(),
        ])?;
        made.push((name, std::fs::read(file)?));
    }
    Ok(made)
}

// Promise: A31
#[test]
#[ignore = "for the full tier"]
fn service_can_be_stopped_at_any_point_of_its_start() -> Result<()> {
    let packages = packages::quick()?;
    let which = [Package::Host, Package::Softgpu];
    let guest = boot("newcomer-stop", Gpu::None, &packages, &which)?;
    install(&guest, &which)?;
    root(&guest, READY).context("the service")?;
    root(&guest, "systemctl stop sluiced")?;
    for delay in ["0.1", "0.3", "0.6", "1", "1.5", "2", "3", "5"] {
        // systemd kills processes that do not end within 90 s.
        let script = format!(
            "systemctl start --no-block sluiced; sleep {delay}; begin=$(date +%s); systemctl stop sluiced; \
             took=$(($(date +%s) - begin)); echo $took; systemctl --quiet is-failed sluiced && exit 1; [ $took -lt 60 ]"
        );
        let took = root(&guest, &script).with_context(|| format!("stopped after {delay} s"))?.stdout;
        println!("stopped after {delay} s: {} s", took.trim());
    }
    // Repeated first starts: the daemon must create the device and the state.
    for round in 0..8 {
        let script = format!(
            "systemctl stop sluiced; rm -rf /dev/shm/sluice-softgpu-0 /var/lib/sluice/*; begin=$(date +%s); \
             systemctl start sluiced && ( {READY} ) && echo $(($(date +%s) - begin))"
        );
        let took = root(&guest, &script).with_context(|| format!("started for the {round}th time"))?.stdout;
        println!("started within {} s", took.trim());
        ensure!(took.trim().parse::<u32>()? < 60, "it took {took} s");
    }
    let left = "ls -l /proc/[0-9]*/exe 2> /dev/null | grep -c /libexec/sluice/sluiced";
    ensure!(root(&guest, left)?.stdout.trim() == "1", "more than one daemon");
    guest.kill()
}

/// The files of the software GPU of the service, with the folder that a lying worker and a test share.
const LIAR: &str = "/dev/shm/sluice-softgpu-0/liar";
/// The group of the VM with lying workers.
const GROUP: &str = "/sys/fs/cgroup/system.slice/sluice-launcher.service/vm-1000";

/// Huge pages of the host, of which a worker gets none.
const HUGE_PAGES: u32 = 16;

/// The number of things at which a bomb was held.
fn held_number(sign: &str) -> Result<u64> {
    let number = sign.split_whitespace().nth(1).and_then(|number| number.parse().ok());
    number.with_context(|| format!("no number in {sign:?}"))
}

// Promise: F86
#[test]
#[ignore = "for the full tier"]
fn bombs_in_a_worker_are_held_by_the_limits_of_its_own_vm() -> Result<()> {
    let packages = packages::quick()?;
    let worker = std::fs::read(Binaries::locate()?.get("sluice-hostile-worker")?)?;
    let guest = boot_with("newcomer-bombs", &packages, &[("sluice-hostile-worker".to_owned(), worker)])?;
    install(&guest, &Package::ALL)?;
    root(&guest, READY).context("the service")?;
    let place = format!(
        "install -m 0755 /root/sluice-hostile-worker /usr/libexec/sluice/sluice-worker && mkdir -p {LIAR} && echo 1000 > {LIAR}/vm"
    );
    root(&guest, &place)?;
    let mut connect = Vec::new();
    for name in ["web-1", "web-2"] {
        let made = root(&guest, &format!("sluice create {name} --direct --memory 64MiB"))?.stdout;
        connect.push(last(&made).to_owned());
    }
    let neighbour = || -> Result<()> {
        let program = root(&guest, &format!("{} vector_add", connect[1]))?;
        ensure!(program.stdout.contains("PASS"), "{}", program.stdout);
        Ok(())
    };
    neighbour()?;
    let limited = limits(&guest)?;
    let (_, device) = processes(&guest)?;
    // The limits also hold for devices that continue under another daemon and another launcher.
    root(&guest, &format!("kill -KILL $({MAIN_PROCESS}) $({LAUNCHER_PROCESS})"))?;
    root(&guest, &format!("for i in $(seq 120); do sluice show web-1 2> /dev/null | grep -q '{device}' && exit 0; sleep 1; done; exit 1"))
        .context("another daemon")?;
    ensure!(limits(&guest)? == limited, "the limits have changed");
    let (daemon, same) = processes(&guest)?;
    ensure!(same == device, "{same}, not {device}");
    root(&guest, &format!("echo {HUGE_PAGES} > /proc/sys/vm/nr_hugepages"))?;
    let killed = || -> Result<u64> {
        let count = root(&guest, &format!("sed -n 's/^oom_kill //p' {GROUP}/memory.events"))?.stdout;
        count.trim().parse().with_context(|| count.clone())
    };
    let held = format!("grep '^held' {LIAR}/report");
    for (bomb, signs) in [
        ("memory-bomb", None),
        ("shared-memory-bomb", None),
        ("thread-bomb", Some(held.clone())),
        // Its filter ends a worker that requests one.
        (
            "huge-page-bomb",
            Some("journalctl --unit sluice-launcher | grep 'worker of VM 1000 .*signal=31'".to_owned()),
        ),
        ("descriptor-bomb", Some(held)),
        ("standard-error", Some("journalctl --unit sluice-launcher | grep 'lines dropped'".to_owned())),
    ] {
        let before = killed()?;
        // Without another sign, the kernel ends the worker whole; its device and its VM stay.
        let signs = signs.unwrap_or_else(|| {
            format!("sed -n 's/^oom_kill //p' {GROUP}/memory.events | grep -v -x {before}")
        });
        root(&guest, &format!("rm -f {LIAR}/report; echo {bomb} > {LIAR}/attack"))?;
        let script = format!("timeout 300 env {} vector_add > /dev/null 2>&1", connect[0]);
        let attacker = guest.start(&GuestCommand::script(&script).user("root").limit(COMMAND))?;
        let wait = format!(
            "for i in $(seq 240); do {signs} && exit 0; sleep 1; done; tail -3 {LIAR}/report; exit 1"
        );
        let mut neighbours = 0;
        let sign = loop {
            neighbour().with_context(|| format!("the neighbour of a {bomb}"))?;
            neighbours += 1;
            if neighbours == 3 {
                break root(&guest, &wait).with_context(|| bomb.to_owned())?.stdout;
            }
        };
        let sign = sign.lines().last().unwrap_or_default();
        println!("{bomb}: {sign}");
        match bomb {
            // The rest of the limit are the worker's own threads.
            "thread-bomb" => {
                ensure!(held_number(sign)? < u64::from(VmLimits::default().worker_tasks), "{sign}")
            }
            "huge-page-bomb" => {
                let free = format!("grep '^HugePages_Free: *{HUGE_PAGES}$' /proc/meminfo");
                root(&guest, &free).context("a worker has huge pages")?;
            }
            _ => {}
        }
        if bomb == "descriptor-bomb" {
            let spaces = "worker=$(ls -l /proc/[0-9]*/exe 2> /dev/null | grep 'sluice-worker$' | sed 's,.*/proc/\\([0-9]*\\)/exe.*,\\1,' | tail -1); \
                          for kind in user mnt net ipc; do readlink /proc/1/ns/$kind /proc/$worker/ns/$kind; done";
            let spaces = root(&guest, spaces)?.stdout;
            let distinct: BTreeSet<&str> = spaces.lines().collect();
            ensure!(distinct.len() == 8, "a worker shares namespaces of the system: {spaces}");
        }
        neighbour().with_context(|| format!("the neighbour after a {bomb}"))?;
        // The program ends with its worker; `timeout` ends one that waits.
        root(
            &guest,
            "for exe in /proc/[0-9]*/exe; do case $(readlink $exe) in */sluice-worker) kill -9 $(basename $(dirname $exe));; esac; done; true",
        )?;
        drop(attacker);
        let now = processes(&guest)?;
        ensure!(now == (daemon.clone(), device.clone()), "{bomb}: {daemon} {device} {now:?}");
    }
    ensure!(limits(&guest)? == limited, "the limits have changed");
    let limit: u64 = root(&guest, &format!("cat {GROUP}/memory.max"))?.stdout.trim().parse()?;
    let peak = root(&guest, &format!("cat {GROUP}/memory.peak"))?.stdout;
    println!(
        "limit of the VM {} MiB, most that it had {} MiB",
        limit >> 20,
        peak.trim().parse::<u64>()? >> 20
    );
    ensure!(peak.trim().parse::<u64>()? <= limit, "the VM had {peak} of {limit} bytes");
    guest.kill()
}

// Promise: G22
#[test]
#[ignore = "for the full tier"]
fn fresh_guest_computes_within_three_minutes() -> Result<()> {
    let packages = packages::quick()?;
    let binaries = Binaries::locate()?;
    let host = Host::start(&binaries, Series::V6_12, None)?;
    let guest =
        boot("newcomer-guest", Gpu::VhostUser(host.socket().to_owned()), &packages, &[Package::Guest])?;
    root(&guest, "systemctl is-system-running --wait || systemctl --failed")?;

    let installed = install(&guest, &[Package::Guest])?;
    let ran = user(&guest, "vector_add")?.expect_success()?;
    ensure!(ran.stdout.contains("PASS"), "{}", ran.stdout);
    println!("apt install {:.0} s, the program {:.0} s", installed.as_secs_f64(), ran.elapsed.as_secs_f64());
    ensure!(installed + ran.elapsed < NEWCOMER, "it took {:?}", installed + ran.elapsed);

    let said = user(&guest, "sluice-guest doctor")?.expect_success()?.stdout;
    ensure!(said.contains("LEGACY") && said.contains("/usr/lib/sluice-guest/libcuda.so.1"), "{said}");
    root(&guest, "sluice-guest disable")?;
    let said = user(&guest, "sluice-guest doctor --json; vector_add")?;
    ensure!(!said.success() && said.stdout.contains("sluice-guest enable"), "{}", said.stdout);
    root(&guest, "sluice-guest enable")?;
    user(&guest, "sluice-guest doctor && vector_add")?.expect_success()?;
    // A user without access to the device: the same system without the rule.
    root(&guest, "chmod 0660 /dev/dri/renderD128; chown root:root /dev/dri/renderD128")?;
    let said = user(&guest, "sluice-guest doctor")?;
    ensure!(!said.success() && said.stdout.contains("permission"), "{}", said.stdout);
    let left =
        root(&guest, "apt-get purge --yes sluice-guest > /dev/null && ldconfig -p | grep libcuda || true")?
            .stdout;
    ensure!(left.is_empty(), "{left}");
    guest.kill()?;
    host.stop()?;
    Ok(())
}
