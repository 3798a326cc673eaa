//! The files that a confined process finds in its root: the lists, as data.

use std::{
    ffi::{CStr, OsString},
    io::{self, Read as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use sluice_messages::inventory::{Visible, VisibleInstance};
use sluice_sandbox::DriverList;

/// The use of a file, or of all files of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Reading.
    Read,
    /// Reading, running, and loading as a library.
    Execute,
    /// Reading and writing device nodes.
    Device,
    /// Reading, writing, creating and removing.
    Write,
}

/// A directory in which no process finds or makes a file: for services of drivers that workers must not reach.
pub(super) const EMPTY: &str = "/var/empty";

/// The files of a process's threads, with the name of each. `cuInit` names a thread by its file, and fails with 304 if it cannot (seen with
/// 580.159 on an H100).
pub(super) const OWN_THREADS: &CStr = c"/proc/self/task";

/// Files about the host and its processors that the C library and drivers read; a missing one is left out.
const HOST: [&str; 12] = [
    "/etc/ld.so.cache",
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/vm/max_map_count",
    "/proc/sys/vm/mmap_min_addr",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/sys/kernel/mm/transparent_hugepage",
];

/// Device nodes without a device.
const NODES: [&str; 4] = ["/dev/full", "/dev/null", "/dev/urandom", "/dev/zero"];

/// Files of NVIDIA's kernel driver and of the buses of its devices. Without `/proc/modules` its libraries conclude that the driver is not
/// loaded, and start a program to load it, which ends the process.
const NVIDIA_KERNEL: [&str; 6] = [
    "/proc/driver/nvidia",
    "/proc/driver/nvidia-caps",
    "/proc/modules",
    "/sys/bus/pci",
    "/sys/devices",
    "/sys/module/nvidia",
];

/// The state of NVIDIA's kernel driver.
const NVIDIA_STATE: &str = "/proc/driver/nvidia";

/// Nodes of NVIDIA's driver that every process with a GPU opens.
const NVIDIA_NODES: [&str; 2] = ["/dev/nvidia-uvm", "/dev/nvidiactl"];

/// The nodes of NVIDIA's capabilities: access to each instance, and for root the making of instances and figures of all.
const NVIDIA_CAPABILITIES: &str = "/dev/nvidia-caps";

/// Settings of NVIDIA's driver for a process that a guest can take over: no server that other processes also use, and no file of
/// compiled code that another process reads.
const NVIDIA_SETTINGS: [(&str, &str); 2] = [("CUDA_MPS_PIPE_DIRECTORY", EMPTY), ("CUDA_CACHE_DISABLE", "1")];

/// The variable that names the directory of the software GPU's devices.
const STATE: &str = "SLUICE_SOFTGPU_STATE";

/// The driver of a worker.
#[derive(Debug)]
pub(super) enum DriverFiles {
    /// NVIDIA's, with the libraries that it can load itself. `manages` is true for the management library, which makes instances.
    Nvidia { library: PathBuf, further: Vec<PathBuf>, manages: bool },
    /// Another library with the same interface: the software GPU, whose devices are the files of a directory.
    Software { library: PathBuf, state: PathBuf },
}

impl DriverFiles {
    /// The driver behind a library. The environment names the directory of the software GPU.
    pub(super) fn from_environment(library: PathBuf) -> io::Result<Self> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // The file may name another directory, and the launcher does not read it.
        if variable("SLUICE_SOFTGPU_CONFIG").is_some() && variable(STATE).is_none() {
            return Err(io::Error::other(format!("SLUICE_SOFTGPU_CONFIG is set without {STATE}")));
        }
        Self::of(library, variable(STATE))
    }

    pub(super) fn of(library: PathBuf, state: Option<PathBuf>) -> io::Result<Self> {
        std::fs::metadata(&library)?;
        // A branch of NVIDIA's driver without a list is refused here, too, with the branches that have one.
        DriverList::of_library(&library).map_err(io::Error::other)?;
        let further = sluice_sandbox::further_libraries(&library);
        if !further.is_empty() {
            let name = library.file_name().unwrap_or_default();
            let manages = name.as_encoded_bytes().starts_with(b"libnvidia-ml.so");
            return Ok(Self::Nvidia { library, further, manages });
        }
        // Its own default.
        let user = rustix::process::geteuid().as_raw();
        let state = state.unwrap_or_else(|| format!("/dev/shm/sluice-softgpu-{user}").into());
        make_present(&state)?;
        check_owner(&state)?;
        Ok(Self::Software { library, state })
    }

    /// Variables of a confined process.
    pub(super) fn variables(&self) -> Vec<(&'static str, OsString)> {
        match self {
            Self::Nvidia { .. } => NVIDIA_SETTINGS.map(|(name, value)| (name, value.into())).into(),
            // It would look for its own default in a directory that the root does not have.
            Self::Software { state, .. } => vec![(STATE, state.clone().into_os_string())],
        }
    }

    /// The libraries that the driver can load itself and that the host does not have.
    pub(super) fn missing_libraries(&self) -> Vec<PathBuf> {
        match self {
            Self::Nvidia { further, manages: false, .. } => {
                further.iter().filter(|library| !library.exists()).cloned().collect()
            }
            Self::Nvidia { .. } | Self::Software { .. } => Vec::new(),
        }
    }

    fn library(&self) -> &Path {
        match self {
            Self::Nvidia { library, .. } | Self::Software { library, .. } => library,
        }
    }
}

