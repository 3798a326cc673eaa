//! Debian packages that setup needs: on the host, and stock kernels for the guests. In one file: they share one cache.
//!
//! Packages are installed from the distribution's own suites. Packages for guests are only downloaded and unpacked, through a
//! private apt state inside the cache, which involves neither root nor the host's own package lists.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use crate::paths;
use crate::process::{self, output_of};
use crate::progress;

const QEMU_AT_LEAST: u32 = 10;
const NETWORK: Duration = Duration::from_secs(900);
const QUICK: Duration = Duration::from_secs(60);
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Besides QEMU: busybox runs in the guest, xz and zstd unpack kernel modules, gcc and g++ are nvcc's host compilers.
const PACKAGES: &[&str] =
    &["busybox-static", "xz-utils", "zstd", "gcc", "g++", "binutils", "python3", "python3-venv"];

/// The distribution of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Release {
    id: String,
    version: String,
    codename: String,
}

impl Release {
    fn of_this_host() -> Result<Self> {
        let text = fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let value = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
                .map(|value| value.trim_matches('"').to_owned())
                .unwrap_or_default()
        };
        Self { id: value("ID"), version: value("VERSION_ID"), codename: value("VERSION_CODENAME") }
    }

    /// The suite with a new enough QEMU that must be added to apt, if the release's own QEMU is too old.
    fn qemu_suite(&self) -> Option<String> {
        (self.id == "debian" && self.version == "12").then(|| format!("{}-backports", self.codename))
    }
}

/// Installs the packages that setup, demo and tests need and that are missing.
///
/// # Errors
/// When a package is missing and cannot be installed; without root or passwordless sudo the message holds the exact
/// command to type.
pub fn ensure_packages() -> Result<()> {
    let mut missing: Vec<&str> = PACKAGES.iter().copied().filter(|package| !is_installed(package)).collect();
    let qemu_missing = qemu_problem();
    if qemu_missing.is_some() {
        missing.push("qemu-system-x86");
    }
    if missing.is_empty() {
        return Ok(());
    }
    if let Some(problem) = &qemu_missing {
        progress::step(problem);
    }
    install(&missing, qemu_missing.is_some())?;
    if let Some(problem) = qemu_problem() {
        bail!("after installing qemu-system-x86: {problem}");
    }
    Ok(())
}

/// Installs packages that only some tests need, if they are missing.
///
/// # Errors
/// As [`ensure_packages`].
pub fn ensure(packages: &[&str]) -> Result<()> {
    let missing = || packages.iter().copied().filter(|package| !is_installed(package)).collect::<Vec<&str>>();
    if missing().is_empty() {
        return Ok(());
    }
    // apt fails while another apt is at work, for instance for a test that runs beside.
    let _lock = paths::cache_lock("apt-install")?;
    match &*missing() {
        [] => Ok(()),
        missing => install(missing, false),
    }
}

fn install(missing: &[&str], with_qemu: bool) -> Result<()> {
    let release = Release::of_this_host()?;
    let install = install_commands(&release, missing, with_qemu)?;
    ensure!(
        Path::new("/usr/bin/apt-get").exists(),
        "please install {}{}; this host has no apt",
        missing.join(", "),
        if with_qemu { format!(" (QEMU at least {QEMU_AT_LEAST})") } else { String::new() }
    );
    let prefix: &[&str] = if rustix::process::geteuid().is_root() {
        &[]
    } else if has_passwordless_sudo() {
        &["sudo", "-n"]
    } else {
        let lines: Vec<String> =
            install.iter().map(|words| format!("    sudo {}", words.join(" "))).collect();
        bail!("missing packages; please type this and start again:\n{}", lines.join("\n"));
    };
    progress::step(format!("installing {} (apt)", missing.join(", ")));
    for words in &install {
        let mut line: Vec<&str> = prefix.to_vec();
        line.extend(words.iter().map(String::as_str));
        let mut command = Command::new(line[0]);
        command.args(&line[1..]);
        output_of(&mut command, NETWORK)?;
    }
    Ok(())
}

