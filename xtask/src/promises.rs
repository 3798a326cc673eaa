//! The check of the promises in `docs/SPECIFICATION.md` against the tests that keep them.
//!
//! A promise is a heading `### V1 — title`, its text, and a line that starts with `Test:` and names tests in backticks, as a
//! test run records them. A test names the promises it keeps by `// Promise: V1` just above it. Both must agree, and in the
//! last run no named test may be red or missing. A promise is kept when all of its tests ran and held; it is kept partly when
//! some ran and held and the others were skipped, and then the missing ones and the reasons are listed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use sluice_tests::paths;

use crate::record::{Record, RecordVerdict, TestResult, record_file};
use crate::sources;

/// Areas of promises: virtio and transport, call fidelity, quota, scrub, fence, API, placement, time, guest.
const AREAS: &str = "VCQSFAPTG";

#[derive(Debug, PartialEq, Eq)]
struct Promise {
    id: String,
    title: String,
    tests: Vec<String>,
}

/// A comment above a test that names a promise.
#[derive(Debug, PartialEq, Eq)]
struct Claim {
    promise: String,
    /// Name of the function; `None` if none follows.
    test: Option<String>,
    place: String,
}

/// Checks and prints every promise with its verdict.
pub(crate) fn run() -> Result<bool> {
    let record = Record::read(&record_file()?)?;
    let results = check(&record)?;
    let good = results.iter().all(|result| result.verdict != RecordVerdict::Failed);
    for result in &results {
        let sign = match result.verdict {
            RecordVerdict::Passed => "kept   ",
            RecordVerdict::Partly => "partly ",
            RecordVerdict::Failed => "BROKEN ",
            RecordVerdict::Skipped => "unclear",
        };
        println!(
            "  {sign}  {}{}",
            result.name,
            if result.reason.is_empty() {
                String::new()
            } else {
                format!("\n             {}", result.reason.replace('\n', "\n             "))
            }
        );
    }
    let count = |verdict| results.iter().filter(|result| result.verdict == verdict).count();
    println!(
        "\n{} promises, {} of them kept, {} partly, {} unclear, {} broken; run of {} ({})",
        results.len(),
        count(RecordVerdict::Passed),
        count(RecordVerdict::Partly),
        count(RecordVerdict::Skipped),
        count(RecordVerdict::Failed),
        record.commit,
        record.tier
    );
    println!("promises: {}", if good { "PASS" } else { "FAIL" });
    Ok(good)
}

/// One result per promise, and one per test that keeps a promise that does not exist.
pub(crate) fn check(record: &Record) -> Result<Vec<TestResult>> {
    let root = paths::workspace();
    let file = root.join("docs/SPECIFICATION.md");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let mut claims = Vec::new();
    sources::for_each(&root, |path, text| {
        // The parser's own tests hold comments that are no claims.
        if path != Path::new("xtask/src/promises.rs") {
            claims.extend(scan(text, &path.display().to_string()));
        }
    })?;
    Ok(judge(&parse(&text), &claims, record))
}

/// Reads the specification.
fn parse(text: &str) -> Vec<Promise> {
    let mut promises: Vec<Promise> = Vec::new();
    let (mut in_promise, mut in_tests) = (false, false);
    for line in text.lines() {
        if line.starts_with('#') {
            let found = heading(line);
            in_promise = found.is_some();
            in_tests = false;
            promises.extend(found);
            continue;
        }
        // The names may go on over several lines, until the paragraph ends.
        in_tests =
            !line.trim().is_empty() && (in_tests || line.starts_with("Test:") || line.starts_with("Tests:"));
        if in_promise
            && in_tests
            && let Some(promise) = promises.last_mut()
        {
            promise.tests.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    promises
}

fn heading(line: &str) -> Option<Promise> {
    let (id, title) = line.strip_prefix("### ")?.split_once(" — ")?;
    Some(Promise { id: id.trim().to_owned(), title: title.trim().to_owned(), tests: Vec::new() })
}

fn is_promise_id(text: &str) -> bool {
    let mut characters = text.chars();
    characters.next().is_some_and(|area| AREAS.contains(area))
        && text.len() > 1
        && characters.all(|character| character.is_ascii_digit())
}

/// Finds the claims in one source file.
fn scan(text: &str, file: &str) -> Vec<Claim> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut claims = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some(ids) = line.strip_prefix("// Promise:").or_else(|| line.strip_prefix("// Promises:")) else {
            continue;
        };
        // Only attributes and comments may stand between comment and function.
        let test = lines[index + 1..]
            .iter()
            .find(|line| !line.starts_with("//") && !line.starts_with("#["))
            .and_then(|line| function_name(line));
        for id in ids.split([',', ' ']).filter(|id| !id.is_empty()) {
            let place = format!("{file}:{}", index + 1);
            claims.push(Claim { promise: id.trim_end_matches('.').to_owned(), test: test.clone(), place });
        }
    }
    claims
}

