//! The tests of clients that every change runs, and the tests that are known to fail natively (`tests/clients/compat/expectations.toml`).

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::Batch;
use super::clients::{FOLDER, client};
use super::results::{CompatOutcome, Outcomes, only_remoted};
use crate::paths;

/// The data.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectations {
    subset: Vec<SubsetPart>,
    #[serde(default)]
    failure: Vec<KnownFailure>,
}

/// Tests of a file that every change runs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubsetPart {
    client: String,
    /// Name of the file.
    file: String,
    /// As in [`Batch`].
    #[serde(default)]
    tests: Vec<String>,
}

/// Tests that fail natively for a known cause.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownFailure {
    client: String,
    /// Names as in reports, in which `*` stands for any text.
    tests: Vec<String>,
    cause: String,
}

impl SubsetPart {
    /// The tests, in one of these files.
    ///
    /// # Errors
    /// When not exactly one file has the name.
    pub fn batch(&self, files: &[Batch]) -> Result<Batch> {
        let mut found = files.iter().filter(|batch| batch.file.ends_with(&self.file));
        let file = found.next().with_context(|| format!("{} has no file {}", self.client, self.file))?;
        ensure!(found.next().is_none(), "{} has several files {}", self.client, self.file);
        Ok(Batch { tests: self.tests.clone(), ..file.clone() })
    }
}

impl Expectations {
    /// Reads the data of this tree.
    ///
    /// # Errors
    /// When it has another form, or names a client that there is not.
    pub fn load() -> Result<Expectations> {
        let file = file();
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        let read: Expectations =
            toml::from_str(&text).with_context(|| format!("reading {}", file.display()))?;
        let named = read.subset.iter().map(|part| &part.client);
        for name in named.chain(read.failure.iter().map(|known| &known.client)) {
            client(name).with_context(|| format!("reading {}", file.display()))?;
        }
        Ok(read)
    }

    /// The clients of which every change runs tests, in the order of the data.
    #[must_use]
    pub fn clients(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for part in &self.subset {
            if !names.contains(&part.client.as_str()) {
                names.push(&part.client);
            }
        }
        names
    }

    /// The tests of a client that every change runs.
    pub fn subset_of<'all>(&'all self, client: &'all str) -> impl Iterator<Item = &'all SubsetPart> {
        self.subset.iter().filter(move |part| part.client == client)
    }

    /// The cause for which a test is known to fail natively.
    #[must_use]
    pub fn cause(&self, client: &str, test: &str) -> Option<&str> {
        let known = |known: &&KnownFailure| {
            known.client == client && known.tests.iter().any(|pattern| fits(pattern, test))
        };
        self.failure.iter().find(known).map(|known| known.cause.as_str())
    }

    /// The tests that fail natively, with the known cause of each.
    pub fn causes<'all>(
        &'all self,
        client: &str,
        native: &'all Outcomes,
    ) -> impl Iterator<Item = (&'all str, Option<&'all str>)> {
        let failed = native.iter().filter(|(_, (outcome, _))| *outcome == CompatOutcome::Failed);
        failed.map(move |(test, _)| (test.as_str(), self.cause(client, test)))
    }

    /// The faults of outcomes: tests that fail remoted only, tests that fail natively and are not listed, and listed tests that
    /// pass.
    #[must_use]
    pub fn faults(&self, client: &str, native: &Outcomes, remoted: &Outcomes) -> Vec<String> {
        let differs = only_remoted(native, remoted);
        let differs =
            differs.into_iter().map(|(test, reason)| format!("{test} fails remoted only: {reason}"));
        let judged =
            native.iter().filter_map(|(test, (outcome, reason))| match (outcome, self.cause(client, test)) {
                (CompatOutcome::Failed, None) => Some(format!("{test} fails natively: {reason}")),
                (CompatOutcome::Passed, Some(cause)) => {
                    Some(format!("{test} passes natively, and is listed as failing: {cause}"))
                }
                _ => None,
            });
        differs.chain(judged).collect()
    }
}

fn file() -> PathBuf {
    paths::workspace().join(FOLDER).join("expectations.toml")
}