/// The apt commands that install `missing`. If a suite must be added for that, only these commands get it; the system's
/// configuration stays as it is.
fn install_commands(release: &Release, missing: &[&str], with_qemu: bool) -> Result<Vec<Vec<String>>> {
    let mut apt: Vec<String> =
        ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"].map(str::to_owned).to_vec();
    let suite = release.qemu_suite().filter(|_| with_qemu);
    if let Some(suite) = &suite
        && !host_has_suite(suite)
    {
        let folder = paths::cache()?.join("apt-install");
        fs::create_dir_all(folder.join("lists/partial"))?;
        // A list file replaces /etc/apt/sources.list for this command, so it must contain the lines of that file.
        let mut lines = fs::read_to_string("/etc/apt/sources.list").unwrap_or_default();
        lines.push_str(&format!("\ndeb [signed-by={KEYRING}] {} {suite} main\n", mirror()));
        let list = folder.join("sources.list");
        fs::write(&list, lines).with_context(|| format!("writing {}", list.display()))?;
        apt.push("-o".to_owned());
        apt.push(format!("Dir::Etc::sourcelist={}", list.display()));
        apt.push("-o".to_owned());
        apt.push(format!("Dir::State::lists={}", folder.join("lists").display()));
    }
    let mut update = apt.clone();
    update.push("update".to_owned());
    let mut install = apt;
    install.extend(["install", "--yes", "--no-install-recommends"].map(str::to_owned));
    if let Some(suite) = suite {
        install.extend(["--target-release".to_owned(), suite]);
    }
    install.extend(missing.iter().map(|&package| package.to_owned()));
    Ok(vec![update, install])
}

fn is_installed(package: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat=${db:Status-Status}", package]);
    output_of(&mut query, QUICK).is_ok_and(|status| status == "installed")
}

fn has_passwordless_sudo() -> bool {
    Command::new("sudo")
        .args(["-n", "true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The reason why the installed QEMU cannot be used, if it cannot.
fn qemu_problem() -> Option<String> {
    let Ok(text) = output_of(Command::new("qemu-system-x86_64").arg("--version"), QUICK) else {
        return Some("QEMU is not installed".to_owned());
    };
    match qemu_major(&text) {
        Some(major) if major >= QEMU_AT_LEAST => None,
        Some(major) => Some(format!("QEMU {major} is too old, at least {QEMU_AT_LEAST} is needed")),
        None => Some(format!("cannot read QEMU's version from {text:?}")),
    }
}

/// The version in the output of `qemu --version`.
pub(crate) fn qemu_version(text: &str) -> Option<&str> {
    text.split("version ").nth(1)?.split_whitespace().next()
}

fn qemu_major(version: &str) -> Option<u32> {
    qemu_version(version)?.split('.').next()?.parse().ok()
}

fn index_targets() -> String {
    let mut command = Command::new("apt-get");
    command.args([
        "indextargets",
        "--format",
        "$(REPO_URI) $(CODENAME) $(COMPONENT)",
        "Created-By: Packages",
    ]);
    output_of(&mut command, QUICK).unwrap_or_default()
}

fn host_has_suite(codename: &str) -> bool {
    index_targets().lines().any(|line| {
        let mut words = line.split(' ');
        (words.nth(1), words.next()) == (Some(codename), Some("main"))
    })
}

/// The Debian mirror of this host's apt.
fn mirror() -> String {
    mirror_from(&index_targets()).unwrap_or_else(|| "http://deb.debian.org/debian".to_owned())
}

fn mirror_from(targets: &str) -> Option<String> {
    targets.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (uri, codename, component) = (words.next()?, words.next()?, words.next()?);
        (component == "main" && matches!(codename, "bookworm" | "trixie"))
            .then(|| uri.trim_end_matches('/').to_owned())
    })
}

/// A series of guest kernels that Sluice is tested on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Series {
    /// Of Debian 11.
    V5_10,
    /// Of Ubuntu 22.04.
    V5_15,
    /// Of Debian 12.
    V6_1,
    /// Of Ubuntu 24.04.
    V6_8,
    /// Of Debian 13, and of the backports of Debian 12.
    V6_12,
    /// The newest of the backports of Debian 13.
    V7,
}

/// The source of a kernel: the folder of a private apt, its suites, and the metapackage.
struct Source {
    apt: &'static str,
    sources: Sources,
    metapackage: &'static str,
}