fn function_name(line: &str) -> Option<String> {
    let name = line.split("fn ").nth(1)?;
    let end = name.find(|character: char| !character.is_alphanumeric() && character != '_')?;
    Some(name[..end].to_owned())
}

fn judge(promises: &[Promise], claims: &[Claim], record: &Record) -> Vec<TestResult> {
    let ran: BTreeMap<&str, &TestResult> =
        record.tests.iter().map(|test| (test.name.as_str(), test)).collect();
    let mut seen = BTreeSet::new();
    let mut results: Vec<TestResult> = promises
        .iter()
        .map(|promise| {
            let (verdict, mut reasons) = judge_one(promise, claims, &ran);
            let twice = !seen.insert(promise.id.as_str());
            if twice {
                reasons.push("the number is given twice".to_owned());
            }
            let misnamed = !is_promise_id(&promise.id);
            if misnamed {
                reasons.push(format!("a number is one of the areas {AREAS} and digits"));
            }
            let verdict = if twice || misnamed { RecordVerdict::Failed } else { verdict };
            let name = format!("{} — {}", promise.id, promise.title);
            TestResult { name, verdict, seconds: 0.0, reason: reasons.join("\n") }
        })
        .collect();
    for claim in claims {
        let promise = promises.iter().find(|promise| promise.id == claim.promise);
        let reason = match (promise, &claim.test) {
            (_, None) => "no test follows the comment".to_owned(),
            (None, Some(test)) => format!("{test} keeps a promise that the specification does not make"),
            (Some(promise), Some(test)) if !promise.tests.iter().any(|name| last_part(name) == test) => {
                format!("{test} keeps this promise, but the specification does not name it there")
            }
            _ => continue,
        };
        let name = format!("{} at {}", claim.promise, claim.place);
        results.push(TestResult { name, verdict: RecordVerdict::Failed, seconds: 0.0, reason });
    }
    results
}

fn judge_one(
    promise: &Promise,
    claims: &[Claim],
    ran: &BTreeMap<&str, &TestResult>,
) -> (RecordVerdict, Vec<String>) {
    if promise.tests.is_empty() {
        return (RecordVerdict::Failed, vec!["it names no test".to_owned()]);
    }
    let mut reasons = Vec::new();
    let (mut broken, mut held, mut missing) = (false, false, false);
    for test in &promise.tests {
        match ran.get(test.as_str()).map(|result| (result.verdict, result.reason.as_str())) {
            Some((RecordVerdict::Passed, _)) => held = true,
            // A test that ran only in part counts as missing.
            Some((RecordVerdict::Skipped | RecordVerdict::Partly, why)) => {
                missing = true;
                let why = why.lines().next().unwrap_or_default();
                reasons.push(match why {
                    "" => format!("{test} was skipped"),
                    why => format!("{test} was skipped: {why}"),
                });
            }
            Some((RecordVerdict::Failed, _)) => {
                broken = true;
                reasons.push(format!("{test} failed"));
            }
            None => {
                broken = true;
                reasons.push(format!("{test} is not in the run"));
            }
        }
        let claimed = claims
            .iter()
            .any(|claim| claim.promise == promise.id && claim.test.as_deref() == Some(last_part(test)));
        if !claimed {
            broken = true;
            reasons.push(format!("{test} lacks the comment `// Promise: {}`", promise.id));
        }
    }
    let verdict = match (broken, held, missing) {
        (true, ..) => RecordVerdict::Failed,
        (false, true, false) => RecordVerdict::Passed,
        (false, true, true) => RecordVerdict::Partly,
        (false, false, _) => RecordVerdict::Skipped,
    };
    (verdict, reasons)
}

