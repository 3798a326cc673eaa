//! The report: results of runs on hardware as two marked parts of `docs/hardware-results.md`.
//!
//! Figures of a rehearsal must never stand on the page: they are facts about the software GPU.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use sluice_tests::paths;

use super::runs::{HardwareRun, StepResult, cell, of_phase, read};
use crate::runner;

/// Writes the runs of these files to the page; or prints them, if rehearsals are accepted.
pub(super) fn run(files: &[PathBuf], rehearsal: bool) -> Result<bool> {
    let mut runs = Vec::new();
    for file in files {
        let of_file = read(file)?;
        ensure!(
            rehearsal || !of_file.iter().any(HardwareRun::is_rehearsal),
            "{} has a run on the software GPU, which is no result of hardware; --rehearsal prints it",
            file.display()
        );
        runs.extend(of_file);
    }
    if rehearsal {
        print!("{}", sections(&runs));
        return Ok(true);
    }
    let page = paths::workspace().join("docs/hardware-results.md");
    let text = fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?;
    let text = replaced(&text, "status", &status(&runs))?;
    let text = replaced(&text, "results", &sections(&runs))?;
    fs::write(&page, text).with_context(|| format!("writing {}", page.display()))?;
    println!("wrote {}", runner::shown(&page));
    Ok(true)
}

/// The text with another part between the two markers of a name.
fn replaced(text: &str, name: &str, part: &str) -> Result<String> {
    let [begin, end] = ["begin", "end"].map(|edge| format!("<!-- {name}: {edge} -->\n"));
    let (before, rest) = text.split_once(&begin).with_context(|| format!("the page has no {begin}"))?;
    let (_, after) = rest.split_once(&end).with_context(|| format!("the page has no {end}"))?;
    Ok(format!("{before}{begin}{part}{end}{after}"))
}

/// The sentence at the head of the page.
fn status(runs: &[HardwareRun]) -> String {
    let last = runs.iter().map(|run| run.fact("date")).max().unwrap_or("unknown");
    let last = last.split('T').next().unwrap_or(last);
    let count = match runs.len() {
        1 => "One run".to_owned(),
        count => format!("{count} runs"),
    };
    format!("**{count} on hardware** so far, the last on {last}: see [Results](#results).\n")
}

/// The sections of all machines, in the order of the files.
fn sections(runs: &[HardwareRun]) -> String {
    let mut machines = Vec::<Vec<&HardwareRun>>::new();
    for run in runs {
        let same = |others: &Vec<&HardwareRun>| {
            others
                .iter()
                .all(|other| other.machine() == run.machine() && other.is_rehearsal() == run.is_rehearsal())
        };
        match machines.iter_mut().find(|others| same(others)) {
            Some(others) => others.push(run),
            None => machines.push(vec![run]),
        }
    }
    machines.iter().map(|runs| section(runs)).collect::<Vec<_>>().join("\n")
}

/// A table with a last column for the number of the run.
struct Table {
    text: String,
    head: String,
}

impl Table {
    fn new(columns: &[&str]) -> Table {
        let line = "|---".repeat(columns.len() + 1);
        Table { text: String::new(), head: format!("\n| {} | run |\n{line}|\n", columns.join(" | ")) }
    }

    fn row(&mut self, run: usize, cells: &[String]) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "| {} | {} |", cells.join(" | "), run + 1);
    }

    /// The table, or nothing if it has no row.
    fn shown(self, before: &str) -> String {
        match self.text.is_empty() {
            true => self.text,
            false => format!("{before}{}{}", self.head, self.text),
        }
    }
}

