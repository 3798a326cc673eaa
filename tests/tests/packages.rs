//! Packages: their contents, their dependencies, and the reports of the host's tools about them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use sluice_tests::packages::{self, Package, Packages, SINCE};
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, output_of, run};
use sluice_tests::{debian, programs};
use tempfile::TempDir;

const QUICK: Duration = Duration::from_secs(60);
/// Names of the units.
const DAEMON: &str = "sluiced.service";
const LAUNCHER: &str = "sluice-launcher.service";
/// Maximum ratings of the services by `systemd-analyze security`, in tenths: 0 is closed, 100 open, below 50 is good in its words.
const EXPOSURE: [(&str, u32); 2] = [(DAEMON, 10), (LAUNCHER, 30)];

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    output_of(Command::new(program).args(arguments), QUICK)
}

/// Files (no folders) of a Debian package, with modes and owners, as `tar` lists them.
fn files(package: &Path) -> Result<Vec<(String, String, String)>> {
    let listed = output("dpkg-deb", &["--contents", &package.display().to_string()])?;
    let mut files = Vec::new();
    for line in listed.lines().filter(|line| !line.starts_with('d')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [mode, owner, _, _, _, name, ..] = words[..] else { anyhow::bail!("dpkg-deb lists {line:?}") };
        files.push((name.trim_start_matches('.').to_owned(), mode.to_owned(), owner.to_owned()));
    }
    Ok(files)
}

fn names(package: &Path) -> Result<BTreeSet<String>> {
    Ok(files(package)?.into_iter().map(|(name, _, _)| name).collect())
}

fn unpack(packages: &Packages, which: &[Package]) -> Result<TempDir> {
    let root = tempfile::tempdir().context("a folder to unpack in")?;
    for package in which {
        let package = packages.deb(*package).display().to_string();
        output("dpkg-deb", &["-x", &package, &root.path().display().to_string()])?;
    }
    Ok(root)
}

// Promise: A30
#[test]
fn packages_hold_their_files_and_do_not_overwrite_each_other() -> Result<()> {
    let packages = packages::quick()?;
    let [host, softgpu, guest] = Package::ALL.map(|package| packages.deb(package));
    for (package, wanted) in [
        (
            &host,
            &[
                "/usr/bin/sluice",
                "/usr/libexec/sluice/sluiced",
                "/usr/libexec/sluice/sluice-launcher",
                "/usr/libexec/sluice/sluice-device",
                "/usr/libexec/sluice/sluice-worker",
                "/usr/libexec/sluice/sluice-arbiter",
                "/usr/libexec/sluice/sluice-inventory",
                "/usr/lib/sluice/libsluice_guest.so",
                "/etc/sluice/sluiced.toml",
                "/usr/lib/sluice/service.env",
                "/usr/share/qemu/vhost-user/50-sluice.json",
                "/usr/share/man/man1/sluice-create.1.gz",
                "/usr/share/man/man8/sluiced.8.gz",
                "/usr/share/bash-completion/completions/sluice",
                "/usr/share/sluice/prometheus/sluice-alerts.yml",
                "/usr/share/sluice/grafana/sluice.json",
                "/usr/lib/sysusers.d/sluice-host.conf",
                "/usr/lib/tmpfiles.d/sluice-host.conf",
                "/usr/lib/modprobe.d/sluice.conf",
            ][..],
        ),
        (
            &softgpu,
            &[
                "/usr/lib/sluice/libsoftgpu_cuda.so",
                "/usr/lib/sluice/libsoftgpu_nvml.so",
                "/usr/lib/sluice/softgpu.env",
                "/usr/bin/softgpu-run",
                "/usr/bin/softgpu-ptxas",
                "/usr/share/man/man1/softgpu-run.1.gz",
            ],
        ),
        (
            &guest,
            &[
                "/usr/lib/sluice-guest/libcuda.so.1",
                "/usr/lib/sluice-guest/libnvidia-ml.so.1",
                "/usr/bin/sluice-guest",
                "/usr/lib/systemd/system-sleep/sluice-guest",
                "/etc/ld.so.conf.d/0000-sluice.conf",
                "/usr/share/man/man1/sluice-guest-doctor.1.gz",
            ],
        ),
    ] {
        let there = names(package)?;
        for file in wanted {
            ensure!(there.contains(*file), "{} has no {file}: {there:?}", package.display());
        }
        for (name, mode, owner) in files(package)? {
            ensure!(owner == "root/root" && !mode.contains('s'), "{name} is {mode} {owner}");
            ensure!(
                mode.starts_with('l') || &mode[4..] == "r--r--" || &mode[4..] == "r-xr-x",
                "{name} is {mode}"
            );
        }
        // Names that programs look for in the loader's usual places stay the vendor's.
        ensure!(!there.iter().any(|name| name.contains("/x86_64-linux-gnu/")), "{there:?}");
    }
    let (units, rules) = (names(&host)?, names(&guest)?);
    for unit in [DAEMON, LAUNCHER, "sluice-launcher.socket"] {
        let unit = format!("/systemd/system/{unit}");
        ensure!(units.iter().any(|name| name.ends_with(&unit)), "no {unit}");
    }
    ensure!(rules.iter().any(|name| name.ends_with("/udev/rules.d/60-sluice-guest.rules")), "no rule");
    for (one, other) in [(&host, &softgpu), (&host, &guest), (&softgpu, &guest)] {
        let both: Vec<String> = names(one)?.intersection(&names(other)?).cloned().collect();
        ensure!(both.is_empty(), "{} and {} both have {both:?}", one.display(), other.display());
    }
    // An administrator's changes survive upgrades.
    for (package, file) in
        [(&host, "/etc/sluice/sluiced.toml"), (&guest, "/etc/ld.so.conf.d/0000-sluice.conf")]
    {
        let kept = output("dpkg-deb", &["--info", &package.display().to_string(), "conffiles"])?;
        ensure!(kept.trim() == file, "{kept}");
    }
    Ok(())
}

