//! The rehearsal: the packed bundle on the software GPU, in an environment without anything that a machine with a GPU may lack.
//!
//! With the right to make namespaces, the bundle runs in a root of its own, without network; otherwise it shares those of the
//! caller, and only its environment is empty. Every process of it ends with this one.
//!
//! A test of this module rehearses too. It is a test of `xtask` because packing, root and judgement are code of `xtask` that no
//! other crate can call.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use sluice_tests::process::{Finished, run as run_limited, tail, with_environment};
use sluice_tests::progress::step;

use super::pack::{self, PROGRAM, PackOptions, Packed, SOFTGPU};
use super::runs::{self, HardwareRun};
use crate::cargo::{target_folder, works};
use crate::runner;

/// Time of the run, as on hardware.
const MINUTES: u32 = 45;
/// All phases, in the order of a run.
const PHASES: [&str; 6] = ["questions", "programs", "custody", "time", "bench", "frameworks"];
/// Time limit of the rehearsal: the run itself keeps its own.
const LIMIT: Duration = Duration::from_secs(60 * MINUTES as u64 + 30);
/// A root of its own for the bundle.
const BARE_ROOT: &str = include_str!("bare-root.sh");
const NAMESPACES: &[&str] = &["--mount", "--net", "--pid", "--fork", "--kill-child"];
/// Mounts that some containers forbid; they are seen in new namespaces only.
const MOUNTS: &str = "mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs none /tmp";
/// Programs of the host that make the root. The bundle's program cannot reach them there.
const SYSTEM_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// A rehearsal that ended.
#[derive(Debug)]
pub(super) struct Rehearsal {
    /// The run; `None` if no header was written.
    run: Option<HardwareRun>,
    /// The environment in words.
    environment: &'static str,
    /// Everything that is wrong.
    pub(super) problems: Vec<String>,
}

/// The length of a rehearsal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// All steps with all rounds.
    Full,
    /// Fewer of each kind.
    Short,
}

/// Options for a rehearsal.
#[derive(Debug, Args)]
pub(crate) struct RehearseOptions {
    #[command(flatten)]
    pack: PackOptions,
    /// Run fewer steps and rounds of each kind, as CI does.
    #[arg(long)]
    short: bool,
}

/// Packs and rehearses; true if nothing is wrong.
pub(super) fn run(options: &RehearseOptions) -> Result<bool> {
    let started = Instant::now();
    let packed = pack::build(&options.pack)?;
    let out = target_folder()?.join("hardware-rehearsal");
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("removing the old {}", out.display()))?;
    }
    let rehearsal = rehearse(&packed, &out, if options.short { Length::Short } else { Length::Full })?;
    print!("{}", rehearsal.table());
    println!("results: {}", runner::shown(&out.join("results.jsonl")));
    for problem in &rehearsal.problems {
        println!("problem: {problem}");
    }
    let good = rehearsal.problems.is_empty();
    let word = if good { "PASS" } else { "FAIL" };
    println!("time: {:.0} s\nrehearsal: {word}", started.elapsed().as_secs_f64());
    Ok(good)
}

/// Runs the bundle on a software GPU of its own, with results in the new folder `out`.
pub(super) fn rehearse(packed: &Packed, out: &Path, length: Length) -> Result<Rehearsal> {
    fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
    step("running the bundle on the software GPU");
    let (environment, finished, mut problems) = match namespaces_are_permitted() {
        true => in_bare_root(&packed.folder, out, length)?,
        false => in_bare_environment(&packed.folder, out, length)?,
    };
    let run = runs::read(&out.join("results.jsonl")).ok().and_then(|runs| runs.into_iter().next_back());
    problems.extend(judged(run.as_ref(), packed.programs));
    if !finished.status.success() {
        problems.push(format!("{PROGRAM}: {}\n{}", finished.status, tail(&finished.stderr, 20)));
    }
    Ok(Rehearsal { run, environment, problems })
}

/// True if this process may make the namespaces of a root.
fn namespaces_are_permitted() -> bool {
    // A user without privilege could make them only with a namespace of users, in which the step export-between-users has no
    // second user.
    rustix::process::geteuid().is_root()
        && works("unshare", NAMESPACES.iter().copied().chain(["sh", "-c", MOUNTS]))
}

