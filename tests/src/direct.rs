//! A backend without a VM, and programs beside each other on it: the processes of `sluice run`, kept alive for a test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use sluice_protocol::limits;
use tempfile::TempDir;

use crate::host;
use crate::oracle;
use crate::paths::Binaries;
use crate::process::{Background, Finished, run};

/// Time limit for steps that take well under a second on an idle machine.
pub use sluice_kit::wait::TIMEOUT;

/// Attempts of which one must be in time.
const ATTEMPTS: u32 = 3;

/// Repeats an attempt until it takes less than `limit`: the machine may stop a process for longer than that, but not each time.
///
/// # Errors
/// When an attempt fails, or none is in time.
pub fn in_time(what: &str, limit: Duration, mut attempt: impl FnMut(u32) -> Result<Duration>) -> Result<()> {
    for number in 1..=ATTEMPTS {
        let took = attempt(number)?;
        println!("{what}: {took:?}");
        if took < limit {
            return Ok(());
        }
    }
    bail!("{what}: never within {limit:?}")
}

/// Has a program also check results that NVIDIA's driver leaves undefined, such as those of calls with destroyed handles.
const UNDEFINED: &str = "SLUICE_TEST_UNDEFINED";

/// A running backend and the environment its programs need.
#[derive(Debug)]
pub struct Backend {
    holder: Background,
    environment: BTreeMap<String, String>,
    folder: TempDir,
}

impl Backend {
    /// Starts a backend on a driver, the software GPU by default.
    ///
    /// # Errors
    /// When a program is not built or does not start.
    pub fn start(binaries: &Binaries, driver: Option<&Path>) -> Result<Self> {
        Self::start_with(binaries, driver, &[])
    }

    /// As [`Backend::start`], with further options of `sluice run`.
    ///
    /// # Errors
    /// As [`Backend::start`].
    pub fn start_with(binaries: &Binaries, driver: Option<&Path>, options: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir().context("a folder for logs")?;
        let mut command = Command::new(binaries.get("sluice")?);
        command.arg("run").args(options);
        if let Some(driver) = driver {
            command.arg("--driver").arg(driver);
            // Otherwise the launcher makes the user's own directory of software GPUs.
            command.env("SLUICE_SOFTGPU_STATE", folder.path().join("softgpu"));
        }
        // The held program only prints the environment of programs; the backend lives as long as it does.
        command.args(["--", "sh", "-c", "env | sed 's/^/environment /'; echo ready; exec sleep 100000"]);
        let mut holder = Background::start("sluice run", &mut command, &folder.path().join("backend.log"))?;
        holder.wait_for_line("ready", TIMEOUT)?;
        let environment = holder
            .printed()
            .lines()
            .filter_map(|line| line.strip_prefix("environment ")?.split_once('='))
            .filter(|(name, _)| matches!(*name, "LD_LIBRARY_PATH" | "SLUICE_SOCKET" | "SLUICE_TRANSPORT"))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        Ok(Self { holder, environment, folder })
    }

    /// The same backend for programs that share no memory with it: their messages use a stream.
    ///
    /// # Errors
    /// When the environment names no socket.
    pub fn over_stream(mut self) -> Result<Self> {
        let socket = self.socket()?.with_file_name(format!("vm-1.vsock_{}", limits::STREAM_PORT));
        self.environment.insert("SLUICE_SOCKET".to_owned(), socket.display().to_string());
        self.environment.insert("SLUICE_TRANSPORT".to_owned(), "vsock".to_owned());
        Ok(self)
    }