/// The suites of a private apt.
enum Sources {
    /// The suites of Debian from which guests are made on this host.
    Host,
    /// These suites of Debian.
    Debian(&'static [&'static str]),
    /// These suites of Ubuntu.
    Ubuntu(&'static [&'static str]),
}

impl Series {
    /// The series that setup fetches and that every run of the tests boots, oldest first.
    pub const USUAL: [Self; 2] = [Self::V6_1, Self::V6_12];

    /// The start of its version numbers.
    #[must_use]
    pub const fn number(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V5_15 => "5.15",
            Self::V6_1 => "6.1",
            Self::V6_8 => "6.8",
            Self::V6_12 => "6.12",
            Self::V7 => "7",
        }
    }

    /// The distribution of the kernel, with its version.
    #[must_use]
    pub const fn distribution(self) -> &'static str {
        match self {
            Self::V5_10 => "Debian 11",
            Self::V5_15 => "Ubuntu 22.04",
            Self::V6_1 => "Debian 12",
            Self::V6_8 => "Ubuntu 24.04",
            Self::V6_12 => "Debian 13 or 12 backports",
            Self::V7 => "Debian 13 backports",
        }
    }

    const fn source(self) -> Source {
        let (apt, sources, metapackage) = match self {
            Self::V6_1 | Self::V6_12 => ("apt", Sources::Host, "linux-image-amd64"),
            Self::V5_10 => ("apt-11", Sources::Debian(&["bullseye"]), "linux-image-amd64"),
            Self::V7 => ("apt-newer", Sources::Debian(&NEWER_QEMU), "linux-image-amd64"),
            Self::V5_15 => ("apt-jammy", Sources::Ubuntu(&["jammy", "jammy-updates"]), "linux-image-generic"),
            Self::V6_8 => ("apt-noble", Sources::Ubuntu(&["noble", "noble-updates"]), "linux-image-generic"),
        };
        Source { apt, sources, metapackage }
    }

    /// Outputs that the virtio-gpu device must have: kernels before 6.12 refuse a device without any.
    #[must_use]
    pub const fn max_outputs(self) -> u32 {
        match self {
            Self::V5_10 | Self::V5_15 | Self::V6_1 | Self::V6_8 => 1,
            Self::V6_12 | Self::V7 => 0,
        }
    }
}

impl fmt::Display for Series {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.number())
    }
}

/// A stock kernel, unpacked.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Its series.
    pub series: Series,
    /// Its full version, as in `uname -r`.
    pub version: String,
    /// The boot image.
    pub image: PathBuf,
    /// Uncompressed modules, in the order in which they must be loaded.
    pub modules: Vec<PathBuf>,
}

/// Modules that a test guest loads; their dependencies are added.
const MODULES: &[&str] = &["virtio_pci", "virtio_console", "virtio_gpu"];

impl Kernel {
    /// The newest packaged kernel of a series; downloaded the first time, from the cache after that.
    ///
    /// # Errors
    /// When it is neither in the cache nor can be downloaded.
    pub fn fetch(series: Series) -> Result<Self> {
        Self::fetch_with(series, &[])
    }

    /// As [`Kernel::fetch`], with further modules.
    ///
    /// # Errors
    /// As [`Kernel::fetch`].
    pub fn fetch_with(series: Series, further: &[&str]) -> Result<Self> {
        let name: Vec<&str> = [series.number()].iter().chain(further).copied().collect();
        let modules: Vec<&str> = MODULES.iter().chain(further).copied().collect();
        Self::fetch_as(series, series.source().metapackage, &name.join("+"), &modules)
    }

    /// Debian's build of a series for virtual machines in clouds, which has no graphics drivers. It loads the modules of a virtual
    /// socket.
    ///
    /// # Errors
    /// As [`Kernel::fetch`].
    pub fn fetch_cloud(series: Series) -> Result<Self> {
        let modules = ["virtio_pci", "virtio_console", "vmw_vsock_virtio_transport"];
        Self::fetch_as(series, "linux-image-cloud-amd64", &format!("{series}-cloud"), &modules)
    }

