//! The lists of drivers: calls that a driver's library makes, beside those of Sluice's own code.
//!
//! A library decides which list applies, by its file ([`DriverList::of_library`]), before it is loaded. The software GPU's list was made from
//! traces of the whole-system tests. NVIDIA's was made from public sources: the requests in [`crate::ioctls`], and calls of the C library for
//! files, memory and threads; a trace of 580.159 on an H100 confirmed it for that release. So a call that is on no list is answered with EPERM and a line of log there
//! ([`crate::refusal`]), and does not end the process; calls that only an attacker makes still do ([`crate::attacks`]).

use crate::{
    attacks, common,
    filter::{AllowList, FilterProfile, Otherwise, Rule},
    ioctls::{self, BRANCHES, DriverUser},
};
use libc::*;
use std::path::{Path, PathBuf};

/// A branch of NVIDIA's driver that has a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverBranch(u16);

impl DriverBranch {
    /// All branches that have a list.
    pub fn all() -> impl Iterator<Item = DriverBranch> {
        BRANCHES.iter().map(|(branch, _)| DriverBranch(*branch))
    }

    /// The branch of a version such as `580.95.05`.
    fn of_version(version: &str) -> Option<DriverBranch> {
        let number = version.split('.').next()?.parse().ok()?;
        DriverBranch::all().find(|branch| branch.0 == number)
    }
}

impl std::fmt::Display for DriverBranch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

/// The list that a driver's library needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverList {
    /// NVIDIA's driver of this branch.
    Nvidia(DriverBranch),
    /// Any other driver, such as the software GPU: files of its own, and no request to a device.
    Software,
}

/// No list fits a library.
#[derive(Debug, thiserror::Error)]
#[error(
    "{library} is NVIDIA's driver {version}: its branch has no list of requests and files, so it cannot be confined. Branches with a list: {}",
    listed()
)]
pub struct DriverListError {
    /// The library's file.
    pub library: PathBuf,
    /// Its version.
    pub version: String,
}

fn listed() -> String {
    BRANCHES.map(|(branch, _)| branch.to_string()).join(", ")
}

/// The version of NVIDIA's kernel module, if it is loaded.
const MODULE_VERSION: &str = "/sys/module/nvidia/version";

impl DriverList {
    /// Every list.
    pub fn all() -> impl Iterator<Item = DriverList> {
        core::iter::once(DriverList::Software).chain(DriverBranch::all().map(DriverList::Nvidia))
    }

    /// Chooses the list for the library at `path`: that of the branch of its [`nvidia_version`]. Every other library gets the list of the
    /// software GPU, under which no request reaches a device.
    ///
    /// # Errors
    /// [`DriverListError`] if the branch has no list.
    pub fn of_library(path: &Path) -> Result<DriverList, DriverListError> {
        DriverList::of_version(path, nvidia_version(path))
    }

    fn of_version(path: &Path, version: Option<String>) -> Result<DriverList, DriverListError> {
        let Some(version) = version else { return Ok(DriverList::Software) };
        DriverBranch::of_version(&version)
            .map(DriverList::Nvidia)
            .ok_or_else(|| DriverListError { library: path.to_path_buf(), version })
    }
}

/// The version of NVIDIA's driver to which the library at `path` belongs; `None` for every other library. NVIDIA's libraries have
/// their version as part of their file's name (`libcuda.so.580.95.05`, to which `libcuda.so.1` is a link). For a file that is called
/// `libcuda.so.1` itself, it is that of the loaded kernel module, which works with a library of the same version only.
#[must_use]
pub fn nvidia_version(path: &Path) -> Option<String> {
    // A path that leads nowhere cannot be loaded either, and the loader's error is clearer.
    let file = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    version_of_file(&file, || std::fs::read_to_string(MODULE_VERSION).ok())
}

