#![expect(unsafe_code, reason = "enters a confinement between fork and exec")]

//! The confinement of each process that the launcher starts: a list of files, and namespaces of its own.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fd::{AsFd as _, OwnedFd},
    thread::CapabilitySet,
};
use sluice_messages::inventory::Visible;

use super::{
    files::{self, DriverFiles, FileList},
    landlock,
    namespaces::{Namespaces, UserNamespace},
    root::Root,
};

/// The means to confine the processes of one program.
#[derive(Debug)]
pub(super) struct Confinement {
    program: PathBuf,
    libraries: Vec<PathBuf>,
    /// The driver that the program loads.
    driver: Option<Arc<DriverFiles>>,
    /// The kinds of user namespace with which its processes may have namespaces of their own.
    users: Vec<UserNamespace>,
    /// True if its processes may signal processes that they did not start.
    signals: bool,
}

/// Variable that switches all confinement but filters off, if its value is `off`; for development.
const SWITCH: &str = "SLUICE_CONFINEMENT";

/// True if processes are confined by more than their filters; if not, that is logged.
pub(super) fn is_on() -> bool {
    let off = std::env::var_os(SWITCH).is_some_and(|value| value == "off");
    if off {
        tracing::warn!(
            "SLUICE_CONFINEMENT=off: processes are confined by their filters only. NOT FOR PRODUCTION"
        );
    }
    !off
}

/// The driver that a launcher's processes load. `None`, with a line of log, if it cannot be used to confine them.
pub(super) fn driver(library: PathBuf) -> Option<Arc<DriverFiles>> {
    let driver = DriverFiles::from_environment(library).inspect(|driver| {
        let missing = driver.missing_libraries();
        if !missing.is_empty() {
            tracing::info!(?missing, "the driver lacks optional libraries");
        }
    });
    driver.inspect_err(|error| tracing::warn!(%error, "processes see the host's files")).ok().map(Arc::new)
}

/// Things that processes of a program have in the host's user namespace only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Capabilities that they keep if they run as root.
    pub(super) capabilities: CapabilitySet,
    /// True if some of them tell the users of other processes apart.
    pub(super) users: bool,
}

/// Confinement of the processes of a program, of which one may have this user; with namespaces if the host permits them. `None`,
/// with a line of log, if it cannot be made.
pub(super) fn of(
    program: &Path,
    driver: Option<&Arc<DriverFiles>>,
    uid: Option<u32>,
    needs: Needs,
) -> Option<Confinement> {
    let name = program.display();
    let confinement = Confinement::of(program.to_owned(), driver.cloned());
    let confinement = confinement
        .inspect_err(|error| tracing::warn!(program = %name, %error, "the program sees the host's files"));
    let mut confinement = confinement.ok()?;
    match confinement.add_namespaces(uid, needs) {
        Ok(()) => {
            tracing::info!(program = %name, "its processes get namespaces and a root directory of their own");
        }
        Err(error) => tracing::warn!(program = %name, %error, "its processes get no namespaces"),
    }
    Some(confinement)
}

/// The confinement of one process, made before it.
#[derive(Debug)]
pub(super) struct Confined {
    namespaces: Option<Namespaces>,
    /// `None` if the kernel has no Landlock.
    rules: Option<OwnedFd>,
    names_threads: bool,
}

impl Confinement {
    /// Confinement of a program to the files of a list.
    ///
    /// # Errors
    /// If the loader cannot list the libraries of the program and of its driver.
    pub(super) fn of(program: PathBuf, driver: Option<Arc<DriverFiles>>) -> io::Result<Self> {
        let libraries = files::libraries(files::loader(&program, driver.as_deref()))?;
        Ok(Self { program, libraries, driver, users: Vec::new(), signals: true })
    }

    /// Gives its processes namespaces, if the host permits them: the loader of the program tests them, as this user or as the
    /// launcher's.
    ///
    /// # Errors
    /// The reason for which its processes get none.
    pub(super) fn add_namespaces(&mut self, uid: Option<u32>, needs: Needs) -> io::Result<()> {
        let own = rustix::thread::capabilities(None)?.effective;
        // A capability over the host counts in the host's user namespace only.
        let keeps = uid.is_none() && own.intersects(needs.capabilities);
        if !keeps {
            self.test(UserNamespace::Own, uid)?;
            self.users.push(UserNamespace::Own);
        }
        if uid.is_none() && own.contains(CapabilitySet::SYS_ADMIN) && (keeps || needs.users) {
            self.test(UserNamespace::Host, uid)?;
            self.users.push(UserNamespace::Host);
        } else if keeps {
            return Err(io::Error::other(
                "they keep a capability; worker-uids gives them users of their own",
            ));
        }
        Ok(())
    }