type Ended = (&'static str, Finished, Vec<String>);

/// Variables of a software GPU like a machine with one H200, small enough for a machine with little memory.
fn device(command: &mut Command, state: &Path) {
    command.env("SLUICE_SOFTGPU_STATE", state).env("SLUICE_SOFTGPU_MODEL", "H200-141");
    command.env("SLUICE_SOFTGPU_SCALE", "64").env("SLUICE_SOFTGPU_DEVICES", "1");
}

fn arguments(command: &mut Command, bundle: &Path, out: &Path, length: Length) {
    let [driver, nvml] = SOFTGPU.map(|name| bundle.join("softgpu").join(name));
    command.arg("run").arg(out).args(["--minutes", &MINUTES.to_string()]);
    command.args((length == Length::Short).then_some("--short"));
    command.arg("--driver").arg(driver).arg("--nvml").arg(nvml);
}

fn in_bare_root(bundle: &Path, out: &Path, length: Length) -> Result<Ended> {
    let root = tempfile::tempdir().context("a folder for the root")?;
    let mut command = Command::new("unshare");
    command.args(NAMESPACES).args(["sh", "-c", BARE_ROOT, "sh"]).arg(root.path()).arg(bundle).arg(out);
    arguments(&mut command, Path::new("/bundle"), Path::new("/out"), length);
    command.env_clear().env("PATH", SYSTEM_PATH).env("HOME", "/tmp");
    device(&mut command, Path::new("/dev/shm/gpu"));
    let finished = run_limited(&mut command, LIMIT)?;
    let left = finished.stdout.lines().filter(|line| line.starts_with("left: ")).map(str::to_owned).collect();
    Ok(("a root with libraries only, without network and toolchain, read-only", finished, left))
}

fn in_bare_environment(bundle: &Path, out: &Path, length: Length) -> Result<Ended> {
    let home = tempfile::tempdir().context("a folder for HOME")?;
    let state = tempfile::tempdir_in("/dev/shm").context("a folder for a device")?;
    let mut command = Command::new(bundle.join(PROGRAM));
    arguments(&mut command, bundle, out, length);
    command.env_clear().env("PATH", "/nonexistent").env("HOME", home.path()).env("TMPDIR", home.path());
    command.current_dir(home.path());
    device(&mut command, state.path());
    let finished = run_limited(&mut command, LIMIT)?;
    let marker = format!("HOME={}", home.path().display());
    let processes = with_environment(&marker).into_iter().map(|(_, name)| format!("left: process {name}"));
    let files = fs::read_dir(home.path()).context("the folder of HOME")?.flatten();
    let files = files.map(|file| format!("left: {}", file.path().display()));
    Ok((
        "an empty environment, because namespaces are not permitted here",
        finished,
        processes.chain(files).collect(),
    ))
}

/// The problems of a run: on the software GPU each program of the bundle passes.
fn judged(run: Option<&HardwareRun>, programs: usize) -> Vec<String> {
    let Some(run) = run else { return vec!["the run has no results".to_owned()] };
    let mut problems = Vec::new();
    if run.orderly.is_none() {
        problems.push("the run was cut off".to_owned());
    }
    if !run.is_rehearsal() {
        problems.push("the header does not say that this is the software GPU".to_owned());
    }
    for phase in PHASES.into_iter().filter(|phase| run.phase(phase).next().is_none()) {
        problems.push(format!("the run has no step of {phase}"));
    }
    for step in run.steps.iter().filter(|step| !step.is_orderly()) {
        problems.push(format!("{}: {}: {}", step.text("name"), step.text("outcome"), step.text("reason")));
    }
    let others = run.phase("programs").filter(|step| step.is_orderly() && !step.is_same_and_passed());
    problems.extend(others.map(|step| format!("{}: {}", step.text("name"), step.comparison()[3])));
    let broken = run.phase("custody").filter(|step| step.text("outcome") == "answered" && !step.is_held());
    problems.extend(broken.map(|step| format!("{}: no verdict", step.text("name"))));
    for step in ["time", "bench"].into_iter().flat_map(|phase| run.phase(phase)) {
        if step.is_orderly() && step.rows().is_empty() {
            problems.push(format!("{}: no figures: {}", step.text("name"), step.text("reason")));
        }
    }
    let same = run.phase("programs").filter(|step| step.is_same_and_passed()).count();
    if same != programs {
        problems.push(format!("{same} of {programs} programs passed with the same output"));
    }
    problems
}

impl Rehearsal {
    /// The outcomes by phase, and the programs.
    fn table(&self) -> String {
        let mut text = format!("environment: {}\n", self.environment);
        let Some(run) = &self.run else { return text };
        for phase in PHASES {
            let mut counts = BTreeMap::<&str, u32>::new();
            run.phase(phase).for_each(|step| *counts.entry(step.text("outcome")).or_default() += 1);
            let counts: Vec<_> = counts.iter().map(|(outcome, count)| format!("{count} {outcome}")).collect();
            text.push_str(&format!("{phase:<12} {}\n", counts.join(", ")));
        }
        let others = PHASES.into_iter().flat_map(|phase| run.phase(phase));
        for step in others.filter(|step| step.text("outcome") != "answered") {
            let (name, outcome) = (step.text("name"), step.text("outcome"));
            text.push_str(&format!("  {name:<28} {outcome:<10} {}\n", step.text("reason")));
        }
        text.push_str(&format!(
            "  {:<16} {:>9} {:>9} {:>6}  same output\n",
            "program", "native", "remoted", "ratio"
        ));
        for step in run.phase("programs") {
            let [native, remoted, ratio, same] = step.comparison();
            text.push_str(&format!(
                "  {:<16} {native:>9} {remoted:>9} {ratio:>6}  {same}\n",
                step.text("name")
            ));
        }
        for step in ["time", "bench", "frameworks"].into_iter().flat_map(|phase| run.phase(phase)) {
            for [name, native, remoted, ratio, aim, met] in step.rows() {
                text.push_str(&format!("  {name:<56} {native:>9} {remoted:>9} {ratio:>7}  {aim}: {met}\n"));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;
    use sluice_tests::paths::Binaries;
    use sluice_tests::toolchain::Toolkit;

    use super::*;

    /// The part of a rehearsal that this machine lacks, if any.
    fn missing(binaries: &Binaries) -> Result<()> {
        for (_, name) in pack::files() {
            binaries.get(name)?;
        }
        ensure!(works("strip", ["--version"]), "no program strip (Debian package binutils)");
        Toolkit::fetch().map(drop)
    }

    /// The whole way from the built files to the results.
    #[test]
    fn packed_bundle_passes_its_short_rehearsal_on_the_software_gpu() {
        rehearse_bundle(Length::Short);
    }

    #[test]
    #[ignore = "for the full tier"]
    fn packed_bundle_passes_its_whole_rehearsal_on_the_software_gpu() {
        rehearse_bundle(Length::Full);
    }

    fn rehearse_bundle(length: Length) {
        let binaries = Binaries::locate().unwrap();
        if let Err(error) = missing(&binaries) {
            return sluice_skip::skip(&format!("{error:#}"));
        }
        let folder = tempfile::tempdir().unwrap();
        let packed = pack::fill(&binaries, &folder.path().join("bundle"), "of a test").unwrap();
        let rehearsal = rehearse(&packed, &folder.path().join("out"), length).unwrap();
        assert!(rehearsal.problems.is_empty(), "{}\n{}", rehearsal.table(), rehearsal.problems.join("\n"));
        assert!(packed.programs >= 30);
    }

    #[test]
    fn run_is_judged_by_its_outcomes_and_its_programs() {
        let header = "{\"kind\":\"header\",\"software_gpu\":true}\n";
        let question = "{\"kind\":\"step\",\"phase\":\"questions\",\"name\":\"q\",\"outcome\":\"refused\"}\n";
        let program = "{\"kind\":\"step\",\"phase\":\"programs\",\"name\":\"p\",\"outcome\":\"answered\",\
                       \"answer\":{\"equal\":true,\"passed\":true}}\n";
        let verdict = "{\"kind\":\"verdict\",\"orderly\":true}\n";
        let custody = "{\"kind\":\"step\",\"phase\":\"custody\",\"name\":\"c\",\"outcome\":\"answered\",\
                       \"answer\":{\"verdict\":\"held\"}}\n";
        let measured = |phase: &str| {
            format!(
                "{{\"kind\":\"step\",\"phase\":\"{phase}\",\"name\":\"m\",\"outcome\":\"answered\",\
                 \"answer\":{{\"rows\":[{{\"name\":\"a\"}}]}}}}\n"
            )
        };
        let rest = [custody, &measured("time"), &measured("bench"), &measured("frameworks")].concat();
        let problems_of = |rest: &str, parts: &[&str], programs| {
            judged(runs::parsed(&[&parts.concat(), rest].concat()).first(), programs)
        };
        let problems = |parts: &[&str], programs| {
            problems_of(if parts.is_empty() { "" } else { &rest }, parts, programs)
        };
        assert!(problems(&[header, question, program, verdict], 1).is_empty());
        assert_eq!(problems(&[header, question, program, verdict], 2).len(), 1);
        assert_eq!(problems(&[header, question, program], 1), ["the run was cut off"]);
        assert_eq!(problems(&[header, program, verdict], 1), ["the run has no step of questions"]);
        let failed = question.replace("refused", "crashed");
        assert_eq!(problems(&[header, &failed, program, verdict], 1).len(), 1);
        let failed = program.replace("\"passed\":true", "\"passed\":false");
        assert_eq!(problems(&[header, question, &failed, verdict], 1).len(), 2);
        let hardware = header.replace("true", "false");
        assert_eq!(problems(&[&hardware, question, program, verdict], 1).len(), 1);
        assert_eq!(problems(&[], 0), ["the run has no results"]);
        let all = [header, question, program, verdict];
        assert_eq!(problems_of(&rest.replace("held", "open"), &all, 1), ["c: no verdict"]);
        assert_eq!(problems_of(&rest.replace("[{\"name\":\"a\"}]", "[]"), &all, 1).len(), 2);
        assert_eq!(problems_of("", &all, 1).len(), 4);
    }
}