/// Libraries beside NVIDIA's `libcuda.so` that it loads itself when a program needs them: its compilers and linkers. Those with `{}` carry the
/// driver's version. From the file lists of the driver's packages, branches 535 to 580; no branch has all.
const NVIDIA_LIBRARIES: [&str; 7] = [
    "libnvidia-gpucomp.so.{}",
    "libnvidia-nvvm.so.{}",
    "libnvidia-nvvm.so.4",
    "libnvidia-nvvm70.so.4",
    "libnvidia-ptxjitcompiler.so.{}",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-tileiras.so.{}",
];

/// The libraries that the driver at `library` loads itself when a program needs them, by their paths beside it. Any of them may be missing. There
/// are none for another driver than NVIDIA's.
#[must_use]
pub fn further_libraries(library: &Path) -> Vec<PathBuf> {
    let Some(version) = nvidia_version(library) else { return Vec::new() };
    let directory = library.parent().unwrap_or(Path::new("/"));
    NVIDIA_LIBRARIES.map(|name| directory.join(name.replace("{}", &version))).into()
}

fn version_of_file(file: &Path, module: impl FnOnce() -> Option<String>) -> Option<String> {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let suffix = ["libcuda.so", "libnvidia-ml.so"].iter().find_map(|stem| name.strip_prefix(stem))?;
    match suffix.strip_prefix('.').filter(|version| version.contains('.')) {
        Some(version) => Some(version.to_owned()),
        None => module().map(|version| version.trim().to_owned()),
    }
}

/// The filter of a process that loads a driver, with `ours` for the calls of its own code. With NVIDIA's driver, calls that are on no list are
/// refused.
pub(crate) fn profile(mut ours: Vec<Rule>, list: DriverList, user: DriverUser) -> FilterProfile {
    FilterProfile::Allow(match list {
        DriverList::Software => AllowList::strict(ours, software_loading(), common::absent()),
        DriverList::Nvidia(branch) => AllowList {
            ours: {
                ours.retain(|rule| rule.call != SYS_rt_sigprocmask);
                let why = "the blocked signals; the handler for refused calls changes them, without SIGSYS";
                ours.push(Rule::null(SYS_rt_sigprocmask, 1, why));
                ours
            },
            driver: nvidia(branch, user),
            absent: common::absent(),
            missing: nvidia_missing(),
            fatal: [attacks::everywhere(), attacks::leaving()].concat(),
            otherwise: Otherwise::Refuse,
        },
    })
}

/// Flags of `mmap` that drivers use: none of huge pages, which would empty the pool of the host's VMs.
const MAPPING: i32 = MAP_SHARED
    | MAP_PRIVATE
    | MAP_FIXED
    | MAP_ANONYMOUS
    | MAP_NORESERVE
    | MAP_DENYWRITE
    | MAP_STACK
    | MAP_POPULATE
    | MAP_32BIT
    | MAP_FIXED_NOREPLACE;

/// Calls that load a library.
fn loading() -> Vec<Rule> {
    vec![
        Rule::only(SYS_mmap, &[(3, MAPPING)], "loading a driver: its code is mapped"),
        Rule::any(SYS_mprotect, "loading a driver: its tables become read-only"),
        Rule::any(SYS_openat, "devices, libraries and files of a driver"),
        Rule::any(SYS_newfstatat, "loading libraries"),
        Rule::any(SYS_statx, "files of a driver"),
        Rule::any(SYS_getdents64, "lists of devices and processes"),
        Rule::any(SYS_access, "checking that devices and files exist"),
        Rule::any(SYS_readlink, "paths of devices and of the driver"),
    ]
}