    fn fetch_as(series: Series, metapackage: &str, name: &str, modules: &[&str]) -> Result<Self> {
        let _lock = paths::cache_lock("kernels")?;
        let folder = paths::cache()?.join("kernels").join(name);
        // The list of modules is written last, so that a folder with the right one is complete.
        if fs::read_to_string(folder.join("wanted")).ok().as_deref() != Some(modules.join("\n").as_str()) {
            progress::step(format!(
                "downloading the kernel {series} of {} for guests",
                series.distribution()
            ));
            let source = series.source();
            let apt = PrivateApt::of(source.apt, &source.sources)?;
            apt.unpack_kernel(series, metapackage, modules, &folder)
                .with_context(|| format!("fetching guest kernel {series}"))?;
        }
        Self::open(series, &folder)
    }

    /// The kernel inside the image, unpacked: an ELF executable, for VMMs that cannot unpack.
    ///
    /// # Errors
    /// When the image does not follow Linux' boot protocol, or its compression is not supported here.
    pub fn elf(&self) -> Result<Vec<u8>> {
        let image = fs::read(&self.image).with_context(|| format!("reading {}", self.image.display()))?;
        let word = |at: usize| {
            let bytes = image.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            Ok::<usize, anyhow::Error>(usize::try_from(u32::from_le_bytes(bytes.context("no kernel")?))?)
        };
        ensure!(image.get(0x202..0x206) == Some(b"HdrS"), "{} is no bzImage", self.image.display());
        // setup_sects, payload_offset and payload_length.
        let sectors = usize::from(*image.get(0x1f1).context("no kernel")?);
        let begin = (sectors + 1) * 512 + word(0x248)?;
        // The payload ends with its unpacked length, which is counted in the payload's length.
        let payload = image.get(begin..begin + word(0x24c)? - 4).context("the kernel is cut short")?;
        let unpacker: &[&str] = match payload {
            [0xfd, b'7', b'z', b'X', b'Z', ..] => &["xz", "-dc", "--single-stream"],
            [0x28, 0xb5, 0x2f, 0xfd, ..] => &["zstd", "-dcq"],
            other => bail!("a kernel packed as {:02x?}", other.get(..4)),
        };
        let work = tempfile::tempdir().context("a folder to unpack in")?;
        let (packed, kernel) = (work.path().join("packed"), work.path().join("kernel"));
        fs::write(&packed, payload)?;
        unpack(Command::new(unpacker[0]).args(&unpacker[1..]).arg(&packed), &kernel)?;
        fs::read(&kernel).context("reading the kernel")
    }

    /// The file of [`Self::elf`], made the first time. A machine boots it without the kernel's own unpacking, which takes an emulated
    /// processor one to three seconds.
    ///
    /// # Errors
    /// As [`Self::elf`], or when the file cannot be written.
    pub fn unpacked(&self) -> Result<PathBuf> {
        let _lock = paths::cache_lock("kernels")?;
        let unpacked = self.image.with_file_name("vmlinux");
        if !unpacked.exists() {
            // Under another name first, so that an interrupted run leaves no file that looks finished.
            let unfinished = self.image.with_file_name("vmlinux.unfinished");
            fs::write(&unfinished, self.elf()?).context("writing the unpacked kernel")?;
            fs::rename(&unfinished, &unpacked).context("moving the unpacked kernel into place")?;
        }
        Ok(unpacked)
    }

    fn open(series: Series, folder: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        Ok(Self {
            series,
            version: read("version")?.trim().to_owned(),
            image: folder.join("vmlinuz"),
            modules: read("order")?
                .split_whitespace()
                .map(|name| folder.join("modules").join(name))
                .collect(),
        })
    }
}

/// Prometheus' checker of alert rules. Its package is unpacked and not installed, because its service is not needed.
///
/// # Errors
/// When it is neither in the cache nor can be downloaded.
pub fn promtool() -> Result<PathBuf> {
    if let Some(there) = promtool_if_there()? {
        return Ok(there);
    }
    let _lock = paths::cache_lock("promtool")?;
    progress::step("downloading promtool (Debian package prometheus)");
    let folder = paths::cache()?.join("promtool");
    let new = folder.with_extension("new");
    unpack_packages(&["prometheus"], &new)?;
    fs::rename(&new, &folder).with_context(|| format!("putting {} in its place", folder.display()))?;
    promtool_if_there()?.context("the package prometheus has no promtool")
}

