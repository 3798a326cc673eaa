//! The contents of each package, and their paths.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::paths::{self, Binaries};
use crate::process::output_of;

use super::floor::{Version, needed};

/// The oldest supported glibc of guests.
pub const SINCE: Version = Version(2, 28);

/// Folder of the guest's libraries, without the leading slash.
pub(super) const GUEST_LIBRARIES: &str = "usr/lib/sluice-guest";

/// The script that systemd runs around a suspension of the guest.
pub const SLEEP_HOOK: &str = "packaging/guest/system-sleep";
const PROGRAM: u32 = 0o755;
const DATA: u32 = 0o644;
const QUICK: Duration = Duration::from_secs(60);

/// A package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Package {
    /// The daemon with its helpers, and the command line.
    Host,
    /// The software GPU.
    Softgpu,
    /// The libraries that replace the driver's in a guest.
    Guest,
}

impl Package {
    /// All packages.
    pub const ALL: [Self; 3] = [Self::Host, Self::Softgpu, Self::Guest];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "sluice-host",
            Self::Softgpu => "sluice-softgpu",
            Self::Guest => "sluice-guest",
        }
    }

    /// Files that cargo built: name, target path, mode.
    const fn built(self) -> &'static [(&'static str, &'static str, u32)] {
        match self {
            Self::Host => &[
                ("sluice", "usr/bin/sluice", PROGRAM),
                ("sluiced", "usr/libexec/sluice/sluiced", PROGRAM),
                ("sluice-launcher", "usr/libexec/sluice/sluice-launcher", PROGRAM),
                ("sluice-device", "usr/libexec/sluice/sluice-device", PROGRAM),
                ("sluice-worker", "usr/libexec/sluice/sluice-worker", PROGRAM),
                ("sluice-arbiter", "usr/libexec/sluice/sluice-arbiter", PROGRAM),
                ("sluice-inventory", "usr/libexec/sluice/sluice-inventory", PROGRAM),
                // For `sluice run`, whose programs are guests without a VM.
                ("libsluice_guest.so", "usr/lib/sluice/libsluice_guest.so", DATA),
                ("libsluice_guest_nvml.so", "usr/lib/sluice/libsluice_guest_nvml.so", DATA),
            ],
            Self::Softgpu => &[
                ("libsoftgpu_cuda.so", "usr/lib/sluice/libsoftgpu_cuda.so", DATA),
                ("libsoftgpu_nvml.so", "usr/lib/sluice/libsoftgpu_nvml.so", DATA),
                ("softgpu-run", "usr/bin/softgpu-run", PROGRAM),
                ("softgpu-ptxas", "usr/bin/softgpu-ptxas", PROGRAM),
            ],
            Self::Guest => &[
                ("libsluice_guest.so", "usr/lib/sluice-guest/libcuda.so.1", DATA),
                ("libsluice_guest_nvml.so", "usr/lib/sluice-guest/libnvidia-ml.so.1", DATA),
                ("sluice-guest", "usr/bin/sluice-guest", PROGRAM),
                ("sluice-smi", "usr/bin/sluice-smi", PROGRAM),
            ],
        }
    }

    /// Files of the checkout: path, target path.
    const fn written(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Host => &[
                ("packaging/host/sluiced.toml", "etc/sluice/sluiced.toml"),
                ("packaging/host/service.env", "usr/lib/sluice/service.env"),
                ("packaging/host/modprobe.conf", "usr/lib/modprobe.d/sluice.conf"),
                ("packaging/host/50-sluice.json", "usr/share/qemu/vhost-user/50-sluice.json"),
                ("packaging/prometheus/sluice-alerts.yml", "usr/share/sluice/prometheus/sluice-alerts.yml"),
                ("packaging/grafana/sluice.json", "usr/share/sluice/grafana/sluice.json"),
                ("docs/openapi.json", "usr/share/sluice/openapi.json"),
                ("README.md", "usr/share/doc/sluice-host/README.md"),
                ("docs/operations.md", "usr/share/doc/sluice-host/operations.md"),
                ("docs/configuration.md", "usr/share/doc/sluice-host/configuration.md"),
                ("docs/api.md", "usr/share/doc/sluice-host/api.md"),
                ("docs/threat-model.md", "usr/share/doc/sluice-host/threat-model.md"),
                ("NOTICE", "usr/share/doc/sluice-host/NOTICE"),
            ],
            Self::Softgpu => &[
                ("softgpu/README.md", "usr/share/doc/sluice-softgpu/README.md"),
                ("packaging/host/softgpu.env", "usr/lib/sluice/softgpu.env"),
                (
                    "packaging/host/softgpu.conf",
                    "usr/lib/systemd/system/sluice-launcher.service.d/softgpu.conf",
                ),
            ],
            Self::Guest => &[
                ("packaging/guest/0000-sluice.conf", "etc/ld.so.conf.d/0000-sluice.conf"),
                ("NOTICE", "usr/share/doc/sluice-guest/NOTICE"),
            ],
        }
    }
}