/// Calls of the software GPU, for as long as it is used.
pub(crate) fn software() -> Vec<Rule> {
    vec![
        Rule::only(
            SYS_mmap,
            &[(2, PROT_READ | PROT_WRITE), (3, MAPPING)],
            "memory of the software GPU at addresses that the caller chooses; never code",
        ),
        Rule::without(
            SYS_mprotect,
            2,
            PROT_EXEC,
            "an area for the code of kernels is mapped before; no other code is",
        ),
        Rule::one_of(
            SYS_madvise,
            2,
            &[MADV_DONTFORK, MADV_WIPEONFORK],
            "a forked child does not share the software GPU's memory",
        ),
        Rule::any(SYS_getpid, "a forked child is not taken for its parent"),
        Rule::any(SYS_geteuid, "the owner of the software GPU's files"),
        Rule::one_of(
            SYS_kill,
            1,
            &[0],
            "checking that a process that uses the GPU still lives; no signal is sent",
        ),
        Rule::one_of(
            SYS_fcntl,
            1,
            &[F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW],
            "locks of bytes, which mark living processes and used memory",
        ),
        Rule::any(SYS_flock, "the software GPU's files, shared by processes"),
        Rule::any(SYS_lseek, "the number of a device, kept as the position of an open file"),
        Rule::any(SYS_ftruncate, "the length of the software GPU's files"),
        Rule::any(
            SYS_fallocate,
            "memory of the software GPU, and of the code of kernels, is taken and given back",
        ),
        Rule::any(SYS_pread64, "the software GPU's memory"),
        Rule::any(SYS_pwrite64, "the software GPU's memory, and the code of kernels"),
        Rule::any(SYS_msync, "checking that an address is mapped"),
        Rule::only(
            SYS_memfd_create,
            &[(1, MEMFD)],
            "memory of a test's driver, and the area for the code of kernels",
        ),
    ]
}

/// Flags of `memfd_create`: none of huge pages.
const MEMFD: i32 = (MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL).cast_signed();

/// Calls of the software GPU until its files are open.
fn software_loading() -> Vec<Rule> {
    let mut rules = software();
    rules.retain(|rule| ![SYS_mmap, SYS_mprotect].contains(&rule.call));
    rules.extend(loading());
    rules.extend([
        Rule::any(SYS_mkdir, "the software GPU's directory, of which this may be the first user"),
        Rule::any(SYS_unlink, "unused files of the software GPU"),
        Rule::any(SYS_inotify_init1, "errors of the software GPU"),
        Rule::any(SYS_inotify_add_watch, "errors of the software GPU"),
        Rule::any(SYS_poll, "waiting for errors of the software GPU"),
    ]);
    rules
}

/// The calling thread, named by 0. Any other number could be that of another VM's process, whose scheduling the kernel lets a process of the
/// same user change. A filter does not know a thread's own number, so `pthread_setaffinity_np` and `pthread_setschedparam` of the C library,
/// which pass it, fail with EPERM and leave a line in the log. Of 580.159.04, NVML passes 0, and libcuda makes
/// none of these calls.
const CALLER: i32 = 0;

