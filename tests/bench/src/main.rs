//! The benchmarks: times as ratios to a yardstick of the same run.
//!
//! This program starts itself again as a guest program under `sluice run`, on a driver that does nothing, so that only Sluice is
//! measured. Each row and its yardstick are measured there in turns, round after round, so that other load of the machine hits
//! both, and neither runs while the other is timed. The names of all rows stand in `sluice_tests::performance::table`.
//!
//! The rows of sessions, of functions of the program and of custody are measured on the software GPU ([`session`], [`custody`]), those of
//! whole programs on both drivers ([`program`]), those of the control plane on a daemon with five hundred VMs ([`control`]). With `--vm`
//! the rows are the additional cost of virtual machines ([`machines`]).

mod arbiter;
mod control;
mod cuda;
mod custody;
mod engine;
mod gaps;
mod machines;
mod measure;
mod peer;
mod program;
mod rows;
mod scale;
mod serve;
mod session;
mod threads;
mod turns;
mod waits;

use anyhow::{Context as _, Result, bail, ensure};
use sluice_tests::{
    paths::Binaries,
    performance::{BenchRun, Machine, Measured},
};
use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("client") => write(&arguments, rows::measure_all),
        Some("sessions") => write(&arguments, session::measure_all),
        Some("peer") => peer::run(arguments.get(1..).unwrap_or_default()),
        Some("turns") => serve::serve(),
        Some("scrub") => arbiter::print_scrub_rates(),
        Some("start") => session::print_start(),
        Some("steps") => session::print_steps(),
        Some("failing") => rows::launch_failing(arguments.get(1).context("failing KERNEL")?),
        Some("launches") => rows::launch(arguments.get(1).context("launches NUMBER")?.parse()?),
        _ => orchestrate(&arguments),
    }
}

/// Measures rows in a guest program, for the process that started it: `MODE FILE [NAME PART]...`.
fn write(arguments: &[String], measure: impl Fn(&[String]) -> Result<Vec<Measured>>) -> Result<()> {
    let file = arguments.get(1).context("a file")?;
    measure::settle()?;
    let rows = measure(arguments.get(2..).unwrap_or_default())?;
    std::fs::write(file, serde_json::to_vec(&rows)?).with_context(|| format!("writing {file}"))
}

fn orchestrate(arguments: &[String]) -> Result<()> {
    let (mut json, mut filter, mut machines) = (None, Vec::new(), false);
    let mut left = arguments.iter();
    while let Some(argument) = left.next() {
        match argument.as_str() {
            "--vm" => machines = true,
            "--json" => json = Some(PathBuf::from(left.next().context("--json FILE")?)),
            "--help" | "-h" => {
                println!("usage: sluice-bench [--vm] [--json FILE] [NAME PART]...");
                return Ok(());
            }
            flag if flag.starts_with('-') => bail!("unknown option {flag}"),
            part => filter.push(part.to_owned()),
        }
    }
    let (machine, start) = (json.is_some().then(Machine::now).transpose()?, Instant::now());
    let me = env::current_exe()?;
    let folder = me.parent().context("a program lies in a folder")?;
    let binaries = Binaries::at(folder.to_path_buf());
    let rows = if machines {
        machines::measure_all(&binaries, &me, &filter)?
    } else {
        let mut rows = without_a_machine(&binaries, &me, &filter)?;
        rows.extend(in_guest(Command::new(binaries.get("sluice")?).arg("run"), &me, "sessions", &filter)?);
        rows.extend(program::measure_all(&binaries, &me, &filter)?);
        rows.extend(custody::measure_all(&binaries, &me, &filter)?);
        rows.extend(control::measure_all(&binaries, &me, &filter)?);
        rows.extend(engine::measure_all(&binaries, &filter)?);
        rows
    };
    rows.iter().for_each(print);
    if let (Some(json), Some(machine)) = (json, machine) {
        let run = BenchRun { machine, seconds: start.elapsed().as_secs_f64(), rows };
        std::fs::write(&json, run.json()?).with_context(|| format!("writing {}", json.display()))?;
    }
    Ok(())
}

fn print(row: &Measured) {
    let Measured { name, unit, value, p99, p999, yardstick } = row;
    print!("{name:<34} {value:>12.3} {unit:>9}  p99 {p99:>12.3}  p99.9 {p999:>12.3}");
    match yardstick {
        None => println!(),
        Some(other) => println!(
            "  {:<24} {:>12.3}  p99 {:>12.3}  p99.9 {:>12.3}  ratio {:>8.3} ({:.3} to {:.3})",
            other.name, other.value, other.p99, other.p999, other.ratio, other.ratio_low, other.ratio_high
        ),
    }
}

/// The rows of calls, on the driver that does nothing.
fn without_a_machine(binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Measured>> {
    let mut command = Command::new(binaries.get("sluice")?);
    command.arg("run").arg("--driver").arg(binaries.get("libsluice_null_driver.so")?);
    in_guest(&mut command, me, "client", filter)
}

/// The rows of a guest program without a machine, which a command starts.
fn in_guest(command: &mut Command, me: &Path, mode: &str, filter: &[String]) -> Result<Vec<Measured>> {
    let results = tempfile::NamedTempFile::new()?;
    let status = command.arg("--").arg(me).arg(mode).arg(results.path()).args(filter).status();
    let status = status.context("starting sluice run")?;
    ensure!(status.success(), "the benchmark program failed: {status}");
    Ok(serde_json::from_slice(&std::fs::read(results.path())?)?)
}