/// A command that makes the loader list the libraries of a program that also loads `driver`, instead of running it.
pub(super) fn loader(program: &Path, driver: Option<&DriverFiles>) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("LD_TRACE_LOADED_OBJECTS", "1");
    if let Some(driver) = driver {
        command.env("LD_PRELOAD", driver.library());
    }
    command
}

/// The libraries that a [`loader`] lists.
///
/// # Errors
/// If the loader cannot be started, or does not find a library.
pub(super) fn libraries(mut loader: Command) -> io::Result<Vec<PathBuf>> {
    let (mut errors, writer) = io::pipe()?;
    let output = loader.stderr(writer).output();
    // The other end is open until then.
    drop(loader);
    let mut said = String::new();
    errors.read_to_string(&mut said)?;
    let output =
        output.map_err(|error| io::Error::new(error.kind(), one_line(&[&error.to_string(), &said])))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let missing = text.lines().filter(|line| line.contains("not found")).collect::<Vec<_>>().join("\n");
    if !output.status.success() || !missing.is_empty() || !said.is_empty() {
        let reason = "the loader does not find all libraries";
        return Err(io::Error::other(one_line(&[reason, &missing, &said])));
    }
    Ok(listed(&text))
}

/// The lines of texts, in one line of a log.
fn one_line(texts: &[&str]) -> String {
    let lines = texts.iter().flat_map(|text| text.lines()).map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}

/// The paths in a list of the loader, whose lines are `NAME => PATH (ADDRESS)` or `PATH (ADDRESS)`.
fn listed(text: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let file = line.split_once("=>").map_or(line, |(_, file)| file);
        let (file, _address) = file.rsplit_once('(')?;
        Some(PathBuf::from(file.trim())).filter(|file| file.is_absolute())
    };
    text.lines().filter_map(path).collect()
}

/// A file or directory of a list.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ListedFile {
    pub(super) path: PathBuf,
    pub(super) access: Access,
    pub(super) is_directory: bool,
    /// Its file system and its number there: another file at the same path differs.
    identity: (u64, u64),
}

/// The files and directories of the host that a process may use, without its own directory in `/proc`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FileList {
    files: Vec<ListedFile>,
    /// Files that have other contents in a root than on the host.
    replaced: Vec<(PathBuf, Vec<u8>)>,
    /// True if the process may name its threads by their files.
    names_threads: bool,
}