/// Copies all files of a package to `tree`.
pub(super) fn lay_out(package: Package, host: &Binaries, guest: &Binaries, tree: &Path) -> Result<()> {
    let built = if package == Package::Guest { guest } else { host };
    for (file, to, mode) in package.built() {
        put(&built.get(file)?, &tree.join(to), *mode)?;
    }
    let checkout = paths::workspace();
    for (file, to) in package.written() {
        put(&checkout.join(file), &tree.join(to), DATA)?;
    }
    match package {
        Package::Host => {
            manuals(&host.get("sluice")?, tree)?;
            let page = output_of(Command::new(host.get("sluiced")?).args(["--describe", "manual"]), QUICK)?;
            write(&tree.join("usr/share/man/man8/sluiced.8"), &page)?;
            completions(&host.get("sluice")?, tree)?;
            let examples = tree.join("usr/share/doc/sluice-host/vmm-configs");
            for file in fs::read_dir(checkout.join("vmm-configs")).context("reading vmm-configs")? {
                let file = file?;
                put(&file.path(), &examples.join(file.file_name()), DATA)?;
            }
        }
        Package::Softgpu => manuals(&host.get("softgpu-run")?, tree)?,
        Package::Guest => {
            manuals(&guest.get("sluice-guest")?, tree)?;
            manuals(&guest.get("sluice-smi")?, tree)?;
            put(
                &checkout.join(SLEEP_HOOK),
                &tree.join("usr/lib/systemd/system-sleep/sluice-guest"),
                PROGRAM,
            )?;
            // Links with the vendor's names for programs that load the library without a version.
            for name in ["libcuda", "libnvidia-ml"] {
                symlink(format!("{name}.so.1"), tree.join(GUEST_LIBRARIES).join(format!("{name}.so")))
                    .context("linking a library")?;
            }
        }
    }
    Ok(())
}

/// The glibc that the guest's files need.
pub(super) fn glibc_of_guest(guest: &Binaries) -> Result<Version> {
    let mut least = Version::default();
    for (file, _, _) in Package::Guest.built() {
        least = least.max(needed(&guest.get(file)?)?);
    }
    Ok(least)
}

/// All input files of packages, apart from those that the tools add.
pub(super) fn inputs(host: &Binaries, guest: &Binaries) -> Result<Vec<PathBuf>> {
    let checkout = paths::workspace();
    let mut all = vec![checkout.join("packaging"), checkout.join("vmm-configs")];
    for package in Package::ALL {
        let built = if package == Package::Guest { guest } else { host };
        for (file, _, _) in package.built() {
            all.push(built.get(file)?);
        }
        all.extend(package.written().iter().map(|(file, _)| checkout.join(file)));
    }
    Ok(all)
}

fn put(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::create_dir_all(to.parent().context("a file lies in a folder")?)?;
    fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(|| format!("{}", to.display()))
}

fn write(to: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(to.parent().context("a file lies in a folder")?)?;
    fs::write(to, text).with_context(|| format!("writing {}", to.display()))
}

/// Manual pages, printed by the program itself.
fn manuals(program: &Path, tree: &Path) -> Result<()> {
    let pages = tempfile::tempdir().context("a folder for manual pages")?;
    // A program with commands has one for its pages, another one an option.
    let without_commands = ["sluice-smi", "softgpu-run"].iter().any(|name| program.ends_with(name));
    let argument = if without_commands { "--manual" } else { "manual" };
    output_of(Command::new(program).arg(argument).arg(pages.path()), QUICK)?;
    for page in fs::read_dir(pages.path())? {
        let page = page?.path();
        let section =
            page.extension().and_then(|section| section.to_str()).context("a page has a section")?;
        let name = page.file_name().context("a page has a name")?;
        put(&page, &tree.join(format!("usr/share/man/man{section}")).join(name), DATA)?;
    }
    Ok(())
}

fn completions(program: &Path, tree: &Path) -> Result<()> {
    for (shell, to) in [
        ("bash", "usr/share/bash-completion/completions/sluice"),
        ("zsh", "usr/share/zsh/vendor-completions/_sluice"),
        ("fish", "usr/share/fish/vendor_completions.d/sluice.fish"),
    ] {
        let text = output_of(Command::new(program).args(["completion", shell]), QUICK)?;
        write(&tree.join(to), &text)?;
    }
    Ok(())
}
