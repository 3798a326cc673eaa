//! Results of `sluice-hardware run`: a file with one or more runs, and the cells of tables for them.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Longest cell of a table, in characters.
const CELL: usize = 300;

/// One run: the lines from a header to the next one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HardwareRun {
    header: Value,
    /// Its steps, in the order of the file.
    pub(super) steps: Vec<StepResult>,
    /// The verdict that ends the run; `None` if the run was cut off.
    pub(super) orderly: Option<bool>,
}

/// The line of a step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StepResult(Value);

/// Reads the runs of a file.
pub(super) fn read(path: &Path) -> Result<Vec<HardwareRun>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let runs = parsed(&text);
    ensure!(!runs.is_empty(), "{} has no header of a run", path.display());
    Ok(runs)
}

/// The runs of a text. Half lines, which a killed run leaves, and lines before the first header are left out.
pub(super) fn parsed(text: &str) -> Vec<HardwareRun> {
    let mut runs = Vec::<HardwareRun>::new();
    for line in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        match (line["kind"].as_str(), runs.last_mut()) {
            (Some("header"), _) => runs.push(HardwareRun { header: line, steps: Vec::new(), orderly: None }),
            (Some("step"), Some(run)) => run.steps.push(StepResult(line)),
            (Some("verdict"), Some(run)) => run.orderly = line["orderly"].as_bool(),
            _ => {}
        }
    }
    runs
}

impl HardwareRun {
    /// True if the driver was the software GPU. `sluice-hardware` knows it by the contents of the library; older results have its path.
    pub(super) fn is_rehearsal(&self) -> bool {
        let path = self.header["driver"].as_str().unwrap_or_default();
        self.header["software_gpu"].as_bool() == Some(true) || path.contains("softgpu")
    }

    /// A fact of the header.
    pub(super) fn fact(&self, key: &str) -> &str {
        self.header[key].as_str().unwrap_or("unknown")
    }

    /// The steps of a phase.
    pub(super) fn phase<'run>(&'run self, name: &'run str) -> impl Iterator<Item = &'run StepResult> {
        self.steps.iter().filter(move |step| step.text("phase") == name)
    }

    /// The facts that runs of one machine have in common.
    pub(super) fn machine(&self) -> [&str; 3] {
        ["gpu", "driver_version", "kernel"].map(|key| self.fact(key))
    }
}

/// The steps of a phase in several runs, each with the place of its run. The last line of a step counts of those that tell most: any
/// outcome tells more than that a step was not asked, and this more than that it was cut off by a signal or the end of the time.
pub(super) fn of_phase<'runs>(
    runs: &[&'runs HardwareRun],
    phase: &'runs str,
) -> Vec<(usize, &'runs StepResult)> {
    let mut steps = Vec::<(usize, &StepResult)>::new();
    for (place, run) in runs.iter().enumerate() {
        for step in run.phase(phase) {
            match steps.iter_mut().find(|(_, known)| known.text("name") == step.text("name")) {
                None => steps.push((place, step)),
                Some(known) if step.weight() >= known.1.weight() => *known = (place, step),
                Some(_) => {}
            }
        }
    }
    steps
}

impl StepResult {
    /// A text of the line; empty if it has none.
    pub(super) fn text(&self, key: &str) -> &str {
        self.0[key].as_str().unwrap_or_default()
    }

    /// True if the step was asked, or cannot be asked on that machine.
    pub(super) fn is_orderly(&self) -> bool {
        matches!(self.text("outcome"), "answered" | "refused" | "not-asked")
    }

    /// True if a signal to the run, or the end of its time, ended the step or prevented it.
    pub(super) fn is_cut_off(&self) -> bool {
        match self.text("outcome") {
            "no-time" => true,
            "failed" => self.text("reason").ends_with(" ended the run"),
            _ => false,
        }
    }

    /// The weight of the line among others of the same step.
    fn weight(&self) -> u8 {
        match self.outcome() {
            "cut-off" => 0,
            "not-asked" => 1,
            _ => 2,
        }
    }

    /// The outcome in a word.
    pub(super) fn outcome(&self) -> &str {
        if self.is_cut_off() { "cut-off" } else { self.text("outcome") }
    }