/// The same, or `None` if it was not downloaded before.
///
/// # Errors
/// When the cache cannot be found.
pub fn promtool_if_there() -> Result<Option<PathBuf>> {
    let path = paths::cache()?.join("promtool/usr/bin/promtool");
    Ok(path.exists().then_some(path))
}

/// The suites with a QEMU that passes every feature of a device on, and with its libraries.
const NEWER_QEMU: [&str; 2] = ["trixie", "trixie-backports"];

/// A QEMU of Debian 13's backports with all its dependencies, unpacked beside the system: 11 or newer.
///
/// # Errors
/// When it is neither in the cache nor can be downloaded.
pub(crate) fn newer_qemu() -> Result<PathBuf> {
    let _lock = paths::cache_lock("qemu-newer")?;
    let folder = paths::cache()?.join("qemu-newer");
    if !folder.exists() {
        progress::step("downloading a newer QEMU (Debian 13 backports)");
        let new = folder.with_extension("new");
        if new.exists() {
            fs::remove_dir_all(&new).with_context(|| format!("removing the incomplete {}", new.display()))?;
        }
        let apt = PrivateApt::of("apt-newer", &Sources::Debian(&NEWER_QEMU))?;
        let packages = apt.with_dependencies("qemu-system-x86", NEWER_QEMU[1])?;
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        apt.unpack(&packages, &new)?;
        fs::rename(&new, &folder).with_context(|| format!("putting {} in its place", folder.display()))?;
    }
    Ok(folder)
}

/// A fresh system of Debian 12 with systemd, as a tree: the result of an installer, without a kernel, documentation and network.
/// Made the first time, from the cache after that.
///
/// # Errors
/// When it is neither in the cache nor can be made.
pub fn system() -> Result<PathBuf> {
    const INCLUDED: &str = "systemd,systemd-sysv,udev,kmod,dbus,libpam-systemd";
    let _lock = paths::cache_lock("system")?;
    let folder = paths::cache()?.join("system");
    let (stamp, tree) = (folder.join("included"), folder.join("bookworm"));
    if fs::read_to_string(&stamp).is_ok_and(|have| have == INCLUDED) {
        return Ok(tree);
    }
    ensure(&["mmdebstrap", "kmod"])?;
    progress::step("making a fresh Debian system (mmdebstrap)");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("removing the old {}", folder.display()))?;
    }
    fs::create_dir_all(&tree).with_context(|| format!("creating {}", tree.display()))?;
    let archive = folder.join("bookworm.tar");
    let mut make = Command::new("mmdebstrap");
    make.args(["--quiet", "--variant=minbase", "--format=tar"]).arg(format!("--include={INCLUDED}"));
    make.args(
        ["doc", "locale", "man", "info"].map(|name| format!("--dpkgopt=path-exclude=/usr/share/{name}/*")),
    );
    make.arg("bookworm").arg(&archive).arg(mirror());
    output_of(&mut make, NETWORK)?;
    // Device nodes need root, and the guest's kernel makes its own.
    let mut unpack = Command::new("tar");
    unpack.args(["--extract", "--exclude=./dev/*", "--no-same-owner", "--file"]).arg(&archive);
    output_of(unpack.arg("--directory").arg(&tree), NETWORK)?;
    fs::remove_file(&archive)?;
    fs::write(&stamp, INCLUDED).context("marking the system as complete")?;
    Ok(tree)
}

/// Ubuntu's archive.
const UBUNTU: &str = "http://archive.ubuntu.com/ubuntu";

/// The keyring of Ubuntu's archive, from a package of Debian.
fn ubuntu_keyring() -> Result<PathBuf> {
    let _lock = paths::cache_lock("ubuntu-keyring")?;
    let folder = paths::cache()?.join("ubuntu-keyring");
    let keyring = folder.join("usr/share/keyrings/ubuntu-archive-keyring.gpg");
    if !keyring.exists() {
        unpack_packages(&["ubuntu-keyring"], &folder)?;
    }
    ensure!(keyring.exists(), "the package ubuntu-keyring has no {}", keyring.display());
    Ok(keyring)
}

/// Unpacks packages into a folder, without their dependencies and without installing them.
///
/// # Errors
/// When they cannot be downloaded.
pub(crate) fn unpack_packages(packages: &[&str], into: &Path) -> Result<()> {
    PrivateApt::new()?.unpack(packages, into)
}

