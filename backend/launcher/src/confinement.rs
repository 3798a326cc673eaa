#![expect(unsafe_code, reason = "enters a confinement between fork and exec")]

//! The confinement of the processes that guests can reach: a list of files, and for workers namespaces of their own.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    rc::Rc,
};

use rustix::fd::{AsFd as _, OwnedFd};
use sluice_messages::inventory::Visible;

use super::{
    files::{self, DriverFiles},
    landlock,
    namespaces::Namespaces,
    root::Root,
};

/// The means to confine the processes of one program.
#[derive(Debug)]
pub(super) struct Confinement {
    program: PathBuf,
    libraries: Vec<PathBuf>,
    /// The driver that the program loads.
    driver: Option<Rc<DriverFiles>>,
    /// True if its processes get namespaces.
    namespaces: bool,
    /// True if its processes may signal processes that they did not start.
    signals: bool,
}

/// Variable that switches all confinement but filters off, if its value is `off`; for development.
const SWITCH: &str = "SLUICE_CONFINEMENT";

/// The driver that a launcher's processes load. `None`, with a line of log, if it cannot be used to confine them.
pub(super) fn driver(library: PathBuf) -> Option<Rc<DriverFiles>> {
    if std::env::var_os(SWITCH).is_some_and(|value| value == "off") {
        tracing::warn!(
            "SLUICE_CONFINEMENT=off: processes are confined by their filters only. NOT FOR PRODUCTION"
        );
        return None;
    }
    let driver = DriverFiles::from_environment(library);
    driver.inspect_err(|error| tracing::warn!(%error, "processes see the host's files")).ok().map(Rc::new)
}

/// Confinement to files, of a program that ends other processes. `None`, with a line of log, if it cannot be made.
pub(super) fn to_files(program: &Path, driver: Option<&Rc<DriverFiles>>) -> Option<Confinement> {
    let confinement = Confinement::of(program.to_owned(), driver.cloned());
    let name = program.display();
    confinement
        .inspect_err(|error| tracing::warn!(program = %name, %error, "the program sees the host's files"))
        .ok()
}

/// Confinement of workers, of which one may have this user. Logs once how they are confined.
pub(super) fn of_workers(program: &Path, driver: &Rc<DriverFiles>, uid: Option<u32>) -> Option<Confinement> {
    let mut confinement = to_files(program, Some(driver))?.without_signals();
    match confinement.add_namespaces(uid) {
        Ok(()) => tracing::info!("each worker gets namespaces and a root directory of its own"),
        Err(error) => tracing::warn!(%error, "workers get no namespaces: the host does not permit them"),
    }
    Some(confinement)
}

/// The confinement of one process, made before it.
#[derive(Debug)]
pub(super) struct Confined {
    namespaces: Option<Namespaces>,
    /// `None` if the kernel has no Landlock.
    rules: Option<OwnedFd>,
}

impl Confinement {
    /// Confinement of a program to the files of a list.
    ///
    /// # Errors
    /// If the loader cannot list the libraries of the program and of its driver.
    pub(super) fn of(program: PathBuf, driver: Option<Rc<DriverFiles>>) -> io::Result<Self> {
        let libraries = files::libraries(files::loader(&program, driver.as_deref()))?;
        Ok(Self { program, libraries, driver, namespaces: false, signals: true })
    }

    /// Gives its processes namespaces, if the host permits them: the loader of the program tests them, as this user or as the
    /// launcher's.
    ///
    /// # Errors
    /// The reason for which the host does not permit them.
    pub(super) fn add_namespaces(&mut self, uid: Option<u32>) -> io::Result<()> {
        self.namespaces = true;
        let tested = self.test(uid);
        self.namespaces = tested.is_ok();
        tested
    }

    fn test(&self, uid: Option<u32>) -> io::Result<()> {
        let confined = self.confine(Visible::Host, uid)?;
        let mut loader = files::loader(&self.program, self.driver.as_deref());
        if let Some(uid) = uid {
            loader.uid(uid).gid(uid);
        }
        // SAFETY: the hook makes system calls on values made before; it neither allocates nor locks.
        unsafe { loader.pre_exec(move || confined.separate()) };
        let inside = files::libraries(loader)?;
        if inside == self.libraries {
            Ok(())
        } else {
            Err(io::Error::other(format!("inside, the loader finds other libraries: {inside:?}")))
        }
    }

    /// Keeps its processes from signalling others, where the kernel can.
    pub(super) fn without_signals(mut self) -> Self {
        self.signals = false;
        self
    }

    /// Variables of its processes.
    pub(super) fn variables(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        self.driver.iter().flat_map(|driver| driver.variables())
    }

    /// The confinement of a process that sees these devices and has this user and group, or the launcher's.
    pub(super) fn confine(&self, visible: Visible, uid: Option<u32>) -> io::Result<Confined> {
        let mut root = Root::default();
        files::add(&mut root, &self.program, &self.libraries, self.driver.as_deref(), visible)?;
        let rules = landlock::rules(root.files(), self.signals)?;
        let own = || (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let (user, group) = uid.map_or_else(own, |uid| (uid, uid));
        let namespaces = self.namespaces.then(|| Namespaces::new(root, user, group));
        Ok(Confined { namespaces, rules })
    }
}

impl Confined {
    /// Moves the calling process, which has its user already, into its namespaces. Async-signal-safe.
    pub(super) fn separate(&self) -> io::Result<()> {
        self.namespaces.as_ref().map_or(Ok(()), Namespaces::enter)
    }