// Promise: S82
#[test]
fn software_gpu_runs_a_program_without_the_package_of_hosts() -> Result<()> {
    let packages = packages::quick()?;
    let deb = packages.deb(Package::Softgpu).display().to_string();
    let depends = output("dpkg-deb", &["--field", &deb, "Depends"])?;
    ensure!(!depends.contains("sluice"), "{depends}");
    let root = unpack(&packages, &[Package::Softgpu])?;
    let mut command = Command::new(root.path().join("usr/bin/softgpu-run"));
    // An installed program finds its libraries by their absolute path.
    command.env("SLUICE_LIBEXEC", root.path().join("usr/lib/sluice"));
    command.args(["--model", "L4-24", "--"]).arg(programs::program("device_query")?);
    let said = output_of(&mut command, Duration::from_secs(120))?;
    ensure!(said.contains("NVIDIA L4"), "{said}");
    Ok(())
}

// Promise: G20
#[test]
fn guest_deb_rpm_and_tarball_hold_the_same_files() -> Result<()> {
    let packages = packages::quick()?;
    let plain = |name: &str| {
        let name = name.trim_start_matches('/').trim_end_matches(".gz");
        // Paths and files that differ between distributions.
        name.strip_prefix("usr/lib/udev").or(name.strip_prefix("lib/udev")).unwrap_or(name).to_owned()
    };
    let own = |names: BTreeSet<String>| -> BTreeSet<String> {
        names
            .into_iter()
            .filter(|name| {
                !["/changelog", "/copyright", "/overrides/sluice-guest"].iter().any(|end| name.ends_with(end))
            })
            .collect()
    };
    let deb = own(names(&packages.deb(Package::Guest))?.iter().map(|name| plain(name)).collect());
    let tarball = output("tar", &["--list", "--gzip", "--file", &packages.tarball().display().to_string()])?;
    let tarball: BTreeSet<String> = tarball.lines().filter(|name| !name.ends_with('/')).map(plain).collect();
    ensure!(deb == tarball, "{deb:?} {tarball:?}");
    let query = |what: &[&str]| {
        let mut rpm = Command::new("rpm");
        output_of(rpm.arg("-qp").args(what).arg(packages.rpm()), QUICK)
    };
    let folders = ["/usr/lib/sluice-guest", "/usr/share/doc/sluice-guest"];
    let rpm: BTreeSet<String> =
        query(&["--list"])?.lines().filter(|name| !folders.contains(name)).map(plain).collect();
    ensure!(deb == rpm, "{deb:?} {rpm:?}");
    ensure!(
        query(&["--configfiles"])?.trim() == "/etc/ld.so.conf.d/0000-sluice.conf",
        "the configuration is lost"
    );
    let provides = query(&["--provides"])?;
    ensure!(!provides.contains("libcuda") && !provides.contains("libnvidia"), "{provides}");
    Ok(())
}