/// An apt with its own sources, lists and status, which any user can use for downloads.
struct PrivateApt {
    options: Vec<String>,
    /// Held for the whole life: only one process may use the state at a time.
    _lock: fs::File,
}

impl PrivateApt {
    /// An apt with the suites for guests.
    fn new() -> Result<Self> {
        Self::of("apt", &Sources::Host)
    }

    /// An apt with these sources, in its own folder of the cache.
    fn of(name: &str, sources: &Sources) -> Result<Self> {
        // Before the lock of the folder: this takes a lock of its own.
        let (keyring, mirror) = match sources {
            Sources::Host | Sources::Debian(_) => (PathBuf::from(KEYRING), mirror()),
            Sources::Ubuntu(_) => (ubuntu_keyring()?, UBUNTU.to_owned()),
        };
        let lock = paths::cache_lock(name)?;
        let folder = paths::cache()?.join(name);
        for sub in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(folder.join(sub)).with_context(|| format!("creating {}", folder.display()))?;
        }
        let release = Release::of_this_host()?;
        ensure!(
            release.id == "debian",
            "packages for guests are fetched with apt from Debian's suites; this host is {:?}",
            release.id
        );
        let suites: &[&str] = match sources {
            Sources::Host if release.version == "12" => &["bookworm", "bookworm-backports"],
            Sources::Host => &["bookworm", "trixie"],
            Sources::Debian(suites) | Sources::Ubuntu(suites) => suites,
        };
        let keyring = keyring.display();
        let sources: String =
            suites.iter().map(|suite| format!("deb [signed-by={keyring}] {mirror} {suite} main\n")).collect();
        fs::write(folder.join("sources.list"), sources).context("writing the list of sources")?;
        fs::write(folder.join("status"), "").context("writing an empty package status")?;
        let at = |name: &str| folder.join(name).display().to_string();
        let options = [
            format!("Dir::State={}", at("")),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("")),
            format!("Dir::Cache::archives={}", at("archives")),
            format!("Dir::Etc::sourcelist={}", at("sources.list")),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
            "APT::Architecture=amd64".to_owned(),
            "Acquire::Languages=none".to_owned(),
        ];
        let options = options.into_iter().flat_map(|option| ["-o".to_owned(), option]).collect();
        let apt = Self { options, _lock: lock };
        output_of(apt.command("apt-get").arg("update"), NETWORK)?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options);
        command
    }

    fn unpack(&self, packages: &[&str], into: &Path) -> Result<()> {
        let work = tempfile::tempdir_in(paths::cache()?).context("creating a folder to download to")?;
        output_of(self.command("apt-get").arg("download").args(packages).current_dir(work.path()), NETWORK)?;
        let mut unpacked = 0;
        for deb in fs::read_dir(work.path())?.flatten().map(|entry| entry.path()) {
            if deb.extension().is_some_and(|extension| extension == "deb") {
                output_of(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(into), NETWORK)?;
                unpacked += 1;
            }
        }
        ensure!(unpacked == packages.len(), "apt-get download left {unpacked} packages of {packages:?}");
        Ok(())
    }

    /// The packages, with versions, that an installation of a package of a suite on an empty system would install.
    fn with_dependencies(&self, package: &str, suite: &str) -> Result<Vec<String>> {
        let mut simulate = self.command("apt-get");
        simulate.args([
            "--simulate",
            "--no-install-recommends",
            "--target-release",
            suite,
            "install",
            package,
        ]);
        Ok(simulated(&output_of(&mut simulate, QUICK)?))
    }

    /// The packages of a kernel: in some distributions modules, and even the image, are in packages of their own.
    fn parts_of(&self, kernel: &str) -> Result<Vec<String>> {
        let depends = output_of(self.command("apt-cache").args(["depends", kernel]), QUICK)?;
        let parts = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        // The package without a version is for all kernels, and contains no modules.
        let holds = ["linux-modules-", "linux-binary-", "linux-base-"];
        let parts = parts.filter(|part| holds.iter().any(|start| part.starts_with(start)));
        Ok([kernel].into_iter().chain(parts).map(str::to_owned).collect())
    }

    fn unpack_kernel(&self, series: Series, metapackage: &str, modules: &[&str], into: &Path) -> Result<()> {
        let known = output_of(self.command("apt-cache").args(["show", metapackage]), QUICK)?;
        let package = kernel_package(&known, series)
            .with_context(|| format!("no version of {metapackage} depends on a kernel {series}"))?;
        let version = package.trim_start_matches("linux-image-").to_owned();
        progress::step(format!("{package}: download and unpack"));
        let work = tempfile::tempdir_in(paths::cache()?).context("creating a folder to unpack in")?;
        let root = work.path().join("root");
        let parts = self.parts_of(&package)?;
        self.unpack(&parts.iter().map(String::as_str).collect::<Vec<_>>(), &root)?;

        let ready = work.path().join("ready");
        fs::create_dir_all(ready.join("modules"))?;
        // Debian 13 moved the modules.
        let tree = ["usr/lib/modules", "lib/modules"]
            .map(|folder| root.join(folder).join(&version))
            .into_iter()
            .find(|folder| folder.is_dir())
            .context("the kernel package has no modules")?;
        // Releases after Debian 13 have the image beside the modules, too.
        let image = [root.join(format!("boot/vmlinuz-{version}")), tree.join("vmlinuz")];
        let image = image.into_iter().find(|image| image.exists()).context("the package has no kernel")?;
        fs::copy(&image, ready.join("vmlinuz")).with_context(|| format!("copying {}", image.display()))?;
        let order = copy_modules(&tree, modules, &ready.join("modules"))?;
        fs::write(ready.join("order"), order.join("\n"))?;
        fs::write(ready.join("version"), &version)?;
        fs::write(ready.join("wanted"), modules.join("\n"))?;
        fs::create_dir_all(into.parent().context("the cache has a parent")?)?;
        if into.exists() {
            fs::remove_dir_all(into)
                .with_context(|| format!("removing the incomplete {}", into.display()))?;
        }
        fs::rename(&ready, into).with_context(|| format!("moving the kernel to {}", into.display()))
    }
}

