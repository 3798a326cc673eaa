//! The frame: runs the steps of the phases one after the other, and writes each result down at once.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{getpid, set_child_subreaper};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::bundle;
use crate::child::{self, Ended};
use crate::libraries::{self, Libraries};
use crate::phases::{self, Phase};
use crate::results::{Files, Outcome, Record, now};
use crate::signals;
use crate::step::{Question, TEMPORARY};
use crate::stop::Stop;
use crate::system;

/// A run.
#[derive(Debug)]
pub(crate) struct Run {
    out: PathBuf,
    files: Files,
    phases: Vec<&'static Phase>,
    steps: Vec<String>,
    libraries: Libraries,
    deadline: Instant,
    is_short: bool,
}

impl Run {
    /// Prepares a run.
    pub(crate) fn new(
        out: &Path,
        phases: &[String],
        steps: &[String],
        minutes: f64,
        is_short: bool,
        libraries: Libraries,
    ) -> Result<Run> {
        ensure!(
            minutes.is_finite() && (0.0..=24.0 * 60.0).contains(&minutes),
            "--minutes is between 0 and 1440"
        );
        let deadline = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
        let phases = phases::select(phases)?;
        for step in steps {
            let known = phases.iter().any(|phase| phase.questions().any(|question| question.name == step));
            ensure!(known, "no step of these phases is named {step}: see `sluice-hardware list`");
        }
        Ok(Run {
            out: std::path::absolute(out)?,
            files: Files::open(out)?,
            phases,
            steps: steps.to_vec(),
            libraries,
            deadline,
            is_short,
        })
    }

    /// Runs all steps. True if each ended in order; an error without a verdict if a signal ends the run.
    pub(crate) fn all(mut self) -> Result<bool> {
        // Processes that a step leaves behind become children of this one, which ends them.
        set_child_subreaper(Some(getpid())).context("adopting the processes of steps")?;
        signals::store();
        self.header()?;
        let mut counts = Outcome::ALL.map(|outcome| (outcome, 0_u32));
        for phase in self.phases.clone() {
            let end = self.deadline.min(Instant::now() + Duration::from_secs(60 * u64::from(phase.minutes)));
            let chosen: Vec<_> = phase.questions().filter(|question| self.chosen(phase, question)).collect();
            for question in chosen {
                not_ended()?;
                let record = self.step(phase.name, phase.has_folder, end, question)?;
                let outcome = record.outcome;
                say(&format!("{:<12} {:<28} {:6.1} s", outcome.words(), question.name, record.seconds));
                if let Some(reason) = &record.reason {
                    say(&format!("             {reason}"));
                }
                self.files.write(&record)?;
                counts.iter_mut().filter(|(of, _)| *of == outcome).for_each(|(_, count)| *count += 1);
            }
        }
        not_ended()?;
        self.verdict(&counts)
    }

    fn chosen(&self, phase: &Phase, question: &Question) -> bool {
        match self.steps.is_empty() {
            true => !self.is_short || !phase.long.contains(&question.name),
            false => self.steps.iter().any(|step| step == question.name),
        }
    }

    /// Writes the facts about machine and program; a child asks the libraries, because they may hang.
    fn header(&mut self) -> Result<()> {
        let question = phases::find(phases::HEADER).context("the step of the header")?;
        let record = self.step("header", false, self.deadline, question)?;
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut line = Map::new();
        line.insert("kind".into(), "header".into());
        line.insert("date".into(), now().into());
        line.insert("commit".into(), commit().into());
        line.insert("short".into(), self.is_short.into());
        line.insert("kernel".into(), kernel.trim().into());
        line.insert("root".into(), rustix::process::getuid().is_root().into());
        line.insert("processors".into(), std::thread::available_parallelism().map_or(0, usize::from).into());
        line.insert("host_memory".into(), system::memory_figure("MemTotal:").into());
        line.insert("driver".into(), self.libraries.driver.display().to_string().into());
        line.insert("software_gpu".into(), libraries::is_software_gpu(&self.libraries.driver).into());
        line.insert(
            "nvml".into(),
            self.libraries.nvml.as_ref().map(|path| path.display().to_string()).into(),
        );
        line.insert("libraries".into(), json!({ "outcome": record.outcome, "reason": record.reason }));
        line.extend(record.answer);
        self.files.write(&line)?;
        let named = |key: &str| line.get(key).and_then(Value::as_str).unwrap_or("unknown").to_owned();
        say(&format!("{}, driver {}", named("gpu"), named("driver_version")));
        Ok(())
    }

