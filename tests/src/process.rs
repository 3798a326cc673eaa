//! Processes with a time limit and an end: no process started here outlives the value that stands for it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal};
use sluice_kit::wait::{TIMEOUT, readable};

/// The result of a process.
#[derive(Debug, Clone)]
pub struct Finished {
    /// Exit status; a signal counts as no code.
    pub status: ExitStatus,
    /// Everything written to standard output.
    pub stdout: String,
    /// Everything written to standard error.
    pub stderr: String,
    /// Wall-clock time.
    pub elapsed: Duration,
}

/// Runs a command to its end and returns its output, or kills it when the limit is reached.
///
/// # Errors
/// When it cannot be started or does not end in time.
pub fn run(command: &mut Command, limit: Duration) -> Result<Finished> {
    let name = display(command);
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {name}"))?;
    let stdout = Collected::from(child.stdout.take().context("standard output is piped")?);
    let stderr = Collected::from(child.stderr.take().context("standard error is piped")?);
    let Some(status) = wait(&mut child, limit)? else {
        child.kill().ok();
        child.wait().ok();
        let said = format!("{}\n{}", stdout.text(), stderr.text());
        bail!("{name} did not end within {limit:?}. Its output:\n{}", tail(&said, 40));
    };
    let elapsed = started.elapsed();
    Ok(Finished { status, stdout: stdout.text(), stderr: stderr.text(), elapsed })
}

/// Runs a command that must succeed and returns its standard output.
///
/// # Errors
/// When it fails; the message holds the end of its output.
pub fn output_of(command: &mut Command, limit: Duration) -> Result<String> {
    let name = display(command);
    let finished = run(command, limit)?;
    if !finished.status.success() {
        bail!("{name}: {}\n{}\n{}", finished.status, tail(&finished.stdout, 20), tail(&finished.stderr, 40));
    }
    Ok(finished.stdout)
}

