//! The machine-readable record of one test run: name of a test, verdict, time.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::cargo;

/// Path of the record of a test run.
pub(crate) fn record_file() -> Result<PathBuf> {
    Ok(cargo::target_folder()?.join("test-run.json"))
}

/// Result of a test, or state of a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RecordVerdict {
    /// It ran and passed.
    Passed,
    /// It ran and failed, or did not end, or left a process behind.
    Failed,
    /// For a promise: some of its tests passed and none failed; the reason names the tests that did not run.
    Partly,
    /// It did not run; the reason says why.
    Skipped,
}

/// Result of a test.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TestResult {
    /// `binary::path::test`.
    pub name: String,
    pub verdict: RecordVerdict,
    /// Wall-clock time.
    pub seconds: f64,
    /// The reason of a skip, or the end of the output of a failed test.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

impl TestResult {
    /// Result of a check that took this time and failed for this reason.
    pub(crate) fn of(
        name: impl Into<String>,
        elapsed: Duration,
        judged: std::result::Result<(), String>,
    ) -> Self {
        let verdict = if judged.is_ok() { RecordVerdict::Passed } else { RecordVerdict::Failed };
        let reason = judged.err().unwrap_or_default();
        Self { name: name.into(), verdict, seconds: elapsed.as_secs_f64(), reason }
    }

    /// Result of a check that reads the tree: it fails with the places that break its rules.
    pub(crate) fn of_findings(name: &str, started: Instant, findings: &[String]) -> Self {
        let judged = if findings.is_empty() { Ok(()) } else { Err(findings.join("\n")) };
        Self::of(name, started.elapsed(), judged)
    }

    /// Result of a check that did not run.
    pub(crate) fn skipped(name: &str, reason: String) -> Self {
        Self { name: name.to_owned(), verdict: RecordVerdict::Skipped, seconds: 0.0, reason }
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The commit that was tested, with "-dirty" when files differed.
    pub commit: String,
    /// `ci` or `full`.
    pub tier: String,
    /// True if a part was left out on purpose; such a run proves no promise.
    pub partial: bool,
    /// Seconds since 1970 when it began.
    pub started: u64,
    /// Wall-clock time of the whole run.
    pub seconds: f64,
    /// The machine of the run.
    pub machine: Machine,
    /// Results of all tests.
    pub tests: Vec<TestResult>,
}

/// Description of a machine.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Number of CPUs it could use.
    pub cpus: usize,
    /// Model of the first CPU.
    pub model: String,
    /// Release of the kernel.
    pub kernel: String,
}

impl Machine {
    /// Describes this machine.
    pub(crate) fn this() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let model = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
            .map(|(_, model)| model.trim().to_owned())
            .unwrap_or_default();
        Self {
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            model,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

impl Record {
    /// Number of tests with this verdict.
    pub(crate) fn count(&self, verdict: RecordVerdict) -> usize {
        self.tests.iter().filter(|test| test.verdict == verdict).count()
    }

    pub(crate) fn write(&self, to: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).context("encoding the record")?;
        fs::write(to, text + "\n").with_context(|| format!("writing {}", to.display()))
    }

    pub(crate) fn read(from: &Path) -> Result<Self> {
        let text = fs::read_to_string(from)
            .with_context(|| format!("reading {} (`cargo xtask test` writes it)", from.display()))?;
        serde_json::from_str(&text).with_context(|| format!("reading {}", from.display()))
    }
}