// Promise: G20
#[test]
fn guest_library_is_found_before_an_installed_driver_until_disabled() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        sluice_skip::skip("ldconfig works on another root for root only");
        return Ok(());
    }
    let packages = packages::quick()?;
    let root = unpack(&packages, &[Package::Guest])?;
    let at = |path: &str| root.path().join(path);
    // NVIDIA's driver, as a distribution has it: only the name and the place matter.
    let vendor = at("usr/lib/x86_64-linux-gnu");
    fs::create_dir_all(&vendor)?;
    let other = vendor.join("libcuda.so.1");
    fs::copy(Binaries::locate()?.get("libsluice_guest.so")?, &other)?;
    for (file, text) in [
        ("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n"),
        ("etc/ld.so.conf.d/000_cuda.conf", "/usr/local/cuda/targets/x86_64-linux/lib\n"),
        ("etc/ld.so.conf.d/nvidia.conf", "/usr/lib/x86_64-linux-gnu\n"),
        ("etc/ld.so.conf.d/x86_64-linux-gnu.conf", "/usr/lib/x86_64-linux-gnu\n"),
    ] {
        fs::write(at(file), text)?;
    }
    let found = || -> Result<Vec<String>> {
        let folder = root.path().display().to_string();
        // With the order of files in other languages, too.
        output_of(
            Command::new("/sbin/ldconfig").args(["-X", "-r", &folder]).env("LC_ALL", "C.UTF-8"),
            QUICK,
        )?;
        let cache = output("/sbin/ldconfig", &["-r", &folder, "-p"])?;
        let lines = cache.lines().filter_map(|line| line.trim().strip_prefix("libcuda.so.1 "));
        Ok(lines.filter_map(|line| Some(line.split_once("=> ")?.1.to_owned())).collect())
    };
    let (ours, theirs) = ("/usr/lib/sluice-guest/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    ensure!(found()? == [ours, theirs], "{:?}", found()?);
    // The state after `sluice-guest disable`.
    let line = at("etc/ld.so.conf.d/0000-sluice.conf");
    fs::write(&line, fs::read_to_string(&line)?.replace("\n/usr", "\n# /usr"))?;
    ensure!(found()? == [theirs], "{:?}", found()?);
    Ok(())
}