    /// The files of a process that sees these devices.
    pub(super) fn list(&self, visible: Visible) -> io::Result<FileList> {
        FileList::of(&self.program, &self.libraries, self.driver.as_deref(), visible)
    }

    fn test(&self, users: UserNamespace, uid: Option<u32>) -> io::Result<()> {
        let namespaces = Namespaces::new(Root::of(&self.list(Visible::Host)?)?, users, uid);
        let mut loader = files::loader(&self.program, self.driver.as_deref());
        if let Some(uid) = uid {
            loader.uid(uid).gid(uid);
        }
        // SAFETY: the hook makes system calls on values made before; it neither allocates nor locks.
        unsafe { loader.pre_exec(move || namespaces.enter()) };
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

    /// True if its processes get namespaces of their own, which take longer to make than all else.
    pub(super) fn has_namespaces(&self) -> bool {
        !self.users.is_empty()
    }

    /// The confinement of a process that sees these devices and has this user and group, or the launcher's, and its files. A process that tells
    /// users of the host apart gets no namespaces in which it would see all others as one.
    pub(super) fn confine(
        &self,
        visible: Visible,
        uid: Option<u32>,
        tells_users_apart: bool,
    ) -> io::Result<(Confined, FileList)> {
        let list = self.list(visible)?;
        Ok((self.confine_to(&list, uid, tells_users_apart)?, list))
    }

    fn confine_to(&self, list: &FileList, uid: Option<u32>, tells_users_apart: bool) -> io::Result<Confined> {
        let rules = landlock::rules(list.files(), self.signals)?;
        let users = self.users.iter().find(|users| **users == UserNamespace::Host || !tells_users_apart);
        let namespaces = users.map(|users| Ok::<_, io::Error>(Namespaces::new(Root::of(list)?, *users, uid)));
        Ok(Confined { namespaces: namespaces.transpose()?, rules, names_threads: list.names_threads() })
    }
}

impl Confined {
    /// True if the process gets a user namespace of its own.
    pub(super) fn has_own_users(&self) -> bool {
        self.namespaces.as_ref().is_some_and(Namespaces::has_own_users)
    }

    /// Moves the calling process, which has its user already, into its namespaces. Async-signal-safe.
    pub(super) fn separate(&self) -> io::Result<()> {
        self.namespaces.as_ref().map_or(Ok(()), Namespaces::enter)
    }

    /// Confines the calling process, which can gain no privileges any more, to its files. Async-signal-safe.
    pub(super) fn restrict(&self) -> io::Result<()> {
        self.rules.as_ref().map_or(Ok(()), |rules| landlock::enter(rules.as_fd(), self.names_threads))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{super::files::Access, *};

    const NOTHING: Needs = Needs { capabilities: CapabilitySet::empty(), users: false };

    /// Confinement of the shell, with another library as its driver, and this directory of devices.
    fn of_shell(state: &Path) -> Confinement {
        let driver = DriverFiles::of("/lib/x86_64-linux-gnu/libm.so.6".into(), Some(state.to_owned()));
        Confinement::of("/bin/sh".into(), Some(Arc::new(driver.unwrap()))).unwrap()
    }

    /// True if this host has the means; reports to the runner if not.
    fn can_confine(namespaces: bool) -> bool {
        let state = tempfile::tempdir().unwrap();
        let mut confinement = of_shell(state.path());
        if namespaces && let Err(error) = confinement.add_namespaces(None, NOTHING) {
            sluice_skip::skip(&format!("no user namespaces: {error}"));
            return false;
        }
        let rules = confinement.confine(Visible::Host, None, false).unwrap().0.rules;
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
            confinement.add_namespaces(user, NOTHING).unwrap();
        }
        let (confined, _) = confinement.without_signals().confine(Visible::Host, user, false).unwrap();
        run(confined, user, script)
    }

