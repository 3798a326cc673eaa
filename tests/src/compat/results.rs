//! Outcomes of tests, and their cache.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

/// The outcome of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CompatOutcome {
    /// It began and reported nothing else: its process ended in it.
    Started,
    /// It passed.
    Passed,
    /// It did not run, by its own judgement.
    Skipped,
    /// It failed.
    Failed,
}

/// A line of a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportLine {
    /// The test.
    pub test: String,
    /// Its outcome, which a later line of the same test may replace.
    pub outcome: CompatOutcome,
    /// The end of a failure's message, or the reason of a skip.
    pub reason: String,
}

/// The outcomes of a file of tests, by test, with their reasons.
pub type Outcomes = BTreeMap<String, (CompatOutcome, String)>;

/// Reads a report. A test that began and did not end failed, with the end of the process as its reason. A process that failed without
/// any failed test failed by itself.
///
/// # Errors
/// When a line is not of the plugin's form.
pub fn read(report: &str, end: Option<&str>) -> Result<Outcomes> {
    let mut outcomes = Outcomes::new();
    for line in report.lines() {
        let ReportLine { test, outcome, reason } =
            serde_json::from_str(line).with_context(|| format!("a report with the line {line}"))?;
        let before = outcomes.get(&test).map(|(outcome, _)| *outcome);
        // A failure in the end of a test counts although the test passed before.
        if before.is_none_or(|before| before == CompatOutcome::Started || outcome == CompatOutcome::Failed) {
            outcomes.insert(test, (outcome, reason));
        }
    }
    let mut failed = false;
    for (outcome, reason) in outcomes.values_mut() {
        if *outcome == CompatOutcome::Started {
            *outcome = CompatOutcome::Failed;
            end.unwrap_or("it did not report its outcome").clone_into(reason);
        }
        failed |= *outcome == CompatOutcome::Failed;
    }
    if let Some(end) = end.filter(|_| !failed) {
        outcomes.insert("(the process)".to_owned(), (CompatOutcome::Failed, end.to_owned()));
    }
    Ok(outcomes)
}

/// Numbers of outcomes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeCounts {
    /// Passed.
    pub passed: usize,
    /// Failed.
    pub failed: usize,
    /// Skipped.
    pub skipped: usize,
}

impl std::ops::AddAssign for OutcomeCounts {
    fn add_assign(&mut self, other: OutcomeCounts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl std::fmt::Display for OutcomeCounts {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Counts outcomes.
#[must_use]
pub fn count(outcomes: &Outcomes) -> OutcomeCounts {
    let count = |wanted| outcomes.values().filter(|(outcome, _)| *outcome == wanted).count();
    OutcomeCounts {
        passed: count(CompatOutcome::Passed),
        failed: count(CompatOutcome::Failed),
        skipped: count(CompatOutcome::Skipped),
    }
}

/// The tests that fail remoted, or did not run there, although they do not fail natively, with their reasons.
#[must_use]
pub fn only_remoted(native: &Outcomes, remoted: &Outcomes) -> Vec<(String, String)> {
    let fails = |outcomes: &Outcomes, test: &str| {
        outcomes.get(test).is_some_and(|(outcome, _)| *outcome == CompatOutcome::Failed)
    };
    let failed = remoted
        .iter()
        .filter(|(test, (outcome, _))| *outcome == CompatOutcome::Failed && !fails(native, test));
    let missing = native
        .iter()
        .filter(|(test, (outcome, _))| *outcome == CompatOutcome::Passed && !remoted.contains_key(*test));
    failed
        .map(|(test, (_, reason))| (test.clone(), reason.clone()))
        .chain(missing.map(|(test, _)| (test.clone(), "it did not run".to_owned())))
        .collect()
}

/// Results by the hash of everything that they depend on.
#[derive(Debug)]
pub struct ResultCache {
    folder: PathBuf,
}

impl ResultCache {
    /// The results in a folder, which is made if it is not there.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn at(folder: PathBuf) -> Result<ResultCache> {
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        Ok(ResultCache { folder })
    }

    /// The outcomes for a key, from the cache or from `run`.
    ///
    /// # Errors
    /// Those of `run`, and when the result cannot be kept.
    pub fn get(&self, key: u64, run: impl FnOnce() -> Result<Outcomes>) -> Result<Outcomes> {
        let path = self.folder.join(format!("{key:016x}.json"));
        if let Ok(text) = fs::read_to_string(&path)
            && let Ok(outcomes) = serde_json::from_str(&text)
        {
            return Ok(outcomes);
        }
        let outcomes = run()?;
        // Under another name first: an interrupted run leaves no half of a result.
        let unfinished = path.with_extension("unfinished");
        fs::write(&unfinished, serde_json::to_string_pretty(&outcomes)?)?;
        fs::rename(&unfinished, &path).with_context(|| format!("writing {}", path.display()))?;
        Ok(outcomes)
    }
}

/// A hash of the contents of files.
///
/// # Errors
/// When one cannot be read.
pub fn contents(files: &[PathBuf]) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    for file in files {
        fs::read(file).with_context(|| format!("reading {}", file.display()))?.hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// The files below a folder whose names begin with `beginning`, sorted.
///
/// # Errors
/// When the folder cannot be read.
pub fn files(folder: &Path, beginning: &str) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .with_context(|| format!("reading {}", folder.display()))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(beginning) && name.ends_with(".py")
        })
        .collect();
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(test: &str, outcome: &str, reason: &str) -> String {
        format!("{{\"test\":\"{test}\",\"outcome\":\"{outcome}\",\"reason\":\"{reason}\"}}\n")
    }