    /// True if a program printed the same on both sides, and passed on both.
    pub(super) fn is_same_and_passed(&self) -> bool {
        let answer = &self.0["answer"];
        self.text("outcome") == "answered" && answer["equal"] == true && answer["passed"] == true
    }

    /// The notes of a question, or the reason why there is no answer with the notes that there are.
    pub(super) fn answer(&self) -> String {
        let notes = self.0["answer"].as_object();
        let notes = notes.into_iter().flatten().map(|(key, value)| match value.as_str() {
            Some(text) => format!("{key}: {text}"),
            None => format!("{key}: {value}"),
        });
        let reason = Some(self.text("reason").to_owned()).filter(|reason| !reason.is_empty());
        cell(&reason.into_iter().chain(notes).collect::<Vec<_>>().join("; "))
    }

    /// The verdict of a step of `custody`: that of the step itself, or its outcome with the reason.
    pub(super) fn verdict(&self) -> String {
        match (self.text("outcome"), self.0["answer"]["verdict"].as_str()) {
            ("answered", Some(verdict)) => verdict.to_owned(),
            _ => cell(&format!("{}: {}", self.outcome(), self.text("reason"))),
        }
    }

    /// True if a step of `custody` kept its promise, or promises nothing.
    pub(super) fn is_held(&self) -> bool {
        matches!(self.0["answer"]["verdict"].as_str(), Some("held" | "shown"))
    }

    /// The measured rows of a step: name with unit, native, remoted, ratio, aim, and if it is met.
    pub(super) fn rows(&self) -> Vec<[String; 6]> {
        let rows = self.0["answer"]["rows"].as_array().into_iter().flatten();
        rows.map(|row| {
            let text = |key: &str| row[key].as_str().unwrap_or_default();
            let name = match text("unit") {
                "" => text("name").to_owned(),
                unit => format!("{}, {unit}", text("name")),
            };
            let met = match row["met"].as_bool() {
                Some(true) => "yes",
                Some(false) => "**no**",
                None => "–",
            };
            let aim = row["aim"].as_str().unwrap_or("–");
            let [native, remoted, ratio] = ["native", "remoted", "ratio"].map(|key| figure(&row[key]));
            [cell(&name), native, remoted, ratio, cell(aim), met.to_owned()]
        })
        .collect()
    }

    /// The cells of a client: same results, compared values, memory that it sees, calls that Sluice refused, calls that cost most more
    /// time than natively, parts that fail natively.
    pub(super) fn client(&self) -> [String; 6] {
        /// Calls in the list of slow ones.
        const SLOWER: usize = 5;
        fn elements(value: &Value) -> impl Iterator<Item = &Value> {
            value.as_array().into_iter().flatten()
        }
        let answer = &self.0["answer"];
        let list =
            |words: Vec<String>| if words.is_empty() { "–".to_owned() } else { cell(&words.join("; ")) };
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let refused = elements(&answer["remoted"]["refused_calls"]).map(word);
        let refused = refused.chain(elements(&answer["trace"]["refused"]).map(|line| {
            format!(
                "{} {}: {} of them, natively {}",
                word(&line["function"]),
                word(&line["result"]),
                line["remoted"],
                line["native"]
            )
        }));
        let slower = elements(&answer["trace"]["slower"]).take(SLOWER).map(|line| {
            let mean = |side: &str| figure(&line[side]["mean_us"]);
            format!("{} {} → {} us", word(&line["function"]), mean("native"), mean("remoted"))
        });
        let same = match (self.text("outcome"), answer["equal"].as_bool()) {
            ("answered", Some(true)) => "yes".to_owned(),
            (outcome, _) => cell(&format!("{outcome}: {}", self.text("reason"))),
        };
        let quota = match answer["quota"]["set"].as_u64() {
            Some(set) => format!("{} of {set}", figure(&answer["quota"]["seen"])),
            None => "–".to_owned(),
        };
        let failing = answer["native"]["errors"].as_object().into_iter().flatten();
        let failing = failing.map(|(part, _)| part.clone()).collect();
        [
            same,
            figure(&answer["compared"]),
            quota,
            list(refused.collect()),
            list(slower.collect()),
            list(failing),
        ]
    }