/// Calls of NVIDIA's libraries, at any time: they open their devices again for every context.
///
/// Left out on purpose, and so answered with EPERM: `accept` and `sendmsg`, by which descriptors could be passed on; renamed files,
/// which only the cache of compiled code needs; and with ENOENT, all of [`nvidia_missing`].
fn nvidia(branch: DriverBranch, user: DriverUser) -> Vec<Rule> {
    let mut rules = loading();
    if user != DriverUser::Inventory {
        rules.extend(listening());
    }
    rules.extend([
        Rule::requests(
            SYS_ioctl,
            ioctls::allowed(branch.0, user),
            "the requests of the driver's kernel modules that this process needs",
        ),
        Rule::one_of(
            SYS_madvise,
            2,
            &[MADV_DONTFORK, MADV_DOFORK, MADV_WIPEONFORK, MADV_DONTDUMP, MADV_HUGEPAGE, MADV_NOHUGEPAGE],
            "memory that a device uses: a forked child does not share it",
        ),
        Rule::one_of(
            SYS_fcntl,
            1,
            &[F_DUPFD_CLOEXEC, F_DUPFD, F_GETLK, F_SETLK, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW],
            "copies of descriptors, and locks of files",
        ),
        Rule::commands(
            SYS_futex,
            1,
            &[FUTEX_REQUEUE, FUTEX_CMP_REQUEUE, FUTEX_WAKE_OP],
            FUTEX_PRIVATE_FLAG,
            "condition variables of older C libraries",
        ),
        Rule::any(SYS_open, "files of a driver"),
        Rule::any(SYS_stat, "files of a driver"),
        Rule::any(SYS_lstat, "files of a driver"),
        Rule::any(SYS_statfs, "file systems that a driver queries"),
        Rule::any(SYS_fstatfs, "the kind of memory of a file"),
        Rule::any(SYS_faccessat, "checking that devices and files exist"),
        Rule::any(SYS_faccessat2, "checking that devices and files exist"),
        Rule::any(SYS_readlinkat, "paths of devices and of the driver"),
        Rule::any(SYS_getcwd, "relative paths"),
        Rule::any(SYS_lseek, "files of a driver"),
        Rule::any(SYS_pread64, "files of a driver"),
        Rule::any(SYS_pwrite64, "files of a driver"),
        Rule::any(SYS_readv, "files of a driver"),
        Rule::any(SYS_ftruncate, "the length of memory files"),
        Rule::any(SYS_fallocate, "the length of memory files"),
        Rule::any(SYS_flock, "files of a driver, shared by processes"),
        Rule::only(SYS_memfd_create, &[(1, MEMFD)], "memory files"),
        Rule::any(SYS_dup, "descriptors that are exported"),
        Rule::any(SYS_poll, "waiting for events of devices"),
        Rule::only(SYS_epoll_create1, &[(0, EPOLL_CLOEXEC)], "waiting for events of devices"),
        Rule::any(SYS_epoll_ctl, "waiting for events of devices"),
        Rule::any(SYS_epoll_wait, "waiting for events of devices"),
        Rule::only(SYS_eventfd2, &[(1, EFD_CLOEXEC | EFD_NONBLOCK)], "wake-ups inside a driver"),
        Rule::only(SYS_pipe2, &[(1, O_CLOEXEC | O_NONBLOCK)], "wake-ups inside a driver"),
        Rule::any(SYS_pipe, "wake-ups inside a driver"),
        Rule::only(SYS_timerfd_create, &[(1, TFD_CLOEXEC | TFD_NONBLOCK)], "deadlines"),
        Rule::any(SYS_timerfd_settime, "deadlines"),
        Rule::any(SYS_nanosleep, "waiting of libraries"),
        Rule::any(SYS_getcpu, "choosing a queue by processor"),
        Rule::one_of(
            SYS_sched_setaffinity,
            0,
            &[CALLER],
            "binding of a driver's threads, by themselves as 0",
        ),
        Rule::any(SYS_sched_getparam, "priority of threads"),
        Rule::any(SYS_sched_getscheduler, "priority of threads"),
        Rule::exactly(
            SYS_sched_setscheduler,
            &[
                &[(0, CALLER), (1, SCHED_OTHER)],
                &[(0, CALLER), (1, SCHED_BATCH)],
                &[(0, CALLER), (1, SCHED_IDLE)],
            ],
            "scheduling of a driver's threads, by themselves as 0; never before those of the host",
        ),
        Rule::any(SYS_getpriority, "priority of threads"),
        Rule::any(SYS_sched_get_priority_max, "start-up of the compiler"),
        Rule::any(SYS_sched_get_priority_min, "start-up of the compiler"),
        Rule::any(SYS_sysinfo, "the amount of the host's memory"),
        Rule::of_self(SYS_prlimit64, "limits of its own, without changing them"),
        Rule::any(SYS_uname, "version of the kernel"),
        Rule::any(SYS_times, "processor time"),
        Rule::any(SYS_getrusage, "processor time"),
        Rule::any(SYS_mlock, "pages of a driver, within the process's limit"),
        Rule::any(SYS_munlock, "pages of a driver"),
        Rule::any(SYS_mincore, "checking that an address is mapped"),
        Rule::any(SYS_msync, "checking that an address is mapped"),
        Rule::any(SYS_membarrier, "fences between threads and a device"),
        Rule::any(SYS_mbind, "host memory near a GPU"),
        Rule::any(SYS_get_mempolicy, "the NUMA node of host memory"),
        Rule::any(SYS_set_mempolicy, "host memory near a GPU"),
        Rule::any(SYS_rt_sigtimedwait, "threads that take signals"),
        Rule::any(SYS_set_tid_address, "start-up of libraries"),
        Rule::any(SYS_getpid, "identity towards a driver"),
        Rule::any(SYS_getppid, "identity towards a driver"),
        Rule::any(SYS_getuid, "identity towards a driver"),
        Rule::any(SYS_geteuid, "identity towards a driver"),
        Rule::any(SYS_getgid, "identity towards a driver"),
        Rule::any(SYS_getegid, "identity towards a driver"),
    ]);
    rules
}

