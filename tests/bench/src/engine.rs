//! Kernels on the software GPU's engine, as machine code, interpreted and as native loops, in turns. Its own program measures them.

use crate::measure::{Rounds, Samples, is_wanted};
use anyhow::{Context as _, Result, ensure};
use sluice_tests::{
    paths::Binaries,
    performance::{
        Measured,
        table::{ENGINE, wants_engine},
    },
};
use std::{collections::BTreeMap, process::Command};

const ROUNDS: usize = 3;

/// Every row whose name contains one of `filter`, or all. None is measured if the program, an example of its crate, is not built.
pub(crate) fn measure_all(binaries: &Binaries, filter: &[String]) -> Result<Vec<Measured>> {
    if !wants_engine(filter) {
        return Ok(Vec::new());
    }
    let program = binaries.folder().join("examples/bench");
    if !program.exists() {
        eprintln!("not measured: {ENGINE} without `cargo build --release --workspace --example bench`");
        return Ok(Vec::new());
    }
    let milliseconds = |machine_code: &str, arguments: &[&str]| -> Result<BTreeMap<String, Vec<f64>>> {
        let mut command = Command::new(&program);
        command.arg("--json").args(arguments).env("SLUICE_SOFTGPU_JIT", machine_code);
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).context("the engine's figures")
    };
    let mut kernels: BTreeMap<String, Rounds> = BTreeMap::new();
    for _ in 0..ROUNDS {
        let yardsticks = [("", milliseconds("0", &[])?), ("native/", milliseconds("1", &["--native"])?)];
        for (kernel, own) in milliseconds("1", &[])? {
            for (family, others) in &yardsticks {
                // A processor without the vector instructions has no native loops.
                let Some(other) = others.get(&kernel) else { continue };
                let [own, other] = [&own, other].map(|milliseconds| {
                    let mut samples = Samples::default();
                    samples.extend(milliseconds.iter().map(|milliseconds| milliseconds * 1e6).collect());
                    samples
                });
                kernels.entry(format!("{ENGINE}{family}{kernel}")).or_default().push(own, other);
            }
        }
    }
    let rows = kernels.iter().map(|(name, rounds)| rounds.row(name));
    Ok(rows.collect::<Result<Vec<_>>>()?.into_iter().filter(|row| is_wanted(filter, &row.name)).collect())
}
