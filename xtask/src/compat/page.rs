//! The figures of `cargo xtask compat --record`, from which `cargo xtask docs` makes a page.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use sluice_tests::compat::clients::{CLIENTS, CompatClient};
use sluice_tests::compat::results::OutcomeCounts;
use sluice_tests::paths;

/// The figures of a client's tests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClientRow {
    pub(super) client: String,
    /// The day of the run, as in the support matrix.
    pub(super) day: String,
    /// Number of files of tests that ran.
    pub(super) files: usize,
    /// Number of files that the client has.
    pub(super) all_files: usize,
    pub(super) native: OutcomeCounts,
    pub(super) remoted: OutcomeCounts,
    /// Tests that fail remoted, or do not run there, and do not fail natively.
    pub(super) remoted_only: usize,
    /// Numbers of tests that fail natively, by their known causes.
    pub(super) causes: BTreeMap<String, usize>,
    /// Tests that fail natively without a known cause.
    pub(super) unknown: usize,
}

fn file() -> PathBuf {
    paths::workspace().join("docs/clients.json")
}

fn kept() -> Result<Vec<ClientRow>> {
    let file = file();
    match fs::read_to_string(&file) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("reading {}", file.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("reading {}", file.display())),
    }
}

/// Replaces the row of a client in the committed file, in the order of the table of clients.
pub(super) fn record(row: ClientRow) -> Result<()> {
    let rows = replaced(kept()?, row);
    let text = serde_json::to_string_pretty(&rows)? + "\n";
    fs::write(file(), text).with_context(|| format!("writing {}", file().display()))
}

fn replaced(mut rows: Vec<ClientRow>, row: ClientRow) -> Vec<ClientRow> {
    rows.retain(|kept| kept.client != row.client);
    rows.push(row);
    rows.sort_by_key(|row| CLIENTS.iter().position(|client| client.name == row.client));
    rows
}

pub(crate) fn page() -> Result<String> {
    Ok(written(&kept()?))
}

fn written(rows: &[ClientRow]) -> String {
    let mut text = "<!-- Generated from docs/clients.json, which `cargo xtask compat --record` writes. Do not edit. -->\n\n\
         # Public clients\n\n\
         `cargo xtask compat` runs the tests that public clients bring, or some of our own for packages without any, natively on the software GPU \
         and remoted. Every change runs a part of them (`tests/clients/compat/expectations.toml`). A test that fails natively shows a gap of the software GPU, or of the machine; a test that fails remoted only is a fault of Sluice.\n\n\
         | client | package | day | files | passed natively | passed remoted | fail natively | skipped | fail remoted only |\n\
         |---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    // Writing to a String cannot fail.
    for row in rows {
        let files = if row.files == row.all_files {
            row.files.to_string()
        } else {
            format!("{} of {}", row.files, row.all_files)
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {files} | {} | {} | {} | {} | **{}** |",
            row.client,
            package(&row.client),
            row.day,
            row.native.passed,
            row.remoted.passed,
            row.native.failed,
            row.native.skipped,
            row.remoted_only
        );
    }
    text.push_str("\n## Native failures by cause\n\n| client | tests | cause |\n|---|---|---|\n");
    for row in rows {
        for (cause, count) in &row.causes {
            let _ = writeln!(text, "| {} | {count} | {cause} |", row.client);
        }
        if row.unknown > 0 {
            let _ = writeln!(text, "| {} | {} | not yet known |", row.client, row.unknown);
        }
    }
    text
}

/// The package of a client that its tests are about, with its version.
fn package(client: &str) -> String {
    let of = |client: &CompatClient| {
        let named = client.packages.iter().find(|package| package.starts_with(client.name));
        named.or_else(|| client.packages.get(6)).map(|package| package.replace("==", " "))
    };
    CLIENTS.iter().find(|known| known.name == client).and_then(of).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(client: &str, remoted_only: usize) -> ClientRow {
        ClientRow {
            client: client.to_owned(),
            day: "2026-11-26".to_owned(),
            files: 2,
            all_files: if client == "warp" { 9 } else { 2 },
            native: OutcomeCounts { passed: 5, failed: 3, skipped: 1 },
            remoted: OutcomeCounts { passed: 4, failed: 4, skipped: 1 },
            remoted_only,
            causes: [("no tensor cores".to_owned(), 2)].into(),
            unknown: 1,
        }
    }

    // Promise: C113
    #[test]
    fn page_has_the_figures_and_the_causes_of_each_client() {
        let rows = replaced(vec![row("warp", 0), row("cupy", 0)], row("warp", 1));
        assert_eq!(rows, [row("cupy", 0), row("warp", 1)]);
        let text = written(&rows);
        for line in [
            "| cupy | cupy-cuda12x 14.2.0 | 2026-11-26 | 2 | 5 | 4 | 3 | 1 | **0** |",
            "| warp | warp-lang 1.19.0 | 2026-11-26 | 2 of 9 | 5 | 4 | 3 | 1 | **1** |",
            "| warp | 2 | no tensor cores |",
            "| warp | 1 | not yet known |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    // Promise: C113
    #[test]
    fn every_row_of_this_tree_has_a_client_and_no_failure_remoted_only() {
        for row in kept().unwrap() {
            assert!(!package(&row.client).is_empty(), "{row:?}");
            assert_eq!(row.remoted_only, 0, "{row:?}");
        }
    }
}
