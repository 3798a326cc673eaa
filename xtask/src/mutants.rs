//! `cargo xtask mutants`: lets the vendor's assembler and ours check mutants of PTX, and names those on which they disagree.

use anyhow::Result;
use clap::Args;
use sluice_tests::mutants::{self, Corpus, Difference};
use sluice_tests::toolchain::Toolkit;

use crate::cargo::build_release;

/// Let the vendor's assembler and that of the software GPU check mutants of PTX, and compare their verdicts.
#[derive(Debug, Args)]
pub(crate) struct MutantOptions {
    /// Number of mutants.
    #[arg(long, default_value_t = 100_000)]
    count: u64,
    /// Number of the first mutant.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Print the text of one mutant, and compare none.
    #[arg(long, value_name = "NUMBER")]
    show: Option<u64>,
    /// Part of the mutants with the same verdict at which the command succeeds.
    #[arg(long, default_value_t = 0.995)]
    least: f64,
}

/// Compares; false if too many verdicts differ.
pub(crate) fn run(options: &MutantOptions) -> Result<bool> {
    if let Some(number) = options.show {
        print!("{}", Corpus::read()?.mutant(number));
        return Ok(true);
    }
    let (vendor, ours) = (Toolkit::fetch()?.assembler(), build_release()?.get("softgpu-ptxas")?);
    let numbers = options.first..options.first.saturating_add(options.count);
    let found = mutants::compare(&vendor, &ours, numbers)?;
    for Difference { number, messages: [theirs, message], valid } in &found.differences {
        let verdict = if *valid { "valid" } else { "invalid" };
        println!("{number}: {verdict} for the vendor ({theirs}), not for us ({message})");
    }
    println!(
        "{} mutants, {} valid for the vendor's assembler; the verdicts differ on {}, and agree on {:.2} %",
        found.count,
        found.valid,
        found.differences.len(),
        found.agreement() * 100.0
    );
    Ok(found.agreement() >= options.least)
}