/// The packages of a simulated installation, each with its version.
fn simulated(output: &str) -> Vec<String> {
    let installed = output.lines().filter_map(|line| line.strip_prefix("Inst "));
    installed
        .filter_map(|line| {
            let (name, rest) = line.split_once(" (")?;
            Some(format!("{name}={}", rest.split(' ').next()?))
        })
        .collect()
}

/// The kernel of `series` among the dependencies of all versions of the metapackage in apt's lists, newest first.
fn kernel_package(known: &str, series: Series) -> Option<String> {
    let wanted = format!("linux-image-{}.", series.number());
    known
        .lines()
        .filter_map(|line| line.strip_prefix("Depends:"))
        .flat_map(|depends| depends.split(','))
        .filter_map(|dependency| dependency.split_whitespace().next())
        .find(|package| package.starts_with(&wanted))
        .map(str::to_owned)
}

/// Copies the wanted modules with their dependencies, uncompressed; returns file names in loading order.
fn copy_modules(tree: &Path, modules: &[&str], to: &Path) -> Result<Vec<String>> {
    let mut index = HashMap::new();
    index_modules(tree, &mut index)?;
    ensure!(!index.is_empty(), "no kernel modules under {}", tree.display());
    let built_in: BTreeSet<String> = fs::read_to_string(tree.join("modules.builtin"))
        .context("reading modules.builtin")?
        .lines()
        .filter_map(|line| module_name(Path::new(line)))
        .collect();
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    for module in modules {
        copy_module(module, &index, &built_in, to, &mut seen, &mut order)?;
    }
    Ok(order)
}

fn copy_module(
    name: &str,
    index: &HashMap<String, PathBuf>,
    built_in: &BTreeSet<String>,
    to: &Path,
    seen: &mut BTreeSet<String>,
    order: &mut Vec<String>,
) -> Result<()> {
    if built_in.contains(name) || !seen.insert(name.to_owned()) {
        return Ok(());
    }
    let path =
        index.get(name).with_context(|| format!("kernel module {name} is neither built in nor packaged"))?;
    let file = format!("{name}.ko");
    let target = to.join(&file);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => unpack(Command::new("xz").arg("-dc").arg(path), &target)?,
        Some("zst") => unpack(Command::new("zstd").arg("-dcq").arg(path), &target)?,
        _ => fs::copy(path, &target).map(drop).with_context(|| format!("copying {}", path.display()))?,
    }
    let contents = fs::read(&target).with_context(|| format!("reading {}", target.display()))?;
    for dependency in module_dependencies(&contents) {
        copy_module(&dependency, index, built_in, to, seen, order)?;
    }
    order.push(file);
    Ok(())
}