/// The command line, for messages.
#[must_use]
pub fn display(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut text = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// The last lines of a text.
#[must_use]
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Waits for a child; `None` when the limit is reached first.
///
/// # Errors
/// When waiting itself fails.
pub fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    // Short at first, because most commands are short; a blocking wait with a limit does not exist in the library.
    let mut pause = Duration::from_micros(200);
    loop {
        if let Some(status) = child.try_wait().context("waiting for a child process")? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// The contents of a pipe, read by a thread of its own.
struct Collected {
    process_ended: Arc<AtomicBool>,
    reader: JoinHandle<Vec<u8>>,
}

impl Collected {
    /// Time for which a pipe must be empty after the end of its process: a grandchild that was left behind keeps it open without end.
    const GRACE: Duration = Duration::from_secs(5);

    fn from(mut pipe: impl Read + AsFd + Send + 'static) -> Self {
        let process_ended = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::clone(&process_ended);
        let reader = thread::spawn(move || {
            let (mut bytes, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
            loop {
                // Before the wait: the process may write something and end between the wait and the question.
                let has_ended = has_ended.load(Ordering::Acquire);
                if readable(&pipe, Self::GRACE) {
                    // An error means that the pipe broke; the text read until then is the output.
                    let Ok(length @ 1..) = pipe.read(&mut buffer) else { return bytes };
                    bytes.extend_from_slice(&buffer[..length]);
                } else if has_ended {
                    return bytes;
                }
            }
        });
        Self { process_ended, reader }
    }

    /// All output of a process that has ended.
    fn text(self) -> String {
        self.process_ended.store(true, Ordering::Release);
        let bytes = self.reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// A process that serves in the background. Dropping it ends it: SIGTERM first, SIGKILL after a grace period.
#[derive(Debug)]
pub struct Background {
    name: String,
    child: Child,
    output: Arc<(Mutex<Output>, Condvar)>,
    log: PathBuf,
}

#[derive(Debug, Default)]
struct Output {
    lines: Vec<String>,
    open_pipes: usize,
}

impl Background {
    /// Starts a command; its output goes to `log` and can be waited for.
    ///
    /// # Errors
    /// When the log cannot be written or the command cannot be started.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        Self::start_with(name, command, log, Stdio::null())
    }

    /// As [`Background::start`], with a given standard input.
    ///
    /// # Errors
    /// As [`Background::start`].
    pub fn start_with(name: &str, command: &mut Command, log: &Path, input: Stdio) -> Result<Self> {
        let (errors, theirs) = std::io::pipe()?;
        Self::start_between(name, command, log, input, errors, theirs.into())
    }

    /// As [`Background::start_with`], with a stream socket as standard error, as a service has from systemd.
    ///
    /// # Errors
    /// As [`Background::start`].
    pub fn start_service(name: &str, command: &mut Command, log: &Path, input: Stdio) -> Result<Self> {
        let (errors, theirs) = UnixStream::pair()?;
        Self::start_between(name, command, log, input, errors, OwnedFd::from(theirs).into())
    }

    fn start_between(
        name: &str,
        command: &mut Command,
        log: &Path,
        input: Stdio,
        errors: impl Read + Send + 'static,
        standard_error: Stdio,
    ) -> Result<Self> {
        let file = Arc::new(Mutex::new(
            File::create(log).with_context(|| format!("creating the log {}", log.display()))?,
        ));
        let mut child = command
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(standard_error)
            .spawn()
            .with_context(|| format!("starting {name}: {}", display(command)))?;
        // The command would keep the passed descriptors open.
        command.stdin(Stdio::null()).stderr(Stdio::null());
        let output = Arc::new((Mutex::new(Output { lines: Vec::new(), open_pipes: 2 }), Condvar::new()));
        follow(child.stdout.take().context("standard output is piped")?, &output, &file);
        follow(errors, &output, &file);
        Ok(Self { name: name.to_owned(), child, output, log: log.to_path_buf() })
    }

    /// Process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a printed line that starts with `prefix` and returns the rest of the line.
    ///
    /// # Errors
    /// When the process ends or the limit is reached first.
    pub fn wait_for_line(&mut self, prefix: &str, limit: Duration) -> Result<String> {
        let line = self.wait_for_any(&[prefix], limit)?;
        Ok(line[prefix.len()..].trim().to_owned())
    }

    /// Waits for a printed line that starts with one of `prefixes` and returns the line.
    ///
    /// # Errors
    /// When the process ends or the limit is reached first.
    pub fn wait_for_any(&mut self, prefixes: &[&str], limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        let (lock, changed) = &*self.output;
        let mut output = lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let wanted = |line: &&String| prefixes.iter().any(|prefix| line.starts_with(prefix));
            if let Some(line) = output.lines.iter().find(wanted) {
                return Ok(line.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if output.open_pipes == 0 || left.is_zero() {
                let why = if left.is_zero() { "did not print" } else { "ended without printing" };
                let said = tail(&output.lines.join("\n"), 30);
                let wanted = prefixes.join("…\" or \"");
                bail!("{} {why} \"{wanted}…\" (log: {}). Its output:\n{said}", self.name, self.log.display());
            }
            output = changed.wait_timeout(output, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The output so far.
    #[must_use]
    pub fn printed(&self) -> String {
        self.output.0.lock().unwrap_or_else(PoisonError::into_inner).lines.join("\n")
    }

    /// True if the process still runs.
    ///
    /// # Errors
    /// When the system does not report it.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait().context("polling a child process")?.is_none())
    }

    /// Sends SIGTERM and waits; SIGKILL when it does not end within `grace`, and then an error.
    ///
    /// # Errors
    /// When SIGKILL was needed.
    pub fn terminate(&mut self, grace: Duration) -> Result<ExitStatus> {
        if let Some(status) = self.child.try_wait().context("polling a child process")? {
            return Ok(status);
        }
        signal(self.child.id(), Signal::TERM)?;
        if let Some(status) = wait(&mut self.child, grace)? {
            return Ok(status);
        }
        self.child.kill().with_context(|| format!("killing {}", self.name))?;
        self.child.wait().with_context(|| format!("waiting for {}", self.name))?;
        bail!("{} did not end within {grace:?} of SIGTERM", self.name)
    }

    /// Waits for the process to end by itself; `None` when the limit is reached first.
    ///
    /// # Errors
    /// When waiting itself fails.
    pub fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        wait(&mut self.child, limit)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Err(error) = self.terminate(TIMEOUT) {
            eprintln!("{error:#}");
        }
    }
}

fn follow(from: impl Read + Send + 'static, output: &Arc<(Mutex<Output>, Condvar)>, log: &Arc<Mutex<File>>) {
    let output = Arc::clone(output);
    let log = Arc::clone(log);
    thread::spawn(move || {
        for line in BufReader::new(from).split(b'\n') {
            let Ok(line) = line else { break };
            let line = String::from_utf8_lossy(&line).into_owned();
            // The log is for people; tests read the lines in memory, so a full disk is no error here.
            writeln!(log.lock().unwrap_or_else(PoisonError::into_inner), "{line}").ok();
            output.0.lock().unwrap_or_else(PoisonError::into_inner).lines.push(line);
            output.1.notify_all();
        }
        output.0.lock().unwrap_or_else(PoisonError::into_inner).open_pipes -= 1;
        output.1.notify_all();
    });
}

/// Sends a signal to a process.
///
/// # Errors
/// When there is no such process or it belongs to another user.
pub fn signal(process: u32, signal: Signal) -> Result<()> {
    let pid =
        i32::try_from(process).ok().and_then(Pid::from_raw).context("a process id is a positive number")?;
    rustix::process::kill_process(pid, signal).with_context(|| format!("signalling process {process}"))
}

/// Sends SIGKILL to a process that may be gone already.
pub fn kill(process: u32) {
    signal(process, Signal::KILL).ok();
}

/// Processes whose environment holds `marker` ("NAME=value"), with their names.
///
/// Every descendant inherits the marker unless its starter wipes the environment, so this finds also processes whose parent
/// has ended.
#[must_use]
pub fn with_environment(marker: &str) -> Vec<(u32, String)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let id: u32 = entry.file_name().to_str()?.parse().ok()?;
            let environment = std::fs::read(entry.path().join("environ")).ok()?;
            let name = std::fs::read_to_string(entry.path().join("comm")).ok()?;
            environment
                .split(|byte| *byte == 0)
                .any(|variable| variable == marker.as_bytes())
                .then_some((id, name))
        })
        .map(|(id, name)| (id, name.trim().to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn output_and_status_of_a_command_are_returned() {
        let finished = run(&mut shell("echo out; echo err >&2; exit 3"), TIMEOUT).unwrap();
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "err\n"));
        assert_eq!(finished.status.code(), Some(3));
    }

    #[test]
    fn hanging_command_is_ended_and_a_process_left_behind_is_not_waited_for() {
        // On a busy machine it may be killed before it has printed anything: then it gets more time.
        let said = [300, 3_000, 30_000].into_iter().any(|limit| {
            let hangs = run(&mut shell("echo before; exec sleep 1000"), Duration::from_millis(limit));
            format!("{:#}", hangs.unwrap_err()).contains("output:\nbefore\n")
        });
        assert!(said);
        let finished = run(&mut shell("echo parent; sleep 1000 & echo $!; exit 0"), TIMEOUT).unwrap();
        let (parent, left) = finished.stdout.trim_end().split_once('\n').unwrap();
        let left = left.parse().unwrap();
        signal(left, Signal::KILL).expect("the process that was left behind runs");
        assert_eq!(parent, "parent");
    }

    #[test]
    fn output_of_a_background_process_is_read_and_it_is_ended() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut process =
            Background::start("test", &mut shell("echo 'ready: 5'; exec sleep 1000"), log.path()).unwrap();
        assert_eq!(process.wait_for_line("ready:", TIMEOUT).unwrap(), "5");
        assert!(process.is_running().unwrap());
        process.terminate(TIMEOUT).unwrap();
        assert!(process.wait_for_line("never", TIMEOUT).is_err());
        assert_eq!(std::fs::read_to_string(log.path()).unwrap(), "ready: 5\n");
    }
}