impl FileList {
    /// The files of a process that sees these devices.
    ///
    /// # Errors
    /// If a file that each such process needs cannot be found.
    pub(super) fn of(
        program: &Path,
        libraries: &[PathBuf],
        driver: Option<&DriverFiles>,
        visible: Visible,
    ) -> io::Result<Self> {
        let mut list = Self::default();
        list.add(program, Access::Execute)?;
        libraries.iter().try_for_each(|library| list.add(library, Access::Execute))?;
        list.add_present(HOST, Access::Read)?;
        list.add_present(NODES, Access::Device)?;
        match driver {
            None => {}
            Some(DriverFiles::Nvidia { library, further, manages }) => {
                list.add(library, Access::Execute)?;
                list.add_present(NVIDIA_KERNEL, Access::Read)?;
                list.add_present(NVIDIA_NODES, Access::Device)?;
                let state = Path::new(NVIDIA_STATE);
                list.replace_present(&state.join("params"), without_new_nodes)?;
                list.add_present(nodes_of(state, visible)?, Access::Device)?;
                if *manages {
                    list.add_present([NVIDIA_CAPABILITIES], Access::Device)?;
                } else {
                    list.let_name_threads();
                    list.add_present(further, Access::Execute)?;
                    for (file, node) in capabilities_of(state, visible)? {
                        list.replace_present(&file, without_new_nodes)?;
                        list.add_present([node], Access::Device)?;
                    }
                }
            }
            Some(DriverFiles::Software { library, state }) => {
                list.add(library, Access::Execute)?;
                // It may have been removed since the start of the launcher.
                make_present(state)?;
                list.add(state, Access::Write)?;
            }
        }
        Ok(list)
    }

    /// The files and directories.
    pub(super) fn files(&self) -> impl Iterator<Item = &ListedFile> {
        self.files.iter()
    }

    /// The paths of files that have these contents in a root.
    pub(super) fn replaced(&self) -> impl Iterator<Item = (&Path, &[u8])> {
        self.replaced.iter().map(|(path, contents)| (path.as_path(), contents.as_slice()))
    }

    /// Lets the process name its threads by their files.
    pub(super) const fn let_name_threads(&mut self) {
        self.names_threads = true;
    }

    /// True if the process may name its threads by their files.
    pub(super) const fn names_threads(&self) -> bool {
        self.names_threads
    }

    pub(super) fn add(&mut self, path: &Path, access: Access) -> io::Result<()> {
        let found = std::fs::metadata(path)?;
        if !self.files.iter().any(|file| file.path == path) {
            let identity = (found.dev(), found.ino());
            let is_directory = found.is_dir();
            self.files.push(ListedFile { path: path.to_owned(), access, is_directory, identity });
        }
        Ok(())
    }

