//! The benchmarks: times as ratios to a yardstick of the same run.
//!
//! This program starts itself again as a guest program under `sluice run`, on a driver that does nothing, so that only Sluice is
//! measured. Each row and its yardstick are measured there in turns, round after round, so that other load of the machine hits
//! both. The rows of custody are measured on the software GPU ([`custody`]), those of the control plane on a daemon with five
//! hundred VMs ([`control`]). With `--vm` the rows are the additional cost of virtual machines ([`machines`]).

mod arbiter;
mod control;
mod cuda;
mod custody;
mod machines;
mod measure;
mod peer;
mod rows;
mod turns;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sluice_tests::paths::Binaries;
use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// A result: `ratio` = `value` / `baseline_value`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    name: String,
    value: f64,
    unit: String,
    p99: f64,
    baseline: String,
    baseline_value: f64,
    ratio: f64,
    /// `lower` or `higher`.
    better: String,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("client") => {
            let filter = arguments.get(2..).unwrap_or_default();
            let rows = rows::measure_all(filter)?;
            let file = arguments.get(1).context("client FILE")?;
            std::fs::write(file, serde_json::to_vec(&rows)?)?;
            Ok(())
        }
        Some("peer") => peer::run(arguments.get(1..).unwrap_or_default()),
        Some("turns") => turns::serve(),
        Some("scrub") => arbiter::print_scrub_rates(),
        Some("start") => rows::print_session_start(),
        Some("launches") => rows::launch(arguments.get(1).context("launches NUMBER")?.parse()?),
        _ => orchestrate(&arguments),
    }
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
    let me = env::current_exe()?;
    let folder = me.parent().context("a program lies in a folder")?;
    let binaries = Binaries::at(folder.to_path_buf());
    let rows = if machines {
        machines::measure_all(&binaries, &me, &filter)?
    } else {
        let mut rows = without_a_machine(&binaries, &me, &filter)?;
        rows.extend(custody::measure_all(&binaries, &me, &filter)?);
        rows.extend(control::measure_all(&binaries, &me, &filter)?);
        rows
    };
    println!(
        "{:<34} {:>12} {:>9} {:>12}   {:<22} {:>12} {:>8}",
        "row", "value", "unit", "p99", "yardstick", "its value", "ratio"
    );
    for row in &rows {
        let Row { name, value, unit, p99, baseline, baseline_value, ratio, .. } = row;
        println!(
            "{name:<34} {value:>12.3} {unit:>9} {p99:>12.3}   {baseline:<22} {baseline_value:>12.3} {ratio:>8.3}"
        );
    }
    if let Some(json) = json {
        std::fs::write(&json, serde_json::to_vec_pretty(&rows)?)
            .with_context(|| format!("writing {}", json.display()))?;
    }
    Ok(())
}

/// The rows of a guest program without a machine.
fn without_a_machine(binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Row>> {
    let results = tempfile::NamedTempFile::new()?;
    let status = Command::new(binaries.get("sluice")?)
        .arg("run")
        .arg("--driver")
        .arg(binaries.get("libsluice_null_driver.so")?)
        .arg("--")
        .arg(me)
        .arg("client")
        .arg(results.path())
        .args(filter)
        .status()
        .context("starting sluice run")?;
    ensure!(status.success(), "the benchmark program failed: {status}");
    Ok(serde_json::from_slice(&std::fs::read(results.path())?)?)
}