    /// A program on this backend, to be configured further.
    #[must_use]
    pub fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).envs(&self.environment);
        command
    }

    /// The environment that makes a program use this backend.
    #[must_use]
    pub const fn environment(&self) -> &BTreeMap<String, String> {
        &self.environment
    }

    /// Runs a program on this backend.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn run(&self, program: &Path, arguments: &[&str]) -> Result<Finished> {
        run(&mut self.command(program, arguments), TIMEOUT)
    }

    /// Runs a program natively and on this backend: it must print the same, end the same way and pass. `otherwise` lists the
    /// expected differences: texts of the native output and their replacements on this backend.
    ///
    /// # Errors
    /// When it does not; the message holds both outputs.
    pub fn agrees(&self, binaries: &Binaries, program: &Path, otherwise: &[(&str, &str)]) -> Result<()> {
        let native = host::run_native(binaries, program, &[], TIMEOUT)?;
        same_output(program, &native, &self.run(program, &[])?, otherwise)
    }

    /// As [`Backend::agrees`], and both runs must make the same calls with the same results. Returns their number.
    ///
    /// # Errors
    /// As [`Backend::agrees`]; the message names the first call that differs.
    pub fn agrees_call_by_call(&self, binaries: &Binaries, program: &Path) -> Result<usize> {
        let (native, calls) = oracle::traced(|trace| {
            let variables = [(oracle::VARIABLE, trace), (UNDEFINED, Path::new("1"))];
            host::run_native_with(binaries, program, &[], &variables, TIMEOUT)
        })?;
        let (remoted, remoted_calls) = oracle::traced(|trace| {
            run(self.command(program, &[]).env(oracle::VARIABLE, trace).env(UNDEFINED, "1"), TIMEOUT)
        })?;
        same_output(program, &native, &remoted, &[])?;
        let name = program.file_name().unwrap_or_default().display();
        match oracle::first_difference(&calls, &remoted_calls) {
            None => Ok(calls.calls()),
            Some(difference) => Err(difference).context(name.to_string()),
        }
    }

    /// Starts a program on this backend in the background.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, name: &str, program: &Path, arguments: &[&str]) -> Result<Background> {
        Background::start(
            name,
            &mut self.command(program, arguments),
            &self.folder.path().join(format!("{name}.log")),
        )
    }

    /// The device's socket.
    ///
    /// # Errors
    /// When the environment names none.
    pub fn socket(&self) -> Result<PathBuf> {
        self.environment.get("SLUICE_SOCKET").map(PathBuf::from).context("programs get SLUICE_SOCKET")
    }

    /// Live processes of this backend by program name.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn processes(&self, name: &str) -> Result<Vec<u32>> {
        descendants(self.holder.id(), name)
    }

    /// The device's process.
    ///
    /// # Errors
    /// When there is not exactly one.
    pub fn device(&self) -> Result<u32> {
        match self.processes("sluice-device")?.as_slice() {
            [device] => Ok(*device),
            other => bail!("{} device processes", other.len()),
        }
    }

    /// Waits until exactly `count` workers live; returns them and how long it took.
    ///
    /// # Errors
    /// When they do not within [`TIMEOUT`].
    pub fn wait_for_workers(&self, count: usize) -> Result<(Vec<u32>, Duration)> {
        let start = Instant::now();
        loop {
            let workers = self.processes("sluice-worker")?;
            if workers.len() == count {
                return Ok((workers, start.elapsed()));
            }
            if start.elapsed() > TIMEOUT {
                bail!("{} workers live, {count} expected\n{}", workers.len(), self.holder.printed());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The output of the backend.
    #[must_use]
    pub fn printed(&self) -> String {
        self.holder.printed()
    }

    /// Ends the backend as an operator would, and waits.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop(mut self) -> Result<()> {
        self.holder.terminate(TIMEOUT).map(drop)
    }
}

/// Compares the outputs and the ends of two runs, which must pass.
fn same_output(
    program: &Path,
    native: &Finished,
    remoted: &Finished,
    otherwise: &[(&str, &str)],
) -> Result<()> {
    let expected =
        otherwise.iter().fold(native.stdout.clone(), |text, (there, here)| text.replace(there, here));
    let name = program.file_name().unwrap_or_default().display();
    println!("{name}: native {:?}, remoted {:?}", native.elapsed, remoted.elapsed);
    ensure!(
        expected == remoted.stdout
            && native.status == remoted.status
            && remoted.status.success()
            && remoted.stdout.ends_with("PASS\n"),
        "{name}: natively {}\n{}\nremoted {}\n{}\n{}",
        native.status,
        native.stdout,
        remoted.status,
        remoted.stdout,
        remoted.stderr
    );
    Ok(())
}

/// Open descriptors of a process.
///
/// # Errors
/// When there is no such process.
pub fn descriptors(process: u32) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{process}/fd"))?.count())
}

/// Mappings of a process.
///
/// # Errors
/// When there is no such process.
pub fn mappings(process: u32) -> Result<usize> {
    Ok(std::fs::read_to_string(format!("/proc/{process}/maps"))?.lines().count())
}

/// CPU time a process has used, in clock ticks.
///
/// # Errors
/// When there is no such process.
pub fn cpu_ticks(process: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    let after_name = stat.rsplit_once(')').context("a name in parentheses")?.1;
    let field = |index: usize| -> Result<u64> {
        Ok(after_name.split_whitespace().nth(index).context("a field of stat")?.parse()?)
    };
    // utime and stime are fields 14 and 15 of the line; the name is the second.
    Ok(field(11)? + field(12)?)
}

/// Private resident memory of a process, in KiB.
///
/// # Errors
/// When there is no such process.
pub fn private_kibibytes(process: u32) -> Result<u64> {
    let rollup = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
    rollup
        .lines()
        .filter_map(|line| {
            line.strip_prefix("Private_Clean:").or_else(|| line.strip_prefix("Private_Dirty:"))
        })
        .map(|rest| Ok(rest.trim().trim_end_matches(" kB").trim().parse::<u64>()?))
        .sum()
}

/// The number of processes made ahead on a host at rest: `kinds` if processes like this device or worker have namespaces of their own,
/// which take most of the time of a start, and otherwise 0.
///
/// # Errors
/// When the process does not run.
pub fn made_ahead(process: u32, kinds: usize) -> Result<usize> {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/mnt"));
    Ok(if namespace(&process.to_string())? == namespace("self")? { 0 } else { kinds })
}

/// Live processes called `name` among the descendants of a process.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn descendants(ancestor: u32, name: &str) -> Result<Vec<u32>> {
    let mut parents = BTreeMap::new();
    let mut named = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|text| text.parse::<u32>().ok()) else { continue };
        // A process may be gone between the listing and the reading.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((head, tail)) = stat.rsplit_once(')') else { continue };
        let mut fields = tail.split_whitespace();
        let (state, parent) = (fields.next(), fields.next().and_then(|text| text.parse::<u32>().ok()));
        let Some(parent) = parent else { continue };
        parents.insert(id, parent);
        if state != Some("Z") && head.split_once('(').is_some_and(|(_, comm)| comm == name) {
            named.push(id);
        }
    }
    let descends = |mut id: u32| {
        while let Some(parent) = parents.get(&id) {
            if *parent == ancestor {
                return true;
            }
            id = *parent;
        }
        false
    };
    Ok(named.into_iter().filter(|id| descends(*id)).collect())
}