    /// Changes the contents of a file in a listed directory, if the host has it.
    pub(super) fn replace_present(&mut self, path: &Path, change: fn(&str) -> String) -> io::Result<()> {
        match std::fs::read_to_string(path) {
            Ok(text) => self.replaced.push((path.to_owned(), change(&text).into_bytes())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Adds those of the files that the host has.
    fn add_present<P: AsRef<Path>>(
        &mut self,
        paths: impl IntoIterator<Item = P>,
        access: Access,
    ) -> io::Result<()> {
        paths.into_iter().try_for_each(|path| match self.add(path.as_ref(), access) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        })
    }
}

/// The nodes of the GPUs that a process may open, from the state of NVIDIA's kernel driver: of the one GPU that it sees, or whose
/// instance it sees; or else of all.
fn nodes_of(state: &Path, visible: Visible) -> io::Result<Vec<PathBuf>> {
    let mut nodes = Vec::new();
    for gpu in read_present(&state.join("gpus"))? {
        let text = std::fs::read_to_string(gpu.join("information"))?;
        let Some(minor) = value(&text, "Device Minor") else { continue };
        let seen = match visible {
            Visible::Gpu(_) => {
                // The driver writes question marks until a process has opened the GPU.
                let found = value(&text, "GPU UUID").filter(|found| !found.contains('?'));
                visible.variable().is_none_or(|uuid| found.is_none_or(|found| found == uuid))
            }
            Visible::Instance(instance) => gpu.ends_with(instance.pci.to_string()),
            Visible::Host | Visible::Ordinal(_) => true,
        };
        if seen {
            nodes.push(PathBuf::from(format!("/dev/nvidia{minor}")));
        }
    }
    Ok(nodes)
}

/// The capabilities by which a process may use instances, from the state of NVIDIA's kernel driver: the file about each, and its node.
/// Those of the one instance that it sees, none for a process on a whole GPU, or else those of all instances.
fn capabilities_of(state: &Path, visible: Visible) -> io::Result<Vec<(PathBuf, PathBuf)>> {
    let mut places = Vec::new();
    match visible {
        Visible::Gpu(_) => {}
        Visible::Instance(VisibleInstance { pci, gpu, compute, .. }) => {
            let information = state.join("gpus").join(pci.to_string()).join("information");
            let information = std::fs::read_to_string(information)?;
            let minor = value(&information, "Device Minor").ok_or_else(|| {
                io::Error::other(format!("NVIDIA's kernel driver names no number of the GPU at {pci}"))
            })?;
            let instance = state.join(format!("capabilities/gpu{minor}/mig/gi{gpu}"));
            places.extend([instance.join(format!("ci{compute}")), instance]);
        }
        Visible::Host | Visible::Ordinal(_) => {
            for gpu in read_named(&state.join("capabilities"), "gpu")? {
                for instance in read_named(&gpu.join("mig"), "gi")? {
                    places.extend(read_named(&instance, "ci")?);
                    places.push(instance);
                }
            }
        }
    }
    let mut capabilities = Vec::new();
    for place in places {
        let file = place.join("access");
        let text = std::fs::read_to_string(&file)?;
        if let Some(minor) = value(&text, "DeviceFileMinor") {
            let node = Path::new(NVIDIA_CAPABILITIES).join(format!("nvidia-cap{minor}"));
            capabilities.push((file, node));
        }
    }
    Ok(capabilities)
}

/// The entries of a directory whose names are this and a number.
fn read_named(directory: &Path, name: &str) -> io::Result<Vec<PathBuf>> {
    let is_named = |file: &PathBuf| {
        let number = file.file_name().and_then(|file| file.to_str()?.strip_prefix(name));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    Ok(read_present(directory)?.into_iter().filter(is_named).collect())
}

/// Settings of NVIDIA's kernel driver, or of a capability, by which its libraries leave nodes as they are. In a user namespace root owns
/// no node, so the libraries would start a program to correct that, which ends the process.
fn without_new_nodes(parameters: &str) -> String {
    let parameters = parameters.replace("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0");
    parameters.replace("DeviceFileModify: 1", "DeviceFileModify: 0")
}

/// The value of a line `NAME: VALUE`.
fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim()))
}

