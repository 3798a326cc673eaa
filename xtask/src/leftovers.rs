//! Traces that tests leave behind: files in their temporary folders and in `/dev/shm`, and running processes of this workspace.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::{self, Display, Formatter};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tempfile::TempDir;

/// The place of software GPUs.
const SHARED: &str = "/dev/shm";
/// Time for processes that were just ended, on a busy machine.
pub(crate) const GRACE: Duration = Duration::from_secs(60);

/// The run's temporary folder, and the watch over everything else that its tests could leave.
pub(crate) struct Leftovers {
    temporary: TempDir,
    /// Programs of these folders belong to the run.
    programs: [PathBuf; 2],
    /// Known names in `/dev/shm`, of before or named already.
    shared: BTreeSet<OsString>,
    /// Known processes, of before or named already.
    processes: BTreeSet<u32>,
    found: Vec<String>,
    /// Time for processes that were just ended.
    grace: Duration,
}

impl Leftovers {
    /// `programs` is the folder of cargo's build outputs; processes that were just ended have `grace` to go.
    pub(crate) fn watch(programs: PathBuf, grace: Duration) -> Result<Self> {
        // Short, because sockets in the folder have names of at most 107 bytes. Tests run programs of other users.
        let temporary = tempfile::Builder::new()
            .prefix("t.")
            .permissions(Permissions::from_mode(0o1777))
            .tempdir()
            .context("creating a folder for temporary files")?;
        let programs = [programs, temporary.path().to_owned()];
        let processes = processes(&programs).into_iter().map(|(id, _)| id).collect();
        let shared = names(Path::new(SHARED));
        Ok(Self { temporary, programs, shared, processes, found: Vec::new(), grace })
    }

    /// The folder for the tests' temporary files.
    pub(crate) fn temporary(&self) -> &Path {
        self.temporary.path()
    }

    /// Notes the leftovers of a group of tests, which has ended.
    pub(crate) fn after(&mut self, group: &str) {
        let deadline = Instant::now() + self.grace;
        let mut left = self.left();
        while !left.is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(50));
            left = self.left();
        }
        for leftover in left {
            self.found.push(format!("{group}: {leftover}"));
            match leftover {
                Leftover::Process(id, _) => drop(self.processes.insert(id)),
                Leftover::Shared(name) => drop(self.shared.insert(name)),
            }
        }
    }

    /// All leftovers, each with the group of tests after which it was there.
    pub(crate) fn found(&self) -> &[String] {
        &self.found
    }

    fn left(&self) -> Vec<Leftover> {
        let running = processes(&self.programs).into_iter();
        let running = running.filter(|(id, _)| !self.processes.contains(id));
        let mut left: Vec<Leftover> = running.map(|(id, program)| Leftover::Process(id, program)).collect();
        let shared = names(Path::new(SHARED));
        // A process of another user of this machine may have it; one of ours is named itself.
        let unused = shared.difference(&self.shared).filter(|name| !is_in_use(&Path::new(SHARED).join(name)));
        left.extend(unused.cloned().map(Leftover::Shared));
        left
    }
}

enum Leftover {
    Process(u32, PathBuf),
    Shared(OsString),
}

impl Display for Leftover {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(id, program) => write!(formatter, "process {id}, {}", program.display()),
            Self::Shared(name) => write!(formatter, "{}", Path::new(SHARED).join(name).display()),
        }
    }
}

/// The names in a folder that can be read.
pub(crate) fn names(folder: &Path) -> BTreeSet<OsString> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).collect()
}

/// Processes whose programs lie in these folders.
fn processes(folders: &[PathBuf]) -> Vec<(u32, PathBuf)> {
    let all = names(Path::new("/proc")).into_iter().filter_map(|name| name.to_str()?.parse().ok());
    let program = |id: u32| Some((id, fs::read_link(format!("/proc/{id}/exe")).ok()?));
    // A build beside the tests runs cargo's build scripts, which no test starts.
    let is_build_script =
        |program: &Path| program.file_name().is_some_and(|name| name == "build-script-build");
    all.filter_map(program)
        .filter(|(_, program)| folders.iter().any(|folder| program.starts_with(folder)))
        .filter(|(_, program)| !is_build_script(program))
        .collect()
}

/// True if a process has a file below `path` mapped.
fn is_in_use(path: &Path) -> bool {
    let below = format!(" {}/", path.display());
    names(Path::new("/proc")).iter().any(|process| {
        let maps = Path::new("/proc").join(process).join("maps");
        fs::read_to_string(maps).is_ok_and(|maps| maps.contains(&below))
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn process_and_device_that_stay_are_named_once_with_their_group() {
        let folder = tempfile::tempdir().unwrap();
        // The leftovers of this test stay until it ends them.
        let mut leftovers = Leftovers::watch(folder.path().to_owned(), Duration::from_secs(1)).unwrap();
        leftovers.after("clean");
        assert_eq!(leftovers.found(), [] as [String; 0]);
        let device = tempfile::Builder::new().prefix("xtask-test-").tempdir_in(SHARED).unwrap();
        let program = folder.path().join("sleeper");
        // Another process writes it: a file that is open for writing cannot be executed.
        assert!(Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap().success());
        let mut child = Command::new(&program).arg("600").spawn().unwrap();
        leftovers.after("dirty");
        leftovers.after("clean again");
        child.kill().unwrap();
        child.wait().unwrap();
        // Other programs of this machine may have made devices meanwhile.
        let found: Vec<&String> =
            leftovers.found().iter().filter(|name| !name.contains(": /dev/shm/")).collect();
        assert_eq!(found, [&format!("dirty: process {}, {}", child.id(), program.display())]);
        let device = format!("dirty: {}", device.path().display());
        assert_eq!(leftovers.found().iter().filter(|name| **name == device).count(), 1);
    }
}