    // Promise: C104
    #[test]
    fn crash_is_a_failure_of_the_test_that_was_running() {
        let report = [
            line("a", "started", ""),
            line("a", "passed", ""),
            line("b", "started", ""),
            line("b", "skipped", "no device"),
            line("c", "started", ""),
        ]
        .concat();
        let outcomes = read(&report, Some("signal 11")).unwrap();
        assert_eq!(count(&outcomes), OutcomeCounts { passed: 1, failed: 1, skipped: 1 });
        assert_eq!(outcomes["c"], (CompatOutcome::Failed, "signal 11".to_owned()));
        // A process that fails outside of its tests is a failure, too.
        let outcomes = read(&line("a", "passed", ""), Some("exit status: 3")).unwrap();
        assert_eq!(count(&outcomes), OutcomeCounts { passed: 1, failed: 1, skipped: 0 });
        // The end of a test may fail after it passed.
        let late = [line("a", "passed", ""), line("a", "failed", "in its end")].concat();
        assert_eq!(count(&read(&late, None).unwrap()), OutcomeCounts { passed: 0, failed: 1, skipped: 0 });
        assert!(read("nonsense", None).is_err());
    }

    // Promise: C104
    #[test]
    fn native_failures_are_subtracted_and_missing_tests_are_not() {
        let native = [line("a", "passed", ""), line("b", "failed", "x"), line("c", "passed", "")].concat();
        let remoted = [line("a", "failed", "y"), line("b", "failed", "z")].concat();
        let (native, remoted) = (read(&native, None).unwrap(), read(&remoted, None).unwrap());
        let expected =
            [("a", "y"), ("c", "it did not run")].map(|(test, why)| (test.to_owned(), why.to_owned()));
        assert_eq!(only_remoted(&native, &remoted), expected);
        assert_eq!(only_remoted(&native, &native), []);
    }

    // Promise: C104
    #[test]
    fn result_is_computed_once_for_each_key() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ResultCache::at(folder.path().join("results")).unwrap();
        let outcomes = read(&line("a", "failed", "x"), None).unwrap();
        assert_eq!(cache.get(1, || Ok(outcomes.clone())).unwrap(), outcomes);
        assert_eq!(cache.get(1, || anyhow::bail!("it runs again")).unwrap(), outcomes);
        assert!(cache.get(2, || anyhow::bail!("it runs")).is_err());
    }
}