/// The section of the runs of one machine.
fn section(runs: &[&HardwareRun]) -> String {
    let mut text = String::new();
    let Some(first) = runs.first() else { return text };
    let kind = if first.is_rehearsal() { "Rehearsal on the software GPU" } else { "Runs on hardware" };
    let [gpu, driver, kernel] = first.machine().map(cell);
    // Writing to a String cannot fail.
    let _ = writeln!(text, "### {kind}: {gpu}, driver {driver}, kernel {kernel}\n");
    for (number, run) in (1..).zip(runs) {
        let [date, commit] = ["date", "commit"].map(|key| cell(run.fact(key)));
        let end = match run.orderly {
            Some(true) => "Each step was answered, refused or not asked.",
            Some(false) => "Some steps did not end in order.",
            None => "The run was cut off: steps after its last line were not run.",
        };
        let _ = writeln!(text, "{number}. {date}, commit {commit}. {end}");
    }
    text.push_str(
        "\nThe last column of each table has the number of the run. Of a step that several runs asked, the last answer is shown.\n",
    );
    let name = |step: &StepResult| format!("`{}`", step.text("name"));

    let mut table = Table::new(&["step", "outcome", "answer", "expected"]);
    for (run, step) in of_phase(runs, "questions") {
        let expected = cell(step.text("expected"));
        table.row(run, &[name(step), step.outcome().to_owned(), step.answer(), expected]);
    }
    text.push_str(&table.shown(""));

    let mut table = Table::new(&["program", "native", "remoted", "ratio", "same output"]);
    for (run, step) in of_phase(runs, "programs") {
        table.row(run, &[vec![name(step)], step.comparison().to_vec()].concat());
    }
    text.push_str(&table.shown(
        "\nTimes are those of the program alone: the start of Sluice's own processes is left out, the start of a session is not.\n",
    ));

    let mut table = Table::new(&["custody", "verdict", "figures"]);
    for (run, step) in of_phase(runs, "custody") {
        table.row(run, &[name(step), step.verdict(), step.answer()]);
    }
    text.push_str(&table.shown(""));

    for phase in ["time", "bench", "frameworks"] {
        let mut table = Table::new(&[phase, "measurement", "native", "remoted", "ratio", "aim", "met"]);
        for (run, step) in of_phase(runs, phase) {
            let rows = step.rows();
            if rows.is_empty() || step.text("outcome") != "answered" {
                let reason = cell(&format!("{}: {}", step.outcome(), step.text("reason")));
                let none = std::iter::repeat_n("–".to_owned(), 5);
                table.row(run, &[name(step), reason].into_iter().chain(none).collect::<Vec<_>>());
            }
            for row in rows {
                table.row(run, &[vec![name(step)], row.to_vec()].concat());
            }
        }
        text.push_str(&table.shown(""));
    }

    let mut table = Table::new(&[
        "client",
        "same results",
        "compared",
        "memory that it sees, of the quota",
        "calls that Sluice refused",
        "calls that cost most more time",
        "parts that fail natively",
    ]);
    for (run, step) in of_phase(runs, "frameworks") {
        table.row(run, &[vec![name(step)], step.client().to_vec()].concat());
    }
    text.push_str(&table.shown(""));
    text
}

#[cfg(test)]
mod tests {
    use super::super::runs::parsed;
    use super::*;

    const RUN: &str = concat!(
        "{\"kind\":\"header\",\"date\":\"2027-01-02T03:04:05Z\",\"gpu\":\"NVIDIA H200\",\"driver_version\":\"580.1\",\
         \"driver\":\"/usr/lib/libcuda.so.1\",\"software_gpu\":false,\"commit\":\"abc\",\"kernel\":\"6.8\"}\n",
        "{\"kind\":\"step\",\"phase\":\"questions\",\"name\":\"q\",\"outcome\":\"answered\",\"answer\":{\"works\":true},\
         \"expected\":\"Yes.\"}\n",
        "{\"kind\":\"step\",\"phase\":\"questions\",\"name\":\"r\",\"outcome\":\"refused\",\"reason\":\"cuX returned Y\",\
         \"answer\":{},\"expected\":\"No.\"}\n",
        "{\"kind\":\"step\",\"phase\":\"programs\",\"name\":\"p\",\"outcome\":\"answered\",\"answer\":{\"equal\":true,\
         \"passed\":true,\"native\":{\"seconds\":0.2},\"remoted\":{\"seconds\":0.3}}}\n",
        "{\"kind\":\"step\",\"phase\":\"custody\",\"name\":\"c\",\"outcome\":\"answered\",\"answer\":{\"verdict\":\"held\"}}\n",
        "{\"kind\":\"step\",\"phase\":\"time\",\"name\":\"t\",\"outcome\":\"answered\",\"answer\":{\"rows\":[{\"name\":\"cap\",\
         \"unit\":\"\",\"native\":null,\"remoted\":0.25,\"ratio\":null,\"aim\":\"remoted ≤ 0.35\",\"met\":true}]}}\n",
        "{\"kind\":\"step\",\"phase\":\"bench\",\"name\":\"b\",\"outcome\":\"refused\",\"reason\":\"cuX\",\"answer\":{}}\n",
        "{\"kind\":\"step\",\"phase\":\"frameworks\",\"name\":\"f\",\"outcome\":\"not-asked\",\"reason\":\"no torch\",\"answer\":{}}\n",
    );
    const SOFTWARE: &str = "{\"kind\":\"header\",\"driver\":\"/x/libcuda.so.1\",\"software_gpu\":true}\n";