// Promise: G20
#[test]
fn rpm_package_can_be_installed_upgraded_and_removed() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        sluice_skip::skip("rpm works on another root for root only");
        return Ok(());
    }
    packages::ensure_tools()?;
    let packages = packages::quick()?;
    // A system as small as possible: the interpreters of the package's scripts, and nothing that they reload.
    let root = tempfile::tempdir().context("a folder to install in")?;
    let at = |path: &str| root.path().join(path);
    for folder in ["bin", "sbin", "etc"] {
        fs::create_dir(at(folder))?;
    }
    fs::copy("/sbin/ldconfig", at("sbin/ldconfig"))?;
    debian::ensure(&["busybox-static"])?;
    fs::copy("/bin/busybox", at("bin/sh"))?;
    fs::write(at("etc/ld.so.conf"), "include /etc/ld.so.conf.d/*.conf\n")?;
    let folder = root.path().display().to_string();
    let rpm = |arguments: &[&str]| {
        let mut rpm = Command::new("rpm");
        rpm.args(["--root", &folder, "--dbpath", "/var/lib/rpm"]).args(arguments);
        output_of(&mut rpm, QUICK)
    };
    let found = || -> Result<Vec<String>> {
        let cache = output("/sbin/ldconfig", &["-r", &folder, "-p"])?;
        let paths = cache.lines().filter_map(|line| Some(line.split_once("=> ")?.1.to_owned()));
        Ok(paths.filter(|path| path.ends_with(".so.1")).collect())
    };
    let ours = ["/usr/lib/sluice-guest/libnvidia-ml.so.1", "/usr/lib/sluice-guest/libcuda.so.1"];
    let package = packages.rpm().display().to_string();
    // Every system has all its dependencies; the check is skipped here, because this root has none.
    let wanted = rpm(&["-qp", "--requires", &package])?;
    let everywhere = [
        "/bin/sh",
        "/sbin/ldconfig",
        "config(sluice-guest)",
        "ld-linux-x86-64.so.2(",
        "libc.so.6(",
        "libm.so.6(",
        "libgcc_s.so.1(",
        "rpmlib(",
        "rtld(",
    ];
    for line in wanted.lines() {
        ensure!(everywhere.iter().any(|name| line.starts_with(name)), "it depends on {line}");
    }

    rpm(&["--initdb"])?;
    rpm(&["--install", "--nodeps", &package])?;
    ensure!(found()? == ours, "{:?}", found()?);
    let verified = rpm(&["--verify", "--nodeps", "sluice-guest"])?;
    ensure!(verified.is_empty(), "{verified}");
    for line in rpm(&["-q", "--dump", "sluice-guest"])?.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [path, _, _, _, mode, user, group, ..] = words[..] else { anyhow::bail!("rpm lists {line:?}") };
        let modes = ["0100644", "0100755", "040755", "0120777"];
        ensure!(modes.contains(&mode) && user == "root" && group == "root", "{line}");
        let is_run =
            ["/usr/bin/", "/usr/lib/systemd/system-sleep/"].iter().any(|folder| path.starts_with(folder));
        ensure!(mode != "0100755" || is_run || path.ends_with(".so.1"), "{line}");
        ensure!(at(path.trim_start_matches('/')).exists(), "there is no {path}");
    }

    // A part that an administrator has switched off stays off.
    let line = at("etc/ld.so.conf.d/0000-sluice.conf");
    let off = fs::read_to_string(&line)?.replace("\n/usr", "\n# /usr");
    fs::write(&line, &off)?;
    rpm(&["--upgrade", "--replacepkgs", "--nodeps", &package])?;
    ensure!(fs::read_to_string(&line)? == off && found()?.is_empty(), "{:?}", found()?);

    let before: BTreeSet<String> =
        rpm(&["-q", "--list", "sluice-guest"])?.lines().map(str::to_owned).collect();
    rpm(&["--erase", "sluice-guest"])?;
    ensure!(found()?.is_empty(), "{:?}", found()?);
    let left: Vec<&String> = before.iter().filter(|path| at(path.trim_start_matches('/')).exists()).collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

// Promise: A31
#[test]
fn service_passes_systemds_own_checks() -> Result<()> {
    debian::ensure(&["systemd"])?;
    let packages = packages::quick()?;
    for which in [&[Package::Host][..], &[Package::Host, Package::Softgpu]] {
        let root = unpack(&packages, which)?;
        let folder = format!("--root={}", root.path().display());
        // Units before the service are the system's, as are the programs that every system has.
        output(
            "cp",
            &[
                "-a",
                "-n",
                "/lib/systemd/system/.",
                &root.path().join("lib/systemd/system").display().to_string(),
            ],
        )?;
        fs::create_dir_all(root.path().join("bin"))?;
        fs::copy("/bin/sh", root.path().join("bin/sh"))?;
        let mut verify = Command::new("systemd-analyze");
        verify.args(["verify", "--man=no", &folder, DAEMON, LAUNCHER]);
        let said = run(&mut verify, QUICK)?;
        // Versions of systemd before 254 ignore the setting.
        let is_fault =
            |line: &&str| line.contains("sluice") && !line.contains("'DelegateSubgroup' in section");
        let of_ours: Vec<&str> = said.stderr.lines().filter(is_fault).collect();
        ensure!(said.status.success() && of_ours.is_empty(), "{}", said.stderr);
        let shown =
            output("systemd-analyze", &["cat-config", &folder, &format!("systemd/system/{LAUNCHER}")])?;
        let softgpu = which.contains(&Package::Softgpu);
        ensure!(shown.contains("CAP_SETFCAP") == softgpu, "{shown}");
        // The last setting holds. The files of the software GPU are in the host's /dev/shm.
        let mounts = shown.lines().rev().find_map(|line| line.strip_prefix("TemporaryFileSystem="));
        ensure!(mounts == Some(if softgpu { "" } else { "/dev/shm" }), "{shown}");
        for (unit, exposure) in EXPOSURE {
            let limit = format!("--threshold={exposure}");
            output("systemd-analyze", &["security", "--offline=yes", &limit, "--no-pager", &folder, unit])?;
        }
    }
    Ok(())
}

