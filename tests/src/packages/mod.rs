//! Packages for hosts and guests, built from programs that cargo has built, by the distributions' own tools.
//!
//! A package is a folder laid out as the system it goes to ([`layout`]); `debhelper`, `rpmbuild` and `tar` make archives of it.
//! `cargo xtask package` and the tests of packages call it. It owns the contents of every package, and installs none.
//! Names, versions and dates come from the checkout, so the same commit gives the same files.

mod floor;
mod layout;
mod portable;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::debian;
use crate::paths::{self, Binaries};
use crate::process::output_of;
use crate::progress::step;

pub use floor::{Version, needed};
pub use layout::{Package, SINCE, SLEEP_HOOK};
pub use portable::portable;

/// Packages with the tools that make packages.
const TOOLS: &[&str] = &["debhelper", "rpm"];
/// The version of all packages.
const VERSION: &str = env!("CARGO_PKG_VERSION");
const MAKING: Duration = Duration::from_secs(300);

/// Finished packages.
#[derive(Debug, Clone)]
pub struct Packages {
    folder: PathBuf,
}

impl Packages {
    /// The Debian package of that name.
    #[must_use]
    pub fn deb(&self, package: Package) -> PathBuf {
        self.folder.join(format!("{}_{VERSION}_amd64.deb", package.name()))
    }

    /// The guest's RPM package.
    #[must_use]
    pub fn rpm(&self) -> PathBuf {
        self.folder.join(format!("sluice-guest-{VERSION}-1.x86_64.rpm"))
    }

    /// The guest's files in a tarball, for every other system.
    #[must_use]
    pub fn tarball(&self) -> PathBuf {
        self.folder.join(format!("sluice-guest-{VERSION}-x86_64.tar.gz"))
    }

    /// All packages.
    #[must_use]
    pub fn all(&self) -> Vec<PathBuf> {
        let debs = Package::ALL.into_iter().map(|package| self.deb(package));
        debs.chain([self.rpm(), self.tarball()]).collect()
    }
}

/// Installs the tools that make packages.
///
/// # Errors
/// When a tool is missing and cannot be installed.
pub fn ensure_tools() -> Result<()> {
    debian::ensure(TOOLS)
}

/// Makes all packages in `into`: the host's from `host`, the guest's from `guest`, which for distributed packages comes from
/// [`portable()`].
///
/// # Errors
/// When a program is missing, or a tool refuses.
pub fn make(host: &Binaries, guest: &Binaries, into: &Path) -> Result<Packages> {
    let place = tempfile::tempdir().context("a folder for packages")?;
    let work = &place.path().join("work");
    let trees = work.join("root");
    for package in Package::ALL {
        layout::lay_out(package, host, guest, &trees.join(package.name()))?;
    }
    fs::create_dir_all(into).with_context(|| format!("creating {}", into.display()))?;
    let packages = Packages { folder: into.to_owned() };
    for old in packages.all() {
        match fs::remove_file(&old) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing the old {}", old.display()));
            }
            _ => {}
        }
    }
    let when = commit_time()?;
    tarball(&trees.join(Package::Guest.name()), &packages.tarball(), &when)?;
    rpm(&trees.join(Package::Guest.name()), work, into, &when)?;
    let glibc = layout::glibc_of_guest(guest)?;
    debs(work, into, &when, glibc)?;
    for package in packages.all() {
        ensure!(package.exists(), "{} was not made", package.display());
    }
    Ok(packages)
}

/// Time of the checked-out commit, in seconds since 1970; the present time without a history.
fn commit_time() -> Result<String> {
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"]).current_dir(paths::workspace());
    if let Ok(time) = output_of(&mut git, Duration::from_secs(30))
        && !time.trim().is_empty()
    {
        return Ok(time.trim().to_owned());
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).context("the clock")?;
    Ok(now.as_secs().to_string())
}

fn debs(work: &Path, into: &Path, when: &str, glibc: Version) -> Result<()> {
    step("making Debian packages");
    let debian = work.join("debian");
    let packaging = paths::workspace().join("packaging");
    copy_folder(&packaging.join("debian"), &debian)?;
    let rules = debian.join("rules");
    fs::set_permissions(&rules, fs::Permissions::from_mode(0o755)).context("making the rules executable")?;
    // At the paths that debhelper expects, so that it writes the scripts of installation and removal.
    for unit in ["sluiced.service", "sluice-launcher.service", "sluice-launcher.socket"] {
        fs::copy(packaging.join("host").join(unit), debian.join(format!("sluice-host.{unit}")))?;
    }
    fs::copy(packaging.join("guest/60-sluice-guest.rules"), debian.join("sluice-guest.udev"))?;
    let date = output_of(Command::new("date").args(["--utc", "-R", "-d", &format!("@{when}")]), MAKING)?;
    let changelog = format!(
        "sluice ({VERSION}) unstable; urgency=medium\n\n  * See the history of the project.\n\n \
         -- Sluice developers <sluice@example.invalid>  {}\n",
        date.trim()
    );
    fs::write(debian.join("changelog"), changelog).context("writing a changelog")?;
    let mut make = Command::new("make");
    make.args(["-f", "debian/rules", "binary"]).current_dir(work);
    make.env("SOURCE_DATE_EPOCH", when).env("DEB_RULES_REQUIRES_ROOT", "no").env("DH_QUIET", "1");
    make.env("SLUICE_GLIBC", glibc.to_string());
    output_of(&mut make, MAKING)?;
    // debhelper puts packages into the folder above its own.
    let made = work.parent().context("the folder for packages lies in another")?;
    for package in Package::ALL {
        let name = format!("{}_{VERSION}_amd64.deb", package.name());
        move_file(&made.join(&name), &into.join(&name))?;
    }
    Ok(())
}