    #[test]
    fn section_has_a_table_for_each_phase() {
        let text = sections(&parsed(RUN));
        for line in [
            "### Runs on hardware: NVIDIA H200, driver 580.1, kernel 6.8",
            "1. 2027-01-02T03:04:05Z, commit abc. The run was cut off: steps after its last line were not run.",
            "| step | outcome | answer | expected | run |",
            "| `q` | answered | works: true | Yes. | 1 |",
            "| `r` | refused | cuX returned Y | No. | 1 |",
            "| `p` | 0.200 s | 0.300 s | 1.5 | yes | 1 |",
            "| `c` | held | verdict: held | 1 |",
            "| `t` | cap | – | 0.25 | – | remoted ≤ 0.35 | yes | 1 |",
            "| `b` | refused: cuX | – | – | – | – | – | 1 |",
            "| `f` | not-asked: no torch | – | – | – | – | – | 1 |",
        ] {
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
    }

    #[test]
    fn runs_of_one_machine_have_one_section() {
        let later = RUN.replace("2027-01-02", "2027-01-03").replace("\"abc\"", "\"def\"");
        let other = RUN.replace("H200", "H100");
        let text = sections(&parsed(&[RUN, &later, &other].concat()));
        assert_eq!(text.matches("### Runs on hardware").count(), 2);
        assert!(text.contains("\n2. 2027-01-03T03:04:05Z, commit def."), "{text}");
        assert!(text.contains("| `c` | held | verdict: held | 2 |"), "{text}");
    }

    #[test]
    fn rehearsal_is_refused_for_the_page_and_named_in_print() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), format!("{RUN}{SOFTWARE}")).unwrap();
        let error = run(&[file.path().to_owned()], false).unwrap_err().to_string();
        assert!(error.contains("software GPU") && error.contains("--rehearsal"), "{error}");
        assert!(sections(&parsed(SOFTWARE)).starts_with("### Rehearsal on the software GPU"));
    }

    #[test]
    fn only_the_part_between_its_markers_is_replaced() {
        let text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n";
        assert_eq!(replaced(text, "x", "new\n").unwrap(), text.replace("old", "new"));
        assert!(replaced(text, "y", "").is_err());
    }

    #[test]
    fn page_has_its_markers_and_says_that_no_run_exists_as_long_as_it_has_none() {
        let page = fs::read_to_string(paths::workspace().join("docs/hardware-results.md")).unwrap();
        replaced(&page, "status", "").unwrap();
        let emptied = replaced(&page, "results", "").unwrap();
        let has_runs = page.contains("\n### Runs on hardware") && !emptied.contains("\n### Runs on hardware");
        assert_ne!(has_runs, page.contains("**None of these questions was asked on hardware yet.**"));
        assert!(!page.contains("### Rehearsal on the software GPU"));
        assert_eq!(
            status(&parsed(RUN)),
            "**One run on hardware** so far, the last on 2027-01-02: see [Results](#results).\n"
        );
    }
}