/// The socket that `cuInit` makes, and without which it fails with 304 (seen with 580.159 on an H100): another process of the user could ask
/// for its address space by it. The driver gives it an abstract name, so only processes of the same network namespace can connect. A
/// compromised process can choose any name, because a filter cannot read the address of `bind`. Since `accept` is on no list, no
/// connection is answered: clients wait in the queue.
fn listening() -> Vec<Rule> {
    let why = "the socket that the driver listens on from its start";
    vec![
        Rule::exactly(SYS_socket, &[&[(0, AF_UNIX), (1, SOCK_SEQPACKET | SOCK_CLOEXEC), (2, 0)]], why),
        Rule::any(SYS_bind, why),
        Rule::any(SYS_listen, why),
    ]
}

/// Calls that NVIDIA's libraries try at each start, and for which there is no file (seen with 580.159 on an H100, where `cuInit` fails with 304 if
/// an `unlink` ends with EPERM).
fn nvidia_missing() -> Vec<Rule> {
    let links = "links to devices in /dev/char";
    let services = "the multi-process service, which is optional, and would be shared with other processes";
    vec![
        Rule::any(SYS_unlink, links),
        Rule::any(SYS_symlink, links),
        Rule::any(SYS_mkdir, links),
        Rule::exactly(SYS_setsockopt, &[&[(1, SOL_SOCKET), (2, SO_PASSCRED)]], services),
        Rule::any(SYS_connect, services),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(file: &str, module: Option<&str>) -> Result<DriverList, String> {
        let version = version_of_file(Path::new(file), || module.map(str::to_owned));
        DriverList::of_version(Path::new(file), version).map_err(|error| error.to_string())
    }

    // Promise: F110
    #[test]
    fn branch_comes_from_the_file_name_or_the_kernel_module() {
        let nvidia = |branch| Ok(DriverList::Nvidia(DriverBranch(branch)));
        assert_eq!(list("/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05", Some("535.288.01")), nvidia(580));
        assert_eq!(list("/usr/lib/libnvidia-ml.so.535.288.01", None), nvidia(535));
        assert_eq!(list("/driver/libcuda.so.1", Some("580.95.05\n")), nvidia(580));
        assert_eq!(list("/driver/libcuda.so", Some("590.48.01\n")), nvidia(590));
    }

    // Promise: F110
    #[test]
    fn library_of_another_maker_reaches_no_device() {
        assert_eq!(list("/target/release/libsoftgpu_cuda.so", Some("580.95.05")), Ok(DriverList::Software));
        assert_eq!(list("/driver/libcuda.so.1", None), Ok(DriverList::Software));
        assert_eq!(list("", None), Ok(DriverList::Software));
    }

    // Promise: F110
    #[test]
    fn branch_without_a_list_is_refused_in_words() {
        for (file, module) in [
            ("/usr/lib/libcuda.so.999.10.01", None),
            ("/usr/lib/libcuda.so.1", Some("999.10.01")),
            ("/usr/lib/libcuda.so.5800.1.1", None),
            ("/usr/lib/libcuda.so.x.y", None),
        ] {
            let refusal = list(file, module).expect_err(file);
            assert!(refusal.contains("has no list") && refusal.contains("580"), "{refusal}");
        }
    }
}