/// Makes a directory for this user alone, if it does not exist: a confined process cannot.
fn make_present(directory: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Checks that only this user and root can replace the files of a directory: in `/dev/shm`, another user may have made it first, and its
/// files are the memory of all VMs.
fn check_owner(directory: &Path) -> io::Result<()> {
    let metadata = std::fs::symlink_metadata(directory)?;
    let own = rustix::process::geteuid().as_raw();
    let path = directory.display();
    if !metadata.is_dir() || ![0, own].contains(&metadata.uid()) {
        let reason = format!("the software GPU's {path} is no directory of this user or of root");
        return Err(io::Error::other(reason));
    }
    if metadata.mode() & 0o022 != 0 {
        let reason = format!("other users can write to the software GPU's {path}; `chmod 700` prevents it");
        return Err(io::Error::other(reason));
    }
    Ok(())
}

/// The entries of a directory; none if it does not exist.
fn read_present(directory: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.path())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use sluice_messages::inventory::PciAddress;

    use super::*;

    #[test]
    fn list_of_the_loader_has_libraries_by_name_and_by_path() {
        let text = "\tlinux-vdso.so.1 (0x1)\n\t/a/libcuda.so.1 (0x2)\n\tlibc.so.6 => /lib/libc.so.6 (0x3)\n\t/lib64/ld.so.2 (0x4)\n";
        let expected = ["/a/libcuda.so.1", "/lib/libc.so.6", "/lib64/ld.so.2"];
        assert_eq!(listed(text), expected.map(PathBuf::from));
    }

    #[test]
    fn error_of_the_loader_is_one_line() {
        let (missing, said) = ("\tlibx.so => not found\n\tliby.so => not found", "ld.so: bad\n");
        assert_eq!(
            one_line(&["reason", missing, said]),
            "reason; libx.so => not found; liby.so => not found; ld.so: bad"
        );
    }

    // Promise: F99
    #[test]
    fn driver_of_nvidia_names_the_libraries_of_its_version_that_are_missing() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("libcuda.so.580.65.06"), "").unwrap();
        std::os::unix::fs::symlink("libcuda.so.580.65.06", place.path().join("libcuda.so.1")).unwrap();
        let driver = DriverFiles::of(place.path().join("libcuda.so.1"), None).unwrap();
        assert!(matches!(driver, DriverFiles::Nvidia { manages: false, .. }));
        let compiler = place.path().join("libnvidia-ptxjitcompiler.so.580.65.06");
        let missing = driver.missing_libraries();
        assert!(missing.contains(&compiler), "{missing:?}");
        std::fs::write(&compiler, "").unwrap();
        assert_eq!(driver.missing_libraries().len(), missing.len() - 1);
        std::fs::write(place.path().join("libnvidia-ml.so.580.65.06"), "").unwrap();
        std::os::unix::fs::symlink("libnvidia-ml.so.580.65.06", place.path().join("libnvidia-ml.so.1"))
            .unwrap();
        let driver = DriverFiles::of(place.path().join("libnvidia-ml.so.1"), None).unwrap();
        assert!(matches!(driver, DriverFiles::Nvidia { manages: true, .. }));
    }

    // Promise: F88
    #[test]
    fn software_gpu_in_a_directory_that_other_users_can_write_to_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let library = place.path().join("libsoftgpu_cuda.so");
        std::fs::write(&library, "").unwrap();
        let state = place.path().join("state");
        std::fs::create_dir(&state).unwrap();
        for (mode, writable) in [(0o755, false), (0o775, true), (0o757, true), (0o1777, true), (0o700, false)]
        {
            std::fs::set_permissions(&state, std::fs::Permissions::from_mode(mode)).unwrap();
            let driver = DriverFiles::of(library.clone(), Some(state.clone())).map_err(|e| e.to_string());
            let names_it = |error: &String| {
                error.contains("other users can write to") && error.contains(&*state.to_string_lossy())
            };
            assert_eq!(driver.as_ref().is_err_and(names_it), writable, "{mode:o}: {driver:?}");
            assert_eq!(driver.is_ok(), !writable, "{mode:o}");
        }
    }

    // Promise: F88
    #[test]
    fn software_gpu_in_a_directory_of_another_user_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let library = place.path().join("libsoftgpu_cuda.so");
        std::fs::write(&library, "").unwrap();
        let of = |state: &Path| {
            DriverFiles::of(library.clone(), Some(state.to_owned())).map_err(|e| e.to_string())
        };
        let state = place.path().join("state");
        assert!(matches!(of(&state), Ok(DriverFiles::Software { .. })), "a directory that it makes itself");
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&state, &link).unwrap();
        assert!(of(&link).is_err_and(|error| error.contains("is no directory of this user or of root")));
        if std::os::unix::fs::chown(&state, Some(1), None).is_err() {
            return sluice_skip::skip("only root can give a directory to another user");
        }
        assert!(of(&state).is_err_and(|error| error.contains("is no directory of this user or of root")));
    }

    #[test]
    fn libraries_are_told_to_make_no_nodes() {
        let text = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileMode: 438\n";
        assert_eq!(
            without_new_nodes(text),
            "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 0\nDeviceFileMode: 438\n"
        );
        assert_eq!(without_new_nodes("DeviceFileModify: 1\n"), "DeviceFileModify: 0\n");
    }

    /// The state of a kernel driver with a whole GPU, and a divided one with two instances.
    fn state_with_instances() -> tempfile::TempDir {
        let state = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = state.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for (bus, uuid, minor) in [
            ("0000:01:00.0", "GPU-01234567-89ab-cdef-0011-223344556677", 0),
            ("0000:02:00.0", "GPU-11234567-89ab-cdef-0011-223344556677", 1),
        ] {
            let text = format!("Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n");
            write(&format!("gpus/{bus}/information"), &text);
        }
        for (path, minor) in [
            ("mig/config", 1),
            ("mig/monitor", 2),
            ("gpu1/mig/gi7/access", 66),
            ("gpu1/mig/gi7/ci0/access", 67),
            ("gpu1/mig/gi11/access", 102),
            ("gpu1/mig/gi11/ci0/access", 103),
        ] {
            let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
            write(&format!("capabilities/{path}"), &text);
        }
        // Some drivers have a capability of no GPU there.
        write("capabilities/fabric-imex-mgmt", "DeviceFileMinor: 3\nDeviceFileMode: 256\n");
        std::fs::create_dir_all(state.path().join("capabilities/gpu0/mig")).unwrap();
        state
    }

    // Promise: F90
    #[test]
    fn process_gets_nodes_of_its_gpu_and_none_that_make_instances() {
        let state = state_with_instances();
        let of = |visible| {
            let mut nodes = nodes_of(state.path(), visible).unwrap();
            nodes.extend(capabilities_of(state.path(), visible).unwrap().into_iter().map(|(_, node)| node));
            let mut names: Vec<_> = nodes.iter().map(|node| node.to_str().unwrap().to_owned()).collect();
            names.sort();
            names
        };
        let uuid = 0x0123_4567_89ab_cdef_0011_2233_4455_6677_u128.to_be_bytes();
        assert_eq!(of(Visible::Gpu(uuid)), ["/dev/nvidia0"]);
        let instances = [102, 103, 66, 67].map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}"));
        let pci = PciAddress { domain: 0, bus: 2, device: 0 };
        for (gpu, nodes) in [(11, &instances[..2]), (7, &instances[2..])] {
            let own = Visible::Instance(VisibleInstance { uuid, pci, gpu, compute: 0 });
            assert_eq!(of(own), [nodes, &["/dev/nvidia1".to_owned()]].concat());
        }
        let none = VisibleInstance { uuid, pci, gpu: 8, compute: 0 };
        assert!(capabilities_of(state.path(), Visible::Instance(none)).is_err());
        let both = ["/dev/nvidia0".to_owned(), "/dev/nvidia1".to_owned()];
        assert_eq!(of(Visible::Host), [&instances[..], &both].concat());
        // The second GPU may be any, until a process has opened it.
        let unopened = state.path().join("gpus/0000:02:00.0/information");
        std::fs::write(
            unopened,
            "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 1\n",
        )
        .unwrap();
        assert_eq!(of(Visible::Gpu(uuid)), both);
    }

    #[test]
    fn host_without_instances_has_no_nodes_of_capabilities() {
        let state = tempfile::tempdir().unwrap();
        assert!(capabilities_of(state.path(), Visible::Host).unwrap().is_empty());
        assert!(nodes_of(state.path(), Visible::Host).unwrap().is_empty());
    }

    #[test]
    fn node_of_a_gpu_is_in_its_information() {
        let text = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-1b\nDevice Minor: \t 3\n";
        assert_eq!(value(text, "GPU UUID"), Some("GPU-1b"));
        assert_eq!(value(text, "Device Minor"), Some("3"));
        assert_eq!(value(text, "Bus"), None);
    }
}
