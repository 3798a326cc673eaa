//! The results file: one JSON line per result, on disk before the next step starts.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Map, Value};

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// The answer is known.
    Answered,
    /// The driver refused a call, or does not have it.
    Refused,
    /// The machine lacks a condition of the question.
    NotAsked,
    /// The time of the run, or of its phase, was over before the step.
    NoTime,
    /// The process ended by a signal.
    Crashed,
    /// The step was killed for its limit.
    TimedOut,
    /// The step itself failed, or a signal ended the run.
    Failed,
}

impl Outcome {
    /// All outcomes, in the order of the verdict.
    pub(crate) const ALL: [Outcome; 7] = [
        Outcome::Answered,
        Outcome::Refused,
        Outcome::NotAsked,
        Outcome::NoTime,
        Outcome::Crashed,
        Outcome::TimedOut,
        Outcome::Failed,
    ];

    /// The outcome in words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Outcome::Answered => "answered",
            Outcome::Refused => "refused",
            Outcome::NotAsked => "not asked",
            Outcome::NoTime => "without time",
            Outcome::Crashed => "crashed",
            Outcome::TimedOut => "timed out",
            Outcome::Failed => "failed",
        }
    }

    /// True if the step was asked, or cannot be asked on this machine.
    pub(crate) const fn orderly(self) -> bool {
        matches!(self, Outcome::Answered | Outcome::Refused | Outcome::NotAsked)
    }
}

/// A result line.
#[derive(Debug, Serialize)]
pub(crate) struct Record<'a> {
    /// Always `step`.
    pub(crate) kind: &'static str,
    /// Name of the phase.
    pub(crate) phase: &'a str,
    /// Name of the step.
    pub(crate) name: &'a str,
    /// The question.
    pub(crate) question: &'a str,
    /// The expected answer.
    pub(crate) expected: &'a str,
    /// The notes of the step.
    pub(crate) answer: Map<String, Value>,
    /// The consequence for Sluice.
    pub(crate) consequence: &'a str,
    /// The outcome.
    pub(crate) outcome: Outcome,
    /// The reason of another outcome than an answer.
    pub(crate) reason: Option<String>,
    /// Name of the driver's result, for a refusal.
    pub(crate) code: Option<String>,
    /// The signal that ended the process.
    pub(crate) signal: Option<i32>,
    /// True if a process of the step could not be ended.
    pub(crate) stuck: bool,
    /// Duration.
    pub(crate) seconds: f64,
}

/// The files of the output folder.
#[derive(Debug)]
pub(crate) struct Files {
    results: File,
    log: File,
}

impl Files {
    /// Opens the files; an earlier run's lines stay.
    pub(crate) fn open(folder: &Path) -> Result<Files> {
        std::fs::create_dir_all(folder).with_context(|| format!("the folder {}", folder.display()))?;
        let open = |name: &str| {
            let path = folder.join(name);
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(&path)
                .with_context(|| path.display().to_string())
        };
        let mut files = Files { results: open("results.jsonl")?, log: open("log.txt")? };
        // A run that was killed may have left half a line.
        let length = files.results.metadata().context("the results")?.len();
        if length > 0 {
            files.results.write_all(b"\n").context("the results")?;
        }
        Ok(files)
    }

    /// Writes a line and waits until it is on disk.
    pub(crate) fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(line).context("a result line")?;
        text.push(b'\n');
        self.results.write_all(&text).context("the results")?;
        self.results.sync_data().context("the results")
    }

    /// Writes a step's messages to the log.
    pub(crate) fn log(&mut self, step: &str, messages: &[u8]) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        writeln!(self.log, "== {step}").context("the log")?;
        self.log.write_all(messages).context("the log")?;
        writeln!(self.log).context("the log")
    }
}

/// The time now in UTC, as RFC 3339 writes it.
pub(crate) fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (year, month, day) = date(since / 86_400);
    let (hour, minute, second) = (since / 3_600 % 24, since / 60 % 60, since % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a day since 1970.
fn date(mut day: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    (year, month, day + 1)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn days_since_1970_have_their_date() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(11_017), (2000, 3, 1));
        assert_eq!(date(19_722), (2023, 12, 31));
        assert_eq!(date(20_453), (2025, 12, 31));
    }
}