/// True if a text has the form of a pattern, in which `*` stands for any text.
fn fits(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut left) = text.strip_prefix(start) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    // The last part ends the text, and each other one is looked for as early as possible.
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match left.split_once(part) {
            Some((_, after)) => left = after,
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &str = r#"
        [[subset]]
        client = "warp"
        file = "test_b.py"
        tests = ["TestB"]

        [[failure]]
        client = "warp"
        tests = ["test_b.py::TestB::test_known*", "test_c.py::*_cuda"]
        cause = "no tensor cores"
    "#;

    fn outcomes(lines: &[(&str, CompatOutcome)]) -> Outcomes {
        lines.iter().map(|(test, outcome)| ((*test).to_owned(), (*outcome, "why".to_owned()))).collect()
    }

    // Promise: C112
    #[test]
    fn new_native_failure_and_listed_test_that_passes_are_faults() {
        use CompatOutcome::{Failed, Passed, Skipped};
        let data: Expectations = toml::from_str(DATA).unwrap();
        let [new, known, other] =
            ["test_b.py::TestB::test_new", "test_b.py::TestB::test_known_1", "test_c.py::test_x_cuda"];
        let good = outcomes(&[(new, Passed), (known, Failed), (other, Skipped)]);
        assert_eq!(data.faults("warp", &good, &good), [""; 0]);
        let bad = outcomes(&[(new, Failed), (known, Passed), (other, Failed)]);
        assert_eq!(
            data.faults("warp", &bad, &bad),
            [
                "test_b.py::TestB::test_known_1 passes natively, and is listed as failing: no tensor cores",
                "test_b.py::TestB::test_new fails natively: why"
            ]
        );
        // The lists of clients are separate.
        assert_eq!(data.faults("taichi", &good, &good).len(), 1);
        // A failure remoted is a fault although it is known natively and passed there.
        let remoted = outcomes(&[(new, Failed), (known, Failed)]);
        assert_eq!(data.faults("warp", &good, &remoted), [format!("{new} fails remoted only: why")]);
        let missing = outcomes(&[(known, Failed)]);
        assert_eq!(
            data.faults("warp", &good, &missing),
            [format!("{new} fails remoted only: it did not run")]
        );
    }

    #[test]
    fn star_stands_for_any_text() {
        for (pattern, text) in
            [("a", "a"), ("*", ""), ("a*", "a"), ("a*c", "abc"), ("*b*", "abc"), ("a*b*c", "aXbbYc")]
        {
            assert!(fits(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("a", "ab"), ("a*c", "ab"), ("*b*", "ac"), ("ab*b", "ab"), ("a*b*c", "acb")] {
            assert!(!fits(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn part_of_a_file_is_found_among_the_files_of_its_client() {
        let data: Expectations = toml::from_str(DATA).unwrap();
        let all = |name: &str| Batch { file: name.into(), tests: Vec::new(), keyword: String::new() };
        let part = data.subset_of("warp").next().unwrap();
        let batch = part.batch(&[all("/x/test_a.py"), all("/x/test_b.py")]).unwrap();
        assert_eq!((batch.file, batch.tests), ("/x/test_b.py".into(), vec!["TestB".to_owned()]));
        assert!(part.batch(&[all("/x/test_a.py")]).is_err());
        assert!(part.batch(&[all("/x/test_b.py"), all("/y/test_b.py")]).is_err());
        assert_eq!(data.clients(), ["warp"]);
    }

    // Promise: C112
    #[test]
    fn data_of_this_tree_is_well_formed() {
        let data = Expectations::load().unwrap();
        assert!(data.clients().len() >= 5, "{:?}", data.clients());
        for (index, known) in data.failure.iter().enumerate() {
            assert!(!known.cause.is_empty() && !known.tests.is_empty(), "{known:?}");
            let again = |other: &&KnownFailure| {
                other.client == known.client && other.tests.iter().any(|test| known.tests.contains(test))
            };
            assert!(!data.failure[..index].iter().any(|other| again(&other)), "twice: {known:?}");
        }
    }
}