    fn step(
        &mut self,
        phase: &'static str,
        has_folder: bool,
        end: Instant,
        question: &'static Question,
    ) -> Result<Record<'static>> {
        let left = end.saturating_duration_since(Instant::now());
        let mut record = Record {
            kind: "step",
            phase,
            name: question.name,
            question: question.question,
            expected: question.expected,
            answer: Map::new(),
            consequence: question.consequence,
            outcome: Outcome::NoTime,
            reason: Some(
                if end < self.deadline {
                    "the time of the phase was over"
                } else {
                    "the time of the run was over"
                }
                .to_owned(),
            ),
            code: None,
            signal: None,
            stuck: false,
            seconds: 0.0,
        };
        if left.is_zero() {
            return Ok(record);
        }
        let limit = Duration::from_secs(question.seconds.into());
        let mut command = Command::new("/proc/self/exe");
        command.arg0("sluice-hardware").arg("step").arg(question.name).args(self.libraries.arguments());
        command.args(self.is_short.then_some("--short"));
        // The compiler's cache would be a file outside of the output folder.
        command.env("CUDA_CACHE_DISABLE", "1").env("RUST_BACKTRACE", "0");
        // Only where it is needed: a run that is killed by SIGKILL cannot remove it.
        let temporary = has_folder.then(|| temporary(&self.out)).transpose()?;
        command.envs(temporary.as_ref().map(|folder| (TEMPORARY, folder.path())));
        let ended = child::run(&mut command, limit.min(left))?;
        // A step that has filled the disk leaves room for its own messages.
        drop(temporary);
        if let Err(failed) = self.files.log(question.name, &ended.log) {
            say(&format!("the log cannot be written: {failed:#}"));
        }
        record.seconds = (ended.took.as_secs_f64() * 1e3).round() / 1e3;
        record.stuck = ended.stuck;
        conclude(&mut record, ended, limit.min(left));
        Ok(record)
    }

    fn verdict(&mut self, counts: &[(Outcome, u32)]) -> Result<bool> {
        let steps: u32 = counts.iter().map(|(_, count)| count).sum();
        let parts: Vec<String> = counts
            .iter()
            .filter(|(outcome, count)| {
                *count > 0 || matches!(outcome, Outcome::Answered | Outcome::Refused | Outcome::TimedOut)
            })
            .map(|(outcome, count)| format!("{count} {}", outcome.words()))
            .collect();
        let orderly = counts.iter().all(|(outcome, count)| *count == 0 || outcome.orderly());
        let words = format!("{steps} steps: {}.", parts.join(", "));
        say(&words);
        self.files.write(&json!({ "kind": "verdict", "date": now(), "orderly": orderly, "words": words }))?;
        Ok(orderly)
    }
}

/// An error if a signal ends the run.
fn not_ended() -> Result<()> {
    let Some(signal) = signals::stored() else { return Ok(()) };
    bail!("ended by {signal}; the results up to here are written")
}

/// A folder that is removed with its step. Sockets lie in it, whose paths must be short: hence not in the output folder first.
fn temporary(out: &Path) -> Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("sluice-hardware-");
    builder.tempdir().or_else(|_| builder.tempdir_in(out)).context("a folder for temporary files")
}

/// Derives the outcome from the end of the child.
fn conclude(record: &mut Record<'_>, ended: Ended, limit: Duration) {
    use std::os::unix::process::ExitStatusExt as _;
    record.answer = ended.notes;
    let signal = ended.status.and_then(|status| status.signal());
    record.signal = signal;
    (record.outcome, record.reason) = match (ended.end, ended.status, signal) {
        (Some(end), ..) => match serde_json::from_value::<Stop>(end) {
            Ok(Stop::Refused { reason, code }) => {
                record.code = code;
                (Outcome::Refused, Some(reason))
            }
            Ok(Stop::NotAsked { reason }) => (Outcome::NotAsked, Some(reason)),
            Ok(Stop::Failed { reason }) => (Outcome::Failed, Some(reason)),
            // The one other end is `answered`.
            Err(_) => (Outcome::Answered, None),
        },
        (None, None, _) if let Some(signal) = signals::stored() => {
            (Outcome::Failed, Some(format!("{signal} ended the run")))
        }
        (None, None, _) => (Outcome::TimedOut, Some(format!("killed after {:.0} s", limit.as_secs_f64()))),
        (None, Some(_), Some(signal)) => (Outcome::Crashed, Some(format!("ended by signal {signal}"))),
        (None, Some(status), None) => (Outcome::Failed, Some(format!("ended without an answer: {status}"))),
    };
}

/// The commit of the bundle, or of this program without one.
fn commit() -> String {
    bundle::commit()
        .or(option_env!("SLUICE_COMMIT").map(str::to_owned))
        .unwrap_or_else(|| "unknown".to_owned())
}

/// Prints a line for the operator.
fn say(line: &str) {
    // The results are in the file; a closed terminal must not end the run.
    let _ = writeln!(std::io::stdout(), "{line}");
}