fn rpm(tree: &Path, work: &Path, into: &Path, when: &str) -> Result<()> {
    step("making an RPM package");
    let top = work.join("rpm");
    let rules = paths::workspace().join("packaging/guest/60-sluice-guest.rules");
    let mut build = Command::new("rpmbuild");
    build.args(["-bb", "--quiet", "--target", "x86_64"]);
    for (name, value) in [
        ("_topdir", top.display().to_string()),
        ("_rpmdir", top.display().to_string()),
        ("sluice_version", VERSION.to_owned()),
        ("sluice_tree", tree.display().to_string()),
        ("sluice_rules", rules.display().to_string()),
    ] {
        build.arg("--define").arg(format!("{name} {value}"));
    }
    build.arg(paths::workspace().join("packaging/rpm/sluice-guest.spec")).env("SOURCE_DATE_EPOCH", when);
    output_of(&mut build, MAKING)?;
    let name = format!("sluice-guest-{VERSION}-1.x86_64.rpm");
    move_file(&top.join("x86_64").join(&name), &into.join(&name))
}

fn tarball(tree: &Path, to: &Path, when: &str) -> Result<()> {
    step("making a tarball");
    let whole = tempfile::tempdir().context("a folder for a tarball")?;
    copy_folder(tree, whole.path())?;
    let rules = whole.path().join("usr/lib/udev/rules.d");
    fs::create_dir_all(&rules)?;
    fs::copy(
        paths::workspace().join("packaging/guest/60-sluice-guest.rules"),
        rules.join("60-sluice-guest.rules"),
    )?;
    let files = [
        "usr/lib/sluice-guest/libcuda.so.1",
        "usr/lib/sluice-guest/libnvidia-ml.so.1",
        "usr/bin/sluice-guest",
    ];
    for file in files {
        output_of(Command::new("strip").arg("--strip-unneeded").arg(whole.path().join(file)), MAKING)?;
    }
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    // The tarball is unpacked over folders of the system, which get its modes.
    tar.arg("--mode=u=rwX,go=rX");
    tar.arg(format!("--mtime=@{when}"))
        .arg("--file")
        .arg(to)
        .arg("--directory")
        .arg(whole.path())
        .args(["etc", "usr"]);
    output_of(&mut tar, MAKING)?;
    Ok(())
}

/// Copies a folder with modes and links.
fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    output_of(Command::new("cp").arg("-a").arg(from.join(".")).arg(to), MAKING)?;
    Ok(())
}

/// Moves a file, also to another file system.
fn move_file(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("moving {} to {}", from.display(), to.display()))?;
    fs::remove_file(from).with_context(|| format!("removing {}", from.display()))
}

/// Packages of the present build, for tests: made once, and again when any content has changed. Guests get the build for the
/// host, which needs the host's glibc.
///
/// # Errors
/// As [`make`].
pub fn quick() -> Result<Packages> {
    let binaries = Binaries::locate()?;
    let _lock = paths::cache_lock("packages")?;
    let folder = binaries.folder().join("packages-for-tests");
    let stamp = folder.join("stamp");
    let mut state = commit_time()?;
    for input in layout::inputs(&binaries, &binaries)? {
        describe(&input, &mut state)?;
    }
    if fs::read_to_string(&stamp).is_ok_and(|have| have == state) {
        return Ok(Packages { folder });
    }
    ensure_tools()?;
    let packages = make(&binaries, &binaries, &folder)?;
    fs::write(&stamp, state).context("marking the packages as complete")?;
    Ok(packages)
}

/// Adds to `state` a description that changes with a file, or with any file of a folder.
fn describe(path: &Path, state: &mut String) -> Result<()> {
    use std::fmt::Write as _;
    if path.is_dir() {
        let mut entries: Vec<PathBuf> =
            fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
        entries.sort();
        return entries.iter().try_for_each(|entry| describe(entry, state));
    }
    let metadata = fs::metadata(path).with_context(|| format!("examining {}", path.display()))?;
    let changed =
        metadata.modified()?.duration_since(std::time::UNIX_EPOCH).context("a file from before 1970")?;
    writeln!(state, "\n{} {} {}", path.display(), metadata.len(), changed.as_nanos())?;
    Ok(())
}