    /// The cells of a program: native, remoted, ratio and equality.
    pub(super) fn comparison(&self) -> [String; 4] {
        let answer = &self.0["answer"];
        let seconds = |side: &str| answer[side]["seconds"].as_f64();
        let shown = |side: &str| seconds(side).map_or("–".to_owned(), |seconds| format!("{seconds:.3} s"));
        let ratio = match (seconds("native"), seconds("remoted")) {
            (Some(native), Some(remoted)) if native > 0.0 => format!("{:.1}", remoted / native),
            _ => "–".to_owned(),
        };
        let same = match (answer["equal"].as_bool(), answer["passed"].as_bool()) {
            (Some(true), Some(true)) => "yes".to_owned(),
            (Some(true), _) => "yes, but the program failed on both sides".to_owned(),
            _ => cell(&format!("no: {}: {}", self.text("outcome"), self.text("reason"))),
        };
        [shown("native"), shown("remoted"), ratio, same]
    }
}

/// A figure as a cell.
fn figure(value: &Value) -> String {
    value.as_f64().map_or("–".to_owned(), |figure| format!("{figure}"))
}

/// A text as a cell of a Markdown table.
pub(super) fn cell(text: &str) -> String {
    let mut shown: String = text.chars().take(CELL).collect();
    if text.chars().count() > CELL {
        shown.push('…');
    }
    shown.replace('\\', "\\\\").replace('|', "\\|").replace('<', "&lt;").replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = concat!(
        "{\"kind\":\"step\",\"name\":\"before\"}\n",
        "{\"kind\":\"header\",\"gpu\":\"G\",\"driver\":\"/usr/lib/libcuda.so.1\",\"software_gpu\":false}\n",
        "{\"kind\":\"step\",\"phase\":\"programs\",\"name\":\"a\",\"outcome\":\"answered\",\"answer\":{\"equal\":true,\
         \"passed\":true,\"native\":{\"seconds\":0.5},\"remoted\":{\"seconds\":0.75}}}\n",
        "{\"kind\":\"step\",\"phase\":\"programs\",\"name\":\"b\",\"outcome\":\"timed-out\",\"reason\":\"killed\",\
         \"answer\":{\"native\":{\"seconds\":0.5}}}\n",
        "{\"kind\":\"st\n",
        "\n{\"kind\":\"header\",\"driver\":\"/x/libsoftgpu_cuda.so\"}\n",
        "{\"kind\":\"verdict\",\"orderly\":true}\n",
    );

    #[test]
    fn each_header_begins_a_run_and_half_lines_are_left_out() {
        let runs = parsed(FILE);
        assert_eq!(runs.iter().map(|run| run.steps.len()).collect::<Vec<_>>(), [2, 0]);
        assert_eq!((runs[0].orderly, runs[1].orderly), (None, Some(true)));
        assert_eq!((runs[0].fact("gpu"), runs[1].fact("gpu")), ("G", "unknown"));
    }

    #[test]
    fn last_line_of_a_step_counts_unless_it_was_cut_off_or_not_asked() {
        let step = |name: &str, outcome: &str, reason: &str| {
            format!(
                "{{\"kind\":\"step\",\"phase\":\"p\",\"name\":\"{name}\",\"outcome\":\"{outcome}\",\"reason\":\"{reason}\"}}\n"
            )
        };
        let cut = "SIGTERM ended the run";
        let header = "{\"kind\":\"header\"}\n".to_owned();
        let first =
            [step("a", "failed", cut), step("b", "answered", ""), step("c", "no-time", "over")].concat();
        let second =
            [step("a", "answered", ""), step("b", "failed", cut), step("d", "failed", "broken")].concat();
        let third = ["a", "c", "d", "e"].map(|name| step(name, "not-asked", "no torch")).concat();
        let fourth = [step("d", "answered", ""), step("e", "no-time", "over")].concat();
        let runs = parsed(&[first, second, third, fourth].map(|run| header.clone() + &run).concat());
        let steps = of_phase(&runs.iter().collect::<Vec<_>>(), "p");
        let shown: Vec<_> =
            steps.iter().map(|(run, step)| (*run, step.text("name"), step.outcome())).collect();
        assert_eq!(
            shown,
            [
                (1, "a", "answered"),
                (0, "b", "answered"),
                (2, "c", "not-asked"),
                (3, "d", "answered"),
                (2, "e", "not-asked")
            ]
        );
    }

    #[test]
    fn software_gpu_is_known_by_the_header_or_its_path() {
        let runs = parsed(FILE);
        assert_eq!((runs[0].is_rehearsal(), runs[1].is_rehearsal()), (false, true));
        let renamed = "{\"kind\":\"header\",\"driver\":\"/usr/lib/libcuda.so.1\",\"software_gpu\":true}";
        assert!(parsed(renamed)[0].is_rehearsal());
    }

    #[test]
    fn comparison_has_times_and_ratio_or_the_reason_of_their_absence() {
        let steps = &parsed(FILE)[0].steps;
        assert_eq!(steps[0].comparison(), ["0.500 s", "0.750 s", "1.5", "yes"]);
        assert!(steps[0].is_same_and_passed() && steps[0].is_orderly());
        assert_eq!(steps[1].comparison(), ["0.500 s", "–", "–", "no: timed-out: killed"]);
        assert!(!steps[1].is_same_and_passed() && !steps[1].is_orderly());
    }

    #[test]
    fn verdict_is_that_of_an_answered_step_or_the_reason() {
        let steps =
            |text: &str| parsed(&format!("{{\"kind\":\"header\"}}\n{text}\n")).remove(0).steps.remove(0);
        let held = steps("{\"kind\":\"step\",\"outcome\":\"answered\",\"answer\":{\"verdict\":\"held\"}}");
        assert_eq!((held.verdict(), held.is_held()), ("held".to_owned(), true));
        let broken = steps("{\"kind\":\"step\",\"outcome\":\"failed\",\"reason\":\"broken\",\"answer\":{}}");
        assert_eq!((broken.verdict(), broken.is_held()), ("failed: broken".to_owned(), false));
    }

    #[test]
    fn row_has_its_unit_figures_and_aim() {
        let line = "{\"kind\":\"step\",\"answer\":{\"rows\":[{\"name\":\"launch\",\"unit\":\"us\",\"native\":2.5,\
                    \"remoted\":5.0,\"ratio\":2.0,\"aim\":\"ratio ≤ 1\",\"met\":false},{\"name\":\"a\",\"unit\":\"\"}]}}";
        let step = parsed(&format!("{{\"kind\":\"header\"}}\n{line}\n")).remove(0).steps.remove(0);
        let rows = step.rows();
        assert_eq!(rows[0], ["launch, us", "2.5", "5", "2", "ratio ≤ 1", "**no**"]);
        assert_eq!(rows[1], ["a", "–", "–", "–", "–", "–"]);
    }

    #[test]
    fn client_has_its_quota_refused_calls_and_failing_parts() {
        let line = "{\"kind\":\"step\",\"outcome\":\"answered\",\"answer\":{\"equal\":true,\"compared\":3,\
                    \"quota\":{\"set\":64,\"seen\":64},\"remoted\":{\"refused_calls\":[\"cuX\",\"cuY\"]},\
                    \"trace\":{\"refused\":[{\"function\":\"cuZ\",\"result\":\"CUDA_ERROR_NOT_SUPPORTED\",\"native\":0,\"remoted\":2}],\
                    \"slower\":[{\"function\":\"cuA\",\"native\":{\"mean_us\":1.5},\"remoted\":{\"mean_us\":20.0}}]},\
                    \"native\":{\"errors\":{\"product\":\"no library\"}}}}";
        let step = parsed(&format!("{{\"kind\":\"header\"}}\n{line}\n")).remove(0).steps.remove(0);
        let refused = "cuX; cuY; cuZ CUDA_ERROR_NOT_SUPPORTED: 2 of them, natively 0";
        assert_eq!(step.client(), ["yes", "3", "64 of 64", refused, "cuA 1.5 → 20 us", "product"]);
        let absent = "{\"kind\":\"step\",\"outcome\":\"not-asked\",\"reason\":\"no torch\",\"answer\":{}}";
        let step = parsed(&format!("{{\"kind\":\"header\"}}\n{absent}\n")).remove(0).steps.remove(0);
        assert_eq!(step.client(), ["not-asked: no torch", "–", "–", "–", "–", "–"]);
    }

    #[test]
    fn cell_is_one_short_line_without_markup() {
        assert_eq!(cell("a|b\nc<d"), "a\\|b c&lt;d");
        assert_eq!(cell(&"x".repeat(CELL + 1)).chars().count(), CELL + 1);
        assert!(cell(&"x".repeat(CELL + 1)).ends_with('…'));
    }
}