fn last_part(name: &str) -> &str {
    name.rsplit("::").next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Specification\n\n## Virtio\n\n### V1 — The device is found\n\nText with `code`.\n\n\
                        Test: `vm::found`,\n`device::tests::capset`\n\nMore `text`.\n\n### C12 — Errors are exact\n\n\
                        Test: `direct::errors`\n\n### Not a promise\n\nTest: `x::y`\n";

    fn record(tests: &[(&str, RecordVerdict)]) -> Record {
        let tests = tests
            .iter()
            .map(|(name, verdict)| TestResult {
                name: (*name).to_owned(),
                verdict: *verdict,
                seconds: 0.0,
                reason: String::new(),
            })
            .collect();
        Record { tests, ..Record::default() }
    }

    const CODE: &str = "// Promise: V1\n#[test]\nfn found() {}\n\n// Promise: V1, C12.\n/// Doc.\n#[test]\n\
                        fn capset() -> Result<()> {\n}\n// Promise: C12\n#[test]\nfn errors() {}\n";

    fn verdicts(results: &[TestResult]) -> Vec<(&str, RecordVerdict)> {
        results.iter().map(|result| (result.name.split(' ').next().unwrap(), result.verdict)).collect()
    }

    #[test]
    fn promises_and_their_tests_are_parsed_from_the_specification() {
        let promises = parse(TEXT);
        assert_eq!(promises.len(), 2);
        assert_eq!((promises[0].id.as_str(), promises[0].title.as_str()), ("V1", "The device is found"));
        assert_eq!(promises[0].tests, ["vm::found", "device::tests::capset"]);
        assert_eq!(promises[1].tests, ["direct::errors"]);
    }

    #[test]
    fn claims_above_tests_are_parsed() {
        let claims = scan(CODE, "f.rs");
        let found: Vec<(&str, &str)> =
            claims.iter().map(|claim| (claim.promise.as_str(), claim.test.as_deref().unwrap())).collect();
        assert_eq!(found, [("V1", "found"), ("V1", "capset"), ("C12", "capset"), ("C12", "errors")]);
        assert_eq!(claims[1].place, "f.rs:5");
        assert_eq!(scan("// Promise: V1\nstruct X;\n", "f.rs")[0].test, None);
    }

    #[test]
    fn promise_is_kept_only_by_passed_tests_that_claim_it() {
        use RecordVerdict::{Failed, Partly, Passed, Skipped};
        let promises = parse(TEXT);
        let mut claims = scan(CODE, "f.rs");
        claims.remove(2);
        let all = [("vm::found", Passed), ("device::tests::capset", Passed), ("direct::errors", Passed)];
        assert_eq!(verdicts(&judge(&promises, &claims, &record(&all))), [("V1", Passed), ("C12", Passed)]);
        // One failed.
        let red = [("vm::found", Failed), ("device::tests::capset", Passed), ("direct::errors", Passed)];
        assert_eq!(verdicts(&judge(&promises, &claims, &record(&red)))[0], ("V1", Failed));
        // One is missing.
        assert_eq!(verdicts(&judge(&promises, &claims, &record(&all[..2])))[1], ("C12", Failed));
        // All of one promise skipped; some of another.
        let skipped =
            [("vm::found", Skipped), ("device::tests::capset", Passed), ("direct::errors", Skipped)];
        let results = judge(&promises, &claims, &record(&skipped));
        assert_eq!(verdicts(&results), [("V1", Partly), ("C12", Skipped)]);
        // A failed test outweighs a skipped one.
        let both = [("vm::found", Skipped), ("device::tests::capset", Failed), ("direct::errors", Passed)];
        assert_eq!(verdicts(&judge(&promises, &claims, &record(&both)))[0], ("V1", Failed));
        // A named test lacks the comment.
        claims.remove(0);
        assert_eq!(verdicts(&judge(&promises, &claims, &record(&all)))[0], ("V1", Failed));
    }

    #[test]
    fn partly_kept_promise_names_each_missing_test_and_its_reason() {
        let mut run = record(&[
            ("vm::found", RecordVerdict::Skipped),
            ("device::tests::capset", RecordVerdict::Passed),
            ("direct::errors", RecordVerdict::Passed),
        ]);
        let mut claims = scan(CODE, "f.rs");
        claims.remove(2);
        let results = judge(&parse(TEXT), &claims, &run);
        assert_eq!(results[0].reason, "vm::found was skipped");
        assert_eq!((results[1].verdict, results[1].reason.as_str()), (RecordVerdict::Passed, ""));
        run.tests[0].reason = "for the full tier\nand more".to_owned();
        assert_eq!(judge(&parse(TEXT), &claims, &run)[0].reason, "vm::found was skipped: for the full tier");
    }

    #[test]
    fn promise_without_test_and_a_claim_without_promise_fail() {
        let promises = parse("### G1 — Nothing holds this\n\nTest: later\n");
        let claims = scan(
            "// Promise: G7\n#[test]\nfn lonely() {}\n// Promise: G1\n#[test]\nfn unnamed() {}\n",
            "f.rs",
        );
        let results = judge(&promises, &claims, &record(&[]));
        assert_eq!(results.len(), 3);
        assert!(results.iter().all(|result| result.verdict == RecordVerdict::Failed));
        assert_eq!(results[0].reason, "it names no test");

        let unknown = judge(
            &parse("### Z1 — No such area\n\nTest: `a::b`\n"),
            &[],
            &record(&[("a::b", RecordVerdict::Passed)]),
        );
        assert!(unknown[0].reason.contains("areas"));
    }
}