    /// Confinement to a list in namespaces.
    fn confined_to(list: &FileList) -> Confined {
        let namespaces = Namespaces::new(Root::of(list).unwrap(), UserNamespace::Own, None);
        let rules = landlock::rules(list.files(), false).unwrap();
        Confined { namespaces: Some(namespaces), rules, names_threads: false }
    }

    fn run(confined: Confined, user: Option<u32>, script: &str) -> String {
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

    // Promise: F90
    #[test]
    fn process_of_a_user_of_its_own_without_namespaces_reads_only_files_of_its_list() {
        if !rustix::process::geteuid().is_root() {
            sluice_skip::skip("only root may start processes of other users");
            return;
        }
        if !can_confine(false) {
            return;
        }
        let state = tempfile::tempdir().unwrap();
        let read = |path: &str| {
            let script = format!("read line < {path} && echo read || echo refused");
            confined_as(Some(4_000_000), &script, state.path(), false)
        };
        assert_eq!(read("/proc/cpuinfo"), "read\n");
        assert_eq!(read("/proc/self/status"), "read\n");
        // Every user of the host may read these.
        for path in ["/etc/passwd", "/proc/version", "/proc/1/status"] {
            assert!(read(path).starts_with("refused\n"), "{path}");
        }
    }

    // Promise: F90
    #[test]
    fn file_of_a_root_has_other_contents_than_on_the_host() {
        if !can_confine(true) {
            return;
        }
        let (state, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = place.path().join("parameters");
        std::fs::write(&path, "Modify: 1\n").unwrap();
        let mut list = of_shell(state.path()).list(Visible::Host).unwrap();
        list.add(place.path(), Access::Read).unwrap();
        list.replace_present(&path, |text| text.replace('1', "0")).unwrap();
        list.replace_present(&place.path().join("missing"), |_| String::new()).unwrap();
        let confined = confined_to(&list);
        let script = format!("read line < {path}; echo $line; echo 1 > {path}", path = path.display());
        let said = run(confined, None, &script);
        assert!(said.starts_with("Modify: 0\n") && said.contains("cannot create"), "{said}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "Modify: 1\n");
    }

    // Promise: F90
    #[test]
    fn file_of_a_directory_for_writing_can_be_for_reading_only() {
        if !can_confine(true) {
            return;
        }
        let (state, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = place.path().join("file");
        std::fs::write(&path, "contents\n").unwrap();
        let mut list = of_shell(state.path()).list(Visible::Host).unwrap();
        list.add(&path, Access::Read).unwrap();
        list.add(place.path(), Access::Write).unwrap();
        let confined = confined_to(&list);
        let path = path.display();
        let said = run(
            confined,
            None,
            &format!("read line < {path}; echo $line; echo 1 > {path}2; echo 1 > {path}"),
        );
        assert!(said.starts_with("contents\n") && said.ends_with("file: Read-only file system\n"), "{said}");
        assert_eq!(std::fs::read_to_string(format!("{path}2")).unwrap(), "1\n");
    }

    // Promise: F90
    #[test]
    fn process_names_its_threads_only_if_its_driver_does() {
        let state = tempfile::tempdir().unwrap();
        for (namespaces, names_threads) in [(true, true), (true, false), (false, true), (false, false)] {
            if !can_confine(namespaces) {
                continue;
            }
            let mut confinement = of_shell(state.path());
            if namespaces {
                confinement.add_namespaces(None, NOTHING).unwrap();
            }
            let mut list = confinement.list(Visible::Host).unwrap();
            if names_threads {
                list.let_name_threads();
            }
            let confined = confinement.confine_to(&list, None, false).unwrap();
            let script = "echo named > /proc/self/task/$$/comm; read name < /proc/self/comm; echo $name; \
                          echo 1 > /proc/self/oom_score_adj";
            let said = run(confined, None, script);
            assert_eq!(said.starts_with("named\n"), names_threads, "{said}");
            assert!(said.contains("cannot create /proc/self/oom_score_adj"), "{said}");
        }
    }

    #[test]
    fn driver_that_is_missing_is_an_error() {
        assert!(DriverFiles::of("/nowhere/libcuda.so".into(), None).is_err());
    }
}
