//! The machine-readable record of one test run: name of a test, verdict, time.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

/// How a test ended, or how a promise stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// It ran and held.
    Passed,
    /// It ran and did not hold, or did not end, or left a process behind.
    Failed,
    /// Of a promise: some of its tests ran and held, and none did not; the reason names those that did not run.
    Partly,
    /// It did not run; the reason says why.
    Skipped,
}

/// One test.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TestResult {
    /// `binary::path::test`.
    pub name: String,
    /// How it ended.
    pub verdict: Verdict,
    /// Wall-clock time.
    pub seconds: f64,
    /// Why it was skipped, or the end of what a failed test printed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// One run.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The commit that was tested, with "-dirty" when files differed.
    pub commit: String,
    /// `ci` or `full`.
    pub tier: String,
    /// Whether a part was left out on purpose; such a run proves no promise.
    pub partial: bool,
    /// Seconds since 1970 when it began.
    pub started: u64,
    /// Wall-clock time of the whole run.
    pub seconds: f64,
    /// What it ran on.
    pub machine: Machine,
    /// Every test.
    pub tests: Vec<TestResult>,
}

/// What a run ran on.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// CPUs it could use.
    pub cpus: usize,
    /// Model of the first.
    pub model: String,
    /// Release of the kernel.
    pub kernel: String,
}

impl Machine {
    /// This one.
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
    /// How many tests ended so.
    pub(crate) fn count(&self, verdict: Verdict) -> usize {
        self.tests.iter().filter(|test| test.verdict == verdict).count()
    }

    /// Writes the record.
    pub(crate) fn write(&self, to: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).context("encoding the record")?;
        fs::write(to, text + "\n").with_context(|| format!("writing {}", to.display()))
    }

    /// Reads a record.
    pub(crate) fn read(from: &Path) -> Result<Self> {
        let text = fs::read_to_string(from)
            .with_context(|| format!("reading {} (`cargo xtask test` writes it)", from.display()))?;
        serde_json::from_str(&text).with_context(|| format!("reading {}", from.display()))
    }
}
