//! `sluice-guest doctor`: a check of whether CUDA programs can work in this system, with advice if they cannot.
//!
//! The command calls it. It owns the list of checks and their advice. It looks from the outside in: the device that the VMM has plugged in, the kernel's driver for it, the right of this user to
//! use it, its maker (Sluice) and its version; then the driver that programs find, and its start. It changes nothing.

mod device;
mod driver;

use anyhow::{Result, bail};
use serde_json::{Value, json};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

/// The result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Good,
    /// It works, but slowly or not for every user.
    Poor,
    /// Programs cannot use CUDA.
    Bad,
}

impl Verdict {
    const fn word(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Poor => "poor",
            Self::Bad => "bad",
        }
    }
}

/// The finding about one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) name: &'static str,
    pub(crate) verdict: Verdict,
    /// The state in words.
    pub(crate) found: String,
    pub(crate) advice: String,
}

impl Finding {
    pub(crate) fn good(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Good, found: found.into(), advice: String::new() }
    }

    pub(crate) fn new(
        name: &'static str,
        verdict: Verdict,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { name, verdict, found: found.into(), advice: advice.into() }
    }
}

/// Runs all checks; fails if one is bad.
pub(crate) fn doctor(arguments: &Arguments) -> Result<()> {
    let mut findings = device::look(&device::System::this());
    findings.extend(driver::look());
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&as_json(&findings))?);
    } else {
        print!("{}", as_text(&findings));
    }
    let bad: Vec<&str> = findings
        .iter()
        .filter(|finding| finding.verdict == Verdict::Bad)
        .map(|finding| finding.name)
        .collect();
    if bad.is_empty() {
        return Ok(());
    }
    bail!("CUDA programs cannot work here: {}", bad.join(", "))
}

fn as_json(findings: &[Finding]) -> Value {
    let all: Vec<Value> = findings
        .iter()
        .map(|finding| {
            json!({ "name": finding.name, "verdict": finding.verdict.word(), "found": finding.found,
                "advice": finding.advice })
        })
        .collect();
    json!({ "findings": all })
}

fn as_text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        // A message of a library or the kernel stays on its line.
        let found = finding.found.replace(|c: char| c.is_control(), " ");
        text.push_str(&format!("{:<5} {}: {found}\n", finding.verdict.word(), finding.name));
        if !finding.advice.is_empty() {
            text.push_str(&format!("      → {}\n", finding.advice));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_lines() {
        let findings = [
            Finding::good("kernel", "6.1"),
            Finding::new("driver", Verdict::Bad, "it\nsaid\u{1b}[1m", "do it"),
        ];
        assert_eq!(as_text(&findings), "good  kernel: 6.1\nbad   driver: it said [1m\n      → do it\n");
        let value = as_json(&findings);
        assert_eq!(value["findings"][1]["verdict"], "bad");
        assert_eq!(value["findings"][0]["advice"], "");
    }
}
