//! The start of a program through `sluice run`, and the process between both, which takes the program's own time.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::bundle::Bundle;
use crate::child::confine;
use crate::host::Side;
use crate::step::Step;
use crate::stop::{Answer, Stop};

/// Largest output of a program in bytes. The rest is read and discarded: a program that cannot write would end in another way.
const MOST: usize = 256 << 10;

/// The end of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProgramResult {
    /// Duration of the program alone.
    pub(crate) seconds: f64,
    /// Duration with the start and the end of Sluice.
    #[serde(default)]
    pub(crate) whole_seconds: f64,
    /// Its exit status.
    pub(crate) exit: Option<i32>,
    /// The signal that ended it.
    pub(crate) signal: Option<i32>,
}

impl ProgramResult {
    fn new(status: ExitStatus, since: Instant) -> ProgramResult {
        ProgramResult {
            seconds: elapsed(since),
            whole_seconds: 0.0,
            exit: status.code(),
            signal: status.signal(),
        }
    }

    /// The end in words.
    pub(crate) fn words(&self) -> String {
        match (self.exit, self.signal) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "no end".to_owned(),
        }
    }
}

/// A program that was started and ended.
#[derive(Debug)]
pub(crate) struct Started {
    /// Its end.
    pub(crate) end: ProgramResult,
    /// Its standard output.
    pub(crate) stdout: Output,
}

impl Started {
    /// True if the program found no error.
    pub(crate) fn passed(&self) -> bool {
        let text = &self.stdout.bytes;
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        self.end.exit == Some(0) && text.rsplit(|byte| *byte == b'\n').next() == Some(b"PASS")
    }
}

/// An output of a program.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Output {
    /// Its bytes up to the limit.
    pub(crate) bytes: Vec<u8>,
    /// True if there were more.
    pub(crate) is_cut: bool,
}

impl Output {
    /// An error if the output is not whole: its comparison would prove nothing.
    pub(crate) fn whole(&self, side: Side) -> Answer<&[u8]> {
        match self.is_cut {
            false => Ok(&self.bytes),
            true => Err(Stop::failed(format!(
                "output too long: {} side, more than {} KiB",
                side.name(),
                MOST >> 10
            ))),
        }
    }
}

/// Runs a program to its end. The step's limit bounds the time.
pub(crate) fn run(bundle: &Bundle, step: &Step, program: &Path, side: Side) -> Answer<Started> {
    let temporary = step.temporary()?;
    let report = temporary.join(side.name());
    let own = std::env::current_exe()?;
    let mut words = vec![bundle.program("sluice").into_os_string(), "run".into()];
    if side == Side::Native {
        words.push("--native".into());
    }
    words.extend(step.libraries().arguments());
    words.extend([
        "--".into(),
        own.clone().into(),
        "program".into(),
        "--report".into(),
        report.clone().into(),
    ]);
    words.extend(["--".into(), program.into()]);
    let mut command = Command::new(own);
    command.arg("program").arg("--").args(words);
    command.env("TMPDIR", temporary).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    eprintln!("-- {}", side.name());
    let since = Instant::now();
    let mut child = command.spawn()?;
    let (stdout, stderr) = std::thread::scope(|scope| {
        let stderr = child.stderr.take().map(|pipe| scope.spawn(move || collect(pipe, std::io::stderr())));
        let stdout =
            child.stdout.take().map_or_else(Output::default, |pipe| collect(pipe, std::io::stderr()));
        (stdout, stderr.and_then(|thread| thread.join().ok()).unwrap_or_default())
    });
    let status = child.wait()?;
    let whole_seconds = elapsed(since);
    let Ok(text) = std::fs::read(&report) else {
        let stderr = String::from_utf8_lossy(&stderr.bytes);
        let last = stderr.lines().last().unwrap_or_default();
        return Err(Stop::failed(format!("sluice run did not start the program: {status}: {last}")));
    };
    let end = serde_json::from_slice(&text)?;
    Ok(Started { end: ProgramResult { whole_seconds, ..end }, stdout })
}

/// Serves `sluice-hardware program`: becomes the program; or, with a report, runs it and writes down its end.
///
/// Each process of the chain ends with its parent, so that a run that is killed leaves no program behind.
pub(crate) fn serve(report: Option<&Path>, words: &[OsString]) -> Result<u8> {
    confine().context("the limits of a child")?;
    let Some(report) = report else {
        let (program, arguments) = words.split_first().context("no program")?;
        return Err(Command::new(program).args(arguments).exec())
            .with_context(|| program.display().to_string());
    };
    let since = Instant::now();
    let mut child = Command::new("/proc/self/exe").arg("program").arg("--").args(words).spawn()?;
    let end = ProgramResult::new(child.wait()?, since);
    std::fs::write(report, serde_json::to_vec(&end)?).context("the report")?;
    Ok(end.exit.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Reads a pipe to its end. The part up to the limit goes to the log at once: that of a program that hangs is needed most.
fn collect(mut pipe: impl Read, mut log: impl Write) -> Output {
    let mut output = Output::default();
    let mut buffer = [0; 8 << 10];
    // After an error, the bytes so far are the output.
    while let Ok(length @ 1..) = pipe.read(&mut buffer) {
        let room = MOST.saturating_sub(output.bytes.len()).min(length);
        output.is_cut |= room < length;
        let part = buffer.get(..room).unwrap_or_default();
        // A log that is full must not cost the result.
        let _ = log.write_all(part);
        output.bytes.extend_from_slice(part);
    }
    output
}

fn elapsed(since: Instant) -> f64 {
    (since.elapsed().as_secs_f64() * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(exit: Option<i32>, signal: Option<i32>, stdout: &str) -> Started {
        let end = ProgramResult { seconds: 0.0, whole_seconds: 0.0, exit, signal };
        Started { end, stdout: Output { bytes: stdout.into(), is_cut: false } }
    }

    #[test]
    fn program_passes_only_with_its_last_line_and_status() {
        assert!(started(Some(0), None, "1\nPASS\n").passed());
        assert!(!started(Some(1), None, "PASS\n").passed());
        assert!(!started(Some(0), None, "PASS\n1\n").passed());
        assert!(!started(None, Some(9), "PASS\n").passed());
    }

    #[test]
    fn end_is_described_by_status_or_signal() {
        assert_eq!(started(Some(3), None, "").end.words(), "exit status 3");
        assert_eq!(started(None, Some(11), "").end.words(), "signal 11");
    }

    #[test]
    fn output_is_logged_and_collected_up_to_the_limit() {
        let mut log = Vec::new();
        let output = collect(&b"a\nPASS\n"[..], &mut log);
        assert_eq!(output.whole(Side::Native).unwrap(), b"a\nPASS\n");
        assert_eq!(log, b"a\nPASS\n");
        let most = u64::try_from(MOST).unwrap();
        assert!(!collect(std::io::repeat(b'a').take(most), std::io::sink()).is_cut);
        let mut pipe = std::io::repeat(b'a').take(3 * most);
        let long = collect(&mut pipe, std::io::sink());
        assert_eq!((long.bytes.len(), long.is_cut, pipe.limit()), (MOST, true, 0));
        let reason = long.whole(Side::Remoted).unwrap_err().to_string();
        assert_eq!(reason, "failed: output too long: remoted side, more than 256 KiB");
    }
}
