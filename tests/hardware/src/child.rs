//! Runs a step as a child process with a limit, and ends it with everything that it started.

use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, kill_process, kill_process_group,
    set_parent_process_death_signal, setrlimit, wait,
};
use serde_json::{Map, Value};

use crate::signals;

/// Largest output of a step, in bytes, for its notes and for its messages each.
const MOST: usize = 1 << 20;
/// Time for the process to end after its answer is complete: the driver's own end may hang.
const GRACE: Duration = Duration::from_secs(5);
/// Time in which killed processes must be gone; a process in the driver's hands may be stuck there.
const REAP: Duration = Duration::from_secs(20);
/// Longest wait between two looks at the child.
const LOOK: Duration = Duration::from_millis(20);

/// A step that ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Its notes.
    pub(crate) notes: Map<String, Value>,
    /// The line with which it ended, if it came so far.
    pub(crate) end: Option<Value>,
    /// The end of its process; `None` if it was killed for its limit, or because a signal ended the run.
    pub(crate) status: Option<ExitStatus>,
    /// Its messages.
    pub(crate) log: Vec<u8>,
    /// True if a process could not be ended.
    pub(crate) stuck: bool,
    /// Its duration.
    pub(crate) took: Duration,
}

/// A pipe from the child, and the bytes that it carried.
struct Output<P> {
    pipe: P,
    bytes: Vec<u8>,
}

impl<P: AsFd + std::io::Read> Output<P> {
    fn new(pipe: P) -> Result<Output<P>> {
        rustix::io::ioctl_fionbio(&pipe, true).context("a pipe that does not wait")?;
        Ok(Output { pipe, bytes: Vec::new() })
    }

    /// Takes the bytes that are there. Bytes beyond the limit are lost.
    fn take(&mut self) -> Result<()> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.pipe.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => {
                    let room = MOST.saturating_sub(self.bytes.len()).min(read);
                    self.bytes.extend_from_slice(buffer.get(..room).unwrap_or_default());
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("the child's output"),
            }
        }
    }
}

/// Runs `command` for at most `limit`.
pub(crate) fn run(command: &mut Command, limit: Duration) -> Result<Ended> {
    let start = Instant::now();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().context("a child process")?;
    let outputs = take_pipes(&mut child);
    let watched = outputs.and_then(|(mut notes, mut log)| {
        let status = watch(&mut child, &mut notes, &mut log, start + limit)?;
        Ok((notes, log, status))
    });
    // The group is killed on every way out, also after an error of this process.
    let stuck = !end(&mut child);
    let (mut notes, mut log, status) = watched?;
    notes.take()?;
    log.take()?;
    let (notes, end) = read(&notes.bytes);
    let status = if end.is_some() { status.or_else(|| Some(ExitStatus::from_raw(0))) } else { status };
    Ok(Ended { notes, end, status, log: log.bytes, stuck, took: start.elapsed() })
}

fn take_pipes(child: &mut Child) -> Result<(Output<ChildStdout>, Output<ChildStderr>)> {
    let notes = child.stdout.take().context("the child's output")?;
    let log = child.stderr.take().context("the child's messages")?;
    Ok((Output::new(notes)?, Output::new(log)?))
}

/// Collects output until the child ends, its time is over, or a signal ends the run.
fn watch(
    child: &mut Child,
    notes: &mut Output<ChildStdout>,
    log: &mut Output<ChildStderr>,
    mut deadline: Instant,
) -> Result<Option<ExitStatus>> {
    let mut ended = false;
    loop {
        if let Some(status) = child.try_wait().context("the child")? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline || signals::stored().is_some() {
            return Ok(None);
        }
        let timeout = Timespec::try_from(LOOK).context("a duration")?;
        let mut descriptors =
            [PollFd::new(&notes.pipe, PollFlags::IN), PollFd::new(&log.pipe, PollFlags::IN)];
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("the child's output"),
        }
        if descriptors.iter().any(|descriptor| descriptor.revents().contains(PollFlags::HUP)) {
            // A closed pipe is always readable, so the poll above does not wait.
            std::thread::sleep(LOOK);
        }
        notes.take()?;
        log.take()?;
        if !ended && read(&notes.bytes).1.is_some() {
            ended = true;
            deadline = deadline.min(Instant::now() + GRACE);
        }
    }
}

/// Kills the child's process group and reaps it with all orphans of it. False if something is left.
fn end(child: &mut Child) -> bool {
    let group = Pid::from_child(child);
    let deadline = Instant::now() + REAP;
    loop {
        // An error says that the group is gone, or belongs to a process that ends already.
        let _ = kill_process_group(group, Signal::KILL);
        let gone = matches!(child.try_wait(), Ok(Some(_)));
        let alone = gone && reap();
        if alone || Instant::now() >= deadline {
            return alone;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reaps orphans, which the kernel gives to this process, and kills those that left the group. True if none is left.
fn reap() -> bool {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) => break,
            Err(_) => return true,
        }
    }
    for pid in children() {
        // An orphan that ended by itself is reaped in the next round.
        let _ = kill_process(pid, Signal::KILL);
    }
    false
}

/// The children of this process, as far as the kernel lists them.
fn children() -> Vec<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let numbers = lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    numbers.filter_map(|number| Pid::from_raw(number.parse().ok()?)).collect()
}

/// The notes and the end among the lines of a child; a line that was cut off is left out.
fn read(bytes: &[u8]) -> (Map<String, Value>, Option<Value>) {
    let mut notes = Map::new();
    let mut end = None;
    for line in bytes.split(|byte| *byte == b'\n') {
        let Ok(value) = serde_json::from_slice::<Value>(line) else { continue };
        if let (Some(key), Some(note)) = (value.get("note").and_then(Value::as_str), value.get("value")) {
            notes.insert(key.to_owned(), note.clone());
        } else if value.get("end").is_some() {
            end = Some(value);
        }
    }
    (notes, end)
}

/// Makes a child end with its parent and leave no core file.
///
/// # Errors
/// `EPIPE` if the reader of its output, its parent as a rule, is gone already: such a death sends no signal any more.
pub(crate) fn confine() -> Result<(), rustix::io::Errno> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let output = std::io::stdout();
    if poll(&mut [PollFd::new(&output, PollFlags::empty())], Some(&Timespec::default()))? > 0 {
        return Err(rustix::io::Errno::PIPE);
    }
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
}
