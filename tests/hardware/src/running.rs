//! Programs that a step starts and watches: their lines, their end, and their kill.
//!
//! Each ends with the step, also if the step is killed: it runs by `sluice-hardware program`, which asks the kernel for that.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::stop::{Answer, Stop};

/// Longest time for steps of a program that take well under a second on an idle machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of output that are kept. The oldest lines of a longer output are lost.
const MOST: usize = 256 << 10;
/// Longest line; the rest of a longer one counts as another line.
const LINE: u64 = 64 << 10;
/// Pause between two looks at a process.
const LOOK: Duration = Duration::from_millis(2);

/// A program that was started. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Running {
    name: String,
    child: Child,
    output: Arc<(Mutex<Lines>, Condvar)>,
}

#[derive(Debug, Default)]
struct Lines {
    lines: VecDeque<String>,
    bytes: usize,
    has_ended: bool,
}

impl Lines {
    fn add(&mut self, line: String) {
        self.bytes += line.len();
        self.lines.push_back(line);
        while self.bytes > MOST {
            let Some(oldest) = self.lines.pop_front() else { return };
            self.bytes -= oldest.len();
        }
    }
}

/// The command that runs a program as a part of this step: words, variables and folder are those of `command`.
pub(crate) fn part_of_step(command: &Command) -> Answer<Command> {
    let mut own = Command::new(std::env::current_exe()?);
    own.args(["program", "--"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => own.env(name, value),
            None => own.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        own.current_dir(folder);
    }
    Ok(own)
}

impl Running {
    /// Starts a program. Its messages go to the log of the step.
    pub(crate) fn start(name: &str, command: &Command) -> Answer<Running> {
        Running::start_with(name, command, Stdio::inherit())
    }

    /// As [`Running::start`], with a place for its messages.
    pub(crate) fn start_with(name: &str, command: &Command, messages: Stdio) -> Answer<Running> {
        let mut command = part_of_step(command)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(messages);
        eprintln!("-- {name}");
        let mut child = command.spawn()?;
        let output = Arc::new((Mutex::new(Lines::default()), Condvar::new()));
        if let Some(pipe) = child.stdout.take() {
            let output = Arc::clone(&output);
            std::thread::spawn(move || follow(pipe, &output));
        }
        Ok(Running { name: name.to_owned(), child, output })
    }

    /// Waits for a line that begins with one of these words, and returns it.
    pub(crate) fn line(&self, words: &[&str]) -> Answer<String> {
        let end = Instant::now() + PATIENCE;
        let (lines, changed) = &*self.output;
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(line) =
                lines.lines.iter().find(|line| words.iter().any(|word| line.starts_with(word)))
            {
                return Ok(line.clone());
            }
            let left = end.saturating_duration_since(Instant::now());
            if lines.has_ended || left.is_zero() {
                let printed = tail(&lines.lines);
                let reason = format!("{} did not print {:?}; it printed: {printed}", self.name, words);
                return Err(Stop::failed(reason));
            }
            lines = changed.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The last line so far that begins with this word, without it.
    pub(crate) fn last(&self, word: &str) -> Option<String> {
        let lines = self.output.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.lines.iter().rev().find_map(|line| line.strip_prefix(word)).map(str::to_owned)
    }

    /// Its output so far.
    pub(crate) fn printed(&self) -> String {
        let lines = self.output.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.lines.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Answer {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Waits for its end, and for the end of its output.
    pub(crate) fn end(&mut self) -> Answer<ExitStatus> {
        self.end_within(PATIENCE)
    }

    /// As [`Running::end`], with another limit.
    pub(crate) fn end_within(&mut self, limit: Duration) -> Answer<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                self.drain(Instant::now() + PATIENCE);
                return Ok(status);
            }
            if Instant::now() > end {
                let reason = format!("{} does not end; it printed: {}", self.name, self.tail());
                return Err(Stop::failed(reason));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits for its end, and for its verdict that it found no error.
    pub(crate) fn pass(&mut self) -> Answer {
        let status = self.end()?;
        match status.success() && self.printed().ends_with("PASS\n") {
            true => Ok(()),
            false => Err(Stop::failed(format!("{}: {}: {}", self.name, words(status), self.tail()))),
        }
    }

    /// Kills it and waits until it is gone.
    pub(crate) fn kill(&mut self) -> Answer<ExitStatus> {
        // It may have ended by itself.
        let _ = self.child.kill();
        self.end()
    }

    /// The end of its output, in one line.
    pub(crate) fn tail(&self) -> String {
        tail(&self.output.0.lock().unwrap_or_else(PoisonError::into_inner).lines)
    }

    /// Waits until its output has ended, which a child of it may keep open.
    fn drain(&self, end: Instant) {
        let (lines, changed) = &*self.output;
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        while !lines.has_ended && Instant::now() < end {
            lines = changed.wait_timeout(lines, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The runner kills the group in any case; here the process only ends sooner.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The end of a process in words.
pub(crate) fn words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no end".to_owned(),
    }
}

fn tail(lines: &VecDeque<String>) -> String {
    const SHOWN: usize = 12;
    let last: Vec<&str> = lines.iter().skip(lines.len().saturating_sub(SHOWN)).map(String::as_str).collect();
    last.join(" / ")
}

fn follow(pipe: impl Read, output: &(Mutex<Lines>, Condvar)) {
    let mut pipe = BufReader::new(pipe);
    loop {
        let mut line = Vec::new();
        let read = pipe.by_ref().take(LINE).read_until(b'\n', &mut line);
        let mut lines = output.0.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(1..) => lines.add(String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned()),
            // After an error, the lines so far are the output.
            _ => lines.has_ended = true,
        }
        output.1.notify_all();
        if lines.has_ended {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_lines_of_a_long_output_are_lost() {
        let mut lines = Lines::default();
        (0..1000).for_each(|number| lines.add(format!("{number} {}", "x".repeat(1000))));
        assert!(lines.bytes <= MOST && lines.lines.len() > 200);
        assert!(lines.lines.back().is_some_and(|line| line.starts_with("999 ")));
    }

    #[test]
    fn lines_are_read_to_the_end_of_the_pipe() {
        let output = (Mutex::new(Lines::default()), Condvar::new());
        follow(&b"one\ntwo"[..], &output);
        let lines = output.0.into_inner().unwrap();
        assert_eq!((lines.lines, lines.has_ended), (VecDeque::from(["one".into(), "two".into()]), true));
    }
}
