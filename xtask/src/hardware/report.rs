//! The report: results of runs on hardware as two marked parts of `docs/hardware-results.md`.
//!
//! Figures of a rehearsal must never stand on the page: they are facts about the software GPU.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use sluice_tests::paths;

use super::runs::{HardwareRun, cell, read};
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

fn sections(runs: &[HardwareRun]) -> String {
    runs.iter().map(section).collect::<Vec<_>>().join("\n")
}

/// The section of one run.
fn section(run: &HardwareRun) -> String {
    let mut text = String::new();
    let kind = if run.is_rehearsal() { "Rehearsal on the software GPU" } else { "Run" };
    let [date, driver, gpu, commit, kernel] =
        ["date", "driver_version", "gpu", "commit", "kernel"].map(|key| cell(run.fact(key)));
    // Writing to a String cannot fail.
    let _ = writeln!(text, "### {kind} {date}: {gpu}, driver {driver}\n\nCommit {commit}, kernel {kernel}.");
    let end = match run.orderly {
        Some(true) => "Each step was answered, refused or not asked.",
        Some(false) => "Some steps did not end in order.",
        None => "The run was cut off: steps after the last one here were not run.",
    };
    let _ = writeln!(text, "{end}");
    let questions: Vec<_> = run.phase("questions").collect();
    if !questions.is_empty() {
        text.push_str("\n| step | outcome | answer | expected |\n|---|---|---|---|\n");
    }
    for step in questions {
        let (name, outcome) = (step.text("name"), step.text("outcome"));
        let _ =
            writeln!(text, "| `{name}` | {outcome} | {} | {} |", step.answer(), cell(step.text("expected")));
    }
    let programs: Vec<_> = run.phase("programs").collect();
    if !programs.is_empty() {
        text.push_str(
            "\nTimes are those of the program alone: the start of Sluice's own processes is left out, the start of a session is not.\n\n\
             | program | native | remoted | ratio | same output |\n|---|---|---|---|---|\n",
        );
    }
    for step in programs {
        let _ = writeln!(text, "| `{}` | {} |", step.text("name"), step.comparison().join(" | "));
    }
    for (place, step) in run.phase("custody").enumerate() {
        if place == 0 {
            text.push_str("\n| custody | verdict | figures |\n|---|---|---|\n");
        }
        let _ = writeln!(text, "| `{}` | {} | {} |", step.text("name"), step.verdict(), step.answer());
    }
    for phase in ["time", "bench", "frameworks"] {
        text.push_str(&measurements(run, phase));
    }
    for (place, step) in run.phase("frameworks").enumerate() {
        if place == 0 {
            text.push_str(
                "\n| client | same results | compared | memory that it sees, of the quota | calls that Sluice refused | calls that cost most more time | parts that fail natively |\n\
                 |---|---|---|---|---|---|---|\n",
            );
        }
        let _ = writeln!(text, "| `{}` | {} |", step.text("name"), step.client().join(" | "));
    }
    text
}

/// The measured rows of a phase, and its steps without one.
fn measurements(run: &HardwareRun, phase: &str) -> String {
    let mut text = String::new();
    for step in run.phase(phase) {
        let (name, rows) = (step.text("name"), step.rows());
        // Writing to a String cannot fail.
        if rows.is_empty() || step.text("outcome") != "answered" {
            let _ = writeln!(
                text,
                "| `{name}` | {}: {} | – | – | – | – | – |",
                step.text("outcome"),
                cell(step.text("reason"))
            );
        }
        for row in rows {
            let _ = writeln!(text, "| `{name}` | {} |", row.join(" | "));
        }
    }
    match text.is_empty() {
        true => text,
        false => format!(
            "\n| {phase} | measurement | native | remoted | ratio | aim | met |\n|---|---|---|---|---|---|---|\n{text}"
        ),
    }
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
            "### Run 2027-01-02T03:04:05Z: NVIDIA H200, driver 580.1",
            "Commit abc, kernel 6.8.",
            "The run was cut off: steps after the last one here were not run.",
            "| `q` | answered | works: true | Yes. |",
            "| `r` | refused | cuX returned Y | No. |",
            "| `p` | 0.200 s | 0.300 s | 1.5 | yes |",
            "| `c` | held | verdict: held |",
            "| `t` | cap | – | 0.25 | – | remoted ≤ 0.35 | yes |",
            "| `b` | refused: cuX | – | – | – | – | – |",
            "| `f` | not-asked: no torch | – | – | – | – | – |",
        ] {
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
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
        let has_runs = page.contains("\n### Run ") && !emptied.contains("\n### Run ");
        assert_ne!(has_runs, page.contains("**None of these questions was asked on hardware yet.**"));
        assert!(!page.contains("### Rehearsal on the software GPU"));
        assert_eq!(
            status(&parsed(RUN)),
            "**One run on hardware** so far, the last on 2027-01-02: see [Results](#results).\n"
        );
    }
}