fn unpack(command: &mut Command, to: &Path) -> Result<()> {
    let file = fs::File::create(to).with_context(|| format!("creating {}", to.display()))?;
    let status = command.stdout(file).status().with_context(|| process::display(command))?;
    ensure!(status.success(), "{}: {status}", process::display(command));
    Ok(())
}

fn index_modules(folder: &Path, index: &mut HashMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() && !path.is_symlink() {
            index_modules(&path, index)?;
        } else if let Some(name) = module_name(&path) {
            index.insert(name, path);
        }
    }
    Ok(())
}

/// Name of a module by its file: `virtio-gpu.ko.xz` is the module `virtio_gpu`.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = file.strip_suffix(".xz").or_else(|| file.strip_suffix(".zst")).unwrap_or(file);
    stem.strip_suffix(".ko").map(|name| name.replace('-', "_"))
}

/// The `depends=` entry of a module's `.modinfo`.
fn module_dependencies(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(start) = module.windows(key.len()).position(|window| window == key) else { return Vec::new() };
    let value = &module[start + key.len()..];
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end])
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_is_found_through_the_metapackage() {
        let known = "Package: linux-image-amd64\nVersion: 6.12.95-1~bpo12+1\n\
                     Depends: linux-image-6.12.95+deb12-amd64 (= 6.12.95-1~bpo12+1)\n\n\
                     Package: linux-image-amd64\nVersion: 6.1.176-1\n\
                     Depends: linux-image-6.1.0-50-amd64 (= 6.1.176-1)\n";
        assert_eq!(kernel_package(known, Series::V6_1).unwrap(), "linux-image-6.1.0-50-amd64");
        assert_eq!(kernel_package(known, Series::V6_12).unwrap(), "linux-image-6.12.95+deb12-amd64");
        assert_eq!(kernel_package("Depends: linux-image-6.16.3-amd64\n", Series::V6_1), None);
    }

    #[test]
    fn simulation_names_packages_with_their_versions() {
        let output = "NOTE: This is only a simulation!\nInst gcc-14-base (14.2.0-19 Debian:13.1/stable [amd64])\n\
                      Inst qemu-system-x86 (1:11.1.3+ds-1~bpo13+1 Debian Backports:13/stable-backports [amd64])\n\
                      Conf gcc-14-base (14.2.0-19 Debian:13.1/stable [amd64])\n";
        assert_eq!(simulated(output), ["gcc-14-base=14.2.0-19", "qemu-system-x86=1:11.1.3+ds-1~bpo13+1"]);
    }

    #[test]
    fn only_debian_12_needs_a_suite_named_for_qemu() {
        let bookworm = Release::parse("ID=debian\nVERSION_ID=\"12\"\nVERSION_CODENAME=bookworm\n");
        assert_eq!(bookworm.qemu_suite().as_deref(), Some("bookworm-backports"));
        let trixie = Release::parse("ID=debian\nVERSION_ID=\"13\"\nVERSION_CODENAME=trixie\n");
        assert_eq!(trixie.qemu_suite(), None);
    }

    #[test]
    fn versions_modules_and_mirrors_are_parsed() {
        assert_eq!(qemu_major("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright"), Some(10));
        assert_eq!(qemu_major("something else"), None);
        assert_eq!(
            module_name(Path::new("kernel/drivers/gpu/drm/virtio/virtio-gpu.ko.xz")).unwrap(),
            "virtio_gpu"
        );
        assert_eq!(module_name(Path::new("modules.dep")), None);
        assert_eq!(module_dependencies(b"x\0depends=drm,drm-kms-helper\0name=y"), ["drm", "drm_kms_helper"]);
        assert!(module_dependencies(b"x\0depends=\0name=y").is_empty());
        let targets = "http://mirror/security/ bookworm-security main\nhttp://mirror/debian/ bookworm main\n";
        assert_eq!(mirror_from(targets).unwrap(), "http://mirror/debian");
    }
}