// Promise: A30
#[test]
fn sluiced_starts_with_the_packaged_configuration_and_its_suggestions() -> Result<()> {
    let packages = packages::quick()?;
    let root = unpack(&packages, &[Package::Host])?;
    let text = fs::read_to_string(root.path().join("etc/sluice/sluiced.toml"))?;
    // The suggested settings, enabled: lines that begin with `#` and a name.
    let suggested: String = text
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => {
                format!("{rest}\n")
            }
            _ => format!("{line}\n"),
        })
        .map(|line| if line.starts_with("role") { "role = \"tenant\"\n".to_owned() } else { line })
        .collect();
    ensure!(suggested.contains("\nrebalance") && suggested.contains("\n[fence]"), "{suggested}");
    let binaries = Binaries::locate()?;
    for text in [text, suggested] {
        let folder = tempfile::tempdir()?;
        let device = tempfile::tempdir_in("/dev/shm").context("a folder for a device")?;
        let file = folder.path().join("sluiced.toml");
        // The packaged group is one of the target machine; here, only a member's or root's can be used.
        let text =
            text.replace("vm-socket-gid = 107", &format!("vm-socket-gid = {}", rustix::process::getegid()));
        fs::write(&file, text)?;
        let mut daemon = Command::new(binaries.get("sluiced")?);
        daemon.arg("--config").arg(&file).arg("--runtime-dir").arg(folder.path().join("run"));
        daemon.arg("--state-dir").arg(folder.path().join("state")).arg("--libexec").arg(binaries.folder());
        daemon.arg("--driver").arg(binaries.get("libsoftgpu_cuda.so")?);
        daemon.arg("--nvml").arg(binaries.get("libsoftgpu_nvml.so")?);
        daemon.env("SLUICE_SOFTGPU_STATE", device.path()).env("SLUICE_SOFTGPU_SCALE", "256");
        let mut daemon = Background::start("sluiced", &mut daemon, &folder.path().join("log"))?;
        let mut status = Command::new(binaries.get("sluice")?);
        status.arg("status").arg("--socket").arg(folder.path().join("run/api.sock"));
        let deadline = std::time::Instant::now() + QUICK;
        while !run(&mut status, QUICK)?.status.success() {
            ensure!(daemon.is_running()? && std::time::Instant::now() < deadline, "{}", daemon.printed());
            std::thread::sleep(Duration::from_millis(50));
        }
        ensure!(daemon.terminate(QUICK)?.success(), "{}", daemon.printed());
    }
    Ok(())
}

/// The build for distribution, for the oldest glibc.
fn portable() -> Result<Binaries> {
    packages::portable(&Binaries::locate()?)
}

// Promise: G20
#[test]
#[ignore = "for the full tier"]
fn guest_files_need_no_glibc_newer_than_2_28() -> Result<()> {
    let portable = portable()?;
    for file in ["libsluice_guest.so", "libsluice_guest_nvml.so", "sluice-guest"] {
        let needed = packages::needed(&portable.get(file)?)?;
        ensure!(needed <= SINCE, "{file} needs glibc {needed}, which guests with {SINCE} do not have");
    }
    // The library of the distributed build works with the same program.
    let folder = tempfile::tempdir()?;
    let packages = packages::make(&Binaries::locate()?, &portable, folder.path())?;
    let depends =
        output("dpkg-deb", &["-f", &packages.deb(Package::Guest).display().to_string(), "Depends"])?;
    ensure!(depends.trim() == format!("libc6 (>= {SINCE})"), "{depends}");
    let root = unpack(&packages, &[Package::Guest])?;
    let program = programs::compile_all()?;
    let program = program.iter().find(|program| program.name == "vector_add").context("no vector_add")?;
    let backend = sluice_tests::direct::Backend::start(&Binaries::locate()?, None)?;
    let mut command = backend.command(&program.path, &[]);
    command.env("LD_LIBRARY_PATH", root.path().join("usr/lib/sluice-guest"));
    let finished = run(&mut command, QUICK)?;
    ensure!(finished.status.success(), "{}\n{}", finished.stdout, finished.stderr);
    Ok(())
}