    /// Confines the calling process, which can gain no privileges any more, to its files. Async-signal-safe.
    pub(super) fn restrict(&self) -> io::Result<()> {
        self.rules.as_ref().map_or(Ok(()), |rules| landlock::enter(rules.as_fd()))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Confinement of the shell, with another library as its driver, and this directory of devices.
    fn of_shell(state: &Path) -> Confinement {
        let driver = DriverFiles::of("/lib/x86_64-linux-gnu/libm.so.6".into(), Some(state.to_owned()));
        Confinement::of("/bin/sh".into(), Some(Rc::new(driver.unwrap()))).unwrap()
    }

    /// True if this host has the means; reports to the runner if not.
    fn can_confine(namespaces: bool) -> bool {
        let state = tempfile::tempdir().unwrap();
        let mut confinement = of_shell(state.path());
        if namespaces && let Err(error) = confinement.add_namespaces(None) {
            sluice_skip::skip(&format!("no user namespaces: {error}"));
            return false;
        }
        let rules = confinement.confine(Visible::Host, None).unwrap().rules;
        if rules.is_none() {
            sluice_skip::skip("this kernel has no Landlock");
        }
        rules.is_some()
    }

    /// Runs a script of the shell in a worker's confinement. The script may write to `state`.
    fn confined(script: &str, state: &Path, namespaces: bool) -> String {
        confined_as(None, script, state, namespaces)
    }

    fn confined_as(user: Option<u32>, script: &str, state: &Path, namespaces: bool) -> String {
        let mut confinement = of_shell(state);
        if namespaces {
            confinement.add_namespaces(user).unwrap();
        }
        let confined = confinement.without_signals().confine(Visible::Host, user).unwrap();
        let mut command = Command::new("/bin/sh");
        command.env_clear().args(["-c", script]);
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let enter = move || {
            confined.separate()?;
            rustix::thread::set_no_new_privs(true)?;
            confined.restrict()
        };
        // SAFETY: the hook makes system calls on values made before.
        unsafe { command.pre_exec(enter) };
        let output = command.output().unwrap();
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    // Promise: F90
    #[test]
    fn process_in_namespaces_sees_no_other_process_file_or_network() {
        if !can_confine(true) {
            return;
        }
        let state = tempfile::tempdir().unwrap();
        let seen = confined("read line < /proc/self/status; echo $line", state.path(), true);
        assert_eq!(seen, "Name: sh\n");
        let forbidden =
            ["/proc/1/status", "/proc/self/root/etc/passwd", "/etc/passwd", "/dev/shm", "/run", "/home"];
        for path in forbidden {
            assert!(Path::new(path).exists() || path.contains("self"), "the host has {path}");
            let said = confined(&format!("test -e {path} && echo seen"), state.path(), true);
            assert_eq!(said, "", "{path}");
        }
        let interfaces = "while read line; do echo $line; done < /proc/self/net/dev";
        let interfaces = confined(interfaces, state.path(), true);
        let names: Vec<_> = interfaces.lines().skip(2).filter_map(|line| line.split(':').next()).collect();
        assert_eq!(names, ["lo"], "{interfaces}");
    }

    // Promise: F90
    #[test]
    fn confined_process_writes_only_to_the_devices_of_the_software_gpu() {
        let (state, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for namespaces in [true, false] {
            if !can_confine(namespaces) {
                continue;
            }
            for path in ["/new", "/bin/sh", "/dev/shm/new", other.path().join("new").to_str().unwrap()] {
                let said = confined(&format!("echo 1 > {path}"), state.path(), namespaces);
                assert!(said.contains("cannot create"), "{path}: {said}");
            }
            let file = state.path().join("file");
            confined(&format!("echo 1 > {}", file.display()), state.path(), namespaces);
            assert_eq!(std::fs::read_to_string(&file).unwrap(), "1\n");
            std::fs::remove_file(file).unwrap();
        }
    }

    // Promise: F90
    #[test]
    fn process_without_namespaces_reads_only_files_of_its_list_and_signals_no_other() {
        if !can_confine(false) {
            return;
        }
        let state = tempfile::tempdir().unwrap();
        let read = |path: &str| {
            confined(&format!("read line < {path} && echo read || echo refused"), state.path(), false)
        };
        assert_eq!(read("/proc/cpuinfo"), "read\n");
        assert_eq!(read("/proc/self/status"), "read\n");
        for path in ["/etc/passwd", "/proc/version", "/proc/1/status"] {
            assert!(read(path).starts_with("refused\n"), "{path}");
        }
        let own = std::process::id();
        let said = confined(&format!("kill -0 {own} && echo sent"), state.path(), false);
        assert!(said.contains("not permitted"), "{said}");
    }

    // Promise: F90
    #[test]
    fn process_of_a_user_of_its_own_keeps_that_user_in_its_namespaces() {
        if !rustix::process::geteuid().is_root() {
            sluice_skip::skip("only root may start processes of other users");
            return;
        }
        if !can_confine(true) {
            return;
        }
        let state = tempfile::tempdir().unwrap();
        let script = "while read name value; do case $name in Uid:|Gid:|CapEff:|CapBnd:) echo $name $value;; esac; done < /proc/self/status";
        let status = confined_as(Some(4_000_000), script, state.path(), true);
        let (user, none) = ("4000000 4000000 4000000 4000000", "0000000000000000");
        let lines: Vec<&str> = status.lines().collect();
        assert_eq!(lines[..2], [format!("Uid: {user}"), format!("Gid: {user}")]);
        assert_eq!(lines[2], format!("CapEff: {none}"));
    }

    #[test]
    fn driver_that_is_missing_is_an_error() {
        assert!(DriverFiles::of("/nowhere/libcuda.so".into(), None).is_err());
    }
}
